"""torch.optim on FlatShards computes what it computes on the unsharded parameters."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim.optimizer import _foreach_supported_types as optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as clipping_types

from composable_shard import (
    Block,
    fully_shard,
    register_orig_params,
    shard_optimizer_state,
)
from composable_shard.comm.trace import count_collectives
from composable_shard.optim import with_local_state
from composable_shard.tensor.flat_shard import FlatShard, FlatShardOfDTensor
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed, run_ranks
from tests.tensor.test_flat_shard import (
    OddShapes,
    assert_parameters_equal,
    full,
    guard_of,
    shard,
    shard_module,
)

ELEMENTWISE: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "sgd_momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "sgd_nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": (optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    "adam_amsgrad": (optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "adamw": (optim.AdamW, {"lr": 0.1}),
    "nadam": (optim.NAdam, {"lr": 0.1, "weight_decay": 0.1}),
    "radam": (optim.RAdam, {"lr": 0.1}),
    "adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "rmsprop": (optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.9}),
    "adamax": (optim.Adamax, {"lr": 0.1, "weight_decay": 0.1}),
    "rprop": (optim.Rprop, {"lr": 0.1}),
    "asgd": (optim.ASGD, {"lr": 0.1, "t0": 2}),
    "adadelta": (optim.Adadelta, {"lr": 0.1}),
}


def pair(dtype: torch.dtype = torch.float32) -> tuple[OddShapes, OddShapes]:
    """Return a plain model and an equal one that is sharded."""
    plain, sharded = OddShapes(dtype), OddShapes(dtype)
    shard_module(sharded)
    return plain, sharded


def set_gradients(plain: nn.Module, sharded: nn.Module) -> None:
    """Give both models the same gradients, each in its own form."""
    for param, twin in zip(plain.parameters(), sharded.parameters(), strict=True):
        param.grad = torch.randn_like(param)
        assert isinstance(twin, FlatShard)
        twin.grad = FlatShard.from_full(param.grad, twin._shard_spec)


def step_both(
    plain: nn.Module,
    sharded: nn.Module,
    optimizers: tuple[optim.Optimizer, optim.Optimizer],
    num_steps: int = 5,
) -> None:
    """Step both optimizers on equal gradients."""
    for _ in range(num_steps):
        set_gradients(plain, sharded)
        for optimizer in optimizers:
            optimizer.step()


def assert_parameters_close(sharded: nn.Module, plain: nn.Module, tolerance: float) -> None:
    """Assert parameters that differ by rounding at most."""
    for param, twin in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(full(twin), param.detach(), rtol=tolerance, atol=tolerance)


# Parity


@distributed(2, 3)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizer_equals_the_unsharded_one(name: str) -> None:
    """For-loop and foreach, real and complex: exactly equal parameters after five steps."""
    kind, options = ELEMENTWISE[name]
    for dtype in (torch.float32, torch.complex64):
        for is_foreach in (False, True):
            plain, sharded = pair(dtype)
            optimizers = (
                kind(plain.parameters(), foreach=is_foreach, **options),
                kind(sharded.parameters(), foreach=is_foreach, **options),
            )
            step_both(plain, sharded, optimizers)
            assert_parameters_equal(sharded, plain)


def _whole_vectors(dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Return a plain and a sharded model whose slices are whole vector registers.

    Torch's bfloat16 and fused CPU kernels round the last few elements of a tensor, which don't
    fill a register, otherwise than the rest; a cut elsewhere moves those elements.
    """
    torch.manual_seed(1)
    plain = nn.ParameterDict({"a": torch.randn(64, 64), "b": torch.randn(4096)}).to(dtype)
    sharded = copy.deepcopy(plain)
    shard_module(sharded)
    return plain, sharded


