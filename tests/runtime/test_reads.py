"""Reads of full values: losses that a unit leaves beside its output are right, or refused."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributions import Independent, Normal
from torch.utils.checkpoint import checkpoint

from composable_shard import ShardingStrategy, fully_shard, get_states
from composable_shard.flat_param import LOCKED
from composable_shard.runtime.saved_values import Inspection, SavedValues
from composable_shard.torch_private import top_saved_tensors_hooks
from tests.harness.pairs import pairwise
from tests.harness.poison import poisoned
from tests.harness.ranks import distributed
from tests.programs import claims
from tests.programs.models import Layer, rank_input, shard_children, shard_layers, shard_root

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy


def _input(step: int = 0) -> Tensor:
    return rank_input(4, 15, step=step, dtype=torch.float64)


# --- C1: losses beside the output ---


class _SideLoss(nn.Module):
    """A block with an auxiliary loss, as a mixture of experts has."""

    def __init__(self, keep: str = "attribute", *, is_before: bool = True, first: int = 0) -> None:
        """Args: where the loss is kept, whether before the output, from which forward on."""
        super().__init__()
        self.first = first
        self.number = -1
        self.router = nn.Linear(15, 15)
        self.layer = Layer()
        self.is_before = is_before
        self.keep = keep
        self.aux: Any = None
        if keep == "hook":
            self.router.register_forward_hook(self._take)

    def _take(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.aux = output.square().mean()

    def _keep(self, x: Tensor) -> None:
        if self.number < self.first:
            self.aux = None
            return
        aux = self.router(x).square().mean()
        if self.keep == "attribute":
            self.aux = aux
        elif self.keep == "list":
            self.aux = [aux]
        elif self.keep == "closure":
            self.aux = lambda: aux

    def take(self) -> Tensor:
        """Return the loss of the last forward."""
        aux, self.aux = self.aux, None
        if aux is None:
            return torch.zeros(())
        if self.keep == "closure":
            aux = aux()
        loss: Tensor = aux[0] if isinstance(aux, list) else aux
        return loss

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        if self.is_before:
            self._keep(x)
        y: Tensor = self.layer(x)
        if not self.is_before:
            self._keep(torch.tanh(y))
        return y


def _side_losses(**options: Any) -> nn.Module:
    return nn.Sequential(*[_SideLoss(**options) for _ in range(3)])


def _train_on_both(model: nn.Module, number: int) -> None:
    y = model(_input(number))
    (y.square().mean() + sum(block.take() for block in model)).backward()


def _train_on_side_losses_alone(model: nn.Module, number: int) -> None:
    model(_input(number))
    sum(block.take() for block in model).backward()


def _train_on_one_side_loss(model: nn.Module, number: int) -> None:
    """The first unit is read last, the others come before its output and stay unread."""
    model(_input(number))
    model[1].take().backward()


@claims.variants
@distributed(2, on_device=True)
def test_c1_side_loss_kept_on_the_module(
    strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool
) -> None:
    """C1: an auxiliary loss kept on the module gives the gradients of a plain model."""
    claims.assert_right(
        _side_losses,
        _train_on_both,
        strategy=strategy,
        use_orig_params=use_orig_params,
        accumulates=accumulates,
    )


@pytest.mark.parametrize(
    *pairwise(
        keep=["attribute", "list", "hook"],
        is_before=[True, False],
        program=[_train_on_both, _train_on_side_losses_alone, _train_on_one_side_loss],
        strategy=[FULL_SHARD, SHARD_OPTIM],
    )
)
@distributed(2)
def test_c1_side_loss_in_any_place(
    keep: str, is_before: bool, program: claims.Program, strategy: ShardingStrategy
) -> None:
    """C1: it makes no difference where the loss is kept, when it is computed, what else counts."""
    claims.assert_right(
        lambda: _side_losses(keep=keep, is_before=is_before), program, strategy=strategy
    )


def _run_closures(
    is_before: bool, first: int, program: claims.Program, strategy: ShardingStrategy
) -> None:
    claims.assert_right(
        lambda: _side_losses(keep="closure", is_before=is_before, first=first),
        program,
        strategy=strategy,
        steps=max(first + 1, 3),
    )


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_OPTIM])
@pytest.mark.parametrize(
    ("is_before", "program", "first"),
    [
        (True, _train_on_both, 0),
        (True, _train_on_both, 3),
        (False, _train_on_both, 0),
        (False, _train_on_both, 3),
        (True, _train_on_side_losses_alone, 0),
        (False, _train_on_one_side_loss, 0),
    ],
)
def test_c1_side_loss_in_a_closure_is_right_or_refused(
    is_before: bool, program: claims.Program, first: int, strategy: ShardingStrategy
) -> None:
    """C1: nobody finds it, so its reads need the unit's output, or values that are never freed."""
    is_right = strategy is SHARD_OPTIM or (is_before and program is _train_on_both)
    outcome = claims.outcome_of(_run_closures, is_before, first, program, strategy)
    assert outcome == ("right" if is_right else "refused")


