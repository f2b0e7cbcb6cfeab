"""Runs of other libraries, continued: three more steps beside the library's own."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from composable_shard import (
    MixedPrecisionPolicy,
    StateDictOptions,
    fully_shard,
    get_model_state_dict,
    load_checkpoint,
)
from composable_shard.checkpoint import LoadedCheckpoint
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed, run_ranks
from tests.peers import model as run

FIXTURES = Path(__file__).parent / "fixtures"
_TIED_NBYTES = 2 * 4 * 11 * 6


def fixture(name: str) -> Path:
    """Return the directory of a fixture, whose name has a version too."""
    (found,) = FIXTURES.glob(f"{name}-[0-9]*")
    return found


class _SplitLinear(nn.Linear):
    """A linear layer as DeepSpeed's stage 3 computes it, with a rounding more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, rounded, plus the bias."""
        product = x.matmul(self.weight.t())
        return product if self.bias is None else product + self.bias


def continue_peer(
    path: Path, *, kind: str = "", dtype: str = "float32"
) -> tuple[LoadedCheckpoint, dict[str, Any], int]:
    """Load a checkpoint and take three steps.

    Returns what was told, the parameters, and the bytes that this rank holds.

    Args:
        kind: "inner" puts a module around the model, "untied" gives the head weights of its own,
            and with "plain" DDP takes the steps. "rounded" rounds gradients to 16 bits, "split"
            the products of linear layers before the bias.
    """
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(1)
    model = run.PeerModel().to(getattr(torch, dtype))
    model.offset = model.offset.float()  # DeepSpeed leaves buffers as they are
    if "untied" in kind:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    wrapped: nn.Module = nn.ModuleDict({"inner": model}) if "inner" in kind else model
    policy = MixedPrecisionPolicy(main_dtype=torch.float32, reduce_dtype=torch.float32)
    options: dict[str, Any] = {} if dtype == "float32" else {"mp_policy": policy}
    for module in model.modules() if "split" in kind else ():
        if isinstance(module, nn.Linear):
            module.__class__ = _SplitLinear
    is_plain = "plain" in kind
    for each in () if is_plain else (model.up, model.down, model):
        fully_shard(each, **options)
    is_trainers = "trainer" in kind
    groups = _groups_of_trainer(model) if is_trainers else run.two_groups(model)
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    if is_trainers:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (6 - step) / 6)
    loaded = load_checkpoint(path, wrapped, optimizer, scheduler=scheduler)
    held = _nbytes_on_rank(model, optimizer)
    called = DistributedDataParallel(model) if is_plain else model
    streams = [list(run.peer_batches(3, each)) for each in range(run.WORLD_SIZE)]
    for step in range(run.NUM_STEPS):
        # More ranks than the run had get the same batches twice, fewer get all of them.
        mine = [rank % run.WORLD_SIZE] if world_size >= run.WORLD_SIZE else [0, 1]
        tokens = torch.cat([streams[each][step] for each in mine])
        optimizer.zero_grad()
        run.peer_loss(called(tokens), tokens).backward()
        for param in model.parameters() if "rounded" in kind else ():
            if param.grad is not None:
                param.grad.copy_(param.grad.bfloat16())
        optimizer.step()
        scheduler.step()
    values = get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True))
    return loaded, {name: value.clone() for name, value in values.items()}, held


def _groups_of_trainer(model: nn.Module) -> list[dict[str, object]]:
    """Return the groups of `Trainer`: biases and norms have no weight decay."""
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    is_rest = {name: "bias" in name or "norm" in name for name, _ in named}
    return [
        {"params": [each for name, each in named if not is_rest[name]], "weight_decay": 0.1},
        {"params": [each for name, each in named if is_rest[name]], "weight_decay": 0.0},
    ]


