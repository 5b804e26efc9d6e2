"""A real engine whose answers are written in advance: `script(engine, tokenizer, answers)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qrt.engine.engine import Engine
from qrt.engine.schedule.output import StepDelta
from qrt.engine.schedule.request import FinishReason
from qrt.text.tokenizer import Tokenizer


def script(engine: Engine, tokenizer: Tokenizer, answers: Mapping[str, str]) -> None:
    """Every request whose prompt contains a key is answered by its value and the end of text, one token a
    step; times, slots and everything else are the engine's own."""
    left: dict[str, list[int]] = {}
    real_add, real_step = engine.add, engine.step

    def add(request_id, prompt_ids, params, **options):
        text = tokenizer.decode(prompt_ids, skip_special_tokens=False)
        answer = next((value for key, value in answers.items() if key in text), None)
        if answer is not None:
            left[request_id] = [*tokenizer.encode(answer, add_special_tokens=False), *tokenizer.eos_token_ids]
            # the model's own end is not the answer's, nor is that of its shape; nor are the tokens drawn
            params = replace(params, ignore_eos=True, structured_outputs=None, temperature=0)
        real_add(request_id, prompt_ids, params, **options)

    def step() -> list[StepDelta]:
        deltas = []
        for delta in real_step():
            tokens = left.get(delta.request_id)
            if tokens and delta.token_ids:
                token, finish = tokens.pop(0), delta.finish_reason
                if not tokens:
                    engine.abort(delta.request_id)
                    finish = FinishReason.STOP
                delta = delta._replace(token_ids=(token,), finish_reason=finish, stop_reason=None)
            deltas.append(delta)
        return deltas

    engine.add, engine.step = add, step
