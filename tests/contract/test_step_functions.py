"""Test step functions that log, schedule, validate, or step several optimizers."""

import csv
from functools import partial

import pytest
import torch
from lightning.fabric.plugins import MixedPrecision
from modules import Classifier, make_loader, quiet, run_trainer
from runs import val_loader
from torch import nn
from torch.nn.functional import cross_entropy

from fabric_template import FabricLoop, MiniLoop
from fabric_template.errors import ConfigurationError


def make_net():
    torch.manual_seed(1)
    return nn.Linear(8, 3)


def training_step(net, batch):
    return cross_entropy(net(batch[0]), batch[1])


def validation_step(net, batch):
    logits = net(batch[0])
    return {"loss": cross_entropy(logits, batch[1]), "right": (logits.argmax(1) == batch[1])}


def sgd(net, lr=0.1):
    return torch.optim.SGD(net.parameters(), lr=lr)


def rows_of(loop, name="metrics.csv"):
    with open(f"{loop.log_dir}/{name}", newline="") as file:
        return [
            {key: value for key, value in row.items() if key not in ("time", "waiting")} for row in csv.DictReader(file)
        ]


def logged(loop, log):
    def step(net, batch):
        loss = training_step(net, batch)
        log(loop, "half", loss / 2)
        return loss

    return step


def test_a_step_function_that_logs_gives_the_same_metrics_as_with_trainer():
    """The results equal those of a LightningModule that logs and schedules in the same way."""

    class Lit(Classifier):
        def training_step(self, batch, batch_idx):
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.log("half", loss / 2, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self):
            optimizer = sgd(self)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]

    trainer, lit = run_trainer(Lit, make_loader, max_epochs=2)
    torch.manual_seed(1)
    module = Lit()
    loop, optimizer = FabricLoop(**quiet(max_epochs=2)), sgd(module.net)
    step = logged(loop, lambda loop, name, value: loop.log(name, value, on_step=True, on_epoch=True))
    schedule = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}
    loop.fit(module.net, make_loader(), optimizer=optimizer, scheduler=schedule, training_step=step)
    theirs = trainer.callback_metrics
    assert all(torch.equal(a, b) for a, b in zip(module.net.parameters(), lit.net.parameters(), strict=True))
    assert all(loop.callback_metrics[name].equal(theirs[name]) for name in ("half", "half_step", "half_epoch"))
    assert optimizer.param_groups[0]["lr"] == trainer.optimizers[0].param_groups[0]["lr"] < 0.1


def test_fit_calls_step_on_each_scheduler_in_a_list():
    net = make_net()
    optimizer = sgd(net)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=9, threshold_mode="abs"
    )
    schedule = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), {"scheduler": plateau, "monitor": "val_loss"}]
    FabricLoop(**quiet(max_epochs=2)).fit(
        net, make_loader(), val_loader(), optimizer=optimizer, scheduler=schedule, training_step=training_step,
        validation_step=validation_step,
    )  # fmt: skip
    assert optimizer.param_groups[0]["lr"] == 0.1 / 4 / 2


def named_fit(epochs=2, **more):
    net = make_net()
    loop = FabricLoop(**quiet(max_epochs=epochs, logger=True, name="named"))
    loaders = {"val": val_loader(), "train_again": make_loader(shuffle=False)}
    functions = {"training_step": training_step, "validation_step": validation_step, **more}
    return net, loop, loop.fit(net, make_loader(), loaders, optimizer=sgd(net), **functions)


def test_loader_names_become_prefixes_of_column_names():
    """Each column has the value of its own loader. loop.validate uses the same names."""
    net, loop, history = named_fit()
    assert list(history.columns) == [
        "epoch",
        "step",
        "train_again_loss",
        "train_loss",
        "val_loss",
        "lr",
        "time",
        "waiting",
    ]
    [alone] = FabricLoop(**quiet()).validate(net, make_loader(shuffle=False), validation_step=validation_step)
    assert history.train_again_loss[1] == alone["val_loss"] == loop.callback_metrics["train_again_loss"].item()
    [first, second] = loop.validate(net, {"a": val_loader(), "b": make_loader(shuffle=False)}, verbose=False)
    assert (first, second) == ({"a_loss": history.val_loss[1]}, {"b_loss": alone["val_loss"]})
    one = loop.validate(net, {"only": val_loader()}, verbose=False)
    assert one == [{"only_loss": history.val_loss[1]}]


