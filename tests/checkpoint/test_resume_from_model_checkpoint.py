"""Test that resume="auto" and "last" find the checkpoints of ModelCheckpoint."""

from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from modules import Classifier
from parameters import halve
from runs import assert_same_end, fit, logs_of, tree, val_loader, with_files

from fabric_template import FabricLoop
from fabric_template.errors import MissingCheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:(Checkpoint directory|The dirpath has changed)")
# Map each location of the checkpoints to (options of ModelCheckpoint, logger). Both are functions of the root folder.
PLACES = {
    "in_the_run_directory": (lambda root: {}, lambda root: True),
    "no_logger": (lambda root: {}, lambda root: False),
    "own_folder": (lambda root: {"dirpath": root / "kept"}, lambda root: True),
    "at_the_csv_logger": (lambda root: {}, lambda root: CSVLogger(root, "csv")),
    "at_the_tensorboard_logger": (lambda root: {}, lambda root: TensorBoardLogger(root, "board", version="mine")),
}


@pytest.mark.parametrize(
    ("place", "resume"),
    [*((place, "auto") for place in PLACES), ("in_the_run_directory", "last"), ("at_the_csv_logger", "last")],
)
def test_a_run_with_a_model_checkpoint_callback_resumes_exactly(tmp_path, place, resume):
    make_options, make_logger = PLACES[place]

    def run(name, **options):
        root = tmp_path / name
        saving = ModelCheckpoint(save_last=True, **make_options(root))
        return fit(root, val=val_loader, logger=make_logger(root), callbacks=[saving], **options)

    # There is no checkpoint yet, so resume="auto" starts a new run.
    whole = run("whole", max_epochs=4, resume="auto")
    run("parts", max_epochs=2)
    resumed = run("parts", max_epochs=4, resume=resume, seed=9)
    assert Path(resumed[0].ckpt_path).is_relative_to(tmp_path / "parts")
    assert_same_end(whole, resumed)
    if place in ("in_the_run_directory", "no_logger"):
        assert tree(tmp_path / "whole") == tree(tmp_path / "parts")
    assert logs_of(tmp_path / "whole") == logs_of(tmp_path / "parts")


class OtherExtension(ModelCheckpoint):
    FILE_EXTENSION = ".pt"


FILES = {
    "metric with a slash": lambda **given: ModelCheckpoint(filename="{epoch}-{val/loss:.2f}", **given),
    "subfolder and last": lambda **given: ModelCheckpoint(filename="some/{epoch}", save_last=True, **given),
    "other extension": lambda **given: OtherExtension(**given),
}


@pytest.mark.parametrize(("name", "dirpath", "logger"), halve(FILES, [None, "kept"], [True, False]))
def test_resume_auto_finds_checkpoints_in_subfolders_or_with_custom_extensions(tmp_path, name, dirpath, logger):
    given = {} if dirpath is None else {"dirpath": tmp_path / dirpath}

    def run(epochs, resume=None):
        saving = FILES[name](**given)
        return fit(tmp_path, logger=logger, max_epochs=epochs, callbacks=[saving], resume=resume)

    run(1)
    loop, module, _ = run(2, "auto")
    assert loop.ckpt_path is not None
    assert loop.global_step == 20


class Configures(Classifier):
    def configure_callbacks(self):
        return [ModelCheckpoint(save_last=True)]


@pytest.mark.parametrize("resume", ["auto", "last"])
def test_resume_finds_checkpoints_of_callbacks_returned_by_configure_callbacks(tmp_path, resume):
    whole = fit(tmp_path / "whole", Configures, max_epochs=2)
    fit(tmp_path / "parts", Configures, max_epochs=1)
    resumed = fit(tmp_path / "parts", Configures, max_epochs=2, resume=resume, seed=9)
    assert Path(resumed[0].ckpt_path).is_relative_to(tmp_path / "parts")
    assert_same_end(whole, resumed)


def test_resume_auto_continues_the_newest_version_that_has_a_checkpoint(tmp_path):
    """With a version argument, only the checkpoints of this version are used."""
    for epochs in (1, 2):
        fit(tmp_path, max_epochs=epochs, callbacks=[ModelCheckpoint(save_last=True)])
    folder = "logs/run/version_{}/checkpoints"
    (tmp_path / folder.format(10)).mkdir(parents=True)
    loop, _, _ = fit(tmp_path, max_epochs=2, resume="auto", callbacks=[ModelCheckpoint(save_last=True)])
    assert Path(loop.ckpt_path).parent == tmp_path / folder.format(1)
    loop, _, _ = fit(tmp_path, max_epochs=2, resume="auto", version=0, callbacks=[ModelCheckpoint(save_last=True)])
    assert Path(loop.ckpt_path).parent == tmp_path / folder.format(0)


@pytest.mark.parametrize("place", ["in_the_run_directory", "no_logger", "own_folder"])
def test_resume_auto_continues_a_run_killed_before_it_saved_last_ckpt(tmp_path, place):
    make_options, make_logger = PLACES[place]

    def run(epochs, resume=None):
        saving = ModelCheckpoint(save_last=True, **make_options(tmp_path))
        return fit(tmp_path, max_epochs=epochs, logger=make_logger(tmp_path), callbacks=[saving], resume=resume)[0]

    run(1)
    last = next(tmp_path.rglob("last.ckpt"))
    last.rename(last.with_name(".last.ckpt.7.tmp"))
    used = Path(run(2, "auto").ckpt_path)
    assert (used.parent, used.name[:8]) == (last.parent, "epoch=0-")
    assert place != "in_the_run_directory" or list(last.parent.glob(".*.tmp")) == []


def test_resume_last_is_refused_if_model_checkpoint_ran_without_save_last(tmp_path):
    fit(tmp_path, max_epochs=1, callbacks=[ModelCheckpoint()])
    with pytest.raises(
        MissingCheckpointError, match=r"got 'last'.*no readable last checkpoint in .*Train first, or pass the path"
    ):
        fit(tmp_path, max_epochs=2, resume="last", callbacks=[ModelCheckpoint()])


def test_resume_last_raises_an_error_if_the_model_checkpoint_callback_was_removed(tmp_path):
    """A run without the callback uses a different folder, so it does not find the callback's files."""
    fit(tmp_path, max_epochs=1, callbacks=[ModelCheckpoint(save_last=True)])
    with pytest.raises(MissingCheckpointError, match="no readable last checkpoint"):
        fit(tmp_path, max_epochs=2, resume="last")
    with pytest.raises(MissingCheckpointError, match="no readable best checkpoint"):
        fit(tmp_path, max_epochs=2, load="best")
    with pytest.warns(UserWarning, match="a new run starts.*version_0.*ModelCheckpoint"):
        loop, _, history = fit(tmp_path, max_epochs=2, resume="auto")
    assert Path(loop.log_dir).name == "version_1"
    assert len(history) == 2


def test_resume_auto_works_after_validate_has_used_the_same_model_checkpoint_callback(tmp_path):
    """The validation sets the callback's dirpath to the folder of its own version."""
    fit(tmp_path, max_epochs=1, val=val_loader, callbacks=[ModelCheckpoint(save_last=True)])
    callback = ModelCheckpoint(save_last=True)
    loop = FabricLoop(**with_files(tmp_path, callbacks=[callback]))
    loop.validate(Classifier(), val_loader(), load="last", verbose=False)
    loop, _, history = fit(tmp_path, max_epochs=2, val=val_loader, resume="auto", callbacks=[callback])
    assert Path(loop.ckpt_path).parents[1].name == Path(loop.log_dir).name == "version_0"
    assert len(history) == 2
