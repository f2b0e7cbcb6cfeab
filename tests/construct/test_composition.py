"""Sharding together with what else acts on modules: checkpoints, compilers, meshes, copies."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed._composable import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from composable_shard import (
    FlatShard,
    MixedPrecisionPolicy,
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    get_handles,
    get_states,
    reshard,
    unshard,
    unshard_params,
)
from composable_shard.comm.trace import count_collectives
from tests.harness.assertions import assert_equal
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs.models import (
    Layer,
    Net,
    Twins,
    assert_at_rest,
    full_tensor_of,
    loss_of,
    rank_input,
    shard_blocks,
    train_twins,
)

# --- activation checkpointing ---


class _Inside(Layer):
    """Checkpoints a part of itself, so recomputation passes no hook of the unit."""

    is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self._hidden, x, use_reentrant=self.is_reentrant)
        return x + self.down(hidden)

    def _hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x))


class _Whole(Layer):
    """Checkpoints all of itself: every one of its parameters is used in recomputation only."""

    is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.is_reentrant)


class _Around(Net):
    """Checkpoints each block from outside, so recomputation runs the unit's hooks."""

    is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return self.out(x)


class _AroundSeveral(_Around):
    """Checkpoints two units, and a layer of the root between them, together."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Linear(15, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self._first, self.inp(x), use_reentrant=self.is_reentrant)
        return self.out(self.blocks[2](x))

    def _first(self, x: Tensor) -> Tensor:
        x = self.between(self.blocks[0](x)) * x
        return self.blocks[1](x)


class _RootInsideAndOutside(_Around):
    """Uses a layer of the root in a checkpoint, and again after it."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self._first, self.inp(x), use_reentrant=self.is_reentrant)
        return self.out(self.blocks[2](x))

    def _first(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.out(self.blocks[0](x)).sum(-1, keepdim=True) * x)


class _Nested(_Around):
    """Checkpoints the whole, with checkpointed units in it."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self._all, self.inp(x), use_reentrant=self.is_reentrant)
        return self.out(x)

    def _all(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return x


def _with_blocks(kind: type[Layer]) -> Net:
    net = Net()
    net.blocks = nn.ModuleList(kind() for _ in range(3))
    return net


CHECKPOINTED: dict[str, Callable[[], nn.Module]] = {
    "inside": partial(_with_blocks, _Inside),
    "whole": partial(_with_blocks, _Whole),
    "around": _Around,
    "around several": _AroundSeveral,
    "inside and outside": _RootInsideAndOutside,
    "nested": _Nested,
}


@pytest.mark.parametrize(
    *pairwise(reshard_after_forward=[None, False], is_early=[True, False], where=CHECKPOINTED)
)
@distributed(2, on_device=True)
def test_checkpointing_changes_nothing(
    where: str, is_early: bool, reshard_after_forward: bool | None
) -> None:
    """Non-reentrant, with and without leaving the recomputation as soon as it may."""
    twins = Twins(CHECKPOINTED[where], shard_blocks, reshard_after_forward=reshard_after_forward)
    with set_checkpoint_early_stop(is_early):
        train_twins(twins)


def _make_reentrant(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    for module in model.modules():
        module.is_reentrant = True  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("where", CHECKPOINTED)
@distributed(2)
def test_reentrant_checkpointing_changes_nothing(where: str) -> None:
    """Its recomputation runs a backward within the backward."""
    twins = Twins(partial(_make_reentrant, CHECKPOINTED[where]), shard_blocks)
    with warnings.catch_warnings():
        # What reentrant checkpointing says about being nested; the gradients are right.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        train_twins(twins)


@pytest.mark.fast
@distributed(2)
def test_checkpointing_gathers_each_unit_twice() -> None:
    """The recomputation's gather serves the backward as well."""
    model = _Around()
    shard_blocks(model)
    loss_of(model, 0).backward()
    with count_collectives() as log:
        loss_of(model, 1).backward()
    assert log.count("all_gather") == 2 * 4 - 1
    assert log.count("reduce_scatter") == 4


