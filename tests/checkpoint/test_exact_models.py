"""Test exact resume with large attributes, attributes that contain weights, and unusual optimizers."""

import csv
import warnings
from collections import deque

import numpy as np
import pytest
import torch
from killed_model import SAVES, KilledError, Model
from modules import make_data
from parameters import once
from runs import TIMES
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler
from torch.utils.data import DataLoader, Dataset

from fabric_template import FabricLoop, MiniLoop
from fabric_template.plain_values import TorchModes

MODES = TorchModes().state_dict()
# torch prints this warning when it loads a quantized tensor.
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")

# Models with a list or dict that contains weights


class Pairs(Model):
    """A model that keeps averages of its weights in a list of pairs (weight, average)."""

    def __init__(self):
        super().__init__()
        self.pairs = [(p, p.detach().clone()) for p in self.net.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, *args):
        for weight, average in self.pairs:
            average.lerp_(weight, 0.1)
            weight.add_(average, alpha=0.01)


# Models and datasets with a large container or array in which a run changes one value


class Large(Model):
    def __init__(self, make):
        super().__init__()
        self.values = make()

    def on_train_batch_end(self, *args):
        self.values[7] = self.values[7] + 1
        self.add(self.values[7].sum() if isinstance(self.values[7], torch.Tensor) else self.values[7])


class ChangesHyperparameters(Model):
    def __init__(self, factor=1.0, sizes=(1, 2)):
        super().__init__()
        self.save_hyperparameters()

    def on_train_batch_end(self, *args):
        self.hparams.factor *= 0.9
        self.add(self.hparams.factor)


class Table(Model):
    def __init__(self):
        super().__init__()
        self.rows = [[0.0] * 100 for _ in range(510)]

    def on_train_batch_end(self, *args):
        self.rows[3][7] += 1
        self.add(self.rows[3][7])


class Sparse(Model):
    """A model that keeps counts in a sparse tensor and in sparse buffers."""

    def __init__(self):
        super().__init__()
        self.counts = torch.zeros(5).to_sparse()
        self.register_buffer("saved", torch.zeros(5).to_sparse())
        self.register_buffer("hidden", torch.zeros(5).to_sparse(), persistent=False)

    def on_train_batch_end(self, *args):
        one = torch.tensor([1.0, 0, 0, 0, 0]).to_sparse()
        self.counts, self.saved = self.counts + one, self.saved + one
        self.hidden = (self.hidden + one).coalesce()
        self.add((self.counts + self.saved + self.hidden).to_dense().sum())


class KeepsInHook(Model):
    """A model with a gradient hook that changes tensors in a dict and in a list in place."""

    def __init__(self):
        super().__init__()
        weight = self.net[0].weight
        sums, count = torch.zeros_like(weight), torch.zeros(())
        self.sums, self.counts = {"of": (sums, 0), "names": {"a", "b"}}, [deque([count], 3), [1.0]]

        def add_mean(gradient):
            sums.mul_(0.9).add_(gradient)
            count.add_(1)
            return gradient + sums / count

        weight.register_hook(add_mean)


class ReplacesInList(Model):
    """A model with two tensors in a list. The first is changed in place, and the second is replaced."""

    def __init__(self):
        super().__init__()
        self.first = torch.zeros(2)
        self.sums = [self.first, self.first]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.first.add_(batch[0][0, :2])
        self.sums[1] = self.sums[1] * 0.9 + self.first
        self.add(self.first.sum() + self.sums[1].sum())


