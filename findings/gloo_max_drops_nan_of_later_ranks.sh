#!/usr/bin/env bash
# gloo's MAX and MIN keep a NaN of the first rank and drop one of the second.
#
# Where: torch 2.13.0, gloo, two CPU ranks.
# Expected: dist.all_reduce(x, MAX) of a NaN is NaN, as torch.max and torch.maximum say, whichever
#   rank has it; a check of losses or gradient norms for NaN by MAX is built on that.
# Seen: [nan, 1] on rank 0 and [1, nan] on rank 1 give [nan, 1] on both. The step of a rank that
#   has diverged looks healthy.
# Why: the values are compared as std::max(a, b) does, which returns a where the comparison is
#   false.
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
nan = float("nan")
both = torch.tensor([[nan, 1.0], [1.0, nan]])
found = {}
for name in ("MAX", "MIN"):
    value = both[dist.get_rank()].clone()
    dist.all_reduce(value, op=getattr(dist.ReduceOp, name))
    found[name] = value.isnan().tolist()
    if dist.get_rank() == 0:
        print(f"{name} of {both.tolist()}: {value.tolist()}")
expected = torch.maximum(both[0], both[1]).isnan().tolist()
if dist.get_rank() == 0:
    print("torch", torch.__version__)
dist.destroy_process_group()
assert expected == [True, True]
assert found == dict.fromkeys(found, [True, False]), "changed: a NaN counts on every rank"
PROGRAM
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 program.py
