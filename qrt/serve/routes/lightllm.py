"""LightLLM's API: /generate and /generate_stream, and its TGI variant (`--use-tgi-api`)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import AliasChoices, ConfigDict, Field

from qrt.answers.output import CompletionOutput, TextDelta, TokenLogprobs
from qrt.answers.processor import OutputProcessor
from qrt.compat.fields import FIELDS
from qrt.errors import ConfigError, UnsupportedError
from qrt.request.sampling import MAX_BAD_WORDS, SamplingParams
from qrt.serve.http.body import Body, Count, Limit, LogitBias, Penalty, Stops, TokenId, TokenList, by_token_id
from qrt.serve.http.events import event
from qrt.serve.http.openapi import EVENTS, errors
from qrt.serve.http.responses import Deadline, EventReply, answer_events, answer_whole
from qrt.serve.http.service import Service
from qrt.serve.http.strict_json import StrictJsonRoute
from qrt.serve.routes.logprobs import LEAST_LOGPROB
from qrt.serve.routes.shapes import ShapeFields
from qrt.serve.settings import MAX_N

DEFAULT_MAX_NEW_TOKENS = 16
# SamplingParams' name -> LightLLM's
RENAMED = {"min_tokens": "min_new_tokens", "stop": "stop_sequences"}
SAME = (
    "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos", "skip_special_tokens", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "allowed_token_ids", "exponential_decay_length_penalty",
)  # fmt: skip


class Parameters(ShapeFields):
    """The `parameters`, by LightLLM's or TGI's names."""

    model_config = ConfigDict(populate_by_name=True)

    best_of: int | None = Field(None, ge=1, le=MAX_N)
    n: int | None = Field(None, ge=1, le=MAX_N)
    do_sample: bool = False
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    allowed_token_ids: TokenList | None = None
    invalid_token_ids: Annotated[list[TokenId], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] = []
    logit_bias: LogitBias = {}
    exponential_decay_length_penalty: (
        Annotated[tuple[Count, Annotated[float, Field(ge=1, le=100)]], Field(strict=False)] | None
    ) = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    input_penalty: bool | None = None
    add_special_tokens: bool = True
    max_new_tokens: Limit = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: Count | None = None
    stop_sequences: Stops = Field(None, validation_alias=AliasChoices("stop_sequences", "stop"))
    return_details: bool = Field(False, validation_alias=AliasChoices("return_details", "details"))
    return_full_text: bool = False

    def sampling_params(
        self, sample: bool, defaults: dict[str, Any], max_tokens: int | None
    ) -> SamplingParams:
        """Make SamplingParams; UnsupportedError for settings that qrt does not have.

        sample       whether to sample; else greedy
        defaults     the model's values for settings that are not given
        max_tokens   from `Service.max_tokens`
        """
        self.refuse_unsupported(FIELDS)
        if max_tokens is not None and (self.min_new_tokens or 0) > max_tokens:
            raise ConfigError(
                f"min_new_tokens: expected at most max_new_tokens {max_tokens}, got {self.min_new_tokens}"
            )
        given = {name: getattr(self, name) for name in SAME}
        given.update({ours: getattr(self, theirs) for ours, theirs in RENAMED.items()})
        given = {name: value for name, value in given.items() if value is not None}
        given = {**defaults, **given, "max_tokens": max_tokens}
        if not sample:
            given["temperature"] = 0.0
        params = SamplingParams(
            n=self.n or self.best_of or 1,  # LightLLM returns all of best_of
            logprobs=0,
            logit_bias=by_token_id(self.logit_bias),
            bad_words=tuple((token,) for token in self.invalid_token_ids),
            structured_outputs=self.shape(),
            **given,
        )
        self._check_input_penalty(params)
        return params

    def _check_input_penalty(self, params: SamplingParams) -> None:
        """Refuse an `input_penalty` that qrt cannot follow.

        In LightLLM it says for all penalties at once whether they count the prompt's tokens.
        """
        if self.input_penalty is False and params.repetition_penalty != 1:
            raise UnsupportedError(
                "input_penalty: expected true with repetition_penalty, which counts the prompt's tokens, "
                "got false; leave input_penalty out"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if self.input_penalty and getattr(params, name) != 0:
                raise UnsupportedError(
                    f"input_penalty: expected false with {name}, which counts the output's tokens alone, "
                    "got true; leave input_penalty out"
                )


PARAMETERS = {*Parameters.model_fields, "stop", "details"}
BESIDE = {name: entry for name, entry in FIELDS.items() if name != "options"}  # Hugging Face's cache options


class GenerateRequest(Body):
    """`POST /generate` and `/generate_stream`."""

    inputs: str
    parameters: Parameters = Field(default_factory=lambda: Parameters.model_validate({}))
    multimodal_params: dict[str, Any] = {}

    def check_others(self) -> None:
        """Raise ConfigError for a parameter outside `parameters`, UnsupportedError for unsupported fields."""
        for name in self.model_extra or ():
            if name in PARAMETERS:
                raise ConfigError(f"{name}: expected in parameters, got it beside them; move it there")
        self.refuse_unsupported(BESIDE)


class RootRequest(GenerateRequest):
    """`POST /`, which TGI's clients use."""

    stream: bool = False


