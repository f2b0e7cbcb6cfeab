"""Toy models, and a sharded model beside its unsharded twin."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from composable_shard import Block as UnitBlock
from composable_shard import FlatShard, StateDictOptions, fully_shard, get_states
from composable_shard.options.policies import Granularity
from composable_shard.runtime.state import ShardState, TrainingState
from tests.helpers import assert_equal

__all__ = [
    "EVERYWHERE",
    "FROM_RANK0",
    "FULL",
    "Block",
    "FailingMode",
    "Net",
    "Nothing",
    "Optional",
    "Tied",
    "Twins",
    "Wide",
    "assert_at_rest",
    "average_gradient",
    "every_granularity",
    "fingerprint",
    "net_without_first_rank",
    "pickled",
    "rank_input",
    "saved",
    "shard_blocks",
    "shard_children",
    "shard_root",
]


FULL = StateDictOptions(full_state_dict=True)
EVERYWHERE = StateDictOptions(full_state_dict=True, rank0_only=False)
FROM_RANK0 = StateDictOptions(broadcast_from_rank0=True)


class Block(nn.Module):
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
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
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
    return torch.randn(shape, generator=generator, dtype=dtype)


def every_granularity(param: nn.Parameter) -> Granularity:
    """Return each of them for some parameters of `Net`."""
    kinds: dict[tuple[int, ...], Granularity] = {
        (7, 15): "param",
        (15, 7): "row",
        (15, 5): UnitBlock(16),
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
        torch.manual_seed(0)
        self.plain = make()
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
        for param, grad in zip(model.parameters(), before, strict=True):
            average_gradient(param)
            if grad is not None:
                param.grad = grad if param.grad is None else grad + param.grad

    def step(self, run: Callable[[nn.Module], Any]) -> None:
        """Let both do `run(model)`, which returns a loss; run the backwards and compare."""
        losses = [run(model) for model in self]
        for model, loss in zip(self, losses, strict=True):
            self.backward(model, loss)
        _assert_same(losses[1].detach(), losses[0].detach(), "loss")
        self.assert_equal_gradients()

    def assert_equal_gradients(self) -> None:
        """Compare every gradient, and which parameters have none."""
        __tracebackhide__ = True
        named = dict(self.plain.named_parameters())
        assert list(dict(self.sharded.named_parameters())) == list(named)
        for name, param in self.sharded.named_parameters():
            expected = named[name].grad
            assert isinstance(param, FlatShard), name
            is_elsewhere = param._shard_spec.is_elsewhere
            has_gradient = expected is not None and not is_elsewhere
            assert (param.grad is not None) == has_gradient, f"{name}: {param.grad}"
            if expected is not None:
                # A broadcast, which those take part in that have none.
                grad = torch.empty_like(param) if is_elsewhere else param.grad
                assert isinstance(grad, FlatShard), name
                _assert_same(grad.full_tensor(), expected, f"gradient of {name}")

    def assert_equal_parameters(self) -> None:
        """Compare every parameter."""
        __tracebackhide__ = True
        for (name, param), expected in zip(
            self.sharded.named_parameters(), self.plain.parameters(), strict=True
        ):
            assert isinstance(param, FlatShard), name
            _assert_same(param.full_tensor(), expected.detach(), name)


def _assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Assert equality: bitwise on two ranks; sums of more terms are rounded in another order."""
    __tracebackhide__ = True
    if dist.get_world_size() <= 2:
        assert_equal(actual, expected, what)
    else:
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=1e-6, msg=lambda text: f"{what}: {text}"
        )


def average_gradient(param: nn.Parameter) -> None:
    """Average `.grad` over the ranks; leave None if all ranks have None."""
    if not param.requires_grad:
        return
    num_used = torch.tensor(int(param.grad is not None))
    dist.all_reduce(num_used)
    if not num_used.item():
        return
    grad = torch.zeros_like(param) if param.grad is None else param.grad.to_dense()
    total = grad.clone(memory_format=torch.contiguous_format) / dist.get_world_size()
    dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total)
    param.grad = torch.empty_like(param).copy_(total)


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
        handle.check_registered()
        assert not handle.is_registered_unsharded, handle.name
        assert handle.num_holders == 0, handle.name
        assert not handle.grad.is_in_flight, handle.name
        if not handle.grad.is_persistent:
            assert handle.grad._own.untyped_storage().size() == 0, f"{handle.name}: reduce buffer"
        assert all(e.unsharded is None or e.unsharded.grad is None for e in handle.entries)
        if not handle.is_kept and not is_kept:
            assert handle.unsharded.untyped_storage().size() == 0, f"{handle.name}: full values"


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


def pickled(model: nn.Module) -> nn.Module:
    """Return a copy that has been pickled."""
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    """Return a copy that has been saved by torch."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
