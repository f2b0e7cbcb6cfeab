"""Directories of safetensors files in the layout of Hugging Face's libraries.

A directory holds either `model.safetensors`, or files `model-00001-of-0000N.safetensors` and an
index, `model.safetensors.index.json`, which names the file of each tensor. Their names may differ
from the model's, and a tensor may be in parts. The package `safetensors` reads and writes the
files. It maps them to memory, so that only copied bytes are read.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composable_shard.checkpoint import sync_path

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_NUMBERED = re.compile(r"model-\d+-of-\d+\.safetensors")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def require_safetensors() -> Any:
    """Return the package `safetensors.torch`."""
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(
            "safetensors files need the package safetensors (and numpy, to write): "
            "pip install safetensors numpy"
        ) from error


def parse_nbytes(size: int | str, name: str = "max_shard_size") -> int:
    """Return the bytes of a number or text such as "5GB" or "500MiB"; `name` is for errors."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Z]*)", str(size).strip().upper())
    unit = _UNITS.get(match[2]) if match else None
    nbytes = int(float(match[1]) * unit) if match and unit else 0
    if nbytes < 1:
        raise ValueError(
            f"expected {name} as a positive number of bytes or a text such as '5GB' or '500MiB', "
            f"got {size!r}"
        )
    return nbytes


# Names in a directory that are not the model's own


@dataclass(frozen=True)
class Joined:
    """A tensor that a directory holds in parts.

    Attributes:
        parts: Names in the directory, or further `Joined`.
        dim: Dim along which the parts follow each other.
        is_new: Whether this dim is new, as in `torch.stack`; otherwise as in `torch.cat`.
    """

    parts: tuple[Source, ...]
    dim: int = 0
    is_new: bool = False

    @property
    def names(self) -> list[str]:
        """All names in the directory that it joins."""
        return [name for part in self.parts for name in names_in(part)]


Source = str | Joined  # the place of a model's tensor in a directory


def names_in(source: Source) -> list[str]:
    """Return the names in the directory that make up a tensor."""
    return [source] if isinstance(source, str) else source.names


def find_sources(model: nn.Module, own: Iterable[str], stored: Iterable[str]) -> dict[str, Source]:
    """Return the sources of a `transformers` model's tensors, as that library's own loader does.

    They follow from the names of the model and of the directory; none for any other model.
    """
    library: Any = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return {}
    try:
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
        core: Any = importlib.import_module("transformers.core_model_loading")
    except ImportError:  # older versions rename nothing
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


# Files


class TensorInfo(NamedTuple):
    """One tensor in a file's header."""

    shape: tuple[int, ...]
    file: str


