#!/usr/bin/env bash
# A hook on a parameter of an FSDP2 model is accepted and never called.
#
# Where: torch 2.13.0, FSDP2 on two CPU ranks.
# Expected: param.register_hook(...) sees and edits the gradient, as on a plain model, or raises.
#   Recipes that mask or clamp gradients are built on it.
# Seen: no call, no warning; the gradient that the hook should set to zero trains the model.
# Why: autograd accumulates into the unsharded parameter; FSDP2 then assigns .grad of the sharded
#   one. (Post-accumulate-grad hooks do run.)
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
calls, late = [], []


def freeze(grad):
    calls.append(1)
    return grad * 0


def trained(sharded):
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    if sharded:
        fully_shard(model)
    calls.clear()
    model.weight.register_hook(freeze)
    model.weight.register_post_accumulate_grad_hook(lambda param: late.append(1))
    model(torch.ones(2, 4)).sum().backward()
    grad = model.weight.grad
    grad = grad.full_tensor() if sharded else grad
    return len(calls), grad.abs().sum().item()


plain, fsdp2 = trained(False), trained(True)
if dist.get_rank() == 0:
    print("torch", torch.__version__)
    print("plain: calls of the hook, sum of the gradient:", plain)
    print("FSDP2: calls of the hook, sum of the gradient:", fsdp2)
    print("calls of the post-accumulate hook, both:", len(late))
dist.destroy_process_group()
assert plain == (1, 0.0)
assert len(late) == 2
assert fsdp2 == (0, 32.0), "changed: the hook runs"
PROGRAM
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 program.py
