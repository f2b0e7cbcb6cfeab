"""Functions that users call on sharded modules between and around steps.

Settings, pending gradients (show them, reduce them now, drop them), and methods other than forward
that gather a unit, as forward does.

[Note: Forward methods]
A unit is gathered by hooks of its module, which only a call of the module runs. So a registered
method runs as such a call, in which it takes the place of forward until it begins: hooks of users
run too, and whatever looks at the calls that are running sees one. What stands for the method in
the module's dictionary leads back to the module weakly, and copies lead to copies.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from composable_shard.comm import CommHook, FlagReduction
from composable_shard.flat_param import (
    FlatParamHandle,
    drop_pending,
    keep_left_gradients,
    needs_reduction,
    pending_values,
    settle_pending,
    settled,
)
from composable_shard.options import ReshardAfterForward, check_reshard_after_forward
from composable_shard.runtime import (
    ShardState,
    TrainingState,
    apply_policy,
    check_is_idle,
    first_names,
    get_states,
    is_sharded,
    lazy_init,
    managed_params,
    note_setting,
    release_handle,
    select_states,
)
from composable_shard.torch_private import COMPILED_CALL, never_compile


class UnshardWork:
    """A gather that `unshard(async_op=True)` started."""

    def __init__(self, states: list[ShardState]) -> None:
        self._states = states

    def wait(self) -> None:
        """Wait for the gather; from then on the modules show their full parameters."""
        _check_not_in_scope(self._states)
        states, self._states = self._states, []
        for state in states:
            _show_unsharded(state)


def unshard(
    module: nn.Module, *, recurse: bool = False, async_op: bool = False
) -> UnshardWork | None:
    """Gather the full parameters and keep them until `reshard`.

    The module shows them as plain parameters; a forward or backward in between needs no gather.
    Edits to them are lost at `reshard` (with a warning) unless `writeback` is called before. One
    all-gather for each handle; a second call does nothing.

    Args:
        module: A sharded module.
        recurse: Also the units below `module`, which need not be sharded itself.
        async_op: Return at once with an object whose `wait()` must be called before use.

    Raises:
        ValueError: If there is no unit to unshard.
        RuntimeError: Inside `unshard_params`, which shows the full parameters already.
    """
    states = select_states(module, recurse)
    _check_not_in_scope(states)
    lazy_init(module)
    for state in states:
        _unshard(state)
    work = UnshardWork(states)
    if async_op:
        return work
    work.wait()
    return None


def reshard(module: nn.Module, *, recurse: bool = False) -> None:
    """Free the full parameters and show the sharded ones; no communication.

    Args:
        module: A sharded module.
        recurse: Also the units below `module`, which need not be sharded itself.

    Raises:
        ValueError: If there is no unit to reshard.
        RuntimeError: Inside `unshard_params`, which shows the sharded ones again itself.
    """
    states = select_states(module, recurse)
    _check_not_in_scope(states)
    for state in states:
        _reshard(state)


def set_requires_gradient_sync(module: nn.Module, flag: bool, *, recurse: bool = True) -> None:
    """Choose whether backwards reduce gradients, or accumulate them unsharded on each rank.

    The first backward with `flag` True reduces what was accumulated.

    Args:
        module: A module with sharded units.
        flag: Whether to reduce.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit.
    """
    _set(select_states(module, recurse), "requires_gradient_sync", flag)


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients without communication in the enclosed block.

    As in DistributedDataParallel, the next backward outside reduces the sum, or
    `reduce_pending_gradients`. Each rank holds unsharded gradients meanwhile, which `zero_grad`
    drops. The earlier setting of each unit comes back, also after an
    exception.

    Raises:
        ValueError: If there is no unit in `module`.
    """
    states = select_states(module, recurse=True)
    before = [state.requires_gradient_sync for state in states]
    note_setting(states, "no_sync()", any(before))
    for state in states:
        state.change("requires_gradient_sync", False)
    try:
        yield
    finally:
        note_setting(states, "the end of no_sync()", any(before))
        for state, flag in zip(states, before, strict=True):
            state.change("requires_gradient_sync", flag)


