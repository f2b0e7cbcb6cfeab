"""`bucket_cap_mb`: what a bucket holds, when it is reduced, and that training stays the same."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from composable_shard import (
    FlatLayout,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    get_handles,
    no_sync,
    set_requires_all_reduce,
    shard_model,
)
from composable_shard.comm.trace import trace_events
from composable_shard.layout.buckets import cut_buckets
from tests.harness.assertions import Planned, assert_equal
from tests.harness.memory import peak_bytes
from tests.harness.pairs import pairwise
from tests.harness.properties import examples
from tests.harness.ranks import RankError, distributed, run_ranks
from tests.programs.models import (
    Net,
    Optional,
    Twins,
    assert_at_rest,
    assert_is_slice,
    collectives_of,
    loss_of,
    rank_input,
    shard_root,
)

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy
STRATEGIES = list(ShardingStrategy)
MIB = 1 << 20
CAP = 600 / MIB  # about a third of a block of a Net


def _bucketed(model: nn.Module, cap: float | None = CAP, **options: Any) -> nn.Module:
    return fully_shard(model, bucket_cap_mb=cap, **options)


# --- what a bucket holds ---


@examples(100)
@given(
    numels=st.lists(st.integers(0, 300), max_size=30),
    cap=st.integers(1, 1000),
    world_size=st.integers(1, 9),
    alignment=st.sampled_from([1, 2, 4, 8]),
    block=st.sampled_from([1, 3, 16, 50, 300]),
)
@example(numels=[30, 100, 1, 64, 30, 64, 1, 30], cap=297, world_size=4, alignment=1, block=3)
def test_s2_12_buckets_stay_below_the_cap(
    numels: list[int], cap: int, world_size: int, alignment: int, block: int
) -> None:
    """S2.12: but for a single larger parameter, with blocks and whole parameters too.

    All parameters are there once, from the last on.
    """
    buckets = cut_buckets(numels, cap, world_size, alignment, blocks=[block] * len(numels))
    for bucket in buckets:
        members = [numels[index] for index in bucket]
        owners = sorted(index % world_size for index in range(len(members)))
        for how in ({"blocks": [block] * len(members)}, {"owners": owners}):
            padded = FlatLayout.plan(members, world_size, alignment, **how).padded_numel
            assert padded <= cap or sum(numel > 0 for numel in members) == 1
    buckets = cut_buckets(numels, cap, world_size, alignment)
    assert [index for bucket in reversed(buckets) for index in bucket] == list(range(len(numels)))
    for bucket in buckets:
        members = [numels[index] for index in bucket]
        padded = FlatLayout.plan(members, world_size, alignment).padded_numel
        assert padded <= cap or sum(numel > 0 for numel in members) == 1
    for later, earlier in itertools.pairwise(buckets):
        # One parameter more would have been too much.
        members = [numels[index] for index in [earlier[-1], *later]]
        blocks = sum(-(-numel // alignment) for numel in members)
        assert -(-blocks // world_size) * world_size * alignment > cap


class _TwoDtypes(nn.Module):
    """Parameters of two dtypes in turn, one of them tied, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.half = nn.Linear(5, 5, dtype=torch.float64)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.middle = nn.Linear(5, 5, dtype=torch.float64)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x @ self.embedding.weight[:5])
        x = self.middle(self.half(x.double())).float()
        return self.head(torch.tanh(x))


@distributed(2)
def test_buckets_of_a_unit_are_in_the_order_of_the_backward() -> None:
    """Across dtypes; what is tied is one parameter, at its first place, and frozen ones are one."""
    model = _bucketed(_TwoDtypes(), 256 / MIB)
    names = [[str(entry.label) for entry in handle.entries] for handle in get_handles(model)]
    assert names == [
        ["middle.weight", "middle.bias"],
        ["frozen.weight", "frozen.bias"],
        ["half.weight", "half.bias"],
        ["embedding.weight"],
    ]


