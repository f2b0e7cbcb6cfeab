"""What the host learns late of ranks that differ; that it does not wait: `test_host_waits.py`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_shard import clip_grad_norm_, set_gradient_divide_factor
from tests.common import device
from tests.device.running import on_device
from tests.programs.models import Net, shard_blocks


class _Program:
    """A small model in training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Net(2).to(device.NAME)
        shard_blocks(self.model)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self._x = torch.randn(4, 5, device=device.NAME)

    def warm_up(self) -> None:
        """Take steps until no identities are exchanged any more before collectives."""
        for _ in range(12):
            self.step()

    def step(self) -> None:
        loss = self.model(self._x).square().mean()
        loss.backward()
        clip_grad_norm_(self.model, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


@pytest.mark.long
@on_device(num_ranks=2)
def test_the_host_waits_where_the_device_is_more_than_two_steps_behind() -> None:
    """Once in a step, for what the ranks have compared, so that all of them act in one step."""
    program = _Program()
    program.warm_up()
    device.configure("slow_compute", delay_us=2000)
    for _ in range(6):
        program.step()
    waits = device.take_host_waits()
    assert waits.keys() <= {"event.synchronize"}
    assert 3 <= sum(waits.values()) <= 4  # not while the device is done with the first two


@on_device(num_ranks=2)
def test_a_difference_is_named_two_steps_later() -> None:
    """On all ranks in the same step, with the collective of the step that it was in."""
    program = _Program()
    program.warm_up()
    if dist.get_rank() == 1:
        set_gradient_divide_factor(program.model, 3.0)
    program.step()
    program.step()
    with pytest.raises(RuntimeError, match=r"not in step.*in set_gradient_divide_factor\(3.0\)"):
        program.step()  # by the digest, or where the ranks are slow by the watch
