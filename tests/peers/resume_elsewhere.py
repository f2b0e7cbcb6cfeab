"""Does DeepSpeed itself continue a run of ours? `python -m tests.peers.resume_elsewhere`.

Needs deepspeed, from the extra `test-ecosystem`. Two ranks take three steps with FULL_SHARD and
save; `convert --to deepspeed` makes the universal form. DeepSpeed's engine loads it in stages 1, 2
and 3, with torch's AdamW and with its own Adam for the CPU, and takes three steps beside ours: the
largest difference of a parameter is printed, and anything but 0 with torch's AdamW is an error.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from composable_shard import (
    StateDictOptions,
    fully_shard,
    get_model_state_dict,
    save_checkpoint,
)
from composable_shard.conversion import convert
from tests.peers import model as run
from tests.peers.write_fixtures import engine_values, make_engine, run_on_ranks, train_engine


def train_and_save(path: Path) -> dict[str, torch.Tensor]:
    """Take three steps, save, and take three more; return the parameters and buffers."""
    rank = dist.get_rank()
    model = run.make_peer_model()
    for each in (model.up, model.down, model):
        fully_shard(each)
    optimizer = torch.optim.AdamW(run.two_groups(model), lr=run.LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    run.take_steps(model, optimizer, scheduler, 0, rank)
    save_checkpoint(path, model, optimizer, scheduler=scheduler, step=run.NUM_STEPS)
    run.take_steps(model, optimizer, scheduler, run.NUM_STEPS, rank)
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def train_here(path: Path, rank: int) -> None:
    """Save what the engine loads, and what is to be expected of it."""
    dist.init_process_group("gloo")
    values = train_and_save(path / "ours")
    if rank == 0:
        torch.save(values, path / "expected.pt")


def train_there(path: Path, rank: int, stage: int, own_adam: bool) -> None:
    """Load the universal checkpoint with DeepSpeed, and take the same three steps."""
    torch.manual_seed(1)
    model = run.PeerModel()
    tag = path / "universal" / (path / "universal" / "latest_universal").read_text()
    states = torch.load(tag / "mp_rank_00_model_states.pt", weights_only=True)
    # The engine reads the optimizer's parameters alone.
    model.load_state_dict(states["module"], strict=False)
    optimizer: Any = None
    if own_adam:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(run.two_groups(model), lr=run.LR)
    config = {"checkpoint": {"load_universal": True}}
    engine = make_engine(model, stage, optimizer=optimizer, **config)
    options = [dict(group) for group in engine.optimizer.optimizer.param_groups]
    engine.load_checkpoint(str(path / "universal"))
    if stage == 3:
        # DeepSpeed gives all groups the options of the first, and torch's optimizers count tensors.
        inner = engine.optimizer.optimizer
        for group, own in zip(inner.param_groups, options, strict=True):
            group["weight_decay"] = own["weight_decay"]
        for state in () if own_adam else inner.state.values():
            state["step"] = torch.tensor(float(state["step"]))
    train_engine(engine, rank, run.NUM_STEPS)
    values = engine_values(model, stage)
    if rank == 0:
        torch.save(values, path / "found.pt")


def compare_stages() -> None:
    """Print a line for each stage."""
    os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        run_on_ranks(train_here, path)
        convert(path / "ours", path / "universal", "deepspeed")
        expected = torch.load(path / "expected.pt", weights_only=True)
        for own_adam in (False, True):
            for stage in (1, 2, 3):
                run_on_ranks(train_there, path, stage=stage, own_adam=own_adam)
                found = torch.load(path / "found.pt", weights_only=True)
                worst = max((found[n] - expected[n]).abs().max().item() for n in found)
                name = "DeepSpeedCPUAdam" if own_adam else "AdamW"
                print(f"stage {stage}, {name}: largest difference {worst}", flush=True)
                assert worst == 0 or (own_adam and worst < 1e-6), (stage, worst)


if __name__ == "__main__":
    compare_stages()
