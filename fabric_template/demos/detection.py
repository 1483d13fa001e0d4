"""Detect objects in lists of images of several sizes, with boxes and labels as targets.

This is torchvision's interface, so that its detectors can replace the small one. The images are
generated: a rectangle of one of two colours on noise.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from .data import SplitData

COLORS = torch.tensor([[0.9, 0.2, 0.1], [0.1, 0.3, 0.9]])  # Of labels 1 and 2; 0 is the background.
Target = dict[str, Tensor]
Batch = tuple[list[Tensor], list[Target]]


def make_sample(generator: torch.Generator) -> tuple[Tensor, Target]:
    """Return an image ``(3, height, width)``, its box (x0, y0, x1, y1) and its label."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    height, width, label = draw(40, 64), draw(40, 64), draw(1, 2)
    box_height, box_width = draw(12, 32), draw(12, 32)
    x, y = draw(0, width - box_width), draw(0, height - box_height)
    image = 0.5 + 0.15 * torch.randn(3, height, width, generator=generator)
    image[:, y : y + box_height, x : x + box_width] += COLORS[label - 1, :, None, None] - 0.5
    box = torch.tensor([[x, y, x + box_width, y + box_height]], dtype=torch.float32)
    return image, {"boxes": box, "labels": torch.tensor([label])}


class RectanglesData(SplitData):
    """Generate images. A batch is a list of images, which differ in size, and a list of targets.

    Args:
        count: Images for training. A quarter as many are for validation and for the test.
        batch_size: Images per batch.
        seed: Decides which images are generated.
    """

    def __init__(self, count: int = 800, batch_size: int = 16, seed: int = 0) -> None:
        super().__init__(batch_size)
        generator = torch.Generator().manual_seed(seed)
        for split, size in (("train", count), ("val", count // 4), ("test", count // 4)):
            self.splits[split] = [make_sample(generator) for _ in range(size)]

    def make_loader(self, split: str, shuffle: bool = False) -> DataLoader:
        return DataLoader(self.splits[split], self.batch_size, shuffle, collate_fn=collate)


def collate(samples: list[tuple[Tensor, Target]]) -> Batch:
    """Return a list of images and a list of targets."""
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


class SmallDetector(nn.Module):
    """Return a dict of losses if there are targets, otherwise a dict of boxes for each image."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(8),
            nn.Flatten(),
            nn.Linear(64 * width, 128),
            nn.ReLU(),
        )
        self.box = nn.Linear(128, 4)
        self.label = nn.Linear(128, 1 + len(COLORS))

    def forward(self, images: list[Tensor], targets: list[Target] | None = None) -> Any:
        features = torch.cat([self.body(image[None]) for image in images])
        logits = self.label(features)
        # The network predicts positions relative to the image size.
        sizes = torch.tensor([[i.shape[2], i.shape[1]] * 2 for i in images], device=logits.device)
        positions = self.box(features).sigmoid()
        if targets is not None:
            boxes = torch.cat([target["boxes"] for target in targets])
            labels = torch.cat([target["labels"] for target in targets])
            box_loss = 10 * functional.l1_loss(positions, boxes / sizes)
            label_loss = functional.cross_entropy(logits, labels)
            return {"loss_box": box_loss, "loss_label": label_loss}
        scores, labels = logits.softmax(1).max(1)
        boxes = positions * sizes
        found = zip(boxes[:, None], labels[:, None], scores[:, None], strict=True)
        return [{"boxes": box, "labels": label, "scores": score} for box, label, score in found]


def compute_iou(found: Target, target: Target) -> float:
    """Return the intersection over union of the first box found, 0 if its label is wrong."""
    if len(found["boxes"]) == 0 or found["labels"][0] != target["labels"][0]:
        return 0.0
    box, true = found["boxes"][0], target["boxes"][0]
    corners = torch.maximum(box[:2], true[:2]), torch.minimum(box[2:], true[2:])
    shared = (corners[1] - corners[0]).clamp(min=0).prod()
    union = (box[2:] - box[:2]).prod() + (true[2:] - true[:2]).prod() - shared
    return float(shared / union)


class Detector(nn.Module):
    """Train a detector on the sum of its losses.

    Args:
        net: "small", or a detector of torchvision, such as "fasterrcnn_mobilenet_v3_large_320_fpn".
        lr: Learning rate of Adam.
    """

    log_dict: Any  # The loop adds it before the first step.

    def __init__(self, net: str = "small", lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.net: nn.Module = SmallDetector()
        if net != "small":
            if find_spec("torchvision") is None:
                raise ValueError("Detector: torchvision is missing. Write pip install torchvision.")
            from torchvision.models import get_model

            self.net = get_model(net, num_classes=1 + len(COLORS), weights_backbone=None)

    def training_step(self, batch: Batch) -> Tensor:
        images, targets = batch
        losses = self.net(images, targets)
        # The loop cannot infer the batch size from a list of images.
        self.log_dict(losses, on_step=False, on_epoch=True, batch_size=len(images))
        return torch.stack(list(losses.values())).sum()

    def validation_step(self, batch: Batch) -> None:
        images, targets = batch
        pairs = zip(self.net(images), targets, strict=True)
        iou = sum(compute_iou(found, target) for found, target in pairs) / len(images)
        self.log_dict({"val_iou": iou}, batch_size=len(images))

    def predict_step(self, batch: Batch) -> list[Target]:
        images, _ = batch
        return self.net(images)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)
