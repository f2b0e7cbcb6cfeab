"""`FlatShard`, the tensor subclass that `model.parameters()` yields at rest, and its rule table."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, distribute_tensor

from composable_shard.comm import all_gather_uneven, broadcast, resolve_group
from composable_shard.tensor.direct_ops import DirectOps
from composable_shard.tensor.shard_spec import Checkpointable, ShardSpec, WriteGuard
from composable_shard.torch_private import OpOverload, disabled_torch_function, make_wrapper

__all__ = [
    "OP_RULES",
    "DTensorSlots",
    "FlatShard",
    "FlatShardOfDTensor",
    "NeedsWhole",
    "Rule",
    "RuleTable",
    "WholeRule",
    "allow_loading",
    "is_elsewhere",
    "rebind",
    "wrap",
]


Rule = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]
WholeRule = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Callable[[], Any] | None]


class NeedsWhole(RuntimeError):
    """What a rule raises, before it changes anything, where slices are not enough.

    Where this rank holds every operand whole, the op runs on whole tensors instead.
    """


class RuleTable(dict[OpOverload, Rule]):
    """How each op runs on FlatShards: rules by op, and families that make rules for whole kinds.

    Filled once by `register_op_rules`; what a family makes is kept.

    Attributes:
        families: Asked in order for a rule of an op that has none.
        on_whole: Asked after `NeedsWhole` for what runs the op on whole tensors; it returns None
            where this rank does not hold them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.families: list[Callable[[OpOverload], Rule | None]] = []
        self.on_whole: WholeRule = _on_none

    def __missing__(self, func: OpOverload) -> Rule:
        """Ask the families in order; the last one makes a rule that raises, for any op."""
        made = (family(func) for family in self.families)
        self[func] = rule = next(rule for rule in made if rule is not None)
        return rule


