"""Options, loaders and modules for the tests on a CUDA device."""

import torch
from modules import Classifier, by_step, make_data
from torch import nn

from fabric_template import TensorLoader

DEVICE = "cuda"
ON = {"accelerator": "gpu", "devices": 1}
PRECISIONS = ["32-true", "bf16-mixed", "16-mixed"]


def on_device(batch_size=4, shuffle=False, num=40, seed=0):
    return TensorLoader(*make_data(num, seed=seed).tensors, batch_size=batch_size, shuffle=shuffle, device=DEVICE)


def val_on_device():
    return on_device(6, num=18, seed=5)


def shuffled_on_device():
    return on_device(shuffle=True)


def fused_adam(module):
    """Return fused Adam, which keeps its step count on the GPU."""
    return torch.optim.Adam(module.parameters(), lr=0.01, fused=True)


class Drawing(Classifier):
    """A module that draws noise and dropout masks on the GPU, and keeps BatchNorm's statistics there."""

    def __init__(self, optimizers=by_step):
        super().__init__(optimizers)
        first = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3)]
        self.net = nn.Sequential(*first, nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, 3))

    def forward(self, x):
        return self.net(x + 0.1 * torch.randn_like(x) if self.training else x)


class Still(Classifier):
    """A module that draws no random numbers on the GPU."""

    def __init__(self, optimizers=by_step):
        super().__init__(optimizers)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
