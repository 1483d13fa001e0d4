"""The files of a resumed run are those of an undisturbed one, byte for byte, but for the seconds that they tell.

The clock stands still here, so that these are the same, too: `seconds`, `elapsed`, `time` in the rows, and a Timer's.
"""

import time
from pathlib import Path

import pytest
import torch
import torchmetrics
from fabric_template.files.checkpoint import canonical
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LearningRateMonitor, Timer
from modules import Classifier, by_epoch, by_step, make_loader
from runs import Plain, Snapshots, fit, tree, val_loader
from torch.optim.lr_scheduler import ReduceLROnPlateau


class Measured(Classifier):
    def __init__(self):
        super().__init__(by_step)
        self.acc = torchmetrics.Accuracy("multiclass", num_classes=3)

    def training_step(self, batch, batch_idx):
        self.acc(self(batch[0]), batch[1])
        self.log("acc", self.acc, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer, loss = self.optimizers(), super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def adam(module):
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "val_loss"}


def differences(one, other, where=""):
    """Where two nests of tensors and values differ, the order of keys, strides and storages included."""
    if type(one) is not type(other):
        return [f"{where}: {type(one)} {type(other)}"]
    if isinstance(one, torch.Tensor):
        kinds = [(t.dtype, t.shape, t.stride(), t.untyped_storage().nbytes()) for t in (one, other)]
        return [] if kinds[0] == kinds[1] and torch.equal(one, other) else [where]
    if isinstance(one, dict) and list(one) != list(other):
        return [f"{where}: {list(one)} {list(other)}"]
    if isinstance(one, dict | list | tuple) and len(one) == len(other):
        keys = one if isinstance(one, dict) else range(len(one))
        return [found for key in keys for found in differences(one[key], other[key], f"{where}/{key}")]
    return [] if repr(one) == repr(other) else [f"{where}: {one!r} {other!r}"]


def callbacks():
    return [EarlyStopping("val_loss", patience=9), LearningRateMonitor(), Timer("00:01:00:00")]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Measured, {"callbacks": callbacks}),
        (Plain, {"monitor": "val_loss", "save_top_k": 2, "accumulate_grad_batches": 4}),
        (lambda: Classifier(adam), {"precision": "bf16-mixed", "val_check_interval": 2}),
        (Manual, {"train": lambda: make_loader(24, generator=torch.Generator().manual_seed(1)), "monitor": "val_loss"}),
        (lambda: Classifier(by_epoch), {"train": lambda: make_loader(24, num_workers=1), "save_every_n_steps": 4,
                                        "callbacks": lambda: [EMAWeightAveraging(decay=0.5)]}),
        # it ends before its validation: whose loader is not made by a resume, either
        (Classifier, {"check_val_every_n_epoch": 2, "max_steps": 11, "num_sanity_val_steps": 0,
                      "val": lambda: make_loader(8, shuffle=False, generator=torch.Generator().manual_seed(1))}),
        (Classifier, {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 3}),
    ],
    ids=["torchmetrics", "top_k", "precision", "manual", "workers", "not_validated", "reloaded"],
)  # fmt: skip
def test_resumed_at_every_step(tmp_path, monkeypatch, make, words):
    monkeypatch.setattr(time, "monotonic", lambda: 1.0)
    words = {
        "train": lambda: make_loader(24),
        "max_epochs": 2,
        "log_every_n_steps": 2,
        "save_every_n_steps": 1,
        "val": val_loader,
        **words,
    }
    given = words.pop("callbacks", list)
    copies = Snapshots(tmp_path / "whole", tmp_path / "killed")
    fit(tmp_path / "whole", make, callbacks=[*given(), copies], **words)
    expected = {name: Path(tmp_path, "whole", name).read_bytes() for name in tree(tmp_path / "whole")}
    for name in ("config.yaml", "hparams.yaml"):  # they name the folder
        del expected[f"logs/run/version_0/{name}"]
    resumed = 0
    for root in sorted((tmp_path / "killed").iterdir()):
        if not list(root.rglob("last.ckpt")):
            continue
        fit(root, make, seed=9, callbacks=given(), resume="last", **words)
        for name in expected:
            if name.endswith(".ckpt"):
                files = [torch.load(folder / name, weights_only=True) for folder in (tmp_path / "whole", root)]
                assert not differences(*files), f"{name}, killed before batch {root.name}"
            assert (root / name).read_bytes() == expected[name], f"{name}, killed before batch {root.name}"
        resumed += 1
    assert resumed >= 8


def test_strings_and_lists_of_their_own():
    """Equal values in other objects have the same form; what is no plain container stays the object that it is."""
    weights, many = {"w": torch.ones(2)}, list(range(20_000))
    shared = ("a b", [1])
    one = canonical({"x": shared, "y": shared, "many": many, "w": weights["w"]})
    assert one == {"x": shared, "y": shared, "many": many, "w": weights["w"]}
    assert one["x"] is not one["y"]
    assert one["many"] is many
    assert one["w"] is weights["w"]
    two = canonical(["".join(["a", " b"]), "".join(["a", " b"])])
    assert two[0] is two[1]
