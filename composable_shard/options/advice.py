"""The remedies in error messages; `docs/troubleshooting.md` lists more calls."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence

from torch import nn

# By the op on a sharded parameter, because an op does not know its caller.
_IN_UNIT = (
    "Only a call of its unit, model(x) and not model.forward(x), gathers a parameter: call layers "
    "in its forward, and other methods after register_forward_method(module, name). Elsewhere read "
    "and edit full parameters inside unshard_params(module), or"
)
_IN_TRAINING = (
    "To train through it call unshard(model, recurse=True) before it, and "
    "reshard(model, recurse=True) after the backward."
)
_RECORDED = (
    "Autograd records it, and only the forward of its unit gives a parameter a gradient. Call the "
    "layer in that forward (other methods after register_forward_method(module, name)), or call "
    "unshard(model, recurse=True) before it and reshard(model, recurse=True) after the backward. "
    "Under torch.no_grad()"
)
IN_GRAPH = f"{_RECORDED} it runs on gathered values. See docs/shard_operations.md."
OWNED = "Run it on that rank alone, on p.to_local(), or on all ranks on p.full_tensor()."
OWNED_IN_GRAPH = f"{_RECORDED} it runs on that rank's p.to_local(), or on p.full_tensor()."
OWNED_IN_STEP = (
    "This step runs it on parameters of other ranks too, or lets autograd record it. Shard the "
    "model in the default granularity for this optimizer."
)
WHOLE_NEEDED = (
    "Run it on p.full_tensor(), which all ranks must call, or inside unshard_params(module). See "
    "docs/shard_operations.md."
)
KEPT = (
    "It was read through an object from before the forward (in a tuple, a closure, another module) "
    "while its unit shows the full parameter. Read it from its module in the forward, as in "
    "self.layer.weight, or keep it in a list of a module of the unit before fully_shard."
)
AT_REST = (
    "Only the forward of its unit reduces its gradient, which would be that of this rank alone: "
    "use the parameter there, or in a method after register_forward_method(module, name). "
    f"{_IN_TRAINING} The gradient of a penalty on weights alone can be added after a backward: "
    "p.grad.add_(p.detach(), alpha=...)."
)
HIDDEN = f"{_IN_UNIT} call register_orig_params(module) to have shards at rest. {_IN_TRAINING}"
VALUES = (
    "Each rank holds only a flat range of it. Take p.detach().full_tensor() on all ranks, and use "
    "what it returns on any of them. To write safetensors call save_safetensors(model, directory) "
    "on all ranks."
)
LOAD_FILE = (
    "safetensors.torch.load_model reads the memory of tensors, of which each rank holds a flat "
    "range. Call load_safetensors(model, path) on all ranks, with the path of the file or of its "
    "directory."
)
PLACEMENTS = (
    "Parameters at rest are no DTensors: a rank has a flat range, which no placement describes. "
    "To load values give whole tensors, or DTensors of any placements, to model.load_state_dict or "
    "set_model_state_dict, on all ranks: both cut them."
)
SAVE = (
    "torch.save would write the shards of this rank alone, a part of each parameter. "
    "For the whole model call get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True)) on all ranks, or get_optimizer_state_dict, "
    "and save what rank 0 gets; p.full_tensor() makes one shard whole, which is no DTensor. To "
    "resume a run use save_checkpoint. Torch has opened the file already: what it held is lost."
)


def describe_prefix(missing: Sequence[str], unexpected: Collection[str]) -> str:
    """Return what to do if unexpected names are the missing ones behind a prefix; else nothing.

    Example: missing `a` and `b`, with `module.a` and `module.b` unexpected.
    """
    for name in unexpected if missing else ():
        prefix = name.removesuffix(missing[0])
        if prefix != name and all(prefix + each in unexpected for each in missing):
            from_ddp = " (DistributedDataParallel's)" if prefix == "module." else ""
            return (
                f"The given names begin with '{prefix}'{from_ddp}, and the model's do not: pass "
                f"{{name.removeprefix('{prefix}'): value for name, value in state_dict.items()}}."
            )
    return ""


def check_options(name: str, given: Iterable[object], known: Collection[str]) -> None:
    """Check that a function has options of these names."""
    for argument in given:
        if argument not in known:
            raise ValueError(
                f"{name} has no option {argument!r}. It has {', '.join(known)}. "
                "docs/troubleshooting.md says what to pass for options of other libraries."
            )


def check_path_order(model: object, path: object, call: str) -> None:
    """Check that a model and a path are not swapped.

    Raises:
        TypeError: With the right call.
    """
    if isinstance(path, nn.Module) or isinstance(model, str | os.PathLike):
        raise TypeError(f"the model and the directory are swapped. Write {call}.")


def expected(argument: str, kind: type, value: object) -> str:
    """Return the text of an error about an argument of another class."""
    found = type(value)
    return (
        f"expected {argument} to be a composable_shard.{kind.__name__}, got {value!r}, a "
        f"{found.__module__}.{found.__qualname__}. docs/troubleshooting.md says what to write for "
        "classes of torch."
    )
