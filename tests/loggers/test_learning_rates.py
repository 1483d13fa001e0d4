"""Test that the lr column contains the learning rate of each optimizer step, even if hooks change it."""

import pytest
import torch
from modules import make_data
from parameters import halve
from runs import logs_of
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from fabric_template import FabricLoop, MiniLoop, read_logs

HOOKS = ["on_train_batch_end", "on_train_epoch_end", "on_validation_epoch_end", "on_validation_epoch_start"]


class Stop(Exception):
    """An error that ends a run as a crash would."""


class Net(nn.Linear):
    """A module that lowers the learning rate in a hook, and stores the learning rates of all optimizer steps."""

    def __init__(self, hook, steps_before_stop):
        super().__init__(8, 3)
        self.used, self.steps_before_stop = [], steps_before_stop
        setattr(self, hook, self.lower_rate)

    def lower_rate(self, *args):
        self.optimizer.param_groups[0]["lr"] *= 0.5

    def training_step(self, batch):
        if len(self.used) == self.steps_before_stop:
            raise Stop
        self.used.append(self.optimizer.param_groups[0]["lr"])
        return cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch):
        return cross_entropy(self(batch[0]), batch[1])


def train(loop_class, root, hook, steps_before_stop=None, **options):
    torch.manual_seed(1)
    net = Net(hook, steps_before_stop)
    net.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loaders = DataLoader(make_data(16), batch_size=4, shuffle=True), DataLoader(make_data(4), batch_size=4)
    loop = loop_class(accelerator="cpu", default_root_dir=root, max_epochs=3, log_every_n_steps=1, **options)
    loop.fit(net, *loaders, optimizer=net.optimizer, resume="auto")
    return net


@pytest.mark.parametrize(("loop_class", "hook", "every"), halve([FabricLoop, MiniLoop], HOOKS, [None, 3]))
def test_the_lr_column_contains_the_rate_of_each_step_even_if_a_hook_sets_the_rate(tmp_path, loop_class, hook, every):
    options = {"num_sanity_val_steps": 0} if loop_class is FabricLoop else {}
    if every:
        options["validate_every_n_steps"] = every
    used = train(loop_class, tmp_path / "whole", hook, **options).used
    folder = tmp_path / "whole/logs/run/version_0"
    assert len(used) == 12
    assert read_logs(folder / "steps.csv")["lr"].tolist() == used
    rows = read_logs(folder / "metrics.csv")
    assert rows["lr"].tolist() == [used[step - 1] for step in rows["step"]]
    with pytest.raises(Stop):
        train(loop_class, tmp_path / "cut", hook, 6, **options)
    train(loop_class, tmp_path / "cut", hook, **options)
    assert logs_of(tmp_path / "cut") == logs_of(tmp_path / "whole")
