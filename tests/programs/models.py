"""Toy models, and a sharded model beside its unsharded twin."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from composable_shard import (
    Block,
    FlatShard,
    ShardingStrategy,
    StateDictOptions,
    count_collectives,
    fully_shard,
    get_states,
    shard_model,
)
from composable_shard.comm.trace import CollectiveLog
from composable_shard.options import Granularity
from composable_shard.planning import ShardingPlan
from composable_shard.runtime.training_state import TrainingState
from composable_shard.runtime.unit import ShardState
from composable_shard.tensor import own_gradient
from tests.harness.assertions import assert_equal, assert_within
from tests.harness.ranks import device

__all__ = [
    "EVERYWHERE",
    "FROM_RANK0",
    "FULL",
    "EqualBlocks",
    "FailingMode",
    "Layer",
    "Net",
    "Nothing",
    "Optional",
    "Tied",
    "Twins",
    "Wide",
    "add_one",
    "assert_at_rest",
    "assert_gradients_equal",
    "assert_holds",
    "assert_is_slice",
    "average_gradients",
    "collectives_of",
    "every_granularity",
    "fingerprint",
    "full_tensor_of",
    "loss_of",
    "loss_of_shape",
    "make_net",
    "net_without_first_rank",
    "num_gathers_and_reductions",
    "on_meta",
    "plan_of",
    "rank_input",
    "replica_mesh",
    "seeded",
    "shard_blocks",
    "shard_children",
    "shard_layers",
    "shard_mixed",
    "shard_root",
    "square_mean",
    "train_by",
    "train_twins",
    "wait_for_engine",
]


FULL = StateDictOptions(full_state_dict=True)
EVERYWHERE = StateDictOptions(full_state_dict=True, rank0_only=False)
FROM_RANK0 = StateDictOptions(broadcast_from_rank0=True)


class Layer(nn.Module):
    """A residual unit of odd shapes."""

    def __init__(self, dim: int = 15, hidden: int = 7) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """`num_blocks` blocks between an input and an output layer of the root."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 15)
        self.blocks = nn.ModuleList(Layer() for _ in range(num_blocks))
        self.out = nn.Linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Tied(Net):
    """Two blocks share a matrix, across units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight


class Wide(nn.Module):
    """Equal units that dwarf everything else, activations too."""

    def __init__(self, dim: int = 256, num_blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class EqualBlocks(nn.Module):
    """Blocks of equal size, which dominate everything else."""

    def __init__(self, dtype: torch.dtype = torch.float32, dim: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.Tanh(), nn.Linear(4 * dim, dim))
            for _ in range(6)
        )
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class CheckpointsBlocks:
    """For a model with `inp`, `blocks` and `out`: recomputes its blocks in backward."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.out(x)


