"""See that all ranks shard the same model in the same way, before anything can hang."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from composable_shard._flat_param import FlatParamHandle
from composable_shard._mesh import ShardGroup
from composable_shard._rank_messages import compare_rows, digest_of, gather_rows, gather_texts
from composable_shard._state import ShardState
from composable_shard._use_exchange import UseExchange

__all__ = ["check_agreement", "check_same", "copy_to_replicas"]

_Groups = tuple[dist.ProcessGroup, ...]


def check_agreement(states: list[ShardState]) -> None:
    """Compare names, shapes, dtypes and options of all units over their data-parallel ranks.

    Also those of buffers that are broadcast.

    One all-gather of 32 bytes for each process group; only where it finds a difference are the
    descriptions themselves exchanged, as JSON. Where any rank has hooks on gradients, one
    all-reduce of a byte for each handle, so that all know. [Note: Early gradients]

    Raises:
        RuntimeError: On all ranks of the mesh alike, naming the first difference and the ranks.
    """
    meshes: dict[_Groups, _Mesh] = {}

    def mesh_of(shard_group: ShardGroup) -> _Mesh:
        return meshes.setdefault(shard_group.joint_groups, _Mesh(shard_group.device))

    for state in states:
        if state.buffers is not None:
            lines = mesh_of(state.buffers.shard_group).lines
            lines.extend(f"{line} {state.describe_options()}" for line in state.buffers.describe())
        for handle in state.handles:
            mesh = mesh_of(handle.shard_group)
            mesh.handles.append(handle)
            mesh.lines.extend(handle.describe_entries(state.describe_options()))
    for groups, mesh in meshes.items():
        has_hooks = [handle.has_gradient_hooks for handle in mesh.handles]
        if _compare(groups, mesh.device, mesh.lines, any(has_hooks)):
            exchange = UseExchange(
                [
                    (handle.shard_group, [int(flag)])
                    for handle, flag in zip(mesh.handles, has_hooks, strict=True)
                ],
                highest=1,
            )
            for handle, (flag,) in zip(mesh.handles, exchange.finish(), strict=True):
                handle.has_early_hooks = bool(flag)


@dataclass
class _Mesh:
    """What ranks that are reached through the same groups have to agree on."""

    device: torch.device
    handles: list[FlatParamHandle] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def _compare(groups: _Groups, device: torch.device, lines: list[str], has_hooks: bool) -> bool:
    """Compare descriptions; return whether any rank has hooks."""
    digest = digest_of(json.dumps(lines).encode())
    # Axis by axis: a digest of digests tells every rank of the mesh of a difference anywhere.
    is_same = True
    for group in groups:
        rows = gather_rows(group, device, digest + bytes([has_hooks]))
        has_hooks = bool(rows[:, -1].any())
        is_alike, digest = compare_rows(rows, digest)
        is_same &= is_alike
    if is_same:
        return has_hooks
    texts = gather_texts(groups, device, json.dumps(lines))
    _raise_difference([json.loads(text) for text in texts])
    return has_hooks


def check_same(shard_group: ShardGroup, lines: list[str]) -> None:
    """Check that all data-parallel ranks bring the same lines, one for each parameter.

    One all-gather of 32 bytes for each process group.

    Raises:
        RuntimeError: As `check_agreement`.
    """
    _compare(shard_group.joint_groups, shard_group.device, lines, False)


def copy_to_replicas(states: list[ShardState]) -> None:
    """Give all ranks that hold copies of a shard the first one's: one broadcast for each handle.

    Ranks that initialised differently would train different models for ever.
    """
    for state in states:
        for handle in state.handles:
            handle.copy_to_replicas()


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
