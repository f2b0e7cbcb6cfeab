"""`FlatParamHandle`: sole owner of one flat parameter's storage and metadata."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from composable_shard.comm import ShardGroup, SmallGroup, Streams, Waitable
from composable_shard.flat_param.entries import FlatEntry, Precision
from composable_shard.flat_param.grad_pieces import local_gradient
from composable_shard.flat_param.gradient import FlatGradient
from composable_shard.flat_param.host_gradient import HostGradient
from composable_shard.flat_param.param_views import GradientHook, ParamViews
from composable_shard.flat_param.reduction import ScratchPool
from composable_shard.flat_param.registration import ParamEntry
from composable_shard.layout import FlatLayout
from composable_shard.options import Granularity, OffloadPolicy, ShardingStrategy
from composable_shard.tensor import (
    FlatShard,
    FlatShardOfDTensor,
    ParamLabel,
    ShardSpec,
    WriteGuard,
    note_owned,
)

__all__ = ["FlatParamHandle", "ParamEntry", "PublishedGradients", "plan_layout"]


class PublishedGradients(ParamViews):
    """What a handle does with gradients that are reduced, or that no other rank adds to."""

    _held: dict[int, Tensor]  # gradients where no other rank has any

    def publish_gradients(self, used: list[bool]) -> None:
        """Set or add to `.grad` of the parameters shown at rest that any rank used."""
        flat = self.flat if self.shows_flat else None
        own = pieces = None
        if self.grad.is_alone:
            own = pieces = [self._take_gradient(*item) for item in enumerate(self.entries)]
        if flat is not None:
            if flat.sharded.grad is None:
                flat.used = [False] * len(used)
            flat.used = [before or now for before, now in zip(flat.used, used, strict=True)]
            used = [any(used)]
        if self.host_grad is not None and not self.grad.is_partial:
            pieces = self._collect_on_host(self.host_grad, own)
        elif flat is not None:
            whole = self.grad.reduced if own is None else self._join(own)
            if whole is not None:
                self.zero_gaps(whole)  # nothing was packed there
            pieces = [None if whole is None else self.slice_of(flat, whole)]
        shown = self.shown_at_rest
        self.is_outdated = bool(self.layout.owners) and self.is_sharded
        self.grad.publish([e.sharded for e in shown], [e.spec for e in shown], used, pieces)

    def _collect_on_host(
        self, host: HostGradient, own: list[Tensor | None] | None
    ) -> list[Tensor | None] | None:
        """Return the gradients of what is shown, complete, in host memory; None if none came.

        Args:
            host: Where they are, or come to.
            own: Autograd's own, which were not reduced.
        """
        shown = self.shown_at_rest
        if own is not None:
            target = host.begin([each.sharded for each in shown])
            if self.shows_flat:
                target.zero_()
            for entry, gradient in zip(self.entries, own, strict=True):
                if gradient is not None:
                    host.copy(self.slice_of(entry, target), gradient)
        whole = host.collect()
        if whole is None:
            return None
        if self.shows_flat:
            self.zero_gaps(whole)
        pieces: list[Tensor | None] = []
        for index, each in enumerate(shown):
            piece = self.slice_of(each, whole)
            if whole is not host.memory and each.sharded.grad is None:
                piece = self.slice_of(each, host.memory).copy_(piece)
            is_there = own is None or own[index] is not None or self.shows_flat
            pieces.append(piece if is_there else None)
        return pieces

    def _join(self, pieces: list[Tensor | None]) -> Tensor:
        """Return gradients of whole parameters as one shard, zero where there is none."""
        shard = torch.zeros_like(self.local_shard)
        for entry, piece in zip(self.entries, pieces, strict=True):
            if piece is not None:
                self.slice_of(entry, shard).copy_(piece)
        return shard

    def _take_gradient(self, index: int, entry: ParamEntry) -> Tensor | None:
        """Take autograd's own gradient, shape `(spec.numel,)`, where no other rank has one."""
        dense = self._held.pop(index, None)
        gradient = entry.unsharded.grad  # type: ignore[union-attr]
        if dense is None:
            if gradient is None:
                return None
            entry.unsharded.grad = None  # type: ignore[union-attr]
            gradient = gradient.to_dense() if gradient.is_sparse else gradient.detach()
            dense = local_gradient(gradient, entry.spec)
        flat = entry.spec.flatten(dense)
        flat = flat.to(self.local_shard.dtype)
        factor = self.grad.reduction.divide_factor
        return flat if factor is None else flat.div_(factor)


