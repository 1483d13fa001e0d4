"""Elsewhere: words that other loops have, and Fabric, and fit; what to write for them here."""

import difflib

FABRIC_WORDS = (
    "fabric",
    "accelerator",
    "strategy",
    "devices",
    "num_nodes",
    "precision",
    "plugins",
    "loggers",
    "callbacks",
)

# words of other loops, and of fit
ELSEWHERE = {
    "epochs": "write max_epochs=",
    "num_epochs": "write max_epochs=",
    "steps": "write max_steps=",
    "gpus": "write accelerator='gpu', devices=",
    "device": "write accelerator='cpu' or 'gpu', devices=",
    "amp": "write precision='bf16-mixed' or '16-mixed'",
    "lr": "give it to your optimizer: torch.optim.Adam(model.parameters(), lr=1e-3)",
    "learning_rate": "give it to your optimizer: torch.optim.Adam(model.parameters(), lr=1e-3)",
    "batch_size": "give it to your loader: DataLoader(dataset, batch_size=32)",
    "optimizer": "give it to fit: fit(model, loader, optimizer=...)",
    "resume_from_checkpoint": "give the path to fit as resume=",
    "resume": "give it to fit: fit(model, loader, resume='last')",
    "checkpoint_callback": "write enable_checkpointing=",
    "terminate_on_nan": "write on_nan=1",
}

TRAINER_ONLY = {
    "use_distributed_sampler": "samplers are made distributed unless the loader already has a DistributedSampler",
    "sync_batchnorm": "call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before fit",
    "enable_autolog_hparams": "hyperparameters are always written to hparams.yaml; logger=False writes nothing",
    "model_registry": "download the file yourself and give its path to resume= or load=",
    "ckpt_path": "give the path to fit as resume= (continue the run) or load= (weights only)",
    "weights_only": "checkpoints are read with weights_only=True, unless trusted=True; fit and the other verbs take it, too",
}


def why_unknown(word: str, known: list[str]) -> str:
    """What to write for a word that is none of the loop's: what it is called here, or the nearest known one."""
    if instead := {**ELSEWHERE, **TRAINER_ONLY}.get(word):
        return f"FabricLoop has no argument {word}: {instead}"
    near = difflib.get_close_matches(word, [*known, *FABRIC_WORDS], n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join([*FABRIC_WORDS, *known])}"
    return f"FabricLoop has no argument {word}; {hint}"
