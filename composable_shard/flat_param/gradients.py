"""`FlatGradients`: from a unit's unsharded gradients, one by one, to the published `.grad`s."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, or_

import torch
from torch import Tensor, is_grad_enabled, mul

from composable_shard.comm import Streams, trace
from composable_shard.flat_param.form import Cutter
from composable_shard.flat_param.full_values import (
    CURRENT,
    GATHERING,
    HOLDS_GRADIENTS,
    STALE,
    FullValues,
)
from composable_shard.flat_param.grad_pieces import (
    GradientMemory,
    GradPieces,
    Packing,
    check_has_place,
    copy_arrived,
    local_gradient,
    move_shard,
    packing_scale,
    write_gradient,
)
from composable_shard.flat_param.gradient_reduction import FlatReduction, ScratchPool
from composable_shard.flat_param.readers import BACKWARD, HIDDEN_ALIAS, LATE_GRAPH
from composable_shard.flat_param.round import IN_BUFFER, IN_VALUES, NONE, REDUCING, Round
from composable_shard.flat_param.shown import ShownParams
from composable_shard.flat_param.storage import alloc_storage, free_storage
from composable_shard.layout import FlatLayout
from composable_shard.tensor import FlatShard, own_gradient, refuse_graphs, set_gradient
from composable_shard.torch_private import DisableTorchFunctionSubclass, version_of


class FlatGradients:
    """The gradients of one flat parameter, from autograd to `.grad` of the parameters at rest.

    A *round* is the gradients from the first one until the reduction that takes them. Where their
    bytes are:

    1. As autograd produces one: full size, in autograd's memory, as `.grad` of the full parameter.
       A hook of the parameter packs it at once and sets that `.grad` to None.
    2. Packed, times `packing.scale`. The first gradient chooses the place of the whole round:
       - In the places of the values, in `full.buffer` and its dtype (`IN_VALUES`), where
         [Note: Packing in place] allows it: with `FULL_SHARD` in most backwards.
       - Else in `_memory.buffer`, in the reduce dtype (`IN_BUFFER`): where values are kept, in a
         backward that doesn't reduce, in the unit's backwards until one has published, after a
         forward with a new number of nodes, and where dtypes differ and the reduce dtype is not the
         wider one.
    3. From `issue` on the reduction reads them there (`REDUCING`). If they are in the places of the
       values and the reduce dtype is wider, `issue` casts them into `_memory.buffer` first, and
       frees the values' memory. The result goes to `reduction.output`, this rank's elements alone.
    4. After `free_input`, at the next reduction of the tree or at the end of the backward, that
       memory is free, and the result, in the main dtype, is in `reduced`. With a second stage it
       stays in `reduction.output` until `add_result`.
    5. After `publish`, at the end of the backward: `.grad` of the parameters at rest, which are
       views of what `reduced` was. To a `.grad` that is there already it is added in place.

    Until 5 `.grad` of the parameters at rest is what earlier backwards have published, if anything.
    Outside of 1 the `.grad` of full parameters, as users see it, stands for the same
    (`UnshardedParameter.grad` of param_classes.py).

    A second round in the same backward (a gradient that arrives late) adds to `reduced`. With a
    strategy that keeps gradients the buffer stays, [Note: Persistent gradients].

    Gradients *wait* for a later backward in two ways. A backward that doesn't reduce leaves them
    *unsynced*: in `_memory.buffer`, full size on each rank, and the round goes on until a backward
    reduces it. A backward that postpones the second stage leaves them *deferred*: reduce-scattered
    and divided by the number of all ranks, in `reduction.deferred`; the sum over the copies is
    missing. At rest a PendingGradient stands for either as `.grad`, [Note: Pending gradients].

    Attributes:
        arrived: For each parameter, whether its gradient is in the buffer.
        was_used: Whether it got a gradient in an earlier round since the last `publish`.
        places: Of the round's gradients, in dense shapes: `packing.value_places`, or those of
            `_memory`. None while no gradient is packed.
        reduced: Shape `(own_numel,)`, this rank's elements, that `publish` has not taken yet, or
            None.
        reduction: Reduces the buffer.
        is_persistent: The buffer stays, see [Note: Persistent gradients].
        is_direct: Gradients go into the round as they arrive, see `set_direct`.
        is_unsynced: A backward has left gradients unsynced, on some rank at least. A later one must
            reduce this on every rank, even where a rank has dropped the gradients since.
        has_graph: Gradients came with a graph (create_graph), which is not kept.
        marks: (parameter, indices) pairs whose `.grad` is a PendingGradient: `mark_pending` adds
            them as a backward ends, `unmark_pending` takes them away as the next one begins, and
            `.grad` is then what was published before, if anything.
        packing: How gradients are packed; None without buffers for them.
        layout: The parameters' layout, in which frozen ones may have no elements.
        pieces: Cuts the reduced shard into the parameters' gradients.
    """

    def __init__(
        self,
        layout: FlatLayout,
        reduction: FlatReduction,
        shown: ShownParams,
        *,
        is_persistent: bool,
    ) -> None:
        self._shown = shown
        self._full: FullValues | None = None  # its buffer may be used too; None before `bind`
        self.reduction = reduction
        self.is_persistent = is_persistent
        self.layout = layout
        self.pieces = GradPieces(layout, reduction.shard_group.rank)
        self.arrived, self.was_used = ([False] * len(layout.numels) for _ in range(2))
        self.reduced: Tensor | None = None
        self.is_unsynced = self.is_direct = self.has_graph = False
        self.marks: list[tuple[FlatShard, list[int]]] = []
        self._memory = GradientMemory()
        self.places: list[Tensor] | None = None
        self.packing: Packing | None = None

    def bind(
        self,
        full: FullValues,
        reduce_dtype: torch.dtype,
        *,
        is_pinned: bool,
        before: FlatGradients,
    ) -> None:
        """Replace the gradients' memory; drop reductions in flight, cast waiting gradients.

        Waiting gradients come from `before`: this object, or the object of another layout. None may
        lie in the place of a value: call `move_out` first.
        """
        places, arrived, was_used = before.places, before.arrived, before.was_used
        layouts, old = (before.layout, self.layout), before.packing
        shards = before.reduction.deferred, before.reduced
        self._memory = GradientMemory()  # the old one may hold pending gradients; don't reuse it
        self._forget()
        group, self._full = self.reduction.shard_group, full
        values, main_dtype = full.unversioned, full.shard.values.dtype
        self._memory.result = values.new_empty(0, dtype=main_dtype)
        self.reduction.bind(reduce_dtype, main_dtype, values.device, is_in_place=self.is_persistent)
        is_whole, is_cast = self.layout == full.shard.layout, reduce_dtype != values.dtype
        # Casting after packing gives the same values if the reduce dtype is wider. Parameters that
        # their class encodes are bytes, in which no gradient has a place.
        is_wider = torch.promote_types(values.dtype, reduce_dtype) == reduce_dtype
        fits_values = is_whole and (not is_cast or (values.is_floating_point() and is_wider))
        self._make_memory(values.new_empty(self.layout.padded_numel, dtype=reduce_dtype))
        scale, factor = packing_scale(group, reduce_dtype, is_cast=is_cast)
        self.packing = Packing(
            full.params.views,
            is_plain=is_whole
            and not any(each.spec.tensor_parallel for each in self._shown.entries),
            fits_values=fits_values,
            is_cast=is_cast,
            scale=scale,
            factor=None if scale == 1.0 else factor,
        )
        self.was_used = was_used
        self.reduction.deferred, self.reduced = (
            each if each is None else move_shard(each, *layouts, group.rank).to(self._memory.result)
            for each in shards
        )
        if places is not None and old is not None:
            alloc_storage(self._memory.buffer)
            self.places = self._memory.make_places(self._shown.entries, self.layout)
            self.arrived = arrived
            copy_arrived(self.places, places, arrived, scale / old.scale)

    def _make_memory(self, buffer: Tensor) -> None:
        ends_in_place = self.is_persistent and self.reduction.output_dtype == buffer.dtype
        part = self.layout.shard_range(self.reduction.shard_group.rank) if ends_in_place else None
        self._memory.replace(buffer, part)
        free_storage(buffer)

    def release(self) -> None:
        """Free the buffers, as all parameters are frozen; published gradients stay."""
        self._forget()
        self._memory, self._full, self.packing = GradientMemory(), None, None

    @property
    def used(self) -> list[bool]:
        """Which parameters got a gradient on this rank since the last `publish`."""
        return list(map(or_, self.was_used, self.arrived)) if any(self.arrived) else self.was_used

    @property
    def round(self) -> Round:
        """Where the round's gradients are; it moves as `ROUND_MOVES` says.

        It follows from what each move sets anyway, so a step pays nothing for it. Beside it stands
        what earlier rounds have left: `reduced`, `reduction.deferred`, and `is_unsynced`.
        """
        if self.reduction.output is not None:
            return REDUCING
        if self.places is None:
            return NONE
        packing = self.packing
        return (
            IN_VALUES if packing is not None and self.places is packing.value_places else IN_BUFFER
        )

    @property
    def waits_for_reduction(self) -> bool:
        """Whether gradients wait for a reduction, or for its second stage.

        The same on all ranks that ran the same backwards, even if some dropped gradients since.
        """
        return self.is_unsynced or self.reduction.deferred is not None

    @property
    def is_idle(self) -> bool:
        """Whether there are no gradients but those that are published."""
        return self.round is NONE and self.reduced is None and not self.waits_for_reduction

    def leave_unsynced(self) -> None:
        """Note that a backward leaves packed gradients to the reduction of a later one."""
        self.is_unsynced, self.is_direct = True, False

    # From unsharded gradients to the reduced shard

    def pack(self, index: int, *, may_overwrite: bool) -> None:
        """Move the accumulated gradient of parameter `index` into the round's buffer.

        With `may_overwrite` it may take the place of the value, see [Note: Packing in place].

        Raises:
            RuntimeError: If a nested backward has used a value that was overwritten.
        """
        entry, full, packing = self._shown.entries[index], self._full, self.packing
        unsharded = entry.unsharded
        gradient = own_gradient(unsharded)  # type: ignore[arg-type]
        if gradient is None:
            return
        assert full is not None
        assert packing is not None
        self.has_graph = self.has_graph or gradient.requires_grad
        if self.places is None and (self.is_persistent or self.reduction.output is not None):
            self._end_earlier_uses()
        # Dropped at once, so that a unit never holds its gradients twice. Not before: where the
        # round can't begin, for the last one's reduction has failed, `.grad` still holds it.
        set_gradient(unsharded, None)  # type: ignore[arg-type]
        if not packing.is_plain:
            gradient = local_gradient(gradient, entry.spec)
            check_has_place(self.layout, index, entry)
        if full.state is HOLDS_GRADIENTS and self.arrived[index]:
            raise RuntimeError(
                f"parameter '{entry.label}' was used inside and outside of a reentrant checkpoint: "
                "its recomputation ran after the value had given way to the gradient. Pass "
                "use_reentrant=False, or call fully_shard on the module that holds it."
            )
        if self.places is None:
            self._choose_place(
                in_place=may_overwrite
                and packing.fits_values
                and not full.is_kept
                and (full.state is CURRENT or full.state is STALE)
                and full.readers.may_overwrite
            )
        place = self.places[index]  # type: ignore[index]
        if self.arrived[index]:
            place.add_(gradient, alpha=packing.scale)
        else:
            write_gradient(place, gradient, packing.factor)
            self.arrived[index] = True

    def set_direct(self, flag: bool) -> None:
        """Choose whether the hooks of the full parameters call `pack_direct` first."""
        packing = self.packing
        is_plain = packing is not None and packing.is_plain
        self.is_direct = flag and self.places is not None and is_plain

    def pack_direct(self, index: int, param: Tensor) -> bool:
        """Pack a parameter's gradient into its place, or return False: `pack` must be called."""
        places, packing = self.places, self.packing
        # `arrived` already: perhaps in an earlier microbatch. `pack` adds to it.
        if places is None or packing is None or self.arrived[index]:
            return False
        with DisableTorchFunctionSubclass():  # [Note: Many getters]
            gradient = own_gradient(param)
            if gradient is None or gradient.is_sparse or is_grad_enabled():
                return False
            set_gradient(param, None)
        if packing.factor is None:
            places[index].copy_(gradient)
        else:
            mul(gradient, packing.factor, out=places[index])
        self.arrived[index] = True
        return True

    def pack_rest(self, *, may_overwrite: bool) -> None:
        """Pack gradients that no hook has packed as they came, such as those that users set between
        `unshard` and `reshard`; raise if hooks edited values.
        """
        # While the values are claimed users may set gradients.
        is_held = self._full is not None and bool(self._full.readers.claims)
        if is_held or not all(self.arrived):
            with torch.no_grad():  # gradients of create_graph have a graph, the buffer has none
                for index in range(len(self.arrived)):
                    self.pack(index, may_overwrite=may_overwrite)
        full, packing = self._full, self.packing
        if full is None or packing is None or self.places is not packing.value_places:
            return
        if packing.is_plain:
            params = full.params
            expected = [*map(add, params.versions, self.arrived)]
            if params.readers.bits & HIDDEN_ALIAS or [*map(version_of, params.watched)] != expected:
                params.check_overwritten(expected)

    def _end_earlier_uses(self) -> None:
        """Finish earlier uses of the memory that a new round writes into, if there are any."""
        if self.reduction.output is not None:
            self.add_result()
        if self.is_persistent:
            params = [each.sharded for each in self._shown.at_rest]
            if self._memory.is_lost(params):
                self._make_memory(torch.empty_like(self._memory.buffer))

    def _choose_place(self, *, in_place: bool) -> None:
        """Begin a round, or go on with it elsewhere: choose where its gradients lie."""
        if self.is_persistent and self.reduced is not None:
            # An earlier round of this backward left its result in the buffer.
            self.reduced = self.reduced.clone()
        if in_place and self._full is not None and self.packing is not None:
            self._full.hold_gradients()
            # This round's own list, to which `end_round` leaves it: values stay overwritten until
            # the next gather.
            self._full.params.aliases.overwritten = self.arrived
            self.places = self.packing.value_places
        else:
            alloc_storage(self._memory.buffer)
            own, entries = self._memory, self._shown.entries
            self.places = own.places or own.make_places(entries, self.layout)

    def move_out(self) -> None:
        """Move gradients packed in place to the gradients' memory: the values are needed again."""
        packing = self.packing
        if packing is not None and self.places is packing.value_places:
            self._choose_place(in_place=False)
            copy_arrived(self._memory.places, packing.value_places, self.arrived, 1.0)

    def issue(
        self,
        streams: Streams | None,
        scratch: ScratchPool,
        *,
        keeps_values: bool,
        is_deferred: bool = False,
    ) -> None:
        """Start reducing the packed gradients, with gradients kept by earlier microbatches.

        Issues a reduce-scatter of `layout.padded_numel` elements over the shard group, if it is
        sharded, and an all-reduce of this rank's shard over the ranks that hold copies, if any;
        on the reduce stream if there is one. Parameters without a gradient contribute zeros.
        `is_deferred` postpones the all-reduce; with `keeps_values` the full values stay.
        """
        full, packing = self._full, self.packing
        assert full is not None
        assert packing is not None
        self.pack_rest(may_overwrite=not keeps_values)
        self.is_unsynced = False
        if self.places is None:
            self._end_earlier_uses()
            self._choose_place(in_place=False)
        if not keeps_values and full.state is GATHERING:
            full.wait()  # the backend still writes into memory that may become scratch
        if not all(self.arrived):
            for place, has_arrived in zip(self.places or (), self.arrived, strict=True):
                if not has_arrived:
                    place.zero_()
        if trace.logs:
            trace.record("issue_reduce", self.reduction.label.name)
        if self.places is packing.value_places and packing.is_cast:
            self._widen(full)  # the reduce dtype is wider
        output, numel = self._memory.part, self.reduction.own_numel
        if output is None and self.is_persistent:
            output = self._memory.result_of(numel)
        self.reduction.start(
            full.unversioned if self.places is packing.value_places else self._memory.buffer,
            self._take_scratch(
                full, packing, scratch, are_values_free=not (full.is_kept or keeps_values)
            ),
            streams,
            output=output,
            prescale=packing.scale,
            is_deferred=is_deferred,
        )
        self.end_round()

    def _widen(self, full: FullValues) -> None:
        """Cast gradients packed in place into their own memory; free that of the values."""
        alloc_storage(self._memory.buffer)
        self._memory.buffer.copy_(full.unversioned)
        full.end_gradients()
        self.places = self._memory.places  # no longer the places of the values

    def _take_scratch(
        self, full: FullValues, packing: Packing, pool: ScratchPool, *, are_values_free: bool
    ) -> Tensor | None:
        """Return scratch memory: the buffer that does not hold the gradients, or new memory."""
        num_terms = self.reduction.num_terms
        if num_terms == 0:
            return None
        numel, own = num_terms * self.reduction.own_numel, self._memory.buffer
        if self.is_persistent:
            return pool.take(numel, own)
        is_in_place = self.places is packing.value_places
        scratch = own if is_in_place else full.unversioned
        is_free = is_in_place or (are_values_free and not packing.is_cast)
        is_used = is_free and num_terms == self.reduction.shard_group.size
        if not is_used or numel > scratch.numel():  # as with a large, uneven shard
            return scratch.new_empty(numel, dtype=own.dtype)
        if not is_in_place:
            full.serve_as_scratch()
        alloc_storage(scratch)
        return scratch[:numel]

    def free_input(self) -> None:
        """Wait until the reduction in flight, if any, no longer reads its input; free the buffers.

        Where no rank has a copy of the shard this is `add_result`.
        """
        if self.reduction.output is None:
            return
        if not self.reduction.has_second_stage:
            self.add_result()
        else:
            try:
                self.reduction.end_first_stage()
            except BaseException:
                self._give_up()
                raise
            if self.reduction.shard_group.size > 1:
                self.free_buffers()

    def free_buffers(self) -> None:
        """Free the buffers; persistent ones stay."""
        if not self.is_persistent:
            free_storage(self._memory.buffer)
        if self._full is not None:
            self._full.end_gradients()

    def add_result(self) -> None:
        """Wait for the reduction in flight, if any, free the buffers, add to `reduced`."""
        if self.reduction.output is None:
            return
        # Free the buffers if the wait fails, too: the reduction has given up its output by then, so
        # no later call would come this far.
        try:
            output = self.reduction.finish()
        except BaseException:
            self._give_up()
            raise
        self.free_buffers()
        if trace.logs:
            trace.record("wait_reduce", self.reduction.label.name)
        if output is not None and output.dtype != self.reduction.main_dtype:
            if self.is_persistent:
                output = self._memory.result_of(self.reduction.own_numel).copy_(output)
            else:
                output = output.to(self.reduction.main_dtype)
        if output is not None:
            self.reduced = output if self.reduced is None else self.reduced.add_(output)

    def _give_up(self) -> None:
        """Free the buffers after an error or an interrupt, which may have come before the wait."""
        self.reduction.abandon()
        self.free_buffers()

    def publish(self, used: list[bool]) -> None:
        """Set, or add to, `.grad` of the parameters that any rank used; forget `reduced`.

        Raises:
            RuntimeError: If a parameter's existing `.grad` is not a shard like the parameter.
        """
        shown, full = self._shown, self._full
        assert full is not None
        if self.layout.owners:
            full.expire()  # [Note: Writes by owners]
        if full.readers.bits & LATE_GRAPH:
            full.readers.end(BACKWARD)
        if self.reduction.deferred is not None:
            self.was_used = used  # until the postponed all-reduce
            return
        form = shown.form
        pieces = self._cut(form.cutter or self.pieces)
        # Forgotten when nothing can fail any more but a `.grad` that is no shard.
        self.reduced = None
        self.was_used = [False] * len(self.was_used)
        used = form.add_gradients(pieces, used)
        if self.has_graph:
            self.has_graph = False
            refuse_graphs([each.sharded for each in form.at_rest], used)

    def _cut(self, cutter: Cutter) -> Sequence[Tensor] | None:
        """Return the reduced gradients of the parameters at rest; None if none came."""
        return None if self.reduced is None else cutter.split(self.reduced)

    def drop(self) -> None:
        """Forget all unpublished gradients after an error.

        Includes gradients in flight, and those that wait from earlier backwards. `drop_unpublished`
        calls this, and removes their marks.
        """
        self._forget()
        self.is_unsynced = self.has_graph = False
        drop_unpacked(self)

    def _forget(self) -> None:
        self.reduction.drop()
        self.reduced = None
        self.end_round()
        self.was_used = [False] * len(self.was_used)
        self.free_buffers()

    def end_round(self) -> None:
        """Take no more gradients into the round; the next one begins another."""
        self.was_used = self.arrived if all(self.arrived) else self.used
        self.arrived = [False] * len(self.arrived)
        self.places = None
        self.is_direct = False


def drop_unpacked(grads: FlatGradients) -> None:
    """Drop what an interrupted backward has accumulated and nobody packed."""
    left = () if grads._full is None else grads._full.params.aliases.left
    for index, entry in enumerate(grads._shown.entries):
        if entry.unsharded is not None and index not in left:
            set_gradient(entry.unsharded, None)


def in_layout(layout: FlatLayout, grads: FlatGradients) -> FlatGradients:
    """Return an object for another layout with the users' settings; `bind` moves what waits."""
    before = grads.reduction
    reduction = type(before)(before.shard_group, layout)
    reduction.label, reduction.settings = before.label, before.settings
    other = type(grads)(layout, reduction, grads._shown, is_persistent=grads.is_persistent)
    other.marks, other.has_graph = grads.marks, grads.has_graph
    other.is_unsynced = grads.is_unsynced
    return other
