"""FabricLoop against plain PyTorch, written out: the same seed, the same bits after three epochs, on every rung."""

import lightning.pytorch as pl
import pytest
import torch
from modules import make_loader, quiet
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from fabric_template import FabricLoop, TensorLoader

EPOCHS = 3


def make_net(dropout=0.0):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1)


def momentum(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.01)


def lbfgs(net):
    return torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=5)


def loss_of(net, batch):
    x, y = batch
    return cross_entropy(net(x), y)


# ---- the loops that everybody writes, one for each kind of run


def plain(net, loader):
    optimizer = sgd(net)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()


def plain_accumulated(net, loader):
    """Windows of three over ten batches: the last window holds one batch, it weighs 1/3 too, and it is stepped."""
    optimizer = momentum(net)
    for _ in range(EPOCHS):
        batches = list(loader)
        for start in range(0, len(batches), 3):
            optimizer.zero_grad()
            for batch in batches[start : start + 3]:
                (loss_of(net, batch) / 3).backward()
            optimizer.step()


def plain_clipped_by_norm(net, loader):
    optimizer = sgd(net)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()


def plain_clipped_by_value(net, loader):
    optimizer = sgd(net)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            nn.utils.clip_grad_value_(net.parameters(), 0.01)
            optimizer.step()


def plain_accumulated_and_clipped(net, loader):
    """The whole window is clipped, once, and not each batch."""
    optimizer = momentum(net)
    for _ in range(EPOCHS):
        batches = list(loader)
        for start in range(0, len(batches), 3):
            optimizer.zero_grad()
            for batch in batches[start : start + 3]:
                (loss_of(net, batch) / 3).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()


def plain_scheduled_by_step(net, loader):
    optimizer = momentum(net)
    scheduler = StepLR(optimizer, 3, 0.7)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
            scheduler.step()


def plain_scheduled_by_epoch(net, loader):
    optimizer = adam(net)
    scheduler = CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
        scheduler.step()


def plain_bf16_mixed(net, loader):
    optimizer = sgd(net)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(net, batch)
            loss.backward()
            optimizer.step()


def plain_momentum_dropout_shuffle(net, loader):
    optimizer = momentum(net)
    net.train()
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()


def plain_lbfgs(net, loader):
    optimizer = lbfgs(net)
    for _ in range(EPOCHS):
        for batch in loader:

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = loss_of(net, batch)
                loss.backward()
                return loss

            optimizer.step(closure)


def by_step(net):
    optimizer = momentum(net)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 3, 0.7), "interval": "step"}}


def by_epoch(net):
    optimizer = adam(net)
    return [optimizer], [CosineAnnealingLR(optimizer, EPOCHS)]


