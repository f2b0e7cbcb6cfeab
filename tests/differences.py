"""What happens when one rank does something else: a table, difference by strategy.

    python -m tests.differences [--strategy FULL_SHARD] [--only swap] [--timeout 5]
    python -m tests.differences --table benchmarks/results/lockstep_cpu.md
    python -m tests.differences --setup     those of tests/construct/test_setup_differences.py

The strategies may be DDP and FSDP2 too, for the differences that need nothing of this library.
After a strategy may stand when the ranks deviate, and which collectives they have: messages of
this library, or those of the backend, as on accelerators, with identities exchanged before them.

    FULL_SHARD           by messages, after two steps
    FULL_SHARD/first     by the backend, after two steps: identities are exchanged then
    FULL_SHARD/later     by the backend, after ten steps: they are not any more
    FULL_SHARD/always    by the backend, after ten steps, with `check_order="always"`
    FULL_SHARD/buckets   with an option of `OPTIONS`: reductions in buckets, hooks, mixed precision
    FULL_SHARD/later/comm_hook    both
    FULL_SHARD/mesh      four ranks, of which two and two hold copies
    FULL_SHARD/three     three ranks

Set-up differences are there from the beginning: one rank changes its model, or shards it with
another option. Right is then that both ranks train, and end with equal weights.

Two processes train a small model. After two steps one of them deviates, in one of the ways below,
and both train on. A cell of the table is one of:

    right      both ranks end with the weights of a plain model whose gradients are averaged
    error      both ranks raise the same Python error, which names the ranks
    unnamed    both ranks raise a Python error of the backend, which names nothing
    errors     both ranks raise Python errors, but different ones
    one error  only one rank raises; the other ends, or does not
    SILENT     both ranks end, with other weights
    HANG       a rank has not ended `timeout` + 10 s after the deviation
    ABORT      a process died of a signal
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import composable_shard as cs
from composable_shard import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictOptions,
    fully_shard,
    is_sharded,
    register_comm_hook,
)
from composable_shard.comm import ReductionStage, devices, watch
from tests.construct import test_setup_differences as setups
from tests.harness import ranks
from tests.harness.assertions import Planned
from tests.harness.ranks import RankError, run_processes
from tests.programs.models import Net

DEVIANT = 1  # the rank that deviates
SPARE_S = 10.0  # beyond the group's timeout
DIM = 8
NUM_STEPS = 4
DEVIATION = 2  # the step in which the ranks differ
FULL = StateDictOptions(full_state_dict=True)


WAYS = {"first": 0, "later": 8, "always": 8}  # steps before the first of `NUM_STEPS`
# What units are sharded with. Double precision stands for mixed precision: it changes no value.
OPTIONS: dict[str, dict[str, Any]] = {
    "buckets": {"bucket_cap_mb": 1e-5},  # one for each parameter
    "mixed": {"mp_policy": MixedPrecisionPolicy(torch.float64, reduce_dtype=torch.float64)},
    "offload": {"offload_policy": OffloadPolicy(params=True)},
    "whole": {"granularity": "param"},
    "flat": {"use_orig_params": False},
    "kept": {"reshard_after_forward": False},
    "alone": {"prefetch_nbytes": 0},  # each collective
    "mesh": {},
    "three": {},
    "comm_hook": {},
    "grad_hook": {},  # an optimizer in the backward
    "collective": {},  # a hook on gradients that issues a collective
}


def num_ranks(strategy: str) -> int:
    """Return how many ranks train, of whom the deviant is one."""
    kinds = strategy.split("/")
    return 4 if "mesh" in kinds else 3 if "three" in kinds else 2


class Chain(nn.Module):
    """Three equal blocks and a wider one, run in an order that a test may change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks: list[nn.Module] = [nn.Linear(DIM, DIM) for _ in range(3)]
        blocks.append(nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.Tanh(), nn.Linear(4 * DIM, DIM)))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(DIM, DIM)
        self.order = [0, 1, 2, 3]
        self.is_checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            block = self.blocks[index]
            y = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
            x = x + torch.tanh(y)
        return self.head(x)


class Run:
    """One rank's training, of a sharded model or of a plain one that stands for this rank's."""

    def __init__(self, model: Any, rank: int) -> None:
        self.model, self.rank = model, rank
        self.call: nn.Module = model  # or what is around it
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.directory = ""
        self.index = 0

    def loss(self, part: int = 0) -> Tensor:
        seed = 100 * self.index + 10 * part + self.rank
        generator = torch.Generator().manual_seed(1000 + seed)
        return self.call(torch.randn(4, DIM, generator=generator)).square().mean()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.loss().backward()
        self.update()

    @contextmanager
    def ordered(self, *order: int) -> Iterator[None]:
        before, self.model.order = self.model.order, list(order)
        try:
            yield
        finally:
            self.model.order = before


