"""Test that plain attributes and generators outside of state_dict() are restored."""

import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from copy import copy, deepcopy

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from modules import Classifier, assert_same_weights, make_loader
from runs import Snapshots, assert_same_end, fit, logs_of, val_loader, with_files
from torch import nn
from torch.nn.utils import prune

from fabric_template import FabricLoop
from fabric_template.plain_state import Part, PlainState
from fabric_template.plain_values import replace_content
from fabric_template.rng_state import find_generators, get_generator_state, set_generator_state


class Holder:
    """An object whose attributes are the keyword arguments."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


def restored(before, after, fresh, tmp_path):
    """Return a new object after the changes from ``before`` to ``after`` were saved and restored."""
    holder, new = Holder(**before), Holder(**fresh)
    saving, loading = PlainState({"a": Part(holder)}), PlainState({"a": Part(new)})
    vars(holder).update(after)
    torch.save(saving.state_dict(), tmp_path / "state")
    loading.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    return new


VALUES = {
    "number": 3,
    "float": -0.25,
    "complex": 1 + 2j,
    "text": "warm",
    "bytes": b"\x00\xff",
    "big": 2**200,
    "none": None,
    "list": [1, 2.5, "c", [None, True]],
    "empty": [],
    "tuple": (1, (2, 3)),
    "set": {1, 5},
    "frozenset": frozenset({"x"}),
    "deque": deque([1, 2, 3], maxlen=3),
    "dict": {"a": [1], 2: (3,), (4, 5): None},
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "counter": Counter("hello"),
    "default": defaultdict(list, {"a": [1, 2]}),
    "size": torch.Size([2, 3]),
    "tensor": torch.arange(6.0).view(2, 3).t(),
    "scalar tensor": torch.tensor(3),
    "bool tensor": torch.tensor([True, False]),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "learned": torch.ones(2, requires_grad=True),
    "tensors": {"hidden": (torch.zeros(2), torch.ones(2)), "steps": [torch.tensor(1)]},
    "array": np.arange(6).reshape(2, 3),
    "empty array": np.zeros((0, 3)),
    "dates": np.array(["2026-01-01"], dtype="datetime64[D]"),
    "numpy number": np.float64(0.1),
    "numpy bool": np.bool_(True),
}


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("name", VALUES)
def test_resume_restores_attributes_of_every_supported_type(tmp_path, name, is_new):
    """In a new run, the attribute has a different value or does not exist."""
    before = {} if is_new else {"value": "before"}
    found = restored(before, {"value": VALUES[name]}, before, tmp_path).value
    assert type(found) is type(VALUES[name])
    assert repr(found) == repr(VALUES[name])
    if isinstance(found, torch.Tensor):
        assert (found.dtype, found.requires_grad) == (VALUES[name].dtype, VALUES[name].requires_grad)
    if isinstance(found, deque | defaultdict):
        assert getattr(found, "maxlen", 0) == getattr(VALUES[name], "maxlen", 0)
        assert getattr(found, "default_factory", 0) == getattr(VALUES[name], "default_factory", 0)


def test_containers_and_tensors_in_attributes_are_restored_in_place(tmp_path):
    """Other objects may refer to containers and tensors, so resuming must not replace them."""
    fresh = {"list": [], "dict": {}, "tensor": torch.zeros(3), "array": np.zeros(2), "set": set()}
    fresh["queue"], fresh["factory"] = deque(maxlen=2), defaultdict(lambda: 7)
    originals, saved = dict(fresh), Holder(**{name: copy(value) for name, value in fresh.items()})
    after = {"list": [1], "dict": {"a": 1}, "tensor": torch.ones(3), "array": np.ones(2), "set": {1}}
    after["queue"], after["factory"] = deque([1, 2], maxlen=2), defaultdict(lambda: 7, {"a": 1})
    saving, new = PlainState({"a": Part(saved)}), Holder(**fresh)
    for name, value in after.items():
        assert replace_content(getattr(saved, name), value)
    PlainState({"a": Part(new)}).load_state_dict(saving.state_dict())
    assert all(getattr(new, name) is originals[name] for name in fresh)
    assert {name: repr(originals[name]) for name in after if name != "factory"} == {
        name: repr(value) for name, value in after.items() if name != "factory"
    }
    assert (new.factory["a"], new.factory["b"]) == (1, 7)


def test_an_attribute_with_a_newly_assigned_object_is_restored_as_a_new_object(tmp_path):
    """Other objects may refer to the old object, which the saved run has not changed."""
    before = {"list": [0], "dict": {}, "tensor": torch.zeros(3), "array": np.zeros(2)}
    before["factory"] = defaultdict(lambda: 7)
    fresh = deepcopy({**before, "factory": None}) | {"factory": defaultdict(lambda: 7)}
    originals = dict(fresh)
    after = {"list": [1], "dict": {"a": 1}, "tensor": torch.ones(3), "array": np.ones(2)}
    after["factory"] = defaultdict(lambda: 7, {"a": 1})
    new = restored(before, after, fresh, tmp_path)
    assert not any(getattr(new, name) is originals[name] for name in fresh)
    assert [originals["list"], originals["dict"], originals["factory"]] == [[0], {}, {}]
    assert originals["tensor"].sum() == originals["array"].sum() == 0
    assert new.list == [1]
    assert (new.tensor.sum(), new.array.sum(), new.factory["a"], new.factory["b"]) == (3, 2, 1, 7)


def test_a_restored_attribute_is_saved_again_even_if_its_value_does_not_change():
    """In one process, a second run starts with the values and objects that the first run has set."""
    orders = [[0, 1], [1, 0]]
    holder = Holder(count=0, order=orders[0], label="a", scale=1.0)
    first = PlainState({"a": Part(holder)})
    holder.count, holder.order = 30, orders[1]
    del holder.label
    saved = first.state_dict()
    second = PlainState({"a": Part(holder)})
    second.load_state_dict(saved)
    holder.order = orders[1]
    again = second.state_dict()
    assert sorted(again["attributes"]) == [("a", "count"), ("a", "label"), ("a", "order")]
    # The key "rebound" makes a resumed run assign a new list. Otherwise, it would change the attribute's first list.
    assert list(again["rebound"]) == [("a", "order")]


def test_attributes_are_saved_only_if_their_values_have_changed():
    """Modules, functions, cycles, views of parameters and unchanged values are not saved."""
    net = nn.Linear(2, 2)
    cycle = []
    cycle += [cycle] * 50
    holder = Holder(labels=["a"] * 100, table=torch.rand(2000, 300), size=3, indices=range(10**15))
    state = PlainState({"a": Part(holder)}, network=net)
    holder.net, holder.function, holder.cycle, holder.view = net, print, cycle, net.weight.data[0]
    holder.objects = [object()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert state.changed_attributes() == {}
    holder.table[1999, 299] += 1
    holder.size = 4
    assert sorted(state.changed_attributes()) == [("a", "size"), ("a", "table")]


def test_one_changed_number_in_a_large_attribute_is_detected():
    tensors = torch.zeros(300, 1000), torch.zeros(7)
    holder = Holder(large=tensors[0], small=[tensors[1]], array=np.zeros((300, 1000)), items=[0] * 9999)
    holder.texts = np.zeros(40_000, "S1000")
    state = PlainState({"a": Part(holder)})
    tensors[0][151, 77], tensors[1].data[3] = 1, 1
    holder.array[17, 3], holder.items[4321], holder.texts[5] = 1, 1, b"a"
    changed = [attribute for _, attribute in state.changed_attributes()]
    assert sorted(changed) == ["array", "items", "large", "small", "texts"]


def test_objects_of_user_classes_are_saved_up_to_three_levels_deep():
    levels = [Holder(count=0) for _ in range(5)]
    for outer, inner in zip(levels, levels[1:], strict=False):
        outer.items = {"inner": inner}
    state = PlainState({"a": Part(levels[0])}, network=nn.Linear(2, 2))
    for level in levels:
        level.count = 1
    names = [name for name, _ in state.state_dict()["attributes"]]
    assert names == ["a", "a.items.inner", "a.items.inner.items.inner", f"a{3 * '.items.inner'}"]


def test_an_attribute_that_cannot_be_saved_causes_one_warning():
    holder = Holder()
    state = PlainState({"a": Part(holder), "b": Part(object()), "c": Part(Holder)})
    holder.cache, holder.count = list(range(1_000_001)), 3
    with pytest.warns(UserWarning, match=r"the attribute a.cache is neither saved .* more than 256 MB or 1,000,000"):
        assert state.changed_attributes() == {("a", "count"): 3}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert state.changed_attributes() == {("a", "count"): 3}
        attributes = {("a", "x"): ("no", [])}
        state.load_state_dict({"generators": {"a.rng": 3}, "attributes": attributes, "rebound": {}})
    assert not hasattr(holder, "x")


GENERATORS = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "default_rng": lambda: np.random.default_rng(3),
    "mt19937": lambda: np.random.Generator(np.random.MT19937(3)),
    "philox": lambda: np.random.Generator(np.random.Philox(3)),
    "RandomState": lambda: np.random.RandomState(3),
    "random": lambda: random.Random(3),
}


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.random(), generator.gauss(0, 1)]
    return [*generator.integers(9, size=3)] if hasattr(generator, "integers") else [generator.randn()]


@pytest.mark.parametrize("name", GENERATORS)
def test_a_restored_generator_draws_the_same_numbers_as_the_saved_generator(tmp_path, name):
    generator, other = GENERATORS[name](), GENERATORS[name]()
    draw(generator)
    torch.save(get_generator_state(generator), tmp_path / "state")
    set_generator_state(other, torch.load(tmp_path / "state", weights_only=True))
    assert [draw(generator) for _ in range(2)] == [draw(other) for _ in range(2)]


def test_the_search_for_random_generators_omits_the_global_generators():
    """A checkpoint contains the states of the global generators in a separate entry."""
    own = {name: make() for name, make in GENERATORS.items()}
    others = {"system": random.SystemRandom(), "a": random._inst, "b": torch.default_generator, "c": np.random}
    found = find_generators({**own, "list": [1, own["torch"]], "dict": {"x": own["random"]}, **others})
    assert list(found) == [*own, "list.1", "dict.x"]


class Memory(nn.Module):
    """A layer with a memory bank, a cache that is created later, and plain attributes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(16, 8), persistent=False)
        self.register_buffer("mask", torch.ones(8), persistent=False)
        self.register_buffer("cache", None, persistent=False)
        self.position, self.noise = 0, random.Random(4)

    def forward(self, x):
        self.cache = x.detach().mean(0) if self.cache is None else 0.5 * self.cache + x.detach().mean(0)
        x = x + 0.1 * self.bank.mean(0) * self.mask + 0.01 * self.cache + 0.01 * self.noise.random()
        if self.training:
            self.bank[self.position] = x[0].detach()
            self.position = (self.position + 1) % len(self.bank)
        return x


