"""How much more than its share does a rank store, and do ranks get equal work?

Arithmetic only. For a unit (one layer) on N ranks each column is what the fullest rank stores,
divided by a N-th of the unit's elements: 1 is perfect. Ours is measured on the planner itself, the
others are their rules:

- MFSDP: Megatron-FSDP's buffers. Shards are a multiple of the least common multiple of all row
  sizes, so that each holds whole rows of every tensor; its fragments fill gaps without cost here,
  so this is a lower bound.
- FSDP2: every parameter is padded to a multiple of N along its first dimension.
- Whole parameters: the fullest rank over all layers and what is beside them, balanced over the
  tree, beside the same balanced unit by unit, as per-unit buffers of equal size store it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm, prod

from benchmarks import report
from composable_shard.layout.flat_layout import FlatLayout, round_up
from composable_shard.layout.ownership import balance, fullest

Shapes = Sequence[tuple[int, ...]]
ALIGNMENT = 8  # elements: 16 bytes of bfloat16
BLOCK = 256  # elements of an 8-bit optimizer's block
RANKS = (8, 64, 512)


def _swiglu(dim: int, hidden: int) -> list[tuple[int, ...]]:
    return [(hidden, dim), (hidden, dim), (dim, hidden)]


def _attention(dim: int, kv: int, *, has_bias: bool) -> list[tuple[int, ...]]:
    biases: list[tuple[int, ...]] = [(dim,), (kv,), (kv,)] if has_bias else []
    return [(dim, dim), (kv, dim), (kv, dim), (dim, dim), *biases]


# A layer; how many of them there are; what is beside them.
MODELS: dict[str, tuple[list[tuple[int, ...]], int, list[tuple[int, ...]]]] = {
    "Llama-3-8B": (
        [*_attention(4096, 1024, has_bias=False), *_swiglu(4096, 14336), (4096,), (4096,)],
        32,
        [(128256, 4096), (4096,), (128256, 4096)],
    ),
    "DeepSeek-V3, dense": (
        [
            *[(1536, 7168), (1536,), (24576, 1536), (576, 7168), (512,), (32768, 512)],
            *[(7168, 16384), *_swiglu(7168, 18432), (7168,), (7168,)],
        ],
        3,
        [(129280, 7168), (7168,), (129280, 7168)],
    ),
    "Qwen2.5-7B": (
        [*_attention(3584, 512, has_bias=True), *_swiglu(3584, 18944), (3584,), (3584,)],
        28,
        [(152064, 3584), (3584,), (152064, 3584)],
    ),
    "odd widths": ([(769, 1000), (1000, 769), (333, 769), (769,), (333,)], 12, [(50257, 769)]),
}


def ours(shapes: Shapes, num_ranks: int, blocks: Sequence[int]) -> float:
    """Return the largest shard of the planned layout, relative to a N-th of the elements."""
    numels = [prod(shape) for shape in shapes]
    layout = FlatLayout.plan(numels, num_ranks, ALIGNMENT, blocks=blocks)
    return layout.shard_numel * num_ranks / sum(numels)


def row_sizes(shapes: Shapes) -> list[int]:
    """Return the elements of a row of each parameter."""
    return [prod(shape[1:]) for shape in shapes]


def megatron_fsdp(shapes: Shapes, num_ranks: int) -> float:
    """Return the padded size where shards hold whole rows of every tensor at equal cuts."""
    total = sum(map(prod, shapes))
    return round_up(total, num_ranks * lcm(*row_sizes(shapes))) / total


def fsdp2(shapes: Shapes, num_ranks: int) -> float:
    """Return the padded size where every parameter is split along its first dimension."""
    rows = zip(shapes, row_sizes(shapes), strict=True)
    padded = sum(round_up(shape[0], num_ranks) * row for shape, row in rows)
    return padded / sum(map(prod, shapes))


def whole(name: str, num_ranks: int) -> tuple[float, float, float]:
    """Return the fullest rank over the tree: balanced over it, unit by unit; largest parameter.

    All relative to a N-th of the tree's elements.
    """
    layer, num_layers, rest = MODELS[name]
    units = [[prod(shape) for shape in layer]] * num_layers + [[prod(shape) for shape in rest]]
    sizes = [size for unit in units for size in unit]
    share = sum(sizes) / num_ranks
    over_tree = fullest(sizes, balance(sizes, num_ranks), num_ranks)
    by_unit = sum(fullest(unit, balance(unit, num_ranks), num_ranks) for unit in units)
    return over_tree / share, by_unit / share, max(sizes) / share


def _ratio(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.0f}"


def layer_rows() -> list[list[str]]:
    """Return one row for each model and number of ranks."""
    rows = []
    for name, (layer, _, _) in MODELS.items():
        for num_ranks in RANKS:
            values = [
                ours(layer, num_ranks, []),
                ours(layer, num_ranks, row_sizes(layer)),
                ours(layer, num_ranks, [BLOCK] * len(layer)),
                ours(layer, num_ranks, [32 * size for size in row_sizes(layer)]),
                megatron_fsdp(layer, num_ranks),
                fsdp2(layer, num_ranks),
            ]
            rows.append([name, str(num_ranks), *map(_ratio, values)])
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Plan and report."""
    args = report.make_parser(__doc__).parse_args(argv)
    markdown = report.header(
        "Padding and balance of shards",
        "what the fullest rank stores, relative to an equal share of the elements",
        "layers: one unit; whole parameters: the tree of all layers and what is beside them",
    )
    columns = ["layer of", "ranks", "element", "row", f"Block({BLOCK})", "32 rows"]
    columns += ["MFSDP rows", "FSDP2 dim 0"]
    trees = [
        [name, str(num_ranks), *map(_ratio, whole(name, num_ranks))]
        for name in MODELS
        for num_ranks in RANKS
    ]
    tree_columns = ["tree of", "ranks", "param, over the tree", "param, unit by unit"]
    tree_columns.append("the largest parameter alone")
    body = report.table(columns, layer_rows()) + "\n" + report.table(tree_columns, trees)
    report.emit(markdown + "\n" + body, args.output)
