"""use_orig_params=False trains and copies like the original parameters, in fewer tensors."""

from __future__ import annotations

import copy
import gc
import re
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from composable_shard import (
    FlatShard,
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    get_handles,
    get_states,
    is_sharded,
    no_sync,
    register_flat_param,
    register_orig_params,
    shard_model,
    unshard,
    unshard_params,
)
from composable_shard.comm.trace import count_collectives
from composable_shard.flat_param import gradients
from composable_shard.flat_param.storage import alloc_storage
from composable_shard.tensor import reduced_gradient
from tests.construct.test_composition import CHECKPOINTED, _make_reentrant
from tests.construct.test_fully_shard import _no_collector
from tests.harness.assertions import assert_equal
from tests.harness.memory import peak_bytes, still_alive
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs.models import (
    Layer,
    Net,
    Twins,
    rank_input,
    shard_blocks,
    shard_children,
    shard_layers,
    shard_root,
    square_mean,
)
from tests.programs.modules import (
    CallsItself,
    Choosing,
    ComplexLayers,
    OddParameters,
    OnlyEmpty,
    OptionalStack,
    RecurrentHead,
    RepeatedBlock,
    Sandwich,
    SomeLayers,
    SparseEmbedding,
    TiedLanguage,
    make_partly_frozen,
    make_with_frozen_unit,
    rank_tokens,
    shard_linears,
    shard_pairs,
)

ShardFn = Callable[..., object]
Values = dict[str, tuple[Tensor, Tensor | None]]


def full_values_and_gradients(model: nn.Module) -> Values:
    """Return the full value and gradient of every original parameter, whatever form is shown."""
    scope = unshard_params(model, writeback=False, with_grads=True)
    with scope if get_states(model) else nullcontext():
        return {
            name: (param.detach().clone(), None if param.grad is None else param.grad.clone())
            for name, param in model.named_parameters()
        }


def assert_same_values(actual: Values, expected: Values) -> None:
    """Compare values and gradients bitwise, and which parameters have none."""
    __tracebackhide__ = True
    assert list(actual) == list(expected)
    for name, (value, grad) in actual.items():
        assert_equal(value, expected[name][0], name)
        expected_grad = expected[name][1]
        assert (grad is None) == (expected_grad is None), f"{name}.grad: {grad}"
        if grad is not None:
            assert_equal(grad, expected_grad, f"{name}.grad")


class FlatTwins(Twins):
    """A model, and its copy whose units show flat parameters.

    The first is the plain model on one or two ranks. On more, where sums are rounded in another
    order, and where `against_originals` says so, it is the model sharded with original parameters.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        shard: ShardFn = shard_children,
        *,
        against_originals: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(make, shard, use_orig_params=False, **options)
        if against_originals or dist.get_world_size() > 2:
            shard(self.plain, use_orig_params=True, **options)

    def backward(self, model: nn.Module, loss: Tensor, **options: Any) -> None:
        """Run the backward; average the gradients of a plain twin."""
        if get_states(model):
            loss.backward(**options)
        else:
            super().backward(model, loss, **options)

    def assert_equal_gradients(self) -> None:
        """Compare every gradient, and every parameter too."""
        __tracebackhide__ = True
        assert_same_values(
            full_values_and_gradients(self.sharded), full_values_and_gradients(self.plain)
        )

    assert_equal_parameters = assert_equal_gradients

    def train(self, run: Callable[[nn.Module, int], Tensor], kind: Any, **options: Any) -> None:
        """Take two steps with both, comparing as it goes."""
        __tracebackhide__ = True
        optimizers = [kind(model.parameters(), **options) for model in self]
        for step in range(2):
            self.step(lambda model, step=step: run(model, step))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        self.assert_equal_parameters()
        assert_flat_at_rest(self.sharded)


def assert_flat_at_rest(model: nn.Module) -> None:
    """Assert that flat parameters are registered where they belong, and nothing is unsharded."""
    __tracebackhide__ = True
    shown = {id(each.sharded) for handle in get_handles(model) for each in handle.shown.at_rest}
    found = {id(param) for param in model.parameters()}
    assert found == shown
    for handle in get_handles(model):
        handle.shown.check_registered()
        assert not handle.shown.is_unsharded, handle.name
        assert not handle.full.readers.claims, handle.name
        if not handle.is_kept:
            assert handle.unsharded.untyped_storage().size() == 0, handle.name


def make_flat(
    make: Callable[[], nn.Module] = Net, shard: ShardFn = shard_blocks, **options: Any
) -> Any:
    """Return a sharded model that shows flat parameters."""
    torch.manual_seed(0)
    model = make()
    shard(model, use_orig_params=False, **options)
    return model


def run(*shape: int) -> Callable[[nn.Module, int], Tensor]:
    """Return a function from model and step to a loss."""

    def run_step(model: nn.Module, step: int) -> Tensor:
        output = model(rank_input(*shape, step=step))
        return square_mean(output.abs() if output.is_complex() else output)

    return run_step


def names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that are shown."""
    return [name for name, _ in model.named_parameters()]


