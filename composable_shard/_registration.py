"""Which form of its parameters a unit's modules show: the sharded or the unsharded one."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from composable_shard._flat_shard import FlatShard
from composable_shard._shard_spec import ParamLabel, ShardSpec
from composable_shard._storage import Slot

__all__ = ["ParamEntry", "Registration"]


@dataclass
class ParamEntry:
    """One managed parameter: the object users hold, and the one modules compute with."""

    sharded: FlatShard  # the original Parameter object
    label: ParamLabel
    slots: list[Slot]  # every place that shows it; several where modules are tied
    spec: ShardSpec
    # spec.shape, a view of the unsharded buffer; printing it without storage would crash
    unsharded: nn.Parameter | None = field(default=None, repr=False)
    shard_view: Tensor | None = None  # (spec's local numel,) view of the local shard
    runs_hooks: bool = False  # `unsharded` runs the hooks that users registered on `sharded`


class Registration:
    """The parameters of a handle, and the places in modules that show them."""

    entries: list[ParamEntry]
    is_registered_unsharded: bool
    _slots: list[tuple[Any, Any, Tensor, Tensor]]  # container, key, sharded, unsharded

    @property
    def unsharded_params(self) -> list[nn.Parameter]:
        """The parameters that modules compute with, each of its logical shape."""
        return [entry.unsharded for entry in self.entries if entry.unsharded is not None]

    def index_slots(self) -> None:
        """Refresh the flat list that registration walks; call after `entries[i].slots` changed."""
        self._slots = [
            (container, key, entry.sharded, entry.unsharded)
            for entry in self.entries
            for container, key in entry.slots
            if entry.unsharded is not None
        ]

    def check_registered(self) -> None:
        """Check that the modules still show our parameters.

        Raises:
            RuntimeError: Naming the parameter that was replaced.
        """
        is_unsharded = self.is_registered_unsharded
        for container, key, sharded, unsharded in self._slots:
            if container[key] is not (unsharded if is_unsharded else sharded):
                self._raise_replaced(sharded, container[key])

    def _raise_replaced(self, sharded: Tensor, found: object) -> None:
        label = next(entry.label for entry in self.entries if entry.sharded is sharded)
        what = (
            f"{type(found).__name__}{tuple(found.shape)}"
            if isinstance(found, Tensor)
            else repr(found)
        )
        raise RuntimeError(
            f"parameter '{label}' was replaced by another object ({what}) after fully_shard, as by "
            "assignment, functional_call or load_state_dict(assign=True). Its new value would be "
            "ignored. Write into the existing parameter instead, for example "
            "`param.copy_(full_tensor)` under torch.no_grad(), or replace it before fully_shard."
        )

    def register_unsharded(self) -> None:
        """Make the modules show the unsharded parameters."""
        if self.is_registered_unsharded:
            return
        for container, key, _, unsharded in self._slots:
            container[key] = unsharded
        self.is_registered_unsharded = True

    def register_sharded(self) -> None:
        """Make the modules show the sharded parameters, the objects users and optimizers hold."""
        if not self.is_registered_unsharded:
            return
        for container, key, sharded, _ in self._slots:
            container[key] = sharded
        self.is_registered_unsharded = False

    def adopt_hooks(self) -> None:
        """Make backward run the hooks that users put on parameters with `register_hook`."""
        for entry in self.entries:
            if entry.sharded._backward_hooks and not entry.runs_hooks:
                _connect_hooks(entry)

    def run_gradient_hooks(self) -> None:
        """Run the hooks that users put on the sharded parameters with
        `register_post_accumulate_grad_hook`, once, with the final gradient.
        """
        for entry in self.entries:
            hooks = entry.sharded._post_accumulate_grad_hooks
            if hooks and entry.sharded.grad is not None:
                for hook in list(hooks.values()):
                    hook(entry.sharded)


def _connect_hooks(entry: ParamEntry) -> None:
    if entry.unsharded is None or not entry.unsharded.requires_grad:
        return
    # Weak, as in FlatParamHandle._hook_gradient: a user's hook may lead anywhere.
    sharded_ref = weakref.ref(entry.sharded)

    def run_hooks(gradient: Tensor) -> Tensor:
        sharded = sharded_ref()
        hooks = None if sharded is None else sharded._backward_hooks
        for hook in list((hooks or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    entry.unsharded.register_hook(run_hooks)
    entry.runs_hooks = True
