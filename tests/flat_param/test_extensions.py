"""Parameters of a class with FSDP2's `fsdp_pre_all_gather`: beside FSDP2, bitwise."""

from __future__ import annotations

import copy
import warnings
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from composable_shard import (
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
    get_model_state_dict,
    lazy_init,
    register_flat_param,
    register_orig_params,
    reshard,
    unshard,
    unshard_params,
    writeback,
)
from composable_shard.comm import collectives
from composable_shard.comm.trace import count_collectives
from composable_shard.flat_param import extended_gathers, full_values
from composable_shard.flat_param.storage import free_storage
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import EVERYWHERE

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy
aten = torch.ops.aten
_KEEP = {
    aten.detach.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
    aten.as_strided.default,
    aten.clone.default,
    aten.copy_.default,
    aten._to_copy.default,
    aten.empty_like.default,
}


class _Wrapper(Tensor):
    """A tensor around one of plain values."""

    @staticmethod
    def __new__(cls, values: Tensor, *args: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values: Tensor) -> None:
        self.values_inside = values

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values_inside"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["values_inside"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(
            _Wrapper, lambda each: each.values_inside, (args, kwargs or {})
        )
        out = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, cls, out) if func in _KEEP else out


class Scaled(_Wrapper):
    """A weight that travels as int8 with one scale, of all ranks, and comes back as values."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> Any:
        assert isinstance(module, nn.Linear)
        rows = -(-outer_size[0] // mesh.size())
        values = self.values_inside.new_zeros(rows, outer_size[1])
        values[: self.shape[0]] = self.values_inside
        scale = values.abs().max()
        dist.all_reduce(scale, dist.ReduceOp.MAX, mesh.get_group())
        scale = scale / 127
        return ((values / scale).round().to(torch.int8),), (scale,)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        (numbers,), (scale,) = outputs, metadata
        if out is not None:
            out = out._local_tensor if isinstance(out, DTensor) else out
            # FSDP2 needs both.
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(numbers[: out.shape[0]].to(dtype) * scale)
            return None
        values = numbers.to(dtype) * scale
        return values, (values,)


class _Linear(torch.autograd.Function):
    """Saves the weight as it was received, as torchao's do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Compute with the values."""
        ctx.save_for_backward(x, weight)
        return x @ cast(Rows, weight).values().T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return plain gradients."""
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.values(), gradients[0].T @ x


class Rows(_Wrapper):
    """A weight that travels, and is computed with, as int8 with a scale for each row."""

    scale: Tensor

    def values(self) -> Tensor:
        """Return what it stands for; at rest it holds just that."""
        if not hasattr(self, "scale"):
            return self.values_inside
        return self.values_inside.to(self.scale.dtype) * self.scale[:, None]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values_inside", *(["scale"] if hasattr(self, "scale") else [])], None

    @staticmethod
    def received(numbers: Tensor, scale: Tensor) -> Rows:
        """Return what modules compute with."""
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Rows, numbers.shape, numbers.stride(), dtype=scale.dtype, device=scale.device
        )
        made.values_inside, made.scale = numbers, scale
        return cast(Rows, made)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, bias = args
            return _Linear.apply(x, weight) + (0 if bias is None else bias)  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if hasattr(args[0], "scale"):
            if func in (aten.detach.default, aten.as_strided.default):
                rows = args[1][0] if len(args) > 1 else len(args[0].scale)
                return cls.received(args[0].values_inside[:rows], args[0].scale[:rows])
            raise NotImplementedError(func)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        scale = self.values_inside.abs().amax(1) / 127 + 1e-9
        numbers = (self.values_inside / scale[:, None]).round().to(torch.int8)
        return (numbers, scale), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        numbers, scale = outputs
        if out is None:
            return self.received(numbers, scale), (numbers, scale)
        assert out.scale.data_ptr() == scale.data_ptr()
        return None


KINDS = {"scaled": Scaled, "rows": Rows}


class Model(nn.Module):
    """Two of its weights are of a class of their own."""

    def __init__(
        self, kind: str = "scaled", rows: int = 7, *, is_checkpointed: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (
            nn.Linear(6, 10),
            nn.Linear(10, rows),
            nn.Linear(rows, 3),
        )
        for layer in (self.first, self.second):
            layer.weight = nn.Parameter(KINDS[kind](layer.weight.detach()))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if self.is_checkpointed:
            hidden = checkpoint(self.second, hidden, use_reentrant=False)
        else:
            hidden = self.second(hidden)
        output: Tensor = self.last(hidden.tanh())
        return output


def shard_model_of_classes(model: Model, function: Any = fully_shard, **options: Any) -> Model:
    """Make each layer with such a weight a unit, and the rest."""
    for layer in (model.first, model.second):
        function(layer, **options)
    function(model, **options)
    return model


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    """Train one step; return the loss."""
    seed = 10 * number + dist.get_rank()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train_steps(model: Model) -> list[Tensor]:
    """Train three steps; return the losses and the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [step_of(model, optimizer, number) for number in range(3)]
    register_orig_params(model)
    state = get_model_state_dict(model, options=EVERYWHERE)
    return [*losses, *state.values()]


