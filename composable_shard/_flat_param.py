"""`FlatParamHandle`: sole owner of one flat parameter's storage.

[Note: Storage and autograd]
The unsharded buffer and the reduce buffer are allocated once and keep their identity; only their
storages are resized, to nothing and back. Views of them therefore stay valid: the unsharded
parameters that modules compute with, what autograd saved of them in forward, and the views that
gradients are packed into. Each unsharded parameter is built on its own `.data` alias, and
collectives write through another: an alias has its own version counter, so refilling the buffer
for backward does not look like an in-place change of what forward saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from composable_shard import _collectives, _trace
from composable_shard._collectives import Waitable
from composable_shard._flat_grad import FlatGradient, Streams, local_gradient
from composable_shard._flat_shard import FlatShard, FlatShardOfDTensor
from composable_shard._layout import FlatLayout
from composable_shard._mesh import ShardGroup
from composable_shard._shard_spec import ParamLabel, ShardSpec, WriteGuard
from composable_shard._storage import Slot, alloc_storage, free_storage, restore_versions
from composable_shard._unsharded_param import alias_of, make_unsharded

__all__ = ["FlatParamHandle", "GradientHook", "ParamEntry"]

_ALIGNMENT_NBYTES = 16

GradientHook = Callable[["FlatParamHandle", int], None]


@dataclass
class ParamEntry:
    """One managed parameter: the object users hold, and the one modules compute with."""

    sharded: FlatShard  # the original Parameter object
    label: ParamLabel
    slots: list[Slot]  # every place that shows it; several where modules are tied
    spec: ShardSpec
    # spec.shape, a view of the unsharded buffer; printing it without storage would crash
    unsharded: nn.Parameter | None = field(default=None, repr=False)
    shard_view: Tensor | None = None  # (spec's local numel,) view of the local shard
    runs_hooks: bool = False  # `unsharded` runs the hooks that users registered on `sharded`


@dataclass
class _Buffers:
    """Everything that depends on dtype and device: made anew when `.to()` changes either."""

    local_shard: Tensor  # (shard_numel,)
    unsharded: Tensor  # (padded_numel,), storage size 0 unless unsharded
    gather_output: Tensor  # alias of `unsharded` with a version counter of its own


class FlatParamHandle:
    """One flat parameter: parameters of a unit that share dtype, requires_grad and mesh.

    At rest it holds this rank's shard. `unshard` gathers the full values into one buffer,
    `reshard` frees them; `register_unsharded` and `register_sharded` decide which of the two forms
    the modules show. Gradients are packed one by one into the reduce buffer and reduced together.

    Attributes:
        layout: Where each parameter lies, and who owns what.
        shard_group: The ranks that share the flat parameter.
        entries: The managed parameters, in order.
        requires_grad: Whether any of the parameters is trainable.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        labels: Sequence[ParamLabel],
        shard_group: ShardGroup,
        specs: Callable[[FlatLayout], list[ShardSpec]],
        *,
        requires_grad: bool,
    ) -> None:
        """Allocate the shard and copy this rank's part of `params` into it; changes no module.

        Args:
            params: Dense tensors (local tensors of DTensors), one dtype, one device.
            labels: Names for messages, one for each parameter.
            shard_group: The ranks that share the flat parameter.
            specs: Given the layout, one spec for each parameter.
            requires_grad: Whether the parameters are trainable.
        """
        self.shard_group = shard_group
        self.requires_grad = requires_grad
        self.name = labels[0].fqn
        itemsize = params[0].element_size()
        self.layout = FlatLayout.plan(
            [param.numel() for param in params],
            shard_group.size,
            max(1, _ALIGNMENT_NBYTES // itemsize),
        )
        self.entries: list[ParamEntry] = []
        self._reset()
        device = params[0].device
        if device.type != "meta":
            device = shard_group.device
        self._buffers = self._make_buffers(params[0].dtype, device)
        shard = self._buffers.local_shard
        for index, (param, label, spec) in enumerate(
            zip(params, labels, specs(self.layout), strict=True)
        ):
            start, end = self.layout.local_range(index, shard_group.rank)
            view = shard[start:end]
            view.copy_(spec.slice(param.detach()))
            kind = FlatShard if spec.tensor_parallel is None else FlatShardOfDTensor
            sharded = cast(
                FlatShard, nn.Parameter(kind(view, spec, guard=self.guard), requires_grad)
            )
            self.entries.append(ParamEntry(sharded, label, [], spec, None, view))

    def _reset(self) -> None:
        """Set what a new handle, or a copy of one, begins with."""
        self.guard = WriteGuard(weakref.ref(self))
        self.num_holders = 0  # units in forward, and unshard() calls, that need the full values
        self.end_position: int | None = None  # in the running backward, which needs it until then
        self.is_unsynced = False  # gradients of earlier microbatches wait for a reduction
        self._has_new_versions = False  # gradients were packed in place since the last gather
        self.gathered_writes = -1  # guard.num_writes when the unsharded buffer was filled
        self.is_registered_unsharded = False
        self.grad = FlatGradient(self.layout, self.shard_group, self.name)
        self._on_gradient: GradientHook | None = None
        self._versions: list[int] = []  # of the unsharded parameters, while they hold values
        self._slots: list[tuple[Any, Any, Tensor, Tensor]] = []
        self._gather: Waitable | torch.Event | None = None

    # Storage

    def _make_buffers(self, dtype: torch.dtype, device: torch.device) -> _Buffers:
        unsharded = torch.empty(self.layout.padded_numel, dtype=dtype, device=device)
        # At once: what is needed only later must not add to a peak.
        free_storage(unsharded)
        shard = torch.zeros(self.layout.shard_numel, dtype=dtype, device=device)
        if not self.is_sharded:
            # Nothing is gathered, so nothing is stored twice.
            unsharded = shard
        return _Buffers(shard, unsharded, unsharded.data)

    @property
    def is_sharded(self) -> bool:
        """False only where one rank holds everything: then nothing is gathered or reduced."""
        return self.shard_group.size > 1

    @property
    def local_shard(self) -> Tensor:
        """This rank's shard, shape `(layout.shard_numel,)`."""
        return self._buffers.local_shard

    @property
    def unsharded(self) -> Tensor:
        """The full flat parameter, shape `(layout.padded_numel,)`; no storage unless unsharded."""
        return self._buffers.unsharded

    @property
    def unsharded_params(self) -> list[nn.Parameter]:
        """The parameters that modules compute with, each of its logical shape."""
        return [entry.unsharded for entry in self.entries if entry.unsharded is not None]

    @property
    def is_unsharded(self) -> bool:
        """Whether the unsharded buffer holds, or is being filled with, the full values."""
        return not self.is_sharded or self.gathered_writes >= 0

    @property
    def is_attached(self) -> bool:
        """Whether the unsharded parameters and their hooks exist."""
        return self._on_gradient is not None

    @property
    def unsharded_extent(self) -> tuple[int, int] | None:
        """Addresses `[start, end)` of the unsharded buffer, None where it outlives every view."""
        if not self.is_sharded or self.gathered_writes < 0:
            return None
        start = self._buffers.gather_output.data_ptr()
        return start, start + self._buffers.gather_output.nbytes

    def check_materialized(self) -> None:
        """Check that the shard is on a real device.

        Raises:
            RuntimeError: Naming the parameters that are still on the meta device.
        """
        if self._buffers.local_shard.is_meta:
            names = [str(entry.label) for entry in self.entries]
            raise RuntimeError(
                f"parameters {names} are on the meta device. Call model.to_empty(device=...) and "
                "initialise them (reset_parameters()) or load them before the first forward."
            )

    def describe_entries(self, options: str) -> list[str]:
        """Return a line for each parameter with all that the ranks must agree on."""
        return [
            f"'{entry.label}' shape {tuple(entry.spec.shape)} {self.local_shard.dtype} "
            f"requires_grad={self.requires_grad} {options}"
            for entry in self.entries
        ]

    def attach(self, on_gradient: GradientHook) -> None:
        """Build the unsharded parameters and their hooks; the entries' slots are final now.

        Args:
            on_gradient: Called as `on_gradient(handle, index)` when the full gradient of a
                parameter has been accumulated, in the thread that runs the backward.
        """
        self._on_gradient = on_gradient
        # Inference tensors could never be trained, whatever context the first call runs in.
        with torch.inference_mode(False), torch.no_grad():
            self._build_unsharded_params()

    def _build_unsharded_params(self) -> None:
        buffers = self._buffers
        if buffers.local_shard.is_meta:
            return
        rank = self.shard_group.rank
        alloc_storage(buffers.unsharded)  # views of a storage without memory can't be made
        for index, entry in enumerate(self.entries):
            start, end = self.layout.offsets[index], sum(self._extent(index))
            # [Note: Storage and autograd]: .data gives each parameter its own version counter.
            dense = entry.spec.unflatten(buffers.unsharded.data[start:end])
            entry.unsharded = make_unsharded(dense, self.requires_grad)
            entry.runs_hooks = False
            low, high = self.layout.local_range(index, rank)
            entry.shard_view = buffers.local_shard[low:high]
            entry.sharded._local = entry.shard_view
            if self.requires_grad:
                self._hook_gradient(index, entry.unsharded)
        self.index_slots()
        views = [alias_of(param) for param in self.unsharded_params]
        self._versions = [param._version for param in self.unsharded_params]
        if self.is_sharded:
            # Before the gradients' own buffer is made: no more than one is there at a time.
            free_storage(buffers.unsharded)
            self.gathered_writes = -1
        if self.requires_grad:
            self.grad.bind([e.spec for e in self.entries], buffers.gather_output, views)

    def _extent(self, index: int) -> tuple[int, int]:
        return self.layout.offsets[index], self.layout.numels[index]

    def _hook_gradient(self, index: int, unsharded: nn.Parameter) -> None:
        # Weak: the leaf holds its hooks where the garbage collector cannot see them, and the
        # handle holds the leaf; one strong reference would leak the unit for ever.
        handle_ref = weakref.ref(self)

        def hook(_: Tensor) -> None:
            handle = handle_ref()
            if handle is not None:
                handle._on_gradient(handle, index)  # type: ignore[misc]

        unsharded.register_post_accumulate_grad_hook(hook)

    def index_slots(self) -> None:
        """Refresh the flat list that registration walks; call after `entries[i].slots` changed."""
        self._slots = [
            (container, key, entry.sharded, entry.unsharded)
            for entry in self.entries
            for container, key in entry.slots
            if entry.unsharded is not None
        ]

    def adopt_changes(self) -> None:
        """Take over what was done to the sharded parameters: `.to()`, `requires_grad_()`.

        Identity says nothing of the former: it gives the Parameter object other data. The new
        slices are copied into a new flat shard, which the parameters become views of again.

        Raises:
            RuntimeError: If the parameters now differ in dtype or device.
        """
        for entry in self.entries:
            if entry.sharded._local is not entry.shard_view:
                self._rebuild()
                return
        for entry in self.entries:
            unsharded = entry.unsharded
            if unsharded is not None and unsharded.requires_grad is not entry.sharded.requires_grad:
                self._adopt_requires_grad()
                return

    def _adopt_requires_grad(self) -> None:
        self.requires_grad = any(entry.sharded.requires_grad for entry in self.entries)
        if self.requires_grad and not self.grad.is_bound:
            # They were frozen when the full parameters were built.
            self.register_sharded()
            with torch.inference_mode(False), torch.no_grad():
                alloc_storage(self._buffers.unsharded)
                self._build_unsharded_params()
        for entry in self.entries:
            if entry.unsharded is not None:
                entry.unsharded.requires_grad_(entry.sharded.requires_grad)

    def _rebuild(self) -> None:
        locals_ = [entry.sharded._local for entry in self.entries]
        kinds = {(local.dtype, local.device) for local in locals_}
        if len(kinds) > 1:
            detail = ", ".join(
                f"'{entry.label}': {local.dtype} on {local.device}"
                for entry, local in zip(self.entries, locals_, strict=True)
            )
            raise RuntimeError(
                "expected the parameters of one unit that were sharded together to change dtype "
                f"and device together, got {detail}. Convert the whole unit."
            )
        del locals_
        with torch.inference_mode(False), torch.no_grad():
            self._take_slices()
            self._build_unsharded_params()

    def _take_slices(self) -> None:
        """Copy the sharded parameters into a new flat shard, and make them views of it."""
        local = self.entries[0].sharded._local
        self._buffers = self._make_buffers(local.dtype, local.device)
        for index, entry in enumerate(self.entries):
            low, high = self.layout.local_range(index, self.shard_group.rank)
            entry.shard_view = self._buffers.local_shard[low:high].copy_(entry.sharded._local)
            entry.sharded._local = entry.shard_view
            entry.sharded._guard = self.guard

    # Copies and pickles

    def __getstate__(self) -> dict[str, Any]:
        """Keep what defines the flat parameter; the copy makes buffers and hooks of its own.

        Raises:
            RuntimeError: While modules show the full parameters, which the copy does not manage.
        """
        if self.is_registered_unsharded:
            raise RuntimeError(
                f"unit '{self.name}' can't be copied or pickled while it shows its full "
                "parameters. Call reshard(module) first, and not during its forward or backward."
            )
        return {
            "name": self.name,
            "layout": self.layout,
            "shard_group": self.shard_group,
            "requires_grad": self.requires_grad,
            "entries": [(entry.sharded, entry.slots) for entry in self.entries],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.entries = [
            # The parameter's own spec: optimizers compare specs by identity first.
            ParamEntry(sharded, sharded._shard_spec.label, slots, sharded._shard_spec)
            for sharded, slots in state["entries"]
        ]
        self._reset()
        with torch.inference_mode(False), torch.no_grad():
            self._take_slices()

    # Gather and free

    def unshard(self, streams: Streams | None = None) -> None:
        """Start gathering the full values; no-op while they are there and no shard was written.

        One all-gather of `layout.padded_numel` elements, on the unshard stream where there are
        streams. `wait_unshard` must follow before the parameters are used. If the allocation or
        the collective fails, the handle is as before.
        """
        if not self.is_sharded or self.gathered_writes == self.guard.num_writes:
            return
        if self._gather is not None:
            self.wait_unshard()
        if self.grad.uses_shared:
            # Wanted again while its storage serves a reduction, by another use in this backward.
            self.finish_reduction()
            self.grad.move_out()
        if _trace.is_traced():
            _trace.record("issue_gather", self.name)
        self.gathered_writes = -1
        try:
            self._gather = self._issue_gather(streams)
        except BaseException:
            free_storage(self._buffers.unsharded)
            raise
        self.gathered_writes = self.guard.num_writes
        if self._has_new_versions:
            # [Note: Packing in place]: what an earlier forward saved is valid again.
            self._has_new_versions = False
            restore_versions(self.unsharded_params, self._versions)

    def _issue_gather(self, streams: Streams | None) -> Waitable | torch.Event:
        buffers, group = self._buffers, self.shard_group.group
        if streams is None:
            alloc_storage(buffers.unsharded)
            return _collectives.all_gather(buffers.gather_output, buffers.local_shard, group)
        stream = streams.unshard_stream
        # The shard may just have been written by the optimizer, and the memory that the gather
        # gets may still be read by the last unit's compute: both are on the current stream.
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            alloc_storage(buffers.unsharded)
            _collectives.all_gather(buffers.gather_output, buffers.local_shard, group).wait()
            return stream.record_event()

    def wait_unshard(self) -> None:
        """Make the current stream (on CPU: the caller) wait for a gather that `unshard` started."""
        gather = self._gather
        if gather is None:
            return
        self._gather = None
        try:
            if isinstance(gather, torch.Event):
                torch.accelerator.current_stream().wait_event(gather)
            else:
                gather.wait()
        except BaseException:
            self.gathered_writes = -1
            free_storage(self._buffers.unsharded)
            raise
        if _trace.is_traced():
            _trace.record("wait_gather", self.name)

    def reshard(self) -> None:
        """Free the full values, after waiting for a gather still in flight. Registers nothing."""
        if not self.is_sharded or self.gathered_writes < 0:
            return
        if self._gather is not None:
            # The backend still writes into the storage. An error is not ours to raise here: nobody
            # wants the values, and an earlier error may be why.
            with suppress(RuntimeError):
                self.wait_unshard()
        self.gathered_writes = -1
        free_storage(self._buffers.unsharded)
        if _trace.is_traced():
            _trace.record("free", self.name)

    # Registration

    def check_registered(self) -> None:
        """Check that the modules still show our parameters.

        Raises:
            RuntimeError: Naming the parameter that was replaced.
        """
        is_unsharded = self.is_registered_unsharded
        for container, key, sharded, unsharded in self._slots:
            if container[key] is not (unsharded if is_unsharded else sharded):
                self._raise_replaced(sharded, container[key])

    def _raise_replaced(self, sharded: Tensor, found: object) -> None:
        label = next(entry.label for entry in self.entries if entry.sharded is sharded)
        what = (
            f"{type(found).__name__}{tuple(found.shape)}"
            if isinstance(found, Tensor)
            else repr(found)
        )
        raise RuntimeError(
            f"parameter '{label}' was replaced by another object ({what}) after fully_shard, as by "
            "assignment, functional_call or load_state_dict(assign=True). Its new value would be "
            "ignored. Write into the existing parameter instead, for example "
            "`param.copy_(full_tensor)` under torch.no_grad(), or replace it before fully_shard."
        )

    def register_unsharded(self) -> None:
        """Make the modules show the unsharded parameters."""
        for entry in self.entries:
            if entry.sharded._backward_hooks and not entry.runs_hooks:
                _connect_hooks(entry)
        if self.is_registered_unsharded:
            return
        for container, key, _, unsharded in self._slots:
            container[key] = unsharded
        self.is_registered_unsharded = True

    def register_sharded(self) -> None:
        """Make the modules show the sharded parameters, the objects users and optimizers hold."""
        if not self.is_registered_unsharded:
            return
        for container, key, sharded, _ in self._slots:
            container[key] = sharded
        self.is_registered_unsharded = False

    # Gradients

    def will_get_gradient(self) -> bool:
        """Return whether the running backward pass accumulates a gradient of any parameter."""
        if not self.requires_grad:
            return False
        for param in self.unsharded_params:
            # It raises where autograd.grad() differentiates with respect to the parameter.
            with suppress(RuntimeError):
                node = get_gradient_edge(param).node if param.requires_grad else None
                if node is not None and torch._C._will_engine_execute_node(node):
                    return True
        return False

    def pack_gradient(self, index: int, *, may_overwrite: bool) -> None:
        """Move the accumulated gradient of parameter `index` into the reduce buffer.

        Args:
            index: Position of the parameter.
            may_overwrite: Whether the backward does not need the parameter's value any more,
                see [Note: Packing in place].

        Raises:
            RuntimeError: If a nested backward has used a value that was overwritten.
        """
        entry = self.entries[index]
        unsharded = entry.unsharded
        gradient = unsharded.grad  # type: ignore[union-attr]
        if gradient is None:
            return
        if self.grad.is_in_flight:
            self.finish_reduction()  # it frees the buffers that this round is going to use
        # Dropped at once: a unit never holds its gradients twice.
        unsharded.grad = None  # type: ignore[union-attr]
        if entry.spec.tensor_parallel is not None:
            gradient = local_gradient(gradient, entry.spec)
        in_place = (
            may_overwrite
            and self.is_sharded
            and self.gathered_writes >= 0
            and self.num_holders == 0
            and self._gather is None
            and not any(getattr(p, "has_hidden_alias", False) for p in self.unsharded_params)
        )
        if self.grad.uses_shared and self.grad.arrived[index]:
            raise RuntimeError(
                f"parameter '{entry.label}' was used inside and outside of a reentrant checkpoint: "
                "its recomputation ran after the value had given way to the gradient. Pass "
                "use_reentrant=False to torch.utils.checkpoint, or call fully_shard on the module "
                "that holds the parameter, so that it is gathered again."
            )
        self.grad.pack(index, gradient, in_place=in_place)
        if in_place and self.grad.uses_shared:
            self.gathered_writes = -1
            self._has_new_versions = True

    def pack_rest(self, *, may_overwrite: bool) -> None:
        """Pack the gradients that are not packed yet: those of earlier microbatches."""
        if self.grad.num_arrived < len(self.entries):
            for index in range(len(self.entries)):
                self.pack_gradient(index, may_overwrite=may_overwrite)

    def issue_reduction(self, streams: Streams | None, *, keep_unsharded: bool) -> None:
        """Start reducing the packed gradients, and those kept unsharded by earlier microbatches.

        Args:
            streams: The side streams of an accelerator.
            keep_unsharded: Whether the full values are still needed.
        """
        self.pack_rest(may_overwrite=not keep_unsharded)
        self.is_unsynced = False
        if not keep_unsharded and self._gather is not None:
            self.wait_unshard()  # the backend still writes into what may become scratch
        self.grad.issue(streams, may_share=self.is_sharded and not keep_unsharded)
        if self.grad.uses_shared:
            self.gathered_writes = -1

    def finish_reduction(self) -> None:
        """Wait for the reduction in flight, if any, and free its buffers."""
        if self.grad.is_in_flight:
            self.grad.finish()
            self._free_unused()

    def _free_unused(self) -> None:
        if self.is_sharded and self.gathered_writes < 0 and not self.grad.uses_shared:
            free_storage(self._buffers.unsharded)
            if _trace.is_traced():
                _trace.record("free", self.name)

    def drop_gradients(self) -> None:
        """Forget all gradients that are not published, after an aborted backward."""
        self.grad.drop()
        self.is_unsynced = False
        for entry in self.entries:
            if entry.unsharded is not None:
                entry.unsharded.grad = None
        self._free_unused()

    def publish_gradients(self, used: list[bool]) -> None:
        """Set or add to `.grad` of the sharded parameters that any rank used."""
        entries = self.entries
        self.grad.publish([e.sharded for e in entries], [e.spec for e in entries], used)

    def run_gradient_hooks(self) -> None:
        """Run the hooks that users put on the sharded parameters with
        `register_post_accumulate_grad_hook`, once, with the final gradient.
        """
        for entry in self.entries:
            hooks = entry.sharded._post_accumulate_grad_hooks
            if hooks and entry.sharded.grad is not None:
                for hook in list(hooks.values()):
                    hook(entry.sharded)


def _connect_hooks(entry: ParamEntry) -> None:
    """Make backward run the hooks that users put on a parameter with `register_hook`."""
    if entry.unsharded is None or not entry.unsharded.requires_grad:
        return
    # Weak, as in FlatParamHandle._hook_gradient: a user's hook may lead anywhere.
    sharded_ref = weakref.ref(entry.sharded)

    def run_hooks(gradient: Tensor) -> Tensor:
        sharded = sharded_ref()
        hooks = None if sharded is None else sharded._backward_hooks
        for hook in list((hooks or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    entry.unsharded.register_hook(run_hooks)
    entry.runs_hooks = True
