"""What is told of a wrong request before the engine takes it."""

import numpy as np
import pytest

from qrt.engine.check import RequestCheck
from qrt.errors import ConfigError
from qrt.request.sampling import SamplingParams

VOCAB, EOS = 50, 7
PLAIN = SamplingParams()


def check(*, priorities: bool = False) -> RequestCheck:
    return RequestCheck(VOCAB, [EOS], priorities=priorities)


@pytest.mark.parametrize("ids", [[0, 49, 3], (0, 49, 3), np.array([0, 49, 3], np.uint16)])
def test_a_prompt_becomes_an_array(ids):
    prompt = check().tokens(ids, PLAIN)
    assert prompt.dtype == np.int32 and prompt.tolist() == [0, 49, 3]


@pytest.mark.parametrize("ids", ["abc", [1.5], [[1]], [1, [2]], ["a"], [True], [None], 5])
def test_prompt_must_be_a_list_of_token_ids(ids):
    with pytest.raises(ConfigError, match="expected a list of token ids"):
        check().tokens(ids, PLAIN)


@pytest.mark.parametrize("wrong", [-1, VOCAB, 10**12, 2**63, 2**64])
def test_a_token_outside_the_vocabulary_is_refused(wrong):
    with pytest.raises(ConfigError, match=f"prompt: expected token ids of 0 to 49, .*, got {wrong}"):
        check().tokens([1, wrong], PLAIN)


@pytest.mark.parametrize(
    "name, given",
    [
        ("stop_token_ids", [VOCAB]),
        ("allowed_token_ids", [1, VOCAB]),
        ("logit_bias", {VOCAB: 1.0}),
        ("bad_words", [(1, VOCAB)]),
    ],
)
def test_parameters_name_tokens_of_the_vocabulary(name, given):
    with pytest.raises(ConfigError, match=f"{name}: expected token ids of 0 to 49, .*, got 50"):
        check().tokens([1], SamplingParams(**{name: given}))


def test_bad_words_come_as_token_ids():
    with pytest.raises(ConfigError, match="bad_words: expected token ids, got text"):
        check().tokens([1], SamplingParams(bad_words=["word"]))


@pytest.mark.parametrize(
    "params, refused",
    [
        ({"allowed_token_ids": [4], "bad_words": [(4,)]}, True),
        ({"allowed_token_ids": [4, 5], "bad_words": [(4,)]}, False),
        ({"allowed_token_ids": [4], "bad_words": [(4, 9)]}, False),  # ends in 9
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, True),
        ({"allowed_token_ids": [EOS], "min_tokens": 1, "ignore_eos": True}, False),
        ({"allowed_token_ids": [EOS]}, False),
        ({"allowed_token_ids": [4], "stop_token_ids": [4], "min_tokens": 1}, True),
    ],
)
def test_one_token_can_always_be_drawn(params, refused):
    """Bad words and min_tokens ban tokens; a request whose bans may cover all that it allows is refused."""
    if not refused:
        check().tokens([1], SamplingParams(**params))
        return
    with pytest.raises(ConfigError, match="may leave none of"):
        check().tokens([1], SamplingParams(**params))


def test_priorities_need_the_policy():
    check().order(0, None)
    check(priorities=True).order(-3, "salt")
    with pytest.raises(ConfigError, match="set scheduling_policy to 'priority'"):
        check().order(2, None)
    for priority in ("a", 1.5, None):
        with pytest.raises(ConfigError, match="priority: expected an integer, got "):
            check(priorities=True).order(priority, None)


@pytest.mark.parametrize("salt", ["", 5, ["a"]])
def test_a_salt_is_text(salt):
    with pytest.raises(ConfigError, match="cache_salt: expected text, not empty, got "):
        check().order(0, salt)
