"""Checkpoints go from any way of training to any other, model and optimizer, by value.

A *party* is one way of training, on some number of ranks. One trains, and saves; another loads what
it saved and must hold exactly the same values, by name, in full; then both go on alike.
"""

from __future__ import annotations

import copy
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as torch_state_dict
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import composable_shard
from composable_shard import Block, MixedPrecisionPolicy, ShardingStrategy
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed, run_ranks
from tests.programs.models import Layer, Net, shard_blocks, shard_root

pytestmark = pytest.mark.long

_States = tuple[dict[str, Any], dict[str, Any]]  # of the model and the optimizer


def _make_seeded(seed: int) -> Net:
    """Return a model of odd shapes, with a parameter that is never trained and a buffer."""
    torch.manual_seed(seed)
    model = Net(num_blocks=0)
    model.blocks.extend(Layer(15, 8) for _ in range(2))  # torch's tensor parallelism halves the 8
    model.blocks[1].down.bias.requires_grad_(False)
    model.register_buffer("scale", torch.randn(3))
    return model


def _two_group_adamw(model: nn.Module, seed: int) -> torch.optim.Optimizer:
    """Return AdamW with two groups, none with part of a unit; options tell the seeds apart."""
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in trained if "blocks" in n], "weight_decay": 0.1 + seed},
        {"params": [p for n, p in trained if "blocks" not in n], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01 * (1 + seed))


