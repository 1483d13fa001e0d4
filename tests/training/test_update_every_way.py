"""What someone writes into a part of the update in their copy runs at every step, whichever way a run takes through it."""

import pytest
import torch
from fabric_template.core.update import AutomaticUpdate
from fabric_template.trainer.manual import ManualUpdate
from lightning.pytorch.callbacks import Callback
from modules import Classifier, Gan, by_step, make_loader, quiet, run_loop
from torch.optim.lr_scheduler import StepLR

from fabric_template import FabricLoop, MiniLoop


class Own(Classifier):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)


class OwnBackward(Classifier):
    def backward(self, loss):
        loss.backward()


class Listens(Callback):
    def on_after_backward(self, trainer, module):
        pass


class Foreign(torch.optim.SGD):
    """An optimizer that is not torch's own."""


class Bare(torch.optim.SGD):
    """Takes no closure, as torch's PostLocalSGDOptimizer."""

    def step(self):
        super().step()


WAYS = {
    "plain": (Classifier, {}),
    "clips": (Classifier, {"gradient_clip_val": 0.1}),
    "listens": (Classifier, {"callbacks": [Listens()]}),
    "mixed": (Classifier, {"precision": "bf16-mixed"}),
    "accumulates": (Classifier, {"accumulate_grad_batches": 3}),
    "steps": (Own, {}),
    "backward": (OwnBackward, {}),
    "foreign": (lambda: Classifier(lambda module: Foreign(module.parameters(), lr=0.1)), {}),
    "bare": (lambda: Classifier(lambda module: Bare(module.parameters(), lr=0.1)), {}),
    "bare, by its own": (lambda: Own(lambda module: Bare(module.parameters(), lr=0.1)), {}),
    "closure": (lambda: Classifier(lambda module: torch.optim.LBFGS(module.parameters(), max_iter=1)), {}),
    "manual": (lambda: Gan(every=1), {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_whatever_stands_there_runs(monkeypatch, way):
    make, words = WAYS[way]
    seen = {"before_step": 0, "backward": 0}

    def noted(name):
        seen[name] += 1

    for kind in (AutomaticUpdate, ManualUpdate):

        def prepared(self, original=kind.preparations):
            yield from original(self)
            yield lambda optimizer: noted("before_step")

        def backward(self, *args, original=kind.backward, kind=kind, **words):
            if kind is type(self):
                noted("backward")
            return original(self, *args, **words)

        monkeypatch.setattr(kind, "preparations", prepared)
        monkeypatch.setattr(kind, "backward", backward)
    loop, _ = run_loop(make, lambda: make_loader(20), max_epochs=2, **words)
    assert loop.global_step > 0
    assert seen == {"before_step": loop.global_step, "backward": 10 if way != "manual" else loop.global_step}


def bare_by_step(module):
    optimizer = Bare(module.parameters(), lr=0.1, momentum=0.9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 3, 0.7), "interval": "step"}}


@pytest.mark.parametrize("kind", [FabricLoop, MiniLoop])
def test_an_optimizer_that_takes_no_closure(kind, tmp_path, monkeypatch):
    """It steps behind the backward, with the weights of one that takes it; a schedule wraps its step."""
    monkeypatch.chdir(tmp_path)
    ends = []
    for make in (by_step, bare_by_step):
        torch.manual_seed(1)
        module = Classifier(make)
        words = quiet() if kind is FabricLoop else {"accelerator": "cpu"}
        kind(**words, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.1).fit(module, make_loader(20))
        ends.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    assert torch.equal(*ends)