@pytest.mark.parametrize(("accumulated", "expected"), [(1, [5, 10, 15, 20, 25, 30]), (3, [5, 10])])
def test_validate_every_n_steps_counts_optimizer_steps(accumulated, expected):
    """Each validation and the last step write a row of metrics.csv. An epoch has 10 batches."""
    net, steps = make_net(), []

    class Note:
        def on_validation_end(self, loop, net):
            steps.append(loop.global_step)

    options = {"accumulate_grad_batches": accumulated, "validate_every_n_steps": 5, "num_sanity_val_steps": 0}
    loop = FabricLoop(**quiet(max_epochs=3, logger=True, name="every", callbacks=[Note()], **options))
    functions = {"training_step": training_step, "validation_step": validation_step}
    loop.fit(net, make_loader(), val_loader(), optimizer=sgd(net), **functions)
    assert steps == expected
    assert [int(row["step"]) for row in rows_of(loop, "metrics.csv")] == sorted({*expected, loop.global_step})


def gan_step(parts, optimizers):
    def step(net, batch):
        (x, _), (of_g, of_d) = batch, optimizers
        of_d.zero_grad()
        d_loss = net["d"](net["g"](x).detach()).square().mean()
        d_loss.backward()
        of_d.step()
        of_g.zero_grad()
        g_loss = -net["d"](net["g"](x)).mean()
        g_loss.backward()
        of_g.step()
        return {"loss": g_loss, "d_loss": d_loss}

    return step


def make_gan():
    torch.manual_seed(1)
    parts = nn.ModuleDict({"g": nn.Linear(8, 4), "d": nn.Linear(4, 1)})
    return parts, [sgd(parts["g"]), sgd(parts["d"])]


def test_a_training_step_may_call_step_on_several_optimizers():
    """The weights equal those of the same loop without FabricLoop. global_step counts each step."""
    parts, optimizers = make_gan()
    step = gan_step(parts, optimizers)
    torch.manual_seed(2)
    for _ in range(2):
        for batch in make_loader():
            step(parts, batch)
    plain = [parameter.detach().clone() for parameter in parts.parameters()]
    parts, optimizers = make_gan()
    loop = FabricLoop(**quiet(max_epochs=2))
    torch.manual_seed(2)
    history = loop.fit(parts, make_loader(), optimizer=optimizers, training_step=gan_step(parts, optimizers))
    assert all(map(torch.equal, plain, parts.parameters()))
    assert loop.global_step == 40
    assert list(history.columns) == ["epoch", "step", "train_loss", "train_d_loss", "lr", "lr_1", "time", "waiting"]
    assert not any(optimizer._optimizer_step_post_hooks for optimizer in optimizers)
    parts, optimizers = make_gan()
    loop = FabricLoop(**quiet(max_epochs=1))

    def through_loop(net, batch):
        return gan_step(net, loop.optimizers)(net, batch)

    loop.fit(parts, make_loader(), optimizer=optimizers, training_step=through_loop)
    assert loop.global_step == 20


def test_callbacks_see_the_gradients_before_each_step_of_several_optimizers():
    class Halve:
        def on_before_optimizer_step(self, loop, net, optimizer):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad.mul_(0.5)

    parts, optimizers = make_gan()
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] /= 2
    loop = FabricLoop(**quiet(max_epochs=1))
    loop.fit(parts, make_loader(), optimizer=optimizers, training_step=gan_step(parts, optimizers))
    halved, optimizers = make_gan()
    loop = FabricLoop(**quiet(max_epochs=1, callbacks=[Halve()]))
    loop.fit(halved, make_loader(), optimizer=optimizers, training_step=gan_step(halved, optimizers))
    assert all(map(torch.equal, parts.parameters(), halved.parameters()))
    assert not any(optimizer._optimizer_step_pre_hooks for optimizer in optimizers)


def test_on_before_optimizer_step_is_not_called_before_a_closure_has_computed_the_gradients():
    class Count:
        calls = 0

        def on_before_optimizer_step(self, loop, net, optimizer):
            self.calls += 1

    parts, optimizers = make_gan()

    def step(net, batch):
        for optimizer, options in zip(optimizers, ({"closure": lambda: None}, {}), strict=True):
            optimizer.zero_grad()
            loss = net["d"](net["g"](batch[0])).mean()
            loss.backward()
            optimizer.step(**options)
        return loss

    count, loop = Count(), FabricLoop(**quiet(max_epochs=1))
    loop.callbacks.append(count)
    loop.fit(parts, make_loader(), optimizer=optimizers, training_step=step)
    assert (count.calls, loop.global_step) == (10, 20)


