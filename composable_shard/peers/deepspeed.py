"""DeepSpeed's directories as `save_checkpoint` of its engine writes them, ZeRO stages 0 to 3.

[Note: ZeRO's partitions]
The master weights and the optimizer's state of a group are one flat tensor, cut into one partition
for each rank. In stages 1 and 2 a group's parameters follow each other in it, and a partition may
begin inside a parameter: `param_slice_mappings` says where. In stage 3 each parameter is cut into
equal parts, the last one padded, and a rank's flat tensor has its parts of all parameters; a group
may have several such tensors. So each part of a parameter is a range of a file's storage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from composable_shard.peers.pickles import Inert
from composable_shard.peers.run import PeerOptimizer, PeerRun
from composable_shard.peers.tensors import PeerTensor, Span, flat_range
from composable_shard.peers.zips import read_number, read_torch_file

_RANKED = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(?:optim|model)_states\.pt")
_USED = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
        *("shared_params", "frozen_param_fragments", "lr_scheduler", "global_steps", "ds_version"),
        *("dp_world_size", "mp_world_size", "skipped_steps"),
    }
)
_EMPTY = ("data_sampler", "random_ltd", "sparse_tensor_module_names")


class Fragment(NamedTuple):
    """A part of a parameter in a rank's flat tensor."""

    name: str
    place: int  # in the flat tensor
    start: int  # in the parameter
    numel: int


def detect(path: Path, step: int | None) -> bool:
    """Return whether a directory, or the one that its `latest` names, is DeepSpeed's."""
    return find_tag(path, step) is not None


def find_tag(path: Path, step: int | None, latest: str = "latest") -> Path | None:
    """Return the directory of a tag: the path itself, the one of a step, or the latest."""
    if _is_tag(path):
        return path
    if step is not None:
        tag = path / f"global_step{step}"
        return tag if _is_tag(tag) else None
    try:
        name = (path / latest).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    tag = path / name
    return tag if name and "\n" not in name and _is_tag(tag) else None


def _is_tag(path: Path) -> bool:
    return any(path.glob("*_model_states.pt"))


def read(path: Path, step: int | None) -> PeerRun:
    """Return the run of a tag."""
    folder = find_tag(path, step)
    assert folder is not None
    return _Files(folder).read()


