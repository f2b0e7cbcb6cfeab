"""Directories that several ranks make together, or that have other names than the model."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import (
    fully_shard,
    load_checkpoint,
    load_safetensors,
    save_checkpoint,
    save_safetensors,
)
from composable_shard.conversion import convert
from composable_shard.huggingface import Joined, save_pretrained
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import Net, make_net, on_meta, shard_blocks

_WORLD = 2


def _make_part(number: int) -> nn.Module:
    """Return one of two stages of a model, for this rank alone."""
    torch.manual_seed(0)
    whole = Net(num_blocks=2)
    mesh = init_device_mesh("cpu", (_WORLD, 1), mesh_dim_names=("pp", "dp"))["dp"]
    part = nn.ModuleDict({"blocks": nn.ModuleDict({str(number): whole.blocks[number]})})
    part["out" if number else "inp"] = whole.out if number else whole.inp
    for module in (part["blocks"][str(number)], part["out" if number else "inp"]):
        fully_shard(module, mesh=mesh)
    return part


@distributed(2)
def test_stages_make_one_directory_by_a_checkpoint(tmp_path: Path) -> None:
    """A converted checkpoint has both; a whole model loads it, and so do stages again."""
    group = dist.group.WORLD
    part = _make_part(dist.get_rank())
    save_checkpoint(tmp_path / "run", part, step=1)
    folder = tmp_path / "whole"
    if dist.get_rank() == 0:
        convert(tmp_path / "run", folder, "safetensors")
    dist.barrier()
    torch.manual_seed(0)
    plain = Net(num_blocks=2)
    model = on_meta(lambda: Net(num_blocks=2))
    load_safetensors(model, folder)
    for name, value in plain.state_dict().items():
        assert_equal(model.state_dict()[name].full_tensor(), value, name)
    with torch.no_grad():
        for param in part.parameters():
            param.zero_()
    with pytest.raises(ValueError, match=r"unexpected.*group= if other ranks load the rest"):
        load_safetensors(part, folder)
    keys = load_safetensors(part, folder, group=group)
    assert keys.unexpected_keys == []
    name = f"blocks.{dist.get_rank()}.up.weight"
    assert_equal(part.state_dict()[name].full_tensor(), plain.state_dict()[name])


@distributed(2)
def test_stages_that_would_replace_each_other_are_refused(tmp_path: Path) -> None:
    """By the job's store, naming the rank that has saved there."""
    part = _make_part(dist.get_rank())
    if dist.get_rank() == 0:
        save_safetensors(part, tmp_path)
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match=r"rank 0 of this job has saved into .*convert"):
            save_safetensors(part, tmp_path)


_CHANGES = {
    "values": lambda tensors: tensors | {"out.bias": torch.zeros(3)},
    "a dtype": lambda tensors: tensors | {"out.bias": torch.zeros(3).half()},
    "a name": lambda tensors: tensors | {"more": torch.zeros(3)},
}


@pytest.mark.parametrize("what", _CHANGES)
@distributed(2)
def test_directories_that_differ_between_ranks_are_refused(what: str, tmp_path: Path) -> None:
    """By name, on all ranks: sizes, headers, and the first bytes of each tensor are compared."""
    model = make_net()
    tensors = {n: v.full_tensor() for n, v in model.state_dict().items()}
    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    if dist.get_rank() == 1:
        tensors = _CHANGES[what](tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"the ranks have different files in .*model.safetensors"):
        load_safetensors(model, folder, strict=False)


@distributed(2)
def test_an_index_that_differs_between_ranks_is_refused(tmp_path: Path) -> None:
    """The files are the same; one rank's index says that a tensor is in another of them."""
    model = make_net()
    tensors = {n: v.full_tensor() for n, v in model.state_dict().items()}
    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    files = {f"model-0000{number}-of-00002.safetensors": number for number in (1, 2)}
    weight_map = {n: file for n in tensors for file, i in files.items() if i == 1 + (n > "out")}
    for file in files:
        both = {n: v for n, v in tensors.items() if weight_map[n] == file or n == "out.bias"}
        save_file(both, folder / file)
    if dist.get_rank() == 1:
        (weight_map["out.bias"],) = (file for file in files if file != weight_map["out.bias"])
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"the ranks have different files in .*index\.json"):
        load_safetensors(model, folder)
    load_safetensors(model, tmp_path / "0")


