"""Test that compare finds no difference in a correctly ported loop, and explains each mistake."""

import re

import pytest
import torch
from interpreter import forking_python
from modules import Classifier, make_data
from parameters import keep
from runs import with_files
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from fabric_template import FabricLoop, MiniLoop, compare
from fabric_template.tools.cli import main
from fabric_template.tools.compare import record_training


class Script:
    """A hand-written training loop, and the same training with fit. Subclasses change both."""

    epochs, accumulate, clip, interval, precision, batch_size = 2, 1, None, "epoch", None, 8

    def net(self):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def optimizer(self, net):
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def scheduler(self, optimizer):
        return None

    def loader(self):
        return DataLoader(make_data(), self.batch_size, shuffle=True)

    def loss(self, net, batch):
        return cross_entropy(net(batch[0]), batch[1])

    def make(self):
        torch.manual_seed(0)
        net = self.net()
        optimizer = self.optimizer(net)
        return net, optimizer, self.scheduler(optimizer), self.loader(), DataLoader(make_data(16, seed=1), 8)

    def by_hand(self):
        net, optimizer, scheduler, train, val = self.make()
        for epoch in range(self.epochs):
            self.start_epoch(net, epoch)
            for i, batch in enumerate(train):
                self.train_on(i, batch, net, optimizer, is_last=i + 1 == len(train))
                if scheduler is not None and self.interval == "step":
                    scheduler.step()
            self.validate(net, val)
            if scheduler is not None and self.interval == "epoch":
                scheduler.step()

    def start_epoch(self, net, epoch):
        net.train()

    def validate(self, net, val):
        net.eval()
        with torch.no_grad():
            sum(self.loss(net, batch) for batch in val)

    def train_on(self, i, batch, net, optimizer, is_last):
        (self.loss(net, batch) / self.accumulate).backward()
        if (i + 1) % self.accumulate == 0 or is_last:
            if self.clip:
                nn.utils.clip_grad_norm_(net.parameters(), self.clip)
            optimizer.step()
            optimizer.zero_grad()

    def with_fit(self, root, kind=FabricLoop, **changed):
        net, optimizer, scheduler, train, val = self.make()
        if scheduler is not None:
            optimizer = {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}
        options = {
            "accumulate_grad_batches": self.accumulate,
            "gradient_clip_val": self.clip,
            "precision": self.precision,
        }
        options = {name: value for name, value in (options | changed).items() if value is not None}
        if kind is MiniLoop:
            loop = MiniLoop(max_epochs=self.epochs, accelerator="cpu", default_root_dir=str(root), **options)
        else:
            loop = FabricLoop(**with_files(root, max_epochs=self.epochs, **options))
        loop.fit(net, train, val, optimizer=optimizer, training_step=self.loss, validation_step=self.loss)


def change(kind, **attributes):
    return type(kind.__name__, (kind,), attributes)


# An epoch has five batches, so with accumulate=3, its last optimizer step uses only two batches.
Accumulating = change(Script, accumulate=3)
Clipping = change(Script, clip=0.1)


class ScheduledByStep(Script):
    interval = "step"

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)


class Reordered(Script):
    """A script that passes fit an optimizer whose parameters are in a different order."""

    def with_fit(self, *args):
        self.optimizer = lambda net: torch.optim.SGD([*net.parameters()][::-1], lr=0.1, momentum=0.9)
        super().with_fit(*args)


class TwoGroups(Script):
    def optimizer(self, net):
        groups = [{"params": net[0].parameters(), "lr": 0.01}, {"params": net[2].parameters(), "weight_decay": 0.1}]
        return torch.optim.AdamW(groups, lr=0.1)


class Dropping(Script):
    def net(self):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


class Normed(Script):
    def net(self):
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


