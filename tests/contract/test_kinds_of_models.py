"""Test that every kind of model trains as in a hand-written loop, and can be saved, resumed and loaded."""

import contextlib
import io
import warnings
from collections import deque
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from modules import make_data, quiet
from parameters import keep, sample
from runs import same, with_files
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

from fabric_template import FabricLoop, MiniLoop

pytestmark = [
    pytest.mark.filterwarnings("ignore:Lazy modules are a new feature"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated"),
    # torch.compile reads .grad, which causes this warning.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:Found .* in eval mode"),
    pytest.mark.filterwarnings("ignore:optimizer. got parameters that are not in the model"),
]

LOOPS = {"FabricLoop": FabricLoop, "MiniLoop": MiniLoop}


# Networks of the tested models


def mlp():
    return nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.2), nn.Linear(6, 3))


class Around(nn.Module):
    """A network that wraps another network in an attribute."""

    def __init__(self, net, name="module"):
        super().__init__()
        setattr(self, name, net)
        self.name = name

    def forward(self, x):
        return getattr(self, self.name)(x)


class WithHead(Around):
    """A network with a child named _orig_mod, like a compiled module, and another child."""

    def __init__(self):
        super().__init__(nn.Linear(8, 8), "_orig_mod")
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.tanh(super().forward(x)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.second(torch.tanh(self.first(x))))


class CountsCalls(nn.Module):
    """A network with an extra state that is not a tensor."""

    def __init__(self):
        super().__init__()
        self.net, self.calls = mlp(), 0

    def forward(self, x):
        self.calls += self.training
        return self.net(x)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()


class Cast(nn.Module):
    """A network that computes in a different dtype than that of its input."""

    def __init__(self, dtype):
        super().__init__()
        self.net, self.dtype = mlp().to(dtype), dtype

    def forward(self, x):
        return self.net(x.to(self.dtype)).float()


class Unused(nn.Module):
    """A network with a layer and a parameter that the forward pass does not use."""

    def __init__(self):
        super().__init__()
        self.net, self.spare, self.scale = mlp(), nn.Linear(2, 2), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.net(x)


