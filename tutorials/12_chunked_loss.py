"""Train with a loss that is computed chunk by chunk, from the weight of a sharded head.

    torchrun --standalone --nproc-per-node 2 tutorials/12_chunked_loss.py
    python tutorials/12_chunked_loss.py                          # one rank

The logits of a language model are often its largest tensor: tokens times vocabulary. A chunked loss
never has all of them. It uses `head.weight` outside of the model's forward, where a rank has only
its shard of the weight. So the head is a unit of its own, which stays gathered from `unshard` to
`reshard`. The backward reduces its gradients, as for any other unit.

Expected output (two ranks):

    without unshard: refused, with advice: True
    the same loss, whole and in chunks: True
    the same gradients, whole and in chunks: True
    logits at once: 4096 elements in place of 32768
    all-gathers of the head in a step: 1
    10 training steps later the loss fell from 5.55 to 3.80
"""

import os

import torch
import torch.distributed as dist
from ranks import leave, say
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from composable_shard import count_collectives, fully_shard, reshard, unshard

VOCABULARY, DIM, NUM_TOKENS, NUM_CHUNKS = 256, 32, 128, 8


class Net(nn.Module):
    """Tokens to hidden states; the head is used by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layer = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (N,) to hidden states (N, D)."""
        return torch.tanh(self.layer(self.embedding(tokens)))


def chunk_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the losses of one chunk, whose logits are freed at once."""
    return F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")


def chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss; the backward computes the logits of each chunk again."""
    chunks = zip(hidden.chunk(NUM_CHUNKS), targets.chunk(NUM_CHUNKS), strict=True)
    losses = [checkpoint(chunk_loss, h, weight, t, use_reentrant=False) for h, t in chunks]
    return torch.stack(losses).sum() / len(targets)


def step(model: Net, tokens: Tensor) -> Tensor:
    """Run forward, loss and backward."""
    unshard(model.head)  # its weight is whole until reshard
    loss = chunked_loss(model(tokens), model.head.weight, tokens.roll(-1))
    loss.backward()
    reshard(model.head)
    return loss.detach()


def main() -> None:
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net()
    tokens = torch.randint(VOCABULARY, (NUM_TOKENS,))
    whole = F.cross_entropy(model.head(model(tokens)), tokens.roll(-1))
    expected = torch.autograd.grad(whole, list(model.parameters()))
    whole = whole.detach()

    fully_shard(model.head)
    fully_shard(model)
    try:
        chunked_loss(model(tokens), model.head.weight, tokens.roll(-1))
    except RuntimeError as error:
        say(f"without unshard: refused, with advice: {'unshard(' in str(error)}")

    loss = step(model, tokens)
    say("the same loss, whole and in chunks:", torch.allclose(loss, whole))
    grads = [param.grad.full_tensor() for param in model.parameters()]
    pairs = zip(grads, expected, strict=True)
    say(
        "the same gradients, whole and in chunks:",
        all(torch.allclose(*p, atol=1e-6) for p in pairs),
    )
    num_logits = NUM_TOKENS * VOCABULARY
    say(f"logits at once: {num_logits // NUM_CHUNKS} elements in place of {num_logits}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with count_collectives() as log:
        unshard(model.head)
    reshard(model.head)
    say("all-gathers of the head in a step:", log.count("all_gather"))
    for _ in range(10):
        optimizer.zero_grad()
        last = step(model, tokens)
        optimizer.step()
    say(f"10 training steps later the loss fell from {loss:.2f} to {last:.2f}")
    leave()


if __name__ == "__main__":
    main()
