"""Compute how many tokens of K/V fit into the memory that is left on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qrt.errors import ConfigError, UnsupportedError
from qrt.mem.slots import RUN
from qrt.quant.kv import KV_FORMATS, KVFormat

GIB = 1 << 30
# Bounds of the requests that run at once by default. More of them raise a GPU's rate only a little.
LEAST_SEQS, MOST_SEQS = 256, 1024
USUAL_TOKENS = 1024  # assumed length of a request, to estimate how many fit
TABLE_BYTES = 1 << 29  # largest request table by default
CPU_BUDGET_BYTES = 4 * GIB  # size of the pool on a CPU by default
PAD_SLOTS = 16  # slots after the pool: one takes the writes of padded rows; 16 keep strides aligned


@dataclass(frozen=True)
class PoolSize:
    """The size of a KV pool.

    num_slots       tokens that it holds, a multiple of the allocator's run
    num_bytes       memory that it takes, `PAD_SLOTS` included
    kv              its formats, e.g. "int8", or "fp16+int4" if layers differ
    max_model_len   most tokens of one request
    """

    num_slots: int
    num_bytes: int
    kv: str
    max_model_len: int

    @property
    def concurrency(self) -> float:
        """How many requests of full length fit into the pool."""
        return self.num_slots / self.max_model_len

    def __str__(self) -> str:
        """Return the line that is logged at start."""
        return (
            f"KV pool: {self.num_slots:,} tokens, {self.concurrency:.1f}x concurrent requests of "
            f"{self.max_model_len:,} tokens, {self.num_bytes / GIB:.2f} GiB as {self.kv}"
        )


def slot_bytes(formats: Sequence[KVFormat], num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token's K and V in all layers."""
    return sum(format.bytes_per_slot(num_kv_heads, head_dim, dtype) for format in formats)


def pool_bytes(
    formats: Sequence[KVFormat], num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Return the bytes of the tensors for `num_slots` slots and `PAD_SLOTS`; `formats` [layers]."""
    return (num_slots + PAD_SLOTS) * slot_bytes(formats, num_kv_heads, head_dim, dtype)


def kv_budget_bytes(
    device: torch.device,
    *,
    gpu_memory_utilization: float,
    reserve_bytes: int,
    kv_cache_memory_bytes: int | None = None,
) -> int:
    """Return the bytes that the KV pool may take on `device`; call it after the weights are loaded.

    It is `kv_cache_memory_bytes` if given. Else, on a CPU, it is 4 GiB. On a GPU it is the share
    `gpu_memory_utilization` of its memory, less what any process has in use, less `reserve_bytes` for the
    activations of one step and for graphs. Raises ConfigError when nothing is left.
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
            "stop other programs on the GPU, or use a quantized checkpoint or a GPU with more memory"
        )
    return budget


def default_num_seqs(budget_bytes: int, slot_bytes: int, max_model_len: int) -> int:
    """Return how many requests a GPU runs at once by default, a power of two.

    It is between LEAST_SEQS and MOST_SEQS: as many requests of USUAL_TOKENS tokens (or `max_model_len` if
    that is less) as fit into `budget_bytes`, at `slot_bytes` per token. The request table, with 4 bytes for
    each token that a request may have, takes at most TABLE_BYTES.
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
    """Return the largest pool within `budget_bytes` that `max_num_seqs` requests of full length can use.

    `formats` [layers]; `dtype` is the model's. Raises ConfigError when one request of `max_model_len` tokens
    does not fit.
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
