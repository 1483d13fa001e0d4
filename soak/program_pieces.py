"""Pieces of source code from which random_runs.py assembles programs.

Each dict maps the name of a piece, such as "dropout" in NETS, to its code. All pieces use the following names. ``X`` and ``Y`` are the
samples, ``make_data`` makes the dataset, ``collate`` and ``get_xy`` pack and unpack a batch, ``make_train`` and
``make_val`` make the loaders, ``make_net`` makes the network, ``make_optimizer`` returns the value of
configure_optimizers, and ``loss_of`` is the loss of a batch.
"""

HEADER = """
import random
import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data import BatchSampler
from torch.utils.data import RandomSampler
from torch.utils.data import SequentialSampler
from torch.utils.data import SubsetRandomSampler
from torch.utils.data import WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler
X = torch.randn($samples, 8, generator=torch.Generator().manual_seed(5))
Y = X[:, :3].argmax(1)
"""

# ---- Source code of datasets, which defines make_data()

_POINTS = """
class Points(Dataset):
    def __len__(self):
        return len(X)
    def __getitem__(self, i):
        return X[i]$noise, int(Y[i])
make_data = Points
"""
_OWN_STATE = """
class Points(Dataset):
    def __init__(self):
        $state
    def __len__(self):
        return len(X)
    def __getitem__(self, i):
        $change
        return X[i] + $noise, int(Y[i])
make_data = Points
"""
_STREAM = """
class Points(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for i in range(first, len(X), step):
            yield X[i]$noise, int(Y[i])
make_data = Points
"""


def fill(text, **values):
    """Replace each ``$name`` of a piece with its value."""
    for name, value in values.items():
        text = text.replace(f"${name}", str(value))
    return text


def own_state(state, noise, change="pass"):
    return fill(_OWN_STATE, state=state, noise=noise, change=change)


DATASETS = {
    "tensors": "def make_data():\n    return TensorDataset(X, Y)\n",
    "points": fill(_POINTS, noise=""),
    "torch_noise": fill(_POINTS, noise=" + 0.1 * torch.randn(8)"),
    "numpy_noise": fill(_POINTS, noise=" + 0.1 * np.random.rand()"),
    "python_noise": fill(_POINTS, noise=" + 0.1 * random.random()"),
    "torch_generator": own_state(
        "self.generator = torch.Generator().manual_seed(3)",
        "0.1 * torch.randn(8, generator=self.generator)",
    ),
    "numpy_generator": own_state(
        "self.rng = np.random.default_rng(3)", "0.1 * self.rng.standard_normal()"
    ),
    "python_generator": own_state("self.rng = random.Random(3)", "0.1 * self.rng.random()"),
    "counts_reads": own_state("self.reads = 0", "0.001 * self.reads", "self.reads += 1"),
}
STREAMS = {
    "stream": fill(_STREAM, noise=""),
    "noisy_stream": fill(_STREAM, noise=" + 0.1 * torch.randn(8)"),
    "sized_stream": fill(_STREAM, noise="").replace(
        "    def __iter__", "    def __len__(self):\n        return len(X)\n    def __iter__"
    ),
    "sticky_stream": """
class Points(IterableDataset):
    start = position = 0
    def __iter__(self):
        for i in range(self.start, len(X)):
            self.position = i + 1
            yield X[i], int(Y[i])
    def state_dict(self):
        return {"position": self.position}
    def load_state_dict(self, state):
        self.start = state["position"]
make_data = Points
""",
    "exact_stream": """
class Points(IterableDataset):
    start = position = 0
    def __iter__(self):
        first, self.start = self.start, 0
        for i in range(first, len(X)):
            self.position = i + 1
            yield X[i], int(Y[i])
    def state_dict(self):
        return {"position": self.position}
    def load_state_dict(self, state):
        self.start = self.position = state["position"] % len(X)
make_data = Points
""",
    "shuffling_stream": """
class Points(IterableDataset):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)
    def __iter__(self):
        for i in torch.randperm(len(X), generator=self.generator).tolist():
            yield X[i], int(Y[i])
make_data = Points
""",
}

# ---- Source code of samplers: (definitions, arguments of the DataLoader)

_SEEDED = "torch.Generator().manual_seed(7)"


def own_sampler(init, order, extra=""):
    code = f"""
class Order:
    def __init__(self, data):
        self.num, self.epoch = len(data), 0
        {init}
    def __len__(self):
        return self.num
    def __iter__(self):
        {order}
"""
    return code + extra, "sampler=Order(data)"


_SET_EPOCH = "    def set_epoch(self, epoch):\n        self.epoch = epoch\n"
SAMPLERS = {
    "in_order": ("", "shuffle=False"),
    "shuffle": ("", "shuffle=True"),
    "shuffle_generator": ("", f"shuffle=True, generator={_SEEDED}"),
    "replacement": ("", "sampler=RandomSampler(data, replacement=True, num_samples=22)"),
    "random_generator": ("", f"sampler=RandomSampler(data, generator={_SEEDED})"),
    "weighted": ("", "sampler=WeightedRandomSampler(torch.arange(len(X)) + 1.0, len(X))"),
    "weighted_generator": (
        "",
        f"sampler=WeightedRandomSampler(torch.arange(len(X)) + 1.0, len(X), generator={_SEEDED})",
    ),
    "subset": ("", "sampler=SubsetRandomSampler(range(0, len(X), 2))"),
    "subset_generator": ("", f"sampler=SubsetRandomSampler(range(20), generator={_SEEDED})"),
    "sequential": ("", "sampler=SequentialSampler(data)"),
    "distributed": ("", "sampler=DistributedSampler(data, 1, 0, seed=4)"),
    "own": own_sampler("pass", "return iter(torch.randperm(self.num).tolist())"),
    "own_torch": own_sampler(
        f"self.generator = {_SEEDED}",
        "yield from torch.randperm(self.num, generator=self.generator).tolist()",
    ),
    "own_numpy": own_sampler(
        "self.rng = np.random.default_rng(7)",
        "return iter(self.rng.permutation(self.num).tolist())",
    ),
    "own_python": own_sampler(
        "self.rng = random.Random(7)", "yield from self.rng.sample(range(self.num), self.num)"
    ),
    "own_ranges": own_sampler(
        "self.groups = [[*range(i, min(i + 4, len(data)))] for i in range(0, len(data), 4)]",
        "random.shuffle(self.groups)\n        yield from [i for group in self.groups for i in group]",
        "    def set_epoch(self, epoch):\n        random.shuffle(self.groups)\n",
    ),
    "own_objects": own_sampler(
        "self.draws = [Draw(3), Draw(4)]",
        "yield from self.draws[1].order(self.draws[0].order(range(self.num)))",
        """class Draw:
    def __init__(self, seed):
        self.rng, self.calls = random.Random(seed), 0
    def order(self, items):
        self.calls += 1
        return self.rng.sample(list(items)[self.calls % 3 :] + list(items)[: self.calls % 3], len(items))
""",
    ),
    "own_set_epoch": own_sampler(
        "pass",
        "return iter(np.random.default_rng(self.epoch).permutation(self.num).tolist())",
        _SET_EPOCH,
    ),
}


