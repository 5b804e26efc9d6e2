"""A decoder whose next token depends on every token of the context, as read back through the slot table.

It stores token ids, positions and RoPE positions by slot where a real one stores K and V. The logits after a
token are a hash of all tokens up to it, so a wrong slot, position, length or row changes what is generated,
and `next_logits` says from the definition what the whole loop must produce.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from qrt.arch import Arch, Layer
from qrt.arch.rope import RopeConfig
from qrt.config import EngineConfig
from qrt.engine.engine import Engine
from qrt.kernels.prefill_attention.tiles import Queries
from qrt.mem.sizing import pool_bytes
from qrt.quant.kv import KV_FORMATS

VOCAB = 53
EOS = 7
MAX_POSITION = 256

_random = torch.Generator().manual_seed(0)
_WEIGHTS = torch.randint(-(2**62), 2**62, (MAX_POSITION,), generator=_random)
_MIX = torch.randint(-(2**62), 2**62, (VOCAB,), generator=_random) | 1


def _logits(state: Tensor) -> Tensor:
    """int64 [n] hashes of contexts -> fp32 [n, VOCAB] in [-4, 4)."""
    bits = (state[:, None] ^ (state[:, None] >> 29)) * _MIX
    return ((bits >> 40) & 0xFFFF).float() / 2**13 - 4


def _states(tokens: Tensor) -> Tensor:
    """int64 [n] tokens of a context -> int64 [n]: the hash of the tokens up to each of them."""
    return ((tokens + 1) * _WEIGHTS[: len(tokens)]).cumsum(0)


def next_logits(tokens: list[int]) -> Tensor:
    """fp32 [n, VOCAB]: the logits after each token of a sequence."""
    return _logits(_states(torch.tensor(tokens)))


def greedy(prompt: list[int], count: int) -> list[int]:
    """The `count` tokens that greedy decoding continues `prompt` with."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(next_logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


class FakeDecoder:
    """Stands in for `qrt.model.decoder.Decoder`."""

    arch = Arch(
        name="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        layers=(Layer(),),
        ropes={"all": RopeConfig(10000.0, 16)},
        max_position=MAX_POSITION,
        dtype="float32",
        eos_token_ids=(EOS,),
    )
    dtype = torch.float32
    device = torch.device("cpu")
    queries = Queries(1, 32)
    peers = None

    def __init__(self, long_rope_switch: int = 0) -> None:
        if long_rope_switch:
            own = RopeConfig(
                10000.0, 16, "longrope", original_max_position=long_rope_switch, short_factors=(2.0,) * 8
            )
            self.arch = replace(self.arch, ropes={"all": own})
        self.steps = 0
        self.fail_at: set[int] = set()
        self.cache = torch.empty(0)

    def hidden(self, step, kv):
        self.steps += 1
        if not len(self.cache):
            self.cache = torch.full((kv.num_slots + 1, 3), -1)
        rope_positions = step.positions if step.rope_positions is None else step.rope_positions
        self.cache[step.slots.long()] = torch.stack([step.tokens, step.positions, rope_positions], 1)
        if self.steps in self.fail_at:
            raise RuntimeError("injected fault\nwith a second line")
        assert len(set(step.slots.tolist())) == len(step.slots) == len(step.tokens)
        states = []
        if step.decode is not None:
            for row, length in zip(step.decode.rows, step.decode.kv_lens, strict=True):
                states.append(self._context(step, row, length)[-1:])
            assert torch.equal(step.positions[: step.num_decodes], step.decode.kv_lens - 1)
        if step.prefill is not None:
            chunk = step.prefill
            sizes, cached = chunk.query_start.diff(), chunk.cached_start.diff()
            assert int(chunk.query_start[0]) == step.num_decodes and int(sizes.min()) > 0
            assert int(cached.sum()) == chunk.num_cached
            lengths = cached if chunk.attend_cache else cached + sizes
            for row, length, size in zip(chunk.rows, lengths, sizes, strict=True):
                states.append(self._context(step, row, length)[length - size :])
        return torch.cat(states)[:, None]

    def _context(self, step, row, length):
        tokens, positions, rope_positions = self.cache[step.slot_table[row, :length].long()].unbind(1)
        assert torch.equal(positions, torch.arange(int(length))), "a slot of another position"
        first, short = int(rope_positions[0]), self.arch.long_rope_switch
        assert torch.equal(rope_positions, positions + first), "K of two RoPE tables"
        assert first == short if length > short else first in (0, short)
        return _states(tokens)

    def logits(self, hidden):
        return _logits(hidden[:, 0])


class WindowedDecoder(FakeDecoder):
    """A FakeDecoder with a second layer, which slides a window; it fails if a token in a window is wrong."""

    def __init__(self, window: int, long_rope_switch: int = 0) -> None:
        super().__init__(long_rope_switch)
        self.window = window
        self.arch = replace(self.arch, layers=(Layer(), Layer(window=window)))
        self.seen = torch.empty(0)

    def hidden(self, step, kv):
        states = super().hidden(step, kv)
        slots, table = step.places(kv.layer(1).group)
        if not len(self.seen):
            self.seen = torch.full((kv.slots[1] + 1, self.cache.shape[1]), -1)
        assert len(set(slots.tolist())) == len(slots)
        self.seen[slots.long()] = self.cache[step.slots.long()]
        for row, first, end in self._queries(step):
            low = max(0, first + 1 - self.window)
            expected = self.cache[step.slot_table[row, low:end].long()]
            assert torch.equal(self.seen[table[row, low:end].long()], expected), "a wrong slot in a window"
        return states

    def _queries(self, step):
        """Yield row, first position and end of each request's tokens in the step."""
        if step.decode is not None:
            for row, length in zip(step.decode.rows, step.decode.kv_lens, strict=True):
                yield int(row), int(length) - 1, int(length)
        if step.prefill is not None:
            starts = pairwise(step.prefill.query_start.tolist())
            for row, (start, end) in zip(step.prefill.rows, starts, strict=True):
                yield int(row), int(step.positions[start]), int(step.positions[end - 1]) + 1


def fake_engine(model: FakeDecoder | None = None, *, pool: int = 512, **settings) -> Engine:
    """An engine over a FakeDecoder with a pool of `pool` tokens (a multiple of 16)."""
    settings.setdefault("max_model_len", min(MAX_POSITION, pool))
    kv_bytes = pool_bytes([KV_FORMATS["fp16"]], pool, 1, 16, torch.float32)
    config = EngineConfig("fake", kv_cache_memory_bytes=kv_bytes, **settings)
    engine = Engine(config, model or FakeDecoder())
    assert engine.pool.windows or engine.pool.num_slots == min(
        pool, engine.scheduler.limits.max_num_seqs * engine.max_model_len
    )
    return engine


def run(engine: Engine, limit: int = 100_000) -> dict[str, list]:
    """Step until nothing is left; the deltas of each request."""
    deltas: dict[str, list] = {}
    for _ in range(limit):
        if not engine.has_work:
            return deltas
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
    raise AssertionError(f"not done after {limit} steps")


def tokens(deltas) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]
