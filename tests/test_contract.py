"""What docs/contract.md says is refused is refused on every rank, in the words that it prints."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import composable_shard
from composable_shard import fully_shard
from tests.harness.ranks import run_ranks

PAGE = Path(__file__).parent.parent / "docs" / "contract.md"
_REFUSED = PAGE.read_text().partition("## What is refused")[2]
ROWS = re.findall(r"(?m)^\| `(.+)` \| `(.+)` \|$", _REFUSED)


def _run_refused(program: str, words: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 8)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    names = {name: getattr(composable_shard, name) for name in composable_shard.__all__}
    names |= {"model": model, "layer": model[0], "weight": model[0].weight, "x": x}
    names["optimizer"] = optimizer
    names |= {"torch": torch, "nn": nn, "file": io.BytesIO()}

    def closure() -> torch.Tensor:
        loss: torch.Tensor = model(x).sum()
        loss.backward()
        return loss

    names["closure"] = closure
    with pytest.raises((RuntimeError, ValueError, TypeError), match=re.escape(words)):
        exec(program, names)


@pytest.mark.parametrize(("program", "words"), ROWS, ids=[program for program, _ in ROWS])
def test_refused_as_printed(program: str, words: str) -> None:
    """On both of two ranks, after a step that was right."""
    run_ranks(2, _run_refused, program, words)


def test_the_table_is_there() -> None:
    """A page that is written anew still says what is refused."""
    assert len(ROWS) > 12
