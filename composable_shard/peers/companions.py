"""Files beside those of a model and its optimizer, as accelerate and transformers write them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from composable_shard.peers.pickles import Inert
from composable_shard.peers.run import PeerRun
from composable_shard.peers.tensors import PeerTensor
from composable_shard.peers.zips import FilePart, read_torch_file

_SCHEDULER_FILES = ("scheduler.pt", "scheduler.bin")
_SCALER_FILES = ("scaler.pt",)
_GENERATORS = re.compile(r"rng_state(?:_(\d+))?\.pth|random_states_(\d+)\.pkl")
_KEYS = {  # by accelerate, by Trainer
    "python": ("random_state", "python"),
    "torch": ("torch_manual_seed", "cpu"),
    "numpy": ("numpy_random_seed", "numpy"),
}


def read_companions(run: PeerRun, used: set[Path]) -> None:
    """Take scheduler, scaler, generators and step from a directory; note what else is there."""
    path = run.path
    candidates = [path / name for name in _SCHEDULER_FILES]
    # accelerate saves what was registered and not prepared under numbers.
    candidates += sorted(path.glob("custom_checkpoint_*.pkl"))
    for each in candidates:
        if each.is_file() and not run.schedulers:
            state = read_torch_file(each)
            if isinstance(state, dict) and "last_epoch" in state:
                run.schedulers[""] = state
                used.add(each)
    if (file := find_file(path, _SCALER_FILES)) is not None:
        run.scaler = read_torch_file(file)
        used.add(file)
    trainer = path / "trainer_state.json"
    if trainer.is_file():
        try:
            run.step = int(json.loads(trainer.read_text(encoding="utf-8"))["global_step"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{trainer} is damaged: {error}") from error
        used.add(trainer)
    for each in path.iterdir():
        if match := _GENERATORS.fullmatch(each.name):
            run.generators[int(match[1] or match[2] or 0)] = each
    run.world_size = max(1, run.world_size, len(run.generators))
    used |= set(run.generators.values())
    run.left += sorted(each.name for each in path.iterdir() if each not in used)


def find_file(path: Path, names: tuple[str, ...]) -> Path | None:
    """Return the first of some files that a directory has."""
    return next((path / name for name in names if (path / name).is_file()), None)


def read_generators(path: Path) -> dict[str, Any] | None:
    """Return the states of a rank's random number generators, or None if the file lacks some.

    Those of accelerators are left out.
    """
    found = read_torch_file(path)
    states = {
        kind: next((found[key] for key in keys if key in found), None)
        for kind, keys in _KEYS.items()
    }
    torchs, numpys = states["torch"], states["numpy"]
    if states["python"] is None or not isinstance(torchs, PeerTensor) or len(torchs.spans) != 1:
        return None
    (span,) = torchs.spans
    with FilePart(span.file, span.offset, torchs.nbytes) as file:
        states["torch"] = file.read()
    if numpys is None:
        del states["numpy"]
    elif isinstance(keys := numpys[1], Inert):  # an array, whose last argument is its bytes
        states["numpy"] = (numpys[0], memoryview(keys.args[-1]).cast("I").tolist(), *numpys[2:])
    return states
