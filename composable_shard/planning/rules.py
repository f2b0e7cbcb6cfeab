"""Rules that select modules and give them options; ready-made rules."""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from torch import Tensor, nn
from typing_extensions import Unpack

from composable_shard.construct import has_forward
from composable_shard.options import OptionsDict

# The keys are checked by parse_rules.
Rules: TypeAlias = Mapping[Any, Mapping[str, Any] | None] | Sequence[Any]

_EXPECTED_RULES = (
    "expected rules to be a mapping or a sequence of pairs (module class, tuple of classes, FQN "
    "glob or predicate) -> options or None"
)
_NO_POLICY = (
    "In the place of an auto-wrap policy of FSDP1 write by_class(Layer) or "
    "transformer_blocks(model)."
)


@dataclass(frozen=True)
class Rule:
    """A selector and options; options None leave the modules in the unit around them."""

    label: str
    is_match: Callable[[str, nn.Module], bool]  # of an FQN and a module
    options: Mapping[str, Any] | None


def parse_rules(rules: object) -> list[Rule]:
    """Turn what the user passed into rules with labels for messages."""
    pairs = list(_pairs(rules))
    parsed = []
    for number, (key, options) in enumerate(pairs, 1):
        label = f"rule {number}"
        if not isinstance(options, (Mapping, type(None))):
            raise ValueError(
                f"{label}: expected a dict of options for fully_shard, or None for no unit of its "
                f"own, got {type(options).__name__}"
            )
        is_match, text = _selector(key, label)
        parsed.append(Rule(f"{label} ({text})", is_match, options))
    return parsed


def _pairs(rules: object) -> Iterator[tuple[object, object]]:
    if isinstance(rules, Mapping):
        yield from rules.items()
    elif isinstance(rules, Sequence) and not isinstance(rules, str):
        for number, item in enumerate(rules, 1):
            if isinstance(item, (tuple, list)) and len(item) == 2:
                yield item[0], item[1]
            else:
                raise ValueError(
                    f"rule {number}: expected a pair (selector, options or None), "
                    f"got {type(item).__name__}. Unpack ready-made rules among others: "
                    f"[*by_class(Layer), ('head', None)]. {_NO_POLICY}"
                )
    else:
        got = repr(rules) if isinstance(rules, str) else _name(rules)
        raise ValueError(f"{_EXPECTED_RULES}; got {got}. {_NO_POLICY}")


def _selector(key: object, label: str) -> tuple[Callable[[str, nn.Module], bool], str]:
    """Return a rule's test for an FQN and a module, and the rule's name."""
    if isinstance(key, str):
        pattern = compile_glob(key)
        # The root has no FQN: "**" selects everything in the model.
        return (lambda fqn, _: bool(fqn and pattern.fullmatch(fqn))), repr(key)
    classes = key if isinstance(key, tuple) else (key,)
    if classes and all(isinstance(each, type) and issubclass(each, nn.Module) for each in classes):
        names = ", ".join(each.__name__ for each in classes)
        text = f"({names})" if isinstance(key, tuple) else names
        return (lambda _, module: isinstance(module, classes)), text
    if isinstance(key, (type, nn.Module)) or not callable(key):
        kind = f"the class {key.__name__}" if isinstance(key, type) else type(key).__name__
        raise ValueError(
            f"{label}: expected a module class, a tuple of them, an FQN glob or a predicate, got "
            f"{kind}. {_NO_POLICY}"
        )
    if not _is_predicate(key):
        raise ValueError(
            f"{label}: expected a predicate that is called with an FQN and a module, "
            f"got {_name(key)}{inspect.signature(key)}. {_NO_POLICY}"
        )
    return cast("Callable[[str, nn.Module], bool]", key), f"predicate {_name(key)}"


def _name(key: object) -> str:
    """Return a name that is the same on all ranks, so without an address."""
    while isinstance(key, functools.partial):
        key = key.func
    return str(getattr(key, "__name__", type(key).__name__))


def _is_predicate(key: Callable[..., object]) -> bool:
    try:
        signature = inspect.signature(key)
    except ValueError:  # a builtin without one
        return True
    try:
        signature.bind("fqn", nn.Identity())
    except TypeError:
        return False
    return "recurse" not in signature.parameters  # FSDP1's


# --- globs ---


_GLOB_TOKEN = re.compile(r"(?P<gap>(?:^|(?<=\.))\*\*\.)|\*\*|\*|\?|\[!?[^\].]+\]|.", re.DOTALL)