class HalfPrecision(Script):
    precision = "bf16-mixed"

    def train_on(self, i, batch, net, optimizer, is_last):
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(net, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Careless(Normed):
    """A script that validates with gradients, reads the loss after each step, and calls net.forward."""

    def train_on(self, i, batch, net, optimizer, is_last):
        super().train_on(i, batch, net, optimizer, is_last)
        net.eval()
        self.loss(net, batch).item()
        net.train()

    def validate(self, net, val):
        net.eval()
        sum(self.loss(net, batch).item() for batch in val)

    def loss(self, net, batch):
        return cross_entropy(net.forward(batch[0]), batch[1])


KINDS = [Script, Accumulating, Clipping, ScheduledByStep, TwoGroups, Dropping, Normed]
KINDS += [HalfPrecision, Careless, Reordered]
ADOPTIONS = [(kind, FabricLoop) for kind in KINDS]
ADOPTIONS += [(kind, MiniLoop) for kind in (Script, Accumulating, Clipping, ScheduledByStep, Normed, Careless)]


@pytest.mark.parametrize(("kind", "loop"), ADOPTIONS)
def test_compare_finds_no_difference_after_a_correct_port_of_a_training_loop(tmp_path, kind, loop):
    result = compare(kind().by_hand, lambda: kind().with_fit(tmp_path, loop))
    steps = 4 if kind is Accumulating else 10
    assert str(result) == f"equal    no difference in {steps} steps"


def test_compare_finds_no_difference_after_wrapping_a_network_in_a_lightning_module(tmp_path):
    def with_module():
        module = Classifier(lambda module: optimizer)
        module.net, optimizer, _, train, _ = Dropping().make()
        module.criterion = nn.CrossEntropyLoss()
        FabricLoop(**with_files(tmp_path, max_epochs=Script.epochs)).fit(module, train)

    script = Dropping()
    script.validate = lambda net, val: None
    assert compare(script.by_hand, with_module).is_equal


# Mistakes in a script that compare must explain


class InEvalMode(Dropping):
    def start_epoch(self, net, epoch):
        net.eval()


class NeverCleared(Script):
    def train_on(self, i, batch, net, optimizer, is_last):
        self.loss(net, batch).backward()
        optimizer.step()


class FrozenLater(Script):
    batches = 0

    def loss(self, net, batch):
        self.batches += net.training
        if self.batches == 8:
            net[0].requires_grad_(False)
            net[0].zero_grad()
        return super().loss(net, batch)


class NormedAndRounded(Normed):
    def train_on(self, i, batch, net, optimizer, is_last):
        self.loss(net, batch).backward()
        # The gradient of the bias before BatchNorm has about this size, but should be zero.
        net[0].bias.grad += 1e-8
        optimizer.step()
        optimizer.zero_grad()


class RoundedUp(Clipping):
    def train_on(self, i, batch, net, optimizer, is_last):
        self.loss(net, batch).backward()
        nn.utils.clip_grad_norm_(net.parameters(), self.clip)
        # Change the last bit of each number, as adding in a different order would.
        for parameter in net.parameters():
            parameter.grad = parameter.grad.nextafter(torch.tensor(torch.inf))
        optimizer.step()
        optimizer.zero_grad()


class Drawing(Dropping):
    def train_on(self, i, batch, net, optimizer, is_last):
        super().train_on(i, batch, net, optimizer, is_last)
        if i == 2:
            torch.randn(1)


def third_of_loss(self, net, batch):
    return cross_entropy(net(batch[0]), batch[1]) / (3 if net.training else 1)


def loader_in_order(self):
    return DataLoader(make_data(), 8)


def sgd(self, net):
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def adamw(self, net):
    return torch.optim.AdamW(net.parameters(), lr=0.1)


DividedTwice = change(Accumulating, loss=third_of_loss)
Slower, WithAdamW, OneGroup = (
    change(kind, optimizer=new) for kind, new in ((Script, sgd), (Script, adamw), (TwoGroups, adamw))
)
ByEpoch = change(ScheduledByStep, interval="epoch")
InOrder = change(Script, loader=loader_in_order)


class ValidatedInTrainMode(Normed):
    def validate(self, net, val):
        with torch.no_grad():
            sum(self.loss(net, batch) for batch in val)


class InDouble(Script):
    def net(self):
        return super().net().double()

    def loss(self, net, batch):
        return super().loss(net, (batch[0].double(), batch[1]))


class ClearedAtTheEnd(Script):
    """A script that clears the optimizer's momentum before the last step."""

    def train_on(self, i, batch, net, optimizer, is_last):
        self.batches = getattr(self, "batches", 0) + 1
        if self.batches == 10:
            optimizer.state.clear()
        super().train_on(i, batch, net, optimizer, is_last)


class ChangedAtTheEnd(Script):
    def validate(self, net, val):
        super().validate(net, val)
        self.epochs_left = getattr(self, "epochs_left", self.epochs) - 1
        if self.epochs_left == 0:
            nn.init.zeros_(net[0].bias)


def normed_net(**options):
    def net(self):
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, **options), nn.ReLU(), nn.Linear(16, 3))

    return net


