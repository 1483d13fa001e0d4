"""A run on a CUDA device that was killed resumes with the same bits. Checkpoints move between CPU and device."""

import signal
import subprocess

import pytest
import torch
from device import DEVICE, ON, Drawing, Still, fused_adam, shuffled_on_device
from modules import assert_same_weights, by_epoch, by_step, make_loader
from runs import Snapshots, assert_same_end, fit, logs_of, same, source_of, tree, val_loader

from fabric_template import MiniLoop

pytestmark = pytest.mark.gpu
CPU = {"accelerator": "cpu"}


@pytest.mark.parametrize("loader", [make_loader, shuffled_on_device], ids=["DataLoader", "TensorLoader"])
@pytest.mark.parametrize("optimizers", [by_step, fused_adam])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_killed(tmp_path, precision, optimizers, loader):
    """In mid-epoch and between two: weights, optimizers, scaler, random numbers of the device, rows, files."""
    options = {**ON, "precision": precision, "max_epochs": 2, "save_every_n_steps": 3}
    options |= {"make_module": lambda: Drawing(optimizers), "train": loader, "val": val_loader}
    whole = fit(tmp_path / "whole", callbacks=[Snapshots(tmp_path / "whole", tmp_path / "cut")], **options)
    drawn = torch.rand(3, device=DEVICE).tolist()
    for batches in ("5", "7", "10", "17"):
        root = tmp_path / "cut" / batches
        again = fit(root, seed=9, resume="auto", **options)
        assert torch.rand(3, device=DEVICE).tolist() == drawn
        assert_same_end(whole, again)
        assert logs_of(root) == logs_of(tmp_path / "whole")
        assert tree(root) == tree(tmp_path / "whole")


SCRIPT = """
import os, signal
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


def test_sigkill(tmp_path):
    for root, ats in (("whole", [0]), ("killed", [13, 0])):
        for at in ats:
            command = source_of(SCRIPT.format(root=str(tmp_path / root), at=at), __file__)
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
            assert done.returncode == (-signal.SIGKILL if at else 0), done.stderr
    assert logs_of(tmp_path / "whole") == logs_of(tmp_path / "killed")
    files = [torch.load(next((tmp_path / root).rglob("last.ckpt")), weights_only=True) for root in ("whole", "killed")]
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert same(files[0][key], files[1][key])


@pytest.mark.parametrize("optimizers", [by_step, fused_adam])
@pytest.mark.parametrize(("first", "then"), [(CPU, ON), (ON, CPU)], ids=["to the device", "to the CPU"])
def test_resume_on_the_other_device(tmp_path, first, then, optimizers):
    """Weights, optimizer, counters and order of the data are those of the file. Only the arithmetic differs."""
    options = {"make_module": lambda: Still(optimizers), "val": val_loader, "save_every_n_steps": 3}
    loop, module, _ = fit(tmp_path, **first, max_epochs=1, **options)
    path = loop.checkpoint_path("last")
    _, loaded, _ = fit(tmp_path, **then, max_epochs=1, resume=path, **options)
    assert_same_weights(module, loaded)
    whole, expected, expected_rows = fit(tmp_path / "whole", **first, max_epochs=3, **options)
    resumed, module, rows = fit(tmp_path, **then, max_epochs=3, resume=path, **options)
    assert (whole.global_step, whole.current_epoch) == (resumed.global_step, resumed.current_epoch)
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], weight, rtol=1e-3, atol=1e-4)
    losses = [torch.tensor(found["train_loss"].tolist()) for found in (rows, expected_rows)]
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-4)


def test_a_file_of_the_device_is_read_on_the_cpu(tmp_path):
    loop, module, _ = fit(tmp_path, lambda: Drawing(fused_adam), **ON, max_epochs=1)
    path = loop.checkpoint_path("last")
    weights = torch.load(path, weights_only=True, map_location="cpu")["state_dict"]
    assert {tensor.device.type for tensor in weights.values()} == {"cpu"}
    assert_same_weights(module, Drawing.load_from_checkpoint(path, map_location="cpu"))


def test_mini_loop(tmp_path):
    """MiniLoop resumes at an epoch's end."""
    ends = {}
    for name, epochs in (("whole", [3]), ("parts", [1, 3])):
        for max_epochs in epochs:
            torch.manual_seed(1)
            ends[name] = Drawing(by_epoch)
            options = {"name": name, "seed": 3, "precision": "16-mixed", "default_root_dir": str(tmp_path)}
            loop = MiniLoop(**ON, max_epochs=max_epochs, **options)
            loop.fit(ends[name], make_loader(), val_loader(), resume="auto")
    assert_same_weights(ends["whole"], ends["parts"])
