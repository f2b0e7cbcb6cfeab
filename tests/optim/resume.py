"""Save a run, resume it in new processes, and compare with the run that goes on.

    python -m tests.optim.resume LISTING MODES [NAME,NAME] > rows.jsonl

`LISTING` is a module with `optimizers()`, which returns pairs of a name and a function that makes
an optimizer of a model; or a pair of an optimizer and the way it is called, of `step`. The packages
of the listing must be installed. `MODES` are of `MODES` below. Prints one line of JSON for each
optimizer: for "plain" whether a plain model resumes exactly by `torch.save`, and for each mode
"exact", "differs" with the largest difference, or the error of the part that failed: "run", "save"
or "load". Two processes share one model; "world" resumes in one process.
"""

from __future__ import annotations

import datetime
import importlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import (
    fully_shard,
    get_optimizer_state_dict,
    load_checkpoint,
    save_checkpoint,
    set_optimizer_state_dict,
)
from tests.common.models import MixedNet

_LIMIT_S = 90
_NUM_STEPS, _SAVED_AT = 6, 3
MODES: dict[str, dict[str, Any]] = {
    "element": {},
    "row": {"granularity": "row"},
    "param": {"granularity": "param"},
    "no_shard": {"strategy": "no_shard"},
    "world": {},  # resumes on one rank
    "dict": {},  # by full state dicts
}


