"""Test that a run resumes exactly with the objects of an earlier fit in the same process, in both loops."""

import gc
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
from killed_model import KilledError
from modules import make_data
from parameters import keep, once
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from fabric_template import FabricLoop, MiniLoop

both_loops = pytest.mark.parametrize("kind", [MiniLoop, FabricLoop])


class Noisy(Dataset):
    def __init__(self):
        self.data, self.noise, self.large = make_data(40), 0.0, torch.zeros(600_000)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        x, y = self.data[index]
        return x + self.noise + self.large[0], y


class Decaying(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.decay = 0.0

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach(), alpha=self.decay)
        return super().step(closure)


class Buffer:
    def __init__(self):
        self.values, self.generator = [], random.Random(3)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(8, 3), torch.nn.Dropout(0.3)
        self.register_buffer("temperature", torch.ones(1), persistent=False)
        self.scale, self.history, self.memory = 1.0, [], None

    def forward(self, x):
        scale = self.scale + 0.1 * len(self.history)
        return self.layer(self.dropout(x)) * scale * self.temperature


class Script:
    """A script that calls fit several times with the same model, optimizer and loader.

    Args:
        change: A function of the script that a hook calls once per epoch.
        first: The first epoch in which the hook calls ``change``.
    """

    def __init__(self, kind, root, change, first=2):
        torch.manual_seed(0)
        self.kind, self.root, self.change, self.first, self.kill_at = kind, root, change, first, None
        # MiniLoop refuses a change of accumulate_grad_batches within an accumulation window.
        self.batch = 0 if change is accumulate else 1
        self.make_objects()

    def make_objects(self):
        self.net, self.dataset = Net(), Noisy()
        self.optimizer = Decaying(self.net.parameters())
        self.loader = DataLoader(self.dataset, 8, shuffle=True)
        self.loop = self.make_loop()

    def make_loop(self, epochs=4):
        return self.kind(accelerator="cpu", max_epochs=epochs, default_root_dir=self.root)

    def training_step(self, net, batch, batch_idx):
        x, y = batch
        if (self.loop.current_epoch, batch_idx) == self.kill_at:
            raise KilledError
        return cross_entropy(net(x), y)

    def on_train_batch_start(self, batch, batch_idx):
        if self.loop.current_epoch >= self.first and batch_idx == self.batch:
            self.change(self)

    def fit(self, resume=None, kill_at=None):
        self.kill_at, self.net.on_train_batch_start = kill_at, self.on_train_batch_start
        try:
            self.loop.fit(
                self.net, self.loader, optimizer=self.optimizer, training_step=self.training_step, resume=resume
            )
        except KilledError:
            assert kill_at is not None
        del self.net.on_train_batch_start
        return [value.clone() for value in self.net.state_dict().values()]


def freeze(script):
    script.net.layer.bias.requires_grad_(False)


def scale(script):
    script.net.scale += 1.0


def count(script):
    script.net.history.append(script.loop.current_epoch)


def heat(script):
    script.net.temperature.mul_(1.5)


def stop_dropout(script):
    script.net.dropout.eval()


def add_noise(script):
    script.dataset.noise += 0.5


def decay(script):
    script.optimizer.decay += 0.1


def accumulate(script):
    script.loop.accumulate_grad_batches = 2


def remember(script):
    script.net.memory = script.net.memory or Buffer()
    script.net.memory.values.append(script.net.memory.generator.random())
    script.net.scale = sum(script.net.memory.values)


CHANGES = [freeze, scale, count, heat, stop_dropout, add_noise, decay, accumulate, remember]


def assert_equal(weights, expected):
    assert all(map(torch.equal, weights, expected))


@pytest.mark.parametrize(("kind", "change"), once([MiniLoop, FabricLoop], CHANGES))
def test_resuming_with_the_same_model_and_loader_objects_is_exact(tmp_path, kind, change):
    expected = Script(kind, tmp_path / "whole", change).fit()
    script = Script(kind, tmp_path / "killed", change)
    script.fit(kill_at=(2, 3))
    assert_equal(script.fit(resume="last"), expected)


@both_loops
@pytest.mark.parametrize("change", keep([freeze, scale, decay, remember], freeze, remember))
def test_resuming_several_times_with_the_same_model_and_loader_objects_is_exact(tmp_path, kind, change):
    expected = Script(kind, tmp_path / "whole", change, first=1).fit()
    script, resume = Script(kind, tmp_path / "killed", change, first=1), None
    for kill_at in [(2, 3), (2, 2), (2, 4), (3, 2)]:
        script.fit(resume, kill_at)
        resume = "last"
    assert_equal(script.fit(resume), expected)


