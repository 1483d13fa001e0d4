"""Images: folders of pictures, one for each class; a small convolutional net, or torchvision's or timm's by its name.

Where there is no folder, pictures of three shapes are made. Rung 3 of the ladder: objects with step methods.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

SHAPES = ("circle", "square", "triangle")
ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


class Parts:
    """The loaders of a dataset in parts, with worker processes that stay from epoch to epoch."""

    def __init__(self, batch_size: int, workers: int) -> None:
        self.batch_size, self.workers = batch_size, workers
        self.parts: dict[str, Dataset] = {}

    def train_dataloader(self) -> DataLoader:
        """The training part, reshuffled every epoch."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """The validation part."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader:
        """The test part."""
        return self._loader("test")

    predict_dataloader = test_dataloader

    def _loader(self, part: str, shuffle: bool = False) -> DataLoader:
        stays = self.workers > 0
        return DataLoader(
            self.parts[part], self.batch_size, shuffle, num_workers=self.workers, persistent_workers=stays
        )


class Pictures(Dataset):
    """``(picture, label)``: ``float32 (3, size, size)`` from 0 to 1, and which class it is.

    A picture is made so large that its shorter side fits, and cut around its middle; in training it is mirrored now and then.
    """

    def __init__(self, files: list[Path], labels: list[int], size: int, mirrors: bool = False) -> None:
        self.files, self.labels, self.size, self.mirrors = files, labels, size, mirrors

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        import numpy as np
        from PIL import Image, ImageOps

        try:
            with Image.open(self.files[index]) as opened:
                image = ImageOps.fit(opened.convert("RGB"), (self.size, self.size))
        except Exception as error:  # a damaged file makes Pillow raise anything
            raise ValueError(
                f"ImagesData: '{self.files[index]}' cannot be read as a picture ({type(error).__name__}: {error}); mend it,"
                " or take it out of the folder"
            ) from error
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        if self.mirrors and torch.rand(()) < 0.5:
            pixels = pixels.flip(2)
        return pixels, self.labels[index]


