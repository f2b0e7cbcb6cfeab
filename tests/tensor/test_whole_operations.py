"""Operations at rest mean what they mean on whole tensors, beside a plain model, by value."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional

from composable_shard import (
    Block,
    ShardingStrategy,
    count_collectives,
    fully_shard,
    set_gathers_at_rest,
)
from composable_shard.tensor.flat_shard import FlatShard
from composable_shard.tensor.gathering import GatherWarning
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import Twins

Named = dict[str, Tensor]


class UnevenNet(nn.Module):
    """Parameters of odd shapes, two of one shape, a filter and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.b = nn.Linear(5, 7, bias=False)
        self.square = nn.Linear(6, 6)
        self.conv = nn.Conv1d(3, 4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the difference of two layers."""
        return self.a(inputs) - self.b(inputs)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _set_item(target: Tensor, index: Any, value: Any) -> None:
    target[index] = value


# Each gets parameters by name, with gradients; it may return what is compared, too.
OPERATIONS: dict[str, Callable[[Named], Any]] = {
    "factor for each row": lambda p: p["a.weight"].mul_(torch.arange(7.0)[:, None]),
    "factor for each column": lambda p: p["a.weight"].mul_(torch.arange(5.0)),
    "full-size operand": lambda p: p["a.weight"].add_(torch.arange(35.0).view(7, 5), alpha=0.1),
    "transposed operand": lambda p: p["a.weight"].add_(torch.arange(35.0).view(5, 7).t()),
    "reversed operands": lambda p: torch.arange(5.0) - p["a.weight"],
    "drawn alike": lambda p: p["a.weight"].add_(torch.randn(7, 5, generator=_generator())),
    "plain average": lambda p: torch.full((7, 5), 0.5).lerp_(p["a.weight"], 0.1),
    "copied into plain": lambda p: torch.zeros(7, 5).copy_(p["a.weight"]),
    "plain out": lambda p: torch.add(p["a.weight"], 1.0, out=torch.zeros(7, 5)),
    "sharded out": lambda p: torch.add(
        p["a.weight"], torch.arange(5.0), out=p["b.weight"].detach()
    ),
    "out of another cut": lambda p: torch.mul(p["b.weight"], 2.0, out=p["a.weight"].detach()),
    "two parameters": lambda p: p["a.weight"].add_(p["b.weight"], alpha=0.3),
    "three parameters": lambda p: torch.addcmul(p["a.weight"], p["b.weight"], p["b.weight"]),
    "row of another": lambda p: p["a.weight"].mul_(p["b.weight"][2]),
    "bias as rows": lambda p: p["a.weight"].add_(p["a.bias"][:, None]),
    "where": lambda p: torch.where(p["a.weight"] > 0, p["a.weight"], p["b.weight"]),
    "maximum": lambda p: torch.maximum(p["a.weight"], p["b.weight"]),
    "unit rows": lambda p: p["a.weight"].div_(p["a.weight"].norm(dim=1, keepdim=True)),
    "normalize": lambda p: functional.normalize(p["a.weight"], dim=0),
    "centred gradient": lambda p: p["a.weight"].grad.sub_(p["a.weight"].grad.mean(1, True)),
    "centred filter": lambda p: p["conv.weight"].sub_(p["conv.weight"].mean((1, 2), True)),
    "sum of columns": lambda p: p["a.weight"].sum(0),
    "sum of middle dim": lambda p: p["conv.weight"].sum(1),
    "extremes of rows": lambda p: (p["a.weight"].amax(1), p["a.weight"].amin(0, True)),
    "max with indices": lambda p: tuple(p["a.weight"].max(1)),
    "inf norm of rows": lambda p: torch.linalg.vector_norm(p["a.weight"], float("inf"), 1),
    "variance": lambda p: p["a.weight"].var(0),
    "dot": lambda p: torch.dot(p["a.weight"].flatten(), p["b.weight"].flatten()),
    "dot with gradient": lambda p: torch.dot(p["a.weight"].view(-1), p["a.weight"].grad.view(-1)),
    "dot with plain": lambda p: torch.dot(torch.arange(7.0), p["a.bias"]),
    "cosine": lambda p: functional.cosine_similarity(
        p["a.weight"].flatten(), p["a.weight"].grad.flatten(), dim=0
    ),
    "quantile": lambda p: torch.quantile(p["a.weight"], 0.3),
    "matmul": lambda p: p["a.weight"] @ p["b.weight"].T,
    "matmul with plain": lambda p: torch.ones(2, 7) @ p["a.weight"],
    "linear": lambda p: functional.linear(torch.ones(2, 5), p["a.weight"], p["a.bias"]),
    "einsum": lambda p: torch.einsum("ij,kj->ik", p["a.weight"], p["b.weight"]),
    "svd": lambda p: torch.linalg.svdvals(p["a.weight"]),
    "inverse": lambda p: torch.linalg.inv(p["square.weight"] + torch.eye(6)),
    "embedding": lambda p: functional.embedding(torch.tensor([1, 4]), p["a.weight"]),
    "transpose": lambda p: p["a.weight"].t() * 2,
    "transposed write": lambda p: p["a.weight"].t().mul_(torch.arange(7.0)),
    "transposed copy": lambda p: p["square.weight"].copy_(p["square.weight"].clone().t()),
    "contiguous transpose": lambda p: p["a.weight"].t().contiguous().view(-1),
    "column": lambda p: p["a.weight"][:, 1].mul_(3.0),
    "columns": lambda p: p["a.weight"][:, 1:3] + 1,
    "column of a column view": lambda p: p["a.weight"][:, 1:4][:, 1].fill_(7.0),
    "detached steps": lambda p: p["a.weight"].view(-1)[::3].detach().clone(),
    "data of a column": lambda p: p["a.weight"][:, 1].data.mul_(3.0),
    "steps": lambda p: p["a.weight"][::2].zero_(),
    "diagonal": lambda p: p["square.weight"].diagonal().add_(torch.arange(6.0)),
    "view as heads": lambda p: p["square.weight"].view(2, 3, 6).mul_(torch.rand(2, 1, 1)),
    "permuted view": lambda p: p["conv.weight"].permute(2, 0, 1)[1].add_(1.0),
    "chunks": lambda p: [x.mul_(i) for i, x in enumerate(p["a.weight"].chunk(3))],
    "columns in chunks": lambda p: [x.mul_(i) for i, x in enumerate(p["a.weight"].chunk(2, 1))],
    "rows one by one": lambda p: [row.sum() for row in p["a.weight"]],
    "mask read": lambda p: p["a.weight"][p["a.weight"] > 0],
    "mask write": lambda p: _set_item(p["a.weight"], p["b.weight"] > 0, 5.0),
    "plain mask write": lambda p: _set_item(p["a.weight"], torch.eye(7, 5).bool(), 5.0),
    "index read": lambda p: p["a.weight"][torch.tensor([4, 1])],
    "index write": lambda p: _set_item(p["a.weight"], torch.tensor([4, 1]), torch.ones(2, 5)),
    "row from rows": lambda p: _set_item(p["a.weight"], -1, p["a.weight"][:-1].mean(0)),
    "rows from rows": lambda p: p["a.weight"][0:2].copy_(p["a.weight"][4:6]),
    "index_add": lambda p: p["a.weight"].index_add_(0, torch.tensor([1, 1]), torch.ones(2, 5)),
    "scatter": lambda p: p["a.weight"].scatter_(1, torch.ones(7, 1, dtype=torch.long), 2.0),
    "masked_fill": lambda p: p["a.weight"].masked_fill_(torch.eye(7, 5).bool(), 4.0),
    "tril": lambda p: p["square.weight"].tril_(),
    "renorm": lambda p: p["a.weight"].renorm_(2, 0, 0.5),
    "cumsum": lambda p: p["a.weight"].cumsum(0),
    "softmax": lambda p: p["a.weight"].softmax(1),
    "cat of vectors": lambda p: torch.cat([x.flatten() for x in p.values()]) * 2,
    "cat of matrices": lambda p: torch.cat([p["a.weight"], p["b.weight"]]),
    "stack": lambda p: torch.stack([p["a.weight"], p["b.weight"]]).mean(0),
    "vector and back": lambda p: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(p.values()) * 2, p.values()
    ),
    "norm of a vector": lambda p: nn.utils.parameters_to_vector(p.values()).norm(),
    "extreme of a vector": lambda p: torch.cat([x.flatten() for x in p.values()]).abs().max(),
    "part of a vector": lambda p: torch.cat([x.flatten() for x in p.values()])[30:60] + 0,
    "vector times vector": lambda p: torch.dot(
        torch.cat([x.flatten() for x in p.values()]),
        torch.cat([x.grad.flatten() for x in p.values()]),
    ),
    "top-k": lambda p: p["a.weight"].grad.flatten().abs().topk(3).values,
    "list with plain": lambda p: torch._foreach_add_(
        [p["a.weight"], p["a.bias"]], [torch.arange(35.0).view(7, 5), torch.arange(7.0)]
    ),
    "list into plain": lambda p: _into_plain([p["a.weight"], p["a.bias"]]),
    "list of others": lambda p: torch._foreach_mul_(
        [p["a.weight"], p["a.bias"]], [p["b.weight"], p["a.bias"]]
    ),
    "list of rows": lambda p: torch._foreach_mul([p["a.weight"]], [torch.arange(5.0)]),
    "list of columns": lambda p: torch._foreach_mul_([p["a.weight"][:, 1]], 3.0),
    "list with scalars": lambda p: torch._foreach_add_(
        [p["a.weight"][:, 1], p["a.bias"]], [3.0, 4.0]
    ),
    "seeded bernoulli": lambda p: torch.bernoulli(p["a.weight"].sigmoid(), generator=_generator()),
    "sparse init": lambda p: nn.init.eye_(p["square.weight"]),
    "in bfloat16": lambda p: (p["a.weight"].bfloat16() @ p["b.weight"].bfloat16().T).float(),
    "clamp by tensors": lambda p: p["a.weight"].clamp_(torch.zeros(5), torch.ones(7, 1)),
    "outer": lambda p: torch.outer(p["a.bias"], p["square.bias"]),
    "Newton-Schulz": lambda p: _orthogonal(p["square.weight"].grad),
}


def _into_plain(params: list[Tensor]) -> list[Tensor]:
    averages = [torch.zeros_like(x) if type(x) is Tensor else torch.zeros(x.shape) for x in params]
    torch._foreach_lerp_(averages, params, 0.25)
    return averages


def _orthogonal(x: Tensor) -> Tensor:
    x = x / x.norm()
    for _ in range(3):
        y = x @ x.mT
        x = 1.5 * x - 0.5 * y @ x
    return x


def _compared(result: Any) -> list[Tensor]:
    if isinstance(result, list | tuple):
        return [x for item in result for x in _compared(item)]
    if not isinstance(result, Tensor):
        return []
    return [result.full_tensor() if isinstance(result, FlatShard | DTensor) else result]


def _compare_operations(shard_net: Callable[[nn.Module], None]) -> None:
    """Run each operation on a plain model and on a sharded one."""
    wrong = []
    for name, operation in OPERATIONS.items():
        torch.manual_seed(1)
        plain = UnevenNet()
        net = copy.deepcopy(plain)
        shard_net(net)
        grads = {
            n: torch.randn(p.shape, generator=_generator()) for n, p in plain.named_parameters()
        }
        found = []
        for model in (plain, net):
            params = dict(model.named_parameters())
            for each, param in params.items():
                param.grad = torch.zeros_like(param)
                param.grad.copy_(grads[each])
            torch.manual_seed(3)
            with torch.no_grad():
                result = operation(params)
                everything = [result, *params.values(), *(x.grad for x in params.values())]
                found.append(_compared(everything))
        for one, other in zip(*found, strict=True):
            is_same = one.shape == other.shape and torch.allclose(one, other, atol=1e-5, rtol=1e-4)
            if not is_same and name not in wrong:
                wrong.append(name)
    assert not wrong


@pytest.mark.parametrize(
    "granularity", ["element", "row", Block(4)], ids=["element", "row", "block"]
)
@distributed(2, 3)
def test_operations_at_rest_are_those_of_whole_compared(granularity: Any) -> None:
    """Parameters, gradients and results: by the part, by a reduction, or by a gather."""

    def shard_net(net: nn.Module) -> None:
        fully_shard(net.a, granularity=granularity)
        fully_shard(net, granularity=granularity)

    _compare_operations(shard_net)


@distributed(1, 2)
def test_operations_at_rest_under_the_strategies() -> None:
    """Where one rank has all of it, and where parameters are kept unsharded."""
    for strategy in (ShardingStrategy.NO_SHARD, ShardingStrategy.SHARD_OPTIM):
        _compare_operations(lambda net, strategy=strategy: fully_shard(net, strategy=strategy))


@distributed(4)
def test_operations_at_rest_with_replicas() -> None:
    """Shards are gathered inside the shard group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _compare_operations(lambda net: fully_shard(net, mesh=mesh))


@distributed(4)
def test_operations_at_rest_on_a_tensor_parallel_mesh() -> None:
    """A parameter is the logical tensor, not its local part."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def shard_net(net: nn.Module) -> None:
        plan = {"square": ColwiseParallel()}
        parallelize_module(net, mesh["tensor"], plan)
        fully_shard(net, mesh=mesh["data"])

    _compare_operations(shard_net)


@distributed(2)
def test_views_that_autograd_records_are_detached() -> None:
    """As Prodigy keeps a part of each parameter, in a step without no_grad."""
    torch.manual_seed(1)
    plain = UnevenNet()
    net = copy.deepcopy(plain)
    fully_shard(net)
    found = net.a.weight.flatten()[::3].detach().clone()
    assert_equal(found, plain.a.weight.detach().flatten()[::3])
    assert_equal(net.a.weight[:, 2].data.sum(), plain.a.weight.detach()[:, 2].sum())


@distributed(2)
def test_models_that_are_sharded_differently_combine() -> None:
    """A student's average in a teacher of other units, a policy beside its reference."""
    student, teacher = UnevenNet(), UnevenNet()
    plain = [copy.deepcopy(student), copy.deepcopy(teacher)]
    fully_shard(student)
    fully_shard(teacher.a, granularity="row")
    fully_shard(teacher, granularity="row")
    for one, other in ((student, teacher), plain):
        with torch.no_grad():
            for s, t in zip(one.parameters(), other.parameters(), strict=True):
                t.mul_(0.4).add_(s, alpha=0.6)
                t.lerp_(s, 0.1)
    for t, expected in zip(teacher.parameters(), plain[1].parameters(), strict=True):
        assert_equal(t.full_tensor(), expected)


@distributed(2)
def test_what_an_operation_sends() -> None:
    """A part: nothing. A reduction: the result. A gather: the operands, in one message."""
    net = UnevenNet()
    fully_shard(net.a)
    fully_shard(net)
    a, b = net.a.weight.detach(), net.b.weight.detach()
    expected: list[tuple[Callable[[], Any], list[tuple[str, int]]]] = [
        (lambda: a.mul_(torch.rand(7, 1)), []),
        (lambda: torch.cat([a.view(-1), b.view(-1)]) * 2, []),
        (lambda: a.norm(dim=1), [("all_reduce", 7 * 8)]),
        (lambda: torch.dot(a.view(-1), a.view(-1)), [("all_reduce", 4)]),
        (lambda: a.sum(0), [("all_reduce", 5 * 4)]),
    ]
    for run, events in expected:
        with count_collectives() as log:
            run()
        assert [(event.kind, event.nbytes) for event in log.events] == events
    with count_collectives() as log:
        a @ b.T
    assert [event.kind for event in log.events] == ["all_gather"]
    with count_collectives() as log:
        a.add_(b)
    assert [event.kind for event in log.events] == ["all_gather"]


@distributed(2)
def test_a_gather_is_announced_once_for_each_line() -> None:
    """With its bytes; an elementwise operation is not."""
    net = UnevenNet()
    fully_shard(net)
    weight = net.a.weight.detach()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            weight.t() @ weight
        weight.mul_(2)
        weight.norm(dim=1)
    texts = [str(each.message) for each in seen if each.category is GatherWarning]
    assert len(texts) == 1
    assert "'a.weight'" in texts[0]
    assert "140 bytes" in texts[0]
    assert seen[0].filename == __file__


@distributed(2)
def test_gathers_at_rest_can_be_refused() -> None:
    """On every rank, before anything is sent or changed; what needs none runs."""
    for use_orig_params in (True, False):
        net = UnevenNet()
        fully_shard(net, use_orig_params=use_orig_params)
        set_gathers_at_rest(net, False)
        param = next(net.parameters()).detach()
        with count_collectives() as log:
            with pytest.raises(RuntimeError, match=r"would gather [\d,]+ bytes"):
                param.view(-1).cumsum(0)
            param.mul_(2)
        assert not log.events
        set_gathers_at_rest(net, True)
        param.view(-1).cumsum(0)


@distributed(2)
def test_parameters_have_addresses_of_their_own() -> None:
    """Libraries key state by `data_ptr()`: distinct, equal for aliases, constant over a step."""
    net = UnevenNet()
    net.tied = net.b
    fully_shard(net.a)
    fully_shard(net)
    params = list(net.parameters())
    before = [param.data_ptr() for param in params]
    assert len(set(before)) == len(params)
    assert 0 not in before
    assert [param.detach().data_ptr() for param in params] == before
    assert net.tied.weight.data_ptr() == net.b.weight.data_ptr()
    with torch.no_grad():
        for param in params:
            param.mul_(2)
    assert [param.data_ptr() for param in params] == before
    with pytest.raises(RuntimeError, match=r"storage of .*'a.weight' was asked for"):
        net.a.weight.untyped_storage()


def _lbfgs(model: nn.Module, use: type[torch.optim.Optimizer]) -> list[Tensor]:
    optimizer: Any = use(model.parameters(), lr=0.5, line_search_fn="strong_wolfe")
    inputs = torch.randn(8, 5, generator=_generator())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean() + model.a(inputs).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return [optimizer.state[next(iter(optimizer.state))]["d"]]


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(5, 7)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the difference of two layers."""
        return self.a(inputs) - self.b(inputs)


@distributed(2, 3)
def test_lbfgs_is_right_and_keeps_its_history_in_parts() -> None:
    """Its vectors hold 1/N on each rank; `torch.optim.LBFGS` as it is."""
    torch.manual_seed(2)
    plain = _Two()
    model = copy.deepcopy(plain)
    fully_shard(model.a)
    fully_shard(model.b)
    fully_shard(model)
    (direction,) = _lbfgs(model, torch.optim.LBFGS)
    _lbfgs(plain, torch.optim.LBFGS)
    assert isinstance(direction, FlatShard)
    assert direction._local.numel() < direction.numel()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(param.full_tensor(), expected, atol=1e-4)


@distributed(2)
def test_a_gradient_is_transposed_in_place() -> None:
    """As Shampoo's loops do; a parameter is not."""
    twins = Twins(UnevenNet, fully_shard)
    plain: Any = twins.plain
    model: Any = twins.sharded
    for each in (plain, model):
        each(torch.ones(2, 5)).sum().backward()
    found, expected = model.a.weight.grad, plain.a.weight.grad
    assert found is not None
    assert expected is not None
    for grad in (found, expected):
        alias = grad.data
        assert alias.transpose_(0, 1) is alias
        assert alias.shape == (5, 7)
        alias.mul_(torch.arange(7.0))
        alias.unsqueeze_(0).squeeze_(0).t_()
        alias.add_(1)
    assert torch.equal(found.full_tensor(), expected)
    with pytest.raises(RuntimeError, match=r"t_ .*'a\.weight'"):
        model.a.weight.detach().t_()
    assert model.a.weight.shape == (7, 5)


@distributed(2)
def test_bits_are_viewed_as_another_dtype() -> None:
    """As stochastic rounding does; of another size they would be a copy, and writes be lost."""
    twins = Twins(UnevenNet, fully_shard)
    plain: Any = twins.plain
    model: Any = twins.sharded
    for each in (plain, model):
        weight = each.a.weight.detach()
        weight.view(torch.int32).bitwise_and_(-65536)
        bits = weight.view(torch.int32) + 65536
        weight.add_(bits.view(torch.float32))
    assert torch.equal(model.a.weight.full_tensor(), plain.a.weight)
    for kind in (torch.uint8, torch.float64):
        with pytest.raises(RuntimeError, match=r"aten\.view .*'a\.weight'.* p\.full_tensor"):
            model.a.weight.detach().view(-1).view(kind)


class _Padded(torch.optim.Optimizer):
    """Pads each gradient to whole groups of elements, as optimizers with 8-bit state do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step in signs, scaled by the largest gradient of each group."""
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                flat = param.grad.flatten()
                padded = torch.cat([flat, flat.new_zeros(-flat.numel() % 8)]).view(-1, 8)
                update = padded.sign() * padded.abs().amax(1, keepdim=True)
                param.sub_(update.view(-1)[: flat.numel()].view_as(param), alpha=0.1)


@distributed(2)
def test_a_gradient_that_its_owner_pads_is_joined_with_no_other() -> None:
    """In a step of one owner, as flashadamw's: by value, in each granularity."""
    for granularity in ("param", "element"):
        torch.manual_seed(2)
        plain = _Two()
        model = copy.deepcopy(plain)
        for module in (model.a, model.b, model):
            fully_shard(module, granularity=granularity)
        for each in (plain, model):
            each(torch.ones(2, 5)).square().sum().backward()
            _Padded(each.parameters()).step()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(param.full_tensor(), expected, atol=1e-5)


@distributed(2)
def test_lbfgs_of_owned_parameters_is_refused() -> None:
    """Each rank would take a step of its own."""
    torch.manual_seed(2)
    model = _Two()
    for module in (model.a, model.b, model):
        fully_shard(module, granularity="param")
    before = [param.full_tensor() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=r"cat joins '[ab]\.\w+' .*default granularity"):
        _lbfgs(model, torch.optim.LBFGS)
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.full_tensor(), value)
