"""Test that each loop continues a run, no matter which of the two loops wrote it."""

import itertools
import os
import shutil
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import pytest
from modules import Classifier, make_loader
from parameters import halve, once
from runs import val_loader, with_files

from fabric_template import FabricLoop, MiniLoop
from fabric_template.checkpoint.checkpoint_io import read_checkpoint

LOOPS = {"FabricLoop": FabricLoop, "MiniLoop": MiniLoop}
PAIRS = list(itertools.product(LOOPS, repeat=2))


def train(kind, epochs, resume=None, model=Classifier, load=None, **options):
    options = with_files(max_epochs=epochs, **options)
    if kind == "MiniLoop":
        del options["enable_progress_bar"], options["enable_model_summary"]
    loop = LOOPS[kind](**options)
    loop.fit(model(), make_loader(24), val_loader(), resume=resume, load=load)
    return loop


def steps_in(version):
    folder = Path("checkpoints/run", version)
    return {path.name: read_checkpoint(path)["global_step"] for path in sorted(folder.glob("*.ckpt"))}


@pytest.mark.parametrize(
    ("first", "second", "keyword"),
    [
        ("FabricLoop", "FabricLoop", "last"),
        ("FabricLoop", "MiniLoop", "auto"),
        ("MiniLoop", "FabricLoop", "auto"),
        ("MiniLoop", "MiniLoop", "last"),
    ],
)
def test_resume_continues_the_run_that_saved_the_latest_checkpoint(first, second, keyword):
    train(first, 1)
    train(second, 1)
    train(first, 2, resume="last", version=0)
    for path in Path("checkpoints/run/version_1").iterdir():
        os.utime(path)
    shutil.copytree("checkpoints/run/version_1", "checkpoints/run/version_8")
    train(second, 3, resume=keyword)
    assert [steps_in(f"version_{number}")["last.ckpt"] for number in (0, 1, 8)] == [18, 6, 6]


@pytest.mark.parametrize(("first", "second", "without_lock"), once(LOOPS, LOOPS, [[0], [1], [0, 1, 2]]), ids=str)
def test_each_loop_finds_the_newest_run_even_if_lock_files_are_missing(first, second, without_lock):
    """If a .lock file is missing, the loops read the time that the checkpoint contains."""
    for _ in range(3):
        train(first, 1)
    train(second, 2, resume="last", version=0)
    for number in without_lock:
        Path(f"checkpoints/run/version_{number}/.lock").unlink()
        Path(f"logs/run/version_{number}/.lock").unlink()
    train(second, 3, resume="auto")
    assert [steps_in(f"version_{number}")["last.ckpt"] for number in (0, 1, 2)] == [18, 6, 6]


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("is_resumed", [False, True])
def test_resume_finds_the_newest_run_after_the_clock_was_set_back(first, second, is_resumed, monkeypatch):
    """A computer without a battery-powered clock starts with a time in the past."""
    train(first, 1)
    train(first, 1)
    now = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() - 90000)
        train(second, 2, resume="checkpoints/run/version_0/last.ckpt" if is_resumed else None)
    train(second, 3, resume="last")
    steps = [steps_in(path.name)["last.ckpt"] for path in sorted(Path("checkpoints/run").iterdir())]
    assert steps == ([18, 6] if is_resumed else [6, 6, 18])


@pytest.mark.parametrize("is_damaged", [False, True])
def test_mini_loop_finds_the_newest_run_even_if_only_best_ckpt_is_readable(is_damaged):
    train("MiniLoop", 2, monitor="val_loss", version=5)
    train("MiniLoop", 2, monitor="val_loss", version=1)
    folder = Path("checkpoints/run/version_1")
    (folder / "last.ckpt").unlink()
    if is_damaged:
        (folder / "last.ckpt").write_bytes(b"damaged")
    context = pytest.warns(match="last.ckpt: the file is damaged") if is_damaged else nullcontext()
    with context:
        train("MiniLoop", 3, resume="auto")
    assert steps_in("version_1")["last.ckpt"] == 18


@pytest.mark.parametrize("kind", LOOPS)
def test_resume_finds_a_version_whose_name_contains_brackets(kind):
    train(kind, 1, version="a1")
    train(kind, 1, version="a[1]")
    train(kind, 2, version="a[1]", resume="last")
    assert [steps_in(version)["last.ckpt"] for version in ("a1", "a[1]")] == [6, 12]


