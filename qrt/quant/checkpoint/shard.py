"""One safetensors file, read and written with no more than one tensor in memory.

Its header is checked when it is opened; its tensors are mapped one at a time, and written one at a time.

A file holds a little-endian uint64 header length, a JSON header (dtype, shape and data_offsets of each
tensor), then the data. Each tensor has its own mapping, so its memory is freed with the tensor; the library's
`safe_open` keeps every page it ever touched until the whole file is closed.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qrt.errors import CheckpointError, UnsupportedError
from qrt.quant.spec import TensorSpec

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_DIMENSIONS, MAX_NUMBER = 64, 2**80  # no real file has more, and larger numbers are too long to print
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class ShardFile:
    """An opened file: shape and dtype of each tensor, and the byte of the file where its data begin."""

    path: Path
    tensors: dict[str, tuple[TensorSpec, int]]

    def tensor(self, name: str) -> Tensor:
        """Map the tensor `name` copy-on-write: pages are read from disk when they are first used."""
        spec, begin = self.tensors[name]
        if spec.num_bytes == 0:
            return spec.zeros("cpu")
        skip = begin % mmap.ALLOCATIONGRANULARITY
        with open(self.path, "rb") as file:
            pages = mmap.mmap(
                file.fileno(), skip + spec.num_bytes, access=mmap.ACCESS_COPY, offset=begin - skip
            )
        flat = torch.frombuffer(pages, dtype=spec.dtype, count=prod(spec.shape), offset=skip)
        return flat.view(spec.shape)


def open_shard(path: Path) -> ShardFile:
    """Read and check the header of a safetensors file.

    Raises CheckpointError when the header is damaged, tensors overlap or the file is shorter than the header
    says, and UnsupportedError for a dtype that is not in DTYPES.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        if prefix == b"version ":
            raise CheckpointError(f"{path}: a Git LFS pointer, not the weights; run `git lfs pull`")
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > min(size - 8, MAX_HEADER_BYTES):
            raise _damaged(path, f"a header of {header_bytes} bytes in a file of {size}")
        try:
            header = json.loads(file.read(header_bytes))
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, dict):
        raise _damaged(path, "the header is not a JSON object")
    header.pop("__metadata__", None)
    data = 8 + header_bytes
    tensors = {name: _locate(path, name, entry, data, size) for name, entry in header.items()}
    last = 0
    for begin, name in sorted((begin, name) for name, (spec, begin) in tensors.items() if spec.num_bytes):
        if begin < last:
            raise _damaged(path, f"tensor {name!r} begins at byte {begin}, inside another")
        last = begin + tensors[name][0].num_bytes
    return ShardFile(path, tensors)


def _locate(path: Path, name: str, entry: Any, data: int, size: int) -> tuple[TensorSpec, int]:
    """Return shape, dtype and first byte of a tensor of header entry `entry`; data begin at byte `data`."""
    try:
        code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise _damaged(path, f"tensor {name!r} has no dtype, shape or data_offsets") from None
    if not isinstance(code, str):
        raise _damaged(path, f"tensor {name!r} has dtype {code!r}")
    if code not in DTYPES:
        raise UnsupportedError(
            f"{path}: tensor {name!r}: expected dtype {', '.join(DTYPES)}, got {code}; "
            "start from the original checkpoint"
        )
    numbers = *shape, begin, end
    if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < MAX_NUMBER for n in numbers):
        told = f"shape {list(shape)} and data_offsets {[begin, end]}"
        raise _damaged(path, f"tensor {name!r} has {told:.200}")
    spec = TensorSpec(shape, DTYPES[code])
    if end - begin != spec.num_bytes:
        raise _damaged(
            path, f"tensor {name!r} {code} {list(shape)}: expected {spec.num_bytes} bytes, got {end - begin}"
        )
    if data + end > size:
        raise _damaged(path, f"tensor {name!r} ends at byte {data + end} of a file of {size}")
    return spec, data + begin


def write_shard(path: Path, specs: Mapping[str, TensorSpec], fetch: Callable[[str], Tensor]) -> None:
    """Write the tensors `fetch(name)`, of shapes and dtypes `specs`, one after another, through to the disk.

    Order and header are those of the safetensors library (by size of the elements, then by name), with one
    metadata key that transformers insists on. Raises CheckpointError when the disk refuses.
    """
    names = sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + specs[name].num_bytes
        code, shape = CODES[specs[name].dtype], list(specs[name].shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                tensor = fetch(name).detach().cpu().contiguous()
                assert (tuple(tensor.shape), tensor.dtype) == (specs[name].shape, specs[name].dtype), name
                file.write(tensor.flatten().view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror})") from None


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: truncated or not a safetensors file: {what}; download or copy it again")
