# SPDX-License-Identifier: MIT
"""Train PyTorch models with a loop in one file, to read, to copy and to change.

Version 0.2.0 of fabric_template, under the MIT License (file LICENSE). This file needs torch and
lightning, which install NumPy, PyYAML and tqdm. Read `fit`, `_train_epoch` and `_train_batch` first.

To change a part of the training, edit one of these methods:

- `_compute_gradients`: the loss, its division by accumulate_grad_batches, and the backward pass
- `_step_optimizer`: the optimizer step, and clipping before the step
- `_is_window_end`: when the optimizer steps
- `_is_done`: when training stops
- `_end_row` and `_log_step`: the rows of metrics.csv and of steps.csv
- `log` and `_log_output`: the values in these rows
- `_save`: which checkpoints are written
- `_build_checkpoint` and `_restore`: the content of a checkpoint
- `_train_batches` and `_move`: the order of the batches, and their transfer to the device

FabricLoop has more options. MiniLoop and FabricLoop resume each other's runs.
"""

from __future__ import annotations

import csv
import inspect
import itertools
import json
import math
import os
import random
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import partial
from operator import length_hint
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from lightning.fabric import Fabric
from lightning.fabric import __version__ as lightning_version
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.fabric.utilities.seed import reset_seed
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler
from tqdm import tqdm

STATE_FILE = ".lock"  # Records how the run ended. FabricLoop also locks this file, hence its name.
REFUSED_HOOKS = """
    backward optimizer_step optimizer_zero_grad lr_scheduler_step configure_gradient_clipping
    configure_callbacks configure_model setup teardown prepare_data on_fit_start on_fit_end
    on_before_zero_grad on_before_backward on_after_backward on_before_optimizer_step
    on_validation_start on_validation_end on_validation_batch_start on_validation_batch_end
    on_validation_model_eval on_validation_model_train on_validation_model_zero_grad
    on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer
    on_save_checkpoint on_load_checkpoint
"""


