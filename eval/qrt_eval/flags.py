"""Flags of the evaluators that measure quality: ppl, kld, sweep, lm, passkey, kv-error."""

from __future__ import annotations

from argparse import ArgumentTypeError

from qrt.cli import ArgumentParser

KV_CHOICES = ("auto", "fp16", "bf16", "int8", "int4", "k8v4")
KV_FORMATS = ["fp16", "int8", "int4", "k8v4"]  # all of them: bf16 is another name of fp16's
PROTOCOLS = ("gptq", "llamacpp", "lmeval", "sliding")
MODEL_HELP = "checkpoint folder, or 'tiny'"


def positive(text: str) -> int:
    """The type of a flag that wants an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"got {text!r}, wanted an integer of at least 1")
    return int(text)


def add_json(command: ArgumentParser) -> None:
    """The result file."""
    command.add_argument("--json", metavar="FILE", help="write the result there")


def _add_resumable_json(command: ArgumentParser) -> None:
    command.add_argument(
        "--json",
        metavar="FILE",
        help="write the result there; an interrupted run is taken up by the same command",
    )


def add_kv(command: ArgumentParser) -> None:
    """One KV format."""
    command.add_argument("--kv", default="auto", choices=KV_CHOICES, help="KV format (default: unquantized)")


def _add_windows(command: ArgumentParser) -> None:
    """The text and how it is cut."""
    command.add_argument(
        "--protocol", default="gptq", choices=PROTOCOLS, help="how windows are cut and scored (default: gptq)"
    )
    command.add_argument(
        "--seqlen", type=int, help="tokens of a window (default: the protocol's, or the model's context)"
    )
    command.add_argument(
        "--stride",
        type=int,
        metavar="TOKENS",
        help="of --protocol sliding: new tokens of a window (default: 512)",
    )
    command.add_argument(
        "--limit", type=int, metavar="N", help="the first N windows only (lmeval: documents)"
    )
    command.add_argument("--data-file", metavar="PATH", help="local wiki.test.raw, instead of the download")
    command.add_argument("--dtype", default="auto", help="activations (default: float32 on a CPU)")


def add_ppl(command: ArgumentParser) -> None:
    """`qrt-eval ppl`."""
    command.add_argument("dataset", metavar="wikitext|pydoc|FILE|FOLDER", help="the text to score")
    command.add_argument("--model", required=True, help=MODEL_HELP)
    add_kv(command)
    command.add_argument("--baseline", metavar="MODEL", help="also score this one")
    command.add_argument(
        "--baseline-kv", default="auto", choices=KV_CHOICES, help="its KV format (default: unquantized)"
    )
    _add_windows(command)
    command.add_argument(
        "--batch-size", type=positive, default=8, metavar="N", help="windows at once (default: %(default)s)"
    )
    _add_resumable_json(command)


def add_kld(command: ArgumentParser) -> None:
    """`qrt-eval kld`."""
    command.add_argument(
        "dataset", nargs="?", metavar="wikitext|pydoc|FILE|FOLDER", help="the text to compare on"
    )
    command.add_argument("--model", required=True, nargs="+", help="checkpoint folders, or 'tiny'")
    command.add_argument(
        "--kv", nargs="+", default=["auto"], choices=KV_CHOICES, help="KV formats (default: unquantized)"
    )
    base = command.add_mutually_exclusive_group()
    base.add_argument("--baseline", metavar="MODEL", help="what to compare with (default: the first --model)")
    base.add_argument("--base-file", metavar="FILE", help="a baseline saved by --save-base, and its text")
    command.add_argument(
        "--baseline-kv", default="auto", choices=KV_CHOICES, help="the baseline's KV (default: unquantized)"
    )
    command.add_argument(
        "--save-base", metavar="FILE", help="keep the baseline's distributions for --base-file"
    )
    _add_windows(command)
    command.set_defaults(protocol=None)  # gptq, or that of --base-file
    command.add_argument(
        "--chunk",
        type=positive,
        default=2048,
        metavar="TOKENS",
        help="of a prefill step (default: %(default)s)",
    )
    command.add_argument(
        "--top-p", type=float, default=0.9, metavar="P", help="nucleus of the flips (default: %(default)s)"
    )
    command.add_argument(
        "--worst", type=positive, default=10, metavar="N", help="positions to show (default: %(default)s)"
    )
    _add_resumable_json(command)


def add_sweep(command: ArgumentParser) -> None:
    """`qrt-eval sweep`."""
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help=MODEL_HELP)
    source.add_argument("--shape", help="random weights of a known shape: bytes and speed only")
    command.add_argument("--weights", default="16,8,4,w8a8", help="schemes (default: %(default)s)")
    command.add_argument("--kv", default="fp16,int8,int4", help="KV formats (default: %(default)s)")
    command.add_argument(
        "--checkpoint", action="append", default=[], metavar="SCHEME=FOLDER",
        help="use this checkpoint instead of making one; may be repeated",
    )  # fmt: skip
    command.add_argument("--out", metavar="FOLDER", help="where everything goes (default: sweep-NAME)")
    command.add_argument("--dataset", default="pydoc", help="the text (default: %(default)s)")
    _add_windows(command)
    command.set_defaults(seqlen=1024, limit=16)
    command.add_argument(
        "--memory-gib", type=float, default=80.0, metavar="GIB", help="that requests share (default: 80)"
    )
    command.add_argument(
        "--context",
        type=positive,
        default=8192,
        metavar="TOKENS",
        help="of each of them (default: %(default)s)",
    )
    command.add_argument(
        "--batch", type=positive, default=32, metavar="B", help="of the speed (default: %(default)s)"
    )
    command.add_argument(
        "--num-prompts", type=positive, metavar="N", help="of the speed (default: twice the batch)"
    )
    command.add_argument(
        "--input-len", type=positive, default=128, metavar="TOKENS", help="(default: %(default)s)"
    )
    command.add_argument(
        "--output-len", type=positive, default=64, metavar="TOKENS", help="(default: %(default)s)"
    )
    command.add_argument(
        "--repeats", type=positive, default=3, metavar="N", help="the median counts (default: 3)"
    )
    command.add_argument("--seed", type=int, default=0, help="of the random prompts")


def add_lm(command: ArgumentParser) -> None:
    """`qrt-eval lm`."""
    command.add_argument("--model", required=True, help=MODEL_HELP)
    add_kv(command)
    command.add_argument("--tasks", required=True, help="lm-eval's names, comma-separated")
    command.add_argument("--include-path", metavar="FOLDER", help="of further task YAML files")
    command.add_argument("--num-fewshot", type=int, metavar="N", help="examples before each question")
    command.add_argument("--limit", type=int, metavar="N", help="the first N documents of each task")
    command.add_argument("--apply-chat-template", action="store_true", help="ask as a conversation")
    command.add_argument(
        "--max-model-len", type=positive, metavar="TOKENS", help="(default: the model's context)"
    )
    command.add_argument("--dtype", default="auto", help="activations (default: float32 on a CPU)")
    add_json(command)


def add_passkey(command: ArgumentParser) -> None:
    """`qrt-eval passkey`."""
    command.add_argument("--model", required=True, help=MODEL_HELP)
    command.add_argument(
        "--kv",
        nargs="+",
        default=KV_FORMATS,
        choices=KV_CHOICES,
        help="KV formats (default: all)",
    )
    command.add_argument(
        "--context",
        type=positive,
        nargs="+",
        metavar="TOKENS",
        help="(default: doubling from 512 to the model's)",
    )
    command.add_argument(
        "--depth", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0], metavar="D",
        help="where the key is, 0 the beginning (default: 0 0.25 0.5 0.75 1)",
    )  # fmt: skip
    command.add_argument(
        "--trials", type=positive, default=4, metavar="N", help="keys at each place (default: 4)"
    )
    command.add_argument("--dtype", default="auto", help="activations (default: float32 on a CPU)")
    command.add_argument("--seed", type=int, default=0, help="of the keys")
    add_json(command)


def add_kv_error(command: ArgumentParser) -> None:
    """`qrt-eval kv-error`."""
    command.add_argument(
        "--kv",
        nargs="+",
        default=KV_FORMATS,
        choices=KV_CHOICES[1:],
        help="KV formats (default: all)",
    )
    command.add_argument(
        "--context", type=positive, nargs="+", default=[1024, 8192, 32768, 131072], metavar="TOKENS",
        help="(default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--head-dim", type=positive, default=128, metavar="D", help="(default: %(default)s)")
    command.add_argument("--num-heads", type=positive, default=4, metavar="Hq", help="(default: %(default)s)")
    command.add_argument(
        "--num-kv-heads", type=positive, default=1, metavar="Hkv", help="(default: %(default)s)"
    )
    command.add_argument("--seed", type=int, default=0, help="of the heads")
    add_json(command)
