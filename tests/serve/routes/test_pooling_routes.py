"""The routes of models that pool: an embedding model, a reranker, and a model that generates."""

import asyncio
import base64
import json
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
from servers import ThreadServer, bearer, refused, wait_idle
from tokenizers import Tokenizer, processors

from qrt import LLM, AsyncLLM, PoolingParams
from qrt.errors import ConfigError
from qrt.text.chat_template import ChatTemplate
from small_tokenizers import byte_level, save
from tiny_models import random_checkpoint

POOL = 1 << 24
TEXTS = ["The quick brown fox", "jumps over the lazy dog.", "Language models predict the next token"]
END = "</s>"  # this tokenizer ends each text with it, as Qwen3-Embedding's does with <|endoftext|>
RERANK = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}answer:"


def with_tokenizer(folder):
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    return save(tokenizer, folder)


@pytest.fixture(scope="module")
def body(tmp_path_factory):
    folder = random_checkpoint(tmp_path_factory.mktemp("body"), "Qwen3Model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_matryoshka": True}))
    return with_tokenizer(folder)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    folder = random_checkpoint(tmp_path_factory.mktemp("rank"), "Qwen3ForCausalLM", tie_word_embeddings=True)
    return with_tokenizer(folder)


@pytest.fixture(scope="module")
def embedder(body):
    with ThreadServer(kv="auto", engine={"model": str(body), "kv_cache_memory_bytes": POOL}) as running:
        yield running
        wait_idle(running)


@pytest.fixture(scope="module")
def ranks(reranker):
    overrides = {"classifier_from_token": ["n", "y"], "is_original_qwen3_reranker": True}
    engine = {"model": str(reranker), "kv_cache_memory_bytes": POOL, "hf_overrides": overrides}
    with ThreadServer(kv="auto", engine={**engine, "convert": "classify"}) as running:
        yield running


@pytest.fixture(scope="module")
def expected(body):
    """Unit vectors of TEXTS by transformers."""
    model = transformers.AutoModel.from_pretrained(body, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(body / "tokenizer.json"))
    with torch.inference_mode():
        rows = [model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0, -1] for text in TEXTS]
    assert tokenizer.encode(TEXTS[0]).ids[-1] == 1
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1).numpy()


def post(server, path, code=200, **fields):
    reply = httpx.post(f"{server.url}{path}", json=fields, headers=bearer(), timeout=60)
    if code != 200:
        return refused(reply, code)
    assert reply.status_code == 200, reply.text
    return reply.json()


def vectors(reply):
    assert [one["index"] for one in reply["data"]] == list(range(len(reply["data"])))
    return np.array([one["embedding"] for one in reply["data"]])


def test_embeddings_of_each_form_of_input(embedder, expected):
    reply = post(embedder, "/v1/embeddings", model="tiny", input=TEXTS, user="someone")
    assert reply["object"] == "list" and reply["data"][0]["object"] == "embedding"
    np.testing.assert_allclose(vectors(reply), expected, atol=1e-5)
    tokens = [embedder.tokenizer.encode(text) for text in TEXTS]
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == sum(map(len, tokens))
    for given in (TEXTS[0], tokens[0], tokens[:1]):
        np.testing.assert_allclose(
            vectors(post(embedder, "/v1/embeddings", input=given)), expected[:1], atol=1e-5
        )
    plain = post(embedder, "/v1/embeddings", input=TEXTS[0], add_special_tokens=False)
    assert plain["usage"]["prompt_tokens"] == len(tokens[0]) - 1
    chat = post(embedder, "/v1/embeddings", messages=[{"role": "user", "content": TEXTS[0]}])
    rendered = embedder.tokenizer.encode(f"<|user|>{TEXTS[0]}", False)
    np.testing.assert_allclose(
        vectors(chat), vectors(post(embedder, "/v1/embeddings", input=rendered)), atol=1e-5
    )


def test_base64_is_the_same_numbers(embedder):
    plain = vectors(post(embedder, "/v1/embeddings", input=TEXTS))
    coded = post(embedder, "/v1/embeddings", input=TEXTS, encoding_format="base64")["data"]
    read = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in coded]
    np.testing.assert_array_equal(np.array(read), plain.astype(np.float32))


def test_openais_client(embedder, expected):
    client = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key=bearer()["Authorization"].split()[1])
    reply = client.embeddings.create(model="tiny", input=TEXTS)  # it asks for base64 by itself
    np.testing.assert_allclose([one.embedding for one in reply.data], expected, atol=1e-5)
    short = client.embeddings.create(model="tiny", input=TEXTS, dimensions=16, encoding_format="float")
    cut = expected[:, :16] / np.linalg.norm(expected[:, :16], axis=1, keepdims=True)
    np.testing.assert_allclose([one.embedding for one in short.data], cut, atol=1e-5)


