"""`FlatParamHandle`: one flat parameter, sole owner of its storage and gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from composable_shard._collectives import Waitable
from composable_shard._flat_grad import FlatGradient, Streams, local_gradient
from composable_shard._flat_shard import FlatShard, FlatShardOfDTensor
from composable_shard._flat_storage import FlatStorage
from composable_shard._layout import FlatLayout
from composable_shard._mesh import ShardGroup
from composable_shard._registration import ParamEntry
from composable_shard._shard_spec import ParamLabel, ShardSpec, WriteGuard
from composable_shard._storage import alloc_storage, free_storage
from composable_shard._unsharded_param import alias_of, make_unsharded

__all__ = ["FlatParamHandle", "GradientHook", "ParamEntry"]

_ALIGNMENT_NBYTES = 16

GradientHook = Callable[["FlatParamHandle", int], None]


class FlatParamHandle(FlatStorage):
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

    # Set-up

    @property
    def is_attached(self) -> bool:
        """Whether the unsharded parameters and their hooks exist."""
        return self._on_gradient is not None

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
        alloc_storage(buffers.unsharded)  # views of a storage without memory can't be made
        for index, entry in enumerate(self.entries):
            start, end = self.layout.offsets[index], sum(self._extent(index))
            # [Note: Storage and autograd]: .data gives each parameter its own version counter.
            dense = entry.spec.unflatten(buffers.unsharded.data[start:end])
            entry.unsharded = make_unsharded(dense, self.requires_grad)
            entry.runs_hooks = False
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
        if self.guard.has_new_attributes and self.is_attached:
            self._adopt_requires_grad()
            self.adopt_hooks()
            self.guard.has_new_attributes = False

    def _adopt_requires_grad(self) -> None:
        self.requires_grad = any(entry.sharded.requires_grad for entry in self.entries)
        if self.requires_grad and not self.grad.is_bound:
            # They were frozen when the full parameters were built.
            self.register_sharded()
            with torch.inference_mode(False), torch.no_grad():
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
        self.guard.has_new_attributes = True

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
