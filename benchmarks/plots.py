"""Pictures of the documentation: what lies where, and what happens in a step.

    python -m benchmarks.plots idea        # what four ranks hold of each unit, from rest to rest
    python -m benchmarks.plots strategies  # what a rank holds at rest under each strategy
    python -m benchmarks.plots layout      # the flat parameter of a unit over four ranks
    python -m benchmarks.plots memory      # bytes held in a step, beside FSDP2; needs gcc
    python -m benchmarks.plots timeline    # gathers and reductions of a step beside its compute
    python -m benchmarks.plots overlap     # the same on an accelerator of threads, beside FSDP2's
    python -m benchmarks.plots peers       # step time and memory beside others, from results/

Each writes docs/pictures/NAME.png, or `--output FILE` in the format of the file's name.
Needs matplotlib: `pip install '.[plot]'`. Colours differ in lightness, and what lies side by side
in hatching too, so that pictures can be printed in grey and read by the colour-blind.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import malloc_counter, peers
from benchmarks.communication import overlap as device_overlap
from benchmarks.memory import step as memory
from benchmarks.memory.formulas import Sizes
from benchmarks.ranks import run_ranks
from composable_shard import FlatShard, ShardingStrategy, estimate, fully_shard
from composable_shard.layout import FlatLayout, balance
from composable_shard.planning import by_class
from tests.common import device
from tests.common.models import CONFIGS, Llama, make_batch, make_llama

ROOT = Path(__file__).resolve().parents[1]
DARK, MIDDLE, LIGHT, PALE = "#16325c", "#3f7fbf", "#e8a33d", "#f3e3c3"  # by lightness
GREY = "#d9d9d9"


# --- the flat parameter of a unit ---


@dataclass(frozen=True)
class Piece:
    """What lies in `[start, end)` of a flat parameter: a rank's part of a parameter, or padding."""

    start: int
    end: int
    rank: int
    label: str


# A small transformer layer of width 6, in the order in which it registers its parameters.
SHAPES = {"norm": (6,), "qkv": (18, 6), "out": (6, 6), "up": (24, 6), "down": (6, 24)}
NUM_RANKS, ALIGNMENT = 4, 4  # elements of fp32 in 16 bytes


def lay_out(granularity: str) -> tuple[list[str], FlatLayout]:
    """Return the parameters of the small layer in order, and their layout."""
    names = list(SHAPES)
    numels = [torch.Size(SHAPES[name]).numel() for name in names]
    if granularity == "param":
        owners = balance(numels, NUM_RANKS)
        order = sorted(range(len(names)), key=lambda index: owners[index])
        names = [names[index] for index in order]
        numels = [numels[index] for index in order]
        layout = FlatLayout.plan(numels, NUM_RANKS, ALIGNMENT, owners=sorted(owners))
        return names, layout
    rows = [torch.Size(SHAPES[name][1:]).numel() for name in names]
    blocks = rows if granularity == "row" else ()
    return names, FlatLayout.plan(numels, NUM_RANKS, ALIGNMENT, blocks=blocks)


def pieces(names: Sequence[str], layout: FlatLayout) -> list[Piece]:
    """Return what lies in the flat parameter, in order."""
    found = []
    for rank in range(layout.world_size):
        for index, name in enumerate(names):
            start, end = layout.world_range(index, rank)
            if start < end:
                found.append(Piece(start, end, rank, name))
        low, high = layout.shard_range(rank)
        for start, end in layout.padding_ranges():
            start, end = max(start, low), min(end, high)
            if start < end:
                found.append(Piece(start, end, rank, ""))
    return sorted(found, key=lambda piece: piece.start)


