"""Vectors of the engine against transformers in fp32: last token, mean, every token, heads of labels."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from qrt import EngineConfig, SamplingParams
from qrt.engine.engine import Engine
from qrt.errors import ConfigError, QrtError
from small_tokenizers import byte_level, save
from tiny_models import altered, random_checkpoint

POOL = 1 << 22
LENGTHS = (1, 7, 40, 90)
REDUCED = {"last": lambda h: h[-1:], "mean": lambda h: h.mean(0, keepdim=True), "all": lambda h: h}


def prompts(count=1, lengths=LENGTHS):
    random = torch.Generator().manual_seed(1)
    return [torch.randint(3, 400, (n,), generator=random).tolist() for _ in range(count) for n in lengths]


def pooled(engine, given, kind="last"):
    """Return the vectors [n, D] of each prompt, all in the engine at once, and the tokens found cached."""
    for index, ids in enumerate(given):
        engine.add(str(index), ids, SamplingParams(), pool=kind)
    parts, cached = {str(i): [] for i in range(len(given))}, {}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None and not delta.token_ids
            parts[delta.request_id] += [] if delta.pooled is None else [torch.from_numpy(delta.pooled)]
            cached[delta.request_id] = delta.num_cached
    engine.scheduler.kv.check()
    return [torch.cat(own) for own in parts.values()], list(cached.values())


def assert_alike(got, expected, least=0.9999):
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape and one.dtype is torch.float32
        assert torch.cosine_similarity(one, other).min() >= least


@pytest.fixture(scope="module")
def body(tmp_path_factory):
    """A Qwen3Model without a head and without the prefix of names."""
    folder = random_checkpoint(tmp_path_factory.mktemp("body"), "Qwen3Model")
    assert "embed_tokens.weight" in load_file(folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def truth(body):
    model = transformers.AutoModel.from_pretrained(body, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts()]


@pytest.mark.parametrize("kind", REDUCED)
def test_hidden_states_of_a_body_alone(body, truth, kind):
    expected = [REDUCED[kind](hidden) for hidden in truth]
    for settings in ({}, {"max_num_batched_tokens": 16}, {"overlap": True}):
        engine = Engine(EngineConfig(str(body), kv_cache_memory_bytes=POOL, **settings))
        assert engine.pooling.task == "embed"
        for turn in range(2):  # the second time with prefixes in the cache
            got, cached = pooled(engine, prompts(), kind)
            assert_alike(got, expected)
            assert any(cached) == (turn > 0 and kind == "last")


def test_one_prefix_of_many_is_computed_once(body):
    """As a reranker's: the same instruction and query before each document."""
    shared = prompts(lengths=(64,))[0]
    given = [shared + own for own in prompts(4, lengths=(9, 20))]
    engine = Engine(EngineConfig(str(body), kv_cache_memory_bytes=POOL, max_num_batched_tokens=128))
    together, cached = pooled(engine, given)
    assert sorted(cached)[1:] == [64] * 7
    alone = [
        pooled(Engine(EngineConfig(str(body), kv_cache_memory_bytes=POOL)), [ids])[0][0] for ids in given
    ]
    assert_alike(together, alone)


def test_quantized_kv_changes_a_vector_little(body, truth):
    engine = Engine(EngineConfig(str(body), kv="int8", kv_cache_memory_bytes=POOL, max_num_batched_tokens=16))
    assert_alike(pooled(engine, prompts())[0], [hidden[-1:] for hidden in truth], 0.999)


def test_an_aborted_mean_leaves_nothing_behind(body, truth):
    config = EngineConfig(str(body), kv_cache_memory_bytes=POOL, max_num_batched_tokens=16, max_num_seqs=1)
    engine, given = Engine(config), prompts()
    engine.add("gone", given[3], SamplingParams(), pool="mean")
    engine.step()
    engine.abort("gone")
    assert_alike(pooled(engine, given, "mean")[0], [hidden.mean(0, keepdim=True) for hidden in truth])


