"""Test callbacks that an installed package adds through its entry points."""

import sys

from both import LOOPS
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from modules import quiet

PACKAGE = """
from lightning.pytorch.callbacks import Callback, ModelCheckpoint


class Plugged(Callback):
    def on_train_start(self, trainer, module):
        trainer.called.append(type(self).__name__)


class Other(Plugged):
    pass


def several():
    return [ModelCheckpoint(every_n_epochs=2), Plugged()]


def one():
    return Other()
"""
POINTS = "[lightning.pytorch.callbacks_factory]\nseveral = plugging_package:several\none = plugging_package:one\n"


class Given(Callback):
    def on_train_start(self, trainer, module):
        trainer.called.append("Given")


def test_fit_adds_callbacks_registered_as_entry_points(tmp_path, monkeypatch):
    (tmp_path / "plugging_package.py").write_text(PACKAGE)
    (metadata := tmp_path / "plugging_package-1.0.dist-info").mkdir()
    (metadata / "METADATA").write_text("Name: plugging_package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for name, kind in LOOPS.items():
        options = quiet(max_epochs=1, limit_train_batches=1, default_root_dir=tmp_path / name)
        loop = kind(**{**options, "enable_checkpointing": True, "callbacks": [Given(), ModelCheckpoint()]})
        loop.called = []
        loop.fit(BoringModel())
        names = [type(one).__name__ for one in loop.callbacks]
        found.append(
            (loop.called, [name for name in names if name in ("Given", "Plugged", "Other", "ModelCheckpoint")])
        )
    monkeypatch.delitem(sys.modules, "plugging_package")
    assert found[0] == found[1]
    called = ["Given", "Plugged", "Other"]
    assert found[1] == (called, [*called, "ModelCheckpoint", "ModelCheckpoint"])