def draw_layout(plot: Any) -> Any:
    """Draw the small layer's flat parameter, cut for each granularity."""
    kinds = ("element", "row", "param")
    titles = {
        "element": '"element": equal shards, cut anywhere',
        "row": '"row": no cut inside a row, so shards differ by up to a row',
        "param": '"param": whole parameters, each on one rank',
    }
    figure, axes = plot.subplots(len(kinds), 1, figsize=(8, 4), layout="constrained")
    colours = dict(zip(SHAPES, (DARK, MIDDLE, LIGHT, PALE, "#7fb8a4"), strict=True))
    for axis, kind in zip(axes, kinds, strict=True):
        names, layout = lay_out(kind)
        for piece in pieces(names, layout):
            width = piece.end - piece.start
            colour = colours.get(piece.label, "white")
            style = {} if piece.label else {"hatch": "xxxx"}
            axis.barh(0, width, 1, piece.start, color=colour, edgecolor="black", lw=0.6, **style)
            if width > 22:
                tone = "white" if colour in (DARK, MIDDLE) else "black"
                axis.text(
                    piece.start + width / 2, 0, piece.label, ha="center", va="center", color=tone
                )
        for rank in range(NUM_RANKS):
            start, end = layout.shard_range(rank)
            axis.plot([start, start], [-0.75, 0.75], color="black", lw=2.2)
            text = f"rank {rank}: {end - start}"
            axis.text((start + end) / 2, -0.95, text, ha="center", va="center")
        axis.plot([layout.span] * 2, [-0.75, 0.75], color="black", lw=2.2)
        axis.set(xlim=(-4, 450), ylim=(-1.2, 0.8), yticks=[])
        axis.set_title(titles[kind], loc="left", fontsize=10)
        axis.spines[:].set_visible(False)
        axis.set_xticks([])
    figure.suptitle("One flat parameter over four ranks, cut by granularity", fontweight="bold")
    figure.supxlabel(
        "elements of the flat parameter, to scale; thick lines: cuts; crossed: padding; "
        "the smallest is the norm's weight",
        fontsize=9,
    )
    return figure


# --- what ranks hold of each unit ---

UNITS = ("embedding", "layer 0", "layer 1", "layer 2", "head")
MOMENTS = {
    "at rest": "at rest",
    "forward 2": "forward of layer 1",
    "backward 2": "backward of layer 1",
    "step": "optimizer step",
}


def record_units(rank: int) -> dict[str, list[bool]]:
    """Return for each moment of a step of `FULL_SHARD` which units show full parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in UNITS))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    found: dict[str, list[bool]] = {}

    def record(moment: str) -> None:
        found[moment] = [not isinstance(layer.weight, FlatShard) for layer in model]

    def inside(module: nn.Module, inputs: object) -> None:
        record("forward 2")

    model[2].register_forward_pre_hook(inside)
    model[2].register_full_backward_hook(lambda *_: record("backward 2"))
    optimizer = torch.optim.AdamW(model.parameters())
    record("at rest")
    model(torch.randn(2, 8, requires_grad=True)).sum().backward()
    record("step")
    optimizer.step()
    return found


def draw_idea(plot: Any) -> Any:
    """Record a step on four ranks, and draw who holds what at each of its moments."""
    return draw_idea_of(plot, run_ranks(NUM_RANKS, record_units))


def draw_idea_of(plot: Any, full: dict[str, list[bool]]) -> Any:
    """Draw one panel for each moment: ranks from top to bottom, units from left to right."""
    figure, axes = plot.subplots(
        1, len(MOMENTS), figsize=(11, 2.9), sharey=True, layout="constrained"
    )
    for axis, (moment, title) in zip(axes, MOMENTS.items(), strict=True):
        for unit, is_full in enumerate(full[moment]):
            for rank in range(NUM_RANKS):
                width = 0.92 / NUM_RANKS
                axis.barh(-rank, 0.92, 0.8, unit, color="white", edgecolor=GREY, lw=0.8)
                if is_full:
                    axis.barh(-rank, 0.92, 0.8, unit, color=LIGHT)
                axis.barh(-rank, width, 0.8, unit + rank * width, color=DARK)
        axis.set(xlim=(-0.1, len(UNITS)), title=title)
        axis.set_xticks([unit + 0.46 for unit in range(len(UNITS))], UNITS, rotation=35, ha="right")
        axis.set_yticks([-rank for rank in range(NUM_RANKS)], [f"rank {r}" for r in range(4)])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    figure.suptitle("FULL_SHARD: each rank keeps a quarter of every unit", fontweight="bold")
    figure.supxlabel(
        "dark: the rank's own shard, with its gradient and optimizer state; "
        "light: full parameters, while the unit computes",
        fontsize=9,
    )
    return figure


def draw_strategies(plot: Any) -> Any:
    """Draw what one of four ranks holds at rest, from `estimate`."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    total = sum(param.nbytes for param in model.parameters())
    plans = {each.name: {"strategy": each} for each in ShardingStrategy}
    plans["FULL_SHARD,\nmesh (2, 2)"] = {"mesh_shape": (2, 2)}
    figure, axis = plot.subplots(figsize=(8, 3.2), layout="constrained")
    kinds = {"parameters": (MIDDLE, ""), "gradients": (LIGHT, "//"), "optimizer state": (PALE, "")}
    for row, options in enumerate(plans.values()):
        shape = {} if "mesh_shape" in options else {"world_size": NUM_RANKS}
        plan = estimate(model, rules=by_class(nn.Linear), **shape, **options)
        held = (plan.parameter_nbytes, plan.gradient_nbytes, plan.optimizer_nbytes)
        left = 0.0
        for (kind, (colour, hatch)), nbytes in zip(kinds.items(), held, strict=True):
            width = nbytes / total
            axis.barh(
                -row,
                width,
                0.7,
                left,
                color=colour,
                hatch=hatch,
                edgecolor="black",
                lw=0.6,
                label=kind if row == 0 else None,
            )
            left += width
        axis.text(left + 0.04, -row, f"{left:.2f} P", va="center")
    axis.set_yticks([-row for row in range(len(plans))], list(plans))
    axis.tick_params(axis="y", length=0)
    axis.set(xlim=(0, 4.6), xlabel="bytes of one of four ranks, in P (bytes of all parameters)")
    axis.legend(loc="upper right")
    axis.spines[["right", "top"]].set_visible(False)
    figure.suptitle("Held at rest, after a backward, with AdamW", fontweight="bold")
    return figure


