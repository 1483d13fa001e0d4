"""Test training, evaluation, compile=, CUDA errors and profile on a GPU."""

import subprocess
import warnings

import lightning.pytorch as pl
import pytest
import torch
from device import DEVICE, ON, PRECISIONS, Drawing, Still, fused_adam, on_device, val_on_device
from modules import Classifier, assert_same_weights, by_epoch, make_loader, quiet
from runs import fit, python_command, same, val_loader
from torch import nn

from fabric_template import FabricLoop, MiniLoop, profile

pytestmark = pytest.mark.gpu


def devices_of(module):
    return {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}


@pytest.mark.parametrize("kind", [FabricLoop, MiniLoop])
@pytest.mark.parametrize("optimizers", [by_epoch, fused_adam])
def test_fit_moves_the_module_back_to_its_previous_device(tmp_path, kind, optimizers):
    options = {**ON, "max_epochs": 1, "default_root_dir": str(tmp_path)}
    module = Drawing(optimizers)
    loop = kind(**options)
    loop.fit(module, make_loader(), val_loader())
    assert devices_of(module) == {"cpu"}
    module.zero_grad()
    module.train()(torch.zeros(2, 8)).sum().backward()
    if kind is FabricLoop:
        loop.optimizers[0].step()
    assert loop.validate(module, val_loader())[0].keys() == {"val_loss", "val_acc"}
    assert devices_of(module) == {"cpu"}
    module = Drawing(optimizers).to(DEVICE)
    loop = kind(**options)
    loop.fit(module, make_loader(), val_loader())
    assert devices_of(module) == {DEVICE}


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_already_used_on_the_cpu_can_train_on_the_gpu(fused):
    """fit moves the optimizer state to the GPU and back."""
    net = nn.Linear(8, 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=fused)

    def loss_of(net, batch):
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    def by_hand():
        for batch in make_loader():
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()

    by_hand()
    loop = FabricLoop(**{**quiet(), **ON, "max_epochs": 1})
    loop.fit(net, make_loader(), optimizer=optimizer, training_step=loss_of)
    by_hand()
    assert devices_of(net) == {"cpu"}


def test_fit_moves_the_module_back_to_the_cpu_after_an_error():
    class Fails(Drawing):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise ValueError("here")
            return super().training_step(batch, batch_idx)

    module = Fails(by_epoch)
    with pytest.raises(ValueError, match="here"):
        FabricLoop(**{**quiet(), **ON, "max_epochs": 1}).fit(module, make_loader())
    assert devices_of(module) == {"cpu"}


def test_a_cuda_error_is_reported_even_if_saving_a_checkpoint_then_fails(tmp_path):
    """After a CUDA error, nothing can be read from the GPU, so saving a checkpoint fails."""
    code = f"""
import torch
from device import *
from runs import *

class Fails(Drawing):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 5:
            torch.zeros(3, device=DEVICE)[torch.tensor([7], device=DEVICE)]
            torch.cuda.synchronize()
        return loss

fit({str(tmp_path)!r}, Fails, on_device, max_epochs=1, save_every_n_steps=2, **ON)
"""
    done = subprocess.run(python_command(code, __file__), capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1
    last = [line for line in done.stderr.splitlines() if "CUDA error" in line and "Error:" in line]
    assert "device-side assert triggered" in last[-1], done.stderr
    again, *_ = fit(tmp_path, Drawing, on_device, max_epochs=1, resume="last", **ON)
    assert again.global_step == 10


@pytest.mark.parametrize("precision", PRECISIONS)
def test_validate_test_and_predict_give_the_same_values_as_with_trainer(precision):
    """FabricLoop returns predictions on the CPU."""

    class Evaluated(Drawing):
        def test_step(self, batch, batch_idx):
            self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

        def predict_step(self, batch, batch_idx):
            return {"logits": self(batch[0]), "label": batch[1]}

    results = []
    for kind in (pl.Trainer, FabricLoop):
        pl.seed_everything(1, verbose=False)
        module = Evaluated()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loop = kind(**{**quiet(), **ON, "precision": precision})
            made = [loop.validate(module, val_loader(), verbose=False), loop.test(module, val_loader(), verbose=False)]
            predictions = loop.predict(module, val_loader())
        results.append((made, [{k: v.cpu() for k, v in one.items()} for one in predictions]))
    assert same(*results)
    assert {tensor.device.type for one in predictions for tensor in one.values()} == {"cpu"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("compile", [True, "reduce-overhead", {"dynamic": False}], ids=str)
def test_a_compiled_module_trains_like_an_uncompiled_module(tmp_path, compile):
    rows, modules = [], []
    for value in (False, compile):
        options = {**ON, "max_epochs": 3, "compile": value}
        loop, module, history = fit(tmp_path / str(bool(value)), Still, on_device, val_on_device, **options)
        rows.append(torch.tensor(history[["train_loss", "val_loss"]].values))
        modules.append(module)
    torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    assert list(modules[0].state_dict()) == list(modules[1].state_dict())
    file = torch.load(loop.checkpoint_path("last"), weights_only=True)
    assert list(file["state_dict"]) == list(modules[0].state_dict())


def test_accelerator_auto_selects_the_gpu():
    assert FabricLoop(max_epochs=1).fabric.device.type == DEVICE


def test_ddp_with_one_process_gives_the_same_weights_as_a_run_without_ddp(tmp_path):
    code = f"""
from device import *
from runs import *
fit({str(tmp_path / "ddp")!r}, Still, on_device, max_epochs=1, strategy="ddp", **ON)
"""
    done = subprocess.run(python_command(code, __file__), capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    _, module, _ = fit(tmp_path / "one", Still, on_device, max_epochs=1, **ON)
    file = next((tmp_path / "ddp").rglob("last.ckpt"))
    assert_same_weights(module, Still.load_from_checkpoint(file, map_location="cpu"))


class Reading(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        (loss if isinstance(loss, torch.Tensor) else loss["loss"]).item()
        return loss


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_profile_measures_a_run_on_the_gpu(precision):
    module = Reading()
    before, drawn = {name: one.clone() for name, one in module.state_dict().items()}, torch.cuda.get_rng_state()
    found = profile(FabricLoop(accelerator="gpu", devices=1, precision=precision), module, make_loader(), steps=6)
    assert {"data", "transfer", "forward", "backward", "optimizer"} <= found.parts.keys()
    assert len(found.reads) == 1
    assert same(module.state_dict(), before)
    assert torch.equal(torch.cuda.get_rng_state(), drawn)


def test_each_row_of_metrics_csv_contains_the_peak_gpu_memory(tmp_path):
    _, _, history = fit(tmp_path, train=make_loader, max_epochs=2, **ON)
    peak = torch.cuda.max_memory_allocated() / 2**30
    assert (history["gpu_memory"] >= 0).all()
    assert history["gpu_memory"].iloc[-1] == pytest.approx(peak, abs=0.01)
