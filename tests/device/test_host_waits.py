"""The host issues a warm step without waiting for the device, but for what docs/cuda.md names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import composable_shard
from composable_shard import ShardedGradScaler, ShardingStrategy, clip_grad_norm_
from tests.common import device
from tests.device.programs import shard_net
from tests.device.running import on_device
from tests.device.test_waits import POLICIES
from tests.programs.models import Net, shard_blocks

_WARM = 9  # steps until no identities are exchanged any more before collectives
_STEPS = 3

Step = Callable[[nn.Module, Tensor], Tensor]

# Of what the host waits for in a warm step: how often, at most. The page tells these to users.
PRICES = {
    "params on the host": 8,  # two for each unit, and two for the model
    "state on the host": 6,
    "bucket": 1,
    "hooks": 1,
    "unused": 1,
    "scaler": 1,  # torch's own, which asks whether to step
}


def _clipped_step(model: nn.Module, *, scaler: ShardedGradScaler | None = None) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).float().square().mean()
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        clip_grad_norm_(model, 1.0)
        clip_grad_norm_(model, 1.0, norm_type=float("inf"))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _steps_in_backward(model: nn.Module) -> Step:
    """Let an optimizer for each parameter step as soon as its gradient is there."""
    optimizers = {param: torch.optim.AdamW([param], foreach=False) for param in model.parameters()}

    def take_step(param: Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]  # a parameter
        optimizers[param].zero_grad()  # type: ignore[index]

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(take_step)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return step


class _WithUnusedLayer(Net):
    """Has a layer that no rank uses."""

    def __init__(self) -> None:
        super().__init__(2)
        self.extra = nn.Linear(3, 3)


def _unlike_the_page(name: str, model: nn.Module, step: Step) -> list[str]:
    """Return what some warm steps wait for, unless it is what the page says of them.

    The program reads each loss two steps late.
    """
    x = torch.randn(4, 5, device=device.NAME)
    losses = [step(model, x) for _ in range(_WARM)]
    found: Counter[str] = Counter()
    for _ in range(_STEPS):
        losses[-2].item()
        device.take_host_waits()
        losses.append(step(model, x))
        found.update(device.take_host_waits())
    price = _STEPS * next((each for key, each in PRICES.items() if key in name), 0)
    is_right = (0 < found.total() <= price) if price else not found
    return [] if is_right else [f"{name}: {dict(found)}"]


def _policies_unlike_the_page(policies: Iterable[str], **given: Any) -> list[str]:
    wrong = []
    for policy in policies:
        model = shard_net(**given, **POLICIES[policy])
        wrong += _unlike_the_page(policy, model, _clipped_step(model))
    model, scaler = shard_net(**given), ShardedGradScaler(device.NAME, init_scale=8.0)
    wrong += _unlike_the_page("scaler", model, _clipped_step(model, scaler=scaler))
    return wrong


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@on_device(num_ranks=2)
def test_a_warm_step_waits_for_nothing_that_the_page_does_not_name(
    strategy: ShardingStrategy,
) -> None:
    """Under each policy, with clipping and a scaler; as long as the device keeps up.

    It may be two steps behind: the host reads then what the ranks have compared.
    """
    wrong = _policies_unlike_the_page(POLICIES, strategy=strategy)
    model = shard_net(strategy=strategy)
    wrong += _unlike_the_page("hooks", model, _steps_in_backward(model))
    model = _WithUnusedLayer().to(device.NAME)
    shard_blocks(model, strategy=strategy)
    wrong += _unlike_the_page("unused", model, _clipped_step(model))
    assert wrong == []


@pytest.mark.long
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@on_device(num_ranks=4)
def test_neither_does_one_over_replicas(strategy: ShardingStrategy) -> None:
    """With two stages of reductions."""
    mesh = init_device_mesh(device.NAME, (2, 2), mesh_dim_names=("replicate", "shard"))
    assert _policies_unlike_the_page(["same"], mesh=mesh, strategy=strategy) == []


def test_nothing_is_told_to_the_allocator() -> None:
    """`record_stream` puts frees off; see [Note: Streams and memory]."""
    root = Path(composable_shard.__file__).parent
    found = [path.name for path in root.rglob("*.py") if ".record_stream(" in path.read_text()]
    assert found == []
