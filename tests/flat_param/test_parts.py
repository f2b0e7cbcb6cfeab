"""The parts of a handle, each without a process group: shard, full values, what is shown."""

from __future__ import annotations

import itertools
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from composable_shard.comm.groups import ShardGroup
from composable_shard.flat_param import FullState, Precision
from composable_shard.flat_param.entries import ParamEntry
from composable_shard.flat_param.form import OriginalForm
from composable_shard.flat_param.full_values import MOVES, FullValues
from composable_shard.flat_param.gradient_reduction import FlatReduction, ScratchPool
from composable_shard.flat_param.gradients import FlatGradients
from composable_shard.flat_param.local_shard import LocalShard
from composable_shard.flat_param.memory import MemoryPlan
from composable_shard.flat_param.scope_params import ScopeParams
from composable_shard.flat_param.scopes import enter_scope, leave_scope
from composable_shard.flat_param.shown import (
    SCOPE,
    SHARDED,
    SHOWN_MOVES,
    UNSHARDED,
    Shown,
    ShownParams,
)
from composable_shard.flat_param.slots import ModuleItems, find_slots
from composable_shard.layout import FlatLayout
from composable_shard.options import OffloadPolicy
from composable_shard.tensor import FlatShard, ParamLabel, ShardSpec, UnitLabel, WriteGuard
from tests.harness.memory import peak_bytes

CPU = torch.device("cpu")


def _shard_group(size: int = 1) -> ShardGroup:
    """Return a group of which nothing but the sizes is used."""
    return ShardGroup(None, 0, size, CPU)  # type: ignore[arg-type]


def _full(
    size: int = 2, *, is_kept: bool = False, param_dtype: torch.dtype | None = None
) -> FullValues:
    layout = FlatLayout.plan([6, 4], size, 4)
    plan = MemoryPlan(
        _shard_group(size), Precision(param_dtype=param_dtype), OffloadPolicy(), is_kept
    )
    _, full = plan.allocate(layout, WriteGuard(), torch.float32, CPU)
    full.label = UnitLabel("block")
    return full


def _in_state(state: FullState) -> FullValues:
    full = _full()
    full.state = state
    return full


# --- memory ---


@pytest.mark.parametrize(
    ("policy", "is_pinned"),
    [
        (OffloadPolicy(), False),
        (OffloadPolicy(params=True), True),
        (OffloadPolicy(optim_state=True), True),
        (OffloadPolicy(params=True, pin_memory=False), False),
    ],
)
def test_host_memory_is_pinned_where_a_unit_of_an_accelerator_has_some(
    policy: OffloadPolicy, is_pinned: bool
) -> None:
    """A shard on the device is in no host memory, so that none is asked for at a forward."""
    ranks = ShardGroup(None, 0, 2, torch.device("cuda", 0))  # type: ignore[arg-type]
    plan = MemoryPlan(ranks, Precision(), policy, False)
    assert plan.is_pinned == is_pinned
    if not policy.is_active:
        plan.check_pinned(torch.zeros(4), "block.weight")


# --- full values ---


@pytest.mark.parametrize(("old", "new"), [*itertools.product(FullState, FullState)])
def test_full_values_make_the_moves_of_the_table_and_no_others(
    old: FullState, new: FullState
) -> None:
    """An illegal move names the unit and both states, and changes nothing."""
    full = _in_state(old)
    if new in MOVES[old]:
        full.move(new)
        assert full.state is new
    else:
        with pytest.raises(RuntimeError, match=f"'block' can't go from {old.name} to {new.name}"):
            full.move(new)
        assert full.state is old


def test_every_state_is_reached_and_left() -> None:
    """From FREED, where handles begin, and back to it."""
    assert set(MOVES) == set(FullState)
    assert all(FullState.FREED in MOVES[state] for state in FullState if state.name != "FREED")
    reached, found = {FullState.FREED}, set[FullState]()
    while reached != found:
        found = set(reached)
        reached |= {new for state in found for new in MOVES[state]}
    assert reached == set(FullState)