class _SideLossOfRoot(nn.Module):
    """The root, which holds a unit, reads its own weight in a side loss and inside the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(15, 15) / 4)
        self.block = _UsesWeight()
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x, self.weight)
        self.aux = F.linear(torch.tanh(y), self.weight).square().mean()
        return y


class _UsesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.aux: Tensor | None = None

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = self.layer(F.linear(x, weight))
        self.aux = F.linear(torch.tanh(y), weight).square().mean()
        return y


def _train_on_losses_of_root(model: nn.Module, number: int) -> None:
    model(_input(number))
    (model.aux + model.block.aux).backward()


@claims.strategies
@distributed(2)
def test_c1_weight_of_an_outer_unit_in_a_side_loss(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """C1: inside another unit's forward, that of an outer unit is announced too."""
    claims.assert_right(
        _SideLossOfRoot,
        _train_on_losses_of_root,
        strategy=strategy,
        use_orig_params=use_orig_params,
        reshard_after_forward=True if strategy is FULL_SHARD else None,
    )


class _AroundSideLosses(nn.Module):
    """A root with a weight of its own before blocks with side losses."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.first = nn.Linear(15, 15)
        self.blocks = nn.ModuleList(_SideLoss(keep) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@claims.strategies
@distributed(2)
def test_c1_side_loss_that_is_used_alone_in_a_later_step(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """C1: in the first steps the output is always reached first; later nothing leads to it."""

    def program(model: nn.Module, number: int) -> None:
        y = model(_input(number))
        loss = sum(block.take() for block in model.blocks)
        (y.square().mean() + loss if number < 6 else loss).backward()

    claims.assert_right(
        lambda: _AroundSideLosses("list"),
        program,
        shard=_shard_blocks_of,
        strategy=strategy,
        use_orig_params=use_orig_params,
        steps=5,
    )


# --- C2: tensors where nobody looks ---


class _InSlot:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Named(NamedTuple):
    hidden: Tensor


@dataclass
class _Data:
    inner: Any


class _InAttribute:
    def __init__(self, item: Any) -> None:
        self.item = item


_FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "distribution": (
        lambda x: Independent(Normal(x, 1.0), 1),
        lambda out: out.base_dist.loc,
    ),
    "slots": (_InSlot, lambda out: out.hidden),
    "slots_in_dataclasses": (
        lambda x: _Data(_Data(_InSlot(x))),
        lambda out: out.inner.inner.hidden,
    ),
    "dataclasses": (lambda x: _Data(_Data(x)), lambda out: out.inner.inner),
    "named_tuple_in_attribute": (
        lambda x: _InAttribute(_InAttribute(_Named(x))),
        lambda o: o.item.item.hidden,
    ),
    "closure": (lambda x: lambda: x, lambda out: out()),
}


class _Hiding(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.layer = Layer()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return _FORMS[self.form][0](self.layer(x))


class _Finding(nn.Module):
    """Units whose outputs are hidden, in a root that finds them."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Hiding(form) for _ in range(3))
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = _FORMS[self.form][1](layer(x))
        return x


def _run_hiding(form: str, strategy: ShardingStrategy) -> None:
    claims.assert_right(
        lambda: _Finding(form),
        lambda model, number: model(_input(number)).square().mean().backward(),
        shard=shard_layers,
        strategy=strategy,
    )


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM])
@pytest.mark.parametrize("form", _FORMS)
def test_c2_tensors_of_an_output_are_found_or_their_reads_refused(
    form: str, strategy: ShardingStrategy
) -> None:
    """C2: containers and dataclasses are looked into; a function that is returned, and strategies
    that keep values, let nothing be found.
    """
    is_right = strategy is not FULL_SHARD or form in ("dataclasses", "closure")
    assert claims.outcome_of(_run_hiding, form, strategy) == ("right" if is_right else "refused")


