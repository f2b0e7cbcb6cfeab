"""The rule for each op on FlatShards; only this module fills the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from composable_shard.tensor import (
    concatenation_rules,
    dim_reductions,
    gradient_rules,
    list_rules,
    pointwise_rules,
    reduction_rules,
    view_rules,
)
from composable_shard.tensor.flat_shard import FlatShard, FlatShardOfDTensor, allow_loading
from composable_shard.tensor.operands import unsupported
from composable_shard.tensor.rule_table import OP_RULES
from composable_shard.tensor.whole_rules import on_gathered, on_whole
from composable_shard.torch_private import FOREACH_TYPES, OpOverload


def register_op_rules() -> None:
    """Fill the rule table, join torch's lists of foreach-capable types, allow safe loading.

    No-op the second time.
    """
    if OP_RULES.families:
        return
    for module in (
        *(pointwise_rules, view_rules, reduction_rules, dim_reductions, gradient_rules),
        concatenation_rules,
    ):
        OP_RULES.update(module.RULES)
    OP_RULES.families += [
        pointwise_rules.pointwise_family,
        view_rules.view_family,
        list_rules.list_family,
        lambda _: _refuse,
    ]
    OP_RULES.on_whole = _on_whole
    OP_RULES.on_lists = list_rules.run_function
    for types in FOREACH_TYPES:
        types += [FlatShard, FlatShardOfDTensor]
    allow_loading()


def _on_whole(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    return on_gathered(func, args, kwargs) or on_whole(func, args, kwargs)


def _refuse(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    raise unsupported(func, (*args, *kwargs.values()))
