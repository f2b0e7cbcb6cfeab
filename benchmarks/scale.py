"""How do set-up, planning and a step grow with ranks, units and parameters?

One process, as one rank of a process group whose collectives do nothing, so that all that is left
is what this rank does itself. Ranks: `fully_shard` on every layer and the root, `lazy_init`, and a
step, in process CPU time; peers and sizes interleaved. Collectives: those of a step, and the bytes
of their full-size buffers, as the process group sees them. Units and parameters: a model of tiny
ones, on one of eight ranks; garbage collection is part of what is measured. Planning: of one flat
parameter, and the dry run of a model. Metadata: bytes from malloc, Python's objects among them,
that a rank holds for each parameter beyond the tensors' own values, in a process of its own; needs
gcc.
"""

from __future__ import annotations

import gc
import importlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks import malloc_counter, peers, report
from benchmarks.ranks import run_ranks
from tests.common.free_group import FreeGroup, free_world
from tests.common.models import (
    CONFIGS,
    MatrixChain,
    Sum,
    SumChain,
    make_batch,
    make_llama,
    param_nbytes,
)

Costs = dict[str, float]  # CPU seconds
NUM_PARAMS = 9
STEPS = 5  # a sample is the median of so many
WARM = 12  # steps until no identities are exchanged any more
KINDS = {  # by kind, how torch calls it
    "gathers": ("_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced"),
    "reductions": (
        *("_reduce_scatter_base", "reduce_scatter_single", "alltoall_base"),
        *("reduce_scatter_tensor_coalesced", "allreduce_coalesced"),
    ),
    "others": ("allreduce", "broadcast", "barrier", "reduce", "gather", "scatter", "send", "recv"),
}


def cpu_seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def finish_setup(peer: str, model: nn.Module) -> None:
    """Do what the first forward would do."""
    if peer.startswith("ours"):
        own_package().lazy_init(model)


def own_package() -> Any:
    return importlib.import_module("composable_shard")


# Ranks


def measure_ranks(peer: str, num_ranks: int, num_layers: int) -> Costs:
    """Return what each part costs with so many ranks, the plain model's compute included."""
    x = torch.ones(1, 16)
    with free_world(num_ranks):
        model = MatrixChain(num_layers, NUM_PARAMS)
        costs = {"fully_shard": cpu_seconds(lambda: peers.build(peer, model))}
        costs["lazy_init"] = cpu_seconds(lambda: finish_setup(peer, model))
        optimizer = peers.make_optimizer(peer, model)
        steps, updates = [], []
        for _ in range(3 + STEPS):
            steps.append(cpu_seconds(lambda: model(x).backward()))
            updates.append(cpu_seconds(optimizer.step))
            optimizer.zero_grad()
        costs["step"] = statistics.median(steps[3:])
        costs["optimizer"] = statistics.median(updates[3:])
    return costs


def collectives_of_step(peer: str, num_ranks: int, config: str) -> dict[str, list[int]]:
    """Return by kind the bytes of each collective of a warm step, forward, backward and AdamW.

    The bytes are those of its largest tensor, the full-size buffer; of several that are issued
    together, of all of them.
    """
    batch = make_batch(config, 0)
    with free_world(num_ranks) as group:
        model = peers.build(peer, make_llama(config))
        optimizer = peers.make_optimizer(peer, model)

        def step() -> None:
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(WARM):
            step()
        sizes = note_collectives(group)
        step()
    return sizes


