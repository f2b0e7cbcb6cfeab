"""Hooks on gradients run as soon as a unit is over, once, with the final gradient."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from composable_shard import (
    FlatShard,
    ShardingStrategy,
    fully_shard,
    get_handles,
    no_sync,
    set_is_last_backward,
    set_requires_all_reduce,
    unshard_params,
)
from composable_shard.comm import collectives
from composable_shard.comm.trace import count_collectives, trace_events
from tests.harness.assertions import Planned, assert_equal
from tests.harness.memory import peak_bytes
from tests.harness.ranks import distributed
from tests.programs.models import (
    Layer,
    Net,
    Optional,
    Twins,
    assert_at_rest,
    loss_of,
    make_net,
    rank_input,
    shard_blocks,
    shard_children,
    shard_layers,
    wait_for_engine,
)

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy
STRATEGIES = list(ShardingStrategy)


class _Steps:
    """Steps an optimizer of its own for each parameter, in a hook; counts."""

    def __init__(self, params: Iterable[nn.Parameter], make: Callable[..., Any]) -> None:
        self.optimizers = {param: make([param]) for param in params}
        self.calls: Counter[nn.Parameter] = Counter()
        for param in self.optimizers:
            param.register_post_accumulate_grad_hook(self)

    def __call__(self, param: nn.Parameter) -> None:
        """Step, and drop the gradient."""
        self.calls[param] += 1
        self.optimizers[param].step()
        self.optimizers[param].zero_grad()


def _sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    partial(torch.optim.AdamW, lr=0.05, foreach=False),
    partial(torch.optim.AdamW, lr=0.05, foreach=True),
    partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=False),
    partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True),
]


@pytest.mark.parametrize(
    ("strategy", "world_size"), list(zip(STRATEGIES, (3, 2, 3, 2), strict=True))
)
@distributed()
def test_training_is_that_of_the_ordinary_loop(strategy: ShardingStrategy) -> None:
    """Bitwise, with hooks on all parameters, on some of each unit, and on some units."""
    for make, hooked in zip(OPTIMIZERS, ["all", "some", "some units", "all"], strict=True):
        models = [make_net(4, strategy=strategy) for _ in range(2)]
        named = list(models[1].named_parameters())
        if hooked == "some":
            named = named[::2]
        elif hooked == "some units":
            named = [(name, p) for name, p in named if "blocks.1" in name or "blocks.2" in name]
        steps = _Steps([param for _, param in named], make)
        rest = [param for param in models[1].parameters() if param not in steps.optimizers]
        optimizers = [make(models[0].parameters())] + ([make(rest)] if rest else [])
        for step in range(3):
            losses = [loss_of(model, step) for model in models]
            assert_equal(losses[1].detach(), losses[0].detach())
            for loss in losses:
                loss.backward()
            assert all(param.grad is None for param in steps.optimizers)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for param, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
            assert_equal(param.to_local(), expected.to_local())
        assert set(steps.calls.values()) == {3}
        assert_at_rest(models[1])


def _positions(model: nn.Module) -> list[str]:
    with trace_events() as log:
        loss_of(model).backward()
    return [
        f"{event.kind} {event.name}"
        for event in log
        if event.kind in ("gradient_hooks", "compute_backward")
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_hooks_run_one_unit_later(strategy: ShardingStrategy) -> None:
    """Those of unit k run before the backward of unit k - 2, from the first step on."""
    model = make_net(5, strategy=strategy)
    _Steps(model.parameters(), _sgd)
    for _ in range(2):
        positions = _positions(model)
        for k in range(2, 5):
            hooks = positions.index(f"gradient_hooks blocks.{k}")
            assert hooks < positions.index(f"compute_backward blocks.{k - 2}")
            assert hooks > positions.index(f"compute_backward blocks.{k - 1}")


@distributed(2)
def test_only_units_with_hooks_exchange_early() -> None:
    """Each of them costs one small all-reduce more; the others, and other models, nothing."""
    model, other = make_net(5), make_net(5)
    model.get_parameter("blocks.2.down.bias").register_post_accumulate_grad_hook(id)
    counts = []
    for each in (model, other):
        loss_of(each).backward()
        with count_collectives() as log:
            loss_of(each).backward()
        counts.append(Counter(event.kind for event in log.events))
    counts[0]["all_reduce"] -= 1
    assert counts[0] == counts[1]


def _held_nbytes(model: nn.Module) -> int:
    """Return the bytes of gradient shards that are there now, published or not."""
    tensors = [param.grad.to_local() for param in model.parameters() if param.grad is not None]
    for handle in get_handles(model):
        tensors += [
            t for t in (handle.grads.reduced, handle.grads.reduction.output) if t is not None
        ]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@distributed(2, 3)
def test_no_more_than_two_units_hold_gradient_shards(strategy: ShardingStrategy) -> None:
    """Whatever the number of units: the peak does not grow with it."""
    peaks = []
    for num_blocks in (4, 8):
        model = nn.Sequential(*(Layer(64, 64) for _ in range(num_blocks)))
        # All of them together would be gathered ahead at once.
        shard_children(model, strategy=strategy, prefetch_nbytes=0)
        steps = _Steps(model.parameters(), _sgd)
        largest = 0

        def watch(_: Tensor, model: nn.Module = model) -> None:
            nonlocal largest
            largest = max(largest, _held_nbytes(model))

        for param in steps.optimizers:
            param.register_post_accumulate_grad_hook(watch)
            param.register_hook(watch)
        x = rank_input(2, 64)
        for _ in range(2):
            model(x).sum().backward()
        unit = max(handle.layout.shard_numel * 4 for handle in get_handles(model))
        assert unit <= largest <= 2 * unit
        loss = model(x).sum()
        with peak_bytes() as memory:
            loss.backward()
        peaks.append(memory.peak)
    assert peaks[1] - peaks[0] < unit / 2  # one more unit's shard would be `unit` more each


def _make_plain() -> nn.Module:
    model = nn.Sequential(*(Layer(64, 64) for _ in range(8)))
    shard_children(model)
    return model


@distributed(2)
def test_without_hooks_all_gradient_shards_are_there_at_the_end() -> None:
    """What the hooks save, as a check of the test above."""
    model = _make_plain()
    x = rank_input(2, 64)
    model(x).sum().backward()
    unit = max(handle.layout.shard_numel * 4 for handle in get_handles(model))
    assert _held_nbytes(model) == 8 * unit


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_accumulation_ends_with_one_hook_and_the_whole_gradient(strategy: ShardingStrategy) -> None:
    """Three microbatches without and one with reduction, twice."""
    models = [make_net(4, strategy=strategy) for _ in range(2)]
    optimizer = torch.optim.AdamW(models[0].parameters(), lr=0.05)
    steps = _Steps(models[1].parameters(), partial(torch.optim.AdamW, lr=0.05))
    for turn in range(2):
        for model in models:
            for micro in range(4):
                with no_sync(model) if micro < 3 else nullcontext():
                    loss_of(model, micro).backward()
                assert set(steps.calls.values()) <= {turn, turn + 1}
        assert set(steps.calls.values()) == {turn + 1}
        optimizer.step()
        optimizer.zero_grad()
    for param, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert_equal(param.to_local(), expected.to_local())


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_hooks_wait_for_the_last_backward(strategy: ShardingStrategy) -> None:
    """Also where each backward reduces into shards, and the next one adds to them."""
    models = [make_net(4, strategy=strategy) for _ in range(2)]
    steps = _Steps(models[1].parameters(), partial(torch.optim.SGD, lr=0.05))
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.05)
    for model in models:
        for micro in range(3):
            set_is_last_backward(model, micro == 2)
            loss_of(model, micro).backward()
            assert set(steps.calls.values()) <= {int(model is models[1] and micro == 2)}
    optimizer.step()
    assert set(steps.calls.values()) == {1}
    for param, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert_equal(param.to_local(), expected.to_local())


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(4)
def test_hooks_wait_for_the_all_reduce_that_was_put_off(strategy: ShardingStrategy) -> None:
    """On a 2-D mesh they see the mean over all ranks, once."""
    mesh = init_device_mesh("cpu", (2, 2))
    models = [make_net(4, strategy=strategy, mesh=mesh) for _ in range(2)]
    seen: dict[str, Tensor] = {}

    def note(name: str, param: FlatShard) -> None:
        assert name not in seen
        seen[name] = param.grad.full_tensor()
        param.grad = None

    for name, param in models[1].named_parameters():
        param.register_post_accumulate_grad_hook(partial(note, name))
    for model in models:
        set_requires_all_reduce(model, False)
        loss_of(model).backward()
        set_requires_all_reduce(model, True)
        loss_of(model, 1).backward()
    for name, param in models[0].named_parameters():
        assert_equal(seen[name], param.grad.full_tensor(), name)
    assert len(seen) == len(list(models[0].parameters()))


# --- which gradients are final ---


class _HookLog:
    """Notes what hooks see, and issues a collective: ranks must run hooks in the same order."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, Tensor] = {}
        self.order: list[str] = []
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(partial(self.note, name))

    def note(self, name: str, param: FlatShard) -> None:
        """Take the gradient."""
        assert name not in self.seen, f"{name} was seen twice"
        param.grad.norm()
        self.order.append(name)
        self.seen[name] = param.grad.full_tensor()

    def check(self, plain: nn.Module) -> None:
        """Compare with the average gradients of the plain twin, and the order with other ranks."""
        for name, param in plain.named_parameters():
            assert (param.grad is None) == (name not in self.seen), name
            if param.grad is not None:
                torch.testing.assert_close(self.seen[name], param.grad, rtol=1e-6, atol=1e-7)
        orders: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(orders, self.order)
        assert all(order == self.order for order in orders)
        self.seen.clear()
        self.order.clear()


