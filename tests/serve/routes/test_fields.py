"""Fields of a body: which are run, refused by name or let in, and what is said of a wrong one."""

import json
import re
import shutil
import threading

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from servers import KEY, ThreadServer, bearer, refused

from qrt.assets import model_path
from qrt.serve.routes.lightllm import GenerateRequest, Parameters
from qrt.serve.routes.protocol import ChatCompletionRequest, CompletionRequest
from qrt.serve.routes.tokens import Detokenize, TokenizeChat

pytestmark = pytest.mark.model
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def client():
    with ThreadServer(kv="fp16") as server:
        with httpx.Client(base_url=server.url, headers=bearer(), timeout=30) as client:
            yield client


@pytest.mark.parametrize(
    "field",
    [
        {"functions": [{"name": "f"}]},
        {"suffix": "x"},
        {"use_beam_search": True},
        {"truncate_prompt_tokens": 5},
        {"logits_processors": ["x"]},
        {"repetition_detection": {"max_pattern_size": 3}},
        {"detokenize": False},
        {"stop_regex": "a"},
        {"structural_tag": "{}"},
        {"lora_path": "x"},
        {"custom_logit_processor": "x"},
        {"typical_p": 0.5},
        {"no_repeat_ngram_size": 2},
        {"logprob_token_ids": [5]},
        {"return_hidden_states": True},
        {"input_ids": [5]},
        {"watermarking": True},
    ],
    ids=lambda field: next(iter(field)),
)
def test_unsupported_fields_are_refused_by_name(client, field):
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "max_tokens": 2, **field}
    for route in ("/v1/completions", "/v1/chat/completions"):
        assert next(iter(field)) in refused(client.post(route, json=body), 501)


def test_openai_client_does_not_retry_unsupported_requests(client):
    """Of itself it asks again after any 5xx."""

    def count() -> float:
        families = text_string_to_metric_families(client.get("/metrics").text)
        return sum(s.value for f in families for s in f.samples if s.labels.get("code") == "501")

    sdk, before = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key=KEY, max_retries=2), count()
    with pytest.raises(openai.InternalServerError, match="functions"):
        sdk.chat.completions.create(model="tiny", **CHAT, functions=[{"name": "f"}])
    assert count() == before + 1


def test_a_chat_is_not_echoed(client):
    assert "echo" in refused(client.post("/v1/chat/completions", json={**CHAT, "echo": True}), 501)
    off = {"echo": False, "detokenize": True, "typical_p": 1.0, "return_token_ids": False}
    off |= {"logprob_token_ids": None, "return_hidden_states": False, "watermarking": False}
    assert client.post("/v1/chat/completions", json={**CHAT, **off}).status_code == 200


def test_priority_without_priority_policy_is_refused(client):
    assert "--scheduling-policy priority" in refused(
        client.post("/v1/chat/completions", json={**CHAT, "priority": 1})
    )
    assert client.post("/v1/chat/completions", json={**CHAT, "priority": 0}).status_code == 200
    with ThreadServer(kv="fp16", engine={"scheduling_policy": "priority"}) as server:
        body = {"prompt": "x", "max_tokens": 2, "priority": 1}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=bearer())
        assert reply.status_code == 200