def _shard_inside_of_wrappers(model: nn.Module) -> None:
    """Shard what is in each wrapper, and the wrappers with the root."""
    for wrapper in model.blocks:
        fully_shard(wrapper._checkpoint_wrapped_module)
    fully_shard(model)


def _with_wrapped_blocks(impl: CheckpointImpl) -> Net:
    net = Net()
    net.blocks = nn.ModuleList(checkpoint_wrapper(block, impl) for block in net.blocks)
    return net


@pytest.mark.parametrize("impl", list(CheckpointImpl))
@distributed(2)
def test_checkpoint_wrapper_before_sharding(impl: CheckpointImpl) -> None:
    """The wrapper is the unit."""
    twins = Twins(partial(_with_wrapped_blocks, impl), shard_blocks)
    train_twins(twins)


@distributed(2)
def test_checkpoint_wrapper_around_a_unit() -> None:
    """The wrapper belongs to the unit outside."""
    make = partial(_with_wrapped_blocks, CheckpointImpl.NO_REENTRANT)
    train_twins(Twins(make, _shard_inside_of_wrappers))


def _with_composable_checkpoints() -> Net:
    net = Net()
    for block in net.blocks:
        composable_checkpoint(block)
    return net


def _shard_then_checkpoint(model: nn.Module) -> None:
    shard_blocks(model)
    for block in model.blocks:
        composable_checkpoint(block)


@pytest.mark.parametrize("order", ["before", "after"])
@distributed(2)
def test_composable_checkpoint(order: str) -> None:
    """Torch's `checkpoint(module)` works on a module before and after it is sharded."""
    if order == "before":
        train_twins(Twins(_with_composable_checkpoints, shard_blocks))
    else:
        train_twins(Twins(Net, _shard_then_checkpoint))


# --- torch.compile ---


def _compile_blocks(model: nn.Module, **options: Any) -> None:
    for block in model.blocks:
        block.compile(**options)


def _wrap_blocks(model: nn.Module, **options: Any) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, **options)


def _compile_root(model: nn.Module, **options: Any) -> None:
    model.compile(**options)


def _hide_compiler_warnings() -> None:
    """The compiler hides this warning by other means than a filter, too late for `error`."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")


class _GraphRecorder:
    """A backend that runs graphs by `aot_eager` and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)  # imports most of it

    def ops(self) -> set[str]:
        nodes = [node for graph in self.graphs for node in graph.graph.nodes]
        return {getattr(node.target, "__name__", str(node.target)) for node in nodes}


@pytest.mark.long
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("how", [_compile_blocks, _wrap_blocks, _compile_root])
@distributed(2)
def test_compiled_units_train_alike(how: Callable[..., None], order: str) -> None:
    """Nothing is compiled again after the second step, and no hook is part of a graph.

    A block is one graph; that of a whole model breaks at units.
    """
    torch.compiler.reset()
    _hide_compiler_warnings()
    twins = Twins(Net, lambda model: None)
    recorder = _GraphRecorder()
    options = {"backend": recorder, "fullgraph": how is not _compile_root}
    if how is _wrap_blocks:  # for equal names
        how(twins.plain, backend="eager")
    if order == "before":
        how(twins.sharded, **options)
        shard_blocks(twins.sharded)
    elif how is _wrap_blocks:
        for block in twins.sharded.blocks:
            fully_shard(block)
        how(twins.sharded, **options)
        fully_shard(twins.sharded)
    else:
        shard_blocks(twins.sharded)
        how(twins.sharded, **options)
    train_twins(twins, 2)
    num_graphs = len(recorder.graphs)
    with torch._dynamo.config.patch(error_on_recompile=True):
        train_twins(twins, 3)
    assert num_graphs == len(recorder.graphs) > 0
    assert not [op for op in recorder.ops() if "gather" in op or "resize" in op or "set_" in op]


@distributed(2)
def test_compiled_units_of_dynamic_shapes_train_alike() -> None:
    """Batches of any size run one graph."""
    torch.compiler.reset()
    _hide_compiler_warnings()
    twins = Twins(Net, lambda model: None)
    recorder = _GraphRecorder()
    _compile_blocks(twins.sharded, backend=recorder, fullgraph=True, dynamic=True)
    shard_blocks(twins.sharded)
    for size in (4, 6, 7, 5):
        twins.step(lambda model, size=size: model(rank_input(size, 5)).square().mean())
        twins.sharded.zero_grad()
        twins.plain.zero_grad()
    assert len(recorder.graphs) == 1