_NET = run(4, 5)
_FLAT_NAMES = ["_flat_param", *(f"blocks.{index}._flat_param" for index in range(3))]
_NET_NAMES = names(Net())


# --- parity ---


OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adam": (optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    "adamw": (optim.AdamW, {"lr": 0.1}),
}


@pytest.mark.parametrize(*pairwise(is_foreach=[False, True], name=OPTIMIZERS, world_size=(1, 2, 3)))
@distributed()
def test_elementwise_optimizers_step_alike(name: str, is_foreach: bool) -> None:
    """Bitwise, for-loop and foreach."""
    kind, options = OPTIMIZERS[name]
    FlatTwins(Net, shard_blocks).train(_NET, kind, foreach=is_foreach, **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(1, 2)
def test_fused_optimizers_step_alike(name: str) -> None:
    """Bitwise, where no slice ends within a vector register: torch's kernels round the rest so."""
    kind, options = OPTIMIZERS[name]
    twins = FlatTwins(lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)))
    twins.train(run(4, 64), kind, fused=True, **options)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@distributed(1, 2, 3)
def test_clipping_is_the_same(norm_type: float) -> None:
    """The norm up to the order of its sum; what is clipped in step with it, inf bitwise."""
    twins = FlatTwins(Net, shard_blocks)
    twins.step(lambda model: _NET(model, 0))
    expected, norm = (clip_grad_norm_(model, 0.01, norm_type) for model in twins)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    if norm_type == float("inf"):
        assert_equal(norm, expected)
        twins.assert_equal_gradients()
    reference = full_values_and_gradients(twins.plain)
    for name, (_, grad) in full_values_and_gradients(twins.sharded).items():
        torch.testing.assert_close(grad, reference[name][1], rtol=1e-5, atol=1e-9)
    found = nn.utils.get_total_norm([p.grad for p in twins.sharded.parameters()], norm_type)
    torch.testing.assert_close(found, torch.tensor(0.01), rtol=1e-4, atol=0)


def _poisoned(tensor: Tensor, _: object = None) -> None:
    is_new = tensor.untyped_storage().size() == 0
    alloc_storage(tensor)
    if is_new:
        tensor.fill_(float("nan"))


@distributed(1, 2, 3)
def test_what_lies_between_the_parameters_is_zero() -> None:
    """In gradients and in values, whatever the memory held before: it would count in norms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "alloc_storage", _poisoned)
        for reshard_after_forward in (True, False):
            model = make_flat(Net, shard_blocks, reshard_after_forward=reshard_after_forward)
            for step in range(2):
                _NET(model, step).backward()
    for param in model.parameters():
        assert param.grad.to_local().isfinite().all()
    params = list(model.to_empty(device="cpu").parameters())
    for param in params:
        param.to_local().fill_(float("nan"))
    with unshard_params(model), torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert all(param.to_local().eq(0).all() for param in params)


@pytest.mark.parametrize(
    *pairwise(strategy=ShardingStrategy, is_synced=[False, True], world_size=(1, 2, 3))
)
@distributed()
def test_accumulation_is_the_same(is_synced: bool, strategy: ShardingStrategy) -> None:
    """Unsharded with `no_sync`, and into the sharded gradient of the flat parameter."""
    twins = FlatTwins(Net, shard_blocks, against_originals=True, strategy=strategy)
    for model in twins:
        with nullcontext() if is_synced else no_sync(model):
            _NET(model, 0).backward()
            _NET(model, 1).backward()
        assert all((reduced_gradient(p) is None) is not is_synced for p in model.parameters())
        _NET(model, 2).backward()
    twins.assert_equal_gradients()


@pytest.mark.parametrize("strategy", ShardingStrategy)
@distributed(1, 2, 3)
def test_strategies_train_alike(strategy: ShardingStrategy) -> None:
    """What ranks keep, and what they show of it, have nothing to do with each other."""
    twins = FlatTwins(Net, shard_blocks, against_originals=True, strategy=strategy)
    optimizers = [optim.AdamW(model.parameters(), lr=0.1, foreach=True) for model in twins]
    for step in range(3):
        for model, optimizer in zip(twins, optimizers, strict=True):
            for _ in range(2):  # the second backward finds gradients
                _NET(model, step).backward()
            clip_grad_norm_(model, 0.1, norm_type=float("inf"))
            optimizer.step()
            optimizer.zero_grad()
    twins.assert_equal_parameters()


class _Guarded(nn.Module):
    """A module with its own `__setattr__`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(15, 15))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__["last_set"] = name

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def _shard_in_turn(model: nn.Module, *, use_orig_params: bool, **options: Any) -> None:
    """Shard the blocks, every second one as the rest is not."""
    for index, block in enumerate(model.blocks):
        fully_shard(block, use_orig_params=use_orig_params or index % 2 == 1, **options)
    fully_shard(model, use_orig_params=use_orig_params, **options)


