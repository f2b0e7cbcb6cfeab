"""Models built on the meta device, and models whose data is replaced after sharding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as functions

from composable_shard import (
    FlatShard,
    fully_shard,
    get_handles,
    lazy_init,
    load_checkpoint,
    set_model_state_dict,
)
from composable_shard.comm.trace import count_collectives
from composable_shard.runtime.meta_buffers import is_never_written
from tests.harness.assertions import assert_equal
from tests.harness.memory import peak_bytes
from tests.harness.ranks import distributed
from tests.programs.models import (
    Layer,
    Net,
    Wide,
    assert_is_slice,
    on_meta,
    rank_input,
    shard_blocks,
)


class _Norm(nn.Module):
    """With buffers of several kinds, all computed by `reset_parameters`."""

    def __init__(self, dim: int = 15) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(dim))
        self.register_buffer("inverse", torch.empty(dim), persistent=False)
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.register_buffer("mask", torch.empty(dim, dtype=torch.bool), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        self.inverse.copy_(1.0 / torch.arange(1, 16))
        self.count.zero_()
        self.mask = torch.zeros(15, dtype=torch.bool, device=self.gain.device)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.inverse).masked_fill(self.mask, 0.0) * self.gain


class _ManyLayers(Net):
    """Layers of many kinds, whose `reset_parameters` draw in many ways."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.norm = _Norm()
        self.layer_norm = nn.LayerNorm(15)
        self.embedding = nn.Embedding(7, 15)
        self.conv = nn.Conv1d(15, 15, 3, padding=1)
        self.rnn = nn.GRU(15, 15, batch_first=True)
        self.attention = nn.MultiheadAttention(15, 3, batch_first=True)
        self.bilinear = nn.Bilinear(3, 5, 2)
        self.batch_norm = nn.BatchNorm1d(15)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer_norm(self.norm(self.inp(x))) + self.embedding.weight[0]
        x = self.conv(x.transpose(1, 2))
        x = self.rnn(self.batch_norm(x).transpose(1, 2))[0]
        for block in self.blocks:
            x = block(x)
        x = self.attention(x, x, x, need_weights=False)[0]
        x = self.out(x)
        return self.bilinear(x, x.new_ones((*x.shape[:-1], 5)))


def _reset_every_module(model: nn.Module, seed: int = 1) -> None:
    """Initialise as the documentation of `to_empty` says: every module resets itself."""
    torch.manual_seed(seed)
    for module in model.modules():
        for name in ("reset_parameters", "_reset_parameters"):
            if hasattr(module, name):
                getattr(module, name)()


def _sequence_batch(step: int = 0) -> Tensor:
    return rank_input(2, 4, 5, step=step)


