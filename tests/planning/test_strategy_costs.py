"""What each strategy costs, by formula and measured: bytes held at rest, bytes on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    count_collectives,
    fully_shard,
    get_handles,
    get_states,
    shard_model,
)
from composable_shard.comm.trace import CollectiveLog
from composable_shard.options import Block, Granularity
from composable_shard.planning import ShardingPlan, by_class
from composable_shard.planning.costs import FlatParamCost, RankCounts, sent_nbytes
from composable_shard.torch_private import resolve_group
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs.models import Layer, Net, rank_input

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, reshard": {"reshard_after_forward": True},
    "full, keep": {"reshard_after_forward": False},
    **{each.value: {"strategy": each} for each in (SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD)},
}
BF16, F32 = torch.bfloat16, torch.float32
POLICIES = {
    "fp32": (F32, MixedPrecisionPolicy()),
    "fp32 in bf16": (F32, MixedPrecisionPolicy(param_dtype=BF16)),
    "bf16 with fp32 main": (BF16, MixedPrecisionPolicy(main_dtype=F32)),
    "and reduced in fp32": (BF16, MixedPrecisionPolicy(main_dtype=F32, reduce_dtype=F32)),
    "gathered in bf16": (F32, MixedPrecisionPolicy(gather_dtype=BF16)),
    "gathered in int8": (F32, MixedPrecisionPolicy(gather_dtype=torch.int8)),
}
# By number of ranks, None for a 1-D mesh of all of them.
SHAPES = {2: [None, (2, 1)], 3: [None], 4: [(2, 2)]}
ALWAYS = ("fp32", "bf16 with fp32 main")
Case = tuple[str, torch.dtype, dict[str, Any]]


def _make_padded(dtype: torch.dtype = F32) -> Net:
    """Return a model with padding, and with a frozen parameter in one unit."""
    torch.manual_seed(0)
    model = Net().to(dtype)
    model.blocks[1].up.bias.requires_grad_(False)
    return model


def _shard_as_planned(model: nn.Module, **options: Any) -> ShardingPlan:
    """Shard the model; return what a dry run has told before."""
    rules = by_class(Layer)
    plan = shard_model(model, rules, dry_run=True, **options)
    shard_model(model, rules, **options)
    return plan


def _backward(model: nn.Module, dtype: torch.dtype) -> None:
    model(rank_input(4, 5, dtype=dtype)).float().square().mean().backward()


def _payloads(log: CollectiveLog) -> dict[tuple[str, int], int]:
    """Return bytes by kind and number of ranks."""
    counted: Counter[tuple[str, int]] = Counter()
    for event in log.events:
        counted[event.kind, resolve_group(event.name).size()] += event.nbytes
    return dict(counted)


def _costs(model: nn.Module) -> Iterable[FlatParamCost]:
    """Yield the cost of every flat parameter of a sharded model."""
    for state in get_states(model):
        policy = state.settings.reshard_after_forward
        is_root = state is fully_shard.state(model)  # type: ignore[attr-defined]
        for handle in state.handles:
            yield FlatParamCost(
                layout=handle.layout,
                ranks=RankCounts.of(handle.shard_group),
                options=state.options,
                main_dtype=handle.local_shard.dtype,
                precision=handle.memory.precision,
                requires_grad=handle.requires_grad,
                reshard_after_forward=not is_root if policy is None else policy,
            )


def _each_case() -> Iterable[Case]:
    """Yield a name, the model's dtype, and options, for strategies, meshes and dtypes."""
    for shape in SHAPES[dist.get_world_size()]:
        mesh = None
        if shape is not None:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        is_small = shape is not None or dist.get_world_size() > 2
        for policy_name in ALWAYS if is_small else POLICIES:
            dtype, policy = POLICIES[policy_name]
            for name, options in OPTIONS.items():
                if "reshard_after_forward" in options and policy_name != "fp32":
                    continue
                case = f"{name}, {policy_name}, mesh {shape}"
                yield case, dtype, {"mesh": mesh, "mp_policy": policy, **options}


