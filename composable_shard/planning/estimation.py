"""`estimate`: the memory and traffic of training on any number of ranks, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from typing_extensions import Unpack

from composable_shard.options import OptionsDict, ShardingStrategy
from composable_shard.planning.fake_run import find_peaks, moments_of, run_fake_step
from composable_shard.planning.model_plan import plan_model, step_memory
from composable_shard.planning.rules import Rules, transformer_blocks
from composable_shard.planning.sharding_plan import ShardingPlan, format_nbytes, format_table

# States of the size of a parameter.
_NUM_STATES = {
    "adamw": 2,
    "adam": 2,
    "lion": 1,
    "muon": 1,
    "adagrad": 1,
    "momentum": 1,
    "sgd": 0,
    "none": 0,
}
_HEADINGS = (
    *("strategy", "ranks", "parameters", "gradients", "optimizer", "activations"),
    *("peak forward", "peak backward", "total", "sent per step", "collectives"),
)


@dataclass(frozen=True)
class Estimate:
    """What each rank holds and sends in training; the bytes are the first rank's.

    Attributes:
        plan: The units and their costs.
        strategy: The root unit's strategy.
        parameter_nbytes: Parameters at rest, padding included.
        gradient_nbytes: Gradients after a backward, padding included.
        optimizer_nbytes: The optimizer's state.
        host_nbytes: Of these three, what is offloaded to host memory.
        activation_nbytes: Activations that are kept for the backward when a forward has returned; 0
            without a batch.
        peak_forward_nbytes: The most held at once in a forward, [Note: Peaks].
        peak_backward_nbytes: Likewise in a backward.
        wire_nbytes_per_step: Bytes that a rank sends in a step.
        num_collectives: Gathers and reductions of a step.
    """

    plan: ShardingPlan
    strategy: ShardingStrategy
    parameter_nbytes: int
    gradient_nbytes: int
    optimizer_nbytes: int
    host_nbytes: int
    activation_nbytes: int
    peak_forward_nbytes: int
    peak_backward_nbytes: int
    wire_nbytes_per_step: int
    num_collectives: int

    @property
    def total_nbytes(self) -> int:
        """The most that the device holds at once in a step."""
        at_step = self.parameter_nbytes + self.gradient_nbytes + self.optimizer_nbytes
        highest = max(self.peak_forward_nbytes, self.peak_backward_nbytes, at_step)
        return highest - self.host_nbytes

    def fits(self, memory_nbytes: float) -> bool:
        """Return whether a step fits into this many bytes of device memory."""
        return self.total_nbytes <= memory_nbytes

    def __str__(self) -> str:
        return tabulate([self])


def tabulate(estimates: Sequence[Estimate], memory_nbytes: float | None = None) -> str:
    """Return estimates as a table, one row each.

    Args:
        estimates: What to compare.
        memory_nbytes: Memory of a device, to say which plans fit into it.
    """
    headings = _HEADINGS if memory_nbytes is None else (*_HEADINGS, "fits")
    rows = [_cells(each, memory_nbytes) for each in estimates]
    return format_table([headings, *rows], range(2, 11), has_total=False)


def _cells(each: Estimate, memory_nbytes: float | None) -> tuple[str, ...]:
    nbytes = (
        *(each.parameter_nbytes, each.gradient_nbytes, each.optimizer_nbytes),
        *(each.activation_nbytes, each.peak_forward_nbytes, each.peak_backward_nbytes),
        *(each.total_nbytes, each.wire_nbytes_per_step),
    )
    cells = (
        each.strategy.name,
        str(each.plan.units[-1].ranks),
        *map(format_nbytes, nbytes),
        f"{each.num_collectives}",
    )
    if memory_nbytes is None:
        return cells
    return (*cells, "yes" if each.fits(memory_nbytes) else "no")


def estimate(  # noqa: PLR0913 -- what a plan depends on, each by name
    model: nn.Module,
    *,
    world_size: int | None = None,
    mesh_shape: Sequence[int] | None = None,
    rules: Rules | None = None,
    optimizer: str = "adamw",
    batch: Any = None,
    device_type: str = "cuda",
    **options: Unpack[OptionsDict],
) -> Estimate:
    """Estimate the bytes that training a model takes per rank: at rest, at the peaks, and sent.

    Nothing is allocated, sent or changed, and no process group is needed: the model may be on the
    meta device.

        with torch.device("meta"):
            model = Transformer(config)
        print(estimate(model, world_size=64, batch=torch.zeros(4, 4096, dtype=torch.long)))
        plans = [estimate(model, world_size=64, strategy=each) for each in ShardingStrategy]
        print(tabulate(plans, memory_nbytes=80 * 2**30))

    Args:
        model: The model, of which nothing is sharded.
        world_size: Data-parallel ranks. Default: 1, or what `mesh_shape` says.
        mesh_shape: Instead, `(shard,)` or `(replicate, shard)`.
        rules: Rules of `shard_model`, as `by_class(Layer)`. Default: `transformer_blocks`.
        optimizer: "adamw", "adam", "lion", "muon", "adagrad", "momentum", "sgd" or "none", by the
            number of states of the size of a parameter.
        batch: What one rank's forward is called with: a tensor, a tuple of arguments or a dict of
            keyword arguments, of which only shapes and dtypes count. None: activations are left
            out.
        device_type: The type of any accelerator, or "cpu" with the gloo backend.
        options: Options of `fully_shard` for all units: `strategy`, `mp_policy`, ...

    Returns:
        An `Estimate`; its `str()` is a table.

    Raises:
        ValueError: As `shard_model`; for an optimizer that is not known, for an invalid number of
            ranks, and for a mesh among the options, which needs ranks.
    """
    if optimizer not in _NUM_STATES:
        raise ValueError(f"expected optimizer to be one of {list(_NUM_STATES)}, got {optimizer!r}")
    if options.get("mesh") is not None:
        raise ValueError("expected mesh_shape instead of a mesh, whose ranks are not needed")
    if rules is None:
        rules = transformer_blocks(model)
    shape = _shape(world_size, mesh_shape)
    planned = plan_model(model, rules, options, shape)
    report, root = planned.report, planned.checked[-1]
    is_cpu = device_type == "cpu"
    memory = step_memory(planned, report.units, is_cpu=is_cpu, is_launched=not is_cpu)
    run, moments = None, moments_of(model, memory)
    if batch is not None:
        policies = {each.unit.module: each.unit.options.mp_policy for each in planned.checked}
        run = run_fake_step(model, policies, batch)
        moments = list(run.moments)
    cost = report.cost
    num_states = _NUM_STATES[optimizer]
    optimizer_nbytes = cost.optimizer_nbytes * num_states // 2
    kept = sum(unit.cost.grad_nbytes for unit in report.units if not unit.cost.packed_nbytes)
    # The largest unit's memory for terms is held only at the end of the backward.
    largest, *others = sorted((unit.kept_terms for unit in memory.values()), reverse=True)
    rest = cost.param_nbytes + optimizer_nbytes + kept + max(others, default=largest)
    forward, backward = find_peaks(memory, moments)
    backward = max(backward, largest if others else 0)
    is_offloaded = root.unit.options.offload_policy.is_active
    unused = cost.optimizer_nbytes - optimizer_nbytes
    return Estimate(
        plan=report,
        strategy=root.unit.options.strategy,
        parameter_nbytes=cost.param_nbytes,
        gradient_nbytes=cost.grad_nbytes,
        optimizer_nbytes=optimizer_nbytes,
        host_nbytes=cost.host_nbytes - unused * is_offloaded,
        activation_nbytes=0 if run is None else run.activation_nbytes,
        peak_forward_nbytes=rest + forward,
        peak_backward_nbytes=rest + backward,
        wire_nbytes_per_step=cost.sent_nbytes,
        num_collectives=cost.num_collectives,
    )


def _shape(world_size: int | None, mesh_shape: Sequence[int] | None) -> tuple[int, ...]:
    shape = (world_size or 1,) if mesh_shape is None else tuple(mesh_shape)
    is_size = [isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in shape]
    if not all(is_size) or len(shape) not in (1, 2) or world_size == 0:
        given = f"world_size={world_size!r}, mesh_shape={mesh_shape!r}"
        raise ValueError(
            f"expected world_size, or mesh_shape of (shard,) or (replicate, shard), got {given}"
        )
    if world_size is not None and mesh_shape is not None:
        raise ValueError("expected world_size or mesh_shape, not both")
    return shape
