"""Optimizers of whole matrices and of blocks step shards exactly as they step whole tensors."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from composable_shard import (
    Block,
    FlatShard,
    ShardedGradScaler,
    ShardingStrategy,
    clip_grad_norm_,
    get_handles,
    shard_optimizer_state,
)
from composable_shard.comm.trace import count_collectives
from composable_shard.options import Granularity
from composable_shard.tensor.gradient_rules import step_hooks
from tests.harness.assertions import assert_equal
from tests.harness.pairs import pairwise
from tests.harness.ranks import device, distributed, run_ranks
from tests.programs.models import (
    Net,
    Nothing,
    Twins,
    assert_at_rest,
    assert_is_slice,
    every_granularity,
    loss_of,
    rank_input,
    shard_blocks,
    shard_root,
)

STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.SHARD_OPTIM,
]


class Shampoo(Optimizer):
    """Gupta, Koren, Singer (2018): preconditions a matrix from both sides."""

    def __init__(self, params: Any, lr: float = 0.05, eps: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_matrix(param, param.grad, group)

    def _step_matrix(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        rows, columns = param.shape
        if not state:
            state["left"] = group["eps"] * torch.eye(rows)
            state["right"] = group["eps"] * torch.eye(columns)
        state["left"] += grad @ grad.T
        state["right"] += grad.T @ grad
        left, right = (self._inverse_root(state[side]) for side in ("left", "right"))
        param.sub_(left @ grad @ right, alpha=group["lr"])

    @staticmethod
    def _inverse_root(matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ torch.diag(values.clamp(min=1e-8) ** -0.25) @ vectors.T


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices, and the rest."""
    matrices = [param for param in model.parameters() if param.dim() == 2]
    return matrices, [param for param in model.parameters() if param.dim() != 2]


def muon(model: nn.Module) -> list[Optimizer]:
    """Return Muon for the matrices, and AdamW for the rest."""
    matrices, rest = split(model)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def adafactor(model: nn.Module, **options: Any) -> list[Optimizer]:
    """Return Adafactor for the matrices, and AdamW for the rest."""
    matrices, rest = split(model)
    optimizer = torch.optim.Adafactor(matrices, lr=0.02, **options)
    return [optimizer, torch.optim.AdamW(rest, lr=0.01)]


def shampoo(model: nn.Module) -> list[Optimizer]:
    """Return Shampoo for the matrices, and AdamW for the rest."""
    matrices, rest = split(model)
    return [Shampoo(matrices), torch.optim.AdamW(rest, lr=0.01)]


def adamw(model: nn.Module) -> list[Optimizer]:
    """Return AdamW for everything."""
    return [torch.optim.AdamW(model.parameters(), lr=0.01)]


def matrices_whole(param: nn.Parameter) -> Granularity:
    """Return the granularity for the split of these optimizers."""
    return "param" if param.dim() == 2 else "element"


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "muon": muon,
    "adafactor": adafactor,
    "adafactor_foreach": partial(adafactor, foreach=True),
    "shampoo": shampoo,
}


def train_with_optimizers(
    twins: Twins, optimizers: list[list[Optimizer]], num_steps: int = 3, first: int = 0
) -> None:
    """Train both twins alike; compare losses, gradients and parameters."""
    for step in range(first, first + num_steps):
        twins.step(partial(loss_of, step=step))
        with count_collectives() as log:
            for optimizer in [each for of_one in optimizers for each in of_one]:
                optimizer.step()
        assert not log.events
        for each in [each for of_one in optimizers for each in of_one]:
            each.zero_grad()
        twins.assert_equal_parameters()


@pytest.mark.parametrize(
    ("name", "strategy"),
    [*((name, STRATEGIES[0]) for name in OPTIMIZERS), *(("muon", each) for each in STRATEGIES[1:])],
)
@distributed(2, 3, on_device=True)
def test_matrix_optimizer_equals_the_unsharded_one(name: str, strategy: ShardingStrategy) -> None:
    """S2.4: three steps, without a collective in any; state only where matrices are."""
    shard = partial(shard_blocks, strategy=strategy, granularity=matrices_whole)
    twins = Twins(Net, shard)
    optimizers = [OPTIMIZERS[name](model) for model in twins]
    train_with_optimizers(twins, optimizers)
    assert_at_rest(twins.sharded)
    for param in split(twins.sharded)[0]:
        assert isinstance(param, FlatShard)
        assert (param in optimizers[1][0].state) == param._shard_spec.is_whole