class Remembers(Classifier):
    """A module whose loss depends on attributes, hidden states and generators of every kind."""

    def __init__(self):
        super().__init__()
        self.memory = Memory()
        self.rng, self.hidden, self.scale = np.random.default_rng(3), None, torch.ones(())
        self.losses, self.recent, self.counts = [], deque(maxlen=3), Counter()
        self.validations, self.free = 0, torch.zeros(3, requires_grad=True)
        self.alias = self.memory.bank

    def forward(self, x):
        return self.net(self.memory(x))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        hidden = torch.zeros(3) if self.hidden is None else self.hidden[0]
        logits = self(batch[0]) + hidden + self.free
        self.hidden = (logits.mean(0).detach(), batch_idx)
        self.counts.update(batch[1].tolist())
        self.losses.append(loss.item())
        self.recent.append(float(loss.detach()) * self.rng.standard_normal())
        self.scale = 0.9 * self.scale + 0.1 * loss.detach()
        factor = 1 + 0.01 * (sum(self.recent) + len(self.losses) + self.counts[0] + self.validations)
        return loss * factor + logits.square().mean() * self.scale + self.alias.mean() * logits.mean()

    def on_after_backward(self):
        with torch.no_grad():
            self.free += 0.01

    def on_validation_epoch_end(self):
        self.validations += 1


