"""Load the tokenizer of a checkpoint folder from its files; the checkpoint's own code is never run."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from qrt.errors import CheckpointError, QrtError, UnsupportedError
from qrt.model_files.folder import TOKENIZER, TOKENIZER_CONFIG, expect_at_most, is_file, read_json
from qrt.text.token_settings import SETTINGS, Loaded, processor_template, read_settings, with_settings
from qrt.text.vocabulary.tekken import TEKKEN, read_tekken

# Entries of tokenizer_config.json with which transformers changes the tokenizer of tokenizer.json.
ONLY_TRANSFORMERS = {"fast_tokenizer_files", "fix_mistral_regex"}
MAX_TOKENIZER_BYTES = 2**28  # the largest vocabularies take 35 MB
ADD_TOKENIZER = f"add the {TOKENIZER} of the model it was made from"


def load(folder: Path) -> Loaded:
    """Return the tokenizer of a folder, without torch where it has tokenizer.json or tekken.json.

    tokenizer.json is loaded unchanged, whatever class tokenizer_config.json names. AutoTokenizer would keep
    only its vocabulary and split text as that class does. This is wrong for DeepSeek's distilled Llama: its
    tokens are byte-level, and its config names LlamaTokenizerFast. To import transformers takes seconds in
    each process of a server, because it imports torch.

    CheckpointError names the file that cannot be read and the remedy. UnsupportedError for a tokenizer
    without a fast backend.
    """
    with _explained(folder):
        config = read_settings(folder / TOKENIZER_CONFIG)
    name = _whole(folder)
    if name is None or name == TOKENIZER and config.keys() & ONLY_TRANSFORMERS:
        return Loaded.of(load_transformers(folder))
    with _explained(folder):
        if name == TEKKEN:
            backend, own = read_tekken(folder / name)
            config = own | {entry: value for entry, value in config.items() if value is not None}
        else:
            backend = tokenizers.Tokenizer.from_file(str(folder / name))
        loaded = with_settings(backend, folder, config)
        _expect_vocabulary(backend.get_vocab(), loaded.special, backend.get_added_tokens_decoder())
    _add_bos(backend, loaded.named.get("bos_token"), config)
    return loaded


def load_transformers(folder: Path) -> Any:
    """Return the transformers tokenizer of a folder; raises as `load` does.

    AutoTokenizer imports the code of all models, which takes seconds more; it is used only without a file
    that holds all of a tokenizer. It would read tekken.json without BOS, or leave it to another package.
    """
    name = _whole(folder)
    import transformers  # here, because it imports torch and Triton

    if name == TEKKEN:
        read = load(folder)
        extra = [text for text in read.special if text not in read.named.values()]
        options: dict[str, Any] = {**read.named, "extra_special_tokens": extra}
        options["chat_template"] = read.chat_template
        return transformers.PreTrainedTokenizerFast(tokenizer_object=read.backend, **options)
    loader = transformers.AutoTokenizer if name is None else transformers.PreTrainedTokenizerFast
    with _explained(folder):
        hf = loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _expect_vocabulary(hf.get_vocab(), hf.all_special_tokens, hf.added_tokens_decoder)
    if not getattr(hf, "is_fast", False):
        raise UnsupportedError(f"{folder}: {type(hf).__name__} has no fast backend; {ADD_TOKENIZER}")
    with _explained(folder):
        if hf.chat_template is None:
            hf.chat_template = processor_template(folder)
    if name == TOKENIZER:
        _add_bos(hf.backend_tokenizer, hf.bos_token, read_settings(folder / TOKENIZER_CONFIG))
    return hf


def _whole(folder: Path) -> str | None:
    """Return the name of the file that holds all of a tokenizer, if there is one and it is not too large."""
    name = next((name for name in (TOKENIZER, TEKKEN) if is_file(folder / name)), None)
    if name is not None:
        expect_at_most(folder / name, MAX_TOKENIZER_BYTES)
    return name


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Raise CheckpointError with the likeliest fault and its remedy instead of a library's error."""
    try:
        yield
    except Exception as error:  # the Rust side raises bare Exceptions for a damaged file
        reason = str(error).strip().partition("\n")[0].partition(" from one of")[0]
        fault = next(_faults(folder, f"{type(error).__name__}: {reason}"))
        raise CheckpointError(f"{folder}: no usable tokenizer: {fault}") from error


