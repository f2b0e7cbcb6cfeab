"""Gradients that wait for a reduction: what drops them, what keeps them, and what users can do."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_shard import (
    FlatShard,
    OffloadPolicy,
    ShardedGradScaler,
    ShardingStrategy,
    clip_grad_norm_,
    drop_pending_gradients,
    fully_shard,
    get_handles,
    get_pending_gradients,
    no_sync,
    reduce_pending_gradients,
    register_flat_param,
    register_orig_params,
    set_is_last_backward,
    set_requires_all_reduce,
    set_requires_gradient_sync,
)
from composable_shard.tensor import kind_of
from tests.harness.pairs import pairwise
from tests.harness.poison import poisoned
from tests.harness.ranks import distributed
from tests.programs import claims
from tests.programs.models import (
    Net,
    average_gradients,
    rank_input,
    replica_mesh,
    shard_blocks,
    shard_children,
)

FULL_SHARD = ShardingStrategy.FULL_SHARD
Keeps = Callable[[nn.Module], AbstractContextManager[None]]
Optimizer = torch.optim.Optimizer


def _three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 2))


def _run_microbatch(model: nn.Module, step: int, scale: float = 1.0) -> None:
    x = rank_input(4, 5, step=step, dtype=next(model.parameters()).dtype)
    (model(x).square().mean() * scale).backward()


@contextmanager
def _without_gradient_sync(model: nn.Module) -> Any:
    set_requires_gradient_sync(model, False)
    yield
    set_requires_gradient_sync(model, True)


@contextmanager
def _not_last(model: nn.Module) -> Any:
    set_is_last_backward(model, False)
    yield
    set_is_last_backward(model, True)


@contextmanager
def _without_all_reduce(model: nn.Module) -> Any:
    set_requires_all_reduce(model, False)
    yield
    set_requires_all_reduce(model, True)


def _assert_like_plain(
    script: Callable[[nn.Module, Optimizer, Keeps, int], None],
    *,
    keeps: Keeps = no_sync,
    make: Callable[[], nn.Module] = _three_layers,
    shard: Callable[..., object] = shard_children,
    steps: int = 3,
    foreach: bool | None = None,
    **options: Any,
) -> None:
    """Run a script for each step on a plain model and on its sharded copy; compare gradients."""
    __tracebackhide__ = True
    torch.manual_seed(0)
    plain = make().double()
    sharded = copy.deepcopy(plain)
    shard(sharded, **options)
    pairs = [(plain, lambda _: nullcontext()), (sharded, keeps)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, foreach=foreach) for m, _ in pairs]
    with poisoned():
        for step in range(steps):
            for (model, keep), optimizer in zip(pairs, optimizers, strict=True):
                script(model, optimizer, keep, step)
            average_gradients(plain.parameters())
            found = claims.unsharded_gradients(sharded)
            for name, param in plain.named_parameters():
                claims.assert_close(found[name], param.grad, f"step {step}: gradient of {name}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def _none_in_a_loop(model: nn.Module, _: Optimizer) -> None:
    for param in model.parameters():
        param.grad = None


def _none_where_there_is_one(model: nn.Module, _: Optimizer) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad = None


def _deleted(model: nn.Module, _: Optimizer) -> None:
    for param in model.parameters():
        del param.grad


DROPS: dict[str, Callable[[nn.Module, Optimizer], object]] = {
    "optimizer.zero_grad()": lambda _, optimizer: optimizer.zero_grad(),
    "model.zero_grad()": lambda model, _: model.zero_grad(),
    "grad = None": _none_in_a_loop,
    "if grad: grad = None": _none_where_there_is_one,
    "del grad": _deleted,
}


@pytest.mark.parametrize(
    *pairwise(
        drop=list(DROPS),
        strategy=list(ShardingStrategy),
        use_orig_params=[True, False],
        keeps=[no_sync, _without_gradient_sync, _not_last],
    )
)
@distributed(2, on_device=True)
def test_c7_dropped_by_every_way_to_zero_gradients(
    drop: str, strategy: ShardingStrategy, use_orig_params: bool, keeps: Keeps
) -> None:
    """Case 7: no gradient of a microbatch before `zero_grad` is in the next step's."""

    def script(model: nn.Module, optimizer: Optimizer, keep: Keeps, step: int) -> None:
        with keep(model):
            _run_microbatch(model, 3 * step, 1000.0)
        DROPS[drop](model, optimizer)
        with keep(model):
            _run_microbatch(model, 3 * step + 1)
        _run_microbatch(model, 3 * step + 2)

    _assert_like_plain(
        script, keeps=keeps, foreach=True, strategy=strategy, use_orig_params=use_orig_params
    )


