"""Lines per epoch: the table in a file, in narrow terminals, across a resume, and as a notebook's page."""

import re
import sys
from pathlib import Path

import fabric_template.record.bar
import nbformat
import pytest
import torch
from clock import DURATION
from fabric_template.core.said import is_interactive
from fabric_template.record.lines import Lines
from fabric_template.record.screen import Screen
from nbclient import NotebookClient
from runs import Plain, fit, make_loader, val_loader

ROW = {
    "epoch": 7,
    "step": 160,
    "train_loss": 0.25,
    "train_acc": 0.9,
    "val_loss": 0.5,
    "val_acc": 0.8,
    "lr": 1e-3,
    "time": 9.0,
}


@pytest.mark.parametrize(
    ("width", "head"),
    [
        (None, "epoch   step  train_loss  train_acc  val_loss  val_acc        lr   time   left"),
        (80, "epoch   step  train_loss  train_acc  val_loss  val_acc        lr   time   left"),
        (66, "epoch  train_loss  train_acc  val_loss  val_acc   time   left"),
        (50, "epoch  train_loss  val_loss  val_acc   time"),
        (30, "epoch  val_loss  val_acc"),
        (10, "epoch"),
    ],
)
def test_a_narrow_terminal_has_fewer_columns(width, head):
    """The monitor and the losses stay longest; no line is as wide as the terminal."""
    lines = Lines("val_acc", "max").add(ROW, 61.0, width)
    assert lines[0] == head
    assert width is None or max(map(len, lines)) < width
    assert len(lines) == 2


def test_columns_that_appear_are_named(tmp_path):
    lines = Lines("val_loss")
    texts = lines.add({"epoch": 0, "train_loss": 1.0, "lr": 0.1, "time": 1.0})
    texts += lines.add(
        {"epoch": 1, "train_loss": 2e-5, "val_loss": float("nan"), "note": "two\nlines", "lr": 0.1, "time": 1.0}
    )
    texts += lines.add({"epoch": 2, "train_loss": 0.5, "lr": 0.1, "time": 1.0})
    assert texts == [
        "epoch  train_loss        lr   time",
        "    0      1.0000       0.1  1.0 s",
        "epoch  train_loss  val_loss       note        lr   time",
        "    1    2.00e-05      nan   two lines       0.1  1.0 s",
        "    2      0.5000                            0.1  1.0 s",
    ]


def test_a_validation_inside_an_epoch_has_a_line(tmp_path, capsys):
    """Of a log file that would be silent in a long epoch; at its end there is one line of both."""
    words = {"val": val_loader, "max_epochs": 1, "val_check_interval": 4, "enable_model_summary": False}
    fit(tmp_path, lambda: Plain(), monitor="val_loss", enable_progress_bar=True, **words)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["epoch", "step", "train_loss", "val_loss", "val_acc", "time"]
    assert [line[:2] for line in lines if line[0].isdigit()] == [["0", "4"], ["0", "8"], ["0", "10"]]
    assert len(lines[1]) == 7  # the unit of time


