"""Precision is live inside every step: what the dtypes are there, and what the gradient scaler does around them."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch.plugins import MixedPrecision as TrainerMixedPrecision
from modules import Classifier, assert_same_metrics, assert_same_weights, make_loader, quiet, run_loop, run_trainer
from torch import nn
from torch.nn.functional import cross_entropy

from fabric_template import FabricLoop


def scaled(kind=MixedPrecision, **words):
    """What makes 16-mixed run on the CPU, too."""
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 2.0**8, **words})
    return {"plugins": kind("16-mixed", device="cpu", scaler=scaler)}


# precision: (the loop's words, dtype of a Linear's output, of the batch, of the weights, of a new tensor)
PRECISIONS = {
    "32-true": (lambda: {"precision": "32-true"}, torch.float32, torch.float32, torch.float32, torch.float32),
    "16-mixed": (scaled, torch.float16, torch.float32, torch.float32, torch.float32),
    "bf16-mixed": (
        lambda: {"precision": "bf16-mixed"},
        torch.bfloat16,
        torch.float32,
        torch.float32,
        torch.float32,
    ),
    "bf16-true": (
        lambda: {"precision": "bf16-true"},
        torch.bfloat16,
        torch.bfloat16,
        torch.bfloat16,
        torch.bfloat16,
    ),
    "64-true": (lambda: {"precision": "64-true"}, torch.float64, torch.float64, torch.float64, torch.float64),
}


def look(seen, stage, net, batch):
    """Note the dtypes as a step sees them; returns the loss."""
    x, y = batch
    output = net(x)
    seen.add((stage, output.dtype, x.dtype, net.weight.dtype, torch.zeros(1).dtype))
    assert y.dtype == torch.int64  # labels stay labels
    return cross_entropy(output.float(), y)


class LitLook(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.seen = nn.Linear(8, 3), set()

    def training_step(self, batch, batch_idx):
        return look(self.seen, "training", self.net, batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", look(self.seen, "validation", self.net, batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", look(self.seen, "test", self.net, batch))

    def predict_step(self, batch, batch_idx):
        return look(self.seen, "predict", self.net, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ModuleLook(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.seen = nn.Linear(8, 3), set()

    def training_step(self, batch):
        return look(self.seen, "training", self.net, batch)

    def validation_step(self, batch):
        return look(self.seen, "validation", self.net, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ObjectLook:
    def __init__(self):
        self.net, self.seen = nn.Linear(8, 3), set()

    def training_step(self, batch, batch_idx):
        return look(self.seen, "training", self.net, batch)

    def validation_step(self, batch, batch_idx):
        return look(self.seen, "validation", self.net, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def fit_functions(loop, seen):
    net = nn.Linear(8, 3)
    loop.fit(
        net,
        make_loader(8),
        make_loader(8),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        training_step=lambda net, batch: look(seen, "training", net, batch),
        validation_step=lambda net, batch: look(seen, "validation", net, batch),
    )
    return net


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rung", ["functions", "object", "module", "lightning_module"])
def test_dtypes_inside_the_steps(precision, rung):
    words, output, batch, weights, new = PRECISIONS[precision]
    loop = FabricLoop(**quiet(max_epochs=1, **words()))
    if rung == "functions":
        seen = set()
        net = fit_functions(loop, seen)
    else:
        owner = {"object": ObjectLook, "module": ModuleLook, "lightning_module": LitLook}[rung]()
        loop.fit(owner, make_loader(8), make_loader(8))
        seen, net = owner.seen, owner.net
    dtypes = (output, batch, weights, new)
    assert seen == {("training", *dtypes), ("validation", *dtypes)}
    assert net.weight.dtype == weights
    assert loop.precision == precision
    assert torch.get_default_dtype() == torch.float32  # as found


@pytest.mark.parametrize("precision", PRECISIONS)
def test_dtypes_inside_the_steps_without_training(precision):
    """validate, test and predict go through the same door as fit."""
    words, *dtypes = PRECISIONS[precision]
    module = LitLook()
    loop = FabricLoop(**quiet(**words()))
    loop.validate(module, make_loader(8), verbose=False)
    loop.test(module, make_loader(8), verbose=False)
    predictions = loop.predict(module, make_loader(8))
    assert module.seen == {(stage, *dtypes) for stage in ("validation", "test", "predict")}
    assert len(predictions) == 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_precision_changes_the_result(precision):
    """A precision that is accepted and ignored would give the float32 run's loss."""
    losses = {}
    for name in {"32-true", precision}:
        loop, _ = run_loop(Classifier, lambda: make_loader(40), max_epochs=1, precision=name)
        losses[name] = loop.callback_metrics["train_loss"].double().item()
    assert (losses["32-true"] == losses[precision]) == (precision == "32-true")
    assert losses[precision] == pytest.approx(losses["32-true"], rel=0.02)


# ---- the gradient scaler


