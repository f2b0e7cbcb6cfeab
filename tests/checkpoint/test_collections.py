"""A save and a load describe what there is without a search for garbage in between."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from composable_shard import fully_shard, load_checkpoint, save_checkpoint
from composable_shard.checkpoint import loading, saving


@contextmanager
def _collections_in(module: object, name: str) -> Iterator[list[int]]:
    """Yield the generations that are searched while a function of a module runs."""
    found: list[int] = []
    function = getattr(module, name)

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    def run(*args: object, **options: object) -> object:
        gc.callbacks.append(note)
        try:
            return function(*args, **options)
        finally:
            gc.callbacks.remove(note)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, run)
        yield found


@pytest.mark.parametrize("is_on", [True, False])
def test_nothing_is_searched_while_a_checkpoint_is_planned(tmp_path: Path, is_on: bool) -> None:
    """However often the program lets Python look; after the call, and an error, it does again."""
    model = fully_shard(nn.Sequential(*(nn.Linear(2, 2) for _ in range(20))))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    before = gc.get_threshold()
    gc.set_threshold(5)
    if not is_on:
        gc.disable()
    try:
        with _collections_in(saving, "plan_save") as found:
            save_checkpoint(tmp_path, model, optimizer, step=1)
            assert gc.isenabled() is is_on
        assert found == []
        with _collections_in(loading, "list_names") as found:
            load_checkpoint(tmp_path, model, optimizer)
            assert gc.isenabled() is is_on
        assert found == []
        with pytest.raises(ValueError, match="expected step"):
            save_checkpoint(tmp_path, model, optimizer, step=-1)
        with pytest.raises(ValueError, match="step 7"):
            load_checkpoint(tmp_path, model, optimizer, step=7)
        assert gc.isenabled() is is_on
    finally:
        gc.enable()
        gc.set_threshold(*before)
