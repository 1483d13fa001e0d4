"""torch.compile around the steps of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from .errors import Misuse


class Compiling:
    """Compiles the steps of a run, and measures how long that takes.

    Args:
        given: The option ``compile``: True, a mode, or torch.compile's keywords.
    """

    def __init__(self, given: bool | str | dict[str, Any]) -> None:
        self._given = given
        self._options = given if isinstance(given, dict) else {"mode": given} if isinstance(given, str) else {}
        self.seconds = 0.0
        self.times = 0
        self._started_at = 0.0

    def check(self, device: torch.device, window: int) -> None:
        """Refuse the compiler's CUDA graphs where gradients wait for another batch."""
        has_graphs = self._options.get("mode") in ("reduce-overhead", "max-autotune")
        if device.type == "cuda" and has_graphs and window != 1:
            raise Misuse(
                f"compile={self._given!r} with accumulate_grad_batches={window}: the CUDA graphs of"
                " torch.compile overwrite gradients that are still needed; write compile=True, or"
                " compile='max-autotune-no-cudagraphs'"
            )

    def __enter__(self) -> Compiling:
        handler = torch._dynamo.callback_handler
        handler.register_start_callback(self._start)
        handler.register_end_callback(self._end)
        return self

    def __exit__(self, *_: Any) -> None:
        handler = torch._dynamo.callback_handler
        # torch._dynamo.reset() removes the callbacks, too.
        with suppress(ValueError):
            handler.remove_start_callback(self._start)
            handler.remove_end_callback(self._end)

    def _start(self, *_: Any) -> None:
        self._started_at = time.monotonic()

    def _end(self, *_: Any) -> None:
        self.seconds += time.monotonic() - self._started_at
        self.times += 1

    def left_alone(self, log: Callable) -> Callable:
        """Return the log of a module, kept out of the compiled graph."""
        return torch.compiler.disable(log, reason="self.log runs in Python")

    def step(self, name: str, method: Callable) -> Callable:
        """Return the compiled step. A missing C++ compiler is one line that names it."""
        compiled = torch.compile(method, **self._options)

        def step(*args: Any) -> Any:
            try:
                return compiled(*args)
            except Exception as error:
                if "InvalidCxxCompiler" not in str(error):
                    raise
                raise Misuse(
                    f"compile={self._given!r}: for the CPU torch needs a C++ compiler, and finds none: install g++ (or name one"
                    " by the variable CXX), or leave out compile"
                ) from error

        return step
