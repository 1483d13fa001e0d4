"""Test weights, files, resumed runs and errors of MiniLoop, and mini.py as a single file."""

import enum
import itertools
import math
import os
import random
import signal
import subprocess
import sys
import types
import warnings
from collections import Counter, UserDict, defaultdict, deque
from dataclasses import dataclass, make_dataclass
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytest
import torch
import torchmetrics
from interpreter import fork_command
from modules import Classifier, assert_same_weights, by_epoch, by_step, make_data, make_loader, run_trainer, sgd
from parameters import halve, once
from processes import run_processes
from runs import Plain, same, val_loader
from test_parity_plain import CASES as PLAIN
from test_parity_plain import EPOCHS, LEVELS, loss_of, make_net, plain
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import fabric_template.mini
from fabric_template import FabricLoop, MiniLoop, TensorLoader, list_runs

FILE = Path(fabric_template.mini.__file__)
QUIET = {"enable_progress_bar": False, "enable_model_summary": False}
LOOPS = {"MiniLoop": (MiniLoop, {}), "FabricLoop": (FabricLoop, QUIET)}


def run_mini(
    make_module=Classifier, make_train=make_loader, make_val=None, seed=1, fit=None, loop_class=MiniLoop, **options
):
    pl.seed_everything(seed, verbose=False)
    module = make_module()
    loop = loop_class(accelerator="cpu", **options)
    loop.fit(module, make_train(), make_val() if make_val else None, **(fit or {}))
    return loop, module


# MiniLoop's weights and metrics, compared with those of a hand-written loop and of Trainer


@pytest.mark.parametrize(("case", "level"), once(sorted(PLAIN.keys() - {"clipped_by_value"}), LEVELS))
def test_mini_loop_ends_with_the_same_weights_as_a_hand_written_loop(case, level):
    plain_options, make_optimizer, options = PLAIN[case]
    torch.manual_seed(1)
    expected = make_net()
    plain(expected, make_loader(40), **plain_options)
    random_after = torch.rand(4)

    torch.manual_seed(1)
    net = make_net()
    loop = MiniLoop(max_epochs=EPOCHS, accelerator="cpu", **options)
    if level == "functions":
        loop.fit(net, make_loader(40), optimizer=make_optimizer(net), training_step=loss_of)
    else:
        loop.fit(LEVELS[level](net, make_optimizer), make_loader(40))
    assert_same_weights(expected, net)
    assert torch.equal(torch.rand(4), random_after)
    steps = 12 if case == "accumulated" else 30
    assert (loop.current_epoch, loop.global_step) == (EPOCHS, steps)


def test_mini_loop_can_stop_at_max_steps_within_an_epoch_of_a_tensor_loader():
    x, y = make_data(40).tensors
    torch.manual_seed(1)
    expected = make_net(dropout=0.0)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    torch.manual_seed(2)
    batches = [batch for _ in range(2) for batch in TensorLoader(x, y, batch_size=4, shuffle=True)]
    for inputs, labels in batches[:13]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(expected(inputs), labels).backward()
        optimizer.step()
    torch.manual_seed(1)
    net = make_net(dropout=0.0)
    torch.manual_seed(2)
    loop = MiniLoop(max_steps=13, accelerator="cpu")
    arguments = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "training_step": loss_of}
    history = loop.fit(net, TensorLoader(x, y, batch_size=4, shuffle=True), **arguments)
    assert_same_weights(expected, net)
    assert history["step"].tolist() == [10, 13]


def plateau(module):
    optimizer = sgd(module)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


def every_second_epoch(module):
    optimizer = sgd(module)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return [optimizer], [{"scheduler": scheduler, "frequency": 2}]


class Stream(IterableDataset):
    """A stream without a length."""

    def __iter__(self):
        yield from make_data(22)


class Hooked(Classifier):
    """A model that logs in hooks and with torchmetrics, and records the order of the hooks."""

    def __init__(self, optimizers=by_epoch):
        super().__init__(optimizers)
        self.accuracy = torchmetrics.MeanMetric()
        self.order = []
        # MiniLoop must also call a hook that is assigned to the instance.
        self.on_train_end = lambda: self.order.append("on_train_end")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.accuracy(loss.detach())
        self.log("mean", self.accuracy, on_step=False, on_epoch=True)
        self.log_dict({"double": 2 * loss}, on_step=True, on_epoch=True)
        return {"loss": loss}

    def on_validation_epoch_end(self):
        self.order.append("on_validation_epoch_end")
        if not self.trainer.sanity_checking:
            self.log("val_twice", self.trainer.callback_metrics["val_loss"] * 2)

    def on_train_epoch_end(self):
        self.order.append("on_train_epoch_end")
        self.log("epoch_times_two", float(2 * self.current_epoch))


for _name in ("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end"):
    setattr(Hooked, _name, lambda self, *args, name=_name: self.order.append(name))

TRAINER = {
    "no_length": (lambda: Classifier(by_epoch), {"accumulate_grad_batches": 4}),
    "sgd": (Classifier, {}),
    "by_step": (lambda: Classifier(by_step), {}),
    "by_epoch": (lambda: Classifier(by_epoch), {"accumulate_grad_batches": 3}),
    "every_second_epoch": (lambda: Classifier(every_second_epoch), {"gradient_clip_val": 0.1}),
    "plateau": (lambda: Classifier(plateau), {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05}),
    "hooks": (Hooked, {}),
    "bf16_mixed": (Classifier, {"precision": "bf16-mixed"}),
    "bf16_true": (Classifier, {"precision": "bf16-true"}),
    "64_true": (Classifier, {"precision": "64-true"}),
}


@pytest.mark.parametrize("case", TRAINER)
def test_mini_loop_gives_the_same_weights_and_metrics_as_trainer(case):
    make_module, options = TRAINER[case]
    make_train = (lambda: DataLoader(Stream(), batch_size=4)) if case == "no_length" else make_loader
    options = {"max_epochs": 4, **options}
    trainer, expected = run_trainer(make_module, make_train, val_loader, num_sanity_val_steps=0, **options)
    loop, module = run_mini(make_module, make_train, val_loader, **options)
    assert_same_weights(expected, module)
    assert (trainer.current_epoch, trainer.global_step) == (loop.current_epoch, loop.global_step)
    metrics = {n: v for n, v in trainer.callback_metrics.items() if not n.endswith(("_step", "_epoch"))}
    assert sorted(metrics) == sorted(loop.callback_metrics)
    assert [n for n, v in metrics.items() if not torch.equal(v, loop.callback_metrics[n])] == []
    if case == "hooks":
        assert module.order == expected.order


def test_mini_loop_writes_the_same_csv_rows_as_fabric_loop():
    for module in (Classifier, Hooked, Plain):
        rows = [fit(kind, kind, 2, make_module=module)[2] for kind in LOOPS]
        pd.testing.assert_frame_equal(*rows, check_exact=True)


# Files of MiniLoop runs, and resumed runs


def fit(kind, name, epochs, resume=None, make_module=lambda: Classifier(by_epoch), loop_class=None, **options):
    pl.seed_everything(4, verbose=False)
    module = make_module()
    known_class, quiet = LOOPS[kind]
    loop_class = loop_class or known_class
    given = {"accelerator": "cpu", "name": name, "seed": 3, "monitor": "val_loss", "log_every_n_steps": 4}
    loop = loop_class(**{**given, "max_epochs": epochs, **quiet, **options})
    history = loop.fit(module, make_loader(), val_loader(), resume=resume)
    return loop, module, history.drop(columns=["time", "waiting"], errors="ignore")


def csv_of(name, file):
    return pd.read_csv(f"logs/{name}/version_0/{file}").drop(columns=["time", "waiting"], errors="ignore")


def test_a_run_resumed_after_two_epochs_matches_an_uninterrupted_run():
    _, expected, rows = fit("MiniLoop", "whole", 4)
    fit("MiniLoop", "parts", 2)
    _, module, again = fit("MiniLoop", "parts", 4, resume="last")
    assert_same_weights(expected, module)
    pd.testing.assert_frame_equal(again, rows)
    for file in ("metrics.csv", "steps.csv"):
        pd.testing.assert_frame_equal(csv_of("whole", file), csv_of("parts", file))
    assert csv_of("whole", "steps.csv")["step"].tolist() == list(range(4, 41, 4))
    best = torch.load("checkpoints/parts/version_0/best.ckpt", weights_only=True)
    assert best["epoch"] == rows["val_loss"].idxmin()
    files = sorted(path.name for path in Path().rglob("*.*") if "parts" in path.parts)
    tables = ["metrics.csv", "steps.csv"]
    assert files == [".lock", ".lock", "best.ckpt", "config.yaml", "hparams.yaml", "last.ckpt", *tables]
    assert list_runs("logs")["state"].tolist() == ["finished", "finished"]


