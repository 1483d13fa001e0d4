"""Run: the state of one fit, validate, test or predict."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from .config import LoopConfig, parse_duration
from .data import INFINITE, HandedPass, make_transfer
from .errors import Misuse
from .history import History, name_outputs
from .hooks import Hooks, is_a, overrides
from .loaders import Loaders
from .logs import CSVLogger
from .metrics import Metrics
from .optimizers import SchedulerConfig, parse_optimizers
from .profiling import TimedPass
from .randomness import rng_state, set_rng_state
from .saver import Saver
from .sharing import ready
from .steps import FunctionSteps, Steps, takes_batch_idx, takes_iterator
from .update import AutomaticUpdate, LoopOptimizer, ManualUpdate

if TYPE_CHECKING:
    from .loop import FabricLoop


class Run:
    """The state of one call of fit, validate, test or predict.

    What is set in ``__init__`` is plain and travels to other processes; the rest is made there by `set_up`.
    """

    def __init__(
        self, fn: str, config: LoopConfig, owner: Any, net: nn.Module, datamodule: Any, callbacks: list
    ) -> None:
        self.fn, self.config, self.owner, self.net, self.datamodule = fn, config, owner, net, datamodule
        self.source = owner if datamodule is None else datamodule  # whose methods make loaders that were not given
        self.callbacks, self.loggers = callbacks, []
        self.given: dict[str, Any] = {}  # loaders by stage, as they were given
        self.given_optimizer: Any = None
        self.resume_path: str | Path | None = None
        self.load_path: str | Path | None = None
        self.is_auto = False  # resume="auto"
        self.is_auto = self.awaits_auto = False  # resume="auto"; still to be agreed on by the ranks
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
        self.has_validated = False
        self.window = config.accumulate_grad_batches
        self.placed = False  # whether name and version are chosen
        self.checkpoint: dict[str, Any] | None = None  # until it is restored
        self.stopped_by: int | None = None  # the signal that ended training
        self.validated_at = 0.0
        self.saved_in: str | None = None  # the hook in which a callback saved the checkpoint that is resumed
        self.restored: dict[str, Any] | None = None  # our part of the checkpoint, until the first epoch has begun

        self.train: Loaders | None = None
        self.val: Loaders | None = None
        self.num_batches: int | float = INFINITE  # training batches of an epoch
        self.batches: Any = None  # the pass over the training batches
        self.val_check_batch: int | float | None = None
        self.val_check_seconds = 0.0  # between validations that go by the clock
        self.optimizers: list[Any] = []
        self.loop_optimizers: list[Any] = []
        self.schedulers: list[SchedulerConfig] = []
        self.saver: Saver | None = None
        self.history = History()
        self.metrics = Metrics()
        self.hooks = Hooks(None, callbacks, owner, self.metrics)
        self._warned: set[str] = set()
        self.loaders_epoch: dict[str, int] = {}  # the epoch in which each stage's loaders were made
        self._seen: dict[int, int] = {}  # evaluation batches by loader, for the step of their log
        self.predictions: list[list[Any]] = []  # by loader, then by batch
        self.batch_indices: list[list[list[int]]] = []  # the samples of each, for callbacks that write predictions
        self.evaluated = self.evaluated_in_all = 0  # batches of this evaluation; of all since the epoch began

    # ---- made in the process that runs

    def set_up(self, loop: FabricLoop, fabric: Fabric) -> None:
        """Make what needs the process: hooks with their trainer, metrics that reduce, the steps' door."""
        self.fabric, config = fabric, self.config
        self.metrics = Metrics(fabric.all_reduce, distributed=fabric.world_size > 1)
        self.metrics.enabled = not config.barebones
        self.metrics.has_logger = bool(self.loggers)
        self.hooks = Hooks(loop, self.callbacks, self.owner, self.metrics, loop.own_profiler)
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
        for optimizer in self.optimizers:  # states made before the move (a loaded optimizer) follow their parameters
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        device = value.device if key == "step" else parameter.device
                        state[key] = value.to(device, copy=value.is_shared())  # shared: a launcher spawned with it
        self.loop_optimizers = [LoopOptimizer(optimizer, self) for optimizer in self.optimizers]

    def set_up_update(self) -> None:
        """Know how a batch becomes an update, and how it comes to its device."""
        self.metrics.name_metrics(self.owner)
        self.update = (AutomaticUpdate if self.is_automatic else ManualUpdate)(self)
        self.train_batch = self.hooks.timed(self.update, "run_training_batch")
        if self.hands_iterator:
            self.train_batch = self._hand_over(self.train_batch)
        self.transfer = None if self.hands_iterator else self.make_transfer()

    def make_transfer(self) -> Callable[[Any, int], Any] | None:
        """What brings a batch to its device, through the datamodule's or module's hooks; None: it is there."""
        names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        hooks = [self.hooks.own(self.source, name) or self.hooks.own(self.owner, name) for name in names]
        transfer = make_transfer(self.fabric, self.steps.convert(), hooks)
        return transfer and self.hooks.timed(
            transfer, f"[Strategy]{type(self.fabric.strategy).__name__}.batch_to_device"
        )

    # ---- what the module is

    @property
    def name(self) -> str:
        """What the user calls the model in errors: its class."""
        return type(self.net if isinstance(self.owner, FunctionSteps) else self.owner).__name__

    @property
    def is_automatic(self) -> bool:
        """Whether the loop steps the optimizer (False: the module does)."""
        return getattr(self.owner, "automatic_optimization", True)

    @property
    def hands_iterator(self) -> bool:
        """Whether the training step takes its batches itself, from ``dataloader_iter``."""
        return takes_iterator(self.owner.training_step)

    def _hand_over(self, train_batch: Callable) -> Callable:
        """The update, its step given the pass; a step that asks for more than there is ends the epoch."""

        def train(_: Any, batch_idx: int, last_of_window: bool) -> Any:
            handed = self.batches.handed
            try:
                return train_batch(handed, batch_idx, last_of_window)
            except StopIteration:
                self.metrics.fx = None
                return {}
            finally:
                self.is_last_batch = handed.done

        return train

    def takes_idx(self, step: str) -> bool:
        """Whether a step takes the batch's index."""
        return takes_batch_idx(getattr(self.owner, step))

    @property
    def validates(self) -> bool:
        """Whether fit validates at all."""
        has_step = overrides(self.owner, "validation_step") is not None
        return has_step and self.config.limit_val_batches > 0 and self.has_loader("val")

    # ---- loaders

    def has_loader(self, stage: str) -> bool:
        """Whether there is a loader for this stage, asked without making it."""
        return self._loader_source(stage) is not None

    def _loader_source(self, stage: str) -> Any:
        """The loader given, or the method that makes it: the datamodule's, without a datamodule the module's."""
        if self.given.get(stage) is not None:
            return self.given[stage]
        return self.hooks.own(self.source, f"{stage}_dataloader")

    def loaders(self, stage: str) -> Loaders:
        """The stage's loaders, made ready; asked of the datamodule or module anew each time."""
        source = self._loader_source(stage)
        origin = f"passed to `Trainer.{self.fn}({loader_argument(self.fn, stage)}=...)`"
        if self.given.get(stage) is None:
            origin = f"returned from `{type(self.source).__name__}.{stage}_dataloader()`"
            source = source()
        config = self.config
        overfit = bool(config.overfit_batches) and self.fn == "fit"
        may_be_empty = any(
            getattr(part, "allow_zero_length_dataloader_with_multiple_devices", False)
            for part in (self.owner, self.source)
        )
        make_ready = partial(ready, fabric=self.fabric, stage=stage, overfit=overfit, may_be_empty=may_be_empty)
        limit = getattr(config, f"limit_{stage}_batches")
        keeps_position = self.fn == "fit" and (config.enable_checkpointing or self.resume_path is not None)
        return Loaders(source, stage, limit, make_ready, origin, bool(keeps_position))

    def set_up_train_data(self) -> None:
        """Make the training loader when there is none yet or it is due to be made again, and begin a pass over it.

        A run that is resumed begins none: `restore_position` does, if the checkpoint is from the middle of one.
        """
        if self.train is not None and not self._reload_due("train"):
            return
        self.train = self.loaders("train")
        self.loaders_epoch["train"] = self.current_epoch
        if self.restored is None:
            self.start_pass()
        self.num_batches = self.train.num_batches
        self.train.check_mode()
        self.val_check_batch = val_check_batch(self.config, self.train.num_batches, self.validates)
        if self.val_check_batch is None:
            self.val_check_seconds = parse_duration(self.config.val_check_interval).total_seconds()
        few = self.config.log_every_n_steps > self.train.num_batches and not self.config.fast_dev_run
        if few and self.loggers and any(not isinstance(logger, CSVLogger) for logger in self.loggers):
            self.warn_once(
                f"The number of training batches ({self.train.num_batches}) is smaller than the logging interval"
                f" Trainer(log_every_n_steps={self.config.log_every_n_steps}). Set a lower value for log_every_n_steps if"
                " you want to see logs for the training epoch."
            )

    def start_pass(self) -> None:
        """Begin a pass over the training batches, or go on with the one that a checkpoint was in."""
        self.batches = None  # the workers of the pass before go first
        batches = self._timed(self.train.start(self.batches_done))
        self.batches = HandedPass(batches, self.batches_done) if self.hands_iterator else batches

    def _timed(self, batches: Any) -> Any:
        return batches if self.hooks.profiler is None else TimedPass(batches, self.hooks.profiler)

    def starts_epoch(self) -> bool:
        """Whether an epoch begins here (False: it goes on from a checkpoint in its middle); counts from its start."""
        if not self.between_epochs:
            return False
        self.between_epochs, self.is_last_batch = False, False
        self.batches_done = self.steps_in_epoch = self.evaluated_in_all = 0
        self.stepped_before = self.batches_that_stepped
        return True

    def begin_pass(self) -> None:
        """Begin the epoch's pass. The first epoch's was begun with the loader, where Trainer begins it."""
        if self.current_epoch > 0:
            self.start_pass()

    @property
    def batches_in_pass(self) -> int | None:
        """Batches done of the pass that was begun; None between two passes (the first one begins before its epoch)."""
        if self.between_epochs:
            return None if self.epochs_done else 0
        return self.batches_done

    def begin_rest_of_pass(self) -> None:
        """Another trainer's checkpoint from the middle of an epoch: a new pass, of as many batches as were left."""
        self.train.set_epoch(self.current_epoch)
        self.start_pass()

    def end_epoch(self) -> None:
        """The epoch is over."""
        self.epochs_done += 1
        self.between_epochs = True

    def close_loaders(self) -> None:
        """End the loaders' worker processes; left to the garbage collector they wait for seconds, at any time."""
        for part in (self.batches, self.train, self.val):
            if part is not None:
                part.close()
        self.batches = None

    def set_up_val_data(self) -> None:
        """Make the validation loaders when there are none yet or they are due to be made again.

        Those of the sanity check serve the first epoch, too; if that does not validate, they are due at once.
        """
        if self.val is None or self._reload_due("val"):
            self.val = self.loaders("val")
            if self.stage != "sanity_check" or self.validation_epoch:
                self.loaders_epoch["val"] = self.current_epoch

    def set_up_evaluation(self, stage: str) -> None:
        """Make the loaders of validate, test or predict; a sampler that shuffles by epoch does it by the last one."""
        self.val = self.loaders(stage)
        self.val.check_mode()
        self.val.set_epoch(self.current_epoch)

    def _reload_due(self, stage: str) -> bool:
        every = self.config.reload_dataloaders_every_n_epochs
        return bool(every) and self.current_epoch - self.loaders_epoch.get(stage, -math.inf) >= every

    # ---- where the run stands

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

    def done(self) -> bool:
        """Whether to leave the loop of epochs: asked before the first one, too."""
        epochs, _ = self.limits()
        over = epochs != -1 and self.epochs_done >= epochs
        return self.num_batches == 0 or self.steps_done or over or (self.should_stop and self.may_stop)

    @property
    def may_stop(self) -> bool:
        """Whether min_epochs and min_steps allow to stop early."""
        config = self.config
        min_epochs = config.min_epochs if config.min_epochs is not None else 1 if config.min_steps is not None else 0
        return self.epochs_done >= min_epochs and self.global_step >= (config.min_steps or 0)

    @property
    def is_last_of_epoch(self) -> bool:
        """Whether the batch at hand is the epoch's last."""
        return self.is_last_batch or self.batches_done == self.num_batches

    @property
    def accumulates(self) -> bool:
        """Whether the optimizer waits for more batches."""
        return self.batches_done % self.window != 0 and not self.is_last_of_epoch

    @property
    def validation_epoch(self) -> bool:
        """Whether this epoch validates at all."""
        every = self.config.check_val_every_n_epoch
        return self.validates and (every is None or (self.current_epoch + 1) % every == 0)

    def validation_due(self) -> bool:
        """Whether to validate after the batch at hand, in an epoch that validates."""
        if self.should_stop and self.may_stop:
            return True
        config, due = self.config, self.val_check_batch
        if due is None:
            return time.monotonic() - self.validated_at >= self.val_check_seconds
        if due == INFINITE:
            if isinstance(config.limit_train_batches, int) and not self.is_last_batch:
                return self.batches_done % config.limit_train_batches == 0
            return self.is_last_batch
        count = self.total_batches if config.check_val_every_n_epoch is None else self.batches_done
        return count % due == 0 or (self.is_last_batch and self.hands_iterator)

    # ---- schedulers, values

    def due_schedulers(self, interval: str, plateau: bool) -> list[SchedulerConfig]:
        """The schedulers to step now."""
        if not self.schedulers or not self.is_automatic:
            return []
        count = self.batches_done if interval == "step" else self.current_epoch + 1
        return [  # SchedulerConfig's words, or those of Lightning's LRSchedulerConfig that a callback has put there
            config
            for config in self.schedulers
            if config.reduce_on_plateau == plateau and config.interval == interval and count % config.frequency == 0
        ]

    def known_metrics(self) -> dict[str, Any]:
        """What can be monitored now: the logged metrics, and what the steps of a module that logs nothing returned."""
        if self.metrics.active:
            self.metrics.merge()
        return {**self.history.returned, **self.metrics.callback}

    def monitored(self, name: str) -> Any:
        """The value of a metric now, None if it was not logged."""
        return self.known_metrics().get(name)

    def score(self) -> float | None:
        """The monitor's value for checkpoints; None without a monitor, or where this epoch did not measure it."""
        monitor = self.config.monitor
        if self.saver is None or monitor is None:
            return None
        known = self.known_metrics()
        return float(known[monitor]) if monitor in known else None

    def check_monitor(self, score: float | None) -> None:
        """Refuse a monitor that was never logged, once the epoch is safe on disk.

        Raises:
            Misuse: the message lists what was logged.
        """
        monitor = self.config.monitor
        if monitor is None or score is not None or (self.validates and not self.has_validated):
            return
        known = sorted(self.history.rows[-1].keys() - {"epoch", "step", "time"}) if self.history.rows else []
        raise Misuse(
            f"monitor={monitor!r} was not logged in epoch {self.current_epoch - 1}; logged were {known}: write monitor= with"
            " one of these; last.ckpt is saved, resume='last' goes on from it"
        )

    def note_returned(self, output: Any, loss: Tensor) -> None:
        """Keep what the training step returned, for the history and to notice a loss that is no number."""
        only_loss = isinstance(output, Tensor) or self.metrics.active  # a module that logs has named the rest itself
        values = {"train_loss": loss} if only_loss else name_outputs(output, "train")
        self.history.train.add(values, self.size_of_batch(), self.total_batches - 1)

    def note_evaluated(self, output: Any, prefix: str, batch_idx: int) -> None:
        """Keep what an evaluation step of a module that logs nothing returned."""
        if not self.metrics.active and (values := name_outputs(output, prefix)):
            self.history.val.add(values, self.size_of_batch(), batch_idx)

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
        yield
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

    def gather(self, value: Any) -> list[Any]:
        """One value of each rank, on all ranks."""
        if self.fabric.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.fabric.world_size
        torch.distributed.all_gather_object(gathered, move_data_to_device(value, "cpu"))
        return gathered

    def warn_once(self, text: str, kind: type[Warning] = UserWarning) -> None:
        """Warn, the first time."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, kind, stacklevel=3)


def loader_argument(fn: str, stage: str) -> str:
    """By what name a verb takes the loaders of a stage."""
    return f"{stage}_dataloaders" if fn == "fit" else "dataloaders"


def is_lightning(owner: Any) -> bool:
    """Whether this is a LightningModule, of whichever package, by its shape."""
    return isinstance(getattr(type(owner), "trainer", None), property) and callable(getattr(owner, "log", None))


def val_check_batch(config: LoopConfig, num_batches: int | float, validates: bool) -> int | float | None:
    """Validate every so many batches; None: by the clock; infinity: at the end of a pass without length."""
    interval = config.val_check_interval
    if not isinstance(interval, int | float):
        return None
    if isinstance(interval, int):
        if interval > num_batches and config.check_val_every_n_epoch is not None and validates:
            raise Misuse(
                f"`val_check_interval` ({interval}) must be less than or equal to the number of the training batches"
                f" ({num_batches}). If you want to disable validation set `limit_val_batches` to 0.0 instead. If you want"
                " to validate based on the total training batches, set `check_val_every_n_epoch=None`."
            )
        return interval
    if num_batches == INFINITE:
        if interval == 1.0:
            return INFINITE
        raise Misuse(
            f"val_check_interval={interval}: the train loader has no length, so there is no fraction of it; expected 1.0,"
            " an int (batches) or a time"
        )
    return max(1, int(num_batches * interval))