class BuffersAndHead(nn.Module):
    """A network with random features in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("features", torch.randn(8, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(x @ self.features))


def normed():
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))


def in_eval_mode():
    return normed().eval()


def frozen_norm():
    net = normed()
    net[1].eval().requires_grad_(False)
    return net


def frozen_backbone():
    """Return a network in which only the head is in train mode."""
    net = normed().eval()
    net[0].requires_grad_(False)
    net[3].train()
    return net


def reparametrized(change):
    def make():
        net = mlp()
        change(net[0])
        return net

    return make


def compiled():
    return torch.compile(mlp(), backend="eager")


def compiled_in_place():
    net = mlp()
    net.compile(backend="eager")
    return net


class HasTrainer(nn.Module):
    """A network that has a property named trainer, like a LightningModule."""

    trainer = property(lambda self: "mine")

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x)


NETWORKS = {
    "plain": mlp,
    "one child": lambda: Around(mlp()),
    "child called _orig_mod": WithHead,
    "child called log": lambda: Around(mlp(), "log"),
    "read-only trainer": HasTrainer,
    "compiled": compiled,
    "compiled in place": compiled_in_place,
    "compiled child": lambda: Around(compiled(), "inner"),
    "data parallel": lambda: nn.DataParallel(mlp()),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(mlp()),
    "scripted": lambda: torch.jit.script(mlp()),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(6), nn.Dropout(0.2), nn.LazyLinear(3)),
    "tied": Tied,
    "weight norm": reparametrized(parametrizations.weight_norm),
    "old weight norm": reparametrized(nn.utils.weight_norm),
    "old spectral norm": reparametrized(nn.utils.spectral_norm),
    "spectral norm": reparametrized(parametrizations.spectral_norm),
    "orthogonal": reparametrized(parametrizations.orthogonal),
    "extra state": CountsCalls,
    "complex": Complex,
    "double": lambda: Cast(torch.float64),
    "bf16": lambda: Cast(torch.bfloat16),
    "unused": Unused,
    "buffers": BuffersAndHead,
    "batch norm": normed,
    "eval mode": in_eval_mode,
    "frozen norm": frozen_norm,
    "frozen backbone": frozen_backbone,
}


# Tested models: a network with step functions, an object, or a LightningModule


def step(net, batch):
    return cross_entropy(net(batch[0]), batch[1])


def sgd(parameters):
    trained = [p for p in parameters if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def with_functions(make):
    net = make()
    given = {"training_step": step, "validation_step": step}
    return net, {**given, "optimizer": sgd(net.parameters())}


def with_optimizer_of_head():
    """Return a network, and an optimizer that trains only its last layer."""
    net, given = with_functions(mlp)
    return net, {**given, "optimizer": sgd(net[2].parameters())}


class Object:
    """A plain object with step methods and a network in an attribute."""

    def __init__(self, make=mlp):
        self.net = make()

    def forward(self, x):
        return self.net(x)

    def parameters(self):
        return self.net.parameters()

    def training_step(self, batch):
        return step(self.forward, batch)

    def validation_step(self, batch):
        return step(self.forward, batch)

    def configure_optimizers(self):
        return sgd(self.parameters())


class Lit(pl.LightningModule):
    def __init__(self, make=mlp):
        super().__init__()
        self.net = make()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = step(self, batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", step(self, batch))

    def configure_optimizers(self):
        return sgd(self.parameters())


class InList(Object):
    """A plain object with modules in a list, a dict, a tuple and a nested container."""

    def __init__(self):
        self.layers = [nn.Linear(8, 6), nn.Dropout(0.2)]
        self.heads = {"first": nn.Linear(6, 3), 1: {"deep": (nn.Linear(6, 3), "a text")}}
        self.scales = (nn.Parameter(torch.ones(3)), 2.0)
        self.queue = deque([None, nn.BatchNorm1d(6)])
        self.again, self.nothing = self.layers, [[], {}, 3]
        self.nothing.append(self.nothing)

    def modules(self):
        return [*self.layers, self.heads["first"], self.heads[1]["deep"][0], self.queue[1]]

    def forward(self, x):
        x = self.queue[1](self.layers[1](self.layers[0](x)))
        return (self.heads["first"](x) + self.heads[1]["deep"][0](x)) * self.scales[0]

    def parameters(self):
        return [*(p for m in self.modules() for p in m.parameters()), self.scales[0]]


class InEvalMode(InList):
    def __init__(self):
        super().__init__()
        for module in self.modules():
            module.eval()


class WithParameters(Object):
    """A plain object with parameters in addition to those of its network."""

    def __init__(self):
        super().__init__()
        self.scale, self.log_var = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.net(x) * self.scale * torch.exp(self.log_var)

    def parameters(self):
        return [*self.net.parameters(), self.scale, self.log_var]


class MadeInHook(Object):
    """A plain object that creates its modules in a hook."""

    def __init__(self, hook):
        setattr(self, hook, self.create)

    def create(self, stage=None):
        if not hasattr(self, "nets"):
            torch.manual_seed(4)
            self.nets = [mlp()]

    def forward(self, x):
        return self.nets[0](x)

    def parameters(self):
        return self.nets[0].parameters()


class LowRank(Lit):
    """A module that freezes its network, and adds low-rank parameters in a hook."""

    def __init__(self, hook):
        super().__init__()
        setattr(self, hook, self.add)

    def add(self, stage=None):
        if not hasattr(self, "low"):
            torch.manual_seed(4)
            self.net.requires_grad_(False)
            self.low = nn.ParameterList([nn.Parameter(torch.randn(8, 1)), nn.Parameter(torch.zeros(1, 3))])

    def forward(self, x):
        return self.net(x) + x @ self.low[0] @ self.low[1]


class HasFunctions(Lit):
    """A module with an attribute named functions, like FabricLoop's adapter for plain models."""

    def __init__(self):
        super().__init__()
        self.functions = [torch.relu]


class Outside(Lit):
    """A module that trains parameters outside of the module, as Trainer allows."""

    def __init__(self):
        super().__init__()
        self.helpers = [nn.Linear(3, 3)]

    def forward(self, x):
        return self.helpers[0](self.net(x))

    def configure_optimizers(self):
        return sgd([*self.parameters(), *self.helpers[0].parameters()])


