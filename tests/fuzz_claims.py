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
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.utils.checkpoint import checkpoint

from composable_shard import (
    Block,
    ShardingStrategy,
    fully_shard,
    get_optimizer_state_dict,
    no_sync,
    reduce_pending_gradients,
    register_flat_param,
    register_orig_params,
    reshard,
    set_is_last_backward,
    set_requires_all_reduce,
    set_requires_gradient_sync,
    unshard,
)
from tests.harness.assertions import Planned
from tests.harness.poison import poisoned
from tests.harness.ranks import RankError, run_ranks, shut_down_workers
from tests.interrupts import Interrupter, OutOfStepError, are_all_at, without_lost_interrupts
from tests.programs.at_rest import AT_REST
from tests.programs.claims import (
    assert_close,
    is_refused,
    unsharded_gradients,
    unsharded_values,
)
from tests.programs.models import average_gradients, rank_input, square_mean

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
    "surgery": "heads, children, parameters and flags that are new after some steps",
    "rest": "losses of parameters at rest",
    "sharing": "gradients that parameters share, or that are parameters",
    "interrupt": "interrupts of a forward or backward at any line",
    "at_rest": "operations on parameters and gradients at rest, under any cut",
    "kept": "weights that blocks keep in lists, since `__init__` or their first forward",
    "attributes": "attributes of parameters, set at rest and read in forwards",
    "saves": "the optimizer's state dict between a backward and its step",
}
#: What a program ends in that would train something unseen; it goes on with the remedy.
REFUSALS = {
    "rest": "a backward reached parameter .* at rest",
    "surgery": "no unit manages the trainable parameters",
}
#: What a read of values that nobody announced meets where a unit shows one flat parameter.
IN_AND_OUT = "was used inside and outside of a reentrant checkpoint"
ALONE = "a collective has failed because not all ranks came"
UNREACHED = "a backward has run since the last forward of units "
AT_REST_IN_FLAT_FORM = "has no values of its own: its unit shows one flat parameter"


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
    sharing: str | None = None
    keeps: str | None = None  # the weight of `up` in a list
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
    surgery: tuple[int, str, int, bool] | None = None  # step, kind, block, whether it is refused
    at_rest: list[list[str]] = field(default_factory=list)  # of each step, operations by name
    has_attributes: bool = False
    saves: bool = False

    @property
    def has_buckets(self) -> bool:
        """Whether any unit's parameters are cut into buckets."""
        units = [plan for block in self.blocks for plan in (block, *block.inner) if plan.is_unit]
        options = [unit.options for unit in units] + [self.options] * self.has_root
        return any(each["bucket_cap_mb"] is not None for each in options)

    def __str__(self) -> str:
        lines = [f"root: {self.has_root} {self.options}, surgery: {self.surgery}"]
        lines.append(f"at rest: {self.at_rest}")
        lines.append(f"attributes: {self.has_attributes}, saves: {self.saves}")
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
    # Ranks that use different parameters can't be interrupted at the same line: half of the seeds.
    is_uneven = "uneven" in features and ("interrupt" not in features or seed % 2 == 1)
    if is_uneven and any(before == "freeze" for before, _, _ in steps):
        for micro in (micro for _, micros, _ in steps for micro in micros):
            micro.inputs = False  # which reach no node on a rank that uses none of the trainable
    case = Case(blocks, _options(random, shared), has_root, is_uneven, steps)
    if not has_root:  # where ranks fill buckets differently, the next tree's collectives find that
        for plan in case.blocks:
            for unit in (plan, *plan.inner):
                unit.options["bucket_cap_mb"] = None
    _draw_unseen(random, case, features, is_double)
    _draw_kept(random, case, features)
    return case