def compile_glob(glob: str) -> re.Pattern[str]:
    """Return the pattern that fully matches the FQNs that `glob` selects.

    `*` stands for any characters of one component, `?` for one, `[ab]` and `[!ab]` for one of a
    set; `**` for any characters across components. As a component before others, `**` may also
    stand for no component.

    Example: "layers.*" selects layers.0 and not layers.0.up; "layers.**" both; "**.up" selects up
    and layers.0.up.
    """
    return re.compile("".join(_translate(token) for token in _GLOB_TOKEN.finditer(glob)))


def _translate(token: re.Match[str]) -> str:
    text = token.group()
    if token["gap"]:
        return r"(?:[^.]+\.)*"
    if len(text) > 2 and text[0] == "[":
        members = text[1:-1].replace("\\", "\\\\").replace("^", "\\^")
        return f"[^.{members[1:]}]" if members[0] == "!" else f"[{members}]"
    return {"**": ".*", "*": "[^.]*", "?": "[^.]"}.get(text, re.escape(text))


# --- ready-made rules ---


# A list whose blocks are this much smaller than the largest list's is part of a stem or a head.
_MIN_BLOCK_SHARE = 0.01
# Larger blocks of a growing list, as parts of the model, are stages.
_MAX_BLOCK_SHARE = 1 / 3
# Smaller lists, as parts of the model, stay in the root; so do modules where there is no list.
_MIN_LIST_SHARE = 0.01
_MAX_SIZED_SHARE = 1 / 8  # where there is no list, larger modules are split


def by_class(
    *classes: type[nn.Module], **options: Unpack[OptionsDict]
) -> list[tuple[Any, OptionsDict]]:
    """Return rules for `shard_model`: every instance of `classes` is a unit.

    Args:
        classes: Module classes; instances of subclasses count.
        options: Options of `fully_shard` for these units.

    Returns:
        Pairs for `shard_model`, alone or unpacked among other rules.

    Raises:
        ValueError: If no class is given, or an argument is not a module class.
    """
    wrong = [cls for cls in classes if not (isinstance(cls, type) and issubclass(cls, nn.Module))]
    if wrong or not classes:
        got = f"an instance of {type(wrong[0]).__name__}" if wrong else "nothing"
        if wrong and isinstance(wrong[0], type):
            got = f"the class {wrong[0].__name__}"
        raise ValueError(f"expected by_class to be given module classes, got {got}")
    return [(classes if len(classes) > 1 else classes[0], options)]


