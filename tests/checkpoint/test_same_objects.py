"""Test several calls to fit in one process, with the same objects and with new ones, in both loops."""

import csv
import gc
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
from killed_model import KilledError
from modules import make_data
from parameters import once
from runs import TIMES
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from fabric_template import FabricLoop, MiniLoop

LOOPS = [MiniLoop, FabricLoop]
both_loops = pytest.mark.parametrize("kind", LOOPS)


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


class Tracker:
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(8, 3), torch.nn.Dropout(0.3)
        self.register_buffer("temperature", torch.ones(1), persistent=False)
        self.scale, self.history, self.memory, self.offset = 1.0, [], None, 0.5
        self.space = SimpleNamespace(item=0.0)

    def forward(self, x):
        scale = self.scale + 0.1 * len(self.history) + getattr(self, "offset", 0.0)
        return self.layer(self.dropout(x)) * scale * self.temperature


class Script:
    """A script that calls fit several times with the same model, optimizer and loader.

    Args:
        change: A function of the script that a hook calls once per epoch.
        first: The first epoch in which the hook calls ``change``.
        last: The last epoch in which the hook calls ``change``.
    """

    def __init__(self, kind, root, change, first=2, last=9):
        torch.manual_seed(0)
        self.kind, self.root, self.change = kind, root, change
        self.epochs, self.kill_at, self.error = range(first, last + 1), None, KilledError
        # Change accumulate_grad_batches before the first batch,
        # because MiniLoop refuses it within an accumulation window.
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
            raise self.error
        return cross_entropy(net(x), y)

    def on_train_batch_start(self, batch, batch_idx):
        if self.loop.current_epoch in self.epochs and batch_idx == self.batch:
            self.change(self)

    def fit(self, resume=None, kill_at=None):
        self.kill_at, self.net.on_train_batch_start = kill_at, self.on_train_batch_start
        try:
            self.loop.fit(
                self.net, self.loader, optimizer=self.optimizer, training_step=self.training_step, resume=resume
            )
        except self.error:
            assert kill_at is not None
        del self.net.on_train_batch_start
        return [value.clone() for value in self.net.state_dict().values()]

    def rows(self):
        (path,) = (self.root / "logs").rglob("metrics.csv")
        rows = csv.DictReader(path.read_text().splitlines())
        return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


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


def track(script):
    script.net.memory = script.net.memory or Tracker()
    script.net.memory.count += 1
    script.net.scale = 1.0 + script.net.memory.count / 10


def delete(script):
    vars(script.net).pop("offset", None)


def set_best_to_none(script):
    script.net.best = None
    script.net.scale += 1.0


def scale_namespace(script):
    script.net.space.item += 1.0
    script.net.scale = script.net.space.item


CHANGES = [freeze, scale, count, heat, stop_dropout, add_noise, decay, accumulate, remember]
CHANGES += [track, delete, set_best_to_none, scale_namespace]


def assert_equal(weights, expected):
    assert all(map(torch.equal, weights, expected))


@pytest.mark.parametrize(("kind", "change"), once(LOOPS, CHANGES))
def test_raising_max_epochs_and_resuming_with_the_same_objects_matches_an_uninterrupted_run(tmp_path, kind, change):
    whole = Script(kind, tmp_path / "whole", change, first=1)
    expected = whole.fit()
    script = Script(kind, tmp_path / "parts", change, first=1)
    for epochs, resume in ((2, None), (3, "last"), (4, "last")):
        script.loop.max_epochs = epochs
        weights = script.fit(resume)
    assert_equal(weights, expected)
    assert script.rows() == whole.rows()


@pytest.mark.parametrize(("kind", "change", "error"), once(LOOPS, CHANGES, [KilledError, KeyboardInterrupt]))
def test_a_run_stopped_by_an_error_resumes_exactly_with_new_objects_in_the_same_process(tmp_path, kind, change, error):
    expected = Script(kind, tmp_path / "whole", change).fit()
    script = Script(kind, tmp_path / "killed", change)
    script.error = error
    script.fit(kill_at=(2, 3))
    script.make_objects()
    assert_equal(script.fit(resume="last"), expected)


@pytest.mark.parametrize("change", CHANGES)
def test_checkpoints_of_a_resumed_fit_contain_the_changes_that_the_first_fit_made(tmp_path, change):
    expected = Script(FabricLoop, tmp_path / "whole", change, first=0, last=0).fit()
    script, resume = Script(FabricLoop, tmp_path / "parts", change, first=0, last=0), None
    for epochs in (1, 2, 3):
        script.loop.max_epochs = epochs
        script.fit(resume)
        resume = "last"
    script.make_objects()
    assert_equal(script.fit(resume), expected)


@both_loops
def test_checkpoints_of_a_second_fit_contain_an_attribute_that_only_the_first_fit_changed(tmp_path, kind):
    script = Script(kind, tmp_path, scale, first=0)
    script.loop.max_epochs = 1
    script.fit()
    script.change, script.loop.max_epochs = lambda script: None, 2
    script.fit(resume="last")
    script.make_objects()
    script.loop.max_epochs = 3
    script.fit(resume="last")
    assert script.net.scale == 2.0


