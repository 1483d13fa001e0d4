"""The bar: one per fit, seldom drawn, complete at the end; what is printed while it is up; who has the screen."""

import io
import logging
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import fabric_template.record.bar
import fabric_template.record.screen
import pytest
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from modules import Classifier, make_loader
from runs import fit as fit_quietly
from runs import val_loader
from test_endings import masked, seen
from torch import nn

from fabric_template import FabricLoop, TensorLoader


class Tty(io.StringIO):
    """A terminal in which both streams come together."""

    encoding = "utf-8"

    def isatty(self):
        return True

    def fileno(self):
        return 99


@pytest.fixture
def tty(monkeypatch):
    """stdout and stderr are a terminal of 90 columns, in which each step is drawn."""
    monkeypatch.setattr(fabric_template.record.bar, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(fabric_template.record.screen.os, "get_terminal_size", lambda number: Size)
    return Tty()


class Size:
    columns = 90


def drawn(tty):
    """What the bar said, drawing by drawing, without times and without what stands beside it."""
    parts = masked(tty.getvalue()).replace("\n", "\r").split("\r")
    bars = [part.strip() for part in parts if "|=|" in part]
    return list(dict.fromkeys(bar.replace("|=|", "").split(" [#")[0] for bar in bars))


@contextmanager
def on(tty):
    """Within, all is shown there; it is given back in the end."""
    with redirect_stdout(tty), redirect_stderr(tty):
        try:
            yield
        finally:
            assert sys.stdout is sys.stderr is tty


def fit(tty, root, *args, **words):
    with on(tty):
        return fit_quietly(root, *args, **{"enable_progress_bar": True, **words})


def test_one_bar_counts_batches_and_says_what_validates(tmp_path, tty):
    """The validation in the middle of an epoch stands in words; the bar never goes back but for the next epoch."""
    fit(tty, tmp_path, train=lambda: make_loader(16), val=val_loader, max_epochs=2, val_check_interval=2)
    epoch = [
        "epoch {}/2:  25% 1/4",
        "epoch {}/2:  50% 2/4",
        *(f"epoch {{}}/2, validating {n}/5:  50% 2/4" for n in (1, 2, 3, 4, 5)),
        "epoch {}/2:  75% 3/4",
        "epoch {}/2: 100% 4/4",
        *(f"epoch {{}}/2, validating {n}/5: 100% 4/4" for n in (1, 2, 3, 4, 5)),
    ]
    assert drawn(tty) == ["epoch 0/2:   0% 0/4"] + [
        line for n in (0, 1) for line in [text.format(n) for text in epoch]
    ] + ["2 epochs: 100% 4/4"]


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ({"max_epochs": 3, "max_steps": 9}, "3 epochs: 100% 1/1"),
        ({"max_epochs": 1, "limit_train_batches": 3}, "1 epoch: 100% 3/3"),
        ({"max_epochs": -1, "max_steps": 5}, "2 epochs: 100% 1/1"),
        ({"fast_dev_run": True}, "1 epoch: 100% 1/1"),
    ],
    ids=str,
)
def test_complete_at_the_end(tmp_path, tty, words, end):
    fit(tty, tmp_path, train=lambda: make_loader(16), **words)
    assert drawn(tty)[-1] == end
    assert tty.getvalue().endswith("\n")


def test_an_endless_loader_ends_complete(tmp_path, tty):
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield torch.ones(8), 1

    train = lambda: torch.utils.data.DataLoader(Endless(), 4)  # noqa: E731
    fit(tty, tmp_path, train=train, max_steps=3)
    assert drawn(tty)[-1] == "1 epoch: 100% 3/3"
    assert "epoch 0: 2it" in masked(tty.getvalue())


def test_no_batches_no_bar(tmp_path, tty):
    fit(tty, tmp_path, max_epochs=1, limit_train_batches=0)
    assert drawn(tty) == []


def test_by_itself(tmp_path, tty):
    """A validation that is no part of a fit has a bar of its own; two loaders count on."""
    loop = FabricLoop(accelerator="cpu", logger=False)

    class Two(Classifier):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            super().validation_step(batch, batch_idx)

    with on(tty):
        loop.validate(Two(), [val_loader(), val_loader()], verbose=False)
    assert drawn(tty) == [f"validate: {n * 10:3}% {n}/10" for n in range(11)]


