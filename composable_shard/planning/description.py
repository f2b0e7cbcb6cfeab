"""`describe`, and the plan of `shard_model`: units and what they hold, as data and text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from composable_shard.flat_param import FlatParamHandle
from composable_shard.options import ShardingStrategy
from composable_shard.planning.costs import Cost, FlatParamCost, RankCounts
from composable_shard.planning.module_tree import ModuleTree
from composable_shard.planning.sharding_plan import format_nbytes, format_table
from composable_shard.runtime import (
    ShardState,
    get_root_states,
    get_states,
    read_state,
)
from composable_shard.state_dict import why_unsaved
from composable_shard.tensor import FlatShard, gathered_in_step
from composable_shard.torch_private import modules_in

_GIANT_SHARE, _GIANT_NBYTES = 0.5, 32 << 20
_TINY_NBYTES = 64 << 10
_MAX_NAMES = 5  # in a warning
_HEADINGS = (
    *("unit", "class", "strategy", "ranks", "granularity", "dtypes", "parameters", "numel"),
    *("at rest", "gathered", "gradients", "optimizer", "in all", "padding", "gathers ahead"),
)
_NUMBERS = range(6, 14)  # columns that are aligned to the right


@dataclass(frozen=True)
class DescribedUnit:
    """One unit of a sharded model. Bytes are this rank's, except `total_nbytes`.

    Attributes:
        fqns: The FQNs of its modules below the described module; "" for that module itself.
        class_name: The class of its first module.
        strategy: Its strategy.
        keeps: The part of the full parameters that it keeps between forward and backward, if the
            described module is called as a whole: "nothing", "all" or "1/n".
        granularities: How finely its parameters may be cut, each kind once.
        dtypes: The dtype of the shard; where they differ, also of the full parameters and of
            reductions.
        ranks: How many ranks share it, and how many hold copies.
        group: The name of the process group that shares it.
        num_params: Parameters that it manages.
        numel: Elements of these parameters.
        padding_numel: Elements of its flat parameters that belong to no parameter.
        param_nbytes: Parameters at rest, padding included.
        gathered_nbytes: Full parameters beyond those at rest, while they are gathered.
        grad_nbytes: Gradients after a backward, padding included.
        optimizer_nbytes: The state that the given optimizer holds now; without an optimizer, the
            two moments of AdamW.
        total_nbytes: Parameters, gradients and AdamW's moments of the ranks that share the unit.
        ahead: Names of the units whose gathers it starts; None: the units that came next in the
            last call.
    """

    fqns: tuple[str, ...]
    class_name: str
    strategy: ShardingStrategy
    keeps: str
    granularities: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    ranks: RankCounts
    group: str
    num_params: int
    numel: int
    padding_numel: int
    param_nbytes: int
    gathered_nbytes: int
    grad_nbytes: int
    optimizer_nbytes: int
    total_nbytes: int
    ahead: tuple[str, ...] | None

    @property
    def name(self) -> str:
        """The first FQN, or "(root)"."""
        return self.fqns[0] or "(root)"


@dataclass(frozen=True, repr=False)
class Description:
    """What `describe` found; prints as a table.

    Attributes:
        model_name: The name of the model's class.
        units: The units, outermost first.
        warnings: What looks wrong, one sentence each.
        has_optimizer: Whether the optimizer's bytes are the state that it holds now.
        step_gathered_nbytes: What the optimizer's last step has gathered at rest, on each rank.
        step_num_gathers: For how many operations.
    """

    model_name: str
    units: tuple[DescribedUnit, ...]
    warnings: tuple[str, ...]
    has_optimizer: bool = False
    step_gathered_nbytes: int = 0
    step_num_gathers: int = 0

    @property
    def param_nbytes(self) -> int:
        """Parameters at rest on this rank."""
        return sum(unit.param_nbytes for unit in self.units)

    @property
    def grad_nbytes(self) -> int:
        """Gradients after a backward on this rank."""
        return sum(unit.grad_nbytes for unit in self.units)

    @property
    def optimizer_nbytes(self) -> int:
        """State of the optimizer on this rank."""
        return sum(unit.optimizer_nbytes for unit in self.units)

    def __repr__(self) -> str:
        table = format_table([_HEADINGS, *self._rows()], _NUMBERS)
        return "\n".join([self._title(), table, *(f"warning: {text}" for text in self.warnings)])

    def _title(self) -> str:
        state = "the state that it holds" if self.has_optimizer else "AdamW's two moments"
        text = (
            f"{self.model_name}: {len(self.units)} units; on this rank, padding included: "
            "parameters at rest, full ones beyond these while gathered, gradients after a "
            f"backward, of the optimizer {state}; in all: the ranks that share a unit together"
        )
        if self.step_num_gathers:
            nbytes = format_nbytes(self.step_gathered_nbytes)
            text += f"; a step gathers {nbytes} at rest, for {self.step_num_gathers} operations"
        return text

    def _rows(self) -> list[tuple[str, ...]]:
        total = [sum(getattr(unit, name) for unit in self.units) for name in _BYTES]
        cells = [format_nbytes(nbytes) for nbytes in total]
        cells[1] = ""  # units are gathered one after another
        num_params, numel, padding = (
            sum(getattr(unit, name) for unit in self.units)
            for name in ("num_params", "numel", "padding_numel")
        )
        counts = f"{num_params}", f"{numel:,}"
        return [
            *map(_row, self.units),
            ("total", "", "", "", "", "", *counts, *cells, f"{padding:,}", ""),
        ]


_BYTES = ("param_nbytes", "gathered_nbytes", "grad_nbytes", "optimizer_nbytes", "total_nbytes")


def describe(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Description:
    """Describe the units in a sharded module: what they hold, and what looks wrong.

    Local: nothing is gathered or sent, and nothing changes; each rank describes its own bytes.

        print(describe(model))
        describe(model, optimizer).warnings

    It warns of a unit that holds most of the model, of units so small that a gather costs more
    than it frees, of trainable parameters that the optimizer does not step, and of state that no
    save can hold. Before the first step it tries one on small plain parameters in place of the
    model's, and says so where that fails. After a step it also says what a step gathers.

    Args:
        module: The model, or a part of it with units inside.
        optimizer: Its optimizer, whose state is then counted instead of AdamW's.

    Returns:
        A `Description`; its `str()` is a table.

    Raises:
        ValueError: If `module` is not a module with units.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"expected module to be an nn.Module, got {type(module).__name__}")
    states = get_states(module)
    if not states:
        raise ValueError(
            f"nothing in {type(module).__name__} is sharded. Call fully_shard first, or plan with "
            "estimate(model, ...)."
        )
    tree = ModuleTree(module)
    # All modules before the first unit: one unit may have several, anywhere in the model.
    modules: dict[ShardState, list[nn.Module]] = {}
    for each in modules_in(module):
        state = read_state(each)
        if state is not None:
            modules.setdefault(state, []).append(each)
    held = None if optimizer is None else _state_nbytes(optimizer)
    roots = get_root_states(module)
    units = tuple(
        _describe_unit(state, modules[state], tree, held, leads=state in roots) for state in states
    )
    warnings = _warn_of_sizes(units)
    if optimizer is not None:
        warnings += _warn_of_optimizer(states, optimizer)
        warnings += filter(None, [why_unsaved(optimizer)])
    nbytes, num_gathers = (0, 0) if optimizer is None else gathered_in_step(optimizer)
    name, has_optimizer = type(module).__name__, optimizer is not None
    return Description(name, units, tuple(warnings), has_optimizer, nbytes, num_gathers)


