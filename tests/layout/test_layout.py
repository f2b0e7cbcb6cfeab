"""FlatLayout: every element has one place and one owner, for any shapes and any world size."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import example, given
from hypothesis import strategies as st

from composable_shard.layout.flat_layout import FlatLayout, round_up
from composable_shard.layout.regions import intersect
from composable_shard.tensor.shard_spec import ShardSpec
from tests.harness.properties import examples

pytestmark = pytest.mark.fast

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)  # () is a scalar, a 0 makes it empty
numels = st.one_of(shapes.map(lambda shape: torch.Size(shape).numel()), st.integers(0, 10**12))
alignments = st.sampled_from([1, 2, 4, 8, 16, 128])


@st.composite
def layouts(draw: st.DrawFn, max_world_size: int = 4096) -> FlatLayout:
    """Draw a layout of up to 12 parameters."""
    sizes = draw(st.lists(numels, max_size=12))
    return FlatLayout.plan(sizes, draw(st.integers(1, max_world_size)), draw(alignments))


@st.composite
def cut_layouts(draw: st.DrawFn, max_world_size: int = 4096) -> tuple[FlatLayout, list[int]]:
    """Draw a layout of parameters that are cut by rows, blocks or not at all, and its blocks."""
    sizes = draw(st.lists(numels, max_size=12))
    world_size, alignment = draw(st.integers(1, max_world_size)), draw(alignments)
    if draw(st.booleans()):
        rank = st.integers(0, world_size - 1)
        owners = sorted(draw(st.lists(rank, min_size=len(sizes), max_size=len(sizes))))
        whole = [max(1, size) for size in sizes]
        return FlatLayout.plan(sizes, world_size, alignment, owners=owners), whole
    blocks = [_draw_block(draw, size) for size in sizes]
    return FlatLayout.plan(sizes, world_size, alignment, blocks=blocks), blocks


def _draw_block(draw: st.DrawFn, numel: int) -> int:
    rows = st.integers(1, 9).map(lambda num_rows: max(1, numel // num_rows))
    return draw(st.one_of(st.just(1), st.sampled_from([16, 256, 4096]), st.integers(1, 50), rows))


def cuts_of(layout: FlatLayout, index: int) -> list[int]:
    """Return the cuts inside parameter `index`, counted from its first element."""
    start, end = layout.offsets[index], layout.offsets[index] + layout.numels[index]
    cuts = {layout.cut(rank) for rank in range(1, layout.world_size)}
    return sorted(cut - start for cut in cuts if start < cut < end)


few = examples(60)


@few
@given(layouts())
def test_parameters_lie_in_order_without_overlap(layout: FlatLayout) -> None:
    """Each parameter ends before the next starts, and the last one inside the buffer."""
    starts = [*layout.offsets, layout.padded_numel]
    for index, numel in enumerate(layout.numels):
        assert starts[index] + numel <= starts[index + 1]
    assert layout.unpadded_numel == sum(layout.numels)


@few
@given(layouts())
def test_starts_and_shards_are_aligned(layout: FlatLayout) -> None:
    """Offsets, the shard size and so every cut are multiples of the alignment."""
    assert all(offset % layout.alignment == 0 for offset in layout.offsets)
    assert layout.shard_numel % layout.alignment == 0
    assert layout.padded_numel == layout.world_size * layout.shard_numel


@few
@given(layouts())
def test_padding_is_less_than_one_block_per_parameter_and_rank(layout: FlatLayout) -> None:
    """Padding is below `world_size + number of parameters` blocks of the alignment."""
    padding = layout.padded_numel - layout.unpadded_numel
    assert 0 <= padding < (layout.world_size + len(layout.numels)) * layout.alignment


@few
@given(layouts(max_world_size=12))
@example(FlatLayout.plan([100], 8, 4))  # spans all shards
@example(FlatLayout.plan([1, 3, 2], 3, 16))  # smaller than the alignment
def test_param_ranges_partition_every_parameter(layout: FlatLayout) -> None:
    """S3.1: over the ranks, in order, they cover `[0, numel)` once; unowned ones are empty."""
    for index, numel in enumerate(layout.numels):
        end = 0
        for rank in range(layout.world_size):
            low, high = layout.param_range(index, rank)
            assert 0 <= low <= high <= numel
            if low < high:
                assert low == end
                end = high
        assert end == numel


@few
@given(layouts(), st.data())
def test_world_local_and_param_ranges_name_the_same_elements(
    layout: FlatLayout, data: st.DataObject
) -> None:
    """S3.1: the three ranges are of one size, and differ by the parameter's and shard's start."""
    rank = data.draw(st.integers(0, layout.world_size - 1))
    for index, offset in enumerate(layout.offsets):
        world, local, param = (
            find(index, rank)
            for find in (layout.world_range, layout.local_range, layout.param_range)
        )
        assert world[1] - world[0] == local[1] - local[0] == param[1] - param[0]
        assert 0 <= local[0] <= local[1] <= layout.shard_numel
        if world[0] < world[1]:
            assert world[0] - offset == param[0]
            assert world[0] - rank * layout.shard_numel == local[0]


@few
@given(cut_layouts(max_world_size=40))
def test_no_cut_goes_through_a_block(drawn: tuple[FlatLayout, list[int]]) -> None:
    """Every block, the shorter last one too, is on exactly one rank; every element once."""
    layout, blocks = drawn
    cuts = [layout.cut(rank) for rank in range(layout.world_size + 1)]
    assert cuts == sorted(cuts)
    assert (cuts[0], cuts[-1]) == (0, layout.span)
    assert layout.end <= layout.span <= layout.padded_numel
    for index, block in enumerate(blocks):
        assert all(cut % block == 0 for cut in cuts_of(layout, index))
    assert list(layout.shard_numels) == [
        end - start for start, end in map(layout.shard_range, range(layout.world_size))
    ]
    assert (layout.uneven_numels is None) == layout.is_even


@few
@given(cut_layouts(max_world_size=12), st.data())
def test_ranges_of_blocks_agree(drawn: tuple[FlatLayout, list[int]], data: st.DataObject) -> None:
    """S3.1 for any cuts: the three ranges name the same elements, and cover each once."""
    layout, _ = drawn
    for index, numel in enumerate(layout.numels):
        end = 0
        for rank in range(layout.world_size):
            world, local, param = (
                find(index, rank)
                for find in (layout.world_range, layout.local_range, layout.param_range)
            )
            assert world[1] - world[0] == local[1] - local[0] == param[1] - param[0]
            assert 0 <= local[0] <= local[1] <= layout.shard_numel
            if param[0] < param[1]:
                assert param[0] == end
                assert world[0] - layout.offsets[index] == param[0]
                assert world[0] - layout.shard_range(rank)[0] == local[0]
                end = param[1]
        assert end == numel


@few
@given(cut_layouts(), st.data())
def test_cuts_are_within_half_a_block_of_equal(
    drawn: tuple[FlatLayout, list[int]], data: st.DataObject
) -> None:
    """So no shard is off by more than one block and the alignment; equal cuts are equal."""
    layout, blocks = drawn
    if layout.owners:
        return
    rank = data.draw(st.integers(0, layout.world_size))
    largest = max([*blocks, layout.alignment], default=0) if layout.blocks else 0
    off = abs(layout.cut(rank) * layout.world_size - rank * layout.span) / layout.world_size
    assert off <= largest / 2 + (layout.alignment if layout.blocks else 0)


@few
@given(cut_layouts(max_world_size=12), st.data())
def test_what_is_kept_of_a_layout_stays_with_its_owners(
    drawn: tuple[FlatLayout, list[int]], data: st.DataObject
) -> None:
    """S2.9: and all shards together are just that, in the same order."""
    layout, _ = drawn
    flags = data.draw(st.lists(st.booleans(), min_size=(n := len(layout.numels)), max_size=n))
    kept = layout.keep(flags)
    assert (kept is layout) == (kept.numels == layout.numels)
    ranks = range(layout.world_size)
    assert sum(kept.shard_numels) == kept.span <= layout.padded_numel
    for each, rank in itertools.product((layout, kept), ranks):
        assert each.owned_numel(rank) == sum(each.piece_numels(rank)[1::2])
    for index, flag in enumerate(flags):
        for rank in ranks:
            start, end = layout.param_range(index, rank)
            low, high = kept.param_range(index, rank)
            assert high - low == (end - start) * flag
            assert high == low or (low, high) == (start, end)
            assert kept.local_range(index, rank)[1] <= kept.shard_numels[rank]


@few
@given(cut_layouts())
@example((FlatLayout.plan([0, 0], 3, 4, blocks=[16, 16]), [16, 16]))  # no elements at all
def test_padding_is_within_its_bound(drawn: tuple[FlatLayout, list[int]]) -> None:
    """1.03 times the buffer without blocks, whose padding is of the alignment alone."""
    layout, _ = drawn
    plain = FlatLayout.plan(layout.numels, layout.world_size, layout.alignment)
    assert layout.padded_numel <= max(1.03 * plain.padded_numel, plain.padded_numel)
    if not layout.is_even:
        assert layout.padded_numel <= plain.padded_numel


@few
@given(layouts(max_world_size=12))
def test_spec_finds_the_range_that_the_layout_gave(layout: FlatLayout) -> None:
    """`ShardSpec.range_of`, which sees one parameter only, agrees with `param_range`."""
    for index, numel in enumerate(layout.numels):
        shape = torch.Size((numel,))
        spec = ShardSpec(shape, shape, (1,), layout, index, 0, "g")
        found = [spec.range_of(rank) for rank in range(layout.world_size)]
        assert found == [layout.param_range(index, rank) for rank in range(layout.world_size)]


@few
@given(st.integers(0, 10**12), st.integers(1, 4096))
def test_round_up_is_the_smallest_multiple(value: int, multiple: int) -> None:
    """No smaller multiple is large enough."""
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


def test_intersection_of_disjoint_ranges_is_empty() -> None:
    """An empty overlap is `(start, start)`."""
    assert intersect((0, 10), (4, 20)) == (4, 10)
    assert intersect((0, 3), (5, 9)) == (5, 5)


def test_small_layout_map() -> None:
    """S3.1: one larger than a shard, an empty one, a scalar, and one across a cut, drawn."""
    layout = FlatLayout.plan([13, 0, 1, 6], world_size=3, alignment=4)
    cells = ["."] * layout.padded_numel
    for index, letter in enumerate("abcd"):
        start = layout.offsets[index]
        cells[start : start + layout.numels[index]] = letter * layout.numels[index]
    size = layout.shard_numel
    drawn = [
        f"rank {rank} |{''.join(cells[rank * size : (rank + 1) * size])}| "
        + " ".join(f"{letter}{layout.param_range(i, rank)}" for i, letter in enumerate("abcd"))
        for rank in range(layout.world_size)
    ]
    assert_expected_inline(
        "\n".join(drawn),
        """\
