"""The models under measurement: plain PyTorch, nothing here knows about sharding.

Shapes: B sequences, T positions, D model width, H heads, K = D / H, V vocabulary.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Llama-style model and of the batch each rank feeds it."""

    layers: int
    dim: int
    hidden_dim: int
    vocabulary: int
    heads: int
    batch: int
    length: int
    loss_chunks: int = 1


CONFIGS = {
    "1b": ModelConfig(16, 2048, 6144, 32768, 16, 4, 2048),  # 1.01 billion parameters, for GPUs
    "std": ModelConfig(12, 512, 1408, 8192, 8, 2, 128),  # 187.8 MB in fp32, 13 units
    "hf": ModelConfig(12, 512, 1408, 8192, 8, 2, 128),  # std as Hugging Face builds it
    "short": ModelConfig(12, 512, 1408, 8192, 8, 1, 4),  # std with next to no activations
    "thin": ModelConfig(8, 256, 704, 2048, 4, 1, 2),  # 29.9 MB, with next to no activations
    "slim": ModelConfig(6, 128, 352, 512, 4, 1, 2),  # 5.3 MB, likewise
    "50m": ModelConfig(13, 512, 1408, 8192, 8, 2, 128),  # 200.6 MB, 50.1 M parameters
    "110m": ModelConfig(12, 768, 2048, 16384, 12, 1, 8),  # 440.5 MB, for checkpoints
    "big": ModelConfig(24, 1024, 2816, 8192, 16, 1, 8),  # 1.3 GB, 325 M parameters, for set-up
    "tiny": ModelConfig(48, 128, 384, 1024, 4, 2, 128),  # 42.0 MB, 49 units, 435 parameters
    "tiny_short": ModelConfig(48, 128, 384, 1024, 4, 2, 42),  # tiny, a third of its computing
    "wide": ModelConfig(4, 512, 1408, 32768, 8, 2, 512),  # 186 MB; the logits are 134 MB
    "wide_chunked": ModelConfig(4, 512, 1408, 32768, 8, 2, 512, loss_chunks=16),
    "mini": ModelConfig(6, 64, 192, 256, 4, 4, 32),  # learns something in 200 steps
    "micro": ModelConfig(48, 32, 96, 256, 2, 2, 16),  # copies negligible: host cost only
}


class Attention(nn.Module):
    """Causal self-attention with four separate matrices."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, config.dim, bias=False)
        self.value = nn.Linear(config.dim, config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        q, k, v = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, K)
            for projection in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class LlamaLayer(nn.Module):
    """A pre-norm transformer block of nine parameters: 4 attention, 3 SwiGLU, 2 norms."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Embedding, blocks, norm and an untied head; the output is the mean cross-entropy."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(LlamaLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        self.loss_chunks = config.loss_chunks

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Map tokens and targets, both (B, T), to the loss, a scalar."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        x, targets = self.norm(x).flatten(0, 1), targets.flatten()
        if self.loss_chunks == 1:
            return F.cross_entropy(self.head(x), targets)
        chunks = zip(x.chunk(self.loss_chunks), targets.chunk(self.loss_chunks), strict=True)
        losses = [checkpoint(self._chunk_loss, *each, use_reentrant=False) for each in chunks]
        return torch.stack(losses).sum() / len(targets)

    def _chunk_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of one part, whose logits the backward computes again."""
        return F.cross_entropy(self.head(x), targets, reduction="sum")


class HuggingFaceLlama(nn.Module):
    """`transformers.LlamaForCausalLM` behind the interface of `Llama`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        try:
            transformers = importlib.import_module("transformers")
        except ImportError as error:
            raise ModuleNotFoundError(
                "the model 'hf' needs transformers: pip install '.[benchmark]'"
            ) from error
        self.causal = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                num_hidden_layers=config.layers,
                hidden_size=config.dim,
                intermediate_size=config.hidden_dim,
                vocab_size=config.vocabulary,
                num_attention_heads=config.heads,
                num_key_value_heads=config.heads,
                max_position_embeddings=config.length,
                tie_word_embeddings=False,
                use_cache=False,
            )
        )

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return self.causal.model.layers

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Map tokens and targets, both (B, T), to the loss, a scalar."""
        logits = self.causal(input_ids=tokens).logits  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class MatrixChain(nn.Module):
    """`num_layers + 1` equal groups of small matrices; the last group belongs to the root.

    The least model that gives every unit `num_params` parameters: one 16x16 matrix multiply each.
    """

    def __init__(self, num_layers: int, num_params: int, dim: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_equal_matrices(num_params, dim) for _ in range(num_layers))
        self.tail = _equal_matrices(num_params, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, D) to a scalar."""
        for layer in self.layers:
            x = layer(x)
        return self.tail(x).sum()


def _equal_matrices(num_params: int, dim: int) -> nn.Sequential:
    matrices = nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(num_params)))
    for matrix in matrices:
        nn.init.eye_(matrix.weight)  # a long chain must neither vanish (denormals) nor explode
    return matrices


class Sum(nn.Module):
    """Adds its parameters to the input."""

    def __init__(self, num_params: int) -> None:
        super().__init__()
        self.terms = nn.ParameterList(torch.ones(8) for _ in range(num_params))

    def forward(self, x: Tensor) -> Tensor:
        """Map any shape that broadcasts with (8,) to the sum."""
        for term in self.terms:
            x = x + term
        return x


class SumChain(nn.Module):
    """Any number of units, and a root; the root may share the parameters of all of them."""

    def __init__(self, num_layers: int, num_params: int, *, is_tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sum(num_params) for _ in range(num_layers))
        self.tail = Sum(1)
        if is_tied:
            self.ties = nn.ParameterList([each.terms[0] for each in self.layers])

    def forward(self, x: Tensor) -> Tensor:
        """Map the same to a scalar."""
        for layer in self.layers:
            x = layer(x)
        return self.tail(x).sum()


def make_llama(name: str, seed: int = 0) -> Llama | HuggingFaceLlama:
    """Return the named model with the same weights on every rank.

    Raises:
        ModuleNotFoundError: For "hf" without transformers.
    """
    torch.manual_seed(seed)
    return (HuggingFaceLlama if name == "hf" else Llama)(CONFIGS[name])


def make_batch(name: str, rank: int) -> tuple[Tensor, Tensor]:
    """Return this rank's tokens and targets, (B, T) each."""
    config = CONFIGS[name]
    generator = torch.Generator().manual_seed(1000 + rank)
    shape = (config.batch, config.length + 1)
    tokens = torch.randint(config.vocabulary, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def param_nbytes(model: nn.Module) -> int:
    """Return P, the bytes of all parameters."""
    return sum(param.nbytes for param in model.parameters())


class MixedNet(nn.Module):
    """Parameters of one to three dimensions, of which rows and elements don't divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(40, 16)
        self.a = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.LayerNorm(24))
        self.c = nn.Conv1d(24, 12, 3, padding=1)
        self.b = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 16, bias=False))
        self.head = nn.Linear(16, 10)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.a(self.emb(words))
        hidden = self.c(hidden.transpose(1, 2)).transpose(1, 2)
        logits: Tensor = self.head(self.b(hidden))
        return logits
