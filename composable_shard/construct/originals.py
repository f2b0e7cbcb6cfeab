"""`Plan`: the parameters that a new unit will manage or borrow, and all that a call will change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard.comm import ShardGroup
from composable_shard.construct.split_by_hand import PlainPart
from composable_shard.dtensors import is_dtensor
from composable_shard.flat_param import (
    FORMS,
    AskedForm,
    Extension,
    FlatParamHandle,
    ModuleItems,
    ParamEntry,
    Slot,
    find_slots,
)
from composable_shard.layout import block_numel, is_owned
from composable_shard.options import Granularity, ReshardAfterForward, UnitOptions
from composable_shard.runtime import ReshardPolicy

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


@dataclass(slots=True)  # a plan may have 100,000: slots save objects for the collector
class Original:
    """A parameter that the new unit will manage."""

    param: nn.Parameter
    fqn: str
    place: ModuleItems  # the module in which it was found first, as `name`
    name: str
    further_slots: tuple[Slot, ...] = ()  # places in other modules that share it
    is_kept: bool = False  # in a module that computes in the main dtype
    granularity: Granularity = "element"
    owner: int = 0  # the rank that gets it whole, if `is_owned`
    main_dtype: torch.dtype | None = None  # of the shard, if not the parameter's
    extension: Extension | None = None  # for its class, [Note: Extended gathers]
    plain_part: PlainPart | None = None  # how a plain parameter lies on a mesh, if it is a part

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Every place that shows the parameter."""
        return find_slots(self.place, self.name) + self.further_slots

    @property
    def dense(self) -> Tensor:
        """The data to shard: the parameter's, or its local part for a DTensor."""
        values = self.sized
        return values.detach() if self.extension is None else self.extension.values_of(values)

    @property
    def sized(self) -> Tensor:
        """The parameter (of a DTensor its local part), before an extension is unwrapped."""
        return values_of(self.param)

    @property
    def nbytes(self) -> int:
        """Bytes of the data, in the dtype of the shard."""
        return self.sized.numel() * (self.main_dtype or self.param.dtype).itemsize

    @property
    def is_owned(self) -> bool:
        """Whether one rank gets the parameter whole."""
        return is_owned(self.granularity)

    def strip(self) -> None:
        """Remove attributes of the parameter's own class, which it is about to lose."""
        if self.extension is not None:
            for name in vars(self.extension.wrap(self.dense)):
                vars(self.param).pop(name, None)

    def give_to(self, owner: int) -> None:
        """Set the rank that gets the parameter whole."""
        self.owner = owner

    @property
    def block_numel(self) -> int:
        """Consecutive elements, in memory order, that stay together."""
        if self.granularity == "element":
            return 1
        return block_numel(self.dense, self.granularity)

    @property
    def tensor_parallel(self) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
        """The mesh and placements of a DTensor or of a part of one; None for other parameters."""
        if (part := self.plain_part) is not None:
            return part.mesh, part.own_placements
        if type(self.param) is nn.Parameter or not is_dtensor(self.param):
            return None
        return self.param.device_mesh, tuple(self.param.placements)

    @property
    def shape(self) -> torch.Size:
        """The logical shape: of a part, that of the whole."""
        part = self.plain_part
        return self.param.shape if part is None else part.whole_shape(self.param)


@dataclass
class Borrowed:
    """A parameter of another unit that the new unit shows too."""

    handle: FlatParamHandle
    entry: ParamEntry
    slots: tuple[Slot, ...] = ()


@dataclass
class Plan:
    """All that one `fully_shard` call is going to change; nothing has been changed yet."""

    modules: list[nn.Module]
    walks: list[list[tuple[str, nn.Module]]]  # what `named_modules_in` returns of each of them
    originals: list[Original]
    borrowed: list[Borrowed]
    unmanaged_modules: list[nn.Module]
    options: UnitOptions
    reshard_after_forward: ReshardAfterForward = None  # for the ranks that share the unit
    kept_modules: list[nn.Module] = field(default_factory=list)  # compute in the main dtype
    ignored: list[Slot] = field(default_factory=list)  # places of `ignored_params`
    policy: ReshardPolicy = field(init=False)  # how much the unit keeps, once that is chosen

    def choose_policy(self, shard_group: ShardGroup) -> None:
        """Choose how much is kept between forward and backward; call it on all ranks."""
        self.policy = ReshardPolicy(self.reshard_after_forward, shard_group)

    @property
    def form(self) -> AskedForm:
        """What users hold at rest."""
        return FORMS[self.options.form]


def values_of(param: nn.Parameter) -> Tensor:
    """Return a parameter's values; for a DTensor the local values."""
    if type(param) is nn.Parameter:
        return param
    values = param.detach()
    return values.to_local() if is_dtensor(values) else values
