"""Hugging Face `safetensors` directories: written and read with equal values, each rank its own."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from composable_shard import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    count_collectives,
    fully_shard,
    get_handles,
    lazy_init,
    load_safetensors,
    reshard,
    save_safetensors,
    unshard,
    unshard_params,
)
from composable_shard.huggingface.files import TensorFiles, TensorWriter, parse_nbytes
from tests.harness.assertions import assert_equal
from tests.harness.memory import peak_bytes
from tests.harness.ranks import distributed, run_ranks
from tests.programs.models import (
    Net,
    Tied,
    Wide,
    every_granularity,
    net_without_first_rank,
    on_meta,
    rank_input,
    shard_blocks,
    shard_root,
)


class _SavedModel(Net):
    """With a tie between units, buffers of all kinds, odd layouts and a parameter of no unit."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.coarse = nn.Parameter(torch.randn(3, 3, 3).to(torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.randn(4), persistent=False)


def _make_saved(seed: int = 0, make: Callable[[], nn.Module] = _SavedModel) -> Any:
    torch.manual_seed(seed)
    return make()


def _full_values(model: nn.Module) -> dict[str, Tensor]:
    """Return full values by the names of the original parameters; a collective."""
    with unshard_params(model, writeback=False):
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
            for name, value in model.state_dict().items()
        }


def _assert_same_state_dict(model: nn.Module, expected: nn.Module) -> None:
    found, wanted = _full_values(model), expected.state_dict()
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert_equal(found[name], value, name)


_LAYOUTS: dict[str, Callable[[nn.Module], object]] = {
    "units": shard_blocks,
    "one unit": shard_root,
    "one flat parameter": lambda m: shard_blocks(m, use_orig_params=False),
    "kept": lambda m: shard_blocks(m, strategy=ShardingStrategy.SHARD_GRAD_OP),
    "replicated": lambda m: shard_blocks(m, strategy=ShardingStrategy.NO_SHARD),
    "mixed": lambda m: shard_blocks(m, granularity=every_granularity),
    "offloaded": lambda m: shard_blocks(m, offload_policy=OffloadPolicy(params=True)),
    "mixed precision": lambda m: shard_blocks(
        m, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ),
}


# --- values ---


@pytest.mark.parametrize("layout", _LAYOUTS)
@distributed(2, 3)
def test_saved_files_hold_the_plain_models_tensors_and_load_into_any_layout(
    layout: str, tmp_path: Path, world_size: int
) -> None:
    """Every name, shape, dtype and value, as safetensors itself reads them; and back again."""
    plain, folder = _make_saved(), tmp_path / "checkpoint"
    model = copy.deepcopy(plain)
    _LAYOUTS[layout](model)
    save_safetensors(model, folder, max_shard_size=700)
    _assert_holds(folder, plain)
    other = _make_saved(seed=1)
    _LAYOUTS[layout](other)
    params = dict(other.named_parameters())
    assert load_safetensors(other, folder) == ([], [])
    _assert_same_state_dict(other, plain)
    assert all(param is params[name] for name, param in other.named_parameters())
    assert {handle.guard.num_writes > 0 for handle in get_handles(other)} == {True}


def _assert_holds(folder: Path, plain: nn.Module) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    weight_map = index["weight_map"]
    files = sorted(set(weight_map.values()))
    assert files == [
        f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, 1 + len(files))
    ]
    assert sorted(path.name for path in folder.iterdir()) == [
        *files,
        "model.safetensors.index.json",
    ]
    contents = {file: load_file(folder / file) for file in files}
    assert weight_map == {name: file for file in files for name in contents[file]}
    found = {name: value for file in files for name, value in contents[file].items()}
    expected = plain.state_dict()
    # As transformers does: of tied tensors the first.
    assert set(expected) - set(found) == {"blocks.1.up.weight"}
    for name, value in found.items():
        assert_equal(value, expected[name].contiguous(), name)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    for file in files:
        with safetensors.safe_open(folder / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}


