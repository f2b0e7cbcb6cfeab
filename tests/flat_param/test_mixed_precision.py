"""Mixed precision: what each dtype of a policy is about, against a replicated reference."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from composable_shard import (
    FlatShard,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    get_handles,
    get_states,
    lazy_init,
    no_sync,
    reshard,
    shard_model,
    unshard,
    unshard_params,
    writeback,
)
from composable_shard.comm import algorithms, devices
from composable_shard.comm.trace import count_collectives
from composable_shard.planning import by_class
from tests.harness.assertions import assert_equal, assert_within
from tests.harness.memory import peak_bytes
from tests.harness.pairs import pairwise
from tests.harness.ranks import device, distributed
from tests.programs.models import (
    CheckpointsBlocks,
    EqualBlocks,
    Layer,
    Net,
    assert_at_rest,
    assert_is_slice,
    average_gradients,
    loss_of,
    rank_input,
    shard_blocks,
    shard_root,
)

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy
STRATEGIES = list(ShardingStrategy)
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class MixedReference:
    """Replicated mixed precision: fp32 main weights, and a copy of them that computes.

    What becomes of gradients is written out: those of microbatches are cast to the reduce dtype,
    with fp16 also divided, and added up in it; the sums are added up in rank order in fp32,
    divided, and added to the main gradient.
    """

    def __init__(self, model: nn.Module, policy: MixedPrecisionPolicy, strategy: Any) -> None:
        self.policy = policy
        self.strategy = strategy
        self.gather_dtype = None if strategy is NO_SHARD else policy.gather_dtype
        self.main = copy.deepcopy(model).to(policy.main_dtype)
        self.compute = copy.deepcopy(model).to(policy.param_dtype)
        self.pending: dict[str, Tensor] = {}

    def forward(self, step: int) -> Tensor:
        with torch.no_grad():
            for param, main in zip(self.compute.parameters(), self.main.parameters(), strict=True):
                param.copy_(main.to(self.gather_dtype or param.dtype))
        x = rank_input(4, 5, step=step)
        if self.policy.param_dtype is not None:
            x = x.to(self.policy.param_dtype)
        return self.compute(x).float().square().mean()

    def backward(self, step: int, *, is_reduced: bool = True, factor: float = 1.0) -> Tensor:
        loss = self.forward(step)
        (loss * factor).backward()
        size = dist.get_world_size()
        terms: dict[str, Tensor] = {}
        for name, param in self.compute.named_parameters():
            if param.grad is None:
                continue
            dtype = self.policy.reduce_dtype or param.dtype
            scale = 1 / size if dtype is F16 else 1.0
            if name in self.pending:
                term = self.pending.pop(name).add_(param.grad, alpha=scale)
            else:
                term = param.grad.to(dtype) if scale == 1.0 else (param.grad * scale).to(dtype)
            param.grad = None
            if not is_reduced:
                self.pending[name] = term
                continue
            terms[name] = term
        for dtype in dict.fromkeys(term.dtype for term in terms.values()):
            scale = 1 / size if dtype is F16 else 1.0
            some = {name: term for name, term in terms.items() if term.dtype is dtype}
            for name, total in self._add_up(some).items():
                main = self.main.get_parameter(name)
                total.mul_(1 / size / scale)
                main.grad = total if main.grad is None else main.grad.add_(total)
        return loss.detach()

    def _add_up(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums over the ranks of terms of one dtype, which travel together."""
        own = torch.cat([term.flatten() for term in terms.values()])
        if self.strategy is NO_SHARD:
            # The backend's own sum.
            dist.all_reduce(own)
            total = own.to(F32)
        else:
            gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, own)
            total = gathered[0].to(F32, copy=True)
            for other in gathered[1:]:
                total.add_(other)
        parts = total.split([term.numel() for term in terms.values()])
        return {
            name: part.view(term.shape).clone()
            for (name, term), part in zip(terms.items(), parts, strict=True)
        }


POLICIES = {
    "bf16": MixedPrecisionPolicy(param_dtype=BF16, main_dtype=F32),
    "bf16, reduced in fp32": MixedPrecisionPolicy(
        param_dtype=BF16, reduce_dtype=F32, main_dtype=F32
    ),
    "fp16": MixedPrecisionPolicy(param_dtype=F16, main_dtype=F32),
    "fp16, reduced in fp32": MixedPrecisionPolicy(
        param_dtype=F16, reduce_dtype=F32, main_dtype=F32
    ),
    "fp32, reduced in bf16": MixedPrecisionPolicy(reduce_dtype=BF16),
    "fp32, reduced in fp16": MixedPrecisionPolicy(reduce_dtype=F16),
    "fp32, gathered in fp16": MixedPrecisionPolicy(gather_dtype=F16),
    "bf16, gathered in fp16": MixedPrecisionPolicy(param_dtype=BF16, gather_dtype=F16),
}
LOW = {name: policy for name, policy in POLICIES.items() if policy.main_dtype is not None}


