"""Errors of thousands of ranks: each names some of them, and says how many there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from composable_shard.comm.agreement import _raise_difference, join_problems
from composable_shard.comm.host_group import _join_problems
from composable_shard.comm.step_digest import _describe_difference
from composable_shard.comm.watch import _describe_missing, _find_difference

_NUM_RANKS = 4096
_Texts = Sequence[str]  # what each rank says


def _agree(texts: _Texts) -> str:
    found = join_problems([[rank, "ValueError", text] for rank, text in enumerate(texts)])
    assert found is not None
    assert found[:2] == [0, "ValueError"]
    return str(found[2])


def _agree_in_background(texts: _Texts) -> str:
    """Each text comes once, with its ranks."""
    told: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        told.setdefault(text, []).append(rank)
    found = _join_problems([(["ValueError", text], ranks) for text, ranks in told.items()])
    assert found is not None
    return str(found[2])


def _compare_units(texts: _Texts) -> str:
    with pytest.raises(RuntimeError) as caught:
        _raise_difference([[text] for text in texts])
    return str(caught.value)


def _compare_steps(texts: _Texts) -> str:
    return str(_describe_difference([[text] for text in texts], range(len(texts)), is_late=False))


def _statement(text: str, number: int = 0) -> dict[str, Any]:
    where = {"where": "train.py:7", "since": "12:00:00", "function": ""}
    return {"groups": {"0": [(number, 1, text)]}, "answers": 1, **where}


def _compare_order(texts: _Texts) -> str:
    return str(_find_difference("0", {i: _statement(text) for i, text in enumerate(texts)}))


def _wait_for_all(texts: _Texts) -> str:
    """Rank 0 waits; the others are at an earlier collective."""
    statements = {i: _statement(text, number=not i) for i, text in enumerate(texts)}
    return _describe_missing("0", range(len(texts)), statements, [], "timed out")


_JOINS: list[Callable[[_Texts], str]] = [
    *(_agree, _agree_in_background, _compare_units, _compare_steps, _compare_order, _wait_for_all)
]


@pytest.mark.parametrize("join", _JOINS)
def test_an_error_of_all_ranks_is_short(join: Callable[[_Texts], str]) -> None:
    """Where each says something else, as with its number in the name of a file."""
    text = join([f"no space left for file {rank} of {_NUM_RANKS}" for rank in range(_NUM_RANKS)])
    assert len(text) < 2000
    assert "file 0 of" in text
    assert "file 1 of" in text
    shown = sum(f"file {rank} of" in text for rank in range(_NUM_RANKS))
    assert f"and {_NUM_RANKS - shown} more" in text


@pytest.mark.parametrize("join", [each for each in _JOINS if each is not _wait_for_all])
def test_ranks_that_say_the_same_are_counted(join: Callable[[_Texts], str]) -> None:
    """One that differs is named, wherever it is."""
    text = join(["full" if rank == 4000 else "busy" for rank in range(_NUM_RANKS)])
    assert len(text) < 1000
    assert "4000" in text
    assert "full" in text
    assert f"and {_NUM_RANKS - 1 - 16} more" in text
    assert text.count("busy") == 1


def test_ranks_that_are_gone_are_named_first() -> None:
    """Among thousands that did not come because of them."""
    statements = {rank: _statement("a gather", number=not rank) for rank in range(_NUM_RANKS)}
    statements[3000]["ended"] = "has ended with MemoryError"
    text = _describe_missing("0", range(_NUM_RANKS), statements, [4000], "timed out")
    assert "rank 3000 has ended with MemoryError" in text
    assert "rank 4000 is gone" in text
    assert len(text) < 2000


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_few_ranks_are_all_named(num_ranks: int) -> None:
    """Nothing is left out."""
    for join in _JOINS:
        text = join([f"file {rank}" for rank in range(num_ranks)])
        assert " more" not in text.replace("nothing more", "")
        assert all(f"file {rank}" in text for rank in range(num_ranks))
