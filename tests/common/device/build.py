"""Builds the device's extension once: gcc and torch's headers are all it takes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

NAME = "_lag"
_SOURCES = Path(__file__).parent / "csrc"
_TORCH = Path(torch.__file__).parent
# NDEBUG as torch itself was built: some of its classes have other members without.
_OPTIONS = (
    *("-O1", "-g0", "-DNDEBUG", "-std=c++20", "-fPIC", "-shared", "-w"),
    "-fvisibility=hidden",
)
_TIMEOUT_S = 600


class Unavailable(RuntimeError):
    """There is no device here; the text names what is missing."""


def library() -> Path:
    """Return the extension's path; build it unless that has been done for these sources.

    Processes that ask at the same time build once: the others wait.

    Raises:
        Unavailable: There is no C++ compiler.
        RuntimeError: The compiler failed; its output is in the text.
    """
    folder = _cache() / _fingerprint()
    path = folder / f"{NAME}.so"
    if path.exists():
        return path
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler or not shutil.which(compiler):
        raise Unavailable("no C++ compiler")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(compiler, path)
    return path


def why_unavailable() -> str:
    """Build the device unless that has been done; return what is missing for it, or nothing."""
    try:
        library()
    except Unavailable as error:
        return str(error)
    return ""


def _cache() -> Path:
    """Return the checkout's folder for what is built, or the user's where that is read-only."""
    checkout = Path(__file__).parents[3]
    if os.access(checkout, os.W_OK):
        return checkout / "build" / "device"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "composable_shard"


def _fingerprint() -> str:
    digest = hashlib.sha256(repr((torch.__version__, sys.version, _OPTIONS)).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    partial = path.with_name(f"{NAME}.{os.getpid()}.partial")
    include, lib = _TORCH / "include", _TORCH / "lib"
    folders = (include, include / "torch/csrc/api/include", sysconfig.get_path("include"))
    command = [
        compiler,
        *_OPTIONS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-DTORCH_EXTENSION_NAME={NAME}",
        "-DUSE_DISTRIBUTED",
        "-DUSE_C10D_GLOO",
        *(f"-I{folder}" for folder in folders),
        str(_SOURCES / "device.cpp"),
        *("-o", str(partial), f"-L{lib}", f"-Wl,-rpath,{lib}"),
        *("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the device was not built:\n{done.stderr[-8000:]}")
    partial.rename(path)
