"""Two trainings beside each other: correct adoptions give no alarm, a mistake is named as the first thing that parts."""

import re

import lightning.pytorch as pl
import pytest
import torch
from modules import make_data
from runs import loud
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric

from fabric_template import FabricLoop, MiniLoop
from fabric_template.core.errors import Misuse, MisuseOfType
from fabric_template.tools import doctor


class Script:
    """A plain training script; each kind of it changes a little."""

    epochs, accumulate, clip, interval, precision, batch_size, calls_train = 3, 1, None, "epoch", None, 8, True

    def net(self):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def optimizer(self, net):
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def scheduler(self, optimizer):
        return None

    def loaders(self):
        return DataLoader(make_data(), self.batch_size, shuffle=True), DataLoader(make_data(16, seed=1), 8)

    def loss(self, net, batch):
        return cross_entropy(net(batch[0]), batch[1])

    def made(self):
        torch.manual_seed(0)
        net = self.net()
        optimizer = self.optimizer(net)
        return net, optimizer, self.scheduler(optimizer), *self.loaders()

    def by_hand(self):
        net, optimizer, scheduler, train, val = self.made()
        for _ in range(self.epochs):
            net.train(self.calls_train)
            for i, batch in enumerate(train):
                self.train_on(i, batch, net, optimizer, is_last=i + 1 == len(train))
                if scheduler is not None and self.interval == "step":
                    scheduler.step()
            net.eval()
            with torch.no_grad():
                sum(self.loss(net, batch) for batch in val)
            if scheduler is not None and self.interval == "epoch":
                scheduler.step()

    def train_on(self, i, batch, net, optimizer, is_last):
        (self.loss(net, batch) / self.accumulate).backward()
        if (i + 1) % self.accumulate == 0 or is_last:
            if self.clip:
                nn.utils.clip_grad_norm_(net.parameters(), self.clip)
            optimizer.step()
            optimizer.zero_grad()

    def adopted(self, root, kind=FabricLoop, **changed):
        """The same with fit, at rung 2."""
        net, optimizer, scheduler, train, val = self.made()
        if scheduler is not None:
            optimizer = {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}
        words = {
            "accumulate_grad_batches": self.accumulate,
            "gradient_clip_val": self.clip,
            "precision": self.precision,
        }
        words = {word: value for word, value in (words | changed).items() if value is not None}
        if kind is MiniLoop:
            loop = MiniLoop(max_epochs=self.epochs, accelerator="cpu", default_root_dir=str(root), **words)
        else:
            loop = FabricLoop(**loud(root, max_epochs=self.epochs, **words))
        steps = {"training_step": self.loss, "validation_step": self.loss}
        loop.fit(net, train, val, optimizer=optimizer, **steps)


class Accumulating(Script):
    accumulate = 3  # of five batches: the last two are a window of their own


class Clipping(Script):
    clip = 0.1


class ScheduledByStep(Script):
    interval = "step"

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)


class ScheduledByEpoch(Script):
    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


class TwoGroups(Script):
    def optimizer(self, net):
        groups = [{"params": net[0].parameters(), "lr": 0.01}, {"params": net[2].parameters(), "weight_decay": 0.1}]
        return torch.optim.AdamW(groups, lr=0.1)


class DroppingOut(Script):
    def net(self):
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


class Normed(Script):
    def net(self):
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


class Lbfgs(Script):
    def optimizer(self, net):
        return torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)

    def train_on(self, i, batch, net, optimizer, is_last):
        def closure():
            optimizer.zero_grad()
            loss = self.loss(net, batch)
            loss.backward()
            return loss

        optimizer.step(closure)


