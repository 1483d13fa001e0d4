# SPDX-License-Identifier: MIT
# Copyright (c) 2026 the fabric_template authors
"""Train PyTorch models with a training loop in one file that you can read, copy and change.

This file is part of fabric_template, under the MIT License (see LICENSE). To run a copy of this
file, install torch and lightning. FabricLoop, the other loop of fabric_template, has more options.
MiniLoop and FabricLoop can resume each other's runs.

To see how training works, read `fit`, `_train_epoch` and `_train_batch`. To change how training
works, edit one of these methods:

- `_compute_gradients`: the loss, its division by accumulate_grad_batches, and the backward pass
- `_step_optimizer`: the optimizer step, and clipping before the step
- `_is_window_end`: the batches after which the optimizer takes a step
- `_is_done`: when training stops
- `_set_up_optimizer`: the optimizer and the schedulers, such as a warm-up
- `_validate`: the validation data, and the weights used for validation
- `_end_row` and `_log_step`: the rows of metrics.csv and steps.csv
- `log` and `_log_output`: the values in these rows
- `_save`: which checkpoints are written
- `_build_checkpoint` and `_restore`: the content of a checkpoint
- `_train_batches` and `_move`: the order of the batches, and their transfer to the device

The first 800 lines contain the options, training, validation, batches and logging. The rest
of the file contains checkpoints, the set-up, checks and helper functions. You can edit the methods
above without reading `SavedAttributes`, which saves the state that state_dict() does not contain.
Checkpoints also contain attributes that you add to the loop. Create additional modules, optimizers
and loaders in `_reset` or `_set_up_optimizer`, because a resumed run restores only objects that
already exist.
"""

from __future__ import annotations

import atexit
import copy
import csv
import errno
import glob
import inspect
import io
import json
import marshal
import math
import os
import pickle
import platform
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
import warnings
import weakref
import zipfile
import zlib
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache, partial
from itertools import chain, count, islice
from logging import Logger
from numbers import Real
from pathlib import Path
from types import FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import IO, Any

import numpy as np
import torch
import yaml
from lightning.fabric import Fabric
from lightning.fabric import __version__ as lightning_version
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function, reset_seed
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import data as torch_data
from tqdm import tqdm


