"""Whole tensors for operations at rest that a rank can't run on its part, and what they cost.

[Note: Gathered operands]
An op on parameters at rest means what it means on whole tensors. Where the parts of the ranks do
not suffice, its operands are gathered: one all-gather for all of them that lie on the same ranks.
The whole tensors live as long as the op. All ranks must call the op, as any collective.

A gather is announced where users can see it: once for each line that calls such an op, or once for
each optimizer, with the bytes of its first step.

[Note: Kept wholes]
A result in the shape of an operand is cut, so that an optimizer may keep it as state. The steps of
a Newton-Schulz iteration read such a result at once, several times, and would gather it each time.
So inside an optimizer's step the whole result stays for the next few ops, until its shard is
written or freed. All ranks must decide alike: a whole leaves after a number of results, whatever
of them is still alive, and the ops that bump no version counter (lists, fused steps) drop all.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from composable_shard.comm import all_gather_uneven, resolve_group
from composable_shard.dtensors import is_dtensor
from composable_shard.tensor.flat_shard import FlatShard, is_trainable, whole_of
from composable_shard.tensor.operands import (
    schema_arguments,
    shards_in,
    tensors_in,
)
from composable_shard.tensor.strided_view import StridedView
from composable_shard.tensor.write_guard import RUNNING
from composable_shard.torch_private import OpOverload, is_in_step, running, schema_of


class GatherWarning(UserWarning):
    """Warns that an operation on parameters at rest gathers its operands on every rank."""


_INSIDE = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")
_warned_lines: set[tuple[str, int]] = set()


# What all ranks may ask of a parameter that one rank owns; by name, of all overloads. Any other op
# on it runs on its owner alone.
_READ = """
    sum mean nansum prod var std var_mean std_mean amax amin aminmax max min _foreach_max any all
    count_nonzero logsumexp linalg_vector_norm norm _foreach_norm argmax argmin topk sort kthvalue
    median nanmedian mode histc _unique2 equal allclose
"""
_READS = frozenset(_READ.split())


def may_gather(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an op means the same on gathered operands as on whole tensors.

    It does not for an op that changes the form of a tensor, nor for a view, to which a program may
    write: what is gathered is a copy. In a graph that reaches a parameter at rest, only reads of
    shards are gathered: a layer that is called outside its unit should raise at once and not in
    the backward. Values of one owner exist on all ranks only as parameters outside steps,
    [Note: Ranks of a reduction], and there only reads are gathered.
    """
    if torch.Tag.inplace_view in func.tags or func.is_view:
        return False
    operands = list(tensors_in((args, tuple(kwargs.values()))))
    shards = shards_in(operands)
    if all(base_of(shard)._shard_spec.holds_all for shard in shards):
        return False
    reads_shards_alone = len(shards) == len(operands) and not _writes(func)
    if torch.is_grad_enabled() and any(map(is_trainable, shards)) and not reads_shards_alone:
        return False
    if all(shard._shard_spec.owner is None for shard in shards):
        return True
    if schema_of(func).name.removeprefix("aten::") not in _READS or is_in_step():
        return False  # runs on the owner alone
    if all(shard._guard is None for shard in shards):
        check_is_on_all_ranks(func, shards[0])
    return reads_shards_alone


def check_is_on_all_ranks(func: OpOverload, shard: FlatShard) -> None:
    """Check that all ranks have a shard of a tensor: [Note: Ranks of a reduction]."""
    spec = shard._shard_spec
    if shard._guard is None:
        raise RuntimeError(
            f"{func.overloadpacket} of '{spec.label.fqn}' {tuple(spec.shape)} "
            f'(granularity="param"), of its gradient or of another tensor made of it: rank '
            f"{spec.owner} of its shard group holds it whole, and the value would be on that rank "
            "alone. Take x.to_local() there, clip_grad_norm_(model, ...) for the norm of all "
            "gradients, or p.full_tensor() on all ranks. Initialise with trunc_normal_ inside "
            "unshard_params, or before fully_shard."
        )


_WRAPPERS = {
    "DistributedDataParallel": ("torch.nn.parallel.distributed", "__init__"),
    "torch's fully_shard": (
        "torch.distributed.fsdp._fully_shard._fsdp_param",
        "_init_sharded_param",
    ),
}


def refuse_wrappers(shards: Sequence[FlatShard]) -> None:
    """Raise inside what would take shards for replicas, or shard them again."""
    for name, (module, function) in _WRAPPERS.items():
        if any(running(module, function)):
            raise RuntimeError(
                f"{name} got the sharded parameter '{shards[0]._shard_spec.label.fqn}'. A sharded "
                f"model needs no {name} around it: its own backward reduces the gradients."
            )


def _writes(func: OpOverload) -> bool:
    return any(argument.is_write for argument in schema_arguments(func))


def base_of(shard: FlatShard) -> FlatShard:
    """Return the shard that holds the values of a shard or of a view."""
    return shard.base if isinstance(shard, StridedView) else shard


def view_of_whole(shard: FlatShard, whole: Tensor) -> Tensor:
    """Return what a shard is of the whole tensor of its base; it shares memory."""
    return shard.of_whole(whole) if isinstance(shard, StridedView) else whole


