"""Test that FabricLoop and lightning.Trainer resume each other's checkpoints, between and within epochs."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from both import LOOPS
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.pytorch import callbacks as cb
from lightning.pytorch.plugins.precision import MixedPrecision
from modules import Classifier, make_loader, quiet
from runs import same, val_loader
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from fabric_template import FabricLoop

WORD = {"trainer": "ckpt_path", "loop": "resume"}
CKPT = {"enable_checkpointing": True}


def in_order():
    """Return a loader without random numbers, so that a resume does not depend on the loop that saved."""
    return make_loader(shuffle=False)


def by_step(module):
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 3, 0.8), "interval": "step"}}


def by_epoch(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return [optimizer], [StepLR(optimizer, 1, 0.7)]


def plateau(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


class Two(Classifier):
    """Uses two optimizers in manual optimization, one of them with a scheduler per step."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        first, second = self.optimizers()
        for optimizer in (first, second) if batch_idx % 2 else (first,):
            optimizer.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2:
            second.step()
            self.lr_schedulers().step()
        self.log("train_loss", loss)

    def configure_optimizers(self):
        first = torch.optim.Adam(self.net[0].parameters(), lr=0.02)
        second = torch.optim.SGD(self.net[3].parameters(), lr=0.1, momentum=0.9)
        return [first, second], [StepLR(second, 2, 0.8)]


def scaled(kind):
    """Return 16-mixed without a GPU. Its scaler grows every third step, so that the scaler's state matters."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    return {"plugins": (MixedPrecision if kind == "trainer" else FabricMixedPrecision)("16-mixed", "cpu", scaler)}


def automatic(optimizers):
    return lambda: Classifier(optimizers, dropout=0.0)


CASES = {
    "step_scheduler": (automatic(by_step), {}),
    "epoch_scheduler": (automatic(by_epoch), {}),
    "plateau": (automatic(plateau), {}),
    "accumulate": (automatic(by_step), {"accumulate_grad_batches": 3}),
    "two_optimizers": (Two, {}),
    "scaler": (automatic(by_step), {"scaler": True}),
    "no_validation": (automatic(by_epoch), {"limit_val_batches": 0}),
}


class Watch(pl.Callback):
    """Records the progress and the learning rates at each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        rates = [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers]
        self.seen.append((trainer.current_epoch, trainer.global_step, batch_idx, rates))


def run(kind, root, case, make_saver=None, path=None, stops="train", **words):
    """Train with one of the two loops, from scratch or from a file. Return (trainer, module, callbacks).

    `stops` sets when EarlyStopping checks: at the end of the training epoch ("train") or of the validation ("val").
    """
    make_module, more = CASES[case]
    words = {"max_epochs": 4, **more, **words}
    if words.pop("scaler", False):
        words |= scaled(kind)
    root.mkdir(parents=True, exist_ok=True)
    callbacks = [Watch()]
    if "limit_val_batches" not in words:
        look = {"check_on_train_epoch_end": stops == "train"}
        callbacks.append(cb.EarlyStopping("val_loss", patience=2, min_delta=-1.0, **look))
    if make_saver:
        callbacks.append(make_saver(root))
    pl.seed_everything(1, verbose=False)
    module = make_module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = {"default_root_dir": str(root), "callbacks": callbacks, **words}
        if make_saver:
            given |= CKPT
        trainer = LOOPS[kind](**quiet(**given))
        trainer.fit(module, in_order(), val_loader(), **({WORD[kind]: path} if path else {}))
    return trainer, module, callbacks


