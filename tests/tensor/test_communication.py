"""Which ops on a FlatShard communicate: what the documentation's table says, tested."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from composable_shard import Block, fully_shard
from composable_shard.comm.trace import count_collectives
from composable_shard.options import Granularity
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed

PAGE = Path(__file__).parents[2] / "docs" / "shard_operations.md"


def _documented() -> list[tuple[str, int]]:
    """Return the ops of the table, and how many collectives it says."""
    rows = re.findall(r"(?m)^\| (.*) \| (\d) \|$", PAGE.read_text())
    return [(code, int(number)) for ops, number in rows for code in re.findall("`([^`]+)`", ops)]


# These ask for NaN first, `isnan().any()`, since torch 2.14.
_ASKING_FIRST = {"p.quantile(0.5)"} if torch.__version__ >= (2, 14) else set()
# Of a comparison's result, which is no parameter, one rank would get the value.
_RAISING = {
    "param": {"(p > 0).any()", "(p > 0).all()", "torch._foreach_norm([p, p])"} | _ASKING_FIRST,
}


@pytest.mark.parametrize("granularity", ["element", "row", Block(8), "param"])
@distributed(2)
def test_scope_the_table_says_which_ops_communicate(granularity: Granularity) -> None:
    """Scope: the number of collectives, and the value of a plain tensor, for every granularity."""
    torch.manual_seed(0)
    plain = nn.Linear(5, 7, bias=False)
    sharded = fully_shard(copy.deepcopy(plain), granularity=granularity)
    assert len(_documented()) > 30
    for code, expected in _documented():
        values = {}
        for name, model in (("plain", plain), ("sharded", sharded)):
            p = model.weight.detach()
            known = {"p": p, "q": p.clone(), "torch": torch, "copy": copy, "pickle": pickle}
            if code in _RAISING.get(str(granularity), ()) and model is sharded:
                with pytest.raises(RuntimeError, match='granularity="param"'):
                    eval(code, known)
                continue
            if model is plain and ("full_tensor" in code or "to_local" in code):
                continue
            torch.manual_seed(1)
            with count_collectives() as log:
                values[name] = eval(code, known)
            # A parameter of one owner is broadcast by itself.
            is_pair = granularity == "param" and code.endswith("(p, q)")
            is_asking = code in _ASKING_FIRST
            number = (expected + is_pair + is_asking) if model is sharded else 0
            assert len(log.events) == number, f"{code}: {log.events}"
        if "plain" in values and "sharded" in values and not isinstance(values["plain"], str):
            _assert_alike(values["plain"], values["sharded"], code)


def _assert_alike(plain: object, ours: object, code: str) -> None:
    if isinstance(plain, list | tuple) and not isinstance(plain, torch.Size):
        assert isinstance(ours, list | tuple)
        for first, second in zip(plain, ours, strict=True):
            _assert_alike(first, second, code)
    elif isinstance(plain, Tensor):
        assert isinstance(ours, Tensor)
        whole = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        torch.testing.assert_close(whole, plain, msg=lambda text: f"{code}: {text}")
    elif not isinstance(plain, bytes):
        assert plain == ours, code


@distributed(2)
def test_what_communicates_is_the_same_under_every_granularity() -> None:
    """The gradients of a model of parameters that are cut, and of whole ones, clipped together."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(model[0], granularity="param")
    fully_shard(model)
    model(torch.ones(2, 5)).sum().backward()
    norms = [param.norm() for param in model.parameters()]
    assert_equal(
        torch.stack(norms), torch.stack([p.full_tensor().norm() for p in model.parameters()])
    )
