"""`describe`: the units of a sharded model, the bytes of each rank, and what looks wrong."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from composable_shard import (
    MixedPrecisionPolicy,
    ShardingStrategy,
    count_collectives,
    describe,
    fully_shard,
    get_handles,
    get_states,
    set_forward_prefetch,
)
from composable_shard.options import Block
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import Net, loss_of, make_net, replica_mesh

GRANULARITIES = ("element", "row", Block(16), "param")
_NUM_RANKS = 2


def _stored_nbytes(*tensors: torch.Tensor) -> int:
    """Return the bytes of the tensors' storages, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    held = [storage for storage in storages if storage.size()]  # freed memory has no address
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def _of_all_ranks(value: int) -> int:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return int(total)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@distributed(_NUM_RANKS)
def test_bytes_are_those_that_this_rank_holds(granularity: Any) -> None:
    """At rest, of gradients and of the optimizer, on each rank; and of all ranks together."""
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        model = make_net(granularity=granularity, strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model).backward()
        grads = [param.grad.to_local() for param in model.parameters() if param.grad is not None]
        grad_nbytes = _stored_nbytes(*grads)
        optimizer.step()
        optimizer.zero_grad()
        found = describe(model, optimizer)
        at_rest = [
            tensor
            for handle in get_handles(model)
            for tensor in (handle.local_shard, handle.unsharded)
        ]
        assert found.param_nbytes == _stored_nbytes(*at_rest)
        assert found.grad_nbytes == grad_nbytes
        moments = [
            state[name].to_local()
            for state in optimizer.state.values()
            for name in ("exp_avg", "exp_avg_sq")
        ]
        steps = [state["step"].nbytes for state in optimizer.state.values()]
        numel_nbytes = sum(each.numel() * each.element_size() for each in moments)
        assert found.optimizer_nbytes == numel_nbytes + sum(steps)
        planned = describe(model)
        assert planned.optimizer_nbytes == numel_nbytes
        own = planned.param_nbytes + planned.grad_nbytes + planned.optimizer_nbytes
        total = sum(unit.total_nbytes for unit in planned.units)
        assert total == _of_all_ranks(own)


@distributed(_NUM_RANKS)
def test_a_unit_is_described_by_its_options() -> None:
    """Names, strategy, dtypes, granularity, ranks, parameters, padding, and what it gathers."""
    model = Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    first, *others = model.blocks
    fully_shard(first, granularity="param", reshard_after_forward=False)
    for block in others:
        fully_shard(block, mp_policy=policy, strategy=ShardingStrategy.SHARD_OPTIM)
    fully_shard(model)
    set_forward_prefetch(first, [others[0]])
    root, block, other = describe(model).units[:3]
    assert (root.name, root.class_name, root.keeps) == ("(root)", "Net", "all")
    assert (root.ahead, block.ahead) == (None, ("blocks.1",))
    assert (block.name, block.class_name, block.keeps) == ("blocks.0", "Layer", "all")
    assert block.granularities == ("param",)
    assert other.strategy is ShardingStrategy.SHARD_OPTIM
    assert other.dtypes == (torch.float32, torch.bfloat16)
    assert (other.ranks.shard, str(other.ranks)) == (_NUM_RANKS, "2")
    assert other.num_params == len(list(others[0].parameters()))
    assert block.numel == sum(
        handle.layout.unpadded_numel for handle in get_states(first)[0].handles
    )
    assert root.padding_numel == sum(
        handle.layout.padded_numel - handle.layout.unpadded_numel
        for handle in fully_shard.state(model).handles  # type: ignore[attr-defined]
    )


@distributed(4)
def test_copies_are_told_from_shards() -> None:
    """On a mesh of 2 x 2 two ranks share a unit and two hold copies."""
    model = make_net(mesh=replica_mesh())
    unit = describe(model).units[-1]
    assert (unit.ranks.shard, unit.ranks.replicate, str(unit.ranks)) == (2, (2,), "2x2")


@distributed(_NUM_RANKS)
def test_modules_of_one_unit_are_listed_together() -> None:
    """A list of modules is one unit with several names; a part of a model is described alone."""
    model = Net()
    fully_shard(list(model.blocks))
    fully_shard(model)
    names = [f"blocks.{index}" for index in range(len(model.blocks))]
    assert describe(model).units[1].fqns == tuple(names)
    assert [unit.fqns for unit in describe(model.blocks).units] == [
        tuple(str(index) for index in range(len(model.blocks)))
    ]


