"""What autograd reads of a unit's full values in a backward, and who announces it.

[Note: Reads]
The nodes that a unit's forward records read its weights in the backward. Mostly all of them lie
behind the unit's output, and a hook on that announces the unit before its first read. A loss that
the forward leaves elsewhere (on the module, in a list, in an object that nobody looks into) is read
without it. So while the forward runs, saved-tensor hooks take each saved view of full values for a
`Read`, which announces the unit as its output does, waits for the values, and only then gives the
view. Autograd runs nodes in descending order of their numbers, so [Note: End of a unit] holds for
a read as for an output. Other tensors that the unit saved announce it too: they may be the inputs
of a checkpoint inside it, which then runs a part of the forward again.

A saved view that autograd does not connect with its parameter is read when it will, so gradients
then leave the values alone, [Note: Packing in place].

These hooks are Python, called for each saved tensor: a third of all host time of a unit. They are
in force until two backwards in a row have read all that the forward saved, and have run no node
that the outputs do not lead to. They stay for good in a unit with such a node: a later loss may be
made of it alone. A forward that records another number of nodes than the known ones begins anew,
and so does a backward that failed.

What was learnt is not trusted: a read that nobody announced ends in an error of autograd, see
[Note: Locked versions].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import unwrap
from itertools import starmap
from types import CodeType, FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import disable_saved_tensors_hooks

from composable_shard.flat_param import LOCKED, FlatParamHandle
from composable_shard.tensor import FlatShard
from composable_shard.torch_private import (
    current_backward_id,
    current_node,
    is_traceable_wrapper_subclass,
    never_compile,
    next_sequence_nr,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_hooks_refusal,
    sequence_nr_of,
    top_saved_tensors_hooks,
    version_of,
)

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

_NUM_CLEAN_BACKWARDS = 2
_CHECKPOINT = "torch.utils.checkpoint"


class LearntReads:
    """What one unit has learnt of the reads of its full values.

    Attributes:
        is_trusted: The unit's outputs announce every read.
        num_nodes: How many nodes its forward may record so that this holds.
        num_uses: How many tensors may share the storage of its full values when a forward that
            recorded a number of nodes has ended, with none that is kept, [Note: Kept views].
        refuses_hooks: Its forward uses what saved-tensor hooks may not be in force for.
        reads_nothing: The user says that no backward reads any.
        is_changed: The last forward of a trusted unit recorded another number, and no backward
            has shown since whether this holds.
        runs_backwards: A node of it runs a backward of its own, as reentrant checkpoints do.
        searched: Numbers of nodes of forwards of which a backward has shown whether one does.
    """

    __slots__ = (
        "_num_clean",
        "_was_read_early",
        "is_changed",
        "is_trusted",
        "num_nodes",
        "num_uses",
        "reads_nothing",
        "refuses_hooks",
        "runs_backwards",
        "searched",
    )

    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        """Begin without knowledge of a unit of these modules, but for what their code says."""
        self.is_trusted = self.is_changed = self.reads_nothing = self.runs_backwards = False
        # Most modules of a unit share their class and code with another one.
        forwards = [(type(each), _forward_of(each)) for each in modules]
        apart = {(kind, id(forward)): (kind, forward) for kind, forward in forwards}
        self.refuses_hooks = any(starmap(_names_transforms, apart.values()))
        self.num_nodes: set[int] = set()
        self.num_uses: set[tuple[int, int]] = set()
        self.searched: set[int] = set()
        self._num_clean = 0
        self._was_read_early = False

    def fresh(self) -> LearntReads:
        """Return one that has learnt nothing, for a copy of the unit."""
        other = LearntReads()
        other.refuses_hooks, other.reads_nothing = self.refuses_hooks, self.reads_nothing
        return other

    @property
    def needs_nodes(self) -> bool:
        """Whether nodes beside the outputs would change anything."""
        return not (self.is_trusted or self._was_read_early)

    def learn(self, reads: CallReads) -> None:
        """Learn from a backward that has reached a call."""
        self.is_changed = False
        self._was_read_early |= reads.is_early
        if not reads.num_unread:
            self.searched.add(reads.num_nodes)
        if reads.is_early or reads.num_unread:
            self.begin_anew()
            return
        self.num_nodes.add(reads.num_nodes)
        self._num_clean += 1
        self.is_trusted = self._num_clean >= _NUM_CLEAN_BACKWARDS and not self._was_read_early

    def begin_anew(self, *, is_changed: bool = False) -> None:
        """Trust nothing until two more backwards have been seen."""
        self.is_trusted, self._num_clean = False, 0
        self.is_changed = is_changed

    def expect(self, *, reads_nothing: bool) -> None:
        """Take the user's word for whether backwards read nothing; watch the next two forwards."""
        self.reads_nothing = reads_nothing
        self.begin_anew()

    def learn_refusal(self, error: BaseException | None, name: str) -> None:
        """Take no hooks any more if a forward has failed because of them; say so in the error."""
        trace = None if error is None else error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        is_refusal = trace is not None and trace.tb_frame.f_code is _REFUSING_CODE
        if error is None or not is_refusal or _REFUSAL in str(error):
            return
        self.refuses_hooks = True
        error.args = (f"{error}\nThis was raised in unit '{name}'. {_REFUSAL}",)


