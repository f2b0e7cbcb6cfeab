"""The dtypes, devices and forms of a flat parameter's values and gradients.

[Note: Reduce dtype]
The buffer of gradients may have another dtype than the parameters: packing casts. Gradients of
microbatches that are not reduced then add up in it too, under every strategy. The result is cast
once, to the main dtype. Where that takes memory of its own, persistent gradients have it
persistently.

[Note: Extended gathers]
The class of a parameter may say what its gather sends and what the modules compute with: a weight
that travels as float8 with one scale, for example. It has FSDP2's two methods:

    fsdp_pre_all_gather(mesh[, outer_size, outer_stride, module, mp_policy]) -> inputs, metadata
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None) -> tensor, inner_tensors

The shard holds the dense values that the class wraps, so that optimizers, state dicts and
checkpoints see plain numbers. Each gather wraps this rank's rows, asks for the inputs, gathers each
of them, and lets the class fill the unsharded parameter, which it made of the outputs once.

Such a parameter has a handle of its own, cut as FSDP2 does it: all ranks have the same number of
rows, except the last ones, which may have fewer or none. Scales that are reduced over the ranks
rely on that. A rank with missing rows gives the class the rows that it has (a row of zeros if
none), and pads the result unless the class did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from composable_shard.comm import (
    HOST,
    QUANTISED,
    ShardGroup,
    SmallGroup,
    Streams,
    Then,
    Waitable,
    alloc_host,
    collectives,
    copies_for,
)
from composable_shard.flat_param.entries import ParamEntry, zero_gaps
from composable_shard.flat_param.full_values import FREED, FullState, FullValues
from composable_shard.flat_param.kept_classes import ClassNotes
from composable_shard.flat_param.kept_params import Kept, as_itself
from composable_shard.flat_param.local_shard import LocalShard
from composable_shard.flat_param.storage import alloc_storage, free_storage
from composable_shard.flat_param.unsharded_params import LOCKED, UnshardedParams
from composable_shard.layout import FlatLayout, round_up
from composable_shard.options import PRECISIONS, MixedPrecisionPolicy, OffloadPolicy
from composable_shard.tensor import WriteGuard
from composable_shard.torch_private import is_traceable_wrapper_subclass, storage_of, version_of

_OUTPUT_ALIGNMENT_NBYTES = 256  # of the outputs, which matrix products may read


@dataclass(frozen=True, eq=False)  # one for each parameter: its handle has no other
class Extension:
    """How to make a parameter of a class with FSDP2's methods from dense values."""

    kind: Any
    inner: str  # the attribute that has the values
    context: Any  # further arguments to make the class

    @classmethod
    def of(cls, param: Tensor) -> Extension | None:
        """Return a parameter's extension; None if its class needs more than dense values."""
        has_both = hasattr(param, "fsdp_pre_all_gather") and hasattr(param, "fsdp_post_all_gather")
        if not has_both or not is_traceable_wrapper_subclass(param) or param.dim() == 0:
            return None
        names, context = param.__tensor_flatten__()
        values = getattr(param, names[0])
        is_dense = type(values) in (Tensor, nn.Parameter) and values.is_contiguous()
        if len(names) > 1 or not is_dense or values.shape != param.shape:
            return None
        return cls(type(param), names[0], context)

    def values_of(self, param: Tensor) -> Tensor:
        """Return the dense values that a parameter wraps."""
        values: Tensor = getattr(param, self.inner)
        return values.detach()

    def wrap(self, values: Tensor) -> Any:
        """Return dense values as the class."""
        inner = {self.inner: values}
        return self.kind.__tensor_unflatten__(inner, self.context, values.shape, values.stride())


