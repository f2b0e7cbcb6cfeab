"""Gradient clipping by the global norm."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor, nn

from composable_shard.comm import enter_setting
from composable_shard.dtensors import is_dtensor
from composable_shard.flat_param import FlatParamHandle, UnshardedParameter, handle_of
from composable_shard.optim.other_owners import OtherOwners, split_by_owners
from composable_shard.runtime import check_whole
from composable_shard.tensor import (
    FlatShard,
    Slices,
    combine,
    group_slices,
    note_write_to_local,
    total_norms,
)
from composable_shard.torch_private import (
    DisableTorchFunctionSubclass,
    bump_version,
    foreach_mul_,
    modules_of,
    parameters_of,
)


@torch.no_grad()
def clip_grad_norm_(
    model_or_params: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    groups: Sequence[OtherOwners] = (),
) -> Tensor:
    """Scale the gradients so that their norm over all parameters is at most `max_norm`.

    Exact over sharded and plain parameters together, of any granularity; the result is the same on
    all ranks. Issues one all-reduce of one element for each process group, and one all-gather of 31
    bytes if there are trainable plain parameters. Gradients of plain parameters must be the same on
    all ranks, otherwise each rank would scale its shards by another factor. Call it on every rank,
    with the same parameters; a rank may have no gradients at all.

    Other ranks may own other parameters: stages of a pipeline, experts. Their norms count too, with
    one all-reduce of one element for each group of such ranks. The groups are the axis "pp" of the
    mesh that the units' mesh is part of, and `groups`.

    Args:
        model_or_params: A module, a parameter, or parameters.
        max_norm: The largest norm allowed.
        norm_type: Order of the norm, positive; `float("inf")` for the largest absolute value.
            Gradients without elements don't count.
        error_if_nonfinite: Raise instead of clipping if the norm is not finite.
        groups: Process groups, or meshes of one axis, whose ranks own other parameters. A group
            alone means that all parameters differ between its ranks (stages). A pair `(modules or
            parameters, group)` means that only these parameters do (experts). The same on all
            ranks.

    Returns:
        The norm before clipping, a plain 0-d tensor.

    Raises:
        RuntimeError: On all ranks: if `error_if_nonfinite` and the norm is infinite or NaN; if no
            unit of the module manages one of its trainable parameters; if gradients of plain
            parameters differ between ranks; if ranks share units differently and `groups` doesn't
            say who owns others.
        ValueError: If `groups` holds something else, or `norm_type` is not positive.
    """
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"expected a positive norm_type, got {norm_type}")
    params = _params_of(model_or_params)
    owned = split_by_owners(params, groups)
    shared, _ = owned.parts[0]
    plain = _plain_params(shared)
    if plain and len(plain) < len(params):
        if isinstance(model_or_params, nn.Module):
            check_whole(model_or_params)
        _check_equal_gradients(plain, params)
    _note_call(owned.handles, max_norm, order)
    norms, grads, shards = list[Tensor](), list[Tensor](), list[FlatShard]()
    slices: Slices = defaultdict(list)
    for part, group in owned.parts:
        own_grads, own_shards = _gradients(part)
        own_slices = group_slices(own_shards)
        norm = _norm_of(total_norms(own_slices, order), own_grads, order)
        norms.append(combine(norm.to(owned.device), order, group) if group else norm)
        grads, shards = grads + own_grads, shards + own_shards
        for key, locals_ in own_slices.items():
            slices[key] += locals_
    norm = norms[0] if len(norms) == 1 else _norm_of(norms, [], order)
    if owned.overall:
        norm = combine(norm.to(owned.device), order, owned.overall)
    norm = norm.to(_dtype_of(params, grads, shards).to_real())
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is non-finite ({norm.item()}), "
            "so they can't be clipped. Nothing was changed. Pass error_if_nonfinite=False to scale "
            "them anyway."
        )
    for shard in shards:
        note_write_to_local(shard)
    bump_version((*grads, *shards))  # as autograd may have saved them
    _scale(slices, grads, max_norm, norm)
    return norm


def _note_call(handles: Iterable[FlatParamHandle], max_norm: float, order: float) -> None:
    """Make ranks that clip differently find out, also where clipping issues no collective."""
    groups = Counter(handle.shard_group.joint_groups for handle in handles)
    limit = "" if isinstance(max_norm, Tensor) else f"max_norm={max_norm}, "
    for joint, count in groups.items():
        enter_setting(
            f"clip_grad_norm_({limit}norm_type={order}) of {count} flat parameters", joint
        )


def _params_of(model_or_params: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(model_or_params, Tensor):
        return [model_or_params]
    if not isinstance(model_or_params, nn.Module):
        return list(model_or_params)
    # Takes a third of the time of parameters(); the order differs.
    found, level = {model_or_params: None}, [model_or_params]
    while level:
        children = chain.from_iterable(map(dict.values, map(modules_of, level)))
        level = [x for x in dict.fromkeys(children) if x is not None and x not in found]
        found |= dict.fromkeys(level)
    params = chain.from_iterable(map(dict.values, map(parameters_of, found)))
    return list({id(param): param for param in params if param is not None}.values())


def _plain_params(params: list[Tensor]) -> list[Tensor]:
    """Return the trainable parameters that are not sharded."""
    kinds = (FlatShard, UnshardedParameter)
    return [param for param in params if not isinstance(param, kinds) and param.requires_grad]


def _check_equal_gradients(plain: list[Tensor], params: list[Tensor]) -> None:
    """Check that the gradients of plain parameters have the same norms on all ranks.

    Raises:
        RuntimeError: On all ranks, naming the first parameter whose norms differ.
    """
    shards = [param for param in params if isinstance(param, FlatShard)]
    handles = [handle for shard in shards if (handle := handle_of(shard)) is not None]
    meshes = {handle.shard_group.joint_groups: handle.shard_group.ranks for handle in handles}
    norms = [None if p.grad is None else _norm_of([], [p.grad], 2.0).item() for p in plain]
    for ranks in meshes.values():
        all_norms = ranks.all_messages([repr(norm) for norm in norms])
        for param, *found in zip(plain, *all_norms, strict=False):
            if len(set(found)) > 1:
                raise RuntimeError(
                    f"the gradient of a plain parameter of shape {tuple(param.shape)} differs "
                    f"between ranks: its norms are {', '.join(found)}. No unit reduces it, so each "
                    "rank would clip its shards by another factor. Call fully_shard on the module "
                    "that holds the parameter (the model itself, after its layers), reduce its "
                    "gradient, or clip it by itself."
                )


def _gradients(params: list[Tensor]) -> tuple[list[Tensor], list[FlatShard]]:
    """Return plain gradients and shards, the shards' groups in the same order on all ranks."""
    with DisableTorchFunctionSubclass():  # [Note: Many getters]
        grads = [*map(attrgetter("grad"), params)]
    for index, param in enumerate(params):
        if grads[index] is None and isinstance(param, FlatShard) and _is_owned(param):
            # Its owner may have a gradient, even of a frozen parameter: take part without elements.
            grads[index] = FlatShard(param._local.new_empty(0), param._shard_spec)
    found = [grad for grad in grads if grad is not None]
    plain = [grad for grad in found if not isinstance(grad, FlatShard)]
    return plain, [grad for grad in found if isinstance(grad, FlatShard)]


