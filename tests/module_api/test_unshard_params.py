"""`unshard_params` in every combination of its flags, and what users do inside it."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import warnings
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from composable_shard import (
    FlatParamHandle,
    FlatShard,
    ShardingStrategy,
    fully_shard,
    get_handles,
    get_states,
    lazy_init,
    no_sync,
    register_flat_param,
    register_orig_params,
    reshard,
    unshard,
    unshard_params,
    writeback,
)
from composable_shard.comm.trace import CollectiveLog, count_collectives
from composable_shard.tensor import own_gradient
from tests.harness.assertions import assert_equal
from tests.harness.memory import peak_bytes
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs.models import (
    Layer,
    Net,
    add_one,
    assert_at_rest,
    rank_input,
    seeded,
    shard_blocks,
)

# What `fully_shard` can be told of what ranks keep; each row of the matrix runs under each.
STRATEGIES: list[dict[str, Any]] = [
    {"reshard_after_forward": None},
    {"reshard_after_forward": False},
]
KEEPING: list[dict[str, Any]] = [
    {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    {"strategy": ShardingStrategy.SHARD_OPTIM},
    {"strategy": ShardingStrategy.NO_SHARD},
]
FLAGS = ["writeback", "rank0_only", "offload_to_cpu", "with_grads", "recurse"]


class _Deep(nn.Module):
    """A unit of odd shapes, with an empty and a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(7, 3)
        self.back = nn.Linear(3, 7, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.back(torch.tanh(self.lin(x)))


class _Mid(nn.Module):
    """A unit around a unit: tied inside, of three dtypes, partly frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.second = nn.Linear(7, 7)
        self.second.weight = self.first.weight
        self.low = nn.Parameter(torch.randn(3, 7, dtype=torch.bfloat16))
        self.high = nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(7, 2), requires_grad=False)
        self.deep = _Deep()

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        x = x * self.high.float() + self.low.float().sum(0)
        return self.deep(x) + self.frozen.sum()


class _NestedUnits(nn.Module):
    """The root: shares a weight with the unit inside, and has a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.inp.bias.requires_grad_(False)
        self.mid = _Mid()
        self.out = nn.Linear(7, 7)
        self.out.weight = self.mid.first.weight
        self.unused = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mid(self.inp(x)))


def _make_nested_units(*, use_orig_params: bool = True, **options: Any) -> _NestedUnits:
    torch.manual_seed(0)
    model = _NestedUnits()
    options["use_orig_params"] = use_orig_params
    for module in (model.mid.deep, model.mid, model):
        fully_shard(module, **options)
    return model


def _x() -> Tensor:
    return torch.linspace(-1, 1, 20).view(4, 5)


def _prepare(model: nn.Module) -> None:
    """Give the model gradients, and leave behind what a forward leaves behind."""
    model(_x()).square().mean().backward()
    with torch.no_grad():
        model(_x())


Values = dict[str, tuple[Tensor, Tensor | None]]


def _read_shards(model: nn.Module) -> Values:
    """Return full parameters and gradients by name, read without any scope."""
    register_orig_params(model)
    values: Values = {}
    for name, param in model.named_parameters():
        assert isinstance(param, FlatShard), name
        grad = param.grad
        assert grad is None or isinstance(grad, FlatShard), name
        values[name] = param.full_tensor(), None if grad is None else grad.full_tensor()
    return values


@functools.cache
def _expected() -> Values:
    model = _make_nested_units()
    _prepare(model)
    return _read_shards(model)


def _snapshot_of_scope(model: nn.Module) -> list[Any]:
    """Return all that a scope must leave as it was."""
    names = [(name, id(param)) for name, param in model.named_parameters()]
    states = [
        (s.name, s.training_state, s.depth, s.is_held, s.is_in_pass) for s in get_states(model)
    ]
    handles = [
        (
            handle.unsharded.untyped_storage().size(),
            handle.local_shard.untyped_storage().data_ptr(),
            handle.grads._memory.buffer.untyped_storage().size(),
            handle.shown.is_unsharded,
            handle.shown.form.has_names,
            handle.shown.scope is not None,
            bool(handle.guard.refusal),
            len(handle.full.readers.claims),
        )
        for handle in get_handles(model)
    ]
    return [names, states, handles]


def _shown_names(model: nn.Module, recurse: bool) -> set[str]:
    states = get_states(model) if recurse else get_states(model)[:1]
    return {
        str(e.label) for state in states for handle in state.needed_handles for e in handle.entries
    }