def test_restarting_a_finished_run_prints_that_the_run_is_finished(capsys):
    fit("MiniLoop", "run", 2)
    assert "finished run" not in capsys.readouterr().err
    _, _, rows = fit("MiniLoop", "run", 2, resume="auto")
    message = "last.ckpt is from a finished run. Nothing is left to train."
    assert message in capsys.readouterr().err
    assert len(rows) == 2
    fit("MiniLoop", "run", 3, resume="auto")
    assert "finished run" not in capsys.readouterr().err


def test_mini_loop_reads_no_batches_if_a_resumed_run_is_finished():
    reads = []

    class Counted(torch.utils.data.IterableDataset):
        def __iter__(self):
            for x, y in make_data(20):
                reads.append(x)
                yield x, y

    for resume in (None, "last"):
        loop = MiniLoop(max_steps=3, accelerator="cpu")
        loop.fit(Plain(), DataLoader(Counted(), 4), resume=resume)
        # MiniLoop reads a batch in advance, so three steps read four batches of four samples.
        assert len(reads) == 16


@pytest.mark.parametrize(("before", "after"), [("MiniLoop", "FabricLoop"), ("FabricLoop", "MiniLoop")])
def test_mini_loop_and_fabric_loop_can_resume_each_others_runs(before, after):
    _, expected, rows = fit("MiniLoop", "whole", 4)
    fit(before, "parts", 2)
    _, module, again = fit(after, "parts", 4, resume="last")
    assert_same_weights(expected, module)
    pd.testing.assert_frame_equal(again, rows)
    assert os.listdir("logs/parts") == os.listdir("checkpoints/parts") == ["version_0"]
    pd.testing.assert_frame_equal(csv_of("whole", "metrics.csv"), csv_of("parts", "metrics.csv"))
    loaded = Classifier.load_from_checkpoint("checkpoints/parts/version_0/last.ckpt", weights_only=True)
    assert_same_weights(module, loaded)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    halve([by_epoch, by_step], [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.1}]),
)
def test_trainer_resumes_from_a_mini_loop_checkpoint_saved_at_the_end_of_an_epoch(optimizer, options):
    def train(epochs, path=None):
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", num_sanity_val_steps=0, **quiet, **options)
        module = make_module()
        trainer.fit(module, make_loader(shuffle=False), val_loader(), ckpt_path=path)
        return trainer, module

    def make_module():
        """Return a module without dropout, because Trainer restores no RNG state."""
        pl.seed_everything(4, verbose=False)
        module = Classifier(optimizer)
        for part in module.modules():
            part.p = 0.0
        return module

    MiniLoop(max_epochs=2, accelerator="cpu", **options).fit(make_module(), make_loader(shuffle=False), val_loader())
    expected, module = train(4)
    trainer, continued = train(4, "checkpoints/run/version_0/last.ckpt")
    assert_same_weights(module, continued)
    assert (trainer.current_epoch, trainer.global_step) == (expected.current_epoch, expected.global_step)


class Moves(Plain):
    """An object whose loss depends on an attribute that each step changes."""

    scale = 1.0

    def training_step(self, batch):
        self.scale = self.scale * 0.9
        return super().training_step(batch) * self.scale


class Freezes(Classifier):
    """A model that freezes a layer and turns off dropout at the start of the second epoch."""

    def on_train_epoch_start(self):
        if self.trainer.current_epoch == 1:
            self.net[0].requires_grad_(False)
            self.net[2].eval()


@pytest.mark.parametrize(("before", "after", "make_module"), halve(LOOPS, LOOPS, [Moves, Freezes]))
def test_resume_restores_model_attributes_that_the_saved_run_changed(before, after, make_module):
    _, expected, rows = fit("FabricLoop", "whole", 4, make_module=make_module)
    fit(before, "parts", 2, make_module=make_module)
    _, module, again = fit(after, "parts", 4, resume="last", make_module=make_module)
    parts = [(part.net if isinstance(part, Plain) else part) for part in (expected, module)]
    assert_same_weights(*parts)
    pd.testing.assert_frame_equal(again[rows.columns], rows)


class Counts(torch.utils.data.TensorDataset):
    """A dataset that counts its reads in an attribute."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


def test_mini_loop_refuses_a_checkpoint_that_contains_attributes_of_a_loader():
    def train(kind, epochs, resume=None):
        known_class, options = LOOPS[kind]
        loop = known_class(max_epochs=epochs, accelerator="cpu", **options)
        loop.fit(Classifier(), DataLoader(Counts(*make_data(20).tensors), 4), resume=resume)

    train("FabricLoop", 1)
    with pytest.raises(
        ValueError, match=r"resume: got a checkpoint in which FabricLoop saved .* attributes of loaders"
    ):
        train("MiniLoop", 2, resume="last")
    train("FabricLoop", 2, resume="last")


class Continues:
    """A loader whose iterator continues in the next epoch."""

    def __init__(self):
        self.batches = itertools.cycle(DataLoader(make_data(40), 8))

    def __iter__(self):
        return itertools.islice(self.batches, 3)


@pytest.mark.filterwarnings("ignore:(train_dataloaders|checkpoint).* iterator")
def test_mini_loop_refuses_to_resume_a_fabric_loop_run_whose_loader_has_an_iterator():
    def train(kind, epochs, resume=None):
        known_class, options = LOOPS[kind]
        loop = known_class(max_epochs=epochs, accelerator="cpu", **options)
        loop.fit(Classifier(), Continues(), resume=resume)

    train("FabricLoop", 1)
    with pytest.raises(ValueError, match="resume: got a checkpoint in which FabricLoop saved .* iterators"):
        train("MiniLoop", 2, resume="last")


class HasContainers(torch.nn.Module):
    """The output depends on containers in attributes, and on a buffer outside of state_dict()."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 3)
        self.register_buffer("bank", torch.zeros(8), persistent=False)
        self.counts, self.sums = Counter(), defaultdict(float)
        self.state = {"seen": deque(maxlen=2), "mean": np.zeros(8, np.float32), "ids": {(0, 1)}}

    def forward(self, x):
        state = self.state
        if self.training:
            self.bank = 0.9 * self.bank + 0.1 * x.mean(0)
            self.counts.update(x.argmax(1).tolist())
            self.sums["batches"] += 1.0
            state["seen"].append(x.mean(0))
            state["mean"] += x.mean(0).numpy()
            state["ids"].add((len(state["ids"]), 2))
        shift = sum(state["seen"], self.bank) + torch.from_numpy(state["mean"].copy())
        scale = self.counts[1] + len(state["ids"]) + self.sums["batches"]
        return self.net(x + 0.01 * shift) * (1 + 0.001 * scale)


@pytest.mark.parametrize("reader", LOOPS)
@pytest.mark.parametrize("writer", LOOPS)
def test_both_loops_restore_containers_such_as_deques_and_sets(writer, reader):
    def train(kind, epochs, name, resume=None):
        torch.manual_seed(1)
        net = HasContainers()
        known_class, options = LOOPS[kind]
        loop = known_class(max_epochs=epochs, name=name, accelerator="cpu", **options)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        loop.fit(net, DataLoader(make_data(20), 4), optimizer=optimizer, training_step=loss_of, resume=resume)
        return net

    whole = train("FabricLoop", 3, "whole")
    train(writer, 1, "parts")
    train(reader, 2, "parts", "last")
    found = train(writer, 3, "parts", "last")
    assert same(found.state_dict(), whole.state_dict())
    assert (found.counts, found.sums) == (whole.counts, whole.sums)


class ChangesOptions(Classifier):
    """A model that changes options of its loop in the second epoch. With ``fails``, the third epoch fails."""

    fails = False

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.trainer.gradient_clip_val, self.trainer.accumulate_grad_batches = 0.05, 2
            self.trainer.max_epochs = 5
        if self.current_epoch == 2 and self.fails:
            raise ZeroDivisionError


@pytest.mark.parametrize("reader", LOOPS)
@pytest.mark.parametrize("writer", LOOPS)
def test_resume_restores_loop_options_that_a_hook_set_before_the_checkpoint(writer, reader):
    def train(kind, name, fails=False, resume=None):
        torch.manual_seed(1)
        module = ChangesOptions()
        module.fails = fails
        known_class, options = LOOPS[kind]
        loop = known_class(max_epochs=3, name=name, accelerator="cpu", **options)
        try:
            loop.fit(module, make_loader(), resume=resume)
        except ZeroDivisionError:
            assert fails
        return module, loop.current_epoch

    whole, epochs = train("FabricLoop", "whole")
    train(writer, "parts", fails=True)
    module, found = train(reader, "parts", resume="last")
    assert found == epochs == 5
    assert_same_weights(whole, module)


