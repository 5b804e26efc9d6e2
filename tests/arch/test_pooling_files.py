"""What a checkpoint's files say of pooling: architectures, sentence-transformers' files, overrides."""

import json

import pytest

from qrt.arch.pooling import Pooling, overridden, read_pooling
from qrt.arch.read import body_of, read_arch
from qrt.errors import CheckpointError, ConfigError, UnsupportedError

CAUSAL = {"architectures": ["Qwen3ForCausalLM"]}
MODULES = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Normalize", "Normalize")]


def write(folder, modes, modules=MODULES):
    listed = [
        {"idx": int(idx), "name": idx, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for idx, path, kind in modules
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps(modes))
    return folder


@pytest.mark.parametrize(
    "name, whole",
    [
        ("Qwen3Model", "Qwen3ForCausalLM"),
        ("GPT2Model", "GPT2LMHeadModel"),
        ("Gemma3TextModel", "Gemma3ForCausalLM"),
        ("LlamaForSequenceClassification", "LlamaForCausalLM"),
        ("Gemma3TextForSequenceClassification", "Gemma3ForCausalLM"),
        ("Qwen2ForTokenClassification", "Qwen2ForCausalLM"),
        ("InternLM2ForRewardModel", "InternLM2ForCausalLM"),
        ("ChatGLMModel", None),  # generates
        ("Qwen3ForCausalLM", None),
        ("BertModel", None),
    ],
)
def test_bodies_of_known_models(name, whole):
    assert body_of(name) == whole


def test_a_body_of_a_model_with_images_is_its_text_half():
    assert body_of("Gemma3ForSequenceClassification", images=True) == "Gemma3ForConditionalGeneration"
    assert body_of("Qwen2ForSequenceClassification", images=True) == "Qwen2ForCausalLM"


def test_a_classifier_of_tokens_has_labels_for_each(tmp_path):
    config = {"architectures": ["Qwen2ForTokenClassification"], "num_labels": 3}
    pooling = read_pooling(config, tmp_path)
    assert pooling.task == "classify" and pooling.kind == "all" and len(pooling.labels) == 3


def test_a_body_needs_no_head():
    arch = read_arch({"architectures": ["Qwen3Model"], "num_hidden_layers": 2}, "here")
    assert arch.name == "Qwen3Model" and arch.headless and arch.tied_embeddings
    assert arch == arch.without_head() or arch.without_head().headless


@pytest.mark.parametrize(
    "modes, kind",
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 8, "include_prompt": True}, "mean"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_kinds_of_sentence_transformers(modes, kind, tmp_path):
    write(tmp_path, modes)
    assert read_pooling(CAUSAL, tmp_path) == Pooling("embed", kind, normalize=True)
    write(tmp_path, modes, MODULES[:2])
    assert read_pooling(CAUSAL, tmp_path) == Pooling("embed", kind, normalize=False)
    assert read_pooling(CAUSAL, tmp_path, runner="generate") is None
    changed = {"pooling_type": "ALL", "normalize": True}
    assert read_pooling(CAUSAL, tmp_path, pooler=changed) == Pooling("embed", "all")


@pytest.mark.parametrize(
    "modes, modules, error, words",
    [
        ({"pooling_mode_cls_token": True}, MODULES, UnsupportedError, "got cls_token"),
        (
            {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True},
            MODULES,
            UnsupportedError,
            "and",
        ),
        ({}, MODULES, UnsupportedError, "got none"),
        ({"pooling_mode": "mean"}, [*MODULES, ("3", "3_Dense", "Dense")], UnsupportedError, "got 'Dense'"),
        ({"pooling_mode": "mean"}, [("0", "../x", "Pooling")], CheckpointError, "expected a folder"),
        ({"pooling_mode": "mean"}, [("0", "elsewhere", "Pooling")], CheckpointError, "expected a folder"),
    ],
)
def test_other_modules_are_refused(modes, modules, error, words, tmp_path):
    with pytest.raises(error, match=words):
        read_pooling(CAUSAL, write(tmp_path, modes, modules))


def test_who_pools_without_being_asked(tmp_path):
    assert read_pooling(CAUSAL, tmp_path) is None
    assert read_pooling(CAUSAL, tmp_path, runner="pooling") == Pooling("embed")
    assert read_pooling({"architectures": ["LlamaModel"]}, tmp_path) == Pooling("embed")
    assert read_pooling(CAUSAL, tmp_path, convert="embed") == Pooling("embed")
    for given in ({"convert": "embed"}, {}):
        name = "Qwen3ForCausalLM" if given else "Qwen3Model"
        with pytest.raises(ConfigError, match="runner: expected 'pooling'"):
            read_pooling({"architectures": [name]}, tmp_path, runner="generate", **given)


def test_labels_and_what_is_done_to_their_numbers(tmp_path):
    config = {"architectures": ["Qwen2ForSequenceClassification"]}

    def read(**entries):
        found = read_pooling({**config, **entries}, tmp_path)
        return found.labels, found.activation

    assert read() == (("LABEL_0", "LABEL_1"), "softmax")
    assert read(id2label={"0": "bad", "1": "fair", "2": "good"}) == (("bad", "fair", "good"), "softmax")
    assert read(num_labels=1) == (("LABEL_0",), "sigmoid")
    assert read(num_labels=1, problem_type="regression") == (("LABEL_0",), "none")
    assert read(problem_type="multi_label_classification")[1] == "sigmoid"
    assert read_pooling({"architectures": ["Qwen2ForRewardModel"]}, tmp_path).kind == "all"
    with pytest.raises(CheckpointError, match="num_labels: expected"):
        read(num_labels=-1)


def test_overrides_are_those_of_pooling(tmp_path):
    changed = overridden(CAUSAL, {"is_matryoshka": True})
    assert read_pooling(changed, tmp_path, runner="pooling").dimensions == ()
    listed = {**CAUSAL, "matryoshka_dimensions": [64, 128]}
    assert read_pooling(listed, tmp_path, runner="pooling").dimensions == (64, 128)
    with pytest.raises(UnsupportedError, match="got 'rope_theta'; change it in config"):
        overridden(CAUSAL, {"rope_theta": 1e6})
    tokens = {**CAUSAL, "classifier_from_token": ["Yes"], "method": "no_post_processing"}
    found = read_pooling(tokens, tmp_path, convert="classify")
    assert found.labels == ("LABEL_0",) and found.tokens == ("Yes",) and not found.difference
    with pytest.raises(ConfigError, match="expected two tokens"):
        read_pooling({**tokens, "method": "from_2_way_softmax"}, tmp_path, convert="classify")


@pytest.mark.parametrize("entry", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_attention_in_both_directions_is_refused(entry):
    with pytest.raises(UnsupportedError, match=min(entry)):
        read_arch({"architectures": ["Qwen3Model"], **entry}, "here")
