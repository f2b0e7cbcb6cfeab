"""What the comparison of libraries says of losses that it was given."""

from __future__ import annotations

from benchmarks import compare


def found(*losses: float) -> dict[str, object]:
    """Return the figures of a peer with these losses."""
    return {"losses": list(losses), "peak": 300, "at rest": 200, "sent": 150}


def test_losses_are_compared_with_those_of_ddp() -> None:
    """By the largest relative deviation; a peer that failed has its error there."""
    results = {
        "ddp": found(4.0, 2.0),
        "right": found(4.0, 2.0),
        "wrong": found(4.0, 2.1),
        "stopped": {"failed": "expected exit code 0"},
    }
    rows = compare.exact_rows(results, 100)
    assert rows[1] == ["right", "0.0e+00", "3.00", "2.00", "1.500"]
    assert rows[2][1] == "5.0e-02"
    assert rows[3] == ["stopped", "expected exit code 0", "", "", ""]
    assert compare.agreeing(rows) == ["ddp", "right"]
