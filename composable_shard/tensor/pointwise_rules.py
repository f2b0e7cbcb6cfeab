"""Rules that run on the local slices: elementwise ops, one tensor or a list at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from composable_shard.comm import HOST
from composable_shard.tensor.flat_shard import (
    FlatShard,
    NeedsWhole,
    Rule,
    explain_devices,
    is_trainable,
    kind_of,
    lead,
    whole_of,
    wrap,
)
from composable_shard.tensor.operands import (
    binding,
    check_same_spec,
    note_write,
    plain_scalar,
    schema_arguments,
    unsupported,
    write_to_plain,
)
from composable_shard.tensor.shard_spec import ShardSpec, user_attributes
from composable_shard.torch_private import (
    OpOverload,
    VariableFunctions,
    backend_of,
    num_dispatch_modes,
    overload_name_of,
    running,
    schema_of,
)

aten = torch.ops.aten


def pointwise_family(func: OpOverload) -> Rule | None:
    """Return a rule if the op is elementwise; which arguments it writes is worked out once."""
    if not _is_pointwise(func):
        return None
    written = [argument for argument in schema_arguments(func) if argument.is_write]
    if not written:
        return partial(_run, binding(func))
    if written[0].kwarg_only:
        return _run_out
    return partial(_run_in_place, binding(func))


def _is_pointwise(func: OpOverload) -> bool:
    if torch.Tag.pointwise in func.tags:
        return func is not aten.equal.default  # tagged, and its result is no tensor
    # Some in-place variants lack the tag that their functional form has.
    name = schema_of(func).name.removeprefix("aten::")
    if not name.endswith("_") or name.endswith("__"):
        return False
    functional = getattr(getattr(aten, name[:-1], None), overload_name_of(func), None)
    return functional is not None and torch.Tag.pointwise in functional.tags


def local_operands(func: OpOverload, args: tuple[Any, ...]) -> tuple[list[Any], ShardSpec]:
    """Return the arguments with slices in place of shards, and the spec they share."""
    spec: ShardSpec | None = None
    operands: list[Any] = []
    plain: list[int] = []
    numel = 0
    for arg in args:
        kind = type(arg)
        if isinstance(arg, FlatShard):
            other = arg._shard_spec
            if spec is None:
                spec = other
                numel = arg._local.numel()
            elif other is not spec:
                check_same_spec(func, spec, other)
            operands.append(arg._local)
        else:
            if kind is not float and kind is not int and isinstance(arg, Tensor):
                plain.append(len(operands))
            operands.append(arg)
    if spec is None:
        raise unsupported(func, args)
    for position in plain:
        operands[position] = plain_scalar(func, operands[position], spec, numel)
    return operands, spec


def _fill_value(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `fill_` with a 0-dim tensor, whose dtype counts for nothing."""
    target, value = args
    if not isinstance(target, FlatShard):
        raise write_to_plain(func, target, args)
    if isinstance(value, FlatShard) or value.dim():
        raise unsupported(func, args)
    note_write(target)
    func(target._local, value)
    return target


