"""Tensors and process groups; knows no parameters.

Read `groups` (which ranks), `collectives` (what is sent) and `algorithms` (how) first. `agreement`
makes ranks agree or raise together, `hooks` replaces reductions, `trace` observes.
"""

from composable_shard.comm import collectives, trace
from composable_shard.comm.agreement import (
    UNITS,
    HostGroup,
    Ranks,
    all_bytes,
    compare_lines,
    get_host_group,
    raise_difference,
)
from composable_shard.comm.collectives import (
    AllGather,
    ExchangedAllReduce,
    PendingReduction,
    ReduceScatter,
    Waitable,
    all_gather_uneven,
    all_reduce,
    broadcast,
    count_collectives,
    is_exchange,
    resolve_group,
    scratch_parts,
)
from composable_shard.comm.devices import (
    HOST,
    MAX_EXCHANGE_SIZE,
    HostCopies,
    StreamPoint,
    Streams,
    alloc_host,
    copies_for,
    make_streams,
)
from composable_shard.comm.flags import MAX_COUNT, FlagReduction, Proposal, StepFacts
from composable_shard.comm.groups import ShardGroup, SmallGroup
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
    then_call_hook,
)
from composable_shard.comm.lockstep import fail
from composable_shard.comm.order import before_next_collective, exchange_always, note_setting
from composable_shard.comm.trace import log_events
from composable_shard.comm.wire import QUANTISED, as_received, gather_in, wire_nbytes

__all__ = [
    "HOST",
    "MAX_COUNT",
    "MAX_EXCHANGE_SIZE",
    "QUANTISED",
    "UNITS",
    "AllGather",
    "CommHook",
    "ErrorFeedback",
    "ExchangedAllReduce",
    "FlagReduction",
    "HookedReduction",
    "HostCopies",
    "HostGroup",
    "PendingReduction",
    "Proposal",
    "Ranks",
    "ReduceScatter",
    "ReductionStage",
    "ShardGroup",
    "SmallGroup",
    "StageKey",
    "StepFacts",
    "StreamPoint",
    "Streams",
    "Waitable",
    "all_bytes",
    "all_gather_uneven",
    "all_reduce",
    "alloc_host",
    "as_received",
    "before_next_collective",
    "bf16_compress_hook",
    "broadcast",
    "call_hook",
    "collectives",
    "compare_lines",
    "copies_for",
    "count_collectives",
    "error_feedback_hook",
    "exchange_always",
    "fail",
    "fp16_compress_hook",
    "gather_in",
    "get_host_group",
    "is_exchange",
    "log_events",
    "make_streams",
    "note_setting",
    "raise_difference",
    "resolve_group",
    "scratch_parts",
    "then_call_hook",
    "trace",
    "wire_nbytes",
]