class ChangesTensors(Model):
    """A model that changes the dtype or the shape of buffers and of a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("late", None)
        self.register_buffer("queue", torch.zeros(1, 2))
        self.register_buffer("mean", torch.zeros(2))
        self.scale = torch.nn.Parameter(torch.full((2,), 0.3), requires_grad=False)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        row = batch[0][:1, :2] / 3
        self.late = row.double() if self.late is None else self.late * 0.9 + row
        self.queue = torch.cat([self.queue, row])
        self.mean = self.mean.double() * 0.9 + row[0]
        self.scale.data = self.scale.data.bfloat16()
        # The strides of a weight affect rounding in matrix products.
        weight = self.net[0].weight
        weight.data = weight.data.t().contiguous().t()
        self.add(self.late.sum() + self.queue.sum() + self.mean.sum() + (self.scale / 7).sum())


def quantize(values, scale, zero_point):
    with warnings.catch_warnings():
        # torch warns that quantized tensors are deprecated.
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(values, scale, zero_point, torch.quint8)


class Quantizes(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("levels", quantize(torch.zeros(8), 0.1, 2))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        values = self.levels.dequantize() + batch[0][0].abs()
        self.levels = quantize(values, 0.2, 1)
        self.add(self.levels.dequantize().sum())


class ChangesModes(Model):
    """A model that changes global settings of torch during training."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == 2:
            torch.set_default_dtype(torch.float64)
            torch.set_num_threads(torch.get_num_threads() + 1)
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.set_float32_matmul_precision("medium")
        self.add(torch.rand(2).sum() + torch.get_num_threads() + torch.get_deterministic_debug_mode())
        self.add(torch.get_float32_matmul_precision() == "medium")


class Labeled(torch.Tensor):
    pass


class ReadsSubclass(Model):
    """A model whose images, losses and metrics are instances of a subclass of Tensor."""

    def training_step(self, batch, batch_idx):
        return super().training_step([batch[0].as_subclass(Labeled), batch[1]], batch_idx)

    def validation_step(self, batch, batch_idx):
        return super().validation_step([batch[0].as_subclass(Labeled), batch[1]], batch_idx)


@pytest.mark.parametrize("kind", SAVES)
def test_weights_of_a_subclass_of_tensor_cause_an_error_or_a_warning(tmp_path, kind):
    model = Model()
    model.register_buffer("names", torch.ones(2).as_subclass(Labeled))
    loop = kind(max_epochs=1, default_root_dir=tmp_path, accelerator="cpu")
    error = pytest.raises(ValueError, match="'state_dict' that a checkpoint cannot contain")
    with error if kind is MiniLoop else pytest.warns(match="'state_dict/names'"):
        loop.fit(model, DataLoader(make_data(16), 4))


def make_with_modes():
    TorchModes().load_state_dict(MODES)
    return ChangesModes()


@pytest.fixture(autouse=True)
def _restore_modes():
    yield
    TorchModes().load_state_dict(MODES)


class Order:
    """A sampler that reshuffles its long list of indices in each epoch."""

    def __init__(self):
        self.indices = list(range(12_000))

    def __len__(self):
        return 16

    def __iter__(self):
        order = torch.randperm(len(self.indices)).tolist()
        self.indices = [self.indices[i] for i in order]
        return iter([index % 16 for index in self.indices[:16]])


class CountingDataset(Dataset):
    """A dataset that counts how often it is read, in one element of a large array."""

    def __init__(self):
        self.data, self.counts = make_data(16), np.zeros(1_500_000)

    def __len__(self):
        return 16

    def __getitem__(self, index):
        self.counts[7] += 1
        x, y = self.data[index]
        return x + 0.001 * float(self.counts[7]), y


# Models with unusual optimizers, such as an optimizer that wraps another one


class Wrapper(torch.optim.Optimizer):
    """An optimizer that wraps another optimizer and shares its parameter groups."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.base = torch.optim.Adam(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        return self.base.step(closure)


class ReloadingWrapper(Wrapper):
    """A wrapper that shares the groups again in load_state_dict(), as common SAM implementations do."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.base.param_groups = self.param_groups