def own_batch_sampler(init, order, extra=""):
    code = f"""
class Batches:
    def __init__(self, data):
        self.num, self.epoch = len(data), 0
        {init}
    def __len__(self):
        return self.num // 4
    def __iter__(self):
        order = {order}
        for i in range(self.num // 4):
            yield order[4 * i : 4 * i + 4]
"""
    return code + extra, "batch_sampler=Batches(data)"


BATCH_SAMPLERS = {
    "batches": ("", "batch_sampler=BatchSampler(RandomSampler(data), 4, False)"),
    "batches_generator": (
        "",
        f"batch_sampler=BatchSampler(RandomSampler(data, generator={_SEEDED}), 4, True)",
    ),
    "own_batches": own_batch_sampler("pass", "torch.randperm(self.num).tolist()"),
    "own_batches_torch": own_batch_sampler(
        f"self.generator = {_SEEDED}", "torch.randperm(self.num, generator=self.generator).tolist()"
    ),
    "own_batches_numpy": own_batch_sampler(
        "self.rng = np.random.default_rng(7)", "self.rng.permutation(self.num).tolist()"
    ),
    "own_batches_python": own_batch_sampler(
        "self.rng = random.Random(7)", "self.rng.sample(range(self.num), self.num)"
    ),
    "own_batches_set_epoch": own_batch_sampler(
        "pass", "np.random.default_rng(self.epoch).permutation(self.num).tolist()", _SET_EPOCH
    ),
}

# ---- Source code of loaders, which defines make_train(batch_size) or make_val()

_DATALOADER = """
def make_train(batch_size=4):
    data = make_data()
    return $kind(data, $arguments)
"""
LOADERS = {
    "dataloader": fill(_DATALOADER, kind="DataLoader"),
    "stateful": "from torchdata.stateful_dataloader import StatefulDataLoader\n"
    + fill(_DATALOADER, kind="StatefulDataLoader"),
    "tensor_loader": """
from fabric_template import TensorLoader
def make_train(batch_size=4):
    return TensorLoader(X, Y, batch_size=batch_size, shuffle=True)
""",
    "tensor_loader_generator": f"""
from fabric_template import TensorLoader
def make_train(batch_size=4):
    return TensorLoader(X, Y, batch_size=batch_size, shuffle=True, generator={_SEEDED})
""",
    "list_of_batches": """
def make_train(batch_size=4):
    return [(X[i : i + batch_size], Y[i : i + batch_size]) for i in range(0, len(X), batch_size)]
""",
    "own_iterable": """
class Loader:
    def __iter__(self):
        for i in torch.randperm(6).tolist():
            yield X[4 * i : 4 * i + 4], Y[4 * i : 4 * i + 4]
def make_train(batch_size=4):
    return Loader()
""",
    "own_sized_iterable": """
class Loader:
    def __len__(self):
        return 6
    def __iter__(self):
        for i in torch.randperm(6).tolist():
            yield X[4 * i : 4 * i + 4], Y[4 * i : 4 * i + 4]
def make_train(batch_size=4):
    return Loader()
""",
    "dict": """
def make_train(batch_size=4):
    data = make_data()
    short = DataLoader(TensorDataset(X[:10], Y[:10]), batch_size, shuffle=True$collate)
    return {"a": DataLoader(data, $arguments), "b": short}
""",
    "list": """
def make_train(batch_size=4):
    data = make_data()
    short = DataLoader(TensorDataset(X[:10], Y[:10]), batch_size, shuffle=True$collate)
    return [DataLoader(data, $arguments), short]
""",
}
for _mode in ("min_size", "max_size", "max_size_cycle"):
    LOADERS[f"combined_{_mode}"] = f"""
from lightning.pytorch.utilities import CombinedLoader
def make_train(batch_size=4):
    data = make_data()
    short = DataLoader(TensorDataset(X[:10], Y[:10]), batch_size, shuffle=True$collate)
    return CombinedLoader({{"a": DataLoader(data, $arguments), "b": short}}, "{_mode}")
"""
# These loaders create their batches themselves, without a dataset, a sampler or a collate function of this file.
OWN_LOADERS = (
    "tensor_loader", "tensor_loader_generator", "list_of_batches", "own_iterable", "own_sized_iterable",
)  # fmt: skip
SEVERAL_LOADERS = (
    "dict",
    "list",
    "combined_min_size",
    "combined_max_size",
    "combined_max_size_cycle",
)

VAL_LOADERS = {
    "none": "",
    "one": "def make_val():\n    return DataLoader(TensorDataset(X[:10], Y[:10]), 4)\n",
    "shuffled": f"""
def make_val():
    return DataLoader(TensorDataset(X[:10], Y[:10]), 4, shuffle=True, generator={_SEEDED})
""",
    "unseeded": """
def make_val():
    return DataLoader(TensorDataset(X[:10], Y[:10]), 4, shuffle=True)
""",
    "tensor_loader": """
from fabric_template import TensorLoader
def make_val():
    return TensorLoader(X[:10], Y[:10], batch_size=4)
""",
    "two": """
def make_val():
    return [DataLoader(TensorDataset(X[:n], Y[:n]), 4) for n in (10, 6)]
""",
}

# ---- Source code that packs and unpacks batches, which defines collate() and get_xy()

_STACK = """
def stack(samples):
    return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])
"""


def own_batch(make, read, definitions=""):
    collate = f"\ndef collate(samples):\n    x, y = stack(samples)\n    return {make}\n"
    return definitions + _STACK + collate + f"def get_xy(batch):\n    return {read}\n"