def _is_owned(tensor: Tensor) -> bool:
    """Return whether a tensor is a shard of a tensor that one of several ranks owns whole."""
    if not isinstance(tensor, FlatShard):
        return False
    spec = tensor._shard_spec
    return spec.owner is not None and spec.world_size > 1


def _dtype_of(params: list[Tensor], grads: list[Tensor], shards: list[FlatShard]) -> torch.dtype:
    """Return the dtype of the norm, the same on all ranks: the gradients' promoted dtype.

    Only owners know which owned parameters have gradients. So the trainable ones count; if there
    are none, the frozen ones.
    """
    dtypes = {grad.dtype for grad in grads}
    dtypes.update(shard._local.dtype for shard in shards if not _is_owned(shard))
    if any(map(_is_owned, shards)):
        owned = [param for param in params if _is_owned(param)]
        dtypes.update(param.dtype for param in owned if param.requires_grad)
        dtypes = dtypes or {param.dtype for param in owned}
    dtypes = dtypes or {param.dtype for param in params}
    return functools.reduce(torch.promote_types, dtypes or {torch.float32})


def _norm_of(norms: list[Tensor], grads: list[Tensor], order: float) -> Tensor:
    """Return the norm of the norms and the plain gradients."""
    for grad in grads:
        if grad.numel():  # an empty tensor has no norm of order infinity
            norm = torch.linalg.vector_norm(grad, order)
            norms.append(norm.full_tensor() if is_dtensor(norm) else norm)
    if not norms:
        return torch.tensor(0.0)
    device = norms[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), order)
    return total


def _scale(slices: Slices, grads: list[Tensor], max_norm: float, norm: Tensor) -> None:
    """Multiply the gradients by `max_norm / norm` if that is less than 1."""
    # 1e-6 as torch.nn.utils has it. Clamped on the device: the host need not know the norm.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for (_, device), locals_ in slices.items():
        by_device[device] += locals_
    for grad in grads:
        if is_dtensor(grad):
            grad.mul_(factor.to(grad.device))
        else:
            by_device[grad.device].append(grad)
    # Otherwise gradients made under inference_mode raise, on ranks that hold a part.
    with torch.inference_mode():
        for device, scaled in by_device.items():
            if scaled:  # this rank may hold no element of them
                foreach_mul_(scaled, factor.to(device))
