"""The text of every error and warning of the package, read from its source.

The documentation site has a page of them; `python -m tests.error_texts` prints them.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "composable_shard"
_KIND = re.compile(r"(\w+Error|NeedsWhole|warning)$")
# Of a text that is raised elsewhere than it is written.
_REMEDY = re.compile(
    r"\S[.;:] (Build|Call|Correct|Freeze|Leave|Make|Pass|Remove|Run|Use)\b.*\S"
    r"|not all ranks came|are not in step|can't be reached"
)


def _template(node: ast.expr) -> str | None:
    """Return a text with `...` for what is filled in, None where the node is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [each.value if isinstance(each, ast.Constant) else "..." for each in node.values]
        return "".join(map(str, parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        both = [_template(node.left), _template(node.right)]
        return "".join(each or "..." for each in both) if any(both) else None
    return None


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            kind = "warning" if called == "warnings.warn" else called.rpartition(".")[2]
            text = _template(node.args[0]) if _KIND.match(kind) else None
            if text and len(re.findall("[a-z]", text)) > 10:
                yield text, kind
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    others = [each for each in ast.walk(tree) if isinstance(each, ast.expr)]
    texts = [_template(node) for node in others if id(node) not in docstrings]
    yield from ((text, "error") for text in texts if text and _REMEDY.search(text))


@functools.cache
def error_texts(package: str = "") -> dict[str, str]:
    """Return the kind of error by its text, sorted."""
    found: dict[str, str] = {}
    folder = PACKAGE / package
    for path in sorted(folder.rglob("*.py")) or [folder]:
        for text, kind in _texts(path) if path.name != "advice.py" else ():
            found.setdefault(" ".join(text.split()), kind)
    parts = {text for text in found if any(text != other and text in other for other in found)}
    return {text: found[text] for text in sorted(found, key=_order) if text not in parts}


def _order(text: str) -> str:
    return text.lstrip(".:'\" ").lower()


def matching(message: str) -> list[str]:
    """Return the texts of which a message is one."""
    message = " ".join(message.split())
    patterns = {text: ".*".join(map(re.escape, text.split("..."))) for text in error_texts()}
    return [text for text, pattern in patterns.items() if re.search(pattern, message)]


if __name__ == "__main__":
    for text, kind in error_texts().items():
        print(f"{kind}: {text}")
