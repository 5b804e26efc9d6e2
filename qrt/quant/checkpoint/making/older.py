"""The entries that transformers 4 and engines built on it read, beside those that transformers 5 writes.

They miss `rope_parameters` without a word, and take a theta of 10000.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# entries that a family calls something else: of RoPE's theta, and of the share of channels that turn
THETA, PARTIAL = "rope_theta", "partial_rotary_factor"
OWN_NAMES = {"gpt_neox": {THETA: "rotary_emb_base", PARTIAL: "rotary_pct"}}
OWN_NAMES["gpt_neox_japanese"] = OWN_NAMES["gpt_neox"]
FULL, LOCAL = "full_attention", "sliding_attention"
LOCAL_THETA = {"gemma3_text": "rope_local_base_freq", "gemma3": "rope_local_base_freq"}
# the entries, and no others, that these families take
LONGROPE: dict[str, tuple[str, ...]] = {"phi3": ("type", "short_factor", "long_factor")}
LONGROPE["phimoe"] = (*LONGROPE["phi3"], "short_mscale", "long_mscale", "original_max_position_embeddings")
EXTRA, OLDER_EXTRA = "extra_special_tokens", "additional_special_tokens"


def with_older_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json, or a part of one, with the older entries beside `rope_parameters`."""
    found = {key: with_older_entries(own) if _is_part(own, key) else own for key, own in config.items()}
    given = config.get("rope_parameters")
    if not isinstance(given, Mapping):
        return found
    kind = str(config.get("model_type"))
    whole = given.get(FULL, given)
    if isinstance(local := given.get(LOCAL), Mapping) and kind in LOCAL_THETA:
        found[LOCAL_THETA[kind]] = local.get(THETA)
    elif isinstance(local, Mapping) and local != {"rope_type": "default", THETA: whole.get(THETA)}:
        return found  # transformers 4 has no entries for it
    if any(isinstance(own, Mapping) for own in whole.values()):
        return found
    entry = config.get("rope_scaling") or whole  # which wins, as in transformers 5
    for name in (THETA, PARTIAL):
        if entry.get(name) is not None:
            found[OWN_NAMES.get(kind, {}).get(name, name)] = entry[name]
    scaling = {key: own for key, own in whole.items() if key not in (THETA, PARTIAL)}
    if kind in LONGROPE and "rope_type" in scaling and scaling["rope_type"] != "default":
        scaling = {"type": scaling.pop("rope_type"), **scaling}
        scaling = {key: own for key, own in scaling.items() if key in LONGROPE[kind]}
    if not found.get("rope_scaling") and scaling not in ({}, {"rope_type": "default"}):
        found["rope_scaling"] = scaling
    return found


def _is_part(value: Any, key: str) -> bool:
    return isinstance(value, Mapping) and key.endswith("_config") and key != "quantization_config"


def older_tokenizer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenizer_config.json with a class and names that transformers 4 knows.

    Beside it lies a tokenizer.json, which is all that the class reads.
    """
    found = dict(config)
    if str(config.get("tokenizer_class")).endswith("Backend"):
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get(EXTRA), list):
        found[OLDER_EXTRA] = found.pop(EXTRA)
    return found
