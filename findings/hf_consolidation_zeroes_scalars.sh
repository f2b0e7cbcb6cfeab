#!/usr/bin/env bash
# DCP's safetensors consolidation writes 0 for tensors without dims, silently.
#
# Where: torch 2.13.0, safetensors 0.8.0: HuggingFaceStorageWriter with enable_consolidation=True.
# Expected: the merged file holds every saved tensor, or the save raises.
# Seen: a learned temperature of 2.5 is 2.5 in the rank's own file and 0.0 in the merged one.
# Why: the function that copies a part into the whole takes an empty shape for an empty tensor and
#   returns, so that the zeroed buffer is written.
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy safetensors==0.8.0
cat > "$folder/program.py" <<'PROGRAM'
import glob

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

values = {"temperature": torch.tensor(2.5), "weight": torch.tensor([1.0, 2.0])}
writer = HuggingFaceStorageWriter("run", save_distributed=True, enable_consolidation=True)
dcp.save(values, storage_writer=writer, no_dist=True)
parts = load_file(glob.glob("run/sharded/*.safetensors")[0])
merged = load_file(glob.glob("run/*.safetensors")[0])
print("torch", torch.__version__)
print("saved:", values)
print("a rank's own file:", parts)
print("the merged file:", merged)
assert parts["temperature"] == 2.5
assert torch.equal(merged["weight"], values["weight"])
assert merged["temperature"] == 0, "changed: the merged file has the value"
PROGRAM
cd "$folder"
"$folder/venv/bin/python" -W ignore program.py
