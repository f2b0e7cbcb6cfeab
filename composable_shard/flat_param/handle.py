"""`FlatParamHandle`: sole owner of one flat parameter's storage and metadata."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from composable_shard.comm import Streams, enter_setting
from composable_shard.flat_param.entries import ParamEntry, zero_gaps
from composable_shard.flat_param.form import OriginalForm
from composable_shard.flat_param.full_values import HOLDS_GRADIENTS, IS_SCRATCH, STALE, FullValues
from composable_shard.flat_param.gradients import in_layout
from composable_shard.flat_param.initial_values import InitialValues
from composable_shard.flat_param.memory import MemoryPlan
from composable_shard.flat_param.param_classes import copy_unsharded
from composable_shard.flat_param.readers import HIDDEN_ALIAS
from composable_shard.flat_param.shown import SHARDED, ShownParams, let_stand
from composable_shard.flat_param.storage import alloc_storage, free_storage
from composable_shard.flat_param.user_hooks import adopt_hooks
from composable_shard.layout import FlatLayout
from composable_shard.options import Granularity, ShardingStrategy, UnitSettings
from composable_shard.tensor import (
    FlatShard,
    FlatShardOfDTensor,
    ParamLabel,
    ShardSpec,
    UnitLabel,
    WriteGuard,
    step_hooks,
)
from composable_shard.torch_private import (
    DisableTorchFunctionSubclass,
    version_of,
    will_run_node,
)

GradientHook = Callable[["FlatParamHandle", int], None]


class FlatParamHandle:
    """One flat parameter: parameters of a unit that share dtypes, requires_grad and mesh.

    At rest it holds this rank's shard. `unshard` gathers the full values into one buffer, and
    `full.free` frees them; `shown` decides which of the two forms the modules show. Gradients are
    packed one by one into one buffer and reduced together. Functions that involve several of
    these parts are here.

    Attributes:
        shard: This rank's part of the values.
        full: The full values: their buffer and its state.
        shown: The parameters that modules show.
        grads: The gradients of a backward.
        guard: Counts the writes to the shard.
        label: The unit's name and number, for messages.
        layout: The place of each parameter, and the owners of whole ones.
        granularities: How finely each parameter may be cut.
        shard_group: The ranks that share the flat parameter, and the ranks that hold copies.
        strategy: What each rank keeps.
        settings: The unit's, which the setters have changed.
        entries: The managed parameters, in order.
        requires_grad: Whether any of the parameters is trainable.
        initial: Checksums of the values that `fully_shard` found, until the ranks are compared.
        has_fixed_owners: Whether the owners of whole parameters are final.
        is_attached: The unsharded parameters and their hooks exist.
        on_gradient: Called for gradients that `grads.pack_direct` doesn't take, see `attach`.
        drop_gradient: Called for each gradient that the user drops, see `attach`.
        keep_gradients: Called for gradients that the user may have set, see `attach`.
        is_sharded: False if each rank holds everything: then nothing is gathered.
        is_kept: The unsharded buffer is never freed, see [Note: Kept buffers].
        memory: The dtypes and devices of the shard and the full values; allocates both.
    """

    def __init__(  # noqa: PLR0913 -- all that defines a handle, each by name
        self,
        params: Sequence[Tensor],
        memory: MemoryPlan,
        layout: FlatLayout,
        specs: Sequence[ShardSpec],
        granularities: Sequence[Granularity],
        requires_grad: bool,
        strategy: ShardingStrategy,
    ) -> None:
        """Allocate the shard and copy this rank's part of `params` into it; changes no module.

        The tensors are dense (local ones of DTensors), without a graph, on one device, and of one
        dtype unless the precision has a main dtype.
        """
        self.memory = memory
        self.shard_group = shard_group = memory.shard_group
        self.strategy = strategy
        self.settings = UnitSettings()
        self.requires_grad = requires_grad
        self.has_fixed_owners = False
        self.label = UnitLabel(specs[0].label.fqn)
        self.layout = layout
        self.granularities = tuple(granularities)
        self.entries: list[ParamEntry] = []
        self._reset(OriginalForm())
        device = params[0].device if params[0].is_meta else shard_group.device
        main_dtype = memory.precision.main_dtype or params[0].dtype
        self.shard, self.full = self.memory.allocate(layout, self.guard, main_dtype, device)
        self.full.label = self.grads.reduction.label = self.label
        # Not as views of the shard, on each of which autograd's notes are 290 bytes.
        parts, guard = self.grads.pieces.split(self.shard.values), self.guard
        for param, spec, part in zip(params, specs, parts, strict=True):
            part.copy_(spec.slice(param))
            kind = FlatShardOfDTensor if spec.is_shown_as_dtensor else FlatShard
            sharded = kind(part, spec, guard=guard, requires_grad=requires_grad, is_param=True)
            self.entries.append(ParamEntry(sharded, spec, shard_view=part))

    def _reset(self, form: OriginalForm) -> None:
        """Set the initial state of a new handle, or of a copy."""
        group, facts = self.shard_group, self.strategy.facts
        self.is_sharded = group.size > 1
        self.is_kept = self.memory.is_kept
        self.guard = WriteGuard(weakref.ref(self))
        self.shown = ShownParams(self.entries, form, self.guard)
        is_persistent = facts.keeps_gradients(group.size, group.num_ranks)
        self.grads = self.memory.make_gradients(
            self.layout, self.shown, is_persistent=is_persistent
        )
        self.initial = InitialValues(self.guard)
        step_hooks.keep_for(self, has_owned=self.has_owned)
        self.is_attached = False
        self.on_gradient: GradientHook | None = None
        self.drop_gradient: GradientHook | None = None
        self.keep_gradients: Callable[[FlatParamHandle], None] | None = None

    def __repr__(self) -> str:
        """Say which unit's it is, what it holds, and where this rank is among the ranks."""
        group, numel = self.shard_group, self.layout.unpadded_numel
        return (
            f"<FlatParamHandle '{self.name}': {len(self.entries)} parameters, {numel:,} elements, "
            f"rank {group.rank} of {group.size}, {self.full.state.name}>"
        )

    @property
    def local_shard(self) -> Tensor:
        """This rank's shard, shape `(own_numel,)`: its elements in `layout.shard_range`.

        To read. Writes to it are not seen: full values that a policy keeps stay as they were. Write
        to the parameters.
        """
        self.guard.set_handed_out()  # a save must not read it later
        return self.shard.values

    @property
    def unsharded(self) -> Tensor:
        """The full flat parameter, shape `(layout.padded_numel,)`; no storage while freed."""
        return self.full.buffer

    @property
    def name(self) -> str:
        """The unit's name, for messages."""
        return self.label.name

    @property
    def has_owned(self) -> bool:
        """Whether one of several ranks owns each parameter."""
        return self.is_sharded and bool(self.layout.owners)

    def labels(self) -> list[ParamLabel]:
        """Return the labels of all that views the shard."""
        return [each.spec.label for each in self.shown.form.every]

    def describe_entries(self, options: str) -> list[str]:
        """Return a line for each parameter with all that the ranks must agree on."""
        group = self.shard_group
        # Replicas are about to get the first copy's values, and only owners write their parameters.
        is_split = group.size > 1 and group.num_replicas == 1 and not self.layout.owners
        if is_split and self.guard.num_writes:
            options += ", written since it was sharded or copied, which all ranks must do"
        lines = []
        for entry, granularity in zip(self.entries, self.granularities, strict=True):
            cut = "" if granularity == "element" else f" granularity={granularity!r}"
            lines.append(
                f"'{entry.label}' shape {tuple(entry.spec.shape)} {self.shard.values.dtype} "
                f"requires_grad={entry.sharded.requires_grad}{cut} {options}"
            )
        return lines

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """Keep what defines the flat parameter; the copy makes buffers and hooks of its own."""
        if self.shown.state.is_fixed:
            raise RuntimeError(
                f"unit '{self.name}' can't be copied or pickled inside unshard_params, for the "
                "copy's parameters would belong to no unit. Copy it outside the scope, or its "
                "state_dict() inside."
            )
        if self.shown.is_unsharded:
            raise RuntimeError(
                f"unit '{self.name}' can't be copied or pickled while it shows its full "
                "parameters. Call reshard(module) first, and not during its forward or backward."
            )
        return {
            "label": self.label,
            "layout": self.layout,
            "granularities": self.granularities,
            "shard_group": self.shard_group,
            "strategy": self.strategy,
            "settings": self.settings.of_copy(),
            "memory": self.memory,
            "requires_grad": self.requires_grad,
            "has_fixed_owners": self.has_fixed_owners,
            "entries": [(entry.sharded, entry.slots) for entry in self.entries],
            "parts": (
                self.full.keep,
                self.shown.home,
                self.shown.number,
                self.shown.form,
            ),
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParamHandle:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        for entry, own in zip(twin.entries, self.entries, strict=True):
            entry.unsharded = copy_unsharded(own.unsharded, memo)
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        keep, home, number, form = state.pop("parts")
        self.__dict__.update(state)
        self.entries = [
            # The parameter's own spec: optimizers compare specs by identity first.
            ParamEntry(sharded, sharded._shard_spec, slots)
            for sharded, slots in state["entries"]
        ]
        self._reset(form)
        self.take_settings(self.settings)
        self.shown.set_home(home, number)
        with torch.inference_mode(False), torch.no_grad():
            self.rebuild_shard()
        self.full.label = self.grads.reduction.label = self.label
        self.full.keep_with(keep)

    # The parameters, kept in step with the buffers

    def attach(
        self,
        on_gradient: GradientHook,
        drop_gradient: GradientHook,
        keep_gradients: Callable[[FlatParamHandle], None],
    ) -> None:
        """Build the unsharded parameters and their hooks; the entries' slots are final now.

        Args:
            on_gradient: Called as `on_gradient(handle, index)` when the full gradient of a
                parameter has been accumulated, in the thread that runs the backward; not for those
                that `grads.pack_direct` takes: all but the first of a round in most backwards.
            drop_gradient: Called likewise when the user drops the gradient of a full parameter.
            keep_gradients: Called where the user may have set gradients of full parameters.
        """
        self.on_gradient, self.drop_gradient = on_gradient, drop_gradient
        self.keep_gradients = keep_gradients
        # Inference tensors could never be trained, whatever context the first call runs in.
        with torch.inference_mode(False), torch.no_grad():
            self._build_unsharded_params()
        self.is_attached = True  # last: an interrupt leaves it to `adopt_changes`

    def _build_unsharded_params(self) -> None:
        full = self.full
        if self.shard.values.is_meta:
            return
        full.free()
        alloc_storage(full.buffer)  # views of a storage without memory can't be made
        full.params.build(self.entries)
        full.choose_source()
        self.shown.index_slots()
        if not self.is_kept:
            # Before the gradients' memory is made, so that this call never holds both.
            free_storage(full.buffer)
        # Weak: the leaf holds its hooks where the garbage collector cannot see them, and the
        # handle holds the leaf; one strong reference would leak the unit for ever.
        full.params.hook_gradients(weakref.ref(self))
        self.shown.notes = full.params.aliases
        let_stand(self.shown)
        self.requires_grad = any(self.shown.form.trainable_flags())
        if self.requires_grad or not self.grads.is_idle:
            self._bind_gradients()
        else:
            self.grads.release()

    def _bind_gradients(self) -> None:
        before = self.grads
        layout = _gradient_layout(self)
        self.grads = before if layout == before.layout else in_layout(layout, before)
        # The policy's `reduce_dtype`; by default the dtype of compute.
        dtype = self.memory.precision.reduces_in(self.shard.values.dtype)
        self.grads.bind(self.full, dtype, is_pinned=self.memory.is_pinned, before=before)

    def adopt_changes(self) -> None:
        """Adopt changes that were made to the parameters: data, dtype, device, flags, hooks.

        Called before a forward, and when a backward begins or reaches the unit. Users' settings
        outlive a rebuild, because they are read from the sharded parameters each time.

        `.to()` keeps the Parameter object and gives it other data. The new slices are copied into a
        new flat shard, which the parameters become views of again.

        Raises:
            RuntimeError: If the parameters now differ in dtype or device, or one is no shard.
        """
        if not self.is_attached and self.on_gradient is not None:
            self._rebuild()  # an interrupt cut off the last one
        for each in self.shown.at_rest:
            if not isinstance(each.sharded, FlatShard):
                raise RuntimeError(
                    f"parameter '{each.label}' was exchanged for another tensor at rest, as by "
                    "torch.utils.swap_tensors or an assignment to a parametrized weight. Do it "
                    "inside unshard_params(module), which keeps the new values."
                )
            if each.sharded._local is not each.shard_view:
                self._rebuild()
                break
        if self.shown.state is not SHARDED:
            self._adopt_shown_flags("while its full values were shown")
        if self.guard.has_new_attributes and self.is_attached:
            self._adopt_requires_grad()
            adopt_hooks(self.shown)
            # A backward keeps buffers whose parameters were frozen: the next forward frees them.
            self.guard.set_new_attributes(self.guard.is_backward_running)

    def _adopt_shown_flags(self, where: str) -> None:
        changed = self.full.params.changed_flags()
        if changed:
            form = self.shown.form
            at_rest = form.trainable_flags()
            self.full.params.set_flags(at_rest)
            flags = [changed.get(index, flag) for index, flag in enumerate(at_rest)]
            form.check_flags(flags, self.name, where)
            self.full.params.set_flags(flags)
            form.set_flags(flags)

    def _adopt_requires_grad(self) -> None:
        shown, flags = self.shown, self.shown.form.trainable_flags()
        if shown.agreed_flags is not None and flags != shown.agreed_flags:
            groups = self.shard_group.group, *self.shard_group.joint_groups
            enter_setting(f"requires_grad of unit '{self.name}' set to {flags}", groups)
            shown.remember_agreed_flags()
        shown.form.follow_flags(flags)
        # Keep buffers until the backward's end: they hold gradients that it reduced or keeps.
        keeps_buffers = self.guard.is_backward_running and self.requires_grad
        self.requires_grad = any(flags) or keeps_buffers
        if self.shard.values.is_meta:
            return
        self.full.params.set_flags(flags)
        is_fit = self.grads.packing is not None and _gradient_layout(self) == self.grads.layout
        if self.requires_grad and not is_fit:
            with torch.inference_mode(False), torch.no_grad():
                self.grads.add_result()
                self.grads.move_out()
                self._bind_gradients()
        if self.grads.is_persistent and not self.requires_grad and self.grads.is_idle:
            self.grads.release()

    def _rebuild(self) -> None:
        self.memory.check(self.shown.at_rest, self.name)
        self.initial.forget()
        self.is_attached = False
        let_stand(self.shown)  # where modules show the full parameters, which are asked below
        with torch.inference_mode(False), torch.no_grad():
            self.rebuild_shard(self.full)  # each old slice is freed as its parameter leaves it
            if self.on_gradient is not None:
                self._build_unsharded_params()
        self.guard.set_new_attributes(True)
        self.is_attached = self.on_gradient is not None  # last, as in `attach`

    def rebuild_shard(self, before: FullValues | None = None) -> None:
        """Copy the parameters shown at rest into a new flat shard; all become views of it.

        The new full values replace those `before`.
        """
        at_rest = self.shown.at_rest
        local = at_rest[0].sharded._local
        shard, full = self.memory.allocate(self.layout, self.guard, local.dtype, local.device)
        values = shard.values
        for each in at_rest:
            each.slice_of(values).copy_(each.sharded._local)
        # After to_empty() one parameter for all holds arbitrary values between the parameters.
        zero_gaps(values, self.layout, self.shard_group.rank)
        if before is not None:
            full.take_over(before)
        self.shard, self.full = shard, full
        for each in self.shown.form.every:
            each.view_in(values, self.guard)

    # Functions that involve several parts

    @property
    def needs_gather(self) -> bool:
        """Whether `unshard` issues a gather."""
        full = self.full
        return full.is_sharded and not full.is_current and not self.shown.state.is_fixed

    def unshard(self, streams: Streams | None = None, when: str = "unshard") -> None:
        """Start gathering the full values; no-op while they are there and no shard was written.

        Issues one all-gather of `layout.padded_numel` elements, in the dtype in which shards
        travel, on the unshard stream if there is one. `full.wait` must follow before the parameters
        are used. If the allocation or the collective fails, the handle is as before.

        Args:
            streams: The side streams of an accelerator.
            when: What the values are for, the same on all ranks.
        """
        full = self.full
        if full.writes == self.guard.num_writes and full.state is not STALE:
            return  # `full.is_current`, inlined for most calls
        if full.is_whole or self.shown.state.is_fixed:
            return
        if full.state is HOLDS_GRADIENTS or full.state is IS_SCRATCH:
            # Another use in this backward needs the values while their storage serves a reduction.
            self.grads.add_result()
            self.grads.move_out()
        full.gather(streams, when)

    def will_get_gradient(self) -> bool:
        """Return whether the running backward pass accumulates a gradient of any parameter."""
        if not self.requires_grad:
            return False
        for entry in self.entries:
            param = entry.unsharded
            # It raises where autograd.grad() differentiates with respect to the parameter.
            with suppress(RuntimeError), DisableTorchFunctionSubclass():  # [Note: Kept objects]
                if param is not None and param.requires_grad:
                    node = get_gradient_edge(param).node
                    if node is not None and will_run_node(node):
                        return True
        return False

    def adopt_shown_changes(self, where: str, *, keeps: bool = False) -> bool:
        """Adopt or report changes of the full parameters, which modules stop showing.

        `requires_grad_()` takes effect now, and edits that will be lost cause a warning. Returns
        whether edits were written back.

        Args:
            where: When the changes were made, for messages.
            keeps: Whether to write edits back, if the unit can.

        Raises:
            RuntimeError: If a module shows another object in the place of one of them; if some
                parameters of a flat parameter were frozen and others not, then all are as before.
        """
        self.shown.check_registered()
        params = self.full.params
        if params.aliases.has_new_flags or params.has_unwatched:
            self._adopt_shown_flags(where)
        if params.is_locked:
            return False  # users could not edit them, or gradients overwrote them
        is_edited = [*map(version_of, params.watched)] != params.versions
        is_edited = is_edited or bool(params.readers.bits & HIDDEN_ALIAS)
        if not is_edited or not params.edited(params.versions):
            return False
        if keeps and self.full.can_write_back:
            return self.full.keep_edits()
        params.warn_of_edits(where)
        return False

    def fix_owners(self) -> None:
        """Make the owners of whole parameters final."""
        self.has_fixed_owners = True

    def take_settings(self, settings: UnitSettings) -> None:
        """Follow the settings of the unit from now on."""
        self.settings = settings
        self.grads.reduction.follow(settings)

    def check_ready(self) -> None:
        """Check that the shard is on a real device, and pinned if it was made so.

        Raises:
            RuntimeError: Naming the parameters that are still on the meta device, or the unit.
        """
        if self.shard.values.is_meta:
            names = [str(entry.label) for entry in self.entries]
            device = "'cpu'" if self.memory.offload.is_active else "..."
            raise RuntimeError(
                f"parameters {names} are on the meta device. Call model.to_empty(device={device}) "
                "and initialise them (reset_parameters()) or load them before the first forward."
            )
        self.memory.check_pinned(self.shard.values, self.name)


def _gradient_layout(handle: FlatParamHandle) -> FlatLayout:
    """Return the layout without frozen parameters, except any whose gradients wait."""
    form, grads = handle.shown.form, handle.grads
    flags = form.trainable_flags()
    if handle.guard.is_backward_running or not grads.is_idle:
        flags = list(map(or_, flags, map(bool, grads.layout.numels)))
    return form.gradient_layout(handle.layout, flags)


def handle_of(param: FlatShard) -> FlatParamHandle | None:
    """Return the handle of a sharded parameter; None for a gradient, a copy or a result."""
    guard = param._guard
    owner = None if guard is None or guard.owner is None else guard.owner()
    return owner if isinstance(owner, FlatParamHandle) else None
