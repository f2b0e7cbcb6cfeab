"""The tensors of a model by the names that its unsharded twin's state dict would have."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard.comm import HOST, Ranks, list_ranks
from composable_shard.flat_param import FlatParamHandle, ParamEntry, slot_key
from composable_shard.runtime import (
    ShardState,
    check_is_idle,
    get_states,
    select_states,
    tensor_groups,
)
from composable_shard.state_dict.packed_values import pack, unpack
from composable_shard.torch_private import (
    buffers_of,
    modules_of,
    non_persistent_buffers_of,
    parameters_of,
    set_buffers,
    version_of,
)

T = TypeVar("T")
_WRAPPED, _COMPILED = "_checkpoint_wrapped_module.", "_orig_mod."
_MAX_PATH = 8  # components of a name in a message


# Names


def unwrapped(name: str) -> str:
    """Return a name without torch's checkpoint wrapper, which its state dicts leave out."""
    return name.replace(_WRAPPED, "")


def canonical(name: str) -> str:
    """Return a name without the prefixes of checkpoint wrappers and torch.compile."""
    return unwrapped(name).replace(_COMPILED, "")


def extra_state_name(prefix: str) -> str:
    """Return the name in a state dict of what a module's `get_extra_state` returns."""
    return f"{prefix}_extra_state"


def is_extra_state(name: str) -> bool:
    """Return whether a name of a state dict is that of what a `get_extra_state` returned."""
    return name.rpartition(".")[2] == extra_state_name("")


