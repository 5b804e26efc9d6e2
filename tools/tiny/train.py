"""Makes `qrt/assets/tiny`, the bundled checkpoint, from the project's text; one command, one GPU.

    PYTHONPATH=tools python -m tiny.train --corpus CORPUS --out qrt/assets/tiny

Corpus folder: `prose.txt.xz` and `technical.txt.xz` (documents parted by a line `<|doc|>`), of which
one document in fifty is held out and never trained on, and `wiki.test.raw` (here or under
`wikitext-2/`), which is only evaluated. The result is an ordinary HF folder: a Llama-shaped decoder in
bf16, a byte-level BPE tokenizer, and a model card with the measured perplexities.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy, dropout
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tiny.card import WINDOW, evaluate, model_card, nll, samples
from tiny.text import BOS, EOS, SPECIALS, Split, chat_form, pydoc_text, split_corpus, wikitext_text

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Llama-3's and GPT-4's word split: contractions, words with one leading mark, up to 3 digits, the rest
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BATCH = 32  # sequences of WINDOW tokens in a step
CONFIG = LlamaConfig(
    vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=6,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=WINDOW,
    rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, dtype="bfloat16",
    architectures=["LlamaForCausalLM"],
)  # fmt: skip


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE over `texts`: any text round-trips; `<|bos|>` is set before every text."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=CONFIG.vocab_size, special_tokens=SPECIALS, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ))  # fmt: skip
    tok.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, 0)]
    )
    return tok


def write_tokenizer(tok: Tokenizer, out: Path) -> None:
    """tokenizer.json and the tokenizer_config.json that AutoTokenizer reads."""
    tok.save(str(out / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": WINDOW,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "additional_special_tokens": SPECIALS[2:],
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def encode(tok: Tokenizer, split: Split) -> list[np.ndarray]:
    """Token ids of every document, `<|bos|>` before and `<|eos|>` after it, then the chat forms."""
    docs = [doc for docs in split.values() for doc in docs]
    texts = [doc + EOS for doc in docs] + [chat for doc in docs if (chat := chat_form(doc))]
    return [np.array(e.ids, np.int16) for e in tok.encode_batch_fast(texts)]


def batches(docs: list[np.ndarray], seed: int, device: str) -> Iterator[torch.Tensor]:
    """Endless [BATCH, WINDOW] ids; each epoch packs the documents in a new order and new cuts."""
    rng = np.random.default_rng(seed)
    while True:
        stream = np.concatenate([docs[i] for i in rng.permutation(len(docs))])
        stream = stream[rng.integers(WINDOW) :]
        rows = stream[: len(stream) // WINDOW * WINDOW].reshape(-1, WINDOW)
        ids = torch.from_numpy(rows[rng.permutation(len(rows))]).to(device)
        for part in ids.split(BATCH)[: len(ids) // BATCH]:
            yield part.long()


def autocast(device: str) -> torch.autocast | nullcontext[None]:
    """bf16 matrix products on a GPU, plain fp32 on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()