class Nothing(nn.Module):
    """A product with a parameter that has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def shard_root(model: nn.Module, **options: Any) -> None:
    """Make the whole model one unit."""
    fully_shard(model, **options)


def shard_children(model: nn.Module, **options: Any) -> None:
    """Make each child, and what is left, a unit."""
    for child in model.children():
        fully_shard(child, **options)
    fully_shard(model, **options)


def shard_blocks(model: nn.Module, **options: Any) -> None:
    """Make each of `model.blocks`, and what is left, a unit."""
    assert isinstance(model.blocks, nn.ModuleList)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def shard_layers(model: nn.Module, **options: Any) -> None:
    """Make each of `model.layers`, and what is left, a unit."""
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def shard_mixed(model: nn.Module, **options: Any) -> None:
    """Give each of three blocks, and what is left, another strategy."""
    strategies = (
        ShardingStrategy.NO_SHARD,
        ShardingStrategy.FULL_SHARD,
        ShardingStrategy.SHARD_OPTIM,
    )
    for block, strategy in zip(model.blocks, strategies, strict=True):
        fully_shard(block, strategy=strategy, **options)
    fully_shard(model, strategy=ShardingStrategy.SHARD_GRAD_OP, **options)


def plan_of(model: nn.Module, rules: Any, **options: Any) -> ShardingPlan:
    """Return the plan of a dry run."""
    return shard_model(model, rules, dry_run=True, **options)


def replica_mesh(num_replicas: int = 2, num_shards: int = 2) -> DeviceMesh:
    """Return a mesh with an axis of replicas and one of shards."""
    sizes = (num_replicas, num_shards)
    return init_device_mesh(device().type, sizes, mesh_dim_names=("replicate", "shard"))


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> Any:
    """Return a model that is the same on all ranks."""
    torch.manual_seed(seed)
    with device():
        return make()


def make_net(num_blocks: int = 3, **options: Any) -> Net:
    """Return a seeded `Net`, whose blocks and root are units with these options."""
    model = seeded(functools.partial(Net, num_blocks))
    shard_blocks(model, **options)
    return model


def on_meta(make: Callable[[], nn.Module], **options: Any) -> Any:
    """Return a model without values, whose blocks and root are units with these options."""
    with torch.device("meta"):
        model = make()
    shard_blocks(model, **options)
    return model


def net_without_first_rank() -> Net:
    """Return a model whose units' meshes begin with different ones of two ranks."""
    torch.manual_seed(0)
    model = Net()
    turned = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicate", "shard"))
    fully_shard(model.blocks[0], mesh=turned["shard"])  # each rank by itself
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def rank_input(*shape: int, step: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers that differ between ranks and steps."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return torch.randn(shape, generator=generator, dtype=dtype, device="cpu").to(device())


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    """Return the loss of this rank's batch, for a model with the inputs of `Net`."""
    return model(rank_input(4, 5, step=step)).float().square().mean()


def loss_of_shape(*shape: int, step: int = 0) -> Callable[[nn.Module], Tensor]:
    """Return what gives a model its loss of this rank's random input."""
    x = rank_input(*shape, step=step)
    return lambda model: square_mean(model(x))


def square_mean(output: Tensor) -> Tensor:
    """Return a loss of any output."""
    return output.square().mean()


def collectives_of(run: Callable[[], object]) -> CollectiveLog:
    """Return the collectives of a call."""
    with count_collectives() as log:
        run()
    return log


def num_gathers_and_reductions(
    model: nn.Module, run: Callable[[nn.Module], Any]
) -> tuple[int, int]:
    """Return how many all-gathers and reduce-scatters a run makes."""
    with count_collectives() as counts:
        run(model)
    return counts.count("all_gather"), counts.count("reduce_scatter")


def full_tensor_of(tensor: Tensor) -> Tensor:
    """Return the full values of a tensor of any kind."""
    return tensor.full_tensor() if isinstance(tensor, FlatShard | DTensor) else tensor.detach()


def add_one(module: nn.Module) -> None:
    """Add one to each parameter that is registered."""
    with torch.no_grad():
        for param in module.parameters():
            param.add_(1)


def assert_holds(state_dict: dict[str, Any], model: nn.Module) -> None:
    """Assert that a state dict, sharded or not, has the names and values of a plain model."""
    expected = model.state_dict()
    assert list(state_dict) == list(expected)
    for name, value in state_dict.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert_equal(whole, expected[name], name)


def assert_is_slice(
    shard: Tensor | None,
    full: Tensor,
    what: str = "tensor",
    compare: Callable[[Tensor, Tensor, str], object] = assert_equal,
) -> None:
    """Assert that a shard has its part of a tensor that all ranks have; no communication.

    Together the ranks compare every element.
    """
    __tracebackhide__ = True
    assert isinstance(shard, FlatShard), what
    spec = shard._shard_spec
    assert shard.shape == full.shape, what
    if not spec.is_owned_by_other_rank:
        compare(shard._local, spec.slice(full.detach()), what)


def assert_gradients_equal(model: nn.Module, plain: nn.Module) -> None:
    """Assert that each gradient of a sharded model is its part of the plain one's."""
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            assert_is_slice(param.grad, expected.grad, name)


def every_granularity(param: nn.Parameter) -> Granularity:
    """Return each of them for some parameters of `Net`."""
    kinds: dict[tuple[int, ...], Granularity] = {
        (7, 15): "param",
        (15, 7): "row",
        (15, 5): Block(16),
        (3, 15): "param",
    }
    return kinds.get(tuple(param.shape), "element")


class Twins:
    """A model and its sharded copy that do the same things.

    The plain one averages its gradients over the ranks after each backward: a parameter that no
    rank used keeps None, one that some ranks used counts as zero on the others.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        shard: Callable[..., object] = shard_children,
        **options: Any,
    ) -> None:
        self.plain = seeded(make)
        self.sharded = copy.deepcopy(self.plain)
        shard(self.sharded, **options)

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.plain, self.sharded

    def sharded_units(self, reshard_after_forward: bool | None) -> tuple[nn.Module, ...]:
        """Return what `assert_at_rest` calls kept."""
        return (self.sharded,) if reshard_after_forward is False else ()

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.both)

    def optimizers(self, kind: Any = torch.optim.AdamW, **options: Any) -> list[Any]:
        """Return an optimizer for each twin."""
        return [kind(model.parameters(), lr=0.05, **options) for model in self]

    def backward(self, model: nn.Module, loss: Tensor, **options: Any) -> None:
        """Run the backward; average what it adds to the gradients of the plain twin."""
        if model is not self.plain:
            loss.backward(**options)
            return
        before = [param.grad for param in model.parameters()]
        model.zero_grad()
        loss.backward(**options)
        average_gradients(model.parameters())
        for param, grad in zip(model.parameters(), before, strict=True):
            if grad is not None:
                param.grad = grad if param.grad is None else grad + param.grad

    def step(self, run: Callable[[nn.Module], Any]) -> None:
        """Let both do `run(model)`, which returns a loss; run the backwards and compare."""
        losses = [run(model) for model in self]
        for model, loss in zip(self, losses, strict=True):
            self.backward(model, loss)
        _assert_same(losses[1].detach(), losses[0].detach(), "loss")
        self.assert_equal_gradients()

    def zero_grad(self) -> None:
        """Drop the gradients of both."""
        for model in self:
            model.zero_grad()

    def assert_equal_gradients(self) -> None:
        """Compare every gradient, and which parameters have none."""
        __tracebackhide__ = True
        named = dict(self.plain.named_parameters())
        assert list(dict(self.sharded.named_parameters())) == list(named)
        for name, param in self.sharded.named_parameters():
            expected = named[name].grad
            assert isinstance(param, FlatShard), name
            is_owned_by_other_rank = param._shard_spec.is_owned_by_other_rank
            has_gradient = expected is not None and not is_owned_by_other_rank
            assert (param.grad is not None) == has_gradient, f"{name}: {param.grad}"
            if has_gradient:
                assert_is_slice(param.grad, expected, f"gradient of {name}", _assert_same)

    def assert_equal_parameters(self) -> None:
        """Compare every parameter."""
        __tracebackhide__ = True
        for (name, param), expected in zip(
            self.sharded.named_parameters(), self.plain.parameters(), strict=True
        ):
            assert_is_slice(param, expected, name, _assert_same)


def train_twins(
    twins: Twins, num_steps: int = 2, kept: tuple[nn.Module, ...] = (), **options: Any
) -> None:
    """Train both for a few steps; losses, gradients and parameters must stay equal."""
    optimizers = twins.optimizers(**options)
    for step in range(num_steps):
        twins.step(functools.partial(loss_of, step=step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        twins.assert_equal_parameters()
    assert_at_rest(twins.sharded, kept=kept)


def train_by(
    twins: Twins, run: Callable[[int], Callable[[nn.Module], Any]], steps: int = 2
) -> None:
    """Take optimizer steps with both twins, comparing as it goes."""
    optimizers = twins.optimizers()
    for step in range(steps):
        twins.step(run(step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    twins.assert_equal_parameters()


def _assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Assert equality: bitwise on two ranks; sums of more terms are rounded in another order."""
    __tracebackhide__ = True
    if dist.get_world_size() <= 2:
        assert_equal(actual, expected, what)
    else:
        assert_within(actual, expected, what, atol=1e-6)


def average_gradients(params: Iterable[nn.Parameter]) -> None:
    """Average each `.grad` over the ranks; leave None where all ranks have None."""
    trained = list(params)  # also frozen ones, which may have gradients from before
    num_used = torch.tensor([int(param.grad is not None) for param in trained], device="cpu")
    dist.all_reduce(num_used)
    used = [param for param, num in zip(trained, num_used.tolist(), strict=True) if num]
    for param in used:
        grad = torch.zeros_like(param) if param.grad is None else param.grad.to_dense()
        param.grad = torch.empty_like(param).copy_(grad / dist.get_world_size())
    if dist.get_world_size() > 2:
        groups = [[param] for param in used]  # a sum of more terms depends on where they lie
    else:
        dtypes = dict.fromkeys(param.dtype for param in used)
        groups = [[param for param in used if param.dtype is dtype] for dtype in dtypes]
    for group in groups:
        _sum_over_ranks([param.grad for param in group if param.grad is not None])


def _sum_over_ranks(tensors: list[Tensor]) -> None:
    """Add tensors of one dtype up, which travel together."""
    total = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total)
    parts = total.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


