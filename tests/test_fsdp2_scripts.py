"""Scripts for FSDP2 that others publish, in words of our own: only the import line changes.

Two of them are in `test_fsdp2.py`: the recipe of distributed checkpoints, and loading as RL
trainers do; the sharded Llama with tensor parallelism is there, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp2
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention

from composable_shard import fsdp2, shard_optimizer_state
from tests.harness.ranks import distributed
from tests.programs.models import seeded

DIM, WORDS, LENGTH, NUM_LAYERS = 16, 24, 8, 4


class _ExampleLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM, bias=False)
        self.out, self.up = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu())


class _ExampleModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, DIM), nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList(_ExampleLayer() for _ in range(NUM_LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def reset_parameters(self) -> None:
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()


def _shard_example(api: Any, *, is_mixed: bool, prefetches: bool) -> Any:
    """Build on the meta device, shard each layer and the rest, and look at what came of it."""
    with torch.device("meta"):
        model: Any = _ExampleModel()
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    options = {"mp_policy": api.MixedPrecisionPolicy(**dtypes)} if is_mixed else {}
    for layer in model.layers:
        api.fully_shard(layer, **options)
    api.fully_shard(model, **options)
    assert isinstance(model, _ExampleModel)
    assert isinstance(model, api.FSDPModule)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    if prefetches:
        layers = list(model.layers)
        for index, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 3])
            layer.set_modules_to_backward_prefetch(layers[max(index - 2, 0) : index][::-1])
    return model


def _initialise_example(model: Any) -> None:
    """Allocate and draw the parameters; then give them values that do not depend on the library."""
    model.to_empty(device="cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DTensor random operators may not have")
        model.reset_parameters()
    options = torch_state_dict.StateDictOptions(full_state_dict=True)
    values = seeded(_ExampleModel).state_dict()
    torch_state_dict.set_model_state_dict(model, values, options=options)


def _check_example(model: Any, is_mixed: bool) -> None:
    """Between `unshard` and `reshard` parameters have the dtype of the computation."""
    model.unshard()
    dtype = torch.bfloat16 if is_mixed else torch.float32
    assert {param.dtype for param in model.head.parameters()} == {dtype}
    model.reshard()
    assert {param.dtype for param in model.head.parameters()} == {torch.float32}


# --- checkpoints: two files, that the first rank writes ---

_TwoFiles = tuple[Path, Path]


def _write_two(states: tuple[Any, Any], files: _TwoFiles) -> None:
    if dist.get_rank() == 0:
        for state, file in zip(states, files, strict=True):
            torch.save(state, file)
    dist.barrier()


def _read_one(file: Path) -> Any:
    return torch.load(file, mmap=True, weights_only=True, map_location="cpu")


class _ByFunctions:
    """Torch's functions of state dicts, from the module that the import line names."""

    def __init__(self, functions: Any) -> None:
        self.functions = functions

    def load_model(self, model: nn.Module, file: Path) -> None:
        options = self.functions.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        self.functions.set_model_state_dict(model, _read_one(file), options=options)

    def load_optimizer(self, model: nn.Module, optimizer: Any, file: Path) -> None:
        options = self.functions.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        self.functions.set_optimizer_state_dict(model, optimizer, _read_one(file), options=options)

    def save(self, model: nn.Module, optimizer: Any, files: _TwoFiles) -> None:
        options = self.functions.StateDictOptions(full_state_dict=True, cpu_offload=True)
        states = (
            self.functions.get_model_state_dict(model, options=options),
            self.functions.get_optimizer_state_dict(model, optimizer, options=options),
        )
        _write_two(states, files)


class _ByHand:
    """Tensor by tensor, with DTensor's functions."""

    def load_model(self, model: nn.Module, file: Path) -> None:
        own, found = model.state_dict(), {}
        for name, whole in _read_one(file).items():
            part = distribute_tensor(whole, own[name].device_mesh, own[name].placements)
            found[name] = nn.Parameter(part)
        model.load_state_dict(found, strict=False, assign=True)

    def load_optimizer(self, model: nn.Module, optimizer: Any, file: Path) -> None:
        torch_state_dict._init_optim_state(optimizer)
        whole, found = _read_one(file), {}
        for number, state in optimizer.state_dict()["state"].items():
            found[number] = dict(whole["state"][number])
            for name, own in state.items():
                if isinstance(own, DTensor):
                    part = distribute_tensor(found[number][name], own.device_mesh, own.placements)
                    found[number][name] = part
        optimizer.load_state_dict({"state": found, "param_groups": whole["param_groups"]})

    def save(self, model: nn.Module, optimizer: Any, files: _TwoFiles) -> None:
        weights = {name: param.full_tensor().cpu() for name, param in model.state_dict().items()}
        state = optimizer.state_dict()
        whole = {
            number: {name: self.whole(value).cpu() for name, value in values.items()}
            for number, values in state["state"].items()
        }
        _write_two((weights, {"state": whole, "param_groups": state["param_groups"]}), files)

    def whole(self, value: Tensor) -> Tensor:
        return value.full_tensor() if isinstance(value, DTensor) else value