def _assert_close_in_policy(actual: Tensor, expected: Tensor, what: str, policy: Any) -> None:
    """Bitwise on two ranks."""
    __tracebackhide__ = True
    if dist.get_world_size() <= 2:
        assert_equal(actual, expected, what)
    else:
        low = policy.param_dtype or policy.reduce_dtype or policy.gather_dtype
        tolerance = 1e-6 if low is None else 8 * torch.finfo(low).eps
        assert_within(actual, expected, what, atol=tolerance, rtol=tolerance)


def _train_beside_reference(
    strategy: ShardingStrategy,
    policy: MixedPrecisionPolicy,
    microbatches: int = 1,
    uses_no_sync: bool = False,
    make: Callable[[], nn.Module] = Net,
    shard: Callable[..., object] = shard_blocks,
) -> nn.Module:
    """Train a model beside its reference; return it."""
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    shard(model, strategy=strategy, mp_policy=policy)
    reference = MixedReference(plain, policy, strategy)
    close = partial(_assert_close_in_policy, policy=policy)
    optimizers = [
        torch.optim.AdamW(each.parameters(), lr=0.01, foreach=True)
        for each in (model, reference.main)
    ]
    for step in range(2):
        for micro in range(microbatches):
            is_reduced = not uses_no_sync or micro == microbatches - 1
            number = 10 * step + micro
            with nullcontext() if is_reduced else no_sync(model):
                loss = loss_of(model, number)
                loss.backward()
            expected = reference.backward(number, is_reduced=is_reduced)
            close(loss.detach(), expected, f"loss {number}")
        for (name, ours), main in zip(
            model.named_parameters(), reference.main.parameters(), strict=True
        ):
            assert ours.dtype == main.dtype == F32
            if not ours.requires_grad:
                assert ours.grad is None
                continue
            assert ours.grad.dtype == F32
            assert_is_slice(ours.grad, main.grad, f"gradient of {name}", close)
        for each in optimizers:
            each.step()
            each.zero_grad()
        for (name, ours), main in zip(
            model.named_parameters(), reference.main.parameters(), strict=True
        ):
            assert_is_slice(ours, main, name, close)
    assert_at_rest(model)
    return model


@pytest.mark.parametrize(*pairwise(policy=POLICIES, strategy=STRATEGIES, world_size=(2, 3)))
@distributed(on_device=True)
def test_training_equals_the_replicated_reference(strategy: ShardingStrategy, policy: str) -> None:
    """S2.6, S2.13, S3.7: losses, gradients and main parameters."""
    _train_beside_reference(strategy, POLICIES[policy])


@pytest.mark.parametrize(
    *pairwise(
        uses_no_sync=[True, False], policy=["bf16", "fp16, reduced in fp32"], strategy=STRATEGIES
    )
)
@distributed(2)
def test_accumulation_equals_the_replicated_reference(
    strategy: ShardingStrategy, policy: str, uses_no_sync: bool
) -> None:
    """S2.14, S3.7: in the main shard, or under no_sync unsharded in the reduce dtype.

    The policies that the parity table does not have.
    """
    _train_beside_reference(strategy, POLICIES[policy], 3, uses_no_sync)


@pytest.mark.parametrize(
    *pairwise(strategy=STRATEGIES, policy=LOW, accumulation=[(1, False), (3, False), (3, True)])
)
@distributed(1)
def test_one_rank_alone_equals_the_reference(
    strategy: ShardingStrategy, policy: str, accumulation: tuple[int, bool]
) -> None:
    """S3.7 for N = 1: nothing is gathered or reduced, and still the shard is another tensor."""
    model = _train_beside_reference(strategy, POLICIES[policy], *accumulation)
    with count_collectives() as log:
        loss_of(model).backward()
    assert log.events == []


