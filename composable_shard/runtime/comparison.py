"""The comparison of the ranks' models, options and settings before the first step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from composable_shard.comm import FlagReduction, Ranks, ShardGroup, compare_units
from composable_shard.flat_param import FORMS, FlatParamHandle, has_gradient_hooks
from composable_shard.options import UnitSettings
from composable_shard.runtime.unit import ShardState, StateRef
from composable_shard.runtime.whole_model import raise_unmanaged

_Groups = tuple[dist.ProcessGroup, ...]


def check_agreement(states: list[ShardState], unmanaged: list[str]) -> None:
    """Compare names, shapes, dtypes and options of all units over their data-parallel ranks.

    Also compares the buffers that are broadcast, the trainable parameters that no unit manages, and
    the initial values.

    Issues one all-gather of 32 bytes for each process group. If it finds a difference, the
    descriptions themselves are exchanged, as JSON. If any rank has hooks on gradients, one
    all-reduce of a byte for each handle informs all ranks. [Note: Early gradients]

    Raises:
        RuntimeError: The same on all ranks of the mesh, naming the first difference and the ranks,
            or the parameters that no unit manages.
    """
    meshes: dict[_Groups, _Mesh] = {}

    def mesh_of(shard_group: ShardGroup) -> _Mesh:
        return meshes.setdefault(shard_group.joint_groups, _Mesh(shard_group.ranks))

    for state in states:
        if state.before_forward is not None:
            lines = mesh_of(state.before_forward.shard_group).lines
            lines.extend(
                f"{line} {describe_options(state, state.settings)}"
                for line in state.before_forward.describe()
            )
        for handle in state.handles:
            mesh = mesh_of(handle.shard_group)
            mesh.handles.append(handle)
            mesh.lines.extend(handle.describe_entries(describe_options(state, handle.settings)))
            mesh.initial.extend(handle.initial.take())
    for mesh in meshes.values():
        mesh.lines.extend(f"'{name}' is managed by no unit" for name in unmanaged)
        # Last: a difference in what the ranks have built says more.
        mesh.lines.extend(f"{h.label.text} of the units over these ranks" for h in mesh.handles)
        has_hooks = [has_gradient_hooks(handle.shown) for handle in mesh.handles]
        any_hooks = compare_units(mesh.ranks, mesh.lines, any(has_hooks), mesh.initial)
        mesh.set_first_calls()
        if any_hooks:
            flags = FlagReduction(
                [
                    (handle.shard_group, [int(flag)])
                    for handle, flag in zip(mesh.handles, has_hooks, strict=True)
                ],
                highest=1,
            )
            for handle, (flag,) in zip(mesh.handles, flags.finish(), strict=True):
                handle.shown.set_early_hooks(bool(flag))
    if unmanaged:
        raise_unmanaged(unmanaged, states)


def describe_options(state: ShardState, settings: UnitSettings) -> str:
    """Return the options that all ranks must agree on.

    The settings are those of one of the unit's handles, which may differ from the unit's where a
    setter was interrupted.
    """
    text = (
        f"in unit '{state.name}' strategy={state.options.strategy.name} "
        f"reshard_after_forward={settings.reshard_after_forward}{state.options.describe()}"
    )
    changed: dict[str, object] = settings.changed() | {
        "changed_registration": [
            handle.name
            for handle in state.handles
            if handle.shown.form.has_names is not FORMS[state.options.form].has_names
        ],
        "forward_prefetch": _names_of(state, settings.forward_prefetch),
        "backward_prefetch": _names_of(state, settings.backward_prefetch),
    }
    return text + "".join(f" {name}={value}" for name, value in changed.items() if value)


def _names_of(state: ShardState, chosen: tuple[StateRef, ...] | None) -> str:
    """Return the names of units, "" where the user has chosen none."""
    return "" if chosen is None else str([each.name for each in state.in_tree(chosen)])


@dataclass
class _Mesh:
    """Descriptions of units that must be equal on all ranks of some process groups."""

    ranks: Ranks
    handles: list[FlatParamHandle] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    initial: list[tuple[str, int | None]] = field(default_factory=list)

    def set_first_calls(self) -> None:
        """Note the number of the collective in which the ranks have just compared the handles."""
        number = self.ranks.num_collectives
        for handle in self.handles:
            handle.label.set_first_call(number)
