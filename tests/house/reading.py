"""How much a reader of the plain path opens, and how far each option is spread over the core.

- *code lines of the core*: lines of its files with code on them: no docstrings, no comments, none
  that are empty.
- *plain path*: the core's files in which a function runs in the first step or in a warm one of a
  model that is sharded without any option (FULL_SHARD, one axis); and all their lines.
  `tests/house/steps.py` runs the steps.
- *files of* a feature: the core's files that have one of its words, `FEATURES`, among the
  identifiers of their code: names, attributes, arguments, keywords, functions, classes. Texts,
  comments and imports do not count: a file that only passes on or explains has no part in it. The
  words were found by reading the functions that handle the feature. They do not see a flag under
  another name, so a change that adds a name for a feature adds it to them.
- *options that the reading path imports*: imports, by a file of `READING_PATH`, of a module whose
  idea is an option or what only some programs do, `OPTION_MODULES`; through an `__init__` too.
- *bare branchy functions*: functions of the core with at least `MANY_BRANCHES` branches and no
  comment inside. A branch is an `if`, a loop, an `except`, an `a if b else c`, or a `case`, those
  of inner functions aside. So many of them stand in an order that matters; a comment says which
  line must come before which, and why.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Set

from tests.house.source import Source, Tree
from tests.house.steps import Entered

__all__ = [
    "FEATURES",
    "IMPORTED_OPTIONS",
    "OPTION_MODULES",
    "READING_PATH",
    "bare_branchy_functions",
    "files_of_features",
    "imported_options",
    "named_on_the_path",
    "num_code_lines",
    "plain_path",
]

MANY_BRANCHES = 6

# A word with a dot in front is one that only an attribute is.
FEATURES = {
    "flat form": r"shows_flat|flat_slot|Flat(Entry|Slot|Form|Place)|OriginalsAgain|\w+_FLAT|"
    r"FLAT_\w+|use_orig_params|\.flat|"
    r"(\w+_)?(show|hide|set|make)_(flat|originals)(_\w+)?",
    "pending gradients": r"is_unsynced|marks|PendingGradient|leave_unsynced|waits_for_reduction|"
    r"((un)?mark|forget|drop|hide|show)_pending(_\w+)?|pending_values|Postponed",
    "scopes": r"(is_)?in_scope|(\w+_)?scope(_params)?|Scope(Params)?|SCOPE(_FLAT)?",
    "buckets": r"(\w+_)?buckets?(_\w+)?|Buckets",
    "early hooks": r"(\w+_)?early(_hooks)?|EarlyHooks",
    "agreed order": r"(is_)?agreed|reduction_order|ReductionOrder|AgreedOrder|propose",
    "small group": r"(\w+_)?small_group|SmallGroup|KeptPart",
    "second stage": r"(copy_to_)?replicate(_group)?s|(\w+_)?second_stage|is_deferred|\.deferred|"
    r"(\w+_)?requires_all_reduce|TwoStageReduction",
    "launches": r"_?Launch\w*|MAX_LAUNCH_NBYTES|launch(es|ed)?|launched_\w+",
}

# The files that a newcomer reads, in this order, and the features that each still names: a file
# that names none must go on doing so, and a feature that has left a file leaves the list too.
READING_PATH: dict[str, set[str]] = {
    "construct/forming.py": {"flat form", "buckets"},
    "construct/build.py": set(),
    "layout/flat_layout.py": set(),
    "flat_param/handle.py": {"pending gradients"},
    "runtime/unit.py": set(),
    "runtime/forward.py": set(),
    "runtime/gathers.py": set(),
    "flat_param/readers.py": set(),
    "flat_param/full_values.py": set(),
    "comm/algorithms.py": set(),
    "flat_param/shown.py": {"scopes", "early hooks"},
    "flat_param/form.py": set(),
    "runtime/backward.py": set(),
    "flat_param/grad_pieces.py": set(),
    "flat_param/gradients.py": {"pending gradients", "second stage"},
    "runtime/reduction_queue.py": {"second stage"},
    "flat_param/gradient_reduction.py": {"second stage"},
    "runtime/backward_pass.py": set(),
    "tensor/flat_shard.py": set(),
}

# What a reader of the plain path need not know.
OPTION_MODULES = frozenset(
    {
        *("comm.hooks", "comm.host_group", "comm.wire", "construct.split_by_hand"),
        *("flat_param.extended_gathers", "flat_param.flat_form", "flat_param.host_gradient"),
        *("flat_param.kept_classes", "flat_param.owners", "flat_param.pending_gradients"),
        *("flat_param.precision", "flat_param.scope_params", "flat_param.scopes"),
        *("flat_param.two_stages", "flat_param.user_hooks", "layout.buckets"),
        "layout.ownership",
        *("runtime.bucket_windows", "runtime.buffer_broadcast", "runtime.casts"),
        *("runtime.early_hooks", "runtime.late_outputs", "runtime.meta_buffers"),
        *("runtime.postponed", "runtime.reduction_order", "runtime.reshard_policy"),
    }
)

# Which of them each file of the reading path still imports; as with the words, no further one.
IMPORTED_OPTIONS: dict[str, set[str]] = {
    "flat_param/handle.py": {"flat_param.user_hooks"},
    "runtime/reduction_queue.py": {"flat_param.user_hooks"},
}


def _comment_lines(source: Source) -> set[int]:
    """Return the lines with a comment; one for a tool explains nothing."""
    return {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline)
        if token.type == tokenize.COMMENT and not re.match(r"# (noqa|type:)", token.string)
    }


def num_code_lines(source: Source) -> int:
    """Return how many lines of a file have code on them."""
    skipped = {
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
        tokenize.ENDMARKER,
    }
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline)
        if token.type not in skipped
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in source.nodes:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring and isinstance(node.value.value, str):
            lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(lines)


def plain_path(tree: Tree, core: Set[str], entered: Entered) -> list[Source]:
    """Return the files of some packages in which a function of `entered` is."""
    paths = {path for path, _, _ in entered}
    return [each for each in tree.sources.values() if each.package in core and each.path in paths]


def files_of_features(tree: Tree, core: Set[str]) -> dict[str, list[str]]:
    """Return the files that handle each feature, and by which words they were found."""
    found: dict[str, list[str]] = {name: [] for name in FEATURES}
    for source in tree.modules:
        words = set(_identifiers(source)) if source.package in core else set[str]()
        for name, pattern in FEATURES.items():
            if hits := sorted(word for word in words if re.fullmatch(pattern, word)):
                found[name].append(f"{source.path}: {', '.join(hits)}")
    return found


def named_on_the_path(tree: Tree, core: Set[str]) -> dict[str, set[str]]:
    """Return the features that each file of `READING_PATH` names, in its order."""
    features = files_of_features(tree, core).items()
    return {
        path: {name for name, files in features if any(each.startswith(path) for each in files)}
        for path in READING_PATH
    }


def imported_options(tree: Tree, paths: Iterable[str], options: Set[str]) -> dict[str, set[str]]:
    """Return which of some modules each file imports, of the files that import any."""
    needs = {
        tree.sources[module].path: {target.removeprefix(f"{tree.name}.") for target in targets}
        for module, targets in tree.imports().items()
    }
    return {path: found for path in paths if (found := needs[path] & options)}


def _identifiers(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield from (node.attr, f".{node.attr}")
        elif isinstance(node, (ast.arg, ast.keyword)):
            yield node.arg or ""
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name


_BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)


def _num_branches(node: ast.AST) -> int:
    inner = (
        each
        for each in ast.iter_child_nodes(node)
        if not isinstance(each, (ast.FunctionDef, ast.Lambda, ast.ClassDef))
    )
    return sum(isinstance(each, _BRANCHES) + _num_branches(each) for each in inner)


def bare_branchy_functions(tree: Tree, core: Set[str]) -> list[str]:
    """Return functions with many branches and no comment, as `path:line name: branches`."""
    found = []
    for source in tree.modules:
        if source.package not in core:
            continue
        comments = _comment_lines(source)
        for node in source.nodes:
            if not isinstance(node, ast.FunctionDef):
                continue
            num = _num_branches(node)
            is_bare = comments.isdisjoint(range(node.lineno, (node.end_lineno or 0) + 1))
            if num >= MANY_BRANCHES and is_bare:
                found.append(f"{source.path}:{node.lineno} {node.name}: {num}")
    return found