class Schedules(Callback):
    """A callback without a state_dict() whose attributes determine how it changes the gradients."""

    def __init__(self):
        self.level, self.seen, self.generator = 0.1, {}, torch.Generator().manual_seed(8)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        step = trainer.global_step
        self.level *= 1.1
        self.seen[step % 3] = self.seen.get(step % 3, 0) + self.level
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad += self.level * torch.randn(parameter.shape, generator=self.generator)
            parameter.grad *= 1 + 0.01 * self.seen[step % 3]


class Counted(Callback):
    """A callback with a state_dict(). Its other attributes are not restored."""

    def __init__(self):
        self.batches = self.others = 0

    def on_train_batch_end(self, *_):
        self.batches += 1
        self.others += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


class Data(pl.LightningDataModule):
    """A datamodule whose loader depends on an attribute and a generator."""

    def __init__(self):
        super().__init__()
        self.loads, self.generator = 0, np.random.RandomState(3)

    def train_dataloader(self):
        self.loads += 1
        return make_loader(20, seed=int(self.generator.randint(99)) + self.loads)

    def val_dataloader(self):
        return val_loader()


class Plain:
    """An object with step methods whose attributes change during training."""

    def __init__(self):
        self.net = nn.Sequential(nn.Linear(8, 4), Memory8(), nn.Linear(4, 3))
        self.mean = 0.0

    def training_step(self, batch):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.mean = 0.9 * self.mean + loss.item()
        return loss * self.mean

    def validation_step(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1]) + self.mean

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Memory8(Memory):
    def __init__(self):
        super().__init__()
        self.bank, self.mask = torch.zeros(16, 4), torch.ones(4)


class Computes(Classifier):
    """A module whose layers compute their attribute ``weight`` from parameters in each forward pass."""

    def __init__(self):
        super().__init__()
        spectral, weight = nn.utils.spectral_norm, nn.utils.weight_norm
        pruned = prune.random_unstructured(nn.Linear(8, 3), "weight", 0.5)
        self.net = nn.Sequential(spectral(nn.Linear(8, 8)), weight(nn.Linear(8, 8)), pruned)


