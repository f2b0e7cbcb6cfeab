"""What programs meet on an accelerator beside kernels, streams and collectives."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from composable_shard import MixedPrecisionPolicy
from tests.common import device
from tests.device.running import on_device
from tests.programs.models import Net, shard_blocks

FLOAT8 = torch.float8_e4m3fn


@on_device
def test_random_numbers_follow_seeds_and_states() -> None:
    """The default generator's, which `torch.manual_seed` seeds too, and those of another one."""
    torch.manual_seed(5)
    state = torch.lag.get_rng_state()
    first, second = (torch.randn(4, device="lag") for _ in range(2))
    assert not torch.equal(first, second)
    torch.lag.set_rng_state(state)
    assert torch.equal(torch.randn(4, device="lag"), first)
    torch.lag.manual_seed(5)
    assert torch.lag.initial_seed() == 5
    assert torch.equal(
        torch.rand_like(first), torch.rand(4, generator=_seeded_generator(5), device="lag")
    )
    with torch.random.fork_rng(["lag"], device_type="lag"):
        forked = torch.randn(4, device="lag")
    assert torch.equal(torch.randn(4, device="lag"), forked)
    torch.manual_seed(1)
    drop = nn.Dropout(0.5)
    once, again = (drop(torch.ones(64, device="lag")) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(drop(torch.ones(64, device="lag")), once)
    assert not torch.equal(once, again)


def _seeded_generator(seed: int) -> torch.Generator:
    return torch.Generator("lag").manual_seed(seed)


@on_device
def test_accelerator_names_the_device_and_counts_its_memory() -> None:
    """As `torch.accelerator` does of CUDA."""
    accelerator = torch.accelerator
    assert accelerator.is_available()
    assert accelerator.current_accelerator() == torch.device("lag")
    assert (accelerator.device_count(), accelerator.current_device_index()) == (1, 0)
    before = accelerator.memory_allocated()
    x = torch.empty(1024, device="lag")
    assert accelerator.memory_allocated() - before == 4096
    side = torch.Stream("lag")
    with side:
        assert accelerator.current_stream() == side
    del x
    assert accelerator.memory_allocated() == before
    assert accelerator.max_memory_allocated() - before >= 4096
    reserved = accelerator.memory_reserved()
    accelerator.empty_cache()
    assert accelerator.memory_reserved() <= reserved - 4096


@on_device
def test_autocast_chooses_dtypes_by_operator() -> None:
    """In forwards; parameters and their gradients keep theirs."""
    layer, x = nn.Linear(4, 4, device="lag"), torch.ones(2, 4, device="lag")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("lag", dtype):
            assert torch.is_autocast_enabled("lag")
            assert layer(x).dtype is dtype
            assert layer(x).softmax(0).dtype is torch.float32
    with torch.autocast("lag", torch.bfloat16):
        layer(x).float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float32


@on_device
def test_convolutions_and_batch_norm_run() -> None:
    """Forward and backward, beside the CPU."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ConvTranspose2d(3, 2, 2))
    found = []
    for where in ("cpu", "lag"):
        model = copy.deepcopy(net).to(where)
        output = model(torch.linspace(-1, 1, 200, device=where).view(2, 2, 5, 10))
        output.square().sum().backward()
        found.append([output, *(param.grad for param in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other.cpu(), one)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, FLOAT8])
@on_device
def test_narrow_dtypes_are_stored_cast_and_copied(dtype: torch.dtype) -> None:
    """With the values of the host."""
    host = torch.linspace(-3, 3, 16)
    there = host.to("lag").to(dtype)
    assert torch.equal(there.float().cpu(), host.to(dtype).float())
    assert torch.equal(there.cpu().view(torch.uint8), host.to(dtype).view(torch.uint8))
    again = torch.empty_like(there).copy_(there.clone())
    assert again.untyped_storage().nbytes() == 16 * dtype.itemsize
    assert torch.equal(again.to("cpu", torch.float32), host.to(dtype).float())


@pytest.mark.parametrize("use_reentrant", [False, True])
@on_device
def test_checkpoint_draws_the_same_numbers_again(use_reentrant: bool) -> None:
    """Dropout in a part that the backward computes again, in autograd's thread."""
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).to("lag")
    gradients = []
    for is_checkpointed in (False, True):
        x = torch.ones(4, 8, device="lag", requires_grad=True)
        torch.manual_seed(3)
        y = checkpoint(part, x, use_reentrant=use_reentrant) if is_checkpointed else part(x)
        y.square().sum().backward()
        torch.rand(3, device="lag")
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@on_device
def test_data_loaders_pin_what_is_copied_without_waiting() -> None:
    """In their thread; the host waits for none of the copies."""
    data = torch.arange(24.0).view(12, 2)
    total = torch.zeros(2, device="lag")
    loader = DataLoader(TensorDataset(data), batch_size=4, pin_memory=True)
    device.configure("slow_compute", delay_us=2000)
    kept = []
    for (batch,) in loader:
        assert batch.is_pinned()
        kept.append(batch)  # until its copy is over
        with device.forbid_host_waits():
            total += batch.to("lag", non_blocking=True).sum(0)
    assert torch.equal(total.cpu(), data.sum(0))


