"""Tune: what pays is kept; a trial that runs out of memory, dies or hangs is a line of the table; nothing here is changed."""

import os
import signal
import time

import pytest
import torch
from clock import Clock
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, get_worker_info

from fabric_template import FabricLoop, TensorLoader
from fabric_template.core.errors import Misuse
from fabric_template.tools import apart, throughput
from fabric_template.tools.knobs import BY_NAME, KNOBS
from fabric_template.tools.rebuilt import has_tensors, rebuilt
from fabric_template.tools.throughput import Facts, Speed
from fabric_template.tools.tuning import Trial, Tuned, Tuner, chosen_knobs, tune

CLOCK = Clock()
FOREVER = 600


@pytest.fixture(autouse=True)
def on_the_clock(monkeypatch):
    """A trial takes as long as is said here, on every machine."""
    monkeypatch.setattr(throughput, "time", CLOCK)


class Samples(Dataset):
    """Some numbers."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        return torch.full((2,), float(index))


class WhoMadeIt(Samples):
    """Each sample is how many workers there are to make it."""

    def __getitem__(self, index):
        worker = get_worker_info()
        return torch.full((2,), 0.0 if worker is None else float(worker.num_workers))


def slow_step(net, batch):
    """So long for a batch, however large it is."""
    CLOCK.sleep(0.01)
    return net(batch).pow(2).mean() * 1e-6


def step_that_waits(net, batch):
    """So long for a sample, shared by the workers."""
    CLOCK.sleep(0.005 * len(batch) / max(1, int(batch[0, 0])))
    return net(batch).mean()


def parts():
    net = nn.Linear(2, 1)
    return net, torch.optim.SGD(net.parameters(), lr=1e-3)


def tuned_with(loader, step=slow_step, **words):
    net, optimizer = parts()
    given = {"seconds": 0.3, "time_limit": FOREVER, "show": None, **words}
    return tune(FabricLoop(accelerator="cpu"), net, loader, optimizer=optimizer, training_step=step, **given)


# ---- in a process of its own


def test_what_work_returns_comes_back():
    asked = apart.ask(lambda folder: (os.getpid() != parent, os.listdir(folder)), FOREVER)
    assert asked.result == (True, ["output"])


parent = os.getpid()


@pytest.mark.parametrize(
    ("work", "failure", "is_memory"),
    [
        (lambda folder: os._exit(3), "its process ended with exit code 3", False),
        (lambda folder: os.kill(os.getpid(), signal.SIGKILL), "its process was killed (SIGKILL)", True),
        (lambda folder: time.sleep(FOREVER), "it hung: no end within 1 s", False),
        (lambda folder: bytearray(1 << 62), "MemoryError", True),
        (lambda folder: {}["lost"], "KeyError: 'lost'", False),
        (lambda folder: exit(0), "SystemExit: 0", False),
    ],
)
def test_work_that_fails_is_an_answer(work, failure, is_memory):
    answer = apart.ask(work, 1 if "hung" in failure else FOREVER)
    assert (answer.result, answer.failure, answer.is_short_of_memory) == (None, failure, is_memory)


def test_its_last_lines_come_back_and_those_it_has_started_end():
    there, held = os.pipe()

    def work(folder):
        import subprocess

        subprocess.Popen(["sleep", "100000"], pass_fds=[held])
        print("said")
        os.system("echo by another")
        raise ValueError("enough")

    answer = apart.ask(work, FOREVER)
    assert answer.failure == "ValueError: enough"
    assert "ValueError: enough" in answer.said
    os.close(held)
    assert os.read(there, 1) == b""  # comes when nobody holds the other end
    os.close(there)


def test_without_fork_it_is_a_new_interpreter_and_takes_what_can_be_pickled(monkeypatch):
    monkeypatch.setattr(apart, "can_fork", lambda: False)
    with pytest.raises(Misuse, match="each trial gets its model and data as a pickle, and this is none .*tune --model"):
        apart.ask(lambda folder: 1, FOREVER)
    assert apart.ask(os.path.basename, FOREVER).result


# ---- what pays


def test_workers_win_where_samples_take_long(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    tuned = tuned_with(DataLoader(WhoMadeIt(), batch_size=2), step_that_waits, only=["workers"])
    assert tuned.choice == {"workers": 2}
    assert tuned.gain == pytest.approx(2)
    names = [trial.name for trial in tuned.trials]
    assert names[:3] == ["as it is", "workers 1", "workers 2"]
    assert names[-2:] == ["as it is, again", "all that pays, again"]
    assert tuned.said()[1:] == [
        "write       DataLoader(..., num_workers=2, persistent_workers=True)",
        "same        the numbers stay: workers 2",
    ]


def test_a_batch_that_does_not_fit_is_named_and_nothing_here_has_changed(tmp_path):
    def collate(samples):
        if len(samples) > 64:
            raise MemoryError("no room for more than 64")
        return torch.stack(samples)

    net, optimizer = parts()
    weights, numbers = [p.clone() for p in net.parameters()], torch.get_rng_state()
    loader, shown = DataLoader(Samples(), batch_size=16, collate_fn=collate, shuffle=True), []
    tuned = tune(
        FabricLoop(accelerator="cpu"), net, loader, optimizer=optimizer, training_step=slow_step, only=["batch_size"],
        seconds=0.15, show=shown.append,
    )  # fmt: skip
    assert tuned.choice == {"batch_size": 64}
    assert tuned.words == {}
    assert tuned.notes == ["batch size 128 does not fit into memory: MemoryError: no room for more than 64"]
    assert any(line.startswith("batch size 128") and "failed: MemoryError" in line for line in shown)
    assert "other       the numbers change: batch size 64" in tuned.said()
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters(), strict=True))
    assert torch.equal(numbers, torch.get_rng_state())
    assert optimizer.state_dict()["state"] == {}
    assert not any(hasattr(p, "grad") and p.grad is not None for p in net.parameters())
    assert os.listdir(tmp_path) == []
    tuned.save_csv(tmp_path / "trials.csv")
    rows = (tmp_path / "trials.csv").read_text().splitlines()
    assert len(rows) == len(tuned.trials) + 1
    (row,) = [row for row in rows if row.startswith("batch size 128,")]
    assert row.endswith("MemoryError: no room for more than 64")


def test_a_trial_whose_process_dies_is_survived():
    def step(net, batch):
        if len(batch) == 32:
            os._exit(5)
        return slow_step(net, batch)

    tuned = tuned_with(DataLoader(Samples(), batch_size=16), step, only=["batch_size"], seconds=0.1)
    assert tuned.choice == {}
    assert tuned.notes == ["batch size 32 fails: its process ended with exit code 5"]
    assert tuned.said()[-1] == "result      nothing pays by more than its spread: leave it as it is"


def test_a_batch_size_that_fits_only_once_is_halved():
    fits = iter([True, False])
    tuner_trials = {16: 100.0, 32: 200.0, 64: 400.0}

    class Known(Tuner):
        def trial(self, name, choice, work=None):
            size = choice.get("batch_size", 16)
            fails = size == 64 and not next(fits)
            speed = None if fails else Speed([tuner_trials[size]] * 5, 0.1, Facts(batch_size=16, samples=160))
            self.tuned.trials.append(one := Trial(name, dict(choice), speed, "MemoryError" * fails, fails))
            return one, ""

    tuned = Known(None, seconds=1, time_limit=1, show=None).run(["batch_size"], same_numbers=False, max_batch_size=None)
    assert tuned.choice == {"batch_size": 32}
    assert tuned.gain == 2.0
    assert tuned.notes == ["batch size 64 fits once and not again: MemoryError"]


def test_a_batch_that_leaves_few_steps_says_so_and_two_that_pay_together_are_found():
    class Known(Tuner):
        def trial(self, name, choice, work=None):
            rate = 100.0 * choice.get("batch_size", 16) / 16 * (1.05 if {"tensors", "fused"} <= {*choice} else 1.0)
            facts = Facts(batch_size=16, samples=160, has_tensors=True, is_fused=False)
            self.tuned.trials.append(one := Trial(name, dict(choice), Speed([rate] * 5, 0.1, facts)))
            return one, ""

    names = ["tensors", "fused", "batch_size"]
    tuned = Known(None, seconds=1, time_limit=1, show=None).run(names, same_numbers=False, max_batch_size=None)
    assert tuned.choice == {"tensors": True, "fused": True, "batch_size": 64}
    tried = [one.name for one in tuned.trials if not one.name.endswith("again")]
    assert tried[1:3] == ["TensorLoader", "fused optimizer"]
    assert tried[3:] == ["batch size 32", "batch size 64", "TensorLoader, fused optimizer"]
    assert tuned.notes == ["batch size 64 leaves 3 steps to an epoch: it takes more epochs to learn as much"]


# ---- what is refused


def test_a_training_that_fails_as_it_is():
    def step(net, batch):
        raise ValueError("inside the step")

    with pytest.raises(
        Misuse, match=r"tune: the training fails as it is \(ValueError: inside the step\); expected one that"
    ):
        tuned_with([torch.zeros(4, 2)], step)


def test_names_that_are_none():
    with pytest.raises(Misuse, match="tune: there is no 'warp' to try: expected some of threads, workers, pin_memory"):
        chosen_knobs(["warp"], same_numbers=False)
    with pytest.raises(Misuse, match="tune: precision changes the numbers: leave it out, or same_numbers"):
        chosen_knobs(["precision", "workers"], same_numbers=True)


# ---- what is tried


def test_what_applies_to_what():
    facts = Facts(
        cores=8,
        threads=8,
        workers=0,
        batch_size=100,
        samples=1000,
        has_tensors=True,
        has_convolutions=True,
        is_fused=False,
    )
    tried = {knob.name: list(knob.values(facts, {})) for knob in KNOBS}
    assert tried == {
        "workers": [1, 2, 4, 8], "pin_memory": [], "prefetch": [], "tensors": [True],
        "threads": [1, 2, 4], "matmul_precision": ["medium"],
        "precision": ["bf16-mixed"], "channels_last": [True], "fused": [True], "compile": [True], "batch_size": [200, 400],
    }  # fmt: skip
    on_gpu = Facts(device="cuda", cores=2, workers=1, precision="bf16-mixed", is_compiled=True)
    tried = {knob.name: list(knob.values(on_gpu, {})) for knob in KNOBS}
    assert {name: values for name, values in tried.items() if values} == {
        "workers": [0, 2], "pin_memory": [True], "prefetch": [True],
    }  # fmt: skip
    assert list(BY_NAME["batch_size"].values(facts, {"max_batch_size": 150})) == []


def batches_of(loader):
    torch.manual_seed(3)
    return [[part.tolist() for part in batch] for batch in loader]


def test_workers_and_tensors_give_the_same_batches():
    data = TensorDataset(torch.arange(10), torch.arange(10, 20))
    shuffled, plain = DataLoader(data, 4, shuffle=True), DataLoader(Subset(data, [9, 1, 2, 3]), 3)
    assert batches_of(rebuilt(shuffled, {"workers": 2})) == batches_of(shuffled)
    as_tensors = rebuilt(plain, {"tensors": True})
    assert type(as_tensors) is TensorLoader
    assert batches_of(as_tensors) == batches_of(plain)
    both = rebuilt({"a": shuffled, "b": [plain]}, {"tensors": True, "batch_size": 2})
    assert (both["a"].batch_size, both["a"].shuffle, both["b"][0].batch_size) == (2, True, 2)
    assert sorted(sum((batch[0] for batch in batches_of(both["a"])), [])) == list(range(10))
    own = DataLoader(data, batch_sampler=[[0, 1], [2]])
    assert not has_tensors(own)
    assert batches_of(rebuilt(own, {"workers": 1, "batch_size": 5})) == batches_of(own)
    assert rebuilt([1, 2], {"workers": 1}) == [1, 2]


class Wavering(Tuner):
    """A machine whose speed wavers by more than settings differ: windows from a third to the double."""

    def __init__(self, *gains):
        super().__init__(None, seconds=0, time_limit=0, show=None)
        self.gains = iter(gains)  # of the setting, each time that it is measured

    def trial(self, name, choice, work=None):
        rate = 100 * (next(self.gains) if choice else 1)
        one = Trial(
            name, dict(choice), Speed([rate * part for part in (0.3, 0.6, 1, 1.4, 2)], 0.1, Facts(has_tensors=True))
        )
        self.tuned.trials.append(one)
        return one, ""


@pytest.mark.parametrize(
    ("gains", "pays"), [((1.5,) * 4, True), ((1.05,), False), ((1.5, 1.05), False), ((1.5, 1.5, 1.0), False)], ids=str
)
def test_where_speeds_waver_it_must_be_faster_three_times_of_three(gains, pays):
    tuner = Wavering(*gains)
    assert tuner.run(["tensors"], same_numbers=False, max_batch_size=None).choice == ({"tensors": True} if pays else {})
    assert next(tuner.gains, None) is None
    if pays:
        assert tuner.tuned.gain == pytest.approx(1.5)


def test_nothing_pays_within_the_spread():
    assert not Speed([100, 120, 140], 0.1).pays(Speed([90, 110, 130], 0.1))
    assert Tuned().said() == ["result      nothing pays by more than its spread: leave it as it is"]