def _check_not_in_scope(states: list[ShardState]) -> None:
    for state in states:
        if state.is_in_scope:
            raise RuntimeError(
                f"unit '{state.name}' shows its full parameters inside unshard_params already. "
                "Call unshard(module), its wait() and reshard(module) outside the scope."
            )


def _unshard(state: ShardState) -> None:
    """Start gathering a unit's full parameters and hold them until `_reshard`."""
    if state.is_held or state.context is None:
        return
    for handle in state.needed:
        handle.shown.check_registered()
    for handle in state.needed:
        handle.unshard(state.context.streams)
    state.hold()


def _show_unsharded(state: ShardState) -> None:
    """Wait for `_unshard` and register the full parameters."""
    for handle in state.needed:
        if state.context is not None and not handle.shown.is_unsharded:
            # Again, if shards were written meanwhile: what was sent may be half of each.
            handle.unshard(state.context.streams)
        handle.full.wait()
        handle.shown.show_unsharded()


def _reshard(state: ShardState) -> None:
    """Free a unit's full parameters and register the sharded ones, unless a pass needs them."""
    if state.context is None:
        return
    state.let_go()
    if state.training_state is TrainingState.IDLE:
        for handle in state.handles:
            if not handle.full.num_claims:
                keep_left_gradients(handle)
        for handle in state.needed:
            if handle.full.num_claims == 0:
                handle.full.end_graphs()
            release_handle(state.context, handle)


def set_requires_all_reduce(module: nn.Module, flag: bool, *, recurse: bool = True) -> None:
    """Choose whether backwards reduce gradients over the ranks that hold copies of a shard.

    For 2-D meshes: while False, gradients are reduce-scattered inside the shard group and add up
    there, without being published; the first backward with `flag` True reduces the sum across.
    Under `SHARD_OPTIM` and `NO_SHARD` gradients are unsharded anyway and nothing is reduced before.

    Args:
        module: A module with sharded units.
        flag: Whether to reduce.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit.
    """
    _set(select_states(module, recurse), "requires_all_reduce", flag)


def set_is_last_backward(module: nn.Module, flag: bool, *, recurse: bool = True) -> None:
    """Tell whether the next backward is the last one before the optimizer's step.

    While False, each strategy puts off what it can without holding more memory: the all-reduce of
    2-D meshes, and under `SHARD_OPTIM` and `NO_SHARD` the whole reduction.

    Args:
        module: A module with sharded units.
        flag: Whether it is the last one.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit.
    """
    _set(select_states(module, recurse), "is_last_backward", flag)


def set_gradient_divide_factor(
    module: nn.Module, factor: float | None, *, recurse: bool = True
) -> None:
    """Set what the sum of the gradients over all data-parallel ranks is divided by.

    Args:
        module: A module with sharded units.
        factor: The divisor; None for the number of data-parallel ranks, which gives the mean.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit, or the factor is not a positive number.
    """
    if factor is not None and not (factor > 0 and math.isfinite(factor)):
        raise ValueError(f"expected a positive, finite gradient divide factor, got {factor}")
    states = select_states(module, recurse)
    reductions = [handle.grads.reduction for state in states for handle in state.handles]
    is_new = any(reduction.divide_factor != factor for reduction in reductions)
    note_setting(states, f"set_gradient_divide_factor({factor})", is_new)
    for reduction in reductions:
        reduction.set_divide_factor(factor)


def set_reshard_after_forward(
    module: nn.Module, flag: ReshardAfterForward, *, recurse: bool = True
) -> None:
    """Choose what is kept of the full parameters between forward and backward.

    Units whose strategy keeps parameters unsharded are left as they are.

    Args:
        module: A module with sharded units.
        flag: As `reshard_after_forward` of `fully_shard`.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit, or the value is none of these; nothing is changed then.
    """
    states = select_states(module, recurse)
    sizes = {handle.shard_group.size for state in states for handle in state.handles}
    checked = {size: check_reshard_after_forward(flag, size) for size in sizes}
    freeing = [state for state in states if state.options.strategy.facts.frees_params]
    is_new = any(state.reshard_after_forward != flag for state in freeing)
    note_setting(states, f"set_reshard_after_forward({flag})", is_new)
    for state in states:
        for handle in state.handles[:1]:  # all handles of a unit have one shard group
            apply_policy(state, checked[handle.shard_group.size])


