#!/usr/bin/env bash
# DeepSpeed's ZeRO-3 resumes a universal checkpoint of two groups with the first group's options and
# one step count for both, silently.
#
# Where: deepspeed 0.19.8, runtime/zero/stage3.py, on torch 2.13.0, CPU.
# Expected: an engine that loads its own checkpoint, converted by ds_to_universal, goes on as it was.
# Seen: the second group has the weight decay of the first, and with torch's AdamW both groups share
#   one step tensor, so that each step counts twice. Stages 1 and 2 are right.
# Why: `param_groups[0]` of the file is copied to every group; `state[0]["step"]` is one object.
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy setuptools deepspeed==0.19.8
cat > "$folder/program.py" <<'PROGRAM'
import os
import pathlib
from argparse import Namespace

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
import deepspeed
import torch
from deepspeed.checkpoint import ds_to_universal
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")


def make(stage, universal):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [
        {"params": model[0].parameters(), "weight_decay": 0.1},
        {"params": model[1].parameters(), "weight_decay": 0.0},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": universal},
    }
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def step(engine):
    engine.backward(engine(torch.ones(2, 4)).square().sum())
    engine.step()


def told(engine):
    inner = engine.optimizer.optimizer
    decays = [group["weight_decay"] for group in inner.param_groups]
    return decays, sorted(float(state["step"]) for state in inner.state.values())


found = {}
for stage in (2, 3):
    folder = pathlib.Path(f"stage{stage}")
    engine = make(stage, False)
    for _ in range(3):
        step(engine)
    engine.save_checkpoint(str(folder))
    step(engine)
    before = told(engine)
    ds_to_universal.main(
        Namespace(
            input_folder=str(folder / "global_step3"), output_folder=str(folder / "universal"),
            num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
            inject_missing_state=True,
        )
    )
    (folder / "latest_universal").write_text("universal")
    engine = make(stage, True)
    engine.load_checkpoint(str(folder), load_lr_scheduler_states=False)
    step(engine)
    found[stage] = before, told(engine)
for stage, (before, after) in found.items():
    print(f"stage {stage}: weight decay and steps {before} went on as {after}")
assert found[2][0] == found[2][1] == ([0.1, 0.0], [4.0, 4.0])
assert found[3] == (([0.1, 0.0], [4.0, 4.0]), ([0.1, 0.1], [5.0, 5.0])), "changed"
PROGRAM
cd "$folder"
"$folder/venv/bin/python" -W ignore program.py 2>&1 | grep "^stage\|Error"