class HalfPrecision(Script):
    precision = "bf16-mixed"

    def train_on(self, i, batch, net, optimizer, is_last):
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(net, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Frozen(Script):
    def net(self):
        net = super().net()
        net[0].requires_grad_(False)
        return net


class Convolving(Script):
    def net(self):
        return Convolutions()

    def optimizer(self, net):
        return torch.optim.Adam(net.parameters(), lr=1e-2, weight_decay=1e-4)


class Sloppy(Normed):
    """Validates with gradients, measures itself once more, and never calls the net itself."""

    def by_hand(self):
        net, optimizer, _, train, val = self.made()
        for _ in range(self.epochs):
            net.train()
            for i, batch in enumerate(train):
                self.train_on(i, batch, net, optimizer, False)
                net.eval()
                self.loss(net, batch).item()
                net.train()
            net.eval()
            for batch in val:
                self.loss(net, batch).item()

    def loss(self, net, batch):
        return cross_entropy(net.forward(batch[0]), batch[1])


class ByWords(Script):
    """A model that is called by keywords and computes its loss itself."""

    def net(self):
        return WithLoss()

    def loss(self, net, batch):
        return net(x=batch[0], labels=batch[1])["loss"]


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 3)

    def forward(self, x, labels):
        return {"loss": cross_entropy(self.two(self.drop(self.one(x).relu())), labels)}


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head, self.drop = nn.Conv2d(1, 4, 2), nn.Linear(12, 3), nn.Dropout(0.2)

    def forward(self, x):
        return self.head(self.drop(self.conv(x.view(-1, 1, 2, 4)).relu().flatten(1)))


KINDS = [Script, Accumulating, Clipping, ScheduledByStep, ScheduledByEpoch, TwoGroups, DroppingOut, Normed, Lbfgs,
         HalfPrecision, Frozen, Convolving, Sloppy, ByWords]  # fmt: skip


@pytest.mark.parametrize("loop", [MiniLoop, FabricLoop])
@pytest.mark.parametrize("kind", KINDS)
def test_a_correct_adoption_gives_no_alarm(tmp_path, kind, loop):
    script = kind()
    with doctor.record("old") as old:
        script.by_hand()
    with doctor.record("new") as new:
        script.adopted(tmp_path, loop)
    report = doctor.compare(old, new)
    steps = 6 if kind is Accumulating else 15
    assert (report.first, report.findings, report.notes) == (None, [], [])
    assert str(report).splitlines()[-1] == f"same        nothing parts in {steps} steps"


# ---- mistakes: each is the first thing that parts, with its reason


def told(root, yours, ours, kind=FabricLoop, **changed):
    """The report of your script beside what was made of it."""
    with doctor.record("old") as old:
        yours.by_hand()
    with doctor.record("new") as new:
        ours.adopted(root, kind, **changed) if kind else ours.by_hand()
    return doctor.compare(old, new)


def first(report):
    """What the report says first, and what to write."""
    return str(report.first), report.first.write


class InEvalMode(DroppingOut):
    calls_train = False

    def net(self):
        return super().net().eval()


class DividedTwice(Accumulating):
    def loss(self, net, batch):
        return super().loss(net, batch) / (self.accumulate if net.training else 1)


class NeverCleared(Script):
    def train_on(self, i, batch, net, optimizer, is_last):
        self.loss(net, batch).backward()
        optimizer.step()


class FrozenLater(Script):
    def loss(self, net, batch):
        self.batches = getattr(self, "batches", 0) + net.training
        if self.batches == 8:
            for name, parameter in net.named_parameters():
                if name.startswith("0."):
                    parameter.requires_grad_(False)
                    parameter.grad = None
        return super().loss(net, batch)


class OneGroup(TwoGroups):
    def optimizer(self, net):
        return torch.optim.AdamW(net.parameters(), lr=0.1)


class InOrder(Script):
    def loaders(self):
        return DataLoader(make_data(), 8), super().loaders()[1]


class SummedOtherwise(Clipping):
    def train_on(self, i, batch, net, optimizer, is_last):
        self.loss(net, batch).backward()
        nn.utils.clip_grad_norm_([*net.parameters()][::-1], self.clip, foreach=False)
        optimizer.step()
        optimizer.zero_grad()