def _check_inside(model: nn.Module, flags: dict[str, bool]) -> None:
    """Compare everything that the scope shows, then edit it."""
    expected, shown = _expected(), _shown_names(model, flags["recurse"])
    named = dict(model.named_parameters())
    if flags["recurse"]:
        assert list(named) == list(expected)
    for name in shown:
        param, (value, grad) = named[name], expected[name]
        assert type(param) is nn.Parameter, name
        assert_equal(param.detach(), value, name)
        assert param.requires_grad == ("frozen" not in name and name != "inp.bias"), name
        if grad is not None and not flags["with_grads"]:
            with pytest.raises(RuntimeError, match="is not shown while its full value is"):
                param.grad.norm()
        elif grad is not None:
            assert_equal(param.grad, grad, f"gradient of {name}")
        _assert_own_memory(model, param, with_grad=flags["with_grads"])
    assert model.out.weight is model.mid.second.weight is model.mid.first.weight
    for name in set(named) - shown:
        assert isinstance(named[name], FlatShard), name
    for name in shown:
        with torch.no_grad():
            named[name].add_(1)
            if flags["with_grads"] and named[name].grad is not None:
                named[name].grad.mul_(2)


def _assert_own_memory(model: nn.Module, param: Tensor, *, with_grad: bool) -> None:
    """Assert that a parameter, and a gradient that is shown, share no memory with a handle."""
    buffers = [b for h in get_handles(model) for b in (h.local_shard, h.unsharded)]
    pointers = {
        buffer.untyped_storage().data_ptr() for buffer in buffers if buffer.untyped_storage().size()
    } - {0}
    for tensor in (param, param.grad if with_grad else None):
        assert tensor is None or tensor.untyped_storage().data_ptr() not in pointers


def _check_outside(model: nn.Module, flags: dict[str, bool], shown: set[str]) -> None:
    """Assert that the edits of the body were kept, or discarded, and nothing else changed."""
    register_orig_params(model)
    for name, param in model.named_parameters():
        value, grad = _expected()[name]
        is_kept = flags["writeback"] and name in shown
        _assert_is_slice(param, value + 1 if is_kept else value, name)
        assert (param.grad is None) == (grad is None), name
        if grad is not None and param.grad is not None:
            is_doubled = is_kept and flags["with_grads"]
            _assert_is_slice(param.grad, grad * 2 if is_doubled else grad, name)


def _assert_is_slice(shard: Tensor, full: Tensor, name: str) -> None:
    """Assert that this rank's part of a tensor is right; no communication."""
    assert isinstance(shard, FlatShard), name
    assert_equal(shard.to_local(), FlatShard.from_full(full, shard._shard_spec).to_local(), name)


def _gathered(model: nn.Module, flags: dict[str, bool]) -> tuple[list[FlatParamHandle], ...]:
    """Return the handles whose values, and whose gradients, the scope has to gather."""
    states = get_states(model) if flags["recurse"] else get_states(model)[:1]
    handles = list(dict.fromkeys(handle for state in states for handle in state.needed_handles))
    with_grad = {name for name, (_, grad) in _expected().items() if grad is not None}
    have_grads = [h for h in handles if with_grad & {str(e.label) for e in h.entries}]
    if dist.get_world_size() == 1:
        return [], [], []
    if not handles[0].is_sharded:
        return handles, [], have_grads if flags["with_grads"] else []
    to_gather = [handle for handle in handles if not handle.full.is_current]
    return handles, to_gather, have_grads if flags["with_grads"] else []


def _nbytes(handles: list[FlatParamHandle]) -> int:
    return sum(handle.unsharded.nbytes for handle in handles)


def _check_collectives(
    log: CollectiveLog, flags: dict[str, bool], handles: tuple[list[FlatParamHandle], ...]
) -> None:
    """Compare with what the docstring of `unshard_params` promises, to the byte."""
    shown, gathered, grads = handles
    is_sharded = all(handle.is_sharded for handle in shown)
    expected: dict[str, tuple[int, int]] = {}
    if is_sharded:
        expected["all_gather"] = len(gathered + grads), _nbytes(gathered + grads)
    if flags["rank0_only"] and flags["writeback"]:
        expected["broadcast"] = len(shown + grads), _nbytes(shown + grads)
    num_entries = sum(len(handle.entries) for handle in shown) if flags["with_grads"] else 0
    num_small = (flags["with_grads"] + flags["writeback"]) if shown else 0
    flag_nbytes = dist.get_world_size() + num_entries if flags["writeback"] else 0
    small_nbytes = 2 * num_entries + flag_nbytes if shown else 0
    expected["all_reduce"] = num_small, small_nbytes
    for name in ("all_gather", "broadcast", "all_reduce"):
        assert (log.count(name), log.nbytes(name)) == expected.get(name, (0, 0)), name
    assert len(log.events) == sum(count for count, _ in expected.values())


def _run_row(flags: dict[str, bool], strategy: dict[str, Any], use_orig_params: bool) -> None:
    model = _make_nested_units(use_orig_params=use_orig_params, **strategy)
    _prepare(model)
    has_values = not flags["rank0_only"] or dist.get_rank() == 0
    handles, shown = _gathered(model, flags), _shown_names(model, flags["recurse"])
    before = _snapshot_of_scope(model)
    with (
        count_collectives() as log,
        unshard_params(model, **flags),
    ):
        if not has_values:
            _check_sharded(model)
        else:
            if flags["recurse"]:
                _check_forward(model)
            _check_inside(model, flags)
    _check_collectives(log, flags, handles)
    assert _snapshot_of_scope(model) == before
    _check_outside(model, flags, shown)


