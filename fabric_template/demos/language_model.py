"""Language model: a small GPT that reads a text by characters, and goes on with it.

The text is one that is always at hand, this package's own source, or a file of yours. Rung 3 of the ladder.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

HERE = Path(__file__).parents[1] / "core"
CHARACTERS = 256  # a character is a byte: every text can be read, and the net need not be told which are in it


class TextData:
    """A text as batches ``(batch, block + 1)`` of bytes, ``int64``: each character but the last is followed by the next.

    Args:
        path: A text file. None: the source of this package's room core/, about 150,000 characters.
        block: How many characters the net sees at once.
        batch_size: Blocks per batch.
        val_fraction: Share of the text, its end, that is kept for validation.

    Example:
        >>> data = TextData(block=8, batch_size=4)
        >>> data.setup()
        >>> next(iter(data.train_dataloader())).shape
        torch.Size([4, 9])
    """

    def __init__(
        self, path: str | None = None, block: int = 64, batch_size: int = 32, val_fraction: float = 0.1
    ) -> None:
        self.path, self.block, self.batch_size, self.val_fraction = path, block, batch_size, val_fraction
        self.train = self.val = torch.empty(0, dtype=torch.int64)

    def setup(self, stage: str | None = None) -> None:
        """Read the text."""
        files = [Path(self.path)] if self.path is not None else sorted(HERE.glob("*.py"))
        try:
            text = b"\n\n".join(file.read_bytes() for file in files)
        except OSError as error:
            raise ValueError(
                f"TextData: path={self.path!r} cannot be read: {error.strerror}; give a text file"
            ) from error
        cut = int(len(text) * (1 - self.val_fraction))
        shortest = min(cut, len(text) - cut)
        if shortest <= self.block:
            raise ValueError(
                f"TextData: {len(text):,} characters leave {shortest:,} for one of the two parts: too few for block="
                f"{self.block}; give a longer text, a smaller block, or a val_fraction nearer to 0.5"
            )
        self.train, self.val = (torch.tensor(list(part), dtype=torch.int64) for part in (text[:cut], text[cut:]))

    def train_dataloader(self) -> DataLoader:
        """Blocks of the training part, which overlap by half, reshuffled every epoch."""
        return DataLoader(Blocks(self.train, self.block, self.block // 2 or 1), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Blocks of the validation part, one behind the other."""
        return DataLoader(Blocks(self.val, self.block, self.block), self.batch_size)

    def predict_dataloader(self) -> DataLoader:
        """Three beginnings out of the validation part."""
        return DataLoader(Blocks(self.val, self.block, (len(self.val) - self.block - 1) // 2), batch_size=3)

    def unigram_bits(self) -> float:
        """Bits per character of the validation part, if one knows how frequent each character is, and nothing else."""
        counts = torch.bincount(self.train, minlength=CHARACTERS).double() + 1e-3
        return functional.cross_entropy(counts.log().expand(len(self.val), -1), self.val).item() / math.log(2)


class Blocks(Dataset):
    """Pieces of a text, `block` characters and the one behind them, that begin `stride` characters after each other."""

    def __init__(self, text: Tensor, block: int, stride: int) -> None:
        self.pieces = text.unfold(0, block + 1, max(stride, 1))

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> Tensor:
        return self.pieces[index]


class Layer(nn.Module):
    """Attention to what came before, then a net for each character by itself; both are added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.attention, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.net = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, width)`` to the same shape."""
        batch, time, width = x.shape
        parts = self.attention(self.norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, time, width))
        return x + self.net(x)


class GPT(nn.Module):
    """A GPT of characters. Losses are cross-entropies in nats per character, ``val_bits`` the same in bits.

    Args:
        block: The most characters it sees at once; that of the data, or more.
        width: Numbers per character.
        heads: How many places a layer can look at, for each character. Divides the width.
        layers: How many layers.
        lr: Learning rate of AdamW.
        length: How many characters ``predict`` goes on with.

    Example:
        >>> GPT(width=16, heads=2, layers=1)(torch.zeros(2, 5, dtype=torch.int64)).shape
        torch.Size([2, 5, 256])
    """

    def __init__(
        self, block: int = 64, width: int = 64, heads: int = 4, layers: int = 2, lr: float = 3e-3, length: int = 200
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"GPT: heads={heads} must divide width={width}")
        self.block, self.lr, self.length = block, lr, length
        self.characters, self.places = nn.Embedding(CHARACTERS, width), nn.Embedding(block, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CHARACTERS))

    def forward(self, text: Tensor) -> Tensor:
        """Characters ``(batch, time)`` to a score for each that may come next ``(batch, time, 256)``."""
        if text.shape[1] > self.block:
            raise ValueError(
                f"GPT: a text of {text.shape[1]} characters, but block={self.block}: give block=, at least that"
            )
        places = torch.arange(text.shape[1], device=text.device)
        return self.out(self.layers(self.characters(text) + self.places(places)))

    def training_step(self, batch: Tensor) -> Tensor:
        """The loss over all characters of the blocks."""
        return functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: Tensor) -> dict[str, Tensor]:
        """The loss, and the same in bits: what a character costs if it is stored by this net's guesses."""
        loss = self.training_step(batch)
        return {"loss": loss, "bits": loss / math.log(2)}

    def predict_step(self, batch: Tensor) -> list[str]:
        """Each text, and what the net goes on with."""
        return [bytes(text.tolist()).decode("utf-8", "replace") for text in self.go_on(batch)]

    def go_on(self, text: Tensor) -> Tensor:
        """Draw characters one by one, from the 20 most likely each; the same ones at each call.

        Example:
            >>> GPT(width=16, heads=2, layers=1, length=7).go_on(torch.zeros(2, 5, dtype=torch.int64)).shape
            torch.Size([2, 12])
        """
        random = torch.Generator(text.device).manual_seed(0)
        for _ in range(self.length):
            scores, which = (self(text[:, -self.block :])[:, -1] / 0.8).topk(20)
            drawn = torch.multinomial(scores.softmax(1), 1, generator=random)
            text = torch.cat([text, which.gather(1, drawn)], dim=1)
        return text

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)
