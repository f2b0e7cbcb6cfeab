"""Layers that are resized or replaced after `fully_shard`, as transformers resizes embeddings."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from composable_shard import ShardingStrategy, fully_shard, shard_model
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs.claims import assert_close, unsharded_values
from tests.programs.models import average_gradients, square_mean

IDS = torch.tensor([[1, 2, 5]])


class ResizedModel(nn.Module):
    """A model that resizes its embedding as transformers does."""

    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.is_tied = is_tied
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.is_tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.table(ids)))
        return result


def _grown(old: nn.Embedding) -> nn.Embedding:
    new = nn.Embedding(8, 4, dtype=old.weight.dtype)
    weight = old.weight
    full = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    with torch.no_grad():
        new.weight.zero_()
        new.weight[:6] = full
    return new


def resize_token_embeddings(model: ResizedModel) -> None:
    """transformers': the old layer gets the new data."""
    new = _grown(model.table)
    model.table.weight.data = new.weight.data
    model.table.num_embeddings = 8
    model.tie_weights()


def replace_layer(model: ResizedModel) -> None:
    """The model gets the new layer, as transformers' heads are resized."""
    model.table = _grown(model.table)
    model.tie_weights()


def replace_parameter(model: ResizedModel) -> None:
    """The layer gets a new parameter."""
    model.table.weight = nn.Parameter(_grown(model.table).weight.detach())
    model.tie_weights()


def swap_layer(model: ResizedModel) -> None:
    """Another layer of the same size."""
    model.table = copy.deepcopy(nn.Embedding(6, 4, dtype=torch.float64))
    model.tie_weights()


KEEPS = "A sharded parameter keeps its shape: change it before fully_shard"
IS_NEW = "taken the place of parameters of units.* call fully_shard on the new one"
CHANGES: dict[Callable[[ResizedModel], None], str] = {
    resize_token_embeddings: rf"expected a tensor of shape \(6, 4\) for 'table.weight'.*{KEEPS}",
    replace_layer: f"{IS_NEW}|was replaced.*{KEEPS}",  # tied ones are found in the other layer
    replace_parameter: f"'table.weight.*was replaced.*{KEEPS}",
    swap_layer: f"{IS_NEW}|was replaced.*Write into the existing",
}


@pytest.mark.parametrize(
    *pairwise(
        change=list(CHANGES),
        strategy=list(ShardingStrategy),
        is_tied=[False, True],
        has_run=[False, True],
    )
)
@distributed(1, 2, 3)
def test_changed_layer_is_named_with_what_to_do(
    change: Callable[[ResizedModel], None],
    strategy: ShardingStrategy,
    is_tied: bool,
    has_run: bool,
) -> None:
    """The change or the next forward raises: shapes are changed before `fully_shard`."""
    model = fully_shard(ResizedModel(is_tied).double(), strategy=strategy)
    if has_run:
        square_mean(model(IDS)).backward()

    def run() -> None:
        change(model)
        model(IDS)

    with pytest.raises((RuntimeError, ValueError), match=CHANGES[change]):
        run()


def _train_beside_plain(models: list[nn.Module], ids: Tensor) -> None:
    plain, model = models
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in models]
    for _ in range(3):
        for each in models:
            each.zero_grad()
            square_mean(each(ids)).backward()
        average_gradients(plain.parameters())
        for optimizer in optimizers:
            optimizer.step()
    found = unsharded_values(model)
    for name, param in plain.named_parameters():
        assert_close(found[name], param.detach(), name)


@pytest.mark.parametrize(
    *pairwise(
        change=[resize_token_embeddings, replace_layer, replace_parameter],
        strategy=list(ShardingStrategy),
        use_orig_params=[True, False],
        is_tied=[True, False],
    )
)
@distributed(1, 2, 3)
def test_remedy_a_change_before_fully_shard_is_right(
    change: Callable[[ResizedModel], None],
    strategy: ShardingStrategy,
    use_orig_params: bool,
    is_tied: bool,
) -> None:
    """Values of three steps are a plain model's."""
    torch.manual_seed(0)
    plain = ResizedModel(is_tied).double()
    change(plain)
    model = copy.deepcopy(plain)
    fully_shard(model, strategy=strategy, use_orig_params=use_orig_params)
    _train_beside_plain([plain, model], torch.tensor([[1, 5, 7]]))


@pytest.mark.parametrize(
    *pairwise(strategy=list(ShardingStrategy), has_run=[False, True], by_units=[False, True])
)
@distributed(1, 2, 3)
def test_remedy_the_new_layer_becomes_a_unit(
    strategy: ShardingStrategy, has_run: bool, by_units: bool
) -> None:
    """`fully_shard` of the new layer, and a new optimizer."""
    torch.manual_seed(0)
    plain = ResizedModel().double()
    model = copy.deepcopy(plain)
    rules = {"table": {}} if by_units else {}
    shard_model(model, rules, strategy=strategy)
    if has_run:
        square_mean(model(IDS)).backward()
    replace_layer(plain)
    replace_layer(model)
    fully_shard(model.table, strategy=strategy)
    model.zero_grad()
    _train_beside_plain([plain, model], torch.tensor([[1, 5, 7]]))
