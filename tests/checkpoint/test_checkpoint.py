"""Test that checkpoints have Lightning's layout, and test which files are kept."""

import logging
import warnings
from pathlib import Path

import lightning
import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Classifier, make_loader
from runs import Plain, fit, same, tree, val_loader, weights_of, with_files
from torch import nn

from fabric_template import FabricLoop

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

TRAINER_KEYS = {
    "epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks", "optimizer_states",
    "lr_schedulers",
}  # fmt: skip


class Sized(Classifier):
    def __init__(self, hidden=16, dropout=0.0):
        super().__init__(dropout=dropout, hidden=hidden)
        self.save_hyperparameters()


class Scored(Classifier):
    """A model that logs the val_loss values 3, 1, 2, 0.5 and 4, one in each epoch."""

    scores = (3.0, 1.0, 2.0, 0.5, 4.0)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.scores[self.current_epoch])


def plain_loader(num=24):
    return make_loader(num, shuffle=False)


def last_of(root, version=0):
    return Path(root, "checkpoints", "run", f"version_{version}", "last.ckpt")


def kept(root):
    folder = Path(root, "checkpoints/run/version_0")
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


# The keys of a checkpoint


def test_a_checkpoint_has_the_same_keys_as_one_from_trainer(tmp_path):
    loop, module, _ = fit(tmp_path, Sized, plain_loader, val_loader, max_epochs=2)
    trainer = _trainer(tmp_path / "trainer", max_epochs=2)
    _fit_trainer(trainer, Sized())
    theirs = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    ours = torch.load(last_of(tmp_path), weights_only=True)
    assert set(ours) == {*theirs, "fabric_template"}
    assert set(ours) >= TRAINER_KEYS
    assert ours["pytorch-lightning_version"] == lightning.__version__
    assert ours["hyper_parameters"] == theirs["hyper_parameters"] == {"hidden": 16, "dropout": 0.0}
    assert ours["hparams_name"] == theirs["hparams_name"]
    assert same(ours["state_dict"], dict(module.state_dict()))
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    assert ours["loops"].keys() == theirs["loops"].keys()
    assert ours["loops"]["fit_loop"].keys() <= theirs["loops"]["fit_loop"].keys()
    assert (ours["global_step"], ours["fabric_template"]["progress"]["epochs_done"]) == (12, 2)


def test_checkpoints_of_models_that_are_not_lightning_modules_contain_the_keys_that_trainer_saves(tmp_path):
    _, model, _ = fit(tmp_path, Plain, max_epochs=1)
    found = torch.load(last_of(tmp_path), weights_only=True)
    assert set(found) == TRAINER_KEYS | {"fabric_template"}
    other = Plain()
    other.net.load_state_dict({key.removeprefix("net."): value for key, value in found["state_dict"].items()})
    assert same(weights_of(model), weights_of(other))


def test_load_from_checkpoint_reads_weights_and_hyperparameters(tmp_path):
    _, module, _ = fit(tmp_path, lambda: Sized(hidden=5, dropout=0.1), max_epochs=1)
    loaded = Sized.load_from_checkpoint(last_of(tmp_path))
    assert (loaded.hparams.hidden, loaded.hparams.dropout) == (5, 0.1)
    assert same(dict(loaded.state_dict()), dict(module.state_dict()))


# Loading weights that torch or Fabric has saved


