# SPDX-License-Identifier: MIT
"""MiniLoop: a PyTorch training loop in one file, to read, to copy and to change.

Version 0.1.0 of fabric_template, under the MIT License (file LICENSE). It needs torch, NumPy and
Lightning Fabric. Read `fit`, `_train_epoch` and `_train_batch` first. To change

- the loss and its scaling, edit `_train_batch`,
- the gradients before a step (clipping, norms), `_step_optimizer`,
- when the optimizer steps, `_is_window_end`; when training stops, `_is_done`,
- a row of metrics.csv, `_end_row`; a row of steps.csv, `_log_step`,
- what a checkpoint holds, `_build_checkpoint` and `_restore`.

What it refuses, FabricLoop does, with the same options and files. Each continues the other's runs.
"""

from __future__ import annotations

import csv
import inspect
import math
import os
import random
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from lightning.fabric import Fabric
from lightning.fabric import __version__ as lightning_version
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.fabric.utilities.seed import reset_seed
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

HOOKS = {
    *("on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_train_batch_start", "on_train_batch_end", "on_save_checkpoint", "on_load_checkpoint"),
    *("on_validation_epoch_start", "on_validation_epoch_end"),
}
UNSUPPORTED = {
    *("backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
    *("configure_gradient_clipping", "configure_callbacks", "configure_model", "setup", "teardown"),
    *("on_fit_start", "on_fit_end", "on_before_zero_grad", "on_before_backward", "prepare_data"),
    *("on_after_backward", "on_before_optimizer_step", "on_validation_start", "on_validation_end"),
    *("on_validation_batch_start", "on_validation_batch_end", "on_validation_model_eval"),
    *("on_validation_model_train", "on_validation_model_zero_grad", "on_before_batch_transfer"),
    *("transfer_batch_to_device", "on_after_batch_transfer"),
}


@dataclass(kw_only=True, eq=False)
class MiniLoop:
    """Train a model with step functions, or any object that has a method ``training_step``.

    Example:
        >>> net, batches = nn.Linear(2, 1), [torch.ones(4, 2)] * 3
        >>> optimizer, loop = torch.optim.SGD(net.parameters()), MiniLoop(max_epochs=1)
        >>> def training_step(net, batch): return net(batch).square().mean()
        >>> rows = loop.fit(net, batches, optimizer=optimizer, training_step=training_step)
        epoch 0  step 3  train_loss ...
    """

    max_epochs: int | None = None  # -1: no limit. None: 1000, or no limit with max_steps.
    max_steps: int = -1  # Stop after this many optimizer steps. -1: no limit.
    name: str = "run"  # The run is in logs/<name>/version_<n> and checkpoints/<name>/version_<n>.
    version: int | str | None = None  # None: the next free number, or that of the resumed run.
    monitor: str | None = None  # The metric that decides which checkpoint is best.ckpt.
    mode: str = "min"  # Whether the best value of monitor is the smallest or the largest ("max").
    accumulate_grad_batches: int = 1  # Batches of one optimizer step.
    gradient_clip_val: float | None = None  # Clip the common norm of the gradients at this value.
    validate_every_n_steps: int | None = None  # None: validate at the end of each epoch.
    log_every_n_steps: int = 50  # Write a row of steps.csv every N optimizer steps. 0: never.
    seed: int | None = None  # Seed everything when the loop is made and when a run starts.
    default_root_dir: str | os.PathLike = "."  # The folder of logs/ and checkpoints/.
    accelerator: Any = "auto"  # This and the following are Fabric's arguments.
    strategy: Any = "auto"
    devices: Any = "auto"
    precision: Any = None
    fabric: Any = None  # A ready Fabric.
    sanity_checking = False  # Modules ask their trainer. There is no sanity check here.

    def __new__(cls, **options: Any) -> MiniLoop:
        """Name the nearest option where one does not exist."""
        known = [field.name for field in fields(cls)]
        for name in set(options) - set(known):
            near = get_close_matches(name, known, n=1) or ["an option of FabricLoop"]
            raise TypeError(f"MiniLoop: got the unknown option {name}. Did you mean {near[0]}?")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f'mode: got {self.mode!r}, expected "min" or "max".')
        if self.name in ("", ".", "..") or set(self.name) & set('/\\:*?"<>|'):
            raise ValueError(f"name: got {self.name!r}, expected the name of a folder.")
        if self.accumulate_grad_batches < 1:
            raise ValueError(
                f"accumulate_grad_batches: got {self.accumulate_grad_batches}, expected >= 1."
            )
        if self.max_epochs is None:
            self.max_epochs = 1000 if self.max_steps == -1 else -1
        self._reset()
        names = ("accelerator", "strategy", "devices", "precision")
        self.fabric = self.fabric or Fabric(**{name: getattr(self, name) for name in names})
        if not isinstance(self.fabric.strategy, SingleDeviceStrategy | DDPStrategy):
            kind = type(self.fabric.strategy).__name__
            raise ValueError(f"strategy: got {kind}, expected one device or DDP. Use FabricLoop.")

    def _reset(self) -> None:
        """Seed, and forget an earlier run."""
        if self.seed is not None:
            Fabric.seed_everything(self.seed, workers=True, verbose=False)
        self.current_epoch = self.global_step = self.batches_done = self._batches_in_window = 0
        self.should_stop = self._is_training_batch = False
        self.history: list[dict[str, Any]] = []
        self.callback_metrics: dict[str, Tensor] = {}
        self.best_score: float | None = None
        self.optimizer: Any = None
        self.schedulers: list[dict[str, Any]] = []
        self._batch: Any = None
        self._learning_rate = 0.0
        self._row_values: dict[str, Any] = {}  # Means and torchmetrics objects of the next row.
        self._step_values: dict[str, Tensor] = {}  # What the newest step has logged.
        self._validated: dict[str, Tensor] = {}  # What was validated since the last row.
        self._row_started = time.monotonic()

    # Training

    def fit(
        self,
        model: Any,
        train_dataloaders: Any,
        val_dataloaders: Any = None,
        resume: str | Path | None = None,
        load: str | Path | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        training_step: Callable | None = None,
        validation_step: Callable | None = None,
    ) -> Any:
        """Train a model. Return the rows of metrics.csv as a DataFrame, or as a list without pandas.

        Args:
            model: An nn.Module, a LightningModule or an object with step methods.
            train_dataloaders: An iterable of batches.
            val_dataloaders: An iterable of batches to validate on.
            resume: Continue a run: a path, "last", "best", or "auto" ("last" if there is one).
            load: Start with the weights of a checkpoint: a path, "last" or "best".
            optimizer: An optimizer, or what ``configure_optimizers`` may return.
            scheduler: A learning rate scheduler, or its dict.
            training_step: ``fn(model, batch[, batch_idx])`` that returns the loss or a dict with it.
            validation_step: ``fn(model, batch[, batch_idx])`` that returns a loss, a pair
                (loss, acc) or a dict.
        """
        self._reset()
        self._set_up_model(model, training_step, validation_step)
        if "training_step" not in self._steps:
            raise TypeError("fit: got no training_step. Pass training_step= or write the method.")
        if (val_dataloaders is None) < ("validation_step" not in self._steps):
            raise TypeError("fit: got val_dataloaders without validation_step. Pass both or none.")
        if val_dataloaders is None and validation_step is not None:
            raise TypeError("fit: got validation_step without val_dataloaders. Pass both or none.")
        resume_path, load_path = self._find(resume, "resume"), self._find(load, "load")
        self._set_up_loaders(train_dataloaders, val_dataloaders)
        with self._attached():
            self._set_up_optimizer(optimizer, scheduler)
            self._open_folders(resume_path)
            self._restore(resume_path or load_path, is_resumed=resume_path is not None)
            with self._recorded_state():
                self._call("on_train_start")
                while not self._is_done():
                    self._train_epoch()
                self._call("on_train_end")
        try:
            import pandas
        except ImportError:
            return self.history
        return pandas.DataFrame(self.history)

    def _is_done(self) -> bool:
        """Return whether training ends. It is asked after each batch and each epoch."""
        if self.should_stop or self.global_step >= self.max_steps != -1:
            return True
        return self.current_epoch >= self.max_epochs != -1  # type: ignore[operator]

    def _train_epoch(self) -> None:
        is_last = True
        if self.batches_done == 0:
            self._call("on_train_epoch_start")
        for batch, is_last in self._train_batches():
            # While the loss lives, its graph lives. Freeing it before the next forward makes
            # autograd create its nodes of the parameters again, which slows a step.
            loss = self._train_batch(batch, is_last)  # noqa: F841
            every = self.validate_every_n_steps
            if every and self._batches_in_window == 0 and self.global_step % every == 0:
                self._validate()
                self._end_row(self.current_epoch)
            if self._is_done():
                break
        self._end_epoch(is_complete=is_last)

    def _end_epoch(self, is_complete: bool) -> None:
        """Validate, call the hook, step the schedulers, and write the row of the epoch."""
        is_by_steps = self.validate_every_n_steps is not None
        if not is_by_steps:
            self._validate()
        self.callback_metrics.update(self._compute_row_values())
        self._call("on_train_epoch_end")
        self.callback_metrics.update(self._compute_row_values())
        epoch = self.current_epoch
        if is_complete:
            self._step_schedulers("plateau")
            self.current_epoch, self.batches_done = epoch + 1, 0
        has_row = bool(self.history) and self.history[-1]["step"] == self.global_step
        if not is_by_steps or (self._is_done() and not has_row):
            self._end_row(epoch)

    def _train_batch(self, batch: Any, is_last: bool) -> Tensor:
        """Compute the loss and the gradients. At the end of a window, step the optimizer."""
        batch_idx, self._batch, self._is_training_batch = self.batches_done, batch, True
        self._call("on_train_batch_start", batch, batch_idx)
        is_window_end = self._is_window_end(is_last)
        with nullcontext() if is_window_end else self._no_backward_sync():
            output = self._run_step("training_step", batch, batch_idx)
            loss = find_loss(output, batch_idx)
            self._add_returned(output, "train")
            if self._batches_in_window == 0:
                self.optimizer.zero_grad()
            self._backward(loss / self.accumulate_grad_batches)
        self.batches_done += 1
        self._batches_in_window += 1
        if is_window_end:
            self._step_optimizer()
            self._step_schedulers("step")
            if is_last:
                self._step_schedulers("epoch")
        self._call("on_train_batch_end", {"loss": loss.detach()}, batch, batch_idx)
        self._is_training_batch = False
        every = self.log_every_n_steps
        if every and is_window_end and self.global_step % every == 0:
            self._log_step(loss, batch_idx)
        return loss

    def _is_window_end(self, is_last: bool) -> bool:
        """Return whether the optimizer steps after this batch: the same answer on all processes."""
        if self.accumulate_grad_batches == 1:
            return True
        is_end = is_last or self._batches_in_window + 1 == self.accumulate_grad_batches
        if self.fabric.world_size == 1:
            return is_end
        # A rule of your own may depend on the batch, which differs between the processes.
        flag = torch.tensor(int(is_end), device=self.fabric.device)
        return bool(self.fabric.all_reduce(flag, reduce_op="max"))

    def _step_optimizer(self) -> None:
        if self.gradient_clip_val:
            norm = {"max_norm": self.gradient_clip_val, "error_if_nonfinite": False}
            self.fabric.clip_gradients(self.network, self.optimizer, **norm)
        self.optimizer.step()
        self.global_step += 1
        self._batches_in_window = 0
        self._learning_rate = self.optimizer.param_groups[0]["lr"]

    def _step_schedulers(self, interval: str) -> None:
        """Step the schedulers of an interval: "step", "epoch", or "plateau" after the validation."""
        count = self.batches_done if interval == "step" else self.current_epoch + 1
        for config in self.schedulers:
            if config["interval"] != interval or count % config["frequency"]:
                continue
            if interval != "plateau":
                config["scheduler"].step()
            elif config["monitor"] in self.callback_metrics:
                config["scheduler"].step(self.callback_metrics[config["monitor"]])
            else:
                known = ", ".join(self.callback_metrics)
                raise ValueError(f"scheduler: got monitor={config['monitor']!r}, expected {known}.")

    # Validation

    def validate(
        self,
        model: Any,
        dataloaders: Any,
        load: str | Path | None = None,
        validation_step: Callable | None = None,
    ) -> list[dict[str, float]]:
        """Validate a model. Return the measured values as a list of one dict, as Trainer does."""
        self._reset()
        self._set_up_model(model, None, validation_step)
        if dataloaders is None or "validation_step" not in self._steps:
            raise TypeError("validate: got no batches or no validation_step, expected both.")
        path = self._find(load, "load")
        self._set_up_loaders(None, dataloaders)
        with self._attached():
            self._wrap()
            self._restore(path, is_resumed=False)
            self._validate()
        return [{name: value.item() for name, value in self._validated.items()}]

    def _validate(self) -> None:
        """Run the validation in eval mode without gradients, and keep its metrics for the row."""
        if self.val_loader is None:
            return
        of_training, self._row_values = self._row_values, {}
        modes = [(module, module.training) for module in self.network.modules()]
        self.network.eval()
        try:
            with torch.no_grad():
                self._call("on_validation_epoch_start")
                for batch_idx, batch in enumerate(self.val_loader):
                    self._batch = batch = self.fabric.to_device(batch)
                    self._add_returned(self._run_step("validation_step", batch, batch_idx), "val")
                self._batch = None
                self.callback_metrics.update(self._compute_row_values())
                self._call("on_validation_epoch_end")
                self._validated = self._compute_row_values()
        finally:
            for module, is_training in modes:
                module.training = is_training
        for value in self._row_values.values():
            value.reset()
        self._row_values = of_training
        self.callback_metrics.update(self._validated)

    # Logging

    def log(self, name: str, value: Any, on_step: Any = None, on_epoch: Any = None, **options: Any):
        """Log a number, a tensor of one element or a torchmetrics object, as ``self.log`` does.

        A value of a step goes into steps.csv, its mean over the row into metrics.csv. The options
        sync_dist and batch_size have Lightning's meaning, others do nothing.
        """
        if options.get("reduce_fx", "mean") != "mean":
            raise TypeError(f"log({name!r}): got a reduce_fx, expected the mean. Use FabricLoop.")
        if hasattr(value, "compute"):
            self._row_values[name] = value
            return
        value = torch.as_tensor(value, device=self.fabric.device).detach().squeeze()
        if self._is_training_batch and on_step is not False:
            self._step_values[name] = self.callback_metrics[name] = value.clone()
        if on_epoch or (on_epoch is None and not self._is_training_batch):
            if not getattr(self._row_values.get(name), "is_logged", False):
                self._row_values[name] = Mean(self.fabric, options.get("sync_dist", False))
            batch_size = options.get("batch_size") or find_batch_size(self._batch)
            self._row_values[name].add(value, batch_size)

    def log_dict(self, metrics: Mapping[str, Any], **options: Any) -> None:
        """Log several values."""
        for name, value in metrics.items():
            self.log(name, value, **options)

    def _add_returned(self, output: Any, prefix: str) -> None:
        """Add what a step returned to the row: a loss, a pair (loss, acc) or a dict."""
        if isinstance(output, tuple) and len(output) == 2:
            output = {"loss": output[0], "acc": output[1]}
        for key, value in (output if isinstance(output, Mapping) else {"loss": output}).items():
            name = key if key.startswith(f"{prefix}_") else f"{prefix}_{key}"
            is_number = isinstance(value, Tensor | int | float) and math.prod(np.shape(value)) == 1
            if not is_number or (self._logs_itself and key != "loss"):
                continue
            if name not in self._row_values:
                self._row_values[name] = Mean(self.fabric, is_synced=True, is_logged=False)
            mean = self._row_values[name]
            if isinstance(mean, Mean) and not mean.is_logged:
                value = torch.as_tensor(value, device=self.fabric.device).detach().squeeze()
                mean.add(value, find_batch_size(self._batch))

    def _compute_row_values(self) -> dict[str, Tensor]:
        return {name: value.compute() for name, value in self._row_values.items()}

    def _log_step(self, loss: Tensor, batch_idx: int) -> None:
        """Write a row of steps.csv. Only here a value of a step is read from the device."""
        row = {"step": self.global_step, "epoch": self.current_epoch, "train_loss": loss.item()}
        row["lr"] = self._learning_rate
        row |= {name: value.item() for name, value in self._step_values.items()}
        warn_of_nan(row["train_loss"], f"epoch {self.current_epoch}, batch {batch_idx}")
        if self.fabric.is_global_zero:
            append_row(self.log_dir / "steps.csv", row)

    def _end_row(self, epoch: int) -> None:
        """Write a row of metrics.csv, save the checkpoints, and start the means of the next row."""
        values = {**self._validated, **self._compute_row_values()}
        row: dict[str, Any] = {"epoch": epoch, "step": self.global_step}
        for name in sorted(values, key=lambda name: not name.startswith("train")):
            row[name] = values[name].item()
        row |= {"lr": self._learning_rate, "time": time.monotonic() - self._row_started}
        warn_of_nan(row.get("train_loss", 0.0), f"epoch {epoch}")
        for value in self._row_values.values():
            value.reset()
        self._row_values, self._step_values, self._validated = {}, {}, {}
        self.history.append(row)
        if self.fabric.is_global_zero:
            write_rows(self.log_dir / "metrics.csv", self.history)
            cells = [f"{n} {v:.4f}" if isinstance(v, float) else f"{n} {v}" for n, v in row.items()]
            print("  ".join(cells), flush=True)
        self._save(row)
        self._row_started = time.monotonic()

    # Checkpoints

    def _build_checkpoint(self) -> dict[str, Any]:
        """Return the state in Lightning's layout. What only we keep has a key of its own."""
        progress = {"epochs_done": self.current_epoch, "global_step": self.global_step}
        progress |= {"batches_done": self.batches_done, "is_in_epoch": self.batches_done > 0}
        of_rank = {"rng": self._rng_state(), "epoch_start": self._epoch_start}
        ranks = [of_rank] * self.fabric.world_size
        if self.fabric.world_size > 1:
            torch.distributed.all_gather_object(ranks, of_rank)
        checkpoint = {
            "epoch": self.current_epoch - (0 if self.batches_done else 1),
            "global_step": self.global_step,
            "pytorch-lightning_version": lightning_version,
            "state_dict": self.network.state_dict(),
            "optimizer_states": [self.optimizer.state_dict()],
            "lr_schedulers": [config["scheduler"].state_dict() for config in self.schedulers],
            "hyper_parameters": self._hyper_parameters,
            "precision": self.fabric.strategy.precision.state_dict(),
            "fabric_template": {
                "progress": progress,
                "history": {"rows": self.history},
                "checkpoints": {"score": self.best_score},
                "ranks": ranks,
            },
        }
        self._call("on_save_checkpoint", checkpoint)
        return checkpoint

    def _restore(self, path: Path | None, is_resumed: bool) -> None:
        """Load the weights of a checkpoint. If the run is resumed, load everything else, too."""
        if path is None:
            return
        checkpoint = read_checkpoint(path)
        self._call("on_load_checkpoint", checkpoint)
        self.network.load_state_dict(checkpoint["state_dict"])
        if not is_resumed:
            return
        own = checkpoint.get("fabric_template", {"progress": {"is_in_epoch": True}, "ranks": [{}]})
        progress, of_rank = own["progress"], own["ranks"][self.fabric.global_rank]
        if progress["is_in_epoch"] and "epoch_start" not in of_rank:
            raise ValueError(f"resume: got {path} of another loop. Use FabricLoop, or load=.")
        self.optimizer.load_state_dict(checkpoint["optimizer_states"][0])
        for config, state in zip(self.schedulers, checkpoint["lr_schedulers"], strict=True):
            config["scheduler"].load_state_dict(state)
        self.fabric.strategy.precision.load_state_dict(checkpoint.get("precision", {}))
        self.current_epoch, self.global_step = progress["epochs_done"], progress["global_step"]
        self.batches_done = progress["batches_done"] if progress["is_in_epoch"] else 0
        self.history, self.best_score = list(own["history"]["rows"]), own["checkpoints"]["score"]
        self._epoch_start = of_rank.get("epoch_start")
        self._set_rng_state(of_rank["rng"])
        if self.fabric.is_global_zero:
            write_rows(self.log_dir / "metrics.csv", self.history)
            steps = read_rows(self.log_dir / "steps.csv")
            steps = [row for row in steps if int(row["step"]) <= self.global_step]
            write_rows(self.log_dir / "steps.csv", steps)

    def _save(self, row: dict[str, Any]) -> None:
        """Save last.ckpt, and best.ckpt if the monitored value is the best one so far."""
        value, best = row.get(self.monitor or "", math.nan), self.best_score
        is_better = best is None or (value < best if self.mode == "min" else value > best)
        is_best = is_better and not math.isnan(value)
        if is_best:
            self.best_score = value
        checkpoint = self._build_checkpoint()
        if self.fabric.is_global_zero:
            for name in ("last.ckpt", "best.ckpt") if is_best else ("last.ckpt",):
                with replaced(self.checkpoint_dir / name) as file:
                    torch.save(checkpoint, file)
        if self.monitor is not None and self.monitor not in self.callback_metrics:
            known = ", ".join(self.callback_metrics)
            raise ValueError(f"monitor: got {self.monitor!r}, expected one of {known}.")

    def _find(self, given: str | Path | None, argument: str) -> Path | None:
        """Return the file that "last", "best", "auto" or a path means."""
        if given is None:
            return None
        if given not in ("last", "best", "auto"):
            if not Path(given).is_file():
                raise FileNotFoundError(f"{argument}: got {str(given)!r}, expected a checkpoint.")
            return Path(given)
        name = "best.ckpt" if given == "best" else "last.ckpt"
        folders = Path(self.default_root_dir, "checkpoints", self.name).absolute()
        version = "*" if self.version is None else version_name(self.version)
        found = sorted(
            folders.glob(f"{version}/{name}"), key=lambda path: version_number(path.parent)
        )
        if not found and given != "auto":
            raise FileNotFoundError(f"{argument}: got {given!r}, but {folders} has no {name}.")
        return found[-1] if found else None

    # Set-up

    @property
    def num_training_batches(self) -> float:
        """The batches of an epoch; infinite if they are not known."""
        return find_length(self.train_loader)

    @property
    def estimated_stepping_batches(self) -> float:
        """The optimizer steps of the whole training."""
        steps = math.ceil(self.num_training_batches / self.accumulate_grad_batches)
        in_all = math.inf if self.max_epochs == -1 else steps * self.max_epochs
        return in_all if self.max_steps == -1 else min(in_all, self.max_steps)

    def _set_up_model(self, model: Any, training_step: Any, validation_step: Any) -> None:
        """Find the steps, the hooks and the network of a model. Refuse what is not supported."""
        found = sorted(name for name in UNSUPPORTED if find_method(model, name) is not None)
        if not getattr(model, "automatic_optimization", True):
            found.append("manual optimization")
        if found:
            kind = type(model).__name__
            raise TypeError(f"model: got {kind} with {', '.join(found)}. Use FabricLoop.")
        self.model, self.network = model, find_network(model)
        self._hyper_parameters = to_plain(dict(getattr(model, "hparams", None) or {}))
        # A LightningModule logs what it measures. Of what its steps return only the loss counts.
        self._logs_itself = hasattr(type(model), "log")
        self._hooks = {name: m for name in HOOKS if (m := find_method(model, name)) is not None}
        self._steps = {}
        for name, function in (
            ("training_step", training_step),
            ("validation_step", validation_step),
        ):
            step = find_method(model, name) if function is None else partial(function, model)
            if step is not None:
                self._steps[name] = with_batch_idx(step, name)

    def _set_up_loaders(self, train: Any, val: Any) -> None:
        """Check the loaders, join the other processes, and share the samples among them."""
        for argument, loader in (("train_dataloaders", train), ("val_dataloaders", val)):
            check_loader(loader, argument)
        is_launched = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.fabric.world_size > 1 and not is_launched:
            self.fabric.launch()
            # As Trainer: without it the processes would draw on from the random state of their set-up.
            reset_seed()
        self.train_loader, self.val_loader = self._share(train), self._share(val)

    def _share(self, loader: Any) -> Any:
        """Return a loader of this process's share of the samples."""
        if hasattr(loader, "for_rank"):
            return loader.for_rank(self.fabric.global_rank, self.fabric.world_size)
        is_map_style = isinstance(loader, DataLoader) and not isinstance(
            loader.dataset, IterableDataset
        )
        if self.fabric.world_size == 1 or not is_map_style:
            return loader
        if isinstance(loader.sampler, DistributedSampler):
            return loader
        is_shuffled = not isinstance(loader.sampler, torch.utils.data.SequentialSampler)
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        sampler = DistributedSampler(loader.dataset, shuffle=is_shuffled, seed=seed)
        names = ("batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "generator")
        options = {name: getattr(loader, name) for name in (*names, "worker_init_fn")}
        return DataLoader(loader.dataset, sampler=sampler, **options)

    def _set_up_optimizer(self, optimizer: Any, scheduler: Any) -> None:
        """Make the optimizer and the schedulers, and bring the network to its device."""
        configure = find_method(self.model, "configure_optimizers")
        if optimizer is None and configure is None:
            raise TypeError(
                "fit: got no optimizer. Pass optimizer=, such as torch.optim.Adam(...)."
            )
        self.optimizer, self.schedulers = parse_optimizers(optimizer or configure())
        if scheduler is not None:
            self.schedulers = [parse_scheduler(scheduler)]
        own = {id(parameter) for parameter in self.network.parameters()}
        groups = self.optimizer.param_groups
        if not any(id(parameter) in own for group in groups for parameter in group["params"]):
            raise ValueError("optimizer: got parameters of another model. Pass model.parameters().")
        self._wrap()
        self.network.zero_grad()

    def _wrap(self) -> None:
        """Bring the network to its device, its precision and DDP, with the whole steps inside."""
        module = StepModule(self.network, self._steps)
        is_single = isinstance(self.fabric.strategy, SingleDeviceStrategy)
        if is_single and type(self.fabric.strategy.precision) is Precision:
            # In 32 bits on one device a step needs nothing around it.
            self.network.to(self.fabric.device)
            self._run_step, self._backward = module.forward, Tensor.backward
            self._no_backward_sync = nullcontext
            return
        wrapped = self.fabric.setup(module, *[self.optimizer] if self.optimizer else [])
        if self.optimizer is not None:
            wrapped, self.optimizer = wrapped
        self._run_step, self._backward = wrapped, self.fabric.backward
        self._no_backward_sync = partial(self.fabric.no_backward_sync, wrapped)

    def _open_folders(self, resume_path: Path | None) -> None:
        """Choose the version of the run and make its folders. A new run starts without rows."""
        root = Path(self.default_root_dir).expanduser().absolute()
        logs, checkpoints = (root / kind / self.name for kind in ("logs", "checkpoints"))
        version = None if self.version is None else version_name(self.version)
        if version is None and resume_path and resume_path.absolute().parents[1] == checkpoints:
            version = resume_path.absolute().parent.name
        if version is None:
            taken = [*logs.glob("version_*"), *checkpoints.glob("version_*")]
            version = version_name(max(map(version_number, taken), default=-1) + 1)
        version = self.fabric.broadcast(version)
        self.log_dir, self.checkpoint_dir = logs / version, checkpoints / version
        if self.fabric.is_global_zero:
            for folder in (self.log_dir, self.checkpoint_dir):
                folder.mkdir(parents=True, exist_ok=True)
            for name in ("metrics.csv", "steps.csv") if resume_path is None else ():
                (self.log_dir / name).unlink(missing_ok=True)
            options = {field.name: getattr(self, field.name) for field in fields(self)}
            hparams = {"hparams": self._hyper_parameters, "config": to_plain(options)}
            (self.log_dir / "hparams.yaml").write_text(yaml.safe_dump(hparams))

    @contextmanager
    def _recorded_state(self) -> Iterator[None]:
        """Record how the run ends, for the list of runs. Ctrl-C ends it without an error."""
        state = "failed"
        with open(
            self.log_dir / ".lock" if self.fabric.is_global_zero else os.devnull, "w"
        ) as lock:
            with suppress(ImportError, OSError):  # Windows and some network drives cannot lock.
                import fcntl

                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            print(os.getpid(), file=lock, flush=True)
            try:
                yield
                state = "finished"
            except KeyboardInterrupt:
                state = "interrupted"
                print(f"Ctrl-C in epoch {self.current_epoch}. To continue: resume='last'.")
            finally:
                print(state, file=lock)

    @contextmanager
    def _attached(self) -> Iterator[None]:
        """Give the model its ``trainer``, ``log`` and ``log_dict``."""
        if isinstance(getattr(type(self.model), "trainer", None), property):
            self.model.trainer = self
        names = [name for name in ("log", "log_dict") if find_method(self.model, name) is None]
        for name in names:
            setattr(self.model, name, getattr(self, name))
        try:
            with torch.enable_grad():
                yield
        finally:
            for name in names:
                delattr(self.model, name)

    def _call(self, hook: str, *args: Any) -> None:
        if hook in self._hooks:
            self._hooks[hook](*args)

    # Batches and random numbers

    def _train_batches(self) -> Iterator[tuple[Any, bool]]:
        """Yield the batches of the epoch that are not done, and whether each is the last one."""
        sampler = getattr(self.train_loader, "sampler", self.train_loader)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.current_epoch)
        if self.batches_done == 0:
            self._epoch_start = self._rng_state()
        # After a resume the epoch starts again with its random numbers, and what is done is dropped.
        rng_state = self._rng_state()
        self._set_rng_state(self._epoch_start)
        batches = mark_last(self.train_loader)
        for _ in islice(batches, self.batches_done):
            pass
        if self.batches_done:
            self._set_rng_state(rng_state)
        for batch, is_last in show_progress(batches, f"epoch {self.current_epoch}"):
            yield self.fabric.to_device(batch), is_last

    def _rng_state(self) -> dict[str, Any]:
        name, keys, *position = np.random.get_state(legacy=True)
        state = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *position],
            "generators": [generator.get_state() for generator in self._generators()],
        }
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def _set_rng_state(self, state: Any) -> None:
        torch.set_rng_state(state["torch"])
        version, python_state, gauss = state["python"]
        random.setstate((version, tuple(python_state), gauss))
        name, keys, *position = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *position))
        for generator, saved in zip(self._generators(), state.get("generators", []), strict=False):
            generator.set_state(saved)
        if "cuda" in state and torch.cuda.is_initialized():
            torch.cuda.set_rng_state_all(state["cuda"])

    def _generators(self) -> list[torch.Generator]:
        found = [
            getattr(loader, "generator", None) for loader in (self.train_loader, self.val_loader)
        ]
        return [generator for generator in found if generator is not None]