@dataclass(kw_only=True, eq=False)
class MiniLoop:
    """Train a model with step functions, or an object with a method ``training_step``."""

    max_epochs: int | None = None  # -1: no limit. None: 1000, or no limit if max_steps is set.
    max_steps: int = -1  # Stop after this many optimizer steps. -1: no limit.
    name: str = "run"  # The files are in logs/<name>/version_<n>, checkpoints/<name>/version_<n>.
    version: int | str | None = None  # None: the next free number, or the resumed version.
    monitor: str | None = None  # The metric that selects best.ckpt.
    mode: str = "min"  # "min": the smallest value of monitor is the best. "max": the largest.
    accumulate_grad_batches: int = 1  # The number of batches per optimizer step.
    gradient_clip_val: float | None = None  # Clip the total gradient norm to this value.
    validate_every_n_steps: int | None = None  # Validate and save every N steps. None: each epoch.
    log_every_n_steps: int = 50  # Write a row to steps.csv every N optimizer steps. 0: never.
    seed: int | None = None  # Seeds the random generators at creation and at the start of a run.
    default_root_dir: str | os.PathLike[str] = "."  # The folder of logs/ and checkpoints/.
    accelerator: Any = "auto"  # An argument of lightning.Fabric, like strategy, devices, precision.
    strategy: Any = "auto"
    devices: Any = "auto"
    precision: Any = None
    fabric: Any = None  # A lightning.Fabric object to use instead of the four options above.
    sanity_checking = False  # Modules read trainer.sanity_checking. MiniLoop has no sanity check.

    def __new__(cls, **options: Any) -> MiniLoop:
        known = [field.name for field in fields(cls)]
        for name in options.keys() - set(known):
            near = get_close_matches(name, known, n=1) or ["FabricLoop, which has more options"]
            raise TypeError(f"MiniLoop: got the unknown option {name}. Did you mean {near[0]}?")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f'mode: got {self.mode!r}, expected "min" or "max".')
        if self.name in ("", ".", "..") or "/" in self.name or "\\" in self.name:
            raise ValueError(f"name: got {self.name!r}, expected the name of a folder.")
        if isinstance(self.version, int):
            self.version = f"version_{self.version}"
        root = Path(self.default_root_dir).expanduser().absolute()
        self._logs, self._checkpoints = root / "logs" / self.name, root / "checkpoints" / self.name
        if self.max_epochs is None:
            self.max_epochs = 1000 if self.max_steps == -1 else -1
        if self.fabric is None:
            names = ("accelerator", "strategy", "devices", "precision")
            self.fabric = Fabric(**{name: getattr(self, name) for name in names})
        is_one_device = isinstance(self.fabric.strategy, SingleDeviceStrategy)
        if not is_one_device and not isinstance(self.fabric.strategy, DDPStrategy):
            raise ValueError("strategy: expected one device or DDP. Use FabricLoop for others.")
        self._precision = self.fabric.strategy.precision
        is_one_cpu = is_one_device and self.fabric.device.type == "cpu"
        self._is_one_cpu_in_32_bits = is_one_cpu and self._precision.precision == "32-true"
        self._reset()

    def _reset(self) -> None:
        """Seed the random generators, and set the initial state of a run."""
        if self.seed is not None:
            Fabric.seed_everything(self.seed, workers=True, verbose=False)
        self.current_epoch = self.global_step = 0  # Numbers of finished epochs and steps.
        self.batches_done = 0  # The number of finished batches in this epoch.
        self.should_stop = False  # Set True on all processes to stop after the current step.
        self.history: list[dict[str, Any]] = []  # The rows of metrics.csv.
        self.best_score: float | None = None
        # Collects each metric of the next row of metrics.csv, in a Mean or a torchmetrics object.
        self._metrics: dict[str, Any] = {}
        self.callback_metrics: dict[str, Tensor] = {}  # The newest value of each metric.
        self._batches_in_window = 0  # The number of batches since the last optimizer step.
        self._validated: dict[str, Tensor] = {}  # The validation metrics of the next row.
        self._logged_means: set[str] = set()  # The names of the means that log() adds.
        self._batch_size = 1  # The weight of the current batch in the mean of a metric.
        self._has_warned = False
        # The values for steps.csv that the current training batch has logged. None between batches.
        self._step_values: dict[str, Tensor] | None = None
        self._row_started = time.monotonic()

    # Training

    def fit(
        self,
        model: Any,  # An nn.Module, a LightningModule, or an object with step methods.
        train_dataloaders: Any,
        val_dataloaders: Any = None,
        # "auto" continues the newest run, or starts a new run if there is no checkpoint.
        resume: str | Path | None = None,  # A path, "last", "best" or "auto".
        load: str | Path | None = None,  # Start with these weights: a path, "last" or "best".
        optimizer: Any = None,  # An optimizer, or any value that configure_optimizers may return.
        scheduler: Any = None,  # A scheduler to step once per epoch, or Lightning's dict.
        training_step: Callable[..., Any] | None = None,  # fn(model, batch[, batch_idx]): the loss
        validation_step: Callable[..., Any] | None = None,  # fn(model, batch): loss or (loss, acc)
    ) -> Any:
        """Train a model. Return the rows of metrics.csv, as a DataFrame if pandas is installed."""
        self._reset()
        self._set_up_steps(model, training_step, validation_step)
        self._check_fit(val_dataloaders, validation_step, optimizer)
        resume_path, load_path = self._find(resume, "resume"), self._find(load, "load")
        self._set_up_loaders(train_dataloaders, val_dataloaders)
        with self._prepared_model(resume_path or load_path) as checkpoint:
            self._set_up_optimizer(optimizer, scheduler)
            self._open_folders(resume_path)
            if resume_path is not None:
                self._restore(checkpoint)
            state = "failed"
            try:
                self._call("on_train_start")
                while not self._is_done():
                    self._train_epoch()
                self._call("on_train_end")
                state = "finished"
            except KeyboardInterrupt:
                state = "interrupted"
                saved = "resume='last' continues" if self.history else "nothing is saved"
                print(f"Ctrl-C in epoch {self.current_epoch}: {saved}.")
            finally:
                (self.log_dir / STATE_FILE).write_text(state)
        return to_table(self.history)

    def _is_done(self) -> bool:
        if 0 <= self.max_steps <= self.global_step:
            return True
        if self.max_epochs is not None and 0 <= self.max_epochs <= self.current_epoch:
            return True
        return self.should_stop

    def _train_epoch(self) -> None:
        epoch = self.current_epoch
        if self.batches_done == 0:
            self._call("on_train_epoch_start")
        for batch in self._train_batches():
            self._train_batch(batch)
            # A checkpoint contains no gradients, so save and stop only after an optimizer step.
            if self._batches_in_window == 0:
                self._validate_if_due(epoch)
                if self._is_done():
                    break
        is_complete = self.batches_done == self._train_length or not self._is_done()
        if self._batches_in_window > 0:
            # A loader without a length has ended in the middle of an accumulation window.
            self._step_optimizer()
            self._validate_if_due(epoch)
        if self.validate_every_n_steps is None and is_complete:
            self._validate()
        self._compute_metrics()
        self._call("on_train_epoch_end")
        self._compute_metrics()
        if is_complete:
            self._step_schedulers("epoch", epoch + 1)
            self.current_epoch, self.batches_done = epoch + 1, 0
        has_row = bool(self.history) and self.history[-1]["step"] == self.global_step
        if self.validate_every_n_steps is None or (self._is_done() and not has_row):
            self._end_row(epoch)

    def _train_batch(self, batch: Any) -> None:
        """Compute the gradients of a batch, and step the optimizer after an accumulation window."""
        batch_idx, every = self.batches_done, self.log_every_n_steps
        self._is_row_due = every > 0 and (self.global_step + 1) % every == 0
        self._batch_size = find_batch_size(batch) or 1
        self._step_values = {}
        if self._call("on_train_batch_start", batch, batch_idx) == -1:
            raise TypeError("on_train_batch_start: got -1, which ends an epoch. Use FabricLoop.")
        is_window_end = self._is_window_end(batch)
        if is_window_end or self.fabric.world_size == 1 or self._train_length == -1:
            self._compute_gradients(batch, batch_idx)
        else:
            # DDP reduces gradients only in the last batch before an optimizer step.
            with self._step_module.no_sync():
                self._compute_gradients(batch, batch_idx)
        self.batches_done += 1
        self._batches_in_window += 1
        if is_window_end:
            self._step_optimizer()
        self._call("on_train_batch_end", {"loss": self._loss.detach()}, batch, batch_idx)
        if is_window_end and self._is_row_due:
            self._log_step(self._step_values)
        self._batch_size, self._step_values = 1, None

    def _compute_gradients(self, batch: Any, batch_idx: int) -> None:
        """Run the forward and the backward pass, which adds to the gradients of earlier batches."""
        output = self._run_step("training_step", batch, batch_idx)
        self._loss = find_loss(output, batch_idx)
        self._log_output(output, "train_")
        if self._batches_in_window == 0:
            # Optimizer.zero_grad() does the same, but also calls record_function(), which is slow.
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        count = self.accumulate_grad_batches
        self._precision.backward(self._loss if count == 1 else self._loss / count, None)

    def _is_window_end(self, batch: Any) -> bool:
        """Return whether the optimizer steps after this batch. All processes return the same."""
        if self.accumulate_grad_batches == 1:
            return True
        is_last = self.batches_done + 1 == self._train_length
        is_end = is_last or self._batches_in_window + 1 == self.accumulate_grad_batches
        if self.fabric.world_size == 1:
            return is_end
        # All processes must step together, because DDP averages gradients over all processes.
        return bool(self.fabric.all_reduce(int(is_end), reduce_op="max"))

    def _step_optimizer(self) -> None:
        if self.gradient_clip_val:
            options = {"max_norm": self.gradient_clip_val, "error_if_nonfinite": False}
            self.fabric.clip_gradients(self.network, self.optimizer, **options)
        self._precision.optimizer_step(self.optimizer)
        self.global_step += 1
        self._batches_in_window = 0
        self._learning_rate = self.optimizer.param_groups[0]["lr"]
        self._step_schedulers("step", self.batches_done)

    def _step_schedulers(self, interval: str, count: int) -> None:
        for config in self.schedulers:
            if config["interval"] != interval or count % config["frequency"] != 0:
                continue
            if isinstance(config["scheduler"], ReduceLROnPlateau):
                check_is_logged(config["monitor"], self.callback_metrics)
                config["scheduler"].step(self.callback_metrics[config["monitor"]])
            else:
                config["scheduler"].step()

    def _train_batches(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch."""
        sampler = getattr(self.train_loader, "sampler", self.train_loader)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.current_epoch)
        rng_state = get_rng_state(self.train_loader)
        if self.batches_done == 0:
            self._epoch_start = rng_state
            batches = iter(self.train_loader)
        else:
            # Draw the same order of samples again, and skip the batches before the checkpoint.
            set_rng_state(self._epoch_start, self.train_loader)
            batches = iter(self.train_loader)
            for _ in range(self.batches_done):
                next(batches)
            set_rng_state(rng_state, self.train_loader)
        for batch in tqdm(batches, f"epoch {self.current_epoch}", leave=False, disable=None):
            yield self._move(batch)
        if self.batches_done == 0:
            raise ValueError("train_dataloaders: got no batch in this epoch. Pass a DataLoader.")

    def _move(self, batch: Any) -> Any:
        """Move a batch to the device, and convert its dtype for a precision like "bf16-true"."""
        if self._is_one_cpu_in_32_bits:
            return batch
        return self._precision.convert_input(self.fabric.to_device(batch))

    def _run_step(self, name: str, batch: Any, batch_idx: int) -> Any:
        """Run a step in the loop's precision. With the DDP strategy, run the step through DDP."""
        if self._is_one_cpu_in_32_bits:
            return self._steps[name](batch, batch_idx)
        with self._precision.forward_context():
            return self._step_module(self._steps[name], batch, batch_idx)

    # Validation

    def validate(
        self, model: Any, dataloaders: Any, load: Any = None, validation_step: Any = None
    ) -> list[dict[str, float]]:
        """Validate a model. Return the metrics as a list of one dict, like Trainer."""
        self._set_up_steps(model, None, validation_step)
        if "validation_step" not in self._steps:
            raise TypeError("validate: got no validation_step. Pass it or write the method.")
        load_path = self._find(load, "load")
        self._set_up_loaders(None, dataloaders)
        with self._prepared_model(load_path):
            self._validate()
        return [{name: value.item() for name, value in self._validated.items()}]

    def _validate(self) -> None:
        """Validate in eval mode without gradients, and keep the metrics for the next row."""
        if self.val_loader is None:
            return
        train_metrics, self._metrics, self._step_values = self._metrics, {}, None
        modes = [(module, module.training) for module in self.network.modules()]
        self.network.eval()
        try:
            with torch.no_grad():
                self._call("on_validation_epoch_start")
                for batch_idx, batch in enumerate(self.val_loader):
                    self._batch_size = find_batch_size(batch) or 1
                    output = self._run_step("validation_step", self._move(batch), batch_idx)
                    self._log_output(output, "val_")
                self._batch_size = 1
                self._compute_metrics()
                self._call("on_validation_epoch_end")
        finally:
            for module, is_training in modes:
                module.training = is_training
        self._validated, self._metrics = self._compute_metrics(is_row_end=True), train_metrics

    # Logging

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        sync_dist: bool = False,
        batch_size: int | None = None,
    ) -> None:
        """Log a value to steps.csv (on_step) and its mean to metrics.csv (on_epoch)."""
        if not isinstance(value, Tensor) and hasattr(value, "compute"):
            self._metrics[name] = value
            self._logged_means.add(name)
            return
        value = to_metric(value)
        if self._step_values is not None and on_step is not False:
            self.callback_metrics[name] = value
            if self._is_row_due and name not in ("step", "epoch"):
                self._step_values[name] = value.clone()
        if on_epoch or (on_epoch is None and self._step_values is None):
            self._add_to_mean(name, value, batch_size or self._batch_size, sync_dist)
            self._logged_means.add(name)

    def log_dict(self, metrics: Any, **options: Any) -> None:
        for name, value in metrics.items():
            self.log(name, value, **options)

    def _log_output(self, output: Any, prefix: str) -> None:
        """Add the output of a step to the next row: a loss, a pair (loss, acc) or a dict."""
        if isinstance(output, tuple) and len(output) == 2:
            output = {"loss": output[0], "acc": output[1]}
        for key, value in (output if isinstance(output, dict) else {"loss": output}).items():
            name = key if key.startswith(prefix) else prefix + key
            is_scalar = isinstance(value, Tensor) and value.numel() == 1
            if name not in self._logged_means and (is_scalar or isinstance(value, int | float)):
                self._add_to_mean(name, to_metric(value), self._batch_size, is_synced=True)

    def _add_to_mean(self, name: str, value: Tensor, weight: int, is_synced: bool) -> None:
        if name not in self._metrics:
            self._metrics[name] = Mean(self.fabric if is_synced else None)
        self._metrics[name].update(value, weight)

    def _compute_metrics(self, is_row_end: bool = False) -> dict[str, Tensor]:
        """Return the metrics since the last row. With is_row_end, also reset the metrics."""
        values = {name: metric.compute() for name, metric in self._metrics.items()}
        self.callback_metrics.update(values)
        if is_row_end:
            for metric in self._metrics.values():
                metric.reset()
            self._metrics = {}
        return values

    def _log_step(self, values: dict[str, Tensor]) -> None:
        """Write a row to steps.csv. Training waits for the device only here and in `_end_row`."""
        row: dict[str, Any] = {"step": self.global_step, "epoch": self.current_epoch}
        row.update(train_loss=self._loss.item(), lr=self._learning_rate)
        row.update((name, value.item()) for name, value in values.items())
        self._warn_of_nan(row)
        if self.fabric.is_global_zero:
            append_row(self.log_dir / "steps.csv", row)

    def _validate_if_due(self, epoch: int) -> None:
        every = self.validate_every_n_steps
        if every is not None and self.global_step % every == 0:
            self._validate()
            self._end_row(epoch)

    def _end_row(self, epoch: int) -> None:
        """Write a row to metrics.csv, and save the checkpoints."""
        values = {**self._validated, **self._compute_metrics(is_row_end=True)}
        row: dict[str, Any] = {"epoch": epoch, "step": self.global_step}
        for name in sorted(values, key=lambda name: not name.startswith("train")):
            row.setdefault(name, values[name].item())
        row["lr"], row["time"] = self._learning_rate, time.monotonic() - self._row_started
        self._row_started = time.monotonic()
        self._warn_of_nan(row)
        self.history.append(row)
        if self.fabric.is_global_zero:
            write_rows(self.log_dir / "metrics.csv", self.history)
            numbers = [f"{name} {value:<7.4g}" for name, value in list(row.items())[2:]]
            print(f"epoch {epoch} step {self.global_step:<4}", *numbers, flush=True)
        self._save(row)
        self._validated = {}

    def _warn_of_nan(self, row: dict[str, Any]) -> None:
        loss = row.get("train_loss", 0.0)
        if not self._has_warned and not math.isfinite(loss):
            self._has_warned = True
            place = f"epoch {row['epoch']}, step {row['step']}"
            warnings.warn(f"train_loss: got {loss} in {place}. Try a smaller lr.", stacklevel=3)

    # Checkpoints

    def _save(self, row: dict[str, Any]) -> None:
        """Save last.ckpt, and best.ckpt if the monitored value is the best one so far."""
        names = ["last.ckpt"]
        score, best = row.get(self.monitor or "", math.nan), self.best_score
        is_better = best is None or (score < best if self.mode == "min" else score > best)
        if is_better and not math.isnan(score):
            names.insert(0, "best.ckpt")
            self.best_score = score
        checkpoint = self._build_checkpoint()
        if self.fabric.is_global_zero:
            for name in names:
                with replaced(self.checkpoint_dir / name, "wb") as file:
                    torch.save(checkpoint, file)
        has_validated = bool(self._validated) or self.val_loader is None
        if self.monitor is not None and self.best_score is None and has_validated:
            check_is_logged(self.monitor, row)

    def _build_checkpoint(self) -> dict[str, Any]:
        """Return a checkpoint in Lightning's format, with MiniLoop's own state under one key."""
        of_rank = {"rng": get_rng_state(self.train_loader), "epoch_start": self._epoch_start}
        ranks = [of_rank] * self.fabric.world_size
        if self.fabric.world_size > 1:
            torch.distributed.all_gather_object(ranks, of_rank)
        is_in_epoch = self.batches_done > 0
        kept = {} if self.best_score is None else {"best.ckpt": self.best_score}
        return {
            "epoch": self.current_epoch if is_in_epoch else self.current_epoch - 1,
            "global_step": self.global_step,
            "pytorch-lightning_version": lightning_version,
            "state_dict": self.network.state_dict(),
            "optimizer_states": [self.optimizer.state_dict()],
            "lr_schedulers": [config["scheduler"].state_dict() for config in self.schedulers],
            "hyper_parameters": to_plain(getattr(self.model, "hparams", {})),
            type(self._precision).__qualname__: self._precision.state_dict(),
            "fabric_template": {
                "progress": {
                    "epochs_done": self.current_epoch,
                    "batches_done": self.batches_done,
                    "is_in_epoch": is_in_epoch,
                    "global_step": self.global_step,
                },
                "history": {"rows": self.history},
                "checkpoints": {"kept": kept},
                "ranks": ranks,
            },
        }

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        """Restore everything except the weights. Remove CSV rows newer than the checkpoint."""
        own = checkpoint.get("fabric_template")
        if own is None or (own["progress"]["is_in_epoch"] and "epoch_start" not in own["ranks"][0]):
            raise ValueError("resume: got a checkpoint of another loop. Use FabricLoop, or load=.")
        progress, ranks = own["progress"], own["ranks"]
        of_rank = ranks[self.fabric.global_rank % len(ranks)]
        self._epoch_start = of_rank.get("epoch_start")
        self.optimizer.load_state_dict(checkpoint["optimizer_states"][0])
        for config, state in zip(self.schedulers, checkpoint["lr_schedulers"], strict=True):
            config["scheduler"].load_state_dict(state)
        self._precision.load_state_dict(checkpoint.get(type(self._precision).__qualname__, {}))
        self.current_epoch, self.global_step = progress["epochs_done"], progress["global_step"]
        self.batches_done = progress["batches_done"] if progress["is_in_epoch"] else 0
        self.history = own["history"]["rows"]
        choose_best = min if self.mode == "min" else max
        self.best_score = choose_best(own["checkpoints"]["kept"].values(), default=None)
        for row in self.history:
            names = row.keys() - {"epoch", "step", "lr", "time"}
            self.callback_metrics.update({name: to_metric(row[name]) for name in names})
        set_rng_state(of_rank["rng"], self.train_loader)
        if self.fabric.is_global_zero:
            steps = read_rows(self.log_dir / "steps.csv")
            steps = [row for row in steps if int(row["step"]) <= self.global_step]
            write_rows(self.log_dir / "steps.csv", steps)
            write_rows(self.log_dir / "metrics.csv", self.history)

    def _find(self, given: str | Path | None, argument: str) -> Path | None:
        """Return the checkpoint file that "last", "best", "auto" or a path refers to."""
        if given is None:
            return None
        paths = [Path(given).absolute()]
        if given in ("last", "best", "auto"):
            name = "best.ckpt" if given == "best" else "last.ckpt"
            paths = list(self._checkpoints.glob(f"{self.version or '*'}/{name}"))
        paths = [path for path in paths if path.is_file()]
        if not paths and given != "auto":
            raise FileNotFoundError(f"{argument}: got {str(given)!r}, expected a checkpoint.")
        return max(paths, key=os.path.getmtime, default=None)

    # Set-up

    def _set_up_steps(self, model: Any, training_step: Any, validation_step: Any) -> None:
        """Find the network and the steps of a model. Refuse hooks that MiniLoop never calls."""
        refused = [name for name in REFUSED_HOOKS.split() if find_method(model, name)]
        if not getattr(model, "automatic_optimization", True):
            refused.append("manual optimization")
        if refused:
            kind, names = type(model).__name__, ", ".join(refused)
            raise TypeError(f"model: got {kind} with {names}. Use FabricLoop.")
        # If the model is not an nn.Module, train the modules in its attributes.
        parts = {name: part for name, part in vars(model).items() if isinstance(part, nn.Module)}
        self.model = model
        self.network = model if isinstance(model, nn.Module) else nn.ModuleDict(parts)
        self._steps = {}
        given = {"training_step": training_step, "validation_step": validation_step}
        for name, function in given.items():
            step = find_method(model, name) if function is None else partial(function, model)
            if step is not None:
                self._steps[name] = with_batch_idx(step, name)

    def _check_fit(self, val_dataloaders: Any, validation_step: Any, optimizer: Any) -> None:
        if "training_step" not in self._steps:
            raise TypeError("fit: got no training_step. Pass training_step= or write the method.")
        if val_dataloaders is not None and "validation_step" not in self._steps:
            raise TypeError("fit: got val_dataloaders without validation_step. Pass both or none.")
        if validation_step is not None and val_dataloaders is None:
            raise TypeError("fit: got validation_step without val_dataloaders. Pass both or none.")
        if optimizer is None and find_method(self.model, "configure_optimizers") is None:
            raise TypeError("fit: got no optimizer. Pass optimizer=, as torch.optim.Adam(...).")

    def _set_up_loaders(self, train: Any, val: Any) -> None:
        """Launch the processes, and distribute the samples among them."""
        check_loader(train, "train_dataloaders")
        check_loader(val, "val_dataloaders")
        if isinstance(self.fabric.strategy, DDPStrategy):
            # The command `fabric run` sets this variable, and launches the processes itself.
            if "LT_CLI_USED" not in os.environ:
                self.fabric.launch()
            # Like Trainer, start each call on all processes with the same random numbers.
            reset_seed()
        self.train_loader, self.val_loader = self._share(train), self._share(val)
        self._train_length = length_hint(self.train_loader, -1)

    def _share(self, loader: Any) -> Any:
        """Return a loader of this process's samples. A loader with its own sampler is unchanged."""
        if self.fabric.world_size == 1:
            return loader
        if hasattr(loader, "for_rank"):
            return loader.for_rank(self.fabric.global_rank, self.fabric.world_size)
        sampler = getattr(loader, "sampler", None)
        has_own_batches = getattr(loader, "batch_size", None) is None
        if not isinstance(sampler, RandomSampler | SequentialSampler) or has_own_batches:
            return loader
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        shuffle = isinstance(sampler, RandomSampler)
        shared: Any = DistributedSampler(loader.dataset, shuffle=shuffle, seed=seed)
        names = inspect.signature(DataLoader).parameters.keys() - {"shuffle", "batch_sampler"}
        options = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
        return DataLoader(**{**options, "sampler": shared})

    def _set_up_optimizer(self, optimizer: Any, scheduler: Any) -> None:
        """Find the optimizer and the schedulers in the output of configure_optimizers."""
        schedulers, monitor = None, "val_loss"
        if optimizer is None:
            optimizer = self.model.configure_optimizers()
        if isinstance(optimizer, dict):
            schedulers, monitor = optimizer.get("lr_scheduler"), optimizer.get("monitor", monitor)
            optimizer = optimizer.get("optimizer")
        elif isinstance(optimizer, tuple) and len(optimizer) == 2:
            optimizer, schedulers = optimizer
        if isinstance(optimizer, list | tuple) and len(optimizer) == 1:
            optimizer = optimizer[0]
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise TypeError(f"optimizer: got {kind}, expected an optimizer. Or use FabricLoop.")
        own = set(self.network.parameters())
        if own.isdisjoint(p for group in optimizer.param_groups for p in group["params"]):
            raise ValueError("optimizer: got parameters of another model. Pass model.parameters().")
        self.optimizer, self.schedulers = optimizer, []
        self._learning_rate = optimizer.param_groups[0]["lr"]
        schedulers = scheduler or schedulers or []
        for given in schedulers if isinstance(schedulers, list | tuple) else [schedulers]:
            config: dict[str, Any] = {"interval": "epoch", "frequency": 1, "monitor": monitor}
            config.update(given if isinstance(given, dict) else {"scheduler": given})
            self.schedulers.append(config)

    def _open_folders(self, resume_path: Path | None) -> None:
        """Choose and create the folders of a run. A new run deletes old CSV rows."""
        version = self.version
        if version is None and resume_path and resume_path.parents[1] == self._checkpoints:
            version = resume_path.parent.name
        elif version is None:
            names = (f"version_{number}" for number in itertools.count())
            version = next(name for name in names if not (self._logs / name).exists())
        version = self.fabric.broadcast(version)
        self.log_dir, self.checkpoint_dir = self._logs / version, self._checkpoints / version
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        if self.fabric.is_global_zero:
            old_files = [self.log_dir / STATE_FILE]
            if resume_path is None:
                old_files += [self.log_dir / name for name in ("metrics.csv", "steps.csv")]
            for path in old_files:
                path.unlink(missing_ok=True)
            config = {field.name: getattr(self, field.name) for field in fields(self)}
            content = {"hparams": getattr(self.model, "hparams", {}), "config": config}
            (self.log_dir / "hparams.yaml").write_text(yaml.safe_dump(to_plain(content)))

    @contextmanager
    def _prepared_model(self, path: Path | None) -> Iterator[dict[str, Any]]:
        """Set the model's weights, device, precision and trainer. Restore the device at the end."""
        checkpoint = {} if path is None else read_checkpoint(path)
        device = next((p.device for p in self.network.parameters()), self.fabric.device)
        self._precision.convert_module(self.network)
        self.fabric.strategy.module_to_device(self.network)
        if path is not None:
            self.network.load_state_dict(checkpoint["state_dict"])
        self._step_module = self.fabric.strategy.setup_module(StepModule(self.network))
        is_lightning_module = hasattr(type(self.model), "trainer")
        if is_lightning_module:
            self.model.trainer, self.model.log, self.model.log_dict = self, self.log, self.log_dict
        try:
            yield checkpoint
        finally:
            self.network.to(device)
            if is_lightning_module:
                del self.model.log, self.model.log_dict

    def _call(self, hook: str, *args: Any) -> Any:
        method = getattr(self.model, hook, None)
        return None if method is None else method(*args)


