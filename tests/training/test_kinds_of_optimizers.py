"""Test that every kind of optimizer trains like a hand-written loop, or is refused."""

import functools
import warnings

import lightning.pytorch as pl
import pytest
import torch
from modules import make_data, quiet
from parameters import halve, sample
from runs import fit, same, tree, with_files
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from fabric_template import FabricLoop, MiniLoop
from fabric_template.errors import CheckpointError


class WithoutClosure(torch.optim.Optimizer):
    """An optimizer whose step() has no closure argument."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


class IgnoresClosure(WithoutClosure):
    def step(self, closure=None):
        super().step()


class SharpnessAware(torch.optim.SGD):
    """An optimizer that calls its closure twice per step, the second time with changed weights."""

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        steps = [0.05 * p.grad for p in parameters]
        for parameter, step in zip(parameters, steps, strict=True):
            parameter.add_(step)
        closure()
        for parameter, step in zip(parameters, steps, strict=True):
            parameter.sub_(step)
        super().step()
        return loss


class KeepsGradients(torch.optim.SGD):
    """An optimizer that sets gradients to zero instead of None, which matters with momentum."""

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none=False)


class NoSubclass:
    """An optimizer that has the methods of torch.optim.Optimizer but does not inherit from it."""

    def __init__(self, parameters):
        self.inner = torch.optim.SGD(parameters, lr=0.1)
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self):
        self.inner.zero_grad()

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


class AroundAnother(torch.optim.Optimizer):
    """An optimizer that wraps another one, like Lookahead, without calling super().__init__()."""

    def __init__(self, parameters):
        self.inner = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


def in_groups(parameters):
    first, *others = parameters
    groups = [{"params": [first], "lr": 0.3}, {"params": others, "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


OPTIMIZERS = {
    "without closure": WithoutClosure,
    "sharpness-aware": lambda parameters: SharpnessAware(parameters, lr=0.1, momentum=0.9),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
    "zero_grad": lambda parameters: KeepsGradients(parameters, lr=0.1, momentum=0.9),
    "groups": in_groups,
    "around another": AroundAnother,
    "no subclass": NoSubclass,
}
NEEDS_CLOSURE = ("sharpness-aware", "LBFGS")
REFUSED_BY_TRAINER = ("without closure", "around another", "no subclass")
REFUSED_BY_MINI_LOOP = (*NEEDS_CLOSURE, "no subclass")


def make_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def make_loader():
    return DataLoader(make_data(24), batch_size=4, shuffle=True)


def step(net, batch):
    return cross_entropy(net(batch[0]), batch[1])


def train(make, root, seed=5, resume=None, loop_class=FabricLoop, **options):
    net = make_net()
    optimizer, loader = make(net.parameters()), make_loader()
    torch.manual_seed(seed)
    if loop_class is MiniLoop:
        options = {"default_root_dir": root, "accelerator": "cpu", "max_epochs": 2, **options}
    else:
        options = with_files(root, max_epochs=2, **options)
    loop = loop_class(**options)
    loop.fit(net, loader, optimizer=optimizer, training_step=step, resume=resume)
    return loop, net


def train_by_hand(make, needs_closure):
    net = make_net()
    optimizer, loader = make(net.parameters()), make_loader()
    torch.manual_seed(5)
    for batch in [batch for _ in range(2) for batch in loader]:

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = step(net, batch)
            loss.backward()
            return loss

        if needs_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return net


class Lit(pl.LightningModule):
    def __init__(self, make):
        super().__init__()
        self.net, self.make = make_net(), make

    def training_step(self, batch, batch_idx):
        loss = step(self.net, batch)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return self.make(self.parameters())


CASES = [(FabricLoop, name) for name in OPTIMIZERS]
CASES += [(MiniLoop, name) for name in OPTIMIZERS if name not in REFUSED_BY_MINI_LOOP]


@pytest.mark.parametrize(("loop_class", "name"), CASES)
def test_each_optimizer_matches_a_hand_written_loop_even_after_resuming(tmp_path, loop_class, name):
    make, options = OPTIMIZERS[name], {"loop_class": loop_class}
    expected = train_by_hand(make, name in NEEDS_CLOSURE).state_dict()
    whole, net = train(make, tmp_path / "whole", **options)
    assert same(dict(net.state_dict()), dict(expected))
    train(make, tmp_path / "cut", max_steps=8, **options)
    resumed, net = train(make, tmp_path / "cut", seed=9, resume="last", **options)
    assert same(dict(net.state_dict()), dict(expected))
    states = [loop.optimizers[0].state_dict() for loop in (whole, resumed)]
    assert same(*states)


@pytest.mark.parametrize(
    ("name", "accumulated"), sample(3, [name for name in OPTIMIZERS if name not in REFUSED_BY_TRAINER], [1, 4])
)
def test_each_optimizer_gives_the_same_weights_and_metrics_as_with_trainer(tmp_path, name, accumulated):
    ends = []
    for loop_class in (pl.Trainer, FabricLoop):
        module, loader = Lit(OPTIMIZERS[name]), make_loader()
        torch.manual_seed(5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loop = loop_class(**quiet(max_epochs=2, accumulate_grad_batches=accumulated, gradient_clip_val=0.5))
            loop.fit(module, loader)
        metrics = {name: value.item() for name, value in loop.callback_metrics.items()}
        ends.append((dict(module.state_dict()), metrics, loop.global_step))
    assert same(*ends)


def test_an_optimizer_that_ignores_its_closure_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"IgnoresClosure.step: call the closure argument, or define step\(self\)"):
        train(IgnoresClosure, tmp_path)


def test_manual_optimization_refuses_an_optimizer_that_is_not_a_torch_optimizer(tmp_path):
    net = make_net()
    optimizers = [NoSubclass(net[0].parameters()), NoSubclass(net[2].parameters())]
    loop = FabricLoop(**with_files(tmp_path, max_epochs=1))
    with pytest.raises(
        TypeError, match="optimizer: got a NoSubclass in manual optimization, expected a torch.optim.Optimizer"
    ):
        loop.fit(net, make_loader(), optimizer=optimizers, training_step=step)


def make_sgd(net, lr):
    return torch.optim.SGD(net.parameters(), lr=lr)


@pytest.mark.parametrize(
    "given",
    [
        functools.partial(torch.optim.SGD, lr=0.2),
        functools.partial(make_sgd, lr=0.2),
        lambda net: make_sgd(net, 0.2),
    ],
    ids=["partial of a class", "partial of a function", "function"],
)
def test_fit_accepts_a_function_that_returns_the_optimizer(tmp_path, given):
    net, loop = make_net(), FabricLoop(**with_files(tmp_path, max_epochs=2))
    loader = make_loader()
    torch.manual_seed(5)
    loop.fit(net, loader, optimizer=given, training_step=step)
    expected = train_by_hand(lambda parameters: torch.optim.SGD(parameters, lr=0.2), needs_closure=False)
    assert same(dict(net.state_dict()), dict(expected.state_dict()))


class ParameterGroupAdder(Lit):
    """A module that adds a parameter group in a hook."""

    def __init__(self, hook="on_train_epoch_start"):
        super().__init__(lambda parameters: torch.optim.SGD(self.net[0].parameters(), lr=0.1, momentum=0.9))
        setattr(self, hook, self.add_group)

    def add_group(self, *args):
        optimizer = self.optimizers()
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": self.net[2].parameters(), "lr": 0.05})


@pytest.mark.parametrize(
    ("hook", "limit"),
    halve(["on_fit_start", "on_train_epoch_start", "on_train_batch_end"], [{"max_epochs": 2}, {"max_steps": 7}]),
    ids=str,
)
def test_a_run_resumes_with_a_parameter_group_added_by_a_hook(tmp_path, hook, limit):
    """FabricLoop adds the saved parameter group again before it restores the optimizer state."""

    def make():
        return ParameterGroupAdder(hook)

    whole = fit(tmp_path / "whole", make, make_loader, max_epochs=3)
    fit(tmp_path / "cut", make, make_loader, **limit)
    resumed = fit(tmp_path / "cut", make, make_loader, seed=9, max_epochs=3, resume="last")
    assert same(dict(whole[1].state_dict()), dict(resumed[1].state_dict()))
    assert [group["lr"] for group in resumed[0].optimizers[0].param_groups] == [0.1, 0.05]


def test_resume_refuses_a_checkpoint_with_parameters_that_the_module_lacks(tmp_path):
    """The saved run added a layer and its parameter group, which a new module does not have."""

    class Grows(ParameterGroupAdder):
        def add_group(self, *args):
            self.grown = nn.Linear(3, 3)
            self.optimizers().add_param_group({"params": self.grown.parameters()})

        def training_step(self, batch, batch_idx):
            if not hasattr(self, "grown"):
                self.add_group()
            return super().training_step(batch, batch_idx)

    def make():
        return Grows("on_test_start")

    fit(tmp_path, make, make_loader, max_epochs=1)
    before = tree(tmp_path)
    message = r'Unexpected key\(s\) in state_dict: "grown.weight"'
    with pytest.raises(CheckpointError, match=message):
        fit(tmp_path, make, make_loader, max_epochs=2, resume="last")
    assert tree(tmp_path) == before


# Gradient norms, the lr column and schedulers


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 3, sparse=True)

    def forward(self, x):
        return self.embedding(x).sum(1)


class ComplexAndHalf(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))
        self.linear = nn.Linear(2, 3).bfloat16()

    def forward(self, x):
        return (x.float() @ self.linear.weight.t().float() @ self.weight.real) + self.weight.imag.sum()


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("loop_class", [FabricLoop, MiniLoop])
def test_gradient_clipping_is_refused_for_layers_with_sparse_gradients(tmp_path, loop_class, layer):
    """torch cannot clip sparse gradients. Layers that are frozen, or not in the optimizer, are not clipped."""

    def train(net, parameters=None):
        loop = loop_class(max_epochs=1, accelerator="cpu", gradient_clip_val=1.0, default_root_dir=tmp_path)
        optimizer = torch.optim.SGD(parameters or net.parameters(), lr=0.1)
        ids, step = torch.randint(0, 9, (8, 2)), lambda net, batch: net(batch).square().mean()
        loop.fit(net, DataLoader(ids, batch_size=4), optimizer=optimizer, training_step=step)

    with pytest.raises(ValueError, match="gradient_clip_val: got 1.0 for a layer with sparse=True"):
        train(layer(9, 3, sparse=True))
    frozen = layer(9, 3, sparse=True).requires_grad_(False)
    train(nn.Sequential(frozen, nn.Linear(3, 1)))
    net = nn.Sequential(layer(9, 3, sparse=True), nn.Linear(3, 1))
    train(net, [*net[1].parameters()])


@pytest.mark.parametrize("make", [Sparse, ComplexAndHalf, lambda: nn.Sequential(Sparse(), nn.Linear(3, 3))])
def test_log_grad_norm_logs_the_norm_of_all_gradients(tmp_path, make):
    """The norm includes sparse, complex and bfloat16 gradients as well as dense ones."""
    torch.manual_seed(3)
    net, expected = make(), []
    ids = torch.tensor([[1, 1], [1, 2], [0, 9], [3, 3]])
    loader = DataLoader([(row, row.sum().float()) for row in ids], batch_size=2)

    class Norm:
        def on_before_optimizer_step(self, loop, net, optimizer):
            gradients = [p.grad.to_dense().flatten() for p in net.parameters() if p.grad is not None]
            expected.append(sum(g.abs().double().square().sum() for g in gradients).sqrt().item())

    def training_step(net, batch):
        return (net(batch[0]).sum(1) - batch[1]).square().mean()

    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loop = FabricLoop(**with_files(tmp_path, max_epochs=2, log_grad_norm=True, log_every_n_steps=1, callbacks=[Norm()]))
    loop.fit(net, loader, optimizer=optimizer, training_step=training_step)
    lines = (tmp_path / "logs/run/version_0/steps.csv").read_text().splitlines()
    column = lines[0].split(",").index("grad_norm")
    assert [float(line.split(",")[column]) for line in lines[1:]] == pytest.approx(expected, rel=1e-3)


def test_the_lr_column_contains_the_learning_rate_of_the_first_parameter_group(tmp_path):
    """The scheduler multiplies the learning rate of each group by a different factor."""
    net = make_net()
    optimizer = in_groups(net.parameters())
    factors = [lambda epoch: 0.5**epoch, lambda epoch: 0.1**epoch]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
    loop = FabricLoop(**with_files(tmp_path, max_epochs=3))
    history = loop.fit(net, make_loader(), optimizer=optimizer, scheduler=scheduler, training_step=step)
    assert history["lr"].tolist() == [0.3, 0.15, 0.075]
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.1 * 0.1**3)


@pytest.mark.parametrize("loop_class", [pl.Trainer, FabricLoop, MiniLoop])
@pytest.mark.parametrize("place", ["optimizer configuration", "lr scheduler dict"])
def test_unsupported_keys_in_the_dict_returned_by_configure_optimizers_cause_a_warning(tmp_path, loop_class, place):
    class Misspelled(Lit):
        def configure_optimizers(self):
            optimizer = make_sgd(self, 0.1)
            scheduler = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
            if place == "optimizer configuration":
                return {"optimizer": optimizer, "scheduler": scheduler}
            return {"optimizer": optimizer, "lr_scheduler": {**scheduler, "intervall": "step"}}

    options = quiet(max_epochs=1) if loop_class is pl.Trainer else {"max_epochs": 1, "default_root_dir": tmp_path}
    key = "scheduler" if place == "optimizer configuration" else "intervall"
    with pytest.warns(Warning, match=f"Found unsupported keys in the {place}: {{'{key}'}}"):
        loop_class(**options).fit(Misspelled(None), make_loader())


@pytest.mark.parametrize("loop_class", [FabricLoop, MiniLoop])
@pytest.mark.parametrize("monitor", ["train_loss", "val_loss"])
def test_an_error_explains_why_the_metric_of_a_scheduler_is_missing_in_the_first_steps(tmp_path, loop_class, monitor):
    net = make_net()
    optimizer = make_sgd(net, 0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    given = {"scheduler": {"scheduler": plateau, "interval": "step", "monitor": monitor}, "optimizer": optimizer}
    steps = {"training_step": step, "validation_step": step}
    loop = loop_class(max_epochs=1, default_root_dir=tmp_path)
    match = f"'?{monitor}.* metric is missing until the first epoch or validation (has ended|ends)"
    with pytest.raises(ValueError, match=match):
        loop.fit(net, make_loader(), make_loader(), **given, **steps)


@pytest.mark.parametrize("loop_class", [FabricLoop, MiniLoop])
def test_a_list_of_schedulers_in_a_dict_is_refused(tmp_path, loop_class):
    class Several(Lit):
        def configure_optimizers(self):
            optimizer = make_sgd(self, 0.1)
            schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, size) for size in (1, 2)]
            return {"optimizer": optimizer, "lr_scheduler": schedulers}

    match = r"scheduler: got a list, expected (one scheduler. .* \[optimizer\], \[first,|a scheduler from torch)"
    with pytest.raises(TypeError, match=match):
        loop_class(max_epochs=1, default_root_dir=tmp_path).fit(Several(None), make_loader())
