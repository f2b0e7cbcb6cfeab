"""Which units `shard_model` forms, that they train, and that it does all of its call or nothing."""

from __future__ import annotations

import copy
import functools
import inspect
import random
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from composable_shard import (
    FlatShard,
    ShardingStrategy,
    fully_shard,
    get_handles,
    get_states,
    is_sharded,
    shard_model,
)
from composable_shard.planning import by_class, transformer_blocks
from composable_shard.planning.model_plan import choose_units
from composable_shard.planning.module_tree import ModuleTree
from composable_shard.planning.rules import compile_glob, parse_rules
from composable_shard.runtime.comparison import describe_options
from tests.harness.ranks import distributed, run_ranks
from tests.programs.claims import assert_close, unsharded_gradients
from tests.programs.models import (
    Layer,
    Net,
    Twins,
    assert_at_rest,
    fingerprint,
    plan_of,
    rank_input,
    square_mean,
)

_OPTIONS = "mesh, strategy, reshard_after_forward, mp_policy, " + (
    "offload_policy, ignored_params, use_orig_params, sync_module_states, "
    "check_initial_values, check_order, broadcast_buffers, bucket_cap_mb, "
    "granularity, prefetch_nbytes, separate_reduce_group"
)


class _Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        return self.out(torch.softmax(query @ key.transpose(-1, -2), -1) @ value)


class _Layer(nn.Module):
    """A block with units in it, if one wants: a list of experts of one class, too."""

    def __init__(self, dim: int = 6, num_experts: int = 2) -> None:
        super().__init__()
        self.attention = _Attention(dim)
        self.experts = nn.ModuleList(Layer(dim, 2 * dim) for _ in range(num_experts))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        for expert in self.experts:
            x = expert(x)
        return x


class _EncoderStack(nn.Module):
    """An encoder or decoder as Hugging Face builds it: its own name for the shared embedding."""

    def __init__(self, embed_tokens: nn.Embedding, num_layers: int) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.block = nn.ModuleList(_Layer() for _ in range(num_layers))
        self.final_layer_norm = nn.LayerNorm(6)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> Tensor:
        x = self.embed_tokens(tokens)
        if state is not None:
            x = x + state.mean(1, keepdim=True)
        for block in self.block:
            x = block(x)
        return self.final_layer_norm(x)


