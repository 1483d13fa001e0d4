"""config.yaml: written once, by the first process; what fails in it costs a warning."""

import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import yaml
from modules import Classifier, make_loader
from runs import fit, loud, tree

from fabric_template.loggers import run_config
from fabric_template.loop import FabricLoop

FILE = "logs/run/version_0/config.yaml"


@pytest.fixture(autouse=True)
def forget_git():
    run_config.git_state.cache_clear()
    yield
    run_config.git_state.cache_clear()


def test_a_resumed_run_keeps_the_file_of_its_start(tmp_path):
    fit(tmp_path, max_epochs=1, logger=False)
    assert not (tmp_path / "logs").exists()
    fit(tmp_path, max_epochs=1, version=0)
    first = (tmp_path / FILE).read_bytes()
    fit(tmp_path, max_epochs=2, resume="last", log_every_n_steps=3)
    assert (tmp_path / FILE).read_bytes() == first
    fit(tmp_path, max_epochs=1, version=0, load=tmp_path / "checkpoints/run/version_0/last.ckpt")
    assert yaml.safe_load((tmp_path / FILE).read_text())["load"].endswith("last.ckpt")
    # LightningCLI writes a file of this name.
    (tmp_path / FILE).write_text("max_epochs: 7\n")
    fit(tmp_path, max_epochs=1, version=0)
    assert (tmp_path / FILE).read_text() == "max_epochs: 7\n"


def test_options_classes_and_what_is_not_known(tmp_path):
    class Profiler:
        pass

    loop = FabricLoop(
        **loud(tmp_path, max_epochs=1, max_time=timedelta(days=1, seconds=2), default_root_dir=Path(tmp_path))
    )
    loop.recipe |= {"profiler": Profiler(), "compile": {"backend": len}, "callbacks": [Profiler(), Profiler()]}
    loop.fit(Classifier(), make_loader())
    found = yaml.safe_load((tmp_path / FILE).read_text())
    assert found["model"]["class_path"] == "modules.Classifier"
    assert found["max_time"] == {"days": 1, "seconds": 2, "microseconds": 0}
    assert (found["default_root_dir"], found["version"], found["accelerator"]) == (str(tmp_path), None, "cpu")
    assert set(found["about"]) == {"command", "folder", "versions", "git", "unknown"}
    assert found["about"]["versions"]["torch"] == torch.__version__
    unknown = found["about"]["unknown"]
    assert unknown["profiler"] == "an object: Profiler"
    assert unknown["compile"] == "an object: dict"
    assert unknown["callbacks"] == "objects: Profiler, Profiler"
    assert unknown["data"] == "fit was given loaders"
    assert not {*unknown} & {*found}


@pytest.mark.parametrize("cause", ["disk", "model"])
def test_a_file_that_cannot_be_written_costs_a_warning(tmp_path, monkeypatch, cause):
    def refuse(path, text):
        raise OSError(28, "No space left on device")

    if cause == "disk":
        monkeypatch.setattr(run_config, "write_text", refuse)
    else:
        monkeypatch.setattr(run_config, "class_config", lambda *_: {}["not now"])
    with pytest.warns(UserWarning, match=r"config.yaml: it could not be written, and training continues"):
        _, _, history = fit(tmp_path, max_epochs=1)
    assert len(history) == 1
    assert FILE not in tree(tmp_path)


def test_git_is_asked_once_and_may_be_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(run_config, "GIT_SECONDS", 600)
    monkeypatch.chdir(tmp_path)
    assert run_config.git_state() is None
    git = ["git", "-c", "user.name=me", "-c", "user.email=me@here"]
    Path("kept.txt").write_text("1")
    for arguments in (["init", "-q"], ["add", "kept.txt"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert run_config.git_state() is None
    for text, is_clean in (("1", True), ("2", False)):
        Path("kept.txt").write_text(text)
        run_config.git_state.cache_clear()
        assert run_config.git_state() == {"commit": commit, "is_clean": is_clean}
    for error in (FileNotFoundError("git"), subprocess.TimeoutExpired("git", 2)):
        run_config.git_state.cache_clear()
        monkeypatch.setattr(subprocess, "run", lambda *_, error=error, **__: (_ for _ in ()).throw(error))
        assert run_config.git_state() is None
