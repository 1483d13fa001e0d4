"""Ahead: the next training batch on its way to the device while a step computes (prefetch=True)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from ..core.overrides import TRANSFER_HOOKS
from ..core.passes import INFINITE, Pass
from ..core.run import Run


class Coming(NamedTuple):
    """A batch that is on its way."""

    batch: Any
    arrived: Any  # when it is there; what that is, its lane knows; None: it is there


class SideStream:
    """Copies to a CUDA device beside what computes there.

    A copy from memory that is not pinned makes the host wait for it: such tensors are pinned first. A batch with a tensor
    on a device already, which the computing stream may still be writing, is brought there by that stream.

    Args:
        device: where to.
        move: what brings a batch there, called with the batch.
    """

    def __init__(self, device: torch.device, move: Callable[[Any], Any]) -> None:
        self._move = move
        self._stream = torch.cuda.Stream(device)
        self._device = device

    def send(self, batch: Any) -> Coming:
        """Begin to bring it."""
        on_device: list[Tensor] = []
        apply_to_collection(batch, Tensor, lambda part: on_device.append(part) if part.is_cuda else None)
        if on_device:
            return Coming(self._move(batch), None)
        batch = apply_to_collection(batch, Tensor, _pinned)
        with torch.cuda.stream(self._stream):
            return Coming(self._move(batch), self._stream.record_event())

    def receive(self, coming: Coming) -> Any:
        """The batch, for which the device waits, not the host."""
        if coming.arrived is None:
            return coming.batch
        current = torch.cuda.current_stream(self._device)
        current.wait_event(coming.arrived)
        # its memory is the side stream's: not to be taken for another batch before the step has read it
        apply_to_collection(coming.batch, Tensor, lambda part: part.record_stream(current) if part.is_cuda else None)
        return coming.batch


class PassAhead(Pass):
    """A pass that has one batch more under way than it has handed out.

    Which batch is the last, and how a pass ends that gives fewer than its length says, is as without. A checkpoint stands
    before the batch that is under way: `note` is called before each is fetched, as in a pass without length.

    Example:
        >>> batches = PassAhead(iter("abc"), 2, 0, None, send=str.upper)
        >>> [(batch, batches.is_last, batches.fetched) for batch in batches]
        [('A', False, 1), ('B', True, 2)]
    """

    def __init__(
        self, iterator: Iterator, length: int | float, start: int, note: Callable[[], None] | None,
        send: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        self._most, self._taken, self._send = length, start, send
        super().__init__(iterator, INFINITE, start, note)

    def __iter__(self) -> Iterator:
        for batch in super().__iter__():
            if self._most != INFINITE:
                self.is_last = self.fetched >= self._most
            yield batch

    def _look_ahead(self) -> None:
        if self._taken < self._most:
            super()._look_ahead()
            self._ahead = [self._send(batch) for batch in self._ahead]
            self._taken += len(self._ahead)
        elif self._note is not None:
            self._note()


class Beside(Pass):
    """A pass whose batches are sent as they are handed out: to fetch one early would change the random numbers of a step."""

    def __init__(self, *args: Any, send: Callable[[Any], Any]) -> None:
        super().__init__(*args)
        self._send = send

    def __iter__(self) -> Iterator:
        return map(self._send, super().__iter__())


def lane_on(device: torch.device, move: Callable[[Any], Any]) -> Any:
    """What brings batches to a device beside what computes there; None where there is no such way."""
    return SideStream(device, move) if device.type == "cuda" else None


def lane_of(run: Run, transfer: Callable[[Any, int], Any] | None, has_hooks: bool) -> Any:
    """The lane for a run's training batches; None, and why is said, where batches come as ever."""
    why, lane = f"batches are used where they are made, on the {run.fabric.device.type}; leave it out", None
    if run.trained.hands_iterator:
        why = "the step takes its batches itself (dataloader_iter)"
    elif has_hooks:
        why = f"one of {', '.join(TRANSFER_HOOKS)} is your own, which may draw random numbers: it is called when it is due"
    elif transfer is not None:
        lane = lane_on(run.fabric.device, lambda batch: transfer(batch, 0))
    if lane is None and run.fabric.is_global_zero:
        run.said.warn(f"prefetch=True does nothing here: {why}")
    return lane


def passes(lane: Any, is_quiet: bool) -> Callable[..., Pass]:
    """How a pass is made; fetched ahead where that draws no random numbers between those of the steps."""

    def make(iterator: Iterator, length: int | float, start: int, note: Callable[[], None] | None) -> Pass:
        kind = PassAhead if is_quiet or length == INFINITE else Beside
        return kind(iterator, length, start, note, send=lane.send)

    return make


def receiving(lane: Any, transfer: Callable[[Any, int], Any] | None) -> Callable[[Any, int], Any]:
    """What brings a batch to its device, where some are on their way already."""

    def receive(batch: Any, dataloader_idx: int) -> Any:
        if type(batch) is Coming:
            return lane.receive(batch)
        return batch if transfer is None else transfer(batch, dataloader_idx)

    return receive


def _pinned(part: Tensor) -> Tensor:
    return part.pin_memory() if part.device.type == "cpu" and part.numel() and not part.is_pinned() else part
