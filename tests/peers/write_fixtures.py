"""Write the fixtures anew, by the libraries themselves: `python -m tests.peers.write_fixtures`.

Needs the extra `test-ecosystem`. Each run takes three steps on two ranks of the CPU, saves, and
takes three more: the file `expected.pt` holds the parameters after them. Names of directories have
the versions.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.peers import model as run

FIXTURES = Path(__file__).parent / "fixtures"


def write_all(arguments: list[str]) -> None:
    """Write all fixtures whose names begin with one of the arguments, or all."""
    for name, (package, write, options) in RUNS.items():
        if arguments and not name.startswith(tuple(arguments)):
            continue
        path = FIXTURES / f"{name}-{importlib.metadata.version(package).partition('+')[0]}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        run_on_ranks(write, path, **options)
        for each in [*path.rglob("zero_to_*.py"), *path.rglob("training_args.bin")]:
            each.unlink()  # code of DeepSpeed; paths of the machine
        print(path.name, sum(each.stat().st_size for each in path.rglob("*") if each.is_file()))


def run_on_ranks(write: Callable[..., Any], path: Path, **options: Any) -> None:
    """Call a function on two ranks, as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(
        _run_writer, (write, path, options, port), nprocs=run.WORLD_SIZE, join=True
    )


def _run_writer(rank: int, write: Callable[..., Any], path: Path, options: Any, port: int) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(run.WORLD_SIZE),
        "LOCAL_WORLD_SIZE": str(run.WORLD_SIZE), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    torch.set_num_threads(1)
    write(path, rank, **options)
    if dist.is_initialized():
        dist.destroy_process_group()


def _write_expected(path: Path, rank: int, values: dict[str, Any]) -> None:
    if rank == 0:
        plain = {name: value.detach().clone().float() for name, value in values.items()}
        torch.save(plain, path / "expected.pt")


# Files of torch.save