@pytest.mark.parametrize("reduce_dtype", [None, F32])
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM])
@distributed(4)
def test_copies_of_shards_train_alike(
    strategy: ShardingStrategy, reduce_dtype: torch.dtype | None
) -> None:
    """A 2-D mesh sends the reduced shard on in the reduce dtype."""
    mesh = init_device_mesh("cpu", (2, 2))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype, main_dtype=F32)
    model = _train_beside_reference(strategy, policy, shard=partial(shard_blocks, mesh=mesh))
    loss = loss_of(model)
    with count_collectives() as log:
        loss.backward()
    shards = sum(handle.layout.shard_numel for handle in get_handles(model))
    num_params = len(list(model.parameters()))
    size = 2 if reduce_dtype is None else 4
    assert log.nbytes("all_reduce") == shards * size + num_params


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@distributed(4, on_device=True)
def test_deferred_all_reduce_adds_up_in_the_main_dtype(strategy: ShardingStrategy) -> None:
    """What microbatches leave of the first stage waits for the second one unrounded."""
    mesh = init_device_mesh(device().type, (2, 2))
    policy = MixedPrecisionPolicy(param_dtype=BF16, main_dtype=F32)
    grads = []
    for is_deferred in (False, True):
        torch.manual_seed(0)
        model = Net()
        shard_blocks(model, mesh=mesh, strategy=strategy, mp_policy=policy)
        for micro in range(3):
            for state in get_states(model):
                state.change(requires_all_reduce=not is_deferred or micro == 2)
            loss_of(model, micro).backward()
            if is_deferred and micro < 2:
                partials = [handle.grads.reduction.deferred for handle in get_handles(model)]
                assert {partial.dtype for partial in partials} == {F32}
        grads.append([param.grad.full_tensor() for param in model.parameters()])
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("policy", ["bf16", "fp16, reduced in fp32", "bf16, gathered in fp16"])
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM])
@distributed(3)
def test_collectives_of_the_backend_train_alike(strategy: ShardingStrategy, policy: str) -> None:
    """Where groups are too large for this library to add up itself, within rounding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "MAX_EXCHANGE_SIZE", 0)
        patch.setattr(algorithms, "_MAX_ALL_TO_ALL_SIZE", 0)
        _train_beside_reference(strategy, POLICIES[policy])


# --- other kinds of units ---


class _Mixture(nn.Module):
    """Tied, frozen, bfloat16 and odd parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.blocks[1].weight = self.blocks[0].weight
        self.blocks[2].bias = self.inp.bias
        self.blocks[2].weight.requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.5, dtype=BF16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.gain
        return x


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_tied_frozen_and_mixed_parameters(strategy: ShardingStrategy) -> None:
    """Parameters of two dtypes that get the same main and compute dtype are one handle."""
    model = _train_beside_reference(strategy, POLICIES["bf16"], make=_Mixture)
    handles = get_handles(model)
    assert {handle.local_shard.dtype for handle in handles} == {F32}
    assert {handle.unsharded.dtype for handle in handles} == {BF16}
    assert [str(entry.label) for entry in handles[0].entries] == ["gain", "inp.weight"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2, on_device=True)
