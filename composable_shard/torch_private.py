"""Every private name of torch that this library uses; no other module uses one.

Each name was checked on torch 2.13 by the suite, and on 2.11, 2.14.1 and 2.15 by a part of it. A
version that lacks one fails here, at import, instead of in the middle of a step; but what concerns
DTensors is looked up in modules that only programs with DTensors import, see `dtensors`.

[Note: Many getters]
Each getter, setter and function asks a tensor of a subclass for `__torch_function__`, by a string
that no cache of types knows: 1,300 instructions, where `.grad` itself takes 300. Where many tensors
are asked in a row, `DisableTorchFunctionSubclass` is in force around all of them.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from itertools import starmap
from operator import attrgetter, methodcaller
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import TracingContext
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed._composable.contract import REGISTRY_KEY as REGISTRY_KEY
from torch.distributed._composable.contract import RegistryItem as RegistryItem
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (
    _get_default_store,
    _resolve_process_group,
    _world,
)
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim.optimizer import Optimizer
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as _clipping_types
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode
from typing_extensions import TypeIs

if TYPE_CHECKING:  # see dtensors.py
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import Placement

_NEWEST_TRIED = "2.15"


def warn_of_newer(version: str) -> None:
    """Warn of a torch that is newer than the newest one tried."""
    this, newest = (tuple(map(int, v.split(".")[:2])) for v in (version, _NEWEST_TRIED))
    if this > newest:
        warnings.warn(
            f"composable_shard was tried on torch up to {_NEWEST_TRIED}, and this is {version}. It "
            f"uses private names of torch. If something fails, take torch=={_NEWEST_TRIED}.*, or "
            f"run `make test-torch VERSION={version}` in a clone of it.",
            stacklevel=2,
        )


warn_of_newer(torch.__version__)

# Autograd. `current_backward_id()` is -1 outside of a backward pass, on the thread that asks.
current_backward_id: Callable[[], int] = torch._C._current_graph_task_id
# The node whose backward runs on the thread that asks.
current_node: Callable[[], Any] = torch._C._current_autograd_node
will_run_node: Callable[[Any], bool] = torch._C._will_engine_execute_node
next_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
sequence_nr_of: Callable[[Any], int] = methodcaller("_sequence_nr")
set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)
bump_version: Callable[[tuple[Tensor, ...]], None] = torch._C._increment_version


# A number that identifies a storage while it is alive.
number_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")


def storage_of(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage while it is alive."""
    return number_of(tensor.untyped_storage())


def storage_uses_of(tensor: Tensor) -> int:
    """Return how many tensors, and storage objects of Python, share a tensor's storage."""
    return torch._C._storage_Use_Count(storage_of(tensor)) - 1


# Make each access to a storage's memory raise, and undo that; their argument is `number_of`'s.
# Builds without CUDA, and some older ones, have neither: there a read may crash the process.
refuse_reads: Callable[[int, str], None] | None = getattr(
    torch._C, "_set_storage_data_ptr_access_error_msg", None
)
allow_reads: Callable[[int], None] | None = getattr(
    torch._C, "_clear_storage_data_ptr_access_error_msg", None
)
is_forward_grad_enabled: Callable[[], bool] = torch._C._is_fwd_grad_enabled
version_of: Callable[[Tensor], int] = attrgetter("_version")
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")


# Calls a function at the end of the running backward pass, if that succeeds.
queue_callback: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)

# The topmost hooks of `torch.autograd.graph.saved_tensors_hooks`, given False; None without any.
top_saved_tensors_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
push_saved_tensors_hooks: Callable[[Any, Any], None] = (
    torch._C._autograd._push_saved_tensors_default_hooks
)
pop_saved_tensors_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
# Why hooks can't be pushed, as in a transform of torch.func; None: they can.
saved_tensors_hooks_refusal: Callable[[], str | None] = (
    torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
)


_DISABLE = "disable_saved_tensors_hooks"