def _draw_unseen(random: Random, case: Case, features: set[str], is_double: bool) -> None:
    """Draw what might train unseen; last of all, so that the rest of a seed stays what it is."""
    if "surgery" in features and random.random() < 0.4:
        kind = random.choice(["head", "leaf", "param", "unfreeze"])
        is_managed = case.has_root or not case.options["use_orig_params"]
        kind = "head" if kind == "unfreeze" and is_managed else kind
        number, index = random.randint(1, 2), random.randrange(len(case.blocks))
        if kind == "head" and case.blocks[index].side == "list":
            kind = "leaf"  # such a block reads the head's weight outside of the head's forward
        case.surgery = number, kind, index, random.random() < 0.5
    for plan in case.blocks if "sharing" in features and not is_double else ():
        plan.sharing = random.choice([None, None, "sum", "other", "view", "own"])
    for _, micros, _ in case.steps:
        if "rest" in features and case.options["use_orig_params"] and random.random() < 0.1:
            micros.insert(0, Micro(fails="rest", fails_at=random.randrange(len(case.blocks))))
        if "interrupt" in features and not case.is_uneven and random.random() < 0.25:
            lines = int(10 ** random.uniform(1, 3.7))
            drops = random.choice(["optimizer", "zeros", "module", "none"])
            micros.insert(0, Micro(fails="interrupt", fails_at=lines, drops=drops))
    if "at_rest" in features and case.options["use_orig_params"]:
        for _ in case.steps:
            case.at_rest.append(random.choices(list(AT_REST), k=random.choice([0, 1, 3])))
        units = [unit for plan in case.blocks for unit in (plan, *plan.inner)]
        for options in (case.options, *(unit.options for unit in units)):
            options["granularity"] = random.choice(["element", "element", "row", Block(4)])


def _draw_kept(random: Random, case: Case, features: set[str]) -> None:
    """Draw what a program keeps of its parameters; after all else of a seed."""
    has_ties = any(plan.tie is not None for plan in case.blocks)
    for plan in case.blocks if "kept" in features and not has_ties else ():
        plan.keeps = random.choice([None, "init", "forward"])
    case.has_attributes = "attributes" in features and random.random() < 0.4
    saves = "saves" in features and random.random() < 0.4 and case.surgery is None
    case.saves = saves and case.options["use_orig_params"]


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


