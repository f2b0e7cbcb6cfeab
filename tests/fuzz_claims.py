"""Random programs on random models, beside a plain model in float64.

A seed draws a `Case`: a model, how it is sharded, and what is done with it. All ranks draw the same
one. Freed and in-flight memory holds NaN while it runs. For minutes, or for one seed again:

    python -m tests.fuzz_claims --seconds 600 --seed 1000
    python -m tests.fuzz_claims --only 1234
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.utils.checkpoint import checkpoint

from composable_shard import (
    ShardingStrategy,
    fully_shard,
    no_sync,
    register_flat_param,
    register_orig_params,
    reshard,
    set_is_last_backward,
    set_requires_all_reduce,
    set_requires_gradient_sync,
    unshard,
)
from tests.claims import (
    assert_close,
    is_refused,
    poisoned,
    unsharded_gradients,
    unsharded_values,
)
from tests.helpers import Planned, RankError, run_ranks, shut_down_workers
from tests.models import average_gradients, rank_input, square_mean

DIM, HIDDEN = 6, 5
KEEPING = ("main", "tuple", "dict", "nested")  # outputs whose tensors any version finds
HIDING = ("slots", "normal")

#: What a case may have beyond the rest, each with what it stands for.
FEATURES = {
    "side": "losses kept on modules, in lists, by hooks and closures",
    "hiding": "outputs that hide their tensors in objects",
    "penalty": "gradients of gradients, other forwards between them",
    "freeze": "requires_grad that changes at rest",
    "data": "values, data and dtypes that change at rest",
    "dropping": "zero_grad between microbatches, which drops what is pending",
    "carrying": "values that change while gradients are pending",
    "inputs": "backward(inputs=...) with parameters, between unshard and reshard",
    "reentrant_ties": "tied or shared weights of which a use is in a reentrant checkpoint",
    "uneven": "parameters that some ranks use, beside reentrant checkpoints and create_graph",
}


@dataclass
class BlockPlan:
    """One module of a random model."""

    is_unit: bool
    options: dict[str, Any]
    output: str = "main"
    side: str | None = None
    checkpoint: str | None = None
    frozen: tuple[str, ...] = ()
    tie: int | None = None  # to the block of this number
    shared: int | None = None  # its inner module is that of this block
    repeats: int = 1
    is_branch: bool = False  # takes the input of the block before it
    is_inplace: bool = False
    inner: list[BlockPlan] = field(default_factory=list)


@dataclass
class Micro:
    """One microbatch: forwards, then backwards."""

    sync: str = "sync"
    num_forwards: int = 1
    order: str = "sum"
    loss: str = "both"
    penalty: str | None = None
    fails: str | None = None
    fails_at: int = 0
    evaluation: str | None = None
    change: str | None = None  # after it
    drops: str | None = None  # after it, by a form of zero_grad
    inputs: bool = False


@dataclass
class Case:
    """A model, how it is sharded, and what is done with it."""

    blocks: list[BlockPlan]
    options: dict[str, Any]
    has_root: bool
    is_uneven: bool  # ranks use different parameters, whatever is checkpointed
    steps: list[tuple[str | None, list[Micro], str | None]]  # freeze or change, microbatches, zero

    def __str__(self) -> str:
        lines = [f"root: {self.has_root} {self.options}"]
        lines += [f"block {i}: {block}" for i, block in enumerate(self.blocks)]
        for before, micros, zero in self.steps:
            lines.append(f"step: before={before} zero={zero}")
            lines += [f"    {micro}" for micro in micros]
        return "\n".join(lines)


def draw(seed: int, features: set[str]) -> Case:
    """Return the case of a seed."""
    random = Random(seed)
    shared = {"strategy": random.choice(list(ShardingStrategy)), "use_orig_params": True}
    shared["use_orig_params"] = random.random() < 0.6
    has_root = random.random() < 0.75
    is_double = "penalty" in features and random.random() < 0.25
    kinds = [None, None, None, "False"] if is_double else [None, None, None, "False", "True"]
    kinds = [None] if is_double else kinds
    blocks = [
        _draw_unit(random, i, has_root, shared, features, kinds)
        for i in range(random.randint(1, 4))
    ]
    if "reentrant_ties" not in features and any(block.checkpoint == "True" for block in blocks):
        for block in blocks:
            block.tie = block.shared = None
    steps = [_draw_step(random, features, is_double, len(blocks)) for _ in range(3)]
    is_nested = any(block.checkpoint == "True" for block in blocks)
    if is_nested:  # which torch allows no `inputs` beside
        for micro in (micro for _, micros, _ in steps for micro in micros):
            micro.inputs = False
    is_uneven = "uneven" in features
    if is_uneven and any(before == "freeze" for before, _, _ in steps):
        for micro in (micro for _, micros, _ in steps for micro in micros):
            micro.inputs = False  # which reach no node on a rank that uses none of the trainable
    return Case(blocks, _options(random, shared), has_root, is_uneven, steps)


def _options(random: Random, shared: dict[str, Any]) -> dict[str, Any]:
    options = dict(shared)
    if random.random() < 0.2:
        options["strategy"] = random.choice(list(ShardingStrategy))
    if options["strategy"] is ShardingStrategy.FULL_SHARD:
        options["reshard_after_forward"] = random.choice([None, None, True, False, 2])
    options["bucket_cap_mb"] = random.choice([None, None, None, 1e-6, 3e-4])
    if random.random() < 0.2:
        options["prefetch_nbytes"] = 0
    return options


def _draw_unit(
    random: Random,
    index: int,
    has_root: bool,
    shared: dict[str, Any],
    features: set[str],
    kinds: list[str | None],
) -> BlockPlan:
    outputs = [*KEEPING, *(HIDING if "hiding" in features else ())]
    plan = BlockPlan(
        is_unit=not has_root or random.random() < 0.75,
        options=_options(random, shared),
        output=random.choice(["main", *outputs]),
        checkpoint=random.choice(kinds),
        frozen=random.choice([(), (), (), ("up.weight",), ("up.bias", "down.bias")]),
        repeats=random.choice([1, 1, 1, 2]),
        is_branch=index > 0 and random.random() < 0.2,
        is_inplace=random.random() < 0.2,
    )
    if plan.checkpoint is not None:
        plan.output = "main"
    elif "side" in features:
        plan.side = random.choice([None, "attribute", "list", "hook", "closure", "after"])
    if index and random.random() < 0.25:
        plan.tie = random.randrange(index)
    if random.random() < 0.4:
        inner = BlockPlan(random.random() < 0.6, _options(random, shared))
        inner.repeats = random.choice([1, 1, 2])
        plan.inner = [inner]
    elif index and random.random() < 0.15:
        plan.shared = random.randrange(index)
    return plan


def _draw_step(
    random: Random, features: set[str], is_double: bool, num_blocks: int
) -> tuple[str | None, list[Micro], str | None]:
    before = None
    if "freeze" in features and random.random() < 0.2:
        before = random.choice(["freeze", "unfreeze"])
    elif "data" in features and random.random() < 0.4:
        before = random.choice(["mul", "data", "all_data", "load", "dtype", "vector"])
    micros = []
    if random.random() < 0.2:
        fails = random.choice(["forward", "backward"])
        micros.append(Micro(fails=fails, fails_at=random.randrange(num_blocks)))
    pending = ["no_sync", "gradient_sync", "last_backward", "all_reduce"]
    for _ in range(random.choice([0, 0, 1, 2])):
        micro = _draw_micro(random, is_double)
        micro.sync = random.choice(pending)
        if "dropping" in features and random.random() < 0.2:
            micro.drops = random.choice(["optimizer", "module", "none"])
        if "carrying" in features and random.random() < 0.2:
            micro.change = random.choice(["all_data", "load"])
        micros.append(micro)
    micros.append(_draw_micro(random, is_double))
    if "inputs" in features and random.random() < 0.15:
        micros[-1].inputs = True
    return before, micros, random.choice(["optimizer", "zeros", "module", "none", None])


def _draw_micro(random: Random, is_double: bool) -> Micro:
    return Micro(
        num_forwards=random.choice([1, 1, 1, 2]),
        order=random.choice(["sum", "each", "reversed", "twice"]),
        loss=random.choice(["main", "both", "both", "side"]),
        penalty=random.choice([None, "grad", "later"]) if is_double else None,
        evaluation=random.choice([None, None, "no_grad", "inference", "dropped"]),
    )


# The model


class _Slots:
    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@dataclass
class _Record:
    tensors: list[Tensor]


class _BackwardFailure(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Planned


class FuzzBlock(nn.Module):
    """Two layers, perhaps others inside, and a parameter that some ranks use."""

    def __init__(self, plan: BlockPlan) -> None:
        super().__init__()
        self.plan = plan
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.extra = nn.Parameter(torch.randn(DIM))
        self.inner = nn.ModuleList(map(FuzzBlock, plan.inner))
        for name in plan.frozen:
            self.get_parameter(name).requires_grad_(False)
        self.fails: str | None = None
        self.uses_extra = True
        self.kept: list[Tensor] = []
        if plan.side == "hook":
            self.register_forward_hook(FuzzBlock._keep_output)

    def _keep_output(self, args: Any, output: Any) -> None:
        self.kept.append(square_mean(main_of(output)))

    def forward(self, x: Tensor) -> Any:
        """Return the output in the form that the plan says."""
        hidden = torch.tanh(self.up(x))
        side = self.plan.side
        if side == "attribute":
            self.kept = [square_mean(self.down(hidden)) + self.up.weight.square().mean()]
        elif side == "list":
            self.kept.append((self.down.weight * self.down.weight).sum() * hidden.mean())
        if self.fails == "forward":
            raise Planned
        y = self.down(hidden)
        for block in self.inner:
            for _ in range(block.plan.repeats):
                y = main_of(block(y))
        if self.uses_extra:
            y = y * self.extra
        if self.plan.is_inplace:
            y = y.relu_()
        return _in_form(self._end(x, x + y), hidden, self.plan.output)

    def _end(self, x: Tensor, out: Tensor) -> Tensor:
        if self.plan.side == "closure":
            self.kept.append((lambda: square_mean(torch.tanh(x @ self.up.weight.T)))())
        elif self.plan.side == "after":
            self.kept.append(square_mean(self.down(torch.tanh(out[:, :HIDDEN]))))
        return _BackwardFailure.apply(out) if self.fails == "backward" else out


def _in_form(out: Tensor, hidden: Tensor, form: str) -> Any:
    match form:
        case "tuple":
            return out, hidden
        case "dict":
            return {"out": out, "other": (hidden, None)}
        case "nested":
            return [{"record": _Record([out])}]
        case "slots":
            return _Slots(out)
        case "normal":
            return Independent(Normal(out, 1.0, validate_args=False), 1, validate_args=False)
    return out


def main_of(output: Any) -> Tensor:
    """Return the tensor that goes on, from an output in any form."""
    match output:
        case tuple():
            return output[0]
        case dict():
            return output["out"]
        case list():
            return output[0]["record"].tensors[0]
        case _Slots():
            return output.tensor
        case Independent():
            return output.base_dist.loc
    return output


class FuzzModel(nn.Module):
    """Blocks in a row, or beside each other; parameters of its own where it has a root unit."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(FuzzBlock, case.blocks))
        self.scale = nn.Parameter(torch.ones(DIM)) if case.has_root else None
        for block in self.blocks:
            if block.plan.tie is not None:
                block.up.weight = self.blocks[block.plan.tie].up.weight
            if block.plan.shared is not None:
                block.inner = self.blocks[block.plan.shared].inner

    def forward(self, x: Tensor) -> Tensor:
        """Return the output; what blocks keep stays there."""
        for block in self.each_block():
            block.kept = []
        before = x
        for block in self.blocks:
            given = before if block.plan.is_branch else x
            before = x
            for _ in range(block.plan.repeats):
                if block.plan.checkpoint is not None and torch.is_grad_enabled():
                    is_reentrant = block.plan.checkpoint == "True"
                    given = checkpoint(block, given, use_reentrant=is_reentrant)
                else:
                    given = main_of(block(given))
            x = x + given if block.plan.is_branch else given
        return x if self.scale is None else x * self.scale

    def each_block(self) -> Iterator[FuzzBlock]:
        """Yield all blocks, each once."""
        for module in self.modules():
            if isinstance(module, FuzzBlock):
                yield module


