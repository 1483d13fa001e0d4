"""What someone writes into a part of the update in their copy runs at every step, whichever way a run takes through it."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from modules import Classifier, Gan, make_loader, run_loop

from fabric_template.core.update import AutomaticUpdate
from fabric_template.trainer.manual import ManualUpdate


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


WAYS = {
    "plain": (Classifier, {}),
    "clips": (Classifier, {"gradient_clip_val": 0.1}),
    "listens": (Classifier, {"callbacks": [Listens()]}),
    "mixed": (Classifier, {"precision": "bf16-mixed"}),
    "accumulates": (Classifier, {"accumulate_grad_batches": 3}),
    "steps": (Own, {}),
    "backward": (OwnBackward, {}),
    "foreign": (lambda: Classifier(lambda module: Foreign(module.parameters(), lr=0.1)), {}),
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