def note_collectives(group: FreeGroup) -> dict[str, list[int]]:
    """Return what the bytes of all that the group does from now on are added to, by kind."""
    sizes: dict[str, list[int]] = {}

    def note(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            sizes.setdefault(kind, []).append(max(map(_nbytes, args), default=0))
            return original(*args)

        return call

    for kind, names in KINDS.items():
        for name in names:
            setattr(group, name, note(kind, getattr(group, name)))
    return sizes


def _nbytes(argument: Any) -> int:
    return sum(each.nbytes for each in tree_leaves(argument) if isinstance(each, Tensor))


# Units and parameters


def cost_of_rules(num_units: int, num_params: int) -> float:
    """Return the CPU seconds of `shard_model`."""
    shard_model, model = own_package().shard_model, SumChain(num_units, num_params)
    return cpu_seconds(lambda: shard_model(model, [(Sum, {})]))


def measure_size(num_units: int, num_params: int) -> Costs:
    """Return what each part costs for so many units of so many parameters."""
    package = own_package()
    x = torch.zeros(8)
    gc.collect()
    with free_world(8):
        model = SumChain(num_units, num_params)
        costs = {"fully_shard": cpu_seconds(lambda: peers.build("ours", model))}
        costs["shard_model"] = cost_of_rules(num_units, num_params)
        costs["lazy_init"] = cpu_seconds(lambda: package.lazy_init(model))
        model(x).backward()
        model.zero_grad()
        costs["step"] = cpu_seconds(lambda: model(x).backward())
        costs["clip_grad_norm_"] = cpu_seconds(lambda: package.clip_grad_norm_(model, 1.0))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer.step()
        costs["AdamW"] = cpu_seconds(optimizer.step)
        values: dict[str, Any] = {}
        costs["state_dict"] = cpu_seconds(lambda: values.update(model.state_dict()))
        costs["load_state_dict"] = cpu_seconds(lambda: model.load_state_dict(values))
    return costs


# Planning and metadata

PLANNED = (1000, 100)  # units, and parameters in each


def measure_planning(num_ranks: int) -> Costs:
    """Return what it costs to plan 100,000 parameters: as one flat parameter, and as a model."""
    layout = importlib.import_module("composable_shard.layout")
    num_units, num_params = PLANNED
    numels = [(512, 512 * 512, 1408 * 512)[index % 3] for index in range(num_units * num_params)]
    rows = [1 if numel == 512 else 512 for numel in numels]
    found: list[Any] = []

    def own_ranges(**options: Any) -> None:
        planned = layout.FlatLayout.plan(numels, num_ranks, 4, **options)
        found.extend(planned.local_range(index, num_ranks // 2) for index in range(len(numels)))

    def own_whole() -> None:
        own_ranges(owners=sorted(layout.balance(numels, num_ranks)))

    costs = {"layout": cpu_seconds(own_ranges)}
    costs["layout of rows"] = cpu_seconds(lambda: own_ranges(blocks=rows))
    costs["layout of whole parameters"] = cpu_seconds(own_whole)
    with torch.device("meta"):
        model = SumChain(num_units, num_params)
    for granularity in ("element", "param"):
        options = {"dry_run": True, "world_size": num_ranks, "granularity": granularity}

        def plan(options: dict[str, Any] = options) -> None:
            with redirect_stdout(StringIO()):
                own_package().shard_model(model, [(Sum, {})], **options)

        costs[f"dry run, {granularity}"] = cpu_seconds(plan)
    return costs


def values_nbytes() -> int:
    """Return the bytes of all tensors' storages."""
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and each.layout is torch.strided:
            with suppress(RuntimeError):  # wrappers have no storage
                storage = each.untyped_storage()
                if storage.data_ptr():  # a wrapper's claims bytes that it has not
                    storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


WIDE = (4, 500)  # units, and parameters of 8 elements in each; one more in the root


def measure_metadata(rank: int, peer: str, num_ranks: int, num_layers: int, is_wide: bool) -> Costs:
    """Return the bytes for each parameter: of the plain model, and of what sharding adds."""
    x, costs = torch.zeros(8) if is_wide else torch.ones(1, 16), Costs()

    def held() -> int:
        gc.collect()
        return malloc_counter.held_nbytes() - values_nbytes()

    dist.destroy_process_group()
    for num in (2, WIDE[0] if is_wide else num_layers):  # the first for what is done only once
        with free_world(num_ranks):
            start = held()
            model = SumChain(num, WIDE[1]) if is_wide else MatrixChain(num, NUM_PARAMS)
            plain = held()
            peers.build(peer, model)
            finish_setup(peer, model)
            levels = {"set-up": held()}
            for _ in range(3):
                model(x).backward()
                model.zero_grad()
                levels.setdefault("first step", held())
            levels["third step"] = held()
            count = len(list(model.parameters()))
            costs = {"plain model": (plain - start) / count}
            costs |= {name: (each - plain) / count for name, each in levels.items()}
            del model
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return costs


def metadata_rows(names: Sequence[str], ranks: Sequence[int], num_layers: int) -> list[list[str]]:
    """Return two rows for each peer and number of ranks."""
    rows = []
    with malloc_counter.preloaded(), patch.dict(os.environ, PYTHONMALLOC="malloc"):
        for name in names:
            for size in ranks:
                for is_wide in (False, True):
                    found = run_ranks(1, measure_metadata, name, size, num_layers, is_wide)
                    figures = [f"{nbytes:,.0f}" for nbytes in found.values()]
                    model = f"{WIDE[0]} x {WIDE[1]}" if is_wide else f"{num_layers} x {NUM_PARAMS}"
                    rows.append([name, f"{size:,}", model, *figures])
    return rows


def describe_metadata(names: Sequence[str], ranks: Sequence[int], num_layers: int) -> str:
    """Measure the metadata with the fewest and the most ranks."""
    return (
        "\n## Metadata, bytes for each parameter\n\nOf the plain model (modules, parameters), and"
        " what sharding it adds. Units x parameters: matrices in modules of their own, and"
        " parameters of 8 elements in a list.\n\n"
    ) + report.table(
        ["peer", "ranks", "model", "plain model", "set-up", "first step", "third step"],
        metadata_rows(names, sorted({min(ranks), max(ranks)}), num_layers),
    )


# Report

Samples = dict[tuple[str, int], list[Costs]]


def rank_rows(samples: Samples, num_units: int) -> list[list[str]]:
    """Return a row for each peer and number of ranks; the plain model's steps are subtracted."""
    rows = []
    for peer, num_ranks in samples:
        if peer == "bare":
            continue
        row = [peer, str(num_ranks)]
        for key in ("fully_shard", "lazy_init", "step", "optimizer"):
            values = per_unit_us(samples, peer, num_ranks, key, num_units)
            row.append(report.spread(values, 0) if key != "lazy_init" or sum(values) > 1 else "-")
        rows.append(row)
    return rows


def per_unit_us(
    samples: Samples, peer: str, num_ranks: int, key: str, num_units: int
) -> list[float]:
    """Return microseconds per unit, round by round; of a step, beyond the plain model."""
    plain = [costs["step"] if key == "step" else 0.0 for costs in samples["bare", num_ranks]]
    found = [costs[key] for costs in samples[peer, num_ranks]]
    return [(a - b) / num_units * 1e6 for a, b in zip(found, plain, strict=True)]


def growth(samples: Samples, peer: str, ranks: Sequence[int], key: str, num_units: int) -> str:
    """Return how much more the most ranks cost than the fewest."""
    few, many = (
        per_unit_us(samples, peer, size, key, num_units) for size in (min(ranks), max(ranks))
    )
    return report.spread([b / a for a, b in zip(few, many, strict=True)])


def size_rows(costs: dict[tuple[int, int], Costs]) -> list[list[str]]:
    """Return, for each size, seconds and microseconds per unit or parameter."""
    rows = []
    for (num_units, num_params), found in costs.items():
        count = max(num_units, num_units * num_params)
        cells = [f"{value:.3f} s, {value / count * 1e6:.0f} us" for value in found.values()]
        rows.append([f"{num_units:,} x {num_params:,}", *cells])
    return rows


def draw(path: Path, samples: Samples, sizes: dict[tuple[int, int], Costs], num_units: int) -> None:
    """Write the curves as a PNG; with matplotlib, of the `plot` extra."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.5))
    for axis, key, title in (
        (left, "step", "forward + backward beyond the plain model"),
        (middle, "fully_shard", "fully_shard"),
    ):
        for peer in dict.fromkeys(name for name, _ in samples if name != "bare"):
            ranks = [size for name, size in samples if name == peer]
            found = [
                report.quartiles(per_unit_us(samples, peer, size, key, num_units)) for size in ranks
            ]
            axis.plot(ranks, [middle for _, middle, _ in found], marker="o", label=peer)
            axis.fill_between(ranks, [q[0] for q in found], [q[2] for q in found], alpha=0.2)
        axis.set(xscale="log", yscale="log", xlabel="ranks", ylabel="us per unit", title=title)
        axis.legend()
    for is_units, style in ((True, "-"), (False, "--")):
        chosen = {size: c for size, c in sizes.items() if (size[1] == 1) == is_units}
        counts = [units * params for units, params in chosen]
        for key in ("fully_shard", "step", "state_dict"):
            values = [c[key] / n * 1e6 for n, c in zip(counts, chosen.values(), strict=True)]
            label = f"{key}, per {'unit' if is_units else 'parameter'}"
            right.plot(counts, values, style, marker="o", label=label)
    right.set(xscale="log", yscale="log", xlabel="units, or parameters in ten units", ylabel="us")
    right.legend(fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def sample(names: Sequence[str], ranks: Sequence[int], rounds: int, num_layers: int) -> Samples:
    """Measure all peers with all numbers of ranks, in turn."""
    pairs = [(name, size) for name in ("bare", *names) for size in ranks]
    samples: Samples = {pair: [] for pair in pairs}
    for name, size in pairs[:: len(ranks)]:
        measure_ranks(name, size, 2)  # what is done once in a process
    for turn in range(rounds):
        shift = turn * 5 % len(pairs)
        for pair in pairs[shift:] + pairs[:shift]:
            gc.collect()
            samples[pair].append(measure_ranks(*pair, num_layers))
    return samples


def make_parser() -> Any:
    parser = report.make_parser(__doc__)
    parser.add_argument("--ranks", default="2,8,64,512,1024,4096,16384", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds")
    parser.add_argument("--layers", type=int, default=24, help="the root is one more unit")
    parser.add_argument("--peers", default="fsdp2,ours")
    parser.add_argument("--config", default="tiny", help="the model whose gathers are counted")
    parser.add_argument("--units", default="100,1000,10000", help="of one parameter")
    parser.add_argument("--params", default="1000,10000,100000", help="in ten units")
    parser.add_argument("--metadata", action="store_true", help="measure nothing else")
    parser.add_argument("--collectives", action="store_true", help="count nothing else")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the curves here")
    return parser


def describe_collectives(names: Sequence[str], ranks: Sequence[int], config: str) -> str:
    """Return the number of collectives of a warm step and their bytes, by ranks, as a section."""
    sizes, size = CONFIGS[config], param_nbytes(make_llama(config))
    rows = []
    for name in names:
        found = [collectives_of_step(name, number, config) for number in ranks]
        for kind in KINDS:
            each = [sizes.get(kind, []) for sizes in found]
            rows.append([name, kind, *(f"{len(one)}; {sum(one) / size:.3f} P" for one in each)])
    title = (
        "## Collectives of a step, and the bytes of their full buffers\n\n"
        f"{config}: {sizes.layers} layers x {sizes.dim}, {size} bytes of parameters; the step after"
        f" {WARM} steps.\n\n"
    )
    return title + report.table(["peer", "kind", *(f"{number:,} ranks" for number in ranks)], rows)


def parse_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def main() -> None:
    """Parse the options, measure, report."""
    args = make_parser().parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # what a gather receives here may be anything
    ranks, names = parse_numbers(args.ranks), peers.parse_peers(args.peers)
    if args.metadata:
        title = report.header("Metadata", "malloc bytes on one rank, without tensors' values")
        report.emit(title + describe_metadata(names, ranks, args.layers), args.output)
        return
    if args.collectives:
        title = report.header("Collectives of a step", "one process as one of many ranks")
        markdown = title + "\n" + describe_collectives(names, ranks, args.config)
        report.emit(markdown, args.output)
        return
    num_units = args.layers + 1
    samples = sample(names, ranks, args.rounds, args.layers)
    pairs = [(number, 1) for number in parse_numbers(args.units)]
    pairs += [(10, number // 10) for number in parse_numbers(args.params)]
    measure_size(2, 2)
    sizes = {pair: measure_size(*pair) for pair in pairs}
    markdown = report.header(
        "Ranks, units and parameters",
        "process CPU time, one thread; collectives do nothing",
        f"ranks: {args.layers} layers and the root, {NUM_PARAMS} parameters each, {args.rounds}"
        f" rounds; a sample is the median of {STEPS} steps; figures: median (quartiles)",
    )
    columns = ["peer", "ranks", "fully_shard", "lazy_init", "forward + backward", "AdamW"]
    markdown += "\n## Microseconds per unit\n\n" + report.table(
        columns, rank_rows(samples, num_units)
    )
    markdown += (
        f"\nThe cost with {max(ranks)} ranks / with {min(ranks)}, round by round; goal for a step"
        " of ours: <= 1.1.\n\n"
    )
    keys = ("fully_shard", "step", "optimizer")
    grown = [[n, *(growth(samples, n, ranks, key, num_units) for key in keys)] for n in names]
    markdown += report.table(["peer", "fully_shard", "forward + backward", "AdamW"], grown)
    markdown += "\n" + describe_collectives(names, ranks, args.config)
    markdown += "\n## Seconds, and microseconds per unit or parameter\n\n"
    first = next(iter(sizes.values()))
    markdown += report.table(["units x parameters", *first], size_rows(sizes))
    plans = {size: measure_planning(size) for size in ranks}
    markdown += (
        "\n## Planning 100,000 parameters, seconds\n\nAs one flat parameter, the own range of each"
        f" included; dry runs of {PLANNED[0]:,} units of {PLANNED[1]}.\n\n"
    )
    markdown += report.table(
        ["ranks", *plans[ranks[0]]],
        [[f"{n:,}", *(f"{value:.2f}" for value in costs.values())] for n, costs in plans.items()],
    )
    markdown += describe_metadata(names, ranks, args.layers)
    report.emit(markdown, args.output)
    if args.png:
        draw(args.png, samples, sizes, num_units)


if __name__ == "__main__":
    main()
