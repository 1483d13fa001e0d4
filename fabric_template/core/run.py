"""Run: the state of one fit, validate, test or predict."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from ..data.feed import Feed
from ..data.transfer import make_transfer
from ..exact.held import Held
from ..exact.randomness import rng_state, set_rng_state
from ..files.keeper import Saver
from ..process.finished import is_time_over
from ..record.metrics import Metrics
from ..trainer.manual import LoopOptimizer, ManualUpdate
from ..trainer.shown import is_lightning, shown_to
from ..trainer.views import Word
from .config import LoopConfig
from .errors import Misuse
from .history import History, name_outputs
from .hooks import TRANSFER_HOOKS, Hooks, is_a, overrides
from .inputs import check_parameters
from .optimizers import SchedulerConfig, parse_optimizers
from .steps import FunctionSteps, Steps, takes_batch_idx, takes_iterator
from .update import AutomaticUpdate
from .validation import Schedule

if TYPE_CHECKING:
    from ..files.noticed import Noticed
    from ..loop import FabricLoop
    from ..process.signals import Signals


class Place(NamedTuple):
    """Where a resume goes on in an epoch."""

    batches_done: int  # of the epoch
    total_batches: int
    is_last_batch: bool
    saved_in: str | None  # the hook whose callback saves, with the rest of its batch or epoch still to come
    is_exact: bool = True  # whether nothing of a step that is not done has left a trace


class Run:
    """The state of one call of fit, validate, test or predict.

    What is set in ``__init__`` is plain and travels to other processes; the rest is made there by `set_up`.
    """

    def __init__(
        self, fn: str, config: LoopConfig, owner: Any, net: nn.Module, datamodule: Any, callbacks: list
    ) -> None:
        self.fn, self.config, self.owner, self.net, self.datamodule = Word(fn), config, owner, net, datamodule
        self.callbacks, self.loggers = callbacks, []
        self.given_optimizer: Any = None
        self.resume_path: str | Path | None = None
        self.load_path: str | Path | None = None
        self.is_auto, self.awaits = False, None  # resume="auto"; (resume, load), still to be agreed on by the ranks
        self.may_lack, self.trusted = False, config.trusted  # a file that is not there is none; it may run any program
        self.folder: Path | None = None  # for checkpoints
        self.is_lightning = is_lightning(owner)

        self.stage: str | None = None
        self.global_step = 0
        self.epochs_done = 0  # whole epochs
        self.batches_done = 0  # batches of this epoch, the one at hand included
        self.total_batches = 0
        self.batches_that_stepped = 0  # the step that loggers see
        self.steps_in_epoch = 0
        self.stepped_before = 0  # batches_that_stepped, of the epochs before
        self.is_last_batch = False
        self.between_epochs = True
        self.should_stop = False
        self.noticed: Noticed | None = None  # once training has begun
        self.fingerprint: dict[str, Any] = {}  # what it is made of
        self.elapsed, self.trains_since = 0.0, None  # seconds trained before a resume; time.monotonic as training began
        self.is_late = False  # max_time is over as an epoch ends
        self.has_validated = False
        self.window = config.accumulate_grad_batches
        self.placed = False  # whether name and version are chosen
        self.checkpoint: dict[str, Any] | None = None  # until it is restored
        self.signals: Signals | None = None  # what may come while fit trains
        self.stopped_by: int | None = None  # the signal that ended training
        self.saved_in: str | None = None  # the hook in which a callback saved the checkpoint that is resumed
        self.restored: dict[str, Any] | None = None  # our part of the checkpoint, until the first epoch has begun
        self.cut: dict[str, Any] | None = None  # the state in which this epoch was cut short
        self.has_failed = self.is_proved = False  # an error ends this run; what it saves is known to be readable
        self.failed_in: str | None = None  # the hook that the error came from

        self.optimizers: list[Any] = []
        self.loop_optimizers: list[Any] = []
        self.schedulers: list[SchedulerConfig] = []
        self.saver: Saver | None = None
        self.history = History()
        self.metrics = Metrics()
        self.hooks = Hooks(None, callbacks, owner, self.metrics)
        self.feed = Feed(self, owner if datamodule is None else datamodule)
        self.schedule = Schedule(self)
        self.held = Held(self)
        self.modes: Any = None  # in which an evaluation that is on has found the modules
        self._warned: set[str] = set()
        self.said: set[str] = set()  # on stderr, once
        self._seen: dict[int, int] = {}  # evaluation batches by loader, for the step of their log
        self.predictions: list[list[Any]] = []  # by loader, then by batch
        self.batch_indices: list[list[list[int]]] = []  # the samples of each, for callbacks that write predictions
        self.evaluated = self.evaluated_in_all = 0  # batches of this evaluation; of all since the epoch began

    # ---- made in the process that runs

    def set_up(self, loop: FabricLoop, fabric: Fabric) -> None:
        """Make what needs the process: hooks with their trainer, metrics that reduce, the steps' door."""
        self.fabric, config = fabric, self.config
        self.metrics = Metrics(fabric.all_reduce, distributed=fabric.world_size > 1)
        self.metrics.predicts = self.fn == "predict"
        self.metrics.enabled = not config.barebones
        self.metrics.has_logger = bool(self.loggers)
        self.hooks = Hooks(loop, self.callbacks, self.owner, self.metrics, loop.own_profiler, partial(shown_to, self))
        self.steps = Steps(fabric, self.owner, self.net, config.compile)
        self.set_up_saver()

    def follow(self, last: Run) -> None:
        """An evaluation comes after another run: what that has saved, and how far it has trained, still counts."""
        self.saver = last.saver
        self.epochs_done, self.global_step = last.epochs_done, last.global_step
        self.total_batches, self.batches_that_stepped = last.total_batches, last.batches_that_stepped

    def set_up_saver(self) -> None:
        """Make what keeps the checkpoints, where they are kept."""
        config = self.config
        if self.folder is not None:
            self.saver = Saver(self.folder, config.monitor, config.mode, config.save_top_k, config.save_last)

    def set_up_optimizers(self) -> None:
        """Ask the module for its optimizers and schedulers, or take the ones that fit was given."""
        if self.given_optimizer is not None:
            returned = self.given_optimizer
        else:
            configure = self.hooks.own(self.owner, "configure_optimizers")
            returned = configure() if configure is not None else None
        custom = overrides(self.owner, "lr_scheduler_step") is not None
        self.optimizers, self.schedulers = parse_optimizers(
            returned, automatic=self.is_automatic, owner=self.owner, custom_step=custom
        )
        check_parameters(self.optimizers, self.net, self.name)
        for optimizer in self.optimizers:  # states made before the move (a loaded optimizer) follow their parameters
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        device = value.device if key == "step" else parameter.device
                        state[key] = value.to(device, copy=value.is_shared())  # shared: a launcher spawned with it
        self.loop_optimizers = [LoopOptimizer(optimizer, self) for optimizer in self.optimizers]

    def set_up_update(self) -> None:
        """Know how a batch becomes an update, and how it comes to its device."""
        self.metrics.name_metrics(self.net)
        self.update = (AutomaticUpdate if self.is_automatic else ManualUpdate)(self)
        self.train_batch = self.hooks.timed(self.update, "run_training_batch")
        if self.hands_iterator:
            self.train_batch = self.feed.handing_over(self.train_batch)
        self.transfer = None if self.hands_iterator else self.make_transfer()

    def make_transfer(self) -> Callable[[Any, int], Any] | None:
        """What brings a batch to its device, through the datamodule's or module's hooks; None: it is there."""
        source, owner = self.feed.source, self.owner
        hooks = [self.hooks.own(source, name) or self.hooks.own(owner, name) for name in TRANSFER_HOOKS]
        transfer = make_transfer(self.fabric, self.steps.convert(), hooks)
        return transfer and self.hooks.timed(
            transfer, f"[Strategy]{type(self.fabric.strategy).__name__}.batch_to_device"
        )

    # ---- what the module is

    @property
    def model(self) -> Any:
        """The model as it was given: the owner of the steps, or the net that functions are steps of."""
        return self.net if isinstance(self.owner, FunctionSteps) else self.owner

    @property
    def name(self) -> str:
        """What the user calls the model in errors: its class."""
        return type(self.model).__name__

    @property
    def is_automatic(self) -> bool:
        """Whether the loop steps the optimizer (False: the module does)."""
        return getattr(self.owner, "automatic_optimization", True)

    @property
    def hands_iterator(self) -> bool:
        """Whether the training step takes its batches itself, from ``dataloader_iter``."""
        return takes_iterator(self.owner.training_step)

    def takes_idx(self, step: str) -> bool:
        """Whether a step takes the batch's index."""
        return takes_batch_idx(getattr(self.owner, step))

    # ---- where the run stands

    def starts_epoch(self) -> bool:
        """Whether an epoch begins here (False: it goes on from a checkpoint in its middle); counts from its start."""
        if not self.between_epochs:
            return False
        self.between_epochs, self.is_last_batch, self.cut = False, False, None
        self.batches_done = self.steps_in_epoch = self.evaluated_in_all = 0
        self.stepped_before = self.batches_that_stepped
        return True

    def place(self) -> Place:
        """Where a resume goes on from a checkpoint that is saved now.

        After an error in the middle of a step, that is behind the last window of batches that was done. If only hooks or
        a validation were still to come after its update, they come on resume, as after a callback's save.
        """
        done, total, is_last, fx = self.batches_done, self.total_batches, self.is_last_batch, self.metrics.fx
        if not self.has_failed or self.between_epochs:
            return Place(done, total, is_last, fx)
        windows = self.batches_that_stepped - self.stepped_before
        if self.steps_in_epoch > windows:
            return Place(done, total, is_last, "on_train_batch_end", is_exact=False)
        undone = max(done - windows * self.window, 0)
        is_exact = undone == 0 and self.feed.is_quiet
        return Place(done - undone, total - undone, is_last and not undone, None, is_exact)

    @property
    def was_cut_short(self) -> bool:
        """Whether the epoch was ended in its middle that a checkpoint is from; its end comes (once more)."""
        return self.stops and self.restored is not None and not self.between_epochs

    def end_epoch(self) -> None:
        """The epoch is over."""
        self.epochs_done += 1
        self.between_epochs = True

    @property
    def current_epoch(self) -> int:
        """The epoch that runs, or that would be next; counted from 0."""
        return self.epochs_done

    def limits(self) -> tuple[int, int]:
        """(max_epochs, max_steps), -1 for no limit."""
        config = self.config
        epochs = config.max_epochs
        if epochs is None:
            endless = config.max_steps != -1 or config.max_time is not None or self.has_timer
            epochs = -1 if endless else 1000
        return epochs, config.max_steps

    @property
    def has_timer(self) -> bool:
        """Whether a Timer callback ends the run."""
        return any(is_a(callback, "Timer") for callback in self.callbacks)

    @property
    def steps_done(self) -> bool:
        """Whether max_steps is reached."""
        return self.config.max_steps != -1 and self.global_step >= self.config.max_steps

    @property
    def stops(self) -> bool:
        """Whether training ends here, in the middle of an epoch, too."""
        return self.steps_done or (self.should_stop and self.may_stop) or is_time_over(self)

    def done(self) -> bool:
        """Whether to leave the loop of epochs: asked before the first one, too."""
        epochs, _ = self.limits()
        return self.feed.num_batches == 0 or self.stops or (epochs != -1 and self.epochs_done >= epochs)

    @property
    def may_stop(self) -> bool:
        """Whether min_epochs and min_steps allow to stop early."""
        return self.epochs_done >= self.min_epochs and self.global_step >= (self.config.min_steps or 0)

    @property
    def min_epochs(self) -> int:
        """How many epochs there are at least; one when there are to be steps."""
        config = self.config
        return config.min_epochs if config.min_epochs is not None else 0 if config.min_steps is None else 1

    @property
    def is_last_of_epoch(self) -> bool:
        """Whether the batch at hand is the epoch's last."""
        return self.is_last_batch or self.batches_done == self.feed.num_batches

    @property
    def accumulates(self) -> bool:
        """Whether the optimizer waits for more batches."""
        return self.batches_done % self.window != 0 and not self.is_last_of_epoch

    # ---- values

    def known_metrics(self) -> dict[str, Any]:
        """What can be monitored now: the logged metrics, and what the steps of a module that logs nothing returned."""
        if self.metrics.active:
            self.metrics.merge()
        return {**self.history.returned, **self.metrics.callback}

    def measured(self) -> Any:
        """The monitor's newest value as it was made, None where there is none."""
        return {**self.history.returned, **self.metrics.callback}.get(self.config.monitor)

    def score(self) -> float | None:
        """The monitor's value for checkpoints; None without a monitor, or where this epoch did not measure it."""
        monitor = self.config.monitor
        if self.saver is None or monitor is None:
            return None
        known = self.known_metrics()
        return float(known[monitor]) if monitor in known else None

    def check_monitor(self, score: float | None) -> None:
        """Refuse a monitor that was never logged, once the epoch is safe on disk."""
        monitor = self.config.monitor
        if monitor is None or score is not None or (self.schedule.validates and not self.has_validated):
            return
        if any(monitor in row for row in self.history.rows):  # max_steps has ended this epoch before its validation
            return
        known = sorted(self.history.rows[-1].keys() - {"epoch", "step", "time"}) if self.history.rows else []
        raise Misuse(
            f"monitor={monitor!r} was not logged in epoch {self.current_epoch - 1}; logged were {known}: write monitor= with"
            " one of these; last.ckpt is saved, resume='last' goes on from it"
        )

    def note_returned(self, output: Any, loss: Tensor) -> None:
        """Keep what the training step returned, for the history and to notice a loss that is no number."""
        named_itself = self.is_lightning and self.metrics.active  # the rest, by logging it
        only_loss = isinstance(output, Tensor) or named_itself
        values = {"train_loss": loss} if only_loss else name_outputs(output, "train")
        self.history.train.add(values, self.size_of_batch(), self.total_batches - 1)

    def record_evaluated(self, index: int) -> None:
        """After an evaluation batch: values that are logged per step."""
        seen = self._seen.get(index, 0)
        self._seen[index] = seen + 1
        if self.metrics.active.any_on_step:
            self.record.values(self.metrics.step_log(), seen)

    def size_of_batch(self) -> int:
        """The size of the batch at hand; 1 where none can be found."""
        collection = self.metrics.active
        try:
            return collection.batch_size or collection.size_of_batch()
        except ValueError:
            return 1

    def learning_rates(self) -> list[float]:
        """The first learning rate of each optimizer."""
        return [float(group["lr"]) for o in self.optimizers for group in o.param_groups[:1] if "lr" in group]

    # ---- odds and ends

    @property
    def all_reduce(self) -> Callable[..., Tensor] | None:
        """How to reduce over the ranks; None for one process."""
        return self.fabric.all_reduce if self.fabric.world_size > 1 else None

    def clear_gradients(self) -> None:
        """Free the gradients before a validation, the module's way or all."""
        hook = overrides(self.owner, "on_validation_model_zero_grad")
        (hook or self.net.zero_grad)()

    @contextmanager
    def isolated_rng(self) -> Iterator[None]:
        """Random numbers drawn inside leave no trace."""
        state = rng_state()
        try:
            yield
        finally:
            set_rng_state(state)

    def inference(self) -> bool:
        """Whether evaluation may use torch.inference_mode; gloo cannot."""
        gloo = torch.distributed.is_available() and torch.distributed.is_initialized()
        return self.config.inference_mode and not (gloo and torch.distributed.get_backend() == "gloo")

    @property
    def has_summary(self) -> bool:
        """Whether a callback prints the model already."""
        return any(is_a(callback, "ModelSummary") for callback in self.callbacks)

    def replace_optimizers(self, optimizers: list[Any]) -> None:
        """A callback brings other optimizers."""
        self.optimizers = list(optimizers)
        self.loop_optimizers = [LoopOptimizer(optimizer, self) for optimizer in self.optimizers]
        if hasattr(self, "update"):
            self.set_up_update()

    def warn_once(self, text: str, kind: type[Warning] = UserWarning) -> None:
        """Warn, the first time."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, kind, stacklevel=3)