class Overflows(Classifier):
    """A gradient that is not finite at two batches: the scaler skips those steps and lowers its scale."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 1e30 * 1e30 if self.global_step in (3, 11) else loss


def train():
    return make_loader(40)


def val():
    return make_loader(18, shuffle=False, seed=5)


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ],
    ids=["plain", "accumulated", "clip_norm", "clip_value"],
)
def test_scaler_as_in_trainer(words):
    scaler = {"growth_interval": 4}
    trainer, expected = run_trainer(
        Classifier, train, val, max_epochs=3, **words, **scaled(TrainerMixedPrecision, **scaler)
    )
    loop, module = run_loop(Classifier, train, val, max_epochs=3, **words, **scaled(**scaler))
    assert_same_weights(expected, module)
    assert_same_metrics(trainer, loop)
    assert loop.scaler.state_dict() == trainer.scaler.state_dict()
    assert loop.scaler.get_scale() > 2.0**8  # it has grown


def test_scaler_skips_steps_that_overflow_as_in_trainer():
    trainer, expected = run_trainer(Overflows, train, max_epochs=2, **scaled(TrainerMixedPrecision))
    with pytest.warns(UserWarning, match="loss is not finite"):
        loop, module = run_loop(Overflows, train, max_epochs=2, **scaled())
    assert_same_weights(expected, module)
    assert loop.scaler.state_dict() == trainer.scaler.state_dict()
    assert loop.scaler.get_scale() == 2.0**8 / 4
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_scaler_against_plain_pytorch():
    """The loop of PyTorch's AMP page, written out, with clipping and accumulation."""
    torch.manual_seed(1)
    net = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
    for _ in range(3):
        batches = list(make_loader(40))
        for start in range(0, len(batches), 2):
            optimizer.zero_grad()
            for x, y in batches[start : start + 2]:
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = cross_entropy(net(x), y)
                scaler.scale(loss / 2).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()

    torch.manual_seed(1)
    ours = nn.Linear(8, 3)
    words = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    loop = FabricLoop(**quiet(max_epochs=3, **words, **scaled(growth_interval=4)))
    loop.fit(
        ours,
        make_loader(40),
        optimizer=torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9),
        training_step=lambda net, batch: cross_entropy(net(batch[0]), batch[1]),
    )
    assert_same_weights(net, ours)
    assert loop.scaler.state_dict() == scaler.state_dict()


class Gradients(Classifier):
    """Keeps the gradients as the hooks see them."""

    def __init__(self):
        super().__init__(lambda m: torch.optim.SGD(m.parameters(), lr=1.0), dropout=0.0)
        self.after_backward, self.before_step, self.at_zero = [], [], []

    def _norm(self):
        return nn.utils.get_total_norm([p.grad for p in self.parameters()]).item()

    def on_after_backward(self):
        self.after_backward.append(self._norm())

    def on_before_optimizer_step(self, optimizer):
        self.before_step.append(self._norm())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.at_zero.append(self._norm())


def test_gradients_are_unscaled_in_on_before_optimizer_step():
    """Scaled by 256 after backward; before the step as they are without a scaler. Powers of two: exact."""
    _, module = run_loop(Gradients, train, max_epochs=1, **scaled())
    assert module.after_backward == pytest.approx([256 * norm for norm in module.before_step], rel=1e-6)
    _, without = run_loop(Gradients, train, max_epochs=1)
    assert module.before_step == pytest.approx(without.before_step, rel=0.05)


def test_clipping_under_the_scaler_clips_the_true_gradients():
    """Scaled gradients would all be clipped: their norm is 256 times larger than what a limit of 1 means."""
    _, module = run_loop(Gradients, train, max_epochs=2, gradient_clip_val=1.0, **scaled())
    limited = [min(norm, 1.0) for norm in module.before_step]
    assert module.at_zero == pytest.approx(limited, rel=1e-4)
    assert {norm > 1.0 for norm in module.before_step} == {True, False}  # both kinds occur


def test_scaler_is_saved_and_restored(tmp_path):
    """2 + 2 epochs equal 4, with a scale that moves at the updates 5, 10, ..., in the middle of its counting, too."""
    words = {"save_last": True, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}

    def fit(folder, max_epochs, resume=None):
        pl.seed_everything(1, verbose=False)
        module = Classifier()
        loop = FabricLoop(
            max_epochs=max_epochs,
            default_root_dir=str(tmp_path / folder),
            **words,
            **scaled(growth_interval=7, init_scale=16.0),
        )
        loop.fit(module, train(), val(), resume=resume)
        return loop, module

    whole, expected = fit("whole", 4)
    first, _ = fit("parts", 2)
    path = tmp_path / "parts" / "checkpoints" / "run" / "version_0" / "last.ckpt"
    saved = torch.load(path, weights_only=True)["MixedPrecision"]
    assert saved == first.scaler.state_dict()
    assert (saved["scale"], saved["_growth_tracker"]) == (
        64.0,
        6,
    )  # 20 updates: grown twice, six steps towards the next
    second, module = fit("parts", 4, resume=path)
    assert_same_weights(expected, module)
    assert second.scaler.state_dict() == whole.scaler.state_dict()
    assert second.scaler.get_scale() == 16.0 * 2**5  # 40 updates


def test_scaler_refuses_lbfgs():
    module = Classifier(lambda m: torch.optim.LBFGS(m.parameters()))
    with pytest.raises(ValueError, match="AMP and the LBFGS optimizer are not compatible"):
        FabricLoop(**quiet(max_epochs=1, **scaled())).fit(module, train())


def test_fused_optimizers_unscale_themselves_and_cannot_be_clipped():
    module = Classifier(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, fused=True))
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping.*fused"):
        FabricLoop(**quiet(max_epochs=1, gradient_clip_val=1.0, **scaled())).fit(module, train())
