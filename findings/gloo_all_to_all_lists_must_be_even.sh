#!/usr/bin/env bash
# On gloo all_to_all refuses lists of unequal lengths that all_to_all_single takes as splits.
#
# Where: torch 2.13.0, the backend gloo, two ranks. The same on 2.14.1.
# Expected: dist.all_to_all takes a tensor of another size for each rank, as an example of its
#   documentation does: this is how tokens reach the experts of a mixture.
# Seen: RuntimeError "invalid tensor size at index 1" on the rank whose tensors differ in size,
#   although each pair of sizes fits. all_to_all_single moves the same rows with split sizes.
# Why: gloo's list form checks that all tensors of a rank have the size of its first one.
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PROGRAM'
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SENT = [[1, 3], [2, 2]]  # rows from each rank to each rank


def exchange(rank: int) -> None:
    store = dist.FileStore("store", 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    received = [row[rank] for row in SENT]
    rows = torch.full((sum(SENT[rank]), 2), float(rank))
    single = torch.empty(sum(received), 2)
    dist.all_to_all_single(single, rows, received, SENT[rank])
    expected = torch.cat([torch.full((number, 2), float(each)) for each, number in enumerate(received)])
    assert torch.equal(single, expected)
    outputs = [torch.empty(number, 2) for number in received]
    try:
        dist.all_to_all(outputs, list(rows.split(SENT[rank])))
        seen = "no error"
    except RuntimeError as error:
        seen = str(error)
    print(f"rank {rank}: all_to_all_single right; all_to_all: {seen}", flush=True)
    assert "invalid tensor size" in seen, "changed: lists of unequal lengths are taken"


if __name__ == "__main__":
    print("torch", torch.__version__)
    mp.spawn(exchange, nprocs=2)
PROGRAM
cd "$folder"
"$folder/venv/bin/python" -W ignore program.py
