"""Settings, flags and methods of other engines that qrt does not have, and the rules for refusing them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from qrt.errors import UnsupportedError

ANY = (object(),)  # for `Unsupported.no_effect`: no value changes anything


@dataclass(frozen=True)
class Unsupported:
    """A setting, flag, request field or argument of other engines that qrt does not have.

    remedy       what to do instead
    no_effect    the values that change nothing; None, "" and [] are always among them
    only_with    names that it depends on: it counts only if one of them is set (empty: always)
    """

    remedy: str
    no_effect: tuple[Any, ...] = ()
    only_with: tuple[str, ...] = ()

    def has_no_effect(self, value: Any) -> bool:
        """Return whether this value changes nothing; null members of an object do not count."""
        if self.no_effect is ANY or value is None:
            return True
        if isinstance(value, Mapping):
            value = {key: inner for key, inner in value.items() if inner is not None}
        elif isinstance(value, (str, list, tuple)) and not value:
            return True
        plain = isinstance(value, (bool, int, float, str, list, dict))  # an array has no single truth value
        return plain and value in self.no_effect


def named(*rows: tuple[Any, ...]) -> dict[str, Unsupported]:
    """Make a table from rows: names in one string, remedy, `no_effect`, and optionally `only_with`."""
    return {
        name: Unsupported(remedy, no_effect, tuple(leads[0].split()) if leads else ())
        for names, remedy, no_effect, *leads in rows
        for name in names.split()
    }


def refused(
    table: Mapping[str, Unsupported], given: Mapping[str, Any], names: Iterable[str]
) -> Iterator[str]:
    """Yield a line for each name that asks, by its value in `given`, for something that is not run."""
    for name in sorted(names):
        entry = table.get(name)
        if entry is None or entry.has_no_effect(given[name]):
            continue
        if not entry.only_with or any(
            not table[lead].has_no_effect(given.get(lead)) for lead in entry.only_with
        ):
            yield f"{name}: {entry.remedy}"


def refuse(table: Mapping[str, Unsupported], given: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise UnsupportedError if some of `names` ask for something that is not run; list their remedies."""
    if lines := list(refused(table, given, names)):
        raise UnsupportedError("; ".join(lines))


_ONE_HOST = "qrt runs on the GPUs of one host; see --tensor-parallel-size"
_CHUNKS = "prompts are prefilled in chunks; a step takes at most --max-num-batched-tokens"
_CHECKPOINT = "the weight scheme comes from the checkpoint; make one with qrt-calibrate"
_SPECULATION = "speculative decoding is not supported"
_ADAPTERS = "adapters are not supported; merge them into the checkpoint"
_GRAPHS = "see --cudagraph-capture-sizes and --enforce-eager"
_GRAMMARS = "one library makes all shapes of answers; leave it out"
_TEXT_ONLY = "only text is supported"
_CONFIG = "the checkpoint's config.json decides it; change it there"
_POOLING = "give --runner pooling, and --convert embed, classify or reward"

