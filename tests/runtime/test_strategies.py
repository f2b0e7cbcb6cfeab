"""What each strategy keeps, sends and frees; and that all of them train alike."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from composable_shard import (
    Block,
    FlatShard,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    clip_grad_norm_,
    describe,
    fully_shard,
    get_handles,
    lazy_init,
    no_sync,
    reduce_pending_gradients,
)
from composable_shard.comm.trace import count_collectives, trace_events
from composable_shard.tensor import own_gradient
from tests.harness.assertions import assert_equal
from tests.harness.memory import peak_bytes
from tests.harness.pairs import pairwise
from tests.harness.ranks import device, distributed
from tests.programs.models import (
    EqualBlocks,
    Net,
    Optional,
    Twins,
    assert_at_rest,
    assert_is_slice,
    collectives_of,
    loss_of,
    make_net,
    rank_input,
    replica_mesh,
    seeded,
    shard_blocks,
    shard_mixed,
    wait_for_engine,
)

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy
STRATEGIES = list(ShardingStrategy)
KEPT = [SHARD_GRAD_OP, SHARD_OPTIM]
NUM_UNITS = 4  # of a Net: three blocks and the root


# --- parity ---

SHARDINGS: dict[str, Callable[[nn.Module], None]] = {
    **{each.name: partial(shard_blocks, strategy=each) for each in STRATEGIES},
    "mixed": shard_mixed,
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9, foreach=False),
    "adamw foreach": partial(torch.optim.AdamW, foreach=True),
    "nadam": torch.optim.NAdam,
}


@pytest.mark.parametrize(*pairwise(optimizer=OPTIMIZERS, sharding=SHARDINGS, world_size=(2, 3)))
@distributed(on_device=True)
def test_training_equals_the_unsharded_model(sharding: str, optimizer: str) -> None:
    """S2.4: losses, gradients and parameters (fused kernels round the ends of slices otherwise)."""
    twins = Twins(Net, SHARDINGS[sharding])
    optimizers = twins.optimizers(OPTIMIZERS[optimizer])
    for step in range(3):
        twins.step(partial(loss_of, step=step))
        for each in optimizers:
            each.step()
            each.zero_grad()
        twins.assert_equal_parameters()
    assert_at_rest(twins.sharded)


@pytest.mark.parametrize(
    *pairwise(norm_type=[1.0, 2.0, float("inf")], sharding=SHARDINGS, world_size=(2, 3))
)
@distributed(on_device=True)
def test_one_clip_takes_all_strategies(sharding: str, norm_type: float) -> None:
    """S2.10: the norm is exact over parameters that are sharded and others that are not."""
    twins = Twins(Net, SHARDINGS[sharding])
    twins.step(loss_of)
    norms = [clip_grad_norm_(twins.sharded, 0.1, norm_type)]
    norms.append(nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.1, norm_type))
    assert norms[1] > 0.1
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
    for ours, plain in zip(twins.sharded.parameters(), twins.plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), plain.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("sharding", SHARDINGS)
@distributed(3)
def test_norm_that_is_not_finite_raises_on_all_ranks(sharding: str, value: float) -> None:
    """S3.8: where one parameter has such an element, on one rank; the gradients stay."""
    model = Twins(Net, SHARDINGS[sharding]).sharded
    hook = model.blocks[1].up.bias.register_hook(
        lambda grad: grad + value if dist.get_rank() == 1 else grad
    )
    loss_of(model).backward()
    hook.remove()
    before = [param.grad.full_tensor() for param in model.parameters()]
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(model, 0.1, error_if_nonfinite=True)
    for (name, param), grad in zip(model.named_parameters(), before, strict=True):
        assert_is_slice(param.grad, grad)
        assert grad.isfinite().all() == (name != "blocks.1.up.bias")
    assert not clip_grad_norm_(model, 0.1).isfinite()


@pytest.mark.fast
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_flat_parameters_accumulate(strategy: ShardingStrategy) -> None:
    """A second backward adds to the one gradient that is shown, wherever the first one lies."""
    models = [make_net(strategy=strategy), make_net(strategy=strategy, use_orig_params=False)]
    for model in models:
        for step in range(2):
            loss_of(model, step).backward()
    for handle, flat in zip(*map(get_handles, models), strict=True):
        expected = torch.cat([entry.sharded.grad.to_local() for entry in handle.entries])
        shown = flat.shown.at_rest[0].sharded.grad.to_local()
        pieces = [e.slice_of(F.pad(shown, (0, 1000))) for e in flat.entries]
        assert_equal(torch.cat(pieces), expected)


@pytest.mark.parametrize("sharding", SHARDINGS)
@distributed(2, on_device=True)
def test_gradients_that_are_set_when_a_round_begins_are_added_to(sharding: str) -> None:
    """Also those zeroed in place, and those that no_sync finds; the objects stay the same."""
    twins = Twins(Net, SHARDINGS[sharding])
    twins.step(loss_of)
    grads = [param.grad for param in twins.sharded.parameters()]
    for model in twins:
        model.zero_grad(set_to_none=False)
    twins.step(partial(loss_of, step=1))
    with no_sync(twins.sharded):
        values = [grad.full_tensor() for grad in grads]
        loss_of(twins.sharded, 2).backward()
        for grad, value in zip(grads, values, strict=True):
            assert_is_slice(grad, value)
    reduce_pending_gradients(twins.sharded)
    assert all(p.grad is g for p, g in zip(twins.sharded.parameters(), grads, strict=True))


@pytest.mark.parametrize("sharding", SHARDINGS)
@distributed(2, on_device=True)
def test_error_inside_no_sync_drops_what_was_not_reduced(sharding: str) -> None:
    """Gradients published before it stay as they were."""
    twins = Twins(Net, SHARDINGS[sharding])
    twins.step(loss_of)
    model = twins.sharded
    with no_sync(model):
        loss_of(model, 1).backward()
        hook = model.out.weight.register_hook(_raise_in_hook)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, 2).backward()
        hook.remove()
    wait_for_engine(model)
    twins.assert_equal_gradients()
    twins.step(partial(loss_of, step=3))


def _raise_in_hook(_: Tensor) -> None:
    raise ZeroDivisionError


class _TiedLinear(nn.Module):
    """Two units that show one weight, and a weight in two modules of one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.first = nn.Linear(5, 7)
        self.blocks[1].weight = self.blocks[0].weight
        self.blocks[2].bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@pytest.mark.parametrize("strategies", [*[(each,) * 4 for each in STRATEGIES], tuple(STRATEGIES)])
