"""A resume takes what optimizers and schedulers are set to from the file, and says once what the code has otherwise."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from modules import Classifier, make_loader
from runs import fit
from torch.optim.lr_scheduler import LambdaLR, StepLR

TOLD = (
    r"resume: in the code, and otherwise in the run that goes on: {}\. It goes on with what it was; to change that, set it in"
    r" on_train_start \(for group in loop\.optimizers\[0\]\.param_groups: group\['lr'\] = 0\.01\), or write load= in the"
)


def sgd(lr=0.1, **words):
    return lambda module: torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9, **words)


def stepped(lr=0.1, gamma=0.5):
    def make(module):
        optimizer = sgd(lr)(module)
        return [optimizer], [StepLR(optimizer, 1, gamma)]

    return make


def warmed_up(module):
    optimizer = sgd(lr=torch.tensor(0.1))(module)
    return [optimizer], [LambdaLR(optimizer, lambda epoch: (epoch + 1) / 4)]


def run(tmp_path, optimizers, **words):
    return fit(tmp_path, lambda: Classifier(optimizers), lambda: make_loader(8), **words)


@pytest.mark.parametrize(
    ("before", "now", "words", "rate"),
    [
        (sgd(), sgd(lr=0.01), r"SGD\.lr 0\.01 \(was 0\.1\)", 0.1),
        (sgd(), sgd(weight_decay=0.1), r"SGD\.weight_decay 0\.1 \(was 0\)", 0.1),
        (stepped(), stepped(lr=0.2, gamma=0.1), r"SGD\.lr 0\.2 \(was 0\.1\); StepLR\.gamma 0\.1 \(was 0\.5\)", 0.05),
    ],
)
def test_said_once(tmp_path, before, now, words, rate):
    run(tmp_path, before, max_epochs=1)
    with pytest.warns(UserWarning, match=TOLD.format(words)) as caught:
        history = run(tmp_path, now, resume="last", max_epochs=2)[2]
    assert len([warning for warning in caught if "otherwise" in str(warning.message)]) == 1
    assert history["lr"].tolist() == [0.1, rate]
    run(tmp_path, now, resume="last", max_epochs=3)  # the code has not changed since: nothing is said


class Sets(Callback):
    def on_train_start(self, loop, module):
        for group in loop.optimizers[0].param_groups:
            group["lr"] = 0.01


@pytest.mark.parametrize("optimizers", [sgd(), stepped(), warmed_up])
def test_nothing_is_said_of_what_training_changes(tmp_path, optimizers):
    """A schedule, a hook that sets the rate: the code is the same."""
    callbacks = [] if optimizers is warmed_up else [Sets()]
    run(tmp_path, optimizers, max_epochs=1, callbacks=callbacks)
    history = run(tmp_path, optimizers, resume="last", max_epochs=2, callbacks=callbacks)[2]  # a warning is an error
    if callbacks:
        assert history["lr"].tolist() == [0.01, 0.01]
