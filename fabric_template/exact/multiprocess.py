"""Multiprocess: a DataLoader with worker processes, as a source whose passes note where these stand."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from .indices import Indices, replaced
from .source import Source, begun
from .workers import Recorder


class MultiprocessSource(Source):
    """A DataLoader with worker processes: what each has drawn and loaded ahead belongs to where a pass stands."""

    def __init__(self, loader: Any, records: bool = False, trains: bool = False, counts: bool = False) -> None:
        super().__init__(loader, records, trains, counts)
        self.workers = loader.num_workers
        self.keeps_workers = loader.persistent_workers and not self.is_stateful
        self.records = records and (trains or self.keeps_workers or bool(self.parts))
        self.is_indexed = self.is_indexed and getattr(loader, "in_order", True)
        self.datasets = [loader.dataset] if self.is_indexed else []
        self.is_born = False
        self.recorder: Recorder | None = None
        self.noted: list[int] = []  # batches that each worker had noted before the pass
        self.unsent = 0  # batches of the pass that no worker was sent
        self.indices: Indices | None = None  # of the pass that is on

    def note_beginning(self) -> None:
        """And whether worker processes are made for it."""
        super().note_beginning()
        self.is_born = not self.keeps_workers or self.loader._iterator is None

    def whole(self) -> Iterator:
        """A whole pass, with new worker processes, or with those that have stayed."""
        if self.is_born:
            self.born = self.began
            return self.with_workers()
        sent = self._sent()
        self.noted = [noted + self._share(sent, worker) for worker, noted in enumerate(self.noted)]
        self.unsent = 0
        return iter(self.loader)

    def with_workers(
        self, done: int = 0, states: list | None = None, began: Any = None, ahead: list | None = None
    ) -> Iterator:
        """A pass with new worker processes, behind so many batches that are not loaded, and the workers' states after these.

        It begins with the random numbers ``began``, if not with those with which the processes are made, and with the indices
        that were drawn ``ahead`` of what was trained.
        """
        loader = self.loader
        if not self.is_indexed:
            return begun(loader)
        # so many workers had one batch more: each is sent an empty one, to keep the turns; or, without batches, its last item
        idle = done % self.workers
        instead: list[Any]
        dropped, instead = (done - idle, []) if loader.batch_sampler is None else (done, [[]] * idle)
        self.recorder = Recorder(loader, states, idle)
        self.noted = [-self._share(done, worker) for worker in range(self.workers)]
        self.unsent = done - idle
        again = (self, dropped, instead, began) if done or began is not None else ()
        indices = Indices(getattr(loader, self.index_name), *again)
        if loader.batch_sampler is not None:
            indices.sent = deque(maxlen=self.workers * loader.prefetch_factor + 2)
            self.indices, indices.ahead = indices, ahead
        parts = {"collate_fn": self.recorder, "worker_init_fn": self.recorder.start, self.index_name: indices}
        with replaced(loader, **parts):
            iterator = iter(loader)
        for _ in range(idle):
            with suppress(Exception):  # some datasets cannot load nothing
                next(iterator)
        return iterator

    def position(self) -> dict[str, Any]:
        """And what notes the workers' states, and the indices that they are sent."""
        return super().position() | {name: getattr(self, name) for name in ("recorder", "noted", "indices")}

    def state(self, position: dict[str, Any] | None) -> dict[str, Any] | None:
        """And each worker's random numbers, and what was drawn ahead of what is trained."""
        if position is None:
            state = super().state(None)
            if not self.records or not self.keeps_workers or self.loader._iterator is None:
                return state
            workers = self._states_of_workers(self.recorder, self.noted, self._sent())
            return {**(state or {}), "born": self.born, "workers": workers}
        position = dict(position)
        recorder, noted, indices = map(position.pop, ("recorder", "noted", "indices"))
        if (state := super().state(position)) is not None:
            state["workers"] = self._states_of_workers(recorder, noted, position["taken"])
            state["ahead"] = _drawn_ahead(indices, position["taken"])
        return state

    # ---- a DataLoader's insides

    def _sent(self) -> int:
        """Batches of the pass that its workers were sent, those included that nobody asked for.

        PyTorch keeps this number in a private name; tests/exact/test_position.py fails clearly if it goes.
        """
        return self.unsent + self.loader._iterator._send_idx

    def _share(self, batches: int, worker: int) -> int:
        """How many of the pass's first batches are this worker's: they take turns."""
        return (batches - worker + self.workers - 1) // self.workers

    def _states_of_workers(self, recorder: Recorder | None, noted: list[int], batches: int) -> list[Any] | None:
        if recorder is None:
            return None
        return recorder.read([before + self._share(batches, worker) for worker, before in enumerate(noted)])


def _drawn_ahead(indices: Indices | None, taken: int) -> list[Any] | None:
    """The indices that workers were sent ahead of what is trained; a sampler may have drawn them as they were sent."""
    if indices is None:
        return None
    drawn, ahead = list(indices.sent), indices.number - taken
    is_known = 0 < ahead <= len(drawn) and all(isinstance(i, int) for some in drawn for i in some)
    return drawn[-ahead:] if is_known else None
