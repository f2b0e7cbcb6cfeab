"""What needs a newer torch."""

from __future__ import annotations

import pytest
import torch


def needs_torch(version: str, why: str) -> pytest.MarkDecorator:
    """Skip on an older torch, where torch itself can't do what the test is about."""
    here, needed = (tuple(map(int, v.split(".")[:2])) for v in (torch.__version__, version))
    return pytest.mark.skipif(here < needed, reason=f"needs torch {version}: {why}")
