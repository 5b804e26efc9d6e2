"""The model class `qrt` of lm-evaluation-harness: requests go to the engine all at once, which batches them.

K and V are read back from the cache, so that log-likelihoods see the KV format.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from qrt.errors import ConfigError
from qrt.llm import LLM
from qrt.sampling_params import SamplingParams
from qrt_eval.quality.ppl import check_finite

logger = logging.getLogger(__name__)

REQUESTS_AT_ONCE = 512  # between two movements of the progress bar; far more than run at once
MAX_GEN_TOKENS = 256  # lm-eval's default
SAMPLING = ("temperature", "top_p", "top_k", "seed", "min_tokens", "ignore_eos")


@register_model("qrt")
class QRTLM(TemplateLM):
    """lm-eval's interface over an `LLM`, or over one made of `model`, `kv` and its other settings."""

    def __init__(self, model: str | LLM, kv: str = "auto", batch_size: Any = None, device: Any = None,
                 max_batch_size: Any = None, **settings: Any) -> None:  # fmt: skip
        """The batch sizes are lm-eval's business; the engine takes what fits."""
        super().__init__()
        if isinstance(model, str):
            model = LLM(model, kv=kv, attend_cache=True, device=device, **settings)
        self.llm = model
        self._text = model.tokenizer
        self.tokenizer = self._text.hf

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        """Most tokens that predict others."""
        return self.llm.max_model_len

    @property
    def tokenizer_name(self) -> str:
        """Names caches of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids, with BOS where the tokenizer puts one and the text does not begin with it."""
        if add_special_tokens is None:
            begins = self._text.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not string.startswith(begins)
        return self._text.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text."""
        return self._text.render_chat(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(pair, context ids, continuation ids) -> log-likelihood, and whether greedy decoding says it.
        ConfigError for a continuation longer than the context: its first tokens would have no score;
        QrtError where a score is no number."""
        longest = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest > self.max_length:
            raise ConfigError(
                f"--max-model-len: {self.max_length}, but a continuation to score has {longest} tokens; "
                "give at least as many, or leave such tasks out"
            )
        found = []
        with tqdm(total=len(requests), desc="Log-likelihoods", disable=disable_tqdm) as bar:
            for start in range(0, len(requests), REQUESTS_AT_ONCE):
                batch = requests[start : start + REQUESTS_AT_ONCE]
                ids = [(context + continuation)[-self.max_length - 1 :] for _, context, continuation in batch]
                for (pair, _, continuation), scores in zip(batch, self.llm.score_ranked(ids), strict=True):
                    last = slice(len(scores) - len(continuation), None)
                    check_finite(self.llm, scores.logprobs[last])
                    total = float(scores.logprobs[last].double().sum())
                    found.append((total, bool((scores.ranks[last] == 1).all())))
                    if pair is not None:
                        self.cache_hook.add_partial("loglikelihood", pair, found[-1])
                bar.update(len(batch))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows of up to `max_length`."""
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
        """Continuations up to their stop strings."""
        prompts, params = [], []
        for request in requests:
            context, kwargs = request.args
            own = self._sampling(kwargs)
            room = self.llm.max_model_len - (own.max_tokens or 0)
            if room < 1:
                raise ConfigError(
                    f"max_gen_toks {own.max_tokens}: wanted less than the context, {self.llm.max_model_len}"
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
        """lm-eval's generation arguments; what the engine does not know is named and left out."""
        given: Any = normalize_gen_kwargs(kwargs, MAX_GEN_TOKENS)
        stop = [text for text in given.pop("until", ()) if text]
        max_tokens = given.pop("max_gen_toks")
        sampled = given.pop("do_sample", False)
        known = {name: given.pop(name) for name in SAMPLING if name in given}
        if not sampled:
            known["temperature"] = 0.0
        for name in given:
            logger.warning("generation argument %s is not known to the engine and left out", name)
        return SamplingParams(max_tokens=max_tokens, stop=stop, **known)