@distributed(2)
def test_the_cap_is_about_the_dtype_that_is_reduced() -> None:
    """Twice as much fits where gradients travel in half of the bytes."""
    half = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    for cap, policy in ((8192, MixedPrecisionPolicy()), (4096, half)):
        layers = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6)))
        model = _bucketed(layers, cap / MIB, mp_policy=policy)
        assert [len(handle.entries) for handle in get_handles(model)] == [2, 2, 2]


@distributed(2)
def test_flat_parameters_of_buckets() -> None:
    """The first of them has the last parameters."""
    model = _bucketed(Net(), use_orig_params=False)
    num_buckets = len(get_handles(model))
    names = [name for name, _ in model.named_parameters()]
    assert names == ["_flat_param", *(f"_flat_param_{i}" for i in range(1, num_buckets))]
    assert "out.weight" in [str(entry.label) for entry in get_handles(model)[0].entries]


# --- the option ---


@pytest.mark.parametrize("cap", [0, -1.0, float("inf"), float("nan"), True, "25"])
@distributed(1)
def test_a_cap_that_is_none(cap: object) -> None:
    """A clear error before anything is changed."""
    model = Net()
    with pytest.raises(ValueError, match="bucket_cap_mb to be None or a positive, finite number"):
        fully_shard(model, bucket_cap_mb=cap)  # type: ignore[arg-type]
    fully_shard(model, bucket_cap_mb=25)


@distributed(2)
def test_ranks_with_different_caps() -> None:
    """They would reduce different buckets."""
    model = _bucketed(nn.Linear(2, 2), 25 + dist.get_rank())
    with pytest.raises(RuntimeError, match="bucket_cap_mb=25"):
        model(torch.ones(2, 2))


@distributed(2)
def test_a_default_of_shard_model() -> None:
    """It reaches every unit; a dry run counts the padding of buckets."""
    plan = shard_model(Net(), {nn.Linear: None}, dry_run=True, bucket_cap_mb=CAP)
    model = shard_model(Net(), {nn.Linear: None}, bucket_cap_mb=CAP)
    handles = get_handles(model)
    assert len(handles) > 4
    assert plan.units[0].cost.param_nbytes == sum(handle.local_shard.nbytes for handle in handles)


# --- when it is reduced ---


class _Chain(nn.Module):
    """Layers of equal size; each notes when the backward reaches it."""

    def __init__(self, num_layers: int = 6, dim: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(num_layers))
        self.reached: list[Callable[[], object]] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            for note in self.reached:
                x.register_hook(lambda _, note=note: note())
        return x


def _num_issued(model: _Chain, x: Tensor) -> list[int]:
    """Return how many reductions were issued when the backward reached each layer."""
    counts: list[int] = []
    with trace_events() as events:
        model.reached = [
            lambda: counts.append(sum(event.kind == "issue_reduce" for event in events))
        ]
        model(x).square().mean().backward()
    return counts[::-1]


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_a_bucket_is_reduced_as_soon_as_it_is_full(strategy: ShardingStrategy) -> None:
    """Of one layer each: when the backward reaches layer k, those above it are on their way."""
    model = _bucketed(_Chain(), 1024 / MIB, strategy=strategy)
    for step in range(2):
        assert _num_issued(model, rank_input(3, 16, step=step)) == [5, 4, 3, 2, 1, 0]
    assert _num_issued(fully_shard(_Chain(), strategy=strategy), rank_input(3, 16)) == [0] * 6


@distributed(2)
def test_sibling_units_reduce_their_buckets() -> None:
    """Each unit in its own window of the backward; the one around them at its end."""
    model = nn.Sequential(_Chain(3), _Chain(3), nn.Linear(16, 16))
    for child in model[:2]:
        _bucketed(child, 1024 / MIB)
    _bucketed(model, 64 / MIB)
    counts: list[int] = []
    with trace_events() as events:
        for child in model[:2]:
            child.reached = [
                lambda: counts.append(sum(event.kind == "issue_reduce" for event in events))
            ]
        model(rank_input(3, 16)).square().mean().backward()
    # The second chain has ended when the first is reached.
    assert counts == [0, 1, 2, 3, 4, 5]