class _EncoderDecoder(nn.Module):
    """Like T5: one embedding module at three places, its weight tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(11, 6)
        self.encoder = _EncoderStack(self.shared, 2)
        self.decoder = _EncoderStack(self.shared, 3)
        self.lm_head = nn.Linear(6, 11, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.decoder(tokens, self.encoder(tokens)))


class _Causal(nn.Module):
    """Like BERT or GPT: the layers lie two modules down; a stem and a head have lists as well."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(2)))
        self.bert = nn.Module()
        self.bert.encoder = nn.Module()
        self.bert.encoder.layer = nn.ModuleList(_Layer(24) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.bert.encoder.layer:
            x = layer(x)
        return self.head(x) + self.stem(x[..., :2]).sum()


class _SharedLinear(nn.Module):
    """One Linear at two places inside others, beside a tie of a single parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.right = nn.Sequential(self.left[0], nn.Linear(3, 3))
        self.right[1].weight = self.left[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.right(self.left(x))


def _torch_transformer() -> nn.Module:
    return nn.Transformer(4, 2, 2, 2, 8, batch_first=True)


def _fqns(model: nn.Module, rules: Any, **options: Any) -> list[str]:
    """Return the FQNs of the units besides the root."""
    fqns = [unit.fqn for unit in plan_of(model, rules, **options).units]
    assert fqns.pop() == ""
    return fqns


def _sharded_fqns(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_sharded(module)]


def _is_up(fqn: str, module: nn.Module) -> bool:
    return fqn.endswith(".up")


# --- what a rule is about ---

UP = ["blocks.0.up", "blocks.1.up", "blocks.2.up"]
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
LAYERS = ["inp", *UP, "blocks.0.down", "blocks.1.down", "blocks.2.down", "out"]
LAYERS_IN_ORDER = [f"blocks.{index}.{name}" for index in range(3) for name in ("up", "down")]
CASES: dict[str, tuple[Any, list[str]]] = {
    "class": ({Layer: {}}, BLOCKS),
    "base class": ({nn.Linear: {}}, LAYERS),
    "tuple of classes": ({(Layer, nn.Linear): {}}, BLOCKS + LAYERS),
    "glob": ({"blocks.*": {}}, BLOCKS),
    "glob with a set": ([("blocks.[02]", {})], ["blocks.0", "blocks.2"]),
    "exact name": ([("blocks.1", {})], ["blocks.1"]),
    "glob across": ({"blocks.**": {}}, BLOCKS + [name for name in LAYERS if "." in name]),
    "glob from anywhere": ([("**.up", {})], UP),
    "predicate": ([(_is_up, {})], UP),
    "predicate on the module": ([(lambda fqn, module: module.__class__ is Layer, {})], BLOCKS),
    "pairs as lists": ([["out", {}]], ["out"]),
    "no rules": ({}, []),
    "nested": ({Layer: {}, "**.up": {}}, BLOCKS + UP),
    "None first": ([("blocks.1", None), (Layer, {})], ["blocks.0", "blocks.2"]),
    "None for what is inside": ([("blocks.**.up", None), ("blocks.*.*", {})], LAYERS[4:7]),
    "two rules": ([("out", {}), *by_class(Layer)], [*BLOCKS, "out"]),
    "by_class": (by_class(Layer), BLOCKS),
    "by_class of several": (by_class(Layer, nn.Linear), BLOCKS + LAYERS),
}


@pytest.mark.parametrize("case", CASES)
def test_rules_form_the_units_they_are_about(case: str) -> None:
    """Beside them there is the root; inner units come before outer ones."""
    rules, expected = CASES[case]
    fqns = _fqns(Net(), rules)
    assert sorted(fqns) == sorted(expected)
    positions = {fqn: position for position, fqn in enumerate(fqns)}
    assert all(
        positions[inner] < positions[outer]
        for inner in fqns
        for outer in fqns
        if inner.startswith(f"{outer}.")
    )


GLOBS = {
    "layers.*": (["layers.0", "layers.x"], ["layers", "layers.0.up", "layers2.0", "a.layers.0"]),
    "layers.**": (["layers.0", "layers.0.up"], ["layers", "layers2.0"]),
    "**.up": (["up", "a.up", "a.b.up"], ["cup", "a.cup", "up.a"]),
    "a.**.up": (["a.up", "a.b.up", "a.b.c.up"], ["up", "ab.up", "aup"]),
    "**": (["a", "a.b.c"], []),
    "*": (["a", "_a1"], ["a.b"]),
    "*.*": (["a.b"], ["a", "a.b.c"]),
    "h?.*_proj": (["h1.q_proj"], ["h.q_proj", "h12.q_proj", "h..q_proj", "h1.a.q_proj"]),
    "l[0-2].x": (["l0.x", "l2.x"], ["l3.x", "l-.x"]),
    "l[!0].x": (["l1.x"], ["l0.x", "l..x"]),
    "a**z": (["az", "a.b.z", "abz"], ["b.z"]),
    "a+b": (["a+b"], ["aab", "ab"]),
    "a[": (["a["], ["a"]),
    "a.b": (["a.b"], ["aXb"]),
}


@pytest.mark.parametrize("glob", GLOBS)
def test_one_star_stays_within_a_component_and_two_go_across(glob: str) -> None:
    """Everything else is literal."""
    pattern = compile_glob(glob)
    matching, others = GLOBS[glob]
    assert [fqn for fqn in matching + others if pattern.fullmatch(fqn)] == matching


def test_first_match_wins() -> None:
    """The options are those of the first rule about a module; later ones take the rest."""
    rules = [("blocks.1", {"reshard_after_forward": True}), (Layer, {})]
    plan = plan_of(Net(), rules, reshard_after_forward=False)
    found = {unit.fqn: (unit.rule, unit.options["reshard_after_forward"]) for unit in plan.units}
    assert found == {
        "blocks.0": ("rule 2 (Layer)", False),
        "blocks.1": ("rule 1 ('blocks.1')", True),
        "blocks.2": ("rule 2 (Layer)", False),
        "": ("defaults", False),
    }


def test_a_rule_about_the_model_gives_the_root_its_options() -> None:
    """By class or predicate; None does not apply to it, and globs are about what is inside."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    plan = plan_of(model, {nn.Sequential: {"reshard_after_forward": True}})
    assert [(unit.fqn, len(unit.options)) for unit in plan.units] == [("0", 1), ("", 1)]
    assert _fqns(model, [(nn.Sequential, None), ("**", {})]) == ["0.0"]
    assert plan_of(model, [("**", {"reshard_after_forward": True})]).units[-1].options == {}
    with pytest.raises(ValueError, match="selects no module of Linear"):
        plan_of(nn.Linear(2, 2), {nn.Linear: None})


def test_a_shared_module_is_one_unit_under_any_of_its_names() -> None:
    """A rule about one name is about all of them; a second one comes too late."""
    for rules in ({"left.0": {}}, {"right.0": {}}, [(lambda fqn, _: fqn == "right.0", {})]):
        plan = plan_of(_SharedLinear(), rules)
        assert [unit.fqns for unit in plan.units] == [("left.0", "right.0"), ("",)]
    with pytest.raises(ValueError, match=r"rule 2 \('right.0'\) selects only what earlier"):
        plan_of(_SharedLinear(), {"left.0": {}, "right.0": {}})


def test_a_cycle_of_modules_ends() -> None:
    """A child that refers to its parent has no endless list of names."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].parent = model
    assert ModuleTree(model).fqns == {model[0]: ["0"], model: [""]}
    assert _fqns(model, {"*": {}}) == ["0"]


# --- ready-made rules ---


def test_transformer_blocks_finds_the_layers() -> None:
    """Neither experts inside of them, nor a stem or head that is a list as well."""
    model = _Causal()
    assert transformer_blocks(model) == [("bert.encoder.layer.*", {})]
    assert _fqns(model, transformer_blocks(model)) == [f"bert.encoder.layer.{i}" for i in range(2)]


def test_transformer_blocks_finds_encoder_and_decoder() -> None:
    """All lists of the kind, with the options given."""
    rules = transformer_blocks(_EncoderDecoder(), reshard_after_forward=True)
    options = {"reshard_after_forward": True}
    assert rules == [("encoder.block.*", options), ("decoder.block.*", options)]
    assert rules[0][1] is not rules[1][1]
    torch_model = _torch_transformer()
    assert [glob for glob, _ in transformer_blocks(torch_model)] == [
        "encoder.layers.*",
        "decoder.layers.*",
    ]


def test_transformer_blocks_takes_what_there_is() -> None:
    """The model may be the list; layers without modules in them are better than nothing."""
    assert _fqns(nn.Sequential(Layer(), Layer()), [("*", {})]) == ["0", "1"]
    assert transformer_blocks(nn.Sequential(Layer(), Layer())) == [("*", {})]
    towers = nn.ModuleList(nn.ModuleList([Layer(), Layer()]) for _ in range(2))
    assert [glob for glob, _ in transformer_blocks(towers)] == ["0.*", "1.*"]
    linears = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert transformer_blocks(nn.ModuleDict({"a*": linears})) == [("a[*].*", {})]
    assert _fqns(nn.Sequential(linears), transformer_blocks(nn.Sequential(linears))) == [
        "0.0",
        "0.1",
    ]


def test_transformer_blocks_makes_units_of_large_embeddings() -> None:
    """Not of one that is small, tied, inside a block, or changed by its forward."""

    def with_embedding(num_rows: int, **options: Any) -> Any:
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(4)))
        return nn.Sequential(nn.Embedding(num_rows, 6, **options), layers, nn.Linear(6, num_rows))

    assert transformer_blocks(with_embedding(7)) == [("1.*", {}), ("0", {})]  # 42 to 6 * 7
    assert transformer_blocks(with_embedding(6)) == [("1.*", {})]
    assert transformer_blocks(with_embedding(7, max_norm=1.0)) == [("1.*", {})]
    tied = with_embedding(7)
    tied[2].weight = tied[0].weight
    assert transformer_blocks(tied) == [("1.*", {})]
    inside = nn.ModuleList(nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 6)) for _ in range(2))
    assert transformer_blocks(inside) == [("*", {})]

    model = with_embedding(1000)
    plan = shard_model(model, transformer_blocks(model), dry_run=True, world_size=4)
    assert {unit.fqns: unit.numel for unit in plan.units}["0",] == 6000


def test_transformer_blocks_asks_the_model_which_classes_are_blocks() -> None:
    """As Jamba's, which take turns; and a block that runs again and again, as ALBERT's."""
    model: Any = nn.ModuleDict({"layers": nn.Sequential(Layer(), _Attention(2))})
    assert ("layers.*", {}) not in transformer_blocks(model)
    model._no_split_modules = {"Layer", "_Attention"}
    assert transformer_blocks(model) == [("layers.*", {})]
    repeated = nn.ModuleDict({"groups": nn.ModuleList([Layer()])})
    assert transformer_blocks(repeated) == [("groups.*", {})]


class _Stage(nn.Module):
    """A stage of a hierarchical model: blocks of one width, and a layer to the next one."""

    def __init__(self, width: int, depth: int, name: str = "blocks") -> None:
        super().__init__()
        blocks = nn.Sequential(*(Layer(width, width) for _ in range(depth)))
        self.add_module(name, blocks)
        self.widen = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        return self.widen(next(self.children())(x))


def test_transformer_blocks_descends_into_stages() -> None:
    """Where stages grow, no unit holds a third of the model; a tiny stage stays in the root."""
    stages = nn.Sequential(*(_Stage(width, 2) for width in (1, 8, 16, 32)))
    model = nn.Sequential(OrderedDict(stages=stages, head=nn.Linear(64, 3)))
    globs = [glob for glob, _ in transformer_blocks(model)]
    assert globs == [f"stages.{number}.blocks.*" for number in (1, 2, 3)]
    plan = shard_model(model, transformer_blocks(model), dry_run=True, world_size=2)
    total = sum(unit.numel for unit in plan.units)
    stages = shard_model(model, {"stages.*": {}}, dry_run=True, world_size=2)
    assert max(unit.numel for unit in stages.units) > total / 2
    assert max(unit.numel for unit in plan.units) < total / 2.5
    # Equal blocks with lists are layers with experts, or towers: they stay as they are.
    assert transformer_blocks(nn.Sequential(_Stage(4, 2), _Stage(4, 2))) == [("*", {})]


def test_transformer_blocks_chooses_by_size_where_there_is_no_list() -> None:
    """Neither a layer of torch's own is split, nor a tiny module taken."""
    stem, head = nn.Linear(8, 8), nn.MultiheadAttention(8, 2)
    body = nn.Sequential(Layer(8, 8), nn.Linear(8, 8), nn.LayerNorm(1))
    model = nn.Sequential(OrderedDict(stem=stem, body=body, head=head, tiny=nn.LayerNorm(1)))
    names = [glob for glob, _ in transformer_blocks(model)]
    assert {"stem", "head"} < set(names)
    assert not any(name.startswith(("head.", "tiny")) for name in names)
    assert any(name.startswith("body.") for name in names)
    units = shard_model(model, transformer_blocks(model), dry_run=True, world_size=2).units
    assert units[-1].numel < 0.1 * sum(unit.numel for unit in units)


@distributed(1, 2, 3)
def test_shard_model_without_rules_takes_the_blocks() -> None:
    """As `transformer_blocks(model)` does; a step is that of a plain model."""
    twins = Twins(
        lambda: nn.Sequential(*(_Stage(2**n, 2) for n in (1, 2, 3))).double(), shard_model
    )
    chosen = [name for name, child in twins.sharded.named_modules() if is_sharded(child)]
    expected = _fqns(twins.plain, transformer_blocks(twins.plain))
    assert chosen[0] == ""
    assert sorted(chosen[1:]) == sorted(expected)
    assert "2.blocks.1" in expected
    for model in twins:
        twins.backward(model, square_mean(model(rank_input(3, 2).double())))
    found = unsharded_gradients(twins.sharded)
    for name, param in twins.plain.named_parameters():
        assert_close(found.get(name), param.grad, name)


def test_transformer_blocks_says_what_to_pass_where_there_is_no_list() -> None:
    """A single layer, blocks without parameters: nothing can be chosen by size either."""
    for model in (nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.GELU(), nn.GELU())):
        with pytest.raises(ValueError, match="no ModuleList or Sequential") as caught:
            transformer_blocks(model)
        assert str(caught.value) == (
            f"no ModuleList or Sequential in {type(model).__name__} holds two or more modules that "
            "have parameters and are all of one class. Say which modules are the blocks: "
            "by_class(Layer), or an FQN glob as in [('layers.*', {})]."
        )


