"""Whole results inside an optimizer's step are not gathered again, and are never stale."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from composable_shard import count_collectives, fully_shard
from composable_shard.tensor.flat_shard import FlatShard
from composable_shard.tensor.write_guard import RUNNING
from tests.harness.assertions import assert_within
from tests.harness.ranks import distributed


class _StepsBy(torch.optim.Optimizer):
    """Runs a function on its first parameter."""

    def __init__(self, params: Iterable[Tensor], run: Callable[[Tensor], None]) -> None:
        super().__init__(params, {})
        self.run = run

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override] # without a closure
        self.run(self.param_groups[0]["params"][0])


def _zero_column(x: Tensor) -> None:
    x[:, 1] = 0


def _write_local(x: Tensor) -> None:
    (x.to_local() if isinstance(x, FlatShard) else x).mul_(2)


def _give_other_data(x: Tensor) -> None:
    x.data = torch.ones(5, 5)


def _step_fused(x: Tensor) -> None:
    torch._fused_sgd_(
        [x],
        [torch.ones_like(x)],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.5,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


# Each writes a result that was cut from a whole one.
WRITES: dict[str, Callable[[Tensor], object]] = {
    "method": lambda x: x.mul_(2),
    "operation": lambda x: x.clamp_(0),
    "out": lambda x: torch.add(x, 1, out=x),
    "copy": lambda x: x.copy_(torch.ones(5, 5)),
    "transposed": lambda x: x.t().mul_(2),
    "flat": lambda x: x.view(-1)[3:7].zero_(),
    "reshaped": lambda x: x.reshape(-1).mul_(2),
    "detached": lambda x: x.detach().mul_(2),
    "data": lambda x: x.data.mul_(2),
    "other data": _give_other_data,
    "row": lambda x: x[2].zero_(),
    "column": _zero_column,
    "unbound": lambda x: x.unbind(0)[1].zero_(),
    "diagonal": lambda x: x.fill_diagonal_(7),
    "list": lambda x: torch._foreach_mul_([x], 2.0),
    "two lists": lambda x: torch._foreach_add_([x], [torch.ones_like(x)]),
    "fused": _step_fused,
    "local": _write_local,
    "product": lambda x: x.addmm_(torch.eye(5), x.clone()),
    "turned": lambda x: x.transpose_(0, 1),
    "bits": lambda x: x.view(torch.int32).bitwise_and_(-65536),
    "masked": lambda x: x.masked_fill_(torch.eye(5).bool(), 3),
    "indexed": lambda x: x.index_put_((torch.tensor([1]),), torch.zeros(5)),
}


@distributed(2, 3)
def test_a_result_that_is_written_is_gathered_again() -> None:
    """Whatever writes it, what reads it next gets the new values, as on a plain model."""
    wrong = []
    for name, write in WRITES.items():

        def run(param: Tensor, write: Callable[[Tensor], object] = write) -> None:
            result = param @ torch.eye(5)
            other = result @ torch.eye(5)  # made of the kept one
            write(result)
            param.copy_(result @ torch.full((5, 5), 0.25))
            param.add_(other, alpha=0.1)

        plain = nn.Linear(5, 5, bias=False)
        net = copy.deepcopy(plain)
        fully_shard(net)
        _StepsBy(plain.parameters(), run).step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _StepsBy(net.parameters(), run).step()
        found = next(net.parameters()).full_tensor()  # type: ignore[attr-defined]
        if not torch.allclose(found, plain.weight, atol=1e-6):
            wrong.append(name)
    assert not wrong


@distributed(2)
def test_results_are_kept_inside_a_step_alone() -> None:
    """The next read sends nothing; a freed result, and the end of the step, free the whole."""
    net = nn.Linear(5, 5, bias=False)
    fully_shard(net)
    kept: list[Tensor] = []

    def run(param: Tensor) -> None:
        result = param @ param
        with count_collectives() as log:
            result.T @ result  # its shape is an operand's too
        assert not log.events
        assert RUNNING.wholes
        del result
        assert not RUNNING.wholes
        kept.append(param @ param)
        assert RUNNING.wholes

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _StepsBy(net.parameters(), run).step()
    assert not RUNNING.wholes
    with count_collectives() as log, torch.no_grad():
        (kept[0] @ kept[0]) @ kept[0]
    assert [event.kind for event in log.events] == ["all_gather"] * 2


@distributed(2)
def test_muon_gathers_each_matrix_twice() -> None:
    """One norm, and the matrix and what it multiplies, whatever number of iterations follows."""
    plain = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False))
    net = copy.deepcopy(plain)
    fully_shard(net)
    counts = {}
    for num_steps in (3, 5):
        optimizers = [torch.optim.Muon(x.parameters(), ns_steps=num_steps) for x in (plain, net)]
        for one, other in zip(plain.parameters(), net.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(2))
            other.grad = torch.zeros_like(other)
            other.grad.copy_(one.grad)
        optimizers[0].step()
        with count_collectives() as log, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizers[1].step()
        counts[num_steps] = [event.kind for event in log.events]
    assert counts[3] == counts[5] == ["all_reduce", "all_gather", "all_gather"] * 2
    for one, other in zip(plain.parameters(), net.parameters(), strict=True):
        # bfloat16: a norm in another order may round one bit otherwise.
        assert_within(other.full_tensor(), one.detach(), "param", atol=2e-3)  # type: ignore[attr-defined]
