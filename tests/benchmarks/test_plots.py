"""The pictures of the documentation: their data, and that they are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plots
from benchmarks.memory.formulas import Sizes
from benchmarks.plots import Bar
from tests.common.models import make_llama

ROOT = Path(__file__).parents[2]
PICTURES = sorted((ROOT / "docs" / "pictures").iterdir())


@pytest.mark.parametrize("granularity", ["element", "row", "param"])
def test_pieces_fill_the_flat_parameter(granularity: str) -> None:
    """Each element once, each parameter whole, each rank's within its shard."""
    names, layout = plots.lay_out(granularity)
    pieces = plots.pieces(names, layout)
    assert [piece.start for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
    assert pieces[-1].end == layout.span
    for name, numel in zip(names, layout.numels, strict=True):
        assert sum(p.end - p.start for p in pieces if p.label == name) == numel
    for piece in pieces:
        start, end = layout.shard_range(piece.rank)
        assert start <= piece.start < piece.end <= end


def test_samples_are_placed_by_phase() -> None:
    """By the part of the phase that is over; what is outside is left out."""
    samples = [(0.5, 1), (1.0, 2), (2.0, 3), (4.0, 4), (5.5, 5), (7.0, 6)]
    assert plots.place(samples, [1, 3, 5, 6]) == [(0.0, 2), (0.5, 3), (1.5, 4), (2.5, 5)]


def test_terms_of_the_peak_are_those_of_the_formula() -> None:
    """Beneath what is left for activations."""
    sizes = Sizes.of(make_llama("micro"), 2)
    *terms, rest = plots.peak_terms(sizes, 3 * sizes.total).values()
    assert sum(terms) == 1.5 * sizes.total + sizes.last_moment
    assert rest == 3 * sizes.total - sum(terms)


def test_timeline_of_a_trace() -> None:
    """In flight from issue to the end of the wait; what no layer computes is the root's."""
    times = {
        "forward": (10, 20),
        "all_gather a": (10, 11),
        "wait all_gather a": (11, 12),
        "compute a": (12, 18),
        "backward": (20, 40),
        "all_gather a ": (21, 22),
        "wait all_gather a ": (22, 25),
        "reduce_scatter a": (30, 31),
        "wait reduce_scatter a": (36, 38),
        "optimizer step": (40, 41),
    }
    events = [
        {
            "name": name.strip(),
            "ts": start * 1e3,
            "dur": (end - start) * 1e3,
            "cat": "user_annotation",
        }
        for name, (start, end) in times.items()
    ]
    assert set(plots.read_timeline(events, "root")) == {
        Bar("gather", "a", 0, 2),
        Bar("wait", "a", 1, 2),
        Bar("compute", "root", 0, 2),
        Bar("compute", "a", 2, 8),
        Bar("compute", "root", 8, 10),
        Bar("gather", "a", 11, 15),
        Bar("wait", "a", 12, 15),
        Bar("compute", "root", 10, 15),
        Bar("compute", "a", 15, 20),
        Bar("reduce", "a", 20, 28),
        Bar("wait", "a", 26, 28),
        Bar("compute", "root", 20, 30),
        Bar("compute", "AdamW", 30, 31),
        Bar("phase", "forward", 0, 10),
        Bar("phase", "backward", 10, 30),
    }


def test_spans_of_a_device_are_named_by_layer() -> None:
    """Forwards and gathers up and down again, reductions down; two products in a backward."""
    times = {"aten::mm": 6, "all_gather": 4, "reduce_scatter": 2}
    spans = [(op, float(at), at + 1.0) for op, number in times.items() for at in range(number)]
    found = [(bar.lane, bar.name) for bar in plots.name_layers(spans, 2)]
    expected = {"compute": "011100", "gather": "0110", "reduce": "10"}
    assert found == [(lane, name) for lane, names in expected.items() for name in names]


def test_bars_that_overlap_get_rows_of_their_own() -> None:
    """The first row that is free again."""
    bars = [Bar("gather", "", start, end) for start, end in [(0, 4), (2, 6), (4, 5), (5, 9)]]
    assert plots.stack(bars) == [0, 1, 0, 0]


def test_figures_are_read_from_results() -> None:
    """Of the first table, with what stands in brackets."""
    text = (
        "# T\n\n| peer | ms | x |\n| --- | --- | --- |\n| a | 9 (8-10) | 1.5 |\n\n| peer | ms |\n"
    )
    assert plots.read_column(text, "ms") == {"a": [9, 8, 10]}


@pytest.mark.parametrize("name", plots.NOTES)
def test_a_picture_of_results_shows_them(name: str) -> None:
    """As they are in the files now."""
    picture = (ROOT / "docs" / "pictures" / f"{name}.png").read_bytes()
    assert plots.NOTES[name]().encode() in picture


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_small_and_shown_beside_its_command(picture: Path) -> None:
    """In the README or on a page, which names the command that draws it."""
    assert picture.stat().st_size < 60_000
    pages = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    shown = [text for text in pages if f"pictures/{picture.name})" in text]
    assert any(f"python -m benchmarks.plots {picture.stem}" in text for text in shown)