def test_long_inputs_are_cut_when_asked(embedder):
    long = " ".join(TEXTS * 100)
    assert "512 tokens" in post(embedder, "/v1/embeddings", 400, input=long)
    reply = post(embedder, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    assert reply["usage"]["prompt_tokens"] == 512
    ids = embedder.tokenizer.encode(long)
    for side, kept in (("right", ids[:7]), ("left", ids[-8:-1])):
        cut = post(embedder, "/v1/embeddings", input=long, truncate_prompt_tokens=8, truncation_side=side)
        same = post(embedder, "/v1/embeddings", input=[*kept, 1])
        np.testing.assert_allclose(vectors(cut), vectors(same), atol=1e-5)


def test_scores_and_ranks_of_an_embedder(embedder, expected):
    reply = post(embedder, "/v1/score", text_1=TEXTS[0], text_2=TEXTS[1:])
    cosines = expected[1:] @ expected[0]
    np.testing.assert_allclose([one["score"] for one in reply["data"]], cosines, atol=1e-5)
    ranked = post(embedder, "/v2/rerank", query=TEXTS[0], documents=TEXTS[1:])["results"]
    assert [one["index"] for one in ranked] == np.argsort(-cosines).tolist()


@pytest.mark.parametrize(
    "fields, words",
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [5000]}, "token ids of 0 to 511"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 4096}, "dimensions: expected at most 128"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens: expected at most 512"),
        ({"input": "a", "truncation_side": "middle"}, "truncation_side"),
        ({"input": "a", "priority": 3}, "priority: expected 0"),
    ],
)
def test_wrong_bodies_name_their_field(embedder, fields, words):
    assert words in post(embedder, "/v1/embeddings", 400, **fields)


def test_what_the_model_does_not_do(embedder, ranks):
    assert "expected 'embed'" in post(embedder, "/classify", 400, input="a")
    assert "expected 'classify'" in post(ranks, "/v1/embeddings", 400, input="a")
    assert "got one to generate" in post(embedder, "/v1/completions", 400, prompt="a", max_tokens=2)
    assert "rank_fields" in post(ranks, "/v1/rerank", 501, query="a", documents=["b"], rank_fields=["c"])
    for path in ("/v1/models", "/health", "/health_generate", "/metrics"):
        assert httpx.get(f"{embedder.url}{path}", headers=bearer()).status_code == 200


