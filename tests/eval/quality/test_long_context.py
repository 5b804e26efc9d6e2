"""Test `qrt-eval passkey` and `kv-error`: the prompts, and errors that a format's bits explain."""

import pytest
import torch

from errors import assert_error, assert_names
from qrt.quant.kv import KV_FORMATS
from qrt_eval.cli import main
from qrt_eval.quality import kv_error, passkey
from qrt_eval.quality.ppl import scorer
from result_schema import checked


@pytest.mark.model
def test_a_prompt_holds_its_key_at_its_depth():
    llm = scorer("tiny", "fp16")
    text = llm.tokenizer.decode
    for depth in (0.0, 0.5, 1.0):
        first, second = passkey.make_trials(llm, 400, depth, 2, seed=0)
        assert len(first.prompt) == len(second.prompt) == 400 - passkey.ANSWER_TOKENS
        assert first.key != second.key and text(first.keys[0]) == f" {first.key}"
        prompt = text(first.prompt)
        assert prompt.count(first.key) == 2 and prompt.endswith(passkey.QUESTION)
        place = prompt.index(first.key) / len(prompt)
        assert abs(place - depth) < 0.25
    again, _ = passkey.make_trials(llm, 400, 1.0, 2, seed=0)
    assert again == first


class Knowing:
    """Act as an LLM that always finds the key, or never does."""

    max_model_len = 2048

    def __init__(self, llm, knows):
        self.tokenizer, self.knows = llm.tokenizer, knows

    def _key(self, prompt):
        text = self.tokenizer.decode(prompt)
        return text[text.index("pass key is ") + 12 :][:5]

    def generate(self, prompts, params, use_tqdm):
        texts = [f" {self._key(p['prompt_token_ids'])}." if self.knows else " 00000" for p in prompts]
        return [type("O", (), {"outputs": [type("C", (), {"text": text})]}) for text in texts]

    def score(self, ids):
        found = []
        for row in ids:
            text = self.tokenizer.decode(row)
            right = text.endswith(f"is {self._key(row)}") == self.knows
            found.append(torch.full((len(row) - 1,), -0.1 if right else -3.0))
        return found


@pytest.mark.model
@pytest.mark.parametrize("knows", [True, False])
def test_only_a_found_key_counts(knows):
    model = Knowing(scorer("tiny", "fp16"), knows)
    cell = passkey.measure(model, 300, 0.5, 3, seed=1)
    assert cell["retrieved"] == cell["chosen"] == float(knows)


@pytest.mark.model
def test_passkey_command(tmp_path, capsys):
    out = tmp_path / "p.json"
    words = f"passkey --model tiny --kv fp16 int4 --context 200 --depth 0.5 --trials 2 --json {out}"
    assert main(words.split()) == 0
    plain, quantized = checked(out)["cells"]
    assert plain["kv"] == "fp16" and quantized["kv"] == "int4" and plain["trials"] == 2
    assert -40 < plain["logprob"] < 0 and plain["logprob"] != quantized["logprob"]
    assert "chosen of ten" in capsys.readouterr().out
    assert main("passkey --model tiny --kv fp16 --context 40".split()) == 1
    assert_names(capsys.readouterr().err, "error:", "--context", "to 2048", "got 40")
    assert passkey.default_lengths(2048) == [512, 1024, 2048] and passkey.default_lengths(300) == [300]


def test_kv_error_command(tmp_path, capsys):
    out = tmp_path / "e.json"
    words = f"kv-error --context 64 2000 --head-dim 64 --num-heads 4 --num-kv-heads 2 --json {out}"
    assert main(words.split()) == 0
    cells = {(c["kv"], c["heads"], c["context_tokens"]): c for c in checked(out)["cells"]}
    for heads in kv_error.SHARPNESS:
        for length in (64, 2000):
            lost = {kv: cells[kv, heads, length]["relative_error"] for kv in KV_FORMATS}
            assert lost["fp16"] < 1e-5 < lost["int8"] < lost["int4"] / 8 and lost["int4"] < 0.5
            assert lost["int8"] < lost["k8v4"] < lost["int4"]
    assert cells["int8", "diffuse", 2000]["entropy"] > 7 > 4 > cells["int8", "peaked", 2000]["entropy"]
    assert main("kv-error --num-heads 3 --num-kv-heads 2".split()) == 1
    assert_error(capsys.readouterr().err, "--num-heads", "--num-kv-heads 2", "got 3")
    assert main("kv-error --head-dim 7".split()) == 1
    assert_error(capsys.readouterr().err, "--head-dim", "even", "got 7")


def test_kv_error_equals_torch_on_restored_kv():
    """Torch's own attention runs over decode_ref's K and V, in the cache's basis."""
    generator = torch.Generator().manual_seed(3)
    heads = kv_error.SyntheticHeads.make("peaked", 4, 2, 64, generator)
    table, _ = kv_error.fitted(heads, generator)
    q, k = heads.queries(8, generator), heads.keys(300, generator)
    v = torch.randn(300, 2, 64, generator=generator)
    truth, _ = kv_error.exact(q, k, v)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    torch.testing.assert_close(truth, sdpa(*heads, enable_gqa=True)[0].transpose(0, 1), rtol=1e-4, atol=1e-5)
    fmt = KV_FORMATS["int4"]
    buffers = [spec.zeros("cpu") for spec in fmt.buffers(304, 2, 64, torch.float32).values()]
    slots = torch.arange(300)
    gain, inverse, shift = table
    fmt.encode_ref(fmt.to_basis(k * inverse - shift), fmt.to_basis(v), buffers, slots)
    stored_k, stored_v = (fmt.from_basis(x) for x in fmt.decode_ref(buffers, slots))
    wanted, _ = kv_error.exact(q * gain.repeat_interleave(2, 0), stored_k, stored_v)
    torch.testing.assert_close(kv_error.attend(q, k, v, table, "int4"), wanted, rtol=1e-3, atol=1e-4)
