"""Manual optimization that was killed continues after the last step, with the same bits."""

import pytest
from modules import Gan, make_loader
from runs import Snapshots, assert_same_end, fit, logs_of


def loader():
    return make_loader(20)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("toggles", [True, False], ids=["toggled", "plain"])
def test_manual_optimization_killed_at_any_batch_resumes_exactly(tmp_path, toggles, every):
    options = {"max_epochs": 2, "log_every_n_steps": 2, "save_every_n_steps": every}
    whole_root, copies = tmp_path / "whole", tmp_path / "killed"
    make = lambda: Gan(toggles)  # noqa: E731
    whole = fit(whole_root, make, loader, callbacks=[Snapshots(whole_root, copies)], **options)
    for batches in (every, 4, 6, 9):
        root = copies / str(batches)
        assert_same_end(whole, fit(root, make, loader, seed=99, resume="last", **options))
        assert logs_of(root) == logs_of(whole_root), f"killed before batch {batches}"
