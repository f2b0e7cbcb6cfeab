"""Units of several modules, of which the ranks run different ones."""

from __future__ import annotations

import pytest

from tests import differences
from tests.harness import ranks


@pytest.mark.parametrize(
    ("name", "strategy", "kind", "unit"),
    [
        ("other_modules_of_a_unit", "FULL_SHARD", "right", ""),
        ("unequal_modules_of_a_unit", "FULL_SHARD", "right", ""),
        ("a_module_of_a_unit_again", "FULL_SHARD", "error", "gather of unit 'blocks.0'"),
        ("modules_of_a_unit_around_another", "FULL_SHARD", "error", "gather of unit 'blocks.1'"),
        ("modules_of_a_unit_around_another", "SHARD_OPTIM", "right", ""),
    ],
)
def test_c8_some_modules_of_a_unit_run_on_some_ranks(
    monkeypatch: pytest.MonkeyPatch, name: str, strategy: str, kind: str, unit: str
) -> None:
    """Case 8 of the claims: right by value, or the same error on all ranks, which names the unit.

    Right where the units begin in the same order on all ranks, in forward and in backward.
    """
    monkeypatch.setattr(ranks, "GRACE_S", 20)
    cell = differences.measure(name, strategy, timeout_s=20)
    assert cell.kind == kind, cell
    assert cell.seconds < 10
    assert all(unit in text for text in cell.texts)
