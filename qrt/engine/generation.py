"""Read a checkpoint's generation_config.json: where text ends, and how its makers sample."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qrt.errors import CheckpointError, ConfigError
from qrt.model_files.folder import is_file, read_json
from qrt.request.sampling import SamplingParams

logger = logging.getLogger(__name__)

# SAME, USED: our name -> name in the file. NOT_TAKEN: settings that change sampling but are ignored, with the
# value that means "off".
SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
USED = {**dict(zip(SAME, SAME, strict=True)), "max_tokens": "max_new_tokens"}
NOT_TAKEN = {
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "min_length": 0,
    "min_new_tokens": None,
    "stop_strings": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": None,
    "penalty_alpha": None,
    "num_beams": 1,
}


@dataclass(frozen=True)
class GenerationConfig:
    """The model makers' defaults.

    eos_token_ids   tokens that end the text
    sampling        used where the caller gives no SamplingParams, as in vLLM
    max_new_tokens  its max_tokens, if it names one
    """

    eos_token_ids: tuple[int, ...] = ()
    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int | None = None

    @classmethod
    def read(cls, folder: Path, *, sampling: bool = True) -> GenerationConfig:
        """Read `folder`/generation_config.json; without the file the settings are neutral.

        Logs each setting that changes sampling but is not supported. sampling=False reads only the tokens
        that end the text. Raises CheckpointError when the file is damaged or a broken link.
        """
        path = folder / "generation_config.json"
        if not is_file(path):
            return cls()
        entries = read_json(path)
        try:
            eos = entries.get("eos_token_id")
            ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
            named = tuple(map(int, ids))
            if not sampling:
                return cls(named)
            return cls(named, _sampling(entries), entries.get("max_new_tokens"))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{path}: {error}; correct or remove the file") from error


def _sampling(entries: dict[str, Any]) -> SamplingParams:
    for name, off in NOT_TAKEN.items():
        if entries.get(name) not in (None, off):
            logger.warning("generation_config.json: %s %s is not supported; ignored", name, entries[name])
    given = {ours: entries[theirs] for ours, theirs in USED.items() if entries.get(theirs) is not None}
    try:
        return SamplingParams(**given)
    except ConfigError as error:
        raise ValueError(str(error)) from error
