"""PoolingCalls: the methods of LLM for models that pool, by vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any

from tqdm import tqdm

from qrt.answers.pooling.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from qrt.answers.pooling.pairs import Pairs
from qrt.answers.pooling.processor import PoolingProcessor
from qrt.answers.pooling.task import vector_size, with_task
from qrt.arch.pooling import Pooling
from qrt.compat.fields import refuse_arguments
from qrt.engine.engine import Engine
from qrt.engine.schedule.output import StepDelta
from qrt.errors import ConfigError
from qrt.gc import short_collections
from qrt.request.pooling import PoolingParams
from qrt.text.pooling_inputs import encode, pair_up
from qrt.text.prompt import Prompt, listed_prompts, prompt_parts
from qrt.text.tokenizer import Tokenizer

Params = PoolingParams | Sequence[PoolingParams] | None
Pooled = PoolingRequestOutput[PoolingOutput]


class PoolingCalls:
    """Methods that LLM has beside those that generate. Its engine and tokenizer are LLM's."""

    engine: Engine
    tokenizer: Tokenizer
    _ids: Iterator[int]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        *,
        use_tqdm: bool = True,
        pooling_task: str | None = None,
        **others: Any,
    ) -> list[Pooled]:
        """Return what the model makes of each prompt, in the order of the prompts.

        prompts          as in `generate`
        pooling_params   one for all prompts, or a list of one each
        pooling_task     "embed", "classify", "token_embed" or "token_classify"; by default the model's own
        others           vLLM's arguments that qrt does not have

        Raises ConfigError for a prompt that does not fit and a task that the model does not do.
        """
        refuse_arguments("LLM.encode", others, signature(self.encode).parameters)
        given = listed_prompts(prompts)
        pooling, collectors = self._pooling(pooling_task or "encode"), []
        for prompt, params in zip(given, _params(pooling_params, len(given)), strict=True):
            own = with_task(pooling, params, pooling_task, self._vector_size)
            text, ids, salt = prompt_parts(prompt)
            most = own.most_tokens(self.engine.max_model_len)
            encoded = encode(self.tokenizer, ids if ids is not None else text or "", own, most)
            collectors.append(PoolingProcessor(self._next_id(), encoded, pooling, own, cache_salt=salt))
        return self._pool(collectors, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: Params = None,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, `outputs.embedding`; arguments as for `encode`."""
        found = self.encode(prompts, pooling_params, use_tqdm=use_tqdm, pooling_task="embed", **others)
        return [
            EmbeddingRequestOutput(*_around(one, EmbeddingOutput(one.outputs.data.tolist()))) for one in found
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: Params = None,
        **others: Any,
    ) -> list[ClassificationRequestOutput]:
        """Return a number for each label of each prompt, `outputs.probs`; arguments as for `encode`."""
        found = self.encode(prompts, pooling_params, use_tqdm=use_tqdm, pooling_task="classify", **others)
        return [
            ClassificationRequestOutput(*_around(one, ClassificationOutput(one.outputs.data.tolist())))
            for one in found
        ]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        /,
        *,
        pooling_params: Params = None,
        use_tqdm: bool = True,
        **others: Any,
    ) -> list[Pooled]:
        """Return the numbers for each token of each prompt, `outputs.data`; arguments as for `encode`."""
        return self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, pooling_task="token_classify", **others
        )

    def _score_pairs(
        self,
        data_1: Any,
        data_2: Any,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        chat_template: str | None = None,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts, as LLM.score says."""
        refuse_arguments("LLM.score", others, signature(self._score_pairs).parameters)
        pooling, pairs = self._pooling("score"), pair_up(data_1, data_2)
        params = with_task(pooling, pooling_params or PoolingParams(), pooling.task, self._vector_size)
        own = Pairs(
            self.tokenizer,
            pooling,
            pairs,
            params,
            max_model_len=self.engine.max_model_len,
            template=chat_template,
        )
        collectors = [PoolingProcessor(self._next_id(), ids, pooling, params) for ids in own.prompts]
        found = self._pool(collectors, use_tqdm)
        scores = own.scores([one.data() for one in collectors])
        return [
            ScoringRequestOutput(
                found[places[0]].request_id,
                ScoringOutput(score),
                [token for place in places for token in found[place].prompt_token_ids],
                sum(found[place].num_cached_tokens for place in places),
            )
            for places, score in zip(own.of_pair, scores, strict=True)
        ]

    def _pool(self, collectors: Sequence[PoolingProcessor], use_tqdm: bool) -> list[Pooled]:
        """Run the requests of the collectors and return their results."""
        by_id = {collector.request_id: collector for collector in collectors}
        with self._running(by_id):
            for one in collectors:
                self.engine.add(
                    one.request_id, one.prompt_ids, one.params, cache_salt=one.cache_salt, pool=one.pool
                )
            with (
                short_collections(),
                tqdm(total=len(collectors), desc="Processed prompts", disable=not use_tqdm) as bar,
            ):
                for delta in self._deltas():
                    if (gathered := by_id[delta.request_id].buffer(delta)) is not None:
                        by_id[delta.request_id].process(gathered)
                        bar.update()
        return [collector.output() for collector in collectors]

    def _pooling(self, call: str) -> Pooling:
        """Return how the model pools; ConfigError if it generates."""
        if self.engine.pooling is None:
            with_task(None, PoolingParams(), f"LLM.{call}")
        assert self.engine.pooling is not None
        return self.engine.pooling

    @property
    def _vector_size(self) -> int:
        return vector_size(self.engine.pooling, self.engine.model.arch.hidden_size)

    def _next_id(self) -> str:
        return f"pool-{next(self._ids)}"

    def _running(self, request_ids: Iterable[str]) -> AbstractContextManager[None]:
        """See LLM."""
        raise NotImplementedError

    def _deltas(self) -> Iterator[StepDelta]:
        """See LLM."""
        raise NotImplementedError


def _around(found: Pooled, outputs: Any) -> tuple[str, Any, list[int], int]:
    """Return the fields of another kind of result for the same prompt."""
    return found.request_id, outputs, found.prompt_token_ids, found.num_cached_tokens


def _params(given: Params, count: int) -> Sequence[PoolingParams]:
    """Return parameters for each of `count` prompts."""
    if given is None or isinstance(given, PoolingParams):
        return [given or PoolingParams()] * count
    if not isinstance(given, Sequence) or not all(isinstance(own, PoolingParams) for own in given):
        raise ConfigError(
            f"pooling_params: expected PoolingParams, or a list of one per prompt, got {type(given).__name__}"
        )
    if len(given) != count:
        raise ConfigError(f"pooling_params: expected one each, got {len(given)} for {count} prompts")
    return given