@pytest.mark.parametrize("name", ["muon", "shampoo"])
@distributed(3)
def test_rank_without_a_parameter_takes_part(name: str) -> None:
    """S2.3: one matrix and one vector for three ranks."""
    twins = Twins(lambda: nn.Linear(5, 4), shard_root, granularity="param")
    train_with_optimizers(twins, [OPTIMIZERS[name](model) for model in twins])


def _state_nbytes(optimizers: list[Optimizer]) -> int:
    states = [state for each in optimizers for state in each.state.values()]
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    locals_ = [t.to_local() if isinstance(t, FlatShard) else t for t in tensors]
    return sum(local.nbytes for local in locals_ if local.dim())


def _trained_state_nbytes(size: int) -> int:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2 * size)))
    shard_root(model, granularity="param")
    optimizers = muon(model)
    model(rank_input(3, 16)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    return _state_nbytes(optimizers)


def test_optimizer_state_is_spread_evenly() -> None:
    """S2.3: momentum of two matrices, and both of AdamW's states of two vectors, on each rank."""
    assert set(run_ranks(2, _trained_state_nbytes, 2)) == {4 * (2 * 256 + 2 * 2 * 16)}


@distributed(2, 3)
def test_groups_and_schedulers_act_everywhere() -> None:
    """S2.1: groups hold all parameters on all ranks; a changed learning rate counts."""
    twins = Twins(Net, shard_blocks, granularity="param")
    optimizers = [muon(model) for model in twins]
    for plain, sharded in zip(*optimizers, strict=True):
        sizes = [len(group["params"]) for group in plain.param_groups]
        assert sizes == [len(group["params"]) for group in sharded.param_groups]
    schedulers = [StepLR(each, 1, gamma=0.5) for of_one in optimizers for each in of_one]
    for step in range(3):
        train_with_optimizers(twins, optimizers, 1, first=step)
        for scheduler in schedulers:
            scheduler.step()
    for of_one in optimizers:
        of_one[0].param_groups[0]["lr"] = 0.5
    train_with_optimizers(twins, optimizers, 1, first=3)


def _closure(twins: Twins, model: nn.Module, step: int) -> Tensor:
    model.zero_grad()
    loss = loss_of(model, step)
    twins.backward(model, loss)
    return loss.detach()


@pytest.mark.fast
@distributed(2)
def test_closure_runs_once_on_every_rank() -> None:
    """S2.5: its loss comes back; what it gathers is gathered anew after the step."""
    for strategy in STRATEGIES:
        shard = partial(shard_blocks, strategy=strategy, granularity=matrices_whole)
        twins = Twins(Net, shard)
        optimizers = [muon(model)[0] for model in twins]
        for step in range(3):
            losses = []
            for model, optimizer in zip(twins, optimizers, strict=True):
                losses.append(optimizer.step(partial(_closure, twins, model, step)))
            assert_equal(losses[1], losses[0])
            twins.assert_equal_parameters()


class TakesArguments(torch.optim.SGD):
    """A step with an argument of its own."""

    def step(self, closure: Any = None, *, scale: float = 1.0) -> None:
        for group in self.param_groups:
            group["lr"] = 0.1 * scale
        super().step(closure)


@distributed(2)
def test_further_arguments_of_step_pass_through() -> None:
    """S2.5: the optimizer's own method is called."""
    twins = Twins(Net, shard_blocks, granularity="param")
    optimizers = [TakesArguments(model.parameters(), lr=0.1) for model in twins]
    twins.step(loss_of)
    for each in optimizers:
        each.step(scale=3.0)
    twins.assert_equal_parameters()


@distributed(3)
def test_group_that_lacks_the_first_rank_owns_by_group_rank() -> None:
    """S2.8: ranks 1 and 2 of 3 as the mesh; owners are ranks of the group, not of the world."""
    mesh = DeviceMesh("cpu", [1, 2])
    if dist.get_rank() == 0:
        return
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    sharded = Net()
    shard_blocks(sharded, mesh=mesh, granularity="param")
    optimizers = [muon(model) for model in (plain, sharded)]
    group = mesh.get_group()
    for step in range(3):
        for model in (plain, sharded):
            loss_of(model, step).backward()
        for param in plain.parameters():
            assert param.grad is not None
            dist.all_reduce(param.grad.div_(2), group=group)
        for optimizer in optimizers[0] + optimizers[1]:
            optimizer.step()
            optimizer.zero_grad()
        for param, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert isinstance(param, FlatShard)
            assert param._shard_spec.owner in (0, 1)
            assert_is_slice(param, expected)


@distributed(2)
def test_second_step_after_one_backward_is_seen() -> None:
    """A forward between two steps gathers what only owners have written since."""
    for strategy in STRATEGIES:
        shard = partial(shard_root, strategy=strategy, granularity="param")
        twins = Twins(lambda: nn.Linear(5, 4, bias=False), shard)
        optimizers = [torch.optim.Muon(model.parameters(), lr=0.1) for model in twins]
        twins.step(loss_of)
        for _ in range(2):
            for each in optimizers:
                each.step()
            with torch.no_grad():
                plain, sharded = [model(torch.ones(2, 5)) for model in twins]
            assert_equal(sharded, plain)


@pytest.mark.fast
@distributed(2)
def test_step_by_hand_after_a_backward_is_seen() -> None:
    """A loop that skips parameters without gradient writes on owners alone."""
    for strategy in STRATEGIES:
        twins = Twins(Net, partial(shard_blocks, strategy=strategy, granularity="param"))
        for step in range(3):
            twins.step(partial(loss_of, step=step))
            with torch.no_grad():
                for model in twins:
                    for param in model.parameters():
                        if param.grad is not None:
                            param.sub_(param.grad, alpha=0.1)
                            param.grad = None


@distributed(2)
def test_step_between_forward_and_backward_raises_on_all_ranks() -> None:
    """Also where the step writes nothing, on a rank that owns nothing."""
    model = nn.Linear(5, 4, bias=False)
    shard_root(model, granularity="param", strategy=ShardingStrategy.SHARD_GRAD_OP)
    optimizer = torch.optim.Muon(model.parameters())
    loss_of(model).backward()
    loss = loss_of(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match="were written between a forward and its backward"):
        loss.backward()
    loss_of(model).backward()


@pytest.mark.parametrize("name", ["muon", "adafactor", "shampoo"])
@pytest.mark.parametrize("granularity", ["element", "row", Block(16)], ids=str)
@distributed(2)
def test_other_granularities_gather_whole_matrices(name: str, granularity: Granularity) -> None:
    """Two steps are those of the plain model; only the first warns."""
    twins = Twins(Net, partial(shard_blocks, granularity=granularity))
    optimizers = [OPTIMIZERS[name](model)[0] for model in twins]
    twins.step(loss_of)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for optimizer in optimizers:
                optimizer.step()
    for param, expected in zip(twins.sharded.parameters(), twins.plain.parameters(), strict=True):
        assert isinstance(param, FlatShard)
        torch.testing.assert_close(param.full_tensor(), expected.detach(), rtol=1e-3, atol=1e-4)
    assert not seen


@pytest.mark.parametrize("name", ["muon", "adafactor"])
@distributed(2, 3)
def test_warm_optimizer_continues(name: str) -> None:
    """State of any shape made before sharding stays on the owner, and nowhere else."""
    torch.manual_seed(0)
    models = [Net(), Net()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [OPTIMIZERS[name](model) for model in models]
    for model, of_one in zip(models, optimizers, strict=True):
        model(torch.ones(2, 5)).sum().backward()
        for each in of_one:
            each.step()
            each.zero_grad()
    shard_blocks(models[1], granularity=matrices_whole)
    for each in optimizers[1]:
        shard_optimizer_state(each)
    twins = Twins.__new__(Twins)
    twins.plain, twins.sharded = models
    assert (len(optimizers[1][0].state) == 0) == all(
        param._shard_spec.is_owned_by_other_rank  # type: ignore[union-attr]
        for param in split(models[1])[0]
    )
    train_with_optimizers(twins, optimizers)


# Blocks


class BlockMomentum(Optimizer):
    """SGD whose momentum is kept as int8 with a scale for each block of `p.to_local()`."""

    def __init__(self, params: Any, block: int, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "block": block})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_param(param, group)

    def _step_param(self, param: Tensor, group: dict[str, Any]) -> None:
        grad, state = param.grad, self.state[param]
        assert grad is not None
        local = grad.to_local() if isinstance(grad, FlatShard) else grad
        blocks = nn.functional.pad(local.reshape(-1), (0, -local.numel() % group["block"]))
        blocks = blocks.view(-1, group["block"])
        if state:
            blocks = blocks + 0.9 * state["int8"].float() * state["scale"]
        state["scale"] = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        state["int8"] = (blocks / state["scale"]).round().to(torch.int8)
        update = (state["int8"].float() * state["scale"]).view(-1)[: local.numel()]
        if isinstance(param, FlatShard):
            param.data.view(-1).to_local().sub_(update, alpha=group["lr"])
            param.data.mul_(1.0)  # notes the write
        else:
            param.view(-1).sub_(update, alpha=group["lr"])


def _is_exact(granularity: Granularity, world_size: int) -> bool:
    torch.manual_seed(0)
    twins = Twins(lambda: nn.Linear(60, 30), shard_root, granularity=granularity)
    optimizers = [BlockMomentum(model.parameters(), 256) for model in twins]
    for step in range(3):
        for model in twins:
            twins.backward(model, model(rank_input(4, 60, step=step)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(twins.sharded.parameters(), twins.plain.parameters(), strict=True)
    return all(torch.equal(param.full_tensor(), plain.detach()) for param, plain in pairs)  # type: ignore[operator]


def test_block_wise_state_is_exact_where_no_block_is_cut() -> None:
    """With blocks of 256; with cuts anywhere the scales are those of other blocks."""
    assert run_ranks(2, _is_exact, Block(256), 2) == [True, True]
    assert run_ranks(2, _is_exact, "element", 2) == [False, False]


# Clipping


GRADIENTS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "mixed": (Net, every_granularity),
    "whole": (Net, "param"),
    "one": (lambda: nn.Linear(5, 3, bias=False), "param"),
}


@pytest.mark.parametrize(
    *pairwise(
        norm_type=[1.0, 2.0, float("inf")],
        kind=GRADIENTS,
        world_size=(2, 3),
        is_inference=[False, True],
    )
)
@distributed(on_device=True)
def test_clipping_equals_torchs_on_the_full_model(
    kind: str, norm_type: float, is_inference: bool
) -> None:
    """S2.10: one collective, also where ranks have no gradients at all, or one of inference."""
    make, granularity = GRADIENTS[kind]
    twins = Twins(make, shard_root, granularity=granularity)
    twins.step(loss_of)
    last = list(twins.sharded.parameters())[-1]
    if is_inference and last.grad is not None:
        with torch.inference_mode():
            last.grad = last.grad.clone()
    expected = nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.1, norm_type)
    with count_collectives() as log:
        norm = clip_grad_norm_(twins.sharded, 0.1, norm_type)
    # One float64, with a flag for NaN where the largest is sought.
    nbytes = 16 if norm_type == float("inf") else 8
    assert [(event.kind, event.nbytes) for event in log.events] == [("all_reduce", nbytes)]
    torch.testing.assert_close(norm, expected)
    for param, plain in zip(twins.sharded.parameters(), twins.plain.parameters(), strict=True):
        assert isinstance(param, FlatShard)
        grad = torch.empty_like(param) if param.grad is None else param.grad
        assert isinstance(grad, FlatShard)
        torch.testing.assert_close(grad.full_tensor(), plain.grad)


class _PartlyUsed(Net):
    """With a parameter that has no elements, and two that have no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = Nothing()
        self.unused = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nothing(x.new_ones(0, 0)).sum()


ORDERS = [0.5, 1.0, 2.0, 3.0, math.inf]


@pytest.mark.parametrize("granularity", ["element", "param"])
@distributed(3)
def test_norm_of_each_order_leaves_out_what_has_no_gradient(granularity: Any) -> None:
    """On any rank, or no elements: an owner may have such a gradient, which other ranks do not."""
    twins = Twins(_PartlyUsed, shard_root, granularity=granularity)
    twins.step(loss_of)
    grads = [p.grad for p in twins.plain.parameters() if p.grad is not None and p.grad.numel()]
    assert len(grads) < len(list(twins.plain.parameters())) - 2
    for order in ORDERS:
        expected = nn.utils.get_total_norm(grads, order)
        torch.testing.assert_close(clip_grad_norm_(twins.sharded, 1e9, order), expected)


@pytest.mark.parametrize(("is_trained", "dtype"), [(True, torch.float64), (False, torch.float32)])
@distributed(2)
def test_norm_has_the_dtype_of_what_is_trained(is_trained: bool, dtype: torch.dtype) -> None:
    """Who does not own a parameter can't know whether it has a gradient; a frozen one has none."""
    model = Net()
    model.scale = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=is_trained)
    shard_root(model, granularity="param")
    loss_of(model).backward()
    assert clip_grad_norm_(model, 1.0).dtype is dtype
    assert clip_grad_norm_(model.scale, 1.0).dtype is torch.float64


