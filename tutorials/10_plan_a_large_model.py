"""Plan a model of 70 billion parameters, without ranks and without its memory.

    python tutorials/10_plan_a_large_model.py

The model is built on the meta device, where tensors have shapes but no memory. `estimate` takes one
step of it on fake tensors, and says what a rank would hold and send, for any number of ranks. Here
each rank has 80 GiB and one sequence of 4,096 tokens. It computes in bfloat16, with fp32 at rest.

Expected output (GiB of one rank):

    71.9 billion parameters, 24 layers
    ranks  strategy       layers      at rest  activations  at most  sent  fits
    64     FULL_SHARD     as written     16.7         79.7    114.0   526  no
    64     FULL_SHARD     recomputed     16.7          3.6     45.4   526  yes
"""

import torch
from language_model import Layer, ModelConfig, Transformer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from composable_shard import MixedPrecisionPolicy, estimate
from composable_shard.planning import Estimate, by_class

GIB, MEMORY = 2**30, 80 * 2**30
CONFIG = ModelConfig(layers=24, dim=16384, head_dim=128, vocabulary=32_000, max_length=4096)
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class RecomputedLayer(Layer):
    """Keeps its input for the backward, and nothing else: activation checkpointing."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        return checkpoint(super().forward, x, cos, sin, use_reentrant=False)


def make_model(*, recomputed: bool) -> Transformer:
    """Return the model on the meta device."""
    with torch.device("meta"):
        model = Transformer(CONFIG)
    for layer in model.layers:
        layer.__class__ = RecomputedLayer if recomputed else Layer
    return model


def plan(model: Transformer, ranks: int, strategy: str = "FULL_SHARD") -> Estimate:
    """Estimate a step: of the batch only shapes and dtypes count."""
    batch = torch.zeros(1, CONFIG.max_length, dtype=torch.long)
    return estimate(
        model,
        world_size=ranks,
        rules=by_class(Layer),
        batch=batch,
        strategy=strategy,
        mp_policy=POLICY,
    )


def main() -> None:
    """Compare two plans; `strategy` and `ranks` make others."""
    written, recomputed = make_model(recomputed=False), make_model(recomputed=True)
    numel = sum(param.numel() for param in written.parameters())
    print(f"{numel / 1e9:.1f} billion parameters, {CONFIG.layers} layers")
    print("ranks  strategy       layers      at rest  activations  at most  sent  fits")
    for ranks, strategy, model in (
        (64, "FULL_SHARD", written),
        (64, "FULL_SHARD", recomputed),
    ):
        found = plan(model, ranks, strategy)
        at_rest = found.parameter_nbytes + found.gradient_nbytes + found.optimizer_nbytes
        layers = "as written" if model is written else "recomputed"
        print(
            f"{ranks:<6} {strategy:14} {layers} {at_rest / GIB:8.1f} "
            f"{found.activation_nbytes / GIB:12.1f} {found.total_nbytes / GIB:8.1f} "
            f"{found.wire_nbytes_per_step / GIB:5.0f}  {'yes' if found.fits(MEMORY) else 'no'}"
        )


if __name__ == "__main__":
    main()
