"""Optimizer state of any form, and averages in `extra`: what comes back is what was saved."""

from __future__ import annotations

import re
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from composable_shard import (
    FlatShard,
    ShardingStrategy,
    StateDictOptions,
    describe,
    fsdp2,
    fully_shard,
    get_optimizer_state_dict,
    load_checkpoint,
    save_checkpoint,
    set_optimizer_state_dict,
)
from tests.harness.assertions import assert_equal
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed, run_ranks
from tests.programs.models import EVERYWHERE, Net, shard_blocks


class KeepsEverything(torch.optim.Optimizer):
    """Keeps state in containers, in views, in other dtypes and under a key of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "factors": [1.0, 0.5], "scale": torch.tensor(0.9)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step that all of the state has a part in."""
        del closure
        group = self.param_groups[0]
        shared = self.state["shared"]  # type: ignore[index]
        shared.setdefault("count", torch.zeros(()))
        shared["count"] += 1
        first = group["params"][0]
        shared.setdefault("first", [torch.zeros_like(first)])
        if first.grad is not None:
            shared["first"][0].add_(first.grad)
        for param in [param for param in group["params"] if param.grad is not None]:
            state = self.state[param]
            if not state:
                state["recent"] = deque(maxlen=2)
                state["pair"] = torch.zeros_like(param), torch.zeros(3)
                state["deep"] = {"sums": [torch.zeros_like(param, dtype=torch.float64)], 7: "x"}
                state["flat"] = torch.zeros_like(param).view(-1)
                state["nothing"], state["taken"] = None, 0
            state["taken"] += 1
            state["recent"].append(param.grad.clone())
            state["deep"]["sums"][0].add_(param.grad)
            state["pair"] = state["pair"][0] * 0.5 + param.grad, state["pair"][1] + 1
            state["flat"].lerp_(param.grad.view(-1), 0.1)
            update = state["recent"][0] + state["recent"][-1] + state["pair"][0]
            update = update + state["deep"]["sums"][0].float() + state["flat"].view_as(param)
            size = group["lr"] * group["factors"][1] * group["scale"] / shared["count"]
            param.sub_(update * size, alpha=1 / (state["taken"] + float(state["pair"][1][0])))
        group["params"][0].sub_(shared["first"][0], alpha=0.01)
        group["factors"][1] *= 0.9
        group["scale"] = group["scale"] * 0.9


class Crossed(torch.optim.Optimizer):
    """Keeps shards of all parameters, and a vector of all gradients, with the first parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step along the mean of the gradients so far."""
        del closure
        params = self.param_groups[0]["params"]
        state = self.state[params[0]]
        vector = torch.cat([param.grad.view(-1) for param in params])
        if not state:
            state["vector"] = vector.clone()
            state["sums"] = [torch.zeros_like(param) for param in params]
            state["last"] = torch.zeros_like(params[-1])
        state["vector"].lerp_(vector, 0.3)
        state["last"].add_(params[-1].grad)
        offset = 0
        for param, total in zip(params, state["sums"], strict=True):
            total.add_(param.grad)
            step = state["vector"][offset : offset + param.numel()].view_as(param)
            param.sub_(total + step, alpha=0.05)
            offset += param.numel()
        params[-1].sub_(state["last"], alpha=0.01)