BATCHES = {
    "default": "",
    "list": own_batch("[x, y]", "batch"),
    "dict": own_batch('{"x": x, "y": y}', 'batch["x"], batch["y"]'),
    "nested": own_batch('{"in": [{"x": x}], "y": (y,)}', 'batch["in"][0]["x"], batch["y"][0]'),
    "named_tuple": own_batch(
        "Batch(x, y)",
        "batch.x, batch.y",
        "from collections import namedtuple\nBatch = namedtuple('Batch', 'x y')\n",
    ),
    "dataclass": own_batch(
        "Batch(x, y)",
        "batch.x, batch.y",
        "from dataclasses import dataclass\n@dataclass\nclass Batch:\n    x: torch.Tensor\n    y: torch.Tensor\n",
    ),
    "mapping": own_batch(
        "Batch(x=x, y=y)",
        'batch["x"], batch["y"]',
        "from collections import UserDict\nclass Batch(UserDict):\n    pass\n",
    ),
    "packed": own_batch(
        "(nn.utils.rnn.pack_padded_sequence(x[:, None], [1] * len(x), True), y)",
        "nn.utils.rnn.pad_packed_sequence(batch[0], True)[0][:, 0], batch[1]",
    ),
    "sparse": own_batch("(x.to_sparse(), y)", "batch[0].to_dense(), batch[1]"),
    "jagged": own_batch(
        "(torch.nested.nested_tensor(list(x[:, :, None])), y)",
        "batch[0].to_padded_tensor(0.0)[:, :, 0], batch[1]",
    ),
    "graph": own_batch(
        "Graph(x, y)",
        "graph_of(batch)",
        """
class Graph:
    def __init__(self, x, y):
        self.x, self.y, self.num_graphs = x, y, len(y)
    def to(self, device, **options):
        return Graph(self.x.to(device), self.y.to(device))
def graph_of(batch):
    return batch.x, batch.y
""",
    ),
    "object": own_batch(
        "Record(x, y)",
        "(batch.x, batch.y)",
        "class Record:\n    def __init__(self, x, y):\n        self.x, self.y = x, y\n",
    ),
    "text": own_batch(
        '[" ".join(map(str, [*row.tolist(), label.item()])) for row, label in zip(x, y)]',
        "numbers[:, :8], numbers[:, 8].long()",
    ).replace(
        "    return numbers",
        "    numbers = torch.tensor([[float(part) for part in text.split()] for text in batch])\n"
        "    return numbers",
    ),
    "with_text": own_batch('{"names": ["a"] * len(x), "x": x, "y": y}', 'batch["x"], batch["y"]'),
    "with_none": own_batch("(None, x, y)", "batch[1], batch[2]"),
    "zero_dim": own_batch(
        '{"scale": torch.tensor(1.0), "x": x, "y": y}', 'batch["x"] * batch["scale"], batch["y"]'
    ),
}

LOSS = """
def loss_of(net, batch):
    x, y = get_xy(batch)
    return F.cross_entropy(net(x), y)
"""
LOSS_OF_SEVERAL = """
def loss_of(net, batch):
    several = batch.values() if isinstance(batch, dict) else batch
    pairs = [get_xy(part) for part in several if part is not None]
    return sum(F.cross_entropy(net(x), y) for x, y in pairs)
"""
EVAL_LOSS = """
def eval_loss_of(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])
"""

# ---- Source code of networks, which defines make_net()

_MLP = "nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))"


def net_class(init, forward, definitions=""):
    lines = "".join(f"        {line}\n" for line in init.splitlines())
    steps = "".join(f"        {line}\n" for line in forward.splitlines())
    return (
        f"{definitions}class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n{lines}"
        f"    def forward(self, x):\n{steps}make_net = Net\n"
    )


def net_of(code):
    lines = "".join(f"    {line}\n" for line in code.splitlines())
    return f"def make_net():\n{lines}"


