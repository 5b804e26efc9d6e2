"""Load the tokenizer of a checkpoint folder: files only, never the checkpoint's own code."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qrt.errors import CheckpointError, QrtError, UnsupportedError
from qrt.folder import expect_at_most, is_file, read_json

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SETTINGS = (TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json")
MAX_TOKENIZER_BYTES = 2**28  # the largest vocabularies take 35 MB
ADD_TOKENIZER = f"add the {TOKENIZER} of the model it was made from"


def load(folder: Path) -> Any:
    """Return the transformers tokenizer of a folder.

    tokenizer.json is taken as it is, whatever class tokenizer_config.json names: AutoTokenizer keeps its
    vocabulary only and splits text as the class does, which is wrong where byte-level tokens go by
    LlamaTokenizerFast, as those of DeepSeek's distilled Llama. AutoTokenizer also imports the code of all
    models first, which takes each process of a server seconds; without a tokenizer.json there is no way
    around it. CheckpointError names the file that cannot be read and what helps, UnsupportedError a
    tokenizer without a fast backend.
    """
    whole = is_file(folder / TOKENIZER)
    if whole:
        expect_at_most(folder / TOKENIZER, MAX_TOKENIZER_BYTES)
    import transformers  # here, because it imports Triton

    loader = transformers.PreTrainedTokenizerFast if whole else transformers.AutoTokenizer
    try:
        hf = loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if not hf.get_vocab().keys() - {*hf.all_special_tokens, *hf.added_tokens_encoder}:
            raise ValueError(f"{type(hf).__name__} finds no vocabulary")  # and makes one up
    except Exception as error:  # the Rust side raises bare Exceptions for a damaged file
        reason = str(error).strip().partition("\n")[0].partition(" from one of")[0]
        fault = next(_faults(folder, f"{type(error).__name__}: {reason}"))
        raise CheckpointError(f"{folder}: no usable tokenizer: {fault}") from error
    if not getattr(hf, "is_fast", False):
        raise UnsupportedError(f"{folder}: {type(hf).__name__} has no fast backend; {ADD_TOKENIZER}")
    if whole:
        _add_bos(hf, folder)
    return hf


def _add_bos(hf: Any, folder: Path) -> None:
    """Begin every text with BOS where either file says so.

    Transformers 5 asks the post-processor of tokenizer.json alone. That of DeepSeek's distilled Qwen adds
    none; `add_bos_token` in its tokenizer_config.json does, by which transformers 4 and llama.cpp go and the
    model was trained. `add_bos_token: false` leaves the post-processor as it is, as in transformers 5. EOS
    comes from the post-processor alone: behind a prompt it would end the answer.
    """
    config = folder / TOKENIZER_CONFIG
    wanted = is_file(config) and read_json(config).get("add_bos_token") is True
    if not wanted or hf.bos_token_id is None or hf("a")["input_ids"][:1] == [hf.bos_token_id]:
        return
    from tokenizers import processors

    bos, backend = hf.bos_token, hf.backend_tokenizer
    whole = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    before = whole if backend.post_processor is None else backend.post_processor
    state = json.loads(before.__getstate__())
    steps = state.get("processors", [state])
    template = next((step for step in steps if step["type"] == "TemplateProcessing"), None)
    if template is None:
        before = processors.Sequence([before, whole])
        state = json.loads(before.__getstate__())
        template = state["processors"][-1]
    for form in ("single", "pair"):
        template[form].insert(0, {"SpecialToken": {"id": bos, "type_id": 0}})
    template["special_tokens"][bos] = {"id": bos, "ids": [hf.bos_token_id], "tokens": [bos]}
    before.__setstate__(json.dumps(state).encode())
    backend.post_processor = before


def _faults(folder: Path, reason: str) -> Iterator[str]:
    """Say what is wrong with the tokenizer's files, and what helps; the first is the likeliest. `reason` is
    what transformers says, which often names a package that does not help."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    vocabularies = [name for name in names if name in (TOKENIZER, "tekken.json") or name.endswith(".model")]
    for name in [name for name in names if name in (*SETTINGS, *vocabularies)]:
        begins = (folder / name).open("rb").read(64)
        if begins.startswith(b"version https://git-lfs"):
            yield f"{name} is a Git LFS pointer and not the file; run git lfs pull, or download it again"
        if begins.startswith(codecs.BOM_UTF8):
            yield f"{name} begins with a byte order mark; save it as UTF-8 without one"
    for name in SETTINGS:
        if name in names and (fault := _no_json(folder / name)):
            yield fault
    if TOKENIZER in names:
        yield f"{TOKENIZER} cannot be read ({reason}); download it again, or update the package tokenizers"
    if "auto_map" in (read_json(folder / TOKENIZER_CONFIG) if TOKENIZER_CONFIG in names else {}):
        yield f"it is code of the checkpoint's own, which qrt does not run; {ADD_TOKENIZER}"
    for name in vocabularies:
        yield _fault_of_vocabulary(folder / name, reason)
    if own := next((name for name in names if name.endswith(".tiktoken")), None):
        yield f"{own} is read by code of the checkpoint's own, which qrt does not run; {ADD_TOKENIZER}"
    if "vocab.json" in names and "merges.txt" not in names:
        yield f"vocab.json without merges.txt; add merges.txt, or {ADD_TOKENIZER}"
    if found := [name for name in names if name in ("vocab.json", "vocab.txt")]:
        yield f"{found[0]} is not read by the class that {TOKENIZER_CONFIG} names; {ADD_TOKENIZER}"
    yield f"expected a {TOKENIZER}, got no file of a tokenizer; {ADD_TOKENIZER}, with {TOKENIZER_CONFIG}"


def _no_json(path: Path) -> str | None:
    try:
        read_json(path)
    except QrtError as error:
        return str(error).removeprefix(f"{path.parent}/")
    return None


def _fault_of_vocabulary(path: Path, reason: str) -> str:
    """Of a file that needs a package to be read."""
    kind, packages = _kind(path)
    if missing := [package for package in packages if not _is_installed(package)]:
        install = " ".join(package.removeprefix("google.").replace("_", "-") for package in missing)
        return f"{path.name} is {kind}; pip install {install}, or {ADD_TOKENIZER}"
    return f"{path.name} cannot be read ({reason}); download it again, or {ADD_TOKENIZER}"


def _kind(path: Path) -> tuple[str, list[str]]:
    """Whose a vocabulary is, and the packages that read it."""
    if path.name == "tekken.json":
        return "Mistral's", ["mistral_common"]
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", path.open("rb").read(1024)):
        return "tiktoken's", ["tiktoken"]
    return "SentencePiece's", ["sentencepiece", "google.protobuf"]


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False
