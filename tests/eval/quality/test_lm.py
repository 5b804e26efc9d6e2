"""Test `qrt-eval lm`: lm-eval's tasks over the engine, against lm-eval's own class for transformers."""

import json
from functools import partial

import pytest

from errors import assert_error
from qrt.assets import model_path
from qrt.errors import ConfigError
from qrt_eval.cli import main
from qrt_eval.quality.lm import task_manager
from result_schema import checked

pytest.importorskip("lm_eval", reason="pip install qrt[lm]")

CHOICES = """
task: local_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choices.json}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
WRITTEN = """
task: local_written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choices.json}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: " in"
generation_kwargs: {{until: ["\\n", "."], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match, ignore_case: true}}]
"""
ROLLING = """
task: local_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choices.json}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
QUESTIONS = (
    ("When the function is called, it", [" returns", " banana", " purple"], 0),
    ("The government said that", [" green", " the", " xylophone"], 1),
    ("In this chapter we will", [" see", " )", " 1"], 0),
    ("", [" The", " zzzz"], 0),
)


@pytest.fixture
def tasks(tmp_path):
    rows = [{"question": q, "choices": choices, "answer": answer} for q, choices, answer in QUESTIONS]
    rows = [row for row in rows if row["question"]]
    (tmp_path / "choices.json").write_text("\n".join(json.dumps(row) for row in rows))
    for name, task in (("choices", CHOICES), ("written", WRITTEN), ("rolling", ROLLING)):
        (tmp_path / f"{name}.yaml").write_text(task.format(folder=tmp_path))
    return tmp_path


@pytest.mark.model
def test_local_tasks_from_the_command_line(tasks, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "lm.json"
    words = f"lm --model tiny --kv int8 --include-path {tasks} --json {out} --tasks"
    assert main([*words.split(), "local_choices", "local_written", "local_rolling"]) == 0
    result = checked(out)
    scores = {(row["task"], row["metric"]): row for row in result["scores"]}
    assert scores["local_choices", "acc"]["value"] == 1.0
    assert 0.5 < scores["local_rolling", "bits_per_byte"]["value"] < 4
    assert not scores["local_rolling", "bits_per_byte"]["higher_is_better"]
    assert ("local_written", "exact_match") in scores and result["kv"] == "int8"
    assert "local_choices" in capsys.readouterr().out


@pytest.mark.model
def test_scores_equal_lm_eval_with_transformers():
    pytest.importorskip("accelerate", reason="pip install accelerate")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from qrt_eval.inputs.text import load_text
    from qrt_eval.quality.lm_model import QRTLM

    theirs = HFLM(str(model_path("tiny")), device="cpu", dtype="float32", max_length=128, batch_size=2)
    ours = QRTLM("tiny", dtype="float32", max_model_len=128)
    assert ours.max_length == theirs.max_length and ours.prefix_token_id == theirs.prefix_token_id

    def ask(kind, *args):
        requests = [Instance(kind, {}, some, i) for i, some in enumerate(args)]
        return [getattr(model, kind)(requests, disable_tqdm=True) for model in (ours, theirs)]

    pairs = [(q, choice) for q, choices, _ in QUESTIONS for choice in choices]
    pairs += [("long " * 200, "context, cut on the left"), ("trailing space ", "kept")]
    mine, reference = ask("loglikelihood", *pairs)
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in reference]
    assert any(greedy for _, greedy in mine)
    assert [value for value, _ in mine] == pytest.approx([value for value, _ in reference], abs=1e-3)
    text = load_text("pydoc").text[:1500]
    mine, reference = ask("loglikelihood_rolling", (text,), ("short",))
    assert mine == pytest.approx(reference, rel=1e-4)
    kwargs = {"until": ["\n\n", "of"], "max_gen_toks": 12, "do_sample": False}
    mine, reference = ask("generate_until", *((q, dict(kwargs)) for q, *_ in QUESTIONS[:3]))
    assert mine == reference


@pytest.mark.model
def test_continuation_beyond_the_context_is_refused():
    """A context of 16 scores 16 tokens; with 17 the first one would have no score."""
    from qrt_eval.quality.lm_model import QRTLM

    ids = [260 + 37 * i for i in range(17)]
    long, short = (QRTLM("tiny", dtype="float32", max_model_len=size) for size in (64, 16))
    found, wanted = (
        m._loglikelihood_tokens([(None, [0], ids[:16])], disable_tqdm=True) for m in (short, long)
    )
    assert found[0][0] == pytest.approx(wanted[0][0], abs=1e-3)
    with pytest.raises(ConfigError, match=r"--max-model-len.*\b17\b.*\b16\b"):
        short._loglikelihood_tokens([(None, [0], ids[:1]), (None, [0], ids)], disable_tqdm=True)


@pytest.mark.model
def test_chat_template_and_generation_arguments(caplog):
    from qrt_eval.quality.lm_model import QRTLM

    model = QRTLM("tiny", max_model_len=128)
    said = model.apply_chat_template([{"role": "user", "content": "hi"}])
    assert said.startswith("<|bos|><|user|>hi") and model.tok_encode(said).count(0) == 1
    params = model._sampling({"until": "x", "temperature": 0.5, "do_sample": True, "num_beams": 4})
    assert params.temperature == 0.5 and params.stop == ("x",) and params.max_tokens == 256
    assert "num_beams" in caplog.text
    assert model._sampling({"until": [], "temperature": 0.7, "do_sample": False}).greedy


@pytest.mark.parametrize(
    ("wanted", "folder", "read"),
    [
        (["local_choices"], True, [False]),
        (["local_choices", "hellaswag"], True, [False, True]),
        (["both"], True, [False, True]),  # a group, whose tasks may be lm-eval's own
        (["hellaswag"], False, [True]),
    ],
)
def test_own_tasks_of_lm_eval_are_read_if_needed(wanted, folder, read, tasks, monkeypatch):
    from lm_eval import tasks as theirs

    (tasks / "both.yaml").write_text("group: both\ntask: [local_choices, hellaswag]\n")
    found, manager = [], partial(theirs.TaskManager, include_defaults=False)
    monkeypatch.setattr(
        theirs,
        "TaskManager",
        lambda include_path, include_defaults=True: (
            found.append(include_defaults) or manager(None, include_path)
        ),
    )
    index = task_manager(wanted, str(tasks) if folder else None)
    assert found == read and ("local_choices" in index.all_tasks) == folder


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--tasks no_such_task", ["--tasks", "no_such_task"]),
        ("--tasks x --include-path /no/folder", ["--include-path", "/no/folder"]),
    ],
)
def test_bad_input(flags, named, capsys, monkeypatch):
    from lm_eval import tasks

    few = partial(tasks.TaskManager, include_defaults=False)  # reading all of lm-eval's takes seconds
    monkeypatch.setattr(tasks, "TaskManager", few)
    assert main(["lm", "--model", "tiny", *flags.split()]) == 1
    assert_error(capsys.readouterr().err, *named)