class Codec:
    """Encodes the rows of this rank, gathers them, and lets the class take the outputs.

    Args:
        shard: The shard to gather.
        extension: Extension of the parameter.
        dtype: Dtype in which the parameter computes.
    """

    _entry: ParamEntry
    _memory: Sequence[Tensor]  # the gathered outputs, and further memory of the class
    _parts: Sequence[Tensor]  # of the gathered outputs, one for each input, as bytes
    _outputs: tuple[Tensor, ...]  # these parts, as the class gets them

    def __init__(self, shard: LocalShard, extension: Extension, dtype: torch.dtype) -> None:
        self.shard, self._extension, self._dtype = shard, extension, dtype
        # The memory that modules see, as bytes; empty until the parameter is made
        self.buffer = torch.empty(0, dtype=torch.uint8, device=shard.device)
        self.output = self.buffer.data  # an alias of it
        ranks = shard.shard_group
        is_whole = ranks.size < ranks.group.size()
        group = SmallGroup.of(ranks, 1).group if is_whole else ranks.group
        self._mesh = DeviceMesh.from_group(group, shard.device.type)

    def make_param(self, entry: ParamEntry) -> Tensor:
        """Let the class make the parameter, from memory for the gathered outputs."""
        self._entry = entry
        wrapped, inputs, metadata = self._encode()
        world_size = self.shard.shard_group.size
        shapes = [(each.shape[0] * world_size, *each.shape[1:]) for each in inputs]
        sizes = [prod(shape) * each.itemsize for shape, each in zip(shapes, inputs, strict=True)]
        padded = [round_up(size, _OUTPUT_ALIGNMENT_NBYTES) for size in sizes]
        gathered = self.buffer.new_empty(sum(padded))
        parts = zip(gathered.data.split_with_sizes(padded), sizes, strict=True)
        self._parts = [part[:size] for part, size in parts]
        self._outputs = tuple(
            part.data.view(each.dtype).view(shape)  # [Note: Storage and autograd]
            for part, each, shape in zip(self._parts, inputs, shapes, strict=True)
        )
        whole, inner = wrapped.fsdp_post_all_gather(self._outputs, metadata, self._dtype)
        inner = [each for each in inner if storage_of(each) != storage_of(gathered)]
        self._memory = [gathered, *inner]
        # Modules see memory that the class has made, or the gathered outputs.
        self.buffer.set_(self._memory[-1].untyped_storage())
        self.output.set_(self.buffer.untyped_storage())
        spec = entry.spec
        if whole.shape != spec.dense_shape:  # padded
            whole = whole.as_strided(spec.dense_shape, spec.dense_stride, 0)
        return spec.distribute(whole)

    def _encode(self) -> tuple[Any, Sequence[Tensor], Any]:
        """Return this rank's rows as the class, the inputs to gather, and the metadata."""
        spec = self._entry.spec
        start, end = spec.layout.local_range(0, spec.rank)
        values = self.shard.on_device()
        shape = (-1, *spec.dense_shape[1:])
        rows = values[start:end].view(shape) if end > start else values.new_zeros(1, *shape[1:])
        wrapped = self._extension.wrap(rows)
        given: tuple[Any, ...] = (self._mesh,)
        if len(signature(wrapped.fsdp_pre_all_gather).parameters) > 1:
            module = next(place.module() for *_, place in self._entry.slots if place is not None)
            policy = TorchMixedPrecisionPolicy(self._dtype)
            given = self._mesh, spec.dense_shape, spec.dense_stride, module, policy
        # A gather in an evaluation may serve a later backward.
        with torch.inference_mode(False), torch.no_grad():
            inputs, metadata = wrapped.fsdp_pre_all_gather(*given)
            return wrapped, [self._pad(each, rows.shape[0]) for each in inputs], metadata

    def _pad(self, given: Tensor, num_rows: int) -> Tensor:
        """Return an input of the class, padded to the number of rows that all ranks send."""
        spec = self._entry.spec
        rows = -(-spec.dense_shape[0] // spec.world_size)
        if spec.dense_shape[0] % spec.world_size == 0 or given.shape[0] == rows:
            return given.contiguous()
        if given.shape[0] != num_rows:
            raise ValueError(
                f"expected fsdp_pre_all_gather of parameter '{spec.label}' to return {num_rows} "
                f"rows, or {rows} as on the first rank, got {given.shape[0]}"
            )
        padded = given.new_zeros(rows, *given.shape[1:])
        padded[:num_rows] = given
        return padded

    def start(self, what: str) -> Waitable:
        """Start gathering; the parameter is valid after the wait."""
        for each in self._memory:
            alloc_storage(each)
        wrapped, inputs, metadata = self._encode()
        sent = [each.view(-1).view(torch.uint8) for each in inputs]
        ranks, works = self.shard.shard_group, list[Waitable]()
        for part, own in zip(self._parts, sent, strict=True):
            if ranks.size == 1:
                part.copy_(own)
            else:
                work = collectives.all_gather(part, own, ranks.group, what=what, is_of_step=True)
                works.append(work)

        def fill() -> None:
            sent.clear()  # the gathers have read it
            param = self._entry.unsharded
            with torch.inference_mode(False), torch.no_grad(), as_itself(param):
                wrapped.fsdp_post_all_gather(self._outputs, metadata, self._dtype, out=param)

        return Then(works, fill)

    def free(self) -> None:
        """Free all memory."""
        for each in self._memory:
            free_storage(each)


class ExtendedParams(UnshardedParams):
    """The one unsharded parameter, which its class makes from the gathered outputs."""

    _whole: Tensor

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec.buffer, codec.shard.layout)
        self.codec = codec

    def build(self, entries: Sequence[ParamEntry]) -> None:
        """Make the parameter; also watch its inner tensors, which graphs may save instead."""
        self._whole = self.codec.make_param(entries[0])
        super().build(entries)
        param: Any = self.built[0]
        local = param._local_tensor if isinstance(param, DTensor) else param
        if not isinstance(param, Kept):
            self.aliases = ClassNotes(param)
        if is_traceable_wrapper_subclass(local):
            self.watched += tuple(getattr(local, name) for name in local.__tensor_flatten__()[0])
        self.versions = [version_of(each) for each in self.watched]
        self.locked = (LOCKED,) * len(self.watched)

    def _aliases(self) -> list[Tensor]:
        """Return the parameter itself: its class may not support aliases of freed memory."""
        return [*self.built]

    def _view(self, index: int, entry: ParamEntry) -> Tensor:
        return self._whole

    def edited(self, versions: Sequence[int]) -> list[str]:
        """Return the name of the parameter if it, or a tensor inside of it, was edited."""
        names = super().edited(versions)
        if not names and [*map(version_of, self.watched)] != [*versions]:
            names = [str(self._entries[0].label)]
        return names

    def check_can_write_back(self) -> None:
        """Check that there are no edits, because the class can't write them back."""
        if names := self.edited(self.versions):
            raise NotImplementedError(
                f"the parameters {names} were gathered in a form of their class's own "
                "(fsdp_pre_all_gather), from which edits can't be written back. Edit them inside "
                "unshard_params(module), which shows their plain values."
            )


