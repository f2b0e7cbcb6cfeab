"""Rules for lists of gradients: global norms, scaling, finite checks.

[Note: Writes by owners]
An optimizer steps a parameter of granularity "param" on its owner alone; the other ranks have no
gradient of it and don't see the write. But all ranks must decide in the same way whether full
values gathered before are still valid. So on every rank a step of an optimizer counts as a write to
all owned parameters in its groups. Full values that outlive a backward that reduced gradients are
gathered again, as the user may step by hand. Any other write by hand must happen on all ranks: an
in-place op on the empty shard counts.

[Note: Steps of optimizers]
Guards count steps apart from edits, so that the ranks can compare both; whose write it is only a
hook on every optimizer of the process can say. There are two while any model lives, for a step of
any number of parameters.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from composable_shard.comm import all_reduce, resolve_group
from composable_shard.tensor import dim_reductions
from composable_shard.tensor.flat_shard import FlatShard
from composable_shard.tensor.gathering import announce_step
from composable_shard.tensor.operands import describe_operands, note_write, unsupported
from composable_shard.tensor.owned_numbers import end_numbers
from composable_shard.tensor.reduction_rules import (
    HALF,
    combine,
    is_inexact,
    option,
    reduction_groups,
    shard_of,
    wide,
)
from composable_shard.tensor.rule_table import Rule
from composable_shard.tensor.write_guard import COMPARED, RUNNING
from composable_shard.torch_private import (
    DisableTorchFunctionSubclass,
    OpOverload,
    foreach_norm,
)


class _StepHooks:
    """The hooks on the steps of all optimizers, while any handle lives."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self.trees: Iterable[Any] = ()  # until `check_steps`
        self.waits: Callable[[Any], Any] = bool
        self.check: Callable[[Optimizer], Any] = bool
        self.num_handles = self.num_owned = 0

    def keep_for(self, handle: object, *, has_owned: bool) -> None:
        """Keep the hooks for as long as a handle lives, which may have owned parameters."""
        if not self._hooks:
            self._hooks.append(register_optimizer_step_pre_hook(_begin_step))
            self._hooks.append(register_optimizer_step_post_hook(_end_step))
        self.num_handles += 1
        self.num_owned += has_owned
        weakref.finalize(handle, self._release, has_owned).atexit = False

    def check_steps(
        self, trees: Iterable[Any], waits: Callable[[Any], Any], check: Callable[[Optimizer], None]
    ) -> None:
        """Run a check before each step, if outputs of a tree wait for a backward.

        Also after a step that may have run a closure.
        """
        self.trees, self.waits, self.check = trees, waits, check

    def _release(self, has_owned: bool) -> None:
        self.num_handles -= 1
        self.num_owned -= has_owned
        while self._hooks and not self.num_handles:
            self._hooks.pop().remove()


step_hooks = _StepHooks()


class NeverStepped:
    """A full parameter, which gets no gradient."""

    __slots__ = ()
    shard_label: object


def _begin_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(map(step_hooks.waits, step_hooks.trees)):  # no function of Python runs for it
        step_hooks.check(optimizer)
    reference, outer = weakref.ref(optimizer), RUNNING.steps
    hash(reference)  # kept by it: a step that failed may be the last of its optimizer
    while outer and outer[-1][1] != COMPARED.number:
        outer = outer[:-1]
    if not outer and RUNNING.gathered_nbytes:
        RUNNING.pop_gathered()  # a step that failed may have left some
        RUNNING.wholes.drop()
    if RUNNING.numbers and not outer:  # of a step that failed
        end_numbers()
    RUNNING.steps = (*outer, (reference, COMPARED.number))
    _note_owned_writes(optimizer)


def _end_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if step_hooks.num_owned:
        _note_owned_writes(optimizer)
    if RUNNING.gathered_nbytes:
        announce_step(optimizer)
        RUNNING.wholes.drop()
    if RUNNING.numbers:
        end_numbers()
    RUNNING.steps = RUNNING.steps[:-1]
    if (len(args) > 1 or kwargs) and any(map(step_hooks.waits, step_hooks.trees)):
        step_hooks.check(optimizer)