class GivingWay:
    """Lets hooks on saved tensors be removed where torch is about to refuse any, as in torch.func.

    Torch looks `disable_saved_tensors_hooks` up in its module each time. It is another function
    while anything asks for that, and calls `run` first, on the thread that is about to refuse.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._asking: set[int] = set()
        self._torchs: Callable[[str], AbstractContextManager[None]] | None = None

    def begin(self, key: int) -> None:
        """Run the function before torch refuses hooks, until `end` is called with this key."""
        self._asking.add(key)
        self._install()

    def _install(self) -> None:
        found = torch.autograd.graph.disable_saved_tensors_hooks
        if found != self._disable:
            self._torchs = found
            vars(torch.autograd.graph)[_DISABLE] = self._disable

    def end(self, key: int) -> None:
        """Undo `begin`, if that was not done."""
        # Without a lock, which an interrupt at the end of its block would leave taken for ever.
        self._asking.discard(key)
        is_installed = torch.autograd.graph.disable_saved_tensors_hooks == self._disable
        if is_installed and not self._asking:
            vars(torch.autograd.graph)[_DISABLE] = self._torchs
            if self._asking:  # another thread has begun meanwhile
                self._install()

    def _disable(self, error_message: str) -> AbstractContextManager[None]:
        torchs = self._torchs or torch.autograd.graph.disable_saved_tensors_hooks
        self._run()
        return torchs(error_message)


def saved_tensors_hooks_in_force(down_to: Any = None) -> list[tuple[Any, Any]]:
    """Return the saved-tensor hooks in force, topmost first; torch shows the topmost alone.

    So they are taken off and put back, also where an interrupt comes at any line. With `down_to`,
    only the hooks down to those that pack with this function, if there are such.
    """
    found: list[tuple[Any, Any]] = []
    try:
        while (top := top_saved_tensors_hooks(False)) is not None:
            found.append(top)
            pop_saved_tensors_hooks()
            if top[0] == down_to:
                break
        _push_back(found)
    except BaseException:
        left = top_saved_tensors_hooks(False)
        if found and left != found[0]:  # else all are there
            _push_back(found[: -1 if left == found[-1] else None])  # the last may still be there
        raise
    return found


def _push_back(hooks: Sequence[tuple[Any, Any]]) -> None:
    deque(starmap(push_saved_tensors_hooks, reversed(hooks)), 0)  # one call, for interrupts


def checkpointed_region(pack: Any, *, is_again: bool) -> Any:
    """Return what stands for a region of checkpointing, from the pack hook in force while it runs.

    None if it is another hook: there is one for a region's forward, one for when it runs again.
    """
    function, name = inspect.unwrap(pack), "target_frame_ref" if is_again else "frame"
    names = function.__code__.co_freevars
    if name not in names:
        return None
    found = function.__closure__[names.index(name)].cell_contents
    return found() if is_again else found


def begin_saved_tensors_hooks(pack: Any, unpack: Any, note: Callable[[], object]) -> None:
    """Push hooks and call a function of C, between which no interrupt comes."""
    _call_all([partial(push_saved_tensors_hooks, pack, unpack), note])


def end_saved_tensors_hooks(pack: Any, note: Callable[[], object], *, instead: Any = None) -> None:
    """Remove hooks even from beneath others, and call a function of C: all, or nothing.

    Without hooks that pack with `pack`, those that pack with `instead` are removed, if any.
    """
    for each in (pack, instead):
        *above, last = saved_tensors_hooks_in_force(each) or [(None, None)]
        if each is not None and last[0] == each:
            pops = [pop_saved_tensors_hooks] * (len(above) + 1)
            pushes = [partial(push_saved_tensors_hooks, *pair) for pair in reversed(above)]
            _call_all([*pops, *pushes, note])
            return
    note()


def _call_all(functions: Sequence[Callable[[], object]]) -> None:
    deque(map(methodcaller("__call__"), functions), 0)  # one call, for interrupts


# Whether a transform of `torch.func` runs, and a context in which none does.
are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
outside_transforms: Callable[[], AbstractContextManager[Any]] = temporarily_clear_interpreter_stack


def unobserved() -> AbstractContextManager[Any] | None:
    """Return a context that hides this library's operations from an active observer, if any.

    An observer is a transform, or selective checkpointing, which compares each operation of a
    region that a backward runs again with the forward's.
    """
    if are_transforms_active():
        return outside_transforms()
    mode = _get_current_dispatch_mode()
    is_selective = isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode))
    return _pop_mode_temporarily() if is_selective else None


def is_in_function() -> bool:
    """Return whether the forward of a `torch.autograd.Function` runs.

    This distinguishes a reentrant checkpoint, whose backward runs the forward again, from an
    evaluation: autograd switches forward-mode differentiation off there, `no_grad` does not.
    """
    return not (is_forward_grad_enabled() or torch.is_inference_mode_enabled())


# The level of `forward_ad.dual_level`; -1 outside of one.
current_dual_level: Callable[[], int] = partial(attrgetter("_current_level"), forward_ad)

# Tensor subclasses and the dispatcher.
schema_of: Callable[[OpOverload], Any] = attrgetter("_schema")
overload_name_of: Callable[[OpOverload], str] = attrgetter("_overloadname")
TensorBase = torch._C.TensorBase
VariableFunctions = torch._C._VariableFunctions
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
# Where an op on a wrapper changes the wrapper's own shape and strides.
no_dispatch: Callable[[], AbstractContextManager[None]] = torch._C._DisableTorchDispatch
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
ParameterMeta: Any = type(nn.Parameter)  # torch's stub has another
make_wrapper: Callable[..., Any] = Tensor._make_wrapper_subclass
swap_tensors: Callable[[Tensor, Tensor], None] = torch._C._swap_tensor_impl
# Whether `tensor.data = value` can change the object: not from the CPU to any device.
can_change_data: Callable[[Tensor, Tensor], bool] = torch._has_compatible_shallow_copy_type
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
# Optimizers and clipping take their fast paths for lists of these types.
FOREACH_TYPES: tuple[list[Any], ...] = (_optimizer_types, _clipping_types)

# Ops on lists of tensors, which torch documents for its optimizers only.
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
unscale_ = torch._amp_foreach_non_finite_check_and_unscale_

# Whether a profiler runs on this thread.
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled

# The mesh that a mesh is part of, or itself.
root_mesh_of: Callable[[Any], Any] = methodcaller("_get_root_mesh")

# Modules. Their dictionaries are written where `setattr` would check, or register twice.
IncompatibleKeys = _IncompatibleKeys  # what `Module.load_state_dict` returns
COMPILED_CALL = "_compiled_call_impl"  # the attribute that `module.compile()` sets
load_from_state_dict_of = attrgetter("_load_from_state_dict")
parameters_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")
# The tensors that an RNN computes with, which its own `to()` replaces.
flat_weights_of: Callable[[nn.Module], list[Any]] = attrgetter("_flat_weights")
flat_weights_names_of: Callable[[nn.Module], list[str]] = attrgetter("_flat_weights_names")
modules_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_modules")


def modules_in(module: nn.Module) -> list[nn.Module]:
    """Return what `nn.Module.modules` yields, whatever a class overrides: what it registers.

    By one call: torch's generator passes each module on through all levels above it. A walk of its
    own, as names cost more than the walk.
    """
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [module]
    while waiting:
        each = waiting.pop()
        if each is not None and each not in found:
            found[each] = None
            waiting += [*modules_of(each).values()][::-1]
    return list(found)


def named_modules_in(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what `nn.Module.named_modules` yields, as `modules_in` does."""
    found: dict[nn.Module, str] = {}
    waiting: list[tuple[str, nn.Module | None]] = [("", module)]
    while waiting:
        prefix, each = waiting.pop()
        if each is not None and each not in found:
            found[each] = prefix
            below = [*modules_of(each).items()][::-1]
            waiting += [(f"{prefix}.{key}" if prefix else key, child) for key, child in below]
    return [(name, each) for each, name in found.items()]