def end(trainer, module, callbacks):
    """Return the part of a run's final state that does not depend on the loop."""
    scaler = trainer.scaler if isinstance(trainer, FabricLoop) else getattr(trainer.precision_plugin, "scaler", None)
    states = {type(callback).__name__: callback.state_dict() for callback in callbacks[1:2]}
    return {
        "weights": dict(module.state_dict()),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "scaler": scaler and scaler.state_dict(),
        "stands at": (trainer.current_epoch, trainer.global_step),
        "metrics": {name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
        "stopping": states.get("EarlyStopping"),
    }


def assert_same_end(one, other):
    first, second = end(*one), end(*other)
    different = [key for key in first if not same(plain_dict(first[key]), plain_dict(second[key]))]
    assert not different, {key: (first[key], second[key]) for key in different}


def plain_dict(value):
    """Return a scheduler's state without callables, which do not compare equal."""
    if isinstance(value, dict):
        return {key: plain_dict(part) for key, part in value.items() if not callable(part)}
    return [plain_dict(part) for part in value] if isinstance(value, list | tuple) else value


# Trainer 2.4 counts a file from the middle of an epoch differently, and repeats or skips its batches.
exact_trainer = pytest.mark.skipif(pl.__version__.startswith("2.4."), reason="Trainer 2.4 resumes inexactly")

SAVERS = {
    "train_epoch_end": lambda root: cb.ModelCheckpoint(root, filename="file", save_on_train_epoch_end=True),
    "validation_end": lambda root: cb.ModelCheckpoint(root, filename="file", save_on_train_epoch_end=False),
}


@pytest.mark.parametrize("where", SAVERS)
@pytest.mark.parametrize("case", CASES)
def test_at_the_end_of_an_epoch(tmp_path, case, where):
    """2 + 2 epochs by any two loops equal Trainer's 4 bit for bit: weights, optimizers, schedulers, scaler, callbacks.

    A scheduler that follows a metric is the exception. It steps after these hooks, and Trainer does not save the metric.
    Trainer skips this step on resume. FabricLoop skips it with Trainer's files, but not with its own.
    """
    if case == "no_validation" and where == "validation_end":
        pytest.skip("nothing is validated")
    if (case, where) == ("epoch_scheduler", "validation_end") and pl.__version__.startswith("2.4."):
        pytest.skip("Trainer 2.4 resumes this file inexactly")
    stops = {"stops": "val" if where == "validation_end" else "train"}
    crossed = {}
    for first in LOOPS:
        saving = run(first, tmp_path / first, case, SAVERS[where], max_epochs=2, **stops)[2][-1]
        for second in LOOPS:
            root = tmp_path / f"{first}_{second}"
            crossed[first, second] = run(second, root, case, path=saving.best_model_path, **stops)
    whole = run("trainer", tmp_path / "whole", case, **stops)
    for pair, found in crossed.items():
        loses_a_step = case == "plateau" and "trainer" in pair
        expected = crossed["trainer", "trainer"] if loses_a_step else whole
        assert found[2][0].seen == expected[2][0].seen[-20:], pair
        assert_same_end(expected, found)


EVERY_STEP = {"filename": "{step}", "every_n_train_steps": 1, "save_top_k": -1}


@exact_trainer
@pytest.mark.parametrize("step", [4, 10, 12])
@pytest.mark.parametrize("case", [case for case in CASES if case != "accumulate"])
def test_in_the_middle_of_an_epoch(tmp_path, case, step):
    """Epoch, step, learning rate and callbacks continue, whichever loop saves and whichever loop resumes.

    Trainer starts a new pass of the loader, takes the number of batches that were left, and skips the work after the
    last one. FabricLoop does so with Trainer's file, but it steps a scheduler that follows a metric. With its own file
    it trains on exactly the batches that were left, like an uninterrupted run.
    """
    words = {"stops": "val", "max_epochs": 4}
    for kind in LOOPS:
        run(kind, tmp_path / kind, case, lambda root: cb.ModelCheckpoint(root, **EVERY_STEP), stops="val", max_epochs=2)
    ends = {}
    for first in LOOPS:
        for second in LOOPS:
            path = tmp_path / first / f"step={step}.ckpt"
            ends[first, second] = run(second, tmp_path / f"{first}_{second}", case, path=path, **words)
    expected = ends["trainer", "trainer"]
    places = [place[:3] for place in expected[2][0].seen]
    for pair in (("trainer", "loop"), ("loop", "trainer")):
        assert [place[:3] for place in ends[pair][2][0].seen] == places, pair
        if case != "plateau":
            assert ends[pair][2][0].seen == expected[2][0].seen, pair
            assert_same_end(expected, ends[pair])
    whole = run("trainer", tmp_path / "whole", case, **words)
    assert ends["loop", "loop"][2][0].seen == whole[2][0].seen[-len(places) :]
    assert_same_end(whole, ends["loop", "loop"])


def fit_on(kind, make, root, path=None, epochs=2, **words):
    """Train on these loaders. Return (the module, the first number of each batch)."""
    pl.seed_everything(1, verbose=False)
    module, seen = Classifier(dropout=0.0), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop = LOOPS[kind](**quiet(default_root_dir=str(root), max_epochs=epochs, **words))
        module.on_train_batch_start = lambda batch, batch_idx: seen.append(batch[0][0, 0].item())
        loop.fit(module, make(), **({WORD[kind]: path} if path else {}))
    return module, seen


@exact_trainer
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("step", [4, 12])
def test_the_rest_of_a_shuffled_epoch(tmp_path, step, workers):
    """Trainer's file has no random numbers. Both loops draw the same new ones."""
    make = lambda: make_loader(num_workers=workers)  # noqa: E731
    words = {"enable_checkpointing": True, "callbacks": [cb.ModelCheckpoint(tmp_path, **EVERY_STEP)]}
    fit_on("trainer", make, tmp_path, **words)
    (one, expected), (other, found) = (
        fit_on(second, make, tmp_path / second, tmp_path / f"step={step}.ckpt") for second in ("trainer", "loop")
    )
    assert found == expected
    assert same(dict(one.state_dict()), dict(other.state_dict()))
