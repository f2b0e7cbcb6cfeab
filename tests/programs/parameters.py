"""What people do to parameters at rest, as programs on parameters by name that have gradients.

What a program returns is compared too. `PROGRAMS` are for the parameters of two models of `Parts`,
those of the second one under `other.`; `FLAT_PROGRAMS` are for two vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

Named = dict[str, Any]
Program = Callable[[Named], Any]
PROGRAMS: dict[str, Program] = {}


class Parts(nn.Module):
    """Parameters of odd shapes: two of one shape, a square, a filter, vectors, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 4)
        self.a = nn.Linear(5, 7)
        self.b = nn.Linear(5, 7, bias=False)
        self.square = nn.Linear(6, 6)
        self.conv = nn.Conv1d(3, 4, 2)
        self.gain = nn.Parameter(torch.rand(5))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return a layer's output."""
        return self.a(inputs * self.gain) * self.scale


def program(run: Program) -> Program:
    """Enter a program by its name."""
    PROGRAMS[run.__name__] = run
    return run


def _drawn_alike() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _put(target: Tensor, index: Any, value: Any) -> None:
    target[index] = value


def _positive(x: Tensor) -> Tensor:
    return x @ x.T + torch.eye(len(x))


def _gradients(p: Named) -> list[Tensor]:
    return [x.grad for x in p.values()]


_MASK = torch.arange(35).view(7, 5) % 3 == 0
_IDS = torch.tensor([5, 1, 1])

# --- factors, centring, noise ---
PROGRAMS |= {
    "factor for each filter": lambda p: p["conv.weight"].div_(
        p["conv.weight"].flatten(1).norm(dim=1).view(-1, 1, 1)
    ),
    "weight norm": lambda p: torch._weight_norm(
        p["a.weight"], p["a.weight"].norm(dim=1, keepdim=True), 0
    ),
    "noise in place": lambda p: [x.normal_(generator=_drawn_alike()) for x in p.values()],
    "noise in columns": lambda p: p["a.weight"][:, 1].uniform_(generator=_drawn_alike()),
    "noise like": lambda p: [x.add_(torch.randn_like(x)) for x in p.values()],
    "other noise": lambda p: (
        p["a.weight"].cauchy_(generator=_drawn_alike()),
        p["b.weight"].log_normal_(generator=_drawn_alike()),
        p["gain"].geometric_(0.5, generator=_drawn_alike()),
    ),
    "noise around": lambda p: torch.normal(p["a.weight"], 0.1, generator=_drawn_alike()),
    "noise of a size": lambda p: torch.normal(0.0, p["a.weight"].abs(), generator=_drawn_alike()),
    "poisson": lambda p: torch.poisson(p["a.weight"].abs() * 5, generator=_drawn_alike()),
    "dropout": lambda p: functional.dropout(p["a.weight"], 0.5),
    "alpha dropout": lambda p: functional.alpha_dropout(p["a.weight"], 0.5, True),
    "multinomial": lambda p: torch.multinomial(p["a.weight"].abs(), 2, generator=_drawn_alike()),
    "gumbel": lambda p: functional.gumbel_softmax(p["a.weight"], dim=1),
    "stochastic rounding": lambda p: [
        x.copy_((x * 64 + torch.rand(x.shape, generator=_drawn_alike())).floor() / 64)
        for x in p.values()
    ],
    "bernoulli by itself": lambda p: p["a.weight"].bernoulli_(p["b.weight"].sigmoid()),
    "rand_like of a dtype": lambda p: torch.rand_like(p["a.weight"], dtype=torch.float64),
    "permuted columns": lambda p: p["a.weight"].copy_(
        p["a.weight"][:, torch.randperm(5, generator=_drawn_alike())]
    ),
    "inits": lambda p: (
        nn.init.orthogonal_(p["square.weight"]),
        nn.init.trunc_normal_(p["a.weight"], std=0.02),
        nn.init.xavier_uniform_(p["b.weight"]),
        nn.init.kaiming_normal_(p["conv.weight"]),
        nn.init.zeros_(p["gain"]),
    ),
    "rare inits": lambda p: (
        nn.init.sparse_(p["a.weight"], 0.3),
        nn.init.dirac_(p["conv.weight"]),
        nn.init.constant_(p["scale"], 2.0),
    ),
}


@program
def centred_in_all_dims(p: Named) -> None:
    """Gradient centralisation of any shape."""
    for grad in _gradients(p):
        if grad.dim() > 1:
            grad.sub_(grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True))


@program
def swapped_with_averages(p: Named) -> list[Tensor]:
    """Evaluate with averages: parameters and plain tensors change places."""
    averages = [torch.full(x.shape, 0.5) for x in p.values()]
    for average, x in zip(averages, p.values(), strict=True):
        kept = x.clone()
        x.copy_(average)
        average.copy_(kept)
        average += x
        average -= x.grad * 0.1
    return averages


# --- pruning, selection ---
@program
def pruned_by_a_global_quantile(p: Named) -> None:
    """By importance, over all parameters."""
    found = torch.cat([(x * x.grad).abs().flatten() for x in p.values()])
    least = torch.quantile(found, 0.3)
    for x in p.values():
        x.mul_(((x * x.grad).abs() > least).to(x.dtype))


@program
def pruned_to_two_of_four(p: Named) -> None:
    """The smaller two of each four elements."""
    weight = p["emb.weight"]
    indices = weight.abs().topk(2, dim=1, largest=False).indices
    weight.masked_fill_(torch.zeros_like(weight, dtype=torch.bool).scatter(1, indices, True), 0)