def _on_none(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hold nothing: the table is not filled yet."""


OP_RULES = RuleTable()


_OWN_FIELDS = frozenset({"_local", "_shard_spec", "_guard"})


class FlatShard(Checkpointable, DirectOps, Tensor):
    """One rank's flat range of a tensor, under the tensor's logical shape, stride and dtype.

    Elementwise ops run on the slices alone; reductions to one value are exact, global and
    collective; what would be wrong on a slice raises on every rank. Attributes set by the user
    survive `detach`, `to` and deep copies.

    [Note: Whole shards]
    A parameter of granularity "param" is whole on its owner, and empty elsewhere. On the owner
    every op runs locally, on the tensor in its shape, reductions too, and mixes with plain tensors
    of that shape. Elementwise results of the same shape are FlatShards again, and so are views that
    are one run of memory, for writes to them to be noted; others are plain tensors. Elsewhere
    elementwise ops run on the empty slice, and what needs values raises: nothing is a collective
    but `full_tensor()`. Where one rank alone holds everything, each shard is whole.
    """

    _local: Tensor  # (end - start,); a parameter's is a view of its handle's local shard
    _shard_spec: ShardSpec
    _guard: WriteGuard | None

    @staticmethod
    def __new__(
        cls: type[FlatShard],
        local: Tensor,
        spec: ShardSpec,
        *,
        guard: WriteGuard | None = None,
        requires_grad: bool = False,
    ) -> FlatShard:
        """Make the shard that this rank holds.

        Args:
            local: Shape `(end - start,)` for `spec.local_range`; used as it is, not copied.
            spec: What the shard is a shard of.
            guard: Told of every write; only parameters and their aliases have one.
            requires_grad: As for any tensor.
        """
        self: FlatShard = make_wrapper(
            cls,
            spec.shape,
            spec.stride,
            dtype=local.dtype,
            device=local.device,
            requires_grad=requires_grad,
        )
        self._local = local
        self._shard_spec = spec
        self._guard = guard
        return self

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub lacks `func`
        cls,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the op by its rule."""
        try:
            return OP_RULES[func](func, args, kwargs or {})
        except NeedsWhole:
            run = OP_RULES.on_whole(func, args, kwargs or {})
            if run is None:
                raise
        except RuntimeError as error:
            _explain_devices(func, args, error)
            raise
        return run()

    @classmethod
    def from_full(cls, full: Tensor, spec: ShardSpec) -> FlatShard:
        """Return a shard with a copy of this rank's slice of `full`.

        Args:
            full: A tensor of `spec.shape`; for a parameter of a tensor-parallel mesh a DTensor, or
                its dense local tensor.
            spec: What the shard shall be a shard of.

        Raises:
            ValueError: If the shape is another one.
        """
        dense = full.detach()
        if isinstance(dense, DTensor):
            dense = dense.to_local()
        if dense.shape != spec.dense_shape:
            raise ValueError(
                f"expected a tensor of shape {tuple(spec.dense_shape)} for '{spec.label.fqn}', "
                f"got {tuple(dense.shape)}"
            )
        return cls(spec.slice(dense).clone(), spec)

    def to_local(self) -> Tensor:
        """Return this rank's slice, shape `(end - start,)`; it shares memory and has no grad.

        Of a parameter of granularity "param" the owner gets the whole tensor in its shape (a
        DTensor's local part), and the others an empty one. Writes to it bypass the shard's write
        guard: write to the shard itself.
        """
        spec = self._shard_spec
        if spec.owner is None or spec.is_elsewhere:
            return self._local
        return self._local.as_strided(spec.dense_shape, spec.dense_stride)

    def _shard_of(self, local: Tensor) -> FlatShard:
        return wrap(local, self._shard_spec)

    def _whole(self) -> Tensor:
        """Return all elements of a shard that is whole, in its shape; a DTensor's as a DTensor."""
        return self._shard_spec.unflatten(self._local)

    def full_tensor(self) -> Tensor:
        """Gather and return the whole tensor, without autograd; a collective, for all ranks.

        One all-gather; one broadcast of what one rank holds whole.
        """
        spec, local = self._shard_spec, self._local
        with torch.no_grad():
            if local.is_meta:
                flat = local.new_empty(spec.numel)
            elif spec.world_size == 1:
                flat = local.clone()
            elif spec.owner is not None:
                flat = local.new_empty(spec.numel) if spec.is_elsewhere else local.clone()
                # As bytes: not every backend carries every dtype.
                sent = flat.view(torch.uint8)
                broadcast(sent, spec.owner, resolve_group(spec.group_name)).wait()
            else:
                flat = all_gather_uneven(local, spec.numels, resolve_group(spec.group_name))
            logical = spec.unflatten(flat)
            return logical.full_tensor() if isinstance(logical, DTensor) else logical

    @property
    def data(self) -> Tensor:
        """The shard without autograd; it shares memory and write guard."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        spec = self._shard_spec
        # Torch's setter would replace what the wrapper says, and leave the slice as it was.
        if not isinstance(value, FlatShard):
            value = FlatShard.from_full(value, spec)
        elif value._shard_spec != spec:
            raise ValueError(
                f"expected a shard of the same range for '{spec.label.fqn}'.data, "
                f"got one of '{value._shard_spec.label.fqn}'"
            )
        if self._guard is not None:
            self._guard.note_write(spec.label.fqn)
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._local = value._local

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trainable; a change counts from the next forward on."""
        flag: bool = Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined]
        return flag

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        Tensor.requires_grad.__set__(self, flag)  # type: ignore[attr-defined]
        self._note_new_attributes()

    def requires_grad_(self, requires_grad: bool = True) -> FlatShard:
        """Set `requires_grad` and return the shard."""
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Register a hook: on a unit's parameter it sees this rank's full, unreduced gradient."""
        self._note_new_attributes()
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    def share_memory_(self) -> FlatShard:
        """Move the slice, and all others in its storage, to shared memory; return the shard."""
        self._local.share_memory_()  # torch's own would take the wrapper for data, and crash
        return self

    def _note_new_attributes(self) -> None:
        if self._guard is not None:
            self._guard.has_new_attributes = True

    def sum(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the sum of all elements; its gradient is sharded like the parameter."""
        return Tensor.sum(self._with_sharded_gradient(), *args, **kwargs)

    def mean(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mean of all elements; its gradient is sharded like the parameter."""
        return Tensor.mean(self._with_sharded_gradient(), *args, **kwargs)

    def _with_sharded_gradient(self) -> FlatShard:
        if not (self.requires_grad and torch.is_grad_enabled()):
            return self
        connected: FlatShard = _SharedGradient.apply(self)  # type: ignore[no-untyped-call]
        return connected

    def user_attributes(self) -> dict[str, Any]:
        """Return the attributes that are not ours, `_is_param` of nn.Parameter among them."""
        return {name: value for name, value in self.__dict__.items() if name not in _OWN_FIELDS}

    @property
    def _taken_apart(self) -> Tensor:
        """The slice, under the name by which `torch.compile` reads it.

        A compiled graph may write to it without any dispatch, so reading counts as a write.
        """
        if self._guard is not None:
            self._guard.note_write(self._shard_spec.label.fqn)
        return self._local

    def __tensor_flatten__(self) -> tuple[list[str], ShardSpec]:
        """Name the tensors inside; marks this as a wrapper for `torch.compile` and `Module.to`."""
        return ["_taken_apart"], self._shard_spec

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner: dict[str, Tensor],
        spec: ShardSpec,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
    ) -> FlatShard:
        """Rebuild what `__tensor_flatten__` took apart."""
        return cls(inner["_taken_apart"], spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShard:
        """Copy the slice, the attributes and `.grad`; the copy has no write guard."""
        if id(self) in memo:
            known: FlatShard = memo[id(self)]
            return known
        if not self.is_leaf:
            raise RuntimeError(
                f"expected a leaf tensor to deep-copy, got one computed from "
                f"'{self._shard_spec.label.fqn}': call detach() first"
            )
        local = self._local.clone()
        twin = type(self)(local, self._shard_spec, requires_grad=self.requires_grad)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.user_attributes(), memo))
        # Of torch's own property: a hidden parameter's is another.
        grad = Tensor.grad.__get__(self)  # type: ignore[union-attr]
        if grad is not None:
            twin.grad = copy.deepcopy(grad, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle a copy of the slice, so that the unit's whole storage isn't written."""
        is_of_dtensor = isinstance(self, FlatShardOfDTensor)
        state = (is_of_dtensor, self.requires_grad, self.user_attributes())
        return _rebuild_flat_shard, (self._local.clone(), self._shard_spec.to_plain(), state)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # the stub returns Any
        """Describe this rank's part; no communication."""
        spec = self._shard_spec
        start, end = spec.local_range
        return (
            f"{type(self).__name__}('{spec.label.fqn}', shape={tuple(spec.shape)}, "
            f"dtype={self.dtype}, elements [{start}, {end}) of {spec.numel}, local={self._local})"
        )


def _explain_devices(func: OpOverload, args: tuple[Any, ...], error: RuntimeError) -> None:
    """Raise an error that says more where the operands are not on one device."""
    operands = [item for arg in args for item in (arg if isinstance(arg, list | tuple) else [arg])]
    devices = {item._local.device: item for item in operands if isinstance(item, FlatShard)}
    if len(devices) > 1:
        found = ", ".join(
            f"a shard of '{item._shard_spec.label}' on {device}" for device, item in devices.items()
        )
        raise RuntimeError(
            f"{func.overloadpacket} needs its operands on one device, got {found}. Optimizer state "
            "that is not where the parameters are: optimizer.load_state_dict("
            "optimizer.state_dict()) moves it there."
        ) from error


class _SharedGradient(torch.autograd.Function):
    """Identity that takes this rank's slice of a full-size gradient.

    Autograd spreads the gradient of a sum over the logical shape without an op that we see.
    """

    @staticmethod
    def forward(ctx: Any, shard: FlatShard) -> FlatShard:
        """Return an alias, as autograd wants an output of its own."""
        ctx.spec = shard._shard_spec
        return wrap(shard._local, shard._shard_spec)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Slice a plain gradient, which is the same on every rank."""
        if isinstance(gradient, FlatShard):
            return gradient
        if ctx.spec.tensor_parallel is not None:
            mesh, placements = ctx.spec.tensor_parallel
            # src_data_rank=None: cut locally, as every rank has the same values.
            gradient = distribute_tensor(gradient, mesh, placements, src_data_rank=None).to_local()
        return wrap(ctx.spec.slice(gradient).clone(), ctx.spec)


def is_elsewhere(tensor: Tensor) -> bool:
    """Return whether a tensor is a shard of what another rank holds whole, and alone steps."""
    return isinstance(tensor, FlatShard) and tensor._shard_spec.is_elsewhere


class DTensorSlots(Tensor):
    """A class that can take the place of DTensor in an object."""

    # A direct subclass of Tensor with DTensor's slots: Python lets an object change its class only
    # if both classes add the same slots to the same base.
    __slots__ = ("_local_tensor", "_spec")  # never set


class FlatShardOfDTensor(FlatShard, DTensorSlots):
    """A FlatShard that can take the place of a DTensor by `torch.utils.swap_tensors`."""


def wrap(local: Tensor, spec: ShardSpec) -> FlatShard:
    """Return `FlatShard(local, spec)`; for results of ops, where every microsecond counts."""
    # By position: names cost as much as the rest.
    shard: FlatShard = _make_wrapper(
        FlatShard, spec.shape, spec.stride, None, None, local.dtype, torch.strided, local.device
    )
    # At once: each assignment to an attribute of a tensor takes its time.
    shard.__dict__ = {"_local": local, "_shard_spec": spec, "_guard": None}
    return shard


def rebind(shard: FlatShard, local: Tensor, spec: ShardSpec, guard: WriteGuard | None) -> None:
    """Let a shard of the same dtype and device hold other data."""
    shard._local, shard._shard_spec, shard._guard = local, spec, guard


_make_wrapper = make_wrapper


def _rebuild_flat_shard(
    local: Tensor, values: tuple[Any, ...], state: tuple[bool, bool, dict[str, Any]]
) -> FlatShard:
    spec = ShardSpec.from_plain(values)
    is_of_dtensor, requires_grad, attributes = state
    shard_class = FlatShardOfDTensor if is_of_dtensor else FlatShard
    shard = shard_class(local, spec, requires_grad=requires_grad)
    shard.__dict__.update(attributes)
    return shard


def allow_loading() -> None:
    """Let `torch.load(weights_only=True)` read FlatShards."""
    torch.serialization.add_safe_globals([_rebuild_flat_shard])
