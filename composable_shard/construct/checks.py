"""Modules and parameters that can not be sharded: refused before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import CodeType

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import UninitializedParameter

from composable_shard.comm import ShardGroup
from composable_shard.construct.originals import Original, Plan, values_of
from composable_shard.dtensors import is_dtensor
from composable_shard.flat_param import Extension, UnshardedParameter, is_shown_by_scope
from composable_shard.runtime import find_applied, read_state
from composable_shard.torch_private import fsdp_classes, named_modules_in, storage_of


def check_scripted(plan: Plan) -> None:
    """Check that scripted and traced modules have nothing to shard.

    Their compiled forward reads parameters from a C++ object, whatever Python's attributes show.
    """
    ignored = {id(param) for param in plan.options.ignored_params or ()}
    for module in plan.unmanaged_modules:
        if not isinstance(module, ScriptModule):
            continue
        names = [name for name, param in module.named_parameters() if id(param) not in ignored]
        if names:
            found = [n for root in plan.modules for n, m in named_modules_in(root) if m is module]
            raise NotImplementedError(
                f"'{found[0]}' is a {type(module).__name__} (torch.jit.script or trace) with the "
                f"parameters {names}, which can't be sharded: its compiled forward reads its own. "
                "Shard the module that it was made from, and torch.compile that, or pass its "
                "parameters in ignored_params and reduce their gradients yourself."
            )


def check_modules(walks: Iterable[Sequence[tuple[str, nn.Module]]]) -> None:
    """Check that modules can be one unit: not sharded yet, and with calls that run hooks.

    Args:
        walks: What `named_modules_in` of each of them returns.
    """
    for walk in walks:
        module = walk[0][1]
        kind = type(module).__name__
        # Before `find_applied`, which finds our own mark too and would name torch.
        if read_state(module) is not None:
            raise ValueError(
                f"fully_shard was already applied to this {kind}; it can be applied to a module "
                "only once. To change its options, build the model anew."
            )
        applied = find_applied(module)
        if applied is not None:
            raise ValueError(
                f"torch's composable '{applied}' was already applied to this {kind}; "
                "a module can have only one data-parallel API"
            )
        if isinstance(module, ScriptModule):
            raise NotImplementedError(
                f"a {kind} (torch.jit.script or trace) can't be a unit: its calls run no hooks in "
                "compiled code. Shard the module that it was made from, or a module around it."
            )
        if not has_forward(module):
            raise ValueError(
                f"{kind} has no forward, so its unit would never be gathered. Pass the modules in "
                "it: `for child in container: fully_shard(child)`, or "
                "`fully_shard(list(container))` to make them one unit."
            )
        if (owner := _class_without_hooks(module)) is not None:
            raise NotImplementedError(
                f"{kind} can't be a unit: {owner.__qualname__}.__call__ does not call "
                "nn.Module's, so its calls run no hooks and would never gather the unit. Call "
                "fully_shard on a module around it, whose forward calls it, or call "
                "super().__call__ there."
            )
        others = fsdp_classes()
        for name, child in walk:
            if isinstance(child, others):
                raise ValueError(
                    f"'{name or kind}' is sharded by torch's FSDP already; "
                    "shard a tree with one library only"
                )
            if name and find_applied(child) == "replicate":
                raise ValueError(
                    f"'{name}' is managed by torch's composable 'replicate' already, which would "
                    "reduce its gradients a second time. Apply only one of the two to it."
                )


def check_params(originals: list[Original], shard_group: ShardGroup | None) -> None:
    """Check that parameters can be sharded; find the extensions of their classes."""
    for original in originals:
        param, fqn = original.param, original.fqn
        is_plain = type(param) is nn.Parameter
        if is_shown_by_scope(param) or (not is_plain and isinstance(param, UnshardedParameter)):
            raise ValueError(
                f"parameter '{fqn}' is the full form of one that a unit manages already, shown by "
                "unshard, unshard_params or a forward. Shard before that, inner modules first."
            )
        # Before `values_of`, in which torch raises an error of its own for these.
        if not is_plain and isinstance(param, UninitializedParameter):
            raise ValueError(
                f"parameter '{fqn}' has no shape yet (a lazy module). Run one forward before "
                "fully_shard."
            )
        if not is_plain and hasattr(values := values_of(param), "fsdp_pre_all_gather"):
            original.extension = Extension.of(values)
        is_supported = is_plain or original.extension is not None or _is_supported_type(param)
        if param.layout is not torch.strided or not is_supported:
            own = ", and classes around one dense tensor that have fsdp_pre_all_gather"
            raise NotImplementedError(
                f"parameter '{fqn}' is a {_kind_of(param).__name__} with layout {param.layout}; "
                "only dense tensors and DTensors can be sharded"
                f"{own * (param.layout is torch.strided)}. Pass it in ignored_params."
            )
        if not is_plain and (name := _second_name_of(param)):
            raise NotImplementedError(
                f"parameter '{fqn}', a {type(param).__name__}, has its values a second time as its "
                f"attribute {name!r}, which stays whole. Pass it in ignored_params."
            )
    _check_devices(originals, shard_group)


def check_forwards_write_nothing(modules: Iterable[nn.Module]) -> None:
    """Refuse modules of torch whose forward writes their own parameters."""
    for module in modules:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise NotImplementedError(
                f"{type(module).__name__}({module.num_embeddings}, {module.embedding_dim}, "
                f"max_norm={module.max_norm}) writes its weight in forward, and such edits of full "
                "parameters are lost. Pass its weight in ignored_params, or set max_norm to None "
                "and limit the norms after each step, inside unshard_params(module)."
            )


def _kind_of(param: nn.Parameter) -> type:
    """Return the class of a parameter's values; for a DTensor the class of the local values."""
    values = values_of(param) if is_dtensor(param) else param
    is_own = type(values) is nn.Parameter or hasattr(values, "fsdp_pre_all_gather")
    return type(values if is_own else values.data)


