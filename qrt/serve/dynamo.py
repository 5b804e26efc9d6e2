"""Run an engine as a worker of Dynamo, which spreads requests over many hosts.

    pip install 'qrt[serve]' ai-dynamo
    python -m qrt.serve.dynamo Qwen/Qwen3-8B --kv int8 --tensor-parallel-size 2

The worker takes and gives token ids. Dynamo's frontend tokenizes, detokenizes, and ends answers at stop
strings. The flags are qrt-serve's for model, KV and engine, and Dynamo's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from argparse import Namespace
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from qrt.answers.output import TextDelta, TokenLogprobs
from qrt.answers.processor import OutputProcessor
from qrt.cli import ArgumentParser, run_main
from qrt.config import EngineConfig
from qrt.engine.preflight import preflight
from qrt.errors import ConfigError, QueueFullError, UnsupportedError
from qrt.model_files.location import EXPECTED, api_name, model_folder
from qrt.request.sampling import SamplingParams
from qrt.serve.async_llm import AsyncLLM
from qrt.serve.command.cli import engine_config
from qrt.serve.command.flag_groups import GROUPS
from qrt.serve.link.engine_client import EngineError
from qrt.serve.link.metrics import BLOCK
from qrt.text.tokenizer import Tokenizer

FLAGS = ("model", "kv", "engine")  # groups of qrt-serve's flags
RENAMED = {
    "guided_decoding": "structured_outputs",
    "bad_words_token_ids": "bad_words",
    "max_thinking_tokens": "thinking_token_budget",
}
# Options of the text, which the frontend makes of the tokens.
OF_TEXT = (
    *("stop", "include_stop_str_in_output", "detokenize", "skip_special_tokens"),
    *("formatted_prompt", "return_tokens_as_token_ids"),
)
# What is no text, or what another worker has begun.
FOREIGN = (
    *("multi_modal_data", "mm_processor_kwargs", "prompt_embeds"),
    *("prefill_result", "bootstrap_info", "encoder_result"),
)


def main(argv: list[str] | None = None) -> int:
    """Run the worker until Dynamo ends it; return the exit code."""
    return run_main(lambda: _dynamo("common.backend.run").run(engine_class(), argv))


def engine_class() -> type[Any]:
    """Return the worker's class, a `dynamo.common.backend.LLMEngine`; UnsupportedError without ai-dynamo."""
    base = _dynamo("common.backend").LLMEngine
    return type("QrtEngine", (TokenEngine, base), {"__doc__": TokenEngine.__doc__})


