"""Read pickles of other libraries without running any code of theirs.

[Note: Restricted pickles]
A pickle names functions and classes, and says with which arguments to call them. Here none of them
is looked up. Each name means one of three things. A few names of `_ALLOWED` are numbers,
containers, dtypes and the functions by which torch rebuilds tensors: functions of this module stand
for them. Any other name of Python's own library is refused, because only a forged file asks for
`os.system`. Any other name becomes an `Inert`: an object that keeps the name and the arguments, and
does nothing. So the classes of a peer, or of a program that is gone, are never imported.

A tensor becomes a `PeerTensor`: its shape, its dtype and where its elements are in the file.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from composable_shard.peers.tensors import PeerTensor, strided

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
_DTYPES = {
    str(each).removeprefix("torch."): each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype)
}
# Classes of Python's own library that only hold values: stand-ins for them are no harm.
_HOLDERS = ("argparse.Namespace", "types.SimpleNamespace", "functools.partial")
_HOLDING_MODULES = ("datetime", "decimal", "enum", "fractions", "pathlib", "uuid")
# What the standard library calls itself in its own modules.
_STDLIB = frozenset({*sys.stdlib_module_names, "__builtin__", "posix", "nt", "exceptions"})


class UnsafePickleError(ValueError):
    """A pickle asks for something that no checkpoint needs."""


class Inert:
    """An object of a class that is not looked up: its name, arguments, items and attributes."""

    origin = ""  # the class's or function's name
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    items: dict[Any, Any]
    attributes: dict[str, Any]
    elements: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Keep what it would have been called with."""
        self = super().__new__(cls)
        self.args, self.kwargs = args, kwargs
        self.items = {}
        self.attributes = {}
        self.elements = []
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Keep the attributes that the object had."""
        parts = state if isinstance(state, tuple) else (state,)
        for each in parts:
            if isinstance(each, dict):
                self.attributes.update(each)
            elif each is not None:
                self.args = (*self.args, each)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, value: Any) -> None:
        """Keep an element of a subclass of list."""
        self.elements.append(value)

    def extend(self, values: Iterable[Any]) -> None:
        """Keep elements of a subclass of list."""
        self.elements.extend(values)

    def __repr__(self) -> str:
        return f"<{self.origin}>"


class Storage(NamedTuple):
    """A torch storage: its dtype, and its name and number of elements in the file."""

    dtype: torch.dtype
    key: str
    numel: int


Locate = Callable[[Storage], tuple[str, int, int]]  # file, offset and length in bytes


def read_pickle(data: bytes, what: str, locate: Locate | None = None) -> Any:
    """Return the content of a pickle. [Note: Restricted pickles]

    Args:
        what: The file, for messages.
        locate: Returns where a storage's bytes are.

    Raises:
        ValueError: If it is no pickle, is cut off, or asks for anything but values.
    """
    try:
        return _Reader(io.BytesIO(data), what, locate).load()
    except UnsafePickleError:
        raise
    except Exception as error:  # whatever a damaged pickle raises in Python's own reader
        raise ValueError(
            f"{what} is damaged: its pickle can't be read: {type(error).__name__}: {error}"
        ) from error


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, what: str, locate: Locate | None) -> None:
        super().__init__(file, encoding="latin1")
        self._what = what
        self._locate = locate
        self._kinds: dict[str, type[Inert]] = {}
        self._rebuild: dict[str, Any] = {
            "torch._utils._rebuild_tensor_v2": _StandIn(self._tensor),
            "torch._utils._rebuild_tensor": _StandIn(self._tensor),
            "torch._utils._rebuild_tensor_v3": _StandIn(self._typed_tensor),
        }

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a function or class. [Note: Restricted pickles]"""
        full = f"{module}.{name}"
        # What is allowed by its full name comes before the refusal of Python's own library, which
        # has `collections.OrderedDict` too. No branch imports anything.
        if full in self._rebuild:
            return self._rebuild[full]
        if full in _ALLOWED:
            return _ALLOWED[full]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module in ("torch", "torch.storage", "torch.cuda") and name in _STORAGES:
            return _STORAGES[name]
        root = module.partition(".")[0]
        is_holder = full in _HOLDERS or root in _HOLDING_MODULES
        if root in _STDLIB and not (is_holder and root != "__main__"):
            raise UnsafePickleError(
                f"{self._what} asks for '{full}', which no checkpoint needs: it is forged, or of "
                "another kind. Nothing of it was run. Do not open it by other means."
            )
        if full not in self._kinds:
            self._kinds[full] = type(name.rpartition(".")[2], (Inert,), {"origin": full})
        return self._kinds[full]

    def persistent_load(self, pid: Any) -> Storage:
        """Return a storage by its key."""
        is_storage = isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage"
        if not is_storage or not isinstance(pid[1], torch.dtype):
            raise ValueError(f"expected a torch storage, got {pid!r:.80}")
        return Storage(pid[1], str(pid[2]), int(pid[4]))

    def _typed_tensor(  # noqa: PLR0913 -- torch's order
        self,
        storage: Storage,
        offset: int,
        size: Iterable[int],
        stride: Iterable[int],
        requires_grad: bool,
        hooks: Any,
        dtype: torch.dtype,
        *_: Any,
    ) -> PeerTensor:
        typed = Storage(dtype, storage.key, storage.numel)
        return self._tensor(typed, offset, size, stride)

    def _tensor(
        self, storage: Storage, offset: int, size: Iterable[int], stride: Iterable[int], *_: Any
    ) -> PeerTensor:
        if self._locate is None:
            raise ValueError("a tensor where none is expected")
        file, start, nbytes = self._locate(storage)
        shape, steps = tuple(size), tuple(stride)
        return strided(file, start, nbytes, storage.dtype, offset, shape, steps)