@both_loops
def test_a_new_loop_with_the_same_model_and_loader_continues_exactly_where_the_old_loop_stopped(tmp_path, kind):
    expected = Script(kind, tmp_path / "whole", scale).fit()
    script = Script(kind, tmp_path / "parts", scale)
    script.loop.max_epochs = 3
    script.fit()
    script.loop = script.make_loop()
    assert_equal(script.fit(resume="last"), expected)


@both_loops
def test_resume_keeps_attributes_that_the_checkpoint_does_not_contain(tmp_path, kind):
    script = Script(kind, tmp_path, scale, first=3)
    script.loop.max_epochs = 2
    script.fit()
    script.net.scale, script.net.memory = 7.0, Buffer()
    memory, script.loop.max_epochs = script.net.memory, 4
    script.fit(resume="last")
    assert script.net.scale == 8.0
    assert script.net.memory is memory


@both_loops
def test_a_new_run_keeps_model_attributes_changed_by_the_previous_run(tmp_path, kind):
    script = Script(kind, tmp_path, scale)
    script.fit(kill_at=(2, 3))
    script.fit(kill_at=(0, 0))
    assert script.net.scale == 2.0


@both_loops
def test_resuming_keeps_loop_options_that_were_set_after_the_first_call_to_fit(tmp_path, kind):
    script = Script(kind, tmp_path, scale)
    script.loop.max_epochs = 2
    script.fit()
    script.loop.max_epochs = 3
    script.fit()
    script.fit(tmp_path / "checkpoints" / "run" / "version_0" / "last.ckpt")
    assert (script.loop.max_epochs, script.loop.current_epoch) == (3, 3)


def test_an_option_that_a_hook_has_changed_keeps_its_value_until_the_script_changes_it(tmp_path):
    script = Script(FabricLoop, tmp_path, accumulate, first=0, last=0)
    script.loop.max_epochs = 1
    script.fit()
    script.loop.max_epochs = 2
    script.fit(resume="last")
    assert script.loop.accumulate_grad_batches == 2
    script.loop.max_epochs, script.loop.accumulate_grad_batches = 3, 4
    script.fit(resume="last")
    assert script.loop.accumulate_grad_batches == 4
    script.change = lambda script: None
    script.fit()
    assert script.loop.accumulate_grad_batches == 4


@both_loops
def test_a_refused_resume_changes_neither_model_attributes_nor_requires_grad(tmp_path, kind):
    def change(script):
        script.net.scale = 5.0
        script.net.memory = script.net.memory or Buffer()
        script.net.history.append(1)
        freeze(script)

    script = Script(kind, tmp_path, change, first=0, last=0)
    script.fit(kill_at=(2, 3))
    memory, history, script.optimizer = script.net.memory, script.net.history, Decaying([script.net.layer.weight])
    script.net.scale, script.net.layer.bias.requires_grad = 6.0, True
    with pytest.raises(ValueError, match="parameters in each optimizer group|parameter group"):
        script.fit(resume="last")
    assert script.net.scale == 6.0
    assert script.net.memory is memory
    assert script.net.history is history
    assert history == [1]
    assert script.net.layer.bias.requires_grad


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
def test_resuming_mid_epoch_restores_the_random_generators_of_the_loader(tmp_path, kind):
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


class CountingSampler(torch.utils.data.Sampler):
    """A sampler whose __iter__ method counts the epochs, on which the order depends."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 40

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        return iter(torch.randperm(40, generator=generator).tolist())


@both_loops
def test_a_run_interrupted_in_its_first_epoch_resumes_exactly_with_the_same_sampler(tmp_path, kind):
    def train(name, fail_at, parts, **arguments):
        steps = []

        def training_step(net, batch):
            steps.append(1)
            if len(steps) == fail_at:
                raise KilledError
            return cross_entropy(net(batch[0]), batch[1])

        options = {"enable_progress_bar": False, "enable_model_summary": False} if kind is FabricLoop else {}
        options |= {"validate_every_n_steps": 2, "default_root_dir": tmp_path / name, "accelerator": "cpu"}
        net, optimizer, loader = parts
        val = DataLoader(make_data(8), batch_size=4)
        steps_of_loop = {"training_step": training_step, "validation_step": lambda net, batch: net(batch[0]).mean()}
        kind(max_epochs=3, **options).fit(net, loader, val, optimizer=optimizer, **steps_of_loop, **arguments)

    def make_parts():
        torch.manual_seed(1)
        net = torch.nn.Linear(8, 3)
        loader = DataLoader(make_data(40), batch_size=4, sampler=CountingSampler())
        return net, torch.optim.Adam(net.parameters(), lr=0.1), loader

    whole, parts = make_parts(), make_parts()
    train("whole", None, whole)
    with pytest.raises(KilledError):
        train("run", 6, parts)
    train("run", None, parts, resume="last")
    assert parts[2].sampler.epoch == whole[2].sampler.epoch
    assert all(map(torch.equal, parts[0].parameters(), whole[0].parameters()))