@dataclass(kw_only=True, eq=False)
class MiniLoop:
    """Train an nn.Module with step functions, or any object with a ``training_step`` method."""

    # Stop after this many epochs. -1 means no limit. None means 1000 epochs, or no limit if
    # max_steps is set.
    max_epochs: int | None = None
    max_steps: int = -1  # Stop after this many optimizer steps. -1 means no limit.
    name: str = "run"  # Files go to logs/<name>/version_<n> and checkpoints/<name>/version_<n>.
    # If version is None, a new run gets the next free number, and a resumed run keeps its version.
    version: int | str | None = None
    monitor: str | None = None  # The metric that selects best.ckpt.
    # "min" if lower values of the monitored metric are better, "max" if higher values are better.
    # "auto" infers this from the metric's name.
    mode: str = "auto"
    accumulate_grad_batches: int = 1  # The number of batches per optimizer step.
    gradient_clip_val: float | None = None  # Clip the total gradient norm to this value.
    validate_every_n_steps: int | None = None  # Validate and save every N optimizer steps.
    log_every_n_steps: int = 50  # Write a row to steps.csv every N optimizer steps. 0 means never.
    seed: int | None = None  # The random seed, set when the loop is created and when fit starts.
    default_root_dir: str | os.PathLike[str] | None = None  # The folder for logs/ and checkpoints/.
    accelerator: Any = "auto"  # An option of Fabric, like strategy, devices and precision.
    strategy: Any = "auto"
    devices: Any = "auto"  # "auto" means all GPUs or, with torchrun, one device per process.
    precision: Any = None
    # A lightning.Fabric object, to use instead of accelerator, strategy, devices and precision.
    fabric: Any = None
    hparams: Any = None  # Your own settings, such as {"lr": 0.1}. fit writes them to hparams.yaml.
    # Attributes of Trainer that LightningModules may read, as LightningModule.print() does.
    sanity_checking, logger, loggers, progress_bar_callback = False, None, (), None

    # Options and state

    def __post_init__(self) -> None:
        self._check_options()
        if isinstance(self.version, int):
            self.version = f"version_{self.version}"
        folder = "." if self.default_root_dir is None else self.default_root_dir
        text = f"default_root_dir: got {folder!r}, expected the path of a local folder."
        check(isinstance(folder, str | os.PathLike) and "://" not in str(folder), text)
        root = Path(folder).expanduser().absolute()
        self._logs, self._checkpoints = root / "logs" / self.name, root / "checkpoints" / self.name
        started, machines = started_processes()
        if self.fabric is None:
            names = ("accelerator", "strategy", "devices", "precision")
            options = {name: getattr(self, name) for name in names}
            if self.devices == "auto" and started > 1:
                options.update(devices=started // machines, num_nodes=machines)
            self.fabric = Fabric(**options)
        size, strategy = self.fabric.world_size, self.fabric.strategy
        text = f"devices: got {size}, but {started} processes were started. Leave out devices."
        check(started in (1, size), text)
        is_one_device = type(strategy) is SingleDeviceStrategy
        is_script = "MultiProcessing" not in type(strategy.launcher).__name__
        text = f"strategy: got {self.strategy!r} ({type(strategy).__name__}), expected a single"
        text += ' device, or "ddp" in a script. For other strategies, use FabricLoop.'
        check(is_one_device or (type(strategy) is DDPStrategy and is_script), text)
        self._precision = strategy.precision
        precision = str(self._precision.precision)
        self._converts_dtype = precision.endswith("-true") and precision != "32-true"
        is_one_cpu = is_one_device and self.fabric.device.type == "cpu"
        self._is_one_cpu_in_32_bits = is_one_cpu and precision == "32-true"
        self.active_stage: str | None = None  # The running stage: "fit", "validate" or None.
        # Options that cannot be changed after the loop is created.
        fixed = {field.name for field in fields(MiniLoop)} - {*NUMBERS, "fabric", "hparams"}
        self._created_with = {name: getattr(self, name) for name in fixed}
        self._reset()

    def _reset(self) -> None:
        """Seed the random generators, and reset the loop's counters and results."""
        if self.seed is not None:
            Fabric.seed_everything(self.seed, workers=True, verbose=False)
        self.current_epoch = self.global_step = 0  # Counts of finished epochs and optimizer steps.
        self.batches_done = 0  # The number of finished batches in the current epoch.
        # Set should_stop to True in all processes to end training after the current step.
        self.should_stop = False
        self.history: list[dict[str, Any]] = []  # The rows of metrics.csv.
        self.best_score: float | None = None
        # The best checkpoints with their scores, and the metric that selects them.
        self._best: dict[str, Any] = {"kept": {}, "monitor": self.monitor, "mode": self.mode}
        # The sums of the values logged in this epoch: {(hook, metric name): [sum, sum of the
        # weights, is_synced]}. With validate_every_n_steps, a second dict contains the sums since
        # the last row of metrics.csv.
        self._sums: list[dict[tuple[str, str], Any]] = [{}]
        self._torchmetrics: dict[tuple[str, str], Any] = {}  # The logged torchmetrics objects.
        self.callback_metrics: dict[str, Tensor] = {}  # The latest value of each logged metric.
        self._validated: dict[str, Tensor] = {}  # Validation metrics for the next metrics.csv row.
        self._validation_names: set[str] = set()  # The names of the latest validation's metrics.
        # The current training batch's values for steps.csv, or None between batches.
        self._step_values: Any = None
        self._is_first_batch = True  # True until the first training step of this run.
        self._loss: Any = None  # The loss of the latest batch.
        self._outputs: Any = None  # The outputs of the latest training step.
        self._hook = ""  # The name of the hook or step that is running.
        self._batch_size = 1  # The weight of the current batch in a metric's mean.
        self._logged_batch_size: Any = None  # The batch_size that a step passes to log().
        self._batches_in_window = 0  # The number of batches since the last optimizer step.
        self._batches: Any = None  # The current epoch's iterator over the training loader.
        self._bar: Any = None  # The current epoch's progress bar.
        self._epoch_start: Any = None  # The loaders' state at the start of the epoch.
        self._before_next: Any = None  # The RNG state before the latest batch was prefetched.
        # State from the resumed checkpoint, such as RNG states, attributes and changed options.
        self._resumed_state: Any = None
        self._saved_step: int | None = None  # The global_step in last.ckpt, if this file exists.
        # The row count and the column names of each CSV file.
        self._tables: dict[str, Any] = {"metrics.csv": (0, []), "steps.csv": (0, [])}
        self._columns: list[str] = []  # The columns of the printed rows.
        # The start time of the next row of metrics.csv, and the seconds spent waiting for batches.
        self._row_started, self._waited = time.monotonic(), 0.0

    # Training

    def fit(
        self,
        model: Any,  # An nn.Module, a LightningModule, or an object with step methods.
        train_dataloaders: Any,
        val_dataloaders: Any = None,
        # resume="auto" resumes the newest run, or starts a new run if there is no checkpoint.
        resume: str | Path | None = None,  # Resume from a path, "last", "best" or "auto".
        load: str | Path | None = None,  # Load only the weights from a path, "last" or "best".
        optimizer: Any = None,  # An optimizer, or any value that configure_optimizers may return.
        scheduler: Any = None,  # A scheduler to step once per epoch, or Lightning's scheduler dict.
        training_step: Callable[..., Any] | None = None,  # fn(model, batch[, batch_idx]) -> loss
        # A function fn(model, batch) that returns the loss, or a pair (loss, acc).
        validation_step: Callable[..., Any] | None = None,
        **others: Any,  # An unknown argument raises an error.
    ) -> Any:
        """Train a model. Return the rows of metrics.csv, as a DataFrame if pandas is installed."""
        refuse_unknown("fit", others, inspect.signature(self.fit).parameters)
        self._check_idle("fit")
        self._reset()
        self.optimizer: Any = optimizer
        self.schedulers: list[dict[str, Any]] = []
        self._set_up_steps(model, training_step, validation_step)
        self._check_fit(train_dataloaders, val_dataloaders, validation_step, optimizer)
        path, checkpoint = self._find_start(resume, load)
        resumed = {} if resume is None else checkpoint
        version = self._choose_version(path, resumed)
        with ExitStack() as stack:
            self._set_up_loaders(train_dataloaders, val_dataloaders, path, resumed)
            stack.enter_context(self._prepared_model("fit", path, checkpoint))
            self._attributes.record_start_values()
            self._set_up_optimizer(optimizer, scheduler)
            self._prepare_training(resumed)
            try:
                with self._opened_folders(version, is_new=not resumed):
                    if resumed:
                        self._restore(path, resumed, is_automatic=resume == "auto")
                    checkpoint.clear()  # Free the memory of the loaded checkpoint.
                    self._train()
            except KeyboardInterrupt:
                self._stop_batches()
                self._print_interruption()
                if not is_interactive():
                    raise
            finally:
                self._stop_batches()
        return to_table(self.history)

    def _train(self) -> None:
        """Train until a limit such as max_epochs is reached."""
        # A run that stops within an epoch may be killed before it writes its last row. A resumed
        # run then calls the remaining hooks and writes this row.
        is_row_missing = self._find_last_step() < self.global_step and self.batches_done > 0
        is_row_missing = is_row_missing and self._is_done()
        # If a limit is reached before the first batch, call no hooks.
        has_work = is_row_missing or not self._is_done()
        if has_work:
            self._start_training()
        if self._resumed_state is not None:
            self._restore_position(has_work)
        while is_row_missing or not self._is_done():
            self._train_epoch()
            is_row_missing = False
        if has_work:
            self._call("on_train_end")
        # Like Trainer, count an epoch as finished even if max_steps has ended it early.
        self.current_epoch += self.batches_done > 0
        if self.global_step > self._find_last_step():
            # The last row of metrics.csv may cover part of an epoch. A resumed run replaces it.
            self._end_row(self.current_epoch - 1)

    def _find_last_step(self) -> int:
        """Return the highest step in the rows of metrics.csv."""
        # A user may have sorted the CSV rows, so the last row may not be the newest one.
        return max((int(row["step"]) for row in self.history), default=0)

    def _is_done(self) -> bool:
        if 0 <= self.max_steps <= self.global_step:
            return True
        if self.max_epochs is not None and 0 <= self.max_epochs <= self.current_epoch:
            return True
        return self.should_stop

    def _train_epoch(self) -> None:
        """Train on the rest of an epoch, validate, write rows to CSV files and save checkpoints.

        When a run resumes, code before or after the call to ``_train_epoch`` may run a second time.
        Put code for the end of an epoch into on_train_epoch_end.
        """
        epoch, is_validated, self._is_last = self.current_epoch, False, False
        if self.batches_done == 0:
            self._call("on_train_epoch_start")
        batches: Iterable[Any] = self._train_batches()
        if self.batches_done == 0 and self.should_stop:
            # As in Trainer, an epoch has no batches if on_train_epoch_start sets should_stop.
            batches, self._is_last = (), True
        elif self._is_done():
            batches = ()
        for batch in batches:
            self._train_batch(batch)
            # A checkpoint contains no gradients, so save and stop only after an optimizer step.
            if self._batches_in_window > 0:
                continue
            is_validated = self._validate_if_due()
            self._step_schedulers("step", is_plateau=True)
            if is_validated and self._every is not None and not self._is_last:
                self._end_row(epoch)
                self._save(is_validated)
            if self._is_done():
                break
        text = "_train_batches: got an epoch without a last batch. Set self._is_last = True before"
        check(self._is_last or self._is_done(), f"{text} the last yield of an epoch.")
        self._update_metrics()
        if not self._is_last:
            self._save(is_validated)
        self._call("on_train_epoch_end")
        self._update_metrics()
        if self._is_last:
            self._step_schedulers("epoch", is_plateau=True)
            if self._every is None or is_validated:
                self._end_row(epoch)
            self._reset_metrics()
            self.current_epoch, self.batches_done, self._batches = epoch + 1, 0, None
            self._save(is_validated)

    def _train_batch(self, batch: Any) -> None:
        """Compute a batch's gradients. At the end of an accumulation window, step the optimizer."""
        batch_idx, interval = self.batches_done, self.log_every_n_steps
        self._is_row_due = bool(interval) and (self.global_step + 1) % interval == 0
        self._batch_size, self._logged_batch_size = find_batch_size(batch), None
        self._step_values = {}
        if self._call("on_train_batch_start", batch, batch_idx) == -1:
            text = "on_train_batch_start: got -1, but MiniLoop cannot end an epoch early. Use"
            raise TypeError(f"{text} FabricLoop.")
        is_window_end = self._is_window_end(batch) or self._is_last
        if is_window_end or self.fabric.world_size == 1:
            self._compute_gradients(batch, batch_idx)
        else:
            # With DDP, average the gradients over the processes only once per optimizer step.
            with self._step_module.no_sync():
                self._compute_gradients(batch, batch_idx)
        self.batches_done += 1
        self._batches_in_window += 1
        if is_window_end:
            step = self.global_step + 1
            self._step_optimizer()
            self.global_step, self._batches_in_window = step, 0
            rate = self.optimizer.param_groups[0].get("lr", math.nan)
            self._learning_rate = rate.clone() if isinstance(rate, Tensor) else rate
            self._step_schedulers("step", is_plateau=False)
            if self._is_last:
                self._step_schedulers("epoch", is_plateau=False)
        self._call("on_train_batch_end", self._outputs, batch, batch_idx)
        if is_window_end and self._is_row_due:
            self._log_step(self._step_values)
        self._batch_size, self._step_values = 1, None

    def _compute_gradients(self, batch: Any, batch_idx: int) -> None:
        """Run the forward pass and the backward pass, which accumulates the gradients.

        To add the gradients of another loss, return the sum of both losses from training_step. Call
        ``_compute_gradients`` only once per batch, because each call may clear earlier gradients.
        """
        if self._is_first_batch:
            output = self._run_first_step(batch, batch_idx)
        else:
            output = self._run_step("training_step", batch, batch_idx)
        output = as_mapping(output)
        loss = find_loss(output, batch_idx)
        # Keep the loss until the next step, so that autograd can reuse AccumulateGrad nodes.
        self._loss = loss
        self._log_output(output, "train_")
        if self._batches_in_window == 0:
            clear_gradients(self.optimizer)
        if self.accumulate_grad_batches > 1:
            loss = loss / self.accumulate_grad_batches
        # As in Trainer, on_train_batch_end gets the loss divided by accumulate_grad_batches.
        self._outputs = {**output, "loss": loss.detach()}
        try:
            self._precision.backward(loss, None)
        except RuntimeError as error:
            if "through the graph a second time" in str(error):
                raise RuntimeError(SECOND_BACKWARD) from error
            raise

    def _is_window_end(self, batch: Any) -> bool:
        """Return whether all processes step the optimizer now.

        After the last batch of an epoch, the optimizer always takes a step.
        """
        if self.accumulate_grad_batches == 1:
            return True
        is_end = self._is_last or (self.batches_done + 1) % self.accumulate_grad_batches == 0
        if self.fabric.world_size == 1:
            return is_end
        # All processes must step the optimizer together, because DDP averages their gradients.
        return bool(self.fabric.all_reduce(int(is_end), reduce_op="max"))

    def _step_optimizer(self) -> None:
        """Clip the gradients and call optimizer.step(). ``_train_batch`` increments global_step."""
        if self.gradient_clip_val:
            self._precision.unscale_gradients(self.optimizer)
            nn.utils.clip_grad_norm_(self._clipped, self.gradient_clip_val)
        try:
            self._precision.optimizer_step(self.optimizer)
        except TypeError as error:
            text = "optimizer: got an optimizer whose step() needs a closure. Use FabricLoop."
            check("'NoneType' object is not callable" not in str(error), text)
            raise

    def _step_schedulers(self, interval: str, is_plateau: bool) -> None:
        """Step the schedulers that are due: either only ReduceLROnPlateau, or all others.

        ReduceLROnPlateau steps after validation, because it may need a validation metric.
        """
        done = self.batches_done if interval == "step" else self.current_epoch + 1
        for config in self.schedulers:
            scheduler, monitor = config["scheduler"], config["monitor"]
            is_of_kind = isinstance(scheduler, ReduceLROnPlateau) == is_plateau
            if config["interval"] != interval or not is_of_kind or done % config["frequency"] != 0:
                continue
            if is_plateau:
                self._check_is_logged(monitor, "scheduler")
                scheduler.step(self.callback_metrics[monitor])
            else:
                scheduler.step()

    # Validation

    def validate(
        self, model: Any, dataloaders: Any, load: Any = None, validation_step: Any = None
    ) -> list[dict[str, float]]:
        """Validate a model. Like Trainer, return the metrics in a list with one dict."""
        self._check_idle("validate")
        self._set_up_steps(model, None, validation_step)
        if "validation_step" not in self._steps:
            raise TypeError(missing_step("validation_step", "validate"))
        path, checkpoint = self._find_start(None, load)
        self._set_up_loaders(None, dataloaders, path, {})
        with self._prepared_model("validate", path, checkpoint):
            checkpoint.clear()
            self._validate()
        return [{name: value.item() for name, value in self._validated.items()}]

    def _validate_if_due(self) -> bool:
        """Run validation if it is due, and return whether it ran."""
        is_due = self._is_last if self._every is None else self.global_step % self._every == 0
        if self.val_loader is None or not (is_due or self.should_stop):
            return False
        if self._is_last and self._batches is not None:
            # Before validation, run the code after the loader's last yield, as a for loop does.
            next(self._batches, END)
        state = get_rng_state()
        # Clear the gradients here and not in validate(), because a hook may call validate() before
        # optimizer.step().
        self.network.zero_grad()
        self._validate()
        if not is_due:
            # This validation runs only because should_stop is True. It must not change the random
            # numbers of a resumed run.
            set_rng_state(state)
        return True

    def _validate(self) -> None:
        """Validate in eval mode without gradients, and keep the metrics for metrics.csv.

        To validate with different weights, load them into the model before validation, and restore
        the trained weights afterwards.
        """
        training, self._sums, self._step_values = self._sums, [{}], None
        modes = modes_of(self.network)
        self.network.eval()
        try:
            with torch.no_grad():
                set_epoch(self.val_loader, self.current_epoch)
                # If an error occurs, closing() ends the worker processes.
                with closing(self._timed(self._read_batches(self.val_loader))) as batches:
                    self._call("on_validation_epoch_start")
                    for batch_idx, batch in enumerate(batches):
                        self._batch_size, self._logged_batch_size = find_batch_size(batch), None
                        output = self._run_step("validation_step", self._move(batch), batch_idx)
                        self._log_output(output, "val_")
                self._batch_size = 1
                self._update_metrics()
                self._call("on_validation_epoch_end")
        finally:
            if self._is_lightning_module:
                for module, is_training in modes.items():
                    module.training = is_training
            else:
                set_modes(modes)
        self._validated = self._update_metrics()
        if not self._validated:
            text = "validation_step returned no value and logged no metric. Return the loss at the"
            warnings.warn(f"{text} end of the step.", stacklevel=3)
        self._reset_metrics()
        self._sums = training
        self._validation_names = set(self._validated)

    # Batches and steps

    def _train_batches(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch, and set ``_is_last`` for the last batch.

        If you skip, repeat, reorder or combine batches, runs cannot resume exactly within an epoch.
        """
        length = self.num_training_batches
        is_started = self._batches is not None
        if not is_started:
            self._start_batches()
        if self.batches_done == 0:
            if is_started and self._is_lightning_module:
                set_epoch(self.train_loader, self.current_epoch)
            # Hooks such as on_train_start may have changed the loader after iter() was called, so
            # record its state again.
            first = self._attributes.get_changed_state(True) if is_started else get_rng_state()
            self._epoch_start["first_batch"] = first
        # Outside of terminals and notebooks, update the progress bar only once a minute. In
        # notebooks, use stdout, because notebooks show stderr in red.
        is_notebook = "ipykernel" in sys.modules
        seconds = 0.2 if sys.stderr.isatty() or is_notebook else 60.0
        bar: dict[str, Any] = {"mininterval": seconds, "delay": seconds, "leave": False}
        bar.update(file=sys.stdout if is_notebook else sys.stderr)
        bar.update(initial=self.batches_done, total=None if length == math.inf else length)
        bar.update(desc=f"epoch {self.current_epoch}", disable=not self.fabric.is_global_zero)
        self._bar = ProgressBar(self._batches, **bar)
        for is_last, batch in self._timed(self._bar):
            self._is_last = is_last
            yield self._move(batch)
        text = f"train_dataloaders: got {self.batches_done} batches in an epoch, expected {length}."
        text += " Pass a loader that restarts in each epoch, such as a DataLoader or a list."
        check(self._is_last, text)

    def _timed(self, batches: Iterable[Any]) -> Generator[Any]:
        """Yield batches, and add up the seconds spent waiting for them."""
        started = time.monotonic()
        for batch in batches:
            self._waited += time.monotonic() - started
            yield batch
            started = time.monotonic()

    def _move(self, batch: Any) -> Any:
        """Move a batch to the device, and convert it to a precision such as "bf16-true"."""
        if self._converts_dtype:
            batch = self._precision.convert_input(batch)
        # A fast path for the usual batch of a DataLoader, which is a list of tensors.
        is_list = type(batch) in (list, tuple) and set(map(type, batch)) == {Tensor}
        if self._is_one_cpu_in_32_bits and is_list:
            return type(batch)(batch)
        return self.fabric.to_device(batch)

    def _run_step(self, name: str, batch: Any, batch_idx: int) -> Any:
        """Call training_step or validation_step with the loop's precision and strategy."""
        self._hook = name
        try:
            if self._is_one_cpu_in_32_bits:
                return self._steps[name](batch, batch_idx)
            with self._precision.forward_context():
                if isinstance(self._precision, MixedPrecision):
                    # Like Trainer, do not let autocast cache converted weights.
                    torch.set_autocast_cache_enabled(False)
                return self._step_module(self._steps[name], batch, batch_idx)
        except (AttributeError, RuntimeError, TypeError) as error:
            text = next((INSTEAD[part] for part in INSTEAD if part in str(error)), None)
            if text is None:
                raise
            kind = RuntimeError if isinstance(error, RuntimeError) else TypeError
            raise kind(text.format(step=name)) from error

    def _call(self, hook: str, *args: Any) -> Any:
        self._hook = hook
        method = getattr(self.model, hook, None)
        return None if method is None else method(*args)

    # Logging

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        sync_dist: bool = False,
        batch_size: Any = None,
        **options: Any,
    ) -> None:
        """Log a value to steps.csv (on_step) and its mean to metrics.csv (on_epoch)."""
        check_log_arguments(options)
        if name not in self.callback_metrics:
            check_metric_name(name)
        if self._hook in ("", "on_train_end"):
            place = "in on_train_end" if self._hook else "outside of the model's steps and hooks"
            text = f"log: got {name!r} {place}, expected a call in a step, or in a hook such as"
            raise ValueError(f"{text} on_train_epoch_end.")
        is_in_batch = self._step_values is not None
        on_step = is_in_batch if on_step is None else on_step
        on_epoch = not is_in_batch if on_epoch is None else on_epoch
        if not (on_epoch or (on_step and is_in_batch)):
            text = f"log: got {name!r} with on_step={on_step} and on_epoch={on_epoch} in"
            text += f" {self._hook}, but these arguments log nothing. Write on_epoch=True."
            raise ValueError(text)
        if batch_size is not None and type(batch_size) is not int:
            # Clone a tensor, because the step may later change it in place.
            batch_size = to_metric("batch_size", batch_size).clone()
        # A batch_size of 0 excludes this batch from the metric's mean.
        self._logged_batch_size = self._logged_batch_size if batch_size is None else batch_size
        if not isinstance(value, Tensor) and hasattr(value, "compute"):
            self._add_torchmetric(name, value, on_epoch)
            # Use a private attribute, because torchmetrics has no public one for a batch's value.
            value, on_epoch = getattr(value, "_forward_cache", None), False
            on_step = on_step and value is not None
        if not (on_epoch or on_step):
            return
        value = to_metric(name, value)
        if on_epoch:
            weight = self._batch_size if batch_size is None else batch_size
            self._add_to_mean((self._hook, name), value, weight, sync_dist)
        if on_step and is_in_batch:
            # Clone the logged tensor, because the step may later change it in place.
            value = value.clone()
            self.callback_metrics[name] = self.fabric.all_reduce(value) if sync_dist else value
            if self._is_row_due and name not in ("step", "epoch"):
                self._step_values[name] = self.callback_metrics[name]

    def log_dict(
        self,
        dictionary: Mapping[str, Any],
        step: int | None = None,
        sync_dist: bool = False,
        **options: Any,
    ) -> None:
        """Call ``log`` for each value of a dict, with the same arguments."""
        text = f"log_dict: got step={step}, but MiniLoop does not support step=. Remove it, or use"
        check(step is None, f"{text} FabricLoop.")
        for name, value in dictionary.items():
            self.log(name, value, sync_dist=sync_dist, **options)

    def _log_output(self, output: Any, prefix: str) -> None:
        """Log a step's output, which is a loss, a pair (loss, acc) or a dict of numbers."""
        values = as_mapping(output)
        if self._is_lightning_module:
            # Read only the loss, because a LightningModule logs its other values itself.
            name = "loss" if "loss" in values else f"{prefix}loss"
            values = {name: values[name]} if name in values else {}
        names = [key if str(key).startswith(prefix) else f"{prefix}{key}" for key in values]
        text = f"{self._hook}: two of the returned keys {list(values)} refer to the same column."
        check(len({*names}) == len(names), f"{text} Return only one of them.")
        logged = {name for hook, name in self._sums[0] if hook != "returned"}
        for name, value in zip(names, values.values(), strict=True):
            # A logged value replaces a returned value of the same name.
            if is_number(value) and name not in logged:
                sizes = (self._logged_batch_size, self._batch_size, 1)
                weight = next(size for size in sizes if size is not None)
                self._add_to_mean(("returned", name), to_metric(name, value), weight, True)

    def _add_to_mean(self, key: tuple[str, str], value: Any, weight: Any, is_synced: bool) -> None:
        """Add a value to a metric's running sums, without waiting for the GPU."""
        if weight is None:
            text = f"log: got {key[1]!r} without batch_size, for a batch that contains no tensor."
            raise ValueError(f"{text} Write self.log(name, value, batch_size=...).")
        for sums in self._sums:
            if key not in sums:
                check_metric_name(key[1])
                self._warn_if_not_synced(key[1], is_synced)
                sums[key] = [torch.zeros((), device=value.device), 0, is_synced]
            total, total_weight, _ = sums[key]
            if weight in POWERS_OF_TWO:
                total = torch.add(total, value, alpha=weight)
            else:
                total = total + value * weight
            sums[key] = [total, total_weight + weight, is_synced]

    def _add_torchmetric(self, name: str, metric: Any, on_epoch: bool) -> None:
        saves_in_epoch = self._every is not None or self.max_steps != -1
        is_of_training = on_epoch and "validation" not in self._hook
        text = f"log: got the torchmetrics object {name!r} together with validate_every_n_steps or"
        text += " max_steps. MiniLoop cannot save the state of torchmetrics objects within an"
        text += " epoch. Use FabricLoop."
        check(not (saves_in_epoch and is_of_training), text)
        self._torchmetrics[self._hook, name] = metric
        for sums in self._sums if on_epoch else ():
            sums.setdefault((self._hook, name), [None, 0, False])

    def _warn_if_not_synced(self, name: str, is_synced: bool) -> None:
        if not is_synced and self.fabric.world_size > 1 and self.fabric.is_global_zero:
            text = f"log: got {name!r} without sync_dist=True. The CSV files contain the mean"
            text += " over the batches of only one process. Pass sync_dist=True to log()."
            warnings.warn(text, stacklevel=5)

    def _compute(self, sums: dict[tuple[str, str], Any]) -> dict[tuple[str, str], Tensor]:
        """Return each metric's mean, or the result of compute() for a torchmetrics object."""
        synced = [key for key, (_, _, is_synced) in sums.items() if is_synced]
        metrics = {key: part for key, part in self._torchmetrics.items() if key in sums}
        synced += [key for key, part in metrics.items() if getattr(part, "sync_on_compute", False)]
        names = sorted({name for _, name in synced})
        found = self._gather(names)
        text = f"log: got the metric names {found} from the processes, expected the same names."
        check(found.count(names) == len(found), f"{text} Log the same metrics in each process.")
        values: dict[tuple[str, str], Any] = dict.fromkeys(sums)
        # Sort the metrics, because all processes must call all_reduce() in the same order.
        for key in sorted(sums):
            total, weight, is_synced = sums[key]
            if total is None:
                values[key] = to_metric(key[1], self._torchmetrics[key].compute())
                continue
            pair = torch.stack([total, torch.as_tensor(weight).to(total)])
            if is_synced:
                pair = self.fabric.all_reduce(self.fabric.to_device(pair), reduce_op="sum")
            values[key] = pair[0] / pair[1]
        return values

    def _update_metrics(self) -> dict[str, Tensor]:
        """Return each logged metric's mean over the epoch so far, and update callback_metrics."""
        values = self._compute(self._sums[0])
        for (hook, name), value in values.items():
            # Like Trainer, leave out values that a LightningModule's step returns but does not log.
            if hook != "returned" or not self._is_lightning_module:
                self.callback_metrics[name] = value
        return {name: value for (_, name), value in values.items()}

    def _reset_metrics(self) -> None:
        # Like Trainer, also reset torchmetrics objects that were logged only in earlier epochs.
        for (hook, _), metric in self._torchmetrics.items():
            if ("validation" in hook) == ("validation" in self._hook):
                metric.reset()
        self._sums[0] = {}

    def _log_step(self, values: dict[str, Tensor]) -> None:
        """Write a row to steps.csv."""
        # item() waits for the GPU, so convert tensors to numbers only when a row is written.
        row: dict[str, Any] = {"step": self.global_step, "epoch": self.current_epoch}
        row.update(train_loss=self._loss.item(), lr=float(self._learning_rate))
        row.update((name, value.item()) for name, value in values.items())
        self._append_row("steps.csv", row)

    def _end_row(self, epoch: int) -> None:
        """Write a row to metrics.csv, and print it."""
        values = dict(self._validated)
        values.update((name, v) for (_, name), v in self._compute(self._sums[-1]).items())
        row: dict[str, Any] = {"epoch": epoch, "step": self.global_step}
        for name in sorted(values, key=lambda name: not name.startswith("train")):
            row.setdefault(name, values[name].item())
        seconds = time.monotonic() - self._row_started
        share = round(min(self._waited / max(seconds, 1e-9), 1.0), 3)
        is_slow = share > 0.1 and self._waited >= 0.1
        # If the user has logged "lr", "time" or "waiting", keep the user's value.
        row.setdefault("lr", float(self._learning_rate))
        row.setdefault("time", seconds)
        row.setdefault("waiting", share)
        if self.fabric.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.fabric.device)
            row.setdefault("gpu_memory", round(peak / 2**30, 3))
        self._row_started, self._waited, self._validated = time.monotonic(), 0.0, {}
        for sums in self._sums[1:]:
            sums.clear()
        if not math.isfinite(row.get("train_loss", 0.0)):
            text = f"The training loss is {row['train_loss']} in epoch {epoch}. Try a smaller"
            warnings.warn(f"{text} learning rate or gradient_clip_val=1.0.", stacklevel=3)
        self.history.append(row)
        self._append_row("metrics.csv", row)
        if is_slow and "waiting" not in self._columns and self.fabric.is_global_zero:
            text = f"Training spends {share:.0%} of the time waiting for batches. In the"
            text += " DataLoader, try a larger num_workers and, on a GPU, pin_memory=True."
            tqdm.write(text, file=sys.stdout)
        self._print_row({name: row[name] for name in row if is_slow or name != "waiting"})

    def _append_row(self, name: str, row: dict[str, Any]) -> None:
        """Append a row to a CSV file, or rewrite the file to add new columns."""
        # Users who edit `_end_row` may add tensors or NumPy numbers.
        row.update({n: v.item() for n, v in row.items() if getattr(v, "shape", None) == ()})
        path, (length, columns) = self.log_dir / name, self._tables.get(name, (0, []))
        is_known = set(row) <= set(columns)
        if self.fabric.is_global_zero and is_known and has_header(path, columns):
            try:
                with path.open("a") as file:
                    csv.DictWriter(file, columns, lineterminator="\n").writerow(row)
            except OSError as error:
                # Python's error about a full disk does not contain the path, so add the path.
                raise OSError(error.errno, error.strerror, str(path)) from error
        elif self.fabric.is_global_zero:
            # If the resumed checkpoint does not list this file, all of the file's rows are newer
            # than the checkpoint.
            rows = [*(self._read_table(name, length, columns) if name in self._tables else []), row]
            columns = list(dict.fromkeys(chain(columns, *rows)))
            write_rows(path, columns, rows)
        self._tables[name] = length + 1, columns

    def _print_row(self, row: dict[str, Any]) -> None:
        """Print a row in aligned columns. If the row has a new column, print a header first."""
        names = dict.fromkeys([*row, *self._columns])
        if len(names) > len(self._columns):
            self._columns = sorted(names, key=lambda name: name in ("time", "waiting"))
            self._print_row({name: name for name in names})
        cells = []
        for name in self._columns:
            value = row.get(name, "")
            if isinstance(value, float):
                is_plain = name == "time" or value == 0 or 1e-3 <= abs(value) < 1e3
                value = f"{value:.{2 if name == 'time' else 4}f}" if is_plain else f"{value:.2e}"
            cells.append(f"{value!s:>{max(len(name), 5 if name in ('epoch', 'step') else 8)}}")
        if self.fabric.is_global_zero:
            tqdm.write("  ".join(cells), file=sys.stdout)

    # Checkpoints

    def _save(self, is_validated: bool) -> None:
        """Save last.ckpt. If the monitored metric has a new best value, also save best.ckpt.

        Save only directly after an optimizer step, when ``_batches_in_window`` is 0, because a
        checkpoint contains no gradients. Do not save between the last batch of an epoch and the end
        of the epoch.
        """
        names, score, best = ["last.ckpt"], self._find_new_score(is_validated), self.best_score
        is_better = best is None or (score < best if self.mode == "min" else score > best)
        if is_better and not math.isnan(score):
            names, self.best_score = ["best.ckpt", "last.ckpt"], score
            self._best["kept"] = {"best.ckpt": score}
        checkpoint = self._build_checkpoint()
        if self._saved_step is None:
            self._check_first_checkpoint(checkpoint)
        self._saved_step = self.global_step
        if self.fabric.is_global_zero:
            # A checkpoint contains the row counts of the CSV files. Write these rows to the disk
            # first, so that they survive a power cut.
            for path in [self.log_dir / name for name in self._tables]:
                if path.exists():
                    with path.open("rb+") as table:
                        os.fsync(table.fileno())
            for name in names:
                with replaced(self.checkpoint_dir / name) as file:
                    torch.save(checkpoint, file)
            self._record(f"saved {checkpoint['fabric_template']['saved_at']!r}")
        is_in_epoch = self.batches_done > 0
        is_complete = is_validated or (not is_in_epoch and self.val_loader is None)
        # In the middle of an epoch, a monitored training metric may not have been logged yet.
        can_follow = is_in_epoch and not str(self.monitor).startswith("val")
        if self.monitor is not None and is_complete and not can_follow:
            self._check_is_logged(self.monitor, "monitor")

    def _find_new_score(self, is_validated: bool) -> float:
        """Return the monitored metric, or NaN if it has no new value."""
        if self.monitor in self._validation_names:
            is_new = is_validated
        else:
            # A training metric is complete only at the end of an epoch or of the run.
            is_new = self.batches_done == 0 or self._is_done()
        score = None if self.monitor is None else self.callback_metrics.get(self.monitor)
        return float(score) if is_new and score is not None else math.nan

    def _build_checkpoint(self) -> dict[str, Any]:
        """Return a checkpoint in Lightning's format, with an extra key for MiniLoop's own state."""
        text = "optimizer: a hook changed the parameters or the optimizer, which MiniLoop does not"
        is_unchanged = self._find_parameters() == self._start_parameters
        is_unchanged = is_unchanged and self.optimizers == [self.optimizer]
        check(is_unchanged, f"{text} support. Create them before fit, or use FabricLoop.")
        self._check_learning_rates()
        self._check_unsynchronized()
        checkpoint = {
            "epoch": self.current_epoch - (self.batches_done == 0),
            "global_step": self.global_step,
            "pytorch-lightning_version": lightning_version,
            "loops": self._build_trainer_loops(),
            "state_dict": self._unwrapped.state_dict(),
            # Let Fabric gather the state of a ZeroRedundancyOptimizer from all processes.
            "optimizer_states": replace_numpy(
                [self.fabric.strategy.get_optimizer_state(self.optimizer)]
            ),
            "lr_schedulers": self._scheduler_states(),
            type(self._precision).__qualname__: self._precision.state_dict(),
        }
        own = self._build_own_state()
        return {**checkpoint, **self._hparams, "fabric_template": own}

    def _build_trainer_loops(self) -> dict[str, Any]:
        """Return the counters of Trainer's loops, so that Trainer can resume the run."""

        def counters(total: float, current: float) -> dict[str, Any]:
            names = ("ready", "started", "processed", "completed")
            return {"total": dict.fromkeys(names, total), "current": dict.fromkeys(names, current)}

        length = 0 if self.num_training_batches == math.inf else self.num_training_batches
        epochs, batches = self.current_epoch, self.batches_done
        steps = counters(self.global_step, 0)
        fit_loop = {
            "state_dict": {},
            "epoch_progress": counters(epochs, epochs),
            "epoch_loop.state_dict": {"_batches_that_stepped": self.global_step},
            "epoch_loop.batch_progress": counters(epochs * length + batches, batches or length),
            "epoch_loop.automatic_optimization.optim_progress": {
                "optimizer": {"step": steps, "zero_grad": steps}
            },
        }
        fit_loop["epoch_loop.batch_progress"]["is_last_batch"] = batches == 0
        for counts in fit_loop["epoch_progress"].values():
            counts.update(ready=epochs + (batches > 0), started=epochs + (batches > 0))
        return {"fit_loop": fit_loop, "validate_loop": {}, "test_loop": {}, "predict_loop": {}}

    def _scheduler_states(self) -> Any:
        return replace_numpy([config["scheduler"].state_dict() for config in self.schedulers])

    def _find_parameters(self) -> list[set[Any]]:
        """Return the parameters of the model and of each parameter group."""
        groups = [{*group["params"]} for group in self.optimizer.param_groups]
        return [{*self.network.parameters()}, *groups]

    def _names_of_groups(self) -> list[list[str]]:
        """Return the names of the parameters in each group of the optimizer."""
        names = {parameter: name for name, parameter in self._unwrapped.named_parameters()}
        return [[names[p] for p in group["params"]] for group in self.optimizer.param_groups]

    def _build_own_state(self) -> dict[str, Any]:
        """Return the dict that MiniLoop stores in a checkpoint under the key "fabric_template"."""
        is_in_epoch = self.batches_done > 0
        state, logged = self._attributes.get_changed_state(), self._torchmetrics.items()
        places = {id(part): place for place, part in self._attributes.refresh_parts().items()}
        state["torchmetrics"] = {key: places[id(m)] for key, m in logged if id(m) in places}
        if is_in_epoch and self._epoch_start is not None:
            self._attributes.add_start_values(self._epoch_start, state)
        of_process = {"rng": state, "epoch_start": self._epoch_start if is_in_epoch else None}
        of_process["before_next"] = self._before_next if is_in_epoch else None
        of_process |= {"sums": self._sums, "callback_metrics": self.callback_metrics}
        of_process["validated"] = self._validated
        of_process["validation_names"] = sorted(self._validation_names)
        counts = {name: {"rows": n, "columns": c} for name, (n, c) in self._tables.items()}
        options = {
            name: (value, getattr(self, name)) for name, value in self._given_options.items()
        }
        start, metadata = self._start_metadata, collect_metadata(self._unwrapped)
        return {
            "saved_at": max(time.time(), self._started_at),
            "progress": {
                "epochs_done": self.current_epoch,
                "batches_done": self.batches_done,
                "is_in_epoch": is_in_epoch,
                "global_step": self.global_step,
                "num_batches": self.num_training_batches,
            },
            "stop": {"should_stop": self.should_stop, "divergence": ""},
            "row": {
                "files": [counts],
                "folder": f"{self.name}/{self.log_dir.name}",
                "last_row": self.history[-1] if self.history else None,
                "learning_rates": [float(self._learning_rate)],
            },
            "checkpoints": dict(self._best),
            # The original and the current value of each option that a hook has changed.
            "options": {name: pair for name, pair in options.items() if pair[0] != pair[1]},
            "flags": self._attributes.get_changed_flags(),
            # The original dtypes, shapes and strides of the tensors for which they have changed.
            "tensor_metadata": {n: old for n, old in start.items() if metadata.get(n) != old},
            "settings": self._run_settings(),
            "parameter_groups": [self._names_of_groups()],
            "sampler_seed": self._sampler_seed,
            "iterators": self._attributes.find_lasting_iterators(),
            "ranks": self._gather(of_process),
        }

    def _run_settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run should not change."""
        loader = self.train_loader
        return {
            "number of processes": self.fabric.world_size,
            "batch size": [getattr(loader, "batch_size", None)],
            "num_workers": [getattr(loader, "num_workers", None)],
            "optimizers": [type(self.optimizer).__name__],
            "schedulers": [
                [type(config["scheduler"]).__name__, config["interval"], config["frequency"]]
                for config in self.schedulers
            ],
        }

    def _restore(self, path: Any, checkpoint: dict[str, Any], is_automatic: bool) -> None:
        """Restore everything except the weights from a checkpoint."""
        own, name = checkpoint["fabric_template"], type(self._precision).__qualname__
        progress, best, row = own["progress"], own["checkpoints"], own["row"]
        rank, ranks = self.fabric.global_rank, own["ranks"]
        of_process = ranks[rank % len(ranks)]
        load_optimizer(self.optimizer, checkpoint["optimizer_states"][0])
        for config, state in zip(self.schedulers, checkpoint["lr_schedulers"], strict=True):
            config["scheduler"].load_state_dict(state)
        self._precision.load_state_dict(checkpoint.get(name, {}))
        set_flags(self._unwrapped, own["flags"])
        self.current_epoch, self.global_step = progress["epochs_done"], progress["global_step"]
        self.batches_done = progress["batches_done"] if progress["is_in_epoch"] else 0
        self._restore_options(own.get("options", {}))
        # With resume="auto", keep should_stop, so that a finished run does not train further.
        self.should_stop = is_automatic and own["stop"]["should_stop"]
        self._epoch_start = of_process.get("epoch_start")
        self._resumed_state = {**of_process["rng"], "is_of_other_process": rank >= len(ranks)}
        self._resumed_state.update(flags=own["flags"], options=own.get("options", {}))
        # Restore the loop's numbers and lists now, because a user's `_is_done` may read them. A
        # user's `_restore` may create objects that have a state_dict(), so `_train` restores such
        # objects later.
        plain = {}
        for key, value in self._resumed_state["parts"].get("training loop", {}).items():
            if not (isinstance(value, tuple) and value[0] == "state"):
                plain[key] = value
        self._attributes.load_parts({"training loop": plain}, self._resumed_state["rebound"])
        self._before_next = of_process.get("before_next")
        self._saved_step = self.global_step
        sums = of_process.get("sums", self._sums)
        # If the saved run used a different validate_every_n_steps, it may have saved fewer or more
        # dicts of sums than the new run needs.
        self._sums = [sums[0], dict(sums[-1])][: len(self._sums)]
        self.callback_metrics.update(of_process.get("callback_metrics", {}))
        self._validated = of_process.get("validated", {})
        self._validation_names = {*of_process.get("validation_names", ())}
        self._learning_rate = next(iter(row.get("learning_rates", ())), math.nan)
        is_unchanged = (best.get("monitor"), best.get("mode")) == (self.monitor, self.mode)
        if is_unchanged or self.monitor is None:
            self._best = {name: best.get(name) for name in self._best}
            scores = self._best["kept"].values()
            self.best_score = (min if best["mode"] == "min" else max)(scores, default=None)
        if self.fabric.is_global_zero and path.name != "last.ckpt" and not self._is_done():
            # Replace last.ckpt. If it is newer than the resumed checkpoint, it refers to CSV rows
            # that `_restore_tables` removes.
            with replaced(self.checkpoint_dir / "last.ckpt") as file, path.open("rb") as source:
                shutil.copyfileobj(source, file)
        self._restore_tables((row["files"] or [{}])[0])
        if self._is_done() and self.fabric.is_global_zero:
            text = f"resume: {path} is from a finished run. Nothing is left to train. For a new"
            print(f"{text} run, leave out resume=.", file=sys.stderr)

    def _restore_options(self, changed: dict[str, Any]) -> None:
        for name, (given, value) in changed.items():
            if name in self._given_options and self._given_options[name] == given:
                setattr(self, name, value)

    def _restore_tables(self, tables: dict[str, Any]) -> None:
        """Unless the run is finished, remove the CSV rows written after the checkpoint."""
        is_done = self._is_done()
        for name, table in tables.items():
            path = self.log_dir / name
            # If the disk is full, FabricLoop stores the unwritten CSV rows in the checkpoint.
            waiting = [read_cells(row) for row in table.get("waiting", ())]
            rows = self._read_table(name, table["rows"] - len(waiting), table["columns"])
            if len(rows) < table["rows"]:
                rows += waiting
            if not is_done:
                # If a user has deleted rows, the row count alone would keep rows written after the
                # checkpoint.
                step = self.global_step
                rows = [row for row in rows if row.get("step", 0) <= step][: table["rows"]]
            columns = list(dict.fromkeys(chain(table["columns"], *rows)))
            if len(rows) < table["rows"]:
                text = f"{name}: rows from before the checkpoint are missing. The run continues"
                warnings.warn(f"{text} without them.", stacklevel=3)
            if self.fabric.is_global_zero and not is_done and (columns or path.exists()):
                write_rows(path, columns, rows)
            self._tables[name] = len(rows), columns
            self.history = rows if name == "metrics.csv" else self.history

    def _read_table(self, name: str, length: int, columns: list[str]) -> list[dict[str, Any]]:
        """Return the rows of a CSV file. Copy a file that another program has damaged."""
        path = self.log_dir / name
        rows = read_rows(path, length)
        kept = [row for row in rows if isinstance(row.get("step", 0), Real)]
        if "step" in columns:
            kept = [row for row in kept if "step" in row]
        if len(kept) < len(rows) and self.fabric.is_global_zero:
            names = (path.with_name(f"{name}.changed-{number}") for number in count())
            target = next(target for target in names if not target.exists())
            shutil.copyfile(path, target)
            text = f"{path}: another program changed this file, so some rows cannot be read. The"
            warnings.warn(f"{text} changed file was copied to {target.name}.", stacklevel=4)
        return kept

    def _find_start(self, resume: Any, load: Any) -> tuple[Path | None, dict[str, Any]]:
        """Return the path and the content of a checkpoint, or (None, {}) for a new run."""
        argument, given = ("load", load) if resume is None else ("resume", resume)
        text = "fit: got both resume and load. Use resume= to continue a run, or load= to load only"
        text += " the weights."
        check(resume is None or load is None, text)
        if given is None:
            return None, {}
        if given not in ("last", "best") and (argument, given) != ("resume", "auto"):
            text = f"{argument}: got {given!r}, expected a path, 'last', 'best' or, with resume=,"
            check(isinstance(given, str | os.PathLike) and given != "", f"{text} 'auto'.")
            path = Path(given).expanduser().absolute()
            text = f"{argument}: got the folder {str(given)!r}, expected a checkpoint file."
            check(not path.is_dir(), text)
            if not path.is_file():
                text = f"Checkpoint file not found: {given}. Check the path, or pass 'last' or"
                raise FileNotFoundError(f"{text} 'best'.")
            text = f"{path}: the file is damaged, or not in the format of torch.save. Use another"
            check(is_intact(path), f"{text} checkpoint.")
            return path, read_checkpoint(path)
        newest, checkpoint = self._find_newest(given)
        if newest is None and given != "auto":
            text = f"{argument}: got {given!r}, but the newest run has no readable {given}.ckpt in"
            raise FileNotFoundError(f"{text} {self._checkpoints}. Train first, or pass a path.")
        return newest, checkpoint

    def _find_newest(self, given: str) -> tuple[Path | None, dict[str, Any]]:
        """Return the path and the content of the newest run's "last" or "best" checkpoint.

        If this loop has saved best.ckpt, "best" is this checkpoint, even if another run is newer.
        """
        # Escape a version's name, because characters such as * and [ are special in glob patterns.
        pattern = glob.escape(str(self.version)) if self.version else "*"
        folders: Iterable[Path] = self._checkpoints.glob(pattern)
        own = vars(self).get("checkpoint_dir")
        if given == "best" and own is not None and (own / "best.ckpt").is_file():
            folders = [own]
        # A run may have been killed after it saved best.ckpt and before it saved last.ckpt.
        names = ["best.ckpt"] if given == "best" else ["last.ckpt", "best.ckpt"]
        for folder in sorted(folders, key=age_of, reverse=True):
            found = [name for name in ("last.ckpt", "best.ckpt") if (folder / name).is_file()]
            for path in [folder / name for name in names if name in found]:
                if is_intact(path):
                    return path, read_checkpoint(path)
                text = f"{path}: the file is damaged. Using the previous checkpoint instead."
                warnings.warn(text, stacklevel=4)
            if found:
                # If the newest run has no readable checkpoint, do not silently use an older run.
                break
        return None, {}

    def _choose_version(self, path: Path | None, resumed: dict[str, Any]) -> Any:
        """Return the run's version, or None if a new run should get the next free version."""
        if path is None or not resumed:
            self._check_version()
            return self.version
        # If the path is a symbolic link, either the link or its target may be in the run's folder.
        folder, root = path.parent.resolve(), self._checkpoints.resolve()
        folder = folder if folder.parent == root else path.resolve().parent
        is_own = folder.parent == root and self.version in (None, folder.name)
        text = f"resume: got {path}, from a run with a different name or version. Use FabricLoop,"
        check(is_own, f"{text} or start a new run from the weights with load=.")
        return folder.name

    # The position in the training loader

    def _start_training(self) -> None:
        """Create the first iterators, call on_train_start, and record the attributes."""
        is_resumed = self._resumed_state is not None
        # Like Trainer, create the training loader's first iterator before any hook runs.
        if not is_resumed:
            self._call_iter_like_trainer(self.train_loader)
            self._start_batches()
            self._call_iter_like_trainer(self.val_loader)
        elif self.current_epoch == 0 and self.batches_done > 0:
            self._start_batches()
        logged = [dict(sums) for sums in self._sums]
        self._call("on_train_start")
        self._attributes.record_start_values()
        self._attributes.record_start_objects()
        if is_resumed:
            # Drop values that on_train_start has logged in a resumed run, because the saved run
            # already logged them.
            self._sums = logged

    def _restore_position(self, has_work: bool) -> None:
        """Skip the finished batches of a resumed epoch, and restore the random generators."""
        set_flags(self._unwrapped, self._resumed_state["flags"])
        # on_train_start may have changed options such as max_steps, so restore them again.
        self._restore_options(self._resumed_state["options"])
        if self.batches_done > 0 and has_work:
            self._skip_batches()
        # Restore the RNG state last, because the code above may draw random numbers.
        self._attributes.load_state(self._resumed_state)
        parts = self._attributes.refresh_parts()
        keys = self._resumed_state.get("torchmetrics", {})
        self._torchmetrics = {key: parts[keys[key]] for key in keys if keys[key] in parts}

    def _start_batches(self) -> None:
        """Create the iterator over the epoch's training batches."""
        if self.batches_done == 0:
            self._epoch_start = self._attributes.get_changed_state(is_epoch_start=True)
        else:
            self._attributes.load_state(self._epoch_start)
        # With a LightningModule, call set_epoch(0) only after iter(loader), as Trainer does.
        if self.current_epoch > 0 or not self._is_lightning_module:
            set_epoch(self.train_loader, self.current_epoch)
        self._attributes.record_iterators()
        batches, length = iter(self.train_loader), self.num_training_batches
        if self.batches_done > 1:
            batches = warn_of_drawing_stream(batches, self.train_loader, self.batches_done)
        if length == math.inf and self.fabric.world_size > 1:
            batches = until_first_end(batches, self.fabric)
        self._batches = self._mark_last(batches, length)

    def _skip_batches(self) -> None:
        """In a resumed run, read the epoch's finished batches again without training on them."""
        if self._batches is None:
            self._start_batches()
        # Many samplers shuffle when the first batch is read, so first restore the RNG state.
        self._attributes.load_state(self._epoch_start["first_batch"])
        warn_of_lazy_sampler(self.train_loader, self.batches_done)
        for number in range(self.batches_done):
            text = f"resume: got a loader with {number} batches, expected more than"
            check(next(self._batches, END) is not END, f"{text} {self.batches_done}.")

    def _call_iter_like_trainer(self, loader: Any) -> None:
        """Call iter(loader) where Trainer does, because iter() may draw random numbers."""
        is_known = isinstance(loader, torch_data.DataLoader | None) or hasattr(loader, "for_rank")
        if self._is_lightning_module and not is_known:
            iter(loader)

    def _mark_last(self, batches: Iterator[Any], length: float) -> Generator[tuple[bool, Any]]:
        """Yield pairs (is_last, batch). If ``length`` is inf, prefetch a batch to find the end."""
        if length < math.inf:
            # Call next(), because zip() would call iter() again, which restarts some iterators.
            for number in range(1, int(length) + 1):
                if (batch := next(batches, END)) is END:
                    return
                yield number == length, batch
            if not self._is_lightning_module:
                # As a for loop does, run the code after the loader's last yield. Trainer skips it.
                text = f"loader: got more than {length} batches, but len(loader) was {length} at"
                text += " the start. Return the right length, or pass an iterable without __len__."
                check(next(batches, END) is END, text)
            return
        done, resumed, following = self.batches_done, self._before_next, next(batches, END)
        for number in count(1):
            if following is END:
                return
            batch = following
            if number == done and resumed is not None:
                # Restore the RNG state that the saved run had before it prefetched this batch.
                set_rng_state(resumed)
            self._before_next = get_rng_state()
            following = next(batches, END)
            yield following is END, batch

    def _read_batches(self, loader: Any) -> Iterable[Any]:
        length = sized_len(loader)
        if length is None:
            return islice(loader, None)
        return (batch for _, batch in self._mark_last(iter(loader), length))

    def _stop_batches(self) -> None:
        """End an unfinished epoch's worker processes and progress bar, and free its tensors."""
        # Without close(), garbage collection would end each worker, which takes five seconds.
        # In a notebook, the last traceback would keep the progress bar until the next error.
        for part in (self._batches, self._bar):
            if part is not None:
                part.close()
        self._batches = self._bar = self._loss = self._outputs = None

    # Set-up

    def __new__(cls, *values: Any, **options: Any) -> MiniLoop:
        known = [field.name for field in fields(cls)]
        plain = [kind for kind in cls.__mro__[:-1] if "__dataclass_fields__" not in vars(kind)]
        for name in [name for kind in plain for name in known if name in vars(kind)]:
            text = f"{cls.__name__}: the class sets the option {name!r}, but is not a dataclass."
            raise TypeError(f"{text} Write @dataclass(kw_only=True, eq=False) above the class.")
        refuse_unknown("MiniLoop", options, known)
        return super().__new__(cls)

    def __getattr__(self, name: str) -> Any:
        if name in ("global_rank", "local_rank", "world_size", "is_global_zero"):
            return getattr(self.fabric, name)
        if hasattr(type(self), name):
            # If a property raises an AttributeError, Python calls __getattr__. Raise the
            # property's own error.
            return object.__getattribute__(self, name)
        text = f"{type(self).__name__!r} object has no attribute {name!r}."
        raise AttributeError(f"{text} If Trainer has this attribute, use FabricLoop.")

    def __deepcopy__(self, memo: dict[int, Any]) -> MiniLoop:
        # A model refers to its loop. Copying the model must not copy the loop.
        return self

    def __getstate__(self) -> dict[str, Any]:
        left_out = NOT_PICKLED.split()
        kept = {name: value for name, value in vars(self).items() if name not in left_out}
        return {**kept, "active_stage": None, "_hook": "", "_step_values": None, "_batches": None}

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of optimizer steps in the whole run, or infinity if this is unknown."""
        text = "estimated_stepping_batches: the number is known only during fit. Read it in"
        check("num_training_batches" in vars(self), f"{text} configure_optimizers.")
        length, epochs = self.num_training_batches, self.max_epochs or 1
        most = math.inf if self.max_steps == -1 else self.max_steps
        if epochs == -1 or length == math.inf:
            return most
        return min(math.ceil(length / self.accumulate_grad_batches) * epochs, most)

    @contextmanager
    def _opened_folders(self, version: Any, is_new: bool) -> Iterator[None]:
        """Create and lock the run's folders. At the end, record in .lock how the run ended."""
        if version is None and self.fabric.is_global_zero:
            version = claim_version(self._logs, self._checkpoints)
        version = self.fabric.broadcast(version)
        self.log_dir, self.checkpoint_dir = self._logs / version, self._checkpoints / version
        self._locks: list[IO[str]] = []
        self._started_at, state = 0.0, "failed"
        with ExitStack() as stack:
            if self.fabric.is_global_zero:
                for folder in (self.checkpoint_dir, self.log_dir):
                    self._locks.append(stack.enter_context(opened_lock(folder)))
                self._start_version(is_new)
            try:
                yield
                # Wait until rank 0 has saved the checkpoint, because the next fit may read it.
                self.fabric.barrier()
                state = "finished"
            except KeyboardInterrupt:
                state = "interrupted"
                raise
            finally:
                self._record(state)

    def _start_version(self, is_new: bool) -> None:
        """Write hparams.yaml and, for a new run, config.yaml and the start time."""
        if is_new:
            # Another run with this version may have finished while this run was being set up.
            self._check_version()
        # The system clock may have been set back since another version was used.
        newest = max(age_of(folder)[0] for folder in self._checkpoints.iterdir())
        self._started_at = max(time.time(), newest + 0.001)
        if is_new:
            self._record(f"started {self._started_at!r}")
            for name in self._tables:
                # Remove the rows of an earlier run that ended before it saved a checkpoint.
                (self.log_dir / name).unlink(missing_ok=True)
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        del options["fabric"], options["hparams"]
        options = to_plain(options)
        write_yaml(self.log_dir / "hparams.yaml", hparams=self._settings, config=options)
        if is_new:
            # Leave out the version, so that a new run with this config.yaml gets its own version.
            options |= {"version": None, "hparams": to_plain(self.hparams or {})}
            write_yaml(self.log_dir / "config.yaml", **options, about=self._describe_run())

    def _describe_run(self) -> dict[str, Any]:
        """Return the command, package versions, device, model and optimizer, for config.yaml."""
        versions = {"fabric_template": VERSION, "torch": str(torch.__version__)}
        versions |= {"lightning": lightning_version, "python": platform.python_version()}
        about: dict[str, Any] = {"command": shlex.join(sys.argv), "versions": versions}
        if "ipykernel" in sys.modules or hasattr(sys, "ps1"):
            about["command"] = "notebook" if "ipykernel" in sys.modules else "interactive"
        about |= {"device": str(self.fabric.device), "processes": self.fabric.world_size}
        about["batch_size"] = getattr(self.train_loader, "batch_size", None)
        with suppress(Exception):
            sizes = [parameter.numel() for parameter in self.network.parameters()]
            name = type(unwrap_compiled(self.model)).__name__
            about["model"] = {"class": name, "parameters": sum(sizes)}
        about["optimizer"] = describe_optimizer(self.optimizer)
        with suppress(Exception):
            about["git"] = read_git(os.getcwd())
        return to_plain(about)

    def _record(self, line: str) -> None:
        for file in self._locks:
            with suppress(OSError):
                file.write(f"{line}\n")
                file.flush()

    def _set_up_steps(self, model: Any, training_step: Any, validation_step: Any) -> None:
        """Find the modules and the step functions of a model, and refuse unsupported models."""
        names = {base.__name__ for base in type(model).__mro__}
        self._is_lightning_module = "LightningModule" in names
        kind, has_functions = type(model).__name__, bool(training_step or validation_step)
        refused = [name for name in REFUSED_HOOKS.split() if find_method(model, name)]
        if not getattr(model, "automatic_optimization", True):
            refused.append("manual optimization")
        if self._is_lightning_module and find_method(model, "log"):
            refused.append("its own log()")
        if kind == "OptimizedModule" and not has_functions:
            refused.append("torch.compile()")
        if refused:
            text = f"model: got an object of the class {kind} with {', '.join(refused)}, which"
            raise TypeError(f"{text} MiniLoop does not support. Use FabricLoop.")
        self.model, self._steps = model, {}
        self.network = model if isinstance(model, nn.Module) else collect_modules(model)
        # Checkpoints use the parameter names of the module that torch.compile() has wrapped.
        self._unwrapped: Any = unwrap_compiled(self.network)
        given = {"training_step": training_step, "validation_step": validation_step}
        for name, function in given.items():
            # A step function that is passed as an argument replaces the model's method.
            text = f"{name}: got {function!r}, expected a function {name}(model, batch)."
            check(function is None or callable(function), text)
            step = find_method(model, name) if function is None else partial(function, model)
            if step is not None:
                self._steps[name] = with_batch_idx(step, name)

    def _set_up_loaders(self, train: Any, val: Any, path: Any, resumed: dict[str, Any]) -> None:
        """Launch the processes, and distribute the samples among them."""
        check_loader(train, "train_dataloaders")
        check_loader(val, "val_dataloaders")
        is_built_in = type(val).__module__ in ("builtins", "itertools")
        reads_again = self.max_epochs != 1 or self.validate_every_n_steps is not None
        # validate() passes train=None, and reads its loader only once.
        if is_built_in and isinstance(val, Iterator) and reads_again and train is not None:
            text = f"val_dataloaders: got a {type(val).__name__}, which can be read only once."
            raise TypeError(f"{text} Pass a DataLoader or a list.")
        if isinstance(self.fabric.strategy, DDPStrategy):
            atexit.unregister(finish_gloo_threads)
            atexit.register(finish_gloo_threads)
            # LT_CLI_USED is set by the `fabric run` command, which launches the processes itself.
            if "LT_CLI_USED" not in os.environ:
                self.fabric.launch()
            # Like Trainer, give all processes the same RNG state when fit or validate starts.
            reset_seed()
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        self._sampler_seed = resumed.get("fabric_template", {}).get("sampler_seed", seed)
        # Convert a tuple of batches to a list, because a tuple cannot be restored in place.
        train = list(train) if type(train) is tuple else train
        self._attributes = SavedAttributes(self, train, val)
        self.train_loader, self.val_loader = self._share(train, True), self._share(val, False)
        self._every = None if val is None else self.validate_every_n_steps
        self._sums = [{}] if self._every is None else [{}, {}]
        length, val_length = sized_len(self.train_loader), sized_len(self.val_loader)
        self.num_training_batches = math.inf if length is None else length
        found = self._gather([length, val_length, str(path), resumed.get("global_step")])
        text = f"fit: got different loader lengths, checkpoints or steps in the processes: {found}."
        text += " Use loaders of the same length, and a folder that all processes share."
        check(found.count(found[0]) == len(found), text)

    def _share(self, loader: Any, is_train: bool) -> Any:
        """Return a loader for this process's samples, with the sampler that Trainer would use."""
        rank, size, seed = self.fabric.global_rank, self.fabric.world_size, self._sampler_seed
        if size > 1 and hasattr(loader, "for_rank"):
            if is_train and hasattr(loader, "with_options"):
                loader = loader.with_options(shuffle=True)
            return loader.for_rank(rank, size, seed)
        if not isinstance(loader, torch_data.DataLoader):
            return loader
        if os.environ.get("PL_SEED_WORKERS") == "1" and loader.worker_init_fn is None:
            loader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
        current: Any = loader.sampler
        batches: Any = loader.batch_sampler
        is_stream = isinstance(loader.dataset, torch_data.IterableDataset)
        if size == 1 or is_stream or isinstance(current, torch_data.DistributedSampler):
            return loader
        kinds = type(batches).__name__, type(current).__name__
        is_known = kinds[0] in ("BatchSampler", "NoneType")
        is_known = is_known and kinds[1] in ("RandomSampler", "SequentialSampler")
        text = f"sampler: got {' of '.join(kinds)} with {size} processes, expected shuffle=True or"
        text += " False, or a DistributedSampler. For other samplers, use FabricLoop."
        check(is_known, text)
        is_shuffled = is_train or isinstance(current, torch_data.RandomSampler)
        sampler: Any = torch_data.DistributedSampler(loader.dataset, shuffle=is_shuffled, seed=seed)
        if batches is not None:
            batches = torch_data.BatchSampler(sampler, batches.batch_size, batches.drop_last)
        shared = copy.copy(loader)
        # Bypass DataLoader.__setattr__, which does not allow changes to the samplers.
        vars(shared).update(sampler=sampler, batch_sampler=batches)
        return shared

    def _gather(self, item: Any) -> list[Any]:
        items = [item] * self.fabric.world_size
        if self.fabric.world_size > 1:
            torch.distributed.all_gather_object(items, item)
        return items

    def _set_up_optimizer(self, optimizer: Any, scheduler: Any) -> None:
        """Set up the optimizer and schedulers from the arguments or from configure_optimizers()."""
        names, creates = {*self._unwrapped.state_dict()}, "optimizer"
        if optimizer is None:
            creates, optimizer = "configure_optimizers", self.model.configure_optimizers()
        elif inspect.isroutine(optimizer):
            optimizer = optimizer(self.model)
        new = sorted({*self._unwrapped.state_dict()} - names)
        text = f"{creates}: got the new weights {new}, expected no new weights. Create them in"
        check(not new, f"{text} __init__, or use FabricLoop.")
        optimizers, schedulers = split_optimizers(optimizer)
        if scheduler is not None:
            schedulers = [*scheduler] if isinstance(scheduler, list) else [scheduler]
        check_optimizer(optimizers, set(self.network.parameters()))
        kinds, clip_val = nn.Embedding | nn.EmbeddingBag, self.gradient_clip_val
        sparse = [m for m in self.network.modules() if isinstance(m, kinds) and m.sparse]
        trained = {p for p in parameters_of(optimizers[0]) if p.requires_grad}
        is_sparse = not trained.isdisjoint(layer.weight for layer in sparse)
        text = f"gradient_clip_val: got {clip_val} for a layer with sparse=True, whose gradients"
        text += " torch cannot clip. Write sparse=False, or leave out gradient_clip_val."
        check(not (clip_val and is_sparse), text)
        self.optimizers = optimizers  # LightningModules may read ``trainer.optimizers``.
        self.optimizer, self._learning_rate = optimizers[0], math.nan
        self.schedulers = schedulers

    def _prepare_training(self, resumed: dict[str, Any]) -> None:
        """Record the state before training, and check whether the run can resume."""
        self.schedulers = [make_scheduler_config(item, self.optimizer) for item in self.schedulers]
        self._given_options = {name: getattr(self, name) for name in NUMBERS}
        self._hparams = {"hyper_parameters": dict(getattr(self.model, "hparams", {}))}
        if "_hparams_name" in vars(self.model):
            self._hparams["hparams_name"] = self.model._hparams_name
        groups = [{**group, "params": []} for group in self.optimizer.param_groups]
        states = {"optimizer": replace_numpy(groups), "lr_schedulers": self._scheduler_states()}
        check_readable({**self._hparams, **states, "state_dict": self._unwrapped.state_dict()})
        own, saved = to_plain(self.hparams or {}), to_plain(self._hparams["hyper_parameters"])
        other = [name for name in own.keys() & saved.keys() if own[name] != saved[name]]
        text = f"hparams: got values of {other} that differ from the model's hparams. Leave these"
        check(not other, f"{text} keys out, or rename them.")
        self._settings = {**saved, **own}
        if resumed:
            self._check_resume(resumed)
        if not self._is_lightning_module:
            modes = modes_of(self.network)
            # A model may override train(), for example to keep BatchNorm in eval mode.
            self.network.train()
            if any(modes.values()):
                # If only some modules are in eval mode, they may be frozen, so keep their mode.
                set_modes({part: was and part.training for part, was in modes.items()})
        num_eval = sum(not module.training for module in self.network.modules())
        if num_eval:
            text = f"Found {num_eval} module(s) in eval mode at the start of training. If this is"
            warnings.warn(f"{text} intentional, you can ignore this warning.", stacklevel=3)
        self._attributes.record_start_objects()
        self._start_parameters = self._find_parameters()
        # The order of the parameters affects the rounding of the gradient norm. Trainer uses the
        # order of the optimizer. Hand-written loops call clip_grad_norm_(model.parameters(), 1.0).
        self._clipped = parameters_of(self.optimizer)
        if not self._is_lightning_module:
            trained = {*self._clipped}
            self._clipped = [p for p in self.network.parameters() if p in trained]
        text = "scheduler: got a state_dict() that contains parameters of the optimizer. Use"
        is_right = not contains_weights(self._scheduler_states(), self._attributes.weights)
        check(is_right, f"{text} self.optimizer.param_groups instead.")

    @contextmanager
    def _prepared_model(
        self, stage: str, path: Path | None, checkpoint: dict[str, Any]
    ) -> Iterator[None]:
        """Move the model to the device for a ``with`` block, and load weights from a checkpoint."""
        network, strategy = self.network, self.fabric.strategy
        device = next((p.device for p in network.parameters()), self.fabric.device)
        if self._converts_dtype:
            self._precision.convert_module(network)
        strategy.module_to_device(network)
        self._start_metadata = collect_metadata(self._unwrapped)
        if checkpoint:
            start = checkpoint.get("fabric_template", {}).get("tensor_metadata", {})
            self._load_weights(checkpoint.get("state_dict", checkpoint), path, start)
        self._step_module: Any = StepModule(network)
        self._synchronized = {part for part in network.parameters() if part.requires_grad}
        if self._synchronized:
            self._step_module = strategy.setup_module(self._step_module)
        self.active_stage = stage
        try:
            with self._added_methods(), torch.enable_grad():
                yield
        finally:
            self.active_stage, self._hook = None, ""
            network.to(device)

    @contextmanager
    def _added_methods(self) -> Iterator[None]:
        """Let the model call methods of this loop, such as ``log``, in a with block."""
        added: dict[str, Any] = {"log": self.log, "log_dict": self.log_dict}
        trainer = None
        if self._is_lightning_module:
            added |= {"optimizers": self._get_optimizer, "lr_schedulers": self._get_schedulers}
            added["all_gather"] = self.fabric.all_gather
            trainer = vars(self.model).get("_trainer")
            self.model.trainer = self
        modules = [m for m in self.network.modules() if hasattr(type(m), "trainer")]
        parts = {id(part): vars(part) for part in [*modules, self.model] if has_no_log(part)}
        # If a hook of another loop calls this loop, the model already has the other loop's
        # methods, such as ``log``. Restore these methods at the end.
        previous = {key: {n: v for n, v in parts[key].items() if n in added} for key in parts}
        for attributes in parts.values():
            attributes.update(added)
        try:
            yield
        finally:
            for key, attributes in parts.items():
                for name in added:
                    attributes.pop(name, None)
                attributes.update(previous[key])
            if is_running(trainer):
                self.model.trainer = trainer

    def _load_weights(self, weights: dict[str, Any], path: Path | None, start: Any) -> None:
        text = f"{path}: expected a dict that maps names to weights. Pass a saved state_dict."
        check(isinstance(weights, dict) and all(isinstance(n, str) for n in weights), text)
        if not weights.keys() & self._unwrapped.state_dict().keys():
            weights = {n.removeprefix("_orig_mod."): value for n, value in weights.items()}
        restore_metadata(self._unwrapped, weights, start)
        try:
            is_strict = getattr(self.model, "strict_loading", True)
            found = self._unwrapped.load_state_dict(weights, is_strict)
        except RuntimeError as error:
            text = " ".join(str(error).split())[:300] + f" The weights in '{path}' do not match"
            text += " the model. Create the model with the same arguments as the saved model."
            raise ValueError(text) from error
        # With strict_loading = False, torch ignores unknown names.
        others = getattr(found, "unexpected_keys", [])
        got = f"the weights {others[:3]}" if others else "no weights"
        text = f"{path}: got {got}, expected weights of the model. Rename the keys of the saved"
        is_found = len(others) < len(weights) or not self._unwrapped.state_dict()
        check(is_found, f"{text} weights.")

    def _get_optimizer(self, use_pl_optimizer: bool = True) -> Any:
        return self.optimizer

    def _get_schedulers(self) -> Any:
        """Return None, one scheduler or a list, like LightningModule.lr_schedulers()."""
        schedulers = [config["scheduler"] for config in self.schedulers]
        return schedulers if len(schedulers) > 1 else next(iter(schedulers), None)

    # Checks and messages

    def _check_options(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
                setattr(self, field.name, value.item())
        self.log_every_n_steps = 50 if self.log_every_n_steps is None else self.log_every_n_steps
        is_mode = self.mode in ("auto", "min", "max")
        check(is_mode, f'mode: got {self.mode!r}, expected "auto", "min" or "max".')
        if self.mode == "auto":
            direction = "min" if self.monitor is None else find_direction(str(self.monitor))
            text = f"mode: got 'auto' for the unknown metric {self.monitor!r}. Write mode='min' if"
            check(direction is not None, f"{text} smaller values are better, or mode='max'.")
            self.mode = str(direction)
        text = f"hparams: got a {type(self.hparams).__name__}, expected a dict of your settings,"
        check(isinstance(self.hparams, Mapping | None), f'{text} such as {{"lr": 0.1}}.')
        for option in ("name", "version"):
            value = getattr(self, option)
            is_text = isinstance(value, str) and value.isprintable()
            is_name = is_text and value.strip(".") and not {*value} & {*'/\\:*?"<>|'}
            is_version = value is None or (type(value) is int and value >= 0)
            expected = FOLDER_NAME if option == "name" else f"an int >= 0, or {FOLDER_NAME}"
            is_valid = is_name or (option == "version" and is_version)
            check(is_valid, f"{option}: got {value!r}, expected {expected}.")
        for option, least in NUMBERS.items():
            value, kind = getattr(self, option), "a number" if "clip" in option else "an int"
            is_right_type = type(value) is int or (type(value) is float and "clip" in option)
            is_optional = option not in ("max_steps", "accumulate_grad_batches")
            is_valid = value >= least if is_right_type else value is None and is_optional
            check(is_valid, f"{option}: got {value!r}, expected {kind} >= {least}.")
        if self.max_epochs is None:
            self.max_epochs = 1000 if self.max_steps == -1 else -1

    def _check_idle(self, call: str) -> None:
        """Raise an error if this loop is running, or if an option such as name was changed."""
        stage = self.active_stage
        text = f"{call}: got a call while {stage} is running, expected a call after {stage} has"
        other = f"In a hook, use another loop: MiniLoop().{call}(model, loader)."
        check(stage is None, f"{text} ended. {other}")
        for option, given in self._created_with.items():
            value = getattr(self, option)
            text = f"{option}: got {value!r} for an existing loop, but this option can only be set"
            fix = f"when the loop is created. Write MiniLoop({option}={value!r})."
            check(value == given, f"{text} {fix}")
        self._check_options()

    def _check_fit(self, train: Any, val: Any, validation_step: Any, optimizer: Any) -> None:
        text = ""
        if train is None:
            text = "train_dataloaders: got None, expected a loader. Write fit(model, loader)."
        elif "training_step" not in self._steps:
            text = missing_step("training_step", "fit")
        elif val is not None and "validation_step" not in self._steps:
            text = "fit: got val_dataloaders without validation_step. Pass both, or neither."
        elif validation_step is not None and val is None:
            text = "fit: got validation_step without val_dataloaders. Pass both, or neither."
        elif optimizer is None and find_method(self.model, "configure_optimizers") is None:
            text = "optimizer: got None, expected an optimizer, such as Adam(model.parameters())."
        if text:
            raise TypeError(text)

    def _check_version(self) -> None:
        """Raise an error if a new run would replace the checkpoints of an earlier run."""
        if self.version is not None:
            folder = self._checkpoints / str(self.version)
            has_run = any(next(folder.glob(pattern), None) for pattern in CHECKPOINTS)
            text = f"version: got {self.version!r}, which already contains checkpoints. Continue"
            check(not has_run, f"{text} this run with resume=, or remove {folder}.")

    def _run_first_step(self, batch: Any, batch_idx: int) -> Any:
        """Run the first training step, which must not call loss.backward() or optimizer.step()."""
        self._is_first_batch = False
        parameters = {*parameters_of(self.optimizer)}
        text = "expected a step that only computes the loss. Remove loss.backward() and"
        text += " optimizer.step(), or use torch.autograd.grad() for the gradients of another loss."

        def refuse_step(other: Any, *_: Any) -> None:
            is_other = parameters.isdisjoint(parameters_of(other))
            check(is_other, f"training_step: got a call to optimizer.step(), {text}")

        clear_gradients(self.optimizer)
        hook = register_optimizer_step_pre_hook(refuse_step)
        try:
            output = self._run_step("training_step", batch, batch_idx)
        finally:
            hook.remove()
        has_gradients = any(parameter.grad is not None for parameter in parameters)
        check(not has_gradients, f"training_step: got a call to loss.backward(), {text}")
        return output

    def _check_is_logged(self, name: str, option: str) -> None:
        names = ", ".join(sorted(self.callback_metrics)) or "none"
        text = f"{option}: got {name!r}, which is not logged. Logged metrics: {names}. Log"
        text += " this metric with self.log(), or return the loss from the step. A metric is"
        text += " missing until the first epoch or validation ends."
        check(name in self.callback_metrics, text)

    def _check_first_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that the first checkpoint can be read, which implies that later ones can be."""
        # Do not check the states of the processes, because they may be large, and `encode` has
        # already left out unsupported values.
        own = {**checkpoint["fabric_template"], "ranks": []}
        check_readable({**checkpoint, "fabric_template": own})
        states, weights = checkpoint["optimizer_states"], self._attributes.weights
        text = "optimizer: got a state that contains parameters or their ids, which a resumed run"
        text += " cannot restore. In self.state[p], store copies (p.detach().clone()), and write"
        is_right = not contains_weights(states, weights)
        check(is_right, f"{text} p.data.copy_(value) instead of p.data = value.")

    def _check_learning_rates(self) -> None:
        rates = [group.get("lr") for group in self.optimizer.param_groups]
        found = self._gather(str([r.tolist() if isinstance(r, Tensor) else r for r in rates]))
        text = f"optimizer: got the learning rates {', '.join(found)} in the processes, expected"
        text += " the same rates in all processes. Log the metric that ReduceLROnPlateau monitors"
        text += " with sync_dist=True."
        check(found.count(found[0]) == len(found), text)

    def _check_unsynchronized(self) -> None:
        """Raise an error if parameters that DDP never synchronizes differ between processes."""
        if self.fabric.world_size > 1:
            parts, known = dict(self._unwrapped.named_parameters()), self._synchronized
            late = [n for n, p in parts.items() if p.requires_grad and p not in known]
            found = self._gather([str(parts[n].detach().double().sum().item()) for n in late])
            text = f"strategy: got DDP and the parameters {', '.join(sorted(late))}, which did not"
            text += " require a gradient when training started, and now differ between the"
            text += " processes. DDP never averages their gradients. Freeze them in on_train_start"
            text += " instead, and pass strategy='ddp_find_unused_parameters_true', or train with"
            text += " devices=1."
            check(found.count(found[0]) == len(found), text)

    def _check_resume(self, checkpoint: dict[str, Any]) -> None:
        own = checkpoint.get("fabric_template", {})
        progress, ranks = own.get("progress", {}), own.get("ranks", [])
        is_in_epoch, epochs = progress.get("is_in_epoch"), progress.get("epochs_done")
        is_own = bool(ranks) and not (is_in_epoch and "epoch_start" not in ranks[0])
        text = "resume: got a checkpoint that MiniLoop cannot resume. Resume with FabricLoop, or"
        check(is_own, f"{text} use load= to start a new run from the weights.")
        text = f"You restored a checkpoint with current_epoch={epochs}, but you have set"
        text += f" MiniLoop(max_epochs={self.max_epochs}). Please set a different max_epochs value."
        check(not -1 < (self.max_epochs or 0) < epochs, text)
        if own.get("writer") == "FabricLoop":
            self._attributes.convert_fabric_loop_state(ranks)
        found = own.get("iterators", [])
        text = f"resume: got a checkpoint without the positions of the loader's iterators {found}."
        text += " Create iterators in __iter__, or use load= for a new run."
        check(not (found and epochs), text)
        objects = [key[1] for key, mean in ranks[0].get("sums", [{}])[0].items() if mean[0] is None]
        text = "resume: got a checkpoint from the middle of an epoch without the state of the"
        text += f" torchmetrics objects {objects}. Use FabricLoop, or a checkpoint saved at the end"
        check(not objects, f"{text} of an epoch.")
        groups = self.optimizer.param_groups, checkpoint["optimizer_states"][0]["param_groups"]
        sizes = [[len(group["params"]) for group in given] for given in groups]
        settings = [self._run_settings(), own["settings"]]
        compared: dict[str, Any] = {
            # torch would load the state of a different scheduler class without an error.
            "the class, interval and frequency of each scheduler": [
                given["schedulers"] for given in settings
            ],
            "the number of parameters in each optimizer group": sizes,
        }
        if is_in_epoch:
            given = self.num_training_batches, self.fabric.world_size
            numbers = progress.get("num_batches"), len(ranks)
            compared["the numbers of batches and processes"] = (given, numbers)
            compared["the batch size"] = [s["batch size"] for s in settings]
        for name, (found, saved) in compared.items():
            text = f"resume: {name} changed from {saved} in the saved run to {found}. Use load= to"
            check(found == saved, f"{text} start a new run from the weights.")
        self._check_dtypes(checkpoint["state_dict"])
        self._check_parameter_order(own.get("parameter_groups", [[]])[0])
        self._warn_of_changed_settings(*settings)

    def _check_dtypes(self, weights: dict[str, Any]) -> None:
        """Raise an error if a trained parameter's dtype changed, as optimizer.step() may fail."""
        trained = {*parameters_of(self.optimizer)}
        saved = {name.removeprefix("_orig_mod."): value for name, value in weights.items()}
        for name, parameter in self._unwrapped.named_parameters():
            dtype = getattr(saved.get(name), "dtype", parameter.dtype)
            text = f"resume: the dtype of {name!r} is {parameter.dtype}, but was {dtype} in the"
            text += " saved run. Use the same precision=, or use load= to start a new run."
            check(parameter not in trained or dtype == parameter.dtype, text)

    def _check_parameter_order(self, saved: list[list[str]]) -> None:
        """Raise an error if the parameter order has changed. torch restores states by index."""
        known = {name.replace("_orig_mod.", "") for name, _ in self._unwrapped.named_parameters()}
        pairs = zip(chain(*self._names_of_groups()), chain(*saved), strict=False)
        for index, names in enumerate(pairs):
            new, old = (name.replace("_orig_mod.", "") for name in names)
            text = f"resume: parameter {index} of the optimizer is {new!r}, but was {old!r} in the"
            text += " saved run. Use the order of the saved run, or load= to start a new run."
            check(new == old or old not in known, text)

    def _warn_of_changed_settings(self, current: dict[str, Any], saved: dict[str, Any]) -> None:
        changed = [
            f"{name} was {saved[name]} and is now {value}"
            for name, value in current.items()
            if saved.get(name, value) != value
        ]
        if changed:
            text = f"resume: {', '.join(changed)}. The run continues, but its results will differ"
            warnings.warn(f"{text} from those of an uninterrupted run.", stacklevel=5)

    def _print_interruption(self) -> None:
        saved = f"To resume from step {self._saved_step}, write resume='last'."
        if self._saved_step is None:
            saved = "No checkpoint was saved. To start again, create the model and the optimizer"
            saved += " again."
        place = f"in epoch {self.current_epoch}, after step {self.global_step}"
        print(f"Ctrl-C: training stops {place}. {saved}")


# Options and messages

VERSION = "0.2.0"
# The minimum of each option that is a number. For max_epochs and max_steps, -1 means no limit.
NUMBERS = {"max_epochs": -1, "max_steps": -1, "accumulate_grad_batches": 1, "seed": 0}
NUMBERS |= {"validate_every_n_steps": 1, "log_every_n_steps": 0, "gradient_clip_val": 0}
FOLDER_NAME = 'a non-empty folder name without the characters / \\ : * ? " < > |'
# For these arguments of log(), MiniLoop accepts only the value listed here, or None.
LOG_ARGUMENTS = {"reduce_fx": "mean", "enable_graph": False, "sync_dist_group": None}
LOG_ARGUMENTS |= {"rank_zero_only": False, "add_dataloader_idx": True, "logger": True}
REFUSED_HOOKS = """
    backward optimizer_step optimizer_zero_grad lr_scheduler_step configure_gradient_clipping
    configure_callbacks configure_model setup teardown prepare_data on_fit_start on_fit_end
    on_before_zero_grad on_before_backward on_after_backward on_before_optimizer_step
    on_validation_start on_validation_end on_validation_batch_start on_validation_batch_end
    on_validation_model_eval on_validation_model_train on_validation_model_zero_grad
    on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer
    on_save_checkpoint on_load_checkpoint training_epoch_end validation_epoch_end
"""
# Clearer messages for some of torch's errors. Each key is part of torch's message.
INSTEAD = {
    "numpy.ndarray": "{step}: got NumPy arrays in the batch, expected tensors. Write"
    " TensorLoader(x, y, batch_size=32), or convert the batch in the step with torch.as_tensor.",
    "Expected to have finished reduction": "It looks like your model has parameters that were not"
    " used in producing the loss returned by training_step. If this is intentional, write"
    " strategy='ddp_find_unused_parameters_true'.",
}
SECOND_BACKWARD = "training_step: got a second backward pass through the same graph, expected one."
SECOND_BACKWARD += " If the step calls loss.backward(), remove the call, because the loop runs the"
SECOND_BACKWARD += " backward pass itself. If the step keeps tensors for later batches, such as a"
SECOND_BACKWARD += " hidden state, call detach() on them."


# Models and batches

# If a weight is a power of two, the faster `torch.add(total, value, alpha=weight)` returns exactly
# `total + value * weight`. For other weights, the two results may differ by rounding.
POWERS_OF_TWO = frozenset(2**exponent for exponent in range(24))


class StepModule(nn.Module):
    """Call a step function in forward(), because DDP prepares its gradient sync in forward()."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, step: Callable[..., Any], batch: Any, batch_idx: int) -> Any:
        return step(batch, batch_idx)


class ProgressBar(tqdm):  # type: ignore[misc]
    """A progress bar that stays hidden after ``tqdm.write`` until its next regular update."""

    def refresh(self, nolock: bool = False, lock_args: Any = None) -> Any:
        # tqdm.write() passes nolock=True. It would show even a bar that is still hidden.
        return None if nolock else super().refresh(nolock, lock_args)


def check(is_right: bool, text: str) -> None:
    if not is_right:
        raise ValueError(text)


def is_interactive() -> bool:
    """Return whether Python keeps running after Ctrl-C, as in a notebook or a Python shell."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return hasattr(sys, "ps1") or get_ipython() is not None


def is_loop(value: Any) -> bool:
    """Return whether a value is an instance of MiniLoop, or of a renamed copy of MiniLoop."""
    return hasattr(type(value), "_added_methods")


def is_running(trainer: Any) -> bool:
    """Return whether a MiniLoop, a FabricLoop or Lightning's Trainer is running."""
    status = getattr(getattr(trainer, "state", None), "status", None)
    return status == "running" or getattr(trainer, "active_stage", None) is not None


def refuse_unknown(call: str, given: dict[str, Any], known: Iterable[str]) -> None:
    for name in given.keys() - {*known}:
        near = get_close_matches(name, known, n=1, cutoff=0.75)
        kind = "option" if call == "MiniLoop" else "argument"
        text = f"{call}: unknown {kind} {name!r}."
        text += f" Did you mean {near[0]}?" if near else f" FabricLoop has more {kind}s."
        if name in [field.name for field in fields(MiniLoop)]:
            option = f"{name}={given[name]!r}"
            text = f"{call}: got {option}, which is an option of MiniLoop. Write"
            text += f" MiniLoop({option}).{call}(...)."
        raise TypeError(text)


def missing_step(name: str, call: str) -> str:
    """Return the error message for a missing step method."""
    return (
        f"{name}: got None, expected a function fn(model, batch). Write {call}(..., {name}=fn), or"
        f" define {name}(self, batch) in the model's class."
    )


def find_method(model: Any, name: str) -> Callable[..., Any] | None:
    """Return a method that the model itself defines, or None.

    Ignore methods that LightningModule defines or that a loop has added.
    """
    method = getattr(model, name, None)
    module = getattr(method, "__module__", None) or ""
    is_empty = module.startswith(("lightning.pytorch.core.", "pytorch_lightning.core."))
    # FabricLoop adds ``log`` of its class ResultCollection to models. With compile=True, it wraps
    # this method.
    owner = getattr(inspect.unwrap(method), "__self__", None) if callable(method) else None
    is_added = is_loop(owner) or type(owner).__name__ == "ResultCollection"
    return method if callable(method) and not (is_empty or is_added) else None


def unwrap_compiled(model: Any) -> Any:
    """Return the original module of a torch.compile() result, or any other object unchanged."""
    return model._orig_mod if type(model).__name__ == "OptimizedModule" else model


def has_no_log(part: Any) -> bool:
    """Return whether an object has no ``log`` method of its own."""
    return not hasattr(part, "log") or (callable(part.log) and not find_method(part, "log"))


def collect_modules(model: Any) -> nn.Module:
    """Return an nn.Module with the modules and parameters from an object's attributes."""
    network = nn.Module()
    for name, value in getattr(model, "__dict__", {}).items():
        # Do not call add_module(), because it refuses names such as "forward".
        if isinstance(value, nn.Parameter):
            network._parameters[name] = value
        elif isinstance(value, nn.Module):
            network._modules[name] = value
        elif has_modules(value):
            text = f"model: got a {type(value).__name__} of modules in the attribute {name}. Write"
            raise ValueError(f"{text} nn.ModuleList or nn.ModuleDict, or use FabricLoop.")
    network.training = any(child.training for child in network.children())
    return network


def has_modules(value: Any, depth: int = 0) -> bool:
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple | set | frozenset | deque) and depth < 6:
        return any(has_modules(item, depth + 1) for item in items)
    return isinstance(value, nn.Module | nn.Parameter)