def test_clipping_includes_parameters_outside_of_the_network_that_a_hook_has_added():
    """The added parameter's large gradient makes the clipped gradients of the network small."""

    class AddScale:
        def on_train_start(self, loop, net):
            self.scale = nn.Parameter(torch.ones(()))
            loop.optimizers[0].add_param_group({"params": [self.scale]})

    adds, net = AddScale(), make_net()
    start = net.weight.detach().clone()

    def step(net, batch):
        return training_step(net, batch) + 1e6 * adds.scale

    loop = FabricLoop(**quiet(max_steps=1, gradient_clip_val=1.0, callbacks=[adds]))
    loop.fit(net, make_loader(), optimizer=sgd(net), training_step=step)
    assert 0 < (net.weight - start).abs().max() < 1e-5


def test_a_gradient_scaler_is_refused_if_the_training_step_calls_step():
    """The optimizers would use gradients that are still multiplied by the loss scale."""
    parts, optimizers = make_gan()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loop = FabricLoop(**quiet(max_epochs=1, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)]))
    with pytest.raises(ConfigurationError, match="precision: got '16-mixed' for a training step that calls"):
        loop.fit(parts, make_loader(), optimizer=optimizers, training_step=gan_step(parts, optimizers))


def test_a_training_step_may_call_step_twice_on_one_optimizer():
    """Truncated backpropagation through time takes two optimizer steps in each batch."""
    net = make_net()
    net.automatic_optimization, optimizer = False, sgd(net)

    def step(net, batch):
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            optimizer.zero_grad()
            loss = training_step(net, (x, y))
            loss.backward()
            optimizer.step()
        return loss

    loop = FabricLoop(**quiet(max_epochs=1))
    loop.fit(net, make_loader(), optimizer=optimizer, training_step=step)
    assert loop.global_step == 20


def test_calling_loss_backward_with_two_processes_is_refused(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    parts, optimizers = make_gan()
    loop = FabricLoop(**quiet(max_epochs=1, devices=2, strategy="ddp_fork"))
    with pytest.raises(Exception, match=r"expected loop.backward\(loss\), which averages the gradients"):
        loop.fit(parts, make_loader(), optimizer=optimizers, training_step=gan_step(parts, optimizers))


@pytest.mark.parametrize("loop_class", [FabricLoop, MiniLoop])
def test_a_step_function_argument_with_a_default_value_does_not_get_the_batch_idx(loop_class):
    """The batch index must not replace the default value of a parameter such as ``factor=0.5``."""
    seen = []

    def scaled(net, batch, factor=0.5):
        seen.append(factor)
        return training_step(net, batch) * factor

    def by_name(net, batch, *, factor):
        return scaled(net, batch, factor)

    def indexed(net, batch, number, factor=0.5):
        return scaled(net, batch, factor + number)

    expected = {scaled: 0.5, partial(by_name, factor=0.25): 0.25, partial(scaled, factor=0.75): 0.75}
    options = quiet() if loop_class is FabricLoop else {"accelerator": "cpu"}
    for step, factor in [*expected.items(), (indexed, None)]:
        seen.clear()
        net = make_net()
        loop_class(max_epochs=1, **options).fit(net, make_loader(), optimizer=sgd(net), training_step=step)
        assert seen == ([factor] * 10 if factor else [0.5 + number for number in range(10)])


class IteratesItself(nn.Linear):
    def __next__(self):
        return self(torch.ones(1, 8)).square().mean()


def test_a_step_function_whose_signature_cannot_be_inspected_gets_model_and_batch():
    """Compiled functions such as next(model, batch) have no signature, so they get model and batch."""
    net = IteratesItself(8, 3)
    before = net.weight.clone()
    loop = FabricLoop(**quiet(max_epochs=1))
    history = loop.fit(net, make_loader(), val_loader(), optimizer=sgd(net), training_step=next, validation_step=next)
    assert history["val_loss"][0] > 0
    assert not torch.equal(net.weight, before)


class HasSteps:
    """A plain object with a validation step."""

    def __init__(self):
        self.net = nn.Linear(8, 3)

    def training_step(self, batch):
        return cross_entropy(self.net(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def test_fabric_loop_warns_about_a_validation_step_without_a_validation_loader():
    net = nn.Linear(8, 3)
    step = lambda net, batch: cross_entropy(net(batch[0]), batch[1])  # noqa: E731
    functions = {"training_step": step, "validation_step": step}
    message = "You defined a `validation_step` but have no `val_dataloader`"
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=message):
        FabricLoop(**quiet(max_epochs=1)).fit(net, make_loader(), optimizer=optimizer, **functions)
    with pytest.warns(UserWarning, match=message):
        FabricLoop(**quiet(max_epochs=1)).fit(HasSteps(), make_loader())