NETS = {
    "linear": net_of("return nn.Linear(8, 3)"),
    "mlp": net_of(f"return {_MLP}"),
    "dropout": net_of("return nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.3), nn.Linear(6, 3))"),
    "batchnorm": net_of(
        "return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))"
    ),
    "library_noise": net_class(
        "self.net = nn.Linear(8, 3)",
        "noise = random.random() + np.random.rand() + torch.rand(()).item() if self.training else 0\n"
        "return self.net(x * (1 + 0.1 * noise))",
    ),
    "frozen": net_of(f"net = {_MLP}\nnet[0].requires_grad_(False)\nreturn net"),
    "frozen_batchnorm": net_of(
        "net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))\n"
        "net[1].eval().requires_grad_(False)\nreturn net"
    ),
    "tied": net_class(
        "self.a = nn.Linear(8, 8)\nself.b = nn.Linear(8, 8)\nself.b.weight = self.a.weight\n"
        "self.head = nn.Linear(8, 3)",
        "return self.head(self.b(self.a(x).relu()))",
    ),
    "buffers": net_class(
        "self.net = nn.Linear(8, 3)\nself.register_buffer('mean', torch.zeros(8))",
        "if self.training:\n    self.mean.lerp_(x.detach().mean(0).to(self.mean), 0.2)\n"
        "return self.net(x - self.mean)",
    ),
    "memory_bank": net_class(
        "self.net = nn.Linear(8, 3)\nself.register_buffer('bank', torch.zeros(8), persistent=False)",
        "if self.training:\n    self.bank.lerp_(x.detach().mean(0).to(self.bank), 0.2)\n"
        "return self.net(x - self.bank)",
    ),
    "lazy": net_of("return nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(3))"),
    "lazy_run": net_of(
        "net = nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(3))\nnet(X[:2])\nreturn net"
    ),
    "double": net_class(f"self.net = {_MLP}.double()", "return self.net(x.double())"),
    "bfloat16": net_class(f"self.net = {_MLP}.bfloat16()", "return self.net(x.bfloat16()).float()"),
    "child_module": net_class(f"self.module = {_MLP}", "return self.module(x)"),
    "child_orig_mod": net_class(f"self._orig_mod = {_MLP}", "return self._orig_mod(x)"),
    "compiled": net_of(f'return torch.compile({_MLP}, backend="eager")'),
    "compiled_in_place": net_of(f'net = {_MLP}\nnet.compile(backend="eager")\nreturn net'),
    "compiled_child": net_class(
        f'self.net = torch.compile({_MLP}, backend="eager")', "return self.net(x)"
    ),
    "data_parallel": net_of(f"return nn.DataParallel({_MLP})"),
    "averaged_model": net_class(
        f"self.net = {_MLP}\nself.average = torch.optim.swa_utils.AveragedModel(self.net)\n"
        "self.average.requires_grad_(False)",
        "if self.training:\n    self.average.update_parameters(self.net)\n"
        "return self.net(x) + self.average(x).detach()",
    ),
    "weight_norm": net_of(
        "norm = nn.utils.parametrizations.weight_norm\n"
        "return nn.Sequential(norm(nn.Linear(8, 6)), nn.ReLU(), nn.Linear(6, 3))"
    ),
    "old_weight_norm": net_of(
        "norm = nn.utils.weight_norm\n"
        "return nn.Sequential(norm(nn.Linear(8, 6)), nn.ReLU(), nn.Linear(6, 3))"
    ),
    "spectral_norm": net_of(
        "norm = nn.utils.parametrizations.spectral_norm\n"
        "return nn.Sequential(norm(nn.Linear(8, 6)), nn.ReLU(), nn.Linear(6, 3))"
    ),
    "lora": net_class(
        "self.base = nn.Linear(8, 3).requires_grad_(False)\n"
        "self.down = nn.Parameter(torch.randn(8, 2) * 0.1)\nself.up = nn.Parameter(torch.zeros(2, 3))",
        "return self.base(x) + x @ self.down @ self.up",
    ),
    "hidden_state": net_class(
        "self.net = nn.Linear(8, 3)\nself.hidden = torch.zeros(3)",
        "out = self.net(x) + 0.5 * self.hidden\n"
        "if self.training:\n    self.hidden = out.detach().mean(0)\nreturn out",
    ),
    "running_mean": net_class(
        "self.net, self.mean, self.seen = nn.Linear(8, 3), 0.0, []",
        "if self.training:\n    self.mean = 0.9 * self.mean + 0.1 * float(x.mean())\n"
        "    self.seen = [*self.seen, self.mean][-3:]\nreturn self.net(x - sum(self.seen))",
    ),
    "eval_mode": net_of(
        "net = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.3), nn.Linear(6, 3))\nreturn net.eval()"
    ),
    "orthogonal": net_of(
        "orthogonal = nn.utils.parametrizations.orthogonal\n"
        "return nn.Sequential(orthogonal(nn.Linear(8, 6)), nn.ReLU(), nn.Linear(6, 3))"
    ),
    "added_lora": net_of(
        "net = nn.Linear(8, 3).requires_grad_(False)\n"
        "net.register_parameter('down', nn.Parameter(torch.randn(2, 8) * 0.1))\n"
        "net.register_parameter('up', nn.Parameter(torch.zeros(3, 2)))\n"
        "net.forward = lambda x: F.linear(x, net.weight + net.up @ net.down, net.bias)\nreturn net"
    ),
    "module_list": net_class(
        "self.nets = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 3)])",
        "return self.nets[1](self.nets[0](x).relu())",
    ),
    "recurrent": net_class(
        "self.rnn, self.head = nn.GRU(2, 6, batch_first=True), nn.Linear(6, 3)",
        "return self.head(self.rnn(x.view(len(x), 4, 2))[0][:, -1])",
    ),
    "outside_parameters": "OUTSIDE = nn.Parameter(torch.ones(3))\n"
    + net_class("self.net = nn.Linear(8, 3)", "return self.net(x) * OUTSIDE"),
    "sparse_embedding": net_class(
        "self.table = nn.Embedding(8, 3, sparse=True)", "return self.table(x.argmax(1))"
    ),
    "deque": net_class(
        "self.net, self.seen = nn.Linear(8, 3), __import__('collections').deque(maxlen=3)",
        "if self.training:\n    self.seen.append(x.detach().mean(0))\n"
        "return self.net(x - sum(self.seen) / max(1, len(self.seen)))",
    ),
    "array": net_class(
        "self.net, self.mean = nn.Linear(8, 3), np.zeros(8, np.float32)",
        "if self.training:\n    self.mean += 0.2 * (x.detach().mean(0).float().cpu().numpy() - self.mean)\n"
        "return self.net(x - torch.from_numpy(self.mean.copy()))",
    ),
    "counts": net_class(
        "self.net, self.counts = nn.Linear(8, 3), __import__('collections').Counter()",
        "if self.training:\n    self.counts.update(x.argmax(1).tolist())\n"
        "return self.net(x) * (1 + 0.01 * self.counts[1])",
    ),
    "recurrent_state": net_class(
        "self.rnn, self.head, self.state = nn.LSTMCell(8, 6), nn.Linear(6, 3), None",
        "if not self.training:\n    return self.head(self.rnn(x)[0])\n"
        "h, c = self.state or (x.new_zeros(1, 6), x.new_zeros(1, 6))\n"
        "h, c = self.rnn(x, (h.expand(len(x), 6), c.expand(len(x), 6)))\n"
        "self.state = h.detach().mean(0, keepdim=True), c.detach().mean(0, keepdim=True)\nreturn self.head(h)",
    ),
    "cumulative_batchnorm": net_of(
        "return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3))"
    ),
    "random_activation": net_of(
        "return nn.Sequential(nn.Linear(8, 6), nn.RReLU(), nn.Linear(6, 3))"
    ),
    "teacher": net_class(
        "self.net = nn.Linear(8, 3)\nself.teacher = __import__('copy').deepcopy(self.net).requires_grad_(False)",
        "out = self.net(x)\nif self.training:\n    with torch.no_grad():\n"
        "        for a, b in zip(self.teacher.parameters(), self.net.parameters()):\n            a.lerp_(b, 0.1)\n"
        "return out + 0.1 * (out - self.teacher(x)).pow(2)",
    ),
    "pruned": net_of(
        f"net = {_MLP}\n__import__('torch.nn.utils.prune').nn.utils.prune.l1_unstructured(net[0], 'weight', 0.3)\nreturn net"
    ),
    "complex": net_class(
        "self.net, self.phase = nn.Linear(8, 3), nn.Parameter(torch.ones(3, dtype=torch.complex64))",
        "return (self.net(x) * self.phase).abs()",
    ),
    "recomputed": net_class(
        "self.net, self.head = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.3)), nn.Linear(6, 3)",
        "from torch.utils.checkpoint import checkpoint\n"
        "return self.head(checkpoint(self.net, x, use_reentrant=False))",
    ),
    "scripted": net_of(f"return torch.jit.script({_MLP})"),
    "schedule": net_class(
        "self.net, self.calls, self.beta = nn.Linear(8, 3), 0, 0.0",
        "if self.training:\n    self.calls += 1\n    self.beta = min(1.0, self.calls / 20)\n"
        "return self.net(x) * (1 + self.beta)",
    ),
    "image_pool": net_class(
        "self.net, self.pools = nn.Linear(8, 3), {'a': Pool(3)}",
        "out = self.net(x)\nreturn out + self.pools['a'].swap(out.detach().mean(0)) if self.training else out",
        """class Pool:
    def __init__(self, size):
        self.size, self.values, self.rng = size, [], random.Random(3)
    def swap(self, value):
        self.values.append(value)
        return self.values.pop(self.rng.randrange(self.size)) if len(self.values) > self.size else 0
""",
    ),
    "slow_weights": net_class(
        "self.net = nn.Linear(8, 3)\nself.slow = Slow(self.net)",
        "if self.training:\n    self.slow.update()\nreturn self.net(x) + self.slow.output(x)",
        """class Slow:
    def __init__(self, net):
        copy = __import__("copy").deepcopy
        self.weights, self.copies = list(net.parameters()), list(copy(net).parameters())
        self.teacher, self.others = copy(net).requires_grad_(False), [copy(net).requires_grad_(False)]
    @torch.no_grad()
    def update(self):
        for nets in (self.copies, self.teacher.parameters(), self.others[0].parameters()):
            for slow, weight in zip(nets, self.weights):
                slow.lerp_(weight, 0.2)
    def output(self, x):
        scale = self.copies[1].detach().mean()
        return 0.1 * (self.teacher(x) + self.others[0](x)) + scale
""",
    ),
    "own_objects": net_class(
        "self.net, self.rates, self.meters = nn.Linear(8, 3), Rates(), {'x': Meter()}\n"
        "self.phase, self.statistics = Phase.FIRST, []",
        "if self.training:\n    self.rates.beta += 0.1\n    self.phase = Phase.SECOND\n"
        "    self.meters['x'].total += float(x.mean())\n"
        "    self.statistics = [*self.statistics, Statistics(float(x.std()), self.phase)][-3:]\n"
        "scale = sum(item.mean * item.phase.value for item in self.statistics)\n"
        "return self.net(x) * (1 + self.rates.beta + self.meters['x'].total + scale)",
        """import enum
from collections import namedtuple
from dataclasses import dataclass
Statistics = namedtuple("Statistics", "mean phase")
class Phase(enum.Enum):
    FIRST, SECOND = 1.0, 0.5
@dataclass
class Rates:
    beta: float = 0.0
class Meter:
    total = 0.0
""",
    ),
    "parameter_lists": net_class(
        "self.rows = nn.ParameterList([torch.randn(8) * 0.1 for _ in range(3)])\n"
        "self.scales = nn.ParameterDict({'a': torch.ones(3)})",
        "return torch.stack([x @ row for row in self.rows], 1) * self.scales['a']",
    ),
}
for _name, _value in {
    "dict": "{'scale': 2.0, 'calls': self.calls}",
    "int": "self.calls",
    "tensor": "torch.tensor(self.calls)",
    "text": "str(self.calls)",
    "bytes": "bytes([self.calls % 256])",
    "tuple": "(self.calls, 'calls')",
    "numpy": "np.int64(self.calls)",
}.items():
    NETS[f"extra_state_{_name}"] = net_class(
        "self.net, self.calls = nn.Linear(8, 3), 0",
        "self.calls += self.training\nreturn self.net(x) * (1 + 0.01 * self.calls)",
    ).replace(
        "    def forward",
        f"    def get_extra_state(self):\n        return {_value}\n"
        "    def set_extra_state(self, state):\n"
        "        state = state['calls'] if isinstance(state, dict) else state\n"
        "        state = state[0] if isinstance(state, (tuple, bytes)) else state\n"
        "        self.calls = int(state)\n    def forward",
    )

