"""Verbs: what each process does for fit, validate, test and predict, with all that stands around it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from ..core import train
from ..core.evaluate import evaluate
from ..core.run import Run
from ..exact.randomness import isolated_rng
from .home import files_settled
from .session import Session, heed_signals, start_fit, stop_for

if TYPE_CHECKING:
    from ..trainer.attributes import TrainerFace


def run_fit(loop: TrainerFace, run: Run) -> None:
    """Train."""
    signals, listening = run.stop.signals, ExitStack()
    listening.enter_context(files_settled(run.fabric))
    if signals.together:  # alone, a signal ends the set-up at once; here the others would wait for ever
        listening.enter_context(signals)
    with listening, Session(loop, run), torch.autograd.set_detect_anomaly(run.config.detect_anomaly):
        start_fit(loop, run)
        run.validation.sanity_check(isolated_rng())
        heed_signals(run)
        if not signals.together:
            listening.enter_context(signals)
        with torch.enable_grad():
            train.fit(run)
        listening.close()
        stop_for(run, signals.agreed)


def run_evaluation(loop: TrainerFace, run: Run, stage: str) -> list[dict]:
    """Validate or test."""
    with Session(loop, run):
        run.metrics.name_metrics(run.trained.net)
        run.data.set_up_transfer()
        due = run.data.set_up_evaluation(stage)
        return evaluate(run, run.data.val, run.fn, inference=_may_infer(run)) if due else []


def run_prediction(loop: TrainerFace, run: Run, keep: bool) -> Any:
    """Predict."""
    with Session(loop, run):
        run.data.set_up_transfer()
        due = run.data.set_up_evaluation("predict")
        return evaluate(run, run.data.val, "predict", inference=_may_infer(run), keep=keep) if due else None


def _may_infer(run: Run) -> bool:
    """Whether evaluation may use torch.inference_mode; gloo cannot."""
    gloo = torch.distributed.is_available() and torch.distributed.is_initialized()
    return run.config.inference_mode and not (gloo and torch.distributed.get_backend() == "gloo")
