"""A small GPT that predicts the next byte of a text and continues texts.

The model is an nn.Module with step methods. The default text is Python's own help.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .data import SplitData, require_path

VOCABULARY = 256  # One token per byte: every text can be read.


class TextData(SplitData):
    """Cut a text into blocks of bytes. A batch is ``int64 (batch, block + 1)``.

    Args:
        path: A text file. The default is a part of Python's help topics.
        block: Context length. A block has one more byte, the target of its last position.
        batch_size: Blocks per batch.
    """

    def __init__(self, path: str | None = None, block: int = 64, batch_size: int = 32) -> None:
        super().__init__(batch_size)
        self.path = path
        self.block = block

    def setup(self, stage: str | None = None) -> None:
        """Read the text and cut it. Training blocks overlap by half, validation blocks do not."""
        text = torch.tensor(list(self.read_text()), dtype=torch.int64)
        cut = len(text) * 9 // 10
        train, val = text[:cut], text[cut:]
        if len(val) <= self.block:
            raise ValueError(
                f"TextData(block): got {self.block}, expected less than a tenth of the text's"
                f" {len(text)} bytes. Write a smaller block= (--data.block)."
            )
        val_blocks = val.unfold(0, self.block + 1, self.block)
        self.splits = {
            "train": train.unfold(0, self.block + 1, max(self.block // 2, 1)),
            "val": val_blocks,
            "test": val_blocks[:3],  # The beginnings that predict continues.
        }

    def read_text(self) -> bytes:
        if self.path is None:
            from pydoc_data.topics import topics

            return "\n".join(topics.values())[:200_000].encode()
        return require_path("TextData", self.path).read_bytes()


class GPT(nn.Module):
    """Predict the next byte.

    Args:
        block: Context length, at least that of the data.
        width: Width of the embeddings. ``heads`` divides it.
        heads: Attention heads per layer.
        layers: Number of layers.
        lr: Learning rate of AdamW.
        length: Number of bytes that ``predict`` adds to a text.
    """

    def __init__(
        self,
        block: int = 64,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
        lr: float = 3e-3,
        length: int = 200,
    ) -> None:
        super().__init__()
        self.block = block
        self.lr = lr
        self.length = length
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(block, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``(batch, time)`` to scores of the next token ``(batch, time, 256)``."""
        time = tokens.shape[1]
        if time > self.block:
            raise ValueError(
                f"GPT(block): got {self.block}, expected at least the data's {time}."
                f" Write block={time} (--model.block {time})."
            )
        positions = torch.arange(time, device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        # No position attends to a later one.
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=tokens.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)

    def training_step(self, batch: Tensor) -> Tensor:
        """Return the cross-entropy in nats per byte."""
        return functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: Tensor) -> dict[str, Tensor]:
        """Return the loss in nats and in bits, logged as ``val_loss`` and ``val_bits``."""
        loss = self.training_step(batch)
        return {"loss": loss, "bits": loss / math.log(2)}

    def predict_step(self, batch: Tensor) -> list[str]:
        return [bytes(tokens.tolist()).decode(errors="replace") for tokens in self.generate(batch)]

    def generate(self, tokens: Tensor) -> Tensor:
        """Append ``length`` tokens, each drawn from the 20 most likely ones."""
        generator = torch.Generator(tokens.device).manual_seed(0)
        for _ in range(self.length):
            logits = self(tokens[:, -self.block :])[:, -1]
            scores, candidates = logits.topk(20)
            probabilities = functional.softmax(scores / 0.8, dim=1)
            drawn = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat([tokens, candidates.gather(1, drawn)], dim=1)
        return tokens

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)