# ---- Source code of models: step functions, step methods or a LightningModule, and the function build()

# In these templates, $log stands for the line that logs, and $returned for the value that the training step returns.
STYLES = {
    "functions": """
def training_step(net, batch):
    loss = loss_of(net, batch)
    return $returned
def validation_step(net, batch):
    return eval_loss_of(net, batch)
def build():
    net = make_net()
    fit = dict(optimizer=make_optimizer(net), training_step=training_step$validation)
    return dict(model=net, train=make_train(), val=$val, fit=fit, options=dict($options))
""",
    "module": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_net()
    def training_step(self, batch, batch_idx):
        loss = loss_of(self.net, batch)
        return $returned
    def validation_step(self, batch):
        return eval_loss_of(self.net, batch)
    def configure_optimizers(self):
        return make_optimizer(self)
def build():
    return dict(model=Model(), train=make_train(), val=$val, options=dict($options))
""",
    "lightning": """
class Model(pl.LightningModule):
    def __init__(self, **hparams):
        super().__init__()
        self.save_hyperparameters()
        self.net = make_net()
    def training_step(self, batch, batch_idx):
        loss = loss_of(self.net, batch)
        $log
        return $returned
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", eval_loss_of(self.net, batch))
    def configure_optimizers(self):
        return make_optimizer(self)
def build():
    model = Model($hyperparameters)
    return dict(model=model, train=make_train(), val=$val, callbacks=[$callbacks],
                options=dict($options))
""",
}
_LIGHTNING = STYLES["lightning"]
_STEP = "        $log\n        return $returned\n"
STYLES["lightning_manual"] = _LIGHTNING.replace(
    "        self.net = ", "        self.automatic_optimization = False\n        self.net = "
).replace(
    _STEP,
    """        optimizer = self.optimizers()
        self.manual_backward(loss / 2)
        $log
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
""",
)
STYLES["lightning_two_optimizers"] = (
    _LIGHTNING.replace(
        "        self.net = ",
        "        self.automatic_optimization, self.other = False, nn.Linear(8, 3)\n        self.net = ",
    )
    .replace(
        "        loss = loss_of(self.net, batch)\n" + _STEP,
        """        for optimizer, net in zip(self.optimizers(), (self.net, self.other)):
            self.toggle_optimizer(optimizer)
            loss = loss_of(net, batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        $log
    def on_train_epoch_end(self):
        self.lr_schedulers().step()
""",
    )
    .replace(
        "return make_optimizer(self)",
        """first, second = make_optimizer(self.net), torch.optim.Adam(self.other.parameters(), 0.02)
        return [first, second], [lrs.ExponentialLR(second, 0.9)]""",
    )
)
STYLES["lightning_buffers"] = """
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.register_buffer("counts", torch.zeros(3))
    def training_step(self, batch, batch_idx):
        x, y = get_xy(batch)
        self.counts += torch.bincount(y, minlength=3) * x.mean()
        self.log("size", self.counts.sum())
    def configure_optimizers(self):
        return None
def build():
    return dict(model=Model(), train=make_train(), val=None, callbacks=[$callbacks],
                options=dict($options))
"""
STYLES["object"] = (
    STYLES["module"]
    .replace("(nn.Module)", "")
    .replace("        super().__init__()\n", "")
    .replace("make_optimizer(self)", "make_optimizer(self.net)")
)
for _kind, _nets, _first, _second, _all in (
    ("list", "[make_net(), nn.Linear(3, 3)]", "0", "1", "*self.nets"),
    ("dict", '{"a": make_net(), "b": nn.Linear(3, 3)}', '"a"', '"b"', "*self.nets.values()"),
):
    STYLES[f"object_{_kind}"] = (
        STYLES["object"]
        .replace("self.net = make_net()", f"self.nets = {_nets}")
        .replace("make_optimizer(self.net)", f"make_optimizer({_all})")
        .replace(
            "    def training_step",
            f"    def net(self, x):\n        return self.nets[{_second}](self.nets[{_first}](x))\n"
            "    def training_step",
        )
    )

# Source code of a LightningModule's hooks, and the lines of __init__ that some hooks need
HOOKS = {
    "freezes": """
    def on_train_epoch_start(self):
        for q in next(m for m in self.net.modules() if isinstance(m, nn.Linear)).parameters():
            q.requires_grad = self.current_epoch > 0
""",
    "freezes_once": """
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            next(m for m in self.net.modules() if isinstance(m, nn.Linear)).requires_grad_(False)
            for part in self.net.modules():
                if isinstance(part, nn.Dropout):
                    part.eval()
""",
    "adds_group": """
    def on_train_epoch_start(self):
        if self.current_epoch == 1 and len(self.trainer.optimizers[0].param_groups) == 1:
            self.trainer.optimizers[0].add_param_group({"params": [self.extra], "lr": 0.01})
""",
    "ends_epoch": """
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 4 else None
""",
    "clips": """
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, 0.2, "norm")
""",
    "warms_up": """
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1, (self.global_step + 1) / 5)
        optimizer.step(closure=optimizer_closure)