def _check_forward(model: nn.Module) -> None:
    """Assert that a forward of the whole model takes no collective, and is right."""
    torch.manual_seed(0)
    plain = _NestedUnits()
    with torch.no_grad(), count_collectives() as log:
        assert_equal(model(_x()), plain(_x()))
    assert not log.events


def _check_sharded(model: nn.Module) -> None:
    """Assert that this rank, which gets no full values, shows shards."""
    for name, param in model.named_parameters():
        assert isinstance(param, FlatShard), name
    assert all(
        h.unsharded.untyped_storage().size() in (0, h.unsharded.nbytes) for h in get_handles(model)
    )


def _flag_rows(**others: Any) -> Any:
    """Return rows with each combination of flags: three meet the other two, and `others`."""
    first, last = (list(itertools.product([False, True], repeat=num)) for num in (3, 2))
    names, rows = pairwise(first=first, last=last, use_orig_params=[True, False], **others)
    return names, list(rows)  # each is a claim


@pytest.mark.parametrize(*_flag_rows(strategy=STRATEGIES, world_size=(1, 2, 3)))
@distributed(on_device=True)
def test_every_combination_of_flags(
    first: tuple[bool, ...],
    last: tuple[bool, ...],
    strategy: dict[str, Any],
    use_orig_params: bool,
) -> None:
    """S1.4, S1.9: values, gradients, names, collectives inside; all as before outside."""
    _run_row(dict(zip(FLAGS, first + last, strict=True)), strategy, use_orig_params)


@pytest.mark.parametrize(*_flag_rows(strategy=KEEPING))
@distributed(2)
def test_every_combination_of_flags_where_parameters_are_kept(
    first: tuple[bool, ...],
    last: tuple[bool, ...],
    strategy: dict[str, Any],
    use_orig_params: bool,
) -> None:
    """S1.1, S1.4: the same under the strategies that keep full parameters, NO_SHARD included."""
    _run_row(dict(zip(FLAGS, first + last, strict=True)), strategy, use_orig_params)


@pytest.mark.parametrize("strategy", ShardingStrategy)
@distributed(4)
def test_first_rank_of_a_mesh_with_copies_reaches_all_ranks(strategy: ShardingStrategy) -> None:
    """S1.4: only rank 0 has full values; its edits are sent to all others."""
    mesh = init_device_mesh("cpu", (2, 2))
    _expected()  # by all ranks together, not by one inside the scope
    for with_grads, offload_to_cpu in itertools.product([False, True], repeat=2):
        model = _make_nested_units(strategy=strategy, mesh=mesh)
        _prepare(model)
        flags = {"with_grads": with_grads, "recurse": True, "writeback": True}
        with unshard_params(
            model, rank0_only=True, offload_to_cpu=offload_to_cpu, with_grads=with_grads
        ):
            if dist.get_rank() == 0:
                _check_inside(model, flags)
            else:
                _check_sharded(model)
        _check_outside(model, flags, _shown_names(model, recurse=True))


@distributed(4)
def test_body_that_fails_stops_the_ranks_that_hold_copies() -> None:
    """S1.9: a failure in one row of the mesh is known in the other; nothing is written."""
    model = _make_nested_units(mesh=init_device_mesh("cpu", (2, 2)))
    _prepare(model)
    expected = ValueError if dist.get_rank() == 3 else RuntimeError
    text = "mine" if dist.get_rank() == 3 else r"failed on ranks \[3\]"
    with pytest.raises(expected, match=text), unshard_params(model):
        _add_one_and_fail_on(model, rank=3)
    flags = {"writeback": False, "with_grads": False}
    _check_outside(model, flags, _shown_names(model, recurse=True))


def _add_one_and_fail_on(model: nn.Module, rank: int) -> None:
    add_one(model)
    if dist.get_rank() == rank:
        raise ValueError("mine")


# --- collectives ---


@distributed(2, 3)
def test_what_is_unsharded_already_is_not_gathered() -> None:
    """S1.5: by hand, or kept by a forward; its buffer stays as it was."""
    model = _make_net()
    unshard(model.blocks[1])
    sizes = [handle.unsharded.untyped_storage().size() for handle in get_handles(model)]
    assert [size > 0 for size in sizes] == [False, False, True, False]
    with count_collectives() as log, unshard_params(model, writeback=False):
        assert_equal(model.blocks[1].up.weight.detach(), _plain_net().blocks[1].up.weight.detach())
    assert log.count("all_gather") == len(log.events) == 3
    assert [h.unsharded.untyped_storage().size() for h in get_handles(model)] == sizes
    assert type(model.blocks[1].up.weight) is not FlatShard
    reshard(model.blocks[1])
    assert_at_rest(model)


@distributed(2, 3)
def test_a_forward_after_the_scope_gathers_what_was_written() -> None:
    """S1.1: the next forward computes with the edits, kept full values or not."""
    for strategy in STRATEGIES:
        model = _make_net(**strategy)
        with torch.no_grad():
            model(rank_input(4, 5))
        with unshard_params(model):
            add_one(model)
        plain = _plain_net()
        add_one(plain)
        with torch.no_grad():
            assert_equal(model(rank_input(4, 5)), plain(rank_input(4, 5)))