@pytest.mark.parametrize("most", [5, 16])  # 16 is also OpenAI's default
def test_the_checkpoint_names_the_most_tokens(tmp_path, most):
    """max_new_tokens of its generation_config.json is the default, and what a larger max_tokens is cut to."""
    folder = shutil.copytree(model_path("tiny"), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": most}))

    def tokens(client, body):
        route = "chat/completions" if "messages" in body else "completions"
        reply = client.post(f"/v1/{route}", json={**body, "ignore_eos": True})
        return reply.raise_for_status().json()["usage"]["completion_tokens"]

    for config, limit in (("auto", most), ("vllm", 40))[: 2 if most == 5 else 1]:
        engine = {"model": str(folder), "generation_config": config, "max_model_len": 64}
        with ThreadServer(kv="fp16", engine=engine) as server:
            with httpx.Client(base_url=server.url, headers=bearer(), timeout=30) as client:
                for name in ("prompt", "messages"):
                    body = {name: {"prompt": "x", **CHAT}[name]}
                    assert tokens(client, {**body, "max_tokens": 3}) == 3
                    assert tokens(client, {**body, "max_tokens": 40}) == limit
                    left = tokens(client, {**body, "max_tokens": None})
                    assert left == limit if config == "auto" else left > 50


def test_a_seed_of_minus_one_is_none(client):
    """As in vLLM, where it is the default of some clients."""
    drawn = {"max_tokens": 12, "temperature": 1, "ignore_eos": True, "seed": -1}
    own = {"max_new_tokens": 12, "do_sample": True, "ignore_eos": True, "seed": -1}
    for route, body in (
        ("/v1/completions", {"prompt": "x", **drawn}),
        ("/v1/chat/completions", {**CHAT, **drawn}),
        ("/generate", {"inputs": "x", "parameters": own}),
    ):
        replies = [client.post(route, json=body).raise_for_status().json() for _ in range(2)]
        texts = [str(reply.get("choices") or reply["generated_text"]) for reply in replies]
        assert texts[0] != texts[1], route


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_tokens", 0),
        ("max_tokens", 5000),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", 5000),
        ("max_new_tokens", 0),
        ("min_new_tokens", 20),
    ],
)
def test_error_uses_the_requests_own_field_name(client, name, value):
    if name.endswith("new_tokens"):
        reply = client.post("/generate", json={"inputs": "x", "parameters": {name: value}})
    else:
        body = {"messages": CHAT["messages"], name: value}
        reply = client.post("/v1/chat/completions", json=body)
    assert re.match(rf"(parameters\.)?{name}: ", refused(reply))


def test_as_many_bad_words_as_may_be(client):
    """Each of them is two lists of tokens to the engine: as the text's beginning, and behind a space."""
    words = [f"word{number}" for number in range(128)]
    body = {"prompt": "x", "max_tokens": 2, "bad_words": words}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert "bad_words" in refused(client.post("/v1/completions", json={**body, "bad_words": [*words, "x"]}))
    for route, chat in (("completions", {}), ("chat/completions", CHAT)):
        long = [letter * 256 for letter in "abcdefgh"]
        reply = client.post(f"/v1/{route}", json={**body, **chat, "bad_words": long})
        assert re.fullmatch(r"bad_words: expected at most 1024 token ids, got \d+", refused(reply))


def test_bad_words_are_encoded_once_in_a_thread(monkeypatch):
    """Many long ones take the time of a thousand prompts, while all streams would stand still."""
    words = [f"word{number}".ljust(200) for number in range(60)]
    body = {"prompt": ["a", "b", "c"], "max_tokens": 2, "n": 2, "bad_words": words}
    with ThreadServer(kv="fp16") as server:
        real, encoded = server.tokenizer.encode, []

        def encode(text, *arguments, **options):
            if "word" in text:
                encoded.append((text.strip(), threading.current_thread() is server.thread))
            return real(text, *arguments, **options)

        monkeypatch.setattr(server.tokenizer, "encode", encode)
        with httpx.Client(base_url=server.url, headers=bearer(), timeout=30) as client:
            assert client.post("/v1/completions", json=body).status_code == 200
            assert sorted(encoded) == sorted(2 * [(word.strip(), False) for word in words])
            encoded.clear()
            assert client.post("/v1/chat/completions", json={**CHAT, "bad_words": words}).status_code == 200
            assert sorted(encoded) == sorted(2 * [(word.strip(), False) for word in words])


def test_max_logprobs_0_still_gives_the_tokens_own_logprob():
    with ThreadServer(kv="fp16", max_logprobs=0) as server:
        with httpx.Client(base_url=server.url, headers=bearer(), timeout=30) as client:
            chat = client.post(
                "/v1/chat/completions", json={**CHAT, "logprobs": True, "allowed_token_ids": [300]}
            )
            assert chat.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
            for route, field in (("completions", "logprobs"), ("chat/completions", "top_logprobs")):
                body = {"logprobs": True, **CHAT} if "chat" in route else {"prompt": "x"}
                reply = client.post(f"/v1/{route}", json={**body, field: 1})
                assert refused(reply) == f"{field}: expected at most 0, got 1"


def test_no_top_logprobs_need_no_logprobs(client):
    """0 is vLLM's default, which its clients send."""
    reply = client.post("/v1/chat/completions", json={**CHAT, "top_logprobs": 0}).raise_for_status()
    assert reply.json()["choices"][0]["logprobs"] is None
    reply = client.post("/v1/chat/completions", json={**CHAT, "top_logprobs": 1})
    assert refused(reply).startswith("top_logprobs: expected only with logprobs: true")


