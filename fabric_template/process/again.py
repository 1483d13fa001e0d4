"""Again: whether the ranks can run together once more, after a run that an error has ended in this process.

Imported only then. Who has caught an error stands in a group in which the others may still wait for its part of a step: what it
sends next they would take for that, and crash of it.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

PATIENCE = timedelta(seconds=60)  # that a rank waits for those whom the same error has ended
# the group of the last meeting; held by torch alone, or its store would outlive all groups, and a group that the script opens
# after them, at the same port, would find in it where those listened that are gone
_MET: list[weakref.ref[Any]] = []


def meet_again() -> None:
    """Wait until all ranks are here, by the store alone: nothing is sent in the group in which the run has ended.

    Raises:
        RuntimeError: not all came.
    """
    try:
        group = torch.distributed.new_group(backend="gloo", timeout=PATIENCE)
    except RuntimeError as error:  # of torch.distributed
        raise RuntimeError(
            "an error has ended the run before on this rank, and the others are not here, as they wait for it in that run:"
            " let the error end the process instead of catching it, and start all ranks again; resume='auto' goes on"
        ) from error
    # all have been in the one before; into the new one another rank may still be on its way, and would find it closed
    while _MET:
        if (before := _MET.pop()()) is not None:
            with suppress(ValueError):  # it went with all groups
                torch.distributed.destroy_process_group(before)
    _MET.append(weakref.ref(group))
