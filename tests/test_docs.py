"""What the README and the pages in docs/ print can be run, and what they link to is there."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import os
import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import composable_shard
from composable_shard import fully_shard, planning, save_safetensors, shard_model
from composable_shard.options import UnitOptions
from tests.harness.ranks import run_processes, run_ranks
from tests.test_public_names import BELOW, FSDP2
from tests.test_tutorials import _run_forked, _run_here, assert_prints

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings the same under its old name
    import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
INDEX = ROOT / "docs" / "index.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTES = sorted(
    path for name in ("benchmarks", "tests", "findings") for path in (ROOT / name).rglob("*.md")
)
COMMANDS = ("make", "python", "pytest", "torchrun", "pip")


@dataclass(frozen=True)
class _CodeBlock:
    """One block of code, fenced or indented, as a reader would copy it."""

    page: Path
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def program(self) -> str | None:
        """The file name in the first line, where the block is a complete program."""
        found = re.match(r"# (\w+\.py)\b", self.code)
        return found[1] if found and self.language == "python" else None


_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?:    .*\n)+")


@cache
def _blocks(page: Path) -> list[_CodeBlock]:
    """Return the blocks of the page in order; indented ones are commands."""
    text = page.read_text() + "\n"
    found = [(match.start(), match[1], match[2]) for match in _FENCED.finditer(text)]
    prose = _FENCED.sub(lambda match: re.sub(r"[^\n]", "x", match[0]), text)
    for match in _INDENTED.finditer(prose):
        found.append((match.start(), "bash", re.sub(r"(?m)^    ", "", match[0])))
    return [
        _CodeBlock(page, text.count("\n", 0, start) + 1, language, code)
        for start, language, code in sorted(found)
    ]


def _all_blocks(language: str) -> list[_CodeBlock]:
    return [block for page in PAGES for block in _blocks(page) if block.language == language]


def _commands(page: Path) -> list[list[str]]:
    """Return the commands in blocks, and those within a sentence."""
    texts = [block.code for block in _blocks(page) if block.language == "bash"]
    quoted = re.findall(r"`([^`\n]+)`", _FENCED.sub("", page.read_text()))
    texts += [code for code in quoted if re.match(rf"({'|'.join(COMMANDS)}) \S", code)]
    lines = [line for text in texts for line in text.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


PROGRAMS = [block for block in _all_blocks("python") if block.program]


def test_every_block_of_the_readme_is_run() -> None:
    """A block is a program, the difference between two, commands, or what a program prints."""
    for block in _blocks(README):
        is_run = block.program or block.language in ("bash", "text", "diff")
        assert is_run, f"{block} is not run"
    for name in (block.program for block in _blocks(README) if block.program):
        assert any(name in words for words in _commands(README)), f"no command runs {name}"


def _num_ranks(command: list[str]) -> int:
    """Return on how many ranks a line starts its program."""
    if command[0] == "python":
        return 1
    return int(command[command.index("--nproc-per-node") + 1])


RUNS = [
    (words, block)
    for block in PROGRAMS
    for words in _commands(block.page)
    if block.program in words
]


@pytest.mark.parametrize(("command", "block"), RUNS, ids=[shlex.join(words) for words, _ in RUNS])
def test_program_runs_as_printed(command: list[str], block: _CodeBlock, tmp_path: Path) -> None:
    """Each program runs as each command on its page says, and its loss falls."""
    assert block.program is not None
    script = tmp_path / block.program
    script.write_text(block.code)
    if command[0] == "torchrun":
        output = _run_forked(script, _num_ranks(command), tmp_path)
    else:
        [(code, output)] = run_processes([{}], _run_here, script, [], tmp_path)
        assert code == 0, output
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", output)]
    assert losses[-1] < losses[0], output
    if _num_ranks(command) == 2:
        printed = [other.code for other in _blocks(block.page) if other.language == "text"]
        assert_prints(output.splitlines(), "".join(printed).splitlines())


def _run_without_accelerator(script: Path, folder: Path) -> tuple[int, str]:
    """Run the script where torch is built for CUDA, and no device is there."""

    def compiled_in(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    torch.accelerator.current_accelerator = compiled_in
    return _run_here(script, [], folder)


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_program_runs_where_the_accelerator_is_absent(block: _CodeBlock, tmp_path: Path) -> None:
    """`pip install torch` gives a build for CUDA on machines without a GPU too."""
    assert block.program is not None
    script = tmp_path / block.program
    script.write_text(block.code)
    [(code, output)] = run_processes([{}], _run_without_accelerator, script, tmp_path)
    assert code == 0, output


README_DIFFS = [block for block in _blocks(README) if block.language == "diff"]
PORTED = [block for block in _all_blocks("diff") if block.page != README]
NEED_CUDA = ("from_fairscale.py", "from_megatron.py")


def _side(block: _CodeBlock, sign: str, folder: Path) -> Path:
    """Write one side of a diff."""
    script = folder / {"-": "old.py", "+": "new.py"}[sign]
    lines = [line[1:] for line in block.code.splitlines() if line[:1] in ("", " ", sign)]
    script.write_text("\n".join(lines))
    return script


def _is_installed(script: Path) -> bool:
    names = re.findall(r"(?m)^(?:from|import) (\w+)", script.read_text())
    return all(importlib.util.find_spec(name) for name in names)


def _text_after(block: _CodeBlock) -> str:
    """Return the text blocks that follow a diff on its page."""
    after = block.page.read_text().split(block.code)[1]
    found = _FENCED.findall(after.removeprefix("```\n") + "\n")
    return "".join(text for language, text in found if language == "text")


@pytest.mark.parametrize("block", PORTED, ids=lambda block: block.code.split()[1])
def test_both_sides_of_a_ported_program_print_the_same(block: _CodeBlock, tmp_path: Path) -> None:
    """They train alike on two ranks; of what is not installed the page has the losses."""
    losses = _printed_losses(_run_forked(_side(block, "+", tmp_path), 2, tmp_path))
    assert losses[-1] < losses[0]
    shown, old = _printed_losses(_text_after(block)), _side(block, "-", tmp_path)
    can_run = _is_installed(old) and old.read_text().split()[1] not in NEED_CUDA
    assert shown or can_run, "nothing to compare with"
    if shown:
        assert [losses[0], losses[-1]] == pytest.approx(shown, abs=1e-4)
    if can_run:
        assert _printed_losses(_run_forked(old, 2, tmp_path)) == pytest.approx(losses, abs=1e-4)


def test_the_differences_of_the_readme_change_no_loss(tmp_path: Path) -> None:
    """The plain loop with the new lines, on one rank; FSDP2's import line is that of its page."""
    plain, port = README_DIFFS
    sides = [_side(plain, sign, tmp_path) for sign in "-+"]
    outputs = [run_processes([{}], _run_here, side, [], tmp_path)[0][1] for side in sides]
    losses = [_printed_losses(output) for output in outputs]
    assert len(losses[0]) == 10
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    for line in port.code.splitlines():
        start, _, names = line.partition(" import ")
        page = (ROOT / "docs" / "moving_from_fsdp2.md").read_text()
        assert re.search(rf"(?m)^{re.escape(start)} import .*\b{names}$", page)


