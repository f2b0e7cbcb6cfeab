"""Fine-tune a Hugging Face directory with low-rank adapters (LoRA), merge them, and write it back.

    torchrun --standalone --nproc-per-node 2 tutorials/09_finetune_with_lora.py
    python tutorials/09_finetune_with_lora.py                 # one rank

Adapters go in before sharding; then each rank reads its own part of the file. The frozen base has
no gradients and no optimizer state, and nothing of it is reduced.

Expected output (two ranks):

    trained parameters: 2,728
    reduced in a step: 10,944 bytes
    loss before 5.55, after 30 steps 5.20
    the merged model, in one process, has a loss of 5.20
"""

from pathlib import Path

import torch
import torch.distributed as dist
from language_model import ModelConfig, Transformer, sequence_loss
from ranks import join, leave, say
from safetensors.torch import save_file
from torch import Tensor, nn

from composable_shard import (
    count_collectives,
    fully_shard,
    load_safetensors,
    unshard_params,
)

CONFIG = ModelConfig(layers=2, dim=64, head_dim=16, max_length=32)
RANK, STEPS = 4, 30


class Adapted(nn.Module):
    """A frozen linear layer, and two narrow matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, base.in_features) / 10)
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        return self.base(x) + x @ self.down.T @ self.up.T


def merge(model: Transformer, plain: Transformer) -> None:
    """Copy a model with adapters into one without."""
    values = {name.replace(".base.", "."): value for name, value in model.state_dict().items()}
    plain.load_state_dict(values, strict=False)
    for name, module in model.named_modules():
        if isinstance(module, Adapted):
            plain.get_submodule(name).weight += module.up @ module.down


def adapt(model: Transformer) -> None:
    """Freeze the model, and put adapters around two matrices of each layer."""
    model.requires_grad_(False)
    for layer in model.layers:
        layer.attention.out = Adapted(layer.attention.out)
        layer.mlp.down = Adapted(layer.mlp.down)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """Return the loss on a batch: bytes that count up in steps of three."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    first = torch.randint(256, (8, 1), generator=draw)
    return sequence_loss(model, (first + 3 * torch.arange(CONFIG.max_length + 1)) % 256)


def train(model: nn.Module, trained: list[nn.Parameter], rank: int) -> int:
    """Train the adapters; return the bytes that were reduced."""
    optimizer = torch.optim.AdamW(trained, lr=3e-2)
    with count_collectives() as log:
        for step in range(STEPS):
            loss_of(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
    return log.nbytes("reduce_scatter")


def main() -> None:
    """Write a directory, adapt what it has, train, merge and export."""
    rank, _ = join()
    if rank == 0:  # as if downloaded
        Path("pretrained").mkdir(exist_ok=True)
        save_file(Transformer(CONFIG).state_dict(), "pretrained/model.safetensors")
    dist.barrier()

    torch.manual_seed(0)  # adapters begin with the same values on all ranks
    model = Transformer(CONFIG)
    adapt(model)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    names = {name: name.replace(".base.", ".") for name, _ in model.named_parameters()}
    load_safetensors(model, "pretrained", names=names, strict=False)  # no file has adapters
    trained = [param for param in model.parameters() if param.requires_grad]
    say(f"trained parameters: {sum(param.numel() for param in trained):,}")
    with torch.no_grad():
        before = loss_of(model, STEPS, 0)
    say(f"reduced in a step: {train(model, trained, rank) // STEPS:,} bytes")
    with torch.no_grad():
        after = loss_of(model, STEPS, 0)
    say(f"loss before {before:.2f}, after {STEPS} steps {after:.2f}")

    exported = Transformer(CONFIG)
    with unshard_params(model, writeback=False, rank0_only=True), torch.no_grad():
        if rank == 0:
            merge(model, exported)
    say(f"the merged model, in one process, has a loss of {loss_of(exported, STEPS, 0):.2f}")
    leave()


if __name__ == "__main__":
    main()
