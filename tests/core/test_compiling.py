"""compile=: the numbers of the step as it is; what keeps the compiler from the whole of it is said once, and what to write."""

import re
import warnings

import pytest
import torch
from clock import DURATION
from modules import Classifier, by_step, make_loader, quiet
from torch import nn

from fabric_template import FabricLoop

EAGER = {"backend": "eager"}  # graphs and guards as ever; only the kernels are PyTorch's own, to the bit

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


@pytest.fixture(autouse=True)
def compiler_as_found():
    yield
    torch._dynamo.reset()  # it compiles one function no more than eight times in a process
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def trained(module, loader, tmp_path=None, **words):
    torch.manual_seed(0)
    files = {} if tmp_path is None else {"enable_checkpointing": True, "default_root_dir": tmp_path}
    loop = FabricLoop(**{**quiet(max_epochs=2), **files, **words})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loop.fit(module, loader, loader)
    return loop, [str(warning.message) for warning in told if str(warning.message).startswith("compile=")]


class Returns(Classifier):
    """Logs nothing: one graph."""

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    validation_step = training_step


@pytest.mark.parametrize(
    "words",
    [{"precision": "bf16-mixed"}, {"strategy": "ddp", "devices": 1}, {"accumulate_grad_batches": 2}, {}],
    ids=["precision", "ddp", "accumulation", "fullgraph"],
)
def test_the_same_bits_and_keys(tmp_path, words):
    """With a scheduler by step and checkpoints, one graph for all of it."""
    found = []
    for compile in (False, EAGER | {"fullgraph": not words}):
        torch.manual_seed(0)
        module = (Returns if not words else Classifier)(by_step)
        loop, told = trained(module, make_loader(), tmp_path / str(bool(compile)), compile=compile, **words)
        file = torch.load(loop.checkpoint_path("last"), weights_only=True)
        found.append((file["state_dict"], file["lr_schedulers"][0]["_last_lr"]))
        assert told == []
    (plain, rates), (compiled, compiled_rates) = found
    assert list(plain) == list(compiled)
    assert all(torch.equal(plain[name], compiled[name]) for name in plain)
    assert rates == compiled_rates
    assert re.search(rf"{DURATION} of that$", loop.ending()["compiled"][0])


class Reads(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if loss > 1000:
            loss = loss * 2
        self.read = loss.item()
        return loss


def test_a_break_is_named(tmp_path):
    torch.manual_seed(0)
    module, plain = Reads(), Reads()
    plain.load_state_dict(module.state_dict())
    _, told = trained(module, make_loader(), compile=EAGER)
    trained(plain, make_loader())
    line = Reads.training_step.__code__.co_firstlineno + 2
    assert told == [
        "compile={'backend': 'eager'}: training_step is not compiled as a whole:"
        f" {__file__}, line {line}, `if loss > 1000:`: a branch depends on a tensor's values (and at line {line + 2})."
        " It runs on, in parts, which is slower; write torch.where(condition, a, b), which computes both"
    ]
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


def test_a_smaller_batch_is_named():
    """... once, though it comes in training and in validation; what is advised helps."""
    _, told = trained(Classifier(), make_loader(38), compile=EAGER)
    assert len(told) == 1
    assert "step was compiled once more" in told[0]
    assert "size mismatch at index 0. expected 4, actual 2; write drop_last=True in the DataLoader" in told[0]
    torch._dynamo.reset()
    assert trained(Classifier(), make_loader(38, drop_last=True), compile=EAGER)[1] == []
    torch._dynamo.reset()
    assert trained(Classifier(), make_loader(38), compile=EAGER | {"dynamic": True})[1] == []


def test_without_a_compiler_it_is_said_what_to_install():
    import torch._inductor.config as inductor

    with (
        inductor.patch({"cpp.cxx": (None, "/nothing/g++")}),
        pytest.raises(
            ValueError, match=r"^compile=True: for the CPU torch needs a C\+\+ compiler, and finds none: install g"
        ),
    ):
        trained(Returns(), make_loader(), compile=True)
