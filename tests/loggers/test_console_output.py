"""What stands in a terminal and in a log file after each kind of ending: the lines, the bar, and why training ended."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from clock import DURATION
from interpreter import ready

HERE = Path(__file__).resolve()

# five fits one after another; the bar's values are those of the last epoch, the times are masked
SCRIPT = """
import signal
import sys
import warnings

import torch
from lightning.pytorch.callbacks import EarlyStopping
from modules import make_data
from torch import nn

from fabric_template import FabricLoop, TensorLoader

warnings.showwarning = lambda message, *rest: print(f"warning: {message}", file=sys.stderr)


def fit(title, act=lambda net, epoch, batch_idx: None, **words):
    print(f"=== {title}", flush=True)
    torch.manual_seed(0)
    net = nn.Linear(8, 3)
    data = TensorLoader(*make_data(40).tensors, batch_size=10)
    made = []

    def training_step(net, batch, batch_idx):
        act(net, made[0].current_epoch, batch_idx)
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    def validation_step(net, batch):
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    words = {"max_epochs": 2, "monitor": "val_loss", "name": title, **words}
    made.append(FabricLoop(accelerator="cpu", enable_model_summary=False, **words))
    steps = {"training_step": training_step, "validation_step": validation_step}
    try:
        made[0].fit(net, data, data, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), **steps)
    except (RuntimeError, KeyboardInterrupt) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)


def interrupt(net, epoch, batch_idx):
    if (epoch, batch_idx) == (1, 2):
        print("mine: about to be interrupted", flush=True)
        signal.raise_signal(signal.SIGINT)


def fail(net, epoch, batch_idx):
    if (epoch, batch_idx) == (1, 2):
        raise RuntimeError("mine")


def spoil(net, epoch, batch_idx):
    if (epoch, batch_idx) == (1, 2):
        nn.init.constant_(net.weight, float("nan"))


fit("max_epochs")
fit("stopping", max_epochs=9, callbacks=[EarlyStopping("val_loss", patience=1, min_delta=1.0)])
fit("interrupted", interrupt)
fit("error", fail)
fit("nan", spoil, max_epochs=5, on_nan=1)
"""

TABLE = """\
epoch   step  train_loss  val_loss        lr   time   left
    0      4      1.1708   1.0459*       0.1    # s    # s
"""
SAID = {
    "max_epochs": TABLE + "    1      8      1.0088   0.9169*       0.1    # s\n",
    "stopping": TABLE
    + "    1      8      1.0088   0.9169*       0.1    # s    # s\n"
    + "ended in epoch 1, after step 8: should_stop was set (EarlyStopping on 'val_loss')\n",
    "interrupted": TABLE
    + "mine: about to be interrupted\n"
    + "SIGINT: stopping after this step; again to stop at once\n",
    "error": TABLE,
    "nan": TABLE
    + "    1      7         nan      nan        0.1    # s    # s\n"
    + "warning: the loss is not finite (NaN or inf) since batch 6 (on_nan=1): training ends after step 7; the last good"
    + " checkpoint is 'checkpoints/nan/version_0/last.ckpt', after step 4\n",
}
BAR = {  # in a terminal, below that
    "max_epochs": "2 epochs: 100%|=| 4/4 [#, train_loss=1.009, val_loss=0.9169]\n",
    "stopping": "2 epochs: 100%|=| 4/4 [#, train_loss=1.009, val_loss=0.9169]\n",
    "interrupted": "epoch 1/2:  75%|=| 3/4 [#, train_loss=1.045, val_loss=1.046]\n",
    "error": "epoch 1/2:  50%|=| 2/4 [#, train_loss=1.066, val_loss=1.046]\n",
    "nan": "2 epochs: 100%|=| 3/3 [#, train_loss=nan, val_loss=nan]\n",
}
BEHIND = {  # the program's own
    "interrupted": "KeyboardInterrupt: SIGINT: training stops in epoch 1, after step 7;"
    " 'checkpoints/interrupted/version_0/last.ckpt' is saved: resume='last' goes on after step 7\n",
    "error": "RuntimeError: mine\n",
}


def seen(raw):
    """What a terminal shows of this: a return goes back to the line's begin, and what comes is written over it."""
    lines, column = [""], 0
    for char in raw.replace("\r\n", "\n"):
        if char == "\n":
            lines.append("")
            column = 0
        elif char == "\r":
            column = 0
        else:
            lines[-1] = lines[-1][:column] + char + lines[-1][column + 1 :]
            column += 1
    return "\n".join(line.rstrip() for line in lines)


def masked(text):
    text = re.sub(r"\|[█▏▎▍▌▋▊▉ ]+\| ", "|=| ", text)
    text = re.sub(r"\[\d\d:\d\d(?::\d\d)?<[^,]*, *[^,\]]*", "[#", text)
    text = re.sub(r" +time +left$", "   time   left", text, flags=re.MULTILINE)  # as wide as what stands below
    return re.sub(f" +{DURATION}", "    # s", text)


def run(tmp_path, terminal):
    """Both streams of the script, in a terminal of 100 columns or in a file."""
    script = f"import sys; sys.path[:0] = [{str(HERE.parents[2])!r}, {str(HERE.parents[1])!r}]\n{SCRIPT}"
    command, words = [sys.executable, "-c", script], {"cwd": tmp_path}
    if not terminal:
        return subprocess.run(
            ready(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **words
        ).stdout
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path):
        os.close(theirs)
        found = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(ours, 65536):
                found += part
    os.close(ours)
    return seen(found.decode())


@pytest.mark.parametrize(
    "terminal", [False, pytest.param(True, marks=pytest.mark.skipif(os.name == "nt", reason="no pty"))]
)
def test_what_stands_there_after_each_kind_of_ending(tmp_path, terminal):
    fits = dict(part.split("\n", 1) for part in masked(run(tmp_path, terminal)).split("=== ")[1:])
    assert fits == {name: said + BAR[name] * terminal + BEHIND.get(name, "") for name, said in SAID.items()}