def _shard_root_alone_flat(model: nn.Module, *, use_orig_params: bool, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, use_orig_params=use_orig_params, **options)


def _make_bare() -> nn.Module:
    """Units without parameters around and inside of one with."""
    return nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(15, 7), nn.Tanh()), nn.Tanh())


class _Kinds(nn.Module):
    """Four handles: three dtypes, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fp32 = nn.Linear(15, 15)
        self.fp64 = nn.Linear(15, 15, dtype=torch.float64)
        self.complex64 = nn.Linear(15, 15, dtype=torch.complex64)
        self.frozen = nn.Linear(15, 15).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.fp64(self.fp32(x).double())).float()
        return torch.tanh(self.frozen(self.complex64(x + 0j).abs()))


def _make_kinds() -> nn.Module:
    return nn.Sequential(_Kinds(), _Kinds(), nn.Linear(15, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], ShardFn, Callable[[nn.Module, int], Tensor]]] = {
    "one unit": (Net, shard_root, _NET),
    "without a root": (SomeLayers, lambda m, **o: fully_shard(list(m.layers), **o), run(4, 15)),
    "frozen unit": (make_with_frozen_unit, shard_blocks, _NET),
    "partly frozen": (make_partly_frozen, shard_children, run(4, 15)),
    "mixed dtypes": (_make_kinds, shard_children, run(4, 15)),
    "mixed dtypes in one unit": (_make_kinds, shard_root, run(4, 15)),
    "called twice": (RepeatedBlock, shard_children, run(4, 15)),
    "called first and last": (Sandwich, shard_children, run(4, 15)),
    "recursive": (CallsItself, shard_root, run(4, 15)),
    "LSTM": (partial(RecurrentHead, nn.LSTM), shard_children, run(2, 6, 5)),
    "LSTM in the root": (partial(RecurrentHead, nn.LSTM), shard_root, run(2, 6, 5)),
    "own __setattr__": (lambda: nn.Sequential(_Guarded(), _Guarded()), shard_children, run(4, 15)),
    "several modules": (SomeLayers, shard_pairs, run(4, 15)),
    "every second unit": (Net, _shard_in_turn, _NET),
    "the root alone": (Net, _shard_root_alone_flat, _NET),
    "blocks alone": (lambda: nn.Sequential(Layer(), Layer()), shard_children, run(4, 15)),
    "odd": (OddParameters, shard_root, lambda m, step: m(rank_input(4, 15, step=step))),
    "empty": (OnlyEmpty, shard_layers, run(4, 15)),
    "complex": (ComplexLayers, shard_root, run(4, 15)),
    "no parameters": (_make_bare, shard_children, run(4, 15)),
    "sparse": (SparseEmbedding, shard_children, lambda m, step: square_mean(m(rank_tokens(step)))),
}


@pytest.mark.parametrize("name", MODELS)
@distributed(1, 3)
def test_models_train_alike(name: str) -> None:
    """Bitwise like the same units with original parameters."""
    make, shard, run_step = MODELS[name]
    twins = FlatTwins(make, shard, against_originals=True)
    twins.train(run_step, optim.SGD, lr=0.1, momentum=0.9)


def _shard_by_rule(model: nn.Module, rule: dict[str, bool], use_orig_params: bool) -> None:
    for unit, is_flat in rule.items():
        fully_shard(model.get_submodule(unit), use_orig_params=use_orig_params or not is_flat)


@pytest.mark.parametrize(
    "rule",
    [
        {"": True},
        {"embedding": True, "": False},
        {"embedding": False, "": True},
        {"embedding": True, "head": False, "": True},
        {"head": False, "blocks.0": True, "embedding": True, "": False},
        {"head": True, "embedding": True, "": True},
    ],
)
@distributed(1, 2, 3)
def test_tied_parameters_train_alike(rule: dict[str, bool]) -> None:
    """Within a unit and across units of both kinds, whichever owns the parameter."""
    twins = FlatTwins(TiedLanguage, partial(_shard_by_rule, rule=rule))
    twins.train(lambda model, step: square_mean(model(rank_tokens(step))), optim.AdamW, lr=0.1)
    assert twins.sharded.head.weight is twins.sharded.embedding.weight


@distributed(1, 2, 3)
def test_unit_that_nobody_uses_keeps_no_gradient() -> None:
    """So no optimizer moves it; the units that ran get theirs."""
    twins = FlatTwins(Choosing, shard_linears)
    for used in ((0, 1, 2), (0, 2), (), (1,)):
        twins.step(lambda model, used=used: square_mean(model(rank_input(4, 15), used)))
        for index, layer in enumerate(twins.sharded.layers):
            assert (layer._flat_param.grad is not None) is (index in used)
        for model in twins:
            model.zero_grad()


@distributed(2, 3)
def test_parameters_used_on_some_ranks_count_as_zero_on_the_others() -> None:
    """The gradients of those that no rank used are None where originals are shown."""
    twins = FlatTwins(OptionalStack, shard_blocks)
    is_first = dist.get_rank() == 0
    for used in ((is_first, not is_first, True), (False, is_first, False), (True, True, True)):
        twins.step(lambda model, used=used: square_mean(model(rank_input(4, 5), used)))
        for model in twins:
            model.zero_grad()


@distributed(2)
def test_parameter_that_nobody_used_is_stepped_with_a_zero_gradient() -> None:
    """Where another one of its unit was used: an optimizer sees one tensor."""
    model = make_flat(OptionalStack)
    optimizer = optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    before = full_values_and_gradients(model)["blocks.0.optional.weight"][0]
    square_mean(model(rank_input(4, 5), (False,) * 3)).backward()
    assert full_values_and_gradients(model)["blocks.0.optional.weight"][1] is None
    optimizer.step()
    torch.testing.assert_close(
        full_values_and_gradients(model)["blocks.0.optional.weight"][0], 0.95 * before
    )


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("where", CHECKPOINTED)
@distributed(2)
def test_checkpointing_changes_nothing(where: str, is_reentrant: bool) -> None:
    """Recomputation shows the originals too."""
    make = CHECKPOINTED[where]
    if is_reentrant:
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        make = partial(_make_reentrant, make)
    FlatTwins(make, shard_blocks).train(_NET, optim.AdamW, lr=0.05)


@pytest.mark.fast
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(2)
def test_other_policies_train_alike(reshard_after_forward: bool) -> None:
    """Units whose full values stay between forward and backward show flat parameters then too."""
    twins = FlatTwins(Net, shard_blocks, reshard_after_forward=reshard_after_forward)
    optimizers = twins.optimizers()
    for step in range(3):
        losses = [_NET(model, step) for model in twins]
        assert names(twins.sharded) == _FLAT_NAMES
        for model, loss in zip(twins, losses, strict=True):
            twins.backward(model, loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            assert_equal(*(_NET(model, step) for model in twins), "evaluation")
    twins.assert_equal_parameters()


@distributed(2)
def test_gradients_that_exist_are_taken_along() -> None:
    """Those made before sharding; a parameter without one gets none."""
    twins = Twins(Net, lambda model: None)
    for model in twins:
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5)
        model.blocks[0].up.weight.grad = None
        model.blocks[1].zero_grad()
    shard_blocks(twins.sharded, use_orig_params=False)
    assert twins.sharded.blocks[1]._flat_param.grad is None
    assert_same_values(
        full_values_and_gradients(twins.sharded), full_values_and_gradients(twins.plain)
    )


@distributed(2)
def test_scaler_skips_the_step_on_all_ranks_when_one_overflows() -> None:
    """The non-finite check sees a slice that only one rank holds."""
    twins = FlatTwins(Net, shard_blocks)
    optimizers = twins.optimizers(optim.SGD)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in twins]
    for step in range(3):
        for model, optimizer, scaler in zip(twins, optimizers, scalers, strict=True):
            twins.backward(model, scaler.scale(_NET(model, step)))
            if step == 1:
                grad = next(reversed(list(model.parameters()))).grad
                held = grad.to_local() if isinstance(grad, FlatShard) else grad
                held[-1:] = float("inf")
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [scaler.get_scale() for scaler in scalers] == [512.0, 512.0]
    twins.assert_equal_parameters()


@distributed(2)
def test_zero_grad_and_none() -> None:
    """Zeros stay zeros, `p.grad = None` is as good as `zero_grad()`."""
    twins = FlatTwins(Net, shard_blocks)
    for set_to_none in (False, True, None):
        twins.step(lambda model: _NET(model, 0))
        for model in twins:
            if set_to_none is None:
                for param in model.parameters():
                    param.grad = None
            else:
                model.zero_grad(set_to_none=set_to_none)
        twins.assert_equal_gradients()


# --- tensor parallelism ---


@distributed(2)
def test_dtensors_are_refused_before_anything_changes() -> None:
    """Each rank would have another flat parameter; the other mode then works."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 3, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)]))
    text = (
        "the parameters ['weight'] are DTensors of a tensor-parallel mesh, so they can't be part "
        "of one flat parameter. Pass use_orig_params=True."
    )
    with pytest.raises(RuntimeError) as caught:
        fully_shard(model, mesh=mesh["dp"], use_orig_params=False)
    assert str(caught.value) == text
    assert not isinstance(model.weight, FlatShard)
    whole = nn.Sequential(nn.Linear(4, 4), model)
    for dry_run in (True, False):
        with pytest.raises(RuntimeError) as caught:
            shard_model(whole, {"*": {}}, mesh=mesh["dp"], use_orig_params=False, dry_run=dry_run)
        assert str(caught.value).endswith(text)
        assert not is_sharded(whole[0])
    fully_shard(model, mesh=mesh["dp"])
    assert isinstance(model.weight, FlatShard)
    with pytest.raises(RuntimeError) as caught:
        register_flat_param(model)
    assert str(caught.value) == text
    assert names(model) == ["weight"]


