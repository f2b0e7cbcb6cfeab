"""What does a Muon step cost: on owners alone, or after gathering every matrix on every rank?

Wall time of a Muon step over all matrices of one model, both ways in the same processes on equal
gradients, their order changing from round to round, a barrier before each step and the time until
the last rank is done; gloo ranks with one thread. Bytes: payloads of the collectives that the step
issues, and what each rank holds of the momentum.

- owners: `granularity="param"`, torch.optim.Muon on the owners
- gather: `granularity="element"`; each rank gathers the momentum of each matrix (`full_tensor()`),
  orthogonalises all of them with torch's own function, and keeps its slice of the update
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

from benchmarks import report
from benchmarks.ranks import run_ranks, timed_together
from composable_shard import FlatShard, count_collectives, fully_shard
from tests.common.models import make_batch, make_llama

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LR, _DECAY, _MOMENTUM = 1e-3, 0.1, 0.95


def _build(name: str, granularity: Any) -> tuple[nn.Module, list[FlatShard]]:
    model = make_llama(name)
    for layer in model.layers:
        fully_shard(layer, granularity=granularity)
    fully_shard(model)
    matrices = [param for layer in model.layers for param in layer.parameters() if param.dim() == 2]
    return model, matrices


class GatherMuon(torch.optim.Optimizer):
    """Muon on gathered matrices, step for step what torch.optim.Muon computes."""

    def __init__(self, params: list[FlatShard]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(param.grad)
            state["momentum_buffer"].lerp_(param.grad, 1 - _MOMENTUM)
            update: Tensor = param.grad.lerp(state["momentum_buffer"], _MOMENTUM).full_tensor()
            update = _zeropower_via_newtonschulz(update, _COEFFICIENTS, 5, 1e-7)
            scale = max(1.0, param.shape[0] / param.shape[1]) ** 0.5
            param.mul_(1 - _LR * _DECAY)
            part = FlatShard.from_full(update.to(param.dtype), param._shard_spec)
            param.add_(part, alpha=-_LR * scale)


def _state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    buffers = [state["momentum_buffer"] for state in optimizer.state.values()]
    return sum(buffer.to_local().nbytes for buffer in buffers)


def measure(rank: int, model_name: str, rounds: int) -> dict[str, Any]:
    """Return for each way: step times in ms, bytes sent by a step, bytes of state on this rank."""
    ways: dict[str, tuple[list[FlatShard], torch.optim.Optimizer]] = {}
    models = []
    for name, granularity, make in (
        ("owners", _whole_matrices, torch.optim.Muon),
        ("gather", "element", GatherMuon),
    ):
        model, matrices = _build(model_name, granularity)
        tokens, targets = make_batch(model_name, rank)
        model(tokens, targets).backward()
        models.append(model)
        ways[name] = matrices, make(matrices)
    result: dict[str, Any] = {name: {"times": []} for name in ways}
    for number in range(-2, rounds):
        order = list(ways) if number % 2 else list(reversed(ways))
        for name in order:
            _, optimizer = ways[name]
            if number == -2:
                with count_collectives() as log:
                    optimizer.step()
                result[name]["sent"] = sum(event.nbytes for event in log.events)
                result[name]["collectives"] = len(log.events)
                continue
            taken = timed_together(optimizer.step)
            if number >= 0:
                result[name]["times"].append(taken)
    for name, (_, optimizer) in ways.items():
        largest = torch.tensor(_state_nbytes(optimizer))
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        result[name]["state"] = int(largest)
    pairs = zip(ways["owners"][0], ways["gather"][0], strict=True)
    result["difference"] = max(
        (one.full_tensor() - other.full_tensor()).abs().max().item() for one, other in pairs
    )
    result["matrices"] = 4 * sum(matrix.numel() for matrix in ways["owners"][0])
    return result


def _whole_matrices(param: nn.Parameter) -> str:
    return "param" if param.dim() == 2 else "element"


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="std", help="out of 50m, std, tiny, micro")
    parser.add_argument("--world-size", type=int, default=2, help="gloo ranks")
    parser.add_argument("--rounds", type=int, default=20, help="rounds after two to warm up")
    args = parser.parse_args(argv)
    result = run_ranks(args.world_size, measure, args.model, args.rounds)
    size, difference = result.pop("matrices"), result.pop("difference")
    base = result["gather"]["times"]
    rows = []
    for name, found in result.items():
        ratios = [one / other for one, other in zip(found["times"], base, strict=True)]
        rows.append(
            [
                name,
                report.spread(found["times"], 1),
                report.spread(ratios),
                str(found["collectives"]),
                f"{found['sent'] / size:.2f}",
                f"{found['state'] / size:.3f}",
            ]
        )
    markdown = report.header(
        f"A Muon step over the matrices of the blocks: {args.model}",
        f"fp32, {args.world_size} gloo ranks; M = {size / 1e6:.1f} MB, the bytes of the matrices",
        f"{args.rounds} rounds, median (lower-upper quartile), until the last rank is done",
        "ratio: to gather in the same round; payload: full-size bytes of a step's collectives",
        f"largest difference between parameters of the two after all steps: {difference:.1e}",
    )
    columns = ["way", "step ms", "ratio", "collectives", "payload / M", "largest state / M"]
    report.emit(markdown + "\n" + report.table(columns, rows), args.output)
