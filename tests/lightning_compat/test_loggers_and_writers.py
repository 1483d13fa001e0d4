"""Test that loggers receive the same calls as with Trainer."""

import pytest
from both import LOOPS
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.loggers import CSVLogger
from modules import quiet


class Module(BoringModel):
    def __init__(self, rate=0.1):
        super().__init__()
        self.save_hyperparameters("rate")


class Data(BoringDataModule):
    def __init__(self, rate=0.1, size=3):
        super().__init__()
        self.save_hyperparameters()


class RecordingLogger(CSVLogger):
    def __init__(self, folder):
        super().__init__(folder)
        self.calls = []

    def log_hyperparams(self, params=None):
        self.calls.append(("hyperparameters", dict(params)))
        super().log_hyperparams(params)

    def log_graph(self, model, input_array=None):
        self.calls.append("graph")

    def log_metrics(self, metrics, step=None):
        self.calls.append(("metrics", sorted(metrics), step))
        super().log_metrics(metrics, step)

    def save(self):
        self.calls.append("save")
        super().save()

    def finalize(self, status):
        self.calls.append(("finalize", status))
        super().finalize(status)


@pytest.mark.parametrize("stage_name", ["fit", "validate", "test", "predict"])
def test_loggers_get_the_hyperparameters_in_each_stage(tmp_path, stage_name):
    calls = []
    for name, kind in LOOPS.items():
        logger = RecordingLogger(tmp_path / name)
        loop = kind(**quiet(max_epochs=1, logger=logger, limit_train_batches=2))
        getattr(loop, stage_name)(Module(), datamodule=Data(size=3))
        calls.append(logger.calls)
    assert calls[0] == calls[1]
    assert calls[1][:3] == [("hyperparameters", {"rate": 0.1, "size": 3}), "graph", "save"]
