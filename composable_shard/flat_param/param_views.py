"""The parameters of a flat parameter as views of its buffers: built, rebuilt, and looked after."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable_shard.comm import HOST
from composable_shard.flat_param.entries import (
    FlatEntry,
    alias_of,
    flat_spec,
    is_repointed,
    make_unsharded,
    set_requires_grad,
)
from composable_shard.flat_param.flat_storage import Buffers
from composable_shard.flat_param.gradient import FlatGradient
from composable_shard.flat_param.host_gradient import HostGradient
from composable_shard.flat_param.registration import ParamEntry
from composable_shard.flat_param.shard_access import ShardAccess
from composable_shard.flat_param.storage import alloc_storage, free_storage, take_place
from composable_shard.layout import FlatLayout
from composable_shard.tensor import FlatShard, FlatShardOfDTensor, ShardSpec

__all__ = ["GradientHook", "ParamViews"]


GradientHook = Callable[["ParamViews", int], None]


class ParamViews(ShardAccess):
    """The sharded and the unsharded parameters of a handle, kept in step with its buffers."""

    is_attached: bool  # the unsharded parameters and their hooks exist
    requires_grad: bool
    written_back: int  # guard.num_writes after the last writeback by hand
    is_unsynced: bool  # gradients of earlier microbatches wait for a reduction
    _on_gradient: GradientHook | None

    def attach(self, on_gradient: GradientHook) -> None:
        """Build the unsharded parameters and their hooks; the entries' slots are final now.

        Args:
            on_gradient: Called as `on_gradient(handle, index)` when the full gradient of a
                parameter has been accumulated, in the thread that runs the backward.
        """
        self._on_gradient, self.is_attached = on_gradient, True
        # Inference tensors could never be trained, whatever context the first call runs in.
        with torch.inference_mode(False), torch.no_grad():
            self._build_unsharded_params()

    def _build_unsharded_params(self) -> None:
        buffers = self._buffers
        if buffers.local_shard.is_meta:
            return
        alloc_storage(buffers.unsharded)  # views of a storage without memory can't be made
        for index, entry in enumerate(self.entries):
            entry.unsharded = make_unsharded(self._view_unsharded(index), self.requires_grad)
            # What a forward asks of a parameter: how tensor parallelism split it, for example.
            for name, value in entry.sharded.user_attributes().items():
                entry.unsharded.__dict__.setdefault(name, value)
            entry.runs_hooks = False
            if self.requires_grad:
                self._hook_gradient(index, entry.unsharded)
        self.index_slots()
        views = [alias_of(param) for param in self.unsharded_params]
        self._watched = [
            param if isinstance(param, DTensor) else view
            for param, view in zip(self.unsharded_params, views, strict=True)
        ]
        self._versions = [param._version for param in self.unsharded_params]
        if not self.is_kept:
            # Before the gradients' own buffer is made: no more than one is there at a time.
            free_storage(buffers.unsharded)
            self.gathered_writes = -1
        if self.requires_grad:
            main_dtype = buffers.local_shard.dtype
            reduce_dtype = self.precision.reduces_in(main_dtype)
            specs = [entry.spec for entry in self.entries]
            self.grad.bind(specs, buffers.gather_output, views, reduce_dtype, main_dtype)

    def _view_unsharded(self, index: int) -> Tensor:
        """Return a parameter's part of the unsharded buffer in its shape."""
        start = self.layout.offsets[index]
        # [Note: Storage and autograd]: .data gives each parameter its own version counter.
        flat = self.unsharded.data[start : start + self.layout.numels[index]]
        return self.entries[index].spec.unflatten(flat)

    def _hook_gradient(self, index: int, unsharded: nn.Parameter) -> None:
        # Weak: the leaf holds its hooks where the garbage collector cannot see them, and the
        # handle holds the leaf; one strong reference would leak the unit for ever.
        handle_ref = weakref.ref(self)

        def arrive(index: int) -> None:
            handle = handle_ref()
            if handle is not None:
                handle._on_gradient(handle, index)  # type: ignore[misc]

        hook = partial(self.grad.small.receive, index, arrive)
        unsharded.register_post_accumulate_grad_hook(hook)

    def adopt_changes(self) -> None:
        """Take over what was done to the sharded parameters: `.to()`, `requires_grad_()`.

        Identity says nothing of the former: it gives the Parameter object other data. The new
        slices are copied into a new flat shard, which the parameters become views of again.

        Raises:
            RuntimeError: If the parameters now differ in dtype or device.
        """
        for shown in self.shown_at_rest:
            if shown.sharded._local is not shown.shard_view:
                self._rebuild()
                return
        if self.guard.has_new_attributes and self.is_attached:
            self._adopt_requires_grad()
            self.adopt_hooks()
            self.guard.has_new_attributes = False

    def _adopt_requires_grad(self) -> None:
        shown = self.shown_at_rest
        self.requires_grad = any(each.sharded.requires_grad for each in shown)
        hidden = [*self.entries] if self.shows_flat else [] if self.flat is None else [self.flat]
        for each in hidden:
            set_requires_grad(each.sharded, self.requires_grad)
        if self.requires_grad and not self.grad.is_bound:
            # They were frozen when the full parameters were built.
            self.register_sharded()
            with torch.inference_mode(False), torch.no_grad():
                self._build_unsharded_params()
        if self.grad.is_persistent and not self.requires_grad and not self.is_unsynced:
            self.grad.release()
        for entry in self.entries:
            if entry.unsharded is not None:
                entry.unsharded.requires_grad_(entry.sharded.requires_grad)

    def _rebuild(self) -> None:
        shown = self.shown_at_rest
        kinds = {(each.sharded._local.dtype, each.sharded._local.device) for each in shown}
        if len(kinds) > 1:
            detail = ", ".join(
                f"'{each.label}': {each.sharded._local.dtype} on {each.sharded._local.device}"
                for each in shown
            )
            raise RuntimeError(
                "expected the parameters of one unit that were sharded together to change dtype "
                f"and device together, got {detail}. Convert the whole unit."
            )
        self._check_host(shown[0])
        # No reference to a slice: each is freed as soon as it has been copied.
        dtype, main_dtype = shown[0].sharded.dtype, self.precision.main_dtype
        if main_dtype is not None and dtype != main_dtype:
            raise RuntimeError(
                f"the parameters of unit '{self.name}' were converted to {dtype}, and its "
                f"MixedPrecisionPolicy says main_dtype={main_dtype}. Convert them back, or shard "
                "with another policy; to compute in another dtype, use param_dtype."
            )
        with torch.inference_mode(False), torch.no_grad():
            self._take_slices()
            if self.is_attached:
                self._build_unsharded_params()
        self.guard.has_new_attributes = True

    def _check_host(self, shown: ParamEntry | FlatEntry) -> None:
        device = shown.sharded._local.device
        if self.offload.is_active and device.type not in (HOST.type, "meta"):
            raise RuntimeError(
                f"expected parameter '{shown.label}' of unit '{self.name}' on the CPU, where its "
                f"OffloadPolicy keeps it, got {device}, as after model.to(device). Call "
                "model.cpu(), or model.to_empty(device='cpu') for a model from the meta device; "
                "the unit computes on its mesh's device all the same."
            )

    def check_pinned(self) -> None:
        """Check that an offloaded shard is in the memory that it was given.

        Raises:
            RuntimeError: If it should be pinned and is not, naming a parameter.
        """
        shard = self.local_shard
        if self.is_pinned and not shard.is_meta and not shard.is_pinned():
            raise RuntimeError(
                f"expected the shard of parameter '{self.name}' in pinned memory, and it is not, "
                "as after share_memory(). Pass OffloadPolicy(pin_memory=False) to leave it so."
            )

    def _take_slices(self) -> None:
        """Copy the parameters shown at rest into a new flat shard; all become views of it."""
        shown = self.shown_at_rest
        local = shown[0].sharded._local
        self._buffers = self._make_buffers(local.dtype, local.device)
        for each in shown:
            self.slice_of(each, self.local_shard).copy_(each.sharded._local)
        # A flat parameter that to_empty() made has anything between the parameters.
        self.zero_gaps(self.local_shard)
        everything: Sequence[ParamEntry | FlatEntry] = self.entries
        for each in everything if self.flat is None else [*everything, self.flat]:
            each.shard_view = self.slice_of(each, self.local_shard)
            each.sharded._guard = self.guard
            if each.sharded.dtype != local.dtype or each.sharded.device != local.device:
                self._remake(each)
            each.sharded._local = each.shard_view
        self.gathered_writes = -1  # the other ranks' parts are not there

    def _remake(self, entry: ParamEntry | FlatEntry) -> None:
        """Make a parameter what its entry says: of another dtype, or another shape."""
        param = entry.sharded
        shown_class = FlatShardOfDTensor if isinstance(param, FlatShardOfDTensor) else FlatShard
        old_class, flag = type(param), param.requires_grad
        shard = shown_class(cast(Tensor, entry.shard_view), entry.spec, guard=self.guard)
        take_place(cast(nn.Parameter, param), nn.Parameter(shard, flag))
        param.__class__ = old_class

    def change_owners(self, owners: Sequence[int]) -> None:
        """Give parameters that are owned whole to other ranks, with their values.

        Before `attach`, while no parameter has a gradient. One all-gather of the main values, none
        on the meta device. The Parameter objects stay the same; if the allocation or the collective
        fails, the handle is as before.

        Args:
            owners: A rank for each entry.
        """
        with torch.inference_mode(False), torch.no_grad():
            self.adopt_changes()
            order = sorted(range(len(owners)), key=lambda index: owners[index])
            old = self.layout
            layout = FlatLayout.plan(
                [old.numels[index] for index in order],
                old.world_size,
                old.alignment,
                owners=[owners[index] for index in order],
            )
            # All memory before the collective: nothing fails after it.
            full = None if self.local_shard.is_meta else self.new_full()
            buffers, host_grad = self._buffers_for(layout)
            if full is not None:
                work = self.gather_into(full, self.local_shard, to_first=False)
                assert work is not None
                work.wait()
            self.layout, self._buffers, self.host_grad = layout, buffers, host_grad
            self._reorder_entries(order)
            if full is not None:
                for index, entry in zip(order, self.entries, strict=True):
                    start, end = old.offsets[index], old.offsets[index] + old.numels[index]
                    if entry.spec.owner == self.shard_group.rank:
                        self.slice_of(entry, self.local_shard).copy_(full[start:end])

    def _buffers_for(self, layout: FlatLayout) -> tuple[Buffers, HostGradient | None]:
        """Make the buffers that another layout needs; the handle keeps its own."""
        old, shard = (self.layout, self.host_grad), self.local_shard
        self.layout = layout
        try:
            return self._make_buffers(shard.dtype, shard.device), self.host_grad
        finally:
            self.layout, self.host_grad = old

    def _reorder_entries(self, order: Sequence[int]) -> None:
        """Bring the entries in the order of a new layout; they become views of its shard."""
        layout = self.layout
        self.entries = [self.entries[index] for index in order]
        for index, entry in enumerate(self.entries):
            entry.spec = replace(entry.spec, layout=layout, index=index)
            entry.shard_view = self.slice_of(entry, self.local_shard)
            entry.sharded._shard_spec, entry.sharded._local = entry.spec, entry.shard_view
        flat = self.flat
        if flat is not None:
            specs = [entry.spec for entry in self.entries]
            spec = flat_spec(specs, layout, self.shard_group, flat.label.fqn)
            flat.spec = replace(spec, label=flat.label)
            flat.used = [flat.used[index] for index in order]
            flat.shard_view = self.slice_of(flat, self.local_shard)
            self._remake(flat)  # its shape may be another one
        grad = self.grad
        self.grad = FlatGradient(
            layout, self.shard_group, grad.name, is_persistent=grad.is_persistent
        )
        self.grad.reduction.take_options(grad.reduction)
        self.gathered_writes = -1
        self.index_slots()

    def slice_of(self, entry: ParamEntry | FlatEntry, shard: Tensor) -> Tensor:
        """Return a parameter's part of a tensor of shape `(layout.shard_numel,)`, a view."""
        return self.slice_at(entry.spec, shard)

    def slice_at(self, spec: ShardSpec, shard: Tensor) -> Tensor:
        """Return the part of a shard that belongs to a parameter with this spec, a view."""
        rank = self.shard_group.rank
        if spec.index is None:
            start, end = spec.local_range
            return shard[: end - start]
        start, end = self.layout.local_range(spec.index, rank)
        return shard[start:end]

    # What was done to the full values

    def edited(self) -> list[str]:
        """Return the names of unsharded parameters that were edited since they were gathered.

        By version counters: an edit through an alias, `param.data.add_(1)`, leaves no trace.
        """
        if self._has_new_versions:
            return []  # a backward wrote gradients in their place
        names = [
            str(entry.label)
            for entry, version in zip(self.entries, self._versions, strict=False)
            if (param := entry.unsharded) is not None
            and (param._version != version or is_repointed(param))
        ]
        flat = self.unsharded_flat
        if flat is not None and self.flat is not None:
            known = vars(flat).get("_known_version", 0)
            if flat._version != known or flat.data_ptr() != self.unsharded.data_ptr():
                names.append(str(self.flat.label))
        return names

    def warn_of_edits(self, where: str) -> None:
        """Warn of edits that are about to be lost, once."""
        versions = [tensor._version for tensor in self._watched]
        names = (
            self.edited() if versions != self._versions or self.unsharded_flat is not None else []
        )
        if not names:
            return
        are_lost = not self.is_kept or self.is_apart
        for index, entry in enumerate(self.entries):
            if entry.unsharded is not None and is_repointed(entry.unsharded):
                self._point_back(index, entry.unsharded)
                are_lost = True
        self.forget_edits()
        outcome = (
            "are lost: the full values are freed without being written back"
            if are_lost
            else "stay only because the full values are never freed here: elsewhere they are lost"
        )
        warnings.warn(
            f"the edits of {names} {where} {outcome}. Edit parameters inside "
            "unshard_params(module), or call writeback(module) before reshard(module).",
            stacklevel=2,
        )

    def forget_edits(self) -> None:
        """Take the values as they are now for those that were gathered."""
        self._versions = [param._version for param in self.unsharded_params]
        if self.unsharded_flat is not None:
            vars(self.unsharded_flat)["_known_version"] = self.unsharded_flat._version

    def _point_back(self, index: int, param: nn.Parameter) -> None:
        """Make a parameter that got other data a view of the buffer again: gathers go there."""
        if self.unsharded.untyped_storage().size() == 0:
            return
        param.data = self._view_unsharded(index)
        param.is_repointed = False  # type: ignore[attr-defined]

    def check_not_repointed(self) -> None:
        """Check that the unsharded parameters still are views of the unsharded buffer.

        Raises:
            RuntimeError: Naming the parameter that was given other data.
        """
        if self._buffers.local_shard.is_meta or self.unsharded.untyped_storage().size() == 0:
            return
        start = self.unsharded.data_ptr()
        for index, entry in enumerate(self.entries):
            address = start + self.layout.offsets[index] * self.unsharded.element_size()
            param = entry.unsharded
            if param is not None and param.numel() and alias_of(param).data_ptr() != address:
                raise RuntimeError(
                    f"parameter '{entry.label}' was given other data (`param.data = ...`) while "
                    "its full values are shown. Write into it instead, for example "
                    "`param.copy_(value)` under torch.no_grad()."
                )