class _Lends(torch.autograd.Function):
    """The first weight's gradient is a parameter, or a view of one, whatever the loss is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, other: Tensor, sharing: str) -> Tensor:
        ctx.save_for_backward(weight if sharing == "own" else other)
        ctx.sharing = sharing
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (lent,) = ctx.saved_tensors
        return grad, lent.view_as(lent) if ctx.sharing == "view" else lent, None, None


class FuzzBlock(nn.Module):
    """Two layers, perhaps others inside, and a parameter that some ranks use."""

    def __init__(self, plan: BlockPlan) -> None:
        super().__init__()
        self.plan = plan
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.extra = nn.Parameter(torch.randn(DIM))
        self.twin = nn.Parameter(torch.randn(HIDDEN, DIM)) if plan.sharing else None
        self.register_parameter("fresh", None)
        self.inner = nn.ModuleList(map(FuzzBlock, plan.inner))
        for name in plan.frozen:
            self.get_parameter(name).requires_grad_(False)
        self.fails: str | None = None
        self.uses_extra = True
        self.kept: list[Tensor] = []
        self.weights = [self.up.weight] if plan.keeps == "init" else []
        if plan.side == "hook":
            self.register_forward_hook(FuzzBlock._keep_output)

    def _keep_output(self, args: Any, output: Any) -> None:
        self.kept.append(square_mean(main_of(output)))

    def forward(self, x: Tensor) -> Any:
        """Return the output in the form that the plan says."""
        hidden = self.up(x if self.twin is None else self._share(x))
        if self.plan.keeps is not None:
            self.weights = self.weights or [self.up.weight]
            hidden = hidden - 0.5 * nn.functional.linear(x, self.weights[0])
        hidden = torch.tanh(hidden * getattr(self.up.weight, "mult", 1.0))
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
        if self.fresh is not None:
            y = y * self.fresh
        if self.plan.is_inplace:
            y = y.relu_()
        return _in_form(self._end(x, x + y), hidden, self.plan.output)

    def _share(self, x: Tensor) -> Tensor:
        if self.plan.sharing == "sum":
            return x + (x @ (self.up.weight + self.twin).T).mean(1, keepdim=True)
        return _Lends.apply(x, self.up.weight, self.twin, self.plan.sharing)

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
        is_unfrozen = case.surgery is not None and case.surgery[1] == "unfreeze"
        self.outer = nn.Linear(DIM, DIM).requires_grad_(False) if is_unfrozen else nn.Identity()
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
        x = self.outer(x)
        return x if self.scale is None else x * self.scale

    def operate(self, kind: str, index: int) -> nn.Module:
        """Change the model as its owner might; return the module with what is new."""
        torch.manual_seed(7)
        block = self.blocks[index]
        if kind == "head":
            del block.down  # whose memory, and `id`, the new one may get
            block.down = nn.Linear(HIDDEN, DIM).double()
            return block.down
        if kind == "leaf":
            block.up.lora = nn.Linear(DIM, HIDDEN).double()
            block.up.register_forward_hook(lambda up, args, out: out + up.lora(args[0]))
            return block.up.lora
        if kind == "param":
            block.fresh = nn.Parameter(torch.randn(DIM).double())
            return block
        return self.outer.requires_grad_()

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
                fully_shard(module, **_for_world(module.plan.options))
    if case.has_root:
        fully_shard(model, **_for_world(case.options))


def _for_world(options: dict[str, Any]) -> dict[str, Any]:
    """Return options without a group of two where there is one rank."""
    is_apart = options.get("reshard_after_forward") == 2 and dist.get_world_size() == 1
    return {**options, "reshard_after_forward": None} if is_apart else options


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


@contextmanager
def _raises(kind: str | None) -> Iterator[None]:
    """Check that the block is refused, or raises what was planned."""
    try:
        yield
    except Planned:
        assert kind is None
    except RuntimeError as error:
        if kind is None or not re.search(REFUSALS[kind], str(error)):
            raise
    else:
        raise AssertionError(f"no error came: {kind or 'planned'}")


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
            is_same = self.is_same_everywhere or micro.fails == "interrupt"
            rank = 0 if is_same else dist.get_rank()
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
        """Run a microbatch that ends in an error, or in an interrupt."""
        if micro.fails == "interrupt":
            self.interrupt(micro.fails_at)
            return
        block = self.model.blocks[micro.fails_at]
        params = () if self.is_sharded else self.model.parameters()
        grads = [(p, None if p.grad is None else p.grad.clone()) for p in params]
        is_at_rest = micro.fails == "rest"
        if is_at_rest and not block.up.weight.requires_grad:
            return  # such a loss is right
        is_right = is_at_rest and not self.is_sharded
        block.fails = micro.fails
        with nullcontext() if is_right else _raises("rest" if is_at_rest else None):
            loss = self.loss(Micro(loss="main"))
            (loss + block.up.weight.square().sum() if is_at_rest else loss).backward()
        block.fails = None
        for param, grad in grads:  # the sharded model drops such gradients as a whole
            param.grad = grad

    def interrupt(self, moment: int) -> None:
        """Interrupt the sharded model; all gradients are dropped after it.

        If only some ranks are interrupted, at these lines, any error of the others is right.
        """
        interrupter, error = Interrupter(moment), None
        if self.is_sharded:
            try:
                with interrupter.watching():
                    self.loss(Micro(loss="main")).backward()
            except KeyboardInterrupt:
                torch.set_grad_enabled(True)  # Python leaves no `with` between body and exit
            except RuntimeError as raised:
                error = raised
            if not are_all_at(interrupter.place):
                raise OutOfStepError(interrupter.place or "no line") from error
            if error is not None:
                raise error
        else:
            self.number += 1

    def operate(self, case: Case) -> None:
        """Change the model; the next forward is refused, or the remedy comes before it."""
        assert case.surgery is not None
        _, kind, index, is_refused = case.surgery
        new, is_refused = self.model.operate(kind, index), is_refused or kind == "param"
        if not self.is_sharded:
            self.number += is_refused
        elif is_refused:
            with _raises("surgery"):
                self.loss(Micro(loss="main"))
        if kind == "param":
            new.fresh.requires_grad_(False)
            return
        if self.is_sharded:
            fully_shard(new, **_for_world(case.options))
        known = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        fresh = [param for param in new.parameters() if id(param) not in known]
        if fresh:
            self.optimizer.add_param_group({"params": fresh})

    def begin(self, case: Case, number: int) -> None:
        """Change the model, and set attributes of parameters as a schedule does."""
        if case.surgery is not None and case.surgery[0] == number:
            self.operate(case)
        for block in self.model.blocks if case.has_attributes else ():
            block.up.weight.mult = 1.0 + 0.25 * number

    def step(self, *, saves: bool) -> None:
        """Step, perhaps after a save of the optimizer's state, which changes nothing."""
        if saves and self.is_sharded:
            get_optimizer_state_dict(self.model, self.optimizer)
        self.optimizer.step()

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
        named = self.model.named_parameters()
        # Those of units: `outer` has none, and `fresh` came after it and stays frozen.
        params = [p for name, p in named if not name.startswith("outer.") and "fresh" not in name]
        for param in params[:: 2 if is_partial else 1]:
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
    """Run the case of a seed on both models and compare after each step, on every rank.

    Raises:
        OutOfStepError: Ranks were interrupted at different lines: nothing is known then.
    """
    case = draw(seed, features)
    try:
        with poisoned(), warnings.catch_warnings(), without_lost_interrupts():
            warnings.filterwarnings("ignore", "a backward failed before it reached unit")
            failing = [m.fails_at for _, ms, _ in case.steps for m in ms if m.fails == "backward"]
            is_cut = any(m.fails == "interrupt" for _, ms, _ in case.steps for m in ms)
            is_cut = is_cut or not case.has_root  # a backward that fails misses other trees
            if is_cut or any(case.blocks[index].output in HIDING for index in failing):
                # No unit sees that gradients reach such an output, so it fails before the first.
                warnings.filterwarnings("ignore", "a backward has run since the last forward")
            _run_beside_plain(case)
    except BaseException as error:
        error.add_note(f"python -m tests.fuzz_claims --only {seed}\n{case}")
        raise


