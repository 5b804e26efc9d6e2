"""Make the blocks of all ranks, and open those of the others, through the CUDA driver.

A block is memory of its own, not a part of what torch's allocator has, as a handle opens all of an
allocation. The thread's current GPU gets access, so no rank makes a context on another one's GPU.
"""

from __future__ import annotations

import ctypes

import torch
import torch.distributed as dist

from qrt.kernels.peer_memory import EMPTY, Memory, block_bytes, places_bytes
from qrt.kernels.sizes import cdiv
from qrt.kernels.tensor_parallel import TensorParallelGroup

_LAZY_PEER_ACCESS = 1  # the only flag that the driver takes
_HANDLE_BYTES = 64
_PAGE = 2 << 20  # what the driver hands out: a handle opens all of one


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class PeerError(Exception):
    """A GPU cannot reach the memory of another."""


def open_memory(peers: TensorParallelGroup, rows: int, row_bytes: int) -> Memory:
    """Return the memory of all ranks, empty, for `rows` rows of `row_bytes`; all ranks call it.

    Raise PeerError on all of them if one cannot reach another one's. It stays until the process ends.
    """
    sizes = peers.size, rows, row_bytes
    with torch.cuda.device(peers.device):
        torch.cuda.synchronize()  # makes the context, of which the driver's functions are
        own, problem = 0, ""
        handle = bytes(_HANDLE_BYTES)
        try:
            own = _allocate(*sizes)
            handle = _handle_of(own)
        except PeerError as error:
            problem = str(error)
        handles = _gathered(handle, peers)
        blocks = [own] * peers.size
        for rank in range(peers.size):
            if rank != peers.rank and not problem:
                try:
                    blocks[rank] = _open(handles[rank])
                except PeerError as error:
                    problem = f"memory of rank {rank}: {error}"
        torch.cuda.synchronize()
    failed = [
        rank for rank, wrong in enumerate(peers.all_gather_int(bool(problem))) if wrong
    ]  # they wait for all
    if failed:
        raise PeerError(problem or f"rank {failed[0]} has no access")
    return Memory.of(blocks, peers.rank, rows, row_bytes, peers.device)


def _allocate(ranks: int, rows: int, row_bytes: int) -> int:
    """Return the address of a block that is empty."""
    address = ctypes.c_uint64()
    places = places_bytes(ranks, rows, row_bytes)
    whole = cdiv(block_bytes(ranks, rows, row_bytes), _PAGE) * _PAGE
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(whole))
    for begin, word, count in ((0, EMPTY, places // 4), (places, 0, rows + 1)):
        at = ctypes.c_uint64(address.value + begin)
        _call("cuMemsetD32_v2", at, ctypes.c_uint32(word & 0xFFFFFFFF), ctypes.c_size_t(count))
    return address.value


def _handle_of(address: int) -> bytes:
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle)


def _open(handle: bytes) -> int:
    address = ctypes.c_uint64()
    given = _Handle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return address.value


def _call(name: str, *args: object) -> None:
    """Call a function of the driver; raise PeerError with what it says."""
    driver = ctypes.CDLL("libcuda.so.1")
    if code := getattr(driver, name)(*args):
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise PeerError(f"{name}: {(text.value or b'').decode() or code}")


def _gathered(handle: bytes, peers: TensorParallelGroup) -> list[bytes]:
    """Return the handle of each rank."""
    mine = torch.frombuffer(bytearray(handle), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(peers.size)]
    dist.all_gather(every, mine)
    return [bytes(one.tolist()) for one in every]
