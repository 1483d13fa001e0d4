"""resume="auto": the same command starts, or goes on from the newest good checkpoint; a damaged one is set aside."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interpreter import ready, ready_python
from modules import Classifier
from runs import assert_same_end, fit, logs_of, source_of, tree, val_loader, without_time

from fabric_template.checkpoint.checkpoint_io import CheckpointError, read_checkpoint

FOLDER = "checkpoints/run/version_0"


class Scored(Classifier):
    """Best after its second epoch."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", abs(self.current_epoch - 1.0))


WORDS = {"val": val_loader, "monitor": "val_loss"}


def cut(path):
    """As a disk that lost the end of a file leaves it."""
    path.write_bytes(path.read_bytes()[:-1000])


def flip(path):
    """Change bits that only the checksum covers. A single byte may fall on the padding between two records."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 256] = bytes(byte ^ 1 for byte in data[middle : middle + 256])
    path.write_bytes(data)


def noise(path):
    path.write_bytes(b"no checkpoint at all")


@pytest.mark.parametrize("damage", [cut, flip, noise])
def test_a_damaged_newest_one_is_set_aside_and_the_one_before_is_used(tmp_path, damage):
    whole = fit(tmp_path / "whole", Scored, max_epochs=4, **WORDS)
    fit(tmp_path / "a", Scored, max_epochs=3, **WORDS)
    folder = tmp_path / "a" / FOLDER
    damage(folder / "last.ckpt")
    damaged = (folder / "last.ckpt").read_bytes()
    with pytest.raises(CheckpointError) as error:
        fit(tmp_path / "a", Scored, resume="last", max_epochs=4, **WORDS)
    assert str(error.value).startswith(f"'{folder / 'last.ckpt'}' is ")
    assert str(error.value).endswith(
        " Or write resume='auto': it sets damaged ones aside, and goes on from the newest good one."
    )
    with pytest.warns(UserWarning, match="is set aside") as warned:
        resumed = fit(tmp_path / "a", Scored, seed=9, resume="auto", max_epochs=4, **WORDS)
    (text,) = [str(warning.message) for warning in warned]
    assert text.startswith(f"'{folder / 'last.ckpt'}' is ")
    assert text.endswith(
        f" It is set aside as '{folder / 'last.ckpt.damaged'}'. resume='auto' goes on from '{folder / 'best.ckpt'}'."
    )
    assert (folder / "last.ckpt.damaged").read_bytes() == damaged
    assert_same_end(whole, resumed)
    assert logs_of(tmp_path / "a") == logs_of(tmp_path / "whole")
    assert tree(tmp_path / "a") == sorted([*tree(tmp_path / "whole"), f"{FOLDER}/last.ckpt.damaged"])


def test_all_damaged_starts_anew_and_nothing_is_deleted(tmp_path):
    fit(tmp_path / "a", Scored, max_epochs=2, **WORDS)
    folder = tmp_path / "a" / FOLDER
    (folder / "last.ckpt.damaged").write_text("from an earlier time")
    for name in ("last.ckpt", "best.ckpt"):
        cut(folder / name)
    with pytest.raises(CheckpointError, match=r"Or write resume='auto': "):
        fit(tmp_path / "a", Scored, resume="last", max_epochs=2, **WORDS)
    with pytest.warns(UserWarning, match="starts anew: there is no other checkpoint in this version"):
        again = fit(tmp_path / "a", Scored, resume="auto", max_epochs=2, **WORDS)
    assert_same_end(fit(tmp_path / "whole", Scored, max_epochs=2, **WORDS), again)
    assert sorted(path.name for path in folder.iterdir() if path.name != ".lock") == [
        "best.ckpt.damaged", "last.ckpt.damaged", "last.ckpt.damaged-1"
    ]  # fmt: skip
    assert logs_of(tmp_path / "a", version=1) == logs_of(tmp_path / "whole")


@pytest.mark.parametrize("there", ["best", "top-k"])
def test_without_a_last_one_the_furthest_is_meant(tmp_path, there):
    """By progress, not by name or age of the file; a file that holds weights only is none of them."""
    words = {**WORDS, "save_last": False, **({"save_top_k": -1} if there == "top-k" else {})}
    whole = fit(tmp_path / "whole", Scored, max_epochs=4, **words)
    fit(tmp_path / "a", Scored, max_epochs=3, **words)
    folder = tmp_path / "a" / FOLDER
    for i, path in enumerate(sorted(folder.glob("*.ckpt"), reverse=True)):
        Path(path).touch()  # the furthest is the oldest now
        assert i < 3
    torch.save({"state_dict": {}}, folder / "weights.ckpt")
    loop, module, history = fit(tmp_path / "a", Scored, seed=9, resume="auto", max_epochs=4, **words)
    name = {"best": "best.ckpt", "top-k": "epoch=2-val_loss=1.0000.ckpt"}[there]
    assert loop.ckpt_path == str(folder / name)
    assert_same_end(whole, (loop, module, history))


def test_of_the_newest_version_that_has_any(tmp_path):
    fit(tmp_path, max_epochs=1)
    fit(tmp_path, max_epochs=2)
    (tmp_path / "checkpoints/run/version_10").mkdir()
    loop, _, _ = fit(tmp_path, resume="auto", max_epochs=3)
    assert loop.ckpt_path == str(tmp_path / "checkpoints/run/version_1/last.ckpt")
    loop, _, _ = fit(tmp_path, resume="auto", max_epochs=3, version=0)
    assert loop.ckpt_path == str(tmp_path / FOLDER / "last.ckpt")


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    fit(tmp_path, max_epochs=1)
    last = tmp_path / FOLDER / "last.ckpt"
    shutil.move(last, tmp_path / "elsewhere.ckpt")
    last.symlink_to(tmp_path / "elsewhere.ckpt")
    for word in ("auto", "last"):
        with pytest.raises(CheckpointError, match=r"'.*last\.ckpt' leads out of '.*version_0' to '.*elsewhere\.ckpt'"):
            fit(tmp_path, resume=word, max_epochs=2)


@pytest.mark.parametrize("root", [None, "."], ids=["absolute", "relative"])
def test_a_link_out_of_the_folder_is_not_written_over(tmp_path, monkeypatch, root):
    monkeypatch.chdir(tmp_path)
    last, precious = tmp_path / FOLDER / "last.ckpt", tmp_path / "elsewhere.ckpt"
    last.parent.mkdir(parents=True)
    precious.write_bytes(b"mine")
    last.symlink_to(precious)
    with (
        pytest.warns(UserWarning, match=r"leads out of '.*version_0' to '.*elsewhere\.ckpt'"),
        pytest.raises(CheckpointError, match=r"not everything is on disk: .*leads out of"),
    ):
        fit(tmp_path if root is None else Path(root), max_epochs=1, version=0)
    assert last.is_symlink()
    assert precious.read_bytes() == b"mine"


def test_killed_before_the_first_checkpoint(tmp_path):
    """In a version given by name, the rows of the attempt that cannot be continued are set aside."""

    class Killed(Classifier):
        def on_train_epoch_end(self):
            if self.current_epoch == 0:
                raise KeyboardInterrupt

    words = {"version": "mine", "log_every_n_steps": 2, "max_epochs": 2}
    whole = fit(tmp_path / "whole", lambda: Classifier(on_step=True), **words)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / "a", lambda: Killed(on_step=True), resume="auto", **words)
    assert_same_end(whole, fit(tmp_path / "a", lambda: Classifier(on_step=True), resume="auto", **words))
    extra = ["logs/run/mine/steps.csv.before", "logs/run/mine/steps.csv.before-1"]
    assert tree(tmp_path / "a") == sorted([*tree(tmp_path / "whole"), *extra])
    for name in ("metrics.csv", "steps.csv"):
        texts = [without_time(tmp_path / run / "logs/run/mine" / name) for run in ("a", "whole")]
        assert texts[0] == texts[1]


class Own:
    """A class that a file should not name."""


@pytest.mark.parametrize("argument", ["resume", "load", "auto"])
def test_trusted(tmp_path, argument):
    """A file that needs a class of somebody's own is refused; trusted=True reads it, and says why that was needed."""
    fit(tmp_path, max_epochs=1)
    path = tmp_path / FOLDER / "last.ckpt"
    torch.save({**read_checkpoint(path), "mine": Own()}, path)
    given = {"resume": {"resume": "last"}, "load": {"load": path}, "auto": {"resume": "auto"}}[argument]
    with pytest.raises(CheckpointError) as error:
        fit(tmp_path, max_epochs=2, **given)
    assert str(error.value) == (
        f"'{path}' wants the class or function test_resume_auto.Own, which can run any program; refused. If you know"
        " who wrote it, give trusted=True, and save it again from there."
    )
    with pytest.warns(UserWarning, match=r"wants the class .*; loaded all the same, because of trusted=True"):
        _, _, history = fit(tmp_path, max_epochs=2, trusted=True, **given)
    assert history["epoch"].tolist() == ([0, 1])