def train_under_fsdp2(model: Model, **options: Any) -> list[Tensor]:
    """Do the same under FSDP2."""
    shard_model_of_classes(model, torch_fully_shard, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [step_of(model, optimizer, number) for number in range(3)]
    whole = [param.full_tensor() for param in model.parameters()]
    return [*losses, *(getattr(each, "values_inside", each) for each in whole)]


@pytest.mark.parametrize("strategy", ShardingStrategy)
@pytest.mark.parametrize(
    ("kind", "rows", "use_orig_params"), [("scaled", 7, True), ("rows", 8, False)]
)
@distributed(2)
def test_train_as_under_fsdp2(
    kind: str, rows: int, use_orig_params: bool, strategy: ShardingStrategy
) -> None:
    """Losses and weights are those of FSDP2, bit by bit."""
    expected = train_under_fsdp2(Model(kind, rows))
    model = shard_model_of_classes(
        Model(kind, rows), strategy=strategy, use_orig_params=use_orig_params
    )
    for found, wanted in zip(train_steps(model), expected, strict=True):
        assert_equal(found, wanted)


@distributed(4)
def test_fewer_rows_than_ranks() -> None:
    """A rank without rows sends none; what it computes with is the same."""
    expected = train_under_fsdp2(Model(rows=5))
    torch.testing.assert_close(train_steps(shard_model_of_classes(Model(rows=5))), expected)
    expected = train_steps(shard_model_of_classes(Model("rows", rows=2), strategy=NO_SHARD))
    torch.testing.assert_close(train_steps(shard_model_of_classes(Model("rows", rows=2))), expected)


def distributed_model(kind: str, mesh: DeviceMesh) -> Model:
    """Return a model whose first two layers are split over a mesh."""
    model = Model(kind, rows=8)
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    for layer in (model.first, model.second):
        layer.weight = nn.Parameter(layer.weight.values_inside)
    parallelize_module(model, mesh, plan)
    for layer in (model.first, model.second):
        local = KINDS[kind](layer.weight.detach().to_local().contiguous())
        placements = layer.weight.placements
        split = DTensor.from_local(local, mesh, placements, run_check=False)
        layer.weight = nn.Parameter(split)
    return model


@distributed(4)
def test_local_values_of_dtensors() -> None:
    """With tensor parallelism, bit by bit as under FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    results = []
    for function in (torch_fully_shard, fully_shard):
        model = shard_model_of_classes(
            distributed_model("scaled", mesh["tp"]), function, mesh=mesh["dp"]
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # it returned a view
            results.append([step_of(model, optimizer, number) for number in range(3)])
    assert_equal(*map(torch.stack, results))


VARIANTS: list[tuple[bool, dict[str, Any]]] = [  # is it checkpointed?
    (True, {}),
    (False, {"reshard_after_forward": False}),
    (False, {"reshard_after_forward": 2, "granularity": "row"}),
    (True, {"offload_policy": OffloadPolicy(), "bucket_cap_mb": 1}),
]


@pytest.mark.parametrize("kind", KINDS)
@distributed(4)
def test_variants_train_alike(kind: str) -> None:
    """Options change no value, nor does a copy, or values that come later."""
    expected = train_steps(shard_model_of_classes(Model(kind)))
    for is_checkpointed, options in VARIANTS:
        found = train_steps(
            shard_model_of_classes(Model(kind, is_checkpointed=is_checkpointed), **options)
        )
        assert all(map(torch.equal, found, expected)), options
    model = shard_model_of_classes(Model(kind))
    assert all(map(torch.equal, train_steps(copy.deepcopy(model)), expected))
    with torch.device("meta"):
        other = shard_model_of_classes(Model(kind))
    other.to_empty(device="cpu")
    with torch.inference_mode():
        other(torch.ones(2, 6))
    other.load_state_dict(get_model_state_dict(model, options=EVERYWHERE))
    assert all(map(torch.equal, train_steps(other), expected))
    assert not any("inside" in name for name in vars(model.first.weight))


@distributed(4)
def test_memory_is_not_freed_before_all_gathers_of_an_interrupted_start_have_written() -> None:
    """A class may send several tensors, each by a gather."""
    model = shard_model_of_classes(Model("rows", 8))
    lazy_init(model)
    works, left = list[Any](), list[int]()
    gather = collectives.all_gather

    def interrupted(*args: Any, **named: Any) -> Any:
        works.append(gather(*args, **named))
        if len(works) == 2:
            raise KeyboardInterrupt
        return works[-1]

    def note(tensor: Tensor, **options: Any) -> None:
        left.extend(len(work.posted) for work in works)
        free_storage(tensor, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_gather", interrupted)
        for module in (extended_gathers, full_values):
            patch.setattr(module, "free_storage", note)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(4, 6))
    assert left
    assert not any(left), "memory was freed before its messages came"
    model(torch.ones(4, 6))  # cleans up: an optimizer is built of what modules show
    other = shard_model_of_classes(Model("rows", 8))
    for ours, theirs in zip(train_steps(model), train_steps(other), strict=True):
        assert_equal(ours, theirs)


@distributed(2)
def test_what_travels_is_what_the_class_gives() -> None:
    """One byte for each element, and a scale for each row where the class sends it."""
    for kind, expected in (("scaled", [60, 80]), ("rows", [60, 40, 80, 32])):
        model = shard_model_of_classes(Model(kind, rows=8))
        lazy_init(model)
        with count_collectives() as log, torch.no_grad():
            model.first(torch.ones(2, 6))
            model.second(torch.ones(2, 10))
        biases = [64, 32]  # of an fp32 buffer, padded
        assert sorted(e.nbytes for e in log.events if e.kind == "all_gather") == sorted(
            expected + biases
        )


@pytest.mark.parametrize("kind", KINDS)
@distributed(2)
def test_scopes_and_edits(kind: str) -> None:
    """`unshard` shows the class, `unshard_params` its plain values; edits of the former raise."""
    model = shard_model_of_classes(Model(kind))
    with unshard_params(model), torch.no_grad():
        weight = model.first.weight
        assert type(weight) is nn.Parameter
        assert_equal(weight, Model(kind).first.weight.values_inside)
        weight.mul_(2)
    assert_equal(model.first.weight.full_tensor(), 2 * Model(kind).first.weight.values_inside)
    unshard(model, recurse=True)
    with torch.no_grad():
        model.first.bias.zero_()
    writeback(model, recurse=True)
    with pytest.raises(RuntimeError, match="which no flat parameter can stand for"):
        register_flat_param(model)
    shown = model.first.weight
    assert isinstance(shown, Rows) == (kind == "rows")
    with torch.no_grad():
        (shown.scale if isinstance(shown, Rows) else shown).mul_(2)
    with pytest.raises(NotImplementedError, match=r"'first.weight'.*from which edits can't be"):
        writeback(model, recurse=True)
    with pytest.warns(UserWarning, match="are lost"):
        reshard(model, recurse=True)
    assert_equal(model.first.bias.full_tensor(), torch.zeros(10))
    with pytest.raises(ValueError, match=r"'first.weight' is a .* takes rows that are divided"):
        fully_shard(Model(kind), granularity="param")


class _Side(nn.Linear):
    """Its loss is not computed from its output."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.loss = output.square().sum()
        return output.detach()


@pytest.mark.parametrize("kind", KINDS)
@distributed(2)
def test_reads_behind_no_output(kind: str) -> None:
    """A loss beside the output reads the weight again, and one of former weights is refused."""
    torch.manual_seed(0)
    model = _Side(6, 8)
    model.weight = nn.Parameter(KINDS[kind](model.weight.detach()))
    fully_shard(model)
    x = torch.ones(2, 6, requires_grad=True)
    gradients = []
    for _ in range(3):
        model(x)
        model.loss.backward()
        gradients.append(model.weight.grad.full_tensor())
        model.zero_grad()
    assert_equal(gradients[2], gradients[0])
    model(x)
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(RuntimeError, match="were written between a forward and its backward"):
        model.loss.backward()


def _kept_by(model: Model, x: Tensor) -> list[Any]:
    """Return the objects that the model computes with."""
    kept: list[Any] = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, _: kept.append(layer.weight))
        for layer in (model.first, model.second)
    ]
    model(x).sum().backward()
    for hook in hooks:
        hook.remove()
    return kept


