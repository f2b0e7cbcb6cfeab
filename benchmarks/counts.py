"""Which collectives does a step issue, and how many bytes does sharding copy around them?

Exact counts of one forward and backward on two gloo ranks, after two warm-up steps. P is the size
of all parameters. The payload of a collective is its full-size buffer. Bytes written are summed
over every operator's outputs and mutated arguments, less those of the plain model, collectives
and waits for them excluded (gloo copies inside `wait`); for ours also excluded is work inside its
collectives layer, where a local sum stands in for a backend's own.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import peers, report
from benchmarks.models import make_batch, make_llama, param_nbytes
from benchmarks.ranks import run_ranks

# c10d operator -> the kind it counts as, and the argument that is its full-size buffer
_COLLECTIVES = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("reduce_scatter", 1),  # an exchange of slices that a local sum follows
    "allreduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
}
_ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "resize_", "set_")
Counts = dict[str, list[int]]  # by kind: number and bytes


class StepCounter(TorchDispatchMode):
    """Counts bytes written, by operator, and the collectives of everything that runs inside it."""

    def __init__(self, is_inside: Callable[[], bool]) -> None:
        super().__init__()
        self.written: Counter[str] = Counter()
        self.issued: Counter[str] = Counter()
        self.payload: Counter[str] = Counter()
        self._is_inside = is_inside
        self._num_waiting = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and record it."""
        kwargs = kwargs or {}
        storages = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            self._record_collective(func.overloadpacket.__name__, args)
        elif not self._is_excluded() and func.overloadpacket.__name__ not in _ALLOCATIONS:
            new = [tensor for tensor in _tensors(result) if _storage(tensor) not in storages]
            written = [*new, *_mutated(func, args, kwargs, result)]
            self.written[str(func)] += sum(_local(tensor).nbytes for tensor in written)
        return result

    def _is_excluded(self) -> bool:
        return self._num_waiting > 0 or self._is_inside()

    @contextmanager
    def see_waits(self) -> Iterator[None]:
        """Tell the backend's work inside `Work.wait` from the rest in the enclosed block."""
        original = dist.Work.wait

        def wait(work: dist.Work, *args: Any) -> bool:
            self._num_waiting += 1
            try:
                return original(work, *args)
            finally:
                self._num_waiting -= 1

        dist.Work.wait = wait
        try:
            yield
        finally:
            dist.Work.wait = original

    def _record_collective(self, name: str, args: tuple[Any, ...]) -> None:
        kind, index = _COLLECTIVES.get(name, (name, 0))
        self.issued[kind] += 1
        self.payload[kind] += sum(tensor.nbytes for tensor in _tensors(args[index]))

    def counts(self) -> Counts:
        """Return number and bytes of every kind of collective."""
        return {kind: [self.issued[kind], self.payload[kind]] for kind in sorted(self.issued)}


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _storage(tensor: Tensor) -> int:
    return _local(tensor).untyped_storage()._cdata


def _mutated(func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> Iterator[Tensor]:
    if func.overloadpacket.__name__ == "all_gather_copy_in":  # its schema hides what it writes
        yield result[0]
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = kwargs.get(argument.name) if argument.kwarg_only else args[position : position + 1]
        yield from _tensors(given)


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """Run one forward and backward."""
    model(*batch).backward()


def measure(rank: int, model_name: str, peer: str, verbose: bool) -> dict[str, Any]:
    """Return the collectives of one step and the bytes it wrote."""
    model = peers.build(peer, make_llama(model_name))
    batch = make_batch(model_name, rank)
    optimizer = peers.make_optimizer(peer, model)
    for _ in range(2):
        step(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    layer = _collectives_layer() if peer.startswith("ours") else None
    counter = StepCounter(layer.is_inside if layer else lambda: False)
    with layer.count_collectives() if layer else nullcontext() as log, counter.see_waits(), counter:
        step(model, batch)
    optimizer.step()
    optimizer.zero_grad()
    counts = _logged_counts(log.events) if layer else counter.counts()
    if peer.startswith("fsdp2"):
        _check_with_comm_debug_mode(model, batch, counts)
    if rank == 0 and verbose:
        print(peer, counter.counts(), counter.written.most_common(25), sep="\n")
    return {"counts": counts, "written": counter.written.total(), "seen": counter.counts()}


def _collectives_layer() -> Any:
    return importlib.import_module("composable_shard._collectives")


def _logged_counts(events: list[Any]) -> Counts:
    counts: Counts = {}
    for event in events:
        entry = counts.setdefault(event.kind, [0, 0])
        entry[0] += 1
        entry[1] += event.nbytes
    return counts


def _check_with_comm_debug_mode(
    model: nn.Module, batch: tuple[Tensor, Tensor], counts: Counts
) -> None:
    with CommDebugMode() as debug:
        step(model, batch)
    ours = sum(number for number, _ in counts.values())
    if debug.get_total_counts() != ours:
        raise RuntimeError(f"CommDebugMode saw {debug.get_comm_counts()}, this script {counts}")


def row(peer: str, model_name: str, result: dict[str, Any], bare: int) -> list[str]:
    """Return a table row: collectives as `number, bytes in P`, and bytes written in P."""
    size = param_nbytes(make_llama(model_name))
    cells = [model_name, peer]
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        number, nbytes = result["counts"].get(kind, (0, 0))
        cells.append(f"{number}, {nbytes / size:.3f} P" if number else "-")
    others = {kind: entry for kind, entry in result["counts"].items() if kind not in _SHOWN}
    cells.append("; ".join(f"{n} {kind}, {b} bytes" for kind, (n, b) in others.items()) or "-")
    return [*cells, f"{(result['written'] - bare) / size:.3f} P"]


_SHOWN = ("all_gather", "reduce_scatter", "all_reduce")


def main() -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--models", default="std,tiny", help="out of std, tiny, micro")
    parser.add_argument(
        "--peers",
        default="ddp,ddp_view,fsdp1,fsdp2,fsdp2_raf,fsdp2_keep,ours,ours_keep",
        help="peers",
    )
    parser.add_argument("--world-size", type=int, default=2, help="gloo ranks")
    parser.add_argument("--verbose", action="store_true", help="print bytes written by operator")
    args = parser.parse_args()
    rows = []
    for name in args.models.split(","):
        bare = run_ranks(1, measure, name, "bare", args.verbose)["written"]
        for peer in peers.parse_peers(args.peers):
            result = run_ranks(args.world_size, measure, name, peer, args.verbose)
            rows.append(row(peer, name, result, bare))
    markdown = report.header(
        "Collectives and bytes copied per step",
        f"fp32, forward + backward, {args.world_size} gloo ranks, rank 0's counts",
        "std has 13 units, tiny 49; fsdp2 keeps the root gathered, fsdp2_raf reshards it as well",
        "goal for ours: 2N-1 all-gathers and N reductions, each"
        " direction within padding of its parameters, at most 1.0 P written beyond the plain model",
    )
    columns = ["model", "peer", "all-gather", "reduce-scatter", "all-reduce", "other", "written"]
    report.emit(markdown + "\n" + report.table(columns, rows), args.output)


if __name__ == "__main__":
    main()