def _trainer(root, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pl.Trainer(
            accelerator="cpu", default_root_dir=root, logger=False, enable_progress_bar=False,
            enable_model_summary=False, **{"callbacks": [ModelCheckpoint(dirpath=root, filename="trainer")], **options},
        )  # fmt: skip


def _fit_trainer(trainer, module, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, plain_loader(), val_loader(), **options)


def _save_plainly(layout, weights, path):
    """Write the weights in a file format that FabricLoop can load but does not write itself."""
    if layout == "fabric.save":
        fabric = Fabric(accelerator="cpu")
        net = nn.Linear(8, 3)
        net.load_state_dict(weights)
        net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
        fabric.save(path, {"model": net, "optimizer": optimizer, "step": 7})
    # torch.compile adds "_orig_mod." to the names of parameters. DDP adds "module." before this prefix.
    elif "_orig_mod." in layout:
        torch.save({"state_dict": {f"{layout}{key}": value for key, value in weights.items()}}, path)
    else:
        content = {"state_dict": {"state_dict": weights}, "model": {"model": weights}, "bare": weights,
                   "module.": {f"module.{key}": value for key, value in weights.items()}}  # fmt: skip
        torch.save(content[layout], path)


LAYOUTS = ["state_dict", "model", "bare", "module.", "fabric.save", "_orig_mod.", "module._orig_mod."]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_reads_weights_that_torch_or_fabric_has_saved(tmp_path, layout):
    net = nn.Linear(8, 3)
    weights = {key: torch.full_like(value, 0.5) for key, value in net.state_dict().items()}
    path = tmp_path / "w.pt"
    _save_plainly(layout, weights, path)
    loop = FabricLoop(**with_files(max_epochs=0, logger=False, enable_checkpointing=False))
    loop.fit(net, make_loader(), load=path, optimizer=torch.optim.SGD(net.parameters(), 0.1),
             training_step=lambda net, batch: net(batch[0]).sum())  # fmt: skip
    assert same(dict(net.state_dict()), weights)


# The checkpoint files that a run keeps


@pytest.mark.parametrize(
    ("options", "files"),
    [
        ({}, ["last.ckpt"]),
        ({"monitor": "val_loss"}, ["best.ckpt", "last.ckpt"]),
        ({"monitor": "val_loss", "save_top_k": 0}, ["last.ckpt"]),
        (
            {"monitor": "val_loss", "save_top_k": 2},
            ["epoch=1-step=12-val_loss=1.ckpt", "epoch=3-step=24-val_loss=0.5.ckpt", "last.ckpt"],
        ),
        (
            {"monitor": "val_loss", "save_top_k": 2, "mode": "max"},
            ["epoch=0-step=6-val_loss=3.ckpt", "epoch=4-step=30-val_loss=4.ckpt", "last.ckpt"],
        ),
        (
            {"monitor": "val_loss", "save_top_k": -1, "save_last": False},
            [
                f"epoch={epoch}-step={6 * epoch + 6}-val_loss={score:g}.ckpt"
                for epoch, score in enumerate(Scored.scores)
            ],
        ),
        ({"monitor": "val_loss", "save_last": False}, ["best.ckpt"]),
        ({"monitor": "val_loss", "mode": "max"}, ["best.ckpt", "last.ckpt"]),
    ],
    ids=str,
)
def test_monitor_and_save_top_k_decide_which_checkpoints_are_kept(tmp_path, options, files):
    loop, _, _ = fit(tmp_path, Scored, plain_loader, val_loader, max_epochs=5, **options)
    assert kept(tmp_path) == files
    saver = loop.checkpoint_callback
    best_epoch = 4 if options.get("mode") == "max" else 3
    if "monitor" in options and options.get("save_top_k") != 0:
        assert float(saver.best_model_score) == Scored.scores[best_epoch]
        found = torch.load(saver.best_model_path, weights_only=True)
        assert found["epoch"] == best_epoch
    elif "monitor" not in options:
        assert saver.best_model_path == str(last_of(tmp_path))
    if options.get("save_last", True):
        assert torch.load(last_of(tmp_path), weights_only=True)["epoch"] == 4


def test_resume_warns_if_a_callback_of_the_saved_run_is_missing(tmp_path):
    stop = pl.callbacks.EarlyStopping("val_loss", patience=9)
    fit(tmp_path, Scored, plain_loader, val_loader, max_epochs=1, callbacks=[stop])
    with pytest.warns(UserWarning, match=r"Please add the following callbacks: .*EarlyStopping"):
        fit(tmp_path, Scored, plain_loader, val_loader, max_epochs=2, resume="last")


def test_the_loop_saves_no_other_checkpoints_if_a_model_checkpoint_callback_is_used(tmp_path):
    callback = ModelCheckpoint(dirpath=tmp_path / "own", monitor="val_loss", save_top_k=1, filename="{epoch}")
    fit(tmp_path, Scored, plain_loader, val_loader, max_epochs=5, callbacks=[callback], logger=False)
    assert tree(tmp_path) == ["own/epoch=3.ckpt"]
    found = torch.load(callback.best_model_path, weights_only=True)
    assert found["epoch"] == 3
    assert set(found) >= TRAINER_KEYS


# Saving with a custom CheckpointIO, and finding the checkpoints "best" and "last"


class Counting(TorchCheckpointIO):
    def __init__(self):
        super().__init__()
        self.saved = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.saved.append(Path(path).name)
        super().save_checkpoint(checkpoint, path, storage_options)


def test_checkpoints_are_written_by_a_custom_checkpoint_io(tmp_path):
    io = Counting()
    fit(tmp_path, max_epochs=2, plugins=[io])
    assert io.saved == ["last.ckpt", "last.ckpt"]
    assert kept(tmp_path) == ["last.ckpt"]


@pytest.mark.parametrize("name", ["best", "last"])
def test_load_finds_the_best_and_last_files_of_a_model_checkpoint_callback(tmp_path, name):
    saving = pl.callbacks.ModelCheckpoint(tmp_path / "mine", monitor="val_loss", filename="{epoch}", save_last=True)
    loop, module, _ = fit(tmp_path, Classifier, make_loader, val_loader, max_epochs=2, callbacks=[saving])
    assert loop.checkpoint_path(name) == Path(getattr(saving, f"{name}_model_path"))
    expected = loop.validate(module, val_loader(), load=getattr(saving, f"{name}_model_path"), verbose=False)
    assert loop.validate(module, val_loader(), load=name, verbose=False) == expected


@pytest.mark.parametrize(("save_last", "expected"), [(True, [3, 6, 9]), (False, [3, 6, 9])])
def test_save_every_n_steps_does_not_save_twice_at_the_end_of_an_epoch(tmp_path, save_last, expected):
    seen = []

    class Seen(pl.Callback):
        def on_save_checkpoint(self, trainer, module, checkpoint):
            seen.append(checkpoint["global_step"])

    fit(
        tmp_path,
        train=lambda: make_loader(12),
        callbacks=[Seen()],
        max_epochs=3,
        save_every_n_steps=3,
        save_last=save_last,
    )
    assert seen == expected
    assert torch.load(tmp_path / "checkpoints/run/version_0/last.ckpt", weights_only=True)["global_step"] == 9