def _printed_losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"(?m)^step \d+ loss (\S+)$", text)]


class _ExpertLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.experts = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.down(self.up(x).relu()))


class _Transformer(nn.Module):
    """The model that the blocks of the pages speak of."""

    def __init__(self, config: object = None) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(_ExpertLayer() for _ in range(3))
        self.head = nn.Linear(8, 16)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.layers

    def encode(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for layer in self.layers:
            x = layer(x)
        return x

    generate = encode

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


def _names_of_a_reader(is_sharded: bool) -> dict[str, Any]:
    """Return what the blocks use and do not define: public names, a model, its optimizer."""
    names = {name: getattr(composable_shard, name) for name in composable_shard.__all__}
    names |= {name: getattr(planning, name) for name in planning.__all__}
    mesh = init_device_mesh("cpu", (1, 1, 1, 2), mesh_dim_names=("dp", "pp", "efsdp", "ep"))
    model, other, x = _Transformer(), _Transformer(), torch.arange(6).view(2, 3)
    if is_sharded:
        fully_shard(model)
        fully_shard(other)
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    block, bf16_block, expert_mesh = nn.Linear(8, 8), nn.Linear(8, 8).bfloat16(), mesh["efsdp"]
    names |= {"layer": _ExpertLayer(), "part": _Transformer(), "index": 0, "num_stages": 1}
    names |= {
        "device": torch.device("cpu"),
        "loss_fn": nn.functional.mse_loss,
        "other_model": other,
    }
    names |= {"rank": dist.get_rank(), "world_size": 2, "step": 1, "batch": x, "config": None}
    names |= {"torch": torch, "Transformer": _Transformer, "build_model": _Transformer}
    here = locals()
    kept = ("mesh", "model", "x", "optimizer", "scheduler", "block", "bf16_block", "expert_mesh")
    return {**names, "Layer": _ExpertLayer, **{name: here[name] for name in kept}}


def _run_block(code: str, folder: Path) -> None:
    """Run a block, made smaller, as one rank of two; alternatives for one model get one each."""
    os.chdir(folder)
    names = _names_of_a_reader(not re.search(r"\b(fully_shard|shard_model)\(", code))
    if dist.get_rank() == 0:
        torch.save(_Transformer().state_dict(), "model.pt")
    save_safetensors(fully_shard(_Transformer()), "downloaded-model")
    for statement in ast.parse(code.replace("(2, 8)", "(1, 2)").replace("_000_000", "")).body:
        if ast.unparse(statement).startswith("shard_model("):
            names["model"] = _Transformer()
        exec(compile(ast.Module([statement], []), "page", "exec"), names)
    if "save" in names:
        names["save"].wait()


# Of libraries that CI does not install: `python -m tests.ecosystem` runs such programs.
FOREIGN = (
    "transformers",
    "torchao",
    "lightning",
    "LightningModule",
    "fsdp2.install",
    "iter_merged",
)
PIECES = [
    block
    for block in _all_blocks("python")
    if not block.program and not any(name in block.code for name in FOREIGN)
]


@pytest.mark.parametrize("block", PIECES, ids=str)
def test_python_block_runs(block: _CodeBlock, tmp_path: Path) -> None:
    """On two ranks, with the names that its page speaks of."""
    run_ranks(2, _run_block, block.code, tmp_path)


REFERENCE = ROOT / "docs" / "reference.md"


def test_each_public_name_has_an_example() -> None:
    """Each stands in a heading or a sentence of the reference, and in an example, which is run."""
    others, _, fsdp2s = REFERENCE.read_text().partition("## FSDP2's names")
    public = {*composable_shard.__all__, *(name for names in BELOW.values() for name in names)}
    returned = {"DescribedUnit", "Description", "ShardingPlan", "FlatShard"}  # what calls return
    for text, names in [(others, public), (fsdp2s, {*FSDP2})]:
        named = set(re.findall(r"`(\w+)`", _FENCED.sub("", text)))
        code = "".join(match[2] for match in _FENCED.finditer(text))
        assert names - named == set()
        assert {name for name in names - returned if not re.search(rf"\b{name}\b", code)} == set()


def _entries_by_anchor() -> dict[str, str]:
    """Return the text of each entry of the reference by the anchor of its heading."""
    found = re.findall(r"(?ms)^### (.*?)$(.*?)(?=^##|\Z)", REFERENCE.read_text())
    return {re.sub(r"[^\w-]", "", name.lower().replace(" ", "-")): text for name, text in found}


def test_entries_of_the_reference_and_guides_link_to_each_other() -> None:
    """Each entry names a guide, and each guide that it names links to it."""
    for anchor, text in _entries_by_anchor().items():
        guides = re.findall(r"\]\((\w+\.md)", text)
        assert guides, f"no guide explains {anchor}"
        for guide in guides:
            page = (ROOT / "docs" / guide).read_text()
            assert f"](reference.md#{anchor})" in page, f"{guide} does not link to {anchor}"


@pytest.mark.parametrize("block", _all_blocks("python"), ids=str)
def test_python_block_is_valid(block: _CodeBlock) -> None:
    """It compiles, and what it imports from the package exists."""
    tree = ast.parse(block.code, str(block))
    compile(tree, str(block), "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("composable_shard"):
            if node.module == "composable_shard.lightning":
                pytest.importorskip("lightning", reason="needs lightning")
            module = importlib.import_module(node.module or "")
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            assert not missing, f"{block} imports {missing} from {node.module}"


MOVING_OVER = sorted((ROOT / "docs").glob("moving_from_*.md"))


def _new_names() -> list[str]:
    """Return the code in the second column of each table, where what to write here stands."""
    text = "".join(page.read_text() for page in MOVING_OVER)
    rows = re.findall(r"(?m)^\| .*? \| (.*?) \|", text)
    return sorted({code for cell in rows for code in re.findall(r"`([^`]+)`", cell)})


def _check_expression(node: ast.expr) -> object:
    """Return what a public name stands for; check the calls in it."""
    if isinstance(node, ast.Attribute):
        return getattr(_check_expression(node.value), node.attr)
    if isinstance(node, ast.Name):
        packages = [package for package, names in BELOW.items() if node.id in names]
        assert packages or node.id in composable_shard.__all__, f"{node.id} is not public"
        module = ".".join(["composable_shard", *packages])
        return getattr(importlib.import_module(module), node.id)
    assert isinstance(node, ast.Call), ast.unparse(node)
    called = _check_expression(node.func)
    assert callable(called)
    names = {keyword.arg for keyword in node.keywords}
    known = set(inspect.signature(called).parameters)
    for options in (called, *([UnitOptions] if called is shard_model else [])):
        if dataclasses.is_dataclass(options):
            known |= {field.name for field in dataclasses.fields(options)}
    assert names <= known, f"{ast.unparse(node)}: {called} has {sorted(known)}"
    for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
        if isinstance(argument, ast.Call):
            _check_expression(argument)
    return called


@pytest.mark.parametrize("code", _new_names())
def test_new_names_exist(code: str) -> None:
    """What to write instead of another library's name is a public name, with these arguments."""
    _check_expression(ast.parse(code, mode="eval").body)


def _old_names(library: str) -> set[str]:
    """Return the names in the first column of the tables of the page about another library."""
    text = (ROOT / "docs" / f"moving_from_{library.lower()}.md").read_text()
    cells = re.findall(r"(?m)^\| (.*?) \|", text)
    return {
        name for cell in cells for code in re.findall(r"`(.*?)`", cell) for name in _words(code)
    }


def _words(code: str) -> set[str]:
    return {word for word in re.findall(r"\w+", code) if not word.startswith("_")}


def _names_of_torch(*kinds: Any) -> set[str]:
    """Return the public methods, fields and arguments that are declared in classes."""
    names = set()
    for kind in kinds:
        names |= {*vars(kind)} if inspect.isclass(kind) else set()
        names |= {*inspect.signature(kind).parameters} - {"module", "state", "args", "kwargs"}
    return {name for name in names if not name.startswith("_")} - {"forward"}


def test_each_name_of_torch_has_a_place() -> None:
    """Every public name, method and argument of FSDP2 and FSDP1 stands in the first column."""
    fsdp2 = {"FSDPModule", "UnshardHandle", "register_fsdp_forward_method", "share_comm_ctx"}
    fsdp2 |= {"CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy", "DataParallelMeshDims"}
    arguments = _names_of_torch(fsdp.FSDPModule, fsdp.fully_shard, fsdp.CPUOffloadPolicy)
    assert fsdp2 | arguments <= _old_names("FSDP2")
    kinds = (fsdp.FullyShardedDataParallel, fsdp.MixedPrecision, fsdp.CPUOffload)
    kinds += (fsdp.FullStateDictConfig,)
    assert _names_of_torch(*kinds) <= _old_names("FSDP1")
    formats = {name for name in fsdp.__all__ if name.endswith(("Config", "Settings", "KeyType"))}
    known = fsdp2 | formats | {"fully_shard", "FlatParameter"} | _old_names("FSDP1")
    known |= {"GradientReductionHandle"} & _old_names("FSDP2")  # since torch 2.15
    assert {*fsdp.__all__} <= known


def _make_targets() -> set[str]:
    return set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text()))


