"""Tensors that are equal, exactly or within a tolerance, and an error that a test plans."""

from __future__ import annotations

import torch


class Planned(Exception):
    """What tests raise to see what an error leaves behind."""


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "tensor") -> None:
    """Assert the same shape, dtype, device and exactly equal values, where NaN equals NaN."""
    __tracebackhide__ = True
    if type(actual) is type(expected) is torch.Tensor and _is_equal(actual, expected):
        return  # in a tenth of the time
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    kinds = [(each.dtype, each.device, each.layout) for each in (one, other)]
    return kinds[0] == kinds[1] and torch.equal(one, other)


def assert_within(
    actual: torch.Tensor, expected: torch.Tensor, what: str, *, atol: float, rtol: float = 0.0
) -> None:
    """Assert the same shape, dtype and device, and values that differ by a tolerance at most."""
    __tracebackhide__ = True
    is_plain = type(actual) is type(expected) is torch.Tensor and actual.is_floating_point()
    kinds = [(each.shape, each.dtype, each.device, each.layout) for each in (actual, expected)]
    if is_plain and kinds[0] == kinds[1]:
        difference = (actual.detach() - expected.detach()).abs()
        if bool((difference <= atol + rtol * expected.detach().abs()).all()):
            return  # in a thirtieth of the time
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}"
    )