def test_values_beside_it(tmp_path, tty):
    """What was logged for it; of functions that log nothing, what they return: the means so far."""
    fit(tty, tmp_path, train=lambda: make_loader(16), val=val_loader, max_epochs=1)
    assert ", val_loss=" in tty.getvalue()
    assert "train_loss=" not in tty.getvalue()
    tty.truncate(0)
    net, data = nn.Linear(2, 1, bias=False), TensorLoader(torch.ones(8, 2), batch_size=4)
    nn.init.constant_(net.weight, 0.5)
    loop = FabricLoop(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with on(tty):
        loop.fit(net, data, optimizer=optimizer, training_step=lambda net, batch: net(batch[0]).mean())
    found = [part.split("train_loss=")[1].split("]")[0] for part in tty.getvalue().split("\r") if "train_loss=" in part]
    assert list(dict.fromkeys(found)) == ["1", "0.5"]  # 1, and the mean of 1 and 0


class Prints(Callback):
    """Prints in every way, also in the middle of a line."""

    def on_fit_start(self, trainer, module):
        self.handler = logging.StreamHandler(sys.stderr)
        logging.getLogger("mine").addHandler(self.handler)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        print("out", batch_idx)
        print("begun", end=" ")
        sys.stderr.writelines(["and ", "ended\n"])
        logging.getLogger("mine").warning("logged")

    def on_fit_end(self, trainer, module):
        logging.getLogger("mine").removeHandler(self.handler)


def test_what_is_printed_stands_above(tmp_path, tty):
    fit(tty, tmp_path, train=lambda: make_loader(8), max_epochs=1, callbacks=[Prints()])
    lines = [line for line in masked(seen(tty.getvalue())).splitlines() if line]
    head, row = lines[-3:-1]
    assert lines[:-3] == ["out 0", "begun and ended", "logged", "out 1", "begun and ended", "logged"]
    assert head.split() == ["epoch", "step", "train_loss", "train_acc", "lr", "time"]
    assert row.split()[:2] == ["0", "2"]
    assert lines[-1] == "1 epoch: 100%|=| 2/2 [#]"


def test_given_back_after_an_error(tmp_path, tty):
    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise RuntimeError("mine")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="mine"):
        fit(tty, tmp_path, Fails, train=lambda: make_loader(20), max_epochs=1)
    assert drawn(tty)[-1] == "epoch 0/1:  60% 3/5"
    assert tty.getvalue().endswith("\n")


def test_somebody_elses_stream_stays(tmp_path, tty):
    """Who sets sys.stdout in a hook keeps it."""
    own = io.StringIO()

    class Sets(Callback):
        def on_train_epoch_end(self, trainer, module):
            sys.stdout = own

    with redirect_stdout(tty), redirect_stderr(tty):
        fit_quietly(tmp_path, train=lambda: make_loader(8), max_epochs=1, callbacks=[Sets()], enable_progress_bar=True)
        assert sys.stdout is own
        assert sys.stderr is tty
    assert "train_loss" in own.getvalue()  # the lines are printed


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
@pytest.mark.parametrize(
    "words",
    [{"enable_progress_bar": False}, {"enable_progress_bar": None, "barebones": True}, {"theirs": True}],
    ids=str,
)
def test_silence(tmp_path, tty, words):
    """Neither bar nor lines: as asked, and where Lightning's bar has the screen."""
    words = dict(words)
    if words.pop("theirs", None):
        theirs = TQDMProgressBar()
        theirs.disable()
        words = {"callbacks": [theirs]}
    fit(tty, tmp_path, max_epochs=1, **words)
    assert tty.getvalue() == ""


def test_rank_zero_only(tmp_path, tty, monkeypatch):
    from lightning.fabric import Fabric

    monkeypatch.setattr(Fabric, "is_global_zero", property(lambda self: False))
    fit(tty, tmp_path, max_epochs=1, logger=False, enable_checkpointing=False)
    assert tty.getvalue() == ""


class Noted(fabric_template.record.screen.Screen):
    """Notes what is drawn."""

    patience = 0.0

    def __init__(self):
        self.drawn = []

    def draw(self, meter):
        self.drawn.append((meter["n"], meter["postfix"]))


@pytest.mark.parametrize(("seconds", "draws"), [(2**-10, 4), (2**-4, 250), (1.0, 1000)])
def test_throttled_by_time(monkeypatch, seconds, draws):
    """A thousand steps of so many seconds: five draws a second at most, and the values are read only then."""
    clock, read = [100.0], []
    monkeypatch.setattr(fabric_template.record.bar.time, "monotonic", lambda: clock[0])

    def values():
        read.append(1)
        return {"loss": 0.123456}

    bar, screen = fabric_template.record.bar.Bar(values), Noted()
    bar.show(screen)
    bar.start("epoch 0", 1000)
    for done in range(1, 1001):
        clock[0] += seconds
        bar.advance(done)
    assert len(read) == len(screen.drawn) == draws + 1  # and one as it begins
    assert screen.drawn[0] == (0, "loss=0.1235")
    bar.close(1000, "1 epoch")
    bar.advance(1001)
    assert len(screen.drawn) == draws + 2
    assert screen.drawn[-1][0] == 1000


def test_disabled_costs_nothing():
    bar = fabric_template.record.bar.Bar(lambda: pytest.fail("nobody looks"))
    bar.start("epoch 0", 10)
    bar.advance(5)
    bar.close()