""",
    "clears_gradients": """
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)
""",
    "averages": """
    def setup(self, stage):
        self.average = torch.optim.swa_utils.AveragedModel(self.net)
        self.average.requires_grad_(False)
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.update_parameters(self.net)
""",
    "averages_late": """
    def on_fit_start(self):
        self.average = torch.optim.swa_utils.AveragedModel(self.net)
        self.average.requires_grad_(False)
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.update_parameters(self.net)
""",
    "saves_own": """
    def on_train_batch_start(self, batch, batch_idx):
        self.calls += 1
        self.net.requires_grad_(self.calls % 3 != 0)
        next(self.net.parameters()).requires_grad_(True)
    def on_save_checkpoint(self, checkpoint):
        checkpoint["calls"] = self.calls
    def on_load_checkpoint(self, checkpoint):
        self.calls = checkpoint["calls"]
""",
    "plain_state": """
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.calls, self.seen = self.calls + 1, [*self.seen, self.calls][-3:]
        self.hidden = 0.5 * self.hidden + self.calls
        with torch.no_grad():
            next(q for q in self.parameters() if q.requires_grad).add_(0.001 * self.hidden.mean() / sum(self.seen))
""",
    "own_generators": """
    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            noise = self.rng.random() + torch.rand((), generator=self.generator)
            next(q for q in self.parameters() if q.requires_grad).add_(0.001 * noise)
""",
    "own_loader": """
    def train_dataloader(self):
        return make_train()
""",
    "keeps_outputs": """
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if outputs and outputs["loss"] is not None:
            self.outputs.append(outputs["loss"])
    def on_train_epoch_end(self):
        self.log("mean_output", sum(self.outputs) / max(1, len(self.outputs)))
        with torch.no_grad():
            next(q for q in self.parameters() if q.requires_grad).mul_(1 - 0.001 * len(self.outputs))
        self.outputs.clear()
""",
    "adds_noise": """
    def on_before_optimizer_step(self, optimizer):
        for q in self.parameters():
            if q.grad is not None and not q.grad.is_sparse:
                q.grad.add_(0.01 * torch.randn_like(q.grad) * random.random())
""",
    "follows_best": """
    def on_validation_epoch_end(self):
        value = float(self.trainer.callback_metrics.get("val_loss", 0.0))
        self.waited = 0 if value < self.best - 0.2 else self.waited + 1
        self.best = min(value, self.best)
        if self.waited and not self.trainer.sanity_checking:
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] = group["lr"] * 0.9
""",
    "follows_counters": """
    def on_train_batch_start(self, batch, batch_idx):
        with torch.no_grad():
            move = 1e-3 * self.global_step + 1e-2 * self.current_epoch + 1e-4 * batch_idx
            next(q for q in self.parameters() if q.requires_grad).add_(move)
""",
    "draws_orders": """
    def on_train_epoch_start(self):
        random.shuffle(self.order)
        self.scale = np.random.permutation(3)
    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            move = 1e-3 * (self.order[0] + int(self.scale[1]))
            next(q for q in self.parameters() if q.requires_grad).add_(move)
""",
    "restarts_optimizer": """
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.trainer.optimizers[0].state.clear()
""",
    "decays_weights": """
    def on_train_epoch_start(self):
        for group in self.trainer.optimizers[0].param_groups:
            group["weight_decay"] = 0.01 * (1 + self.current_epoch)
""",
    "stops_itself": """
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step >= 8:
            self.trainer.should_stop = True
""",
    "captures_activations": """
    def on_train_batch_end(self, outputs, batch, batch_idx):
        del self.seen[:-3]
        with torch.no_grad():
            next(q for q in self.parameters() if q.requires_grad).add_(0.001 * sum(self.seen))