@distributed(2)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_bfloat16_parameters_step_like_unsharded_ones(name: str) -> None:
    """Exactly, where no slice ends within a vector register."""
    kind, options = ELEMENTWISE[name]
    for is_foreach in (False, True):
        plain, sharded = _whole_vectors(torch.bfloat16)
        optimizers = (
            kind(plain.parameters(), foreach=is_foreach, **options),
            kind(sharded.parameters(), foreach=is_foreach, **options),
        )
        step_both(plain, sharded, optimizers, num_steps=3)
        assert_parameters_equal(sharded, plain)


FUSED = ["adam", "adam_amsgrad", "adamw", "adagrad", "sgd_momentum", "sgd_nesterov"]


@distributed(2)
@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizer_equals_the_unsharded_one(name: str) -> None:
    """Exactly, where no slice ends within a vector register."""
    kind, options = ELEMENTWISE[name]
    plain, sharded = _whole_vectors(torch.float32)
    optimizers = (
        kind(plain.parameters(), fused=True, **options),
        kind(sharded.parameters(), fused=True, **options),
    )
    step_both(plain, sharded, optimizers)
    assert_parameters_equal(sharded, plain)


@distributed(2, 3)
@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizer_is_within_rounding_for_odd_shapes(name: str) -> None:
    """The last elements of a slice are rounded otherwise; see `_whole_vectors`."""
    kind, options = ELEMENTWISE[name]
    plain, sharded = pair()
    optimizers = (
        kind(plain.parameters(), fused=True, **options),
        kind(sharded.parameters(), fused=True, **options),
    )
    step_both(plain, sharded, optimizers)
    assert_parameters_close(sharded, plain, 1e-6)


@distributed(2)
@pytest.mark.parametrize("name", ["adam", "adamw", "adagrad"])
def test_fused_optimizer_takes_a_tensor_lr(name: str) -> None:
    """The overload with a learning rate of its own device, for Adam and AdamW."""
    kind, _ = ELEMENTWISE[name]
    lr = 0.1 if name == "adagrad" else torch.tensor(0.1)
    plain, sharded = pair()
    optimizers = (
        kind(plain.parameters(), fused=True, lr=lr),
        kind(sharded.parameters(), fused=True, lr=lr),
    )
    step_both(plain, sharded, optimizers)
    assert_parameters_close(sharded, plain, 1e-6)


@distributed(2, 3)
@pytest.mark.parametrize("name", ["sgd_momentum", "adamw", "rprop"])
def test_optimizer_built_before_sharding_works(name: str) -> None:
    """The Parameter objects stay, so an optimizer without state needs no rebuilding."""
    kind, options = ELEMENTWISE[name]
    plain, sharded = OddShapes(), OddShapes()
    optimizers = kind(plain.parameters(), **options), kind(sharded.parameters(), **options)
    shard_module(sharded)
    step_both(plain, sharded, optimizers)
    assert_parameters_equal(sharded, plain)


def test_shards_are_on_torchs_lists_of_foreach_capable_types() -> None:
    """As DTensor is: optimizers and clipping take their fast paths by default."""
    for types in (optimizer_types, clipping_types):
        assert FlatShard in types
        assert FlatShardOfDTensor in types


@distributed(2)
def test_mixed_groups_of_sharded_and_plain_parameters_step() -> None:
    """A list may hold plain tensors where all lists do: the model has unsharded parts."""
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        plain, sharded = pair()
        torch.manual_seed(2)
        extra = nn.Parameter(torch.randn(3))
        twin = nn.Parameter(extra.detach().clone())
        optimizers = (
            optim.AdamW([*plain.parameters(), extra], **options),
            optim.AdamW([*sharded.parameters(), twin], **options),
        )
        extra.grad = twin.grad = torch.ones(3)
        step_both(plain, sharded, optimizers)
        assert_parameters_equal(sharded, plain)
        assert_equal(twin.detach(), extra.detach())