def iter_slots(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield every name of every parameter and buffer, with its module and its key there."""
    for prefix, child in prefixed_modules(module):
        # A ScriptModule's have no __iter__.
        for key in (*parameters_of(child).keys(), *buffers_of(child).keys()):
            yield f"{prefix}{key}", child, key


def check_names(model: nn.Module) -> None:
    """Check that what belongs in state dicts has names that differ without prefixes of wrappers.

    Local; the same on all ranks that have the same model.

    Raises:
        ValueError: If two parameters, buffers or extra states have one canonical name.
    """
    known: dict[str, tuple[str, object]] = {}
    for prefix, child in prefixed_modules(model):
        hidden, extra = non_persistent_buffers_of(child), extra_state_name("")
        registered: dict[str, object] = {**parameters_of(child), **buffers_of(child)}
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            registered[extra] = child
        for key, value in registered.items():
            if value is None or key in hidden:
                continue
            name, short = f"{prefix}{key}", canonical(f"{prefix}{key}")
            other, before = known.setdefault(short, (name, value))
            if before is not value:
                raise ValueError(
                    f"'{other}' and '{name}' of {type(model).__name__} are different, and would "
                    f"have one name in state dicts, '{short}': those of checkpoint wrappers "
                    f"('{_WRAPPED}') and of torch.compile ('{_COMPILED}') are left out. Give one "
                    "of the modules another attribute name."
                )


def without_wrappers(model: nn.Module, values: Mapping[str, T]) -> dict[str, T]:
    """Return values of a model by canonical name.

    Raises:
        ValueError: If values of different parameters would have one name.
    """
    found = {canonical(name): value for name, value in values.items()}
    if len(found) < len(values):
        check_names(model)  # tied ones may
    return found


def prefixed_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all modules under each of their names, as prefixes; by one call: `modules_in`.

    Raises:
        ValueError: If a module contains itself.
    """
    found: list[tuple[str, nn.Module]] = []
    waiting = [("", module)]
    while waiting:
        prefix, each = named = waiting.pop()
        if prefix.count(".") > sys.getrecursionlimit():  # as deep as torch's own recursion
            raise ValueError(
                f"a module of {type(module).__name__} contains itself, at "
                f"'{'.'.join(prefix.split('.')[:_MAX_PATH])}...', so that its names have no end. "
                "Refer to a module around it from a list, where torch finds no submodules."
            )
        found.append(named)
        below = [*modules_of(each).items()][::-1]
        waiting += [(f"{prefix}{key}.", child) for key, child in below if child is not None]
    return found


# Parameters of units


@dataclass(frozen=True)
class ManagedParam:
    """A parameter that a unit manages; two of the same parameter are equal."""

    is_persistent: ClassVar[bool] = True
    handle: FlatParamHandle  # its owner
    index: int  # among the handle's entries
    # Canonical names in the searched module; several for a tied parameter
    names: list[str] = field(default_factory=list, compare=False)

    @property
    def entry(self) -> ParamEntry:
        """The handle's record of it."""
        return self.handle.entries[self.index]

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self.entry.spec.shape

    @property
    def is_meta(self) -> bool:
        """Whether it has no values yet."""
        return self.handle.shard.values.is_meta


def handles_of(module: nn.Module, around: ShardState | None = None) -> list[FlatParamHandle]:
    """Return the handles whose parameters `module` shows, including handles of units outside of it.

    `around` is the unit that `module` is a part of, if it is none itself.
    """
    states = [*get_states(module), *([] if around is None else [around])]
    return list(dict.fromkeys(h for state in states for h in state.needed_handles))


def find_params(module: nn.Module, around: ShardState | None = None) -> dict[str, ManagedParam]:
    """Return every managed parameter by name, a tied one under each of its names, in order."""
    return {name: param for name, _, param in _named_params(module, around)}


def params_by_fqn(model: nn.Module) -> dict[str, ManagedParam]:
    """Return every managed parameter by canonical name, a tied one under each, in order."""
    return {fqn: param for _, fqn, param in _named_params(model, None)}


@dataclass(frozen=True)
class ParamNames:
    """The parameters of a model by canonical name, for a caller that needs them several times."""

    managed: dict[str, ManagedParam]  # as `params_by_fqn` returns them
    registered: dict[str, Tensor]  # what modules show, a tied one under its first name

    @classmethod
    def of(cls, model: nn.Module) -> ParamNames:
        """Find them; a model that names its parameters itself says what it shows."""
        if type(model).named_parameters is not nn.Module.named_parameters:
            told: dict[str, Tensor] = {canonical(n): p for n, p in model.named_parameters()}
            return cls(params_by_fqn(model), told)
        registered: dict[int, tuple[str, Tensor]] = {}
        for prefix, child in prefixed_modules(model):
            short = canonical(prefix)
            for key, param in parameters_of(child).items():
                if param is not None and id(param) not in registered:
                    registered[id(param)] = f"{short}{key}", param
        named = dict(registered.values())
        if len(named) < len(registered):
            check_names(model)
        return cls(params_by_fqn(model), named)


def _named_params(
    module: nn.Module, around: ShardState | None
) -> list[tuple[str, str, ManagedParam]]:
    """Return every managed parameter under each of its names, with the canonical one."""
    places: dict[int, dict[Any, ManagedParam]] = {}
    for handle in handles_of(module, around):
        for index, entry in enumerate(handle.entries):
            param = ManagedParam(handle, index)
            for place, key in map(slot_key, entry.slots):
                places.setdefault(place, {})[key] = param
    found: list[tuple[str, str, ManagedParam]] = []
    for prefix, child in prefixed_modules(module):
        shown = parameters_of(child)
        if own := places.get(id(shown)):
            keys, short = shown.keys(), canonical(prefix)
            named = [(f"{prefix}{key}", f"{short}{key}", own[key]) for key in keys if key in own]
            for _, fqn, param in named:
                param.names.append(fqn)
            found += named
    return found


def by_handle(
    params: Iterable[tuple[ManagedParam, T]],
) -> dict[FlatParamHandle, dict[int, T]]:
    """Group values of parameters by handle and index."""
    found: dict[FlatParamHandle, dict[int, T]] = {}
    for param, value in params:
        found.setdefault(param.handle, {})[param.index] = value
    return found


# Ranks


def mesh_groups(handles: list[FlatParamHandle]) -> list[dist.ProcessGroup]:
    """Return groups that reach all ranks of handles when a message passes through one by one.

    First the groups of the data-parallel meshes, then the axes of the tensor-parallel meshes.
    """
    groups = [group for handle in handles for group in handle.shard_group.joint_groups]
    return list(dict.fromkeys([*groups, *tensor_groups(handles)]))


class ModelRanks(Ranks):
    """The ranks that share a model."""

    def __init__(self, model: nn.Module) -> None:
        self.handles = handles_of(model)
        for handle in self.handles:
            if handle.shown.scope is None:
                handle.adopt_changes()
        self.tensor_groups = tensor_groups(self.handles)
        device = self.handles[0].shard_group.device if self.handles else HOST
        super().__init__(mesh_groups(self.handles), device)
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._is_first_part = all(group.rank() == 0 for group in self.tensor_groups)
        if self.handles:
            self.is_first = self._is_first_part and self.handles[0].shard_group.is_first

    def check_one_is_first(self) -> None:
        """Check, on all ranks, that the first rank is the first of every unit's.

        One all-gather of 31 bytes for each process group, if units have different groups.
        """
        if len({handle.shard_group.joint_groups for handle in self.handles}) < 2:
            return
        odd = [h.name for h in self.handles if h.shard_group.is_first != self.is_first]
        with self.agreed():
            if odd and self._is_first_part:
                raise NotImplementedError(
                    "one rank can hold all full values only if the meshes of all units begin with "
                    f"it, and those of {odd} and '{self.handles[0].name}' begin with different "
                    "ranks. Pass StateDictOptions(rank0_only=False) to get a state dict, and give "
                    "every rank the whole one to load it."
                )

    def value_from_first(self, make: Callable[[], Any]) -> Any:
        """Return what a function returns on the first rank, nested, its tensors on the CPU.

        An error in it is raised on all ranks. One message, and one broadcast of each large tensor,
        for each process group.
        """
        tensors: dict[str, Tensor] = {}
        with self.agreed():
            mine = pack(make(), tensors) if self.is_first else None
        packed = next(each for each in self.all_messages(mine) if each is not None)

        def fetch(name: str, empty: Tensor) -> Tensor:
            whole = torch.empty_like(empty, device=HOST)
            return self.copy_from_first(whole.copy_(tensors[name]) if tensors else whole)

        return unpack(packed, fetch)

    def check_all_broadcast(self, broadcasts: bool) -> None:
        """Check, on all ranks, that all or none of them pass `broadcast_from_rank0`.

        One all-gather of 31 bytes for each process group.
        """
        asked = self.all_messages(broadcasts)
        if len(set(asked)) > 1:
            having = [rank for rank, each in enumerate(asked) if each]
            raise ValueError(
                "expected the same StateDictOptions on all ranks, got broadcast_from_rank0=True on "
                f"ranks {list_ranks(having)} of {len(asked)} only. Pass it on all of them, also "
                "where the dict is empty."
            )

    def check_can_broadcast(self) -> None:
        """Check, on all ranks, that the first rank can send values to all others."""
        if not self.handles and dist.is_initialized() and dist.get_world_size() > 1:
            raise NotImplementedError(
                "broadcast_from_rank0 needs a model with sharded units, and this one has none. "
                "Give every rank the whole state dict."
            )
        self.check_one_is_first()


# Everything in a model


@dataclass
class OtherTensor:
    """A parameter that no unit manages, or a buffer, with all its names and places."""

    tensor: Tensor
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    is_persistent: bool = False  # belongs in state dicts

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self.tensor.shape

    @property
    def is_meta(self) -> bool:
        """Whether it has no values yet."""
        return self.tensor.is_meta

    def materialize(self, device: torch.device) -> Tensor:
        """Replace a meta tensor by a real one without values; a Parameter stays the same object."""
        real = torch.empty_like(self.tensor.detach(), device=device)
        if isinstance(self.tensor, nn.Parameter):
            torch.utils.swap_tensors(self.tensor, nn.Parameter(real, self.tensor.requires_grad))
            return self.tensor
        for module, key in self.places:
            buffers_of(module)[key] = real
        return real


class ModelTensors:
    """All tensors of a model at rest.

    Names are canonical names of the original parameters, whichever form the modules show.
    """

    def __init__(self, model: nn.Module, what: str) -> None:
        """Find and name everything; adopts changes of the parameters.

        `what` begins error messages, as "load_safetensors can't run".
        """
        select_states(model, recurse=True)
        check_model_is_idle(model, what)
        check_names(model)
        found = set(params_by_fqn(model).values())
        handles = handles_of(model)
        for handle in handles:
            if handle.shown.scope is not None or handle.shown.is_unsharded:
                raise RuntimeError(
                    f"{what} while unit '{handle.name}' shows full parameters. Call it outside "
                    "unshard_params, and after reshard(module)."
                )
            handle.adopt_changes()
        order = {handle: number for number, handle in enumerate(handles)}
        # The managed parameters in the model, in the order of the handles
        self.sharded = sorted(found, key=lambda param: (order[param.handle], param.index))
        # Those with a parameter in the model, also of units outside of it
        self.handles = list(dict.fromkeys(param.handle for param in self.sharded))
        managed = {id(each.sharded) for handle in handles for each in handle.shown.form.every}
        self.others = _find_others(model, managed)  # all other parameters, and all buffers
        self._model = model
        self._computed: dict[str, Tensor] = {}

    def ranks(self, group: dist.ProcessGroup | None) -> Ranks:
        """Return the ranks that share the model, or the ranks of a group."""
        groups = mesh_groups(self.handles) if group is None else [group]
        return Ranks(groups, self.handles[0].shard_group.device)

    def check_none_stays_meta(self, given: Container[str]) -> None:
        """Check that everything on the meta device will get values, given or computed."""
        lost = [
            each
            for each in self.all
            if each.is_meta and not (each.is_persistent and any(n in given for n in each.names))
        ]
        self._computed = _compute_buffers(self._model, lost)
        names = [each.names[0] for each in lost if each.names[0] not in self._computed]
        if names:
            raise ValueError(
                f"{names} are on the meta device, and the checkpoint does not have them (buffers "
                "that are not persistent are in none). Call model.to_empty(device=...) and "
                "initialise them, for example by reset_parameters(), before loading the rest."
            )

    def fill_computed(self, device: torch.device) -> None:
        """Give buffers on the meta device the values that `check_none_stays_meta` has computed."""
        for other in self.others:
            if other.is_meta and other.names[0] in self._computed:
                other.materialize(device).copy_(self._computed[other.names[0]])

    @property
    def all(self) -> Sequence[ManagedParam | OtherTensor]:
        """All parameters and buffers."""
        return [*self.sharded, *self.others]

    def by_name(self) -> dict[str, ManagedParam | OtherTensor]:
        """Return everything that belongs in a state dict, under each of its names."""
        return {name: each for each in self.all if each.is_persistent for name in each.names}


def _compute_buffers(
    model: nn.Module, lost: Iterable[ManagedParam | OtherTensor]
) -> dict[str, Tensor]:
    """Return values of buffers on the meta device by name, where their modules can compute them.

    A module without parameters computes its buffers by its own `reset_parameters`, or by the
    `_init_weights` of a model of transformers around it. It runs on a copy on the CPU; a buffer
    counts only if it was written.
    """
    found: dict[str, Tensor] = {}
    modules = {
        id(module): module
        for each in lost
        if isinstance(each, OtherTensor)
        for module, _ in each.places
        if next(module.parameters(), None) is None
    }
    paths = {id(module): path[:-1] for path, module in prefixed_modules(model)}
    for number, module in modules.items():
        initialise = _find_initialisation(model, paths[number], module)
        if initialise is None:
            continue
        copied = copy.copy(module)
        shapes = {key: each for key, each in buffers_of(module).items() if each is not None}
        empty = {k: torch.empty(v.shape, dtype=v.dtype, device=HOST) for k, v in shapes.items()}
        set_buffers(copied, dict(empty))
        with torch.no_grad():
            initialise(copied)
        for key, value in copied.named_buffers(recurse=False):
            if value is not empty.get(key) or version_of(value) > 0:
                found[canonical(f"{paths[number]}.{key}").lstrip(".")] = value
    return found


def _find_initialisation(
    model: nn.Module, path: str, module: nn.Module
) -> Callable[[nn.Module], object] | None:
    """Return what computes a module's buffers, given a copy of it."""
    if callable(getattr(module, "reset_parameters", None)):
        return methodcaller("reset_parameters")
    parts = path.split(".")
    for length in range(len(parts) - 1, -1, -1):
        around = model.get_submodule(".".join(parts[:length]))
        if callable(method := getattr(around, "_init_weights", None)):
            return cast(Callable[[nn.Module], object], method)
    return None


def check_model_is_idle(model: nn.Module, what: str) -> None:
    """Check that no forward or backward of the model is running; `what` begins the message."""
    for context in dict.fromkeys(state.context for state in get_states(model)):
        if context is not None:
            check_is_idle(context, what)


def _find_others(model: nn.Module, managed: set[int]) -> list[OtherTensor]:
    found: dict[int, OtherTensor] = {}
    for name, module, key in iter_slots(model):
        tensor = parameters_of(module).get(key, buffers_of(module).get(key))
        if tensor is None or id(tensor) in managed:
            continue
        each = found.setdefault(id(tensor), OtherTensor(tensor))
        each.places.append((module, key))
        is_hidden = key in non_persistent_buffers_of(module)
        if not is_hidden and not each.is_persistent:
            each.names, each.is_persistent = [], True  # only names in state dicts count
        if is_hidden != each.is_persistent:
            each.names.append(canonical(name))
    return list(found.values())