# name: (the plain loop, what configure_optimizers returns, dropout, shuffle, the loop's words)
CASES = {
    "plain": (plain, sgd, 0.0, False, {}),
    "accumulated": (plain_accumulated, momentum, 0.0, False, {"accumulate_grad_batches": 3}),
    "clipped_by_norm": (plain_clipped_by_norm, sgd, 0.0, False, {"gradient_clip_val": 0.1}),
    "clipped_by_value": (
        plain_clipped_by_value,
        sgd,
        0.0,
        False,
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "accumulated_and_clipped": (
        plain_accumulated_and_clipped,
        momentum,
        0.0,
        True,
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    ),
    "scheduled_by_step": (plain_scheduled_by_step, by_step, 0.0, False, {}),
    "scheduled_by_epoch": (plain_scheduled_by_epoch, by_epoch, 0.0, False, {}),
    "bf16_mixed": (plain_bf16_mixed, sgd, 0.0, False, {"precision": "bf16-mixed"}),
    "momentum_dropout_shuffle": (plain_momentum_dropout_shuffle, momentum, 0.5, True, {}),
    "lbfgs": (plain_lbfgs, lbfgs, 0.0, False, {}),
}


# ---- the same training on the rungs of the ladder


class PlainObject:
    """Rung 3: any object that holds a module."""

    def __init__(self, net, make_optimizer):
        self.net, self.make_optimizer = net, make_optimizer

    def training_step(self, batch):
        return loss_of(self.net, batch)

    def configure_optimizers(self):
        return self.make_optimizer(self.net)


class PlainModule(nn.Module):
    """Rung 3: an nn.Module with step methods."""

    def __init__(self, net, make_optimizer):
        super().__init__()
        self.net, self.make_optimizer = net, make_optimizer

    def training_step(self, batch, batch_idx):
        return loss_of(self.net, batch)

    def configure_optimizers(self):
        return self.make_optimizer(self)


class LitModule(pl.LightningModule):
    """Rung 4."""

    def __init__(self, net, make_optimizer):
        super().__init__()
        self.net, self.make_optimizer = net, make_optimizer

    def training_step(self, batch, batch_idx):
        loss = loss_of(self.net, batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return self.make_optimizer(self)


def step_function(net, batch):
    return loss_of(net, batch)


def step_function_with_idx(net, batch, batch_idx):
    return {"loss": loss_of(net, batch)}


RUNGS = {
    "functions": lambda net, make: ((net,), {"optimizer": make(net), "training_step": step_function}),
    "functions_with_idx": lambda net, make: ((net,), {"optimizer": make(net), "training_step": step_function_with_idx}),
    "object": lambda net, make: ((PlainObject(net, make),), {}),
    "module": lambda net, make: ((PlainModule(net, make),), {}),
    "lightning_module": lambda net, make: ((LitModule(net, make),), {}),
}


def fit_on(rung, net, make_optimizer, loader, val_loader=None, **words):
    (model,), arguments = RUNGS[rung](net, make_optimizer)
    loop = FabricLoop(**quiet(max_epochs=EPOCHS, **words))
    loop.fit(model, loader, val_loader, **arguments)
    return loop


def assert_equal_weights(expected, net):
    first, second = expected.state_dict(), net.state_dict()
    assert list(first) == list(second)
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, different


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("case", CASES)
def test_same_bits_as_the_plain_loop(case, rung):
    plain_loop, make_optimizer, dropout, shuffle, words = CASES[case]

    torch.manual_seed(1)
    expected = make_net(dropout)
    start = {name: value.clone() for name, value in expected.state_dict().items()}
    plain_loop(expected, make_loader(40, shuffle=shuffle))
    random_after = torch.rand(4)

    torch.manual_seed(1)
    net = make_net(dropout)
    loop = fit_on(rung, net, make_optimizer, make_loader(40, shuffle=shuffle), **words)
    assert_equal_weights(expected, net)
    assert torch.equal(torch.rand(4), random_after)  # as many random numbers were drawn
    assert not torch.equal(net[0].weight, start["0.weight"])  # and something was trained
    updates = {"accumulated": 12, "accumulated_and_clipped": 12}.get(case, 30)
    assert (loop.current_epoch, loop.global_step) == (EPOCHS, updates)


@pytest.mark.parametrize("rung", RUNGS)
def test_tensor_loader_is_the_same_loop(rung):
    """A loader that is no DataLoader: shuffled by the same global random numbers in both."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 8, generator=generator), torch.randint(3, (40,), generator=generator)

    torch.manual_seed(1)
    expected = make_net(0.5)
    plain_momentum_dropout_shuffle(expected, TensorLoader(x, y, batch_size=4, shuffle=True))

    torch.manual_seed(1)
    net = make_net(0.5)
    fit_on(rung, net, momentum, TensorLoader(x, y, batch_size=4, shuffle=True))
    assert_equal_weights(expected, net)


# ---- with a validation at the end of each epoch


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


def val_function(net, batch):
    x, y = batch
    logits = net(x)
    return cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()


class ValidatedObject(PlainObject):
    def validation_step(self, batch):
        return val_function(self.net, batch)


class ValidatedModule(PlainModule):
    def validation_step(self, batch, batch_idx):
        loss, acc = val_function(self.net, batch)
        return {"loss": loss, "acc": acc}


class ValidatedLitModule(pl.LightningModule):
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


@pytest.mark.parametrize("rung", ["functions", "object", "module", "lightning_module"])
def test_validation_changes_no_bit_and_its_numbers_are_the_plain_ones(rung):
    """42 and 18 samples in fours: the last batches are smaller, and weigh less in the means."""

    def loaders():
        return make_loader(42), make_loader(18, shuffle=False, seed=5)

    torch.manual_seed(1)
    expected = make_net(0.5)
    rows = plain_with_validation(expected, *loaders())

    torch.manual_seed(1)
    net = make_net(0.5)
    loop = FabricLoop(**quiet(max_epochs=EPOCHS))
    if rung == "functions":
        history = loop.fit(
            net,
            *loaders(),
            optimizer=momentum(net),
            training_step=step_function,
            validation_step=val_function,
        )
    else:
        kind = {"object": ValidatedObject, "module": ValidatedModule, "lightning_module": ValidatedLitModule}[rung]
        history = loop.fit(kind(net, momentum), *loaders())
    assert_equal_weights(expected, net)
    assert list(history.columns) == ["epoch", "step", "train_loss", "val_loss", "val_acc", "lr", "time"]
    found = history[["epoch", "train_loss", "val_loss", "val_acc"]].itertuples(index=False, name=None)
    for row, expected_row in zip(found, rows, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-6)  # the same sums, in another order


# ---- accumulation and the large batch


@pytest.mark.parametrize("rung", RUNGS)
def test_full_windows_equal_the_large_batch(rung):
    """Five batches of four are one of twenty, but for rounding: autograd sums the same products in another order.

    The losses are means of equal parts, so mean(20) = (mean(4) + ... + mean(4)) / 5 in real numbers; in float64 the
    difference shrinks by nine digits, which nothing but rounding does. Where sums are exact, the bits are equal: below.
    """
    for precision, tolerance in (("32-true", 1e-5), ("64-true", 1e-13)):
        nets = []
        for batch_size, accumulate in ((4, 5), (20, 1)):
            torch.manual_seed(1)
            net = make_net()
            loader = make_loader(40, batch_size=batch_size, shuffle=False)
            loop = fit_on(rung, net, momentum, loader, accumulate_grad_batches=accumulate, precision=precision)
            assert loop.global_step == 6
            nets.append(net)
        small, large = (torch.cat([p.detach().flatten() for p in net.parameters()]) for net in nets)
        torch.testing.assert_close(small, large, rtol=tolerance, atol=tolerance)


def test_full_windows_equal_the_large_batch_bit_for_bit_where_sums_are_exact():
    """Small whole numbers, a linear loss and powers of two: no rounding, hence no difference at all."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 8, (32, 4), generator=generator).float()
    weights = []
    for batch_size, accumulate in ((4, 4), (16, 1)):
        net = nn.Linear(4, 1)
        nn.init.zeros_(net.weight)
        nn.init.zeros_(net.bias)
        loop = FabricLoop(**quiet(max_epochs=EPOCHS, accumulate_grad_batches=accumulate))
        loop.fit(
            net,
            TensorLoader(x, batch_size=batch_size),
            optimizer=torch.optim.SGD(net.parameters(), lr=0.5),
            training_step=lambda net, batch: net(batch[0]).mean(),
        )
        weights.append(net.weight.detach())
    assert torch.equal(*weights)
    assert weights[0].abs().sum() > 0


def test_lbfgs_evaluates_the_closure_several_times():
    calls = []

    def counted(net, batch, batch_idx):
        calls.append(batch_idx)
        return loss_of(net, batch)

    torch.manual_seed(1)
    net = make_net()
    loop = FabricLoop(**quiet(max_epochs=1))
    loop.fit(net, make_loader(8, shuffle=False), optimizer=lbfgs(net), training_step=counted)
    expected = []
    torch.manual_seed(1)
    plain_net = make_net()
    optimizer = lbfgs(plain_net)
    for batch_idx, batch in enumerate(make_loader(8, shuffle=False)):

        def closure(batch_idx=batch_idx, batch=batch):
            expected.append(batch_idx)
            optimizer.zero_grad()
            loss = loss_of(plain_net, batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert calls == expected
    assert calls.count(0) > 1
    assert loop.global_step == 2
    assert_equal_weights(plain_net, net)


def test_a_plain_loop_made_of_our_parts():
    """Rung 1: setup and backward of the loop inside the hand-written loop give the hand-written loop's bits."""
    torch.manual_seed(1)
    expected = make_net(0.5)
    plain_momentum_dropout_shuffle(expected, make_loader(40))

    torch.manual_seed(1)
    net = make_net(0.5)
    loop = FabricLoop(**quiet())
    model, optimizer, loader = loop.setup(net, momentum(net), make_loader(40))
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            loop.backward(loss_of(model, batch))
            optimizer.step()
    assert_equal_weights(expected, net)