@pytest.mark.long
@distributed(2)
@pytest.mark.parametrize("is_foreach", [False, True])
def test_compiled_step_equals_the_eager_one(is_foreach: bool) -> None:
    """A compiled optimizer.step writes the slices, and the write guard learns of it."""
    torch._dynamo.reset()
    plain, sharded = pair()
    optimizers = [
        optim.AdamW(model.parameters(), lr=0.1, foreach=is_foreach) for model in (plain, sharded)
    ]
    compiled_step = torch.compile(optimizers[1].step, backend="aot_eager")
    for _ in range(3):
        before = guard_of(sharded.weight).num_writes
        set_gradients(plain, sharded)
        optimizers[0].step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the compiler's own imports
            compiled_step()
        assert guard_of(sharded.weight).num_writes > before
    assert_parameters_close(sharded, plain, 1e-5)


@distributed(2)
@pytest.mark.parametrize("name", ["sgd_momentum", "adamw", "adagrad"])
def test_optimizer_resumes_from_its_saved_state(name: str) -> None:
    """State goes through pickle and load_state_dict into a new optimizer, exactly."""
    kind, options = ELEMENTWISE[name]
    plain, sharded = pair()
    optimizers = kind(plain.parameters(), **options), kind(sharded.parameters(), **options)
    step_both(plain, sharded, optimizers, num_steps=2)
    state = pickle.loads(pickle.dumps(optimizers[1].state_dict()))
    resumed = kind(sharded.parameters(), **options)
    resumed.load_state_dict(state)
    step_both(plain, sharded, (optimizers[0], resumed), num_steps=3)
    assert_parameters_equal(sharded, plain)


@distributed(2)
def test_deep_copied_optimizer_steps_the_copies() -> None:
    """Model and optimizer copied together stay connected."""
    plain, sharded = pair()
    optimizers = optim.AdamW(plain.parameters()), optim.AdamW(sharded.parameters())
    step_both(plain, sharded, optimizers, num_steps=2)
    twin, twin_optimizer = copy.deepcopy((sharded, optimizers[1]))
    step_both(plain, twin, (optimizers[0], twin_optimizer), num_steps=2)
    assert_parameters_equal(twin, plain)
    assert not torch.equal(full(sharded.weight), full(twin.weight))


@distributed(2)
def test_zero_grad_can_keep_the_gradients() -> None:
    """`set_to_none=False` writes zeros into the sharded gradients."""
    plain, sharded = pair()
    set_gradients(plain, sharded)
    gradient = sharded.weight.grad
    optim.SGD(sharded.parameters()).zero_grad(set_to_none=False)
    assert sharded.weight.grad is gradient
    assert full(gradient).eq(0).all()


# State made before sharding


@distributed(2, 3, on_device=True)
@pytest.mark.parametrize("name", ["adagrad", "adamw", "nadam", "sgd_momentum", "asgd", "rprop"])
def test_warm_optimizer_continues_after_shard_optimizer_state(name: str) -> None:
    """Two unsharded steps, then three sharded ones, equal five unsharded ones."""
    kind, options = ELEMENTWISE[name]
    plain, sharded = OddShapes(), OddShapes()
    optimizers = kind(plain.parameters(), **options), kind(sharded.parameters(), **options)
    for _ in range(2):
        for param, twin in zip(plain.parameters(), sharded.parameters(), strict=True):
            param.grad = torch.randn_like(param)
            twin.grad = param.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for param in sharded.parameters():
        param.grad = None
    shard_module(sharded)
    shard_optimizer_state(optimizers[1])
    step_both(plain, sharded, optimizers, num_steps=3)
    assert_parameters_equal(sharded, plain)


@distributed(2)
def test_shard_optimizer_state_is_idempotent_and_local() -> None:
    """The second call changes nothing, and no call communicates."""
    model = OddShapes()
    optimizer = optim.Adagrad(model.parameters())
    shard_module(model)
    with count_collectives() as log:
        shard_optimizer_state(optimizer)
        before = {id(value) for state in optimizer.state.values() for value in state.values()}
        shard_optimizer_state(optimizer)
    after = {id(value) for state in optimizer.state.values() for value in state.values()}
    assert before == after
    assert not log.events


