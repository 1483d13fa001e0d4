"""Trainer's arguments of fit, validate, test and predict, and its options at their defaults."""

import inspect
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from modules import Classifier, make_loader
from runs import fit, loud, val_loader

from fabric_template import FabricLoop
from fabric_template.errors import CheckpointError


class WithTest(Classifier):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))


def results_of(loop, call, **given):
    """Return what a call returns for a module of other weights."""
    torch.manual_seed(7)
    if call == "predict":
        return torch.cat(loop.predict(WithTest(), [batch[0] for batch in val_loader()], **given)).tolist()
    return getattr(loop, call)(WithTest(), val_loader(), verbose=False, **given)


@pytest.fixture
def trained(tmp_path):
    return fit(tmp_path, WithTest, val=val_loader, max_epochs=2, monitor="val_loss")[0]


@pytest.mark.parametrize(
    ("call", "path"), [("validate", "last"), ("test", "best"), ("predict", "path"), ("test", None)]
)
def test_ckpt_path_is_load_in_an_evaluation(trained, call, path):
    path = trained.checkpoint_path("last") if path == "path" else path
    results = [results_of(trained, call, **{argument: path}) for argument in ("ckpt_path", "load")]
    assert results[0] == results[1]
    assert (trained.ckpt_path is None) == (path is None)


@pytest.mark.parametrize("kind", [pl.Trainer, FabricLoop])
def test_ckpt_path_last_starts_where_there_is_none(tmp_path, kind):
    loop = kind(**loud(tmp_path, max_epochs=1, logger=False))
    with pytest.warns(UserWarning, match=r'\.fit\(ckpt_path="last"\) is set, but there is no last checkpoint avail'):
        loop.fit(Classifier(), make_loader(), val_loader(), ckpt_path="last", weights_only=None)
    assert loop.global_step == 10


def test_weights_only(tmp_path, trained):
    path = tmp_path / "old.ckpt"
    torch.save({"state_dict": WithTest().state_dict(), "note": Path}, path)
    with pytest.raises(CheckpointError, match="pass weights_only=False"):
        results_of(trained, "validate", ckpt_path=path)
    assert results_of(trained, "validate", ckpt_path=path, weights_only=False)


def test_async_checkpoint_io_writes_the_same_files(tmp_path):
    """Files are complete when they are saved: the plugin's inner CheckpointIO writes them."""
    plugins = {"plain": None, "async": AsyncCheckpointIO()}
    saved = {}
    for name, plugin in plugins.items():
        loop = fit(tmp_path / name, val=val_loader, max_epochs=2, monitor="val_loss", plugins=plugin)[0]
        saved[name] = torch.load(loop.checkpoint_path("best"), weights_only=True)["state_dict"]
    assert all(torch.equal(saved["plain"][name], saved["async"][name]) for name in saved["plain"])


def test_every_option_of_trainer_at_its_default(tmp_path):
    defaults = {name: option.default for name, option in inspect.signature(pl.Trainer).parameters.items()}
    loop = FabricLoop(**defaults | {"accelerator": "cpu", "default_root_dir": tmp_path})
    assert loop.config == FabricLoop(accelerator="cpu", default_root_dir=tmp_path).config
    for name, value in {"use_distributed_sampler": False, "sync_batchnorm": True, "model_registry": "lit:3"}.items():
        with pytest.raises(TypeError, match=f"^FabricLoop: got the unknown option {name}\\. "):
            FabricLoop(**defaults | {name: value})