def _nbytes_on_rank(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of this rank's parameters, buffers and optimizer state."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *model.buffers(), *states]
    local = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    return sum(each.nbytes for each in local if isinstance(each, torch.Tensor))


def assert_continues(
    path: str, world_size: int, tolerance: float, twice_nbytes: int = 0, **options: Any
) -> LoadedCheckpoint:
    """Check that a run goes on as the library's own did, and return what rank 0 was told.

    The library's own steps were taken on another CPU, whose kernels may round otherwise. So with a
    tolerance of 0, DDP takes them here too.

    Args:
        twice_nbytes: Bytes of tied parameters that the files have twice: they are compared.
    """
    name, _, rest = path.partition("/")
    found = run_ranks(world_size, continue_peer, fixture(name) / rest, **options)
    expected = torch.load(fixture(name) / "expected.pt", weights_only=True)
    loaded, values, _ = found[0]
    assert {"model", "optimizer", "step"} <= set(loaded.taken)
    assert expected.keys() <= values.keys()
    if tolerance == 0:
        tolerance = 1e-6
        options["kind"] = f"{options.get('kind', '')} plain"
        plain = run_ranks(world_size, continue_peer, fixture(name) / rest, **options)[0][1]
        for key in expected:
            assert_equal(values[key], plain[key], key)
    for key, value in expected.items():
        difference = (values[key].float() - value).abs().max().item()
        assert difference <= tolerance, f"{key}: {difference}"
    for loaded, _, held in found:
        # Frozen and 16-bit values are wider here than in the files.
        assert loaded.nbytes_read <= 1.05 * held + 64 + twice_nbytes, (loaded.nbytes_read, held)
    return found[0][0]


# On two ranks every bit is DDP's. On one and four the terms of a mean have another order.
WORLD_SIZES = pytest.mark.parametrize(("world_size", "tolerance"), [(2, 0), (4, 1e-6), (1, 1e-6)])


@WORLD_SIZES
@pytest.mark.parametrize("name", ["ddp-torch", "named-torch", "zero-torch", "oss-fairscale"])
def test_file_of_torch_save_continues(name: str, world_size: int, tolerance: float) -> None:
    """Torch's own optimizer, by number and by name, and one that is split over the ranks."""
    loaded = assert_continues(f"{name}/checkpoint.pt", world_size, tolerance)
    assert loaded.step == 3
    assert "scheduler" in loaded.taken
    assert loaded.left == ("epoch",)


def test_milestones_of_a_scheduler_are_counted_still(tmp_path: Path) -> None:
    """Its `Counter` became a plain dict, which has no elements()."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5], 0.5)

    kinds = ("model", "optimizer", "scheduler")
    saved, loaded = make(), make()
    saved[1].step()
    saved[2].step()
    torch.save({k: each.state_dict() for k, each in zip(kinds, saved, strict=True)}, tmp_path / "x")
    load_checkpoint(tmp_path / "x", *loaded[:2], scheduler=loaded[2])
    assert loaded[2].milestones == saved[2].milestones
    assert list(loaded[2].milestones.elements()) == [2, 2, 5]
    rates = []
    for each in (saved, loaded):
        each[1].step()
        each[2].step()
        rates.append(each[2].get_last_lr())
    assert rates == [[0.25], [0.25]]


@distributed(2)
def test_ranks_with_files_of_other_steps_load_nothing(tmp_path: Path) -> None:
    """Each rank has a disk of its own, and one of them an older file of the same form."""
    path = tmp_path / str(dist.get_rank()) / "run.pt"
    path.parent.mkdir()
    model = nn.Linear(2, 2)
    torch.save({"model": model.state_dict(), "step": 4 - dist.get_rank()}, path)
    with torch.no_grad():
        model.weight.zero_()
    with pytest.raises(ValueError, match=r"the ranks see different files in .*run\.pt"):
        load_checkpoint(path, model)
    assert not model.weight.any()


def test_accelerates_directory_continues() -> None:
    """`Accelerator.save_state`, whose safetensors have one name of tied weights."""
    loaded = assert_continues("state-accelerate", 2, 0)
    assert {"scheduler", "rng"} <= set(loaded.taken)
    assert loaded.left == ("expected.pt",)


@WORLD_SIZES
@pytest.mark.parametrize("name", ["fsdp-accelerate", "fsdp-full-accelerate"])
def test_accelerates_directory_of_fsdp_continues(
    name: str, world_size: int, tolerance: float
) -> None:
    """Directories of DCP, or files of torch.save with names of FSDP."""
    loaded = assert_continues(name, world_size, tolerance, _TIED_NBYTES)
    assert "scheduler" in loaded.taken
    assert ("rng" in loaded.taken) == (world_size == 2)
    assert loaded.left == (("expected.pt",) if world_size == 2 else ("rng", "expected.pt"))


def test_trainers_files_beside_those_of_fsdp_are_taken(tmp_path: Path) -> None:
    """`Trainer` with FSDP lets accelerate write, and names its own files otherwise."""
    path = tmp_path / "checkpoint-3"
    shutil.copytree(fixture("fsdp-accelerate"), path)
    (path / "scheduler.bin").rename(path / "scheduler.pt")
    (path / "trainer_state.json").write_text('{"global_step": 3}')
    model = run.PeerModel()
    optimizer = torch.optim.AdamW(run.two_groups(model), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.25)
    loaded = load_checkpoint(path, model, optimizer, scheduler=scheduler)
    assert (loaded.step, loaded.world_size, scheduler.last_epoch) == (3, 2, 3)
    assert loaded.left == ("rng", "expected.pt")


def load_generators(path: Path, kind: str) -> bool:
    """Load a checkpoint; return whether each generator has the state of this rank's file."""
    model = run.PeerModel()
    groups = run.two_groups(model)
    if "inner" in kind:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        groups = _groups_of_trainer(model)
    wrapped: nn.Module = nn.ModuleDict({"inner": model}) if "inner" in kind else model
    loaded = load_checkpoint(path, wrapped, torch.optim.AdamW(groups, lr=1.0))
    (file,) = path.glob(f"r*_state*_{torch.distributed.get_rank()}.p*")
    saved = torch.load(file, weights_only=False)  # a fixture
    python, torchs, numpys = (
        ("random_state", "torch_manual_seed", "numpy_random_seed")
        if "random_state" in saved
        else ("python", "cpu", "numpy")
    )
    assert random.getstate() == saved[python]
    assert_equal(torch.get_rng_state(), saved[torchs], "torch")
    found = numpy.random.get_state(legacy=True)
    assert [list(found[1]), *found[2:]] == [list(saved[numpys][1]), *saved[numpys][2:]]
    return loaded.is_rng_restored


@pytest.mark.parametrize(
    ("name", "kind"),
    [("state-accelerate", ""), ("fsdp-accelerate", ""), ("trainer-transformers", "inner")],
)
def test_generators_go_on_on_each_rank(name: str, kind: str) -> None:
    """Of Python, torch and numpy, from the file of the rank."""
    path = fixture(name) / ("checkpoint-3" if kind else "")
    assert run_ranks(2, load_generators, path, kind) == [True, True]


def test_trainers_directory_continues() -> None:
    """The checkpoint-3 of `Trainer`, whose groups are those with and without decay."""
    loaded = assert_continues(
        "trainer-transformers/checkpoint-3", 2, 1e-6, kind="inner trainer untied",
    )  # fmt: skip
    assert loaded.step == 3
    assert "scheduler" in loaded.taken


def test_lightnings_file_continues() -> None:
    """The `.ckpt` of Lightning with DDP."""
    loaded = assert_continues("ddp-lightning/run.ckpt", 2, 0, kind="inner")
    assert (loaded.version, loaded.step) == ("2.6.6", 3)


@WORLD_SIZES
@pytest.mark.parametrize("name", ["fsdp2-torch", "fsdp1-torch", "titan-torch"])
def test_directory_of_dcp_continues(name: str, world_size: int, tolerance: float) -> None:
    """Keys of torch's functions and of torchtitan, and boxes of rows and of flat ranges."""
    loaded = assert_continues(name, world_size, tolerance, _TIED_NBYTES)
    assert (loaded.step, loaded.world_size) == (3, 2)


def test_lightnings_directory_continues() -> None:
    """ModelParallelStrategy writes DCP with keys of its own, and the rest beside it."""
    loaded = assert_continues("sharded-lightning/run.ckpt", 2, 0, _TIED_NBYTES, kind="inner")
    assert (loaded.version, loaded.step) == ("2.6.6", 3)


@WORLD_SIZES
@pytest.mark.parametrize("name", ["stage0-fp32", "stage1-fp32", "stage2-fp32", "stage3-fp32"])
def test_deepspeeds_directory_continues(name: str, world_size: int, tolerance: float) -> None:
    """Flat partitions of two groups, tied and frozen parameters, a buffer, and the file latest."""
    loaded = assert_continues(f"{name}-deepspeed", world_size, tolerance)
    assert (loaded.version, loaded.step, loaded.world_size) == ("0.19.8", 3, 2)


@pytest.mark.parametrize("name", ["stage1-bf16", "stage2-bf16", "stage3-bf16"])
def test_deepspeeds_master_weights_continue(name: str) -> None:
    """Weights of 16 bits: the master weights are taken.

    Where the steps round as DeepSpeed's do they are the same. It rounds averages of gradients to 16
    bits, which are fp32 here, and in stage 3 products of linear layers before it adds the bias.
    """
    kind = "rounded split" if "stage3" in name else "rounded"
    loaded = assert_continues(f"{name}-deepspeed", 2, 1e-6, dtype="bfloat16", kind=kind)
    assert loaded.step == 3
    assert_continues(f"{name}-deepspeed", 2, 3e-4, dtype="bfloat16")


@WORLD_SIZES
@pytest.mark.parametrize("name", ["universal2", "universal3"])
def test_deepspeeds_universal_checkpoint_continues(
    name: str, world_size: int, tolerance: float
) -> None:
    """Both layouts: dicts in the parameters' shapes, and flat tensors without a count of steps."""
    assert assert_continues(f"{name}-deepspeed/universal", world_size, tolerance).step == 3


def test_deepspeeds_elastic_checkpoint_says_that_it_has_no_options() -> None:
    """Its files have the state alone: the learning rate stays, and the result says so."""
    model, before = run.PeerModel(), run.make_peer_model()
    optimizer = torch.optim.AdamW(run.two_groups(model), lr=1.0)
    loaded = load_checkpoint(fixture("elastic-deepspeed"), model, optimizer)
    assert any("do not say the options of 2 groups" in each for each in loaded.notes)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 1.0]
    assert optimizer.state[model.up.weight]["step"].item() == 3
    assert not torch.equal(model.up.weight, before.up.weight)
    expected = _loaded_values("stage1-fp32-deepspeed")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("key", ["fp32_groups", "fp32_groups_flat"])