@distributed(2)
def test_a_step_issues_one_collective_for_each_bucket_and_pass() -> None:
    """Two all-reduces of bytes tell which parameters are used; inside no_sync nothing is sent."""
    model = _bucketed(Net())
    loss_of(model).backward()
    num_buckets = len(get_handles(model))
    log = collectives_of(lambda: loss_of(model).backward())
    assert log.count("all_gather") == log.count("reduce_scatter") == num_buckets
    assert log.count("all_reduce") == 2
    with no_sync(model):
        log = collectives_of(lambda: loss_of(model).backward())
    assert log.count("reduce_scatter") == log.count("all_reduce") == 0


# --- parity ---


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2, 3, on_device=True)
def test_training_is_that_without_buckets(strategy: ShardingStrategy, world_size: int) -> None:
    """Bitwise, but where gloo's all-reduce of three terms rounds by their place in the buffer."""
    torch.manual_seed(0)
    models = [Net(), Net()]
    models[1].load_state_dict(models[0].state_dict())
    for model, cap in zip(models, (None, CAP), strict=True):
        _bucketed(model, cap, strategy=strategy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in models]
    tolerance = 1e-5 if strategy is NO_SHARD and world_size == 3 else 0
    for step in range(4):
        losses = [loss_of(model, step) for model in models]
        torch.testing.assert_close(*losses, rtol=tolerance, atol=tolerance)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, expected in zip(*(model.parameters() for model in models), strict=True):
        values = ours.full_tensor(), expected.full_tensor()
        torch.testing.assert_close(*values, rtol=tolerance, atol=tolerance)
    assert_at_rest(models[1])


