"""What does a step cost inside accelerate, Trainer, TRL, Lightning, Ray, next to FSDP2 in them?

Each tool trains the same Llama of transformers: fp32, AdamW, clipped by norm, on two gloo ranks of
one thread. FSDP2 is the tool's own (Lightning: `ModelParallelStrategy`); ours is the same script
after `composable_shard.fsdp2.install()` (Lightning: `ShardedStrategy`). In Ray Train a plain loop
runs; `torch.distributed.checkpoint` writes, and Ray is told at the end, outside of the times, as
its reports take seconds. In each round both train anew, in turns, in the same two processes. Losses
are compared first. A step's time is the slower rank's, from one step's end to the next, with all
that the tool does besides, and so is the time of a checkpoint by the tool's own call. Peak: bytes
held from malloc by the first rank in a step, the model included, beyond those before it.

    pip install '.[test-ecosystem]'
    python -m benchmarks.tools --tools accelerate,trainer,trl,lightning,ray --rounds 5
"""

from __future__ import annotations

import gc
import json
import logging
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.fsdp import fully_shard

from benchmarks import malloc_counter, report
from benchmarks.ranks import run_ranks
from composable_shard import is_sharded
from tests.common.trainers import (
    BY_FSDP2,
    accelerate_with_fsdp2,
    as_torchrun_starts,
    forget_accelerators,
    installed,
    make_tokenizer,
    shards_on_cpu,
)

SIDES = ("fsdp2", "ours")
WORDS, BATCH, LENGTH, WARM_UP = 4096, 2, 64, 2


class Clock:
    """Of one training: seconds of its steps and of its checkpoint, losses, the peak of memory."""

    def __init__(self) -> None:
        gc.collect()
        self._held = malloc_counter.held_nbytes()
        self._ends: list[float] = []
        self.losses: list[float] = []
        self.peak = self.saving = 0.0

    def end_step(self) -> None:
        """Take the time of a step's end; memory of the second step, when all is allocated."""
        self._ends.append(time.perf_counter())
        if len(self._ends) == 1:
            malloc_counter.restart_peak()
        elif len(self._ends) == WARM_UP:
            self.peak = malloc_counter.peak_nbytes() - self._held

    def seconds(self) -> float:
        """Return the median of the steps after the first two, each that of the slower rank."""
        pairs = zip(self._ends[WARM_UP - 1 :], self._ends[WARM_UP:], strict=False)
        times = torch.tensor([[*(end - start for start, end in pairs), self.saving]])
        dist.all_reduce(times, dist.ReduceOp.MAX)
        self.saving = times[0, -1].item()
        return statistics.median(times[0, :-1].tolist())


def make_model() -> Any:
    """Return the same Llama each time, 47 MB."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 -- only where it is run

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_attention_heads=8, **sizes))


def make_batches(number: int) -> list[Tensor]:
    """Return this rank's batches of token ids."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randint(WORDS, (BATCH, LENGTH), generator=draw) for _ in range(number)]


def run_accelerate(side: str, steps: int, folder: Path, clock: Clock) -> None:
    accelerator = accelerate_with_fsdp2("no", "SHARDED_STATE_DICT", False)
    accelerator.gradient_accumulation_steps = 1
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in make_batches(steps):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.losses.append(loss.item())
        clock.end_step()
    start = time.perf_counter()
    accelerator.save_state(str(folder))
    clock.saving = time.perf_counter() - start


def make_callback(clock: Clock) -> Any:
    """Return a callback of a Trainer that keeps the times."""
    from transformers import TrainerCallback  # noqa: PLC0415 -- only where it is run

    class Timer(TrainerCallback):  # type: ignore[misc]
        logged = 0.0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.end_step()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            self.logged = time.perf_counter()
            clock.losses += [logs["loss"]] if "loss" in logs else []

        def on_save(self, *_: Any, **__: Any) -> None:
            clock.saving = time.perf_counter() - self.logged

    return Timer()


