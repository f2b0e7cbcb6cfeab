"""Where a unit with a cap on the size of a reduction is cut into buckets."""

from __future__ import annotations

from collections.abc import Sequence

from composable_shard.layout.flat_layout import FlatLayout, round_up


def cut_buckets(
    numels: Sequence[int],
    cap_numel: int,
    world_size: int,
    alignment: int = 1,
    *,
    blocks: Sequence[int] = (),
) -> list[range]:
    """Cut a sequence of parameters into buckets, the last parameter first: backward order.

    A bucket is a run of neighbours. Laid out as one `FlatLayout` it has a `padded_numel` of at most
    `cap_numel`, unless one of its parameters alone has more; then all others in it are empty.

    Args:
        numels: Elements of each parameter, in order.
        cap_numel: The most elements in a bucket.
        world_size: Number of ranks that share each flat parameter.
        alignment: The layouts' alignment.
        blocks: The layouts' blocks; padding before blocks counts too.

    Example: numels `(5, 1, 3, 4)` and a cap of 8 give `[range(2, 4), range(0, 2)]`.
    """
    buckets = []
    end, filled = len(numels), 0
    has_blocks = any(block > 1 for block in blocks)
    for index in reversed(range(len(numels))):
        aligned = round_up(numels[index], alignment)
        padded = round_up(filled + aligned, world_size * alignment)
        if has_blocks and filled and aligned and padded <= cap_numel:
            members, whole = numels[index:end], blocks[index:end]
            padded = FlatLayout.plan(members, world_size, alignment, blocks=whole).padded_numel
        if filled and aligned and padded > cap_numel:
            buckets.append(range(index + 1, end))
            end, filled = index + 1, 0
        filled += aligned
    return [*buckets, range(end)] if end else buckets