def _save_from(layout: str, folder: Path) -> None:
    model = _make_saved()
    _LAYOUTS[layout](model)
    save_safetensors(model, folder)


def _load_into(layout: str, folder: Path) -> None:
    model = _make_saved(seed=1)
    _LAYOUTS[layout](model)
    load_safetensors(model, folder)
    _assert_same_state_dict(model, _make_saved())


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (2, 4), (1, 2), (4, 2)])
def test_any_number_of_ranks_loads_what_any_other_saved(
    before: int, after: int, tmp_path: Path
) -> None:
    """Files know nothing of ranks."""
    run_ranks(before, _save_from, "units", tmp_path)
    run_ranks(after, _load_into, "one unit", tmp_path)


def _shard_hybrid(model: nn.Module) -> None:
    shard_blocks(model, mesh=init_device_mesh("cpu", (2, 2)))


def _shard_tensor_parallel(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
    parallelize_module(model, mesh["tp"], {"out": RowwiseParallel()})
    shard_blocks(model, mesh=mesh["dp"])


@pytest.mark.parametrize("shard", [_shard_hybrid, _shard_tensor_parallel])
@distributed(4)
def test_meshes_of_two_axes_save_and_load_whole_tensors(
    shard: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    """Copies are written once, tensor-parallel parts joined; each part finds its own values."""
    plain, models = _make_saved(make=Net), [_make_saved(seed, make=Net) for seed in (0, 1)]
    for model in models:
        shard(model)
    save_safetensors(models[0], tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert list(found) == sorted(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert_equal(found[name], value, name)
    load_safetensors(models[1], tmp_path)
    _assert_same_state_dict(models[1], plain)


@distributed(2)
def test_tensor_parallel_parts_without_data_parallel_ranks(tmp_path: Path) -> None:
    """A mesh of one data-parallel rank: the first tensor-parallel one writes."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    plain, models = _make_saved(make=Net), [_make_saved(seed, make=Net) for seed in (0, 1)]
    for model in models:
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel()})
        parallelize_module(model.inp, mesh["tp"], ColwiseParallel())
        for module in (model.inp, model.out):  # in no unit
            module.requires_grad_(False)
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
    save_safetensors(models[0], tmp_path)
    for name, value in load_file(tmp_path / "model.safetensors").items():
        assert_equal(value, plain.state_dict()[name], name)
    load_safetensors(models[1], tmp_path)
    _assert_same_state_dict(models[1], plain)


@distributed(2)
def test_a_model_that_no_rank_could_write_is_refused(tmp_path: Path) -> None:
    """Where units' meshes begin with different ranks, none has all values."""
    model = net_without_first_rank()
    with pytest.raises(NotImplementedError, match=r"'blocks\.0'.*rank0_only=False"):
        save_safetensors(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@distributed(2)
def test_values_are_cast_both_ways(tmp_path: Path) -> None:
    """`dtype` casts what is floating-point; a load casts to what the model has; main values."""
    plain = _make_saved(make=Net).bfloat16()
    model = copy.deepcopy(plain)
    shard_blocks(model, mp_policy=MixedPrecisionPolicy(main_dtype=torch.float32))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1e-6)  # less than bf16 can tell
    expected = _full_values(model)
    save_safetensors(model, tmp_path, metadata={"step": "7"})
    for name, value in load_file(tmp_path / "model.safetensors").items():
        assert_equal(value, expected[name], name)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "step": "7"}
    model.register_buffer("count", torch.tensor(3))
    save_safetensors(model, tmp_path, dtype=torch.float64)
    found = load_file(tmp_path / "model.safetensors")
    assert found.pop("count").dtype is torch.int64
    assert {value.dtype for value in found.values()} == {torch.float64}
    other = _make_saved(1, make=Net).bfloat16()
    shard_blocks(other)
    assert load_safetensors(other, tmp_path, strict=False) == ([], ["count"])
    for name, value in _full_values(other).items():
        assert_equal(value, expected[name].bfloat16(), name)


@pytest.mark.fast
@distributed(2)
def test_training_goes_on_with_loaded_weights(tmp_path: Path) -> None:
    """Full parameters that were kept or gathered before are not used any more."""
    plain = _make_saved(make=Net)
    for layout in ("units", "kept", "one flat parameter"):
        model, other = copy.deepcopy(plain), _make_saved(1, make=Net)
        for each in (model, other):
            _LAYOUTS[layout](each)
        x = rank_input(2, 5)
        with torch.no_grad():
            other(x)
        save_safetensors(model, tmp_path)
        load_safetensors(other, tmp_path)
        assert_equal(other(x).detach(), plain(x).detach())
        for each in (model, other):
            each(x).sum().backward()
            torch.optim.SGD(each.parameters(), lr=0.1).step()
        for first, second in zip(
            _full_values(model).values(), _full_values(other).values(), strict=True
        ):
            assert_equal(first, second)


# --- names ---


@distributed(2)
def test_names_are_those_of_the_plain_model_under_wrappers(tmp_path: Path) -> None:
    """Activation checkpointing and `torch.compile` add to module names, not to those of files."""
    plain = _make_saved(make=Net)
    models = [copy.deepcopy(plain), _make_saved(1, make=Net)]
    for model in models:
        model.blocks[0] = checkpoint_wrapper(model.blocks[0])
        model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
        shard_blocks(model)
    save_safetensors(models[0], tmp_path)
    assert list(load_file(tmp_path / "model.safetensors")) == sorted(plain.state_dict())
    load_safetensors(models[1], tmp_path)
    for value, expected in zip(_full_values(models[1]).values(), plain.parameters(), strict=True):
        assert_equal(value, expected.detach())
    around = nn.Sequential(copy.deepcopy(plain))  # whose unit has the parameters outside of blocks
    for block in around[0].blocks:
        fully_shard(block)
    fully_shard(around)
    save_safetensors(around[0], tmp_path / "part")
    found = load_file(tmp_path / "part" / "model.safetensors")
    assert found.keys() == plain.state_dict().keys()
    for name, value in found.items():
        assert_equal(value, plain.get_parameter(name).detach(), name)


@pytest.mark.parametrize("name", ["blocks.0.up.weight", "blocks.1.up.weight"])
@distributed(2)
def test_any_name_of_a_tied_parameter_is_enough(name: str, tmp_path: Path) -> None:
    """Hugging Face leaves out one of them, not always the same."""
    plain, model = _make_saved(), _make_saved(1)
    names = {"blocks.0.up.weight", "blocks.1.up.weight"} - {name}
    if dist.get_rank() == 0:
        tensors = {k: v.contiguous() for k, v in plain.state_dict().items() if k not in names}
        save_file(tensors, tmp_path / "weights.safetensors")
    dist.barrier()
    shard_blocks(model)
    for path in (tmp_path, tmp_path / "weights.safetensors"):
        load_safetensors(model, path)
        _assert_same_state_dict(model, plain)


# --- memory, bytes, messages ---


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of this rank's shards, and of the largest unit."""
    nbytes = [handle.layout.padded_numel * 4 for handle in get_handles(model)]
    return sum(handle.layout.shard_numel * 4 for handle in get_handles(model)), max(nbytes)


@distributed(2, 3)
def test_saving_holds_one_unit_and_one_file_and_gathers_once(
    tmp_path: Path, world_size: int
) -> None:
    """On the first rank; the others hold one unit. One all-gather for each."""
    model = _make_saved(make=Wide)
    shard_blocks(model)
    _, unit = _sizes(model)
    with count_collectives() as log, peak_bytes() as memory:
        save_safetensors(model, tmp_path, max_shard_size=2 * unit)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    # The unit, the next one or copies, and a file of two.
    assert memory.peak <= (4 if dist.get_rank() == 0 else 1) * unit + 2048
    assert memory.current <= 2048
    sizes = [h.layout.padded_numel * 4 for h in get_handles(model)]
    found = sorted(e.nbytes for e in log.events if e.kind == "all_gather")
    assert found == sorted(sizes + [31 * world_size] * 2)


@contextmanager
def _requested() -> Iterator[dict[str, int]]:
    """Count the elements that slices of files ask for, by name."""
    numels: dict[str, int] = {}
    original = safetensors.safe_open

    class Slice:
        def __init__(self, name: str, inner: Any) -> None:
            self.name, self.inner = name, inner

        def get_shape(self) -> list[int]:
            return self.inner.get_shape()

        def __getitem__(self, index: Any) -> Tensor:
            part = self.inner[index]
            numels[self.name] = numels.get(self.name, 0) + part.numel()
            return part

    class Open:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.inner = original(*args, **kwargs)

        def __enter__(self) -> Any:
            self.opened = self.inner.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self.inner.__exit__(*args)

        def keys(self) -> list[str]:
            return self.opened.keys()

        def get_slice(self, name: str) -> Slice:
            return Slice(name, self.opened.get_slice(name))

    safetensors.safe_open = Open
    try:
        yield numels
    finally:
        safetensors.safe_open = original


@distributed(2, 3)
def test_each_rank_reads_its_own_rows_alone(tmp_path: Path, world_size: int) -> None:
    """Its range of each parameter, rounded to whole rows; together everything once."""
    model = _make_saved(make=Wide)
    shard_blocks(model)
    save_safetensors(model, tmp_path)
    with _requested() as numels, peak_bytes() as memory:
        load_safetensors(model, tmp_path)
    # Copied from the mapped file, which the profiler counts, straight into the shards.
    mapped = (tmp_path / "model.safetensors").stat().st_size
    assert memory.allocated <= mapped + 2048
    for name, param in model.named_parameters():
        row = param.shape[1:].numel()
        own = param.to_local().numel()
        assert own <= numels.get(name, 0) <= own + 2 * (row - 1), name
    total = torch.tensor(sum(numels.values()))
    dist.all_reduce(total)
    everything = sum(param.numel() for param in model.parameters())
    assert everything <= total < everything + 2 * 128 * world_size * 6


# --- from the meta device ---


@distributed(2, 3)
def test_start_from_meta_holds_the_shards_and_one_unit(tmp_path: Path, world_size: int) -> None:
    """No tensor of the model is there in full at any time, apart from one unit's buffer."""
    plain = _make_saved(make=Wide)
    model = copy.deepcopy(plain)
    shard_blocks(model)
    save_safetensors(model, tmp_path)
    model = on_meta(Wide)
    params = list(model.parameters())
    shards, unit = _sizes(model)
    with peak_bytes() as memory:
        load_safetensors(model, tmp_path)
        lazy_init(model)
    mapped = (tmp_path / "model.safetensors").stat().st_size  # which the profiler counts
    assert memory.peak <= mapped + shards + unit + 4096
    assert memory.current <= shards + 4096
    assert all(param is old for param, old in zip(model.parameters(), params, strict=True))
    _assert_same_state_dict(model, plain)


class _Counting(Tied):
    """With a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(3))


@pytest.mark.parametrize("layout", _LAYOUTS)
@distributed(2)
def test_training_from_meta_equals_training_from_memory(layout: str, tmp_path: Path) -> None:
    """With an optimizer that was built on meta; ties, buffers and unmanaged parameters too."""
    model = _make_saved(make=_Counting)
    _LAYOUTS[layout](model)
    save_safetensors(model, tmp_path)
    with torch.device("meta"):
        started = _Counting()
    _LAYOUTS[layout](started)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, started)]
    load_safetensors(started, tmp_path)
    assert started.count == 3
    for each, optimizer in zip((model, started), optimizers, strict=True):
        for step in range(2):
            each(rank_input(2, 5, step=step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, first), second in zip(
        _full_values(model).items(), _full_values(started).values(), strict=True
    ):
        assert_equal(second, first, name)


@distributed(2)
def test_meta_tensors_that_are_in_no_checkpoint_are_named(tmp_path: Path) -> None:
    """Before anything is changed; initialised by the user, they stay as they are."""
    model = _make_saved()
    shard_blocks(model)
    save_safetensors(model, tmp_path)
    started = on_meta(_SavedModel)
    with pytest.raises(ValueError, match="on the meta device") as caught:
        load_safetensors(started, tmp_path)
    assert str(caught.value).startswith("['table'] are on the meta device, and the checkpoint does")
    assert all(param.is_meta for param in started.parameters())
    started.table = torch.ones(4)
    load_safetensors(started, tmp_path)
    for name, value in _full_values(model).items():
        assert_equal(_full_values(started)[name], value, name)
    assert_equal(started.table, torch.ones(4))
    started = on_meta(_SavedModel)
    started.register_parameter("more", nn.Parameter(torch.empty(3, device="meta")))
    with pytest.raises(ValueError, match=r"\['table', 'more'\]|\['more', 'table'\]"):
        load_safetensors(started, tmp_path, strict=False)


# --- errors ---


def _saved(folder: Path) -> Any:
    model = _make_saved(make=Net)
    shard_blocks(model)
    save_safetensors(model, folder, max_shard_size=700)
    return model


def _writes_and_shards(model: nn.Module) -> list[Any]:
    writes = [handle.guard.num_writes for handle in get_handles(model)]
    return [writes, *(param.to_local().tolist() for param in model.parameters())]


def _fails_alike(model: nn.Module, folder: Path, **options: Any) -> str:
    """Return the message of a load that raises ValueError, the same on all ranks."""
    before = _writes_and_shards(model)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- the tests look at the text
        load_safetensors(model, folder, **options)
    assert _writes_and_shards(model) == before
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1
    return str(caught.value)


def _remove(path: Path) -> None:
    path.unlink()


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _make_empty(path: Path) -> None:
    path.write_bytes(b"")


def _replace_by_pickle(path: Path) -> None:
    torch.save({"inp.weight": torch.ones(15, 5)}, path)


def _break_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8] = ord("[")
    path.write_bytes(data)


def _swap_file(path: Path) -> None:
    save_file({"other": torch.ones(2)}, path)


@distributed(2)
def test_files_of_other_values_on_one_rank_are_refused(tmp_path: Path) -> None:
    """Single files of one model have one name, and equal headers."""
    folder = tmp_path / f"own{dist.get_rank()}"
    folder.mkdir()
    values = {name: param.detach() for name, param in Net().named_parameters()}
    save_file(
        {name: each * (1 + dist.get_rank()) for name, each in values.items()},
        folder / "model.safetensors",
    )
    dist.barrier()
    model = _make_other()
    before = _writes_and_shards(model)
    with pytest.raises(ValueError, match=r"'model.safetensors'\] differ in size, header, values"):
        load_safetensors(model, folder)
    assert _writes_and_shards(model) == before


@pytest.mark.parametrize(
    "damage", [_remove, _truncate, _make_empty, _replace_by_pickle, _break_header, _swap_file]
)
@distributed(2)
def test_a_damaged_file_is_named_on_all_ranks(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    """Also where one rank alone sees it; nothing has been changed, and the next load works."""
    model = _saved(tmp_path)
    copies = tmp_path / f"copy{dist.get_rank()}"
    shutil.copytree(tmp_path, copies, ignore=shutil.ignore_patterns("copy*"))
    if dist.get_rank() == 1:
        damage(copies / "model-00002-of-00007.safetensors")
    message = _fails_alike(_make_other(), copies)
    assert "copy1/model-00002-of-00007.safetensors'" in message
    load_safetensors(model, tmp_path)


def _make_other() -> Any:
    model = _make_saved(1, make=Net)
    shard_blocks(model)
    return model


@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", '{"weight_map": 3}', '{"weight_map": {"inp.weight": "../x"}}']
)
@distributed(2)
def test_a_foreign_index_is_named(text: str, tmp_path: Path) -> None:
    """Whatever it is, and never a path that leads elsewhere."""
    if dist.get_rank() == 0:
        (tmp_path / "model.safetensors.index.json").write_text(text)
    dist.barrier()
    assert "model.safetensors.index.json'" in _fails_alike(_make_other(), tmp_path)


@distributed(2)
def test_directories_that_hold_no_checkpoint_are_named(tmp_path: Path) -> None:
    """Missing, empty, ambiguous."""
    assert _fails_alike(_make_other(), tmp_path / "none") == (
        f"expected a directory of safetensors files, and '{tmp_path}/none' is not there"
    )
    if dist.get_rank() == 0:
        for name in ("a.safetensors", "b.safetensors"):
            save_file({"x": torch.ones(1)}, tmp_path / name)
    dist.barrier()
    assert "found ['a.safetensors', 'b.safetensors']" in _fails_alike(_make_other(), tmp_path)


@distributed(2)
def test_missing_unexpected_and_misshaped_tensors_are_named(tmp_path: Path) -> None:
    """All of them, before anything is changed; without `strict` the names are returned."""
    model = _make_other()
    state = _make_saved(make=Net).state_dict()
    del state["inp.bias"], state["blocks.1.up.weight"]
    state["more"] = torch.ones(1)
    if dist.get_rank() == 0:
        save_file(state, tmp_path / "model.safetensors")
        save_file({**state, "out.bias": torch.ones(4)}, tmp_path / "misshaped.safetensors")
    dist.barrier()
    assert _fails_alike(model, tmp_path) == (
        "the checkpoint does not have the model's tensors; missing: ['inp.bias', "
        "'blocks.1.up.weight']; unexpected: ['more']. Pass strict=False to load those that both "
        "have, names={...} if they have other names there, and group= if other ranks load the rest."
    )
    message = _fails_alike(model, tmp_path / "misshaped.safetensors", strict=False)
    assert message == (
        "expected tensors of the model's shapes, found 'out.bias' (4,) (the model's is (3,))"
    )
    before = _full_values(model)
    keys = load_safetensors(model, tmp_path, strict=False)
    assert keys.missing_keys == ["inp.bias", "blocks.1.up.weight"]
    assert keys.unexpected_keys == ["more"]
    for name, value in _full_values(model).items():
        assert_equal(value, state.get(name, before[name]), name)


@distributed(2)
def test_models_that_show_full_parameters_are_refused(tmp_path: Path) -> None:
    """Their edits would be lost, or be read as what they are not."""
    model = _saved(tmp_path)
    for call in (load_safetensors, save_safetensors):
        with unshard_params(model), pytest.raises(RuntimeError, match="outside unshard_params"):
            call(model, tmp_path)
        unshard(model, recurse=True)
        with pytest.raises(RuntimeError, match=r"after reshard\(module\)"):
            call(model, tmp_path)
        reshard(model, recurse=True)
        with pytest.raises(ValueError, match="expected a module with sharded units"):
            call(nn.Linear(2, 2), tmp_path)
    with pytest.raises(RuntimeError, match="on the meta device"):
        save_safetensors(on_meta(Net), tmp_path)


@distributed(2)
def test_a_missing_package_is_named(tmp_path: Path) -> None:
    """With the extra that installs it, on all ranks if one lacks it."""
    model = _make_other()
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if "safetensors" in name}
    try:
        sys.modules["safetensors"] = None  # type: ignore[assignment]
        with pytest.raises(ImportError, match=r"pip install safetensors numpy"):
            save_safetensors(model, tmp_path)
        with pytest.raises(ImportError, match=r"pip install safetensors numpy"):
            load_safetensors(model, tmp_path)
    finally:
        sys.modules.update(kept)


# --- saves that fail ---


@distributed(2)
def test_a_save_that_fails_raises_everywhere_and_leaves_the_old_one(tmp_path: Path) -> None:
    """A full disk on the first rank, in any file: no rank hangs, the next save works."""
    model, other = _saved(tmp_path), _make_other()
    before = sorted(path.name for path in tmp_path.iterdir())
    dist.barrier()
    for number in range(3):
        with _failing_writes(number), pytest.raises(RuntimeError, match="No space"):
            save_safetensors(other, tmp_path, max_shard_size=700)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        load_safetensors(model, tmp_path)
        _assert_same_state_dict(model, _make_saved(make=Net))
    save_safetensors(other, tmp_path, max_shard_size=700)
    load_safetensors(model, tmp_path)
    _assert_same_state_dict(model, _make_saved(1, make=Net))


@contextmanager
def _failing_writes(number: int) -> Iterator[None]:
    module = sys.modules["safetensors.torch"]
    original, calls = module.save_file, itertools.count()

    def save(*args: Any) -> None:
        if next(calls) == number:
            raise OSError(28, "No space left on device")
        original(*args)

    module.save_file = save  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.save_file = original  # type: ignore[attr-defined]


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("sizes", [(700, 700), (700, 10**6), (10**6, 700), (10**6, 10**6)])
def test_a_reader_never_finds_files_of_two_saves(
    sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before any change of a directory, it holds the old save, the new one, or none."""
    values = [torch.zeros(200), torch.ones(200)]
    for number in range(40):
        folder = tmp_path / str(number)
        _write(folder, values[0], sizes[0])
        with monkeypatch.context() as patch:
            count = _stop_at(number, patch)
            with suppress(_Killed):
                _write(folder, values[1], sizes[1])
        found = _read_tensor_files(folder)
        assert found in ([0.0], [1.0], [])
        assert found or sizes == (700, 700)  # only an index that is overwritten leaves a gap
        if next(count) <= number:
            assert found == [1.0]
            break
    else:
        pytest.fail("the save has more steps than were tried")
    assert number >= 2


def _write(folder: Path, values: Tensor, max_nbytes: int) -> None:
    writer = TensorWriter(folder, max_nbytes)
    for name in "abc":
        writer.add(name, values + 0.0)
    writer.publish()


def _read_tensor_files(folder: Path) -> list[float]:
    try:
        with TensorFiles(folder) as files:
            assert sorted(files.tensors) == ["a", "b", "c"]
            return sorted({float(v) for name in "abc" for v in files.read(name, ()).unique()})
    except ValueError:
        return []


def _stop_at(number: int, patch: pytest.MonkeyPatch) -> Iterator[int]:
    """Raise before the change of a directory with this number."""
    count = itertools.count()
    for name in ("replace", "unlink"):
        original = getattr(Path, name)

        def stop(path: Path, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            if next(count) == number:
                raise _Killed
            return original(path, *args, **kwargs)

        patch.setattr(Path, name, stop)
    return count


@distributed(2)
def test_a_save_replaces_what_an_earlier_one_left_and_nothing_else(tmp_path: Path) -> None:
    """Whatever number of files either has."""
    model = _make_other()
    (tmp_path / "config.json").touch()
    for size in (700, "1KB", "5GB", 700):
        save_safetensors(model, tmp_path, max_shard_size=size)
        found = {path.name for path in tmp_path.iterdir()} - {"config.json"}
        if size == "5GB":
            assert found == {"model.safetensors"}
        else:
            index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
            assert found == {*index["weight_map"].values(), "model.safetensors.index.json"}
        assert (tmp_path / "config.json").exists()
        load_safetensors(model, tmp_path)


def test_sizes_are_numbers_or_texts() -> None:
    """Decimal and binary units, as Hugging Face has them."""
    assert [parse_nbytes(size) for size in (7, "5GB", "1.5 kb", "2MiB")] == [
        7,
        5 * 10**9,
        1500,
        2 * 2**20,
    ]
    for size in (0, -1, "many", "5 parsecs", "", "0GB"):
        with pytest.raises(ValueError, match="expected max_shard_size as a positive number"):
            parse_nbytes(size)