""",
}
HOOK_ATTRIBUTES = {
    "adds_group": "self.extra = nn.Parameter(torch.ones(3))",
    "saves_own": "self.calls = 0",
    "plain_state": "self.calls, self.hidden, self.seen = 0, torch.zeros(3), []",
    "own_generators": "self.rng, self.generator = np.random.default_rng(3), torch.Generator().manual_seed(3)",
    "keeps_outputs": "self.outputs = []",
    "follows_best": "self.best, self.waited = float('inf'), 0",
    "draws_orders": "self.order = [0, 1, 2]",
    "captures_activations": "self.seen = []; self.net.register_forward_hook(lambda m, i, o: self.seen.append(float(o.detach().float().mean())))",
}

RETURNED = {
    "loss": "loss",
    "dict": '{"loss": loss, "size": 2.0}',
    "skips": "None if batch_idx % 4 == 3 else loss",
}
LOGS = {
    "nothing": "pass",
    "step": 'self.log("train_loss", loss.detach(), on_step=True, on_epoch=False)',
    "epoch": 'self.log("train_loss", loss.detach(), on_step=False, on_epoch=True)',
    "both": 'self.log("train_loss", loss.detach(), on_step=True, on_epoch=True)',
}
LOGS["reduced"] = 'self.log("worst", loss.detach(), on_step=False, on_epoch=True, reduce_fx="max")'
LOGS["dict"] = (
    'self.log_dict({"a": loss.detach(), "b": 2.0}, prog_bar=True, on_epoch=True, batch_size=3)'
)
_ACCURACY = 'torchmetrics.Accuracy("multiclass", num_classes=3)'
_GUESS = "torch.arange(12).view(4, 3).sin().softmax(1) * (batch_idx + 1), torch.arange(4) % 3"
_LOG_OBJECT = '; self.log("metric", self.metric, on_step=False, on_epoch=True)'
_LOG_VALUE = 'self.log("metric", self.metric($values), on_step=False, on_epoch=True)'
_LOG_DICT = "self.log_dict(self.metric($values), on_step=False, on_epoch=True)"
_SQUARES = "torch.arange(4.0) * (batch_idx + 1), torch.arange(4.0).sin()"
_NUMBER = "torch.tensor(1.0 + batch_idx).sin()"
# Source code of torchmetrics objects: (constructor, line of the training step that updates and logs the object).
METRICS = {
    "accuracy": (_ACCURACY, f"self.metric({_GUESS}){_LOG_OBJECT}"),
    "accuracy_value": (_ACCURACY, fill(_LOG_VALUE, values=_GUESS)),
    "auroc": (
        'torchmetrics.AUROC("multiclass", num_classes=3)',
        f"self.metric.update({_GUESS}){_LOG_OBJECT}",
    ),
    "mean": ("torchmetrics.MeanMetric()", f"self.metric.update({_NUMBER}){_LOG_OBJECT}"),
    "max": ("torchmetrics.MaxMetric()", fill(_LOG_VALUE, values=_NUMBER)),
    "running": (
        "torchmetrics.RunningMean(3)",
        f"self.metric.update({_NUMBER}){_LOG_OBJECT}",
    ),
    "squared_error": ("torchmetrics.MeanSquaredError()", f"self.metric({_SQUARES}){_LOG_OBJECT}"),
    "pearson": ("torchmetrics.PearsonCorrCoef()", f"self.metric.update({_SQUARES}){_LOG_OBJECT}"),
    "spearman": ("torchmetrics.SpearmanCorrCoef()", f"self.metric.update({_SQUARES}){_LOG_OBJECT}"),
    "sum_of_metrics": (f"{_ACCURACY} + 1", f"self.metric.update({_GUESS}){_LOG_OBJECT}"),
    "collection": (
        f'torchmetrics.MetricCollection({{"a": {_ACCURACY}, "b": {_ACCURACY}}})',
        f"self.metric.update({_GUESS}); self.log_dict(self.metric, on_step=False, on_epoch=True)",
    ),
    "classwise": (
        f"torchmetrics.wrappers.ClasswiseWrapper({_ACCURACY[:-1]}, average=None))",
        fill(_LOG_DICT, values=_GUESS),
    ),
    "min_max": (f"torchmetrics.wrappers.MinMaxMetric({_ACCURACY})", fill(_LOG_DICT, values=_GUESS)),
    "bootstrap": (
        f"torchmetrics.wrappers.BootStrapper({_ACCURACY}, num_bootstraps=3)",
        fill(_LOG_DICT, values=_GUESS),
    ),
    "silent": (_ACCURACY, f"self.metric.update({_GUESS})"),
}
HYPERPARAMETERS = {
    "plain": "lr=0.1, name='a', sizes=[8, 6], flag=True, nothing=None",
    "numpy": "lr=np.float64(0.1), size=np.int64(3), table=np.zeros(2)",
    "class": "act=nn.ReLU, kind=Dataset",
    "function": "act=F.relu, own=loss_of",
    "lambda": "act=lambda x: x",
    "enum": "interval=Interval.STEP, names={Interval.EPOCH: 1}",
    "nested": "config=Settings.Sizes(3), kind=Settings.Kind.WIDE, table=Settings.Table(a=1), made=Settings.Table",
    "path": "folder=__import__('pathlib').Path('data')",
    "dtype": "dtype=torch.float32, device=torch.device('cpu')",
    "tuple": "sizes=(8, 6, 3), pairs=[(1, 2)]",
    "int_keys": "names={1: 'a', 2: {3: 'b'}}",
    "module": "backbone=nn.Linear(2, 2)",
    "tensor": "weights=torch.ones(3)",
    "method": "act=nn.Linear(2, 2).forward",
    "set": "names={1, 2}, frozen=frozenset({'a'})",
    "generator": "rng=np.random.default_rng(1), chance=random.Random(1)",
}

HYPERPARAMETER_CLASSES = {
    "enum": """
import enum
class Interval(enum.Enum):
    STEP, EPOCH = 1, 2
""",
    "nested": """
import enum
from dataclasses import dataclass
class Settings:
    @dataclass
    class Sizes:
        width: int
    class Kind(enum.Enum):
        WIDE, DEEP = 1, 2
    class Table(dict):
        pass
""",
}

# ---- Source code of optimizers, whose parameters are in the variable p, and of schedulers

OPTIMIZERS = {
    "SGD": "torch.optim.SGD(p, lr=0.05)",
    "SGD_nesterov": "torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "SGD_fused": "torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True)",
    "SGD_numpy": "torch.optim.SGD(p, lr=np.float64(0.05), momentum=np.float32(0.9))",
    "SGD_groups": 'torch.optim.SGD([{"params": p[:1], "lr": 0.1}, {"params": p[1:]}], lr=0.02)',
    "Adam": "torch.optim.Adam(p, lr=0.02)",
    "Adam_amsgrad": "torch.optim.Adam(p, lr=0.02, amsgrad=True)",
    "Adam_fused": "torch.optim.Adam(p, lr=0.02, fused=True)",
    "Adam_foreach": "torch.optim.Adam(p, lr=0.02, foreach=True)",
    "Adam_tensor": "torch.optim.Adam(p, lr=torch.tensor(0.02), foreach=False)",
    "Adam_numpy": "torch.optim.Adam(p, lr=np.float32(0.02), betas=(np.float64(0.9), 0.99))",
    "AdamW": "torch.optim.AdamW(p, lr=0.02, weight_decay=0.1)",
    "AdamW_groups": 'torch.optim.AdamW([{"params": p[:1], "lr": 0.1}, {"params": p[1:]}], lr=0.02)',
    "Adamax": "torch.optim.Adamax(p, lr=0.02)",
    "NAdam": "torch.optim.NAdam(p, lr=0.02)",
    "RAdam": "torch.optim.RAdam(p, lr=0.02)",
    "Adadelta": "torch.optim.Adadelta(p, lr=0.5)",
    "Adafactor": "torch.optim.Adafactor(p, lr=0.02)",
    "Adagrad": "torch.optim.Adagrad(p, lr=0.05)",
    "ASGD": "torch.optim.ASGD(p, lr=0.05, t0=2)",
    "LBFGS": "torch.optim.LBFGS(p, lr=0.1, max_iter=3)",
    "Muon": "torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.02)",
    "RMSprop": "torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True)",
    "Rprop": "torch.optim.Rprop(p, lr=0.01)",
    "SparseAdam": "torch.optim.SparseAdam(p, lr=0.02)",
    "own": "Own(p, lr=0.05)",
    "SAM": "SAM(p, torch.optim.SGD(p, lr=0.05))",
}
OPTIMIZER_CLASSES = {
    "own": """
