"""`OriginalForm`: the original parameters at rest, and all that depends on what users hold there.

[Note: Forms]
What a program holds at rest has the `.grad`s, the flags and the hooks that count, and the names
that modules register. Each question about that is a method here, so nobody asks which form a handle
has. It has one, `shown.form`, until a program asks for another; `flat_form` has the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from composable_shard.flat_param.entries import ParamEntry
from composable_shard.flat_param.grad_pieces import add_gradients
from composable_shard.flat_param.hidden import set_requires_grad
from composable_shard.layout import FlatLayout
from composable_shard.tensor import FlatShard, ParamLabel, reduced_gradient

# container, key, what is shown there at rest, what is shown there with the full values
Place = tuple[Any, Any, Tensor | None, Tensor | None]


class Cutter(Protocol):
    """Cuts a shard of gradients into those of the parameters at rest."""

    def split(self, shard: Tensor, /) -> Sequence[Tensor]:
        """Return views of a shard of shape `(own_numel,)`."""
        ...


class OriginalForm:
    """The original parameters at rest; each of them is a shard.

    Attributes:
        entries: The managed parameters, in order.
        at_rest: The parameters that users and optimizers hold.
        cutter: Cuts the reduced gradients; None: as the layout of the gradients says.
        label: The name of a parameter that is no original; None without one.
        has_names: Modules register the originals' names at rest; state dicts have these.
    """

    cutter: Cutter | None = None
    label: ParamLabel | None = None
    has_names = True

    def __init__(self) -> None:
        self.entries: list[ParamEntry] = []
        self.at_rest: Sequence[ParamEntry] = self.entries

    def __deepcopy__(self, memo: dict[int, Any]) -> OriginalForm:
        """Return a form that the copy of the handle binds."""
        return type(self)()

    def bind(self, entries: list[ParamEntry]) -> None:
        """Become the form of a handle with these parameters."""
        self.entries = self.at_rest = entries

    @property
    def every(self) -> Sequence[ParamEntry]:
        """All that views the shard, shown or not."""
        return self.entries

    def follow_layout(self) -> None:
        """Follow the entries, whose places in the shard have changed."""

    def rename(self, unit_name: str) -> None:
        """Name what is no original, for messages, by the unit's name in the outermost module."""

    # What modules show

    def places(self) -> list[Place]:
        """Return the places of parameters in modules, in the order in which they are written."""
        return [
            (container, key, entry.sharded, entry.unsharded)
            for entry in self.entries
            for container, key, _ in entry.slots
        ]

    def show(self, params: Sequence[Tensor]) -> None:
        """Make the modules show these in place of the originals."""
        for entry, param in zip(self.entries, params, strict=True):
            for container, key, _ in entry.slots:
                container[key] = param

    def show_again(self, places: Sequence[Place], *, is_unsharded: bool) -> None:
        """Make the modules show what is shown at rest or with full values, after others were."""
        for container, key, at_rest, unsharded in places:
            container[key] = unsharded if is_unsharded else at_rest

    def unhide(self) -> None:
        """Allow gradients on all sharded parameters."""

    def hide(self) -> None:
        """Make the sharded parameters that are not shown at rest refuse gradients."""

    # What stands for a full parameter that a program has kept, [Note: Kept objects]

    def shown_at(self, position: int, *, is_full: bool = False) -> Any:
        """Return what modules show in place of a full parameter at rest, or with full values."""
        entry = self.entries[position]
        return entry.unsharded if is_full else entry.sharded

    def gradient_at(self, position: int, used: Sequence[bool]) -> tuple[ParamEntry, Tensor | None]:
        """Return the record of a full parameter, and the gradient that it has at rest.

        `used` says which parameters have a gradient that waits for a reduction.
        """
        entry = self.entries[position]
        return entry, entry.sharded.grad

    # Flags and hooks

    def trainable_flags(self) -> list[bool]:
        """Return `requires_grad` of the originals, as the parameters at rest have it."""
        return [entry.sharded.requires_grad for entry in self.entries]

    def check_flags(self, flags: Sequence[bool], unit: str, where: str) -> None:
        """Check that the parameters at rest can have these flags, one for each original."""

    def set_flags(self, flags: Sequence[bool]) -> None:
        """Set `requires_grad` of the parameters at rest, as users do it, after `check_flags`."""
        for each, flag in zip(self.at_rest, flags, strict=False):
            if each.sharded.requires_grad != flag:
                set_requires_grad(each.sharded, flag)

    def follow_flags(self, flags: Sequence[bool]) -> None:
        """Give what is not shown at rest the flags of what is, one for each original."""

    def check_hooks(self) -> None:
        """Check that users put no hook where it would never run."""

    # Gradients

    def gradient_layout(self, layout: FlatLayout, flags: Sequence[bool]) -> FlatLayout:
        """Return the layout of gradients, of which only some parameters get any."""
        return layout.keep(flags)

    def has_gradients(self) -> list[bool]:
        """Return which of the originals have a sharded gradient on this rank."""
        return [reduced_gradient(entry.sharded) is not None for entry in self.entries]

    def add_gradients(self, pieces: Sequence[Tensor] | None, used: list[bool]) -> list[bool]:
        """Set, or add to, the gradients of the parameters at rest.

        Args:
            pieces: What `cutter` has cut; None if no gradient came.
            used: Which of the originals got a gradient on any rank.

        Returns:
            Which of the parameters at rest did.
        """
        if pieces is not None:
            add_gradients(self.at_rest, pieces, used)
        return used

    def drop_gradient(self, handle: Any, index: int) -> None:
        """Drop the gradient at rest of one parameter, also one that waits for a reduction."""
        self.entries[index].sharded.grad = None

    def holders(self, used: Sequence[int]) -> Iterator[tuple[FlatShard, list[int]]]:
        """Yield whose `.grad` stands for the gradients of some originals, and for which."""
        for index in used:
            yield self.entries[index].sharded, [index]


class AskedForm:
    """What `fully_shard` does for the form that it is asked for: nothing, for the originals.

    Attributes:
        has_names: As `OriginalForm.has_names`.
    """

    has_names = True

    def check(
        self,
        module: nn.Module,
        params: Sequence[tuple[str, nn.Parameter]],
        tensor_parallel: Sequence[str],
    ) -> None:
        """Check that a unit can have the form; changes nothing.

        Args:
            module: The unit's first module.
            params: The unit's parameters, with their names.
            tensor_parallel: The names of those on a tensor-parallel mesh.
        """

    def prepare(self, handle: Any) -> None:
        """Make what the form needs; shows nothing."""

    def show(self, handle: Any) -> None:
        """Show the form, after `prepare`."""
