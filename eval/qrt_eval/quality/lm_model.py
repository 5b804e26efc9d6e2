"""Define the model class `qrt` of lm-evaluation-harness.

The engine gets all requests at once and batches them. K and V are read back from the cache, so
log-likelihoods depend on the KV format.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from qrt.errors import ConfigError
from qrt.offline.llm import LLM
from qrt.request.sampling import SamplingParams
from qrt_eval.quality.ppl import check_finite

logger = logging.getLogger(__name__)

REQUESTS_AT_ONCE = 512  # scored between two updates of the progress bar; far more than run at once
MAX_GEN_TOKENS = 256  # lm-eval's default
SAMPLING = ("temperature", "top_p", "top_k", "seed", "min_tokens", "ignore_eos")


@register_model("qrt")
class QRTLM(TemplateLM):
    """Implement lm-eval's interface with an `LLM`, given or made from `model`, `kv` and other settings."""

    def __init__(self, model: str | LLM, kv: str = "auto", batch_size: Any = None, device: Any = None,
                 max_batch_size: Any = None, **settings: Any) -> None:  # fmt: skip
        """Take an `LLM` or make one. lm-eval's batch sizes are ignored: the engine takes what fits."""
        super().__init__()
        if isinstance(model, str):
            model = LLM(model, kv=kv, attend_cache=True, device=device, **settings)
        self.llm = model
        self._text = model.tokenizer
        self.tokenizer = self._text.hf

    @property
    def eot_token_id(self) -> int:
        """Return the token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Return the token that stands before a text with nothing before it."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        """Return the most tokens that may predict others."""
        return self.llm.max_model_len

    @property
    def tokenizer_name(self) -> str:
        """Return the name for lm-eval's caches of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return token ids, with BOS if the tokenizer adds one and the text does not begin with it."""
        if add_special_tokens is None:
            begins = self._text.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not string.startswith(begins)
        return self._text.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation as text."""
        return self._text.render_chat(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding writes it.

        A request is (pair, context ids, continuation ids). ConfigError for a continuation longer than the
        context, whose first tokens would have no score; QrtError if a score is not finite.
        """
        longest = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest > self.max_length:
            raise ConfigError(
                f"--max-model-len: expected at least {longest}, the tokens of a continuation to score, got "
                f"{self.max_length}; give more, or leave such tasks out"
            )
        found = []
        with tqdm(total=len(requests), desc="Log-likelihoods", disable=disable_tqdm) as bar:
            for start in range(0, len(requests), REQUESTS_AT_ONCE):
                batch = requests[start : start + REQUESTS_AT_ONCE]
                ids = [(context + continuation)[-self.max_length - 1 :] for _, context, continuation in batch]
                for (pair, _, continuation), scores in zip(batch, self.llm.score_ranked(ids), strict=True):
                    last = slice(len(scores) - len(continuation), None)
                    check_finite(self.llm, torch.from_numpy(scores.logprobs[last]))
                    total = float(scores.logprobs[last].sum(dtype=np.float64))
                    found.append((total, bool((scores.ranks[last] == 1).all())))
                    if pair is not None:
                        self.cache_hook.add_partial("loglikelihood", pair, found[-1])
                bar.update(len(batch))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of whole texts, in windows of up to `max_length`."""
        texts = [request.args[0] for request in requests]
        windows = [self._windows(text) for text in texts]
        flat = [(None, *window) for some in windows for window in some]
        scored = iter(self._loglikelihood_tokens(flat, disable_tqdm))
        found = []
        for text, some in zip(texts, windows, strict=True):
            found.append(sum(next(scored)[0] for _ in some))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        rolling = utils.get_rolling_token_windows(
            self.tok_encode(text), self.prefix_token_id, self.max_length, 1
        )
        return [utils.make_disjoint_window(window) for window in rolling]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return continuations up to their stop strings."""
        prompts, params = [], []
        for request in requests:
            context, kwargs = request.args
            own = self._sampling(kwargs)
            room = self.llm.max_model_len - (own.max_tokens or 0)
            if room < 1:
                raise ConfigError(
                    f"max_gen_toks: expected less than {self.llm.max_model_len}, the context, got "
                    f"{own.max_tokens}"
                )
            prompts.append({"prompt_token_ids": self.tok_encode(context)[-room:]})
            params.append(own)
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        texts = []
        for request, own, output in zip(requests, params, outputs, strict=True):
            text = postprocess_generated_text(output.outputs[0].text, list(own.stop_strings), None)
            self.cache_hook.add_partial("generate_until", request.args, text)
            texts.append(text)
        return texts

    def _sampling(self, kwargs: dict[str, Any]) -> SamplingParams:
        """Turn lm-eval's generation arguments into SamplingParams; warn about those the engine lacks."""
        given: Any = normalize_gen_kwargs(kwargs, MAX_GEN_TOKENS)
        stop = [text for text in given.pop("until", ()) if text]
        max_tokens = given.pop("max_gen_toks")
        sampled = given.pop("do_sample", False)
        known = {name: given.pop(name) for name in SAMPLING if name in given}
        if not sampled:
            known["temperature"] = 0.0
        for name in given:
            logger.warning("ignoring the generation argument %s, which the engine does not have", name)
        return SamplingParams(max_tokens=max_tokens, stop=stop, **known)
