"""A sample of the interrupts; all lines by `python -m tests.interrupts`."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from composable_shard import fully_shard
from composable_shard.comm import PendingReduction
from composable_shard.comm.messages import Works
from composable_shard.flat_param.gradients import FlatGradients
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
