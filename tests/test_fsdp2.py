"""`composable_shard.fsdp2`: FSDP2's names, with which a script ports by its import line."""

from __future__ import annotations

import copy
import inspect
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as torch_state_dict
import torch.distributed.fsdp as torch_fsdp2
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from composable_shard import fsdp2, get_handles, get_pending_gradients
from composable_shard.flat_param import FullState
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.harness.versions import needs_torch
from tests.programs.models import (
    Net,
    Twins,
    assert_at_rest,
    collectives_of,
    full_tensor_of,
    loss_of,
    replica_mesh,
    seeded,
    train_twins,
)

METHODS = [name for name in vars(torch_fsdp2.FSDPModule) if not name.startswith("_")]


@dataclass(frozen=True)
class _PolicyOf2p15(MixedPrecisionPolicy):
    """Torch's policy, with the option that it has since 2.15."""

    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None


@distributed(2)
def test_the_policy_of_a_newer_torch_is_taken_unless_it_chooses_by_parameter() -> None:
    """Its further option has a default."""
    fsdp2.fully_shard(nn.Linear(3, 5), mp_policy=_PolicyOf2p15(torch.bfloat16))
    policy = _PolicyOf2p15(torch.bfloat16, param_dtype_override_fn=lambda param: None)
    with pytest.raises(NotImplementedError, match="dtypes are chosen by unit"):
        fsdp2.fully_shard(nn.Linear(3, 5), mp_policy=policy)


@pytest.mark.parametrize("name", METHODS)
def test_each_method_takes_the_same_arguments(name: str) -> None:
    """By name, in order, with the same defaults."""
    theirs, ours = (
        [
            (each.name, each.kind, each.default)
            for each in inspect.signature(method).parameters.values()
        ]
        for method in (getattr(torch_fsdp2.FSDPModule, name), getattr(fsdp2.FSDPModule, name))
    )
    assert ours == theirs


OWN = {"FSDPModule", "UnshardHandle", "install"}
DEPRECATED = "submodules"


@pytest.mark.parametrize("name", sorted({*fsdp2.__all__} - OWN))
def test_each_function_takes_the_same_arguments(name: str) -> None:
    """But for those that torch has deprecated; further ones come after them."""
    home = torch_fsdp2 if hasattr(torch_fsdp2, name) else torch_state_dict
    theirs, ours = (
        [each for each in inspect.signature(getattr(module, name)).parameters if each != DEPRECATED]
        for module in (home, fsdp2)
    )
    assert ours[: len(theirs)] == theirs


# --- torchtitan's way to shard a Llama ---

DIM, NUM_HEADS, WORDS = 16, 4, 32


class _LlamaAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            each(x).unflatten(-1, (-1, DIM // NUM_HEADS)).transpose(1, 2)
            for each in (self.wq, self.wk, self.wv)
        ]
        output = scaled_dot_product_attention(*heads, is_causal=True)
        return self.wo(output.transpose(1, 2).flatten(2))


class _LlamaFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, 3 * DIM, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class _LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = _LlamaAttention(), _LlamaFeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class _Llama(nn.Module):
    checkpoints = False

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleDict({str(index): _LlamaBlock() for index in range(2)})
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        # A clone: of the AsyncCollectiveTensor that tensor parallelism gives, a compiled layer
        # returns a gradient of the wrong class, also in a plain model.
        x = self.tok_embeddings(words).clone()
        for layer in self.layers.values():
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.output(self.norm(x))


def _apply_tp(model: _Llama, mesh: DeviceMesh) -> None:
    """Split as torchtitan's `parallelize.py` does."""
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=True
            ),
            "norm": SequenceParallel(use_local_output=False),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for layer in model.layers.values():
        plan: dict[str, Any] = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        plan |= {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}
        parallelize_module(layer, mesh, plan)


