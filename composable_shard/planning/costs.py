"""What a unit costs a rank: the bytes that it holds, and the bytes that it sends in a step.

[Note: Costs]
The costs follow from the layout, the mesh, the strategy and the dtypes. A *payload* is the
full-size buffer of a collective. In a ring gather or reduce-scatter over n ranks each rank sends
`(n - 1) / n` of the payload; in an all-reduce twice that. Not counted: memory that is freed again
within a pass (except `gathered_nbytes`), scratch memory for the terms of a reduction on the CPU, a
unit's gathers of parameters that another unit manages, the byte with which a backward with buckets
of sharded gradients begins, and the bytes of early hooks. `num_collectives` leaves out the
all-reduce of flags, one for each backward and mesh.

Shards may differ in size: the bytes held are the first rank's. They count the device and the host
together; `host_nbytes` is the part on the host. On the host, each further backward of a step needs
one more gradient shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from math import ceil, prod

import torch

from composable_shard.comm import QUANTISED, ShardGroup, wire_nbytes
from composable_shard.construct import Plan, group_params, lay_out
from composable_shard.flat_param import Precision
from composable_shard.layout import FlatLayout
from composable_shard.options import StrategyFacts, UnitOptions

_NUM_MOMENTS = 2  # AdamW's states of the size of a parameter

_Kind = tuple[str, int]  # of a collective, and its number of ranks
Payloads = Counter[_Kind]


@dataclass(frozen=True)
class RankCounts:
    """The numbers of ranks that costs depend on; a `ShardGroup` needs process groups.

    Attributes:
        shard: Ranks that share a flat parameter.
        replicate: Sizes of the groups that hold copies of a shard.
        joint: Sizes of the groups that together reach all data-parallel ranks.
    """

    shard: int
    replicate: tuple[int, ...] = ()
    joint: tuple[int, ...] = ()

    @classmethod
    def of(cls, group: ShardGroup) -> RankCounts:
        """Return the sizes of the groups."""
        replicate, joint = (
            tuple(each.size() for each in groups)
            for groups in (group.replicate_groups, group.joint_groups)
        )
        return cls(group.size, replicate, joint)

    @classmethod
    def of_shape(cls, shape: Sequence[int], facts: StrategyFacts) -> RankCounts:
        """Return the counts of `(shard,)` or `(replicate, shard)` ranks, which need not exist."""
        *outer, inner = shape
        everyone = (prod(shape),) if prod(shape) > 1 else ()
        if facts.is_replicated:
            return cls(1, everyone, everyone)
        return cls(inner, tuple(size for size in outer if size > 1), everyone)

    def __str__(self) -> str:
        """Return "4", or "2x4" for two copies of four shards."""
        return "x".join(map(str, (*self.replicate, self.shard)))


@dataclass(frozen=True)
class Cost:
    """Bytes of the first rank; costs of parts of a model add up.

    Attributes:
        param_nbytes: Parameters at rest, padding included.
        grad_nbytes: Gradients after a backward, padding included.
        optimizer_nbytes: AdamW's two moments.
        host_nbytes: Of these three, what is offloaded to host memory.
        payloads: Full-size bytes of the collectives of a step, by kind and number of ranks.
        num_collectives: Gathers and reductions of a step.
        gathered_nbytes: Full parameters beyond those at rest, while they are gathered.
        packed_nbytes: Full gradients, from the first of a unit's until they are reduced; 0 where
            they have a buffer that stays.
    """

    param_nbytes: int = 0
    grad_nbytes: int = 0
    optimizer_nbytes: int = 0
    host_nbytes: int = 0
    payloads: Payloads = field(default_factory=Counter)
    num_collectives: int = 0
    gathered_nbytes: int = 0
    packed_nbytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        names = [each.name for each in fields(self)]
        return Cost(*(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def sent_nbytes(self) -> int:
        """Bytes that a rank sends in a step of one forward and backward."""
        return sent_nbytes(self.payloads)


def sent_nbytes(payloads: Mapping[_Kind, int]) -> int:
    """Return what each rank sends for collectives of these payloads, see [Note: Costs].

    Example: an all-reduce and a gather of 100 bytes among 4 ranks are 150 and 75 bytes.
    """
    sent = Fraction(0)
    for (kind, num_ranks), nbytes in payloads.items():
        rounds = 2 if kind == "all_reduce" else 1
        sent += Fraction(rounds * (num_ranks - 1) * nbytes, num_ranks)
    return ceil(sent)


@dataclass(frozen=True)
class FlatParamCost:
    """The cost of one flat parameter."""

    layout: FlatLayout  # where its parameters lie
    ranks: RankCounts  # how many ranks take part
    options: UnitOptions
    main_dtype: torch.dtype  # of the shard
    precision: Precision  # the dtypes that differ from it
    requires_grad: bool = True
    reshard_after_forward: bool | int = True  # True, False, or the size of a small group
    rank: int = 0  # which of the ranks that share it; bytes held are this one's
    trainable: FlatLayout | None = None  # `layout` without frozen parameters; None: the same

    @property
    def param_nbytes(self) -> int:
        """Parameters at rest: the shard, and where it is kept the unsharded buffer around it.

        An offloaded shard comes on top of that buffer, or of the copy that the device keeps.
        """
        shard, wire_dtype = self._shard_nbytes, self._wire_dtype
        offload = self.options.offload_policy
        if self._is_kept:
            full = self.layout.padded_numel * self._param_dtype.itemsize
            is_cast = {self._param_dtype, wire_dtype} != {self.main_dtype}
            return full + shard if is_cast or offload.is_active else full
        if not offload.is_active or offload.params:
            return shard
        held_dtype = self.main_dtype if wire_dtype in QUANTISED else wire_dtype
        return shard + self._shard_numel * held_dtype.itemsize

    @property
    def grad_nbytes(self) -> int:
        """Gradients after a backward: shards, or the buffer that all of them stay in.

        Offloaded shards come on top of that buffer.
        """
        shard = self._grad_shard_numel * self.main_dtype.itemsize
        is_offloaded = self.options.offload_policy.is_active
        if not self.requires_grad:
            return 0
        if not self._keeps_gradients:
            return shard
        full = self._grads.padded_numel * self._reduce_dtype.itemsize
        return full + shard * ((self._reduce_dtype != self.main_dtype) + is_offloaded)

    @property
    def optimizer_nbytes(self) -> int:
        """Two moments of what the rank owns, without padding."""
        if not self.requires_grad:
            return 0
        owned = self._grads.owned_numel(self.rank)
        if self._shows_flat:
            start, end = self.layout.shard_range(self.rank)
            owned = max(min(end, self.layout.end) - start, 0)
        return _NUM_MOMENTS * owned * self.main_dtype.itemsize

    @property
    def host_nbytes(self) -> int:
        """Offloaded to host memory: shards of parameters and gradients, and moments."""
        if not self.options.offload_policy.is_active:
            return 0
        gradients = self._grad_shard_numel * self.main_dtype.itemsize * self.requires_grad
        return self._shard_nbytes + gradients + self.optimizer_nbytes

    @property
    def payloads(self) -> Payloads:
        """The full-size bytes of a step's collectives, by kind and number of ranks."""
        payloads = Payloads()
        for key, nbytes, number in self._collectives():
            payloads[key] += nbytes * number
        for size in self.ranks.joint if self.requires_grad else ():
            # A flag for each parameter says whether this rank used it.
            payloads["all_reduce", size] += len(self.layout.numels)
        return +payloads

    def _collectives(self) -> Iterator[tuple[_Kind, int, int]]:
        """Yield kind, bytes and number of each gather and reduction of a step."""
        shard, small = self.ranks.shard, self.reshard_after_forward
        gather, layout, wire_dtype = ("all_gather", shard), self.layout, self._wire_dtype
        if layout.is_even:
            wire = shard * wire_nbytes(wire_dtype, layout.shard_numel)
        elif wire_dtype in QUANTISED:  # each rank's last block may be shorter
            wire = sum(wire_nbytes(wire_dtype, numel) for numel in layout.shard_numels)
        else:
            wire = wire_nbytes(wire_dtype, layout.span)
        if shard > 1 and self._is_kept:
            # Otherwise never written; a step counts as a write to whole parameters of any kind.
            is_written = self.requires_grad or (self.layout.owners and not self._shows_flat)
            yield gather, wire, int(bool(is_written))
        elif shard > 1:
            yield gather, wire, 2 if small is True else 1
            if not isinstance(small, bool):
                yield ("all_gather", small), self.gathered_nbytes, 1
        itemsize = self._reduce_dtype.itemsize if self.requires_grad else 0
        if shard > 1:
            yield ("reduce_scatter", shard), self._grads.span * itemsize, 1
        for size in self.ranks.replicate:
            yield ("all_reduce", size), self._grad_shard_numel * itemsize, 1

    @property
    def num_collectives(self) -> int:
        """Gathers and reductions of a step with one forward and backward."""
        return sum(number for _, nbytes, number in self._collectives() if nbytes)

    @property
    def gathered_nbytes(self) -> int:
        """The full parameters, if they are not held at rest."""
        return 0 if self._is_kept else self.layout.padded_numel * self._param_dtype.itemsize

    @property
    def packed_nbytes(self) -> int:
        """The full gradients before their reduction, if they don't stay."""
        if not self.requires_grad or self._keeps_gradients:
            return 0
        return self._grads.padded_numel * self._reduce_dtype.itemsize

    @property
    def cost(self) -> Cost:
        """The sum of all costs, with one forward and backward in a step."""
        return Cost(
            self.param_nbytes,
            self.grad_nbytes,
            self.optimizer_nbytes,
            self.host_nbytes,
            self.payloads,
            self.num_collectives,
            self.gathered_nbytes,
            self.packed_nbytes,
        )

    @property
    def _grads(self) -> FlatLayout:
        return self.trainable or self.layout

    @property
    def _grad_shard_numel(self) -> int:
        start, end = self._grads.shard_range(self.rank)
        return end - start

    @property
    def _shard_numel(self) -> int:
        start, end = self.layout.shard_range(self.rank)
        return end - start

    @property
    def _shard_nbytes(self) -> int:
        return self._shard_numel * self.main_dtype.itemsize

    @property
    def _is_kept(self) -> bool:
        return self.options.strategy.facts.keeps_params(self.ranks.shard)

    @property
    def _keeps_gradients(self) -> bool:
        facts = self.options.strategy.facts
        return facts.keeps_gradients(self.ranks.shard, prod(self.ranks.joint))

    @property
    def _shows_flat(self) -> bool:
        return not self.options.use_orig_params

    @property
    def _param_dtype(self) -> torch.dtype:
        return self.precision.computes_in(self.main_dtype)

    @property
    def _wire_dtype(self) -> torch.dtype:
        is_sharded = self.ranks.shard > 1
        return self.precision.travels_in(self.main_dtype) if is_sharded else self._param_dtype

    @property
    def _reduce_dtype(self) -> torch.dtype:
        return self.precision.reduces_in(self.main_dtype)


def unit_cost(plan: Plan, ranks: RankCounts, *, reshard_after_forward: bool | int) -> Cost:
    """Return the cost of a unit that `fully_shard` would form."""
    groups = group_params(plan, ranks.shard)
    costs = [
        FlatParamCost(
            lay_out(members, ranks.shard, precision),
            ranks,
            plan.options,
            precision.main_dtype or members[0].dense.dtype,
            precision,
            members[0].param.requires_grad,
            reshard_after_forward,
        ).cost
        for precision, members in groups
    ]
    return sum(costs, Cost())
