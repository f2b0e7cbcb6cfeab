"""A run that is killed goes on from its last checkpoint, on another number of ranks if need be.

    python tutorials/07_resume.py

starts ranks four times: two undisturbed ranks; two ranks, of which one is killed in step 7; two
ranks that continue from the checkpoint; and one rank that continues from the same checkpoint. Each
run looks for a checkpoint and takes the missing steps. The data depend only on the number of the
step, so that every run reads the same.

Expected output (digits may differ, the differences may not):

    two ranks, undisturbed: 10 steps, last loss 0.0310
    two ranks, one is killed in step 7: the last checkpoint is of step 6
    two ranks again: steps 6 to 9, largest difference 0.0e+00
    the same on one rank: steps 6 to 9, largest difference below 1e-06
"""

import json
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

from composable_shard import find_checkpoint, fully_shard, load_checkpoint, save_checkpoint

DIM, BATCH, STEPS, KILLED_IN = 16, 8, 10, 7


def train(rank: int, num_ranks: int, folder: Path, is_killed: bool) -> None:
    """Go on from the last checkpoint, if there is one; write the losses of the steps taken."""
    store = dist.FileStore(str(folder / f"store of {num_ranks} {is_killed}"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, 64), nn.Tanh(), nn.Linear(64, DIM))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = find_checkpoint(folder)
    start = load_checkpoint(folder, model, optimizer).step if found else 0
    losses = {}
    for step in range(start, STEPS):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, DIM, generator=draw).chunk(num_ranks)[rank]
        if is_killed and step == KILLED_IN and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # as a machine that fails
        loss = (model(x) - x.flip(-1) / 4).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / num_ranks
        dist.all_reduce(mean)
        losses[step] = mean.item()
        if step % 3 == 2:
            save_checkpoint(folder, model, optimizer, step=step + 1)
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def run(num_ranks: int, folder: Path, *, is_killed: bool = False) -> dict[int, float]:
    """Train on this number of ranks, as torchrun does; return the losses if all went well."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = (num_ranks, folder, is_killed)
    multiprocessing.start_processes(train, arguments, num_ranks, start_method="fork")
    losses = json.loads((folder / "losses.json").read_text())
    return {int(step): loss for step, loss in losses.items()}


def tell(text: str, losses: dict[int, float], expected: dict[int, float]) -> float:
    """Print which steps were taken; return how far their losses are from those expected."""
    print(f"{text}: steps {min(losses)} to {max(losses)}, largest difference ", end="")
    return max(abs(losses[step] - expected[step]) for step in losses)


def main() -> None:
    """Run undisturbed, be killed, and go on."""
    shutil.rmtree("resume", ignore_errors=True)
    whole, broken, copied = (Path("resume") / name for name in ("whole", "broken", "copied"))
    expected = run(2, whole)
    print(f"two ranks, undisturbed: {len(expected)} steps, last loss {expected[STEPS - 1]:.4f}")

    with suppress(multiprocessing.ProcessExitedException):
        run(2, broken, is_killed=True)
    last = find_checkpoint(broken)
    assert last is not None
    step = int(last.name.removeprefix("step_"))
    print(f"two ranks, one is killed in step {KILLED_IN}: the last checkpoint is of step {step}")
    shutil.copytree(broken, copied)

    difference = tell("two ranks again", run(2, broken), expected)
    print(f"{difference:.1e}")
    difference = tell("the same on one rank", run(1, copied), expected)
    assert difference < 1e-6, difference
    print("below 1e-06")


if __name__ == "__main__":
    main()
