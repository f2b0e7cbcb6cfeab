"""What `fully_shard` promises about the module it is given, and what it says when it refuses."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

from composable_shard import (
    FlatParamHandle,
    FlatShard,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    get_handles,
    get_model_state_dict,
    get_root_states,
    get_states,
    is_sharded,
    lazy_init,
    no_sync,
    reshard,
    unshard,
    unshard_params,
)
from composable_shard.comm.trace import count_collectives
from composable_shard.flat_param.memory import MemoryPlan
from composable_shard.tensor.pending import PendingGradient
from composable_shard.torch_private import num_known_groups
from tests.harness.assertions import assert_equal
from tests.harness.fake_group import fake_group
from tests.harness.memory import peak_bytes, still_alive
from tests.harness.ranks import distributed, run_processes, run_ranks
from tests.programs.models import (
    CheckpointsBlocks,
    Layer,
    Net,
    Twins,
    assert_at_rest,
    assert_is_slice,
    fingerprint,
    rank_input,
    shard_blocks,
)


class _BufferedNet(Net):
    """With a parameter of the root's own, of no dims, and a buffer."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__(num_blocks)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("offset", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.offset


def _make_sharded(make: Callable[[], nn.Module] = _BufferedNet, **options: Any) -> Any:
    model = make()
    shard_blocks(model, **options)
    return model


def _net_input(step: int = 0) -> Tensor:
    return rank_input(4, 5, step=step)


