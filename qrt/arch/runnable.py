"""Which architectures qrt itself runs."""

from qrt.arch import ARCHS, MIXTURES, Arch
from qrt.errors import UnsupportedError


def runnable(name: str) -> Arch:
    """The architecture `name`; UnsupportedError for one that qrt does not run."""
    if name in MIXTURES:
        raise UnsupportedError(f"{name} is a mixture of experts, which qrt does not run; vLLM and SGLang do")
    return ARCHS[name]