@distributed(2, on_device=True)
def test_tied_parameters(strategies: tuple[ShardingStrategy, ...]) -> None:
    """Units of other strategies may show them too: the owner's counts."""

    def shard(model: nn.Module) -> None:
        for module, strategy in zip([*model.blocks, model], strategies, strict=True):
            fully_shard(module, strategy=strategy)

    twins = Twins(_TiedLinear, shard)
    optimizers = twins.optimizers()
    for step in range(3):
        twins.step(partial(loss_of, step=step))
        for each in optimizers:
            each.step()
            each.zero_grad()
    twins.assert_equal_parameters()


@pytest.mark.fast
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2, on_device=True)
def test_unused_parameters_equal_ddp(strategy: ShardingStrategy) -> None:
    """S2.17: None where no rank used one; zero from the rank that did not."""
    plain = seeded(Optional)
    model = fully_shard(copy.deepcopy(plain), strategy=strategy)
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    used = [0] if dist.get_rank() else [0, 2]
    for each in (model, ddp):
        each(rank_input(4, 5), used).square().mean().backward()
    assert model.layers[1].weight.grad is None
    for name in ("layers.0.weight", "layers.2.bias"):
        assert_equal(model.get_parameter(name).grad.full_tensor(), plain.get_parameter(name).grad)


