"""Test runs that are resumed with a different parameter order, different dtypes or different settings."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from modules import make_loader, quiet, weight_averaging
from runs import with_files
from torch import nn

from fabric_template import FabricLoop, MiniLoop

LOOPS = {"MiniLoop": MiniLoop, "FabricLoop": FabricLoop}
both_loops = pytest.mark.parametrize("kind", list(LOOPS))
pairs_of_loops = pytest.mark.parametrize("kinds", [(one, other) for one in LOOPS for other in LOOPS], ids=">".join)
SAME_SHAPE = {"a": (8, 8), "b": (8, 8), "c": (8, 3)}
OTHER_SHAPE = {"a": (8, 5), "b": (5, 8), "c": (8, 3)}


class Layers(pl.LightningModule):
    """A model whose layers are created in a given order, but always called in the order a, b, c."""

    def __init__(self, order="abc", shapes=SAME_SHAPE, optimizer=torch.optim.Adam, frozen=""):
        super().__init__()
        self.optimizer_class = optimizer
        for name in order:
            self.add_module(name, nn.Linear(*shapes[name]))
            self.get_submodule(name).requires_grad_(name not in frozen)
        self.register_buffer("count", torch.tensor(3))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.c(self.b(self.a(batch[0].to(self.a.weight.dtype)))), batch[1])

    def trained(self):
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def configure_optimizers(self):
        return self.optimizer_class(self.trained(), lr=0.01)


class ReverseOrder(Layers):
    def trained(self):
        return super().trained()[::-1]


class Renamed(Layers):
    """A model whose layer "d" has the name "a" in the saved run."""

    def __init__(self):
        super().__init__()
        layers = [("d", self.a), ("b", self.b), ("c", self.c)]
        for name in "abc":
            delattr(self, name)
        for name, layer in layers:
            self.add_module(name, layer)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.c(self.b(self.d(batch[0]))), batch[1])

    def on_load_checkpoint(self, checkpoint):
        weights = checkpoint["state_dict"]
        for name in ("weight", "bias"):
            weights[f"d.{name}"] = weights.pop(f"a.{name}")


def train(kind, model, epochs, loader=None, **fit):
    options = {"accelerator": "cpu", "max_epochs": epochs, "precision": fit.pop("precision", None)}
    given = options if kind == "MiniLoop" else with_files(**options)
    LOOPS[kind](**given).fit(model, loader or make_loader(), **fit)
    return model


@pairs_of_loops
@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        (Layers, lambda: Layers("bac"), ("b.weight", "a.weight")),
        (Layers, ReverseOrder, ("c.bias", "a.weight")),
        (lambda: Layers(frozen="a"), lambda: Layers(frozen="b"), ("a.weight", "b.weight")),
        (
            lambda: Layers(shapes=OTHER_SHAPE, optimizer=torch.optim.RMSprop),
            lambda: Layers("cab", shapes=OTHER_SHAPE, optimizer=torch.optim.RMSprop),
            ("c.weight", "a.weight"),
        ),
    ],
    ids=["layers", "optimizer", "frozen layers", "shapes"],
)
def test_resuming_with_parameters_in_a_different_order_is_refused(kinds, first, second, names):
    """Optimizer states are saved by index, so each parameter would get the state of another parameter."""
    train(kinds[0], first(), 1)
    found, expected = names
    text = f"resume: parameter 0 of the optimizer is '{found}', but was '{expected}' in the saved run"
    with pytest.raises(ValueError, match=text):
        train(kinds[1], second(), 2, resume="last")
    train(kinds[1], second(), 1, load="last")


@both_loops
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (True, True)])
def test_a_run_can_resume_whether_or_not_the_model_is_compiled(kind, before, after):
    def run(is_compiled, epochs, **fit):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        model = torch.compile(net, backend="eager") if is_compiled else net
        step = lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1])  # noqa: E731
        train(kind, model, epochs, optimizer=optimizer, training_step=step, **fit)

    run(before, 1)
    run(after, 2, resume="last")


def test_a_run_resumes_after_a_layer_was_renamed():
    torch.manual_seed(0)
    expected = train("FabricLoop", Layers(), 2)
    torch.manual_seed(0)
    train("FabricLoop", Layers(), 1)
    found = train("FabricLoop", Renamed(), 2, resume="last")
    assert torch.equal(found.d.weight, expected.a.weight)


def save_with_trainer(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(**quiet(accelerator="cpu", max_epochs=1, logger=False, **options))
        trainer.fit(model, make_loader())
    trainer.save_checkpoint("trainer.ckpt")


# Resuming with a different dtype of the weights


@pairs_of_loops
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_resuming_with_weights_of_a_different_dtype_is_refused(kinds, precision):
    train(kinds[0], Layers(), 1)
    dtype = {"64-true": "float64", "bf16-true": "bfloat16"}[precision]
    with pytest.raises(ValueError, match=f"resume: the dtype of 'a.weight' is torch.{dtype}, but was torch.float"):
        train(kinds[1], Layers(), 2, resume="last", precision=precision)
    train(kinds[1], Layers(), 1, load="last", precision=precision)


@both_loops
def test_resuming_with_a_different_default_dtype_is_refused(kind):
    train(kind, Layers(), 1)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ValueError, match=r"resume: the dtype of 'a\.weight' is torch\.float64"):
            train(kind, Layers(), 2, resume="last")
    finally:
        torch.set_default_dtype(torch.float32)


@both_loops
@pytest.mark.parametrize(
    "precisions", [("64-true",) * 2, ("bf16-true",) * 2, (None, "bf16-mixed"), ("bf16-mixed", None)]
)
def test_a_run_can_resume_with_a_different_precision_if_the_weights_keep_their_dtype(kind, precisions):
    train(kind, Layers(), 1, precision=precisions[0])
    train(kind, Layers(), 2, resume="last", precision=precisions[1])


def test_a_float64_checkpoint_of_trainer_cannot_be_resumed_with_float32_weights():
    save_with_trainer(Layers(), precision="64-true")
    with pytest.raises(ValueError, match=r"resume: the dtype of 'a\.weight' is torch\.float32, but was torch\.float64"):
        train("FabricLoop", Layers(), 2, resume="trainer.ckpt")
    train("FabricLoop", Layers(), 2, resume="trainer.ckpt", precision="64-true")


class ChangesDtype(Layers):
    def on_fit_start(self):
        self.b.to(torch.float64)

    def training_step(self, batch, batch_idx):
        hidden = self.b(self.a(batch[0]).double()).float()
        return nn.functional.cross_entropy(self.c(hidden), batch[1])


def test_a_run_resumes_if_on_fit_start_changes_the_dtype_of_a_layer():
    train("FabricLoop", ChangesDtype(), 1)
    train("FabricLoop", ChangesDtype(), 2, resume="last")


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_run_with_weight_averaging_in_bf16_or_float64_resumes_exactly(precision, tmp_path):
    def train_averaged(folder, epochs, **fit):
        torch.manual_seed(0)
        model, average = Layers(), weight_averaging()
        options = with_files(tmp_path / folder, max_epochs=epochs, precision=precision, callbacks=[average])
        FabricLoop(**options).fit(model, make_loader(), **fit)
        return [value for net in (model, average._average_model) for value in net.state_dict().values()]

    whole = train_averaged("whole", 3)
    train_averaged("resumed", 2)
    resumed = train_averaged("resumed", 3, resume="last")
    assert all(map(torch.equal, whole, resumed))


# Resuming with different settings of the loader


@pairs_of_loops
def test_resume_warns_about_a_different_batch_size_or_number_of_workers(kinds):
    train(kinds[0], Layers(), 1)
    text = r"resume: batch size was \[4\] and is now \[8\], num_workers was \[0\] and is now \[1\]\. The run continues"
    with pytest.warns(UserWarning, match=text):
        train(kinds[1], Layers(), 2, loader=make_loader(batch_size=8, num_workers=1), resume="last")


class Longer(Layers):
    """A model that stops training after the second batch of the second epoch."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.should_stop = self.trainer.current_epoch == 1 and batch_idx == 1


@both_loops
def test_within_an_epoch_resuming_with_a_different_number_of_batches_is_refused(kind):
    train(kind, Longer(), 3, loader=make_loader(24))
    with pytest.raises(ValueError, match=r"numbers? of batches.* (\[6\]|\(6, 1\)).*load="):
        train(kind, Layers(), 3, loader=make_loader(16), resume="last")
    train(kind, Layers(), 3, loader=make_loader(24), resume="last")
    # Between two epochs, the number of batches may change.
    train(kind, Layers(), 4, loader=make_loader(16), resume="last")