@pytest.mark.parametrize("strategy", ShardingStrategy)
@pytest.mark.parametrize("kind", KINDS)
@distributed(1, 2)
def test_kept_objects_are_the_parameters_at_rest(kind: str, strategy: ShardingStrategy) -> None:
    """Values after a step, edits, and those of a scope; what reads inner tensors is refused."""
    x = torch.ones(2, 6)
    model = shard_model_of_classes(Model(kind), strategy=strategy)
    kept = _kept_by(model, x)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    own = [model.first.weight, model.second.weight]
    with torch.no_grad():
        for weight, param in zip(kept, own, strict=True):
            assert_equal((weight * 2).full_tensor(), (param * 2).full_tensor())
            assert_equal(weight.detach().clone().full_tensor(), param.full_tensor())
            weight.mul_(3)
            weight.data.add_(1)
    if kind == "rows":
        with pytest.raises(RuntimeError, match=r"'values' of the full parameter 'first\.weight'"):
            kept[0].values()
        with pytest.raises(RuntimeError, match=r"'scale' of the full parameter 'first\.weight'"):
            kept[0].scale  # noqa: B018 -- it raises
    before = own[0].full_tensor()
    with unshard_params(model), torch.no_grad():
        assert_equal(kept[0] * 1, before)
        kept[0].mul_(2)
        kept[0][0] = 5
        assert model.first.weight[0, 0] == 5
    assert_equal(own[0].full_tensor()[1:], 2 * before[1:])
    again = _kept_by(model, x)
    assert all(one is other for one, other in zip(kept, again, strict=True))


@pytest.mark.parametrize("strategy", ShardingStrategy)
@pytest.mark.parametrize("kind", KINDS)
@distributed(1, 2)
def test_layers_compute_with_a_step_that_was_taken_while_unsharded(
    kind: str, strategy: ShardingStrategy
) -> None:
    """A layer that is called without its unit, after a step between `unshard` and `reshard`."""
    x = torch.ones(2, 6)
    model = shard_model_of_classes(Model(kind), strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for takes_step in (True, False):
        unshard(model, recurse=True)
        if takes_step:
            model(x).sum().backward()
            optimizer.step()
        with torch.no_grad():
            found.append(model.first(x))
        reshard(model, recurse=True)
    assert_equal(*found)


@distributed(2)
def test_copies_of_models_that_keep_objects_of_classes_are_refused() -> None:
    """They would compute with values of the first model."""
    model = shard_model_of_classes(Model("rows"))
    model.kept = _kept_by(model, torch.ones(2, 6))
    with pytest.raises(RuntimeError, match=r"keeps the full parameter 'first\.weight'"):
        copy.deepcopy(model)
    del model.kept
    copy.deepcopy(model)
