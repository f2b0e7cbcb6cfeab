"""Rules that run on the local slices of lists of shards: `_foreach_*` ops and fused steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from composable_shard.tensor.flat_shard import (
    FlatShard,
    is_trainable,
    lead,
    wrap,
)
from composable_shard.tensor.operands import (
    binding,
    check_same_spec,
    plain_operand,
    schema_arguments,
    unsupported,
    write_to_plain,
)
from composable_shard.tensor.rule_table import OP_RULES, NeedsWhole, Rule
from composable_shard.tensor.shard_spec import ShardSpec
from composable_shard.tensor.write_guard import RUNNING
from composable_shard.torch_private import (
    OpOverload,
    VariableFunctions,
    num_dispatch_modes,
    schema_of,
)

aten = torch.ops.aten

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
    Dispatching lists of a subclass costs more than a step on their slices. Before that torch asks
    each item of a list for `__torch_function__`. So the first item, if it is not a parameter, gets
    a class that has one. It runs the rule at once, where autograd is off and no mode is active.
    """

    __slots__ = ("_call", "_has_results", "_lists", "_plain", "_written")

    def __init__(self, func: OpOverload) -> None:
        self._call = binding(func)
        self._has_results = bool(schema_of(func).returns)  # otherwise the binding returns its input
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
        self._check_others(func, args)
        try:
            operands, specs = self._all_shards(func, args, self._lists)
        except (AttributeError, NeedsWhole):
            # A plain tensor in a list, or shards of several ranges; rare, so found by trying.
            return self._by_item(func, args, kwargs)
        self._note_writes(args)
        self._choose_lead(args)
        results = self._call(*operands, **kwargs)
        if not self._has_results:
            return None
        return [wrap(item, spec) for item, spec in zip(results, specs, strict=True)]

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run torch's function, [Note: Direct lists]; NotImplemented if the op must decide."""
        if any(isinstance(value, FlatShard | list | tuple) for value in kwargs.values()):
            return NotImplemented
        try:
            lists = [place for place, arg in enumerate(args) if self._has_shards(place, arg)]
            operands, specs = self._all_shards(function, args, lists)
        except (AttributeError, RuntimeError):
            return NotImplemented
        self._note_writes(args)
        results = function(*operands, **kwargs)
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
        """Make the next function of these tensors run by its rule, [Note: Direct lists]."""
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
                    # Torch says so where one list is longer.
                    for spec, other in zip(specs, own_specs, strict=False):
                        check_same_spec(func, spec, other)
        return operands, specs

    def _by_item(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the op on each item of the lists by itself, as the item needs.

        So whole tensors of one item at a time are in memory. What refuses does so before any runs.
        """
        places = [place for place in self._lists if place < len(args) and args[place]]
        length = len(args[places[0]])
        is_list = [isinstance(arg, list | tuple) and len(arg) == length for arg in args]
        runs = []
        for index in range(length):
            item = tuple(
                [arg[index]] if is_one else arg for arg, is_one in zip(args, is_list, strict=True)
            )
            runs.append(self._run_of(func, item, kwargs, places))
        results = [run() for run in runs]
        return [result[0] for result in results] if self._has_results else None

    def _run_of(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        places: Sequence[int],
    ) -> Callable[[], Any]:
        """Return what runs the op on lists of one item."""
        items = [args[place][0] for place in places]
        shard = next((item for item in items if isinstance(item, FlatShard)), None)
        if shard is None:
            return partial(func, *args, **kwargs)
        try:
            slices = [self._local_item(func, place, args[place][0], shard) for place in places]
        except NeedsWhole as error:
            run = OP_RULES.on_whole(func, args, kwargs)
            if run is None:
                raise error from None
            return run
        operands = list(args)
        for place, local in zip(places, slices, strict=True):
            operands[place] = [local]
        return partial(self._run_slices, args, operands, kwargs, shard._shard_spec)

    def _run_slices(
        self, args: tuple[Any, ...], operands: list[Any], kwargs: dict[str, Any], spec: ShardSpec
    ) -> Any:
        self._note_writes(args)
        results = self._call(*operands, **kwargs)
        return [wrap(results[0], spec)] if self._has_results else None

    def _local_item(self, func: OpOverload, place: int, item: Tensor, shard: FlatShard) -> Tensor:
        if isinstance(item, FlatShard):
            check_same_spec(func, shard._shard_spec, item._shard_spec)
            return item._local
        if place in self._written:
            raise write_to_plain(func, item, (shard,))
        if item.dim() > shard.dim():
            raise unsupported(func, (item, shard))
        return plain_operand(func, item, shard._shard_spec, shard._local.numel())

    def _check_others(self, func: OpOverload, args: tuple[Any, ...]) -> None:
        for place, arg in enumerate(args):
            if place not in self._lists and isinstance(arg, FlatShard):
                raise unsupported(func, args)

    def _note_writes(self, args: tuple[Any, ...]) -> None:
        if RUNNING.wholes:
            RUNNING.wholes.drop()  # lists bump no version counters
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


@cache
def _rule_of(function: Any) -> Any:
    """Return the rule of a function of torch, by any overload; None if it is none of lists."""
    name = getattr(function, "__name__", "")
    if not name.startswith("_f") or getattr(VariableFunctions, name, None) is not function:
        return None
    packet = getattr(aten, name)
    return list_family(getattr(packet, packet.overloads()[0]))


def run_function(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch on lists, [Note: Direct lists], and return its result.

    NotImplemented if it has no rule, or the op's rule must decide.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or num_dispatch_modes():
        return NotImplemented
    rule = _rule_of(function)
    return NotImplemented if rule is None else rule.run(function, args, kwargs)