class _StandIn:
    """A function of this module, which no pickle can give other attributes."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        """Refuse attributes, which would outlive the pickle."""
        raise ValueError("attributes of a function")


def _first(value: Any, *_: Any) -> Any:
    return value


def _bytes(value: Any = b"", encoding: str = "latin1") -> bytes:
    """Return bytes of what has them; never as many zeros as a number says."""
    if isinstance(value, str):
        return _encoded(value, encoding)
    return bytes(value if isinstance(value, bytes | bytearray | list | tuple) else b"")


def _from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    return function(*args)


def _mapping(*args: Any) -> dict[Any, Any]:
    """Stand for OrderedDict and defaultdict, whose first argument is a function."""
    return dict(args[-1]) if args and isinstance(args[-1], Mapping | list) else {}


class _Dict(dict[Any, Any]):
    """A dict that pickles may give attributes, as torch's state dicts have."""

    def __new__(cls, *args: Any) -> _Dict:
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None:
        super().__init__(_mapping(*args))

    def __setstate__(self, state: Any) -> None:
        pass


def _counter(counts: Any = ()) -> Counter[Any]:
    """Return the milestones of a scheduler, for example."""
    return Counter({key: int(each) for key, each in dict(counts).items()})


def _size(sizes: Iterable[int] = ()) -> torch.Size:
    return torch.Size(int(each) for each in sizes)


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1" if encoding in ("latin1", "latin-1") else "utf-8")


def _numpy_scalar(dtype: Any, data: Any = b"") -> Any:
    """Return the number that a numpy scalar was."""
    kind = str(dtype.args[0]) if isinstance(dtype, Inert) and dtype.args else ""
    code = {"f8": "d", "f4": "f", "i8": "q", "i4": "i", "i2": "h", "i1": "b", "u1": "B"}.get(kind)
    code = "?" if kind == "b1" else code
    if code is None or not isinstance(data, bytes):
        raise ValueError(f"a numpy number of dtype {kind!r}")
    return struct.unpack("<" + code, data)[0]


def _new_object(kind: Any, *args: Any) -> Any:
    """Stand for `copyreg._reconstructor` and `__newobj__`."""
    if not (isinstance(kind, type) and issubclass(kind, Inert | _Dict)):
        raise ValueError(f"a new object of {kind!r}")
    return kind()


_BUILTINS: dict[str, Any] = {
    **{each.__name__: each for each in (set, frozenset, list, tuple, dict, slice)},
    **{each.__name__: each for each in (int, float, bool, complex, str)},
    "bytes": _StandIn(_bytes),
    "bytearray": _StandIn(_bytes),
    "object": Inert,
}
_ALLOWED: dict[str, Any] = {
    **{f"builtins.{name}": value for name, value in _BUILTINS.items()},
    **{f"__builtin__.{name}": value for name, value in _BUILTINS.items()},
    "collections.OrderedDict": _Dict,
    "collections.defaultdict": _Dict,
    "collections.Counter": _StandIn(_counter),
    "_codecs.encode": _StandIn(_encoded),
    "copyreg._reconstructor": _StandIn(_new_object),
    "copyreg.__newobj__": _StandIn(_new_object),
    "copy_reg._reconstructor": _StandIn(_new_object),
    "torch.Size": _StandIn(_size),
    "torch.device": _StandIn(str),
    "torch._utils._rebuild_parameter": _StandIn(_first),
    "torch._utils._rebuild_parameter_with_state": _StandIn(_first),
    "torch._tensor._rebuild_from_type_v2": _StandIn(_from_type),
    "numpy.core.multiarray.scalar": _StandIn(_numpy_scalar),
    "numpy._core.multiarray.scalar": _StandIn(_numpy_scalar),
}