def _missing_of(words: list[str]) -> str | None:
    """Return what a command needs and the repository lacks."""
    if words[0] == "make":
        target = words[1]
        return None if target in _make_targets() else f"the target {target}"
    if words[0] == "pip":
        return None if words[1] == "install" else f"pip {words[1]}"
    if words[:2] == ["pytest", "-m"]:
        config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
        markers = [each.partition(":")[0] for each in config["ini_options"]["markers"]]
        return None if words[2] in markers else f"the marker {words[2]}"
    if "-m" in words and words[0] == "python":
        path = words[words.index("-m") + 1].replace(".", "/")
        path += "/__main__.py" if (ROOT / path).is_dir() else ".py"
    else:
        path = next(word for word in words if word.endswith(".py"))
    is_printed = path in [block.program for block in PROGRAMS]
    return None if is_printed or (ROOT / path).is_file() else path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_name_what_exists(page: Path) -> None:
    """The targets of `make`, scripts, modules and tests that a page names are there."""
    for words in _commands(page):
        assert words[0] in COMMANDS, f"{page.name}: {shlex.join(words)} is checked by nothing"
        assert (missing := _missing_of(words)) is None, f"{page.name}: {missing} does not exist"
    for path in re.findall(r"`((?:benchmarks|docs|tests|tutorials)/[\w./]+)", page.read_text()):
        assert (ROOT / path).exists(), f"{page.name}: {path} does not exist"


