"""Reductions with a process group of their own run beside gathers, and change no value."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, get_handles
from tests.common import device
from tests.device.running import on_device

_COSTS = {"all_gather": device.Cost(100), "reduce_scatter": device.Cost(100)}


def _make_modelled_layers(**options: object) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).to(device.NAME)
    for module in (*model, model):
        fully_shard(module, prefetch_nbytes=0, **options)
    return model


def _train_modelled_layers(model: nn.Module, num_steps: int) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(num_steps):
        loss = model(torch.randn(2, 8, device=device.NAME)).square().mean()
        loss.backward()
        clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses


def _run_at_once() -> bool:
    spans = device.timeline()
    gathers = [span for span in spans if span.name == "all_gather"]
    reductions = [span for span in spans if span.name == "reduce_scatter"]
    return any(g.start_us < r.end_us and r.start_us < g.end_us for g in gathers for r in reductions)


@on_device(num_ranks=2)
def test_reductions_of_a_separate_group_run_beside_gathers() -> None:
    """And those of one group one after another, as on NCCL; the backward takes that much longer."""
    times = {}
    for flag in (False, True):
        model = _make_modelled_layers(separate_reduce_group=flag)
        _train_modelled_layers(model, 12)  # no identities are exchanged any more
        device.synchronize()
        device.model_durations(_COSTS)
        _train_modelled_layers(model, 1)
        assert _run_at_once() is flag
        times[flag] = device.device_time_us()
        device.model_durations({})
    # Six gathers in the forward, as many in the backward; six reductions, all but one beside these.
    assert times == {False: 18 * 100, True: 13 * 100}


@pytest.mark.parametrize("mode", ["none", "random"])
@on_device(num_ranks=2)
def test_a_separate_group_changes_no_value(mode: device.Mode) -> None:
    """Bitwise, in both precisions; all units share the group, and so do copies of the model."""
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        expected = _train_modelled_layers(_make_modelled_layers(mp_policy=policy), 4)
        device.configure(mode)
        model = _make_modelled_layers(mp_policy=policy, separate_reduce_group=True)
        assert _train_modelled_layers(model, 4) == expected
        groups = {handle.shard_group.reduce_group for handle in get_handles(model)}
        assert len(groups) == 1
        assert groups.isdisjoint({None, dist.group.WORLD})
        assert {get_handles(copy.deepcopy(model))[0].shard_group.reduce_group} == groups


@pytest.mark.parametrize("strategy", ["shard_grad_op", "shard_optim", "no_shard"])
def test_strategies_without_gathers_in_backward_refuse_it(strategy: str) -> None:
    """Before anything is changed."""
    with pytest.raises(ValueError, match=r"separate_reduce_group=True.*gathers nothing there"):
        fully_shard(nn.Linear(2, 2), strategy=strategy, separate_reduce_group=True)  # type: ignore[arg-type]
