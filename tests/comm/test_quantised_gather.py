"""Parameters that are gathered as 8-bit numbers: what is promised of them, and of training."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import (
    FlatParamHandle,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    get_handles,
    lazy_init,
    reshard,
    unshard,
    unshard_params,
    writeback,
)
from composable_shard.comm import devices, wire
from composable_shard.comm.trace import count_collectives
from composable_shard.comm.wire import BLOCK_NUMEL, decode, encode, encoded_nbytes, round_trip
from tests.harness.assertions import assert_equal
from tests.harness.memory import peak_bytes
from tests.harness.ranks import distributed
from tests.programs.models import (
    Layer,
    Net,
    Nothing,
    assert_at_rest,
    assert_is_slice,
    average_gradients,
    loss_of,
    rank_input,
    shard_blocks,
)

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy
BF16, F32 = torch.bfloat16, torch.float32
I8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [I8, E4M3, E5M2]
TOP = {I8: 127.0, E4M3: 448.0, E5M2: 57344.0}
TINY, HUGE = torch.finfo(F32).tiny, torch.finfo(F32).max


def _simulate(values: Tensor, dtype: torch.dtype, output_dtype: torch.dtype = F32) -> Tensor:
    """Return values sent and received: the promise written out, block by block."""
    blocks = []
    for block in values.float().split(128):
        scale = (block.abs().max() / TOP[dtype]).clamp(min=TINY)
        number = block / scale
        number = number.round() if dtype is I8 else number.to(dtype).float()
        blocks.append((number * scale).to(output_dtype))
    return torch.cat(blocks)


def _bound(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest error that is promised of each element of one block, in fp64."""
    values = values.double()
    scale = (values.abs().max() / TOP[dtype]).clamp(min=TINY)
    if dtype is I8:
        bound = (scale / 2).expand_as(values)
    else:
        share, step = {E4M3: (16, 2.0**-10), E5M2: (8, 2.0**-17)}[dtype]
        bound = torch.maximum(values.abs() / share, scale * step)
    return bound * (1 + 2.0**-14)


# --- the codec ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_half_a_step(dtype: torch.dtype) -> None:
    """Blocks of all magnitudes, of few and of many values, with zeros, and a short last one."""
    for seed in range(50):
        _check_error(dtype, seed)


