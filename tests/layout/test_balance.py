"""`balance`: every item has a rank, and no rank has much more than the others."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composable_shard.layout.ownership import balance, fullest
from tests.harness.properties import examples

pytestmark = pytest.mark.fast

sizes = st.lists(st.one_of(st.integers(0, 10), st.integers(0, 10**9)), max_size=40)
few = examples(100)

# Parameters of a layer, how many layers there are, and what is beside them.
MODELS: dict[str, tuple[list[int], int, list[int]]] = {
    "llama-3-8b": (
        [4096 * 4096, 1024 * 4096, 1024 * 4096, 4096 * 4096, *[14336 * 4096] * 3, 4096, 4096],
        32,
        [128256 * 4096, 4096, 128256 * 4096],
    ),
    "qwen2.5-7b": (
        [
            *(3584 * 3584, 3584, 512 * 3584, 512, 512 * 3584, 512, 3584 * 3584),
            *([18944 * 3584] * 3),
            *(3584, 3584),
        ],
        28,
        [152064 * 3584, 3584, 152064 * 3584],
    ),
    "gpt2": (
        [768, 768, 768 * 2304, 2304, 768 * 768, 768, 768, 768, 768 * 3072, 3072, 3072 * 768, 768],
        12,
        [50257 * 768, 1024 * 768, 768, 768],
    ),
}


@few
@given(sizes, st.integers(1, 64))
def test_the_fullest_rank_is_within_the_bound(items: list[int], num_ranks: int) -> None:
    """The largest item, or the mean and the (N + 1)-th largest; [Note: Balance]."""
    owners = balance(items, num_ranks)
    assert len(owners) == len(items)
    assert all(0 <= owner < num_ranks for owner in owners)
    descending = [*sorted(items, reverse=True), *[0] * (num_ranks + 1)]
    bound = max(descending[0], sum(items) / num_ranks + descending[num_ranks])
    assert fullest(items, owners, num_ranks) <= bound


@few
@given(st.lists(st.integers(0, 100), max_size=8), st.integers(1, 3))
def test_it_is_near_the_best_distribution(items: list[int], num_ranks: int) -> None:
    """At most 4/3 of the fullest rank of the best of all distributions."""
    every = itertools.product(range(num_ranks), repeat=len(items))
    best = min(fullest(items, owners, num_ranks) for owners in every)
    assert 3 * fullest(items, balance(items, num_ranks), num_ranks) <= 4 * best


@few
@given(sizes, st.lists(st.integers(0, 10**9), min_size=1, max_size=9))
def test_loads_count(items: list[int], loads: list[int]) -> None:
    """With loads: those, or the mean of everything and the largest item."""
    owners = balance(items, len(loads), loads)
    mean = (sum(items) + sum(loads)) / len(loads)
    assert fullest(items, owners, len(loads), loads) <= max(*loads, mean + max(items, default=0))


@few
@given(sizes, st.integers(1, 64), st.integers())
def test_the_loads_do_not_depend_on_the_order(items: list[int], num_ranks: int, seed: int) -> None:
    """So planning again what has been planned, in another order, finds nothing better."""
    shuffled = items.copy()
    random.Random(seed).shuffle(shuffled)
    first, second = (
        fullest(each, balance(each, num_ranks), num_ranks) for each in (items, shuffled)
    )
    assert first == second


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
@pytest.mark.parametrize("name", MODELS)
def test_models_are_balanced(name: str, num_ranks: int) -> None:
    """At most 1.05 times the mean, or the largest parameter."""
    layer, num_layers, rest = MODELS[name]
    items = layer * num_layers + rest
    largest = fullest(items, balance(items, num_ranks), num_ranks)
    assert largest <= max(1.05 * sum(items) / num_ranks, max(items))


def test_no_rank_count_makes_balancing_slow() -> None:
    """Ten thousand items in under 0.4 s of processor time."""
    generator = random.Random(0)
    items = [generator.randrange(1000, 10**7) for _ in range(10_000)]
    for num_ranks in (8, 512, 4096):
        started = time.process_time()
        balance(items, num_ranks)
        assert time.process_time() - started < 0.4