@dataclass(frozen=True)
class Difference:
    """What the deviant rank does instead of its third step, and the other rank too if it must."""

    act: Callable[[Run], None]
    others: Callable[[Run], None] = Run.step
    is_plain: bool = True  # a plain model can do it too, so there is a right result
    strategies: tuple[str, ...] = ()  # all
    units: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,), (3,))  # the blocks of each
    has_root: bool = True


DIFFERENCES: dict[str, Difference] = {}


def difference(**options: Any) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Enter a function into the table by its name."""

    def enter(act: Callable[[Run], None]) -> Callable[[Run], None]:
        DIFFERENCES[act.__name__.removeprefix("_")] = Difference(act, **options)
        return act

    return enter


# Order


def _ordered_step(*order: int) -> Callable[[Run], None]:
    def act(run: Run) -> None:
        with run.ordered(*order):
            run.step()

    return act


for _name, _order in {
    "swap_equal_units": (1, 0, 2, 3),
    "swap_unequal_units": (0, 1, 3, 2),
    "reverse_all_units": (3, 2, 1, 0),
    "skip_a_unit": (0, 2, 3),
    "skip_the_first_unit": (1, 2, 3),
    "skip_the_wide_unit": (0, 1, 2),
    "skip_all_units": (),
    "repeat_a_unit": (0, 1, 1, 2, 3),
    "repeat_for_another": (0, 1, 1, 3),
}.items():
    DIFFERENCES[_name] = Difference(_ordered_step(*_order))
DIFFERENCES["swap_equal_units_without_a_root"] = Difference(
    _ordered_step(1, 0, 2, 3), has_root=False
)
DIFFERENCES["skip_different_units"] = Difference(
    _ordered_step(0, 2, 3), others=_ordered_step(0, 1, 3)
)

# Units of several modules, of which the ranks run different ones: the deviant's, the other's.
for _name, _units, _order, _others in (
    ("other_modules_of_a_unit", ((0, 1), (2,), (3,)), (1, 2, 3), (0, 2, 3)),
    ("fewer_modules_of_a_unit", ((0, 1), (2,), (3,)), (0, 2, 3), (0, 1, 2, 3)),
    ("unequal_modules_of_a_unit", ((2, 3), (0,), (1,)), (0, 1, 2), (0, 1, 3)),
    ("a_module_of_a_unit_twice", ((0, 1, 2), (3,)), (1, 1, 1, 3), (0, 1, 2, 3)),
    ("a_module_of_a_unit_again", ((0, 1), (2,), (3,)), (0, 1, 0, 2, 3), (0, 1, 2, 3)),
    ("modules_of_a_unit_around_another", ((0, 2), (1,), (3,)), (0, 1, 3), (0, 1, 2, 3)),
    ("modules_of_a_wide_unit_around_another", ((0, 3), (1,), (2,)), (3, 1), (0, 1, 3)),
    ("no_module_of_a_unit", ((0, 1), (2,), (3,)), (2, 3), (0, 1, 2, 3)),
):
    DIFFERENCES[_name] = Difference(
        _ordered_step(*_order), others=_ordered_step(*_others), units=_units
    )


@difference()
def _checkpointing(run: Run) -> None:
    run.model.is_checkpointed = True
    try:
        run.step()
    finally:
        run.model.is_checkpointed = False


@difference()
def _swap_for_good(run: Run) -> None:
    run.model.order = [1, 0, 2, 3]
    run.step()


# Extra and missing calls


@difference()
def _extra_forward(run: Run) -> None:
    run.loss(1)
    run.step()


@difference()
def _extra_evaluation(run: Run) -> None:
    with torch.no_grad():
        run.loss(1)
    run.step()


@difference()
def _evaluation_after_the_step(run: Run) -> None:
    run.step()
    with torch.no_grad():
        run.loss(1)


@difference()
def _forward_of_one_unit(run: Run) -> None:
    with torch.no_grad():
        run.model.blocks[1](torch.ones(1, DIM))
    run.step()


@difference()
def _no_grad(run: Run) -> None:
    with torch.no_grad():
        run.loss()
    run.update()


@difference(is_plain=False)
def _no_sync(run: Run) -> None:
    with cs.no_sync(run.model):
        run.loss().backward()
    run.update()


@difference(is_plain=False)
def _requires_gradient_sync_off(run: Run) -> None:
    cs.set_requires_gradient_sync(run.model, False)
    run.step()


@difference()
def _one_microbatch_more(run: Run) -> None:
    run.loss(1).backward()
    run.step()


@difference()
def _two_forwards_one_backward(run: Run) -> None:
    (run.loss() + run.loss(1)).backward()
    run.update()


@difference()
def _one_step_less(run: Run) -> None:
    run.update()


@difference()
def _nothing_at_all(run: Run) -> None:
    pass


@difference()
def _backward_twice(run: Run) -> None:
    loss = run.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    run.update()


def _train_on_a_block(run: Run, factor: float | None) -> None:
    outputs: list[Tensor] = []
    hook = run.model.blocks[1].register_forward_hook(lambda *call: outputs.append(call[2]))
    loss = run.loss()
    hook.remove()
    of_block = outputs[0].square().mean()
    (of_block if factor is None else of_block + factor * loss).backward()
    run.update()


@difference()
def _gradient_of_an_activation(run: Run) -> None:
    """The backward accumulates no gradient of a parameter."""
    outputs: list[Tensor] = []
    hook = run.model.blocks[0].register_forward_hook(lambda *call: outputs.append(call[2]))
    loss = run.loss()
    hook.remove()
    torch.autograd.grad(loss, outputs)
    run.update()


@difference()
def _loss_of_a_block(run: Run) -> None:
    """The backward passes over the units behind it."""
    _train_on_a_block(run, None)


@difference()
def _loss_of_a_block_and_zero(run: Run) -> None:
    """The backward reaches all units."""
    _train_on_a_block(run, 0.0)


@difference(is_plain=False)
def _forward_without_backward(run: Run) -> None:
    run.loss()


@difference(is_plain=False)
def _end_early(run: Run) -> None:
    raise SystemExit


@difference(is_plain=False)
def _sleep_too_long(run: Run) -> None:
    time.sleep(int(os.environ["GROUP_TIMEOUT_S"]) + 3)
    run.step()


# Errors that one rank catches


def _raise(*_: Any) -> None:
    raise Planned("planned")


@difference(is_plain=False)
def _error_before_forward(run: Run) -> None:
    run.optimizer.zero_grad()


@difference(is_plain=False)
def _error_in_forward(run: Run) -> None:
    hook = run.model.blocks[1].register_forward_hook(_raise)
    try:
        run.step()
    except Planned:
        pass
    finally:
        hook.remove()


@difference(is_plain=False)
def _error_in_backward(run: Run) -> None:
    hook = run.model.blocks[1].register_full_backward_hook(_raise)
    try:
        run.step()
    except Planned:
        run.optimizer.zero_grad()
    finally:
        hook.remove()


# The optimizer


@difference(is_plain=False)
def _step_twice(run: Run) -> None:
    run.loss().backward()
    run.optimizer.step()
    run.update()


@difference(is_plain=False)
def _no_step(run: Run) -> None:
    run.loss().backward()
    run.optimizer.zero_grad()


@difference(is_plain=False)
def _no_zero_grad(run: Run) -> None:
    run.loss().backward()
    run.optimizer.step()


@difference(is_plain=False)
def _write_a_parameter(run: Run) -> None:
    with torch.no_grad():
        next(run.model.parameters()).mul_(2.0)
    run.step()


# Functions that need all ranks


def _after(call: Callable[[Run], object]) -> Callable[[Run], None]:
    """Do something between backward and the optimizer's step, which changes no weight."""

    def act(run: Run) -> None:
        run.loss().backward()
        call(run)
        run.update()

    return act