@distributed(2)
def test_compiled_parts_of_a_unit_train_alike() -> None:
    """Compiled modules without hooks of their own."""
    torch.compiler.reset()
    _hide_compiler_warnings()
    twins = Twins(Net, lambda model: None)
    recorder = _GraphRecorder()
    _compile_blocks(twins.sharded, backend=recorder)
    fully_shard(twins.sharded)
    train_twins(twins, 2)
    assert len(recorder.graphs) > 0
    with torch._dynamo.config.patch(error_on_recompile=True):
        train_twins(twins, 2)


@distributed(2)
def test_compiled_and_checkpointed_units_train_alike() -> None:
    """Compiled blocks that are sharded and recomputed: what large models do."""
    torch.compiler.reset()
    _hide_compiler_warnings()
    twins = Twins(_Around, lambda model: None)
    _compile_blocks(twins.sharded, backend="aot_eager")
    shard_blocks(twins.sharded)
    train_twins(twins, 2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        train_twins(twins, 2)


@distributed(2)
def test_compiled_unit_issues_the_same_collectives() -> None:
    """One gather each way for each unit but the root, one reduction for each."""
    torch.compiler.reset()
    _hide_compiler_warnings()
    model = Net()
    _compile_blocks(model, backend="aot_eager")
    shard_blocks(model)
    for step in range(2):
        loss_of(model, step).backward()
    with count_collectives() as log:
        loss_of(model, 2).backward()
    assert log.count("all_gather") == 2 * 4 - 1
    assert log.count("reduce_scatter") == 4


@distributed(2)
def test_compiled_optimizer_step() -> None:
    """`torch.compile(optimizer.step)` works on shards."""
    torch.compiler.reset()
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of the compiler's own making
    twins = Twins(Net, shard_blocks)
    optimizers = twins.optimizers(torch.optim.SGD, foreach=True)
    compiled = torch.compile(optimizers[1].step, backend="aot_eager")
    for step in range(3):
        twins.step(lambda model, step=step: loss_of(model, step))
        optimizers[0].step()
        compiled()
        for optimizer in optimizers:
            optimizer.zero_grad()
    twins.assert_equal_parameters()


# --- mixed precision by torch.amp ---


@pytest.mark.fast
@distributed(2, on_device=True)
def test_autocast_trains_alike() -> None:
    """Casts happen in compute; parameters and gradients keep their dtype."""
    twins = Twins(Net, shard_blocks)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [loss_of(model, 0) for model in twins]
    for model, loss in zip(twins, losses, strict=True):
        twins.backward(model, loss)
    assert_equal(losses[1].detach(), losses[0].detach())
    twins.assert_equal_gradients()


@distributed(2)
def test_scaler_skips_the_step_on_all_ranks_when_one_overflows() -> None:
    """An infinity in the slice of one rank is an infinity of all."""
    twins = Twins(Net, shard_blocks)
    optimizers = twins.optimizers()
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in twins]
    for step in range(3):
        for model, optimizer, scaler in zip(twins, optimizers, scalers, strict=True):
            twins.backward(model, scaler.scale(loss_of(model, step)))
            if step == 1:
                _overflow(model.out.bias.grad)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [scaler.get_scale() for scaler in scalers] == [2.0, 2.0]
    twins.assert_equal_parameters()


def _overflow(grad: Tensor) -> None:
    """Make the last element infinite, which only one rank holds where it is sharded."""
    held = grad.to_local() if isinstance(grad, FlatShard) else grad
    held[-1:] = float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@distributed(2)
def test_scaler_with_autocast_trains_alike(dtype: torch.dtype) -> None:
    """Unscaling, clipping and stepping give what they give unsharded."""
    twins = Twins(Net, shard_blocks)
    optimizers = twins.optimizers(torch.optim.SGD)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in twins]
    for step in range(3):
        for model, optimizer, scaler in zip(twins, optimizers, scalers, strict=True):
            with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
                loss = loss_of(model, step)
            twins.backward(model, scaler.scale(loss))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    twins.assert_equal_parameters()


