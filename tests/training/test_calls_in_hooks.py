"""Test loops called in a hook, models copied in a hook, and loop.backward after a run."""

import copy
import functools
import pickle
import tempfile

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from modules import Classifier, Gan, make_loader
from parameters import halve, sample
from runs import fit, logs_of, val_loader, with_files
from torch import nn
from torch.utils.data import default_collate as collate

from fabric_template import FabricLoop, MiniLoop


class Calls(Classifier):
    """A module that calls a method of the running loop or of another loop in a hook."""

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


@pytest.mark.parametrize(("hook", "method"), sample(5, HOOKS, METHODS))
def test_a_hook_cannot_call_fit_or_validate_on_the_running_loop(tmp_path, hook, method):
    options = {"val": val_loader, "max_epochs": 1, "num_sanity_val_steps": 0}
    with pytest.raises(ValueError, match=f"^{method}: got a call while fit is running, .* after fit has ended"):
        fit(tmp_path, lambda: Calls(hook, method), **options)
    loop, _, _ = fit(tmp_path, Calls, **options)
    assert loop.validate(Calls(), val_loader(), verbose=False)[0]["val_loss"] > 0


MINI_LOOP_HOOKS = ["on_train_start", "on_train_batch_end", "on_validation_epoch_end", "on_train_end"]


@pytest.mark.parametrize(("method", "hook"), halve(["fit", "validate"], MINI_LOOP_HOOKS))
def test_a_hook_cannot_call_fit_or_validate_on_the_running_mini_loop(tmp_path, hook, method):
    loop = MiniLoop(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path)
    text = f"^{method}: got a call while fit is running, expected a call after fit has ended. In a hook"
    with pytest.raises(ValueError, match=text):
        loop.fit(Calls(hook, method, loop), make_loader(), val_loader())
    with pytest.raises(ValueError, match=f"^{method}: got a call while validate is running"):
        loop.validate(Calls("on_validation_epoch_end", method, loop), val_loader())
    loop.fit(Calls(), make_loader(), val_loader())
    assert loop.validate(Calls(), val_loader())[0]["val_loss"] > 0


@pytest.mark.parametrize("method", ["validate", "test"])
def test_a_hook_may_call_validate_or_test_on_a_second_loop(tmp_path, method):
    """Calling the second loop changes neither the logged values of the first loop nor module.trainer."""
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


