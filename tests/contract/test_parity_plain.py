"""Test that both loops end with the same weights as a hand-written PyTorch loop."""

from contextlib import nullcontext
from functools import partial
from itertools import product

import lightning.pytorch as pl
import pytest
import torch
from modules import make_loader, quiet
from parameters import once
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from fabric_template import FabricLoop, MiniLoop, TensorLoader

EPOCHS = 3


def make_net(dropout=0.5):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


def momentum(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def by_step(net):
    optimizer = momentum(net)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 3, 0.7), "interval": "step"}}


def by_epoch(net):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    return [optimizer], [CosineAnnealingLR(optimizer, EPOCHS)]


def loss_of(net, batch):
    return cross_entropy(net(batch[0]), batch[1])


def plain(net, loader, accumulate=1, clip=None, step_scheduler=False, epoch_scheduler=False, bfloat16=False):
    """Train with a hand-written loop. Each batch has the weight 1 / accumulate, even at the end of an epoch."""
    if epoch_scheduler:
        [[optimizer], [scheduler]] = by_epoch(net)
    elif step_scheduler:
        optimizer = momentum(net)
        scheduler = StepLR(optimizer, 3, 0.7)
    else:
        optimizer = momentum(net)
    for _ in range(EPOCHS):
        batches = list(loader)
        for start in range(0, len(batches), accumulate):
            optimizer.zero_grad()
            for batch in batches[start : start + accumulate]:
                with torch.autocast("cpu", dtype=torch.bfloat16) if bfloat16 else nullcontext():
                    loss = loss_of(net, batch)
                (loss / accumulate).backward()
            if clip is not None:
                clip(net.parameters())
            optimizer.step()
            if step_scheduler:
                scheduler.step()
        if epoch_scheduler:
            scheduler.step()


def by_norm(parameters):
    nn.utils.clip_grad_norm_(parameters, 0.1)


def by_value(parameters):
    nn.utils.clip_grad_value_(parameters, 0.01)


