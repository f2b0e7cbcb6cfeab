"""Hooks on gradients that run before the backward ends.

[Note: Early gradients]
A hook that `register_post_accumulate_grad_hook` put on a sharded parameter may step an optimizer
and drop the gradient. To save memory it must run as soon as the unit is over. So when the reduction
of a unit with such hooks starts, a flag reduction of a byte for each parameter starts too. When the
next unit's reduction has started, all ranks publish the unit's gradients and run the hooks: at the
same point of the same order of collectives, for a hook may issue some itself. The byte says whether
a rank used the parameter, or that its gradient may not be final: autograd is going to accumulate
more, a forward still runs, or a nested backward may come. In that case the unit's gradients are
published at the end of the backward, as all others are.

Ranks may have hooks on different parameters. They agree on the units that have any when they
compare their models, at the first forward. Hooks that are put on other units later run at the end
of the backward. An exception in a hook is raised at the end too: all ranks finish the backward, no
further hook runs, and all gradients are published.
"""

from __future__ import annotations

from typing import ClassVar

from torch.autograd.graph import get_gradient_edge

from composable_shard.comm import FlagReduction
from composable_shard.flat_param import HIDDEN_ALIAS
from composable_shard.runtime.phases import Phase
from composable_shard.runtime.reduction_queue import Ending, Item, Order, ReductionQueue
from composable_shard.runtime.stage import DELIVERED, EARLY, FINAL
from composable_shard.runtime.unit import ShardState
from composable_shard.torch_private import (
    DisableTorchFunctionSubclass,
    current_backward_id,
    will_run_node,
)

_MAY_CHANGE = 2  # a flag of early gradients


class EarlyHooks(Order):
    """Gradients with hooks: published before the backward ends, [Note: Early gradients]."""

    place: ClassVar[int] = 2
    is_watching: ClassVar[bool] = True
    may_be_ordered: ClassVar[bool] = False
    is_due_at_end: ClassVar[bool] = False

    def __init__(self, queue: ReductionQueue) -> None:
        super().__init__(queue)
        self._flagged: dict[Item, _Flags] = {}  # with flags in flight
        self._final: list[tuple[Item, list[bool]]] = []  # with the parameters that get a gradient
        self._num_writes: dict[Item, int] = {}  # of those delivered, before their hooks ran

    def take(self) -> None:
        """Become the order of the handles with hooks."""
        for handle, item in self.queue.items.items():
            if handle.shown.has_early_hooks:
                item.order, item.is_counted = self.weak, True

    def precede(self, item: Item) -> None:
        """Collect the handles that are final; start the flags of one that is over.

        One all-reduce for each process group: a byte for each parameter, and one more.
        """
        # Before any return: all ranks count here how many units have ended. The rest is packed
        # before `used` is read. Flags are entered in the context before they are waited for: an
        # interrupt leaves them to `return_to_idle`.
        self.collect()
        queue, state, handle = self.queue, item.state, item.handle
        if not handle.shown.has_early_hooks or item.stage in EARLY:
            return
        handle.grads.pack_rest(may_overwrite=not item.keeps_values)
        is_due = state.settings.is_last_backward and not item.is_deferred
        if queue.is_ending or not is_due:
            return
        full, used = handle.full, handle.grads.used
        graphs = queue.context.graphs
        if (
            state.ref in graphs.may_recompute
            or not full.readers.may_free
            or current_backward_id() != graphs.last_backward_id
            or (full.is_kept and not full.is_cast and full.readers.bits & HIDDEN_ALIAS)
        ):
            statuses = [_MAY_CHANGE] * len(used)
        else:
            statuses = [
                _MAY_CHANGE if _will_change(item, index) else int(now)
                for index, now in enumerate(used)
            ]
        values = [int(queue.brings_gradients), *statuses]
        flags = FlagReduction([(handle.shard_group, values)], highest=_MAY_CHANGE)
        queue.context.flag_reductions.append(flags)
        if not queue.brings_gradients:
            queue.brings_gradients = flags.finish()[0][0] > 0
        if queue.brings_gradients:
            self._flagged[item] = _Flags(flags)

    def collect(self, ending: Ending | None = None) -> None:
        """Wait for reductions and flags that have overlapped with a unit's compute.

        Two-stage reductions get two units, unless the backward is ending. [Note: Two stages]
        """
        if not self._flagged:
            return
        self.queue.end_last()
        flagged, self._flagged = self._flagged, {}
        for item, sent in flagged.items():
            sent.num_ended += 1
            group = item.handle.shard_group
            has_second_stage = group.size > 1 and bool(group.replicate_groups)
            if has_second_stage and sent.num_ended == 1 and not self.queue.is_ending:
                self._flagged[item] = sent
                continue
            item.handle.grads.add_result()
            _, *statuses = sent.flags.finish()[0]
            if max(statuses) != _MAY_CHANGE:
                item.stage = FINAL
                self._final.append((item, list(map(bool, statuses))))

    def follow(self) -> None:
        """Publish what is final, once the next unit's reduction was issued."""
        if self._final:
            self.deliver()

    def deliver(self, ending: Ending | None = None) -> None:
        """Publish the gradients that are final, and run their hooks."""
        final, self._final = self._final, []
        for item, used in final:
            handle = item.handle
            handle.grads.publish(used)
            # Allow writes from here on: this backward no longer needs the parameters.
            handle.guard.set_in_backward(False)
            item.stage, self._num_writes[item] = DELIVERED, handle.guard.num_writes
            self.queue.run_hooks(item)

    def recompute(self, state: ShardState) -> None:
        """Check that hooks have not changed parameters with which a forward runs again."""
        for handle in state.needed_handles:
            item = self.queue.items.get(handle)
            if item is None or item.stage is not DELIVERED:
                continue
            if self._num_writes[item] != handle.guard.num_writes:
                raise RuntimeError(
                    f"unit '{handle.name}' is computed again in a backward whose hooks "
                    "(register_post_accumulate_grad_hook) have stepped its parameters. Checkpoint "
                    "units one by one, or step the optimizer after backward() has returned."
                )

    acts: ClassVar = {Phase.COLLECT: collect, Phase.DELIVER: deliver}


class _Flags:
    """Flags in flight of a handle that is over, and how many handles have ended since."""

    __slots__ = ("flags", "num_ended")

    def __init__(self, flags: FlagReduction) -> None:
        self.flags, self.num_ended = flags, 0


def _will_change(item: Item, index: int) -> bool:
    """Return whether this backward has yet to accumulate the gradient of a parameter."""
    param = item.handle.entries[index].unsharded
    with DisableTorchFunctionSubclass():  # "Note: Kept objects"
        if param is None or not param.requires_grad or index in item.counted:
            return False
        try:
            return will_run_node(get_gradient_edge(param).node)
        except RuntimeError:  # autograd.grad() with respect to the parameter
            return True
