"""The parameters that modules compute with: views of a unit's unsharded buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

__all__ = ["UnshardedParameter", "alias_of", "is_repointed", "make_unsharded"]


class UnshardedParameter(nn.Parameter):
    """A parameter that remembers whether anyone took an alias of it that autograd can't see.

    The value may give way to the gradient once autograd is done with the parameter. A node that
    computes with `param.detach()` or `param.data` may come later, and for `.data` not even the
    version counter would tell. See [Note: Packing in place].
    """

    has_hidden_alias: bool = False
    is_repointed: bool = False  # `param.data = x`: it is no view of the buffer any more

    def detach(self) -> Tensor:
        """Return a detached alias, as any tensor's does."""
        self.has_hidden_alias = True
        return super().detach()

    @property
    def data(self) -> Tensor:
        """A detached alias with a version counter of its own, as any tensor's is."""
        self.has_hidden_alias = True
        return super().data

    @data.setter
    def data(self, value: Tensor) -> None:
        self.is_repointed = True
        increment_version(self)  # an edit like any other
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]


def make_unsharded(dense: Tensor, requires_grad: bool) -> nn.Parameter:
    """Return the parameter whose data is `dense`, a view of the buffer (or a DTensor of one)."""
    kind: Any = nn.Parameter if isinstance(dense, DTensor) else UnshardedParameter
    param: nn.Parameter = kind(dense, requires_grad)
    return param


def is_repointed(param: nn.Parameter) -> bool:
    """Return whether `param.data` was set to another tensor."""
    return isinstance(param, UnshardedParameter) and param.is_repointed


def alias_of(param: nn.Parameter) -> Tensor:
    """Return the parameter's data (of a DTensor: the local part) under its version counter."""
    alias = torch.Tensor.detach(param)
    return alias.to_local() if isinstance(alias, DTensor) else alias