def _check_error(dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    numel = 4 * int(torch.randint(1, 400, (), generator=generator))
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    exponents = torch.randint(-149, 126, (-(-numel // 128),), generator=generator).double()
    values *= torch.exp2(exponents).repeat_interleave(128)[:numel]
    if seed % 3 == 0:  # of many magnitudes in one block
        values *= torch.exp2(-30 * torch.rand(numel, generator=generator).double())
    values = values.float()
    values[torch.rand(numel, generator=generator) < 0.1] = 0
    received = round_trip(values, dtype, F32)
    for block, got in zip(values.split(128), received.split(128), strict=True):
        error = (block.double() - got.double()).abs()
        assert bool((error <= _bound(block, dtype)).all())
    assert bool((received[values == 0] == 0).all())
    assert_equal(received, _simulate(values, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_8_bit_number_and_ties(dtype: torch.dtype) -> None:
    """What the wire can carry arrives as it is, and what lies between goes to the nearest."""
    bits = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = bits[bits.isfinite() & (bits.abs() <= TOP[dtype])]
    numbers = nn.functional.pad(numbers, (0, 256 - numbers.numel()))
    numbers[[0, 128]] = TOP[dtype]  # so that the scale of both blocks is one
    assert_equal(round_trip(numbers, dtype, F32), numbers)
    if dtype is I8:
        halves = torch.arange(-63.5, 64.5)
        halves[0] = 127.0
        assert_equal(round_trip(halves, dtype, F32), halves.round())


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_subnormal_and_huge_blocks(dtype: torch.dtype) -> None:
    """No division by zero, no overflow; below the smallest scale the step is that of the scale."""
    assert_equal(round_trip(torch.zeros(300), dtype, F32), torch.zeros(300))
    for top in (2.0**-149, 2.0**-140, TINY / 3, TINY * 3, HUGE / 3, HUGE):
        values = torch.linspace(-1, 1, 128, dtype=torch.float64).mul(top).float()
        received = round_trip(values, dtype, F32)
        assert bool(received.isfinite().all())
        error = (received.double() - values.double()).abs()
        assert bool((error <= _bound(values, dtype)).all()), top


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_a_block_that_is_not_finite_becomes_nan(value: float, dtype: torch.dtype) -> None:
    """All of it, and no other block; the bytes are the same everywhere."""
    values = torch.randn(3 * 128 + 8)
    values[200] = value
    received = round_trip(values, dtype, F32)
    is_hit = torch.arange(values.numel()) // 128 == 1
    assert bool(received[is_hit].isnan().all())
    assert_equal(received[~is_hit], _simulate(values, dtype)[~is_hit])
    encoded = torch.empty(encoded_nbytes(values.numel()), dtype=torch.uint8)
    encode(values, encoded, dtype)
    assert int(encoded[200]) == 0
    values = torch.tensor([1e300, 1, 2, 3], dtype=torch.float64)
    assert bool(round_trip(values, dtype, torch.float64).isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("output_dtype", [torch.float16, BF16, torch.float64])
def test_received_values_are_rounded_once(dtype: torch.dtype, output_dtype: torch.dtype) -> None:
    """In the product of number and scale; also where blocks are taken in several portions."""
    values = torch.randn((1 << 16) + 3 * 128 + 20)
    received = round_trip(values, dtype, output_dtype)
    assert received.dtype == output_dtype
    if output_dtype is torch.float64:
        torch.testing.assert_close(received.float(), _simulate(values, dtype))
    else:
        assert_equal(received, _simulate(values, dtype, output_dtype))


@pytest.mark.parametrize(
    ("numel", "nbytes"),
    [(0, 0), (1, 8), (4, 8), (128, 132), (131, 140), (1000, 1032), (1024, 1056)],
)
def test_encoded_bytes(numel: int, nbytes: int) -> None:
    """A byte for each element, four for each block, and nothing beyond is written or read."""
    assert encoded_nbytes(numel) == nbytes
    memory = torch.full((nbytes + 16,), 77, dtype=torch.uint8)
    encode(torch.randn(numel), memory[8 : 8 + nbytes], I8)
    assert bool((memory[:8] == 77).all())
    assert bool((memory[8 + nbytes :] == 77).all())
    decode(memory[8 : 8 + nbytes], torch.empty(numel), I8)


# --- units ---


class _WideNet(Net):
    """Units whose shards have several blocks, the last one short."""

    def __init__(self) -> None:
        super().__init__(num_blocks=0)
        self.blocks = nn.ModuleList(Layer(15, hidden) for hidden in (20, 33))


POLICIES = {
    "int8": MixedPrecisionPolicy(gather_dtype=I8),
    "e4m3": MixedPrecisionPolicy(gather_dtype=E4M3),
    "e5m2": MixedPrecisionPolicy(gather_dtype=E5M2),
    "bf16, int8": MixedPrecisionPolicy(param_dtype=BF16, main_dtype=F32, gather_dtype=I8),
    "bf16, e4m3": MixedPrecisionPolicy(param_dtype=BF16, main_dtype=F32, gather_dtype=E4M3),
}


def _make_quantised(policy: str, make: Any = _WideNet, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    shard_blocks(model, mp_policy=POLICIES[policy], **options)
    return model


def _expect(handle: FlatParamHandle, mains: list[Tensor]) -> list[Tensor]:
    """Return what the parameters of a handle are in compute: shard by shard, sent and received."""
    flat = torch.zeros(handle.layout.padded_numel)
    layout = handle.layout
    for offset, main in zip(layout.offsets, mains, strict=True):
        flat[offset : offset + main.numel()] = main.detach().flatten()
    dtype, output_dtype = handle.memory.precision.gather_dtype, handle.unsharded.dtype
    shards = [_simulate(shard, dtype, output_dtype) for shard in flat.split(layout.shard_numel)]
    received = torch.cat(shards)
    return [
        received[offset : offset + main.numel()].view(main.shape)
        for offset, main in zip(layout.offsets, mains, strict=True)
    ]


class QuantisedReference:
    """A replicated model that computes with quantised copies of its main parameters."""

    def __init__(self, plain: nn.Module, model: nn.Module) -> None:
        self.main = plain
        self.model = model
        self.compute = copy.deepcopy(plain)
        policy = get_handles(model)[0].memory.precision
        if policy.param_dtype is not None:
            self.compute.to(policy.param_dtype)
        self.dtype = policy.param_dtype or F32

    def loss(self, step: int) -> Tensor:
        mains = dict(self.main.named_parameters())
        computes = dict(self.compute.named_parameters())
        for handle in get_handles(self.model):
            names = [str(entry.label) for entry in handle.entries]
            received = _expect(handle, [mains[name] for name in names])
            for name, values in zip(names, received, strict=True):
                computes[name].data.copy_(values)
        x = rank_input(4, 5, step=step).to(self.dtype)
        return self.compute(x).float().square().mean()

    def backward(self, loss: Tensor) -> None:
        """Run the backward; give the mean of the gradients, summed in fp32, to the main ones."""
        loss.backward()
        for main, param in zip(self.main.parameters(), self.compute.parameters(), strict=True):
            main.grad, param.grad = param.grad.float(), None
        average_gradients(self.main.parameters())


@pytest.mark.parametrize(
    ("strategy", "policy"),
    [
        *((FULL_SHARD, policy) for policy in POLICIES),
        (SHARD_GRAD_OP, "int8"),
        (SHARD_OPTIM, "bf16, int8"),
        (SHARD_OPTIM, "e4m3"),
    ],
)
@distributed(2, on_device=True)
def test_training_equals_a_replicated_model_with_quantised_parameters(
    strategy: ShardingStrategy, policy: str
) -> None:
    """Losses, gradients and main parameters, bitwise."""
    torch.manual_seed(0)
    plain = _WideNet()
    model = _make_quantised(policy, strategy=strategy)
    assert any(handle.layout.shard_numel % BLOCK_NUMEL for handle in get_handles(model))
    assert any(handle.layout.shard_numel > 2 * BLOCK_NUMEL for handle in get_handles(model))
    lazy_init(model)
    reference = QuantisedReference(plain, model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model)]
    for step in range(3):
        expected, loss = reference.loss(step), loss_of(model, step)
        assert_equal(loss.detach(), expected.detach(), f"loss {step}")
        loss.backward()
        reference.backward(expected)
        for ours, main in zip(model.parameters(), plain.parameters(), strict=True):
            assert_is_slice(ours.grad, main.grad)
        for each in optimizers:
            each.step()
            each.zero_grad()
        for ours, main in zip(model.parameters(), plain.parameters(), strict=True):
            assert_is_slice(ours, main)
    assert_at_rest(model)


@pytest.mark.parametrize("case", ["2-D", "small group", "1-D", "keeps", "flat"])
@distributed(4)
def test_other_meshes_and_policies_compute_with_the_same_values(case: str) -> None:
    """Each loss is that of the quantised main parameters, on every rank, copies included."""
    options: dict[str, Any] = {
        "2-D": {"mesh": init_device_mesh("cpu", (2, 2))},
        "small group": {"reshard_after_forward": 2},
        "1-D": {},
        "keeps": {"reshard_after_forward": False},
        "flat": {"use_orig_params": False},
    }[case]
    model = _make_quantised("bf16, int8", **options)
    lazy_init(model)
    reference = QuantisedReference(_WideNet(), model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        with unshard_params(model, writeback=False), torch.no_grad():
            for main, shown in zip(reference.main.parameters(), model.parameters(), strict=True):
                main.copy_(shown)
        loss, expected = loss_of(model, step), reference.loss(step)
        assert_equal(loss.detach(), expected.detach(), f"loss {step}")
        loss.backward()
        reference.backward(expected)
        with unshard_params(model, writeback=False, with_grads=True):
            for main, shown in zip(reference.main.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(shown.grad, main.grad, rtol=0.02, atol=1e-3)
        optimizer.step()
        optimizer.zero_grad()


@distributed(3)
def test_bytes_of_the_backends_all_gather() -> None:
    """Large groups gather by way of the backend, which carries bytes."""
    expected = loss_of(_make_quantised("e4m3")).detach()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "MAX_EXCHANGE_SIZE", 0)
        assert_equal(loss_of(_make_quantised("e4m3")).detach(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@distributed(3)
def test_a_unit_without_elements(dtype: torch.dtype) -> None:
    """Nothing is sent for it, and its neighbours train."""
    for strategy in (FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM):
        model = nn.Sequential(nn.Linear(3, 1), Nothing())
        for child in model:
            policy = MixedPrecisionPolicy(gather_dtype=dtype)
            fully_shard(child, strategy=strategy, mp_policy=policy)
        loss = model[0](torch.ones(2, 3)).sum() + model[1](torch.ones(2, 0)).sum()
        loss.backward()
        assert_is_slice(model[0].weight.grad, torch.full((1, 3), 2.0))
        assert_is_slice(model[1].weight.grad, torch.empty(0, 3))


@pytest.mark.parametrize(
    ("strategy", "dtype"), [(FULL_SHARD, I8), (SHARD_GRAD_OP, E4M3), (SHARD_OPTIM, E5M2)]
)
@distributed(3)
def test_all_ranks_hold_the_same_bits_and_shards_stay_exact(
    strategy: ShardingStrategy, dtype: torch.dtype
) -> None:
    """The owner too computes with what the others receive; at rest everything is the main value."""
    torch.manual_seed(0)
    plain = Layer(15, 33)
    policy = MixedPrecisionPolicy(gather_dtype=dtype)
    model = fully_shard(copy.deepcopy(plain), strategy=strategy, mp_policy=policy)
    unshard(model)
    (handle,) = get_handles(model)
    for param, expected in zip(
        model.parameters(), _expect(handle, list(plain.parameters())), strict=True
    ):
        assert param.dtype == F32
        assert_equal(param.detach(), expected)
    parts = [torch.empty_like(handle.unsharded) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, handle.unsharded.detach())
    for part in parts:
        assert torch.equal(part.view(torch.int32), parts[0].view(torch.int32))
    reshard(model)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_is_slice(param, expected)
    with unshard_params(model):
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert_equal(param.detach(), expected.detach())
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_is_slice(param, expected)


@pytest.mark.parametrize("dtype", [I8, E5M2])
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_OPTIM, NO_SHARD])
@distributed(3)
def test_wire_bytes(strategy: ShardingStrategy, dtype: torch.dtype) -> None:
    """One all-gather for each handle: a byte for each element, four for each block of a shard."""
    torch.manual_seed(0)
    model = _WideNet()
    policy = MixedPrecisionPolicy(gather_dtype=dtype)
    shard_blocks(model, strategy=strategy, mp_policy=policy)
    lazy_init(model)
    with count_collectives() as log, torch.no_grad():
        loss_of(model)
    if strategy is NO_SHARD:
        assert log.events == []
        return
    size = dist.get_world_size()
    layouts = [handle.layout for handle in get_handles(model)]
    expected = [
        size * (layout.shard_numel + 4 * -(-layout.shard_numel // 128)) for layout in layouts
    ]
    gathers = [event.nbytes for event in log.events if event.kind == "all_gather"]
    assert sorted(gathers) == sorted(expected)
    assert sum(expected) < 0.27 * sum(4 * layout.padded_numel for layout in layouts)


@distributed(1, 2)
def test_nothing_is_rounded_where_nothing_is_gathered(world_size: int) -> None:
    """One rank, or a full copy on each: the policy is no error and changes no value."""
    model = _make_quantised("int8", strategy=FULL_SHARD if world_size == 1 else NO_SHARD)
    torch.manual_seed(0)
    plain = _WideNet()
    lazy_init(model)
    with count_collectives() as log:
        assert_equal(loss_of(model).detach(), loss_of(plain).detach())
    assert log.events == []
    assert not any(handle.full.is_cast for handle in get_handles(model))


@pytest.mark.counts
@distributed(2)
def test_memory_for_the_bytes_is_freed_after_the_gather() -> None:
    """All ranks' encoded shards are held until they have been decoded, and no copy beside."""
    model = fully_shard(
        nn.Linear(512, 512, bias=False), mp_policy=MixedPrecisionPolicy(gather_dtype=I8)
    )
    lazy_init(model)
    with peak_bytes() as memory:
        unshard(model)
    numel, portion_nbytes = 512 * 512, 4 * (1 << 16)
    staging = 2 * encoded_nbytes(numel // 2)
    assert staging == numel + 4 * numel // 128
    assert memory.peak >= 4 * numel + staging
    # Beside it, what is computed in between, of a portion.
    assert memory.peak <= 4 * numel + staging + 2 * portion_nbytes + 16384
    assert memory.current <= 4 * numel + 1024


@pytest.mark.fast
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@distributed(2)
def test_writeback_by_hand_keeps_what_was_not_edited(strategy: ShardingStrategy) -> None:
    """Edited elements become what they were set to, the others keep their full precision.

    Also in a block that the gather made NaN.
    """
    torch.manual_seed(0)
    model = fully_shard(
        nn.Linear(40, 20, bias=False),
        strategy=strategy,
        mp_policy=MixedPrecisionPolicy(gather_dtype=I8),
    )
    with unshard_params(model), torch.no_grad():
        model.weight[0, 0] = torch.inf
    expected = model.weight.full_tensor()
    unshard(model)
    with torch.no_grad():
        assert bool(model.weight[0].isnan().all())
        model.weight[7] = 3.0
    writeback(model)
    reshard(model)
    expected[7] = 3.0
    assert_equal(model.weight.full_tensor(), expected)


@pytest.mark.parametrize("name", ["encode", "decode"])
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@distributed(2)
def test_error_while_packing_or_unpacking_leaves_the_next_step_right(
    strategy: ShardingStrategy, name: str
) -> None:
    """As an out-of-memory error there would, in every unit's gather."""
    make = partial(_make_quantised, "int8", strategy=strategy)
    undisturbed = make()
    optimizer = torch.optim.SGD(undisturbed.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        loss = loss_of(undisturbed, step)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    function = getattr(wire, name)
    for k in range(1, 4):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        calls = 0

        def fail(*args: Any, k: int = k) -> None:
            nonlocal calls
            calls += 1
            if calls == k:
                raise torch.OutOfMemoryError("planned")
            function(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire, name, fail)
            with pytest.raises(torch.OutOfMemoryError, match="planned"):
                loss_of(model, 1).backward()
        optimizer.zero_grad()
        loss = loss_of(model, 1)
        assert_equal(loss.detach(), losses[1])
        loss.backward()
        assert_at_rest(model)


@pytest.mark.long
@distributed(2)
def test_int8_wire_trains_as_well() -> None:
    """The loss of a regression falls as that of exact parameters does."""
    finals = []
    for policy in (MixedPrecisionPolicy(), POLICIES["int8"], POLICIES["e4m3"]):
        torch.manual_seed(0)
        model = _WideNet()
        shard_blocks(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for step in range(60):
            x = rank_input(16, 5, step=step)
            target = torch.sin(x[:, :3]) + x[:, 2:].cos()
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss.detach())
            losses.append(loss.detach() / 2)
        assert losses[0] > 0.5
        finals.append(float(torch.stack(losses[-10:]).mean()))
    assert finals[0] < 0.25, finals
    assert finals[1] == pytest.approx(finals[0], rel=0.01)
    assert finals[2] == pytest.approx(finals[0], rel=0.05)