def test_values_that_need_no_gather_are_always_current() -> None:
    """One rank that computes in the main dtype: its shard is the buffer."""
    full = _full(1, is_kept=True)
    assert full.state is FullState.CURRENT
    assert full.is_whole
    full.shard.values.fill_(3)
    assert full.buffer[0] == 3


def test_a_cast_fills_the_buffer_and_a_write_makes_it_stale() -> None:
    """One rank with another compute dtype: each write asks for a new cast."""
    full = _full(1, is_kept=True, param_dtype=torch.bfloat16)
    full.gather(None, "forward")
    assert full.state is FullState.CURRENT
    assert full.is_current
    full.shard.values.fill_(3)
    full.shard.guard.count_write()
    assert not full.is_current
    full.gather(None, "forward")
    assert full.is_current
    assert (full.buffer[:10] == 3).all()


@pytest.mark.parametrize("are_packed", [True, False])
@pytest.mark.parametrize("state", [FullState.CURRENT, FullState.STALE])
def test_what_takes_the_place_of_values_outlives_a_free(state: FullState, are_packed: bool) -> None:
    """Until the reduction that reads them has ended."""
    full = _in_state(state)
    full.buffer.untyped_storage().resize_(full.buffer.nbytes)
    full.hold_gradients() if are_packed else full.serve_as_scratch()
    full.free()
    assert full.state is (FullState.HOLDS_GRADIENTS if are_packed else FullState.IS_SCRATCH)
    assert full.buffer.untyped_storage().size() == full.buffer.nbytes
    full.end_gradients()
    assert full.state is FullState.FREED
    assert full.buffer.untyped_storage().size() == 0


def test_a_free_waits_for_the_gather_in_flight() -> None:
    """Its error is nobody's: the values were not wanted any more."""

    class Failing:
        def wait(self) -> None:
            raise RuntimeError("planned")

    full = _in_state(FullState.GATHERING)
    full._gather = Failing()
    full.free()
    assert full.state is FullState.FREED


def test_allocating_a_unit_takes_the_buffer_and_the_shard_one_after_another() -> None:
    """The buffer's memory is given back before the shard gets its own."""
    with peak_bytes() as memory:
        full = _full()
    assert full.buffer.untyped_storage().size() == 0
    assert memory.peak == full.buffer.nbytes


# --- shard ---


def test_full_values_are_cut_into_a_shard() -> None:
    """The padding is zeroed: it counts in norms."""
    full = _full(2)
    source = torch.arange(1.0, full.shard.layout.padded_numel + 1)
    full.shard.write_slice(full.shard.values, source, from_first=False)
    start, end = full.shard.layout.shard_range(0)
    assert torch.equal(full.shard.values, source[start:end])
    assert all(not source[a:b].any() for a, b in full.shard.layout.padding_ranges())


def test_an_edit_of_rounded_values_keeps_the_precision_of_the_others() -> None:
    """Only what differs from the rounded shard was edited."""
    full = _full(1, is_kept=True, param_dtype=torch.bfloat16)
    full.shard.values.fill_(1 / 3)
    full.gather(None, "forward")
    full.buffer[0] = 2
    full.write_back()
    assert full.shard.values[0] == 2
    assert (full.shard.values[1:6] == torch.tensor(1 / 3)).all()
    assert full.can_write_back


# --- what modules show ---


def _entries(module: nn.Linear, shard: LocalShard) -> list[ParamEntry]:
    layout, entries = shard.layout, []
    for index, (name, param) in enumerate(module.named_parameters()):
        start, end = layout.local_range(index, 0)
        spec = ShardSpec(
            param.shape,
            param.shape,
            param.stride(),
            layout,
            index,
            0,
            "group",
            label=ParamLabel(name),
        )
        view = shard.values[start:end]
        view.copy_(spec.slice(param.detach()))
        sharded = cast(FlatShard, nn.Parameter(FlatShard(view, spec, guard=shard.guard)))
        entries.append(
            ParamEntry(sharded, spec, find_slots(ModuleItems(module), name), shard_view=view)
        )
    return entries


