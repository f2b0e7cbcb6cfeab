"""Inspection of the full values that autograd saves, in forwards that are not known yet.

[Note: Aliases]
A gradient may take the place of its value once autograd is done with the parameter, see [Note:
Packing in place]. Autograd does not connect an alias that has a version counter of its own
(`w.t().data`) with the parameter, and would silently read the gradient through it. So a backward
packs in place only if every forward recorded the same number of nodes as one whose saved tensors
were inspected. Saved-tensor hooks inspect them in a unit's first forward, and in the one after a
forward with an unknown number of nodes. A unit with such an alias never packs in place again.

The hooks are Python, called for each saved tensor: too slow for every forward. Under the user's
saved-tensor hooks autograd compares no versions. There these hooks stay, and compare them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from composable_shard.flat_param import HIDDEN_ALIAS, LOCKED, FlatParamHandle, Kept
from composable_shard.tensor import FlatShard
from composable_shard.torch_private import (
    DisableTorchFunctionSubclass,
    GivingWay,
    base_of,
    begin_saved_tensors_hooks,
    checkpointed_region,
    current_node,
    end_saved_tensors_hooks,
    is_traceable_wrapper_subclass,
    modules_in,
    never_compile,
    saved_tensors_hooks_in_force,
    saved_tensors_hooks_refusal,
    top_saved_tensors_hooks,
    version_of,
)

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

LATE_READ = (
    "was read after its unit had freed it: return what the loss is computed from in the output of "
    "forward, or call unshard(module) before it"
)
_REFUSAL = (
    "Its first forwards have saved-tensor hooks of this library. It takes none from now on: call "
    "the model again, or from the beginning inside torch.autograd.graph."
    "disable_saved_tensors_hooks(reason)."
)
_CHECKPOINT = "torch.utils.checkpoint"
_PARAMS = FlatShard, Kept
_PLAIN = {bool, int, float, str, set, type(None)}  # types of most attributes of modules


class SavedValues:
    """Saved-tensor hooks of one call of a unit, on top of the hooks in force.

    They are there from `begin` to `end`, which an interrupt may cut off at any line: then `end` is
    called again.

    Args:
        known: Record of the unit's forwards.
        name: Name of the unit.
        handles: Handles whose full values the unit computes with.
        below: The hooks in force, which still get every tensor.
        others: The topmost hooks in force that are not of this class.
    """

    __slots__ = ("_below", "_extents", "_is_pushed", "_known", "_name", "others")

    def __init__(
        self,
        known: Inspection,
        name: str,
        handles: Sequence[FlatParamHandle],
        *,
        below: Hooks | None,
        others: Hooks | None,
    ) -> None:
        self._known, self._name = known, name
        self._below, self.others = below, others
        self._extents = _extents_of(handles)
        self._is_pushed = False

    def begin(self) -> None:
        """Push the hooks."""
        _giving_way.begin(id(self))
        begin_saved_tensors_hooks(self._pack, self._unpack, self._note(is_pushed=True))

    def _note(self, *, is_pushed: bool) -> Callable[[], object]:
        return partial(setattr, self, "_is_pushed", is_pushed)

    def leave(self) -> None:
        """Remove the hooks, and push none in later forwards: they are in the way.

        The forward counts as one whose saved tensors were not inspected.
        """
        self.end()
        self._known.forget_hooks()

    def end(self) -> None:
        """Remove the hooks, even from beneath others.

        A user's forward hooks may have pushed others, which they pop only after this.
        """
        _giving_way.end(id(self))
        if self._is_pushed:
            # After an interrupt the hooks below ended first and popped these instead of their own.
            below = None if self._below is None else self._below[0]
            end_saved_tensors_hooks(self._pack, self._note(is_pushed=False), instead=below)

    def _pack(self, tensor: Tensor) -> Any:
        is_value = self._look_at(tensor)
        # A node that saves its own output would keep itself alive.
        alias: Tensor | None = tensor if tensor.grad_fn is None else tensor.detach()
        if self._below is None:
            packed = alias
        else:
            packed, alias = self._below[0](tensor), alias if is_value else None
        return packed, alias, -1 if alias is None else version_of(alias), is_value

    def _unpack(self, saved: tuple[Any, Tensor | None, int, bool]) -> Tensor:
        packed, alias, version, is_value = saved
        is_valid = alias is None or version_of(alias) == version
        if is_valid or self.others is not None:
            found: Tensor = packed if self._below is None else self._below[1](packed)
            if is_valid or _addresses(found) != _addresses(alias):
                node = current_node() if is_value else None
                if isinstance(node, BackwardCFunction):
                    node.register_hook(self._copy_values)
                return found  # perhaps a copy made by other hooks
        assert alias is not None
        read = f" A full parameter of unit '{self._name}' {LATE_READ}." if is_value else ""
        with DisableTorchFunctionSubclass():  # a full parameter might stand for what modules show
            kind, found_version = f"{alias.dtype} {list(alias.shape)}", version_of(alias)
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{kind}] is at version {found_version}; expected version {version} "
            f"instead.{read}"
        )

    def _copy_values(self, gradients: tuple[Any, ...], _: Any) -> tuple[Any, ...] | None:
        """Return copies of the gradients of a user's function that are views of full values.

        Autograd may use these gradients after the values were overwritten or freed. From then on
        the unit keeps its hooks.
        """
        # Look where the values are now: the forward's may have been freed, and a gradient may lie
        # there.
        extents = _extents_of([handle for _, _, handle in self._extents])
        are_values = [
            any(start <= at < end for at in _addresses(each) for start, end, _ in extents)
            for each in gradients
        ]
        if not any(are_values):
            return None
        self._known.keeps_hooks = True
        pairs = zip(gradients, are_values, strict=True)
        return tuple(each.clone() if is_value else each for each, is_value in pairs)

    def _look_at(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in the unit's full values; note a hidden alias."""
        for address in _addresses(tensor):
            for start, end, handle in self._extents:
                if start <= address < end:
                    if handle.requires_grad and not _is_connected(tensor, handle):
                        handle.full.readers.add(HIDDEN_ALIAS)
                    return True
        return False


