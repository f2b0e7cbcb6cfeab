"""Pipeline x data x tensor parallelism on eight ranks, one checkpoint, and back on one rank.

    torchrun --standalone --nproc-per-node 8 tutorials/06_three_dimensions.py

Torch cuts the model into stages, and each layer's matrices over the tensor-parallel ranks. Then
`fully_shard` shards a rank's part over the data-parallel ranks. `PipelineStage` of this library
reduces each unit once a step, not once a microbatch. All ranks save one directory.

Expected output:

    step 0  loss 0.1469
    step 1  loss 0.1173
    step 2  loss 0.1027
    this rank holds 1,056 of 8,384 parameters
    a plain model with the checkpoint has the same loss
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composable_shard import clip_grad_norm_, fully_shard, load_checkpoint, save_checkpoint
from composable_shard.pipelining import PipelineStage

DIM, BATCH, MICROBATCHES, STEPS = 32, 32, 4, 3


class Layer(nn.Module):
    """A residual layer of two matrices, (B, D) to (B, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, D) to (B, D)."""
        return x + self.down(F.gelu(self.up(x)))


def make_model() -> nn.ModuleDict:
    """Return the plain model: two stages of one layer each, the same on every rank."""
    torch.manual_seed(0)
    return nn.ModuleDict({"stage0": nn.Sequential(Layer()), "stage1": nn.Sequential(Layer())})


def shard(part: nn.Sequential, mesh: DeviceMesh) -> None:
    """Split matrices over `tp`, then share what each rank has of them over `dp`."""
    for layer in part:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)


def make_batch(step: int, data_rank: int) -> Tensor:
    """Return what a data-parallel rank trains on, the same in the other axes."""
    return torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(10 * step + data_rank))


def loss_of(output: Tensor, x: Tensor) -> Tensor:
    """Return how far the output is from the input, moved by one."""
    return F.mse_loss(output, x.roll(1, -1) / 2) / 10


def run(step: Callable[..., Any], index: int, x: Tensor) -> list[Tensor]:
    """Run a schedule, on the first stage from x; return the microbatches' losses on the last."""
    losses: list[Tensor] = []
    step(*([] if index else [x]), **({"target": x, "losses": losses} if index else {}))
    return losses


def main() -> None:
    """Train three steps, save, and load into a plain model."""
    dist.init_process_group("gloo")
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch's pipelines
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    index, data_rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    say = print if dist.get_rank() == dist.get_world_size() - 1 else lambda *_: None
    whole, name = make_model(), f"stage{index}"
    num_params, part = sum(param.numel() for param in whole.parameters()), whole[name]
    shard(part, mesh)
    stage = PipelineStage(part, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
    for step in range(STEPS):
        x = make_batch(step, data_rank)
        losses = run(schedule.step, index, x)
        clip_grad_norm_(part, 1.0)  # over all stages, shards and halves
        optimizer.step()
        optimizer.zero_grad()
        if losses:  # of the microbatches, on the last stage
            mean = torch.stack(losses).mean().detach() / 2
            dist.all_reduce(mean, group=mesh["dp"].get_group())
            say(f"step {step}  loss {mean.item():.4f}")
    held = sum(param.to_local().numel() for param in part.parameters())
    say(f"this rank holds {held:,} of {num_params:,} parameters")

    save_checkpoint("three_dimensions", nn.ModuleDict({name: part}), step=STEPS)
    x = make_batch(STEPS, data_rank)
    losses = run(schedule.eval, index, x)
    plain = make_model()
    load_checkpoint("three_dimensions", plain)
    if index:
        loss = loss_of(plain["stage1"](plain["stage0"](x)), x)
        torch.testing.assert_close(loss, torch.stack(losses).mean())
        say("a plain model with the checkpoint has the same loss")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
