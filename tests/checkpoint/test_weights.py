"""Test that weights can be loaded into a model that is wrapped differently from the saved model."""

import functools
import tempfile

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from modules import Classifier, assert_same_weights
from parameters import once
from runs import fit, same, with_files
from torch import nn
from torch.optim.swa_utils import AveragedModel

from fabric_template import FabricLoop, TensorLoader
from fabric_template.checkpoint.restore import plain_name
from fabric_template.errors import CheckpointError, MissingKeyError, OtherModelError, WeightsOnlyError


def make_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


class Inner(nn.Module):
    """A network whose only child has a name that wrappers use, such as "module"."""

    def __init__(self, name="module"):
        super().__init__()
        setattr(self, name, make_net())
        self.name = name

    def forward(self, x):
        return getattr(self, self.name)(x)


class CompiledPart(nn.Module):
    def __init__(self, compiled):
        super().__init__()
        body = make_net()
        self.body = torch.compile(body, backend="eager") if compiled else body

    def forward(self, x):
        return self.body(x)


def compiled(net):
    return torch.compile(net, backend="eager")


WRAPPERS = {
    "plain": make_net,
    "compiled": lambda: compiled(make_net()),
    "parallel": lambda: nn.DataParallel(make_net()),
    "compiled parallel": lambda: compiled(nn.DataParallel(make_net())),
    "parallel compiled": lambda: nn.DataParallel(compiled(make_net())),
    "child called module": Inner,
    "child called _orig_mod": lambda: Inner("_orig_mod"),
    "child called module, parallel": lambda: nn.DataParallel(Inner()),
}
OTHERS = {
    "averaged": lambda: AveragedModel(make_net()),
    "compiled submodule": lambda: CompiledPart(True),
    "submodule": lambda: CompiledPart(False),
}
ALL = {**WRAPPERS, **OTHERS}


def step(net, batch):
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 8, generator=generator)
    return TensorLoader(x, x.argmax(1) % 3, batch_size=8)


def train(root, make, max_epochs, **start):
    net = make()
    loop = FabricLoop(**with_files(root, max_epochs=max_epochs))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loop.fit(net, data(), optimizer=optimizer, training_step=step, validation_step=step, **start)
    return net


def values(net):
    return {plain_name(name): value for name, value in net.state_dict().items()}


@pytest.mark.parametrize("kind", ALL)
def test_a_run_with_a_wrapped_or_compiled_model_resumes_exactly(tmp_path, kind):
    whole = train(tmp_path / "whole", ALL[kind], 3)
    train(tmp_path / "parts", ALL[kind], 1)
    resumed = train(tmp_path / "parts", ALL[kind], 3, resume="last")
    assert same(dict(resumed.state_dict()), dict(whole.state_dict()))


@functools.cache
def train_without_break():
    return values(train(tempfile.mkdtemp(), make_net, 2))


@pytest.mark.parametrize(
    ("before", "after"), once(["plain", "compiled", "parallel compiled", "child called module"], WRAPPERS)
)
def test_a_run_resumes_with_a_different_wrapper_around_the_model(tmp_path, before, after):
    train(tmp_path / "parts", WRAPPERS[before], 1)
    resumed = train(tmp_path / "parts", WRAPPERS[after], 2, resume="last")
    assert same(values(resumed), train_without_break())
    loop = FabricLoop(**with_files(tmp_path / "other"))
    path = tmp_path / "parts/checkpoints/run/version_0/last.ckpt"
    net = WRAPPERS[after]()
    loop.validate(net, data(), load=path, validation_step=step)
    assert same(values(net), values(resumed))


@pytest.mark.parametrize(
    ("before", "after"), [("submodule", "compiled submodule"), ("compiled submodule", "submodule")]
)
def test_a_run_can_resume_whether_or_not_a_submodule_is_compiled(tmp_path, before, after):
    whole = train(tmp_path / "whole", OTHERS[before], 2)
    train(tmp_path / "parts", OTHERS[before], 1)
    resumed = train(tmp_path / "parts", OTHERS[after], 2, resume="last")
    assert same(values(resumed), values(whole))


class TwoNames(nn.Module):
    """A network with two parameter names that differ only by "module.", the prefix of wrappers."""

    def __init__(self):
        super().__init__()
        self.body = make_net()
        self.module = nn.ModuleDict({"body": nn.Linear(8, 3)})

    def forward(self, x):
        return self.body(x) + self.module["body"](x)


def test_parameter_names_that_differ_only_by_a_wrapper_prefix_stay_distinct(tmp_path):
    whole = train(tmp_path / "whole", TwoNames, 2)
    train(tmp_path / "parts", TwoNames, 1)
    resumed = train(tmp_path / "parts", TwoNames, 2, resume="last")
    assert same(dict(resumed.state_dict()), dict(whole.state_dict()))