non_persistent_buffers_of: Callable[[nn.Module], set[str]] = attrgetter(
    "_non_persistent_buffers_set"
)
load_pre_hooks_of: Callable[[nn.Module], dict[int, Any]] = attrgetter("_load_state_dict_pre_hooks")
load_post_hooks_of: Callable[[nn.Module], dict[int, Any]] = attrgetter(
    "_load_state_dict_post_hooks"
)
# An optimizer's hooks before and after its `load_state_dict`.
load_hooks_of: Callable[[Optimizer], tuple[dict[int, Any], ...]] = attrgetter(
    "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"
)
backward_hooks_of: Callable[[nn.Module], tuple[dict[int, Any], dict[int, Any]]] = attrgetter(
    "_backward_hooks", "_backward_pre_hooks"
)
pre_accumulate_hooks_of: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
post_accumulate_hooks_of: Callable[[Tensor], dict[int, Any] | None] = attrgetter(
    "_post_accumulate_grad_hooks"
)


def set_buffers(module: nn.Module, buffers: dict[str, Any]) -> None:
    """Give a module another dictionary of buffers, for a copy that shares it with the original."""
    module._buffers = buffers


def schedulers_in(scheduler: object) -> list[Any]:
    """Return the schedulers that a `SequentialLR` or `ChainedScheduler` is made of."""
    return list(getattr(scheduler, "_schedulers", ()))


