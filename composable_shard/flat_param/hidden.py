"""The classes of parameters at rest while their unit shows another form: they raise."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from torch import Tensor

from composable_shard.options import HIDDEN
from composable_shard.tensor import DIRECT_OPS, FlatShard, explain_read


class HiddenShard(FlatShard):
    """A parameter at rest while its unit shows another form, [Note: Forms].

    [Note: Hidden originals]
    It has no gradient: an optimizer that holds it would step nothing, silently. In the place of an
    original, modules register None, so that names keep their order, and have it as a plain
    attribute, which is found first: a layer that found None would compute without its weight, as
    norms do. No op runs on it, because after `.to()` or `to_empty()` its slice is outdated until
    the next forward.
    """

    reason: ClassVar[str]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub lacks `func`
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        """Raise: its values may be outdated."""
        given = [*args, *(kwargs or {}).values()]
        flat = [item for arg in given for item in (arg if isinstance(arg, list | tuple) else [arg])]
        hidden = next(item for item in flat if isinstance(item, HiddenShard))
        raise RuntimeError(
            f"parameter '{hidden._shard_spec.label}' has no values of its own: {hidden.reason} "
            f"{explain_read(hidden) or HIDDEN}{hidden._shard_spec.label.late_remedy}"
        )

    @property
    def grad(self) -> Tensor | None:
        """Raise: what is shown instead has the gradient."""
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
        raise RuntimeError(f"parameter '{fqn}' has no gradient of its own: {self.reason}")


for _name in DIRECT_OPS:  # direct ops would bypass the dispatcher
    setattr(HiddenShard, _name, getattr(Tensor, _name))


def hide(param: FlatShard, kind: type[HiddenShard]) -> None:
    """Make a parameter, whose `.grad` is None, raise on access to its gradient."""
    param.__class__ = kind


def unhide(param: FlatShard) -> None:
    """Make a hidden parameter an ordinary FlatShard again."""
    if isinstance(param, HiddenShard):
        param.__class__ = FlatShard  # type: ignore[assignment] # its base


def set_requires_grad(param: FlatShard, flag: bool) -> None:
    """Set the flag of a parameter, even of a hidden one, which refuses users."""
    FlatShard.requires_grad.__set__(param, flag)  # type: ignore[attr-defined]
