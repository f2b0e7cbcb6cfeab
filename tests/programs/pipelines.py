"""Schedules of torch over stages of a sharded model, beside one process that runs the whole model.

`python -m tests.programs.pipelines` compares each schedule with each strategy, and then, on 8
ranks, stages with tensor parallelism, activation checkpointing and compiled layers.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import schedules
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from composable_shard import ShardingStrategy, clip_grad_norm_
from composable_shard.pipelining import PipelineStage
from tests.harness.ranks import run_ranks, shut_down_workers
from tests.programs.claims import assert_close, unsharded_gradients, unsharded_values
from tests.programs.models import Layer, full_tensor_of, shard_children, square_mean

__all__ = [
    "NUM_MICROBATCHES",
    "SCHEDULES",
    "CheckpointsSecond",
    "TwoLayers",
    "all_together",
    "assert_pipeline_right",
    "make_schedule",
    "make_stages",
    "pipeline_mesh",
    "random_batch",
    "run_grid",
    "run_schedule",
    "shard_parallel",
]

NUM_MICROBATCHES = 4
DIM = 16
_MAX_NORM = 0.01
# Name: the stages of each of two ranks.
SCHEDULES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "GPipe": ((0,), (1,)),
    "1F1B": ((0,), (1,)),
    "Interleaved1F1B": ((0, 2), (1, 3)),
    "LoopedBFS": ((0, 2), (1, 3)),
    "InterleavedZeroBubble": ((0, 2), (1, 3)),
    "ZBVZeroBubble": ((0, 3), (1, 2)),
    "DualPipeV": ((0, 3), (1, 2)),
}

Shard = Callable[..., object]


class TwoLayers(nn.Module):
    """A stage of two units and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(DIM, 8), Layer(DIM, 8)
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.first(x * self.scale)))