class TokenEngine:
    """An engine of qrt behind the methods that Dynamo's Worker calls; `engine_class` adds Dynamo's base."""

    def __init__(self, config: EngineConfig, name: str) -> None:
        """Keep the settings; `name` is the model's in requests. Nothing is loaded before `start`."""
        self.config, self.name = config, name
        self._llm: _TokenLLM | None = None
        self._running: dict[str, OutputProcessor] = {}  # by the id of Dynamo's context

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[TokenEngine, Any]:
        """Return the engine and its WorkerConfig; `argv` None is the command line.

        Raises a QrtError for a model or a setting that cannot be; exits for an unknown flag.
        """
        runtime = _dynamo("common.configuration.groups.runtime_args")
        arguments = _parser(runtime).parse_args(sys.argv[1:] if argv is None else argv)
        given = engine_config(arguments)
        checked, name = preflight(given), arguments.served_model_name or api_name(given.model)
        if checked.pooling is not None:
            raise UnsupportedError(f"{name}: expected a model that generates; serve vectors with qrt-serve")
        return cls(checked.config, name), _worker_config(runtime, arguments, checked.config, name)

    async def start(self, worker_id: int) -> Any:
        """Load the model; return Dynamo's EngineConfig, whose blocks of 16 tokens are only a unit."""
        llm = self._llm = _TokenLLM(**vars(self.config))
        info, backend = llm.client.info, _dynamo("common.backend")
        return backend.EngineConfig(
            model=str(model_folder(self.config.model)),
            served_model_name=self.name,
            llm=backend.LlmRegistration(
                context_length=info.max_model_len,
                kv_cache_block_size=BLOCK,
                total_kv_blocks=info.pool_tokens // BLOCK,
                max_num_seqs=info.max_num_seqs,
                max_num_batched_tokens=self.config.max_num_batched_tokens,
            ),
        )

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the tokens that each step adds to a request of Dynamo, as its GenerateChunk.

        Raises Dynamo's InvalidArgument for a request that is wrong or asks for what qrt lacks, HttpError 429
        when the queue is full, EngineShutdown when the engine has ended, Unknown when a step fails.
        """
        with self._errors():
            llm = self._started()
            collector = await llm.collector(request)
            if context.is_stopped():
                yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                return
            self._running[context.id()] = collector
            try:
                with contextlib.closing(await llm.client.submit([collector])) as stream:
                    async for _, delta in stream:
                        if delta.token_ids or delta.finish_reason:  # else a part of the prompt was scored
                            yield _chunk(delta, collector, llm.tokenizer)
            finally:
                del self._running[context.id()]

    async def abort(self, context: Any) -> None:
        """End a request; its `generate` yields once more, with finish_reason "cancelled"."""
        collector = self._running.get(context.id())
        if collector is not None:
            self._started().client.abort(collector.engine_ids)

    async def cleanup(self) -> None:
        """End the engine and give its memory back; a second call does nothing."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await llm.shutdown()

    async def health_check_payload(self) -> dict[str, Any]:
        """Return the request of one token by which Dynamo finds out whether an idle worker works."""
        health = _dynamo("common.backend.health_check")
        return dict(health.build_health_check_payload(health.bos_token_id_or(self._started().tokenizer)))

    def _started(self) -> _TokenLLM:
        if self._llm is None:
            raise EngineError("the engine has not been started, or has been shut down")
        return self._llm

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise the errors of qrt as those of Dynamo that its frontend and router tell apart."""
        kinds = _dynamo("llm.exceptions")
        try:
            yield
        except QueueFullError as error:
            raise kinds.HttpError(429, str(error)) from error
        except (ConfigError, UnsupportedError) as error:
            raise kinds.InvalidArgument(str(error)) from error
        except EngineError as error:
            ended = self._llm is None or self._llm.client.stopped
            raise (kinds.EngineShutdown if ended else kinds.Unknown)(str(error)) from error


class _TokenLLM(AsyncLLM):
    """AsyncLLM for requests of Dynamo, whose tokens are read off the client."""

    async def collector(self, request: Mapping[str, Any]) -> OutputProcessor:
        """Check a request and make its collector; ConfigError or UnsupportedError for a wrong one."""
        await self._start()
        _refuse_kinds(request)
        params = sampling_params(request, self._defaults, self.client.info.max_new_tokens)
        ids = _dynamo("common.utils.token_ids").token_ids_to_list(request.get("token_ids"))
        routing, extra = request.get("routing") or {}, (request.get("extra_args") or {}).get("nvext") or {}
        salt = routing.get("cache_salt") or extra.get("cache_salt")
        prompt: Any = {"prompt_token_ids": ids, "cache_salt": salt}
        priority = -(routing.get("priority") or 0)  # Dynamo runs the largest first
        return await asyncio.to_thread(self._collector, prompt, params, None, priority)


def sampling_params(request: Mapping[str, Any], defaults: SamplingParams, most: int | None) -> SamplingParams:
    """Make the SamplingParams of a request of Dynamo.

    defaults   those of the checkpoint, for options that the request leaves out
    most       the checkpoint's most new tokens

    Raises ConfigError for a wrong or unknown option, UnsupportedError for one that qrt does not have.
    """
    given: dict[str, Any] = {}
    for place in ("sampling_options", "stop_conditions", "output_options"):
        for name, value in (request.get(place) or {}).items():
            if value is not None and name not in OF_TEXT:
                given[RENAMED.get(name, name)] = value
    if (count := max(given.pop("n", 1), given.pop("best_of", 1))) > 1:
        raise UnsupportedError(
            f"n: expected 1, got {count}; Dynamo ends a stream with its first completion; send more requests"
        )
    ends = [*given.pop("stop_token_ids", ()), *given.pop("stop_token_ids_hidden", ())]
    wanted, words = given.pop("max_tokens", most), given.pop("bad_words", ())
    shape = given.pop("structured_outputs", {})  # its backend is a wish: there is one
    return replace(
        defaults,
        **given,
        structured_outputs={k: v for k, v in shape.items() if v not in (None, []) and k != "backend"} or None,
        bad_words=tuple(map(tuple, words)),
        detokenize=False,
        stop=None,
        stop_token_ids=list(dict.fromkeys(ends)),
        max_tokens=wanted if most is None else min(wanted, most),
    )


def _refuse_kinds(request: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for media, adapters, and requests that another worker has begun."""
    asked = {name: request.get(name) for name in FOREIGN}
    asked["lora_name"] = (request.get("routing") or {}).get("lora_name")
    for name in filter(asked.get, asked):
        raise UnsupportedError(
            f"{name}: expected none, got {asked[name]!r:.80}; a worker of qrt takes text alone, has no "
            "adapters, and computes prompt and answer itself"
        )


