"""Texts begin with BOS where transformers adds it, and where only tokenizer_config.json asks for it."""

import itertools
import json

import pytest
import tokenizers
from tokenizers import processors
from transformers import AutoTokenizer

import small_tokenizers
from qrt.text.loading import load_transformers
from qrt.text.tokenizer import Tokenizer

TEXT = "the"  # LlamaTokenizer splits words of byte-level vocabularies in its own way
BYTES = processors.ByteLevel(trim_offsets=False)
BOS = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", 0)])
EOS = processors.TemplateProcessing(single="$A </s>", pair="$A $B:1 </s>:1", special_tokens=[("</s>", 1)])
USER = processors.TemplateProcessing(single="<|user|> $A", pair="$A $B:1", special_tokens=[("<|user|>", 2)])
PLAIN = processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
ADD_BOS = [processors.Sequence([BYTES, BOS]), BOS]
ADD_NONE = [None, BYTES, EOS, USER, PLAIN, processors.Sequence([BYTES]), processors.Sequence([BYTES, EOS])]
CLASSES = ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", "Qwen2Tokenizer", None]


def save(folder, post_processor, **config):
    """Make a byte-level tokenizer that all of the classes split in the same way."""
    tokenizer = small_tokenizers.byte_level()
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    path = small_tokenizers.save(tokenizer, folder) / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), **config}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def ids_of_all_ways(folder):
    """Return the ids of a text; all ways to encode it must agree."""
    hf, tokenizer = load_transformers(folder), Tokenizer(folder)
    ids = hf(TEXT)["input_ids"]
    long = tokenizer.encode(TEXT + " " * 5000)
    assert tokenizer.encode(TEXT) == hf.backend_tokenizer.encode(TEXT).ids == ids
    assert hf([TEXT, TEXT])["input_ids"] == [ids, ids]
    assert long[:1] == ids[:1] and Tokenizer(folder).hf(TEXT)["input_ids"] == ids
    assert hf(TEXT, add_special_tokens=False)["input_ids"] == tokenizer.encode(TEXT, add_special_tokens=False)
    return ids


@pytest.mark.parametrize("named", CLASSES)
def test_begins_as_transformers(named, tmp_path):
    """The entry changes nothing where the post-processor adds BOS, or where nothing asks for one."""
    kinds = [*itertools.product(ADD_BOS, [None, True, False]), *itertools.product(ADD_NONE, [None, False])]
    for number, (post_processor, entry) in enumerate(kinds):
        folder = save(
            tmp_path / str(number),
            post_processor,
            tokenizer_class=named,
            add_bos_token=entry,
            add_eos_token=True,
        )
        assert ids_of_all_ways(folder) == AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]


@pytest.mark.parametrize("post_processor", ADD_NONE)
def test_the_entry_alone_adds_bos(post_processor, tmp_path):
    """Everything else that the post-processor adds stays, as in DeepSeek's distilled Qwen."""
    without = ids_of_all_ways(save(tmp_path / "without", post_processor))
    folder = save(tmp_path / "with", post_processor, add_bos_token=True, tokenizer_class="LlamaTokenizerFast")
    assert ids_of_all_ways(folder) == [0, *without]
    assert Tokenizer(folder).encode_pair(TEXT, TEXT) == load_transformers(folder)(TEXT, TEXT)["input_ids"]
    assert Tokenizer(folder).encode_pair(TEXT, TEXT)[0] == 0


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_in_the_file_adds_no_second_bos(side, tmp_path):
    folder = save(tmp_path, BOS, add_bos_token=True)
    padded = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    padded.enable_padding(direction=side, length=9, pad_id=2, pad_token="<|user|>")
    padded.enable_truncation(1)
    padded.save(str(folder / "tokenizer.json"))
    assert ids_of_all_ways(folder)[0] == 0 and ids_of_all_ways(folder).count(0) == 1


def test_no_bos_is_added_without_a_bos_token(tmp_path):
    folder = save(tmp_path, BYTES, add_bos_token=True, bos_token=None)
    assert ids_of_all_ways(folder) == AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]


def test_chats_begin_with_the_bos_of_their_template_alone(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(save(tmp_path, BYTES, add_bos_token=True, chat_template=template))
    ids = tokenizer.encode_chat([{"role": "user", "content": TEXT}])
    assert ids == tokenizer.encode(TEXT) and ids.count(0) == 1