def _is_supported_type(param: nn.Parameter) -> bool:
    kind = _kind_of(param)
    is_plain = kind is Tensor or issubclass(kind, nn.Parameter)
    return is_plain and not hasattr(kind, "fsdp_pre_all_gather")


def _second_name_of(param: nn.Parameter) -> str | None:
    """Return the attribute that shares a parameter's memory, as bitsandbytes' `Int8Params` has."""
    if not issubclass(type(param), nn.Parameter):
        return None
    tensors = {name: each for name, each in vars(param).items() if isinstance(each, Tensor)}
    own = storage_of(param)
    return next((name for name, each in tensors.items() if storage_of(each) == own), None)


def _check_devices(originals: list[Original], shard_group: ShardGroup | None) -> None:
    by_device: dict[torch.device, list[str]] = {}
    for original in originals:
        by_device.setdefault(original.param.device, []).append(original.fqn)
    if len(by_device) > 1:
        detail = "; ".join(f"{device}: {names}" for device, names in by_device.items())
        raise ValueError(
            f"expected all parameters of a unit on one device, got {detail}. "
            "Move the module to one device before fully_shard."
        )
    if shard_group is None:
        return
    for device, names in by_device.items():
        if device.type not in ("cpu", "meta", shard_group.device.type):
            raise ValueError(
                f"parameters {names} are on {device}, but the mesh is of device type "
                f"'{shard_group.device.type}'. Move them there, or to the CPU, before fully_shard."
            )


def has_forward(module: nn.Module) -> bool:
    """Return whether calling `module` runs a forward, its own or its class's."""
    # torch.compile(module) has one as an attribute.
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _class_without_hooks(module: nn.Module) -> type | None:
    """Return the class whose `__call__` runs no hooks of nn.Module, as gpytorch's; None without.

    One that passes the call on runs them, and one without code to look at may.
    """
    # In the order in which Python runs them: the first that does not pass the call on decides.
    for kind in type(module).__mro__:
        if kind is nn.Module:
            return None
        code = getattr(vars(kind).get("__call__"), "__code__", None)
        if "__call__" not in vars(kind):
            continue
        names = set() if code is None else _names_in(code)
        if "super" not in names:
            is_passed_on = code is None or not _PASSES_ON.isdisjoint(names)
            return None if is_passed_on or _is_helped(type(module), names) else kind
    return None


def _is_helped(kind: type, names: set[str]) -> bool:
    """Return whether a helper of these names passes a call on, as `torch.fx.GraphModule`'s."""
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    helpers = {name: vars(each)[name] for each in reversed(own) for name in names & set(vars(each))}
    helpers.pop("forward", None)  # it may call other modules
    for helper in helpers.values():
        method = getattr(helper, "__func__", helper)
        code = getattr(method, "__code__", getattr(type(helper).__call__, "__code__", None))
        if code is not None and not _PASSES_ON.isdisjoint(_names_in(code)):
            return True
    return False


_PASSES_ON = {"__call__", "_call_impl", "_wrapped_call_impl"}


def _names_in(code: CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names, *(name for each in inner for name in _names_in(each))}
