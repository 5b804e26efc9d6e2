"""Write result files: one JSON object per run, with everything needed to repeat it.

schema.json describes them.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from qrt.engine.engine import Engine
from qrt.model_files.location import model_commit, model_name, pinned_name
from qrt.offline.llm import LLM
from qrt.quant.checkpoint import open_checkpoint
from qrt.version import __version__
from qrt_eval.inputs.preflight import models_of
from qrt_eval.inputs.text import EvalText

SCHEMA = Path(__file__).with_name("schema.json")
SCHEMA_VERSION = 1
PACKAGES = ("torch", "triton", "transformers")
SAMPLE_BYTES = 1 << 20  # hashed at the end of each shard; see checkpoint_sha256


def environment() -> dict[str, Any]:
    """Return the device, library versions and commit of this run."""
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else f"{_cpu()}, {torch.get_num_threads()} threads",
        "cuda": torch.version.cuda if gpu else None,
        "python": platform.python_version(),
        "versions": {"qrt": __version__} | {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _cpu() -> str:
    """Return the processor's name, as far as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the checkout's commit, with "+" if files differ from it; None outside a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def command_facts(arguments: Namespace) -> dict[str, Any]:
    """Return which command ran with which flags: enough to run it again."""
    left_out = ("command", "json", "api_key")
    flags = {name: value for name, value in vars(arguments).items() if name not in left_out}
    if arguments.command != "serve":
        flags |= models_of(flags, lambda _, model: pinned_name(model))
    flags = {
        name: "inf" if value == float("inf") else value for name, value in flags.items()
    }  # JSON has no infinity
    return {"command": arguments.command, "arguments": flags}


def text_facts(text: EvalText) -> dict[str, Any]:
    """Return which text was read."""
    return {"dataset": text.name, "source": text.source, "text_sha256": text.sha256}


def model_facts(llm: LLM) -> dict[str, Any]:
    """Return which model ran, and how."""
    config = llm.engine.config
    tokenizer = llm.tokenizer.backend_tokenizer.to_str()
    return {
        **engine_facts(llm.engine, config.model),
        "model_sha256": checkpoint_sha256(config.model),
        "tokenizer_sha256": hashlib.sha256(tokenizer.encode()).hexdigest(),
    }


def engine_facts(engine: Engine, model: str) -> dict[str, Any]:
    """Return what an engine runs, which may be random weights of a shape.

    `weights` names the scheme of the layers, and of the head if it is quantized.
    """
    head = engine.model.head.scheme
    return {
        "model": model_name(model),
        "model_revision": model_commit(model),
        "weights": engine.model.scheme + ("" if head == "fp16" else f", head {head}"),
        "kv": kv_name(engine),
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "weight_bytes": engine.model.num_bytes,
        "kv_bytes_per_token": engine.kv_bytes_per_token,
        "seed": engine.config.seed,
    }


def kv_name(engine: Engine) -> str:
    """Return the KV format, e.g. "int8", or "fp16+int4" if layers differ."""
    return "+".join(dict.fromkeys(format.name for format in engine.formats))


def checkpoint_sha256(model: str) -> str:
    """Return a hash that tells checkpoints apart within milliseconds.

    It covers config.json and, of each shard, its size, its header and its last MiB.
    """
    digest, folder = hashlib.sha256(), Path(open_checkpoint(model, weights=False).path)
    digest.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            digest.update(f"{path.name} {size}\n".encode() + file.read(min(length, size)))
            file.seek(max(0, size - SAMPLE_BYTES))
            digest.update(file.read())
    return digest.hexdigest()


def sha256_of(path: str | Path) -> str:
    """Return the hash of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def save(arguments: Namespace, result: Mapping[str, Any]) -> None:
    """Write a command's result with `command_facts` to its --json, if given, and say so."""
    if arguments.json:
        write_json(arguments.json, {**command_facts(arguments), **result})
        print(f"result written to {arguments.json}", file=sys.stderr)


def write_json(path: str | Path, result: Mapping[str, Any]) -> None:
    """Write `result` with the schema's version, the date and the environment; make folders as needed.

    The file appears whole or not at all.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "schema_version": SCHEMA_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    part = target.with_name(target.name + ".writing")
    part.write_text(json.dumps({**about, **result, "environment": environment()}, indent=2) + "\n")
    part.replace(target)
