"""Plan a save: check what the ranks hold, and choose the rank that writes each piece.

[Note: Owners]
Ranks may own different parameters: pipeline stages, expert-parallel ranks. A checkpoint holds what
any rank has. If several ranks have a tensor of one name, it must be the same tensor. Ranks that
share a tensor through a process group name the group; groups of one tensor are joined. Copies that
no group joins (a tied weight of two stages, a parameter that no unit manages) must have equal
values; samples of them are compared. Without this check one of two different tensors would be lost
silently.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import attrgetter, itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from composable_shard.checkpoint.file_format import (
    byte_view,
    dtype_name,
    join_pieces,
)
from composable_shard.comm import list_ranks
from composable_shard.layout import Region, whole_box
from composable_shard.state_dict import (
    ParamNames,
    json_tree,
    mesh_groups,
)
from composable_shard.tensor import FlatShard, local_part, region_of

Owners = tuple[str, ...]  # names of the process groups that share a tensor
_Piece = tuple[str, tuple[Any, ...], int, int]  # tensor, box, start, end
_SAMPLE_NUMEL = 1 << 16
_MAX_NAMES = 8  # in a message
# Levels of the tree at which ranks may own different names; a value below is one rank's whole.
_LEVELS = {
    **{"model": 1, "optimizer": 100, "scheduler": 1, "scaler": 1, "extra": 0},
    **{"scheduler_kinds": 1, "optimizer_kinds": 1, "optimizer_cuts": 2, "extra_cuts": 1},
}


class ModelOwners:
    """Which process groups share the tensors of a model. [Note: Owners]"""

    def __init__(self, names: ParamNames) -> None:
        params = names.managed
        # Once for each handle: a name takes the numbers of all ranks.
        handles = dict.fromkeys(param.handle for param in params.values())
        named = {handle: _name_groups(mesh_groups([handle])) for handle in handles}
        self._params = {fqn: named[param.handle] for fqn, param in params.items()}
        groups = dict.fromkeys(name for names in self._params.values() for name in names)
        # Not the names of the groups: that two groups share a model joins none of its parameters.
        self._model = tuple(f"model {name}" for name in groups) or ("any model",)
        self._unmanaged = names.registered.keys() - params.keys()

    def of(self, fqn: str, value: Any) -> Owners:
        """Return the owners of a parameter or buffer, or of what belongs to it."""
        if fqn in self._params:
            return self._params[fqn]
        if isinstance(value, DTensor):
            return _name_groups(value.device_mesh.get_all_groups())
        return () if fqn in self._unmanaged else self._model

    def of_model(self, tree: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Owners]:
        """Return the owners of an encoded model's tensors, by their names in a checkpoint."""
        named = ((fqn, json_tree.tensor_name(value)) for fqn, value in tree.items())
        return {name: self.of(fqn, tensors[name]) for fqn, name in named if name is not None}

    def of_optimizer(
        self, tensors: dict[str, Tensor], fqns: Mapping[str, str]
    ) -> dict[str, Owners]:
        """Return the owners of an encoded optimizer's tensors, tensors in its options included.

        `fqns` has the parameter that a tensor is state of, or is cut like, by the tensor's name.
        """
        found = dict.fromkeys(tensors, self._model)
        return found | {name: self.of(fqn, tensors[name]) for name, fqn in fqns.items()}


def _name_groups(groups: Iterable[dist.ProcessGroup]) -> Owners:
    """Return a name for each group that all of its ranks, and no other group, have."""
    ranks = [",".join(map(str, dist.get_process_group_ranks(group))) for group in groups]
    return tuple(hashlib.sha256(each.encode()).hexdigest()[:16] for each in ranks if "," in each)