MODELS = {f"functions, {name}": lambda make=make: with_functions(make) for name, make in NETWORKS.items()}
IN_LIGHTNING = ("plain", "compiled child", "scripted", "lazy", "tied", "weight norm", "extra state", "unused", "double")
IN_LIGHTNING += ("batch norm", "eval mode", "frozen norm", "frozen backbone")
MODELS |= {f"Lightning, {name}": lambda make=NETWORKS[name]: (Lit(make), {}) for name in IN_LIGHTNING}
MODELS |= {
    "functions, partly optimized": with_optimizer_of_head,
    "Lightning, attribute called functions": lambda: (HasFunctions(), {}),
    "object": lambda: (Object(), {}),
    "object, compiled": lambda: (Object(compiled), {}),
    "object, eval mode": lambda: (Object(in_eval_mode), {}),
    "object, frozen norm": lambda: (Object(frozen_norm), {}),
    "object, one child": lambda: (Object(lambda: Around(mlp())), {}),
    "object, lists": lambda: (InList(), {}),
    "object, lists in eval mode": lambda: (InEvalMode(), {}),
    "object, parameters": lambda: (WithParameters(), {}),
    "object, setup": lambda: (MadeInHook("setup"), {}),
    "object, configure_model": lambda: (MadeInHook("configure_model"), {}),
    "Lightning, setup": lambda: (LowRank("setup"), {}),
    "Lightning, configure_model": lambda: (LowRank("configure_model"), {}),
    "Lightning, parameters outside": lambda: (Outside(), {}),
    "Lightning, compiled module": lambda: (torch.compile(Lit(), backend="eager"), {}),
}


# Runs with each kind of model


def make_loaders():
    return DataLoader(make_data(16), batch_size=4, shuffle=True), DataLoader(make_data(16, seed=5), batch_size=8)


def make_model(name):
    torch.manual_seed(3)
    return MODELS[name]()


def train(name, loop, root, seed=5, resume=None, **options):
    """Train a new model. Return (loop, model)."""
    if loop == "FabricLoop":
        options |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    model, given = make_model(name)
    loaders = make_loaders()
    torch.manual_seed(seed)
    with contextlib.redirect_stdout(io.StringIO()):
        made = LOOPS[loop](accelerator="cpu", default_root_dir=str(root), **options)
        made.fit(model, *loaders, resume=resume, **given)
    return made, model


