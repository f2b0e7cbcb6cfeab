"""Count the bytes a process holds from malloc, in all threads: a C library loaded before libc.

Torch's memory profiler is no substitute with gloo: it misses what the backend's threads free.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_SOURCE = r"""
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static atomic_long held, peak;

static void *add(void *block) {
    if (!block) return block;
    long size = (long)malloc_usable_size(block);
    long now = atomic_fetch_add(&held, size) + size, seen = atomic_load(&peak);
    while (now > seen && !atomic_compare_exchange_weak(&peak, &seen, now)) {}
    return block;
}

void *malloc(size_t n) { return add(__libc_malloc(n)); }
void *calloc(size_t n, size_t size) { return add(__libc_calloc(n, size)); }
void *memalign(size_t align, size_t n) { return add(__libc_memalign(align, n)); }
void *aligned_alloc(size_t align, size_t n) { return add(__libc_memalign(align, n)); }

int posix_memalign(void **block, size_t align, size_t n) {
    *block = add(__libc_memalign(align, n));
    return *block ? 0 : ENOMEM;
}

void free(void *block) {
    if (block) atomic_fetch_sub(&held, (long)malloc_usable_size(block));
    __libc_free(block);
}

void *realloc(void *block, size_t n) {
    long before = block ? (long)malloc_usable_size(block) : 0;
    void *moved = __libc_realloc(block, n);
    if (moved || n == 0) atomic_fetch_sub(&held, before);
    return add(moved);
}

long counted_bytes(void) { return atomic_load(&held); }
long counted_peak(void) { return atomic_load(&peak); }
void restart_peak(void) { atomic_store(&peak, atomic_load(&held)); }
"""


@contextmanager
def preloaded() -> Iterator[None]:
    """Compile the counter and load it into every process started in the enclosed block."""
    with TemporaryDirectory() as folder:
        library = Path(folder, "malloc_counter.so")
        command = ["gcc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=_SOURCE, text=True, check=True, timeout=60)
        before = os.environ.get("LD_PRELOAD")
        os.environ["LD_PRELOAD"] = str(library)
        try:
            yield
        finally:
            del os.environ["LD_PRELOAD"]
            if before is not None:
                os.environ["LD_PRELOAD"] = before


def is_preloaded() -> bool:
    """Return whether this process runs with the counter."""
    return hasattr(ctypes.CDLL(None), "counted_bytes")


def held_nbytes() -> int:
    """Return the bytes this process holds now; it must run with the counter preloaded."""
    return _call("counted_bytes")


def peak_nbytes() -> int:
    """Return the largest number of bytes held since the last `restart_peak`."""
    return _call("counted_peak")


def restart_peak() -> None:
    """Forget the peak so far."""
    _call("restart_peak")


def _call(name: str) -> int:
    function = getattr(ctypes.CDLL(None), name)
    function.restype = ctypes.c_long
    return function()