class MeanOfInputs(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=dtype))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean().to(self.mean.dtype), 0.1)
        return x


def averaging_net(dtype):
    def net(self):
        return nn.Sequential(nn.Linear(8, 16), MeanOfInputs(dtype), nn.Linear(16, 3))

    return net


Unscaled = change(Normed, net=normed_net(affine=False))
OtherMomentum = change(Normed, net=normed_net(momentum=0.5))
Untracked = change(Normed, net=normed_net(track_running_stats=False), validate=lambda self, net, val: None)
Averaging, AveragingInDouble = (change(Script, net=averaging_net(dtype)) for dtype in (torch.float, torch.double))
UnscaledInTrainMode = change(Unscaled, validate=ValidatedInTrainMode.validate)

Reversed = change(Dropping, loss=lambda self, net, batch: Dropping.loss(self, net, [part.flip(0) for part in batch]))

MISTAKES = [
    # Each entry is (first script, second script, options of fit, expected step, quantity, part of
    # the reason, part of the fix). The options are None if the second script is also hand-written.
    (Dropping, InEvalMode, None, 0, "loss", "second has more modules in eval mode: Dropout,", "model.train() before"),
    (Script, FrozenLater, {}, 7, "is trained", "one run freezes", "requires_grad_() and"),
    (Accumulating, DividedTwice, {}, 0, "loss", "3 times smaller, because", "return the undivided loss"),
    (Script, NeverCleared, None, 1, "norm of a gradient", "the second does not call zero_grad()", "optimizer.zero_grad()"),
    (Clipping, Clipping, {"gradient_clip_val": 0.0}, 0, "norm of a gradient", "only the first clips", "gradient_clip_val=0.1"),
    (TwoGroups, OneGroup, {}, 0, "lr", "different values for 0.bias, 0.weight", "lr=0.01"),
    (Script, InOrder, {}, 0, "digest of a sample", "a different order", "shuffle="),
    (Clipping, RoundedUp, None, None, "norm of a gradient", "rounding", "none needed if the last bits may differ"),
    (Normed, NormedAndRounded, None, 0, "norm of a gradient", "rounding", "none needed if the last bits may differ"),
    (ScheduledByStep, ByEpoch, {}, 1, "lr", "step at different times", '"interval": "step"'),
    (Script, Slower, {}, 0, "lr", "have different values for 2.bias, 2.weight, 0.bias", "lr=0.1"),
    (Script, WithAdamW, {}, 0, "optimizer", "different classes", "the same optimizers in both"),
    (Script, change(Script, batch_size=4), {}, 0, "batch size", "different batch sizes", "batch_size="),
    (Script, Accumulating, {}, 0, "backward passes", "different numbers of batches", "accumulate_grad_batches="),
    (Drawing, Dropping, {}, 3, "loss", "random numbers (dropout)", "seed="),
    (Script, HalfPrecision, {}, 0, "loss", "precision", "precision="),
    (ValidatedInTrainMode, Normed, {}, 5, "norm of a buffer", "1.running_mean, 1.running_var", "call net.eval() before"),
    (Unscaled, UnscaledInTrainMode, None, 5, "norm of a buffer", "1.running_mean, 1.running_var", "call net.eval()"),
    (Normed, OtherMomentum, None, 0, "norm of a buffer", "a different momentum=", "the same momentum="),
    (Normed, Untracked, None, 0, "number of buffers", "only the first changes 1.running_mean, 1.run", "track_running_stats="),
    (Averaging, AveragingInDouble, None, 0, "dtype of a buffer", "different precisions for 1.mean", "net.double()"),
    (Script, InDouble, None, 0, "dtype of a parameter", "precisions for 2.bias, 2.weight, 0.bias", "net.double()"),
    (Dropping, Reversed, None, 0, "loss", "the same samples in a different order", "the same order in both"),
    (ClearedAtTheEnd, Script, {}, 9, "norm of a weight after the last step", "optimizer state", "the same code"),
    (Script, ChangedAtTheEnd, None, 9, "norm of a weight after the last step", "changes 0.bias after", "the same code"),
    (change(Script, epochs=3), Script, {}, 10, "number of steps", "ends earlier", "the same number of epochs"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:A `OneCycleLR` scheduler is using")
@pytest.mark.parametrize(("first", "second", "options", "step", "quantity", "reason", "fix"), MISTAKES)
def test_compare_explains_each_porting_mistake(tmp_path, first, second, options, step, quantity, reason, fix):
    script = second()
    training = script.by_hand if options is None else lambda: script.with_fit(tmp_path, **options)
    result = compare(first().by_hand, training)
    assert not result.is_equal
    # The step at which rounding differences appear depends on the processor.
    assert step in (None, result.step)
    assert (result.quantity, result.values[0] == result.values[1]) == (quantity, False)
    assert reason in result.reason
    assert fix in result.fix


def test_compare_explains_gradients_that_differ_because_of_the_order_in_a_batch():
    def loss(self, net, batch):
        # In float64, the order of the samples does not affect the first digits of the mean.
        return cross_entropy(net(batch[0]).double(), batch[1]).float()

    first = change(Script, loss=loss)
    second = change(Script, loss=lambda self, net, batch: loss(self, net, [part.flip(0) for part in batch]))
    result = compare(first().by_hand, second().by_hand)
    assert (result.step, result.quantity) == (0, "norm of a gradient")
    assert "the same samples in a different order" in result.reason


def test_compare_prints_all_digits_of_values_that_are_almost_equal():
    result = compare(Script().by_hand, sgd_options(lr=0.1000001)().by_hand)
    assert str(result).startswith("step 0   lr: 0.1 in the first, 0.1000001 in the second\n")


def test_compare_detects_that_one_script_steps_its_second_optimizer_twice():
    def train(order):
        torch.manual_seed(0)
        nets = [Script().net(), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))]
        optimizers = [torch.optim.Adam(net.parameters(), 1e-2) for net in nets]
        for x, _ in DataLoader(make_data(), 8):
            for turn in order:
                optimizers[turn].zero_grad()
                made = nets[0](x) if turn == 0 else nets[0](x).detach()
                nets[1](made).mean().backward()
                optimizers[turn].step()

    assert compare(lambda: train((0, 1)), lambda: train((0, 1))).is_equal
    result = compare(lambda: train((0, 1)), lambda: train((0, 1, 1)))
    assert (result.step, result.values) == (2, ("Adam (number 1)", "Adam (number 2)"))


