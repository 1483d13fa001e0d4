"""Test that options set on a loop between runs and in hooks take effect, as with Trainer."""

from contextlib import nullcontext
from operator import attrgetter

import lightning.pytorch as pl
import pytest
import torch
from both import LOOPS
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import GradClipAlgorithmType
from modules import Classifier, assert_same_weights, make_loader, quiet

from fabric_template import FabricLoop
from fabric_template.errors import ConfigurationError


class RecordsEvents(BoringModel):
    """A module that records the step of each validation and each call to train_dataloader."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def train_dataloader(self):
        self.seen.append("loader")
        return super().train_dataloader()

    def on_validation_start(self):
        self.seen.append(self.trainer.global_step)

    def training_step(self, batch, batch_idx):
        self.log("x", float(batch_idx))
        return super().training_step(batch, batch_idx)


def make_loop(kind, tmp_path, **options):
    pl.seed_everything(1, verbose=False)
    limits = {"max_epochs": 3, "limit_train_batches": 4, "limit_val_batches": 2}
    return kind(**quiet(**{"accelerator": "cpu", "default_root_dir": str(tmp_path), **limits, **options}))


def assert_same(sides):
    (theirs, first), (ours, second) = sides
    assert first.seen == second.seen
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
    for name in ("global_step", "current_epoch", "num_training_batches", "num_val_batches", "accumulate_grad_batches"):
        assert getattr(theirs, name) == getattr(ours, name), name


@pytest.mark.parametrize(
    ("hook", "name", "value"),
    [
        (None, "limit_train_batches", 2),
        (None, "limit_val_batches", 0),
        (None, "val_check_interval", 2),
        (None, "accumulate_grad_batches", 2),
        (None, "num_sanity_val_steps", 0),
        ("on_fit_start", "limit_train_batches", 2),
        ("on_train_start", "check_val_every_n_epoch", 2),
        ("on_train_start", "reload_dataloaders_every_n_epochs", 1),
        ("on_train_batch_start", "gradient_clip_val", 0.001),
        ("on_train_epoch_start", "accumulate_grad_batches", 2),
    ],
)
def test_an_option_set_before_fit_or_in_a_hook_takes_effect(hook, name, value, tmp_path):
    sides = []
    for kind in LOOPS.values():
        hooks = {} if hook is None else {hook: lambda self, trainer, *rest: setattr(trainer, name, value)}
        trainer, module = make_loop(kind, tmp_path, callbacks=[type("Sets", (Callback,), hooks)()]), RecordsEvents()
        if hook is None:
            setattr(trainer, name, value)
        trainer.fit(module)
        assert getattr(trainer, name) == value
        sides.append((trainer, module))
    assert_same(sides)


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_train_batch_end"])
@pytest.mark.parametrize(
    ("name", "value", "options"),
    [
        ("val_check_interval", 2, {}),
        ("val_check_interval", 0.5, {"reload_dataloaders_every_n_epochs": 2}),
        ("limit_val_batches", 2, {"limit_val_batches": 0}),
    ],
)
def test_a_validation_option_set_in_a_hook_takes_effect_as_with_trainer(hook, name, value, options, tmp_path):
    """Trainer uses a changed val_check_interval only after it has reloaded the training loader."""
    sides = []
    for kind in LOOPS.values():
        hooks = {hook: lambda self, trainer, *rest: setattr(trainer, name, value)}
        sets = [type("Sets", (Callback,), hooks)()]
        trainer, module = make_loop(kind, tmp_path, callbacks=sets, max_epochs=5, **options), RecordsEvents()
        trainer.fit(module)
        sides.append((trainer, module))
    assert_same(sides)


def test_a_resumed_run_keeps_the_val_check_interval_that_a_hook_has_set(tmp_path):
    """The hook sets val_check_interval in epoch 0. The loader is reloaded in epoch 2, where the run is interrupted."""

    class Sets(Callback):
        def on_train_start(self, trainer, module):
            if trainer.global_step == 0:
                trainer.val_check_interval = 2

    class Stops(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == step:
                raise ZeroDivisionError

    def train(root, *callbacks, **arguments):
        options = {"save_every_n_steps": 1, "enable_checkpointing": True, "reload_dataloaders_every_n_epochs": 2}
        loop = make_loop(
            FabricLoop, root, callbacks=[Sets(), *callbacks], max_epochs=4, num_sanity_val_steps=0, **options
        )
        loop.fit(module := RecordsEvents(), **arguments)
        return module

    whole = train(tmp_path / "whole")
    assert [event for event in whole.seen if event != "loader"] == [4, 8, 10, 12, 14, 16]
    for step in (2, 10):
        root = tmp_path / str(step)
        with pytest.raises(ZeroDivisionError):
            train(root, Stops())
        resumed = train(root, resume="last")
        # A resumed run also restores module.seen, so the list contains the events of both runs.
        assert [event for event in resumed.seen if event != "loader"] == [4, 8, 10, 12, 14, 16]
        assert_same_weights(whole, resumed)


def test_an_attribute_setter_refuses_the_same_values_as_the_constructor():
    loop = FabricLoop(**quiet())
    with pytest.raises(ConfigurationError, match="limit_val_batches: got 1.5"):
        loop.limit_val_batches = 1.5
    assert loop.limit_val_batches == 1.0
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches: got 0"):
        loop.accumulate_grad_batches = 0
    assert loop.accumulate_grad_batches == 1


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"monitor": "val_loss"}, "save_top_k", 3),
        ({"val_check_interval": 7}, "check_val_every_n_epoch", None),
        ({"max_epochs": 5}, "max_epochs", None),
        ({"validate_every_n_steps": 3}, "max_steps", 9),
        ({"barebones": True}, "max_epochs", 2),
        ({"check_val_every_n_epoch": None}, "max_steps", 5),
        ({"fast_dev_run": True}, "limit_val_batches", 3),
        ({}, "validate_every_n_steps", 4),
    ],
    ids=str,
)
def test_an_attribute_setter_accepts_a_value_that_the_constructor_would_accept(given, name, value):
    loop = FabricLoop(**quiet(**given))
    setattr(loop, name, value)
    assert getattr(loop.config, name) == value
    assert FabricLoop(**quiet(**{**given, name: value})).config == loop.config or "fast_dev_run" in given


@pytest.mark.parametrize(
    ("given", "name", "value", "message"),
    [
        ({}, "save_top_k", 3, "save_top_k: got 3 without monitor"),
        ({"monitor": "val_loss", "save_top_k": 2}, "monitor", None, "monitor: got None for an existing loop"),
        ({"val_check_interval": 0.5}, "check_val_every_n_epoch", None, "should be an integer or a time-based"),
        ({"val_check_interval": 3}, "validate_every_n_steps", 2, "expected only one of the two"),
        ({"barebones": True}, "log_every_n_steps", 5, "barebones=True, log_every_n_steps=5"),
        ({}, "name", "other", "name: got 'other' for an existing loop"),
        ({}, "version", 3, r"Write FabricLoop\(version=3\)"),
    ],
    ids=str,
)
def test_an_attribute_setter_refuses_values_that_contradict_other_options(given, name, value, message):
    loop = FabricLoop(**quiet(**given))
    before = loop.config
    with pytest.raises(ConfigurationError, match=message):
        setattr(loop, name, value)
    assert loop.config == before


READ_ONLY = ["current_epoch", "global_step", "is_last_batch", "num_val_batches", "callback_metrics", "world_size"]


@pytest.mark.parametrize("name", [*READ_ONLY, "val_check_batch", "datamodule", "validating"])
def test_attributes_that_the_loop_computes_are_read_only(name):
    """Trainer allows setting three of the tested attributes. In FabricLoop, new values would have no effect."""
    loop = FabricLoop(**quiet())
    before = getattr(loop, name)
    with pytest.raises(AttributeError, match=f"FabricLoop.{name}: got 5, but this attribute is read-only"):
        setattr(loop, name, 5)
    assert getattr(loop, name) == before
    with pytest.raises(AttributeError) if name in READ_ONLY else nullcontext():
        setattr(pl.Trainer(**quiet()), name, 5)


@pytest.mark.parametrize("value", [GradClipAlgorithmType.VALUE, GradClipAlgorithmType.NORM])
@pytest.mark.parametrize("is_set", [False, True])
def test_the_clipping_algorithm_can_be_an_enum_as_in_trainer(value, is_set):
    """Trainer stores gradient_clip_algorithm as an enum."""
    modules = []
    for kind in LOOPS.values():
        pl.seed_everything(1, verbose=False)
        options = {} if is_set else {"gradient_clip_algorithm": value}
        trainer = kind(**quiet(max_steps=4, gradient_clip_val=0.01, **options))
        if is_set:
            trainer.gradient_clip_algorithm = value
        trainer.fit(module := Classifier(), make_loader())
        assert trainer.gradient_clip_algorithm == value
        modules.append(module)
    assert_same_weights(*modules)


@pytest.mark.parametrize(("place", "name"), [("fit_loop", "min_epochs"), ("fit_loop.epoch_loop", "min_steps")])
def test_a_hook_can_set_min_epochs_and_min_steps_as_in_trainer(place, name):
    ends = []
    for kind in LOOPS.values():

        class Sets(Callback):
            def on_train_start(self, trainer, module):
                setattr(attrgetter(place)(trainer), name, 3)
                trainer.should_stop = True

        trainer = kind(**quiet(max_epochs=5, limit_train_batches=2, callbacks=[Sets()]))
        trainer.fit(Classifier(), make_loader())
        ends.append((trainer.current_epoch, trainer.global_step))
    assert ends[0] == ends[1]
    assert ends[0][1] >= 3


def test_validate_every_n_steps_can_be_changed_between_two_calls_to_fit(tmp_path):
    loop, module = make_loop(FabricLoop, tmp_path, num_sanity_val_steps=0), RecordsEvents()
    loop.validate_every_n_steps = 3
    loop.fit(module)
    assert module.seen == ["loader", 3, 6, 9, 12]
    loop.validate_every_n_steps = None
    loop.fit(again := RecordsEvents())
    assert again.seen == ["loader", 4, 8, 12]


def test_setting_max_epochs_to_none_in_a_hook_restores_the_default(tmp_path):
    """max_epochs=None means 1000 epochs, or no limit if max_steps is set."""

    class Sets(Callback):
        def on_train_start(self, trainer, module):
            trainer.max_epochs = None

    loop = make_loop(FabricLoop, tmp_path, callbacks=[Sets()], max_epochs=1, max_steps=7)
    loop.fit(BoringModel())
    assert (loop.global_step, loop.max_epochs) == (7, -1)


def test_save_top_k_can_be_changed_in_a_hook(tmp_path):
    class Sets(Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                trainer.save_top_k = -1

    class Falls(BoringModel):
        def on_validation_epoch_end(self):
            self.log("x", 1.0 / (1 + self.trainer.global_step))

    options = {"callbacks": [Sets()], "monitor": "x", "mode": "min", "enable_checkpointing": True}
    make_loop(FabricLoop, tmp_path, **options).fit(Falls())
    names = sorted(path.name for path in tmp_path.rglob("*.ckpt"))
    assert names == ["best.ckpt", "epoch=1-step=8-x=0.1111.ckpt", "epoch=2-step=12-x=0.07692.ckpt", "last.ckpt"]


def test_a_hook_cannot_change_val_check_interval_to_a_duration(tmp_path):
    class Sets(Callback):
        def on_train_start(self, trainer, module):
            trainer.val_check_interval = "00:00:00:01"

    options = {"reload_dataloaders_every_n_epochs": 1, "num_sanity_val_steps": 0}
    loop = make_loop(FabricLoop, tmp_path, callbacks=[Sets()], max_epochs=2, **options)
    with pytest.raises(ConfigurationError, match="val_check_interval: got '00:00:00:01' in a hook"):
        loop.fit(RecordsEvents())
