"""Operations at rest, each on parameters by name that have gradients, for random programs.

Each means on shards what it means on whole tensors, and is continuous: rounding changes it little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

Named = dict[str, Tensor]
AT_REST: dict[str, Callable[[Named], None]] = {}


def _at_rest(operation: Callable[[Named], None]) -> Callable[[Named], None]:
    AT_REST[operation.__name__] = operation
    return operation


def _matrices(params: Named) -> list[Tensor]:
    return [param for param in params.values() if param.dim() == 2]


def _gradient_of(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def _alike(params: Named) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of one shape, each parameter in at most one."""
    waiting: dict[torch.Size, Tensor] = {}
    for param in params.values():
        other = waiting.pop(param.shape, None)
        if other is None:
            waiting[param.shape] = param
        else:
            yield param, other


@_at_rest
def factors_of_rows(params: Named) -> None:
    """Scale each row by a plain factor."""
    for param in _matrices(params):
        param.mul_(torch.linspace(0.8, 1.2, len(param), dtype=param.dtype)[:, None])


@_at_rest
def factors_of_columns(params: Named) -> None:
    """Scale each column by a plain factor."""
    for param in _matrices(params):
        param.mul_(torch.linspace(0.8, 1.2, param.shape[1], dtype=param.dtype))


@_at_rest
def limited_rows(params: Named) -> None:
    """Limit the norm of each row."""
    for param in _matrices(params):
        param.div_(param.norm(dim=1, keepdim=True).clamp(min=1.0))


@_at_rest
def centred_gradients(params: Named) -> None:
    """Take the mean of each row from the gradient."""
    for param in _matrices(params):
        _gradient_of(param).sub_(_gradient_of(param).mean(dim=1, keepdim=True))


@_at_rest
def clipped_by_rows(params: Named) -> None:
    """Clip the gradient of each row by the size of the row."""
    for param in _matrices(params):
        sizes = (
            param.norm(dim=1, keepdim=True) + 0.1,
            _gradient_of(param).norm(dim=1, keepdim=True) + 1e-3,
        )
        _gradient_of(param).mul_((sizes[0] / sizes[1]).clamp(max=1.0))


@_at_rest
def noise(params: Named) -> None:
    """Add noise that all ranks draw alike."""
    generator = torch.Generator().manual_seed(3)
    for param in params.values():
        param.add_(torch.randn(param.shape, generator=generator, dtype=param.dtype), alpha=0.01)


@_at_rest
def plain_averages(params: Named) -> None:
    """Average into plain tensors, and back."""
    averages = [torch.full(param.shape, 0.1, dtype=param.dtype) for param in params.values()]
    for average, param in zip(averages, params.values(), strict=True):
        param.lerp_(average.lerp_(param, 0.3), 0.1)


@_at_rest
def transposed(params: Named) -> None:
    """Write through a transpose."""
    for param in _matrices(params):
        param.t().mul_(torch.linspace(0.9, 1.1, len(param), dtype=param.dtype))


@_at_rest
def columns(params: Named) -> None:
    """Write through views that are no flat range."""
    for param in _matrices(params):
        param[:, 1:3].mul_(0.5)
        param[::2, 0].add_(0.01)


@_at_rest
def rows_by_index(params: Named) -> None:
    """Swap rows by indices."""
    for param in _matrices(params):
        param[[0, len(param) - 1]] = param[[len(param) - 1, 0]]


@_at_rest
def rows_from_rows(params: Named) -> None:
    """Make a row of the others."""
    for param in _matrices(params):
        param[-1].copy_(param[:-1].mean(0))


@_at_rest
def pairs(params: Named) -> None:
    """Combine parameters of one shape."""
    for one, other in _alike(params):
        one.add_(other, alpha=0.1)
        other.copy_(torch.where(other > 0, one, other))


@_at_rest
def products(params: Named) -> None:
    """Multiply a matrix by itself."""
    for param in _matrices(params):
        param.sub_(param @ param.t() @ param, alpha=0.01)


@_at_rest
def with_gradients(params: Named) -> None:
    """Multiply a matrix by its gradient."""
    for param in _matrices(params):
        param.sub_(torch.einsum("ij,kj,kl->il", param, _gradient_of(param), param), alpha=0.01)


@_at_rest
def dot_products(params: Named) -> None:
    """Scale by a dot product."""
    for param in params.values():
        param.mul_(
            1.0 + 0.1 * torch.tanh(torch.dot(param.flatten(), _gradient_of(param).flatten()))
        )


@_at_rest
def cosines(params: Named) -> None:
    """Scale by a cosine similarity."""
    for param in params.values():
        cosine = functional.cosine_similarity(param.flatten(), _gradient_of(param).flatten(), dim=0)
        param.mul_(1.0 + 0.1 * cosine)


@_at_rest
def global_size(params: Named) -> None:
    """Scale gradients by the norm of all."""
    vector = torch.cat([_gradient_of(param).flatten() for param in params.values()])
    for param in params.values():
        _gradient_of(param).div_(1.0 + vector.norm())


@_at_rest
def one_vector(params: Named) -> None:
    """Join all parameters, and take them from the vector."""
    vector = parameters_to_vector(params.values())
    vector_to_parameters(vector - 0.1 * vector.mean(), params.values())


@_at_rest
def quantiles(params: Named) -> None:
    """Bound a parameter by a quantile of it."""
    for param in params.values():
        bound = torch.quantile(param.abs(), 0.9)
        param.copy_(torch.minimum(torch.maximum(param, -bound), bound))


@_at_rest
def largest(params: Named) -> None:
    """Scale a gradient by its largest elements."""
    for param in params.values():
        values = _gradient_of(param).flatten().abs().topk(min(3, param.numel())).values
        _gradient_of(param).div_(1.0 + values.sum())


@_at_rest
def extremes(params: Named) -> None:
    """Scale by the range and the variance."""
    for param in params.values():
        param.div_(1.0 + 0.1 * (param.max() - param.min() + param.var(correction=0)))


@_at_rest
def lists(params: Named) -> None:
    """Run functions of lists, with shards and plain tensors."""
    found = list(params.values())
    torch._foreach_mul_(found, 0.9)
    updates = torch._foreach_add([_gradient_of(param) for param in found], 0.01)
    torch._foreach_sub_(found, torch._foreach_mul(updates, 0.1))
    torch._foreach_add_(found, [torch.full(each.shape, 0.01, dtype=each.dtype) for each in found])