def _train_party(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    """Take a step with data that is the same on all ranks; return the loss."""
    generator = torch.Generator().manual_seed(step)
    loss = model(torch.randn(4, 5, generator=generator)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


# --- the parties ---


@dataclass(frozen=True)
class Party:
    """A way of training, and whose functions make its state dicts."""

    build: Callable[[Net], nn.Module]
    library: Any = composable_shard

    def states(self, model: nn.Module, optimizer: Any, **flags: Any) -> _States:
        options = self.library.StateDictOptions(**flags)
        return (
            self.library.get_model_state_dict(model, options=options),
            self.library.get_optimizer_state_dict(model, optimizer, options=options),
        )

    def load(self, model: nn.Module, optimizer: Any, states: _States, **flags: Any) -> None:
        options = self.library.StateDictOptions(**flags)
        self.library.set_model_state_dict(model, states[0], options=options)
        self.library.set_optimizer_state_dict(model, optimizer, states[1], options=options)


def _our_party(**options: Any) -> Party:
    def build(model: Net) -> nn.Module:
        shard_blocks(model, **options)
        return model

    return Party(build)


def _build_fsdp2(model: Net) -> nn.Module:
    for block in model.blocks:
        torch_fully_shard(block)
    return torch_fully_shard(model)


def _fsdp1(model: Net) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the frozen parameter
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )


def _whole(model: Net) -> nn.Module:
    shard_root(model)
    return model


def _build_hybrid(model: Net) -> nn.Module:
    shard_blocks(model, mesh=init_device_mesh("cpu", (2, 2)))
    return model


def _build_tensor_parallel(model: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard_blocks(model, mesh=mesh["dp"])
    return model


_MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_dtype=torch.float32)
PARTIES = {
    "one process": Party(lambda model: model, torch_state_dict),
    "DDP": Party(DistributedDataParallel, torch_state_dict),
    "FSDP2": Party(_build_fsdp2, torch_state_dict),
    "units": _our_party(),
    "one unit": Party(_whole),
    "SHARD_GRAD_OP": _our_party(strategy=ShardingStrategy.SHARD_GRAD_OP),
    "SHARD_OPTIM": _our_party(strategy=ShardingStrategy.SHARD_OPTIM),
    "NO_SHARD": _our_party(strategy=ShardingStrategy.NO_SHARD),
    "mixed precision": _our_party(mp_policy=_MIXED),
    "rows": _our_party(granularity="row"),
    "blocks": _our_party(granularity=Block(8)),
    "owned": _our_party(granularity="param"),
    "hybrid": Party(_build_hybrid),
    "tensor parallel": Party(_build_tensor_parallel),
}


# --- through torch.distributed.checkpoint ---


def _save_party(name: str, folder: Path) -> None:
    """Train two steps and save, sharded and in full."""
    party = PARTIES[name]
    model = party.build(_make_seeded(0))
    optimizer = _two_group_adamw(model, 0)
    for step in range(2):
        _train_party(model, optimizer, step)
    state, optim = party.states(model, optimizer)
    dcp.save({"model": state, "optim": optim}, checkpoint_id=folder / "dcp")
    full = party.states(model, optimizer, full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        torch.save(full, folder / "full.pt")


def _load_party(name: str, folder: Path) -> None:
    """Load into a fresh model and a fresh optimizer; compare with what was saved in full."""
    party = PARTIES[name]
    model = party.build(_make_seeded(1))
    optimizer = _two_group_adamw(model, 1)
    torch_state_dict._init_optim_state(optimizer)
    states = party.states(model, optimizer)
    found = {"model": states[0], "optim": states[1]}
    dcp.load(found, checkpoint_id=folder / "dcp")
    party.load(model, optimizer, (found["model"], found["optim"]))
    _check_party(party, model, optimizer, torch.load(folder / "full.pt"))


def _check_party(
    party: Party, model: nn.Module, optimizer: torch.optim.Optimizer, saved: _States
) -> None:
    """Compare all values with those saved, and a step with that of a plain model."""
    found = party.states(model, optimizer, full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        _assert_same_nested(found[0], saved[0], "model")
        _assert_same_nested(found[1]["state"], saved[1]["state"], "optimizer")
        _assert_same_groups(found[1], saved[1])
    if party is PARTIES["mixed precision"]:
        return
    plain = _make_seeded(2)
    plain_optimizer = _two_group_adamw(plain, 2)
    # A copy: torch's optimizers go on with the very tensors that they load.
    PARTIES["one process"].load(plain, plain_optimizer, copy.deepcopy(saved))
    loss, expected = _train_party(model, optimizer, 2), _train_party(plain, plain_optimizer, 2)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
    found = party.states(model, optimizer, full_state_dict=True, cpu_offload=True)
    for key, value in found[0].items() if dist.get_rank() == 0 else ():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=0, atol=1e-6)


def _assert_same_nested(found: Any, expected: Any, what: str) -> None:
    if isinstance(expected, dict):
        assert set(found) == set(expected), what
        for key, value in expected.items():
            _assert_same_nested(found[key], value, f"{what} {key}")
    elif isinstance(expected, Tensor):
        assert_equal(found, expected, what)
    else:
        assert found == expected, what


def _assert_same_groups(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare the options of groups; torch does not sort the names in them."""
    groups = [
        {
            min(group["params"]): {**group, "params": set(group["params"])}
            for group in d["param_groups"]
        }
        for d in (found, expected)
    ]
    assert groups[0] == groups[1]


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Return the folder that a party on so many ranks has saved to, once for all who load it."""

    @functools.cache
    def save(source: str, num_ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        run_ranks(num_ranks, _save_party, source, folder)
        return folder

    return save


@pytest.mark.parametrize(
    ("source", "before", "target", "after"),
    [
        ("FSDP2", 2, "units", 2),
        ("FSDP2", 3, "one unit", 2),
        ("units", 2, "FSDP2", 2),
        ("mixed precision", 2, "FSDP2", 3),
        ("DDP", 2, "units", 3),
        ("one unit", 3, "DDP", 2),
        ("one process", 1, "units", 2),
        ("one process", 1, "tensor parallel", 4),
        ("units", 2, "one process", 1),
        ("units", 2, "one unit", 1),
        ("units", 2, "one unit", 3),
        ("units", 2, "SHARD_GRAD_OP", 4),
        ("one unit", 3, "units", 2),
        ("hybrid", 4, "units", 2),
        ("units", 2, "hybrid", 4),
        ("tensor parallel", 4, "one process", 1),
        ("tensor parallel", 4, "units", 3),
        ("SHARD_GRAD_OP", 2, "SHARD_OPTIM", 3),
        ("SHARD_OPTIM", 2, "one unit", 3),
        ("NO_SHARD", 2, "mixed precision", 2),
        ("FSDP2", 2, "rows", 3),
        ("FSDP2", 2, "owned", 2),
        ("rows", 2, "FSDP2", 2),
        ("blocks", 3, "owned", 2),
        ("owned", 3, "FSDP2", 2),
        ("owned", 2, "blocks", 3),
        ("owned", 2, "one process", 1),
    ],
)
def test_checkpoints_go_from_any_party_to_any_other(
    source: str, before: int, target: str, after: int, saved_by: Callable[[str, int], Path]
) -> None:
    """Model, optimizer state and options of groups, bitwise; and the next step is a plain one's."""
    run_ranks(after, _load_party, target, saved_by(source, before))


def _muon(model: nn.Module, seed: int) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices, which it must see whole, and AdamW for the rest."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        torch.optim.Muon([p for p in trained if p.ndim == 2], lr=0.02 * (1 + seed)),
        torch.optim.AdamW([p for p in trained if p.ndim != 2], lr=0.01 * (1 + seed)),
    ]


def _step_muon(model: nn.Module, optimizers: list[torch.optim.Optimizer], step: int) -> Tensor:
    model.zero_grad()
    generator = torch.Generator().manual_seed(step)
    loss = model(torch.randn(4, 5, generator=generator)).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


def _save_muon(name: str, folder: Path) -> None:
    party = PARTIES[name]
    model = party.build(_make_seeded(0))
    optimizers = _muon(model, 0)
    _step_muon(model, optimizers, 0)
    state, optim = party.states(model, optimizers)
    dcp.save({"model": state, "optim": optim}, checkpoint_id=folder / "dcp")
    full = party.states(model, optimizers, full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        torch.save(full, folder / "full.pt")


def _load_muon(name: str, folder: Path) -> None:
    """Load sharded; compare in full; and take the step that a plain model takes."""
    party, saved = PARTIES[name], torch.load(folder / "full.pt")
    model = party.build(_make_seeded(1))
    optimizers = _muon(model, 1)
    _step_muon(model, optimizers, 5)  # so that there is state to load into
    states = party.states(model, optimizers)
    found = {"model": states[0], "optim": states[1]}
    dcp.load(found, checkpoint_id=folder / "dcp")
    party.load(model, optimizers, (found["model"], found["optim"]))
    full = party.states(model, optimizers, full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        _assert_same_nested(full[0], saved[0], "model")
        _assert_same_nested(full[1]["state"], saved[1]["state"], "optimizer")
    plain = _make_seeded(2)
    plain_optimizers = _muon(plain, 2)
    PARTIES["one process"].load(plain, plain_optimizers, saved)
    for step in (1, 2):
        loss = _step_muon(model, optimizers, step)
        expected = _step_muon(plain, plain_optimizers, step)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("source", "before", "target", "after"),
    [
        ("owned", 2, "one process", 1),
        ("DDP", 2, "owned", 3),
        ("owned", 3, "owned", 2),
        ("owned", 2, "NO_SHARD", 2),
    ],
)
def test_muon_goes_from_any_party_to_any_other(
    source: str, before: int, target: str, after: int, tmp_path: Path
) -> None:
    """Momenta are with the owners of whole matrices, and with them alone."""
    run_ranks(before, _save_muon, source, tmp_path)
    run_ranks(after, _load_muon, target, tmp_path)


# --- in full ---


def _trained_party(name: str) -> tuple[Party, nn.Module, torch.optim.Optimizer, _States]:
    """Return a party after two steps, and its full states, on every rank."""
    party = PARTIES[name]
    model = party.build(_make_seeded(0))
    optimizer = _two_group_adamw(model, 0)
    for step in range(2):
        _train_party(model, optimizer, step)
    full = party.states(model, optimizer, full_state_dict=True, rank0_only=False)
    return party, model, optimizer, full


@contextmanager
def _full_state_dicts(model: nn.Module) -> Iterator[None]:
    """Let FSDP1 make and take full state dicts, the same on all ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch has newer functions
        with FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
            FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
        ):
            yield


@pytest.mark.parametrize("name", ["units", "one unit", "SHARD_OPTIM"])
@distributed(2, 3)
def test_full_state_dicts_of_fsdp1_are_ours(name: str, world_size: int) -> None:
    """Both ways, model and optimizer."""
    party, _, _, full = _trained_party(name)
    theirs = _fsdp1(_make_seeded(1))
    their_optimizer = _two_group_adamw(theirs, 1)
    with _full_state_dicts(theirs):
        theirs.load_state_dict(full[0])
        state = FullyShardedDataParallel.optim_state_dict_to_load(theirs, their_optimizer, full[1])
        their_optimizer.load_state_dict(state)
        saved = (
            {key: value.clone() for key, value in theirs.state_dict().items()},
            FullyShardedDataParallel.optim_state_dict(theirs, their_optimizer),
        )
    _assert_same_nested(saved[0], full[0], "model")
    _assert_same_nested(saved[1]["state"], full[1]["state"], "optimizer")
    ours = party.build(_make_seeded(2))
    our_optimizer = _two_group_adamw(ours, 2)
    party.load(ours, our_optimizer, saved)
    _check_party(party, ours, our_optimizer, full)


@pytest.mark.parametrize("name", ["units", "one unit", "SHARD_OPTIM"])
@distributed(2)
def test_consolidated_state_of_zero_redundancy_optimizer_is_ours(name: str) -> None:
    """It is a plain optimizer's state dict, by number; torch's functions name the parameters."""
    party, model, optimizer, full = _trained_party(name)
    plain_party = PARTIES["one process"]

    # Ours into a ZeroRedundancyOptimizer, by way of a plain optimizer.
    plain, ddp = _make_seeded(1), DistributedDataParallel(_make_seeded(1))
    plain_optimizer = _two_group_adamw(plain, 1)
    plain_party.load(plain, plain_optimizer, copy.deepcopy(full))
    ddp.module.load_state_dict(full[0])
    groups = _two_group_adamw(ddp, 0).param_groups  # it keeps the options that it is made with
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what the module imports
        optim = importlib.import_module("torch.distributed.optim")
    zero = optim.ZeroRedundancyOptimizer(
        [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups],
        torch.optim.AdamW,
        lr=0.01,
    )
    zero.load_state_dict(plain_optimizer.state_dict())
    loss, expected = _train_party(ddp, zero, 2), _train_party(model, optimizer, 2)
    assert_equal(loss, expected)

    # And back.
    zero.consolidate_state_dict(to=0)
    sent = [(ddp.module.state_dict(), zero.state_dict() if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(sent, src=0)
    plain.load_state_dict(sent[0][0])
    plain_optimizer.load_state_dict(sent[0][1])
    saved = plain_party.states(plain, plain_optimizer)
    found = party.states(model, optimizer, full_state_dict=True, rank0_only=False)
    _assert_same_nested(found[0], saved[0], "model")
    _assert_same_nested(found[1]["state"], saved[1]["state"], "optimizer")
    ours = party.build(_make_seeded(2))
    our_optimizer = _two_group_adamw(ours, 2)
    party.load(ours, our_optimizer, saved)
    _check_party(party, ours, our_optimizer, saved)


# --- from the meta device ---


@pytest.mark.parametrize("name", ["units", "one unit", "NO_SHARD"])
@distributed(2)
def test_a_model_from_meta_is_loaded_by_torchs_checkpoints(name: str, tmp_path: Path) -> None:
    """After `to_empty`, straight into the shards, in place; the buffers too."""
    _save_party("FSDP2", tmp_path)
    dist.barrier()
    party = PARTIES[name]
    with torch.device("meta"):
        model = party.build(_make_seeded(1))
    optimizer = _two_group_adamw(model, 1)
    model.to_empty(device="cpu")
    options = composable_shard.StateDictOptions(init_optimizer_state=True)
    found = {
        "model": model.state_dict(),
        "optim": composable_shard.get_optimizer_state_dict(model, optimizer, options=options),
    }
    assert optimizer.param_groups[0]["lr"] > 0
    assert all(param.grad is None for param in model.parameters())
    dcp.load(found, checkpoint_id=tmp_path / "dcp")
    composable_shard.set_optimizer_state_dict(model, optimizer, found["optim"])
    _check_party(party, model, optimizer, torch.load(tmp_path / "full.pt"))