def test_a_model_that_generates_says_how_to_pool(server):
    for path, fields in (
        ("/v1/embeddings", {"input": "a"}),
        ("/pooling", {"input": "a"}),
        ("/classify", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ):
        assert "--runner pooling" in post(server, path, 400, **fields)


def test_a_rerankers_scores(ranks, reranker):
    """Both texts joined as the tokenizer joins them; the score is p(yes) among two tokens' logits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(reranker, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(reranker / "tokenizer.json"))
    no, yes = tokenizer.token_to_id("n"), tokenizer.token_to_id("y")
    query, documents = "which animal?", [*TEXTS, ""]
    truth = []
    for document in documents:
        ids = tokenizer.encode(query, document).ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1, [no, yes]]
        truth.append(float(logits.softmax(-1)[1]))
    reply = post(ranks, "/score", queries=query, documents=documents)
    np.testing.assert_allclose([one["score"] for one in reply["data"]], truth, atol=1e-5)
    reply = post(ranks, "/rerank", query=query, documents=[{"text": one} for one in documents], top_n=2)
    best = np.argsort(-np.array(truth))[:2].tolist()
    assert [one["index"] for one in reply["results"]] == best
    assert reply["results"][0]["document"] == {"text": documents[best[0]]}
    np.testing.assert_allclose(reply["results"][0]["relevance_score"], truth[best[0]], atol=1e-5)
    bare = post(ranks, "/v1/rerank", query=query, documents=documents, return_documents=False)
    assert len(bare["results"]) == 4 and "document" not in bare["results"][0]
    classified = post(ranks, "/classify", input=[tokenizer.encode(query, TEXTS[0]).ids])["data"][0]
    assert classified["num_classes"] == 1 and classified["label"] == "LABEL_0"
    np.testing.assert_allclose(classified["probs"], truth[:1], atol=1e-5)
    raw = post(ranks, "/classify", input=[tokenizer.encode(query, TEXTS[0]).ids], use_activation=False)
    np.testing.assert_allclose(1 / (1 + np.exp(-raw["data"][0]["probs"][0])), truth[0], atol=1e-5)
    assert "one text, or as many" in post(ranks, "/v1/score", 400, text_1=["a", "b"], text_2=["a"] * 3)


def test_pooling_route_gives_all_tokens_when_asked(embedder):
    one = post(embedder, "/pooling", input=TEXTS[0])["data"][0]
    assert one["object"] == "pooling" and len(one["data"]) == 128
    each = post(embedder, "/pooling", input=TEXTS[0], task="token_embed")["data"][0]["data"]
    assert len(each) == len(embedder.tokenizer.encode(TEXTS[0]))
    np.testing.assert_allclose(each[-1], one["data"], atol=1e-5)


def test_python_calls(body, expected):
    llm = LLM(str(body), kv_cache_memory_bytes=POOL)
    found = llm.embed(TEXTS, use_tqdm=False)
    np.testing.assert_allclose([one.outputs.embedding for one in found], expected, atol=1e-5)
    assert found[0].prompt_token_ids[-1] == 1 and found[0].outputs.hidden_size == 128
    (pair,) = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
    assert pair.outputs.score == pytest.approx(float(expected[0] @ expected[1]), abs=1e-5)
    each = llm.encode(TEXTS[0], pooling_task="token_embed", use_tqdm=False)[0].outputs.data
    assert each.shape == (len(found[0].prompt_token_ids), 128)
    np.testing.assert_allclose(llm.encode(TEXTS[0], use_tqdm=False)[0].outputs.data, expected[0], atol=1e-5)


def test_asynchronous_calls(body, expected):
    async def run():
        llm = AsyncLLM(str(body), kv_cache_memory_bytes=POOL)
        try:
            found = await asyncio.gather(*(_listed(llm.encode(text)) for text in TEXTS))
            with pytest.raises(ConfigError, match="got 'classify'"):
                await _listed(llm.encode("a", PoolingParams(task="classify")))
        finally:
            await llm.shutdown()
        return found

    found = asyncio.run(run())
    assert [len(outputs) for outputs in found] == [1, 1, 1]
    np.testing.assert_allclose([one.outputs.data for (one,) in found], expected, atol=1e-5)


async def _listed(outputs):
    return [one async for one in outputs]


def test_the_example_template_writes_qwens_prompt():
    """The prompt that Qwen publishes for its rerankers, word for word."""
    text = (Path(__file__).parents[3] / "examples/qwen3_reranker.jinja").read_text()
    chat = [{"role": "query", "content": "Who?"}, {"role": "document", "content": "It was me."}]
    instruct = "Given a web search query, retrieve relevant passages that answer the query"
    assert ChatTemplate(text, {}).render(chat) == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"<Instruct>: {instruct}\n<Query>: Who?\n<Document>: It was me.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_python_calls_of_a_reranker(reranker):
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    llm = LLM(str(reranker), runner="pooling", hf_overrides=overrides, kv_cache_memory_bytes=POOL)
    (scored,) = llm.score("a query", "a document", chat_template=RERANK, use_tqdm=False)
    text = "query: a query\ndocument: a document\nanswer:"
    assert scored.prompt_token_ids == llm.tokenizer.encode(text)
    (same,) = llm.classify(text, use_tqdm=False)
    assert same.outputs.probs == pytest.approx([scored.outputs.score]) and same.outputs.num_classes == 1
    (rewards,) = llm.reward(text, use_tqdm=False)
    assert rewards.outputs.data.shape == (len(scored.prompt_token_ids), 1)
    assert rewards.outputs.data[-1].item() == pytest.approx(scored.outputs.score, abs=1e-6)


def test_as_many_inputs_as_openai_takes(embedder):
    reply = post(embedder, "/v1/embeddings", input=[[5 + place % 7] for place in range(2048)])
    assert [one["index"] for one in reply["data"]] == list(range(2048))
    np.testing.assert_allclose(vectors(reply)[7:14], vectors(reply)[:7], atol=1e-5)


def test_any_model_may_be_asked_for_its_own_length(tmp_path):
    """Clients always send `dimensions`; only a shorter length needs a model that was trained for it."""
    folder = with_tokenizer(random_checkpoint(tmp_path, "Qwen3Model"))
    llm = LLM(str(folder), device="cpu", kv_cache_memory_bytes=POOL)
    (plain,) = llm.embed("Hello", use_tqdm=False)
    (own,) = llm.embed("Hello", pooling_params=PoolingParams(dimensions=128), use_tqdm=False)
    np.testing.assert_allclose(own.outputs.embedding, plain.outputs.embedding, atol=1e-6)
    (array,) = llm.embed({"prompt_token_ids": np.array(plain.prompt_token_ids)}, use_tqdm=False)
    np.testing.assert_allclose(array.outputs.embedding, plain.outputs.embedding, atol=1e-6)
    for other in (64, 256):
        with pytest.raises(ConfigError, match="dimensions: expected none, as config.json has no"):
            llm.embed("Hello", pooling_params=PoolingParams(dimensions=other), use_tqdm=False)