def test_flat_parameter_trains_alike(strategy: ShardingStrategy) -> None:
    """use_orig_params=False: the one parameter that is shown is the main one."""
    losses = []
    for use_orig_params in (True, False):
        torch.manual_seed(0)
        model = Net()
        shard_blocks(
            model, strategy=strategy, mp_policy=POLICIES["bf16"], use_orig_params=use_orig_params
        )
        assert {param.dtype for param in model.parameters()} == {F32}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
        for step in range(4):
            loss = loss_of(model, step)
            loss.backward()
            assert {param.grad.dtype for param in model.parameters()} == {F32}
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    assert_equal(losses[1], losses[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_low_precision_model_gets_main_parameters(strategy: ShardingStrategy) -> None:
    """S3.2: a bfloat16 model computes as before; an optimizer made before sees fp32 parameters."""
    torch.manual_seed(0)
    model = Net().to(BF16)
    params = list(model.parameters())
    params[0].grad = torch.full_like(params[0], 0.1)
    before = [param.detach().clone() for param in params]
    optimizer = torch.optim.AdamW(params, lr=0.01)
    shard_blocks(model, strategy=strategy, mp_policy=MixedPrecisionPolicy(main_dtype=F32))
    assert list(model.parameters()) == params or all(
        ours is old for ours, old in zip(model.parameters(), params, strict=True)
    )
    for param, old in zip(params, before, strict=True):
        assert isinstance(param, FlatShard)
        assert param.dtype == F32
        assert_is_slice(param, old.float())
    assert_equal(params[0].grad.full_tensor(), torch.full_like(before[0], 0.1).float())
    seen = []
    model.out.register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    output = model(rank_input(4, 5).to(BF16))
    assert output.dtype == seen[0] == BF16
    output.float().square().mean().backward()
    optimizer.step()
    states = [state["exp_avg"] for state in optimizer.state.values()]
    assert len(states) == len(params)
    assert {state.dtype for state in states} == {F32}


@distributed(2)
def test_float32_parameters_are_views_where_nothing_is_cast() -> None:
    """S3.2: main_dtype costs nothing where the parameters have it and compute in it."""
    model = fully_shard(
        nn.Linear(5, 7), strategy=SHARD_OPTIM, mp_policy=MixedPrecisionPolicy(main_dtype=F32)
    )
    lazy_init(model)
    (handle,) = get_handles(model)
    start = handle.shard_group.rank * handle.local_shard.nbytes
    assert handle.local_shard.data_ptr() == handle.unsharded.data_ptr() + start


class _Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(4)
def test_tensor_parallel_parameters_train_alike(strategy: ShardingStrategy) -> None:
    """S3.9: DTensors of bf16 parameters, with fp32 main shards of their local parts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = _Parallel()
    model = copy.deepcopy(plain)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32, output_dtype=F32)
    fully_shard(model, mesh=mesh["dp"], strategy=strategy, mp_policy=policy)
    x = rank_input(4, 6) + mesh.get_coordinate()[0]
    dist.broadcast(x, 2 * mesh.get_coordinate()[0], group=mesh["tp"].get_group())
    for each in (model, plain):
        each(x).square().mean().backward()
    for (name, ours), param in zip(model.named_parameters(), plain.parameters(), strict=True):
        dist.all_reduce(param.grad.div_(4))
        assert ours.dtype == ours.grad.dtype == F32
        torch.testing.assert_close(ours.full_tensor(), param.detach(), rtol=0, atol=0)
        torch.testing.assert_close(
            ours.grad.full_tensor(), param.grad, rtol=0.05, atol=0.01, msg=name
        )


# --- dtypes ---


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_dtype_of_everything(strategy: ShardingStrategy) -> None:
    """At rest, in forward, in backward, and after it."""
    torch.manual_seed(0)
    model = Net()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F16)
    for block in model.blocks:
        fully_shard(block, strategy=strategy, mp_policy=policy)
    fully_shard(model, strategy=strategy, mp_policy=replace(policy, output_dtype=F64))
    seen: dict[str, Any] = {}

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.update(
            weight=module.weight.dtype,
            shape=module.weight.shape,
            x=args[0].dtype,
            kind=type(module.weight),
        )

    model.blocks[1].up.register_forward_pre_hook(look)
    weight = model.blocks[1].up.weight
    weight.register_hook(lambda grad: seen.update(grad=grad.dtype))
    output = model(rank_input(4, 5))
    assert issubclass(seen.pop("kind"), nn.Parameter)
    assert output.dtype == F64
    output.square().mean().backward()
    assert seen == {"weight": BF16, "shape": (7, 15), "x": BF16, "grad": BF16}
    for handle in get_handles(model):
        assert handle.local_shard.dtype == F32
        assert handle.unsharded.dtype == BF16
        assert handle.grads._memory.buffer.dtype == F16
        for entry in handle.entries:
            assert entry.sharded.dtype == entry.sharded.grad.dtype == F32
        assert {view.dtype for view in handle.full.params.views} == {BF16}


@pytest.mark.parametrize("strategy", [SHARD_GRAD_OP, SHARD_OPTIM])
@distributed(2, 3)
def test_kept_parameters_are_views_of_the_gathered_buffer(strategy: ShardingStrategy) -> None:
    """S3.5: nothing replaces the buffer; the main shard lies beside it."""
    model = _train_beside_reference(strategy, POLICIES["bf16"])
    for handle in get_handles(model):
        pointer = handle.unsharded.data_ptr()
        handle.full.params.check_can_write_back()
        assert handle.unsharded.untyped_storage().nbytes() == handle.layout.padded_numel * 2
        assert handle.local_shard.untyped_storage().nbytes() == handle.layout.shard_numel * 4
        with torch.no_grad():
            loss_of(model)
        assert handle.unsharded.data_ptr() == pointer


def _shard_numels(model: nn.Module) -> int:
    return sum(handle.layout.padded_numel for handle in get_handles(model))


ITEMSIZES = [  # of what is gathered, and of what is reduced
    (MixedPrecisionPolicy(), 4, 4),
    (MixedPrecisionPolicy(param_dtype=BF16), 2, 2),
    (MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32), 2, 4),
    (MixedPrecisionPolicy(reduce_dtype=BF16), 4, 2),
    (MixedPrecisionPolicy(gather_dtype=F16), 2, 4),
    (MixedPrecisionPolicy(param_dtype=BF16, gather_dtype=F32), 4, 2),
]


@pytest.mark.parametrize(*pairwise(itemsizes=ITEMSIZES, strategy=STRATEGIES, world_size=(2, 3)))
@distributed()
def test_wire_bytes(
    strategy: ShardingStrategy, itemsizes: tuple[MixedPrecisionPolicy, int, int]
) -> None:
    """S2.6, S2.13: each payload has the size of its dtype."""
    policy, gathered, reduced = itemsizes
    model = Net()
    shard_blocks(model, strategy=strategy, mp_policy=policy, reshard_after_forward=False)
    loss_of(model).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with count_collectives() as log:
        loss = loss_of(model)
    numel = _shard_numels(model)
    assert log.nbytes("all_gather") == (0 if strategy is NO_SHARD else numel * gathered)
    with count_collectives() as log:
        loss.backward()
    flags = len(list(model.parameters()))
    if strategy is NO_SHARD:
        assert log.nbytes("all_reduce") == numel * reduced + flags
    else:
        assert log.nbytes("reduce_scatter") == numel * reduced
        assert log.nbytes("all_reduce") == flags


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM])
@distributed(2, 3)
def test_half_precision_wire(strategy: ShardingStrategy) -> None:
    """S2.6: parameters stay fp32; all ranks compute with the same values, rounded to fp16."""
    torch.manual_seed(0)
    plain = Layer()
    model = fully_shard(
        copy.deepcopy(plain), strategy=strategy, mp_policy=MixedPrecisionPolicy(gather_dtype=F16)
    )
    unshard(model)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.dtype == F32
        assert_equal(param.detach(), expected.detach().to(F16).float())
    (handle,) = get_handles(model)
    assert (
        handle.local_shard.untyped_storage().data_ptr()
        != handle.unsharded.untyped_storage().data_ptr()
    )
    reshard(model)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_is_slice(param, expected)


@distributed(3)
def test_low_precision_reduction_adds_up_in_fp32() -> None:
    """S2.13: 1 + 2**-9 + 2**-9 would be 1 in bfloat16, whatever the order."""
    model = fully_shard(
        nn.Linear(4, 4, bias=False), mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16)
    )
    value = 1.0 if dist.get_rank() == 0 else 2.0**-9
    (model(torch.ones(1, 4)) * value).sum().backward()
    expected = torch.full((4, 4), 1 + 2.0**-8) * torch.tensor(1 / 3)
    torch.testing.assert_close(model.weight.grad.full_tensor(), expected, rtol=1e-7, atol=0)


# --- memory ---

DIM = 64


def _stack_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, DIM, dtype=BF16)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("strategy", "reduce_dtype", "full", "share"),
    [
        (SHARD_OPTIM, F32, 2 + 4, 12),
        (SHARD_OPTIM, None, 2 + 2, 12 + 4),
        (SHARD_GRAD_OP, F32, 2, 12 + 4),
        (SHARD_GRAD_OP, None, 2, 12 + 4),
        (FULL_SHARD, F32, 0, 12 + 4),
        (FULL_SHARD, None, 0, 12 + 4),
        (NO_SHARD, F32, 2 + 4 + 12, 0),
    ],
)
@distributed(2, 3)
def test_bytes_at_rest(
    world_size: int,
    strategy: ShardingStrategy,
    reduce_dtype: torch.dtype | None,
    full: int,
    share: int,
) -> None:
    """S3.10: of a bf16 model with AdamW, `full + share / N` for each parameter."""
    policy = MixedPrecisionPolicy(main_dtype=F32, reduce_dtype=reduce_dtype)
    with peak_bytes() as memory:
        model = EqualBlocks(BF16)
        shard_blocks(model, strategy=strategy, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            _stack_step(model, optimizer)
        gc.collect()
    numel = sum(param.numel() for param in model.parameters())
    # Scratch memory for the terms of a reduce-scatter: of one unit, for a whole tree.
    size = numel // 6 * (2 if reduce_dtype is None else 4)
    scratch = size // (1 if world_size > 2 else 2) if strategy is SHARD_OPTIM else 0
    assert memory.current - scratch == pytest.approx(numel * (full + share / world_size), rel=0.02)


@pytest.mark.parametrize(
    *pairwise(reduce_dtype=[F32, None], strategy=[SHARD_OPTIM, NO_SHARD], world_size=(2, 3))
)
@distributed()
def test_a_backward_allocates_nothing(
    strategy: ShardingStrategy, reduce_dtype: torch.dtype | None
) -> None:
    """S3.4: beyond what that of the plain low-precision model allocates.

    Low-precision terms are added up in fp32 by way of memory that is freed at once, and the terms
    of an all-reduce arrive in such memory.
    """
    allocated, peaks = [], []
    policy = MixedPrecisionPolicy(main_dtype=F32, reduce_dtype=reduce_dtype)
    for make in (lambda module: None, partial(shard_blocks, strategy=strategy, mp_policy=policy)):
        model = EqualBlocks(BF16)
        make(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            _stack_step(model, optimizer)
        optimizer.zero_grad()
        loss = model(torch.ones(2, DIM, dtype=BF16)).square().mean()
        with peak_bytes() as memory:
            loss.backward()
        allocated.append(memory.allocated)
        peaks.append(memory.peak)
    if strategy is SHARD_OPTIM and reduce_dtype is F32:
        assert allocated[1] <= allocated[0] + 4096
    assert peaks[1] <= peaks[0] + 4096


@pytest.mark.counts
@distributed(2)
def test_staging_memory_is_freed() -> None:
    """A gather in a third dtype holds that much more only until it has been cast."""
    model = fully_shard(
        nn.Linear(64, 64, bias=False), mp_policy=MixedPrecisionPolicy(gather_dtype=F16)
    )
    lazy_init(model)
    with peak_bytes() as memory:
        unshard(model)
    assert memory.peak <= 64 * 64 * (4 + 2) + 1024
    assert memory.current <= 64 * 64 * 4 + 1024


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_no_policy_changes_nothing(strategy: ShardingStrategy) -> None:
    """The same hooks, collectives and bytes as without the argument."""
    seen = []
    for options in ({}, {"mp_policy": MixedPrecisionPolicy()}):
        torch.manual_seed(0)
        model = Net()
        shard_blocks(model, strategy=strategy, **options)
        optimizer = torch.optim.AdamW(model.parameters())
        with count_collectives() as log:
            for step in range(2):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        hooks = [
            (len(module._forward_pre_hooks), len(module._forward_hooks))
            for module in (model, *model.blocks)
        ]
        assert set(hooks) == {(1, 1)}
        assert not model.inp._forward_pre_hooks
        assert not any(handle.full.is_cast for handle in get_handles(model))
        stored = [handle.unsharded.untyped_storage().nbytes() for handle in get_handles(model)]
        names = [(event.kind, event.nbytes) for event in log.events]
        seen.append((names, stored, [param.full_tensor() for param in model.parameters()]))
    assert seen[0][:2] == seen[1][:2]
    for ours, plain in zip(seen[1][2], seen[0][2], strict=True):
        assert_equal(ours, plain)


# --- scopes ---


@pytest.mark.parametrize("policy", ["bf16", "fp32, gathered in fp16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2, on_device=True)
def test_scope_shows_and_computes_with_main_values(strategy: ShardingStrategy, policy: str) -> None:
    """Also where the unsharded buffer is current; edits are kept in full precision."""
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    shard_blocks(model, strategy=strategy, mp_policy=POLICIES[policy])
    with torch.no_grad():
        loss_of(model)
    x = rank_input(4, 5)
    with unshard_params(model), torch.no_grad():
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert param.dtype == F32
            assert_equal(param.detach(), expected.detach())
        assert_equal(model(x), plain(x))
        model.out.bias.fill_(1 + 2.0**-20)
        plain.out.bias.fill_(1 + 2.0**-20)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_is_slice(param, expected)
    with unshard_params(model, rank0_only=True):
        if dist.get_rank() == 0:
            assert_equal(model.out.bias.detach(), plain.out.bias.detach())
    loss_of(model).backward()
    assert_at_rest(model)


@pytest.mark.parametrize("policy", ["bf16", "fp32, gathered in fp16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_writeback_keeps_the_precision_of_what_was_not_edited(
    strategy: ShardingStrategy, policy: str
) -> None:
    """`unshard` shows rounded values; only those that were changed reach the main shards."""
    torch.manual_seed(0)
    plain = Layer()
    model = fully_shard(copy.deepcopy(plain), strategy=strategy, mp_policy=POLICIES[policy])
    unshard(model)
    with torch.no_grad():
        for module in (model, plain):
            module.up.weight[3, 4] = 0.75
            module.down.bias.data[-1] = 0.25
    writeback(model)
    reshard(model)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_is_slice(param, expected)


# --- casts ---


@dataclass
class _Batch:
    x: Tensor
    mask: Tensor


class _Cache:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []


class _Remembering(nn.Module):
    """Returns and remembers what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.got = args, kwargs
        return {"sum": self.weight * self.scale, "ids": self.count}


@distributed(2)
def test_arguments_are_cast_and_the_callers_containers_are_not() -> None:
    """Floating-point tensors in args and kwargs; what needs no cast is the same object."""
    model = fully_shard(_Remembering(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    x, ids, ready = torch.ones(3), torch.arange(3), torch.ones(3, dtype=BF16)
    batch, cache, mapping = _Batch(x, ids), _Cache(), {"x": x, "ids": ids}
    untouched = [ids, ready]
    model(
        x, [x, (ids, x)], untouched, batch=batch, cache=cache, mapping=mapping, name="n", none=None
    )
    args, kwargs = model.got
    assert args[0].dtype == args[1][0].dtype == args[1][1][1].dtype == BF16
    assert args[1][1][0] is ids
    assert args[2] is untouched
    assert kwargs["batch"].x.dtype == kwargs["mapping"]["x"].dtype == BF16
    assert isinstance(kwargs["batch"], _Batch)
    assert kwargs["cache"] is cache
    assert (kwargs["name"], kwargs["none"]) == ("n", None)
    assert x.dtype == batch.x.dtype == mapping["x"].dtype == F32
    x.requires_grad_()
    model(x)
    model.got[0][0].sum().backward()
    assert x.grad.dtype == F32


@distributed(2)
def test_arguments_stay_on_request() -> None:
    """cast_forward_inputs=False adds no hook."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
    model = fully_shard(_Remembering(), mp_policy=policy)
    model(torch.ones(3))
    assert model.got[0][0].dtype == F32
    assert len(model._forward_pre_hooks) == 1


@distributed(2)
def test_outputs_and_buffers_are_cast() -> None:
    """Floating-point ones; buffers once, by the call."""
    policy = MixedPrecisionPolicy(output_dtype=F64, buffer_dtype=F16)
    model = fully_shard(_Remembering(), mp_policy=policy)
    assert model.scale.dtype == F16
    assert model.count.dtype == torch.int64
    output = model()
    assert output["sum"].dtype == F64
    assert output["ids"].dtype == torch.int64
    output["sum"].sum().backward()
    assert_equal(model.weight.grad.full_tensor(), torch.ones(3))


class _Normalised(nn.Module):
    """A linear layer and a batch norm."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(5, dim)
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class _NormalisedReference(_Normalised):
    """The same with casts written out."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.linear.weight.to(BF16), self.linear.bias.to(BF16)
        return self.norm(F.linear(x.to(BF16), weight, bias).float()).to(BF16)


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_batch_norm_stays_in_its_main_dtype(strategy: ShardingStrategy) -> None:
    """By rule: parameters, buffers and arithmetic; the layers around it see bf16 alone."""
    torch.manual_seed(0)
    model, plain = _Normalised(), _NormalisedReference()
    plain.load_state_dict(model.state_dict())
    policy = MixedPrecisionPolicy(param_dtype=BF16, buffer_dtype=BF16, reduce_dtype=F32)
    fully_shard(model, strategy=strategy, mp_policy=policy)
    seen = []
    model.norm.register_forward_pre_hook(
        lambda module, args: seen.append((module.weight.dtype, args[0].dtype))
    )
    for step in range(2):
        outputs = [each(rank_input(8, 5, step=step)) for each in (model, plain)]
        assert outputs[0].dtype == BF16
        assert_equal(outputs[0].detach(), outputs[1].detach())
        for each, output in zip((model, plain), outputs, strict=True):
            each.zero_grad()
            output.float().square().mean().backward()
        average_gradients(plain.parameters())
        for ours, param in zip(model.parameters(), plain.parameters(), strict=True):
            assert_is_slice(ours.grad, param.grad)
    assert set(seen) == {(F32, F32)}
    assert model.norm.running_mean.dtype == F32
    assert_equal(model.norm.running_mean, plain.norm.running_mean)
    assert [handle.unsharded.dtype for handle in get_handles(model)] == [BF16, F32]


@distributed(2)
def test_classes_that_stay_are_the_users_choice() -> None:
    """A unit may be one itself; an empty tuple leaves none."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, keep_fp32_classes=(nn.LayerNorm,))
    norm = fully_shard(nn.LayerNorm(5), mp_policy=policy)
    assert get_handles(norm)[0].unsharded.dtype == F32
    plain = nn.LayerNorm(5)
    assert_equal(norm(rank_input(4, 5)).detach(), plain(rank_input(4, 5)).detach())
    assert norm(rank_input(4, 5).to(F16)).dtype == F16
    model = fully_shard(
        _Normalised(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16, keep_fp32_classes=())
    )
    assert [handle.unsharded.dtype for handle in get_handles(model)] == [BF16]
    assert not model.norm._forward_pre_hooks


# --- the life of a module ---


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_scaler_skips_steps_alike(strategy: ShardingStrategy) -> None:
    """S2.17, S3.8: fp16 gradients of one rank overflow until the scale fits, on all alike."""
    policy = MixedPrecisionPolicy(param_dtype=F16, main_dtype=F32)
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    shard_blocks(model, strategy=strategy, mp_policy=policy)
    reference = MixedReference(plain, policy, strategy)
    mains = model, reference.main
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**20) for _ in mains]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, foreach=True) for each in mains]
    scales = []
    for step in range(8):
        # Only one rank's gradients overflow at first.
        factor = scalers[1].get_scale() if dist.get_rank() else 1.0
        factor = scalers[1].get_scale() if step > 3 else factor
        (loss_of(model, step) * factor).backward()
        reference.backward(step, factor=factor)
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.scale(torch.ones(()))
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append([scaler.get_scale() for scaler in scalers])
        for ours, main in zip(model.parameters(), reference.main.parameters(), strict=True):
            assert_is_slice(ours, main)
    assert all(ours == expected for ours, expected in scales)
    assert scales[0][0] < 2.0**20
    assert scales[-1] == scales[-2]