class StepModule(nn.Module):
    """Runs a step as its forward, so that precision and DDP apply to everything in the step."""

    def __init__(self, network: nn.Module, steps: dict[str, Callable]) -> None:
        super().__init__()
        self.network, self.steps = network, steps

    def forward(self, name: str, batch: Any, batch_idx: int) -> Any:
        return self.steps[name](batch, batch_idx)


class Mean:
    """A mean weighted by batch size. Its sum stays on the device of the values."""

    def __init__(self, fabric: Fabric, is_synced: bool, is_logged: bool = True) -> None:
        self.fabric, self.is_synced, self.is_logged = fabric, is_synced, is_logged
        self.reset()

    def reset(self) -> None:
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        zero = torch.zeros((), dtype=dtype, device=self.fabric.device)
        self.total, self.weight = zero, 0

    def add(self, value: Tensor, batch_size: int) -> None:
        self.total = self.total + value * batch_size
        self.weight += batch_size

    def compute(self) -> Tensor:
        """Return the mean, over all processes if it is synced."""
        pair = torch.stack([self.total, torch.tensor(self.weight).to(self.total)])
        if self.is_synced and self.fabric.world_size > 1:
            pair = self.fabric.all_reduce(pair, reduce_op="mean")
        return pair[0] / pair[1]