def test_documents_reach_the_template():
    template = "{% for d in documents or [] %}{{ d.text }} {% endfor %}{{ messages[0].content }}"
    with ThreadServer(kv="fp16", chat_template=template) as server:
        with httpx.Client(base_url=server.url, headers=bearer(), timeout=30) as client:
            body = {"messages": CHAT["messages"], "documents": [{"text": "one"}, {"text": "two"}]}
            ids = client.post("/tokenize", json=body).json()["tokens"]
            assert ids == server.tokenizer.encode("one two x", add_special_tokens=False)
            reply = client.post("/v1/chat/completions", json={**body, "max_tokens": 1})
            assert reply.json()["usage"]["prompt_tokens"] == len(ids)
            assert "documents" in refused(client.post("/tokenize", json={**body, "documents": [1]}))


def test_reasoning_effort_reaches_the_template():
    """Beside enable_thinking, as in vLLM; what chat_template_kwargs says of the same wins."""
    template = "{{ reasoning_effort }} {{ enable_thinking }} {{ messages[0].content }}"
    with ThreadServer(kv="fp16", chat_template=template) as server:
        with httpx.Client(base_url=server.url, headers=bearer(), timeout=30) as client:
            for given, rendered in (
                ({}, "  x"),
                ({"reasoning_effort": None}, "  x"),
                ({"reasoning_effort": "high"}, "high True x"),
                ({"reasoning_effort": "none"}, "none False x"),
                ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": 0}}, "low 0 x"),
                ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": 5}}, "5 True x"),
            ):
                wanted = server.tokenizer.encode(rendered, add_special_tokens=False)
                body = {"messages": CHAT["messages"], **given}
                assert client.post("/tokenize", json=body).json()["tokens"] == wanted
                reply = client.post("/v1/chat/completions", json={**body, "max_tokens": 1})
                assert reply.json()["usage"]["prompt_tokens"] == len(wanted), given
            reply = client.post("/v1/chat/completions", json={**CHAT, "reasoning_effort": "hard"})
            assert refused(reply).startswith("reasoning_effort: expected 'none'")


def test_sglangs_name_keeps_the_stop_string(client):
    body = {"prompt": "The president of the", "max_tokens": 40, "temperature": 0}

    def text(**given):
        return client.post("/v1/completions", json={**body, **given}).json()["choices"][0]["text"]

    whole = text()
    stop = whole[8:12]
    end = whole.index(stop)
    assert text(stop=stop, no_stop_trim=None) == text(stop=stop) == whole[:end]
    assert text(stop=stop, no_stop_trim=True) == whole[: end + 4]
    assert text(stop=stop, include_stop_str_in_output=True) == whole[: end + 4]


def test_unknown_harmless_fields_are_accepted(client):
    fields = {
        "user": "u",
        "store": True,
        "metadata": {"a": 1},
        "service_tier": "auto",
        "parallel_tool_calls": True,
    }
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **fields}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    body = {"prompt": "x", "max_tokens": 2, "keep_alive": "5m", "rid": "a", "of_no_server": [1]}
    assert client.post("/v1/completions", json=body).status_code == 200


ASKED = {
    "mirostat_mode": 2, "repeat_penalty": 1.2, "dry_multiplier": 0.8,
    "xtc_probability": 0.5, "num_beams": 4, "images": ["AA=="], "samplers": ["top_k"],
    "n_predict": 4, "stop_regex": "a|b", "options": {"num_ctx": 512},
}  # fmt: skip


@pytest.mark.parametrize("route", ["completions", "chat/completions", "generate"])
def test_fields_of_other_servers_on_every_route(client, route):
    """All routes use one table: a field that asks for something is refused by name, others are not."""
    url = "/generate" if route == "generate" else f"/v1/{route}"

    def ask(**fields):
        if route == "generate":
            return client.post(url, json={"inputs": "x", "parameters": {"max_new_tokens": 2, **fields}})
        return client.post(url, json={**({"prompt": "x"} if route == "completions" else CHAT), **fields})

    for name, value in ASKED.items():
        assert refused(ask(**{name: value}), 501).startswith(f"{name}: ")
    nothing = {name: type(value)() for name, value in ASKED.items()}
    nothing |= {
        "logit_bias": [],  # as llama.cpp's clients send it
        "repeat_penalty": 1.0,
        "n_predict": None,
        "num_beams": 1,
        "mirostat_tau": 5.0,
        "dry_base": 1.75,
    }
    assert ask(**nothing).status_code == 200
    message = refused(ask(mirostat=2, repeat_penalty=1.2), 501)
    assert (
        message.startswith("mirostat: ")
        and "; repeat_penalty: its name here is repetition_penalty" in message
    )


