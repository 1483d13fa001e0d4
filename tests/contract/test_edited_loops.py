"""Test edited methods of MiniLoop, including their state, resumed runs, and errors about wrong edits."""

import ast
import csv
import enum
import inspect
import itertools
import pickle
import sys
import types
from collections import defaultdict, deque, namedtuple
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
from modules import assert_same_weights
from parameters import halve, once
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import fabric_template.mini
from fabric_template import FabricLoop, MiniLoop

Pair = namedtuple("Pair", "a b")


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


def make_loader():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2, shuffle=True)


def step(net, batch):
    return mse_loss(net(batch[0]), batch[1])


class Killed(Exception):
    pass


def train(kind, name="run", kill=None, resume=None, make_scheduler=None, **options):
    """Train a linear net for 3 epochs of 8 batches. If ``kill`` is set, stop before that training step."""
    torch.manual_seed(3)
    net, steps = nn.Linear(4, 1), iter(range(1, 1000))

    def training_step(net, batch):
        if next(steps) == kill:
            raise Killed
        return step(net, batch)

    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    arguments = {"optimizer": optimizer, "training_step": training_step, "resume": resume}
    arguments |= {"val_dataloaders": make_loader(), "validation_step": step}
    arguments |= {"scheduler": make_scheduler(optimizer)} if make_scheduler else {}
    loop = kind(accelerator="cpu", name=name, **{"max_epochs": 3, **options})
    loop.fit(net, make_loader(), **arguments)
    return loop, net


def assert_resumes(kind, kill=12, **options):
    """Check that a killed and resumed run ends with the weights and rows of an uninterrupted run."""
    whole, expected = train(kind, "whole", **options)
    with pytest.raises(Killed):
        train(kind, "parts", kill=kill, **options)
    resumed, net = train(kind, "parts", resume="last", **options)
    assert_same_weights(expected, net)
    drop = ("time", "waiting")
    rows = [[{n: v for n, v in row.items() if n not in drop} for row in loop.history] for loop in (whole, resumed)]
    assert rows[0] == rows[1]
    return whole, resumed


def edited_copy(before, after, count=1):
    source = inspect.getsource(fabric_template.mini)
    assert count is None or source.count(before) == count
    module = sys.modules["edited_mini"] = types.ModuleType("edited_mini")
    exec(source.replace(before, after), module.__dict__)
    return module


# Values that a MiniLoop subclass adds to a checkpoint

UNREADABLE = {
    "enum": Phase.WARM,
    "float32": np.float32(0.3),
    "array": np.ones(2),
    "date": date(2020, 1, 1),
    "path": Path("a"),
    "named tuple": Pair(1, 2),
    "deque": deque([1.0], 3),
    "defaultdict": defaultdict(int, a=1),
    "generator": torch.Generator(),
    "module": nn.Linear(1, 1),
    "optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1),
    "set": {Phase.WARM},
    "function": lambda: None,
}


def saves(value):
    class Saves(MiniLoop):
        def _build_checkpoint(self):
            return {**super()._build_checkpoint(), "mine": value}

        def _restore(self, path, checkpoint, is_automatic):
            super()._restore(path, checkpoint, is_automatic)
            self.restored.append(checkpoint["mine"])

    Saves.restored = []
    return Saves


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_mini_loop_subclass_refuses_to_save_a_value_that_cannot_be_loaded(case):
    with pytest.raises(ValueError, match="^checkpoint: got a value of 'mine'"):
        train(saves(UNREADABLE[case]), max_epochs=1)


@pytest.mark.parametrize("value", [0.3, {1, 2}, torch.ones(2), [{"a": (None, "b", torch.float32)}]])
def test_a_value_that_a_mini_loop_subclass_adds_to_the_checkpoint_is_restored(value):
    kind = saves(value)
    train(kind, max_epochs=1)
    train(kind, max_epochs=2, resume="last")
    [restored] = kind.restored
    assert torch.equal(restored, value) if isinstance(value, torch.Tensor) else restored == value
    assert type(restored) is type(value)


# Attributes that a MiniLoop subclass adds to the loop