_ALIGNMENT_NBYTES = 16
_OWNED_ALIGNMENT_NBYTES = 64  # torch's own, on which the rounding of matrix products depends


def plan_layout(
    params: Sequence[Tensor],
    world_size: int,
    precision: Precision | None = None,
    *,
    blocks: Sequence[int] = (),
    owners: Sequence[int] = (),
) -> FlatLayout:
    """Lay out the dense tensors of one flat parameter; reads only their sizes and dtypes.

    Args:
        params: The tensors.
        world_size: The ranks that share the flat parameter.
        precision: The dtypes that differ from theirs.
        blocks: As in `FlatLayout.plan`.
        owners: As in `FlatLayout.plan`.
    """
    precision = precision or Precision()
    itemsize = precision.itemsize(precision.main_dtype or params[0].dtype)
    nbytes = _OWNED_ALIGNMENT_NBYTES if owners else _ALIGNMENT_NBYTES
    alignment = max(1, nbytes // itemsize)
    numels = [param.numel() for param in params]
    return FlatLayout.plan(numels, world_size, alignment, blocks=blocks, owners=owners)


def _describe(granularity: Granularity) -> str:
    return "" if granularity == "element" else f" granularity={granularity!r}"


class FlatParamHandle(PublishedGradients):
    """One flat parameter: parameters of a unit that share dtypes, requires_grad and mesh.

    At rest it holds this rank's shard. `unshard` gathers the full values into one buffer,
    `reshard` frees them; `register_unsharded` and `register_sharded` decide which of the two forms
    the modules show. Gradients are packed one by one into the reduce buffer and reduced together.

    Attributes:
        layout: Where each parameter lies, and who owns what.
        granularities: How finely each parameter may be cut.
        shard_group: The ranks that share the flat parameter, and those that hold copies.
        strategy: What each rank keeps.
        reshards_after_backward: Whether the end of a backward frees the full values.
        has_early_hooks: Any rank has hooks on gradients; all ranks know, [Note: Early gradients].
        small_group: The ranks that hold all values once between forward and backward, if any.
        precision: The dtypes that differ from the local shard's.
        offload: What lives on the host.
        entries: The managed parameters, in order.
        requires_grad: Whether any of the parameters is trainable.
        has_fixed_owners: Whether parameters that are owned whole stay where they are for good.
    """

    def __init__(  # noqa: PLR0913 -- all that defines a handle, each by name
        self,
        params: Sequence[Tensor],
        labels: Sequence[ParamLabel],
        shard_group: ShardGroup,
        layout: FlatLayout,
        specs: Sequence[ShardSpec],
        granularities: Sequence[Granularity],
        requires_grad: bool,
        strategy: ShardingStrategy,
        precision: Precision | None = None,
        offload: OffloadPolicy | None = None,
    ) -> None:
        """Allocate the shard and copy this rank's part of `params` into it; changes no module.

        Args:
            params: Dense tensors (local tensors of DTensors) on one device; of one dtype, unless
                the precision has a main dtype.
            labels: Names for messages, one for each parameter.
            shard_group: The ranks that share the flat parameter.
            layout: Where each parameter lies.
            specs: One for each parameter.
            granularities: How finely each parameter may be cut.
            requires_grad: Whether the parameters are trainable.
            strategy: What each rank keeps.
            precision: Dtypes, where they are not those of `params`.
            offload: What lives on the host.
        """
        self.offload = offload or OffloadPolicy()
        self.precision = precision or Precision()
        self.shard_group = shard_group
        self.strategy = strategy
        self.reshards_after_backward = True
        self.has_early_hooks = False
        self.small_group: SmallGroup | None = None
        self.requires_grad = requires_grad
        self.has_fixed_owners = False
        self.flat: FlatEntry | None = None
        self.shows_flat = False
        self.name = labels[0].fqn
        self.layout = layout
        self.granularities = tuple(granularities)
        self.entries: list[ParamEntry] = []
        self._reset()
        device = params[0].device
        if device.type != "meta":
            device = shard_group.device
        main_dtype = self.precision.main_dtype or params[0].dtype
        self._buffers = self._make_buffers(main_dtype, device)
        shard = self._buffers.local_shard
        for index, (param, label, spec) in enumerate(zip(params, labels, specs, strict=True)):
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
        group, facts = self.shard_group, self.strategy.facts
        self.is_sharded = group.size > 1
        self.is_kept = facts.keeps_params(group.size)
        self.guard = WriteGuard(weakref.ref(self))
        self.num_holders = 0  # units in forward, and unshard() calls, that need the full values
        self.is_unsynced = False  # gradients of earlier microbatches wait for a reduction
        self._has_new_versions = False  # gradients were packed in place since the last gather
        self.gathered_writes = -1  # guard.num_writes when the unsharded buffer was filled
        self.is_outdated = False
        if self.layout.owners and self.shard_group.size > 1:
            note_owned(self)
        self.written_back = -1
        self._small_part: Tensor | None = None
        self._small_writes = -1
        self.is_registered_unsharded = False
        self.is_in_scope = self.has_scope_values = False
        self._scope_slots, self.scope_params, self._hides_scope_params = [], (), False
        self.unsharded_flat = None
        is_persistent = facts.keeps_gradients(group.size, group.num_ranks)
        self.grad = FlatGradient(self.layout, group, self.name, is_persistent=is_persistent)
        self._held: dict[int, Tensor] = {}  # gradients where no other rank has any
        self._on_gradient: GradientHook | None = None
        self.is_attached = False
        self._watched = []
        self._versions: list[int] = []  # of the unsharded parameters, while they hold values
        self._slots = []
        self._gather: Waitable | None = None

    # Set-up

    def describe_entries(self, options: str) -> list[str]:
        """Return a line for each parameter with all that the ranks must agree on."""
        return [
            f"'{entry.label}' shape {tuple(entry.spec.shape)} {self.local_shard.dtype} "
            f"requires_grad={self.requires_grad}{_describe(granularity)} {options}"
            for entry, granularity in zip(self.entries, self.granularities, strict=True)
        ]

    # Copies and pickles

    def __getstate__(self) -> dict[str, Any]:
        """Keep what defines the flat parameter; the copy makes buffers and hooks of its own.

        Raises:
            RuntimeError: While modules show the full parameters, which the copy does not manage.
        """
        if self.is_in_scope:
            raise RuntimeError(
                f"unit '{self.name}' can't be copied or pickled inside unshard_params, for the "
                "copy's parameters would belong to no unit. Copy it outside the scope, or its "
                "state_dict() inside."
            )
        if self.is_registered_unsharded:
            raise RuntimeError(
                f"unit '{self.name}' can't be copied or pickled while it shows its full "
                "parameters. Call reshard(module) first, and not during its forward or backward."
            )
        return {
            "name": self.name,
            "layout": self.layout,
            "granularities": self.granularities,
            "shard_group": self.shard_group,
            "strategy": self.strategy,
            "reshards_after_backward": self.reshards_after_backward,
            "small_group": self.small_group,
            "divide_factor": self.grad.reduction.divide_factor,
            "precision": self.precision,
            "offload": self.offload,
            "requires_grad": self.requires_grad,
            "has_fixed_owners": self.has_fixed_owners,
            "entries": [(entry.sharded, entry.slots) for entry in self.entries],
            "flat": None if self.flat is None else (self.flat.sharded, self.flat.used),
            "flat_slot": self.flat_slot,
            "shows_flat": self.shows_flat,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        divide_factor = state.pop("divide_factor")
        self.__dict__.update(state)
        self.has_early_hooks = False
        self.entries = [
            # The parameter's own spec: optimizers compare specs by identity first.
            ParamEntry(sharded, sharded._shard_spec.label, slots, sharded._shard_spec)
            for sharded, slots in state["entries"]
        ]
        if state["flat"] is not None:
            flat, used = state["flat"]
            spec = flat._shard_spec
            self.flat = FlatEntry(flat, spec.label, spec, flat._local, used)
        self.hide_unshown()  # a pickle does not know it
        self._reset()
        self.grad.reduction.divide_factor = divide_factor
        with torch.inference_mode(False), torch.no_grad():
            self._take_slices()

    # Gradients

    @property
    def has_hidden_alias(self) -> bool:
        """Whether the value of any parameter may be used where autograd can't see it."""
        return any([getattr(entry.unsharded, "has_hidden_alias", False) for entry in self.entries])

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
        if self.grad.is_alone:
            if not self.grad.can_share:
                self._hold_gradient(index, gradient)
            self.grad.note_arrival(index)
            return
        self._begin_round()
        # Dropped at once: a unit never holds its gradients twice.
        unsharded.grad = None  # type: ignore[union-attr]
        if entry.spec.tensor_parallel is not None:
            gradient = local_gradient(gradient, entry.spec)
        in_place = (
            may_overwrite
            and self.grad.can_share
            and not self.is_kept
            and self.gathered_writes >= 0
            and self.num_holders == 0
            and self._gather is None
            and not self.has_hidden_alias
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

    def _hold_gradient(self, index: int, gradient: Tensor) -> None:
        """Take a gradient that no other rank adds to, cast, out of autograd's hands.

        It would add up microbatches in the parameter's dtype. [Note: Reduce dtype]
        """
        entry, held = self.entries[index], self._held.get(index)
        entry.unsharded.grad = None  # type: ignore[union-attr]
        dense = local_gradient(gradient.to_dense() if gradient.is_sparse else gradient, entry.spec)
        dtype = self.precision.reduces_in(self.local_shard.dtype)
        self._held[index] = dense.to(dtype) if held is None else held.add_(dense)

    def _begin_round(self) -> None:
        if self.grad.is_in_flight:
            self.finish_reduction()  # it frees the buffers that this round is going to use
        if self.grad.is_persistent and not self.grad.is_open:
            self.grad.move_out_published([each.sharded for each in self.shown_at_rest])
            if self.host_grad is not None:
                self.host_grad.reuse_sources()

    def pack_small(self) -> None:
        """Pack the gradients that wait for others, [Note: Small gradients]."""
        if self.grad.small.indices:
            self.grad.pack_small([entry.unsharded for entry in self.entries])

    def pack_rest(self, *, may_overwrite: bool) -> None:
        """Pack what is not packed yet: gradients that wait, and those of earlier microbatches."""
        self.pack_small()
        if self.grad.num_arrived < len(self.entries):
            with torch.no_grad():  # those of create_graph have a graph, the buffer has none
                for index in range(len(self.entries)):
                    self.pack_gradient(index, may_overwrite=may_overwrite)

    def issue_reduction(
        self,
        streams: Streams | None,
        scratch: ScratchPool,
        *,
        keep_unsharded: bool,
        is_deferred: bool,
    ) -> None:
        """Start reducing the packed gradients, and those kept unsharded by earlier microbatches.

        Args:
            streams: The side streams of an accelerator.
            scratch: The tree's.
            keep_unsharded: Whether the full values are still needed.
            is_deferred: Whether to put the all-reduce over copies of the shard off.
        """
        self.pack_rest(may_overwrite=not keep_unsharded)
        if not self.grad.is_open:
            self._begin_round()
        self.is_unsynced = False
        if not keep_unsharded and self._gather is not None:
            self.wait_unshard()  # the backend still writes into what may become scratch
        may_share = not self.is_kept and not keep_unsharded
        self.grad.issue(streams, scratch, may_share=may_share, is_deferred=is_deferred)
        if self.grad.uses_shared:
            self.gathered_writes = -1

    def drop_gradients(self) -> None:
        """Forget all gradients that are not published, after an aborted backward."""
        self.grad.drop()
        if self.host_grad is not None:
            self.host_grad.drop()
        self._held.clear()
        self.is_unsynced = False
        for entry in self.entries:
            if entry.unsharded is not None:
                entry.unsharded.grad = None
        self._free_unused()