def _note_owned_writes(optimizer: Optimizer) -> None:
    """Count a step as a write, [Note: Writes by owners]; before it, and after its closure ran."""
    noted = None
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not isinstance(param, FlatShard) or param._guard is None:
                if isinstance(param, NeverStepped):
                    raise RuntimeError(
                        f"an optimizer is built of the full parameter '{param.shard_label}', which "
                        "gets no gradient to step with. Build it of model.parameters() before "
                        "unshard(module) or after reshard(module)."
                    )
                continue
            spec, guard = param._shard_spec, param._guard
            if guard is not noted and spec.owner is not None and spec.world_size > 1:
                note_write(param)
                noted = guard


aten = torch.ops.aten


def _norm(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    shard = shard_of(func, args)
    name = "ord" if func is aten.linalg_vector_norm.default else "p"
    order = option(func, args, kwargs, name)
    order = 2.0 if order is None else float(order)
    if order <= 0:
        raise unsupported(func, args)  # can't be computed from the slices' norms: gathered
    if option(func, args, kwargs, "dim") or option(func, args, kwargs, "keepdim"):
        return dim_reductions.norm(func, args, kwargs, order)
    dtype, local = kwargs.get("dtype") or shard.dtype.to_real(), shard._local
    if not is_inexact(shard.dtype) or not shard.numel():
        return norms_of([shard], order, dtype)[0]  # torch knows what these are
    # The rest is `norms_of` of one shard without its lists, which cost more than the norm.
    if local.numel():
        own = torch.linalg.vector_norm(local, order, dtype=wide(local.dtype))
    else:
        own = torch.zeros((), dtype=torch.float64, device=local.device)
    return combine(own, order, reduction_groups(shard._shard_spec)).to(dtype)


class WholeNorm(Tensor):
    """A norm with DTensor's `full_tensor()`, also after what `clip_grad_norm_` of torch does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run on plain tensors."""
        with DisableTorchFunctionSubclass():
            plain = [arg.as_subclass(Tensor) if isinstance(arg, cls) else arg for arg in args]
            result = func(*plain, **(kwargs or {}))
            return result.as_subclass(cls) if func in _KEEP_NORMS else result

    def full_tensor(self) -> Tensor:
        """Return a plain tensor; no communication."""
        return self.as_subclass(Tensor)


_KEEP_NORMS = frozenset({Tensor.to, torch.stack, torch.linalg.vector_norm})


def _foreach_norm(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    order = float(option(func, args, kwargs, "ord"))
    dtype = option(func, args, kwargs, "dtype")
    shards = [item for item in args[0] if isinstance(item, FlatShard)]
    if order <= 0:
        raise unsupported(func, args)
    _check_all_ranks_have_them(
        shards,
        "torch takes the norms of",
        "Clip gradients with composable_shard.clip_grad_norm_ in place of torch.nn.utils'; take "
        "norms of other tensors one by one, x.norm(), or of x.to_local() on its owner.",
    )
    norms = norms_of(shards, order, dtype)
    norms[0] = norms[0].as_subclass(WholeNorm)
    found = iter(norms)
    return [
        next(found)
        if isinstance(item, FlatShard)
        else torch.linalg.vector_norm(item, order, dtype=dtype)
        for item in args[0]
    ]


def _check_all_ranks_have_them(shards: Iterable[FlatShard], what: str, remedy: str) -> None:
    """Check that all ranks can pass the same list of gradients; all that have one of it raise."""
    for shard in shards:
        if shard._shard_spec.label.is_among_owned:
            raise RuntimeError(
                f"{what} a list of tensors on all ranks together, and parameters of the model of "
                f"'{shard._shard_spec.label}' have granularity=\"param\": the gradient of each is "
                f"on one rank alone. {remedy}"
            )


def norms_of(
    shards: Sequence[FlatShard], order: float, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return each shard's norm; issues one collective for all shards with the same groups.

    It is collective also for parameters that one rank owns: the others pass their empty shards.
    """
    norms: list[Tensor | None] = [None] * len(shards)
    _check_inexact(shards, {shard.dtype for shard in shards})
    by_groups: dict[tuple[tuple[str, ...], torch.device], list[int]] = defaultdict(list)
    for index, shard in enumerate(shards):
        if shard.numel() == 0:  # torch knows which orders an empty tensor has
            empty = torch.empty(shard.shape, dtype=shard.dtype, device=shard._local.device)
            norms[index] = torch.linalg.vector_norm(empty, order, dtype=dtype)
        else:
            key = reduction_groups(shard._shard_spec), shard._local.device
            by_groups[key].append(index)
    for (groups, _), indices in by_groups.items():
        found = _combined_norms([shards[i]._local for i in indices], order, groups)
        for index, norm in zip(indices, found, strict=True):
            norms[index] = norm.to(dtype or shards[index].dtype.to_real())
    return [norm for norm in norms if norm is not None]


Slices = dict[tuple[tuple[str, ...], torch.device], list[Tensor]]


def group_slices(shards: Sequence[FlatShard]) -> Slices:
    """Return the slices by the groups that together hold their tensors, and by device.

    Empty slices are left out, but their groups are not: all ranks return the same ones.
    """
    _check_inexact(shards, {shard._local.dtype for shard in shards})
    slices: Slices = defaultdict(list)
    for shard in shards:
        local = shard._local
        locals_ = slices[reduction_groups(shard._shard_spec), local.device]
        if local.numel():
            locals_.append(local)
    return slices


def _check_inexact(shards: Sequence[FlatShard], dtypes: Iterable[torch.dtype]) -> None:
    """Check on all ranks that shards of these dtypes have norms.

    Torch would raise only on ranks with non-empty slices, and the other ranks would wait.
    """
    if not all(map(is_inexact, dtypes)):
        raise RuntimeError(f"norms need floating-point tensors, got {describe_operands(shards)}")


def total_norms(slices: Slices, order: float) -> list[Tensor]:
    """Return a norm for each choice of groups; the norm of these norms is the total norm.

    Issues one collective of one element for each choice of groups, in float64.

    Args:
        slices: Slices of the same parameters on every rank; for parameters that one rank owns, the
            others pass empty shards to `group_slices`.
        order: More than 0; other norms can't be computed from partial norms.
    """
    found = []
    for (groups, device), locals_ in slices.items():
        norms = _local_norms(locals_, order)
        values = torch.stack(norms) if norms else torch.zeros(1, device=device)
        found.append(combine(torch.linalg.vector_norm(values.double(), order), order, groups))
    return found


def _combined_norms(locals_: list[Tensor], order: float, groups: tuple[str, ...]) -> list[Tensor]:
    device, norms = locals_[0].device, iter(_local_norms(locals_, order))
    # An empty slice has norm 0, written by the device so that the host does not wait.
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    values = torch.stack([next(norms).to(nothing) if x.numel() else nothing for x in locals_])
    return list(combine(values, order, groups).unbind())


def _local_norms(locals_: list[Tensor], order: float) -> list[Tensor]:
    """Return the norms of the slices that are not empty, in order."""
    filled = [local for local in locals_ if local.numel()]
    if any(local.dtype in HALF for local in filled):
        return [torch.linalg.vector_norm(local, order, dtype=wide(local.dtype)) for local in filled]
    return list(foreach_norm(filled, order)) if filled else []


def _unscale(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients for GradScaler; all ranks learn whether any of them found an inf or NaN."""
    grads, found_inf, inverse_scale = args
    shards = [grad for grad in grads if isinstance(grad, FlatShard)]
    _check_all_ranks_have_them(
        shards,
        "torch's GradScaler looks for infs and NaNs in",
        "Use composable_shard.ShardedGradScaler in its place.",
    )
    for shard in shards:
        note_write(shard)
    locals_ = [grad._local if isinstance(grad, FlatShard) else grad for grad in grads]
    func(locals_, found_inf, inverse_scale)
    names = {name: None for shard in shards for name in reduction_groups(shard._shard_spec)}
    for name in names:
        all_reduce(found_inf, resolve_group(name), dist.ReduceOp.MAX).wait()


RULES: dict[OpOverload, Rule] = {
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dtype: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten.norm.ScalarOpt_dim_dtype: _norm,
    aten.linalg_vector_norm.default: _norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
