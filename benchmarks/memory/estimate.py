"""How far is `estimate` from what a real run holds?

Peaks of a step of FULL_SHARD and the other strategies beside what `estimate` says without ranks,
both in units of P (all parameters). Measured as in `benchmarks.memory`; needs gcc.

    python -m benchmarks.memory estimate --world-sizes 2,4
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import malloc_counter, report
from benchmarks.memory.step import Levels, measure
from benchmarks.ranks import run_ranks
from composable_shard import ShardingStrategy
from composable_shard.planning import Estimate, by_class, estimate
from tests.common.models import LlamaLayer, make_batch, make_llama

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy
PLANS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours_keep": {"reshard_after_forward": False},
    "ours_gradop": {"strategy": SHARD_GRAD_OP},
    "ours_optim": {"strategy": SHARD_OPTIM},
    "ours_noshard": {"strategy": NO_SHARD},
}


def told(model_name: str, peer: str, world_size: int) -> Estimate:
    """Return the estimate for a peer of `benchmarks.peers`."""
    return estimate(
        make_llama(model_name),
        world_size=world_size,
        rules=by_class(LlamaLayer),
        batch=make_batch(model_name, 0),
        device_type="cpu",
        **PLANS[peer],
    )


def cells(found: Levels, expected: Estimate, nbytes: int) -> list[str]:
    """Return measured and estimated levels in P, and how far off the estimate is."""
    at_rest = expected.parameter_nbytes + expected.optimizer_nbytes
    pairs = {
        "after backward": at_rest + expected.gradient_nbytes,
        "peak forward": expected.peak_forward_nbytes,
        "peak backward": expected.peak_backward_nbytes,
    }
    return [
        f"{found[stage] / nbytes:.3f} ({each / nbytes:.3f}, {each / found[stage] - 1:+.1%})"
        for stage, each in pairs.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="std", help="out of std, short, tiny, micro")
    parser.add_argument("--plans", default=",".join(PLANS), help="comma-separated")
    parser.add_argument("--world-sizes", default="2,4", help="gloo ranks")
    parser.add_argument("--steps", type=int, default=3, help="steps after two warm-up steps")
    args = parser.parse_args(argv)
    nbytes = sum(param.nbytes for param in make_llama(args.model).parameters())
    rows = []
    with malloc_counter.preloaded():
        for world_size in map(int, args.world_sizes.split(",")):
            for peer in args.plans.split(","):
                found = run_ranks(world_size, measure, args.model, peer, args.steps)
                expected = told(args.model, peer, world_size)
                rows.append([peer, str(world_size), *cells(found, expected, nbytes)])
    markdown = report.header(
        f"Estimated and measured memory of a training step: {args.model}",
        f"fp32, gloo ranks, fused AdamW; in P = {nbytes / 1e6:.1f} MB",
        f"measured: malloc bytes beyond those before building; highest of {args.steps} steps, rank "
        "0; in brackets the estimate, made without ranks, and its deviation",
    )
    columns = ["plan", "ranks", "after backward", "peak forward", "peak backward"]
    report.emit(markdown + "\n" + report.table(columns, rows), args.output)