def _apply_fsdp(api: Any, model: _Llama, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Shard as torchtitan's `parallelize.py` does."""
    policy = api.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    config: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    api.fully_shard(model.tok_embeddings, **config, reshard_after_forward=True)
    for layer in model.layers.values():
        api.fully_shard(layer, **config, reshard_after_forward=True)
    api.fully_shard([model.norm, model.output], **config, reshard_after_forward=False)
    api.fully_shard(model, **config)
    blocks = list(model.layers.values())
    model.tok_embeddings.set_modules_to_forward_prefetch([blocks[0]])
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        chosen = [model.norm, model.output] if following is None else [following]
        block.set_modules_to_forward_prefetch(chosen)
    model.output.set_modules_to_backward_prefetch([blocks[-1]])
    for module in model.modules():
        if isinstance(module, api.FSDPModule):
            module.set_gradient_divide_factor(2.0)


def _train_llama(
    api: Any, num_tp: int, dtype: torch.dtype | None, *, clips: bool
) -> tuple[list[Tensor], dict[str, Any]]:
    """Run a training script that knows FSDP2 alone; return losses, gradients and the state."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, num_tp), mesh_dim_names=("dp_shard", "tp"))
    model = _Llama()
    model.checkpoints = True
    if num_tp > 1:
        _apply_tp(model, mesh["tp"])
        for layer in model.layers.values() if api is fsdp2 else ():
            layer.compile(backend="aot_eager", fullgraph=True)
    _apply_fsdp(api, model, mesh["dp_shard"], dtype)
    assert isinstance(model, api.FSDPModule)
    assert isinstance(model, _Llama)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    results: list[Tensor] = []
    for step in range(2):
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            model.set_is_last_backward(microbatch == 1)
            model.unshard()
            generator = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("dp_shard"))
            words = torch.randint(WORDS, (2, 9), generator=generator)
            logits = model(words[:, :-1]).float()
            loss = cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            loss.backward()
            results.append(loss.detach())
        if clips:
            results.append(full_tensor_of(clip_grad_norm_(model.parameters(), 0.5)))
        results += [full_tensor_of(param.grad) for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    full = StateDictOptions(full_state_dict=True)
    moments = torch_state_dict.get_optimizer_state_dict(model, optimizer, options=full)
    return results, {**get_model_state_dict(model, options=full), **moments["state"]}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@distributed(2)
def test_a_script_trains_bitwise_alike_by_its_import_line(dtype: torch.dtype | None) -> None:
    """Losses, gradients, parameters and optimizer state; bf16 gradients are reduced in fp32."""
    _compare_scripts(1, dtype, clips=False)


@distributed(2)
def test_a_script_that_clips_trains_alike_by_its_import_line() -> None:
    """To 1e-6: the squares of the norm are added up in another order."""
    _compare_scripts(1, None)


@pytest.mark.long
@distributed(4)
def test_a_tensor_parallel_script_trains_alike_by_its_import_line() -> None:
    """With a sequence-parallel Llama on two times two ranks; FSDP2's layers are not compiled."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    _compare_scripts(2, None)


def _compare_scripts(num_tp: int, dtype: torch.dtype | None, *, clips: bool = True) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        (theirs, their_state), (ours, our_state) = (
            _train_llama(api, num_tp, dtype, clips=clips) for api in (torch_fsdp2, fsdp2)
        )
    tolerance = 1e-6 if clips else 0.0
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
    assert list(our_state) == list(their_state)
    torch.testing.assert_close(our_state, their_state, rtol=0, atol=tolerance)


# --- each by itself ---


@distributed(2)
def test_the_norm_of_torchs_clipping_can_be_made_whole() -> None:
    """As FSDP2's scripts do; else it is a plain tensor: copied, saved and used as one."""
    models = [_shard_net(seeded(Net)), torch_fsdp2.fully_shard(seeded(Net))]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    for step in range(3):
        for model in models:
            loss_of(model, step=step).backward()
        norm, expected = (clip_grad_norm_(model.parameters(), 0.1) for model in models)
        torch.testing.assert_close(norm.full_tensor(), expected.full_tensor())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs.full_tensor())
    file = io.BytesIO()
    torch.save(norm, file)
    file.seek(0)
    for value in (norm.full_tensor(), norm * 1, copy.deepcopy(norm), norm.cpu(), torch.load(file)):
        assert type(value) is Tensor
        assert_equal(value, norm.full_tensor())
    assert repr(norm) == repr(norm.full_tensor())
    total = norm.clone()
    dist.all_reduce(total)
    assert total.item() == 2 * norm.item()


def _shard_net(model: nn.Module, **options: Any) -> Any:
    for block in model.blocks:
        fsdp2.fully_shard(block, **options)
    return fsdp2.fully_shard(model, **options)