def lightllm_routes(service: Service) -> APIRouter:
    """Make the routes, in LightLLM's shape or TGI's."""
    routes = APIRouter(route_class=StrictJsonRoute)
    shape = TgiShape if service.config.use_tgi_api else LightllmShape

    @routes.post("/generate", response_model=None, responses=errors())
    async def generate(body: GenerateRequest, request: Request) -> Response:
        arrived = time.monotonic()
        collector = await _collector(service, body, shape)
        stream = await service.submit([collector], arrived, request, whole=True)
        reply = shape(service, body, collector)
        listed = isinstance(body, RootRequest)
        whole = (lambda: [reply.body()]) if listed else reply.body
        return await answer_whole(request, stream, Deadline(service, arrived), whole)

    @routes.post("/generate_stream", response_class=StreamingResponse, responses=EVENTS)
    async def generate_stream(body: GenerateRequest, request: Request) -> Response:
        arrived = time.monotonic()
        collector = await _collector(service, body, shape)
        if collector.params.n > 1:
            raise ConfigError(f"best_of: expected 1 for a stream, got {collector.params.n}")
        stream = await service.submit([collector], arrived, request, whole=False)
        reply = shape(service, body, collector)
        return answer_events(stream, Deadline(service, arrived), reply)

    if service.config.use_tgi_api:

        @routes.post("/", response_model=None, include_in_schema=False)
        async def root(body: RootRequest, request: Request) -> Response:
            return await (generate_stream if body.stream else generate)(body, request)

    return routes


async def _collector(service: Service, body: GenerateRequest, shape: type[LightllmShape]) -> OutputProcessor:
    service.check_running()
    body.check_others()
    if any(body.multimodal_params.values()):
        raise UnsupportedError("multimodal_params: only text is supported; leave it out")
    defaults = {} if service.config.use_tgi_api else service.defaults  # TGI has its own, for all models
    max_tokens = service.max_tokens(body.parameters.max_new_tokens)
    params = body.parameters.sampling_params(shape.samples(body.parameters), defaults, max_tokens)
    params = await service.with_checked_shape(params, body.parameters.shape_place)
    ids = await service.encode(body.inputs, body.parameters.add_special_tokens)
    return service.collector(body.inputs, ids, params)


