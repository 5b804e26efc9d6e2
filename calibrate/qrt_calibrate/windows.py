"""Windows of tokens cut from data rows: a sample as large as is needed, packed, and chosen by seed."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qrt.errors import ConfigError
from qrt.text.data.rows import Row, pieces
from qrt.text.data.texts import Render, Texts
from qrt_calibrate.sample import Sample, take

SMALL = 2**22  # characters: data of no more are used whole, which takes some seconds
CHARACTERS = 8  # of a sample for each token that is asked for; English has 4 a token
READ = 4  # as many times the sample is read at most of data that come over the network
BATCH = 2**18  # characters that are tokenized at once, by all cores
BETWEEN = "\n\n"  # texts

Read = Callable[[], Iterable[Row]]


@dataclass(frozen=True)
class Windows:
    """Windows of tokens, and what they were cut from.

    ids      int64 [count, seqlen]
    sha256   of the sampled texts, joined by blank lines
    rows     how many rows were read
    sampled  how many of them were looked at
    texts    counts of those used and left out
    """

    ids: Tensor
    sha256: str
    rows: int
    sampled: int
    texts: Texts


def choose_windows(
    read: Read,
    render: Render | None,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    seqlen: int,
    seed: int,
    remote: bool = False,
) -> Windows:
    """Cut `count` disjoint windows of `seqlen` tokens from the rows that `read` gives, each time from the
    first, by chance from `seed`. Of one sample more windows begin with the same ones.

    remote   whether reading on costs: then the sample is of the first rows

    Each window begins with one BOS when the tokenizer puts one before a text. ConfigError: no row can be
    used, or the text is too short.
    """
    bos = [tokenizer.bos_token_id] if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id else []
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
            ids[row] = tokens[
                start : start + seqlen
            ]  # a chat's own BOS is the only one, and a token more fits
    return Windows(ids, sha256, sample.seen, len(sample.rows), texts)


def _none_used(sample: Sample, texts: Texts) -> str:
    if not sample.seen:
        return "the data hold no rows; give data that have some"
    return (
        f"none of the {len(sample.rows):,} rows looked at can be used ({texts.reasons()}); give rows with a "
        "text (text, content), a chat (messages, conversations), or a question and its answer (prompt and "
        "completion, instruction and output)"
    )


def _too_short(got: int, count: int, width: int, seqlen: int, texts: Texts) -> str:
    left_out = f" (rows left out: {texts.reasons()})" if texts.left_out else ""
    return (
        f"calibration text: {got} tokens, wanted {count * width} for {count} samples of {seqlen}{left_out}; "
        "give a longer --calib, or fewer --n-samples or a shorter --seqlen"
    )


def _pack(texts: Iterable[tuple[str, bool]], tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, str]:
    """Token ids int32 [tokens] of the texts, a blank line between two, and the sha256 of their characters."""
    ids = array("i")
    sha256 = hashlib.sha256()
    for batch in _batches(_joined(texts)):
        for piece in batch:
            sha256.update(piece.encode())
        encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)
        for found in encoded["input_ids"]:
            ids.extend(found)
    return torch.frombuffer(ids, dtype=torch.int32) if ids else torch.empty(
        0, dtype=torch.int32
    ), sha256.hexdigest()


def _joined(texts: Iterable[tuple[str, bool]]) -> Iterator[str]:
    """Pieces of the texts, which make up all of them with a blank line between two."""
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