@distributed(2)
def test_a_forward_ends_unshard() -> None:
    """The next forward frees what `unshard` gathered, by its policy; so does `reshard`."""
    twins = Twins(Net, _shard_net, reshard_after_forward=True)
    model, optimizers = twins.sharded, twins.optimizers()
    (handle,) = get_handles(model.blocks[0])[:1]
    for is_async in (False, True):
        work = model.blocks[0].unshard(async_op=is_async)
        assert isinstance(work, fsdp2.UnshardHandle) is is_async
        log = collectives_of(lambda: loss_of(model).backward())
        assert log.count("all_gather") == 2 * 4 - 1
        assert handle.full.state is FullState.FREED
        twins.backward(twins.plain, loss_of(twins.plain))
        twins.assert_equal_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        twins.assert_equal_parameters()
    model.blocks[0].unshard()
    assert isinstance(model.blocks[0].up.weight @ torch.ones(15), Tensor)
    model.blocks[0].reshard()
    assert_at_rest(model)


class _Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(x), self.head.weight)


@distributed(2)
def test_a_module_of_a_unit_may_be_read_without_its_call() -> None:
    """As a fused loss reads the head's weight; the unit keeps it for the backward, as asked for."""
    model, plain = seeded(_Tail), seeded(_Tail)
    fsdp2.fully_shard([model.norm, model.head], reshard_after_forward=False)
    fsdp2.fully_shard(model)
    for step in range(2):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        for each in (model, plain):
            each(x).square().mean().backward()
        for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
            if other.grad is not None:
                assert_equal(ours.grad.full_tensor(), other.grad)
    assert_at_rest(model)


@distributed(2)
def test_copies_and_slices() -> None:
    """Copies have the methods too; a slice of a container is a plain container."""
    model = _shard_net(seeded(Net))
    expected = loss_of(model)
    twin = copy.deepcopy(model)
    assert isinstance(twin, fsdp2.FSDPModule)
    assert type(twin) is type(model)
    assert_equal(loss_of(twin), expected)
    chain = fsdp2.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    assert type(chain[:2]) is nn.Sequential
    assert chain[0].weight is next(chain.parameters())


def _train_with_hook(twins: Twins, change: Callable[[Tensor], object]) -> None:
    """Train three steps; the plain twin's mean gradients are changed as the hook changes ours."""
    for module in twins.sharded.modules():
        if isinstance(module, fsdp2.FSDPModule):
            module.set_all_reduce_hook(change)
    optimizers = twins.optimizers()
    for step in range(3):
        for model in twins:
            twins.backward(model, loss_of(model, step=step))
        for param in twins.plain.parameters():
            change(param.grad)
        twins.assert_equal_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        twins.assert_equal_parameters()


@pytest.mark.parametrize("shape", [None, (2, 1)])
@distributed(2)
def test_all_reduce_hook_gets_the_mean(shape: tuple[int, int] | None) -> None:
    """What it makes of the mean gradient is taken by each step; also where copies are reduced."""
    mesh = None if shape is None else replica_mesh(*shape)
    _train_with_hook(
        Twins(Net, _shard_net, mesh=mesh), lambda gradient: gradient.clamp_(-1e-3, 1e-3)
    )


def _shard_child_and_nothing(model: nn.Module) -> None:
    fsdp2.fully_shard(model[0])
    fsdp2.fully_shard(model)


@distributed(2)
def test_all_reduce_hook_of_a_unit_without_parameters() -> None:
    """It has nothing to reduce; torchtitan sets the hook on all units."""
    twins = Twins(lambda: nn.Sequential(nn.Linear(5, 3)), _shard_child_and_nothing)
    assert isinstance(twins.sharded, fsdp2.FSDPModule)
    _train_with_hook(twins, lambda gradient: gradient.mul_(0.5))


@distributed(2)
def test_all_reduce_hook_of_one_rank_is_refused() -> None:
    """It would never be called; the remedy of the error keeps the copies equal."""
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))["shard"]
    twins = Twins(Net, _shard_net, mesh=alone)
    with pytest.raises(NotImplementedError, match=r"would never be called.* reduce gradients afte"):
        twins.sharded.set_all_reduce_hook(lambda gradient: gradient.zero_())
    optimizers = twins.optimizers()
    for step in range(3):
        for model in twins:
            twins.backward(model, loss_of(model, step=step))
        for param in twins.sharded.parameters():
            dist.all_reduce(param.grad.to_local())
            param.grad.mul_(0.5)
        twins.assert_equal_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        twins.assert_equal_parameters()


