"""resume= and checkpoint_path() choose the furthest good checkpoint, or the best one, among many files."""

import shutil
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from fabric_template.files import disk
from fabric_template.files.found import find_checkpoint
from fabric_template.process.choose import by_progress
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Classifier, make_loader, quiet
from runs import fit, val_loader

from fabric_template import FabricLoop
from fabric_template.checkpoint.checkpoint_io import read_checkpoint


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    monkeypatch.setattr(disk.fs, "fsync", lambda fd: None)


def write(folder, name, epochs, batch=0, of_epoch=3, **more):
    """A checkpoint after so many epochs and batches of the next."""
    ours = {"epoch": epochs, "total_batches": epochs * of_epoch + batch}
    content = {"global_step": ours["total_batches"], "epoch": epochs - (not batch), "optimizer_states": []}
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({**content, "fabric_template": ours, **more}, folder / name)


@pytest.mark.parametrize(
    "name", ["epoch={epoch}-step={step}.ckpt", "step={step}.ckpt", "m-epoch={epoch:03d}.ckpt", "a{step}.ckpt"]
)
def test_the_order_is_that_of_all_that_is_in_them(tmp_path, name):
    """Whatever the names say of it, the times of the files aside."""
    numbers = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    for number in numbers:
        write(tmp_path, name.format(epoch=number, step=3 * number + 3), number + 1)
    write(tmp_path, "best.ckpt", 17, batch=1)
    write(tmp_path, "last.ckpt", 40)
    write(tmp_path, "exception.ckpt", 40, batch=1, fabric_template={"is_exact": False})
    torch.save({"state_dict": {}}, tmp_path / "epoch=99.ckpt")
    found = list(by_progress(tmp_path))
    steps = [read_checkpoint(path)["global_step"] for path in found]
    assert steps == sorted(steps, reverse=True)
    assert len(found) == 42
    assert found[0].name == "last.ckpt"


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("top_k", [2, -1])
def test_best_by_the_mode(tmp_path, mode, top_k):
    """In a process that knows nothing of the run; with "max" it was the worst of those kept."""

    class Scored(Classifier):
        def validation_step(self, batch, batch_idx):
            self.log("score", [3.0, 1.0, 4.0, 2.0][self.current_epoch])

    words = {"monitor": "score", "mode": mode, "save_top_k": top_k}
    loop = fit(tmp_path, Scored, lambda: make_loader(8), val_loader, max_epochs=4, num_sanity_val_steps=0, **words)[0]
    best = {"min": "epoch=1-score=1.0000.ckpt", "max": "epoch=2-score=4.0000.ckpt"}[mode]
    folder = tmp_path / "checkpoints/run/version_0"
    assert find_checkpoint("best", tmp_path / "checkpoints", "run", None, mode) == folder / best
    assert (loop.checkpoint_callback.best_model_path, loop.checkpoint_callback.best_model_score) == (
        str(folder / best), {"min": 1.0, "max": 4.0}[mode],
    )  # fmt: skip
    assert len(list(folder.glob("epoch=*.ckpt"))) == (4 if top_k == -1 else 2)
    kept = read_checkpoint(folder / "last.ckpt")["fabric_template"]["kept"]["best"]
    assert len(kept) == (1 if top_k == -1 else 2)  # all are kept: only the best need be known
    shutil.rmtree(folder)


# ---- several ModelCheckpoints, each with a folder of its own


def seldom_and_often(folder):
    """Of nine steps the first one's last is from the fifth, the other one's from the eighth."""
    words = {"save_last": True, "filename": "{step}"}
    return [ModelCheckpoint(folder / name, every_n_train_steps=n, **words) for name, n in (("seldom", 5), ("often", 2))]


@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.parametrize("is_new", [False, True], ids=["same loop", "new loop"])
@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize("word", ["last", "auto", "trainer"])
def test_the_newest_of_several_savers(tmp_path, word, turn, is_new):
    """Not that of the first one that has any; nor that of a run without them at the same place."""
    make = pl.Trainer if word == "trainer" else FabricLoop
    if make is FabricLoop:
        fit(tmp_path, Classifier, max_steps=3)

    def loop(steps):
        callbacks = seldom_and_often(tmp_path / "kept")[::turn]
        return make(**quiet(max_steps=steps, callbacks=callbacks, enable_checkpointing=True, default_root_dir=tmp_path))

    (first := loop(9)).fit(Classifier(), make_loader())
    second = loop(10) if is_new else first
    second.fit(Classifier(), make_loader(), **({"ckpt_path": "last"} if make is pl.Trainer else {"resume": word}))
    found = Path(second.ckpt_path)
    assert found.parent == tmp_path / "kept" / "often"
    steps = torch.load(found, weights_only=True)["global_step"]
    assert steps == 8 + 2 * is_new  # the second run has gone on to 9, or to 10