# --- copies ---


class _RecurrentNet(Net):
    """With an RNN, a tie across units, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].down.weight = self.blocks[1].down.weight
        self.tied = nn.Linear(7, 15)
        self.tied.weight = self.blocks[1].down.weight
        self.rnn = nn.GRU(15, 7, batch_first=True)
        self.blocks[2].up.requires_grad_(False)
        self.register_buffer("offset", torch.arange(15.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x) + self.offset
        for block in self.blocks:
            x = block(x)
        return self.out(self.tied(self.rnn(x)[0]))


@pytest.mark.parametrize("num_steps", [0, 1])
@distributed(2)
def test_copy_of_a_sharded_model_trains_alike(num_steps: int) -> None:
    """Copies made before and after a step are sharded models of their own."""
    twins = Twins(_RecurrentNet, shard_blocks)
    if num_steps:
        twins.step(lambda model: loss_of(model, 9))
    original = twins.sharded
    twins.sharded = copy.deepcopy(original)
    assert len(get_states(twins.sharded)) == len(get_states(original))
    before = [param.to_local().clone() for param in original.parameters()]
    twins.assert_equal_parameters()
    for model in twins:
        model.zero_grad()
    train_twins(twins)
    for param, local in zip(original.parameters(), before, strict=True):
        assert_equal(param.to_local(), local)
    assert not _shard_addresses(original) & _shard_addresses(twins.sharded)
    assert_at_rest(original)


def _shard_addresses(model: nn.Module) -> set[int]:
    return {handle.local_shard.untyped_storage().data_ptr() for handle in get_handles(model)}


@pytest.mark.fast
@distributed(2)
def test_original_trains_on_after_it_was_copied() -> None:
    """Training a copy, or dropping it, does nothing to the original."""
    twins = Twins(_RecurrentNet, shard_blocks)
    twins.step(lambda model: loss_of(model, 9))
    twin = copy.deepcopy(twins.sharded)
    loss_of(twin, 1).backward()
    twins.assert_equal_gradients()
    del twin
    for model in twins:
        model.zero_grad()
    train_twins(twins)


@distributed(2)
def test_copy_of_one_unit_is_a_unit() -> None:
    """A deep copy of an inner module trains by itself, without the tree it came from."""
    twins = Twins(Net, shard_blocks)
    twins.step(lambda model: loss_of(model, 0))
    twins.plain, twins.sharded = (copy.deepcopy(model.blocks[1]) for model in twins)
    for model in twins:
        model.zero_grad()
    optimizers = twins.optimizers()
    for step in range(2):
        twins.step(lambda model, step=step: model(rank_input(4, 15, step=step)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    twins.assert_equal_parameters()


@distributed(2)
def test_copy_while_full_parameters_are_shown_is_refused() -> None:
    """The copy would hold parameters that it does not manage."""
    model = fully_shard(Layer())
    model(rank_input(4, 15)).sum().backward()
    unshard(model)
    for make_copy in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match="can't be copied or pickled") as caught:
            make_copy(model)
        assert str(caught.value) == (
            "unit 'Layer' can't be copied or pickled while it shows its full parameters. Call "
            "reshard(module) first, and not during its forward or backward."
        )
    for param in (copy.deepcopy(model.up.weight), pickle.loads(pickle.dumps(model.up.weight))):
        assert isinstance(param, nn.Parameter)
        assert param.equal(model.up.weight)
        assert param.data_ptr() != model.up.weight.data_ptr()
    reshard(model)
    with pytest.raises(RuntimeError) as caught:
        pickle.dumps(model)
    assert str(caught.value) == (
        "a sharded module can't be pickled, for its process groups belong to this process. Use "
        "copy.deepcopy for a copy. To save it call save_checkpoint, or get_model_state_dict."
    )
    assert copy.deepcopy(model).up.weight.to_local().equal(model.up.weight.to_local())


# --- other data-parallel APIs ---


@distributed(2)
def test_torch_replicate_and_ours_refuse_each_other() -> None:
    """One data-parallel API for a module, whichever comes first."""
    with pytest.raises(RuntimeError, match="replicate"):
        replicate(fully_shard(Layer()))
    replicated = replicate(Layer())
    with pytest.raises(ValueError, match="torch's composable 'replicate' was already") as caught:
        fully_shard(replicated)
    assert str(caught.value) == (
        f"torch's composable 'replicate' was already applied to this {type(replicated).__name__}; "
        "a module can have only one data-parallel API"
    )


@distributed(2)
def test_replicate_below_is_refused_and_above_works() -> None:
    """Torch's `replicate` leaves sharded modules in it alone; the reverse would reduce twice."""
    net = Net()
    replicate(net.blocks[1])
    with pytest.raises(ValueError, match="'replicate' already") as caught:
        fully_shard(net)
    assert str(caught.value) == (
        "'blocks.1' is managed by torch's composable 'replicate' already, which would reduce its "
        "gradients a second time. Apply only one of the two to it."
    )
    twins = Twins(Net, lambda model: fully_shard(model.blocks[1]))
    replicate(twins.sharded)
    for model in twins:
        twins.backward(model, loss_of(model, 0))
    for param, expected in zip(twins.sharded.parameters(), twins.plain.parameters(), strict=True):
        assert_equal(full_tensor_of(param.grad), expected.grad)


