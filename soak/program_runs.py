"""Run a program in a forked process with FabricLoop, MiniLoop, Trainer or a hand-written loop, and compare the results.

A program is source code with a function ``build()``, which returns a dict. The dict contains the model, the loaders and the
loop's options, and optionally callbacks and more arguments of fit. Each run is forked from a process that has imported
everything. An event, such as SIGKILL, ends a run at a point, such as the n-th backward pass.
"""

import contextlib
import csv
import errno
import io
import math
import os
import pickle
import random
import re
import signal
import sys
import time
import traceback
import types
import warnings
from collections import Counter
from dataclasses import fields
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import search_path  # noqa: F401
import torch
import torch._dynamo
import torchdata.stateful_dataloader  # noqa: F401
from hand_loop import HandLoop, modules_of
from kills import fork
from layer import Fault
from lightning.fabric.utilities.seed import seed_everything
from lightning.pytorch.loggers.logger import Logger
from ports import free_port
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fabric_template import FabricLoop, MiniLoop

LOOPS = ("FabricLoop", "MiniLoop", "Trainer", "HandLoop")
# These options are removed before a run with Trainer, which does not have them.
OWN_OPTIONS = (
    "name", "version", "monitor", "mode", "save_top_k", "save_last", "save_every_n_steps",
    "validate_every_n_steps", "seed", "compile", "on_nan", "hparams", "log_grad_norm",
)  # fmt: skip
# These options are removed before a run with MiniLoop, which does not support them. They do not affect the results.
NEUTRAL_OPTIONS = ("num_sanity_val_steps", "inference_mode", "deterministic", "detect_anomaly")
MINI_OPTIONS = {field.name for field in fields(MiniLoop)}
QUIET = {"enable_progress_bar": False, "enable_model_summary": False}
HOOKS = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_after_backward",
    "on_train_batch_end", "on_validation_start", "on_validation_end", "on_train_epoch_end", "on_save_checkpoint",
)  # fmt: skip
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
# A run that takes longer than this number of seconds counts as hanging.
SECONDS = 300


class PlannedError(Exception):
    """The error that ends a run at a chosen point."""


class Points:
    """Count how often a run reaches a point, such as "backward", and end the run at a given count."""

    def __init__(self, event=None):
        self.counts, self.event, self.pid = Counter(), event, os.getpid()

    def visit(self, point):
        if os.getpid() != self.pid:
            return
        self.counts[point] += 1
        if self.event is None or (self.event["at"], self.event["n"]) != (point, self.counts[point]):
            return
        if self.event["kind"] == "error":
            raise PlannedError(f"{point} {self.event['n']}")
        os.kill(self.pid, SIGNALS[self.event["kind"]])

    def install(self):
        """Call visit() in each backward pass, in each optimizer step and for each batch of a DataLoader."""
        backward, next_batch = torch.Tensor.backward, _BaseDataLoaderIter.__next__

        def visit_backward(tensor, *args, **options):
            self.visit("backward")
            return backward(tensor, *args, **options)

        def visit_batch(iterator):
            self.visit("batch")
            return next_batch(iterator)

        torch.Tensor.backward = visit_backward
        _BaseDataLoaderIter.__next__ = visit_batch
        register_optimizer_step_pre_hook(lambda *args: self.visit("step"))

    def callback(self):
        """Return a callback whose hooks call visit("hook")."""

        def make(name):
            return lambda callback, *args: self.visit("hook")

        return type("VisitsHooks", (pl.Callback,), {name: make(name) for name in HOOKS})()


