"""Prefixes: which engine took a prompt's beginning last, in a table that all API processes share.

Only hashes are kept, each of a whole number of chunks from the prompt's start. The request's cache salt is
the root of the chain, so that prompts of two salts have nothing in common.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Container, Sequence
from hashlib import blake2b

CHUNK = 128  # tokens
SLOTS = 2**18  # of 8 bytes: 2 MiB, for 32 million tokens


def prefix_hashes(prompt_ids: Sequence[int], salt: str | None) -> list[int]:
    """Return a 64-bit hash of each prefix of whole chunks, the shortest first.

    Ids beyond 64 bits, which the engine refuses, have none.
    """
    try:
        data = memoryview(array("q", prompt_ids[: len(prompt_ids) // CHUNK * CHUNK])).cast("B")
    except (OverflowError, TypeError):
        return []
    link = blake2b(b"" if salt is None else b"+" + salt.encode("utf-8", "surrogatepass"), digest_size=16)
    hashes = []
    for start in range(0, len(data), CHUNK * 8):
        link = blake2b(data[start : start + CHUNK * 8], key=link.digest(), digest_size=16)
        hashes.append(int.from_bytes(link.digest()[:8], "little"))
    return hashes


class Prefixes:
    """A table with one slot for each hash; the latest prefix of a slot replaces the one before.

    A slot is one word of 8 bytes: the upper 7 of the hash, and the engine's number and 1 in the lowest. So
    processes need no lock: they read the old word or the new one.
    """

    def __init__(self, path: str | None = None) -> None:
        """Share the table in the file at `path`, made if missing; None: keep one of this process."""
        if path is None:
            memory = mmap.mmap(-1, SLOTS * 8)
        else:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(descriptor, SLOTS * 8)
                memory = mmap.mmap(descriptor, SLOTS * 8)
            finally:
                os.close(descriptor)
        self._words = memoryview(memory).cast("Q")

    def find(self, hashes: Sequence[int], engines: Container[int]) -> int | None:
        """Return the one of `engines` that took the longest known prefix last; None if none is known."""
        for hash in reversed(hashes):
            word = self._words[(hash >> 8) % SLOTS]
            engine = (word & 0xFF) - 1
            if word >> 8 == hash >> 8 and engine in engines:
                return engine
        return None

    def note(self, hashes: Sequence[int], engine: int) -> None:
        """Note that `engine` takes a prompt with these prefixes."""
        for hash in hashes:
            self._words[(hash >> 8) % SLOTS] = hash & ~0xFF | engine + 1