@pytest.mark.parametrize("option", ["name", "version"])
@pytest.mark.parametrize("value", ["two\nlines", "x\ry", "\0", "a\u2028b"])
@pytest.mark.parametrize("kind", LOOPS)
def test_a_run_name_or_version_with_unprintable_characters_is_refused(kind, value, option):
    with pytest.raises(ValueError, match=rf"{option}: got .*expected .*a non-empty folder name"):
        LOOPS[kind](accelerator="cpu", **{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [("monitor", "val_f1"), ("mode", "max"), ("precision", "16-mixed"), ("devices", 2), ("default_root_dir", "other")],
)
@pytest.mark.parametrize("kind", LOOPS)
def test_an_option_that_only_the_constructor_reads_cannot_be_changed_later(kind, option, value):
    loop = LOOPS[kind](accelerator="cpu", monitor="val_loss")

    def change():
        setattr(loop, option, value)
        loop.validate(Classifier(), val_loader())

    with pytest.raises(ValueError, match=rf"{option}: got .* for an existing loop.*Write {kind}\({option}="):
        change()


@pytest.mark.parametrize(("option", "value"), [("max_epochs", "2"), ("accumulate_grad_batches", 0), ("max_steps", -3)])
def test_mini_loop_checks_an_option_that_is_changed_between_two_calls_to_fit(option, value):
    loop = train("MiniLoop", 1)
    setattr(loop, option, value)
    with pytest.raises(ValueError, match=f"{option}: got {value!r}, expected an int >= "):
        loop.fit(Classifier(), make_loader(24), val_loader())


@pytest.mark.parametrize(
    ("path", "is_link", "version"),
    halve(["logs", "checkpoints", "logs/run", "checkpoints/run"], [False, True], [None, 0]),
)
def test_fabric_loop_refuses_a_file_or_broken_link_where_it_needs_a_folder(path, is_link, version):
    path = Path(path)
    path.parent.mkdir(exist_ok=True)
    if is_link:
        path.symlink_to("missing")
    else:
        path.write_text("")
    with pytest.raises(ValueError, match=rf"default_root_dir: got .*{path}.*, expected a writable folder"):
        train("FabricLoop", 1, version=version)


class Dies(Classifier):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 2:
            raise RuntimeError("stopped")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("first", "version"), halve(LOOPS, [0, "tuned"]))
def test_fabric_loop_refuses_resume_last_if_a_newer_run_in_the_folder_has_no_checkpoint(first, version):
    folder = "version_0" if version == 0 else version
    train(first, 2, version=version, monitor="val_loss")
    with pytest.raises(RuntimeError, match="stopped"):
        train("FabricLoop", 2, version=version, model=Dies)
    assert set(steps_in(folder)) == {"best.ckpt", "last.ckpt"}
    for keyword in ("resume", "load"):
        with pytest.raises((ValueError, OSError), match=f"{keyword}: got 'last'"):
            train("FabricLoop", 3, version=version, **{keyword: "last"})
    # resume="auto" starts a new run, which removes the checkpoints of the first run.
    train("FabricLoop", 1, resume="auto", version=version)
    assert steps_in(folder) == {"last.ckpt": 6}


def test_mini_loop_refuses_to_replace_an_existing_run():
    train("MiniLoop", 1, version=0)
    with pytest.raises(ValueError, match="version: got"):
        train("MiniLoop", 2, version=0)


@pytest.mark.parametrize("first", LOOPS)
def test_fabric_loop_resumes_from_an_old_checkpoint_after_a_newer_run_failed(first):
    train(first, 2, version=0, monitor="val_loss")
    with pytest.raises(RuntimeError, match="stopped"):
        train("FabricLoop", 2, version=0, model=Dies)
    options = {"version": 0, "monitor": "val_loss", "resume": "checkpoints/run/version_0/last.ckpt"}
    loop = train("FabricLoop", 3, **options)
    assert (loop.global_step, steps_in("version_0")["last.ckpt"]) == (18, 18)
    text = Path("logs/run/version_0/metrics.csv").read_text()
    assert [line.split(",")[0] for line in text.splitlines()] == ["epoch", "0", "1", "2"]