@pytest.mark.fast
@distributed(2)
def test_one_call_equals_ddp() -> None:
    """Losses and parameters of NO_SHARD with buckets are those of DistributedDataParallel."""
    torch.manual_seed(0)
    plain = Net()
    model = _bucketed(copy.deepcopy(plain), strategy=NO_SHARD)
    ddp = DistributedDataParallel(plain, bucket_cap_mb=CAP)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, ddp)]
    for step in range(5):
        losses = [loss_of(each, step) for each in (model, ddp)]
        assert_equal(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_is_slice(ours, expected)


def _hsdp(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    shard_root(model, mesh=mesh, bucket_cap_mb=CAP)


SHARDINGS: dict[str, Callable[[nn.Module], object]] = {
    **{strategy.name: partial(_bucketed, strategy=strategy) for strategy in STRATEGIES},
    "mesh": _hsdp,
    "kept": partial(_bucketed, reshard_after_forward=False),
    "flat": partial(_bucketed, use_orig_params=False),
    "in fp64": partial(_bucketed, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64)),
}


def _calls(model: nn.Module, step: int) -> list[Tensor]:
    return [loss_of(model, 2 * step + i) for i in range(2)]


@pytest.mark.parametrize("sharding", sorted(SHARDINGS.keys() - {"flat"}))
@distributed(2)
def test_patterns_of_calls_and_backwards(sharding: str) -> None:
    """Two calls in one backward, backwards in any order, twice over one graph, inside no_sync."""
    twins = Twins(Net, SHARDINGS[sharding])
    for model in twins:
        twins.backward(model, torch.stack(_calls(model, 0)).sum())
        twins.backward(model, torch.stack(_calls(model, 1)).sum())
        for loss in _calls(model, 2):
            twins.backward(model, loss, retain_graph=True)
            twins.backward(model, loss)
        for loss in reversed(_calls(model, 3)):
            twins.backward(model, loss)
    twins.assert_equal_gradients()
    assert_at_rest(twins.sharded, kept=twins.sharded_units(False if sharding == "kept" else None))


@pytest.mark.fast
@distributed(2)
def test_copies_train_alike() -> None:
    """A deep copy, and a copy of that."""
    twins = Twins(Net, shard_root)
    twins.sharded = copy.deepcopy(copy.deepcopy(_bucketed(copy.deepcopy(twins.plain))))
    twins.step(loss_of)
    assert collectives_of(lambda: loss_of(twins.sharded).backward()).count("reduce_scatter") > 4


@distributed(2)
def test_create_graph() -> None:
    """The graph of the gradients reads the full parameters, which stay until the next forward."""
    twins = Twins(Net, _bucketed)
    for model in twins:
        x = rank_input(4, 5).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        twins.backward(model, slope.square().sum())
    twins.assert_equal_gradients()


@distributed(2)
def test_gradients_of_inputs_alone_reduce_nothing() -> None:
    """One byte tells all ranks so, and one for each parameter that none was used."""
    model = _bucketed(Net())
    x = rank_input(4, 5).requires_grad_()
    loss = model(x).square().mean()
    log = collectives_of(lambda: torch.autograd.grad(loss, x))
    assert log.count("reduce_scatter") == 0
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2, on_device=True)
def test_an_error_after_buckets_have_gone(strategy: ShardingStrategy) -> None:
    """Drops the gradients as a whole; the next step is right without any reset."""
    twins = Twins(_Chain, partial(_bucketed, cap=1024 / MIB, strategy=strategy))
    model = twins.sharded

    def fail() -> None:
        counts.append(1)
        if len(counts) == 4:
            raise Planned

    for _ in range(2):
        counts: list[int] = []
        model.reached = [fail]
        with pytest.raises(Planned):
            model(rank_input(3, 16)).square().mean().backward()
        assert all(param.grad is None for param in model.parameters())
        model.reached = []
        twins.step(lambda net: net(rank_input(3, 16)).square().mean())
        for net in twins:
            net.zero_grad()
    assert_at_rest(model)


# --- ranks that differ ---