def _payloads_of_step(
    optimizer: torch.optim.Optimizer, run: Callable[[], object]
) -> dict[Any, int]:
    """Take a step and return the payloads of its passes."""
    with count_collectives() as log:
        run()
    optimizer.step()
    optimizer.zero_grad()
    return _payloads(log)


@distributed(3, 4)
def test_ranks_send_and_hold_what_the_dry_run_says() -> None:
    """Collectives, payloads by kind and number of ranks, exact bytes of storages at any time."""
    for case, dtype, options in _each_case():
        model = _make_padded(dtype)
        plan = _shard_as_planned(model, **options)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            with count_collectives() as log:
                _backward(model, dtype)
            optimizer.step()
            optimizer.zero_grad()
        counted = _payloads(log)
        assert counted == plan.cost.payloads, case
        # One for each flat parameter, and an all-reduce of flags for each axis of the mesh.
        num_flags = len(plan.units[0].ranks.joint)
        assert len(log.events) == plan.cost.num_collectives + num_flags, case
        assert f"{sent_nbytes(counted):,}" in str(plan).splitlines()[-1].split(), case
        _check_stored(plan, model, optimizer, dtype, case)


def _by_shape(param: nn.Parameter) -> Granularity:
    return "element" if param.dim() < 2 else "param" if param.shape[0] < param.shape[1] else "row"


@pytest.mark.parametrize(
    ("granularity", "world_size"),
    [("row", 3), (Block(16), 4), ("param", 4), (_by_shape, 3)],
    ids=lambda g: getattr(g, "__name__", str(g)),
)
@distributed()
def test_uneven_shards_cost_what_the_dry_run_says(granularity: Any) -> None:
    """Owners are those of the run, over all units; bytes held are those of the first rank."""
    shape = SHAPES[dist.get_world_size()][-1]
    mesh = None if shape is None else init_device_mesh("cpu", shape)
    names = ("full", "full", SHARD_GRAD_OP.value, SHARD_OPTIM.value)
    policies = ["fp32", "gathered in int8"] * 2
    if dist.get_world_size() == 3:
        policies.reverse()  # so that all pairs are tested
    for name, policy_name in zip(names, policies, strict=True):
        dtype, policy = POLICIES[policy_name]
        options = {"mesh": mesh, "mp_policy": policy, **OPTIONS[name]}
        model = _make_padded(dtype)
        plan = _shard_as_planned(model, granularity=granularity, **options)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            counted = _payloads_of_step(optimizer, lambda m=model, dtype=dtype: _backward(m, dtype))
        if all(handle.shard_group.rank == 0 for handle in get_handles(model)):
            assert counted == plan.cost.payloads, (name, policy_name)
            _check_stored(plan, model, optimizer, dtype, name)
        else:
            _backward(model, dtype)  # which the check does, too