rank 0 |aaaaaaaaaaaa| a(0, 12) b(0, 0) c(0, 0) d(0, 0)
rank 1 |a...c...dddd| a(12, 13) b(0, 0) c(0, 1) d(0, 4)
rank 2 |dd..........| a(13, 13) b(0, 0) c(1, 1) d(4, 6)""",
    )


class _CountedInt(int):
    """A world size that can't be counted up to."""

    def __index__(self) -> int:
        raise AssertionError("the plan depends on the number of ranks")


@pytest.mark.parametrize("options", ["element", "row", "mixed", "param"])
def test_planning_does_not_grow_with_the_world_size(options: str) -> None:
    """Ten thousand parameters for 4096 ranks are planned in under 0.2 s of processor time."""
    sizes = [768 * (100 + index % 997) for index in range(10_000)]
    given = {
        "element": {},
        "row": {"blocks": [768] * 10_000},
        "mixed": {"blocks": [(1, 256, 768, 4096)[index % 4] for index in range(10_000)]},
        "param": {"owners": [index * 4096 // 10_000 for index in range(10_000)]},
    }[options]
    started = time.process_time()
    layout = FlatLayout.plan(sizes, _CountedInt(4096), 4, **given)  # a range() of it would raise
    start, end = layout.shard_range(17)
    assert start < end
    assert time.process_time() - started < 0.2


@pytest.mark.parametrize(("world_size", "alignment"), [(0, 1), (-1, 1), (1, 0), (2, -4)], ids=str)
def test_world_size_and_alignment_below_one_raise(world_size: int, alignment: int) -> None:
    """The message shows both."""
    with pytest.raises(ValueError, match=f"world_size={world_size}, alignment={alignment}"):
        FlatLayout.plan([3], world_size, alignment)


def test_negative_numel_raises() -> None:
    """A parameter can be empty, not less."""
    with pytest.raises(ValueError, match="numel >= 0, got -1"):
        FlatLayout.plan([3, -1], 2)


def test_parameters_without_elements_may_ask_for_blocks() -> None:
    """Alone in a flat parameter, too: nothing is cut."""
    layout = FlatLayout.plan([0, 0], 2, 4, blocks=[16, 3])
    assert layout.shard_numels == (0, 0)
