"""Parse metric names such as "val_loss" and infer whether lower values are better."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

# Names of epoch and step columns in the logs of this package and of other tools.
EPOCH_NAMES = ("epoch", "epochs", "ep", "epoch_idx")
STEP_NAMES = (
    *("step", "steps", "global_step", "trainer/global_step", "train/global_step", "_step"),
    *("iteration", "iterations", "iter", "iters", "boosting_round", "round"),
    *("training_iteration", "num_updates", "total_timesteps", "time/total_timesteps"),
)
# Names of columns that do not contain metrics.
NOT_METRICS = (
    *("name", "version", "index", "batch", "batch_idx", "seed", "best_epoch", "best_step"),
    *("total_flos", "number", "trial", "fold", "rank", "pid", "timesteps_total"),
)
# Endings of column names that do not belong to metrics, such as "eval_runtime".
DURATIONS = (
    *("time", "runtime", "timestamp", "second", "seconds", "elapsed", "eta", "waiting"),
    *("duration", "dur", "memory", "mem", "id", "fps"),
)
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLITS |= {"tr": "train", "te": "test"}
SPLITS |= dict.fromkeys(("val", "valid", "validation", "eval", "dev"), "validation")
_SPLIT = f"(?P<split>{'|'.join(SPLITS)})"
# _PREFIX matches "val_loss" and "valid_0's l2", and _SUFFIX matches "Loss/val".
_PREFIX = re.compile(
    rf"(?is){_SPLIT}(?:_\d+)?(?:'s)?(?:[\W_]+|(?-i:(?<=[a-z])(?=[A-Z])))(?P<quantity>.+)"
)
_SUFFIX = re.compile(rf"(?is)(?P<quantity>.+?)[\W_]+{_SPLIT}(?:_epoch|_step)?\W*")
_KINDS = {
    "loss": re.compile(r"(?i)loss"),
    "accuracy": re.compile(r"(?i)accuracy|(^|[\W_])acc([\W_\d]|$)"),
    "learning rate": re.compile(r"(?i)^(base_)?(lrs?|learning[_ ]?rate)([\W_\d]|$)"),
}


class Metric(NamedTuple):
    """Describes a metric column such as "val_acc".

    Attributes:
        column: The name of the column, such as "val_acc".
        split: The data split, such as "validation", or "" if unknown.
        quantity: The name without the data split, such as "acc".
        kind: The group of similar quantities, such as "accuracy".
    """

    column: str
    split: str
    quantity: str
    kind: str


def parse_metric(column: str) -> Metric:
    """Parse a column name such as "val_acc" into a data split and a quantity."""
    match = _PREFIX.fullmatch(column) or _SUFFIX.fullmatch(column)
    split, quantity = SPLITS.get(column.lower(), ""), column
    if match is not None:
        split, quantity = SPLITS[match["split"].lower()], match["quantity"]
    elif split:
        quantity = "value"
    quantity = re.sub(r"/dataloader_idx_\d+$", "", quantity)
    quantity = re.sub(r"_(epoch|step)(?=$|/)", "", quantity)
    kinds = (kind for kind, pattern in _KINDS.items() if pattern.search(quantity))
    return Metric(column, split, quantity, next(kinds, quantity))


def find_axis(columns: Iterable[str], axis: str) -> str | None:
    """Return the name of the epoch column (axis="epoch") or the step column (axis="step")."""
    names = {str(column).strip().lower(): str(column) for column in reversed([*columns])}
    known = {"epoch": EPOCH_NAMES, "step": STEP_NAMES}.get(axis, (axis.lower(),))
    return next((names[name] for name in known if name in names), None)


def is_metric(column: str) -> bool:
    """Return whether a column may contain a metric rather than epochs, steps, durations or IDs."""
    name = column.strip().lower()
    if name in (*EPOCH_NAMES, *STEP_NAMES, *NOT_METRICS) or name.startswith("unnamed:"):
        return False
    parts = re.split(r"[\W_]+", name.strip("_() "))
    # Columns such as "time/fps", "time_ms" and "Relative Time (Process)" contain no metrics.
    return parts[-1] not in DURATIONS and not ("time" in parts and find_direction(name) is None)


# mini.py has its own copy of the following code, because mini.py imports nothing from this package.

SMALLEST_IS_BEST = """
    loss losses abs_rel ade aepe aic asd assd bce bic bits bpb bpc bpd bpp brier brisque ce cer
    chamfer cost cross_entropy crossentropy crps dcf der deviance distance distortion divergence ece
    edit_rate eer emd epe err error errors fad false_negative false_negatives false_positive
    false_positives far fde fid fnr fpr frr fvd hamming hausdorff hd95 hinge huber jer jsd kid kl
    kld l1 l2 levenshtein log_cosh logcosh logloss lpips mae mape mase mcd mce mdape medae mer
    mindcf misclassification_rate miss_rate mmd mpjpe mrae mse msle nats nelbo niqe nll nlpd nmae
    nme nmse nrmse penalty perplexity pinball ppl rae regret residual residuals rmse rmsle rmspe
    rmsse rse sce silog smape sq_rel sse swd ter violation violations wape wasserstein wer wil
    winkler wmape xent xentropy