class _Picky(nn.Module):
    """Every layer may be left out, also on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.optional = Optional()

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return self.last(self.optional(self.first(x), used))


def _shard_nested(model: nn.Module, **options: Any) -> None:
    """Make the first layer a unit inside that of the others."""
    _bucketed(model.first, **options)
    _bucketed(model, **options)


@pytest.mark.parametrize(
    *pairwise(shard=[_bucketed, _shard_nested], strategy=STRATEGIES, world_size=(2, 3))
)
@distributed()
def test_parameters_that_some_ranks_use(
    shard: Callable[..., None], strategy: ShardingStrategy
) -> None:
    """In alternation: gradients are right, and nobody hangs."""
    twins = Twins(_Picky, partial(shard, cap=64 / MIB, strategy=strategy))
    rank = dist.get_rank()
    patterns = [[0, 1, 2], [0, 2] if rank else [1], [rank % 3], [] if rank else [2, 0], [1, 2]]
    for step, used in enumerate(patterns):
        x = rank_input(4, 5, step=step)
        twins.step(lambda model, x=x, used=used: model(x, used).square().mean())
        for model in twins:
            model.zero_grad()
    for model in twins:
        # The second backward meets units of which no forward came just before.
        losses = [model(x, [2] if rank == i else [0]).square().mean() for i in range(2)]
        for loss in losses:
            twins.backward(model, loss)
    twins.assert_equal_gradients()
    assert_at_rest(twins.sharded)


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_parameters_that_some_ranks_use_beside_others_with_hooks(
    strategy: ShardingStrategy,
) -> None:
    """Those with hooks keep their place among the others, on all ranks."""
    twins = Twins(_Picky, partial(_bucketed, cap=64 / MIB, strategy=strategy))
    for param in twins.sharded.optional.layers[1].parameters():
        param.register_post_accumulate_grad_hook(lambda _: None)
    for step in range(4):
        used = [0, 1, 2] if dist.get_rank() == step % 2 else [1]
        x = rank_input(4, 5, step=step)
        twins.step(lambda model, x=x, used=used: model(x, used).square().mean())
    twins.assert_equal_gradients()


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_a_backward_fails_after_buckets_that_all_ranks_have_reduced(
    strategy: ShardingStrategy,
) -> None:
    """The next step is right."""
    twins = Twins(_Picky, partial(_bucketed, cap=64 / MIB, strategy=strategy))
    for step in range(2):
        _fail_at_the_input(twins.sharded, [0, 1])
        x = rank_input(4, 5, step=step)
        twins.step(lambda model, x=x: model(x, [0, 1]).square().mean())
        twins.assert_equal_gradients()
        for model in twins:
            model.zero_grad()
    assert_at_rest(twins.sharded)


def _fail_at_the_input(model: nn.Module, used: list[int]) -> None:
    def fail(grad: Tensor) -> None:
        raise Planned

    x = torch.ones(4, 5, requires_grad=True)
    x.register_hook(fail)
    with pytest.raises(Planned):
        model(x, used).sum().backward()


def _fail_after_different_buckets(strategy: ShardingStrategy) -> None:
    model = _bucketed(_Picky(), 64 / MIB, strategy=strategy)
    used = [0, 1, 2] if dist.get_rank() else [0]
    _fail_at_the_input(model, used)
    model(rank_input(4, 5), used).square().mean().backward()


def _run_two_trees(used: list[list[int]]) -> None:
    pair = [_bucketed(_Picky(), 64 / MIB) for _ in range(2)]
    pair[1](pair[0](rank_input(4, 5), [0]), used[dist.get_rank()]).mean().backward()


@pytest.mark.parametrize(
    "body",
    [
        *(partial(_fail_after_different_buckets, strategy) for strategy in STRATEGIES),
        partial(_run_two_trees, [[], [0, 1, 2]]),
    ],
)
def test_a_collective_that_comes_between_different_buckets(body: partial[None]) -> None:
    """All ranks raise: one has issued reductions that the other has not."""
    with pytest.raises(RankError) as caught:
        run_ranks(2, body.func, *body.args)
    assert len(caught.value.errors) == 2
    assert all("the ranks are not in step" in text for text in caught.value.errors.values())


class _TiedOutside(_Picky):
    """Its layers also are used before them, by a unit around the picky one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Picky()
        self.last.weight = self.inner.last.weight

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return self.inner(super().forward(x, used), used)


def _shard_tied(model: nn.Module, **options: Any) -> None:
    _bucketed(model.inner, **options)
    _bucketed(model, **options)


@distributed(2)
def test_a_bucket_that_is_tied_to_another_unit() -> None:
    """It ends with the other unit, so nobody reduces it among the first ones."""
    twins = Twins(_TiedOutside, partial(_shard_tied, cap=64 / MIB))
    for step in range(3):
        used = [0] if dist.get_rank() == step % 2 else [0, 1, 2]
        x = rank_input(4, 5, step=step)
        twins.step(lambda model, x=x, used=used: model(x, used).square().mean())
    twins.assert_equal_gradients()
    assert_at_rest(twins.sharded)


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_a_rank_without_any_gradient(strategy: ShardingStrategy) -> None:
    """It does its part of the reductions that the others have begun."""
    twins = Twins(Optional, partial(_bucketed, cap=64 / MIB, strategy=strategy))
    for step in range(3):
        x = rank_input(4, 5, step=step).requires_grad_()
        used = [0, 1, 2] if dist.get_rank() == step % 2 else []
        twins.step(lambda model, x=x, used=used: model(x, used).square().mean())
    assert_at_rest(twins.sharded)


def _two_trees() -> Twins:
    return Twins(
        lambda: nn.ModuleList([_Picky(), _Picky()]),
        lambda pair: [_bucketed(model, 64 / MIB) for model in pair],
    )


