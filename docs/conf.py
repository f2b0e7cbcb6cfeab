"""The documentation site: `make docs` writes it to `build/docs`.

The pages are those of this folder, in the order of `index.md`. Two kinds of page are made anew by
each build, in `docs/generated`: the README, and one page of docstrings for each of `GROUPS`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
ROOT = DOCS.parent
GENERATED = DOCS / "generated"
sys.path.insert(0, str(ROOT))

import composable_shard  # noqa: E402 -- of this checkout
from composable_shard import fsdp2  # noqa: E402
from tests.error_texts import error_texts  # noqa: E402
from tests.test_public_names import BELOW  # noqa: E402

project = "composable_shard"
author = copyright = "composable_shard contributors"
version = release = composable_shard.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"composable_shard {version}"
html_show_sphinx = False
myst_heading_anchors = 4
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

SOURCE = "https://github.com/composable-shard/composable_shard/blob/main/"

# Title of a page: the packages whose public names it shows, in this order.
GROUPS = {
    "Shard a model": ("construct", "planning", "options"),
    "Settings and full parameters": ("module_api",),
    "Optimizers": ("optim",),
    "Save and load": ("checkpoint", "state_dict", "huggingface"),
    "Pipelines": ("pipelining",),
    "Communication": ("comm",),
    "Look inside": ("runtime", "flat_param", "layout", "tensor"),
    "FSDP2's names": ("fsdp2",),
}
ERRORS = "All errors"
_CODE = re.compile(r"(?ms)^```python\n.*?^```\n")
# Parts of docs/reference.md whose entries are names of a package with others of the same name.
OWN_SECTIONS = {"FSDP2's names": "fsdp2"}


def _public_names() -> dict[str, list[str]]:
    """Return the full public names by the package that defines them."""
    top = composable_shard.__all__
    found = [(f"composable_shard.{name}", getattr(composable_shard, name)) for name in top]
    for package, names in BELOW.items():
        module = importlib.import_module(f"composable_shard.{package}")
        found += [(f"{module.__name__}.{name}", getattr(module, name)) for name in names]
    by_package: dict[str, list[str]] = {}
    for name, item in found:
        owner = getattr(item, "__module__", "").split(".")
        package = owner[1] if owner[0] == "composable_shard" else name.split(".")[1]
        by_package.setdefault(package, []).append(name)
    by_package["fsdp2"] = [f"{fsdp2.__name__}.{name}" for name in fsdp2.__all__]
    without_page = by_package.keys() - {each for group in GROUPS.values() for each in group}
    if without_page:
        raise ValueError(f"docs/conf.py: GROUPS lacks the packages {sorted(without_page)}")
    return by_package


def _page_of(group: str) -> str:
    return f"generated/{re.sub(r'[^a-z0-9 ]', '', group.lower()).replace(' ', '_')}"


@dataclass(frozen=True)
class _Entry:
    """One heading of docs/reference.md: some names, what is said of them, and an example."""

    package: str
    names: tuple[str, ...]
    text: str
    example: str

    @property
    def anchor(self) -> str:
        """Return the heading's anchor."""
        return "-".join(self.names).lower()

    @functools.cached_property
    def guides(self) -> list[str]:
        """Return the pages that the entry links to, and those that link to it."""
        linked = re.findall(r"\]\((\w+)\.md", self.text)
        others = [
            page.stem
            for page in sorted(DOCS.glob("*.md"))
            if f"](reference.md#{self.anchor})" in page.read_text()
        ]
        return [*dict.fromkeys([*linked, *others])]


@functools.cache
def _entries() -> list[_Entry]:
    sections = re.split(r"(?m)^## (.*)$", (DOCS / "reference.md").read_text())[1:]
    return [
        _Entry(OWN_SECTIONS.get(title, ""), tuple(re.findall(r"`([\w.]+)`", heading)), words, code)
        for title, text in zip(sections[::2], sections[1::2], strict=True)
        for heading, words, code in re.findall(r"(?ms)^### (.*?)$(.*?)^```python\n(.*?)^```$", text)
    ]


@functools.cache
def _full_names() -> dict[tuple[str, str], str]:
    """Return full names by name, and for some by their package too: "" is all that have one."""
    found: dict[tuple[str, str], str] = {}
    for package, names in _public_names().items():
        own = package if package in OWN_SECTIONS.values() else ""
        found |= {(own, name.rpartition(".")[2]): name for name in names}
    return found


def _documented(full_name: str) -> str:
    """Return the directive that shows one name, its example, and its guides."""
    package, _, name = full_name.rpartition(".")
    item = getattr(importlib.import_module(package), name)
    kind = "class" if inspect.isclass(item) else "function" if callable(item) else "data"
    is_ours = getattr(item, "__module__", "").startswith(composable_shard.__name__)
    option = "   :members:\n" if kind == "class" and is_ours else ""
    own = package.removeprefix("composable_shard.")
    own = own if own in OWN_SECTIONS.values() else ""
    entries = [each for each in _entries() if each.package == own]
    of_name = [each for each in entries if name in each.names]
    entry, *_ = [*of_name, *(each for each in entries if f"`{name}`" in each.text)]
    code = "".join(f"   {line}\n" for line in entry.example.splitlines())
    guides = ", ".join(f":doc:`/{page}`" for page in entry.guides)
    return (
        f".. auto{kind}:: {full_name}\n{option}\n"
        f"**Example**\n\n.. code-block:: python\n\n{code}\n**Guides:** {guides}\n\n"
    )