def _optimizer_of(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5 if case.saves else 0.0)


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
        _Trainee(model, model is sharded, _optimizer_of(model, case), is_same)
        for model in (plain, sharded)
    ]
    for number, (before, micros, zero) in enumerate(case.steps):
        for run in runs:
            run.begin(case, number)
            run.change(before, has_names=has_names)
            for micro in micros:
                run.run(micro)
                run.zero(micro.drops)
                run.change(micro.change, has_names=has_names)
        may_miss_all = micros[-1].inputs and micros[-1].loss == "side"
        if not case.has_root or may_miss_all:  # the last backward has reached some trees, or none
            reduce_pending_gradients(sharded)
        average_gradients(plain.parameters())
        found = unsharded_gradients(sharded)
        for name, param in plain.named_parameters():
            assert_close(found[name], param.grad, f"step {number}: gradient of {name}")
        _operate_at_rest(case.at_rest[number : number + 1], plain, sharded)
        for run in runs:
            run.step(saves=case.saves)
            run.zero(zero)
        values = unsharded_values(sharded)
        for name, param in plain.named_parameters():
            assert_close(values[name], param.detach(), f"step {number}: parameter {name}")


@torch.no_grad()
def _operate_at_rest(steps: list[list[str]], *models: nn.Module) -> None:
    """Run the operations of a step on parameters that have gradients in all models."""
    found = [dict(model.named_parameters()) for model in models]
    for operation in chain(*steps):
        names = [name for name in found[0] if all(each[name].grad is not None for each in found)]
        for params in found if names else ():
            AT_REST[operation]({name: params[name] for name in names})