@distributed(4, on_device=True)
def test_clipping_on_a_two_dimensional_mesh() -> None:
    """S2.10: replicas count once."""
    mesh = init_device_mesh(device().type, (2, 2))
    twins = Twins(Net, shard_blocks, mesh=mesh, granularity=every_granularity)
    for model in twins:
        twins.backward(model, loss_of(model))
    expected = nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm_(twins.sharded, 0.1), expected)


@distributed(2)
def test_gradient_of_a_frozen_parameter_counts() -> None:
    """Its owner alone has it; the others take part all the same, as torch counts it."""
    twins = Twins(Net, shard_root, granularity=every_granularity)
    twins.step(loss_of)
    for model in twins:
        model.out.weight.requires_grad_(False)
    expected = nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm_(twins.sharded, 0.1), expected)


@pytest.mark.parametrize("granularity", ["param", every_granularity], ids=["param", "mixed"])
@distributed(2, 3)
def test_norm_that_is_not_finite_raises_on_all_ranks(granularity: Any) -> None:
    """Also on those without the gradient; nothing is scaled."""
    model = Net()
    shard_root(model, granularity=granularity)
    loss_of(model).backward()
    grad = model.blocks[0].up.weight.grad
    if grad is not None:
        grad.fill_(float("nan"))
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(model, 0.1, error_if_nonfinite=True)
    for name, old in before.items():
        after = model.get_parameter(name).grad
        assert isinstance(after, FlatShard)
        assert_equal(after.to_local(), old.to_local(), name)


