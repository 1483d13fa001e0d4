"""resume= among thousands of files and versions: few are opened, and the furthest good one is still the one chosen."""

import shutil
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Classifier, make_loader, quiet
from runs import fit, val_loader

from fabric_template import FabricLoop
from fabric_template.files import disk
from fabric_template.files.found import find_checkpoint
from fabric_template.files.reading import load_header, read_checkpoint
from fabric_template.process import choose as resume
from fabric_template.process.choose import by_progress, newest_good


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    monkeypatch.setattr(disk.fs, "fsync", lambda fd: None)


@pytest.fixture
def opened(monkeypatch):
    """The names of the files that are looked into."""
    names = []

    def counting(path):
        names.append(Path(path).name)
        return load_header(path)

    monkeypatch.setattr(resume, "load_header", counting)
    return names


def write(folder, name, epochs, batch=0, of_epoch=3, **more):
    """A checkpoint after so many epochs and batches of the next."""
    ours = {"epoch": epochs, "total_batches": epochs * of_epoch + batch}
    content = {"global_step": ours["total_batches"], "epoch": epochs - (not batch), "optimizer_states": []}
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({**content, "fabric_template": ours, **more}, folder / name)


def test_one_of_all_epochs_and_a_last_one(tmp_path, opened):
    for epoch in range(300):
        write(tmp_path, f"epoch={epoch}-val_loss={1 / (epoch + 1):.4f}.ckpt", epoch + 1)
    write(tmp_path, "last.ckpt", 300)
    write(tmp_path, "best.ckpt", 120)
    assert newest_good([tmp_path]) == tmp_path / "last.ckpt"
    assert sorted(opened) == ["best.ckpt", "last.ckpt"]
    opened.clear()
    write(tmp_path, "last.ckpt", 299, batch=2)  # a kill between the two files of the 300th epoch
    assert newest_good([tmp_path]) == tmp_path / "epoch=299-val_loss=0.0033.ckpt"
    assert len(opened) == 3
    (tmp_path / "epoch=299-val_loss=0.0033.ckpt").write_bytes(b"")
    with pytest.warns(UserWarning, match="is set aside"):
        assert newest_good([tmp_path]) == tmp_path / "last.ckpt"
    assert len(opened) == 6


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


@pytest.mark.parametrize(
    ("name", "said"),
    [("epoch=3-step=40.ckpt", (3, 40)), ("epoch=3-val_loss=0.5.ckpt", (3, resume.INFINITE)),
     ("train_loss_epoch=0.5.ckpt", (resume.INFINITE,) * 2), ("epoch=10.5.ckpt", (resume.INFINITE,) * 2),
     ("x-step=7-v1.ckpt", (resume.INFINITE, 7)), ("last.ckpt", (resume.INFINITE,) * 2)],
)  # fmt: skip
def test_what_a_name_says(name, said):
    assert resume._said(name) == said


def test_thousands_of_versions(tmp_path, opened):
    """Empty ones, and those of runs that have no best: none of their files is opened."""
    for number in range(400):
        write(tmp_path / f"run/version_{number}", "last.ckpt", 1) if number % 2 else (
            tmp_path / f"run/version_{number}"
        ).mkdir(parents=True, exist_ok=True)
    assert find_checkpoint("best", tmp_path, "run", None) is None
    assert opened == []
    assert newest_good([tmp_path / "run" / f"version_{number}" for number in range(398, -1, -1)]) == (
        tmp_path / "run/version_397/last.ckpt"
    )
    assert opened == ["last.ckpt"]


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
