"""Test the private names of Lightning, torchmetrics and PyTorch that the package uses.

If a release removes one of these names, the failing test shows what the name is used for.
"""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from modules import Classifier, make_loader, quiet

import fabric_template
from fabric_template.lightning_compat import private

PACKAGE = Path(fabric_template.__file__).parent
# Files may use these names of the standard library, which start with an underscore but are documented.
DOCUMENTED = {"_asdict", "_exit", "_getframe", "_replace"}


class WithHyperparameters(pl.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.save_hyperparameters(config)


def wrapped_optimizer():
    return LightningOptimizer(torch.optim.SGD([torch.ones(1)], lr=0.1))


def trained_optimizer():
    optimizer = wrapped_optimizer()
    optimizer._strategy = None
    return optimizer


# Map each name that lightning_compat/private.py uses to a function or class that creates an object with this attribute.
OF_LIGHTNING = {
    "_strategy": trained_optimizer,
    "_on_after_step": wrapped_optimizer,
    "_current_fx_name": pl.LightningModule,
    "_hparams_name": lambda: WithHyperparameters({"a": 1}),
    "_log_hyperparams": lambda: WithHyperparameters({"a": 1}),
    "_mode": lambda: CombinedLoader([]),
    "_lightning_module": PyTorchProfiler,
    "_find_last_checkpoints": ModelCheckpoint,
    "_device_mesh": pl.LightningModule,
    "_ddp_comm_hook": DDPStrategy,
    "_save_distributed_checkpoint": lambda: ModelParallelStrategy(print),
}

# Map each private name of Python, torch and torchmetrics that the package's other files use to its purpose.
NAMES_OF_OTHERS = {
    "_base": "Detect a loss that is a view, for example of a parameter.",
    "_forward_cache": "Read a metric's value for the current batch.",
    "_step_supports_amp_scaling": "Detect fused optimizers, which unscale the gradients themselves.",
    "_iterator": "Access the workers of a loader with persistent workers.",
    "_MultiProcessingDataLoaderIter": "Shut down the workers of a loader.",
    "_shutdown_workers": "Shut down the workers of a loader.",
    "_sampler_iter": "Read the batches that workers have started, without requesting more.",
    "_index_sampler": "Give persistent workers the remaining indices of a pass.",
    "_parameters": "Share a network's parameters with the module that wraps it.",
    "_buffers": "Share a network's buffers with the module that wraps it.",
    "_modules": "Share a network's submodules with the module that wraps it.",
    "_non_persistent_buffers_set": "Find the buffers that a state_dict leaves out.",
    "_metadata": "Keep the versions of the modules in a state_dict.",
    "_orig_mod": "Find the module that torch.compile has wrapped.",
    "_utils": "Files written by torch.save refer to functions in torch._utils.",
    "_rebuild_qtensor": "torch.save refers to this function when it writes a quantized tensor.",
    "_rebuild_sparse_tensor": "torch.save refers to this function when it writes a sparse tensor.",
    "_rebuild_tensor_v2": "torch.save refers to this function when it writes a tensor.",
    "_rebuild_tensor_v3": "torch.save refers to this function when it writes a tensor of a dtype such as float8.",
    "_fields": "Read the field names of a named tuple. This attribute is documented.",
    "_actions": "List the options that can be suggested for a mistyped option.",
}

# Map each private attribute of Trainer that FabricLoop provides to the Lightning module that reads it.
OFFERED = [
    ("_evaluation_loop", "callbacks.throughput_monitor"),
    ("_results", "core.module"),
    ("_accelerator_connector", "core.module"),
    ("_data_connector", "core.module"),
    ("_data_connector._datahook_selector", "core.module"),
    ("_logger_connector", "callbacks.lr_monitor"),
    ("_logger_connector._current_fx", "core.module"),
    ("strategy._lightning_optimizers", "core.module"),
    ("fit_loop._skip_backward", "callbacks.stochastic_weight_avg"),
    ("fit_loop._should_accumulate", "callbacks.throughput_monitor"),
    ("fit_loop.epoch_loop._should_check_val_epoch", "callbacks.progress.progress_bar"),
    ("fit_loop.epoch_loop._batches_that_stepped", "callbacks.lr_monitor"),
    ("fit_loop.epoch_loop.val_loop._has_run", "callbacks.model_checkpoint"),
    ("fit_loop.epoch_loop.val_loop._data_source", "callbacks.batch_size_finder"),
]


@pytest.mark.parametrize("name", OF_LIGHTNING)
def test_lightning_still_has_each_name_that_private_py_uses(name):
    assert name in inspect.getsource(private), f"private.py no longer uses {name}: remove it from the table"
    assert name in dir(OF_LIGHTNING[name]()), f"Lightning no longer has {name}, which private.py uses"


@pytest.fixture(scope="module")
def trained_loop():
    loop = fabric_template.FabricLoop(**quiet())
    loop.fit(Classifier(), make_loader(4))
    return loop


@pytest.mark.parametrize(("path", "file"), OFFERED, ids=[row[0] for row in OFFERED])
def test_lightning_still_needs_each_private_attribute_provided_by_fabric_loop(trained_loop, path, file):
    *parents, name = path.split(".")
    trainer, loop = pl.Trainer(**quiet()), trained_loop
    for parent in parents:
        trainer, loop = getattr(trainer, parent), getattr(loop, parent)
    assert name in dir(trainer), f"Lightning no longer has trainer.{path}, which FabricLoop provides"
    assert hasattr(loop, name), f"FabricLoop has no {path}, which lightning.pytorch.{file} reads"
    source = inspect.getsource(import_module(f"lightning.pytorch.{file}"))
    assert name in source, f"lightning.pytorch.{file} no longer reads {name}, which FabricLoop provides"


def test_private_py_uses_at_most_15_private_names_of_lightning():
    used = {name for name in OF_LIGHTNING if name in inspect.getsource(private)}
    assert used == foreign_names(ast.parse(inspect.getsource(private)))
    assert len(used) <= 15
    assert len(OFFERED) <= 15


def test_the_package_uses_only_allowed_private_names_of_lightning():
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    own = set().union(*map(own_names, trees.values()))
    listed = {*NAMES_OF_OTHERS, *OF_LIGHTNING, *DOCUMENTED}
    unlisted = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, tree in trees.items()
        for name in foreign_names(tree) - own - listed
    }
    assert not unlisted, "Use public names, or add these names with their purpose"


def own_names(tree):
    """Return the names that a file defines: functions, classes, variables and attributes of self."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
    return names


def is_self(node):
    return isinstance(node, ast.Name) and node.id == "self"


def foreign_names(tree):
    """Return the names with an underscore that a file reads from other objects or packages."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            if isinstance(node.args[1], ast.Constant):
                names.add(node.args[1].value)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {alias.name for alias in node.names}
    return {name for name in names if re.fullmatch(r"_[a-zA-Z]\w*", name)}
