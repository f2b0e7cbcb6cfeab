"""A checkpoint as one nested dict of whole tensors, in one process without ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from composable_shard.checkpoint.draft import SaveArguments, list_items
from composable_shard.checkpoint.file_format import StoredTensor
from composable_shard.checkpoint.objects import find_stored
from composable_shard.checkpoint.reader import (
    CheckpointReader,
    TensorReader,
    find_checkpoint,
)
from composable_shard.checkpoint.writer import plan_save, write_checkpoint
from composable_shard.comm import get_host_group
from composable_shard.layout import whole
from composable_shard.state_dict import json_tree


def open_checkpoint(path: str | os.PathLike[str], step: int | None = None) -> CheckpointReader:
    """Open a checkpoint, whose files must be there in full length; a context manager."""
    folder = find_checkpoint(path, step)
    if folder is None:
        raise ValueError(f"there is no complete checkpoint in {os.path.abspath(path)}")
    reader = CheckpointReader(folder)
    reader.check_files()
    return reader


def read_model(reader: TensorReader, *, with_ties: bool) -> Iterator[tuple[str, Any]]:
    """Yield the name and verified value of each tensor of the model; of tied tensors one or all."""
    seen: set[str | None] = set()
    for fqn, encoded in find_stored(reader, "model").items():
        name = json_tree.tensor_name(encoded)
        if with_ties or name is None or name not in seen:
            yield fqn, json_tree.decode(encoded, reader.read_whole)
        seen.add(name)


def read_optimizers(reader: TensorReader) -> dict[str, Any]:
    """Return the state of each optimizer by name, as `get_optimizer_state_dict` makes it whole."""
    stored = find_stored(reader, "optimizer")
    if any("parts" in state for state in stored.values()):
        raise ValueError(
            f"{reader.folder} has optimizer state in blocks of few bits, which no other format "
            "holds. Load it with load_checkpoint and the optimizer that it is of."
        )
    return {name: json_tree.decode(each, reader.read_whole) for name, each in stored.items()}


def read_objects(reader: TensorReader, kind: str) -> dict[str, Any]:
    """Return the states of all schedulers or scalers by name."""
    stored = find_stored(reader, kind)
    return {name: json_tree.decode(each, reader.read_whole) for name, each in stored.items()}


def find_ties(reader: TensorReader) -> dict[str, str]:
    """Return the first name of each tied tensor of the model, by its other names."""
    first: dict[str, str] = {}
    ties: dict[str, str] = {}
    for fqn, encoded in find_stored(reader, "model").items():
        name = json_tree.tensor_name(encoded)
        if name is not None and first.setdefault(name, fqn) != fqn:
            ties[fqn] = first[name]
    return ties


def tensors_of(reader: TensorReader, kind: str) -> dict[str, StoredTensor]:
    """Return the tensors of a part of the checkpoint: of the model, of an optimizer."""
    tensors = reader.metadata.tensors
    return {name: each for name, each in tensors.items() if name.partition("/")[0] == kind}


def verify(reader: CheckpointReader) -> None:
    """Compare all bytes with their checksums, without keeping them."""
    for name, stored in reader.metadata.tensors.items():
        reader.verify(name, whole(stored.shape))


def write_state(
    path: str | os.PathLike[str],
    model: Mapping[str, Any],
    objects: Mapping[str, Mapping[str, Any]],
    step: int,
) -> str:
    """Save the state of a model as `save_checkpoint` does.

    Args:
        objects: States by kind, "optimizer", "scheduler" or "scaler", and by name.
    """
    tensors: dict[str, Tensor] = {}
    tree: dict[str, Any] = {
        "model": {fqn: json_tree.encode(v, f"model/{fqn}", tensors) for fqn, v in model.items()},
        **{
            kind: {
                name: json_tree.encode(state, f"{kind}/{name}".rstrip("/"), tensors)
                for name, state in states.items()
            }
            for kind, states in objects.items()
        },
        **{kind: {} for kind in ("scheduler_kinds", "optimizer_kinds")},
        "extra": None,
    }
    group = get_host_group()
    arguments = SaveArguments(step, os.fspath(path), None, False)
    plan = plan_save(group, arguments, lambda: (tree, list_items(tensors, {})))
    return str(write_checkpoint(group, plan, None, None))
