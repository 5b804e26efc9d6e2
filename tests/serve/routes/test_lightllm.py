"""LightLLM's dialect and its TGI flavour, against the OpenAI endpoint of the same server."""

import json
import shutil
from types import SimpleNamespace

import httpx
import pytest
from servers import ThreadServer, bearer, refused

from qrt.answers.processor import OutputProcessor
from qrt.engine.schedule.output import StepDelta
from qrt.engine.schedule.request import FinishReason
from qrt.request.sampling import SamplingParams
from qrt.serve.routes.lightllm import GenerateRequest, LightllmShape, Parameters
from qrt.text.tokenizer import Tokenizer
from tiny_models import SIX_LAYERS

pytestmark = pytest.mark.model
PROMPT = "The president of the"


def serve(**settings):
    with ThreadServer(kv="fp16", **settings) as server:
        with httpx.Client(base_url=server.url, headers=bearer(), timeout=60) as client:
            yield client


@pytest.fixture(scope="module")
def lightllm():
    yield from serve()


@pytest.fixture(scope="module")
def tgi():
    yield from serve(use_tgi_api=True)


def events(reply):
    assert reply.headers["content-type"].startswith("text/event-stream")
    return [json.loads(part.removeprefix("data:")) for part in reply.text.split("\n\n") if part]


def openai_text(client, **body):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **body}
    return client.post("/v1/completions", json=body).json()["choices"][0]["text"]


def generate(client, route="/generate", **parameters):
    reply = client.post(route, json={"inputs": PROMPT, "parameters": {"max_new_tokens": 12, **parameters}})
    assert reply.status_code == 200, reply.text
    return reply


def test_generate(lightllm):
    """Greedy unless do_sample, as there; one completion gives values, several give lists."""
    body = generate(lightllm, return_details=True).json()
    assert body["generated_text"] == [openai_text(lightllm)]
    assert (body["count_output_tokens"], body["finish_reason"], body["prompt_tokens"]) == (12, "length", 6)
    assert "".join(token["text"] for token in body["tokens"]) == body["generated_text"][0]
    assert all(token["logprob"] < 0 and not token["special"] for token in body["tokens"])
    body = generate(lightllm, do_sample=True, temperature=1.0, seed=3, best_of=3).json()
    assert (
        len(body["generated_text"]) == 3 == len(body["finish_reason"])
        and body["count_output_tokens"] == [12] * 3
    )
    assert len(set(body["generated_text"])) > 1


def test_stops_and_penalties_match_the_openai_route(lightllm):
    text = openai_text(lightllm)
    stop = text[6:9]
    body = generate(lightllm, stop_sequences=[stop]).json()
    assert body["generated_text"] == [text[: text.index(stop)]] and body["finish_reason"] == "stop"
    penalised = {"repetition_penalty": 1.5, "frequency_penalty": 0.5}
    assert generate(lightllm, **penalised).json()["generated_text"] == [openai_text(lightllm, **penalised)]


def test_a_prompt_may_have_its_bos(lightllm):
    bos = lightllm.post("/detokenize", json={"tokens": Tokenizer("tiny").encode("")}).json()["prompt"]
    assert bos
    lengths = [
        lightllm.post("/generate", json={"inputs": bos + PROMPT, "parameters": given}).json()["prompt_tokens"]
        for given in ({"return_details": True}, {"return_details": True, "add_special_tokens": False})
    ]
    assert lengths == [7, 6]


def test_min_p_leaves_out_unlikely_tokens(lightllm):
    drawn = {"do_sample": True, "seed": 1, "temperature": 2.0}
    assert generate(lightllm, **drawn).json()["generated_text"] != [openai_text(lightllm)]
    assert generate(lightllm, **drawn, min_p=1.0).json()["generated_text"] == [openai_text(lightllm)]


def test_tokens_that_are_wanted_and_not(lightllm):
    tokens = [token["id"] for token in generate(lightllm, return_details=True).json()["tokens"]]
    biased = generate(lightllm, logit_bias={str(tokens[3]): 100}, return_details=True).json()["tokens"]
    assert [token["id"] for token in biased] == [tokens[3]] * 12
    for ids in (tokens[:1], tokens):
        other = generate(lightllm, invalid_token_ids=ids, return_details=True).json()["tokens"]
        assert not {token["id"] for token in other} & set(ids)


