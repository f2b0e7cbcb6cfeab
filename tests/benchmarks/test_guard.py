"""The commit that `make bench-guard` compares with by default."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.guard import last_release

_NAME = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]


def _git(root: Path, *args: str) -> str:
    command = ["git", *_NAME, *args]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return found.stdout.strip()


def _commit(root: Path, changelog: str) -> str:
    (root / "CHANGELOG.md").write_text(changelog)
    _git(root, "add", "-A")
    _git(root, "commit", "--allow-empty", "-m", "a change")
    return _git(root, "rev-parse", "--short", "HEAD")


def test_last_release_is_a_tag_or_what_the_changelog_names(tmp_path: Path) -> None:
    """Without both, ten commits before; in a short clone the first there is."""
    _git(tmp_path, "init", "-q")
    first = _commit(tmp_path, "## [Unreleased]\n")
    assert last_release(tmp_path) == first
    for number in range(10):
        _commit(tmp_path, f"## [Unreleased]\n- {number}\n")
    assert last_release(tmp_path) == first
    released = _commit(tmp_path, "## [Unreleased]\n\n## [0.1.0] - 2026-11-24\n")
    _commit(tmp_path, "## [Unreleased]\n- more\n\n## [0.1.0] - 2026-11-24\n")
    assert last_release(tmp_path) == released
    _git(tmp_path, "tag", "v0.1.1")
    assert last_release(tmp_path) == "v0.1.1"