class ExtendedValues(FullValues):
    """The full values of one parameter in the form that its class gives them."""

    params: ExtendedParams

    def __init__(self, codec: Codec, *, is_kept: bool) -> None:
        buffer = codec.buffer
        super().__init__(codec.shard, buffer, codec.output, buffer, is_kept=is_kept)
        self.params = ExtendedParams(codec)

    def set_small_group(self, group: SmallGroup | None) -> None:
        """Ignore a small group: its gathers would need another encoding."""

    def _issue(self, streams: Streams | None, when: str) -> Waitable | None:
        if self.is_sharded:
            return super()._issue(streams, when)
        self._start(when).wait()
        return None

    def _start(self, when: str) -> Waitable:
        return self.params.codec.start(f"the {when} gather of {self.label.text}")

    def _forget(self, state: FullState = FREED) -> None:
        super()._forget(state)
        if not self.is_kept:
            self.params.codec.free()

    def write_back(self, *, compares: bool = False) -> None:
        """Write nothing: see `check_can_write_back` of the parameters."""

    def keep_edits(self) -> bool:
        """Warn, and return False: edits of the class's own form can't be written back."""
        self.params.warn_of_edits("in forward")
        return False


@dataclass(frozen=True)
class Precision:
    """Dtypes that differ, or may come to differ, from the local shard's.

    None follows another dtype, also through `module.to(dtype)`.
    """

    main_dtype: torch.dtype | None = None  # of the local shard; None: any
    param_dtype: torch.dtype | None = None  # of the unsharded buffer; None: the local shard's
    # Dtype in which shards travel; None: the unsharded buffer's
    gather_dtype: torch.dtype | None = None
    # Dtype in which gradients travel; None: the unsharded buffer's
    reduce_dtype: torch.dtype | None = None
    # The form in which the class of the only parameter is gathered, if it has one
    extension: Extension | None = None

    @classmethod
    def of(cls, policy: MixedPrecisionPolicy, dtype: torch.dtype, *, is_kept: bool) -> Precision:
        """Return the dtypes of a flat parameter; is_kept: a module computes in their main dtype."""
        if dtype not in PRECISIONS:
            return cls()
        if is_kept:
            return cls(policy.main_dtype)
        param_dtype = policy.param_dtype
        if param_dtype is None and policy.main_dtype is not None:
            param_dtype = dtype  # the model computes as it did
        return cls(policy.main_dtype, param_dtype, policy.gather_dtype, policy.reduce_dtype)

    def computes_in(self, main: torch.dtype) -> torch.dtype:
        """Return the dtype of the unsharded buffer, where the local shard's is `main`."""
        return self.param_dtype or main

    def reduces_in(self, main: torch.dtype) -> torch.dtype:
        """Return the dtype of the reduce buffer."""
        return self.reduce_dtype or self.computes_in(main)

    def travels_in(self, main: torch.dtype) -> torch.dtype:
        """Return the dtype in which shards are gathered."""
        return self.gather_dtype or self.computes_in(main)

    def itemsize(self, main: torch.dtype) -> int:
        """Return the smallest element size of the buffers, from which the alignment follows."""
        used = (main, self.computes_in(main), self.reduces_in(main), self.travels_in(main))
        return min(dtype.itemsize for dtype in used)


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
    """Lay out the dense tensors of one flat parameter; reads only their sizes and dtypes."""
    precision = precision or Precision()
    itemsize = precision.itemsize(precision.main_dtype or params[0].dtype)
    nbytes = _OWNED_ALIGNMENT_NBYTES if owners else _ALIGNMENT_NBYTES
    alignment = max(1, nbytes // itemsize)
    numels = [param.numel() for param in params]
    return FlatLayout.plan(numels, world_size, alignment, blocks=blocks, owners=owners)


@dataclass(frozen=True)
class MemoryPlan:
    """The facts that decide which memory a flat parameter gets."""

    shard_group: ShardGroup  # the ranks that share it
    precision: Precision  # the dtypes that differ from the local shard's
    offload: OffloadPolicy  # what lives on the host
    is_kept: bool  # the unsharded buffer is never freed, see [Note: Kept buffers]

    @property
    def is_pinned(self) -> bool:
        """Whether host memory is pinned. Only what is offloaded has host memory."""
        is_pinned = self.offload.is_active and self.offload.pin_memory
        return is_pinned and self.shard_group.device.type != HOST.type

    def check(self, shown: Sequence[ParamEntry], name: str) -> None:
        """Check that a shard can have the dtype and be on the device of its parameters."""
        kinds = [(each.sharded._local.dtype, each.sharded._local.device) for each in shown]
        dtype, device = kinds[0]
        if len(set(kinds)) > 1:
            pairs = zip(shown, kinds, strict=True)
            raise RuntimeError(
                "expected the parameters of one unit that were sharded together to change dtype "
                "and device together, got "
                + ", ".join(f"'{each.label}': {kind[0]} on {kind[1]}" for each, kind in pairs)
                + ". Convert the whole unit."
            )
        if self.offload.is_active and device.type not in (HOST.type, "meta"):
            raise RuntimeError(
                f"expected parameter '{shown[0].label}' of unit '{name}' on the CPU, where its "
                f"OffloadPolicy keeps it, got {device}, as after model.to(device). Call "
                "model.cpu(), or model.to_empty(device='cpu') for a model from the meta device; "
                "the unit computes on its mesh's device all the same."
            )
        main_dtype = self.precision.main_dtype
        if main_dtype is not None and dtype != main_dtype:
            raise RuntimeError(
                f"the parameters of unit '{name}' were converted to {dtype}, and its "
                f"MixedPrecisionPolicy says main_dtype={main_dtype}. Convert them back, or shard "
                "with another policy; to compute in another dtype, use param_dtype."
            )

    def check_pinned(self, shard: Tensor, name: str) -> None:
        """Check that a shard is in the memory that it was given."""
        if self.is_pinned and not shard.is_meta and not shard.is_pinned():
            raise RuntimeError(
                f"expected the shard of parameter '{name}' in pinned memory, and it is not, "
                "as after share_memory(). Pass OffloadPolicy(pin_memory=False) to leave it so."
            )

    def allocate(
        self, layout: FlatLayout, guard: WriteGuard, dtype: torch.dtype, device: torch.device
    ) -> tuple[LocalShard, FullValues]:
        """Allocate a local shard of this dtype (on the host if offloaded), and its full values."""
        group = self.shard_group
        is_offloaded = self.offload.is_active and device.type != "meta"
        if is_offloaded:
            device = group.device
        param_dtype = self.precision.computes_in(dtype)
        wire_dtype = self.precision.travels_in(dtype) if group.size > 1 else param_dtype
        start, end = layout.shard_range(group.rank)
        extension, full_numel = self.precision.extension, layout.padded_numel
        if extension is not None:
            full_numel, wire_dtype = 0, dtype  # its class encodes main values
        buffer = torch.empty(full_numel, dtype=param_dtype, device=device)
        output = buffer.data  # [Note: Storage and autograd]
        own_part = output[start:end]
        if not self.is_kept:
            # Free it at once, so that it does not add to peak memory.
            free_storage(buffer)
        if is_offloaded:
            values = alloc_host(end - start, dtype, is_pinned=self.is_pinned)
        elif self.is_kept and extension is None and param_dtype == wire_dtype == dtype:
            # [Note: Kept buffers]: nothing is stored twice.
            values = buffer.zero_()[start:end]
        else:
            values = torch.empty(end - start, dtype=dtype, device=device)
            zero_gaps(values, layout, group.rank)  # gaps only: the values are written next
        copies = copies_for(device) if is_offloaded else None
        shard = LocalShard(
            values, layout, group, guard, wire_dtype=wire_dtype, device=device, copies=copies
        )
        if is_offloaded and not (self.is_kept or self.offload.params):
            # Scales are computed from main values.
            shard.keep_on_device(dtype if wire_dtype in QUANTISED else wire_dtype)
        is_kept = self.is_kept
        if extension is not None:
            return shard, ExtendedValues(Codec(shard, extension, param_dtype), is_kept=is_kept)
        return shard, FullValues(shard, buffer, output, own_part, is_kept=is_kept)
