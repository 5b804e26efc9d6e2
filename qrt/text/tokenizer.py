"""Tokenizer: text to token ids and back, and chats to prompts. A model's own code is never run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from qrt.errors import CheckpointError, ConfigError
from qrt.grammar.marks import is_mark
from qrt.model_files.location import tokenizer_folder
from qrt.text.chat_template import ChatTemplate
from qrt.text.loading import load, load_transformers
from qrt.text.messages import Message
from qrt.text.vocabulary.byte_level import BYTE_CHARACTERS

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's token for a single byte
LONG = 4096  # from this many characters or tokens on, encode and decode let other threads run


class Tokenizer:
    """The tokenizer of a checkpoint: of a folder, of the Hub, or of the bundled "tiny".

    backend_tokenizer   of the library tokenizers, without truncation and padding
    special_tokens      special tokens by their name: {"bos_token": "<s>"}

    The Rust backend encodes and decodes; many threads may use it at once. Only its batch methods release
    Python's lock: its `encode` and `decode` hold it, for seconds on a long text.
    """

    def __init__(self, path: str | Path) -> None:
        """Find the folder (`tokenizer_folder`) and load its tokenizer (`loading.load`)."""
        self._folder = tokenizer_folder(path)
        loaded = load(self._folder)
        self.backend_tokenizer = self._backend = loaded.backend
        self._backend.no_truncation()  # some tokenizer.json files cut texts to 512 tokens
        self._backend.no_padding()
        self.special_tokens = loaded.named
        self._all_special, self._chat_template = loaded.special, loaded.chat_template
        self._max_token_chars = max(map(len, self._backend.get_vocab()), default=1)

    def __len__(self) -> int:
        """Return the number of tokens, the added ones too."""
        return int(self._backend.get_vocab_size())

    @cached_property
    def hf(self) -> Any:
        """Return the transformers tokenizer, for everything that this class lacks; it imports torch."""
        return load_transformers(self._folder)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Return the ids that `decode` skips."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def all_special_ids(self) -> frozenset[int]:
        """Return the ids of the tokens that the tokenizer's settings call special, as in transformers."""
        found = map(self._backend.token_to_id, self._all_special)
        return frozenset(token_id for token_id in found if token_id is not None)

    @cached_property
    def special_names(self) -> dict[str, int]:
        """Return the ids that `decode` skips, by the text of their token."""
        added = self._backend.get_added_tokens_decoder()
        return {added[token_id].content: token_id for token_id in sorted(self.special_ids)}

    @cached_property
    def marks(self) -> dict[str, int]:
        """Return the ids of the added tokens that count as no text in a grammar, by their text."""
        added = sorted(self._backend.get_added_tokens_decoder().items())
        return {token.content: number for number, token in added if is_mark(token.content, token.special)}

    def shown(self, token_ids: Iterable[int]) -> Iterator[int]:
        """Yield the ids that `decode` does not skip; ConfigError for what cannot be a token id."""
        try:
            yield from (token_id for token_id in token_ids if token_id not in self.special_ids)
        except TypeError as error:
            raise ConfigError(f"token ids: expected integers of 0 or more below 2^32 ({error})") from error

    @property
    def bos_token_id(self) -> int | None:
        """Return the begin-of-text token, if there is one."""
        return self._named_id("bos_token")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the end-of-text token, if there is one."""
        found = self._named_id("eos_token")
        return () if found is None else (found,)

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    @property
    def max_token_chars(self) -> int:
        """Return the longest token's length. A text of more than n times this length has over n tokens."""
        return self._max_token_chars

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, with BOS if the tokenizer adds it; ConfigError if not Unicode."""
        try:
            if len(text) < LONG:
                return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
            (long,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(long.ids)
        except TypeError as error:
            raise ConfigError(f"prompt: expected text without lone surrogates, got {text[:50]!r}") from error

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return what `encode` does for each of `texts`; many of them on all cores at once."""
        if sum(map(len, texts)) >= LONG:
            try:
                found = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
                return [list(one.ids) for one in found]
            except TypeError:  # one text is wrong; `encode` names it
                pass
        return [self.encode(text, add_special_tokens) for text in texts]

    def encode_within(
        self, text: str, most: int, *, side: str = "right", add_special_tokens: bool = True
    ) -> list[int]:
        """Return `encode` of as much of `text` as fits `most` tokens; the special ones stay.

        The `side` that is cut is right or left. ConfigError where these alone are more.
        """
        (own,) = self._plain(text)
        own.truncate(self._room(most, False) if add_special_tokens else most, direction=side)
        return list(self._backend.post_process(own, None, add_special_tokens).ids)

    def encode_pair(self, first: str, second: str, most: int | None = None) -> list[int]:
        """Return the token ids of two texts, joined as the tokenizer joins them; the end of `second` is cut.

        ConfigError where `first` alone has more than `most`.
        """
        one, other = self._plain(first, second)
        if most is not None:
            other.truncate(self._room(most - len(one), True))
        return list(self._backend.post_process(one, other, True).ids)

    def _plain(self, *texts: str) -> list[Any]:
        """Return the backend's encodings of texts, without special tokens."""
        try:
            return [self._backend.encode(text, add_special_tokens=False) for text in texts]
        except TypeError as error:
            raise ConfigError(
                f"prompt: expected text without lone surrogates, got {texts[0][:50]!r}"
            ) from error

    def _room(self, most: int, pair: bool) -> int:
        """Return how many of `most` tokens are left beside the special ones."""
        left = most - int(self._backend.num_special_tokens_to_add(pair))
        if left < 0:
            raise ConfigError(
                f"truncate_prompt_tokens: expected {-left} more, for the tokens that are not cut; raise it"
            )
        return left

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`, without cleaning up spaces.

        Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary become nothing. ConfigError for
        what cannot be a token id.
        """
        ids = list(token_ids)
        try:
            if len(ids) < LONG:
                return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))
            return str(self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])
        except (OverflowError, TypeError) as error:
            raise ConfigError(f"token ids: expected integers of 0 or more below 2^32 ({error})") from error

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, special or not, inside a text.

        It is decoded behind another token, because SentencePiece's decoder strips the first token's space.
        """
        before, chars = self._before
        text = self.decode([*before, token_id], skip_special_tokens=False)
        return text[chars:]

    @cached_property
    def _before(self) -> tuple[list[int], int]:
        """Return a token to decode others behind, and the length of its text."""
        before = self.encode("a", add_special_tokens=False)[-1:]
        return before, len(self.decode(before, skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; unlike `token_text` also those of a part of a character."""
        text = self.token_text(token_id)
        token = self._backend.id_to_token(token_id) or ""
        if "\ufffd" in text and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        if "\ufffd" in text and all(character in BYTE_CHARACTERS for character in token):
            return bytes(BYTE_CHARACTERS[character] for character in token)
        return text.encode()

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint has a chat template, or several."""
        return bool(self._chat_template)

    def chat_template(self, text: str | None = None, tools: bool = False) -> str | None:
        """Return `text`, or the checkpoint's template (the one for tools if it has two); None without one."""
        own = self._chat_template
        if text is not None or not own:
            return text
        if isinstance(own, str):
            return own
        found = own.get("tool_use") if tools else None
        if found is None and (found := own.get("default")) is None:
            raise CheckpointError("chat template: the checkpoint has several and no default; give one")
        return found

    def render_chat(
        self, messages: Sequence[Message], chat_template: str | None = None, **options: Any
    ) -> str:
        """Render a conversation with the checkpoint's chat template, or with `chat_template`, in a sandbox.

        `options` are those of `ChatTemplate.render`: add_generation_prompt, continue_final_message, tools,
        documents, and the template's own. ConfigError without a template, or where it refuses.
        """
        text = self.chat_template(chat_template, bool(options.get("tools")))
        if text is None:
            raise ConfigError("chat: the checkpoint has no chat template; send a plain prompt or give one")
        return ChatTemplate(text, self.special_tokens).render(messages, **options)

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return the token ids of `render_chat`. No BOS is added: the template writes it."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)