def _params(run: Run) -> list[Any]:
    return list(run.model.parameters())


def _first(run: Run) -> Any:
    return next(run.model.parameters())


def _in_scope(run: Run, **options: Any) -> None:
    with cs.unshard_params(run.model, **options):
        pass


def _save(run: Run) -> None:
    cs.save_checkpoint(f"{run.directory}/c", run.model, run.optimizer, step=1)


def _no_norm(run: Run) -> None:
    _first(run).grad.norm()


def _product(*params: Tensor) -> Tensor:
    """Multiply matrices at rest, which are gathered."""
    return torch.linalg.multi_dot([param.detach() for param in params])


def _scaled_column(param: Tensor) -> None:
    param.detach()[:, 0].mul_(1.0)


_CALLS: dict[str, Callable[[Run], object]] = {
    "product_at_rest": lambda run: _product(*_params(run)[:3:2]),
    "column_at_rest": lambda run: _scaled_column(_first(run)),
    "largest_of_a_gradient": lambda run: _first(run).grad.flatten().topk(3),
    "rows_at_rest": lambda run: _first(run).detach().norm(dim=1),
    "dot_at_rest": lambda run: torch.dot(*[_first(run).detach().view(-1)] * 2),
    "vector_at_rest": lambda run: nn.utils.parameters_to_vector(_params(run)).detach().sum(),
    "full_tensor": lambda run: _first(run).full_tensor(),
    "norm_of_a_parameter": lambda run: _first(run).detach().norm(),
    "sum_of_a_parameter": lambda run: _first(run).detach().sum(),
    "norm_of_a_gradient": _no_norm,
    "clip_grad_norm_": lambda run: cs.clip_grad_norm_(run.model, 1e9),
    "clip_of_torch": lambda run: nn.utils.clip_grad_norm_(run.model.parameters(), 1e9),
    "get_model_state_dict": lambda run: cs.get_model_state_dict(run.model, options=FULL),
    "get_optimizer_state_dict": lambda run: cs.get_optimizer_state_dict(
        run.model, run.optimizer, options=FULL
    ),
    "set_model_state_dict": lambda run: cs.set_model_state_dict(run.model, run.model.state_dict()),
    "load_state_dict": lambda run: run.model.load_state_dict(run.model.state_dict()),
    "unshard_params": _in_scope,
    "unshard": lambda run: (cs.unshard(run.model, recurse=True), cs.reshard(run.model)),
    "save_checkpoint": lambda run: cs.save_checkpoint(
        f"{run.directory}/{run.rank}", run.model, run.optimizer, step=1
    ),
    "save_safetensors": lambda run: cs.save_safetensors(run.model, f"{run.directory}/{run.rank}"),
    "lazy_init_again": lambda run: cs.lazy_init(run.model),
    "barrier_of_torch": lambda run: dist.barrier(),
    "all_reduce_of_torch": lambda run: dist.all_reduce(torch.ones(1000)),
    "register_flat_param": lambda run: (
        cs.register_flat_param(run.model),
        cs.register_orig_params(run.model),
    ),
    "other_sharded_model": lambda run: fully_shard(nn.Linear(2, 2))(torch.ones(1, 2)),
}
for _name, _call in _CALLS.items():
    DIFFERENCES[_name] = Difference(_after(_call))  # a plain model skips the call