def _check_twins(twins: Twins, run: Callable[[nn.Module], Tensor], steps: int = 3) -> None:
    log = _HookLog(twins.sharded)
    for _ in range(steps):
        for model in twins:
            twins.backward(model, run(model))
        log.check(twins.plain)
        for model in twins:
            model.zero_grad()
    assert_at_rest(twins.sharded)


@pytest.mark.parametrize("used", [[[0, 1, 2], [0, 2]], [[0], [0, 1]], [[0, 2], [0, 2]]])
@distributed(2)
def test_parameters_that_not_all_ranks_used(used: list[list[int]]) -> None:
    """Hooks run alike on all ranks: where any rank used the parameter."""

    def make() -> nn.Module:
        return nn.ModuleDict({"a": Layer(5, 5), "b": Optional(), "c": Layer(5, 5)})

    def run(model: Any) -> Tensor:
        return model["c"](model["b"](model["a"](rank_input(4, 5)), used[dist.get_rank()])).sum()

    twins = Twins(make, lambda model: [fully_shard(child) for child in model.values()])
    _check_twins(twins, run)


@pytest.mark.fast
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_OPTIM])
@distributed(2)
def test_a_backward_through_two_calls(strategy: ShardingStrategy) -> None:
    """A unit is over when its first call is, also the first time that a backward spans two."""
    twins = Twins(Net, shard_blocks, strategy=strategy)
    _check_twins(twins, lambda model: loss_of(model) + loss_of(model, 1))


