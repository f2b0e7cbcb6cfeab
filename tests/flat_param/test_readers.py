"""The ledger of who may still read full values: its rules, its events, and the page about it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from composable_shard import FlatShard, fully_shard, get_handles
from composable_shard.flat_param import FlatParamHandle, FullState
from composable_shard.flat_param.full_values import FullValues
from composable_shard.flat_param.readers import (
    BACKWARD,
    CONVERSION,
    FORWARD,
    GRAPH,
    HELD,
    HIDDEN_ALIAS,
    LATE_GRAPH,
    NESTED,
    RESHARD,
    RULES,
    WRITE,
    Readers,
    Rule,
)
from composable_shard.runtime import release_handle
from tests.harness.ranks import distributed

pytestmark = pytest.mark.fast

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
kinds = pytest.mark.parametrize("kind", [0, *RULES])  # 0: nobody
ENTERED = GRAPH | LATE_GRAPH | HIDDEN_ALIAS | NESTED


def _row(rule: Rule) -> str:
    until = " or ".join(rule.ends_with) or "nothing ends it"
    shown, memory = ("yes" if flag else "no" for flag in (rule.keeps_shown, rule.keeps_memory))
    cells = [rule.name, rule.enters, shown, memory, until]
    return f"| {' | '.join(cells)} |"


def test_the_page_has_the_rules() -> None:
    """Each kind is a row; to correct the page, copy what this test expects."""
    rows = [
        "| reader | is entered | modules show full values | their memory stays | until |",
        "|---|---|---|---|---|",
        *map(_row, RULES.values()),
    ]
    assert "\n".join(rows) in PAGE.read_text()


@pytest.mark.parametrize("event", [WRITE, RESHARD, BACKWARD, CONVERSION])
def test_an_event_takes_out_the_kinds_whose_rule_names_it(event: str) -> None:
    """And no other, and no claim."""
    readers = Readers()
    readers.add(ENTERED)
    readers.claims.add((HELD, "a unit"))
    expected = {kind for kind, rule in RULES.items() if event in rule.ends_with}
    ended = readers.end(event)
    assert ended == sum(expected & {GRAPH, LATE_GRAPH, HIDDEN_ALIAS, NESTED})
    assert readers.bits == ENTERED ^ ended
    assert readers.claims == {(HELD, "a unit")}
    assert readers.end(event) == 0


def test_new_full_parameters_keep_who_reads_by_name_or_again_and_again() -> None:
    """Graphs and aliases are of the old ones, and can't see the new."""
    before, after = Readers(), Readers()
    before.add(ENTERED)
    before.claims.add((FORWARD, "a unit"))
    after.follow(before)
    assert after.claims == {(FORWARD, "a unit")}
    assert after.bits == NESTED
    assert before.bits == ENTERED


def test_kinds_are_bits_of_their_own() -> None:
    """So one test of an int asks for several."""
    assert sorted(RULES) == [1 << index for index in range(len(RULES))]


@pytest.mark.parametrize("kind", [0, *RULES])
def test_the_ledger_answers_what_may_be_done_with_the_values(kind: int) -> None:
    """Their memory goes unless a rule keeps it; a gradient overwrites what nobody may read."""
    readers = Readers()
    if kind in (FORWARD, HELD):
        readers.claims.add((kind, "a unit"))
    elif kind:
        readers.add(kind)
    assert readers.may_free == (not kind or not RULES[kind].keeps_memory)
    assert readers.may_overwrite == (not kind)


def _enter(handle: FlatParamHandle, kind: int) -> None:
    readers = handle.full.readers
    if RULES[kind].keeps_shown:
        readers.claims.add((kind, "a unit"))
    else:
        readers.add(kind)


@pytest.mark.parametrize(
    "kind", [0, *RULES], ids=lambda kind: RULES[kind].name if kind else "nobody"
)
@distributed(2)
def test_no_gradient_takes_the_place_of_a_value_that_somebody_may_read(kind: int) -> None:
    """It does where nobody is entered; the gradients are the same."""
    model = fully_shard(nn.Linear(4, 4, bias=False))
    model(torch.ones(2, 4)).sum().backward()  # the first forward is one that nobody knows
    model.zero_grad()
    loss = model(torch.ones(2, 4)).sum()
    [handle] = get_handles(model)
    if kind:
        _enter(handle, kind)
    held = list[FullValues]()
    with pytest.MonkeyPatch.context() as patch:
        hold = FullValues.hold_gradients

        def note(full: FullValues) -> None:
            held.append(full)
            hold(full)

        patch.setattr(FullValues, "hold_gradients", note)
        loss.backward()
    assert bool(held) == (kind == 0)
    grad = handle.entries[0].sharded.grad
    assert isinstance(grad, FlatShard)
    assert (grad.full_tensor() == 2).all()


@pytest.mark.parametrize(
    "kind", [0, *RULES], ids=lambda kind: RULES[kind].name if kind else "nobody"
)
@distributed(2)
def test_full_values_stay_shown_and_in_memory_as_the_rule_says(kind: int) -> None:
    """A unit gives them up unless the rule of who is entered keeps them."""
    model = fully_shard(nn.Linear(4, 4, bias=False))
    model(torch.ones(2, 4))
    [handle] = get_handles(model)
    handle.unshard()
    handle.full.wait()
    handle.shown.show_unsharded()
    if kind:
        _enter(handle, kind)
    release_handle(handle)
    rule = RULES[kind] if kind else Rule("", "")
    assert handle.shown.is_unsharded == rule.keeps_shown
    assert (handle.full.state is not FullState.FREED) == rule.keeps_memory
    handle.full.readers.claims.clear()
    handle.full.end_graphs(RESHARD)
    release_handle(handle)
    assert handle.full.state is FullState.FREED
