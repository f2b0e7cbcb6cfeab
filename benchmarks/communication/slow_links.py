"""Train over a slow link between two hosts: time, bytes over the link, loss after 200 steps.

    python -m benchmarks.communication slow_links --rates 1gbit,10gbit --delays 0,1ms

Two network namespaces stand for the hosts, two ranks each, a shaped pair of virtual interfaces for
the link. Both ends send at the rate given; with a delay each packet also waits that long, where
the kernel has netem. The bytes are those that the first host's interface has sent in a step, IP
headers and acknowledgements included. Expected: what the library's exchange sends, each rank its
part straight to each other one; root units keep their parameters between forward and backward.

Needs root and iproute2, and says so where they are missing.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from benchmarks.drills.cut_link import HOSTS, MISSING, PORT, Hosts, can_run, ip
from benchmarks.report import emit, header, make_parser, spread, table
from composable_shard import MixedPrecisionPolicy, fully_shard
from tests.common.models import CONFIGS, Llama, make_batch, make_llama, param_nbytes

RANKS_PER_HOST = 2
WORLD_SIZE = RANKS_PER_HOST * len(HOSTS)
NUM_LOSS_STEPS = 200
_INT8 = (1 + 4 / 128) / 4  # of the bytes of fp32: one scale for 128 elements
_BF16 = 1 / 2


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        build: Makes a model ready, given the mesh of hosts and their ranks.
        forward: What the gathers of forwards send over the link, in bytes of all parameters.
        backward: The same for gathers of backwards, in bytes of all but the root's.
        reduction: The same for gradients, of all parameters.
    """

    build: Callable[[Llama, DeviceMesh], nn.Module]
    forward: float = 1.0
    backward: float = 1.0
    reduction: float = 1.0


def _fsdp2(model: Llama, mesh: DeviceMesh, *, hybrid: bool = False) -> nn.Module:
    chosen = mesh if hybrid else mesh["host", "rank"]._flatten("all")
    for layer in model.layers:
        fsdp.fully_shard(layer, mesh=chosen)
    return fsdp.fully_shard(model, mesh=chosen)


def _ours(
    model: Llama,
    mesh: DeviceMesh,
    *,
    on_mesh: bool = False,
    reshard_after_forward: int | None = None,
    **dtypes: torch.dtype,
) -> nn.Module:
    for module in [*model.layers, model]:
        fully_shard(
            module,
            mesh=mesh if on_mesh else None,
            reshard_after_forward=reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(**dtypes),
        )
    return model