@distributed(2)
def test_torch_ddp_above_a_unit_fails_loudly() -> None:
    """DistributedDataParallel would broadcast slices."""
    net = Net()
    fully_shard(net.blocks[1])
    with pytest.raises(RuntimeError, match=r"needs no DistributedDataParallel around it"):
        nn.parallel.DistributedDataParallel(net)


@distributed(2)
def test_torch_fully_shard_and_ours_refuse_each_other() -> None:
    """On one module, above and below."""
    with pytest.raises((AssertionError, RuntimeError, ValueError), match="fully_shard"):
        torch_fully_shard(fully_shard(Layer()))
    net = Net()
    torch_fully_shard(net.blocks[1])
    with pytest.raises(ValueError, match=r"is sharded by torch's FSDP already") as caught:
        fully_shard(net)
    assert str(caught.value) == (
        "'blocks.1' is sharded by torch's FSDP already; shard a tree with one library only"
    )


@distributed(2)
def test_torch_fully_shard_above_a_unit_fails_loudly() -> None:
    """It would shard a shard."""
    net = Net()
    fully_shard(net.blocks[1])
    with pytest.raises(RuntimeError, match="needs no torch's fully_shard around it"):
        torch_fully_shard(net)


# --- sub-groups ---


def _input_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn((4, 5), generator=generator)


def _train_in_group(model: nn.Module, ranks: list[int]) -> None:
    """Train a model that is sharded over `ranks`, and compare with one process that does all."""
    torch.manual_seed(min(ranks))
    reference = Net()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (reference, model)]
    for step in range(3):
        losses = [reference(_input_of(rank, step)).square().mean() for rank in ranks]
        (sum(losses) / len(ranks)).backward()
        loss = model(_input_of(dist.get_rank(), step)).square().mean()
        loss.backward()
        assert_equal(loss.detach(), losses[ranks.index(dist.get_rank())].detach())
        _assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), expected.detach(), rtol=0, atol=1e-6)


def _assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    # The reference sums before it averages: equal but for rounding.
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(param.grad, FlatShard)
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=1e-5, atol=1e-7)


@distributed(4)
def test_mesh_of_some_ranks() -> None:
    """Ranks 1 and 3 are ranks 0 and 1 of their group; the others have nothing to do with it."""
    mesh = DeviceMesh("cpu", [1, 3])
    torch.manual_seed(dist.get_rank())
    model = Net()
    if dist.get_rank() not in (1, 3):
        with pytest.raises(ValueError, match="is not in the mesh") as caught:
            fully_shard(model, mesh=mesh)
        assert str(caught.value) == (
            f"rank {dist.get_rank()} is not in the mesh of ranks [1, 3]: call fully_shard only on "
            "the ranks of the mesh"
        )
        return
    shard_blocks(model, mesh=mesh, sync_module_states=True)
    assert get_handles(model)[0].shard_group.rank == (1, 3).index(dist.get_rank())
    _train_in_group(model, [1, 3])


