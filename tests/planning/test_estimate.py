"""`estimate`: bytes at rest, at the peaks and on the way, without ranks; its command."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from composable_shard import (
    FlatShard,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    describe,
    estimate,
    shard_model,
)
from composable_shard.__main__ import main
from composable_shard.planning import Estimate, by_class, tabulate
from tests.harness.ranks import distributed
from tests.programs.models import Layer, Net, loss_of, seeded

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy
BF16, F32 = torch.bfloat16, torch.float32
_WIDTH, _BATCH = 64, 8
_WEIGHT = 4 * _WIDTH * _WIDTH  # bytes of one layer's weight
_ACTIVATION = 4 * _WIDTH * _BATCH
_LOSS = 4  # a sum


class Stack(nn.Module):
    """Linear layers without bias, each with a ReLU; sizes that need no padding."""

    def __init__(self, num_layers: int = 4, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(num_layers)
        )
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            run = lambda x, layer=layer: torch.relu(layer(x))  # noqa: E731
            x = checkpoint(run, x, use_reentrant=False) if self.checkpoints else run(x)
        return x


def _estimate(model: nn.Module | None = None, **options: Any) -> Estimate:
    options = {"world_size": 4, "prefetch_nbytes": 0, **options}
    return estimate(model or Stack(), rules=by_class(nn.Linear), **options)


@pytest.mark.parametrize("strategy", ShardingStrategy, ids=lambda s: s.value)
@distributed(2, 4)
def test_bytes_at_rest_are_those_of_a_run(strategy: ShardingStrategy) -> None:
    """Parameters, gradients and optimizer of rank 0, to the byte, for any number of ranks."""
    world_size = torch.distributed.get_world_size()
    for policy in (
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32),
    ):
        options = {"strategy": strategy, "mp_policy": policy}
        told = estimate(Net(), world_size=world_size, rules=by_class(Layer), **options)
        model = shard_model(seeded(Net), by_class(Layer), **options)
        found = describe(model)
        if torch.distributed.get_rank() == 0:
            assert told.parameter_nbytes == found.param_nbytes
            assert told.gradient_nbytes == found.grad_nbytes
            assert told.optimizer_nbytes == found.optimizer_nbytes
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model).backward()
        optimizer.step()
        if torch.distributed.get_rank() == 0 and policy.param_dtype is None:  # no copies in BF16
            states = [each for state in optimizer.state.values() for each in state.values()]
            params = list(model.parameters())
            assert told.parameter_nbytes == _held(params)
            assert told.gradient_nbytes == _held([p.grad for p in params])
            assert told.optimizer_nbytes == _held([each for each in states if each.ndim])


def _held(tensors: list[Any]) -> int:
    """Return the bytes of the memory in which shards lie."""
    shards = [each.to_local() if isinstance(each, FlatShard) else each for each in tensors]
    storages = [each.untyped_storage() for each in shards if each is not None]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def test_a_step_without_activations_holds_what_is_gathered_and_reduced() -> None:
    """By hand: two units in the forward; two, and the gradients of a third, in the backward."""
    told = _estimate()
    rest = 3 * _WEIGHT  # parameters and moments: 4 layers over 4 ranks
    assert told.parameter_nbytes + told.optimizer_nbytes == rest
    assert told.peak_forward_nbytes == rest + 2 * _WEIGHT
    # The last layer's backward: its gradients in place, one gathered ahead, one in flight, and
    # shards of the two that were reduced before.
    assert told.peak_backward_nbytes == rest + 3 * _WEIGHT + 2 * _WEIGHT // 4
    assert told.total_nbytes == told.peak_backward_nbytes
    assert told.activation_nbytes == 0
    assert told.wire_nbytes_per_step > 3 * 4 * _WEIGHT * 3 // 4  # and the flags
    assert told.num_collectives == 12


def test_terms_of_a_sum_take_memory_on_the_cpu() -> None:
    """With more than two ranks; with two the output receives the other rank's term."""
    for world_size, terms in ((4, _WEIGHT), (2, 0), (16, 0)):
        on_cpu, on_gpu = (
            _estimate(world_size=world_size, device_type=kind) for kind in ("cpu", "cuda")
        )
        assert on_cpu.peak_backward_nbytes - on_gpu.peak_backward_nbytes == terms


