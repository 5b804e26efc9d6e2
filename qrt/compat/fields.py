"""Request fields and Python arguments of other engines that qrt does not run, with what to do instead.

They come from OpenAI, vLLM, SGLang, TGI, LightLLM, LMDeploy, llama.cpp, Ollama, transformers and their web
pages. A name is looked up only where a route or class does not define it: `max_tokens` is a field of
/v1/completions, but for /generate it is another server's name for `max_new_tokens`.

Fields that change no result (user, metadata, store, service_tier, keep_alive, ...) are not listed; requests
may have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qrt.compat.settings import ANY, named, refuse
from qrt.errors import ConfigError
from qrt.registry import nearest

_SHAPE = "give it in structured_outputs"
_SAMPLER = "this sampler is not supported; leave it out, or use temperature, top_k, top_p and min_p"
_BEAMS = "beam search is not supported; leave it out, or use n or best_of"
_PENALTIES = "this penalty is not supported; use repetition_penalty, frequency_penalty or presence_penalty"
_PENALTY_RANGE = "penalties count the whole text, not a part of it; leave it out"
_PROCESSORS = "logits processors are not supported; use logit_bias, allowed_token_ids or bad_words"
_LENGTH = "its name here is max_tokens (in /generate max_new_tokens)"
_LEAST = "its name here is min_tokens (in /generate min_new_tokens)"
_TEXT_ONLY = "only text is supported; leave it out"
_ADAPTERS = "adapters are not supported; merge them into the checkpoint"
_BUDGET = "its name here is thinking_token_budget"
_CHAT = "it belongs to /v1/chat/completions"
_OPENAI = "this route does not have it; ask /v1/completions"
_LOGPROBS = "use logprobs (in a chat logprobs: true and top_logprobs)"
_REPLY = "replies do not contain what it asks for; leave it out"
_MIDDLE = "filling in the middle is not supported; put the model's own tokens for it into the prompt"
_SHORTEN = "prompts are never cut; shorten it yourself"
_TOKENS = "give the token ids as the prompt"
_SERVICE = "qrt only generates text; leave it out"
_MEMBERS = "give its members as fields of the request (for /generate in parameters)"
_PENALTY_NAMES = "repetition_penalty repeat_penalty frequency_penalty presence_penalty"

# Fields that change the prompt. /tokenize checks no others, because clients send it bodies of other routes.
PROMPT_FIELDS = named(
    ("functions", "give them as tools, each {type: function, function: ...}", ()),
    ("system", "send it as a message of the role system", ()),
    ("template raw context", "/v1/completions takes prompts as they are, chats go by the template", (False,)),
    ("chat_template_content_format", "qrt finds the form that the template reads; leave it out", ("auto",)),
    ("options parameters sampling_params extra_body", _MEMBERS, ({},)),
    ("suffix input_prefix input_suffix input_extra", _MIDDLE, ()),
    ("truncate_prompt_tokens truncate truncation_length", _SHORTEN, ()),
    ("truncation_side", _SHORTEN, (), "truncate_prompt_tokens"),
    ("input_ids prompt_token_ids", _TOKENS, ()),
    ("prompt_embeds input_embeds", "prompts are text or token ids", ()),
    ("add_bos_token", "its name here is add_special_tokens", (True,)),
    ("images image_data image_url video_data audio_data images_config", _TEXT_ONLY, ()),
    ("multi_modal_data multi_modal_uuids", _TEXT_ONLY, ({},)),
    ("mm_processor_kwargs media_io_kwargs tokenization_kwargs", _TEXT_ONLY, ({},)),
    ("max_dynamic_patch min_dynamic_patch use_audio_in_video", _TEXT_ONLY, (False,)),
    ("add_special", "its name here is add_special_tokens", ()),
    ("with_pieces", "its name here is return_token_strs", (False,)),
)  # fmt: skip

# The same where vectors and scores are made of prompts, with those that change the vectors.
POOLING_FIELDS = PROMPT_FIELDS | named(
    ("truncate truncation_length", "its name here is truncate_prompt_tokens", (False, "NONE")),
    ("max_tokens_per_doc max_chunks_per_doc", "give truncate_prompt_tokens, which cuts documents", ()),
    ("rank_fields", "documents are texts; join their fields", ()),
    ("embed_dtype output_dtype", "numbers are fp32; convert them yourself", ("float32", "float")),
    ("embedding_types", "use encoding_format: float or base64", (["float"],)),
    ("endianness", "base64 is of little-endian numbers", ("native", "little")),
    ("padding", "prompts are not padded", ("do_not_pad",)),
    ("step_tag_id returned_token_ids", "ask /pooling for all tokens and choose yourself", ()),
    ("input_type prompt_name", "write the model's instruction into the text", ()),
)  # fmt: skip

# Fields of a message: Ollama sends pictures this way, and no template would show them.
MESSAGE_FIELDS = named(("images audio videos", _TEXT_ONLY, ()))

FIELDS = PROMPT_FIELDS | named(
    # the shape of the answer
    ("grammar grammar_string json_schema regex ebnf regular_constraint format", _SHAPE, ()),
    ("guided_json guided_regex guided_choice guided_grammar guided_json_object", _SHAPE, (False,)),
    ("guided_decoding guided_options_request structured_outputs", _SHAPE, ()),
    ("guided_whitespace_pattern", "its name in structured_outputs is whitespace_pattern", ()),
    ("response_format", _SHAPE, ({"type": "text"},)),
    ("structural_tag", "structural tags are not supported; use grammar in structured_outputs", ()),
    ("guided_decoding_backend grammar_lazy grammar_triggers", "", ANY),
    # samplers
    ("mirostat mirostat_mode dry_multiplier xtc_probability dynatemp_range top_a", _SAMPLER, (0,)),
    ("mirostat_tau mirostat_eta", _SAMPLER, (), "mirostat mirostat_mode"),
    ("dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers", _SAMPLER, (), "dry_multiplier"),
    ("xtc_threshold", _SAMPLER, (), "xtc_probability"),
    ("dynatemp_exponent", _SAMPLER, (), "dynatemp_range dynamic_temperature"),
    ("dynamic_temperature", _SAMPLER, (False,)),
    ("dynatemp_low dynatemp_high dynatemp_min dynatemp_max", _SAMPLER, (0,), "dynamic_temperature"),
    ("top_n_sigma nsigma", _SAMPLER, (0, -1)),
    ("typical_p typical tfs tfs_z", _SAMPLER, (1,)),
    ("epsilon_cutoff eta_cutoff smoothing_factor skew penalty_alpha top_h", _SAMPLER, (0,)),
    ("smoothing_curve", _SAMPLER, (1,), "smoothing_factor"),
    ("adaptive_target", _SAMPLER, (-1,)),
    ("adaptive_decay", _SAMPLER, (), "adaptive_target"),
    ("min_keep", _SAMPLER, (0, 1)),
    ("samplers sampler_order sampler_priority", "samplers run in one order: min_p, top_k, top_p", ()),
    ("temperature_last", "temperature comes before min_p, top_k and top_p", (False,)),
    ("guidance_scale cfg_scale", "guidance is not supported; leave it out", (0, 1)),
    ("negative_prompt negative_prompt_ids", "guidance is not supported; leave it out", ()),
    ("watermark watermarking", "watermarks are not supported; leave it out", (False,)),
    ("logits_processors custom_logit_processor", _PROCESSORS, ()),
    ("custom_params", _PROCESSORS, ({},)),
    ("suppress_tokens begin_suppress_tokens banned_tokens custom_token_bans bad_words_ids", _PROCESSORS, ()),
    ("banned_strings invalid_token_ids sequence_bias", _PROCESSORS, ()),
    ("forced_eos_token_id forced_bos_token_id", _PROCESSORS, ()),
    ("allowed_token_ids logit_bias bad_words", _OPENAI, ({},)),
    # penalties
    ("repetition_penalty", _OPENAI, (1,)),
    ("presence_penalty frequency_penalty", _OPENAI, (0,)),
    ("repeat_penalty", "its name here is repetition_penalty", (1,)),
    ("no_repeat_ngram_size encoder_no_repeat_ngram_size repetition_decay", _PENALTIES, (0,)),
    ("encoder_repetition_penalty", _PENALTIES, (1,)),
    ("repeat_last_n", _PENALTY_RANGE, (-1,), _PENALTY_NAMES),
    ("repetition_penalty_range", _PENALTY_RANGE, (0, -1), _PENALTY_NAMES),
    ("penalize_nl penalize_newline", _PENALTY_RANGE, (True,), _PENALTY_NAMES),
    ("input_penalty", "repetition_penalty sees the prompt too, the others do not", (), _PENALTY_NAMES),
    ("exponential_decay_length_penalty", "this route does not have it; ask /generate", ()),
    # beams
    ("use_beam_search early_stopping", _BEAMS, (False,)),
    ("num_beams num_beam num_beam_groups beam_width length_penalty", _BEAMS, (1,)),
    ("diversity_penalty beam_search_diversity_rate", _BEAMS, (0,)),
    # length and end
    ("n_predict num_predict max_new_tokens max_output_tokens max_length request_output_len", _LENGTH, ()),
    ("max_tokens max_completion_tokens", _LENGTH, ()),
    ("min_new_tokens min_length min_tokens", _LEAST, (0,)),
    ("stop_sequences stop_words stop_strings stop_str", "its name here is stop", ()),
    ("stop_regex", "stops are texts, not expressions; use stop", ()),
    ("stop_token_ids include_stop_str_in_output no_stop_trim", _OPENAI, (False,)),
    ("ban_eos_token", "its name here is ignore_eos", (False,)),
    ("t_max_predict_ms t_max_prompt_ms", "see --request-timeout; leave it out", (0, -1)),
    ("repetition_detection", "repetition does not end an answer; leave it out", ({},)),
    ("n_keep num_keep", "a full context ends the answer and is not shifted; leave it out", (0, -1)),
    ("n_indent", "indentation ends no answer; leave it out", (0,)),
    # how many, how random
    ("num_return_sequences n_cmpl", "its name here is n", (1,)),
    ("do_sample", "temperature 0 takes the likeliest token; any other temperature samples", (True,)),
    ("sampling_seed random_seed", "its name here is seed", (-1,)),
    # chats
    ("function_call", "its name here is tool_choice", ("none", "auto")),
    ("tools documents chat_template_kwargs continue_final_message", _CHAT, ({},)),
    ("reasoning_effort", _CHAT, ("none",)),
    ("tool_choice", _CHAT, ("none", "auto", {})),
    ("thinking_budget thinking_budget_tokens reasoning_budget", _BUDGET, (-1,)),
    ("thinking_token_budget", _OPENAI, (-1,)),
    ("think thinking enable_thinking reasoning", _CHAT, ({},)),
    ("include_reasoning separate_reasoning stream_reasoning", _CHAT, (True,)),
    ("reasoning_format", _CHAT, ("none", "auto")),
    ("verbosity", "ask for it in the messages", ("medium",)),
    ("audio", _TEXT_ONLY, ({},)),
    ("modalities", _TEXT_ONLY, (["text"],)),
    ("lora lora_path lora_request adapter_id adapter_name adapters prompt_adapter_request", _ADAPTERS, ()),
    ("prediction", "predicted text is not used; leave it out", ({},)),
    ("web_search_options moderation plugins", _SERVICE, ()),
    ("task", _SERVICE, ("generate",)),
    # contents of the reply
    ("stream", "ask /generate_stream, or in Python AsyncLLM", (False,)),
    ("echo", "a chat is not repeated; ask /v1/completions", (False,)),
    ("return_full_text", "its name here is echo", (False,)),
    ("n_probs top_logprobs top_logprobs_num top_n_tokens", _LOGPROBS, (0,)),
    ("details return_details return_logprob decoder_input_details", _LOGPROBS, (False,)),
    ("logprobs prompt_logprobs", _OPENAI, (False,)),
    ("logprob_token_ids prompt_logprob_token_ids token_ids_logprob post_sampling_probs", _LOGPROBS, (False,)),
    ("prompt_logprob_start logprob_start_len flat_logprobs", _LOGPROBS, (0, -1)),
    ("logprobs_mode", "log-probabilities are the model's own, before penalties", ("raw_logprobs",)),
    ("return_token_ids return_tokens_as_token_ids", _OPENAI, (False,)),
    ("return_tokens return_prompt_token_ids", _REPLY, (False,)),
    ("return_prompt_text return_token_offsets return_hidden_states return_routed_experts", _REPLY, (False,)),
    ("return_meta_info return_cached_tokens_details return_progress timings_per_token", _REPLY, (False,)),
    ("response_fields verbose trace_decode_token_ids", _REPLY, (False,)),
    ("routed_experts_prompt_start routed_experts_start_len", _REPLY, (0,)),
    ("detokenize", "answers are text; leave it out", (True,)),
    ("spaces_between_special_tokens add_spaces_between_special_tokens", "leave it out", (True,)),
    ("print_eos_token", "use skip_special_tokens: false", (False,)),
    ("parse_tool_calls", "start the server with --tool-call-parser none", (True,)),
    ("stream_interval", "each chunk holds all text since the last one", (1,)),
    ("output_kind", "each output holds all tokens so far", (0,)),
    # transfers between engines, and Python arguments that change nothing
    ("move_kv_to_decode_node kv_transfer_params ec_transfer_params", "K and V stay in one engine", ({},)),
    ("vllm_xargs extra_args", "qrt has no extensions that read it; leave it out", ({},)),
    ("arrival_time trace_headers session_id data_parallel_rank prompt_text reasoning_ended", "", ANY),
    ("skip_clone skip_reading_prefix_cache output_text_buffer_length reasoning_parser_kwargs", "", ANY),
)  # fmt: skip


def refuse_arguments(
    call: str,
    others: Mapping[str, Any],
    known: Iterable[str],
    given: Mapping[str, Any] | None = None,
) -> None:
    """Refuse keyword arguments of `call` that it does not have, unless they ask for nothing.

    UnsupportedError for another engine's argument that asks for something, ConfigError for an unknown one.

    others   the arguments to judge
    known    the names of the arguments that `call` has
    given    the values of those
    """
    for name in others:
        if name not in FIELDS:
            raise ConfigError(f"{call}: unknown argument {name!r}{nearest(name, [*known, *FIELDS])}")
    refuse(FIELDS, {**(given or {}), **others}, others)
