"""A sample of the interrupts; all lines by `python -m tests.interrupts`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from composable_shard import fully_shard, get_handles
from composable_shard.comm import (
    AllGather,
    PendingReduction,
    ReduceScatter,
    ShardGroup,
    SmallGroup,
)
from composable_shard.comm.messages import Works
from composable_shard.comm.order import order_of
from composable_shard.flat_param import full_values, gradients
from composable_shard.flat_param.gradients import FlatGradients
from composable_shard.flat_param.storage import free_storage
from composable_shard.runtime.reshard_policy import KeptPart
from composable_shard.runtime.saved_values import Inspection, SavedValues
from composable_shard.torch_private import saved_tensors_hooks_in_force
from tests.harness.ranks import run_ranks
from tests.interrupts import Interrupter, on_all_ranks, run_chunk
from tests.programs.claims import assert_close, unsharded_gradients
from tests.programs.models import average_gradients, rank_input, square_mean

NUM_MOMENTS = 24  # of a program
SAMPLED = ("plain", "no_sync", "shards_optim", "checkpoint", "one_rank", "new_data", "first_step")


@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLED)
def test_a_step_after_an_interrupt_at_any_line_is_right(name: str, tmp_path: Path) -> None:
    """State dict and checkpoint in the handler too: by value, as a plain model's."""
    moments = on_all_ranks(name)
    moments = moments[7 * SAMPLED.index(name) :: len(moments) // NUM_MOMENTS]
    num_run, failures = run_chunk(name, moments, str(tmp_path))
    assert not failures, failures[0]
    assert num_run == len(moments)


def test_an_interrupt_before_the_wait_for_a_reduction_frees_nothing_that_is_written() -> None:
    """With more than two ranks the terms come into memory of the unit's buffers."""
    run_ranks(4, _interrupt_before_wait)


def _interrupt_before_wait() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(6, 6).double()
    sharded = fully_shard(copy.deepcopy(plain))
    works, left = list[Works](), list[int]()
    free = FlatGradients.free_buffers

    def interrupt(reduction: Any) -> None:
        works.append(reduction._work)
        raise KeyboardInterrupt

    def note(grads: FlatGradients) -> None:
        left.extend(len(work.posted) for work in works)
        free(grads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PendingReduction, "finish", interrupt)
        patch.setattr(FlatGradients, "free_buffers", note)
        with pytest.raises(KeyboardInterrupt):
            square_mean(sharded(rank_input(3, 6).double())).backward()
    assert left
    assert not any(left), "memory was freed before its messages came"
    for model in (plain, sharded):
        model.zero_grad()
        square_mean(model(rank_input(3, 6, step=1).double())).backward()
    average_gradients(plain.parameters())
    found = unsharded_gradients(sharded)
    for name, param in plain.named_parameters():
        assert_close(found[name], param.grad, f"gradient of {name}")


@dataclass(frozen=True)
class _Lost:
    """A collective that a backward starts, whose work an interrupt loses."""

    starter: type
    group_of: Callable[[ShardGroup], dist.ProcessGroup | None]
    options: dict[str, Any] = field(default_factory=dict)


_LOST = {
    "gather": _Lost(AllGather, lambda ranks: ranks.group),
    "gather of a small group": _Lost(
        KeptPart, lambda ranks: SmallGroup.of(ranks, 2).group, {"reshard_after_forward": 2}
    ),
    "reduction": _Lost(ReduceScatter, lambda ranks: ranks.group),
    "reduction in its own group": _Lost(
        ReduceScatter, lambda ranks: ranks.reduce_group, {"separate_reduce_group": True}
    ),
}


@pytest.mark.parametrize("name", _LOST)
def test_memory_is_not_freed_before_a_lost_collective_has_written_to_it(name: str) -> None:
    """On whatever group it runs. With more than two ranks terms come into the unit's buffers."""
    run_ranks(4, _lose, name)


def _lose(name: str) -> None:
    lost = _LOST[name]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    sharded = copy.deepcopy(plain)
    for part in (*sharded, sharded):
        fully_shard(part, **lost.options)
    group = lost.group_of(get_handles(sharded)[0].shard_group)
    assert group is not None
    works, left, start = list[Works](), list[int](), lost.starter.start

    def interrupted(*args: Any, **named: Any) -> Any:
        work = start(*args, **named)  # its traceback keeps it
        posted = order_of(group).posted
        works.extend(each for each in [posted and posted()] if isinstance(each, Works))
        assert work is not None
        raise KeyboardInterrupt

    def note(tensor: Tensor, **options: Any) -> None:
        if tensor.untyped_storage().nbytes():
            left.extend(len(work.posted) for work in works)
        free_storage(tensor, **options)

    loss = square_mean(sharded(rank_input(3, 6).double()))
    with pytest.MonkeyPatch.context() as patch:
        for module in (full_values, gradients):
            patch.setattr(module, "free_storage", note)
        with patch.context() as inner:
            inner.setattr(lost.starter, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
        assert len(works) == 1
        for model in (plain, sharded):
            model.zero_grad()
            square_mean(model(rank_input(3, 6, step=1).double())).backward()
    assert left
    assert not any(left), "memory was freed before its messages came"
    average_gradients(plain.parameters())
    found = unsharded_gradients(sharded)
    for name, param in plain.named_parameters():
        assert_close(found[name], param.grad, f"gradient of {name}")


def test_hooks_in_force_stay_where_they_are_at_any_moment() -> None:
    """A `with` of saved-tensor hooks ends after an interrupt while the library looked at them."""
    pairs = [(lambda x: x, lambda x: x) for _ in range(3)]
    with ExitStack() as stack:
        for pair in pairs:
            stack.enter_context(saved_tensors_hooks(*pair))
        for moment in count(1):
            try:
                with Interrupter(moment).watching():
                    saved_tensors_hooks_in_force()
            except KeyboardInterrupt:
                pass
            else:
                break
            assert saved_tensors_hooks_in_force() == pairs[::-1], moment
    assert moment > len(pairs) * 2


def test_hooks_above_those_of_a_call_stay_where_they_are_at_any_moment() -> None:
    """They are a user's; the library's own are gone when the next call has cleaned up."""
    pairs = [(lambda x: x, lambda x: x) for _ in range(3)]
    with saved_tensors_hooks(*pairs[0]):
        for moment in count(1):
            hooks = SavedValues(Inspection(), "?", [], below=pairs[0], others=pairs[0])
            hooks.begin()
            with saved_tensors_hooks(*pairs[1]), saved_tensors_hooks(*pairs[2]):
                before = saved_tensors_hooks_in_force()
                assert [*before[:2], before[3]] == pairs[::-1]
                is_over = False
                try:
                    with Interrupter(moment).watching():
                        hooks.end()
                        is_over = True
                except KeyboardInterrupt:
                    assert saved_tensors_hooks_in_force() in (before, pairs[::-1]), moment
                    hooks.end()
                assert saved_tensors_hooks_in_force() == pairs[::-1], moment
            if is_over:
                break
    assert moment > len(pairs) * 2
