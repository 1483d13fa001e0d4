# SPDX-License-Identifier: MIT
# Copyright (c) 2026 the fabric_template authors. The licence's text goes with each copy: LICENSE, or the end of this file.
"""MiniLoop: the training loop in one file, to read, to copy and to change. Trainer's numbers, bit for bit.

It needs torch, NumPy and Lightning Fabric, and runs under any name, in a notebook cell, too. Read `_fit`, `_train_epoch` and
`_update`. What becomes of gradients is in `_before_step`, a row of metrics.csv in `_end_epoch`, a checkpoint in `_state`. Its
runs go on in fabric_template's FabricLoop, and back; what it refuses, that one takes. Version 0.1.0; what a newer version has
changed: fabric-template diff THIS_FILE
"""

from __future__ import annotations

import csv
import inspect
import io
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import yaml
from lightning.fabric import Fabric
from lightning.fabric import __version__ as lightning_version
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.fabric.utilities.seed import reset_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader

PLAIN = bool | int | float | str | Tensor | None  # what a checkpoint holds of hyperparameters
YAML_TYPES = (bool, int, float, str, type(None))
LEFT_OUT = {"configure_callbacks", "optimizer_zero_grad", "backward", "configure_gradient_clipping", "transfer_batch_to_device",
            "on_before_batch_transfer", "on_after_batch_transfer", "on_validation_model_train",
            "on_validation_model_zero_grad"}  # fmt: skip