@distributed(2)
def test_two_trees_in_one_backward() -> None:
    """One tree's gathers and the other's buckets keep one order on all ranks."""
    twins = _two_trees()
    for step in range(3):
        x = rank_input(4, 5, step=step)
        twins.step(lambda pair, x=x: pair[1](pair[0](x, [0, 2]), [0, 1, 2]).mean())
    twins.assert_equal_gradients()
    assert_at_rest(twins.sharded)


@distributed(2)
def test_two_trees_in_a_backward_after_another_one() -> None:
    """The first backward may leave graphs of both trees, though nothing waits for them."""
    twins = _two_trees()
    x = rank_input(4, 5)
    for pair in twins:
        losses = [(pair[0](x, [0]) * pair[1](x + i, [0, 1, 2])).square().mean() for i in range(2)]
        for loss in losses:
            twins.backward(pair, loss)
    twins.assert_equal_gradients()
    assert_at_rest(twins.sharded)


class _RunsAnother(nn.Module):
    """Calls another model between its layers, or runs its backward there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, call: nn.Module | None, backward: Any) -> Tensor:
        x = torch.tanh(self.first(x))
        if call is not None:
            x = call(x)
        else:
            x.register_hook(lambda grad: backward())
        return self.last(x)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_another_tree_inside_a_unit(strategy: ShardingStrategy, in_backward: bool) -> None:
    """The gradients that come after it are not lost; where a forward called it, buckets wait."""
    twins = Twins(
        lambda: nn.ModuleList([_RunsAnother(), nn.Linear(5, 5)]),
        lambda pair: [_bucketed(model, 64 / MIB, strategy=strategy) for model in pair],
    )

    def run(pair: nn.Module, x: Tensor) -> Tensor:
        model, other = pair
        call, backward = (None, other(x).square().sum().backward) if in_backward else (other, None)
        return model(x, call, backward).square().mean()

    for step in range(3):
        log = collectives_of(partial(twins.step, partial(run, x=rank_input(4, 5, step=step))))
        num_reduced = sum(event.kind == "reduce_scatter" for event in log.events)
        if strategy is not ShardingStrategy.NO_SHARD and not in_backward:
            assert num_reduced == len(get_handles(twins.sharded))
    assert_at_rest(twins.sharded)


class _Shifted(nn.Module):
    """The gradient of its last parameter needs nothing that a checkpoint must recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.shift = nn.ParameterList([torch.ones(5)])

    def forward(self, x: Tensor, is_used: bool) -> Tensor:
        x = torch.tanh(self.linear(x))
        return x + self.shift[0] if is_used else x + 1