READY_REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "no class": (by_class, "expected by_class to be given module classes, got nothing"),
    "instance": (
        lambda: by_class(Layer()),  # type: ignore[arg-type]
        "expected by_class to be given module classes, got an instance of Layer",
    ),
    "other class": (
        lambda: by_class(Layer, dict),  # type: ignore[arg-type]
        "expected by_class to be given module classes, got the class dict",
    ),
    "no model": (
        lambda: transformer_blocks([Layer()]),  # type: ignore[arg-type]
        "expected model to be an nn.Module, got list",
    ),
}


@pytest.mark.parametrize("case", READY_REFUSALS)
def test_ready_made_rules_refuse_wrong_arguments(case: str) -> None:
    """With the value."""
    build, text = READY_REFUSALS[case]
    with pytest.raises(ValueError, match=re.escape(text)):
        build()


# --- refusals ---


def _needs_two(policy: Any) -> Any:
    return policy


def _with_sparse() -> nn.Module:
    model = Net()
    model.blocks[1].table = nn.Parameter(torch.eye(4).to_sparse())
    return model


def _with_sparse_root() -> nn.Module:
    model = Net()
    model.table = nn.Parameter(torch.eye(4).to_sparse())
    return model


def _net_on_two_devices() -> nn.Module:
    model = Net()
    model.blocks[2].down.to("meta")
    return model