def test_comparing_two_scripts_ignores_buffers_that_training_never_changes(tmp_path):
    class Weighted(Normed):
        weight = torch.tensor([1.0, 2.0, 3.0])

        def loss(self, net, batch):
            return cross_entropy(net(batch[0]), batch[1], self.weight)

        def validate(self, net, val):
            pass

    class WeightedClassifier(Classifier):
        def training_step(self, batch, batch_idx):
            return self.criterion(self(batch[0]), batch[1])

    def with_module():
        module = WeightedClassifier(lambda module: optimizer)
        module.net, optimizer, _, train, _ = Weighted().make()
        module.criterion = nn.CrossEntropyLoss(weight=Weighted.weight)
        module.register_buffer("unused", torch.ones(7))
        FabricLoop(**with_files(tmp_path, max_epochs=Script.epochs)).fit(module, train)

    assert str(compare(Weighted().by_hand, with_module)) == "equal    no difference in 10 steps"


def test_compare_also_compares_the_buffers_of_lazy_modules():
    class Lazy(Normed):
        def net(self):
            net = nn.Sequential(nn.Linear(8, 16), nn.LazyBatchNorm1d(), nn.Linear(16, 3))
            net(torch.zeros(2, 8))
            return net

    def validate(self, net, val):
        net(next(iter(val))[0])

    assert compare(Lazy().by_hand, Lazy().by_hand).is_equal
    result = compare(Lazy().by_hand, change(Lazy, validate=validate)().by_hand)
    assert (result.step, result.quantity) == (5, "norm of a buffer")


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_compare_also_compares_the_buffers_of_compiled_modules():
    def compiled(kind):
        class Compiled(kind):
            def net(self):
                return torch.compile(super().net(), backend="eager")

        return Compiled().by_hand

    assert compare(compiled(Normed), compiled(Normed)).is_equal
    result = compare(compiled(Normed), compiled(ValidatedInTrainMode))
    assert (result.step, result.quantity) == (5, "norm of a buffer")