class SteppedBefore(ScheduledByStep):
    def by_hand(self):
        net, optimizer, scheduler, train, _ = self.made()
        for i, batch in enumerate(train):
            scheduler.step()
            self.train_on(i, batch, net, optimizer, False)


@pytest.mark.parametrize(
    ("yours", "ours", "changed", "words", "write"),
    [
        (
            DroppingOut, InEvalMode, {"kind": None},
            "step 0: 5 modules are in eval mode in ours only: from_pretrained returns eval mode, your loop calls model.train()",
            "model.train() before fit",
        ),
        (
            Script, FrozenLater, {},
            "step 7: 4 parameters are trained, 2 here: frozen by name: 0.weight, 0.bias",
            "requires_grad_(False) for the same parameters in both",
        ),
        (
            Accumulating, DividedTwice, {},
            "step 0: the same batch, another loss: 0.3364 in yours, 0.1121 here: 3 times smaller: fit divides it by"
            " accumulate_grad_batches=3, and the step does so as well",
            "return the loss of the batch undivided",
        ),
        (
            Script, NeverCleared, {"kind": None},
            "step 1: the gradients of the step before are still there in ours: zero_grad() is missing: they are running sums",
            "optimizer.zero_grad() before each backward",
        ),
        (
            Clipping, Clipping, {"gradient_clip_val": 0.0},
            "step 0: the same gradients of backward, others at the step: norm 0.1 in yours, 1.088 here: they are clipped or"
            " scaled in yours only",
            "gradient_clip_val=0.1",
        ),
        (
            TwoGroups, OneGroup, {},
            "step 0: learning rate 0.01 in yours, 0.1 here for 0.weight and 1 more: the parameters are grouped otherwise",
            "the same parameter groups in both",
        ),
        (
            Script, InOrder, {},
            "step 0: another batch: the same samples in others: yours shuffles, ours does not",
            "shuffle=True",
        ),
        (
            Clipping, SummedOtherwise, {"kind": None},
            "step N: same random numbers, other gradients: the norm is summed in another order",
            "nothing, if the last bits may differ; or clip_grad_norm_ of the same parameters in the same order",
        ),
    ],
    ids=["eval mode", "frozen", "divided twice", "zero_grad", "clipping", "groups", "shuffle", "rounding"],
)  # fmt: skip
def test_a_mistake_is_named_first(tmp_path, yours, ours, changed, words, write):
    found, advice = first(told(tmp_path, yours(), ours(), **changed))
    if words.startswith("step N"):  # where two sums are first rounded otherwise is the processor's affair
        found = re.sub(r"^step \d+", "step N", found)
    assert (found, advice) == (words, write)


class ByStepAsEpoch(ScheduledByStep):
    interval = "epoch"


class WithoutScheduler(ScheduledByStep):
    def scheduler(self, optimizer):
        return None


class Dropping(Script):
    def loaders(self):
        return DataLoader(make_data(36), 8, drop_last=True), super().loaders()[1]


class Uneven(Script):
    def loaders(self):
        return DataLoader(make_data(36), 8), super().loaders()[1]


class SeededLate(Script):
    def net(self):
        net = super().net()
        torch.manual_seed(1)
        net[2] = nn.Linear(16, 3)
        return net


class Sampled(Script):
    """Over ranks: here the first of two."""

    epochs, sets_epoch = 2, True

    def loaders(self):
        self.sampler = DistributedSampler(make_data(80), 2, 0, shuffle=True)
        return DataLoader(make_data(80), 8, sampler=self.sampler), super().loaders()[1]

    def by_hand(self):
        net, optimizer, _, train, _ = self.made()
        for epoch in range(self.epochs):
            if self.sets_epoch:
                self.sampler.set_epoch(epoch)
            for i, batch in enumerate(train):
                self.train_on(i, batch, net, optimizer, False)


class SampledAlike(Sampled):
    sets_epoch = False


class SeenInTraining(Normed):
    """Validates in train mode."""

    def by_hand(self):
        net, optimizer, _, train, val = self.made()
        for _ in range(self.epochs):
            for i, batch in enumerate(train):
                self.train_on(i, batch, net, optimizer, False)
            with torch.no_grad():
                sum(self.loss(net, batch) for batch in val)