_PAIRS: dict[str, tuple[Callable[[Run], object], Callable[[Run], object]]] = {
    "full_tensors_of_others": (
        lambda run: _params(run)[2].full_tensor(),
        lambda run: _params(run)[0].full_tensor(),
    ),
    "full_tensors_of_other_sizes": (
        lambda run: _params(run)[1].full_tensor(),
        lambda run: _params(run)[0].full_tensor(),
    ),
    "products_of_others": (
        lambda run: _product(*_params(run)[2:5:2]),
        lambda run: _product(*_params(run)[:3:2]),
    ),
    "product_for_a_sum": (
        lambda run: _product(*_params(run)[:3:2]),
        lambda run: _first(run).detach().sum(),
    ),
    "columns_of_others": (
        lambda run: _scaled_column(_params(run)[2]),
        lambda run: _scaled_column(_first(run)),
    ),
    "dot_for_rows": (
        lambda run: torch.dot(*[_first(run).detach().view(-1)] * 2),
        lambda run: _first(run).detach().norm(dim=1),
    ),
    "clip_of_a_part": (
        lambda run: cs.clip_grad_norm_(_params(run)[:2], 1e9),
        lambda run: cs.clip_grad_norm_(run.model, 1e9),
    ),
    "clip_with_another_norm": (
        lambda run: cs.clip_grad_norm_(run.model, 1e9, norm_type=1.0),
        lambda run: cs.clip_grad_norm_(run.model, 1e9),
    ),
    "clip_for_full_tensor": (
        lambda run: cs.clip_grad_norm_(run.model, 1e9),
        lambda run: _first(run).full_tensor(),
    ),
    "save_for_state_dict": (
        lambda run: _save(run),
        lambda run: cs.get_model_state_dict(run.model, options=FULL),
    ),
    "load_checkpoint": (
        lambda run: (_save(run), cs.load_checkpoint(f"{run.directory}/c", run.model)),
        lambda run: _save(run),
    ),
    "scope_without_writeback": (lambda run: _in_scope(run, writeback=False), _in_scope),
}
for _name, (_one, _other) in _PAIRS.items():
    DIFFERENCES[_name] = Difference(_after(_one), others=_after(_other))