def write_torch(path: Path, rank: int, kind: str) -> None:
    """DDP, with torch's own optimizer, or with one that is split over the ranks."""
    dist.init_process_group("gloo")
    model = run.make_peer_model()
    wrapped = DistributedDataParallel(model)
    groups = run.two_groups(model)
    optimizer: Any
    if kind == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=run.LR)
    elif kind == "oss":
        from fairscale.optim.oss import OSS

        optimizer = OSS(groups, torch.optim.AdamW, lr=run.LR)
    elif kind == "named":
        names = {id(each): name for name, each in model.named_parameters()}
        named = [{**g, "params": [(names[id(p)], p) for p in g["params"]]} for g in groups]
        optimizer = torch.optim.AdamW(named, lr=run.LR)
    else:
        optimizer = torch.optim.AdamW(groups, lr=run.LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    run.take_steps(wrapped, optimizer, scheduler, 0, rank)
    if kind in ("zero", "oss"):
        optimizer.consolidate_state_dict(0)
    if rank == 0:
        state = {
            "model": (model if kind == "named" else wrapped).state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": 1,
            "step": 3,
        }
        torch.save(state, path / "checkpoint.pt")
    run.take_steps(wrapped, optimizer, scheduler, 3, rank)
    _write_expected(path, rank, model.state_dict())


def write_accelerate(path: Path, rank: int) -> None:
    """`Accelerator.save_state`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = run.make_peer_model()
    optimizer = torch.optim.AdamW(run.two_groups(model), lr=run.LR)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2, 0.5)
    accelerator.register_for_checkpointing(scheduler)
    run.take_steps(wrapped, optimizer, scheduler, 0, rank)
    accelerator.save_state(str(path))
    run.take_steps(wrapped, optimizer, scheduler, 3, rank)
    _write_expected(path, rank, model.state_dict())


def write_accelerate_fsdp(path: Path, rank: int, form: str) -> None:
    """`Accelerator.save_state` with FSDP2, which accelerate itself starts on accelerators alone."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=form, auto_wrap_policy="no_wrap", cpu_offload=False
    )
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = run.make_peer_model()
    optimizer = torch.optim.AdamW(run.two_groups(model), lr=run.LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    accelerator._schedulers.append(scheduler)
    run.take_steps(wrapped, optimizer, scheduler, 0, rank)
    accelerator.save_state(str(path))
    run.take_steps(wrapped, optimizer, scheduler, 3, rank)
    values = {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each
        for name, each in wrapped.state_dict().items()
    }
    _write_expected(path, rank, values)


def write_trainer(path: Path, rank: int) -> None:
    """`transformers.Trainer`, which saves after three of six steps."""
    from transformers import Trainer, TrainingArguments

    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = run.make_peer_model()
            # Trainer writes tied weights of models of transformers alone.
            self.inner.head.weight = nn.Parameter(self.inner.head.weight.detach().clone())

        def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.inner(tokens)
            return {"loss": run.peer_loss(logits, tokens), "logits": logits}

    steps = [list(run.peer_batches(first, each)) for first in (0, 3) for each in range(2)]
    order = [
        steps[2 * half + each][number] for half in (0, 1) for number in range(3) for each in (0, 1)
    ]
    data = [{"tokens": row} for tokens in order for row in tokens]

    class Ordered(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

    arguments = TrainingArguments(
        output_dir=str(path), per_device_train_batch_size=4, max_steps=6, save_steps=3,
        learning_rate=run.LR, weight_decay=0.1, lr_scheduler_type="linear", use_cpu=True,
        max_grad_norm=0.0, report_to=[], optim="adamw_torch", disable_tqdm=True,
        save_strategy="steps", logging_strategy="no", dataloader_num_workers=0,
    )  # fmt: skip
    model = Scored()
    trainer = Ordered(model=model, args=arguments, train_dataset=data)
    trainer.train()
    _write_expected(path, rank, model.state_dict())
    if rank == 0:
        shutil.rmtree(path / "checkpoint-6", ignore_errors=True)


# Directories of torch.distributed.checkpoint


def write_dcp(path: Path, rank: int, kind: str) -> None:
    """FSDP2 and FSDP1, with the keys of torch's functions or those of torchtitan."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as functions
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("gloo")
    model: Any = run.make_peer_model()
    if kind == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        fully_shard(model.up)
        fully_shard(model.down)
        fully_shard(model)
    optimizer = torch.optim.AdamW(run.two_groups(model), lr=run.LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    run.take_steps(model, optimizer, scheduler, 0, rank)
    state: dict[str, Any]
    if kind == "titan":
        options = functions.StateDictOptions(flatten_optimizer_state_dict=True)
        state = dict(functions.get_model_state_dict(model))
        state["optimizer"] = functions.get_optimizer_state_dict(model, optimizer, options=options)
        state["lr_scheduler"] = scheduler.state_dict()
        state["train_state"] = {"step": torch.tensor(3, dtype=torch.int32), "ntokens_seen": 60}
    else:
        states = functions.get_state_dict(model, optimizer)
        state = {"model": states[0], "optimizer": states[1], "step": 3}
        state["scheduler"] = scheduler.state_dict()
    dcp.save(state, checkpoint_id=path)
    run.take_steps(model, optimizer, scheduler, 3, rank)
    values = functions.get_model_state_dict(
        model, options=functions.StateDictOptions(full_state_dict=True)
    )
    _write_expected(path, rank, values)


def write_lightning(path: Path, rank: int, kind: str) -> None:
    """Lightning's Trainer with DDP, which writes a file, or with ModelParallelStrategy."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = run.make_peer_model()

        def training_step(self, tokens: torch.Tensor, _: int) -> torch.Tensor:
            return run.peer_loss(self.inner(tokens), tokens)

        def configure_model(self) -> None:
            if kind == "sharded" and not isinstance(
                self.inner.up, torch.distributed.fsdp.FSDPModule
            ):
                for each in (self.inner.up, self.inner.down, self.inner):
                    torch.distributed.fsdp.fully_shard(each)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(run.two_groups(self.inner), lr=run.LR)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

        def on_train_batch_end(self, *_: Any) -> None:
            self.lr_schedulers().step()
            if self.global_step == 3:
                self.trainer.save_checkpoint(path / ("run.ckpt"))

    from lightning.pytorch.plugins import environments
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    strategy: Any = DDPStrategy(process_group_backend="gloo")
    if kind == "sharded":
        strategy = ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
        )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=6, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, use_distributed_sampler=False,
        enable_model_summary=False, plugins=[environments.LightningEnvironment()],
    )  # fmt: skip
    data = [*run.peer_batches(0, rank), *run.peer_batches(3, rank)]
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    values = module.state_dict()
    values = {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each
        for name, each in values.items()
    }
    _write_expected(path, rank, values)