@both_loops
def test_a_new_loop_resumes_exactly_with_the_same_model_and_loader(tmp_path, kind):
    expected = Script(kind, tmp_path / "whole", scale).fit()
    script = Script(kind, tmp_path / "killed", scale)
    script.fit(kill_at=(2, 3))
    script.loop = script.make_loop()
    assert_equal(script.fit(resume="last"), expected)


@both_loops
def test_a_resumed_fit_saves_the_attribute_changes_that_the_first_fit_made(tmp_path, kind):
    def scale_once(script):
        script.net.scale = 2.0

    expected = Script(kind, tmp_path / "whole", scale_once, first=0).fit()
    script, resume = Script(kind, tmp_path / "continued", scale_once, first=0), None
    for epochs in (1, 2):
        script.loop = script.make_loop(epochs)
        script.fit(resume)
        script.change, resume = lambda script: None, "last"
    script.make_objects()
    assert_equal(script.fit(resume), expected)


@both_loops
def test_resume_keeps_an_attribute_that_the_user_changed_between_two_calls_of_fit(tmp_path, kind):
    script = Script(kind, tmp_path, lambda script: setattr(script.net, "scale", script.net.scale + 1.0))
    script.fit(kill_at=(2, 3))
    script.net.scale = 7.0
    script.loop.max_epochs = 3
    script.fit(resume="last")
    assert script.net.scale == 8.0
    assert script.loop.current_epoch == 3


@both_loops
def test_resuming_a_run_resets_attributes_to_their_values_at_the_start_of_the_run(tmp_path, kind):
    script = Script(kind, tmp_path, scale, first=1)
    script.fit(kill_at=(1, 3))
    assert script.net.scale == 2.0
    script.fit(kill_at=(1, 3))
    assert script.net.scale == 3.0
    folder = tmp_path / "checkpoints" / "run"
    script.fit(folder / "version_1" / "last.ckpt", kill_at=(1, 0))
    assert script.net.scale == 2.0
    script.fit(folder / "version_0" / "last.ckpt", kill_at=(1, 0))
    assert script.net.scale == 1.0


@both_loops
def test_a_new_run_keeps_model_attributes_changed_by_the_previous_run(tmp_path, kind):
    script = Script(kind, tmp_path, scale)
    script.fit(kill_at=(2, 3))
    script.fit(kill_at=(0, 0))
    assert script.net.scale == 2.0


@both_loops
def test_resume_warns_if_an_earlier_fit_changed_a_large_tensor_of_the_dataset(tmp_path, kind):
    def change(script):
        script.dataset.large.add_(0.5)

    script = Script(kind, tmp_path, change)
    script.fit(kill_at=(2, 3))
    with pytest.warns(UserWarning, match=r"earlier fit in this process changed the attribute .*large"):
        script.fit(resume="last")


@both_loops
def test_objects_passed_to_an_earlier_fit_are_garbage_collected(tmp_path, kind):
    script = Script(kind, tmp_path, scale)
    script.fit(kill_at=(2, 3))
    script.fit(resume="last")
    objects = (script.net, script.optimizer, script.loader, script.dataset, script.loop)
    references = [weakref.ref(item) for item in objects]
    del script, objects
    gc.collect()
    assert [reference() for reference in references] == [None] * 5


# Kinds of values that a resume resets


class Tracker:
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class SlotNoise:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 0.0


def track(script):
    script.net.memory = script.net.memory or Tracker()
    script.net.memory.count += 1
    script.net.scale = 1.0 + script.net.memory.count / 10


def collect(script):
    if not script.net.history:
        script.net.history.append(Tracker())
    script.net.history[0].count += 1
    script.net.scale = script.net.history[0].count / 10


def set_best_to_none(script):
    script.net.best = None
    script.net.scale += 1.0


def add_dropout(script):
    script.net.extra = getattr(script.net, "extra", torch.nn.Dropout(0.1))
    assert script.net.extra.training is True
    script.net.scale += 1.0


def scale_by_slot(script):
    script.net.noise.value += 0.5
    script.net.scale = 1.0 + script.net.noise.value


def scale_namespace(script):
    script.net.space.item += 1.0
    script.net.scale = script.net.space.item


def become_nan(script):
    script.net.scale += 1.0
    script.net.total = script.net.total + script.net.scale
    if script.kill_at is not None and script.loop.current_epoch == script.kill_at[0]:
        script.net.total = float("nan")
    elif script.net.total != script.net.total:
        script.net.scale = 100.0


RECORDED = [track, collect, set_best_to_none, add_dropout, scale_by_slot, scale_namespace, become_nan]


