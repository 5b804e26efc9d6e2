"""Cut windows of tokens from data rows: take a sample that is large enough, pack it, choose by seed."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qrt.errors import ConfigError
from qrt.text.data.rows import DataRow, pieces
from qrt.text.data.texts import Render, Texts
from qrt.text.tokenizer import Tokenizer
from qrt_calibrate.text.sample import Sample, take

SMALL = 2**22  # characters; smaller data are used whole, which takes some seconds
CHARACTERS = 8  # characters of a sample for each token needed; English has 4 per token
READ = 4  # remote data are read up to this many times the size of the sample
BATCH = 2**18  # characters that all cores tokenize at once
BETWEEN = "\n\n"  # stands between two texts

Read = Callable[[], Iterable[DataRow]]


@dataclass(frozen=True)
class Windows:
    """Windows of tokens, and what they were cut from.

    ids      int64 [count, seqlen]
    sha256   of the sampled texts, joined by blank lines
    rows     how many rows were read
    sampled  how many of them are in the sample
    texts    counts how many of those are used and left out
    """

    ids: Tensor
    sha256: str
    rows: int
    sampled: int
    texts: Texts


def choose_windows(
    read: Read,
    render: Render | None,
    tokenizer: Tokenizer,
    count: int,
    seqlen: int,
    seed: int,
    remote: bool = False,
) -> Windows:
    """Cut `count` disjoint windows of `seqlen` tokens at random places, which `seed` decides.

    A larger count from the same sample begins with the same windows. Each window begins with one BOS if the
    tokenizer puts one before a text. ConfigError where no row can be used, or the text is too short.

    read     returns the rows; each call begins with the first one
    remote   whether reading is expensive: then only the first rows are sampled
    """
    bos = [first for first in tokenizer.encode("a")[:1] if first == tokenizer.bos_token_id]
    width = seqlen - len(bos)
    budget = max(SMALL, CHARACTERS * count * seqlen)
    while True:
        sample = take(read(), budget, seed, READ * budget if remote else None)
        texts = Texts(render)
        tokens, sha256 = _pack(texts.of(sample.rows), tokenizer)
        if not texts.used:
            raise ConfigError(_none_used(sample, texts))
        slots = len(tokens) // width
        if slots >= count:
            break
        if sample.whole:
            raise ConfigError(_too_short(len(tokens), count, width, seqlen, texts))
        budget *= 2
    chosen = torch.randperm(slots, generator=torch.Generator().manual_seed(seed))[:count]
    windows = tokens[: slots * width].view(slots, width)[chosen].long()
    ids = torch.cat([torch.tensor(bos, dtype=torch.long).expand(count, -1), windows], dim=1)
    for row, start in enumerate((chosen * width).tolist()):
        if bos and tokens[start] == bos[0] and start + seqlen <= len(tokens):
            # the window begins with a chat's own BOS, so none is put before it, and one token more fits
            ids[row] = tokens[start : start + seqlen]
    return Windows(ids, sha256, sample.seen, len(sample.rows), texts)


def _none_used(sample: Sample, texts: Texts) -> str:
    if not sample.seen:
        return "the data hold no rows; give data that have some"
    return (
        f"none of the {len(sample.rows):,} rows read can be used ({texts.reasons()}); give rows with a text "
        "(text, content), a chat (messages, conversations), or a question and its answer (prompt and "
        "completion, instruction and output)"
    )


def _too_short(got: int, count: int, width: int, seqlen: int, texts: Texts) -> str:
    left_out = f" (rows left out: {texts.reasons()})" if texts.left_out else ""
    return (
        f"calibration text: expected {count * width} tokens for {count} samples of {seqlen}, "
        f"got {got}{left_out}; give a longer --calib, or fewer --n-samples or a shorter --seqlen"
    )


def _pack(texts: Iterable[tuple[str, bool]], tokenizer: Tokenizer) -> tuple[Tensor, str]:
    """Return token ids int32 [tokens] of the texts, joined by blank lines, and their sha256."""
    ids = array("i")
    sha256 = hashlib.sha256()
    for batch in _batches(_joined(texts)):
        for piece in batch:
            sha256.update(piece.encode())
        for found in tokenizer.encode_all(batch, add_special_tokens=False):
            ids.extend(found)
    tokens = torch.frombuffer(ids, dtype=torch.int32) if ids else torch.empty(0, dtype=torch.int32)
    return tokens, sha256.hexdigest()


def _joined(texts: Iterable[tuple[str, bool]]) -> Iterator[str]:
    """Yield all texts, joined by blank lines, in pieces."""
    before, ended = None, False
    for text, ends in texts:
        if before is not None:
            yield from pieces([before + BETWEEN if ended else before])
        before, ended = text, ends
    if before is not None:
        yield from pieces([before])


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
