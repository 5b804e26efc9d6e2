"""Importing qrt costs nothing: no torch for the bookkeeping, no Triton and no CUDA anywhere."""

import subprocess
import sys

import pytest


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "module",
    [
        *("qrt", "qrt.arch.families.qwen", "qrt.mem.manager", "qrt.quant.kv"),
        *(
            "qrt.serve.command.cli",
            "qrt_eval.cli",
            "qrt_calibrate.cli",
        ),  # and Ctrl-C meanwhile is a traceback
    ],
)
def test_imports_no_torch(module):
    assert run(f"import sys, {module}; print('torch' in sys.modules)").strip() == "False"


def test_command_lines_do_not_import_the_hub_client():
    code = "import sys, qrt.model_files.location, qrt.serve.command.cli, qrt_eval.cli, qrt_calibrate.cli;"
    assert run(f"{code} print({{'huggingface_hub', 'datasets'}} & set(sys.modules))").strip() == "set()"


def test_a_tokenizer_loads_without_transformers():
    code = "import sys; from qrt.text.tokenizer import Tokenizer; made = Tokenizer('tiny');"
    code += "made.decode(made.encode('a')), made.chat_template(), made.eos_token_ids, len(made);"
    assert run(f"{code} print({{'torch', 'transformers'}} & set(sys.modules))").strip() == "set()"


def test_calibration_begins_without_transformers():
    """It reads a tokenizer and a text; only training, and mixtures of experts, take what transformers has."""
    code = "import sys, qrt_calibrate.api, qrt_calibrate.pipeline; print('transformers' in sys.modules)"
    assert run(code).strip() == "False"


def test_dir_lists_names_that_are_not_loaded_yet():
    code = "import sys, qrt; print(set(qrt.__all__) <= set(dir(qrt)), 'torch' in sys.modules)"
    assert run(code).strip() == "True False"


def test_imports_neither_triton_nor_cuda():
    code = (
        "import sys, qrt, torch; from qrt import LLM; import qrt.kernels.linear;"
        "print('triton' in sys.modules, torch.cuda.is_initialized())"
    )
    assert run(code).strip() == "False False"


def test_an_api_process_does_without_the_engine():
    parts = ("qrt.engine.engine", "qrt.engine.step", "qrt.engine.schedule.scheduler", "qrt.serve.link.router")
    others = ("torch", "triton", "transformers", "safetensors", "huggingface_hub")
    code = f"import sys, qrt.serve.processes.httpserver; print(set({parts + others}) & set(sys.modules))"
    assert run(code).strip() == "set()"


def test_a_supervisor_does_without_what_the_others_run():
    """It starts them, so what it imports is time in which nothing else begins."""
    code = "import sys; from qrt.serve.command import cli; from qrt.serve.processes import supervisor;"
    code += "supervisor.supervise = lambda engine, server: 0; cli.main(['tiny']);"
    others = {"torch", "numpy", "fastapi", "pydantic", "uvicorn", "transformers", "huggingface_hub"}
    assert run(f"{code} print({others} & set(sys.modules))").strip() == "set()"
