"""Slurm: the signal that it sends ahead of a time limit puts the job back into the queue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings


def requeue(number: int, saved: bool) -> None:
    """SLURM's SIGUSR1, sent ahead of a time limit: put the job back into the queue, if its state is saved.

    Outside of SLURM's batch jobs, and for other signals, nothing is done.
    """
    job = os.environ.get("SLURM_JOB_ID")
    by_hand = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if number != getattr(signal, "SIGUSR1", None) or not job or by_hand:
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if not saved:
        warnings.warn(f"job {job} is not requeued: it has no checkpoint to go on from", stacklevel=2)
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=60)
        print(f"requeued job {job}; resume='auto' goes on from here", file=sys.stderr)
    except (OSError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip()
        warnings.warn(f"job {job} could not be requeued ({why}): submit it again, with resume='auto'", stacklevel=2)