@pytest.mark.parametrize("architecture", ["Qwen3ForSequenceClassification", "LlamaForSequenceClassification"])
def test_a_head_of_labels(architecture, tmp_path):
    folder = random_checkpoint(tmp_path, architecture, num_labels=3, pad_token_id=0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    engine = Engine(EngineConfig(str(folder), kv_cache_memory_bytes=POOL))
    assert engine.pooling.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    got, _ = pooled(engine, prompts())
    with torch.inference_mode():
        expected = [model(torch.tensor([ids])).logits for ids in prompts()]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_reward_head_of_two_layers(body, truth, tmp_path):
    def with_head(tensors):
        tensors |= {"score.0.weight": torch.randn(128, 128) / 11, "score.0.bias": torch.randn(128)}
        tensors |= {"score.2.weight": torch.randn(1, 128), "score.2.bias": torch.randn(1)}

    folder = altered(body, tmp_path / "reward", with_head)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": ["Qwen3ForRewardModel"], "num_labels": 1})
    )
    engine = Engine(EngineConfig(str(folder), kv_cache_memory_bytes=POOL))
    assert engine.pooling.kind == "all"
    head = load_file(folder / "model.safetensors")
    for got, hidden in zip(pooled(engine, prompts(), "all")[0], truth, strict=True):
        inner = (hidden @ head["score.0.weight"].T + head["score.0.bias"]).relu()
        expected = inner @ head["score.2.weight"].T + head["score.2.bias"]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_from_two_tokens(tied, tmp_path):
    """As Qwen3-Reranker: the sigmoid of the one number is p(yes) among the logits of two tokens."""
    folder = random_checkpoint(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=tied)
    save(byte_level(), folder)
    vocabulary = transformers.AutoTokenizer.from_pretrained(folder).get_vocab()
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    engine = Engine(EngineConfig(str(folder), kv_cache_memory_bytes=POOL, hf_overrides=overrides))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert engine.pooling.pairs and engine.pooling.activation == "sigmoid"
    for got, ids in zip(pooled(engine, prompts())[0], prompts(), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1, [vocabulary["n"], vocabulary["y"]]]
        torch.testing.assert_close(got.sigmoid(), logits.softmax(-1)[None, 1:], rtol=1e-4, atol=1e-5)


def test_each_job_refuses_the_other(body):
    engine = Engine(EngineConfig(str(body), kv_cache_memory_bytes=POOL))
    with pytest.raises(ConfigError, match="got one to generate"):
        engine.add("a", [1, 2], SamplingParams())
    generates = Engine(EngineConfig("tiny", kv_cache_memory_bytes=4 * POOL))
    with pytest.raises(ConfigError, match="--runner pooling"):
        generates.add("a", [1, 2], SamplingParams(), pool="last")
    with pytest.raises(ConfigError, match="at most 512 tokens"):
        engine.add("a", [1] * 513, SamplingParams(), pool="last")
    assert len(pooled(engine, [[1] * 512])[0]) == 1  # the whole context, without room for an output


def test_a_missing_or_wrong_head_is_named(body, tmp_path):
    with pytest.raises(QrtError, match=r"score\.weight.*classifier_from_token"):
        Engine(EngineConfig(str(body), kv_cache_memory_bytes=POOL, convert="classify"))
    folder = altered(body, tmp_path / "wrong", lambda t: t.update({"score.weight": torch.randn(5, 128)}))
    with pytest.raises(QrtError, match=r"score\.weight: expected floats \[2, 128\]"):
        Engine(EngineConfig(str(folder), kv_cache_memory_bytes=POOL, convert="classify"))


def test_a_causal_model_converted_to_embed(tmp_path):
    folder = random_checkpoint(tmp_path, "MistralForCausalLM", sliding_window=None)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = Engine(EngineConfig(str(folder), kv_cache_memory_bytes=POOL, runner="pooling"))
    assert engine.model.head.tensors[0].data_ptr() == engine.model.embed.weight.data_ptr()  # takes no memory
    with torch.inference_mode():
        expected = [model.model(torch.tensor([ids])).last_hidden_state[0][-1:] for ids in prompts()]
    assert_alike(pooled(engine, prompts())[0], expected)