def find_method(model: Any, name: str) -> Callable | None:
    """Return a method of a model; None for the empty ones that a LightningModule inherits."""
    method = getattr(model, name, None)
    module = getattr(method, "__module__", None) or ""
    is_empty = module.startswith(("lightning.pytorch.core.", "pytorch_lightning.core."))
    return method if callable(method) and not is_empty else None


def find_network(model: Any) -> nn.Module:
    """Return the module that holds the parameters: the model, or all modules in its attributes."""
    if isinstance(model, nn.Module):
        return model
    attributes = getattr(model, "__dict__", {})
    network = nn.Module()
    for name, value in attributes.items():
        if isinstance(value, nn.Module):
            network.add_module(name, value)
    if not list(network.parameters()):
        kind = type(model).__name__
        raise TypeError(f"model: got a {kind}, expected an nn.Module or an object that has one.")
    return network


def with_batch_idx(step: Callable, name: str) -> Callable:
    """Return a step that takes (batch, batch_idx), also if the given one takes the batch only.

    An argument with a default gets no index, unless it is called batch_idx.
    """
    signature = inspect.signature(step)
    positional = [p for p in signature.parameters.values() if p.kind < p.KEYWORD_ONLY]
    required = [p.name for p in positional if p.default is p.empty]
    if len(required) == 2 or "batch_idx" in signature.parameters:
        return step
    if len(required) == 1:
        return lambda batch, batch_idx: step(batch)
    raise TypeError(
        f"{name}: got the arguments {signature}, expected (batch) or (batch, batch_idx)."
    )