class TensorFiles:
    """A directory or file, open for reading; a context manager.

    All headers are read and checked at once, but no values.
    """

    def __init__(self, path: Path) -> None:
        """Open the files."""
        self._open_file: Any = importlib.import_module("safetensors").safe_open
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}
        self._slices: dict[str, Any] = {}
        self._sources: dict[str, Source] = {}
        self.tensors: dict[str, TensorInfo] = {}  # all tensors by name
        # By file name: `_digest` of each file, and of the index's names, to compare ranks
        self.digests: dict[str, str] = {}
        try:
            index, found = _find_files(path)
            if index is not None:
                weight_map = {file.name: names for file, names in found.items()}
                text = json.dumps(weight_map, sort_keys=True)
                self.digests[index.name] = hashlib.sha256(text.encode()).hexdigest()[:16]
            for file, names in found.items():
                self._read_header(file, names)
        except BaseException:
            self.close()
            raise

    def _read_header(self, path: Path, names: list[str] | None) -> None:
        """Open a file and note the tensors that the index names, or all of them."""
        try:
            file = self._stack.enter_context(self._open_file(str(path), framework="pt"))
            self._files[path] = file
            present = set(file.keys())
            self.digests[path.name] = _digest(path)
            for name in sorted(present) if names is None else names:
                if name not in present:
                    raise ValueError(f"the index says that '{name}' is in it, and it is not")
                piece = self._slices[name] = file.get_slice(name)
                self.tensors[name] = TensorInfo(tuple(piece.get_shape()), path.name)
        except FileNotFoundError:
            raise ValueError(f"'{path}' is missing: the index names it") from None
        except Exception as error:  # the package has its own exceptions
            raise ValueError(f"'{path}' can't be read as a safetensors file: {error}") from error

    def rename(self, sources: Mapping[str, Source]) -> None:
        """Give tensors other names, or join them under new ones, if all parts are there."""
        infos = dict(self.tensors)
        for source in sources.values():
            for name in names_in(source):
                self.tensors.pop(name, None)
        for name, source in sources.items():
            parts = names_in(source)
            if all(part in infos for part in parts):
                self._sources[name] = source
                self.tensors[name] = TensorInfo(_shape(name, source, infos), infos[parts[0]].file)

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Return part of a tensor, which the caller must not keep: a view of the mapped file.

        The index has a slice for each of the leading dims.
        """
        return self._read(self._sources.get(name, name), index)

    def _read(self, source: Source, index: tuple[slice, ...]) -> Tensor:
        if isinstance(source, str):
            piece = self._slices[source]
            values: Tensor = piece[index] if index else piece[...]
            return values
        dim = source.dim
        wanted = index[dim] if dim < len(index) else slice(None)
        # The parts lack a dim that they are stacked along, so it leaves the index. Along any other
        # dim parts outside of the range are not read.
        if source.is_new:
            rest = (*index[:dim], *index[dim + 1 :])
            return torch.stack([self._read(part, rest) for part in source.parts[wanted]], dim)
        index = (*index, *[slice(None)] * (dim + 1 - len(index)))
        sizes = [self._size(part, dim) for part in source.parts]
        start, end, _ = wanted.indices(sum(sizes))
        found, first = [], 0
        for part, size in zip(source.parts, sizes, strict=True):
            low, high = max(start - first, 0), min(end - first, size)
            if low < high:
                found.append(self._read(part, (*index[:dim], slice(low, high), *index[dim + 1 :])))
            first += size
        return torch.cat(found, dim)

    def _size(self, source: Source, dim: int) -> int:
        if isinstance(source, str):
            return int(self._slices[source].get_shape()[dim])
        if source.is_new and dim >= source.dim:
            is_own = dim == source.dim
            return len(source.parts) if is_own else self._size(source.parts[0], dim - 1)
        sizes = [self._size(part, dim) for part in source.parts]
        return sum(sizes) if dim == source.dim else sizes[0]

    def close(self) -> None:
        """Close all files."""
        self._slices.clear()
        self._files.clear()
        self._stack.close()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_SAMPLE_NBYTES = 64


def _digest(path: Path) -> str:
    """Return a digest of a file's size and header, and of some bytes of each tensor.

    Checkpoints of one model have equal headers. A few bytes differ if training or another seed has
    changed all of a tensor.
    """
    with open(path, "rb") as file:
        start = file.read(8)
        header = file.read(int.from_bytes(start, "little"))
        found, first = hashlib.sha256(f"{path.stat().st_size} ".encode() + start), file.tell()
        found.update(header)
        ranges = [each["data_offsets"] for each in json.loads(header).values() if "dtype" in each]
        for begin, end in ranges:
            middle = (begin + end) // 2
            file.seek(first + middle)
            found.update(file.read(min(_SAMPLE_NBYTES, end - middle)))
    return found.hexdigest()[:16]


def _shape(name: str, source: Source, infos: Mapping[str, TensorInfo]) -> tuple[int, ...]:
    if isinstance(source, str):
        return infos[source].shape
    shapes = [_shape(name, part, infos) for part in source.parts]
    dim = source.dim
    if source.is_new:
        rest, sizes = set(shapes), (len(shapes),)
    else:
        rest = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
        sizes = (sum(shape[dim] for shape in shapes if dim < len(shape)),)
    if len(rest) > 1:
        raise ValueError(f"the parts of '{name}' have shapes that do not fit: {shapes}")
    (other,) = rest
    return (*other[:dim], *sizes, *other[dim:])


def _find_files(path: Path) -> tuple[Path | None, dict[Path, list[str] | None]]:
    """Return the index, if any, and the files, each with its tensors' names in the index."""
    if path.is_file():
        return (path, _read_index(path)) if path.suffix == ".json" else (None, {path: None})
    if not path.is_dir():
        raise ValueError(f"expected a directory of safetensors files, and '{path}' is not there")
    for name in (_SINGLE, _INDEX):
        if (path / name).is_file():
            return _find_files(path / name)
    # Other libraries choose other names.
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = sorted(file for file in path.glob(pattern) if not file.name.startswith("."))
        if len(found) == 1:
            return _find_files(found[0])
    raise ValueError(
        f"expected '{_SINGLE}' or '{_INDEX}' in '{path}', found "
        f"{sorted(file.name for file in path.iterdir())[:8]}"
    )


