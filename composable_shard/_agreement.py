"""Check that all ranks shard the same model in the same way, before anything can hang."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

from composable_shard import _collectives
from composable_shard._mesh import ShardGroup
from composable_shard._state import ShardState

__all__ = ["check_agreement"]


def check_agreement(states: list[ShardState]) -> None:
    """Compare names, shapes, dtypes and options of all units over the ranks of their groups.

    One all-gather of 32 bytes for each process group; only where it finds a difference are the
    descriptions themselves exchanged, as JSON.

    Raises:
        RuntimeError: On all ranks of the group alike, naming the first difference and the ranks.
    """
    groups: dict[str, tuple[ShardGroup, list[str]]] = {}
    for state in states:
        for handle in state.handles:
            if handle.is_sharded:
                group = handle.shard_group
                _, lines = groups.setdefault(group.name, (group, []))
                lines.extend(handle.describe_entries(state.describe_options()))
    for group, lines in groups.values():
        _compare(group, lines)


def _compare(group: ShardGroup, lines: list[str]) -> None:
    digest = hashlib.sha256(json.dumps(lines).encode()).digest()
    gathered = _gather_bytes(group, digest, [len(digest)] * group.size)
    if all(other == digest for other in gathered):
        return
    payload = json.dumps(lines).encode()
    sizes = _gather_bytes(group, len(payload).to_bytes(8, "little"), [8] * group.size)
    texts = _gather_bytes(group, payload, [int.from_bytes(size, "little") for size in sizes])
    _raise_difference([json.loads(text) for text in texts])


def _gather_bytes(group: ShardGroup, data: bytes, sizes: list[int]) -> list[bytes]:
    local = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(group.device)
    joined: Tensor = _collectives.all_gather_uneven(local, sizes, group.group).cpu()
    return [bytes(part.tolist()) for part in joined.split(sizes)]


def _raise_difference(all_lines: list[list[str]]) -> None:
    longest = max(len(lines) for lines in all_lines)
    for index in range(longest):
        seen: dict[str, list[int]] = {}
        for rank, lines in enumerate(all_lines):
            line = lines[index] if index < len(lines) else "no such parameter"
            seen.setdefault(line, []).append(rank)
        if len(seen) > 1:
            detail = "; ".join(f"ranks {ranks}: {line}" for line, ranks in seen.items())
            raise RuntimeError(
                "the ranks of one shard group must shard the same model in the same way; the "
                f"first difference is at parameter {index}: {detail}. Build the model and call "
                "fully_shard alike on every rank."
            )