# Settings of LLM and flags of qrt-serve (with dashes) that vLLM and LightLLM have and qrt does not.
SETTINGS = named(
    ("trust_remote_code", "qrt never runs a model's own code", (False,)),
    ("load_way", "qrt reads safetensors only", ("HF",)),
    ("quantization q quant_type quant_cfg", _CHECKPOINT, ()),
    ("pipeline_parallel_size pp nnodes", _ONE_HOST, (1,)),
    ("data_parallel_size dp dp_size", "qrt-serve takes it; an LLM is one engine, so make several", (1,)),
    ("node_rank data_parallel_rank", _ONE_HOST, (0,)),
    ("master_addr master_port nccl_host nccl_port worker_extension_cls", _ONE_HOST, ()),
    ("distributed_executor_backend worker_cls", _ONE_HOST, ("mp", "uni", "auto")),
    ("enable_expert_parallel enable_eplb", _ONE_HOST, (False,)),
    ("disable_custom_all_reduce max_parallel_loading_workers ray_workers_use_nsight", _ONE_HOST, ANY),
    ("max_total_token_num num_gpu_blocks_override", "give the pool as --kv-cache-memory-bytes", ()),
    ("block_size", "KV memory is allocated by the token, not by the block", ()),
    ("kv_group_size llm_kv_quant_group_size", "the KV format decides its groups: a scale per half head", ()),
    ("kv_scales kv_quant_calibration_config_path", "no KV format needs calibration", ()),
    ("calculate_kv_scales", "no KV format needs calibration", (False,)),
    ("tokenizer_mode", "qrt uses fast tokenizers only", ("auto", "hf")),
    ("skip_tokenizer_init", "prompts may be token ids, but the tokenizer is always loaded", (False,)),
    ("enable_chunked_prefill", _CHUNKS, (True,)),
    ("no_enable_chunked_prefill disable_chunked_prefill chunked_prefill_size", _CHUNKS, ()),
    ("long_prefill_token_threshold", _CHUNKS, (0,)),
    ("router_max_wait_tokens router_token_ratio", "see --admission", ()),
    ("preemption_mode", "paused requests keep what fits of their K and V; see --admission", ()),
    ("graph_max_batch_size graph_split_batch_size graph_grow_step_size", _GRAPHS, ()),
    ("compilation_config", _GRAPHS, ({},)),
    ("max_seq_len_to_capture num_scheduler_steps num_lookahead_slots", _GRAPHS, ANY),
    ("disable_async_output_proc use_v2_block_manager", _GRAPHS, ANY),
    ("guided_decoding_backend structured_outputs_backend", _GRAMMARS, ("auto", "xgrammar", "guidance")),
    ("structured_outputs_config", _GRAMMARS, ({},)),
    ("output_constraint_mode", _GRAMMARS, ("none", "outlines", "xgrammar")),
    ("speculative_config", _SPECULATION, ({},)),
    ("speculative_model num_speculative_tokens spec_method spec_model spec_tokens", _SPECULATION, ()),
    ("mtp_mode mtp_draft_model_dir mtp_step", _SPECULATION, ()),
    ("stream_interval", "each chunk holds all text since the last one", (1,)),
    ("health_monitor", "probe /health, which fails when the engine is stuck; see --watchdog-timeout", ()),
    ("metric_gateway otlp_traces_endpoint", "let Prometheus read /metrics", ()),
    ("diverse_mode", "the outputs of one prompt (n) always share its K and V", ()),
    ("token_healing_mode", "token healing is not supported", ()),
    ("enable_lora enable_prompt_adapter", _ADAPTERS, (False,)),
    ("lora_modules", _ADAPTERS, ()),
    # these count only where enable_lora is true
    ("max_loras max_lora_rank max_cpu_loras fully_sharded_loras enable_lora_bias", _ADAPTERS, ANY),
    ("lora_extra_vocab_size lora_dtype long_lora_scaling_factors", _ADAPTERS, ANY),
    ("max_prompt_adapters max_prompt_adapter_token", _ADAPTERS, ANY),
    ("swap_space", "weights and KV stay on the device; use fewer bits, or a smaller pool", (0, 4)),
    ("cpu_offload_gb", "weights and KV stay on the device; use fewer bits, or a smaller pool", (0,)),
    ("kv_transfer_config kv_connector", "K and V stay in one engine", ({},)),
    ("log_config_file", "log lines go to stderr; see --log-level", ()),
    ("disable_log_stats", "an LLM writes no statistics; read llm.engine", (True,)),
    ("task", _POOLING, ("auto", "generate")),
    ("override_pooler_config", "its name here is pooler_config", ({},)),
    ("rope_scaling rope_theta", _CONFIG, ({},)),
    ("disable_sliding_window", "the context is cut to the sliding window; see --max-model-len", (False,)),
    ("override_generation_config", "give SamplingParams; see --generation-config", ({},)),
    ("config_format", _CONFIG, ("auto", "hf")),
    ("model_impl", "qrt runs its own layers only", ("auto", "vllm")),
    ("logits_processors", "logits processors are not supported; see logit_bias and allowed_token_ids", ()),
    ("logprobs_mode", "log-probabilities are the model's own, before penalties", ("raw_logprobs",)),
    ("max_logprobs", "an LLM gives up to 20 log-probabilities a token", (5, 20)),
    ("limit_mm_per_prompt mm_processor_kwargs media_io_kwargs", _TEXT_ONLY, ({},)),
    ("allowed_local_media_path language_model_only", _TEXT_ONLY, (True,)),
    ("enable_prompt_embeds", "prompts are text or token ids", (False,)),
    ("enable_sleep_mode", "weights stay on the device; end the process to free it", (False,)),
    ("chat_template_content_format", "qrt finds the form that the template reads; leave it out", ("auto",)),
    ("response_role", "answers have the role assistant", ("assistant",)),
    ("enable_reasoning", "see --reasoning-parser", (False, True)),
    ("model_loader_extra_config additional_config", "qrt has no extension that reads it", ({},)),
    ("scheduler_cls", "see --scheduling-policy", ()),
    ("scheduler_delay_factor max_num_partial_prefills max_long_partial_prefills", _CHUNKS, (0, 1)),
    ("cuda_graph_sizes", _GRAPHS, ()),
    # these are about parts that qrt does not have, or that need no setting
    ("disable_cascade_attn prefix_caching_hash_algo attention_backend uvicorn_log_level", "", ANY),
    ("tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config use_tqdm_on_load", "", ANY),
    ("disable_mm_preprocessor_cache mm_processor_cache_gb skip_mm_profiling", "", ANY),
    ("multi_step_stream_outputs disable_hybrid_kv_cache_manager pt_load_map_location", "", ANY),
    ("show_hidden_metrics_for_version collect_detailed_traces ignore_patterns", "", ANY),
)  # fmt: skip