def _with_container() -> nn.Module:
    model = Net()
    model.blocks = nn.ModuleList([Layer(), nn.ModuleList([Layer()])])
    return model


def _sharded_in_part() -> nn.Module:
    model = Net()
    fully_shard(model.blocks[1])
    return model


def _part_of_sharded() -> nn.Module:
    model = fully_shard(nn.Sequential(Net(), nn.Linear(3, 3)))
    model[0].__dict__["outer"] = model  # keeps it alive
    return model[0]


EXPECTED_RULES = (
    "expected rules to be a mapping or a sequence of pairs (module class, tuple of classes, FQN "
    "glob or predicate) -> options or None; got "
)
NO_POLICY = (
    ". In the place of an auto-wrap policy of FSDP1 write by_class(Layer) or "
    "transformer_blocks(model)."
)


def expected_key(got: str) -> str:
    """Return the text for a selector that is none."""
    kinds = "a module class, a tuple of them, an FQN glob or a predicate"
    return f"rule 1: expected {kinds}, got {got}{NO_POLICY}"


EXPECTED_PAIR = (
    "rule 2: expected a pair (selector, options or None), got {}. Unpack ready-made "
    "rules among others: [*by_class(Layer), ('head', None)]" + NO_POLICY
)
NET = (
    "selects no module of Net, which has the classes 'Net', 'Linear', 'ModuleList', 'Layer'. "
    "Correct or remove it."
)
SHADOWED = "selects only what earlier rules have selected. Remove it, or move it to the front."
NO_FORWARD = (
    "has no forward, so its unit would never be gathered. Pass the modules in it: `for child in "
    "container: fully_shard(child)`, or `fully_shard(list(container))` to make them one unit."
)
ALL = {"blocks.*": {}}
# model, rules, options, error, text
REFUSALS: dict[str, tuple[Callable[[], Any], Any, dict[str, Any], type[Exception], str]] = {
    "no model": (
        lambda: [Layer()],
        ALL,
        {},
        ValueError,
        "expected model to be an nn.Module, got list",
    ),
    "rules: a glob": (Net, "blocks.*", {}, ValueError, EXPECTED_RULES + "'blocks.*'" + NO_POLICY),
    "rules: a class": (Net, Layer, {}, ValueError, EXPECTED_RULES + "Layer" + NO_POLICY),
    "rules: a predicate": (Net, _is_up, {}, ValueError, EXPECTED_RULES + "_is_up" + NO_POLICY),
    "not a pair": (Net, [(Layer, {}), Layer], {}, ValueError, EXPECTED_PAIR.format("type")),
    "not unpacked": (
        Net,
        [("out", {}), by_class(Layer)],
        {},
        ValueError,
        EXPECTED_PAIR.format("list"),
    ),
    "key: a number": (Net, {3: {}}, {}, ValueError, expected_key("int")),
    "key: another class": (
        Net,
        {dict: {}},
        {},
        ValueError,
        expected_key("the class dict"),
    ),
    "key: a module": (Net, [(Layer(), {})], {}, ValueError, expected_key("Layer")),
    "key: a tuple of names": (
        Net,
        {("out", "inp"): {}},
        {},
        ValueError,
        expected_key("tuple"),
    ),
    "key: a function of one argument": (
        Net,
        [(_needs_two, {})],
        {},
        ValueError,
        "rule 1: expected a predicate that is called with an FQN and a module, got "
        "_needs_two(policy: 'Any') -> 'Any'" + NO_POLICY,
    ),
    "key: a policy of FSDP1": (
        Net,
        [(ModuleWrapPolicy({Layer}), {})],
        {},
        ValueError,
        "rule 1: expected a predicate that is called with an FQN and a module, got "
        f"ModuleWrapPolicy{inspect.signature(ModuleWrapPolicy({Layer}))}" + NO_POLICY,
    ),
    "rules: a policy of FSDP1": (
        Net,
        functools.partial(size_based_auto_wrap_policy, min_num_params=12),
        {},
        ValueError,
        EXPECTED_RULES + "size_based_auto_wrap_policy" + NO_POLICY,
    ),
    "options: True": (
        Net,
        {Layer: True},
        {},
        ValueError,
        "rule 1: expected a dict of options for fully_shard, or None for no unit of its own, "
        "got bool",
    ),
    "unknown option in a rule": (
        Net,
        {"out": {}, Layer: {"reshard_after_foward": True}},
        {},
        ValueError,
        f"rule 2 (Layer): fully_shard has no option 'reshard_after_foward'. It has {_OPTIONS}. "
        "docs/troubleshooting.md says what to pass for options of other libraries.",
    ),
    "unknown default": (
        Net,
        ALL,
        {"cpu_offload": True},
        ValueError,
        f"the defaults: fully_shard has no option 'cpu_offload'. It has {_OPTIONS}. "
        "docs/troubleshooting.md says what to pass for options of other libraries.",
    ),
    "value in a rule": (
        Net,
        {Layer: {"strategy": "full"}},
        {},
        ValueError,
        "rule 1 (Layer): expected strategy to be a ShardingStrategy or one of 'full_shard', "
        "'shard_grad_op', 'shard_optim', 'no_shard', got 'full'.",
    ),
    "value of a default": (
        Net,
        ALL,
        {"use_orig_params": "no"},
        ValueError,
        "the defaults: expected use_orig_params to be True or False, got 'no'",
    ),
    "mesh": (
        Net,
        ALL,
        {"mesh": 2},
        ValueError,
        "the defaults: expected mesh to be a DeviceMesh or None, got 2",
    ),
    "ignored_params: an iterator": (
        Net,
        ALL,
        {"ignored_params": iter([])},
        ValueError,
        "the defaults: expected ignored_params to be a set of parameters, got a list_iterator",
    ),
    "ignored_params: names": (
        Net,
        {Layer: {"ignored_params": {"up.bias"}}},
        {},
        ValueError,
        "rule 1 (Layer): expected ignored_params to hold parameters only, got a str",
    ),
    "sync_module_states": (
        Net,
        ALL,
        {"sync_module_states": "yes"},
        ValueError,
        "the defaults: expected sync_module_states to be True or False, got 'yes'",
    ),
    "world_size": (
        Net,
        ALL,
        {"world_size": 2},
        ValueError,
        "world_size is for dry_run=True; without it, units are shared by the ranks of `mesh`",
    ),
    "glob about nothing": (Net, {"block.*": {}}, {}, ValueError, "rule 1 ('block.*') " + NET),
    "class about nothing": (
        Net,
        {Layer: {}, (nn.Conv2d, nn.GELU): None},
        {},
        ValueError,
        "rule 2 ((Conv2d, GELU)) " + NET,
    ),
    "predicate about nothing": (
        Net,
        [(lambda fqn, module: False, {})],
        {},
        ValueError,
        "rule 1 (predicate <lambda>) " + NET,
    ),
    "shadowed rule": (
        Net,
        [("blocks.0", {}), (Layer, {}), ("blocks.[01]", {})],
        {},
        ValueError,
        "rule 3 ('blocks.[01]') " + SHADOWED,
    ),
    "shadowed by None": (
        Net,
        [(Layer, None), ("blocks.*", {})],
        {},
        ValueError,
        "rule 2 ('blocks.*') " + SHADOWED,
    ),
    "container": (
        _with_container,
        {"blocks.*": {}},
        {},
        ValueError,
        "'blocks.1' (ModuleList), rule 1 ('blocks.*'): ModuleList " + NO_FORWARD,
    ),
    "model without forward": (
        lambda: nn.ModuleList([Layer()]),
        {"*": {}},
        {},
        ValueError,
        "the model (ModuleList), defaults: ModuleList " + NO_FORWARD,
    ),
    "sharded in part": (
        _sharded_in_part,
        ALL,
        {},
        ValueError,
        "'blocks.1' (Layer) was already sharded by fully_shard or shard_model. Give shard_model a "
        "model of which nothing is sharded, and options of single modules as rules.",
    ),
    "sharded": (
        lambda: shard_model(Net(), ALL),
        ALL,
        {},
        ValueError,
        "'blocks.0' (Layer) was already sharded by fully_shard or shard_model. Give shard_model a "
        "model of which nothing is sharded, and options of single modules as rules.",
    ),
    "part of a sharded model": (
        _part_of_sharded,
        ALL,
        {},
        ValueError,
        "'blocks.0' (Layer), rule 1 ('blocks.*'): parameter 'up.weight' is already managed by the "
        "unit 'Sequential' of an outer module. Call fully_shard on inner modules first, on outer "
        "ones last.",
    ),
    "one unit refused": (
        _with_sparse,
        ALL,
        {},
        NotImplementedError,
        "'blocks.1' (Layer), rule 1 ('blocks.*'): parameter 'table' is a Parameter with layout "
        "torch.sparse_coo; only dense tensors and DTensors can be sharded. Pass it in "
        "ignored_params.",
    ),
    "the root refused": (
        _with_sparse_root,
        ALL,
        {},
        NotImplementedError,
        "the model (Net), defaults: parameter 'table' is a Parameter with layout "
        "torch.sparse_coo; only dense tensors and DTensors can be sharded. Pass it in "
        "ignored_params.",
    ),
    "the last unit refused": (
        _net_on_two_devices,
        ALL,
        {},
        ValueError,
        "'blocks.2' (Layer), rule 1 ('blocks.*'): expected all parameters of a unit on one device, "
        "got cpu: ['up.weight', 'up.bias']; meta: ['down.weight', 'down.bias']. Move the module "
        "to one device before fully_shard.",
    ),
    "sync on meta": (
        lambda: Net().to("meta"),
        {Layer: {}, "out": {"sync_module_states": True}},
        {},
        ValueError,
        "'out' (Linear), rule 2 ('out'): sync_module_states=True needs real parameters and "
        "buffers, got some on the meta device. Initialise or load them after fully_shard instead.",
    ),
}


