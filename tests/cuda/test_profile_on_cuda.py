"""profile() on a CUDA device measures each part of a step and changes nothing."""

import pytest
import torch
from modules import Classifier, make_loader
from runs import same

from fabric_template import FabricLoop, profile

pytestmark = pytest.mark.gpu


class Reading(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        (loss if isinstance(loss, torch.Tensor) else loss["loss"]).item()
        return loss


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_profile(precision):
    module = Reading()
    before, drawn = {name: one.clone() for name, one in module.state_dict().items()}, torch.cuda.get_rng_state()
    found = profile(FabricLoop(accelerator="gpu", devices=1, precision=precision), module, make_loader(), steps=6)
    assert found.device.startswith("cuda")
    assert {"data", "transfer", "forward", "backward", "optimizer"} <= {row.part for row in found.rows}
    assert found.notes == []
    assert same(module.state_dict(), before)
    assert torch.equal(torch.cuda.get_rng_state(), drawn)
