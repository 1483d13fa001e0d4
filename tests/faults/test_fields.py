"""One altered field in a valid checkpoint ends in a clear line or in a run that ends; and the probe that says so can fail.

`make soak` alters two thousand.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import fields
import pytest
import torch
from interpreter import ready


def test_altered_fields():
    """In a process of its own: one that has run a backward cannot fork another that does."""
    command = ready([sys.executable, fields.__file__, "--fields", "18", "--seed", "1"])
    done = subprocess.run(command, capture_output=True, text=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["losses"] == [], done.stderr
    assert figures["outcomes"]["ended"] > 2
    assert figures["outcomes"]["refused"] > 5


def found(**words):
    return {"outcome": "ended", "line": "", "raised": "", "checked": 0.0, "memory": 0, **words}


def touch(path):
    path.write_text("altered")
    return found()


MISDEEDS = {
    "it hangs": lambda kind, root, path: time.sleep(10_000),
    "the process died with 9": lambda kind, root, path: signal.raise_signal(signal.SIGKILL),
    "KeyError: 'a'": lambda kind, root, path: found(outcome="raised", line="KeyError: 'a'"),
    "'secret.ckpt'. are not what they were": lambda kind, root, path: touch(root.parent.parent / "secret.ckpt"),
    "epoch=8-notes.ckpt'. are not what": lambda kind, root, path: (
        os.unlink(path.with_name("epoch=8-notes.ckpt")) or found()
    ),
    "in/new'. are not what they were": lambda kind, root, path: touch(root.parent / "new"),
    "last.ckpt'. are not what": lambda kind, root, path: touch(path) | {"outcome": "refused"},
    "checking took 40.0 s": lambda kind, root, path: found(checked=40.0),
    "with 1024 MiB more": lambda kind, root, path: found(memory=2**30),
}


@pytest.mark.parametrize("complaint", MISDEEDS)
def test_the_probe_sees(tmp_path, monkeypatch, complaint):
    if complaint == "it hangs":
        monkeypatch.setattr(fields, "PATIENCE", 0.5)
    monkeypatch.setattr(fields, "resume", MISDEEDS[complaint])
    path = Path(tmp_path, "made", fields.VERSION, "last.ckpt")
    path.parent.mkdir(parents=True)
    torch.save({"epoch": 1}, path)
    with pytest.raises(fields.Broken, match=complaint):
        fields.probe("middle", tmp_path / "made", tmp_path / "probe", random.Random(1))
    monkeypatch.setattr(fields, "PATIENCE", 600)
    monkeypatch.setattr(fields, "resume", lambda kind, root, path: found(outcome="refused", line="one"))
    assert fields.probe("middle", tmp_path / "made", tmp_path / "probe", random.Random(1))[1:] == (
        "refused",
        0.0,
        "one",
    )