def _make_net(**options: Any) -> Net:
    torch.manual_seed(0)
    model = Net()
    shard_blocks(model, **options)
    return model


def _plain_net() -> Net:
    torch.manual_seed(0)
    return Net()


def _assert_values(model: nn.Module, expected: nn.Module) -> None:
    named = dict(expected.named_parameters())
    for name, param in model.named_parameters():
        _assert_is_slice(param, named[name].detach(), name)


@distributed(2, 3)
def test_padding_is_not_written_back() -> None:
    """S1.1: what a body leaves in the padding never reaches a shard."""
    model = _make_net()
    before = [handle.local_shard.clone() for handle in get_handles(model)]
    with unshard_params(model, with_grads=True):
        for handle in get_handles(model):
            assert handle.shown.scope is not None
            assert handle.shown.scope.full is not None
            for start, end in handle.layout.padding_ranges():
                handle.shown.scope.full.buffer[start:end] = float("nan")
    for handle, shard in zip(get_handles(model), before, strict=True):
        assert_equal(handle.local_shard, shard)


# --- memory ---

DIM = 64


def _make_stack() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(DIM, 4 * DIM) for _ in range(4)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    with torch.no_grad():
        model(torch.ones(1, DIM))  # what a first call allocates is not the scope's
    return model


def _peak_of_scope(model: nn.Module, **flags: bool) -> int:
    peaks = []
    for _ in range(3):
        with peak_bytes() as memory, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with unshard_params(model, **flags):
                pass
        assert memory.current <= 4096
        peaks.append(memory.peak)
    return min(peaks)  # gloo's threads free late, by chance


@distributed(2, 3)
def test_a_scope_holds_the_full_values_once() -> None:
    """P, and not a byte more that grows with the model, with writeback too."""
    model = _make_stack()
    total = _nbytes(get_handles(model))
    for flag in (False, True):
        assert total <= _peak_of_scope(model, writeback=flag) <= total + 4096


@distributed(2, 3)
def test_offloading_holds_one_unit_beside_the_host_copies() -> None:
    """On CPU the host copies count as well: P, and at most one unit on its way."""
    model = _make_stack()
    total, unit = _nbytes(get_handles(model)), get_handles(model)[0].unsharded.nbytes
    assert total <= _peak_of_scope(model, offload_to_cpu=True) <= total + unit + 4096
    with warnings.catch_warnings(), unshard_params(model, offload_to_cpu=True, writeback=False):
        for param in model.parameters():
            _assert_own_memory(model, param, with_grad=False)
        assert all(h.unsharded.untyped_storage().size() == 0 for h in get_handles(model))


@distributed(2, 3)
def test_other_ranks_hold_one_unit_at_a_time() -> None:
    """S1.5: rank0_only frees what they gather at once, gradients and the write-back included."""
    model = _make_stack()
    model(torch.ones(1, DIM)).sum().backward()
    total, unit = _nbytes(get_handles(model)), get_handles(model)[0].unsharded.nbytes
    peak = _peak_of_scope(model, rank0_only=True, with_grads=True)
    if dist.get_rank() == 0:
        assert peak >= 2 * total
    else:
        # With one shard of gradients.
        assert peak <= unit + unit // dist.get_world_size() + 4096


@pytest.mark.fast
@pytest.mark.usefixtures("four_ranks")
def test_a_write_beside_a_gather_is_gathered_again() -> None:
    """A step between `unshard(async_op=True)` and its `wait()`."""
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model)
    work = unshard(model, async_op=True)
    assert work is not None
    with torch.no_grad():
        model.weight.fill_(2.0)
    work.wait()
    assert_equal(model.weight.detach(), torch.full((4, 4), 2.0))
    reshard(model)


# --- ordinary code inside ---


@distributed(1, 2, 3)
def test_state_dict_taken_inside_stays_readable() -> None:
    """Full tensors under the plain names, after the scope too, and after the model has moved on."""
    model = _make_net()
    with unshard_params(model, writeback=False):
        state_dict = model.state_dict()
        view = model.out.weight.t()
    with unshard_params(model):
        add_one(model)
    expected = _plain_net().state_dict()
    assert list(state_dict) == list(expected)
    for name, value in expected.items():
        assert type(state_dict[name]) is Tensor
        assert_equal(state_dict[name], value, name)
    assert_equal(view.detach(), expected["out.weight"].t())


def _load_doubled(model: nn.Module) -> None:
    values = _plain_net().state_dict()
    model.load_state_dict({name: value.double() * 2 for name, value in values.items()})


def _init(model: nn.Module) -> None:
    torch.manual_seed(3)
    for name, param in model.named_parameters():
        if name.endswith("weight"):
            nn.init.kaiming_normal_(param)
        else:
            nn.init.constant_(param, 0.5)