def _refusal_of(case: str) -> str:
    build, rules, options, error, _ = REFUSALS[case]
    model = build()
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    before = [fingerprint(module) for module in modules]
    with pytest.raises(error) as caught:
        shard_model(model, rules, **options)
    assert caught.type is error
    assert [fingerprint(module) for module in modules] == before
    return str(caught.value)


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_changes_nothing_and_is_the_same_on_all_ranks(case: str) -> None:
    """The text names the rule or the unit; no module, hook or parameter is another than before."""
    assert run_ranks(2, _refusal_of, case) == 2 * [REFUSALS[case][-1]]


def test_world_size_of_a_dry_run_is_checked() -> None:
    """With the value."""
    with pytest.raises(ValueError, match="expected world_size to be a positive integer, got 0"):
        plan_of(Net(), ALL, world_size=0)


def test_missing_process_group_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real run of several processes needs one; nothing is changed before it is found missing."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = Net()
    with pytest.raises(RuntimeError, match=r"^torch.distributed is not initialised"):
        shard_model(model, ALL)
    assert _sharded_fqns(model) == []


@distributed(2)
def test_corrected_call_succeeds_after_a_refused_one() -> None:
    """A refused call leaves nothing that a second one trips over."""
    model = _with_sparse()
    with pytest.raises(NotImplementedError, match="'table' is a Parameter with layout"):
        shard_model(model, ALL)
    shard_model(model, ALL, ignored_params={model.blocks[1].table})
    assert _sharded_fqns(model) == ["", *BLOCKS]
    model(rank_input(4, 5)).sum().backward()


