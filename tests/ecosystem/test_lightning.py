"""Lightning's `Trainer` with `ShardedStrategy`, beside its DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import load_checkpoint
from tests.common.trainers import as_torchrun_starts
from tests.ecosystem.programs import needs, run_lightning, values_of
from tests.harness.ranks import distributed, run_ranks


def make_lit(is_manual: bool = False, overflows: bool = False) -> Any:
    """Return a module that tells in which dtype it computes, and its losses.

    With `overflows` the gradients of the second rank's second batch do.
    """
    import lightning

    class Lit(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.head = nn.Linear(8, 4)
            self.told: list[Any] = []
            self.automatic_optimization = not is_manual

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
            return self.head(x)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            output = self(batch)
            self.told += [output.dtype, output.float().square().mean().item()]
            loss = output.square().mean() + self.head.weight.square().mean()  # outside of forward
            self.log("loss", loss, sync_dist=True)
            return loss * torch.inf if overflows and dist.get_rank() == index == 1 else loss

        def validation_step(self, batch: Tensor, index: int) -> None:
            self.log("val", self(batch).square().mean(), sync_dist=True)

        def test_step(self, batch: Tensor, index: int) -> None:
            self.log("test", self(batch).square().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    return Lit()


def lit_batches(number: int) -> Any:
    """Return batches of a whole run on six ranks at most, as a loader of this rank's."""
    every = [
        torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(n)) for n in range(number)
    ]
    own = [batch[dist.get_rank() :: dist.get_world_size()].flatten(0, 1) for batch in every]
    return torch.utils.data.DataLoader(own, batch_size=None)


def make_lit_trainer(folder: Path, is_sharded: bool = True, **options: Any) -> Any:
    """Return a Trainer of this rank, which torchrun has started."""
    import lightning
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from composable_shard.lightning import ShardedStrategy

    strategy = (ShardedStrategy if is_sharded else DDPStrategy)(process_group_backend="gloo")
    chosen = {"max_steps": 4, "gradient_clip_val": 0.5, "enable_checkpointing": False}
    if options.get("precision") == "16-mixed":  # of which Lightning makes bf16-mixed on the CPU
        del options["precision"]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    else:
        plugins = []
    return lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        plugins=[TorchElasticEnvironment(), *plugins],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **chosen | options,
    )


CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "16-mixed": {"precision": "16-mixed"},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped by value": {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01},
    "average": {},
}


@needs("lightning")
@pytest.mark.parametrize("case", CASES)
@distributed(2)
def test_a_trainer_trains_tests_and_averages(case: str, tmp_path: Path) -> None:
    """Losses, weights, `trainer.test`, precision plugins, Lightning's average of the weights."""
    from lightning.pytorch.callbacks import EMAWeightAveraging

    results = []
    with as_torchrun_starts():
        for is_sharded in (False, True):
            callbacks = [EMAWeightAveraging(decay=0.5)] if case == "average" else []
            trainer = make_lit_trainer(tmp_path, is_sharded, callbacks=callbacks, **CASES[case])
            module = make_lit(overflows=case == "16-mixed")
            trainer.fit(module, lit_batches(6), lit_batches(2))
            if case == "16-mixed":
                assert trainer.precision_plugin.scaler.get_scale() == 2.0**9
            values = values_of(module) if is_sharded else module.state_dict()
            tested = trainer.test(module, lit_batches(2), verbose=False)[0]["test"]
            results.append((module.told[1::2], tested, values))
            halves = {"bf16": torch.bfloat16, "16": torch.float16}
            dtype = halves.get(case.split("-")[0], torch.float32)
            assert set(module.told[::2]) == {dtype}
    tolerance = 1e-6 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=tolerance)


def _save_lit(folder: Path, is_sharded: bool, is_averaged: bool) -> None:
    """Train two epochs, and save after each."""
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

    with as_torchrun_starts():
        keep = ModelCheckpoint(folder, save_top_k=-1)
        average = [EMAWeightAveraging(decay=0.5)] if is_averaged else []
        options = {"max_steps": 8, "enable_checkpointing": True, "callbacks": [keep, *average]}
        make_lit_trainer(folder, is_sharded, **options).fit(make_lit(), lit_batches(4))


def _resume_lit(folder: Path, is_sharded: bool, is_averaged: bool) -> dict[str, Tensor]:
    """Go on from the first epoch; return the values at the end, after a test of both epochs."""
    from lightning.pytorch.callbacks import EMAWeightAveraging

    with as_torchrun_starts():
        average = [EMAWeightAveraging(decay=0.5)] if is_averaged else []
        module, fresh = make_lit(), make_lit()
        trainer = make_lit_trainer(folder, is_sharded, max_steps=8, callbacks=average)
        trainer.fit(module, lit_batches(4), ckpt_path=folder / "epoch=0-step=4.ckpt")
        assert len(module.told) == 8
        last = folder / "epoch=1-step=8.ckpt"
        [told] = trainer.test(fresh, lit_batches(2), ckpt_path=last, verbose=False)
        both = [dict(each.state_dict()) for each in (module, fresh)]
        if is_sharded:
            assert load_checkpoint(last, make_lit()).step == 8
            both = [values_of(each) for each in (module, fresh)]
        found = {f"{n}.{name}": v for n, each in enumerate(both) for name, v in each.items()}
        return found | {"tested": torch.tensor(told["test"])}


@needs("lightning")
@pytest.mark.parametrize("is_averaged", [False, True])
def test_a_checkpoint_resumes_at_another_world_size(is_averaged: bool, tmp_path: Path) -> None:
    """Saved by `ModelCheckpoint` on two ranks; taken up on two and on three, as DDP's is on two."""
    results = []
    for is_sharded, world_sizes in ((False, [2]), (True, [2, 3])):
        folder = tmp_path / str(is_sharded)
        run_ranks(2, _save_lit, folder, is_sharded, is_averaged)
        for world_size in world_sizes:
            results += run_ranks(world_size, _resume_lit, folder, is_sharded, is_averaged)[:1]
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=0, atol=1e-5)


@needs("lightning")
@distributed(2)
def test_manual_optimization_says_what_to_write(tmp_path: Path) -> None:
    """Its backward would run in the root unit's forward; units of one's own are taken."""
    message = "Shard the modules that training_step calls"
    with as_torchrun_starts(), pytest.raises(NotImplementedError, match=message):
        make_lit_trainer(tmp_path, gradient_clip_val=None).fit(make_lit(True), lit_batches(1))


@needs("lightning", "transformers")
@distributed(2)
def test_lightnings_own_strategy_leaves_sharding_to_the_module() -> None:
    """`ModelParallelStrategy`, beside DDP; its checkpoint holds shards."""
    with as_torchrun_starts():
        run_lightning()
