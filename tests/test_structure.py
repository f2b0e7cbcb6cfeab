"""Rules of the package's files that neither ruff nor import-linter holds."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

import composable_shard

ROOT = Path(composable_shard.__file__).parent
MODULES = [module.name for module in pkgutil.iter_modules([str(ROOT)])]


def test_no_file_is_long() -> None:
    """A file that passes about 400 lines has more than one responsibility."""
    lengths = {path.name: len(path.read_text().splitlines()) for path in ROOT.glob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


@pytest.mark.parametrize("name", MODULES)
def test_every_module_declares_what_it_offers(name: str) -> None:
    """`__all__` is there and true."""
    module = importlib.import_module(f"composable_shard.{name}")
    assert all(hasattr(module, public) for public in module.__all__)
    assert not [public for public in module.__all__ if public.startswith("_")]