def set_reshard_after_backward(module: nn.Module, flag: bool, *, recurse: bool = True) -> None:
    """Choose whether the end of a backward frees the full parameters.

    Kept ones spare the next forward its gathers, unless a shard was written. A backward then needs
    a buffer of its own for gradients, which otherwise take the parameters' place.

    Args:
        module: A module with sharded units.
        flag: Whether to free them.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit.
    """
    states = select_states(module, recurse)
    handles = [handle for state in states for handle in state.handles]
    is_new = any(handle.reshards_after_backward is not flag for handle in handles)
    note_setting(states, f"set_reshard_after_backward({flag})", is_new)
    for handle in handles:
        handle.set_reshard_after_backward(flag)


def set_unshard_in_backward(module: nn.Module, flag: bool) -> None:
    """Choose whether the backward of a unit gathers its full parameters.

    A backward that reads no parameter, as of embeddings alone, does without: one all-gather less.
    Modules then show the shards while it runs.

    Args:
        module: A sharded module.
        flag: Whether to gather. A forward that saves full parameters for its backward, though they
            are not to be gathered, raises.

    Raises:
        ValueError: If it is not sharded.
    """
    (state,) = select_states(module, recurse=False)
    is_new = state.learnt.reads_nothing is flag
    note_setting([state], f"set_unshard_in_backward({flag})", is_new)
    state.learnt.expect(reads_nothing=not flag)


def set_forward_prefetch(module: nn.Module, modules: Iterable[nn.Module] | None) -> None:
    """Choose the units whose gathers are started when the forward of `module` begins.

    Args:
        module: A sharded module.
        modules: Sharded modules, in the order of their gathers. Empty: no gather is started ahead.
            None: that of the unit that came next in the last call, which is the default.

    Raises:
        ValueError: If one of them is not sharded.
    """
    _set_prefetch(module, "forward_prefetch", modules)


def set_backward_prefetch(module: nn.Module, modules: Iterable[nn.Module] | None) -> None:
    """Choose the units whose gathers are started when the backward of `module` begins.

    Args:
        module: A sharded module.
        modules: Sharded modules, in the order of their gathers. Empty: no gather is started ahead.
            None: that of the unit whose forward ran before, which is the default.

    Raises:
        ValueError: If one of them is not sharded.
    """
    _set_prefetch(module, "backward_prefetch", modules)


def _set_prefetch(module: nn.Module, name: str, modules: Iterable[nn.Module] | None) -> None:
    targets = None
    if modules is not None:
        targets = tuple(select_states(each, recurse=False)[0].ref for each in modules)
    names = targets and [state.name for each in targets if (state := each()) is not None]
    _set(select_states(module, recurse=False), name, targets, f"() to {names}")


def _set(states: Sequence[ShardState], name: str, value: object, shown: str = "") -> None:
    """Change a setting of units, and let the ranks find out where only some of them do."""
    is_new = any(getattr(state, name) != value for state in states)
    note_setting(states, f"set_{name}{shown or f'({value})'}", is_new)
    for state in states:
        state.change(name, value)