def _read_index(path: Path) -> dict[Path, list[str] | None]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        items = [(str(name), str(file)) for name, file in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"'{path}' is no index of safetensors files: {error!r}") from error
    files: dict[Path, list[str]] = {}
    for name, file in items:
        if file != Path(file).name:
            raise ValueError(f"'{path}' says that '{name}' is in '{file}', which is no file name")
        files.setdefault(path.parent / file, []).append(name)
    return {file: sorted(names) for file, names in files.items()}


class TensorWriter:
    """Writes tensors one after another to files of limited size.

    Holds the tensors of one file in memory. Files have temporary names until `publish`.
    """

    def __init__(
        self,
        directory: Path,
        max_nbytes: int,
        *,
        dtype: torch.dtype | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Make the directory if it does not exist.

        Args:
            max_nbytes: Limit of a file's tensors, except for a file of one larger tensor.
        """
        self._dtype = dtype
        self._directory = directory
        self._max_nbytes = max_nbytes
        self._metadata = {"format": "pt", **(metadata or {})}
        self._pending: dict[str, Tensor] = {}
        self._pending_nbytes = 0
        self._written: list[tuple[Path, list[str]]] = []
        self._total_nbytes = 0
        directory.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor in host memory, which the caller must not write to from then on."""
        dtype = (self._dtype if tensor.is_floating_point() else None) or tensor.dtype
        nbytes = tensor.numel() * dtype.itemsize
        if self._pending and self._pending_nbytes + nbytes > self._max_nbytes:
            self._flush()
        self._pending[name] = tensor.to(dtype).contiguous()
        self._pending_nbytes += nbytes

    def _flush(self) -> None:
        path = self._directory / f".model-{len(self._written) + 1:05}-{os.getpid()}.tmp"
        self._written.append((path, list(self._pending)))
        require_safetensors().save_file(self._pending, path, self._metadata)
        sync_path(path)
        self._total_nbytes += self._pending_nbytes
        self._pending, self._pending_nbytes = {}, 0

    def publish(self) -> None:
        """Write the last file and rename all files, the index last; remove those of earlier saves.

        A single file replaces an earlier save atomically. An earlier index is removed first, so
        that until the new one is written a reader finds no checkpoint instead of two mixed ones.
        """
        if self._pending or not self._written:
            self._flush()
        old = {file for file in self._directory.iterdir() if _NUMBERED.fullmatch(file.name)}
        single, index = self._directory / _SINGLE, self._directory / _INDEX
        if len(self._written) == 1:
            self._written[0][0].replace(single)
            obsolete = {index, *old}
        else:
            index.unlink(missing_ok=True)
            weight_map = self._rename_numbered()
            content = {"metadata": {"total_size": self._total_nbytes}, "weight_map": weight_map}
            temporary = self._directory / f".{_INDEX}-{os.getpid()}.tmp"
            self._written.append((temporary, []))
            temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
            sync_path(temporary)
            temporary.replace(index)
            obsolete = {single, *(old - {self._directory / name for name in weight_map.values()})}
        for file in obsolete:
            file.unlink(missing_ok=True)
        sync_path(self._directory)

    def _rename_numbered(self) -> dict[str, str]:
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._written, 1):
            final = f"model-{number:05}-of-{len(self._written):05}.safetensors"
            path.replace(self._directory / final)
            weight_map |= dict.fromkeys(names, final)
        return weight_map

    def discard(self) -> None:
        """Remove files that still have temporary names."""
        self._pending = {}
        for path, _ in self._written:
            path.unlink(missing_ok=True)