class _Files:
    """The files of one tag."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        names = sorted(each.name for each in folder.iterdir())
        odd = [n for n in names if re.match(r"layer_\d|expp?_?rank|.*expert_", n)]
        if odd:
            raise ValueError(
                f"{folder} has {odd[:3]}: pipeline stages and experts of DeepSpeed are not read. "
                "Convert it with DeepSpeed's ds_to_universal, and load the result."
            )
        models = [each for each in names if each.endswith("_model_states.pt")]
        self._models = [read_torch_file(folder / name) for name in _in_order(folder, models)]
        optimizers = [each for each in names if each.endswith("_optim_states.pt")]
        self._optimizers = [
            read_torch_file(folder / name).get("optimizer_state_dict")
            for name in _in_order(folder, optimizers)
        ]
        self._main: dict[str, Any] = self._models[0]
        self._check()

    def _check(self) -> None:
        main, folder = self._main, self._folder
        if not isinstance(main.get("module"), Mapping):
            raise ValueError(f"{folder} has no 'module' in its model states: it is not DeepSpeed's")
        if int(main.get("mp_world_size") or 1) > 1:
            raise ValueError(
                f"{folder} was saved with model parallelism of {main['mp_world_size']} ranks, "
                "which is not read. Convert it with DeepSpeed's ds_to_universal, and load the "
                "result."
            )
        steps = {each.get("global_steps") for each in self._models}
        versions = {each.get("ds_version") for each in self._models}
        if len(steps) > 1 or len(versions) > 1:
            raise ValueError(
                f"{folder} has files of several checkpoints: of steps {sorted(map(str, steps))}, "
                f"by versions {sorted(map(str, versions))}. Restore the files of one."
            )
        counts = {
            max(count) if isinstance(count := each.get("partition_count", 0), list) else count
            for each in self._optimizers
        }
        number = len(self._optimizers)
        if self._optimizers and counts != {number}:
            raise ValueError(
                f"{folder} has the optimizer's files of {number} ranks, and they are of "
                f"{sorted(counts)} ranks. Restore the missing files, or remove those of another "
                "save."
            )

    def read(self) -> PeerRun:
        main = self._main
        stage = self._stage()
        run = PeerRun(
            f"DeepSpeed, ZeRO stage {stage}" if stage else "DeepSpeed, without ZeRO",
            self._folder,
            {},
            version=str(main.get("ds_version") or ""),
            step=int(main.get("global_steps") or 0),
            world_size=int(main.get("dp_world_size") or len(self._optimizers) or 1),
        )
        if main.get("lr_scheduler") is not None:
            run.schedulers[""] = main["lr_scheduler"]
        run.left = [
            key for key, each in main.items() if key not in (*_USED, *_EMPTY) and each is not None
        ]
        if stage:
            self._read_partitions(run, stage)
        else:
            self._read_whole(run)
        return run

    def _stage(self) -> int:
        if not self._optimizers:
            return 0
        stage = self._optimizers[0].get("zero_stage", 1)  # BF16_Optimizer, which is stage 1
        return int(stage.args[0]) if isinstance(stage, Inert) else int(stage)

    # Without ZeRO

    def _read_whole(self, run: PeerRun) -> None:
        run.model = dict(self._main["module"])
        found = self._main.get("optimizer")
        if not isinstance(found, Mapping):
            return
        if "fp32_groups_flat" in found or "fp32_groups" in found:
            self._read_flat(run, found)
            return
        # Counted as by torch, over the parameters in the order of the optimizer's groups.
        run.optimizers[""] = PeerOptimizer.parse(found, f"{self._folder}")

    def _read_flat(self, run: PeerRun, found: Mapping[str, Any]) -> None:
        """Read the state of the optimizer for 16-bit weights, whose groups are flat tensors."""
        states = found["optimizer_state_dict"]
        shapes = self._main.get("param_shapes")
        if not shapes:
            raise ValueError(
                f"{self._folder} has 16-bit weights whose optimizer does not say the names of its "
                "parameters. Load it with DeepSpeed, and save with ZeRO stage 1."
            )
        parts = [_packed(group) for group in shapes]
        rank = _Rank(found["fp32_groups_flat"], states["state"], states["param_groups"], parts)
        self._join(run, [rank], _flat_groups(states["param_groups"], shapes))
        run.scaler = _scaler(found)

    # With ZeRO

    def _read_partitions(self, run: PeerRun, stage: int) -> None:
        shapes: list[dict[str, Any]] = self._main["param_shapes"]
        ranks = [
            self._partition_of_3(number, each, shapes)
            if stage == 3
            else self._partition_of_1(number, each, shapes)
            for number, each in enumerate(self._optimizers)
        ]
        groups = _flat_groups(ranks[0].groups, shapes)
        if all(group.keys() == {"params"} for group in groups):
            run.notes.append(
                f"the files do not say the options of {len(groups)} groups (lr, betas, ...): those "
                "of the optimizer here stay"
            )
        module: Mapping[str, Any] = self._main["module"]
        buffers = self._main.get("buffer_names") or []
        run.model = {name: module[name] for name in buffers if name in module}
        self._read_frozen(run, stage)
        self._join(run, ranks, groups)
        for name, source in (self._main.get("shared_params") or {}).items():
            run.model[name] = run.model[source]
        if stage < 3:
            rest = [name for name in module if name not in run.model]
            if rest:
                run.notes.append(
                    f"{rest[:8]} have no master weights: those of the module are taken"
                )
                run.model |= {name: module[name] for name in rest}
        run.scaler = _scaler(self._optimizers[0].get("loss_scaler"))

    def _read_frozen(self, run: PeerRun, stage: int) -> None:
        shapes = self._main.get("frozen_param_shapes") or {}
        parts = [each.get("frozen_param_fragments") or {} for each in self._models]
        for name, shape in shapes.items():
            if stage < 3:
                run.model[name] = parts[0][name]
                continue
            sizes = torch.Size(shape)
            number = -(-sizes.numel() // len(parts))
            spans = [
                span
                for rank, each in enumerate(parts)
                for span in _cut(each[name], Fragment(name, 0, rank * number, number), sizes)
            ]
            run.model[name] = PeerTensor(sizes, parts[0][name].dtype, tuple(spans))

    def _partition_of_1(
        self, number: int, found: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]]
    ) -> _Rank:
        """Return what a rank has in stages 1 and 2. [Note: ZeRO's partitions]"""
        base = found["base_optimizer_state"]
        masters = found["single_partition_of_fp32_groups"]
        if isinstance(base, list):  # elastic checkpoints: the state of each group
            states = dict(enumerate(base))
            groups = [{"params": [index]} for index in states]
        else:
            states, groups = base["state"], base["param_groups"]
        mappings = found.get("param_slice_mappings")
        if not mappings:
            raise ValueError(
                f"{self._folder} was written by DeepSpeed {self._main.get('ds_version')}, which "
                "does not say where the parameters begin (from 0.6.4 on it does). Load it with a "
                "newer DeepSpeed and save it again."
            )
        starts: dict[str, int] = {}
        for before in self._optimizers[:number]:
            for mapping in before["param_slice_mappings"]:
                for name, each in mapping.items():
                    starts[name] = starts.get(name, 0) + int(each.attributes["numel"])
        parts = [
            [
                Fragment(
                    name,
                    int(each.attributes["start"]),
                    starts.get(name, 0),
                    int(each.attributes["numel"]),
                )
                for name, each in mapping.items()
            ]
            for mapping in mappings
        ]
        return _Rank(masters, states, groups, parts)

    def _partition_of_3(
        self, number: int, found: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]]
    ) -> _Rank:
        """Return what a rank has in stage 3. [Note: ZeRO's partitions]"""
        base = found["optimizer_state_dict"]
        parts = []
        for group in shapes:
            place = 0
            fragments = []
            for name, shape in group.items():
                numel = torch.Size(shape).numel()
                part = -(-numel // len(self._optimizers))
                fragments.append(Fragment(name, place, number * part, part))
                place += part
            parts.append(fragments)
        return _Rank(found["fp32_flat_groups"], base["state"], base["param_groups"], parts)

    def _join(self, run: PeerRun, ranks: Sequence[_Rank], groups: list[dict[str, Any]]) -> None:
        """Join the ranks' parts of each parameter and of its state."""
        shapes = {
            name: torch.Size(shape)
            for group in self._main["param_shapes"]
            for name, shape in group.items()
        }
        joined: dict[tuple[str, str], list[Span]] = {}
        dtypes: dict[tuple[str, str], torch.dtype] = {}
        numbers: dict[str, dict[str, Any]] = {}
        for rank in ranks:
            for name, key, value, fragment in rank.parts():
                if fragment is None:
                    known = numbers.setdefault(name, {}).setdefault(key, value)
                    if known != value:
                        raise ValueError(
                            f"{self._folder} has files of several checkpoints: '{key}' of '{name}' "
                            f"is {known} and {value}. Restore the files of one."
                        )
                    continue
                spans = _cut(value, fragment, shapes[name])
                joined.setdefault((name, key), []).extend(spans)
                dtypes[name, key] = value.dtype
        state: dict[Any, dict[str, Any]] = {}
        # After all ranks: only their parts together show that elements are missing.
        for (name, key), spans in joined.items():
            found = sum(span.region.numel for span in spans)
            if found != shapes[name].numel():
                raise ValueError(
                    f"{self._folder} has {found} of the {shapes[name].numel()} elements of '{name}'"
                    f" ({key or 'weights'}): files are missing, or of several checkpoints"
                )
            tensor = PeerTensor(shapes[name], dtypes[name, key], tuple(spans))
            if key:
                state.setdefault(name, {})[key] = tensor
            else:
                run.model[name] = tensor
        self._add_numbers(run, groups, state, numbers)
        run.optimizers[""] = PeerOptimizer(groups, state)

    def _add_numbers(
        self,
        run: PeerRun,
        groups: list[dict[str, Any]],
        state: dict[Any, dict[str, Any]],
        numbers: Mapping[str, Mapping[str, Any]],
    ) -> None:
        steps = set()
        for group in groups:
            counted = group.pop("step", run.step)
            for name in group["params"]:
                if name in state:
                    state[name] |= {"step": float(counted), **numbers.get(name, {})}
                    steps.add(int(state[name]["step"]))
        taken = run.step - int(self._main.get("skipped_steps") or 0)
        if steps and steps != {taken}:
            run.notes.append(f"the optimizer has taken {sorted(steps)} steps, the engine {taken}")


def _in_order(folder: Path, names: Sequence[str]) -> list[str]:
    """Return a kind of files by rank: one of each rank, of the first rank of each model."""
    found: dict[int, str] = {}
    for name in names:
        match = _RANKED.fullmatch(name)
        rank, model_rank = (int(match[1]), int(match[2])) if match else (0, 0)
        if model_rank or rank in found:
            raise ValueError(f"{folder} has '{name}' beside '{found.get(rank, names[0])}'")
        found[rank] = name
    lacking = sorted(set(range(len(found))) - found.keys())
    if lacking:
        raise ValueError(f"{folder} lacks the files of ranks {lacking}: restore them")
    return [found[rank] for rank in sorted(found)]


@dataclass
class _Rank:
    """The flat tensors of a rank, and the parts of parameters in each."""

    masters: Sequence[PeerTensor]
    states: Mapping[int, Mapping[str, Any]]  # by the number of the flat tensor
    groups: Sequence[Mapping[str, Any]]
    fragments: Sequence[Sequence[Fragment]]

    def parts(self) -> Iterator[tuple[str, str, Any, Fragment | None]]:
        """Yield parameter, key of the state ("" for the weights), value, and which part of it.

        The value is a flat tensor, or with None as part a number of all of it.
        """
        numbers = [index for group in self.groups for index in group["params"]]
        if len(self.masters) != len(self.fragments):
            raise ValueError(
                f"{len(self.masters)} flat tensors for {len(self.fragments)} groups of parameters"
            )
        # Compared above, so that damage is named: `zip` would raise after some parts were used.
        for number, (master, fragments) in enumerate(
            zip(self.masters, self.fragments, strict=True)
        ):
            index = numbers[number] if number < len(numbers) else number
            values: dict[str, Any] = {"": master, **self.states.get(index, {})}
            for key, value in values.items():
                is_flat = isinstance(value, PeerTensor) and len(value.shape) == 1
                if isinstance(value, PeerTensor) and not is_flat:
                    value = read_number(value)
                for each in fragments:
                    if is_flat or isinstance(value, int | float):
                        yield each.name, key, value, each if is_flat else None


def _packed(group: Mapping[str, Any]) -> list[Fragment]:
    """Return whole parameters, one after another."""
    fragments, place = [], 0
    for name, shape in group.items():
        numel = torch.Size(shape).numel()
        fragments.append(Fragment(name, place, 0, numel))
        place += numel
    return fragments


def _flat_groups(
    groups: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the optimizer's groups with the names of all parameters in their flat tensors."""
    found, first = [], 0
    for group in groups:
        names = [name for each in shapes[first:][: len(group["params"])] for name in each]
        first += len(group["params"])
        found.append({**group, "params": names})
    if first != len(shapes):
        raise ValueError(
            f"{first} flat tensors in the optimizer, {len(shapes)} in the model states"
        )
    return found


def _cut(flat: PeerTensor, part: Fragment, shape: torch.Size) -> list[Span]:
    """Return a part of a parameter in a flat tensor, without the padding behind it."""
    numel = min(part.numel, shape.numel() - part.start)
    if numel <= 0:
        return []
    if len(flat.spans) != 1 or part.place + numel > flat.shape.numel():
        raise ValueError(
            f"'{part.name}': elements {part.place} to {part.place + numel} of a flat tensor of "
            f"{flat.shape.numel()}"
        )
    (span,) = flat.spans
    offset = span.offset + part.place * flat.dtype.itemsize
    return [Span(span.file, offset, flat_range(shape, part.start, part.start + numel))]


def _scaler(found: Any) -> dict[str, Any] | None:
    """Return a dynamic loss scale as the state of torch's GradScaler."""
    values: Mapping[str, Any] = found.attributes if isinstance(found, Inert) else found or {}
    window = values.get("scale_window")
    if not window or not values.get("scale_factor") or "cur_scale" not in values:
        return None
    since = int(values["cur_iter"]) - int(values["last_overflow_iter"]) - 1
    return {
        "scale": float(values["cur_scale"]),
        "growth_factor": float(values["scale_factor"]),
        "backoff_factor": 1 / float(values["scale_factor"]),
        "growth_interval": int(window),
        "_growth_tracker": since % int(window),
    }