class Mean:
    """A mean weighted by batch size, with the methods of a torchmetrics metric."""

    def __init__(self, fabric: Fabric | None) -> None:
        self.fabric: Any = fabric  # None: compute() uses only this process's values.
        self.total, self.weight = to_metric(0), 0

    def update(self, value: Tensor, weight: int) -> None:
        """Add a value. The sum stays on the device."""
        if value.dtype != self.total.dtype:
            value = value.to(self.total.dtype)
        if weight.bit_count() == 1:
            # If weight is a power of two, torch.add() equals total + value * weight bit for bit.
            self.total = torch.add(self.total, value, alpha=weight)
        else:
            self.total = self.total + value * weight
        self.weight += weight

    def compute(self) -> Tensor:
        pair = torch.cat([self.total.reshape(1), self.total.new_tensor([self.weight])])
        if self.fabric is not None:
            pair = self.fabric.all_reduce(self.fabric.to_device(pair), reduce_op="sum")
        return pair[0] / pair[1]

    def reset(self) -> None:
        self.total, self.weight = to_metric(0), 0


class StepModule(nn.Module):
    """Run a step as forward(), so that DDP applies to everything in the step."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, step: Callable[..., Any], batch: Any, batch_idx: int) -> Any:
        return step(batch, batch_idx)


def find_method(model: Any, name: str) -> Callable[..., Any] | None:
    """Return a method of a model, or None for the empty methods of LightningModule."""
    method = getattr(model, name, None)
    module = getattr(method, "__module__", None) or ""
    is_empty = module.startswith(("lightning.pytorch.core.", "pytorch_lightning.core."))
    return method if callable(method) and not is_empty else None


def with_batch_idx(step: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a step that takes (batch, batch_idx), even if the given step takes only the batch."""
    parameters = inspect.signature(step).parameters
    positional = [p for p in parameters.values() if p.kind < p.KEYWORD_ONLY]
    required = [p.name for p in positional if p.default is p.empty]
    # A second argument with a default receives the index only if the argument is named batch_idx.
    if len(required) == 2 or "batch_idx" in parameters:
        return step
    if len(required) == 1:
        return lambda batch, batch_idx: step(batch)
    expected = "batch and optionally batch_idx, in a step function after the model"
    raise TypeError(f"{name}: got the arguments {required}, expected {expected}.")


