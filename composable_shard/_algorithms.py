"""By which algorithm the ranks of a group gather and sum, chosen by backend and size.

[Note: Low-precision sums]
A backend adds up 16-bit terms in 16 bits, rounded from rank to rank. An exchange sends the terms as
they are, and each rank adds up those of its shard in fp32, or in the output's dtype. Where there is
no exchange, an all-to-all does the same: it moves the bytes that a reduce-scatter moves, but needs
memory for the terms, and a message to each rank, for which the group must not be too large.
All-reduces, of shards that have copies, add up as the backend does it.

[Note: Uneven shards]
NCCL has collectives for lists of any sizes. On gloo they are exchanged as equal ones are; where
there is no exchange a gather is a broadcast from each rank that has something, and the terms of
sums are sent all to all: at 10 ranks and 64 kB to 16 MB that took 0.03 to 0.9 of the time of a
reduce to each rank. Where the largest shard is much larger than the mean, the memory for its terms
would be, too: then it is a reduce to each rank that has a shard, which takes about as long. Shards
padded to the largest take 2 to 40 times as long. (benchmarks/uneven.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

__all__ = ["WayOfTerms", "backend_name", "is_exchange", "way_of_terms"]

WayOfTerms = Literal["exchange", "all_to_all"] | None  # None: the backend adds terms up

_MAX_EXCHANGE_SIZE = 8
_MAX_ALL_TO_ALL_SIZE = 64
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def way_of_terms(
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    device: torch.device,
    numels: Sequence[int] | None,
) -> Literal["exchange", "all_to_all"] | None:
    """Return how the terms of a sum are sent, None where the backend adds them up.

    See [Note: Low-precision sums] and [Note: Uneven shards].
    """
    is_low = dtype in _LOW_PRECISION
    if not is_low and numels is not None and group.size() > 2 and _is_extreme(numels):
        return None
    if is_exchange(group, device):
        return "exchange"
    is_uneven = numels is not None and backend_name(group, device) == "gloo"
    is_small = 1 < group.size() <= _MAX_ALL_TO_ALL_SIZE
    return "all_to_all" if is_small and (is_low or is_uneven) else None


def _is_extreme(numels: Sequence[int]) -> bool:
    """Whether all terms of the largest shard take more than twice the memory of all shards."""
    return max(numels) * len(numels) > 2 * sum(numels)


def is_exchange(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether shards are sent from rank to rank, and sums taken here.

    Gloo copies what its all-gather sends and receives through buffers of its own, and its
    reduce-scatter takes two to three times as long as an exchange and a local sum. Sending every
    shard straight from and to where it belongs took 0.4 to 0.9 of the time of the best collective
    at 2 and 4 ranks and 64 kB to 32 MB. With many ranks the number of messages would tell.
    """
    if device.type != "cpu" or not 1 < group.size() <= _MAX_EXCHANGE_SIZE:
        return False
    found = _has_gloo.get(group)
    if found is None:
        found = _has_gloo[group] = backend_name(group, device) == "gloo"
    return found


# For the CPU. What is not made ready once, as gathers over small groups, asks each time.
_has_gloo: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend for a device; empty where there is none.

    Who only keeps a model there, as after `model.cpu()`, needs none; a collective says so itself.
    """
    try:
        return group._get_backend(device).name().lower()
    except RuntimeError:
        return ""
