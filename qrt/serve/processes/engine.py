"""The engine process: loads an engine and runs the Router's loop on it.

The supervisor starts it as `python -m qrt.serve.processes.engine`.
"""

from __future__ import annotations

import gc
import sys

from qrt.cli import run_main
from qrt.engine.engine import Engine
from qrt.serve.link.router import EngineRouter
from qrt.serve.link.sockets import EnginePort
from qrt.serve.processes.process import Spec, child_spec, leave_sigterm_to_supervisor
from qrt.text.tokenizer import Tokenizer


def serve(spec: Spec) -> None:
    """Load the model, then run the requests that come over the Spec's socket until SIGTERM."""
    eos = Tokenizer(spec.engine.tokenizer or spec.engine.model).eos_token_ids
    engine = Engine(spec.engine, eos_token_ids=eos)
    engine.warm_up_grammars()
    (link,) = spec.links
    router = EngineRouter(
        engine,
        names=spec.metric_names(link),
        watchdog_seconds=spec.server.watchdog_timeout,
        log_stats=not spec.server.disable_log_stats,
    )
    gc.collect()
    gc.freeze()  # the model's objects live as long as the process
    with EnginePort(link.socket) as port:
        router.run(port)


def main() -> None:
    """Read the Spec from stdin and serve."""
    spec = child_spec("engine")
    leave_sigterm_to_supervisor()
    sys.exit(run_main(lambda: serve(spec)))


if __name__ == "__main__":
    main()