@distributed(2)
def test_a_run_resumes_by_torchs_checkpoints_without_options(tmp_path: Path) -> None:
    """`dcp.load` finds state to load into in an optimizer that has not stepped, as in torch."""
    model = fsdp2.fully_shard(seeded(Net))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    saved = fsdp2.get_optimizer_state_dict(model, optimizer)
    dcp.save({"optimizer": saved}, checkpoint_id=tmp_path / "dcp")
    fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"optimizer": fsdp2.get_optimizer_state_dict(model, fresh)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    fsdp2.set_optimizer_state_dict(model, fresh, state["optimizer"])
    for param in model.parameters():
        moment = optimizer.state[param]["exp_avg"].to_local()
        assert_equal(fresh.state[param]["exp_avg"].to_local(), moment, "exp_avg")


@pytest.mark.parametrize("from_first", [False, True])
@distributed(2)
def test_whole_state_of_model_and_optimizer_moves_to_another_model(
    from_first: bool, tmp_path: Path
) -> None:
    """Files of rank 0 as in FSDP2's example, loaded; then further steps, bit by bit."""
    saved: Any = fsdp2.StateDictOptions(full_state_dict=True, cpu_offload=True)
    loaded: Any = fsdp2.StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
    model, other = _shard_net(seeded(Net)), _shard_net(seeded(Net, seed=1))
    optimizer, fresh = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other))

    def step(each: nn.Module, its_optimizer: torch.optim.Optimizer) -> None:
        loss_of(each).backward()
        its_optimizer.step()
        its_optimizer.zero_grad()

    step(model, optimizer)
    states = (
        fsdp2.get_model_state_dict(model, options=saved),
        fsdp2.get_optimizer_state_dict(model, optimizer, options=saved),
    )
    path = tmp_path / "whole.pt"
    if dist.get_rank() == 0:
        torch.save(states, path)
    dist.barrier()
    if dist.get_rank() == 0 or not from_first:
        states = torch.load(path, weights_only=True)
    fsdp2.set_model_state_dict(other, states[0], options=loaded)
    fsdp2.set_optimizer_state_dict(other, fresh, states[1], options=loaded)
    for _ in range(2):
        step(model, optimizer)
        step(other, fresh)
    for param, same in zip(model.parameters(), other.parameters(), strict=True):
        assert_equal(same.full_tensor(), param.full_tensor())


@distributed(2)
def test_a_model_of_meta_ranks_takes_the_state_of_the_first() -> None:
    """As RL trainers load: rank 0 has values, the others meta tensors, in model and state."""
    plain = seeded(Net)
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = seeded(Net)
    state = model.state_dict()
    _shard_net(model)
    if dist.get_rank() > 0:
        model.to_empty(device="cpu")
    options: Any = fsdp2.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    fsdp2.set_model_state_dict(model, state, options=options)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    for each in (model, plain):
        loss_of(each).backward()
    expected = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        assert_equal(param.full_tensor(), expected[name], name)


class _App:
    """What `torch.distributed.checkpoint` saves and loads, as its recipe has it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return both states."""
        model, optimizer = torch_state_dict.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load both states."""
        torch_state_dict.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


@distributed(2)
def test_the_recipe_of_distributed_checkpoints(tmp_path: Path) -> None:
    """Torch's own functions, whose import lines stay: saved, loaded, and a further step."""
    apps = []
    for seed in (0, 1):
        model = _shard_net(seeded(Net, seed=seed))
        apps.append(_App(model, torch.optim.AdamW(model.parameters(), lr=0.1)))
    for step in range(3):
        for app in apps:
            loss_of(app.model).backward()
            app.optimizer.step()
            app.optimizer.zero_grad()
        if step == 1:
            dcp.save({"app": apps[0]}, checkpoint_id=tmp_path)
            dcp.load({"app": apps[1]}, checkpoint_id=tmp_path)
    for param, same in zip(apps[0].model.parameters(), apps[1].model.parameters(), strict=True):
        assert_equal(same.full_tensor(), param.full_tensor())


@distributed(2)
def test_no_sync_is_a_method_too() -> None:
    """FSDP1's and DDP's, which accelerate's accumulation looks for."""
    model = _shard_net(seeded(Net))
    with model.no_sync():
        loss_of(model).backward()
    assert get_pending_gradients(model)


