"""How much of a step's communication hides behind its computing, in modelled time?

On the accelerator of threads of `tests/common/device`, with a duration for each kernel,
copy and collective: the time of a step follows from who waits for whom, and neither from luck nor
from the machine's load. 24 equal layers, one unit each; kernels other than matrix products take no
time, nor does the host. A step is held to

    bound = max(computing, communication) + first gather + last reduction

where communication is what the busiest communicator has to do, and where parameters are offloaded,
what copies them before.

    python -m benchmarks.communication overlap
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from benchmarks import report
from benchmarks.ranks import run_ranks
from composable_shard import (
    OffloadPolicy,
    fully_shard,
    set_backward_prefetch,
    set_forward_prefetch,
)
from tests.common import device

NUM_LAYERS = 24
WIDTH = 64
NUM_WARM = 12  # steps until no identities are exchanged any more


@dataclass(frozen=True)
class Durations:
    """Microseconds.

    Attributes:
        compute: Of a layer's forward; its backward takes twice that.
        gather: Of a layer's all-gather.
        reduce: Of its reduce-scatter, and of the all-reduce over replicas.
        copy: Of a layer's shard from or to the host, where it is offloaded.
    """

    compute: int
    gather: int
    reduce: int
    copy: int = 20

    def apply(self) -> None:
        """Begin to model time."""
        shard_nbytes = WIDTH * WIDTH * 4 // 2
        # By bytes, as flags are all-reduced too, and copied: these take next to no time.
        device.model_durations(
            {
                "aten::mm": device.Cost(self.compute),
                "all_gather": device.Cost(self.gather),
                "reduce_scatter": device.Cost(self.reduce),
                "all_reduce": device.Cost(0, self.reduce / (2 * shard_nbytes)),
                "copy_from_host": device.Cost(0, self.copy / (2 * shard_nbytes)),
                "copy_to_host": device.Cost(0, self.copy / (2 * shard_nbytes)),
            }
        )


TABLE = (
    Durations(100, 20, 20),
    Durations(100, 60, 60),
    Durations(100, 100, 100),
    Durations(100, 200, 200),
    Durations(100, 400, 400),
)


@dataclass(frozen=True)
class Case:
    """A way to shard the layers.

    Attributes:
        build: Shards them.
        communication: What the busiest communicator does for one layer, in us.
        num_ranks: How many ranks it needs.
        steps_in_backward: Hooks on gradients step optimizers.
    """

    build: Callable[[nn.Sequential], object]
    communication: Callable[[Durations], int]
    num_ranks: int = 2
    steps_in_backward: bool = False


def _each(shard: Callable[..., Any], **options: Any) -> Callable[[nn.Sequential], None]:
    def build(model: nn.Sequential) -> None:
        for module in (*model, model):
            shard(module, **options)

    return build


def _ours(**options: Any) -> Callable[[nn.Sequential], None]:
    # Layers of real models are larger than what is gathered ahead at once.
    return _each(fully_shard, prefetch_nbytes=0, **options)


def _fsdp2_separate(model: nn.Sequential) -> None:
    _each(torch_fully_shard)(model)
    model.set_separate_reduce_scatter_group(True)


def _two_ahead(model: nn.Sequential) -> None:
    _ours()(model)
    layers = list(model)
    for index, layer in enumerate(layers):
        set_forward_prefetch(layer, layers[index + 1 : index + 3])
        set_backward_prefetch(layer, layers[max(index - 2, 0) : index][::-1])


def _replicas(shard: Callable[..., Any]) -> Callable[[nn.Sequential], None]:
    def build(model: nn.Sequential) -> None:
        names = ("replicate", "shard")
        shard(mesh=init_device_mesh(device.NAME, (2, 2), mesh_dim_names=names))(model)

    return build


def _one(d: Durations) -> int:
    return 2 * d.gather + d.reduce


def _two(d: Durations) -> int:
    return d.gather + max(d.gather, d.reduce)


def _kept(d: Durations) -> int:
    return d.gather + d.reduce


def _copied(d: Durations) -> int:
    return _one(d) + 2 * d.copy  # a shard is copied on the stream on which it is gathered then


CASES: dict[str, Case] = {
    "fsdp2": Case(_each(torch_fully_shard), _one),
    "fsdp2, own group for reductions": Case(_fsdp2_separate, _two),
    "fsdp2, kept after forward": Case(_each(torch_fully_shard, reshard_after_forward=False), _kept),
    "fsdp2, replicas": Case(_replicas(lambda **o: _each(torch_fully_shard, **o)), _one, 4),
    "ours": Case(_ours(), _one),
    "ours, two layers ahead": Case(_two_ahead, _one),
    "ours, own group for reductions": Case(_ours(separate_reduce_group=True), _two),
    "ours, kept after forward": Case(_ours(reshard_after_forward=False), _kept),
    "ours, replicas": Case(_replicas(_ours), _one, 4),
    "ours, offload": Case(_ours(offload_policy=OffloadPolicy(params=True)), _copied),
    "ours, optimizer in backward": Case(_ours(), _one, steps_in_backward=True),
}


def bound_us(case: Case, durations: Durations) -> int:
    """Return the least that a step takes, as the docstring above says."""
    busiest = max(3 * durations.compute, case.communication(durations))
    return NUM_LAYERS * busiest + durations.gather + durations.reduce


def _stepping(case: Case, model: nn.Module) -> Callable[[], None]:
    """Return what steps and clears, after a backward if not in it."""
    if not case.steps_in_backward:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return step

    def step_one(param: nn.Parameter) -> None:
        torch.optim.SGD([param], lr=1e-3).step()
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step_one)
    return lambda: None


def run_case(
    name: str, table: tuple[Durations, ...], num_layers: int = NUM_LAYERS
) -> Iterator[float]:
    """Train; yield the modelled time of a step in us, for each row of the table."""
    case = CASES[name]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
    if "offload" not in name:
        model.to(device.NAME)
    case.build(model)
    step = _stepping(case, model)
    x = torch.randn(2, WIDTH, device=device.NAME).requires_grad_()
    for number in range(NUM_WARM + len(table)):
        if number >= NUM_WARM:
            device.synchronize()
            table[number - NUM_WARM].apply()
        model(x).sum().backward()
        if number >= NUM_WARM:
            yield device.device_time_us()
            device.model_durations({})
        step()


def measure(rank: int, names: list[str]) -> dict[str, list[float]]:
    """Return the times of steps of these cases."""
    return {name: list(run_case(name, TABLE)) for name in names}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, report."""
    args = report.make_parser(__doc__).parse_args(argv)
    rows = []
    for num_ranks in (2, 4):
        names = [name for name, case in CASES.items() if case.num_ranks == num_ranks]
        found = run_ranks(num_ranks, measure, names, on_device=True)
        for name, times in found.items():
            cells = []
            for durations, time in zip(TABLE, times, strict=True):
                bound = bound_us(CASES[name], durations)
                cells.append(f"{time / 1000:.2f} of {bound / 1000:.2f} ({time / bound:.3f})")
            rows.append([name, *cells])
    markdown = report.header(
        f"Overlap of computing and communication on an accelerator: {NUM_LAYERS} layers",
        "accelerators of threads, in modelled time: independent of the machine",
        "milliseconds of a step's forward and backward, the bound of communication/overlap.py,",
        "and the ratio; 2 ranks, with replicas 2 x 2; a copy to or from the host takes 20 us",
        "ours with prefetch_nbytes=0: one layer is gathered ahead",
    )
    columns = [f"compute {d.compute}, gather {d.gather}, reduce {d.reduce} us" for d in TABLE]
    report.emit(markdown + "\n" + report.table(["", *columns], rows), args.output)
