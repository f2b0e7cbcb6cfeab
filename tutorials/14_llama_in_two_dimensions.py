"""Hugging Face's Llama: tensor parallelism, checkpointing, compile and sharding on four ranks.

    pip install transformers
    torchrun --standalone --nproc-per-node 4 tutorials/14_llama_in_two_dimensions.py

The order matters. Tensor parallelism first cuts the matrices of each layer over two ranks. Then
each layer is compiled, and wrapped to compute its activations again in backward. `fully_shard`
comes last: it shards what the layer has by then, over the other axis of the mesh.

Expected output:

    step 0  loss 4.1828, of the plain model 4.1828
    step 1  loss 4.1763, of the plain model 4.1763
    step 2  loss 4.1855, of the plain model 4.1855
    this rank holds 29,344 of 108,864 parameters
"""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from composable_shard import fully_shard

STEPS, BATCH, LENGTH = 3, 4, 16

# Attention and MLP each take one all-reduce in forward: columns first, rows second.
PLAN = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def make_model() -> LlamaForCausalLM:
    """Return a small Llama, the same on every rank; a real one: `from_pretrained(name)`."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            use_cache=False,
        )
    )


def shard(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    """Cut, compile, wrap and shard each layer; then shard the rest."""
    layers: nn.ModuleList = model.model.layers
    for index, layer in enumerate(layers):
        parallelize_module(layer, mesh["tp"], PLAN)
        # In place: the module stays the same object. One graph for each layer, with the gathers of
        # its parameters outside of it; the whole model as one graph is refused.
        layer.compile(backend="aot_eager")  # leave `backend` out for the fastest code
        # Around what is compiled: torch 2.13 can't compile a checkpoint of DTensors.
        layers[index] = checkpoint_wrapper(layer)
        fully_shard(layers[index], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])  # embedding, last norm and head


def make_batch(step: int, data_rank: int) -> Tensor:
    """Return the tokens of a data-parallel rank, (BATCH, LENGTH); the ranks of `tp` share them."""
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    return torch.randint(64, (BATCH, LENGTH), generator=generator)


def main() -> None:
    """Train beside the plain model, which sees the tokens of all data-parallel ranks."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make_model()
    plain = copy.deepcopy(model)
    num_params = sum(param.numel() for param in plain.parameters())
    shard(model, mesh)
    # After sharding: it steps what this rank holds.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step in range(STEPS):
        tokens = make_batch(step, mesh.get_local_rank("dp"))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        everything = torch.cat([make_batch(step, rank) for rank in range(2)])
        expected = plain(input_ids=everything, labels=everything).loss
        expected.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        mean /= dist.get_world_size()
        torch.testing.assert_close(mean, expected.detach(), rtol=1e-5, atol=1e-5)
        if dist.get_rank() == 0:
            print(f"step {step}  loss {mean:.4f}, of the plain model {expected:.4f}", flush=True)
    if dist.get_rank() == 0:
        held = sum(param.to_local().numel() for param in model.parameters())
        print(f"this rank holds {held:,} of {num_params:,} parameters")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