class _CheckpointedNet(CheckpointsBlocks, Net):
    """Recomputes its blocks in backward."""


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_recomputation_casts_as_the_forward_did(
    strategy: ShardingStrategy, use_reentrant: bool
) -> None:
    """Activation checkpointing changes no gradient."""
    grads = []
    for kind in (Net, _CheckpointedNet):
        torch.manual_seed(0)
        model = kind()
        model.use_reentrant = use_reentrant
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32, output_dtype=F32)
        for block in model.blocks:
            fully_shard(block, strategy=strategy, mp_policy=policy)
        fully_shard(model, strategy=strategy)
        loss_of(model).backward()
        grads.append([param.grad.full_tensor() for param in model.parameters()])
        assert_at_rest(model)
    for ours, expected in zip(grads[1], grads[0], strict=True):
        assert_equal(ours, expected)


@distributed(2)
def test_errors_in_forward_keep_unsynchronised_gradients_or_drop_them() -> None:
    """What no_sync has packed in the reduce dtype survives a forward's error, as a leaf's would."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net())
        shard_blocks(models[-1], mp_policy=policy)
    for model in models:
        with no_sync(model):
            loss_of(model).backward()
    with pytest.raises(RuntimeError):
        models[0](torch.ones(3))
    for model in models:
        loss_of(model, 1).backward()
    for ours, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert_equal(ours.grad.to_local(), expected.grad.to_local())
    with no_sync(models[0]):
        loss_of(models[0], 2).backward()
        hook = models[0].inp.weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(models[0], 3).backward()
        hook.remove()
    for model in models:
        loss_of(model, 4).backward()
        assert_at_rest(model)
    for ours, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert_equal(ours.grad.to_local(), expected.grad.to_local())


@pytest.mark.fast
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_copies_train_alike(strategy: ShardingStrategy) -> None:
    """Deep copies keep the policy and its hooks."""
    torch.manual_seed(0)
    model = fully_shard(_Normalised(), strategy=strategy, mp_policy=POLICIES["bf16"])
    losses = []
    for twin in (copy.deepcopy(model), model):
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        for step in range(2):
            loss = loss_of(twin, step)
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
        assert get_handles(twin)[0].unsharded.dtype == BF16
    assert_equal(*losses)


@distributed(2)
def test_meta_device_start() -> None:
    """Shards of the main dtype are made and initialised like any others."""
    torch.manual_seed(0)
    plain = nn.Linear(5, 7)
    with torch.device("meta"):
        model = nn.Linear(5, 7, dtype=BF16)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(main_dtype=F32))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    assert_equal(model.weight.full_tensor(), plain.weight.detach())
    assert model(torch.ones(1, 5, dtype=BF16)).dtype == BF16


@distributed(2)
def test_units_of_one_tree_may_differ() -> None:
    """Policies are per unit, also through `shard_model`."""
    torch.manual_seed(0)
    model = Net()
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F32)
    shard_model(model, by_class(Layer, mp_policy=policy), strategy=SHARD_GRAD_OP)
    assert {handle.unsharded.dtype for handle in get_handles(model.blocks)} == {BF16}
    assert get_handles(model)[0].unsharded.dtype == F32
    loss_of(model).backward()
    assert_at_rest(model)


# --- errors ---

_ALLOWED = "torch.float16, torch.bfloat16, torch.float32, torch.float64"


@pytest.mark.fast
@pytest.mark.parametrize(
    "name",
    ["param_dtype", "gather_dtype", "reduce_dtype", "main_dtype", "output_dtype", "buffer_dtype"],
)
def test_other_dtypes_are_refused(name: str) -> None:
    """S3.2: naming the allowed ones."""
    allowed, low = _ALLOWED, (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
    if name == "gather_dtype":
        allowed, low = ", ".join([_ALLOWED, *map(str, low)]), ()
    for value in (*low, torch.uint8, torch.complex64, "bf16"):
        text = f"expected {name} to be None or one of {allowed}, got {value!r}"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            MixedPrecisionPolicy(**{name: value})


def test_other_fields_are_checked() -> None:
    """A bool, and classes of modules."""
    with pytest.raises(
        ValueError, match=r"^expected cast_forward_inputs to be True or False, got 1$"
    ):
        MixedPrecisionPolicy(cast_forward_inputs=1)
    for value in ([nn.LayerNorm], (int,), nn.LayerNorm):
        text = f"expected keep_fp32_classes to be a tuple of module classes, got {value!r}"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            MixedPrecisionPolicy(keep_fp32_classes=value)


@distributed(2)
def test_main_dtype_of_other_parameters_is_refused() -> None:
    """S3.2: nothing is changed; without main_dtype they are left as they are."""
    model = nn.Linear(3, 3, dtype=torch.complex64)
    policy = MixedPrecisionPolicy(main_dtype=F32)
    text = (
        f"expected parameters of {_ALLOWED} where main_dtype is given, got 'weight' of "
        "torch.complex64. Pass it in ignored_params, or leave main_dtype out for its unit."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        fully_shard(model, mp_policy=policy)
    assert type(model.weight) is nn.Parameter
    with pytest.raises(
        ValueError, match=r"^expected mp_policy to be a .*MixedPrecisionPolicy, got None, a b"
    ):
        fully_shard(model, mp_policy=None)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    assert get_handles(model)[0].unsharded.dtype == torch.complex64


@distributed(2)
def test_main_dtype_is_not_undone_silently() -> None:
    """`.to(dtype)` after the call is refused at the next forward, until it is taken back."""
    model = fully_shard(nn.Linear(5, 7), mp_policy=POLICIES["bf16"])
    model.to(BF16)
    text = (
        "the parameters of unit 'Linear' were converted to torch.bfloat16, and its "
        "MixedPrecisionPolicy says main_dtype=torch.float32. Convert them back, or shard with "
        "another policy; to compute in another dtype, use param_dtype."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        model(torch.ones(1, 5))
    model.float()
    assert model(torch.ones(1, 5)).dtype == BF16
    other = fully_shard(nn.Linear(5, 7), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    other.to(F64)
    other(torch.ones(1, 5)).sum().backward()
    assert other.weight.grad.dtype == F64


@distributed(2)
def test_ranks_with_different_policies_are_told() -> None:
    """At the first forward, on all ranks alike."""
    dtype = BF16 if dist.get_rank() else F16
    model = nn.Linear(5, 7)
    shard_root(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    with pytest.raises(RuntimeError, match=r"mp_policy=MixedPrecisionPolicy\(param_dtype=torch"):
        model(torch.ones(1, 5))


@distributed(2)
def test_inputs_are_cast_to_what_a_model_with_main_dtype_computes_in() -> None:
    """Without param_dtype too; of a unit that computes in two dtypes inputs stay as they are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(BF16)
    plain = copy.deepcopy(model)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(main_dtype=F32))
    x = torch.randn(2, 5)
    assert_equal(model(x), plain(x.to(BF16)))
    kept = fully_shard(
        plain, mp_policy=MixedPrecisionPolicy(main_dtype=F32, cast_forward_inputs=False)
    )
    with pytest.raises(RuntimeError, match="dtype"):
        kept(x)