def register_comm_hook(
    module: nn.Module, hook: CommHook | None, state: object = None, *, recurse: bool = True
) -> None:
    """Let a hook do the communication that turns unsharded gradients into shards of their mean.

    It is called `hook(state, stage)` in place of each collective of a reduction, with a
    `ReductionStage`: once for the reduce-scatter over the shard group, if there is one, and once
    for each group of ranks that hold copies (the second axis of a 2-D mesh, and all of `NO_SHARD`),
    whose stage may come in a later backward. It writes the sum over `stage.group` into
    `stage.output`; the library divides. It returns None, or an object with `wait()` for a sum that
    is there only then. `composable_shard.comm.hooks` has hooks that compress.

    Gradients that `no_sync` accumulates reach the hook once, as their sum. A rank that trains alone
    sends nothing, so the hook is not called. An error that it raises drops the gradients of the
    backward as a whole, as any other; it must be raised on all ranks alike. Copies and pickles of
    the module have no hook.

    Args:
        module: A module with sharded units.
        hook: What to call; the same on all ranks, which the first forward checks by name. None
            takes the hook away, if there is one: gradients are reduced as by default again.
        state: Its first argument, kept alive by the units.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit, the hook can't be called, or there is a state but no hook.
        RuntimeError: If a unit has a hook already, or in a forward or backward. Nothing is changed
            then.
    """
    if hook is not None and not callable(hook):
        raise ValueError(
            "expected hook to be a function hook(state, stage) or None, got "
            f"{hook!r}. The order of arguments is register_comm_hook(module, hook, state)."
        )
    if hook is None and state is not None:
        raise ValueError("expected no state where hook is None, which takes the hook away")
    states = select_states(module, recurse)
    for context in {each.context for each in states if each.context is not None}:
        check_is_idle(context, "a comm hook can't be registered or taken away")
    reductions = [(each, handle.grads.reduction) for each in states for handle in each.handles]
    for each, reduction in reductions if hook is not None else ():
        if reduction.hook_name is not None:
            raise RuntimeError(
                f"unit '{each.name}' has the comm hook {reduction.hook_name} already. Take it away "
                "with register_comm_hook(module, None) first, or pass recurse=False to leave inner "
                "units out."
            )
    for _, reduction in reductions:
        reduction.set_hook(hook, state)
    name = reductions[0][1].hook_name if reductions else None
    note_setting(states, f"register_comm_hook() of {name}", is_new=True)


_FORWARD = "forward"


