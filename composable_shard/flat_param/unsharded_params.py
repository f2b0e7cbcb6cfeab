"""`UnshardedParams`: the unsharded parameters, their versions, and the record of edits."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from operator import gt
from typing import Any

from torch import Tensor, nn

from composable_shard.dtensors import is_dtensor
from composable_shard.flat_param.entries import ParamEntry
from composable_shard.flat_param.param_classes import (
    EDIT_LATER,
    Aliases,
    KeptDTensor,
    NotBuiltParameter,
    UnshardedParameter,
    can_hold,
    hold_values,
    refuse_other_data,
)
from composable_shard.flat_param.readers import CONVERSION, HIDDEN_ALIAS, LATE_GRAPH, Readers
from composable_shard.layout import FlatLayout
from composable_shard.tensor import copy_attributes, share_attributes
from composable_shard.torch_private import (
    DisableTorchFunctionSubclass,
    post_accumulate_hooks_of,
    set_versions,
    version_of,
)

# The version of a parameter whose value is missing; no graph has saved this version. It is so large
# that it is recognised in autograd's error.
LOCKED = 1_000_000_000


def _is_edited_by_data(param: nn.Parameter) -> bool:
    """Return whether an alias that `param.data` gave was written to."""
    alias = param.shard_alias if isinstance(param, UnshardedParameter) else None
    return alias is not None and version_of(alias) != 0


def _alias_of(param: nn.Parameter) -> Tensor:
    """Return the parameter's data (of a DTensor: the local part) under its version counter."""
    with DisableTorchFunctionSubclass():  # [Note: Kept objects]
        alias = Tensor.detach(param)
    return alias.to_local() if is_dtensor(alias) else alias


def _make_unsharded(dense: Tensor, noted: tuple[object, Aliases, int]) -> nn.Parameter:
    """Return the parameter whose data is `dense`, a view of the buffer (or a DTensor of one)."""
    flag = dense.is_floating_point() or dense.is_complex()
    if not is_dtensor(dense):
        return UnshardedParameter(dense, flag, noted)
    from composable_shard.flat_param import unsharded_dtensors  # noqa: PLC0415 -- see there

    return unsharded_dtensors.make_unsharded(dense, flag, noted)


def _arrive(handle_ref: weakref.ref[Any], index: int, param: Tensor) -> None:
    """Pass a gradient that autograd has accumulated to its handle."""
    handle = handle_ref()
    if handle is None:
        return
    if not (handle.grads.is_direct and handle.grads.pack_direct(index, param)):
        handle.on_gradient(handle, index)