_PLAIN_CALLS = frozenset([*_CALLS, *_PAIRS])

# Settings


def _set_then_step(setting: Callable[[Run], object]) -> Callable[[Run], None]:
    def act(run: Run) -> None:
        setting(run)
        run.step()

    return act


_SETTINGS: dict[str, Callable[[Run], object]] = {
    "forward_prefetch": lambda run: cs.set_forward_prefetch(
        run.model.blocks[0], [run.model.blocks[2], run.model.blocks[1]]
    ),
    "reshard_after_forward": lambda run: cs.set_reshard_after_forward(run.model, False),
    "divide_factor": lambda run: cs.set_gradient_divide_factor(run.model, 7.0),
    "frozen_unit": lambda run: run.model.blocks[1].requires_grad_(False),
    "frozen_weight": lambda run: next(run.model.blocks[1].parameters()).requires_grad_(False),
}
for _name, _setting in _SETTINGS.items():
    # What a strategy has no use for changes nothing.
    is_harmless = _name in ("forward_prefetch", "reshard_after_forward")
    DIFFERENCES[_name] = Difference(_set_then_step(_setting), is_plain=is_harmless)


# A rank dies


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@difference(is_plain=False)
def _die_in_forward(run: Run) -> None:
    run.model.blocks[1].register_forward_hook(_die)
    run.step()


@difference(is_plain=False)
def _die_in_backward(run: Run) -> None:
    run.model.blocks[1].register_full_backward_hook(_die)
    run.step()


@difference(is_plain=False)
def _die_in_step(run: Run) -> None:
    run.loss().backward()
    _die()


# ---------------------------------------------------------------------------------------------
# One cell
# ---------------------------------------------------------------------------------------------


def _act(run: Run, name: str, *, is_plain: bool = False) -> None:
    item = DIFFERENCES[name]
    act = item.act if run.rank == DEVIANT else item.others
    if is_plain and (name in _PLAIN_CALLS or name in _SETTINGS):
        act = Run.step
    act(run)


@cache  # the same under each strategy
def _plain_values(name: str, warm_up: int) -> list[Tensor] | None:
    """Return the weights after all steps of plain models whose gradients are averaged."""
    if not DIFFERENCES[name].is_plain:
        return None
    runs = [Run(Chain(), rank) for rank in range(dist.get_world_size())]
    for index in range(-warm_up, NUM_STEPS):
        for run in runs:
            run.index = index
            run.optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
            run.optimizer.zero_grad = lambda: None  # type: ignore[method-assign, assignment]
            if index == DEVIATION:
                _act(run, name, is_plain=True)
            else:
                run.step()
        for params in zip(*(run.model.parameters() for run in runs), strict=True):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            mean = torch.stack(grads).mean(0)
            for param in params:
                with torch.no_grad():
                    param.sub_(0.1 * mean)
                param.grad = None
    return [param.detach() for param in runs[0].model.parameters()]


def join_ranks(rank: int, directory: str, timeout_s: int) -> None:
    """Make the process group of a cell."""
    os.environ["GROUP_TIMEOUT_S"] = str(timeout_s)
    size = int(os.environ["WORLD_SIZE"])
    file = dist.FileStore(f"{directory}/store", size)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        file.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(file.get("port")), size, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )


PEERS = ("DDP", "FSDP2")


def _has_peers(name: str, strategy: str) -> bool:
    """Return whether a library has all that a difference uses."""
    own = {*_CALLS, *_PAIRS, *_SETTINGS, "no_sync", "requires_gradient_sync_off"}
    theirs = {"clip_of_torch", "barrier_of_torch", "all_reduce_of_torch", "frozen_unit"}
    return strategy not in PEERS or name not in own or name in theirs


def _make_peer(rank: int, name: str, strategy: str, directory: str) -> Run:
    run = Run(Chain(), rank)
    run.directory = directory
    if strategy == "DDP":
        run.call = DistributedDataParallel(run.model, find_unused_parameters=True)
        return run
    mesh = init_device_mesh("cpu", (2,))
    for unit in DIFFERENCES[name].units:
        fsdp.fully_shard([run.model.blocks[index] for index in unit], mesh=mesh)
    has_root = DIFFERENCES[name].has_root
    fsdp.fully_shard(run.model if has_root else run.model.head, mesh=mesh)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    return run


