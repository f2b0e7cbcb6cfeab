"""`WriteGuard`, which counts the writes to a flat parameter's shard and refuses some."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

from torch import Tensor
from torch.optim import Optimizer

from composable_shard.options import KEPT
from composable_shard.tensor.kept_wholes import KeptWholes
from composable_shard.torch_private import current_backward_id

_MAX_READS = 4  # noted copies; before a further one the oldest is waited for


# A step: the optimizer, and how many steps had been compared when it began.
Step = tuple["weakref.ref[Optimizer]", int]


class _Running(threading.local):
    """The steps that the thread is in.

    Attributes:
        steps: Another tuple for each.
        gathered_nbytes: What the running step has gathered at rest.
        num_gathers: How many operations it was for.
        numbers: Those that the running step has computed, [Note: Numbers of owners].
        wholes: Results of the running step, [Note: Kept wholes].
    """

    steps: tuple[Step, ...] = ()
    gathered_nbytes = num_gathers = 0

    def __init__(self) -> None:
        self.numbers: list[weakref.ref[Tensor]] = []
        self.wholes = KeptWholes()

    def add_gathered(self, nbytes: int) -> None:
        """Add to what the running step has gathered."""
        self.gathered_nbytes += nbytes
        self.num_gathers += 1

    def pop_gathered(self) -> tuple[int, int]:
        """Return what the step has gathered, and for how many operations; begin anew."""
        found = self.gathered_nbytes, self.num_gathers
        self.gathered_nbytes = self.num_gathers = 0
        return found


class _Compared:
    """How many steps the ranks have compared.

    No hook tells that a step has failed. So the backward that compares it ends it, on every rank
    the same one: what its thread writes later are edits.
    """

    number = 0


RUNNING = _Running()
COMPARED = _Compared()


def _no_one() -> None:
    return None


class WriteGuard:
    """Counts the writes to a handle's sharded parameters.

    Version counters can't serve: fused and foreach optimizer steps bump none.
    """

    __slots__ = (
        "_ask_shown",
        "_at_write",
        "_checksum",
        "_find_reader",
        "_has_edits",
        "_last_writer",
        "_note_hook",
        "_num_compared",
        "_num_steps",
        "_reads",
        "has_new_attributes",
        "is_handed_out",
        "is_in_backward",
        "num_writes",
        "owner",
        "refusal",
    )

    def __init__(self, owner: weakref.ref[object] | None = None) -> None:
        self.num_writes = self._num_compared = 0
        self._has_edits = False
        self._checksum = 0  # of full values that forwards have edited
        self._last_writer: object = None  # the steps that its thread was in
        self._num_steps: dict[weakref.ref[Optimizer], int] = {}
        self._reads: list[Callable[[], None]] = []  # each waits for one copy of the shard
        self._at_write: dict[str, Callable[[], None]] = {}  # by who has asked for the next write
        self.is_handed_out = False  # a program has got at the memory: [Note: Late reads]
        self.is_in_backward = False
        self.refusal = ""  # why writes are refused now, if they are
        self.has_new_attributes = True  # requires_grad or hooks, that the owner has not adopted
        self._find_reader: Callable[[], str] = str
        self._note_hook: Callable[[], object] = _no_one
        self._ask_shown: Callable[[], Callable[[], bool] | None] = _no_one
        self.owner = owner  # the handle; a unit that shares a parameter finds it here

    def let_ask_shown(self, ask: weakref.WeakMethod[Callable[[], bool]]) -> None:
        """Choose who says whether modules show the full parameters."""
        self._ask_shown = ask

    def let_find_reader(self, find: Callable[[], str]) -> None:
        """Choose who says which other unit's forward reads shards at rest, and what to do."""
        self._find_reader = find

    def explain_read(self) -> str:
        """Return what to do if a program reads a shard now in a graph; empty: nothing special."""
        ask = self._ask_shown()
        return KEPT if ask is not None and ask() else self._find_reader()

    def __deepcopy__(self, memo: object) -> None:
        """Return None: a copy belongs to no handle."""

    def note_write(self, fqn: str) -> None:
        """Count a write, before it happens.

        Raises:
            RuntimeError: If a backward pass that still needs the parameter is running, or where
                writes are refused.
        """
        if self.refusal:
            raise RuntimeError(f"parameter '{fqn}' was written in its sharded form {self.refusal}")
        if self.is_in_backward and self.is_backward_running:
            raise RuntimeError(
                f"parameter '{fqn}' was written while a backward pass that still needs it is "
                "running. Call optimizer.step() and edit parameters after backward() has returned."
            )
        self.num_writes += 1
        if RUNNING.steps is not self._last_writer:
            self._note_writer(RUNNING.steps)
        if self._reads:
            self.wait_for_reads()
        if self._at_write:
            self._run_at_write()

    @property
    def is_backward_running(self) -> bool:
        """Whether a backward that still needs the parameters is running, on the thread that asks.

        The flag stays set when a backward is aborted, so this also asks whether any backward runs.
        """
        return self.is_in_backward and current_backward_id() != -1

    def count_write(self, checksum: int = 0) -> None:
        """Count a write that the owner of the shard makes; the ranks compare a checksum."""
        self.num_writes += 1
        self._checksum += checksum
        if self._at_write:
            self._run_at_write()

    def _note_writer(self, steps: tuple[Step, ...]) -> None:
        self._last_writer = steps
        if not steps or steps[-1][1] != COMPARED.number:
            self._has_edits = True
        else:
            optimizer = steps[-1][0]
            self._num_steps[optimizer] = self._num_steps.get(optimizer, 0) + 1

    def pop_writes(self) -> tuple[dict[weakref.ref[Optimizer], int], bool, int, int]:
        """Return what was written since the last such call, for all ranks to compare.

        Returns:
            Steps of each optimizer, whether there are other writes, the number of all writes, the
            checksum of edits in forwards.
        """
        num_new = self.num_writes - self._num_compared
        found = self._num_steps, self._has_edits, num_new, self._checksum
        self._num_compared, self._has_edits, self._checksum = self.num_writes, False, 0
        self._last_writer, self._num_steps = None, {}
        return found

    def at_next_write(self, who: str, run: Callable[[], None]) -> None:
        """Set the function of a user that runs once, with the next write."""
        self._at_write[who] = run

    def _run_at_write(self) -> None:
        functions, self._at_write = self._at_write, {}
        for run in functions.values():
            run()

    def set_in_backward(self, flag: bool) -> None:
        """Choose whether a backward still needs the parameters."""
        self.is_in_backward = flag

    def refuse_writes(self, why: str) -> None:
        """Refuse writes from now on, by the end of a message; allow them again if it is empty."""
        self.refusal = why

    def set_new_attributes(self, are_new: bool) -> None:
        """Note whether there is requires_grad or a hook that the owner has not adopted."""
        self.has_new_attributes = are_new

    def let_note_hooks(self, note: Callable[[], object]) -> None:
        """Choose who notes that a parameter gets a hook on its final gradient."""
        self._note_hook = note

    def note_hook(self) -> None:
        """Note that a parameter gets a hook on its final gradient."""
        self._note_hook()

    def set_handed_out(self) -> None:
        """Note that a program may write to the memory without a note of it, from now on."""
        self.is_handed_out = True
        if self._reads:
            self.wait_for_reads()

    def add_read(self, wait: Callable[[], None]) -> None:
        """Note that a copy of the shard is to come: `wait` returns when it is done."""
        if len(self._reads) >= _MAX_READS:
            self._reads.pop(0)()
        self._reads.append(wait)

    def wait_for_reads(self) -> None:
        """Wait until no copy reads the shard, which is about to be written."""
        while reads := tuple(self._reads):
            for wait in reads:
                wait()
                # Not before: an interrupt of the wait leaves it to the next write.
                with suppress(ValueError):  # another thread has waited too, and was first
                    self._reads.remove(wait)