def test_generate_stream(lightllm):
    got = events(generate(lightllm, "/generate_stream"))
    assert "".join(event["token"]["text"] for event in got) == openai_text(lightllm)
    assert [event["token"]["count_output_tokens"] for event in got] == list(range(1, 13))
    assert [event["finished"] for event in got] == [False] * 11 + [True]
    assert got[-1]["finish_reason"] == "length" and all(event["generated_text"] is None for event in got)


def test_each_token_is_its_own_event():
    tokenizer = Tokenizer("tiny")
    prompt, *ids = tokenizer.encode("The president of the country", add_special_tokens=False)
    collector = OutputProcessor("r", None, [prompt], SamplingParams(max_tokens=len(ids)), tokenizer)
    shape = LightllmShape(
        SimpleNamespace(tokenizer=tokenizer),
        GenerateRequest(inputs="The", parameters=Parameters()),
        collector,
    )
    parts = [StepDelta("r#0", tuple(ids[:3])), StepDelta("r#0", tuple(ids[3:]), FinishReason.LENGTH)]
    got = [event for part in parts for event in shape.events(0, collector.process(part))]
    got = [json.loads(event.removeprefix(b"data:")) for event in got]
    assert [event["token"]["id"] for event in got] == ids
    assert [event["token"]["count_output_tokens"] for event in got] == list(range(1, len(ids) + 1))
    assert "".join(event["token"]["text"] for event in got) == tokenizer.decode(ids)
    assert [event["finished"] for event in got] == [False] * (len(ids) - 1) + [True]