def with_batch_idx(step: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a step function that takes batch and batch_idx, even if ``step`` takes only batch."""
    is_function, bound = isinstance(step, partial), getattr(step, "keywords", {})
    expected = "expected a function with the arguments (model, batch) or (model, batch, batch_idx)"
    try:
        parameters = inspect.signature(step).parameters
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: got {getattr(step, 'func', step)}, {expected}.") from error
    places = [p for p in parameters.values() if p.kind < p.KEYWORD_ONLY]
    has_any = any(p.kind is p.VAR_POSITIONAL for p in places)
    names = [p.name for p in places if p.kind is not p.VAR_POSITIONAL]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in variadic]
    is_misplaced = "batch_idx" in parameters.keys() - bound and names[1:2] != ["batch_idx"]
    is_refused = len(required) > 2 or not {*required} <= {*names} or "dataloader_iter" in names
    if is_refused or not (names or has_any) or (is_function and is_misplaced):
        text = f"{name}: got the arguments {inspect.signature(step)} after the model"
        raise TypeError(f"{text}, {expected}.")
    # In a step method, treat the argument after the batch as batch_idx, even if it has a default.
    given = required if is_function else names
    if has_any or "batch_idx" in names or len({*given} - {"dataloader_idx"}) > 1:
        return step
    return lambda batch, batch_idx: step(batch)


def as_mapping(output: Any) -> Mapping[Any, Any]:
    """Convert a step's output (a loss, a pair (loss, acc) or a dict of numbers) to a dict."""
    if isinstance(output, tuple) and hasattr(output, "_asdict"):
        output = output._asdict()
    elif isinstance(output, tuple) and len(output) == 2:
        output = {"loss": output[0], "acc": output[1]}
    return output if isinstance(output, Mapping) else {"loss": output}


def find_loss(output: Mapping[Any, Any], batch_idx: int) -> Tensor:
    if "loss" not in output:
        text = f"training_step: got a dict with the keys {sorted(map(str, output))} at batch"
        raise TypeError(f'{text} {batch_idx}. Write return {{"loss": loss}}.')
    loss = output["loss"]
    kind = "None" if loss is None else f"a {type(loss).__name__}"
    fix = "Write `return loss` at the end of the step"
    if isinstance(loss, Tensor):
        if loss.requires_grad and loss.numel() == 1:
            return loss
        kind, fix = f"a tensor of shape {tuple(loss.shape)}", "Return the mean, loss.mean()"
        if not loss.requires_grad:
            kind, fix = "a loss without a gradient", "Remove detach(), item() or no_grad()"
    text = f"training_step: got {kind} at batch {batch_idx}, expected the loss as a tensor with one"
    raise TypeError(f"{text} element and a gradient. {fix}.")


def find_batch_size(batch: Any) -> Any:
    """Return the length of the first tensor in a batch, or None if there is no tensor."""
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.dim() > 0 else 1
    # A fast path for the usual batch, which is a list or a tuple of tensors.
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], Tensor):
        return find_batch_size(batch[0])
    if isinstance(batch, Iterator):
        return None
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif is_dataclass(batch) and not isinstance(batch, Iterable):
        batch = [getattr(batch, field.name) for field in fields(batch)]
    elif isinstance(batch, str | bytes | np.ndarray) or not isinstance(batch, Iterable):
        return None
    sizes = (find_batch_size(part) for part in batch)
    return next((size for size in sizes if size is not None), None)