def test_deepspeeds_16_bit_weights_without_zero_are_refused(key: str, tmp_path: Path) -> None:
    """Its files number the master weights, and have no names for the numbers."""
    weight = torch.ones(2, 2)
    optimizer = {
        "optimizer_state_dict": {"state": {0: {"exp_avg": weight}}, "param_groups": []},
        key: [[weight]],
    }
    main = {"module": {"weight": weight.bfloat16()}, "param_shapes": None, "optimizer": optimizer}
    (tmp_path / "global_step3").mkdir()
    torch.save(main, tmp_path / "global_step3" / "mp_rank_00_model_states.pt")
    (tmp_path / "latest").write_text("global_step3")
    with pytest.raises(ValueError, match=r"does not say the names.*save with ZeRO stage 1"):
        load_checkpoint(tmp_path, nn.Linear(2, 2, bias=False))


def _loaded_values(name: str) -> dict[str, torch.Tensor]:
    model = run.PeerModel()
    load_checkpoint(fixture(name), model)
    return model.state_dict()


@pytest.mark.parametrize("name", ["stage1-fp16", "stage3-fp16"])
def test_deepspeeds_loss_scale_is_taken(name: str) -> None:
    """Its dynamic scale goes on as that of a GradScaler."""
    model = run.PeerModel()
    optimizer = torch.optim.AdamW(run.two_groups(model), lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    loaded = load_checkpoint(fixture(f"{name}-deepspeed"), model, optimizer, scaler=scaler)
    assert "scaler" in loaded.taken
    found = scaler.state_dict()
    assert (found["scale"], found["growth_interval"], found["_growth_tracker"]) == (16.0, 1000, 3)
