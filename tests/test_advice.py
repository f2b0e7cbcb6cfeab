"""Calls that can't work on a sharded model: the error says what to do here, and so does the page.

`python -m tests.test_advice` writes two tables of `docs/troubleshooting.md` anew.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import composable_shard
from composable_shard import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictOptions,
    estimate,
    fully_shard,
    get_model_state_dict,
    load_checkpoint,
    load_safetensors,
    reshard,
    save_checkpoint,
    save_safetensors,
    unshard,
)
from composable_shard.huggingface import save_pretrained
from composable_shard.options import advice
from composable_shard.torch_private import NO_FULL_GRAPH
from tests.error_texts import matching
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import FULL, Net, Twins, loss_of, shard_blocks

IN_GRAPH = advice.IN_GRAPH
PAGE = Path(__file__).parent.parent / "docs" / "troubleshooting.md"


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def encode(self, x: Tensor) -> Tensor:
        return self.scale * self.head(self.table(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def _encoder(**options: Any) -> _Encoder:
    model = _Encoder()
    return fully_shard(model, **options)


X = torch.zeros(2, 3, dtype=torch.int64)


def _param() -> nn.Parameter:
    return _encoder().head.weight


def _layer_in_a_closure() -> None:
    model = _encoder()
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.step(lambda: model.head(torch.ones(2, 8)).sum())


# By call: the program, the type of the error, what it says to do, and the parameter it names.
CALLS: dict[str, tuple[Callable[[], object], type[Exception], str, str]] = {
    "layer": (lambda: _encoder().head(torch.ones(2, 8)), RuntimeError, IN_GRAPH, "head.weight"),
    "embedding": (lambda: _encoder().table(X), RuntimeError, IN_GRAPH, "table.weight"),
    "layer in a closure": (_layer_in_a_closure, RuntimeError, IN_GRAPH, "head.weight"),
    "forward": (lambda: _encoder().forward(X), RuntimeError, IN_GRAPH, "table.weight"),
    "method": (lambda: _encoder().encode(X), RuntimeError, IN_GRAPH, "table.weight"),
    "weight": (lambda: torch.ones(2, 8) @ _param().t(), RuntimeError, IN_GRAPH, "head.weight"),
    "DDP": (
        lambda: DistributedDataParallel(_encoder()),
        RuntimeError,
        "its own backward reduces the gradients",
        "scale",
    ),
    "numpy": (lambda: _param().detach().numpy(), RuntimeError, advice.VALUES, "head.weight"),
    "dlpack": (
        lambda: torch.from_dlpack(_param().detach()),
        RuntimeError,
        advice.VALUES,
        "head.weight",
    ),
    "asarray": (lambda: np.asarray(_param().detach()), RuntimeError, advice.VALUES, "head.weight"),
    "tolist": (lambda: _param().tolist(), RuntimeError, advice.VALUES, "head.weight"),
    "placements": (
        lambda: _param().placements,
        AttributeError,
        advice.PLACEMENTS,
        "head.weight",
    ),
    "device_mesh": (
        lambda: _param().device_mesh,
        AttributeError,
        advice.PLACEMENTS,
        "head.weight",
    ),
    "save_file": (
        lambda: safetensors.torch.save_file(_encoder().state_dict(), "nowhere"),
        RuntimeError,
        advice.VALUES,
        "'",
    ),
    "torch.save": (
        lambda: torch.save(_encoder().state_dict(), io.BytesIO()),
        RuntimeError,
        advice.SAVE,
        "",
    ),
}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@distributed(1, 2)
def test_advice_fits_the_call() -> None:
    """Advice: what to do, in an error that names the parameter, on all ranks alike."""
    texts = {}
    for call, (program, kind, remedy, name) in CALLS.items():
        with pytest.raises(kind) as caught:
            program()
        assert type(caught.value) is kind, call
        texts[call] = text = str(caught.value)
        assert remedy in text, f"{call}: {text}"
        assert name in text, f"{call}: {text}"
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, texts)
    assert every[0] == every[-1]


@distributed(2)
def test_advice_about_saving_raises_before_a_shard_is_written(tmp_path: Path) -> None:
    """The way in which scripts of FSDP2 gather passes shards on: they are no DTensors.

    Torch opens a file before it pickles, so that an older one of its name is lost.
    """
    values = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in _encoder().state_dict().items()
    }
    file = io.BytesIO()
    with pytest.raises(RuntimeError, match=r"shards of this rank alone.* p\.full_tensor\(\) makes"):
        torch.save(values, file)
    with pytest.raises(RuntimeError, match=r"failed locating file data\.pkl"):
        torch.load(io.BytesIO(file.getvalue()))
    path, new = (tmp_path / f"{name}_{dist.get_rank()}.pt" for name in ("model", "new"))
    whole = {name: value.full_tensor() for name, value in _encoder().state_dict().items()}
    for target, is_kept in ((new, True), (path, False)):
        torch.save(whole, path)
        with pytest.raises(RuntimeError, match="what it held is lost"):
            torch.save(values, target)
        if is_kept:
            assert all(map(torch.equal, torch.load(path).values(), whole.values()))
        else:
            with pytest.raises(RuntimeError, match=r"failed locating file data\.pkl"):
                torch.load(path)


# Ways to hand weights on that would hand on those of this rank alone.
EXPORTS: tuple[Callable[[nn.Module], object], ...] = (
    lambda model: [param.detach().numpy() for param in model.parameters()],
    lambda model: [param.tolist() for param in model.parameters()],
    lambda model: safetensors.torch.save_file(model.state_dict(), "nowhere"),
    lambda model: torch.save(model.state_dict(), io.BytesIO()),
)


@distributed(2)
def test_advice_about_weights_leaves_a_model_that_trains() -> None:
    """It names no function of optimizers; the step after each is a plain model's."""
    twins = Twins(Net, shard_blocks)
    optimizers = twins.optimizers()
    for step, export in enumerate(EXPORTS):
        with pytest.raises(RuntimeError) as caught:
            export(twins.sharded)
        assert "shard_optimizer_state" not in str(caught.value)
        twins.step(partial(loss_of, step=step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        twins.assert_equal_parameters()


@distributed(2)
def test_advice_works_for_what_is_computed_outside_a_forward() -> None:
    """`unshard` before, `reshard` after the backward: the gradients of a call."""
    torch.manual_seed(0)
    model, other = _encoder(), _encoder(sync_module_states=True)
    other.load_state_dict(model.state_dict())
    x = X + dist.get_rank()
    unshard(model, recurse=True)
    model.encode(x).square().sum().backward()
    reshard(model, recurse=True)
    other(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert_equal(ours.grad.full_tensor(), theirs.grad.full_tensor())


# Losses of parameters outside of their unit's forward, given its output.
LOSSES: dict[str, Callable[[_Encoder, Tensor], Tensor]] = {
    "logit_scale": lambda model, y: (model.scale.exp() * y).sum(),
    "log_alpha": lambda model, y: model.scale * y.sum().detach(),
    "log_vars": lambda model, y: (y / model.head.bias.exp() + model.head.bias).sum(),
    "penalty": lambda model, y: (y.sum() + model.head.weight.pow(2).sum()) / (1 + dist.get_rank()),
    "norms": lambda model, y: y.sum() + sum(torch._foreach_norm([model.head.weight])),
    "mean": lambda model, y: y.sum() + torch.mean(model.head.weight),
    "matrix": lambda model, y: y.sum() + (model.head.weight @ model.head.weight.t()).sum(),
    "layer": lambda model, y: model.head(torch.ones(2, 8)).sum(),
}


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@pytest.mark.parametrize("granularity", ["element", "param"])
@distributed(1, 2)
def test_advice_where_a_gradient_would_be_of_one_rank(
    granularity: str, strategy: ShardingStrategy
) -> None:
    """A loss at rest is refused on all ranks, by an error that leads to training."""
    model = _encoder(strategy=strategy, granularity=granularity)
    for name, loss in LOSSES.items():
        with pytest.raises(RuntimeError, match=r"'(scale|head\.\w+)'") as caught:
            loss(model, model(X)).backward()
        text = str(caught.value)
        remedies = "call unshard(model, recurse=True) before it", "on that rank", "on its owner"
        assert any(remedy in text for remedy in remedies), f"{name}: {text}"
        assert "shard_optimizer_state" not in text, name
        model(X).sum().backward()
        grad = model.head.weight.grad
        assert grad is None or not grad.to_local().isnan().any(), name
        model.zero_grad()
    with torch.no_grad():
        norm = model.head.weight.norm()
    assert_equal(model.head.weight.norm().detach(), norm)  # to log it


@distributed(2)
def test_advice_lets_whole_parameters_be_read_and_stepped() -> None:
    """Under NO_SHARD LBFGS and numpy work; what `get_model_state_dict` returns can be saved."""
    model = _encoder(strategy=ShardingStrategy.NO_SHARD)
    assert model.head.weight.detach().numpy().shape == (4, 8)
    assert np.asarray(model.head.weight.detach()).tolist() == model.head.weight.tolist()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(X).square().sum()
        loss.backward()
        return loss

    before = closure().item()
    optimizer.step(closure)
    assert closure().item() < before
    values = get_model_state_dict(_encoder(), options=FULL)
    assert bool(safetensors.torch.save(values)) == (dist.get_rank() == 0) or not values


@pytest.mark.parametrize("value", [torch_fsdp.CPUOffloadPolicy(), torch.device("cpu"), True])
def test_advice_about_classes_of_torch(value: object) -> None:
    """Where it is from, and the page that says what to write."""
    options: Any = {"offload_policy": value}
    kind = type(value)
    text = rf"a composable_shard\.OffloadPolicy, got .*, a {kind.__module__}\.{kind.__qualname__}\."
    with pytest.raises(ValueError, match=text):
        fully_shard(Net(), **options)


@distributed(2)
def test_advice_about_a_group_in_the_place_of_a_mesh() -> None:
    """How to make a mesh of it; which then works."""
    group: Any = dist.group.WORLD
    with pytest.raises(
        ValueError, match=r"Write mesh=DeviceMesh.from_group\(group, device_type\)$"
    ):
        fully_shard(Net(), mesh=group)
    fully_shard(Net(), mesh=DeviceMesh.from_group(group, "cpu"))


@distributed(2)
def test_advice_about_arguments_in_the_other_order(tmp_path: Path) -> None:
    """The right call, before anything is sent or written."""
    model: Any = _encoder()
    folder: Any = tmp_path / "made"
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: save_checkpoint(model, folder, step=1), "save_checkpoint(path, model, "),
        (lambda: load_checkpoint(model, folder), "load_checkpoint(path, model, optimizer)"),
        (lambda: save_safetensors(folder, model), "save_safetensors(model, directory)"),
        (lambda: save_safetensors(str(folder), model), "save_safetensors(model, directory)"),
        (lambda: load_safetensors(folder, model), "load_safetensors(model, directory)"),
        (lambda: save_pretrained(folder, model), "save_pretrained(model, directory)"),
    ]
    for call, right in calls:
        with pytest.raises(TypeError, match=f"are swapped. Write {re.escape(right)}"):
            call()
    assert not folder.exists()


def test_advice_about_an_argument_of_fsdp2() -> None:
    """The options that there are, and the page that says what each argument is here."""
    options: Any = {"shard_placement_fn": lambda param: None}
    text = r"fully_shard has no option 'shard_placement_fn'\. It has mesh, .*troubleshooting\.md"
    with pytest.raises(ValueError, match=text):
        fully_shard(Net(), **options)


@distributed(2)
def test_advice_about_one_graph_of_a_whole_model() -> None:
    """In the compiler's error; layers as one graph each are in test_composition."""
    torch.compiler.reset()
    model = _Encoder()
    fully_shard(model.head)
    compiled = torch.compile(fully_shard(model), fullgraph=True, backend="eager")
    with pytest.raises(Unsupported, match=re.escape(NO_FULL_GRAPH)):
        compiled(X)


def test_advice_about_methods_of_fsdp() -> None:
    """A module has none; the functions that the page names are here."""
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith("| FSDP's methods"))
    names = re.findall(r"`(\w+)\(model", row)
    assert names
    for name in names:
        assert callable(getattr(composable_shard, name))
        assert not hasattr(nn.Linear, name)


def test_fields_that_are_said_to_mean_the_same_exist() -> None:
    """In the advice about classes."""
    MixedPrecisionPolicy(param_dtype=None, reduce_dtype=None, output_dtype=None, buffer_dtype=None)
    MixedPrecisionPolicy(cast_forward_inputs=True, keep_fp32_classes=())
    OffloadPolicy(params=True, pin_memory=True)
    StateDictOptions(True, cpu_offload=True, broadcast_from_rank0=True, strict=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda: fully_shard(3),  # type: ignore[call-overload]
        lambda: fully_shard([]),
        lambda: fully_shard(nn.ModuleList()),
        lambda: unshard(nn.Linear(2, 2)),
        lambda: estimate(nn.Linear(2, 2), world_size=2, mesh_shape=(1, 2)),
        lambda: load_checkpoint("nowhere", nn.Linear(2, 2)),
    ],
)
def test_the_list_of_errors_has_what_is_raised(call: Callable[[], object]) -> None:
    """The site shows them all."""
    try:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        assert matching(str(caught.value))
    finally:
        if dist.is_initialized():  # by load_checkpoint, for one rank
            dist.destroy_process_group()