def test_a_long_epoch_has_a_line_a_minute_in_a_log_file(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(fabric_template.record.bar.time, "monotonic", lambda: clock[0])
    bar = fabric_template.record.bar.Bar(lambda: {"train_loss": 0.5})
    bar.show(Screen(Lines()))
    for epoch, seconds in ((0, 50.0), (1, 150.0)):
        bar.start(f"epoch {epoch}/2", 100)
        for done in range(1, 101):
            clock[0] += seconds / 100
            bar.advance(done)
    bar.close(100, "2 epochs")
    assert capsys.readouterr().out.splitlines() == [
        "epoch 1/2: 41/100 [01:01<01:28,  1.50s/it, train_loss=0.5]",
        "epoch 1/2: 82/100 [02:03<00:27,  1.50s/it, train_loss=0.5]",
    ]


def test_a_resumed_run_goes_on(tmp_path, capsys):
    """Its epochs have their numbers, and the best of before still counts."""
    words = {"train": make_loader, "val": val_loader, "monitor": "val_loss", "enable_progress_bar": True}
    fit(tmp_path, max_epochs=3, **words)
    first = capsys.readouterr().out.splitlines()
    fit(tmp_path, max_epochs=5, resume="last", **words)
    more = capsys.readouterr().out.splitlines()
    _, _, history = fit(tmp_path / "whole", max_epochs=5, **words)
    whole = capsys.readouterr().out.splitlines()

    def rows(lines):
        return [re.sub(rf" +{DURATION}", "", line) for line in lines]

    assert rows(whole[1:]) == rows(first[1:] + more[1:])
    assert [line.split()[0] for line in more] == ["epoch", "3", "4"]
    marked = [int(line.split()[0]) for line in whole if "*" in line]
    best = [epoch for epoch, loss in enumerate(history["val_loss"]) if loss == min(history["val_loss"][: epoch + 1])]
    assert marked == best


def test_a_reader_who_goes_away_costs_no_run(tmp_path, monkeypatch):
    class Gone:
        def write(self, text):
            raise BrokenPipeError

        flush = write

    monkeypatch.setattr(sys, "stdout", Gone())
    _, _, history = fit(tmp_path, max_epochs=2, enable_progress_bar=True)
    assert len(history) == 2


CELLS = [
    """
import warnings
import torch
from modules import Classifier, make_loader
from fabric_template import FabricLoop
from fabric_template.core.said import is_interactive
from lightning.pytorch.callbacks import Callback

class Prints(Callback):
    def on_train_epoch_end(self, loop, module):
        print("printed", loop.current_epoch)

words = {"accelerator": "cpu", "enable_model_summary": False, "monitor": "val_loss", "callbacks": [Prints()]}
torch.manual_seed(0)
warnings.simplefilter("ignore")
""",
    "loop = FabricLoop(max_epochs=2, **words); history = loop.fit(Classifier(), make_loader(16), make_loader(8))",
    "loop",
    "FabricLoop(max_epochs=9, max_steps=6, **words | {'monitor': None}).fit(Classifier(), make_loader(16)); None",
    "FabricLoop(max_epochs=30, **words | {'monitor': None}).fit(Classifier(), make_loader(16)); None",
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:(zmq|jupyter_client|jupyter_core|nbclient).*")
def test_in_a_notebook(tmp_path, monkeypatch):
    """One output holds table and bar, complete where the run went well; nothing of it is a widget. And the loop's words."""
    tests = Path(__file__).resolve().parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tests.parent}:{tests}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    words = {"resources": {"metadata": {"path": str(tmp_path)}}, "coalesce_streams": True, "timeout": 900}
    NotebookClient(notebook, kernel_name="python3", **words).execute()
    assert "ipykernel" in sys.modules  # and yet this process is no notebook, which no signal would end
    assert not is_interactive()
    shown, printed = notebook.cells[1].outputs
    assert (shown.output_type, printed.output_type) == ("display_data", "stream")
    assert printed.text == "printed 0\nprinted 1\n"
    page, text = shown.data["text/html"], shown.data["text/plain"].splitlines()
    assert page.count("<tr") == 3
    assert page.count("font-weight: bold") == 1
    assert '<progress value="4" max="4"></progress> 2 epochs: 4/4 [' in page
    assert text[0].split() == ["epoch", "step", "train_loss", "train_acc", "val_loss", "val_acc", "lr", "time", "left"]
    assert [line.split()[:2] for line in text[1:3]] == [["0", "4"], ["1", "8"]]
    assert text[3].startswith("2 epochs: 100%|")
    assert "widget" not in str(notebook.cells)
    said = notebook.cells[2].outputs[0].data["text/plain"].splitlines()
    assert [line.split("  ")[0] for line in said] == [
        *("trained", "ended", "at the end", "best", "device", "log", "checkpoint", "checkpoint", "go on"),
    ]
    assert said[1:2] + said[4:6] == [
        "ended       max_epochs=2 is reached",
        "device      cpu, 32-true",
        "log         logs/run/version_0/metrics.csv",
    ]
    cut = notebook.cells[3].outputs[0].data["text/html"]
    assert '<progress value="2" max="2"></progress> 2 epochs: 2/2 [' in cut
    assert "<div>ended in epoch 1, after step 6: max_steps=6 is reached</div>" in cut
    assert notebook.cells[4].outputs[0].data["text/html"].count("<tr") == 31


def test_the_words_of_a_loop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loop, _, _ = fit(".", max_epochs=1, name="short")
    assert re.sub(DURATION, "# s", repr(loop)) == (
        "<FabricLoop 'short': trained Classifier: 1 epoch, 10 steps, # s; ended max_epochs=1 is reached; log"
        " logs/short/version_0/metrics.csv; checkpoint checkpoints/short/version_0/last.ckpt>"
    )
    from fabric_template import FabricLoop

    assert repr(FabricLoop(name="new", accelerator="cpu")) == "<FabricLoop 'new': nothing is trained yet>"
    assert repr(FabricLoop.__new__(FabricLoop)) == "<FabricLoop '': nothing is trained yet>"
    assert loop._repr_mimebundle_()["text/plain"].splitlines()[1] == "ended       max_epochs=1 is reached"
    with pytest.raises(ZeroDivisionError):
        loop.fit(Broken(), make_loader())
    assert loop.ending()["ended"] == ["ZeroDivisionError: division by zero"]


class Broken(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 3)

    def training_step(self, batch):
        return 1 / 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