def _reset_linear_layers(model: nn.Module) -> None:
    torch.manual_seed(4)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()


def _svd(model: nn.Module) -> None:
    u, s, vh = torch.linalg.svd(model.out.weight.detach(), full_matrices=False)
    with torch.no_grad():
        model.out.weight.copy_(u[:, :1] @ torch.diag(s[:1]) @ vh[:1])


def _set_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data * 2
    weight = model.blocks[0].up.weight
    weight.data = weight.data.flip(0).t().contiguous().t()  # another stride


def _restride(model: nn.Module) -> None:
    for param in model.parameters():
        if param.ndim == 2:
            param.data = param.data.view(param.shape[::-1]).t()  # other values, the same memory


def _set_from_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 3, model.parameters())


def _index(model: nn.Module) -> None:
    with torch.no_grad():
        model.inp.weight[2, 1:] = 7.0
        torch._foreach_mul_(list(model.blocks.parameters()), 2.0)


_EDITS = [
    _load_doubled,
    _init,
    _reset_linear_layers,
    _svd,
    _set_data,
    _restride,
    _set_from_vector,
    _index,
]


@pytest.mark.parametrize(
    *pairwise(use_orig_params=[True, False], edit=_EDITS, world_size=(1, 2, 3))
)
@distributed(on_device=True)
def test_ordinary_code_does_what_it_does_to_a_plain_model(edit: Any, use_orig_params: bool) -> None:
    """Loading, initialising, surgery, assignment: the shards hold the result, bitwise."""
    plain = _plain_net()
    edit(plain)
    for flags in ({}, {"offload_to_cpu": True, "rank0_only": True}):
        model = _make_net(use_orig_params=use_orig_params)
        with unshard_params(model, **flags):
            if not flags or dist.get_rank() == 0:
                edit(model)
        register_orig_params(model)
        _assert_values(model, plain)
        assert_at_rest(model)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@distributed(2, 3)
def test_generating_takes_no_communication(context: Any) -> None:
    """Each rank feeds outputs back for as long as it likes."""
    model, plain = _make_net(), _plain_net()
    lazy_init(model)
    with count_collectives() as log, unshard_params(model, writeback=False):
        num_gathers = len(log.events)
        for module in (model, plain):
            torch.manual_seed(dist.get_rank())
            x = torch.randn(1, 5)
            with context():
                for _ in range(3 + dist.get_rank()):
                    x = module(x).repeat(1, 2)[:, :5]
            module.result = x
        assert_equal(model.result.clone(), plain.result.clone())
    assert len(log.events) == num_gathers == 4


@pytest.mark.parametrize("is_pending", [False, True])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(1, 2)
def test_zero_grad_inside_drops_gradients(use_orig_params: bool, is_pending: bool) -> None:
    """Those that a scope doesn't show, and those that wait for a reduction: the next are right."""
    plain = Net()
    models = [copy.deepcopy(plain) for _ in range(2)]
    for model in models:
        shard_blocks(model, use_orig_params=use_orig_params)
        with no_sync(model) if is_pending else nullcontext():
            model(rank_input(4, 5)).square().mean().backward()
    with unshard_params(models[0]):
        models[0].zero_grad()
    models[1].zero_grad()
    for model in models:
        model(rank_input(4, 5, step=1)).square().mean().backward()
    for param, other in zip(*(model.parameters() for model in models), strict=True):
        assert (param.grad is None) == (other.grad is None)
        if param.grad is not None and other.grad is not None:
            assert_equal(param.grad.to_local(), other.grad.to_local())


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(1, 2)
def test_parameters_and_buffers_of_a_meta_model_are_initialised_inside(
    use_orig_params: bool,
) -> None:
    """`reset_parameters()` sees full shapes; buffers are checked at the first forward only."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    fully_shard(model[0], use_orig_params=use_orig_params)
    fully_shard(model, use_orig_params=use_orig_params)
    with pytest.raises(RuntimeError, match="on the meta device"), unshard_params(model):
        pass
    model.to_empty(device="cpu")
    plain = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    for module in (plain, model):
        torch.manual_seed(7)
        with nullcontext() if module is plain else unshard_params(module):
            for child in module:
                child.reset_parameters()
    assert_equal(model(_x()).detach(), plain(_x()).detach())


# --- shapes and kinds of parameters ---


class _OddAndRecurrent(nn.Module):
    """Complex, 0-d, empty, transposed and channels-last parameters, and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(4, 0))
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        conv = nn.Conv2d(3, 5, 3)
        self.conv = conv.to(memory_format=torch.channels_last)
        self.lstm = nn.LSTM(5, 7, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].sum() * self.scalar + self.phase.abs().sum() + self.turned.sum()


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(1, 2, 3)
def test_odd_parameters_are_shown_and_written(use_orig_params: bool) -> None:
    """S1.3: under their own names, shapes and strides; an LSTM reads the shown ones."""
    torch.manual_seed(0)
    plain = _OddAndRecurrent()
    model = copy.deepcopy(plain)
    fully_shard(model.lstm, use_orig_params=use_orig_params)
    fully_shard(model, use_orig_params=use_orig_params)
    model(_x()).backward()
    plain(_x()).backward()
    named = dict(plain.named_parameters())
    with unshard_params(model, with_grads=True):
        for name, param in model.named_parameters():
            assert_equal(param.detach(), named[name].detach(), name)
            assert param.stride() == named[name].stride(), name
            assert (param.grad is None) == (named[name].grad is None), name
        for module in (plain, model):
            with torch.no_grad():
                for param in module.parameters():
                    param.mul_(2)
        with torch.no_grad():
            assert_equal(model(_x()), plain(_x()))
    register_orig_params(model)
    _assert_values(model, plain)