class Counts(MiniLoop):
    """A loop with a number, a generator, a module, an optimizer and a list as additional attributes."""

    def _reset(self):
        super()._reset()
        self.scale, self.losses = 1.0, []
        self.noise = torch.Generator().manual_seed(3)
        with torch.random.fork_rng():
            self.critic = nn.Linear(1, 1)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=0.1)

    def _step_optimizer(self):
        for parameter in self.network.parameters():
            parameter.grad += self.scale * torch.randn(parameter.shape, generator=self.noise)
            parameter.grad += self.critic.weight.item()
        super()._step_optimizer()
        self.critic_optimizer.zero_grad()
        self.critic(torch.ones(1)).backward()
        self.critic_optimizer.step()

    def _end_row(self, epoch):
        super()._end_row(epoch)
        self.scale *= 0.5
        self.losses.append(self.history[-1]["val_loss"])

    def _is_done(self):
        return super()._is_done() or len(self.losses) > 6


class Averages(MiniLoop):
    def _set_up_optimizer(self, optimizer, scheduler):
        super()._set_up_optimizer(optimizer, scheduler)
        self.ema = torch.optim.swa_utils.AveragedModel(self.network)

    def _step_optimizer(self):
        super()._step_optimizer()
        self.ema.update_parameters(self.network)

    def _validate(self):
        weights = {name: value.clone() for name, value in self.network.state_dict().items()}
        self.network.load_state_dict(self.ema.module.state_dict())
        super()._validate()
        self.network.load_state_dict(weights)


class Measures(MiniLoop):
    """A loop with a torchmetrics object, and with a list of modules whose dropout rate changes."""

    def _reset(self):
        super()._reset()
        self.mean, self.layers = MeanMetric(), [nn.Dropout(0.5)]

    def _end_row(self, epoch):
        self.mean.update(self.global_step)
        self.layers[0].p *= 0.9
        self._validated |= {"mean": self.mean.compute(), "p": torch.tensor(self.layers[0].p)}
        super()._end_row(epoch)


class CreatesLate(MiniLoop):
    """A loop that creates an averaged model during training, and saves and restores it by itself."""

    ema = None

    def _step_optimizer(self):
        super()._step_optimizer()
        if self.ema is None:
            self.ema = torch.optim.swa_utils.AveragedModel(self.network)
        self.ema.update_parameters(self.network)
        self.network.bias.data.add_(0.01 * self.ema.module.bias.data)

    def _build_checkpoint(self):
        return {**super()._build_checkpoint(), "ema": self.ema.state_dict()}

    def _restore(self, path, checkpoint, is_automatic):
        super()._restore(path, checkpoint, is_automatic)
        self.ema = torch.optim.swa_utils.AveragedModel(self.network)
        self.ema.load_state_dict(checkpoint["ema"])


@dataclass(kw_only=True, eq=False)
class Decays(MiniLoop):
    """A loop with an option that changes during training and with a second loader."""

    decay: float = 1.0

    def _reset(self):
        super()._reset()
        data = make_loader().dataset
        self.other = DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(4))

    def _end_row(self, epoch):
        super()._end_row(epoch)
        self.decay *= 0.5

    def _validate(self):
        super()._validate()
        with torch.no_grad():
            self._validated["val_other"] = step(self.network, next(iter(self.other)))

    def _step_optimizer(self):
        for parameter in self.network.parameters():
            parameter.grad += self.decay
        super()._step_optimizer()


@pytest.mark.parametrize(
    ("kind", "options"), once([Counts, Averages, Measures, CreatesLate, Decays], [{}, {"validate_every_n_steps": 3}])
)
def test_a_resumed_run_restores_the_attributes_that_a_mini_loop_subclass_adds(kind, options):
    assert_resumes(kind, kill=14, **options)


def test_resume_auto_does_not_continue_a_run_that_a_mini_loop_subclass_stopped_early():
    train(Counts, max_epochs=9)
    loop, _ = train(Counts, max_epochs=9, resume="auto")
    assert loop.current_epoch == len(loop.losses) == 7