def test_a_run_with_mid_epoch_validations_resumes_exactly_after_stopping_at_max_steps():
    """The run writes a row to metrics.csv after steps 7, 14 and 21 and at its end."""
    options = {"validate_every_n_steps": 7, "max_epochs": -1}
    _, expected, rows = fit("MiniLoop", "whole", -1, max_steps=24, **{**options})
    assert rows["step"].tolist() == [7, 14, 21, 24]
    assert rows["val_loss"].isna().tolist() == [False, False, False, True]
    fit("MiniLoop", "parts", -1, max_steps=14, **options)
    _, module, again = fit("MiniLoop", "parts", -1, max_steps=24, resume="last", **options)
    assert_same_weights(expected, module)
    pd.testing.assert_frame_equal(again, rows)


@pytest.mark.parametrize("options", [{"validate_every_n_steps": 4}, {"max_steps": 14}])
def test_mini_loop_refuses_torchmetrics_objects_together_with_max_steps(options):
    message = "log: got the torchmetrics object 'mean' together with validate_every_n_steps or max_"
    with pytest.raises(ValueError, match=message):
        fit("MiniLoop", "run", 2, make_module=Hooked, **options)


@pytest.mark.parametrize("value", [None, [1.0, 2.0], "high"], ids=str)
@pytest.mark.parametrize("options", [{}, {"on_epoch": True}, {"on_step": False, "on_epoch": True}], ids=str)
def test_mini_loop_refuses_to_log_a_list_a_string_or_none(value, options):
    class Module(Plain):
        def training_step(self, batch):
            self.log("recall", value, **options)
            return super().training_step(batch)

    with pytest.raises(ValueError, match=f"log 'recall': got a {type(value).__name__}, expected one number"):
        fit("MiniLoop", "run", 1, make_module=Module)


def test_mini_loop_refuses_to_resume_mid_epoch_with_torchmetrics_objects():
    class StoppingModule(Hooked):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.trainer.should_stop = True

    fit("MiniLoop", "run", 2, make_module=StoppingModule)
    with pytest.raises(ValueError, match=r"torchmetrics objects \['mean'\].* Use FabricLoop"):
        fit("MiniLoop", "run", 2, make_module=Hooked, resume="last")


class Noisy(Plain):
    """A model with a random generator in an attribute."""

    def __init__(self, seed=7):
        super().__init__()
        self.rng = torch.Generator().manual_seed(seed)

    def training_step(self, batch):
        return super().training_step(batch) * torch.rand((), generator=self.rng)


@pytest.mark.parametrize("is_train", [True, False])
def test_mini_loop_refuses_to_resume_a_fabric_loop_run_whose_loader_has_a_random_generator(is_train):
    def train(kind, epochs, resume=None):
        generator = torch.Generator().manual_seed(7)
        options = {"generator": generator, "shuffle": True}
        loaders = [DataLoader(make_data(20), 4, **(options if is_train == first else {})) for first in (True, False)]
        known_class, options = LOOPS[kind]
        known_class(max_epochs=epochs, accelerator="cpu", **options).fit(Classifier(), *loaders, resume=resume)

    train("FabricLoop", 1)
    with pytest.raises(ValueError, match="in which FabricLoop saved random generators"):
        train("MiniLoop", 2, resume="last")


def test_mini_loop_and_fabric_loop_refuse_random_generators_saved_by_each_other():
    _, expected, _ = fit("MiniLoop", "whole", 4, make_module=Noisy)
    for kind, other in itertools.permutations(LOOPS):
        fit(kind, kind, 2, make_module=Noisy)
        with pytest.raises(ValueError, match=f"Use {kind}|Resume with {kind}"):
            fit(other, kind, 4, make_module=lambda: Noisy(8), resume="last")
    _, module, _ = fit("MiniLoop", "MiniLoop", 4, make_module=lambda: Noisy(8), resume="last")
    assert_same_weights(expected.net, module.net)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_mini_loop_restores_random_generators_in_a_list_tuple_or_dict(kind):
    class GeneratorHolder(Plain):
        def __init__(self, seed=1):
            super().__init__()
            made = [torch.Generator().manual_seed(seed), random.Random(seed)]
            self.generators = dict(enumerate(made)) if kind is dict else kind(made)

        def training_step(self, batch):
            scale = torch.rand((), generator=self.generators[0]) + self.generators[1].random()
            return super().training_step(batch) * scale

    _, expected, _ = fit("MiniLoop", "whole", 4, make_module=GeneratorHolder)
    fit("MiniLoop", "parts", 2, make_module=GeneratorHolder)
    _, module, _ = fit("MiniLoop", "parts", 4, make_module=lambda: GeneratorHolder(2), resume="last")
    assert_same_weights(expected.net, module.net)


def test_a_run_stopped_by_max_steps_in_the_middle_of_an_epoch_can_resume():
    _, expected, whole = fit("MiniLoop", "whole", -1, max_steps=24)
    _, _, rows = fit("MiniLoop", "parts", -1, max_steps=14)
    assert rows["step"].tolist() == [10, 14]
    _, module, again = fit("MiniLoop", "parts", -1, max_steps=24, resume="last")
    assert_same_weights(expected, module)
    # The first run wrote a row at max_steps=14. The resumed run
    # replaces it with the row of the complete epoch at step 20.
    pd.testing.assert_frame_equal(again, whole)
    assert again["step"].tolist() == [10, 20, 24]
    assert again["val_loss"].isna().tolist() == [False, False, True]


class StopsWithinAnEpoch(Classifier):
    def __init__(self, is_killed):
        super().__init__(by_epoch)
        self.is_killed = is_killed

    def on_train_batch_end(self, *args):
        self.trainer.should_stop = self.trainer.max_steps == -1 and self.global_step >= 14

    def on_train_epoch_end(self):
        if self.is_killed and self.global_step == 14:
            raise RuntimeError("killed")
        self.log("steps", float(self.global_step))


@pytest.mark.parametrize("max_steps", [-1, 14])
def test_a_run_that_is_killed_after_stopping_within_an_epoch_writes_its_last_row_when_resumed(max_steps):
    def train(name, is_killed, resume=None):
        make = partial(StopsWithinAnEpoch, is_killed)
        return fit("MiniLoop", name, 4, resume=resume, make_module=make, max_steps=max_steps)

    _, expected, whole = train("whole", False)
    with pytest.raises(RuntimeError, match="killed"):
        train("parts", True)
    for _ in range(2):
        _, module, rows = train("parts", False, resume="auto")
        pd.testing.assert_frame_equal(rows, whole)
        assert_same_weights(expected, module)
    assert rows["steps"].tolist() == [10.0, 14.0]
    assert rows["val_loss"].isna().tolist() == [False, max_steps == 14]


DRAWS = [partial(torch.rand, 3), partial(torch.manual_seed, 7)]


@pytest.mark.parametrize(
    ("hook", "draw", "num_workers"), halve(["on_train_start", "on_train_epoch_start"], DRAWS, [0, 1])
)
def test_a_run_resumed_mid_epoch_matches_an_uninterrupted_run_even_if_a_hook_draws_random_numbers(
    hook, draw, num_workers
):
    """A DataLoader without workers draws its order after hooks such as on_train_epoch_start have run."""

    def make_module():
        module = Plain()
        setattr(module, hook, draw)
        return module

    def train(name, max_steps, resume=None):
        loader = DataLoader(make_data(), batch_size=8, shuffle=True, num_workers=num_workers)
        loop, module = run_mini(make_module, lambda: loader, name=name, max_steps=max_steps, fit={"resume": resume})
        return module

    expected = train("whole", 14)
    train("parts", 3)
    train("parts", 8, resume="last")
    assert_same_weights(expected.net, train("parts", 14, resume="last").net)


def test_validate_and_fit_can_load_the_weights_of_a_saved_run():
    _, module, rows = fit("MiniLoop", "run", 2)
    other = Classifier(by_epoch)
    [found] = MiniLoop(name="run", accelerator="cpu").validate(other, val_loader(), load="last")
    assert_same_weights(module, other)
    assert found == {name: rows[name].iloc[-1] for name in ("val_loss", "val_acc")}
    again = MiniLoop(name="run", max_epochs=1, accelerator="cpu")
    again.fit(other, make_loader(), load="best")
    assert again.validate(other, val_loader())
    assert (again.current_epoch, len(again.history), again.log_dir.name) == (1, 1, "version_1")


@pytest.mark.parametrize("before", LOOPS)
def test_a_new_run_cannot_replace_an_existing_version(before):
    fit(before, "run", 3)
    with pytest.raises(ValueError, match=r"version: got 'version_0', which already contains checkpoints\. Continue"):
        fit("MiniLoop", "run", 1, version=0)
    assert csv_of("run", "metrics.csv")["epoch"].tolist() == [0, 1, 2]