# Map each case to (options of the plain loop, function that creates the optimizers, options of FabricLoop).
CASES = {
    "plain": ({}, momentum, {}),
    "accumulated": ({"accumulate": 3, "clip": by_norm}, momentum,
                    {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
    "clipped_by_value": ({"clip": by_value}, momentum,
                         {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "scheduled_by_step": ({"step_scheduler": True}, by_step, {}),
    "scheduled_by_epoch": ({"epoch_scheduler": True}, by_epoch, {}),
    "bf16_mixed": ({"bfloat16": True}, momentum, {"precision": "bf16-mixed"}),
}  # fmt: skip


def val_function(net, batch):
    logits = net(batch[0])
    return cross_entropy(logits, batch[1]), (logits.argmax(1) == batch[1]).float().mean()


class PlainObject:
    """An object with step methods and no base class."""

    def __init__(self, net, make_optimizer):
        self.net, self.make_optimizer = net, make_optimizer

    def training_step(self, batch):
        return loss_of(self.net, batch)

    def validation_step(self, batch):
        return val_function(self.net, batch)

    def configure_optimizers(self):
        return self.make_optimizer(self.net)


class PlainModule(nn.Module):
    def __init__(self, net, make_optimizer):
        super().__init__()
        self.net, self.make_optimizer = net, make_optimizer

    def training_step(self, batch, batch_idx):
        return {"loss": loss_of(self.net, batch)}

    def validation_step(self, batch, batch_idx):
        loss, acc = val_function(self.net, batch)
        return {"loss": loss, "acc": acc}

    def configure_optimizers(self):
        return self.make_optimizer(self)


class LitModule(pl.LightningModule):
    def __init__(self, net, make_optimizer):
        super().__init__()
        self.net, self.make_optimizer = net, make_optimizer

    def training_step(self, batch, batch_idx):
        loss = loss_of(self.net, batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, acc = val_function(self.net, batch)
        self.log_dict({"val_loss": loss, "val_acc": acc})

    def configure_optimizers(self):
        return self.make_optimizer(self)


LEVELS = {"functions": None, "object": PlainObject, "module": PlainModule, "lightning_module": LitModule}


def fit_on(level, net, make_optimizer, train, val=None, **options):
    loop = FabricLoop(**quiet(max_epochs=EPOCHS, **options))
    if level == "functions":
        functions = {"training_step": loss_of, "validation_step": val_function if val else None}
        return loop, loop.fit(net, train, val, optimizer=make_optimizer(net), **functions)
    return loop, loop.fit(LEVELS[level](net, make_optimizer), train, val)


def assert_equal_weights(expected, net):
    first, second = expected.state_dict(), net.state_dict()
    assert list(first) == list(second)
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, different


@pytest.mark.parametrize(("case", "level"), once(CASES, LEVELS))
def test_fit_ends_with_the_same_weights_as_a_plain_pytorch_loop(case, level):
    plain_options, make_optimizer, options = CASES[case]
    torch.manual_seed(1)
    expected = make_net()
    plain(expected, make_loader(40), **plain_options)
    random_after = torch.rand(4)

    torch.manual_seed(1)
    net = make_net()
    loop, _ = fit_on(level, net, make_optimizer, make_loader(40), **options)
    assert_equal_weights(expected, net)
    assert torch.equal(torch.rand(4), random_after)
    assert (loop.current_epoch, loop.global_step) == (EPOCHS, 12 if case == "accumulated" else 30)


def test_fit_and_a_plain_pytorch_loop_shuffle_a_tensor_loader_in_the_same_order():
    """In both loops, the loader draws its order from the global random generator."""
    x, y = torch.randn(40, 8), torch.randint(3, (40,))
    torch.manual_seed(1)
    expected = make_net()
    plain(expected, TensorLoader(x, y, batch_size=4, shuffle=True))
    torch.manual_seed(1)
    net = make_net()
    fit_on("functions", net, momentum, TensorLoader(x, y, batch_size=4, shuffle=True))
    assert_equal_weights(expected, net)


def plain_with_validation(net, loader, val_loader):
    optimizer, rows = momentum(net), []
    for epoch in range(EPOCHS):
        net.train()
        train_loss = torch.tensor(0.0)
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            train_loss += loss.detach() * len(x)
        net.eval()
        val_loss, correct, count = torch.tensor(0.0), torch.tensor(0.0), 0
        with torch.no_grad():
            for x, y in val_loader:
                logits = net(x)
                val_loss += cross_entropy(logits, y) * len(x)
                correct += (logits.argmax(1) == y).sum()
                count += len(x)
        rows.append((epoch, (train_loss / 42).item(), (val_loss / count).item(), (correct / count).item()))
    return rows


@pytest.mark.parametrize("level", LEVELS)
def test_validation_gives_the_same_metrics_as_a_plain_pytorch_loop(level):
    """The last batches are smaller, so they weigh less in the means."""

    def loaders():
        return make_loader(42), make_loader(18, shuffle=False, seed=5)

    torch.manual_seed(1)
    expected = make_net()
    rows = plain_with_validation(expected, *loaders())
    torch.manual_seed(1)
    net = make_net()
    _, history = fit_on(level, net, momentum, *loaders())
    assert_equal_weights(expected, net)
    assert list(history.columns) == ["epoch", "step", "train_loss", "val_loss", "val_acc", "lr", "time", "waiting"]
    found = history[["epoch", "train_loss", "val_loss", "val_acc"]].itertuples(index=False, name=None)
    for row, expected_row in zip(found, rows, strict=True):
        # Allow for rounding, because the two loops add the losses in a different order.
        assert row == pytest.approx(expected_row, rel=1e-6)


class LowRank(nn.Linear):
    """A linear layer that adds a trained matrix to its frozen weights in eval mode, like loralib's."""

    def __init__(self):
        super().__init__(8, 8)
        self.weight.requires_grad_(False)
        self.left, self.right = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.zeros(2, 8))

    def train(self, mode=True):
        if mode != self.training:
            self.weight.data.add_(self.left @ self.right, alpha=-1 if mode else 1)
        return super().train(mode)

    def forward(self, x):
        change = x @ (self.left @ self.right).T if self.training else 0
        return super().forward(x) + change


class FixedNorm(nn.Sequential):
    """A network whose train() method leaves BatchNorm in eval mode."""

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


def make_fixed_norm():
    net = FixedNorm(nn.Linear(8, 8))
    net.add_module("norm", nn.BatchNorm1d(8))
    return net


LAYERS = {"low rank": LowRank, "fixed norm": make_fixed_norm}


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize(("kind", "layer"), list(product([MiniLoop, FabricLoop], LAYERS)))
def test_fit_calls_a_train_method_that_a_layer_overrides_like_a_plain_pytorch_loop(tmp_path, kind, layer, freezes):
    nets = []
    for loop in (None, kind(max_epochs=EPOCHS, accelerator="cpu", default_root_dir=tmp_path)):
        torch.manual_seed(1)
        net = nn.Sequential(LAYERS[layer](), nn.Dropout(0.5), nn.Linear(8, 3))
        loaders, optimizer = (make_loader(40, shuffle=False), make_loader(16, shuffle=False)), momentum(net)
        net[1].train(not freezes)
        steps = {"training_step": loss_of, "validation_step": loss_of}
        if loop is not None:
            loop.fit(net, *loaders, optimizer=optimizer, **steps)
        for _ in range(EPOCHS if loop is None else 0):
            net.train()
            net[1].train(not freezes)
            for batch in loaders[0]:
                optimizer.zero_grad()
                loss_of(net, batch).backward()
                optimizer.step()
            net.eval()
            with torch.no_grad():
                list(map(partial(loss_of, net), loaders[1]))
        nets.append(net.train())
    assert_equal_weights(*nets)


@pytest.mark.parametrize("kind", [MiniLoop, FabricLoop])
def test_fit_clips_the_gradients_of_two_parameter_groups_like_a_plain_pytorch_loop(tmp_path, kind):
    nets = []
    for loop in (None, kind(max_epochs=EPOCHS, gradient_clip_val=0.1, accelerator="cpu", default_root_dir=tmp_path)):
        torch.manual_seed(1)
        net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(9)], nn.Linear(8, 3))
        groups = [[p for p in net.parameters() if p.dim() == dim] for dim in (1, 2)]
        optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.1, momentum=0.9)
        loader = make_loader(40, shuffle=False)
        if loop is not None:
            loop.fit(net, loader, optimizer=optimizer, training_step=loss_of)
        for batch in [*loader] * (EPOCHS if loop is None else 0):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            by_norm(net.parameters())
            optimizer.step()
        nets.append(net)
    assert_equal_weights(*nets)


def test_calling_setup_and_backward_gives_the_same_weights_as_plain_pytorch():
    """A loop written by hand calls only setup() and backward() of FabricLoop."""
    torch.manual_seed(1)
    expected = make_net()
    plain(expected, make_loader(40))
    torch.manual_seed(1)
    net = make_net()
    loop = FabricLoop(**quiet())
    model, optimizer, loader = loop.setup(net, momentum(net), make_loader(40))
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            loop.backward(loss_of(model, batch))
            optimizer.step()
    assert_equal_weights(expected, net)
