"""Communication hooks that replace reductions.

[Note: Comm hooks]
The docstring of `register_comm_hook` says when a hook is called, and what it must do. The library
multiplies the sum of the first stage, [Note: Two stages], with `stage.scale`, so that a divide
factor counts with every hook, and microbatches that postpone the second stage need nothing special.
Until what a hook returned has been waited for, `gradient` and `output` stay as they are. On an
accelerator the hook and its `wait()` run on the reduce stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import collectives
from composable_shard.comm.algorithms import PendingReduction, ReduceScatter
from composable_shard.comm.devices import Then, Waitable
from composable_shard.comm.watch import explained


class StageKey:
    """Identifies one stage of one flat parameter: compared by identity, weakly referenceable."""


@dataclass(frozen=True, eq=False)
class ReductionStage:
    """The reduction that a comm hook performs, see `register_comm_hook`.

    Attributes:
        kind: `"reduce_scatter"` or `"all_reduce"`.
        gradient: This rank's term of the sum. For a reduce-scatter the unsharded gradient, shape
            `(padded_numel,)`, all parameters of a handle in the order of the layout, with zeros
            between: its r-th of `group.size()` parts goes to rank r of the group. For an all-reduce
            a shard, or with `NO_SHARD` the unsharded gradient. A hook may overwrite it.
        output: Receives the sum. For a reduce-scatter shape `(shard_numel,)`, perhaps this rank's
            part of `gradient`; its dtype may be wider than that of `gradient`. For an all-reduce
            `gradient` itself.
        group: The ranks to sum over.
        scale: The library multiplies the output by this factor afterwards. A part of the divisor
            may have been applied to the gradient before.
        key: The same object for a flat parameter and stage in every step. A hook may keep its own
            state by this key in a `weakref.WeakKeyDictionary`; it ends with the unit.
        numels: Elements of each rank's part of `gradient`, one part after another, if they differ;
            None if all are `gradient.numel() // group.size()`.
        unit: Name and number of the unit, for messages.
    """

    kind: Literal["reduce_scatter", "all_reduce"]
    gradient: Tensor
    output: Tensor
    group: dist.ProcessGroup
    scale: float
    key: StageKey
    numels: tuple[int, ...] | None = None
    unit: str = "a unit"

    @property
    def what(self) -> str:
        """What it is for, for messages."""
        return f"the reduction of {self.unit}"


CommHook = Callable[[Any, ReductionStage], Waitable | None]


class HookCall:
    """A comm hook with its first argument, in place of the collectives of a unit's reductions.

    Attributes:
        name: The hook's name, which the ranks compare.
    """

    def __init__(self, hook: CommHook, state: object) -> None:
        self._hook, self._state = hook, state
        self.name = str(getattr(hook, "__qualname__", type(hook).__qualname__))

    def reduce(self, stage: ReductionStage) -> Waitable:
        """Call the hook; return its work.

        A hook may call the backend's collectives, which carry no identity. So the ranks first
        exchange which stage the hook will reduce. [Note: First steps]
        """
        if self._hook is not then_call_hook:
            like = stage.gradient
            collectives.announce(stage.group, like.device, stage.kind, like.nbytes, stage.what)
        # A backward with create_graph enables gradients.
        with torch.no_grad(), explained(stage.group):
            work = self._hook(self._state, stage)
        if work is not None and not callable(getattr(work, "wait", None)):
            raise TypeError(
                f"expected the comm hook {self.name} to return None or an object with wait(), got "
                f"{work!r}"
            )
        return _HookWork(work, stage.group)

    def make_sum(
        self, *arguments: Any, gaps: Sequence[tuple[int, int]], before: ReduceScatter | None
    ) -> ReduceScatter:
        """Return a reduce-scatter that the hook performs.

        Args:
            arguments: Those of `ReduceScatter`.
            gaps: Ranges of its input that hold no gradient.
            before: The one that it replaces, if any, of the same flat parameter.
        """
        key = before.key if isinstance(before, _HookedSum) else StageKey()
        return _HookedSum(self, gaps, key, *arguments)


class _HookedSum(ReduceScatter):
    """A reduce-scatter that a comm hook performs."""

    def __init__(
        self, hook: HookCall, gaps: Sequence[tuple[int, int]], key: StageKey, *arguments: Any
    ) -> None:
        super().__init__(*arguments)
        self._hook, self._gaps, self.key = hook, gaps, key
        self.launch_group = None

    def scratch_parts(self, *, in_place: bool) -> int:
        """Return 0: a hook brings memory of its own."""
        return 0

    def start(
        self,
        output: Tensor,
        input: Tensor,
        scratch: Tensor | None,
        scale: float = 1.0,
        *,
        unit: str = "a unit",
    ) -> PendingReduction:
        """Let the hook start summing."""
        # The gaps were not packed, but a hook may quantise them with their neighbours.
        for start, end in self._gaps:
            input[start:end].zero_()
        group, numels = self._group, None if self._numels is None else tuple(self._numels)
        stage = ReductionStage(
            "reduce_scatter", input, output, group, scale, self.key, numels, unit
        )
        work = self._hook.reduce(stage)
        return PendingReduction(work, stage.output, stage.gradient, None, stage.scale)


class _HookWork:
    """A hook's work, whose errors say what the ranks do; None: it is done."""

    def __init__(self, work: Waitable | None, group: dist.ProcessGroup) -> None:
        self._work, self._group = work, group

    def wait(self) -> None:
        """Wait for it."""
        if self._work is not None:
            with explained(self._group):
                self._work.wait()


def then_call_hook(
    state: tuple[Callable[[Tensor], object], str], stage: ReductionStage
) -> Waitable:
    """Reduce as by default, then call a function with the mean.

    Args:
        state: The function, and the kind of stage after which it is called.
    """
    function, kind = state
    gradient, output, group = stage.gradient, stage.output, stage.group
    works: list[Waitable] = []
    reduction: PendingReduction | None = None
    if stage.kind == "all_reduce":
        works.append(collectives.all_reduce(gradient, group, what=stage.what))
    else:
        sums = ReduceScatter(group, gradient.dtype, gradient.device, stage.numels)
        num_parts = sums.scratch_parts(in_place=True)
        scratch = gradient.new_empty(num_parts * output.numel()) if num_parts else None
        reduction = sums.start(output, gradient, scratch, unit=stage.unit)

    def call() -> None:
        if reduction is not None:
            reduction.finish()
        if stage.kind == kind:
            output.mul_(stage.scale)
            function(output)
            output.div_(stage.scale)

    return Then(works, call)