def trainer_options(steps: int) -> dict[str, Any]:
    """Return arguments of a Trainer: it saves after the last step."""
    config = BY_FSDP2["fsdp_config"] | {"state_dict_type": "SHARDED_STATE_DICT"}
    return {
        "fsdp": True,
        "fsdp_config": config,
        "max_steps": steps,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_steps": steps,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }


def make_token_rows(steps: int) -> Tensor:
    """Return token ids for all ranks' steps, a sample in each row."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(WORDS, (2 * steps * BATCH, LENGTH), generator=draw)


def run_trainer(side: str, steps: int, folder: Path, clock: Clock) -> None:
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415 -- only where it is run

    forget_accelerators()
    samples = [{"input_ids": row, "labels": row} for row in make_token_rows(steps)]
    arguments = TrainingArguments(str(folder), **trainer_options(steps))
    callbacks = [make_callback(clock)]
    Trainer(make_model(), arguments, train_dataset=samples, callbacks=callbacks).train()


def run_trl(side: str, steps: int, folder: Path, clock: Clock) -> None:
    from datasets import Dataset  # noqa: PLC0415 -- only where it is run
    from trl import SFTConfig, SFTTrainer  # noqa: PLC0415

    forget_accelerators()
    plain = {"gradient_checkpointing": False, "bf16": False}  # not so by default
    arguments = SFTConfig(str(folder), **trainer_options(steps), **plain)
    SFTTrainer(
        model=make_model(),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": make_token_rows(steps).tolist()}),
        processing_class=make_tokenizer(),
        callbacks=[make_callback(clock)],
    ).train()


def run_lightning(side: str, steps: int, folder: Path, clock: Clock) -> None:
    import lightning  # noqa: PLC0415 -- only where it is run
    from lightning.pytorch import strategies  # noqa: PLC0415
    from lightning.pytorch.plugins.environments import (  # noqa: PLC0415
        TorchElasticEnvironment,
    )

    from composable_shard.lightning import ShardedStrategy  # noqa: PLC0415

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def configure_model(self) -> None:
            if side == "fsdp2" and not hasattr(self.model, "unshard"):
                mesh = self.device_mesh["data_parallel"]
                for layer in self.model.model.layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(self.model, mesh=mesh)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = self.model(input_ids=batch, labels=batch).loss
            clock.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_batch_end(self, *_: Any) -> None:
            clock.end_step()

    gloo = {"process_group_backend": "gloo"}
    theirs = strategies.ModelParallelStrategy(dist.get_world_size(), 1, **gloo)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=theirs if side == "fsdp2" else ShardedStrategy(**gloo),
        plugins=[TorchElasticEnvironment()],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        gradient_clip_val=1.0,
        max_steps=steps,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(make_batches(steps), batch_size=None))
    start = time.perf_counter()
    trainer.save_checkpoint(folder / "saved")
    clock.saving = time.perf_counter() - start


def run_ray(side: str, steps: int, folder: Path, clock: Clock) -> None:
    from ray.train import Checkpoint, report  # noqa: PLC0415 -- only where it is run

    model = make_model()
    for layer in model.model.layers:
        fully_shard(layer)  # with install(), ours
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in make_batches(steps):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.losses.append(loss.item())
        clock.end_step()
    assert is_sharded(model) is (side == "ours")
    start = time.perf_counter()
    states = torch_state_dict.get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)
    clock.saving = time.perf_counter() - start
    report({}, checkpoint=Checkpoint.from_directory(folder) if dist.get_rank() == 0 else None)


TOOLS: dict[str, Callable[[str, int, Path, Clock], None]] = {
    "accelerate": run_accelerate,
    "trainer": run_trainer,
    "trl": run_trl,
    "lightning": run_lightning,
    "ray": run_ray,
}


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield a new directory that all ranks see."""
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    try:
        yield Path(str(found[0]))
        dist.barrier()
    finally:
        shutil.rmtree(str(found[0]), ignore_errors=True)


def measure(rank: int, tool: str, rounds: int, steps: int) -> Any:
    """Return by side, of each round: seconds of a step and a checkpoint, bytes, losses."""
    warnings.simplefilter("ignore")  # what the tools deprecate of each other
    logging.disable(logging.WARNING)
    told: dict[str, list[Any]] = {side: [] for side in SIDES}
    for turn in range(rounds + 1):
        for side in SIDES if turn % 2 else SIDES[::-1]:
            with ExitStack() as stack:
                folder = stack.enter_context(shared_folder())
                for each in (as_torchrun_starts(), shards_on_cpu()):
                    stack.enter_context(each)
                if side == "ours":
                    stack.enter_context(installed())
                clock = Clock()
                TOOLS[tool](side, steps, folder, clock)
                seconds = clock.seconds()
            if turn:  # the first warms up
                told[side].append([seconds, clock.saving, clock.peak, clock.losses])
            gc.collect()
    return told


def measure_by_ray(rounds: int, steps: int) -> Any:
    """Do the same in two workers that Ray Train starts."""
    import ray  # noqa: PLC0415 -- only where it is run
    from ray.train import RunConfig, ScalingConfig  # noqa: PLC0415
    from ray.train.torch import TorchConfig, TorchTrainer  # noqa: PLC0415

    def work(config: dict[str, Any]) -> None:
        from benchmarks import tools  # noqa: PLC0415 -- in the worker

        torch.set_num_threads(1)
        told = tools.measure(dist.get_rank(), "ray", rounds, steps)
        if dist.get_rank() == 0:
            Path(config["told"]).write_text(json.dumps(told))

    with tempfile.TemporaryDirectory() as folder:
        variables = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": variables},
        )
        told = Path(folder, "told.json")
        TorchTrainer(
            work,
            train_loop_config={"told": str(told)},
            scaling_config=ScalingConfig(num_workers=2),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(storage_path=str(Path(folder, "ray"))),
        ).fit()
        ray.shutdown()
        return json.loads(told.read_text())


