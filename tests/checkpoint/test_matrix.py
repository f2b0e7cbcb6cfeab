"""Everything that a checkpoint may hold, and how it comes back: the table in the docs."""

from __future__ import annotations

import hashlib
import random
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import (
    FlatShard,
    ShardedGradScaler,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    load_checkpoint,
    save_checkpoint,
)
from tests.harness.ranks import run_ranks
from tests.programs.models import EVERYWHERE, Net

_DOCS = Path(__file__).parents[2] / "docs" / "checkpoints.md"


class _Everything(Net):
    """A model with one of everything that a state dict may hold."""

    def __init__(self, seed: int) -> None:
        super().__init__(num_blocks=2)
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.out.bias.requires_grad_(False)
        self.local = nn.Parameter(torch.randn(3))
        self.register_buffer("table", torch.randn(4))
        self.register_buffer("statistics", torch.randn(4))
        self.register_buffer("hidden", torch.randn(4), persistent=False)
        self.extra: Any = {"seed": seed}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class _EverythingRun:
    """A run with one of everything that `save_checkpoint` takes."""

    def __init__(
        self, seed: int, rank: int, *, is_meta: bool = False, is_used: bool = True
    ) -> None:
        torch.manual_seed(seed)
        with torch.device("meta" if is_meta else "cpu"):
            self.model = _Everything(seed)
        if is_meta:
            self.model.hidden = torch.randn(4)
        else:
            self.model.statistics += rank
        fully_shard(self.model, ignored_params={self.model.local})
        params = list(self.model.parameters())
        groups = [
            {"params": [p for p in params if p.ndim == 2], "weight_decay": 0.1 + seed},
            {
                "params": [p for p in params if p.ndim == 1],
                "lr": torch.tensor(0.1 + seed),
            },
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01 * (1 + seed), foreach=False)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [seed + 1, 7])
        self.scaler = ShardedGradScaler("cpu", init_scale=2.0 ** (seed + 3))
        self.extra: Any = {"position": seed, "rank": rank}
        if is_used and not is_meta:
            data = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
            for _ in range(seed + 1):
                self.model(data).square().mean().backward()
                self.model.local.grad = torch.full((3,), 1.0 + seed)
                self.optimizer.step()
                self.scheduler.step()
        torch.manual_seed(100 * seed + rank)
        random.seed(100 * seed + rank)

    def observe(self) -> dict[str, str]:
        """Return something of each kind that tells two values apart."""
        model = get_model_state_dict(self.model, options=EVERYWHERE)
        state = get_optimizer_state_dict(self.model, self.optimizer, options=EVERYWHERE)
        buffers = ("table", "statistics", "_extra_state")
        weights = {n: v for n, v in model.items() if n not in ("out.bias", "local", *buffers)}
        params = dict(self.model.named_parameters())
        found = {
            "parameters, tied ones too": weights,
            "frozen parameters": model["out.bias"],
            "parameters of no unit": model["local"],
            "buffers": self.model.table,
            "buffers that differ between ranks": self.model.statistics,
            "buffers with `persistent=False`": self.model.hidden,
            "extra state of modules": self.model.extra,
            "optimizer state": state["state"],
            "options of parameter groups, tensors too": state["param_groups"],
            "schedulers": self.scheduler.state_dict(),
            "the scaler": self.scaler.state_dict(),
            "`extra`": self.extra,
            "random number generators": (torch.get_rng_state(), random.getstate()),
            "gradients": {n: p.grad for n, p in params.items() if p.grad is not None},
            "`requires_grad`": {n: p.requires_grad for n, p in params.items()},
        }
        return {what: _digest(value) for what, value in found.items()}


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(_listed(value)).encode()).hexdigest()[:16]


def _listed(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.to_local() if isinstance(value, FlatShard) else value
        return "meta" if value.is_meta else (str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return [(key, _listed(each)) for key, each in sorted(value.items(), key=repr)]
    return [_listed(each) for each in value] if isinstance(value, list | tuple) else value


def _save_everything(path: Path) -> dict[str, str]:
    run = _EverythingRun(0, dist.get_rank())
    run.model.out.weight.requires_grad_(False)
    save_checkpoint(
        path,
        run.model,
        run.optimizer,
        step=1,
        scheduler=run.scheduler,
        scaler=run.scaler,
        extra=run.extra,
    )
    return run.observe()


def _load_everything(path: Path, options: dict[str, bool]) -> tuple[dict[str, str], ...]:
    run = _EverythingRun(1, dist.get_rank(), **options)
    before = {} if options.get("is_meta") else run.observe()
    kept = run.model.hidden
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a scheduler before the optimizer's first step
        loaded = load_checkpoint(
            path, run.model, run.optimizer, scheduler=run.scheduler, scaler=run.scaler
        )
    run.extra = loaded.extra
    after = run.observe()
    if not before:  # a model on meta has no values to compare with
        before = {what: after[what] for what in _NOT_SAVED}
        assert run.model.hidden is kept
    return before, after


_NOT_SAVED = ("buffers with `persistent=False`", "gradients", "`requires_grad`")
_COLUMNS: dict[str, tuple[int, dict[str, bool]]] = {
    "a fresh run": (2, {"is_used": False}),
    "a used run": (2, {}),
    "a run on meta": (2, {"is_meta": True}),
    "1 rank": (1, {}),
    "3 ranks": (3, {}),
}


def _outcome(
    what: str, saved: list[dict[str, str]], loaded: list[tuple[dict[str, str], ...]]
) -> str:
    """Return how a kind of value has come back, on all ranks."""
    wanted = [each[what] for each in saved]
    before = [each.get(what) for each, _ in loaded]
    found = [each[what] for _, each in loaded]
    if len(found) == len(wanted) and found == wanted:
        return "as saved"
    if set(found) == {wanted[0]}:
        return "as saved" if len(set(wanted)) == 1 else "rank 0's"
    return "not restored" if found == before else "different"


def test_everything_comes_back_as_the_table_says(tmp_path: Path) -> None:
    """Saved by 2 ranks; "as saved" is bitwise."""
    saved = run_ranks(2, _save_everything, tmp_path)
    columns = {
        name: run_ranks(size, _load_everything, tmp_path, options)
        for name, (size, options) in _COLUMNS.items()
    }
    lines = [f"| saved by 2 ranks | {' | '.join(_COLUMNS)} |", "|---" * (1 + len(_COLUMNS)) + "|"]
    for what in saved[0]:
        cells = [_outcome(what, saved, loaded) for loaded in columns.values()]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    text = "\n".join(lines)
    assert text in _DOCS.read_text(), f"the table is now\n{text}"