@torch.compile(dynamic=False)
def head_loss(hidden: torch.Tensor, head: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of each next token; hidden [B, T, H], head [V, H], ids [B, T]."""
    targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    return cross_entropy((hidden @ head.T).float().flatten(0, 1), targets.flatten())


def next_token_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Training loss on ids [B, T]."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return head_loss(hidden, model.lm_head.weight, ids)


def add_dropout(model: LlamaForCausalLM, rate: float) -> None:
    """Dropout on the embeddings and on what each block adds to the residual stream, in training."""
    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "o_proj", "down_proj")):
            module.register_forward_hook(lambda m, _, out: dropout(out, rate, m.training))


def adamw(model: LlamaForCausalLM, lr: float, decay: float, device: str) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=device == "cuda")


def step_seconds(model: LlamaForCausalLM, ids: torch.Tensor, device: str) -> float:
    """Measured seconds of one forward and backward pass (the first one, which compiles, apart)."""
    for turn in range(11):
        with autocast(device):
            loss = next_token_loss(model, ids)
        loss.backward()
        if turn == 0:
            loss.item()
            start = time.monotonic()
    if device == "cuda":
        torch.cuda.synchronize()
    model.zero_grad()
    return (time.monotonic() - start) / 10


def save_weights(model: LlamaForCausalLM, out: Path) -> None:
    """model.safetensors in bf16; the tied head is left out."""
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    state = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in state.items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)


def train(
    model: LlamaForCausalLM, tok: Tokenizer, train_docs: Split, held: Split, args: argparse.Namespace
) -> dict[str, Any]:
    """Trains in place; returns the facts of the run for the card.

    Linear warm-up, then linear decay to zero. The number of steps is `--steps`, or what the measured step
    time lets fit in `--max-minutes`.
    """
    docs = encode(tok, train_docs)
    tokens = sum(map(len, docs))
    watched = {name: tok.encode("\n\n".join(texts)).ids for name, texts in held.items()}
    source = batches(docs, args.seed, args.device)
    step_s = 1.03 * step_seconds(model, next(source), args.device) + 0.003  # and the optimizer
    left = args.started + 60 * args.max_minutes - time.monotonic()
    steps = min(args.steps, max(10, int(left / step_s)))
    print(f"{tokens} tokens; {1000 * step_s:.1f} ms a step; {steps} steps", flush=True)

    warmup = min(500, steps // 10 + 1)
    optimizer = adamw(model, args.lr, args.weight_decay, args.device)
    curve = []
    start = time.monotonic()
    for step in range(steps):
        lr = args.lr * min((step + 1) / warmup, (steps - step) / (steps - warmup))
        for group in optimizer.param_groups:
            group["lr"] = lr
        with autocast(args.device):
            loss = next_token_loss(model, next(source))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1} loss {loss.item():.4f} norm {norm.item():.2f}", flush=True)
        if step % -(-steps // 16) == 0 or step == steps - 1:
            with autocast(args.device):
                now = {name: nll(model, ids, 24) for name, ids in watched.items()}
            curve.append((step + 1, *now.values()))
            print(f"step {step + 1} held-out {now} at {time.monotonic() - start:.0f} s", flush=True)
            save_weights(model, args.out)
    seconds = time.monotonic() - start
    seen = steps * BATCH * WINDOW
    return {
        "tokens": tokens, "steps": steps, "seen": seen, "epochs": seen / tokens,
        "seconds": seconds, "last_loss": loss.item(), "curve": curve,
    }  # fmt: skip


def arguments() -> argparse.Namespace:
    """Return the command line; its defaults are the bundled model's."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6500)
    parser.add_argument("--max-minutes", type=float, default=1e9, help="until training ends")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.8)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="pays on a GPU: 20 s, then faster")
    parser.add_argument("--limit", type=int, help="documents of each kind, for a dry run")
    parser.add_argument("--evaluate", action="store_true", help="measure --out as it is, train nothing")
    return parser.parse_args()


def main() -> None:
    """Read, split, train, measure and write; or with `--evaluate` only measure."""
    args = arguments()
    args.started = time.monotonic()
    train_docs, held, dropped = split_corpus(args.corpus, args.limit)
    texts = {f"held-out {name}": "\n\n".join(docs) for name, docs in held.items()}
    texts[f"pydoc (Python {platform.python_version()})"] = pydoc_text()
    texts["wikitext-2 raw test"] = wikitext_text(args.corpus)
    if args.evaluate:
        evaluate(args.out, texts, args.device)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    tok = train_tokenizer([doc for docs in train_docs.values() for doc in docs])
    write_tokenizer(tok, args.out)
    CONFIG.save_pretrained(args.out)
    GenerationConfig(
        do_sample=True, temperature=0.7, top_p=0.9, bos_token_id=0, eos_token_id=1
    ).save_pretrained(args.out)
    print(f"corpus and tokenizer ready at {time.monotonic() - args.started:.0f} s", flush=True)

    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(CONFIG).float().to(args.device)
    add_dropout(model, args.dropout)
    if args.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    facts = train(model, tok, train_docs, held, args)
    facts["split"] = {
        name: (len(train_docs[name]), sum(map(len, train_docs[name])), len(held[name])) for name in train_docs
    }
    facts |= {"dropped": dropped, **{k: getattr(args, k) for k in ("device", "seed", "lr")}}
    facts |= {"decay": args.weight_decay, "dropout": args.dropout}
    figures = evaluate(args.out, texts, args.device)
    card = model_card(facts, figures, samples(args.out, args.device))
    (args.out / "README.md").write_text(card, encoding="utf-8")
    print(f"done at {time.monotonic() - args.started:.0f} s: {args.out}", flush=True)


if __name__ == "__main__":
    main()