class Squared(Script):
    def loss(self, net, batch):
        return nn.functional.multi_margin_loss(net(batch[0]), batch[1])


class Summed(Script):
    def loss(self, net, batch):
        return cross_entropy(net(batch[0]), batch[1], reduction="sum")


class WithAdam(Script):
    def optimizer(self, net):
        return torch.optim.Adam(net.parameters(), 0.1)


class Slower(Script):
    def optimizer(self, net):
        return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


class WithoutMomentum(Script):
    def optimizer(self, net):
        return torch.optim.SGD(net.parameters(), lr=0.1)


class Wider(Script):
    batch_size = 4


class Peeking(InOrder):
    """Looks at a batch before it trains, in the same pass."""

    def by_hand(self):
        net, optimizer, _, train, _ = self.made()
        batches = iter(train)
        next(batches)
        for i, batch in enumerate(batches):
            self.train_on(i, batch, net, optimizer, False)


class Keeping(Accumulating):
    """What is left of an epoch is kept for the next one."""

    def train_on(self, i, batch, net, optimizer, is_last):
        super().train_on(i, batch, net, optimizer, False)


class Drawing(DroppingOut):
    def train_on(self, i, batch, net, optimizer, is_last):
        super().train_on(i, batch, net, optimizer, is_last)
        if i == 2:
            torch.randn(1)


class Clamped(Script):
    def train_on(self, i, batch, net, optimizer, is_last):
        super().train_on(i, batch, net, optimizer, is_last)
        with torch.no_grad():
            net[0].weight.clamp_(-0.1, 0.1)


class LbfgsFaster(Lbfgs):
    def optimizer(self, net):
        return torch.optim.LBFGS(net.parameters(), lr=0.2, max_iter=4)


