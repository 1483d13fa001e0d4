"""The verb doctor: what it prints, its exit code, what it refuses."""

import json
import sys

import pytest

from fabric_template.tools import cli
from fabric_template.tools import typed as typed_commands

HEAD = """
import sys
import torch
from torch.nn.functional import mse_loss

torch.manual_seed(0)
x = torch.randn(40, 4)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""
OLD = f"""{HEAD}
for step in range(10_000_000):
    optimizer.zero_grad()
    mse_loss(net(x), x[:, :1]).backward()
    optimizer.step()
    if sys.argv[1:] == ["--decay"]:
        optimizer.param_groups[0]["lr"] *= 0.5
"""
NEW = f"""{HEAD}
from fabric_template import MiniLoop

step = lambda net, batch: mse_loss(net(batch), batch[:, :1])
MiniLoop(max_epochs=10_000_000, accelerator="cpu").fit(net, [x], optimizer=optimizer, training_step=step)
"""


@pytest.fixture(autouse=True)
def typed(monkeypatch, tmp_path):
    """As if typed in a shell, in a folder with two scripts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fabric-template"])
    monkeypatch.setattr(typed_commands.shutil, "which", lambda name: None)
    texts = {
        "plain.py": OLD.partition("    if sys.argv")[0],
        "old.py": OLD,
        "new.py": NEW,
        "bad.py": "raise ValueError('mine')\n",
        "data.csv": "1\n",
        "none.py": "",
        "broken.py": "f(\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)


def test_two_scripts_are_run_as_far_as_is_asked_for(capsys):
    assert cli.main(["doctor", "old.py", "new.py", "--steps", "4"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(", loss")[0] for line in printed] == [
        "yours       old.py: 4 steps of SGD, 2 parameters",
        "ours        new.py: 4 steps of SGD, 2 parameters",
        "same        nothing parts in 4 steps",
    ]


def test_what_parts_as_json_with_arguments_for_the_scripts(capsys):
    assert cli.main(["doctor", "old.py", "plain.py", "--steps", "3", "--json", "--", "--decay"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["findings"][0] == {
        "step": 1, "part": "settings", "what": "learning rate 0.05 in yours, 0.1 here",
        "why": "a scheduler steps in yours only",
        "write": 'optimizer={"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}',
    }  # fmt: skip


def test_one_script_is_read(capsys, tmp_path):
    assert cli.main(["doctor", "old.py"]) == 0
    assert capsys.readouterr().out == "sound       nothing is seen to be wrong in 1 training loop\n"
    assert cli.main(["doctor", "new.py"]) == 0
    assert capsys.readouterr().out == "loops       none is seen that calls backward() and an optimizer's step()\n"
    (tmp_path / "old.py").write_text(OLD.replace("optimizer.zero_grad()", "pass"))
    assert cli.main(["doctor", "old.py"]) == 1
    assert capsys.readouterr().out == (
        "wrong       old.py:13: the gradients are never cleared: each step uses the sum of all before it\n"
        "write       optimizer.zero_grad() before backward\n"
    )
    assert cli.main(["doctor", "old.py", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert found == {
        "line": 13, "what": "the gradients are never cleared: each step uses the sum of all before it",
        "write": "optimizer.zero_grad() before backward", "is_advice": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope.py"], "doctor nope.py: there is no such file: expected a script such as train.py, or a run's folder"),
        (["data.csv"], "doctor data.csv: expected a script (.py), a notebook (.ipynb) or a run's folder"),
        (
            ["broken.py"],
            "doctor broken.py: this is no Python that can be read: '(' was never closed (<unknown>, line 1)",
        ),
        (["old.py", "."], "doctor .: expected two scripts, OLD.py NEW.py"),
        (["old.py", "new.py", "--steps", "0"], "--steps=0: expected how many steps are compared, 1 or more"),
        (
            ["none.py", "new.py"],
            "doctor none.py: it made no optimizer step: expected a script that trains, in this process (on one device)",
        ),
        (
            ["bad.py", "new.py"],
            "doctor bad.py: the script failed with exit code 1; expected one that trains; see above",
        ),
    ],
)
def test_misuse(capsys, words, said):
    assert cli.main(["doctor", *words]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1] == f"./fabric-template: {said}".replace("./", "")
    assert ("ValueError: mine" in error) == (words[0] == "bad.py")
