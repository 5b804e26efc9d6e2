"""Quantize a model to int4, and say what it cost.

    python examples/calibrate.py
    python examples/calibrate.py --model Qwen/Qwen3-8B --calib chats.jsonl --n-samples 128 --out Qwen3-8B-w4

The same on the command line: qrt-calibrate --model MODEL --bits 4
"""

import argparse

import qrt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="a folder, ORG/NAME of the Hub, or tiny")
    parser.add_argument("--out", default="tiny-w4", help="the folder to make")
    parser.add_argument(
        "--calib", help="a file, a folder or a dataset of the Hub (default: Python's docstrings)"
    )
    parser.add_argument("--n-samples", type=int, default=16, help="windows of text; more is better")
    arguments = parser.parse_args()

    data = {} if arguments.calib is None else {"calib": arguments.calib}
    report = qrt.calibrate(arguments.model, arguments.out, bits=4, n_samples=arguments.n_samples, **data)
    print(
        f"{report.out}: {report.bits_per_weight:.2f} bits a weight, {report.stored_bytes / 1e6:.1f} MB in all"
    )
    print(report.cost)


if __name__ == "__main__":
    main()