@distributed(4)
def test_a_small_group_gathers_for_the_backward() -> None:
    """The forward's gather reaches all ranks, the backward's half of them."""
    model = _make_padded()
    plan = _shard_as_planned(model, reshard_after_forward=2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        counted = _payloads_of_step(optimizer, lambda: _backward(model, F32))
    assert counted == plan.cost.payloads
    assert counted["all_gather", 2] == counted["all_gather", 4]


def _stored(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    storages = {
        storage._cdata: storage.nbytes()
        for tensor in tensors
        if (storage := tensor.untyped_storage()).nbytes()
    }
    return sum(storages.values())


@distributed(1)
def test_one_rank_alone_sends_nothing_and_holds_everything() -> None:
    """Also where it computes in another dtype, and shows flat parameters."""
    for dtype, policy in POLICIES.values():
        for options in OPTIONS.values():
            model = _make_padded(dtype)
            plan = _shard_as_planned(model, mp_policy=policy, **options)
            optimizer = torch.optim.AdamW(model.parameters())
            _payloads_of_step(optimizer, lambda m=model, dtype=dtype: _backward(m, dtype))
            _check_stored(plan, model, optimizer, dtype, f"{options} {policy}")
            assert plan.cost.payloads == {}


@pytest.mark.fast
@distributed(2)
def test_a_flat_parameter_holds_what_the_dry_run_says() -> None:
    """An optimizer sees gaps between parameters too, but no padding behind them."""
    for strategy in ShardingStrategy:
        torch.manual_seed(0)
        model = Net()
        plan = _shard_as_planned(model, strategy=strategy, use_orig_params=False)
        optimizer = torch.optim.AdamW(model.parameters())
        _payloads_of_step(optimizer, lambda model=model: _backward(model, F32))
        _check_stored(plan, model, optimizer, F32, strategy.name)


_OFFLOADED = pairwise(
    precision=POLICIES.values(),
    case=[(strategy, True) for strategy in ShardingStrategy] + [(FULL_SHARD, False)],
    policy=[OffloadPolicy(params=True), OffloadPolicy(optim_state=True)],
    world_size=(1, 2),
)[1]


@distributed(1, 2)
def test_offload_holds_what_the_dry_run_says() -> None:
    """On device and host together, and of that on the host."""
    for (dtype, mp_policy), (strategy, use_orig_params), policy, world_size in _OFFLOADED:
        if world_size == dist.get_world_size():
            model = _make_padded(dtype) if use_orig_params else Net().to(dtype)
            options = {"strategy": strategy, "mp_policy": mp_policy, "offload_policy": policy}
            plan = _shard_as_planned(model, use_orig_params=use_orig_params, **options)
            optimizer = torch.optim.AdamW(model.parameters())
            _payloads_of_step(optimizer, lambda m=model, dtype=dtype: _backward(m, dtype))
            _check_stored(plan, model, optimizer, dtype, f"{options}")
            _backward(model, dtype)
            on_host = [handle.local_shard for handle in get_handles(model)]
            on_host += [p.grad.to_local() for p in model.parameters() if p.grad is not None]
            moments = plan.cost.optimizer_nbytes
            assert _stored(on_host) == plan.cost.host_nbytes - moments, options
            assert f"{plan.cost.host_nbytes:,}" in str(plan).splitlines()[-1].split()


def _check_stored(
    plan: ShardingPlan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dtype: torch.dtype,
    case: str,
) -> None:
    """Check a model at rest, after steps of the optimizer."""
    handles = get_handles(model)
    params = [t for handle in handles for t in (handle.unsharded, handle.local_shard)]
    copies = [handle.shard.device_copy for handle in handles]
    params += [copy for copy in copies if copy is not None]
    assert _stored(params) == plan.cost.param_nbytes, case
    _backward(model, dtype)
    grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    grads += [
        t for handle in handles for t in (handle.grads._memory.buffer, handle.grads._memory.result)
    ]
    assert _stored(grads) == plan.cost.grad_nbytes, case
    moments = sum(
        state[key].to_local().nbytes
        for state in optimizer.state.values()
        for key in ("exp_avg", "exp_avg_sq")
    )
    if dist.get_rank() == 0:
        assert moments == plan.cost.optimizer_nbytes, case
    else:
        shards = sum(h.local_shard.nbytes for h in handles if h.requires_grad)
        assert moments <= 2 * shards, case


@distributed(4)
def test_a_dry_run_needs_no_ranks() -> None:
    """Told a number of ranks, it says what they would find; a mesh prints as it is."""
    rules = by_class(Layer)
    for options in OPTIONS.values():
        told = shard_model(_make_padded(), rules, dry_run=True, world_size=4, **options)
        found = shard_model(_make_padded(), rules, dry_run=True, **options)
        assert str(told) == str(found)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plan = shard_model(_make_padded(), rules, dry_run=True, mesh=mesh)
    assert [str(unit.ranks) for unit in plan.units] == ["2x2"] * 4
    plan = shard_model(_make_padded(), rules, dry_run=True, strategy=NO_SHARD)
    assert [str(unit.ranks) for unit in plan.units] == ["4x1"] * 4


@pytest.mark.fast
def test_a_dry_run_refuses_what_a_run_would() -> None:
    """A small group must divide the number of ranks that it was told."""
    with pytest.raises(ValueError, match="a divisor of the 8 ranks that share the unit, got 3"):
        shard_model(Net(), [], dry_run=True, world_size=8, reshard_after_forward=3)