def set_state_dict_guard(module: nn.Module, guard: Callable[[], dict[str, str]]) -> None:
    """Let torch.distributed.checkpoint.state_dict call a function when it looks into a module.

    Its functions ask a module with children for `_fqn_modifiers`, which gives new names of
    parameters; a module's own attribute stays. They look for each name of any module in its
    `_non_persistent_buffers_set`.
    """
    if not hasattr(module, "_fqn_modifiers"):
        vars(module)["_fqn_modifiers"] = guard
    module._non_persistent_buffers_set = _GuardedNames(module._non_persistent_buffers_set, guard)


class _GuardedNames(set[str]):
    def __init__(self, names: Iterable[str] = (), guard: Callable[[], object] = dict) -> None:
        super().__init__(names)
        self.guard = guard

    def __contains__(self, name: object) -> bool:
        if any(running("torch.distributed.checkpoint.state_dict")):
            self.guard()
        return super().__contains__(name)


def is_pending_result(value: object) -> TypeIs[AsyncCollectiveTensor]:
    """Return whether a value is the result of a collective that no operation has waited for."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    return isinstance(value, getattr(module, "AsyncCollectiveTensor", ()))


def local_shape_and_offset(
    shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and offsets of this rank's part of a DTensor."""
    find = sys.modules["torch.distributed.tensor._utils"].compute_local_shape_and_global_offset
    sizes, offsets = find(shape, mesh, placements)
    return tuple(sizes), tuple(offsets)


def fsdp_classes() -> tuple[type, ...]:
    """Return the classes of modules that torch's FSDP shards; none if nothing has imported it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)


def running(module: str, function: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the local variables of others' functions that run on this thread, innermost first.

    These are a module's functions of one name, or all of its functions.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if function in (None, frame.f_code.co_name) and frame.f_globals.get("__name__") == module:
            yield frame.f_locals
        frame = frame.f_back


def is_in_step() -> bool:
    """Return whether an optimizer's step runs on this thread."""
    return any(running("torch.optim.optimizer", "wrapper"))  # of `profile_hook_step`


def set_hooks(tensor: Tensor, before: dict[int, Any] | None, after: dict[int, Any] | None) -> None:
    """Set a tensor's hooks before and after accumulation of its gradient; None keeps its own."""
    if before:
        tensor._backward_hooks = before
    if after:
        tensor._post_accumulate_grad_hooks = after


