"""The marks that models put around their thinking, by the names of vLLM's and SGLang's parsers."""

from __future__ import annotations

from dataclasses import dataclass

from qrt.errors import ConfigError
from qrt.registry import nearest


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks of one family.

    starts     texts that begin the thinking; the first is the usual one
    ends       texts that end it
    closing    the text before the end where a budget is spent
    begun      whether an answer is thinking from its first token on, unless the prompt has ended that
    channels   whether answers are messages in channels, as gpt-oss writes them
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    closing: str = "\n"
    begun: bool = False
    channels: bool = False


# The sentence with which Qwen's own code ends a thinking that is too long
QWEN_CLOSING = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking "
    "directly now.\n"
)
TAGS = ReasoningFormat(("<think>",), ("</think>",))
BEGUN_TAGS = ReasoningFormat(("<think>",), ("</think>",), begun=True)
QWEN = ReasoningFormat(("<think>",), ("</think>",), QWEN_CLOSING)
GRANITE = ReasoningFormat(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
    "\n\n",
)
CHANNELS = ReasoningFormat(
    ("<|channel|>analysis<|message|>",),
    ("<|channel|>final<|message|>",),
    "<|end|><|start|>assistant",
    begun=True,
    channels=True,
)
FORMATS: dict[str, ReasoningFormat] = {
    "qwen3": QWEN,
    "qwen3-thinking": QWEN,
    "deepseek_r1": BEGUN_TAGS,
    "deepseek-r1": BEGUN_TAGS,
    "granite": GRANITE,
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",)),
    "openai_gptoss": CHANNELS,
    "gpt-oss": CHANNELS,
    "seed_oss": ReasoningFormat(("<seed:think>",), ("</seed:think>",)),
    "kimi": ReasoningFormat(("◁think▷",), ("◁/think▷",)),
    **dict.fromkeys(
        ("deepseek_v3", "deepseek-v3", "glm45", "minimax_m2", "minimax", "olmo3", "step3", "kimi_k2"), TAGS
    ),
}
# What a chat template has if its model thinks in these marks; the first that fits is taken
FOUND_BY: tuple[tuple[str, ReasoningFormat], ...] = (
    ("<|channel|>analysis<|message|>", CHANNELS),
    ("[THINK]", FORMATS["mistral"]),
    ("Here is my thought process:", GRANITE),
    ("<seed:think>", FORMATS["seed_oss"]),
    ("◁think▷", FORMATS["kimi"]),
)


def reasoning_format(name: str, chat_template: str) -> ReasoningFormat | None:
    """Return the marks by name; for "auto" those that the chat template shows, or None."""
    if name == "none":
        return None
    if name != "auto":
        if name not in FORMATS:
            known = [*FORMATS, "auto", "none"]
            raise ConfigError(
                f"reasoning_parser: expected one of {', '.join(known)}, got {name!r}{nearest(name, known)}"
            )
        return FORMATS[name]
    if "</think>" in chat_template:
        return QWEN if "<|im_start|>" in chat_template else TAGS
    return next((format for text, format in FOUND_BY if text in chat_template), None)