@distributed(1, 2)
def test_a_unit_of_several_modules_is_shown_whole() -> None:
    """Its modules have one state and one handle."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 3))
    plain = copy.deepcopy(model)
    fully_shard([model[0], model[2]])
    fully_shard(model)
    with unshard_params(model[2], recurse=False):
        assert [type(p) is nn.Parameter for p in model.parameters()] == [True, True] + [
            False
        ] * 2 + [True] * 2
        for module in (model, plain):
            add_one(nn.ModuleList([module[0], module[2]]))
    _assert_values(model, plain)


@distributed(2)
def test_tensor_parallel_parameters_are_shown_as_dtensors() -> None:
    """On each rank of the mesh its part; forwards, edits and kept parameters as for plain ones."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    model(torch.ones(2, 6)).sum().backward()
    plain(torch.ones(2, 6)).sum().backward()
    with unshard_params(model, with_grads=True):
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(param, DTensor)
            assert isinstance(param, nn.Parameter)
            assert_equal(param.detach().full_tensor(), expected.detach())
            # Half a matrix: some CPUs add up in another order there.
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
            with torch.no_grad():
                param.mul_(2)
        kept, state_dict = model[0].weight, model.state_dict()
    assert repr(kept) == "<parameter '0.weight' of an ended unshard_params scope>"
    with pytest.raises(RuntimeError, match=r"parameter '0.weight' was kept beyond"):
        kept.full_tensor()
    assert_equal(state_dict["0.weight"].full_tensor(), 2 * plain[0].weight.detach())
    assert_equal(model[0].weight.full_tensor(), 2 * plain[0].weight.detach())


