"""Read the files beside tokenizer.json as transformers does: special tokens, added tokens, chat templates."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from qrt.model_files.folder import TOKENIZER_CONFIG, is_file, read_json

SPECIAL_MAP, ADDED = "special_tokens_map.json", "added_tokens.json"
PROCESSOR_TEMPLATES = ("processor_config.json", "chat_template.json")  # the first that has one counts
SETTINGS = (TOKENIZER_CONFIG, SPECIAL_MAP, ADDED, *PROCESSOR_TEMPLATES)
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA = "extra_special_tokens"
Token = str | AddedToken
Templates = str | Mapping[str, str] | None


@dataclass(frozen=True)
class Loaded:
    """A tokenizer in memory.

    backend          turns text into ids and back
    named            special tokens by their name: {"bos_token": "<s>"}
    special          these and the special tokens without a name
    chat_template    the template, or several by their name
    """

    backend: tokenizers.Tokenizer
    named: Mapping[str, str]
    special: tuple[str, ...]
    chat_template: Templates

    @classmethod
    def of(cls, hf: Any) -> Loaded:
        """Return a copy of a fast transformers tokenizer, whose calls may make its own backend cut or pad."""
        special = tuple(hf.all_special_tokens)
        return cls(deepcopy(hf.backend_tokenizer), hf.special_tokens_map, special, hf.chat_template)


def read_settings(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, {} without the file; ValueError for a byte order mark."""
    if not is_file(path):
        return {}
    if path.open("rb").read(3) == codecs.BOM_UTF8:
        raise ValueError("a byte order mark")
    return read_json(path)


def with_settings(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> Loaded:
    """Return the tokenizer that a folder's files describe: `backend`, read from its tokenizer.json, and more.

    Tokens that the backend lacks are added to it in transformers' order, which decides their ids. `config` is
    the content of tokenizer_config.json. TypeError for a value that is no token.
    """
    given, named = dict(config), dict[str, Token]()
    others = {name: given.pop(name) for name in config if _is_other(name) and isinstance(config[name], str)}
    _rename(given)
    others |= _take_named(given)
    if "added_tokens_decoder" in given:
        added = {int(id): AddedToken(**token) for id, token in given["added_tokens_decoder"].items()}
    else:
        added = {**_read_older_files(folder, given), **backend.get_added_tokens_decoder()}
        others |= _take_named(given)
        _rename(given)
    if backend.padding:
        given.setdefault("pad_token", backend.padding["pad_token"])
    written = {str(token): token for token in added.values()}
    for name in NAMES:
        if given.get(name) is not None:
            token = _token(given[name])
            named[name] = written.get(str(token), token)
    others = {name: value for name, value in given.items() if _is_other(name) and _is_token(value)} | others
    named |= {name: _token(value) for name, value in others.items()}
    extra = [_token(value) for value in given.get(EXTRA) or ()]
    _add(backend, [added[id] for id in sorted(added)], named.values(), extra)
    if backend.post_processor is None:
        backend.post_processor = TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    backend.encode_special_tokens = bool(given.get("split_special_tokens"))
    special = tuple(dict.fromkeys(map(str, (*named.values(), *extra))))
    texts = {name: str(token) for name, token in named.items()}
    return Loaded(backend, texts, special, _chat_template(folder, given.get("chat_template")))


def _rename(given: dict[str, Any]) -> None:
    """Call the special tokens without a name what transformers 5 calls them."""
    if "additional_special_tokens" in given:
        given.setdefault(EXTRA, given.pop("additional_special_tokens"))


def _take_named(given: dict[str, Any]) -> dict[str, Any]:
    """Take out those of the special tokens without a name that have one after all."""
    return given.pop(EXTRA) if isinstance(given.get(EXTRA), dict) else {}


def _read_older_files(folder: Path, given: dict[str, Any]) -> dict[int, AddedToken]:
    """Put what special_tokens_map.json says into `given`; return the tokens of added_tokens.json by id."""
    for name, value in read_settings(folder / SPECIAL_MAP).items():
        if isinstance(value, dict) and name != EXTRA:
            value = _special(value)
        elif isinstance(value, list) and name == EXTRA:
            value = [*(given.get(EXTRA) or ()), *map(_special, value)]
        given[name] = value
    special = {str(given[name]) for name in NAMES if given.get(name)} | set(map(str, given.get(EXTRA) or ()))
    return {
        id: AddedToken(text, normalized=text not in special, special=text in special)
        for text, id in read_settings(folder / ADDED).items()
    }


def _add(
    backend: tokenizers.Tokenizer, added: Iterable[AddedToken], named: Iterable[Token], extra: Iterable[Token]
) -> None:
    """Add tokens that are not in the backend, and change the flags of those that are."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()} | set(map(str, added))
    special = set(map(str, named))
    tokens = list[Token](added)
    for token in (*named, *extra):
        if str(token) not in known and token not in tokens:
            tokens.append(token)
    for place, token in enumerate(tokens):
        if isinstance(token, str):
            tokens[place] = AddedToken(token, special=True)
        elif str(token) in special:
            token.special = True
    backend.add_tokens(tokens)


def _is_other(name: str) -> bool:
    """Whether an entry of tokenizer_config.json names a special token of this model's own: image_token."""
    return name.endswith("_token") and name not in NAMES


def _is_token(value: Any) -> bool:
    return isinstance(value, Token) or isinstance(value, dict) and value.get("__type") == "AddedToken"


def _token(value: Any) -> Token:
    if not _is_token(value):
        raise TypeError(f"expected a token, got {value!r}")
    if isinstance(value, dict):
        return AddedToken(**{name: each for name, each in value.items() if name != "__type"})
    token: Token = value
    return token


def _special(value: Any) -> Any:
    return AddedToken(**{**value, "special": True}) if isinstance(value, dict) else value


def _chat_template(folder: Path, own: Any) -> Templates:
    """Return the template of chat_template.jinja and of the folder of more, or else that of the config.

    Without them it is the processor's. A tokenizer's own comes first: where a model of images has two, that
    of the processor often shows no tools.
    """
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    found = {name: path.read_text(encoding="utf-8") for name, path in files.items() if is_file(path)}
    if found:
        return found["default"] if found.keys() == {"default"} else found
    return processor_template(folder) if own is None else _by_name(own)


def processor_template(folder: Path) -> Templates:
    """Return the chat template in the files of a model's processor, as transformers' processors choose."""
    given = (read_settings(folder / name).get("chat_template") for name in PROCESSOR_TEMPLATES)
    return _by_name(next((own for own in given if own is not None), None))


def _by_name(own: Any) -> Templates:
    return {each["name"]: each["template"] for each in own} if isinstance(own, list) else own