class Scored(Classifier):
    """A model that logs falling losses and falling accuracies."""

    def validation_step(self, batch, batch_idx):
        self.log("loss", 4.0 - self.trainer.current_epoch)
        self.log("acc", 0.5 - 0.125 * self.trainer.current_epoch)


MONITORS = [
    ({"monitor": "loss"}, {"monitor": "acc"}, 18),
    ({"monitor": "acc", "mode": "max"}, {"monitor": "loss"}, 24),
    ({"monitor": "loss"}, {"monitor": "loss", "mode": "max"}, 18),
    ({"monitor": "acc", "mode": "max"}, {"monitor": "acc"}, 6),
    ({}, {"monitor": "acc", "mode": "max"}, 18),
]


@pytest.mark.parametrize(("loops", "monitors"), once(PAIRS, MONITORS), ids=str)
def test_a_run_resumed_with_a_new_monitor_ignores_scores_of_the_old_monitor(loops, monitors):
    (first, second), (before, after, best) = loops, monitors
    train(first, 2, model=Scored, **before)
    train(second, 4, model=Scored, resume="last", **after)
    assert steps_in("version_0") == {"best.ckpt": best, "last.ckpt": 24}


class ChangesFiles(Classifier):
    """A model that changes the files of its run before the fourth optimizer step."""

    change = None

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 3:
            type(self).change()
        return super().training_step(batch, batch_idx)


def remove_logs():
    shutil.rmtree("logs")


def remove_checkpoints():
    shutil.rmtree("checkpoints")


def remove_metrics():
    Path("logs/run/version_0/metrics.csv").unlink(missing_ok=True)


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("change", [remove_logs, remove_checkpoints, remove_metrics])
def test_training_continues_even_if_the_files_of_the_run_are_deleted(kind, change):
    class Changes(ChangesFiles):
        pass

    Changes.change = staticmethod(change)
    loop = train(kind, 2, model=Changes, log_every_n_steps=1)
    assert loop.global_step == 12
    assert steps_in("version_0") == {"last.ckpt": 12}
    assert pd.read_csv("logs/run/version_0/metrics.csv")["step"].tolist()[-1] == 12


@pytest.mark.parametrize("kind", LOOPS)
def test_a_run_whose_folders_were_deleted_during_training_is_still_the_newest_run(kind):
    """The new folders contain no .lock file, because the run still has the deleted file open."""
    train(kind, 1)

    class Changes(ChangesFiles):
        @staticmethod
        def change():
            shutil.rmtree("logs/run/version_1")
            shutil.rmtree("checkpoints/run/version_1")

    train(kind, 2, model=Changes)
    with warnings.catch_warnings():
        # Ignore the warning about CSV rows that were deleted.
        warnings.simplefilter("ignore")
        train(kind, 3, resume="last")
    assert [steps_in(f"version_{number}") for number in (0, 1)] == [{"last.ckpt": 6}, {"last.ckpt": 18}]


@pytest.mark.parametrize("kind", LOOPS)
def test_a_run_writes_to_the_same_folder_after_the_working_directory_changes(kind, tmp_path):
    class Moves(ChangesFiles):
        @staticmethod
        def change():
            Path("elsewhere").mkdir(exist_ok=True)
            os.chdir("elsewhere")

    here = Path.cwd()
    train(kind, 2, model=Moves, default_root_dir="out")
    found = {path.relative_to(here).parts[0] for path in here.rglob("*.c*") if path.is_file()}
    assert found == {"out"}


def add_column(lines):
    return [lines[0] + ",note", *(line + ",5" for line in lines[1:])]


def rename_column(lines):
    return [lines[0].replace("train_loss", "fitted"), *lines[1:]]


def add_byte_order_mark(lines):
    return ["\ufeff" + lines[0], *lines[1:]]


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("change", [add_column, rename_column, add_byte_order_mark])
def test_a_run_resumes_after_its_csv_file_was_edited(kind, change):
    train(kind, 1)
    path = Path("logs/run/version_0/metrics.csv")
    lines = change(path.read_text().splitlines())
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(kind, 2, resume="last")
    rows = pd.read_csv(path)
    assert (rows["epoch"].tolist(), rows["step"].tolist()) == ([0, 1], [6, 12])
    assert rows["train_loss"].notna().tolist() == [change is not rename_column, True]