class KeepsContainers(torch.optim.Optimizer):
    """An optimizer whose state has lists, dicts, a float64 tensor and a key that is not a parameter."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(sum=torch.zeros_like(parameter, dtype=torch.float64), rule="mean")
                state["nested"] = {"sums": (torch.zeros_like(parameter),), "n": [0]}
            state["nested"]["n"][0] += 1
            for total in (state["sum"], state["nested"]["sums"][0]):
                total.mul_(0.9).add_(parameter.grad * 1.0000001)
            mean = state["sum"] / state["nested"]["n"][0] + state["nested"]["sums"][0]
            scale = self.param_groups[0]["lr"] / self.state["all"]["steps"]
            parameter.sub_(scale * mean if state["rule"] == "mean" else mean)
        return loss


class Optimized(Model):
    """A model with a given optimizer class and a scheduler that changes the learning rate in each step."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def configure_optimizers(self):
        optimizer = self.kind(self.parameters(), lr=0.05)
        scheduler = {"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class KeepsGroup(Model):
    """A model that keeps a parameter group in an attribute and changes the group's learning rate."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.group = optimizer.param_groups[0]
        return optimizer

    def on_train_batch_end(self, *args):
        self.group["lr"] *= 0.9


def shuffled(make):
    return lambda: (make(), DataLoader(make_data(16), 4, shuffle=True))


CASES = {
    "pairs": shuffled(Pairs),
    "dict_of_tensors": shuffled(lambda: Large(lambda: {i: torch.zeros(2) for i in range(3200)})),
    "dict_of_numbers": shuffled(lambda: Large(lambda: dict.fromkeys(range(25_001), 0.0))),
    "long_list": shuffled(lambda: Large(lambda: [0.0] * 50_001)),
    "large_array": shuffled(lambda: Large(lambda: np.zeros(1_500_000))),
    "table": shuffled(Table),
    "sparse": shuffled(Sparse),
    "long_order": lambda: (Model(), DataLoader(make_data(16), 4, sampler=Order())),
    "array_of_dataset": lambda: (Model(), DataLoader(CountingDataset(), 4, shuffle=True)),
    "wrapper": shuffled(lambda: Optimized(Wrapper)),
    "reloading_wrapper": shuffled(lambda: Optimized(ReloadingWrapper)),
    "kept_group": shuffled(KeepsGroup),
    "hyperparameters": shuffled(ChangesHyperparameters),
    "hook": shuffled(KeepsInHook),
    "replaced": shuffled(ReplacesInList),
    "tensors": shuffled(ChangesTensors),
    "quantized": shuffled(Quantizes),
    "modes": shuffled(make_with_modes),
    "subclass": shuffled(ReadsSubclass),
}


def train(kind, root, make, kill_at=None, resume=None):
    model, loader = make()
    model.kill_at = kill_at
    options = {SAVES[kind]: 3, "log_every_n_steps": 1}
    loop = kind(max_epochs=2, default_root_dir=root, accelerator="cpu", name="run", **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Found .* module")
        loop.fit(model, loader, DataLoader(make_data(8), 4), resume=resume)
    files = [loop.log_dir / "metrics.csv"] if kind is MiniLoop else list(root.rglob("metrics.csv"))
    rows = list(csv.DictReader(files[0].read_text().splitlines()))
    return model.state_dict(), [{n: v for n, v in row.items() if n not in TIMES} for row in rows]


def to_plain(value):
    return value.dequantize() if value.is_quantized else value.to_dense()


def assert_same(resumed, whole):
    dense = [{name: to_plain(value) for name, value in weights.items()} for weights, _ in (resumed, whole)]
    kinds = [[(v.dtype, v.layout, v.is_contiguous()) for v in weights.values()] for weights, _ in (resumed, whole)]
    assert kinds[0] == kinds[1]
    assert all(torch.equal(value, dense[1][name]) for name, value in dense[0].items())
    assert resumed[1] == whole[1]


@pytest.mark.parametrize(("name", "kind", "kill_at"), once(CASES, SAVES, [3, 6]))
def test_a_run_resumes_exactly_if_model_attributes_are_large_or_contain_weights(tmp_path, name, kind, kill_at):
    assert_resumes(tmp_path, kind, CASES[name], kill_at)


def test_fabric_loop_restores_float64_tensors_in_lists_and_dicts_of_an_optimizer_state(tmp_path):
    assert_resumes(tmp_path, FabricLoop, shuffled(lambda: Optimized(KeepsContainers)), 3)


def assert_resumes(root, kind, make, kill_at):
    torch.manual_seed(1)
    whole = train(kind, root / "whole", make)
    torch.manual_seed(1)
    with pytest.raises(KilledError):
        train(kind, root / "cut", make, kill_at=kill_at)
    torch.manual_seed(2)
    assert_same(train(kind, root / "cut", make, resume="auto"), whole)


@pytest.mark.parametrize(
    ("name", "writer"), once(["pairs", "table", "hyperparameters", "hook", "tensors", "quantized", "modes"], SAVES)
)
def test_each_loop_restores_the_model_attributes_saved_by_the_other_loop(tmp_path, name, writer):
    def fit(kind, run, epochs, resume=None):
        model, _ = CASES[name]()
        loop = kind(max_epochs=epochs, name=run, default_root_dir=tmp_path, accelerator="cpu")
        loop.fit(model, DataLoader(make_data(16), 4), resume=resume)
        return model.state_dict(), []

    torch.manual_seed(1)
    whole = fit(writer, "whole", 3)
    torch.manual_seed(1)
    fit(writer, "parts", 2)
    reader = MiniLoop if writer is FabricLoop else FabricLoop
    assert_same(fit(reader, "parts", 3, resume="last"), whole)


@pytest.mark.parametrize(("before", "after"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("kind", SAVES)
def test_a_compiled_model_resumes_with_tensors_that_training_changed(tmp_path, kind, before, after):
    def fit(run, epochs, is_compiled, resume=None):
        torch.manual_seed(1)
        model = ChangesTensors()
        network = torch.compile(model, backend="eager") if is_compiled else model
        optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1)
        loop = kind(max_epochs=epochs, name=run, default_root_dir=tmp_path, accelerator="cpu")
        data = DataLoader(make_data(16), 4)
        loop.fit(network, data, resume=resume, optimizer=optimizer, training_step=find_loss)
        return model.state_dict(), []

    whole = fit("whole", 3, False)
    fit("parts", 2, before)
    assert_same(fit("parts", 3, after, resume="last"), whole)


def find_loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


class GroupScheduler(LRScheduler):
    """A scheduler that keeps the parameter groups in an attribute and changes their weight decay."""

    def __init__(self, optimizer):
        self.groups = optimizer.param_groups
        super().__init__(optimizer)

    def get_lr(self):
        self.groups[0]["weight_decay"] = 0.01 * self.last_epoch
        return [0.1]


class GroupSchedulerModel(Model):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [GroupScheduler(optimizer)]


@pytest.mark.parametrize("kind", SAVES)
def test_a_scheduler_whose_state_dict_contains_model_parameters_is_refused(tmp_path, kind):
    """Resuming would replace the parameter groups in the scheduler with copies."""
    with pytest.raises(ValueError, match=r"scheduler: got a state_dict\(\) that contains parameters"):
        train(kind, tmp_path, shuffled(GroupSchedulerModel), kill_at=0)


class LateGenerator(Model):
    """A model that creates a random generator in its first batch."""

    def __init__(self, make):
        super().__init__()
        self.make, self.generator = make, None

    def on_train_batch_end(self, *args):
        self.generator = self.generator or self.make()


@pytest.mark.parametrize("kind", SAVES)
@pytest.mark.parametrize(
    "make", [torch.Generator, np.random.default_rng, np.random.RandomState], ids=lambda make: make.__name__
)
def test_resume_warns_about_a_random_generator_created_during_training(tmp_path, kind, make):
    with pytest.raises(KilledError):
        train(kind, tmp_path, shuffled(lambda: LateGenerator(make)), kill_at=5)
    with pytest.warns(UserWarning, match=r"(created .*generator|generator.* created).* during training"):
        train(kind, tmp_path, shuffled(lambda: LateGenerator(make)), resume="last")
