"""Killed or ended anywhere on a CUDA device, a run goes on to the same bits; a checkpoint goes to the CPU and back."""

import signal
import subprocess

import pytest
import torch
from device import DEVICE, ON, Drawing, Still, fused_adam, on_device, shuffled_on_device
from modules import assert_same_weights, by_epoch, by_step, make_loader
from runs import Snapshots, assert_same_end, fit, logs_of, same, source_of, tree, val_loader

from fabric_template import MiniLoop

pytestmark = pytest.mark.gpu
CPU = {"accelerator": "cpu"}


@pytest.mark.parametrize("loader", [make_loader, shuffled_on_device], ids=["DataLoader", "tensors"])
@pytest.mark.parametrize("optimizers", [by_step, fused_adam])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_ended_after_any_batch(tmp_path, precision, optimizers, loader):
    """In mid-epoch and between two: weights, optimizers, scaler, random numbers of the device, rows, files."""
    words = {
        **ON,
        "precision": precision,
        "make_module": lambda: Drawing(optimizers),
        "train": loader,
        "val": val_loader,
    }
    words |= {"max_epochs": 2, "save_every_n_steps": 3}
    whole = fit(tmp_path / "whole", callbacks=[Snapshots(tmp_path / "whole", tmp_path / "cut")], **words)
    drawn = torch.rand(3, device=DEVICE).tolist()
    for batches in ("5", "7", "10", "17"):
        again = fit(tmp_path / "cut" / batches, seed=9, resume="auto", **words)
        assert torch.rand(3, device=DEVICE).tolist() == drawn
        assert_same_end(whole, again)
        assert logs_of(tmp_path / "cut" / batches) == logs_of(tmp_path / "whole")
        assert tree(tmp_path / "cut" / batches) == tree(tmp_path / "whole")


SCRIPT = """
import os, signal, time
time.monotonic = lambda: 1.0  # it stands in the files
from device import *
from runs import *
from lightning.pytorch.callbacks import Callback

class Kill(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == {at}:
            os.kill(os.getpid(), signal.SIGKILL)

fit({root!r}, Drawing, shuffled_on_device, val_loader, max_epochs=2, save_every_n_steps=2, resume="auto", **ON,
    precision="16-mixed", callbacks=[Kill()] if {at} else [])
"""


def test_killed_and_typed_again(tmp_path):
    """SIGKILL: the files end with the very bytes of an undisturbed run, the CSV too."""
    for root, ats in (("whole", [0]), ("killed", [13, 0])):
        for at in ats:
            command = source_of(SCRIPT.format(root=str(tmp_path / root), at=at), __file__)
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
            assert done.returncode == (-signal.SIGKILL if at else 0), done.stderr
    assert tree(tmp_path / "whole") == tree(tmp_path / "killed")
    for name in tree(tmp_path / "whole"):
        if name.endswith((".ckpt", ".csv")):
            assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes(), name


@pytest.mark.parametrize("optimizers", [by_step, by_epoch, fused_adam])
@pytest.mark.parametrize(("first", "then"), [(CPU, ON), (ON, CPU)], ids=["to the device", "to the CPU"])
def test_the_other_device_goes_on(tmp_path, first, then, optimizers):
    """Weights, optimizer, counters and order of the data are the file's; only the arithmetic is the other device's.

    What is drawn on a device that has drawn nothing yet is not what the first would have drawn.
    """
    words = {"make_module": lambda: Still(optimizers), "val": val_loader, "save_every_n_steps": 3}
    loop, module, _ = fit(tmp_path, **first, max_epochs=1, **words)
    path = loop.checkpoint_path("last")
    again, loaded, rows = fit(tmp_path, **then, max_epochs=1, resume=path, **words)
    assert_same_weights(module, loaded)
    assert same(*[plainly([o.state_dict()["state"] for o in one.optimizers]) for one in (loop, again)])
    whole, expected, expected_rows = fit(tmp_path / "whole", **first, max_epochs=3, **words)
    resumed, module, rows = fit(tmp_path, **then, max_epochs=3, resume=path, **words)
    assert (whole.global_step, whole.current_epoch) == (resumed.global_step, resumed.current_epoch)
    for (
        name,
        weight,
    ) in expected.state_dict().items():  # the same samples in the same order: no more than rounding apart
        torch.testing.assert_close(module.state_dict()[name], weight, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        torch.tensor(rows["train_loss"].tolist()),
        torch.tensor(expected_rows["train_loss"].tolist()),
        rtol=1e-3,
        atol=1e-4,
    )


def plainly(state):
    if isinstance(state, torch.Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {key: plainly(value) for key, value in state.items()}
    return [plainly(value) for value in state] if isinstance(state, list) else state


def test_a_file_of_the_device_is_read_anywhere(tmp_path):
    """As Trainer's, it says where its tensors were: without the device torch.load asks for map_location."""
    loop, module, _ = fit(tmp_path, lambda: Drawing(fused_adam), **ON, max_epochs=1)
    path = loop.checkpoint_path("last")
    assert {tensor.device.type for tensor in tensors_of(torch.load(path, weights_only=True))} == {"cpu", DEVICE}
    file = torch.load(path, weights_only=True, map_location="cpu")
    assert {tensor.device.type for tensor in tensors_of(file)} == {"cpu"}
    assert_same_weights(module, Drawing.load_from_checkpoint(path, map_location="cpu"))


def tensors_of(part):
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, dict | list | tuple):
        for value in part.values() if isinstance(part, dict) else part:
            yield from tensors_of(value)


def test_the_single_file_goes_on(tmp_path):
    """MiniLoop, at an epoch's end: the same weights, and FabricLoop's when that goes on with its run."""
    ends = {}
    for name, epochs in (("whole", [3]), ("parts", [1, 3])):
        for most in epochs:
            torch.manual_seed(1)
            module = Drawing(by_epoch)
            loop = MiniLoop(
                **ON, max_epochs=most, name=name, seed=3, precision="16-mixed", default_root_dir=str(tmp_path)
            )
            loop.fit(module, make_loader(), val_loader(), resume="auto")
        ends[name] = module
    assert_same_weights(ends["whole"], ends["parts"])


def test_of_tensors_on_the_device_the_order_goes_on(tmp_path):
    """In the middle of a pass: none lost, none twice."""
    seen = []

    class Sees(Drawing):
        def training_step(self, batch, batch_idx):
            seen.append(batch[0].sum().item())
            return super().training_step(batch, batch_idx)

    fit(tmp_path, Sees, lambda: on_device(shuffle=True), **ON, max_steps=7)
    first, seen[:] = list(seen), []
    fit(tmp_path, Sees, lambda: on_device(shuffle=True), **ON, max_epochs=1, resume="last", seed=9)
    assert len(first) == 7
    assert sorted(first + seen) == sorted(batch[0].sum().item() for batch in shuffled_again())


def shuffled_again():
    from lightning.pytorch import seed_everything

    seed_everything(1, verbose=False)
    Drawing()
    return on_device(shuffle=True)