class ImagesData(Parts):
    """A folder that has a folder of pictures for each class, in three parts, each with the classes' shares of the whole.

    Args:
        path: The folder; the classes are its folders' names, sorted. None: data/shapes, made if it is not there.
        size: Pixels of each side.
        batch_size: Pictures per batch.
        val_fraction: Share of the pictures kept for validation.
        test_fraction: Share kept for the test.
        workers: Processes that read pictures while a step computes.
        seed: Decides which picture goes to which part.

    Example:
        >>> data = ImagesData(size=16)
        >>> data.setup("fit")
        >>> pictures, labels = next(iter(data.train_dataloader()))
        >>> data.classes, pictures.shape, labels.shape
        (['circle', 'square', 'triangle'], torch.Size([16, 3, 16, 16]), torch.Size([16]))
    """

    def __init__(
        self, path: str | None = None, size: int = 32, batch_size: int = 16, val_fraction: float = 0.2,
        test_fraction: float = 0.1, workers: int = 0, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(batch_size, workers)
        self.path, self.size, self.seed = path, size, seed
        self.val_fraction, self.test_fraction = val_fraction, test_fraction
        self.classes: list[str] = []

    def prepare_data(self) -> None:
        """Make the pictures of shapes unless a folder is given, or they are there; of several processes one does it."""
        if self.path is None and not Path("data/shapes").exists():
            make_shapes("data/shapes")

    def setup(self, stage: str | None = None) -> None:
        """Find the pictures, and split them class by class."""
        if self.parts:
            return
        from sklearn.model_selection import train_test_split

        self.prepare_data()
        files, labels = self._found()
        try:
            rest, test, rest_labels, test_labels = train_test_split(
                files, labels, test_size=self.test_fraction, stratify=labels, random_state=self.seed
            )
            share = self.val_fraction / (1 - self.test_fraction)  # of the whole, taken from what is left
            train, val, train_labels, val_labels = train_test_split(
                rest, rest_labels, test_size=share, stratify=rest_labels, random_state=self.seed
            )
        except ValueError as error:
            raise ValueError(
                f"ImagesData: {len(files)} pictures of {len(self.classes)} classes cannot be split into parts with each class"
                f" in all of them: {error}; give more pictures, or other fractions"
            ) from error
        self.parts = {
            "train": Pictures(train, train_labels, self.size, mirrors=True),
            "val": Pictures(val, val_labels, self.size),
            "test": Pictures(test, test_labels, self.size),
        }

    def _found(self) -> tuple[list[Path], list[int]]:
        root = Path(self.path or "data/shapes")
        folders = sorted(folder for folder in root.iterdir() if folder.is_dir()) if root.is_dir() else []
        each = [sorted(file for file in folder.rglob("*") if file.suffix.lower() in ENDINGS) for folder in folders]
        if len(each) < 2 or not all(each):
            empty = [folder.name for folder, files in zip(folders, each, strict=True) if not files]
            found = f"no picture in {', '.join(empty)}" if empty else f"{len(folders)} folders"
            raise ValueError(
                f"ImagesData: path={str(root)!r}: expected a folder with a folder of pictures for each of two classes or more,"
                f" such as {root}/cat/1.jpg and {root}/dog/1.jpg; found {found}"
            )
        self.classes = [folder.name for folder in folders]
        return [file for files in each for file in files], [n for n, files in enumerate(each) for _ in files]


def make_shapes(path: str | Path, count: int = 200, seed: int = 0) -> None:
    """Draw so many pictures of each shape: of any colour and place, on noise."""
    import numpy as np
    from PIL import Image, ImageDraw

    random = np.random.default_rng(seed)
    for shape in SHAPES:
        folder = Path(path, shape)
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            image = Image.fromarray(random.integers(90, 166, (40, 48, 3), dtype="uint8"))
            x, y, r = int(random.integers(12, 36)), int(random.integers(12, 28)), int(random.integers(9, 12))
            corners = [(x, y - r), (x + r, y + r), (x - r, y + r)]
            color = tuple(int(part) for part in random.choice([20, 235], 3))
            draw = ImageDraw.Draw(image)
            if shape == "triangle":
                draw.polygon(corners, fill=color)
            else:
                (draw.ellipse if shape == "circle" else draw.rectangle)((x - r, y - r, x + r, y + r), fill=color)
            image.save(folder / f"{number:03}.png")


class ImageClassifier(nn.Module):
    """A net that says which class a picture is of; cross-entropy, AdamW.

    Args:
        net: "small", or the name of one of torchvision's models (resnet18) or timm's (convnext_tiny), where that is installed.
        classes: How many classes there are.
        pretrained: Begin with the weights that torchvision or timm have for it, which they fetch.
        lr: Learning rate.

    Example:
        >>> ImageClassifier(classes=4)(torch.zeros(5, 3, 32, 32)).shape
        torch.Size([5, 4])
    """

    def __init__(self, net: str = "small", classes: int = 3, pretrained: bool = False, lr: float = 2e-3) -> None:
        super().__init__()
        self.classes, self.lr = classes, lr
        self.net = make_net(net, classes, pretrained)

    def forward(self, pictures: Tensor) -> Tensor:
        """Pictures ``(batch, 3, height, width)`` to one score per class ``(batch, classes)``."""
        return self.net(pictures)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """The cross-entropy, in nats per picture, and the share of pictures that are known."""
        loss, acc = self.validation_step(batch)
        return {"loss": loss, "acc": acc}

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The same for pictures that are not trained on: ``val_loss``, ``val_acc``."""
        pictures, labels = batch
        scores = self(pictures)
        try:
            return functional.cross_entropy(scores, labels), (scores.argmax(1) == labels).float().mean()
        except IndexError as error:
            raise ValueError(
                f"{type(self).__name__}: classes={self.classes}, but a picture is of class {int(labels.max())}, counted from 0:"
                f" give classes={int(labels.max()) + 1} or more (--model.classes)"
            ) from error

    test_step = validation_step

    def predict_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The most likely class of each picture."""
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def make_net(name: str, classes: int, pretrained: bool = False) -> nn.Module:
    """The small net, or another one by its name."""
    if name == "small":
        net = nn.Sequential()
        for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
            net += nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)
            )
        return net + nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
    import importlib.util

    if importlib.util.find_spec("torchvision"):
        from torchvision import models

        if name in models.list_models(module=models):
            if not pretrained:
                return models.get_model(name, num_classes=classes)
            net = models.get_model(name, weights="DEFAULT")
            return _with_head(net, classes)
    if importlib.util.find_spec("timm"):
        import timm

        if timm.is_model(name):
            return timm.create_model(name, pretrained=pretrained, num_classes=classes)
    raise ValueError(
        f"ImageClassifier: net={name!r}: expected 'small', or a name of torchvision.models.list_models() or"
        " timm.list_models(), with the package that has it: pip install torchvision, or timm"
    )


def _with_head(net: Any, classes: int) -> nn.Module:
    """The net with a last layer for these classes in the place of its own."""
    name, last = [(name, part) for name, part in net.named_modules() if isinstance(part, nn.Linear)][-1]
    parent, _, own = name.rpartition(".")
    setattr(net.get_submodule(parent), own, nn.Linear(last.in_features, classes))
    return net