# --- what is shown ---


@distributed(1, 2)
def test_one_parameter_for_each_handle_is_shown() -> None:
    """Numbered where a unit has several, in the place of all originals, which are None (S1.2)."""
    model = make_flat(_make_kinds, shard_root)
    assert names(model) == [
        "_flat_param",
        "_flat_param_1",
        "_flat_param_2",
        "_flat_param_3",
    ]
    assert [param.dtype for param in model.parameters()] == [
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.float32,
    ]
    assert [param.requires_grad for param in model.parameters()] == [True, True, True, False]
    assert all(param.dim() == 1 for param in model.parameters())
    assert model[0].fp32._parameters["weight"] is None
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4


class _Watching(Net):
    """Notes which names it shows in forward, and in backward by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[str]]] = []

    def note(self, when: str) -> None:
        self.seen.append((when, [name for name in names(self) if "blocks" not in name]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        self.note("forward")
        x.register_hook(lambda _: self.note("backward"))
        for block in self.blocks:
            x = block(x)
        return self.out(x)


@distributed(1, 2, 3)
def test_originals_are_shown_while_a_unit_runs() -> None:
    """In forward and in backward, and the flat parameters again when it is over (S1.2)."""
    model = make_flat(_Watching)
    inner: list[list[str]] = []
    model.blocks[0].down.register_forward_hook(lambda *_: inner.append(names(model.blocks[0])))
    model.blocks[0].down.register_full_backward_hook(
        lambda *_: inner.append(names(model.blocks[0]))
    )
    shown = [model._flat_param, model.blocks[0]._flat_param]
    for step in range(2):
        _NET(model, step).backward()
    expected = ["inp.weight", "inp.bias", "out.weight", "out.bias"]
    assert model.seen == [("forward", expected), ("backward", expected)] * 2
    assert inner == [names(Layer())] * 4
    assert names(model) == _FLAT_NAMES
    assert model.inp._parameters["weight"] is None
    assert model._flat_param is shown[0]
    assert next(model.blocks[0].parameters()) is shown[1]


@distributed(1, 2)
def test_flat_parameter_is_reachable_while_originals_are_shown() -> None:
    """As an attribute, in forward and in a scope of full values by hand (S1.2)."""
    model = make_flat()
    flat = model._flat_param
    found: list[Tensor] = []
    model.inp.register_forward_hook(lambda *_: found.append(model._flat_param))
    _NET(model, 0)
    assert found[0] is flat
    unshard(model)
    assert model._flat_param is flat
    assert "_flat_param" not in names(model)


class _FailingNet(Net):
    """Fails in forward, or has its output fail in backward."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inp(x)
        if self.where == "backward":
            hidden.register_hook(self.fail)
        for block in self.blocks:
            hidden = block(hidden)
        if self.where == "forward":
            raise KeyError("planned")
        return self.out(hidden)

    def fail(self, _: Tensor) -> None:
        raise KeyError("planned")