@distributed(2)
def test_module_of_two_parents_is_in_the_first_unit() -> None:
    """The second one borrows it, as with `fully_shard` by hand."""
    model = _SharedLinear()
    shard_model(model, {"left": {}, "right": {}})
    assert _sharded_fqns(model) == ["", "left", "right"]
    assert [len(state.borrowed) for state in get_states(model)] == [0, 0, 1]
    model = _SharedLinear()
    shard_model(model, {"left": {}, "right": {}}, ignored_params=set(model.left.parameters()))
    assert [len(state.borrowed) for state in get_states(model)] == [0, 0, 0]


class _Node(nn.Module):
    """A module of a random tree: children, of which some lie elsewhere in the tree as well."""

    def __init__(self, rng: random.Random, made: list[nn.Module], depth: int = 3) -> None:
        super().__init__()
        for index in range(rng.randint(1, 3)):
            if made and rng.random() < 0.15:
                child = rng.choice(made)
            elif depth and rng.random() < 0.6:
                child = _Node(rng, made, depth - 1)
            else:
                child = nn.Linear(2, 2)
                if made and rng.random() < 0.1:
                    tied = next((m for m in made if isinstance(m, nn.Linear)), child)
                    child.weight = tied.weight
                if rng.random() < 0.02:
                    child.table = nn.UninitializedParameter()
                if rng.random() < 0.02:
                    child.to("meta")
            made.append(child)
            self.add_module(f"m{index}", child)

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


def _random_case(seed: int) -> tuple[nn.Module, list[tuple[str, Any]], dict[str, Any]]:
    rng = random.Random(seed)
    model = _Node(rng, [])
    names = [fqns[0] for fqns in ModuleTree(model).fqns.values() if fqns[0]]
    rules = [(name, rng.choice([{}, {}, None])) for name in names if rng.random() < 0.4]
    ignored = {param for param in model.parameters() if rng.random() < 0.1}
    return model, rules, {"ignored_params": ignored}


@distributed(2)
def test_a_call_is_refused_if_and_only_if_a_unit_would_be() -> None:
    """Random trees with shared modules, ties and faults: refused at the start, or not at all."""
    refused = []
    for seed in range(150):
        by_hand, rules, options = _random_case(seed)
        units = choose_units(ModuleTree(by_hand), parse_rules(rules), options)
        reason = _reason(
            lambda units=units: [fully_shard(unit.module, **unit.given) for unit in units]
        )
        model, rules, options = _random_case(seed)
        before = [fingerprint(module) for module in model.modules()]
        ours = _reason(lambda m=model, r=rules, o=options: shard_model(m, r, **o))
        assert (ours is None) is (reason is None), (seed, reason, ours)
        if ours is None:
            assert _sharded_fqns(model) == _sharded_fqns(by_hand), seed
        else:
            assert [fingerprint(module) for module in model.modules()] == before, seed
            refused.append(seed)
    assert 10 < len(refused) < 120


