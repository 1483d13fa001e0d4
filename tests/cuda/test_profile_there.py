"""profile on a GPU: the parts wait for each other, the steps as they run are measured beside, all is as it was."""

import pytest
import torch
from modules import Classifier, make_loader
from runs import same

from fabric_template import FabricLoop, profile

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_where_a_step_goes(precision):
    module = Classifier()
    before, drawn = {name: one.clone() for name, one in module.state_dict().items()}, torch.cuda.get_rng_state()
    found = profile(FabricLoop(accelerator="gpu", devices=1, precision=precision), module, make_loader(), steps=6)
    assert found.device.startswith("cuda")
    assert {"data", "device", "forward", "backward", "optimizer", "rest"} <= {row.part for row in found.rows}
    assert len(found.steps) == len(found.whole) == 6
    assert found.memory["GPU"] > 0
    assert "\nas in fit   " in str(found)
    assert same(module.state_dict(), before)
    assert torch.equal(torch.cuda.get_rng_state(), drawn)