def make_row(tool: str, told: dict[str, list[Any]], nbytes: int) -> list[str]:
    """Return a table's row: what ours costs, and its ratio to FSDP2's, round by round."""
    theirs, ours = (list(zip(*told[side], strict=True)) for side in SIDES)
    apart = max(
        abs(a - b)
        for pair in zip(ours[3], theirs[3], strict=True)
        for a, b in zip(*pair, strict=True)
    )
    ratios = [[a / b for a, b in zip(ours[n], theirs[n], strict=True)] for n in range(2)]
    peaks = [statistics.median(side[2]) / nbytes for side in (ours, theirs)]
    return [
        tool,
        f"{apart:.0e}",
        report.spread([1e3 * each for each in ours[0]], 0),
        report.spread(ratios[0]),
        f"{peaks[0]:.2f}",
        f"{peaks[0] / peaks[1]:.2f}",
        report.spread([1e3 * each for each in ours[1]], 0),
        report.spread(ratios[1]),
    ]


def main() -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--tools", default=",".join(TOOLS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved trainings of each side")
    parser.add_argument("--steps", type=int, default=6, help="steps of a training")
    args = parser.parse_args()
    nbytes = sum(param.nbytes for param in make_model().parameters())
    lines = []
    with malloc_counter.preloaded():
        for tool in args.tools.split(","):
            counts = (args.rounds, args.steps)
            told = (
                measure_by_ray(*counts) if tool == "ray" else run_ranks(2, measure, tool, *counts)
            )
            lines.append(make_row(tool, told, nbytes))
            sys.stderr.write(f"{lines[-1]}\n")  # should a later tool fail
    markdown = report.header(
        "Training inside other tools, beside FSDP2 there",
        f"fp32 Llama of {nbytes / 1e6:.0f} MB (P), AdamW, two gloo ranks of one thread",
        f"{args.rounds} trainings of {args.steps} steps a side, in turns; median (quartiles)",
        "ratios are ours / FSDP2's; the largest difference of a loss comes first",
    )
    columns = ["tool", "losses", "step ms", "ratio", "peak / P", "ratio", "checkpoint ms", "ratio"]
    report.emit(markdown + "\n" + report.table(columns, lines), args.output)


if __name__ == "__main__":
    main()