def _run(
    call: Callable[..., Any], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    operands, spec = local_operands(func, args)
    result = call(*operands, **kwargs)
    if isinstance(result, tuple):
        return tuple(wrap(item, spec) for item in result)
    return wrap(result, spec)


def _run_in_place(
    call: Callable[..., Any], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    target = args[0]
    if not isinstance(target, FlatShard):
        raise write_to_plain(func, target, args)
    operands, spec = local_operands(func, args)
    guard = target._guard
    if guard is not None:
        guard.note_write(spec.label.fqn)
    call(*operands, **kwargs)
    return target


def _run_out(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = kwargs["out"]
    if not isinstance(target, FlatShard):
        raise write_to_plain(func, target, args)
    # The target takes part in the check of equal specs, and comes last to be taken off again.
    operands, _ = local_operands(func, (*args, target))
    note_write(target)
    func(*operands[:-1], **{**kwargs, "out": operands[-1]})
    return target


def _keep_layout(func: OpOverload, shard: FlatShard, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for the slice; raise if the memory order would change."""
    requested = kwargs.get("memory_format", torch.preserve_format)
    if requested is torch.preserve_format:
        return kwargs
    if not torch.empty_strided(shard.shape, shard.stride(), device="meta").is_contiguous(
        memory_format=requested
    ):
        raise RuntimeError(
            f"{func.overloadpacket} can't change the memory format of the sharded parameter "
            f"'{shard._shard_spec.label.fqn}' {tuple(shard.shape)} to {requested}: its elements "
            "lie on the ranks in their present order. Convert the module before sharding it."
        )
    return {name: value for name, value in kwargs.items() if name != "memory_format"}


def _like(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    """Run an op that makes a tensor like its first argument: same spec, own memory."""
    shard = args[0]
    if not isinstance(shard, FlatShard):
        raise unsupported(func, args)
    local = func(shard._local, *args[1:], **_keep_layout(func, shard, kwargs))
    # Of the same class, as `Module.to` and `to_empty` swap a parameter with what this returns.
    like: FlatShard = kind_of(shard)(local, shard._shard_spec)
    return like


def _convert(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    """Run `to` or `empty_like`; the parameter keeps its attributes when it is swapped."""
    return _carry_attributes(args[0], _like(func, args, kwargs))


def _alias(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    shard: FlatShard = args[0]
    # detach() sets a version counter. Handles know a parameter by the identity of its slice.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        result = type(shard)(shard._local, shard._shard_spec, guard=shard._guard)
    return _carry_attributes(shard, result)


def _carry_attributes(source: FlatShard, result: FlatShard) -> FlatShard:
    attributes = user_attributes(source)
    attributes.pop("_is_param", None)
    result.__dict__.update(attributes)
    return result


def copy(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy from a shard of the same range, or this rank's slice from a plain full-size tensor.

    The latter is the one exception to "no plain operand": every rank passes the same values.
    """
    target, source, *others = args
    if not isinstance(target, FlatShard):
        raise write_to_plain(func, target, args)
    spec = target._shard_spec
    if isinstance(source, FlatShard):
        check_same_spec(func, spec, source._shard_spec)
        local = source._local
    else:
        local = slice_of(func, source, spec)
    note_write(target)
    target._local.copy_(local, *others)
    return target


def slice_of(func: OpOverload, full: Tensor, spec: ShardSpec) -> Tensor:
    """Return this rank's slice of a plain tensor that broadcasts to the logical shape."""
    if isinstance(full, DTensor):
        if spec.tensor_parallel != (full.device_mesh, tuple(full.placements)):
            raise unsupported(func, (full,))
        return spec.slice(full.to_local())
    # A plain tensor for a parameter of a tensor-parallel mesh can only be the dense local part.
    if spec.tensor_parallel is not None and full.dim() and full.shape != spec.dense_shape:
        raise unsupported(func, (full,))
    return spec.slice(full.expand(spec.dense_shape))


def _new_filled(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a shard if the size is the shard's own, else a plain tensor."""
    shard, size, *others = args
    local, spec = shard._local, shard._shard_spec
    if tuple(size) != tuple(spec.shape):
        if not spec.is_whole and _is_reduced(size, spec.shape):
            raise unsupported(func, args)
        return func(local, size, *others, **kwargs)
    return wrap(func(local, [local.numel()], *others, **kwargs), spec)


def _is_reduced(size: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a size is that of sums over some dims of a shape, as Adafactor's state is."""
    is_sum = len(size) == len(shape) and all(
        one in (1, full) for one, full in zip(size, shape, strict=True)
    )
    return is_sum and any(one > 1 for one in size)


def _new_empty(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, size = args[:2]
    local, spec = shard._local, shard._shard_spec
    if kwargs.get("device") is not None and tuple(size) == tuple(spec.shape):
        # The copy on a device that dcp.async_save makes; it sets the attributes itself.
        _check_own_group(spec, local.device)
        return wrap(func(local, [local.numel()], **kwargs), spec)
    # Plain even for the own size: nn.init.orthogonal_ factorises such a tensor as a whole.
    return func(local, *args[1:], **kwargs)


def _check_own_group(spec: ShardSpec, device: torch.device) -> None:
    """Check that `dcp.async_save`, if it makes this copy, has a group that the unit does not use.

    It talks to the other ranks in a thread: on one group its messages and those of training would
    be taken for each other. Nothing else that it does before tells the group.
    """
    call = next(running("torch.distributed.checkpoint.state_dict_saver", "async_save"), None)
    if not call or call["no_dist"] or not call["use_collectives"] or spec.world_size == 1:
        return
    group: Any = call["process_group"] or dist.group.WORLD
    is_shared = group.group_name == spec.group_name
    is_thread = call["async_checkpointer_type"].name == "THREAD"
    if is_thread and is_shared and len({backend_of(group, d).name() for d in (HOST, device)}) == 1:
        raise NotImplementedError(
            "dcp.async_save would send messages, from a thread, in the process group in which the "
            f"unit of '{spec.label}' gathers its parameters. Pass process_group="
            "torch.distributed.new_group(backend='gloo'), made once on all ranks, or call "
            "save_checkpoint(..., async_op=True)."
        )


def _new_empty_strided(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Autograd asks for the memory of a gradient this way."""
    shard, size, stride = args
    local, spec = shard._local, shard._shard_spec
    if tuple(size) != tuple(spec.shape) or tuple(stride) != tuple(spec.stride):
        return func(local, size, stride, **kwargs)
    return wrap(func(local, [local.numel()], [1], **kwargs), spec)


def _is_same_size(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[0].shape == args[1].shape)


def _on_local(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0]._local, *args[1:], **kwargs)


RULES: dict[OpOverload, Rule] = {
    aten.alias.default: _alias,
    aten.detach.default: _alias,
    aten.lift_fresh.default: _alias,
    aten.clone.default: _like,
    aten.zeros_like.default: _like,
    aten.ones_like.default: _like,
    aten.full_like.default: _like,
    aten._pin_memory.default: _like,
    aten.empty_like.default: _convert,
    aten._to_copy.default: _convert,
    aten.copy_.default: copy,
    aten.zero_.default: partial(_run_in_place, Tensor.zero_),
    aten.fill_.Scalar: partial(_run_in_place, Tensor.fill_),
    aten.fill_.Tensor: _fill_value,
    aten.new_zeros.default: _new_filled,
    aten.new_ones.default: _new_filled,
    aten.new_full.default: _new_filled,
    aten.new_empty.default: _new_empty,
    aten.new_empty_strided.default: _new_empty_strided,
    aten.is_same_size.default: _is_same_size,
    aten.is_pinned.default: _on_local,
    aten.record_stream.default: _on_local,
}


# Lists of these names hold one plain value per parameter; tensors are single values for the op.
_PLAIN_LISTS = frozenset({"state_steps", "scalars"})
_FUSED = frozenset({"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"})
_NOT_ELEMENTWISE = frozenset({"_foreach_norm", "_foreach_max", "_foreach_powsum"})


def list_family(func: OpOverload) -> Rule | None:
    """Return a rule if the op is an elementwise `_foreach_*` op or a fused optimizer step."""
    name = schema_of(func).name.removeprefix("aten::")
    if name in _FUSED or (name.startswith("_foreach_") and name not in _NOT_ELEMENTWISE):
        return _ListRule(func)
    return None


class _ListRule:
    """Runs one op on lists of shards; all lists agree, item by item, in the range they hold.

    [Note: Direct lists]
    To take lists of a subclass through the dispatcher costs more than a step on their slices. Torch
    asks each item of a list for `__torch_function__` before that. So the first item, if it is no
    parameter, gets a class that has one. It runs the rule at once, where autograd is off and no
    mode is active.
    """

    __slots__ = ("_call", "_has_results", "_lists", "_plain", "_written")

    def __init__(self, func: OpOverload) -> None:
        self._call = binding(func)
        self._has_results = bool(schema_of(func).returns)  # the binding returns its input otherwise
        arguments = schema_arguments(func)
        names = [argument.name for argument in arguments]
        self._plain = names.index("state_steps") if "state_steps" in names else -1
        self._lists = [
            position
            for position, argument in enumerate(arguments)
            if isinstance(argument.type, torch.ListType)
            and isinstance(argument.type.getElementType(), torch.TensorType)
            and argument.name not in _PLAIN_LISTS
        ]
        self._written = [place for place in self._lists if arguments[place].is_write]

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        specs: Sequence[ShardSpec | None]
        try:
            operands, specs = self._all_shards(func, args, self._lists)
        except AttributeError:  # a plain tensor in a list; rare, so found by trying
            operands, specs = self._some_shards(func, args)
        self._check_others(func, args)
        self._note_writes(args)
        self._choose_lead(args)
        results = self._call(*operands, **kwargs)
        if not self._has_results:
            return None
        return [
            item if spec is None else wrap(item, spec)
            for item, spec in zip(results, specs, strict=True)
        ]

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run torch's function, [Note: Direct lists]; NotImplemented where the op must decide."""
        if any(isinstance(value, FlatShard | list | tuple) for value in kwargs.values()):
            return NotImplemented
        try:
            lists = [place for place, arg in enumerate(args) if self._has_shards(place, arg)]
            operands, specs = self._all_shards(function, args, lists)
        except (AttributeError, RuntimeError):
            return NotImplemented
        self._note_writes(args)
        try:
            results = function(*operands, **kwargs)
        except RuntimeError as error:
            explain_devices(function, args, error)
            raise
        if not self._has_results:
            return None if results is None else args[0]
        shards = tuple(map(wrap, results, specs))
        lead(shards[0])
        return shards

    def _has_shards(self, place: int, arg: Any) -> bool:
        if isinstance(arg, FlatShard):
            raise AttributeError(place)
        is_list = isinstance(arg, list | tuple) and bool(arg) and place != self._plain
        return is_list and type(arg[0]) is not float and type(arg[0]) is not int

    def _choose_lead(self, args: tuple[Any, ...]) -> None:
        """Let the next function of these tensors run by its rule, [Note: Direct lists]."""
        for place in (*reversed(self._written), *self._lists):
            first = args[place][0] if place < len(args) and args[place] else None
            if isinstance(first, FlatShard) and first._guard is None and not is_trainable(first):
                lead(first)
                return

    def _all_shards(
        self, func: Any, args: tuple[Any, ...], places: Sequence[int]
    ) -> tuple[list[Any], list[ShardSpec]]:
        operands = list(args)
        specs: list[ShardSpec] = []
        for place in places:
            shards = args[place] if place < len(args) else None
            if shards:
                operands[place] = [shard._local for shard in shards]
                own_specs = [shard._shard_spec for shard in shards]
                if not specs:
                    specs = own_specs
                elif own_specs != specs:  # lists compare items by identity first
                    self._raise_mismatch(func, specs, own_specs)
        return operands, specs

    def _raise_mismatch(
        self, func: OpOverload, specs: list[ShardSpec], others: list[ShardSpec]
    ) -> None:
        if len(specs) != len(others):
            raise RuntimeError(
                f"{func.overloadpacket} got lists of {len(specs)} and {len(others)} tensors"
            )
        for spec, other in zip(specs, others, strict=True):
            check_same_spec(func, spec, other)

    def _some_shards(
        self, func: OpOverload, args: tuple[Any, ...]
    ) -> tuple[list[Any], Sequence[ShardSpec | None]]:
        """Take the lists apart item by item, where some items are plain on all lists."""
        places = [place for place in self._lists if place < len(args) and args[place]]
        operands = [list(arg) if place in places else arg for place, arg in enumerate(args)]
        specs: list[ShardSpec | None] = []
        for index in range(len(args[places[0]])):
            items = [args[place][index] for place in places]
            shards = [item for item in items if isinstance(item, FlatShard)]
            spec = shards[0]._shard_spec if shards else None
            if shards:
                items, spec = self._local_items(func, places, items, shards[0])
            for place, item in zip(places, items, strict=True):
                operands[place][index] = item
            specs.append(spec)
        return operands, specs

    def _local_items(
        self, func: OpOverload, places: list[int], items: list[Tensor], shard: FlatShard
    ) -> tuple[list[Tensor], ShardSpec | None]:
        """Return slices and the spec of results; or whole tensors, and None for plain results."""
        try:
            pairs = zip(places, items, strict=True)
            locals_ = [self._local_item(func, place, item, shard) for place, item in pairs]
        except NeedsWhole:
            shards = [item for item in items if isinstance(item, FlatShard)]
            if not all(each._shard_spec.is_whole for each in shards):
                raise
        else:
            return locals_, shard._shard_spec
        return [whole_of(item) if isinstance(item, FlatShard) else item for item in items], None

    def _local_item(self, func: OpOverload, place: int, item: Tensor, shard: FlatShard) -> Tensor:
        if isinstance(item, FlatShard):
            check_same_spec(func, shard._shard_spec, item._shard_spec)
            return item._local
        if place in self._written:
            raise write_to_plain(func, item, (shard,))
        return plain_scalar(func, item, shard._shard_spec, shard._local.numel())

    def _check_others(self, func: OpOverload, args: tuple[Any, ...]) -> None:
        for place, arg in enumerate(args):
            if place not in self._lists and isinstance(arg, FlatShard):
                raise unsupported(func, args)

    def _note_writes(self, args: tuple[Any, ...]) -> None:
        for place in self._written:
            items = args[place] if place < len(args) else ()
            try:
                written = {item._guard: item for item in items}
            except AttributeError:
                written = {item._guard: item for item in items if isinstance(item, FlatShard)}
            # Once for each handle: this is most of a fused step's cost.
            for guard, item in written.items():
                if guard is not None:
                    guard.note_write(item._shard_spec.label.fqn)


class _FunctionRules(dict[Any, _ListRule]):
    """The list rules by torch's functions."""

    def __missing__(self, function: Any) -> Any:
        """Return the rule of a function of lists, by any overload; None for another function."""
        name = getattr(function, "__name__", "")
        if not name.startswith("_f") or getattr(VariableFunctions, name, None) is not function:
            return None
        packet = getattr(aten, name)
        rule: Any = list_family(getattr(packet, packet.overloads()[0]))
        self[function] = rule
        return rule


_FUNCTION_RULES = _FunctionRules()


def run_function(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch on lists, [Note: Direct lists], and return its result.

    NotImplemented where it has no rule, or the op must decide.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or num_dispatch_modes():
        return NotImplemented
    rule = _FUNCTION_RULES[function]
    return NotImplemented if rule is None else rule.run(function, args, kwargs)


def _foreach_copy(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Copy item by item where a source is plain and full-size, else in one call."""
    targets, sources, *others = args
    if all(isinstance(source, FlatShard) for source in sources):
        _copy_lists(func, args, kwargs)
        return
    for target, source in zip(targets, sources, strict=True):
        copy(aten.copy_.default, (target, source, *others), kwargs)


_copy_lists = _ListRule(aten._foreach_copy_.default)

RULES |= {aten._foreach_copy_.default: _foreach_copy}