def _make_run(rank: int, name: str, strategy: str, directory: str) -> Run:
    if strategy in PEERS:
        return _make_peer(rank, name, strategy, directory)
    kinds = strategy.split("/")
    if not WAYS.keys().isdisjoint(kinds):
        devices.MAX_EXCHANGE_SIZE = 0  # the backend's own collectives, as with many ranks
    options: Any = {
        "strategy": kinds[0],
        "check_order": "always" if "always" in kinds else "first",
    }
    for kind in kinds[1:]:
        options.update(OPTIONS.get(kind, {}))
    if "mesh" in kinds:
        options["mesh"] = init_device_mesh("cpu", (2, 2))
    model = Chain()
    for unit in DIFFERENCES[name].units:
        fully_shard([model.blocks[index] for index in unit], **options)
    fully_shard(model if DIFFERENCES[name].has_root else model.head, **options)
    run = Run(model, rank)
    run.directory = directory
    if "comm_hook" in kinds:
        register_comm_hook(model, _reduce)
    for param in model.parameters():
        if "grad_hook" in kinds:
            param.register_post_accumulate_grad_hook(_descend)
        if "collective" in kinds:
            param.register_post_accumulate_grad_hook(_take_norm)
    return run


def _reduce(_: object, stage: ReductionStage) -> None:
    """Reduce as a hook of a user does, by the backend's own collectives."""
    dist.all_reduce(stage.gradient, group=stage.group)
    if stage.kind == "reduce_scatter":
        numels = stage.numels or [stage.output.numel()] * stage.group.size()
        stage.output.copy_(stage.gradient.split(list(numels))[stage.group.rank()])


def _descend(param: Tensor) -> None:
    assert param.grad is not None
    with torch.no_grad():
        param.sub_(param.grad, alpha=0.1)
    param.grad = None


