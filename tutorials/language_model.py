"""A Llama-style language model in plain PyTorch: nothing in this file knows about sharding.

Shapes: B sequences, T positions, D model width, H heads, K = D / H, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """The defaults make a model of about 10 million parameters that reads bytes."""

    layers: int = 6
    dim: int = 384
    head_dim: int = 64
    vocabulary: int = 256
    max_length: int = 1024

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


class Transformer(nn.Module):
    """Bytes in, the logits of the next byte out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
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

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (B, T) token numbers to (B, T, V) logits."""
        x = self.embedding(tokens)
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))