# Flags of vLLM's server that take no value and ask for what qrt-serve does anyway.
SWITCHES = frozenset(
    "--enable-chunked-prefill --disable-custom-all-reduce --disable-log-requests --no-enable-log-requests "
    "--disable-frontend-multiprocessing --disable-async-output-proc --use-v2-block-manager "
    "--disable-uvicorn-access-log --disable-fastapi-docs --enable-prompt-tokens-details "
    "--enable-server-load-tracking --enable-tokenizer-info-endpoint --disable-cascade-attn".split()
)


def setting(name: str) -> Unsupported | None:
    """Return the entry of a setting, or of the flag with that name; None for an unknown one."""
    return SETTINGS.get(name.lstrip("-").replace("-", "_"))


def has_no_effect(name: str, value: object) -> bool:
    """Return whether this value of a setting or flag changes nothing; a flag's value is a word."""
    entry = setting(name)
    if entry is None:
        return False
    return entry.has_no_effect(value) or value in [str(each) for each in (None, *entry.no_effect)]


# Methods that vLLM's LLM and AsyncLLM have and qrt's do not.
METHODS = {
    name: remedy
    for names, remedy in (
        ("beam_search", "beam search is not supported; use generate with n or best_of"),
        ("embed classify reward", "use LLM, or AsyncLLM.encode"),
        ("sleep wake_up is_sleeping", "weights stay on the device; drop the object to free them"),
        ("pause_generation resume_generation is_paused", "abort requests, or start no new ones"),
        ("add_lora remove_lora list_loras pin_lora", _ADAPTERS),
        ("collective_rpc apply_model scale_elastic_ep", "the engine is one object; read llm.engine"),
        ("get_metrics do_log_stats", "qrt-serve has /metrics; an LLM writes no statistics"),
        ("start_profile stop_profile", "use torch.profiler around generate"),
        ("set_tokenizer", "give tokenizer= to LLM"),
        ("preprocess_chat", "call get_tokenizer().apply_chat_template"),
        ("add_request enqueue wait_for_completion", "use generate"),
        ("update_weights reload_weights", "make a new object from the new checkpoint"),
    )
    for name in names.split()
}


def refuse_method(owner: str, name: str) -> Callable[..., NoReturn]:
    """Return a stand-in for a method of METHODS; calling it raises UnsupportedError with the remedy.

    AttributeError for any other name, as Python itself raises.
    """
    if name not in METHODS:
        raise AttributeError(f"{owner!r} object has no attribute {name!r}")

    def call(*arguments: Any, **named: Any) -> NoReturn:
        raise UnsupportedError(f"{owner}.{name}: {METHODS[name]}")

    return call
