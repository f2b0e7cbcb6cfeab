"""Ops that make reads of what they write first, while there are such reads: [Note: Late reads].

The ways into the rules are exchanged for that time, so that ops cost nothing more otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from composable_shard.tensor.direct_ops import DIRECT_OPS
from composable_shard.tensor.flat_shard import FlatShard
from composable_shard.tensor.gathering import base_of
from composable_shard.tensor.late_reads import LATE_READS
from composable_shard.tensor.list_rules import run_function
from composable_shard.tensor.operands import shards_in, written_in
from composable_shard.tensor.rule_table import OP_RULES
from composable_shard.torch_private import OpOverload, schema_of

_USUAL = {name: vars(FlatShard)[name] for name in ("__torch_dispatch__", *DIRECT_OPS)}


def begin_late_reads(reads: dict[int, Callable[[], None]]) -> None:
    """Let ops make reads, by storage, before they write there, until `end_late_reads`."""
    LATE_READS.begin(reads)
    watched = {name: getattr(Tensor, name) for name in DIRECT_OPS}
    for name, way in {**watched, "__torch_dispatch__": classmethod(__torch_dispatch__)}.items():
        setattr(FlatShard, name, way)
    OP_RULES.on_lists = _leave_to_ops


def end_late_reads() -> None:
    """Run ops as usual again."""
    for name, way in _USUAL.items():
        setattr(FlatShard, name, way)
    OP_RULES.on_lists = run_function
    LATE_READS.end()


def _leave_to_ops(*_: Any) -> Any:
    return NotImplemented


# Under this name, as collectives have the name of the op: other ranks may have made their copies.
def __torch_dispatch__(
    cls: type[FlatShard],
    func: OpOverload,
    types: tuple[type, ...],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    if schema_of(func).is_mutable:
        for shard in shards_in(list(written_in(func, args, kwargs or {}))):
            LATE_READS.make(base_of(shard)._local)
    return _USUAL["__torch_dispatch__"].__func__(cls, func, types, args, kwargs)
