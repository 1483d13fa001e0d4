"""A model that raises an error before a given training step, for tests of resuming in both loops."""

from itertools import count

import torch
from modules import Classifier

from fabric_template import FabricLoop, MiniLoop

SAVES = {FabricLoop: "save_every_n_steps", MiniLoop: "validate_every_n_steps"}


class KilledError(Exception):
    pass


class Model(Classifier):
    """A classifier that raises KilledError before training step number ``kill_at``."""

    kill_at = None

    def __init__(self):
        super().__init__()
        self.counter = count()

    def training_step(self, batch, batch_idx):
        if next(self.counter) == self.kill_at:
            raise KilledError
        return super().training_step(batch, batch_idx)

    def add(self, value):
        with torch.no_grad():
            self.net[0].weight.add_(0.001 * float(value))