# --- memory over a step ---

PHASES = ("forward", "backward", "optimizer step", "zero_grad")
Samples = list[tuple[float, int]]  # the phase's number and the part of it that is over; bytes


@contextmanager
def _sampling(samples: list[tuple[float, int]]) -> Any:
    """Append the time and the most bytes held since the last sample, often."""
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.is_set():
            malloc_counter.restart_peak()
            time.sleep(0.0005)
            samples.append((time.perf_counter(), malloc_counter.peak_nbytes()))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def place(samples: Iterable[tuple[float, int]], marks: Sequence[float]) -> Samples:
    """Replace times by phases: half of the second one is over at 1.5.

    Args:
        samples: Times and bytes.
        marks: When the phases began, and when the last one ended.
    """
    found = []
    for moment, nbytes in samples:
        for number, (start, end) in enumerate(pairwise(marks)):
            if start <= moment < end:
                found.append((number + (moment - start) / (end - start), nbytes))
    return found


def sample_step(rank: int, model_name: str, peer: str) -> Samples:
    """Return what a warm step of rank 0 holds, beyond what the process held before the model."""
    sys.setswitchinterval(0.0002)  # the sampler's turn
    memory.train(model_name, "bare", rank, 1)
    memory.train("micro", peer, rank, 1)
    start = malloc_counter.held_nbytes()
    model = peers.build(peer, make_llama(model_name))
    optimizer = peers.make_optimizer(peer, model)
    batch = make_batch(model_name, rank)
    for _ in range(2):
        memory.train_step(model, optimizer, batch)
    samples: list[tuple[float, int]] = []
    marks = []
    with _sampling(samples):
        marks.append(time.perf_counter())
        loss = model(*batch)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        optimizer.step()
        marks.append(time.perf_counter())
        optimizer.zero_grad()
        time.sleep(0.02)  # what is held when it is over
        marks.append(time.perf_counter())
    return [(moment, nbytes - start) for moment, nbytes in place(samples, marks)]


def peak_terms(sizes: Sizes, peak_nbytes: int) -> dict[str, float]:
    """Return what is held at the peak of a `FULL_SHARD` step of two ranks, from the bottom."""
    terms = {
        "parameters' shards": sizes.total / 2,
        "AdamW's two moments": sizes.total,
        "gradients' shards of\nreduced units": (sizes.total - sizes.root - sizes.layer) / 2,
        "full gradients of two layers": 2 * sizes.layer,
        "the root unit": sizes.root,
        "the embedding's gradient": sizes.gradient,
    }
    return {**terms, "activations": max(0.0, peak_nbytes - sum(terms.values()))}


