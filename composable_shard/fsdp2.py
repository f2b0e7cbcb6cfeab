"""The names and arguments of torch's FSDP2: change the import line to port a script.

    from composable_shard.fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard

in the place of `from torch.distributed.fsdp import ...`, and likewise the functions and options of
`torch.distributed.checkpoint.state_dict`. Here `fully_shard` changes a module's class, as FSDP2
does. All functions of `composable_shard` work on such modules too. The policies are torch's own.
"""

from __future__ import annotations

import copyreg
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed.fsdp  # also for `install`
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from composable_shard import construct, module_api, options, state_dict
from composable_shard.comm import then_call_hook
from composable_shard.construct import PlainPart, plain_parts
from composable_shard.fsdp2_meshes import PlacedParams, mesh_of, split_mesh
from composable_shard.module_api import UnshardWork as UnshardHandle
from composable_shard.module_api import register_forward_method as register_fsdp_forward_method
from composable_shard.tensor import FlatShard

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "StateDictOptions",
    "UnshardHandle",
    "fully_shard",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "install",
    "register_fsdp_forward_method",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "share_comm_ctx",
]

_M = TypeVar("_M", bound=nn.Module | Iterable[nn.Module])
_NO_POLICY = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()
get_model_state_dict = state_dict.get_model_state_dict
set_model_state_dict = state_dict.set_model_state_dict
set_optimizer_state_dict = state_dict.set_optimizer_state_dict
_LET_GO = "_fsdp_let_go"  # attribute: the hook by which the next forward ends an unshard()


