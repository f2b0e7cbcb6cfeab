"""What does it cost to go on from DeepSpeed's checkpoint with another number of ranks?

A Llama-style model with AdamW's state, in the file form of ZeRO stage 3, written here for 64 ranks
and for 2. Each is loaded by `load_checkpoint` on another number of gloo ranks, one thread each, and
what was loaded is compared, element by element. Where DeepSpeed is installed, beside:

- zero_to_fp32: `get_fp32_state_dict_from_zero_checkpoint`, one process, the weights alone
- ds_to_universal: DeepSpeed's converter, one process, everything, as new files
- engine: `engine.load_checkpoint` of these new files, on the same number of ranks, stage 3

Kept: a rank's shards of parameters and state. Read and written: bytes of one rank's `read` and
`write` calls (/proc/self/io), the highest; zero_to_fp32 maps the files, which does not count there.
Peak: bytes held from malloc on rank 0 beyond those before the call, in processes of their own
(gcc): the state that the call makes is in it. Files lie in memory, in `--folder`.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import malloc_counter, peers, report
from benchmarks.checkpoints.own import counts
from benchmarks.ranks import run_ranks
from composable_shard import load_checkpoint
from tests.common.models import make_llama, param_nbytes

KEYS = ("", "exp_avg", "exp_avg_sq")  # the weights, and AdamW's state
STEP = 3
CASES = ((64, 2), (2, 4))  # ranks that saved, ranks that load


def expected_values(number: int, key: str, numel: int) -> Tensor:
    """Return the values of a parameter or of its state: other ones in each."""
    start = 1 + 3 * number + KEYS.index(key)
    return torch.arange(start, start + numel, dtype=torch.float32).remainder_(997).div_(1000)


def write_stage3(path: Path, model: nn.Module, num_ranks: int) -> None:
    """Write the files of a tag: each parameter in equal parts, the last one padded."""
    shapes = {name: each.shape for name, each in model.named_parameters()}
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    main = {
        "module": {},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": {},
        "frozen_param_fragments": {},
        "shared_params": {},
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": STEP,
        "dp_world_size": num_ranks,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }
    tag = path / f"global_step{STEP}"
    tag.mkdir(parents=True)
    sizes = [math.ceil(shape.numel() / num_ranks) for shape in shapes.values()]
    flat = {key: torch.zeros(num_ranks, sum(sizes)) for key in KEYS}
    for key in KEYS:
        place = 0
        for number, (shape, size) in enumerate(zip(shapes.values(), sizes, strict=True)):
            padded = torch.zeros(num_ranks * size)
            padded[: shape.numel()] = expected_values(number, key, shape.numel())
            flat[key][:, place : place + size] = padded.view(num_ranks, size)
            place += size
    for rank in range(num_ranks):
        weights, *moments = (flat[key][rank].clone() for key in KEYS)
        state = {"step": torch.tensor(float(STEP)), **dict(zip(KEYS[1:], moments, strict=True))}
        optimizer = {
            "zero_stage": 3,
            "partition_count": num_ranks,
            "fp32_flat_groups": [weights],
            "optimizer_state_dict": {
                "state": {0: state},
                "param_groups": [{**options, "params": [0]}],
            },
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_{{}}_states.pt"
        torch.save(main, tag / name.format("model"))
        torch.save({"optimizer_state_dict": optimizer}, tag / name.format("optim"))
    (path / "latest").write_text(tag.name)


# Ways; each returns what the ranks keep, and does its work between `start` and `finish`.


class Meter:
    """Counts of one call: seconds, bytes read and written, bytes held at the peak."""

    def __init__(self) -> None:
        gc.collect()
        dist.barrier()
        self._has_peak = malloc_counter.is_preloaded()
        self._held = 0
        if self._has_peak:
            self._held = malloc_counter.held_nbytes()
            malloc_counter.restart_peak()
        self._start = counts()
        self._time = time.perf_counter()

    def finish(self) -> dict[str, float]:
        """Return the counts, of the rank with the most of each."""
        used = counts() - self._start
        peak = malloc_counter.peak_nbytes() - self._held if self._has_peak else 0
        dist.barrier()
        numbers = [time.perf_counter() - self._time, *used.tolist()[2:], float(peak)]
        told = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return dict(zip(("seconds", "read", "written", "peak"), told.tolist(), strict=True))


def load_here(rank: int, model_name: str, path: str) -> dict[str, float]:
    """Load with `load_checkpoint`, and compare each element."""
    model = peers.build("ours", make_llama(model_name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    meter = Meter()
    loaded = load_checkpoint(path, model, optimizer)
    found = meter.finish()
    assert loaded.step == STEP
    params = list(model.parameters())
    for number, param in enumerate(params):
        values = {"": param.detach(), **optimizer.state[param]}
        for key in KEYS:
            whole = values[key].full_tensor()
            expected = expected_values(number, key, whole.numel()).view_as(whole)
            assert torch.equal(whole, expected), (number, key)
    kept = sum(each.to_local().nbytes for each in params) * len(KEYS)
    return {**found, "kept": kept, "counted": loaded.nbytes_read}


def read_weights(rank: int, model_name: str, path: str) -> dict[str, float]:
    """Read with zero_to_fp32."""
    convert = import_module("deepspeed.utils.zero_to_fp32")
    meter = Meter()
    state = convert.get_fp32_state_dict_from_zero_checkpoint(path)
    found = meter.finish()
    return {**found, "kept": sum(each.nbytes for each in state.values())}


def make_universal(rank: int, model_name: str, path: str) -> dict[str, float]:
    """Convert with ds_to_universal, in this process."""
    converter = import_module("deepspeed.checkpoint.ds_to_universal")
    arguments = Namespace(
        input_folder=f"{path}/global_step{STEP}",
        output_folder=f"{path}/universal",
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    meter = Meter()
    converter.main(arguments)
    found = meter.finish()
    Path(path, "latest_universal").write_text("universal")
    return {**found, "kept": 0.0}


def load_universal(rank: int, model_name: str, path: str) -> dict[str, float]:
    """Load the converter's files with DeepSpeed's engine."""
    os.environ["LOCAL_RANK"] = str(rank)
    deepspeed = import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    model = make_llama(model_name)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": True},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    meter = Meter()
    engine.load_checkpoint(path, load_lr_scheduler_states=False)
    found = meter.finish()
    kept = sum(each.nbytes for each in engine.optimizer.fp32_partitioned_groups_flat)
    return {**found, "kept": float(kept * len(KEYS))}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="std", help="out of 110m, 50m, std, tiny, micro")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, in new processes")
    parser.add_argument("--folder", default="/dev/shm", help="where files go")
    args = parser.parse_args(argv)
    model = make_llama(args.model)
    size = param_nbytes(model)
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    rows = []
    for saved, loading in CASES:
        ways = [("load_checkpoint", load_here, loading)]
        if has_deepspeed:
            ways += [
                ("zero_to_fp32", read_weights, 1),
                ("ds_to_universal", make_universal, 1),
                ("engine", load_universal, loading),
            ]
        with TemporaryDirectory(dir=args.folder) as folder:
            path = str(Path(folder, "run"))
            write_stage3(Path(path), model, saved)
            for name, way, ranks in ways:
                run = partial(run_ranks, ranks, way, args.model, path)
                found = [run() for _ in range(args.rounds)]
                with malloc_counter.preloaded():
                    peak = run()["peak"]
                last = found[-1]
                rows.append(
                    [
                        f"{saved} to {loading}",
                        name,
                        str(ranks),
                        report.spread([each["seconds"] for each in found]),
                        f"{last['kept'] / 1e6:.1f}",
                        f"{last['read'] / 1e6:.1f}",
                        f"{last['read'] / last['kept']:.2f}" if last["kept"] else "",
                        f"{last['written'] / 1e6:.1f}",
                        f"{peak / 1e6:.1f}",
                        f"{peak / size:.2f}",
                    ]
                )
    markdown = report.header(
        f"Going on from DeepSpeed's checkpoint: {args.model}",
        f"fp32, ZeRO stage 3, AdamW; P = {size / 1e6:.1f} MB; files in {args.folder}",
        f"{args.rounds} runs in new processes, the slower rank, median (lower-upper quartile)",
    )
    columns = ["ranks", "what", "processes", "s", "kept, MB", "read, MB", "read / kept"]
    columns += ["written, MB", "peak, MB", "peak / P"]
    report.emit(markdown + "\n" + report.table(columns, rows), args.output)
