"""The options of a unit.

`UnitOptions` holds all options of one `fully_shard` call, checked once. The policies set dtypes,
offload and the form of state dicts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import TypedDict

from composable_shard.options.advice import check_options, expected
from composable_shard.options.granularity import GranularityOption, check_granularity
from composable_shard.options.strategies import (
    DEFAULT_STRATEGY,
    ShardingStrategy,
    StrategyName,
    strategy_of,
)

PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WIRE_PRECISIONS = (*PRECISIONS, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPE_FIELDS = (
    "param_dtype",
    "gather_dtype",
    "reduce_dtype",
    "main_dtype",
    "output_dtype",
    "buffer_dtype",
)


def check_bool(name: str, value: object) -> None:
    """Check that a value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"expected {name} to be True or False, got {value!r}")


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes for compute, communication and the optimizer. `None` leaves a dtype unchanged.

    Each dtype is float16, bfloat16, float32 or float64, `gather_dtype` also an 8-bit one.
    Parameters of other dtypes (complex ones) are left as they are.

    A unit has *main* parameters, the sharded ones: optimizers, checkpoints, `full_tensor()` and
    `unshard_params` see only them, and gradients are published and accumulated in their dtype.
    Forward and backward compute with a copy of them in `param_dtype`.

    Attributes:
        param_dtype: Compute dtype of the unit and of its gradients. Default: as before the call.
        gather_dtype: Dtype in which parameters are all-gathered. Default: `param_dtype`. With a
            narrower dtype every rank, the owner included, computes with the rounded values. With
            int8, float8_e4m3fn or float8_e5m2 an element is sent as one byte, with one fp32 scale
            for each block of 128 within a shard: n elements take n + 4 * ceil(n / 128) bytes. With
            int8 the error of an element is at most 1/254 of its block's largest value. If nothing
            is gathered (`NO_SHARD`, one rank), nothing is rounded. With `reshard_after_forward=n`
            the backward's all-gather sends received values in `param_dtype`.
        reduce_dtype: Dtype in which gradients are packed and sent. Default: `param_dtype`. Sums
            that this library computes itself use the wider of this dtype and the main dtype.
        main_dtype: Dtype of the sharded parameters, for example float32 for a bfloat16 model, which
            then still computes in bfloat16. Default: as before the call.
        output_dtype: Dtype to which floating-point tensors in the output of the unit's forward are
            cast. Containers and objects whose contents change are copied; modules are left alone.
        cast_forward_inputs: Cast floating-point tensors in the arguments of the unit's forward to
            `param_dtype`. With only `main_dtype` set, cast to the unit's dtype before the call, if
            it was one dtype. Containers whose contents change are copied.
        buffer_dtype: Dtype to which the unit's floating-point buffers are cast, once, by the call.
        keep_fp32_classes: Modules of these classes, and modules inside them, compute with their
        main parameters on inputs cast to their dtype. Their outputs are cast back to the dtype of
        the inputs; their buffers keep their dtype. A unit with such modules issues one more gather
        and one more reduction. Needs a `param_dtype` or `main_dtype`.
    """

    param_dtype: torch.dtype | None = None
    gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    main_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    buffer_dtype: torch.dtype | None = None
    keep_fp32_classes: tuple[type[nn.Module], ...] = (nn.BatchNorm1d.__bases__[0],)

    def __post_init__(self) -> None:
        """Check the fields."""
        for name in _DTYPE_FIELDS:
            value = getattr(self, name)
            dtypes = _WIRE_PRECISIONS if name == "gather_dtype" else PRECISIONS
            if value is not None and value not in dtypes:
                allowed = ", ".join(map(str, dtypes))
                raise ValueError(f"expected {name} to be None or one of {allowed}, got {value!r}")
        if not isinstance(self.cast_forward_inputs, bool):
            given = repr(self.cast_forward_inputs)
            raise ValueError(f"expected cast_forward_inputs to be True or False, got {given}")
        classes = self.keep_fp32_classes
        if not isinstance(classes, tuple) or not all(
            isinstance(each, type) and issubclass(each, nn.Module) for each in classes
        ):
            raise ValueError(
                f"expected keep_fp32_classes to be a tuple of module classes, got {classes!r}"
            )

    @property
    def changes_compute(self) -> bool:
        """Whether units may compute with values that differ from their main parameters."""
        return self.param_dtype is not None or self.main_dtype is not None


@dataclass(frozen=True)
class OffloadPolicy:
    """Which parts of a unit live in host memory between uses, in one flat buffer each.

    An optimizer needs a parameter, its gradient and its state on one device. So if the state is on
    the host, the step runs on the CPU: `model.parameters()`, their gradients and the optimizer's
    state are CPU tensors. There are two choices:

    - `OffloadPolicy(params=True)`: parameters, gradients and state. A gather copies the shard to
      the device, into its own place in the full parameters; under `FULL_SHARD` the device holds
      nothing of the unit at rest.
    - `OffloadPolicy(optim_state=True)`: gradients and state. The device keeps a copy of the
      parameters too, in the dtype in which they are gathered, and renews it once after each step;
      under the strategies that keep parameters unsharded that copy is in the full parameters.

    A gradient shard is copied to the host beside the backward and is complete when `backward()`
    returns. Gradients of further backward passes are added there. Both compute the same bits as a
    step on the CPU without offload. Dtypes are cast on the device: copies between device and host
    have the main dtype.

    Attributes:
        params: Shards of parameters, in the main dtype, live only on the host.
        optim_state: Gradients and optimizer state live on the host, and the optimizer steps there.
            None: as `params`, which needs it.
        pin_memory: Pin the host memory, so that copies run beside computation. Has no effect on a
            mesh of CPUs.
    """

    params: bool = False
    optim_state: bool | None = None
    pin_memory: bool = True

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.optim_state is None:
            object.__setattr__(self, "optim_state", self.params)
        for name in ("params", "optim_state", "pin_memory"):
            check_bool(name, getattr(self, name))
        if self.params and not self.optim_state:
            raise ValueError(
                "OffloadPolicy(params=True, optim_state=False): an optimizer steps where its "
                "parameters are, so its state is on the host too. Leave optim_state out."
            )

    @property
    def is_active(self) -> bool:
        """Whether anything is on the host."""
        return bool(self.optim_state)


_TORCH_STATE_DICT = "torch.distributed.checkpoint.state_dict"


@dataclass(frozen=True)
class StateDictOptions:
    """How state dicts are made and loaded, as in torch.distributed.checkpoint.state_dict.

    Attributes:
        full_state_dict: Return whole plain tensors instead of FlatShards.
        cpu_offload: Return tensors in host memory.
        rank0_only: With `full_state_dict`: True gives the first rank the tensors, and the other
            ranks an empty dict. False gives all ranks the tensors.
        broadcast_from_rank0: For loading: only the first rank passes a dict, of whole tensors, the
            others pass an empty one. Each rank is sent one whole unit at a time.
        strict: Raise for names that are missing or unexpected; False ignores them.
        ignore_frozen_params: Leave parameters without `requires_grad` out of a model's state dict.
        init_optimizer_state: For reading: give an optimizer that has not stepped its state, as
            torch's function always does, so that `torch.distributed.checkpoint.load` has something
            to load into. The values mean nothing until something is loaded.
        dtype: Cast floating-point parameters and buffers of a model's state dict to this.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    rank0_only: bool = True
    broadcast_from_rank0: bool = False
    strict: bool = True
    ignore_frozen_params: bool = False
    init_optimizer_state: bool = False
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, given: Any) -> StateDictOptions:
        """Return the options that a user passed, or the default ones.

        Torch's own `StateDictOptions` keep torch's meaning: with `full_state_dict` only the first
        rank gets a dict if `cpu_offload` is set, otherwise every rank does; optimizers get state.

        Raises:
            ValueError: For an object of another class.
        """
        kind = type(given)
        if (kind.__module__, kind.__name__) == (_TORCH_STATE_DICT, cls.__name__):
            if given.dsd_fqn_modifiers != "_fqn_modifiers":
                raise ValueError("dsd_fqn_modifiers: rename the keys of the returned dict instead")
            if given.flatten_optimizer_state_dict:
                raise ValueError(
                    "flatten_optimizer_state_dict: leave it out. Nested dicts fit "
                    "torch.distributed.checkpoint too"
                )
            names = cls.__dataclass_fields__.keys() & kind.__dataclass_fields__.keys()
            same = {name: getattr(given, name) for name in names}
            return cls(**same, rank0_only=given.cpu_offload, init_optimizer_state=True)
        if not isinstance(given, cls | None):
            raise ValueError(expected("options", cls, given))
        return given or cls()