def check_log_arguments(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name not in LOG_ARGUMENTS or value not in (LOG_ARGUMENTS[name], None):
            text = f"log: got {name}={value!r}, which MiniLoop does not support. Use FabricLoop."
            raise TypeError(text)


def check_metric_name(name: Any) -> None:
    is_name = isinstance(name, str) and name.isprintable() and 0 < len(name) == len(name.strip())
    text = f"log: got the name {name!r}, expected a non-empty string of printable characters"
    check(is_name, f"{text} without leading or trailing spaces.")


def is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)


def to_metric(name: str, value: Any) -> Tensor:
    """Convert a number to a 0-dimensional float32 or float64 tensor."""
    if not is_number(value):
        found, fix = f"a {type(value).__name__}", "Log the items of a dict with log_dict."
        if isinstance(value, Tensor):
            found, fix = f"a tensor of shape {tuple(value.shape)}", f"Log {name}.mean()."
        raise ValueError(f"log {name!r}: got {found}, expected one number. {fix}")
    is_subclass = isinstance(value, Tensor) and type(value) is not Tensor
    if is_subclass and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__:
        # A checkpoint cannot contain subclasses of Tensor, such as MONAI's MetaTensor.
        value = value.as_subclass(Tensor)
    if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64):
        return value.detach() if value.dim() == 0 else value.detach().reshape(())
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    number = value if isinstance(value, Tensor) else float(value)
    return torch.as_tensor(number, dtype=dtype).detach().reshape(())