def _anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives the page's headings."""
    headings = re.findall(r"(?m)^#+ (.*)", _FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _links(page: Path) -> list[str]:
    prose = re.sub(r"`[^`\n]*`", "", _FENCED.sub("", page.read_text()))
    return [link for link in re.findall(r"\]\(([^()\s]+)\)", prose) if "://" not in link]


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Files and headings that a page links to exist."""
    for link in _links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in _anchors(target), f"{page.name} links to {link}"


def test_the_architecture_names_modules_that_exist() -> None:
    """Each `package/module.py` on that page is a file of the package, or of the repository."""
    names = re.findall(r"`([a-z_]+/[a-z_]+\.py)`", (ROOT / "docs/architecture.md").read_text())
    assert len(names) > 8
    assert not [
        n for n in names if not (ROOT / "composable_shard" / n).exists() | (ROOT / n).exists()
    ]


def test_every_page_is_in_the_index() -> None:
    """One link to each page, and nothing twice."""
    pages = sorted(link for link in _links(INDEX) if "/" not in link)
    found = {page.name for page in PAGES[2:]} - {INDEX.name}
    assert pages == sorted(found)


def test_the_readme_is_short() -> None:
    """It is a front page; manuals are in docs/."""
    assert len(README.read_text().splitlines()) <= 130
    assert max(len(block.code.splitlines()) for block in _blocks(README)) <= 35


def test_figures_of_the_readme_are_in_the_files_they_link_to() -> None:
    """Each figure of "Why" stands in its results file and on the page of all figures."""
    page = (ROOT / "docs" / "measured.md").read_text()
    section = README.read_text().partition("## Why\n")[2].partition("\n## ")[0]
    claims = re.findall(r"(?ms)^- .*?(?=^- |^$)", section)
    assert len(claims) == 3
    for claim in claims:
        links = re.findall(r"\]\((benchmarks/results/[^)]+)\)", claim)
        texts = [(ROOT / link).read_text() for link in links]
        measured = {figure for text in texts for figure in re.findall(r"\d+(?:\.\d+)?", text)}
        figures = re.findall(r"\d+(?:\.\d+)?", re.sub(r"\]\(.*?\)", "", claim))
        assert [figure for figure in figures if figure not in measured] == []
        assert [figure for figure in figures if not re.search(rf"\b{figure}\b", page)] == []


def test_each_no_of_the_readme_has_a_source() -> None:
    """Each row of its table in which a peer lacks something is in the list of sources."""
    table = README.read_text().partition(" | here |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")] for row in table.splitlines()[2:]]
    lacking = [row[1] for row in rows if any(cell.startswith("no") for cell in row[3:7])]
    sources = (ROOT / "docs" / "measured.md").read_text().partition("## Sources")[2]
    assert len(lacking) > 5
    for name in lacking:
        plain = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", name)
        assert re.search(rf"(?m)^\| {re.escape(plain)} \|.*https://", sources), plain


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_short(page: Path) -> None:
    """A reader who reads once gets to the end of each; tables and code aside."""
    prose = re.sub(r"\]\([^)]*\)", "]", _FENCED.sub("", page.read_text()))
    prose = "\n".join(line for line in prose.splitlines() if line[:1] not in ("|", "#"))
    for paragraph in re.split(r"\n\s*\n|\n(?=- |\d\. )", prose):
        for sentence in re.split(r"(?<=[.:!?;])\s+", paragraph):
            assert len(sentence.split()) <= 45, sentence


def test_the_changelog_is_short() -> None:
    """It has what a user of the last release needs."""
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 140


def test_metadata_is_complete() -> None:
    """A builder reads the version from the source, and finds the README and every package."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, build = config["project"], config["tool"]["setuptools"]
    assert project["dynamic"] == ["version"]
    assert build["dynamic"]["version"] == {"attr": "composable_shard.__version__"}
    tree = ast.parse((ROOT / "composable_shard" / "__init__.py").read_text())
    [version] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert version == composable_shard.__version__
    assert (ROOT / project["readme"]).is_file()
    assert build["packages"]["find"]["include"] == ["composable_shard*"]
    assert {"keywords", "classifiers", "authors", "urls"} <= set(project)
    assert all(url.startswith("https://") for url in project["urls"].values())


def test_the_sdist_holds_what_the_tests_need() -> None:
    """MANIFEST.in names every folder of sources; what it names exists."""
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    named = {words[0]: set(words[1:]) for words in lines}
    folders = {path.parent.name for path in ROOT.glob("[!.]*/*.py")} - {"composable_shard"}
    assert {line[1] for line in lines if line[0] == "graft"} == folders
    assert all((ROOT / name).is_file() for name in named["include"])
