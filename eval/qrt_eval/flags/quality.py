"""Define the flags of the commands that measure quality, and of `compare`."""

from __future__ import annotations

import math

from qrt.cli import ArgumentParser, add_flags
from qrt.config import EngineConfig
from qrt.quant.kv import KV_FORMATS
from qrt_eval.flags import shared as flags


def add_ppl(command: ArgumentParser) -> None:
    """Add the flags of `qrt-eval ppl`."""
    flags.add_text(command, "to score", None, optional=False)
    flags.add_model(command)
    flags.add_kv(command)
    command.add_argument("--baseline", metavar="MODEL", help="also score this model (default: none)")
    flags.add_kv(command, "--baseline-kv", " of the baseline")
    flags.add_windows(command)
    flags.add_batch(command, 8, "windows")
    flags.add_json(command, resumes=True)


def add_kld(command: ArgumentParser) -> None:
    """Add the flags of `qrt-eval kld`."""
    flags.add_text(command, "to compare on (default: that of --base-file)", None, optional=True)
    flags.add_model(command, several=True)
    flags.add_kvs(command, ["auto"])
    base = command.add_mutually_exclusive_group()
    base.add_argument(
        "--baseline", metavar="MODEL", help="model to compare with (default: the first --model)"
    )
    base.add_argument(
        "--base-file", metavar="FILE", help="baseline and text that --save-base saved (default: none)"
    )
    flags.add_kv(command, "--baseline-kv", " of the baseline")
    command.add_argument(
        "--save-base",
        metavar="FILE",
        help="save the baseline's predictions for --base-file (default: no file)",
    )
    flags.add_windows(command)
    command.set_defaults(protocol=None)  # gptq, or that of --base-file
    flags.add_count(command, "--chunk", "TOKENS", "tokens of a prefill step", 2048)
    command.add_argument(
        "--top-p",
        type=flags.number("above 0 and at most 1", lambda p: 0 < p <= 1),
        default=0.9,
        metavar="P",
        help="probability of the nucleus in which flips are counted",
    )
    command.add_argument(
        "--worst", type=flags.integer(0), default=10, metavar="N", help="number of worst positions to print"
    )
    flags.add_json(command, resumes=True)


def add_answers(command: ArgumentParser) -> None:
    """Add the flags of `qrt-eval answers`."""
    flags.add_model(command, several=True)
    flags.add_kvs(command, ["auto"])
    command.add_argument(
        "--baseline", metavar="MODEL", help="model whose answers to compare with (default: the first --model)"
    )
    flags.add_kv(command, "--baseline-kv", " of the baseline")
    command.add_argument(
        "--prompts",
        metavar="FILE",
        help="one user message per line, or rows of prompts or chats (default: 20 that qrt brings)",
    )
    flags.add_limit(command, "conversations")
    flags.add_count(command, "--max-tokens", "TOKENS", "most tokens of an answer", 256)
    command.add_argument(
        "--near-tie",
        type=flags.above_0,
        default=0.1,
        metavar="NATS",
        help="a difference is a near tie if the baseline's two likeliest tokens are closer than this",
    )
    flags.add_dtype(command)
    flags.add_json(command)


def add_lm(command: ArgumentParser) -> None:
    """Add the flags of `qrt-eval lm`."""
    flags.add_model(command)
    flags.add_kv(command)
    flags.add_several(
        command, "--tasks", str, required=True, metavar="TASK", help="tasks, by their names in lm-eval"
    )
    command.add_argument(
        "--include-path", metavar="FOLDER", help="folder with more task YAML files (default: none)"
    )
    command.add_argument(
        "--num-fewshot",
        type=flags.integer(0),
        metavar="N",
        help="examples before each question (default: the task's)",
    )
    flags.add_limit(command, "documents of each task")
    command.add_argument("--apply-chat-template", action="store_true", help="ask through the chat template")
    add_flags(command, EngineConfig, "max_model_len", type=flags.positive, aliases=())
    flags.add_dtype(command)
    flags.add_json(command)


def add_passkey(command: ArgumentParser) -> None:
    """Add the flags of `qrt-eval passkey`."""
    flags.add_model(command)
    flags.add_kvs(command, list(KV_FORMATS))
    flags.add_context(command)
    flags.add_several(
        command,
        "--depth",
        flags.number("from 0 to 1", lambda depth: 0 <= depth <= 1),
        default=[0.0, 0.25, 0.5, 0.75, 1.0],
        metavar="D",
        help="share of the context that stands before the key",
    )
    flags.add_count(command, "--trials", "N", "keys per length and depth", 4)
    flags.add_dtype(command)
    flags.add_seed(command, "the keys")
    flags.add_json(command)


def add_kv_error(command: ArgumentParser) -> None:
    """Add the flags of `qrt-eval kv-error`."""
    flags.add_kvs(command, list(KV_FORMATS), ("bf16", *KV_FORMATS))
    flags.add_context(command, [1024, 8192, 32768, 131072])
    for name, default, what in (
        ("head-dim", 128, "channels of a head"),
        ("num-heads", 4, "query heads"),
        ("num-kv-heads", 1, "KV heads"),
    ):
        flags.add_count(command, f"--{name}", "N", what, default)
    flags.add_seed(command, "the heads")
    flags.add_json(command)


def add_compare(command: ArgumentParser) -> None:
    """Add the flags of `qrt-eval compare`."""
    command.add_argument("results", nargs=2, metavar="RESULT.json", help="result files, before and after")
    command.add_argument(
        "--sigmas",
        type=flags.number("of at least 0", lambda value: 0 <= value < math.inf),
        default=2.0,
        metavar="S",
        help="differences below this many standard errors are treated as noise",
    )


def add_models(command: ArgumentParser) -> None:
    """Add the flags of `qrt-eval models`."""
    output = command.add_mutually_exclusive_group()
    output.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    output.add_argument(
        "--write",
        action="store_true",
        help="write the table into docs/models.md, the count into README.md",
    )