class _ByHandPorted(_ByHand):
    """With the lines that docs/moving_from_fsdp2.md says to write."""

    def load_model(self, model: nn.Module, file: Path) -> None:
        model.load_state_dict(_read_one(file), assign=True)

    def load_optimizer(self, model: nn.Module, optimizer: Any, file: Path) -> None:
        optimizer.load_state_dict(_read_one(file))
        shard_optimizer_state(optimizer)

    def whole(self, value: Any) -> Tensor:
        return value.full_tensor() if hasattr(value, "full_tensor") else value


# --- the script ---


def _train_example(model: Any, optimizer: Any, steps: range) -> list[float]:
    """Return losses and norms; each rank has words of its own."""
    told = []
    for step in steps:
        draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
        words = torch.randint(WORDS, (2, LENGTH), generator=draw)
        loss = model(words).float().logsumexp(-1).square().mean()
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        told += [loss.item(), norm.full_tensor().item()]
        optimizer.step()
        optimizer.zero_grad()
    return told


def _run_example(
    api: Any, checkpointer: Any, folder: Path, *, resumes: bool = False, **options: bool
) -> list[float]:
    """Train three steps and save; or load what was saved, and train two further ones."""
    files = (folder / "model.pt", folder / "optimizer.pt")
    model = _shard_example(api, **options)
    if resumes:
        checkpointer.load_model(model, files[0])
    else:
        _initialise_example(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if resumes:
        checkpointer.load_optimizer(model, optimizer, files[1])
        return _train_example(model, optimizer, range(3, 5))
    _check_example(model, options["is_mixed"])
    told = _train_example(model, optimizer, range(3))
    checkpointer.save(model, optimizer, files)
    return told + _train_example(model, optimizer, range(3, 5))


def _compare_example(
    make: Callable[[str], Any], folder: Path, tolerance: float, **options: bool
) -> None:
    """Run the script by each import line, whole and resumed; ours resumes from both's files."""
    # Torch's functions call what torch deprecates.
    warnings.filterwarnings("ignore", "`_get_pg_default_device` will be deprecated")
    warnings.filterwarnings("ignore", "Multiple backends are registered with this ProcessGroup")
    told = {}
    for name, api in {"theirs": torch_fsdp2, "ours": fsdp2}.items():
        (folder / name).mkdir(exist_ok=True)
        told[name] = _run_example(api, make(name), folder / name, **options)
        resumed = _run_example(api, make(name), folder / name, resumes=True, **options)
        assert resumed == told[name][-4:], name
    assert told["ours"] == pytest.approx(told["theirs"], abs=tolerance)
    across = _run_example(fsdp2, make("ours"), folder / "theirs", resumes=True, **options)
    assert across == pytest.approx(told["theirs"][-4:], abs=tolerance)


@pytest.mark.parametrize("is_mixed", [False, True])
@distributed(2)
def test_the_example_of_fsdp2_resumes_by_torchs_functions(is_mixed: bool, tmp_path: Path) -> None:
    """Meta device, prefetching, precision, two files: FSDP2's losses, and bitwise its own."""
    functions = {"theirs": torch_state_dict, "ours": fsdp2}
    options = {"is_mixed": is_mixed, "prefetches": True}
    _compare_example(
        lambda name: _ByFunctions(functions[name]), tmp_path, 1e-2 if is_mixed else 1e-5, **options
    )


@distributed(2)
def test_the_example_of_fsdp2_resumes_by_hand_with_the_lines_of_its_page(tmp_path: Path) -> None:
    """Its own lines raise: no part of a tensor is written, and no weight is loaded."""
    options = {"is_mixed": False, "prefetches": False}
    makers: dict[str, Any] = {"theirs": _ByHand, "ours": _ByHandPorted}
    _compare_example(lambda name: makers[name](), tmp_path, 1e-5, **options)
    with pytest.raises(AttributeError, match="give whole tensors, or DTensors"):
        _run_example(fsdp2, _ByHand(), tmp_path / "theirs", resumes=True, **options)
    model = _shard_example(fsdp2, **options)
    _initialise_example(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    _train_example(model, optimizer, range(1))
    part = _ByHand().whole(optimizer.state[model.head.weight]["exp_avg"]).cpu()
    with pytest.raises(RuntimeError, match=r"would write the shards of this rank alone"):
        torch.save(part, tmp_path / f"part_{dist.get_rank()}.pt")