@distributed(2)
def test_placements_become_granularities() -> None:
    """`Shard(0)` cuts between rows, other dims anywhere.

    After what is refused the same model is sharded right, and trains.
    """
    twins = Twins(Net, lambda model: None)
    for dim in (2, -3):
        with pytest.raises(ValueError, match=r"returned Shard\(dim=-?\d\) for a parameter of sh"):
            _shard_net(twins.sharded, shard_placement_fn=lambda param, dim=dim: Shard(dim))
    _shard_net(
        twins.sharded, shard_placement_fn=lambda param: Shard(0) if param.ndim == 2 else None
    )
    assert twins.sharded.inp.weight.to_local().numel() % 5 == 0
    train_twins(twins)


@needs_torch("2.13", "before, FSDP2 has no DataParallelMeshDims")
@distributed(2)
def test_mesh_axes_by_name() -> None:
    """`dp_mesh_dims` names the axes; replicas alone are `NO_SHARD`."""
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("dp", "fsdp", "tp"))
    dims = fsdp2.DataParallelMeshDims
    assert dims is torch_fsdp2.DataParallelMeshDims
    cases = [(dims("fsdp"), 2), (dims("fsdp", "dp"), 2), (dims(replicate="fsdp"), 1)]
    for given, size in cases:
        model = fsdp2.fully_shard(nn.Linear(3, 5), mesh=mesh, dp_mesh_dims=given)
        assert get_handles(model)[0].shard_group.size == size
    with pytest.raises(ValueError, match="Pass mesh= too"):
        fsdp2.fully_shard(nn.Linear(3, 5), dp_mesh_dims=dims(shard="fsdp"))
    spread = nn.Linear(3, 5)
    spread.weight = nn.Parameter(distribute_tensor(spread.weight, mesh))
    with pytest.raises(NotImplementedError, match="'weight' is a DTensor on"):
        fsdp2.fully_shard(spread, mesh=mesh, dp_mesh_dims=dims(shard=("dp", "fsdp")))
    turned = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
    with pytest.raises(NotImplementedError, match=r"'weight' is a plain tensor.*axes \['tp'\]"):
        fsdp2.fully_shard(nn.Linear(3, 5), mesh=turned, dp_mesh_dims=dims(shard="fsdp"))


@needs_torch("2.13", "before, FSDP2 has no DataParallelMeshDims")
@pytest.mark.parametrize("axes", ["shards", "replicas", "both"])
@distributed(4)
def test_several_axes_of_data_parallelism_become_one(axes: str) -> None:
    """As torchtitan flattens its shards and its context-parallel ranks: DDP's steps."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "cp"))
    dims = fsdp2.DataParallelMeshDims
    given, size = {
        "shards": (dims(shard=("replicate", "shard", "cp")), 4),
        "replicas": (dims(replicate=("replicate", "shard", "cp")), 1),
        "both": (dims(shard=("shard", "cp"), replicate="replicate"), 2),
    }[axes]
    twins = Twins(Net, _shard_net, mesh=mesh, dp_mesh_dims=given)
    assert {handle.shard_group.size for handle in get_handles(twins.sharded)} == {size}
    train_twins(twins, num_steps=3)


@distributed(2)
def test_what_has_no_counterpart_says_so() -> None:
    """Settings of speed and memory warn, what would change values raises."""
    model: Any = fsdp2.fully_shard(nn.Linear(3, 5))
    for name, value in (
        ("set_symm_mem_for_comm", "NCCL"),
        ("set_all_gather_layout", None),
        ("set_all_gather_output_fn", None),
        ("set_reduce_scatter_input_fn", None),
        ("set_separate_reduce_scatter_group", True),
        ("set_reduce_scatter_max_input_buffers", 2),
        ("set_allocate_memory_from_process_group_for_comm", True),
        ("set_force_sum_reduction_for_comms", True),
        ("set_post_optim_event", None),
    ):
        with pytest.warns(UserWarning, match=f"{name} changes nothing here"):
            getattr(model, name)(value)
    for name, *arguments in (
        ("set_custom_all_gather", None),
        ("set_custom_reduce_scatter", None),
        ("set_manual_backward_finalization", True),
        ("finalize_backward",),
        ("set_keep_unsharded_storage", True),
    ):
        with pytest.raises(NotImplementedError):
            getattr(model, name)(*arguments)
    model.set_keep_unsharded_storage(False)
    with pytest.raises(ValueError, match="expected modules that fully_shard was called on"):
        model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])
    fsdp2.share_comm_ctx([model])
    model.reset_iter_state()
