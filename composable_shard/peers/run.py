"""A run of another library: what its checkpoint has, by name, and what is left in the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composable_shard.peers.pickles import Inert
from composable_shard.peers.tensors import PeerTensor

# Keys of a group that say which parameters it has.
MEMBERS = ("params", "param_names")


@dataclass
class PeerOptimizer:
    """The state of one optimizer.

    Attributes:
        groups: Options of each group, and under "params" its parameters: their names, or numbers
            that count the parameters of all groups.
        state: By the same name or number, the state by name.
        has_groups: Whether the files say which parameters formed a group.
    """

    groups: list[dict[str, Any]]
    state: dict[Any, dict[str, Any]]
    has_groups: bool = True

    @property
    def is_numbered(self) -> bool:
        """Whether parameters are counted, not named."""
        return any(isinstance(key, int) for group in self.groups for key in group["params"])

    @classmethod
    def parse(cls, found: Any, where: str) -> PeerOptimizer:
        """Return the state in the form of `Optimizer.state_dict()`, by number or by name.

        Raises:
            ValueError: If it has another form.
        """
        is_dict = isinstance(found, dict) and {"state", "param_groups"} <= found.keys()
        if not is_dict or not isinstance(found["state"], dict):
            raise ValueError(
                f"expected the state of an optimizer in {where}, with 'state' and 'param_groups', "
                f"got {_told(found)}"
            )
        groups = [dict(group) for group in found["param_groups"]]
        if any(not isinstance(group.get("params"), list | tuple) for group in groups):
            raise ValueError(f"expected groups with 'params' in {where}, got {_told(groups)}")
        by_number: dict[Any, Any] = {}
        for group in groups:
            names = group.get("param_names")
            if names and len(names) == len(group["params"]):
                by_number |= dict(zip(group["params"], names, strict=True))
                group["params"] = list(names)
        state = {
            by_number.get(key, key): dict(values)
            for key, values in found["state"].items()
            if isinstance(values, dict)
        }
        if len(state) < len(found["state"]):
            raise ValueError(
                f"{where} has the state of some parameters on other ranks only. Save it after "
                "consolidate_state_dict()."
            )
        return cls(groups, state)


@dataclass
class PeerRun:
    """All that a checkpoint of another library has, with tensors by their places in its files.

    Attributes:
        kind: The library and the form, for messages: "DeepSpeed, ZeRO stage 2".
        version: Version of the library that wrote it; "" if the files do not say.
        path: The directory or file.
        step: Number of steps taken; 0 if the files do not say.
        world_size: Number of ranks that wrote it; 1 if the files do not say.
        model: Tensors and other values by FQN.
        optimizers: By name; one alone is "".
        schedulers: Likewise.
        scaler: State of a gradient scaler.
        generators: Files with the states of random number generators, by rank.
        left: Names of what is in the files and is not in the fields above.
        notes: What was decided about names and values, as sentences.
    """

    kind: str
    path: Path
    model: dict[str, Any]
    version: str = ""
    step: int = 0
    world_size: int = 1
    optimizers: dict[str, PeerOptimizer] = field(default_factory=dict)
    schedulers: dict[str, Any] = field(default_factory=dict)
    scaler: Any = None
    generators: dict[int, Path] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check_model(self) -> None:
        """Check that the model's values have elements here, or are numbers."""
        odd = {name: value for name, value in self.model.items() if isinstance(value, Inert)}
        for name, value in odd.items():
            raise ValueError(
                f"'{name}' in {self.path} is a {value.origin}, whose elements can't be read from "
                "the file. Save whole tensors, or with torch.distributed.checkpoint."
            )
        if not any(isinstance(value, PeerTensor) for value in self.model.values()):
            raise ValueError(
                f"{self.path} ({self.kind}) has no tensors of a model, found {self.left[:8]}. Give "
                "the directory or file that has both model and optimizer."
            )


def by_name(value: Any, mark: str) -> dict[str, Any]:
    """Return one object's state, or those of several in a list or dict, by name."""
    if isinstance(value, list):
        several = {str(number): each for number, each in enumerate(value)}
        return {"": value[0]} if len(value) == 1 else several
    if mark in value or not all(isinstance(each, Mapping) for each in value.values()):
        return {"": value}
    return {str(name): each for name, each in value.items()}


def without_inert(value: Any, path: str, left: list[str]) -> Any:
    """Return containers and numbers without objects of unknown classes, whose paths are noted."""
    is_kind = isinstance(value, type) and issubclass(value, Inert)
    if isinstance(value, Inert) or is_kind:
        left.append(f"{path} (a {value.origin})")
        return None
    if isinstance(value, dict):
        inside = {key: without_inert(each, f"{path}.{key}", left) for key, each in value.items()}
        return Counter(inside) if isinstance(value, Counter) else inside
    if isinstance(value, list | tuple):
        kind = tuple if isinstance(value, tuple) else list
        return kind(without_inert(each, f"{path}.{i}", left) for i, each in enumerate(value))
    return value


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict with the keys {[str(key) for key in value][:8]}"
    return repr(value)[:80]
