"""Optimizers of packages of the index, each with the call that a user would make.

Nothing else needs the packages, and what is not installed is left out. In an environment of its
own, beside torch 2.13 as it is:

    pip install pytorch-optimizer==4.1.0 torch-optimizer==0.3.0 heavyball==3.2.1 \
        schedulefree==1.4.1 prodigyopt==1.1.2 dadaptation==3.2 lion-pytorch==0.2.5 \
        adam-mini==1.1.1 torch-optimi==0.3.3 came-pytorch==0.1.3 adan-pytorch==0.1.0 madgrad==1.3 \
        adabelief-pytorch==0.2.1 torchao==0.18.0 bitsandbytes==0.50.2 transformers==5.24.0 \
        grokadamw==0.1.2
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

Build = Callable[[nn.Module], Any]

# How a step is taken: after a backward; with a closure that runs it; both; with a closure that
# returns the loss; after a backward with create_graph.
STEP, CLOSURE, BOTH, LOSS, GRAPH = "step", "closure", "both", "loss", "graph"
_SHORT, _LONG = 6, 20  # steps; the long ones adapt their step size, and move late
_ADAPTIVE = ("prodigy", "dadapt", "adamg", "avagrad", "dog")


@dataclass(frozen=True)
class Case:
    """An optimizer and how to use it."""

    name: str  # the package's module first
    build: Build
    kind: str = STEP
    draws: bool = False  # random numbers for each parameter that it sees, in the step

    @property
    def module(self) -> str:
        return self.name.partition(".")[0]

    @property
    def num_steps(self) -> int:
        return _LONG if any(each in self.name.lower() for each in _ADAPTIVE) else _SHORT


def all_cases() -> list[Case]:
    """Return the optimizers of all packages that are installed."""
    found: list[Case] = []
    for make in (_torch, _pytorch_optimizer, _schedule_free, _small, _optimi, _torch_optimizer):
        found += _installed(make)
    for make in (_torchao, _bitsandbytes, _transformers, _heavyball):
        found += _installed(make)
    return found


def _installed(make: Callable[[], Iterator[Case]]) -> list[Case]:
    found: list[Case] = []
    try:
        found.extend(make())
    except ImportError as error:
        print(f"left out: {error}", flush=True)
    return found


def _parameters_of(cls: Any) -> Any:
    return inspect.signature(cls.__init__).parameters


def _with_rate(cls: Any, **options: Any) -> Build:
    """Return a build with a rate of 0.01, where the class takes one."""
    options = {"lr": 1e-2, **options} if "lr" in _parameters_of(cls) else options
    return lambda model: cls(model.parameters(), **options)


def _torch() -> Iterator[Case]:
    for name in (
        *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "RMSprop", "Adamax", "ASGD"),
        *("Adadelta", "Rprop", "Adafactor"),
    ):
        yield Case(f"torch.{name}", _with_rate(getattr(torch.optim, name)))
    lbfgs = torch.optim.LBFGS
    yield Case("torch.LBFGS", lambda model: lbfgs(model.parameters(), lr=0.5), CLOSURE)
    search = partial(lbfgs, max_iter=4, line_search_fn="strong_wolfe")
    yield Case("torch.LBFGS (line search)", lambda model: search(model.parameters()), CLOSURE)
    yield Case("torch.Muon", lambda model: torch.optim.Muon(_matrices(model), lr=1e-2))


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.ndim == 2]


_PO = "pytorch_optimizer"
_PO_KINDS = {
    **dict.fromkeys(("adahessian", "sophiah"), GRAPH),
    **{"alig": LOSS, "lbfgs": CLOSURE, "bsam": BOTH},
}
_PO_MUONS = frozenset({"muon", "adamuon", "adago", "distributedmuon", "muonclip", "normuon"})
_PO_DRAWS = frozenset({"kron", "magma", "bsam"})


def _pytorch_optimizer() -> Iterator[Case]:
    package = importlib.import_module(_PO)
    for found in package.get_supported_optimizers():
        name = found if isinstance(found, str) else found.__name__
        low = name.lower()
        cls = package.load_optimizer(name)
        kind = _PO_KINDS.get(low, STEP)
        yield Case(f"{_PO}.{low}", partial(_build_po, cls, low), kind, draws=low in _PO_DRAWS)
    yield Case(f"{_PO}.Lookahead", lambda model: package.Lookahead(_adamw(model)))
    yield Case(f"{_PO}.PCGrad", lambda model: package.PCGrad(_adamw(model)))
    yield Case(f"{_PO}.SAM", lambda model: package.SAM(model.parameters(), AdamW, lr=1e-2), BOTH)


def _adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=1e-2)


def _build_po(cls: Any, name: str, model: nn.Module) -> Any:
    parameters = _parameters_of(cls)
    if name in {"spectralsphere", "lorarite"}:
        return cls(_matrices(model), lr=1e-2)
    if name in _PO_MUONS or "use_muon" in str(parameters):
        large = [param for param in model.parameters() if param.ndim >= 2]
        small = [param for param in model.parameters() if param.ndim < 2]
        groups = [{"params": large, "use_muon": True}, {"params": small, "use_muon": False}]
        return cls(groups, lr=1e-2)
    options: dict[str, Any] = {"lr": 1e-2} if "lr" in parameters else {}
    for option, value in (("num_iterations", _SHORT), ("num_data", 42), ("model", None)):
        if option in parameters and parameters[option].default is inspect.Parameter.empty:
            if option == "model":
                return cls(model, **options)
            options[option] = value
    return cls(model.parameters(), **options)


def _schedule_free() -> Iterator[Case]:
    package = importlib.import_module("schedulefree")
    for name in ("AdamWScheduleFree", "SGDScheduleFree", "AdamWScheduleFreeReference"):
        yield Case(f"schedulefree.{name}", _with_rate(getattr(package, name)))
    radam = package.RAdamScheduleFree
    yield Case("schedulefree.RAdamScheduleFree", lambda model: radam(model.parameters()))
    yield Case(
        "schedulefree.ScheduleFreeWrapper",
        lambda model: package.ScheduleFreeWrapper(
            AdamW(model.parameters(), lr=1e-2, weight_decay=0.0),
            momentum=0.9,
            weight_decay_at_y=0.0,
        ),
    )


def _small() -> Iterator[Case]:
    """Packages of few optimizers."""
    for module, name, options in _SMALL:
        yield from _installed(partial(_one_of, module, name, options))
    yield from _installed(_adam_mini)


_SMALL: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("prodigyopt", "Prodigy", {"lr": 1.0}),
    ("prodigyopt", "Prodigy", {"lr": 1.0, "slice_p": 11}),
    *(("dadaptation", f"DAdapt{each}", {"lr": 1.0}) for each in ("Adam", "SGD", "Lion", "AdaGrad")),
    ("dadaptation", "DAdaptAdan", {"lr": 1.0}),
    ("lion_pytorch", "Lion", {"lr": 1e-3}),
    ("came_pytorch", "CAME", {"betas": (0.9, 0.999, 0.9999)}),
    ("adan_pytorch", "Adan", {}),
    ("madgrad", "MADGRAD", {}),
    ("madgrad", "MirrorMADGRAD", {}),
    ("adabelief_pytorch", "AdaBelief", {"print_change_log": False}),
    ("grokadamw", "GrokAdamW", {}),
)


def _one_of(module: str, name: str, options: dict[str, Any]) -> Iterator[Case]:
    cls = getattr(importlib.import_module(module), name)
    label = "(slice_p)" if "slice_p" in options else ""
    yield Case(f"{module}.{name}{label}", _with_rate(cls, **options))


def _adam_mini() -> Iterator[Case]:
    cls = importlib.import_module("adam_mini").Adam_mini
    yield Case(
        "adam_mini.Adam_mini",
        lambda model: cls(named_parameters=model.named_parameters(), lr=1e-2, dim=16, n_heads=4),
    )


def _optimi() -> Iterator[Case]:
    package = importlib.import_module("optimi")
    for name in ("Adam", "AdamW", "Adan", "Lion", "RAdam", "Ranger", "SGD", "StableAdamW"):
        yield Case(f"optimi.{name}", _with_rate(getattr(package, name)))

    def release(model: nn.Module) -> Any:
        optimizer = package.AdamW(model.parameters(), lr=1e-2, gradient_release=True)
        package.prepare_for_gradient_release(model, optimizer)
        return optimizer

    yield Case("optimi.AdamW(gradient_release)", release)


def _torch_optimizer() -> Iterator[Case]:
    package = importlib.import_module("torch_optimizer")
    for name in (
        *("A2GradExp", "A2GradInc", "A2GradUni", "AccSGD", "AdaBelief", "AdaBound", "Adahessian"),
        *("AdaMod", "AdamP", "AggMo", "Apollo", "DiffGrad", "Lamb", "LARS", "MADGRAD", "NovoGrad"),
        *("PID", "QHAdam", "QHM", "RAdam", "Ranger", "RangerQH", "RangerVA", "SGDP", "SGDW"),
        *("SWATS", "Shampoo", "Yogi", "Adafactor"),
    ):
        kind = GRAPH if name == "Adahessian" else STEP
        yield Case(f"torch_optimizer.{name}", _with_rate(getattr(package, name)), kind)
    yield Case("torch_optimizer.Lookahead", lambda model: package.Lookahead(_adamw(model)))


def _torchao() -> Iterator[Case]:
    package = importlib.import_module("torchao.optim")
    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8", "_AdamW"):
        yield Case(f"torchao.{name}", _with_rate(getattr(package, name)))
    yield Case("torchao.AdamW8bit(block 64)", _with_rate(package.AdamW8bit, block_size=64))


def _bitsandbytes() -> Iterator[Case]:
    package = importlib.import_module("bitsandbytes").optim
    for name in ("AdamW", "AdamW8bit", "Lion8bit", "SGD", "PagedAdamW"):
        options = {"momentum": 0.9} if name == "SGD" else {}
        yield Case(f"bitsandbytes.{name}", _with_rate(getattr(package, name), **options))


def _transformers() -> Iterator[Case]:
    cls = importlib.import_module("transformers.optimization").Adafactor
    build = _with_rate(cls, relative_step=False, scale_parameter=True)
    yield Case("transformers.Adafactor", build)


def _heavyball() -> Iterator[Case]:
    package = importlib.import_module("heavyball")
    # Its compiled functions take minutes; what they compute is the same without.
    package.utils.compile_mode = package.utils.compile_mode_recommended_to_none = None
    for name in package.__all__:
        cls = getattr(package, name)
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            continue
        if name == "SplitOpt":
            yield Case("heavyball.SplitOpt", partial(_split, package))
        elif name == "SAMWrapper":
            build: Build = partial(_wrapped, cls)
            yield Case("heavyball.SAMWrapper", build, CLOSURE)
        else:
            yield Case(f"heavyball.{name}", _with_rate(cls))


def _split(package: Any, model: nn.Module) -> Any:
    large = [param for param in model.parameters() if param.ndim == 2]
    small = [param for param in model.parameters() if param.ndim != 2]
    groups = [
        {"params": large, "optimizer": package.Muon, "lr": 1e-2},
        {"params": small, "optimizer": package.AdamW, "lr": 1e-2},
    ]
    return package.SplitOpt(groups)


def _wrapped(cls: Any, model: nn.Module) -> Any:
    return cls(model.parameters())
