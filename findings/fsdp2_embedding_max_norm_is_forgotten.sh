#!/usr/bin/env bash
# nn.Embedding(max_norm=...) under FSDP2 trains other weights than the plain module.
#
# Where: torch 2.13.0, FSDP2 on two CPU ranks that read the same rows.
# Expected: the same weights after a step of SGD with weight decay as the plain module, or an
#   error.
# Seen: the forward shrinks the rows that it reads in the gathered weight, which is then dropped:
#   the sharded rows keep their norms, and the step starts from those. The outputs are equal, so
#   that the first loss shows nothing.
# Why: max_norm writes to the weight in place inside the forward, and FSDP2 keeps no such write.
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PROGRAM'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rows = torch.tensor([0, 1, 5])


def trained(sharded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4, max_norm=1.0), nn.Linear(4, 1))
    if sharded:
        fully_shard(model[0])
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    output = model(rows)
    output.sum().backward()
    optimizer.step()
    weight = model[0].weight.detach()
    return output.detach(), weight.full_tensor() if sharded else weight


(plain_output, plain), (output, fsdp2) = trained(False), trained(True)
norms, plain_norms = fsdp2[rows].norm(dim=1), plain[rows].norm(dim=1)
if dist.get_rank() == 0:
    print("torch", torch.__version__)
    print("outputs of the first forward are equal:", torch.equal(plain_output, output))
    print("norms of the rows after a step, plain:", plain_norms.tolist())
    print("norms of the rows after a step, FSDP2:", norms.tolist())
dist.destroy_process_group()
assert torch.equal(plain_output, output)
assert plain_norms.max() < 1.1
assert norms.max() > 1.5, "changed: FSDP2 keeps the writes of max_norm"
PROGRAM
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 program.py