class SlowStart(Classifier):
    """Another run with the same version starts and finishes while the optimizer is created."""

    def configure_optimizers(self):
        fit("MiniLoop", "run", 2, version="mine")
        return super().configure_optimizers()


def test_a_new_run_cannot_replace_a_run_that_finishes_during_its_setup():
    with pytest.raises(ValueError, match=r"version: got 'mine', which already contains checkpoints\. Continue"):
        fit("MiniLoop", "run", 1, version="mine", make_module=SlowStart)
    assert pd.read_csv("logs/run/mine/metrics.csv")["epoch"].tolist() == [0, 1]


def test_resume_refuses_a_checkpoint_of_a_run_with_a_different_name_or_version():
    fit("MiniLoop", "run", 1)
    path = "checkpoints/run/version_0/last.ckpt"
    for options in ({"name": "other"}, {"name": "run", "version": "own"}):
        with pytest.raises(ValueError, match="from a run with a different name or version"):
            fit("MiniLoop", epochs=2, resume=path, **options)
    assert os.listdir("logs") == ["run"]


def test_mini_loop_refuses_a_hook_that_adds_a_parameter_group():
    class Grows(Classifier):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.extra = nn.Parameter(torch.ones(1))
                self.trainer.optimizers[0].add_param_group({"params": [self.extra]})

    with pytest.raises(ValueError, match="optimizer: a hook changed the parameters .* use FabricLoop"):
        fit("MiniLoop", "run", 2, make_module=Grows)


def test_a_new_run_may_reuse_the_version_of_a_run_that_saved_no_checkpoint():
    with pytest.raises(ValueError, match="broken"):
        fit("MiniLoop", "run", 1, make_module=Broken, version=0, log_every_n_steps=1)
    _, _, rows = fit("MiniLoop", "run", 1, version=0, resume="auto")
    assert len(csv_of("run", "metrics.csv")) == len(rows) == 1


class ReadsOptimizer(Classifier):
    """A model that reads its optimizer and its scheduler in a hook, and halves the learning rate."""

    def on_train_epoch_start(self):
        assert self.lr_schedulers().get_last_lr()
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.5

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


@pytest.mark.parametrize("kind", LOOPS)
def test_hooks_can_read_the_optimizer_and_the_scheduler(tmp_path, kind):
    loop, options = LOOPS[kind]
    torch.manual_seed(1)
    model, expected = ReadsOptimizer(), ReadsOptimizer()
    expected.load_state_dict(model.state_dict())
    torch.manual_seed(2)
    loop(max_epochs=3, default_root_dir=tmp_path, accelerator="cpu", **options).fit(model, make_loader())
    trainer = pl.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, **QUIET)
    torch.manual_seed(2)
    trainer.fit(expected, make_loader())
    assert_same_weights(model, expected)


class Broken(Classifier):
    def training_step(self, batch, batch_idx):
        if self.global_step == 2:
            raise ValueError("broken")
        return super().training_step(batch, batch_idx)


class LogsInTurn(Classifier):
    def training_step(self, batch, batch_idx):
        number = torch.tensor(float(batch_idx))
        self.log(f"number_{batch_idx % 3}", number, on_step=True, on_epoch=True)
        number += 100
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", LOOPS)
def test_a_row_of_steps_csv_contains_no_values_logged_in_earlier_batches(kind):
    for epochs in (1, 2):
        fit(kind, "run", epochs, resume="auto", make_module=LogsInTurn, log_every_n_steps=2)
    assert csv_of("run", "steps.csv").filter(like="number").sum(axis=1).tolist() == 2 * [1, 3, 5, 7, 9]


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.filterwarnings("ignore:.*(another program changed|rows from before the checkpoint)")
def test_a_resumed_run_duplicates_no_csv_rows_if_a_user_has_deleted_a_row(kind):
    fit(kind, "run", 2)
    checkpoint = Path("checkpoints/run/version_0/last.ckpt")
    saved = checkpoint.read_bytes()
    fit(kind, "run", 3, resume="last")
    checkpoint.write_bytes(saved)
    for path in Path("logs/run/version_0").glob("*.csv"):
        header, _, *lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([header, *lines]))
    fit(kind, "run", 4, resume="last")
    assert csv_of("run", "metrics.csv")["epoch"].tolist() == [1, 2, 3]
    assert csv_of("run", "steps.csv")["step"].tolist() == list(range(8, 41, 4))


class KilledAt(Classifier):
    def __init__(self, step):
        super().__init__(by_epoch)
        self.step = step

    def on_train_batch_end(self, *args):
        if self.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until(rank, step):
    _, module, _ = fit("MiniLoop", "killed", 4, resume="auto", make_module=lambda: KilledAt(step))
    torch.save(module.state_dict(), "end.pt")


def test_a_killed_and_resumed_run_matches_an_uninterrupted_run():
    _, expected, rows = fit("MiniLoop", "whole", 4)
    for step, code in ((5, -signal.SIGKILL), (17, -signal.SIGKILL), (25, -signal.SIGKILL), (None, 0)):
        codes, errors = run_processes(train_until, step, ranks=1, is_launched=False)
        assert codes == [code], errors
    torch.testing.assert_close(torch.load("end.pt", weights_only=True), expected.state_dict(), rtol=0, atol=0)
    # The first run was killed before its first checkpoint, so
    # version_0 was not continued. The newest version has all rows.
    *_, newest = sorted(Path("logs/killed").iterdir())
    written = pd.read_csv(newest / "metrics.csv").drop(columns=["time", "waiting"])
    pd.testing.assert_frame_equal(written, rows)


class Interrupted(Classifier):
    def on_train_batch_start(self, batch, batch_idx):
        if (self.current_epoch, batch_idx) == (2, 3):
            raise KeyboardInterrupt


def test_ctrl_c_prints_a_message_and_then_ends_the_script_with_an_error(capsys):
    with pytest.raises(KeyboardInterrupt):
        fit("MiniLoop", "run", 4, make_module=lambda: Interrupted(by_epoch))
    assert capsys.readouterr().out.splitlines()[-1].startswith("Ctrl-C: training stops in epoch 2")
    assert list_runs("logs/run")["state"].tolist() == ["interrupted"]


def interrupt_rank_0(rank):
    def step(net, batch):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return loss_of(net, batch)

    net = make_net()
    options = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "training_step": step}
    MiniLoop(max_epochs=2, accelerator="cpu").fit(net, make_loader(16), **options)
    Path(f"continued_{rank}").touch()


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_in_one_process_stops_all_processes_of_the_script(ranks):
    codes, errors = run_processes(interrupt_rank_0, ranks=ranks, is_launched=ranks > 1)
    assert codes[0] == 130, errors
    assert 0 not in codes
    assert not list(Path().glob("continued_*"))


def test_a_run_can_resume_after_ctrl_c_in_a_notebook(capsys, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    loop, module, rows = fit("MiniLoop", "run", 4, make_module=lambda: Interrupted(by_epoch))
    assert len(rows) == 2
    header, *printed, message = capsys.readouterr().out.splitlines()
    assert header == "epoch   step  train_loss  train_acc  val_loss   val_acc        lr      time"
    assert [len(line) for line in printed] == [len(header)] * 2
    assert message == "Ctrl-C: training stops in epoch 2, after step 23. To resume from step 20, write resume='last'."
    assert module.training
    assert torch.is_grad_enabled()
    assert list(loop.validate(module, val_loader())[0]) == ["val_loss", "val_acc"]
    _, expected, whole = fit("MiniLoop", "whole", 4)
    _, again, rows = fit("MiniLoop", "run", 4, resume="last")
    assert_same_weights(expected, again)
    pd.testing.assert_frame_equal(whole, rows)


# Runs in two processes, and loaders without a length


class Ranked(Classifier):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)


def train_ranked(rank, epochs, resume, file):
    options = {"devices": 2, "strategy": "ddp", "accumulate_grad_batches": 2, "monitor": "val_loss"}
    fit_options = {"resume": resume}
    loop, module = run_mini(Ranked, make_val=val_loader, max_epochs=epochs, fit=fit_options, name=file, **options)
    if rank == 0:
        torch.save(module.state_dict(), f"{file}.pt")
    assert len(MiniLoop(accelerator="cpu", devices=2, strategy="ddp").validate(module, val_loader())) == 1
    # Each process reads its share of the samples. The DataLoader
    # for this share must keep options such as prefetch_factor.
    loop = MiniLoop(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, name=f"{file} again")
    loop.fit(module, make_loader(num_workers=1, prefetch_factor=3))
    assert (len(loop.train_loader), loop.train_loader.prefetch_factor) == (5, 3)
    sampler = torch.utils.data.WeightedRandomSampler(torch.ones(40), 40)
    with pytest.raises(ValueError, match="sampler: got BatchSampler of WeightedRandomSampler with 2 processes"):
        loop.fit(module, make_loader(shuffle=None, sampler=sampler))