def _expect_vocabulary(
    vocabulary: Mapping[str, int], special: Iterable[str], added: Mapping[int, AddedToken]
) -> None:
    """Raise ValueError if there are only special and added tokens: transformers makes those up."""
    if not vocabulary.keys() - {*special, *map(str, added.values())}:
        raise ValueError("no vocabulary")


def _add_bos(backend: tokenizers.Tokenizer, bos: str | None, config: Mapping[str, Any]) -> None:
    """Begin every text with BOS where tokenizer.json or tokenizer_config.json says so.

    Transformers 5 obeys only the post-processor of tokenizer.json. That of DeepSeek's distilled Qwen adds no
    BOS, but its tokenizer_config.json says `add_bos_token: true`. Transformers 4 and llama.cpp obey that
    entry, and the model was trained with it. `add_bos_token: false` leaves the post-processor unchanged, as
    in transformers 5. `add_eos_token` is ignored: EOS after a prompt would end the answer.
    """
    if config.get("add_bos_token") is not True or bos is None:
        return
    backend.no_truncation()  # with padding, a text might not show how it begins
    backend.no_padding()
    bos_id = backend.token_to_id(bos)
    if backend.encode("a").ids[:1] == [bos_id]:
        return
    before = backend.post_processor
    state = json.loads(before.__getstate__())
    steps = state.get("processors", [state])
    template = next((step for step in steps if step["type"] == "TemplateProcessing"), None)
    if template is None:
        before = processors.Sequence([before, processors.TemplateProcessing("$A:0", "$A:0 $B:1", [])])
        state = json.loads(before.__getstate__())
        template = state["processors"][-1]
    for form in ("single", "pair"):
        template[form].insert(0, {"SpecialToken": {"id": bos, "type_id": 0}})
    template["special_tokens"][bos] = {"id": bos, "ids": [bos_id], "tokens": [bos]}
    before.__setstate__(json.dumps(state).encode())
    backend.post_processor = before


def _faults(folder: Path, reason: str) -> Iterator[str]:  # noqa: C901 -- a flat list of faults
    """Yield what may be wrong with the tokenizer's files, with the remedy, the likeliest first.

    `reason` is the text of transformers' error, which often names a package that does not help.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    vocabularies = [name for name in names if name in (TOKENIZER, TEKKEN) or name.endswith(".model")]
    for name in [name for name in names if name in (*SETTINGS, *vocabularies)]:
        begins = (folder / name).open("rb").read(64)
        if begins.startswith(b"version https://git-lfs"):
            yield f"{name} is a Git LFS pointer, not the file; run git lfs pull, or download it again"
        if begins.startswith(codecs.BOM_UTF8):
            yield f"{name} begins with a byte order mark; save it as UTF-8 without one"
    for name in SETTINGS:
        if name in names and (fault := _no_json(folder / name)):
            yield fault
    if TOKENIZER in names:
        yield f"{TOKENIZER} cannot be read ({reason}); download it again, or update the package tokenizers"
    if "auto_map" in (read_json(folder / TOKENIZER_CONFIG) if TOKENIZER_CONFIG in names else {}):
        yield f"it is the checkpoint's own code, which qrt does not run; {ADD_TOKENIZER}"
    for name in vocabularies:
        yield _fault_of_vocabulary(folder / name, reason)
    if own := next((name for name in names if name.endswith(".tiktoken")), None):
        yield f"{own} is read by the checkpoint's own code, which qrt does not run; {ADD_TOKENIZER}"
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
    """Say what is wrong with a vocabulary file, which may need a package that is not installed."""
    kind, packages = _kind(path)
    if missing := [package for package in packages if not _is_installed(package)]:
        install = " ".join(package.removeprefix("google.").replace("_", "-") for package in missing)
        return f"{path.name} is {kind}; pip install {install}, or {ADD_TOKENIZER}"
    return f"{path.name} cannot be read ({reason}); download it again, or {ADD_TOKENIZER}"


def _kind(path: Path) -> tuple[str, list[str]]:
    """Return the library that a vocabulary file belongs to, and the packages that read it."""
    if path.name == TEKKEN:
        return "Mistral's", []
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", path.open("rb").read(1024)):
        return "tiktoken's", ["tiktoken"]
    return "SentencePiece's", ["sentencepiece", "google.protobuf"]


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False
