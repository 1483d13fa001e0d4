"""The private names of Lightning, torchmetrics and PyTorch that the package relies on: each with its reason, and still there.

Where one goes with a release, the test of its name says so in a line; a use that is not listed here fails, too.
"""

import argparse
import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as Sharding
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import CombinedLoader
from modules import quiet
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import fabric_template

PACKAGE = Path(fabric_template.__file__).parent


class Configured(pl.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.save_hyperparameters(config)


def _workers():
    """What a DataLoader's worker processes are handled by."""
    iterator = iter(DataLoader(range(2), num_workers=1))
    names = dir(iterator)
    iterator._shutdown_workers()
    return names


def _shared():
    """A loader as Fabric sets it up."""
    return Fabric(accelerator="cpu", devices=1).setup_dataloaders(DataLoader(range(2)), move_to_device=False)


def _named_in(file):
    """The attributes that one of torch's files gives its objects, which need other ranks to be made."""
    return re.findall(r"self\.(\w+)", Path(torch.__file__).parent.joinpath(file).read_text())


NEEDED = [  # name, who has it, and what we need it for
    ("_foreach_add_", lambda: torch, "entries.py", "sums of all names of a batch in one operation; documented"),
    ("_version", lambda: torch.zeros(()), "metrics.py", "whether a loss was changed in place since it was logged"),
    ("_foreach_mul", lambda: torch, "entries.py", "the same"),
    ("_hparams_name", lambda: Configured({"a": 1}), "checkpoint.py", "hyperparameters that load_from_checkpoint gives back"),
    ("_last_global_step_saved", ModelCheckpoint, "fitting.py", "a step that is saved already, after a resume as before"),
    ("_last_checkpoint_saved", ModelCheckpoint, "fitting.py", "the same, for save_last='link'"),
    ("_get_root", lambda: pytest.importorskip("omegaconf").DictConfig, "plain.py", "the whole that a configuration is part of"),
    ("_get_full_key", lambda: pytest.importorskip("omegaconf").DictConfig, "plain.py", "where in it that part stands"),
    ("_log_hyperparams", lambda: Configured({"a": 1}), "loggers.py", "to respect save_hyperparameters(logger=False)"),
    *[(name, DDPStrategy, "strategies.py", "to make Fabric's strategy of Trainer's") for name in (
        "_accelerator", "_precision_plugin", "_checkpoint_io", "_ddp_comm_hook", "_model_averaging_period", "_timeout",
        "_start_method", "_ddp_kwargs",
    )],
    *[(name, ModelParallelStrategy, "trainer/strategies.py", "to make Fabric's strategy of Trainer's") for name in (
        "_data_parallel_size", "_tensor_parallel_size", "_save_distributed_checkpoint", "_process_group_backend",
    )],
    ("_save_distributed_checkpoint", lambda: Sharding(print), "pieces.py", "whether a sharded model's checkpoint is one file"),
    ("_device_mesh", pl.LightningModule, "session.py", "the mesh by which a module shards itself in configure_model"),
    ("_trainer", pl.LightningModule, "attach.py", "to give back, after an error, the trainer that a module had"),
    ("_current_fx_name", pl.LightningModule, "attach.py", "a module's own log, which ends in Lightning's"),
    ("_trainer", pl.LightningModule, "shown.py", "a plain module as Lightning's callbacks expect it: its trainer"),
    ("_automatic_optimization", pl.LightningModule, "shown.py", "the same: who steps"),
    ("_example_input_array", pl.LightningModule, "shown.py", "the same: what a summary is made with"),
    ("_num_iter_calls", _shared, "mini.py", "epochs that a loader of Fabric's shuffles by: a resumed run has not made them"),
    ("_mode", lambda: CombinedLoader([]), "loaders.py", "to tell loaders that go together from those that follow each other"),
    ("_lightning_module", PyTorchProfiler, "trainer/profiling.py", "to name the module's parts in the trace"),
    ("_dataloader_init_kwargs_resolve_sampler", "lightning.fabric.utilities.data", "sharing.py", "batch samplers of one's own"),
    ("_FabricModule", "lightning.fabric.wrappers", "steps.py", "the type of what a strategy wraps, for the type checker"),
    ("_MultiProcessingLauncher", "lightning.fabric.strategies.launchers", "signals.py", "to know that ranks are spawned"),
    ("_EvaluationLoop", "lightning.pytorch.loops", "evaluate.py", "the profilers' names for fetching a batch"),
    ("_PredictionLoop", "lightning.pytorch.loops", "evaluate.py", "the profilers' names for fetching a batch"),
    ("_forward_cache", MeanMetric, "entries.py", "a metric's value for the batch at hand"),
    ("_defaults", MeanMetric, "metric_states.py", "the states that a metric declares, which a checkpoint always holds"),
    ("_iterator", lambda: DataLoader([]), "loaders.py", "to end the workers that a loader keeps"),
    ("_shutdown_workers", _workers, "passes.py", "to end worker processes at the end of a pass"),
    ("_modules", lambda: torch.nn.Linear(1, 1), "randomness.py", "a module's own modules, by name, at each save"),
    ("_buffers", lambda: torch.nn.Linear(1, 1), "held.py", "a module's own buffers, by name"),
    ("_non_persistent_buffers_set", lambda: torch.nn.Linear(1, 1), "held.py", "the buffers that no state_dict has"),
    ("_send_idx", _workers, "multiprocess.py", "to know which batches workers have begun"),
    ("_orig_mod", lambda: torch.compile(torch.nn.Linear(1, 1), backend="eager"), "prepare.py", "to train what was compiled"),
    ("_step_supports_amp_scaling", lambda: torch.optim.SGD([torch.ones(1)], fused=True), "optimizing.py", "fused in 16-mixed"),
    ("_dynamo", "torch", "compiling.py", "the compiler's own lists and callbacks, which torch.compiler has no names for:"),
    *[(name, "torch._dynamo", "compiling.py", why) for name, why in (
        ("callback_handler", "how long compilation takes"),
    )],
    ("_comm_hooks", lambda: _named_in("nn/parallel/distributed.py"), "buckets.py", "hooks' states that no checkpoint holds"),
    ("_overlap_with_ddp", lambda: _named_in("distributed/optim/zero_redundancy_optimizer.py"), "redundancy.py",
     "one whose steps do nothing"),
    ("_actions", argparse.ArgumentParser, "cli.py", "the options that a mistyped one may have meant"),
]  # fmt: skip

ASKED = [  # name, the path to it from a Trainer, and which of Lightning's files asks a trainer for it
    ("_evaluation_loop", "_evaluation_loop", "callbacks.throughput_monitor"),
    ("_results", "_results", "core.module"),
    ("_accelerator_connector", "_accelerator_connector", "core.module"),
    ("_data_connector", "_data_connector", "core.module"),
    ("_datahook_selector", "_data_connector._datahook_selector", "core.module"),
    ("_logger_connector", "_logger_connector", "callbacks.lr_monitor"),
    ("_current_fx", "_logger_connector._current_fx", "core.module"),
    ("_lightning_optimizers", "strategy._lightning_optimizers", "core.module"),
    ("_skip_backward", "fit_loop._skip_backward", "callbacks.stochastic_weight_avg"),
    ("_should_accumulate", "fit_loop._should_accumulate", "callbacks.throughput_monitor"),
    ("_should_check_val_epoch", "fit_loop.epoch_loop._should_check_val_epoch", "callbacks.progress.progress_bar"),
    ("_batches_that_stepped", "fit_loop.epoch_loop._batches_that_stepped", "callbacks.lr_monitor"),
    ("_has_run", "fit_loop.epoch_loop.val_loop._has_run", "callbacks.model_checkpoint"),
    ("_data_source", "fit_loop.epoch_loop.val_loop._data_source", "callbacks.batch_size_finder"),
]


def has(owner, name):
    """Whether an object, or what a function makes, or a module of this name has the name, asked without calling it."""
    if isinstance(owner, str):
        owner = import_module(owner)
    elif callable(owner):
        owner = owner()
    return name in (owner if isinstance(owner, list) else dir(owner))


@pytest.mark.parametrize(("name", "owner", "file", "reason"), NEEDED, ids=[row[0] for row in NEEDED])
def test_it_is_still_there(name, owner, file, reason):
    (path,) = (path for path in PACKAGE.rglob(file) if not is_new_engine(path.relative_to(PACKAGE)))
    assert name in path.read_text(), f"{path} no longer uses {name}: name the file that does"
    assert has(owner, name), f"There is no longer a {name}, which {path} needs for this: {reason}"


@pytest.mark.parametrize(("name", "path", "file"), ASKED, ids=[row[0] for row in ASKED])
def test_lightning_still_asks_for_it(name, path, file):
    """... or views.py, attributes.py and attach.py offer something for nobody, and not what is asked for instead."""
    *way, last = path.split(".")
    owner = pl.Trainer(**quiet())
    for part in way:
        owner = getattr(owner, part)
    assert has([*dir(owner)], last), f"Lightning no longer has trainer.{path}, which fabric_template offers as {name}"
    source = inspect.getsource(import_module(f"lightning.pytorch.{file}"))
    assert name in source, f"lightning.pytorch.{file} no longer asks for {name}, which fabric_template offers"


def test_no_other_private_names_are_used():
    """Every underscored attribute that the package reads is its own, or is listed above."""
    own, read = {"_exit", "_getframe"}, {}  # of os and sys, documented
    for path in sorted(PACKAGE.rglob("*.py")):
        if is_new_engine(path.relative_to(PACKAGE)):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_ours(node.value):
                own.add(node.attr)
            elif isinstance(node, ast.Attribute):
                read[node.attr] = path.name
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
                if isinstance(node.args[1], ast.Constant):
                    read[node.args[1].value] = path.name
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                read |= {alias.name: path.name for alias in node.names}
    private = {name for name in read if re.fullmatch(r"_[a-zA-Z]\w*", name)}
    foreign = private - own - {row[0] for row in NEEDED + ASKED}
    assert not foreign, {name: read[name] for name in foreign}


def is_new_engine(path):
    """The new engine names its private attributes in lightning_compat/ when it takes the old one's place."""
    folders = {"training", "loggers", "checkpoint", "distributed", "lightning_compat"}
    return path.parts[0] in folders or path.name in {"next_loop.py", "dataloaders.py", "tensor_loader.py"}


def _is_ours(owner):
    return isinstance(owner, ast.Name) and owner.id == "self"
