"""How the tutorials start and end: among the ranks that torchrun started, or as the only one."""

import os

import torch.distributed as dist


def join() -> tuple[int, int]:
    """Make the process group; return this rank and the number of ranks."""
    if "RANK" not in os.environ:  # started without torchrun: one rank
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def say(*parts: object) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(*parts, flush=True)


def leave() -> None:
    """Wait for the others, and end the process group."""
    dist.barrier()
    dist.destroy_process_group()