class _UnevenAround(nn.Module):
    """Reads a parameter after a unit inside it, on the first rank only; its output is hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.extra = Layer(), nn.Parameter(torch.randn(15))

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        return _InSlot(y * self.extra if dist.get_rank() == 0 else y)


class _FindingOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = _UnevenAround(), nn.Linear(15, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.layer(x).hidden)
        return y


def _run_in_another_order(strategy: ShardingStrategy) -> None:
    def shard(model: nn.Module, **options: Any) -> None:
        for unit in (model.layer.inner, model.layer, model):
            fully_shard(unit, **options)

    claims.assert_right(
        _FindingOne,
        lambda model, number: model(_input(number)).square().mean().backward(),
        shard=shard,
        strategy=strategy,
    )


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_c2_hidden_output_of_a_unit_that_ranks_read_in_another_order(
    strategy: ShardingStrategy,
) -> None:
    """C2: a unit inside is announced by its output, perhaps before any read of the outer one."""
    is_right = strategy in (SHARD_OPTIM, NO_SHARD)
    outcome = claims.outcome_of(_run_in_another_order, strategy)
    assert outcome == ("right" if is_right else "refused")


class _RegionAndUnit(nn.Module):
    """A checkpointed region of its own parameters, then a unit, whose output is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.region, self.unit, self.last = Layer(), Layer(), nn.Linear(15, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.unit(checkpoint(self.region, x, use_reentrant=True))
        y: Tensor = self.last(self.kept)
        return y


@claims.variants
@distributed(2)
def test_c2_loss_of_an_inner_output_alone_after_the_first_steps(
    strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool
) -> None:
    """C2: the root's outputs announced all reads until a loss is made of what a unit in it gave."""

    def program(model: nn.Module, number: int) -> None:
        y = model(_input(number).requires_grad_())
        (y if number < 5 else model.kept).square().mean().backward()

    def shard(model: nn.Module, **options: Any) -> None:
        for unit in (model.unit, model):
            fully_shard(unit, **options)

    claims.assert_right(
        _RegionAndUnit,
        program,
        shard=shard,
        steps=4,
        strategy=strategy,
        use_orig_params=use_orig_params,
        accumulates=accumulates,
    )


def _run_with_hooks(strategy: ShardingStrategy) -> None:
    def program(model: nn.Module, number: int) -> None:
        taken: list[Tensor] = []
        hooks = [
            block.layer.register_forward_hook(lambda module, args, out: taken.append(out))
            for block in model
        ]
        model(_input(number))
        for hook in hooks:
            hook.remove()
        sum(each.square().mean() for each in taken).backward()

    claims.assert_right(
        lambda: nn.Sequential(*[_Inner() for _ in range(3)]), program, strategy=strategy
    )


@pytest.mark.parametrize(
    ("strategy", "outcome"), [(FULL_SHARD, "refused"), (SHARD_GRAD_OP, "right")]
)
def test_c2_output_that_only_hooks_use(strategy: ShardingStrategy, outcome: str) -> None:
    """C2: hooks take what the loss is made of; the output itself is not used."""
    assert claims.outcome_of(_run_with_hooks, strategy) == outcome


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.layer(x))


# --- Which forwards are looked at ---


