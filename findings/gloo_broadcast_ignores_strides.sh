#!/usr/bin/env bash
# A gloo broadcast of a strided view changes the wrong elements, silently.
#
# Where: torch 2.13.0, gloo, two CPU ranks.
# Expected: dist.broadcast(x[::2], 1) sets those elements to the values of rank 1, as all_gather
#   does for such views, or raises.
# Seen: three values of rank 1 that are all 2.0: rank 0 ends with [2, 2, 1], and an element
#   between them, which is no part of the view, is overwritten.
# Why: broadcast sends and receives a contiguous run of memory from the first element on.
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PROGRAM'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
memory = torch.full((6,), -1.0)
view = memory[::2]
view.fill_(dist.get_rank() + 1)
if dist.get_rank() == 1:
    memory[1::2] = -7
dist.broadcast(view, 1)
if dist.get_rank() == 0:
    print("torch", torch.__version__)
    print("the view, expected [2, 2, 2]:", view.tolist())
    print("between its elements, expected [-1, -1, -1]:", memory[1::2].tolist())
    assert view.tolist() == [2, 2, 1], "changed: the view is right"
    assert memory[1::2].tolist() == [-7, -1, -1]
dist.destroy_process_group()
PROGRAM
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 program.py