class Average:
    """An object of an optimizer's package, which says its state and takes it."""

    def __init__(self, like: Tensor) -> None:
        self.mean = torch.zeros_like(like)  # a shard, where the parameter is one
        self.table = torch.zeros(20)  # whole, and too large for a message
        self.taken = 0

    def update(self, value: Tensor) -> Tensor:
        """Return the mean of values so far."""
        self.taken += 1
        self.table += self.taken
        self.mean.lerp_(value, 1 / self.taken)
        return self.mean * (1 + self.table[0])

    def state_dict(self) -> dict[str, Any]:
        """Return all that the object knows."""
        return {"mean": self.mean, "table": self.table, "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` has returned."""
        self.mean, self.table, self.taken = state["mean"], state["table"], state["taken"]


class Counter:
    """An object that knows one number."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the number."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the number."""
        self.count = state["count"]


class KeepsObjects(torch.optim.Optimizer):
    """Keeps objects under parameters, in a list there, and under a key of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step that all objects have a part in."""
        del closure
        counter = self.state.setdefault("counter", Counter())  # type: ignore[call-overload]
        counter.count += 1
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                state["mean"], state["more"] = Average(param), [Average(param), 3]
            update = state["mean"].update(param.grad) + state["more"][0].update(param.grad.sign())
            param.sub_(update, alpha=self.param_groups[0]["lr"] / counter.count)


def lbfgs(params: Any) -> torch.optim.Optimizer:
    """Return torch's, with a short history."""
    return torch.optim.LBFGS(params, lr=0.1, max_iter=3, history_size=3)


def make_run(make: Any, shard: dict[str, Any] | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model, sharded unless `shard` is None, and its optimizer."""
    torch.manual_seed(0)
    model = Net()
    if shard is not None:
        shard_blocks(model, **shard)
    return model, make(model.parameters())


def go(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, end: int) -> None:
    """Take steps with batches that are the same on all ranks."""
    for step in range(first, end):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 5, generator=generator)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)


def whole_values(value: Any) -> Any:
    """Return nested values with whole tensors, and what objects say in their place."""
    if isinstance(value, Average | Counter):
        return [type(value), whole_values(value.state_dict())]
    if isinstance(value, FlatShard):
        return value.full_tensor().detach().clone()
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole_values(item) for key, item in value.items()}
    if isinstance(value, deque):
        return deque((whole_values(item) for item in value), value.maxlen)
    if isinstance(value, list | tuple):
        return type(value)(whole_values(item) for item in value)
    return value


def assert_same_nested(found: Any, expected: Any, what: str = "") -> None:
    """Assert equal values, kinds, dtypes and keys."""
    assert type(found) is type(expected), what
    if isinstance(expected, Tensor):
        assert_equal(found, expected, what)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), what
        for key, value in expected.items():
            assert_same_nested(found[key], value, f"{what}/{key}")
    elif isinstance(expected, list | tuple | deque):
        assert getattr(found, "maxlen", 0) == getattr(expected, "maxlen", 0)
        assert len(found) == len(expected), what
        for number, value in enumerate(expected):
            assert_same_nested(found[number], value, f"{what}/{number}")
    else:
        assert found == expected, what


def outcome(model: nn.Module, optimizer: Any) -> Any:
    """Return the parameters, and the state of the optimizer, whole."""
    values = [whole_values(param.detach()) for param in model.parameters()]
    return values, get_optimizer_state_dict(model, optimizer, options=EVERYWHERE)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "odd": KeepsEverything,
    "crossed": Crossed,
    "lbfgs": lbfgs,
    "objects": KeepsObjects,
}
SHARDS: dict[str, dict[str, Any]] = {
    "element": {},
    "row": {"granularity": "row"},
    "param": {"granularity": "param"},
    "zero1": {"strategy": ShardingStrategy.SHARD_OPTIM},
    "none": {"strategy": ShardingStrategy.NO_SHARD},
}


def save_at_two(name: str, shard: str, path: Path) -> Any:
    """Save after two steps; return what the run has then, and after four."""
    model, optimizer = make_run(OPTIMIZERS[name], SHARDS[shard])
    go(model, optimizer, 0, 2)
    saved = outcome(model, optimizer)
    save_checkpoint(path, model, optimizer, step=2)
    go(model, optimizer, 2, 4)
    return saved, outcome(model, optimizer)


def load_at_two(name: str, shard: str, path: Path, expected: Any) -> Any:
    """Load, compare with the saved values bit for bit, and return what two more steps give."""
    model, optimizer = make_run(OPTIMIZERS[name], SHARDS[shard])
    load_checkpoint(path, model, optimizer)
    if name == "odd":  # in parts again, not whole on each rank
        shared = optimizer.state["shared"]["first"][0]  # type: ignore[index]
        assert isinstance(shared, FlatShard)
    assert_same_nested(outcome(model, optimizer), expected)
    if shard == "param" and name in COMBINES:
        return expected
    go(model, optimizer, 2, 4)
    return outcome(model, optimizer)


def plain_at_four(name: str) -> list[Tensor]:
    """Return a plain model's parameters after four steps."""
    model, optimizer = make_run(OPTIMIZERS[name], None)
    go(model, optimizer, 0, 4)
    return [param.detach() for param in model.parameters()]


# Steps that combine several parameters need values of other owners under "param".
COMBINES = {"crossed", "lbfgs"}
CASES = [
    *((name, shard, shard, 2) for name in OPTIMIZERS for shard in SHARDS),
    *((name, "element", "element", size) for name in OPTIMIZERS for size in (1, 3)),
    *((name, "element", "row", 2) for name in OPTIMIZERS),
    *((name, "element", "param", 3) for name in OPTIMIZERS),
    ("odd", "param", "element", 3),
]
CASES = [case for case in CASES if case[1] != "param" or case[0] not in COMBINES]


@pytest.mark.parametrize(("name", "shard", "into", "world_size"), CASES)
def test_a_run_resumes_with_all_its_state(
    name: str, shard: str, into: str, world_size: int, tmp_path: Path
) -> None:
    """Bit for bit on as many ranks sharded alike; elsewhere the state is, and the run is close."""
    saved, after = run_ranks(2, save_at_two, name, shard, tmp_path)[0]
    found = run_ranks(world_size, load_at_two, name, into, tmp_path, saved)
    if (shard, world_size) == (into, 2):
        for each in found:
            assert_same_nested(each, after)
    if into == "param" and name in COMBINES:
        return
    for value, expected in zip(found[-1][0], plain_at_four(name), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("is_full", [True, False])
@distributed(2)
def test_state_dicts_carry_all_state(name: str, is_full: bool) -> None:
    """Whole or in shards, into a fresh optimizer of the same model."""
    options = EVERYWHERE if is_full else StateDictOptions()
    model, optimizer = make_run(OPTIMIZERS[name], {})
    go(model, optimizer, 0, 2)
    saved = whole_values(optimizer.state_dict())
    state = get_optimizer_state_dict(model, optimizer, options=options)
    fresh = OPTIMIZERS[name](model.parameters())
    set_optimizer_state_dict(model, fresh, state)
    assert_same_nested(whole_values(fresh.state_dict()), saved)


@distributed(2)
def test_whole_state_is_that_of_a_plain_optimizer() -> None:
    """A plain optimizer loads it, and goes on as the sharded one."""
    for name in sorted(COMBINES):  # torch's load_state_dict loses the limits of deques
        make = OPTIMIZERS[name]
        model, optimizer = make_run(make, {})
        go(model, optimizer, 0, 2)
        state = get_optimizer_state_dict(model, optimizer, options=EVERYWHERE)
        plain, other = make_run(make, None)
        names = {fqn: number for number, (fqn, _) in enumerate(plain.named_parameters())}
        numbered = {names.get(key, key): value for key, value in state["state"].items()}
        groups = [
            {**group, "params": [names[fqn] for fqn in group["params"]]}
            for group in state["param_groups"]
        ]
        with torch.no_grad():
            for param, value in zip(plain.parameters(), model.parameters(), strict=True):
                param.copy_(whole_values(value))
        other.load_state_dict({"state": numbered, "param_groups": groups})
        go(model, optimizer, 2, 4)
        go(plain, other, 2, 4)
        for param, value in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(
                whole_values(value), param.detach(), rtol=1e-3, atol=1e-4, msg=name
            )


class Sliced(torch.optim.SGD):
    """Keeps a shard of some rows of a parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step, and keep some rows."""
        super().step(closure)
        param = self.param_groups[0]["params"][0]
        self.state[param]["rows"] = param.detach()[2:4].clone()


@distributed(2)
def test_a_shard_cut_as_no_parameter_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """On all ranks, naming the state."""
    model, optimizer = make_run(lambda params: Sliced(params, lr=0.1), {})
    go(model, optimizer, 0, 1)
    with pytest.raises(NotImplementedError, match=r"'rows'.* is a shard of 'inp.weight'"):
        save_checkpoint(tmp_path / "run", model, optimizer, step=1)
    assert not (tmp_path / "run").exists()


class Pair(NamedTuple):
    """State with names: a load would make a plain tuple of it, as torch's own raises."""

    mean: Any
    number: int


@dataclass
class Record:
    """State of a class without a `state_dict`."""

    mean: Any


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "Pair": lambda param: Pair(torch.zeros_like(param), 1),
    "Pair of an object": lambda param: Pair(Average(param), 1),
    "Pair in a list": lambda param: [{"pair": Pair(torch.zeros_like(param), 1)}],
    "Record": lambda param: Record(torch.zeros_like(param)),
    "Record in a tuple": lambda param: (Average(param), Record(torch.zeros_like(param))),
}


class KeepsForms(torch.optim.SGD):
    """Keeps state of a form that no save can hold."""

    def __init__(self, params: Any, form: str) -> None:
        super().__init__(params, lr=0.1)
        self.form = form

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step, and keep the state."""
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param]["kept"] = FORMS[self.form](param.detach())


@pytest.mark.parametrize("form", FORMS)
@distributed(2)
def test_state_with_names_of_its_own_is_refused_before_anything_changes(
    form: str, tmp_path: Path
) -> None:
    """By name: by `describe` before the first step, a save, a state dict and a load of one."""
    model, optimizer = make_run(lambda params: KeepsForms(params, form), {})
    name = form.partition(" ")[0]
    text = rf"(?s)(?=.*\.{name}\b)state 'kept' of 'inp.weight' is a .* no save can hold it"
    assert re.search(text, str(describe(model, optimizer)))
    go(model, optimizer, 0, 1)
    with pytest.raises(NotImplementedError, match=text):
        save_checkpoint(tmp_path / "run", model, optimizer, step=1)
    assert not (tmp_path / "run").exists()
    with pytest.raises(NotImplementedError, match=text):
        get_optimizer_state_dict(model, optimizer)
    plain_model, plain = make_run(lambda params: KeepsForms(params, form), None)
    go(plain_model, plain, 0, 1)
    before = {param: state["kept"] for param, state in optimizer.state.items()}
    with pytest.raises(NotImplementedError, match=text):
        set_optimizer_state_dict(model, optimizer, plain.state_dict())
    assert all(optimizer.state[param]["kept"] is kept for param, kept in before.items())


# --- torch.distributed.checkpoint ---


def save_by_dcp(path: Path) -> Any:
    """Save after two steps; return what the run has then."""
    model, optimizer = make_run(KeepsObjects, {})
    go(model, optimizer, 0, 2)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)
    return outcome(model, optimizer)


def load_by_dcp(path: Path, expected: Any) -> None:
    """Load into an optimizer that has taken no step, so that it has no objects."""
    model, optimizer = make_run(KeepsObjects, SHARDS["row"])
    ahead = StateDictOptions(init_optimizer_state=True)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=ahead)}
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert_same_nested(outcome(model, optimizer)[1], expected[1])


def test_dcp_carries_what_objects_say(tmp_path: Path) -> None:
    """To another world size and granularity, bit for bit."""
    run_ranks(3, load_by_dcp, tmp_path, run_ranks(2, save_by_dcp, tmp_path)[0])


@distributed(2)
def test_a_load_gives_objects_that_the_optimizer_holds_their_state() -> None:
    """The objects stay; one that is not there is an error on all ranks, and nothing changes."""
    model, optimizer = make_run(KeepsObjects, {})
    go(model, optimizer, 0, 2)
    saved = get_optimizer_state_dict(model, optimizer, options=EVERYWHERE)
    held = optimizer.state[model.inp.weight]["mean"]
    go(model, optimizer, 2, 3)
    set_optimizer_state_dict(model, optimizer, saved)
    assert optimizer.state[model.inp.weight]["mean"] is held
    assert held.taken == 2
    saved["state"]["inp.weight"]["mean"]["__object__"] = "Projector"
    go(model, optimizer, 2, 3)
    before = whole_values(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"expected an optimizer whose state has a Projector"):
        set_optimizer_state_dict(model, optimizer, saved)
    assert_same_nested(whole_values(optimizer.state_dict()), before)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"objects"}))
@distributed(2)
def test_dcp_saves_all_state_or_refuses_it_by_name(name: str, tmp_path: Path) -> None:
    """DCP pickles tuples and deques of rank 0: without the error, shards in them would be lost."""
    model, optimizer = make_run(OPTIMIZERS[name], {})
    go(model, optimizer, 0, 2)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    with pytest.raises(dcp.CheckpointException, match="save_checkpoint"):
        dcp.save(state, checkpoint_id=tmp_path / "dcp")
    assert not (tmp_path / "dcp" / ".metadata").exists()


# --- state made ahead ---


def _momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)


MADE_AHEAD: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "momentum": _momentum,
    "rprop": torch.optim.Rprop,
    "rmsprop": lambda params: torch.optim.RMSprop(params, weight_decay=0.1, momentum=0.5),
    "nadam": lambda params: torch.optim.NAdam(params, weight_decay=0.1),
    "asgd": torch.optim.ASGD,
    "adagrad": lambda params: torch.optim.Adagrad(params, lr_decay=0.1, weight_decay=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True, fused=True),
    "odd": KeepsEverything,
}


@pytest.mark.parametrize(
    *pairwise(
        name=MADE_AHEAD,
        when=["before", "between", "after"],
        is_fsdp2=[True, False],
        strategy=list(ShardingStrategy),
        world_size=[1, 2, 3],
    )
)
@distributed()
def test_reading_state_ahead_changes_no_training(
    name: str, when: str, is_fsdp2: bool, strategy: ShardingStrategy
) -> None:
    """Before the first backward, between it and the step, and after the step."""
    ahead = StateDictOptions(init_optimizer_state=True)

    def train(*, is_read: bool) -> list[Tensor]:
        model, optimizer = make_run(MADE_AHEAD[name], {"strategy": strategy})

        def read() -> None:
            if is_fsdp2:
                fsdp2.get_optimizer_state_dict(model, optimizer)
            else:
                get_optimizer_state_dict(model, optimizer, options=ahead)

        for step in range(3):
            if is_read and when == "before":
                read()
            model(torch.full((2, 5), 0.1 * step + 0.3)).square().mean().backward()
            if is_read and when == "between":
                read()
            optimizer.step()
            optimizer.zero_grad()
            if is_read and when == "after":
                read()
        return [whole_values(param.detach()) for param in model.parameters()]

    assert_same_nested(train(is_read=True), train(is_read=False))


# --- averages ---


def save_average(path: Path) -> Any:
    """Save an average of the parameters, other shards and numbers in `extra`."""
    model, optimizer = make_run(lambda params: torch.optim.SGD(params, lr=0.1), {})
    average = {name: param.detach().clone() for name, param in model.named_parameters()}
    go(model, optimizer, 0, 2)
    for name, param in model.named_parameters():
        average[name].lerp_(param.detach(), 0.5)
    teacher = nn.Linear(3, 2)
    fully_shard(teacher)
    extra = {
        "average": average,
        "masters": [param.detach().double() for param in model.parameters()],
        "vector": torch.cat([param.detach().view(-1) for param in model.parameters()]),
        "rows": model.inp.weight.detach()[2:7].clone(),
        "teacher": dict(teacher.named_parameters()),
        "position": (dist.get_rank(), torch.arange(3) + dist.get_rank()),
    }
    save_checkpoint(path, model, step=2, extra=extra)
    return whole_values(extra)


def load_average(path: Path, shard: str | None, expected: Any) -> None:
    """Load it, compare by value, and combine it with the parameters."""
    model, _ = make_run(lambda params: torch.optim.SGD(params, lr=0.1), shard and SHARDS[shard])
    found = load_checkpoint(path, model).extra
    assert_same_nested(whole_values(found), expected)
    is_owned = shard == "param"  # owners' values combine in a step alone
    for name, param in () if is_owned else model.named_parameters():
        average = found["average"][name]
        assert type(average) is (FlatShard if shard else Tensor), name
        wanted = whole_values(param.detach()).lerp(expected["average"][name], 0.5)
        with torch.no_grad():
            param.lerp_(average, 0.5)
        torch.testing.assert_close(whole_values(param.detach()), wanted)


@pytest.mark.parametrize(
    ("world_size", "shard"),
    [(1, "element"), (2, "element"), (3, "row"), (3, "param"), (1, ""), (2, "none"), (1, "none")],
)
@pytest.mark.parametrize("savers", [1, 2, 3])
def test_averages_in_extra_come_back_as_shards(
    savers: int, world_size: int, shard: str, tmp_path: Path
) -> None:
    """Of every rank that saves, in any layout; rank 0's of what is no shard."""
    saved = run_ranks(savers, save_average, tmp_path)[0]
    run_ranks(world_size, load_average, tmp_path, shard or None, saved)


@distributed(2)
def test_shards_in_extra_of_one_rank_alone_are_refused(tmp_path: Path) -> None:
    """The error names the value and `extra`."""
    model, _ = make_run(lambda params: torch.optim.SGD(params, lr=0.1), {})
    extra = {"average": model.inp.weight.detach()} if dist.get_rank() == 0 else None
    with pytest.raises(ValueError, match=r"'extra/average' once.* in `extra` on all ranks"):
        save_checkpoint(tmp_path, model, step=1, extra=extra)


# --- scalers ---


@distributed(2)
def test_a_scaler_that_was_off_is_refused_before_anything_changes(tmp_path: Path) -> None:
    """With the remedy, which works; a scaler that is off takes any state."""

    def make(*, enabled: bool) -> tuple[Any, Any, Any, Any]:
        model, optimizer = make_run(lambda params: torch.optim.SGD(params, lr=0.1), {})
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return model, optimizer, scheduler, torch.amp.GradScaler("cpu", 8.0, enabled=enabled)

    model, optimizer, scheduler, scaler = make(enabled=False)
    go(model, optimizer, 0, 1)
    scheduler.step()
    save_checkpoint(tmp_path, model, optimizer, scheduler=scheduler, scaler=scaler, step=1)
    model, optimizer, scheduler, scaler = make(enabled=True)
    before = whole_values([*model.parameters()]), scheduler.state_dict()
    with pytest.raises(ValueError, match=r"a scaler that was off.* strict=False"):
        load_checkpoint(tmp_path, model, optimizer, scheduler=scheduler, scaler=scaler)
    assert_same_nested((whole_values([*model.parameters()]), scheduler.state_dict()), before)
    with pytest.warns(UserWarning, match=r"a scaler that was off.* begins anew"):
        load_checkpoint(
            tmp_path, model, optimizer, scheduler=scheduler, scaler=scaler, strict=False
        )
    assert scheduler.last_epoch == 1
    assert scaler.get_scale() == 8.0
    model, optimizer, scheduler, scaler = make(enabled=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(tmp_path, model, optimizer, scheduler=scheduler, scaler=scaler)


@distributed(2)
def test_small_tensors_of_state_may_be_views_of_any_kind(tmp_path: Path) -> None:
    """Of strides other than 1, repeated, negated: their bytes are in no row."""
    pair = torch.tensor([1 + 2j, 3j])
    views = {
        "every_second": torch.arange(6.0)[::2],
        "real": pair.real,
        "repeated": torch.tensor(3.0).expand(3),
        "one_of_four": torch.arange(4.0)[2::4],
        "negated": pair.conj().imag,
    }
    model = nn.Linear(4, 4)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight].update(views)
    save_checkpoint(tmp_path, model, optimizer, step=1)
    optimizer.state.clear()
    load_checkpoint(tmp_path, model, optimizer)
    for name, view in views.items():
        assert_equal(optimizer.state[model.weight][name], view.resolve_neg())
