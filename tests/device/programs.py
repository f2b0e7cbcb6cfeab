"""Programs on the device with four ranks, each of which needs some of the library's waits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_shard import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedGradScaler,
    ShardingStrategy,
    clip_grad_norm_,
    drop_pending_gradients,
    fully_shard,
    get_handles,
    get_model_state_dict,
    get_pending_gradients,
    iter_full_params,
    lazy_init,
    no_sync,
    register_comm_hook,
    reshard,
    set_model_state_dict,
    set_requires_all_reduce,
    unshard,
    unshard_params,
    writeback,
)
from composable_shard.comm.hooks import then_call_hook
from composable_shard.flat_param.kept_params import as_itself
from composable_shard.options import Granularity
from tests.common.device import NAME
from tests.programs.models import EVERYWHERE, FROM_RANK0, Net, shard_blocks, shard_root

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LOW = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
ON_HOST = OffloadPolicy(params=True)

PROGRAMS: dict[str, Callable[[], None]] = {}


def _program(body: Callable[[], None]) -> Callable[[], None]:
    PROGRAMS[body.__name__] = body
    return body


def _mesh() -> DeviceMesh:
    return init_device_mesh(NAME, (2, 2), mesh_dim_names=("replicate", "shard"))


def shard_net(**options: Any) -> nn.Module:
    """Return a model whose blocks are units, or the root alone where it makes buckets."""
    torch.manual_seed(0)
    model = Net(2)
    if "offload_policy" not in options:
        model.to(NAME)
    (shard_root if "bucket_cap_mb" in options else shard_blocks)(model, **options)
    return model


def backward(model: nn.Module) -> None:
    """Run forward and backward."""
    model(torch.randn(3, 5, device=NAME)).float().square().mean().backward()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)


def train_net(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    num_steps: int = 2,
    microbatches: bool = False,
) -> None:
    """Take clipped steps; with microbatches, those before the last put reductions off."""
    optimizer = optimizer or make_optimizer(model)
    for _ in range(num_steps):
        if microbatches:
            set_requires_all_reduce(model, False)
            backward(model)
            set_requires_all_reduce(model, True)
            with no_sync(model):
                backward(model)
        backward(model)
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


@_program
def step() -> None:
    """Train as by default."""
    train_net(shard_net())


@_program
def step_of_large_units() -> None:
    """Issue each collective alone."""
    train_net(shard_net(prefetch_nbytes=0))


@_program
def step_in_bf16() -> None:
    """Compute in bfloat16."""
    train_net(shard_net(mp_policy=MIXED))


@_program
def step_with_16_bit_sums() -> None:
    """Sum terms that travel in bfloat16."""
    train_net(shard_net(mp_policy=LOW))


@_program
def step_with_int8_gathers() -> None:
    """Gather quantised shards."""
    train_net(shard_net(mp_policy=MixedPrecisionPolicy(gather_dtype=torch.int8)))


@_program
def step_with_replicas() -> None:
    """Reduce in two stages, of which the second is put off."""
    train_net(shard_net(mesh=_mesh(), mp_policy=LOW), microbatches=True)


@_program
def step_with_kept_values() -> None:
    """Keep full values."""
    train_net(shard_net(strategy=ShardingStrategy.SHARD_GRAD_OP, mp_policy=LOW))


@_program
def step_with_kept_gradients() -> None:
    """Keep the reduce buffer."""
    train_net(shard_net(strategy=ShardingStrategy.SHARD_OPTIM, mp_policy=LOW), microbatches=True)


@_program
def step_without_shards() -> None:
    """All-reduce alone."""
    train_net(shard_net(strategy=ShardingStrategy.NO_SHARD, mp_policy=LOW), microbatches=True)
    train_net(shard_net(strategy=ShardingStrategy.NO_SHARD, mesh=_mesh()))


@_program
def step_in_buckets() -> None:
    """Reduce in buckets."""
    train_net(shard_net(bucket_cap_mb=0.0005, mp_policy=LOW))


@_program
def step_with_kept_parts() -> None:
    """Keep a part between forward and backward."""
    train_net(shard_net(reshard_after_forward=2))


@_program
def step_on_host() -> None:
    """Keep parameters on the host, and accumulate."""
    train_net(shard_net(offload_policy=ON_HOST, mp_policy=LOW), microbatches=True)


@_program
def step_on_host_with_kept_gradients() -> None:
    """Under SHARD_OPTIM."""
    strategy = ShardingStrategy.SHARD_OPTIM
    train_net(shard_net(offload_policy=ON_HOST, strategy=strategy), microbatches=True)


@_program
def step_with_state_on_host() -> None:
    """Keep a copy of the shards on the device."""
    train_net(shard_net(offload_policy=OffloadPolicy(optim_state=True)), microbatches=True)


def _divide_by_zero(*_: object) -> None:
    raise ZeroDivisionError


@_program
def failed_backward() -> None:
    """Go on after backwards that fail."""
    for options in ({}, {"mesh": _mesh()}, {"offload_policy": ON_HOST}):
        model = shard_net(prefetch_nbytes=0, **options)  # a reduction is in flight
        optimizer = make_optimizer(model)  # a failed backward may leave full parameters shown
        train_net(model, optimizer, num_steps=1)  # later backwards pack gradients in place

        for _ in range(2):
            hook = model.blocks[0].register_full_backward_hook(_divide_by_zero)
            with suppress(ZeroDivisionError):
                backward(model)
            hook.remove()
        train_net(model, optimizer, num_steps=1)


@_program
def dropped_in_backward() -> None:
    """Go on without models whose backwards have failed."""
    for strategy in ShardingStrategy:
        model = shard_net(strategy=strategy, prefetch_nbytes=0)
        train_net(model, make_optimizer(model), num_steps=3)
        model.blocks[0].register_full_backward_hook(_divide_by_zero)
        with suppress(ZeroDivisionError):
            backward(model)
        del model
        gc.collect()
        for numel in range(1, 400):
            torch.zeros(numel, device=NAME)


@_program
def scaled_step() -> None:
    """Let the ranks agree on what is not finite."""
    model = shard_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(NAME, init_scale=8.0)
    for _ in range(2):
        scaler.scale(model(torch.randn(3, 5, device=NAME)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _edit(model: nn.Module, **options: bool) -> None:
    with unshard_params(model, **options):
        for param in model.parameters():
            with torch.no_grad():
                if param.numel() and (dist.get_rank() == 0 or not options.get("rank0_only")):
                    param.mul_(2)


@_program
def edits() -> None:
    """Edit full parameters and gradients."""
    model = shard_net()
    backward(model)
    _edit(model)
    _edit(model, with_grads=True)
    _edit(model, with_grads=True, rank0_only=True)
    train_net(model, num_steps=1)


@_program
def edits_with_replicas() -> None:
    """Edit on the first rank alone."""
    model = shard_net(mesh=_mesh())
    _edit(model, rank0_only=True)
    train_net(model, num_steps=1)


@_program
def edits_on_host() -> None:
    """Edit what is offloaded."""
    for options in ({}, {"mp_policy": MIXED}):
        model = shard_net(offload_policy=ON_HOST, **options)
        train_net(model, num_steps=1)
        _edit(model, rank0_only=True)
        unshard(model, recurse=True)
        _edit(model)
        reshard(model, recurse=True)


@_program
def writes_on_host() -> None:
    """Between a forward that needs no backward and the next one."""
    model = shard_net(offload_policy=ON_HOST)
    with torch.no_grad():
        for _ in range(8):  # in the first ones the host waits, to compare the ranks
            model(torch.randn(3, 5, device=NAME))
            for param in model.parameters():
                param.mul_(2)


@_program
def rounds_on_host() -> None:
    """A gradient comes after its unit was reduced: the unit packs and reduces again."""
    for strategy in (ShardingStrategy.SHARD_OPTIM, ShardingStrategy.FULL_SHARD):
        model = shard_net(offload_policy=ON_HOST, strategy=strategy)
        lazy_init(model)
        (handle,) = get_handles(model.blocks[0])
        context = fully_shard.state(model.blocks[0]).context  # type: ignore[attr-defined]
        for value in (1.0, 2.0, 3.0):
            for index, entry in enumerate(handle.entries):
                with as_itself(entry.unsharded):
                    entry.unsharded.grad = torch.full(entry.spec.shape, value, device=NAME)
                    handle.grads.pack(index, may_overwrite=False)
            handle.grads.issue(
                context.streams, context.scratch, keeps_values=False, is_deferred=False
            )
            handle.grads.add_result()
        handle.grads.publish([True] * len(handle.entries))


@_program
def values_from_first_rank() -> None:
    """Begin with the first rank's values."""
    for options in ({}, {"mesh": _mesh()}, {"mesh": _mesh(), "offload_policy": ON_HOST}):
        train_net(shard_net(sync_module_states=True, **options), num_steps=1)