@pytest.mark.parametrize("axis", ["outer", "inner"])
@distributed(4)
def test_disjoint_meshes_train_independently(axis: str) -> None:
    """Each row, or column, of a 2-D mesh has a model and data of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))[axis]
    torch.manual_seed(dist.get_rank())
    model = Net()
    shard_blocks(model, mesh=mesh, sync_module_states=True)
    _train_in_group(model, mesh.mesh.tolist())


# --- tensor parallelism ---


class _TensorParallelBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class _TensorParallelNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_TensorParallelBlock() for _ in range(2))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def _parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the linear layers of each block over `mesh`, and the sequence in the norms.

    The norms' weights are replicated DTensors with partial gradients; `out` stays plain.
    """
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
        splits = PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Shard(1),
            use_local_input=True,
            output_layouts=Shard(1),
            desired_output_layouts=Replicate(),
        )
        parallelize_module(block, mesh, splits)


def _sequences(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn((2, 4, 8), generator=generator)


@distributed(4)
def test_units_of_a_tensor_parallel_model() -> None:
    """S3.8: DTensors in forward; gradients, norms, clipping, steps equal the plain model's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference = _TensorParallelNet()
    model = copy.deepcopy(reference)
    _parallelize(model, mesh["tp"])
    shard_blocks(model, mesh=mesh["dp"])
    seen = []
    model.blocks[0].up.register_forward_pre_hook(
        lambda module, args: seen.append((type(module.weight.data), type(args[0])))
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (reference, model)]
    for step in range(3):
        losses = [reference(_sequences(rank, step)).square().mean() for rank in range(2)]
        (sum(losses) / 2).backward()
        loss = model(_sequences(mesh["dp"].get_local_rank(), step)).square().mean()
        loss.backward()
        _assert_close_to_plain(loss.detach(), losses[mesh["dp"].get_local_rank()].detach())
        _compare_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), expected in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        _assert_close_to_plain(full_tensor_of(param), expected.detach(), name)
    assert {weight for weight, _ in seen} == {DTensor}


def _compare_gradients(model: nn.Module, reference: nn.Module) -> None:
    """Compare gradients, their norms, and what clipping makes of them."""
    for (name, param), expected in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        assert isinstance(param.grad, FlatShard), name
        assert param.grad.shape == param.shape == expected.shape
        _assert_close_to_plain(full_tensor_of(param.grad), expected.grad, name)
        _assert_close_to_plain(param.detach().norm(), expected.detach().norm(), f"norm of {name}")
        _assert_close_to_plain(param.grad.norm(), expected.grad.norm(), f"norm of {name}.grad")
    total = clip_grad_norm_(model, 0.1)
    _assert_close_to_plain(
        total, nn.utils.clip_grad_norm_(reference.parameters(), 0.1), "total norm"
    )
    for (name, param), expected in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        _assert_close_to_plain(full_tensor_of(param.grad), expected.grad, f"clipped {name}")


def _assert_close_to_plain(actual: Tensor, expected: Tensor, what: str = "loss") -> None:
    """Compare up to the rounding of sums that tensor parallelism splits."""
    torch.testing.assert_close(
        full_tensor_of(actual), expected, rtol=1e-4, atol=1e-6, msg=lambda text: f"{what}: {text}"
    )


@distributed(4)
def test_sequence_parallel_gradients_of_plain_parameters_are_added_up() -> None:
    """As Megatron's: each tensor-parallel rank has part of a sequence, and a copy of the norm.

    A hook adds what the ranks of its group have, after the reduction over the data-parallel ones.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference = nn.LayerNorm(8)
    norm = fully_shard(copy.deepcopy(reference), mesh=mesh["dp"])
    for param in norm.parameters():
        param.register_post_accumulate_grad_hook(
            lambda p: dist.all_reduce(p.grad.to_local(), group=mesh["tp"].get_group())
        )
    for step in range(2):
        for rank in range(2):
            (reference(_sequences(rank, step)).square().sum() / 2).backward()
        part = _sequences(mesh["dp"].get_local_rank(), step).chunk(2, 1)
        norm(part[mesh["tp"].get_local_rank()]).square().sum().backward()
        for param, expected in zip(norm.parameters(), reference.parameters(), strict=True):
            _assert_close_to_plain(param.grad, expected.grad, "gradient")
            param.grad = expected.grad = None


@distributed(4)
def test_torch_clipping_counts_replicated_parameters_once() -> None:
    """S3.8: `torch.nn.utils.clip_grad_norm_` gives the plain model's norm too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference = _TensorParallelNet()
    model = copy.deepcopy(reference)
    _parallelize(model, mesh["tp"])
    shard_blocks(model, mesh=mesh["dp"])
    for rank in range(2):
        (reference(_sequences(rank, 0)).square().mean() / 2).backward()
    model(_sequences(mesh["dp"].get_local_rank(), 0)).square().mean().backward()
    for norm_type in (1.0, 2.0, float("inf")):
        expected = nn.utils.get_total_norm([p.grad for p in reference.parameters()], norm_type)
        found = nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type)
        _assert_close_to_plain(found, expected, f"norm {norm_type}")


@pytest.mark.parametrize("strategy", ShardingStrategy)
@distributed(4)
def test_tensor_parallel_ranks_skip_a_step_together(strategy: ShardingStrategy) -> None:
    """S3.8: an infinity in what one of them holds counts on all, for the scaler and in the norm."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = _TensorParallelNet()
    _parallelize(model, mesh["tp"])
    shard_blocks(model, mesh=mesh["dp"], strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    moved = []
    for step in range(3):
        loss = model(_sequences(mesh["dp"].get_local_rank(), step)).square().mean()
        scaler.scale(loss).backward()
        if step == 1 and mesh["tp"].get_local_rank() == 1:
            local = model.blocks[1].up.weight.grad.to_local()
            (local.to_local() if isinstance(local, DTensor) else local)[-1:].fill_(torch.inf)
        if step == 1:
            with pytest.raises(RuntimeError, match="non-finite"):
                clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        before = [full_tensor_of(param.detach()).clone() for param in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = [full_tensor_of(param.detach()) for param in model.parameters()]
        moved.append([not torch.equal(*pair) for pair in zip(before, after, strict=True)])
    assert moved == [[True] * 14, [False] * 14, [True] * 14]
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("main_dtype", [None, torch.float32])
@pytest.mark.parametrize("strategy", ShardingStrategy)
@distributed(4)
def test_tensor_parallel_attributes_survive(
    strategy: ShardingStrategy, main_dtype: torch.dtype | None
) -> None:
    """S3.9: at rest, in forward and in a scope, of DTensors and plain parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _TensorParallelNet()
    if main_dtype is None:
        _parallelize(model, mesh["tp"])
    else:
        model.to(torch.bfloat16)
    for number, param in enumerate(model.parameters()):
        param.tensor_model_parallel = number % 2 == 0
        param.partition_dim, param.partition_stride = number, 1
        param.position = param.aliases = number
        param.sequence_parallel = True
    seen = []

    def attributes() -> list[Any]:
        return [
            (p.tensor_model_parallel, p.partition_dim, p.partition_stride, p.sequence_parallel)
            for p in model.parameters()
        ]

    expected = [(number % 2 == 0, number, 1, True) for number in range(14)]
    policy = MixedPrecisionPolicy(main_dtype=main_dtype)
    shard_blocks(model, mesh=mesh["dp"], strategy=strategy, mp_policy=policy)
    assert attributes() == expected
    block = model.blocks[0]
    block.up.register_forward_pre_hook(
        lambda module, args: seen.append((module.weight.position, module.bias.aliases))
    )
    x = _sequences(mesh["dp"].get_local_rank(), 0)
    model(x if main_dtype is None else x.bfloat16()).float().square().mean().backward()
    assert seen == [(block.up.weight.partition_dim, block.up.bias.partition_dim)]
    with unshard_params(model):
        assert attributes() == expected
    assert attributes() == expected