def _describe_unit(
    state: ShardState,
    modules: Sequence[nn.Module],
    tree: ModuleTree,
    held: dict[int, int] | None,
    *,
    leads: bool,
) -> DescribedUnit:
    handles, strategy = state.handles, state.options.strategy
    policy = state.settings.reshard_after_forward
    frees = not leads if policy is None else policy
    own = sum((_cost(state, handle, frees) for handle in handles), Cost())
    total = sum(
        _held(_cost(state, handle, frees, rank))
        for handle in handles
        for rank in range(handle.shard_group.size)
    )
    entries = [entry for handle in handles for entry in handle.entries]
    # Of what modules show at rest: an optimizer of a flat parameter has no state of the originals.
    if held is None:
        optimizer_nbytes = own.optimizer_nbytes
    else:
        shown = [each.sharded for handle in handles for each in handle.shown.at_rest]
        optimizer_nbytes = sum(held.get(id(param), 0) for param in shown)
    group = handles[0].shard_group if handles else None
    return DescribedUnit(
        fqns=tuple(tree.fqn(module) for module in modules),
        class_name=type(modules[0]).__name__,
        strategy=strategy,
        keeps=_describe_kept(frees) if strategy.facts.frees_params else "all",
        granularities=tuple(dict.fromkeys(str(g) for h in handles for g in h.granularities)),
        dtypes=_dtypes(handles),
        ranks=RankCounts(1) if group is None else RankCounts.of(group),
        group="" if group is None else group.name,
        num_params=len(entries),
        numel=sum(handle.layout.unpadded_numel for handle in handles),
        padding_numel=sum(h.layout.padded_numel - h.layout.unpadded_numel for h in handles),
        param_nbytes=own.param_nbytes,
        gathered_nbytes=own.gathered_nbytes,
        grad_nbytes=own.grad_nbytes,
        optimizer_nbytes=optimizer_nbytes,
        total_nbytes=total,
        ahead=_names(state),
    )


