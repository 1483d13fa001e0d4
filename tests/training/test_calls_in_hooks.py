"""Test calls to a loop in a hook, and calls to loop.backward after a run."""

import pytest
import torch
from modules import Classifier, Gan, make_loader
from parameters import sample
from runs import fit, logs_of, val_loader, with_files
from torch import nn

from fabric_template import FabricLoop, MiniLoop


class Calls(Classifier):
    """Calls a method of the running loop or of another loop in a hook."""

    def __init__(self, hook=None, method=None, loop=None):
        super().__init__(dropout=0.0)
        self.other, self.method, self.results = loop, method, []
        if hook is not None:
            setattr(self, hook, self.call)

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def call(self, *_):
        loop = self.other or self.trainer
        is_quiet = self.method in ("validate", "test") and isinstance(loop, FabricLoop)
        given = {"verbose": False} if is_quiet else {}
        self.results.append(getattr(loop, self.method)(self, val_loader(), **given))


HOOKS = ["on_fit_start", "on_train_batch_end", "on_validation_epoch_end", "on_train_end"]
METHODS = ["fit", "validate", "test", "predict"]


@pytest.mark.parametrize(("hook", "method"), sample(3, HOOKS, METHODS))
def test_a_hook_cannot_call_fit_or_validate_on_the_running_loop(tmp_path, hook, method):
    options = {"val": val_loader, "max_epochs": 1, "num_sanity_val_steps": 0}
    with pytest.raises(ValueError, match=f"^{method}: got a call while fit is running, expected a call after fit"):
        fit(tmp_path, lambda: Calls(hook, method), **options)
    loop, _, _ = fit(tmp_path, Calls, **options)
    assert loop.validate(Calls(), val_loader(), verbose=False)[0]["val_loss"] > 0


@pytest.mark.parametrize("method", ["fit", "validate"])
@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_end", "on_validation_epoch_end", "on_train_end"])
def test_a_hook_cannot_call_fit_or_validate_on_the_running_mini_loop(tmp_path, hook, method):
    loop = MiniLoop(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path)
    text = f"^{method}: got a call while fit is running, expected a call after fit. In a hook, use another loop: Mini"
    with pytest.raises(ValueError, match=text):
        loop.fit(Calls(hook, method, loop), make_loader(), val_loader())
    with pytest.raises(ValueError, match=f"^{method}: got a call while validate is running"):
        loop.validate(Calls("on_validation_epoch_end", method, loop), val_loader())
    loop.fit(Calls(), make_loader(), val_loader())
    assert loop.validate(Calls(), val_loader())[0]["val_loss"] > 0


@pytest.mark.parametrize("method", ["validate", "test"])
def test_a_hook_may_call_validate_or_test_on_a_second_loop(tmp_path, method):
    """The outer run logs the same values, and its module keeps its trainer."""
    train = lambda: make_loader(24, shuffle=False)  # noqa: E731
    options = {"train": train, "val": val_loader, "max_epochs": 2, "log_every_n_steps": 1}
    expected = fit(tmp_path / "alone", Calls, **options)
    other = FabricLoop(**with_files(tmp_path, logger=False, enable_checkpointing=False))
    found = fit(tmp_path / "outer", lambda: Calls("on_train_epoch_end", method, other), **options)
    assert logs_of(tmp_path / "alone") == logs_of(tmp_path / "outer")
    assert all(map(torch.equal, expected[1].parameters(), found[1].parameters()))
    assert found[1].trainer is found[0]
    assert "log" not in vars(found[1])
    values = [row[0]["val_loss"] for row in found[1].results]
    assert values == expected[2]["val_loss"].tolist()


@pytest.mark.parametrize("make", [Gan, Classifier])
def test_loop_backward_after_fit_does_not_call_the_hooks_of_the_fitted_module(tmp_path, make):
    called = []

    class Counts(make):
        def on_before_backward(self, loss):
            called.append("before")

        def on_after_backward(self):
            called.append("after")

    loop = FabricLoop(**with_files(tmp_path, max_epochs=1))
    train = make_loader() if make is Classifier else torch.utils.data.DataLoader([(torch.ones(8),)] * 4, batch_size=2)
    loop.fit(Counts(), train)
    count = len(called)
    assert count > 0
    net = nn.Linear(2, 1)
    loop.backward(net(torch.ones(1, 2)).sum())
    assert net.weight.grad.tolist() == [[1.0, 1.0]]
    assert len(called) == count


def test_fit_works_again_after_ctrl_c_interrupted_the_clean_up(tmp_path):
    """A second Ctrl-C, for example, may interrupt the clean-up after an error."""

    class Interrupts:
        def on_exception(self, loop, module, error):
            raise KeyboardInterrupt

    loop = FabricLoop(**with_files(tmp_path, max_epochs=1, callbacks=[Interrupts()]))
    with pytest.raises(KeyboardInterrupt):
        loop.fit(Calls("on_train_epoch_end", "no_such_method"), make_loader())
    loop.fit(Calls(), make_loader())
    assert loop.global_step == 10