@program
def largest_gradients_with_residuals(p: Named) -> list[Tensor]:
    """Sparse gradients, and what was left out."""
    left = []
    for x in p.values():
        flat = x.grad.flatten()
        found = flat.abs().topk(max(1, flat.numel() // 4)).indices
        sparse = torch.zeros_like(flat)
        sparse[found] = flat[found]
        left.append(flat - sparse)
        x.grad.copy_(sparse.view_as(x.grad))
    return left


PROGRAMS |= {
    "pruned rows": lambda p: _put(
        p["a.weight"], p["a.weight"].norm(dim=1) < p["a.weight"].norm(dim=1).median(), 0.0
    ),
    "rows by a vector's sign": lambda p: _put(p["a.weight"], p["a.bias"] > 0, 0.0),
    "rows of a square by sign": lambda p: _put(p["square.weight"], p["square.bias"] > 0, 2.0),
    "filters by sign": lambda p: _put(p["conv.weight"], p["conv.bias"] > 0, 2.0),
    "rows read by sign": lambda p: p["square.weight"][p["square.bias"] > 0],
    "indices of its own shape": lambda p: _put(
        p["b.weight"].view(-1), (p["b.weight"] > 0.1).long().view(-1), 7.0
    ),
    "by its own order": lambda p: _put(
        p["b.weight"].view(-1), p["b.weight"].view(-1).argsort(), p["a.weight"].view(-1)
    ),
    "columns by sign": lambda p: _put(p["square.weight"], (slice(None), p["square.bias"] > 0), 1.0),
    "scaled by mask": lambda p: _put(p["a.weight"], _MASK, p["a.weight"][_MASK] * 2),
    "vector into mask": lambda p: _put(p["a.weight"], _MASK, torch.arange(12.0)),
    "masks of two": lambda p: _put(
        p["a.weight"], (p["a.weight"] > 0) & ~(p["b.weight"] > 0), p["scale"]
    ),
    "mask accumulates": lambda p: p["a.weight"].index_put_(
        (p["a.weight"] > 0,), torch.tensor(1.0), accumulate=True
    ),
    "counts of masks": lambda p: ((p["a.weight"] > 0).sum(1), (p["a.weight"] > 0).sum()),
    "top-k of rows": lambda p: tuple(p["a.weight"].topk(2, dim=1)),
    "masked median": lambda p: p["a.weight"].masked_select(p["b.weight"] > 0).median(),
    "nonzero": lambda p: (p["a.weight"] > 0).nonzero(),
    "nonzero as tuple": lambda p: torch.where(p["a.weight"] > 0),
}

# --- dots, similarities, distances ---
PROGRAMS |= {
    "cosine of rows": lambda p: functional.cosine_similarity(p["a.weight"], p["b.weight"], dim=1),
    "cosine with plain": lambda p: functional.cosine_similarity(
        p["a.weight"], torch.ones(7, 5), dim=1
    ),
    "cosine of all": lambda p: functional.cosine_similarity(
        parameters_to_vector(p.values()), torch.cat([x.flatten() for x in _gradients(p)]), dim=0
    ),
    "inner": lambda p: torch.inner(p["a.weight"], p["b.weight"]),
    "vdot": lambda p: torch.vdot(p["a.weight"].flatten(), p["b.weight"].grad.flatten()),
    "linalg.vecdot": lambda p: torch.linalg.vecdot(p["a.weight"], p["b.weight"]),
    "sum of products": lambda p: (p["a.weight"] * p["a.weight"].grad).sum(),
    "dist": lambda p: torch.dist(p["a.weight"], p["b.weight"]),
    "cdist": lambda p: torch.cdist(p["a.weight"], p["b.weight"]),
    "pdist": lambda p: functional.pdist(p["a.weight"]),
    "pairwise distance": lambda p: functional.pairwise_distance(p["a.weight"], p["b.weight"]),
    "mse": lambda p: functional.mse_loss(p["a.weight"], p["b.weight"]),
    "mse with plain": lambda p: functional.mse_loss(p["a.weight"], torch.ones(7, 5)),
    "l1": lambda p: functional.l1_loss(p["a.weight"], p["a.weight"].grad, reduction="sum"),
    "smooth l1": lambda p: functional.smooth_l1_loss(p["a.weight"], p["b.weight"]),
    "huber, not reduced": lambda p: functional.huber_loss(
        p["a.weight"], p["b.weight"], reduction="none"
    ),
    "kl": lambda p: functional.kl_div(
        p["a.weight"].log_softmax(1), p["b.weight"].softmax(1), reduction="batchmean"
    ),
    "cross entropy": lambda p: functional.cross_entropy(p["a.weight"], torch.arange(7) % 5),
    "covariance": lambda p: (torch.cov(p["a.weight"]), torch.corrcoef(p["a.weight"])),
}

# --- matrices ---
PROGRAMS |= {
    "merged adapters": lambda p: p["a.weight"].addmm_(
        torch.ones(7, 2), torch.full((2, 5), 0.1), alpha=0.5
    ),
    "adapters at rest": lambda p: p["a.weight"].addmm_(p["a.weight"][:, :2], p["b.weight"][:2]),
    "mv": lambda p: p["a.weight"] @ p["gain"],
    "addmv": lambda p: p["a.bias"].addmv_(p["a.weight"], p["gain"]),
    "addr": lambda p: p["a.weight"].addr_(p["a.bias"], p["gain"]),
    "bmm": lambda p: torch.bmm(p["conv.weight"], p["conv.weight"].mT),
    "baddbmm": lambda p: p["conv.weight"].baddbmm_(p["conv.weight"], torch.ones(4, 2, 2)),
    "tensordot": lambda p: torch.tensordot(p["a.weight"], p["b.weight"], dims=([0], [0])),
    "multi_dot": lambda p: torch.linalg.multi_dot([p["a.weight"], p["b.weight"].T, p["a.weight"]]),
    "matrix power": lambda p: torch.linalg.matrix_power(p["square.weight"], 3),
    "bilinear": lambda p: functional.bilinear(
        torch.ones(2, 3), torch.ones(2, 2), p["conv.weight"], p["conv.bias"]
    ),
    "einsum to a number": lambda p: torch.einsum("ij,ij->", p["a.weight"], p["b.weight"]),
    "einsum transpose": lambda p: torch.einsum("ij->ji", p["a.weight"]).mul_(2),
    "einsum diagonal": lambda p: torch.einsum("ii->i", p["square.weight"]).mul_(2),
    "einsum of three": lambda p: torch.einsum(
        "ij,kj,k->i", p["a.weight"], p["b.weight"], p["a.bias"]
    ),
    "kron": lambda p: torch.kron(p["a.weight"], p["conv.bias"][:, None]),
    "block_diag": lambda p: torch.block_diag(p["a.weight"], p["square.weight"]),
    "convolution": lambda p: functional.conv1d(
        torch.ones(1, 3, 5), p["conv.weight"], p["conv.bias"]
    ),
    "attention": lambda p: functional.scaled_dot_product_attention(
        p["a.weight"][None], p["b.weight"][None], p["b.weight"][None]
    ),
    "rotated": lambda p: p["square.weight"].copy_(
        torch.linalg.qr(torch.arange(36.0).view(6, 6).cos()).Q @ p["square.weight"]
    ),
    "orthogonal penalty": lambda p: p["square.weight"].sub_(
        p["square.weight"] @ (p["square.weight"].T @ p["square.weight"] - torch.eye(6)), alpha=0.01
    ),
    "qr": lambda p: tuple(torch.linalg.qr(p["a.weight"])),
    "svd": lambda p: torch.linalg.svd(p["a.weight"]).S,
    "low rank": lambda p: p["a.weight"].copy_(_low_rank(p["a.weight"], 2)),
    "svd_lowrank": lambda p: torch.svd_lowrank(p["a.weight"], 5)[1],
    "cholesky": lambda p: torch.linalg.cholesky(_positive(p["square.weight"])),
    "eigh": lambda p: torch.linalg.eigvalsh(_positive(p["square.weight"])),
    "eigh of a symmetric sum": lambda p: (
        torch.linalg.eigh(p["square.weight"] + p["square.weight"].T).eigenvalues
    ),
    "lstsq": lambda p: torch.linalg.lstsq(p["a.weight"], p["b.weight"]).solution,
    "pinv": lambda p: torch.linalg.pinv(p["a.weight"]),
    "solve": lambda p: torch.linalg.solve(_positive(p["square.weight"]), p["square.bias"]),
    "triangular": lambda p: torch.linalg.solve_triangular(
        p["square.weight"].tril() + 3 * torch.eye(6), p["square.weight"], upper=False
    ),
    "slogdet": lambda p: tuple(torch.linalg.slogdet(p["square.weight"])),
    "det": lambda p: torch.det(p["square.weight"]),
    "matrix_exp": lambda p: torch.linalg.matrix_exp(p["square.weight"]),
    "lu": lambda p: tuple(torch.linalg.lu(p["square.weight"])),
    "rank and condition": lambda p: (
        torch.linalg.matrix_rank(p["a.weight"]),
        torch.linalg.cond(p["square.weight"]),
    ),
    "eigenvalues": lambda p: torch.linalg.eigvals(p["square.weight"]).abs().sort().values,
    "inverse root": lambda p: _inverse_root(_positive(p["a.weight"].grad)) @ p["a.weight"].grad,
    "trace": lambda p: torch.trace(p["square.weight"]),
    "fft": lambda p: torch.fft.ifft(torch.fft.fft(p["a.weight"])).real,
    "rfft": lambda p: torch.fft.irfft2(torch.fft.rfft2(p["a.weight"]), s=(7, 5)),
}


def _low_rank(x: Tensor, rank: int) -> Tensor:
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    return u[:, :rank] @ torch.diag(s[:rank]) @ v[:rank]


def _inverse_root(x: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(x)
    return vectors @ torch.diag(values.pow(-0.25)) @ vectors.T


# --- norms, order statistics ---
PROGRAMS |= {
    "norms of a matrix": lambda p: [
        torch.linalg.matrix_norm(p["a.weight"], order)
        for order in ("fro", "nuc", 1, -1, 2, -2, float("inf"))
    ],
    "norms of a vector": lambda p: [
        torch.linalg.vector_norm(p["a.weight"], order)
        for order in (0, 0.5, 1, 3, float("inf"), -float("inf"), -1)
    ],
    "norms of rows": lambda p: [
        torch.linalg.vector_norm(p["a.weight"], order, dim=1, keepdim=True)
        for order in (0, 0.5, 1, 3, float("inf"), -float("inf"))
    ],
    "norm in another dtype": lambda p: (
        torch.linalg.vector_norm(p["a.weight"], dtype=torch.float64),
        p["a.weight"].norm(dim=0, dtype=torch.float64),
        p["a.weight"].sum(dtype=torch.float64),
        p["a.weight"].mean(1, dtype=torch.float64),
    ),
    "norm of a transpose": lambda p: p["a.weight"].t().norm(dim=1),
    "norm of columns": lambda p: p["a.weight"][:, 1:3].norm(dim=0),
    "norm of rows of rows": lambda p: p["a.weight"][2:5].norm(dim=1),
    "norm of filters": lambda p: p["conv.weight"].norm(p=1, dim=(0, 2)),
    "norm of a negative dim": lambda p: p["conv.weight"].norm(dim=-2),
    "means of rows of a range": lambda p: p["emb.weight"][3:9].mean(0),
    "normalize rows": lambda p: p["a.weight"].copy_(
        functional.normalize(p["a.weight"], p=1, dim=1)
    ),
    "renorm": lambda p: torch.renorm(p["a.weight"], 1, 1, 0.5),
    "layer norm": lambda p: functional.layer_norm(p["a.weight"], (5,), p["gain"]),
    "rms norm": lambda p: functional.rms_norm(p["a.weight"], (5,), p["gain"]),
    "quantiles": lambda p: torch.quantile(p["a.weight"], torch.tensor([0.2, 0.7]), dim=1),
    "nanquantile": lambda p: torch.nanquantile(p["a.weight"], 0.5, dim=0, keepdim=True),
    "medians": lambda p: (
        p["a.weight"].median(),
        p["a.weight"].median(0).values,
        p["a.weight"].mode(1).values,
    ),
    "kthvalue": lambda p: p["a.weight"].kthvalue(2, dim=0).values,
    "sorted": lambda p: p["a.weight"].copy_(p["a.weight"].sort(dim=1, descending=True).values),
    "argsort": lambda p: p["a.weight"].argsort(dim=0),
    "argmax": lambda p: (p["a.weight"].argmax(), p["a.weight"].argmin(1), p["gain"].argmax(0)),
    "unique": lambda p: torch.unique(p["a.weight"].mul(3).round(), return_counts=True),
    "unique rows": lambda p: torch.unique(p["a.weight"].sign(), dim=0),
    "histc": lambda p: torch.histc(p["a.weight"], 6, -1, 1),
    "histogram": lambda p: tuple(torch.histogram(p["a.weight"], 4)),
    "bincount": lambda p: torch.bincount((p["a.weight"] > 0).long().flatten(), minlength=3),
    "bucketize": lambda p: torch.bucketize(p["a.weight"], torch.tensor([-0.2, 0.0, 0.2])),
    "searchsorted": lambda p: torch.searchsorted(p["gain"].sort().values, p["a.bias"]),
    "isin": lambda p: torch.isin(p["a.weight"].sign(), torch.tensor([1.0])),
    "statistics": lambda p: [
        *(x.std() for x in p.values() if x.numel() > 1),
        *torch.std_mean(p["a.weight"], dim=0),
        *torch.aminmax(p["a.weight"]),
        *torch.var_mean(p["conv.weight"], dim=(0, 2), keepdim=True),
    ],
    "truth of rows": lambda p: ((p["a.weight"] > 0).any(1), (p["a.weight"] > 0).all(0)),
    "finite": lambda p: (
        p["a.weight"].isfinite().all(),
        p["a.weight"].isnan().any(),
        p["a.weight"].nansum(),
    ),
    "counts of rows": lambda p: p["a.weight"].count_nonzero(dim=1),
    "products of rows": lambda p: (p["a.weight"].prod(1), p["a.weight"].prod()),
    "logsumexp of all": lambda p: p["a.weight"].logsumexp((0, 1)),
    "cumulative": lambda p: (
        p["a.weight"].cumsum_(1),
        p["b.weight"].cumprod(0),
        p["a.weight"].logcumsumexp(0),
        tuple(p["b.weight"].cummax(1)),
    ),
    "diff": lambda p: (torch.diff(p["a.weight"]), torch.gradient(p["gain"])[0]),
    "comparisons": lambda p: (
        torch.equal(p["a.weight"], p["a.weight"].clone()),
        torch.allclose(p["a.weight"], p["b.weight"]),
        torch.isclose(p["a.weight"], torch.zeros(5)),
        p["a.weight"] <= p["b.weight"],
    ),
}

# --- rearranging ---
PROGRAMS |= {
    "roll": lambda p: p["a.weight"].roll((1, -2), (0, 1)),
    "roll of all": lambda p: p["a.weight"].roll(3),
    "flip": lambda p: (p["a.weight"].flip(0), p["a.weight"].fliplr(), p["square.weight"].rot90()),
    "triangles": lambda p: (p["square.weight"].triu_(1), p["a.weight"].tril(-1)),
    "diag": lambda p: (
        torch.diag(p["square.weight"]),
        torch.diag(p["gain"]),
        p["gain"].diag_embed(),
    ),
    "fill_diagonal": lambda p: p["a.weight"].fill_diagonal_(3.0),
    "unfold": lambda p: p["a.weight"].unfold(0, 3, 2).sum(-1),
    "chunks and unbind": lambda p: (
        torch.stack(p["a.weight"].unbind(1)),
        torch.cat(p["a.weight"].split([2, 5])),
        torch.hstack(p["a.weight"].tensor_split([1, 3], dim=1)),
        torch.vstack([p["gain"]] * 2),
    ),
    "fused and split again": lambda p: [
        x.copy_(part * 2)
        for x, part in zip(
            (p["a.weight"], p["b.weight"]),
            torch.cat([p["a.weight"], p["b.weight"]]).chunk(2),
            strict=True,
        )
    ],
    "repeated": lambda p: (
        p["a.weight"].repeat(2, 1),
        p["gain"].tile(3),
        p["a.weight"].repeat_interleave(2, dim=0),
    ),
    "expanded": lambda p: (p["gain"].expand(3, 5) * 2, p["a.weight"].broadcast_to(2, 7, 5).sum(0)),
    "meshgrid": lambda p: torch.stack(torch.meshgrid(p["gain"], p["a.bias"], indexing="ij")),
    "dims moved": lambda p: (
        p["conv.weight"].movedim(0, 2).reshape(3, -1),
        p["conv.weight"].swapaxes(0, 1).flatten(),
        p["conv.weight"].permute(2, 1, 0).contiguous(),
        p["a.weight"].unsqueeze(1).squeeze(),
    ),
    "reshaped transpose": lambda p: p["a.weight"].t().reshape(7, 5) + p["b.weight"],
    "padded": lambda p: functional.pad(p["emb.weight"], (0, 0, 0, 2)),
    "interpolated": lambda p: functional.interpolate(p["conv.weight"], size=5, mode="linear"),
    "stack of elements": lambda p: torch.stack([p["a.weight"][0, 0], p["gain"][1]]),
    "cross": lambda p: torch.cross(p["conv.weight"], p["conv.weight"].roll(1, 0), dim=1),
    "outer of two": lambda p: torch.outer(p["gain"], p["a.bias"]).mul_(p["a.weight"].t()),
    "combinations": lambda p: torch.combinations(p["gain"]),
    "vander": lambda p: torch.vander(p["gain"]),
    "cartesian": lambda p: torch.cartesian_prod(p["gain"], p["scale"].view(1)),
    "strided": lambda p: p["a.weight"].as_strided((3, 2), (5, 2), 1).mul_(2),
    "take": lambda p: (
        torch.take(p["a.weight"], _IDS),
        p["a.weight"].index_select(1, _IDS % 5),
        torch.take_along_dim(p["a.weight"], p["a.weight"].argmax(1, keepdim=True), 1),
        p["a.weight"].gather(0, torch.tensor([[1, 0, 4, 2, 3]])),
    ),
    "swapped rows": lambda p: _put(p["a.weight"], [0, 6], p["a.weight"][[6, 0]]),
    "swap by a copy": lambda p: _swap(p["a.weight"], 1, 4),
    "resized embedding": lambda p: _resized(p["emb.weight"], 13),
}


def _swap(x: Tensor, one: int, other: int) -> None:
    kept = x[one].clone()
    x[one] = x[other]
    x[other] = kept


def _resized(x: Tensor, rows: int) -> Tensor:
    new = torch.zeros(rows, x.shape[1])
    new[: len(x)] = x
    new[len(x) :] = x.mean(0)
    return new


# --- indices ---
_READS: dict[str, Any] = {
    "last": -1,
    "element": (-1, -2),
    "column": (..., 0),
    "rows and columns": (slice(1, 6, 2), slice(None, None, 2)),
    "column list": (slice(None), [1, 3]),
    "row list": [0, -1],
    "pairs": ([0, 2], [1, 3]),
    "grid": (torch.tensor([[0], [3]]), torch.tensor([1, 4])),
    "new dims": (None, slice(2), None, 1),
    "mask": _MASK,
    "mask of rows": torch.arange(7) > 3,
    "mask of columns": (slice(None), torch.arange(5) % 2 == 0),
    "list of flags": [True, False, True, True, False, False, True],
    "nothing": slice(3, 3),
    "all": ...,
    "after a list": ([4, 1], slice(1, 3)),
    "true": True,
}


@program
def index_reads(p: Named) -> list[Tensor]:
    """Of all kinds."""
    return [p["a.weight"][index] for index in _READS.values()]


@program
def index_writes(p: Named) -> list[Tensor]:
    """Of a number, of a tensor, in place."""
    found = []
    for number, index in enumerate(_READS.values()):
        weight = p["a.weight"]
        weight[index] = number
        weight[index] += 0.5
        weight[index] = p["b.weight"].clone()[index] * number
        weight[index] = torch.full(torch.zeros(7, 5)[index].shape, 0.25)
        found.append(weight.clone())
    return found


PROGRAMS |= {
    "into a filter": lambda p: _put(
        p["conv.weight"], (slice(None), slice(None), 0), p["conv.weight"][:, :, 1].clone()
    ),
    "list in the middle": lambda p: _put(p["conv.weight"], (slice(None), [0, 2], 1), 3.0),
    "row of a vector": lambda p: _put(p["a.weight"], -1, p["gain"]),
    "column of a vector": lambda p: _put(p["a.weight"], (slice(None), 0), p["a.bias"]),
    "added at indices": lambda p: p["a.weight"].index_put_(
        (_IDS,), p["b.weight"][:3].clone(), accumulate=True
    ),
    "index_copy": lambda p: p["a.weight"].index_copy_(0, torch.tensor([3, 0]), torch.ones(2, 5)),
    "index_fill": lambda p: p["a.weight"].index_fill_(1, torch.tensor([3, 0]), 2.0),
    "index_add of rows at rest": lambda p: p["a.weight"].index_add_(0, _IDS, p["b.weight"][:3]),
    "index_reduce": lambda p: p["a.weight"].index_reduce_(0, _IDS, torch.ones(3, 5), "amax"),
    "put": lambda p: p["a.weight"].put_(torch.tensor([3, 30]), torch.tensor([1.0, 2.0])),
    "scatter_add": lambda p: p["a.weight"].scatter_add_(
        1, p["a.weight"].argmax(1, keepdim=True), torch.ones(7, 1)
    ),
    "scatter of another": lambda p: p["a.weight"].scatter_(
        0, torch.zeros(1, 5, dtype=torch.long), p["b.weight"]
    ),
    "scatter_reduce": lambda p: p["a.weight"].scatter_reduce_(
        1, torch.ones(7, 5, dtype=torch.long), p["b.weight"], "amax"
    ),
    "masked_scatter": lambda p: p["a.weight"].masked_scatter_(_MASK, torch.arange(12.0)),
    "masked_scatter by itself": lambda p: p["a.weight"].masked_scatter_(
        p["b.weight"] > 0, torch.arange(35.0)
    ),
    "masked_fill of rows": lambda p: p["a.weight"].masked_fill_((p["a.bias"] > 0)[:, None], 1.0),
    "masked_fill by a number at rest": lambda p: p["a.weight"].masked_fill_(_MASK, p["scale"]),
    "scattered slices": lambda p: (
        p["a.weight"].select_scatter(p["gain"], 0, 2),
        p["a.weight"].slice_scatter(p["b.weight"][:2], 0, 3, 5),
        p["square.weight"].diagonal_scatter(p["square.bias"]),
    ),
    "where of numbers": lambda p: torch.where(p["a.weight"] > 0, 1.0, p["a.weight"]),
    "where of rows": lambda p: torch.where(
        (p["a.bias"] > 0)[:, None], p["a.weight"], torch.zeros(7, 5)
    ),
    "where by plain": lambda p: torch.where(_MASK, p["a.weight"], p["gain"]),
    "max_norm of an embedding": lambda p: functional.embedding(_IDS, p["emb.weight"], max_norm=0.5),
    "embedding bag": lambda p: functional.embedding_bag(_IDS[None], p["emb.weight"], mode="mean"),
    "padding row": lambda p: p["emb.weight"].data[3].zero_(),
}

# --- views that are no flat range ---
PROGRAMS |= {
    "row of a transpose": lambda p: p["a.weight"].t()[0].add_(1.0),
    "every other column": lambda p: p["a.weight"][:, ::2].mul_(3.0),
    "rows of a transpose": lambda p: p["a.weight"].t()[1:3].copy_(torch.ones(2, 7)),
    "steps of all": lambda p: p["a.weight"].view(-1)[::4].fill_(p["scale"]),
    "middle dim": lambda p: p["conv.weight"].transpose(0, 2)[1].zero_(),
    "diagonal from a vector": lambda p: p["square.weight"].diagonal().copy_(p["square.bias"]),
    "diagonal below": lambda p: p["square.weight"].diagonal(-1).mul_(torch.arange(5.0)),
    "out in a column": lambda p: torch.add(
        p["a.weight"][:, 0], 1.0, out=p["a.weight"].detach()[:, 0]
    ),
    "column from a column": lambda p: p["a.weight"][:, 0].copy_(p["b.weight"][:, 2]),
    "column and row": lambda p: p["square.weight"][:, 0].sub_(p["square.weight"][1].clone()),
    "view of a view": lambda p: p["conv.weight"].permute(1, 2, 0)[0, :, 1:3].t()[0].mul_(5.0),
    "unbound columns": lambda p: [x.mul_(i) for i, x in enumerate(p["a.weight"].unbind(1))],
    "heads of a projection": lambda p: p["square.weight"].view(2, 3, 6)[:, 1].mul_(2.0),
    "columns by lists": lambda p: torch._foreach_add_(
        list(p["a.weight"].split(2, dim=1)), [torch.ones(2), torch.ones(7, 2), p["scale"]]
    ),
    "halves of columns": lambda p: p["square.weight"][:, :3].sub_(
        p["square.weight"][:, 3:].clone()
    ),
    "bits of a column": lambda p: p["a.weight"].view(torch.int32)[:, 0].bitwise_and_(-65536),
    "lerp of columns": lambda p: p["a.weight"][:, 1:].lerp_(torch.ones(7, 4), 0.25),
    "norms of columns": lambda p: p["a.weight"][:, ::2].div_(p["a.weight"][:, ::2].norm(dim=0)),
    "view of a view read": lambda p: (
        p["a.weight"].t()[::2].sum(),
        p["a.weight"].t()[1].max(),
        p["a.weight"][::2].mean(1),
    ),
}

# --- operands ---
PROGRAMS |= {
    "out of matmul": lambda p: torch.matmul(p["a.weight"], p["b.weight"].T, out=torch.zeros(7, 7)),
    "out of another shape": lambda p: torch.add(p["a.weight"], 1.0, out=torch.empty(0)),
    "out at rest of matmul": lambda p: torch.mm(
        p["square.weight"], p["square.weight"].clone(), out=p["square.weight"].grad
    ),
    "out of reductions": lambda p: (
        torch.sum(p["a.weight"], 1, out=torch.zeros(7)),
        torch.amax(p["a.weight"], 0, out=torch.zeros(5)),
        tuple(torch.max(p["a.weight"], 1, out=(torch.zeros(7), torch.zeros(7, dtype=torch.long)))),
        torch.linalg.vector_norm(p["a.weight"], 2, 1, out=torch.zeros(7)),
    ),
    "out of cat": lambda p: torch.cat([p["a.weight"], p["b.weight"]], out=torch.zeros(14, 5)),
    "out at rest of cumsum": lambda p: torch.cumsum(p["a.weight"], 0, out=p["b.weight"].grad),
    "out of two": lambda p: tuple(
        torch.frexp(p["a.weight"], out=(torch.zeros(7, 5), torch.zeros(7, 5, dtype=torch.int32)))
    ),
    "out of where": lambda p: torch.where(
        p["a.weight"] > 0, p["a.weight"], p["b.weight"], out=p["b.weight"].grad
    ),
    "out in place": lambda p: torch.sub(p["a.weight"], p["b.weight"], out=p["a.weight"].detach()),
    "multiplied": lambda p: (p["a.weight"] * p["b.weight"], p["a.weight"].mul_(p["b.weight"])),
    "addcmul of two": lambda p: p["a.weight"].addcmul_(p["b.weight"], p["b.weight"].grad, value=2),
    "powers": lambda p: (2 ** p["a.weight"], p["a.weight"] ** 2, p["gain"] ** p["a.weight"]),
    "operators": lambda p: (
        -p["a.weight"],
        abs(p["a.weight"]),
        p["a.weight"] // 0.3,
        p["a.weight"] % 0.3,
        1 / p["a.weight"],
        1 - p["a.weight"],
        p["a.weight"] @ torch.ones(5),
        +p["a.weight"],
        torch.ones(7) @ p["a.weight"],
        p["a.weight"] == p["b.weight"],
    ),
    "into plain": lambda p: _in_place_plain(p["a.weight"], p["b.weight"].grad),
    "number at rest": lambda p: (
        p["a.weight"].mul_(p["scale"]),
        p["gain"] / p["scale"],
        p["scale"].exp().item(),
        p["scale"].clamp_(max=1.2),
        torch.stack([p["scale"], p["scale"] * 2]),
        p["scale"].expand(3),
        p["scale"] * torch.ones(2, 2),
        torch.ones(3) + p["scale"],
    ),
    "number from a matrix": lambda p: (
        p["scale"].copy_(p["a.weight"].max()),
        p["a.weight"].fill_(p["scale"]),
        p["b.weight"].fill_(p["b.weight"].mean()),
        p["scale"].sub_(p["scale"].grad),
    ),
    "another dtype": lambda p: (
        p["a.weight"].mul_(p["b.weight"].double()),
        p["a.weight"].bfloat16().sum(),
        p["a.weight"].half().norm(dim=1),
        p["a.weight"].double() @ p["b.weight"].double().T,
        p["a.weight"].mul(10).int().sum(0),
        p["a.weight"].add_(torch.arange(5)),
        torch.complex(p["a.weight"], p["b.weight"]).abs(),
    ),
    "clamped": lambda p: (
        p["a.weight"].clamp_(max=p["b.weight"]),
        p["b.weight"].clamp(-0.1, 0.1),
        torch.clamp(p["a.weight"], min=p["gain"]),
    ),
    "activations": lambda p: (
        functional.gelu(p["a.weight"]),
        functional.glu(p["square.weight"], 1),
        functional.softmin(p["a.weight"], 0),
        functional.hardshrink(p["a.weight"], 0.1),
        functional.prelu(p["a.weight"], p["gain"]),
        p["a.weight"].nan_to_num_(),
        functional.logsigmoid(p["a.weight"]),
        torch.frexp(p["a.weight"]).mantissa,
    ),
    "of three dims": lambda p: p["a.weight"] + torch.ones(2, 7, 5),
    "of a larger plain": lambda p: p["gain"].view(1, 5) * torch.ones(3, 5),
    "vmap": lambda p: torch.vmap(torch.dot)(p["a.weight"], p["b.weight"]),
    "numbers of Python": lambda p: (
        float(p["a.weight"][0, 0]),
        p["a.weight"][1, 2].item(),
        float(f"{p['a.weight'][1, 2]:.3f}"),
        len(p["a.weight"]),
        [float(x) for x in p["gain"]],
        max(p["gain"]),
        sum(p["gain"]),
        bool((p["a.weight"] > 9).any()),
        int(p["scale"]),
    ),
    "quantised": lambda p: _quantised(p["a.weight"]),
    "codebook": lambda p: p["a.weight"].copy_(_coded(p["a.weight"])),
    "sinkhorn": lambda p: _sinkhorn(p["a.weight"]),
    "spectral": lambda p: _spectral(p["a.weight"]),
    "slerp": lambda p: p["a.weight"].copy_(_slerp(p["a.weight"], p["b.weight"], 0.3)),
    "gradients by assignment": lambda p: [setattr(x, "grad", x.grad * 2) for x in p.values()],
    "plain gradients": lambda p: setattr(p["a.weight"], "grad", torch.ones(7, 5)),
    "data": lambda p: [x.data.clamp_(-0.1, 0.1) for x in p.values()],
    "data of plain": lambda p: setattr(p["a.weight"], "data", torch.ones(7, 5)),
}


def _in_place_plain(x: Tensor, y: Tensor) -> list[Tensor]:
    total = torch.ones(7, 5)
    total += x
    total -= y * 0.1
    total *= x
    total.addcmul_(x, y, value=0.5)
    total[:2] = x[:2]
    total[:, 0].copy_(y[:, 0])
    return [total, total @ x.T, torch.maximum(total, x), torch.lerp(total, x, 0.3)]


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1, keepdim=True) / 127
    whole = (x / scale).round().clamp(-128, 127).to(torch.int8)
    x.copy_(whole.float() * scale)
    return whole, scale


def _coded(x: Tensor) -> Tensor:
    codes = torch.linspace(-0.5, 0.5, 9)
    return codes[(x.unsqueeze(-1) - codes).abs().argmin(-1)]


def _sinkhorn(x: Tensor) -> Tensor:
    found = x.exp()
    for _ in range(3):
        found /= found.sum(0, keepdim=True)
        found /= found.sum(1, keepdim=True)
    return x.copy_(found)


def _spectral(x: Tensor) -> Tensor:
    u = functional.normalize(torch.arange(7.0), dim=0)
    for _ in range(3):
        v = functional.normalize(x.t() @ u, dim=0)
        u = functional.normalize(x @ v, dim=0)
    return x.div_(torch.dot(u, x @ v))


def _slerp(x: Tensor, y: Tensor, t: float) -> Tensor:
    angle = torch.acos((functional.normalize(x, dim=1) * functional.normalize(y, dim=1)).sum(1))
    sin = angle.sin()
    one, two = ((1 - t) * angle).sin() / sin, (t * angle).sin() / sin
    return one[:, None] * x + two[:, None] * y


# --- lists ---
def _quarters(p: Named) -> list[Tensor]:
    return [torch.full(x.shape, 0.25) for x in p.values()]


PROGRAMS |= {
    "lists copied": lambda p: (
        torch._foreach_copy_(found := _quarters(p), list(p.values())),
        found,
        torch._foreach_copy_(_gradients(p), _quarters(p)),
    ),
    "lists of norms": lambda p: (
        torch._foreach_norm(list(p.values())),
        torch._foreach_norm(_gradients(p), float("inf")),
        torch._foreach_norm([p["a.weight"], torch.ones(3)], 1),
        torch._foreach_max(_gradients(p)),
    ),
    "lists of mixed norms": lambda p: torch._foreach_norm(
        [p["a.weight"][:, 1], p["gain"], torch.ones(2)]
    ),
    "lists divided by norms": lambda p: torch._foreach_div_(
        list(p.values()), torch._foreach_norm(list(p.values()))
    ),
    "lists with plain": lambda p: (
        torch._foreach_addcmul_(list(p.values()), _quarters(p), _gradients(p), 0.5),
        torch._foreach_addcdiv_(list(p.values()), _gradients(p), _quarters(p), [0.1] * len(p)),
        torch._foreach_maximum_(list(p.values()), _quarters(p)),
        torch._foreach_lerp_(list(p.values()), _quarters(p), 0.1),
        torch._foreach_pow(2.0, list(p.values())),
        torch._foreach_sign(_gradients(p)),
        torch._foreach_mul(_quarters(p), list(p.values())),
    ),
    "lists of one number": lambda p: (
        torch._foreach_mul_(list(p.values()), torch.tensor(0.5)),
        torch._foreach_mul_(_gradients(p), p["scale"]),
        torch._foreach_clamp_max_(_gradients(p), 0.1),
    ),
    "lists of two models": lambda p: torch._foreach_lerp_(
        [p["other.a.weight"], p["other.gain"]], [p["a.weight"], p["gain"]], 0.1
    ),
    "lists of lists": lambda p: torch._foreach_sub(
        [p["a.weight"], torch.ones(7, 5)], [p["b.weight"], p["b.weight"]]
    ),
    "clipped lists": lambda p: nn.utils.clip_grads_with_norm_(
        p.values(), 0.1, nn.utils.get_total_norm([*_gradients(p), torch.ones(3)])
    ),
    "clipped values": lambda p: nn.utils.clip_grad_value_(p.values(), 0.1),
}


# --- vectors of all ---
@program
def vector_and_back(p: Named) -> Tensor:
    """Changed by indices, by order, in views."""
    vector = parameters_to_vector(p.values())
    vector[::3] = 0.5
    vector[_IDS] += 1
    vector[vector > 1] *= 0.5
    vector[3:50].view(47).clamp_(max=0.8)
    vector.add_(torch.randn(vector.shape, generator=_drawn_alike()), alpha=0.1)
    vector = vector / vector.norm() - vector.mean() + torch.randn_like(vector) * 0.1
    vector_to_parameters(vector, p.values())
    return vector


PROGRAMS |= {
    "vector's operations": lambda p: [
        (v := parameters_to_vector(p.values())).sort().values,
        v.cumsum(0),
        v.std(),
        v.topk(3)[0],
        v.view(1, -1) @ v,
        torch.outer(v[:9], v[-9:]),
        v.flip(0)[:20],
        v.unsqueeze(0).norm(dim=1),
        torch.stack([v, v]).mean(0),
        v.abs().max(),
        v.sign().sum(0),
        v.double().sum(),
        v[-7:],
        v.reshape(-1, 1)[::5],
        torch.where(v > 0, v, 0.0),
        torch.linalg.vector_norm(v, 1),
        *v.split([50, len(v) - 50]),
        v.clone().zero_(),
        torch.dot(v, torch.ones(len(v))),
        v.max(),
    ],
    "vector of gradients": lambda p: vector_to_parameters(
        parameters_to_vector(_gradients(p)).mul(0.5).clamp(-0.1, 0.1), _gradients(p)
    ),
    "vector of another model": lambda p: vector_to_parameters(
        parameters_to_vector([p["a.weight"], p["gain"], p["conv.bias"]]),
        [p["other.a.weight"], p["other.gain"], p["other.conv.bias"]],
    ),
    "sorted vector back": lambda p: vector_to_parameters(
        parameters_to_vector(p.values()).sort().values, p.values()
    ),
    "vector of views": lambda p: torch.cat(
        [p["a.weight"].t().flatten(), p["a.weight"][:, 1], p["gain"], torch.ones(2)]
    ),
}

# --- parameters that are sharded differently ---
PROGRAMS |= {
    "student into teacher": lambda p: (
        p["other.a.weight"].mul_(0.9).add_(p["a.weight"], alpha=0.1),
        p["other.conv.weight"].lerp_(p["conv.weight"], 0.3),
        p["other.gain"].copy_(p["gain"]),
        p["other.scale"].mul_(p["scale"]),
    ),
    "policy and reference": lambda p: [
        (p["a.weight"] - p["other.a.weight"]).norm(),
        p["a.weight"] @ p["other.a.weight"].T,
        torch.dot(p["gain"], p["other.gain"]),
        torch.where(p["other.a.weight"] > 0, p["a.weight"], 0),
        torch.cat([p["a.bias"], p["other.a.bias"]]),
        torch.equal(p["gain"], p["other.gain"]),
        functional.cosine_similarity(p["a.weight"], p["other.a.weight"]),
        torch.stack([p["gain"], p["other.gain"]]),
        torch.allclose(p["gain"], p["other.gain"]),
    ],
    "rows of another model": lambda p: (
        p["emb.weight"][2:5].copy_(p["other.emb.weight"][6:9]),
        _put(p["a.weight"], [0, 2], p["other.a.weight"][[3, 4]]),
        p["b.weight"][:, 0].copy_(p["other.b.weight"][:, 1]),
    ),
    "data of another model": lambda p: setattr(p["a.weight"], "data", p["other.a.weight"].clone()),
    "task arithmetic": lambda p: [
        x.add_((p[f"other.{name}"] - x).sign() * 0.1)
        for name, x in p.items()
        if not name.startswith("other.")
    ],
    "whole operands in a list": lambda p: torch._foreach_add_(
        [p["a.weight"], p["other.a.weight"], p["gain"]],
        [p["other.a.weight"], torch.ones(5), p["other.gain"]],
    ),
}


# Of flat parameters, which are vectors; one of a unit, one of the root.
FLAT_PROGRAMS: dict[str, Program] = {
    "noise": lambda p: [x.normal_(generator=_drawn_alike()) for x in p.values()],
    "noise like": lambda p: [x.add_(torch.randn_like(x)) for x in p.values()],
    "plain operands": lambda p: [x.mul_(torch.arange(float(len(x)))) for x in p.values()],
    "averages": lambda p: [torch.full(x.shape, 0.5).lerp_(x, 0.1) for x in p.values()],
    "copies": lambda p: [x.copy_(torch.arange(float(len(x))).sin()) for x in p.values()],
    "reductions": lambda p: [
        (x.sum(), x.mean(), x.norm(), x.max(), x.std(), x.norm(dim=0), x.abs().amax(0, True))
        for x in p.values()
    ],
    "order": lambda p: [
        (x.sort().values, x.quantile(0.3), x.median(), x.topk(4).values, x.argmax())
        for x in p.values()
    ],
    "dots": lambda p: [(torch.dot(x, x.grad), torch.outer(x[:5], x[-5:])) for x in p.values()],
    "cosine": lambda p: [functional.cosine_similarity(x, x.grad, dim=0) for x in p.values()],
    "masks": lambda p: [_put(x, x > 0, 2.0) for x in p.values()],
    "plain masks": lambda p: [_put(x, torch.arange(len(x)) % 2 == 0, 2.0) for x in p.values()],
    "indices": lambda p: [_put(x, _IDS, torch.arange(3.0)) for x in p.values()],
    "steps": lambda p: [x[1::3].mul_(2.0) for x in p.values()],
    "ranges": lambda p: [x[3:17].copy_(x[20:34].clone()) for x in p.values()],
    "matrices": lambda p: p["root"][:30].view(5, 6) @ p["unit"][:30].view(6, 5),
    "rows of a view": lambda p: (
        p["unit"][:30].view(6, 5).div_(p["unit"][:30].view(6, 5).norm(dim=1, keepdim=True))
    ),
    "columns of a view": lambda p: p["root"][5:35].view(6, 5)[:, 2].zero_(),
    "two parameters": lambda p: p["unit"][:9].add_(p["root"][7:16]),
    "cumulative": lambda p: [x.cumsum_(0) for x in p.values()],
    "roll and flip": lambda p: [(x.roll(3), x.flip(0)) for x in p.values()],
    "lists": lambda p: (
        torch._foreach_mul_(list(p.values()), [torch.full(x.shape, 0.5) for x in p.values()]),
        torch._foreach_norm(list(p.values())),
    ),
    "vector and back": lambda p: vector_to_parameters(
        parameters_to_vector(p.values()) * 2 + 1, p.values()
    ),
    "largest gradients": lambda p: [
        x.grad.copy_(torch.where(x.grad.abs() >= x.grad.abs().topk(5).values[-1], x.grad, 0.0))
        for x in p.values()
    ],
}
