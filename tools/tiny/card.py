"""The model card of `qrt/assets/tiny`: its figures measured, its samples drawn, all put into words."""

import math
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, LlamaForCausalLM

Figures = dict[str, tuple[float, float, int]]  # text -> (perplexity, bits per byte, tokens)

PROMPTS = ("The film", "The Prime Minister says", "## Motivation\n\n")
WINDOW = 2048  # longest context, and the evaluation window

CARD = """\
# tiny

The model that `qrt` carries (`--model tiny`): a small Llama-shaped decoder that writes English and gives
every test, example and comparison a perplexity that means something, offline. It is a measuring piece, not
an assistant: it knows grammar and the tone of its sources, and no facts. It may repeat what its sources say.

Made by `PYTHONPATH=tools python -m tiny.train --corpus CORPUS --out OUT --compile`, with `--steps {steps}`
and `--seed {seed}`; nothing else went into it. A second run gives the same tokenizer, and weights that differ
by GPU rounding.

## Figures

The bf16 weights as stored, computed in fp32 with transformers {transformers}.

| text | tokens | perplexity per token | bits per byte |
| --- | ---: | ---: | ---: |
{figures}

Protocol (`gptq`): the text tokenised once with `<|bos|>` at its very start; windows of 2048 tokens that do
not overlap, the tail dropped; mean cross entropy over positions 1..2047 of each window; exp. Held-out
documents are joined with two line ends; `pydoc` is every entry of `pydoc_data.topics` joined likewise in the
order of the keys, and changes with the Python version; WikiText-2 is the raw test split in the GPTQ form
(its 4,358 rows joined with two line ends, 1,294,336 characters). Perplexity per token belongs to this
vocabulary of 4096; bits per byte compares across models.

## Architecture

`LlamaForCausalLM`: 6 layers, hidden 256, 4 query and 2 KV heads of 64, intermediate 768, vocabulary 4096,
tied embeddings, RMSNorm eps 1e-5, RoPE theta 10000, 2048 positions; 5.8 M parameters in bf16.

## Tokenizer

Byte-level BPE, 4096 entries with all 256 bytes, so any text round-trips exactly; Llama-3's word split; no
prefix space, no normaliser. `<|bos|>` (0) is set before every text; `<|eos|>` (1) ends a document and a chat
turn; `<|system|>` (2), `<|user|>` (3) and `<|assistant|>` (4) open a turn. Trained on the training documents.

## Data

| file | training documents | characters | held-out documents |
| --- | ---: | ---: | ---: |
{split}

- `prose`: film reviews, broadcast news, speeches, the Brown corpus, web text; research corpora distributed
  with NLTK, each under its own terms (some for research or non-commercial use).
- `technical`: Python PEPs, Rust RFCs and book, Ethereum EIPs, Dive into Deep Learning, Pro Git; under
  PSF, CC0, MIT, Apache-2.0 and CC BY(-NC)-SA.

The text itself is not shipped. Held out: sha256 of the text is 0 modulo 50, and at most 100,000 characters.
Not used: documents that are not English, two film scripts and two collections of crude talk, and {dropped}
documents that share over 10 % of their 12-word runs with a held-out document or with pydoc's topics.
WikiText-2 was never trained on.
One document in eight, where its paragraphs are short enough, appears a second time as a chat, its paragraphs
as turns, so that the chat markers mean something; the model was not taught to follow instructions.

## Training

{seen:.0f} M tokens ({epochs:.1f} epochs of {tokens:.1f} M) in {steps} steps of 32 sequences of 2048. bf16
autocast over fp32 weights; AdamW (lr {lr}, betas 0.9 and 0.95, weight decay {decay} on matrices); dropout
{dropout} on the embeddings and on what each block adds; linear warm-up, then linear decay to zero; gradients
clipped at 1.0. {minutes:.1f} minutes on one {gpu}, torch {torch}. Last training loss
{last_loss:.3f} (one batch, with dropout). The text is small for the model, so regularisation
decides. Four runs were made: weight decay 0.1 without dropout (12,000 steps, most of them at 1024 tokens),
and 0.8 without, 0.3 with and 0.8 with dropout 0.1 (6500 steps at 2048); the last had the lowest
held-out loss.

Held-out loss on the way, over at most 24 windows each:

| step | prose | technical |
| ---: | ---: | ---: |
{curve}

## Samples

Drawn with the checkpoint's own `generation_config.json` (temperature 0.7, top-p 0.9), seed 0, in fp32.
The prompts are {prompts}.

{samples}
"""


