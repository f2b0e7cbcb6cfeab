"""`save_checkpoint`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable_shard.checkpoint.background_save import CheckpointSave, quiet_group
from composable_shard.checkpoint.draft import Item, ModelOwners, SaveArguments, list_items
from composable_shard.checkpoint.garbage import garbage_collection_paused
from composable_shard.checkpoint.objects import (
    OneOrMore,
    as_dict,
    get_rng_state,
    kind_of,
    optimizer_kinds,
    rng_name,
    take_parts,
    wraps_state,
)
from composable_shard.checkpoint.run_state import describe_model
from composable_shard.checkpoint.staging import LateCopies, copy_to_host
from composable_shard.checkpoint.writer import SavePlan, plan_save, write_checkpoint
from composable_shard.comm import HostGroup
from composable_shard.options import check_path_order
from composable_shard.state_dict import (
    Cuts,
    ModelRanks,
    ParamNames,
    get_model_state_dict,
    json_tree,
    read_named_states,
)
from composable_shard.tensor import FlatShard

_RNG_NBYTES = 1 << 12  # to a multiple of which the states of generators are filled up


def save_checkpoint(  # noqa: PLR0913 -- the parts of a run, each by name
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: OneOrMore = None,
    *,
    step: int,
    scheduler: OneOrMore = None,
    scaler: Any = None,
    extra: Any = None,
    keep_last: int | None = None,
    async_op: bool = False,
) -> Path | CheckpointSave:
    """Save the state of a run as a new directory in `path`; call it on all ranks.

    Each rank writes its own shards, and replicated values are written once; nothing is gathered.
    Ranks may own different parameters (pipeline stages, expert parallelism): the checkpoint has
    what any rank has, and loads on another split.
    The states of random number generators (Python, torch, the accelerator, numpy if loaded) are
    saved for each rank. The directory appears, and `load_checkpoint` finds it, only when all of it
    is on disk, so an interrupted save leaves the previous checkpoint in place. While another job
    saves into `path`, rank 0 waits for it. The first call makes a gloo group of all ranks for
    communication. Call it between steps, not inside `unshard_params`.

    Args:
        path: The directory of all checkpoints of the run, on a file system that all ranks share; a
            relative one is rank 0's.
        model: The model, sharded or not.
        optimizer: An optimizer of its parameters, or a list or dict of several.
        step: Number of steps taken.
        scheduler: A learning rate scheduler, or a list or dict of several; anything with a
            `state_dict()`.
        scaler: A `torch.amp.GradScaler`, or anything with a `state_dict()`.
        extra: Numbers, strings, bytes, None, tensors, and lists, tuples, sets and dicts of them,
            for example the position in the data. Rank 0's is saved; of shards, such as averages
            of parameters, every rank's part.
        keep_last: Keep only the last n checkpoints of this run, and of the one it was loaded from.
            Default: keep all.
        async_op: Copy this rank's part to host memory and return; a thread writes it. Shards in
            host memory are copied after the call has returned, at the latest before they are
            written; copies from an accelerator, to pinned memory, are issued in the order of the
            current stream. At most one such copy exists, and its memory is kept: the next call
            waits for the previous save, and copies into it.

    Returns:
        The checkpoint's directory; with `async_op` a `CheckpointSave` to wait for, also after
        `destroy_process_group()`.

    Raises:
        ValueError: For a value that can't be saved, if ranks pass different arguments, or if they
            have different tensors under one name.
        RuntimeError: If this save, or an earlier one in the background, could not be written. On
            all ranks, and nothing is left behind.
    """
    check_path_order(model, path, "save_checkpoint(path, model, optimizer, step=step)")
    group = quiet_group()
    with garbage_collection_paused(), group.agreed():
        _check_arguments(step, keep_last)
        optimizers = as_dict(optimizer)
        objects = {"scheduler": as_dict(scheduler), "scaler": as_dict(scaler)}
        values = get_model_state_dict(model)  # first: hooks of it may replace parameters
        names = ParamNames.of(model)
        cuts = Cuts({fqn: each.entry.spec for fqn, each in names.managed.items()})
        tree, tensors = _describe(values, names, objects, group.rank)
        tree["extra"], tree["extra_cuts"], found = _describe_extra(extra, cuts, group.rank)
        tensors |= found
        model_owners = ModelOwners(names)
        owners = model_owners.of_model(tree["model"], tensors)

    def describe() -> tuple[dict[str, Any], list[Item]]:
        # After the check above, because its collectives use training's groups.
        states = read_named_states(ModelRanks(model), names, tree["model"], optimizers)
        tree["optimizer_kinds"] = optimizer_kinds(optimizers)
        tree["optimizer"], tree["optimizer_cuts"] = {}, {}
        for name, state in states.items():
            if wraps_state(optimizers[name]):
                state["parts"] = take_parts(state["state"])
            own: dict[str, Tensor] = {}
            encoded = json_tree.encode(state, _prefix("optimizer", name), own)
            tree["optimizer"][name] = encoded
            tensors.update(own)
            fqns = {
                each: fqn
                for fqn, entries in encoded["state"].items()
                for each in json_tree.tensor_names(entries)
            }
            homes = _find_homes(cuts, fqns, own)
            tree["optimizer_cuts"][name] = homes
            owners.update(model_owners.of_optimizer(own, {**fqns, **homes}))
        return tree, list_items(tensors, owners)

    arguments = SaveArguments(step, os.fspath(path), keep_last, async_op)
    with garbage_collection_paused():
        plan = plan_save(group, arguments, describe)
    if not async_op:
        return write_checkpoint(group, plan, keep_last, None)
    save = _save_in_background(group, plan, keep_last)
    group.swap_pending(save)
    return save


def _save_in_background(group: HostGroup, plan: SavePlan, keep_last: int | None) -> CheckpointSave:
    late, error = LateCopies(), None
    try:
        late = copy_to_host(group, plan.items)
    except Exception as caught:  # out of memory: raised on all ranks in the background
        error = caught

    def write() -> Path:
        failure: Exception | None = error
        try:
            late.make()
        except Exception as caught:
            failure = failure or caught
        return write_checkpoint(group, plan, keep_last, failure)

    try:
        late.begin()
        return CheckpointSave(write)
    except BaseException:
        late.give_up()
        raise


def _find_homes(
    cuts: Cuts, fqns: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> dict[str, str]:
    """Return the FQN of the parameter that a shard is cut like, unless it is state of that one.

    `fqns` has the parameter that a tensor is state of, by the tensor's name.
    """
    shards = {name: value for name, value in tensors.items() if isinstance(value, FlatShard)}
    homes = {
        name: cuts.find(shard, fqns.get(name))
        for name, shard in shards.items()
        if not cuts.is_own(shard, fqns.get(name, ""))
    }
    return {name: fqn for name, fqn in homes.items() if fqn is not None}


def _check_arguments(step: int, keep_last: int | None) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**12:
        raise ValueError(
            "expected step to be the number of steps taken, an int of at least 0 and below 10**12, "
            f"got {step!r}"
        )
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"expected keep_last to be at least 1, or None for all, got {keep_last}")


def _describe(
    values: dict[str, Any], names: ParamNames, objects: dict[str, dict[str, Any]], rank: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the tree of model, schedulers and scalers, and this rank's tensors by name."""
    tensors: dict[str, Tensor] = {}
    tree: dict[str, Any] = {"model": describe_model(values, names.managed, tensors)}
    for kind, named in objects.items():
        tree[kind] = {
            name: json_tree.encode(each.state_dict(), _prefix(kind, name), tensors)
            for name, each in named.items()
        }
    tree["scheduler_kinds"] = {name: kind_of(each) for name, each in objects["scheduler"].items()}
    # Not in the tree, which all ranks read: only the rank that wrote it reads it.
    text = json.dumps(json_tree.encode(get_rng_state(), "rng", {})).encode()
    # Its decimals have more or fewer digits at each save, but it is the same tensor.
    text = text.ljust(-(-len(text) // _RNG_NBYTES) * _RNG_NBYTES)
    tensors[rng_name(rank)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tree, tensors


def _describe_extra(
    extra: Any, cuts: Cuts, rank: int
) -> tuple[Any, dict[str, str], dict[str, Tensor]]:
    """Return `extra` encoded, the parameters that shards in it are cut like, and the tensors.

    Of other ranks than rank 0, shards are saved, and the rest is checked alone.
    """
    found: dict[str, Tensor] = {}
    encoded = json_tree.encode(extra, "extra", found)
    homes = _find_homes(cuts, {}, found)
    if rank:
        plain = [name for name, x in found.items() if not isinstance(x, FlatShard | DTensor)]
        for name in plain:
            del found[name]
    return encoded, homes, found


def _prefix(kind: str, name: str) -> str:
    return f"{kind}/{name}" if name else kind