def _relink(text: str, folder: Path) -> str:
    """Let links to files outside of this folder lead to the repository."""

    def to_entry(match: re.Match[str]) -> str:
        [entry] = [each for each in _entries() if each.anchor == match[2]]
        name = re.split(r"\W", match[1])[0]
        return _reference(match[1], entry.package, name)

    def moved(match: re.Match[str]) -> str:
        path, _, anchor = match[1].partition("#")
        target = (folder / path).resolve()
        if target == ROOT / "README.md":
            return "](generated/readme.md)"
        if target.parent == DOCS / "pictures":
            return f"](/pictures/{target.name})"
        if target == DOCS / "reference.md":
            return "](/reference.md)"
        if target.parent == DOCS and target.suffix == ".md":
            return f"](/{target.name}{'#' + anchor if anchor else ''})"
        return f"]({SOURCE}{target.relative_to(ROOT)})"

    text = re.sub(r"\[`([^`]+)`\]\(reference\.md#([\w-]+)\)", to_entry, text)
    return re.sub(r"\]\(((?!\w+:|#)[^)\s]+)\)", moved, text)


def _reference(label: str, package: str, name: str) -> str:
    """Return a link to what autodoc shows of a name, or to the list of names."""
    full_name = _full_names().get((package, name))
    return f"{{py:obj}}`{label} <{full_name}>`" if full_name else f"[`{label}`](reference.md)"


def _overview(text: str) -> str:
    """Return docs/reference.md with links to what is documented, which has the examples."""
    for entry in _entries():
        heading = "### " + ", ".join(f"`{name}`" for name in entry.names)
        links = ", ".join(_reference(name, entry.package, name) for name in entry.names)
        text = text.replace(heading + entry.text, f"- {links}: {entry.text.strip()}\n", 1)
    return _CODE.sub("", text)


def _generate(app: Sphinx) -> None:
    shutil.rmtree(GENERATED, ignore_errors=True)
    GENERATED.mkdir()
    readme = _relink((ROOT / "README.md").read_text(), ROOT)
    (GENERATED / "readme.md").write_text(readme.replace("# composable_shard", "# Quick start", 1))
    names = _public_names()
    for group, packages in GROUPS.items():
        items = [name for package in packages for name in names.get(package, ())]
        text = f"{group}\n{'=' * len(group)}\n\n" + "".join(map(_documented, items))
        (DOCS / f"{_page_of(group)}.rst").write_text(text)
    (DOCS / f"{_page_of(ERRORS)}.md").write_text(_errors())


def _errors() -> str:
    """Return the page of all errors; a text says what was expected, what came, what to do."""
    lines = [f"# {ERRORS}", "", "`...` stands for names and values. Search for the words of yours."]
    for group, packages in {**GROUPS, "FSDP2's names": ("fsdp2.py",)}.items():
        lines += ["", f"## {group}", "", "| text | kind |", "|---|---|"]
        for package in packages:
            for text, kind in error_texts(package).items():
                quoted = text.replace("`", "'").replace("|", "\\|")
                lines.append(f"| `{quoted}` | {kind} |")
    return "\n".join(lines) + "\n"


def _toctree(caption: str, pages: list[str]) -> str:
    return "\n".join(
        ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""]
    )


def _read(app: Sphinx, page: str, content: list[str]) -> None:
    """Relink a page, and add to the index the tables of contents that its lists are."""
    if page.startswith("generated/"):
        return
    text = _relink(_overview(content[0]) if page == "reference" else content[0], DOCS)
    if page == "index":
        sections = re.findall(r"(?ms)^\*\*(.*?)\*\*$(.*?)(?=^\*\*|\Z)", text)
        text += _toctree("Start", ["generated/readme"])
        for caption, items in sections:
            text += _toctree(caption, re.findall(r"(?m)^- .*?\]\(/?([\w/]+)\.md", items))
        text += _toctree("Reference", [_page_of(group) for group in (*GROUPS, ERRORS)])
    content[0] = text


def _quote_code(
    app: Sphinx, what: str, name: str, found: object, options: object, lines: list[str]
) -> None:
    """Mark what a docstring indents after an empty line, before its sections, as code."""
    text = "\n".join(lines)
    head = re.split(r"(?m)^(?:Args|Attributes|Returns|Yields|Raises):$", text, maxsplit=1)[0]
    quoted, is_code = [], False
    for index, line in enumerate(head.split("\n")):
        starts = line.startswith("    ") and (index == 0 or not lines[index - 1])
        if starts and not is_code:
            quoted += [".. code-block:: python", ""]
        is_code = (is_code or starts) and (line.startswith("    ") or not line)
        quoted.append(line)
    text = "\n".join(quoted) + text[len(head) :]
    lines[:] = re.sub(r"\[Note: (.*?)\]", r"(note: \1)", text).split("\n")


def _skip(
    app: Sphinx, what: str, name: str, found: object, skip: bool, options: object
) -> bool | None:
    """Leave out how objects are made where `__init__` or the class says it."""
    return True if name == "__new__" else None


def setup(app: Sphinx) -> None:
    """Connect what makes pages."""
    app.connect("autodoc-skip-member", _skip)
    app.connect("builder-inited", _generate)
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _quote_code, priority=100)
