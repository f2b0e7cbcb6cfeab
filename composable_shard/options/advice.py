"""What to do instead: one table of calls that can't work here, each with its remedy.

Errors take their last sentences from it, and `docs/troubleshooting.md` is made of it.

[Note: Who called]
An op knows its operands, and not what a user has called: a layer outside its unit and an optimizer
of whole matrices both end in a transpose. The frames of the call tell. They are read when an error
is raised, at no other time.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer

_PACKAGE = __name__.partition(".")[0]
_LAYERS = "torch.nn.modules"
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")

_IN_TRAINING = (
    "To train through it call unshard(model, recurse=True) before it, and "
    "reshard(model, recurse=True) after the backward"
)


def _never(frame: FrameType) -> str | None:
    return None


@dataclass(frozen=True)
class Advice:
    """A call that can't work on sharded parameters, and what to do."""

    called: str  # the call, as the page of the documentation says it
    problem: str  # the beginning of the error's advice; `{name}` is what was called
    remedy: str
    # Returns the name of what a frame belongs to, None if it is no such call
    find: Callable[[FrameType], str | None] = _never


def _owner_of(frame: FrameType) -> object:
    """Return what a method's frame was called on."""
    names = frame.f_code.co_varnames
    return frame.f_locals.get("self") if names[:1] == ("self",) else None


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _wrapper(frame: FrameType) -> str | None:
    """Find methods of classes of these names, or of classes derived from them."""
    owner = type(_owner_of(frame))
    return owner.__name__ if any(base.__name__ in _WRAPPERS for base in owner.__mro__) else None


def _instance_of(kind: type) -> Callable[[FrameType], str | None]:
    """Find methods of a class."""

    def find(frame: FrameType) -> str | None:
        owner = _owner_of(frame)
        return type(owner).__name__ if isinstance(owner, kind) else None

    return find


def _safetensors(frame: FrameType) -> str | None:
    """Find functions of that package."""
    package = _module_of(frame).partition(".")[0]
    return package if package == "safetensors" else None


def _layer(frame: FrameType) -> str | None:
    """Find the forward of a module."""
    owner = _owner_of(frame)
    if not isinstance(owner, nn.Module) or not frame.f_code.co_name.startswith("forward"):
        return None
    return f"{type(owner).__name__}.forward()"


def _method(frame: FrameType) -> str | None:
    """Find another method of a module, which is not torch's machinery."""
    owner, name = _owner_of(frame), frame.f_code.co_name
    if not isinstance(owner, nn.Module) or name.startswith("forward"):
        return None
    is_torch = _module_of(frame).startswith(_LAYERS)
    return None if is_torch else f"{type(owner).__name__}.{name}()"


