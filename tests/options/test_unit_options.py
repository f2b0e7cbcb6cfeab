"""Options are said once: names and defaults, checks, and the facts that follow from a strategy."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import get_args, get_origin

import pytest
import torch
from torch import nn
from typing_extensions import Unpack, get_type_hints

import composable_shard
from composable_shard import (
    Block,
    MixedPrecisionPolicy,
    ShardingStrategy,
    estimate,
    fully_shard,
    shard_model,
)
from composable_shard.options import OptionsDict, StrategyFacts, StrategyName, UnitOptions
from composable_shard.planning import by_class, transformer_blocks

PACKAGE = Path(composable_shard.__file__).parent
STRATEGIES = PACKAGE / "options" / "strategies.py"
FIELDS = dataclasses.fields(UnitOptions)


def test_fully_shard_takes_exactly_these_options() -> None:
    """The same names in the same order, with the same defaults."""
    parameters = inspect.signature(fully_shard).parameters.values()
    taken = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert list(taken.items()) == [(field.name, field.default) for field in FIELDS]


@pytest.mark.parametrize("function", [shard_model, estimate, by_class, transformer_blocks])
def test_editors_know_options_that_are_passed_on(function: Callable[..., object]) -> None:
    """`**options` have the names and types of `fully_shard`."""
    passed = [each for each in get_type_hints(function).values() if get_origin(each) is Unpack]
    assert passed == [Unpack[OptionsDict]]
    taken = get_type_hints(fully_shard)
    known = get_type_hints(OptionsDict)
    assert known == {field.name: taken[field.name] for field in FIELDS}


def test_a_strategy_may_be_a_name() -> None:
    """As a member's value or name; anything else is refused with the names."""
    assert get_args(StrategyName) == tuple(each.value for each in ShardingStrategy)
    for each in ShardingStrategy:
        assert UnitOptions(strategy=each.value).strategy is each  # type: ignore[arg-type]
        assert UnitOptions().override({"strategy": each.name}).strategy is each
    with pytest.raises(ValueError, match=r"one of 'full_shard', .* 'no_shard', got 'zero3'"):
        fully_shard(nn.Linear(2, 2), strategy="zero3")  # type: ignore[type-var]
    with pytest.raises(ValueError, match=r"'_HYBRID_SHARD_ZERO2'\. It is .* 2-D mesh"):
        UnitOptions().override({"strategy": "_HYBRID_SHARD_ZERO2"})


def test_the_defaults_are_overridden_by_name() -> None:
    """What is given is checked, and a wrong name says which one may be meant."""
    options = UnitOptions().override({"reshard_after_forward": False, "granularity": Block(4)})
    assert (options.reshard_after_forward, options.granularity) == (False, Block(4))
    assert options.override({"reshard_after_forward": 2}).granularity == Block(4)
    with pytest.raises(ValueError, match=r"no option 'stratgy'\. It has mesh"):
        options.override({"stratgy": ShardingStrategy.NO_SHARD})
    with pytest.raises(ValueError, match=r"no option 3\. It has mesh, strategy, "):
        options.override({3: None})
    with pytest.raises(ValueError, match="use_orig_params to be True or False, got 1"):
        options.override({"use_orig_params": 1})


def test_only_what_differs_is_described() -> None:
    """Of what ranks have to agree on; the strategy is described apart."""
    assert UnitOptions().describe() == ""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    options = UnitOptions(
        strategy=ShardingStrategy.NO_SHARD, mp_policy=policy, sync_module_states=True
    )
    assert options.describe() == f" mp_policy={policy}"


def test_copies_leave_out_what_belongs_to_the_process() -> None:
    """Parameters, and a function of them, would be other ones in the copy."""
    options = UnitOptions(
        strategy=ShardingStrategy.SHARD_OPTIM,
        ignored_params={nn.Parameter(torch.ones(2))},
        granularity=lambda param: "row",
        prefetch_nbytes=3,
    )
    expected = UnitOptions(strategy=ShardingStrategy.SHARD_OPTIM, prefetch_nbytes=3)
    assert copy.deepcopy(options) == expected


def test_only_its_own_file_knows_the_strategies() -> None:
    """Elsewhere code asks for facts, so that a new strategy is one entry in one file."""
    named = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            of = node.value if isinstance(node, ast.Attribute) else None
            if isinstance(of, ast.Name) and of.id == "ShardingStrategy" and path != STRATEGIES:
                named.append((path.relative_to(PACKAGE).as_posix(), node.attr))
    assert named == []


def test_the_table_in_the_documentation_lists_the_facts() -> None:
    """Each strategy has its row, with the words that its facts stand for."""
    page = (PACKAGE.parent / "docs" / "strategies.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    rows = [line.strip("| ").split(" | ") for line in lines[1:]]
    assert [row[0].split("`")[1] for row in rows] == [each.name for each in ShardingStrategy]
    for (_, params, grads, _, state, _), facts in zip(
        rows, [each.facts for each in ShardingStrategy], strict=True
    ):
        assert (params == "sharded") is facts.frees_params
        assert (grads == "in one persistent buffer") is facts.accumulates_unsharded
        assert (state == "replicated") is facts.is_replicated


@pytest.mark.parametrize("values", list(itertools.product([False, True], repeat=3)))
def test_other_combinations_of_facts_are_refused(values: tuple[bool, ...]) -> None:
    """They would train, but gather everything at once, or step what is not reduced."""
    if any(dataclasses.astuple(each.facts) == values for each in ShardingStrategy):
        assert dataclasses.astuple(StrategyFacts(*values)) == values
    else:
        with pytest.raises(ValueError, match="expected facts that hold together"):
            StrategyFacts(*values)


@pytest.mark.parametrize(
    ("strategy", "keeps_params", "keeps_gradients"),
    [
        (ShardingStrategy.FULL_SHARD, False, False),
        (ShardingStrategy.SHARD_GRAD_OP, True, False),
        (ShardingStrategy.SHARD_OPTIM, True, True),
    ],
)
def test_facts_depend_on_the_ranks(
    strategy: ShardingStrategy, keeps_params: bool, keeps_gradients: bool
) -> None:
    """Where one rank has everything, it keeps everything, and alone it accumulates nothing."""
    facts = strategy.facts
    assert facts.keeps_params(4) is keeps_params
    assert facts.keeps_gradients(4, 8) is keeps_gradients
    assert facts.keeps_params(1)
    assert facts.keeps_gradients(1, 2)
    assert not facts.keeps_gradients(1, 1)