def _forward_of(module: nn.Module) -> Any:
    """Return a module's forward, of a method its function, which its class shares."""
    forward: Any = module.forward
    return getattr(forward, "__func__", forward)


def _names_transforms(kind: type[nn.Module], forward: Any) -> bool:
    """Return whether a class's forward, or what it calls by name, names one of `torch.func`.

    Functions and methods are followed by their code, but for those of torch. What is called in
    another way shows at the first call, see `learn_refusal`.
    """
    pending = [forward]
    seen: set[CodeType] = set()
    while pending:
        function = unwrap(pending.pop())
        code = getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        names, known = _names_in(code), function.__globals__
        found = [known[name] for name in names if name in known]
        if any(value is torch for value in found) and "func" in names:
            return True
        if any(map(_is_of_transforms, found)):
            return True
        found += [getattr(kind, name, None) for name in names]
        pending += [
            value for value in found if isinstance(value, FunctionType) and _is_users(value)
        ]
    return False


def _names_in(code: CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names, *(name for each in inner for name in _names_in(each))}


def _is_of_transforms(value: object) -> bool:
    return value is torch.func or getattr(value, "__module__", None) == "torch.func"


def _is_users(function: FunctionType) -> bool:
    return not (function.__module__ or "").startswith("torch.")


_REFUSAL = (
    "In the first steps sharded units have saved-tensor hooks of their own, which find losses "
    "beside their outputs. This unit takes none from now on: call the model again."
)
_REFUSING_CODE = unwrap(disable_saved_tensors_hooks).__code__  # as torch.func does


def learn_anew(learnt: Mapping[str, LearntReads]) -> None:
    """Let units learn anew which reads their outputs announce, each by its name."""
    for each in learnt.values():
        each.begin_anew()


def warn_of_reads(learnt: Mapping[str, LearntReads]) -> None:
    """Warn after a failed backward if it may have failed at a read that nobody announced.

    Autograd's own error names neither the unit nor what to do.
    """
    changed = [name for name, each in learnt.items() if each.is_changed]
    if changed:
        warnings.warn(
            f"a backward failed, and the last forwards of units {changed} did not record what they "
            f"had recorded before. If the error speaks of a tensor at version {LOCKED}, a loss was "
            "computed with their parameters that their outputs do not lead to. Later forwards look "
            "for it; to be right in the first one, return it from the forward.",
            stacklevel=2,
        )


def warn_at_once(learnt: Mapping[str, LearntReads]) -> None:
    """Do what a failed backward asks for, where nothing can be raised: a warning as an error."""
    with suppress(Warning):
        warn_of_reads(learnt)
        learn_anew(learnt)


class CallReads:
    """The reads that one call of a unit leaves to backwards.

    Attributes:
        learnt: The unit's.
        num_reads: How many there are.
        num_unread: How many no backward has made yet.
        num_nodes: How many nodes the call recorded.
        is_early: One came before the unit's output was reached, or a backward has run a node of
            the call that no output leads to.
        saved: Numbers of the nodes that have saved tensors; None where this is known of the unit.
        beside: Those that no output leads to, or perhaps none does.
        num_found: How many nodes were found behind the outputs.
    """

    __slots__ = (
        *("beside", "is_early", "learnt", "num_found", "num_nodes", "num_reads"),
        *("num_unread", "saved"),
    )

    def __init__(self, learnt: LearntReads) -> None:
        self.learnt = learnt
        self.saved: set[int] | None = set() if learnt.needs_nodes else None
        self.beside: set[int] = set()
        self.num_reads = self.num_unread = self.num_nodes = self.num_found = 0
        self.is_early = False

    def __del__(self) -> None:
        _num_found[0] -= self.num_found

    def note_outputs(self, name: str, outputs: Sequence[Tensor], first: int) -> bool:
        """Find the nodes beside the outputs: a loss of them alone may come in any later step.

        Return whether one behind them may run a backward, which reads what has its gradient.

        Args:
            first: Number of the first node of the call.
        """
        if self.num_reads and self.learnt.reads_nothing:
            raise RuntimeError(
                f"the forward of unit '{name}' saved full parameters for its backward, which "
                "set_unshard_in_backward(module, False) leaves without them. Call it with True."
            )
        self.is_early |= not outputs  # nothing but reads announces it, on this rank perhaps none
        if not self.saved and self.num_nodes in self.learnt.searched:
            return False
        numbers, has_functions = _search(outputs, first)
        self.num_found = len(numbers)
        _num_found[0] += self.num_found
        self.beside, self.saved = (self.saved or set()) - numbers, None
        return has_functions and self.num_nodes not in self.learnt.searched