def find_loss(output: Any, batch_idx: int) -> Tensor:
    """Return the loss in what training_step returned."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss
    kind = "a detached loss" if isinstance(loss, Tensor) else type(loss).__name__
    raise TypeError(
        f"training_step: got {kind} at batch {batch_idx}, expected the loss, a tensor that is"
        " computed from the model's parameters. Return it without detach() and item()."
    )


def find_batch_size(batch: Any) -> int:
    """Return the length of the first tensor in a batch, 1 if there is none."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch
    for part in parts if isinstance(batch, Mapping | list | tuple) else ():
        if isinstance(part, Tensor | Mapping | list | tuple):
            return find_batch_size(part)
    return 1


def check_loader(loader: Any, argument: str) -> None:
    """Refuse what does not give batches."""
    kind = type(loader).__name__
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        text = f"{argument}: got a {kind}, which gives single samples, expected batches."
        raise TypeError(f"{text} Write DataLoader(dataset, batch_size=32).")
    is_several = isinstance(loader, list | tuple) and any(isinstance(x, DataLoader) for x in loader)
    is_batches = hasattr(loader, "__iter__") and not isinstance(loader, str | Tensor | dict)
    if loader is not None and (is_several or not is_batches):
        raise TypeError(f"{argument}: got a {kind}, expected one iterable of batches.")
    if find_length(loader) == 0:
        raise ValueError(f"{argument}: got an empty {kind}, expected at least one batch.")


