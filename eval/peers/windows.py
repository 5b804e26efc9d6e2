"""Cut the calibration windows of qrt-calibrate and write them as tokens and as text, for other tools.

Runs in qrt's environment. The windows are the ones that qrt-calibrate takes with the same flags.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from record import WINDOWS
from safetensors.torch import save_file

from qrt.text.tokenizer import Tokenizer
from qrt_calibrate.text.text import cut_windows, read_texts


def main() -> None:
    """Write windows.safetensors ("ids", int64 [count, tokens]) and windows.txt into a new folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, type=Path, help="folder of the original")
    parser.add_argument("--calib", required=True, help="as qrt-calibrate's")
    parser.add_argument("--n-samples", type=int, required=True)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, type=Path, help="folder to make")
    flags = parser.parse_args()
    tokenizer = Tokenizer(flags.model)
    texts, _ = read_texts(flags.calib, tokenizer)
    windows = cut_windows(texts, tokenizer, flags.n_samples, flags.seqlen, flags.seed)
    flags.out.mkdir()
    save_file({"ids": windows}, flags.out / WINDOWS)
    (flags.out / "windows.txt").write_text("".join(tokenizer.decode(ids.tolist(), False) for ids in windows))


if __name__ == "__main__":
    main()
