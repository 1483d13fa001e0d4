"""Test exact resume of modules whose gradients remain after an optimizer step."""

import pytest
import torch
from modules import Classifier, Gan, make_loader
from parameters import halve
from runs import Snapshots, assert_same_end, fit, logs_of
from torch.nn.functional import cross_entropy


def loader():
    return make_loader(20)


class KeepsGradients(Classifier):
    """A model that clears gradients only in every second batch, so that a step also uses older gradients."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss)
        self.optimizers().step()
        if batch_idx % 2:
            self.optimizers().zero_grad()
        return loss


class DecaysGradients(Classifier):
    """A model that halves the gradients after a step instead of clearing them."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class ClipsAll(Classifier):
    """A model that clips by the norm of all gradients, even those of parameters without an optimizer."""

    def __init__(self):
        super().__init__()
        self.extra = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return super().forward(x) * self.extra

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)


MODULES = {
    "clips all": ClipsAll,
    "toggled": lambda: Gan(True),
    "plain": lambda: Gan(False),
    "keeps gradients": KeepsGradients,
    "decays gradients": DecaysGradients,
}


@pytest.mark.parametrize(("name", "every", "times"), halve(MODULES, [1, 3], ["early", "late"]))
def test_a_run_resumes_exactly_even_if_gradients_are_not_cleared_after_a_step(tmp_path, name, every, times):
    kills = (every, 6) if times == "early" else (4, 9)
    options = {"max_epochs": 2, "log_every_n_steps": 2, "save_every_n_steps": every}
    whole_root, copies = tmp_path / "whole", tmp_path / "killed"
    make = MODULES[name]
    whole = fit(whole_root, make, loader, callbacks=[Snapshots(whole_root, copies, kills)], **options)
    for batches in kills:
        root = copies / str(batches)
        assert_same_end(whole, fit(root, make, loader, seed=99, resume="last", **options))
        assert logs_of(root) == logs_of(whole_root), f"killed before batch {batches}"