@dataclass(kw_only=True, eq=False)
class MiniLoop:
    """Trains any module or object that has ``training_step(batch)`` or ``training_step(batch, batch_idx)``.

    Its runs lie in logs/<name>/version_<n> and checkpoints/<name>/version_<n>, the next free version unless one is given.
    best.ckpt is of the epoch with the best ``monitor``, the least for ``mode`` "min". The norm of all gradients together is at
    most ``gradient_clip_val``. What follows ``accelerator`` is Fabric's; or give a ready ``fabric``.

    Example:
        >>> net, batches = nn.Linear(2, 1), [torch.ones(4, 2)] * 2
        >>> optimizer, loop = torch.optim.SGD(net.parameters(), lr=0.1), MiniLoop(max_epochs=1, accelerator="cpu")
        >>> rows = loop.fit(net, batches, optimizer=optimizer, training_step=lambda net, x: net(x).square().mean())
        epoch 1/1: train_loss ...
    """

    max_epochs: int = 1000
    name: str = "run"
    version: int | str | None = None
    monitor: str | None = None
    mode: str = "min"
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    seed: int | None = None
    default_root_dir: Any = None
    accelerator: Any = "auto"
    strategy: Any = "auto"
    devices: Any = "auto"
    precision: Any = None
    fabric: Any = None

    def __post_init__(self) -> None:
        is_name = self.name == Path(self.name or ".").name
        if self.mode not in ("min", "max") or self.accumulate_grad_batches < 1 or not is_name:
            raise ValueError(f"{self!r}: expected mode 'min' or 'max', accumulate_grad_batches >= 1, a folder as name")
        self.max_epochs = 1000 if self.max_epochs is None else self.max_epochs
        self._most_epochs = math.inf if self.max_epochs == -1 else self.max_epochs
        self._given = self.version if isinstance(self.version, str | None) else f"version_{self.version}"
        fabrics = {"accelerator": self.accelerator, "strategy": self.strategy, "devices": self.devices}
        self.fabric = self.fabric or Fabric(**fabrics, precision=self.precision)
        self.strategy, self.default_root_dir = self.fabric.strategy, os.fspath(self.default_root_dir or os.getcwd())
        if not isinstance(self.strategy, SingleDeviceStrategy | DDPStrategy):
            raise ValueError(f"MiniLoop got {type(self.strategy).__name__}: expected one device, or strategy='ddp'")
        if self.seed is not None:  # for a model that is made after the loop; fit seeds once more
            Fabric.seed_everything(self.seed, workers=True, verbose=False)
        self._init_state()

    def _init_state(self) -> None:
        """Where every run begins; the words that modules read of Trainer are among these."""
        nothing: Any = None
        self.train_dataloader = self.val_dataloaders = self.logger = self._folder = self._scaler = nothing
        self._batch = self._batch_size = nothing  # the one at hand
        self.current_epoch = self.global_step = self.batch_idx = self._num_rows = 0
        self.validating = self.sanity_checking = self.testing = self.predicting = self.interrupted = False
        self.should_stop = self.is_last_batch = self._in_batch = False
        self.training, self.max_steps, self.gradient_clip_algorithm, self.callbacks = True, -1, "norm", ()
        self.val_check_interval, self.check_val_every_n_epoch, self.limit_train_batches = 1.0, 1, 1.0
        self.optimizers, self.lr_scheduler_configs, self._rates = list[Any](), list[Any](), list[float]()
        self.history, self.best, self._metrics = list[dict[str, Any]](), dict[str, float](), dict[str, Any]()
        self._logged: dict[str, dict[str, Logged]] = {"train": {}, "val": {}}

    def fit(
        self, model: Any, train: Any = None, val: Any = None, resume: str | Path | None = None,
        load: str | Path | None = None, optimizer: Any = None, training_step: Callable | None = None,
        validation_step: Callable | None = None,
    ) -> Any:  # fmt: skip
        """Train; returns the history: one row per epoch in a pandas DataFrame, without pandas a list of dicts.

        Ctrl-C ends it behind the step at hand; resume="last" goes on from the last whole epoch.

        Args:
            model: a LightningModule, an nn.Module or object with step methods, or an nn.Module with step functions.
            train: an iterable of batches, or a datamodule for both; None: the module's own.
            val: an iterable of batches.
            resume: a checkpoint to go on from, exactly: a path, "last", "best", or "auto" (the last one, if there is any).
            load: a checkpoint to take the weights from, where no run goes on.
            optimizer: whatever configure_optimizers may return, for modules that have none.
            training_step: ``fn(model, batch)`` or ``fn(model, batch, batch_idx)``, returns the loss.
            validation_step: the same; returns a loss, a pair (loss, acc) or a dict.
        """
        given = {"configure_optimizers": optimizer, "train_dataloader": train, "val_dataloader": val}
        self._begin(model, {**given, "training_step": training_step, "validation_step": validation_step})
        for need in ("training_step", "configure_optimizers", "train_dataloader"):
            if need not in self._hooks:
                raise TypeError(f"fit got no {need}: expected one of {type(model).__name__}, or as an argument of fit")
        self._launch(self._fit, self._find(resume, "resume"), self._find(load, "load"))
        with suppress(ImportError):
            import pandas

            return pandas.DataFrame(self.history)
        return self.history

    def validate(self, model: Any, val: Any = None, load: Any = None, validation_step: Any = None) -> list[dict]:
        """Run validation_step over the batches; returns what was measured, in a list of one dict as Trainer does."""
        self._begin(model, {"val_dataloader": val, "validation_step": validation_step})
        if not self._validates:
            raise TypeError(f"validate got no batches, or {type(model).__name__} has no validation_step: give both")
        return self._launch(self._validate, self._find(load, "load"))

    # ---- the page to read

    def _fit(self, resume: Path | None, load: Path | None) -> None:
        checkpoint = self._read(resume, goes_on=True)
        self._set_up("fit", checkpoint or self._read(load))
        self._set_up_training()
        self._call("on_fit_start")
        if checkpoint:
            self._load_training(checkpoint)
        elif self._validates:  # a few batches, to see that it runs; no trace of them is left
            states, self.sanity_checking = random_states(), True
            self._evaluate(most=2)
            set_random_states(states)
            self.sanity_checking, self._metrics = False, {}
        self._open_files()
        if self.current_epoch < self._most_epochs and not self.should_stop:
            batches = None if checkpoint else self._begin_pass(is_first=True)  # here already, as Trainer's
            self._call("on_train_start")
            if checkpoint:
                self._load_random_numbers(checkpoint)
            with self._heeding_interrupts(), self._locked():
                while self.current_epoch < self._most_epochs and not (self.should_stop or self.interrupted):
                    self._train_epoch(batches)
                    batches = None
            self._call("on_train_end")
        self._call("on_fit_end")
        self._call_both("teardown", "fit")

    def _train_epoch(self, batches: Any) -> None:
        began = time.monotonic()
        self._call("on_train_epoch_start")
        batches, self.batch_idx, self.is_last_batch = batches or self._begin_pass(), -1, False
        for self.batch_idx, (batch, self.is_last_batch) in enumerate(batches):
            self._batch = batch = self._to_device(batch)
            self._batch_size, self._in_batch = None, True
            ends_window = self.is_last_batch or (self.batch_idx + 1) % self.accumulate_grad_batches == 0
            if self._call("on_train_batch_start", batch, self.batch_idx) == -1:
                raise TypeError("on_train_batch_start returned -1, to leave out an epoch's rest: use FabricLoop")
            outputs, _loss = self._update(batch, ends_window)  # which stays until the next one is there: see closure
            if self.is_last_batch:
                self._rates = [group["lr"] for group in self.optimizers[0].param_groups]
            if ends_window and self.lr_scheduler_configs:
                self._step_schedulers("step")
                if self.is_last_batch:
                    self._step_schedulers("epoch")
            self._call("on_train_batch_end", outputs, batch, self.batch_idx)
            if ends_window and self.lr_scheduler_configs:
                self._step_schedulers("step", plateau=True)
            if self.interrupted:
                return
        if not self.is_last_batch:
            length, given = self.num_training_batches, f"{self.batch_idx + 1} batches in epoch {self.current_epoch}"
            words = "one or more" if length in (0, math.inf) else f"{length}, its len()"
            raise ValueError(f"the train loader gave {given}: expected {words}")
        self._merge("train", at_end=False)
        self._in_batch = False
        self._end_epoch(began)

    def _update(self, batch: Any, ends_window: bool) -> tuple[dict[str, Any], Tensor | None]:
        """Model, loss, backward; at the end of a window clip and step. All in a closure, which some optimizers need."""
        optimizer, window, outputs = self.optimizers[0], self.accumulate_grad_batches, dict[str, Any]()
        loss: Tensor | None = None

        def closure() -> Tensor | None:
            nonlocal loss  # its graph keeps what autograd and the optimizer's step would set up anew, as in a loop by hand
            output = self._steps["training_step"](batch, self.batch_idx)
            loss = loss_in(output)
            if self.batch_idx % window == 0:
                self._call("on_before_zero_grad", optimizer)
                optimizer.zero_grad()
            if loss is None:  # nothing is learned from this batch
                return None
            self._log_returned(output, "train")
            loss = loss / window if window > 1 else loss
            outputs.update(output if isinstance(output, dict) else {}, loss=loss.detach())
            self._call("on_before_backward", loss)
            self._backward(loss)
            self._call("on_after_backward")
            if ends_window:
                self._before_step(optimizer)
            return outputs["loss"]

        if not ends_window:
            with self._no_sync():
                closure()
            return outputs, loss
        if "optimizer_step" in self._hooks:
            self._hooks["optimizer_step"](self.current_epoch, self.batch_idx, optimizer, closure)
        elif self._closes:
            optimizer.step(closure=closure)
        elif closure() is not None:  # a scaler's step takes no closure, nor do those of a few optimizers
            self.strategy.optimizer_step(optimizer)
        self.global_step += 1
        return outputs, loss

    def _before_step(self, optimizer: Any) -> None:
        """What is done with the gradients before the optimizer steps: the place for your own."""
        self._call("on_before_optimizer_step", optimizer)
        if self.gradient_clip_val:
            self.fabric.clip_gradients(self._net, optimizer, max_norm=self.gradient_clip_val, error_if_nonfinite=False)

    def _step_schedulers(self, interval: str, plateau: bool = False) -> None:
        number = 1 + (self.batch_idx if interval == "step" else self.current_epoch)
        for config in self.lr_scheduler_configs:
            if (config.interval, config.reduce_on_plateau) != (interval, plateau) or number % config.frequency:
                continue
            if plateau and config.monitor not in self.callback_metrics:
                raise ValueError(f"ReduceLROnPlateau follows {config.monitor!r}: expected one of the logged "
                                 f"{sorted(self.callback_metrics)}")  # fmt: skip
            values = [self.callback_metrics[config.monitor]] if plateau else []
            if "lr_scheduler_step" in self._hooks:
                self._call("lr_scheduler_step", config.scheduler, *(values or [None]))
            else:
                config.scheduler.step(*values)

    def _end_epoch(self, began: float) -> None:
        """Validate; one row of metrics.csv; last.ckpt, and best.ckpt if it is the best."""
        measured = self._evaluate() if self._validates else {}
        self._merge("train")
        self._call("on_train_epoch_end")
        logged, of_train = self._logged["train"], self._merge("train")
        measured |= {n: value for n, value in of_train.items() if n not in measured or logged[n].on_epoch}
        self._step_schedulers("epoch", plateau=True)
        row: dict[str, Any] = {"epoch": self.current_epoch, "step": self.global_step}
        row |= {name: measured[name].item() for name in sorted(measured, key=lambda name: not name.startswith("train"))}
        row |= {n: float(rate) for i, rate in enumerate(self._rates) if (n := f"lr_{i}" if i else "lr") not in row}
        self._forget("train")
        self.current_epoch += 1
        self.history.append(row | {"time": time.monotonic() - began})
        known, sign = {**row, **self._metrics}, 1 if self.mode == "min" else -1
        score: Any = known.get(self.monitor or "")
        is_best = score is not None and bool(sign * score < sign * self.best.get("best.ckpt", sign * math.inf))
        self.best = {"best.ckpt": float(score)} if is_best else self.best
        self._save(is_best)
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in list(row.items())[2:])
        self.fabric.print(f"epoch {self.current_epoch}/{self.max_epochs}: {numbers}")
        if self.monitor is not None and score is None:
            raise ValueError(f"monitor={self.monitor!r} was not logged: expected one of {[*known]}; last.ckpt is saved")

    def _evaluate(self, most: int = sys.maxsize) -> dict[str, Any]:
        """A pass over the validation batches; the module is handed back in the modes in which it came."""
        modes = [(module, module.training) for module in self._net.modules()]
        self.val_dataloaders = self._loader("val") if self.val_dataloaders is None else self.val_dataloaders
        announce_pass(self.val_dataloaders, self.current_epoch, is_first=self.sanity_checking)
        most = min(most, length_of(self.val_dataloaders))
        self.training, self.validating = False, True
        try:
            with torch.no_grad():
                self._hooks.get("on_validation_model_eval", self._net.eval)()
                self._call("on_validation_start")
                self._call("on_validation_epoch_start")
                for batch_idx, batch in enumerate(islice(self.val_dataloaders, most)):
                    self._batch = batch = self._to_device(batch)
                    self._batch_size = None
                    self._call("on_validation_batch_start", batch, batch_idx)
                    output = self._steps["validation_step"](batch, batch_idx)
                    self._log_returned(output, "val")
                    self._call("on_validation_batch_end", output, batch, batch_idx)
                self._merge("val")
                self._call("on_validation_epoch_end")
                found = self._merge("val")
                self._call("on_validation_end")
        finally:
            self.training, self.validating = True, False
            for module, training in modes:
                module.training = training
            self._forget("val")
        return found

    def _validate(self, load: Path | None) -> list[dict]:
        self._set_up("validate", self._read(load))
        found = self._evaluate()
        self._call_both("teardown", "validate")
        return [{name: value.item() for name, value in found.items()}]

    # ---- what is logged

    def log(self, name: str, value: Any, prog_bar: bool = False, logger: bool = True, on_step: bool | None = None,
            on_epoch: bool | None = None, reduce_fx: Any = "mean", batch_size: int | None = None, sync_dist: bool = False,
            **others: Any) -> None:  # fmt: skip
        """The module's ``self.log``, with Trainer's words: a number, a tensor of one element or a torchmetrics object."""
        log, in_step = self._logged["val" if self.validating else "train"], self._in_batch and not self.validating
        if (entry := log.get(name)) is None:
            on_step, on_epoch = in_step if on_step is None else on_step, not in_step if on_epoch is None else on_epoch
            everywhere = self.fabric if sync_dist and self.world_size > 1 else None
            entry = log[name] = Logged(on_step, on_epoch, reduce_fx, everywhere)
        if not isinstance(value, Tensor) and hasattr(value, "compute"):  # keeps its sums itself
            entry.metric, entry.last = value, getattr(value, "_forward_cache", None)
            return
        self._batch_size = self._batch_size or size_of(self._batch) or 1
        value = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=wide())
        value = value if value.dtype in (torch.float32, torch.float64) else value.to(wide())
        entry.last = value = (value.squeeze() if value.dim() else value).clone()
        if entry.on_epoch:
            entry.waiting.append((value, batch_size or self._batch_size))
            if len(entry.waiting) == 32:  # in a row: behind a backward each operation takes three times as long
                entry.sum_up()

    def log_dict(self, dictionary: Mapping[str, Any], **words: Any) -> None:
        """The same for a dict, or for a torchmetrics MetricCollection."""
        for name, value in dictionary.items(**({"copy_state": False} if hasattr(dictionary, "add_metrics") else {})):
            self.log(name, value, **words)

    def _log_returned(self, output: Any, stage: str) -> None:
        """What a step returned and did not log: the history of a module that logs nothing; of one that logs, its loss."""
        logged, loss = self._logged[stage], f"{stage}_loss"
        if loss in logged and not logged[loss].is_returned and (self._parts or isinstance(output, Tensor)):
            return
        own = [name for name, entry in logged.items() if not entry.is_returned]
        output = dict(zip(("loss", "acc"), output, strict=False)) if isinstance(output, tuple) else output
        for name, value in (output if isinstance(output, Mapping) else {"loss": output}).items():
            name = name if name.startswith(f"{stage}_") else f"{stage}_{name}"
            is_left = name not in own and (name == loss or not (self._parts and own))
            if is_left and isinstance(value, Tensor) and value.numel() == 1:
                self.log(name, value, on_step=False, on_epoch=True, sync_dist=True)
                logged[name].is_returned = True

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """The last value of whatever was logged; of the step at hand only where somebody asks."""
        if self._in_batch:
            self._merge("train", at_end=False)
        return self._metrics

    def _merge(self, stage: str, at_end: bool = True) -> dict[str, Any]:
        """Bring the metrics up to date, with the values of the step at hand or of the epoch; returns the row's."""
        row = {}
        for name, entry in self._logged[stage].items():
            row[name] = value = entry.result() if at_end and entry.on_epoch else entry.last
            if entry.on_epoch if at_end else entry.on_step:
                fork = f"{name}_{'epoch' if at_end else 'step'}" if entry.on_step and entry.on_epoch else name
                self._metrics |= {name: value, fork: value}
        return row

    def _forget(self, stage: str) -> None:
        for entry in self._logged[stage].values():
            if entry.metric is not None:
                entry.metric.reset()
        self._logged[stage] = {}

    # ---- before and around a run

    def _begin(self, model: Any, given: dict[str, Any]) -> None:
        """What a run knows before it begins. What is given takes the place of the module's own: optimizer, loaders, steps."""
        self.model = self.lightning_module = model
        self.datamodule: Any = None
        self._net, self._hooks = net_of(model), hooks_of(model)
        for name, part in given.items():
            if hasattr(part, "prepare_data"):
                self.datamodule = part
                own = hooks_of(part).items()
                self._hooks |= {k if k.endswith("_dataloader") else f"datamodule.{k}": hook for k, hook in own}
            elif part is not None:  # as functions that can be sent to a spawned process
                self._hooks[name] = partial(part, model) if name.endswith("_step") else partial(alone, [part])
        left = [f"has {name}" for name in sorted(LEFT_OUT & self._hooks.keys())]
        left += [] if getattr(model, "automatic_optimization", True) else ["optimizes by hand"]
        if left:
            raise TypeError(f"{type(model).__name__} {', '.join(left)}, which MiniLoop leaves to FabricLoop: use that")
        self._validates = "validation_step" in self._hooks and "val_dataloader" in self._hooks
        self._parts = [part for part in self._net.modules() if hasattr(type(part), "automatic_optimization")]
        self._init_state()

    def _set_up(self, stage: str, checkpoint: dict | None) -> None:
        """Data and module are told; weights come, to their device and in their precision; the steps get their one door."""
        if self.local_rank == 0:
            self._call_both("prepare_data")
        self.fabric.barrier()
        self._call_both("setup", stage)
        self._call("configure_model")
        self.strategy.precision.convert_module(self._net)
        if checkpoint is not None:
            self._call("on_load_checkpoint", checkpoint)
            self._net.load_state_dict(checkpoint.get("state_dict", checkpoint))
        self.fabric.to_device(self._net)
        trains = stage == "fit" and any(parameter.requires_grad for parameter in self._net.parameters())
        is_shared = trains and isinstance(self.strategy, DDPStrategy)
        self._wrapped = self.fabric.setup(Door(self._net)) if is_shared else None
        self._no_sync = partial(self.fabric.no_backward_sync, self._wrapped) if is_shared else nullcontext
        self.precision = str(self.strategy.precision.precision)
        self._moves = self.device.type != "cpu" or self.precision in ("bf16-true", "16-true", "64-true")
        self._steps = {name: self._step(name) for name in ("training_step", "validation_step") if name in self._hooks}

    def _set_up_training(self) -> None:
        if sleeping := sum(not module.training for module in self._net.modules()):
            rank_zero_warn(f"{sleeping} modules are in eval mode, and stay so: model.train() before fit changes that")
        self.train_dataloader = self._loader("train")
        self.num_training_batches = length_of(self.train_dataloader)
        most, updates = self._most_epochs, self.num_training_batches / self.accumulate_grad_batches
        self.estimated_stepping_batches = math.inf if math.inf in (most, updates) else math.ceil(updates) * most
        optimizer, self.lr_scheduler_configs = parse_optimizers(self._hooks["configure_optimizers"]())
        self.optimizers, self._scaler = [optimizer], getattr(self.strategy.precision, "scaler", None)
        self._backward = Tensor.backward if self._scaler is None else self.fabric.backward
        self._closes = not self._scaler and {"closure", "kwargs"} & {*inspect.signature(optimizer.step).parameters}
        self._net.zero_grad()

    def _step(self, name: str) -> Callable:
        """A step through one door for precision and DDP: plain Fabric runs it around its own precision."""
        method, wrapped, context = self._hooks[name], self._wrapped, self.strategy.precision.forward_context
        words, is_method = inspect.signature(method).parameters.values(), not isinstance(method, partial)
        given = [w for w in words if is_method or w.default is w.empty or w.name == "batch_idx"]  # not a function's own
        takes = 2 if any(word.kind is word.VAR_POSITIONAL for word in given) else len(given)
        if self.precision.endswith("-mixed"):  # Trainer's own setting: weights used twice are cast twice
            dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16
            context = partial(torch.autocast, self.device.type, dtype=dtype, cache_enabled=False)
        elif self.precision == "32-true" and wrapped is None:
            return method if takes > 1 else lambda batch, batch_idx: method(batch)

        def step(*args: Any) -> Any:
            with context():
                return method(*args[:takes]) if wrapped is None else wrapped(partial(method, *args[:takes]))

        return step

    def _launch(self, function: Callable, *args: Any) -> Any:
        """Run it in the strategy's processes; what they learned is back here afterwards."""
        if self.seed is not None:
            Fabric.seed_everything(self.seed, workers=True, verbose=False)
        job = partial(self._in_process, function, args, os.getpid())
        are_there = os.environ.get("LT_CLI_USED") == "1" or getattr(self.strategy.launcher, "procs", None)
        outcome = job(self.fabric, self._net) if are_there else self.fabric.launch(job, self._net)
        if isinstance(outcome, BaseException):
            raise outcome
        result, news, weights = outcome
        if weights:
            self._net.load_state_dict(torch.load(io.BytesIO(weights)))
        vars(self).update(news)
        return result

    def _in_process(self, function: Callable, args: tuple, caller: int, fabric: Fabric, net: nn.Module) -> Any:
        """What a process does; Fabric gives a spawned one memory of its own for the net."""
        self.fabric, self.strategy, elsewhere = fabric, fabric.strategy, os.getpid() != caller
        if isinstance(self.strategy, DDPStrategy):
            reset_seed()  # as Trainer's DDP
        given, home = self._attach(), next((p.device for p in self._net.parameters() if not p.is_meta), "cpu")
        try:
            result = function(*args)
        except BaseException as error:
            if elsewhere:
                raise
            return error  # Fabric's launch leaves DataLoader patched where one passes through
        finally:
            for part, name in given:
                vars(part).pop(name, None)
        self._net.to(home)
        if not elsewhere:
            return result, {}, b""
        self.fabric.barrier()
        torch.distributed.destroy_process_group()
        torch.save({name: value.cpu() for name, value in net.state_dict().items()}, weights := io.BytesIO())
        names = ("history", "current_epoch", "global_step", "best", "name", "log_dir", "checkpoint_dir")
        return result, {name: vars(self).get(name) for name in names}, weights.getvalue()

    def _attach(self) -> list[tuple[Any, str]]:
        """While it runs the module has its log, and Lightning's parts their other words; the trainer stays."""
        words: dict[str, Any] = {"log": self.log, "log_dict": self.log_dict}
        if self._parts:  # whose own words know Lightning's Trainer only
            words["optimizers"] = lambda use_pl_optimizer=True: self.optimizers[0]
            words["lr_schedulers"] = lambda: alone([config.scheduler for config in self.lr_scheduler_configs]) or None
        for part in (self.model, self.datamodule):
            if hasattr(type(part), "trainer"):
                part.trainer = self
        given = []
        for part in self._parts or [self.model]:
            own = hooks_of(part)
            takes = {name: word for name, word in words.items() if name not in own}
            if self._parts and "log" in own:  # Lightning's log_dict calls it
                takes["log"] = partial(self._own_log, part)
                takes.pop("log_dict", None)
            vars(part).update(takes)
            given += [(part, name) for name in takes]
        return given

    def _own_log(self, part: Any, *args: Any, **words: Any) -> None:
        """A module's own log, which may end in super().log: Lightning's, which knows Trainer only, is ours meanwhile."""
        base: Any = next(base for base in type(part).__mro__ if "automatic_optimization" in vars(base))
        before, base.log = base.log, lambda part, *args, **words: self.log(*args, **words)
        try:
            type(part).log(part, *args, **words)
        finally:
            base.log = before

    def _call(self, name: str, *args: Any) -> Any:
        return self._hooks[name](*args) if name in self._hooks else None

    def _call_both(self, name: str, *args: Any) -> None:
        self._call(f"datamodule.{name}", *args)
        self._call(name, *args)

    def _loader(self, stage: str) -> Any:
        """The loader of a stage; of several processes each gets its share."""
        loader = self._hooks[f"{stage}_dataloader"]()
        if isinstance(loader, DataLoader):
            shared = self.fabric.setup_dataloaders(loader, move_to_device=False)  # seeds its workers, too
            for sampler in samplers_of(shared)[::2]:  # to train, Trainer's shuffle, whatever the loader did
                if hasattr(sampler, "shuffle") and sampler not in samplers_of(loader):
                    sampler.shuffle |= stage == "train"
            return shared if self.world_size > 1 else loader
        several = isinstance(loader, list | tuple) and any(isinstance(part, DataLoader) for part in loader)
        if self.world_size > 1 or several or isinstance(loader, Mapping | Tensor) or not hasattr(loader, "__iter__"):
            raise TypeError(f"MiniLoop got a {type(loader).__name__} as its {stage} loader: expected one iterable of batches,"
                            " in several processes a torch DataLoader; FabricLoop takes others")  # fmt: skip
        return loader

    def _begin_pass(self, is_first: bool = False) -> Iterator[tuple[Any, bool]]:
        """Begin a pass now; its batches come one by one, each with whether it is the last."""
        announce_pass(self.train_dataloader, self.current_epoch, is_first)
        batches, length = iter(self.train_dataloader), self.num_training_batches
        batches = map(next, repeat(batches)) if batches is self.train_dataloader else batches  # iter() begins anew
        if length != math.inf:  # nothing is fetched beyond it: a sampler's end may draw random numbers
            return ((batch, number == length) for number, batch in enumerate(islice(batches, length), 1))
        # without a length one is looked ahead, and the first one is fetched now, as Trainer's
        ahead = pairwise(chain(list(islice(batches, 1)), batches, [batches]))
        return ((batch, following is batches) for batch, following in ahead)

    def _to_device(self, batch: Any) -> Any:
        return self.strategy.precision.convert_input(self.fabric.to_device(batch)) if self._moves else batch

    @contextmanager
    def _heeding_interrupts(self) -> Iterator[None]:
        """Ctrl-C ends the run behind the step at hand, a second one at once; several processes it ends at once."""
        before = signal.getsignal(signal.SIGINT)
        heeds = callable(before) and self.world_size == 1 and threading.current_thread() is threading.main_thread()

        def interrupt(*_: Any) -> None:
            signal.signal(signal.SIGINT, before)
            self.interrupted = True
            print("MiniLoop stops behind this step: resume='last' goes on from the last whole epoch", file=sys.stderr)

        if heeds:
            signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            if heeds:
                signal.signal(signal.SIGINT, before)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock .lock during the training and end it with a state, which `fabric-template runs` shows."""
        with open(Path(self.log_dir, ".lock") if self.is_global_zero else os.devnull, "a") as file:
            with suppress(ImportError, OSError):  # Windows has no fcntl, some network drives have no locks.
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            print(os.getpid(), file=file, flush=True)
            end_state = "failed"
            try:
                yield
                end_state = "finished"
            finally:
                print("interrupted" if self.interrupted else end_state, file=file)

    @property
    def state(self) -> SimpleNamespace:
        """What runs, in Trainer's words."""
        stage = "sanity_check" if self.sanity_checking else "validate" if self.validating else "train"
        return SimpleNamespace(fn="fit", stage=stage, status="running")

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(vars(self).get("fabric"), name):
            return getattr(self.fabric, name)
        raise AttributeError(f"MiniLoop has no {name!r}: as self.trainer it has the common words, FabricLoop all")

    def __deepcopy__(self, memo: dict) -> MiniLoop:
        return self  # copies that are made of a module while it runs log into the same run

    # ---- files

    def _find(self, word: Any, name: str) -> Path | None:
        """The file that resume= or load= means; one that is not there is refused before anything begins."""
        if word is None:
            return None
        path, root = Path(word), Path(self.default_root_dir, "checkpoints", self.name)
        if word in ("last", "best", "auto"):
            place = Path(self._given or "version_*", "best.ckpt" if word == "best" else "last.ckpt")
            found = sorted(root.glob(str(place)), key=lambda path: (len(path.parent.name), path.parent.name))
            path = found[-1] if found else root / place
        if word != "auto" and not path.is_file():
            raise ValueError(f"{name}={word!r}: there is no '{path}': leave {name}= out to begin anew, or give a path")
        return path if path.is_file() else None

    def _read(self, path: Path | None, goes_on: bool = False) -> dict | None:
        """What a file holds; a run that goes on from it does so in its place."""
        if path is None:
            return None
        file, folder = torch.load(path, map_location="cpu", weights_only=True), path.resolve().parent
        ours = file.get("fabric_template") or {}
        if goes_on and ("optimizer_states" not in file or ours.get("batch_idx") or ours.get("saved_in")):
            raise ValueError(f"resume=: '{path}' is not of an epoch's end: FabricLoop goes on from the middle of one, load="
                             " takes the weights of any")  # fmt: skip
        if goes_on and folder.parent.parent == Path(self.default_root_dir, "checkpoints").resolve():
            self.name, self._folder = folder.parent.name, folder.name
        return file

    def _open_files(self) -> None:
        """Take the folders of the run: a new version's, or those of the run that goes on, with its rows."""
        homes = [Path(self.default_root_dir, kind, self.name) for kind in ("logs", "checkpoints")]
        if self._folder is None:
            found = [path.name[8:] for home in homes for path in home.glob("version_*")]
            next_one = max((int(number) for number in found if number.isdigit()), default=-1) + 1
            self._folder = self.fabric.broadcast(self._given or f"version_{next_one}")
            if (there := homes[1] / self._folder / "last.ckpt").exists():
                raise ValueError(f"'{there}' is of another run: go on with resume='last', or leave version= out")
        self.log_dir, self.checkpoint_dir = (str(home / self._folder) for home in homes)
        with suppress(FileNotFoundError), open(Path(self.log_dir, "metrics.csv"), newline="") as file:
            for line in islice(csv.DictReader(file), self._num_rows):
                cells = {name: cell for name, cell in line.items() if cell}
                self.history.append({name: int(c) if c.isdigit() else float(c) for name, c in cells.items()})
        if self.is_global_zero:
            for folder in (self.log_dir, self.checkpoint_dir):
                os.makedirs(folder, exist_ok=True)
            options = {name: getattr(self, name) for name in self.__dataclass_fields__}
            sections = {"hparams": getattr(self.model, "hparams", {}), "config": options}
            plain = {key: {k: v for k, v in part.items() if type(v) in YAML_TYPES} for key, part in sections.items()}
            write(Path(self.log_dir, "hparams.yaml"), yaml.safe_dump(plain, sort_keys=False).encode())

    def _save(self, is_best: bool) -> None:
        """The rows, then best.ckpt, then last.ckpt: a run that is killed in between goes on from the last whole epoch."""
        state = self._state()
        if not self.is_global_zero:
            return
        table = csv.DictWriter(text := io.StringIO(), dict.fromkeys(chain(*self.history)), lineterminator="\n")
        table.writeheader()
        table.writerows(self.history)
        write(Path(self.log_dir, "metrics.csv"), text.getvalue().encode())
        torch.save(state, data := io.BytesIO())
        for name in ("best.ckpt", "last.ckpt")[not is_best :]:
            write(Path(self.checkpoint_dir, name), data.getbuffer())

    def _state(self) -> dict[str, Any]:
        """What is needed to go on, in Lightning's layout; under our own name what Trainer does not keep."""
        part: dict[str, Any] = {"rng": random_states(), "returned": {"sums": {}, "weights": {}, "bad_step": None}}
        part["metrics"] = {"train": [], "callback": self._metrics, "row": {}, "objects": {}}
        part["metrics"] |= {"in_batches": None, "last_fx": None}
        for stage, loader in {"train": self.train_dataloader, "val": self.val_dataloaders}.items():
            states = [generator.get_state() for generator in generators_of(loader)]
            part[stage] = {"sources": [None], "ahead": None, "generators": states} if loader is not None else None
        ranks: list[Any] = [part] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(ranks, part)
        epochs, steps, batches = self.current_epoch, self.global_step, self.current_epoch * (self.batch_idx + 1)
        rows, names = len(self.history), list(self.history[-1])
        state = {
            "epoch": epochs - 1, "global_step": steps, "pytorch-lightning_version": lightning_version, "callbacks": {},
            "state_dict": self._net.state_dict(), "optimizer_states": [self.strategy.get_optimizer_state(self.optimizers[0])],
            "lr_schedulers": [config.scheduler.state_dict() for config in self.lr_scheduler_configs],
            "loops": {"fit_loop": {
                "epoch_progress": counted(epochs), "epoch_loop.state_dict": {"_batches_that_stepped": steps},
                "epoch_loop.batch_progress": {**counted(batches), "is_last_batch": True},
                "epoch_loop.automatic_optimization.optim_progress": {
                    "optimizer": {"step": counted(steps), "zero_grad": {"total": {}, "current": {}}}},
            }},
            "hyper_parameters": {k: v for k, v in getattr(self.model, "hparams", {}).items() if isinstance(v, PLAIN)},
            type(self.strategy.precision).__qualname__: self.strategy.precision.state_dict(),
            "fabric_template": {
                "format": 1, "epoch": epochs, "batch_idx": 0, "saved_in": None, "is_last_batch": True, "total_batches": batches,
                "batches_that_stepped": steps, "steps_in_epoch": 0, "ranks": ranks, "loaders_epoch": {}, "returned": {},
                "rates": [], "kept": {"best": self.best}, "logs": [{"metrics.csv": {"rows": rows, "columns": names}}],
                "history": {"rows": rows, "names": names, "last": self.history[-1], "home": [self.name, self._folder]},
            },
        }  # fmt: skip
        self._call("on_save_checkpoint", state)
        return state

    def _load_training(self, file: dict) -> None:
        self.optimizers[0].load_state_dict(file["optimizer_states"][0])
        for config, state in zip(self.lr_scheduler_configs, file["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        if scaler := file.get(type(self.strategy.precision).__qualname__):
            self.strategy.precision.load_state_dict(scaler)
        self.current_epoch = file["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
        self.global_step = file["global_step"]
        if ours := file.get("fabric_template"):
            self._num_rows, self.best = ours["history"]["rows"], ours["kept"]["best"]

    def _load_random_numbers(self, file: dict) -> None:
        """Where the epoch ended, now that nothing draws before the next one."""
        if ours := file.get("fabric_template"):
            part = ours["ranks"][self.global_rank % len(ours["ranks"])]
            for stage, loader in {"train": self.train_dataloader, "val": self.val_dataloaders}.items():
                states = part[stage]["generators"] if part[stage] else []
                for generator, state in zip(generators_of(loader), states, strict=False):
                    generator.set_state(state)
            set_random_states(part["rng"])


class Logged:
    """One name: its last value, and the sum of the epoch, on its device; nothing is read back in a step."""

    def __init__(self, on_step: bool, on_epoch: bool, reduce: Any, fabric: Any) -> None:
        self.on_step, self.on_epoch, self.fabric = on_step, on_epoch, fabric
        self.reduce = reduce if isinstance(reduce, str) else reduce.__name__
        self.waiting, self.weight, self.is_returned, self.wide = list[tuple[Tensor, int]](), 0, False, wide()
        self.combine = {"max": torch.maximum, "min": torch.minimum}.get(self.reduce, torch.add)
        nothing: Any = None
        self.total = self.last = self.metric = nothing

    def sum_up(self) -> None:
        """A mean is the sum of value x batch size over the sum of batch sizes, in this order, as in Trainer."""
        for value, size in self.waiting:
            self.weight += size
            value = value * size if self.reduce == "mean" else value
            dtype = torch.promote_types(value.dtype, self.wide)  # that of the step, in which it was logged
            self.total = value.to(dtype) if self.total is None else self.combine(self.total, value)
        self.waiting.clear()

    def result(self) -> Any:
        """The epoch's value, over all ranks if that was asked for."""
        if self.metric is not None:
            return self.metric.compute()
        self.sum_up()
        total, weight = self.total, torch.tensor(self.weight, dtype=self.total.dtype, device=self.total.device)
        if self.fabric is not None:
            total, weight = (self.fabric.all_reduce(part.clone(), reduce_op=self.reduce) for part in (total, weight))
        return total / weight if self.reduce == "mean" else total


class Door(nn.Module):
    """What is set up in the module's place, so that every step goes through the strategy."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, call: Callable[[], Any]) -> Any:
        """Run a step with its arguments filled in, which the wrappers do not see."""
        return call()


def parse_optimizers(returned: Any) -> tuple[Any, list[SimpleNamespace]]:
    """The optimizer, and its schedulers with when they step, from any documented shape of configure_optimizers."""
    optimizer, schedulers, monitor = alone(returned), list[Any](), None
    if isinstance(optimizer, Mapping):
        schedulers, monitor = optimizer.get("lr_scheduler") or [], optimizer.get("monitor")
        optimizer = optimizer.get("optimizer")
    elif isinstance(optimizer, list | tuple) and len(optimizer) == 2 and not hasattr(optimizer[1], "zero_grad"):
        optimizer, schedulers = alone(optimizer[0]), optimizer[1]
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"configure_optimizers gave {returned!r}: expected one optimizer, [optimizer], [scheduler], or a dict"
                        ' {"optimizer": ..., "lr_scheduler": ..., "monitor": ...}; FabricLoop takes several')  # fmt: skip
    configs = []
    for item in schedulers if isinstance(schedulers, list | tuple) else [schedulers]:
        words = dict(item) if isinstance(item, Mapping) else {"scheduler": item}
        follows = isinstance(words["scheduler"], torch.optim.lr_scheduler.ReduceLROnPlateau)
        words = {"interval": "epoch", "frequency": 1, "reduce_on_plateau": follows, "name": None, **words}
        configs.append(SimpleNamespace(**words | {"monitor": words.get("monitor") or monitor}))
    return optimizer, configs


def alone(items: Any) -> Any:
    """What stands alone in a list."""
    return items[0] if isinstance(items, list | tuple) and len(items) == 1 else items


def loss_in(output: Any) -> Tensor | None:
    """The loss in what training_step returned; None to learn nothing from this batch."""
    loss = output.get("loss") if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else output
    if loss is not None and not (isinstance(loss, Tensor) and loss.requires_grad):
        raise TypeError(f"training_step returned {output!r}: expected a loss with a gradient, or a dict with it")
    return loss


def hooks_of(part: Any) -> dict[str, Callable]:
    """The methods that a part has itself, by name; Lightning's empty ones are nobody's."""
    lightnings = ("lightning.pytorch.core.", "pytorch_lightning.core.")
    methods = {name: getattr(type(part), name, None) for name in dir(type(part)) if not name.startswith("__")}
    return {name: getattr(part, name) for name, method in methods.items()
            if callable(method) and not str(getattr(method, "__module__", "")).startswith(lightnings)}  # fmt: skip


def net_of(owner: Any) -> nn.Module:
    """The module that holds the parameters: the owner, or all modules among its attributes."""
    if isinstance(owner, nn.Module):
        return owner
    parts = {name: part for name, part in vars(owner).items() if isinstance(part, nn.Module)}
    if not parts:
        raise TypeError(f"{type(owner).__name__} holds no nn.Module: expected one, or an object with self.net = ...")
    return nn.ModuleDict(parts)


def size_of(batch: Any) -> int | None:
    """The number of samples in a batch: the first dimension of the first tensor in it, however deep."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    parts: Any = () if isinstance(batch, str | bytes) else batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(parts, Iterable):
        parts = [getattr(batch, name) for name in getattr(batch, "__dataclass_fields__", ())]
    return next((size for part in parts if (size := size_of(part)) is not None), None)


def length_of(loader: Any) -> Any:
    """How many batches a pass has; infinity where nobody knows."""
    with suppress(TypeError, NotImplementedError):
        return len(loader)
    return math.inf


def announce_pass(loader: Any, epoch: int, is_first: bool) -> None:
    """Tell the samplers that shuffle by epoch; Fabric's own loader counts its passes, which a resumed run has not made."""
    if is_first and hasattr(loader, "__next__"):
        iter(loader)  # to see whether one can, as Trainer: its own iterator, which shuffles then, shuffles once more
    if hasattr(loader, "_num_iter_calls"):
        loader._num_iter_calls = epoch
    for sampler in (one for one in samplers_of(loader)[::2] if hasattr(one, "set_epoch")):
        sampler.set_epoch(epoch)


def samplers_of(loader: Any) -> list[Any]:
    """Its sampler, its batch sampler and the sampler of that."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]


def generators_of(loader: Any) -> Iterable[torch.Generator]:
    """The generators from which a loader and its samplers draw, each once."""
    found = [getattr(part, "generator", None) for part in (loader, *samplers_of(loader))]
    return {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values()


def random_states() -> dict[str, Any]:
    """The states of all libraries' random numbers, as tensors and plain values."""
    legacy: Any = numpy.random.get_state()
    (version, words, gauss), (name, keys, *rest) = random.getstate(), legacy
    states = {"torch": torch.get_rng_state(), "python": [version, torch.tensor(words), gauss]}
    states["numpy"] = [name, torch.tensor(keys.astype("int64")), *rest]
    return states | ({"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_initialized() else {})


def set_random_states(states: Mapping[str, Any]) -> None:
    """Put them back."""
    (version, words, gauss), (name, keys, *rest) = states["python"], states["numpy"]
    torch.set_rng_state(states["torch"])
    random.setstate((version, tuple(words.tolist()), gauss))
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    if "cuda" in states and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def write(path: Path, data: Any) -> None:
    """Write a file whole: beside its place, onto the disk, and only then under its name."""
    with open(beside := path.with_name(f"{path.name}.tmp"), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    if os.name == "posix":  # so that a power cut takes no new name back
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def wide() -> torch.dtype:
    """The default dtype, but no narrower than float32, so that long sums stay exact enough."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def counted(number: int) -> dict[str, Any]:
    """Trainer's counters of what began and ended, all of them here."""
    return dict.fromkeys(("total", "current"), dict.fromkeys(("ready", "started", "processed", "completed"), number))