"""
LARGEST_IS_BEST = """
    acc accuracy ami ap ar ari auc aucpr aupr auprc auroc bert_score bertscore bleu bleurt c_index
    ccc chrf cider cindex clip_score comet concordance corr corrcoef correlation dcg dice dsc elbo
    em estoi exact_match explained_variance f1 f2 f_measure f_score fbeta fmeasure fscore gini giou
    gmean hit hits hota idf1 inception_score iou jaccard kappa kendall kge lddt likelihood log_prob
    loglik logp map matthews mcc meteor miou mos mota mrr ndcg nds nmi npv nse oks pcc pck pearson
    pearsonr pesq plcc plddt ppv pq prec precision psnr qwk r2 r_squared rand_index rand_score
    recall reciprocal_rank return returns rew reward rouge rougel rsquared sacrebleu sdr sensitivity
    sharpe silhouette similarity sisdr sisnr snr spearman spearmanr specificity spice srcc ssim stoi
    success tm_score tnr top tpr true_negative true_positive uar v_measure vmaf win wip
"""
NEITHER_IS_BEST = """
    beta change decrease delta diff difference drop gap grad gradient improvement increase lr norm
    ratio reduction scale second seconds std stdev temperature threshold time var variance weight
    weights
"""
DIRECTIONS = dict.fromkeys(SMALLEST_IS_BEST.split(), "min")
DIRECTIONS |= dict.fromkeys(LARGEST_IS_BEST.split(), "max")
DIRECTIONS |= dict.fromkeys(NEITHER_IS_BEST.split(), "")
ENDING = re.compile(r"(loss|error|perplexity|mse|mae|accuracy|acc|precision|recall|auc|f1|iou)$")
NEGATED = re.compile(r"(^|(?<!false)(?<!true)[\W_])(neg|negative|minus)[\W_]|^1 ?- ?[a-z]")


def find_direction(metric: str) -> str | None:
    """Return "min" if the smallest value of a metric is best, or "max" if the largest is best.

    The metric's name determines the result, which is None for a name such as "val_gap".
    """
    # The metric in "fpr@recall" or "fpr_at_recall" is "fpr".
    name = re.split(r"@|[\W_]at[\W_]", metric, flags=re.IGNORECASE)[0]
    spaced = re.sub(r"(?<=[a-z\d])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    for spelling in (name.lower(), spaced.lower()):
        direction, before = "", ""
        parts = re.split(r"[\W_]+", spelling)
        for part in parts:
            # If DIRECTIONS lacks a name, look up the name without digits, such as "top" for "top5",
            # or the end of the name, such as "loss" for "valloss".
            without_digits = part.rstrip("0123456789")
            end = ENDING.search(without_digits)
            keys = [f"{before}_{part}", part, without_digits, end[0] if end else ""]
            direction = next((DIRECTIONS[key] for key in keys if key in DIRECTIONS), direction)
            before = part
        if direction and {"loss", "losses"} & {*parts}:
            # Lower is better for a loss such as "loss_iou", but higher is better for "iou".
            direction = "min"
        if direction and NEGATED.search(spelling):
            direction = "max" if direction == "min" else "min"
        if direction:
            return direction
    return None
