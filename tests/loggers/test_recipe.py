"""config.yaml: written once and whole, by one process, for a few milliseconds; what fails in it costs a warning."""

import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import yaml
from calls import calls_of
from fabric_template.record import recipe
from modules import Classifier, make_loader
from runs import fit, loud

from fabric_template import FabricLoop

FILE = "logs/run/version_0/config.yaml"


@pytest.fixture(autouse=True)
def asks_again():
    recipe.git_state.cache_clear()
    yield
    recipe.git_state.cache_clear()


def test_only_a_fit_with_our_csv_leaves_one_and_a_resume_keeps_it(tmp_path):
    fit(tmp_path, max_epochs=1, logger=False)
    assert not (tmp_path / "logs").exists()
    fit(tmp_path, max_epochs=1, version=0)
    first = (tmp_path / FILE).read_bytes()
    fit(tmp_path, max_epochs=2, resume="last", log_every_n_steps=3)
    assert (tmp_path / FILE).read_bytes() == first
    (tmp_path / FILE).unlink()  # a run that was begun before there were any
    fit(tmp_path, max_epochs=3, resume="last")
    found = yaml.safe_load((tmp_path / FILE).read_text())
    assert (found["max_epochs"], "resume" in found) == (3, False)  # it is in its own folder
    fit(tmp_path, max_epochs=1, version=0, load=tmp_path / "checkpoints/run/version_0/last.ckpt")
    assert yaml.safe_load((tmp_path / FILE).read_text())["load"].endswith("last.ckpt")  # a new run in its place


def test_values_that_yaml_has_no_word_for_are_named(tmp_path):
    class Profiler:
        pass

    loop = FabricLoop(**loud(tmp_path, max_time=timedelta(days=1, seconds=2), default_root_dir=Path(tmp_path)))
    loop.recipe |= {"profiler": Profiler(), "compile": {"backend": len}, "callbacks": [Profiler(), Profiler()]}
    loop.config = loop.config.changed(max_epochs=1)
    loop.fit(Classifier(), make_loader())
    found = yaml.safe_load((tmp_path / FILE).read_text())
    assert found["max_time"] == {"days": 1, "seconds": 2, "microseconds": 0}
    assert found["default_root_dir"] == str(tmp_path)
    unknown = found["about"]["unknown"]
    told = {word: unknown[word] for word in ("profiler", "compile", "callbacks")}
    assert told == {
        "profiler": "an object: Profiler",
        "compile": "an object: dict",
        "callbacks": "objects: Profiler, Profiler",
    }
    assert not {*told} & {*found}


def test_a_disk_that_refuses_it_costs_a_warning(tmp_path, monkeypatch):
    def full(path, data, **words):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recipe, "replace_file", full)
    with pytest.warns(UserWarning, match=r"config.yaml' is not written, training goes on without it: the disk is full"):
        _, _, history = fit(tmp_path, max_epochs=1)
    assert len(history) == 1
    assert sorted(path.name for path in (tmp_path / "logs/run/version_0").iterdir() if path.name != ".lock") == [
        "hparams.yaml", "metrics.csv",
    ]  # fmt: skip


def test_git_is_asked_once_and_its_absence_is_null(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "PATIENCE", 600)  # with a machine that has other work
    assert recipe.git_state() is None  # no repository
    git = ["git", "-c", "user.name=me", "-c", "user.email=me@here"]
    Path("kept.txt").write_text("1")
    for words in (["init", "-q"], ["add", "kept.txt"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert recipe.git_state() is None  # asked once
    recipe.git_state.cache_clear()
    Path("new.txt").write_text("not git's")
    assert recipe.git_state() == {"commit": commit, "is_clean": True}
    recipe.git_state.cache_clear()
    Path("kept.txt").write_text("2")
    assert recipe.git_state() == {"commit": commit, "is_clean": False}

    def slow(*args, timeout, **words):
        raise subprocess.TimeoutExpired(args, timeout)

    for broken in (slow, lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError("git"))):
        recipe.git_state.cache_clear()
        monkeypatch.setattr(subprocess, "run", broken)
        assert recipe.git_state() is None


def test_a_thousand_small_fits_do_not_notice(tmp_path, monkeypatch):
    """2,460 calls when this was written, which is 1 ms: half of what hparams.yaml takes; git is not asked again."""
    loop, _, _ = fit(tmp_path, max_epochs=1)
    monkeypatch.setattr(subprocess, "run", lambda *words, **_: pytest.fail(f"{words} is run"))
    _, calls = calls_of(recipe.write_recipe, loop._run)
    assert calls < 7500


def test_a_class_that_cannot_be_looked_at_costs_a_warning(tmp_path):
    class Strange(Classifier):
        @property
        def hparams_initial(self):
            raise KeyError("not now")

    run = fit(tmp_path, max_epochs=1)[0]._run
    run.trained = type(run.trained)(Strange(), torch.nn.Linear(1, 1))
    with pytest.warns(UserWarning, match="is not written, training goes on without it: .*not now"):
        recipe.write_recipe(run)
