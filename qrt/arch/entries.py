"""Read and check entries of a config.json; CheckpointError names the one that is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from qrt.errors import CheckpointError, UnsupportedError

# The most that a config.json may ask for; checked before anything is allocated.
MAX_SIZE, MAX_LAYERS = 2**24, 2**12

# Entries that change what a model computes, and the values that change nothing. A family that does not read
# one of them computes something else than the config asks for.
MEANINGFUL: Mapping[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "decoder_sparse_step": (1,),
    "dim_model_base": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "first_k_dense_replace": (),
    "hidden_activation": (),
    "is_causal": (True,),
    "kv_lora_rank": (),
    "layer_norm_eps": (),
    "layer_norm_epsilon": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_only_layers": ([],),
    "moe_layer_freq": (1,),
    "moe_num_experts": (0,),
    "n_group": (0, 1),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "no_rope_layer_interval": (),
    "no_rope_layers": (),
    "norm_eps": (),
    "norm_epsilon": (),
    "norm_topk_prob": (),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "parallel_attn": (False,),
    "qk_layernorm": (False,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_local_base_freq": (),
    "rotary_dim": (),
    "rotary_pct": (1,),
    "routed_scaling_factor": (0, 1),
    "scale_depth": (),
    "scale_emb": (1,),
    "scoring_func": (),
    "shared_expert_intermediate_size": (0,),
    "shared_intermediate_size": (0,),
    "swiglu_limit": (),
    "topk_method": (),
    "use_bidirectional_attention": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
}


class Entries(Mapping[str, Any]):
    """The entries of a config.json as one family reads them: with its names and its defaults.

    It remembers what was read, so that `refuse_unread` can name what the family does not know.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        architecture: str,
        defaults: Mapping[str, Any] | None = None,
        aliases: Mapping[str, str] | None = None,
        read: set[str] | None = None,
    ) -> None:
        """`architecture` is the name in config.json; `aliases` maps a common name to the family's own."""
        self._config, self.architecture = config, architecture
        self._defaults, self._aliases = defaults or {}, aliases or {}
        self._read = set() if read is None else read

    def filled(self, aliases: Mapping[str, str] | None = None, /, **defaults: Any) -> Entries:
        """Return the same entries with a family's `defaults` for those that config.json leaves out.

        Defaults that were set before win: the family that differs sets its own first.
        """
        known = {**defaults, **self._defaults}
        own = {**(aliases or {}), **self._aliases}
        return Entries(self._config, self.architecture, known, own, self._read)

    def default(self, key: str) -> Any:
        """Return the family's default of an entry."""
        return self._defaults.get(key)

    def __getitem__(self, key: str) -> Any:
        for name in (self._aliases.get(key, key), key):
            self._read.add(name)
            if name in self._config:
                return self._config[name]
        return self._defaults[key]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._defaults, **self._config})

    def __len__(self) -> int:
        return len({**self._defaults, **self._config})

    def name(self, key: str) -> str:
        """Return the name of an entry in messages: that in config.json, or the family's own."""
        own = self._aliases.get(key, key)
        return key if key in self._config and own not in self._config else own

    def refuse_unread(self) -> None:
        """Raise UnsupportedError for an entry that changes the result and that the family did not read."""
        for key in sorted(MEANINGFUL.keys() & self._config.keys() - self._read):
            if (value := self._config[key]) is not None and value not in MEANINGFUL[key]:
                raise UnsupportedError(
                    f"config.json: {key}: expected none in a {self.architecture}, got {value!r}; "
                    "'architectures' must name the class that the model was trained as"
                )


def typed(config: Mapping[str, Any], key: str, *kinds: type | None) -> Any:
    """Return an entry that must be of one of `kinds`; None among them allows null."""
    value = config.get(key)
    if not any(value is None if kind is None else isinstance(value, kind) for kind in kinds):
        expected = " or ".join("null" if kind is None else kind.__name__ for kind in kinds)
        raise CheckpointError(f"config.json: {_name(config, key)}: expected {expected}, got {value!r}")
    return value


def positive(config: Mapping[str, Any], key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
    """Return a whole number from 1 to `most`; the default, if there is one, for null or a missing entry."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(
            f"config.json: {_name(config, key)}: expected a positive integer, got {value!r}"
        )
    if value > most:
        raise CheckpointError(
            f"config.json: {_name(config, key)}: expected at most {most:,}, got {str(value)[:20]}"
        )
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a number above 0; the default, if there is one, for null or a missing entry."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {_name(config, key)}: expected a positive number, got {value!r}")
    return float(value)


def optional(config: Mapping[str, Any], key: str) -> float | None:
    """Return a number above 0, or None for null or a missing entry."""
    return None if config.get(key) is None else number(config, key)


def expect(config: Mapping[str, Any], key: str, *values: Any) -> None:
    """Raise UnsupportedError unless an entry has one of the `values` that qrt runs, or is left out."""
    if (came := config.get(key, values[0])) not in values:
        expected = " or ".join(map(repr, values))
        raise UnsupportedError(
            f"config.json: {_name(config, key)}: expected {expected}, got {came!r}; qrt runs no other"
        )


def token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Return the token ids of an entry that holds one, a list of them, or none."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(token, int) for token in ids):
        raise CheckpointError(f"config.json: {key}: expected a token id or a list of them, got {value!r}")
    return tuple(ids)


def _name(config: Mapping[str, Any], key: str) -> str:
    return config.name(key) if isinstance(config, Entries) else key