def _alone(module: nn.Linear) -> tuple[FullValues, ShownParams]:
    """Return the parts of a handle of a module that one rank trains alone."""
    layout = FlatLayout.plan([param.numel() for param in module.parameters()], 1, 4)
    plan = MemoryPlan(_shard_group(), Precision(), OffloadPolicy(), True)
    shard, full = plan.allocate(layout, WriteGuard(), torch.float32, CPU)
    shown = ShownParams(_entries(module, shard), OriginalForm(), shard.guard)
    return full, shown


def test_modules_show_one_form_after_another() -> None:
    """At rest the sharded parameters, in a forward the unsharded, in a scope that scope's."""
    module = nn.Linear(3, 2)
    full, shown = _alone(module)
    full.params.build(shown.entries)
    shown.index_slots()
    shown.show_again()
    weight = shown.entries[0]
    assert module.weight is weight.sharded
    shown.show_unsharded()
    assert module.weight is weight.unsharded
    assert shown.state is UNSHARDED
    shown.check_registered()
    scope = ScopeParams(shown.entries, full.shard.layout, torch.zeros(full.buffer.shape))
    others = scope.params
    enter_scope(shown, scope)
    assert module.weight is others[0]
    assert shown.state.kind is SCOPE
    assert shown.is_unsharded  # beneath the scope
    shown.show_sharded()
    assert module.weight is others[0]
    leave_scope(shown)
    assert module.weight is weight.unsharded
    shown.show_sharded()
    assert module.weight is weight.sharded
    assert shown.state is SHARDED


@pytest.mark.parametrize(("old", "new"), [*itertools.product(SHOWN_MOVES, SHOWN_MOVES)])
def test_what_is_shown_makes_the_moves_of_the_table_and_no_others(old: Shown, new: Shown) -> None:
    """So does a state of its own that a form has, as its kind; a refused move changes nothing."""
    _, shown = _alone(nn.Linear(3, 2))
    own = Shown("something of its own", new)
    shown.state = old
    if new is old or new in SHOWN_MOVES[old]:
        shown.move(own)
        assert shown.state is own
    else:
        with pytest.raises(RuntimeError, match=f"show {old.what} can't show {own.what} next"):
            shown.move(own)
        assert shown.state is old


# --- gradients ---


def test_a_rank_alone_publishes_what_it_packed() -> None:
    """Nothing is sent."""
    module = nn.Linear(3, 2)
    full, shown = _alone(module)
    full.params.build(shown.entries)
    reduction = FlatReduction(_shard_group(), full.shard.layout)
    grads = FlatGradients(full.shard.layout, reduction, shown, is_persistent=False)
    grads.bind(full, torch.float32, is_pinned=False, before=grads)
    expected: list[Tensor] = []
    for index, entry in enumerate(shown.entries):
        assert entry.unsharded is not None
        expected.append(torch.randn(entry.unsharded.shape))
        entry.unsharded.grad = expected[-1]
        grads.pack(index, may_overwrite=True)
    assert grads.used == [True, True]
    grads.issue(None, ScratchPool(), keeps_values=False, is_deferred=False)
    grads.add_result()
    grads.publish([True, True])
    for entry, gradient in zip(shown.entries, expected, strict=True):
        assert isinstance(entry.sharded.grad, FlatShard)
        assert torch.equal(entry.sharded.grad.to_local(), gradient.flatten())
        assert entry.unsharded is not None
        assert entry.unsharded.grad is None


def test_scratch_memory_that_one_unit_alone_needs_is_not_kept() -> None:
    """What several need is: a step of equal layers and a larger root allocates for the root."""
    pool, numels = ScratchPool(), (1, 6, 6, 6, 9)
    buffers = [torch.empty(1) for _ in numels]
    kept: list[list[bool]] = []
    for _ in range(3):
        taken = [pool.take(*each) for each in zip(numels, buffers, strict=True)]
        assert [each.numel() for each in taken] == list(numels)
        kept.append([each.untyped_storage().nbytes() == 6 * 4 for each in taken])
        is_last = [each.data_ptr() == taken[3].data_ptr() for each in taken]
    assert kept[-1] == is_last == [True, True, True, True, False]