def _reason(call: Callable[[], object]) -> str | None:
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


# --- what is formed ---


@pytest.mark.fast
@distributed(2)
def test_same_units_as_by_hand_train_the_same() -> None:
    """Units, their options and names, and bitwise what they compute."""
    torch.manual_seed(0)
    ours = _EncoderDecoder()
    by_hand = copy.deepcopy(ours)
    rules = {
        "encoder.block.1": None,
        _Layer: {"reshard_after_forward": False},
        "**.experts.*": {},
    }
    assert shard_model(ours, rules, reshard_after_forward=True) is ours
    for stack in (by_hand.encoder, by_hand.decoder):
        for block in stack.block:
            for expert in block.experts:
                fully_shard(expert, reshard_after_forward=True)
            if block is not by_hand.encoder.block[1]:
                fully_shard(block, reshard_after_forward=False)
    fully_shard(by_hand, reshard_after_forward=True)
    models = (ours, by_hand)
    assert _sharded_fqns(ours) == _sharded_fqns(by_hand)
    assert [state.name for state in get_states(ours)] == [
        state.name for state in get_states(by_hand)
    ]
    assert [describe_options(state, state.settings) for state in get_states(ours)] == [
        describe_options(state, state.settings) for state in get_states(by_hand)
    ]
    losses = [_train_on_tokens(model) for model in models]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 4
    for param, expected in zip(ours.parameters(), by_hand.parameters(), strict=True):
        assert isinstance(param, FlatShard)
        assert torch.equal(param.to_local(), expected.to_local())
    assert_at_rest(ours)


