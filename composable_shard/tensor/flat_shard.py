"""`FlatShard`, the tensor subclass that `model.parameters()` yields at rest."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch
from typing_extensions import TypeIs

from composable_shard.comm import all_gather_uneven, broadcast, resolve_group
from composable_shard.dtensors import distribute, is_dtensor
from composable_shard.options import AT_REST, IN_GRAPH, SAVE
from composable_shard.tensor.checkpointable import cloned, user_attributes
from composable_shard.tensor.late_reads import hand_out
from composable_shard.tensor.owned_numbers import OwnedNumber
from composable_shard.tensor.rule_table import OP_RULES, NeedsWhole
from composable_shard.tensor.safetensors_rows import RowCheckpointable
from composable_shard.tensor.shard_spec import ShardSpec
from composable_shard.tensor.write_guard import WriteGuard
from composable_shard.torch_private import (
    DisableTorchFunctionSubclass,
    OpOverload,
    disabled_torch_function,
    make_wrapper,
    running,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_grad_enabled = torch.is_grad_enabled
is_trainable: Callable[[Tensor], bool] = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
own_gradient: Callable[[Tensor], Tensor | None] = Tensor.grad.__get__  # type: ignore[union-attr]
set_gradient: Callable[[Tensor, Tensor | None], None] = Tensor.grad.__set__  # type: ignore[union-attr]


class FlatShard(RowCheckpointable):
    """One rank's flat range of a tensor, under the tensor's logical shape, stride and dtype.

    Elementwise ops run on the local tensors. Reductions to one value are exact, global and
    collective. An op that has no meaning on one range raises on every rank. Attributes set by the
    user survive `detach`, `to` and deep copies.

    [Note: Whole shards]
    A parameter of granularity "param" is whole on its owner, and empty on the other ranks. On the
    owner every op runs locally on the tensor in its shape, and accepts plain tensors of that shape;
    reductions to one value do so in optimizer steps only, [Note: Ranks of a reduction]. Elementwise
    results of the same shape are FlatShards again, and so are contiguous views, so that writes to
    them are noted; other results are plain tensors. On the other ranks elementwise ops run on the
    empty shard, and an op that needs values raises. Where one rank holds everything, each shard is
    whole.
    """

    _local: Tensor  # (end - start,); a parameter's is a view of its handle's local shard
    _shard_spec: ShardSpec
    _guard: WriteGuard | None  # None: a gradient, or an optimizer's state

    @staticmethod
    def __new__(
        cls: type[FlatShard],
        local: Tensor,
        spec: ShardSpec,
        *,
        guard: WriteGuard | None = None,
        requires_grad: bool = False,
        is_param: bool = False,
    ) -> FlatShard:
        """Make a shard of `local`, no copy; parameters and their aliases have a guard.

        `is_param`: what `nn.Parameter` would make of the shard, of which it makes another first.
        """
        self: FlatShard = make_wrapper(
            cls,
            spec.shape,
            spec.stride,
            dtype=local.dtype,
            device=local.device,
            requires_grad=requires_grad,
        )
        # One assignment: a dict that grows takes more memory.
        self.__dict__ = {"_local": local, "_shard_spec": spec, "_guard": guard}
        if is_param:
            self.__dict__["_is_param"] = True
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
        is_trained = _grad_enabled() and _refuse_gradients(func, args)
        try:
            return OP_RULES[func](func, args, kwargs or {})
        except NeedsWhole as error:
            run = OP_RULES.on_whole(func, args, kwargs or {})
            if run is None:
                raise error.refusal(_remedy_of(args) if is_trained else "") from None
        return run()

    @classmethod
    def from_full(cls, full: Tensor, spec: ShardSpec) -> FlatShard:
        """Return a shard with a copy of this rank's elements of `full`.

        For a parameter of a tensor-parallel mesh that is a DTensor, its dense local tensor, or the
        logical tensor, the same on all ranks. Raises ValueError where the shape is not the spec's.
        """
        dense = full.detach()
        is_logical = dense.shape == spec.shape != spec.dense_shape
        if spec.tensor_parallel is not None and is_logical and not is_dtensor(dense):
            mesh, placements = spec.tensor_parallel
            dense = distribute(dense, mesh, placements)
        if is_dtensor(dense):
            dense = dense.to_local()
        if dense.shape != spec.dense_shape:
            raise ValueError(
                f"expected a tensor of shape {tuple(spec.dense_shape)} for '{spec.label.fqn}', "
                f"got {tuple(dense.shape)}. A sharded parameter keeps its shape: change it before "
                "fully_shard (resize_token_embeddings, say)"
            )
        return cls(spec.slice(dense).clone(), spec)

    def to_local(self) -> Tensor:
        """Return this rank's slice, shape `(end - start,)`; it shares memory and has no grad.

        For a parameter of granularity "param" the owner gets the whole tensor in its shape (a
        DTensor's local part), and the other ranks get an empty one. Writes to it bypass the shard's
        write guard, so write to the shard itself.
        """
        hand_out(self._local, self._guard)
        spec = self._shard_spec
        if spec.owner is None or spec.is_owned_by_other_rank:
            return self._local
        return self._local.as_strided(spec.dense_shape, spec.dense_stride)

    def full_tensor(self) -> Tensor:
        """Gather and return the whole tensor; a collective, for all ranks.

        Issues one all-gather, or one broadcast if one rank holds the tensor whole. While autograd
        records, a backward that reaches the result from a trainable parameter raises.
        """
        if is_trainable(self) and _grad_enabled():
            remedy = explain_read(self) or AT_REST
            text = f"a backward reached parameter '{self._shard_spec.label}' at rest. {remedy}"
            apply: Callable[..., Tensor] = Unreachable.apply
            return apply(self, lambda: self.gathered().data, text)
        return self.gathered()

    def gathered(self) -> Tensor:
        """Gather and return the whole tensor, without autograd; a collective, for all ranks."""
        spec, local = self._shard_spec, self._local
        what = f"full_tensor() of '{spec.label.fqn}'"
        with torch.no_grad():
            if local.is_meta:
                flat = local.new_empty(spec.numel)
            elif spec.world_size == 1:
                flat = local.clone()
            elif spec.owner is not None:
                flat = local.new_empty(spec.numel) if spec.is_owned_by_other_rank else local.clone()
                # As bytes: not every backend carries every dtype.
                sent = flat.view(torch.uint8)
                broadcast(sent, spec.owner, resolve_group(spec.group_name), what=what).wait()
            else:
                group = resolve_group(spec.group_name)
                flat = spec.arrange(all_gather_uneven(local, spec.numels, group, what=what))
            logical = spec.unflatten(flat)
            # Views count on the stride, and torch 2.11 gathers uneven columns with another one.
            return logical.full_tensor().contiguous() if is_dtensor(logical) else logical

    @property
    def data(self) -> Tensor:
        """The shard without autograd; it shares memory and write guard."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        spec = self._shard_spec
        # Torch's setter would change the wrapper and leave the slice as it was.
        if not isinstance(value, FlatShard):
            value = FlatShard.from_full(value, spec)
        elif value._shard_spec != spec and value._guard is None and value.shape == self.shape:
            own = FlatShard(torch.empty_like(self._local, dtype=value.dtype), spec)
            own.copy_(value)  # gathers
            value = own
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
        return is_trainable(self)

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        Tensor.requires_grad.__set__(self, flag)  # type: ignore[attr-defined]
        if self._guard is not None:
            self._guard.set_new_attributes(True)

    def requires_grad_(self, requires_grad: bool = True) -> FlatShard:
        """Set `requires_grad` and return the shard."""
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Register a hook: on a unit's parameter it sees this rank's full, unreduced gradient.

        If it raises, the backward ends there and publishes no gradient.
        """
        if self._guard is not None:
            self._guard.set_new_attributes(True)
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Register a hook: on a unit's parameter it sees the reduced gradient.

        If it raises, the backward does so at its end, with all gradients published.
        """
        if self._guard is not None:
            self._guard.note_hook()
        return super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def view_as(self, other: Tensor) -> Tensor:
        """View as a tensor of the same range; torch calls it to find a leaf's gradient node."""
        if other is self and self._guard is not None and self.requires_grad and _grad_enabled():
            self._shard_spec.label.refuse_gradient_node()
        return super().view_as(other)

    def data_ptr(self) -> int:
        """Return an address that tells parameters apart, as libraries use it for keys.

        It is that of this rank's slice; an empty slice has none, and gets that of its object. Equal
        for aliases and tied parameters, and constant until the data moves. It is no whole tensor's.
        Torch's own code gets 0, as of any tensor subclass without memory.
        """
        if _is_called_by_torch():
            return 0
        hand_out(self._local, self._guard)
        return self._local.data_ptr() or (0 if self._local.is_meta else id(self._local))

    def untyped_storage(self) -> Any:
        """Raise: parameters of a unit share one storage, and would be taken for tied ones.

        Torch's own code gets a storage without data, as of any tensor subclass.
        """
        if _is_called_by_torch():
            return super().untyped_storage()
        raise RuntimeError(
            f"the storage of the sharded parameter '{self._shard_spec.label.fqn}' was asked for, "
            "which other parameters of its unit share. Tell parameters apart by identity or "
            "data_ptr()."
        )

    def share_memory_(self) -> FlatShard:
        """Move the whole storage of the local tensor to shared memory; return the shard."""
        hand_out(self._local, self._guard)
        self._local.share_memory_()  # torch's own would take the wrapper for data, and crash
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle a copy of the slice, so that the unit's whole storage isn't written."""
        is_part = not self._shard_spec.is_whole or self._shard_spec.tensor_parallel is not None
        # FSDP2's scripts make DTensors whole before they save, and leave a FlatShard as it is.
        if is_part and any(running("torch.serialization", "save")):
            raise RuntimeError(SAVE)
        is_of_dtensor = isinstance(self, FlatShardOfDTensor)
        state = (is_of_dtensor, self.requires_grad, user_attributes(self))
        return _rebuild_flat_shard, (cloned(self._local), self._shard_spec.to_plain(), state)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # the stub returns Any
        """Describe this rank's part; no communication."""
        spec = self._shard_spec
        start, end = spec.local_range
        return (
            f"{kind_of(self).__name__}('{spec.label.fqn}', shape={tuple(spec.shape)}, "
            f"dtype={self.dtype}, elements [{start}, {end}) of {spec.numel}, local={self._local})"
        )

    def __format__(self, format_spec: str) -> str:
        """Format a number, as in `f"{param[0, 0]:.3f}"`, a collective; else describe the part."""
        if format_spec and self.dim() == 0:
            return format(self.item(), format_spec)
        return object.__format__(self, format_spec)  # torch's, for what isn't a number

    #: `requires_grad` of torch itself, which costs no call of Python's.
    is_trainable = Tensor.requires_grad
    #: `grad` of torch itself, without what subclasses do; faster than its getter as a function.
    own_grad = Tensor.grad
    is_sparse = False  # saves a call of torch: optimizers ask each gradient


def is_distributed(value: object) -> TypeIs[FlatShard | DTensor]:
    """Return whether a value is a tensor of which other ranks hold parts."""
    return isinstance(value, FlatShard) or is_dtensor(value)


def whole_of(shard: FlatShard) -> Tensor:
    """Return all elements of a shard that is whole, in its shape; a DTensor's as a DTensor."""
    return shard._shard_spec.unflatten(shard._local)


def _is_called_by_torch() -> bool:
    """Return whether the caller of the calling method is a function of torch."""
    name: str = sys._getframe(2).f_globals["__name__"]
    return name.startswith("torch.")


# `view` is asked for the graph below, and the result of `detach` has none.
_WITHOUT_GRAPH = (torch.ops.aten.view.default, torch.ops.aten.detach.default)


def _refuse_gradients(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Make a backward that reaches a parameter at rest raise; return whether one may reach it.

    Each rank would get a gradient of its own, and nothing would reduce it.
    """
    is_trained = False
    for arg in () if func in _WITHOUT_GRAPH else args:
        for shard in arg if isinstance(arg, list | tuple) else (arg,):
            if not isinstance(shard, FlatShard) or not is_trainable(shard):
                continue
            is_trained, guard = True, shard._guard
            if guard is not None and guard.owner is not None:
                with enable_reentrant_dispatch():
                    node: Any = shard.view(shard.shape).grad_fn
                if node is not None:  # the op is differentiable
                    # A hook on the parameter would stay; the node lives only as long as its graph.
                    accumulate = node.next_functions[0][0]
                    remedy = explain_read(shard) or AT_REST
                    accumulate.register_prehook(partial(_refuse, shard._shard_spec, remedy))
    return is_trained


class Unreachable(torch.autograd.Function):
    """A tensor that has lost its graph: a backward that reaches it raises an error."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, make: Callable[[], Tensor], error: str) -> Tensor:
        """Return what `make` returns, which must be no view: autograd allows no edits of one."""
        ctx.error = error
        return make()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> NoReturn:
        """Raise: what it should add would be missing."""
        raise RuntimeError(ctx.error)


def _refuse(spec: ShardSpec, remedy: str, _: Any) -> NoReturn:
    text = f"a backward reached parameter '{spec.label}' at rest. {remedy}"
    raise RuntimeError(f"{text}{spec.label.late_remedy}")


def _remedy_of(args: tuple[Any, ...]) -> str:
    """Return what to do where an operation reads shards while autograd records."""
    shards = [each for each in args if isinstance(each, FlatShard)]
    cause = next(filter(None, map(explain_read, shards)), IN_GRAPH)
    late = (shard._shard_spec.label.late_remedy for shard in shards)
    return cause + next(filter(None, late), "")


def explain_read(shard: FlatShard) -> str:
    """Return what to do if a program reads a shard now in a graph; empty: nothing special."""
    return "" if shard._guard is None else shard._guard.explain_read()


def is_owned_by_other_rank(tensor: Tensor) -> bool:
    """Return whether a tensor is a shard of a parameter that another rank owns and steps."""
    return isinstance(tensor, FlatShard) and tensor._shard_spec.is_owned_by_other_rank


class DTensorSlots(Tensor):
    """A class that can take the place of DTensor in an object."""

    # A direct subclass of Tensor with DTensor's slots: Python lets an object change its class only
    # if both classes add the same slots to the same base.
    __slots__ = ("_local_tensor", "_spec")  # never set


class FlatShardOfDTensor(FlatShard, DTensorSlots):
    """A FlatShard that can take the place of a DTensor by `torch.utils.swap_tensors`."""


class LeadingShard(FlatShard):
    """A shard that leads lists, [Note: Direct lists]."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of lists by its rule, any other function as usual."""
        if OwnedNumber in types:
            return NotImplemented  # it runs the function, and asks whose number it is
        result = OP_RULES.on_lists(function, args, kwargs or {})
        if result is not NotImplemented:
            return result
        with DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


class LeadingShardOfDTensor(LeadingShard, FlatShardOfDTensor):
    """A leading shard of a DTensor."""


_LEADING = {FlatShard: LeadingShard, FlatShardOfDTensor: LeadingShardOfDTensor}
_KINDS: dict[type, type[Any]] = {special: kind for kind, special in _LEADING.items()}


def kind_of(tensor: Any) -> type[Any]:
    """Return the class of a tensor; for a leading shard the class of an ordinary one."""
    return _KINDS.get(type(tensor), type(tensor))


def lead(shard: FlatShard) -> FlatShard:
    """Make list functions with this shard run by the rule of lists; return the shard."""
    shard.__class__ = _LEADING.get(type(shard), type(shard))
    return shard


def wrap(local: Tensor, spec: ShardSpec) -> FlatShard:
    """Return `FlatShard(local, spec)`; for results of ops, where every microsecond counts."""
    shape, stride = spec.wrapper
    dtype, device = local.dtype, local.device
    shard: FlatShard = make_wrapper(
        FlatShard, shape, stride, None, None, dtype, torch.strided, device
    )
    # One assignment: each assignment to an attribute of a tensor costs time.
    shard.__dict__ = {"_local": local, "_shard_spec": spec, "_guard": None}
    return shard


def rebind(shard: FlatShard, local: Tensor, spec: ShardSpec, guard: WriteGuard | None) -> None:
    """Let a shard of the same dtype and device hold other data."""
    shard._local, shard._shard_spec, shard._guard = local, spec, guard


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
