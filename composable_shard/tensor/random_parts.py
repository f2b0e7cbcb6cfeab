"""Draw a part of a random fill, with the values that it has in the whole tensor.

[Note: Numbers of a fill]
A fill takes numbers from the generator element by element. So a part of a tensor gets the values
that it has in the whole once the generator has given up the numbers of the elements before it.
Giving up a number costs about half of making a value of it, and needs no memory for the value. From
a million numbers on, the cost does not grow, [Note: Jumps].
`normal_` makes values in groups of 16. If the last group is not full, the last 16 values of the
tensor are made once more. `tests/tensor/test_random_rules.py` holds this for the torch that runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from composable_shard.tensor.mersenne_twister import pass_over

# The numbers of 32 bits that one element takes.
_NUMBERS = {torch.float32: 1, torch.float64: 2, torch.bfloat16: 1, torch.float16: 1}
_FEWEST = 4096  # elements: below it the calls cost more than the numbers


def can_draw_parts(group: int, flat: Tensor, numel: int) -> bool:
    """Return whether a fill of `numel` elements is known well enough: [Note: Numbers of a fill].

    Args:
        group: Elements that the op makes at a time.
        flat: What of it is drawn; a subclass, as that of a dry run, draws all.
        numel: Elements of the whole tensor, which is contiguous.
    """
    if flat.dtype not in _NUMBERS or numel < _FEWEST:
        return False
    is_known = numel % group == 0 or flat.itemsize >= 4  # 16 bits: the last group differs
    return is_known and flat.device.type == "cpu" and type(flat) is Tensor


def draw_part(
    fill: Callable[[Tensor], object],
    group: int,
    target: Tensor,
    bounds: tuple[int, int],
    numel: int,
    generator: torch.Generator | None = None,
) -> None:
    """Fill `target` with elements `[start, end)` of what `fill` would give a whole tensor.

    The generator is left as if all `numel` elements had been drawn.

    Args:
        group: Elements that it makes at a time.
    """
    start, end = bounds
    rest, numbers = numel % group, _NUMBERS[target.dtype]
    limit = numel - rest - group if rest else numel  # what is behind is made in one call
    first, low = (min(limit, at // group * group) for at in (start, start + group - 1))
    high, last = (min(limit, at // group * group) for at in (end, end + group - 1))
    high, last = max(low, high), numel if end > limit else last
    if start == end:
        first = low = high = last = 0
    pass_over(first * numbers, generator)
    for begin, stop in ((first, low), (low, high), (high, last)):
        if begin < stop:
            kept = slice(max(start - begin, 0), min(stop, end) - begin)
            part = target[max(begin - start, 0) : stop - start]
            is_whole = part.numel() == stop - begin
            piece = part if is_whole else target.new_empty(stop - begin)
            fill(piece)
            if not is_whole:
                part.copy_(piece[kept])
    behind = numel - last + (group if rest and last < numel else 0)
    pass_over(behind * numbers, generator)
