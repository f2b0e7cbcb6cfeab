"""Models whose state dicts have other names than their parameters, as of fused projections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from composable_shard import (
    fully_shard,
    get_optimizer_state_dict,
    load_checkpoint,
    save_checkpoint,
)
from tests.harness.ranks import distributed


class Fused(nn.Module):
    """Two projections in one weight, which state dicts have apart."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(6, 8)
        self.head = nn.Linear(4, 3)
        self.register_state_dict_post_hook(_split)
        self.register_load_state_dict_pre_hook(_join)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the two halves."""
        first, second = self.both(x).chunk(2, dim=-1)
        output: Tensor = self.head(first * second)
        return output


def _split(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    for name in ("weight", "bias"):
        halves = state.pop(f"{prefix}both.{name}").chunk(2)
        state[f"{prefix}first.{name}"], state[f"{prefix}second.{name}"] = halves


def _join(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for name in ("weight", "bias"):
        halves = [state.pop(f"{prefix}{half}.{name}") for half in ("first", "second")]
        state[f"{prefix}both.{name}"] = torch.cat(halves)


def _made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Fused()
    fully_shard(model.both)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _step_on_batch(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    seed = torch.Generator().manual_seed(10 * number + dist.get_rank())
    model(torch.randn(4, 6, generator=seed)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["ours", "dcp"])
@distributed(2)
def test_a_run_with_split_names_resumes(kind: str, tmp_path: Path) -> None:
    """Model and optimizer, from our checkpoint and from one of DCP with the names of hooks."""
    model, optimizer = _made(0)
    _step_on_batch(model, optimizer, 0)
    if kind == "ours":
        save_checkpoint(tmp_path / "run", model, optimizer, step=1)
    else:
        of_optimizer = get_optimizer_state_dict(model, optimizer)
        state = {"model": model.state_dict(), "optimizer": of_optimizer, "step": 1}
        dcp.save(state, checkpoint_id=tmp_path / "run")
    other, optimizer_of_other = _made(1)
    load_checkpoint(tmp_path / "run", other, optimizer_of_other)
    for number in (1, 2):
        _step_on_batch(model, optimizer, number)
        _step_on_batch(other, optimizer_of_other, number)
    for name, param in model.named_parameters():
        assert torch.equal(other.get_parameter(name).full_tensor(), param.full_tensor()), name