RUNS = {
    "computed weights": (Computes, {}),
    "module": (Remembers, {}),
    "validation within an epoch": (Remembers, {"val_check_interval": 2}),
    "accumulation": (Remembers, {"accumulate_grad_batches": 2}),
    "object": (Plain, {}),
    "reload": (Remembers, {"reload_dataloaders_every_n_epochs": 1}),
}


@pytest.mark.filterwarnings("ignore:The number of training batches", "ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_restores_the_attributes_of_user_objects(tmp_path, name):
    make, options = RUNS[name]
    options = {"max_epochs": 3, "val": val_loader, "save_every_n_steps": 1, **options}
    options["train"] = lambda: make_loader(20)
    kills = (2, 5, 7)
    snapshots = Snapshots(tmp_path / "whole", tmp_path, kills)
    callbacks = [Schedules(), Counted(), snapshots]
    whole = fit(tmp_path / "whole", make, callbacks=callbacks, **options)
    for batch in kills:
        root = tmp_path / str(batch)
        if not list(root.rglob("last.ckpt")):
            continue
        again = [Schedules(), Counted()]
        resumed = fit(root, make, seed=9, resume="auto", callbacks=again, **options)
        assert_same_end(whole, resumed)
        assert logs_of(root) == logs_of(tmp_path / "whole")
        assert vars(again[0])["seen"] == callbacks[0].seen
        assert again[1].batches == callbacks[1].batches > again[1].others


@pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:The number of training batches")
@pytest.mark.parametrize("when", ["every_n_train_steps", "every_n_epochs", "validation"])
def test_a_run_resumes_exactly_from_a_checkpoint_saved_in_a_hook(tmp_path, when):
    """The hooks are on_train_batch_end, on_train_epoch_end and on_validation_end."""
    saves = {"every_n_epochs": 1, "save_on_train_epoch_end": when != "validation"}
    saves = {when: 1} if when == "every_n_train_steps" else saves

    def run(folder, **options):
        saver = ModelCheckpoint(folder / "saved", filename="{step}", save_top_k=-1, **saves)
        options = {"max_epochs": 3, "val": val_loader, "val_check_interval": 2, **options}
        options["logger"] = False
        callbacks = [Schedules(), Counted(), saver]
        return fit(folder, Remembers, lambda: make_loader(20), callbacks=callbacks, **options)

    whole = run(tmp_path / "whole")
    paths = sorted((tmp_path / "whole/saved").glob("*.ckpt"))
    assert len(paths) == {"every_n_train_steps": 15, "every_n_epochs": 3, "validation": 6}[when]
    for path in paths[::3]:
        resumed = run(tmp_path / path.stem, resume=path, seed=9)
        assert_same_weights(whole[1], resumed[1])
        assert whole[1].losses == resumed[1].losses


def test_a_datamodule_is_restored_before_its_loaders_are_reloaded(tmp_path):
    def run(root, **arguments):
        pl.seed_everything(arguments.pop("seed", 1), verbose=False)
        options = with_files(root, max_epochs=4, reload_dataloaders_every_n_epochs=2, **arguments.pop("options", {}))
        module, loop = Classifier(), FabricLoop(**options)
        return loop, module, loop.fit(module, datamodule=Data(), **arguments)

    whole = run(tmp_path, options={"save_top_k": -1, "monitor": "val_loss"})
    for path in sorted(tmp_path.rglob("epoch=*.ckpt")):
        resumed = run(tmp_path / path.stem, resume=path, seed=8)
        rows = [table.drop(columns=["time", "waiting"])[-2:].to_csv() for table in (whole[2], resumed[2])]
        assert rows[0] == rows[1]


def test_each_process_restores_its_own_model_attributes_such_as_a_random_generator(tmp_path):
    class PerRank(Remembers):
        def on_train_start(self):
            if not self.losses:
                self.rng = np.random.default_rng(self.global_rank)

        def on_train_end(self):
            self.net[0].bias.data[:2] += torch.tensor([self.rng.random(), sum(self.losses)])
            torch.save(self.net[0].bias.data, f"{self.trainer.default_root_dir}/{self.global_rank}.pt")

    options = {"max_epochs": 2, "save_every_n_steps": 1, "strategy": "ddp_fork", "devices": 2}
    options["train"] = lambda: make_loader(20)
    roots = [tmp_path / "whole", tmp_path / "2"]
    fit(roots[0], PerRank, callbacks=[Snapshots(roots[0], tmp_path, (2,))], **options)
    fit(roots[1], PerRank, resume="auto", seed=9, **options)
    ends = [[torch.load(root / f"{rank}.pt").tolist() for rank in (0, 1)] for root in roots]
    assert ends[0] == ends[1]
    assert ends[0][0] != ends[0][1]