# DeepSpeed


def make_engine(
    model: nn.Module, stage: int, dtype: str = "fp32", optimizer: Any = None, **config: Any
) -> Any:
    """Return DeepSpeed's engine of a model, with a scheduler."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    elastic = config.pop("elastic", False)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "elastic_checkpoint": elastic}
    config |= {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if dtype == "bf16":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if dtype == "fp16":
        config["fp16"]["initial_scale_power"] = 4
    optimizer = optimizer or torch.optim.AdamW(run.two_groups(model), lr=run.LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    return engine


def train_engine(engine: Any, rank: int, first: int) -> None:
    """Take three steps with DeepSpeed."""
    for tokens in run.peer_batches(first, rank):
        engine.backward(run.peer_loss(engine(tokens), tokens))
        engine.step()


def engine_values(model: nn.Module, stage: int) -> dict[str, torch.Tensor]:
    """Return the parameters of an engine's model, or its master weights."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    values = {}
    for name, each in model.named_parameters(remove_duplicate=False):
        full = safe_get_full_fp32_param(each)
        if full is None:
            with GatheredParameters([each], enabled=stage == 3):
                full = each.detach().clone()
        values[name] = full
    return values


def write_deepspeed(
    path: Path,
    rank: int,
    stage: int,
    dtype: str = "fp32",
    *,
    universal: bool = False,
    elastic: bool = False,
) -> None:
    """DeepSpeed's engine; its own converter makes the universal form."""
    model = run.make_peer_model()
    engine = make_engine(model, stage, dtype, elastic=elastic)
    train = partial(train_engine, engine, rank)
    train(0)
    engine.save_checkpoint(str(path))
    train(3)
    _write_expected(path, rank, engine_values(model, stage))
    dist.barrier()
    if rank == 0 and universal:
        _make_universal(path, stage)


def _make_universal(path: Path, stage: int) -> None:
    from argparse import Namespace

    from deepspeed.checkpoint import ds_to_universal

    tag = path / (path / "latest").read_text().strip()
    arguments = Namespace(
        input_folder=str(tag), output_folder=str(path / "universal"), num_extract_workers=1,
        num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
    )  # fmt: skip
    ds_to_universal.main(arguments)
    shutil.rmtree(tag)


RUNS: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "ddp-torch": ("torch", write_torch, {"kind": "plain"}),
    "named-torch": ("torch", write_torch, {"kind": "named"}),
    "zero-torch": ("torch", write_torch, {"kind": "zero"}),
    "oss-fairscale": ("fairscale", write_torch, {"kind": "oss"}),
    "state-accelerate": ("accelerate", write_accelerate, {}),
    "fsdp-accelerate": ("accelerate", write_accelerate_fsdp, {"form": "SHARDED_STATE_DICT"}),
    "fsdp-full-accelerate": ("accelerate", write_accelerate_fsdp, {"form": "FULL_STATE_DICT"}),
    "trainer-transformers": ("transformers", write_trainer, {}),
    "fsdp2-torch": ("torch", write_dcp, {"kind": "fsdp2"}),
    "fsdp1-torch": ("torch", write_dcp, {"kind": "fsdp1"}),
    "titan-torch": ("torch", write_dcp, {"kind": "titan"}),
    "ddp-lightning": ("lightning", write_lightning, {"kind": "ddp"}),
    "sharded-lightning": ("lightning", write_lightning, {"kind": "sharded"}),
    **{
        f"stage{stage}-{dtype}-deepspeed": (
            "deepspeed", write_deepspeed, {"stage": stage, "dtype": dtype}
        )
        for stage, dtype in (
            *((1, "fp32"), (2, "fp32"), (3, "fp32"), (0, "fp32")),
            *((1, "bf16"), (2, "bf16"), (3, "bf16"), (1, "fp16"), (3, "fp16")),
        )
    },
    "elastic-deepspeed": ("deepspeed", write_deepspeed, {"stage": 1, "elastic": True}),
    "universal2-deepspeed": ("deepspeed", write_deepspeed, {"stage": 2, "universal": True}),
    "universal3-deepspeed": ("deepspeed", write_deepspeed, {"stage": 3, "universal": True}),
}  # fmt: skip


if __name__ == "__main__":
    write_all(sys.argv[1:])
