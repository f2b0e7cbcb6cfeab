"""A step's communication hides behind its computing, in modelled time."""

from __future__ import annotations

import pytest

from benchmarks.communication.overlap import CASES, Durations, bound_us, run_case
from tests.device.running import on_device

_TABLE = (Durations(100, 60, 60), Durations(100, 100, 100), Durations(100, 200, 200))


def _assert_within_bounds(num_ranks: int, case: str) -> None:
    names = [
        name
        for name, each in CASES.items()
        if each.num_ranks == num_ranks and name.startswith("ours") and case in name
    ]
    assert names
    ratios = {
        (name, durations): time / bound_us(CASES[name], durations)
        for name in names
        for durations, time in zip(_TABLE, run_case(name, _TABLE), strict=True)
    }
    assert {key: ratio for key, ratio in ratios.items() if ratio > 1.05} == {}


@pytest.mark.long
@pytest.mark.parametrize("case", ["ours", "replicas"])
def test_a_step_takes_little_more_than_its_bound(case: str) -> None:
    """At most 1.05 of the longer of computing and communication, with the first and last of it.

    24 layers: by default, with layers chosen ahead, a group for reductions, full parameters that
    are kept, offload, an optimizer in the backward; and with replicas.
    """
    (_with_two_ranks if case == "ours" else _with_four_ranks)(case=case)


@on_device(num_ranks=2, timeout_s=60)
def _with_two_ranks(case: str) -> None:
    _assert_within_bounds(2, case)


@on_device(num_ranks=4, timeout_s=60)
def _with_four_ranks(case: str) -> None:
    _assert_within_bounds(4, case)