def _give_way() -> None:
    """Remove this module's hooks from the top: torch is about to refuse any, as in `torch.func`."""
    while (top := top_saved_tensors_hooks(False)) is not None:
        hooks = getattr(top[0], "__self__", None)
        if not isinstance(hooks, SavedValues):
            return  # a user's, with which a plain model is refused, too
        hooks.leave()


_giving_way = GivingWay(_give_way)

never_compile(SavedValues._pack)
never_compile(SavedValues._unpack)


def _extents_of(handles: Sequence[FlatParamHandle]) -> list[tuple[int, int, FlatParamHandle]]:
    """Return addresses `[start, end)` and handle of the full values that have memory."""
    return [
        (start := handle.full.unversioned.data_ptr(), start + handle.full.buffer.nbytes, handle)
        for handle in handles
        if handle.full.unversioned.untyped_storage().nbytes()
    ]


def _is_connected(tensor: Tensor, handle: FlatParamHandle) -> bool:
    """Return whether autograd links a saved tensor to its parameter.

    Then the parameter's gradient can't be final before the node that saved the tensor has run.
    """
    base = tensor if tensor.grad_fn is None else base_of(tensor)
    if base is None or base.grad_fn is not None:
        return True
    return any(base is param for param in handle.full.params.built)


def _addresses(tensor: Any) -> list[int]:
    """Return the address of a tensor's data; for a wrapper, of all tensors inside."""
    if tensor is None or isinstance(tensor, FlatShard):
        return []  # of a unit at rest; flattening it would count as a write
    if is_traceable_wrapper_subclass(tensor):
        inside = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [at for each in inside if isinstance(each, Tensor) for at in _addresses(each)]
    try:
        return [tensor.data_ptr()]
    except RuntimeError:  # tensors without storage
        return []