def _take_norm(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.norm()


def run_cell(name: str, strategy: str, directory: str, timeout_s: int) -> None:
    """Train on one rank, deviate, and write down what came of it."""
    rank = int(os.environ["RANK"])
    join_ranks(rank, directory, timeout_s)
    warm_up = max(WAYS.get(kind, 0) for kind in strategy.split("/"))
    expected = _plain_values(name, warm_up)
    run = _make_run(rank, name, strategy, directory)

    def is_right() -> bool:
        if strategy not in PEERS:  # as programs end: the ranks meet again
            cs.save_checkpoint(f"{directory}/end", run.model, run.optimizer, step=NUM_STEPS)
        values = [whole_value(param) for param in _params(run)]
        return expected is not None and all(map(_is_close, values, expected))

    train_and_note(run, partial(_act, name=name), is_right, timeout_s, warm_up)


def train_and_note(
    run: Run,
    act: Callable[[Run], None],
    is_right: Callable[[], bool],
    timeout_s: int,
    warm_up: int = 0,
) -> None:
    """Train, with `act` for the step of the deviation; write down what came of it."""
    path = Path(run.directory) / f"rank{run.rank}.json"
    began = time.monotonic()

    def note(outcome: str, text: str = "") -> None:
        found = {"outcome": outcome, "seconds": time.monotonic() - began, "text": text}
        path.write_text(json.dumps(found))

    try:
        for run.index in range(-warm_up, NUM_STEPS):
            if run.index == DEVIATION:
                dist.barrier()
                began = time.monotonic()
                act(run)
            else:
                run.step()
        note("right" if is_right() else "ended")
        dist.barrier()  # no rank leaves before the other has told
    except SystemExit:
        note("ended")
        _live_on(path, timeout_s + SPARE_S / 2)
    except Exception as error:  # of any kind: it goes into the table
        if not path.exists():
            note("error", f"{type(error).__name__}: {error}")
            _live_on(path, SPARE_S / 2)


def _live_on(path: Path, longest_s: float) -> None:
    """Wait until the other ranks, which may ask for this one, have noted what came of it."""
    paths = [path.with_name(f"rank{rank}.json") for rank in range(int(os.environ["WORLD_SIZE"]))]
    deadline = time.monotonic() + longest_s
    while time.monotonic() < deadline and not all(each.exists() for each in paths):
        time.sleep(0.05)


def train(name: str, strategy: str) -> bool:
    """Train as a cell does, in a process group that is there; return whether it ends right."""
    expected = _plain_values(name, 0) or []
    run = _make_run(dist.get_rank(), name, strategy, "")
    for run.index in range(NUM_STEPS):
        if run.index == DEVIATION:
            _act(run, name)
        else:
            run.step()
    values = [param.full_tensor().detach() for param in _params(run)]
    return len(values) == len(expected) and all(map(_is_close, values, expected))


def run_setup(name: str, strategy: str, directory: str, timeout_s: int) -> None:
    """Set a model up, on one rank in another way, train on it, and write down what came of it."""
    rank = int(os.environ["RANK"])
    join_ranks(rank, directory, timeout_s)
    torch.manual_seed(0)
    net, is_odd = Net(), rank == DEVIANT
    run = _SetupRun(net, rank)
    run.directory = directory

    def act(run: Run) -> None:
        if is_odd and name in setups.BEFORE:
            setups.BEFORE[name](net)
        options = setups.OPTIONS.get(name, {}) if is_odd else {}
        if strategy in PEERS:
            run.call = _wrap_peer(net, strategy, name if is_odd else "")
        else:
            for module in (*net.blocks, net):
                if not is_sharded(module):
                    fully_shard(module, **{"strategy": strategy, **options})
        if is_odd and name in setups.AFTER:
            setups.AFTER[name](net)
        run.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        run.step()

    train_and_note(run, act, lambda: _end_equal(net), timeout_s)


class _SetupRun(Run):
    """Training that begins with its deviation."""

    def step(self) -> None:
        if self.index >= DEVIATION:
            super().step()

    def loss(self, part: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.index + self.rank)
        dtype = next(self.model.parameters()).dtype
        return self.call(torch.randn(4, 5, generator=generator).to(dtype)).square().mean()


# Of FSDP2's options, what those of this library of the same name are.
_THEIRS: dict[str, dict[str, Any]] = {
    "reshard_after_forward": {"reshard_after_forward": False},
    "param_dtype": {"mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "reduce_dtype": {"mp_policy": fsdp.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    "output_dtype": {"mp_policy": fsdp.MixedPrecisionPolicy(output_dtype=torch.float64)},
    "offload_policy": {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)},
}


def _wrap_peer(net: nn.Module, strategy: str, name: str) -> nn.Module:
    if strategy == "DDP":
        return DistributedDataParallel(net, find_unused_parameters=True)
    mesh = init_device_mesh("cpu", (2,))
    for module in (*net.blocks, net):
        fsdp.fully_shard(module, mesh=mesh, **_THEIRS.get(name, {}))
    return net


def _has_setup(name: str, strategy: str) -> bool:
    """Return whether a library can be set up in this way."""
    if strategy not in PEERS:
        return True
    changes_model = name in {*setups.BEFORE, "to", "unmanaged module"} - setups.UNITS
    return changes_model or (strategy == "FSDP2" and name in _THEIRS)


def _end_equal(net: nn.Module) -> bool:
    own = [(name, whole_value(param).tolist()) for name, param in net.named_parameters()]
    both: list[Any] = [None, None]
    dist.all_gather_object(both, own)
    return bool(both[0] == both[1])


def whole_value(param: Any) -> Tensor:
    """Return the full value of a parameter, of whichever library."""
    whole: Tensor = param.full_tensor() if hasattr(param, "full_tensor") else param
    return whole.detach()


def _is_close(value: Tensor, expected: Tensor) -> bool:
    return torch.allclose(value, expected, rtol=1e-4, atol=1e-6)


@dataclass
class Cell:
    """What became of one difference under one strategy."""

    kind: str
    seconds: float
    texts: list[str]


def measure(name: str, strategy: str, timeout_s: int = 5) -> Cell:
    """Run one cell in fresh processes."""
    run = run_cell if name in DIFFERENCES else run_setup
    return measure_with(partial(run, name, strategy), name, timeout_s, num_ranks(strategy))


def measure_with(
    function: Callable[[str, int], None], name: str, timeout_s: int, size: int = 2
) -> Cell:
    """Run a function, of a directory and the timeout, in fresh processes."""
    directory = tempfile.mkdtemp(prefix="differences-")
    environments = [{"RANK": str(rank), "WORLD_SIZE": str(size)} for rank in range(size)]
    died: dict[int, str] = {}
    try:
        limit_s = 2 * timeout_s + 2 * SPARE_S
        run_processes(environments, _call_in, function, directory, timeout_s, timeout=limit_s)
    except RankError as error:
        died = {rank: text for rank, text in error.errors.items() if "exit status" in text}
    found = []
    for rank in range(size):
        path = Path(directory) / f"rank{rank}.json"
        if path.exists():
            found.append(json.loads(path.read_text()))
        else:
            text = died.get(rank, "no answer")
            found.append(
                {"outcome": "died" if rank in died else "hang", "seconds": 0.0, "text": text}
            )
    shutil.rmtree(directory, ignore_errors=True)
    return _judge(name, found, timeout_s + SPARE_S)


def _call_in(function: Callable[[str, int], None], directory: str, timeout_s: int) -> None:
    watch._TICK_S, watch._QUIET_S = 0.1, 0.3  # the ranks find the same, sooner
    function(directory, timeout_s)


def _judge(name: str, found: list[dict[str, Any]], limit_s: float) -> Cell:
    outcomes = [each["outcome"] for each in found]
    texts = [each["text"] for each in found]
    seconds = max(each["seconds"] for each in found)
    is_killed = name.startswith("die_") or name == "end_early"
    if is_killed:  # only the other rank can tell
        del outcomes[DEVIANT], texts[DEVIANT]
    if "died" in outcomes:
        kind = "ABORT"
    elif "hang" in outcomes or seconds > limit_s:
        kind = "HANG"
    elif set(outcomes) == {"error"}:
        is_unnamed = any("gloo/transport" in t and "rank" not in t for t in texts)
        kind = "unnamed" if is_unnamed else "error" if len(set(texts)) == 1 else "errors"
    elif "error" in outcomes:
        kind = "one error"
    else:
        kind = "right" if set(outcomes) == {"right"} else "SILENT"
    return Cell(kind, seconds, texts)


def print_table() -> None:
    """Print the table, with the texts of all errors below it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", action="append")
    parser.add_argument("--only", action="append")
    parser.add_argument("--setup", action="store_true")
    parser.add_argument("--timeout", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--table")
    args = parser.parse_args()
    ranks.GRACE_S = int(args.timeout + SPARE_S)  # type: ignore[assignment]
    strategies = args.strategy or [each.name for each in ShardingStrategy]
    known = [*setups.BEFORE, *setups.OPTIONS, *setups.AFTER] if args.setup else [*DIFFERENCES]
    names = [n for n in known if not args.only or any(part in n for part in args.only)]
    cells: dict[str, dict[str, Cell]] = {}
    for name in names:
        for strategy in strategies:
            if not (_has_setup(name, strategy) if args.setup else _has_peers(name, strategy)):
                continue
            cell = measure(name, strategy, args.timeout)
            cells.setdefault(name, {})[strategy] = cell
            sys.stdout.write(f"{name:32} {strategy:14} {cell.kind:10} {cell.seconds:5.1f} s\n")
            for rank, text in enumerate(cell.texts):
                if text:
                    sys.stdout.write(f"      rank {rank}: {text[:600]}\n")
            sys.stdout.flush()
    counts: dict[str, int] = {}
    for row in cells.values():
        for cell in row.values():
            counts[cell.kind] = counts.get(cell.kind, 0) + 1
    sys.stdout.write(f"{counts}\n")
    if args.json:
        table = {n: {s: vars(c) for s, c in row.items()} for n, row in cells.items()}
        Path(args.json).write_text(json.dumps(table))
    if args.table:
        Path(args.table).write_text(as_markdown(cells))
    ranks.shut_down_workers()


def as_markdown(cells: dict[str, dict[str, Cell]]) -> str:
    """Return the table as Markdown, with the text of each kind of error of a difference."""
    columns = list(dict.fromkeys(strategy for row in cells.values() for strategy in row))
    lines = ["| difference | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    texts = []
    for name, row in cells.items():
        found = [row.get(column) for column in columns]
        parts = ["" if each is None else f"{each.kind} {each.seconds:.1f} s" for each in found]
        lines.append(f"| {name} | {' | '.join(parts)} |")
        for strategy, cell in row.items():
            sides = {" ".join(text.split())[:240]: rank for rank, text in enumerate(cell.texts)}
            for text, rank in sides.items():
                where = f"rank {rank}" if len(sides) > 1 else "all ranks"
                if text:
                    texts.append(f"- {name}, {strategy}, {where}: {text}")
    return "\n".join([*lines, "", "## Texts", "", *texts, ""])


if __name__ == "__main__":
    from tests import differences  # by its name, under which the processes find `run_cell`

    differences.print_table()
