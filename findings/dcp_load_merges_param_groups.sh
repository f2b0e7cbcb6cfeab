#!/usr/bin/env bash
# set_optimizer_state_dict loads two param groups into one: the last one's options, silently.
#
# Where: torch 2.13.0: torch.distributed.checkpoint.state_dict.
# Expected: a state dict with another number of groups raises, as optimizer.load_state_dict does.
# Seen: all parameters go on with the learning rate and weight decay of whichever group holds the
#   last parameter; the momenta are right, so that nothing else shows it.
# Why: options are stored by parameter name and assigned to the group of each parameter in turn.
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PROGRAM'
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

os.environ.update(RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", store=dist.FileStore("store", 1), rank=0, world_size=1)
model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
groups = [
    {"params": model[0].parameters(), "lr": 0.001, "weight_decay": 0.1},
    {"params": model[1].parameters(), "lr": 1.0, "weight_decay": 0.0},
]
saved = torch.optim.SGD(groups, momentum=0.9)
model(torch.ones(1, 2)).sum().backward()
saved.step()
merged = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
try:
    merged.load_state_dict(saved.state_dict())
    plain = "loads"
except ValueError as error:
    plain = f"raises: {error}"
set_optimizer_state_dict(model, merged, get_optimizer_state_dict(model, saved))
[group] = merged.param_groups
found = group["lr"], group["weight_decay"]
print("torch", torch.__version__)
print("saved groups:", [(each["lr"], each["weight_decay"]) for each in saved.param_groups])
print("optimizer.load_state_dict", plain)
print("set_optimizer_state_dict: the one group has", found)
dist.destroy_process_group()
assert plain.startswith("raises")
assert found == (1.0, 0.0), "changed: other groups are not merged"
PROGRAM
cd "$folder"
"$folder/venv/bin/python" -W ignore program.py
