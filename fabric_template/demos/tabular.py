"""Tabular: a pandas table with words, numbers and holes; scikit-learn's preprocessing, and a small net that says a number.

Both classes are what people have of Lightning: rung 4 of the ladder. The table is a made one of flats to let, or your CSV file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import R2Score

if TYPE_CHECKING:
    import pandas as pd

RENTS = {"harbour": 16.0, "old town": 21.0, "hills": 25.0, "station": 13.0}  # per square metre


def make_flats(count: int = 2000, seed: int = 0) -> pd.DataFrame:
    """A table of flats to let, with the holes of a real one: not every owner says everything.

    Example:
        >>> make_flats(count=3).columns.tolist()
        ['district', 'area', 'rooms', 'floor', 'built', 'lift', 'rent']
    """
    import numpy as np
    import pandas as pd

    random = np.random.default_rng(seed)
    table = pd.DataFrame(
        {"district": random.choice([*RENTS], count), "area": random.gamma(9, 8, count).clip(15).round()}
    )
    table["rooms"] = (table["area"] / 28 + random.normal(0, 0.6, count)).round().clip(1)
    table["floor"] = random.integers(0, 9, count).astype(float)
    table["built"] = random.integers(1890, 2024, count).astype(float)
    table["lift"] = np.where(random.random(count) < 0.1 + table["floor"] / 12, "yes", "no")
    age, climbs = (2024 - table["built"]) / 100, table["floor"].where(table["lift"] == "no", 0)
    rate = table["district"].map(RENTS) * (1.15 - 0.5 * age + 0.4 * age**2) * (1 - 0.03 * climbs)  # old is dear again
    table["rent"] = (table["area"] ** 0.9 * rate * random.lognormal(0, 0.1, count) * 1.4).round()
    for column, share in {"rooms": 0.05, "built": 0.15, "lift": 0.1}.items():
        table.loc[random.random(count) < share, column] = None
    return table


class TabularData(LightningDataModule):
    """A table as batches ``(features, target)``: ``float32 (batch, n)``, ``float32 (batch,)`` in the table's own unit.

    Numbers are filled with their median and scaled, words become a column each, and a hole is told by a column of its own.
    All that is learned of the table is learned of the training part.

    Args:
        path: A CSV file with a head line; none: the made table of flats.
        target: The column to predict, a number; a row without it is left out.
        batch_size: Rows per batch.
        val_fraction: Share of the rows kept for validation.
        test_fraction: Share kept for the test.
        seed: Decides which row goes to which part.

    Example:
        >>> data = TabularData()
        >>> data.setup("fit")
        >>> features, target = next(iter(data.train_dataloader()))
        >>> features.shape, target.shape
        (torch.Size([64, 13]), torch.Size([64]))
    """

    def __init__(
        self, path: str | None = None, target: str = "rent", batch_size: int = 64, val_fraction: float = 0.2,
        test_fraction: float = 0.1, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.path, self.target, self.batch_size = path, target, batch_size
        self.val_fraction, self.test_fraction, self.seed = val_fraction, test_fraction, seed
        self.parts: dict[str, TensorDataset] = {}
        self.columns: list[str] = []  # what each feature is
        self.center, self.scale = 0.0, 1.0  # of the target, in the training part

    def setup(self, stage: str | None = None) -> None:
        """Read the table, split its rows, and make numbers of them."""
        if self.parts:
            return
        from sklearn.model_selection import train_test_split

        table = self._read()
        rest, test = train_test_split(table, test_size=self.test_fraction, random_state=self.seed)
        share = self.val_fraction / (1 - self.test_fraction)  # of the whole, taken from what is left
        train, val = train_test_split(rest, test_size=share, random_state=self.seed)
        preprocessing = self._make_preprocessing(train.drop(columns=self.target)).fit(train.drop(columns=self.target))
        self.columns = [*preprocessing.get_feature_names_out()]
        self.center, self.scale = float(train[self.target].mean()), float(train[self.target].std())
        for name, part in {"train": train, "val": val, "test": test}.items():
            features = preprocessing.transform(part.drop(columns=self.target))
            target = part[self.target].to_numpy(dtype="float32")
            self.parts[name] = TensorDataset(torch.as_tensor(features, dtype=torch.float32), torch.as_tensor(target))

    def train_dataloader(self) -> DataLoader:
        """The training part, reshuffled every epoch."""
        return DataLoader(self.parts["train"], self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """The validation part."""
        return DataLoader(self.parts["val"], self.batch_size)

    def test_dataloader(self) -> DataLoader:
        """The test part."""
        return DataLoader(self.parts["test"], self.batch_size)

    predict_dataloader = test_dataloader

    def _read(self) -> pd.DataFrame:
        import pandas as pd

        try:
            table = make_flats(seed=self.seed) if self.path is None else pd.read_csv(self.path)
        except (OSError, ValueError) as error:  # a ParserError is one, too
            raise ValueError(
                f"TabularData: path={self.path!r} cannot be read as a CSV file with a head line: {error}"
            ) from error
        if self.target not in table or not pd.api.types.is_numeric_dtype(table[self.target]):
            numbers = ", ".join(table.select_dtypes("number")) or "none"
            raise ValueError(
                f"TabularData: target={self.target!r} is no column of numbers of the table; it has {numbers}"
            )
        return table.dropna(subset=[self.target])

    def _make_preprocessing(self, train: pd.DataFrame) -> Any:
        from sklearn.compose import ColumnTransformer
        from sklearn.impute import SimpleImputer
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import OneHotEncoder, StandardScaler

        numbers = [*train.select_dtypes("number")]
        words = [column for column in train if column not in numbers]
        scaled = make_pipeline(SimpleImputer(strategy="median", add_indicator=True), StandardScaler())
        # a word that the training part has not is no word of it; a hole is one
        one_each = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
        return ColumnTransformer([("number", scaled, numbers), ("word", one_each, words)])


class TabularNet(LightningModule):
    """Two hidden layers that say a number, and torchmetrics' R^2: 1 is perfect, 0 as good as always saying the mean.

    Args:
        features: How many numbers a row has once it is preprocessed.
        hidden: Width of the two layers.
        dropout: Share of activations dropped in training.
        lr: Learning rate of AdamW.

    Example:
        >>> TabularNet(features=4)(torch.zeros(5, 4)).shape
        torch.Size([5])
    """

    center: Tensor
    scale: Tensor

    def __init__(self, features: int = 13, hidden: int = 64, dropout: float = 0.1, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(features, hidden), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(hidden, 1),
        )  # fmt: skip
        self.register_buffer("center", torch.tensor(0.0))  # of the target: they go with the weights
        self.register_buffer("scale", torch.tensor(1.0))
        self.val_r2, self.test_r2 = R2Score(), R2Score()

    def setup(self, stage: str) -> None:
        """Take over what the data know: the unit of the target, and how many numbers a row has."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, TabularData):
            return
        features = self.hparams["features"]
        if len(data.columns) != features:
            raise ValueError(
                f"TabularNet: features={features}, but a row of this table has {len(data.columns)}: give"
                f" features={len(data.columns)} (--model.features {len(data.columns)})"
            )
        if stage == "fit":
            self.center.fill_(data.center)
            self.scale.fill_(data.scale)

    def forward(self, features: Tensor) -> Tensor:
        """Rows ``(batch, features)`` to what they say of the target ``(batch,)``, in its own unit."""
        return self.center + self.scale * self.net(features).squeeze(1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The squared error, in the target's variances."""
        loss = self._loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The same loss, and R^2 over all of the part, which is no mean over its batches."""
        self._evaluate("val", self.val_r2, batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The same on the test part."""
        self._evaluate("test", self.test_r2, batch)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """What the net says, beside what is true."""
        features, target = batch
        return {"predicted": self(features), "true": target}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, with a learning rate that stays as it is."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])

    def _evaluate(self, stage: str, r2: R2Score, batch: tuple[Tensor, Tensor]) -> None:
        features, target = batch
        predicted = self(features)
        r2(predicted, target)
        self.log_dict({f"{stage}_loss": self._loss(predicted, target), f"{stage}_r2": r2})

    def _loss(self, predicted: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(predicted / self.scale, target / self.scale)
