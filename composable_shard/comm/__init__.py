"""Tensors and process groups; knows no parameters.

Read `groups` (which ranks), `collectives` (what is sent) and `algorithms` (how) first. `agreement`
compares what ranks say, `hooks` replaces reductions, `trace` observes.
"""

from composable_shard.comm import collectives, trace
from composable_shard.comm.agreement import (
    FlagReduction,
    all_messages,
    compare_rows,
    digest_of,
    gather_bytes,
    gather_rows,
    gather_texts,
    raise_together,
)
from composable_shard.comm.collectives import (
    AllGather,
    PendingReduction,
    ReduceScatter,
    Waitable,
    all_gather_uneven,
    all_reduce,
    broadcast,
    count_collectives,
    is_exchange,
    resolve_group,
)
from composable_shard.comm.devices import (
    HOST,
    HostCopies,
    StreamPoint,
    Streams,
    alloc_host,
    copies_for,
    make_streams,
)
from composable_shard.comm.groups import HostGroup, ShardGroup, SmallGroup, get_host_group
from composable_shard.comm.hooks import (
    CommHook,
    ErrorFeedback,
    HookedReduction,
    ReductionStage,
    StageKey,
    bf16_compress_hook,
    call_hook,
    error_feedback_hook,
    fp16_compress_hook,
)
from composable_shard.comm.wire import QUANTISED, as_received, gather_in, wire_nbytes

__all__ = [
    "HOST",
    "QUANTISED",
    "AllGather",
    "CommHook",
    "ErrorFeedback",
    "FlagReduction",
    "HookedReduction",
    "HostCopies",
    "HostGroup",
    "PendingReduction",
    "ReduceScatter",
    "ReductionStage",
    "ShardGroup",
    "SmallGroup",
    "StageKey",
    "StreamPoint",
    "Streams",
    "Waitable",
    "all_gather_uneven",
    "all_messages",
    "all_reduce",
    "alloc_host",
    "as_received",
    "bf16_compress_hook",
    "broadcast",
    "call_hook",
    "collectives",
    "compare_rows",
    "copies_for",
    "count_collectives",
    "digest_of",
    "error_feedback_hook",
    "fp16_compress_hook",
    "gather_bytes",
    "gather_in",
    "gather_rows",
    "gather_texts",
    "get_host_group",
    "is_exchange",
    "make_streams",
    "raise_together",
    "resolve_group",
    "trace",
    "wire_nbytes",
]
