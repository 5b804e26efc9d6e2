"""Clients that are no dependency of the tests: run where they are installed, with whatever version is there.

`pip install litellm langchain-openai instructor guidellm lm-eval` into an environment beside this one.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest
from scripted import script
from servers import KEY, ThreadServer

from qrt.assets import model_path
from qrt_eval.cli import main

pytestmark = [pytest.mark.model, pytest.mark.slow]
CALL = '<tool_call>\n{"name": "Person", "arguments": {"name": "Ada", "age": 36}}\n</tool_call>'
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
)
PERSON = {
    "name": "Person",
    "description": "A person.",
    "parameters": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    },
}


@pytest.fixture(scope="module")
def server():
    with ThreadServer(kv="int8", chat_template=TEMPLATE, tool_call_parser="hermes") as server:
        script(server.engine, server.tokenizer, {"Who is Ada?": CALL})
        yield server


def test_litellm(server, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    given = {"api_base": f"{server.url}/v1", "api_key": KEY, "max_tokens": 8, "temperature": 0}
    messages = [{"role": "user", "content": "The first law"}]
    for provider in ("openai", "hosted_vllm"):
        whole = litellm.completion(model=f"{provider}/tiny", messages=messages, **given)
        chunks = list(litellm.completion(model=f"{provider}/tiny", messages=messages, stream=True, **given))
        rebuilt = litellm.stream_chunk_builder(chunks, messages=messages)
        assert rebuilt.choices[0].message.content == whole.choices[0].message.content != ""
        assert whole.usage.completion_tokens == 8 and whole.choices[0].finish_reason == "length"
    text = litellm.text_completion(model="text-completion-openai/tiny", prompt="The first law", **given)
    assert text.choices[0].text
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(model="openai/tiny", messages=messages, **{**given, "api_key": "wrong"})
    tools = [{"type": "function", "function": PERSON}]
    asked = [{"role": "user", "content": "Who is Ada?"}]
    called = litellm.completion(
        model="openai/tiny", messages=asked, tools=tools, **{**given, "max_tokens": 200}
    )
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == "Person" and json.loads(call.function.arguments)["age"] == 36


def test_langchain(server):
    openai = pytest.importorskip("langchain_openai")
    chat = openai.ChatOpenAI(model="tiny", base_url=f"{server.url}/v1", api_key=KEY, max_tokens=8)
    chat.temperature = 0
    whole = chat.invoke("The first law")
    parts = list(chat.stream("The first law", stream_usage=True))
    assert "".join(part.content for part in parts) == whole.content != ""
    assert whole.usage_metadata["output_tokens"] == 8
    assert sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata) == 8
    chat.max_tokens = 200
    bound = chat.bind_tools([PERSON])
    message = sum(list(bound.stream("Who is Ada?"))[1:], start=next(iter(bound.stream("Who is Ada?"))))
    assert [(c["name"], c["args"]) for c in bound.invoke("Who is Ada?").tool_calls] == [
        ("Person", {"name": "Ada", "age": 36})
    ]
    assert message.tool_calls[0]["name"] == "Person", "a name is said once, or the merge would repeat it"
    assert message.tool_calls[0]["args"] == {"name": "Ada", "age": 36}


def test_instructor(server):
    instructor = pytest.importorskip("instructor")
    from openai import OpenAI, UnprocessableEntityError  # noqa: F401
    from pydantic import BaseModel

    class Person(BaseModel):
        """A person."""

        name: str
        age: int

    client = OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    asked = [{"role": "user", "content": "Who is Ada?"}]
    script(server.engine, server.tokenizer, {"Ada in a shape": '{"name": "Ada", "age": 36}'})
    for mode, asking in (
        (instructor.Mode.TOOLS, asked),
        (instructor.Mode.JSON_SCHEMA, [{"role": "user", "content": "Ada in a shape"}]),
    ):
        shaped = instructor.from_openai(client, mode=mode)
        person = shaped.chat.completions.create(
            model="tiny", messages=asking, response_model=Person, max_tokens=200, max_retries=1
        )
        assert (person.name, person.age) == ("Ada", 36)
    script(server.engine, server.tokenizer, {"Ada as JSON": '```json\n{"name": "Ada", "age": 36}\n```'})
    loose = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
    person = loose.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Ada as JSON"}],
        response_model=Person,
        max_tokens=200,
        max_retries=1,
    )
    assert (person.name, person.age) == ("Ada", 36)


def test_lm_eval_over_http_equals_qrt_eval_ppl(tmp_path):
    """`local-completions` on a local text, and the `lmeval` protocol with windows of the same size."""
    for package in ("lm_eval", "tenacity"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"pip install 'lm-eval[api]' ({package})")
    from pydoc_data.topics import topics

    text = topics["assignment"][:3000]
    (tmp_path / "page.txt").write_text(text)
    (tmp_path / "pages.json").write_text(json.dumps({"page": text}))
    (tmp_path / "task.yaml").write_text(
        "task: local_text\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/pages.json}}}}\n"
        'test_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{page}}"\n'
        "metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]\n"
    )
    with ThreadServer(kv="fp16", engine={"dtype": "float32"}, api_keys=()) as server:
        arguments = (
            f"model=tiny,base_url={server.url}/v1/completions,tokenizer_backend=huggingface,"
            f"tokenizer={model_path('tiny')},max_length=128,num_concurrent=4,add_bos_token=True"
        )
        command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
        command += ["--tasks", "local_text", "--include_path", str(tmp_path)]
        command += ["--output_path", str(tmp_path / "out")]
        environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = (tmp_path / "out").rglob("results*.json")
    theirs = json.loads(result.read_text())["results"]["local_text"]
    out = tmp_path / "ppl.json"
    seqlen = 126  # lm-eval's models behind an API take one token off max_length twice
    words = f"ppl {tmp_path / 'page.txt'} --model tiny --protocol lmeval --seqlen {seqlen} --json {out}"
    assert main(words.split()) == 0
    ours = json.loads(out.read_text())
    assert ours["bits_per_byte"] == pytest.approx(theirs["bits_per_byte,none"], rel=1e-4)
    assert math.log(ours["word_perplexity"]) == pytest.approx(
        math.log(theirs["word_perplexity,none"]), rel=1e-4
    )


def test_guidellm(server, tmp_path):
    if importlib.util.find_spec("guidellm") is None:
        pytest.skip("pip install guidellm")
    wanted = {
        "backend": f"kind=openai_http,target={server.url},api_key={KEY}",
        "profile": "kind=concurrent,streams=4",
        "constraint": "kind=max_requests,count=12",
        "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "tokenizer": f"kind=huggingface_auto,model={model_path('tiny')}",
        "output": f"kind=json,path={tmp_path}/benchmarks.json",
    }
    command = [sys.executable, "-m", "guidellm", "run", "--disable-console-interactive"]
    command += [word for flag, value in wanted.items() for word in (f"--{flag}", value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    (benchmark,) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"]["successful"] == 12
