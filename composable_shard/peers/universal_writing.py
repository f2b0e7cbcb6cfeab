"""Write DeepSpeed's universal checkpoint, which its engine loads with `load_universal`.

The layout is that of `ds_to_universal` of DeepSpeed 0.19.8. Stages 1 and 2 read `mp_rank_00_*`
and the groups in `optimizer_state.pt`, stage 3 `zero_pp_rank_0_*` and the optimizer's state dict
there; tensors in the parameters' shapes suit all three.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_VERSION = "0.19.8"  # of the layout: the engine asks for one
_MODELS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_REMEDY = "Convert it to another form."


def write_universal(  # noqa: PLR0913 -- the parts of a run, each by name
    path: Path,
    model: Mapping[str, Any],
    ties: Mapping[str, str],
    optimizer: Mapping[str, Any],
    *,
    scheduler: Any,
    step: int,
    world_size: int,
) -> None:
    """Write a directory for `load_dir` of DeepSpeed's `load_checkpoint`.

    Parameters of the optimizer that have no state, while others do, get zeros: DeepSpeed counts the
    steps of a group.

    Args:
        ties: The first name of each tied parameter, by its other names.
        optimizer: State by name, as `get_optimizer_state_dict` gives it.
        scheduler: State of a scheduler, or None.
        world_size: How many ranks have saved the run.

    Raises:
        ValueError: If the files have no place for something, naming it, or if they exist. Nothing
            is written then.
    """
    tag = f"global_step{step}_universal"
    if (path / tag).exists():
        raise ValueError(f"{path / tag} exists: choose another directory")
    groups = [
        {**group, "params": [ties.get(name, name) for name in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    state = {ties.get(name, name): each for name, each in optimizer["state"].items() if each}
    trained = [name for group in groups for name in group["params"]]
    params = {name: _param_files(name, model.get(name), state) for name in trained}
    rest = {name: each for name, each in model.items() if name not in params and name not in ties}
    numbered = [{**group, "params": [number]} for number, group in enumerate(groups)]
    step_of = next(iter(params.values())).get("step")
    # Stage 3 gives all groups this one object, and a tensor would be counted up by each of them.
    counts = {} if step_of is None else {"step": int(step_of)}
    states = {number: counts for number in range(len(groups))}
    optimizer_state = {
        "ds_version": _VERSION,
        "param_groups": numbered,
        "optimizer_state_dict": {"state": states, "param_groups": numbered},
    }
    model_states = {
        "module": rest,
        "buffer_names": list(
            rest
        ),  # and frozen parameters: the files of a run don't tell them apart
        "optimizer": None,
        "param_shapes": [{name: model[name].shape for name in g["params"]} for g in groups],
        "frozen_param_shapes": {},
        "shared_params": dict(ties),
        "frozen_param_fragments": {},
        "lr_scheduler": scheduler,
        "skipped_steps": 0,
        "global_steps": step,
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "ds_version": _VERSION,
    }
    for name, files in params.items():
        folder = path / tag / "zero" / name
        folder.mkdir(parents=True)
        for key, value in files.items():
            torch.save(value, folder / f"{key}.pt")
    torch.save(optimizer_state, path / tag / "zero" / "optimizer_state.pt")
    for file in _MODELS:
        torch.save(model_states, path / tag / file)
    (path / "latest_universal").write_text(tag, encoding="utf-8")


def _param_files(name: str, weights: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the files of a parameter hold, by their names."""
    if not isinstance(weights, Tensor) or weights.dtype not in _DTYPES:
        kind = weights.dtype if isinstance(weights, Tensor) else "not in the model"
        raise ValueError(f"'{name}' is {kind}, and DeepSpeed trains fp32 weights. {_REMEDY}")
    if "/" in name or "\\" in name:
        raise ValueError(f"'{name}' can't be the name of a directory. {_REMEDY}")
    if not state:
        raise ValueError(f"the optimizer has no state, which DeepSpeed expects. {_REMEDY}")
    # A parameter without state, as one that got no gradient, gets zeros under another's keys.
    other, values = next(iter(state.items()))
    step = values.get("step")
    found: dict[str, Any] = {"fp32": weights}
    if name in state:
        found |= {key: each for key, each in state[name].items() if key != "step"}
        if (own := state[name].get("step")) != step:
            raise ValueError(
                f"'{name}' has taken {own} steps and '{other}' {step}, and DeepSpeed counts the "
                f"steps of all. {_REMEDY}"
            )
    else:
        found |= {key: torch.zeros_like(weights) for key in values if key != "step"}
    odd = [key for key, each in found.items() if not _is_shaped(each, weights)]
    if odd:
        raise ValueError(
            f"the state {odd} of '{name}' is no tensor in the parameter's shape, and DeepSpeed's "
            f"files hold no other. {_REMEDY}"
        )
    files = {key: {"cat_dim": 0, "param": _plain(each)} for key, each in found.items()}
    return files if step is None else {**files, "step": step}


def _is_shaped(value: Any, weights: Tensor) -> bool:
    return (
        isinstance(value, Tensor) and value.shape == weights.shape and value.dtype.is_floating_point
    )


def _plain(value: Tensor) -> Tensor:
    """Return a tensor's values in fp32, row by row."""
    return value.detach().to(torch.float32).contiguous()
