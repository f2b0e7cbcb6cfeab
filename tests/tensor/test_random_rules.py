"""Initialisation of FlatShards equals that of whole tensors, for any number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from composable_shard import fully_shard, unshard_params
from composable_shard.comm.trace import count_collectives
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.harness.versions import needs_torch
from tests.tensor.test_flat_shard import (
    DTYPES,
    OddShapes,
    assert_parameters_equal,
    full,
    shard,
    shard_module,
)

INITS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "uniform_": lambda w: nn.init.uniform_(w, -1, 2),
    "normal_": lambda w: nn.init.normal_(w, 1, 2),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, std=0.5),
    "trunc_normal_tail": lambda w: nn.init.trunc_normal_(w, a=1.5, b=3),
    "constant_": lambda w: nn.init.constant_(w, 3),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "orthogonal_": nn.init.orthogonal_,
}


@pytest.mark.fast
def test_every_init_function_of_torch_is_covered() -> None:
    """A new one must be added here; `sparse_` and `eye_` raise, `dirac_` has a test."""
    offered = {name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")}
    assert offered <= {*INITS, "dirac_", "eye_", "sparse_"}


@distributed(1, 2, 3)
@pytest.mark.parametrize("name", INITS)
def test_init_equals_the_unsharded_one(name: str) -> None:
    """From the same seed, and the generator is left in the same state."""
    for shape in ((7, 15), (15, 7), (67, 71)):
        whole, sharded = torch.zeros(shape), shard(torch.zeros(shape))
        after = []
        for tensor in (whole, nn.Parameter(sharded)):
            torch.manual_seed(3)
            INITS[name](tensor)
            after.append(torch.rand(()))
            result = full(tensor)
        assert_equal(result, whole)
        assert after[0] == after[1]


@needs_torch("2.13", "its trunc_normal_ draws once, so that the owner may run it")
@distributed(2)
def test_a_truncated_init_of_owned_parameters_names_its_remedy() -> None:
    """On all ranks: the owner alone knows how often to draw again."""
    model = fully_shard(nn.Linear(7, 5), granularity="param", sync_module_states=True)
    with pytest.raises(RuntimeError, match=r"trunc_normal_ inside unshard_params"):
        nn.init.trunc_normal_(model.weight, std=0.5)


@distributed(2)
def test_a_truncated_init_inside_unshard_params_is_that_of_plain_parameters() -> None:
    """The remedy."""
    torch.manual_seed(3)
    plain = nn.Linear(7, 5)
    model = fully_shard(copy.deepcopy(plain), granularity="param")
    for each, scope in (plain, nullcontext()), (model, unshard_params(model)):
        torch.manual_seed(4)
        with scope:
            nn.init.trunc_normal_(each.weight, std=0.5)
    assert_equal(model.weight.detach().full_tensor(), plain.weight.detach())


@distributed(1, 2, 3)
@pytest.mark.parametrize("groups", [1, 2])
def test_dirac_equals_the_unsharded_one(groups: int) -> None:
    """For one, two and three spatial dims."""
    for shape in ((4, 3, 5), (4, 3, 3, 3), (4, 2, 3, 3, 3)):
        whole, sharded = torch.ones(shape), nn.Parameter(shard(torch.ones(shape)))
        nn.init.dirac_(whole, groups)
        nn.init.dirac_(sharded, groups)
        assert_equal(full(sharded), whole)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(15, 7),
    "embedding": lambda: nn.Embedding(15, 7, padding_idx=3),
    "conv2d": lambda: nn.Conv2d(3, 5, 3),
    "layer_norm": lambda: nn.LayerNorm(7),
    "batch_norm": lambda: nn.BatchNorm1d(7),
    "lstm": lambda: nn.LSTM(5, 7, num_layers=2),
    "bilinear": lambda: nn.Bilinear(3, 5, 7),
}


@distributed(1, 2, 3)
@pytest.mark.parametrize("name", MODULES)
def test_reset_parameters_equals_the_unsharded_one(name: str) -> None:
    """torch's modules initialise their sharded parameters themselves."""
    plain = MODULES[name]()
    sharded = copy.deepcopy(plain)
    shard_module(sharded)
    for module in (plain, sharded):
        torch.manual_seed(3)
        module.reset_parameters()
    assert_parameters_equal(sharded, plain)


@distributed(2)
def test_reset_parameters_of_attention_equals_the_unsharded_one() -> None:
    """MultiheadAttention names the method otherwise."""
    plain = nn.MultiheadAttention(8, 2)
    sharded = copy.deepcopy(plain)  # it leaves the output projection as it is
    shard_module(sharded)
    for module in (plain, sharded):
        torch.manual_seed(3)
        module._reset_parameters()
    assert_parameters_equal(sharded, plain)


@distributed(2)
def test_meta_module_initialises_after_to_empty() -> None:
    """The deferred-initialisation recipe: meta, shard, to_empty, reset_parameters."""
    torch.manual_seed(3)
    plain = nn.Linear(15, 7)
    with torch.device("meta"):
        sharded = nn.Linear(15, 7)
    shard_module(sharded)
    sharded.to_empty(device="cpu")
    torch.manual_seed(3)
    sharded.reset_parameters()
    assert_parameters_equal(sharded, plain)


FILLS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal_": lambda x: x.normal_(1, 2),
    "uniform_": lambda x: x.uniform_(-1, 1),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "exponential_": lambda x: x.exponential_(2),
    "random_": lambda x: x.random_(),
    "random_to": lambda x: x.random_(7),
    "random_from": lambda x: x.random_(3, 7),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randint_like_low": lambda x: torch.randint_like(x, 3, 9),
    "dropout": lambda x: nn.functional.dropout(x, 0.3),
    "generator": lambda x: x.normal_(generator=torch.Generator().manual_seed(5)),
}


@distributed(2, 3)
@pytest.mark.parametrize("name", FILLS)
def test_random_fill_equals_the_unsharded_one(name: str) -> None:
    """For every shape and layout, without communication."""
    plain, sharded = OddShapes(), OddShapes()
    shard_module(sharded)
    for one, other in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.manual_seed(3)
        expected = FILLS[name](one.detach())
        torch.manual_seed(3)
        with count_collectives() as log:
            result = FILLS[name](other.detach())
        assert not log.events
        assert_equal(full(result), expected)


@distributed(2)
def test_random_fill_of_every_dtype_equals_the_unsharded_one() -> None:
    """bfloat16 and complex draws depend on the dtype."""
    for dtype in DTYPES:
        plain, sharded = OddShapes(dtype), OddShapes(dtype)
        shard_module(sharded)
        for model in (plain, sharded):
            torch.manual_seed(3)
            with torch.no_grad():
                for param in model.parameters():
                    param.normal_()
        assert_parameters_equal(sharded, plain)
