"""Test the logger option with the names of Lightning's loggers."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from runs import Plain, fit, val_loader

from fabric_template import FabricLoop


@pytest.mark.parametrize("given", ["tensorboard", ["tensorboard", "csv"], [True, "tensorboard"]], ids=str)
def test_tensorboard_writes_into_the_run_directory(tmp_path, given):
    pytest.importorskip("tensorboard")
    for version in (0, 1):
        loop, _, _ = fit(tmp_path, Plain, val=val_loader, max_epochs=1, logger=given)
        names = [path.name for path in Path(tmp_path, f"logs/run/version_{version}").iterdir()]
        assert {"metrics.csv", "hparams.yaml"} <= set(names)
        assert sum(name.startswith("events.out") for name in names) == 1
    assert len(loop.loggers) == 2


def test_a_resumed_run_does_not_log_hp_metric_a_second_time(tmp_path):
    pytest.importorskip("tensorboard")
    counts = []
    for epochs, resume in ((1, None), (2, "last")):
        fit(tmp_path, Plain, max_epochs=epochs, logger="tensorboard", resume=resume, hparams={"lr": 0.1})
        events = b"".join(path.read_bytes() for path in tmp_path.rglob("events.out*"))
        counts.append(events.count(b"hp_metric"))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("hook", ["setup", "on_fit_start"])
def test_a_resumed_run_logs_hp_metric_even_if_a_hook_has_already_written_to_tensorboard(tmp_path, hook):
    pytest.importorskip("tensorboard")

    def write_text(trainer, *args, **kwargs):
        trainer.loggers[0].experiment.add_text("note", "started")

    callback = type("Writer", (), {hook: staticmethod(write_text)})()
    options = {"logger": "tensorboard", "hparams": {"width": 3}, "callbacks": callback}
    fit(tmp_path, Plain, max_epochs=1, **options)
    fit(tmp_path, Plain, max_epochs=2, version=1, resume=tmp_path / "checkpoints/run/version_0/last.ckpt", **options)
    for version in (0, 1):
        (events,) = Path(tmp_path, f"logs/run/version_{version}").glob("events.out*")
        assert events.read_bytes().count(b"hp_metric") > 0


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_wandb_and_mlflow_record_the_run_if_installed(tmp_path, name, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    loop, _, _ = fit(tmp_path, Plain, val=val_loader, max_epochs=1, logger=name)
    assert [type(logger).__name__.lower() for logger in loop.loggers] == [f"{name}logger", "csvlogger"]
    assert [*Path(tmp_path, "logs/run").rglob({"wandb": "*.wandb", "mlflow": "mlflow.db"}[name])]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_an_error_about_a_missing_logger_package_shows_the_pip_command(tmp_path, name):
    if find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(ValueError, match=f"logger: got '{name}', .* Run pip install {name}."):
        FabricLoop(logger=name, default_root_dir=tmp_path, accelerator="cpu")
