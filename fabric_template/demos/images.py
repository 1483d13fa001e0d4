"""Classify folders of pictures, one folder per class, with a ResNet. Needs torchvision."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Subset

from .data import SplitData, require_path, require_torchvision, split_indices


class ImagesData(SplitData):
    """Load ``path/<class>/<picture>`` and split it. Training pictures are cropped and flipped."""

    def __init__(self, path: str, size: int = 64, batch_size: int = 32, num_workers: int = 0):
        super().__init__(batch_size, num_workers)
        self.path = path
        self.size = size

    def setup(self, stage: str | None = None) -> None:
        require_torchvision("ImagesData")
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        folder = require_path("ImagesData", self.path)
        to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
        crop = [v2.RandomResizedCrop(self.size, scale=(0.5, 1)), v2.RandomHorizontalFlip()]
        train = ImageFolder(folder, v2.Compose(crop + to_tensor))
        resize = v2.Resize((self.size, self.size))
        rest = ImageFolder(folder, v2.Compose([resize, *to_tensor]))
        labels = torch.tensor(rest.targets).numpy()
        for split, rows in split_indices(len(rest), 0.2, 0.1, labels=labels).items():
            self.splits[split] = Subset(train if split == "train" else rest, rows.tolist())


class ImageClassifier(nn.Module):
    """Classify pictures with one of torchvision's ResNets, optionally with published weights."""

    def __init__(self, net: str = "resnet18", classes: int = 2, pretrained: bool = False):
        super().__init__()
        require_torchvision("ImageClassifier")
        from torchvision.models import get_model

        self.net = get_model(net, weights="DEFAULT" if pretrained else None)
        self.net.fc = nn.Linear(self.net.fc.in_features, classes)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, labels = batch
        return functional.cross_entropy(self.net(pictures), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        pictures, labels = batch
        logits = self.net(pictures)
        acc = (logits.argmax(1) == labels).float().mean()
        return {"loss": functional.cross_entropy(logits, labels), "acc": acc}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