@_program
def state_dicts() -> None:
    """Gather and scatter whole values."""
    model = shard_net()
    train_net(model, num_steps=1)
    values = get_model_state_dict(model, options=EVERYWHERE)
    set_model_state_dict(model, values if dist.get_rank() == 0 else {}, options=FROM_RANK0)
    for param in model.parameters():
        param.full_tensor().sum()
    for _, value in iter_full_params(model):
        value.sum()


@_program
def unshard_ahead() -> None:
    """Gather early, for nothing too."""
    model = shard_net()
    for is_used in (True, False):
        work = unshard(model, recurse=True, async_op=True)
        assert work is not None
        if is_used:
            work.wait()
        reshard(model, recurse=True)
    train_net(model, num_steps=1)


@_program
def writeback_at_once() -> None:
    """Write back while the gather may still run."""
    model = shard_net()
    unshard(model, recurse=True, async_op=True)
    writeback(model, recurse=True)
    reshard(model, recurse=True)


@_program
def comm_hooks() -> None:
    """Let hooks communicate."""
    for options in ({}, {"mesh": _mesh()}):
        model = shard_net(**options)
        register_comm_hook(model, then_call_hook, (Tensor.neg_, "reduce_scatter"))
        train_net(model)


class _CountingState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.inner(x) * self.seen.sum()


@_program
def buffers() -> None:
    """Broadcast buffers."""
    model = fully_shard(_CountingState().to(NAME), broadcast_buffers=True)
    train_net(model)


@_program
def pending_gradients() -> None:
    """Look at gradients that wait."""
    model = shard_net(mesh=_mesh())
    set_requires_all_reduce(model, False)
    backward(model)
    for _, gradient in get_pending_gradients(model).items():
        gradient.sum()
    drop_pending_gradients(model)


@_program
def whole_parameters() -> None:
    """Give each parameter to one rank."""
    granularity: Granularity = "param"
    model = shard_net(granularity=granularity)
    train_net(model)
    for param in model.parameters():
        param.full_tensor().sum()


@_program
def norms() -> None:
    """Reduce over shards."""
    model = shard_net()
    backward(model)
    for param in model.parameters():
        param.norm()
        param.abs().max()
        assert param.grad is not None
        param.grad.amax()
