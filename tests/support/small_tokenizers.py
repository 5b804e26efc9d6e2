"""Small tokenizers of the kinds that checkpoints carry, built in a moment: `save(byte_level(), folder)`.

All have `<s>`, `</s>` and `<|user|>` as special tokens 0, 1, 2.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPECIAL = ["<s>", "</s>", "<|user|>"]
TEXT = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps, the fox runs on and on.",
    "Language models predict the next token; the next token is often the most likely one.",
    "你好，世界。今天的天气很好，我们去公园散步吧。",
    "Grüße aus Köln! Привет, мир. こんにちは世界 👋🏽 🎉 👨‍👩‍👧 naïve café",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no ' + m.role) }}"
    "{% endif %}<|user|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}</s>{% endif %}"
)


def byte_level(vocab: int = 420) -> Tokenizer:
    """GPT-2's kind: BPE over bytes, so that a character may be spread over tokens. Puts no BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 2, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama 2's kind: SentencePiece BPE with <0x..> tokens for unknown characters and BOS in front."""
    words = sorted({c for c in "".join(TEXT) if c < "\u0100" and c != " "} | {"▁"})
    vocab = {token: i for i, token in enumerate(SPECIAL + [f"<0x{b:02X}>" for b in range(256)] + words)}
    merges = []
    for left, right in [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "d"), ("o", "g"), ("▁d", "og")]:
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def metaspace() -> Tokenizer:
    """T5's and Gemma's kind: pieces with their leading space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXT * 2, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write tokenizer.json and tokenizer_config.json; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if chat_template:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
