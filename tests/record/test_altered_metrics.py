"""A checkpoint whose torchmetrics states were altered is refused in one line, before they are used."""

import pytest
import torch
from modules import Classifier
from runs import fit
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAUROC, MulticlassConfusionMatrix

from fabric_template.files.reading import CheckpointError

LAST = "checkpoints/run/version_0/last.ckpt"


class Measured(Classifier):
    def __init__(self):
        super().__init__()
        parts = [MulticlassConfusionMatrix(3), MulticlassAUROC(3, thresholds=None)]
        self.measures = MetricCollection({"matrix": parts[0], "auroc": parts[1]}, compute_groups=False)

    def training_step(self, batch, batch_idx):
        self.measures.update(self(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("key", "alter"),
    [
        ("matrix.confmat", lambda value: value[1:]),
        ("matrix.confmat", lambda value: value.to_sparse()),
        ("matrix.confmat", lambda value: 1.5),
        ("matrix._update_count", lambda value: "x"),
        ("auroc.preds", lambda value: "x"),
        ("auroc.preds", lambda value: [*value, None]),
        ("auroc.preds", lambda value: [part.to_sparse() for part in value]),
    ],
)
def test_refused(tmp_path, key, alter):
    fit(tmp_path, Measured, max_epochs=1, max_steps=3)
    state = torch.load(tmp_path / LAST, weights_only=True)
    name, _, attribute = key.rpartition(".")
    held = state["fabric_template"]["ranks"][0]["metrics"]["objects"][f"measures.{name}"]
    held[attribute] = alter(held[attribute])
    torch.save(state, tmp_path / LAST)
    with pytest.raises(CheckpointError, match=rf"resume: the checkpoint's measures.{key} does not fit Multiclass"):
        fit(tmp_path, Measured, max_epochs=2, resume="last")