@pytest.mark.usefixtures("quick_spawn")
def test_mini_loop_with_two_processes_matches_trainer_even_after_resuming():
    options = {"max_epochs": 2, "devices": 2, "accumulate_grad_batches": 2, "num_sanity_val_steps": 0}
    _, expected = run_trainer(Ranked, make_loader, val_loader, strategy="ddp_fork", **options)
    for arguments in ((2, None, "whole"), (1, None, "parts"), (2, "last", "parts")):
        codes, errors = run_processes(train_ranked, *arguments, ranks=2)
        assert codes == [0, 0], errors
    for name in ("whole", "parts"):
        found = torch.load(f"{name}.pt", weights_only=True)
        torch.testing.assert_close(found, expected.state_dict(), rtol=0, atol=0)
    pd.testing.assert_frame_equal(csv_of("whole", "metrics.csv"), csv_of("parts", "metrics.csv"))


def batches_of(number):
    yield from list(make_loader())[:number]


class Unsized:
    """A loader without a length that is not a DataLoader."""

    def __iter__(self):
        return batches_of(3)


@pytest.mark.parametrize(("make", "every"), halve([lambda: DataLoader(Stream(), 4), Unsized], [None, 2, 4]))
def test_both_loops_return_the_same_history_for_a_validation_loader_without_length(make, every):
    """``every`` is the value of validate_every_n_steps. Each epoch has five batches."""
    results = {}
    for name, (loop_class, quiet) in LOOPS.items():
        pl.seed_everything(1, verbose=False)
        module = Classifier()
        options = {"validate_every_n_steps": every, "monitor": "val_loss", "name": name, **quiet}
        loop = loop_class(accelerator="cpu", max_epochs=2, **options)
        history = loop.fit(module, make_loader(20), make())
        results[name] = history.drop(columns=["time", "waiting"], errors="ignore"), module
    (rows, module), (expected_rows, expected) = results["MiniLoop"], results["FabricLoop"]
    assert_same_weights(expected, module)
    assert rows[["epoch", "step", "val_loss"]].equals(expected_rows[["epoch", "step", "val_loss"]])


@pytest.mark.parametrize(
    "limits", [{"max_epochs": 3}, {"max_steps": 7}, {"max_epochs": -1}, {"max_epochs": 3, "max_steps": 7}]
)
@pytest.mark.parametrize("make_train", [lambda: DataLoader(Stream(), 4), make_loader], ids=["no length", "length"])
def test_estimated_stepping_batches_is_the_same_in_both_loops(make_train, limits):
    class StopsAtOnce(Classifier):
        def configure_optimizers(self):
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

        def on_train_batch_end(self, *_):
            self.trainer.should_stop = True

    estimates = []
    for loop_class, quiet in LOOPS.values():
        module = StopsAtOnce()
        loop_class(accelerator="cpu", accumulate_grad_batches=2, **limits, **quiet).fit(module, make_train())
        estimates.append(module.estimate)
    assert estimates[0] == estimates[1]
    # The estimate is infinite if the number of steps is unknown. It must never be negative.
    is_known = "max_steps" in limits or (make_train is make_loader and limits["max_epochs"] > 0)
    assert (estimates[0] < math.inf) == is_known
    assert estimates[0] > 0


class UnevenStream(IterableDataset):
    """A stream that ends after ten samples in process 0 and after seven samples in process 1."""

    def __iter__(self):
        x, y = make_data(20).tensors
        rank = int(os.environ["RANK"])
        for i in range(rank, 20 - 6 * rank, 2):
            yield x[i], y[i]