@on_device
def test_optimizers_launch_a_kernel_for_a_list_of_parameters() -> None:
    """Not one for each: over lists, by default too, and in one fused kernel for a step."""
    num_params = 8

    def num_tasks(**options: bool) -> int:
        params = [nn.Parameter(torch.ones(4, device="lag")) for _ in range(num_params)]
        optimizer = torch.optim.AdamW(params, **options)
        for _ in range(2):  # the first one makes the state
            for param in params:
                param.grad = torch.ones_like(param)
            before = device.counts()["tasks"]
            optimizer.step()
        return device.counts()["tasks"] - before

    by_list, fused, one_by_one = (
        num_tasks(**options) for options in ({}, {"fused": True}, {"foreach": False})
    )
    assert fused < by_list < one_by_one
    assert one_by_one >= num_params * 5


@on_device
def test_a_scaler_skips_steps_that_are_not_finite() -> None:
    """And halves its scale then."""
    param = nn.Parameter(torch.ones(4, device="lag"))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = torch.amp.GradScaler("lag", init_scale=4.0)
    for factor, expected, scale in ((float("inf"), 1.0, 2.0), (1.0, 0.0, 2.0)):
        optimizer.zero_grad()
        scaler.scale((param * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert param.tolist() == [expected] * 4
        assert scaler.get_scale() == scale


@on_device(num_ranks=2)
def test_meshes_of_the_device_carry_tensors_and_units() -> None:
    """DTensors, a unit that gathers float8, and ranges with its name in a profile."""
    mesh = init_device_mesh(device.NAME, (2,))
    whole = torch.arange(6.0, device="lag").view(3, 2)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert sharded.to_local().device.type == "lag"
    assert torch.equal((sharded * 2).full_tensor(), whole * 2)

    losses = list(_float8_losses())
    assert losses[0] == losses[1]


def _float8_losses() -> Iterator[list[float]]:
    torch.manual_seed(0)
    plain = Net(1)
    policy = MixedPrecisionPolicy(gather_dtype=FLOAT8)
    for where in ("cpu", "lag"):
        model = copy.deepcopy(plain).to(where)
        shard_blocks(model, mesh=init_device_mesh(where, (2,)), mp_policy=policy)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            losses = [_float8_step(model, where) for _ in range(2)]
        names = {event.name for event in profiler.events()}
        assert {"all_gather blocks.0", "reduce_scatter blocks.0"} <= names
        yield [round(loss.item(), 5) for loss in losses]


def _float8_step(model: nn.Module, where: str) -> Tensor:
    loss: Tensor = model(torch.full((2, 5), 1.0 + dist.get_rank(), device=where)).square().mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    return loss.detach()
