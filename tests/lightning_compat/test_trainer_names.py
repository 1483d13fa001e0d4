"""Test that every public attribute of Trainer has the same value on FabricLoop."""

import functools
import tempfile
import warnings

import lightning.pytorch as pl
import pytest
import torch
from both import LOOPS
from lightning.fabric.utilities.exceptions import MisconfigurationException
from modules import Classifier, by_step, make_loader, quiet
from runs import val_loader
from torch import nn

from fabric_template import FabricLoop

CALLS = {"fit", "validate", "test", "predict", "print", "save_checkpoint", "init_module"}
NAMES = sorted(name for name in {*dir(pl.Trainer), *vars(pl.Trainer(**quiet()))} - CALLS if name[0] != "_")

_OWN_CLASS = "FabricLoop uses its own class for this object"
_METRICS = ({"setup"}, "FabricLoop clears the metrics before each call")

# Map each attribute to (hooks in which FabricLoop's value differs from Trainer's, reason). None stands for all hooks.
DIFFERENT = {
    "strategy": (None, _OWN_CLASS),
    "fit_loop": (None, _OWN_CLASS),
    "predict_loop": (None, _OWN_CLASS),
    "validate_loop": (None, _OWN_CLASS),
    "test_loop": (None, _OWN_CLASS),
    "estimated_stepping_batches": (
        None,
        "FabricLoop raises an error before fit, and keeps the value in evaluations after fit",
    ),
    "train_dataloader": (None, "FabricLoop keeps the loader in evaluations after fit"),
    "is_last_batch": (
        None,
        "FabricLoop returns False outside of batches. Trainer keeps the value of the previous epoch",
    ),
    "val_check_batch": (
        None,
        "FabricLoop raises an error before the loader exists. Trainer keeps the value of the previous run",
    ),
    "callback_metrics": _METRICS,
    "logged_metrics": _METRICS,
    "progress_bar_metrics": _METRICS,
}


class Whole(Classifier):
    """A module that defines the step methods of fit, validate, test and predict."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), prog_bar=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


def shown(value):
    """Return a value in a form that can be compared between two runs."""
    if isinstance(value, torch.Tensor | float):
        return float(value)
    if isinstance(value, dict):
        return {name: shown(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [shown(part) for part in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "scheduler"):
        names = ("interval", "frequency", "monitor", "reduce_on_plateau", "strict", "name")
        return [type(value.scheduler).__name__, *(getattr(value, name) for name in names)]
    if hasattr(value, "status"):
        return [part and part.value for part in (value.fn, value.stage, value.status)]
    return type(value).__name__, len(value) if hasattr(value, "__len__") else None


class ReadsAttributes(pl.Callback):
    """A callback that reads every attribute of the loop in every hook."""

    def __init__(self):
        self.seen = {name: [] for name in NAMES}
        self.call = None

    def read(self, trainer, hook):
        for name, seen in self.seen.items():
            try:
                value = shown(getattr(trainer, name))
            except (AttributeError, RuntimeError, MisconfigurationException):
                value = "error"
            seen.append((self.call, hook, value))


def _reading(hook):
    return lambda self, trainer, *args, **kwargs: self.read(trainer, hook)


for _hook in dir(pl.Callback):
    if _hook.startswith("on_") or _hook in ("setup", "teardown"):
        setattr(ReadsAttributes, _hook, _reading(_hook))

OPTIONS = {
    "plain": {"max_epochs": 2},
    "parts": {"max_epochs": 2, "accumulate_grad_batches": 3, "val_check_interval": 0.5, "min_steps": 2, "limit_val_batches": 2},
    "steps": {"max_steps": 7, "max_epochs": -1, "num_sanity_val_steps": 0, "overfit_batches": 3, "gradient_clip_val": 1.0},
    "fast": {"fast_dev_run": 2},
}  # fmt: skip


@functools.cache
def read_both(name):
    """Return {attribute: [(method, hook, value), ...]} of Trainer and of FabricLoop."""
    options, root, sides = OPTIONS[name], tempfile.mkdtemp(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in LOOPS.values():
            pl.seed_everything(1, verbose=False)
            module, reader = Whole(by_step), ReadsAttributes()
            trainer = kind(**quiet(callbacks=[reader], default_root_dir=root, **options))
            reader.read(trainer, "fresh")
            calls = {
                "fit": lambda trainer, module: trainer.fit(module, make_loader(24), [val_loader(), val_loader()]),
                "validate": lambda trainer, module: trainer.validate(module, val_loader(), verbose=False),
                "test": lambda trainer, module: trainer.test(module, make_loader(8, shuffle=False), verbose=False),
                "predict": lambda trainer, module: trainer.predict(module, make_loader(16, shuffle=False)),
            }
            for reader.call, run in calls.items():
                run(trainer, module)
                reader.read(trainer, "after")
            sides.append(reader.seen)
    return sides


@pytest.mark.parametrize("options", OPTIONS)
def test_loop_attributes_have_the_same_values_as_in_trainer_in_every_hook(options):
    """If Trainer gains an attribute, this test fails until FabricLoop has it or the table DIFFERENT lists it."""
    expected, ours = read_both(options)
    for name in NAMES:
        assert [place[:2] for place in expected[name]] == [place[:2] for place in ours[name]], name
        where, reason = DIFFERENT.get(name, (set(), "not listed in DIFFERENT"))
        pairs = [pair for pair in zip(expected[name], ours[name], strict=True) if pair[0] != pair[1]]
        assert where is None or not [pair for pair in pairs if pair[0][1] not in where], (name, reason)


def test_loop_attributes_equal_those_of_trainer_except_for_known_differences():
    expected, ours = read_both("plain")
    different = set(DIFFERENT)
    if not hasattr(pl.Trainer(**quiet()), "val_check_batch"):
        # In Lightning 2.5.0, Trainer also raises an error if val_check_batch is read before fit.
        different.remove("val_check_batch")
    assert {name for name in NAMES if expected[name] != ours[name]} == different


@pytest.mark.parametrize("options", [{}, {"devices": 2, "strategy": "ddp_spawn"}, {"num_nodes": 2}], ids=str)
def test_device_attributes_of_a_new_loop_equal_those_of_a_new_trainer(options):
    names = ("num_devices", "device_ids", "num_nodes", "world_size", "local_rank", "global_rank", "node_rank",
             "is_global_zero", "distributed_sampler_kwargs")  # fmt: skip
    sides = [kind(**quiet(**options)) for kind in LOOPS.values()]
    first, second = ([getattr(side, name) for name in names] for side in sides)
    assert first == second


def test_reading_loop_device_raises_an_error_that_suggests_fabric_device():
    loop = FabricLoop(accelerator="cpu")
    with pytest.raises(AttributeError, match=r"FabricLoop has no attribute 'device'\. Write loop\.fabric\.device\."):
        _ = loop.device
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'\. trainer_api\.py lists"):
        _ = loop.nonsense