class CheckpointsSecond(TwoLayers):
    """A stage that recomputes its second layer."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(checkpoint(self.second, self.first(x * self.scale), use_reentrant=False))


def shard_parallel(module: nn.Module, *, mesh: DeviceMesh, tp: DeviceMesh) -> None:
    """Split the layers of a stage over the tensor-parallel ranks; compile and shard them."""
    for layer in (module.first, module.second):
        parallelize_module(layer, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        layer.compile(backend="aot_eager")
    shard_children(module, mesh=mesh)


def pipeline_mesh(num_data_ranks: int = 2, num_tensor_ranks: int = 1) -> DeviceMesh:
    """Return a mesh with an axis of two stages, one of data-parallel ranks, one for layers."""
    shape = (2, num_data_ranks, num_tensor_ranks)
    return init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))


def make_schedule(name: str, stages: Sequence[Any], num_microbatches: int, **options: Any) -> Any:
    """Return a schedule of torch over the stages of this rank."""
    kind = getattr(schedules, f"Schedule{name}")
    is_single = issubclass(kind, schedules.PipelineScheduleSingle)
    given = stages[0] if is_single else list(stages)
    return kind(given, num_microbatches, loss_fn=_loss_of_target, **options)


def make_stages(
    parts: Sequence[nn.Module], name: str, mesh: DeviceMesh, *, plain: bool = False
) -> list[Any]:
    """Return the stages of this rank, of those parts of the model that its schedule has there."""
    numbers = SCHEDULES[name][mesh["pp"].get_local_rank()]
    kind = pipelining.PipelineStage if plain else PipelineStage
    group, cpu = mesh["pp"].get_group(), torch.device("cpu")
    return [kind(parts[number], number, len(parts), cpu, group=group) for number in numbers]


def _loss_of_target(output: Tensor, target: Tensor) -> Tensor:
    return square_mean(output - target)


def random_batch(data_rank: int, step: int, num_microbatches: int) -> Tensor:
    """Return the batch of a data-parallel rank in a step, for stages of `TwoLayers`."""
    generator = torch.Generator().manual_seed(1000 * data_rank + step)
    return torch.randn((2 * num_microbatches, DIM), generator=generator, dtype=torch.float64)


def run_schedule(schedule: Any, stages: Sequence[Any], batch: Tensor) -> list[Tensor]:
    """Run one step; return the losses of the microbatches, on the rank of the last stage."""
    losses: list[Tensor] = []
    first = (batch,) if any(stage.is_first for stage in stages) else ()
    is_last = any(stage.is_last for stage in stages)
    with warnings.catch_warnings():
        # Metadata of the stages travels by pickle, in buffers that numpy lends.
        warnings.filterwarnings("ignore", category=FutureWarning)
        schedule.step(
            *first, target=batch.flip(-1) if is_last else None, losses=losses if is_last else None
        )
    return losses


def assert_pipeline_right(
    name: str,
    *,
    make: Callable[[], nn.Module] = TwoLayers,
    shard: Shard = shard_children,
    steps: int = 3,
    num_microbatches: int = NUM_MICROBATCHES,
    num_tensor_ranks: int = 1,
    **options: Any,
) -> None:
    """Train the stages of a model by a schedule, and the whole of it in each process; compare.

    With gradients clipped by the norm of all stages.
    """
    __tracebackhide__ = True
    mesh = pipeline_mesh(dist.get_world_size() // 2 // num_tensor_ranks, num_tensor_ranks)
    if num_tensor_ranks > 1:
        options["tp"] = mesh["tp"]
    data_rank, num_data_ranks = mesh["dp"].get_local_rank(), mesh["dp"].size()
    num_stages = 2 * len(SCHEDULES[name][0])
    torch.manual_seed(0)
    whole = nn.Sequential(*(make() for _ in range(num_stages))).double()
    parts = copy.deepcopy(whole)
    for number in SCHEDULES[name][mesh["pp"].get_local_rank()]:
        shard(parts[number], mesh=mesh["dp"], **options)
    stages = make_stages(list(parts), name, mesh)
    schedule = make_schedule(name, stages, num_microbatches)
    own = [(stage.stage_index, stage.submod) for stage in stages]
    plain = torch.optim.SGD(whole.parameters(), lr=0.05)
    sharded = torch.optim.SGD([p for _, part in own for p in part.parameters()], lr=0.05)
    for step in range(steps):
        for rank in range(num_data_ranks):
            batch = random_batch(rank, step, num_microbatches)
            (_loss_of_target(whole(batch), batch.flip(-1)) / num_data_ranks).backward()
        losses = run_schedule(schedule, stages, random_batch(data_rank, step, num_microbatches))
        assert len(losses) in (0, num_microbatches)
        for number, part in own:
            found = unsharded_gradients(part)
            for key, param in whole[number].named_parameters():
                what = f"step {step}: gradient of {number}.{key}"
                assert_close(full_tensor_of(found[key]), param.grad, what)
        norm = clip_grad_norm_([p for _, part in own for p in part.parameters()], _MAX_NORM)
        assert_close(norm, nn.utils.clip_grad_norm_(whole.parameters(), _MAX_NORM), "norm")
        assert norm > _MAX_NORM
        for optimizer in (plain, sharded):
            optimizer.step()
            optimizer.zero_grad()
    for number, part in own:
        found = unsharded_values(part)
        for key, param in whole[number].named_parameters():
            assert_close(full_tensor_of(found[key]), param.detach(), f"parameter {number}.{key}")


def all_together(name: str) -> None:
    """Compare stages with all that composes."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    assert_pipeline_right(name, make=CheckpointsSecond, shard=shard_parallel, num_tensor_ranks=2)


def run_grid() -> None:
    """Compare every schedule with every strategy, and then all that composes; print each."""
    for name in SCHEDULES:
        for strategy in ShardingStrategy:
            for keeps in (None, False):
                options = {"strategy": strategy, "reshard_after_forward": keeps}
                run_ranks(4, assert_pipeline_right, name, **options)
                sys.stdout.write(f"{name}, {strategy.name}, {keeps}: right\n")
                sys.stdout.flush()
    for name in ("1F1B", "Interleaved1F1B"):
        run_ranks(8, all_together, name, timeout=600)
        sys.stdout.write(f"{name} on 8 ranks, with tensor parallelism and compiled layers: right\n")
    shut_down_workers()


if __name__ == "__main__":
    from tests.programs import pipelines  # by its name, under which the workers find its functions

    pipelines.run_grid()