def test_resume_is_refused_if_a_mini_loop_subclass_lacks_an_object_whose_state_was_saved():
    class Forgets(CreatesLate):
        _build_checkpoint, _restore = MiniLoop._build_checkpoint, MiniLoop._restore

    train(Forgets, max_epochs=1)
    with pytest.raises(ValueError, match=r"got the state of 'ema', .* attribute of the loop, in _set_up_optimizer"):
        train(Forgets, max_epochs=2, resume="last")


def test_the_attribute_list_in_mini_py_contains_every_attribute_of_mini_loop():
    tree = ast.parse(inspect.getsource(MiniLoop)).body[0]
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    assigned = {node.attr for node in nodes if ast.unparse(node.value) == "self"}
    assert assigned | {field.name for field in fields(MiniLoop)} == {*fabric_template.mini.LOOP_ATTRIBUTES}


# Copies of mini.py in which MiniLoop has a different name


def renamed_loop(name):
    return getattr(edited_copy("MiniLoop", name, count=None), name)


class LogsAndValidates(nn.Module):
    """A model that logs with self.log, and validates with another loop at the end of each epoch."""

    def __init__(self, inner):
        super().__init__()
        self.net, self.inner, self.found = nn.Linear(4, 1), inner, []

    def training_step(self, batch):
        return step(self.net, batch)

    def validation_step(self, batch):
        self.log("val_twice", 2 * step(self.net, batch), on_epoch=True)
        return step(self.net, batch)

    def on_train_epoch_end(self):
        found = self.inner.validate(self, DataLoader(TensorDataset(torch.ones(2, 4), torch.ones(2, 1))))
        self.found += [{name: float(value) for name, value in found[0].items()}]