def _assert_same_model(model: nn.Module, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        assert isinstance(param, FlatShard)
        assert_is_slice(param, expected[name], name)
    buffers = dict(reference.named_buffers())
    for name, buffer in model.named_buffers():
        assert_equal(buffer, buffers[name], name)


# --- values ---


@distributed(1, 2, 3)
def test_initialised_values_are_those_of_an_unsharded_module(world_size: int) -> None:
    """The same seed gives the same parameters and buffers, whatever the world size."""
    reference = _ManyLayers()
    _reset_every_module(reference)
    model = on_meta(_ManyLayers)
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    _reset_every_module(model)
    _assert_same_model(model, reference)
    assert_equal(model(_sequence_batch()).detach(), reference(_sequence_batch()).detach(), "output")


_INITS: dict[str, Callable[[Tensor], Any]] = {
    "normal": lambda w: nn.init.normal_(w, 1.0, 2.0),
    "uniform": lambda w: nn.init.uniform_(w, -3.0, 1.0),
    "truncated normal": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "xavier uniform": nn.init.xavier_uniform_,
    "xavier normal": nn.init.xavier_normal_,
    "kaiming uniform": nn.init.kaiming_uniform_,
    "kaiming normal": nn.init.kaiming_normal_,
    "constant": lambda w: nn.init.constant_(w, 3.0),
    "ones": nn.init.ones_,
    "zeros": nn.init.zeros_,
    "orthogonal": nn.init.orthogonal_,
    "one row": lambda w: nn.init.ones_(w[3]),
}


@pytest.mark.parametrize("name", _INITS)
@distributed(2, 3)
def test_init_functions_give_the_unsharded_values(name: str, world_size: int) -> None:
    """Each draws what it would draw, and leaves the generator where it would leave it."""
    init = _INITS[name]
    reference = nn.Linear(7, 15)
    model = copy.deepcopy(reference)
    fully_shard(model)
    ends = []
    for weight in (reference.weight, model.weight):
        torch.manual_seed(5)
        init(weight)
        ends.append(torch.rand(1))
    assert isinstance(model.weight, FlatShard)
    assert_equal(model.weight.full_tensor(), reference.weight.detach())
    assert_equal(*ends)


# --- identity ---


@pytest.mark.fast
@distributed(2)
def test_parameters_stay_the_same_objects_through_to_empty() -> None:
    """Identity, names and attributes survive `to_empty`, initialisation and the first step."""
    with torch.device("meta"):
        model = _ManyLayers()
    for index, param in enumerate(model.parameters()):
        param.note = index  # type: ignore[attr-defined]
    params = dict(model.named_parameters())
    shard_blocks(model)
    model.to_empty(device="cpu")
    _reset_every_module(model)
    model(_sequence_batch()).square().mean().backward()
    after = dict(model.named_parameters())
    assert list(after) == list(params)
    assert all(after[name] is param for name, param in params.items())
    assert [param.note for param in params.values()] == list(range(len(params)))  # type: ignore[attr-defined]


@pytest.mark.parametrize("moment", ["on meta", "sharded", "empty", "initialised"])
@distributed(2)
def test_optimizer_built_at_any_moment_trains_the_parameters(moment: str) -> None:
    """It holds the objects that the model holds, whenever it got them."""
    model, made = _train_from_meta(moment), _train_from_meta("initialised")
    for (name, param), expected in zip(model.named_parameters(), made.parameters(), strict=True):
        assert_equal(param.to_local(), expected.to_local(), name)


def _train_from_meta(moment: str) -> nn.Module:
    optimizers = []

    def at(now: str) -> None:
        if now == moment:
            optimizers.append(torch.optim.AdamW(model.parameters(), lr=0.05))

    with torch.device("meta"):
        model = Net()
    at("on meta")
    shard_blocks(model)
    at("sharded")
    model.to_empty(device="cpu")
    at("empty")
    _reset_every_module(model)
    at("initialised")
    (optimizer,) = optimizers
    for step in range(2):
        model(_sequence_batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


# --- memory ---


@distributed(2, 3)
def test_initialisation_holds_the_shards_and_one_unit(world_size: int) -> None:
    """`to_empty`, `reset_parameters` and the set-up for the first forward never hold more."""
    counts = []
    for _ in range(2):  # on a busy machine the profiler may time a free before its allocation
        model = on_meta(Wide)
        with peak_bytes() as memory:
            model.to_empty(device="cpu")
            _reset_every_module(model)
            lazy_init(model)
        counts.append(memory)
    shards = sum(handle.layout.shard_numel * 4 for handle in get_handles(model))
    unit = max(handle.layout.padded_numel * 4 for handle in get_handles(model))
    slack = unit // 20  # random draws of one bias, messages, digests
    assert min(memory.peak for memory in counts) <= shards + unit + slack
    assert min(memory.current for memory in counts) <= shards + slack


@pytest.mark.counts
@distributed(2)
def test_first_forward_after_initialisation_holds_two_units() -> None:
    """The one that computes and the one that is gathered ahead; no unit is there twice."""
    model = on_meta(Wide)
    shards = sum(handle.layout.shard_numel * 4 for handle in get_handles(model))
    unit = max(handle.layout.padded_numel * 4 for handle in get_handles(model))
    x = torch.ones(1, 256)
    with torch.no_grad(), peak_bytes() as memory:
        model.to_empty(device="cpu")
        _reset_every_module(model)
        model(x)
    assert memory.peak <= shards + 2 * unit
    assert memory.current <= shards + unit // 20


@distributed(2)
def test_sharding_on_meta_allocates_nothing_and_sends_nothing() -> None:
    """A model that fits no machine can be sharded."""
    with count_collectives() as log, peak_bytes() as memory:
        model = on_meta(Wide)
    assert log.events == []
    assert memory.peak < 100  # not a tensor of the model
    assert all(param.is_meta and isinstance(param, FlatShard) for param in model.parameters())


# --- what was forgotten ---


@distributed(2)
def test_parameters_still_on_meta_are_named_at_the_first_forward() -> None:
    """All of them, before anything is sent."""
    model = on_meta(lambda: Net(num_blocks=1))
    with count_collectives() as log, pytest.raises(RuntimeError, match="on the meta") as caught:
        model(_sequence_batch())
    assert log.events == []
    assert str(caught.value) == (
        "parameters ['inp.weight', 'inp.bias', 'out.weight', 'out.bias'] are on the meta device. "
        "Call model.to_empty(device=...) and initialise them (reset_parameters()) or load them "
        "before the first forward."
    )
    model.to_empty(device="cpu")
    _reset_every_module(model)
    model(_sequence_batch()).sum().backward()


@distributed(2)
def test_buffers_that_nobody_initialised_are_named_at_the_first_forward() -> None:
    """Persistent or not, of any dtype; those of units and those of plain modules."""
    model = on_meta(_ManyLayers)
    model.to_empty(device="cpu")
    for module in model.modules():
        if not isinstance(module, _Norm | nn.BatchNorm1d) and hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for call in (lambda: model(_sequence_batch()), lambda: model.blocks[0](torch.ones(1, 15))):
        with pytest.raises(RuntimeError, match="never initialised") as caught:
            call()
        assert str(caught.value) == (
            "buffers ['norm.inverse', 'norm.count', 'norm.mask', 'batch_norm.running_mean', "
            "'batch_norm.running_var', 'batch_norm.num_batches_tracked'] were never initialised "
            "after to_empty(): they hold arbitrary values. Compute them again "
            "(reset_parameters() or the code that made them) or load them."
        )
    _reset_every_module(model)
    model(_sequence_batch())


class _WithHiddenBuffer(nn.Module):
    """With a buffer that is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


_WAYS_TO_LOAD: dict[str, Callable[[nn.Module, dict[str, Any], Path], object]] = {
    "ours": lambda model, state, _: set_model_state_dict(model, state),
    "torch's": lambda model, state, _: functions.set_model_state_dict(model, state),
    "the module's": lambda model, state, _: model.load_state_dict(state),
    "a checkpoint": lambda model, _, path: load_checkpoint(path, model),
}


@pytest.mark.parametrize("load", list(_WAYS_TO_LOAD))
@distributed(2)
def test_a_load_leaves_no_buffer_without_values_in_silence(load: str, tmp_path: Path) -> None:
    """One that no state dict has is named before anything is computed with it."""
    whole = _WithHiddenBuffer()
    if dist.get_rank() == 0:
        torch.save({"model": whole.state_dict()}, tmp_path / "run.pt")
    dist.barrier()
    with torch.device("meta"):
        model = _WithHiddenBuffer()
    fully_shard(model.linear)
    fully_shard(model)
    model.to_empty(device="cpu")
    _WAYS_TO_LOAD[load](model, whole.state_dict(), tmp_path / "run.pt")
    assert_equal(model.linear.weight.full_tensor(), whole.linear.weight, "weight")
    x = torch.ones(1, 4)
    with pytest.raises(RuntimeError, match=r"buffers \['scale'\] were never initialised after"):
        model(x)
    model.scale.fill_(2.0)
    assert_equal(model(x), whole(x), "output")


def _in_place(module: nn.Module) -> None:
    module.table.fill_(2.0)


def _by_assignment(module: nn.Module) -> None:
    module.table = torch.full((4,), 2.0)


def _by_data(module: nn.Module) -> None:
    module.table.data.fill_(2.0)


def _by_replacing_data(module: nn.Module) -> None:
    module.table.data = torch.full((4,), 2.0)


def _by_view(module: nn.Module) -> None:
    module.table[:2] = 2.0
    module.table[2:] = 2.0


def _by_copy(module: nn.Module) -> None:
    module.table.copy_(torch.full((4,), 2.0))


def _by_out(module: nn.Module) -> None:
    torch.full((4,), 2.0, out=module.table)


def _by_loading(module: nn.Module) -> None:
    module.load_state_dict({"table": torch.full((4,), 2.0)}, strict=False)


def _by_assigning_load(module: nn.Module) -> None:
    module.load_state_dict({"table": torch.full((4,), 2.0)}, strict=False, assign=True)


def _by_registering(module: nn.Module) -> None:
    module.register_buffer("table", torch.full((4,), 2.0))


def _to_half_and_back(module: nn.Module) -> None:
    _in_place(module)
    module.half()
    module.float()


class _Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.empty(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * 0.0 + self.table


@pytest.mark.parametrize(
    "write",
    [
        _in_place,
        _by_assignment,
        _by_data,
        _by_replacing_data,
        _by_view,
        _by_copy,
        _by_out,
        _by_loading,
        _by_assigning_load,
        _by_registering,
        _to_half_and_back,
    ],
)
@distributed(2)
def test_buffers_written_in_any_way_are_accepted(write: Callable[[nn.Module], None]) -> None:
    """Whoever gave a buffer its values is not bothered."""
    with torch.device("meta"):
        model = _Table()
    fully_shard(model)
    model.to_empty(device="cpu")
    assert is_never_written(model.table)
    model.linear.reset_parameters()
    write(model)
    assert_equal(model(torch.ones(1, 4)).detach(), torch.full((1, 4), 2.0))


@distributed(2)
def test_real_buffers_are_never_suspected() -> None:
    """Whatever values a buffer that was real from the start holds, it is the user's."""
    model = _Table()
    model.table.fill_(float("nan"))
    fully_shard(model)
    assert model(torch.ones(1, 4)).isnan().all()
    assert not is_never_written(model.table)


# --- conversions after sharding ---


@pytest.mark.parametrize("convert", [torch.bfloat16, torch.float64, torch.float16])
@distributed(2)
def test_converted_model_computes_with_the_converted_values(convert: torch.dtype) -> None:
    """After `.to(dtype)` forward, gradients and optimizer go on in the new dtype."""
    reference = Net()
    model = copy.deepcopy(reference)
    shard_blocks(model)
    model(_sequence_batch(9)).sum().backward()  # so that there is something older to compute with
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = torch.optim.SGD(reference.parameters(), lr=0.5)
    params = list(model.parameters())
    for each in (model, reference):
        each.to(convert)
    assert all(param is old for param, old in zip(model.parameters(), params, strict=True))
    x = torch.ones(2, 5, dtype=convert)  # alike on all ranks, so that means are exact
    for _ in range(2):
        outputs = [each(x) for each in (model, reference)]
        assert_equal(outputs[0].detach(), outputs[1].detach(), "output")
        for output in outputs:
            output.sum().backward()
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert_is_slice(param, other)


@pytest.mark.fast
@pytest.mark.parametrize("name", ["half", "bfloat16", "double", "float"])
@distributed(2)
def test_conversion_methods_equal_those_of_the_plain_module(name: str) -> None:
    """Before the first forward and after it, on all units and on a part of the tree."""
    reference = Net()
    model = copy.deepcopy(reference)
    shard_blocks(model)
    for each in (model, reference):
        getattr(each.blocks[1], name)()
    lazy_init(model)
    for each in (model, reference):
        getattr(each, name)()
    lazy_init(model)
    assert {handle.local_shard.dtype for handle in get_handles(model)} == {model.inp.weight.dtype}
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert_is_slice(param, other)


@distributed(2)
def test_attributes_survive_a_conversion() -> None:
    """What users hang on a parameter stays, and so does requires_grad."""
    block = Layer()
    block.up.bias.requires_grad_(False)
    for index, param in enumerate(block.parameters()):
        param.note = index  # type: ignore[attr-defined]
    fully_shard(block)
    block.double()
    lazy_init(block)
    assert [param.note for param in block.parameters()] == [0, 1, 2, 3]
    assert [param.requires_grad for param in block.parameters()] == [True, False, True, True]


@distributed(2)
def test_converting_a_part_of_a_unit_is_named_and_can_be_completed() -> None:
    """A unit has one dtype for each handle; the text says which parameters differ."""
    block = fully_shard(Layer())
    lazy_init(block)
    block.up.double()
    with pytest.raises(RuntimeError, match="to change dtype and device together") as caught:
        block(torch.ones(1, 15))
    assert str(caught.value) == (
        "expected the parameters of one unit that were sharded together to change dtype and "
        "device together, got 'up.weight': torch.float64 on cpu, 'up.bias': torch.float64 on cpu, "
        "'down.weight': torch.float32 on cpu, 'down.bias': torch.float32 on cpu. Convert the "
        "whole unit."
    )
    block.down.double()
    block(torch.ones(1, 15, dtype=torch.float64)).sum().backward()
    assert all(param.grad.dtype == torch.float64 for param in block.parameters())


@distributed(2)
def test_conversion_between_forward_and_backward_fails_and_leaves_no_trace() -> None:
    """The graph belongs to other weights; the next step is right."""
    reference = Layer()
    block = fully_shard(copy.deepcopy(reference), reshard_after_forward=True)
    loss = block(torch.ones(1, 15)).sum()
    block.double()
    with pytest.raises(RuntimeError):
        loss.backward()
    x = torch.ones(1, 15, dtype=torch.float64)
    for each in (block, reference.double()):
        each(x).sum().backward()
    for param, expected in zip(block.parameters(), reference.parameters(), strict=True):
        assert_is_slice(param.grad, expected.grad)


@distributed(2)
def test_replaced_data_is_taken_over() -> None:
    """`param.data = full` and `param.data = shard` are what forward computes with."""
    reference = nn.Linear(3, 5)
    model = copy.deepcopy(reference)
    fully_shard(model)
    x = torch.ones(1, 3)
    model(x)
    weight = torch.arange(15.0).view(5, 3)
    reference.weight.data = weight
    model.weight.data = weight
    assert_equal(model(x).detach(), reference(x).detach())
    reference.weight.data = weight * 2
    model.weight.data = model.weight.data * 2
    assert_equal(model(x).detach(), reference(x).detach())


@distributed(2)
def test_gaps_of_a_new_shard_hold_zeros() -> None:
    """Whatever was in its memory before: they would count in the norms of flat parameters."""
    torch.use_deterministic_algorithms(True)  # memory that nobody filled holds NaN
    try:
        model = Net()
        shard_blocks(model)
    finally:
        torch.use_deterministic_algorithms(False)
    shards = [handle.local_shard for handle in get_handles(model)]
    num_held = sum(param.to_local().numel() for param in model.parameters())
    assert num_held < sum(shard.numel() for shard in shards)
    assert all(shard.isfinite().all() for shard in shards)