def draw_memory(plot: Any, model_name: str = "short") -> Any:
    """Sample a step of both, and draw it."""
    with malloc_counter.preloaded():
        ours, other = (
            run_ranks(2, sample_step, model_name, peer) for peer in ("ours", "fsdp2_raf")
        )
    return draw_memory_of(plot, ours, other, Sizes.of(make_llama(model_name), 2))


def draw_memory_of(plot: Any, ours: Samples, other: Samples, sizes: Sizes) -> Any:
    """Draw the samples over the phases, and the terms of the peak beside them."""
    figure, (axis, bar) = plot.subplots(
        1,
        2,
        figsize=(8.5, 4.2),
        sharey=True,
        layout="constrained",
        gridspec_kw={"width_ratios": [5, 1]},
    )
    for samples, colour, style, label in (
        (other, LIGHT, "--", "FSDP2"),
        (ours, DARK, "-", "composable_shard"),
    ):
        x = [moment for moment, _ in samples]
        y = [nbytes / sizes.total for _, nbytes in samples]
        label = f"{label}, peak {max(y):.2f} P"
        axis.plot(x, y, style, color=colour, lw=1.8, label=label)
    peak_at, peak = max(ours, key=lambda sample: sample[1])
    axis.plot(peak_at, peak / sizes.total, "o", color=DARK)
    highest = max(nbytes for _, nbytes in other) / sizes.total
    for boundary in range(1, len(PHASES)):
        axis.axvline(boundary, color="grey", lw=0.8)
    axis.set(
        xlim=(0, len(PHASES)),
        ylim=(0, highest * 1.08),
        ylabel="bytes held, in P (bytes of all parameters)",
    )
    axis.set_xticks([number + 0.5 for number in range(len(PHASES))], PHASES)
    axis.tick_params(axis="x", length=0)
    axis.legend(loc="lower right")
    bottom = 0.0
    tones = (GREY, PALE, LIGHT, "#7fb8a4", MIDDLE, DARK, "white")
    hatches = ("", "//", "", "\\\\", "", "", "...")
    terms = peak_terms(sizes, peak)
    for (name, nbytes), tone, hatch in zip(terms.items(), tones, hatches, strict=True):
        height = nbytes / sizes.total
        bar.bar(0, height, 0.8, bottom, color=tone, hatch=hatch, edgecolor="black", lw=0.6)
        bar.annotate(
            name if height > 0.03 else "",
            (0.4, bottom + height / 2),
            (0.5, bottom + height / 2),
            va="center",
            fontsize=8,
            annotation_clip=False,
        )
        bottom += height
    bar.set(xlim=(-0.4, 0.4), xticks=[])
    bar.set_title("held at\nthe peak", fontsize=10)
    bar.spines[["right", "top", "bottom", "left"]].set_visible(False)
    bar.tick_params(axis="y", length=0)
    axis.set_title("FULL_SHARD, 12 layers of width 512, rank 0 of 2, fp32 AdamW", fontsize=10)
    figure.suptitle("Memory of one step", fontweight="bold")
    return figure


# --- the timeline of a step ---


@dataclass(frozen=True)
class Bar:
    """Something that lasts, in milliseconds from the beginning of the step.

    Attributes:
        lane: "compute", "gather", "reduce", "wait" or "phase".
        name: Of the unit, or of the phase.
        start, end: When.
    """

    lane: str
    name: str
    start: float
    end: float


