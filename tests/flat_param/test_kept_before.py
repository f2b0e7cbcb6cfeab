"""Parameters that a program keeps since before `fully_shard`: in lists and dicts, or elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_shard import (
    ShardingStrategy,
    fully_shard,
    is_sharded,
    register_flat_param,
    register_orig_params,
    reshard,
    unshard,
    unshard_params,
)
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs.claims import assert_right, unsharded_gradients
from tests.programs.models import rank_input, square_mean

DIM = 4


class GroupedExperts(nn.Module):
    """Computes with weights that `keep` keeps."""

    def __init__(self, keep: str = "list") -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(DIM))
        self.keep = keep
        self.kept: Any = KEEPING[keep](self)

    def weights(self) -> list[Tensor]:
        kept = self.kept() if callable(self.kept) else self.kept
        if self.keep in ("dict", "nested"):
            kept = [each for item in kept.values() for each in item]
        return list(kept)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights()
        mixed = torch.einsum("bi,eoi->bo", x, torch.stack([w for w in weights if w.dim() == 2]))
        for weight in weights:
            mixed = torch.tanh(mixed @ weight.T if weight.dim() == 2 else mixed * weight)
        return mixed + self.experts[0](x)


def _kept_matrices(module: GroupedExperts) -> list[nn.Parameter]:
    return [expert.weight for expert in module.experts]


def _closure_of(module: GroupedExperts) -> Callable[[], Any]:
    weights = _kept_matrices(module)
    return lambda: weights


# What is followed, and what is refused by name.
FOLLOWED = ["list", "list of all", "dict", "nested"]
REFUSED = ["tuple", "set", "closure"]
KEEPING: dict[str, Callable[[GroupedExperts], Any]] = {
    "list": _kept_matrices,
    "list of all": lambda module: [
        *_kept_matrices(module),
        module.scale,
        _kept_matrices(module)[1],
    ],
    "dict": lambda module: {"up": _kept_matrices(module)[:2], "down": _kept_matrices(module)[2:]},
    "nested": lambda module: {"up": [_kept_matrices(module)[0]], 1: [*_kept_matrices(module)[1:]]},
    "tuple": lambda module: tuple(_kept_matrices(module)),
    "set": lambda module: {*_kept_matrices(module)[:1]},
    "closure": _closure_of,
}


class ExpertsModel(nn.Module):
    def __init__(self, keep: str = "list") -> None:
        super().__init__()
        self.body = nn.Sequential(GroupedExperts(keep), GroupedExperts(keep))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x))
        return result


def _shard_experts(model: nn.Module, **options: Any) -> None:
    fully_shard(model.body[0], **options)
    fully_shard(model, **options)


def _experts_loss(model: nn.Module, number: int) -> Tensor:
    return square_mean(model(rank_input(3, DIM, step=number, dtype=torch.float64)))


def trains(model: nn.Module, number: int) -> None:
    """A plain microbatch."""
    _experts_loss(model, number).backward()


def evaluates(model: nn.Module, number: int) -> None:
    """An evaluation, edits at rest and in a scope through what is kept, and a microbatch."""
    with torch.no_grad():
        factor = _experts_loss(model, number)
        for weight in model.body[0].weights()[:1]:
            weight.mul_(0.75)
    with unshard_params(model) if is_sharded(model) else torch.no_grad(), torch.no_grad():
        for weight in {*model.body[1].weights()}:
            weight[0].mul_(0.5)
    (factor * _experts_loss(model, number)).backward()


def trains_while_unsharded(model: nn.Module, number: int) -> None:
    """A penalty on what is kept, between `unshard` and `reshard`."""
    if is_sharded(model):
        unshard(model, recurse=True)
    penalty = sum(weight.square().sum() for weight in {*model.body[0].weights()})
    (_experts_loss(model, number) + 0.1 * penalty).backward()
    if is_sharded(model):
        reshard(model, recurse=True)


def changes_the_list(model: nn.Module, number: int) -> None:
    """The program changes its list between forwards."""
    module = model.body[number % 2]
    if isinstance(module.kept, list):
        module.kept.reverse()
        if number == 2:
            module.kept.pop()
        if number == 4:
            module.kept = KEEPING[module.keep](module)
    _experts_loss(model, number).backward()


PROGRAMS = [trains, evaluates, trains_while_unsharded, changes_the_list]


@pytest.mark.parametrize(
    *pairwise(
        keep=FOLLOWED,
        program=PROGRAMS,
        strategy=list(ShardingStrategy),
        use_orig_params=[True, False],
        accumulates=[False, True],
    )
)
@distributed(1, 2, 3)
def test_weights_kept_in_lists_are_those_of_the_forward(
    keep: str,
    program: Callable[[nn.Module, int], None],
    strategy: ShardingStrategy,
    use_orig_params: bool,
    accumulates: bool,
) -> None:
    """Values and gradients of three steps are a plain model's."""
    if program is evaluates and (accumulates or not use_orig_params):
        return  # neither edits between microbatches nor hidden shards are part of this
    assert_right(
        lambda: ExpertsModel(keep),
        program,
        shard=_shard_experts,
        accumulates=accumulates,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(1, 2, 3)
def test_lists_show_what_modules_show(use_orig_params: bool) -> None:
    """At rest the shards, in a scope and between `unshard` and `reshard` the full parameters."""
    model = fully_shard(GroupedExperts(), use_orig_params=use_orig_params)
    at_rest = [id(weight) for weight in model.kept]
    with unshard_params(model):
        assert all(k is e.weight for k, e in zip(model.kept, model.experts, strict=True))
    unshard(model)
    assert all(k is e.weight for k, e in zip(model.kept, model.experts, strict=True))
    reshard(model)
    assert [id(weight) for weight in model.kept] == at_rest
    register_orig_params(model)
    assert all(k is e.weight for k, e in zip(model.kept, model.experts, strict=True))
    register_flat_param(model)
    assert [id(weight) for weight in model.kept] == at_rest


@pytest.mark.parametrize("has_run", [False, True])
@distributed(1, 2, 3)
def test_list_of_a_copy_is_the_copys(has_run: bool) -> None:
    """A deep copy, made before or after a forward, computes with its own weights."""
    torch.manual_seed(0)
    model = ExpertsModel().double()
    _shard_experts(model)
    if has_run:
        trains(model, 0)
        model.zero_grad()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    trains(twin, 1)
    again = ExpertsModel().double()
    assert twin.body[0].kept[0] is twin.body[0].experts[0].weight
    with unshard_params(twin, writeback=False):
        again.load_state_dict(twin.state_dict())
    _shard_experts(again)
    trains(again, 1)
    expected = unsharded_gradients(again)
    for name, grad in unsharded_gradients(twin).items():
        torch.testing.assert_close(grad, expected[name])


@distributed(1, 2, 3)
def test_failed_call_leaves_lists_as_they_were() -> None:
    """What they hold is the plain parameter again, and a corrected call is right."""
    model = GroupedExperts().double()

    class _RefusesHooks(nn.Module):
        def register_state_dict_post_hook(self, hook: Any) -> Any:
            raise LookupError("no hooks")

    model.extra = _RefusesHooks()
    with pytest.raises(LookupError):
        fully_shard(model)
    del model.extra
    assert all(type(weight) is nn.Parameter for weight in model.kept)
    plain = copy.deepcopy(model)
    x = torch.ones(1, DIM, dtype=torch.float64)
    torch.testing.assert_close(fully_shard(model)(x), plain(x))


@pytest.mark.parametrize(
    *pairwise(keep=REFUSED, strategy=list(ShardingStrategy), use_orig_params=[True, False])
)
@distributed(1, 2, 3)
def test_objects_kept_elsewhere_are_refused_by_name(
    keep: str, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """The error says what was read; both remedies are right: from the module, from a list."""
    model = ExpertsModel(keep).double()
    _shard_experts(model, strategy=strategy, use_orig_params=use_orig_params)
    name = r"'body\.\d\.experts\.\d\.weight'.*an object from before the forward"
    with pytest.raises(RuntimeError, match=name):
        trains(model, 0)

    def read_from_modules() -> nn.Module:
        made = ExpertsModel(keep)
        for module in made.body:
            module.weights = lambda module=module: KEEPING["list"](module)
        return made

    for make in (read_from_modules, ExpertsModel):
        assert_right(
            make, trains, shard=_shard_all, strategy=strategy, use_orig_params=use_orig_params
        )


def _shard_all(model: nn.Module, **options: Any) -> None:
    for module in model.body:  # a copy's function must be of the copy
        if "weights" in vars(module):
            module.weights = lambda module=module: KEEPING["list"](module)
    _shard_experts(model, **options)