LAYER = Advice(
    "a layer outside its unit: `model.head(x)`, a weight in a loss",
    "{name} ran outside the forward of its unit, which alone gathers its parameters.",
    "Call it in the forward of a sharded module around it, or shard it as a unit of its own. "
    f"{_IN_TRAINING}; without gradients, call it inside unshard_params(model).",
    _layer,
)
METHOD = Advice(
    "a method other than forward: `model.encode(x)`",
    "{name} ran outside of a forward, and only the forward of a sharded module gathers parameters.",
    "Call register_forward_method(module, name) once, on the sharded module whose method it is, or "
    f"let forward call it. {_IN_TRAINING}; without gradients, call it inside "
    "unshard_params(model).",
    _method,
)
ANYTHING = Advice(
    "any other op that needs a whole parameter: `p.t()`, `p[0]`, `p @ x`, `p.cumsum(0)`",
    "",
    "Read and edit the module's full parameters inside unshard_params(module), or use "
    f"p.full_tensor() for one whole tensor, on all ranks. {_IN_TRAINING}.",
)
HIDDEN = Advice(
    "the same with `use_orig_params=False`",
    "",
    "Read and edit the module's full parameters inside unshard_params(module), or call "
    f"register_orig_params(module) to have shards of them at rest. {_IN_TRAINING}.",
)
FULL_SIZE = Advice(
    "a sharded parameter with a tensor of its whole size, such as optimizer state made before: "
    "`p + full`",
    "",
    "Optimizer state made before sharding: call shard_optimizer_state(optimizer). Otherwise use "
    "p.full_tensor().",
)
VALUES = Advice(
    "`p.numpy()`, `p.tolist()`, `numpy.asarray(p)`, a plot of a parameter",
    "Each rank holds only a flat range of it.",
    "Take p.full_tensor() on all ranks, and use what it returns on any of them.",
)
PLACEMENTS = Advice(
    "`p.placements`, `p.device_mesh`: a loader that calls `distribute_tensor`",
    "Parameters at rest are no DTensors: a rank has a flat range, which no placement describes.",
    "To load values give whole tensors, or DTensors of any placements, to model.load_state_dict or "
    "set_model_state_dict, on all ranks: both cut them. get_param_ranges(model) tells the ranges.",
)
SAVE = Advice(
    "`torch.save` of a state dict or model",
    "torch.save would write the shards of this rank alone, a part of each parameter.",
    "For the whole model call get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True)) on all ranks, or get_optimizer_state_dict, "
    "and save what rank 0 gets; p.full_tensor() makes one shard whole, which is no DTensor. To "
    "resume a run use save_checkpoint.",
)
NOTEBOOK = Advice(
    "a notebook, or a script without torchrun",
    "",
    "fully_shard makes a process group of one rank and logs one line. For several ranks start a "
    "script with torchrun. Where the environment says that there are several "
    "processes, and nobody has called init_process_group, fully_shard raises.",
)
WRAPPED = Advice(
    "DistributedDataParallel or FSDP around a sharded model; accelerate, Trainer and Lightning, "
    "which put it there",
    "{name} was put around a sharded model, which reduces its gradients itself.",
    "Use the model as it is. Leave it out of accelerator.prepare(...); with a Trainer override the "
    "method that wraps the model, or train in a loop of your own.",
    _wrapper,
)
LINE_SEARCH = Advice(
    "`torch.optim.LBFGS`",
    "{name} joins all parameters into one vector.",
    "Use an elementwise optimizer (Adam, SGD), or strategy=ShardingStrategy.NO_SHARD, whose "
    "parameters are whole on every rank.",
    _instance_of(LBFGS),
)
MATRICES = Advice(
    "an optimizer of whole matrices (Muon, Adafactor, Shampoo)",
    "{name} needs whole matrices.",
    'Pass granularity="param" to fully_shard for these parameters: one rank then holds all of each '
    "of them, and steps it.",
    _instance_of(Optimizer),
)
SAFETENSORS = Advice(
    "`safetensors.torch.save_file(model.state_dict(), ...)`, `model.save_pretrained(...)`",
    "safetensors writes the tensors of one rank.",
    "Call save_safetensors(model, directory) on all ranks: it writes what from_pretrained reads. "
    "For a file of another name, and for save_pretrained(..., state_dict=...), take what rank 0 "
    "gets of get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).",
    _safetensors,
)
FUNCTIONS = Advice(
    "FSDP's methods: `model.unshard()`, `model.no_sync()`, `model.clip_grad_norm_(1.0)`",
    "",
    "The class of a module is not changed, so it has no such methods: they are functions here that "
    "take the module first, `unshard(model)`, `no_sync(model)`, `clip_grad_norm_(model, 1.0)`.",
)

# What the page lists, and, of these, what frames tell; the first one that fits.
CALLS = (
    *(LAYER, METHOD, ANYTHING, HIDDEN, FULL_SIZE, VALUES, PLACEMENTS, SAVE, SAFETENSORS),
    *(WRAPPED, LINE_SEARCH, MATRICES, FUNCTIONS, NOTEBOOK),
)
_FOUND = (SAFETENSORS, WRAPPED, LINE_SEARCH, MATRICES, METHOD)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if _module_of(frame).partition(".")[0] != _PACKAGE:
            yield frame
        frame = frame.f_back


def advise(default: Advice = ANYTHING, *, among: Sequence[Advice] = _FOUND) -> str:
    """Return what to do about an op that the running call has reached, see [Note: Who called].

    Args:
        default: What to say of other calls.
        among: Calls to look for, beside layers.
    """
    layer: str | None = None
    for frame in _callers(sys._getframe(1)):
        for row in among:
            name = row.find(frame)
            # A layer in an optimizer's closure, or in a loop around it, is the layer's matter.
            if name is not None and (layer is None or row is METHOD):
                return f"{row.problem.format(name=name)} {row.remedy}"
        layer = layer or LAYER.find(frame)
    if layer is not None:
        return f"{LAYER.problem.format(name=layer)} {LAYER.remedy}"
    return f"{default.problem} {default.remedy}".strip()


