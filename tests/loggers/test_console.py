"""Test what a run prints in a terminal, a log file and a notebook."""

import io
import os
import re
import struct
import subprocess
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import nbformat
import pytest
from clock import DURATION
from interpreter import fork_command
from kernels import KERNEL, install_kernel
from lightning.pytorch.callbacks import TQDMProgressBar
from modules import Classifier, make_loader
from nbclient import NotebookClient
from runs import Plain, val_loader
from runs import fit as fit_quietly

from fabric_template.loggers import console
from fabric_template.loop import FabricLoop

REPOSITORY = Path(__file__).resolve().parents[2]
SUPPORT = REPOSITORY / "tests" / "support"


class Terminal(io.StringIO):
    """A terminal that receives both stdout and stderr."""

    encoding = "utf-8"

    def isatty(self):
        return True

    def fileno(self):
        return 99


@pytest.fixture
def terminal(monkeypatch):
    """Return a terminal of 90 columns, in which the progress bar is drawn after each step."""
    monkeypatch.setitem(console.SECONDS_BETWEEN_DRAWS, "terminal", 0.0)
    monkeypatch.setenv("COLUMNS", "90")
    return Terminal()


def visible(text):
    """Return the text that remains visible after carriage returns."""
    lines, column = [""], 0
    for char in text.replace("\r\n", "\n"):
        if char == "\n":
            lines.append("")
            column = 0
        elif char == "\r":
            column = 0
        else:
            lines[-1] = lines[-1][:column] + char + lines[-1][column + 1 :]
            column += 1
    return "\n".join(line.rstrip() for line in lines)


def without_times(text):
    text = re.sub(r"\|[█▏▎▍▌▋▊▉ ]+\| ", "|=| ", text)
    text = re.sub(r"\[\d\d:\d\d(?::\d\d)?<[^,]*, *[^,\]]*", "[#", text)
    text = re.sub(r" +time$", "   time", text, flags=re.MULTILINE)
    return re.sub(f" +{DURATION}", "    # s", text)


def drawn(terminal):
    """Return each drawing of the bar, without times and values."""
    parts = without_times(terminal.getvalue()).replace("\n", "\r").split("\r")
    bars = [part.strip() for part in parts if "|=|" in part]
    return list(dict.fromkeys(bar.replace("|=|", "").split(" [#")[0] for bar in bars))


def fit(terminal, root, *args, **options):
    with redirect_stdout(terminal), redirect_stderr(terminal):
        try:
            return fit_quietly(root, *args, **{"enable_progress_bar": True, **options})
        finally:
            assert sys.stdout is sys.stderr is terminal


# Output of the progress bar


def test_a_single_progress_bar_shows_training_and_validation(tmp_path, terminal):
    fit(terminal, tmp_path, train=lambda: make_loader(16), val=val_loader, max_epochs=2, val_check_interval=2)
    epoch = [
        "epoch {}/2:  25% 1/4",
        "epoch {}/2:  50% 2/4",
        *(f"epoch {{}}/2, validating {n}/5:  50% 2/4" for n in (1, 2, 3, 4, 5)),
        "epoch {}/2:  75% 3/4",
        "epoch {}/2: 100% 4/4",
        *(f"epoch {{}}/2, validating {n}/5: 100% 4/4" for n in (1, 2, 3, 4, 5)),
    ]
    lines = [text.format(n) for n in (0, 1) for text in epoch]
    assert drawn(terminal) == ["epoch 0/2:   0% 0/4", *lines, "2 epochs: 100% 4/4"]


def test_validate_shows_a_progress_bar(terminal):
    class Two(Classifier):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            super().validation_step(batch, batch_idx)

    loop = FabricLoop(accelerator="cpu", logger=False)
    with redirect_stdout(terminal), redirect_stderr(terminal):
        loop.validate(Two(), [val_loader(), val_loader()], verbose=False)
    assert drawn(terminal) == [f"validate: {n * 10:3}% {n}/10" for n in range(11)]


def test_the_progress_bar_shows_values_logged_with_prog_bar(tmp_path, terminal):
    fit(terminal, tmp_path, train=lambda: make_loader(16), val=val_loader, max_epochs=1)
    assert ", val_loss=" in terminal.getvalue()
    assert "train_loss=" not in terminal.getvalue()