@pytest.mark.parametrize("where", ["forward", "backward"])
@distributed(1, 2)
def test_errors_leave_the_flat_parameters_shown(where: str) -> None:
    """And the next step is right."""
    twins = FlatTwins(_FailingNet, shard_blocks)
    twins.sharded.where = where
    with pytest.raises(KeyError, match="planned"):
        _NET(twins.sharded, 0).backward()
    twins.sharded.where = ""
    assert names(twins.sharded) == _FLAT_NAMES
    twins.train(_NET, optim.AdamW, lr=0.05)


# --- copies and conversions ---


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2])
@distributed()
def test_copies_train_alike(num_steps: int) -> None:
    """Copies made before and after a step show flat parameters of their own."""
    twins = FlatTwins(TiedLanguage, shard_blocks)
    if num_steps:
        twins.step(lambda model: square_mean(model(rank_tokens(9))))
    original = twins.sharded
    twins.sharded = copy.deepcopy(original)
    twins.sharded.zero_grad()
    twins.plain.zero_grad()
    assert names(twins.sharded) == names(original)
    assert not {id(p) for p in original.parameters()} & {id(p) for p in twins.sharded.parameters()}
    assert twins.sharded._flat_param is twins.sharded._parameters["_flat_param"]
    twins.train(lambda model, step: square_mean(model(rank_tokens(step))), optim.AdamW, lr=0.1)
    assert_flat_at_rest(original)


@distributed(2)
def test_deep_copy_leaves_gradients_behind() -> None:
    """As of any parameter; the copy then has its own."""
    twins = FlatTwins(OptionalStack, shard_blocks)
    twins.step(lambda model: square_mean(model(rank_input(4, 5), (True,) * 3)))
    twins.sharded = copy.deepcopy(twins.sharded)
    assert all(param.grad is None for param in twins.sharded.parameters())
    twins.plain.zero_grad()
    twins.step(lambda model: square_mean(model(rank_input(4, 5), (False,) * 3)))
    twins.assert_equal_gradients()