def run_each_seed(first: int, end: int, features: set[str]) -> None:
    """Run the cases of consecutive seeds, on every rank; raise at the first that is wrong."""
    for seed in range(first, end):
        run_case(seed, features)


def run_seeds(first: int, count: int, features: set[str]) -> None:
    """Run the cases of consecutive seeds on two ranks; one that ends apart without interrupts."""
    seed, end = first, first + count
    while seed < end:
        try:
            run_ranks(2, run_each_seed, seed, end, features, timeout=120)
            return
        except RankError as error:
            if not is_apart(error):
                raise
            (seed,) = {int(each) for each in re.findall(r"fuzz_claims --only (\d+)", str(error))}
        run_ranks(2, run_each_seed, seed, seed + 1, features - {"interrupt"}, timeout=120)
        seed += 1


def is_apart(error: RankError) -> bool:
    """Return whether ranks were interrupted at different lines, and no rank found anything else.

    A rank that waits for an interrupted one ends with it, as in a real job.
    """
    texts = error.errors.values()
    apart, waits = f"{OutOfStepError.__name__}:", "after another rank had failed"
    return any(apart in text for text in texts) and all(apart in t or waits in t for t in texts)


def run_apart(world_size: int, seed: int, features: set[str]) -> str:
    """Run the case of a seed; return "right", "refused" or "apart", raise if it is none.

    A case may be refused in which an output hides its tensors, or losses are kept beside it; and
    one in which ranks use other parameters inside reentrant checkpoints or gradients of gradients:
    what tells there that values have been read for the last time comes elsewhere. The same is true
    of one with buckets in which a backward fails or is refused: some ranks alone may have reduced
    a bucket; and of units inside a checkpointed block that is called twice, where nothing tells
    which of its calls runs again.
    """
    case = draw(seed, features)
    micros = [micro for _, micros, _ in case.steps for micro in micros]
    is_local = any(block.checkpoint == "True" for block in case.blocks) or any(
        micro.penalty or (case.has_buckets and micro.fails in ("backward", "rest"))
        for micro in micros
    )
    hides = any(block.output in HIDING or block.side is not None for block in case.blocks)
    try:
        # By its own name, which the workers import; this module may be `__main__`.
        worker = importlib.import_module("tests.fuzz_claims").run_case
        run_ranks(world_size, worker, seed, features)
    except RankError as error:
        if is_apart(error):
            return "apart"
        runs_twice = any(each.checkpoint == "False" and each.repeats > 1 for each in case.blocks)
        may_be_refused = (case.is_uneven and is_local) or hides or runs_twice
        # A loss kept aside may depend on none of the `inputs`.
        is_missed = hides and any(micro.inputs for micro in micros)
        has_regions = any(block.checkpoint is not None for block in case.blocks)
        # One rank alone may get a gradient of a unit with a hidden output, or run a region again
        # that reads a unit: it waits for the others, which may be in the plain model's reduction.
        refusals = [AT_REST_IN_FLAT_FORM, *[UNREACHED] * is_missed, *[IN_AND_OUT] * has_regions]
        refusals += [ALONE, "/third_party/gloo/"] * ((hides or is_local) and case.is_uneven)
        if not (may_be_refused and is_refused(error, world_size, *refusals)):
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
    parser.add_argument("--world-size", type=int, help="by the seed, if it is not given")
    args = parser.parse_args()
    features = set(args.features.split(",")) & set(FEATURES)
    end = time.monotonic() + args.seconds
    seed, failed, results = args.only or args.seed, [], Counter[str]()
    sys.stdout.write(f"from seed {seed}, features {sorted(features)}\n")
    while True:
        try:
            size = args.world_size or (1 if seed % 4 == 0 else 2)
            results[run_apart(size, seed, features)] += 1
        except RankError as error:
            failed.append(seed)
            sys.stdout.write(f"\nseed {seed}: {error}\n")
        seed += 1
        if args.only is not None or time.monotonic() > end:
            break
    shut_down_workers()
    sys.stdout.write(f"{dict(results)}, {len(failed)} failed: {failed}\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(run_fuzz())
