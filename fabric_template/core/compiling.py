"""Compiling: what torch's compiler does to the steps of one run: how long it takes, where it gives up, why it begins again."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from .errors import Misuse
from .said import Said

LOGGED = "what a step logs is Python's business, not the graph's"  # why torch is told to leave our log alone
BREAKS = (  # what stands in torch's reason, what that is, what to write instead
    (r"Tensor\.item\(\)|_local_scalar_dense", "a value is read from a tensor",
     "leave it a tensor: self.log(...) takes it as it is, and hooks outside the step may read it"),
    (r"[Dd]ata-dependent (branching|jump)|generic_jump", "a branch depends on a tensor's values",
     "torch.where(condition, a, b), which computes both"),
    (r"builtin `?print", "it prints", "self.log(...), or print in a hook outside the step"),
    (r"torch\.compiler\.disable", "a function is kept from the compiler (torch.compiler.disable)", "call it outside the step"),
)  # fmt: skip
AN_ARGUMENT = r"^\w+ == \d+$"
AGAIN = (  # what stands in a guard that has failed, and the remedy
    (r"size mismatch at index 0\.", "drop_last=True in the DataLoader, if it is the last, smaller batch; or"
     " compile={'dynamic': True}, one graph for all sizes"),
    (r"size mismatch|stride mismatch|rank mismatch", "batches of one shape, or compile={'dynamic': True}, one graph for all"),
    (AN_ARGUMENT, "what depends on that number (batch_idx?) in a hook outside the step, on_train_batch_start"),
    (r"^[\w.]+ == \d+$", "a counter as a tensor (register_buffer), or counted in a hook outside the step"),
)  # fmt: skip
EXPECTED = r"grad_mode|\.training\b|inference"  # once for training, once for validation


class Compiling:
    """The compiler while one run is on: seconds in it, and two warnings, each once.

    torch tells of breaks and recompilations in lists that only grow, and calls back before and after it compiles.

    Args:
        given: the word ``compile`` of the loop.
        said: where to warn; None on the other ranks.
    """

    def __init__(self, given: bool | str | dict[str, Any], said: Said | None) -> None:
        self._given, self._said = given, said
        self._words = given if isinstance(given, dict) else {"mode": given} if isinstance(given, str) else {}
        self.seconds = 0.0
        self.times = 0  # that it was at work
        self._began = 0.0
        self._is_new = False  # the compiler was at work since the last look
        self._told: set[str] = set()
        self._breaks: list[Any] = []
        self._failures: dict[Any, list[str]] = {}

    def check(self, device: torch.device, window: int) -> None:
        """Refuse the compiler's own graphs where gradients wait for another batch."""
        if device.type == "cuda" and self._words.get("mode") in ("reduce-overhead", "max-autotune") and window != 1:
            raise Misuse(
                f"compile={self._given!r} with accumulate_grad_batches={window}: the CUDA graphs of"
                " torch.compile overwrite gradients that are still needed; write compile=True, or"
                " compile='max-autotune-no-cudagraphs'"
            )

    def __enter__(self) -> Compiling:
        dynamo = torch._dynamo
        self._breaks, self._failures = dynamo.graph_break_reasons, dynamo.guard_failures
        self._known = len(self._breaks)
        self._counts = {code: len(texts) for code, texts in self._failures.items()}
        dynamo.callback_handler.register_start_callback(self._start)
        dynamo.callback_handler.register_end_callback(self._end)
        return self

    def __exit__(self, *_: Any) -> None:
        handler = torch._dynamo.callback_handler
        with suppress(ValueError):  # torch._dynamo.reset() has cleared them
            handler.remove_start_callback(self._start)
            handler.remove_end_callback(self._end)

    def _start(self, *_: Any) -> None:
        self._began = time.monotonic()

    def _end(self, *_: Any) -> None:
        self.seconds += time.monotonic() - self._began
        self.times += 1
        self._is_new = True

    def left_alone(self, log: Callable) -> Callable:
        """The log of a module, which is no part of what is compiled."""
        return torch.compiler.disable(log, reason=LOGGED)

    def step(self, name: str, method: Callable) -> Callable:
        """The step, compiled; what has come of that is told behind the batch in which it was compiled."""
        compiled = torch.compile(method, **self._words)

        def step(*args: Any) -> Any:
            try:
                output = compiled(*args)
            except Exception as error:
                if "InvalidCxxCompiler" not in str(error):
                    raise
                raise Misuse(
                    f"compile={self._given!r}: for the CPU torch needs a C++ compiler, and finds none: install g++ (or name one"
                    " by the variable CXX), or leave out compile"
                ) from error
            if self._is_new:
                self._look(name)
            return output

        return step

    def _look(self, name: str) -> None:
        self._is_new = False
        breaks = [cause for cause in self._breaks[self._known :] if cause.graph_break and cause.user_stack]
        breaks = [cause for cause in breaks if LOGGED not in cause.reason]
        self._known = len(self._breaks)
        if breaks:
            self._tell_break(name, breaks)
        for code, texts in self._failures.items():
            for text in texts[self._counts.get(code, 0) :]:
                if not re.search(EXPECTED, text.partition("\n")[0]):
                    self._tell_again(name, text)
            self._counts[code] = len(texts)

    def _tell_break(self, name: str, breaks: list[Any]) -> None:
        places = [(cause.user_stack[-1].filename, cause.user_stack[-1].lineno) for cause in breaks]
        cause, (first, *others) = breaks[0], dict.fromkeys(places)
        what, instead = _told(cause.reason, BREAKS) or _in_torchs_words(cause.reason)
        more = (
            f" (and at {len(others)} other lines)"
            if len(others) > 1
            else f" (and at line {others[0][1]})"
            if others
            else ""
        )
        line = f", `{cause.user_stack[-1].line.strip()}`" if cause.user_stack[-1].line else ""
        self._once(
            "break",
            f"compile={self._given!r}: {name} is not compiled as a whole: {first[0]}, line {first[1]}{line}: {what}{more}."
            f" It runs on, in parts, which is slower; write {instead}",
        )

    def _tell_again(self, name: str, text: str) -> None:
        why = re.split(r"\s{2,}#|\n| \(HINT", re.sub(r"^\d+/\d+: ", "", text))[0].strip()
        if "break" in self._told and re.search(AN_ARGUMENT, why):  # numbers that the parts hand on to each other
            return
        remedy = next((remedy for pattern, remedy in AGAIN if re.search(pattern, why)), None)
        place = re.findall(r'File "(.+)", line (\d+)', text)
        where = f" ({place[-1][0]}, line {place[-1][1]})" if place else ""
        self._once(
            "again",
            f"compile={self._given!r}: {name} was compiled once more, which takes time, since it was compiled for:"
            f" {why}{where}; write {remedy or 'a step for which that stays the same (TORCH_LOGS=recompiles tells more)'}",
        )

    def _once(self, kind: str, text: str) -> None:
        if self._said is not None and kind not in self._told:
            self._told.add(kind)
            self._said.warn(text)


def _told(reason: str, table: tuple[tuple[str, str, str], ...]) -> tuple[str, str] | None:
    return next(((what, instead) for pattern, what, instead in table if re.search(pattern, reason)), None)


def _in_torchs_words(reason: str) -> tuple[str, str]:
    hint, explained = re.search(r"Hint: (.+)", reason), re.search(r"Explanation: (.+)", reason)
    what = explained[1] if explained else reason.strip().partition("\n")[0]
    way = f"in another way ({hint[1].rstrip('.')})" if hint else "in another way, outside the step"
    return what.rstrip("."), f"it {way}"