def find_loss(output: Any, batch_idx: int) -> Tensor:
    loss = output.get("loss") if isinstance(output, dict) else output
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss
    kind = "a detached loss" if isinstance(loss, Tensor) else type(loss).__name__
    text = f"training_step: got {kind} at batch {batch_idx}, expected a loss with a gradient."
    raise TypeError(f"{text} Return the loss without detach() and item().")


def find_batch_size(batch: Any) -> int | None:
    """Return the length of the first tensor in a batch, or None if a batch has no tensor."""
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.dim() > 0 else 1
    if not isinstance(batch, (list, tuple)):
        named = vars(batch) if is_dataclass(batch) else batch
        batch = named.values() if isinstance(named, Mapping) else ()
    for part in batch:
        size = find_batch_size(part)
        if size is not None:
            return size
    return None


def to_metric(value: Any) -> Tensor:
    """Convert a number to a tensor of torch's default dtype, but at least to float32."""
    if isinstance(value, Tensor):
        return value.detach()
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    return torch.tensor(float(value), dtype=dtype)


def check_is_logged(monitor: str, metrics: dict[str, Any]) -> None:
    if monitor not in metrics:
        raise ValueError(f"monitor: got {monitor!r}, expected one of {', '.join(metrics)}.")


def check_loader(loader: Any, argument: str) -> None:
    kind = type(loader).__name__
    if not isinstance(loader, Iterable | None):
        raise TypeError(f"{argument}: got a {kind}, expected batches, as of a DataLoader.")
    if length_hint(loader, 1) == 0:
        raise ValueError(f"{argument}: got an empty {kind}, expected at least one batch.")


