"""Edits of full parameters where they would be lost, and memory that others hold, by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from composable_shard import (
    ShardingStrategy,
    fully_shard,
    get_handles,
    reshard,
    unshard,
    writeback,
)
from tests.harness.ranks import distributed
from tests.programs.claims import assert_right, strategies, unsharded_gradients
from tests.programs.models import (
    Net,
    average_gradients,
    loss_of,
    rank_input,
    shard_blocks,
    shard_root,
    square_mean,
)


def clamps_data(module: nn.Module, *_: object) -> None:
    """Through an alias that shares no version with the parameter."""
    module.up.weight.data.clamp_(-0.1, 0.1)


def clamps_a_view_of_data(module: nn.Module, *_: object) -> None:
    """Through a view of such an alias."""
    module.up.weight.data[1:].clamp_(-0.1, 0.1)


def clamps(module: nn.Module, *_: object) -> None:
    """In place."""
    with torch.no_grad():
        module.up.weight.clamp_(-0.1, 0.1)


def sets_data(module: nn.Module, *_: object) -> None:
    """By other data."""
    module.up.weight.data = module.up.weight.data.clamp(-0.1, 0.1)


def sets_memory(module: nn.Module, *_: object) -> None:
    """By other memory."""
    with torch.no_grad():
        module.up.weight.set_(module.up.weight.clamp(-0.1, 0.1))  # type: ignore[call-overload]


EDITS: list[Callable[..., None]] = [clamps_data, clamps_a_view_of_data, clamps]


@pytest.mark.parametrize("edit", [sets_data, sets_memory])
@pytest.mark.parametrize("when", ["forward", "backward", "unshard"])
@distributed(2)
def test_c16_other_data_is_refused(edit: Callable[..., None], when: str) -> None:
    """Case 16: by name, wherever full values are shown; nothing has changed."""
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    shard_blocks(model)
    block = model.blocks[0]
    if when == "unshard":
        unshard(block)
        with pytest.raises(RuntimeError, match=r"'blocks.0.up.weight' can't be given other data"):
            edit(block)
        writeback(block)
        reshard(block)
    else:
        register = "register_full_backward_hook" if when == "backward" else "register_forward_hook"
        hook = getattr(block.up, register)(lambda *_: edit(block))
        with pytest.raises(RuntimeError, match=r"'blocks.0.up.weight' can't be given other data"):
            loss_of(model).backward()
        hook.remove()
    for each in (model, plain):
        each.zero_grad()
        loss_of(each).backward()
    average_gradients(plain.parameters())
    for name, gradient in unsharded_gradients(model).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


def _sets_a_gradient(model: nn.Module, number: int) -> None:
    def set_gradient(module: nn.Module, *_: object) -> None:
        module.weight.grad = torch.full_like(module.weight, 0.25)

    hook = model.blocks[0].up.register_forward_hook(set_gradient)
    loss = square_mean(model(rank_input(3, 5, step=number, dtype=torch.float64)))
    hook.remove()
    loss.backward()
    square_mean(model(rank_input(3, 5, step=number + 9, dtype=torch.float64))).backward()


@strategies
@distributed(2)
def test_gradient_set_on_a_full_parameter_is_added_to(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """By a forward, and the gradients of later backwards too."""
    assert_right(
        Net,
        _sets_a_gradient,
        shard=shard_blocks,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


def _read_as_array(model: nn.Module, number: int) -> None:
    arrays = []
    hook = model.blocks[0].up.register_forward_hook(
        lambda module, *_: arrays.append(module.weight.detach().numpy())
    )
    square_mean(model(rank_input(3, 5, step=number, dtype=torch.float64))).backward()
    hook.remove()
    square_mean(model(rank_input(3, 5, step=number + 9, dtype=torch.float64))).backward()
    assert arrays[0].shape == (7, 15)
    assert abs(arrays[0]).max() < 9


@strategies
@distributed(2)
def test_c16_array_of_a_full_parameter_breaks_nothing(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 16: torch lends the memory to numpy for good, and it can't be freed any more."""
    assert_right(
        Net,
        _read_as_array,
        shard=shard_blocks,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


@distributed(2)
def test_c16_array_stays_readable_after_reshard() -> None:
    """Case 16: it shows the full values of the last gather."""
    model = Net()
    shard_blocks(model)
    unshard(model.blocks[0])
    array = model.blocks[0].up.weight.detach().numpy()
    expected = array.copy()
    reshard(model.blocks[0])
    assert (array == expected).all()
    (handle,) = get_handles(model.blocks[0])
    assert handle.full.buffer.untyped_storage().nbytes() > 0


class _Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@distributed(2)
def test_c16_parametrization_after_sharding_is_refused() -> None:
    """Case 16: at the next forward, by name and with the remedy; without it training goes on."""
    model = Net()
    shard_blocks(model)
    up = model.blocks[0].up
    loss_of(model).backward()
    weight = up.weight
    parametrize.register_parametrization(up, "weight", _Double(), unsafe=True)
    with pytest.raises(RuntimeError, match=r"'blocks.0.up.weight' is gone from its module.*before"):
        loss_of(model)
    parametrize.remove_parametrizations(up, "weight", leave_parametrized=False)
    assert up.weight is weight
    loss_of(model).backward()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@distributed(2)
def test_c13_embedding_with_max_norm_is_refused(kind: Callable[..., nn.Module]) -> None:
    """Case 13: at set-up; with the weight ignored it is the user's own."""
    model = nn.Sequential(kind(5, 3, max_norm=1.0), nn.Linear(3, 2))
    with pytest.raises(NotImplementedError, match=r"Embedding.*max_norm=1.0\) writes its weight"):
        fully_shard(model)


def _make_computed(compute: Callable[[nn.Module], object]) -> nn.Module:
    model = nn.Sequential(nn.Linear(15, 15), nn.Sequential(nn.Linear(15, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for layer in (model[0], model[1][0]):
            compute(layer)
    return model


def _make_detached(compute: Callable[[nn.Module], object]) -> nn.Module:
    model = _make_computed(compute)
    for layer in (model[0], model[1][0]):
        layer.weight = layer.weight.detach()  # else torch refuses to copy the model
    return model


@pytest.mark.parametrize(
    "compute",
    [nn.utils.weight_norm, partial(prune.l1_unstructured, name="weight", amount=0.3)],
    ids=["weight_norm", "pruning"],
)
@distributed(2)
def test_c13_weights_that_hooks_compute_are_right(compute: Callable[[nn.Module], object]) -> None:
    """Case 13: what `fully_shard` finds is of a graph that the first forward replaces."""
    model = _make_computed(compute)
    shard_root(model)
    model(torch.ones(1, 15)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    assert_right(
        lambda: _make_detached(compute),
        lambda model, number: square_mean(
            model(rank_input(4, 15, step=number, dtype=torch.float64))
        ).backward(),
    )


def _make_spectral() -> nn.Module:
    model = Net()
    nn.utils.spectral_norm(model.blocks[0].up)
    return model


@strategies
@distributed(2)
def test_c13_old_style_spectral_norm_is_right(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 13: it computes its weight from a parameter in each forward."""
    assert_right(
        _make_spectral,
        lambda model, number: square_mean(
            model(rank_input(3, 5, step=number, dtype=torch.float64))
        ).backward(),
        shard=shard_blocks,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


_KINDS = ["register_full_backward_hook", "register_full_backward_pre_hook"]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("edit", EDITS)
@strategies
@distributed(2)
def test_c10_edit_in_a_backward_hook_is_warned_of(
    edit: Callable[..., None], kind: str, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 10: as in forward; the gradients are those of a plain model, whose weight is edited."""
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    shard_blocks(model, strategy=strategy, use_orig_params=use_orig_params)
    hook = getattr(model.blocks[0].up, kind)(lambda *_: edit(model.blocks[0]))
    loss = loss_of(model)
    if kind == "register_full_backward_pre_hook" and edit is clamps:
        # The node that reads the weight comes next, and finds it written, as with a plain model.
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return
    with pytest.warns(UserWarning, match=r"edits of \['blocks.0.up.weight'\] in a backward"):
        loss.backward()
    hook.remove()
    if kind == "register_full_backward_hook":
        loss_of(plain).backward()
        average_gradients(plain.parameters())
        for name, gradient in unsharded_gradients(model).items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)
    model.zero_grad()
    if strategy is ShardingStrategy.FULL_SHARD:
        loss_of(model).backward()


def _hooks_input(up: nn.Module, run: Callable[[], None]) -> None:
    up.register_forward_pre_hook(
        lambda module, args: args[0].register_hook(lambda _: run()) and None
    )


def _hooks_output(up: nn.Module, run: Callable[[], None]) -> None:
    up.register_forward_hook(lambda module, args, out: out.register_hook(lambda _: run()) and None)


@pytest.mark.parametrize("hook", [_hooks_input, _hooks_output])
@pytest.mark.parametrize("edit", EDITS)
@strategies
@distributed(2)
def test_c10_edit_in_a_hook_of_a_tensor_never_hits_a_gradient(
    edit: Callable[..., None],
    hook: Callable[..., None],
    strategy: ShardingStrategy,
    use_orig_params: bool,
) -> None:
    """Case 10: an error or a warning by name, and the next backward is right."""
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    shard_blocks(model, strategy=strategy, use_orig_params=use_orig_params)
    runs: list[Callable[..., None]] = [edit]
    hook(model.blocks[0].up, lambda: runs[0](model.blocks[0]))
    for step in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                loss_of(model, step).backward()
            except RuntimeError as error:
                raised = str(error)
                assert "'blocks.0.up.weight'" in raised or "modified by an inplace" in raised
            else:
                raised = ""
        texts = [str(each.message) for each in caught]
        is_warned = any("edits of ['blocks.0.up.weight'] in a backward" in each for each in texts)
        # Of a kept buffer each rank edits its own part, which stays where the buffer is the shard.
        assert raised or is_warned or strategy is not ShardingStrategy.FULL_SHARD
    runs[0] = lambda _: None
    if strategy is not ShardingStrategy.FULL_SHARD:
        return
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the edits of")  # in a backward that autograd has ended
        loss_of(model, 2).backward()
    loss_of(plain, 2).backward()
    average_gradients(plain.parameters())
    for name, gradient in unsharded_gradients(model).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


@pytest.mark.parametrize("kind", _KINDS)
@strategies
@distributed(2)
def test_c10_value_that_a_backward_hook_reads_is_the_weight(
    kind: str, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 10: not the gradient that has taken its place."""
    torch.manual_seed(0)
    model = Net()
    expected = float(model.blocks[0].up.weight.detach().norm())
    shard_blocks(model, strategy=strategy, use_orig_params=use_orig_params)
    found: list[float] = []
    up = model.blocks[0].up
    getattr(up, kind)(lambda *_: found.append(float(up.weight.detach().norm())))
    for _ in range(2):
        loss_of(model).backward()
        model.zero_grad()
    assert found == pytest.approx([expected, expected])


@distributed(2)
def test_c16_forced_array_of_a_forward_keeps_the_values() -> None:
    """Case 16: no gradient takes the place of what numpy has."""
    model = Net()
    expected = model.blocks[0].up.weight.detach().clone().numpy()
    shard_blocks(model)
    arrays = []
    model.blocks[0].up.register_forward_hook(
        lambda module, *_: arrays.append(module.weight.numpy(force=True)) and None
    )
    loss_of(model).backward()
    assert (arrays[0] == expected).all()