def fingerprint(module: nn.Module) -> dict[str, Any]:
    """Return all that a module holds: names, identities, classes, hooks."""
    return {
        name: {key: (id(item), type(item)) for key, item in value.items()}
        if isinstance(value, dict)
        else (id(value), type(value))
        for name, value in vars(module).items()
    }


def assert_at_rest(model: nn.Module, *, kept: tuple[nn.Module, ...] = ()) -> None:
    """Assert that sharded parameters are registered and that no unit holds more than shards.

    Args:
        model: The model.
        kept: Sharded modules in it that keep their full parameters between forward and backward.
    """
    __tracebackhide__ = True
    keeps = [state for module in kept for state in get_states(module)]
    managed = {
        id(entry.sharded)
        for state in get_states(model)
        for handle in state.handles
        for entry in handle.entries
    }
    for name, param in model.named_parameters():
        assert isinstance(param, FlatShard), f"{name} is registered unsharded"
        assert id(param) in managed, f"{name} is not the object that was sharded"
    for state in get_states(model):
        _assert_state_at_rest(state, is_kept=state in keeps)


def _assert_state_at_rest(state: ShardState, *, is_kept: bool) -> None:
    assert state.training_state is TrainingState.IDLE, state.name
    assert state.depth == 0, state.name
    assert not state.is_in_pass, state.name
    for handle in state.handles:
        handle.shown.check_registered()
        assert not handle.shown.is_unsharded, handle.name
        assert not handle.full.readers.claims, handle.name
        assert not handle.grads.reduction.output is not None, handle.name
        if not handle.grads.is_persistent:
            assert handle.grads._memory.buffer.untyped_storage().size() == 0, (
                f"{handle.name}: reduce buffer"
            )
        params = [entry.unsharded for entry in handle.entries]
        assert all(param is None or own_gradient(param) is None for param in params)
        if not handle.is_kept and not is_kept:
            assert handle.unsharded.untyped_storage().size() == 0, f"{handle.name}: full values"


def wait_for_engine(model: nn.Module) -> None:
    """Wait until autograd has dropped a backward that raised, on a device in its own thread."""
    contexts = {state.context for state in get_states(model)}
    deadline = time.monotonic() + 5
    while any(each is not None and each.backward for each in contexts):
        assert time.monotonic() < deadline
        time.sleep(0.001)


class FailingMode(TorchDispatchMode):
    """Raises in the k-th operation, as a real out-of-memory error would."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k, self.calls = k, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, or fail."""
        self.calls += 1
        if self.calls == self.k:
            raise torch.OutOfMemoryError(f"planned in {func}")
        return func(*args, **(kwargs or {}))


class Optional(nn.Module):
    """Linear layers, of which a call runs those it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        for index in used:
            x = self.layers[index](x)
        return x
