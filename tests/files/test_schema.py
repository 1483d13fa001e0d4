"""A file that can be read is believed only as far as its schema was checked: one line, before anything is used."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from runs import fit, logs_of, tree, val_loader

from fabric_template.files.checkpoint import OURS
from fabric_template.files.reading import CheckpointError
from fabric_template.files.schema import check_resumable


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Where a run of two epochs lies that was saved in the middle of its third."""
    root = tmp_path_factory.mktemp("run")
    fit(root, val=val_loader, max_steps=25, save_every_n_steps=7, monitor="val_loss", save_top_k=2)
    return root


def altered(run, tmp_path, alter):
    """A copy of the run whose last checkpoint says something else."""
    root = tmp_path / "run"
    shutil.copytree(run, root)
    path = root / "checkpoints/run/version_0/last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    alter(checkpoint[OURS])
    torch.save(checkpoint, path)
    return root, path


def on_with(root, path):
    return fit(root, val=val_loader, max_epochs=4, monitor="val_loss", save_top_k=1, resume=path)


@pytest.mark.parametrize("name", ["{outside}", "../../../secret.ckpt", "last.ckpt", "notes.ckpt", "epoch=0/x.ckpt", ""])
def test_a_file_named_among_the_best_is_not_removed(run, tmp_path, name):
    outside = tmp_path / "secret.ckpt"
    outside.write_text("kept")
    name = name.format(outside=outside)

    def alter(ours):
        ours["kept"]["best"] = {name: 9.0}

    root, path = altered(run, tmp_path, alter)
    (path.parent / "notes.ckpt").write_text("of somebody else")
    before = tree(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        on_with(root, path)
    assert str(caught.value) == (
        f"'{path}' cannot be gone on from: a key of fabric_template.kept.best is {name[:60]!r}, expected a file name that the"
        " loop gives to one of the best; it was altered, or written by something else: use another file"
    )
    assert tree(tmp_path) == before


def test_the_best_is_not_looked_for_outside(run, tmp_path):
    def alter(ours):
        ours["kept"]["best"] = {"../x.ckpt": 9.0}

    root, path = altered(run, tmp_path, alter)
    shutil.copy(path, path.parent.parent / "x.ckpt")
    with pytest.raises(CheckpointError, match=r"a key of fabric_template.kept.best is '../x.ckpt'"):
        fit(root, val=val_loader, max_epochs=4, resume="best")


def test_rows_that_waited_hold_no_formulas(run, tmp_path):
    def alter(ours):
        for row in (logs := ours["logs"][0]["metrics.csv"]).setdefault("waiting", [{"epoch": "2"}]):
            row |= {"train_loss": "=cmd|'/c calc'!A1", "=1+1": "0\n1"}
        assert logs["rows"] == 2
        ours["history"] |= {"rows": 3, "last": {"epoch": 2}}

    root, path = altered(run, tmp_path, alter)
    on_with(root, path)
    metrics, _ = logs_of(root)
    header, *rows = metrics.splitlines()
    assert "'=1+1" in header.split(",")
    assert rows[2].startswith("2,,'=cmd|'/c calc'!A1,")
    assert "0\\n1" in rows[2]


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        (["ranks", 0, "rng", "numpy", 2], 10**6, "ranks[0].rng.numpy[2] is 1000000, expected a whole number from 0 to 624"),
        (["ranks", 0, "rng", "torch"], torch.zeros(5056, dtype=torch.uint8),
         "ranks[0].rng.torch is a tensor (torch.uint8, shape (5056,)), expected a state of torch.Generator"),
        (["ranks", 0, "rng", "python", 1], torch.full((625,), 625),
         "ranks[0].rng.python[1] is a tensor (torch.int64, shape (625,)), expected 625 words of 32 bits"),
        (["ranks", 0, "train", "sources", 0, "taken"], 10**12, "in fabric_template a loader is far behind its pass"),
        (["batch_idx"], 10**12, "in fabric_template batch_idx is more than total_batches"),
        (["epoch"], True, "epoch is True, expected a whole number from 0 to 281474976710656"),
        (["total_batches"], 10**40, "total_batches is a number of 133 bits, expected a whole number from 0 to 281474976710656"),
        (["ranks"], [], "in fabric_template no rank has a part"),
        (["ranks", 0, "metrics", "train", 0, "meta", "reduce"], "eval", "expected one of ('mean', 'sum', 'max', 'min')"),
        (["logs", 0, "metrics.csv", "columns"], ["epoch", "epoch"], "in fabric_template a column of the logs comes twice"),
        (["logs", 0], {"../x.csv": {"rows": 0, "columns": []}}, "a key of fabric_template.logs[0] is '../x.csv',"),
    ],
)  # fmt: skip
def test_one_line_before_anything_is_written(run, tmp_path, place, value, complaint):
    def alter(ours):
        for key in place[:-1]:
            ours = ours[key]
        ours[place[-1]] = value

    root, path = altered(run, tmp_path, alter)
    before = tree(root)
    with pytest.raises(CheckpointError) as caught:
        on_with(root, path)
    assert complaint in str(caught.value)
    assert str(caught.value).startswith(f"'{path}' cannot be gone on from: ")
    assert len(str(caught.value).splitlines()) == 1
    assert tree(root) == before


def test_what_no_table_names_is_let_be(run):
    checkpoint = torch.load(Path(run, "checkpoints/run/version_0/last.ckpt"), weights_only=True)
    more = copy.deepcopy(checkpoint)
    more[OURS]["later"] = more["theirs"] = more[OURS]["ranks"][0]["later"] = object()
    del more[OURS]["stepped_before"], more[OURS]["seconds"]
    check_resumable(more, "a.ckpt")
    del more[OURS]["ranks"][0]["rng"]
    with pytest.raises(CheckpointError, match=r"fabric_template.ranks\[0\] has no rng"):
        check_resumable(more, "a.ckpt")