class _TiedEnds(nn.Module):
    """The first and the last unit share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(5))
        self.layers[4].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_OPTIM])
@distributed(2)
def test_tied_parameters(strategy: ShardingStrategy) -> None:
    """The hook waits for the gradient of the unit that ran first."""
    twins = Twins(_TiedEnds, shard_layers, strategy=strategy)
    _check_twins(twins, lambda model: model(rank_input(4, 5)).sum())


class _CheckpointedTwice(nn.Module):
    """Units some of which are called twice, in a checkpoint and outside."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(5, 5) for _ in range(3))
        self.inp, self.use_reentrant = nn.Linear(5, 5), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index in (0, 1, 2):
            x = checkpoint(self.blocks[index], x, use_reentrant=self.use_reentrant)
        x = checkpoint(self.blocks[0], x, use_reentrant=self.use_reentrant)
        return self.blocks[2](self.blocks[1](x))


@pytest.mark.parametrize("use_reentrant", [True, False])
@distributed(2)
def test_checkpoints(use_reentrant: bool) -> None:
    """A backward nested in another may bring a gradient late: then hooks wait for the end."""
    twins = Twins(lambda: _CheckpointedTwice(use_reentrant), shard_blocks)
    _check_twins(twins, lambda model: model(rank_input(4, 5)).sum())


