"""DeepSpeed's universal checkpoint: a directory `zero` with one for each parameter.

Of stages 1 and 2, `exp_avg.pt` is a dict whose "param" has the parameter's shape, and buffers are
among the parameters. Of stage 3 it is a flat tensor, without the number of steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from composable_shard.peers.run import PeerOptimizer, PeerRun
from composable_shard.peers.tensors import PeerTensor, Span, flat_range
from composable_shard.peers.zips import read_number, read_torch_file

_WEIGHTS = "fp32.pt"


def detect(path: Path, step: int | None) -> bool:
    """Return whether a directory, or the one that its `latest_universal` names, is one."""
    return _find(path, step) is not None


def _find(path: Path, step: int | None) -> Path | None:
    if _is_universal(path):
        return path
    names = [f"global_step{step}_universal"] if step is not None else []
    with suppress(OSError, UnicodeDecodeError):
        names += [(path / "latest_universal").read_text(encoding="utf-8").strip()]
    found = [path / each for each in names if each and "\n" not in each]
    return next((each for each in found if _is_universal(each)), None)


def _is_universal(path: Path) -> bool:
    return (path / "zero").is_dir() and any((path / "zero").glob(f"*/{_WEIGHTS}"))


def read(path: Path, step: int | None) -> PeerRun:
    """Return the run."""
    folder = _find(path, step)
    assert folder is not None
    models = sorted(folder.glob("*_model_states.pt"), key=_number)
    main: dict[str, Any] = read_torch_file(models[0]) if models else {}
    run = PeerRun(
        "DeepSpeed, universal checkpoint",
        folder,
        {},
        version=str(main.get("ds_version") or ""),
        step=int(main.get("global_steps") or 0),
        world_size=int(main.get("dp_world_size") or 1),
    )
    if main.get("lr_scheduler") is not None:
        run.schedulers[""] = main["lr_scheduler"]
    shapes = _shapes(main)
    buffers = main.get("buffer_names") or []
    state: dict[Any, dict[str, Any]] = {}
    for each in sorted((folder / "zero").iterdir()):
        if each.is_dir():
            _read_param(each, run, shapes.get(each.name), state)
    module = main.get("module") or {}
    frozen = main.get("frozen_param_fragments") or {}
    run.model |= {name: module[name] for name in buffers if name in module}
    run.model |= {name: frozen[name] for name in frozen if name not in run.model}
    for name in main.get("frozen_param_shapes") or {}:
        _join_frozen(run, name, models, torch.Size(main["frozen_param_shapes"][name]))
    # Last of the names: a shared parameter is another name for one that was read.
    for name, source in (main.get("shared_params") or {}).items():
        if source in run.model:
            run.model[name] = run.model[source]
    run.optimizers[""] = PeerOptimizer(_groups(folder, main, state, run), state)
    for values in state.values():
        values.setdefault("step", float(run.step))
    return run


def _number(path: Path) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", path.name)]


def _shapes(main: Mapping[str, Any]) -> dict[str, torch.Size]:
    groups = main.get("param_shapes") or []
    return {name: torch.Size(shape) for group in groups for name, shape in group.items()}


def _read_param(
    path: Path, run: PeerRun, shape: torch.Size | None, state: dict[Any, dict[str, Any]]
) -> None:
    """Read the weights and the state of one parameter, or a buffer."""
    found: dict[str, Any] = {}
    for file in sorted(path.glob("*.pt")):
        content = read_torch_file(file)
        value = content.get("param") if isinstance(content, Mapping) else content
        # A step is one number, whatever the parameter's shape is.
        if isinstance(value, PeerTensor) and shape is not None and file.stem != "step":
            value = _shaped(value, shape, file)
        if isinstance(value, PeerTensor | int | float):
            found[file.stem] = value
        else:
            run.left.append(f"{path.name}/{file.name}")
    if "fp32" not in found:
        raise ValueError(f"{path} has no {_WEIGHTS}")
    weights = found.pop("fp32")
    run.model[path.name] = weights
    if shape is None and not found:
        return
    if isinstance(step := found.get("step"), PeerTensor):
        found["step"] = float(read_number(step))
    if found:
        state[path.name] = found


def _shaped(value: PeerTensor, shape: torch.Size, file: Path) -> PeerTensor:
    """Return a flat tensor in a parameter's shape."""
    if value.shape == shape:
        return value
    numel = shape.numel()
    if len(value.shape) != 1 or len(value.spans) != 1 or value.shape.numel() < numel:
        raise ValueError(f"{file} has shape {tuple(value.shape)}, and the parameter {tuple(shape)}")
    (span,) = value.spans
    part = Span(span.file, span.offset, flat_range(shape, 0, numel))
    return PeerTensor(shape, value.dtype, (part,) if numel else ())


def _join_frozen(run: PeerRun, name: str, models: list[Path], shape: torch.Size) -> None:
    """Join the parts of a frozen parameter that the ranks of stage 3 have."""
    found = run.model.get(name)
    if isinstance(found, PeerTensor) and found.shape == shape:
        return
    parts = [
        (read_torch_file(each).get("frozen_param_fragments") or {}).get(name) for each in models
    ]
    size = -(-shape.numel() // len(parts))
    spans = []
    for rank, each in enumerate(parts):
        numel = min(size, shape.numel() - rank * size)
        if numel <= 0:
            continue
        if not isinstance(each, PeerTensor) or each.shape.numel() < numel:
            raise ValueError(f"{models[rank]} lacks its part of the frozen parameter '{name}'")
        start = rank * size
        (span,) = each.spans
        spans.append(Span(span.file, span.offset, flat_range(shape, start, start + numel)))
        dtype = each.dtype
    run.model[name] = PeerTensor(shape, dtype, tuple(spans))


def _groups(
    folder: Path, main: Mapping[str, Any], state: Mapping[Any, Any], run: PeerRun
) -> list[dict[str, Any]]:
    """Return the groups that `optimizer_state.pt` or the model's states name."""
    file = folder / "zero" / "optimizer_state.pt"
    options: list[dict[str, Any]] = []
    if file.is_file():
        content = read_torch_file(file)
        options = list(content.get("param_groups") or []) if isinstance(content, Mapping) else []
    shapes = main.get("param_shapes") or []
    names = [[name for name in group if name in state] for group in shapes]
    if not shapes:
        names = [list(state)]
    if len(options) != len(names):
        run.notes.append(
            f"the files do not say the options of {len(names)} groups (lr, betas, ...): those of "
            "the optimizer here stay"
        )
        options = [{} for _ in names]
    return [{**group, "params": each} for group, each in zip(options, names, strict=True)]
