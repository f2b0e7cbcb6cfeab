"""One scope in which modules show full parameters: gather, show, write back, restore."""

from __future__ import annotations

import warnings
from contextlib import ExitStack, suppress
from itertools import compress, count
from typing import NamedTuple

import torch
from torch import Tensor, nn

from composable_shard.comm import Ranks, ShardGroup, list_ranks
from composable_shard.flat_param import (
    FlatParamHandle,
    ScopeParams,
    check_scope,
    drop_gradient,
    enter_scope,
    gradient_shard,
    has_gradients,
    keep_scope_flags,
    leave_scope,
    set_gradients,
)
from composable_shard.runtime import (
    ShardState,
    TrainingState,
    check_is_idle,
    lazy_init_params,
    tensor_groups,
)


class ScopeOptions(NamedTuple):
    """The flags of `unshard_params`."""

    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool


class FullParamsScope:
    """One `unshard_params` block."""

    def __init__(self, module: nn.Module, states: list[ShardState], options: ScopeOptions) -> None:
        lazy_init_params(module)
        self.options = options
        self.states = states
        # The handles shown, in order, each with its unit; for a borrowed parameter, the whole
        # handle that owns it.
        self.handles = list(dict.fromkeys(h for state in states for h in state.needed_handles))
        self.contexts = list(dict.fromkeys(s.context for s in states if s.context is not None))
        # Full parameters by handle; empty on ranks that show shards
        self.full: dict[FlatParamHandle, ScopeParams] = {}
        self.has_gradient: dict[FlatParamHandle, list[bool]] = {}

    # Open

    def open(self) -> None:
        """Gather and show; if anything fails, everything is as before."""
        for context in self.contexts:
            check_is_idle(context, "unshard_params can't be opened")
        for state in self.states:
            if any(handle.shown.scope for handle in state.needed_handles):
                raise RuntimeError(
                    f"unit '{state.name}' is shown by an unshard_params scope already. Read "
                    "and edit its parameters in that scope, or close it first."
                )
        for handle in self.handles:
            handle.shown.check_registered()
        with torch.inference_mode(False), torch.no_grad():
            if self.options.with_grads:
                self._compare_gradients()
            try:
                # One by one: a device that keeps no values holds one full flat parameter.
                for handle in self.handles:
                    self._gather(handle)
                    self._gather_gradients(handle)
                self._show()
            except BaseException:
                self._restore()
                raise

    def _compare_gradients(self) -> None:
        """Check that the ranks have gradients of the same parameters."""
        problem: RuntimeError | None = None
        for handle in self.handles:
            try:
                self.has_gradient[handle] = has_gradients(handle)
            except RuntimeError as error:
                problem = error
                self.has_gradient[handle] = [True] * len(handle.entries)
        for group, handles in _by_group(self.handles):
            flags = [flag for handle in handles for flag in self.has_gradient[handle]]
            entries = [entry for handle in handles for entry in handle.entries]
            # A rank with a problem sets both flags, so that the others raise too. A parameter that
            # another rank owns never has a gradient here.
            lacks = [
                problem is not None or not (flag or entry.spec.is_owned_by_other_rank)
                for flag, entry in zip(flags, entries, strict=True)
            ]
            both = group.ranks.any_of(flags + lacks)
            told = iter(both)
            for handle in handles:
                self.has_gradient[handle] = [bool(next(told)) for _ in handle.entries]
            labels = [entry.label for entry in entries]
            odd = [str(label) for i, label in enumerate(labels) if both[i] and both[i + len(flags)]]
            if odd and problem is None:
                raise RuntimeError(
                    f"the parameters {odd} have a gradient on some ranks and none on others. Set "
                    "or clear .grad alike on all ranks, for example with zero_grad()."
                )
        if problem is not None:
            raise problem

    def _gather(self, handle: FlatParamHandle) -> None:
        output = handle.shard.new_full()
        if handle.is_sharded and handle.full.is_current and not handle.full.is_cast:
            handle.full.wait()
            output.copy_(handle.full.buffer)
        else:
            handle.shard.gather_into(output, handle.shard.values)
        if self._keeps(handle):
            full = ScopeParams(handle.entries, handle.layout, self._to_host(output))
            self.full[handle] = full
            # `_gather_gradients` shows what is reduced.
            full.hide_gradients(
                handle.shown.at_rest,
                handle.grads.used if self.options.with_grads else [True] * len(handle.entries),
            )

    def _gather_gradients(self, handle: FlatParamHandle) -> None:
        if not any(self.has_gradient.get(handle, ())):
            return
        output, shard = handle.shard.new_full(), gradient_shard(handle)
        handle.shard.gather_into(output, shard)
        if self._keeps(handle):
            self.full[handle].show_gradients(self._to_host(output), self.has_gradient[handle])

    def _keeps(self, handle: FlatParamHandle) -> bool:
        """Return whether this rank keeps and shows full values."""
        return not self.options.rank0_only or handle.shard_group.is_first

    def _to_host(self, values: Tensor) -> Tensor:
        if not self.options.offload_to_cpu:
            return values
        # Copy even if the device is the CPU, so that scopes behave the same on all devices.
        return torch.empty_like(values, device="cpu").copy_(values)

    def _show(self) -> None:
        for state in self.states:
            state.transition(TrainingState.UNSHARDED_PARAMS)
        for handle in self.handles:
            enter_scope(handle.shown, self.full.get(handle))

    # Close

    def close(self, error: BaseException | None) -> None:
        """Write back if the body succeeded on all ranks; in any case show what was shown before."""
        try:
            with torch.inference_mode(False), torch.no_grad():
                problem = error or self._find_problem()
                if self.options.writeback:
                    dropped = self._agree(problem)
                    if problem is None:
                        self._write_back(dropped)
                    if isinstance(error, GeneratorExit):
                        warnings.warn(_CLOSED, stacklevel=4)
                if problem is not None and problem is not error:
                    raise problem
        finally:
            problem = None  # its traceback has this frame: a cycle that would keep the values
            self._restore()
        if self.options.writeback and error is None:
            self._refresh_held()

    def _refresh_held(self) -> None:
        """Gather the handles that `unshard` holds again, because modules show them again."""
        held = [handle for handle in self.handles if handle.full.readers.claims]
        try:
            for handle in held:
                if not handle.full.params.is_locked:
                    # Edits from before the scope were written back with the scope's.
                    handle.full.params.forget_edits()
                handle.unshard(self.contexts[0].streams)
                handle.full.wait()
        except BaseException:
            # Values that could not be gathered have no memory, and must not be shown.
            for handle in held:
                handle.shown.show_sharded()
            raise

    def _find_problem(self) -> Exception | None:
        try:
            for handle in self.handles:
                check_scope(handle.shown, handle.name)
            for full in self.full.values() if self.options.writeback else ():
                full.collect()
        except Exception as problem:  # of any kind: the other ranks wait for this rank's flags
            return problem
        return None

    def _agree(self, problem: BaseException | None) -> dict[FlatParamHandle, list[bool]]:
        """Exchange with the other ranks whether the body failed.

        Return, for each handle that shows gradients, which were set to None on any rank.
        """
        dropped = {handle: self._dropped_gradients(handle) for handle in self.has_gradient}
        failed: list[int] = []
        for group, handles in _by_group(self.handles):
            with_grads = [handle for handle in handles if handle in self.has_gradient]
            ranks = range(group.num_ranks)
            # Pass on failures known from an earlier group: not all of its ranks are in this one.
            knows = problem is not None or bool(failed)
            flags = [knows and rank == group.position for rank in ranks]
            for handle in with_grads:
                flags += self._dropped_gradients(handle)
            received = iter(group.ranks.any_of(flags, problem))
            told = [rank for rank in ranks if next(received)]
            failed = failed or told
            dropped |= {h: [bool(next(received)) for _ in h.entries] for h in with_grads}
        where = f"ranks {list_ranks(failed)} of its group" if failed else ""
        for mesh_group in tensor_groups(self.handles):
            # These ranks hold other parts of the same parameters, in other shard groups.
            flags = [problem is not None or bool(where)]
            device = self.handles[0].shard_group.device
            if Ranks([mesh_group], device).any_of(flags, problem)[0]:
                where = where or "another rank of the tensor-parallel mesh"
        if where and problem is None:
            raise RuntimeError(
                f"the body of unshard_params failed on {where}, so nothing was written back on any "
                "rank. Its own error tells why."
            )
        return dropped

    def _dropped_gradients(self, handle: FlatParamHandle) -> list[bool]:
        full = self.full.get(handle)
        return [False] * len(handle.entries) if full is None else full.dropped_gradients()

    def _write_back(self, dropped: dict[FlatParamHandle, list[bool]]) -> None:
        for handle in self.handles:
            full = self.full.get(handle)
            # Count it before: a scatter that fails may have written.
            handle.guard.count_write()
            values = None if full is None else self._to_send(full.buffer, handle)
            handle.shard.write_slice(
                handle.shard.values, values, from_first=self.options.rank0_only
            )
            del values
            if any(self.has_gradient.get(handle, ())):
                self._write_gradients(handle, dropped[handle])
            else:  # all that there is waits for a reduction
                for index in compress(count(), dropped.get(handle, ())):
                    drop_gradient(handle, index)
        self._warn_of_new_gradients()

    def _write_gradients(self, handle: FlatParamHandle, dropped: list[bool]) -> None:
        full = self.full.get(handle)
        grads = None if full is None else full.grad_buffer
        grads = None if grads is None else self._to_send(grads, handle)
        shard = gradient_shard(handle)
        handle.shard.write_slice(shard, grads, from_first=self.options.rank0_only)
        set_gradients(handle, shard, dropped)

    def _to_send(self, values: Tensor, handle: FlatParamHandle) -> Tensor:
        # Only a broadcast needs all values on the shard's device; otherwise a slice is copied.
        return values.to(handle.shard.device) if self.options.rank0_only else values

    def _warn_of_new_gradients(self) -> None:
        names = [name for full in self.full.values() for name in full.new_gradients()]
        if names:
            warnings.warn(
                f"the gradients that were set for {names} inside unshard_params are discarded: "
                "gradients are written back only where there was one, and with with_grads=True. "
                "Run a backward outside the scope.",
                stacklevel=6,
            )

    def _restore(self) -> None:
        try:
            self._restore_all()
        except BaseException:
            with suppress(RuntimeError):  # of expired parameters; all callbacks run
                self._restore_all()  # what an interrupt has left out
            raise

    def _restore_all(self) -> None:
        with ExitStack() as stack:  # runs all callbacks, even if one fails
            stack.callback(self.full.clear)
            for handle, full in self.full.items():
                stack.callback(full.expire)
                dropped = () if self.options.with_grads else full.dropped_gradients()
                for index in compress(count(), dropped):
                    stack.callback(drop_gradient, handle, index)
            for state in self.states:
                stack.callback(state.transition, TrainingState.IDLE)
            for handle in self.handles:
                stack.callback(leave_scope, handle.shown)
                stack.callback(keep_scope_flags, handle.shown)


_CLOSED = (
    "what was edited inside unshard_params is discarded: the generator that opened it was closed "
    "before the block had ended."
)


def _by_group(handles: list[FlatParamHandle]) -> list[tuple[ShardGroup, list[FlatParamHandle]]]:
    """Return the handles by the ranks that have them, in the order in which they appear."""
    groups: dict[object, tuple[ShardGroup, list[FlatParamHandle]]] = {}
    for handle in handles:
        group = handle.shard_group
        if group.joint_groups:
            key = tuple(joint.group_name for joint in group.joint_groups)
            groups.setdefault(key, (group, []))[1].append(handle)
    return list(groups.values())
