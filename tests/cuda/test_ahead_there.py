"""prefetch=True on a device: batches come on a stream beside, whole, with the ordinary numbers; nothing waits."""

import pytest
import torch
from device import DEVICE, ON, Drawing
from modules import make_data, make_loader, quiet
from test_no_waiting import Refusing
from torch import nn

from fabric_template import FabricLoop, TensorLoader

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]

LOADERS = {
    "workers": lambda: make_loader(num_workers=1, pin_memory=True),
    "not-pinned": lambda: make_loader(num_workers=1),
    "here": make_loader,
    "tensors": lambda: TensorLoader(*make_data().tensors, batch_size=4, shuffle=True),
}


def fit(path, loader, prefetch, stop=None, resume=None):
    words = {**quiet(), **ON, "max_epochs": 2, "save_every_n_steps": 1, "enable_checkpointing": True}
    torch.manual_seed(1)
    module = Drawing()
    limits = {} if stop is None else {"max_steps": stop}
    loop = FabricLoop(**{**words, **limits}, prefetch=prefetch, default_root_dir=path)
    loop.fit(module, loader(), resume=resume)
    return [part.detach().cpu() for part in module.state_dict().values()]


@pytest.mark.parametrize("name", LOADERS)
def test_the_same_bits(tmp_path, name):
    """... and from a checkpoint in the middle of an epoch."""
    plain = fit(tmp_path / "plain", LOADERS[name], False)
    ahead = fit(tmp_path / "ahead", LOADERS[name], True)
    fit(tmp_path / "cut", LOADERS[name], True, stop=13)
    resumed = fit(tmp_path / "cut", LOADERS[name], True, resume="last")
    for found in (ahead, resumed):
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("name", ["workers", "not-pinned"])
def test_nothing_waits(name):
    """Not even for batches of memory that is not pinned."""
    watches = Refusing(first=1)
    FabricLoop(**{**quiet(), **ON, "max_epochs": 2, "callbacks": [watches]}, prefetch=True).fit(
        Drawing(), LOADERS[name]()
    )
    assert watches.batches == 19


def test_what_is_there_already_is_converted_when_it_is_whole():
    """Its last kernels may still run when the loop asks for the next batch: none of its numbers is read too early."""

    def made():
        for number in range(1, 9):
            x = torch.zeros(2**22, device=DEVICE)
            for _ in range(50):
                x = x.sin() + number
            yield (x,)

    sums, net = [], nn.Linear(1, 1)

    def step(net, batch):
        sums.append(batch[0].double().sum())
        return net(torch.ones(1, 1, device=DEVICE, dtype=torch.bfloat16)).sum()

    loop = FabricLoop(**{**quiet(), **ON, "max_epochs": 1}, precision="bf16-true", prefetch=True)
    loop.fit(net, made(), optimizer=torch.optim.SGD(net.parameters(), 0.1), training_step=step)
    assert [value.item() for value in sums] == [x.bfloat16().double().sum().item() for (x,) in made()]


def test_large_batches_are_whole():
    """A step that takes long reads a batch while the next ones come: the sums of all of them are those of the samples."""
    x = torch.arange(64 * 2**18, dtype=torch.float64).reshape(64, -1) % 1000
    net, sums = nn.Linear(1, 1), []

    def step(net, batch):
        for _ in range(20):  # keep the device busy
            batch[0].sin().sum()
        sums.append(batch[0].sum())
        return net(torch.ones(1, 1, device=DEVICE)).sum()

    loop = FabricLoop(**{**quiet(), **ON, "max_epochs": 1}, prefetch=True)
    loop.fit(net, TensorLoader(x, batch_size=4), optimizer=torch.optim.SGD(net.parameters(), 0.1), training_step=step)
    assert [value.item() for value in sums] == [part.sum().item() for part in x.split(4)]