_BOTH = {"gather_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
# Between hosts, HSDP reduces shards that lie inside each host: half of a host's ranks' bytes each.
CASES = {
    "DDP": Case(lambda model, mesh: DistributedDataParallel(model), 0, 0, 1.5),
    "FSDP2": Case(_fsdp2),
    "FSDP2, HSDP": Case(partial(_fsdp2, hybrid=True), 0, 0),
    "FULL_SHARD": Case(_ours),
    "bf16 gathers": Case(partial(_ours, gather_dtype=torch.bfloat16), _BF16, _BF16),
    "bf16 gathers and gradients": Case(partial(_ours, **_BOTH), _BF16, _BF16, _BF16),
    "int8 gathers": Case(partial(_ours, gather_dtype=torch.int8), _INT8, _INT8),
    "HSDP": Case(partial(_ours, on_mesh=True), 0, 0),
    "backward gathers on a host": Case(partial(_ours, reshard_after_forward=2), 1, 0),
}


def _shape(hosts: Hosts, rate: str, delay: str) -> None:
    """Let both ends of the link send at a rate, after a delay."""
    for name, link in zip(hosts.names, hosts.links, strict=True):
        tc = partial(_tc, name, "qdisc", "add", "dev", link)
        parent = ["root", "handle", "1:"]
        if delay != "0":
            tc(*parent, "netem", "delay", delay, "limit", "100000")
            parent = ["parent", "1:", "handle", "2:"]
        tc(*parent, "tbf", "rate", rate, "burst", "2mb", "latency", "400ms")


def _tc(name: str, *words: str) -> None:
    ip("netns", "exec", name, "tc", *words)


def can_delay() -> bool:
    """Return whether the kernel can let packets wait."""
    with Hosts() as hosts, suppress(subprocess.CalledProcessError):
        _shape(hosts, "1gbit", "1ms")
        return True
    return False


def _sent_nbytes(link: str) -> int:
    """Return the bytes that this host has sent; as /sys is of another namespace, from /proc."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == link:
            return int(figures.split()[8])
    raise RuntimeError(f"no interface {link}")


def _tokens(rank: int, step: int, vocabulary: int, shape: tuple[int, int]) -> Tensor:
    """Return sequences in which nine of ten tokens follow from the one before."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    follows = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))
    noise = torch.randint(vocabulary, shape, generator=generator)
    is_noise = torch.rand(shape, generator=generator) < 0.1
    tokens = noise.clone()
    for place in range(1, shape[1]):
        following = follows[tokens[:, place - 1]]
        tokens[:, place] = torch.where(is_noise[:, place], noise[:, place], following)
    return tokens


def _train(name: str, case: Case, mesh: DeviceMesh, rank: int) -> float:
    """Return the mean loss over the ranks of the last 10 of `NUM_LOSS_STEPS` steps."""
    model = case.build(make_llama(name), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config, losses = CONFIGS[name], []
    for step in range(NUM_LOSS_STEPS):
        tokens = _tokens(rank, step, config.vocabulary, (config.batch, config.length + 1))
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses[-10:]).mean()
    dist.all_reduce(mean)
    return mean.item() / WORLD_SIZE


def _time(name: str, case: Case, mesh: DeviceMesh, rank: int, link: str, steps: int) -> list[float]:
    """Return the seconds of some steps, and the bytes sent over the link in each on average."""
    model = case.build(make_llama(name), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch, seconds, began = make_batch(name, rank), [], 0
    for step in range(steps + 2):
        dist.barrier()
        start = time.perf_counter()
        began = _sent_nbytes(link) if step == 2 else began
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return [*seconds[2:], (_sent_nbytes(link) - began) / steps]


def rank_main(rank: int, hosts: Hosts, plan: dict[str, str | int], folder: Path) -> None:
    """Train every case in turn; rank 0 writes what it has found."""
    hosts.enter(rank // RANKS_PER_HOST)
    link = os.environ["GLOO_SOCKET_IFNAME"] = hosts.links[rank // RANKS_PER_HOST]
    timeout = timedelta(seconds=120)
    store = dist.TCPStore(HOSTS[0], PORT, WORLD_SIZE, rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timeout)
    shape = (len(HOSTS), RANKS_PER_HOST)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("host", "rank"))
    found: dict[str, list[list[float]]] = {name: [] for name in CASES}
    model, num_rounds, steps = str(plan["model"]), int(plan["rounds"]), int(plan["steps"])
    for _, name in itertools.product(range(num_rounds), CASES):
        if steps:
            found[name].append(_time(model, CASES[name], mesh, rank, link, steps))
        else:
            found[name].append([_train(model, CASES[name], mesh, rank)])
        print(f"{plan} {name}: {found[name][-1]}" if rank == 0 else "", end="\n" * (rank == 0))
    if rank == 0:
        (folder / "found").write_text(json.dumps(found))
    dist.barrier()


@contextmanager
def _ranks(hosts: Hosts, plan: dict[str, str | int], folder: Path) -> Iterator[list[int]]:
    """Fork the ranks; kill what is left of them."""
    pids = []
    for rank in range(WORLD_SIZE):
        pid = os.fork()
        if not pid:
            try:
                rank_main(rank, hosts, plan, folder)
            except BaseException as error:
                (folder / f"error {rank}").write_text(f"{type(error).__name__}: {error}")
            finally:
                os._exit(0)
        pids.append(pid)
    try:
        yield pids
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)


def run(rate: str, delay: str, **plan: str | int) -> dict[str, list[list[float]]]:
    """Return the figures of each case over a link, round by round.

    Raises:
        RuntimeError: A rank failed.
    """
    with tempfile.TemporaryDirectory() as name, Hosts() as hosts:
        folder = Path(name)
        if rate:
            _shape(hosts, rate, delay)
        with _ranks(hosts, plan, folder) as pids:
            for pid in pids:
                os.waitpid(pid, 0)
        errors = [path.read_text() for path in sorted(folder.glob("error *"))]
        if errors or not (folder / "found").exists():
            raise RuntimeError(f"a rank failed: {errors}")
        return dict(json.loads((folder / "found").read_text()))


def _expected_nbytes(case: Case, total: int, root: int) -> float:
    return (case.forward + case.reduction) * total + case.backward * (total - root)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=tuple(CONFIGS), default="std")
    parser.add_argument("--rates", default="1gbit,10gbit", help="as tc has them, comma-separated")
    parser.add_argument("--delays", default="0,0.1ms,1ms", help="of one direction")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--no-losses", action="store_true", help="leave out the long runs")
    args = parser.parse_args(argv)
    if not can_run():
        print(f"skipped: {MISSING}")
        return 0
    torch.set_num_threads(1)
    delays = args.delays.split(",") if can_delay() else ["0"]
    links = list(itertools.product(args.rates.split(","), delays))
    timed = {
        link: run(*link, model=args.model, rounds=args.rounds, steps=args.steps) for link in links
    }
    losses = {} if args.no_losses else run("", "0", model="mini", rounds=1, steps=0)
    model = make_llama(args.model)
    total = param_nbytes(model)
    root = total - param_nbytes(model.layers)
    rows = []
    for name, case in CASES.items():
        row = [name]
        for found in timed.values():
            pairs = zip(found[name], found["FSDP2"], strict=True)
            ratios = [statistics.median(a[:-1]) / statistics.median(b[:-1]) for a, b in pairs]
            seconds = [each for one in found[name] for each in one[:-1]]
            row.append(f"{statistics.median(seconds):.2f} s, {spread(ratios)}")
        nbytes = statistics.median(one[-1] for found in timed.values() for one in found[name])
        expected = _expected_nbytes(case, total, root)
        row += [
            f"{nbytes / 1e6:.0f}",
            f"{expected / 1e6:.0f}",
            *(f"{each[0]:.3f}" for each in losses.get(name, [])[:1]),
        ]
        rows.append(row)
    missing = "" if len(delays) > 1 else "; no delays: this kernel has no netem"
    notes = [
        f"{len(HOSTS)} hosts with {RANKS_PER_HOST} gloo ranks each, one thread a rank{missing}",
        f"model {args.model}, P = {total / 1e6:.0f} MB, the root unit {root / 1e6:.0f} MB",
        f"{args.rounds} interleaved rounds of {args.steps} steps; ratio to FSDP2 in each round",
        f"loss: mean of the last 10 of {NUM_LOSS_STEPS} steps of the model mini",
    ]
    titles = [rate if delay == "0" else f"{rate}, {delay}" for rate, delay in links]
    columns = ["", *titles, "MB over the link, each way", "expected", *["loss"][: len(losses)]]
    emit(header("A slow link between two hosts", *notes) + "\n" + table(columns, rows), args.output)
    return 0
