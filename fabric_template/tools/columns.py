"""Columns: what a metric is, by its name: ours, Lightning's, or anybody's."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SPLIT = r"(train|training|val|valid|validation|test)"
_BEFORE = re.compile(rf"{_SPLIT}[_/.\- ](.+)", re.IGNORECASE)
_BEHIND = re.compile(rf"(.+)[_/.\- ]{_SPLIT}", re.IGNORECASE)
_LOADER = re.compile(r"(.*?)(/dataloader_idx_\d+)?", re.DOTALL)
_SPLITS = {"training": "train", "valid": "val", "validation": "val"}
KINDS = {  # in the order of their panels; what is none of these has a panel of its own, before the learning rate
    "loss": re.compile(r"loss(\W|_|\d|$)", re.IGNORECASE),
    "accuracy": re.compile(r"((^|[\W_])acc(uracy)?(?=[\W_\d]|$))|acc(uracy)?$", re.IGNORECASE),
    "learning rate": re.compile(r"^(lr|learning[_ ]rate)(\W|_|\d|$)", re.IGNORECASE),
}
_LOW_IS_GOOD = re.compile(
    r"loss|error|nll|perplexity|divergence|distance|(^|[\W_])(err|rmse|mse|mae|mape|ppl|wer|cer|fid|bpc|time|seconds)",
    re.IGNORECASE,
)
NOT_METRICS = {"name", "version", "epoch", "step", "time"}


@dataclass(frozen=True)
class Column:
    """What a metric is, by its name.

    Example:
        >>> Column.of("val_acc_top1")
        Column(name='val_acc_top1', split='val', quantity='acc_top1', kind='accuracy')
        >>> Column.of("train_loss_epoch").quantity, Column.of("f1").kind, Column.of("lr-Adam").kind
        ('loss', 'f1', 'learning rate')
    """

    name: str
    split: str
    quantity: str
    kind: str

    @classmethod
    def of(cls, name: str) -> Column:
        """Read a name of ours, of Lightning's or of anybody's."""
        bare, loader = _LOADER.fullmatch(name).groups()  # type: ignore[union-attr]
        bare = re.sub(r"(?<=.)_(epoch|step)$", "", bare)
        if found := _BEFORE.fullmatch(bare):
            split, bare = found.groups()
        elif found := _BEHIND.fullmatch(bare):
            bare, split = found.groups()
        else:
            split = ""
        split = _SPLITS.get(split.lower(), split.lower())
        kind = next((kind for kind, pattern in KINDS.items() if pattern.search(bare)), bare)
        return cls(name, split, bare + (loader or ""), kind)

    @property
    def low_is_good(self) -> bool:
        """Whether the best value is the lowest."""
        return bool(_LOW_IS_GOOD.search(self.quantity))