def _chunk(delta: TextDelta, collector: OutputProcessor, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what a step has added as Dynamo's GenerateChunk."""

    def by_id(entries: TokenLogprobs | None) -> dict[str, Any] | None:
        return {str(own["token_id"]): own for own in _scores(entries, tokenizer)} if entries else None

    chunk: dict[str, Any] = {"token_ids": list(delta.token_ids), "index": 0}
    if delta.logprobs is not None:
        chunk["log_probs"] = [next(iter(entries.values())).logprob for entries in delta.logprobs]
        chunk["top_logprobs"] = [_scores(entries, tokenizer) for entries in delta.logprobs]
    if delta.finish_reason:
        prompt, output = len(collector.prompt_ids), collector.num_output_tokens
        chunk["finish_reason"] = "cancelled" if delta.finish_reason == "abort" else delta.finish_reason
        chunk["stop_reason"] = delta.stop_reason
        chunk["completion_usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": collector.num_cached_tokens},
        }
        if collector.params.prompt_logprobs is not None:
            chunk["engine_data"] = {"prompt_logprobs": [*map(by_id, collector.prompt_logprobs)]}
    return chunk


def _scores(entries: TokenLogprobs, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the log-probabilities of one place of the text, that of its own token first."""
    return [
        {
            "rank": own.rank,
            "token_id": token,
            "token": tokenizer.token_text(token),
            "decoded_token": tokenizer.token_text(token),  # its name where it belongs to a prompt
            "logprob": own.logprob,
            "bytes": list(tokenizer.token_bytes(token)),
        }
        for token, own in entries.items()
    ]


def _parser(runtime: Any) -> ArgumentParser:
    """Return the parser of the worker's flags; `runtime` is Dynamo's module of its own."""
    parser = ArgumentParser(prog="python -m qrt.serve.dynamo", description="Run a worker of Dynamo.")
    parser.add_argument("model_path", nargs="?", metavar="MODEL", help=EXPECTED)
    parser.add_argument("--served-model-name", "--model-name", help="the model's name in requests")
    for title in FLAGS:
        GROUPS[title](parser.add_argument_group(title))
    runtime.DynamoRuntimeArgGroup().add_arguments(parser)
    return parser


def _worker_config(runtime: Any, arguments: Namespace, config: EngineConfig, name: str) -> Any:
    """Return Dynamo's WorkerConfig of its flags."""
    own = runtime.DynamoRuntimeConfig.from_cli_args(arguments)
    own.validate()
    endpoint = own.endpoint or f"{own.namespace}.backend.generate"
    places = _dynamo("common.utils.runtime").parse_endpoint(endpoint)
    return _dynamo("common.backend").WorkerConfig.from_runtime_config(
        own,
        model_name=str(model_folder(config.model)),
        served_model_name=name,
        structural_tag=None,  # qrt has none: the frontend is not to ask for them by itself
        **dict(zip(("namespace", "component", "endpoint"), places, strict=True)),
    )


def _dynamo(module: str) -> Any:
    """Import a module of Dynamo; UnsupportedError where it is not installed."""
    try:
        return import_module(f"dynamo.{module}")
    except ImportError as error:
        missing = (error.name or module).partition(".")[0].replace("dynamo", "ai-dynamo")
        raise UnsupportedError(f"{missing} is not installed; pip install 'qrt[serve]' ai-dynamo") from error


if __name__ == "__main__":
    sys.exit(main())
