"""Test state that cannot be pickled, and a changed number of schedulers."""

import threading

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from modules import Classifier, assert_same_weights
from runs import fit
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler

from fabric_template.checkpoint.checkpoint_io import read_checkpoint
from fabric_template.errors import CheckpointError

LAST = "checkpoints/run/version_0/last.ckpt"


class WithHyperparameters(Classifier):
    def __init__(self, **values):
        super().__init__()
        self.save_hyperparameters()
        # save_hyperparameters() copies its values, but some of these values cannot be copied, so add them later.
        self.hparams.update(late_values())


def late_values():
    class Local:
        pass

    return {
        "function": lambda x: x,
        "nested": {"lock": threading.Lock(), "size": 3, "deep": {"generator": iter_once(), "a": 1}},
        "list": [1, lambda x: x],
        "object": Local(),
    }


def iter_once():
    yield 1


def test_hyperparameters_that_cannot_be_pickled_are_dropped_with_one_warning(tmp_path):
    make = lambda: WithHyperparameters(rate=0.1)  # noqa: E731
    epochs = []

    class Watch(Callback):
        def on_train_start(self, trainer, module):
            epochs.append(len(recorded))

    names = "'function', 'nested/lock', 'nested/deep/generator', 'list', 'object' cannot be pickled"
    with pytest.warns(UserWarning, match=names) as recorded:
        _, module, _ = fit(tmp_path, make, max_epochs=2, callbacks=[Watch()])
    assert [names in str(warning.message) for warning in recorded].count(True) == 1
    # The warning must come before the first epoch.
    assert epochs[0] >= 1
    saved = read_checkpoint(tmp_path / LAST)["hyper_parameters"]
    assert saved == {"rate": 0.1, "nested": {"size": 3, "deep": {"a": 1}}}
    assert module.hparams["function"](3) == 3
    with pytest.warns(UserWarning, match="cannot be pickled"):
        resumed = fit(tmp_path, make, max_epochs=3, resume="last")[1]
    with pytest.warns(UserWarning, match="cannot be pickled"):
        whole = fit(tmp_path / "whole", make, max_epochs=3)[1]
    assert_same_weights(resumed, whole)


def test_fit_without_checkpoints_does_not_warn_about_unpicklable_hyperparameters(tmp_path, recwarn):
    make = lambda: WithHyperparameters(rate=0.1)  # noqa: E731
    fit(tmp_path, make, max_epochs=1, enable_checkpointing=False)
    assert not [warning for warning in recwarn if "cannot be pickled" in str(warning.message)]


class OwnScheduler(LRScheduler):
    """A scheduler with a function in its state_dict()."""

    def __init__(self, optimizer, function):
        self.function = function
        super().__init__(optimizer)

    def get_lr(self):
        return [self.function(rate) for rate in self.base_lrs]


def with_lambda(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return [optimizer], [OwnScheduler(optimizer, lambda rate: rate / 2)]


def group_with_lambda(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.param_groups[0]["rule"] = lambda x: x
    return optimizer


@pytest.mark.parametrize(
    ("optimizers", "place"),
    [(with_lambda, "lr_schedulers/0/function"), (group_with_lambda, "optimizers/0/0/rule")],
)
def test_an_optimizer_or_scheduler_that_cannot_be_pickled_is_refused(tmp_path, optimizers, place):
    seen = []

    class Watch(Callback):
        def on_train_start(self, trainer, module):
            seen.append(trainer)

    with pytest.raises(CheckpointError, match=f"{place}: got a value that cannot be pickled"):
        fit(tmp_path, lambda: Classifier(optimizers), max_epochs=1, callbacks=[Watch()])
    assert seen == []
    options = {"max_epochs": 1, "enable_checkpointing": False}
    assert fit(tmp_path, lambda: Classifier(optimizers), **options)[0].current_epoch == 1


class Keeps(Callback):
    """A callback whose state cannot be pickled from epoch ``since`` on."""

    def __init__(self, since=0):
        self.epoch, self.since = 0, since

    def on_train_epoch_start(self, trainer, module):
        self.epoch = trainer.current_epoch

    def state_dict(self):
        is_due = self.epoch >= self.since
        return {"epoch": self.epoch, "inside": [threading.Lock() if is_due else 0]}


class AddsLock(Classifier):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = {"a": 1, "lock": threading.Lock()}


@pytest.mark.parametrize(
    ("make", "callbacks", "part"),
    [(Classifier, [Keeps()], "callbacks/Keeps/inside/0"), (AddsLock, [], "mine/lock")],
)
def test_an_error_names_the_saved_value_that_cannot_be_pickled(tmp_path, make, callbacks, part):
    with pytest.raises(CheckpointError, match=f"the part '{part}' of the checkpoint cannot be pickled"):
        fit(tmp_path, make, max_epochs=3, callbacks=callbacks)


def test_training_continues_if_the_second_checkpoint_cannot_be_saved(tmp_path):
    warned = pytest.warns(UserWarning, match="could not be saved: .*cannot pickle")
    with warned, pytest.raises(CheckpointError, match="Training ended"):
        fit(tmp_path, max_epochs=3, callbacks=[Keeps(since=1)])
    assert read_checkpoint(tmp_path / LAST)["epoch"] == 0


# Resuming with a different number of schedulers


def scheduled(*kinds):
    def make(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return [optimizer], [kind(optimizer, 0.9) for kind in kinds]

    return lambda: Classifier(make)


@pytest.mark.parametrize("kinds", [(), (ExponentialLR, ExponentialLR)])
def test_resume_warns_if_the_number_of_schedulers_changed(tmp_path, kinds):
    fit(tmp_path, scheduled(ExponentialLR), max_epochs=1)
    with pytest.warns(
        UserWarning, match=f"resume: the checkpoint has the states of 1 lr_schedulers, but this run has {len(kinds)}"
    ):
        fit(tmp_path, scheduled(*kinds), max_epochs=2, resume="last")