class UnshardedParams:
    """The unsharded parameters of a flat parameter, views of its unsharded buffer.

    Attributes:
        built: The unsharded parameters; empty before `build`.
        views: Dense data of the parameters, under their version counters.
        watched: `views`; for DTensors the parameters themselves.
        versions: Versions of `watched` while the values are there.
        locked: Versions of `watched` while the values are missing, see [Note: Locked versions].
        is_locked: The versions are `locked`, or were changed by gradients packed in place.
        version_writes: Write count at which `versions` was valid.
        flags: `requires_grad` of each parameter, as last adopted.
        has_unwatched: Some parameters, as DTensors, don't note in `aliases` that a flag was set.
        aliases: Notes that the parameters share.
        readers: Who may still read the values.
    """

    def __init__(self, buffer: Tensor, layout: FlatLayout, readers: Readers) -> None:
        self._buffer = buffer
        self._layout = layout
        self.readers = readers
        self._entries: Sequence[ParamEntry] = ()
        self.watched: tuple[Tensor, ...] = ()
        self.versions: list[int] = []
        self.flags: list[bool] = []
        self.has_unwatched = False
        self.aliases = Aliases(readers)
        self.built: tuple[nn.Parameter, ...] = ()
        self.views: list[Tensor] = []
        self.locked: tuple[int, ...] = ()
        self.is_locked = True
        self.version_writes = -1
        self._first_version = 0  # above those of the values that these replace

    def follow(self, before: UnshardedParams) -> None:
        """Let graphs that read the parameters before raise, as these hold other values."""
        self._first_version = max(before.versions, default=before._first_version) + 1

    def lock(self) -> None:
        """Make autograd raise where it would read the values, until `FullValues.wait`."""
        self.is_locked = True
        set_versions(self.watched, self.locked)

    def build(self, entries: Sequence[ParamEntry]) -> None:
        """Make the unsharded parameters of entries, trainable; the buffer must have memory."""
        self.readers.end(CONVERSION)
        self._entries, self.aliases = entries, Aliases(self.readers)
        for index, entry in enumerate(entries):
            noted = entry.label, self.aliases, index
            dense = self._view(index, entry)
            kept = entry.unsharded
            if isinstance(kept, NotBuiltParameter):
                # Before any function of torch takes it.
                kept.__class__ = UnshardedParameter  # type: ignore[assignment] # a base
            if kept is None or not can_hold(kept, dense):
                kept = entry.unsharded = _make_unsharded(dense, noted)
                entry.runs_hooks = False
            else:
                hold_values(kept, dense, noted)
            if isinstance(kept, UnshardedParameter | KeptDTensor):
                share_attributes(kept, entry.sharded)
            else:  # a class with FSDP2's methods, which has its tensors there
                copy_attributes(kept, entry.sharded)
        self.built = tuple(each.unsharded for each in entries if each.unsharded is not None)
        self.has_unwatched = not all(isinstance(each, UnshardedParameter) for each in self.built)
        self.views = self._aliases()
        self.watched = tuple(
            param if is_dtensor(param) else view
            for param, view in zip(self.built, self.views, strict=True)
        )
        self.locked = (LOCKED,) * len(self.built)
        self.versions = [self._first_version] * len(self.watched)
        set_versions(self.watched, tuple(self.versions))
        self.flags = [True] * len(self.built)

    def hook_gradients(self, handle: weakref.ref[Any]) -> None:
        """Hook the parameters, so that a handle gets each gradient that autograd accumulates."""
        self.aliases.handle = handle
        for index, param in enumerate(self.built):
            if param.is_floating_point() or param.is_complex():
                hook = partial(_arrive, handle, index)
                (post_accumulate_hooks_of(param) or {}).clear()  # of its former values
                Tensor.register_post_accumulate_grad_hook(param, hook)  # type: ignore[no-untyped-call]

    def _aliases(self) -> list[Tensor]:
        # Plain tensors: torch asks a subclass for `__torch_function__` in each call.
        return [_alias_of(param) for param in self.built]

    def set_flags(self, flags: Sequence[bool]) -> None:
        """Set `requires_grad`; autograd asks for it before it accumulates a gradient."""
        if any(map(gt, flags, self.flags)):
            self.readers.add(LATE_GRAPH)
        self.flags = list(flags)
        with DisableTorchFunctionSubclass():  # [Note: Kept objects]
            for param, flag in zip(self.built, flags, strict=True):
                Tensor.requires_grad_(param, flag)
        self.aliases.has_new_flags = False

    def changed_flags(self) -> dict[int, bool]:
        """Return `requires_grad` of the parameters that users froze or unfroze, by position."""
        found = [param.requires_grad for param in self.built]
        if found == self.flags:
            return {}
        pairs = enumerate(zip(found, self.flags, strict=True))
        return {index: flag for index, (flag, known) in pairs if flag is not known}

    def _view(self, index: int, entry: ParamEntry) -> Tensor:
        """Return a parameter's part of the buffer in its shape."""
        start = self._layout.offsets[index]
        # [Note: Storage and autograd]: .data gives each parameter its own version counter.
        flat = self._buffer.data[start : start + self._layout.numels[index]]
        return entry.spec.show(flat)

    def expire(self) -> None:
        """Make autograd raise where existing graphs would read the values."""
        self.versions = [version + 1 for version in self.versions]
        set_versions(self.watched, tuple(self.versions))

    def edited(self, versions: Sequence[int]) -> list[str]:
        """Return the names of parameters that were edited since they had these versions.

        Compares version counters, also of `param.data`. Edits through numpy arrays go unnoticed.
        """
        return [
            str(entry.label)
            for entry, param, version in zip(self._entries, self.built, versions, strict=False)
            if version_of(param) != version or _is_edited_by_data(param)
        ]

    def check_overwritten(self, expected: Sequence[int]) -> None:
        """Check that no parameter was edited while gradients overwrote values.

        `expected` has the versions of parameters without edits.
        """
        if names := self.edited(expected):
            self.readers.add(HIDDEN_ALIAS)
            raise RuntimeError(
                f"parameters {names} were edited in a backward in which gradients take the place "
                f"of values. {EDIT_LATER}"
            )

    def warn_of_edits(self, where: str) -> None:
        """Warn of edits that are about to be lost, once."""
        names = self.edited(self.versions)
        if names:
            self.forget_edits()
            warnings.warn(
                f"the edits of {names} {where} were not written back, so they are lost where full "
                "values are freed. Edit parameters inside unshard_params(module), or call "
                "writeback(module) before reshard(module).",
                stacklevel=3,
            )

    def forget_edits(self) -> None:
        """Note the current versions, so that edits made so far are no longer reported."""
        self.versions = [version_of(each) for each in self.watched]
        for param in self.built:
            if isinstance(param, UnshardedParameter):
                param.shard_alias = None

    def check_can_write_back(self) -> None:
        """Check that DTensors still are views of the buffer; other parameters refuse new data."""
        if self._buffer.is_meta or self._buffer.untyped_storage().size() == 0:
            return
        start = self._buffer.data_ptr()
        for entry, offset in zip(self._entries, self._layout.offsets, strict=False):
            address = start + offset * self._buffer.element_size()
            param = entry.unsharded
            is_view = not is_dtensor(param) or _alias_of(param).data_ptr() == address
            if not is_view and param is not None and param.numel():
                refuse_other_data(entry.label)