def find_length(loader: Any) -> float:
    """Return the number of batches; infinite if it is not known."""
    try:
        return len(loader)
    except TypeError:
        return math.inf


def mark_last(loader: Any) -> Iterator[tuple[Any, bool]]:
    """Yield each batch and whether it is the last one. Without a length, read one batch ahead."""
    length, count, end = find_length(loader), 0, object()
    batches = iter(loader)
    batch = next(batches, end)
    while batch is not end and count < length:
        count += 1
        if length == math.inf:
            following = next(batches, end)
            yield batch, following is end
        else:
            yield batch, count == length
            following = next(batches, end) if count < length else end
        batch = following
    if count == 0 or count < length != math.inf:
        raise ValueError(f"train_dataloaders: got {count} batches, expected {length}, its length.")


def show_progress(batches: Iterator, description: str) -> Any:
    """Return the batches with a bar in a terminal, if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return batches
    return tqdm(batches, desc=description, leave=False, disable=None)


def parse_optimizers(returned: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Return the optimizer and the schedulers in what configure_optimizers returned."""
    optimizer, schedulers, monitor = returned, [], None
    if isinstance(returned, Mapping):
        optimizer, monitor = returned.get("optimizer"), returned.get("monitor")
        schedulers = [returned["lr_scheduler"]] if returned.get("lr_scheduler") else []
    elif isinstance(returned, tuple) and len(returned) == 2:
        optimizer, schedulers = returned
    if isinstance(optimizer, list | tuple) and len(optimizer) == 1:
        optimizer = optimizer[0]
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            f"optimizer: got {type(returned).__name__}, expected an optimizer, [optimizer],"
            ' ([optimizer], [scheduler]) or {"optimizer": ..., "lr_scheduler": ...}. LBFGS and'
            " several optimizers need FabricLoop."
        )
    schedulers = schedulers if isinstance(schedulers, list | tuple) else [schedulers]
    return optimizer, [parse_scheduler(scheduler, monitor) for scheduler in schedulers]