def __getattr__(name: str) -> Any:
    """Return torch's `DataParallelMeshDims`, which only newer versions have."""
    if name == "DataParallelMeshDims":
        return getattr(torch.distributed.fsdp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def fully_shard(  # noqa: PLR0913 -- FSDP2's arguments
    module: _M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | options.MixedPrecisionPolicy = _NO_POLICY,
    offload_policy: OffloadPolicy | options.OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    **others: Any,
) -> _M:
    """Do what `composable_shard.fully_shard` does, with FSDP2's arguments; return an `FSDPModule`.

    Args:
        module: A module, or a list of modules that form one unit.
        mesh: As in FSDP2: 1-D, or 2-D `(replicate, shard)`.
        reshard_after_forward: As in FSDP2.
        shard_placement_fn: `Shard(0)` cuts between rows. None and other dims cut anywhere: the
            shards differ from FSDP2's, and the values are the same. Inner modules that it puts on
            another mesh (experts) become units there.
        mp_policy: Torch's policy, or this library's.
        offload_policy: Torch's policy, or this library's.
        ignored_params: As in FSDP2.
        dp_mesh_dims: The axes of `mesh` for data parallelism. Several of one kind become one axis.
            On the others parameters are DTensors, or plain tensors that the library spmd_types
            annotates: modules compute with these, and at rest they are what the DTensors would be.
        others: Further options of `composable_shard.fully_shard`.

    Raises:
        ValueError: For annotations that leave out an axis, or say anything but that parameters are
            the same on axes of data parallelism.
        NotImplementedError: For a module whose own parameters have several meshes, parameters with
            a dtype of their own, DTensors on the axes of data parallelism, and plain tensors
            without annotations on a mesh with further axes, with what to do.
    """
    modules: list[nn.Module] = [module] if isinstance(module, nn.Module) else [*module]
    parts: dict[nn.Parameter, PlainPart] = {}
    placed = None if shard_placement_fn is None else PlacedParams(shard_placement_fn, mesh)
    elsewhere = [] if placed is None else placed.modules_on_other_meshes(modules)
    of_elsewhere = dict(others)  # what follows is said of this mesh
    if dp_mesh_dims is not None:
        left_out = {
            param for _, inner in elsewhere for each in inner for param in each.parameters()
        }
        left_out.update(ignored_params or ())
        mesh, parts = split_mesh(mesh, dp_mesh_dims, modules, left_out)
        if dp_mesh_dims.shard is None:
            others.setdefault("strategy", "no_shard")
    if isinstance(mp_policy, MixedPrecisionPolicy):
        chosen = asdict(mp_policy)
        if chosen.pop("param_dtype_override_fn", None) is not None:  # since torch 2.15
            raise NotImplementedError(
                "dtypes are chosen by unit. Call fully_shard with another mp_policy on the modules "
                "that param_dtype_override_fn leaves as they are, or pass keep_fp32_classes= to "
                "composable_shard.MixedPrecisionPolicy."
            )
        # FSDP2 casts all modules, batch norms too.
        mp_policy = options.MixedPrecisionPolicy(**chosen, keep_fp32_classes=())
    if isinstance(offload_policy, OffloadPolicy):
        is_on = isinstance(offload_policy, CPUOffloadPolicy)
        pins = {"pin_memory": offload_policy.pin_memory} if is_on else {}  # type: ignore[attr-defined]
        offload_policy = options.OffloadPolicy(params=is_on, **pins)
    if placed is not None:
        others.setdefault("granularity", placed.granularity)
    for info, inner in elsewhere:
        fully_shard(
            inner,
            mesh=mesh_of(info),
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=None if placed is None else placed.placement,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            ignored_params=ignored_params,
            dp_mesh_dims=getattr(info, "dp_mesh_dims", None),
            **of_elsewhere,
        )
    with plain_parts(parts):
        construct.fully_shard(
            modules,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            ignored_params=ignored_params,
            **others,
        )
    for each in modules:
        each.__class__ = _class_with_methods(type(each))
    return module


fully_shard.state = construct.fully_shard.state  # type: ignore[attr-defined]


def _class_with_methods(cls: type) -> Any:
    """Return a class derived from a module's that has FSDP2's methods; one for all its modules."""
    for known in (cls, *cls.__subclasses__()):
        if issubclass(known, FSDPModule):
            return known
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


def _restore(cls: type) -> nn.Module:
    """Make the object that a copy fills."""
    module: nn.Module = object.__new__(cls)
    module.__class__ = _class_with_methods(cls)
    return module


class FSDPModule:
    """A module that `fully_shard` was called on, with the methods of FSDP2's class.

    Each calls a function of `composable_shard`, which documents it; `recurse` adds inner units.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of the original class, as for a slice of a container."""
        return cls.__mro__[2](*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let copies find the class, which has no name in any module."""
        made: Any = super().__reduce_ex__(protocol)
        is_usual = made[0] is copyreg.__newobj__  # type: ignore[attr-defined] # stubs leave it out
        return (_restore, (type(self).__mro__[2],), *made[2:]) if is_usual else made

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the unit; a forward frees it again by its policy, or `reshard`."""
        work = module_api.unshard(_module(self), async_op=True)
        assert work is not None
        _end_hook(self)
        state = fully_shard.state(self)  # type: ignore[attr-defined]

        def let_go(*_: Any) -> None:
            _end_hook(self)
            state.let_go()

        vars(self)[_LET_GO] = _module(self).register_forward_pre_hook(let_go)
        if async_op:
            return work
        work.wait()
        return None

    def reshard(self) -> None:
        """Free the unit's full parameters."""
        _end_hook(self)
        module_api.reshard(_module(self))

    def reset_iter_state(self) -> None:
        """Do nothing: a step after an exception needs no reset."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last one before the step."""
        module_api.set_is_last_backward(_module(self), is_last_backward)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backwards reduce gradients."""
        for each in (module_api.set_requires_gradient_sync, module_api.set_requires_all_reduce):
            each(_module(self), requires_gradient_sync, recurse=recurse)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients in the block without reducing; from FSDP1 and DDP, not in FSDP2."""
        return module_api.no_sync(_module(self))

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether backwards reduce gradients over copies of a shard."""
        module_api.set_requires_all_reduce(_module(self), requires_all_reduce, recurse=recurse)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether forwards free the full parameters."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"expected a bool, got {reshard_after_forward!r}")
        module_api.set_reshard_after_forward(_module(self), reshard_after_forward, recurse=recurse)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backwards free the full parameters."""
        module_api.set_reshard_after_backward(
            _module(self), reshard_after_backward, recurse=recurse
        )

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Choose the modules that this unit's forward gathers ahead; empty list: the default."""
        module_api.set_forward_prefetch(_module(self), _check_modules(modules) or None)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Choose the modules that this unit's backward gathers ahead; empty list: the default."""
        module_api.set_backward_prefetch(_module(self), _check_modules(modules) or None)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether the unit's backward gathers."""
        module_api.set_unshard_in_backward(_module(self), unshard_in_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the divisor of the sum of the unit's gradients over all ranks."""
        module_api.set_gradient_divide_factor(_module(self), factor, recurse=False)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do what `set_gradient_divide_factor` does; deprecated in torch too."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """Call a hook on the unit's mean gradients once they are reduced; on the reduce stream."""
        if stream is not None:
            raise NotImplementedError("the hook runs on the reduce stream. Leave stream= out.")
        module, handles = _module(self), fully_shard.state(self).handles  # type: ignore[attr-defined]
        if not handles:  # nothing is reduced here
            return
        group = handles[0].shard_group
        last = "all_reduce" if group.replicate_groups else "reduce_scatter"
        if group.size == 1 and last == "reduce_scatter":
            raise NotImplementedError(
                "the shard group has one rank and there are no replicas in the mesh, so nothing is "
                "reduced and the hook would never be called. Give fully_shard the mesh "
                "(replicate, shard), or reduce gradients after the backward: "
                "for p in module.parameters(): dist.all_reduce(p.grad.to_local(), group=group)."
            )
        module_api.register_comm_hook(module, None, recurse=False)
        module_api.register_comm_hook(module, then_call_hook, (hook, last), recurse=False)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Refuse to keep freed memory."""
        if keep:
            raise NotImplementedError(
                'what is freed has no memory. Pass strategy="shard_grad_op" to fully_shard, which '
                "keeps the full parameters where they are."
            )

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Do nothing: ranks may always use different parameters."""


# Some of these exist only in newer torch.
_CHANGES_NOTHING = {
    "set_post_optim_event": "gathers wait for all that was issued before",
    "set_force_sum_reduction_for_comms": "the backend's mean is used on NCCL",
    "set_reduce_scatter_max_input_buffers": "each unit has its own buffer",
    "set_separate_reduce_scatter_group": "pass separate_reduce_group=True to fully_shard",
    "set_allocate_memory_from_process_group_for_comm": "there are no staging buffers",
    "set_all_gather_layout": "a gather writes into the unit's buffer",
    "set_all_gather_output_fn": "parameters are views of the gathered buffer",
    "set_reduce_scatter_input_fn": "gradients are packed in one way",
    "set_symm_mem_for_comm": "there are no staging buffers",
}
_FINALIZATION = (
    "call set_requires_gradient_sync(False) before the backwards, and after them "
    "composable_shard.reduce_pending_gradients(module)"
)
_REFUSED = {
    "set_custom_reduce_scatter": (
        "call composable_shard.register_comm_hook(module, hook), whose hook reduces a unit's "
        "gradients from one buffer into another"
    ),
    "set_custom_all_gather": (
        "an all-gather writes straight into the unit's buffer, and can't be replaced. For other "
        "algorithms or memory pass a mesh of a process group with another backend."
    ),
    "set_manual_backward_finalization": _FINALIZATION,
    "finalize_backward": _FINALIZATION,
}


def _warning(name: str, why: str) -> Callable[..., None]:
    def warn(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        warnings.warn(f"{name} changes nothing here: {why}. Leave it out.", stacklevel=2)

    return warn


def _refusing(remedy: str) -> Callable[..., None]:
    def refuse(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(remedy)

    return refuse


for _name, _method in {
    **{name: _warning(name, why) for name, why in _CHANGES_NOTHING.items()},
    **{name: _refusing(remedy) for name, remedy in _REFUSED.items()},
}.items():
    _theirs = getattr(torch.distributed.fsdp.FSDPModule, _name, None)
    # With torch's signature, if this torch has the method, for `help` and editors.
    setattr(FSDPModule, _name, _method if _theirs is None else wraps(_theirs, (), ())(_method))


def get_optimizer_state_dict(model: nn.Module, optimizers: Any, *, options: Any = None) -> Any:
    """Return optimizers' state; made first for new ones, as in torch, for `dcp.load` to fill."""
    options = options or StateDictOptions()
    return state_dict.get_optimizer_state_dict(model, optimizers, options=options)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Check the modules, and do nothing: each has streams of its own."""
    _check_modules(modules)


def install() -> None:
    """Put these names in the place of torch's, for tools that import FSDP2 by themselves.

    Call it once, at the top of a script. accelerate with `fsdp_version: 2`, `Trainer`, TRL and
    other tools then shard by this library, with their own settings, saves and loads. Modules that
    have imported torch's names before get these too; torch's own modules keep them.
    """
    homes = [torch.distributed.fsdp, torch_state_dict]
    own = globals()
    replaced = {
        id(found): own[name]
        for home in homes
        for name in __all__
        if (found := vars(home).get(name, own[name])) is not own[name]
    }
    for title, module in [*sys.modules.items()]:
        is_torchs = title.startswith(("torch.", "composable_shard")) and module not in homes
        if module is None or (is_torchs and title != "torch.distributed._composable.fsdp"):
            continue
        for name, value in [*vars(module).items()]:
            if id(value) in replaced:
                setattr(module, name, replaced[id(value)])
    with suppress(ImportError):
        accelerates: Any = import_module("accelerate.utils.fsdp_utils")
        accelerates.fsdp2_load_full_state_dict = _load_full
        accelerators: Any = import_module("accelerate.accelerator").Accelerator
        accelerators._prepare_fsdp2 = _keeping_shards(accelerators._prepare_fsdp2)


def _keeping_shards(prepare: Any) -> Any:
    """Let accelerate prepare a model again, as a Trainer does that tries a smaller batch.

    It finds parameters by address, and a shard has none: it would take all for the last one.
    """

    def prepare_again(accelerator: Any, *args: Any) -> Any:
        groups = [group for each in args for group in getattr(each, "param_groups", ())]
        kept = [[*group["params"]] for group in groups]
        result = prepare(accelerator, *args)
        for group, params in zip(groups, kept, strict=True):
            if any(isinstance(param, FlatShard) for param in params):
                group["params"] = params
        return result

    return prepare_again


def _load_full(accelerator: Any, model: nn.Module, full_sd: dict[str, Any], **_: Any) -> nn.Module:
    """Load the first rank's values into a sharded model on meta, as accelerate's function does."""
    from_first = options.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full_sd if accelerator.is_main_process else {}, options=from_first)
    return model


def _module(face: FSDPModule) -> nn.Module:
    assert isinstance(face, nn.Module)
    return face


def _check_modules(modules: list[FSDPModule]) -> list[nn.Module]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"expected modules that fully_shard was called on, got {module!r}")
    return [_module(module) for module in modules]


def _end_hook(face: FSDPModule) -> None:
    """Remove the hook with which a forward ends an `unshard()`, if there is one."""
    hook = vars(face).pop(_LET_GO, None)
    if hook is not None:
        hook.remove()
