"""compile=: the same numbers as without it, and an error that says what to install where there is no compiler."""

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


def test_without_a_compiler_it_is_said_what_to_install():
    import torch._inductor.config as inductor

    with (
        inductor.patch({"cpp.cxx": (None, "/nothing/g++")}),
        pytest.raises(
            ValueError, match=r"^compile=True: for the CPU torch needs a C\+\+ compiler, and finds none: install g"
        ),
    ):
        trained(Returns(), make_loader(), compile=True)