# Processes and loaders

END: Any = object()  # The value that next(batches, END) returns after the last batch.


def started_processes() -> tuple[int, int]:
    """Return the number of processes that torchrun started, and the number of machines."""
    env, group = os.environ, torch.distributed
    if "LT_CLI_USED" in env:
        return 1, 1
    names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]
    # In an interactive job, SLURM may set SLURM_NTASKS although only one process runs.
    if SLURMEnvironment.detect():
        names.append("SLURM_NTASKS")
    total = max(int(env.get(name, 1)) for name in names)
    if "RANK" in env:
        total = int(env.get("WORLD_SIZE", 1))
    if group.is_available() and group.is_initialized():
        total = group.get_world_size()
    text = f"devices: got {total} processes that torchrun did not start. Start the script with"
    check(total == 1 or "LOCAL_RANK" in env, f"{text} torchrun, or use FabricLoop.")
    return total, total // int(env.get("LOCAL_WORLD_SIZE", total))


def check_loader(loader: Any, argument: str) -> None:
    kind, parts = type(loader).__name__, loader if isinstance(loader, list | tuple) else []
    arrays = Tensor | np.ndarray | str | bytes
    is_array = isinstance(loader, arrays) or hasattr(loader, "iloc")
    is_array = is_array or (isinstance(loader, tuple) and all(isinstance(p, arrays) for p in parts))
    has_loaders = any(isinstance(p, torch_data.DataLoader) or hasattr(p, "for_rank") for p in parts)
    is_several = has_loaders or isinstance(loader, Mapping) or hasattr(loader, "iterables")
    if is_array or is_several or not isinstance(loader, Iterable | None):
        text = f"{argument}: got a {kind}, expected a loader (an iterable of batches), such as"
        text += " DataLoader(TensorDataset(x, y)). For several loaders, use FabricLoop."
        raise TypeError(text)
    text = f"{argument}: got an empty {kind}, expected at least one batch."
    check(loader is None or sized_len(loader) != 0, text)
    text = f"{argument}: got persistent_workers=True, but MiniLoop cannot save the state of such"
    text += " workers. Write persistent_workers=False, or use FabricLoop."
    check(not getattr(loader, "persistent_workers", False), text)


def parts_of(loader: Any) -> dict[str, Any]:
    """Return a loader and the objects in it, such as its sampler and dataset, keyed by name."""
    names = ("sampler", "batch_sampler", "dataset", "collate_fn")
    # Checkpoints contain attributes, and a list has none. So make a list an attribute of a
    # SimpleNamespace.
    is_list = type(loader) is list
    parts = {"loader": SimpleNamespace(items=loader) if is_list else loader}
    parts |= {name: getattr(loader, name, None) for name in names}
    collate = parts["collate_fn"]
    if isinstance(collate, partial):
        arguments = (collate.func, *collate.args, *collate.keywords.values())
        parts.update((f"collate_fn {index}", part) for index, part in enumerate(arguments))
    parts["collate_fn"] = getattr(collate, "__self__", collate)
    parts["inner sampler"] = getattr(parts["batch_sampler"], "sampler", None)
    known = set(map(id, parts.values()))
    for name, part in list(parts.items()):
        inside = {} if isinstance(part, nn.Module) else objects_in(part, known)
        parts.update((f"{name} {path}", value) for path, value in inside.items())
    return parts


def set_epoch(loader: Any, epoch: int) -> None:
    batches = getattr(loader, "batch_sampler", None)
    sampler, inner = getattr(loader, "sampler", None), getattr(batches, "sampler", None)
    parts: Any = (loader, sampler, batches, inner)
    # The loader and its batch sampler may share a sampler. Call its set_epoch() only once.
    for part in {id(part): part for part in parts}.values():
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def finish_gloo_threads() -> None:
    """Give gloo's threads time to free their tensors before Python exits."""
    # The process aborts if a gloo thread frees a tensor while Python exits, so wait a moment.
    time.sleep(0.05)


def warn_of_lazy_sampler(loader: Any, done: int) -> None:
    """Warn if the loader's sampler draws random numbers during the epoch, not only at its start."""
    # To resume within an epoch, the loop reads the finished batches again without training on them.
    # If dropout and the sampler share a random generator, the sampler then draws different numbers
    # from those in the saved run.
    samplers = [getattr(loader, name, None) for name in ("batch_sampler", "sampler")]
    used = [sampler for sampler in samplers if sampler is not None]
    own = [sampler for sampler in used if not type(sampler).__module__.startswith("torch.")]
    if not own:
        return
    state, found = get_rng_state(), []
    # Copying the user's sampler may raise any error.
    with suppress(Exception):
        indices = iter(copy.deepcopy(used[0], {id(loader.dataset): loader.dataset}))
        for number in (1, done - 1):
            deque(islice(indices, number), maxlen=0)
            found.append({**get_rng_state(), "cuda": None})
    set_rng_state(state)
    if len(found) == 2 and found[0] != found[1]:
        text = f"resume: the sampler {type(own[0]).__name__} draws random numbers during the epoch,"
        text += " so the rest of the epoch may differ from an uninterrupted run. Draw all numbers"
        text += " before the first yield."
        warnings.warn(text, stacklevel=2)