class LightllmShape(EventReply):
    """LightLLM's reply: lists if there are several completions, else the values themselves."""

    data = b"data:"
    end = b""

    def __init__(self, service: Service, body: GenerateRequest, collector: OutputProcessor) -> None:
        self._collector = collector
        self._details = body.parameters.return_details
        self._text = body.inputs if body.parameters.return_full_text else ""
        self._special = service.tokenizer.all_special_ids

    @staticmethod
    def samples(parameters: Parameters) -> bool:
        """Return whether to sample; else each token is the likeliest."""
        return parameters.do_sample

    def body(self) -> Any:
        """Return the reply's body."""
        outputs = self._collector.output().outputs

        def each(values: list[Any]) -> Any:
            return values[0] if len(values) == 1 else values

        body = {
            "generated_text": [self._text + output.text for output in outputs],
            "count_output_tokens": each([len(output.token_ids) for output in outputs]),
            "finish_reason": each([output.finish_reason for output in outputs]),
            "prompt_tokens": len(self._collector.prompt_ids),
        }
        if self._details:
            body["tokens"] = each([self._tokens(output) for output in outputs])
        return body

    def events(self, index: int, delta: TextDelta) -> Iterable[bytes]:
        """Return one event per token.

        The text of a delta comes with its last token, and text that is not certain yet with a later one.
        """
        before = self._collector.num_output_tokens - len(delta.token_ids)
        for place, token in enumerate(delta.token_ids):
            last = place == len(delta.token_ids) - 1
            finish = delta.finish_reason if last else None
            row = delta.logprobs[place] if delta.logprobs else None
            yield self._event(
                {
                    "token": {
                        **self._token(token, row, delta.text if last else ""),
                        "count_output_tokens": before + place + 1,
                        "prompt_tokens": len(self._collector.prompt_ids),
                    },
                    "generated_text": self._final_text(finish),
                    "finished": finish is not None,
                    "finish_reason": finish,
                    "details": self._final_details(finish),
                }
            )

    def _event(self, data: dict[str, Any]) -> bytes:
        return self.data + event(data).removeprefix(b"data: ")

    def _final_text(self, finish: str | None) -> str | None:
        return None

    def _final_details(self, finish: str | None) -> dict[str, Any] | None:
        return None

    def _token(self, token: int, row: TokenLogprobs | None, text: str) -> dict[str, Any]:
        logprob = None if row is None else max(row[token].logprob, LEAST_LOGPROB)
        return {"id": token, "text": text, "logprob": logprob, "special": token in self._special}

    def _tokens(self, output: CompletionOutput) -> list[dict[str, Any]]:
        rows = zip(output.token_ids, output.logprobs or [], strict=True)
        return [self._token(token, row, self._collector.token_text(token)) for token, row in rows]


class TgiShape(LightllmShape):
    """Hugging Face TGI's reply: the completion with the best score, with details if asked for."""

    data = b"data: "

    @staticmethod
    def samples(parameters: Parameters) -> bool:
        """Return whether to sample; as in TGI, any setting of sampling turns it on."""
        shaped = parameters.temperature not in (None, 1) or parameters.top_p not in (None, 1)
        return parameters.do_sample or shaped or (parameters.top_k or 0) > 0

    def body(self) -> Any:
        """Return the reply's body."""
        outputs = self._collector.output().outputs
        best = max(outputs, key=lambda output: output.cumulative_logprob or 0.0)
        body: dict[str, Any] = {"generated_text": self._text + best.text}
        if self._details:
            body["details"] = {
                "finish_reason": _tgi_reason(best),
                "generated_tokens": len(best.token_ids),
                "seed": self._collector.params.seed,
                "prefill": [],
                "tokens": self._tokens(best),
            }
        return body

    def _final_text(self, finish: str | None) -> str | None:
        return self._text + self._collector.output().outputs[0].text if finish else None

    def _final_details(self, finish: str | None) -> dict[str, Any] | None:
        if not finish:
            return None
        output = self._collector.output().outputs[0]
        count = len(output.token_ids)
        return {"finish_reason": _tgi_reason(output), "generated_tokens": count, "seed": None}


def _tgi_reason(output: CompletionOutput) -> str:
    if output.finish_reason != "stop":
        return output.finish_reason or ""
    return "eos_token" if output.stop_reason is None else "stop_sequence"