@distributed(_NUM_RANKS)
def test_it_warns_of_what_looks_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A giant unit, tiny ones, and an optimizer that misses some parameters."""
    model = make_net()
    (warning,) = describe(model).warnings
    assert warning.startswith("3 of 4 units have less than 64.0 KiB, for which a gather costs")
    monkeypatch.setattr("composable_shard.planning.description._TINY_NBYTES", 0)
    assert describe(model).warnings == ()
    monkeypatch.setattr("composable_shard.planning.description._GIANT_NBYTES", 0)
    giant = Net()
    fully_shard(giant)
    (warning,) = describe(giant).warnings
    assert "unit '(root)' holds 100% of the parameters" in warning
    assert "transformer_blocks" in warning

    monkeypatch.undo()
    monkeypatch.setattr("composable_shard.planning.description._TINY_NBYTES", 0)
    optimizer = torch.optim.SGD(list(model.parameters())[1:], lr=0.1)
    names = [name for name, _ in model.named_parameters()]
    (missed,) = describe(model, optimizer).warnings
    assert f"the optimizer does not step the trainable parameters '{names[0]}'." in missed


@distributed(_NUM_RANKS)
def test_it_is_a_table() -> None:
    """One row for each unit and a total."""
    model = Net()
    fully_shard(model)
    found = describe(model)
    lines = str(found).splitlines()
    assert lines[1].split()[:3] == ["unit", "class", "strategy"]
    assert lines[3].startswith("(root)")
    assert lines[5].startswith("total")


@distributed(_NUM_RANKS)
def test_units_and_handles_say_what_they_are() -> None:
    """`repr` names the unit, the strategy, the ranks and the state."""
    model = make_net()
    state, handle = get_states(model)[1], get_handles(model)[1]
    assert repr(state) == "<ShardState 'blocks.0': FULL_SHARD, 1 handles, IDLE>"
    numel = handle.layout.unpadded_numel
    expected = f"<FlatParamHandle 'blocks.0': 4 parameters, {numel:,} elements, rank 0 of 2, FREED>"
    assert repr(handle) == expected.replace("rank 0", f"rank {dist.get_rank()}")


def test_what_is_not_sharded_is_refused() -> None:
    """Local, and by name."""
    with pytest.raises(ValueError, match=r"nothing in Net is sharded. Call fully_shard first"):
        describe(Net())
    with pytest.raises(ValueError, match=r"expected module to be an nn.Module, got str"):
        describe("model")  # type: ignore[arg-type]


@distributed(_NUM_RANKS)
def test_it_warns_of_state_that_no_save_can_hold() -> None:
    """With the parameter, the name and the class."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model).backward()
    optimizer.step()
    before = describe(model, optimizer).warnings
    optimizer.state[model.inp.weight]["kept"] = [object()]
    found = set(describe(model, optimizer).warnings) - {*before}
    assert len(found) == 1
    assert "the optimizer state 'kept' of 'inp.weight' is a builtins.list" in found.pop()


class _Projects(torch.optim.SGD):
    """Keeps an object with each parameter from the first step on."""

    def __init__(self, params: Any, made: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.made, self.noise = made, torch.zeros(2)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step with noise, and keep the object."""
        super().step(closure)
        self.noise += torch.rand(2)
        for param in self.param_groups[0]["params"]:
            self.state[param]["made"] = self.made()


class _Sends(torch.optim.Optimizer):
    """Averages in its step, which ranks can't do alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Add up a number of each rank."""
        dist.all_reduce(torch.ones(1))


@distributed(_NUM_RANKS)
def test_it_warns_before_the_first_step_of_state_that_no_save_can_hold() -> None:
    """By a trial on this rank alone, after which nothing is changed."""
    model = make_net()
    optimizer = _Projects(model.parameters(), object, lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook ran"))
    before = torch.get_rng_state(), {**vars(optimizer)}
    values = [param.detach().clone() for param in model.parameters()]
    if dist.get_rank() == 0:
        (found,) = _of_saves(describe(model, optimizer))
        assert "the optimizer state 'made' of 'inp.weight' is a builtins.object" in found
    assert_equal(torch.get_rng_state(), before[0])
    assert vars(optimizer) == before[1]
    assert not optimizer.state
    assert all(param.grad is None for param in model.parameters())
    for param, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(param, value)
    assert not _of_saves(describe(model, _Projects(model.parameters(), dict, lr=0.1)))
    # Objects that say their own state can be saved.
    made = functools.partial(torch.nn.Linear, 1, 1)
    assert not _of_saves(describe(model, _Projects(model.parameters(), made, lr=0.1)))


@distributed(_NUM_RANKS)
def test_it_says_that_a_first_step_could_not_be_tried() -> None:
    """Where the step raises, or needs other ranks, which are not asked."""
    model = make_net()
    if dist.get_rank() == 0:
        for optimizer, text in (
            (_Sends(model.parameters(), {}), "needs other ranks"),
            (_Projects(model.parameters(), lambda: 1 / 0, lr=0.1), "division by zero"),
        ):
            (found,) = _of_saves(describe(model, optimizer))
            assert f"{type(optimizer).__name__} is not known before its first step" in found
            assert text in found


def _of_saves(description: Any) -> list[str]:
    return [text for text in description.warnings if "save" in text]


class _OfWholes(torch.optim.Optimizer):
    """Needs each gradient whole, once."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step by sums along the first dim."""
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad.cumsum(0), alpha=0.1)


@distributed(_NUM_RANKS)
def test_it_says_what_a_step_gathers() -> None:
    """The bytes of the gradients and how many operations; nothing of an elementwise optimizer."""
    model = make_net()
    params = list(model.parameters())
    for optimizer in (torch.optim.AdamW(params), _OfWholes(params, {})):
        assert "a step gathers" not in str(describe(model, optimizer))
        loss_of(model).backward()
        with count_collectives() as log:
            optimizer.step()
        optimizer.zero_grad()
    found = describe(model, optimizer)
    assert found.step_gathered_nbytes == sum(param.nbytes for param in params)
    assert found.step_num_gathers == len(params) == log.count("all_gather")
    assert f"at rest, for {len(params)} operations" in str(found)
