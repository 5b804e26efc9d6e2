"""Pooler: turn the hidden states of a step into the vectors of its requests, in fp32 on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qrt.engine.schedule.plan import Chunk, Plan
from qrt.engine.step.transfer import Fetch, to_device
from qrt.model.pooling_head import PoolingHead


class Pooler:
    """Makes one vector a request, or one a token, of hidden states behind the final norm.

    Sums of chunks of one prompt stay on the device until its last chunk, in the request's row.
    """

    def __init__(self, head: PoolingHead | None, rows: int, hidden: int, device: torch.device) -> None:
        """`head` turns hidden states of size `hidden` into labels; None: they are the vectors.

        rows   rows of the request table
        """
        self._head = head
        self._shape = rows, hidden
        self._device = device
        self._sums: Tensor | None = None  # fp32 [rows, hidden], made when the first mean is asked for

    def __call__(self, plan: Plan, hidden: Tensor, fetch: Fetch) -> dict[str, Tensor]:
        """Return the vectors that the step completes, fp32 [n, D] on the host, by request id.

        `hidden` [T, H] are the step's hidden states, those of decodes first.
        """
        ends, at = [], len(plan.decodes)
        found: dict[str, Tensor] = {}
        for chunk in plan.chunks:
            first, at = at, at + len(chunk.tokens)
            if chunk.pool is None:
                continue
            if chunk.pool.kind == "last":
                ends.append((chunk.request_id, at - 1))
            elif chunk.pool.kind == "all":
                found[chunk.request_id] = fetch.take(self._vectors(hidden[first:at].float()))
            elif (mean := self._mean(chunk, hidden[first:at])) is not None:
                found[chunk.request_id] = fetch.take(self._vectors(mean[None]))
        if ends:
            places = np.array([place for _, place in ends], np.int64)
            rows = hidden[to_device({"places": places}, hidden.device)["places"]].float()
            vectors = fetch.take(self._vectors(rows))
            found |= {id: vectors[i : i + 1] for i, (id, _) in enumerate(ends)}
        return found

    def _vectors(self, hidden: Tensor) -> Tensor:
        return hidden if self._head is None else self._head(hidden)

    def _mean(self, chunk: Chunk, hidden: Tensor) -> Tensor | None:
        """Add a chunk to its request's sum; return the mean fp32 [H] of all tokens when it is the last."""
        total = hidden.sum(0, dtype=torch.float32)
        if self._sums is None:
            self._sums = torch.zeros(self._shape, device=self._device)
        row = self._sums[chunk.row]
        if chunk.start:
            total += row
        if chunk.pool is not None and chunk.pool.ends:
            return total / chunk.end
        row.copy_(total)
        return None
