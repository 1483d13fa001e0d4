"""Train a small GPT on the bytes of a text file, and generate new text.

The default text comes from Python's help topics. Also try ``--compile true``,
``--precision bf16-mixed`` and ``--max_steps 5000``.
"""

from __future__ import annotations

import math
from pathlib import Path
from pydoc_data.topics import topics
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from .data import SplitData

VOCABULARY = 256  # Each byte is a token, so that text in any language can be used.


class TextData(SplitData):
    """Split a text into blocks of bytes. A batch is an int64 tensor with one block per row.

    Args:
        path: A text file. The default text comes from Python's help topics.
        block: Context length in bytes. A block has one more byte, which is used only as a target.
    """

    def __init__(self, path: str | None = None, block: int = 64, batch_size: int = 32) -> None:
        super().__init__(batch_size)
        self.path = path
        self.block = block

    def setup(self, stage: str | None = None) -> None:
        """Split the text into blocks, which overlap by half in the training data."""
        text = "\n".join(topics.values())[:200_000].encode()
        if self.path is not None:
            text = Path(self.path).read_bytes()
        tokens = torch.tensor(list(text), dtype=torch.int64)
        cut = len(tokens) * 9 // 10
        train = tokens[:cut].unfold(0, self.block + 1, max(self.block // 2, 1))
        val = tokens[cut:].unfold(0, self.block + 1, self.block)
        self.splits = {"train": train, "val": val, "test": val[:3]}


class GPT(LightningModule):
    """Predict the next byte of a text, and print generated text at the end of training.

    Args:
        block: Context length, at least as large as the ``block`` of TextData.
        lr: Highest learning rate of AdamW.
        length: Number of bytes to generate.
    """

    def __init__(
        self, block: int = 64, width: int = 64, layers: int = 2, lr: float = 3e-3, length: int = 200
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(block, width)
        options: Any = {"dropout": 0.0, "activation": "gelu", "batch_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, norm_first=True, **options)
            for _ in range(layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``(batch, time)`` to the logits ``(batch, time, 256)`` of the next tokens."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        # Mask later positions, because the model must not see the tokens that it predicts.
        mask = nn.Transformer.generate_square_subsequent_mask(len(positions), x.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the cross-entropy in nats per byte, which the loop logs as ``train_loss``."""
        return functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.training_step(batch, batch_idx)
        self.log_dict({"val_loss": loss, "val_bits": loss / math.log(2)})

    def on_train_start(self) -> None:
        self.since = perf_counter()

    on_validation_end = on_train_start

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        """Log the training speed since the previous batch, in tokens per second."""
        now = perf_counter()
        speed = batch[:, 1:].numel() / (now - self.since)
        self.log("tokens_per_second", speed, on_step=True, on_epoch=True, prog_bar=True)
        self.since = now

    def on_train_end(self) -> None:
        start = torch.tensor([list(b"The ")], device=self.device)
        self.print(f"generated   {to_text(self.generate(start)[0])!r}")

    def predict_step(self, batch: Tensor, batch_idx: int) -> list[str]:
        return [to_text(tokens) for tokens in self.generate(batch)]

    @torch.no_grad()
    def generate(self, tokens: Tensor) -> Tensor:
        """Extend the text by ``length`` tokens, each drawn from the 20 most likely tokens."""
        generator = torch.Generator(tokens.device).manual_seed(0)
        for _ in range(self.hparams["length"]):
            scores, candidates = self(tokens[:, -self.hparams["block"] :])[:, -1].topk(20)
            probabilities = functional.softmax(scores.float() / 0.8, dim=1)
            drawn = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat([tokens, candidates.gather(1, drawn)], dim=1)
        return tokens

    def configure_optimizers(self) -> tuple[list, list]:
        """Return AdamW, and a schedule with warm-up during the first tenth of the steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        steps = int(self.trainer.estimated_stepping_batches)
        warm_up = steps // 10

        def get_factor(step: int) -> float:
            if step < warm_up:
                return (step + 1) / warm_up
            progress = (step - warm_up) / max(1, steps - warm_up)
            return 0.55 + 0.45 * math.cos(math.pi * progress)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, get_factor)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def to_text(tokens: Tensor) -> str:
    return bytes(tokens.tolist()).decode(errors="replace")