def test_terms_of_gradients_that_stay_are_shared_by_all_units() -> None:
    """Of the largest unit but one: all of it, with two ranks one shard of it."""
    for world_size, terms in ((4, _WEIGHT), (2, _WEIGHT // 2), (16, 0)):
        on_cpu, on_gpu = (
            _estimate(world_size=world_size, device_type=kind, strategy=SHARD_OPTIM)
            for kind in ("cpu", "cuda")
        )
        assert on_cpu.peak_forward_nbytes - on_gpu.peak_forward_nbytes == terms


def test_a_batch_adds_activations() -> None:
    """What autograd saves: the input of each ReLU's successor; nothing is computed."""
    batch = torch.zeros(_BATCH, _WIDTH)
    plain, told = _estimate(), _estimate(batch=batch)
    # relu saves its result, which the next layer has as its input; the first one's is the batch.
    assert told.activation_nbytes == 4 * _ACTIVATION + _LOSS
    assert told.peak_forward_nbytes >= plain.peak_forward_nbytes + 3 * _ACTIVATION
    checkpointed = _estimate(Stack(checkpoints=True), batch=batch)
    assert checkpointed.activation_nbytes == 3 * _ACTIVATION + _LOSS  # inputs, but the batch
    assert _estimate(batch={"x": batch}).activation_nbytes == told.activation_nbytes
    assert _estimate(batch=(batch,)).activation_nbytes == told.activation_nbytes
    assert _estimate(batch=batch.to("meta")) == told


def test_what_checkpointed_blocks_compute_again_is_freed_block_by_block() -> None:
    """More blocks add to the peak of the backward what the forward kept of them, and no more."""

    class Residual(nn.Module):
        def __init__(self, num_blocks: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.ModuleList((nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.Linear(64, 64)))
                for _ in range(num_blocks)
            )

        def forward(self, x: Tensor) -> Tensor:
            for norm, up, down in self.blocks:
                x = checkpoint(
                    lambda x, norm=norm, up=up, down=down: x + down(norm(up(norm(x)).sigmoid())),
                    x,
                    use_reentrant=False,
                )
            return x

    batch = torch.zeros(_BATCH, _WIDTH)
    three, nine = (_estimate(Residual(number), batch=batch) for number in (3, 9))
    held = [each.gradient_nbytes + each.parameter_nbytes * 3 for each in (three, nine)]
    grown = nine.peak_backward_nbytes - three.peak_backward_nbytes - (held[1] - held[0])
    assert nine.activation_nbytes - three.activation_nbytes == 6 * _ACTIVATION
    assert grown <= 6 * _ACTIVATION


def test_checkpointed_blocks_keep_their_inputs_alone() -> None:
    """The input of each block that is not the batch itself, instead of two a block."""

    class Pair(nn.Module):
        def __init__(self, checkpoints: bool) -> None:
            super().__init__()
            self.stacks = nn.ModuleList(Stack(2) for _ in range(3))
            self.checkpoints = checkpoints

        def forward(self, x: Tensor) -> Tensor:
            for stack in self.stacks:
                x = checkpoint(stack, x, use_reentrant=False) if self.checkpoints else stack(x)
            return x

    batch = torch.zeros(_BATCH, _WIDTH)
    plain, saved = (
        estimate(Pair(flag), rules=by_class(Stack), world_size=2, batch=batch, prefetch_nbytes=0)
        for flag in (False, True)
    )
    assert plain.activation_nbytes == 6 * _ACTIVATION + _LOSS
    assert saved.activation_nbytes == 2 * _ACTIVATION + _LOSS  # the first one's is the batch
    assert plain.peak_forward_nbytes - saved.peak_forward_nbytes == _ACTIVATION


def test_precision_halves_what_computes() -> None:
    """Activations and gathered units in bfloat16; shards and moments stay."""
    batch = torch.zeros(_BATCH, _WIDTH)
    plain = _estimate(batch=batch)
    told = _estimate(batch=batch, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    assert told.parameter_nbytes == plain.parameter_nbytes
    assert told.activation_nbytes * 2 == plain.activation_nbytes + _ACTIVATION  # the cast batch
    rest = plain.parameter_nbytes + plain.optimizer_nbytes
    without = _estimate(mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    assert without.peak_forward_nbytes == rest + _WEIGHT


def test_optimizers_differ_in_their_states() -> None:
    """Two states, one or none; offloaded ones are on the host."""
    two, one, none = (_estimate(optimizer=name) for name in ("adamw", "momentum", "sgd"))
    assert (two.optimizer_nbytes, one.optimizer_nbytes, none.optimizer_nbytes) == (
        2 * _WEIGHT,
        _WEIGHT,
        0,
    )
    offloaded = [
        _estimate(optimizer=name, offload_policy=OffloadPolicy(params=True))
        for name in ("adamw", "sgd")
    ]
    assert offloaded[0].host_nbytes - offloaded[1].host_nbytes == 2 * _WEIGHT
    assert offloaded[0].total_nbytes == offloaded[1].total_nbytes


def test_a_mesh_has_copies_and_shards() -> None:
    """Two ranks share; copies cost an all-reduce, and no memory less."""
    shared, copied = _estimate(world_size=2), _estimate(world_size=None, mesh_shape=(2, 2))
    assert str(copied.plan.units[-1].ranks) == "2x2"
    assert copied.parameter_nbytes == shared.parameter_nbytes
    assert copied.wire_nbytes_per_step > shared.wire_nbytes_per_step


def test_plans_are_compared_in_one_table() -> None:
    """One row each, and which fit into a memory."""
    plans = [_estimate(strategy=each) for each in ShardingStrategy]
    rows = tabulate(plans, memory_nbytes=plans[0].total_nbytes).splitlines()
    assert [row.split()[0] for row in rows[2:]] == [each.name for each in ShardingStrategy]
    assert [row.split()[-1] for row in rows[2:]] == ["yes", "no", "no", "no"]
    assert str(plans[0]).splitlines()[-1].split()[0] == "FULL_SHARD"


def test_the_model_stays_as_it_is_and_may_have_no_values() -> None:
    """On meta and with values: the same figures; no hook, no gradient, no cast is left."""
    with torch.device("meta"):
        empty = Stack()
    model = Stack()
    batch = torch.zeros(_BATCH, _WIDTH)
    values = [param.detach().clone() for param in model.parameters()]
    assert str(_estimate(empty, batch=batch)) == str(_estimate(model, batch=batch))
    for param, before in zip(model.parameters(), values, strict=True):
        assert torch.equal(param, before)
        assert param.grad is None
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_what_makes_no_sense_is_refused() -> None:
    """By name, before anything runs."""
    with pytest.raises(ValueError, match="expected optimizer to be one of"):
        _estimate(optimizer="adamw8bit")
    with pytest.raises(ValueError, match="expected world_size or mesh_shape, not both"):
        _estimate(world_size=4, mesh_shape=(2, 2))
    for options in ({"world_size": 0}, {"world_size": None, "mesh_shape": (2, 2, 2)}):
        with pytest.raises(ValueError, match="expected world_size, or mesh_shape of"):
            _estimate(**options)
    with pytest.raises(ValueError, match="fully_shard has no option 'stratgy'"):
        _estimate(stratgy=FULL_SHARD)

    class Silent(Stack):
        def forward(self, x: Tensor) -> Any:
            super().forward(x)

    silent = Silent()
    values = list(silent.parameters())
    with pytest.raises(ValueError, match="to return floating-point tensors that depend"):
        _estimate(silent, batch=torch.zeros(_BATCH, _WIDTH))
    for param, value in zip(silent.parameters(), values, strict=True):
        assert param is value


def test_a_loss_in_the_output_is_what_is_differentiated() -> None:
    """By key or attribute, as Hugging Face returns it; what is beside it has no gradient."""

    class WithLoss(Stack):
        def forward(self, x: Tensor, *, has_loss: bool = True) -> Any:
            x = super().forward(x)
            logits = x @ x.T
            logits.register_hook(lambda _: reached.append(has_loss))
            return {"loss": x.mean(), "logits": logits} if has_loss else {"logits": logits}

    reached: list[bool] = []
    batch = torch.zeros(_BATCH, _WIDTH)
    _estimate(WithLoss(), batch=(batch,))
    _estimate(WithLoss(), batch={"x": batch, "has_loss": False})
    assert reached == [False]


def test_models_that_look_at_values_are_refused_by_name() -> None:
    """Fake tensors have none; without a batch the plan is there."""

    class Looks(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 1 if x.sum().item() > 0 else x)

    class Picks(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[x.sum(1) > 0])

    for kind in (Looks, Picks):
        assert _estimate(kind()).total_nbytes > 0
        with pytest.raises(ValueError, match=rf"what {kind.__name__} does depends on the values"):
            _estimate(kind(), batch=torch.zeros(_BATCH, _WIDTH))


def test_the_command_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every strategy, or one; sizes with units."""
    monkeypatch.setattr("composable_shard.__main__._make_model", lambda _: (Stack(), None))
    words = "estimate --hf-config x --world-size 4 --memory 80GiB"
    assert main(words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:6]] == [each.name for each in ShardingStrategy]
    assert lines[2].endswith("yes")
    assert main([*words.split(), "--strategy", "no_shard", "--param-dtype", "bf16"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
