"""PoolingProcessor: buffer the vectors that the engine makes of one prompt."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from qrt.answers.output import TextDelta
from qrt.answers.pooling.outputs import PoolingOutput, PoolingRequestOutput
from qrt.answers.pooling.task import finish, kind_of
from qrt.arch.pooling import Pooling
from qrt.engine.schedule.logprobs import Floats, Vectors
from qrt.engine.schedule.output import StepDelta, merge
from qrt.request.pooling import PoolingParams
from qrt.request.sampling import SamplingParams

NO_SAMPLING = SamplingParams()


class PoolingProcessor:
    """Collects the vectors of one prompt, which is one request in the engine.

    It stands beside OutputProcessor, with the same members for those who carry requests.

    params              the request's in the engine
    pool                the kind of vectors that the engine makes
    num_cached_tokens   prompt tokens found in the prefix cache
    """

    generate = False
    num_listed = 0
    thinking = None

    def __init__(
        self,
        request_id: str,
        prompt_ids: list[int],
        pooling: Pooling,
        params: PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        size: int = 1,
    ) -> None:
        """Start with no vectors; `params` have a task (`task.with_task`), a vector has `size` numbers."""
        self.request_id = self._engine_id = request_id
        self.prompt_ids = prompt_ids
        self.params = NO_SAMPLING
        self.priority = priority
        self.cache_salt = cache_salt
        self.pool: str | None = kind_of(pooling, params)
        self.num_cached_tokens = 0
        self.finished = False
        self._pooling = pooling
        self._params = params
        self._size = size
        self._deltas: list[StepDelta] = []
        self._vectors: Vectors | None = None

    @property
    def engine_ids(self) -> list[str]:
        """The id of its request in the engine."""
        return [self._engine_id]

    def engine_requests(self) -> Iterator[tuple[str, SamplingParams]]:
        """Yield id and parameters of the request to add to the engine."""
        yield self._engine_id, self.params

    @property
    def num_scores(self) -> int:
        """The number of numbers in its reply so far; vectors of all tokens count before they come."""
        if self._vectors is None:
            return len(self.prompt_ids) * self._size if self.pool == "all" else 0
        return self._vectors.size

    def buffer(self, delta: StepDelta) -> StepDelta | None:
        """Store a delta; return all of them, merged, when the request ends."""
        self._deltas.append(delta)
        return merge(self._deltas) if delta.finish_reason else None

    def process(self, delta: StepDelta) -> TextDelta:
        """Take the merged deltas of the request; the result has no text, and says that it has ended."""
        self.num_cached_tokens = delta.num_cached
        self._vectors = np.empty((1, 0), np.float32) if delta.pooled is None else delta.pooled  # aborted
        self.finished = True
        reason = None if delta.finish_reason is None else delta.finish_reason.value
        return TextDelta(0, "", (), None, reason, None, False)

    def data(self) -> Floats:
        """Return what callers get: [D], or [n, D] with a vector for each token.

        ConfigError for more dimensions than there are.
        """
        assert self._vectors is not None, "the request still runs"
        vectors = finish(self._vectors, self._pooling, self._params)
        return vectors if self.pool == "all" else vectors[0]

    def output(self) -> PoolingRequestOutput[PoolingOutput]:
        """Return the result, whose data are a tensor as in vLLM; raises as `data` does."""
        import torch  # here: a server's API processes do without

        data = torch.from_numpy(self.data())
        return PoolingRequestOutput(
            self.request_id, PoolingOutput(data), self.prompt_ids, self.num_cached_tokens
        )
