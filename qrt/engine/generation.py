"""What a checkpoint's generation_config.json says: where text ends, and how its makers sample."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qrt.config import SamplingParams
from qrt.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

# our name -> theirs; and theirs that change what is sampled, which qrt does not run, with their "off"
SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
USED = {**dict(zip(SAME, SAME, strict=True)), "max_tokens": "max_new_tokens"}
NOT_RUN = {"typical_p": 1.0, "no_repeat_ngram_size": 0}


@dataclass(frozen=True)
class GenerationConfig:
    """The model makers' defaults.

    eos_token_ids   tokens that end the text
    sampling        used where the caller gives no SamplingParams, as in vLLM
    """

    eos_token_ids: tuple[int, ...] = ()
    sampling: SamplingParams = SamplingParams()

    @classmethod
    def read(cls, folder: Path) -> GenerationConfig:
        """From `folder`/generation_config.json; neutral without the file, CheckpointError when it is damaged.

        A setting that qrt does not run is logged by name.
        """
        path = folder / "generation_config.json"
        if not path.is_file():
            return cls()
        try:
            entries = json.loads(path.read_text())
            eos = entries.get("eos_token_id")
            ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
            return cls(tuple(int(token) for token in ids), _sampling(entries))
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: {error}; correct or remove the file") from error


def _sampling(entries: dict[str, Any]) -> SamplingParams:
    for name, off in NOT_RUN.items():
        if entries.get(name) not in (None, off):
            logger.warning("generation_config.json: %s %s is not run by qrt", name, entries[name])
    given = {ours: entries[theirs] for ours, theirs in USED.items() if entries.get(theirs) is not None}
    try:
        return SamplingParams(**given)
    except ConfigError as error:
        raise ValueError(str(error)) from error
