"""Faults put into the loop on purpose: the parity with Trainer, as the other tests ask for it, must notice each of them."""

import contextlib

import fabric_template.core.train
import fabric_template.process.launch
import pytest
import torch
from fabric_template.core.hooks import Hooks
from fabric_template.core.listeners import Listeners
from fabric_template.core.net import Modes
from fabric_template.core.optimizing import Optimizing
from fabric_template.core.update import AutomaticUpdate
from fabric_template.data.feed import Feed
from fabric_template.record.entries import Entry
from modules import Classifier, assert_parity, make_loader
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR


def by_step(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 3, 0.7), "interval": "step"}}


def by_epoch(module):
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    return [optimizer], [CosineAnnealingLR(optimizer, 4)]


class Hooked(Classifier):
    """Hooks that leave a mark in the weights, so that their order is seen there."""

    def __init__(self):
        super().__init__(by_step)

    def on_before_zero_grad(self, optimizer):
        self.net[0].weight.data += 0.01

    def on_before_backward(self, loss):
        self.net[0].weight.data *= 0.99

    def on_after_backward(self, *args):
        self.net[0].weight.grad *= 0.5

    def on_before_optimizer_step(self, *args):
        self.net[3].weight.grad += self.net[0].weight.grad.mean()


CASES = {
    "plain": (Classifier, {}),
    "accumulated, clipped": (lambda: Classifier(by_step), {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
    "by epoch": (lambda: Classifier(by_epoch), {}),
    "hooked": (Hooked, {}),
}


def parity(case):
    make_module, words = CASES[case]
    val = lambda: make_loader(18, shuffle=False, seed=5)  # noqa: E731  five batches, the last one smaller
    assert_parity(make_module, make_loader, val, max_epochs=3, **words)


@pytest.mark.parametrize("case", CASES)
def test_without_a_mutation_they_are_equal(case):
    parity(case)


# ---- the mutations


def instead(monkeypatch, owner, name, mutated):
    """Put `mutated(original, *args)` in the place of a method."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **words: mutated(original, *args, **words))


def hooks_swapped(one, other):
    names = {one: other, other: one}

    def mutation(monkeypatch):
        instead(monkeypatch, Listeners, "of_module", lambda original, self, name: original(self, names.get(name, name)))

    return mutation


def zero_grad_hook_after_backward(monkeypatch):
    def late(original, self, name, *args):
        if name == "on_before_zero_grad":
            return None
        if name == "on_after_backward":
            original(self, "on_before_zero_grad", None)
        return original(self, name, *args)

    instead(monkeypatch, Hooks, "call", late)


def schedulers_one_step_early(monkeypatch):
    def early(original, self, *args):
        original(self, *args)
        for config in self.schedulers:
            config.scheduler.step()

    instead(monkeypatch, Optimizing, "set_up", early)


def schedulers_by_epoch_at_each_step(monkeypatch):
    def any_interval(original, run, interval, plateau):
        return original(run, "epoch" if interval == "step" else interval, plateau)

    instead(monkeypatch, fabric_template.core.train, "step_schedulers", any_interval)


def batches_weigh_the_same(monkeypatch):
    instead(monkeypatch, Entry, "update", lambda original, self, value, batch_size: original(self, value, 1))


def first_batch_of_an_epoch_not_counted(monkeypatch):
    def first_left_out(original, self, value, batch_size):
        original(self, value, batch_size if self.total is not None else 0)

    instead(monkeypatch, Entry, "update", first_left_out)


def not_clipped(monkeypatch):
    def without(original, self, run):
        original(self, run)
        self.before_step = self.before_step[:-1]

    instead(monkeypatch, AutomaticUpdate, "__init__", without)


def gradients_not_cleared(monkeypatch):
    def without(original, self, run):
        original(self, run)
        self.own_zero = lambda *args: None

    instead(monkeypatch, AutomaticUpdate, "__init__", without)


def window_not_divided(monkeypatch):
    def whole(original, self, run):
        original(self, run)
        backward = self._backward
        self._backward = lambda loss: backward(loss * run.at.window)

    instead(monkeypatch, AutomaticUpdate, "__init__", whole)


def left_in_eval_mode(monkeypatch):
    monkeypatch.setattr(Modes, "restore", lambda self: None)


def sanity_check_leaves_a_trace(monkeypatch):
    monkeypatch.setattr(fabric_template.process.launch, "isolated_rng", contextlib.nullcontext)


def a_random_number_more(monkeypatch):
    def draws(original, self):
        torch.rand(1)
        original(self)

    instead(monkeypatch, Feed, "begin_epoch", draws)


MUTATIONS = [
    (hooks_swapped("on_before_backward", "on_before_zero_grad"), "hooked"),
    (hooks_swapped("on_before_optimizer_step", "on_after_backward"), "hooked"),
    (zero_grad_hook_after_backward, "hooked"),
    (schedulers_one_step_early, "accumulated, clipped"),
    (schedulers_one_step_early, "by epoch"),
    (schedulers_by_epoch_at_each_step, "by epoch"),
    (batches_weigh_the_same, "plain"),
    (first_batch_of_an_epoch_not_counted, "plain"),
    (not_clipped, "accumulated, clipped"),
    (gradients_not_cleared, "plain"),
    (window_not_divided, "accumulated, clipped"),
    (left_in_eval_mode, "plain"),
    (sanity_check_leaves_a_trace, "plain"),
    (a_random_number_more, "plain"),
]


@pytest.mark.parametrize(("mutation", "case"), MUTATIONS, ids=[f"{m.__name__}-{c}" for m, c in MUTATIONS])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_mutation_is_noticed(monkeypatch, mutation, case):
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        parity(case)
