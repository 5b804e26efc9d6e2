"""Compare perplexity protocols with scripts of their owners' definitions, over transformers in fp32."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qrt.assets import model_path
from qrt.errors import ConfigError
from qrt.text.tokenizer import Tokenizer
from qrt_eval.inputs import wikitext
from qrt_eval.inputs.text import load_text
from qrt_eval.quality.ppl import perplexity, scorer
from qrt_eval.quality.protocol import PROTOCOLS, Tokens, rolling_spans

TINY = model_path("tiny")


@pytest.fixture(scope="module")
def hf():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def llm():
    return scorer("tiny", "fp16")


@pytest.fixture
def text(tmp_path):
    """Three documents of 150 to 900 tokens."""
    pydoc = load_text("pydoc")
    for i, (at, length) in enumerate(((4, 2000), (10, 500), (31, 2900))):
        (tmp_path / f"{i}.txt").write_text(pydoc.documents[at].text[:length])
    return load_text(str(tmp_path))


@torch.no_grad()
def logprobs(hf, ids) -> torch.Tensor:
    """Return log p of ids[1:], each given all before it."""
    ids = torch.tensor(ids)
    return hf(ids[None]).logits[0, :-1].double().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def measure(llm, name, text, seqlen, stride=None, limit=None, batch_size=8):
    windows = PROTOCOLS[name].windows(text, llm.tokenizer, seqlen, stride, limit)
    return perplexity(llm, name, windows, seqlen, text, batch_size)


@pytest.mark.model
def test_gptq_equals_its_evaluation_loop(hf, tokenizer, llm):
    text = load_text("pydoc")
    ids = tokenizer(text.text, return_tensors="pt", verbose=False).input_ids
    losses = []
    for i in range(3):
        window = ids[:, i * 512 : (i + 1) * 512]
        with torch.no_grad():
            losses.append(hf(window, labels=window).loss.double() * 512)
    theirs = math.exp(torch.stack(losses).sum() / (3 * 512))
    ours = measure(llm, "gptq", text, 512, limit=3)
    assert ours.tokens == 3 * 511 and ours.ppl == pytest.approx(theirs, rel=1e-4)


@pytest.mark.model
def test_llamacpp_scores_second_halves_after_a_bos(hf, tokenizer, llm):
    """Like examples/perplexity: chunks of n_ctx; token 0 becomes BOS; logits n_ctx/2 .. n_ctx-2 count."""
    text, n_ctx = load_text("pydoc"), 256
    ids = tokenizer(text.raw, verbose=False).input_ids
    nll = nll2 = count = 0
    for chunk in range(4):
        tokens = ids[chunk * n_ctx : (chunk + 1) * n_ctx]
        tokens[0] = tokenizer.bos_token_id
        rows = -logprobs(hf, tokens)
        for j in range(n_ctx // 2, n_ctx - 1):
            nll, nll2, count = nll + float(rows[j]), nll2 + float(rows[j]) ** 2, count + 1
    mean = nll / count
    spread = math.sqrt((nll2 / count - mean * mean) / (count - 1))
    ours = measure(llm, "llamacpp", text, n_ctx, limit=4)
    assert ours.tokens == count == 4 * 127
    assert ours.ppl == pytest.approx(math.exp(mean), rel=1e-4)
    assert ours.figures["stderr"] == pytest.approx(spread * math.exp(mean), rel=1e-3)


@pytest.mark.model
def test_sliding_scores_every_token_once_with_context(hf, tokenizer, llm, text):
    ids, seqlen, stride = tokenizer(text.text).input_ids, 128, 48
    total, before = 0.0, 1
    for begin in range(0, len(ids), stride):
        end = min(begin + seqlen, len(ids))
        total -= float(logprobs(hf, ids[begin:end])[before - end :].sum() if end > before else 0)
        before = end
        if end == len(ids):
            break
    ours = measure(llm, "sliding", text, seqlen, stride)
    assert ours.tokens == len(ids) - 1
    assert ours.ppl == pytest.approx(math.exp(total / (len(ids) - 1)), rel=1e-4)
    assert ours.figures["bits_per_byte"] == pytest.approx(
        total / math.log(2) / len(text.text.encode()), rel=1e-6
    )


@pytest.mark.model
def test_lmeval_matches_its_definition(hf, tokenizer, text):
    """Every token of every document is scored once, and a document's last window looks back a whole length.

    The window is the model's whole context, which is lm-eval's default.
    """
    seqlen, total, words, size = 128, 0.0, 0, 0
    for document in text.documents:
        ids = [tokenizer.bos_token_id, *tokenizer.encode(document.text)]
        for first in range(1, len(ids), seqlen):
            end = min(first + seqlen, len(ids))
            start = 0 if first == 1 else end - seqlen - 1
            total += float(logprobs(hf, ids[start:end])[first - end :].sum())
        words += len(document.original.split()) + document.original[0].isspace()
        words += document.original[-1].isspace()
        size += len(document.original.encode())
    llm = scorer("tiny", "fp16", max_model_len=seqlen)
    ours = measure(llm, "lmeval", text, seqlen)
    assert ours.figures["word_perplexity"] == pytest.approx(math.exp(-total / words), rel=1e-4)
    assert ours.figures["bits_per_byte"] == pytest.approx(-total / size / math.log(2), rel=1e-5)


@pytest.mark.model
def test_lmeval_equals_lm_eval(text, llm, monkeypatch):
    """Compare with lm-eval's class for transformers, its windows and its metrics, on the same documents."""
    reason = "pip install qrt[lm] accelerate"
    pytest.importorskip("accelerate", reason=reason)
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason=reason)
    preprocess = pytest.importorskip("lm_eval.tasks.wikitext.preprocess_wikitext", reason=reason)
    from lm_eval.api.instance import Instance
    from lm_eval.api.metrics import bits_per_byte, weighted_perplexity

    theirs = huggingface.HFLM(
        str(TINY), device="cpu", dtype="float32", max_length=128, batch_size=4, trust_remote_code=False
    )
    pages = [{"page": document.original} for document in text.documents]
    requests = [Instance("loglikelihood_rolling", page, (page["page"],), 0) for page in pages]
    sums = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    rows = [preprocess.process_results(page, (sum,)) for page, sum in zip(pages, sums, strict=True)]
    ours = measure(llm, "lmeval", text, 128).figures
    wanted = weighted_perplexity([row["word_perplexity"] for row in rows])
    assert ours["word_perplexity"] == pytest.approx(wanted, rel=1e-4)
    wanted = bits_per_byte([row["bits_per_byte"] for row in rows])
    assert ours["bits_per_byte"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.model
@pytest.mark.parametrize("name", PROTOCOLS)
def test_batch_size_does_not_change_losses(name, llm, text):
    one, eight = (measure(llm, name, text, 100, batch_size=size) for size in (1, 8))
    assert one.ppl == pytest.approx(eight.ppl, rel=1e-6)


def test_detokenized_pages_equal_lm_eval():
    preprocess = pytest.importorskip(
        "lm_eval.tasks.wikitext.preprocess_wikitext", reason="pip install qrt[lm]"
    )
    pages = [
        ' = A ( b ) = \n \n He said " x y " , the dog \'s , 1 @,@ 000 @.@ 5 @-@ m [ c ] ; { d } : N ! ? \n',
        " = = B = = \n = = = C = = = \n 5 \N{DEGREE SIGN} C ' s '' t ' ( a \n b ) \" q \n ' \" . boys ' \n",
    ]
    if (raw := Path(__file__).parents[4] / "shared/corpus/wikitext-2" / wikitext.FILE).is_file():
        pages += list(wikitext.pages(raw.read_text()))
    assert [wikitext.detokenize(page) for page in pages] == [
        preprocess.wikitext_detokenizer({"page": page}) for page in pages
    ]


def test_pages_begin_at_first_level_headings():
    raw = " \n = A = \n \n text = a = b \n = = sub = = \n more \n = B = \n x \n"
    first, second = wikitext.pages(raw)
    assert first == " = A = \n \n text = a = b \n = = sub = = \n more " and second == " = B = \n x \n"


@pytest.mark.parametrize(("count", "seqlen"), [(0, 4), (3, 4), (4, 4), (5, 4), (8, 4), (11, 4), (7, 1)])
def test_rolling_spans_score_every_token_once(count, seqlen):
    spans = rolling_spans(count, seqlen)
    assert [i for _, first, end in spans for i in range(first, end)] == list(range(count))
    assert all(end - start <= seqlen + 1 and start < first for start, first, end in spans)
    assert all(end - start == seqlen + 1 for start, _, end in spans[1:])


@pytest.mark.parametrize("seqlen", [4, 2048])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 11, 2047, 2048, 2049, 5000])
def test_windows_equal_lm_eval_token_for_token(count, seqlen):
    utils = pytest.importorskip("lm_eval.utils", reason="pip install qrt[lm]")
    ids = list(range(100, 100 + count))
    theirs = map(utils.make_disjoint_window, utils.get_rolling_token_windows(ids, 7, seqlen, 1))
    given = [7, *ids]  # the prefix token is at -1
    ours = [
        (given[start + 1 : first + 1], ids[first:end]) for start, first, end in rolling_spans(count, seqlen)
    ]
    assert ours == [(list(context), list(scored)) for context, scored in theirs]


def test_tokens_match_the_tokenizer_and_count_bytes():
    tokenizer = Tokenizer("tiny")
    text = "naïve – 数 \N{GRINNING FACE} plain words, more of them\n\nand a tail"
    tokens = Tokens(tokenizer, text)
    assert tokens.ids == tokenizer.encode(text)
    assert tokens.window(0, len(tokens.ids), 1).num_bytes == len(text.encode())
    assert tokens.window(0, 9, 3, begin=7).ids[0] == 7


@pytest.mark.parametrize(
    ("name", "seqlen", "stride", "message"),
    [
        ("gptq", 500, None, "one window of 500.*got"),
        ("llamacpp", 200, None, "at least 400.*2 windows"),
        ("sliding", 500, None, "one window of 500"),
        ("sliding", 16, 16, "--stride.*1 to 15.*got 16"),
    ],
)
def test_windows_that_do_not_fit_are_refused(name, seqlen, stride, message, tmp_path):
    (tmp_path / "a.txt").write_text("word " * 300)
    with pytest.raises(ConfigError, match=message):
        PROTOCOLS[name].windows(load_text(str(tmp_path)), Tokenizer("tiny"), seqlen, stride, None)
