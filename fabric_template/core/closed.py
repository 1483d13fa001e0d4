"""Closed: an optimizer's step around a closure: of LBFGS, of a module's own ``optimizer_step``, under a gradient scaler."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from .errors import Misuse, MisuseOfType
from .optimizing import unscales_itself
from .run import Run


class ClosedStep:
    """What ``optimizer.step(closure)`` comes to: the closure, what is done with the gradients, the step.

    Args:
        scaler: of precision="16-mixed", or None.
        before_step: what is done with the gradients before the optimizer steps.
    """

    def __init__(self, run: Run, scaler: Any, before_step: Sequence[Callable[[Optimizer], Any]]) -> None:
        self._run, self._scaler, self._before_step = run, scaler, before_step

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that calls its closure more than once, where there is a scaler."""
        if self._scaler is not None and isinstance(optimizer, LBFGS):
            raise MisuseOfType(
                "AMP and the LBFGS optimizer are not compatible: expected precision='bf16-mixed' or '32-true'"
            )

    def __call__(self, optimizer: Optimizer, closure: Callable | None, **arguments: Any) -> Any:
        """Step this optimizer, with a closure or without."""
        closure = closure or (lambda: None)
        if self._scaler is not None:
            return self._scaled(optimizer, closure, **arguments)

        def closure_and_clip() -> Any:
            result = closure()
            for prepare in self._before_step:
                prepare(optimizer)
            return result

        step = self._run.fabric.strategy.optimizer_step
        if not _takes_closure(type(optimizer).step):  # one of torch's (PostLocalSGDOptimizer), and others written so
            result = closure_and_clip()
            step(optimizer, **arguments)
            return result
        return step(optimizer, closure=closure_and_clip, **arguments)

    def _scaled(self, optimizer: Optimizer, closure: Callable, **arguments: Any) -> Any:
        """With a GradScaler: torch takes no closure here, and gradients are unscaled before anyone looks at them."""
        result = closure()
        skipped = result is None and self._run.trained.is_automatic
        if not skipped and not unscales_itself(optimizer):
            self._scaler.unscale_(optimizer)
        for prepare in self._before_step:
            prepare(optimizer)
        if skipped:
            return result
        output = self._scaler.step(optimizer, **arguments)  # skips the step where gradients are not finite
        self._scaler.update()
        return output

    def train(self, step: Callable[[Callable], Any], closure: Callable) -> None:
        """Take a step that calls the closure it is given; where it does not, nothing was trained on."""
        is_called = False

        @torch.enable_grad()
        def noted() -> Any:
            nonlocal is_called
            is_called = True
            return closure()

        step(noted)
        if not is_called:
            raise Misuse(
                "The closure hasn't been executed. HINT: did you call `optimizer_closure()` in your `optimizer_step` hook? It"
                " could also happen because the `optimizer.step(optimizer_closure)` call did not execute it internally: write"
                " optimizer.step(closure=optimizer_closure), and loss = closure() in an optimizer of your own"
            )


@cache
def _takes_closure(step: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(step).parameters
    except (TypeError, ValueError):
        return True
    return "closure" in parameters or any(word.kind is word.VAR_KEYWORD for word in parameters.values())
