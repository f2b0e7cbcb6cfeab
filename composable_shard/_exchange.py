"""Messages from rank to rank, many at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

__all__ = ["Waitable", "Works", "abandon", "exchange"]

_TAGS = range(1 << 20, 1 << 24)  # out of the way of tags that users choose
_ABANDONED_TIMEOUT = timedelta(seconds=10)


class Waitable(Protocol):
    """What a collective that was started returns."""

    def wait(self) -> object:
        """Block, on CPU, or make the current stream wait until the collective is done."""


def abandon(work: Waitable) -> None:
    """Wait until the work's buffers are free for other use; the collective's errors are ignored."""
    with suppress(Exception):  # of any kind: the work may be a user's
        work.wait()


class Works:
    """Several pieces of work that are waited for together."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def __del__(self) -> None:
        # Nobody waits any more, after an error perhaps. Gloo closes the connection to a rank for
        # good when a message in flight loses its buffer.
        for work in self._works:
            with suppress(RuntimeError):
                work.wait(_ABANDONED_TIMEOUT)


# By group, for ranks share only some of them. Not by its name, which comes again after
# destroy_process_group: then the ranks of the next one need not have been in the same ones before.
_tags: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


def exchange(
    sends: Iterable[tuple[int, Tensor]],
    receives: Iterable[tuple[int, Tensor]],
    group: dist.ProcessGroup,
) -> Waitable:
    """Start sending and receiving tensors, by rank in the group; nothing where one is empty.

    What one rank sends to another arrives in that order.

    Sends are posted first: between two gloo ranks an exchange of 0.4 to 1 MB took 0.2 to 0.5 ms so,
    and 0.7 to 1.5 ms with the receives first, which wake the other rank for each message.
    """
    # One tag for each exchange: the group's ranks take part in the same ones in the same order.
    tags = _tags.get(group)
    if tags is None:
        tags = _tags[group] = itertools.cycle(_TAGS)
    tag = next(tags)
    works = [group.send([tensor], rank, tag) for rank, tensor in sends if tensor.numel()]
    works += [group.recv([tensor], rank, tag) for rank, tensor in receives if tensor.numel()]
    return Works(works)
