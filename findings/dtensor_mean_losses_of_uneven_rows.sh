#!/usr/bin/env bash
# Mean losses of a DTensor with uneven rows are wrong even after full_tensor().
#
# Where: torch 2.13.0, DTensor on two CPU ranks; 5 rows, so 3 and 2 of them.
# Expected: F.mse_loss(x, y).full_tensor() is the loss of the whole tensors, as x.mean() is exact
#   for the same rows.
# Seen: mse_loss, huber_loss, smooth_l1_loss and binary_cross_entropy_with_logits give the mean of
#   the two ranks' means: rows of the smaller rank weigh more. No warning.
# Why: the losses are labelled Partial(avg) whether or not the rows divide.
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PROGRAM'
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
losses = {
    "mean": lambda x, y: (x - y).square().mean(),
    "mse_loss": F.mse_loss,
    "huber_loss": F.huber_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
}
wrong = {}
for num_rows in (4, 5):
    x = torch.arange(float(num_rows)).unsqueeze(1).repeat(1, 2)
    y = torch.zeros_like(x)
    parts = [distribute_tensor(each, mesh, [Shard(0)]) for each in (x, y)]
    for name, loss in losses.items():
        whole, found = loss(x, y), loss(*parts).full_tensor()
        wrong[num_rows, name] = not torch.allclose(whole, found)
        if dist.get_rank() == 0:
            print(f"{num_rows} rows, {name}: whole {whole:.4f}, DTensor {found:.4f}")
if dist.get_rank() == 0:
    print("torch", torch.__version__)
dist.destroy_process_group()
assert not any(wrong[4, name] for name in losses)
assert not wrong[5, "mean"]
assert all(wrong[5, name] for name in losses if name != "mean"), "changed: the losses are right"
PROGRAM
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 program.py