# --- what only each strategy does ---


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [(FULL_SHARD, 2 * NUM_UNITS - 1), (SHARD_GRAD_OP, 0), (SHARD_OPTIM, 0), (NO_SHARD, 0)],
)
@distributed(2)
def test_collectives_of_a_second_microbatch_without_sync(
    strategy: ShardingStrategy, expected: int
) -> None:
    """Only FULL_SHARD gathers again; nobody reduces."""
    model = make_net(strategy=strategy)
    with no_sync(model):
        loss_of(model).backward()
        log = collectives_of(lambda: loss_of(model, 1).backward())
    assert len(log.events) == log.count("all_gather") == expected


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [(FULL_SHARD, NUM_UNITS), (SHARD_GRAD_OP, 0), (SHARD_OPTIM, 0), (NO_SHARD, 0)],
)
@distributed(2)
def test_collectives_of_a_forward_without_a_step_before(
    strategy: ShardingStrategy, expected: int
) -> None:
    """What is kept needs no gather, be it the second forward or the first after a backward."""
    model = make_net(strategy=strategy)
    loss_of(model).backward()
    for _ in range(2):
        with torch.no_grad():
            log = collectives_of(lambda: loss_of(model))
        assert len(log.events) == log.count("all_gather") == expected


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (FULL_SHARD, NUM_UNITS),
        (SHARD_GRAD_OP, NUM_UNITS),
        (SHARD_OPTIM, NUM_UNITS),
        (NO_SHARD, 0),
    ],
)
@distributed(2)
def test_collectives_of_the_forward_after_a_step(strategy: ShardingStrategy, expected: int) -> None:
    """Each unit that is sharded in any way is gathered once."""
    model = make_net(strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        loss_of(model).backward()
        optimizer.step()
        log = collectives_of(lambda: loss_of(model))
        assert len(log.events) == log.count("all_gather") == expected


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        (FULL_SHARD, "reduce_scatter"),
        (SHARD_GRAD_OP, "reduce_scatter"),
        (SHARD_OPTIM, "reduce_scatter"),
        (NO_SHARD, "all_reduce"),
    ],
)
@distributed(2, 3)
def test_a_backward_reduces_each_gradient_once(strategy: ShardingStrategy, kind: str) -> None:
    """S2.11: the payload is the flat parameters; one more all-reduce tells of their use."""
    model = make_net(strategy=strategy, reshard_after_forward=False)
    loss_of(model).backward()
    loss = loss_of(model)
    log = collectives_of(loss.backward)
    padded = sum(handle.layout.padded_numel * 4 for handle in get_handles(model))
    flags = len(list(model.parameters()))
    assert log.nbytes(kind) == padded + (flags if kind == "all_reduce" else 0)
    assert len(log.events) == NUM_UNITS + 1


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "fused step": lambda model: _adamw_step(model, fused=True),
    "foreach step": lambda model: _adamw_step(model, foreach=True),
    "loop step": lambda model: _adamw_step(model, foreach=False),
    "copy_": lambda model: [p.detach().copy_(torch.full(p.shape, 0.1)) for p in model.parameters()],
    "data": lambda model: [p.data.mul_(1.5) for p in model.parameters()],
    "load": lambda model: model.load_state_dict(
        {name: torch.full(p.shape, 0.2) for name, p in model.named_parameters()}
    ),
    "to": lambda model: model.to(torch.float64).to(torch.float32).get_parameter("out.bias"),
}


def _adamw_step(model: nn.Module, **options: bool) -> None:
    for param in model.parameters():
        if param.grad is None:
            param.grad = torch.ones_like(param)
    torch.optim.AdamW(model.parameters(), lr=0.1, **options).step()


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2, on_device=True)
def test_any_write_is_seen_by_the_next_forward(strategy: ShardingStrategy, write: str) -> None:
    """Version counters would not tell of all of them."""
    plain = seeded(Net)
    model = copy.deepcopy(plain)
    shard_blocks(model, strategy=strategy)
    for _ in range(2):
        for each in (model, plain):
            with torch.no_grad():
                loss_of(each)
                WRITES[write](each)
        with torch.no_grad():
            assert_equal(loss_of(model), loss_of(plain))