# The innermost Python frame of each thread, by the thread's number.
frames_of_threads: Callable[[], dict[int, FrameType]] = sys._current_frames

# Process groups. Tensors refer to their group by name, so that they can be pickled.
resolve_group: Callable[[str], dist.ProcessGroup] = _resolve_process_group  # type: ignore[assignment, unused-ignore]


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend of a group for a device; raises RuntimeError if it has none."""
    return group._get_backend(device)


def groups_calls(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a group's backend for a device can issue several collectives as one call."""
    try:
        return bool(attrgetter("supports_coalescing")(backend_of(group, device)))
    except (AttributeError, RuntimeError):
        return False


# Bound methods of a group, or of what stands for one; they take `(output, shard)` and
# `(output, full, options)`.
all_gather_base_of: Callable[[Any], Callable[..., dist.Work]] = attrgetter("_allgather_base")
reduce_scatter_base_of: Callable[[Any], Callable[..., dist.Work]] = attrgetter(
    "_reduce_scatter_base"
)


def side_store() -> dist.Store | None:
    """Return a separate connection to the default group's store; None if that is impossible.

    Requests on it don't delay other requests of the store.
    """
    try:
        store: dist.Store = _get_default_store().clone()  # type: ignore[attr-defined, unused-ignore]
    except (RuntimeError, NotImplementedError, AttributeError, ValueError):
        return None  # a store of a kind that torch can't copy
    return store


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of a group's collectives; None if no backend has one."""
    for device in group._device_types:
        try:
            options = attrgetter("options")(group._get_backend(device))
        except (AttributeError, RuntimeError):
            continue  # since torch 2.14 a backend without options raises RuntimeError
        timeout: timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None


def inherit_timeout(group: dist.ProcessGroup, world: dist.ProcessGroup) -> timedelta | None:
    """Give a group with torch's own timeout the default group's; return the new timeout."""
    timeout, before = timeout_of(world), timeout_of(group)
    if timeout is None or before == timeout or before not in _OWN_TIMEOUTS:
        return None
    for device in group._device_types:
        backend = group._get_backend(device)
        if hasattr(backend, "_set_default_timeout"):  # only gloo and NCCL have it
            backend._set_default_timeout(timeout)
    return timeout


_OWN_TIMEOUTS = (default_pg_timeout, default_pg_nccl_timeout)

# Raised by an operation on fake tensors whose result depends on values.
DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


def num_known_groups() -> int:
    """Return how many process groups this rank has made or joined."""
    return len(_world.pg_names)


def mesh_of_axes(mesh: DeviceMesh, axes: Sequence[tuple[str, ...]]) -> DeviceMesh:
    """Return the part of a mesh that has these axes, with several names made one axis."""
    if all(len(names) == 1 for names in axes):
        return mesh[tuple(names[0] for names in axes)]
    parts = [mesh[names]._flatten("_".join(names)) for names in axes]
    return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)


# Text of the compiler's error, which only `torch.compile(model, fullgraph=True)` raises.
NO_FULL_GRAPH = (
    "a sharded module gathers its parameters between graphs, so the graph of a model breaks at "
    "each unit. Compile the layers, `for layer in model.layers: layer.compile(fullgraph=True)`, "
    "before or after fully_shard, or leave fullgraph out: torch.compile(model)."
)


def is_compiling() -> bool:
    """Return whether this thread compiles a graph, and looks at tensors to describe them."""
    return TracingContext.try_get() is not None


_NEVER_COMPILE = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def never_compile(function: Callable[..., Any]) -> None:
    """Keep a function, and what it calls, out of compiled graphs.

    Does what `torch.compiler.disable` does, without importing the compiler.
    """
    function.__dict__["_torchdynamo_disable"] = True
    function.__dict__["_torchdynamo_disable_msg"] = NO_FULL_GRAPH
    set_code_exec_strategy(function.__code__, _NEVER_COMPILE)