@dataclass
class Item:
    """A region of a tensor that this rank writes."""

    name: str
    region: Region
    shape: torch.Size
    values: Tensor  # the tensor itself, then a copy
    owners: Owners | None  # None: rank 0's, or the lowest rank's, is saved
    is_shard: bool  # whether other ranks hold other elements; else the first rank's copy is saved
    is_own: bool  # whether this rank alone has it under this name, or rank 0's counts

    @property
    def sample(self) -> list[Any]:
        """Its place, and a checksum of some of its values."""
        part = local_part(self.values)
        some = part[:: max(1, part.numel() // _SAMPLE_NUMEL)].cpu().contiguous()
        return [self.region.box, self.region.start, self.region.end, zlib.crc32(byte_view(some))]


@dataclass(frozen=True)
class SaveArguments:
    """Arguments of `save_checkpoint` that all ranks must agree on."""

    step: int
    path: str
    keep_last: int | None
    async_op: bool


@dataclass
class Description:
    """What a rank holds, for rank 0.

    [Note: Descriptions]
    Most ranks hold the same tensors under the same names. So they compare digests first, and of
    ranks with one digest the lowest alone sends the tree and the lines. Each sends its places: of
    what it holds of shards. That is a share of the model, however many ranks there are. Whatever
    differs between ranks that hold the same model is not in `digest`: each sends lines of its
    own tensors, as the states of its generators, and rank 0's `extra` is saved.
    """

    given: dict[str, Any]  # arguments of the save
    tree: dict[str, Any]  # all values, encoded
    items: list[Item]  # this rank's
    lines: list[list[Any]]  # of each item name, shape, dtype, order, is_shard, number of owners
    own: list[list[Any]]  # likewise, of this rank's own items, which come last
    owners: list[Owners | None]  # that lines name by number
    places: list[list[Any]]  # number of a line, start, end, and the box unless it is the whole one
    digest: str  # of the arguments, the tree and the lines
    layout: str  # a digest of all that the plan depends on, on this rank

    @classmethod
    def of(cls, given: dict[str, Any], tree: dict[str, Any], items: list[Item]) -> Description:
        """Describe this rank's items."""
        numbers: dict[Owners | None, int] = {}
        lines: list[list[Any]] = []
        own: list[list[Any]] = []
        places: list[list[Any]] = []
        for index, item in enumerate(items):
            region, owner = item.region, numbers.setdefault(item.owners, len(numbers))
            what = [item.name, list(item.shape), dtype_name(item.values.dtype)]
            line = [*what, list(region.order), item.is_shard, owner]
            (own if item.is_own else lines).append(line)
            if item.is_shard and region.end > region.start:
                box = [] if region.box == whole_box(item.shape) else [region.box]
                places.append([index, region.start, region.end, *box])
        owners, told = list(numbers), json.dumps(lines)
        digest = _digest(json.dumps([given, {**tree, "extra": None}]), told)
        layout = _digest(json.dumps([own, owners, places, given["path"]]), told)
        return cls(given, tree, items, lines, own, owners, places, digest, layout)

    def message(self, *, is_whole: bool) -> dict[str, Any]:
        """Return what this rank sends; `is_whole`: the first rank with this digest."""
        common = {"tree": self.tree, "lines": self.lines} if is_whole else {}
        own = {"digest": self.digest, "owners": self.owners, "own": self.own}
        return {**self.given, **own, "places": self.places, **common}


def _digest(*texts: str) -> str:
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def list_items(tensors: dict[str, Tensor], owners: Mapping[str, Owners]) -> list[Item]:
    """Return this rank's region of each tensor, those of its own last."""
    items: list[Item] = []
    for name, tensor in tensors.items():
        is_shard, owner = isinstance(tensor, FlatShard | DTensor), owners.get(name)
        is_own = not is_shard and name.partition("/")[0] in ("rng", "extra")  # no parameter's
        items.append(Item(name, region_of(tensor), tensor.shape, tensor, owner, is_shard, is_own))
    return sorted(items, key=attrgetter("is_own"))


@dataclass
class Draft:
    """A checkpoint as all ranks describe it; on rank 0."""

    tree: dict[str, Any]  # all values, encoded
    tensors: dict[str, dict[str, Any]]  # by name, without their pieces until these are shared
    world_size: int  # number of ranks
    # Ranks with each piece, and the numbers of their lines
    holders: dict[_Piece, list[tuple[int, int]]] = field(default_factory=dict)
    # By name, the ranks that hold a tensor, grouped by who shares it; only tensors that some of
    # these ranks do not share.
    copies: dict[str, list[list[int]]] = field(default_factory=dict)


def make_draft(ranks: list[Any]) -> Draft:
    """Join what all ranks have described."""
    check_same(ranks, *SaveArguments.__dataclass_fields__)
    # Ranks with other arguments, or of another step, must not get as far as a common draft.
    known = {rank["digest"]: rank for rank in reversed(ranks) if "tree" in rank}
    described = [known[rank["digest"]] for rank in ranks]  # [Note: Descriptions]
    draft = Draft(merge_trees([each["tree"] for each in described]), {}, len(ranks))
    for number, (rank, common) in enumerate(zip(ranks, described, strict=True)):
        lines = common["lines"]
        if rank is common:
            _add_lines(draft, number, lines, 0)
        _add_lines(draft, number, rank["own"], len(lines))
        for index, start, end, *box in rank["places"]:
            name, shape = lines[index][:2]
            place = tuple(map(tuple, box[0])) if box else whole_box(shape)
            # All holders of a shard may share the writing.
            draft.holders.setdefault((name, place, start, end), []).append((number, index))
    draft.copies = _find_copies(ranks, described)
    return draft


def _add_lines(draft: Draft, number: int, lines: list[list[Any]], first: int) -> None:
    """Add what a rank is the first to describe; of a whole value it is the holder.

    `first` is the number of the first line.
    """
    for index, (name, shape, dtype, order, is_shard, _) in enumerate(lines, first):
        entry = {"shape": shape, "dtype": dtype}
        if order != sorted(order):
            entry["order"] = order
        if draft.tensors.setdefault(name, entry) != entry:
            raise ValueError(
                f"rank {number} has '{name}' as {entry}, another rank as "
                f"{draft.tensors[name]}: all ranks must save the same model, optimizer and "
                "extra values"
            )
        size = torch.Size(shape)
        if not is_shard and size.numel():
            whole = (name, whole_box(size), 0, size.numel())
            draft.holders.setdefault(whole, [(number, index)])


def _find_copies(ranks: list[Any], described: list[Any]) -> dict[str, list[list[int]]]:
    """Return the ranks that hold a tensor, grouped by who shares it, where not all share it."""
    parts = _Parts()
    if all(each is described[0] for each in described):  # tensors of the same owners are alike
        for number, rank in enumerate(ranks):
            for place, owners in enumerate(rank["owners"]):
                if owners is not None:
                    parts.add(str(place), number, owners)
        found = parts.find_copies()
        lines = described[0]["lines"] if found else []
        return {line[0]: found[str(line[-1])] for line in lines if str(line[-1]) in found}
    for number, (rank, common) in enumerate(zip(ranks, described, strict=True)):
        for name, *_, place in common["lines"]:
            if (owners := rank["owners"][place]) is not None:
                parts.add(name, number, owners)
    return parts.find_copies()


def check_same(ranks: list[dict[str, Any]], *names: str) -> None:
    """Check that all ranks passed the same values of arguments."""
    for name in names:
        values = [rank[name] for rank in ranks]
        if any(value != values[0] for value in values):
            raise ValueError(f"the ranks passed different values of {name}: {values}")


class _Parts:
    """Joins process groups that share a tensor. [Note: Owners]"""

    def __init__(self) -> None:
        self._joined: dict[str, str] = {}  # a group to another one that it is joined to
        self._ranks: dict[str, dict[str, list[int]]] = {}  # by name and group

    def add(self, name: str, rank: int, owners: list[str]) -> None:
        """Note that a rank has a tensor, and shares it with groups."""
        groups = owners or [f"rank {rank}"]
        for group in groups[1:]:
            first, other = self._find(groups[0]), self._find(group)
            if other != first:
                self._joined[other] = first
        self._ranks.setdefault(name, {}).setdefault(groups[0], []).append(rank)

    def _find(self, group: str) -> str:
        while (other := self._joined.get(group, group)) != group:
            group = other
        return group

    def find_copies(self) -> dict[str, list[list[int]]]:
        """Return the ranks that hold a tensor, grouped by who shares it, where not all share it."""
        copies = {}
        for name, by_group in self._ranks.items():
            joined: dict[str, list[int]] = {}
            for group, ranks in by_group.items():
                joined.setdefault(self._find(group), []).extend(ranks)
            if len(joined) > 1:
                copies[name] = list(joined.values())
        return copies


def check_copies(draft: Draft, samples: list[dict[str, Any]]) -> None:
    """Check that tensors of one name are equal where ranks do not share them. [Note: Owners]"""
    different = []
    for name, copies in draft.copies.items():
        found = [sorted({json.dumps(samples[rank][name]) for rank in ranks}) for ranks in copies]
        odd = next((ranks for ranks, one in zip(copies, found, strict=True) if one != found[0]), [])
        if odd:
            label = name.removeprefix("model/")
            both = [list_ranks(sorted(each)) for each in (copies[0], odd)]
            different.append(f"'{label}' of ranks {both[0]} and of ranks {both[1]}")
    if different:
        more = f" and {len(different) - _MAX_NAMES} more" if len(different) > _MAX_NAMES else ""
        raise ValueError(
            f"different tensors have one name: {', '.join(different[:_MAX_NAMES])}{more}. No unit "
            "shares them between these ranks, and their values differ, so one of each would be "
            "lost. Keep the whole model's names in pipeline stages, and number experts over all "
            "ranks. nn.ModuleDict({name: module}) around what a rank owns gives its names a prefix."
        )


def merge_trees(trees: list[Any]) -> dict[str, Any]:
    """Return the values of all ranks. Where several ranks have a value, the lowest rank's counts.

    Parameter groups are joined, because ranks may own different parameters.
    """
    # Each once, with the lowest rank that has it.
    distinct = {id(tree): (rank, tree) for rank, tree in reversed(list(enumerate(trees)))}
    ordered = sorted(distinct.values(), key=itemgetter(0))
    merged: dict[str, Any] = {
        kind: reduce(partial(json_tree.merge, depth=depth), [t.get(kind, {}) for _, t in ordered])
        for kind, depth in _LEVELS.items()
    }
    for name, state in merged["optimizer"].items():
        found: list[dict[str, Any]] = []
        for rank, optimizers in ((rank, tree["optimizer"]) for rank, tree in ordered):
            if name in optimizers and (groups := optimizers[name]["param_groups"]) != found:
                _check_numbers(found, groups, rank)
                _join_groups(found, groups)
        merged["optimizer"][name] = {**state, "param_groups": found}
    return merged


def _check_numbers(found: list[dict[str, Any]], groups: list[dict[str, Any]], rank: int) -> None:
    """Check that ranks that step the same parameter use the same numbers."""
    homes = {fqn: group for group in found for fqn in group["params"]}
    for group in groups:
        for fqn in group["params"]:
            home = homes.get(fqn, group)
            for key, value in group.items() if home is not group else ():
                other = home.get(key)
                if value != other and (_has_float(value) or _has_float(other)):
                    raise ValueError(
                        f"rank {rank} steps '{fqn}' with {key}={value}, another rank with {other}: "
                        "all ranks must give their optimizers and schedulers the same numbers"
                    )


def _has_float(value: Any) -> bool:
    """Return whether an encoded option is a float, or contains one."""
    if isinstance(value, dict | list):
        return any(map(_has_float, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float)


def _join_groups(found: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Add the parameters of one rank's groups to groups with the same options, or new ones."""
    known = {fqn for group in found for fqn in group["params"]}
    for number, group in enumerate(groups):
        added = [fqn for fqn in group["params"] if fqn not in known]
        same = [i for i, each in enumerate(found) if each == {**group, "params": each["params"]}]
        if number >= len(found) or (added and not same):
            found.append({**group, "params": added})
        elif added:
            home = found[number if number in same else same[0]]
            home["params"] = [*home["params"], *added]


def share_pieces(draft: Draft) -> list[list[int]]:
    """Choose one rank for each piece, the largest first: the holder with the least to write.

    Return for each rank the numbers of its lines to write. The draft's tensors get their pieces.
    """
    holders, tensors = draft.holders, draft.tensors
    numels = dict.fromkeys(tensors, 0)
    for name, _, start, end in holders:
        numels[name] += end - start
    for name, numel in numels.items():
        expected = torch.Size(tensors[name]["shape"]).numel()
        if numel != expected:
            remedy = "all ranks of its mesh, and all of the default process group, must save"
            if name.partition("/")[0] == "extra":
                remedy = "pass the shards in `extra` on all ranks"
            raise ValueError(
                f"expected the ranks to hold the {expected} elements of '{name}' once, found "
                f"{numel}: {remedy}"
            )
    chosen: list[list[int]] = [[] for _ in range(draft.world_size)]
    loads = [0] * draft.world_size
    itemsizes = {name: getattr(torch, each["dtype"]).itemsize for name, each in tensors.items()}
    places: dict[str, list[tuple[Any, ...]]] = {name: [] for name in tensors}
    # Pieces that only one rank holds come first.
    ordered = sorted(
        (len(found) > 1, (piece[2] - piece[3]) * itemsizes[piece[0]], number, piece)
        for number, (piece, found) in enumerate(holders.items())
    )
    for is_shared, minus_nbytes, _, piece in ordered:
        found = holders[piece]
        rank, index = min((loads[each[0]], each) for each in found)[1] if is_shared else found[0]
        loads[rank] -= minus_nbytes
        chosen[rank].append(index)
        places[piece[0]].append((*piece[1:], rank))
    for name, pieces in places.items():
        tensors[name]["pieces"] = join_pieces(torch.Size(tensors[name]["shape"]), pieces)
    return [sorted(indices) for indices in chosen]