def test_tgi(tgi):
    body = generate(tgi, details=True, seed=7).json()
    assert body["generated_text"] == openai_text(tgi)
    details = body["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 12, 7)
    assert [set(token) for token in details["tokens"]] == [{"id", "text", "logprob", "special"}] * 12
    assert generate(tgi, return_full_text=True).json()["generated_text"] == PROMPT + openai_text(tgi)
    got = events(generate(tgi, "/generate_stream"))
    assert got[-1]["generated_text"] == openai_text(tgi) and got[-1]["details"]["finish_reason"] == "length"


def test_clients_of_tgi_ask_at_the_root(lightllm, tgi):
    """huggingface_hub's and TGI's own: a list of one, or with `stream` what /generate_stream sends."""
    generate(tgi)  # a prompt in the prefix cache has other last digits
    (body,) = generate(tgi, "/", details=True).json()
    assert body == generate(tgi, details=True).json()
    asked = {"inputs": PROMPT, "parameters": {"max_new_tokens": 12}, "stream": True}
    got, wanted = events(tgi.post("/", json=asked)), events(generate(tgi, "/generate_stream"))
    assert got[-1]["generated_text"] == wanted[-1]["generated_text"] == body["generated_text"]
    assert [set(event) for event in got] == [set(event) for event in wanted]
    refused(tgi.post("/", json=asked, headers={"Authorization": ""}), 401)
    assert tgi.get("/").headers["content-type"].startswith("text/html"), "the page is there too"
    refused(lightllm.post("/", json=asked), 405)


@pytest.mark.parametrize(
    "parameters, drawn",
    [
        ({"temperature": 1.5}, True),
        ({"top_k": 50}, True),
        ({"top_p": 0.99}, True),
        ({"temperature": 1.0}, False),
    ],
)
def test_sampling_settings_turn_on_sampling_in_tgi(lightllm, tgi, parameters, drawn):
    """In LightLLM only do_sample does."""
    greedy = openai_text(tgi)
    texts = {generate(tgi, **parameters, seed=seed).json()["generated_text"] for seed in range(4)}
    assert len(texts) > 1 if drawn else texts == {greedy}
    assert generate(lightllm, **parameters, seed=1).json()["generated_text"] == [greedy]


@pytest.mark.parametrize(
    "parameters, code",
    [
        ({"max_new_tokens": 0}, 400),
        ({"temperature": -1}, 400),
        ({"best_of": 1000}, 400),
        ({"guided_json": "{"}, 400),
        ({"regular_constraint": "a+", "guided_json": "{}"}, 400),
        ({"grammar": {"type": "rust", "value": "a+"}}, 400),
        ({"watermark": True}, 501),
        ({"logit_bias": {"x": 1}}, 400),
        ({"invalid_token_ids": [10**6]}, 400),
        ({"input_penalty": 5}, 400),
    ],
)
def test_refusals(lightllm, parameters, code):
    reply = lightllm.post("/generate", json={"inputs": "x", "parameters": parameters})
    assert reply.status_code == code and reply.json()["error"]["code"] == code
    reply = lightllm.post("/generate_stream", json={"inputs": "x", "parameters": {"best_of": 2}})
    assert reply.status_code == 400


@pytest.mark.parametrize("given", [{"images": [{"type": "url", "data": "x"}]}, {"audios": ["x"]}, {"x": 1}])
def test_more_than_text_is_refused(lightllm, given):
    for route in ("/generate", "/generate_stream"):
        assert "multimodal_params" in refused(
            lightllm.post(route, json={"inputs": "x", "multimodal_params": given}), 501
        )
    assert "multimodal_params" in refused(
        lightllm.post("/generate", json={"inputs": "x", "multimodal_params": [5]})
    )
    for nothing in (None, {}, {"images": [], "audios": None}):
        reply = lightllm.post("/generate", json={"inputs": "x", "multimodal_params": nothing})
        assert reply.status_code == 200


def test_input_penalty_is_refused(lightllm):
    """Repetition counts the prompt, the others do not; asking for what is done is fine."""
    for counted, penalty in (
        (False, {"repetition_penalty": 1.2}),
        (True, {"presence_penalty": 0.5}),
        (True, {"frequency_penalty": 0.5}),
    ):
        (name,) = penalty
        body = {"inputs": PROMPT, "parameters": {"input_penalty": counted, **penalty}}
        message = refused(lightllm.post("/generate", json=body), 501)
        got, other = str(counted).lower(), str(not counted).lower()
        assert message.startswith(f"input_penalty: expected {other} with {name}") and f"got {got};" in message
        text = generate(lightllm, **penalty).json()["generated_text"]
        assert generate(lightllm, input_penalty=not counted, **penalty).json()["generated_text"] == text
    for counted in (True, False):
        assert generate(lightllm, input_penalty=counted, presence_penalty=0, repetition_penalty=1)


@pytest.mark.parametrize("use_tgi_api", [False, True])
def test_missing_fields_come_from_the_checkpoint(tmp_path, use_tgi_api):
    """As at the OpenAI endpoints, but for do_sample; TGI has defaults of its own. The cap is everybody's."""
    folder = shutil.copytree(SIX_LAYERS, tmp_path / "model")  # they repeat themselves
    recommended = {"temperature": 1.9, "top_k": 1, "repetition_penalty": 1.8, "max_new_tokens": 9}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    for config in ("auto", "vllm"):
        engine = {"model": str(folder), "generation_config": config}
        for client in serve(engine=engine, use_tgi_api=use_tgi_api):

            def text(client=client, **given):
                whole = generate(client, ignore_eos=True, **given).json()["generated_text"]
                return whole if isinstance(whole, str) else whole[0]

            neutral = {"repetition_penalty": 1.0, "max_tokens": 9 if config == "auto" else 12}
            greedy = openai_text(client, ignore_eos=True, **neutral)
            penalised = openai_text(client, ignore_eos=True, **{**neutral, "repetition_penalty": 1.8})
            assert greedy != penalised
            plain = use_tgi_api or config == "vllm"
            assert text() == (greedy if plain else penalised)
            assert text(repetition_penalty=1.0) == greedy
            drawn = text(do_sample=True, seed=1, temperature=1.9, repetition_penalty=1.0)
            assert drawn != greedy if plain else drawn == greedy, "top_k"


def test_loads(lightllm):
    load = lightllm.get("/token_load").json()
    assert set(load) == {"current_load", "logical_max_load", "dynamic_max_load"} and load["current_load"] == 0