class _NotingHooks(nn.Module):
    """A block that notes whether saved-tensor hooks are in force."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.has_hooks: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.has_hooks.append(top_saved_tensors_hooks(False) is not None)
        y: Tensor = self.layer(x)
        return y


class _WithSideLossAround(nn.Module):
    """A side loss of the root, around units without one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_NotingHooks() for _ in range(2))
        self.head = _SideLoss(is_before=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def _train_with_side_loss_around(model: nn.Module, number: int) -> None:
    y = model(_input(number))
    (y.square().mean() + model.head.take()).backward()


def _shard_blocks_of(model: nn.Module, **options: Any) -> None:
    for block in model.blocks:
        shard_root(block, **options)
    shard_root(model, **options)


@distributed(2)
def test_hooks_are_in_force_in_the_first_forward_and_after_an_unknown_one() -> None:
    """Nothing else costs a warm step their host time."""
    model = _WithSideLossAround(first=1).double()
    _shard_blocks_of(model)
    for step in range(4):
        _train_with_side_loss_around(model, step)
    for block in model.blocks:  # beneath the root's, which records a loss from the second on
        assert block.has_hooks == [True, False, True, False]
    assert top_saved_tensors_hooks(False) is None


@claims.variants
@distributed(2)
def test_c1_side_loss_that_begins_later(
    strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool
) -> None:
    """C1: one that a trusted unit begins to keep on its module is right at once."""
    claims.assert_right(
        lambda: _WithSideLossAround(first=4),
        _train_with_side_loss_around,
        shard=_shard_blocks_of,
        strategy=strategy,
        use_orig_params=use_orig_params,
        accumulates=accumulates,
        steps=6,
    )


@distributed(2)
def test_c1_read_that_nobody_announces_is_named() -> None:
    """C1: by the hooks of a first forward; by a warning before autograd's own error later."""
    first, later = (
        nn.Sequential(*[_SideLoss("closure", is_before=False, first=first) for _ in range(2)])
        for first in (0, 3)
    )
    for model in (first, later):
        shard_children(model.double())
    with pytest.raises(RuntimeError, match=rf"at version {LOCKED}.*of unit '1' was read after"):
        _train_on_both(first, 0)
    for step in range(3):
        _train_on_both(later, step)
    with (
        pytest.warns(UserWarning, match=r"before it reached unit '1'.* return what the loss"),
        pytest.raises(RuntimeError, match=f"is at version {LOCKED}"),
    ):
        _train_on_both(later, 3)
    for block in later:
        block.keep = "attribute"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _train_on_both(later, 4)


def test_a_gradient_where_freed_values_were_is_no_view_of_them() -> None:
    """To copy one, on the rank whose memory came to lie so, may be a collective of a DTensor."""
    values = torch.ones(8, requires_grad=True)
    full = SimpleNamespace(unversioned=values.detach(), buffer=values.detach())
    handle: Any = SimpleNamespace(full=full, requires_grad=False)
    hooks = SavedValues(Inspection(), "?", [handle], below=None, others=None)
    hooks.end()
    gradients = (values.detach()[2:], None)
    copies = hooks._copy_values(gradients, None)
    assert copies is not None
    assert copies[0].data_ptr() != gradients[0].data_ptr()
    full.unversioned = torch.ones(8)  # a later gather has got other memory
    assert hooks._copy_values(gradients, None) is None
    full.unversioned.untyped_storage().resize_(0)
    assert hooks._copy_values(gradients, None) is None


@distributed(2)
@poisoned()
def test_graph_of_weights_that_a_step_changed_is_refused() -> None:
    """C1: as in a plain model; also where full values are never freed, and nobody is told."""
    for strategy in ShardingStrategy:
        model = nn.Sequential(*[_SideLoss("closure", first=3) for _ in range(2)]).double()
        shard_children(model, strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            _train_on_both(model, step)
        model(_input(3))
        loss = model[0].take() + model[1].take()
        optimizer.step()
        with pytest.raises(RuntimeError, match="is at version"):
            loss.backward()
        model(_input(3))
        loss = model[0].take() + model[1].take()
        optimizer.step()
        with pytest.raises(RuntimeError, match="is at version"):
            loss.backward()


# --- What stays as without hooks ---


@distributed(2)
def test_in_place_change_of_a_saved_tensor_is_refused_as_ever() -> None:
    """Autograd compares no versions where hooks are in force, so they do."""
    model = Layer().double()
    shard_root(model)
    taken: list[Tensor] = []
    for step in range(4):
        hook = model.up.register_forward_hook(lambda module, args, out: taken.append(out.exp_()))
        y = model(_input(step)).square().sum()
        hook.remove()
        with torch.no_grad():
            taken.pop().add_(1)
        with pytest.raises(RuntimeError, match=r"needed for gradient computation .* modified"):
            y.backward()
        model(_input(step)).square().sum().backward()


def _take_as_it_is(tensor: Any) -> Any:
    return tensor


@claims.strategies
@distributed(2)
def test_side_loss_beneath_hooks_of_somebody_else(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """These get every tensor as ever."""

    def program(model: nn.Module, number: int) -> None:
        with saved_tensors_hooks(_take_as_it_is, _take_as_it_is):
            y = model(_input(number))
        (y.square().mean() + sum(block.take() for block in model)).backward()

    claims.assert_right(
        lambda: _side_losses(first=3),
        program,
        strategy=strategy,
        use_orig_params=use_orig_params,
        steps=5,
    )


@pytest.mark.parametrize("is_reentrant", [False, True])
@distributed(2)
def test_c17_side_loss_inside_a_checkpoint(is_reentrant: bool) -> None:
    """C17: a loss that a checkpointed unit returns beside its output, and one that it keeps."""

    def program(model: nn.Module, number: int) -> None:
        x = _input(number).requires_grad_()
        for block in model:
            x = checkpoint(block, x, use_reentrant=is_reentrant)
        loss = x.square().mean()
        if not is_reentrant:  # which keeps no graph of it
            loss = loss + sum(block.take() for block in model)
        loss.backward()

    claims.assert_right(_side_losses, program)


@distributed(2)
def test_side_loss_and_activations_on_the_host() -> None:
    """`save_on_cpu` keeps copies of the weights, too."""

    def program(model: nn.Module, number: int) -> None:
        with torch.autograd.graph.save_on_cpu():
            y = model(_input(number))
        (y.square().mean() + sum(block.take() for block in model)).backward()

    claims.assert_right(_side_losses, program)


class _SideLossInCheckpoint(nn.Module):
    """A unit that runs again in part; its side loss comes after its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.router = nn.Linear(15, 15)
        self.taken: list[Tensor] = []

    def _run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, self.router(torch.tanh(y)).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        y, aux = checkpoint(self._run, x, use_reentrant=False)
        self.taken = [aux]
        output: Tensor = y
        return output


@pytest.mark.parametrize("is_alone", [False, True])
@claims.strategies
@distributed(2)
def test_c17_side_loss_of_a_checkpoint_inside_a_unit(
    strategy: ShardingStrategy, use_orig_params: bool, is_alone: bool
) -> None:
    """C17: the region runs again though nothing has told of the unit's output."""

    def program(model: nn.Module, number: int) -> None:
        y = model(_input(number))
        loss = sum(block.taken.pop() for block in model)
        (loss if is_alone else loss + y.square().mean()).backward()

    claims.assert_right(
        lambda: nn.Sequential(_SideLossInCheckpoint(), _SideLossInCheckpoint()),
        program,
        strategy=strategy,
        use_orig_params=use_orig_params,
        steps=4,
    )


@distributed(2)
def test_hooks_that_forward_hooks_put_in_force() -> None:
    """C17: forward hooks enter and leave `save_on_cpu` around a unit, inside one with hooks."""

    def program(model: nn.Module, number: int) -> None:
        entered = []

        def enter(*_: Any) -> None:
            entered.append(torch.autograd.graph.save_on_cpu())
            entered[-1].__enter__()

        def leave(*_: Any) -> None:
            entered.pop().__exit__(None, None, None)

        parts = [*model.blocks, model.head]
        hooks = [part.register_forward_pre_hook(enter) for part in parts]
        hooks += [part.register_forward_hook(leave) for part in parts]
        _train_with_side_loss_around(model, number)
        for hook in hooks:
            hook.remove()
        assert top_saved_tensors_hooks(False) is None

    def both(model: nn.Module, number: int) -> None:
        (program if number % 4 == 3 else _train_with_side_loss_around)(model, number)

    for run in (program, both):  # hooks of the inner units, and none once they are trusted
        claims.assert_right(_WithSideLossAround, run, shard=_shard_blocks_of, steps=4)


@distributed(2)
def test_interrupted_forward_leaves_no_hooks() -> None:
    """An exception ends a call past our hooks, or, as Ctrl-C does, without them."""
    model = nn.Sequential(Layer(), Layer())
    shard_children(model)
    for error in (ValueError, KeyboardInterrupt):

        def fail(*_: Any, error: type[BaseException] = error) -> None:
            raise error

        hook = model[1].down.register_forward_hook(fail)
        with pytest.raises(error):
            model(rank_input(4, 15))
        hook.remove()
        model(rank_input(4, 15)).sum().backward()
        assert top_saved_tensors_hooks(False) is None


@distributed(2)
def test_graph_with_hooks_is_freed_by_reference_count_alone() -> None:
    """Saved outputs and reads lead back to no node."""
    model = _SideLoss()
    shard_root(model)
    gc.collect()
    gc.disable()
    try:
        y = model(rank_input(4, 15))
        states = [weakref.ref(state) for state in get_states(model)]
        del y, model
        assert [ref() for ref in states] == [None]
    finally:
        gc.enable()