# --- which units ---


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
@distributed(2)
def test_recurse_shows_all_units_below_a_module_that_is_none(order: list[int]) -> None:
    """S1.7: several disjoint roots, whatever the order in which they were made."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(3)))
    plain = copy.deepcopy(model)
    for index in order:
        fully_shard(model[index])
    before = _snapshot_of_scope(model)
    with unshard_params(model):
        assert [name for name, _ in model.named_parameters()] == [
            name for name, _ in plain.named_parameters()
        ]
        for module in (model, plain):
            add_one(module)
    assert _snapshot_of_scope(model) == before
    _assert_values(model, plain)
    message = "expected a sharded module, got Sequential. Call fully_shard on it first, or pass"
    with pytest.raises(ValueError, match=message), unshard_params(model, recurse=False):
        pass


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(2)
def test_a_partly_sharded_model_opens_what_is_sharded(use_orig_params: bool) -> None:
    """The rest is as it was; the next step has the edits of both."""
    plain, model = seeded(Net), seeded(Net)
    units = (model.blocks[1], model.blocks[2].up)
    rest = {*model.parameters()} - {param for unit in units for param in unit.parameters()}
    for unit in units:
        fully_shard(unit, use_orig_params=use_orig_params, ignored_params=rest)
    before = _snapshot_of_scope(model)
    with unshard_params(model):
        names = [name for name, _ in plain.named_parameters()]
        assert [name for name, _ in model.named_parameters()] == names
        for each in (model, plain):
            add_one(each)
    assert _snapshot_of_scope(model) == before
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(torch.ones(4, 5)).square().mean().backward()  # the same on both ranks
        optimizer.step()
        optimizer.zero_grad()
    with unshard_params(model, writeback=False):
        for (name, param), expected in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            assert_equal(param.detach(), expected.detach(), name)


@distributed(2)
def test_scopes_of_disjoint_units_nest() -> None:
    """S1.6: each shows its own units, and writes when it ends; what is outside trains."""
    model, plain = _make_net(), _plain_net()
    first, second, third = model.blocks
    with unshard_params(first):
        with unshard_params(second, rank0_only=True):
            if dist.get_rank() == 0:
                add_one(second)
        _assert_values(second, _with_ones(plain.blocks[1]))
        add_one(first)
        third(rank_input(2, 15)).sum().backward()
        assert type(first.up.weight) is nn.Parameter
    _assert_values(first, _with_ones(plain.blocks[0]))
    assert all(param.grad is not None for param in third.parameters())
    assert_at_rest(model)


def _with_ones(module: nn.Module) -> nn.Module:
    add_one(module)
    return module


@distributed(2)
def test_a_shared_handle_is_shown_whole_through_the_unit_that_borrows() -> None:
    """S1.5: once, and its owner can be neither shown again nor unsharded meanwhile."""
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    model[1].weight = model[0].weight
    for module in (*model, model):
        fully_shard(module)
    with count_collectives() as log, unshard_params(model[1], recurse=False):
        assert model[0].weight is model[1].weight
        assert type(model[0].bias) is nn.Parameter
        with pytest.raises(RuntimeError, match="unit '0' shows its full parameters inside"):
            unshard(model[0])
        with (
            pytest.raises(RuntimeError, match="unit '0' is shown by an unshard_params scope"),
            unshard_params(model[0]),
        ):
            pass
        add_one(model[0])
    assert log.count("all_gather") == 3  # two handles, one comparison of the ranks
    assert_at_rest(model)


# --- between forward and backward ---


@pytest.mark.parametrize("strategy", STRATEGIES + KEEPING, ids=str)
@distributed(1, 2, 3, on_device=True)
def test_a_scope_between_forward_and_backward_changes_no_gradient(
    strategy: dict[str, Any],
) -> None:
    """Bitwise, though the body edits what it is shown."""
    _check_scope_before_backward(**strategy)


@distributed(4)
def test_a_scope_after_resharding_to_a_smaller_group_changes_no_gradient() -> None:
    """The part that is kept for the backward stays as it was."""
    _check_scope_before_backward(reshard_after_forward=2)


def _check_scope_before_backward(**strategy: Any) -> None:
    models = [_make_net(**strategy) for _ in range(2)]
    losses = [model(rank_input(4, 5)).square().mean() for model in models]
    with unshard_params(models[0], writeback=False, with_grads=True):
        add_one(models[0])
    for loss in losses:
        loss.backward()
    for param, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert_equal(param.grad.to_local(), expected.grad.to_local())


@pytest.mark.parametrize("strategy", STRATEGIES + KEEPING, ids=str)
@distributed(1, 2)
def test_writing_back_between_forward_and_backward_is_refused_by_backward(
    strategy: dict[str, Any],
) -> None:
    """The gradients would be those of other weights; the next step is right."""
    model = _make_net(**strategy)
    loss = model(rank_input(4, 5)).square().mean()
    with unshard_params(model):
        add_one(model)
    with pytest.raises(RuntimeError, match="were written between a forward and its backward"):
        loss.backward()
    plain = _plain_net()
    add_one(plain)
    losses = [module(rank_input(4, 5)).square().mean() for module in (model, plain)]
    losses[0].backward()
    assert_equal(losses[0].detach(), losses[1].detach())


@distributed(2)
def test_scopes_on_a_tree_of_mixed_strategies() -> None:
    """Edits reach every unit, and the training that follows is that of the edited plain model."""
    kinds = [kind["strategy"] for kind in KEEPING]
    torch.manual_seed(0)
    model, plain = Net(), _plain_net()
    for block, strategy in zip(model.blocks, kinds, strict=True):
        fully_shard(block, strategy=strategy)
    fully_shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(3):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            each(torch.ones(4, 5) * step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with unshard_params(model if step else model.blocks[0]):
            add_one(model if step else model.blocks[0])
        add_one(plain if step else plain.blocks[0])
        _assert_values(model, plain)


# --- by hand ---


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(1, 2, 3)
def test_writeback_by_hand_keeps_edits_without_communication(use_orig_params: bool) -> None:
    """unshard, edit, writeback, reshard: nobody warns, and the shards hold the edits."""
    model, plain = _make_net(use_orig_params=use_orig_params), _plain_net()
    model(rank_input(4, 5)).sum().backward()
    register_orig_params(model)
    grads = [param.grad.to_local().clone() for param in model.parameters()]
    if not use_orig_params:
        register_flat_param(model)
    unshard(model, recurse=True)
    for module in (model, plain):
        add_one(module)
    for handle in get_handles(model):
        for param, entry in [(entry.unsharded, entry) for entry in handle.entries]:
            assert own_gradient(param) is None
            param.grad = torch.full(entry.spec.shape, 3.0)
    with count_collectives() as log:
        writeback(model, recurse=True, with_grads=True)
        reshard(model, recurse=True)
    assert not log.events
    register_orig_params(model)
    _assert_values(model, plain)
    for param, before in zip(model.parameters(), grads, strict=True):
        assert_equal(param.grad.to_local(), torch.full_like(before, 3.0))
    assert_at_rest(model)


@distributed(2)
def test_writeback_by_hand_sets_no_gradient_where_there_is_none() -> None:
    """S1.1: gradients are written only if a sharded gradient exists."""
    model = _make_net()
    unshard(model)
    model.out.weight.grad = torch.ones(3, 15)
    writeback(model, with_grads=True)
    reshard(model)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("is_first", [True, False])
@distributed(2)
def test_a_scope_inside_unshard_and_reshard(is_first: bool) -> None:
    """Edits made before it, and in it, are kept by it; what is held is gathered anew."""
    model = _make_net()
    work = unshard(model, recurse=True, async_op=True)
    if is_first:
        work.wait()
        with torch.no_grad():
            model.out.bias.add_(1)
    with unshard_params(model), torch.no_grad():
        model.out.weight.zero_()
    work.wait()
    plain = _plain_net()
    with torch.no_grad():
        plain.out.weight.zero_()
        plain.out.bias.add_(int(is_first))
    assert_equal(model.out.weight.detach(), torch.zeros(3, 15))
    reshard(model, recurse=True)
    _assert_values(model, plain)
    assert_at_rest(model)


# --- how a scope can be written ---


@distributed(2)
def test_a_scope_works_as_a_decorator_and_on_an_exit_stack() -> None:
    """A new scope for each call."""
    model, plain = _make_net(), _plain_net()

    @unshard_params(model)
    def edit() -> None:
        add_one(model)

    for _ in range(2):
        edit()
        add_one(plain)
    with ExitStack() as stack:
        for block in model.blocks:
            stack.enter_context(unshard_params(block))
        add_one(model.blocks)
    add_one(plain.blocks)
    _assert_values(model, plain)


@distributed(2)
def test_a_scope_in_inference_mode_writes_ordinary_tensors() -> None:
    """Training goes on after it."""
    model, plain = _make_net(), _plain_net()
    with torch.inference_mode(), unshard_params(model):
        assert not model.out.weight.is_inference()
        for param in model.parameters():
            param.add_(1)
    add_one(plain)
    _assert_values(model, plain)
    model(rank_input(4, 5)).sum().backward()
    assert_at_rest(model)


@pytest.mark.parametrize("flags", [{}, {"writeback": False}, {"rank0_only": True}])
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(1, 2)
def test_freezing_inside_counts_as_outside(flags: dict[str, bool], use_orig_params: bool) -> None:
    """On all ranks, those that show shards too; frozen parameters get no gradient."""
    model = _make_net(use_orig_params=use_orig_params)
    with unshard_params(model, **flags):
        model.blocks[1].requires_grad_(False)
    assert not any(param.requires_grad for param in model.blocks[1].parameters())
    model(rank_input(4, 5)).sum().backward()
    assert all(param.grad is None for param in model.blocks[1].parameters())
    assert all(param.grad is not None for param in model.blocks[0].parameters())
    with unshard_params(model, **flags):
        model.blocks[1].requires_grad_(True)
    assert all(param.requires_grad for param in model.blocks[1].parameters())


@distributed(2)
def test_replacing_a_unit_inside_leaves_the_others_right() -> None:
    """Surgery on modules: the new module is the user's, the old one may be deleted at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LSTM(7, 7), nn.Linear(7, 3))
    plain = copy.deepcopy(model)
    for module in (*model, model):
        fully_shard(module)
    with unshard_params(model):
        model[1], model[2] = nn.Identity(), nn.Linear(7, 2)
        gc.collect()
        add_one(model[0])
    _assert_values(model[0], _with_ones(plain[0]))
    assert [type(param) is nn.Parameter for param in model.parameters()] == [False] * 2 + [True] * 2