class _Late(nn.Module):
    """Autograd is done with a unit, but for one weight, before it is with the units before it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(5, 7) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        stash: list[Tensor] = []
        handle = self.blocks[3].register_forward_pre_hook(
            lambda module, _: stash.append(module.up.weight) and None
        )
        with torch.no_grad():
            self.blocks[3](x)
        handle.remove()
        x = torch.tanh(x @ stash[0].T @ stash[0])
        for block in self.blocks:
            x = block(x)
        return x


@distributed(2)
def test_a_gradient_that_arrives_after_its_unit() -> None:
    """Autograd is going to accumulate it: nothing is published before."""
    twins = Twins(_Late, shard_blocks, strategy=SHARD_GRAD_OP)
    _check_twins(twins, lambda model: model(rank_input(4, 5)).sum())


@distributed(2)
def test_a_gradient_that_arrives_after_its_unit_in_a_flat_parameter() -> None:
    """The hook on the flat parameter runs once, with all of the gradient."""
    torch.manual_seed(0)
    models = [_Late() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        shard_blocks(model, strategy=SHARD_GRAD_OP, use_orig_params=False)
    log = _HookLog(models[1])
    for model in models:
        model(rank_input(4, 5)).sum().backward()
    for name, param in models[0].named_parameters():
        assert_equal(log.seen[name], param.grad.full_tensor(), name)


@distributed(2)
def test_hooks_on_one_rank_only() -> None:
    """The other ranks take part in what the unit's exchange needs."""
    model, other = make_net(4), make_net(4)
    seen = []
    if dist.get_rank() == 0:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    for each in (model, other):
        loss_of(each).backward()
    assert len(seen) == (len(list(model.parameters())) if dist.get_rank() == 0 else 0)
    for param, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert_equal(param.grad.to_local(), expected.grad.to_local())


@distributed(2)
def test_hooks_that_come_after_the_first_forward_run_at_the_end() -> None:
    """Ranks could not know of each other's."""
    model = make_net(4)
    loss_of(model).backward()
    model.zero_grad()
    steps = _Steps(model.parameters(), _sgd)
    positions = _positions(model)
    assert positions[-5:] == sorted(positions[-5:], reverse=True) or len(steps.calls) > 0
    assert all(position.startswith("gradient_hooks") for position in positions[-5:])
    assert set(steps.calls.values()) == {1}


@distributed(2)
def test_hooks_that_a_backward_registers_run_at_its_end() -> None:
    """The first ones of the model, with the gradients that this backward has published."""
    model = make_net(4)
    loss_of(model).backward()
    model.zero_grad()
    params, seen = list(model.parameters()), dict[Any, Any]()

    def register(_: Any) -> None:
        for param in params:
            param.register_post_accumulate_grad_hook(lambda p: seen.update({p: p.grad}))

    once = model.blocks[2].up.weight.register_hook(register)
    loss_of(model).backward()
    once.remove()
    assert set(seen) == set(params)
    assert all(seen[param] is param.grad for param in params)


