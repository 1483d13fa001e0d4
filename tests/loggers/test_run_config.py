"""Test when config.yaml is written, and that a failed write only causes a warning."""

import pytest
import torch
import yaml
from modules import Classifier, make_loader
from runs import fit, tree, with_files

from fabric_template.loggers import run_config
from fabric_template.loop import FabricLoop

FILE = "logs/run/version_0/config.yaml"


def test_a_resumed_run_does_not_rewrite_config_yaml(tmp_path):
    fit(tmp_path, max_epochs=1, logger=False)
    assert not (tmp_path / "logs").exists()
    fit(tmp_path, max_epochs=1, version=0)
    first = (tmp_path / FILE).read_bytes()
    fit(tmp_path, max_epochs=2, resume="last", log_every_n_steps=3)
    assert (tmp_path / FILE).read_bytes() == first
    fit(tmp_path, max_epochs=1, version=0, load=tmp_path / "checkpoints/run/version_0/last.ckpt")
    assert yaml.safe_load((tmp_path / FILE).read_text())["load"].endswith("last.ckpt")
    # LightningCLI writes a file of the same name, which a run must not overwrite.
    (tmp_path / FILE).write_text("max_epochs: 7\n")
    fit(tmp_path, max_epochs=1, version=0)
    assert (tmp_path / FILE).read_text() == "max_epochs: 7\n"


def test_config_yaml_lists_the_objects_that_yaml_cannot_represent(tmp_path):
    class Profiler:
        pass

    loop = FabricLoop(**with_files(tmp_path, max_epochs=1, max_time="00:01:00:00", default_root_dir=tmp_path))
    loop.recipe |= {"profiler": Profiler(), "callbacks": [Profiler(), Profiler()]}
    loop.fit(Classifier(), make_loader())
    found = yaml.safe_load((tmp_path / FILE).read_text())
    assert found["model"]["class_path"] == "modules.Classifier"
    assert found["max_time"] == "00:01:00:00"
    assert (found["default_root_dir"], found["version"], found["accelerator"]) == (str(tmp_path), None, "cpu")
    assert found["about"]["versions"]["torch"] == torch.__version__
    unknown = found["about"]["unknown"]
    assert (unknown["profiler"], unknown["data"]) == ("a Profiler", "not recorded, because fit received loaders")
    assert "callbacks" in unknown
    assert not {*unknown} & {*found}


def test_a_failure_to_write_config_yaml_only_causes_a_warning(tmp_path, monkeypatch):
    def refuse(path, *args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_config, "write_yaml", refuse)
    with pytest.warns(UserWarning, match=r"config.yaml: the file could not be written: "):
        _, _, history = fit(tmp_path, max_epochs=1)
    assert len(history) == 1
    assert FILE not in tree(tmp_path)