def transformer_blocks(
    model: nn.Module, **options: Unpack[OptionsDict]
) -> list[tuple[Any, OptionsDict]]:
    """Return rules for `shard_model`: blocks of repeated lists are units, and large embeddings.

    A repeated list is a `ModuleList` or `Sequential` of two or more modules, all of one class, or
    of classes that the model names in `_no_split_modules`, as Hugging Face's models do. Lists
    inside the blocks of another list don't count. Lists of single layers don't count if there are
    lists of modules that contain modules. The list with the most parameters is taken. Other lists
    beside it (a decoder's beside an encoder's) are taken if their blocks have at least a hundredth
    of the parameters of its blocks. A list of one module, which runs again and again (ALBERT),
    counts only if there is no other list.

    Where a list grows and its largest block has more than a third of the model's parameters, its
    blocks are stages, as in hierarchical vision models: the blocks of the lists inside them are
    taken instead, and a stage without a list as it is. Stages with less than a hundredth of the
    parameters stay in the root. In a model without lists modules are taken by size, of a hundredth
    to an eighth of the parameters where there are such.

    An `nn.Embedding` outside of these lists becomes a unit if it has at least as many parameters as
    a block and shares none with another module. The root then doesn't hold it from its forward to
    its backward. This costs three more collectives in a step; one of them is a second gather of the
    embedding. If another module's forward reads the embedding's weight, take its pair out of the
    list.

    Args:
        model: The model.
        options: Options of `fully_shard` for these units.

    Returns:
        One pair for each list and each such embedding, alone or unpacked among other rules.

    Raises:
        ValueError: If there is no such list, and no such module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected model to be an nn.Module, got {type(model).__name__}")
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    named = list(model.named_modules())
    lists = {name: module for name, module in named if _is_block_list(module, kinds)}
    if not lists:
        single = {name: module for name, module in named if _is_block_list(module, kinds, least=1)}
        lists = {name: module for name, module in single.items() if _has_composite_children(module)}
    composite = {name: module for name, module in lists.items() if _has_composite_children(module)}
    outermost = _outermost(composite or lists)
    sizes = {name: _block_numel(module) for name, module in outermost.items()}
    sized = [] if any(sizes.values()) else list(_by_size("", model, _numel(model)))
    if len(sized) > 1:
        return [(escape_glob(name), options.copy()) for name in sized]
    if not any(sizes.values()):
        raise ValueError(
            f"no ModuleList or Sequential in {type(model).__name__} holds two or more modules that "
            "have parameters and are all of one class. Say which modules are the blocks: "
            "by_class(Layer), or an FQN glob as in [('layers.*', {})]."
        )
    largest = _block_numel(max(outermost.values(), key=_numel))
    taken = [name for name, size in sizes.items() if size >= _MIN_BLOCK_SHARE * largest]
    globs = [
        glob for name in taken for glob in _block_globs(name, outermost[name], kinds, _numel(model))
    ]
    blocks = [outermost[name] for name in taken]
    globs += map(escape_glob, _embeddings_beside(blocks, model, largest))
    return [(glob, options.copy()) for glob in globs]


def _block_globs(name: str, module: nn.Module, kinds: set[str], model_numel: int) -> Iterator[str]:
    """Yield globs of a list's blocks, or of blocks inside them where they are stages.

    The stages of vision models grow, and one may hold most of the model. Equal blocks with lists
    are no stages: their lists hold experts, of which some run.
    """
    numels = [_numel(child) for child in module.children()]
    is_growing = max(numels) > _MAX_BLOCK_SHARE * model_numel and min(numels) < max(numels)
    inside = {key: _lists_inside(stage, kinds) for key, stage in module.named_children()}
    if not is_growing or not any(inside.values()):
        yield f"{escape_glob(name)}.*".lstrip(".")
        return
    for key, stage in module.named_children():
        stage_name = f"{name}.{key}".lstrip(".")
        if _numel(stage) < _MIN_LIST_SHARE * model_numel:
            continue  # its gathers would cost more than its memory in the root
        if not inside[key]:
            yield escape_glob(stage_name)
        for inner_name, each in inside[key].items():
            yield from _block_globs(f"{stage_name}.{inner_name}", each, kinds, model_numel)


def _lists_inside(stage: nn.Module, kinds: set[str]) -> dict[str, nn.Module]:
    """Return the outermost lists of blocks below a module by name; of one block, if need be."""
    for least in (2, 1):
        found = {
            name: module
            for name, module in stage.named_modules()
            if name and _is_block_list(module, kinds, least) and _has_composite_children(module)
        }
        if found:
            return _outermost(found)
    return {}


def _by_size(name: str, module: nn.Module, model_numel: int) -> Iterator[str]:
    """Yield names of modules with forwards below a module that are neither tiny nor too large."""
    for key, child in module.named_children():
        child_name, numel = f"{name}.{key}".lstrip("."), _numel(child)
        if numel == 0 or numel < _MIN_LIST_SHARE * model_numel:
            continue
        # A layer of torch's own reads its children's weights itself, as MultiheadAttention does.
        is_torchs = type(child).__module__.startswith("torch.nn.") and has_forward(child)
        can_split = not is_torchs or isinstance(child, nn.Sequential)
        is_large = can_split and numel > _MAX_SIZED_SHARE * model_numel
        below = list(_by_size(child_name, child, model_numel)) if is_large else []
        if below:
            yield from below
        elif has_forward(child):
            yield child_name
        else:
            yield from _by_size(child_name, child, model_numel)


def _embeddings_beside(
    blocks: Iterable[nn.Module], model: nn.Module, min_numel: float
) -> Iterator[str]:
    """Yield FQNs of large embeddings outside of the blocks whose weight no other module has."""
    inside = {inner for each in blocks for inner in each.modules()}
    holders: Counter[Tensor] = Counter(
        param for each in model.modules() for param in each.parameters(recurse=False)
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module not in inside and module is not model:
            is_large = module.weight.numel() >= min_numel
            if is_large and module.max_norm is None and holders[module.weight] == 1:
                yield name


def escape_glob(fqn: str) -> str:
    """Return a glob that selects `fqn` alone."""
    return re.sub(r"([*?\[])", r"[\1]", fqn)


def _is_block_list(module: nn.Module, kinds: set[str], least: int = 2) -> bool:
    children = list(module.children())
    classes = {type(child) for child in children}
    return (
        isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(children) >= least
        and (len(classes) == 1 or {each.__name__ for each in classes} <= kinds)
        and all(map(has_forward, children))
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
