"""What errors say to do instead; `docs/troubleshooting.md` lists more calls."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

# By what was asked of a sharded parameter: an op does not know who has called it.
_IN_UNIT = (
    "Only the forward of its unit gathers a parameter: call layers in it, and other methods after "
    "register_forward_method(module, name). Elsewhere read and edit full parameters inside "
    "unshard_params(module), or"
)
_IN_TRAINING = (
    "To train through it call unshard(model, recurse=True) before it, and "
    "reshard(model, recurse=True) after the backward."
)
WHOLE_NEEDED = (
    f"{_IN_UNIT} take p.full_tensor() on all ranks. {_IN_TRAINING} An optimizer of whole matrices "
    'needs granularity="param", or strategy=ShardingStrategy.NO_SHARD. A sharded model needs no '
    "DistributedDataParallel around it. More calls: docs/troubleshooting.md."
)
HIDDEN = f"{_IN_UNIT} call register_orig_params(module) to have shards at rest. {_IN_TRAINING}"
FULL_SIZE = (
    "Change whole values and gradients inside unshard_params(module, with_grads=True), or make the "
    "other tensor like the parameter, as torch.zeros_like(p) does. For the state that an optimizer "
    f"made before sharding call shard_optimizer_state(optimizer). {WHOLE_NEEDED}"
)
INTO_PLAIN = (
    "To load a model that is not sharded, give it get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True)); for one tensor use p.full_tensor(); both on "
    "all ranks. For the state that an optimizer made before sharding call "
    "shard_optimizer_state(optimizer)."
)
VALUES = (
    "Each rank holds only a flat range of it. Take p.full_tensor() on all ranks, and use what it "
    "returns on any of them. To write safetensors call save_safetensors(model, directory) on all "
    "ranks."
)
PLACEMENTS = (
    "Parameters at rest are no DTensors: a rank has a flat range, which no placement describes. "
    "To load values give whole tensors, or DTensors of any placements, to model.load_state_dict or "
    "set_model_state_dict, on all ranks: both cut them. get_param_ranges(model) tells the ranges."
)
SAVE = (
    "torch.save would write the shards of this rank alone, a part of each parameter. "
    "For the whole model call get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True)) on all ranks, or get_optimizer_state_dict, "
    "and save what rank 0 gets; p.full_tensor() makes one shard whole, which is no DTensor. To "
    "resume a run use save_checkpoint."
)

# Of functions and classes here: arguments that other libraries' have, and what to pass or call.
KEYWORDS: Mapping[str, Mapping[str, str]] = {
    "fully_shard": {
        "process_group": "Pass mesh=, a DeviceMesh: DeviceMesh.from_group makes one of a group.",
        "device_mesh": "Pass mesh=.",
        "sharding_strategy": "Pass strategy=, a composable_shard.ShardingStrategy. HYBRID_SHARD is "
        "a 2-D mesh (replicate, shard).",
        "cpu_offload": "Pass offload_policy=OffloadPolicy(params=True).",
        "auto_wrap_policy": "Call shard_model(model, by_class(Layer)), or with by_size(min_numel).",
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
        "keep_submodule_prefixes": "Call the function with the submodule, where names begin.",
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
# And what stands for True, by the class that was expected.
SWITCHES: Mapping[str, str] = {
    "OffloadPolicy": "Write OffloadPolicy(params=True) to keep parameters on the host.",
    "MixedPrecisionPolicy": "Write MixedPrecisionPolicy(param_dtype=torch.bfloat16), or another "
    "dtype.",
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


def check_path_order(model: object, path: object, call: str) -> None:
    """Check that a model and a path are not given in the other order.

    Raises:
        TypeError: With the right call.
    """
    if isinstance(path, nn.Module) or isinstance(model, str | os.PathLike):
        raise TypeError(f"expected the model and the directory in the other order. Write {call}.")


def expected(argument: str, kind: type, value: object) -> str:
    """Return the text of an error about an argument of another class."""
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    found = type(value)
    package = found.__module__.partition("._")[0].removesuffix(".api")
    title = f"{package}.{found.__qualname__}"
    advice = CLASSES.get(title)
    if advice is None:
        switch = SWITCHES.get(kind.__name__) if value is True else None
        remedy = "" if switch is None else f". {switch}"
        return f"expected {argument} to be {article} {kind.__name__}, got {value!r}{remedy}"
    return (
        f"expected {argument} to be a composable_shard.{kind.__name__}, got "
        f"{package}'s {value!r}. {advice}"
    )