def parse_scheduler(given: Any, monitor: str | None = None) -> dict[str, Any]:
    """Return a scheduler, or its dict, with every default."""
    config = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    if not hasattr(config.get("scheduler"), "step"):
        raise TypeError(f"scheduler: got {given!r}, expected a scheduler or a dict that has one.")
    config = {"interval": "epoch", "frequency": 1, "monitor": monitor or "val_loss", **config}
    if isinstance(config["scheduler"], ReduceLROnPlateau):
        config["interval"] = "plateau"
    return config


def warn_of_nan(loss: float, place: str) -> None:
    if not math.isfinite(loss):
        text = f"train_loss: got {loss} in {place}, expected a finite number."
        warnings.warn(f"{text} Try a smaller learning rate or gradient_clip_val=1.0.", stacklevel=3)


def version_name(version: int | str) -> str:
    return f"version_{version}" if isinstance(version, int) else version


def version_number(folder: Path) -> int:
    digits = folder.name.removeprefix("version_")
    return int(digits) if digits.isdigit() else -1


@contextmanager
def replaced(path: Path, mode: str = "wb") -> Iterator[Any]:
    """Open a file beside its target, and rename it at the end, so that it is never half written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open(mode) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint. Refuse a damaged file, which torch.load would read as other weights."""
    if not zipfile.is_zipfile(path) or zipfile.ZipFile(path).testzip() is not None:
        raise ValueError(f"{path}: the file is damaged. Use another checkpoint.")
    return torch.load(path, map_location="cpu", weights_only=True)


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a row to a CSV file. A new column rewrites the file."""
    path.touch()
    with path.open("r+") as file:
        columns = next(csv.reader(file), [])
        if set(row) <= set(columns):
            file.seek(0, os.SEEK_END)
            csv.DictWriter(file, columns, lineterminator="\n").writerow(row)
            return
    write_rows(path, [*read_rows(path), row])


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV file, without a last line that was not finished."""
    text = path.read_text() if path.exists() else ""
    return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a CSV file. Missing cells are empty."""
    with replaced(path, "w") as file:
        columns = dict.fromkeys(name for row in rows for name in row)
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def to_plain(value: Any) -> Any:
    """Return a value as YAML and checkpoints of plain values can hold it."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return value if is_plain else str(value)
