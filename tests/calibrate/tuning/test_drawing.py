"""The text that training reads: written by the original model, and cut from the calibration text."""

import torch
from transformers import AutoModelForCausalLM

from qrt_calibrate.tuning import drawing


def test_text_is_drawn_from_predictions(llama):
    """What the cache predicts is what a forward over the whole text predicts; frequencies follow it."""
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    prompts = torch.randint(0, 512, (1, 3), generator=torch.Generator().manual_seed(1)).expand(4000, -1)
    drawn = drawing._continued(model, prompts, 5, torch.Generator().manual_seed(0))
    assert drawn.shape == (4000, 5) and torch.equal(drawn[:, :3], prompts)
    with torch.no_grad():
        first = model(prompts[:1]).logits[0, -1].softmax(-1)
        second = model(drawn[:, :4]).logits[:, -1].softmax(-1).mean(0)
    for column, wanted in ((3, first), (4, second)):
        found = torch.bincount(drawn[:, column], minlength=512) / 4000
        likely = wanted > 0.005
        noise = (wanted * (1 - wanted) / 4000).sqrt()
        assert likely.sum() > 5 and ((found - wanted).abs() < 5 * noise)[likely].all()


def test_windows_are_cut_from_anywhere_in_the_text():
    windows = torch.arange(60).view(3, 20)
    text = drawing.cut_windows(windows, 4, 16, seed=0)
    cut = torch.cat([next(text) for _ in range(50)])
    assert (cut.diff() == 1).all() and cut.shape == (200, 16)
    assert set(cut[:, 0].tolist()) == {20 * row + at for row in range(3) for at in range(5)}


def test_no_window_is_drawn_twice(llama):
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    windows = torch.randint(0, 512, (3, 20), generator=torch.Generator().manual_seed(1))
    text = drawing.drawn_windows(model, windows, 16, 3, together=8)
    batches = [next(text), next(text)]
    rows = torch.cat(batches)
    assert rows.shape == (16, 16) and len(rows.unique(dim=0)) == 16
    prompts = {tuple(own) for own in windows.unfold(1, drawing.PROMPT, 1).flatten(0, 1).tolist()}
    assert all(tuple(own) in prompts for own in rows[:, : drawing.PROMPT].tolist())
    assert torch.equal(next(drawing.drawn_windows(model, windows, 16, 3, together=8)), batches[0])