def shard_as_planned(model: FuzzModel, case: Case) -> None:
    """Make units of the blocks that are to be units, and of what is left if there is a root."""
    done: set[nn.Module] = set()
    for block in model.blocks:
        for module in (*block.inner, block):
            if module.plan.is_unit and module not in done:
                done.add(module)
                fully_shard(module, **module.plan.options)
    if case.has_root:
        fully_shard(model, **case.options)


# The program


def _pending(model: nn.Module, is_sharded: bool, form: str) -> AbstractContextManager[Any]:
    if not is_sharded or form == "sync":
        return nullcontext()
    if form == "no_sync":
        return no_sync(model)
    setters: dict[str, Callable[[nn.Module, bool], None]] = {
        "gradient_sync": set_requires_gradient_sync,
        "last_backward": set_is_last_backward,
        "all_reduce": set_requires_all_reduce,
    }
    return _cleared(setters[form], model)


@contextmanager
def _cleared(setter: Callable[[nn.Module, bool], None], model: nn.Module) -> Iterator[None]:
    setter(model, False)
    try:
        yield
    finally:
        setter(model, True)


@dataclass
class _Trainee:
    """One of the two models, and where it is."""

    model: FuzzModel
    is_sharded: bool
    optimizer: torch.optim.Optimizer
    is_same_everywhere: bool  # the ranks use the same parameters
    number: int = 0  # of the next input

    def next_input(self, *, is_leaf: bool) -> Tensor:
        self.number += 1
        x = rank_input(3, DIM, step=self.number, dtype=torch.float64)
        return x.requires_grad_(is_leaf)

    def run(self, micro: Micro) -> None:
        for index, block in enumerate(self.model.each_block()):
            # Whether a reentrant checkpoint's gradients are complete must be the same on all ranks.
            rank = 0 if self.is_same_everywhere else dist.get_rank()
            block.uses_extra = (self.number + index + rank) % 3 != 0
        self.evaluate(micro.evaluation)
        if micro.fails is not None:
            self.fail(micro)
            return
        with _pending(self.model, self.is_sharded, micro.sync):
            if micro.inputs and self.is_sharded:
                unshard(self.model, recurse=True)
            losses = [self.loss(micro) for _ in range(micro.num_forwards)]
            self.backward(micro, losses)
            if micro.inputs and self.is_sharded:
                reshard(self.model, recurse=True)

    def loss(self, micro: Micro) -> Tensor:
        x = self.next_input(is_leaf=True)
        main = square_mean(self.model(x))
        kept = [each for block in self.model.each_block() for each in block.kept]
        loss = main
        if kept and micro.loss != "main":
            loss = sum(kept) + (main if micro.loss == "both" else 0)
        if micro.penalty is not None:
            (grad,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
            if micro.penalty == "later":
                with torch.no_grad():
                    self.model(self.next_input(is_leaf=False))
                loss = loss + square_mean(self.model(self.next_input(is_leaf=False)))
            if grad is not None:
                loss = loss + square_mean(grad)
        return loss

    def backward(self, micro: Micro, losses: list[Tensor]) -> None:
        inputs = None
        if micro.inputs:
            inputs = [param for param in self.model.parameters() if param.requires_grad]
        match micro.order:
            case "sum":
                torch.stack(losses).sum().backward(inputs=inputs)
            case "twice":
                for loss in losses:
                    loss.backward(retain_graph=True, inputs=inputs)
                    loss.backward(inputs=inputs)
            case "each":
                for loss in losses:
                    loss.backward(inputs=inputs)
            case "reversed":
                for loss in reversed(losses):
                    loss.backward(inputs=inputs)

    def fail(self, micro: Micro) -> None:
        block = self.model.blocks[micro.fails_at]
        grads = [(p, None if p.grad is None else p.grad.clone()) for p in self.model.parameters()]
        block.fails = micro.fails
        try:
            self.loss(Micro(loss="main")).backward()
        except Planned:
            pass
        else:
            raise AssertionError("the planned failure did not come")
        block.fails = None
        if not self.is_sharded:  # the sharded model drops such gradients as a whole
            for param, grad in grads:
                param.grad = grad

    def evaluate(self, kind: str | None) -> None:
        if kind == "dropped":
            self.model(self.next_input(is_leaf=True))
        elif kind is not None:
            with torch.no_grad() if kind == "no_grad" else torch.inference_mode():
                self.model(self.next_input(is_leaf=False))

    def zero(self, form: str | None) -> None:
        if form == "module":
            self.model.zero_grad()
        elif form == "none":
            for param in self.model.parameters():
                param.grad = None
        elif form is not None:
            self.optimizer.zero_grad(set_to_none=form != "zeros")

    def change(self, form: str | None, *, has_names: bool) -> None:
        """Change values or flags at rest."""
        if form == "load":
            is_flat = self.is_sharded and not has_names
            if is_flat:
                register_orig_params(self.model)
            state = self.model.state_dict()
            self.model.load_state_dict({name: value * 1.25 for name, value in state.items()})
            if is_flat:
                register_flat_param(self.model)
        elif form == "dtype":
            self.model.to(torch.float32).to(torch.float64)
        is_partial = has_names and form in ("freeze", "unfreeze", "mul", "data")
        for param in list(self.model.parameters())[:: 2 if is_partial else 1]:
            match form:
                case "freeze" | "unfreeze" if has_names:
                    param.requires_grad_(form == "unfreeze")
                case "mul":
                    with torch.no_grad():
                        param.mul_(1.5)
                case "data" | "all_data":
                    param.data = param.data * 0.75
                case "vector":
                    param.data.copy_(param.detach() + 0.125)


def run_case(seed: int, features: set[str]) -> None:
    """Run the case of a seed on both models and compare after each step, on every rank."""
    case = draw(seed, features)
    try:
        with poisoned(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a backward failed before it reached unit")
            failing = [m.fails_at for _, ms, _ in case.steps for m in ms if m.fails == "backward"]
            if any(case.blocks[index].output in HIDING for index in failing):
                # No unit sees that gradients reach such an output, so it fails before the first.
                warnings.filterwarnings("ignore", "a backward has run since the last forward")
            _run_beside_plain(case)
    except BaseException as error:
        error.add_note(f"python -m tests.fuzz_claims --only {seed}\n{case}")
        raise


def _run_beside_plain(case: Case) -> None:
    torch.manual_seed(0)
    plain = FuzzModel(case).double()
    sharded = copy.deepcopy(plain)
    shard_as_planned(sharded, case)
    has_names = case.options["use_orig_params"]
    is_same = any(block.checkpoint == "True" for block in case.blocks)
    is_same = is_same or any(micro.penalty for _, micros, _ in case.steps for micro in micros)
    is_same = is_same and not case.is_uneven
    runs = [
        _Trainee(model, model is sharded, torch.optim.SGD(model.parameters(), lr=0.05), is_same)
        for model in (plain, sharded)
    ]
    for number, (before, micros, zero) in enumerate(case.steps):
        for run in runs:
            run.change(before, has_names=has_names)
            for micro in micros:
                run.run(micro)
                run.zero(micro.drops)
                run.change(micro.change, has_names=has_names)
        average_gradients(plain.parameters())
        found = unsharded_gradients(sharded)
        for name, param in plain.named_parameters():
            assert_close(found[name], param.grad, f"step {number}: gradient of {name}")
        for run in runs:
            run.optimizer.step()
            run.zero(zero)
        values = unsharded_values(sharded)
        for name, param in plain.named_parameters():
            assert_close(values[name], param.detach(), f"step {number}: parameter {name}")


def run_seeds(first: int, count: int, features: set[str]) -> None:
    """Run the cases of consecutive seeds; raise at the first that is wrong."""
    for seed in range(first, first + count):
        run_case(seed, features)


def run_apart(world_size: int, seed: int, features: set[str]) -> str:
    """Run the case of a seed; return whether it was "right" or "refused", raise if neither.

    A case may be refused in which an output hides its tensors, or losses are kept beside it; and
    one in which ranks use other parameters inside reentrant checkpoints or gradients of gradients:
    what tells there that values have been read for the last time comes elsewhere.
    """
    case = draw(seed, features)
    is_local = any(block.checkpoint == "True" for block in case.blocks) or any(
        micro.penalty for _, micros, _ in case.steps for micro in micros
    )
    hides = any(block.output in HIDING or block.side is not None for block in case.blocks)
    try:
        # By its own name, which the workers import; this module may be `__main__`.
        run_ranks(world_size, importlib.import_module("tests.fuzz_claims").run_case, seed, features)
    except RankError as error:
        may_be_refused = (case.is_uneven and is_local) or hides
        if not (may_be_refused and is_refused(error, world_size)):
            raise
        return "refused"
    return "right"


def run_fuzz() -> int:
    """Run cases for some seconds; print each seed that fails, with its program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", type=int)
    parser.add_argument("--features", default=",".join(FEATURES))
    parser.add_argument("--world-size", type=int, default=2)
    args = parser.parse_args()
    features = set(args.features.split(",")) & set(FEATURES)
    end = time.monotonic() + args.seconds
    seed, failed, num_run, num_refused = args.only or args.seed, [], 0, 0
    sys.stdout.write(f"from seed {seed}, features {sorted(features)}\n")
    while True:
        try:
            num_refused += run_apart(args.world_size, seed, features) == "refused"
        except RankError as error:
            failed.append(seed)
            sys.stdout.write(f"\nseed {seed}: {error}\n")
        num_run += 1
        seed += 1
        if args.only is not None or time.monotonic() > end:
            break
    shut_down_workers()
    sys.stdout.write(f"{num_run} cases, {num_refused} refused, {len(failed)} failed: {failed}\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(run_fuzz())
