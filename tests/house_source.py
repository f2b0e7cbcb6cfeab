"""What the text of a package says about its shape: modules, imports, classes, writes, names.

Nothing is imported: the source is read with `ast`, so the counts hold for any folder of Python
files. A *package* here is a folder directly in the root, with all below it; a file directly in the
root is a package of its own. `__init__` files are left out of levels and of upward imports, because
they only pass names on: an import of a name from one counts as an import of the module that defines
the name.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

__all__ = ["Class", "Source", "Tree", "longest_chain"]

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A file: its dotted module name, its path within the root, and its text."""

    module: str
    path: str
    text: str

    @property
    def is_init(self) -> bool:
        """Whether it is the `__init__` of a folder."""
        return self.path.endswith("__init__.py")

    @property
    def package(self) -> str:
        """The folder in the root that it lies in, else the file's own name."""
        return self.path.split("/")[0].removesuffix(".py")

    @property
    def num_lines(self) -> int:
        """Lines, empty ones included."""
        return len(self.text.splitlines())

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.text)

    @cached_property
    def code(self) -> list[ast.AST]:
        """The nodes that are no default value of a parameter or field, annotation or docstring."""
        return list(_without_defaults(self.tree))


@dataclass(eq=False)
class Class:
    """A class statement.

    Attributes:
        name: Its name.
        source: The file.
        bases: Its bases that are classes of the same tree, subscripts removed.
        methods: Names of the functions in its body: methods, properties, static and class methods.
        attributes: Names that its body annotates or lists in `__slots__`, and names that its
            `__init__` assigns on `self`.
        members: Names that its body assigns.
        base_names: Names of all bases, as spelled.
    """

    name: str
    source: Source
    node: ast.ClassDef
    bases: list[Class] = field(default_factory=list)
    methods: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    members: set[str] = field(default_factory=set)
    base_names: set[str] = field(default_factory=set)

    def family(self) -> Iterator[Class]:
        """Yield the class and all classes of the tree that it inherits from, each once."""
        seen: dict[Class, None] = {}
        pending = [self]
        while pending:
            each = pending.pop(0)
            if each not in seen:
                seen[each] = None
                pending += each.bases
        yield from seen

    def all_methods(self) -> set[str]:
        """Return the names of its methods, inherited ones included."""
        return set[str]().union(*(each.methods for each in self.family()))