@pytest.mark.parametrize("name", ["double", "half", "bfloat16"])
@distributed(1, 2)
def test_converted_models_compute_alike(name: str) -> None:
    """The parameters stay the same objects, hidden ones are converted too."""
    twins = FlatTwins(Net, shard_blocks)
    _NET(twins.sharded, 0)
    params = list(twins.sharded.parameters())
    for model in twins:
        getattr(model, name)()
    assert all(a is b for a, b in zip(params, twins.sharded.parameters(), strict=True))
    dtype = twins.plain.inp.weight.dtype
    twins.step(lambda model: square_mean(model(rank_input(4, 5, dtype=dtype))))
    hidden = [entry.sharded for handle in get_handles(twins.sharded) for entry in handle.entries]
    assert {param.dtype for param in hidden} == {dtype}


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(1, 2)
def test_model_in_shared_memory_trains_on(use_orig_params: bool) -> None:
    """`share_memory()` moves the shards, of which all parameters stay views."""
    twins = Twins(Net, shard_blocks, use_orig_params=use_orig_params)
    assert twins.sharded.share_memory() is twins.sharded
    for _ in range(2):
        for model in twins:
            twins.backward(model, _NET(model, 0))
        assert_same_values(
            full_values_and_gradients(twins.sharded), full_values_and_gradients(twins.plain)
        )
    assert all(param.to_local().is_shared() for param in twins.sharded.parameters())


@distributed(1, 2)
def test_model_from_meta_is_initialised_in_a_scope() -> None:
    """`to_empty`, then the modules' own functions on full originals."""
    torch.manual_seed(1)
    plain = Net()
    with torch.device("meta"):
        model = Net()
    shard_blocks(model, use_orig_params=False)
    assert model._flat_param.is_meta
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    with unshard_params(model):
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
    assert_same_values(full_values_and_gradients(model), full_values_and_gradients(plain))
    assert_equal(_NET(model, 0).detach(), _NET(plain, 0).detach())


@distributed(1, 2)
def test_freezing_the_flat_parameter_between_steps() -> None:
    """Values, gradients and optimizer state stay; nothing is reduced for it (S2.9)."""
    twins = FlatTwins(Net, shard_blocks)
    optimizers = twins.optimizers()
    counts = []
    for is_trainable in (True, False, True):
        for model in twins:
            model.blocks[1].requires_grad_(is_trainable)
        with count_collectives() as log:
            _NET(twins.sharded, 0).backward()
        counts.append(log.count("reduce_scatter"))
        twins.backward(twins.plain, _NET(twins.plain, 0))
        assert (twins.sharded.blocks[1]._flat_param.grad is not None) is is_trainable
        twins.assert_equal_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert counts == ([4, 3, 4] if dist.get_world_size() > 1 else [0, 0, 0])
    assert all(
        state["step"] == 3 for param, state in optimizers[1].state.items() if param.ndim
    ) or (optimizers[1].state[twins.sharded.blocks[1]._flat_param]["step"] == 2)
    twins.assert_equal_parameters()


@distributed(2)
def test_freezing_keeps_a_gradient_that_is_there() -> None:
    """Until it is cleared, as for any parameter."""
    model = make_flat()
    _NET(model, 0).backward()
    grad = model._flat_param.grad
    model._flat_param.requires_grad_(False)
    _NET(model, 1).backward()
    assert model._flat_param.grad is grad


# --- what is refused ---


def _built_before(model: nn.Module) -> optim.Optimizer:
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    shard_blocks(model, use_orig_params=False)
    return optimizer


@pytest.mark.parametrize("method", ["step", "zero_grad"])
@distributed(2)
def test_optimizer_over_hidden_parameters_is_told(method: str) -> None:
    """It would step nothing, silently; built anew it trains."""
    model = Net()
    optimizer = _built_before(model)
    _NET(model, 0).backward()
    with pytest.raises(RuntimeError) as caught:
        getattr(optimizer, method)()
    assert str(caught.value) == (
        "parameter 'inp.weight' has no gradient of its own: its unit shows one flat parameter "
        "(use_orig_params=False). Build the optimizer from model.parameters() after fully_shard, "
        "or call register_orig_params(module) first."
    )
    optim.AdamW(model.parameters(), lr=0.1).step()
    assert_flat_at_rest(model)


@distributed(2)
def test_hidden_parameters_refuse_what_would_be_ignored() -> None:
    """Flags, late hooks and values; tensor hooks are run."""
    model = Net()
    weight = model.out.weight
    shard_blocks(model, use_orig_params=False)
    with pytest.raises(RuntimeError, match=r"'out.weight' has no gradient of its own"):
        weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"'out.weight' has no gradient of its own"):
        weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(RuntimeError, match=r"'out.weight' has no gradient of its own"):
        weight.grad = torch.zeros(weight.shape)
    seen: list[torch.Size] = []
    weight.register_hook(lambda grad: seen.append(grad.shape))
    for write in (weight.mul_, weight.fill_):
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match=r"'out\.weight' has no values of its"),
        ):
            write(2.0)
    _NET(model, 0).backward()
    assert seen == [weight.shape]


