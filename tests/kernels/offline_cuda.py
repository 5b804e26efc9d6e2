"""Compile Triton kernels for a GPU that is not there: real launchers run on CPU tensors, nothing is launched.

The interpreter accepts much that the compiler refuses. Whether a kernel is interpreted is settled when its
module is imported, so `compiled` works in a process of its own.
"""

import contextlib
import io
import json
import os
import subprocess
import sys


def compiled(code: str, capability: int = 90) -> dict[str, int]:
    """Run `code` (which calls launchers) for sm_`capability`; kernel name -> how many variants compiled.

    A compile error is raised with the compiler's output, and what ptxas says of a kernel whose asynchronous
    products it makes wait for each other.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, __file__, str(capability), code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise AssertionError(done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


def _main(capability: int, code: str) -> None:
    import triton

    from ptx.launch import compile_only

    seen: dict[str, set] = {}
    log = io.StringIO()

    def compiled(function, kernel, grid, arguments):
        assert kernel.asm["cubin"]
        if kernel.hash not in seen.get(function.__name__, ()) and "wgmma" in kernel.asm["ptx"]:
            said = log.getvalue() or _ptxas(kernel.asm["ptx"], capability)  # compiled just now, or earlier
            assert "serialized" not in said, said
        seen.setdefault(function.__name__, set()).add(kernel.hash)
        log.seek(0)
        log.truncate()

    triton.knobs.nvidia.dump_ptxas_log = True
    compile_only(capability, compiled)
    with contextlib.redirect_stdout(log):
        exec(code, {})
    print(json.dumps({name: len(variants) for name, variants in seen.items()}))


def _ptxas(ptx: str, capability: int) -> str:
    """What the assembler says."""
    import triton

    command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name=sm_{capability}a", "-o", os.devnull, "-"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
