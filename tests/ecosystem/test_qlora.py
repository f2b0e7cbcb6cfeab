"""QLoRA: adapters train on weights that bitsandbytes has quantised, beside one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_shard import FlatShard, fully_shard
from tests.ecosystem.programs import needs, values_of
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed


def _make_adapted(kind: str) -> nn.Module:
    """Return layers of a quantised weight, frozen, and two matrices that train."""
    import bitsandbytes

    made = {
        "4 bits": lambda: bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32),
        "8 bits": lambda: bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False),
    }
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(2):
        layer: Any = made[kind]()
        layer.load_state_dict(nn.Linear(64, 64).state_dict())
        for param in layer.to("cpu").parameters():  # which quantises it
            param.requires_grad_(False)
        layers.append(nn.Sequential(layer, nn.Linear(64, 4, bias=False), nn.Linear(4, 64)))
    return nn.Sequential(*layers)


def _quantised_params(model: nn.Module) -> set[nn.Parameter]:
    return {param for param in model.parameters() if type(param) is not nn.Parameter}


@needs("bitsandbytes")
@pytest.mark.parametrize(
    ("kind", "is_whole"), [("4 bits", False), ("4 bits", True), ("8 bits", True)]
)
@distributed(2)
def test_adapters_train_on_quantised_weights(kind: str, is_whole: bool) -> None:
    """4-bit weights are sharded as bytes, or whole as 8-bit ones are: losses are bitwise."""
    model, plain = _make_adapted(kind), _make_adapted(kind)
    kept = _quantised_params(model) if is_whole else set()
    for layer in model:
        fully_shard(layer, ignored_params=kept)
    fully_shard(model, ignored_params=kept)
    assert isinstance(model[0][0].weight, FlatShard) != is_whole
    optimizers = [
        torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2)
        for each in (model, plain)
    ]
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        batches = [torch.randn(5, 64, generator=draw) for _ in range(dist.get_world_size())]
        loss = model(batches[dist.get_rank()]).square().mean()
        loss.backward()
        losses = [plain(batch).square().mean() for batch in batches]
        torch.stack(losses).mean().backward()
        assert_equal(loss.detach(), losses[dist.get_rank()].detach(), f"loss of step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    adapters = {name: value for name, value in plain.named_parameters() if value.requires_grad}
    found = values_of(model)
    for name, value in adapters.items():
        assert_equal(found[name], value.detach(), name)


@needs("bitsandbytes")
@distributed(2)
def test_weights_of_eight_bits_are_left_whole_or_refused() -> None:
    """Their layers write them in a forward; the error says where to pass them."""
    model = _make_adapted("8 bits")
    message = "'0.0.weight', a Int8Params, .* attribute 'CB', .* Pass it in ignored_params"
    with pytest.raises(NotImplementedError, match=message):
        fully_shard(model)
    fully_shard(model, ignored_params=_quantised_params(model))
