"""A Llama-style language model and its text, in plain PyTorch: nothing here knows of sharding.

Shapes: B sequences, T positions, D model width, H heads, K = D / H, V vocabulary.
"""

from argparse import Namespace
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PADDING = -1  # a target that does not count


@dataclass(frozen=True)
class ModelConfig:
    """The defaults make a model of about 10 million parameters that reads bytes."""

    layers: int = 6
    dim: int = 384
    head_dim: int = 64
    vocabulary: int = 256
    max_length: int = 1024
    loss_chunks: int = 1  # above 1: the logits of a batch are made chunk by chunk

    @property
    def hidden_dim(self) -> int:
        """Width inside the SwiGLU: 7/3 of the model width, so that a block has 11 D^2 weights."""
        return 7 * self.dim // 3


def rotary_table(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines, (T, K/2) each, of the angles by which positions turn."""
    frequency = 10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.outer(torch.arange(length), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the two halves of every head, (B, H, T, K), by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        batch, length, dim = x.shape
        heads = self.qkv(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)  # (B, H, T, K) each
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, dim))


class SwiGLU(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


def chunk_loss(hidden: Tensor, head: nn.Linear, targets: Tensor, reduction: str) -> Tensor:
    """Return the cross entropy of hidden states, (N, D), and targets, (N,)."""
    return F.cross_entropy(head(hidden), targets, ignore_index=PADDING, reduction=reduction)


def chunked_loss(
    hidden: Tensor, head: nn.Linear, targets: Tensor, num_chunks: int, reduction: str = "mean"
) -> Tensor:
    """Return the same without ever holding all logits, (N, V), which the backward computes again.

    Call it in the forward of the unit that has the head's weight, here the root: it stays gathered
    until its backward, so that no chunk gathers anything.
    """
    chunks = zip(hidden.chunk(num_chunks), targets.chunk(num_chunks), strict=True)
    losses = [checkpoint(chunk_loss, h, head, t, "sum", use_reentrant=False) for h, t in chunks]
    total = torch.stack(losses).sum()
    return total / (targets != PADDING).sum() if reduction == "mean" else total


class Transformer(nn.Module):
    """Bytes in, the logits of the next byte out, or the loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.loss_chunks = config.loss_chunks
        if config.dim % config.head_dim or config.head_dim % 2:
            raise ValueError(
                f"dim {config.dim} is no multiple of an even head_dim {config.head_dim}"
            )
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        cos, sin = rotary_table(config.max_length, config.head_dim)
        self.register_buffer("cos", cos, persistent=False)  # (max_length, K/2)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Layers that write into the residual stream start smaller, so that its size
                # does not grow with the depth (GPT-2).
                writes = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** (0.5 * writes))

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, reduction: str = "mean"
    ) -> Tensor:
        """Map (B, T) token numbers to (B, T, V) logits, or with targets, (B, T), to their loss."""
        x = self.embedding(tokens)
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        if targets is None:
            return self.head(x)
        hidden, targets = x.flatten(0, 1), targets.flatten()
        if self.loss_chunks > 1:
            return chunked_loss(hidden, self.head, targets, self.loss_chunks, reduction)
        return chunk_loss(hidden, self.head, targets, reduction)


def sequence_loss(model: nn.Module, sequences: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross entropy of predicting each byte, (B, T + 1), from those before it."""
    return model(sequences[:, :-1].clamp(min=0), sequences[:, 1:], reduction)


def make_model(args: Namespace, device: torch.device) -> Transformer:
    """Build the model: on every rank and device with the same initial weights."""
    torch.manual_seed(args.seed)
    config = ModelConfig(
        layers=args.layers,
        dim=args.dim,
        max_length=args.length,
        loss_chunks=args.loss_chunks,
    )
    return Transformer(config).to(device)


def make_optimizer(model: nn.Module, args: Namespace) -> torch.optim.AdamW:
    """Make AdamW: nothing in here depends on whether the parameters are sharded."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95))


def read_text(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the bytes to train on and the last tenth, which is held out."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = torch.tensor(list(text), device=device)
    start = len(tokens) * 9 // 10
    return tokens[:start], tokens[start:]


def unigram_entropy(tokens: Tensor) -> float:
    """Return the nats per byte that knowing nothing but the frequencies of the bytes costs."""
    frequency = torch.bincount(tokens).double() / len(tokens)
    return torch.special.entr(frequency).sum().item()


def global_batch(tokens: Tensor, step: int, args: Namespace) -> Tensor:
    """Draw the sequences of one step, (batch, length + 1): the same on every rank."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - args.length, (args.batch, 1), generator=generator)
    return tokens[(starts + torch.arange(args.length + 1)).to(tokens.device)]


def held_out_sequences(tokens: Tensor, length: int) -> Tensor:
    """Cut the text into sequences, (n, length + 1), so that every byte but one is a target."""
    missing = -(len(tokens) - 1) % length
    return F.pad(tokens, (0, missing), value=PADDING).unfold(0, length + 1, length)
