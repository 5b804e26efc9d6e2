"""Say how kernels run in tests: on a GPU, compiled and executed on the CPU (ptx), or interpreted."""

import os

import torch

GPU = torch.cuda.is_available()
PTX_TESTS = os.environ.get("QRT_TEST_PTX", "")
if PTX_TESTS not in ("", "some", "all"):
    raise ValueError(f"QRT_TEST_PTX: expected some or all, got {PTX_TESTS!r}")
PTX = not GPU and bool(PTX_TESTS)
PTX_SM = int(os.environ.get("QRT_TEST_PTX_SM", "90"))
PTX_SEED = os.environ.get("QRT_TEST_PTX_SEED")
COMPILED = GPU or PTX  # what only the interpreter lacks is there: bf16, inline assembly, Gluon
