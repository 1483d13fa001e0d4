"""Test that compile= changes neither the results nor the keys of the state dict."""

import pytest
import torch
from modules import Classifier, by_step, make_loader, quiet
from runs import val_loader
from torch import nn

from fabric_template import FabricLoop, MiniLoop

# Use the eager backend, which runs PyTorch's kernels, so that the results are bitwise identical to uncompiled training.
EAGER = {"backend": "eager"}

# At graph breaks, torch reads deprecated attributes of its own and warns about them.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def reset_compiler():
    yield
    torch._dynamo.reset()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class LogsNothing(Classifier):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    validation_step = training_step


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"precision": "bf16-mixed"}, marks=pytest.mark.soak),
        {"strategy": "ddp", "devices": 1},
        {"accumulate_grad_batches": 2},
        {},
    ],
    ids=["precision", "ddp", "accumulation", "fullgraph"],
)
def test_a_compiled_run_gives_the_same_weights_as_an_uncompiled_run(tmp_path, options):
    found = []
    for compile in (False, EAGER | {"fullgraph": not options}):
        torch.manual_seed(0)
        module = (Classifier if options else LogsNothing)(by_step)
        files = {"enable_checkpointing": True, "default_root_dir": tmp_path / str(bool(compile))}
        loop = FabricLoop(**{**quiet(max_epochs=2), **files, **options}, compile=compile)
        loop.fit(module, make_loader(), make_loader())
        file = torch.load(loop.checkpoint_path("last"), weights_only=True)
        found.append((file["state_dict"], file["lr_schedulers"][0]["_last_lr"]))
    (plain, rates), (compiled, compiled_rates) = found
    assert list(plain) == list(compiled)
    assert all(torch.equal(plain[name], compiled[name]) for name in plain)
    assert rates == compiled_rates


def test_a_hook_of_a_compiled_run_may_call_validate_on_a_mini_loop(tmp_path):
    """FabricLoop wraps the module's log method to exclude it from compilation."""
    found, inner = [], MiniLoop(accelerator="cpu", default_root_dir=tmp_path)
    module = Classifier()
    module.on_train_epoch_end = lambda: found.extend(inner.validate(module, val_loader()))
    loop = FabricLoop(**quiet(max_epochs=1), compile=EAGER)
    loop.fit(module, make_loader(24), val_loader())
    assert found[0]["val_loss"] == pytest.approx(float(loop.callback_metrics["val_loss"]))
    assert "log" not in vars(module)