class Own(torch.optim.Optimizer):
    def __init__(self, p, lr):
        super().__init__(p, {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for q in group["params"]:
                if q.grad is not None:
                    state = self.state[q]
                    state["calls"] = state.get("calls", 0) + 1
                    q.add_(q.grad.sign(), alpha=-group["lr"] / state["calls"])
        return loss
""",
    "SAM": """
class SAM(torch.optim.SGD):
    def __init__(self, p, base):
        super().__init__(p, lr=0.05, momentum=0.9)
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        moves = [(q, 0.05 * q.grad.sign()) for g in self.param_groups for q in g["params"]]
        with torch.no_grad():
            [q.add_(move) for q, move in moves]
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            [q.sub_(move) for q, move in moves]
        super().step()
        return loss
""",
}
SCHEDULERS = {
    "none": None,
    "LambdaLR": "lrs.LambdaLR(optimizer, lambda step: 0.95**step)",
    "LambdaLR_numpy": "lrs.LambdaLR(optimizer, lambda step: np.exp(-0.1 * step))",
    "LambdaLR_tensor": "lrs.LambdaLR(optimizer, lambda step: torch.tensor(0.95) ** step)",
    "MultiplicativeLR": "lrs.MultiplicativeLR(optimizer, lambda step: 0.95)",
    "StepLR": "lrs.StepLR(optimizer, 2, 0.7)",
    "StepLR_numpy": "lrs.StepLR(optimizer, np.int64(2), np.float64(0.7))",
    "MultiStepLR": "lrs.MultiStepLR(optimizer, [1, 4, 9], 0.7)",
    "ConstantLR": "lrs.ConstantLR(optimizer, 0.5, total_iters=3)",
    "LinearLR": "lrs.LinearLR(optimizer, 0.5, total_iters=5)",
    "ExponentialLR": "lrs.ExponentialLR(optimizer, 0.9)",
    "PolynomialLR": "lrs.PolynomialLR(optimizer, 20, 2.0)",
    "CosineAnnealingLR": "lrs.CosineAnnealingLR(optimizer, 7)",
    "CosineAnnealingWarmRestarts": "lrs.CosineAnnealingWarmRestarts(optimizer, 3, 2)",
    "CyclicLR": "lrs.CyclicLR(optimizer, 0.01, 0.05, 3, cycle_momentum=False)",
    "OneCycleLR": "lrs.OneCycleLR(optimizer, 0.05, total_steps=200, cycle_momentum=False)",
    "ReduceLROnPlateau": "lrs.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)",
    "SequentialLR": "lrs.SequentialLR(optimizer, [lrs.LinearLR(optimizer, 0.5),"
    " lrs.ExponentialLR(optimizer, 0.9)], [3])",
    "ChainedScheduler": "lrs.ChainedScheduler([lrs.LinearLR(optimizer, 0.5),"
    " lrs.ExponentialLR(optimizer, 0.9)], optimizer=optimizer)",
    "SWALR": "torch.optim.swa_utils.SWALR(optimizer, 0.01, anneal_epochs=3)",
}
MAKE_OPTIMIZER = """
def make_optimizer(*nets):
    p = [q for net in nets for q in net.parameters() if q.requires_grad]$outside
    optimizer = $optimizer
    $result
"""
CALLBACKS = {
    "early_stopping": 'pl.callbacks.EarlyStopping("$monitor", patience=1, min_delta=0.3, strict=False)',
    "accumulation": "pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})",
    "swa": "pl.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=2)",
    "ema": "pl.callbacks.EMAWeightAveraging(decay=0.8)",
    "averages": "pl.callbacks.WeightAveraging()",
    "rates": 'pl.callbacks.LearningRateMonitor("step")',
    "model_checkpoint": "pl.callbacks.ModelCheckpoint(save_last=True, every_n_train_steps=3)",
    "best_checkpoint": 'pl.callbacks.ModelCheckpoint(monitor="$monitor", save_top_k=2)',
    "timer": 'pl.callbacks.Timer({"hours": 2})',
    "plain_state": "Moves()",
    "counter": "Counter()",
    "unfreezes": "Unfreezes()",
    "early_stopping_in_training": (
        'pl.callbacks.EarlyStopping("$monitor", patience=0, min_delta=0.2, check_on_train_epoch_end=True,'
        " strict=False)"
    ),
}
CALLBACK_CLASSES = {
    "unfreezes": """
class Unfreezes(pl.callbacks.BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(next(m for m in module.net.modules() if isinstance(m, nn.Linear)))
    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            layer = next(m for m in module.net.modules() if isinstance(m, nn.Linear))
            self.unfreeze_and_add_param_group(layer, optimizer, lr=0.01)
""",
    "plain_state": """
class Moves(pl.Callback):
    moves = 0
    def on_train_batch_end(self, trainer, module, *args):
        self.moves += 1
        with torch.no_grad():
            next(q for q in module.parameters() if q.requires_grad).add_(0.001 * self.moves)
""",
    "counter": """
class Counter(pl.Callback):
    calls = 0
    def on_train_batch_end(self, trainer, module, *args):
        self.calls += 1
        with torch.no_grad():
            next(q for q in module.parameters() if q.requires_grad).add_(0.001 * self.calls)
    def state_dict(self):
        return {"calls": self.calls}
    def load_state_dict(self, state):
        self.calls = state["calls"]
""",
}
