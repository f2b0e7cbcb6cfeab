"""Ready-made rules for `shard_model`."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from composable_shard._module_tree import has_forward
from composable_shard._sharding_rules import SizeSelector

__all__ = ["by_class", "by_size", "transformer_blocks"]

# A list of blocks this much smaller than the largest one's is part of a stem or a head.
_MIN_BLOCK_SHARE = 0.01


def by_class(*classes: type[nn.Module], **options: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return rules for `shard_model`: every instance of `classes` is a unit.

    Args:
        classes: Module classes; instances of subclasses count.
        options: Options of `fully_shard` for these units.

    Returns:
        Pairs for `shard_model`, alone or unpacked among other rules.

    Raises:
        ValueError: If no class or something other than module classes is given.
    """
    wrong = [cls for cls in classes if not (isinstance(cls, type) and issubclass(cls, nn.Module))]
    if wrong or not classes:
        got = f"an instance of {type(wrong[0]).__name__}" if wrong else "nothing"
        if wrong and isinstance(wrong[0], type):
            got = f"the class {wrong[0].__name__}"
        raise ValueError(f"expected by_class to be given module classes, got {got}")
    return [(classes if len(classes) > 1 else classes[0], options)]


def by_size(min_numel: int, **options: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return rules for `shard_model`: modules become units from the inside out, by size.

    A module becomes a unit when the parameters in it that no unit has yet have `min_numel`
    elements or more. A parameter counts once, ignored ones not at all. Containers without forward
    and what is inside `nn.MultiheadAttention`, which never calls it, stay in the unit around them.
    `size_based_auto_wrap_policy` of FSDP1, which can be passed too, differs from this in that it
    leaves `nn.MultiheadAttention` itself in the unit around it, and counts a tied parameter in
    every module that has it.

    Args:
        min_numel: Elements from which on a module is worth a unit.
        options: Options of `fully_shard` for these units.

    Returns:
        Pairs for `shard_model`, alone or unpacked among other rules.

    Raises:
        ValueError: If `min_numel` is not a positive integer.
    """
    if not isinstance(min_numel, int) or isinstance(min_numel, bool) or min_numel < 1:
        raise ValueError(f"expected min_numel to be a positive integer, got {min_numel!r}")
    return [(SizeSelector(min_numel), options)]


def transformer_blocks(model: nn.Module, **options: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return rules for `shard_model`: the blocks of the model's repeated lists are units.

    Such a list is a `ModuleList` or `Sequential` of two or more modules, all of one class. Lists
    inside the blocks of another list don't count, and where there are lists of modules that
    consist of modules, lists of single layers don't either. Of the rest, the list with the most
    parameters is taken, and all those beside it (a decoder's beside an encoder's) whose blocks
    have at least a hundredth of the parameters of its blocks.

    Args:
        model: The model.
        options: Options of `fully_shard` for these units.

    Returns:
        One pair for each list, alone or unpacked among other rules.

    Raises:
        ValueError: If there is no such list.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected model to be an nn.Module, got {type(model).__name__}")
    lists = {name: module for name, module in model.named_modules() if _is_block_list(module)}
    composite = {name: module for name, module in lists.items() if _has_composite_children(module)}
    outermost = _outermost(composite or lists)
    sizes = {name: _block_numel(module) for name, module in outermost.items()}
    if not any(sizes.values()):
        raise ValueError(
            f"no ModuleList or Sequential in {type(model).__name__} holds two or more modules that "
            "have parameters and are all of one class. Say which modules are the blocks: "
            "by_class(Block), or an FQN glob as in [('layers.*', {})], or by_size(min_numel)."
        )
    largest = _block_numel(max(outermost.values(), key=_numel))
    return [
        (f"{escape_glob(name)}.*".lstrip("."), dict(options))
        for name, size in sizes.items()
        if size >= _MIN_BLOCK_SHARE * largest
    ]


def escape_glob(fqn: str) -> str:
    """Return a glob that is about `fqn` alone."""
    return re.sub(r"([*?\[])", r"[\1]", fqn)


def _is_block_list(module: nn.Module) -> bool:
    children = list(module.children())
    return (
        isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(children) >= 2
        and len({type(child) for child in children}) == 1
        and has_forward(children[0])
    )


def _has_composite_children(module: nn.Module) -> bool:
    return any(next(child.children(), None) is not None for child in module.children())


def _outermost(lists: dict[str, nn.Module]) -> dict[str, nn.Module]:
    inner = {
        below for module in lists.values() for below in module.modules() if below is not module
    }
    return {name: module for name, module in lists.items() if module not in inner}


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _block_numel(module: nn.Module) -> float:
    return _numel(module) / len(list(module.children()))
