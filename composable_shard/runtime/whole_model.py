"""The check that units manage all trainable parameters of a model.

[Note: Whole model]
A parameter that no unit manages keeps the gradient of its own rank: the ranks' copies drift apart,
and nothing fails. The usual cause is a root that was not sharded. So functions that see the whole
model look for such parameters, and the first forward does, for the outermost module whose call is
running: torch knows no parents, but the interpreter's stack holds every module that is being
called. These need no unit:

- parameters in the `ignored_params` of a unit, by object, and by place for copies of the model;
- parameters below a module that another data-parallel library manages;
- DTensors whose mesh has all ranks that average the gradients of the units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from composable_shard.dtensors import is_dtensor
from composable_shard.flat_param import UnshardedParameter, slot_key
from composable_shard.runtime.tree import find_applied, get_states, read_state
from composable_shard.runtime.unit import ShardState
from composable_shard.tensor import FlatShard
from composable_shard.torch_private import fsdp_classes, modules_of, parameters_of

_Place = tuple[str, nn.Module, str, Tensor]  # a parameter's name, its module, its key there


def check_whole(model: nn.Module) -> None:
    """Check that units manage all trainable parameters of a model, see [Note: Whole model].

    Local; the same on all ranks that have the same model. A model without units passes.
    """
    if (names := find_unmanaged([model])) and get_states(model):
        raise_unmanaged(names, get_states(model))


def find_unmanaged(modules: Sequence[nn.Module]) -> list[str]:
    """Return names of trainable parameters in `modules` that no unit manages, outermost first."""
    seen: set[nn.Module] = set()
    others = DistributedDataParallel, *fsdp_classes()
    places = [place for module in modules for place in _iter_unknown(module, "", seen, others)]
    states = [state for module in modules for state in get_states(module)] if places else []
    return _unmanaged_names(places, states) if places else []


def raise_unmanaged(names: list[str], states: Sequence[ShardState]) -> None:
    """Raise the error that names trainable parameters that no unit manages."""
    handles = [handle for state in states for handle in state.handles]
    managed = {str(label) for handle in handles for label in handle.labels()}
    if managed.issuperset(names):
        raise RuntimeError(
            f"no unit manages the trainable parameters {names}, which have taken the place of "
            "parameters of units, as where resize_token_embeddings or a swap replaces a layer: "
            "every rank would train a copy of its own. Replace layers before fully_shard, or call "
            "fully_shard on the new one and build the optimizer anew."
        )
    raise RuntimeError(
        f"no unit manages the trainable parameters {names}: every rank would train a copy of its "
        "own with its own gradients. Call fully_shard on the module that holds them (the model "
        "itself, after its layers), freeze them, or pass them in ignored_params of any fully_shard "
        "call and reduce their gradients yourself. What a sharded module gets later goes into a "
        "module of its own. Where a parameter was replaced, as by functional_call or assignment, "
        "write the values into the existing one."
    )


def _iter_unknown(
    module: nn.Module, prefix: str, seen: set[nn.Module], others: tuple[type, ...]
) -> Iterator[_Place]:
    """Yield the trainable parameters below a module that no unit or other library manages."""
    if module in seen:
        return
    seen.add(module)
    if isinstance(module, others):
        return
    # Our own mark is found too. Below a unit there may be parameters that came later.
    if read_state(module) is None and find_applied(module) is not None:
        return
    for key, param in parameters_of(module).items():
        is_unit = isinstance(param, FlatShard | UnshardedParameter)
        if param is not None and not is_unit and param.requires_grad:
            yield f"{prefix}{key}", module, key, param
    for key, child in modules_of(module).items():
        if child is not None:
            yield from _iter_unknown(child, f"{prefix}{key}.", seen, others)


def _unmanaged_names(places: Iterable[_Place], states: Sequence[ShardState]) -> list[str]:
    handles = list(dict.fromkeys(handle for state in states for handle in state.needed_handles))
    slots = [slot for handle in handles for entry in handle.entries for slot in entry.slots]
    slots += [slot for state in states for slot in state.ignored]
    known = set(map(slot_key, slots))
    exempt: set[int] = set()
    for state in states:
        exempt.update(map(id, state.options.ignored_params or ()))
    ranks = {
        rank
        for handle in handles
        for group in handle.shard_group.joint_groups
        for rank in dist.get_process_group_ranks(group)
    }
    found: dict[int, str] = {}
    for name, module, key, param in places:
        is_known = (id(parameters_of(module)), key) in known or id(param) in exempt
        if not is_known and not _spans(param, ranks):
            found.setdefault(id(param), name)
    return list(found.values())


def _spans(param: Any, ranks: set[int]) -> bool:
    """Return whether a parameter is a DTensor over all of these ranks."""
    return is_dtensor(param) and ranks.issubset(param.device_mesh.mesh.flatten().tolist())