def test_a_pickle_of_old_is_not_read_for_validate_either(tmp_path):
    loop, module, _ = fit(tmp_path, val=val_loader, max_epochs=1)
    path = tmp_path / "old.ckpt"
    path.write_bytes(pickle.dumps({"state_dict": dict(module.state_dict()), "mine": Own()}))
    with pytest.raises(CheckpointError, match=r"is an old-style pickle, which can run any program; refused"):
        loop.validate(module, val_loader(), load=path)


@pytest.mark.skipif(sys.platform == "win32", reason="torchrun's elastic agent")
def test_torchrun(tmp_path):
    """Two ranks that come by themselves: rank zero alone finds and sets aside; both go on from the same file.

    Then one dies: torchrun ends the other and starts both again, and they go on from the newest checkpoint.
    """
    script = tmp_path / "train.py"
    path = source_of("")[-1].strip()
    script.write_text(
        f"{path}\nimport os, sys\nfrom modules import Classifier\nfrom runs import fit\n"
        "class Dies(Classifier):\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        if self.global_rank == 1 and self.global_step == 14 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "            os._exit(3)\n"
        "        return super().training_step(batch, batch_idx)\n"
        "words = dict(devices=2, strategy='ddp', monitor='train_loss', max_epochs=3, save_every_n_steps=2)\n"
        "loop, module, history = fit(sys.argv[1], Dies, resume='auto', **words)\n"
        "with open(f'found{loop.global_rank}', 'w') as file:\n"  # of its own: pieces of lines of both would mix
        "    print('from', loop.ckpt_path, history['epoch'].tolist(), end='', file=file)\n"
    )

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = {"devices": 2, "strategy": "ddp_fork", "monitor": "train_loss"}
    fit(whole, max_epochs=3, **words)
    fit(parts, max_epochs=2, **words)
    flip(parts / FOLDER / "last.ckpt")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = ready([*launch, str(script), str(parts)])
    # torch's own: a store shared over restarts still names the ports of ranks that are gone, and gloo would wait for them
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHON_EXEC": ready_python()}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is set aside as") == 1, done.stderr
    found = f"from {parts / FOLDER / 'last.ckpt'} [0, 1, 2]"
    assert [(tmp_path / f"found{rank}").read_text() for rank in range(2)] == [found, found]
    assert logs_of(whole) == logs_of(parts)
    one, other = (read_checkpoint(root / FOLDER / "last.ckpt")["state_dict"] for root in (whole, parts))
    assert all(torch.equal(one[name], other[name]) for name in one)
