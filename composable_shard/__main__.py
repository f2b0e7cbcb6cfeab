"""Plan a training, look into checkpoints and convert them, without ranks.

    python -m composable_shard estimate --hf-config config.json --world-size 64 --memory 80GiB
    python -m composable_shard estimate --model my_package.models:make_model --world-size 64
    python -m composable_shard inspect run
    python -m composable_shard convert run exported --to safetensors

Each command has a --help of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composable_shard import __version__
from composable_shard.conversion import FORMATS, convert, describe_checkpoint
from composable_shard.huggingface import parse_nbytes
from composable_shard.options import MixedPrecisionPolicy, ShardingStrategy
from composable_shard.planning import Estimate, estimate, tabulate

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ESTIMATE = """Bytes per rank, at rest and at the peaks, and sent, before anything runs.

Without --strategy each strategy is a row. Sizes may have a unit: 80GiB, 900GB.
"""
_INSPECT = """What a checkpoint has: who saved it, step, ranks, tensors, optimizers.

All checksums of our own are verified; those of other libraries have none.
"""
_CONVERT = """Write a saved model in another format.

checkpoint   of save_checkpoint: model and optimizers
dcp          of torch.distributed.checkpoint, which FSDP2 loads: "model", "optimizer"
deepspeed    its universal checkpoint, for ZeRO stages 1 to 3
safetensors  of Hugging Face: the model's tensors alone
torch        a file of torch.save that plain torch and DDP load

The source may be of another library too: a file of torch.save, a directory of
DeepSpeed, accelerate, transformers or Lightning. None of its code is run.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status; an error of the user's is one line."""
    parser = _make_parser()
    args = parser.parse_args(arguments)
    try:
        text = args.run(args)
    except Exception as error:  # whatever a model's code or a configuration raises
        if args.traceback:
            raise
        text = " ".join(str(error).split())
        if not text or isinstance(error, LookupError | ArithmeticError):
            text = f"{type(error).__name__}: {text}"
        parser.exit(2, f"error: {text}\n")
    sys.stdout.write(text + "\n" if text else "")
    return 0


def _make_parser() -> argparse.ArgumentParser:
    def command(name: str, text: str, run: Callable[[Any], str]) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=text.partition("\n")[0].rstrip("."),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(run=run)
        made.add_argument("--traceback", action="store_true", help="of an error, for a report")
        return made

    parser = argparse.ArgumentParser(
        "python -m composable_shard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_estimate(command("estimate", _ESTIMATE, _estimate))
    add = command("inspect", _INSPECT, _inspect).add_argument
    add("path", help="directory given to save_checkpoint, or a checkpoint of another library")
    add("--step", type=_natural, help="which checkpoint; default: the last")
    add("--tensors", action="store_true", help="list all tensors")
    add = command("convert", _CONVERT, _convert).add_argument
    add("source", help="directory of any of the formats")
    add("target", help="directory or file for the result")
    add("--to", required=True, choices=FORMATS)
    add("--step", type=_natural, help="which checkpoint to read, or the step of the new one")
    add("--max-shard-size", default="5GB", help="of a file of safetensors; default: 5GB")
    return parser


def _add_estimate(parser: argparse.ArgumentParser) -> None:
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--hf-config", help="config.json of a model of transformers, a local file")
    models.add_argument(
        "--model", help="MODULE:FUNCTION that returns a model, or a model and its batch"
    )
    add = parser.add_argument
    add("--world-size", type=_positive, help="data-parallel ranks")
    add("--mesh-shape", type=_shape, help="instead, REPLICATE,SHARD")
    add("--memory", help="of a device, to say what fits")
    add("--strategy", choices=[each.value for each in ShardingStrategy], help="default: all")
    add("--units", help="FQN globs of the units: 'layers.*,head'; default: the repeated blocks")
    add("--optimizer", default="adamw", help="default: adamw")
    add("--param-dtype", choices=_DTYPES, help="mp_policy.param_dtype")
    add("--reduce-dtype", choices=_DTYPES, help="mp_policy.reduce_dtype")
    add("--main-dtype", choices=_DTYPES, help="mp_policy.main_dtype")
    add("--batch-size", type=_positive, help="of --hf-config: sequences per rank, for activations")
    add("--length", type=_positive, default=4096, help="tokens of a sequence; default: 4096")


# Values


def _number(text: str, least: int) -> int:
    try:
        found = int(text)
    except ValueError:
        found = least - 1
    if found < least:
        raise argparse.ArgumentTypeError(f"expected a number of at least {least}, got {text!r}")
    return found


def _positive(text: str) -> int:
    return _number(text, 1)


def _natural(text: str) -> int:
    return _number(text, 0)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in re.split("[,x]", text))


# Commands


def _inspect(args: argparse.Namespace) -> str:
    return describe_checkpoint(args.path, step=args.step, lists_tensors=args.tensors)


def _convert(args: argparse.Namespace) -> str:
    sizes = {"max_shard_size": args.max_shard_size}
    left = convert(args.source, args.target, args.to, step=args.step, **sizes)
    return f"wrote {args.target}" + (f"; not written: {', '.join(left)}" if left else "")


def _estimate(args: argparse.Namespace) -> str:
    if (args.world_size is None) == (args.mesh_shape is None):
        raise ValueError("expected --world-size or --mesh-shape, one of both")
    memory_nbytes = None if args.memory is None else parse_nbytes(args.memory, "--memory")
    model, batch = _make_model(args)
    policy = MixedPrecisionPolicy(
        param_dtype=_DTYPES.get(args.param_dtype),
        reduce_dtype=_DTYPES.get(args.reduce_dtype),
        main_dtype=_DTYPES.get(args.main_dtype),
    )
    found: list[Estimate] = [
        estimate(
            model,
            world_size=args.world_size,
            mesh_shape=args.mesh_shape,
            rules=None if args.units is None else [(glob, {}) for glob in args.units.split(",")],
            optimizer=args.optimizer,
            batch=batch,
            strategy=each,
            mp_policy=policy,
        )
        for each in ShardingStrategy
        if args.strategy in (None, each.value)
    ]
    return tabulate(found, memory_nbytes)


def _make_model(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    """Return a model on the meta device, and its batch or None."""
    if args.hf_config is not None:
        return _from_config(args)
    module, colon, name = args.model.partition(":")
    if not colon:
        raise ValueError(f"expected MODULE:FUNCTION as --model, got {args.model!r}")
    sys.path.insert(0, os.getcwd())
    try:
        with torch.device("meta"):
            made = getattr(import_module(module), name)()
    except Exception as error:  # of the user's code
        kind = type(error).__name__
        raise ValueError(f"--model {args.model} raised {kind}: {error}") from error
    model, batch = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a model from {args.model}, got {type(model).__name__}")
    return model, batch


def _from_config(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    path = Path(args.hf_config)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"there is no file {path}: pass the config.json of a model")
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise ImportError("--hf-config needs transformers: pip install transformers") from None
    config = transformers.AutoConfig.from_pretrained(str(path))
    kinds = [getattr(transformers, name, None) for name in config.architectures or ()]
    with torch.device("meta"):
        if kinds and kinds[0] is not None:
            model: nn.Module = kinds[0](config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
    if args.batch_size is None:
        return model, None
    tokens = torch.zeros(args.batch_size, args.length, dtype=torch.long, device="meta")
    return model, {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    sys.exit(main())