# Torch 2.13 and 2.15 free a chain of nodes that Python has seen by a C++ call in a call: 40,000 of
# them overflow a stack of 8 MB.
_MOST_FOUND = 25_000
_num_found = [0]  # in graphs that may still live


def _search(outputs: Sequence[Tensor], first: int) -> tuple[set[int], bool]:
    """Return the numbers of the nodes behind outputs, and whether some may be a user's functions.

    Those that would be too many together with what was found before are left out.
    """
    nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen, has_functions, numbers = set(nodes), False, set[int]()
    while nodes:
        node = nodes.pop()
        number = sequence_nr_of(node)
        if number < first:
            continue
        if _num_found[0] + len(numbers) >= _MOST_FOUND:
            return numbers, True
        numbers.add(number)
        has_functions |= isinstance(node, BackwardCFunction)
        if node.name() == "CopySlices":
            numbers.add(number - 1)  # the operation in place, which it holds
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                nodes.append(before)
    return numbers, has_functions


class Announcement(Protocol):
    """Announces one call of a unit to the backward that is about to read its full values."""

    reads: CallReads | None

    @property
    def name(self) -> str:
        """The unit's."""

    def announce_read(self) -> None:
        """Gather the unit's full values and wait for them; called before each read."""


class Read:
    """Stands for a view of full values in what autograd has saved.

    Args:
        announcement: Of the call that saved it.
    """

    __slots__ = ("_announcement", "_reads")

    def __init__(self, announcement: Announcement) -> None:
        self._announcement = announcement
        self._reads = announcement.reads
        if self._reads is not None:
            self._reads.num_reads += 1
            self._reads.num_unread += 1

    @property
    def name(self) -> str:
        """The unit's."""
        return self._announcement.name

    def announce(self) -> None:
        """Announce the unit to the backward that is about to use the view."""
        self._announcement.announce_read()
        if self._reads is not None:
            self._reads.num_unread -= 1
            self._reads = None


class ReadHooks:
    """Saved-tensor hooks for one call of a unit.

    Args:
        announcement: Of the call.
        extents: Addresses `[start, end)` of the unit's full values, and of which handle they are.
        outer: The hooks of a call around this one, which may read its own values in here.
        others: Hooks of somebody else that are in force, as for activation checkpointing. They
            still get every tensor, in the same order.
    """

    __slots__ = ("_extents", "announcement", "calls", "others")

    def __init__(
        self,
        announcement: Announcement,
        extents: Sequence[tuple[int, int, FlatParamHandle]],
        outer: ReadHooks | None,
        others: Hooks | None,
    ) -> None:
        self.announcement = announcement
        self._extents = [(*extent, announcement) for extent in extents]
        self._extents += [] if outer is None else outer._extents
        self.others = others
        # What is known of the reads of this call and of those around it
        self.calls: list[CallReads] = [] if outer is None else outer.calls
        if announcement.reads is not None:
            self.calls = [announcement.reads, *self.calls]

    @property
    def pair(self) -> Hooks:
        """The two functions that autograd calls."""
        return self._pack, _unpack

    def _pack(self, tensor: Tensor) -> Any:
        announcement = self._find(tensor)
        number = next_sequence_nr() - 1  # of the node that saves: none is made before it has
        for call in self.calls:
            if call.saved is not None:
                call.saved.add(number)
        version, unpack, packed = -1, None, tensor
        if self.others is not None:
            pack, unpack = self.others
            packed = pack(tensor)
        else:
            if tensor.grad_fn is not None:
                # A node that saves its own output would keep itself alive.
                packed = tensor.detach()
            version = version_of(packed)
        read = None if announcement is None else Read(announcement)
        return packed, version, unpack, read, number, self

    def _find(self, tensor: Tensor) -> Announcement | None:
        for address in _addresses(tensor):
            for start, end, handle, announcement in self._extents:
                if start <= address < end:
                    is_known = tensor.grad_fn is not None or isinstance(tensor, nn.Parameter)
                    if not is_known and handle.requires_grad:
                        handle.full.params.note_hidden_alias()
                    return announcement
        return None