def check_no_partial_save() -> None:
    """Raise if a shard is pickled by torch.save: other ranks' parts would not be in the file.

    FSDP2's scripts make DTensors whole before, and leave a FlatShard as it is.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _module_of(frame) == "torch.serialization" and frame.f_code.co_name == "save":
            raise RuntimeError(f"{SAVE.problem} {SAVE.remedy}")
        frame = frame.f_back


# Of functions and classes here: arguments that other libraries' have, and what to pass or call.
KEYWORDS: Mapping[str, Mapping[str, str]] = {
    "fully_shard": {
        "process_group": "Pass mesh=, a DeviceMesh: DeviceMesh.from_group makes one of a group.",
        "device_mesh": "Pass mesh=.",
        "sharding_strategy": "Pass strategy=, a composable_shard.ShardingStrategy. HYBRID_SHARD is "
        "a 2-D mesh (replicate, shard).",
        "cpu_offload": "Pass offload_policy=OffloadPolicy(params=True).",
        "auto_wrap_policy": "Call shard_model(model, rules), which takes such policies as rules.",
        "mixed_precision": "Pass mp_policy=, a composable_shard.MixedPrecisionPolicy.",
        "ignored_modules": "Pass ignored_params=, the set of their parameters.",
        "ignored_states": "Pass ignored_params=.",
        "param_init_fn": "Build the model on the meta device, shard it, call "
        "model.to_empty(device=...), and initialise as usual.",
        "device_id": "Move the model to its device before, or build it on the meta device.",
        "backward_prefetch": "Leave it out: backwards gather ahead. set_backward_prefetch chooses "
        "what.",
        "forward_prefetch": "Leave it out: forwards gather ahead, up to prefetch_nbytes. "
        "set_forward_prefetch chooses what.",
        "limit_all_gathers": "Leave it out: memory is bounded to the unit that computes and those "
        "gathered ahead.",
        "shard_placement_fn": "Pass granularity=: parameters are cut anywhere in a flat range, "
        "between rows, between blocks, or not at all.",
        "dp_mesh_dims": "Pass mesh=, with these axes of the mesh alone: mesh['dp'].",
        "find_unused_parameters": "Leave it out: a parameter that no rank used gets no gradient.",
        "gradient_as_bucket_view": "Leave it out: gradients are views of one buffer.",
        "static_graph": "Leave it out.",
        "device_ids": "Move the model to its device before.",
    },
    "MixedPrecisionPolicy": {
        "keep_low_precision_grads": "Leave it out: gradients have the dtype of the parameters at "
        "rest. main_dtype= is that of the optimizer.",
        "cast_root_forward_inputs": "Pass cast_forward_inputs= to the outermost unit.",
        "_module_classes_to_ignore": "Pass keep_fp32_classes=.",
    },
    "OffloadPolicy": {
        "offload_params": "Pass params=True.",
    },
    "StateDictOptions": {
        "dsd_fqn_modifiers": "Rename the keys of the dict that is returned.",
        "flatten_optimizer_state_dict": "Nested dicts fit torch.distributed.checkpoint too.",
    },
    "clip_grad_norm_": {
        "foreach": "Leave it out.",
    },
}

# Classes of torch that have a counterpart here: the argument, and what to write.
CLASSES: Mapping[str, str] = {
    "torch.distributed.fsdp.MixedPrecisionPolicy": "Write composable_shard.MixedPrecisionPolicy: "
    "its fields param_dtype, reduce_dtype, output_dtype and cast_forward_inputs mean the same.",
    "torch.distributed.fsdp.MixedPrecision": "Write composable_shard.MixedPrecisionPolicy: its "
    "fields param_dtype, reduce_dtype, buffer_dtype and cast_forward_inputs mean the same.",
    "torch.distributed.fsdp.CPUOffloadPolicy": "Write "
    "composable_shard.OffloadPolicy(params=True); pin_memory means the same.",
    "torch.distributed.fsdp.OffloadPolicy": "Leave the argument out.",
    "torch.distributed.fsdp.CPUOffload": "Write composable_shard.OffloadPolicy(params=True).",
    "torch.distributed.fsdp.ShardingStrategy": "Write composable_shard.ShardingStrategy: "
    "FULL_SHARD and NO_SHARD mean the same, SHARD_GRAD_OP is FULL_SHARD with "
    "reshard_after_forward=False, HYBRID_SHARD is FULL_SHARD over a 2-D mesh (replicate, shard).",
    "torch.device": "Write OffloadPolicy(params=True) to keep parameters on the host.",
    "torch.dtype": "Write composable_shard.MixedPrecisionPolicy(param_dtype=...).",
}


def unexpected(name: str, argument: object, known: Sequence[str]) -> str:
    """Return the text of an error about an argument that a function or class does not have."""
    advice = KEYWORDS.get(name, {}).get(str(argument))
    if advice is None:
        close = difflib.get_close_matches(str(argument), known, 1)
        advice = f"Did you mean {close[0]!r}?" if close else f"It has {', '.join(known)}."
    return f"{name} has no option {argument!r}. {advice}"


def check_no_others(function: Callable[..., Any], others: Mapping[str, object]) -> None:
    """Check that there are no other arguments than those of a function."""
    for argument in others:
        parameters = inspect.signature(function).parameters.values()
        known = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD][1:]
        raise TypeError(unexpected(function.__name__, argument, known))


def expected(argument: str, kind: type, value: object) -> str:
    """Return the text of an error about an argument of another class."""
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    found = type(value)
    package = found.__module__.partition("._")[0].removesuffix(".api")
    title = f"{package}.{found.__qualname__}"
    advice = CLASSES.get(title)
    if advice is None:
        return f"expected {argument} to be {article} {kind.__name__}, got {value!r}"
    return (
        f"expected {argument} to be a composable_shard.{kind.__name__}, got "
        f"{package}'s {value!r}. {advice}"
    )