@distributed(1)
def test_world_size_one() -> None:
    """The same moments, without communication."""
    mesh = DeviceMesh.from_group(dist.new_group([dist.get_rank()]), "cpu")
    models = [make_net(4, mesh=mesh) for _ in range(2)]
    optimizer = _sgd(models[0].parameters())
    _Steps(models[1].parameters(), _sgd)
    for step in range(2):
        loss_of(models[0], step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with trace_events() as log:
            loss_of(models[1], step).backward()
        kinds = [f"{event.kind} {event.name}" for event in log]
        assert kinds.index("gradient_hooks blocks.3") < kinds.index("compute_backward blocks.1")
    for param, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert_equal(param.to_local(), expected.to_local())


@distributed(2)
def test_one_flat_parameter_for_each_unit() -> None:
    """use_orig_params=False: the hook is on the flat parameter."""
    models = [make_net(4, use_orig_params=False) for _ in range(2)]
    optimizer = _sgd(models[0].parameters())
    steps = _Steps(models[1].parameters(), _sgd)
    for step in range(3):
        for model in models:
            loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert set(steps.calls.values()) == {3}
    for param, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert_equal(param.to_local(), expected.to_local())


@distributed(2)
def test_hooks_from_before_sharding() -> None:
    """They come along with the parameter, and run early too."""
    torch.manual_seed(0)
    model = Net(4)
    steps = _Steps(model.parameters(), _sgd)
    shard_blocks(model)
    positions = _positions(model)
    assert positions.index("gradient_hooks blocks.3") < len(positions) - 5
    assert set(steps.calls.values()) == {1}


# --- what a hook may not do, and errors ---


@pytest.mark.parametrize("error", [Planned, KeyboardInterrupt])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_an_error_in_a_hook_of_one_rank_comes_at_the_end(
    strategy: ShardingStrategy, error: type[BaseException]
) -> None:
    """All gradients are published on all ranks, and the next step is right."""
    model, other = make_net(4, strategy=strategy), make_net(4, strategy=strategy)
    calls: list[str] = []

    def hook(name: str, _: Tensor) -> None:
        calls.append(name)
        if name == "blocks.2.up.weight" and dist.get_rank() == 0 and len(calls) < 9:
            raise error("planned")

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(partial(hook, name))
    for each in (model, other):
        fails = each is model and dist.get_rank() == 0
        with pytest.raises(error, match="planned") if fails else nullcontext():
            loss_of(each).backward()
    if dist.get_rank() == 0:
        assert calls[-1] == "blocks.2.up.weight"  # no further hook ran
    for turn in (1, 2):
        for param, expected in zip(model.parameters(), other.parameters(), strict=True):
            assert_equal(param.grad.to_local(), expected.grad.to_local(), str(turn))
        assert_at_rest(model)
        calls += [""] * 9
        for each in (model, other):
            each.zero_grad()
            loss_of(each, turn).backward()


@distributed(2, on_device=True)
def test_a_failed_backward_keeps_what_hooks_have_seen() -> None:
    """The units that were over keep theirs, the others get none; the next step is right."""
    model, other = make_net(4), make_net(4)
    _HookLog(model)
    for each in (model, other):
        loss_of(each)

    def fail(*args: Any) -> None:
        args[-1].register_hook(lambda _: _raise())

    def _raise() -> None:
        raise Planned("planned")

    handle = model.blocks[0].register_forward_hook(fail)
    with pytest.raises(Planned):
        loss_of(model).backward()
    handle.remove()
    wait_for_engine(model)
    has_grad = {n.split(".")[1] for n, p in model.named_parameters() if p.grad is not None}
    assert has_grad == {"3"}
    model.zero_grad()
    for _, param in model.named_parameters():
        param._post_accumulate_grad_hooks.clear()
    for each in (model, other):
        loss_of(each, 1).backward()
    for param, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert_equal(param.grad.to_local(), expected.grad.to_local())
    assert_at_rest(model)


@pytest.mark.parametrize("place", ["issue", "wait"])
@distributed(2)
def test_an_error_in_any_exchange_leaves_the_next_step_right(place: str) -> None:
    """While it is issued, or waited for, at every position of a backward."""
    model, other = make_net(4), make_net(4)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(id)
    for each in (model, other):
        loss_of(each, 1).backward()
    all_reduce = collectives.all_reduce
    for k in range(1, 6):
        counter = _FailingAtCount(k)

        def failing(*args: Any, counter: _FailingAtCount = counter, **options: Any) -> Any:
            if place == "issue":
                counter.wait()
            work = all_reduce(*args, **options)
            return counter.around(work) if place == "wait" else work

        loss = loss_of(model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "all_reduce", failing)
            # Three units are over early, and what is left is asked about together.
            with pytest.raises(Planned) if k < 5 else nullcontext():
                loss.backward()
        model.zero_grad()
        loss_of(model, 1).backward()
        for param, expected in zip(model.parameters(), other.parameters(), strict=True):
            assert_equal(param.grad.to_local(), expected.grad.to_local())
        assert_at_rest(model)
        model.zero_grad()


class _FailingAtCount:
    """Counts, and raises at the k-th time."""

    def __init__(self, k: int, work: Any = None) -> None:
        self.k, self.calls, self.work = k, [0], work

    def around(self, work: Any) -> _FailingAtCount:
        """Return one that waits for `work` first, and counts together with this one."""
        wrapped = _FailingAtCount(self.k, work)
        wrapped.calls = self.calls
        return wrapped

    def wait(self, *_: Any) -> None:
        """Wait, and count."""
        if self.work is not None:
            self.work.wait()
        self.calls[0] += 1
        if self.calls[0] == self.k:
            raise Planned("planned")


@distributed(2)
def test_a_hook_may_not_step_units_that_are_not_over() -> None:
    """The backward still needs them; the error names the parameter."""
    model = make_net(4)
    optimizer = _sgd(model.parameters())
    before = [param.full_tensor() for param in model.parameters()]

    def step(_: Tensor) -> None:
        model.blocks[0].up.weight.grad = torch.ones_like(model.blocks[0].up.weight)
        optimizer.step()

    model.blocks[3].up.weight.register_post_accumulate_grad_hook(step)
    with pytest.raises(RuntimeError, match=r"'(inp|blocks.0.up).weight' was written while a backw"):
        loss_of(model).backward()
    assert_equal(model.blocks[0].up.weight.full_tensor(), before[2])


@distributed(2)
def test_a_hook_may_not_open_a_scope_while_the_backward_runs() -> None:
    """The gradients of other units are not there yet."""
    model = make_net(4)

    def look(_: Tensor) -> None:
        with unshard_params(model):
            pass

    removable = model.blocks[3].up.weight.register_post_accumulate_grad_hook(look)
    with pytest.raises(RuntimeError, match="can't be opened inside a backward pass"):
        loss_of(model).backward()
    assert all(param.grad is not None for param in model.parameters())
    removable.remove()
    model.inp.weight.register_post_accumulate_grad_hook(look)  # of the unit that is over last
    loss_of(model).backward()
    assert_at_rest(model)


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_OPTIM])
@distributed(2)
def test_computing_a_stepped_unit_again_raises(strategy: ShardingStrategy) -> None:
    """It would have other weights than in the forward."""
    model = make_net(4, strategy=strategy)
    _Steps(model.parameters(), _sgd)

    def again(*args: Any) -> None:
        args[-1].register_hook(lambda _: model.blocks[3](rank_input(4, 15)) and None)

    handle = model.blocks[0].register_forward_hook(again)
    with pytest.raises(RuntimeError, match=r"unit 'blocks.3.*' is computed again in a backward"):
        loss_of(model).backward()
    handle.remove()
    for param in model.parameters():
        param.grad = None
    loss_of(model).backward()
    assert_at_rest(model)


@distributed(2)
def test_a_copy_agrees_anew() -> None:
    """Hooks are not copied, as with plain parameters; the copy exchanges nothing early."""
    model = make_net(4)
    _Steps(model.parameters(), _sgd)
    loss_of(model).backward()
    twin = copy.deepcopy(model)
    loss_of(twin).backward()
    assert not any(handle.shown.has_early_hooks for handle in get_handles(twin))


class _PassesThrough(nn.Module):
    """A unit whose last part may let its input through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), Optional()

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return self.last(self.first(x), used)


@distributed(2)
def test_a_unit_is_reached_again_after_its_gradients_were_final() -> None:
    """By an earlier call in the same backward, which does not use its parameters."""
    twins = Twins(_PassesThrough, shard_children)
    calls: list[Tensor] = []
    for param in twins.sharded.parameters():
        param.register_post_accumulate_grad_hook(calls.append)

    def run(model: nn.Module) -> Tensor:
        uses: list[list[int]] = [[], [0, 1, 2]]
        return sum(model(rank_input(4, 5), used).square().mean() for used in uses)

    twins.step(run)
    assert len(calls) == len(list(twins.sharded.parameters()))