class Tree:
    """All Python files below a folder, read as one importable package."""

    def __init__(self, root: Path) -> None:
        self.name = root.name
        self.sources: dict[str, Source] = {}
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            parts = [root.name, *relative.with_suffix("").parts]
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.sources[module] = Source(module, relative.as_posix(), path.read_text())
        self._imported = {module: self._read_imports(module) for module in self.sources}
        self.classes = self._read_classes()

    @property
    def modules(self) -> list[Source]:
        """The files that are no `__init__`."""
        return [source for source in self.sources.values() if not source.is_init]

    # Imports -------------------------------------------------------------------------------------

    def _read_imports(self, module: str) -> dict[str, tuple[str, str | None]]:
        """Return what each imported name of the tree stands for: a module, or a name in one."""
        found: dict[str, tuple[str, str | None]] = {}
        for node in ast.walk(self.sources[module].tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name in self.sources:
                        found[alias.asname or alias.name] = (alias.name, None)
            elif isinstance(node, ast.ImportFrom):
                base = self._base_of(module, node)
                for alias in node.names if base in self.sources else ():
                    submodule = f"{base}.{alias.name}"
                    is_module = submodule in self.sources
                    target = (submodule, None) if is_module else (base, alias.name)
                    found[alias.asname or alias.name] = target
        return found

    def _base_of(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        keep = len(parts) - node.level + (1 if self.sources[module].is_init else 0)
        return ".".join([*parts[:keep], *([node.module] if node.module else [])])

    def _defining(self, target: tuple[str, str | None]) -> tuple[str, str | None]:
        """Follow names that are imported and passed on to the module that defines them."""
        seen = set()
        while target[1] is not None and target not in seen:
            seen.add(target)
            passed_on = self._imported[target[0]].get(target[1])
            if passed_on is None:
                break
            target = passed_on
        return target

    def imports(self) -> dict[str, set[str]]:
        """Return which modules of the tree each module needs, by module; no `__init__` in it."""
        return {
            source.module: {
                module
                for module, _ in map(self._defining, self._imported[source.module].values())
                if not self.sources[module].is_init and module != source.module
            }
            for source in self.modules
        }

    def package_imports(self) -> dict[str, set[str]]:
        """Return which other packages each package imports from."""
        found: dict[str, set[str]] = {source.package: set() for source in self.modules}
        for module, targets in self.imports().items():
            package = self.sources[module].package
            found[package] |= {self.sources[target].package for target in targets} - {package}
        return found

    def upward_imports(self, order: Sequence[str]) -> list[str]:
        """Return imports of a package that comes later in the order, as `importer -> imported`.

        Packages that the order leaves out come last.
        """
        height = {package: index for index, package in enumerate(order)}
        return [
            f"{module} -> {target}"
            for module, targets in self.imports().items()
            for target in sorted(targets)
            if height.get(self.sources[module].package, len(order))
            < height.get(self.sources[target].package, len(order))
        ]

    # Classes -------------------------------------------------------------------------------------

    def _read_classes(self) -> dict[tuple[str, str], Class]:
        classes: dict[tuple[str, str], Class] = {}
        for source in self.sources.values():
            for node in ast.walk(source.tree):
                if isinstance(node, ast.ClassDef):
                    classes[source.module, node.name] = _read_class(source, node)
        for (module, _), each in classes.items():
            for base in each.node.bases:
                name = _dotted(base.value if isinstance(base, ast.Subscript) else base)
                found = self._named(classes, module, name)
                each.bases += [found] if found else []
                each.base_names.add(name.rpartition(".")[2])
        return classes

    def _named(self, classes: dict[tuple[str, str], Class], module: str, name: str) -> Class | None:
        """Return the class that a name in a module stands for, None if it is not of the tree."""
        head, _, rest = name.partition(".")
        target = self._imported[module].get(head, (module, head))
        if target[1] is None and rest:
            target = (target[0], rest)
        found = self._defining(target)
        return classes.get((found[0], found[1])) if found[1] is not None else None

    def subclasses(self, suffix: str) -> list[Class]:
        """Return the classes that inherit, at whatever distance, from a class of such a name."""
        return [
            each
            for each in self.classes.values()
            if any(name.endswith(suffix) for member in each.family() for name in member.base_names)
        ]

    # Writes --------------------------------------------------------------------------------------

    def foreign_writes(self) -> list[str]:
        """Return assignments to attributes of other packages, as `path:line target of owner`.

        A write is an assignment to `base.name` or its deletion; `self` and `cls` are no bases, and
        a subscript of an attribute changes a container and is no write. The class of the base is
        the one of its annotation; without one, the classes with which parameters and attributes of
        the same name are annotated elsewhere in the tree, as far as these declare the attribute;
        failing that, all classes that declare the attribute. A write counts if all these classes
        declare the attribute in other packages.
        """
        owners: dict[str, list[Class]] = {}
        for each in self.classes.values():
            for attribute in each.attributes:
                owners.setdefault(attribute, []).append(each)
        usual = self._usual_classes()
        found = []
        for source in self.sources.values():
            for target, annotation in _attribute_writes(source.tree):
                if annotation is not None:
                    packages = _declaring(self._annotated(source.module, annotation), target.attr)
                else:
                    base = _dotted(target.value).rpartition(".")[2]
                    packages = _declaring(usual.get(base, []), target.attr)
                    if not packages and target.attr not in _TORCH_ATTRIBUTES:
                        packages = _declaring(owners.get(target.attr, []), target.attr)
                if packages and source.package not in packages:
                    owner = " or ".join(sorted(packages))
                    found.append(f"{source.path}:{target.lineno} {ast.unparse(target)} of {owner}")
        return found

    def _usual_classes(self) -> dict[str, list[Class]]:
        """Return with which classes of the tree variables of each name are annotated."""
        found: dict[str, list[Class]] = {}
        for source in self.sources.values():
            for node in ast.walk(source.tree):
                if isinstance(node, ast.arg):
                    name = node.arg
                elif isinstance(node, ast.AnnAssign):
                    name = _dotted(node.target).rpartition(".")[2]
                else:
                    continue
                if node.annotation is not None and not isinstance(node.annotation, ast.Subscript):
                    found.setdefault(name, []).extend(
                        self._annotated(source.module, node.annotation)
                    )
        return found

    def _annotated(self, module: str, annotation: ast.expr) -> list[Class]:
        """Return the classes of the tree that an annotation names."""
        names = {
            _dotted(node)
            for node in ast.walk(annotation)
            if isinstance(node, (ast.Name, ast.Attribute))
        }
        found = [self._named(self.classes, module, name) for name in sorted(names)]
        return [each for each in found if each is not None]

    # Names ---------------------------------------------------------------------------------------

    def spelling(self, is_spelled: Callable[[ast.AST], bool]) -> list[str]:
        """Return the paths of files whose `code` has such a node."""
        return [
            source.path for source in self.sources.values() if any(map(is_spelled, source.code))
        ]

    def alternatives(self, alias: str) -> tuple[set[str], set[str]]:
        """Return the strings and the classes of a module-level `alias = Literal[...] | Class`."""
        strings: set[str] = set()
        classes: set[str] = set()
        for source in self.sources.values():
            for statement in source.tree.body:
                if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
                    continue
                if alias in map(_dotted, _targets(statement)) and statement.value is not None:
                    for node in ast.walk(statement.value):
                        if isinstance(node, ast.Constant) and isinstance(node.value, str):
                            strings.add(node.value)
                    found = self._annotated(source.module, statement.value)
                    classes |= {each.name for each in found}
        return strings, classes

    def function_lengths(self) -> list[int]:
        """Return the lines of each function, nested ones too, without decorators and docstring."""
        return sorted(
            _length(node)
            for source in self.sources.values()
            for node in ast.walk(source.tree)
            if isinstance(node, _Function)
        )


# Attributes of every tensor and module, which also some class of a tree may declare.
_TORCH_ATTRIBUTES = frozenset({"data", "grad", "requires_grad", "_local_tensor"})


def longest_chain(edges: dict[str, set[str]]) -> list[str]:
    """Return a longest path of a graph, edges that close a circle aside.

    >>> longest_chain({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    ['a', 'b', 'c']
    """
    known: dict[str, list[str]] = {}
    running: set[str] = set()

    def visit(node: str) -> list[str]:
        if node not in known:
            running.add(node)
            below = [visit(each) for each in sorted(edges.get(node, ())) if each not in running]
            running.remove(node)
            known[node] = [node, *max(below, key=len, default=[])]
        return known[node]

    return max((visit(node) for node in sorted(edges)), key=len, default=[])


def _targets(statement: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return statement.targets if isinstance(statement, ast.Assign) else [statement.target]


def _dotted(node: ast.AST) -> str:
    """Return `a.b.c` as text, empty for an expression that is no such name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def _read_class(source: Source, node: ast.ClassDef) -> Class:
    found = Class(node.name, source, node)
    for statement in node.body:
        if isinstance(statement, _Function):
            found.methods.add(statement.name)
            if statement.name == "__init__":
                found.attributes |= _set_on_self(statement)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            names = {_dotted(target) for target in _targets(statement)} - {""}
            if statement.value is not None:
                found.members |= names
            if isinstance(statement, ast.AnnAssign):
                found.attributes |= names
            elif "__slots__" in names:
                found.attributes |= {
                    each.value
                    for each in ast.walk(statement.value)
                    if isinstance(each, ast.Constant) and isinstance(each.value, str)
                }
    return found


def _set_on_self(init: _Function) -> set[str]:
    return {
        node.attr
        for node in ast.walk(init)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and _dotted(node.value) == "self"
    }


def _attribute_writes(tree: ast.Module) -> Iterator[tuple[ast.Attribute, ast.expr | None]]:
    """Yield each `base.name` that is assigned or deleted, with the annotation of the base if any.

    Left out are writes on `self` and `cls`, on functions of the module, and on the `ctx: Any` that
    torch passes to autograd functions.
    """
    not_objects = {"self", "cls"} | {each.name for each in tree.body if isinstance(each, _Function)}

    def walk(
        node: ast.AST, scope: dict[str, ast.expr]
    ) -> Iterator[tuple[ast.Attribute, ast.expr | None]]:
        if isinstance(node, _Function):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            mine = {each.arg: each.annotation for each in every}
            scope = {**scope, **{name: each for name, each in mine.items() if each is not None}}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            scope[node.target.id] = node.annotation
        is_write = isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del))
        if is_write and (base := _dotted(node.value)) not in not_objects:
            annotation = scope.get(base)
            is_open = annotation is not None and _dotted(annotation) in ("Any", "object")
            if not (is_open and base == "ctx"):
                yield node, None if is_open else annotation
        for child in ast.iter_child_nodes(node):
            yield from walk(child, scope)

    yield from walk(tree, {})


def _declaring(classes: Sequence[Class], attribute: str) -> set[str]:
    """Return the packages in which these classes, or their bases, declare the attribute."""
    return {
        member.source.package
        for each in classes
        for member in each.family()
        if attribute in member.attributes
    }


def _without_defaults(node: ast.AST) -> Iterator[ast.AST]:
    skipped: list[ast.AST | None] = []
    if isinstance(node, ast.arguments):
        skipped += [*node.defaults, *node.kw_defaults]
    elif isinstance(node, ast.ClassDef):
        skipped += [each for each in node.body if isinstance(each, ast.AnnAssign)]
    elif isinstance(node, (ast.arg, ast.AnnAssign)):
        skipped.append(node.annotation)
    elif isinstance(node, _Function):
        skipped.append(node.returns)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        skipped.append(node.value)
    yield node
    for child in ast.iter_child_nodes(node):
        if child not in skipped:
            yield from _without_defaults(child)


def _length(function: _Function) -> int:
    first = function.body[0]
    is_documented = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    length = (function.end_lineno or function.lineno) - function.lineno + 1
    if is_documented:
        length -= (first.end_lineno or first.lineno) - first.lineno + 1
    return length