@distributed(2)
def test_state_of_single_element_parameters_is_told_from_step_counts() -> None:
    """A 0-dim parameter's `sum` is sharded, its 0-dim `step` is not."""
    for with_others in (True, False):
        model = OddShapes() if with_others else nn.ParameterDict({"scalar": torch.randn(())})
        optimizer = optim.Adagrad(model.parameters())
        shard_module(model)
        shard_optimizer_state(optimizer)
        state = optimizer.state[model.get_parameter("scalar")]
        assert isinstance(state["sum"], FlatShard)
        assert type(state["step"]) is torch.Tensor


def _failed_state_sharding() -> str:
    model = OddShapes()
    del model.empty  # Adafactor itself divides by its size
    optimizer = optim.Adafactor(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    for param in model.parameters():
        param.grad = None
    shard_module(model)
    before = [dict(state) for state in optimizer.state.values()]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- the text is what is returned
        shard_optimizer_state(optimizer)
    after = [dict(state) for state in optimizer.state.values()]
    assert all(a[key] is b[key] for a, b in zip(after, before, strict=True) for key in b)
    return str(caught.value)


def test_state_of_another_shape_raises_and_changes_nothing() -> None:
    """Adafactor's row statistics can't be cut like the parameter; all ranks say the same."""
    first, second = run_ranks(2, _failed_state_sharding)
    assert first == second
    assert first == (
        "the state 'row_var' of 'weight' (7, 15) has shape (7, 1): it can't be cut like the "
        'parameter. Use an elementwise optimizer, or granularity="param".'
    )


def _warm(**options: Any) -> tuple[OddShapes, optim.Optimizer]:
    """Return a sharded model whose optimizer still has full-size state."""
    model = OddShapes()
    optimizer = optim.Adam(model.parameters(), lr=0.1, **options)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    for param in model.parameters():
        param.grad = None
    shard_module(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return model, optimizer


@distributed(2)
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_full_size_state_and_gradients_are_whole_values(options: dict[str, bool]) -> None:
    """State made before sharding, and plain gradients, step as on the plain model."""
    torch.manual_seed(0)
    model, optimizer = _warm(**options)
    plain = copy.deepcopy(optimizer)
    for group in plain.param_groups:
        group["params"] = [nn.Parameter(full(param).clone()) for param in group["params"]]
    states = [optimizer.state[param] for param in model.parameters()]
    plain.state.clear()
    for param, state in zip(plain.param_groups[0]["params"], states, strict=True):
        plain.state[param] = copy.deepcopy(state)
        param.grad = torch.ones_like(param)
    first = next(iter(model.parameters()))
    first.grad = torch.ones(first.shape)
    for each in (optimizer, plain):
        each.step()
        each.step()
    for param, expected in zip(model.parameters(), plain.param_groups[0]["params"], strict=True):
        assert_equal(full(param), expected.detach())


# Optimizers that need whole tensors


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon"])
@distributed(2, 3)
def test_optimizer_that_needs_whole_tensors_is_right(name: str) -> None:
    """As on the plain matrix, for three steps."""
    torch.manual_seed(0)
    whole = torch.randn(7, 15)
    plain, model = (nn.ParameterDict({"weight": whole.clone()}) for _ in range(2))
    shard_module(model)
    target = torch.randn(7, 15)
    for each in (plain, model):
        (param,) = each.parameters()
        optimizer: optim.Optimizer = getattr(optim, name)([param], lr=0.1)
        for _ in range(3):
            param.grad = torch.zeros_like(param)
            param.grad.copy_((full(param) - target) * 2)
            optimizer.step(lambda: 1.0)
    (param,), (expected,) = model.parameters(), plain.parameters()
    torch.testing.assert_close(full(param), expected.detach(), rtol=1e-4, atol=1e-5)


@distributed(2)
def test_an_optimizer_of_sparse_gradients_raises() -> None:
    """As torch's own does."""
    model = nn.ParameterDict({"weight": torch.randn(7, 15)})
    shard_module(model)
    (param,) = model.parameters()
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="SparseAdam does not support dense gradients"):
        optim.SparseAdam([param]).step()


# Clipping


@distributed(2, 3)
@pytest.mark.parametrize("is_foreach", [False, True, None])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_total_norm_is_that_of_the_unsharded_gradients(
    norm_type: float, is_foreach: bool | None
) -> None:
    """For several orders, with shards that are empty on some ranks."""
    plain, sharded = pair()
    for model in (plain, sharded):
        del model.empty  # torch itself has no inf-norm of an empty tensor
    set_gradients(plain, sharded)
    norms = [
        get_total_norm([param.grad for param in model.parameters()], norm_type, foreach=is_foreach)
        for model in (plain, sharded)
    ]
    assert not isinstance(norms[1], FlatShard)
    assert norms[1].shape == ()
    torch.testing.assert_close(norms[1], norms[0])


@distributed(2, 3, on_device=True)
@pytest.mark.parametrize("is_foreach", [False, True, None])
def test_clip_grad_norm_scales_like_the_unsharded_one(is_foreach: bool | None) -> None:
    """torch's own function clips sharded gradients."""
    plain, sharded = pair()
    set_gradients(plain, sharded)
    for model in (plain, sharded):
        clip_grad_norm_(model.parameters(), 1.0, foreach=is_foreach)
    for param, twin in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(full(twin.grad), param.grad)


@distributed(2)
def test_total_norm_of_one_dtype_is_one_collective() -> None:
    """However many gradients there are."""
    plain, sharded = pair()
    set_gradients(plain, sharded)
    with count_collectives() as log:
        clip_grad_norm_(sharded.parameters(), 1.0)
    assert [event.kind for event in log.events] == ["all_reduce"]


@pytest.mark.fast
@distributed(2)
def test_clip_grad_value_equals_the_unsharded_one() -> None:
    """An elementwise bound needs no communication and is exact."""
    plain, sharded = pair()
    set_gradients(plain, sharded)
    for model in (plain, sharded):
        clip_grad_value_(model.parameters(), 0.3)
    for param, twin in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert_equal(full(twin.grad), param.grad)


@distributed(2)
def test_nan_on_one_rank_makes_the_total_norm_nan_everywhere() -> None:
    """Also for the inf-norm, whose reduction compares."""
    for norm_type in (2.0, float("inf")):
        gradient = shard(torch.ones(7, 15))
        if dist.get_rank() == 1:
            gradient.to_local()[0] = float("nan")
        assert get_total_norm([gradient], norm_type).isnan()


# Gradient scaling


def _scaled_steps(model: nn.Module, scaler: GradScaler, **options: Any) -> Iterator[float]:
    optimizer = optim.AdamW(model.parameters(), lr=0.1, **options)
    for bad_step in (False, True, False):
        for param in model.parameters():
            param.grad = torch.ones_like(param) * 2
        weight = model.get_parameter("weight")
        if bad_step and isinstance(weight.grad, FlatShard):
            if dist.get_rank() == 1:
                weight.grad.to_local()[0] = float("inf")
        elif bad_step:
            assert weight.grad is not None
            weight.grad[0] = float("inf")
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        yield scaler.get_scale()


@distributed(2, on_device=True)
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_inf_on_one_rank_skips_the_step_on_all(options: dict[str, bool]) -> None:
    """GradScaler decides alike everywhere: same scale, same parameters as unsharded."""
    plain, sharded = pair()
    for model in (plain, sharded):
        del model.empty
    scales = [
        list(_scaled_steps(model, GradScaler("cpu", init_scale=4.0), **options))
        for model in (plain, sharded)
    ]
    assert scales[0] == scales[1] == [4.0, 2.0, 2.0]
    assert_parameters_equal(sharded, plain)


# --- state that is a tensor subclass ---

BLOCK = 8


class Coded(torch.Tensor):
    """Numbers in int8 with a scale for each block, with the ops that torchao's states have."""

    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Coded:
        self = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        self.codes, self.scale = codes, scale
        return self

    def decoded(self) -> torch.Tensor:
        return (self.codes.view(-1, BLOCK) * self.scale[:, None]).view(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], (self.dtype,)

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, torch.Tensor], context: Any, shape: Any, stride: Any
    ) -> Coded:
        assert context == (parts["scale"].dtype,)
        return Coded(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if func is aten.copy_.default and isinstance(args[0], Coded):
            blocks = args[1].reshape(-1, BLOCK)
            args[0].scale.copy_(blocks.abs().amax(1) / 127)
            codes = (blocks / (args[0].scale[:, None] + 1e-30)).round()
            args[0].codes.copy_(codes.view(args[0].shape))
            return args[0]
        if func is aten.detach.default:
            return Coded(args[0].codes, args[0].scale)
        if func in (aten.clone.default, aten._to_copy.default):
            return Coded(args[0].codes.clone(), args[0].scale.clone())
        assert func in (aten.lerp.Scalar, aten.copy_.default), func
        return func(*(each.decoded() if isinstance(each, Coded) else each for each in args))


class LowBit(optim.Optimizer):
    """Makes its state in the way of torchao's classes, which know no FlatShards."""

    def _new_buffer(self, param: torch.Tensor, signed: bool) -> torch.Tensor:
        if param.numel() < 2 * BLOCK:
            return torch.zeros_like(param)
        scale = torch.zeros(param.numel() // BLOCK)
        return Coded(torch.zeros(param.shape, dtype=torch.int8), scale)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override] # no closure
        for param in self.param_groups[0]["params"]:
            if param.grad is None:  # another rank has all of it
                continue
            state = self.state[param]
            if not state:
                state["mean"] = self._new_buffer(param, True)
            mean = state["mean"].lerp(param.grad, 0.1)
            state["mean"].copy_(mean)
            param.sub_(mean)


@distributed(2)
def test_state_of_a_subclass_of_whole_and_flat_parameters() -> None:
    """An owner's state is 1-D as others' is."""
    torch.manual_seed(0)
    plain = nn.Linear(8, 6, bias=False)
    models = [copy.deepcopy(plain) for _ in range(2)]
    fully_shard(models[0], granularity="param")
    fully_shard(models[1], granularity=Block(BLOCK), use_orig_params=False)
    kind = with_local_state(LowBit)
    optimizers = [kind(model.parameters(), {}) for model in models]
    optimizers.append(LowBit(plain.parameters(), {}))
    for model, optimizer in zip((*models, plain), optimizers, strict=True):
        model(torch.ones(1, 8)).square().sum().backward()
        optimizer.step()
    register_orig_params(models[1])
    for model in models:
        assert_equal(model.weight.full_tensor(), plain.weight.detach())


@distributed(2)
def test_state_of_a_subclass_is_sharded() -> None:
    """Codes and scales are those of the unsharded model, block by block."""
    torch.manual_seed(0)
    plain = nn.Linear(8, 6, bias=False)
    sharded = fully_shard(copy.deepcopy(plain), granularity=Block(BLOCK))
    optimizers = [
        kind([model.weight], {})
        for kind, model in ((LowBit, plain), (with_local_state(LowBit), sharded))
    ]
    for step in range(3):
        for model, optimizer in zip((plain, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(1, 8) * step).square().sum().backward()
            optimizer.step()
    assert_equal(sharded.weight.full_tensor(), plain.weight.detach())
    expected, state = (each.state_dict()["state"][0]["mean"] for each in optimizers)
    assert type(state.to_local()) is Coded
    start, end = state._shard_spec.local_range
    assert_equal(state.to_local().codes, expected.codes.view(-1)[start:end])
    assert_equal(state.to_local().scale, expected.scale[start // BLOCK : end // BLOCK])