@distributed(2, 3)
def test_torchs_clipping_raises() -> None:
    """On all ranks alike, also on one whose own gradients are all shared."""
    model = Net()
    shard_blocks(model, granularity=lambda p: "param" if tuple(p.shape) == (3, 15) else "element")
    loss_of(model).backward()
    for clip in (nn.utils.clip_grad_norm_, lambda params, _: nn.utils.get_total_norm(params)):
        tensors = model.parameters()
        if clip is not nn.utils.clip_grad_norm_:
            tensors = [p.grad for p in model.parameters() if p.grad is not None]
        with (
            count_collectives() as log,
            pytest.raises(RuntimeError, match=r"'inp.weight'.*composable_shard.clip_grad_norm_"),
        ):
            clip(tensors, 1.0)
        assert not log.events
    assert clip_grad_norm_(model, 1.0) > 0


# Other models of the process


@pytest.mark.parametrize("is_flat", [False, True])
@distributed(2)
def test_torch_clips_and_scales_another_model(is_flat: bool) -> None:
    """Parameters that one rank owns concern the gradients of their own model alone."""
    owned = Net()
    shard_blocks(owned, granularity=matrices_whole)
    loss_of(owned).backward()
    twins = Twins(Net, partial(shard_blocks, use_orig_params=not is_flat))
    for model in twins:
        twins.backward(model, loss_of(model))
    expected = nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.1)
    clipped = nn.utils.clip_grad_norm_(twins.sharded.parameters(), 0.1)
    torch.testing.assert_close(clipped, expected)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(twins.sharded)).backward()
    _scaled_step(adamw(twins.sharded), scaler, twins.sharded)
    with pytest.raises(RuntimeError, match=r"composable_shard.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(owned.parameters(), 0.1)


@distributed(2)
def test_hooks_on_optimizers_end_with_the_last_model() -> None:
    """Only while a sharded model lives does a step of any optimizer call ours."""
    gc.collect()
    # torch keeps a model that a hook on one of its parameters refers to, as those of other tests.
    num_others = step_hooks.num_handles
    first, second = Net(), Net()
    shard_blocks(first, granularity=matrices_whole)
    shard_blocks(second, granularity=matrices_whole)
    loss_of(second).backward()
    del first
    gc.collect()
    assert step_hooks.num_handles == num_others + len(get_handles(second))
    assert _num_step_hooks() == 2
    del second
    gc.collect()
    assert step_hooks.num_handles == num_others
    assert _num_step_hooks() == (2 if num_others else 0)


def _num_step_hooks() -> int:
    return len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks)