def _shared_loss(model: nn.Module, step: int) -> Tensor:
    """Return the loss of a step's batch, which all ranks share."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randint(0, 40, (6, 7), generator=generator)
    y = torch.randint(0, 10, (6, 7), generator=generator)
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def take_step(model: nn.Module, optimizer: Any, way: str, step: int) -> None:
    """Take a step in the way that the optimizer needs."""
    torch.manual_seed(1000 + step)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = _shared_loss(model, step)
        loss.backward()
        return loss

    if way == "closure":
        optimizer.step(closure)
        return
    if way == "closure_out":
        closure()
        optimizer.step(closure)
    elif way == "loss_closure":
        loss = closure()
        optimizer.step(loss.detach)
    else:
        _shared_loss(model, step).backward(create_graph=way == "graph")
        optimizer.step()
    optimizer.zero_grad()


class _Resumed:
    """A model and an optimizer."""

    def __init__(self, make: Callable[[nn.Module], Any], options: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.model = MixedNet()
        if options is not None:
            for module in (self.model.a, self.model.c, self.model.b, self.model):
                fully_shard(module, **options)
        made = make(self.model)
        self.optimizer, self.way = made if isinstance(made, tuple) else (made, "step")
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()

    def go(self, first: int, end: int) -> None:
        """Take the steps of a range."""
        for step in range(first, end):
            take_step(self.model, self.optimizer, self.way, step)

    def values(self) -> list[Tensor]:
        """Return all parameters, whole."""
        return [
            (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for p in self.model.parameters()
        ]


def _resume_plain(make: Callable[[nn.Module], Any], tell: Callable[[str], None]) -> Any:
    run = _Resumed(make, None)
    run.go(0, _SAVED_AT)
    tell("save")
    file = io.BytesIO()
    torch.save((run.model.state_dict(), run.optimizer.state_dict()), file)
    tell("run")
    run.go(_SAVED_AT, _NUM_STEPS)
    tell("load")
    again = _Resumed(make, None)
    file.seek(0)
    model, optimizer = torch.load(file, weights_only=False)
    again.model.load_state_dict(model)
    again.optimizer.load_state_dict(optimizer)
    tell("resume")
    again.go(_SAVED_AT, _NUM_STEPS)
    pairs = zip(run.values(), again.values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def _run_and_save(make: Any, mode: str, path: str, tell: Callable[[str], None]) -> Any:
    run = _Resumed(make, MODES[mode])
    run.go(0, _SAVED_AT)
    tell("save")
    if mode == "dict":
        from composable_shard import StateDictOptions, get_model_state_dict  # noqa: PLC0415

        whole = StateDictOptions(full_state_dict=True)
        state = get_optimizer_state_dict(run.model, run.optimizer, options=whole)
        if dist.get_rank() == 0:
            torch.save(state, f"{path}.pt")
        model = get_model_state_dict(run.model, options=whole)
        if dist.get_rank() == 0:
            torch.save(model, f"{path}.model.pt")
    else:
        save_checkpoint(path, run.model, run.optimizer, step=_SAVED_AT)
    tell("run")
    run.go(_SAVED_AT, _NUM_STEPS)
    return [value.tolist() for value in run.values()]


def _load_and_run(make: Any, mode: str, path: str, tell: Callable[[str], None]) -> Any:
    tell("load")
    run = _Resumed(make, MODES[mode])
    if mode == "dict":
        from composable_shard import set_model_state_dict  # noqa: PLC0415

        set_model_state_dict(run.model, torch.load(f"{path}.model.pt"))
        state = torch.load(f"{path}.pt", weights_only=False)
        set_optimizer_state_dict(run.model, run.optimizer, state)
    else:
        load_checkpoint(path, run.model, run.optimizer)
    tell("resume")
    run.go(_SAVED_AT, _NUM_STEPS)
    return [value.tolist() for value in run.values()]


def _child(rank: int, size: int, work: Any, store: str, end: Any) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 -- until the process ends
    phase = ["run"]
    try:
        if size:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=size,
                timeout=datetime.timedelta(seconds=20),
            )
        end.send(("ok", work(lambda name: phase.__setitem__(0, name))))
    except BaseException as error:
        text = str(error).split("\n")
        end.send((phase[0], f"{type(error).__name__}: {' '.join(text)[:300]}"))
    end.close()
    os._exit(0)


def _in_processes(size: int, work: Any) -> list[Any]:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends, children = [], []
        for rank in range(max(size, 1)):
            ours, theirs = context.Pipe(duplex=False)
            arguments = rank, size, work, f"{folder}/store", theirs
            child = context.Process(target=_child, args=arguments)
            child.start()
            theirs.close()
            ends.append(ours)
            children.append(child)
        found = []
        for ours in ends:
            try:
                found.append(ours.recv() if ours.poll(_LIMIT_S) else ("timeout", ""))
            except EOFError:
                found.append(("died", ""))
        for child in children:
            child.kill()
            child.join()
    return found


def _compare_runs(first: list[Any], second: list[Any]) -> list[Any]:
    for part in (first, second):
        bad = [each for each in part if each[0] != "ok"]
        if bad:
            return list(bad[0])
    expected = first[0][1]
    most = 0.0
    for _, values in [*first, *second]:
        for a, b in zip(expected, values, strict=True):
            difference = (torch.tensor(a) - torch.tensor(b)).abs().max()
            most = max(most, float(difference.nan_to_num(9e9)))
    return ["differs", most] if most else ["exact", 0.0]


def rows(listing: str, modes: list[str], only: list[str] | None) -> Iterator[dict[str, Any]]:
    """Yield the result of one optimizer after another."""
    for name, make in importlib.import_module(listing).optimizers():
        if only is not None and name not in only:
            continue
        (status, value), *_ = _in_processes(0, lambda tell, make=make: _resume_plain(make, tell))
        plain = [status, value] if status != "ok" else ["differs" if value else "exact", value]
        row: dict[str, Any] = {"name": name, "plain": plain}
        for mode in modes if plain[0] in ("exact", "differs") else ():
            with tempfile.TemporaryDirectory() as folder:
                path = f"{folder}/run"
                first = _in_processes(
                    2, lambda t, m=make, w=mode, p=path: _run_and_save(m, w, p, t)
                )
                size = 1 if mode == "world" else 2
                if any(status != "ok" for status, _ in first):
                    row[mode] = _compare_runs(first, [])
                    continue
                second = _in_processes(
                    size, lambda t, m=make, w=mode, p=path: _load_and_run(m, w, p, t)
                )
                row[mode] = _compare_runs(first, second)
        yield row


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    wanted = sys.argv[3].split(",") if len(sys.argv) > 3 else None
    for each in rows(sys.argv[1], sys.argv[2].split(","), wanted):
        print(json.dumps(each), flush=True)
