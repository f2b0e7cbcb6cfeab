"""Directories of `torch.distributed.checkpoint`, and the keys that its users choose.

FSDP2, FSDP1 and others save {"model": ..., "optimizer": ...}; torchtitan the model's tensors beside
"optimizer", whose state has flat keys; Lightning "state_dict" and "optimizer_0" and a file
`meta.pt`; accelerate a directory for the model and one for the optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from composable_shard.peers.companions import read_companions
from composable_shard.peers.pickles import Inert, read_pickle
from composable_shard.peers.run import PeerOptimizer, PeerRun, by_name
from composable_shard.peers.tensors import PeerTensor, Span, boxed
from composable_shard.peers.zips import TorchFile, read_number, read_torch_file

_METADATA = ".metadata"
_META = "meta.pt"  # Lightning's
_MODELS = ("model", "state_dict", "module", "app")
_OPTIMIZERS = ("optimizer", "optim", "optimizers")
_NUMBERED = re.compile(r"optimizer_(\d+)")
_SCHEDULERS = ("lr_scheduler", "scheduler", "lr_schedulers")
_SCALERS = ("scaler", "grad_scaler")
_STEPS = ("step", "global_step", "iteration")
_FLAT = ("state", "param_groups")
_WRITER = re.compile(r"__(\d+)_")  # the rank in a file's name


def detect(path: Path) -> bool:
    """Return whether a directory is DCP's, or accelerate's with two of them."""
    return (path / _METADATA).is_file() or bool(_parts_of(path))


def _parts_of(path: Path) -> list[Path]:
    """Return the directories of model and optimizers that accelerate writes for FSDP."""
    found = [*path.glob("pytorch_model_fsdp_*"), *path.glob("optimizer_*")]
    return sorted(each for each in found if (each / _METADATA).is_file())


def read(path: Path) -> PeerRun:
    """Return the run."""
    if not (path / _METADATA).is_file():
        return _read_parts(path)
    found, ranks = _read_tree(path)
    run = _sorted_out(path, found)
    run.world_size = ranks
    meta = path / _META
    if meta.is_file():
        _read_meta(run, read_torch_file(meta))
    return run


def _read_parts(path: Path) -> PeerRun:
    joined: dict[str, Any] = {}
    ranks = 1
    for part in _parts_of(path):
        found, number = _read_tree(part)
        ranks = max(ranks, number)
        joined |= found
    run = _sorted_out(path, joined)
    run.kind = "accelerate, FSDP's sharded state dicts"
    run.world_size = ranks
    read_companions(run, set(_parts_of(path)))
    return run


def _read_meta(run: PeerRun, meta: Mapping[str, Any]) -> None:
    """Take what Lightning keeps in a file beside the tensors."""
    run.kind = "Lightning, ModelParallelStrategy"
    run.version = str(meta.get("pytorch-lightning_version", ""))
    run.step = int(meta.get("global_step") or run.step)
    schedulers = meta.get("lr_schedulers") or []
    run.schedulers = {
        "" if len(schedulers) == 1 else str(number): each for number, each in enumerate(schedulers)
    }
    used = ("pytorch-lightning_version", "global_step", "lr_schedulers")
    run.left += [str(key) for key, each in meta.items() if key not in used and each]


# Tensors


def _read_tree(path: Path) -> tuple[dict[str, Any], int]:
    """Return the nested values, and how many ranks have written files."""
    file = path / _METADATA
    try:
        metadata = read_pickle(file.read_bytes(), str(file))
        attributes = metadata.attributes
        described: Mapping[str, Any] = attributes["state_dict_metadata"]
        places = _places(path, attributes["storage_data"])
        paths: Mapping[str, Any] = attributes.get("planner_data") or {}
        flat = {key: _read_item(key, each, places, str(file)) for key, each in described.items()}
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"{file} is not the metadata of torch.distributed.checkpoint: "
            f"{type(error).__name__}: {error}"
        ) from error
    nested: dict[Any, Any] = {}
    for key, value in flat.items():
        steps = paths.get(key)
        *outer, last = steps if isinstance(steps, list | tuple) and steps else (key,)
        place = nested
        for step in outer:
            place = place.setdefault(step, {})
        place[last] = value
    writers = {match[1] for name, *_ in places.values() if (match := _WRITER.match(name))}
    return _with_lists(nested), max(1, len(writers))


_Place = tuple[str, int, int]  # file, offset, length
_Index = tuple[str, tuple[int, ...] | None]


def _places(path: Path, found: Mapping[Any, Any]) -> dict[_Index, tuple[str, str, int, int]]:
    """Return name and path of the file, offset and length of each item, by name and offsets."""
    places = {}
    for key, each in found.items():
        offsets = key.attributes.get("offset")
        index = key.attributes["fqn"], None if offsets is None else tuple(offsets)
        info = each.attributes
        name = info["relative_path"]
        if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(
                f"{path / _METADATA} names the file {name!r}, outside of its directory"
            )
        if info.get("transform_descriptors"):
            raise ValueError(
                f"{path} has transformed items ({info['transform_descriptors']}): load it with "
                "dcp.load, and save it without transforms"
            )
        places[index] = Path(name).name, str(path / name), int(info["offset"]), int(info["length"])
    return places


def _read_item(
    key: str, described: Inert, places: Mapping[_Index, tuple[str, str, int, int]], what: str
) -> Any:
    if "chunks" not in described.attributes:
        _, file, offset, length = places[key, None]
        return TorchFile(file, offset, length).read()
    properties = described.attributes["properties"]
    dtype = properties.args[0] if properties.args else properties.attributes["dtype"]
    shape = torch.Size(described.attributes["size"])
    spans: list[Span] = []
    for chunk in described.attributes["chunks"]:
        offsets = tuple(chunk.attributes["offsets"])
        sizes = tuple(chunk.attributes["sizes"])
        box = tuple((low, low + size) for low, size in zip(offsets, sizes, strict=True))
        fits = len(box) == len(shape) and all(
            0 <= low <= high <= size for (low, high), size in zip(box, shape, strict=False)
        )
        if not fits or not isinstance(dtype, torch.dtype):
            raise ValueError(f"{what} has '{key}' of shape {tuple(shape)} with the part {box}")
        # After its check, and before the look-up: no bytes are written of an empty part.
        if 0 in sizes:
            continue
        place = places.get((key, offsets), places.get((key, None)))
        if place is None:
            raise ValueError(f"{what} does not say where '{key}' from {offsets} on is")
        _, file, offset, length = place
        spans.append(boxed(file, offset, shape, box, item_nbytes=length))
    return PeerTensor(shape, dtype, tuple(spans))


def _with_lists(value: Any) -> Any:
    """Return nested dicts, with a list for each dict whose keys are 0, 1, 2, ..."""
    if not isinstance(value, dict):
        return value
    inside = {key: _with_lists(each) for key, each in value.items()}
    is_list = bool(inside) and all(isinstance(key, int) for key in inside)
    return [inside[number] for number in sorted(inside)] if is_list else inside


# Keys


def _sorted_out(path: Path, found: Mapping[str, Any]) -> PeerRun:
    """Return the run under the keys that are there."""
    model_key = next((k for k in _MODELS if isinstance(found.get(k), Mapping)), None)
    inner: Mapping[str, Any] = found
    if model_key == "app" and "model" in found["app"]:
        inner, model_key = found["app"], "model"
    kind = "torch.distributed.checkpoint"
    run = PeerRun(kind, path, {})
    optimizers = {key: inner[key] for key in inner if _is_optimizer(key, inner[key])}
    schedulers = [key for key in _SCHEDULERS if isinstance(inner.get(key), Mapping | list)]
    used = {*optimizers, *schedulers}
    if model_key is not None:
        run.model = dict(inner[model_key])
        used.add(model_key)
    else:
        run.kind = "torch.distributed.checkpoint, keys of torchtitan"
        names = [key for key, each in inner.items() if isinstance(each, PeerTensor)]
        run.model = {key: inner[key] for key in names if key not in _STEPS}
        used |= run.model.keys()
    for key, each in optimizers.items():
        number = _NUMBERED.fullmatch(key)
        is_one = len(optimizers) == 1
        name = "" if is_one else number[1] if number else key
        run.optimizers |= _read_optimizers(each, name, f"'{key}' of {path}")
    for key in schedulers[:1]:
        run.schedulers = by_name(inner[key], "last_epoch")
    for key in [key for key in _SCALERS if isinstance(inner.get(key), Mapping)][:1]:
        run.scaler = inner[key]
        used.add(key)
    # It uses a key, so before what is left.
    run.step = _step_of(inner, used)
    run.left = [str(key) for key in inner if key not in used]
    return run


def _is_optimizer(key: Any, value: Any) -> bool:
    is_named = key in _OPTIMIZERS or bool(_NUMBERED.fullmatch(str(key)))
    return is_named and isinstance(value, Mapping | list)


def _step_of(found: Mapping[str, Any], used: set[str]) -> int:
    places: list[tuple[str, Any]] = [(key, found.get(key)) for key in _STEPS]
    state = found.get("train_state")
    if isinstance(state, Mapping):
        places.append(("train_state", state.get("step")))
    for key, value in places:
        if isinstance(value, PeerTensor) and value.shape.numel() == 1:
            value = read_item_number(value)
        if isinstance(value, int):
            used.add(key)
            return value
    return 0


def read_item_number(tensor: PeerTensor) -> Any:
    """Return the number in a tensor of one element that is an item of a file."""
    (span,) = tensor.spans
    return read_number(TorchFile(span.file, span.offset, span.item_nbytes).read())


def _read_optimizers(found: Any, name: str, where: str) -> dict[str, PeerOptimizer]:
    if isinstance(found, list):
        return {str(number): PeerOptimizer.parse(each, where) for number, each in enumerate(found)}
    if found.keys() >= set(_FLAT):
        return {name: PeerOptimizer.parse(found, where)}
    if any(str(key).startswith("param_groups.") for key in found):
        return {name: _unflattened(found, where)}
    return {
        str(key): PeerOptimizer.parse(each, f"'{key}' in {where}") for key, each in found.items()
    }


def _unflattened(found: Mapping[str, Any], where: str) -> PeerOptimizer:
    """Return the state behind the keys "state.FQN.exp_avg" and "param_groups.FQN.lr".

    Parameters with equal options form a group.
    """
    options: dict[str, dict[str, Any]] = {}
    state: dict[Any, dict[str, Any]] = {}
    for key, value in found.items():
        kind, _, rest = key.partition(".")
        fqn, _, name = rest.rpartition(".")
        if kind == "state":
            state.setdefault(fqn, {})[name] = value
        elif kind == "param_groups":
            options.setdefault(fqn, {})[name] = value
        else:
            raise ValueError(f"unexpected key '{key}' in {where}")
    groups: list[dict[str, Any]] = []
    for fqn, each in options.items():
        each = {key: value for key, value in each.items() if key not in ("params", "param_names")}
        group = next((g for g in groups if {**g, "params": None} == {**each, "params": None}), None)
        if group is None:
            group = {**each, "params": []}
            groups.append(group)
        group["params"].append(fqn)
    return PeerOptimizer(groups, state, has_groups=False)