def read_timeline(events: Iterable[dict[str, Any]], root: str) -> list[Bar]:
    """Return the bars of a step from the events of a Chrome trace.

    A gather or reduction is in flight from its issue until the host has waited for it. A unit's
    forward is a range of that name; its backward lasts from the end of the wait for its gather to
    its reduction. What is left of both belongs to the root.

    Args:
        events: Those of `profile.export_chrome_trace`.
        root: The name of the root unit.
    """
    ranges = sorted(
        (e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3, e["name"])
        for e in events
        if e.get("cat") == "user_annotation"
    )
    phases = {name: (start, end) for start, end, name in ranges if name in PHASES}
    zero = phases["forward"][0]
    bars: list[Bar] = []
    issued: dict[tuple[str, str], float] = {}
    gathered: dict[str, float] = {}
    for start, end, text in ranges:
        kind, _, name = text.removeprefix("wait ").partition(" ")
        lane = {"all_gather": "gather", "reduce_scatter": "reduce"}.get(kind)
        if kind == "compute":
            bars.append(Bar("compute", name, start, end))
        elif lane and text.startswith("wait "):
            bars.append(Bar(lane, name, issued.pop((lane, name)), end))
            bars.append(Bar("wait", name, start, end))
            gathered[name] = end
        elif lane:
            issued[lane, name] = start
            if lane == "reduce" and name != root:
                bars.append(Bar("compute", name, gathered[name], start))
    compute = sorted((b.start, b.end) for b in bars if b.lane == "compute")
    for start, end in (phases["forward"], phases["backward"]):
        inside = [(low, high) for low, high in compute if start <= low < end]
        edges = [start, *(edge for pair in inside for edge in pair), end]
        bars += [
            Bar("compute", root, low, high)
            for low, high in zip(edges[::2], edges[1::2], strict=True)
        ]
    start, end = phases["optimizer step"]
    bars.append(Bar("compute", "AdamW", start, end))
    bars += [Bar("phase", name, *phases[name]) for name in ("forward", "backward")]
    return [replace(b, start=b.start - zero, end=b.end - zero) for b in bars if b.end > b.start]


def trace_step(rank: int, folder: str) -> None:
    """Write the trace of a warm step of four layers to `folder`, on rank 0."""
    config = replace(CONFIGS["std"], layers=4, batch=4)
    torch.manual_seed(0)
    model = peers.build("ours", Llama(config))
    for index, layer in enumerate(model.layers):
        layer.forward = partial(_in_range, f"compute layers.{index}", layer.forward)
    optimizer = peers.make_optimizer("ours", model)
    tokens = torch.randint(config.vocabulary, (config.batch, config.length))

    def step() -> None:
        with record_function("forward"):
            loss = model(tokens, tokens)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer step"):
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    if rank == 0:
        profiler.export_chrome_trace(f"{folder}/trace.json")


def _in_range(name: str, forward: Callable[..., Any], *args: Any) -> Any:
    with record_function(name):
        return forward(*args)


def draw_timeline(plot: Any) -> Any:
    """Trace a step, and draw it."""
    with TemporaryDirectory() as folder:
        run_ranks(2, trace_step, folder)
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return draw_timeline_of(plot, read_timeline(events, Llama.__name__))


def stack(bars: Sequence[Bar]) -> list[int]:
    """Return for each bar, in order of their starts, the first row in which it overlaps none."""
    ends: list[float] = []
    rows = []
    for bar in bars:
        row = next((row for row, end in enumerate(ends) if end <= bar.start), len(ends))
        ends[row : row + 1] = [bar.end]
        rows.append(row)
    return rows