class RecordedScript(Script):
    def make_objects(self):
        super().make_objects()
        self.net.noise, self.net.space, self.net.total = SlotNoise(), SimpleNamespace(item=0.0), 0.0


@pytest.mark.parametrize(("kind", "change", "first"), once([MiniLoop, FabricLoop], RECORDED, [1, 2]))
def test_resuming_with_the_model_object_of_a_killed_run_gives_the_uninterrupted_result(tmp_path, kind, change, first):
    expected = RecordedScript(kind, tmp_path / "whole", change, first).fit()
    script = RecordedScript(kind, tmp_path / "killed", change, first)
    script.fit(kill_at=(2, 3))
    assert_equal(script.fit(resume="last"), expected)


@both_loops
def test_resuming_an_earlier_run_keeps_loop_options_that_the_user_set_between_fits(tmp_path, kind):
    script = Script(kind, tmp_path, scale)
    script.loop.max_epochs = 2
    script.fit()
    script.loop.max_epochs = 3
    script.fit()
    script.fit(tmp_path / "checkpoints" / "run" / "version_0" / "last.ckpt")
    assert (script.loop.max_epochs, script.loop.current_epoch) == (3, 3)


@both_loops
def test_resume_undoes_changes_that_validation_made_to_model_attributes(tmp_path, kind):
    def validation_step(net, batch):
        net.scale += 10.0
        return torch.zeros(())

    script = Script(kind, tmp_path, scale, first=3)
    script.fit(kill_at=(2, 3))
    script.loop.validate(script.net, script.loader, validation_step=validation_step)
    script.fit(resume="last")
    assert script.net.scale == 2.0


@both_loops
def test_a_refused_resume_changes_neither_model_attributes_nor_requires_grad(tmp_path, kind):
    def change(script):
        script.net.scale, script.loop.accumulate_grad_batches = 5.0, 2
        script.net.memory = script.net.memory or Buffer()
        script.net.history.append(1)
        freeze(script)

    script = Script(kind, tmp_path, change)
    script.batch = 0
    script.fit(kill_at=(2, 3))
    memory, history, script.optimizer = script.net.memory, script.net.history, Decaying([script.net.layer.weight])
    with pytest.raises(ValueError, match="parameters in each optimizer group|parameter group"):
        script.fit(resume="last")
    assert script.net.scale == 5.0
    # FabricLoop resets its options before it checks the optimizer.
    assert kind is FabricLoop or script.loop.accumulate_grad_batches == 2
    assert script.net.memory is memory
    assert script.net.history is history
    assert history == [1]
    assert not script.net.layer.bias.requires_grad
    script.optimizer = Decaying(script.net.parameters())
    script.change = lambda script: None
    script.fit(resume="last")
    assert (script.net.scale, script.net.memory, script.net.history) == (1.0, None, [])


@both_loops
def test_an_object_that_the_user_assigns_between_two_calls_of_fit_is_kept(tmp_path, kind):
    def change(script):
        script.net.memory = Buffer()

    script = Script(kind, tmp_path, change)
    script.fit(kill_at=(2, 3))
    script.net.memory = memory = SlotNoise()
    script.change = scale
    script.fit(resume="last")
    assert script.net.memory is memory


class Jittered(Noisy):
    def __init__(self):
        super().__init__()
        self.random = random.Random(5)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + self.random.gauss(0, 0.1), y


class ScriptWithGenerators(Script):
    def make_objects(self):
        super().make_objects()
        self.loader = DataLoader(Jittered(), 8, shuffle=True, generator=torch.Generator().manual_seed(4))


@both_loops
def test_resuming_within_an_epoch_restores_the_random_generators_of_the_loader(tmp_path, kind):
    expected = ScriptWithGenerators(kind, tmp_path / "whole", remember).fit()
    script = ScriptWithGenerators(kind, tmp_path / "parts", remember)
    script.loop.max_steps = 13
    script.fit()
    script.loop.max_steps = -1
    assert_equal(script.fit(resume="last"), expected)


def test_a_mini_loop_and_its_loader_are_freed_without_garbage_collection(tmp_path):
    """A loader that only garbage collection frees may wait 5 seconds for each of its workers."""
    net, loop = torch.nn.Linear(8, 3), MiniLoop(accelerator="cpu", max_epochs=2, default_root_dir=tmp_path)
    loader, optimizer = DataLoader(make_data(16), 8), torch.optim.Adam(net.parameters())
    loop.fit(net, loader, optimizer=optimizer, training_step=lambda net, batch: cross_entropy(net(batch[0]), batch[1]))
    references = [weakref.ref(item) for item in (loop, loader, net)]
    gc.collect()
    gc.disable()
    try:
        del loop, loader, net, optimizer
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()
