"""See that all ranks shard the same model in the same way, before anything can hang."""

from __future__ import annotations

import hashlib
import json

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard import _collectives
from composable_shard._state import ShardState

__all__ = ["check_agreement", "copy_to_replicas"]


def check_agreement(states: list[ShardState]) -> None:
    """Compare names, shapes, dtypes and options of all units over their data-parallel ranks.

    Also those of buffers that are broadcast.

    One all-gather of 32 bytes for each process group; only where it finds a difference are the
    descriptions themselves exchanged, as JSON.

    Raises:
        RuntimeError: On all ranks of the mesh alike, naming the first difference and the ranks.
    """
    meshes: dict[tuple[dist.ProcessGroup, ...], tuple[torch.device, list[str]]] = {}
    for state in states:
        if state.buffers is not None:
            shard_group = state.buffers.shard_group
            _, lines = meshes.setdefault(shard_group.joint_groups, (shard_group.device, []))
            lines.extend(f"{line} {state.describe_options()}" for line in state.buffers.describe())
        for handle in state.handles:
            shard_group = handle.shard_group
            _, lines = meshes.setdefault(shard_group.joint_groups, (shard_group.device, []))
            lines.extend(handle.describe_entries(state.describe_options()))
    for groups, (device, lines) in meshes.items():
        _compare(groups, device, lines)


def _compare(groups: tuple[dist.ProcessGroup, ...], device: torch.device, lines: list[str]) -> None:
    digest = hashlib.sha256(json.dumps(lines).encode()).digest()
    # Axis by axis: a digest of digests tells every rank of the mesh of a difference anywhere.
    is_same = True
    for group in groups:
        gathered = _gather_bytes(group, device, digest, [len(digest)] * group.size())
        is_same &= all(other == digest for other in gathered)
        digest = hashlib.sha256(b"".join(gathered)).digest()
    if is_same:
        return
    texts = [json.dumps(lines)]
    for group in groups:
        payload = json.dumps(texts).encode()
        nbytes = len(payload).to_bytes(8, "little")
        sizes = _gather_bytes(group, device, nbytes, [8] * group.size())
        numels = [int.from_bytes(size, "little") for size in sizes]
        gathered = _gather_bytes(group, device, payload, numels)
        texts = [text for part in gathered for text in json.loads(part)]
    _raise_difference([json.loads(text) for text in texts])


def copy_to_replicas(states: list[ShardState]) -> None:
    """Give all ranks that hold copies of a shard the first one's: one broadcast for each handle.

    Ranks that initialised differently would train different models for ever.
    """
    for state in states:
        for handle in state.handles:
            handle.copy_to_replicas()


def _gather_bytes(
    group: dist.ProcessGroup, device: torch.device, data: bytes, sizes: list[int]
) -> list[bytes]:
    local = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    joined: Tensor = _collectives.all_gather_uneven(local, sizes, group).cpu()
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
                "the ranks of one mesh must shard the same model in the same way; the "
                f"first difference is at parameter {index}: {detail}. Build the model and call "
                "fully_shard alike on every rank."
            )