def draw_timeline_of(plot: Any, bars: Sequence[Bar]) -> Any:
    """Draw one lane for compute, and one for each kind of collective."""
    figure, axis = plot.subplots(figsize=(10, 3.8), layout="constrained")
    lanes = {
        "compute": ("compute", MIDDLE, ""),
        "gather": ("all-gathers\nin flight", PALE, ""),
        "reduce": ("reduce-scatters\nin flight", LIGHT, "//"),
    }
    top, ticks = 0.0, {}
    for lane, (title, colour, hatch) in lanes.items():
        found = sorted((b for b in bars if b.lane == lane), key=lambda b: b.start)
        rows = stack(found)
        for bar, row in zip(found, rows, strict=True):
            width = bar.end - bar.start
            tone = GREY if bar.name == "AdamW" else colour
            axis.barh(
                top - row,
                width,
                0.85,
                bar.start,
                color=tone,
                hatch=hatch,
                edgecolor="black",
                lw=0.6,
            )
            text = bar.name.removeprefix("layers.").replace(Llama.__name__, "root")
            if width > 0.018 * max(b.end for b in bars) * len(text) ** 0.7:
                box = {"facecolor": colour, "pad": 0.5, "lw": 0} if hatch else None
                axis.text(
                    bar.start + width / 2,
                    top - row,
                    text,
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if lane == "compute" and tone == MIDDLE else "black",
                    bbox=box,
                )
        ticks[title] = top - max(rows) / 2
        if lane == "compute":
            for bar in (b for b in bars if b.lane == "wait"):
                axis.barh(top, bar.end - bar.start, 0.85, bar.start, color=DARK)
        top -= max(rows) + 1.4
    for bar in (b for b in bars if b.lane == "phase"):
        span = {"arrowstyle": "<->"}
        axis.annotate(
            "", (bar.start, 0.65), (bar.end, 0.65), annotation_clip=False, arrowprops=span
        )
        middle = (bar.start + bar.end) / 2
        axis.text(middle, 0.72, bar.name, ha="center", va="bottom", fontsize=9)
    first = min((b for b in bars if b.lane == "gather"), key=lambda b: b.end)
    last = max((b for b in bars if b.lane == "reduce"), key=lambda b: b.end)
    note = {"fontsize": 8, "ha": "center", "va": "top"}
    arrow = {"arrowstyle": "->"}
    text = "first gather:\nnothing to hide behind"
    axis.annotate(text, (first.end, -1.9), (0.11 * last.end, -3.3), arrowprops=arrow, **note)
    text = "last reductions: no compute\nis left to hide behind"
    axis.annotate(text, (last.end, top + 1.85), (0.52 * last.end, -2.9), arrowprops=arrow, **note)
    axis.set_yticks(list(ticks.values()), list(ticks))
    axis.tick_params(axis="y", length=0)
    axis.set(xlabel="milliseconds", xlim=(0, max(bar.end for bar in bars)))
    axis.spines[["right", "top", "left"]].set_visible(False)
    figure.suptitle("One step: collectives beside compute", fontweight="bold")
    axis.set_title(
        "four layers, 0 to 3, and the root; rank 0 of 2, gloo on two CPU cores; "
        "dark: the host waits, grey: AdamW",
        fontsize=10,
        pad=16,
    )
    return figure


# --- beside others ---

RESULTS = ROOT / "benchmarks" / "results"
TIMES = RESULTS / "step_time_fsdp2_cpu2_2026-11-22.md"
PEAKS = RESULTS / "memory_cpu2_2026-11-22.md"
PEER_NAMES = {
    "bare": "no communication\n(one rank's data)",
    "ours": "composable_shard",
    "fsdp1": "FSDP1",
    "fsdp2_raf": "FSDP2",
}


def read_column(text: str, column: str) -> dict[str, list[float]]:
    """Return the figures of a column of a results file's first table by peer, spread included."""
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert lines is not None
    heads, _, *rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in lines[0].splitlines()
    ]
    index = heads.index(column)
    return {row[0]: [float(n) for n in re.findall(r"\d+(?:\.\d+)?", row[index])] for row in rows}


def read_figures(path: Path, column: str, names: Mapping[str, str]) -> dict[str, list[float]]:
    """Return what `read_column` finds in a file for these peers, in their order."""
    found = read_column(path.read_text(), column)
    return {name: found[name] for name in names}


def read_peers() -> list[dict[str, list[float]]]:
    """Return step times and peaks of the peers."""
    columns = ((TIMES, "step ms"), (PEAKS, "peak backward"))
    return [read_figures(path, column, PEER_NAMES) for path, column in columns]


def draw_peers(plot: Any) -> Any:
    """Draw step time and peak beside others."""
    times, peaks = read_peers()
    figure, (left, right) = plot.subplots(1, 2, figsize=(9, 2.2), layout="constrained")
    panels = (
        (left, times, PEER_NAMES, "time of a step, milliseconds", "{:.0f}"),
        (
            right,
            peaks,
            {name: PEER_NAMES[name] for name in PEER_NAMES if name != "bare"},
            "peak memory, in bytes of all parameters",
            "{:.2f}",
        ),
    )
    for axis, figures, names, title, form in panels:
        draw_bars(axis, figures, names, form)
        axis.set_title(title, fontsize=10, loc="left")
    figure.supxlabel(
        "12 layers of width 512, fp32, AdamW, two gloo ranks on two CPU cores, torch 2.13; "
        "median and quartiles; shorter is better",
        fontsize=8,
    )
    return figure


