"""`UnitOptions`: all options of one `fully_shard` call, checked once."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, get_args

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import TypedDict

from composable_shard.options.advice import expected, unexpected
from composable_shard.options.policies import (
    GranularityOption,
    MixedPrecisionPolicy,
    OffloadPolicy,
    check_granularity,
)
from composable_shard.options.strategy import (
    DEFAULT_STRATEGY,
    ShardingStrategy,
    StrategyName,
    strategy_of,
)

ReshardAfterForward: TypeAlias = bool | int | None
CheckOrder: TypeAlias = Literal["first", "always"]

_NO_POLICY = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


class OptionsDict(TypedDict, total=False):
    """The options of `fully_shard` by name, for functions that pass them on: editors know them."""

    mesh: DeviceMesh | None
    strategy: ShardingStrategy | StrategyName
    reshard_after_forward: ReshardAfterForward
    shard_over_replicas: bool
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: set[nn.Parameter] | None
    use_orig_params: bool
    sync_module_states: bool
    check_initial_values: bool
    check_for_nan_in_grad: bool
    check_order: CheckOrder
    broadcast_buffers: bool
    bucket_cap_mb: float | None
    granularity: GranularityOption
    prefetch_nbytes: int


@dataclass(frozen=True, kw_only=True)
class UnitOptions:
    """The options of `fully_shard`, which says what each means; frozen and checked.

    A copy or pickle leaves out what belongs to this process: the mesh, the ignored parameters, and
    a granularity that is a function.
    """

    mesh: DeviceMesh | None = None
    strategy: ShardingStrategy = DEFAULT_STRATEGY
    reshard_after_forward: ReshardAfterForward = None
    shard_over_replicas: bool = False
    mp_policy: MixedPrecisionPolicy = _NO_POLICY
    offload_policy: OffloadPolicy = _NO_OFFLOAD
    ignored_params: Collection[nn.Parameter] | None = None
    use_orig_params: bool = True
    sync_module_states: bool = False
    check_initial_values: bool = True
    check_for_nan_in_grad: bool = False
    check_order: CheckOrder = "first"
    broadcast_buffers: bool = False
    bucket_cap_mb: float | None = None
    granularity: GranularityOption = "element"
    prefetch_nbytes: int = 4 << 20

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: For one that no module could be sharded with.
        """
        if not isinstance(self.mesh, (DeviceMesh, type(None))):
            raise ValueError(f"expected mesh to be a DeviceMesh or None, got {self.mesh!r}")
        self._check_strategy()
        for name, kind in (("mp_policy", MixedPrecisionPolicy), ("offload_policy", OffloadPolicy)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ValueError(expected(name, kind, value))
        for name in (
            *("use_orig_params", "sync_module_states", "broadcast_buffers"),
            *("check_initial_values", "check_for_nan_in_grad"),
        ):
            _check_bool(name, getattr(self, name))
        if self.check_order not in get_args(CheckOrder):
            raise ValueError(
                f"expected check_order to be 'first' or 'always', got {self.check_order!r}"
            )
        self._check_ignored()
        self._check_sizes()
        check_granularity(self.granularity)

    def _check_strategy(self) -> None:
        """Check the strategy, and the two options that only some strategies have."""
        object.__setattr__(self, "strategy", strategy_of(self.strategy))
        if not isinstance(self.reshard_after_forward, (int, type(None))):
            raise ValueError(
                "expected reshard_after_forward to be True, False, None or a number of ranks, "
                f"got {self.reshard_after_forward!r}"
            )
        if self.reshard_after_forward and not self.strategy.facts.frees_params:
            raise ValueError(
                f"expected reshard_after_forward to be None or False with {self.strategy}, which "
                f"keeps parameters unsharded, got {self.reshard_after_forward!r}. Use FULL_SHARD "
                "to free them."
            )
        _check_bool("shard_over_replicas", self.shard_over_replicas)
        if not self.shard_over_replicas:
            return
        if self.mesh is None or self.mesh.ndim != 2:
            got = "none" if self.mesh is None else f"{self.mesh.ndim} axes"
            raise ValueError(
                "expected a 2-D mesh (replicate, shard) with shard_over_replicas=True, got "
                f"{got}. Without replicas, reshard_after_forward=<number of ranks> is what it does."
            )
        if self.strategy.facts.is_replicated:
            raise ValueError(
                f"shard_over_replicas=True shares a unit over all ranks, and {self.strategy.name} "
                "shares nothing. Use SHARD_OPTIM to share the optimizer state alone."
            )

    def _check_ignored(self) -> None:
        # Not an iterator: a second unit would find it used up.
        ignored = self.ignored_params
        if ignored is None:
            return
        if not isinstance(ignored, Collection):
            kind = type(ignored).__name__
            raise ValueError(f"expected ignored_params to be a set of parameters, got a {kind}")
        for param in ignored:
            if not isinstance(param, nn.Parameter):
                kind = type(param).__name__
                raise ValueError(f"expected ignored_params to hold parameters only, got a {kind}")

    def _check_sizes(self) -> None:
        cap, nbytes = self.bucket_cap_mb, self.prefetch_nbytes
        if cap is not None and not (_is_number(cap, int, float) and 0 < cap < math.inf):
            raise ValueError(
                "expected bucket_cap_mb to be None or a positive, finite number of MiB, "
                f"got {cap!r}"
            )
        if not _is_number(nbytes, int) or nbytes < 0:
            raise ValueError(
                f"expected prefetch_nbytes to be a number of bytes, 0 or more, got {nbytes!r}"
            )

    def override(self, given: Mapping[Any, Any]) -> UnitOptions:
        """Return these options with others in their place, checked.

        Raises:
            ValueError: For a name that is no option, or a value that is not valid.
        """
        known = [field.name for field in fields(self)]
        for name in given:
            if name not in known:
                raise ValueError(unexpected("fully_shard", name, known))
        return replace(self, **given)

    def reshard_policy(self, shard_size: int) -> ReshardAfterForward:
        """Return `reshard_after_forward`, checked for this number of ranks that share the unit.

        None stands for the second axis of the mesh where replicas share the unit too.

        Raises:
            ValueError: If it is a number that does not divide the ranks.
        """
        value = self.reshard_after_forward
        if value is None and self.shard_over_replicas and self.strategy.facts.frees_params:
            assert self.mesh is not None
            value = self.mesh.size(1)
        return check_reshard_after_forward(value, shard_size)

    def describe(self) -> str:
        """Return the options that differ from their defaults and that all ranks must agree on."""
        return "".join(
            f" {field.name}={value}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default and field.name not in _UNSAID
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process."""
        granularity = "element" if callable(self.granularity) else self.granularity
        local = {"mesh": None, "ignored_params": None, "granularity": granularity}
        return {**self.__dict__, **local}


# Ranks may differ in these, or agree on them elsewhere: on the strategy and what is freed for each
# unit, on the granularity for each parameter.
_UNSAID = (
    *("mesh", "ignored_params", "sync_module_states"),
    *("strategy", "reshard_after_forward", "granularity"),
)


def check_reshard_after_forward(value: ReshardAfterForward, shard_size: int) -> ReshardAfterForward:
    """Check `reshard_after_forward` and return it, as a truth value where a number means one.

    Args:
        value: The value that the user gave.
        shard_size: Ranks that share the unit.

    Raises:
        ValueError: If it is neither a truth value, None nor a divisor of `shard_size`.
    """
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int) or value < 1 or shard_size % value:
        raise ValueError(
            "expected reshard_after_forward to be True, False, None or a divisor of the "
            f"{shard_size} ranks that share the unit, got {value!r}"
        )
    return value == shard_size if value in (1, shard_size) else value


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"expected {name} to be True or False, got {value!r}")


def _is_number(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