@torch.no_grad()
def nll(model: LlamaForCausalLM, ids: list[int], cap: int | None = None) -> float:
    """Return the mean cross entropy by the GPTQ protocol.

    `ids` is a text, tokenised once, with `<|bos|>` first. Its windows of 2048 tokens do not overlap, the tail
    is dropped, and positions 1..2047 of each count; `cap` windows at most.
    """
    training = model.training
    model.eval()
    whole = torch.tensor(ids[: len(ids) // WINDOW * WINDOW], device=model.device)
    rows = whole.view(-1, WINDOW)[:cap]
    with torch.compiler.set_stance("force_eager"):
        losses = [
            cross_entropy(model(row[None], use_cache=False).logits[0, :-1].float(), row[1:]).item()
            for row in rows
        ]
    model.train(training)
    return sum(losses) / len(losses)


def load_saved(out: Path, device: str) -> LlamaForCausalLM:
    """Return the saved bf16 checkpoint, widened to fp32."""
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    torch.nn.Module.to(model, device)
    return model


def evaluate(out: Path, texts: dict[str, str], device: str) -> Figures:
    """name -> (perplexity, bits per byte, tokens) of the saved bf16 checkpoint, computed in fp32."""
    model = load_saved(out, device)
    tok = Tokenizer.from_file(str(out / "tokenizer.json"))
    figures = {}
    for name, text in texts.items():
        ids = tok.encode(text).ids
        loss = nll(model, ids)
        bits = loss / math.log(2) * len(ids) / len(text.encode())
        figures[name] = (math.exp(loss), bits, len(ids))
        print(f"{name}: perplexity {figures[name][0]:.3f}, {bits:.3f} bits/byte", flush=True)
    return figures


def samples(out: Path, device: str) -> dict[str, str]:
    """prompt -> prompt and continuation, drawn with the checkpoint's own generation_config."""
    tok = AutoTokenizer.from_pretrained(out)
    model: Any = load_saved(out, device)
    texts = {}
    for prompt in PROMPTS:
        torch.manual_seed(0)
        inputs = tok(prompt, return_tensors="pt").to(device)
        ids = model.generate(**inputs, max_new_tokens=80, pad_token_id=tok.eos_token_id)
        texts[prompt] = str(tok.decode(ids[0], skip_special_tokens=True))
    return texts


def model_card(facts: dict[str, Any], figures: Figures, samples: dict[str, str]) -> str:
    """Return the card; `facts` is what the run recorded, `samples` maps a prompt to its continuation."""
    gpu = torch.cuda.get_device_name() if facts["device"] == "cuda" else platform.machine()
    return CARD.format(
        seed=facts["seed"],
        steps=facts["steps"],
        transformers=transformers.__version__,
        figures="\n".join(f"| {k} | {n:,} | {p:.2f} | {b:.3f} |" for k, (p, b, n) in figures.items()),
        split="\n".join(f"| `{k}` | {a:,} | {b:,} | {c} |" for k, (a, b, c) in facts["split"].items()),
        dropped=facts["dropped"],
        seen=facts["seen"] / 1e6,
        epochs=facts["epochs"],
        tokens=facts["tokens"] / 1e6,
        lr=facts["lr"],
        decay=facts["decay"],
        dropout=facts["dropout"],
        minutes=facts["seconds"] / 60,
        gpu=gpu,
        torch=torch.__version__,
        last_loss=facts["last_loss"],
        curve="\n".join(f"| {s:,} | {p:.3f} | {t:.3f} |" for s, p, t in facts["curve"]),
        prompts=", ".join(repr(prompt) for prompt in samples),
        samples="\n\n".join(f"````text\n{text}\n````" for text in samples.values()),
    )