def test_pictures_in_a_message(client):
    """Ollama's clients send pictures this way; a template would drop them silently."""
    for url in ("/v1/chat/completions", "/tokenize"):
        said = {"role": "user", "content": "x"}
        body = {"messages": [said, {**said, "images": ["AA=="]}], "max_tokens": 2}
        assert refused(client.post(url, json=body), 501).startswith(
            "messages.1.images: only text is supported"
        )
        body["messages"][1] = {**said, "images": [], "audio": None}
        assert client.post(url, json=body).status_code == 200


def test_names_of_the_other_route(client):
    """Both routes run `max_completion_tokens`; errors for others name the right route or field."""
    body = {"prompt": "x", "ignore_eos": True}
    reply = client.post("/v1/completions", json={**body, "max_completion_tokens": 3}).raise_for_status()
    assert reply.json()["usage"]["completion_tokens"] == 3
    for fields, remedy in (({"top_logprobs": 2}, "use logprobs"), ({"tools": [{}]}, "/v1/chat/completions")):
        assert remedy in refused(client.post("/v1/completions", json={**body, **fields}), 501)
    assert "max_new_tokens" in refused(
        client.post("/generate", json={"inputs": "x", "parameters": {"max_tokens": 2}}), 501
    )
    assert refused(client.post("/generate", json={"inputs": "x", "max_new_tokens": 2})) == (
        "max_new_tokens: expected in parameters, got it beside them; move it there"
    )
    assert "/generate_stream" in refused(client.post("/generate", json={"inputs": "x", "stream": True}), 501)
    cached = {"inputs": "x", "parameters": {"max_new_tokens": 2}, "options": {"use_cache": False}}
    assert client.post("/generate", json=cached).status_code == 200, "Hugging Face's, about caching"


def test_tokenize_checks_only_fields_that_change_tokens(client):
    assert "add_special_tokens" in refused(
        client.post("/tokenize", json={"content": "x", "add_special": True}), 501
    )
    assert "tools" in refused(client.post("/tokenize", json={**CHAT, "functions": [{"name": "f"}]}), 501)
    assert client.post("/tokenize", json={**CHAT, "mirostat": 2}).status_code == 200, "a whole body of a chat"


@pytest.mark.parametrize(
    "route, body, names",
    [
        (
            "/v1/completions",
            {"prompt": "x", "temperature": 0},
            "n echo stream logprobs ignore_eos min_tokens",
        ),
        ("/v1/chat/completions", {**CHAT, "temperature": 0}, "logprobs add_generation_prompt stream n"),
        ("/generate", {"inputs": "x"}, "parameters"),
        ("/generate", {"inputs": "x", "parameters": {}}, "do_sample max_new_tokens stop details ignore_eos"),
        ("/tokenize", {"prompt": "x"}, "add_special_tokens return_token_strs messages"),
        ("/tokenize", {"messages": CHAT["messages"]}, "add_generation_prompt tools return_token_strs"),
    ],
)
def test_null_is_the_default(client, route, body, names):
    """As in OpenAI's schema, and in vLLM."""
    nulls = dict.fromkeys(names.split())
    given = {**body, "parameters": nulls} if "parameters" in body else {**body, **nulls}
    replies = [client.post(route, json=sent).raise_for_status().json() for sent in (body, given)]
    for reply in replies:
        for key in ("id", "created"):
            reply.pop(key, None)
        reply.get("usage", {}).pop("prompt_tokens_details", None)
    assert replies[0] == replies[1]
    for wanted in body.keys() & {"prompt", "messages", "inputs"}:
        refused(client.post(route, json={**given, wanted: None}))


def test_document_names_nullable_fields(client):
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    for body in (CompletionRequest, ChatCompletionRequest, GenerateRequest, Parameters, Detokenize):
        schema = schemas[body.__name__]
        for key, value in schema["properties"].items():
            nullable = {"type": "null"} in value.get("anyOf", ())
            assert nullable == (key not in schema.get("required", ())), (body, key)


