"""Use a LightningModule and torchmetrics to predict one column of a table."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from torchmetrics import R2Score

from .data import SplitData, split_indices

# The rent per square meter in each district.
RENTS = {"harbour": 16, "old town": 21, "hills": 25, "station": 13}
Batch = tuple[Tensor, Tensor]


def make_flats(count: int = 2000) -> pd.DataFrame:
    """Return a synthetic table of flats and their rents, in which some values are missing."""
    random = np.random.default_rng(seed=0)
    flats = pd.DataFrame({"district": random.choice(list(RENTS), count)})
    flats["area"] = random.gamma(9, 8, count).clip(15).round()
    flats["built"] = random.integers(1890, 2024, count).astype(float)
    flats["lift"] = random.choice(["yes", "no"], count)
    age_factor = 1 + ((flats["built"] - 1960) / 100) ** 2
    rent = flats["area"] ** 0.9 * flats["district"].map(RENTS) * age_factor
    rent[flats["lift"] == "yes"] *= 1.1
    flats["rent"] = (rent * random.lognormal(0, 0.1, count)).round()
    for column in ("built", "lift"):
        flats.loc[random.random(count) < 0.1, column] = None
    return flats


class TabularData(SplitData, LightningDataModule):
    """Turn a table into batches of features ``(batch, n)`` and targets ``(batch,)``.

    Args:
        path: A CSV file with a header. By default, make_flats() generates the table.
        target: The column to predict. Rows without a target are dropped.
    """

    def __init__(self, path: str | None = None, target: str = "rent", batch_size: int = 64) -> None:
        super().__init__(batch_size)
        self.path = path
        self.target = target

    def setup(self, stage: str | None = None) -> None:
        """Read and split the table. Fit the preprocessing to the training rows."""
        if self.splits:
            return
        table = make_flats() if self.path is None else pd.read_csv(self.path)
        table = table.dropna(subset=[self.target])
        features = table.drop(columns=self.target)
        target = torch.tensor(table[self.target].to_numpy()).float()
        indices = split_indices(len(table))
        fill = SimpleImputer(strategy="median", add_indicator=True)
        encode = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
        preprocessing = make_column_transformer(
            (make_pipeline(fill, StandardScaler()), make_column_selector(dtype_include="number")),
            (encode, make_column_selector(dtype_exclude="number")),
        ).fit(features.iloc[indices["train"]])
        inputs = torch.tensor(preprocessing.transform(features)).float()
        for split, rows in indices.items():
            self.splits[split] = TensorDataset(inputs[rows], target[rows])


class TabularNet(LightningModule):
    """Predict a number for each table row with a network that has two hidden layers.

    Args:
        features: Number of features per row after preprocessing.
    """

    def __init__(self, features: int = 10, hidden: int = 64, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(features, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )
        # Store the target's mean and std in buffers, so that checkpoints contain them.
        self.mean = nn.Buffer(torch.tensor(0.0))
        self.std = nn.Buffer(torch.tensor(1.0))
        self.val_r2 = R2Score()

    def setup(self, stage: str) -> None:
        if stage == "fit":
            data = self.trainer.datamodule  # type: ignore[attr-defined]
            inputs, target = data.splits["train"].tensors
            count = inputs.shape[1]
            if count != self.hparams["features"]:
                raise ValueError(
                    f"TabularNet(features): got {self.hparams['features']}, expected {count}."
                    f" Write features={count} (--model.features {count})."
                )
            self.mean.fill_(target.mean())
            self.std.fill_(target.std())

    def forward(self, features: Tensor) -> Tensor:
        return self.mean + self.std * self.net(features).squeeze(1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        features, target = batch
        loss = functional.mse_loss(self(features), target) / self.std**2
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss, and the R2 score over all validation batches."""
        features, target = batch
        predicted = self(features)
        self.val_r2(predicted, target)
        self.log("val_loss", functional.mse_loss(predicted, target) / self.std**2)
        self.log("val_r2", self.val_r2)

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        features, target = batch
        return {"predicted": self(features), "true": target}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
