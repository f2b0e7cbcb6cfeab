"""Files of `torch.save` with a model and an optimizer, and directories with a file for each.

Those of a training loop with torch alone or DDP, `ZeroRedundancyOptimizer`, fairscale's OSS (all
consolidated), Lightning's `.ckpt`, `Accelerator.save_state` and transformers' `Trainer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composable_shard.peers.companions import find_file, read_companions
from composable_shard.peers.pickles import Inert
from composable_shard.peers.run import PeerOptimizer, PeerRun, by_name
from composable_shard.peers.safetensors_files import has_tensor_files, read_tensor_files
from composable_shard.peers.tensors import PeerTensor
from composable_shard.peers.zips import is_torch_file, read_torch_file

_MODEL = ("model", "model_state_dict", "state_dict", "model_state", "module", "net")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optimizer_states", "optim", "optimizer_state")
_SCHEDULER = (
    *("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_schedulers"),
    "lr_scheduler_state_dict",
)
_SCALER = ("scaler", "grad_scaler", "scaler_state_dict")
_STEP = ("global_step", "step", "global_steps", "iteration", "iter", "iter_num", "steps")

# Files of a directory, in the order in which they are looked for.
_MODEL_FILES = (
    *("pytorch_model.bin", "pytorch_model_fsdp.bin", "model.pt", "model.pth", "model.bin"),
)
_OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin", "optimizer.pth")


def detect_file(path: Path) -> bool:
    """Return whether a path is a file of `torch.save`."""
    return path.is_file() and is_torch_file(path)


def read_file(path: Path) -> PeerRun:
    """Return the run in one file of `torch.save`."""
    found = read_torch_file(path)
    if not isinstance(found, Mapping):
        raise ValueError(f"expected a dict in {path}, got a {type(found).__name__}")
    model_key = _first_key(found, _MODEL, Mapping)
    # After the look for a key: beside a model a file may hold tensors, as generators' states.
    if model_key is None and _is_model(found):
        return PeerRun("a file of torch.save, a model alone", path, dict(found))
    if model_key is None:
        raise ValueError(
            f"expected a model in {path} under one of {list(_MODEL)}, found the keys "
            f"{[str(key) for key in found][:12]}"
        )
    version = found.get("pytorch-lightning_version", "")
    kind = "Lightning, a file" if version else "a file of torch.save"
    run = PeerRun(kind, path, dict(found[model_key]), version=str(version))
    used = {model_key}
    if (key := _first_key(found, _OPTIMIZER, Mapping | list)) is not None:
        run.optimizers = {
            name: PeerOptimizer.parse(each, f"'{key}' of {path}")
            for name, each in by_name(found[key], "param_groups").items()
        }
        used.add(key)
    if (key := _first_key(found, _SCHEDULER, Mapping | list)) is not None:
        run.schedulers = by_name(found[key], "last_epoch")
        used.add(key)
    if (key := _first_key(found, _SCALER, Mapping)) is not None:
        run.scaler = found[key]
        used.add(key)
    if (key := _first_key(found, _STEP, int)) is not None:
        run.step = found[key]
        used.add(key)
    run.left += [str(key) for key in found if key not in used]
    return run


def _first_key(found: Mapping[Any, Any], keys: tuple[str, ...], kind: Any) -> str | None:
    return next(
        (k for k in keys if isinstance(found.get(k), kind) and not isinstance(found[k], bool)),
        None,
    )


def _is_model(found: Mapping[Any, Any]) -> bool:
    return any(isinstance(each, PeerTensor | Inert) for each in found.values()) and all(
        isinstance(key, str) for key in found
    )


def detect_directory(path: Path) -> bool:
    """Return whether a directory has a model's file and an optimizer's, or a model's pickle."""
    has_optimizer = find_file(path, _OPTIMIZER_FILES) is not None
    return has_optimizer or find_file(path, _MODEL_FILES) is not None


def read_directory(path: Path) -> PeerRun:
    """Return the run that `Trainer` or `Accelerator.save_state` has saved in a directory."""
    is_trainer = (path / "trainer_state.json").is_file()
    kind = "accelerate, save_state" if any(path.glob("random_states_*")) else "a directory"
    run = PeerRun("transformers, Trainer" if is_trainer else kind, path, {})
    used: set[Path] = set()
    if has_tensor_files(path):
        files = read_tensor_files(path)
        run.model, run.notes = files.model, files.notes
        used |= {each for each in path.glob("*.safetensors*")}
    elif (file := find_file(path, _MODEL_FILES)) is not None:
        run.model = read_file(file).model
        used.add(file)
    else:
        raise ValueError(
            f"expected a model beside the optimizer in {path}: model.safetensors or one of "
            f"{list(_MODEL_FILES)}"
        )
    if (file := find_file(path, _OPTIMIZER_FILES)) is not None:
        run.optimizers[""] = PeerOptimizer.parse(read_torch_file(file), str(file))
        used.add(file)
    read_companions(run, used)
    return run
