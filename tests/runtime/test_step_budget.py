"""What a training step may cost, in exact counts, so that speed can't be lost unseen.

One process, as one of two ranks whose collectives do nothing: so a count is the same on every
machine. Where a change makes a step cheaper, lower the pins; where it makes one dearer, see
whether it has to, and say in the change why the pins rise.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import composable_shard
from composable_shard import count_collectives, fully_shard
from composable_shard.comm.collectives import all_gather
from composable_shard.comm.trace import record
from composable_shard.flat_param import gradients
from composable_shard.flat_param.handle import FlatParamHandle
from tests.common.free_group import free_world
from tests.common.models import MatrixChain
from tests.common.step_counter import StepCounter, is_inside_collective
from tests.harness.memory import peak_bytes


@dataclass(frozen=True)
class StepCost:
    """What a step costs: forward, backward, a fused AdamW step, and `zero_grad`.

    `sent` and `payload` are of a model of three units; the rest is what one more unit adds.
    """

    sent: int  # collectives
    payload: int  # bytes of their full-size buffers
    written: int  # bytes in forward and backward, outside collectives, beyond the plain model
    allocations: int  # of tensor memory, beyond the plain model
    allocated: int  # bytes of these
    calls: int  # of this package's functions in forward and backward
    optimizer_calls: int  # likewise in the optimizer's step and zero_grad


NBYTES = 16 * 16 * 4  # of a parameter
PINNED = {  # by parameters of a unit
    1: StepCost(
        sent=9,
        payload=8 * NBYTES + 3,
        written=NBYTES,  # the gradient
        allocations=3,
        allocated=2 * NBYTES + NBYTES // 2 + 3,
        calls=117,
        optimizer_calls=2,
    ),
    9: StepCost(
        sent=9,
        payload=8 * 9 * NBYTES + 9 * 3,
        written=9 * NBYTES,
        allocations=3,
        allocated=9 * (2 * NBYTES + NBYTES // 2 + 3),
        calls=133,
        optimizer_calls=3,
    ),
}
# By parameters of a unit: calls that shard it, and that it adds to those that shard what is around.
SET_UP = {1: (269, 21), 9: (829, 69)}
_PACKAGE = str(Path(composable_shard.__file__).parent)


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors, and a busy machine: threads would wait for each other
    try:
        with free_world(2):
            yield
    finally:
        torch.set_num_threads(num_threads)


class _Trained:
    """A chain of equal units, sharded or plain, that has been trained for some steps."""

    def __init__(
        self,
        num_layers: int,
        num_params: int,
        *,
        is_sharded: bool = True,
        is_fused: bool = True,
        compiled: str = "",
    ) -> None:
        self.model = MatrixChain(num_layers, num_params)
        self._compile_layers(compiled == "before")
        if is_sharded:
            for layer in self.model.layers:
                fully_shard(layer)
            fully_shard(self.model)
        self._compile_layers(compiled == "after")
        self.x = torch.ones(1, 16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=is_fused, foreach=False)
        for _ in range(6):  # by then identities are not exchanged any more
            self.compute()
            self.update()

    def _compile_layers(self, flag: bool) -> None:
        for layer in self.model.layers if flag else ():
            layer.compile(backend="aot_eager")

    def compute(self) -> None:
        self.model(self.x).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@contextmanager
def _count_calls() -> Iterator[list[str]]:
    """Collect the names of this package's functions as they are called.

    Comprehensions and generators are left out: whether they are calls depends on the Python.
    """
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_ours = event == "call" and code.co_filename.startswith(_PACKAGE)
        if is_ours and (code.co_name == "<lambda>" or not code.co_name.startswith("<")):
            called.append(code.co_qualname if sys.version_info >= (3, 11) else code.co_name)

    gc.disable()  # finalizers run when they run
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)
        gc.enable()


def _measure(trained: _Trained, what: Collection[str]) -> dict[str, int]:
    """Return costs of a whole step, at least the ones asked for."""
    found: dict[str, int] = {}
    if not _SENT.isdisjoint(what):
        with count_collectives() as log:
            trained.compute()
        trained.update()
        found |= {"sent": len(log.events), "payload": sum(event.nbytes for event in log.events)}
    if "written" in what:
        with StepCounter(is_inside_collective) as counter:
            trained.compute()
        trained.update()
        found["written"] = counter.written.total()
    if not _MEMORY.isdisjoint(what):
        with peak_bytes() as memory:
            trained.compute()
            trained.update()
        found |= {"allocations": memory.num_allocations, "allocated": memory.allocated}
    if not _CALLS.isdisjoint(what):
        with _count_calls() as calls:
            trained.compute()
        with _count_calls() as optimizer_calls:
            trained.update()
        found |= {"calls": len(calls), "optimizer_calls": len(optimizer_calls)}
    return found


_SENT, _MEMORY = {"sent", "payload"}, {"allocations", "allocated"}
_CALLS = {"calls", "optimizer_calls"}
_ALL = _SENT | _MEMORY | _CALLS | {"written"}


def _cost_of_a_step(
    num_params: int, what: Collection[str] = _ALL, *, is_fused: bool = True
) -> dict[str, int]:
    """Return the pinned costs, at least the ones asked for."""
    small, large = (_measure(_Trained(n, num_params, is_fused=is_fused), what) for n in (2, 3))
    plain = _MEMORY.union({"written"}).intersection(what)
    less, more = (_measure(_Trained(n, num_params, is_sharded=False), plain) for n in (2, 3))
    added = {key: large[key] - small[key] - more.get(key, 0) + less.get(key, 0) for key in small}
    return {**added, **{key: small[key] for key in _SENT.intersection(small)}}


def _exceeded(cost: dict[str, int], limit: StepCost) -> dict[str, tuple[int, int]]:
    """Return what costs more than it may, with both numbers."""
    limits = asdict(limit)
    return {key: (value, limits[key]) for key, value in cost.items() if value > limits[key]}


@pytest.mark.counts
@pytest.mark.fast
@pytest.mark.parametrize("num_params", PINNED)
def test_step_costs_no_more_than_is_pinned(num_params: int) -> None:
    """What is sent and written also no less: such a step would not do its work."""
    cost, limit = _cost_of_a_step(num_params), PINNED[num_params]
    assert not _exceeded(cost, limit)
    for key in ("sent", "payload", "written"):
        assert cost[key] == asdict(limit)[key]


@pytest.mark.counts
@pytest.mark.fast
@pytest.mark.parametrize("num_params", SET_UP)
def test_sharding_a_unit_calls_no_more_than_is_pinned(num_params: int) -> None:
    """What is inside the module has been named and is found once more, in one walk."""
    own, added = SET_UP[num_params]
    fully_shard(MatrixChain(1, num_params))  # what the first call of a process does
    small, large = (_calls_of_setting_up(num_layers, num_params) for num_layers in (2, 3))
    assert max(small[:-1] + large[:-1]) <= own
    assert large[-1] - small[-1] <= added


def _calls_of_setting_up(num_layers: int, num_params: int) -> list[int]:
    model, counts = MatrixChain(num_layers, num_params), []
    for module in (*model.layers, model):
        with _count_calls() as calls:
            fully_shard(module)
        counts.append(len(calls))
    return counts


@pytest.mark.long
@pytest.mark.counts
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_layer_costs_no_call_more() -> None:
    """The same functions as often: no hook runs otherwise, its gradients are packed as all are."""
    eager, before, after = map(_calls_of_a_step, ("", "before", "after"))
    assert eager == before == after


def _calls_of_a_step(compiled: str) -> Counter[str]:
    torch.compiler.reset()
    gc.collect()  # compiled models are in cycles, and a call asks for other models
    trained = _Trained(1, 2, compiled=compiled)
    with _count_calls() as calls:
        trained.compute()
    return Counter(calls)


def _gather_again(original: Callable[..., None], handle: FlatParamHandle, *args: Any) -> None:
    """Gather a unit that has just been gathered."""
    original(handle, *args)
    full = torch.empty_like(handle.unsharded)
    all_gather(full, handle.local_shard, handle.shard_group.group).wait()


def _copy_gradient(
    original: Callable[..., None], view: Tensor, gradient: Tensor, factor: Tensor | None
) -> None:
    """Pack a copy of a gradient."""
    original(view, gradient.clone(), factor)


def _allocate(original: Callable[..., None], *args: Any) -> None:
    """Make a tensor for each gradient, without writing to it."""
    torch.empty(1)
    original(*args)


def _call(original: Callable[..., None], *args: Any) -> None:
    """Call one function more for each gradient."""
    record("", "")
    original(*args)


@pytest.mark.parametrize(
    ("owner", "method", "damage", "what"),
    [
        (FlatParamHandle, "unshard", _gather_again, {"sent", "payload"}),
        (gradients, "write_gradient", _copy_gradient, {"written", "allocated"}),
        (gradients, "write_gradient", _allocate, {"allocations"}),
        (gradients, "write_gradient", _call, {"calls"}),
    ],
)
def test_what_makes_a_step_dearer_is_seen(
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    method: str,
    damage: Callable[..., None],
    what: set[str],
) -> None:
    """Each kind of count, by the least that could be wrong with it."""
    original = getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda *args, **kwargs: damage(original, *args, **kwargs))
    assert _exceeded(_cost_of_a_step(1, what), PINNED[1]).keys() >= what


def test_wider_shards_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding costs no more collectives, but larger ones."""
    monkeypatch.setattr("composable_shard.flat_param.memory._ALIGNMENT_NBYTES", 4096)
    assert _exceeded(_cost_of_a_step(1, {"sent"}), PINNED[1]).keys() == {"payload"}


@pytest.mark.counts
def test_an_optimizer_that_takes_parameters_one_by_one_is_seen() -> None:
    """Its operators run through the tensor subclass, each for itself."""
    cost = _cost_of_a_step(1, {"calls"}, is_fused=False)
    assert _exceeded(cost, PINNED[1]).keys() == {"optimizer_calls"}