def train_on_uneven_streams(rank):
    options = {"devices": 2, "strategy": "ddp", "accumulate_grad_batches": 3, "max_epochs": 3}
    make_train = partial(DataLoader, UnevenStream(), 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        loop, whole = run_mini(Ranked, make_train, name="whole", **options)
    assert sum("ends as soon as one process" in str(warning.message) for warning in caught) == (rank == 0)
    assert (loop.current_epoch, loop.global_step) == (3, 6)
    for steps, seed in ((3, 1), (4, 7), (-1, 9)):
        given = {"max_steps": steps, "seed": seed, "fit": {"resume": "auto"}}
        _, parts = run_mini(Ranked, make_train, name="parts", **{**options, **given})
    assert_same_weights(whole, parts)


@pytest.mark.usefixtures("quick_spawn")
@pytest.mark.filterwarnings("ignore:train_dataloaders. the processes")
def test_an_epoch_ends_in_both_processes_when_the_loader_of_one_process_ends():
    """If one process continued alone, it would wait forever for gradients of the other process."""
    codes, errors = run_processes(train_on_uneven_streams, ranks=2, timeout=90)
    assert codes == [0, 0], errors


# Changes that a user makes in a copy of mini.py


BY_TOKENS = {
    "    seed: int": """    tokens_per_step: int = 96  # The optimizer steps after this number of tokens.
    seed: int""",
    "        self._batch_size = 1  # The": """        self._tokens = 0  # The number of tokens since the last optimizer step.
        self._batch_size = 1  # The""",
    """        if self.accumulate_grad_batches > 1:
            loss = loss / self.accumulate_grad_batches
""": """        loss = loss * batch[0].numel()
""",
    """        if self.accumulate_grad_batches == 1:
            return True
        is_end = self._is_last or (self.batches_done + 1) % self.accumulate_grad_batches == 0
""": """        self._tokens += batch[0].numel()
        is_end = self._is_last or self._tokens >= self.tokens_per_step
""",
    """    def _step_optimizer(self) -> None:
""": """    def _step_optimizer(self) -> None:
        # DDP averages the gradients over the processes, so divide by the mean number of tokens.
        tokens = self.fabric.all_reduce(torch.tensor(float(self._tokens)), reduce_op="mean")
        for parameter in self.network.parameters():
            if parameter.grad is not None:
                parameter.grad /= tokens
""",
    "self.global_step, self._batches_in_window = step, 0": """\
self.global_step, self._batches_in_window, self._tokens = step, 0, 0""",
}
AVERAGED_WEIGHTS = {
    "    seed: int": """    ema_decay: float = 0.9  # Validate with the exponential moving average of the weights.
    seed: int""",
    "        self._sums: list[dict": """        self._ema: Any = None
        self._sums: list[dict""",
    """        self._given_options = {name: getattr(self, name) for name in NUMBERS}
""": """        self._given_options = {name: getattr(self, name) for name in NUMBERS}
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(self.ema_decay)
        self._ema = torch.optim.swa_utils.AveragedModel(self._unwrapped, multi_avg_fn=average)
""",
    """            self._step_optimizer()
""": """            self._step_optimizer()
            self._ema.update_parameters(self._unwrapped)
""",
    """        self.network.eval()
""": """        self.network.eval()
        weights = copy.deepcopy(self._unwrapped.state_dict())
        if self._ema is not None:
            self._unwrapped.load_state_dict(self._ema.module.state_dict())
""",
    """        finally:
            if self._is_lightning_module:
""": """        finally:
            self._unwrapped.load_state_dict(weights)
            if self._is_lightning_module:
""",
    """        return {**checkpoint, **self._hparams, "fabric_template": own}
""": """        checkpoint["ema"] = self._ema.state_dict()
        return {**checkpoint, **self._hparams, "fabric_template": own}
""",
    """        load_optimizer(self.optimizer, checkpoint["optimizer_states"][0])
""": """        load_optimizer(self.optimizer, checkpoint["optimizer_states"][0])
        self._ema.load_state_dict(checkpoint["ema"])
""",
}
SECOND_VALIDATION = {
    "    seed: int": """    second_val: Any = None  # A second loader of validation batches, with own columns.
    seed: int""",
    "        self._sums: list[dict": """        self._suffix = ""  # The end of the metrics' names in the second validation set.
        self._sums: list[dict""",
    """        self.train_loader, self.val_loader = self._share(train, True), self._share(val, False)
""": """        self.train_loader, self.val_loader = self._share(train, True), self._share(val, False)
        self._second_loader = self._share(self.second_val, False)
""",
    """                set_epoch(self.val_loader, self.current_epoch)
                # If an error occurs, closing() ends the worker processes.
                with closing(self._timed(self._read_batches(self.val_loader))) as batches:
                    self._call("on_validation_epoch_start")
                    for batch_idx, batch in enumerate(batches):
                        self._batch_size, self._logged_batch_size = find_batch_size(batch), None
                        output = self._run_step("validation_step", self._move(batch), batch_idx)
                        self._log_output(output, "val_")
                self._batch_size = 1
""": """                self._call("on_validation_epoch_start")
                for self._suffix, loader in ("", self.val_loader), ("_second", self._second_loader):
                    set_epoch(loader, self.current_epoch)
                    for batch_idx, batch in enumerate(self._timed(self._read_batches(loader))):
                        self._batch_size, self._logged_batch_size = find_batch_size(batch), None
                        output = self._run_step("validation_step", self._move(batch), batch_idx)
                        self._log_output(output, "val_")
                self._batch_size, self._suffix = 1, ""
""",
    """        check_log_arguments(options)
""": """        check_log_arguments(options)
        name += self._suffix
""",
    """        for name, value in zip(names, values.values(), strict=True):
""": """        names = [name + self._suffix for name in names]
        for name, value in zip(names, values.values(), strict=True):
""",
}
WARM_UP = {
    "    seed: int": """    warmup_steps: int = 8  # The learning rate grows linearly during these steps.
    seed: int""",
    """        self.schedulers = schedulers
""": """        steps = {"start_factor": 1 / self.warmup_steps, "total_iters": self.warmup_steps - 1}
        warmup = torch.optim.lr_scheduler.LinearLR(self.optimizer, **steps)
        self.schedulers = [{"scheduler": warmup, "interval": "step"}, *schedulers]
""",
}
GRADIENT_NORM = {
    "        try:\n            self._precision.optimizer_step(": """\
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), math.inf)
        self.log("grad_norm", norm)
        try:
            self._precision.optimizer_step("""
}
DIFFERENT_RULE_IN_PROCESS_1 = {
    "is_end = self._is_last or ": "is_end = self._is_last or self.fabric.global_rank * self._batches_in_window == 1 or "
}


def changed_loop(changes):
    source = FILE.read_text()
    for before, after in changes.items():
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    assert len(set(source.splitlines()) - set(FILE.read_text().splitlines())) <= 15
    module = sys.modules["changed_mini"] = types.ModuleType("changed_mini")
    exec(source, module.__dict__)
    return module.MiniLoop


def test_mini_py_can_be_edited_to_accumulate_gradients_by_token_count():
    _, expected, _ = fit("MiniLoop", "whole", 2, accumulate_grad_batches=2)
    _, module, _ = fit("MiniLoop", "tokens", 2, loop_class=changed_loop(BY_TOKENS), tokens_per_step=64)
    torch.testing.assert_close(module.state_dict(), expected.state_dict())


CHANGES = {"tokens": BY_TOKENS, "average": AVERAGED_WEIGHTS, "second": SECOND_VALIDATION, "warm-up": WARM_UP}


def resume_changed_loop(rank, name, ranks):
    """Compare an uninterrupted run with a run that is resumed within an epoch."""
    options = {"max_epochs": 3, "validate_every_n_steps": 2, "loop_class": changed_loop(CHANGES[name])}
    options |= {"devices": ranks, "strategy": "ddp"} if ranks > 1 else {}
    options |= {"second_val": make_loader(12)} if name == "second" else {}
    loop, expected = run_mini(Ranked, make_val=val_loader, name="whole", **options)
    steps = int(0.45 * loop.global_step) | 1
    run_mini(Ranked, make_val=val_loader, name="parts", max_steps=steps, **options)
    _, module = run_mini(Ranked, make_val=val_loader, name="parts", seed=9, fit={"resume": "last"}, **options)
    assert_same_weights(expected, module)
    if rank == 0:
        pd.testing.assert_frame_equal(csv_of("whole", "metrics.csv"), csv_of("parts", "metrics.csv"))


@pytest.mark.usefixtures("quick_spawn")
@pytest.mark.parametrize(("name", "ranks"), halve(CHANGES, [1, 2]))
def test_a_run_of_an_edited_copy_of_mini_py_can_resume_mid_epoch(name, ranks):
    codes, errors = run_processes(resume_changed_loop, name, ranks, ranks=ranks)
    assert codes == [0] * ranks, errors


def test_mini_py_can_be_edited_to_log_the_gradient_norm():
    fit("MiniLoop", "run", 1, loop_class=changed_loop(GRADIENT_NORM), log_every_n_steps=1)
    assert csv_of("run", "steps.csv")["grad_norm"].gt(0).sum() == 10


def train_with_different_rules(rank):
    options = {"devices": 2, "strategy": "ddp", "accumulate_grad_batches": 3, "max_epochs": 1}
    loop, module = run_mini(Ranked, loop_class=changed_loop(DIFFERENT_RULE_IN_PROCESS_1), **options)
    torch.save([loop.global_step, module.state_dict()], f"{rank}.pt")


@pytest.mark.usefixtures("quick_spawn")
def test_all_processes_take_an_optimizer_step_after_the_same_batch():
    codes, errors = run_processes(train_with_different_rules, ranks=2)
    assert codes == [0, 0], errors
    (step, weights), (other_step, other_weights) = (torch.load(f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert step == other_step == 3
    torch.testing.assert_close(weights, other_weights, rtol=0, atol=0)


# Using mini.py without the rest of the package

ALONE = """
import sys
import lightning.fabric, torch.utils.data  # the package lightning imports lightning.pytorch by itself
blocked = "fabric_template", "lightning.pytorch", "pytorch_lightning", "pandas"
for name in [name for name in sys.modules if name.startswith(blocked)]:
    del sys.modules[name]
for name in blocked:
    sys.modules[name] = None
{how}
import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(12, 2), torch.randn(12, 1))
def fit(epochs, resume=None):
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1)
    step = lambda net, batch: torch.nn.functional.mse_loss(net(batch[0]), batch[1])
    loop = MiniLoop(max_epochs=epochs, accelerator="cpu", seed=1)
    rows = loop.fit(net, DataLoader(data, 4, shuffle=True), DataLoader(data, 4), resume=resume, training_step=step,
                    validation_step=step, optimizer=torch.optim.Adam(net.parameters()))
    return loop, net, rows
fit(2)
loop, net, rows = fit(3, resume="last")
assert [row["epoch"] for row in rows] == [0, 1, 2], rows
[found] = loop.validate(net, DataLoader(data, 4), validation_step=lambda net, batch: net(batch[0]).mean())
assert list(found) == ["val_loss"], found
print("well")
"""


def test_mini_py_works_as_a_single_file_and_in_a_notebook_cell(tmp_path):
    Path("my_own_loop.py").write_bytes(FILE.read_bytes())
    options = {"capture_output": True, "text": True, "env": {**os.environ, "PYTHONPATH": str(tmp_path)}}
    for how in ("from my_own_loop import MiniLoop", "exec(open('my_own_loop.py').read())"):
        done = subprocess.run(fork_command([sys.executable, "-c", ALONE.format(how=how)]), **options)
        assert "well\n" in done.stdout, done.stderr


# Errors and warnings of MiniLoop, and unusual runs


class Manual(Classifier):
    automatic_optimization = False


class OwnBackward(Classifier):
    def backward(self, loss):
        loss.backward()


class Misspelled(Classifier):
    def training_step(self, batch, batch_idx):
        self.log("x", 1.0, on_epch=True)


def fit_functions(result=None, net=None, train=None, **arguments):
    net = net or nn.Linear(8, 3)
    given = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
    given["training_step"] = result or (lambda net, batch: net(batch[0]).mean())
    loader = make_loader() if train is None else train
    MiniLoop(accelerator="cpu", max_epochs=1).fit(net, loader, **{**given, **arguments})


class Unpicklable(Classifier):
    def __init__(self):
        super().__init__()
        self.hparams["make"] = lambda: None


class Nested:
    class Kind(enum.Enum):
        A = 1

    @dataclass
    class Config:
        size: int = 1

    class Dict(dict):
        pass


NESTED = {"enum": Nested.Kind.A, "dataclass": Nested.Config(), "dict": Nested.Dict(a=1), "key": {Nested.Kind.A: 1}}


class WithHparam(Classifier):
    def __init__(self, value):
        super().__init__(sgd)
        self.hparams["value"] = value


@pytest.mark.parametrize("case", NESTED)
def test_mini_loop_refuses_hyperparameters_that_torch_load_cannot_read(case):
    make = partial(WithHparam, NESTED[case])
    with pytest.raises(
        ValueError,
        match=r"value of 'hyper_parameters' .* \(an object that torch.load refuses\). Write save_hyperparameters\(ignore",
    ):
        run_mini(make, max_epochs=1)
    assert not os.listdir(".")
    run_mini(make, max_epochs=1, loop_class=partial(FabricLoop, **QUIET))
    with pytest.raises(ValueError, match=r"last\.ckpt: got objects that torch\.load refuses.*Use FabricLoop\.$"):
        run_mini(make, max_epochs=2, fit={"resume": "last"})
    run_mini(make, max_epochs=2, loop_class=partial(FabricLoop, **QUIET), fit={"resume": "last"})


@pytest.mark.parametrize("value", [LOOPS, {"kind": Nested.Kind}, WithHparam, UserDict(a=1), Path("a"), np.ones(3)])
def test_a_run_with_hyperparameters_of_any_type_resumes(value):
    run_mini(partial(WithHparam, value), max_epochs=1)
    loop, _ = run_mini(partial(WithHparam, value), max_epochs=2, fit={"resume": "last"})
    assert loop.current_epoch == 2


class ClosesInStep(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


class CallsClosure(torch.optim.SGD):
    def step(self, closure=None):
        loss = closure()
        super().step()
        return loss


class NumPyState(Classifier):
    def get_extra_state(self):
        return {"counts": np.arange(3)}

    def set_extra_state(self, state):
        pass


def make_numpy_scheduler(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, np.float32(0.25))]


def fit_optimizer(make):
    net = nn.Linear(8, 3)
    fit_functions(net=net, optimizer=make(net.parameters()))


ERRORS = {
    "LBFGS": (lambda: fit_optimizer(torch.optim.LBFGS), "whose step() needs a closure"),
    "closure": (lambda: fit_optimizer(lambda p: ClosesInStep(p, lr=0.1)), "whose step() needs a closure"),
    "NumPy's lr": (lambda: fit_optimizer(lambda p: torch.optim.Adam(p, np.float32(0.5))), "Write float(0.5)"),
    "NumPy's extra state": (
        lambda: run_mini(NumPyState),
        "got a value of 'state_dict' that a checkpoint cannot contain",
    ),
    "NumPy's scheduler": (lambda: fit_optimizer(make_numpy_scheduler), "Write float(0.25)"),
    "two optimizers": (lambda: fit_optimizer(lambda p: [torch.optim.SGD(list(p), 0.1)] * 2), "got SGD and SGD"),
    "hyperparameters": (lambda: run_mini(Unpicklable), "got a value of 'hyper_parameters' that a"),
    "unknown option": (lambda: MiniLoop(max_epoch=1), "unknown option 'max_epoch'. Did you mean max_epochs?"),
    "mode": (lambda: MiniLoop(mode="best"), "mode: got 'best'"),
    "name": (lambda: MiniLoop(name="a/b"), "name: got 'a/b', expected a non-empty folder name"),
    "manual": (
        lambda: run_mini(Manual),
        "got an object of the class Manual with manual optimization, which MiniLoop does not support. Use FabricLoop.",
    ),
    "hook": (
        lambda: run_mini(OwnBackward),
        "got an object of the class OwnBackward with backward, which MiniLoop does not support. Use FabricLoop.",
    ),
    "log": (lambda: run_mini(Misspelled), "log: got on_epch=True, which MiniLoop does not support"),
    "no step": (
        lambda: fit_functions(training_step=None),
        "training_step: got None, expected a function fn(model, batch)",
    ),
    "no optimizer": (
        lambda: fit_functions(optimizer=None),
        "optimizer: got None, expected an optimizer, such as Adam(",
    ),
    "other parameters": (
        lambda: fit_optimizer(lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(1))], lr=0.1)),
        "optimizer: got parameters that are not in the model, expected only the model's parameters.",
    ),
    "another model": (
        lambda: fit_functions(optimizer=sgd(nn.Linear(1, 1))),
        "optimizer: got the parameters of another model, expected those of the model passed to fit.",
    ),
    "optimizer": (lambda: fit_functions(optimizer="adam"), "optimizer: got str, expected one optimizer"),
    "None": (lambda: fit_functions(lambda net, batch: None), "training_step: got None at batch 0"),
    "float": (lambda: fit_functions(lambda net, batch: 1.0), "training_step: got a float at batch 0"),
    "detached": (
        lambda: fit_functions(lambda net, batch: net(batch[0]).mean().detach()),
        "got a loss without a gradient at batch 0",
    ),
    "arguments": (lambda: fit_functions(lambda net: 0), "expected a function with the arguments (model, batch) or"),
    "val without step": (lambda: fit_functions(val_dataloaders=make_loader()), "without validation_step"),
    "step without val": (lambda: fit_functions(validation_step=lambda net, batch: 0), "without val_dataloaders"),
    "dataset": (
        lambda: fit_functions(train=make_data()),
        "got a TensorDataset, expected a loader (an iterable of batches)",
    ),
    "empty": (lambda: fit_functions(train=[]), "train_dataloaders: got an empty list"),
    "read once": (lambda: fit_functions(train=(b for b in ())), "train_dataloaders: got 0 batches in an epoch"),
    "resume": (lambda: fit_functions(resume="last"), "resume: got 'last'"),
    "path": (lambda: fit_functions(load="nowhere.ckpt"), "Checkpoint file not found: nowhere.ckpt"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_each_error_of_mini_loop_mentions_the_argument_and_the_fix(case):
    call, message = ERRORS[case]
    with pytest.raises((TypeError, ValueError, FileNotFoundError)) as error:
        call()
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    if case not in ("log", "None", "float", "detached", "read once"):
        assert os.listdir(".") == []


def test_mini_loop_refuses_an_optimizer_that_always_calls_its_closure():
    with pytest.raises(ValueError, match=r"whose step\(\) needs a closure. Use FabricLoop"):
        fit_optimizer(lambda p: CallsClosure(p, lr=0.1))


def test_an_attribute_error_in_a_property_of_a_subclass_reaches_the_user():
    class Loop(MiniLoop):
        @property
        def rate(self):
            return self.optimizer.missing

    loop = Loop(max_epochs=1)
    loop.optimizer = object()
    with pytest.raises(AttributeError, match="'object' object has no attribute 'missing'"):
        loop.rate  # noqa: B018


def test_the_error_about_a_trainer_attribute_that_mini_loop_lacks_suggests_fabric_loop():
    with pytest.raises(AttributeError, match="'MiniLoop' object has no attribute 'fit_loop'. .*, use FabricLoop"):
        MiniLoop(max_epochs=1).fit_loop.max_epochs  # noqa: B018


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_notebook"])
def test_mini_loop_refuses_strategies_other_than_ddp(strategy):
    with pytest.raises(ValueError, match=f'strategy: got {strategy!r}.*, expected a single device, or "ddp"'):
        MiniLoop(strategy=strategy, devices=2, accelerator="cpu")


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"])
def test_mini_loop_refuses_launchers_other_than_torchrun(monkeypatch, name):
    monkeypatch.setenv(name, "2")
    if name == "WORLD_SIZE":
        monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="devices: got 2 processes that torchrun did not start"):
        MiniLoop(accelerator="cpu")
    monkeypatch.delenv(name)
    for variable, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(variable, value)
    assert MiniLoop(accelerator="cpu").fabric.world_size == 2
    with pytest.raises(ValueError, match="devices: got 1, but 2 processes were started. Leave out devices"):
        MiniLoop(accelerator="cpu", devices=1)


def test_mini_loop_starts_one_process_in_an_interactive_slurm_job(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    assert MiniLoop(accelerator="cpu").fabric.world_size == 1


def test_a_list_that_contains_itself_is_not_saved():
    class Nested(Plain):
        def __init__(self):
            super().__init__()
            self.items = [1]
            self.items.append(self.items)

    _, expected, _ = fit("MiniLoop", "whole", 2, make_module=Nested)
    fit("MiniLoop", "parts", 1, make_module=Nested)
    _, model, _ = fit("MiniLoop", "parts", 2, make_module=Nested, resume="last")
    assert_same_weights(expected.net, model.net)


class AccumulationChange(Classifier):
    def on_train_batch_start(self, batch, batch_idx):
        self.trainer.accumulate_grad_batches = 3 if batch_idx >= 2 else 2


def test_no_gradient_is_used_in_two_optimizer_steps_if_a_hook_changes_accumulate_grad_batches():
    """If accumulate_grad_batches changes, Trainer adds new gradients to those of the previous step."""
    (loop, module, _), (other, expected, _) = (fit(kind, kind, 2, make_module=AccumulationChange) for kind in LOOPS)
    assert_same_weights(expected, module)
    assert loop.global_step == other.global_step


def test_mini_loop_refuses_a_hook_that_ends_the_epoch_early():
    class Ends(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    with pytest.raises(TypeError, match=r"on_train_batch_start: got -1, but MiniLoop cannot end an epoch"):
        run_mini(Ends, max_epochs=1)


@pytest.mark.parametrize("kind", LOOPS)
def test_logged_values_named_step_and_epoch_do_not_replace_the_csv_columns(kind):
    class StepLogger(Classifier):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            # Users log "step" to get epochs on the x axis of TensorBoard.
            self.log("step", float(self.trainer.current_epoch), on_step=True, on_epoch=True)
            self.log("epoch", 0.5, on_step=True, on_epoch=True)

    loop_class, options = LOOPS[kind]
    options = {**options, "log_every_n_steps": 5, "loop_class": loop_class, "name": "steps"}
    run_mini(StepLogger, max_epochs=1, **options)
    loop, _ = run_mini(StepLogger, max_epochs=2, fit={"resume": "last"}, **options)
    rows = pd.read_csv("logs/steps/version_0/metrics.csv")
    assert rows[["epoch", "step"]].values.tolist() == [[0, loop.global_step // 2], [1, loop.global_step]]
    rows = pd.read_csv("logs/steps/version_0/steps.csv")
    assert rows["step"].tolist() == list(range(5, loop.global_step + 1, 5))
    assert rows["epoch"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("name", ["train\nscore", "train\rscore", "score\r"])
def test_mini_loop_refuses_a_metric_name_that_contains_a_line_break(name):
    class Wraps(Classifier):
        def training_step(self, batch, batch_idx):
            self.log(name, 1.0, on_epoch=True)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="expected a non-empty string of printable characters"):
        run_mini(Wraps, max_epochs=1)


Batch = make_dataclass("Batch", ["x"])
BATCHES = {
    "mapping": (lambda x: UserDict(x=x), lambda batch: batch["x"]),
    "strings first": (lambda x: [None, {"text": ["a"], "x": x}], lambda batch: batch[1]["x"]),
    "dataclass": (Batch, lambda batch: batch.x),
    "no tensor": (lambda x: {"rows": x.tolist()}, lambda batch: torch.tensor(batch["rows"])),
}


@pytest.mark.parametrize("case", BATCHES)
def test_both_loops_compute_equal_mean_losses_for_any_kind_of_batch(case):
    make_batch, find_input = BATCHES[case]
    batches = [make_batch(x) for x in make_data(20).tensors[0].split(8)]
    loader = DataLoader(batches, batch_size=None)
    losses = []
    for loop_class, options in LOOPS.values():
        net = nn.Linear(8, 1)
        nn.init.ones_(net.weight)
        nn.init.zeros_(net.bias)
        step = lambda net, batch: net(find_input(batch)).square().mean()  # noqa: E731
        loop = loop_class(max_epochs=1, accelerator="cpu", **options)
        losses.append(loop.fit(net, loader, optimizer=sgd(net), training_step=step)["train_loss"][0])
    assert losses[0] == losses[1]


def test_a_run_can_resume_after_an_error_about_an_unknown_monitor():
    with pytest.raises(ValueError, match=r"monitor: got 'val_mse', which is not logged.*val_loss"):
        run_mini(monitor="val_mse", make_val=val_loader, max_epochs=2)
    loop, _ = run_mini(make_val=val_loader, max_epochs=2, fit={"resume": "last"})
    assert len(loop.history) == 2


def test_a_warning_about_a_nan_loss_mentions_the_epoch():
    with pytest.warns(UserWarning, match=r"The training loss is nan in epoch 0"):
        fit_functions(lambda net, batch: net(batch[0]).mean() * float("nan"))


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", LOOPS)
def test_resume_warns_about_a_damaged_last_ckpt_and_uses_best_ckpt(kind):
    # The loss falls and mode is "max", so best.ckpt is from the first epoch.
    options = {"monitor": "train_loss", "mode": "max"}
    _, expected, rows = fit(kind, "whole", 3, **options)
    fit(kind, "parts", 2, **options)
    damage(Path("checkpoints/parts/version_0/last.ckpt"))
    with pytest.warns(UserWarning, match=r"last\.ckpt.*damaged.*Using the previous checkpoint instead"):
        _, module, again = fit(kind, "parts", 3, resume="last", **options)
    assert_same_weights(expected, module)
    pd.testing.assert_frame_equal(again, rows)


WRONG_FILES = {
    "a module": nn.Linear(8, 1),
    "a list": [1],
    "no weights": {},
    "no state_dict": {"state_dict": None},
    "an empty state_dict": {"state_dict": {}},
    "numbers as names": {0: torch.ones(1)},
    "different prefix": {"state_dict": {"net.weight": torch.ones(1, 8), "net.bias": torch.ones(1)}},
    "different key": {"weights": nn.Linear(8, 1).state_dict()},
}


@pytest.mark.parametrize("content", WRONG_FILES.values(), ids=WRONG_FILES)
@pytest.mark.parametrize("kind", LOOPS)
def test_load_refuses_a_file_that_has_none_of_the_weights_of_the_model(kind, content):
    torch.save(content, "a.ckpt")
    net = nn.Linear(8, 1)
    # With strict_loading=False, torch accepts weights with different names, so the loop must refuse the file itself.
    net.strict_loading = False
    loop = LOOPS[kind][0](accelerator="cpu")
    text = "expected (a|the name|weights of the model)"
    with pytest.raises((ValueError, RuntimeError), match=text):
        loop.validate(net, make_loader(), load="a.ckpt", validation_step=lambda net, batch: net(batch[0]).mean())


class MovingCenters(Classifier):
    """A model that replaces buffers in each step, so Adam's state may be allocated in their old memory."""

    def __init__(self):
        super().__init__(lambda module: torch.optim.Adam(module.parameters()))
        for index in range(12):
            self.register_buffer(f"center{index}", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        for name, value in list(self.named_buffers()):
            setattr(self, name, value + 1)
        return super().training_step(batch, batch_idx) + self.center0


@pytest.mark.parametrize("kind", LOOPS)
def test_a_run_whose_training_step_replaces_buffers_resumes_exactly(kind):
    options = {"make_module": MovingCenters, "log_every_n_steps": 100}
    _, expected, rows = fit(kind, "whole", 3, **options)
    fit(kind, "parts", 1, **options)
    _, module, again = fit(kind, "parts", 3, resume="last", **options)
    assert_same_weights(expected, module)
    pd.testing.assert_frame_equal(again, rows)
    # Both folders must contain the same files. No step is logged, so neither contains steps.csv.
    whole, parts = (sorted(os.listdir(f"logs/{name}/version_0")) for name in ("whole", "parts"))
    assert whole == parts


@pytest.mark.parametrize("kind", LOOPS)
def test_resume_accepts_a_symlinked_last_ckpt_and_a_path_in_the_home_folder(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    _, expected, _ = fit(kind, "run", 2)
    fit(kind, "parts", 1)
    last, moved = Path("checkpoints/parts/version_0/last.ckpt"), tmp_path / "moved.ckpt"
    last.rename(moved)
    last.symlink_to(moved)
    _, module, _ = fit(kind, "parts", 2, resume="auto")
    assert_same_weights(expected, module)
    path = Path("~") / last.absolute().relative_to(tmp_path.resolve())
    loop, *_ = fit(kind, "parts", 3, resume=str(path))
    assert loop.current_epoch == 3


@pytest.mark.parametrize("kind", LOOPS)
def test_resuming_the_last_run_is_refused_if_all_its_checkpoints_are_damaged(kind):
    fit(kind, "run", 1, version="older", monitor=None)
    fit(kind, "run", 1, monitor=None)
    path = Path("checkpoints/run/version_0/last.ckpt")
    damage(path)
    refused = pytest.raises((ValueError, FileNotFoundError), match="resume: got 'last'")
    with pytest.warns(UserWarning, match=r"last\.ckpt.*damaged"), refused:
        fit(kind, "run", 2, resume="last")
    with pytest.warns(UserWarning, match=r"last\.ckpt.*damaged"):
        loop, *_ = fit(kind, "run", 1, resume="auto")
    assert Path(loop.log_dir).name == "version_1"
    with pytest.raises((ValueError, RuntimeError), match=r"last\.ckpt: the file is damaged"):
        fit(kind, "run", 2, resume=path)


def test_should_stop_ends_a_run_only_at_the_end_of_an_accumulation_window():
    class StoppingModule(Classifier):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.trainer.should_stop = True

    loop, _, rows = fit("MiniLoop", "stopped", 2, make_module=lambda: StoppingModule(sgd), accumulate_grad_batches=4)
    assert (loop.global_step, loop.batches_done, len(rows)) == (1, 4, 1)


def test_fit_calls_the_method_named_modules_equally_often_for_small_and_large_models():
    class CountsSearches(torch.nn.Sequential):
        def modules(self):
            searches.append(len(self))
            return super().modules()

    class Wide(Classifier):
        def __init__(self, size):
            super().__init__()
            self.net = CountsSearches(self.net, *[torch.nn.Identity() for _ in range(size)])

    numbers = []
    for size in (2, 40):
        searches = []
        fit("MiniLoop", f"size {size}", 2, make_module=lambda size=size: Wide(size))
        numbers.append(len(searches))
    assert numbers[0] == numbers[1]


def test_validate_and_fit_refuse_numpy_batches_with_the_same_error():
    batches = [(np.ones((2, 8), np.float32), np.zeros(2, np.int64))]
    with pytest.raises(TypeError, match="validation_step: got NumPy arrays in the batch, expected tensors"):
        MiniLoop(accelerator="cpu").validate(Plain(), batches, validation_step=lambda model, batch: model.net(batch[0]))
