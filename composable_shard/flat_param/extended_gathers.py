"""Parameters of a class that says what its gather sends, and what modules compute with.

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

from composable_shard.comm import Then, Waitable, collectives
from composable_shard.dtensors import is_dtensor
from composable_shard.flat_param.entries import ParamEntry
from composable_shard.flat_param.full_values import FullValues
from composable_shard.flat_param.kept_classes import ClassNotes
from composable_shard.flat_param.kept_params import Kept, as_itself
from composable_shard.flat_param.local_shard import LocalShard
from composable_shard.flat_param.readers import Readers
from composable_shard.flat_param.sources import Source
from composable_shard.flat_param.storage import alloc_storage, free_storage
from composable_shard.flat_param.unsharded_params import LOCKED, UnshardedParams
from composable_shard.layout import round_up
from composable_shard.tensor import UnitLabel
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

    Attributes:
        label: Label of the unit, for messages.
    """

    _entry: ParamEntry
    _memory: Sequence[Tensor]  # the gathered outputs, and further memory of the class
    _parts: Sequence[Tensor]  # of the gathered outputs, one for each input, as bytes
    _outputs: tuple[Tensor, ...]  # these parts, as the class gets them

    def __init__(self, shard: LocalShard, extension: Extension, dtype: torch.dtype) -> None:
        self.shard, self._extension, self._dtype = shard, extension, dtype
        self.label = UnitLabel("?")
        # The memory that modules see, as bytes; empty until the parameter is made
        self.buffer = torch.empty(0, dtype=torch.uint8, device=shard.device)
        self.unversioned = self.buffer.data  # an alias of it
        ranks = shard.shard_group
        is_whole = ranks.size < ranks.group.size()
        group = ranks.group_of_this_rank() if is_whole else ranks.group
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
        self.unversioned.set_(self.buffer.untyped_storage())
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
            from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: PLC0415 -- few need it

            module = next(place.module() for *_, place in self._entry.slots if place is not None)
            policy = MixedPrecisionPolicy(self._dtype)
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

    def start(self, when: str) -> Waitable | None:
        """Start gathering; the parameter is valid after the wait, or at once on one rank."""
        what = f"the {when} gather of {self.label}"
        for each in self._memory:
            alloc_storage(each)
        wrapped, inputs, metadata = self._encode()
        sent = [each.view(-1).view(torch.uint8) for each in inputs]
        ranks, works = self.shard.shard_group, list[Waitable]()
        try:
            for part, own in zip(self._parts, sent, strict=True):
                if ranks.size == 1:
                    part.copy_(own)
                else:
                    works.append(
                        collectives.all_gather(part, own, ranks.group, what=what, is_of_step=True)
                    )
        except BaseException:
            for work in works:  # who frees the memory waits for the last one alone
                collectives.abandon(work)
            raise

        def fill() -> None:
            sent.clear()  # the gathers have read it
            param = self._entry.unsharded
            with torch.inference_mode(False), torch.no_grad(), as_itself(param):
                wrapped.fsdp_post_all_gather(self._outputs, metadata, self._dtype, out=param)

        if ranks.size == 1:
            fill()
            return None
        return Then(works, fill)

    def free(self) -> None:
        """Free all memory."""
        for each in self._memory:
            free_storage(each)


class ExtendedParams(UnshardedParams):
    """The one unsharded parameter, which its class makes from the gathered outputs."""

    _whole: Tensor

    def __init__(self, codec: Codec, readers: Readers) -> None:
        super().__init__(codec.buffer, codec.shard.layout, readers)
        self.codec = codec

    def build(self, entries: Sequence[ParamEntry]) -> None:
        """Make the parameter; also watch its inner tensors, which graphs may save instead."""
        self._whole = self.codec.make_param(entries[0])
        super().build(entries)
        param: Any = self.built[0]
        local = param._local_tensor if is_dtensor(param) else param
        if not isinstance(param, Kept):
            self.aliases = ClassNotes(param, self.readers)
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
        super().__init__(codec.shard, buffer, codec.unversioned, buffer, is_kept=is_kept)
        self.params = ExtendedParams(codec, self.readers)

    def _find_source(self) -> Source:
        """Take the codec, which the class has told what to send."""
        self.params.codec.label = self.label
        return self.params.codec

    def keep_with(self, keep: object) -> None:
        """Keep nothing of freed values: a gather of parts would need another encoding."""

    def _forget(self) -> None:
        super()._forget()
        if not self.is_kept:
            self.params.codec.free()

    def write_back(self, *, compares: bool = False) -> None:
        """Write nothing: see `check_can_write_back` of the parameters."""

    def keep_edits(self) -> bool:
        """Warn, and return False: edits of the class's own form can't be written back."""
        self.params.warn_of_edits("in forward")
        return False