class ForwardMethod:
    """Stands for a method of a sharded module; a call of it is a call of the module.

    Args:
        module: The module.
        name: The method's.
        given: The method, if it is one of this object alone; None: its class has it.
    """

    def __init__(self, module: nn.Module, name: str, given: Callable[..., Any] | None) -> None:
        self._module = weakref.ref(module)
        self._name = name
        self._given = given
        functools.update_wrapper(self, given or getattr(type(module), name), updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method in the place of the module's forward."""
        module = self._module()
        if module is None:
            raise RuntimeError(f"the module of method '{self._name}' is deleted")
        attributes = vars(module)
        own = {name: attributes[name] for name in (_FORWARD, COMPILED_CALL) if name in attributes}

        def restore() -> None:
            attributes.pop(_FORWARD, None)
            attributes.update(own)

        def run(*args: Any, **kwargs: Any) -> Any:
            restore()
            method = self._given or getattr(type(module), self._name).__get__(module)
            return method(*args, **kwargs)

        attributes[_FORWARD] = run
        if COMPILED_CALL in own:  # compiled code does not see that `forward` is another one
            attributes[COMPILED_CALL] = None
        try:
            return module(*args, **kwargs)
        finally:
            if attributes.get(_FORWARD) is run:
                restore()

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardMethod:
        module = self._module()
        assert module is not None  # it is being copied
        return ForwardMethod(memo.get(id(module), module), self._name, self._given)

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardMethod, (self._module(), self._name, self._given)


never_compile(ForwardMethod.__call__)


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method other than forward gather the full parameters of its unit, as forward does.

    For `model.generate(...)`, `model.encode(...)` and the like, which use parameters outside of
    forward; they train too. The module's forward hooks run around the method. A module without
    units is left as it is, so that a script runs unsharded too; a second call does nothing.

    Args:
        module: A sharded module.
        method_name: The method's name.

    Raises:
        ValueError: If there is no such method, or a unit around the module manages its parameters.
    """
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    if isinstance(method, ForwardMethod) or method_name == _FORWARD:
        return
    if is_sharded(module):
        given = vars(module).get(method_name)
        vars(module)[method_name] = ForwardMethod(module, method_name, given)
    elif any(map(managed_params, module.modules())) and not get_states(module):
        raise ValueError(
            f"the parameters of this {type(module).__name__} belong to the unit of a module around "
            "it. Register a method of that module, or call fully_shard on this one too, before."
        )


def get_pending_gradients(module: nn.Module, *, recurse: bool = True) -> dict[str, Tensor]:
    """Return copies of the gradients that wait for a reduction, as whole tensors by name.

    They are this rank's own sum over the microbatches, not divided: what plain PyTorch has in
    `.grad` without data parallelism. A gradient of which only the all-reduce was put off
    (`set_requires_all_reduce`) is there as the mean over the shard group. Of a parameter with
    tensor parallelism it is the local part. Parameters without a pending gradient are left out.

    No communication, except for one all-gather for each handle with such an all-reduce: then call
    it on all ranks.

    Args:
        module: A module with sharded units.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit.
        RuntimeError: Inside forward or backward.
    """
    values = {}
    with torch.no_grad():
        for _, handle in _idle_handles(module, recurse, "gradients can't be shown"):
            with settled(handle):
                values[handle] = pending_values(handle)
    names = first_names(module, values)
    pending = {name: values[handle][index] for (handle, index), name in names.items()}
    return {name: value for name, value in pending.items() if value is not None}


def reduce_pending_gradients(module: nn.Module, *, recurse: bool = True) -> None:
    """Reduce the gradients that wait for it now, without another backward; sets `.grad`.

    For a step after microbatches that all ran under `no_sync`, or with a deferred all-reduce: at
    the end of an epoch, or after an exception. Does what the end of the backward would have done,
    also inside `no_sync`, and runs hooks of `register_post_accumulate_grad_hook`. No-op where
    nothing waits on any rank. Call it on all ranks.

    One small all-reduce for each process group; then for each handle with pending gradients on any
    rank one reduce-scatter, and one all-reduce over the ranks that hold copies of shards, as far as
    there are such.

    Args:
        module: A module with sharded units.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit.
        RuntimeError: Inside forward or backward.
    """
    handles = _idle_handles(module, recurse, "gradients can't be reduced")
    for _, handle in handles:
        settle_pending(handle)
    if not handles:
        return
    flags = FlagReduction(
        [
            (
                handle.shard_group,
                [int(flag) for flag in (needs_reduction(handle), *handle.grads.used)],
            )
            for _, handle in handles
        ],
        highest=1,
    ).finish()
    due = [
        (state, handle, [bool(flag) for flag in used])
        for (state, handle), (is_due, *used) in zip(handles, flags, strict=True)
        if is_due
    ]
    try:
        with torch.no_grad():
            for state, handle, used in due:
                _reduce(state, handle, used)
    except BaseException:
        # As a whole, as after an error in a backward.
        for _, handle, _ in due:
            handle.grads.drop()
        raise
    for _, handle, _ in due:
        handle.shown.run_gradient_hooks()


def _reduce(state: ShardState, handle: FlatParamHandle, used: list[bool]) -> None:
    assert state.context is not None
    grads = handle.grads
    grads.issue(
        state.context.streams, state.context.scratch, keep_unsharded=True, is_deferred=False
    )
    grads.advance()
    grads.finish()
    grads.publish(used)


def drop_pending_gradients(module: nn.Module, *, recurse: bool = True) -> None:
    """Drop the gradients that wait for a reduction, and free their memory; no communication.

    What was reduced before stays in `.grad`. `zero_grad()` of a module or optimizer, and setting
    `.grad` to None, drop both, but keep the memory until the next backward. Call it on all ranks.

    Args:
        module: A module with sharded units.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit.
        RuntimeError: Inside forward or backward.
    """
    for _, handle in _idle_handles(module, recurse, "gradients can't be dropped"):
        drop_pending(handle)


def _idle_handles(
    module: nn.Module, recurse: bool, what: str
) -> list[tuple[ShardState, FlatParamHandle]]:
    """Return the handles that can have pending gradients, each with its unit."""
    states = select_states(module, recurse)
    for context in dict.fromkeys(state.context for state in states):
        if context is not None:
            check_is_idle(context, what)
    handles = [
        (state, handle)
        for state in states
        for handle in state.handles
        if state.context is not None and handle.grads.is_bound
    ]
    for _, handle in handles:
        handle.adopt_changes()
    return handles