# Loss scaling


def _scaled_step(optimizers: list[Optimizer], scaler: GradScaler, model: nn.Module) -> None:
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    model.zero_grad()


@pytest.mark.parametrize("make", [muon, adamw])
@pytest.mark.parametrize("kind", GRADIENTS)
@distributed(3, on_device=True)
def test_sharded_scaler_skips_a_step_on_all_ranks(
    kind: str, make: Callable[[nn.Module], list[Optimizer]]
) -> None:
    """An inf in one owned gradient; scales and parameters are those of the unsharded model."""
    make_model, granularity = GRADIENTS[kind]
    if make is muon and kind == "mixed":
        granularity = matrices_whole
    if make is muon and kind == "one":
        make = _only_muon
    twins = Twins(make_model, shard_root, granularity=granularity)
    optimizers = [make(model) for model in twins]
    scalers = [GradScaler("cpu", init_scale=4.0), ShardedGradScaler("cpu", init_scale=4.0)]
    for step in range(3):
        for model, scaler in zip(twins, scalers, strict=True):
            twins.backward(model, scaler.scale(loss_of(model, step)))
            grad = list(model.parameters())[-1 if kind == "one" else -2].grad
            if step == 1 and grad is not None:
                grad.view(-1)[:1].fill_(float("inf"))
        for of_one, scaler, model in zip(optimizers, scalers, twins, strict=True):
            _scaled_step(of_one, scaler, model)
        assert scalers[0].get_scale() == scalers[1].get_scale() == (4.0 if step == 0 else 2.0)
        twins.assert_equal_parameters()


def _only_muon(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.Muon(model.parameters(), lr=0.02)]


@distributed(2, 3)
def test_torchs_scaler_raises_beside_parameters_of_one_rank() -> None:
    """On every rank, also where it has gradients that all ranks share."""
    model = Net()
    shard_blocks(model, granularity=matrices_whole)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(RuntimeError, match=r"'inp\.\w+'.*composable_shard.ShardedGradScaler"):
        scaler.unscale_(adamw(model)[0])


@distributed(2, 3)
def test_torchs_scaler_raises_where_a_rank_may_have_none() -> None:
    """On every rank: those with gradients name ours, torch itself refuses on the others."""
    model = nn.Linear(5, 4, bias=False)
    shard_root(model, granularity="param")
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model)).backward()
    optimizer = torch.optim.Muon(model.parameters())
    error, text = (
        (RuntimeError, "composable_shard.ShardedGradScaler")
        if model.weight.grad is not None
        else (AssertionError, "No inf checks were recorded")
    )
    with pytest.raises(error, match=text):
        scaler.step(optimizer)
