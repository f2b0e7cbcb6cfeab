"""Train a 10-million-parameter language model, sharded over all ranks.

    torchrun --standalone --nproc-per-node 2 tutorials/train_language_model.py
    python tutorials/train_language_model.py --ranks 2     # the same, and quiet about Ctrl-C
    python tutorials/train_language_model.py               # one rank

The text is the language reference that comes with every CPython (`pydoc_data.topics`), read byte
by byte. Two CPU cores need about three minutes; GPUs and NCCL are used where there is one per rank.
With `--save-every 50` a run that was stopped or killed goes on with `--resume`, on any ranks.

This file has all that sharding needs; the model and its text are in `language_model.py`, options
and ranks in `job.py`, printing and drawing in `journal.py`. First, rank 0 alone takes some steps
with an unsharded copy of the model, and the sharded losses have to agree with those.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from job import World, learning_rate, run
from journal import (
    EXIT_FAILED,
    Journal,
    Reference,
    Row,
    goal_reached,
    introduce,
    losses_agree,
    report,
    training_nbytes,
)
from language_model import (
    PADDING,
    Transformer,
    global_batch,
    held_out_sequences,
    make_model,
    make_optimizer,
    read_text,
    sequence_loss,
    unigram_entropy,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import (
    clip_grad_norm_,
    find_checkpoint,
    fully_shard,
    get_handles,
    load_checkpoint,
    no_sync,
    save_checkpoint,
    unshard_params,
)


def shard(model: Transformer, world: World, *, keep_unsharded: bool) -> Transformer:
    """Shard every block, then what is left: embedding, last norm and head."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=not keep_unsharded)
    return fully_shard(model, mesh=mesh)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[Tensor],
    step: int,
    args: argparse.Namespace,
    clip: Callable[[Iterable[Tensor], float], Tensor] = clip_grad_norm_,
) -> float:
    """Accumulate the gradient of all microbatches, update, and return their mean loss."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, args)
    optimizer.zero_grad()
    total = 0.0
    for number, sequences in enumerate(microbatches, start=1):
        more_follow = number < len(microbatches)
        with no_sync(model) if args.no_sync and more_follow else nullcontext():
            loss = sequence_loss(model, sequences) / len(microbatches)
            loss.backward()
        total += loss.item()
    clip(model.parameters(), args.max_norm)
    optimizer.step()
    return total


def train_reference(tokens: Tensor, world: World, args: argparse.Namespace) -> Reference:
    """Take the first steps on rank 0 alone, unsharded, and let all ranks know the losses."""
    reference = Reference()
    model = make_model(args, world.device)
    optimizer = make_optimizer(model, args)
    for step in range(args.check_steps):
        loss = 0.0
        if world.rank == 0:
            batch = global_batch(tokens, step, args)
            loss = train_step(model, optimizer, [batch], step, args, nn.utils.clip_grad_norm_)
            reference.nbytes = training_nbytes(model, optimizer)
        reference.losses += world.sum(loss)  # each step, so that no rank waits for long
    return reference


@torch.no_grad()
def evaluate(model: nn.Module, sequences: Tensor, world: World) -> float:
    """Return the mean loss over the sequences, which the ranks share among themselves."""
    # A forward is a collective, so every rank must run the same number: pad.
    missing = -len(sequences) % world.size
    share = F.pad(sequences, (0, 0, 0, missing), value=PADDING)[world.rank :: world.size]
    loss = sum(sequence_loss(model, part, "sum").item() for part in share.split(16))
    loss, count = world.sum(loss, (share[:, 1:] != PADDING).sum().item())
    return loss / count


@torch.no_grad()
def write_sentence(model: Transformer, world: World, args: argparse.Namespace) -> str:
    """Continue the prompt up to a full stop or for 160 bytes; only rank 0 has full parameters."""
    written = args.prompt.encode()
    generator = torch.Generator().manual_seed(args.seed)
    with unshard_params(model, writeback=False, rank0_only=True):
        while world.rank == 0 and len(written) < 160 and not written.endswith((b". ", b".\n")):
            context = torch.tensor([list(written[-args.length :])], device=world.device)
            logits = model(context)[0, -1].cpu()
            probability = torch.softmax(logits / 0.6, dim=0)  # 0.6: rather the likely bytes
            written += bytes([int(torch.multinomial(probability, 1, generator=generator))])
    text = written.decode(errors="replace")
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def save(
    model: nn.Module, optimizer: torch.optim.Optimizer, journal: Journal, reference: Reference
) -> None:
    """Save after this number of steps; the step is the data position too, see `global_batch`."""
    start, args, step = time.perf_counter(), journal.args, len(journal.rows)
    extra = journal.state(reference)
    folder = save_checkpoint(
        args.checkpoints, model, optimizer, step=step, extra=extra, keep_last=args.keep
    )
    journal.note(f"saved {folder} in {time.perf_counter() - start:.1f} s")


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, journal: Journal) -> Reference:
    """Load the last checkpoint and the rows before it; return what one process had measured."""
    loaded = load_checkpoint(journal.args.checkpoints, model, optimizer)
    reference = journal.restore(loaded.extra)
    journal.note(f"goes on after step {loaded.step} from {loaded.path}")
    return reference


def train(world: World, journal: Journal, args: argparse.Namespace) -> int:
    """Check, train, evaluate and report; return the exit code."""
    training_text, held_out_text = read_text(world.device)
    held_out = held_out_sequences(held_out_text, args.length)
    entropy = unigram_entropy(training_text)
    introduce(journal, len(training_text), entropy, len(held_out_text))
    is_resumed = args.resume and find_checkpoint(args.checkpoints) is not None
    if args.check_steps and not is_resumed:
        world.say(f"one process takes the first {args.check_steps} steps with the whole model ...")
    reference = Reference() if is_resumed else train_reference(training_text, world, args)

    model = shard(make_model(args, world.device), world, keep_unsharded=args.keep_unsharded)
    optimizer = make_optimizer(model, args)
    world.say(
        f"{sum(p.numel() for p in model.parameters()):,} parameters in "
        f"{len(get_handles(model))} flat parameters; MB per rank: parameters + optimizer state"
    )
    if is_resumed:
        reference = resume(model, optimizer, journal)
    for step in range(len(journal.rows), args.steps):
        start = time.perf_counter()
        share = global_batch(training_text, step, args).chunk(world.size)[world.rank]
        loss = train_step(model, optimizer, share.chunk(args.microbatches), step, args)
        (loss,) = world.sum(loss / world.size)
        journal.training_seconds += time.perf_counter() - start
        held_out_loss = None
        if step + 1 == args.steps:
            held_out_loss = evaluate(model, held_out, world)
        elif (step + 1) % args.eval_every == 0:
            held_out_loss = evaluate(model, held_out[:: args.eval_part], world)
        single = reference.losses[step] if step < args.check_steps else None
        row = Row(step + 1, loss, held_out_loss, single)
        journal.record(row, training_nbytes(model, optimizer))
        if step + 1 == args.check_steps and not losses_agree(journal, reference):
            return EXIT_FAILED
        if args.save_every and (step + 1) % args.save_every == 0:
            save(model, optimizer, journal, reference)

    sentence = write_sentence(model, world, args)
    world.sum()  # the last chance to agree on stopping
    report(journal, sentence, entropy, reference.nbytes, training_nbytes(model, optimizer))
    return 0 if goal_reached(journal.rows[-1].held_out_loss, entropy, journal) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(run(train, __file__, __doc__))