# --- the flat parameter inside ---


@distributed(1, 2)
def test_the_flat_parameter_of_full_values_is_shown_on_request() -> None:
    """S1.8: edits and gradients through it count; a forward shows the originals again."""
    model, plain = _make_net(use_orig_params=False), _plain_net()
    model(rank_input(4, 5)).sum().backward()
    at_rest = model._flat_param
    before = _snapshot_of_scope(model)
    with unshard_params(model, with_grads=True):
        register_flat_param(model)
        assert len(list(model.parameters())) == 4
        flat = model._flat_param
        assert flat is dict(model.named_parameters())["_flat_param"]
        flat.data = flat.data + 1
        flat.grad.zero_()
        for block in model.blocks:
            with torch.no_grad():
                block._flat_param.add_(1)
        add_one(plain)
        with torch.no_grad():
            model(rank_input(4, 5))
        assert_equal(model.blocks[0].up.weight.detach(), plain.blocks[0].up.weight.detach())
    assert _snapshot_of_scope(model) == before
    assert model._flat_param is at_rest
    register_orig_params(model)
    assert all(param.grad.to_local().abs().sum() == 0 for param in model.out.parameters())
    plain.out.weight.data.copy_(plain.out.weight)
    _assert_values(model, plain)


@pytest.mark.fast
@distributed(2)
def test_writeback_after_a_step_raises() -> None:
    """By hand: what the optimizer wrote is not overwritten by older values."""
    model = _make_net()
    model(rank_input(4, 5)).square().mean().backward()
    unshard(model, recurse=True)
    with torch.no_grad():
        for handle in get_handles(model):
            for entry in handle.entries:
                entry.sharded.add_(1)
    with pytest.raises(RuntimeError, match="were written in their sharded form, as by"):
        writeback(model, recurse=True)
    reshard(model, recurse=True)
    unshard(model, recurse=True)
    writeback(model, recurse=True)
    writeback(model, recurse=True)
    reshard(model, recurse=True)
    plain = _plain_net()
    add_one(plain)
    _assert_values(model, plain)