@pytest.mark.parametrize(
    "route, body, message",
    [
        ("completions", {"stop": ["x"] * 20}, "stop: List should have at most 16 items"),
        ("completions", {"stop": [""]}, "stop.0: String should have at least 1 character"),
        ("completions", {"stop": 5}, "stop: Input should be a valid string"),
        ("completions", {"prompt": ["x"] * 3000}, "prompt: List should have at most 2048 items"),
        ("completions", {"prompt": [1, "a"]}, "prompt.1: Input should be a valid integer"),
        ("completions", {"prompt": ["a", 1]}, "prompt.1: Input should be a valid string"),
        ("completions", {"prompt": [-1]}, "prompt.0: Input should be greater than or equal to 0"),
        ("completions", {"prompt": [[1], [2, "x"]]}, "prompt.1.1: Input should be a valid integer"),
        ("completions", {"prompt": []}, "prompt: List should have at least 1 item"),
        ("completions", {"n": 0, "prompt": []}, "n: Input should be greater than or equal to 1"),
        ("completions", [], "body: Input should be a valid dictionary"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "messages.0.role: Field required"),
        (
            "chat/completions",
            {"messages": CHAT["messages"], "tools": [{"type": "custom"}]},
            "tools.0.type: expected 'function', got 'custom'",
        ),
        ("../tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content: Input should"),
        ("../tokenize", {"messages": [{"content": "x"}]}, "messages.0.role: Field required"),
        ("../tokenize", {"messages": 5}, "messages: Input should be a valid list"),
        ("../tokenize", {"prompt": 5}, "prompt: Input should be a valid string"),
        ("../tokenize", {"prompt": "x", "add_special_tokens": 5}, "add_special_tokens: Input should be"),
        ("../tokenize", [], "body: Input should be a valid dictionary"),
        ("../generate", {"inputs": "x", "parameters": {"stop": ["x"] * 17}}, "parameters.stop: List should"),
    ],
)
def test_error_is_about_the_intended_form(client, route, body, message):
    """Its place in what the client sent, and nothing that only this server's source knows."""
    whole = {**({"prompt": "x"} if route == "completions" else {}), **body} if body else body
    reply = client.post(f"/v1/{route}", json=whole)
    assert refused(reply).startswith(message), reply.text
    assert reply.json()["error"]["param"] == message.partition(":")[0].removeprefix("body")


@pytest.mark.parametrize(
    "route, kind, body, message",
    [
        (
            "/v1/completions",
            CompletionRequest,
            lambda many: {"prompt": many},
            "prompt: List should have at most 2048",
        ),
        (
            "/v1/completions",
            CompletionRequest,
            lambda many: {"prompt": [many]},
            "prompt.0.0: Input should be a valid integer",
        ),
        (
            "/v1/completions",
            CompletionRequest,
            lambda many: {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(len(many))), "x")},
            "logit_bias: Dictionary should have at most 1024",
        ),
        (
            "/v1/chat/completions",
            ChatCompletionRequest,
            lambda many: {"messages": [{"role": "a", "tool_calls": [{}] * 129}] * (len(many) // 50)},
            "messages.0.tool_calls: List should have at most 128",
        ),
        (
            "/tokenize",
            TokenizeChat,
            lambda many: {"messages": [{}] * 4096, "tools": [{}] * 128},
            "messages.0.role: Field required",
        ),
        (
            "/v1/completions",
            CompletionRequest,
            lambda many: {"prompt": [many[:1]] * 2048},
            "prompt.0.0: Input should be a valid integer",
        ),
        (
            "/detokenize",
            Detokenize,
            lambda many: {"tokens": many},
            "tokens.0: Input should be a valid integer",
        ),
    ],
)
def test_many_wrong_values_are_a_few_errors(client, route, kind, body, message):
    """Of the millions that a body may hold an object each would stop the server for many seconds."""
    sent = json.dumps(body(["x"] * 10_000))
    reply = client.post(route, content=sent, headers={"Content-Type": "application/json"})
    assert refused(reply).startswith(message), reply.text
    with pytest.raises(ValidationError) as errors:
        kind.model_validate_json(sent)
    assert errors.value.error_count() < 10
