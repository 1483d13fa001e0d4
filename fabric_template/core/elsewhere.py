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

# what is so here, too: given as Trainer has it by default, such a word asks for nothing more
AS_HERE = {
    "use_distributed_sampler": True,
    "sync_batchnorm": False,
    "enable_autolog_hparams": True,
    "model_registry": None,
}

# what Trainer says of a value that it does not take
_IN_RANGE = "You have passed invalid value {value} for {name}, it has to be in [0.0, 1.0] or an int."
_LIMITED = (
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
)
_TRAINERS_WORDS = {
    **dict.fromkeys((*_LIMITED, "val_check_interval"), _IN_RANGE),
    "max_epochs": "`max_epochs` must be a non-negative integer or -1. You passed in {value}.",
    "max_steps": "`max_steps` must be a non-negative integer or -1 (infinite steps). You passed in {value}.",
    "max_time": "`Timer(duration={value!r})` is not a valid duration. Expected a string in the format DD:HH:MM:SS.",
    "fast_dev_run": "fast_dev_run={value} is not a valid configuration. It should be >= 0.",
    "check_val_every_n_epoch": "`check_val_every_n_epoch` should be an integer, found {value!r}.",
    "reload_dataloaders_every_n_epochs": "`reload_dataloaders_every_n_epochs` should be an int >= 0, got {value}.",
    "gradient_clip_val": "`gradient_clip_val` should be an int or a float. Got {value}.",
    "gradient_clip_algorithm": "`gradient_clip_algorithm` {value} is invalid. Allowed algorithms: ['value', 'norm'].",
}


def trainers_words(name: str, value: object) -> str:
    """The same in Trainer's words, for who looks for them; nothing where it has none.

    Example:
        >>> trainers_words("max_epochs", -7)
        ' (`max_epochs` must be a non-negative integer or -1. You passed in -7.)'
    """
    words = _TRAINERS_WORDS.get(name, "")
    if name == "val_check_interval" and isinstance(value, str):
        words = "Invalid time format for `val_check_interval`: {value!r}. Expected 'DD:HH:MM:SS'."
    return words and f" ({words.format(name=name, value=value)})"


_SLOW = {
    "logger": "Logging", "log_every_n_steps": "Logging", "enable_checkpointing": "Checkpointing", "profiler": "Profiling",
    "enable_progress_bar": "The progress bar", "enable_model_summary": "Model summary",
    "num_sanity_val_steps": "Sanity checking", "detect_anomaly": "Anomaly detection", "on_nan": "Reading each loss",
}  # fmt: skip


def off_in_barebones(name: str, value: object) -> str:
    """Why a word cannot be given beside barebones, in Trainer's words.

    Example:
        >>> off_in_barebones("logger", True)[:42]
        '`Trainer(barebones=True, logger=True)` was'
    """
    why = (
        f"{_SLOW[name]} can impact raw speed"
        if name in _SLOW
        else "Development run is not meant for raw speed evaluation"
    )
    what = f"`Trainer(barebones=True, {name}={value!r})` was passed"
    return f"{what}. {why} so it is disabled in barebones mode. Leave {name}= out"


def why_unknown(word: str, known: list[str]) -> str:
    """What to write for a word that is none of the loop's: what it is called here, or the nearest known one."""
    if instead := {**ELSEWHERE, **TRAINER_ONLY}.get(word):
        return f"FabricLoop has no argument {word}: {instead}"
    near = difflib.get_close_matches(word, [*known, *FABRIC_WORDS], n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join([*FABRIC_WORDS, *known])}"
    return f"FabricLoop has no argument {word}; {hint}"
