"""Adjustments: change the logits of requests with biases, allowed tokens, penalties or a growing EOS.

Only such requests have an entry here, of the size of the vocabulary, and only their logits change. Counts of
tokens live on the device, so that a step can be launched before the host knows the tokens of the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from qrt.engine.schedule.plan import Adjustment, Admission
from qrt.engine.step.transfer import to_device
from qrt.request.sampling import LARGE

_INF = float("inf")


class Adjustments:
    """C entries over a vocabulary of V tokens; C grows to the most that were needed at once.

    bias     fp32 [C, V]    logit_bias; -inf for tokens that are not allowed
    prompt   bool [C, V]    tokens of the prompt
    counts   int32 [C, V]   how often each token is in the output
    factors  fp32 [C, 5]    repetition, presence, frequency, growth of EOS per token, length where it starts
    """

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int], device: torch.device) -> None:
        self._vocab = vocab_size
        self._eos = torch.tensor(sorted(eos_token_ids), dtype=torch.int64, device=device)
        self._entries: dict[int, int] = {}  # row of the request table -> entry
        self._free: list[int] = []
        self.bias = torch.zeros(0, vocab_size, dtype=torch.float32, device=device)
        self.prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.factors = torch.zeros(0, 5, dtype=torch.float32, device=device)

    def admit(self, admitted: Sequence[Admission]) -> None:
        """Store the rules and tokens of requests that have just got a row."""
        for new in admitted:
            entry = self._entries.pop(new.row, None)
            if entry is not None:
                self._free.append(entry)
        for new in admitted:
            if (adjustment := new.sampling.adjustment) is not None:
                if not self._free:
                    self._grow()
                self._entries[new.row] = self._free.pop()
                self._write(self._entries[new.row], adjustment, new)

    def entries(self, rows: Sequence[int]) -> list[int]:
        """Return the entries of rows of the request table; each row must have one."""
        return [self._entries[row] for row in rows]

    def apply(self, logits: Tensor, entries: Tensor, lengths: Tensor) -> Tensor:
        """Adjust `logits` fp32 [n, V] by `entries` int64 [n]; `lengths` [n] count the known tokens."""
        counts = self.counts[entries]
        repetition, presence, frequency, growth, start = self.factors[entries].T[..., None]
        x = logits + self.bias[entries]
        repeated = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where(self.prompt[entries] | (counts > 0), repeated, x)
        x = x - frequency * counts - presence * (counts > 0)
        eos = x[:, self._eos]
        grown = (growth ** (lengths[:, None] - start).clamp(min=0)).clamp(max=LARGE)
        # -inf stays as it is: -inf + inf would be NaN
        x[:, self._eos] = torch.where(eos == -_INF, eos, eos + eos.abs() * (grown - 1))
        return x.clamp_(max=torch.finfo(x.dtype).max)  # two large factors; infinity would end the request

    def count(self, entries: Tensor, tokens: Tensor) -> None:
        """Count the sampled `tokens` int64 [n] of `entries` int64 [n]."""
        self.counts.index_put_((entries, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)

    def _write(self, entry: int, adjustment: Adjustment, new: Admission) -> None:
        start, growth = adjustment.growth or (0, 1.0)
        factors = adjustment.repetition, adjustment.presence, adjustment.frequency, growth, start
        bias = adjustment.bias
        sent = to_device(
            {
                "factors": np.array(factors, np.float32),
                "biased": np.fromiter(bias.keys(), np.int64, len(bias)),
                "values": np.fromiter(bias.values(), np.float32, len(bias)),
                "allowed": np.array(adjustment.allowed or (), np.int64),
                "prompt": new.prompt.astype(np.int64),
                "output": np.array(new.output, np.int64),
            },
            self.bias.device,
        )
        self.factors[entry] = sent["factors"]
        self.bias[entry] = 0.0
        if adjustment.allowed is not None:
            self.bias[entry] = -_INF
            self.bias[entry, sent["allowed"]] = 0.0
        self.bias[entry, sent["biased"]] += sent["values"]
        self.prompt[entry] = False
        self.prompt[entry, sent["prompt"]] = True
        self.counts[entry] = torch.bincount(sent["output"], minlength=self._vocab)

    def _grow(self) -> None:
        """Double the entries; change nothing if there is no memory for it."""
        more = max(1, len(self.bias))
        grown = [
            torch.cat([old, old.new_zeros(more, old.shape[1])])
            for old in (self.bias, self.prompt, self.counts, self.factors)
        ]
        self._free += range(len(self.bias), len(self.bias) + more)
        self.bias, self.prompt, self.counts, self.factors = grown