def draw_bars(
    axis: Any,
    figures: Mapping[str, Sequence[float]],
    names: Mapping[str, str],
    form: str,
    limit: float = math.inf,
) -> None:
    """Draw a bar for each name, from the top, and its quartiles where there are some.

    A bar longer than `limit` ends there; its label has its value.
    """
    for row, name in enumerate(names):
        value, *quartiles = figures[name]
        tone, hatch = (DARK, "") if name.startswith("ours") else (LIGHT, "//")
        if name == "bare":
            tone, hatch = "white", ""
        axis.barh(-row, min(value, limit), 0.7, color=tone, hatch=hatch, edgecolor="black", lw=0.6)
        end = min(max([value, *quartiles]), limit)
        if quartiles:
            axis.plot(quartiles, [-row, -row], color="black", lw=1.5)
        axis.annotate(
            form.format(value), (end, -row), (4, 0), va="center", textcoords="offset points"
        )
    axis.set_yticks([-row for row in range(len(names))], names.values())
    axis.tick_params(axis="y", length=0)
    axis.set_xlim(0, min(max(max(figures[name]) for name in names), limit) * 1.15)
    axis.locator_params(axis="x", nbins=5)
    axis.spines[["right", "top"]].set_visible(False)


LIBRARY_TIMES = RESULTS / "compare_steps_cpu2_2026-11-27.md"
LIBRARY_LEVELS = RESULTS / "compare_exact_cpu2_2026-11-27.md"
LIBRARY_NAMES = {
    "ddp": "DDP",
    "ours_noshard": "here, NO_SHARD",
    "zero1": "ZeroRedundancyOptimizer",
    "fairscale_oss": "fairscale OSS",
    "deepspeed_1": "DeepSpeed ZeRO-1",
    "ours_optim": "here, SHARD_OPTIM",
    "fairscale_sddp": "fairscale ShardedDDP",
    "deepspeed_2": "DeepSpeed ZeRO-2",
    "ours_gradop": "here, SHARD_GRAD_OP",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "simple_fsdp": "SimpleFSDP",
    "deepspeed_3": "DeepSpeed ZeRO-3",
    "ours": "here, FULL_SHARD",
}


def read_libraries() -> list[dict[str, list[float]]]:
    """Return step times and peaks of the libraries."""
    columns = ((LIBRARY_TIMES, "time / ddp"), (LIBRARY_LEVELS, "peak P"))
    return [read_figures(path, column, LIBRARY_NAMES) for path, column in columns]


def draw_libraries(plot: Any) -> Any:
    """Draw step time and peak of every library that runs on the CPU."""
    figure, axes = plot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    titles = "time of a step, DDP = 1", "peak memory, in bytes of all parameters"
    for axis, figures, title in zip(axes, read_libraries(), titles, strict=True):
        draw_bars(axis, figures, LIBRARY_NAMES, "{:.2f}", limit=8)
        axis.set_title(title, fontsize=10, loc="left")
    figure.supxlabel(
        "48 layers of width 128, fp32, AdamW, two gloo ranks on two CPU cores, torch 2.13; "
        "median and quartiles; shorter is better\n"
        "DeepSpeed's buffers have a fixed size, which is large beside this model of 42 MB",
        fontsize=8,
    )
    return figure


# --- the overlap on an accelerator ---

OVERLAP = {
    "fsdp2": "FSDP2",
    "ours": "composable_shard",
    "ours, own group for reductions": "composable_shard, separate_reduce_group=True",
}
OVERLAP_TIMES = device_overlap.Durations(compute=100, gather=110, reduce=110)
OVERLAP_LAYERS = 6
Spans = list[tuple[str, float, float]]  # what it is, from when to when in microseconds


def model_steps(rank: int) -> dict[str, Spans]:
    """Return what takes time in a step of each case, in modelled time."""
    found: dict[str, Spans] = {}
    for name in OVERLAP:
        for _ in device_overlap.run_case(name, (OVERLAP_TIMES,), OVERLAP_LAYERS):
            spans = [each for each in device.timeline() if each.end_us > each.start_us]
            found[name] = [(each.name, each.start_us, each.end_us) for each in spans]
    return found