def _unpack(saved: tuple[Any, int, Any, Read | None, int, ReadHooks]) -> Tensor:
    packed, version, unpack, read, number, hooks = saved
    for call in hooks.calls:
        if number in call.beside:
            call.is_early = True
    if read is not None:
        read.announce()
        if isinstance(node := current_node(), BackwardCFunction):
            node.register_hook(partial(_copy_values, hooks))
    elif current_backward_id() != -1:
        # Perhaps an input of a checkpoint, which then runs a part of the unit again.
        hooks.announcement.announce_read()
    if unpack is not None:
        return unpack(packed)  # type: ignore[no-any-return]
    _check_version(packed, version, "" if read is None else f" of unit '{read.name}'")
    return packed  # type: ignore[no-any-return]


def _copy_values(hooks: ReadHooks, gradients: tuple[Any, ...], _: Any) -> tuple[Any, ...] | None:
    """Return copies of the gradients of a user's function that are views of full values.

    They may be used when another gradient has taken the place of the values, or these are freed.
    The calls of such a unit have hooks for good.
    """
    outputs = [each[2].full.output for each in hooks._extents]
    outputs = [each for each in outputs if each.untyped_storage().nbytes()]
    fulls = [(each.data_ptr(), each.nbytes) for each in outputs]
    are_values = [
        each is not None
        and any(0 <= at - start < size for at in _addresses(each) for start, size in fulls)
        for each in gradients
    ]
    if not any(are_values):
        return None
    for call in hooks.calls:
        call.is_early = True
    pairs = zip(gradients, are_values, strict=True)
    return tuple(each.clone() if is_value else each for each, is_value in pairs)


never_compile(ReadHooks._pack)
never_compile(_unpack)


def _check_version(tensor: Tensor, expected: int, whose: str) -> None:
    """Do what autograd does where no hooks are in force."""
    version = version_of(tensor)
    if version != expected:
        raise RuntimeError(
            f"one of the variables{whose} needed for gradient computation has been modified by an "
            f"inplace operation: [{tensor.dtype} {list(tensor.shape)}] is at version {version}; "
            f"expected version {expected} instead."
        )


def _addresses(tensor: Tensor) -> list[int]:
    """Return where the data of a tensor is, of a wrapper that of all tensors inside."""
    if isinstance(tensor, FlatShard):
        return []  # of a unit at rest; to take it apart would count as a write
    if is_traceable_wrapper_subclass(tensor):
        inside = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [at for each in inside if isinstance(each, Tensor) for at in _addresses(each)]
    try:
        return [tensor.data_ptr()]
    except RuntimeError:  # tensors without storage
        return []


class CallHooks:
    """Which saved-tensor hooks are in force during one call of a unit.

    `own` is None where all its reads are announced, or others may not be used.
    """

    __slots__ = ("_below", "_outer", "own")

    def __init__(self, own: ReadHooks | None, outer: ReadHooks | None) -> None:
        """Put `own` in force, in the place of those of the call around, which are on top."""
        self.own, self._outer = own, outer
        if outer is not None:
            pop_saved_tensors_hooks()
        self._below = top_saved_tensors_hooks(False)
        if own is not None:
            push_saved_tensors_hooks(*own.pair)

    def end(self) -> None:
        """Put in force what was before the call, beneath what was put in force since.

        Hooks that a user's forward hooks put in force are there until those end, after this.
        """
        above: list[Hooks] = []
        lowest = self._below if self.own is None else self.own.pair
        while (top := top_saved_tensors_hooks(False)) is not None:
            is_lowest = lowest is not None and top[0] == lowest[0]
            if is_lowest and self.own is None:
                break
            pop_saved_tensors_hooks()
            if is_lowest:
                break
            above.append(top)
        else:
            # After an interrupt those beneath have ended first, and taken these out for their own.
            below = None if self.own is None else self._below
            above = [pair for pair in above if below is None or pair[0] != below[0]]
        if self._outer is not None:
            push_saved_tensors_hooks(*self._outer.pair)
        for pair in reversed(above):
            push_saved_tensors_hooks(*pair)


def choose_hooks(
    learnt: LearntReads, top: Hooks | None
) -> tuple[bool, ReadHooks | None, Hooks | None]:
    """Return whether a call needs hooks of its own, those of the call around, those of others."""
    owner = None if top is None else getattr(top[0], "__self__", None)
    outer = owner if isinstance(owner, ReadHooks) else None
    others = top if outer is None else outer.others
    if saved_tensors_hooks_refusal() is not None:
        return False, None, others
    if learnt.refuses_hooks:
        return False, outer, others
    # Checkpointing gathers a unit to run its forward again. What others saved, and when, nobody
    # knows; nor does autograd compare versions where there are hooks.
    is_known = others is None or others[0].__module__ == _CHECKPOINT
    return not (learnt.is_trusted and is_known), outer, others