def _train_on_tokens(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(4):
        tokens = rank_input(3, 5, step=step).mul(3).long() % 11
        loss = model(tokens).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "rules",
    [
        ALL,
        {Layer: {}, nn.Linear: {"reshard_after_forward": True}},
        [("blocks.1", None), ("blocks.**.up", {}), ("out", {})],
        {},
    ],
)
@distributed(2)
def test_training_equals_the_unsharded_model(rules: Any) -> None:
    """Whatever the units are."""
    twins = Twins(Net, lambda model: shard_model(model, rules))
    optimizers = twins.optimizers()
    for step in range(3):
        twins.step(lambda model, step=step: model(rank_input(4, 5, step=step)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        twins.assert_equal_parameters()


@distributed(2)
def test_shared_modules_train_as_one_unit() -> None:
    """A unit at two FQNs is one state with one handle for its parameters, tied ones borrowed."""
    twins = Twins(_SharedLinear, lambda model: shard_model(model, {"left.0": {}, "right": {}}))
    assert _sharded_fqns(twins.sharded) == ["", "left.0", "right"]
    sizes = [[str(e.label) for e in h.entries] for h in get_handles(twins.sharded)]
    assert sizes == [["left.0.weight", "left.0.bias"], ["right.1.bias"]]
    for step in range(2):
        twins.step(lambda model, step=step: model(rank_input(4, 3, step=step)).square().mean())


@distributed(2)
def test_transformer_blocks_shards_an_encoder_and_decoder() -> None:
    """The embedding at three places and the head tied to it form the root unit with the norms."""
    twins = Twins(_EncoderDecoder, lambda model: shard_model(model, transformer_blocks(model)))
    assert _sharded_fqns(twins.sharded) == [
        "",
        *(f"encoder.block.{index}" for index in range(2)),
        *(f"decoder.block.{index}" for index in range(3)),
    ]
    tokens = rank_input(3, 5).mul(3).long() % 11
    twins.step(lambda model: model(tokens).logsumexp(-1).mean())


@distributed(2)
def test_options_of_a_rule_reach_its_units_and_defaults_all_others() -> None:
    """A rule's option goes before the default of the same name; meshes may differ."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = Net()
    kept = model.blocks[0].up.bias
    by_block = {"mesh": mesh, "ignored_params": {kept}}
    rules = {Layer: by_block, "out": {"reshard_after_forward": True}}
    defaults = {"reshard_after_forward": False, "strategy": ShardingStrategy.FULL_SHARD}
    shard_model(model, rules, **defaults)
    options = [describe_options(state, state.settings).split()[-1] for state in get_states(model)]
    assert options == [f"reshard_after_forward={flag}" for flag in (*[False] * 4, True)]
    assert type(kept) is nn.Parameter
    groups = [handle.shard_group.name for handle in get_handles(model.blocks)]
    assert set(groups) == {mesh.get_group().group_name}


@distributed(2)
def test_sync_module_states_reaches_every_unit() -> None:
    """All ranks start from the first rank's values."""
    torch.manual_seed(dist.get_rank())
    model = shard_model(Net(), ALL, sync_module_states=True)
    torch.manual_seed(0)
    for param, expected in zip(model.parameters(), Net().parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected)


@distributed(2)
def test_meta_models_can_be_sharded() -> None:
    """Shard on the meta device, then allocate and initialise only the shards."""
    with torch.device("meta"):
        model = Net()
    shard_model(model, ALL)
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    model(rank_input(4, 5)).sum().backward()
    assert_at_rest(model)


# --- the dry run ---


@pytest.mark.fast
def test_dry_run_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Units, who took them, what they hold, and bytes per rank; no memory, no process group."""
    with torch.device("meta"):
        model = Net()
        model.blocks[1].double()
    before = [fingerprint(module) for module in model.modules()]
    rules = {Layer: {"reshard_after_forward": True}, "out": {"ignored_params": {model.out.bias}}}
    plan = shard_model(model, rules, dry_run=True, world_size=3, sync_module_states=True)
    lines = [
        "Net: 5 units; bytes of the first rank: parameters at rest, gradients after a backward, "
        "AdamW's state; how much of that is offloaded to the host; full parameters while gathered, "
        "in total the most at once in a forward; gathers and reductions per step, and bytes sent",
        "unit      class   rule            parameters  numel  ranks  params  grads  AdamW  on host"
        "  gathered  calls   sent  options",
        "blocks.0  Layer   rule 1 (Layer)           4    232      3     320    320    640"
        "        0       960      3  1,926  sync_module_states=True, reshard_after_forward=True",
        "blocks.1  Layer   rule 1 (Layer)           4    232      3     640    640  1,280"
        "        0     1,920      3  3,846  sync_module_states=True, reshard_after_forward=True",
        "blocks.2  Layer   rule 1 (Layer)           4    232      3     320    320    640"
        "        0       960      3  1,926  sync_module_states=True, reshard_after_forward=True",
        "out       Linear  rule 2 ('out')           1     45      3      64     64    128"
        "        0       192      3    386  sync_module_states=True, ignored_params=<1>",
        "(root)    Net     defaults                 2     90      3     128    128    256"
        "        0       384      2    515  sync_module_states=True",
        "total                                     15    831          1,472  1,472  2,944"
        "        0     4,416     14  8,596",
    ]
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if not line.startswith("---")] == lines
    assert printed == f"{plan}\n"
    assert [fingerprint(module) for module in model.modules()] == before


def test_dry_run_describes_options_in_words() -> None:
    """Enums by name, sets by size, long values shortened: no addresses, the same on all ranks."""
    plan = plan_of(Net(), {}, strategy=ShardingStrategy.FULL_SHARD, ignored_params=set())
    assert "strategy=FULL_SHARD, ignored_params=<0>" in str(plan)
    assert plan.units[0].world_size == 1


@pytest.mark.fast
@distributed(2)
def test_dry_run_says_what_a_run_does() -> None:
    """The same units in the same order; the bytes are those that a rank then holds."""
    torch.manual_seed(0)
    model = _EncoderDecoder()
    model.encoder.block[0].half().requires_grad_(False)
    mesh = init_device_mesh("cpu", (2,))
    rules = [*transformer_blocks(model), ("**.experts.*", {"mesh": mesh})]
    plan = plan_of(model, rules)
    shard_model(model, rules)
    assert {unit.fqn for unit in plan.units} == set(_sharded_fqns(model))
    modules = dict(model.named_modules())
    for unit in plan.units:
        state = fully_shard.state(modules[unit.fqn])  # type: ignore[attr-defined]
        shards = [handle.local_shard for handle in state.handles]
        entries = [entry for handle in state.handles for entry in handle.entries]
        assert unit.world_size == 2
        assert unit.num_params == len(entries), unit.fqn
        assert unit.numel == sum(entry.sharded.numel() for entry in entries), unit.fqn
        assert unit.cost.param_nbytes == sum(shard.nbytes for shard in shards), unit.fqn
    assert "mesh(2,)" in str(plan)


def test_dry_run_counts_a_tied_parameter_in_its_first_unit() -> None:
    """As `fully_shard` does: units after it borrow the parameter, whatever else they hold."""
    with torch.device("meta"):
        model = _SharedLinear()
        model.right[1].bias = nn.Parameter(torch.zeros(3, device="cpu"))
    plan = plan_of(model, {"left.0": {}, "right": {}})
    counts = {unit.fqn: (unit.num_params, unit.numel) for unit in plan.units}
    assert counts == {"left.0": (2, 12), "right": (1, 3), "": (0, 0)}


def test_dry_run_prints_once() -> None:
    """On rank 0 only; every rank gets the plan."""
    outputs = run_ranks(2, _print_plan)
    assert [bool(printed) for printed, _ in outputs] == [True, False]
    assert outputs[0][1] == outputs[1][1] == outputs[0][0].rstrip("\n")


def _print_plan() -> tuple[str, str]:
    written: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.stdout, "write", written.append)
        plan = plan_of(Net(), ALL)
    return "".join(written), str(plan)


FORWARDS: dict[str, dict[str, Any]] = {
    "default": {},
    "reshard": {"reshard_after_forward": True},
    "keep": {"reshard_after_forward": False},
    "zero 2": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
}


@pytest.mark.parametrize("name", FORWARDS)
@distributed(2)
def test_a_forward_gathers_as_much_at_once_as_the_dry_run_says(name: str) -> None:
    """Storages of full parameters, looked at when any layer runs; also of units inside units."""
    block = sum(param.nbytes for param in Net().blocks[0].parameters())
    for rules in (ALL, {Layer: {}, "blocks.*.*": {}}):
        for ahead in (0, 2 * block, 4 * block, 1 << 20):
            model = Net(5)
            options = {**FORWARDS[name], "prefetch_nbytes": ahead}
            plan = plan_of(model, rules, **options)
            shard_model(model, rules, **options)
            assert _most_gathered(model) == plan.peak_gathered_nbytes, (rules, ahead)


def _most_gathered(model: nn.Module) -> int:
    seen = []

    def look(*_: Any) -> None:
        storages = [h.unsharded.untyped_storage() for h in get_handles(model) if not h.is_kept]
        seen.append(sum(storage.nbytes() for storage in storages))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(look)
    for _ in range(2):
        model(rank_input(4, 5)).sum().backward()
    return max(seen)
