"""What stands in for a collective of a reduction: a user's hook, and what it is called with.

[Note: Comm hooks]
A reduction has up to two stages, [Note: Two stages]: a reduce-scatter over the shard group, and an
all-reduce over each group of ranks that hold copies. A hook is called for each of them in its
place, `hook(state, stage)`, and writes the *sum* over `stage.group` into `stage.output`. The
library divides: it multiplies the first stage's sum with `stage.scale`, so that a divide factor
counts with every hook, and microbatches whose second stage is put off need nothing special.

It may return None, when the output is written, or an object with `wait()`, after which it is: the
backward goes on in between, and `gradient` and `output` stay as they are until then. On an
accelerator both run on the reduce stream. What it raises comes out of `backward()`, and is treated
as an error of a collective: the gradients of this backward are dropped as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard._collectives import Waitable, abandon

__all__ = ["CommHook", "HookedReduction", "ReductionStage", "StageKey", "call_hook"]


class StageKey:
    """Stands for one stage of one flat parameter: for weak references, compared by identity."""


@dataclass(frozen=True, eq=False)
class ReductionStage:
    """What a comm hook does the work of, see `register_comm_hook`.

    Attributes:
        kind: `"reduce_scatter"` or `"all_reduce"`.
        gradient: What this rank adds. For a reduce-scatter the unsharded gradient, shape
            `(padded_numel,)`, all parameters of a handle in the order of the layout, with zeros
            between: its r-th of `group.size()` parts goes to rank r of the group. For an
            all-reduce a shard, or with `NO_SHARD` the unsharded gradient. A hook may overwrite it.
        output: Where the sum goes. For a reduce-scatter shape `(shard_numel,)`, perhaps this rank's
            part of `gradient`; its dtype may be a wider one than that of `gradient`. For an
            all-reduce `gradient` itself.
        group: The ranks to sum over.
        scale: What the library multiplies the output with afterwards. The gradient may have been
            multiplied with some of the divisor before.
        key: The same for a flat parameter and stage in every step, for what a hook keeps of it:
            in a `weakref.WeakKeyDictionary` it goes when the unit does.
        numels: Elements of each rank's part of `gradient`, one part behind the other from its
            start, where they differ; None where all are `gradient.numel() // group.size()`.
    """

    kind: Literal["reduce_scatter", "all_reduce"]
    gradient: Tensor
    output: Tensor
    group: dist.ProcessGroup
    scale: float
    key: StageKey
    numels: tuple[int, ...] | None = None


CommHook = Callable[[Any, ReductionStage], Waitable | None]


class _Done:
    """What there is to wait for where a hook returned None."""

    def wait(self) -> None:
        """Return at once."""


def call_hook(hook: CommHook, state: object, stage: ReductionStage) -> Waitable:
    """Call a hook; return what to wait for.

    Raises:
        TypeError: If the hook returned something else than None or an object with `wait()`.
    """
    # A backward with create_graph enables gradients.
    with torch.no_grad():
        work = hook(state, stage)
    if work is None:
        return _Done()
    if not callable(getattr(work, "wait", None)):
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        raise TypeError(
            f"expected the comm hook {name} to return None or an object with wait(), got {work!r}"
        )
    return work


class HookedReduction:
    """A reduce-scatter that a hook does; `finish` must be called before its output is read."""

    def __init__(self, work: Waitable, stage: ReductionStage) -> None:
        self._work = work
        self._stage = stage

    def finish(self) -> Tensor:
        """Wait for the hook and return its output, scaled, shape `(shard_numel,)`."""
        self._work.wait()
        output, scale = self._stage.output, self._stage.scale
        return output if scale == 1.0 else output.mul_(scale)

    def abandon(self) -> None:
        """Wait until the buffers are free for other use; errors of the hook are ignored."""
        abandon(self._work)