def _train_adamw(model: nn.Module, num_steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(num_steps):
        model(_net_input(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _assert_same_parameters(model: nn.Module, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(expected)
    for name, param in model.named_parameters():
        full = param.full_tensor() if isinstance(param, FlatShard) else param
        assert_equal(full.detach(), expected[name].detach(), name)


# --- the contract ---


@pytest.mark.fast
@distributed(2)
def test_the_same_object_comes_back() -> None:
    """Module or list, its class is unchanged and nothing wraps it."""
    net, blocks = _BufferedNet(), [Layer(), Layer()]
    assert fully_shard(net) is net
    assert fully_shard(blocks) is blocks
    assert type(net) is _BufferedNet


@pytest.mark.fast
def test_a_build_for_gpus_serves_machines_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one that PyPI has: units of all ranks compute on the CPU."""

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    with fake_group(2):
        [handle] = get_handles(fully_shard(Layer()))
    assert handle.local_shard.device.type == "cpu"


@distributed(2)
def test_no_group_is_made_without_a_mesh() -> None:
    """Ranks would wait in it for those on which garbage keeps the units of an earlier model."""
    num_known = num_known_groups()
    earlier = fully_shard(nn.Linear(4, 4))
    kept = earlier if dist.get_rank() == 0 else None
    del earlier
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        model = fully_shard(nn.Linear(4, 4), sync_module_states=True)
    model(torch.ones(2, 4)).sum().backward()
    assert num_known_groups() == num_known
    del kept


@distributed(2)
def test_names_and_their_order_stay() -> None:
    """FQNs of parameters, buffers and modules are what they were, before and after a step."""
    net = _BufferedNet()
    before = [list(dict(names)) for names in _all_names(net)]
    shard_blocks(net)
    assert [list(dict(names)) for names in _all_names(net)] == before
    _train_adamw(net)
    assert [list(dict(names)) for names in _all_names(net)] == before


def _all_names(module: nn.Module) -> list[Iterator[tuple[str, Any]]]:
    return [
        module.named_parameters(),
        module.named_buffers(),
        module.named_modules(),
        iter(module.state_dict().items()),
    ]


@pytest.mark.fast
@distributed(2)
def test_parameters_stay_the_same_objects() -> None:
    """Identity, shape, stride, dtype, requires_grad and the user's attributes survive."""
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Linear(7, 15), nn.Linear(2, 2))
    net[0].to(memory_format=torch.channels_last)
    net[1].weight = nn.Parameter(torch.randn(7, 15).t())
    net[2].requires_grad_(False).double()
    for index, param in enumerate(net.parameters()):
        param.note = index  # type: ignore[attr-defined]
    before = list(net.parameters())
    facts = [_facts(param) for param in before]
    fully_shard(net)
    after = list(net.parameters())
    assert all(param is other for param, other in zip(after, before, strict=True))
    assert [_facts(param) for param in after] == facts


def _facts(param: nn.Parameter) -> tuple[Any, ...]:
    return (
        param.shape,
        param.ndim,
        param.stride(),
        param.numel(),
        param.dtype,
        param.device,
        param.requires_grad,
        param.is_leaf,
        isinstance(param, nn.Parameter),
        param.note,  # type: ignore[attr-defined]
    )


@distributed(2)
def test_each_rank_holds_one_slice() -> None:
    """The slices of all ranks together are the parameter, and none is held twice."""
    reference = _BufferedNet()
    net = copy.deepcopy(reference)
    shard_blocks(net)
    for param, full in zip(net.parameters(), reference.parameters(), strict=True):
        assert isinstance(param, FlatShard)
        held = torch.tensor(param.to_local().numel())
        dist.all_reduce(held)
        assert held == full.numel()
    _assert_same_parameters(net, reference)


@distributed(2)
def test_state_is_read_without_writing() -> None:
    """`fully_shard.state` leaves a module's attributes alone, sharded or not."""
    plain, sharded = Layer(), fully_shard(Layer())
    for module in (plain, sharded):
        before = dict(vars(module))
        state = fully_shard.state(module)  # type: ignore[attr-defined]
        assert vars(module) == before
        assert (state is not None) is is_sharded(module) is (module is sharded)


@distributed(2)
def test_states_handles_and_roots_are_found() -> None:
    """Outermost first, each once; a tree has one root, disjoint trees have one each."""
    net = _make_sharded()
    states = get_states(net)
    assert [state.name for state in states] == ["_BufferedNet", "blocks.0", "blocks.1"]
    assert get_handles(net) == [handle for state in states for handle in state.handles]
    assert get_root_states(net) == states[:1]
    pair = nn.ModuleList([fully_shard(Layer()), nn.Sequential(fully_shard(Layer()))])
    assert get_root_states(pair) == get_states(pair)
    assert get_states(Layer()) == get_handles(Layer()) == get_root_states(Layer()) == []


@distributed(2)
def test_one_unit_of_several_modules() -> None:
    """A list of modules shares one state and one gather; inner ones are not counted twice."""
    blocks = nn.Sequential(Layer(), Layer())
    fully_shard([blocks[0], blocks[1], blocks[0].up])
    assert len(get_states(blocks)) == len(get_handles(blocks)) == 1
    assert [is_sharded(module) for module in (*blocks, blocks[0].up)] == [True, True, False]
    fully_shard(blocks)
    with count_collectives() as log:
        lazy_init(blocks)
        log.log.clear()
        blocks(torch.ones(2, 15)).sum().backward()
    assert log.count("reduce_scatter") == 1


@distributed(2)
def test_sharding_a_module_without_parameters_is_allowed() -> None:
    """A unit may manage nothing: everything below is sharded already, or there is nothing."""
    empty, outer = nn.Sequential(nn.GELU()), nn.Sequential(fully_shard(Layer()))
    assert get_handles(fully_shard(empty)) == []
    fully_shard(outer)
    assert_equal(empty(torch.ones(2)), nn.GELU()(torch.ones(2)))
    outer(torch.ones(2, 15)).sum().backward()
    assert all(param.grad is not None for param in outer.parameters())


# --- refusals ---


class _NoForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Layer()


class _TableElsewhere(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.table = nn.Parameter(torch.ones(2, device="meta"))


class _Gathered(nn.Parameter):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any: ...


class _Coded(nn.Parameter):
    codes: Tensor


def _of_own_class(name: str) -> nn.Module:
    model = nn.Linear(4, 4)
    values = model.weight.detach()
    wrapper = TwoTensor(values, values.clone())
    if name == "wrapper":
        model.weight = nn.Parameter(wrapper)
    elif name == "in a DTensor":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        local = DTensor.from_local(wrapper, mesh, [Replicate()], run_check=False)
        model.weight = nn.Parameter(local)
    else:
        model.weight = _Gathered(values)
    return model


def _with_codes() -> nn.Module:
    module: Any = nn.Linear(2, 2)
    module.weight = _Coded(module.weight.detach())
    module.weight.codes = module.weight.data
    return module


def _sparse() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.eye(2).to_sparse())
    return module


class _SparseBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("mask", torch.eye(3).to_sparse())


def _block_on_two_devices() -> nn.Module:
    module = Layer()
    module.down.to("meta")
    return module


def _with_copied_shard() -> nn.Module:
    module = Layer()
    module.up.weight = copy.deepcopy(fully_shard(Layer()).up.weight)
    return module


def _inside_sharded() -> nn.Module:
    outer = fully_shard(_BufferedNet())
    outer.blocks[0].__dict__["outer"] = outer  # keeps it alive
    return outer.blocks[0]


REFUSALS: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "twice": (
        lambda: fully_shard(Layer()),
        {},
        ValueError,
        "fully_shard was already applied to this Layer; it can be applied to a module only once. "
        "To change its options, build the model anew.",
    ),
    "empty list": (list, {}, ValueError, "expected at least one module, got an empty list"),
    "no module": (lambda: [Layer(), 3], {}, ValueError, "expected an nn.Module, got int"),
    "module list": (
        lambda: nn.ModuleList([Layer()]),
        {},
        ValueError,
        "ModuleList has no forward, so its unit would never be gathered. Pass the modules in it: "
        "`for child in container: fully_shard(child)`, or `fully_shard(list(container))` to make "
        "them one unit.",
    ),
    "no forward": (
        _NoForward,
        {},
        ValueError,
        "_NoForward has no forward, so its unit would never be gathered. Pass the modules in it: "
        "`for child in container: fully_shard(child)`, or `fully_shard(list(container))` to make "
        "them one unit.",
    ),
    "two devices": (
        _block_on_two_devices,
        {},
        ValueError,
        "expected all parameters of a unit on one device, got cpu: ['up.weight', 'up.bias']; "
        "meta: ['down.weight', 'down.bias']. Move the module to one device before fully_shard.",
    ),
    "lazy module": (
        lambda: nn.Sequential(nn.LazyLinear(3)),
        {},
        ValueError,
        "parameter '0.weight' has no shape yet (a lazy module). Run one forward before "
        "fully_shard.",
    ),
    "values of two names": (
        _with_codes,
        {},
        NotImplementedError,
        "parameter 'weight', a _Coded, has its values a second time as its attribute 'codes', "
        "which stays whole. Pass it in ignored_params.",
    ),
    "sparse parameter": (
        _sparse,
        {},
        NotImplementedError,
        "parameter 'weight' is a Parameter with layout torch.sparse_coo; only dense tensors and "
        "DTensors can be sharded. Pass it in ignored_params.",
    ),
    **{
        f"a class of its own: {name}": (
            functools.partial(_of_own_class, name),
            {},
            NotImplementedError,
            f"parameter 'weight' is a {kind} with layout torch.strided; only dense tensors and "
            "DTensors can be sharded, and classes around one dense tensor that have "
            "fsdp_pre_all_gather. Pass it in ignored_params.",
        )
        for name, kind in (
            ("wrapper", "TwoTensor"),
            ("in a DTensor", "TwoTensor"),
            ("with FSDP2's methods", "_Gathered"),
        )
    },
    "copied shard": (
        _with_copied_shard,
        {},
        ValueError,
        "parameter 'up.weight' is a FlatShard that no unit manages, a copy perhaps. Replace it "
        "by a plain parameter, for example nn.Parameter(param.full_tensor()).",
    ),
    "top-down order": (
        _inside_sharded,
        {},
        ValueError,
        "parameter 'up.weight' is already managed by the unit '_BufferedNet' of an outer module. "
        "Call fully_shard on inner modules first, on outer ones last.",
    ),
    "strategy": (
        Layer,
        {"strategy": "HYBRID_SHARD"},
        ValueError,
        "expected strategy to be a ShardingStrategy or one of 'full_shard', 'shard_grad_op', "
        "'shard_optim', 'no_shard', got 'HYBRID_SHARD'. It is \"full_shard\" over a 2-D mesh "
        "(replicate, shard).",
    ),
    "freeing what is kept": (
        Layer,
        {"strategy": ShardingStrategy.SHARD_OPTIM, "reshard_after_forward": True},
        ValueError,
        "expected reshard_after_forward to be None or False with ShardingStrategy.SHARD_OPTIM, "
        "which keeps parameters unsharded, got True. Use FULL_SHARD to free them.",
    ),
    "reshard_after_forward": (
        Layer,
        {"reshard_after_forward": 3},
        ValueError,
        "expected reshard_after_forward to be True, False, None or a divisor of the 2 ranks that "
        "share the unit, got 3",
    ),
    "mesh": (
        Layer,
        {"mesh": (2,)},
        ValueError,
        "expected mesh to be a DeviceMesh or None, got (2,)",
    ),
    "ignored_params: used up by the first call": (
        Layer,
        {"ignored_params": iter(())},
        ValueError,
        "expected ignored_params to be a set of parameters, got a tuple_iterator",
    ),
    "ignored_params: names": (
        Layer,
        {"ignored_params": ["up.bias"]},
        ValueError,
        "expected ignored_params to hold parameters only, got a str",
    ),
    "sync_module_states": (
        Layer,
        {"sync_module_states": None},
        ValueError,
        "expected sync_module_states to be True or False, got None",
    ),
    "broadcast_buffers": (
        Layer,
        {"broadcast_buffers": 1},
        ValueError,
        "expected broadcast_buffers to be True or False, got 1",
    ),
    "broadcast_buffers: sparse": (
        _SparseBuffer,
        {"broadcast_buffers": True},
        ValueError,
        "broadcast_buffers=True can't send buffer 'mask' of _SparseBuffer, which has layout "
        "torch.sparse_coo. Make it dense, or leave broadcast_buffers out for its unit.",
    ),
    "use_orig_params": (
        Layer,
        {"use_orig_params": "no"},
        ValueError,
        "expected use_orig_params to be True or False, got 'no'",
    ),
    "sync on meta": (
        lambda: Layer().to("meta"),
        {"sync_module_states": True},
        ValueError,
        "sync_module_states=True needs real parameters and buffers, got some on the meta device. "
        "Initialise or load them after fully_shard instead.",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
@distributed(2)
def test_refusal_says_what_to_do_and_changes_nothing(case: str) -> None:
    """Every rank gets the whole text, and the module is as before the call (S2.18: two devices)."""
    build, options, error, text = REFUSALS[case]
    target = build()
    roots = [target] if isinstance(target, nn.Module) else target[:1]
    modules = [module for root in roots for module in root.modules()]
    before = [fingerprint(module) for module in modules]
    with pytest.raises(error) as caught:
        fully_shard(target, **options)
    assert str(caught.value) == text
    assert [fingerprint(module) for module in modules] == before


@distributed(4)
def test_mesh_with_three_axes_is_refused_by_name() -> None:
    """The message shows how to pick axes."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("outer", "replicate", "shard"))
    with pytest.raises(ValueError, match="expected a 1-D mesh") as caught:
        fully_shard(Layer(), mesh=mesh)
    assert str(caught.value) == (
        "expected a 1-D mesh, or a 2-D one (replicate, shard), got 3 axes ('outer', 'replicate', "
        "'shard'). Pass one or two axes of it, for example mesh['dp']."
    )


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_NTASKS"])
def test_missing_process_group_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several processes that torchrun has not started would train alone."""
    monkeypatch.setenv(name, "2")
    with pytest.raises(RuntimeError) as caught:
        fully_shard(Layer())
    assert str(caught.value) == (
        f"torch.distributed is not initialised, and {name}=2 says that this is one of several "
        "processes. Call torch.distributed.init_process_group() first, start the script with "
        "torchrun, or set all of WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT."
    )


def _train_launched() -> tuple[int, int, bool]:
    torch.manual_seed(0)
    model = fully_shard(Layer())
    torch.manual_seed(0)
    plain = Layer()
    rank = dist.get_rank()
    model(torch.full((2, 15), 1.0 + rank)).square().mean().backward()
    losses = [plain(torch.full((2, 15), 1.0 + other)).square().mean() for other in range(2)]
    (sum(losses) / 2).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    are_close = all(torch.allclose(a.grad.full_tensor(), b.grad) for a, b in pairs)
    return dist.get_world_size(), rank, are_close


def test_environment_of_a_launcher_makes_the_process_group() -> None:
    """As FSDP2's: `WORLD_SIZE`, `RANK`, `MASTER_ADDR`, `MASTER_PORT`, and no elastic launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    found = run_processes([{**shared, "RANK": str(rank)} for rank in range(2)], _train_launched)
    assert found == [(2, 0, True), (2, 1, True)]


def _train_alone() -> tuple[int, bool, list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr(logging.getLogger("composable_shard"), "warning", lines.append)
        model = nn.Sequential(Layer(), Layer())
        reference = copy.deepcopy(model)
        for module in (*model, model):
            fully_shard(module)
        for each in (model, reference):
            optimizer = torch.optim.AdamW(each.parameters())
            each(torch.ones(2, 15)).square().mean().backward()
            optimizer.step()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        are_equal = all(torch.equal(ours.full_tensor(), theirs) for ours, theirs in pairs)
        return dist.get_world_size(), are_equal, lines


def test_notebook_without_a_process_group_trains_on_one_rank() -> None:
    """Neither torchrun nor `init_process_group`: one log line, and the values of a plain model."""
    [(world_size, are_equal, lines)] = run_processes([{}], _train_alone)
    assert world_size == 1
    assert are_equal
    assert lines == [
        "torch.distributed was not initialised: this process trains alone, on one rank. For "
        "several start the script with torchrun."
    ]


@distributed(2)
def test_corrected_call_succeeds_after_a_failed_one() -> None:
    """A failed call leaves nothing that a second one trips over."""
    module = _TableElsewhere()
    reference = copy.deepcopy(module)
    for options in ({}, {"use_orig_params": False}, {"reshard_after_forward": "no"}):
        with pytest.raises((ValueError, NotImplementedError)):
            fully_shard(module, **options)
    fully_shard(module, ignored_params={module.table})
    assert_equal(module(torch.ones(2, 2)), reference(torch.ones(2, 2)))
    module(torch.ones(2, 2)).sum().backward()
    assert isinstance(module.weight.grad, FlatShard)


@distributed(2)
def test_call_that_runs_out_of_memory_changes_nothing() -> None:
    """All buffers are there before the first parameter is touched."""
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3).double())
    before = [fingerprint(child) for child in module.modules()]
    facts = [(type(param), param.tolist()) for param in module.parameters()]
    num_calls = 0
    allocate = MemoryPlan.allocate

    def fail_the_second_time(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise MemoryError("on purpose")
        return allocate(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryPlan, "allocate", fail_the_second_time)
        with pytest.raises(MemoryError, match="on purpose"):
            fully_shard(module)
    assert [fingerprint(child) for child in module.modules()] == before
    assert [(type(param), param.tolist()) for param in module.parameters()] == facts
    assert len(get_handles(fully_shard(module))) == 2


@distributed(2)
def test_a_graph_from_before_raises_in_its_backward() -> None:
    """Its gradients would go where nobody looks; the graphs after it are right."""
    module = Layer()
    loss = module(torch.ones(1, 15)).sum()
    fully_shard(module)
    with pytest.raises(RuntimeError, match=r"parameter '\w+\.\w+' through a graph that was record"):
        loss.backward()
    module(torch.ones(1, 15)).sum().backward()
    assert all(isinstance(param.grad, FlatShard) for param in module.parameters())


@distributed(2)
def test_the_parametrisation_of_weight_norm_works() -> None:
    """It computes in each forward."""
    new = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 5)))
    reference = copy.deepcopy(new)
    fully_shard(new)
    new(torch.ones(2, 3)).square().sum().backward()
    reference(torch.ones(2, 3)).square().sum().backward()
    for param, expected in zip(new.parameters(), reference.parameters(), strict=True):
        assert isinstance(param.grad, FlatShard)
        assert_is_slice(param.grad, expected.grad)


# --- options ---


@distributed(2)
def test_ignored_parameters_are_left_alone() -> None:
    """They stay plain tensors and keep their local gradient; that is no mistake."""
    net = _BufferedNet()
    kept = net.scale
    shard_blocks(net, ignored_params={kept})
    for step in range(2):
        net(_net_input(step)).sum().backward()
    assert net.scale is kept
    assert type(kept) is nn.Parameter
    assert kept.grad is not None
    assert type(kept.grad) is Tensor


@distributed(2)
def test_frozen_ignored_parameters_are_not_worth_a_warning() -> None:
    """Only what trains without being reduced is named."""
    net = _BufferedNet()
    net.scale.requires_grad_(False)
    shard_blocks(net, ignored_params={net.scale})
    net(_net_input()).sum().backward()  # a warning would be an error
    assert type(net.scale) is nn.Parameter
    assert net.scale.grad is None


@distributed(2)
def test_sync_module_states_gives_every_rank_the_first_ranks_values() -> None:
    """Parameters of any layout and buffers, although each rank started from another seed."""
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5))
    net[0].to(memory_format=torch.channels_last)
    net[1].running_mean.normal_()
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5))
    first[1].running_mean.normal_()
    fully_shard(net, sync_module_states=True)
    _assert_same_parameters(net, first)
    for buffer, expected in zip(net.buffers(), first.buffers(), strict=True):
        assert_equal(buffer, expected)


@distributed(2)
def test_without_sync_each_rank_contributes_its_own_slice() -> None:
    """Nothing is sent that was not asked for."""
    torch.manual_seed(dist.get_rank())
    net = nn.Linear(8, 8, bias=False)
    mine = net.weight.detach().clone()
    with count_collectives() as log:
        fully_shard(net)
    assert log.events == []
    start, end = net.weight._shard_spec.local_range
    assert_equal(net.weight.to_local(), mine.flatten()[start:end])


# --- what existed before ---


@pytest.mark.fast
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@distributed(2)
def test_optimizer_built_before_sharding_trains(kind: Any) -> None:
    """Its parameter groups hold the same objects, which are the shards now."""
    early = []

    def shard(model: nn.Module) -> None:
        early.append(kind(model.parameters(), lr=0.05))
        shard_blocks(model)

    twins = Twins(_BufferedNet, shard)
    optimizers = [kind(twins.plain.parameters(), lr=0.05), *early]
    for step in range(3):
        x = _net_input(step)
        twins.step(lambda model, x=x: model(x).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    twins.assert_equal_parameters()


@distributed(2)
def test_existing_gradients_are_carried_over() -> None:
    """A gradient made before sharding is sharded too, and accumulates."""

    def shard(model: nn.Module) -> None:
        _fill_gradients(model)
        shard_blocks(model)

    twins = Twins(_BufferedNet, shard)
    _fill_gradients(twins.plain)
    twins.assert_equal_gradients()
    twins.step(lambda model: model(_net_input()).square().mean())


def _fill_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.5)


# --- memory ---


class _LstmBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 5)
        self.blocks = nn.ModuleList([nn.LSTM(5, 5)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(self.inp(x))[0]
        return x


class _TiedThrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 15)
        self.blocks = nn.ModuleList([Layer(), Layer()])
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.last = nn.Linear(15, 7)
        self.last.weight = self.blocks[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class _CheckpointedBuffered(CheckpointsBlocks, _BufferedNet):
    """Its blocks are recomputed."""


class _FailingBuffered(_BufferedNet):
    is_failing = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.is_failing:
            raise KeyError("on purpose")
        return x


def _fail_in_forward(model: nn.Module) -> None:
    model.is_failing = True  # type: ignore[assignment]
    with pytest.raises(KeyError, match="on purpose"):
        model(_net_input())


def _leave_unsharded(model: nn.Module) -> None:
    unshard(model, recurse=True)
    model(_net_input()).sum().backward()


def _leave_unsynced(model: nn.Module) -> None:
    with no_sync(model):
        model(_net_input()).sum().backward()


def _leave_graph(model: nn.Module) -> None:
    output = model(_net_input())
    del output


def _evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(_net_input())


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise KeyError("on purpose")


class _FailingBackward(_BufferedNet):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(_FailsInBackward.apply(x) if block is self.blocks[0] else x)
        return self.out(x)


def _fail_backward(model: nn.Module) -> None:
    loss = model(_net_input()).sum()
    with pytest.raises(KeyError, match="on purpose"):
        loss.backward()


LIVES: dict[str, tuple[type[nn.Module], Callable[[nn.Module], None]]] = {
    "never used": (_BufferedNet, lambda model: None),
    "prepared": (_BufferedNet, lazy_init),
    "evaluated": (_BufferedNet, _evaluate),
    "trained": (_BufferedNet, _train_adamw),
    "forward only": (_BufferedNet, _leave_graph),
    "failed forward": (_FailingBuffered, _fail_in_forward),
    "failed backward": (_FailingBackward, _fail_backward),
    "held unsharded": (_BufferedNet, _leave_unsharded),
    "unsynced gradients": (_BufferedNet, _leave_unsynced),
    "LSTM": (_LstmBlocks, _train_adamw),
    "tied": (_TiedThrice, _train_adamw),
    "checkpointed": (_CheckpointedBuffered, _train_adamw),
}


@contextmanager
def _no_collector() -> Iterator[None]:
    # What the first step of a process imports leaves cycles behind that hold its callers' frames.
    param = nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    torch.optim.AdamW([param]).step()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("life", LIVES)
@distributed(2)
def test_deleted_model_is_freed_without_the_garbage_collector(life: str) -> None:
    """Reference counts alone free parameters, handles and every byte they held."""
    build, live = LIVES[life]
    with _no_collector():
        model = _make_sharded(build)
        live(model)
        references = [weakref.ref(thing) for thing in _things(model)]
        storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in _tensors(model)]
        del model
        alive = still_alive(references, storages)
    assert alive == []


def _things(model: nn.Module) -> list[Any]:
    states = get_states(model)
    assert states
    contexts = [state.context for state in states]
    return [*model.modules(), *model.parameters(), *states, *contexts, *get_handles(model)]


def _tensors(model: nn.Module) -> list[Tensor]:
    return [
        tensor for handle in get_handles(model) for tensor in (handle.local_shard, handle.unsharded)
    ] + [
        param.grad.to_local()
        for param in model.parameters()
        if isinstance(param.grad, FlatShard) and not isinstance(param.grad, PendingGradient)
    ]


@distributed(2)
def test_backward_works_after_the_model_was_deleted() -> None:
    """The graph keeps what it needs, and no more once it is gone."""
    with _no_collector():
        model = _make_sharded()
        lazy_init(model)
        params = list(model.parameters())
        handles = [weakref.ref(handle) for handle in get_handles(model)]
        loss = model(_net_input()).square().mean()
        del model
        loss.backward()
        assert all(isinstance(param.grad, FlatShard) for param in params)
        del loss
        assert all(handle() is None for handle in handles)


@pytest.mark.parametrize("build", [_BufferedNet, _LstmBlocks, _TiedThrice, _CheckpointedBuffered])
@distributed(2)
def test_forwards_without_gradients_grow_nothing(build: type[nn.Module]) -> None:
    """Neither bytes nor entries of any list of the engine, over 50 forwards."""
    model = _make_sharded(build)
    _train_adamw(model, 1)
    model.eval()
    with torch.no_grad():
        for step in range(3):
            model(_net_input(step))
        before = _count_items(model)
        with peak_bytes() as memory:
            for step in range(50):
                model(_net_input(step))
    assert memory.current == 0
    assert _count_items(model) == before


@distributed(2)
def test_forwards_whose_outputs_are_dropped_grow_nothing() -> None:
    """An evaluation that forgets `no_grad` costs its graph, and only while that lives."""
    model = _make_sharded()
    _train_adamw(model, 1)
    for step in range(3):
        model(_net_input(step))
    before = _count_items(model)
    for step in range(20):
        model(_net_input(step))
    assert _count_items(model) == before
    _train_adamw(model, 1)
    assert_at_rest(model)


def _count_items(model: nn.Module) -> dict[str, int]:
    """Return the length of every container of states, contexts, handles, entries and hooks."""
    things: list[Any] = [*get_states(model), *get_handles(model), *model.modules()]
    things += [state.context for state in get_states(model)]
    things += [handle.grads for handle in get_handles(model)]
    things += [entry for handle in get_handles(model) for entry in handle.entries]
    return {
        f"{index} {type(thing).__name__}.{name}": len(value)
        for index, thing in enumerate(things)
        for name, value in vars(thing).items()
        if isinstance(value, list | dict | set)
    }


# --- lazy_init ---


@distributed(2)
def test_lazy_init_is_idempotent() -> None:
    """S0.3: a second call touches no tensor and issues no collective; a forward neither."""
    net = _make_sharded()
    lazy_init(net)
    before = [_addresses(handle) for handle in get_handles(net)]
    unsharded = [id(e.unsharded) for handle in get_handles(net) for e in handle.entries]
    with count_collectives() as log, peak_bytes() as memory:
        lazy_init(net)
        lazy_init(net.blocks[0])
    assert (log.events, memory.allocated) == ([], 0)
    assert [_addresses(handle) for handle in get_handles(net)] == before
    assert unsharded == [id(e.unsharded) for handle in get_handles(net) for e in handle.entries]


def _addresses(handle: FlatParamHandle) -> list[int]:
    tensors = [handle.local_shard, *(entry.sharded.to_local() for entry in handle.entries)]
    return [tensor.data_ptr() for tensor in tensors]


@distributed(2)
def test_lazy_init_takes_one_small_collective() -> None:
    """The ranks compare a digest, not their parameters."""
    net = _make_sharded()
    with count_collectives() as log:
        lazy_init(net)
    assert [(event.kind, event.nbytes) for event in log.events] == [("all_gather", 64)]


@distributed(2)
def test_lazy_init_refuses_what_was_never_sharded() -> None:
    """S0.3: the text names the class."""
    with pytest.raises(ValueError, match="expected a module with sharded units") as caught:
        lazy_init(_BufferedNet())
    assert str(caught.value) == (
        "expected a module with sharded units, got _BufferedNet: call fully_shard on it or on "
        "modules inside it first"
    )


# --- unshard and reshard by hand ---


def _is_full(param: Tensor) -> bool:
    return isinstance(param, nn.Parameter) and not isinstance(param, FlatShard)


@pytest.mark.parametrize("is_async", [False, True])
@distributed(2)
def test_unshard_shows_full_plain_parameters(is_async: bool) -> None:
    """Between unshard and reshard the unit is as it was before sharding; then nothing is left."""
    reference = _BufferedNet()
    net = copy.deepcopy(reference)
    shard_blocks(net)
    before = list(net.parameters())
    work = unshard(net, recurse=True, async_op=is_async)
    assert (work is not None) is is_async
    if work is not None:
        work.wait()
    assert all(_is_full(param) for param in net.parameters())
    _assert_same_parameters(net, reference)
    reshard(net, recurse=True)
    assert all(param is other for param, other in zip(net.parameters(), before, strict=True))
    assert_at_rest(net)


@distributed(2)
def test_unshard_without_recurse_is_for_one_unit() -> None:
    """The units below stay sharded."""
    net = _make_sharded()
    unshard(net)
    assert _is_full(net.scale)
    assert _is_full(net.inp.weight)
    assert all(isinstance(param, FlatShard) for param in net.blocks.parameters())
    reshard(net)
    assert all(isinstance(param, FlatShard) for param in net.parameters())


@pytest.mark.parametrize("is_async", [False, True])
@distributed(2)
def test_forward_and_backward_of_an_unsharded_unit_gather_nothing(is_async: bool) -> None:
    """The parameters stay until reshard; a forward waits for the gather if nobody else did."""
    twins = Twins(_BufferedNet, shard_blocks)
    unshard(twins.sharded, recurse=True, async_op=is_async)
    losses = [model(_net_input()).square().mean() for model in twins]
    with count_collectives() as log:
        for model, loss in zip(twins, losses, strict=True):
            twins.backward(model, loss)
    assert log.count("all_gather") == 0
    assert all(_is_full(param) for param in twins.sharded.parameters())
    reshard(twins.sharded, recurse=True)
    assert_equal(losses[1].detach(), losses[0].detach())
    twins.assert_equal_gradients()
    assert_at_rest(twins.sharded)


@distributed(2)
def test_unshard_and_reshard_are_idempotent() -> None:
    """A second unshard gathers nothing; one reshard undoes both, a second does nothing."""
    net = _make_sharded()
    unshard(net, recurse=True)
    pointers = [handle.unsharded.data_ptr() for handle in get_handles(net)]
    with count_collectives() as log:
        unshard(net, recurse=True)
        unshard(net.blocks[0])
        reshard(net.blocks[0])
        unshard(net.blocks[0])
    assert log.count("all_gather") == 1
    assert get_handles(net)[0].unsharded.data_ptr() == pointers[0]
    for _ in range(2):
        reshard(net, recurse=True)
        assert not any(handle.full.has_values for handle in get_handles(net))


@distributed(2)
def test_unshard_of_an_outer_plain_module_reaches_the_units_below() -> None:
    """With recurse the module itself need not be sharded; without it that is an error."""
    outer = nn.Sequential(fully_shard(Layer()), nn.Sequential(fully_shard(Layer())))
    unshard(outer, recurse=True)
    assert all(_is_full(param) for param in outer.parameters())
    reshard(outer, recurse=True)
    assert all(isinstance(param, FlatShard) for param in outer.parameters())
    for call in (unshard, reshard):
        with pytest.raises(ValueError, match="expected a sharded module, got Sequential") as caught:
            call(outer)
        assert str(caught.value) == (
            "expected a sharded module, got Sequential. Call fully_shard on it first, or pass "
            "recurse=True for the units inside it."
        )


@distributed(2)
def test_unshard_after_an_optimizer_step_shows_the_new_values() -> None:
    """Gathered values are never older than the shards, kept units included."""
    net = _make_sharded(reshard_after_forward=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, foreach=True)
    net(_net_input()).square().mean().backward()
    optimizer.step()
    expected = [param.full_tensor() for param in net.parameters()]
    unshard(net, recurse=True)
    for param, full in zip(net.parameters(), expected, strict=True):
        assert_equal(param.detach(), full)
    reshard(net, recurse=True)


# --- handles ---


@distributed(2, 3)
def test_handle_has_what_debugging_needs(world_size: int) -> None:
    """S0.1: is_sharded, original shapes, local shard, padded unsharded buffer, gradient record."""
    net = fully_shard(_BufferedNet())
    (handle,) = get_handles(net)
    assert handle.is_sharded
    assert [entry.spec.shape for entry in handle.entries] == [p.shape for p in net.parameters()]
    assert handle.local_shard.shape == (handle.layout.shard_numel,)
    assert handle.unsharded.shape == (handle.layout.padded_numel,)
    assert not any(handle.grads.arrived)
    assert handle.requires_grad


@distributed(1)
def test_one_rank_alone_holds_nothing_twice() -> None:
    """S0.2: at world size 1 the unsharded buffer is the local shard, and nothing is sent."""
    reference = _BufferedNet()
    net = copy.deepcopy(reference)
    shard_blocks(net)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (net, reference)]
    with count_collectives() as log:
        for step in range(3):
            for model, optimizer in zip((net, reference), optimizers, strict=True):
                model(_net_input(step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert log.events == []
    for handle in get_handles(net):
        assert not handle.is_sharded
        assert handle.unsharded.data_ptr() == handle.local_shard.data_ptr()
    _assert_same_parameters(net, reference)


@distributed(1)
def test_forward_on_one_rank_allocates_no_parameters() -> None:
    """S0.2: gathering and freeing cost no byte at world size 1."""
    net = fully_shard(nn.Linear(64, 64))
    lazy_init(net)
    x = torch.ones(1, 64)
    with torch.no_grad(), peak_bytes() as memory:
        net(x)
    assert memory.peak == 64 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@distributed(2, 3)
def test_unsharded_buffer_is_resized_in_place(world_size: int, dtype: torch.dtype) -> None:
    """S0.4: world_size times the shard, freed at rest, the same storage when it comes back."""
    net = fully_shard(nn.Linear(5, 3, dtype=dtype))
    (handle,) = get_handles(net)
    buffer = handle.unsharded
    assert buffer.untyped_storage().size() == 0
    lazy_init(net)
    assert buffer.numel() == handle.local_shard.numel() * world_size
    assert (buffer.dtype, buffer.device.type) == (dtype, "cpu")
    assert buffer.untyped_storage().size() == 0
    unshard(net)
    assert handle.unsharded is buffer
    assert buffer.untyped_storage().size() == buffer.numel() * buffer.element_size()
    params = list(net.parameters())
    reshard(net)
    assert buffer.untyped_storage().size() == 0
    assert [param.numel() for param in params] == [15, 3]  # no view reaches into padding


@distributed(2)
def test_unit_has_one_handle_for_each_kind_of_parameter() -> None:
    """Frozen parameters and other dtypes get flat parameters of their own."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double(), nn.Linear(3, 3))
    net[2].requires_grad_(False)
    fully_shard(net)
    kinds = [(handle.local_shard.dtype, handle.requires_grad) for handle in get_handles(net)]
    assert kinds == [(torch.float32, True), (torch.float64, True), (torch.float32, False)]


def test_strategies_are_pinned() -> None:
    """ZeRO-3, ZeRO-2, ZeRO-1 and plain data parallelism."""
    names = [strategy.name for strategy in ShardingStrategy]
    assert names == ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIM", "NO_SHARD"]


@pytest.mark.fast
def test_ranks_that_build_different_models_all_get_the_same_error() -> None:
    """The first difference is named on every rank before anything can hang."""
    texts = run_ranks(3, _different_models)
    assert len(set(texts)) == 1
    assert texts[0] == (
        "the ranks of one mesh must shard the same model in the same way; the first "
        "difference is at parameter 2: ranks [0, 1]: 'down.weight' shape (15, 7) torch.float32 "
        "requires_grad=True in unit 'Layer' strategy=FULL_SHARD reshard_after_forward=None; "
        "ranks [2]: 'down.weight' shape (15, 8) torch.float32 requires_grad=True in unit 'Layer' "
        "strategy=FULL_SHARD reshard_after_forward=None. Build the model and call fully_shard "
        "alike on every rank."
    )


def _different_models() -> str:
    block = Layer()
    if dist.get_rank() == 2:
        block.down = nn.Linear(8, 15)
    fully_shard(block)
    with pytest.raises(RuntimeError) as caught:
        block(torch.ones(1, 15))
    return str(caught.value)


class _Quantised(nn.Linear):
    """Computes with int8 codes, as a frozen layer of a fine-tuned model."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.codes = nn.Parameter(torch.arange(-7, 8, dtype=torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x @ self.codes.view(3, 5).T.to(x.dtype)) * self.mask


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(2)
def test_frozen_parameters_of_integers(strategy: ShardingStrategy) -> None:
    """Gathered and shown like any other, and in state dicts; no dtype of a policy is theirs."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    twins = Twins(_Quantised, fully_shard, strategy=strategy)
    for step in range(2):
        twins.step(lambda model, step=step: model(rank_input(4, 5, step=step)).square().mean())
    model = fully_shard(_Quantised(), strategy=strategy, mp_policy=policy)
    assert model(torch.ones(2, 5)).dtype == torch.bfloat16
    assert [each.dtype for each in (model.codes, model.mask)] == [torch.int8, torch.bool]
    with unshard_params(model):
        model.codes.add_(1)
    assert_equal(model.codes.full_tensor(), twins.plain.codes + 1)
    state = get_model_state_dict(model)
    twins.sharded.load_state_dict(state)
    assert_equal(twins.sharded.codes.full_tensor(), twins.plain.codes + 1)
    assert twins.sharded.double().codes.dtype == torch.int8