def gather_bases(func: OpOverload, shards: Sequence[FlatShard]) -> dict[int, Tensor]:
    """Gather the tensors that an op needs, and announce it; a collective, for all ranks.

    What is kept of earlier ops is not gathered again, [Note: Kept wholes].

    Returns:
        The whole tensor of each base, by the base's `id`. One that this rank holds whole shares
        memory with it; the others are copies.

    Raises:
        RuntimeError: If the model refuses gathers at rest. Nothing is sent then.
    """
    refuse_wrappers(shards)
    bases = {id(base): base for base in map(base_of, shards)}
    firsts: dict[Any, FlatShard] = {}
    same = {key: firsts.setdefault(_elements_of(base), base) for key, base in bases.items()}
    distinct = {key: base for key, base in bases.items() if same[key] is base}
    kept = RUNNING.wholes.of(distinct) if RUNNING.wholes else {}
    distinct = {key: base for key, base in distinct.items() if key not in kept}
    _announce(func, [base for base in distinct.values() if base._shard_spec.world_size > 1])
    wholes = kept | _gather_distinct(distinct)
    for key, base in bases.items():
        if key not in wholes:
            first, spec = wholes[id(same[key])], base._shard_spec
            wholes[key] = first.as_strided(spec.dense_shape, spec.dense_stride)
    return wholes


def _elements_of(base: FlatShard) -> Any:
    """Return what tells the elements of parameters apart, equally on all ranks."""
    if base._shard_spec.tensor_parallel is not None:
        return id(base)
    return id(base._local)  # aliases and transposes share the object, and nothing else does


def _gather_distinct(bases: dict[int, FlatShard]) -> dict[int, Tensor]:
    wholes: dict[int, Tensor] = {}
    together: dict[tuple[str, torch.device], list[FlatShard]] = defaultdict(list)
    for key, base in bases.items():
        spec, local = base._shard_spec, base._local
        if spec.is_alone:
            wholes[key] = _as_plain(whole_of(base))
        elif spec.world_size == 1 or spec.owner is not None or local.is_meta:
            wholes[key] = base.gathered()
        else:
            together[spec.group_name, local.device].append(base)
    for group in together.values():
        found = [group[0].gathered()] if len(group) == 1 else _gather_together(group)
        wholes.update((id(base), whole) for base, whole in zip(group, found, strict=True))
    return wholes


def _as_plain(logical: Tensor) -> Tensor:
    return logical.full_tensor().contiguous() if is_dtensor(logical) else logical


def _gather_together(shards: Sequence[FlatShard]) -> list[Tensor]:
    """Gather shards on the same ranks in one message."""
    specs = [shard._shard_spec for shard in shards]
    sent = [shard._local.contiguous().view(torch.uint8) for shard in shards]
    nbytes = [
        [numel * shard.element_size() for numel in spec.numels]
        for shard, spec in zip(shards, specs, strict=True)
    ]
    group = resolve_group(specs[0].group_name)
    names = ", ".join(f"'{spec.label.fqn}'" for spec in specs[:4])
    totals = [sum(column) for column in zip(*nbytes, strict=True)]
    received = all_gather_uneven(torch.cat(sent), totals, group, what=f"whole values of {names}")
    pieces = received.split([rows[rank] for rank in range(group.size()) for rows in nbytes])
    wholes = []
    for index, (shard, spec) in enumerate(zip(shards, specs, strict=True)):
        # `cat` copies into memory of its own, which is aligned for the dtype.
        flat = torch.cat(pieces[index :: len(shards)]).view(shard.dtype)
        wholes.append(_as_plain(spec.unflatten(spec.arrange(flat))))
    return wholes


def _announce(func: OpOverload, shards: Sequence[FlatShard]) -> None:
    nbytes = sum(shard.numel() * shard.element_size() for shard in shards)
    for shard in shards:
        label = shard._shard_spec.label
        if label.refuses_gathers:
            raise RuntimeError(
                f"{func.overloadpacket} of '{label}' {tuple(shard.shape)} would gather {nbytes:,} "
                "bytes, and set_gathers_at_rest(module, False) refuses gathers at rest. Run it "
                "inside unshard_params(module)."
            )
    if not nbytes:
        return
    if RUNNING.steps:  # announced when the step ends, with all that it has gathered
        RUNNING.add_gathered(nbytes)
        return
    line = _calling_line()
    if line not in _warned_lines:
        names = ", ".join(f"'{shard._shard_spec.label}'" for shard in shards[:4])
        warnings.warn_explicit(
            f"{func.overloadpacket} on parameters at rest gathers {names} on every rank, "
            f"{nbytes:,} bytes each time. Elementwise operations, sums and norms run on shards; "
            "inside unshard_params(module) several operations share one gather. See "
            "docs/shard_operations.md.",
            GatherWarning,
            *line,
        )
        _warned_lines.add(line)


_steps: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()


def announce_step(optimizer: Optimizer) -> None:
    """Warn of what a step has gathered, once for each optimizer, and note it."""
    is_new = optimizer not in _steps
    _steps[optimizer] = nbytes, _ = RUNNING.pop_gathered()
    if is_new:
        warnings.warn(
            f"{type(optimizer).__name__}.step() runs operations that need whole tensors: each step "
            f"gathers {nbytes:,} bytes of parameters, gradients or state on every rank. "
            "docs/optimizers.md says which optimizers need none.",
            GatherWarning,
            stacklevel=4,
        )


def gathered_in_step(optimizer: Optimizer) -> tuple[int, int]:
    """Return how many bytes the last step that gathered has gathered, for how many operations."""
    return _steps.get(optimizer, (0, 0))


def _calling_line() -> tuple[str, int]:
    """Return file and line of the innermost function that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
