"""Give hooks of users the final gradients of a unit while the backward goes on.

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

from collections.abc import Iterator

from torch.autograd.graph import get_gradient_edge

from composable_shard.comm import FlagReduction
from composable_shard.flat_param import FlatParamHandle
from composable_shard.torch_private import will_run_node

_MAY_CHANGE = 2  # beside False: no rank used the parameter, and True


class EarlyGradients:
    """Handles with hooks whose gradients one backward publishes before it ends.

    See [Note: Early gradients].

    Attributes:
        pending: Handles whose reduction and flag reduction were started and not waited for.
        ready: Handles whose final gradients wait to be published, with their parameters' use.
    """

    def __init__(self, in_flight: list[FlagReduction]) -> None:
        """Begin with none.

        Args:
            in_flight: The tree's flag reductions that may not be finished.
        """
        self.pending: dict[FlatParamHandle, FlagReduction] = {}
        self.ready: list[tuple[FlatParamHandle, list[bool]]] = []
        self._in_flight = in_flight
        self._ages: dict[FlatParamHandle, int] = {}  # further reductions since the handle's own
        self._accumulated: dict[FlatParamHandle, set[int]] = {}
        self._delivered: dict[FlatParamHandle, int] = {}  # guard.num_writes before the hooks ran

    def is_final(self, handle: FlatParamHandle) -> bool:
        """Return whether all ranks know that no gradient of the handle is to come.

        So it stays if the backward reaches an earlier call of its unit.
        """
        return handle in self._delivered or any(ready is handle for ready, _ in self.ready)

    def note_accumulated(self, handle: FlatParamHandle, index: int) -> None:
        """Note that autograd has accumulated the gradient of parameter `index`."""
        self._accumulated.setdefault(handle, set()).add(index)

    def start(self, handle: FlatParamHandle, *, accumulates: bool, may_change: bool) -> None:
        """Start the flag reduction for a handle that is over and whose gradients are packed.

        One all-reduce of a byte for each parameter, and one more, for each process group.

        Args:
            handle: What is over.
            accumulates: Whether this rank accumulates gradients in this backward.
            may_change: Whether no gradient of it can be called final.
        """
        if may_change or (
            handle.is_kept and not handle.full.is_cast and handle.full.params.aliases.are_hidden
        ):
            statuses = [_MAY_CHANGE] * len(handle.entries)
        else:
            statuses = [
                _MAY_CHANGE if self._is_to_come(handle, index) else int(is_used)
                for index, is_used in enumerate(handle.grads.used)
            ]
        values = [(handle.shard_group, [int(accumulates), *statuses])]
        flags = FlagReduction(values, highest=_MAY_CHANGE)
        self._in_flight.append(flags)
        self.pending[handle] = flags
        self._ages[handle] = 0

    def _is_to_come(self, handle: FlatParamHandle, index: int) -> bool:
        """Return whether this backward is going to accumulate a gradient that it has not yet."""
        param = handle.entries[index].unsharded
        has_come = index in self._accumulated.get(handle, ())
        if param is None or not param.requires_grad or has_come:
            return False
        try:
            return will_run_node(get_gradient_edge(param).node)
        except RuntimeError:  # autograd.grad() with respect to the parameter
            return True

    def has_accumulating_rank(self, handle: FlatParamHandle) -> bool:
        """Return whether the flags of a handle say that any rank accumulates gradients; waits."""
        flags = self.pending.get(handle)
        if flags is None:
            return False
        accumulates, *_ = flags.finish()[0]
        if not accumulates:
            del self.pending[handle]
            self._in_flight.remove(flags)
        return bool(accumulates)

    def collect(self, *, is_ending: bool) -> None:
        """Wait for reductions and flags that had a unit's compute to run beside.

        Those with two stages get two, unless the backward is ending. [Note: Two stages]
        """
        for handle, flags in list(self.pending.items()):
            group = handle.shard_group
            self._ages[handle] += 1
            has_second_stage = group.size > 1 and bool(group.replicate_groups)
            if has_second_stage and self._ages[handle] == 1 and not is_ending:
                continue
            handle.grads.finish()
            _, *statuses = flags.finish()[0]
            del self.pending[handle]
            self._in_flight.remove(flags)
            if max(statuses) != _MAY_CHANGE:
                self.ready.append((handle, [bool(status) for status in statuses]))

    def publish(self) -> Iterator[FlatParamHandle]:
        """Publish the gradients that are ready; yield each handle when its hooks are to run."""
        ready, self.ready = self.ready, []
        for handle, used in ready:
            handle.grads.publish(used)
            # It may be written from here on: this backward does not need it any more.
            handle.guard.set_in_backward(False)
            self._delivered[handle] = handle.guard.num_writes
            yield handle

    def check_not_delivered(self, handle: FlatParamHandle, index: int) -> None:
        """Check that no hook has seen less than the whole gradient.

        Raises:
            RuntimeError: If a gradient arrives after the hooks have run, which only a backward
                nested in this one can make.
        """
        if handle in self._delivered:
            raise RuntimeError(
                f"a gradient of parameter '{handle.entries[index].label}' came after the hooks on "
                "its unit (register_post_accumulate_grad_hook) had run. Pass use_reentrant=False "
                "to torch.utils.checkpoint, and run no backward inside a backward."
            )

    def check_not_written(self, handles: list[FlatParamHandle]) -> None:
        """Check that what this backward computes again has the values of the forward.

        Raises:
            RuntimeError: If hooks have written parameters that are needed again.
        """
        for handle in handles:
            if self._delivered.get(handle, handle.guard.num_writes) != handle.guard.num_writes:
                raise RuntimeError(
                    f"unit '{handle.name}' is computed again in a backward whose hooks "
                    "(register_post_accumulate_grad_hook) have stepped its parameters. Checkpoint "
                    "units one by one, or step the optimizer after backward() has returned."
                )