@pytest.mark.parametrize(("outer", "inner"), halve(["MiniLoop", "MyLoop"], ["MiniLoop", "MyLoop", "FabricLoop"]))
def test_a_hook_may_call_validate_on_another_loop(outer, inner):
    kinds = {"MiniLoop": MiniLoop, "MyLoop": renamed_loop("MyLoop"), "FabricLoop": FabricLoop}

    def run(outer, inner):
        torch.manual_seed(1)
        quiet = {"enable_progress_bar": False, "logger": False}
        model = LogsAndValidates(kinds[inner](accelerator="cpu", **(quiet if inner == "FabricLoop" else {})))
        options = {"enable_progress_bar": False} if outer == "FabricLoop" else {}
        loop = kinds[outer](max_epochs=1, accelerator="cpu", name=f"{outer}_{inner}", **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = loop.fit(model, make_loader(), make_loader(), optimizer=optimizer)
        return rows[["val_loss", "val_twice"]].to_numpy().tolist(), model.found

    rows, found = run(outer, inner)
    expected_rows, [expected] = run("MiniLoop", "MiniLoop")
    assert rows == expected_rows
    assert found == [pytest.approx(expected)]


# Resuming with a changed option, monitor or loader


@pytest.mark.parametrize(("first", "second", "start"), [(None, 4, 12), (4, None, 8)])
def test_a_resumed_run_may_change_validate_every_n_steps(first, second, start):
    train(MiniLoop, max_epochs=1, validate_every_n_steps=first)
    options = {"validate_every_n_steps": second, "log_every_n_steps": 1, "max_epochs": 2}
    loop, _ = train(MiniLoop, resume="last", **options)
    rows = list(csv.DictReader((loop.log_dir / "steps.csv").read_text().splitlines()))
    losses = [float(row["train_loss"]) for row in rows if int(row["step"]) > start]
    assert loop.history[-1]["train_loss"] == pytest.approx(sum(losses) / len(losses))


def test_resume_best_does_not_use_an_older_run_if_the_newest_run_has_no_best_checkpoint():
    train(MiniLoop, max_epochs=1, monitor="val_loss")
    train(MiniLoop, max_epochs=1)
    with pytest.raises(FileNotFoundError, match="^resume: got 'best', but the newest run has no readable best"):
        train(MiniLoop, resume="best")


def test_best_ckpt_of_a_run_resumed_with_a_new_monitor_contains_validated_weights():
    train(MiniLoop, max_steps=4, validate_every_n_steps=4)
    options = {"validate_every_n_steps": 10, "max_steps": 12, "monitor": "val_loss"}
    loop, _ = train(MiniLoop, resume="last", **options)
    best = torch.load(loop.checkpoint_dir / "best.ckpt", weights_only=False)
    assert best["global_step"] == 10


class Stream:
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        yield from itertools.islice(make_loader(), self.length)


def test_resuming_is_refused_if_the_stream_has_fewer_batches_than_were_already_read():
    def fit(length, max_steps, resume=None):
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        loop = MiniLoop(accelerator="cpu", max_steps=max_steps)
        loop.fit(net, Stream(length), optimizer=optimizer, training_step=step, resume=resume)

    fit(8, 5)
    with pytest.raises(ValueError, match=r"^resume: got a loader with 3 batches, expected more than 5\."):
        fit(3, 9, resume="last")


def test_mini_loop_does_not_iterate_over_the_objects_in_a_large_list():
    class Episode:
        def __iter__(self):
            read.append(self)
            return iter([])

    loader, read = make_loader(), []
    loader.dataset.items = [Episode() for _ in range(10_001)]
    net = nn.Linear(4, 1)
    loop = MiniLoop(accelerator="cpu", max_epochs=1)
    loop.fit(net, loader, optimizer=torch.optim.SGD(net.parameters(), 0.1), training_step=step)
    assert not read


@pytest.mark.soak
def test_mini_loop_saves_a_large_dict_even_if_only_its_keys_change():
    class Renames(MiniLoop):
        def _reset(self):
            super()._reset()
            self.bank = {number: torch.ones(1) for number in range(5_001)}

        def _end_row(self, epoch):
            super()._end_row(epoch)
            self.bank = {number + 1: value for number, value in self.bank.items()}

    _, resumed = assert_resumes(Renames)
    assert next(iter(resumed.bank)) == 3


# CSV columns and CSV files that an edited loop adds

OWN_COLUMNS = """        row["phase"] = "warm, or not" if epoch < 1 else "main"
        row |= {"seen": self.global_step * 2, "is_warm": epoch < 1, "missing": None, "pair": [1, 2]}
        row |= {"tensor": torch.tensor(0.5), "number": np.float64(0.25)}
        row |= {"late": "fixed"} if epoch > 1 else {}
        self.history.append(row)
"""


@pytest.mark.parametrize("resume", [None, "last"])
def test_an_edited_copy_of_mini_py_can_write_text_bools_and_ints_to_metrics_csv(resume):
    kind = edited_copy("        self.history.append(row)\n", OWN_COLUMNS).MiniLoop
    if resume:
        train(kind, max_epochs=3)
    loop, _ = train(kind, max_epochs=4, resume=resume)
    rows = list(csv.DictReader((loop.log_dir / "metrics.csv").read_text().splitlines()))
    names = ("phase", "seen", "is_warm", "missing", "pair", "tensor", "number", "late")
    cells = [tuple(row[name] for name in names) for row in rows]
    end = ("", "[1, 2]", "0.5", "0.25")
    assert cells == [
        ("warm, or not", "16", "True", *end, ""),
        ("main", "32", "False", *end, ""),
        ("main", "48", "False", *end, "fixed"),
        ("main", "64", "False", *end, "fixed"),
    ]
    assert all(type(row["epoch"]) is type(row["step"]) is type(row["seen"]) is int for row in loop.history)


def test_a_mini_loop_subclass_can_write_an_additional_csv_file():
    class WritesFile(MiniLoop):
        def _end_row(self, epoch):
            super()._end_row(epoch)
            self._append_row("own.csv", {"step": self.global_step, "double": torch.tensor(2.0 * epoch)})

    for loop in assert_resumes(WritesFile):
        assert (loop.log_dir / "own.csv").read_text() == "step,double\n8,0.0\n16,2.0\n24,4.0\n"


def test_a_run_with_an_additional_csv_file_without_a_step_column_can_be_resumed():
    class WritesFile(MiniLoop):
        def _end_row(self, epoch):
            super()._end_row(epoch)
            self._append_row("own.csv", {"double": 2.0 * epoch})

    for loop in assert_resumes(WritesFile):
        assert (loop.log_dir / "own.csv").read_text() == "double\n0.0\n2.0\n4.0\n"


def test_resuming_duplicates_no_rows_if_a_csv_file_was_created_after_the_checkpoint():
    class WritesLate(MiniLoop):
        def _train_batch(self, batch):
            super()._train_batch(batch)
            if self.global_step > 8:
                self._append_row("own.csv", {"step": self.global_step})

    for loop in assert_resumes(WritesLate):
        assert (loop.log_dir / "own.csv").read_text().split() == ["step", *map(str, range(9, 25))]


# Subclasses that override methods of MiniLoop


def step_lr(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


class OnlySteps(MiniLoop):
    def _step_optimizer(self):
        self.optimizer.step()


class CountsAndSteps(MiniLoop):
    def _step_optimizer(self):
        self.optimizer.step()
        self.global_step += 1


@pytest.mark.parametrize("kind", [OnlySteps, CountsAndSteps])
def test_global_step_stays_correct_if_a_subclass_overrides_the_optimizer_step(kind):
    options = {"accumulate_grad_batches": 2, "make_scheduler": step_lr}
    loop, net = train(kind, "edited", **options)
    other, expected = train(MiniLoop, **options)
    assert_same_weights(expected, net)
    assert (loop.global_step, loop._learning_rate) == (other.global_step, other._learning_rate) == (12, 0.025)


def test_the_optimizer_always_takes_a_step_after_the_last_batch_of_an_epoch():
    class ThreeBatches(MiniLoop):
        def _is_window_end(self, batch):
            return self._batches_in_window + 1 >= 3

    whole, _ = assert_resumes(ThreeBatches)
    assert [row["step"] for row in whole.history] == [3, 6, 9]


class OwnBatches(MiniLoop):
    """A loop that overrides _train_batches, and sets _is_last only for the last batch."""

    def _train_batches(self):
        given = list(self.train_loader)
        while given:
            if len(given) == 1:
                self._is_last = True
            yield given.pop(0)


def test_a_subclass_can_override_train_batches_if_it_marks_the_last_batch_of_each_epoch():
    loop, net = train(OwnBatches, "own", make_scheduler=step_lr)
    assert [(row["step"], row["lr"]) for row in loop.history] == [(8, 0.1), (16, 0.05), (24, 0.025)]
    assert all("val_loss" in row for row in loop.history)


def with_batches(change):
    class Changes(MiniLoop):
        def _train_batches(self):
            yield from change(self, super()._train_batches())

    return Changes


def skip_third(loop, batches):
    yield from (batch for number, batch in enumerate(batches) if number != 3)


def shuffle(loop, batches):
    given = list(batches)
    for number in torch.randperm(len(given)).tolist():
        loop._is_last = len(given) == 1
        yield given.pop(number % len(given))


def echo(loop, batches):
    for batch in batches:
        is_last, loop._is_last = loop._is_last, False
        yield batch
        loop._is_last = is_last
        yield batch


def test_mini_loop_refuses_a_subclass_that_marks_no_batch_as_the_last_of_the_epoch():
    with pytest.raises(ValueError, match="^_train_batches: got an epoch without a last batch"):
        train(with_batches(lambda loop, batches: itertools.islice(batches, 5)))


@pytest.mark.parametrize("change", [skip_third, shuffle, echo])
def test_a_loop_that_skips_repeats_or_reorders_batches_resumes_exactly_from_the_end_of_an_epoch(change):
    whole, _ = assert_resumes(with_batches(change), kill=18, make_scheduler=step_lr)
    assert [row["lr"] for row in whole.history] == [0.1, 0.05, 0.025]


class SavesEveryThirdBatch(MiniLoop):
    def _train_batch(self, batch):
        super()._train_batch(batch)
        if self.batches_done % 3 == 0:
            self._save(False)


def test_users_can_edit_the_loop_to_save_checkpoints_within_an_epoch():
    assert_resumes(SavesEveryThirdBatch, kill=13)


# Options that a MiniLoop subclass adds, or whose defaults it changes


class PlainDefault(MiniLoop):
    max_epochs = 1


class DefaultBelow(PlainDefault):
    pass


class PlainInit(MiniLoop):
    def __init__(self, decay=0.9, **options):
        super().__init__(**options)
        self.decay = decay


class OnlyAnnotated(MiniLoop):
    decay: float = 0.9


@pytest.mark.parametrize("kind", [PlainDefault, DefaultBelow])
def test_a_loop_subclass_that_changes_the_default_of_an_option_needs_the_dataclass_decorator(kind):
    message = f"^{kind.__name__}: the class sets the option 'max_epochs', but .* Write @dataclass.kw_only=True, eq=False. above"
    with pytest.raises(TypeError, match=message):
        kind()


@pytest.mark.parametrize("kind", [PlainInit, OnlyAnnotated])
def test_a_loop_subclass_without_the_dataclass_decorator_refuses_its_own_options(kind):
    with pytest.raises(TypeError, match="unknown option 'decay'"):
        kind(decay=0.5)


@dataclass(kw_only=True, eq=False)
class Changed(MiniLoop):
    max_epochs: int = 1
    decay: float = 0.9


def test_a_loop_subclass_can_add_options_with_default_values():
    assert (Changed().max_epochs, Changed(decay=0.5).decay, Changed(max_epochs=2).max_epochs) == (1, 0.5, 2)
    assert PlainInit(max_epochs=2).decay == OnlyAnnotated(max_epochs=2).decay == 0.9
    with pytest.raises(TypeError, match=r"unknown option 'decai'. Did you mean decay\?$"):
        Changed(decai=0.5)


# Errors in edited methods, and objects that an edited loop keeps


def test_an_error_in_an_edited_method_is_not_reported_as_an_error_in_training_step():
    class AddsArray(MiniLoop):
        def _step_optimizer(self):
            self.network.weight.grad.add_(np.ones((1, 4)))

    with pytest.raises(TypeError) as raised:
        train(AddsArray)
    assert "training_step" not in str(raised.value)


@pytest.mark.parametrize("as_dict", [True, False])
def test_a_mini_loop_subclass_can_add_a_learning_rate_scheduler(as_dict):
    class WarmsUp(MiniLoop):
        def _set_up_optimizer(self, optimizer, scheduler):
            super()._set_up_optimizer(optimizer, scheduler)
            appended = step_lr(self.optimizer)
            self.schedulers.append({"scheduler": appended, "interval": "step"} if as_dict else appended)

    whole, _ = assert_resumes(WarmsUp)
    assert whole.history[0]["lr"] == (0.1 * 0.5**7 if as_dict else 0.1)


class AddsPath(MiniLoop):
    def _build_own_state(self):
        return {**super()._build_own_state(), "folder": Path("a")}


def test_a_mini_loop_subclass_cannot_save_a_path_object_in_a_checkpoint():
    with pytest.raises(ValueError, match=r"^checkpoint: got a value of 'fabric_template' .*Path"):
        train(AddsPath, max_epochs=1)


def test_mini_loop_saves_large_attributes_without_checking_if_they_can_be_loaded(monkeypatch):
    """Checking each item of a list with a million items would take 5 seconds."""
    sizes = []

    def measure(states):
        sizes.append(len(pickle.dumps(states)))

    class Counts(MiniLoop):
        def _end_row(self, epoch):
            self.seen = [0.5] * 20_000
            super()._end_row(epoch)

    monkeypatch.setattr(fabric_template.mini, "check_readable", measure)
    loop, _ = train(Counts, max_epochs=1)
    saved = torch.load(loop.checkpoint_dir / "last.ckpt", weights_only=False)["fabric_template"]
    assert saved["ranks"][0]["rng"]["parts"]["training loop"]["seen"] == ("list", [0.5] * 20_000)
    assert max(sizes) < 20_000