class Counts(nn.Linear):
    """A layer with an extra state that is not a tensor."""

    def __init__(self, make_state=dict):
        super().__init__(8, 3)
        self.calls, self.make_state = 0, make_state

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self):
        return self.make_state(calls=self.calls) if self.make_state is dict else self.calls

    def set_extra_state(self, state):
        self.calls = state["calls"] if self.make_state is dict else state


@pytest.mark.parametrize(("make_state", "wrap"), once([dict, int], [lambda net: net, compiled, nn.DataParallel]))
def test_resume_restores_the_extra_state_of_a_module(tmp_path, make_state, wrap):
    train(tmp_path, lambda: Counts(make_state), 1)
    found = train(tmp_path, lambda: wrap(Counts(make_state)), 3, resume="last")
    assert next(m for m in found.modules() if isinstance(m, Counts)).calls == 9
    net = Counts(make_state)
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    assert train(tmp_path, lambda: Counts(make_state), 1, load=tmp_path / "weights.pt").calls == 3


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict", None])
def test_load_accepts_weights_under_each_common_checkpoint_key(tmp_path, key):
    weights = make_net().state_dict()
    torch.save({key: weights, "epoch": 3} if key else weights, tmp_path / "w.pt")
    net = nn.DataParallel(make_net())
    nn.init.zeros_(net.module[0].weight)
    FabricLoop(**with_files(tmp_path)).validate(net, data(), load=tmp_path / "w.pt", validation_step=step)
    assert same(values(net), dict(weights))


WRONG = {
    "a module": ({"model": nn.Linear(8, 3)}, r"Linear in the part 'model'.*weights_only=False"),
    "a number as name": ({"state_dict": {0: torch.ones(1)}}, "got the key 0 in a state_dict"),
    "different keys": ({"net": {"weight": torch.ones(1)}}, r"got the keys \['net'\], expected"),
    "different names": ({"state_dict": {"module.other": torch.ones(1)}}, "Unexpected key"),
    "no tensor": ({"state_dict": {**make_net().state_dict(), "0.bias": "a"}}, 'named "0.bias"'),
    "extra state": ({"state_dict": {**make_net().state_dict(), "_extra_state": 3}}, "Unexpected key"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_load_explains_why_weights_do_not_match_the_model(tmp_path, kind):
    content, message = WRONG[kind]
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=message):
        train(tmp_path, make_net, 1, load=tmp_path / "w.pt")


def test_load_needs_weights_only_false_to_read_a_pickled_module(tmp_path):
    saved = make_net()
    torch.save({"model": saved}, tmp_path / "w.pt")
    net = train(tmp_path, make_net, 0, load=tmp_path / "w.pt", weights_only=False)
    assert_same_weights(net, saved)


# Resuming a model with a module that a hook creates


class BuildsAverage(Classifier):
    """A model that creates a submodule of averaged weights in one of the hooks before training."""

    def __init__(self, hook="setup"):
        super().__init__()
        self.hook = hook

    def build(self, hook):
        if hook == self.hook:
            self.average = AveragedModel(self.net)

    def setup(self, stage):
        self.build("setup")

    def configure_model(self):
        self.build("configure_model")

    def on_fit_start(self):
        self.build("on_fit_start")

    def on_train_batch_end(self, *args):
        self.average.update_parameters(self.net)


class BuildsInCallback(Callback):
    def on_fit_start(self, trainer, module):
        module.build("callback")


@pytest.mark.parametrize("hook", ["setup", "configure_model", "on_fit_start", "callback"])
def test_resume_restores_modules_created_by_a_hook(tmp_path, hook):
    def run(name, max_epochs, resume=None):
        make = lambda: BuildsAverage(hook)  # noqa: E731
        options = {"max_epochs": max_epochs, "resume": resume, "callbacks": [BuildsInCallback()]}
        return fit(tmp_path / name, make, seed=max_epochs if resume else 1, **options)[1]

    whole = run("whole", 3)
    run("parts", 1)
    assert_same_weights(run("parts", 3, resume="last"), whole)


def test_resuming_is_refused_if_the_model_lacks_a_saved_module(tmp_path):
    fit(tmp_path, BuildsAverage, max_epochs=1)
    with pytest.raises(OtherModelError, match=r"Unexpected key.*average"):
        fit(tmp_path, Classifier, max_epochs=2, resume="last")


def test_resume_refuses_a_file_that_contains_only_weights(tmp_path):
    FabricLoop(**with_files(tmp_path)).save(tmp_path / "weights.ckpt", {"state_dict": Classifier().state_dict()})
    with pytest.raises(WeightsOnlyError, match="^Trying to restore optimizer state") as caught:
        fit(tmp_path, max_epochs=1, resume=tmp_path / "weights.ckpt")
    assert isinstance(caught.value, KeyError)
    assert not isinstance(caught.value, MissingKeyError)
