"""What the text of a package says about its shape: modules, imports, classes, calls, writes, names.

Nothing is imported: the source is read with `ast`, so the counts hold for any folder of Python
files. A *package* here is a folder directly in the root, with all below it; a file directly in the
root is a package of its own. `__init__` files are left out of upward imports, because they only
pass names on: an import of a name from one counts as an import of the module that defines the name.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter
from io import TextIOWrapper
from pathlib import Path
from threading import Event, Thread

from torch import Tensor, nn
from torch.distributed import ProcessGroup, Store, Work
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.optim import Optimizer

__all__ = ["Class", "Source", "Tree", "num_statements", "read_names"]

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
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree; to find them takes longer than what most figures do with them."""
        return list(ast.walk(self.tree))


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
        is_protocol: Whether it only says what a class elsewhere has.
    """

    name: str
    source: Source
    node: ast.ClassDef
    bases: list[Class] = field(default_factory=list)
    methods: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    is_protocol: bool = False

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

    def all_attributes(self) -> set[str]:
        """Return the names of its attributes, inherited ones included."""
        return set[str]().union(*(each.attributes for each in self.family()))


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
        for node in self.sources[module].nodes:
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

    def upward_imports(self, order: Sequence[str]) -> list[str]:
        """Return imports of a package that comes later in the order, as `importer -> imported`.

        Packages that the order leaves out come last.
        """
        height = _heights(order)
        return [
            f"{module} -> {target}"
            for module, targets in self.imports().items()
            for target in sorted(targets)
            if height(self.sources[module].package) < height(self.sources[target].package)
        ]

    # Calls ---------------------------------------------------------------------------------------

    def upward_calls(self, order: Sequence[str]) -> list[str]:
        """Return uses of what only classes of later packages have, as `path:line use of owner`.

        A variable is typed `Any`, or as a protocol, where its class can't be imported. So types say
        nothing here, and the name decides: `base.name` is upward if all classes that declare `name`
        as a method or attribute, protocols aside, lie in later packages. Not seen are names that
        also a class further down or an object of `_FOREIGN` has, and calls of functions that a
        later package passed in. `self`, `ctx` and imported names are no bases.
        """
        height = _heights(order)
        owners: dict[str, set[str]] = {}
        for each in self.classes.values():
            for name in each.methods | each.attributes if not each.is_protocol else ():
                owners.setdefault(name, set()).add(each.source.package)
        found = []
        for source in self.sources.values():
            no_bases = {"self", "cls", "ctx", *_imported_names(source)}
            for node in source.nodes:
                name = node.attr if isinstance(node, ast.Attribute) else ""
                packages = owners.get(name, set()) if name not in _FOREIGN else set()
                if not packages or height(source.package) >= min(map(height, packages)):
                    continue
                if _dotted(node.value) not in no_bases:
                    owner = " or ".join(sorted(packages))
                    found.append(f"{source.path}:{node.lineno} {ast.unparse(node)} of {owner}")
        return found

    # Classes -------------------------------------------------------------------------------------

    def _read_classes(self) -> dict[tuple[str, str], Class]:
        classes: dict[tuple[str, str], Class] = {}
        for source in self.sources.values():
            for node in source.nodes:
                if isinstance(node, ast.ClassDef):
                    classes[source.module, node.name] = _read_class(source, node)
        for (module, _), each in classes.items():
            for base in each.node.bases:
                name = _dotted(base.value if isinstance(base, ast.Subscript) else base)
                found = self._named(classes, module, name)
                each.bases += [found] if found else []
                each.is_protocol |= name.rpartition(".")[2] == "Protocol"
        return classes

    def _named(self, classes: dict[tuple[str, str], Class], module: str, name: str) -> Class | None:
        """Return the class that a name in a module stands for, None if it is not of the tree."""
        head, _, rest = name.partition(".")
        target = self._imported[module].get(head, (module, head))
        if target[1] is None and rest:
            target = (target[0], rest)
        found = self._defining(target)
        return classes.get((found[0], found[1])) if found[1] is not None else None

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
            for node in source.nodes:
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

    def reading(self, names: Set[str]) -> list[str]:
        """Return where names are read, by themselves or as attributes, as `path:line name`."""
        return [
            f"{source.path}:{line} {name}"
            for source in self.sources.values()
            for line, name in _names(source)
            if name in names
        ]

    def functions(self) -> Iterator[tuple[str, int, _Function]]:
        """Yield each function, inner ones too, with its path and the line of its code object."""
        for source in self.sources.values():
            for node in source.nodes:
                if isinstance(node, _Function):
                    lines = [each.lineno for each in (node, *node.decorator_list)]
                    yield source.path, min(lines), node


def read_names(source: Source) -> set[str]:
    """Return the names that a file reads, imports, or spells in strings."""
    found = {name for _, name in _names(source)}
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def num_statements(node: ast.AST) -> int:
    """Return how many statements are within a node: no docstring, and no body of a function."""
    if isinstance(node, _Function):
        return 1
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    is_counted = isinstance(node, ast.stmt) and not is_docstring
    return is_counted + sum(map(num_statements, ast.iter_child_nodes(node)))


# Attributes of every tensor and module, which also some class of a tree may declare.
_TORCH_ATTRIBUTES = frozenset({"data", "grad", "requires_grad", "_local_tensor"})


# Names that objects of torch and Python have.
_FOREIGN = frozenset(
    name
    for each in (
        *(Tensor, nn.Module, Optimizer, ProcessGroup, Work, Store, nn.Module(), MetadataIndex("")),
        *(dict, list, set, str, deque, Exception, Event, Thread, TextIOWrapper, Path),
        Parameter,
    )
    for name in dir(each)
) | {"value"}  # of a member of an enum


def _heights(order: Sequence[str]) -> Callable[[str], int]:
    height = {package: index for index, package in enumerate(order)}
    return lambda package: height.get(package, len(order))


def _imported_names(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)


def _names(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes:
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.lineno, node.id


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
