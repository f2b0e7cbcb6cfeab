"""`python -m composable_shard estimate ...`: what training a model takes, before anything runs.

Without `--strategy` each strategy is a row. Sizes may have a unit: 80GiB, 900GB.

    python -m composable_shard estimate --hf-config config.json --world-size 64 --memory 80GiB
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

from composable_shard.options import MixedPrecisionPolicy, ShardingStrategy
from composable_shard.planning import Estimate, estimate, tabulate

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SIZE = re.compile(r"([0-9.]+(?:e[0-9]+)?) *([kmgtp]?)(i?)b?", re.IGNORECASE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, print a table, and return the exit status."""
    args = _make_parser().parse_args(arguments)
    model = _make_model(args.hf_config)
    strategies = [each for each in ShardingStrategy if args.strategy in (None, each.value)]
    found = [_estimate(model, args, strategy) for strategy in strategies]
    lines = [tabulate(found, args.memory)]
    if args.wire_bandwidth and args.flops:
        for each in found:
            low, high = each.seconds_per_step(
                wire_bandwidth=args.wire_bandwidth, flops_per_second=args.flops
            )
            lines.append(f"{each.strategy.name}: {low:.3f} to {high:.3f} s per step")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m composable_shard", description=__doc__, formatter_class=_Formatter
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    add = commands.add_parser(
        "estimate", help="bytes per rank, at rest and at the peaks, and sent", description=__doc__
    ).add_argument
    add("--hf-config", required=True, help="config.json of a causal language model")
    add("--world-size", type=int, help="data-parallel ranks")
    add("--mesh-shape", type=_shape, help="instead, REPLICATE,SHARD")
    add("--memory", type=_size, help="of a device, to say what fits")
    add("--strategy", choices=[each.value for each in ShardingStrategy], help="default: all")
    add("--optimizer", default="adamw", help="default: adamw")
    add("--param-dtype", choices=_DTYPES, help="mp_policy.param_dtype")
    add("--reduce-dtype", choices=_DTYPES, help="mp_policy.reduce_dtype")
    add("--main-dtype", choices=_DTYPES, help="mp_policy.main_dtype")
    add("--batch-size", type=int, help="sequences per rank; without it, no activations")
    add("--length", type=int, default=4096, help="tokens of a sequence; default: 4096")
    add("--wire-bandwidth", type=_size, help="bytes that a rank sends per second")
    add("--flops", type=float, help="floating-point operations that it computes per second")
    return parser


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.split("[,x]", text))


def _size(text: str) -> float:
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a size like 80GiB, got {text!r}")
    number, prefix, binary = found.groups()
    power = " kmgtp".index(prefix.lower() or " ")
    return float(number) * math.pow(1024 if binary else 1000, power)


def _make_model(path: str) -> nn.Module:
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        sys.exit("--hf-config needs transformers: pip install transformers")
    config = transformers.AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def _estimate(model: nn.Module, args: argparse.Namespace, strategy: ShardingStrategy) -> Estimate:
    policy = MixedPrecisionPolicy(
        param_dtype=_DTYPES.get(args.param_dtype),
        reduce_dtype=_DTYPES.get(args.reduce_dtype),
        main_dtype=_DTYPES.get(args.main_dtype),
    )
    batch = None
    if args.batch_size is not None:
        tokens = torch.zeros(args.batch_size, args.length, dtype=torch.long, device="meta")
        batch = {"input_ids": tokens, "labels": tokens}
    return estimate(
        model,
        world_size=args.world_size,
        mesh_shape=args.mesh_shape,
        optimizer=args.optimizer,
        batch=batch,
        strategy=strategy,
        mp_policy=policy,
    )


if __name__ == "__main__":
    sys.exit(main())