def train_by_hand(name, epochs=2):
    """Train a new model with Trainer, or with a loop written by hand."""
    model, given = make_model(name)
    model = getattr(model, "_orig_mod", model) if "compiled module" in name else model
    loaders = make_loaders()
    torch.manual_seed(5)
    if isinstance(model, pl.LightningModule):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pl.Trainer(**quiet(max_epochs=epochs, num_sanity_val_steps=0)).fit(model, *loaders)
        return model
    if isinstance(model, MadeInHook):
        model.create()
    training_step = given.get("training_step", lambda net, batch: model.training_step(batch))
    optimizer = given["optimizer"] if given else model.configure_optimizers()
    modules = modules_of(model)
    if not any(module.training for module in modules):
        switch_modes(modules, [True] * len(modules))
    for _ in range(epochs):
        for batch in loaders[0]:
            loss = training_step(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        modes = [module.training for module in modules]
        switch_modes(modules, [False] * len(modules))
        with torch.no_grad():
            for batch in loaders[1]:
                training_step(model, batch)
        switch_modes(modules, modes)
    return model


def switch_modes(modules, modes):
    for module, is_training in zip(modules, modes, strict=True):
        module.training = is_training


def parts_of(value, known=()):
    """Return the modules and parameters in an object, including those in its lists and dicts."""
    if isinstance(value, nn.Module | nn.Parameter):
        return [value]
    if id(value) in known or not hasattr(value, "__dict__") and not isinstance(value, dict | list | tuple | deque):
        return []
    values = value.values() if isinstance(value, dict) else value
    values = vars(value).values() if hasattr(value, "__dict__") else values
    return [part for item in values for part in parts_of(item, (*known, id(value)))]


def modules_of(model):
    return [module for part in parts_of(model) if isinstance(part, nn.Module) for module in part.modules()]


def state_of(model):
    """Return the weights, extra states and modes of a model."""
    inner = getattr(model, "_orig_mod", model)
    model = inner if isinstance(inner, pl.LightningModule) else model
    parts = parts_of(model) + getattr(model, "helpers", [])
    states = [dict(part.state_dict()) if isinstance(part, nn.Module) else part.detach() for part in parts]
    return states, [module.training for module in modules_of(model)]


def optimizer_state(loop):
    return (loop.optimizers[0] if isinstance(loop, FabricLoop) else loop.optimizer).state_dict()


# MiniLoop refuses these models with these error messages.
REFUSED_BY_MINI_LOOP = {
    "object, setup": "with setup, .* Use FabricLoop",
    "object, configure_model": "with configure_model, .* Use FabricLoop",
    "Lightning, setup": "with setup, .* Use FabricLoop",
    "Lightning, configure_model": "with configure_model, .* Use FabricLoop",
    "object, lists": "model: got a list of modules in the attribute layers. Write nn.ModuleList",
    "object, lists in eval mode": "model: got a list of modules in the attribute layers. Write nn.ModuleList",
    "Lightning, parameters outside": "optimizer: got parameters that are not in the model",
    "Lightning, compiled module": r"with torch\.compile\(\), .* Use FabricLoop",
}

CROSSING = [name for name in MODELS if name not in REFUSED_BY_MINI_LOOP]


@pytest.mark.parametrize("name", REFUSED_BY_MINI_LOOP)
def test_mini_loop_refuses_unsupported_models_before_any_file_is_written(tmp_path, name):
    with pytest.raises((TypeError, ValueError), match=REFUSED_BY_MINI_LOOP[name]):
        train(name, "MiniLoop", tmp_path / "refused", max_epochs=1)
    assert not (tmp_path / "refused").exists()


# To save time, test only every second pair of a loop and a
# model. Leave out MiniLoop's pairs with models that it refuses.
CASES = [case for case in sample(2, LOOPS, MODELS) if case.values[0] == "FabricLoop" or case.values[1] in CROSSING]


@pytest.mark.parametrize(("loop", "name"), CASES)
def test_each_kind_of_model_can_be_trained_saved_resumed_and_loaded(tmp_path, loop, name):
    """Compare a run of two epochs with a run that is stopped mid-epoch and resumed."""
    expected = state_of(train_by_hand(name))
    whole, model = train(name, loop, tmp_path / "whole", max_epochs=2)
    assert same(state_of(model), expected)
    train(name, loop, tmp_path / "cut", max_epochs=2, max_steps=3)
    resumed, again = train(name, loop, tmp_path / "cut", seed=9, max_epochs=2, resume="last")
    assert same(state_of(again), expected)
    assert same(optimizer_state(resumed), optimizer_state(whole))
    if "outside" not in name:
        check_load(name, whole, model, next(Path(tmp_path, "whole").rglob("last.ckpt")))


def check_load(name, loop, model, path):
    """Check that a new model with the loaded weights gives the same validation result."""
    other, given = make_model(name)
    functions = {"validation_step": step} if given else {}
    expected = loop.validate(model, make_loaders()[1], **functions)
    assert same(loop.validate(other, make_loaders()[1], load=path, **functions), expected)
    assert expected[0]["val_loss"] > 0


@pytest.mark.parametrize("kind", ["dict", "deque", "set"])
def test_mini_loop_refuses_modules_in_a_dict_deque_or_set(tmp_path, kind):
    containers = {"dict": {"a": [mlp()]}, "deque": deque([mlp()]), "set": {mlp()}}
    model = Object()
    model.others = containers[kind]
    with pytest.raises(ValueError, match=f"got a {kind} of modules in the attribute others"):
        MiniLoop(default_root_dir=tmp_path / "refused").fit(model, make_loaders()[0])
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(("name", "first"), sample(5, CROSSING, LOOPS))
def test_mini_loop_and_fabric_loop_can_resume_each_others_runs(tmp_path, name, first):
    second = next(loop for loop in LOOPS if loop != first)
    expected = train_by_hand(name)
    train(name, first, tmp_path / "cut", max_epochs=1)
    _, model = train(name, second, tmp_path / "cut", seed=9, max_epochs=2, resume="last")
    assert same(state_of(model), state_of(expected))


# Runs in two processes


def train_in_two_processes(name, root):
    model, given = make_model(name)
    options = {"devices": 2, "strategy": "ddp_fork", "max_epochs": 2, "num_sanity_val_steps": 0}
    FabricLoop(**with_files(root, **options)).fit(model, *make_loaders(), **given)
    return model


@pytest.mark.parametrize(
    "name",
    keep(
        [
            "functions, tied",
            "functions, weight norm",
            "functions, scripted",
            "object, lists",
            "object, parameters",
            "object, configure_model",
            "Lightning, configure_model",
        ],
        "functions, tied",
        "object, lists",
        "Lightning, configure_model",
    ),
)
def test_training_in_two_forked_processes_updates_the_model_in_the_parent_process(tmp_path, monkeypatch, name):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = train_in_two_processes(name, tmp_path)
    saved = torch.load(next(tmp_path.rglob("last.ckpt")), weights_only=True)["state_dict"]
    other, given = make_model(name)
    loaded = FabricLoop(**with_files(tmp_path / "validate"))
    path, functions = next(tmp_path.rglob("last.ckpt")), {"validation_step": step} if given else {}
    loaded.validate(other, make_loaders()[1], load=path, verbose=False, **functions)
    assert len(saved) > 3
    assert same(state_of(other)[0], state_of(model)[0])
    start, _ = make_model(name)
    if hasattr(start, "create"):
        start.create()
    assert not same(state_of(start)[0], state_of(model)[0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("object, setup", "setup: got the new parameter 'nets.0.0.weight' in a spawned process"),
        ("Lightning, setup", "setup: got the new parameter 'low.0' in a spawned process"),
        ("Lightning, on_fit_start", "on_fit_start: got the new parameter 'low.0', which would not be synchronized"),
        (
            "Lightning, parameters outside",
            r"got parameters that are not in the model, expected .* Shapes of the unexpected parameters: \(3, 3",
        ),
        ("functions, lazy", "Modules with uninitialized parameters can't be used"),
    ],
)
def test_parameters_created_in_hooks_are_refused_with_two_processes(tmp_path, monkeypatch, name, message):
    """DDP would not average the gradients of parameters that a hook creates."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setitem(MODELS, "Lightning, on_fit_start", lambda: (LowRank("on_fit_start"), {}))
    with pytest.raises(Exception, match=message):
        train_in_two_processes(name, tmp_path)
    assert not list(tmp_path.rglob("*.ckpt"))


# Models in the states of loop.save and loop.load


@pytest.mark.parametrize("method", ["save", "load"])
@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"nets": [mlp(), mlp()]}, r"a Sequential in nets\[1\]"),
        ({"a": {"b": (3, mlp())}, "epoch": 1}, r"a Sequential in a\['b'\]\[1\]"),
        ({"optimizers": {"net": sgd(mlp().parameters())}}, r"an SGD in optimizers\['net'\]"),
    ],
    ids=["list", "nested", "optimizer"],
)
def test_save_and_load_refuse_modules_and_optimizers_nested_in_lists_or_dicts(tmp_path, method, state, place):
    loop, path = FabricLoop(**with_files(tmp_path)), tmp_path / "mine.ckpt"
    with pytest.raises(
        TypeError, match=f"^loop.{method}: got {place}, but each module and each optimizer must be a top-level value"
    ):
        getattr(loop, method)(path, state)
    assert not path.exists()


@pytest.mark.parametrize("make", [mlp, compiled, Tied, Complex, lambda: nn.ModuleList([mlp(), mlp()])])
def test_load_restores_the_modules_and_optimizers_written_by_save(tmp_path, make):
    loop, path = FabricLoop(**with_files(tmp_path)), tmp_path / "mine.ckpt"
    torch.manual_seed(1)
    net, other = make(), make()
    values = {"epoch": 3, "numbers": [1, {"a": (2.0, "b")}]}
    loop.save(path, {"net": net, "optimizer": sgd(net.parameters()), **values})
    assert loop.load(path, {"net": other, "optimizer": sgd(other.parameters())}) == values
    assert same(dict(net.state_dict()), dict(other.state_dict()))
