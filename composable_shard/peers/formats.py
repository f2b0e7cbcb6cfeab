"""The formats, and which of them a path has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from composable_shard.peers import dcp, deepspeed, safetensors_files, torch_files, universal
from composable_shard.peers.run import PeerRun


class Format(NamedTuple):
    """One form of checkpoints.

    Attributes:
        detect: Whether a path has it, by the names of files and their first bytes.
        read: The run, by headers and pickles alone.
    """

    detect: Callable[[Path, int | None], bool]
    read: Callable[[Path, int | None], PeerRun]


# In the order in which they are tried: a directory of DeepSpeed may have a file for the weights.
_FORMATS = (
    Format(universal.detect, universal.read),
    Format(deepspeed.detect, deepspeed.read),
    Format(lambda path, _: dcp.detect(path), lambda path, _: dcp.read(path)),
    Format(
        lambda path, _: torch_files.detect_directory(path),
        lambda path, _: torch_files.read_directory(path),
    ),
    Format(
        lambda path, _: torch_files.detect_file(path), lambda path, _: torch_files.read_file(path)
    ),
    Format(
        lambda path, _: safetensors_files.has_tensor_files(path),
        lambda path, _: safetensors_files.read_tensor_files(path),
    ),
)


def open_run(path: Path, step: int | None = None) -> PeerRun | None:
    """Return the run of another library in a file or directory, or None if there is none.

    Args:
        step: Which one, where a directory has several.

    Raises:
        ValueError: If a file is damaged, missing, forged or of another step, naming it.
    """
    for each in _FORMATS:
        if path.exists() and each.detect(path, step):
            run = each.read(path, step)
            if step is not None and run.step not in (0, step):
                raise ValueError(
                    f"expected step {step} in {path} ({run.kind}), which has step {run.step}"
                )
            run.check_model()
            return run
    return None