ReshardAfterForward: TypeAlias = bool | int | None
CheckOrder: TypeAlias = Literal["first", "always"]
FormName: TypeAlias = Literal["originals", "flat"]

_NO_POLICY = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


class OptionsDict(TypedDict, total=False):
    """The options of `fully_shard` by name, typed for functions that pass them on."""

    mesh: DeviceMesh | None
    strategy: ShardingStrategy | StrategyName
    reshard_after_forward: ReshardAfterForward
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: set[nn.Parameter] | None
    use_orig_params: bool
    sync_module_states: bool
    check_initial_values: bool
    check_order: CheckOrder
    broadcast_buffers: bool
    bucket_cap_mb: float | None
    granularity: GranularityOption
    prefetch_nbytes: int
    separate_reduce_group: bool


@dataclass(frozen=True, kw_only=True)
class UnitOptions:
    """The options of `fully_shard`, frozen and checked; `fully_shard` documents each.

    A copy leaves out what belongs to this process: the mesh, the ignored parameters, and
    a granularity that is a function.
    """

    mesh: DeviceMesh | None = None
    strategy: ShardingStrategy = DEFAULT_STRATEGY
    reshard_after_forward: ReshardAfterForward = None
    mp_policy: MixedPrecisionPolicy = _NO_POLICY
    offload_policy: OffloadPolicy = _NO_OFFLOAD
    ignored_params: Collection[nn.Parameter] | None = None
    use_orig_params: bool = True
    sync_module_states: bool = False
    check_initial_values: bool = True
    check_order: CheckOrder = "first"
    broadcast_buffers: bool = False
    bucket_cap_mb: float | None = None
    granularity: GranularityOption = "element"
    prefetch_nbytes: int = 4 << 20
    separate_reduce_group: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        if not isinstance(self.mesh, (DeviceMesh, type(None))):
            is_group = isinstance(self.mesh, ProcessGroup)
            remedy = ". Write mesh=DeviceMesh.from_group(group, device_type)" if is_group else ""
            raise ValueError(f"expected mesh to be a DeviceMesh or None, got {self.mesh!r}{remedy}")
        # A name of a strategy becomes the member, whose facts every later reader takes.
        self._check_strategy()
        for name, kind in (("mp_policy", MixedPrecisionPolicy), ("offload_policy", OffloadPolicy)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ValueError(expected(name, kind, value))
        for name in (
            *("use_orig_params", "sync_module_states", "broadcast_buffers"),
            *("check_initial_values", "separate_reduce_group"),
        ):
            check_bool(name, getattr(self, name))
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
        if self.separate_reduce_group and not self.strategy.facts.frees_params:
            raise ValueError(
                "separate_reduce_group=True lets reductions run beside the gathers of a backward, "
                f"and {self.strategy.name} gathers nothing there. Leave it out."
            )

    def _check_ignored(self) -> None:
        # Not an iterator: the first unit would use it up.
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

    @property
    def form(self) -> FormName:
        """What users hold at rest."""
        return "originals" if self.use_orig_params else "flat"

    def override(self, given: Mapping[Any, Any]) -> UnitOptions:
        """Return these options with some replaced, checked."""
        check_options("fully_shard", given, self.names())
        return replace(self, **given)

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the options."""
        return [field.name for field in fields(cls)]

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
    """Check `reshard_after_forward`; return a bool if a number has the same meaning as one."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int) or value < 1 or shard_size % value:
        raise ValueError(
            "expected reshard_after_forward to be True, False, None or a divisor of the "
            f"{shard_size} ranks that share the unit, got {value!r}"
        )
    return value == shard_size if value in (1, shard_size) else value


def _is_number(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