class _Experts(nn.Module):
    """Experts in one tensor each way, as transformers 5 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(3, 10, 7))
        self.down = nn.Parameter(torch.empty(3, 7, 5))
        self.renamed = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("granularity", ["element", "row", "param"])
@distributed(2, 3)
def test_tensors_are_renamed_and_joined(granularity: str, tmp_path: Path, world_size: int) -> None:
    """Each rank reads only the parts in its own range; what is missing or odd is named."""
    torch.manual_seed(0)
    sizes = {"w1": (5, 7), "w2": (7, 5), "w3": (5, 7)}
    tensors = {f"old.{i}.{w}": torch.randn(size) for w, size in sizes.items() for i in range(3)}
    tensors |= {"old.weight": torch.randn(5, 7), "renamed.bias": torch.randn(5)}
    if dist.get_rank() == 0:
        save_file(tensors, tmp_path / "model.safetensors")
    dist.barrier()
    stacked = {
        w: Joined(tuple(f"old.{i}.{w}" for i in range(3)), is_new=True) for w in ("w1", "w2", "w3")
    }
    names = {"gate_up": Joined((stacked["w1"], stacked["w3"]), dim=1), "down": stacked["w2"]}
    with torch.device("meta"):
        model = _Experts()
    fully_shard(model, granularity=granularity)
    with pytest.raises(ValueError, match=r"missing: \['renamed.weight'\]; unexpected: \['old.we"):
        load_safetensors(model, tmp_path, names=names)
    load_safetensors(model, tmp_path, names=names | {"renamed.weight": "old.weight"})
    parts = {w: torch.stack([tensors[f"old.{i}.{w}"] for i in range(3)]) for w in sizes}
    assert_equal(model.gate_up.full_tensor(), torch.cat([parts["w1"], parts["w3"]], dim=1))
    assert_equal(model.down.full_tensor(), parts["w2"])
    assert_equal(model.renamed.weight.full_tensor(), tensors["old.weight"])
    assert_equal(model.renamed.bias.full_tensor(), tensors["renamed.bias"])
    odd = {"gate_up": Joined((stacked["w1"], stacked["w2"]), dim=1)}
    with pytest.raises(ValueError, match="the parts of 'gate_up' have shapes that do not fit"):
        load_safetensors(model, tmp_path, names=odd, strict=False)


class _Rotary(nn.Module):
    """A module of buffers that no checkpoint has, as HF's rotary embeddings are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", 1.0 / torch.arange(1, 5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


class _Rotated(Net):
    """Initialises its modules by `_init_weights`, as models of transformers do."""

    def __init__(self, is_known: bool) -> None:
        super().__init__(num_blocks=1)
        self.rotary = _Rotary()
        self.is_known = is_known

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, _Rotary) and self.is_known:
            module.inverse.copy_(1.0 / torch.arange(1, 5))


def _load_checkpoint(model: nn.Module, path: Path) -> object:
    return load_checkpoint(path, model)


def _save_checkpoint(model: nn.Module, path: Path) -> object:
    return save_checkpoint(path, model, step=1)


@pytest.mark.parametrize(
    ("save", "load"),
    [(_save_checkpoint, _load_checkpoint), (save_safetensors, load_safetensors)],
    ids=["checkpoint", "safetensors"],
)
@distributed(2)
def test_buffers_of_no_checkpoint_are_computed_by_their_module(
    save: Callable[..., object], load: Callable[..., object], tmp_path: Path
) -> None:
    """Where it does write them; otherwise they are named."""
    model = _Rotated(True)
    shard_blocks(model)
    save(model, tmp_path)
    with pytest.raises(ValueError, match=r"\['rotary.inverse'\] are on the meta device"):
        load(on_meta(lambda: _Rotated(False)), tmp_path)
    other = on_meta(lambda: _Rotated(True))
    load(other, tmp_path)
    assert_equal(other.rotary.inverse, 1.0 / torch.arange(1, 5))
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert_equal(b.to_local(), a.to_local(), name)


class _Pretrained(Net):
    """Saves as models of transformers do, which know nothing of shards."""

    def save_pretrained(self, path: Path, *, state_dict: dict[str, Tensor], text: str = "") -> None:
        if text == "fails":
            raise OSError("no space left")
        path.mkdir()
        save_file(dict(state_dict), path / "model.safetensors", {"text": text})


@distributed(2)
def test_save_pretrained_writes_whole_values(tmp_path: Path) -> None:
    """On the first rank, with the method's own options; its errors are raised on all."""
    torch.manual_seed(0)
    model = _Pretrained()
    plain = copy.deepcopy(model.state_dict())
    shard_blocks(model)
    save_pretrained(model, tmp_path / "model", text="some")
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == plain.keys()
    for name, value in plain.items():
        assert_equal(found[name], value, name)
    with pytest.raises(RuntimeError, match="no space left"):
        save_pretrained(model, tmp_path / "other", text="fails")
    inside = _Pretrained()  # as get_base_model() of peft returns it
    inside.out = nn.Sequential(OrderedDict(base_layer=inside.out))
    shard_blocks(inside)
    with pytest.raises(ValueError, match=r"'out.base_layer.weight'.*get_peft_model"):
        save_pretrained(inside, tmp_path / "adapted")
    assert not (tmp_path / "adapted").exists()