class _UnitsInOneRegion(nn.Module):
    """Several units in one region of checkpointing, whose recomputation gathers them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(_Shifted() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(5))

    def _all(self, x: Tensor, used: list[bool]) -> Tensor:
        for part, is_used in zip(self.parts, used, strict=True):
            x = part(x, is_used)
        return x

    def forward(self, x: Tensor, used: list[bool]) -> Tensor:
        return checkpoint(self._all, x * self.scale, used, use_reentrant=False)


def _shard_parts(model: nn.Module) -> None:
    # Gradients that are not packed in place: the recomputation finds the values.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    for part in model.parts:
        _bucketed(part, 16 / MIB, reshard_after_forward=True, mp_policy=policy)
    _bucketed(model)


@distributed(2)
def test_units_that_are_recomputed_together() -> None:
    """Their buckets wait for their end, so the gathers keep their place."""
    twins = Twins(_UnitsInOneRegion, _shard_parts)
    for step in range(3):
        used = [dist.get_rank() == step % 2] * 4
        x = rank_input(4, 5, step=step)
        twins.step(lambda model, x=x, used=used: model(x, used).square().mean())
    assert_at_rest(twins.sharded)


# --- reentrant checkpointing ---


class _RepeatedRegion(nn.Module):
    """Uses a layer in several regions of reentrant checkpointing, on the ranks that are told."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor, num_uses: int) -> Tensor:
        x = self.first(x)
        for _ in range(num_uses):
            x = checkpoint(self._region, x, use_reentrant=True)
        return self.last(x)

    def _region(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(x))


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_a_gradient_that_comes_after_its_bucket_has_gone(strategy: ShardingStrategy) -> None:
    """On one rank: all reduce that bucket once more, in each step."""
    torch.manual_seed(0)
    plain = _RepeatedRegion()
    models = [_bucketed(copy.deepcopy(plain), cap, strategy=strategy) for cap in (None, 64 / MIB)]
    num_extra = []
    for step in range(3):
        x = rank_input(4, 5, step=step)
        counts = []
        for model in models:
            loss = model(x, 3 if dist.get_rank() else 1).square().mean()
            log = collectives_of(loss.backward)
            counts.append(len(log.events) - len(get_handles(model)))
        num_extra.append(counts[1] - counts[0])
    # A weight and a bias are two buckets. One tells all ranks that there are gradients, unless they
    # are reduced in an agreed order anyway.
    one = int(strategy not in (ShardingStrategy.SHARD_OPTIM, ShardingStrategy.NO_SHARD))
    assert num_extra == [2 + one] * 3
    for ours, expected in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), expected.grad.full_tensor())
    assert_at_rest(models[1])


# --- memory ---


def _peak_with_cap(cap: float | None) -> int:
    # The gather is a part of the backward then, so what is freed of it counts.
    model = _bucketed(_Chain(8, 64), cap, reshard_after_forward=True)
    peaks = []
    for _ in range(4):
        loss = model(torch.ones(2, 64)).sum()
        with peak_bytes() as memory:
            loss.backward()
        model.zero_grad()
        peaks.append(memory.peak)
    return min(peaks[1:])


@pytest.mark.counts
@distributed(2)
def test_the_backward_of_a_whole_model_needs_less_memory() -> None:
    """All parameters and little more: buckets are freed as the gradient shards grow."""
    layer = 64 * 64 * 4
    with_buckets, without = _peak_with_cap(layer / MIB), _peak_with_cap(None)
    assert with_buckets <= 8 * layer + 2 * layer
    assert with_buckets <= without - 2 * layer + 1024


class _Sided(nn.Linear):
    """Keeps what a loss beside the output reads."""

    def forward(self, x: Tensor) -> Tensor:
        self.side = x @ self.weight
        return super().forward(x)


@pytest.mark.parametrize(*pairwise(strategy=STRATEGIES, puts_off=["no_sync", "all_reduce"]))
@distributed(2)
def test_c7_waiting_buckets_are_reduced_by_a_backward_that_adds_nothing(
    strategy: ShardingStrategy, puts_off: str
) -> None:
    """They waited on, while the other units' gradients were published."""
    twins = Twins(
        lambda: nn.Sequential(_Sided(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)),
        _shard_last_in_buckets,
        strategy=strategy,
    )
    for model in twins:
        model[0].weight.requires_grad_(False)
        if model is twins.sharded:
            set_requires_all_reduce(model, puts_off != "all_reduce")
        with no_sync(twins.sharded) if puts_off == "no_sync" else nullcontext():
            twins.backward(model, loss_of(model))
        if model is twins.sharded:
            set_requires_all_reduce(model, True)
        model(rank_input(4, 5).requires_grad_())
        model[0].side.square().mean().backward()  # the weight is frozen
    twins.assert_equal_gradients()


def _shard_last_in_buckets(model: nn.Module, strategy: ShardingStrategy) -> None:
    fully_shard(model[0], strategy=strategy)
    fully_shard(model[2], strategy=strategy, bucket_cap_mb=1e-5)
    fully_shard(model, strategy=strategy)
