"""Which rule runs each op on FlatShards; the one place that fills the table."""

from __future__ import annotations

from typing import Any, NoReturn

from torch._ops import OpOverload
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as _clipping_types

from composable_shard import (
    _foreach_rules,
    _gradient_rules,
    _pointwise_rules,
    _random_rules,
    _reduction_rules,
    _view_rules,
)
from composable_shard._flat_shard import FlatShard, FlatShardOfDTensor, allow_loading
from composable_shard._operands import unsupported
from composable_shard._rule_table import OP_RULES, Rule
from composable_shard._whole_rules import on_whole

__all__ = ["register_op_rules"]


def register_op_rules() -> None:
    """Fill the rule table, join torch's lists of foreach-capable types, allow safe loading.

    No-op the second time.
    """
    if OP_RULES.families:
        return
    for module in (
        _pointwise_rules,
        _foreach_rules,
        _view_rules,
        _reduction_rules,
        _gradient_rules,
        _random_rules,
    ):
        OP_RULES.update(module.RULES)
    OP_RULES.families += [
        _pointwise_rules.pointwise_family,
        _foreach_rules.list_family,
        _refuse_family,
    ]
    OP_RULES.on_whole = on_whole
    foreach_types: tuple[list[Any], ...] = (_optimizer_types, _clipping_types)
    for types in foreach_types:
        types += [FlatShard, FlatShardOfDTensor]
    allow_loading()


def _refuse_family(func: OpOverload) -> Rule:
    return _refuse


def _refuse(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    raise unsupported(func, (*args, *kwargs.values()))
