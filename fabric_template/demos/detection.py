"""Detection: lists of images of several sizes, a dict for each of what is in it, a dict of losses: torchvision's interface.

The data are made, filled rectangles of two colours on noise; the net is a small one, or torchvision's by its name. Rung 3 of
the ladder: an object with step methods.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

COLORS = torch.tensor([[0.9, 0.2, 0.1], [0.1, 0.3, 0.9]])  # of label 1 and of label 2; 0 is the background
Targets = list[dict[str, Tensor]]
Batch = tuple[list[Tensor], Targets]


class Rectangles(Dataset):
    """``(image, target)``: ``float32 (3, height, width)``, and its ``boxes (n, 4)`` as x0, y0, x1, y1 and ``labels (n,)``.

    Example:
        >>> image, target = Rectangles(count=4)[0]
        >>> image.shape, target["boxes"].tolist(), target["labels"].tolist()
        (torch.Size([3, 40, 64]), [[9.0, 7.0, 33.0, 20.0], [39.0, 6.0, 55.0, 28.0]], [1, 2])
    """

    def __init__(self, count: int, seed: int = 0) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        random = torch.Generator().manual_seed(1_000_003 * self.seed + index)

        def draw(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (), generator=random))

        height, width = 8 * draw(5, 8), 8 * draw(5, 8)
        image = 0.5 + 0.15 * torch.randn(3, height, width, generator=random)
        boxes: list[list[float]] = []
        labels = []
        for _ in range(draw(1, 3)):
            h, w = draw(10, 24), draw(10, 24)
            y, x = draw(0, height - h), draw(0, width - w)
            if any(x < x1 and y < y1 and x + w > x0 and y + h > y0 for x0, y0, x1, y1 in boxes):
                continue  # no box lies over another
            boxes.append([x, y, x + w, y + h])
            labels.append(draw(1, len(COLORS)))
            image[:, y : y + h, x : x + w] += COLORS[labels[-1] - 1, :, None, None] - 0.5
        return image, {"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": torch.tensor(labels)}


class RectanglesData:
    """Made images as batches ``([image, ...], [target, ...])``: they have several sizes, so no tensor holds them.

    Args:
        count: Images in the training part; a quarter as many are for validation.
        batch_size: Images per batch.
    """

    def __init__(self, count: int = 800, batch_size: int = 16) -> None:
        self.batch_size = batch_size
        self.train, self.val = Rectangles(count), Rectangles(max(count // 4, 1), seed=1)

    def train_dataloader(self) -> DataLoader:
        """The training part, reshuffled every epoch."""
        return DataLoader(self.train, self.batch_size, shuffle=True, collate_fn=as_lists)

    def val_dataloader(self) -> DataLoader:
        """The validation part."""
        return DataLoader(self.val, self.batch_size, collate_fn=as_lists)

    predict_dataloader = val_dataloader


def as_lists(samples: list[tuple[Tensor, dict[str, Tensor]]]) -> Batch:
    """A list of images, and a list of targets."""
    images, targets = zip(*samples, strict=True)
    return [*images], [*targets]


class TinyDetector(nn.Module):
    """Each cell of 4x4 pixels says whether a middle lies in it, of what, and how far the four sides are.

    In training it takes images and targets and returns a dict of losses; else images, and returns a dict for each with
    boxes, labels and scores, the surest first: as torchvision's do.

    Example:
        >>> TinyDetector().eval()([torch.zeros(3, 40, 48)])[0].keys()
        dict_keys(['boxes', 'labels', 'scores'])
    """

    def __init__(self, width: int = 32, num_classes: int = 3) -> None:
        super().__init__()
        sizes = [(3, width // 2, 2, 1), (width // 2, width, 2, 1), (width, width, 1, 2), (width, width, 1, 4)]
        self.body = nn.Sequential()
        for inputs, outputs, stride, far in sizes:
            self.body += nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, stride, padding=far, dilation=far), nn.BatchNorm2d(outputs), nn.ReLU()
            )
        self.classes, self.sides = nn.Conv2d(width, num_classes, 1), nn.Conv2d(width, 4, 1)

    def forward(self, images: list[Tensor], targets: Targets | None = None) -> Any:
        """A dict of losses in training, a list of dicts else."""
        sizes = [image.shape[1:] for image in images]
        high, wide = max(h for h, _ in sizes), max(w for _, w in sizes)
        padded = torch.stack([functional.pad(i, (0, wide - i.shape[2], 0, high - i.shape[1])) for i in images])
        found = self.body(padded)
        classes, sides = self.classes(found), functional.softplus(self.sides(found)) * 4  # in pixels
        if not self.training:
            return [self._boxes(*one) for one in zip(classes, sides, strict=True)]
        assert targets is not None
        return self._losses(classes, sides, targets)

    def _losses(self, classes: Tensor, sides: Tensor, targets: Targets) -> dict[str, Tensor]:
        true = torch.zeros_like(classes[:, 0], dtype=torch.int64)
        box_losses = []
        for i, target in enumerate(targets):
            for box, label in zip(target["boxes"], target["labels"], strict=True):
                x, y = ((box[:2] + box[2:]) / 8).long().tolist()
                true[i, y, x] = label
                middle = torch.tensor([x, y], device=box.device) * 4 + 2
                wanted = torch.cat([middle - box[:2], box[2:] - middle])
                box_losses.append(functional.l1_loss(sides[i, :, y, x], wanted) / 4)
        # most cells are background, which must not be all that is learned
        weight = torch.tensor([0.1] + [1.0] * (classes.shape[1] - 1), device=classes.device)
        return {"class": functional.cross_entropy(classes, true, weight), "box": torch.stack(box_losses).mean()}

    def _boxes(self, classes: Tensor, sides: Tensor) -> dict[str, Tensor]:
        scores, labels = classes.softmax(0)[1:].max(0)
        peaks = scores == functional.max_pool2d(scores[None], 5, 1, padding=2)[0]  # of neighbours, the surest
        y, x = torch.nonzero(peaks & (scores > 0.5), as_tuple=True)
        middle, (left, up, right, down) = torch.stack([x, y]) * 4 + 2, sides[:, y, x]
        boxes = torch.stack([middle[0] - left, middle[1] - up, middle[0] + right, middle[1] + down], dim=1)
        order = scores[y, x].argsort(descending=True)
        return {"boxes": boxes[order], "labels": labels[y, x][order] + 1, "scores": scores[y, x][order]}


def iou(one: Tensor, other: Tensor) -> Tensor:
    """Each box of the one with each of the other: the part of both together that they share, ``(n, m)``.

    Example:
        >>> iou(torch.tensor([[0.0, 0, 4, 4]]), torch.tensor([[0.0, 0, 4, 4], [0, 0, 2, 4], [5, 5, 6, 6]]))
        tensor([[1.0000, 0.5000, 0.0000]])
    """
    low, high = torch.max(one[:, None, :2], other[:, :2]), torch.min(one[:, None, 2:], other[:, 2:])
    shared = (high - low).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1) for boxes in (one, other)]
    return shared / (areas[0][:, None] + areas[1] - shared).clamp(min=1e-6)


def mean_iou(found: dict[str, Tensor], target: dict[str, Tensor]) -> float:
    """How well an image was read, 0 to 1: each box found, the surest first, takes the best that is left of its label.

    Found is what has a score above a half. What is missed counts as 0, and so does what is not there.
    """
    sure = found["scores"] > 0.5
    left = iou(found["boxes"][sure], target["boxes"]) * (found["labels"][sure, None] == target["labels"])
    total = 0.0
    for row in left:
        best = int(row.argmax())
        total += float(row[best])
        left[:, best] = 0
    return total / max(left.shape)


class Detector(nn.Module):
    """A detector with its steps: the sum of its losses is to go down, the mean IoU to go up.

    Args:
        net: "tiny", or one of torchvision's by its name, such as "fasterrcnn_mobilenet_v3_large_320_fpn".
        lr: Learning rate of Adam.
    """

    log_dict: Any  # the loop's, as long as it runs

    def __init__(self, net: str = "tiny", lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.net = TinyDetector() if net == "tiny" else of_torchvision(net)

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        """What is in each image: boxes, labels, scores."""
        return self.net(images)

    def training_step(self, batch: Batch) -> Tensor:
        """The sum of the net's losses; each of them is logged."""
        losses = self.net(*batch)
        self._log({f"train_{name}": loss for name, loss in losses.items()}, batch)
        return sum(losses.values(), start=torch.zeros((), device=batch[0][0].device))

    def validation_step(self, batch: Batch) -> None:
        """The mean IoU of what is found and what is there."""
        images, targets = batch
        values = [mean_iou(found, target) for found, target in zip(self.net(images), targets, strict=True)]
        self._log({"val_iou": sum(values) / len(values)}, batch)

    def predict_step(self, batch: Batch) -> list[dict[str, Tensor]]:
        """What is in each image."""
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def _log(self, values: dict[str, Any], batch: Batch) -> None:
        # a mean over samples, and how many there are nobody can see in lists of images of several sizes
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=len(batch[0]))


def of_torchvision(name: str) -> nn.Module:
    """One of torchvision's detectors, with new weights, for the labels of `Rectangles`."""
    try:
        from torchvision.models import detection, get_model, list_models
    except ImportError as error:
        raise ValueError(
            f"Detector: net={name!r} needs torchvision: pip install torchvision, or take net='tiny'"
        ) from error
    names = [name for name in list_models(detection) if not name.startswith(("mask", "keypoint"))]  # which need more
    if name not in names:
        raise ValueError(
            f"Detector: torchvision has no detector {name!r}; it has {', '.join(names)}; or take net='tiny'"
        )
    return get_model(name, weights=None, weights_backbone=None, num_classes=len(COLORS) + 1)