class PlainCalls(nn.Module):
    """A plain module that logs values, and calls a function in a hook."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.net = nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("mine", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class OwnLog(Classifier):
    def log(self, name, value, **options):
        super().log(f"own_{name}", value, **options)


def make_run(kind, root, name, **options):
    options |= with_files() if kind is FabricLoop else {"accelerator": "cpu"}
    return kind(**options | {"default_root_dir": root, "name": name})


def train_with(kind, root, module, hook=None, call=None):
    """Train a module that calls a function in a hook. Return the loop, the rows and the weights."""
    if hook is not None:
        setattr(module, hook, lambda *_: call(module))
    loop = make_run(kind, root, "outer", max_epochs=2, accumulate_grad_batches=2)
    loop.fit(module, make_loader(24, shuffle=False), val_loader())
    return loop, logs_of(root, name="outer"), module.state_dict()


def seeded(make_module):
    torch.manual_seed(1)
    return make_module(dropout=0.0)


KINDS = [MiniLoop, FabricLoop]
CALLING_HOOKS = ["on_train_batch_end", "on_train_epoch_end"]


def combine(values):
    """Return combinations of two loops, a module and a value.

    The combinations without the mark `soak` alternate between the values.
    """
    cases = [*halve(KINDS, KINDS, [Classifier, PlainCalls]), pytest.param(FabricLoop, FabricLoop, OwnLog)]
    return [
        pytest.param(*case.values, value, marks=case.marks if number // 2 % 2 == place else [pytest.mark.soak])
        for number, case in enumerate(cases)
        for place, value in enumerate(values)
    ]


@functools.cache
def train_alone(outer, make_module):
    return train_with(outer, tempfile.mkdtemp(), seeded(make_module))[1:]


@pytest.mark.parametrize(("outer", "inner", "make_module", "hook"), combine(CALLING_HOOKS))
def test_calling_validate_on_a_second_loop_does_not_change_the_first_run(tmp_path, outer, inner, make_module, hook):
    found, by_hand, shifted = [], [], make_loader(18, shuffle=False, seed=7)
    shifted.dataset.tensors[0].add_(3.0)

    def validate(module):
        x, y = shifted.dataset.tensors
        by_hand.append(nn.functional.cross_entropy(module.net(x), y).item())
        results = make_run(inner, tmp_path, "inner").validate(module, shifted)[0]
        found.append(results["own_val_loss" if make_module is OwnLog else "val_loss"])

    rows, weights = train_alone(outer, make_module)
    module = seeded(make_module)
    loop, other_rows, other_weights = train_with(outer, tmp_path, module, hook, validate)
    assert rows == other_rows
    assert all(map(torch.equal, weights.values(), other_weights.values()))
    assert found == pytest.approx(by_hand)
    assert found
    assert getattr(module, "trainer", loop) is loop
    assert not {"log", "log_dict", "optimizers", "lr_schedulers"} & {*vars(module)}


@pytest.mark.parametrize(("inner", "hook"), halve(KINDS, CALLING_HOOKS))
def test_validating_with_a_loop_inside_a_trainer_hook_does_not_change_the_trainer_run(tmp_path, inner, hook):
    def train(call):
        module = seeded(Classifier)
        setattr(module, hook, lambda *_: call(module))
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(accelerator="cpu", max_epochs=2, enable_model_summary=False, **quiet)
        trainer.fit(module, make_loader(24, shuffle=False), val_loader())
        assert module.trainer is trainer
        assert "log" not in vars(module)
        return trainer.callback_metrics, module

    loop = make_run(inner, tmp_path, "inner")
    expected, other = train(lambda module: None)
    found, module = train(lambda module: loop.validate(module, val_loader()))
    assert found == expected
    assert all(map(torch.equal, module.parameters(), other.parameters()))
    # Once Trainer has finished, loop.validate() sets module.trainer to the loop.
    loop.validate(module, val_loader())
    assert module.trainer is loop


@pytest.mark.parametrize(("outer", "inner", "make_module", "is_in_hook"), combine([True, False]))
def test_a_model_copied_in_a_hook_can_be_trained_by_another_loop(tmp_path, outer, inner, make_module, is_in_hook):
    class Trained(make_module):
        def on_train_start(self):
            if hasattr(self, "lr_schedulers"):
                # self.optimizers() must return the optimizer of the loop that trains this copy.
                assert self.optimizers().param_groups[0]["params"][0] is next(self.parameters())

    copies = []

    def train_copy():
        copied = copies[-1]
        vars(copied).pop("on_validation_epoch_end", None)
        make_run(inner, tmp_path, "inner", max_epochs=1).fit(copied, make_loader(), val_loader())
        name = "mine" if make_module is PlainCalls else "own_train_loss" if make_module is OwnLog else "train_loss"
        header = logs_of(tmp_path, name="inner", version=len(copies) - 1)[0].partition("\n")[0]
        assert name in header.split(",")

    def copy_module(module):
        copies.append(copy.deepcopy(module))
        if is_in_hook:
            train_copy()

    rows, weights = train_alone(outer, make_module)
    module = seeded(Trained)
    _, other_rows, other_weights = train_with(outer, tmp_path, module, "on_validation_epoch_end", copy_module)
    if not is_in_hook:
        del copies[1:]
        train_copy()
    assert rows == other_rows
    assert all(map(torch.equal, weights.values(), other_weights.values()))


@pytest.mark.parametrize("kind", KINDS)
def test_log_raises_an_error_outside_of_fit_and_validate(tmp_path, kind):
    loop = make_run(kind, tmp_path, "run", max_epochs=1)
    text = (
        r"`self.log\(\)` outside of the loop's hooks|log: got 'mine' outside of the model's steps and hooks, expected"
    )
    with pytest.raises((ValueError, RuntimeError), match=f"FabricLoop.log: the loop has not run yet|{text}"):
        loop.log("mine", 1.0)
    loop.fit(Classifier(), make_loader(), val_loader())
    with pytest.raises(ValueError, match=text):
        loop.log("mine", 1.0)
    loop.validate(Classifier(), val_loader())
    with pytest.raises(ValueError, match=text):
        loop.log("mine", 1.0, on_epoch=True)


@pytest.mark.parametrize("hook", ["on_train_end", "configure_optimizers"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_raises_an_error_in_on_train_end_and_configure_optimizers(tmp_path, kind, hook):
    module = PlainCalls()
    setattr(module, hook, lambda: module.log("mine", 1.0))
    with pytest.raises(ValueError, match=f"inside `{hook}`|log: got 'mine' (in {hook}|outside of)"):
        make_run(kind, tmp_path, "run", max_epochs=1).fit(module, make_loader())


class SavesItself(PlainCalls):
    path = None

    def on_train_batch_end(self, *_):
        torch.save(self, self.path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_can_be_pickled_during_and_after_fit(tmp_path, monkeypatch, kind):
    """A pickled loop contains its options and results, but no model, loaders or open files."""
    monkeypatch.setattr(SavesItself, "path", tmp_path / "model.pt")
    module, step = SavesItself(), lambda model, batch: nn.functional.cross_entropy(model.net(batch[0]), batch[1])
    module.loop = loop = make_run(kind, tmp_path, "run", max_epochs=2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    options = {"training_step": step, "optimizer": optimizer}
    options["scheduler"] = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    loop.fit(module, make_loader(generator=torch.Generator(), collate_fn=lambda rows: collate(rows)), **options)
    loop.validate(module, val_loader(), validation_step=step)
    torch.save(module, tmp_path / "after.pt")
    for path in (tmp_path / "model.pt", tmp_path / "after.pt"):
        restored = torch.load(path, weights_only=False)
        other = restored.loop
        assert vars(restored.net).keys() == vars(module.net).keys()
        assert getattr(other, "model", None) is None
        assert other.validate(restored, val_loader())[0].keys() >= {"val_loss"}
        other.fit(restored, make_loader(), optimizer=torch.optim.SGD(restored.parameters(), lr=0.1))
        assert (other.current_epoch, loop.current_epoch) == (2, 2)
        assert other.checkpoint_dir.parent == loop.checkpoint_dir.parent
    assert other.checkpoint_dir != loop.checkpoint_dir


class OwnMiniLoop(MiniLoop):
    def __post_init__(self):
        super().__post_init__()
        self.decay = 0.9


class OwnFabricLoop(FabricLoop):
    def __init__(self, **options):
        super().__init__(**options)
        self.decay = 0.9


@pytest.mark.parametrize("kind", [OwnMiniLoop, OwnFabricLoop])
def test_a_pickled_loop_keeps_attributes_added_by_a_subclass_or_the_user(tmp_path, kind):
    loop = kind(accelerator="cpu", default_root_dir=tmp_path)
    loop.note = "text"
    other = pickle.loads(pickle.dumps(loop))
    assert (other.decay, other.note) == (0.9, "text")


@pytest.mark.parametrize("make", [Gan, Classifier])
def test_loop_backward_after_fit_does_not_call_the_hooks_of_the_trained_module(tmp_path, make):
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


def test_fit_can_be_called_again_after_ctrl_c_interrupts_the_clean_up(tmp_path):
    """For example, a second Ctrl-C may interrupt the clean-up after an error."""

    class Interrupts:
        def on_exception(self, loop, module, error):
            raise KeyboardInterrupt

    loop = FabricLoop(**with_files(tmp_path, max_epochs=1, callbacks=[Interrupts()]))
    with pytest.raises(KeyboardInterrupt):
        loop.fit(Calls("on_train_epoch_end", "no_such_method"), make_loader())
    loop.fit(Calls(), make_loader())
    assert loop.global_step == 10


@pytest.mark.parametrize("kind", KINDS)
def test_fit_accepts_a_loader_created_within_fabric_launch(tmp_path, kind):
    """fabric.launch() stores the loader's arguments, such as its generator, in the loader."""

    def make(fabric):
        return make_loader(generator=torch.Generator(), num_workers=0)

    loader = Fabric(accelerator="cpu").launch(make)
    assert any(name.startswith("__pl_") for name in vars(loader))
    module = PlainCalls()
    step = {"training_step": lambda model, batch: nn.functional.cross_entropy(model.net(batch[0]), batch[1])}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    make_run(kind, tmp_path, "run", max_epochs=1).fit(module, loader, optimizer=optimizer, **step)