@distributed(2)
def test_post_accumulate_hooks_on_originals_are_refused() -> None:
    """Before anything changes, so the corrected call succeeds."""
    model = Layer()
    removable = model.up.weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(ValueError, match="post_accumulate") as caught:
        fully_shard(model, use_orig_params=False)
    assert str(caught.value) == (
        "the hooks on the parameters ['up.weight'] (register_post_accumulate_grad_hook) would "
        "never run with use_orig_params=False: only the flat parameter gets a gradient. Register "
        "them on it after fully_shard, or pass use_orig_params=True."
    )
    assert names(model) == names(Layer())
    removable.remove()
    fully_shard(model, use_orig_params=False)
    seen: list[Tensor] = []
    model._flat_param.register_post_accumulate_grad_hook(seen.append)
    model(rank_input(4, 15)).sum().backward()
    assert seen == [model._flat_param]


@distributed(2)
def test_tensor_hook_on_the_flat_parameter_is_refused_at_the_next_forward() -> None:
    """Autograd has no gradient of it; removed, training goes on."""
    twins = FlatTwins(Net, shard_blocks)
    for num_steps in range(2):
        removable = twins.sharded.blocks[1]._flat_param.register_hook(print)
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                _NET(twins.sharded, num_steps)
            assert str(caught.value) == (
                "the hooks on 'blocks.1._flat_param' (register_hook) would never run: autograd "
                "computes the gradients of the original parameters. Remove them, and use "
                "register_post_accumulate_grad_hook, which sees the reduced gradient, or register "
                "them on the original parameters after register_orig_params(module)."
            )
            assert_flat_at_rest(twins.sharded)
        removable.remove()
        twins.train(_NET, optim.AdamW, lr=0.1)


class _Taken(Layer):
    _flat_param_names = ()


@distributed(2)
def test_attribute_of_that_name_is_refused() -> None:
    """Before anything changes."""
    models: list[Any] = [Layer(), Layer(), _Taken()]
    models[0]._flat_param = 3
    models[1].register_buffer("_flat_param_1", torch.zeros(2))
    taken = ["_flat_param", "_flat_param_1", "_flat_param_names"]
    for model, name in zip(models, taken, strict=True):
        with pytest.raises(ValueError, match="flat") as caught:
            fully_shard(model, use_orig_params=False)
        assert str(caught.value) == (
            f"{type(model).__name__} has the attributes ['{name}'], the names of flat parameters. "
            "Rename them, or pass use_orig_params=True."
        )
        assert not any(isinstance(param, FlatShard) for param in model.parameters())
        fully_shard(model)


@pytest.mark.parametrize("value", ["x", None, 1])
def test_use_orig_params_must_be_a_bool(value: object) -> None:
    """Nothing else is guessed at; needs no process group."""
    with pytest.raises(ValueError, match="use_orig_params") as caught:
        fully_shard(nn.Linear(2, 2), use_orig_params=value)
    assert str(caught.value) == f"expected use_orig_params to be True or False, got {value!r}"


@distributed(2)
def test_replaced_flat_parameter_is_named() -> None:
    """By its FQN; put back, the model works."""
    model = make_flat()
    flat = model.blocks[1]._flat_param
    model.blocks[1]._flat_param = nn.Parameter(torch.zeros(3))
    with pytest.raises(RuntimeError) as caught:
        _NET(model, 0)
    assert str(caught.value).startswith(
        "parameter 'blocks.1._flat_param' was replaced by another object (Parameter(3,)) after "
        "fully_shard, as by assignment"
    )
    model.blocks[1]._flat_param = flat
    _NET(model, 0).backward()
    assert_flat_at_rest(model)


