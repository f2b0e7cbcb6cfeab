"""The classes of parameters at rest while their unit shows the other form: they raise."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from composable_shard.options import HIDDEN
from composable_shard.tensor import DIRECT_OPS, FlatShard, explain_read


class _HiddenShard(FlatShard):
    """An original parameter while the flat parameter is shown instead.

    [Note: Hidden originals]
    It has no gradient: an optimizer that holds it would step nothing, silently. Modules register
    None in its place, so that names keep their order, and have it as a plain attribute, which is
    found first: a layer that found None would compute without its weight, as norms do. No op runs
    on it, because after `.to()` or `to_empty()` its slice is outdated until the next forward.
    """

    _reason = (
        "its unit shows one flat parameter (use_orig_params=False). Build the optimizer from "
        "model.parameters() after fully_shard, or call register_orig_params(module) first."
    )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub lacks `func`
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        """Raise: its values may be outdated."""
        given = [*args, *(kwargs or {}).values()]
        flat = [item for arg in given for item in (arg if isinstance(arg, list | tuple) else [arg])]
        hidden = next(item for item in flat if isinstance(item, _HiddenShard))
        raise RuntimeError(
            f"parameter '{hidden._shard_spec.label}' has no values of its own: {hidden._reason} "
            f"{explain_read(hidden) or HIDDEN}{hidden._shard_spec.label.late_remedy}"
        )

    @property
    def grad(self) -> Tensor | None:
        """Raise: the gradient is in the flat parameter's."""
        self._raise_hidden()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            self._raise_hidden()

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter shown instead is trainable."""
        flag: bool = Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined]
        return flag

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        if flag is not self.requires_grad:
            self._raise_hidden()

    def register_post_accumulate_grad_hook(self, hook: Any) -> NoReturn:
        """Raise: it would never run."""
        self._raise_hidden()

    def _raise_hidden(self) -> NoReturn:
        fqn = self._shard_spec.label.fqn
        raise RuntimeError(f"parameter '{fqn}' has no gradient of its own: {self._reason}")


for _name in DIRECT_OPS:  # direct ops would bypass the dispatcher
    setattr(_HiddenShard, _name, getattr(Tensor, _name))


class _HiddenFlat(_HiddenShard):
    """The flat parameter while the original parameters are shown instead."""

    _reason = (
        "its unit shows its original parameters. Build the optimizer anew from "
        "model.parameters(), or call register_flat_param(module) first."
    )


def hide(param: FlatShard) -> None:
    """Make an original parameter, whose `.grad` is None, raise on access to its gradient."""
    param.__class__ = _HiddenShard


def hide_flat(param: FlatShard) -> None:
    """Make a flat parameter, whose `.grad` is None, raise on access to its gradient."""
    param.__class__ = _HiddenFlat


def unhide(param: FlatShard) -> None:
    """Make a hidden parameter an ordinary FlatShard again."""
    if type(param) in (_HiddenShard, _HiddenFlat):
        param.__class__ = FlatShard


def set_requires_grad(param: FlatShard, flag: bool) -> None:
    """Set the flag of a parameter, even of a hidden one, which refuses users."""
    FlatShard.requires_grad.__set__(param, flag)  # type: ignore[attr-defined]