def _cost(
    state: ShardState, handle: FlatParamHandle, frees: bool | int, rank: int | None = None
) -> Cost:
    group = handle.shard_group
    return FlatParamCost(
        handle.layout,
        RankCounts.of(group),
        state.options,
        handle.shard.values.dtype,
        handle.memory.precision,
        handle.requires_grad,
        frees,
        group.rank if rank is None else rank,
        handle.grads.layout,
    ).cost


def _held(cost: Cost) -> int:
    return cost.param_nbytes + cost.grad_nbytes + cost.optimizer_nbytes


def _describe_kept(frees: bool | int) -> str:
    if isinstance(frees, bool):
        return "nothing" if frees else "all"
    return f"1/{frees}"


def _dtypes(handles: Iterable[FlatParamHandle]) -> tuple[torch.dtype, ...]:
    found: dict[torch.dtype, None] = {}
    for handle in handles:
        main, precision = handle.shard.values.dtype, handle.memory.precision
        each = (main, precision.computes_in(main), precision.reduces_in(main))
        found.update(dict.fromkeys(each))
    return tuple(found)


def _names(state: ShardState) -> tuple[str, ...] | None:
    chosen = state.settings.forward_prefetch
    if chosen is None:
        return None
    return tuple(target.name for target in state.in_tree(chosen))


def _state_nbytes(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return the bytes of each parameter's state on this rank, by the parameter's id."""
    return {
        id(param): sum(_local_nbytes(v) for v in values.values() if isinstance(v, Tensor))
        for param, values in optimizer.state.items()
    }


def _local_nbytes(tensor: Tensor) -> int:
    local = tensor._local if isinstance(tensor, FlatShard) else tensor
    return local.numel() * local.element_size()


# What looks wrong


def _warn_of_sizes(units: Sequence[DescribedUnit]) -> list[str]:
    warnings = []
    freed = [unit for unit in units if unit.ranks.shard > 1 and unit.gathered_nbytes]
    numel = sum(unit.numel for unit in units)
    for unit in freed:
        if unit.numel > _GIANT_SHARE * numel and unit.gathered_nbytes > _GIANT_NBYTES:
            warnings.append(
                f"unit '{unit.name}' holds {unit.numel / numel:.0%} of the parameters: "
                f"{format_nbytes(unit.gathered_nbytes)} are gathered at once, and nothing of it "
                "overlaps with computing. Call fully_shard on the blocks inside it too, or "
                "shard_model(model, transformer_blocks(model))."
            )
    tiny = [unit.name for unit in freed if unit.gathered_nbytes < _TINY_NBYTES and unit.fqns[0]]
    if tiny and len(units) > 1:
        warnings.append(
            f"{len(tiny)} of {len(units)} units have less than {format_nbytes(_TINY_NBYTES)}, for "
            f"which a gather costs its latency and frees next to nothing: {listed(tiny)}. Leave "
            "them in the unit around them, or pass them to fully_shard as one list."
        )
    return warnings


def _warn_of_optimizer(states: Sequence[ShardState], optimizer: torch.optim.Optimizer) -> list[str]:
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    missed = [
        str(entry.label)
        for state in states
        for handle in state.handles
        for entry in handle.shown.at_rest
        if entry.sharded.requires_grad and id(entry.sharded) not in stepped
    ]
    if not missed:
        return []
    return [
        f"the optimizer does not step the trainable parameters {listed(missed)}. Make it after "
        "fully_shard, from model.parameters(), or freeze them."
    ]


def listed(names: Sequence[str], most: int = _MAX_NAMES) -> str:
    """Return the first names for a message, and how many there are."""
    shown = ", ".join(map(repr, names[:most]))
    return shown if len(names) <= most else f"{shown}, ... ({len(names)} in all)"


# Text


def _row(unit: DescribedUnit) -> tuple[str, ...]:
    name = ", ".join(fqn or "(root)" for fqn in unit.fqns)
    kept = "" if unit.keeps == "nothing" else f", keeps {unit.keeps}"
    return (
        name if len(unit.fqns) <= _MAX_NAMES else f"{name.split(', ')[0]}, ... ({len(unit.fqns)})",
        unit.class_name,
        f"{unit.strategy.name}{kept if unit.strategy.facts.frees_params else ''}",
        f"{unit.ranks}",
        ", ".join(unit.granularities),
        " > ".join(str(dtype).removeprefix("torch.") for dtype in unit.dtypes),
        f"{unit.num_params}",
        f"{unit.numel:,}",
        *(format_nbytes(getattr(unit, name)) for name in _BYTES),
        f"{unit.padding_numel:,}",
        "the next" if unit.ahead is None else ", ".join(unit.ahead) or "none",
    )
