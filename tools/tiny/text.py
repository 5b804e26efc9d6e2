"""The text behind `qrt/assets/tiny`: what it is trained on, what is held out, what it is measured on."""

import hashlib
import lzma
import re
from pathlib import Path
from pydoc_data.topics import topics

Split = dict[str, list[str]]  # "prose" and "technical" -> documents

BOS, EOS, SYSTEM, USER, ASSISTANT = "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIALS = [BOS, EOS, SYSTEM, USER, ASSISTANT]  # ids 0..4
UNSUITED = (  # two film scripts under copyright, and two collections of crude talk
    "SCENE 1: [wind]",
    "PIRATES OF THE CARRIBEAN",
    "White guy: So, do you have",
    "25 SEXY MALE",
)


def shingles(text: str) -> set[int]:
    """Hashes of all runs of 12 words: two texts that share many are near-copies."""
    words = text.split()
    return {hash(" ".join(words[i : i + 12])) for i in range(max(1, len(words) - 11))}


def pydoc_text() -> str:
    """All topics of the running Python's manual, in the order of their names."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def wikitext_text(corpus: Path) -> str:
    """WikiText-2 raw test in the GPTQ form: its rows joined with two line ends, blank rows empty."""
    paths = [corpus / "wiki.test.raw", corpus / "wikitext-2" / "wiki.test.raw"]
    lines = next(p for p in paths if p.exists()).read_text("utf-8").split("\n")[:-1]
    return "\n\n".join(line + "\n" if line.strip() else "" for line in lines)


def split_corpus(corpus: Path, limit: int | None) -> tuple[Split, Split, int]:
    """(training documents, held-out documents, number of near-copies dropped from training).

    Held out: sha256 of the text is 0 modulo 50, and at most 100,000 characters. Dropped: unsuited or
    non-English documents, and training documents that share over 10 % of their 12-word runs with a
    held-out document or with pydoc's topics.
    """
    train: Split = {}
    held: Split = {}
    for name in ("prose", "technical"):
        text = lzma.decompress((corpus / f"{name}.txt.xz").read_bytes()).decode()
        docs = [doc.strip("\n") for doc in text.split("<|doc|>")][:limit]
        docs = [d for d in docs if not d.startswith(UNSUITED) and len(d.encode()) < 1.1 * len(d)]
        chosen = [int(hashlib.sha256(d.encode()).hexdigest(), 16) % 50 == 0 for d in docs]
        chosen = [c and len(d) <= 100_000 for c, d in zip(chosen, docs, strict=True)]
        held[name] = [d for c, d in zip(chosen, docs, strict=True) if c]
        train[name] = [d for c, d in zip(chosen, docs, strict=True) if not c]
    reserved = shingles(pydoc_text()).union(*(shingles(d) for docs in held.values() for d in docs))
    before = sum(map(len, train.values()))
    for name, docs in train.items():
        runs = ((doc, shingles(doc)) for doc in docs)
        train[name] = [doc for doc, run in runs if len(run & reserved) <= 0.1 * len(run)]
    return train, held, before - sum(map(len, train.values()))


def chat_form(doc: str) -> str | None:
    """Return the document's first paragraphs as turns of a chat, so that the markers get a meaning.

    One document in eight also appears in this form, half of those with a system turn; else None.
    """
    pick = int(hashlib.sha256(doc.encode()).hexdigest(), 16) // 50 % 16
    turns = [p.strip() for p in re.split(r"\n\s*\n", doc) if 20 <= len(p.strip()) <= 600][:8]
    if pick > 1 or len(turns) < 2:
        return None
    system = f"{SYSTEM}You are a helpful assistant.{EOS}" if pick else ""
    return system + "".join(f"{(USER, ASSISTANT)[i % 2]}{t}{EOS}" for i, t in enumerate(turns))