class Inspection:
    """What earlier forwards have shown about late readers of a unit's full values.

    A copy learns anew, except for `backward_hooks`.

    Attributes:
        backward_hooks: Users' hooks on its modules and on modules inside. They may read and write
            full parameters whose gradients have already arrived.
        keeps: Whether an inspected forward leaves tensors on modules, by number of nodes.
        hooks: The hooks of the running call, if any.
        late_output: What the last forward returned that may read values later; empty if nothing.
        is_watched: The next forward gets hooks.
        keeps_hooks: All forwards get hooks, because a user's function returned values as gradients.
        refuses_hooks: No forward gets hooks, because one failed with them.
    """

    __slots__ = (
        "backward_hooks",
        "hooks",
        "is_watched",
        "keeps",
        "keeps_hooks",
        "late_output",
        "refuses_hooks",
    )

    def __init__(self, backward_hooks: Sequence[Mapping[int, Any]] = ()) -> None:
        self.backward_hooks = backward_hooks
        self.keeps: dict[int, bool] = {}
        self.hooks: SavedValues | None = None
        self.is_watched = True
        self.refuses_hooks = self.keeps_hooks = False
        self.late_output = ""

    def __reduce__(self) -> Any:
        return Inspection, (self.backward_hooks,)

    def begin(self, name: str, handles: Sequence[FlatParamHandle], top: Hooks | None) -> bool:
        """Push hooks if this call of a unit needs them; return whether others are in force."""
        owner = None if top is None else getattr(top[0], "__self__", None)
        others = owner.others if isinstance(owner, SavedValues) else top
        # Under checkpointing versions need no check: it gathers the unit and runs it again.
        compares = others is not None and not _are_checkpoint(others)
        is_refused = self.refuses_hooks or saved_tensors_hooks_refusal() is not None
        if (
            (self.is_watched or self.keeps_hooks or compares)
            and not is_refused
            and frees_values(handles)
        ):
            self.hooks = SavedValues(self, name, handles, below=top, others=others)
            self.hooks.begin()
        return others is not None

    def end(self, name: str, error: BaseException | None) -> None:
        """Remove the hooks of a call; push none from then on if they made it fail."""
        hooks = self.hooks
        if hooks is None:
            return
        hooks.end()
        self.hooks = None  # after them: an interrupt leaves them to the next call
        is_refusal = hooks.others is None and "saved tensor hooks" in str(error)
        if isinstance(error, RuntimeError) and is_refusal and _REFUSAL not in str(error):
            error.args = (f"{error}\nThis was raised in unit '{name}'. {_REFUSAL}",)
        self.refuses_hooks |= is_refusal

    def forget_hooks(self) -> None:
        """Note that the running call has lost its hooks; push none from then on."""
        self.hooks = None
        self.refuses_hooks = True

    def set_late_output(self, what: str) -> None:
        """Note what the last forward returned that may read values later."""
        self.late_output = what

    def note(self, num_nodes: int, *, keeps: bool, is_looked_at: bool) -> None:
        """Note that a forward recorded a number of nodes that was unknown."""
        self.is_watched = not is_looked_at
        if is_looked_at:
            self.keeps[num_nodes] = keeps


def outermost_region(*, is_again: bool = False) -> Any:
    """Return what stands for the outermost non-reentrant region that runs (again), or None."""
    packs = [hooks[0] for hooks in saved_tensors_hooks_in_force() if _are_checkpoint(hooks)]
    found = [checkpointed_region(pack, is_again=is_again) for pack in reversed(packs)]
    return next((each for each in found if each is not None), None)


def _are_checkpoint(hooks: Hooks) -> bool:
    return getattr(hooks[0], "__module__", "") == _CHECKPOINT


def warn_of_late_read(unreached: Sequence[str]) -> None:
    """Warn after a failed backward: autograd's error names no unit, and its traceback comes later.

    Args:
        unreached: Units that the backward did not reach, in the order of their forwards. Nodes
            recorded last run first, so the last unit is the most likely to have read freed values.
    """
    if unreached:
        with suppress(Warning):  # a weakref callback can't raise
            warnings.warn(
                f"a backward failed before it reached unit '{unreached[-1]}'. If its error says "
                f"that a tensor is at version {LOCKED}, a full parameter, of this unit perhaps, "
                f"{LATE_READ}.",
                stacklevel=2,
            )


def refuse_views(name: str, views: Sequence[Tensor]) -> None:
    """Refuse views of a unit's full values that its forward keeps on modules.

    Raises:
        RuntimeError: If there are any; reading them later may crash the process.
    """
    if views:
        raise RuntimeError(
            f"the forward of unit '{name}' keeps views of full parameters on modules, of shapes "
            f"{[tuple(view.shape) for view in views]}. They lose their values when the unit frees "
            "them. Keep copies instead (`view.clone()`), or call unshard(module) before."
        )


def frees_values(handles: Sequence[FlatParamHandle]) -> bool:
    """Return whether values that a forward read may be freed or replaced before its backward."""
    return not all([handle.full.is_kept for handle in handles])


def kept_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors in attributes of modules, directly or in a container."""
    for each in modules_in(module):
        for item in list(vars(each).values()):
            if type(item) in _PLAIN:
                continue
            # The module's dicts of parameters and buffers are among the Mappings. A shard in them
            # is of no graph, nor is a full parameter, which might stand for one. Those of a class
            # of their own are the caller's to leave out.
            found = item if isinstance(item, (list, tuple)) else (item,)
            if isinstance(item, Mapping):
                found = list(item.values())
            for value in found:
                if isinstance(value, Tensor) and not isinstance(value, _PARAMS):
                    yield value
