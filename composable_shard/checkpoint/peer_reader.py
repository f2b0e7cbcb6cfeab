"""Read a peer's tensors by ranges, as `CheckpointReader` reads those of this package.

[Note: Peers' checkpoints]
`peers` says where the elements of a peer's tensors are in its files, and under which names. Here
they get the form of this package's metadata. So a load of a peer's checkpoint is the load of one of
this package: each rank reads its own regions, after all ranks have found that everything fits. A
peer's files have no checksums, so the first pass compares places and sizes alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composable_shard.checkpoint.file_format import Metadata, StoredTensor, byte_view
from composable_shard.checkpoint.reader import TensorReader
from composable_shard.layout import Region, overlap
from composable_shard.peers import PeerRun, PeerTensor, Span, locate_item, without_inert
from composable_shard.state_dict import json_tree
from composable_shard.tensor import find_places

_BLOCK_NUMEL = 1 << 20  # elements located at a time
_GAP_NBYTES = 1 << 10  # between two runs of elements that are read as one


class PeerReader(TensorReader):
    """A peer's checkpoint."""

    def __init__(self, run: PeerRun) -> None:
        self.run = run
        self._sources: dict[str, PeerTensor] = {}
        self._known: dict[tuple[Span, ...], str] = {}
        self.left = list(run.left)
        tree = self._encode()
        tensors = {
            name: StoredTensor(name, each.shape, each.dtype, ())
            for name, each in self._sources.items()
        }
        super().__init__(run.path, Metadata(run.step, run.world_size, 0, (), tensors, tree))
        self._files: dict[str, int] = {}
        self._places: dict[Span, int] = {}

    def __exit__(self, *_: object) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    @property
    def digest(self) -> str:
        """A text that is equal on ranks that see the same files.

        What is in the files as text counts too: files of two steps have tensors at equal places.
        """
        tree = self.metadata.tree
        values = [self.run.step, self.run.world_size, tree["scheduler"], tree["scaler"]]
        told = hashlib.sha256(json.dumps(values).encode())
        for name, each in self._sources.items():
            spans = [(Path(span.file).name, span.offset, span.region) for span in each.spans]
            told.update(repr((name, tuple(each.shape), str(each.dtype), spans)).encode())
        return told.hexdigest()

    def _encode(self) -> dict[str, Any]:
        run = self.run
        return {
            "model": {
                fqn: self._encode_value(value, f"model/{fqn}") for fqn, value in run.model.items()
            },
            "optimizer": {
                name: {
                    "state": {
                        str(fqn): self._encode_value(dict(values), f"optimizer/{name}/{fqn}")
                        for fqn, values in each.state.items()
                    },
                    "param_groups": self._encode_value(each.groups, f"optimizer/{name}/groups"),
                }
                for name, each in run.optimizers.items()
            },
            "scheduler": {
                name: self._encode_value(state, f"scheduler/{name}")
                for name, state in run.schedulers.items()
            },
            "scaler": {} if run.scaler is None else {"": self._encode_value(run.scaler, "scaler")},
            "extra": None,
        }

    def _encode_value(self, value: Any, path: str) -> Any:
        """Encode as JSON; one tensor under two names is one."""
        if isinstance(value, PeerTensor) and (known := self._known.get(value.spans)):
            return {"__tensor__": known}
        tensors: dict[str, Any] = {}
        encoded = json_tree.encode(without_inert(value, path, self.left), path, tensors)
        self._sources |= tensors
        if isinstance(value, PeerTensor) and value.spans:
            self._known[value.spans] = path
        return encoded

    def check_files(self, rank: int = 0, num_ranks: int = 1) -> None:
        """Check that a rank's share of the files are there, and as long as their tensors need."""
        ends: dict[str, int] = {}
        for each in self._sources.values():
            for span in each.spans:
                nbytes = span.item_nbytes or span.region.numel * each.dtype.itemsize
                ends[span.file] = max(ends.get(span.file, 0), span.offset + nbytes)
        for file, end in list(ends.items())[rank::num_ranks]:
            try:
                size = os.stat(file).st_size
            except OSError as error:
                raise ValueError(f"can't read {file}: {error}") from error
            if size < end:
                raise ValueError(f"{file} is damaged: expected {end} bytes, found {size}")

    def _read_region(self, name: str, target: Region, output: Tensor | None) -> None:
        source = self._sources[name]
        if output is None:
            return
        num_found = sum(self._read_span(source, span, target, output) for span in source.spans)
        if num_found != target.numel:
            raise ValueError(
                f"{self.folder} is damaged: {num_found} of {target.numel} elements of '{name}' "
                "are in its files, each of which must be there once"
            )

    def _read_span(self, source: PeerTensor, span: Span, target: Region, output: Tensor) -> int:
        """Read the elements of the target that are in a span; return their number."""
        common = overlap(target, span.region)
        if common is not None:
            if common.numel:
                part = output[common.target_start :][: common.numel]
                self._read_run(source, span, common.source_start, part)
            return common.numel
        num_found = 0
        for start in range(0, target.numel, _BLOCK_NUMEL):
            end = min(start + _BLOCK_NUMEL, target.numel)
            places, indices = find_places(target, span.region, start, end)
            if len(places):
                output[places] = self._read_scattered(source, span, indices)
                num_found += len(places)
        return num_found

    def _read_scattered(self, source: PeerTensor, span: Span, indices: Tensor) -> Tensor:
        """Read elements of a span, in runs with small gaps."""
        ordered, order = indices.sort()
        gap = max(1, _GAP_NBYTES // source.dtype.itemsize)
        cuts = (ordered.diff() > gap).nonzero().view(-1) + 1
        values = torch.empty(len(ordered), dtype=source.dtype, device="cpu")
        ends = [0, *cuts.tolist(), len(ordered)]
        for low, high in itertools.pairwise(ends):
            first, last = int(ordered[low]), int(ordered[high - 1])
            run = torch.empty(last - first + 1, dtype=source.dtype, device="cpu")
            self._read_run(source, span, first, run)
            values[order[low:high]] = run[ordered[low:high] - first]
        return values

    def _read_run(self, source: PeerTensor, span: Span, first: int, output: Tensor) -> None:
        """Read consecutive elements of a span."""
        if not output.is_contiguous():
            packed = torch.empty(output.shape, dtype=output.dtype, device="cpu")
            self._read_run(source, span, first, packed)
            output.copy_(packed)
            return
        # A read may return less than was asked for, and nothing at the end of a file: so a loop,
        # and the number of bytes is compared after it.
        position = self._place_of(source, span) + first * source.dtype.itemsize
        view = byte_view(output)
        filled = 0
        try:
            if span.file not in self._files:
                self._files[span.file] = os.open(span.file, os.O_RDONLY | os.O_CLOEXEC)
            while filled < len(view):
                count = os.preadv(self._files[span.file], [view[filled:]], position + filled)
                if not count:
                    break
                filled += count
        except OSError as error:
            raise ValueError(f"can't read {span.file}: {error}") from error
        self.nbytes_read += filled
        if filled < len(view):
            raise ValueError(f"{span.file} is damaged: it ends at byte {position + filled}")

    def _place_of(self, source: PeerTensor, span: Span) -> int:
        if not span.item_nbytes:
            return span.offset
        if span not in self._places:
            nbytes = span.region.numel * source.dtype.itemsize
            self._places[span] = locate_item(span, source.dtype, nbytes)
        return self._places[span]