@pytest.mark.parametrize("strategy", KEPT)
@distributed(2, on_device=True)
def test_kept_units_are_gathered_ahead(strategy: ShardingStrategy) -> None:
    """S3.5: after a step the next unit's gather is issued before the current one computes."""
    model = make_net(strategy=strategy)
    loss_of(model).backward()
    _adamw_step(model)
    with trace_events() as events:
        loss_of(model)
    kinds = [(event.kind, event.name) for event in events]
    for i in range(1, 3):
        issued = kinds.index(("issue_gather", f"blocks.{i}"))
        assert issued < kinds.index(("compute", f"blocks.{i - 1}"))


# --- memory ---

DIM = 64


def _train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, DIM)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("strategy", "params", "grads", "states"),
    [
        (FULL_SHARD, "shard", "shard", "shard"),
        (SHARD_GRAD_OP, "full", "shard", "shard"),
        (SHARD_OPTIM, "full", "full", "shard"),
        (NO_SHARD, "full", "full", "full"),
    ],
)
@distributed(2, 3)
def test_bytes_at_rest(
    world_size: int, strategy: ShardingStrategy, params: str, grads: str, states: str
) -> None:
    """S2.3, S3.10 for fp32: what is kept of parameters, gradients and two moments, with AdamW."""
    torch.manual_seed(0)
    with peak_bytes() as memory:
        model = EqualBlocks()
        shard_blocks(model, strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            _train_step(model, optimizer)
        gc.collect()
    full = sum(param.numel() * 4 for param in model.parameters())
    nbytes = {"full": full, "shard": full / world_size}
    expected = nbytes[params] + nbytes[grads] + 2 * nbytes[states]
    # Scratch memory of a reduce-scatter that is done in place: of one unit, for a whole tree.
    scratch = full / 6 / (1 if world_size > 2 else 2) if strategy is SHARD_OPTIM else 0
    assert memory.current - scratch == pytest.approx(expected, rel=0.02)
    moments = sum(
        state[key].to_local().nbytes
        for state in optimizer.state.values()
        for key in ("exp_avg", "exp_avg_sq")
    )
    assert moments == pytest.approx(2 * nbytes[states], rel=0.02)


@pytest.mark.counts
@pytest.mark.parametrize("strategy", [SHARD_OPTIM, NO_SHARD])
@distributed(2, 3)
def test_a_step_allocates_nothing(strategy: ShardingStrategy) -> None:
    """S3.4: beyond what the plain model allocates; gradients are reduced where they lie."""
    allocated = []
    for make in (lambda module: None, partial(shard_blocks, strategy=strategy)):
        torch.manual_seed(0)
        model = EqualBlocks()
        make(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            _train_step(model, optimizer)
        with peak_bytes() as memory:
            _train_step(model, optimizer)
        allocated.append(memory.allocated)
    # Flags, and what gloo's threads show by chance.
    assert allocated[1] <= allocated[0] + 4096


def _gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of the buffers that hold unsharded gradients."""
    return sum(
        handle.grads._memory.buffer.untyped_storage().size() for handle in get_handles(model)
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_unsharded_gradients_of_a_backward(strategy: ShardingStrategy) -> None:
    """SHARD_GRAD_OP: one unit that is packed and one on its way; all units under no_sync.

    FULL_SHARD packs in the place of the values, the other strategies have one buffer for good.
    """
    torch.manual_seed(0)
    model = EqualBlocks()
    shard_blocks(model, strategy=strategy)
    held: list[int] = []
    for param in model.parameters():
        param.register_hook(lambda _: held.append(_gradient_bytes(model)))
    full = sum(param.numel() * 4 for param in model.parameters())
    unit, layer = full // 6, DIM * 4 * DIM * 4
    for _ in range(2):
        held.clear()
        with peak_bytes() as memory:
            loss = model(torch.ones(2, DIM)).square().mean()
            loss.backward()
        model.zero_grad()
        if strategy in (FULL_SHARD, SHARD_GRAD_OP):
            assert _gradient_bytes(model) == 0
    if strategy is FULL_SHARD:
        assert set(held) == {0}
    elif strategy is SHARD_GRAD_OP:
        # None at the first gradient of all; the last unit's while the next one's begin.
        assert set(held) == {0, unit, 2 * unit}
        assert memory.peak <= full / 2 + 2 * unit + layer + 32768
    else:
        assert set(held) == {full}
    with no_sync(model):
        model(torch.ones(2, DIM)).square().mean().backward()
    entries = [entry for handle in get_handles(model) for entry in handle.entries]
    assert all(own_gradient(entry.unsharded) is None for entry in entries)
    assert _gradient_bytes(model) == full


@pytest.mark.parametrize("strategy", KEPT)
@distributed(2, 3)
def test_kept_parameters_are_stored_once(world_size: int, strategy: ShardingStrategy) -> None:
    """The local shard is this rank's part of the unsharded buffer, which nothing replaces."""
    model = make_net(strategy=strategy)
    lazy_init(model)
    handles = get_handles(model)
    before = [handle.unsharded.data_ptr() for handle in handles]
    for step in range(2):
        loss_of(model, step).backward()
        _adamw_step(model)
    for handle, pointer in zip(handles, before, strict=True):
        assert handle.is_sharded
        assert handle.unsharded.data_ptr() == pointer
        start = handle.shard_group.rank * handle.layout.shard_numel * 4
        assert handle.local_shard.data_ptr() == pointer + start
        assert handle.unsharded.numel() == handle.layout.shard_numel * world_size


@distributed(2)
def test_nothing_is_stored_twice_or_gathered_without_shards() -> None:
    """S0.2: under NO_SHARD the unsharded buffer is the local shard, and gradients are views."""
    model = make_net(strategy=NO_SHARD)
    loss_of(model).backward()
    for handle in get_handles(model):
        assert not handle.is_sharded
        assert handle.unsharded.data_ptr() == handle.local_shard.data_ptr()
        storages = {e.sharded.grad.to_local().untyped_storage().data_ptr() for e in handle.entries}
        assert storages == {handle.grads._memory.buffer.untyped_storage().data_ptr()}
    for param in model.parameters():
        assert isinstance(param, FlatShard)
        assert param.to_local().numel() == param.numel()


@pytest.mark.parametrize("strategy", [SHARD_OPTIM, NO_SHARD])
@distributed(2, 3)
def test_gradients_lie_in_one_buffer_that_stays(strategy: ShardingStrategy) -> None:
    """S3.4: each unit's are views of it, step after step."""
    model = make_net(strategy=strategy)
    pointers = set()
    for step in range(3):
        loss_of(model, step).backward()
        for handle in get_handles(model):
            buffer = handle.grads._memory.buffer.untyped_storage()
            grads = [entry.sharded.grad.to_local() for entry in handle.entries]
            assert all(g.untyped_storage().data_ptr() == buffer.data_ptr() for g in grads)
            assert buffer.size() == handle.layout.padded_numel * 4
            pointers.add(buffer.data_ptr())
            del grads  # kept, they would keep their memory
        _adamw_step(model)
        model.zero_grad()
    assert len(pointers) == NUM_UNITS


@distributed(2)
def test_replicas_start_equal() -> None:
    """Ranks that initialise differently all get the first one's parameters."""
    torch.manual_seed(dist.get_rank())
    model = Net()
    shard_blocks(model, strategy=NO_SHARD)
    loss_of(model)
    for param in model.parameters():
        expected = param.full_tensor()
        dist.broadcast(expected, 0)
        assert_is_slice(param, expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(1)
def test_one_rank_alone_copies_no_gradient(strategy: ShardingStrategy) -> None:
    """Neither packing nor reducing: autograd's own gradient becomes the parameter's."""
    model = make_net(strategy=strategy)
    with count_collectives() as log, peak_bytes() as memory:
        loss = loss_of(model)
        loss.backward()
    grads = sum(param.grad.to_local().nbytes for param in model.parameters())
    torch.manual_seed(0)
    plain = Net()
    with peak_bytes() as plain_memory:
        loss_of(plain).backward()
    assert log.events == []
    assert grads == sum(param.numel() * 4 for param in model.parameters())
    assert memory.current <= plain_memory.current + grads + 1024  # the buffers of the first call


@distributed(4)
def test_more_ranks_than_elements() -> None:
    """S2.3: a rank with nothing to own takes part like any other."""
    for strategy in STRATEGIES:
        twins = Twins(lambda: nn.Linear(1, 1), partial(fully_shard, strategy=strategy))
        optimizers = twins.optimizers()
        for step in range(2):
            twins.step(lambda model, step=step: model(rank_input(2, 1, step=step)).square().mean())
            for each in optimizers:
                each.step()
                each.zero_grad()
        for ours, plain in zip(twins.sharded.parameters(), twins.plain.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), plain.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(4, on_device=True)
def test_sub_group_as_mesh(strategy: ShardingStrategy) -> None:
    """S2.8, S2.10: ranks 1 and 3 share a model; their numbers in the group are 0 and 1."""
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return
    plain = seeded(Net)
    model = copy.deepcopy(plain)
    shard_blocks(model, mesh=DeviceMesh.from_group(group, device().type), strategy=strategy)
    for each in (model, plain):
        loss_of(each).backward()
    for ours, param in zip(model.parameters(), plain.parameters(), strict=True):
        param.grad /= 2
        dist.all_reduce(param.grad, group=group)
        assert_is_slice(ours.grad, param.grad)
    for norm_type in (1.0, 2.0, float("inf")):
        found = clip_grad_norm_(model, 1e9, norm_type)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9, norm_type)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


# --- trainability and param groups ---


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_trainability_may_change_between_steps(strategy: ShardingStrategy) -> None:
    """S2.9, S2.16: values and optimizer state stay; frozen units reduce and hold no gradients."""
    twins = Twins(Net, shard_blocks, strategy=strategy)
    optimizers = twins.optimizers()
    kind = "all_reduce" if strategy is NO_SHARD else "reduce_scatter"
    flags = int(strategy is NO_SHARD)  # the all-reduce that tells of use
    for step, is_trainable in enumerate([True, False, False, True, True]):
        for model in twins:
            model.blocks[1].requires_grad_(is_trainable)
        with count_collectives() as log:
            twins.step(partial(loss_of, step=step))
        assert log.count(kind) - flags == 3 + is_trainable
        for each in optimizers:
            each.step()
            each.zero_grad()
        (handle,) = get_handles(twins.sharded.blocks[1])
        if not is_trainable:
            assert handle.grads._memory.buffer.untyped_storage().size() == 0
        twins.assert_equal_parameters()


def _layers() -> nn.Sequential:
    layers = [nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, 8))


FREEZINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "even": dict,
    "whole": lambda: {"granularity": "param"},
    "rows": lambda: {"granularity": Block(24)},
    "cast": lambda: {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
    "offloaded": lambda: {"offload_policy": OffloadPolicy()},
    "copied": lambda: {"mesh": replica_mesh(2, 1)},
}


@pytest.mark.parametrize(*pairwise(strategy=STRATEGIES, kind=FREEZINGS))
@distributed(2)
def test_frozen_parameters_of_a_unit_have_no_gradients_on_the_way(
    strategy: ShardingStrategy, kind: str
) -> None:
    """S2.9: from the next step on, though their unit was formed with them; microbatches too."""
    twins = Twins(_layers, fully_shard, strategy=strategy, **FREEZINGS[kind]())
    optimizers = twins.optimizers()
    (handle,) = get_handles(twins.sharded)
    # Which layers are trainable, by step and microbatch.
    for step, flags in enumerate(["111", "001", "001 011", "100 110", "111", "111 010", "010"]):
        *unsynced, last = flags.split()
        for trainable in (*unsynced, last):
            for model in twins:
                for layer, flag in zip(model[::2], trainable, strict=True):
                    layer.requires_grad_(flag == "1")
            sync = nullcontext() if trainable is last else no_sync(twins.sharded)
            with sync, count_collectives() as log:
                for model in twins:
                    twins.backward(model, loss_of(model, step))
        twins.assert_equal_gradients()
        if not unsynced:
            numel = sum(p.numel() for p in twins.plain.parameters() if p.requires_grad)
            layout = handle.grads.layout
            assert layout.unpadded_numel == numel
            if handle.shard_group.size == 2:
                sent = log.nbytes("reduce_scatter") / handle.grads._memory.buffer.itemsize
                assert numel <= sent <= layout.padded_numel
            (unit,) = describe(twins.sharded).units
            if strategy is FULL_SHARD and handle.shard_group.size == 2:
                start, end = layout.shard_range(dist.get_rank())
                assert unit.grad_nbytes == 4 * (end - start)
        for each in optimizers:
            each.step()
            each.zero_grad()
        twins.assert_equal_parameters()


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_param_groups_contain_all_parameters_and_their_options_act(
    strategy: ShardingStrategy,
) -> None:
    """S2.1, S3.3: groups as the user made them; a schedule changes the next step everywhere."""
    twins = Twins(Net, shard_blocks, strategy=strategy)
    pairs = []
    for model in twins:
        groups = [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [], "weight_decay": 0.7},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        pairs.append((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)))
    for step in range(3):
        twins.step(partial(loss_of, step=step))
        for optimizer, schedule in pairs:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    groups = pairs[1][0].param_groups
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(8, 0.1), (0, 0.7), (8, 0.0)]
    assert {group["lr"] for group in groups} == {0.05 / 8}
    twins.assert_equal_parameters()


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(4)
def test_param_groups_made_before_sharding_stay(strategy: ShardingStrategy) -> None:
    """S3.3: order, options and empty groups, also on a rank that has no element of a group."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model = copy.deepcopy(plain)
    optimizers = []
    for each in (model, plain):
        groups = [
            {"params": [], "lr": 0.3},
            {"params": [each[1].bias], "lr": 0.2},
            {"params": [each[0].weight, each[1].weight], "momentum": 0.9},
            {"params": [each[0].bias], "weight_decay": 0.5},
            {"params": []},
        ]
        optimizers.append(torch.optim.SGD(groups, lr=0.1))
    params = [group["params"] for group in optimizers[0].param_groups]
    fully_shard(model[0], strategy=strategy)
    fully_shard(model, strategy=strategy)
    for step in range(2):
        for each in (model, plain):
            each(torch.full((2, 1), 1.0 + step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs, before in zip(
        *(optimizer.param_groups for optimizer in optimizers), params, strict=True
    ):
        assert all(p is q for p, q in zip(ours.pop("params"), before, strict=True))
        del theirs["params"]
        assert ours == theirs
    for ours, param in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), param.detach(), rtol=0, atol=1e-6)


class _ScaledSGD(torch.optim.SGD):
    """Takes more than a closure for a step, as optimizers of users do."""

    def step(self, closure: Any = None, *, scale: float = 1.0, names: Any = ()) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 * scale
        return super().step(closure), names


@pytest.mark.parametrize("sharding", SHARDINGS)
@distributed(2)
def test_closures_and_further_arguments_of_a_step(sharding: str) -> None:
    """S2.5: the closure's forward gathers, its backward reduces, before the step."""
    twins = Twins(Net, SHARDINGS[sharding])
    pairs = [_ScaledSGD(model.parameters(), lr=1.0, momentum=0.9) for model in twins]
    for step in range(3):
        found = []
        for model, optimizer in zip(twins, pairs, strict=True):

            def closure(model: nn.Module = model, step: int = step) -> Tensor:
                model.zero_grad()
                loss = loss_of(model, step)
                twins.backward(model, loss)
                return loss.detach()

            found.append(optimizer.step(closure, scale=1.0 + step, names=("a", step)))
        assert_equal(found[1][0], found[0][0])
        assert [names for _, names in found] == [("a", step)] * 2
        twins.assert_equal_parameters()
    assert_at_rest(twins.sharded)