def warn_of_drawing_stream(batches: Iterator[Any], loader: Any, done: int) -> Iterator[Any]:
    """Yield batches. Warn if the iterable draws random numbers for the first ``done`` batches."""
    dataset = getattr(loader, "dataset", loader)
    is_plain = getattr(type(loader), "__iter__", None) is torch_data.DataLoader.__iter__
    is_indexed = is_plain and not isinstance(dataset, torch_data.IterableDataset)
    for number in count(1):
        if (batch := next(batches, END)) is END:
            return
        if number == 1:
            state = {**get_rng_state(), "cuda": None}
        elif number == done and not is_indexed and {**get_rng_state(), "cuda": None} != state:
            text = f"resume: {type(dataset).__name__} draws random numbers during the epoch, so the"
            text += " rest of this epoch may differ from an uninterrupted run. Draw from a random"
            text += " generator that is stored as an attribute."
            warnings.warn(text, stacklevel=2)
        yield batch


def until_first_end(batches: Iterator[Any], fabric: Fabric) -> Iterator[Any]:
    """Yield batches until one process has none left, because DDP needs a batch in each process."""
    while True:
        batch = next(batches, END)
        has_batch: Any = int(batch is not END)
        num_ready: Any = fabric.all_reduce(has_batch, reduce_op="sum")
        if num_ready < fabric.world_size:
            if num_ready > 0 and fabric.is_global_zero:
                text = "train_dataloaders: the processes have different numbers of batches. Each"
                text += " epoch ends as soon as one process has no batch left."
                warnings.warn(text, stacklevel=2)
            return
        yield batch


# Optimizers


def parameters_of(optimizer: Any) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def clear_gradients(optimizer: Any) -> None:
    """Set all gradients to None. zero_grad() would add a profiler event, which takes 20 us."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def split_optimizers(given: Any) -> tuple[list[Any], list[Any]]:
    """Split the return value of configure_optimizers() into optimizers and schedulers."""
    if isinstance(given, Mapping):
        warn_of_keys("optimizer configuration", given, "optimizer lr_scheduler monitor frequency")
        scheduler = given.get("lr_scheduler")
        config = scheduler if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
        schedulers = [] if scheduler is None else [{"monitor": given.get("monitor"), **config}]
        return [given.get("optimizer")], schedulers
    parts = list(given) if isinstance(given, list | tuple) else [given]
    if len(parts) == 2 and not isinstance(parts[1], torch.optim.Optimizer):
        first, second = [list(p) if isinstance(p, list | tuple) else [p] for p in parts]
        return first, second
    return parts, []


def warn_of_keys(what: str, given: Mapping[str, Any], known: str) -> None:
    if unknown := {*given} - {*known.split()}:
        warnings.warn(f"Found unsupported keys in the {what}: {unknown}", stacklevel=6)


def check_optimizer(optimizers: list[Any], own: set[nn.Parameter]) -> None:
    if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer):
        kinds = " and ".join(type(item).__name__ for item in optimizers)
        text = f"optimizer: got {kinds}, expected one optimizer, such as SGD(model.parameters())."
        raise TypeError(f"{text} For several optimizers or none, use FabricLoop.")
    closure = inspect.signature(optimizers[0].step).parameters.get("closure")
    text = "optimizer: got an optimizer whose step() needs a closure. Use FabricLoop."
    check(closure is None or closure.default is not closure.empty, text)
    parameters = parameters_of(optimizers[0])
    text = "optimizer: got the parameters of another model, expected those of the model passed to"
    text += " fit. After creating a new model, also create a new optimizer."
    check(not own or not own.isdisjoint(parameters), text)
    text = "optimizer: got parameters that are not in the model, expected only the model's"
    is_right = own.issuperset(parameters)
    check(is_right, f"{text} parameters. Assign them to an attribute of the model.")


def make_scheduler_config(item: Any, optimizer: Any) -> dict[str, Any]:
    """Return Lightning's scheduler dict for a scheduler, with all defaults filled in."""
    config: dict[str, Any] = {"interval": "epoch", "frequency": 1, "monitor": None}
    config.update(item if isinstance(item, Mapping) else {"scheduler": item})
    known = "scheduler interval frequency monitor strict reduce_on_plateau name"
    warn_of_keys("lr scheduler dict", config, known)
    scheduler, frequency = config.get("scheduler"), config["frequency"]
    kind = type(scheduler).__name__
    if not isinstance(scheduler, LRScheduler):
        text = f"scheduler: got a {kind}, expected a scheduler from torch. For other schedulers,"
        raise TypeError(f"{text} use FabricLoop.")
    text = f"scheduler: got a {kind} for another optimizer, expected a scheduler for the optimizer"
    is_own = getattr(scheduler, "optimizer", optimizer) is optimizer
    check(is_own, f"{text} passed to fit. Write StepLR(optimizer, step_size=1).")
    is_usual = isinstance(frequency, int) and frequency >= 1 and config.get("strict", True)
    is_usual = is_usual and config["interval"] in ("step", "epoch")
    is_usual = is_usual and not config.get("reduce_on_plateau")
    text = f'scheduler: got {config}, expected interval="step" or "epoch", frequency >= 1, and'
    check(is_usual, f"{text} strict=True. For other values, use FabricLoop.")
    needs_monitor = isinstance(scheduler, ReduceLROnPlateau) and config["monitor"] is None
    text = 'scheduler: got ReduceLROnPlateau without a monitor. Write {"scheduler": scheduler,'
    check(not needs_monitor, f'{text} "monitor": "val_loss"}}.')
    return config


def describe_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's class and arguments, as values that JSON can store."""
    described: dict[str, Any] = {"class": type(optimizer).__name__}
    with suppress(Exception):
        for name in optimizer.defaults:
            # Creating a scheduler changes "lr", and stores the original value as "initial_lr".
            values = [g.get(f"initial_{name}", g.get(name)) for g in optimizer.param_groups]
            described[name] = values if values[1:] != values[:-1] else values[0]
    return to_plain(described)


def contains_weights(state: Any, weights: Mapping[Any, str]) -> bool:
    """Return whether a state contains the model's weights, or the ids of weights.

    A restored state would contain copies of the weights, or ids that no weight has any more.
    """
    if isinstance(state, Tensor):
        return address_of(state) in weights
    items = state.values() if isinstance(state, dict) else state
    items = items if isinstance(state, dict | list | tuple) else ()
    return has_ids(state, weights) or any(contains_weights(item, weights) for item in items)


def to_plain(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Convert each setting to a value that JSON can store, or else to the name of its type."""

    def convert(value: Any) -> Any:
        if isinstance(value, set | frozenset):
            return sorted(value, key=str)
        # Remove the memory address from an object's repr. Addresses differ between processes.
        text = re.sub(r" at 0x\w+", "", str(getattr(value, "__qualname__", value)))
        return value.item() if getattr(value, "shape", None) == () else text

    plain = {str(name): type(value).__name__ for name, value in values.items()}
    for name, value in values.items():
        with suppress(Exception):
            text = json.dumps(value, default=convert, skipkeys=True, ensure_ascii=False)
            # Replace characters that UTF-8 cannot store, such as those of file names in Latin-1.
            plain[str(name)] = json.loads(text.encode(errors="replace"))
    return plain


def replace_numpy(state: list[Any]) -> Any:
    """Convert the NumPy numbers in a state to Python numbers, or raise an error."""
    return apply_to_collection(state, NUMPY, to_python)


def to_python(value: Any) -> Any:
    is_exact = isinstance(value, np.float64 | np.integer | np.bool_)
    fix = "a list or a tensor" if isinstance(value, np.ndarray) else f"float({value})"
    text = f"checkpoint: got the NumPy value {value!r}, which a resumed run would not restore"
    check(is_exact, f"{text} exactly. Write {fix}.")
    return value.item()


def load_optimizer(optimizer: Any, saved: dict[str, Any]) -> None:
    """Load an optimizer's state without changing its values.

    load_state_dict() alone would convert the dtypes of tensors, and would not restore strings.
    """
    groups = optimizer.param_groups
    options = {*getattr(optimizer, "defaults", ())}.intersection(*groups)
    text = f"resume: the saved optimizer state does not fit {type(optimizer).__name__}. Create the"
    text += " same optimizer as in the saved run, or use load= to start a new run from the weights."
    # With the state of a different class, some optimizers raise a KeyError. Others load it, but
    # then lack options in their param_groups.
    try:
        optimizer.load_state_dict(saved)
    except KeyError as error:
        raise ValueError(text) from error
    missing = sorted(options.difference(*optimizer.param_groups[:1]))
    check(not missing, f"{text} Missing options: {', '.join(missing)}.")
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        # Update the list and the dicts in param_groups in place, because hooks may refer to them.
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.update(loaded)
        optimizer.param_groups = groups
    parameters = parameters_of(optimizer)
    for index, values in saved.get("state", {}).items():
        # If a state belongs to no parameter, its key is not a number.
        if isinstance(index, int) and isinstance(values, dict):
            state = optimizer.state[parameters[index]]
            for name, value in values.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(state[name].device)
                elif isinstance(value, str):
                    state[name] = value


# Metrics

SMALLEST_IS_BEST = """
    loss losses abs_rel ade aepe aic asd assd bce bic bits bpb bpc bpd bpp brier brisque ce cer
    chamfer cost cross_entropy crossentropy crps dcf der deviance distance distortion divergence ece
    edit_rate eer emd epe err error errors fad false_negative false_negatives false_positive
    false_positives far fde fid fnr fpr frr fvd hamming hausdorff hd95 hinge huber jer jsd kid kl
    kld l1 l2 levenshtein log_cosh logcosh logloss lpips mae mape mase mcd mce mdape medae mer
    mindcf misclassification_rate miss_rate mmd mpjpe mrae mse msle nats nelbo niqe nll nlpd nmae
    nme nmse nrmse penalty perplexity pinball ppl rae regret residual residuals rmse rmsle rmspe
    rmsse rse sce silog smape sq_rel sse swd ter violation violations wape wasserstein wer wil
    winkler wmape xent xentropy
"""
LARGEST_IS_BEST = """
    acc accuracy ami ap ar ari auc aucpr aupr auprc auroc bert_score bertscore bleu bleurt c_index
    ccc chrf cider cindex clip_score comet concordance corr corrcoef correlation dcg dice dsc elbo
    em estoi exact_match explained_variance f1 f2 f_measure f_score fbeta fmeasure fscore gini giou
    gmean hit hits hota idf1 inception_score iou jaccard kappa kendall kge lddt likelihood log_prob
    loglik logp map matthews mcc meteor miou mos mota mrr ndcg nds nmi npv nse oks pcc pck pearson
    pearsonr pesq plcc plddt ppv pq prec precision psnr qwk r2 r_squared rand_index rand_score
    recall reciprocal_rank return returns rew reward rouge rougel rsquared sacrebleu sdr sensitivity
    sharpe silhouette similarity sisdr sisnr snr spearman spearmanr specificity spice srcc ssim stoi
    success tm_score tnr top tpr true_negative true_positive uar v_measure vmaf win wip
"""
NEITHER_IS_BEST = """
    beta change decrease delta diff difference drop gap grad gradient improvement increase lr norm
    ratio reduction scale second seconds std stdev temperature threshold time var variance weight
    weights
"""
DIRECTIONS = dict.fromkeys(SMALLEST_IS_BEST.split(), "min")
DIRECTIONS |= dict.fromkeys(LARGEST_IS_BEST.split(), "max")
DIRECTIONS |= dict.fromkeys(NEITHER_IS_BEST.split(), "")
ENDING = re.compile(r"(loss|error|perplexity|mse|mae|accuracy|acc|precision|recall|auc|f1|iou)$")
NEGATED = re.compile(r"(^|(?<!false)(?<!true)[\W_])(neg|negative|minus)[\W_]|^1 ?- ?[a-z]")


def find_direction(metric: str) -> str | None:
    """Return "min" if the smallest value of a metric is best, or "max" if the largest is best.

    The metric's name determines the result, which is None for a name such as "val_gap".
    """
    # The metric in "fpr@recall" or "fpr_at_recall" is "fpr".
    name = re.split(r"@|[\W_]at[\W_]", metric, flags=re.IGNORECASE)[0]
    spaced = re.sub(r"(?<=[a-z\d])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    for spelling in (name.lower(), spaced.lower()):
        direction, before = "", ""
        parts = re.split(r"[\W_]+", spelling)
        for part in parts:
            # If DIRECTIONS lacks a name, look up the name without digits, such as "top" for "top5",
            # or the end of the name, such as "loss" for "valloss".
            without_digits = part.rstrip("0123456789")
            end = ENDING.search(without_digits)
            keys = [f"{before}_{part}", part, without_digits, end[0] if end else ""]
            direction = next((DIRECTIONS[key] for key in keys if key in DIRECTIONS), direction)
            before = part
        if direction and {"loss", "losses"} & {*parts}:
            # Lower is better for a loss such as "loss_iou", but higher is better for "iou".
            direction = "min"
        if direction and NEGATED.search(spelling):
            direction = "max" if direction == "min" else "min"
        if direction:
            return direction
    return None


# Files

CHECKPOINTS = ("last.ckpt", "best.ckpt", "epoch=*-step=*.ckpt")
OPEN_LOCKS: list[IO[str]] = []


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces the file at ``path`` when the block ends."""
    # The folder may have been deleted during the run.
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        # Mode "x" creates a new file and never writes through a symbolic link.
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        # If the disk is full, torch.save raises a RuntimeError with an unrelated message.
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if isinstance(cause, OSError) and cause.errno and cause.filename is None:
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise


class Placeholder:
    """A harmless substitute for objects that torch.load refuses to create."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = __init__


def load_file(file: Path | io.BytesIO, mmap: bool = False) -> dict[str, Any]:
    """Load a file that torch.save wrote, with placeholders for objects that torch.load refuses."""
    # get_unsafe_globals_in_checkpoint() moves the read position of an io.BytesIO, so pass a copy.
    names = torch.serialization.get_unsafe_globals_in_checkpoint(copy.copy(file))
    kinds: Any = [(type(name, (Placeholder,), {}), name) for name in names]
    with torch.serialization.safe_globals(kinds):
        loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    return loaded


def is_intact(path: Path) -> bool:
    """Return whether a checkpoint is undamaged. torch.load would load damaged weights silently."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except Exception as error:
        # Reading a damaged file may raise any error. EINVAL means that a damaged file contains an
        # impossible offset. If the disk or the permissions prevent reading, the file may be intact.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        return False


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint. Raise an error if weights or states contain arbitrary Python objects."""
    try:
        checkpoint = load_file(path)
    except pickle.UnpicklingError as error:
        text = f"{path}: got objects that torch.load refuses to load. Use FabricLoop."
        raise ValueError(text) from error
    text = f"{path}: got a {type(checkpoint).__name__}, expected a dict with weights."
    check(isinstance(checkpoint, dict) and bool(checkpoint), text)
    names = ("state_dict", "optimizer_states", "lr_schedulers", "fabric_template")
    found = find_placeholder([checkpoint.get(name) for name in names])
    text = f"{path}: got an object of the class {found}, expected tensors, numbers, strings, or"
    check(found is None, f"{text} containers of these. Use FabricLoop.")
    return checkpoint


def keep_subclass(tensor: Tensor) -> Any:
    """Return a tensor of a user's class unchanged, and 0 for any other tensor."""
    return 0 if type(tensor).__module__.partition(".")[0] == "torch" else tensor


def check_readable(checkpoint: Mapping[str, Any]) -> None:
    """Raise an error that names the first value that cannot be saved and read again."""
    for name, value in checkpoint.items():
        # A resumed run does not read the hyperparameters, so they may contain objects.
        is_hparams, file = name == "hyper_parameters", io.BytesIO()
        try:
            # Replace the tensors, because saving them takes a long time. Keep those of subclasses,
            # because torch.load may refuse them.
            plain = value if is_hparams else apply_to_collection(value, Tensor, keep_subclass)
            torch.save(plain, file)
            file.seek(0)
            loaded = load_file(file)
            found = None if is_hparams else find_placeholder(loaded)
        except Exception as error:
            is_object = isinstance(error, pickle.UnpicklingError)
            found = "an object that torch.load refuses" if is_object else str(error)
        text = f"checkpoint: got a value of {name!r} that a checkpoint cannot contain ({found})."
        fix = "Use a number, a string, a list or a tensor instead."
        fix = "Write save_hyperparameters(ignore=...)." if is_hparams else fix
        check(found is None, f"{text} {fix}")


def find_placeholder(value: Any) -> str | None:
    """Return the class of the first object that load_file() has replaced, or None."""
    if isinstance(value, Placeholder | type):
        return (value if isinstance(value, type) else type(value)).__name__
    items: Iterable[Any] = value if isinstance(value, list | tuple | set | frozenset) else ()
    if isinstance(value, dict):
        items = chain(value, value.values())
    return next((found for found in map(find_placeholder, items) if found is not None), None)


def age_of(folder: Path) -> tuple[float, int]:
    """Return the time at which a version folder was last used, and the number of the version."""
    text, number = "", folder.name.removeprefix("version_")
    with suppress(OSError), (folder / ".lock").open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        text = file.read().decode("utf-8", "replace")
    times = re.findall(r"^(?:started|saved) (\d+\.\d+)$", text, re.MULTILINE)
    for name in ("last.ckpt", "best.ckpt") if not times else ():
        # A copy of a run may lack its .lock file. Reading with mmap=True skips the tensors.
        with suppress(Exception):
            times.append(load_file(folder / name, mmap=True)["fabric_template"]["saved_at"])
    return max(map(float, times), default=0.0), int(number) if number.isdecimal() else -1


def claim_version(*folders: Path) -> str:
    """Create a folder with the next free version number, even if several runs start at once."""
    names = [path.name[8:] for folder in folders for path in folder.glob("version_*")]
    version = max((int(name) for name in names if name.isdecimal()), default=-1) + 1
    folders[0].mkdir(parents=True, exist_ok=True)
    while True:
        with suppress(FileExistsError):
            (folders[0] / f"version_{version}").mkdir()
            return f"version_{version}"
        version += 1


@cache
def read_git(folder: str) -> dict[str, Any]:
    """Return a folder's git commit and number of changed files, or {} if git fails or is slow."""
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "-uno"]
    with suppress(Exception):
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=1.0, check=True)
        head, *lines = done.stdout.decode().splitlines()
        changed = sum(not line.startswith("#") for line in lines)
        return {"commit": head.split()[-1], "changed_files": changed}
    return {}