def get_rng_state(loader: Any) -> dict[str, Any]:
    """Return the states of the random generators of this process and of a loader."""
    numpy_state: Any = np.random.get_state()
    name, keys, *position = numpy_state
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": random.getstate(),
        "numpy": (name, keys.tobytes(), *position),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if getattr(loader, "generator", None) is not None:
        state["loader"] = loader.generator.get_state()
    return state


def set_rng_state(state: dict[str, Any], loader: Any) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    random.setstate(state["python"])
    name, keys, *position = state["numpy"]
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *position))
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "loader" in state:
        loader.generator.set_state(state["loader"])


@contextmanager
def replaced(path: Path, mode: str) -> Iterator[Any]:
    """Write a file atomically through a temporary file, which is renamed at the end."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open(mode) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_checkpoint(path: Path) -> Any:
    # torch.load would load wrong weights from a damaged file without an error.
    if not zipfile.is_zipfile(path) or zipfile.ZipFile(path).testzip() is not None:
        raise ValueError(f"{path}: the file is damaged. Use another checkpoint.")
    return torch.load(path, map_location="cpu", weights_only=True)


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a row to a CSV file. If the row has a new column, rewrite the file."""
    with path.open("a+") as file:
        file.seek(0)
        columns = next(csv.reader(file), [])
        if set(row) <= set(columns):
            csv.DictWriter(file, columns, lineterminator="\n").writerow(row)
            return
    write_rows(path, [*read_rows(path), row])


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV file without an incomplete last line."""
    text = path.read_text() if path.exists() else ""
    return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with replaced(path, "w") as file:
        columns = dict.fromkeys(name for row in rows for name in row)
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def to_plain(values: Any) -> Any:
    """Convert values to types that YAML and checkpoints support, or else to text."""
    return json.loads(json.dumps(dict(values), default=str))


def to_table(rows: list[dict[str, Any]]) -> Any:
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows)