@pytest.mark.parametrize("loop", [FabricLoop, MiniLoop])
def test_compare_stops_each_loop_after_the_given_number_of_steps(tmp_path, loop):
    script = Normed()
    result = compare(script.by_hand, lambda: script.with_fit(tmp_path, loop), steps=7)
    assert str(result) == "equal    no difference in 7 steps"
    mistaken = compare(lambda: script.with_fit(tmp_path, loop), ValidatedInTrainMode().by_hand, steps=7)
    assert (mistaken.step, mistaken.quantity) == (5, "norm of a buffer")
    assert "1.running_mean" in mistaken.reason


def sgd_options(**options):
    def optimizer(self, net):
        return torch.optim.SGD(net.parameters(), **{"lr": 0.1, "momentum": 0.9} | options)

    return change(Script, optimizer=optimizer)


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"fused": True}, {"differentiable": False}, {"lr": torch.tensor(0.1)}], ids=str
)
def test_compare_ignores_optimizer_options_such_as_foreach_and_fused(options):
    for pair in ((Script, sgd_options(**options)), (sgd_options(**options), Script)):
        result = compare(*(script().by_hand for script in pair))
        assert result.quantity not in options
        # Only a fused implementation may give a different result, because it may round differently.
        assert result.is_equal or "fused" in options


def test_compare_prints_the_value_of_a_learning_rate_that_is_a_tensor():
    result = compare(Script().by_hand, sgd_options(lr=torch.tensor(0.2))().by_hand)
    assert str(result).startswith("step 0   lr: 0.1 in the first, 0.2 in the second\n")


@pytest.mark.parametrize("steps", keep([7, 50], 7))
def test_compare_detects_that_only_one_script_changes_weights_after_the_last_step(steps):
    def train(should_change):
        net, optimizer, _, loader, _ = Script().make()
        batch = next(iter(loader))
        for i in range(2 * steps):
            Script().train_on(i, batch, net, optimizer, False)
            if should_change and i + 1 == steps:
                nn.init.zeros_(net[2].bias)

    assert compare(lambda: train(False), lambda: train(False), steps).is_equal
    result = compare(lambda: train(False), lambda: train(True), steps)
    assert (result.step, result.quantity) == (steps - 1, "norm of a weight after the last step")
    assert "2.bias" in result.reason
    # With one step fewer, compare finds no difference, because the change comes after the compared steps.
    assert compare(lambda: train(False), lambda: train(True), steps - 1).is_equal


# Recordings, scripts and the compare command


@pytest.mark.parametrize("steps", [0, -3, 2.5])
def test_compare_refuses_an_invalid_number_of_steps(steps):
    with pytest.raises(ValueError, match=rf"compare\(steps\): got {steps}, expected an int >= 1\. Write steps=50\."):
        compare("old.py", "new.py", steps=steps)


def test_recording_a_training_loop_changes_neither_its_results_nor_torch_functions(tmp_path):
    def train():
        net, optimizer, _, train, _ = Dropping().make()
        for batch in train:
            Dropping().train_on(0, batch, net, optimizer, False)
        return nn.utils.parameters_to_vector(net.parameters())

    before = torch.autograd.backward, DataLoader.__iter__
    alone = train()
    with record_training(tmp_path / "short.json", steps=2):
        recorded = train()
    with pytest.raises(KeyError), record_training(tmp_path / "failed.json"):
        raise KeyError
    assert torch.equal(alone, recorded)
    assert (torch.autograd.backward, DataLoader.__iter__) == before
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert str(compare(tmp_path / "short.json", train, steps=2)) == "equal    no difference in 2 steps"