@contextmanager
def opened_lock(folder: Path) -> Iterator[IO[str]]:
    """Open and lock a folder's .lock file, which the system unlocks when this process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / ".lock", "a")  # noqa: SIM115
    OPEN_LOCKS.append(file)
    try:
        # Windows lacks fcntl, and some network drives lack file locks. In both cases, use no lock.
        with suppress(ImportError, OSError):
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                text = f"{folder}: another run is writing to this folder. Use a different version."
                raise ValueError(text) from None
        yield file
    finally:
        OPEN_LOCKS.remove(file)
        # On a full disk, the last lines of .lock may be lost. This does not affect the run.
        with suppress(OSError):
            file.close()


def close_locks() -> None:
    for file in OPEN_LOCKS:
        file.close()


if hasattr(os, "register_at_fork"):
    # DataLoader workers live a few seconds longer than a killed run. Close the lock files in the
    # workers, so that the run's folders do not stay locked.
    os.register_at_fork(after_in_child=close_locks)


def read_rows(path: Path, length: int = 0) -> list[dict[str, Any]]:
    """Read the rows of a CSV file, without empty cells, empty rows or an incomplete last line.

    Args:
        length: The number of rows that the loop has written. If the file has fewer complete lines,
            read the last line, too, because an editor may have removed its line break.
    """
    # Spreadsheet programs write a byte order mark, which "utf-8-sig" removes.
    text = path.read_text("utf-8-sig", "replace") if path.exists() else ""
    header = text.split("\n", 1)[0]
    separator = next((mark for mark in ",;\t" if mark in header), ",")
    if separator != ",":
        # In some countries, the decimal mark is a comma, and semicolons or tabs separate cells.
        text = text.replace(",", ".").replace(separator, ",")
    *lines, last = text.split("\n")
    rows = [read_cells(row) for row in csv.DictReader(lines)]
    num_cells = [len(next(csv.reader([line]), [])) for line in (last, lines[0] if lines else last)]
    if len(rows) < length and num_cells[0] == num_cells[1]:
        rows = [read_cells(row) for row in csv.DictReader([*lines, last])]
    return [row for row in rows if row]


def read_cells(row: dict[str, Any]) -> dict[str, Any]:
    return {name: read_cell(cell) for name, cell in row.items() if name and cell}


def read_cell(cell: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(cell)
    return cell


def has_header(path: Path, columns: list[str]) -> bool:
    """Return whether a CSV file has these columns, comma separators and a complete last line."""
    header = io.StringIO()
    csv.writer(header).writerow(columns)
    with suppress(FileNotFoundError), path.open("rb") as file:
        first = file.readline().decode("utf-8-sig", "replace")
        if not first:
            return False
        file.seek(-1, os.SEEK_END)
        return first.rstrip() == header.getvalue().rstrip() and file.read() == b"\n"
    return False


def write_yaml(path: Path, **content: Any) -> None:
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    with replaced(path) as file:
        file.write(yaml.dump(content, Dumper=dumper, sort_keys=False).encode())


def write_rows(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with replaced(path) as file:
        file.write(text.getvalue().encode())


def to_table(rows: list[dict[str, Any]]) -> Any:
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows)


# Attributes and random generators, which state_dict() does not contain

REMOVED = ("removed", None)  # The value of a deleted attribute in a checkpoint.
# Attributes that PyTorch and Lightning set in modules. Only attributes that users add are saved.
MODULE_ATTRIBUTES = {*vars(nn.Module()), "_hparams"}
# Do not save these attributes of an optimizer, because a resumed run sets them anyway.
OPTIMIZER_ATTRIBUTES = {"_opt_called", "_step_count", *vars(torch.optim.Optimizer([Tensor(1)], {}))}
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
NUMPY: Any = (np.generic, np.ndarray)
# Do not save objects from these packages, because they may hold open files or processes.
LIBRARIES = {*sys.stdlib_module_names, "lightning", "numpy", "torch", "torchmetrics"}
# Objects of these types are not searched for attributes to save.
NOT_SEARCHED = (type, FunctionType, MethodType, ModuleType, Logger, Tensor, nn.Module, Fabric)
# Checkpoints store values of these types unchanged. `encode` converts values of other types.
ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
CONTAINER_TYPES: Any = (list, tuple, torch.Size, set, frozenset, deque)
CONTAINER_TYPES += (dict, OrderedDict, Counter, defaultdict)
CONTAINERS: dict[str, Any] = {kind.__name__: kind for kind in CONTAINER_TYPES}
# Attributes to leave out when the loop is pickled, because the next fit sets them again.
NOT_PICKLED = """
    model network optimizer optimizers schedulers train_loader val_loader _steps _unwrapped
    _attributes _step_module _start_parameters _start_metadata _synchronized _clipped _hparams _loss
    _outputs _locks _bar
"""
# MiniLoop sets these attributes itself. Checkpoints contain any other attributes that users add to
# the loop.
LOOP_ATTRIBUTES = f"""
    {NOT_PICKLED} accelerator accumulate_grad_batches default_root_dir devices fabric hparams
    gradient_clip_val log_every_n_steps max_epochs max_steps mode monitor name precision seed
    strategy validate_every_n_steps version _batch_size _batches _batches_in_window
    _before_next _best _checkpoints _columns _converts_dtype _epoch_start _every
    _given_options _hook _is_first_batch _is_last _is_lightning_module
    _is_one_cpu_in_32_bits _is_row_due _learning_rate _logged_batch_size _logs
    _precision _resumed_state _row_started _sampler_seed
    _started_at _step_values _sums _tables _torchmetrics _validated _validation_names _waited
    active_stage batches_done best_score callback_metrics checkpoint_dir
    current_epoch global_step history log_dir num_training_batches should_stop _created_with
    _saved_step _settings
""".split()


class SavedAttributes:
    """Saves and restores attributes and random generators that state_dict() does not contain.

    A checkpoint contains all random generators, and the attributes that have changed since the
    start of training. `record_start_values` records all attributes. `get_changed_state` compares
    the recorded attributes with the current ones, and returns those that differ. `load_state`
    restores attributes, in place where possible.

    Attributes:
        weights: Maps ids and memory addresses of the model's weights and modules to their names.
    """

    def __init__(self, loop: MiniLoop, train: Any, val: Any) -> None:
        # A weak reference avoids a cycle, so that Python frees the loop and its loaders sooner.
        self._loop: Callable[[], Any] = weakref.ref(loop)
        self._network = loop._unwrapped
        # Also save the state of other loaders that users have added to the loop as attributes.
        own, kind = attributes_of(loop), torch_data.DataLoader
        loaders = {f"val {name}": own[name] for name in own if isinstance(own[name], kind)}
        self._loaders = {**loaders, "val": val, "train": train}
        self.weights: dict[int | None, str] = {}
        # The ids of objects whose state is saved elsewhere, such as the optimizer.
        self._saved_ids: set[int] = set()
        # The attributes' values at the start of training, before and after on_train_start.
        self._starts: list[dict[str, dict[str, Any]]] = []
        self._start_flags: list[dict[str, dict[str, bool]]] = []
        self._start_objects: dict[str, dict[str, Any]] = {}
        # The tensors in attributes that are lists, tuples or dicts.
        self._start_tensors: dict[str, dict[str, list[Any]]] = {}
        # The names of the attributes in earlier checkpoints. Later checkpoints also contain these
        # attributes, even if their values have changed back.
        self._saved_names: dict[str, set[str]] = defaultdict(set)
        self._iterators: dict[str, Any] = {}
        self._torch_modes = SimpleNamespace(modes=TorchModes())

    def refresh_parts(self) -> dict[str, Any]:
        """Find the objects whose attributes are saved, keyed by paths such as "train sampler".

        Also find the weights and the loaders' objects again, because hooks may replace them.
        """
        loop: Any = self._loop()
        self._of_loaders = {
            f"{loader} {name}": part
            for loader in self._loaders
            for name, part in parts_of(self._loaders[loader]).items()
        }
        parts = {**self._of_loaders, **dict(self._network.named_modules())}
        parts |= {"": unwrap_compiled(loop.model), "training loop": loop}
        parts["torch modes"] = self._torch_modes
        for place, module in self._network.named_modules():
            if isinstance(hparams := getattr(module, "_hparams", None), dict):
                parts[f"{place}._hparams".removeprefix(".")] = Namespace(hparams)
        optimizer = getattr(loop, "optimizer", None)
        if getattr(type(optimizer), "state_dict", None) is torch.optim.Optimizer.state_dict:
            parts["fit optimizer"] = optimizer
        # If a dataset contains one of the model's modules, save this module only once.
        places = {id(part): place for place, part in parts.items()}
        parts = {place: parts[place] for place in places.values()}
        # Leave out temporary tensors, such as the result of get_extra_state(), because other
        # tensors may later get the same addresses.
        lasting = {*map(id, chain(self._network.parameters(), self._network.buffers()))}
        self.weights.clear()
        self._named_weights = self._network.state_dict(keep_vars=True)
        for name, weight in self._named_weights.items():
            if id(weight) in lasting:
                self.weights |= {id(weight): name, address_of(weight): name}
        self.weights |= {id(module): name for name, module in self._network.named_modules()}
        self.weights.pop(None, None)
        schedulers = [config["scheduler"] for config in getattr(loop, "schedulers", ())]
        groups = getattr(optimizer, "param_groups", None)
        self._saved_ids = {*map(id, [optimizer, groups, *schedulers, *self._network.modules()])}
        self._saved_ids.discard(id(None))
        known = {*places, *self._saved_ids}
        for place, part in [*parts.items()]:
            if place not in self._of_loaders:
                found = objects_in(part, known, self._saved_ids)
                parts |= {f"{place}.{path}".removeprefix("."): found[path] for path in found}
        return parts

    def record_start_values(self) -> None:
        """Record the values of all attributes at the start of training.

        ``fit`` calls ``record_start_values`` before it creates the optimizer, and again after
        on_train_start. A resumed run calls on_train_start again, so a value that this hook has
        changed is saved even if training changes the value back. A resumed run also calls
        configure_optimizers, but with different weights, so a value that configure_optimizers has
        changed is always saved.
        """
        parts = self.refresh_parts()
        start = {place: self._encode_part(place, attributes_of(parts[place])) for place in parts}
        self._starts.append(start)

    def record_start_objects(self) -> None:
        """Record the objects that attributes refer to, and the modules' modes and requires_grad."""
        self._start_flags.append(flags_of(self._network))
        for place, part in self.refresh_parts().items():
            values = attributes_of(part)
            names = self._encode_part(place, values)
            self._start_objects[place] = {name: values[name] for name in names}
            found = {name: tensors_in(values[name]) for name in names}
            self._start_tensors[place] = {name: found[name] for name in names if found[name]}

    def _is_changed(self, place: str, name: str, value: Any) -> bool:
        starts = [start.get(place, {}) for start in self._starts]
        return any(not is_same(start.get(name, END), value) for start in starts)

    def _encode_part(self, place: str, values: dict[str, Any]) -> dict[str, Any]:
        """Encode an object's random generators and attributes, with checksums for large values."""
        device, found = self._loop().fabric.device, {}
        for name, value in values.items():
            if id(value) in self._saved_ids and not isinstance(value, nn.Module):
                continue
            # Reading the attributes of a user's object may raise any error.
            with suppress(Exception):
                if isinstance(value, GENERATORS):
                    found[name] = generator_state(value)
                elif isinstance(value, nn.Module):
                    if place not in self._of_loaders and is_outside(value, self._saved_ids):
                        found[name] = Checksum(compute_checksum(value))
                elif is_stateful(value):
                    try:
                        encoded = encode(value.state_dict(), device, limits=[10_000, 1_000_000])
                        found[name] = "state", encoded
                    except OverflowError:
                        # A checksum of a large state may miss a change, so always save the state.
                        found[name] = Checksum([object()])
                else:
                    try:
                        found[name] = encode(value, device, self.weights, [10_000, 1_000_000])
                    except (OverflowError, TypeError):
                        # get_changed_state() warns if a value of an unsupported type has changed.
                        if address_of(value) not in self.weights:
                            found[name] = Checksum(compute_checksum(value))
        return found

    def get_changed_state(self, is_epoch_start: bool = False) -> dict[str, Any]:
        """Return the RNG states, and the attributes that have changed since the start of training.

        Args:
            is_epoch_start: Whether to leave out large attributes of the model. A sampler may use
                the other attributes when a resumed run reads the epoch's finished batches again.
        """
        changed: dict[str, dict[str, Any]] = {}
        rebound: dict[str, list[str]] = {}
        kept: dict[str, list[str]] = {}
        for place, part in self.refresh_parts().items():
            values, objects = attributes_of(part), self._start_objects.get(place, {})
            buffers = part._buffers if isinstance(part, nn.Module) else {}
            state: dict[str, Any] = {}
            is_checked = place not in self._of_loaders and not is_epoch_start
            for name in values if is_checked else ():
                if is_library_iterator(values[name]):
                    text = f"checkpoint: the position of the iterator {name!r} is not saved, so a"
                    text += " resumed run may differ from an uninterrupted run. To train on several"
                    warnings.warn(f"{text} loaders, pass them to FabricLoop.fit.", stacklevel=2)
            for name, value in self._encode_part(place, values).items():
                is_saved = isinstance(values[name], GENERATORS) or name in self._saved_names[place]
                is_saved = is_saved or self._is_changed(place, name, value)
                is_large = isinstance(value, Checksum)
                if is_saved and not (is_large and is_epoch_start and place not in self._of_loaders):
                    value = self._encode_large(place, name, values[name]) if is_large else value
                    if value is not END:
                        state[name] = ("buffer", value) if name in buffers else value
            state |= {name: REMOVED for name in objects if name not in values}
            if state:
                changed[place] = state
                self._saved_names[place].update(state)
                # This run has replaced the objects in these attributes. A resumed run must also
                # assign new objects, because other code may still refer to the old objects.
                names = [name for name in state if name in values]
                rebound[place] = [n for n in names if objects.get(n, END) is not values[n]]
                # Hooks may refer to the tensors in a list. If this run has changed only their
                # content, a resumed run must change their content, too.
                first = self._start_tensors.get(place, {})
                same = (
                    n
                    for n in names
                    if n in first and contain_same_objects(first[n], tensors_in(values[n]))
                )
                kept[place] = [*same]
        return {**get_rng_state(), "parts": changed, "rebound": rebound, "kept": kept}

    def add_start_values(self, epoch_start: dict[str, Any], current: dict[str, Any]) -> None:
        """Add to ``epoch_start`` the old values of loader attributes that this epoch has changed.

        If a resumed run gets the same loader object again, its attributes have already changed.
        """
        for place in current["parts"].keys() & self._of_loaders.keys():
            start, saved = self._starts[0].get(place, {}), epoch_start["parts"].get(place, {})
            names = [n for n in current["parts"][place] if n in start and n not in saved]
            added = {n: start[n] for n in names if not isinstance(start[n], Checksum)}
            if added:
                epoch_start["parts"][place] = {**saved, **added}

    def _encode_large(self, place: str, name: str, value: Any) -> Any:
        device = self._loop().fabric.device
        try:
            if isinstance(value, nn.Module):
                flags = flags_of(value)["requires_grad"]
                return "state", encode(value.state_dict(), device), encode(flags, device)
            if is_stateful(value):
                return "state", encode(value.state_dict(), device)
            return encode(value, device, self.weights)
        except TypeError as error:
            text = f"checkpoint: the attribute {name!r} of the {place or 'model'} has changed but"
            text += f" is not saved, because it contains unsupported values ({error}). A resumed"
            warnings.warn(f"{text} run may differ from an uninterrupted run.", stacklevel=2)
            return END

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore attributes and RNG states that get_changed_state() has returned."""
        self.load_parts(state.get("parts", {}), state.get("rebound", {}), state.get("kept", {}))
        set_rng_state(state)
        if state.get("is_of_other_process"):
            # The saved run had fewer processes, so give this process a random seed of its own.
            seed = int(torch.randint(2**31, ())) + self._loop().fabric.global_rank
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)

    def load_parts(
        self,
        states: dict[str, dict[str, Any]],
        rebound: Mapping[str, Iterable[str]],
        kept: Mapping[str, Iterable[str]] = MappingProxyType({}),
    ) -> None:
        parts = self.refresh_parts()
        for place in [place for place in states if place in parts]:
            self._saved_names[place].update(states[place])
            for name, value in states[place].items():
                is_rebound, has_kept = (name in names.get(place, ()) for names in (rebound, kept))
                self._load_value(parts[place], name, value, is_rebound, has_kept)
        missing = [place for place in states if place not in parts]
        if missing:
            text = f"resume: the saved run created the object {missing[0]!r} during training, but"
            text += " the resumed run lacks this object, so the results may differ. Create the"
            warnings.warn(f"{text} object in __init__.", stacklevel=3)

    def _load_value(
        self, part: Any, name: str, value: Any, is_rebound: bool, has_kept: bool
    ) -> None:
        """Restore an attribute of an object from its encoded value.

        Args:
            is_rebound: Whether the saved run assigned another object to the attribute.
            has_kept: Whether the attribute is a container with the same tensors as at the start.
        """
        target, tag = vars(part), value[0] if isinstance(value, tuple) else None
        if tag == "buffer":
            if name not in part._buffers:
                part.register_buffer(name, None, persistent=False)
            value = value[1]
        if isinstance(part, nn.Module) and name in part._buffers:
            target = part._buffers
        current = target.get(name, getattr(type(part), name, None))
        decoded = partial(decode, device=self._loop().fabric.device, weights=self._named_weights)
        if tag == "removed":
            target.pop(name, None)
        elif isinstance(current, GENERATORS):
            set_generator_state(current, value)
        elif tag == "state":
            load_object(name, current, *map(decoded, value[1:]))
        elif is_generator_state(value):
            text = f"resume: the saved run created the random generator {name!r} during training,"
            text += " but the resumed run lacks this generator, so the results may differ. Create"
            warnings.warn(f"{text} the generator in __init__.", stacklevel=4)
        else:
            tensors = tensors_in(current) if has_kept else []
            known = (t if address_of(t) not in self.weights else None for t in tensors)
            new = decoded(value, known=known)
            if isinstance(new, defaultdict):
                new.default_factory = getattr(current, "default_factory", None)
            # Do not change a class attribute in place, because other instances use it, too.
            is_in_place = not is_rebound and name in target
            is_in_place = is_in_place and address_of(current) not in self.weights
            if not (is_in_place and replace_content(current, new)):
                target[name] = new

    def get_changed_flags(self) -> dict[str, dict[str, bool]]:
        """Return the requires_grad flags and the train and eval modes that have changed."""
        changed: dict[str, dict[str, bool]] = {}
        for kind, flags in flags_of(self._network).items():
            starts = [start[kind] for start in self._start_flags]
            names = [n for n in flags if any(start.get(n) != flags[n] for start in starts)]
            changed[kind] = {name: flags[name] for name in names}
        return changed

    def convert_fabric_loop_state(self, ranks: list[dict[str, Any]]) -> None:
        """Convert the model's attributes in a FabricLoop checkpoint to the format of MiniLoop."""
        parts = self.refresh_parts()
        values = chain.from_iterable(attributes_of(part).values() for part in parts.values())
        is_complete = not any(isinstance(value, GENERATORS) for value in values)
        for of_process in ranks:
            is_complete = is_complete and not has_attributes(of_process["data"])
            converted: dict[str, dict[str, Any]] = defaultdict(dict)
            rebound: dict[str, list[str]] = defaultdict(list)
            kept: dict[str, list[str]] = defaultdict(list)
            for (path, name), value in of_process["plain_state"]["attributes"].items():
                root, _, place = path.partition(".")
                # FabricLoop saves the buffers of a module "layer" under the name "layer.buffers".
                of_module = re.sub(r"(^|\.)buffers$", "", place)
                if place not in parts and place != of_module:
                    place, value = of_module, value if value == REMOVED else ("buffer", value)
                is_complete = is_complete and root == "model"
                converted[place][name] = value
                if (path, name) in of_process["plain_state"]["rebound"]:
                    rebound[place].append(name)
                if (path, name) in of_process["plain_state"].get("kept", ()):
                    kept[place].append(name)
            of_process["rng"] |= {"parts": converted, "rebound": rebound, "kept": kept}
        text = "resume: got a checkpoint in which FabricLoop saved random generators, iterators, or"
        text += " attributes of loaders or other objects. MiniLoop cannot restore them. Resume with"
        check(is_complete, f"{text} FabricLoop, or use load= to start a new run from the weights.")

    def record_iterators(self) -> None:
        """Record the loader's iterators, to find those that iter(loader) does not replace."""
        self._iterators = self._find_iterators()

    def _find_iterators(self) -> dict[str, Any]:
        names = ["loader", "sampler", "batch_sampler", "inner sampler"]
        if not getattr(self._of_loaders["train loader"], "num_workers", 0):
            # Worker processes start each epoch with a new copy of the dataset.
            names += ["dataset", "collate_fn"]
        found: dict[str, Any] = {}
        for name in names:
            found |= iterators_in(self._of_loaders[f"train {name}"], f"train {name}")
        return found

    def find_lasting_iterators(self) -> list[str]:
        """Return the loader's iterators that iter(loader) did not replace, and warn about them."""
        current = self._find_iterators()
        lasting = [name for name in current if self._iterators.get(name) is current[name]]
        if not isinstance(self._of_loaders["train dataset"], torch_data.IterableDataset):
            # If a map-style dataset creates an iterator, a new iter(loader) does not restart it.
            created = [name for name in current if name.startswith("train dataset.")]
            lasting = list(dict.fromkeys(lasting + created))
        for name in lasting:
            text = f"checkpoint: the position of the iterator {name!r} cannot be saved, so no run"
            text += " can resume from a checkpoint saved after the first epoch. Create the iterator"
            text += " in __iter__ (in a map-style dataset, in a local variable of __getitem__)."
            warnings.warn(text, stacklevel=2)
        return lasting


def attributes_of(part: Any) -> dict[str, Any]:
    """Return the attributes of an object, without those that torch or the loop sets itself."""
    values: dict[str, Any] = {**getattr(part, "__dict__", {})}
    left_out: Iterable[str] = ()
    if isinstance(part, nn.Module):
        left_out = MODULE_ATTRIBUTES
        names, buffers = part._non_persistent_buffers_set, part._buffers.items()
        values.update((name, buffer) for name, buffer in buffers if name in names)
    elif is_loop(part):
        # After importlib.reload(), an existing loop is no instance of the new MiniLoop class.
        left_out = LOOP_ATTRIBUTES
    elif isinstance(part, torch.optim.Optimizer):
        left_out = OPTIMIZER_ATTRIBUTES
    elif isinstance(part, torch_data.DataLoader):
        # fabric.launch() adds attributes such as __pl_saved_kwargs.
        left_out = [name for name in values if name.startswith("__pl_")]
    return {name: value for name, value in values.items() if name not in left_out}


