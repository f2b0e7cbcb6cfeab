#!/usr/bin/env bash
# The staging of dcp.async_save with a writer keeps 0-d DTensors uncopied, silently.
#
# Where: torch 2.13.0: BlockingAsyncStager, which dcp.async_save uses when it is given
#   storage_writer=FileSystemWriter(...).
# Expected: staging copies every tensor, so that training may go on while the copy is written.
# Seen: a 0-d DTensor (a scalar parameter of an FSDP2 model) is the model's own one in the staged
#   dict: it has the value of a later step, beside weights of the earlier one. DefaultStager
#   copies it.
# Why: the function that allocates the copy returns a DTensor without dims as it is.
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
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

os.environ.update(RANK="0", WORLD_SIZE="1")
store = dist.FileStore("store", 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
scale = distribute_tensor(torch.tensor(1.0), mesh, [Replicate()])
weight = distribute_tensor(torch.ones(3), mesh, [Shard(0)])
print("torch", torch.__version__)
found = {}
stagers = {
    "a writer": FileSystemWriter("run"),
    "DefaultStager": DefaultStager(StagingOptions(False, False, False, False)),
}
for name, stager in stagers.items():
    scale.fill_(1), weight.fill_(1)
    staged = stager.stage({"scale": scale, "weight": weight})
    scale.fill_(2), weight.fill_(2)  # the next step
    found[name] = [staged["scale"].to_local().item(), *staged["weight"].to_local().tolist()]
    print(f"staged by {name} at 1, after a step to 2:", found[name])
dist.destroy_process_group()
assert found["DefaultStager"] == [1, 1, 1, 1]
assert found["a writer"] == [2, 1, 1, 1], "changed: the scalar is copied"
PROGRAM
cd "$folder"
"$folder/venv/bin/python" -W ignore program.py