SCRIPT = """
import sys, torch
torch.manual_seed(0)
x, net = torch.randn(40, 4), torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), float(sys.argv[1]) if sys.argv[1:] else 0.1)
while True:
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def quick_scripts(monkeypatch):
    """Run the scripts in forks of a process that has imported torch, to save time."""
    monkeypatch.setattr("sys.executable", forking_python())


def test_the_compare_command_passes_arguments_to_the_compared_scripts(tmp_path, capsys, quick_scripts):
    (tmp_path / "train.py").write_text(SCRIPT)
    with record_training("recording.json"):
        Script().by_hand()
    assert main(["compare", "recording.json", "recording.json", "--steps", "3"]) == 0
    assert capsys.readouterr().out == "equal    no difference in 3 steps\n"
    assert main(["compare", "train.py", "train.py 0.2"]) == 1
    shown = capsys.readouterr()
    assert re.findall(r"\r(running [^:]*): 0 s", shown.err) == ["running train.py", "running train.py 0.2"]
    assert shown.out == (
        "step 0   lr: 0.1 in the first, 0.2 in the second\n"
        "reason   the optimizers have different values for bias, weight\n"
        "fix      lr=0.1\n"
    )


@pytest.mark.parametrize("text", ["import torch\n", "[1, 2]", '{"steps": 3}', "\0\xff"])
def test_the_compare_command_refuses_a_file_that_is_neither_a_script_nor_a_recording(text, tmp_path, capsys):
    (tmp_path / "train").write_text(text)
    assert main(["compare", "train", "train"]) == 2
    assert "compare: got the file 'train', expected a script with the suffix .py" in capsys.readouterr().err


def test_the_path_of_a_script_may_contain_spaces(tmp_path, capsys, quick_scripts):
    folder = tmp_path / "old version"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (tmp_path / "it's new.py").write_text(SCRIPT)
    assert main(["compare", "it's new.py", "'old version/train.py' 0.2"]) == 1
    assert "lr: 0.1 in the first, 0.2 in the second" in capsys.readouterr().out


def test_the_compare_command_accepts_a_module_name_after_dash_m(tmp_path, capsys, quick_scripts):
    folder = tmp_path / "project" / "tasks"
    folder.mkdir(parents=True)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "project" / "rates.py").write_text("SLOW = '0.05'\n")
    (folder / "slow.py").write_text("import sys\nfrom ..rates import SLOW\nsys.argv[1:] = [SLOW]\n" + SCRIPT)
    assert main(["compare", "train.py", "-m project.tasks.slow", "--steps", "3"]) == 1
    assert "lr: 0.1 in the first, 0.05 in the second" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fails.py", "fails.py"], "'fails.py', which fails (ValueError: mine). Run the script alone"),
        (["empty.py", "empty.py"], "'empty.py', which takes no optimizer step, expected training"),
        (["missing.py", "empty.py"], "'missing.py', which fails (FileNotFoundError: "),
        (["empty.py 4", "empty.py"], "'empty.py 4', which fails (exit code 4). Run the script alone"),
        (["exits.py", "exits.py"], "'exits.py', which fails (exit code 0). Run the script alone"),
        (["bob's.py 4", "empty.py"], "arguments, with matching quotation marks (No closing quotation)."),
    ],
)
def test_the_compare_command_prints_errors_on_one_line(tmp_path, capsys, quick_scripts, arguments, message):
    (tmp_path / "fails.py").write_text("raise ValueError('mine')\n")
    (tmp_path / "empty.py").write_text("import sys\nraise SystemExit(int(sys.argv[1]) if sys.argv[1:] else 0)\n")
    (tmp_path / "exits.py").write_text("import os\nos._exit(0)\n")
    assert main(["compare", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(re.findall("\n", error)) == 1