OTHERS = [
    (ScheduledByStep, ByStepAsEpoch, "step 1: learning rate # in yours, # here: the same learning rates, changed every # step"
     " in yours, every # steps here"),
    (ScheduledByStep, Script, "step 0: learning rate # in yours, # here: a scheduler steps in yours only"),
    (ScheduledByEpoch, Script, "step 5: learning rate # in yours, # here: a scheduler steps in yours only"),
    (ScheduledByStep, SteppedBefore, "step 0: learning rate # in yours, # here: the sequence of yours, # step earlier: the"
     " scheduler is stepped at another place"),
    (Script, Slower, "step 0: learning rate # in yours, # here: the optimizer is made with another one"),
    (Script, WithoutMomentum, "step 0: momentum # in yours, # here: the optimizer is made with another value"),
    (Script, WithAdam, "step 0: SGD in yours, Adam here: another optimizer is made"),
    (Uneven, Dropping, "step 4: a batch of # in yours, of # here: the last batch of the epoch, a smaller one, is left out in"
     " ours only"),
    (Script, Wider, "step 0: a batch of # in yours, of # here: the loader is made with another batch_size"),
    (Peeking, InOrder, "step 0: another batch: yours is one batch ahead: it leaves one out that the other trains on"),
    (Sampled, SampledAlike, "step 5: another batch: sampler.set_epoch is called in yours only"),
    (Script, SeededLate, "step 0: the initial weights are others, # of # parameters (2.weight, 2.bias): the others are the"
     " same: these are loaded, or made otherwise, in one only"),
    (Script, Convolving, "step 0: # parameters with # values in yours, # with # here: the nets are others"),
    (Script, Accumulating, "step 0: # backward pass before the step in yours, # here: ours adds up the gradients of several"
     " batches"),
    (Keeping, Accumulating, "step 1: # backward passes before the step in yours, # here: at the end of an epoch ours steps"
     " with the batches that are left, yours keeps them for the next"),
    (Drawing, DroppingOut, "step 3: other random numbers (torch): something has drawn numbers in one only since the last"
     " step: an augmentation, a sample, a logger"),
    (Script, DroppingOut, "step 0: the same batch, another loss: # in yours, # here: the net draws random numbers, as dropout"
     " does, in ours only"),
    (Script, Squared, "step 0: the same batch, another loss: # in yours, # here: the targets, the loss function or what is"
     " done to the logits before it are others"),
    (Script, Summed, "step 0: the same batch, another loss: # in yours, # here: times #, the size of the batch:"
     " reduction='mean' in yours, 'sum' here"),
    (Script, HalfPrecision, "step 0: the same batch, another loss: # in yours, # here: near, as are the gradients: another"
     " precision"),
    (Lbfgs, LbfgsFaster, "step 0: learning rate # in yours, # here: the optimizer is made with another one"),
    (Clamped, Script, "step 1: the weights are changed between two steps in yours only (0.weight): clamped, averaged (EMA),"
     " copied or loaded there"),
    (SeenInTraining, Normed, "step 5: other buffers (1.running_mean, 1.running_var, 1.num_batches_tracked): BatchNorm has seen"
     " other batches: the net is in train mode while one of them validates, or once more called"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:A `OneCycleLR` scheduler is using")
@pytest.mark.parametrize(("yours", "ours", "words"), OTHERS, ids=[f"{a.__name__}-{b.__name__}" for a, b, _ in OTHERS])
def test_what_else_parts(tmp_path, yours, ours, words):
    by_hand = {SteppedBefore, SampledAlike, InOrder}
    report = told(tmp_path, yours(), ours(), None if ours in by_hand else FabricLoop)
    assert re.sub(r"(?<![\w.])\d[\d.]*(?![\w.:])", "#", str(report.first)) == words


class Lit(pl.LightningModule):
    """The same at rung 4: a module stands around the net, with a metric beside it."""

    def __init__(self, script, net, optimizer):
        super().__init__()
        self.script, self.net, self.optimizer, self.seen = script, net, optimizer, MeanMetric()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        self.seen(batch[0].mean())
        return self.script.loss(self, batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.script.loss(self, batch))

    def configure_optimizers(self):
        return self.optimizer


@pytest.mark.parametrize("kind", [DroppingOut, Convolving])
def test_a_module_around_the_net_gives_no_alarm(tmp_path, kind):
    script = kind()
    with doctor.record("old") as old:
        script.by_hand()
    with doctor.record("new") as new:
        net, optimizer, _, *loaders = script.made()
        FabricLoop(**loud(tmp_path, max_epochs=3)).fit(Lit(script, net, optimizer), *loaders)
    assert str(doctor.compare(old, new)).splitlines()[2:] == ["same        nothing parts in 15 steps"]


def test_the_parts_of_a_loop_of_ones_own_give_no_alarm(tmp_path):
    script = Normed()
    with doctor.record("old") as old:
        script.by_hand()
    with doctor.record("new") as new:
        net, optimizer, _, train, val = script.made()
        loop = FabricLoop(**loud(tmp_path))
        net, optimizer, train, val = loop.setup(net, optimizer, train, val)
        for _ in range(3):
            net.train()
            for batch in train:
                optimizer.zero_grad()
                loop.backward(script.loss(net, batch))
                optimizer.step()
            net.eval()
            with torch.no_grad():
                sum(script.loss(net, batch) for batch in val)
    assert doctor.compare(old, new).first is None


class Adversarial:
    """Two optimizers that step in turns."""

    def by_hand(self, order=(0, 1)):
        torch.manual_seed(0)
        nets = [Script().net(), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))]
        optimizers = [torch.optim.Adam(net.parameters(), 1e-2) for net in nets]
        for x, _ in DataLoader(make_data(), 8):
            for turn in order:
                optimizers[turn].zero_grad()
                made = nets[0](x) if turn == 0 else nets[0](x).detach()
                nets[1](made).mean().backward()
                optimizers[turn].step()


