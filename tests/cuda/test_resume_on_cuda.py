"""Test exact resume on a GPU, and checkpoints that move between CPU and GPU."""

import pytest
import torch
from device import DEVICE, ON, Drawing, Still, fused_adam, shuffled_on_device
from modules import assert_same_weights, by_epoch, by_step, make_loader
from runs import Snapshots, assert_same_end, fit, logs_of, tree, val_loader

from fabric_template import MiniLoop

pytestmark = pytest.mark.gpu
CPU = {"accelerator": "cpu"}


@pytest.mark.parametrize("loader", [make_loader, shuffled_on_device], ids=["DataLoader", "TensorLoader"])
@pytest.mark.parametrize("optimizers", [by_step, fused_adam])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_killed_and_resumed_run_matches_an_uninterrupted_run(tmp_path, precision, optimizers, loader):
    """Weights, optimizers, random numbers and files equal those of an uninterrupted run."""
    options = {**ON, "precision": precision, "max_epochs": 2, "save_every_n_steps": 3}
    options |= {"make_module": lambda: Drawing(optimizers), "train": loader, "val": val_loader}
    whole = fit(tmp_path / "whole", callbacks=[Snapshots(tmp_path / "whole", tmp_path / "cut")], **options)
    drawn = torch.rand(3, device=DEVICE).tolist()
    for batches in ("5", "7", "10", "17"):
        root = tmp_path / "cut" / batches
        again = fit(root, seed=9, resume="auto", **options)
        assert torch.rand(3, device=DEVICE).tolist() == drawn
        assert_same_end(whole, again)
        assert logs_of(root) == logs_of(tmp_path / "whole")
        assert tree(root) == tree(tmp_path / "whole")


@pytest.mark.parametrize(("first", "then"), [(CPU, ON), (ON, CPU)], ids=["CPU to GPU", "GPU to CPU"])
def test_resuming_on_a_different_device_changes_results_only_by_rounding(tmp_path, first, then):
    """Weights, optimizer states, counters and data order come from the checkpoint."""
    options = {"make_module": lambda: Still(fused_adam), "val": val_loader, "save_every_n_steps": 3}
    loop, module, _ = fit(tmp_path, **first, max_epochs=1, **options)
    path = loop.checkpoint_path("last")
    assert_same_weights(module, Still.load_from_checkpoint(path, map_location="cpu"))
    whole, expected, _ = fit(tmp_path / "whole", **first, max_epochs=3, **options)
    resumed, module, _ = fit(tmp_path, **then, max_epochs=3, resume=path, **options)
    assert (whole.global_step, whole.current_epoch) == (resumed.global_step, resumed.current_epoch)
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], weight, rtol=1e-3, atol=1e-4)


def test_mini_loop_resumes_exactly_from_the_end_of_an_epoch(tmp_path):
    """MiniLoop saves checkpoints only at the end of an epoch."""
    ends = {}
    for name, epochs in (("whole", [3]), ("parts", [1, 3])):
        for max_epochs in epochs:
            torch.manual_seed(1)
            ends[name] = Drawing(by_epoch)
            options = {"name": name, "seed": 3, "precision": "16-mixed", "default_root_dir": str(tmp_path)}
            loop = MiniLoop(**ON, max_epochs=max_epochs, **options)
            loop.fit(ends[name], make_loader(), val_loader(), resume="auto")
    assert_same_weights(ends["whole"], ends["parts"])