@pytest.mark.parametrize(
    "options",
    [{"enable_progress_bar": False}, {"enable_progress_bar": None, "barebones": True}, {"callbacks": "bar"}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_a_disabled_progress_bar_prints_nothing(tmp_path, terminal, options):
    """In one case, a disabled TQDMProgressBar callback replaces the loop's own bar."""
    if options.get("callbacks"):
        bar = TQDMProgressBar()
        bar.disable()
        options = {"callbacks": [bar]}
    fit(terminal, tmp_path, max_epochs=1, **options)
    assert terminal.getvalue() == ""


def test_training_continues_with_one_warning_after_a_progress_bar_error(tmp_path, terminal, monkeypatch):
    def fail(run):
        raise ZeroDivisionError("mine")

    monkeypatch.setattr(console, "bar_values", fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, _, history = fit(terminal, tmp_path, train=lambda: make_loader(8), max_epochs=2)
    assert len(history) == 2
    texts = [str(warning.message) for warning in caught if "progress bar" in str(warning.message)]
    assert texts == [
        "The progress bar is off for the rest of this run, because drawing it failed: ZeroDivisionError: mine"
    ]


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_the_progress_bar_omits_values_that_are_too_wide_for_the_terminal(tmp_path, terminal, monkeypatch, columns):
    class Verbose(Classifier):
        def training_step(self, batch, batch_idx):
            for name in ("accuracy", "gradient_norm", "kl_divergence", "reconstruction"):
                self.log(name, 0.5, prog_bar=True)
            return super().training_step(batch, batch_idx)

    monkeypatch.setenv("COLUMNS", str(columns))
    fit(terminal, tmp_path, Verbose, train=lambda: make_loader(16), max_epochs=1)
    bars = [bar.rstrip() for bar in re.split("[\r\n]", terminal.getvalue()) if "it/s" in bar and "0/4" not in bar]
    assert bars
    for bar in bars:
        assert len(bar) < columns
        assert bar.endswith("]")
        assert len(re.search(r"\|(.*?)\|", bar)[1]) >= console.MIN_BAR_WIDTH
    assert ("reconstruction=0.5" in bars[-1]) == (columns == 160)


# Output to a real terminal and to a log file

SCRIPT = f"""
import signal
import sys
sys.path[:0] = [{str(REPOSITORY)!r}, {str(SUPPORT)!r}]
import torch
from lightning.pytorch.callbacks import EarlyStopping
from modules import make_data
from torch import nn
from fabric_template import FabricLoop, TensorLoader

def fail():
    raise RuntimeError("mine")

def fit(name, fails=False, **options):
    print(f"=== {{name}}", flush=True)
    torch.manual_seed(0)
    net = nn.Linear(8, 3)
    data = TensorLoader(*make_data(40).tensors, batch_size=10)

    def step(net, batch, batch_idx):
        if fails and loop.current_epoch == 1 and batch_idx == 2 and net.training:
            fail()
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    options = {{"max_epochs": 2, "monitor": "val_loss", "name": name, "log_every_n_steps": 1, **options}}
    loop = FabricLoop(accelerator="cpu", enable_model_summary=False, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        loop.fit(net, data, data, optimizer=optimizer, training_step=step, validation_step=step)
    except RuntimeError as error:
        print(f"RuntimeError: {{error}}", file=sys.stderr, flush=True)

fit("limit")
fit("stopping", max_epochs=9, callbacks=[EarlyStopping("val_loss", patience=1, min_delta=1.0)])
fit("error", fails=True)
"""
SIGNAL = """
def fail():
    signal.raise_signal(signal.SIGINT)

fit("signal", fails=True)
"""
TABLE = """\
epoch   step  train_loss  val_loss        lr   time
    0      4      1.1708   1.0459*       0.1    # s
"""
LINES = {
    "limit": TABLE + "    1      8      1.0088   0.9169*       0.1    # s\n",
    "stopping": TABLE
    + "    1      8      1.0088   0.9169*       0.1    # s\n"
    + "ended in epoch 1, after step 8: should_stop was set by EarlyStopping on 'val_loss'\n",
    "error": TABLE,
}
ENDS = {"error": "RuntimeError: mine\n"}
BARS = {
    "limit": "2 epochs: 100%|=| 4/4 [#, train_loss=1.009, val_loss=0.9169]\n",
    "stopping": "2 epochs: 100%|=| 4/4 [#, train_loss=1.009, val_loss=0.9169]\n",
    "error": "epoch 1/2:  50%|=| 2/4 [#, train_loss=1.066, val_loss=1.046]\n",
}


def quiet_command(script):
    """Return a command that runs a script without warnings."""
    return fork_command([sys.executable, "-c", f"import warnings; warnings.simplefilter('ignore')\n{script}"])


def run_in_terminal(command, folder):
    """Return the output of a program in a terminal of 100 columns."""
    fcntl, pty, termios = (pytest.importorskip(name) for name in ("fcntl", "pty", "termios"))
    own_end, other_end = pty.openpty()
    fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), other_end)
    found = b""
    with subprocess.Popen(command, cwd=folder, **streams):
        os.close(other_end)
        # Read until an error is raised, because the program has then closed its end of the terminal.
        with suppress(OSError):
            while part := os.read(own_end, 65536):
                found += part
    os.close(own_end)
    return visible(found.decode())


@pytest.fixture(scope="module")
def in_terminal(tmp_path_factory):
    """Return the terminal output of SCRIPT, and of a run that a signal ends."""
    text = run_in_terminal(quiet_command(SCRIPT + SIGNAL), tmp_path_factory.mktemp("terminal"))
    return text.split("=== signal\n")


def runs_of(text):
    return dict(part.split("\n", 1) for part in without_times(text).split("=== ")[1:])


def test_redirected_output_contains_the_metrics_table(tmp_path):
    done = subprocess.run(
        quiet_command(SCRIPT), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert runs_of(done.stdout) == {name: lines + ENDS.get(name, "") for name, lines in LINES.items()}


def test_a_terminal_shows_the_printed_table_and_the_progress_bar(in_terminal):
    assert runs_of(in_terminal[0]) == {name: LINES[name] + BARS[name] + ENDS.get(name, "") for name in LINES}


def test_the_message_after_a_signal_starts_on_a_new_line(in_terminal):
    before, message = in_terminal[1].split("SIGINT: training stops ")
    assert before.endswith("\n")
    assert message.startswith(
        "in epoch 1, after step 7. To resume from 'checkpoints/signal/version_0/last.ckpt', write resume='last'."
    )
    assert "\nSIGINT: stopping after this step" in before
    assert len(re.findall(r"in epoch \d", in_terminal[1])) == 1


# The table of metrics that a run prints


def test_each_mid_epoch_validation_prints_a_line(tmp_path, capsys):
    options = {"val": val_loader, "max_epochs": 1, "val_check_interval": 4, "enable_progress_bar": True}
    fit_quietly(tmp_path, Plain, monitor="val_loss", **options)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["epoch", "step", "train_loss", "val_loss", "val_acc", "time"]
    assert [line[:2] for line in lines if line[0].isdigit()] == [["0", "4"], ["0", "8"], ["0", "10"]]


@pytest.mark.parametrize("columns", [60, 80, 100])
@pytest.mark.parametrize("num_metrics", [1, 12])
def test_the_printed_table_is_narrower_than_the_terminal(tmp_path, terminal, monkeypatch, columns, num_metrics):
    class Verbose(Plain):
        def training_step(self, batch):
            self.log_dict({f"metric_{i}": 1.0 for i in range(num_metrics)}, on_epoch=True, on_step=False)
            return super().training_step(batch)

    monkeypatch.setenv("COLUMNS", str(columns))
    options = {"val": val_loader, "max_steps": 10, "val_check_interval": 4, "monitor": "val_acc"}
    *_, history = fit(terminal, tmp_path, Verbose, **options)
    header, *rows = [
        line for line in visible(terminal.getvalue()).splitlines() if line[:5].strip(" 0123456789") in ("", "epoch")
    ]
    header = header.split()
    assert {"epoch", "step", "val_acc", "time"} <= {*header}
    assert max(map(len, rows)) < columns
    is_complete = {*history.columns} - {"waiting"} <= {*header}
    assert (header[-1] == "…") is not is_complete


def test_a_long_epoch_prints_a_line_per_minute_if_output_is_not_a_terminal(tmp_path, capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])

    class Slow(Plain):
        def training_step(self, batch):
            now[0] += 15
            return super().training_step(batch)

    fit_quietly(tmp_path, Slow, train=lambda: make_loader(40), max_epochs=1, enable_progress_bar=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines[:2]] == [
        "epoch 0/1: 4/10 [01:00<01:30",
        "epoch 0/1: 8/10 [02:00<00:30",
    ]
    assert "train_loss=" in lines[0]


def test_a_resumed_run_continues_the_printed_table(tmp_path, capsys):
    options = {"train": make_loader, "val": val_loader, "monitor": "val_loss", "enable_progress_bar": True}
    parts = []
    for root, epochs, resume in (("cut", 3, None), ("cut", 5, "last"), ("whole", 5, None)):
        fit_quietly(tmp_path / root, max_epochs=epochs, resume=resume, **options)
        parts.append([re.sub(rf" +{DURATION}", "", line) for line in capsys.readouterr().out.splitlines()])
    first, more, whole = parts
    assert whole[1:] == first[1:] + more[1:]
    assert [line.split()[0] for line in more] == ["epoch", "3", "4"]


# Output after the end of a run


def test_repr_of_a_loop_shows_how_the_run_ended():
    class Broken(Plain):
        def training_step(self, batch):
            return 1 / 0

    loop, _, _ = fit_quietly(".", max_epochs=1, name="short", monitor="train_loss")
    assert [re.sub(DURATION, "# s", line) for line in repr(loop).splitlines()][:2] == [
        "trained     Classifier: 1 epoch, 10 steps, # s",
        "ended       max_epochs=1 is reached",
    ]
    summary = loop.ending()
    assert list(summary) == ["trained", "ended", "at the end", "best", "device", "log", "checkpoint", "resume"]
    assert summary["device"] == ["cpu, 32-true"]
    assert summary["checkpoint"] == [f"checkpoints/short/version_0/{name}.ckpt" for name in ("best", "last")]
    assert summary["resume"] == ["fit(..., resume='last')"]
    assert repr(FabricLoop(name="new", accelerator="cpu")) == "<FabricLoop 'new': nothing is trained yet>"
    with pytest.raises(ZeroDivisionError):
        loop.fit(Broken(), make_loader())
    assert loop.ending()["ended"] == ["ZeroDivisionError: division by zero"]


def test_validate_prints_a_table(capsys):
    loop = FabricLoop(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    results = loop.validate(Classifier(), make_loader())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["Validate", "metric", "DataLoader", "0"]
    assert lines[-1].split() == ["val_loss", str(results[0]["val_loss"])]
    loop.validate(Classifier(), make_loader(), verbose=False)
    assert capsys.readouterr().out == ""


# Output in a notebook

CELLS = [
    """
import warnings
import torch
from modules import Classifier, make_loader
from fabric_template.loop import FabricLoop
from lightning.pytorch.callbacks import Callback

class Prints(Callback):
    def on_train_epoch_end(self, loop, module):
        print("printed", loop.current_epoch)

options = {"accelerator": "cpu", "enable_model_summary": False, "monitor": "val_loss", "callbacks": [Prints()]}
torch.manual_seed(0)
warnings.simplefilter("ignore")
""",
    "loop = FabricLoop(max_epochs=2, **options); history = loop.fit(Classifier(), make_loader(16), make_loader(8))",
    "loop",
    "FabricLoop(max_epochs=99, max_steps=100, **options | {'monitor': None}).fit(Classifier(), make_loader(16)); None",
    """
import time
from fabric_template import MiniLoop

def training_step(net, batch):
    time.sleep(0.25)
    return net(batch).mean()

net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loop = MiniLoop(max_epochs=1, accelerator="cpu", default_root_dir="mini")
loop.fit(net, list(torch.ones(3, 1, 2)), optimizer=optimizer, training_step=training_step)
None
""",
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:(zmq|jupyter_client|jupyter_core|nbclient).*")
def test_a_notebook_cell_shows_metrics_and_progress_bar_in_one_output(tmp_path, monkeypatch):
    """The output is not a widget, so a saved notebook still contains it."""
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{SUPPORT}")
    for name, value in install_kernel(tmp_path / "kernel").items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    options = {"resources": {"metadata": {"path": str(tmp_path)}}, "coalesce_streams": True, "timeout": 900}
    NotebookClient(notebook, kernel_name=KERNEL, **options).execute()
    shown, printed = notebook.cells[1].outputs
    assert (shown.output_type, printed.output_type) == ("display_data", "stream")
    assert printed.text == "printed 0\nprinted 1\n"
    page, text = shown.data["text/html"], shown.data["text/plain"].splitlines()
    assert re.match(r'<pre style="white-space: pre; font-family: monospace">epoch .*\*', page, re.S)
    assert "\n2 epochs: 100%|" in page
    assert text[0].split() == ["epoch", "step", "train_loss", "train_acc", "val_loss", "val_acc", "lr", "time"]
    assert [line.split()[:2] for line in text[1:3]] == [["0", "4"], ["1", "8"]]
    assert re.fullmatch(r"2 epochs: 100%\|█{10}\| 4/4 \[.*it/s\]\nval_loss=[\d.]+", "\n".join(text[3:]))
    assert "widget" not in str(notebook.cells)
    summary = notebook.cells[2].outputs[0].data["text/plain"]
    assert "ended       max_epochs=2 is reached" in summary
    limited = notebook.cells[3].outputs[0].data["text/html"]
    assert limited.count("\n") == 27
    assert "\nended in epoch 24, after step 100: max_steps=100 is reached\n25 epochs: 100%" in limited
    # MiniLoop draws its bar on stdout and later erases it. An
    # erased bar on stderr would leave a red line in a notebook.
    [rows] = notebook.cells[4].outputs
    assert (rows.name, rows.text.count("\n")) == ("stdout", 2)