def iterators_in(part: Any, place: str, depth: int = 6) -> dict[str, Any]:
    """Return the iterators in the attributes of a loader or dataset and of its parts."""
    found: dict[str, Any] = {}
    for name, value in getattr(part, "__dict__", {}).items():
        path = f"{place}.{name}"
        is_part = isinstance(value, Iterable) and not isinstance(value, nn.Module | Tensor | type)
        if is_library_iterator(value):
            found[path] = value
        elif depth > 0 and is_part:
            found |= iterators_in(value, path, depth - 1)
    return found


def is_installed(part: Any) -> bool:
    """Return whether the class of an object, such as a transform, is from an installed package."""
    module = type(part).__module__
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    is_searched = isinstance(part, torch_data.Dataset) or module.startswith("torch.")
    return "-packages" in file and not is_searched


def objects_in(
    part: Any, known: set[int], network: set[int] | None = None, depth: int = 6
) -> dict[str, Any]:
    """Return the objects in an object's attributes, at most three levels deep, keyed by path.

    The limit of three levels counts an object of an installed package as half a level.

    Args:
        known: The ids of objects to leave out. The function adds the ids of the objects it finds.
        network: The ids of the model's modules, or None to leave out all modules.
    """
    found: dict[str, Any] = {}
    for name, value in attributes_of(part).items():
        items = {name: value}
        kind = next((k for k in (list, tuple, deque, dict) if isinstance(value, k)), None)
        if kind is not None and kind.__len__(value) <= 500:
            inside: list[Any] = items_of(value)
            pairs = (
                zip(inside[::2], inside[1::2], strict=True) if kind is dict else enumerate(inside)
            )
            items = {f"{name}.{key}": item for key, item in pairs}
        for path, item in items.items():
            if id(item) in known or type(item) in ATOMS:
                continue
            is_module = isinstance(item, nn.Module)
            if is_own_object(item):
                known.add(id(item))
                is_package = is_installed(item)
                rest = (depth if is_installed(part) else 6) - 1 if is_package else depth - 2
                inner = objects_in(item, known, network, rest) if rest > 0 else {}
                if is_package:
                    # The object may hold open files, so save only its random generators.
                    values = vars(item).items()
                    item = SimpleNamespace(**{n: v for n, v in values if isinstance(v, GENERATORS)})
                found |= {path: item, **{f"{path}.{place}": inner[place] for place in inner}}
            elif is_module and network is not None and is_outside(item, network):
                found |= {f"{path}.{place}": module for place, module in item.named_modules()}
            is_part = is_stateful(item) or isinstance(item, GENERATORS)
            if path != name and (is_part or f"{path}." in found):
                found[path] = SimpleNamespace(item=item)
    return found


def is_outside(module: nn.Module, network: set[int]) -> bool:
    """Return whether a module has no submodules in common with the model.

    For example, the model may keep a teacher network in a plain list.
    """
    return network.isdisjoint(map(id, module.modules()))


def is_own_object(value: Any) -> bool:
    """Return whether to search an object, such as a user's dataset, for attributes to save."""
    is_known = isinstance(value, (*NOT_SEARCHED, *GENERATORS, Enum, tuple))
    is_known = is_known or is_stateful(value) or is_loop(value)
    is_library = type(value).__module__.partition(".")[0] in LIBRARIES
    # A user's loader may wrap a DataLoader, and a DataLoader may wrap a user's sampler or dataset.
    kinds = torch_data.Dataset, torch_data.DataLoader, torch_data.Sampler, SimpleNamespace
    is_searched = not is_library or isinstance(value, kinds)
    return hasattr(value, "__dict__") and is_searched and not is_known


def is_library_iterator(value: Any) -> bool:
    """Return whether a value is an iterator whose class is from Python or torch."""
    is_other = isinstance(value, count | io.IOBase) or is_own_object(value)
    return isinstance(value, Iterator) and not is_other


def is_stateful(value: Any) -> bool:
    """Return whether a value has a ``state_dict`` method and is neither a module nor a loader."""
    kind = type(value)
    has_methods = hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")
    is_loader = hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")
    return has_methods and not is_loader and not isinstance(value, nn.Module)


class Namespace:
    """An object whose attributes are the items of a dict, such as a LightningModule's hparams."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.__dict__ = items


class TorchModes:
    """The global settings of torch that affect results and that a hook may change."""

    def state_dict(self) -> dict[str, Any]:
        state = {
            "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "num_threads": torch.get_num_threads(),
            "deterministic_debug_mode": torch.get_deterministic_debug_mode(),
        }
        # If the user has set torch.backends.fp32_precision, torch raises an error here.
        with suppress(RuntimeError):
            state["float32_matmul_precision"] = torch.get_float32_matmul_precision()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_default_dtype(getattr(torch, state["default_dtype"]))
        torch.set_num_threads(state["num_threads"])
        torch.set_deterministic_debug_mode(state["deterministic_debug_mode"])
        if "float32_matmul_precision" in state:
            torch.set_float32_matmul_precision(state["float32_matmul_precision"])


class Checksum(tuple[Any, ...]):
    """A checksum of a large value or of a module, to detect changes without keeping a copy."""


def compute_checksum(value: Any, most: int = 10_000) -> tuple[Any, ...]:
    """Return a checksum of a module, a tensor, an array or a container.

    Read only a sample of a tensor on a GPU, of a value over 256 MB or of a long list of tensors.
    """
    if isinstance(value, nn.Module):
        tensors = value.state_dict().values()
        return *map(compute_checksum, tensors), flags_of(value)["requires_grad"]
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_meta:
            raise TypeError(type(value).__name__)
        is_small = value.device.type == "cpu" and value.numel() * value.element_size() <= 2**28
        sample = value.detach().reshape(-1)[:: 1 if is_small else 1 + value.numel() // 10_000]
        content = sample.cpu().contiguous().view(torch.uint8).numpy().data
        return tuple(value.shape), str(value.dtype), zlib.crc32(content)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or value.dtype.names:
            raise TypeError("ndarray")
        part = value.reshape(-1)[:: 1 if value.nbytes <= 2**28 else 1 + value.size // 10_000]
        return value.shape, value.dtype.str, zlib.crc32(np.ascontiguousarray(part).view("u1").data)
    if isinstance(value, bytearray | array | memoryview):
        return type(value), *compute_checksum(np.frombuffer(value, np.uint8))
    if not isinstance(value, CONTAINER_TYPES):
        # Iterating over an object may change the object or read a file.
        raise TypeError(type(value).__name__)
    items = items_of(value)
    others = [item for item in items if type(item) not in ATOMS]
    first = others[:100]
    parts = [p for item in first for p in (item if type(item) in (list, tuple) else [item])]
    size = sum(part.nbytes for part in parts if isinstance(part, np.ndarray))
    if size * len(others) <= 2**28 * len(first):
        with suppress(ValueError):
            # marshal raises a ValueError for tensors and objects. Large arrays are excluded above,
            # because marshal copies arrays.
            return type(value), zlib.crc32(marshal.dumps(value, 2))
    order = marshal.dumps([item if type(item) in ATOMS else id(item) for item in items], 2)
    known = others[:: 1 + len(others) // most]
    if any(isinstance(item, nn.Module) for item in known):
        # Compute no checksum, because the modules in a container are saved separately.
        raise TypeError("Module")
    most = max(10 * most // max(len(known), 1), 10)
    return type(value), zlib.crc32(order), *[compute_checksum(item, most) for item in known]


def encode(
    value: Any,
    device: torch.device,
    weights: Mapping[int | None, str] = MappingProxyType({}),
    limits: list[int] | None = None,
    depth: int = 0,
) -> Any:
    """Encode an attribute's value for a checkpoint: (1, 2) becomes ("tuple", [1, 2]).

    Raise a TypeError for an unsupported value, and an OverflowError if it has too many items.

    Args:
        weights: The names of the model's weights, keyed by their ids and memory addresses.
        limits: The most items in one tensor, array or container, and the most items in all of them
            together. ``encode`` subtracts the items that it finds from the second number.
    """
    kind, name = type(value), type(value).__name__
    if kind in ATOMS:
        return value
    if kind in (Tensor, nn.Parameter):
        weight = weights.get(address_of(value))
        if weight is not None and depth > 0:
            # If a list or dict contains a weight of the model, save only the weight's name.
            place = list(value.shape), list(value.stride()), value.storage_offset()
            return "weight", weight, kind is nn.Parameter, *place
        if weight is not None:
            raise TypeError(name)
        count_items(value.numel(), limits)
        has_gradient = value.requires_grad and value.is_leaf
        copied = value.detach().to("cpu", copy=True)
        return name.lower(), copied, has_gradient, value.device == device
    if isinstance(value, NUMPY):
        if value.dtype.hasobject or value.dtype.names:
            raise TypeError(name)
        count_items(value.size, limits)
        data = torch.from_numpy(np.frombuffer(bytearray(value.tobytes()), np.uint8))
        name = "array" if isinstance(value, np.ndarray) else "scalar"
        return name, data, value.dtype.str, list(value.shape)
    names = kind.__module__, kind.__qualname__
    is_known = find_class(*names) is kind
    if is_known and isinstance(value, Enum) and value.name in kind.__members__:
        return "enum", value.name, *names
    if is_known and isinstance(value, tuple) and hasattr(kind, "_fields"):
        items = [encode(item, device, weights, limits, depth + 1) for item in value]
        return "named tuple", items, *names
    if CONTAINERS.get(name) is not kind or depth == 10:
        raise TypeError(name)
    if weights and has_ids(value, weights):
        raise TypeError("ids of parameters or modules")
    count_items(len(value), limits)
    items = list(chain.from_iterable(value.items()) if isinstance(value, dict) else value)
    if not ATOMS.issuperset(map(type, items)):
        items = [encode(item, device, weights, limits, depth + 1) for item in items]
    if kind in (deque, defaultdict):
        return name, items, value.maxlen if kind is deque else None
    return name, items


def count_items(number: int, limits: list[int] | None) -> None:
    if limits is not None:
        limits[1] -= number
        if number > limits[0] or limits[1] < 0:
            raise OverflowError


def has_ids(value: Any, weights: Mapping[int | None, str]) -> bool:
    """Return whether a dict or set contains ids of parameters or modules."""
    keys = value if isinstance(value, dict | set | frozenset) else ()
    # Compare only int keys, because a key may be a parameter, which cannot be compared with ids.
    return not weights.keys().isdisjoint(key for key in keys if type(key) is int)


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors in a container in the order in which they are encoded, or []."""
    found: list[Any] = []
    return found if is_container(value) and collect_tensors(value, found) else []


def items_of(container: Any) -> list[Any]:
    """Return a container's items. For a dict, return alternating keys and values."""
    # Call no methods of a user's subclass, because they may draw random numbers.
    if isinstance(container, dict):
        # dict.items() ignores the order that OrderedDict.move_to_end() has set.
        kind = OrderedDict if isinstance(container, OrderedDict) else dict
        return list(chain.from_iterable(kind.items(container)))
    return list(next(k for k in CONTAINER_TYPES if isinstance(container, k)).__iter__(container))


def is_container(value: Any) -> bool:
    """Return whether iterating over a value runs no code of a user's class."""
    is_named_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
    return type(value) in CONTAINER_TYPES or is_named_tuple


def collect_tensors(value: Any, found: list[Any], depth: int = 0) -> bool:
    """Collect a container's tensors. Return False for a large container or a set of tensors."""
    if isinstance(value, Tensor):
        found.append(value)
    if not is_container(value):
        return True
    if len(value) > 500 or depth == 10:
        return False
    if isinstance(value, set | frozenset):
        # The order of tensors in a set differs between processes.
        return not any(isinstance(item, Tensor) for item in value)
    items = chain.from_iterable(value.items()) if isinstance(value, dict) else value
    return all(collect_tensors(item, found, depth + 1) for item in items)


def contain_same_objects(first: list[Any], second: list[Any]) -> bool:
    """Return whether two lists contain the same objects."""
    return list(map(id, first)) == list(map(id, second))


def decode(
    encoded: Any,
    device: torch.device,
    weights: Mapping[str, Any],
    known: Iterator[Any] | None = None,
) -> Any:
    """Convert an encoded value back to the original value.

    Args:
        known: The current tensors, to copy the encoded values into them if possible.
    """
    if not isinstance(encoded, list | tuple):
        return encoded
    kind, content, *options = encoded
    is_tensor = kind in ("weight", "tensor", "parameter")
    current = next(known, None) if is_tensor and known is not None else None
    if kind == "weight":
        is_parameter, *place = options
        weight = weights[content]
        return weight if is_parameter else weight.detach().as_strided(*place)
    if kind in ("tensor", "parameter"):
        has_gradient, is_on_device = options
        copied = content.to(device if is_on_device else "cpu", copy=True)
        made = nn.Parameter(copied) if kind == "parameter" else copied
        made.requires_grad_(has_gradient)
        return current if replace_content(current, made) else made
    if kind in ("array", "scalar"):
        data = b"" if content is None else content.numpy().tobytes()
        found = np.frombuffer(data, options[0]).reshape(options[1]).copy()
        return found if kind == "array" else found[()]
    if kind == "enum":
        return find_class(*options).__members__[content]
    items = [decode(item, device, weights, known) for item in content]
    if kind == "named tuple":
        return tuple.__new__(find_class(*options), items)
    if kind == "deque":
        return deque(items, *options)
    text = f"resume: FabricLoop saved an attribute with a {kind}, which MiniLoop cannot restore."
    check(kind in CONTAINERS, f"{text} Resume with FabricLoop.")
    if not issubclass(CONTAINERS[kind], dict):
        return CONTAINERS[kind](items)
    made = CONTAINERS[kind]()
    made.update(dict(zip(items[::2], items[1::2], strict=True)))
    return made


def find_class(module: str, name: str) -> Any:
    """Return an already imported Enum or named tuple class by its name, or None."""
    # Do not import modules, because a damaged checkpoint could name any module.
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) and issubclass(found, Enum | tuple) else None


def load_object(
    name: str, current: Any, state: Any, requires_grad: Mapping[str, bool] = MappingProxyType({})
) -> None:
    text = f"resume: got the state of {name!r}, but this run has no such object. Create the object"
    text += " in __init__ or, if it is an attribute of the loop, in _set_up_optimizer."
    check(is_stateful(current) or isinstance(current, nn.Module), text)
    if isinstance(current, torch.optim.Optimizer):
        load_optimizer(current, state)
    else:
        current.load_state_dict(state)
    for place, parameter in current.named_parameters() if requires_grad else ():
        parameter.requires_grad = requires_grad.get(place, parameter.requires_grad)


def replace_content(current: Any, value: Any) -> bool:
    """Copy a value into a tensor or container in place, and return False if it does not fit."""
    names = ("shape", "dtype", "requires_grad", "maxlen")
    if any(getattr(current, name, None) != getattr(value, name, None) for name in names):
        return False
    if type(current) is not type(value):
        return False
    # Some tensors and arrays, such as expanded or read-only ones, cannot be changed in place. If
    # they are views of another attribute, they may already have the new value.
    with suppress(RuntimeError, ValueError):
        if isinstance(current, Tensor):
            if not torch.equal(current, value):
                current.detach().copy_(value.detach())
        elif isinstance(current, np.ndarray):
            if not np.array_equal(current, value):
                current[...] = value
        elif isinstance(current, list | deque):
            current.clear()
            current.extend(value)
        elif isinstance(current, dict | set):
            current.clear()
            current.update(value)
        else:
            return False
        return True
    return False


def address_of(value: Any) -> int | None:
    """Return the address of a tensor's memory, or None for a value that is not a dense tensor."""
    is_dense = isinstance(value, Tensor) and not nn.parameter.is_lazy(value)
    is_dense = is_dense and value.layout is torch.strided
    # All empty tensors have the address 0.
    return (value.untyped_storage().data_ptr() or None) if is_dense else None


def has_attributes(state: Any) -> bool:
    """Return whether FabricLoop's saved state contains attributes or iterators of loaders."""
    if isinstance(state, dict):
        # Skip the model's attributes at the start of an epoch, which are needed only to resume
        # within the epoch.
        parts = (part for name, part in state.items() if name != "model")
        names = ("attributes", "restart_problem")
        return any(state.get(name) for name in names) or any(map(has_attributes, parts))
    return isinstance(state, list) and any(map(has_attributes, state))


def flags_of(network: nn.Module) -> dict[str, dict[str, bool]]:
    """Return each parameter's requires_grad, and each module's train or eval mode."""
    return {
        "requires_grad": {name: p.requires_grad for name, p in network.named_parameters()},
        "training": {name: module.training for name, module in network.named_modules()},
    }


def collect_metadata(network: nn.Module) -> dict[str, Any]:
    """Return the dtype, shape and strides of each parameter and buffer, keyed by its name."""
    tensors = chain(network.named_parameters(), network.named_buffers())
    return {name.replace("_orig_mod.", ""): metadata_of(tensor) for name, tensor in tensors}


def metadata_of(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    if nn.parameter.is_lazy(tensor) or tensor.is_nested:
        return "no shape"
    strides = list(tensor.stride()) if tensor.layout is torch.strided else []
    return [str(tensor.dtype), list(tensor.shape), strides]


def restore_metadata(network: nn.Module, saved: dict[str, Any], start: dict[str, Any]) -> None:
    """Restore the dtype, shape and strides of each parameter and buffer if training changed them.

    Args:
        start: The dtypes, shapes and strides when the saved run started. If a tensor of this
            model has different ones, load_state_dict() decides whether it accepts the weights.
    """
    tensors: dict[str, Any] = dict(chain(network.named_parameters(), network.named_buffers()))
    modules = dict(network.named_modules())
    device = next((parameter.device for parameter in network.parameters()), None)
    for path, value in saved.items():
        tensor, found = tensors.get(path), metadata_of(tensors.get(path))
        is_changed = isinstance(value, Tensor) and found not in ("no shape", metadata_of(value))
        if not is_changed or start.get(path.replace("_orig_mod.", "")) != found:
            continue
        place, _, name = path.rpartition(".")
        if tensor is not None:
            tensor.data = value.to(tensor.device, copy=True)
        elif place in modules and modules[place]._buffers.get(name, END) is None:
            modules[place]._buffers[name] = value.to(device, copy=True)


def modes_of(network: nn.Module) -> dict[nn.Module, bool]:
    return {module: module.training for module in network.modules()}


def set_modes(modes: Mapping[nn.Module, bool]) -> None:
    """Set train or eval mode with train(), which a module may override to merge its weights."""
    # A module comes before its submodules, so train() is usually called only once.
    for module, is_training in modes.items():
        if module.training != is_training:
            module.train(is_training)


def set_flags(network: nn.Module, flags: dict[str, dict[str, bool]]) -> None:
    for place, parameter in network.named_parameters():
        parameter.requires_grad = flags.get("requires_grad", {}).get(place, parameter.requires_grad)
    for place, module in network.named_modules():
        module.training = flags.get("training", {}).get(place, module.training)


def generator_state(generator: Any) -> Any:
    state = getattr(generator, "getstate", getattr(generator, "get_state", None))
    found = generator.bit_generator.state if state is None else state()
    # Save NumPy arrays as lists, because torch.load(weights_only=True) refuses arrays.
    return apply_to_collection(found, np.ndarray, np.ndarray.tolist)


def set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def is_generator_state(value: Any) -> bool:
    """Return whether a saved value is the state of a random generator."""
    # The states of random.Random and of np.random.RandomState are tuples.
    is_of_tuple = isinstance(value, tuple) and value[0] in (2, 3, "MT19937")
    return is_of_tuple or isinstance(value, Tensor | dict)


def is_same(first: Any, second: Any) -> bool:
    """Return whether two values, which may contain tensors, are equal. NaN equals NaN."""
    if first is second or type(first) is not type(second):
        return first is second
    if isinstance(first, Tensor):
        is_dense = first.layout is second.layout is torch.strided
        if not is_dense or first.dtype != second.dtype or first.shape != second.shape:
            return False
        if torch.equal(first, second) or not (first.is_floating_point() or first.is_complex()):
            return torch.equal(first, second)
        return bool(torch.isclose(first, second, 0, 0, equal_nan=True).all())
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(is_same, first, second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(
            is_same(first[key], second[key]) for key in first
        )
    return bool(first == second or (first != first and second != second))


def get_rng_state() -> dict[str, Any]:
    numpy_state: Any = np.random.get_state()
    name, keys, *position = numpy_state
    version, values, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        # Saving the 625 numbers of Python's RNG state as bytes is faster than saving a list.
        "python": (version, array("I", values).tobytes(), gauss),
        "numpy": (name, keys.tobytes(), *position),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    version, values, gauss = state["python"]
    random.setstate((version, tuple(array("I", values)), gauss))
    name, keys, *position = state["numpy"]
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *position))
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state_all(state["cuda"])