class FullDisk(Fault):
    """A full disk, on which each write after the n-th operation fails."""

    def before(self, operation, path, size):
        if self.count >= self.n and operation in ("write", "fsync", "mkdir"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


# ---- Functions that run a program with each kind of loop and return the results


def load_program(source):
    """Execute a program's source code in a separate module, so that its classes can be pickled."""
    module = sys.modules["program"] = types.ModuleType("program")
    exec(compile(source, "program.py", "exec"), module.__dict__)
    return module


def run_fabric_loop(program, root, points, resume=None, ranks=1, rank=0):
    callbacks = list(program.get("callbacks", ()))
    if isinstance(program["model"], pl.LightningModule) and points.event is not None:
        callbacks.append(points.callback())
    options = {**QUIET, **program["options"], "callbacks": callbacks, **distributed(ranks)}
    logger = RowLogger()
    if program["changes"].get("is_logged"):
        options["logger"] = ["csv", logger]
    loop = FabricLoop(accelerator="cpu", default_root_dir=root, **options)
    loaders = {"datamodule": program.get("datamodule"), **program.get("fit", {})}
    history = loop.fit(program["model"], program["train"], program["val"], resume=resume, **loaders)
    schedulers = [config.scheduler for config in loop.lr_scheduler_configs]
    return {
        **state_of(program["model"], loop.optimizers, schedulers),
        "logged": logger.rows,
        "metrics": dict(loop.callback_metrics),
        "rows": history.to_dict("records"),
        "counters": [loop.current_epoch, loop.global_step],
        # Read the files before calling validate(), which writes another row to steps.csv.
        "files": files_of(root),
        "validated": validate(loop, program) if program["changes"].get("is_logged") else None,
    }


def run_mini_loop(program, root, points, resume=None, ranks=1, rank=0):
    if program.get("callbacks"):
        raise TypeError("MiniLoop: got callbacks, expected none. Use FabricLoop.")
    if program.get("datamodule") is not None or program["train"] is None:
        raise TypeError("MiniLoop: got no loaders, expected train_dataloaders. Use FabricLoop.")
    options = {n: v for n, v in program["options"].items() if n not in NEUTRAL_OPTIONS}
    options |= distributed(ranks)
    loop = MiniLoop(accelerator="cpu", default_root_dir=root, **options)
    history = loop.fit(
        program["model"], program["train"], program["val"], resume=resume, **program.get("fit", {})
    )
    schedulers = [config["scheduler"] for config in loop.schedulers]
    return {
        **state_of(program["model"], [loop.optimizer], schedulers),
        "metrics": dict(loop.callback_metrics),
        "rows": history.to_dict("records"),
        "counters": [loop.current_epoch, loop.global_step],
    }


def run_trainer(program, root, points, resume=None, ranks=1, rank=0):
    options = {n: v for n, v in program["options"].items() if n not in OWN_OPTIONS}
    callbacks = list(program.get("callbacks", ()))
    is_saving = any(isinstance(callback, pl.callbacks.ModelCheckpoint) for callback in callbacks)
    logger = RowLogger()
    trainer = pl.Trainer(
        accelerator="cpu", default_root_dir=root, logger=logger, enable_checkpointing=is_saving,
        callbacks=callbacks, **QUIET, **options, **distributed(ranks),
    )  # fmt: skip
    loaders = program["train"], program["val"], program.get("datamodule")
    trainer.fit(program["model"], *loaders, ckpt_path=resume)
    if program["changes"].get("save"):
        trainer.save_checkpoint(Path(root, "saved.ckpt"))
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    return {
        **state_of(program["model"], trainer.optimizers, schedulers),
        "logged": logger.rows,
        "metrics": dict(trainer.callback_metrics),
        "counters": [trainer.current_epoch, trainer.global_step],
        "validated": validate(trainer, program),
    }


def run_hand_loop(program, root, points, resume=None, ranks=1, rank=0):
    loop = HandLoop(program, ranks, rank)
    loop.fit(program["other_loader"], program["changes"].get("from_epoch"))
    schedulers = [config["scheduler"] for config in loop.schedulers]
    return {
        **state_of(program["model"], [loop.optimizer], schedulers),
        "rows": loop.rows,
        "counters": [loop.epoch, loop.global_step],
    }


class RowLogger(Logger):
    """A logger that stores all rows in memory."""

    name, version, save_dir = "rows", 0, None

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_hyperparams(self, params, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append([step, dict(metrics)])


def validate(trainer, program):
    make_val = program["make_val"]
    if make_val is None:
        return None
    return trainer.validate(program["model"], make_val(), verbose=False)


RUNNERS = {
    "FabricLoop": run_fabric_loop,
    "MiniLoop": run_mini_loop,
    "Trainer": run_trainer,
    "HandLoop": run_hand_loop,
}


def distributed(ranks):
    return {"strategy": "ddp", "devices": ranks} if ranks > 1 else {"devices": 1}


def state_of(model, optimizers, schedulers):
    """Return the complete state of a trained model."""
    networks = list(modules_of(model))
    modules = [module for network in networks for module in network.modules()]
    names = ("hidden", "mean", "seen", "calls")
    return {
        "weights": [network.state_dict() for network in networks],
        "buffers": [dict(network.named_buffers()) for network in networks],
        "attributes": [{n: vars(m)[n] for n in names if n in vars(m)} for m in modules],
        "modes": [module.training for module in modules],
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in schedulers],
        "random": [torch.rand(()).item(), random.random(), np.random.rand()],
    }


# ---- A run in forked processes, one per rank


class Run:
    """A run of a program in forked processes, one per rank."""

    def __init__(self, source, loop, root, ranks=1, seed=1, event=None, resume=None, **changes):
        self.source, self.loop, self.root, self.ranks = source, loop, Path(root), ranks
        self.seed, self.event, self.resume = seed, event, resume
        # These options and values replace those of the program.
        self.options, self.changes = changes.get("options", {}), changes.get("changes", {})
        self.end_path = self.root.with_name(f"{self.root.name}.end")
        self.log_path = self.root.with_name(f"{self.root.name}.log")

    def run(self):
        """Run the program. Return a dict with its results, its error or only its exit codes."""
        self.root.mkdir(parents=True, exist_ok=True)
        for path in self.root.parent.glob(f"{self.end_path.name}*"):
            path.unlink()
        port = str(free_port()) if self.ranks > 1 else None
        pids = [fork(self._run_in_child, rank, port) for rank in range(self.ranks)]
        codes = wait(pids, self.event is not None)
        if self.end_path.exists():
            end = {**read_pickle(self.end_path), "codes": codes}
            other_path = Path(f"{self.end_path}1")
            other = read_pickle(other_path) if other_path.exists() else {}
            if other.get("error") and "error" in end:
                end["where"] += f"Rank 1: {other['where']}"
            if self.ranks > 1 and "weights" in end:
                # Ranks count as in sync even if buffers differ, because
                # each rank updates its buffers with a different last batch.
                names = {name for buffers in end["buffers"] for name in buffers}
                found = differences(end["weights"], other["weights"])
                end["is_in_sync"] = all(any(name in line for name in names) for line in found)
            return end
        return {"codes": codes, "log": self.log_path.read_text(errors="replace")[-2000:]}

    def run_here(self):
        self.root.mkdir(parents=True)
        with open(self.log_path, "w") as log, contextlib.redirect_stdout(log):
            return self._train(Points(), 0)

    def _run_in_child(self, rank, port):
        os._exit(self._run_rank(rank, port))

    def _run_rank(self, rank, port):
        """Run the program in a forked process, and return its exit code."""
        os.setpgid(0, 0)
        with open(self.log_path, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        warnings.simplefilter("ignore")
        os.chdir(self.root)
        if port is not None:
            variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": str(rank)}
            os.environ.update(variables)
        if self.loop == "HandLoop" and self.ranks > 1:
            torch.distributed.init_process_group("gloo", rank=rank, world_size=self.ranks)
        event = self.event if self.event and self.event.get("rank", 0) == rank else None
        points, code = Points(event), 0
        points.install()
        try:
            with self._disk(event) as disk:
                end = self._train(points, rank)
            end["counts"] = {**points.counts, "disk": disk.count}
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else 1
        except KeyboardInterrupt:
            return 130
        except Exception as error:
            end, code = describe_error(error, points), 3
        with open(f"{self.end_path}{rank or ''}", "wb") as file:
            of_other_rank = {name: end.get(name) for name in ("weights", "error", "where")}
            pickle.dump(end if rank == 0 else of_other_rank, file)
        return code

    def _disk(self, event):
        if event is None or event["at"] != "disk":
            return Fault(self.root, -1, "SIGKILL")
        kind = FullDisk if event["kind"] == "disk_full" else Fault
        return kind(self.root, event["n"], "SIGKILL")

    def _train(self, points, rank):
        module = load_program(self.source)
        seed_everything(self.seed, verbose=False)
        program = module.build()
        program["options"] = {**program["options"], **self.options}
        program["changes"], program["other_loader"] = self.changes, None
        program["make_val"] = getattr(module, "make_val", None)
        if "batch_size" in self.changes:
            program["other_loader"] = module.make_train(self.changes["batch_size"])
            if "from_epoch" not in self.changes:
                program["train"] = program["other_loader"]
        end = RUNNERS[self.loop](program, str(self.root), points, self.resume, self.ranks, rank)
        return {"files": files_of(self.root), **plain({**end, "options": program["options"]})}


def read_pickle(path):
    if not path.exists():
        return None
    with path.open("rb") as file:
        return pickle.load(file)


def describe_error(error, points):
    """Return an error's text, and whether the loop refuses the program on purpose."""
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "error": f"{type(error).__name__}: {error}",
        "is_by_name": is_refusal(error, points) and not is_foreign(frames),
        "is_planned": isinstance(error, PlannedError),
        "where": "".join(traceback.format_exception(error)[-6:]),
    }


def is_refusal(error, points):
    """Return whether an error was raised before the first backward pass, or is known to be raised later."""
    if not isinstance(error, TypeError | ValueError | FileNotFoundError):
        return False
    late = (
        "resume: StatefulDataLoader has persistent workers",
        "on_train_batch_start: got -1",
        "training_step: got None at",
        "optimizer: got an optimizer whose step() needs a closure",
        "optimizer: a hook changed the parameters of the model",
    )
    return not points.counts["backward"] or str(error).startswith(late)


def is_foreign(frames):
    """Return whether torch or the program raised an error, rather than a loop or Lightning."""
    file = frames[-1].filename
    return not any(part in file for part in ("fabric_template", "lightning", "soak"))


def wait(pids, is_ended):
    """Wait for all ranks, and return their exit codes. If an event has ended one rank, kill the others."""
    codes, started = dict.fromkeys(pids), time.monotonic()
    failed_at = None
    while None in codes.values():
        for pid in [pid for pid, code in codes.items() if code is None]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if failed_at is None and any(codes.values()):
            failed_at = now
        is_left = failed_at is not None and now - failed_at > (5 if not is_ended else 0.5)
        if is_left or now - started > SECONDS:
            for pid in [pid for pid, code in codes.items() if code is None]:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = -signal.SIGKILL if is_left else "hang"
        time.sleep(0.001)
    for pid in pids:
        # Kill the process group of each rank, because a killed rank leaves its DataLoader workers running.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    return list(codes.values())


# ---- Functions that convert results to plain values and compare them


def plain(value):
    """Convert nested values to plain Python values. A tensor becomes an object of the class Numbers."""
    if isinstance(value, dict):
        return {plain_key(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, torch.Tensor):
        if isinstance(value, nn.UninitializedParameter):
            return "uninitialized"
        return Numbers(str(value.dtype), value.detach().to_dense().tolist())
    if isinstance(value, np.ndarray):
        return Numbers(f"numpy {value.dtype}", value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str):
        return plain_text(value)
    if value is None or isinstance(value, int | float | complex | bytes | Numbers):
        return value
    return re.sub(r"0x[0-9a-fA-F]+", "0x", repr(value))


def plain_key(key):
    return key if isinstance(key, int | float) else plain_text(str(key))


def plain_text(text):
    """Replace the run's folder and version in a text, because they differ even between two equal runs."""
    return re.sub(r"version_\d+", "version_N", text.replace(os.getcwd(), "ROOT"))


class Numbers:
    """The dtype and the values of a tensor."""

    def __init__(self, dtype, values):
        self.dtype, self.values = dtype, values

    def __repr__(self):
        return f"{self.dtype} {self.values}"[:80]


# Comparisons ignore these values, which depend on the time or on the number of restarts.
CLOCKS = {
    "time", "waiting", "seconds", "seconds_waited", "eval_seconds", "samples_per_second", "time_elapsed", "elapsed", "duration", "created",
    "written", "excluded_seconds", "saved_at", "last_model_path",
}  # fmt: skip


def files_of(root):
    """Return a run's files by name, with CSV rows and checkpoints as nested plain values."""
    found = {}
    for path in sorted(Path(root).rglob("*")):
        name = re.sub(r"version_\d+/", "", path.relative_to(root).as_posix())
        if path.suffix == ".csv":
            columns, *rows = [*csv.reader(io.StringIO(path.read_text(), newline=""))] or [[]]
            if rows:
                found[name] = [dict(zip(columns, row, strict=True)) for row in rows]
        elif path.suffix == ".ckpt" and path.is_file():
            found[name] = plain(torch.load(path, weights_only=False))
    return found


def differences(expected, found, path="", tolerance=0.0, is_subset=False):
    """Yield a text for each difference, with its path and both values.

    Args:
        tolerance: The allowed relative difference between numbers.
        is_subset: Whether to ignore keys that only one of the two values has.
    """
    if isinstance(expected, Numbers) and isinstance(found, Numbers):
        if tolerance == 0 and expected.dtype != found.dtype:
            yield f"{path}: {found.dtype} instead of {expected.dtype}"
        expected, found = expected.values, found.values
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in [*expected, *(key for key in found if key not in expected)]:
            # Ignore the list "rebound" of replaced attributes, because a
            # resumed run may replace more attributes with new objects.
            if key in CLOCKS or key == "rebound":
                continue
            if key in expected and key in found:
                yield from differences(
                    expected[key], found[key], f"{path}/{key}", tolerance, is_subset
                )
            elif not is_subset:
                yield f"{path}/{key}: {'more' if key in found else 'missing'}"
    elif isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            yield f"{path}: {len(found)} items instead of {len(expected)}"
        for i, (one, other) in enumerate(zip(expected, found, strict=False)):
            yield from differences(one, other, f"{path}/{i}", tolerance, is_subset)
    elif not is_equal(expected, found, tolerance):
        yield f"{path}: {str(found)[:60]} instead of {str(expected)[:60]}"


def is_equal(one, other, tolerance):
    if isinstance(one, bool | str) or isinstance(other, bool | str) or one is None or other is None:
        return type(one) is type(other) and one == other
    if one == other or (one != one and other != other):
        return type(one) is type(other) or tolerance > 0
    if not isinstance(one, int | float) or not isinstance(other, int | float):
        return False
    return tolerance > 0 and math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
