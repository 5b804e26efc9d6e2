"""How many tokens of K/V fit: bytes left on the device -> slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qrt.errors import ConfigError, UnsupportedError
from qrt.mem.slots import RUN
from qrt.quant.kv import KV_FORMATS, KVFormat

GIB = 1 << 30
# Requests that run at once by default: fewest and most. More of them raise a GPU's rate only a little.
LEAST_SEQS, MOST_SEQS = 256, 1024
USUAL_TOKENS = 1024  # of a request, to see how many fit
TABLE_BYTES = 1 << 29  # most of the request table by default
CPU_BUDGET_BYTES = 4 * GIB  # what a CPU run takes unless told otherwise
PAD_SLOTS = 16  # behind the pool; one takes the writes of padded rows, 16 keep strides over slots aligned


@dataclass(frozen=True)
class PoolSize:
    """A KV pool that fits.

    num_slots       tokens it holds, a multiple of the allocator's run
    num_bytes       memory it takes, `PAD_SLOTS` included
    kv              its formats, e.g. "int8" or "fp16+int4" where layers differ
    max_model_len   most tokens of one request
    """

    num_slots: int
    num_bytes: int
    kv: str
    max_model_len: int

    @property
    def concurrency(self) -> float:
        """How many requests of full length it holds."""
        return self.num_slots / self.max_model_len

    def __str__(self) -> str:
        """The start-up line."""
        return (
            f"KV pool: {self.num_slots:,} tokens, {self.concurrency:.1f}x concurrent requests of "
            f"{self.max_model_len:,} tokens, {self.num_bytes / GIB:.2f} GiB as {self.kv}"
        )


def slot_bytes(formats: Sequence[KVFormat], num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one token over all layers."""
    return sum(format.bytes_per_slot(num_kv_heads, head_dim, dtype) for format in formats)


def pool_bytes(
    formats: Sequence[KVFormat], num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes of the tensors of `num_slots` slots and `PAD_SLOTS`; `formats` [layers]."""
    return (num_slots + PAD_SLOTS) * slot_bytes(formats, num_kv_heads, head_dim, dtype)


def kv_budget_bytes(
    device: torch.device,
    *,
    gpu_memory_utilization: float,
    reserve_bytes: int,
    kv_cache_memory_bytes: int | None = None,
) -> int:
    """Bytes that the KV pool may take on `device`, to be asked when the weights are loaded.

    `kv_cache_memory_bytes` if given. Else on a GPU: the share `gpu_memory_utilization` of its memory, less
    what is in use (by anyone) and `reserve_bytes`, the caller's peak for the activations of one step and for
    graphs; ConfigError when nothing is left. Else, on a CPU, 4 GiB.
    """
    if kv_cache_memory_bytes is not None:
        return kv_cache_memory_bytes
    if device.type != "cuda":
        return CPU_BUDGET_BYTES
    torch.cuda.empty_cache()  # blocks that loading left in torch's cache are free for the pool
    free, total = torch.cuda.mem_get_info(device)
    budget = int(total * gpu_memory_utilization) - (total - free) - reserve_bytes
    if budget <= 0:
        raise ConfigError(
            f"no memory left for the KV pool: {(total - free) / GIB:.2f} GiB in use and "
            f"{reserve_bytes / GIB:.2f} GiB reserved for activations, of {total / GIB:.2f} GiB x "
            f"--gpu-memory-utilization {gpu_memory_utilization}; raise it, lower --max-num-batched-tokens, "
            "end what else runs on the GPU, or use a quantized checkpoint or a GPU with more memory"
        )
    return budget


def default_num_seqs(budget_bytes: int, slot_bytes: int, max_model_len: int) -> int:
    """Return how many requests a GPU runs at once unless told otherwise: a power of two.

    It is LEAST_SEQS, or up to MOST_SEQS where `budget_bytes` hold so many requests of USUAL_TOKENS (of
    `max_model_len` if that is less), each token of `slot_bytes`. The request table, 4 bytes for each token
    that each request may have, takes TABLE_BYTES at most.
    """
    fitting = budget_bytes // (slot_bytes * min(USUAL_TOKENS, max_model_len))
    fitting = min(fitting, TABLE_BYTES // (4 * max_model_len), MOST_SEQS)
    return max(LEAST_SEQS, 1 << max(fitting, 1).bit_length() - 1)


def pool_size(
    formats: Sequence[KVFormat],
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    budget_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    run: int = RUN,
) -> PoolSize:
    """The largest pool within `budget_bytes` that `max_num_seqs` requests of `max_model_len` tokens can use.

    `formats` [layers]; `dtype` is the model's. ConfigError when one such request does not fit.
    """
    per_slot = slot_bytes(formats, num_kv_heads, head_dim, dtype)
    fitting = max(0, budget_bytes // per_slot - PAD_SLOTS) // run * run
    useful = -(-max_num_seqs * max_model_len // run) * run
    kv = "+".join(dict.fromkeys(format.name for format in formats))
    if fitting < max_model_len:
        slots = -(-max_model_len // run) * run
        enough = pool_bytes(formats, slots, num_kv_heads, head_dim, dtype)
        remedies = [f"lower --max-model-len to {fitting}"] if fitting else []
        for name in KV_FORMATS:
            try:
                takes = pool_bytes([KV_FORMATS[name]] * len(formats), slots, num_kv_heads, head_dim, dtype)
            except UnsupportedError:  # the format does not take heads of this size
                continue
            if takes <= budget_bytes:
                remedies.append(f"choose --kv {name}")
        remedies.append(f"raise --kv-cache-memory-bytes to {enough}")
        raise ConfigError(
            f"KV pool: {budget_bytes / GIB:.2f} GiB hold {fitting} tokens as {kv} (each {per_slot} bytes), "
            f"fewer than one request of {max_model_len} tokens; "
            f"{', '.join(remedies)} or, on a GPU, raise --gpu-memory-utilization"
        )
    num_slots = min(fitting, useful)
    return PoolSize(num_slots, (num_slots + PAD_SLOTS) * per_slot, kv, max_model_len)
