"""Directories of safetensors files, by their headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from composable_shard.layout import whole_box
from composable_shard.peers.run import PeerRun
from composable_shard.peers.tensors import PeerTensor, boxed

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_MAX_HEADER_NBYTES = 100_000_000  # the format's own limit


def has_tensor_files(path: Path) -> bool:
    """Return whether a path is a safetensors file, or a directory with some."""
    return path.suffix == ".safetensors" or any(path.glob("*.safetensors"))


def read_tensor_files(path: Path) -> PeerRun:
    """Return the model in a directory of safetensors files."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    indices = [] if path.is_file() else sorted(path.glob("*.safetensors.index.json"))
    if indices:
        try:
            index = json.loads(indices[0].read_text(encoding="utf-8"))["weight_map"]
            named = {str(each) for each in index.values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{indices[0]} is no index of safetensors files: {error}") from error
        missing = sorted(named - {each.name for each in files})
        if missing:
            raise ValueError(f"{indices[0]} names files that are not there: {missing[:8]}")
        # Before headers are read: files of another save in the folder would hold names twice.
        files = [each for each in files if each.name in named]
    model: dict[str, Any] = {}
    for file in files:
        found = _read_header(file)
        twice = sorted(model.keys() & found.keys())
        if twice:
            raise ValueError(
                f"{twice[:8]} are in two files of {path}: remove those of another save"
            )
        model |= found
    return PeerRun("safetensors, a model alone", path, model)


def _read_header(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        text = file.read(size) if size <= _MAX_HEADER_NBYTES else b""
        end = file.seek(0, 2)
    try:
        header = json.loads(text)
        return {
            name: _parse(path, 8 + size, end, entry)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged, or no safetensors file: {error}") from error


def _parse(path: Path, start: int, end: int, entry: dict[str, Any]) -> PeerTensor:
    shape = torch.Size(entry["shape"])
    dtype = _DTYPES[entry["dtype"]]
    low, high = entry["data_offsets"]
    if not 0 <= low <= high <= end - start or high - low != shape.numel() * dtype.itemsize:
        raise ValueError(f"bytes {low} to {high} of {end - start} for shape {tuple(shape)}")
    span = boxed(str(path), start + low, shape, whole_box(shape))
    return PeerTensor(shape, dtype, (span,))
