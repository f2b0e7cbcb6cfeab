"""Tensors and process groups; knows no parameters.

Read `groups` (which ranks), `collectives` (what is sent) and `algorithms` (how) first. `agreement`
makes ranks agree or raise together. `order`, `identity_exchange`, `watch` and `step_digest` keep
them in lockstep. `hooks` replaces reductions, `wire` quantises shards, `trace` observes.
"""

from composable_shard.comm import collectives, trace
from composable_shard.comm.agreement import (
    Ranks,
    all_bytes,
    compare_units,
)
from composable_shard.comm.algorithms import AllGather, PendingReduction, ReduceScatter
from composable_shard.comm.collectives import (
    all_gather_uneven,
    all_reduce,
    broadcast,
)
from composable_shard.comm.devices import (
    DONE,
    HOST,
    MAX_EXCHANGE_SIZE,
    HostCopies,
    StreamPoint,
    Streams,
    Then,
    Waitable,
    alloc_host,
    copies_for,
    is_capturing,
    make_streams,
)
from composable_shard.comm.groups import ShardGroup, SmallGroup
from composable_shard.comm.hooks import (
    CommHook,
    HookCall,
    ReductionStage,
    StageKey,
    then_call_hook,
)
from composable_shard.comm.host_group import HostGroup, Messages, get_host_group
from composable_shard.comm.launches import MAX_LAUNCH_NBYTES, Launch
from composable_shard.comm.order import (
    enter_setting,
    exchange_always,
    has_failed,
)
from composable_shard.comm.step_digest import (
    FlagReduction,
    OptimizerNumbers,
    Proposal,
    StepFacts,
)
from composable_shard.comm.trace import count_collectives
from composable_shard.comm.watch import fail, list_ranks
from composable_shard.comm.wire import QUANTISED, as_received, gather_in, wire_nbytes
from composable_shard.torch_private import resolve_group

__all__ = [
    "CommHook",
    "ReductionStage",
]