@pytest.mark.parametrize("strategy", [FULL_SHARD, ShardingStrategy.SHARD_OPTIM])
@distributed(4)
def test_c7_dropped_with_a_deferred_all_reduce(strategy: ShardingStrategy) -> None:
    """Case 7: shards whose all-reduce was put off are dropped too, and one by one."""

    def script(model: nn.Module, optimizer: Optimizer, keep: Keeps, step: int) -> None:
        with keep(model):
            _run_microbatch(model, 3 * step, 1000.0)
        model[0].weight.grad = None
        model[2].zero_grad()
        if step == 1:
            optimizer.zero_grad()
        with keep(model):
            _run_microbatch(model, 3 * step + 1)
        _run_microbatch(model, 3 * step + 2)

    _assert_like_plain(script, keeps=_without_all_reduce, strategy=strategy, mesh=replica_mesh())


@claims.strategies
@distributed(2)
def test_c7_dropped_in_part_and_on_top_of_reduced_ones(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 7: of one unit, or of one parameter; and with gradients that are reduced already."""

    def script(model: nn.Module, optimizer: Optimizer, keep: Keeps, step: int) -> None:
        _run_microbatch(model, 5 * step, 100.0)
        with keep(model):
            _run_microbatch(model, 5 * step + 1, 1000.0)
        model[2].zero_grad()
        if use_orig_params:
            model[0].weight.grad = None
            model[0].bias.grad = None
        with keep(model):
            _run_microbatch(model, 5 * step + 2)
        _run_microbatch(model, 5 * step + 3)

    _assert_like_plain(script, strategy=strategy, use_orig_params=use_orig_params)


@claims.strategies
@distributed(2)
def test_c7_dropped_between_forward_and_backward(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 7: the usual place of `zero_grad`, also in a backward that reaches one unit alone."""

    def script(model: nn.Module, optimizer: Optimizer, keep: Keeps, step: int) -> None:
        with keep(model):
            _run_microbatch(model, 3 * step, 1000.0)
        x = rank_input(4, 5, step=3 * step + 1, dtype=torch.float64)
        loss = model[0](x).square().mean() if step == 1 else model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()

    _assert_like_plain(script, strategy=strategy, use_orig_params=use_orig_params)


@distributed(2)
def test_c7_ranks_that_drop_differently_do_not_hang() -> None:
    """Case 7: which collectives come does not depend on what a rank has dropped."""
    model = _three_layers()
    shard_children(model)
    with no_sync(model):
        _run_microbatch(model, 0)
    if torch.distributed.get_rank() == 0:
        model.zero_grad()
    model[0](rank_input(4, 5)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def _set_data_of_all(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.clone()


def _set_data_of_one(model: nn.Module) -> None:
    param = next(model.parameters())
    param.data = param.data.clone()


def _swap_average(model: nn.Module) -> None:
    averages = [param.detach().clone() for param in model.parameters()]
    for param, average in zip(model.parameters(), averages, strict=True):
        param.data, average.data = average.data, param.data


def _load_own_values(model: nn.Module) -> None:
    is_flat = not all(handle.shown.form.has_names for handle in get_handles(model))
    if is_flat:
        register_orig_params(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    if is_flat:
        register_flat_param(model)


@pytest.mark.parametrize(
    *pairwise(
        swap=[_set_data_of_all, _set_data_of_one, _swap_average, _load_own_values],
        strategy=list(ShardingStrategy),
        use_orig_params=[True, False],
    )
)
@distributed(2)
def test_c7_kept_over_a_swap_of_data(
    swap: Callable[[nn.Module], None], strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 7: `p.data = x`, EMA swaps and load_state_dict between microbatches."""

    def script(model: nn.Module, optimizer: Optimizer, keep: Keeps, step: int) -> None:
        for microbatch in range(3):
            with keep(model):
                _run_microbatch(model, 5 * step + microbatch)
            swap(model)
        _run_microbatch(model, 5 * step + 3)

    _assert_like_plain(script, strategy=strategy, use_orig_params=use_orig_params)


@pytest.mark.parametrize(
    *pairwise(
        strategy=list(ShardingStrategy), use_orig_params=[True, False], is_reached=[True, False]
    )
)
@distributed(2)
def test_c7_kept_over_a_change_of_dtype(
    strategy: ShardingStrategy, use_orig_params: bool, is_reached: bool
) -> None:
    """Case 7: `.to(dtype)` casts what waits, as plain torch casts `.grad`."""

    def script(model: nn.Module, optimizer: Optimizer, keep: Keeps, step: int) -> None:
        model.float()
        with keep(model):
            _run_microbatch(model, 2 * step, 1000.0)
        model.double()
        (_run_microbatch if is_reached else _backward_of_one)(model, 2 * step + 1)

    torch.manual_seed(0)
    plain = _three_layers()
    sharded = copy.deepcopy(plain)
    shard_children(sharded, strategy=strategy, use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(plain.parameters())
    for model, keep in ((plain, lambda _: nullcontext()), (sharded, no_sync)):
        script(model, optimizer, keep, 0)
    average_gradients(plain.parameters())
    found = claims.unsharded_gradients(sharded)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name], param.grad, rtol=1e-5, atol=1e-4, msg=name)


def _backward_of_one(model: nn.Module, step: int) -> None:
    _run_microbatch(nn.Sequential(model[0]), step)


@pytest.mark.parametrize(
    *pairwise(
        strategy=list(ShardingStrategy), use_orig_params=[True, False], keeps=[no_sync, _not_last]
    )
)
@distributed(2)
def test_c7_kept_over_a_change_of_what_is_shown(
    strategy: ShardingStrategy, use_orig_params: bool, keeps: Keeps
) -> None:
    """Case 7: flat parameter or originals, and back; also on top of reduced gradients."""
    others = (register_flat_param, register_orig_params)

    def script(model: nn.Module, optimizer: Optimizer, keep: Keeps, step: int) -> None:
        if step == 1:
            _run_microbatch(model, 5 * step)
        for microbatch in range(2):
            with keep(model):
                _run_microbatch(model, 5 * step + microbatch + 1)
            if keep is keeps:
                others[use_orig_params is (microbatch == 1)](model)
        _run_microbatch(model, 5 * step + 4)

    _assert_like_plain(script, keeps=keeps, strategy=strategy, use_orig_params=use_orig_params)


@claims.strategies
@distributed(2)
def test_c7_pending_gradients_are_shown_reduced_and_dropped(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 7: by functions, without another backward."""
    options: dict[str, Any] = {"strategy": strategy, "use_orig_params": use_orig_params}

    def reduced(model: nn.Module, optimizer: Optimizer, keep: Keeps, step: int) -> None:
        with keep(model):
            _run_microbatch(model, 3 * step)
            _run_microbatch(model, 3 * step + 1)
        if keep is no_sync:
            own = get_pending_gradients(model)
            assert list(own) == [name for name, _ in _three_layers().named_parameters()]
            twin = copy.deepcopy(model)
            with claims.unshard_params(twin, writeback=False):
                plain = _three_layers().double()
                plain.load_state_dict(twin.state_dict())
            for microbatch in range(2):
                _run_microbatch(plain, 3 * step + microbatch)
            for name, param in plain.named_parameters():
                claims.assert_close(own[name], param.grad, name)
            reduce_pending_gradients(model)
            assert get_pending_gradients(model) == {}
            reduce_pending_gradients(model)

    def dropped(model: nn.Module, optimizer: Optimizer, keep: Keeps, step: int) -> None:
        _run_microbatch(model, 3 * step)
        if keep is no_sync:
            with keep(model):
                _run_microbatch(model, 3 * step + 1, 1000.0)
            drop_pending_gradients(model)
            assert get_pending_gradients(model) == {}
            if strategy is FULL_SHARD:
                assert not any(
                    h.grads._memory.buffer.untyped_storage().size() for h in get_handles(model)
                )
        _run_microbatch(model, 3 * step + 2)

    _assert_like_plain(reduced, **options)
    _assert_like_plain(dropped, **options)


@distributed(4)
def test_c7_deferred_all_reduces_are_shown_and_reduced() -> None:
    """Case 7: what is shown is the mean over the shard group, beside own gradients."""
    torch.manual_seed(0)
    plain = _three_layers().double()
    model = copy.deepcopy(plain)
    mesh = replica_mesh()
    shard_children(model, mesh=mesh)
    with _without_all_reduce(model):
        _run_microbatch(model, 0)
        shown = get_pending_gradients(model)
        with no_sync(model):
            _run_microbatch(model, 1)
        both = get_pending_gradients(model)
    _run_microbatch(plain, 0)
    for param in plain.parameters():
        torch.distributed.all_reduce(param.grad, group=mesh.get_group(1))
        param.grad /= 2
    for name, param in plain.named_parameters():
        claims.assert_close(shown[name], param.grad, name)
    _run_microbatch(plain, 1)
    for name, param in plain.named_parameters():
        claims.assert_close(both[name], param.grad, name)
    average_gradients(plain.parameters())
    reduce_pending_gradients(model)
    found = claims.unsharded_gradients(model)
    for name, param in plain.named_parameters():
        claims.assert_close(found[name], param.grad, name)


@pytest.mark.parametrize(
    *pairwise(
        strategy=list(ShardingStrategy),
        use_orig_params=[True, False],
        kind=["loop", "foreach", "fused"],
    )
)
@distributed(2)
def test_c7_a_step_with_pending_gradients_changes_nothing(
    strategy: ShardingStrategy, use_orig_params: bool, kind: str
) -> None:
    """Case 7: it raises before it makes state, and the gradients still wait."""
    model = _three_layers()
    shard_children(model, strategy=strategy, use_orig_params=use_orig_params)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.1, foreach=kind == "foreach", fused=kind == "fused"
    )
    before = claims.unsharded_values(model)
    with no_sync(model):
        _run_microbatch(model, 0)
    with pytest.raises(RuntimeError, match=r"'0\..*waits for a reduction.*reduce_pending_grad"):
        optimizer.step()
    assert not optimizer.state
    for name, value in claims.unsharded_values(model).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    reduce_pending_gradients(model)
    optimizer.step()
    assert len(optimizer.state) == len(list(model.parameters()))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
@distributed(2)
def test_c7_a_step_of_any_optimizer_raises(kind: type[Optimizer]) -> None:
    """Case 7: also where something was compiled, which puts frames into a step."""
    torch.compile(nn.Identity(), backend="eager")(torch.ones(1))
    model = _three_layers()
    shard_children(model)
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.1)
    before = claims.unsharded_values(model)
    with no_sync(model):
        _run_microbatch(model, 0)
    with pytest.raises(RuntimeError, match=r"'0\..*waits for a reduction.*reduce_pending_grad"):
        optimizer.step()
    for name, value in claims.unsharded_values(model).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    reduce_pending_gradients(model)
    optimizer.step()


@distributed(2)
def test_c7_a_closure_inside_a_step_drops_and_reduces() -> None:
    """Case 7: what a closure does is not taken for the step's own."""

    def script(model: nn.Module, optimizer: Optimizer, keep: Keeps, step: int) -> None:
        with keep(model):
            _run_microbatch(model, 3 * step, 1000.0)

        def closure() -> Tensor:
            model.zero_grad()
            with keep(model):
                _run_microbatch(model, 3 * step + 1)
            optimizer.zero_grad()
            _run_microbatch(model, 3 * step + 2)
            return torch.zeros(())

        torch.optim.SGD(model.parameters(), lr=0.0).step(closure)

    _assert_like_plain(script)


USES: dict[str, Callable[[nn.Module], object]] = {
    "norm": lambda model: model[0].weight.grad.norm(),
    "zero_grad(set_to_none=False)": lambda model: model.zero_grad(set_to_none=False),
    "mul_": lambda model: model[0].weight.grad.mul_(2.0),
    "div": lambda model: model[0].weight.grad / 2,
    "to_local": lambda model: model[0].weight.grad.to_local(),
    "full_tensor": lambda model: model[0].weight.grad.full_tensor(),
    "operand": lambda model: model[0].weight.detach().add(model[0].weight.grad),
    "in-place operand": lambda model: torch.zeros_like(model[0].weight).lerp_(
        model[0].weight.grad, 0.5
    ),
    "list": lambda model: torch._foreach_norm([param.grad for param in model.parameters()]),
    "torch's clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip": lambda model: clip_grad_norm_(model, 1.0),
    "scaler": lambda model: ShardedGradScaler("cpu", init_scale=2.0).unscale_(
        torch.optim.SGD(model.parameters())
    ),
}


@pytest.mark.parametrize("use", USES)
@distributed(2)
def test_c7_a_use_of_a_pending_gradient_raises(use: str) -> None:
    """Case 7: by name and with the remedy, and the gradient still waits."""
    model = _three_layers().double()
    fully_shard(model)
    with no_sync(model):
        _run_microbatch(model, 0)
    assert all(param.grad.shape == param.shape for param in model.parameters())
    assert "PendingGradient('0.weight'" in repr(model[0].weight.grad)
    if use == "scaler":
        scaler = ShardedGradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.zeros(()))
        with pytest.raises(RuntimeError, match=r"'0\.weight' waits.*reduce_pending_gradients"):
            scaler.unscale_(torch.optim.SGD(model.parameters()))
    else:
        with pytest.raises(RuntimeError, match=r"'0\.weight' waits.*reduce_pending_gradients"):
            USES[use](model)
    reduce_pending_gradients(model)
    assert all(type(param.grad) is FlatShard for param in model.parameters())
    assert all(kind_of(param) is FlatShard for param in model.parameters())


@claims.strategies
@distributed(2)
def test_c9_a_penalty_on_gradients_of_parameters_is_refused(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 9: at the backward that would add nothing; all else goes on as without a graph."""
    model = _three_layers()
    shard_children(model, strategy=strategy, use_orig_params=use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for accumulates in (False, True):
        loss = model(rank_input(4, 5)).square().mean()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of cycles that this can make
            with no_sync(model) if accumulates else nullcontext():
                loss.backward(create_graph=True)
        if accumulates:
            _run_microbatch(model, 1)
        penalty = sum(param.grad.square().sum() for param in model.parameters())
        assert penalty.requires_grad
        with pytest.raises(RuntimeError, match=r"\.grad of parameter '.*', .*has no graph"):
            (loss.detach() + penalty).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert not any(param.grad.requires_grad for param in model.parameters())
        optimizer.zero_grad()


@pytest.mark.parametrize(
    *pairwise(
        strategy=list(ShardingStrategy),
        index=[0, 1, 2],
        use_orig_params=[True, False],
        unfreezes=[True, False],
    )
)
@distributed(2)
def test_c14_a_unit_frozen_between_microbatches(
    strategy: ShardingStrategy, use_orig_params: bool, index: int, unfreezes: bool
) -> None:
    """Case 14: what it has from before is published with the others', and not once more later."""

    def script(model: nn.Module, optimizer: Optimizer, keep: Keeps, step: int) -> None:
        with keep(model):
            _run_microbatch(model, 4 * step)
        for param in model.blocks[index].parameters():
            param.requires_grad_(False)
        _run_microbatch(model, 4 * step + 1)
        if unfreezes:
            for param in model.blocks[index].parameters():
                param.requires_grad_()
            _run_microbatch(model, 4 * step + 2)

    def thawed(model: nn.Module, optimizer: Optimizer, keep: Keeps, step: int) -> None:
        model.requires_grad_()
        script(model, optimizer, keep, step)

    _assert_like_plain(
        thawed, make=Net, shard=shard_blocks, strategy=strategy, use_orig_params=use_orig_params
    )


@claims.strategies
@distributed(2)
def test_c14_a_deep_copy_has_no_gradients(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 14: as that of a plain model, whose parameters leave `.grad` behind; nothing waits."""
    model = _three_layers()
    shard_children(model, strategy=strategy, use_orig_params=use_orig_params)
    _run_microbatch(model, 0)
    with no_sync(model):
        _run_microbatch(model, 1)
    for twin in (copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))):
        assert all(param.grad is None for param in twin.parameters())
        assert all(kind_of(param) is FlatShard for param in twin.parameters())
    params = copy.deepcopy(list(model.parameters()))
    assert all(param.grad is None for param in params)


@pytest.mark.parametrize(
    *pairwise(
        strategy=list(ShardingStrategy),
        offloads=[False, True],
        use_orig_params=[True, False],
        accumulates=[True, False],
    )
)
@distributed(2)
def test_c14_gradients_that_are_kept_by_reference(
    strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool, offloads: bool
) -> None:
    """Case 14: over `zero_grad()` and later backwards, as for PCGrad; in each form."""
    torch.manual_seed(0)
    model = _three_layers()
    policy = OffloadPolicy(params=offloads)
    shard_children(model, strategy=strategy, use_orig_params=use_orig_params, offload_policy=policy)
    kept: list[tuple[Any, Tensor]] = []
    for step in range(8):
        if accumulates:
            with no_sync(model):
                _run_microbatch(model, step + 100)
        _run_microbatch(model, step)
        grads = [param.grad for param in model.parameters()]
        if step % 2 == 0:
            kind = step // 2
            held = [
                grad
                if kind == 0
                else grad.to_local()
                if kind == 1
                else grad.detach()
                if kind == 2
                else grad.to_local()[:1]
                for grad in grads
            ]
            values = [x.to_local().clone() if isinstance(x, FlatShard) else x.clone() for x in held]
            kept += zip(held, values, strict=True)
            del held
        del grads
        model.zero_grad()
    for held, value in kept:
        found = held.to_local() if isinstance(held, FlatShard) else held
        torch.testing.assert_close(found, value, rtol=0, atol=0)