def test_two_optimizers_in_turns():
    recordings = []
    for order in ((0, 1), (0, 1), (0, 1, 1)):
        with doctor.record("gan") as recording:
            Adversarial().by_hand(order)
        recordings.append(recording)
    assert doctor.compare(*recordings[:2]).first is None
    assert str(doctor.compare(*recordings[::2]).first) == (
        "step 2: optimizer 1 of yours steps, optimizer 2 here: several optimizers step in another order, or not as often"
    )


def test_a_compiled_net_is_seen_from_outside():
    class Compiled(Normed):
        def net(self):
            return torch.compile(super().net(), backend="eager", fullgraph=True)

    report = told(None, Normed(), Compiled(), kind=None)
    assert str(report).splitlines()[2:] == ["same        nothing parts in 15 steps"]


def test_one_net_trained_twice():
    script = Script()
    torch.manual_seed(0)
    net = script.net()
    script.net = lambda: net
    with doctor.record() as old:
        script.by_hand()
    with doctor.record() as new:
        script.by_hand()
    assert first(doctor.compare(old, new)) == (
        "step 0: the initial weights are others, 4 of 4 parameters (0.weight, 0.bias, 2.weight and 1 more): ours begins where"
        " yours ended: the same net was trained twice",
        "make a new net for each of them",
    )


def test_the_ends_are_told(tmp_path):
    long, short = Script(), Script()
    long.epochs = 4
    report = told(tmp_path, long, short)
    assert first(report) == (
        "step 15: 20 steps in yours, 15 here: one of them ends earlier",
        "the same number of epochs (max_epochs=) and of batches",
    )


def test_other_random_numbers_of_which_nothing_comes_are_a_note():
    script, recordings = InOrder(), []
    for seed in (0, 1):
        script.loaders = lambda seed=seed: (torch.manual_seed(seed), InOrder.loaders(script))[1]
        with doctor.record() as recording:
            script.by_hand()
        recordings.append(recording)
    report = doctor.compare(*recordings)
    assert report.first is None
    assert report.notes == ["step 0: other random numbers (torch); nothing has come of it"]


# ---- the recording


def test_it_rests_after_its_steps_and_takes_its_hooks_off():
    before = [torch.autograd.backward, DataLoader.__iter__, torch.optim.Optimizer.zero_grad, nn.Module.zero_grad]
    script = Script()
    with doctor.record("short", steps=4) as short:
        script.by_hand()
        assert torch.autograd.backward is before[0]  # already: what comes after costs nothing
    assert [
        torch.autograd.backward,
        DataLoader.__iter__,
        torch.optim.Optimizer.zero_grad,
        nn.Module.zero_grad,
    ] == before
    script.by_hand()  # not noted
    assert str(short).startswith("short: 4 steps of SGD, 4 parameters, loss ")
    assert [len(step.weights) for step in short.steps] == [4] * 4
    with pytest.raises(KeyError), doctor.record():
        raise KeyError
    assert torch.autograd.backward is before[0]


def test_the_training_is_not_changed():
    def trained():
        script = DroppingOut()
        nets = []
        make = script.net
        script.net = lambda: nets.append(make()) or nets[0]
        script.by_hand()
        return torch.cat([one.flatten() for one in nets[0].parameters()])

    alone = trained()
    with doctor.record():
        beside = trained()
    assert torch.equal(alone, beside)


def test_misuse():
    with doctor.record("nothing") as nothing:
        pass
    with pytest.raises(Misuse) as caught:
        doctor.compare(nothing, nothing)
    assert str(caught.value) == (
        "compare: no optimizer step was seen in 'nothing': expected a training inside the with block, in this process"
        " (devices=1), with an optimizer of torch.optim"
    )
    with pytest.raises(MisuseOfType) as caught:
        doctor.compare("old", nothing)
    assert str(caught.value) == "compare got a str: expected what record gives, with record('old') as old: ..."
    with pytest.raises(Misuse) as caught, doctor.record(steps=0):
        pass
    assert str(caught.value) == "record(steps=0): expected how many steps are noted, 1 or more"
