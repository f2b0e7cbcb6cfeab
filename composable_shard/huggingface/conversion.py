"""Names under which a directory holds a model's tensors, where they are not the model's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Joined:
    """A tensor that a directory holds in parts.

    Attributes:
        parts: Names in the directory, or again `Joined`.
        dim: Along which the parts follow each other.
        is_new: Whether this dim is new, as in `torch.stack`; otherwise as in `torch.cat`.
    """

    parts: tuple[Source, ...]
    dim: int = 0
    is_new: bool = False

    @property
    def names(self) -> list[str]:
        """All names of the directory in it."""
        return [name for part in self.parts for name in names_in(part)]


Source = str | Joined  # where a tensor of the model is in a directory


def names_in(source: Source) -> list[str]:
    """Return the names of the directory that a tensor is made of."""
    return [source] if isinstance(source, str) else source.names


def find_sources(model: nn.Module, own: Iterable[str], stored: Iterable[str]) -> dict[str, Source]:
    """Return the sources of a `transformers` model's tensors, as that library's own loader does.

    Args:
        model: Any model; of another library there are none.
        own: The model's names.
        stored: The directory's names.

    Raises:
        NotImplementedError: If a tensor is computed in a way other than joining, naming it.
    """
    library: Any = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return {}
    try:
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
        core: Any = importlib.import_module("transformers.core_model_loading")
    except ImportError:  # older ones rename nothing
        return {}
    transforms = mapping.get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, core.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, core.WeightConverter)]
    by_pattern = {p: converter for converter in converters for p in converter.source_patterns}
    known = dict.fromkeys(own, True)
    sources: dict[str, Source] = {}
    collected: dict[str, dict[str, list[Source]]] = {}
    for name in sorted(stored, key=_natural):
        target, pattern = core.rename_source_key(
            name, renamings, converters, model.base_model_prefix, known
        )
        if name in known or pattern is None:
            sources[name if name in known else target] = name
        else:
            collected.setdefault(target, {}).setdefault(pattern, []).append(name)
    for target, parts in collected.items():
        sources[target] = _join(target, by_pattern[next(iter(parts))], parts)
    return sources


def _natural(name: str) -> list[Any]:
    """Return a key that sorts numbers by value."""
    parts = name.split(".")
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def _join(target: str, converter: Any, parts: dict[str, list[Source]]) -> Source:
    # In the order of the patterns: the gate before what it gates.
    lists = [parts[pattern] for pattern in converter.source_patterns if pattern in parts]
    for operation in converter.operations:
        kind = type(operation).__name__
        if kind == "MergeModulelist":
            lists = [[Joined(tuple(each), operation.dim, is_new=True)] for each in lists]
        elif kind == "Concatenate":
            lists = [[Joined(tuple(part for each in lists for part in each), operation.dim)]]
        else:
            raise NotImplementedError(
                f"transformers makes '{target}' by {kind}, which needs whole tensors. Load the "
                "model with from_pretrained on the first rank, and pass its state dict to "
                "set_model_state_dict with StateDictOptions(broadcast_from_rank0=True)."
            )
    ((source,),) = lists
    return source