def name_layers(spans: Spans, num_layers: int) -> list[Bar]:
    """Return the spans of a step as bars, each with the number of its layer.

    A layer's forward is one matrix product, its backward two.
    """
    lanes = {"aten::mm": "compute", "all_gather": "gather", "reduce_scatter": "reduce"}
    forward = list(range(num_layers))
    backward = forward[::-1]
    order = {
        "compute": forward + [layer for layer in backward for _ in range(2)],
        "gather": forward + backward,
        "reduce": backward,
    }
    bars = []
    for op, lane in lanes.items():
        times = sorted((start, end) for name, start, end in spans if name == op)
        for layer, (start, end) in zip(order[lane], times, strict=True):
            bars.append(Bar(lane, str(layer), start, end))
    return bars


def draw_overlap(plot: Any) -> Any:
    """Model a step of each case, and draw it."""
    found = run_ranks(2, model_steps, on_device=True)
    figure, axes = plot.subplots(
        len(OVERLAP), 1, figsize=(10, 5), sharex=True, layout="constrained"
    )
    lanes = {"compute": (MIDDLE, ""), "gather": (PALE, ""), "reduce": (LIGHT, "//")}
    for axis, (name, title) in zip(axes, OVERLAP.items(), strict=True):
        bars = name_layers(found[name], OVERLAP_LAYERS)
        for place, (lane, (colour, hatch)) in enumerate(lanes.items()):
            for bar in (each for each in bars if each.lane == lane):
                width = bar.end - bar.start
                style = {"color": colour, "hatch": hatch, "edgecolor": "black", "lw": 0.6}
                axis.barh(-place, width, 0.85, bar.start, **style)
                box = {"facecolor": colour, "pad": 0.5, "lw": 0} if hatch else None
                middle, tone = bar.start + width / 2, "white" if lane == "compute" else "black"
                axis.text(
                    *(middle, -place, bar.name), ha="center", va="center", color=tone, bbox=box
                )
        end = max(bar.end for bar in bars)
        axis.set_title(f"{title}: {end / 1000:.2f} ms", loc="left", fontsize=10)
        axis.set_yticks([0, -1, -2], ["compute", "all-gather", "reduce-scatter"])
        axis.tick_params(axis="y", length=0)
        axis.spines[["right", "top", "left"]].set_visible(False)
    axes[-1].set_xlabel("microseconds of modelled time, forward and backward")
    times = f"forward {OVERLAP_TIMES.compute} us, backward {2 * OVERLAP_TIMES.compute} us"
    figure.suptitle(
        f"{OVERLAP_LAYERS} layers of {times}; gather {OVERLAP_TIMES.gather} us, reduction "
        f"{OVERLAP_TIMES.reduce} us",
        fontweight="bold",
    )
    return figure


DRAWINGS = {
    "idea": draw_idea,
    "strategies": draw_strategies,
    "layout": draw_layout,
    "memory": draw_memory,
    "timeline": draw_timeline,
    "overlap": draw_overlap,
    "peers": draw_peers,
    "libraries": draw_libraries,
}
# A picture holds the figures that it shows as a text, for a test.
NOTES = {
    "peers": lambda: json.dumps(read_peers()),
    "libraries": lambda: json.dumps(read_libraries()),
}


def load_plot() -> Any:
    """Return matplotlib's functions, without a display."""
    importlib.import_module("matplotlib").use("agg")
    plot = importlib.import_module("matplotlib.pyplot")
    plot.rcParams.update({"font.size": 9, "hatch.linewidth": 0.5})
    return plot


def shrink(path: Path) -> None:
    """Write a picture of few colours anew, with a palette of 64 and its texts."""
    image = importlib.import_module("PIL.Image").open(path)
    texts = importlib.import_module("PIL.PngImagePlugin").PngInfo()
    for name, text in image.text.items():
        texts.add_text(name, text)
    image.convert("RGB").quantize(64).save(path, optimize=True, pnginfo=texts)


def main() -> None:
    """Draw what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", choices=sorted(DRAWINGS))
    parser.add_argument("--output", type=Path, metavar="FILE", help="instead of docs/pictures/")
    args = parser.parse_args()
    path = args.output or ROOT / "docs" / "pictures" / f"{args.picture}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = DRAWINGS[args.picture](load_plot())
    note = {"Description": NOTES[args.picture]()} if args.picture in NOTES else {}
    figure.savefig(path, bbox_inches="tight", facecolor="white", metadata=note, dpi=100)
    if args.picture in ("overlap", "libraries") and path.suffix == ".png":
        shrink(path)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
