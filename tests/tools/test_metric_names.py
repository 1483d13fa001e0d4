"""Test that the direction of a metric follows from its name, in both loops and in the tools."""

import inspect

import pytest
import torch

from fabric_template import FabricLoop, MiniLoop, TensorLoader, metric_names, mini
from fabric_template.metric_names import find_direction, is_metric

pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned no value and logged no metric")

SMALLEST = """
    loss val_loss valLoss MSELoss val/box_loss train/dfl_loss loss_iou loss/dataloader_idx_0 Loss/val
    val_mape val_smape val_mase val_rmsle val_bpb eval/bpb val_bits bits_per_dim val_ece val_crps
    val_brier_score val_lpips val_kl val_kl_divergence val_eer wer cer word_error_rate fid perplexity
    val_ppl val_top1_error error_rate RMSE validation-rmse train-error valid_0_l2 merror mlogloss
    MeanAbsolutePercentageError cross_entropy false_positive_rate false_negative_rate fpr_at_95_tpr
    log_cosh val_assd miss_rate frr minDCF translation_edit_rate DER nlpd
    negative_log_likelihood 1-acc one_minus_ssim val_nll neg_psnr hausdorff_distance
"""
LARGEST = """
    acc val_acc testacc val_accuracy eval_accuracy sparse_categorical_accuracy MulticlassAccuracy aAcc
    acc1 top1 val_top5_acc balanced_accuracy_score psnr ssim auroc AUROC roc_auc pr_auc ap map mAP
    metrics/mAP50-95(B) metrics/precision(B) bbox_mAP_50 iou mIoU dice dice_coef f1 val_f1_score
    BinaryF1Score r2 R2Score explained_variance bleu BLEU-4 rouge rougeL mcc kappa hits@10 recall@5
    ndcg@10 precision_at_k spearmanr log_likelihood elbo neg_mean_squared_error mean_reward win_rate
    true_positive_rate exact_match concordance_index Prec@1 f_score r_squared BERTScore clip_score
    mean_reciprocal_rank rand_score log_prob CCC
"""
UNKNOWN = """
    score val_gap loss_scale grad_norm lr kl_weight acc_std anomaly_score metric x y_hat throughput
    val_loss_improvement acc_change mae_difference bits_per_second
"""


@pytest.mark.parametrize(
    ("names", "direction"), [(SMALLEST, "min"), (LARGEST, "max"), (UNKNOWN, None)], ids=["min", "max", "none"]
)
def test_find_direction_returns_min_or_max_for_common_metrics(names, direction):
    assert {name: find_direction(name) for name in names.split()} == dict.fromkeys(names.split(), direction)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("val_loss f1 score mean_rank time_to_event_mae valid_id_acc", True),
        ("trial_id number time_ms data_time time/fps time_total_s training_iteration dur GPU_mem", False),
    ],
)
def test_is_metric_excludes_times_counts_and_ids(names, expected):
    assert {name: is_metric(name) for name in names.split()} == dict.fromkeys(names.split(), expected)
    assert is_metric("Relative Time (Process)") is False


def test_mini_py_and_metric_names_py_contain_the_same_find_direction_function():
    assert metric_names.DIRECTIONS == mini.DIRECTIONS
    assert inspect.getsource(metric_names.find_direction) == inspect.getsource(mini.find_direction)


def mode_of(loop):
    return loop.config.mode if isinstance(loop, FabricLoop) else loop.mode


@pytest.mark.parametrize("make", [FabricLoop, MiniLoop])
def test_the_metric_name_determines_the_default_of_the_mode_option(make):
    found = [mode_of(make(monitor=name)) for name in ("val_acc", "val_smape", None)]
    assert found == ["max", "min", "min"]
    assert mode_of(make(monitor="val_acc", mode="min")) == "min"
    assert mode_of(make(monitor="val_gap", mode="max")) == "max"


@pytest.mark.parametrize("make", [FabricLoop, MiniLoop])
@pytest.mark.parametrize("name", ["val_gap", "score", "val_los"])
def test_monitor_requires_a_mode_if_the_metric_name_implies_neither_min_nor_max(make, name):
    expected = f"mode: got 'auto'.* '{name}'.* Write mode='min' .*or mode='max'"
    with pytest.raises(ValueError, match=expected):
        make(monitor=name)


def square(net, batch):
    return net(batch[0]).square().mean()


def return_nothing(net, batch):
    square(net, batch)


@pytest.mark.parametrize("make", [FabricLoop, MiniLoop])
@pytest.mark.parametrize(
    ("options", "step"),
    [({}, 4), ({"validate_every_n_steps": 3}, 3), ({"validate_every_n_steps": 6, "max_steps": 20}, 6)],
    ids=str,
)
@pytest.mark.parametrize(("monitor", "validation_step"), [("val_loss", return_nothing), ("val_mse", square)])
def test_a_monitored_metric_that_is_not_logged_raises_an_error_at_the_first_validation(
    make, options, step, monitor, validation_step
):
    net, loader = torch.nn.Linear(2, 1), TensorLoader(torch.ones(8, 2), batch_size=2)
    loop = make(**{"max_epochs": 5, **options}, monitor=monitor, accelerator="cpu")
    with pytest.raises(ValueError, match=f"monitor: got '{monitor}', which is not logged"):
        loop.fit(
            net,
            loader,
            loader,
            optimizer=torch.optim.SGD(net.parameters(), 0.1),
            training_step=square,
            validation_step=validation_step,
        )
    assert loop.global_step == step


@pytest.mark.parametrize("make", [FabricLoop, MiniLoop])
def test_monitor_accepts_a_metric_not_yet_logged_at_the_first_validation(make):
    net, loader = torch.nn.Linear(2, 1), TensorLoader(torch.ones(8, 2), batch_size=2)
    loop = make(max_epochs=2, validate_every_n_steps=1, monitor="train_loss", accelerator="cpu")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loop.fit(net, loader, loader, optimizer=optimizer, training_step=square, validation_step=return_nothing)
    assert loop.global_step == 8