class _OwnWays(nn.Module):
    """One layer of each kind that computes with a parameter in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.embedding = nn.Linear(4, 4), nn.Embedding(5, 4)
        self.layer_norm, self.rms_norm = nn.LayerNorm(4), nn.RMSNorm(4)
        self.batch_norm, self.group_norm = nn.BatchNorm1d(4), nn.GroupNorm(2, 4)
        self.attention, self.prelu = nn.MultiheadAttention(4, 2), nn.PReLU()
        self.lstm = nn.LSTM(4, 4)
        self.scales = nn.ParameterList([torch.ones(4)])

    def encode(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.scales[0]
        return y

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer_norm(self.linear(x)) + self.embedding(x[:, 0].long() % 5)
        x = self.group_norm(self.batch_norm(self.rms_norm(x)))
        x = self.attention(self.prelu(x), x, x)[0]
        y: Tensor = self.lstm(self.encode(x))[0]
        return y


def _called_outside(model: nn.Module, x: Tensor) -> dict[str, str]:
    """Return what each layer of the first block says where the program calls it."""
    found = {}
    for name, layer in model[0].named_children():
        args = (
            (x, x, x) if name == "attention" else (x.long() % 5,) if name == "embedding" else (x,)
        )
        run = model[0].encode if name == "scales" else layer
        with pytest.raises(RuntimeError) as caught:
            run(*(args if name != "scales" else (x,)))
        found[name] = str(caught.value)
    return found


@distributed(2)
def test_whole_layer_outside_its_unit_says_what_to_do() -> None:
    """Lockstep: with a flat parameter as with originals. Norms ran without their weights."""
    model = nn.Sequential(_OwnWays(), _OwnWays())
    plain = [repr(layer) for layer in model[0].children()]
    shard_children(model, use_orig_params=False)
    x = rank_input(3, 4)
    for step in range(3):
        found = _called_outside(model if step < 2 else copy.deepcopy(model), x)
        for name, text in found.items():
            assert re.match(rf"parameter '0\.{name}\.\w+' has no values of its own: its unit", text)
            assert "Only a call of its unit" in text
            assert "unshard(model, recurse=True)" in text
        printed = [repr(layer).replace("Tensor c", "Parameter c") for layer in model[0].children()]
        assert printed == plain
        model(x).sum().backward()
    assert_flat_at_rest(model)


@distributed(2)
def test_hidden_parameter_is_used_for_nothing() -> None:
    """Values written to it would be lost, and those read might be of before a change of dtype."""
    model = make_flat()
    weight = model.inp.weight
    for use in (weight.zero_, weight.clone, lambda: weight + 1):
        with (
            torch.no_grad(),
            pytest.raises(
                RuntimeError, match=r"'inp\.weight' has no values of its own.*register_o"
            ),
        ):
            use()
    assert weight.shape == (15, 5)
    assert copy.deepcopy(model).inp.weight.shape == (15, 5)
    register_orig_params(model)
    assert isinstance(model.inp.weight, FlatShard)
    register_flat_param(model)
    with unshard_params(model, writeback=False):
        assert isinstance(model.inp.weight, nn.Parameter)
        register_flat_param(model)
        with pytest.raises(RuntimeError, match=r"'inp\.weight' has no values of its own"):
            model.inp(rank_input(4, 5))
    assert_flat_at_rest(model)


# --- memory ---


def _train_once(model: nn.Module) -> None:
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    _NET(model, 0).backward()
    optimizer.step()


def _fail_once(model: Any) -> None:
    model.where = "backward"
    with pytest.raises(KeyError, match="planned"):
        _NET(model, 0).backward()


def _evaluate_in_scope(model: nn.Module) -> None:
    with unshard_params(model, with_grads=True), torch.no_grad():
        _NET(model, 0)


def _hold(model: nn.Module) -> None:
    unshard(model, recurse=True)


LIVES = [_train_once, _fail_once, _evaluate_in_scope, _hold]


@pytest.mark.parametrize("live", LIVES)
@distributed(1, 2)
def test_deleted_model_is_freed_without_the_garbage_collector(
    live: Callable[[nn.Module], None],
) -> None:
    """Reference counts alone free parameters of both forms, handles and every byte."""
    with _no_collector():
        model = make_flat(_FailingNet)
        live(model)
        handles = get_handles(model)
        things: list[Any] = [*model.modules(), *model.parameters(), *get_states(model), *handles]
        things += [entry.sharded for handle in handles for entry in handle.entries]
        references = [weakref.ref(thing) for thing in things]
        storages = [StorageWeakRef(handle.local_shard.untyped_storage()) for handle in handles]
        del model, handles, things
        alive = still_alive(references, storages)
    assert alive == []


@distributed(1, 2)
def test_flat_parameters_take_no_second_copy() -> None:
    """Made, and held after steps: bytes as with original parameters, gradients and state too."""
    counts = []
    for use_orig_params in (True, False):
        gc.collect()
        with peak_bytes() as memory:
            model = Net()
            shard_blocks(model, use_orig_params=use_orig_params)
            optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for step in range(2):
                _NET(model, step).backward()
                optimizer.step()
            gc.collect()
        counts.append(memory.current)
        shards = sum(handle.local_shard.nbytes for handle in get_handles(model))
        held = sum(param.to_local().nbytes for param in model.parameters())
        assert held <= shards
        assert {p.to_local().untyped_storage().data_ptr() for p in model.parameters()} == {
            handle.local_shard.untyped_storage().data_ptr() for handle in get_handles(model)
        }
        del model, optimizer
    alignment_nbytes = 4 * 4 * len(_NET_NAMES)  # of each parameter, which the flat momentum has too
    assert abs(counts[1] - counts[0]) <= alignment_nbytes


@distributed(2)
def test_collectives_are_those_of_original_parameters() -> None:
    """In forward, backward and step: the form is shown, not communicated."""
    events = []
    for use_orig_params in (True, False):
        torch.manual_seed(0)
        model = Net()
        shard_blocks(model, use_orig_params=use_orig_params)
        _train_once(model)
        with count_collectives() as log:
            _train_once(model)
        events.append(log.events)
    assert events[0] == events[1]
