"""Test that the cost of a step grows no faster than the number of its metrics."""

import sys

import pytest
import torch
from modules import make_data
from torch import nn
from torch.utils.data import DataLoader

from fabric_template import FabricLoop, MiniLoop


class ManyMetrics(nn.Module):
    """A model whose steps return many metrics."""

    def __init__(self, number):
        super().__init__()
        self.layer, self.number = nn.Linear(8, 1), number

    def training_step(self, batch):
        loss = self.layer(batch[0]).mean()
        return {"loss": loss, **dict.fromkeys((f"metric_{index}" for index in range(self.number)), loss.detach())}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def count_calls(function):
    """Return the number of calls to Python and C functions, including resumed generators."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("loop_class", [FabricLoop, MiniLoop])
def test_the_cost_of_a_step_is_linear_in_the_number_of_returned_metrics(tmp_path, loop_class):
    silent = {"enable_progress_bar": False, "enable_model_summary": False} if loop_class is FabricLoop else {}
    train, val = DataLoader(make_data(40), batch_size=4), DataLoader(make_data(40), batch_size=4)

    def fit(number):
        options = {"accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 0, **silent}
        loop_class(default_root_dir=tmp_path, **options).fit(ManyMetrics(number), train, val)

    fit(1)
    few, more, most = [count_calls(lambda number=number: fit(number)) for number in (50, 150, 250)]
    assert most - more < 1.1 * (more - few)
