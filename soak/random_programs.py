"""Draw the description of a random program, and assemble its source code from the pieces in program_pieces.py.

A description maps each dimension, such as "net", to the name of a piece, such as "dropout". The seed and the
number of a program determine its description.
"""

import random
import re

import program_pieces as pieces

ORDERS = {**pieces.SAMPLERS, **pieces.BATCH_SAMPLERS}
# These networks draw random numbers. Trainer cannot resume their
# training exactly, because it does not restore RNG states.
RANDOM_NETS = ("dropout", "library_noise", "eval_mode", "random_activation", "recomputed")
# Training changes attributes of these networks. Trainer does not save them, so it cannot resume exactly.
NETS_WITH_ATTRIBUTES = ("memory_bank", "hidden_state", "running_mean", "deque", "array", "counts")
NETS_WITH_ATTRIBUTES += ("recurrent_state", "schedule")
HOOKS_WITH_ATTRIBUTES = {"plain_state", "keeps_outputs", "follows_best", "draws_orders"}
HOOKS_WITH_ATTRIBUTES |= {"adds_noise", "captures_activations"}
PLAIN_ORDERS = ("in_order", "sequential", "own_set_epoch", "distributed")

# ---- Functions that draw the description of a random program


def draw(seed, number, ranks=1, killed=False, only=()):
    """Draw the description of a program: the name of a piece for each dimension.

    Args:
        seed: The seed of all programs.
        number: The number of this program.
        ranks: The number of processes.
        killed: Whether to also draw an event that ends the first run.
        only: Pairs that the description must contain, such as ("net", "dropout").
    """
    generator = random.Random(f"{seed}/{number}/{ranks}/{killed}")
    while True:
        description = draw_once(generator, ranks, killed)
        description["number"] = number
        is_wanted = all(has_shape(description, *pair) for pair in only)
        if is_wanted and is_possible(description):
            return description


def has_shape(description, dimension, shape):
    value = description.get(dimension)
    return shape in value if isinstance(value, list | dict) else str(value) == shape


def choose(generator, names, odds=1.0, default=None):
    """Return a random name with the probability `odds`, and otherwise the default."""
    return generator.choice(list(names)) if generator.random() < odds else default


def draw_once(generator, ranks, killed):
    plain_styles = [name for name in pieces.STYLES if not name.startswith("lightning")]
    other_styles = [name for name in pieces.STYLES if name.startswith("lightning_")]
    style = choose(generator, plain_styles, 0.55, "lightning")
    style = choose(generator, other_styles, 0.08, style)
    net = choose(generator, ["sparse_embedding"], 0.03) or choose(generator, pieces.NETS)
    optimizer = choose(generator, pieces.OPTIMIZERS, 0.8, "SGD")
    description = {
        "style": style,
        "net": net,
        **draw_data(generator),
        "val": choose(generator, pieces.VAL_LOADERS, 0.8, "one"),
        "optimizer": "SparseAdam" if net == "sparse_embedding" else optimizer,
        "scheduler": choose(generator, pieces.SCHEDULERS, 0.6, "none"),
        "interval": choose(generator, ["step", "epoch"]),
        "frequency": choose(generator, [1, 1, 2, 3]),
        "returned": choose(generator, pieces.RETURNED),
        "log": "nothing",
        "hyperparameters": "none",
        "given": "loaders",
        "metric": "none",
        "hooks": [],
        "callbacks": [],
        "ranks": ranks,
    }
    if is_lightning(description):
        draw_lightning(generator, description)
    description["options"] = draw_options(generator, description, killed)
    if description["val"] == "shuffled":
        description["options"]["num_sanity_val_steps"] = 0
    description["event"] = draw_event(generator, description) if killed else None
    return description


def draw_data(generator):
    loader = choose(generator, pieces.LOADERS, 0.4, "dataloader")
    is_stream = loader == "dataloader" and generator.random() < 0.15
    description = {
        "loader": loader,
        "data": choose(generator, pieces.STREAMS if is_stream else pieces.DATASETS),
        "sampler": "none" if is_stream else choose(generator, ORDERS),
        "batch": choose(generator, pieces.BATCHES, 0.5, "default"),
        "workers": choose(generator, [2], 0.1, 0),
        "persistent": choose(generator, [True], 0.5, False),
        "drop_last": choose(generator, [True], 0.2, False),
    }
    if loader in pieces.OWN_LOADERS:
        description = {**{name: SIMPLEST[name] for name in description}, "loader": loader}
    return description


def draw_lightning(generator, description):
    if description["style"] == "lightning_buffers":
        names = ("net", "optimizer", "scheduler", "val", "returned")
        description |= {name: SIMPLEST[name] for name in names}
        return
    description["log"] = choose(generator, pieces.LOGS)
    description["hyperparameters"] = choose(generator, pieces.HYPERPARAMETERS, 0.4, "none")
    description["given"] = choose(generator, ["datamodule"], 0.15, "loaders")
    description["metric"] = choose(generator, pieces.METRICS, 0.15, "none")
    description["hooks"] = [name for name in pieces.HOOKS if generator.random() < 0.04]
    description["callbacks"] = [name for name in pieces.CALLBACKS if generator.random() < 0.04]


# Map each option to (the probability that a program sets it, its possible values).
OPTIONS = {
    "accumulate_grad_batches": (0.12, [2, 3]),
    "gradient_clip_val": (0.12, [0.1, 1.0]),
    "gradient_clip_algorithm": (0.12, ["value"]),
    "limit_train_batches": (0.08, [4, 0.5]),
    "limit_val_batches": (0.05, [1, 0.5]),
    "precision": (0.12, ["64-true", "bf16-true", "bf16-mixed"]),
    "max_steps": (0.08, [5, 9]),
    "val_check_interval": (0.08, [2, 0.5, {"microseconds": 1}]),
    "check_val_every_n_epoch": (0.04, [2]),
    "num_sanity_val_steps": (0.2, [0, -1]),
    "overfit_batches": (0.03, [3]),
    "reload_dataloaders_every_n_epochs": (0.04, [1]),
    "min_epochs": (0.03, [2]),
    "deterministic": (0.03, [True]),
    "detect_anomaly": (0.02, [True]),
    "inference_mode": (0.05, [False]),
    "monitor": (0.15, ["val_loss", "train_loss"]),
    "save_top_k": (0.05, [2, -1]),
    "save_last": (0.03, [False]),
    "validate_every_n_steps": (0.08, [3]),
    "save_every_n_steps": (0.12, [1, 2, 3]),
    "seed": (0.05, [3]),
    "log_grad_norm": (0.04, [True]),
}


def draw_options(generator, description, killed):
    options = {
        "max_epochs": generator.choice([2, 3]),
        "log_every_n_steps": generator.choice([1, 1, 3]),
    }
    for name, (odds, values) in OPTIONS.items():
        if generator.random() < odds * (1.5 if killed else 1):
            options[name] = generator.choice(values)
    return options


# Map each event to its relative frequency. The events in CHANGES
# change something between two runs, such as the batch size.
EVENTS = {
    "SIGKILL": 8,
    "SIGTERM": 2,
    "SIGINT": 2,
    "error": 2,
    "disk_full": 2,
    "more_epochs": 2,
    "new_monitor": 1,
    "other_batch_size": 1,
    "to_Trainer": 1,
    "from_Trainer": 1,
}
CROSSINGS = ("to_Trainer", "from_Trainer")
CHANGES = ("more_epochs", "new_monitor", "other_batch_size", *CROSSINGS)
POINTS = ("backward", "step", "batch", "hook")


def draw_event(generator, description):
    kind = generator.choices(list(EVENTS), EVENTS.values())[0]
    points = {"disk_full": ["disk"], "SIGKILL": [*POINTS, "disk", "disk"]}
    return {
        "kind": kind,
        "at": generator.choice(points.get(kind, POINTS)),
        "part": round(generator.random(), 4),
        "rank": generator.randrange(description["ranks"]),
        "is_repeated": generator.random() < 0.2,
        "crosses": kind not in CROSSINGS and generator.random() < 0.2,
    }


def is_lightning(description):
    return description["style"].startswith("lightning")


def is_complete_in_trainer(d):
    """Return whether Trainer's checkpoints contain everything that changes during a run."""
    return (
        d["net"] not in (*RANDOM_NETS, *NETS_WITH_ATTRIBUTES)
        and d["data"] in ("tensors", "points", "stream", "sized_stream")
        and d["sampler"] in ("none", *PLAIN_ORDERS)
        and d["loader"] == "dataloader"
        and d["metric"] != "bootstrap"
        and "own_generators" not in d["hooks"]
    )


def has_repeated_method(hooks):
    methods = [name for hook in hooks for name in re.findall(r"def (\w+)", pieces.HOOKS[hook])]
    return len(set(methods)) < len(methods)


# These callbacks need a metric to monitor, so they exclude programs that do not log this metric.
FOLLOWERS = {"early_stopping", "early_stopping_in_training", "best_checkpoint"}


def event_kind(d):
    return d["event"]["kind"] if d["event"] else None


def runs_with_trainer(d):
    """Return whether Trainer runs a program with a LightningModule, as the oracle or to test a switch of loops."""
    return not d["event"] or event_kind(d) in CROSSINGS


# Never draw a program that makes no sense. Each entry is (reason, condition on the description).
INVALID = [
    ("persistent workers need workers", lambda d: d["persistent"] and not d["workers"]),
    (
        "SparseAdam and sparse gradients require each other",
        lambda d: (d["optimizer"] == "SparseAdam") != (d["net"] == "sparse_embedding")
        or (d["optimizer"] == "SparseAdam" and d["style"] in ("object_list", "object_dict")),
    ),
    (
        "torch does not clip sparse gradients",
        lambda d: (
            d["net"] == "sparse_embedding"
            and ("gradient_clip_val" in d["options"] or "clips" in d["hooks"])
        ),
    ),
    (
        "a batch sampler has its own batch size",
        lambda d: d["sampler"] in pieces.BATCH_SAMPLERS and d["drop_last"],
    ),
    (
        "a clip algorithm needs a clip value",
        lambda d: (
            "gradient_clip_algorithm" in d["options"] and "gradient_clip_val" not in d["options"]
        ),
    ),
    (
        "a plateau scheduler needs a metric",
        lambda d: (
            d["scheduler"] == "ReduceLROnPlateau"
            and (
                d["val"] == "none"
                or d["interval"] == "step"
                or "check_val_every_n_epoch" in d["options"]
            )
        ),
    ),
    (
        "val_loss needs a validation",
        lambda d: d["options"].get("monitor") == "val_loss" and d["val"] == "none",
    ),
    ("several best files need a monitor", lambda d: "save_top_k" in d["options"] and "monitor" not in d["options"]),
    (
        "several validation loaders give several losses",
        lambda d: (
            d["val"] == "two"
            and (
                not is_lightning(d)
                or d["options"].get("monitor") == "val_loss"
                or d["scheduler"] == "ReduceLROnPlateau"
                or FOLLOWERS & set(d["callbacks"])
            )
        ),
    ),
    (
        "a LightningModule must log the monitored metric",
        lambda d: (
            is_lightning(d)
            and d["log"] not in ("epoch", "both")
            and (
                d["options"].get("monitor") == "train_loss"
                or (d["val"] == "none" and FOLLOWERS & set(d["callbacks"]))
            )
        ),
    ),
    (
        "a fraction of the batches needs a loader with a length",
        lambda d: (
            0.5 in (d["options"].get("limit_train_batches"), d["options"].get("val_check_interval"))
            and (d["data"] in pieces.STREAMS or d["loader"] == "own_iterable")
        ),
    ),
    (
        "half of one validation batch is no batch",
        lambda d: d["options"].get("limit_val_batches") == 0.5 and (d["val"] == "two" or d["ranks"] > 1),
    ),
    (
        "Lightning refuses to accumulate twice",
        lambda d: "accumulation" in d["callbacks"] and "accumulate_grad_batches" in d["options"],
    ),
    (
        "a run supports only one callback that averages weights",
        lambda d: len({"swa", "ema", "averages"} & set(d["callbacks"])) > 1,
    ),
    ("LearningRateMonitor needs a scheduler and a logger", lambda d: "rates" in d["callbacks"]),
    (
        "ModelCheckpoint cannot be combined with FabricLoop's checkpoint options",
        lambda d: (
            {"model_checkpoint", "best_checkpoint"} & set(d["callbacks"])
            and {"monitor", "save_every_n_steps", "save_top_k", "save_last"} & set(d["options"])
        ),
    ),
    ("two ModelCheckpoints would save the same files", lambda d: {"model_checkpoint", "best_checkpoint"} <= set(d["callbacks"])),
    (
        "a run has only one validation interval",
        lambda d: "validate_every_n_steps" in d["options"]
        and {"val_check_interval", "check_val_every_n_epoch"} & set(d["options"]),
    ),
    (
        "Trainer has neither validate_every_n_steps nor seed",
        lambda d: is_lightning(d)
        and runs_with_trainer(d)
        and {"validate_every_n_steps", "seed"} & set(d["options"]),
    ),
    (
        "overfit_batches sets the order and the limit of batches",
        lambda d: "overfit_batches" in d["options"]
        and ("limit_train_batches" in d["options"] or "limit_val_batches" in d["options"] or not is_lightning(d)),
    ),
    (
        "manual optimization does not support options of automatic optimization",
        lambda d: d["style"] in ("lightning_manual", "lightning_two_optimizers", "lightning_buffers")
        and (
            {"accumulate_grad_batches", "gradient_clip_val"} & set(d["options"])
            or {"accumulation", "swa", "ema", "averages", "unfreezes"} & set(d["callbacks"])
            or d["returned"] == "skips"
            or {"clips", "warms_up", "freezes", "freezes_once", "adds_group", "clears_gradients"} & set(d["hooks"])
            or d["optimizer"] in ("LBFGS", "SAM", "SparseAdam")
        ),
    ),
    (
        "the style with two optimizers has its own scheduler",
        lambda d: d["style"] == "lightning_two_optimizers" and d["scheduler"] != "none",
    ),
    (
        "a model with only buffers has no loss",
        lambda d: d["style"] == "lightning_buffers"
        and (d["val"] != "none" or d["log"] != "nothing" or d["options"].keys() & {"monitor"}
             or d["loader"] in pieces.SEVERAL_LOADERS or d["callbacks"]
             or (d["net"], d["optimizer"], d["scheduler"]) != ("linear", "SGD", "none")),
    ),
    (
        "a module can define each hook only once",
        lambda d: has_repeated_method(d["hooks"]),
    ),
    (
        "a sanity check uses the generator of the validation loader, and MiniLoop has no sanity check",
        lambda d: d["val"] == "shuffled" and d["options"].get("num_sanity_val_steps") != 0,
    ),
    (
        "torch's schedulers do not support new parameter groups",
        lambda d: "adds_group" in d["hooks"]
        and (d["scheduler"] != "none" or d["optimizer"].endswith("groups") or "swa" in d["callbacks"]),
    ),
    (
        "a skipped batch needs a module with one optimizer that needs no gradient, on one process",
        lambda d: d["returned"] == "skips"
        and (
            d["style"] != "lightning" or d["ranks"] > 1 or d["optimizer"] in ("LBFGS", "SAM", "own")
            or d["loader"] in pieces.SEVERAL_LOADERS
            or "gradient_clip_algorithm" in d["options"]
            or d["options"].get("precision") == "bf16-mixed"
        ),
    ),
    (
        "unfrozen layers form a new parameter group",
        lambda d: "unfreezes" in d["callbacks"]
        and (
            d["net"] not in ("mlp", "dropout", "batchnorm", "tied") or d["scheduler"] != "none" or d["ranks"] > 1
            or d["optimizer"] in ("LBFGS", "Muon", "SAM") or d["optimizer"].endswith("groups")
            or {"freezes", "freezes_once", "adds_group", "saves_own"} & set(d["hooks"])
            or {"swa", "accumulation", "ema", "averages"} & set(d["callbacks"])
        ),
    ),
    (
        "hooks that freeze a linear layer need a second layer",
        lambda d: {"freezes", "freezes_once"} & set(d["hooks"])
        and d["net"] not in ("mlp", "dropout", "batchnorm"),
    ),
    ("loaders come from one place", lambda d: "own_loader" in d["hooks"] and d["given"] == "datamodule"),
    (
        "the option seed= also seeds NumPy in workers, as seed_everything(workers=True) does",
        lambda d: "seed" in d["options"] and d["workers"] and not is_lightning(d),
    ),
    (
        "a step-based run writes its rows at validations",
        lambda d: "validate_every_n_steps" in d["options"] and d["val"] == "none",
    ),
    (
        "Trainer continues only a LightningModule without randomness exactly",
        lambda d: event_kind(d) in CROSSINGS
        and not (d["style"] == "lightning" and is_complete_in_trainer(d)),
    ),
    (
        "a change of the batch size needs a loader that has one",
        lambda d: event_kind(d) == "other_batch_size"
        and not (
            d["loader"] == "dataloader"
            and d["sampler"] in ("in_order", "shuffle")
            and not is_lightning(d)
            # Starting workers draws a random number, and the hand-written
            # loop starts persistent workers at a different time.
            and not d["persistent"]
            # This dataset changes with each read, and the hand-written loop creates a new dataset.
            and d["data"] != "counts_reads"
            # Without a checkpoint, resume="auto" starts a new run.
            and d["options"].get("save_last") is not False
        ),
    ),
    (
        "a different monitor needs a second metric",
        lambda d: event_kind(d) == "new_monitor"
        and (is_lightning(d) or d["val"] == "none" or {"monitor", "save_top_k"} & set(d["options"])),
    ),
    (
        "only a callback can end a run in a hook",
        lambda d: d["event"] and d["event"]["at"] == "hook" and not is_lightning(d),
    ),
    (
        "hooks that change weights by values of one process break DDP",
        lambda d: d["ranks"] > 1
        and {"keeps_outputs", "adds_noise", "captures_activations", "follows_best"} & set(d["hooks"]),
    ),
    (
        "the sampler of the program's own batch sampler is unknown, so two processes cannot share it",
        lambda d: d["ranks"] > 1 and d["sampler"].startswith("own_batches") and not is_lightning(d),
    ),
    ("a change between epochs cannot be combined with max_steps",
     lambda d: event_kind(d) in CHANGES and "max_steps" in d["options"]),
]  # fmt: skip

# Never draw a program in which torch or Lightning is inexact. Each entry is (reason, condition on the description).
EXCLUDED = [
    (
        "workers of a stream with a length may yield more batches, which both loops refuse while they train",
        lambda d: d["data"] == "sized_stream" and d["workers"] and not is_lightning(d),
    ),
    (
        "Trainer fails with EarlyStopping and a time-based val_check_interval",
        lambda d: (
            "early_stopping" in d["callbacks"]
            and isinstance(d["options"].get("val_check_interval"), dict)
            and runs_with_trainer(d)
        ),
    ),
    (
        "ModelCheckpoint saves before the module's on_train_batch_end",
        lambda d: (
            any("def on_train_batch_end" in pieces.HOOKS[name] for name in d["hooks"])
            and "model_checkpoint" in d["callbacks"]
            and d["event"]
        ),
    ),
    (
        "Trainer shares a batch sampler without its batch size",
        lambda d: (
            d["ranks"] > 1
            and "batches" in d["sampler"]
            and is_lightning(d)
            and runs_with_trainer(d)
        ),
    ),
    (
        "StochasticWeightAveraging ends with the last epoch, so a run with fewer epochs gives different results",
        lambda d: "swa" in d["callbacks"] and event_kind(d) in CHANGES,
    ),
    (
        "WeightAveraging copies the module before its setup, so its file lacks what setup adds",
        lambda d: (
            {"averages", "averages_late"} & set(d["hooks"])
            and {"ema", "averages"} & set(d["callbacks"])
            and d["event"]
        ),
    ),
    (
        "FabricLoop does not count the random numbers of the validation that should_stop causes",
        lambda d: "stops_itself" in d["hooks"] and d["val"] != "none" and not d["event"],
    ),
    (
        "torch refuses a frozenset with weights_only, as Trainer reads files",
        lambda d: d["hyperparameters"] == "set" and event_kind(d) in CROSSINGS,
    ),
    (
        "Trainer does not save the attributes of a module",
        lambda d: HOOKS_WITH_ATTRIBUTES & set(d["hooks"]) and event_kind(d) in CROSSINGS,
    ),
    (
        "attributes of a dataset in a worker are not saved",
        lambda d: d["data"] == "counts_reads" and d["workers"] and d["event"],
    ),
    (
        "the first step of torch's fused SGD reads an uninitialized bfloat16 momentum",
        lambda d: (
            d["optimizer"] == "SGD_fused"
            and (d["options"].get("precision") == "bf16-true" or d["net"] == "bfloat16")
        ),
    ),
    (
        "Trainer takes a list for several loaders. It draws the first order of a TensorLoader twice, and does not share it",
        lambda d: (
            (
                d["loader"] in ("list_of_batches", "tensor_loader", "tensor_loader_generator")
                or (d["val"] == "tensor_loader" and d["ranks"] > 1)
            )
            and is_lightning(d)
            and runs_with_trainer(d)
        ),
    ),
    (
        "Trainer reads a batch of each reloaded loader without a length twice, and draws each reloaded order twice",
        lambda d: (
            "reload_dataloaders_every_n_epochs" in d["options"]
            and (
                not is_lightning(d) or d["data"] in pieces.STREAMS or d["loader"] == "own_iterable"
            )
            and not d["event"]
        ),
    ),
    (
        "Trainer replaces the sampler of one of several loaders, and fails with the others",
        lambda d: "overfit_batches" in d["options"] and d["loader"] in pieces.SEVERAL_LOADERS,
    ),
    (
        "the sanity check initializes a lazy module, with random numbers that training does not see",
        lambda d: (
            d["net"] == "lazy"
            and d["val"] != "none"
            and d["options"].get("num_sanity_val_steps") != 0
            and not is_lightning(d)
        ),
    ),
    (
        "Trainer does not call set_epoch of a batch sampler",
        lambda d: d["sampler"] == "own_batches_set_epoch" and is_lightning(d) and not d["event"],
    ),
]


def is_possible(description):
    return not any(is_in(description) for _, is_in in (*INVALID, *EXCLUDED))


# ---- Functions that assemble the source code of a program from a description


def assemble(description):
    d = description
    samples = 26 if d["ranks"] == 1 else 28
    # Callbacks monitor val_loss, or train_loss if the program has no validation.
    monitor = "val_loss" if d["val"] != "none" else "train_loss"
    sampler_code, sampler = {"none": ("", "")}.get(d["sampler"]) or ORDERS[d["sampler"]]
    is_own_loader = d["loader"] in pieces.OWN_LOADERS
    is_several = d["loader"] in pieces.SEVERAL_LOADERS
    has_net = d["style"] != "lightning_buffers"
    loss = pieces.LOSS_OF_SEVERAL if is_several else pieces.LOSS
    parts = [
        pieces.fill(pieces.HEADER, samples=samples),
        "" if is_own_loader else {**pieces.DATASETS, **pieces.STREAMS}[d["data"]],
        pieces.BATCHES[d["batch"]],
        sampler_code,
        pieces.fill(pieces.LOADERS[d["loader"]], arguments=loader_arguments(d, sampler)),
        pieces.VAL_LOADERS[d["val"]],
        loss if has_net else "",
        pieces.EVAL_LOSS if d["val"] != "none" else "",
        pieces.NETS[d["net"]] if has_net else "",
        pieces.OPTIMIZER_CLASSES.get(d["optimizer"], ""),
        pieces.HYPERPARAMETER_CLASSES.get(d["hyperparameters"], ""),
        make_optimizer(d) if has_net else "",
        *(pieces.CALLBACK_CLASSES.get(name, "") for name in d["callbacks"]),
        data_module(d),
        style_code(d),
    ]
    values = {
        "log": pieces.LOGS[d["log"]],
        "returned": pieces.RETURNED[d["returned"]],
        "validation": "" if d["val"] == "none" else ", validation_step=validation_step",
        "val": "None" if d["val"] == "none" else "make_val()",
        "hyperparameters": pieces.HYPERPARAMETERS.get(d["hyperparameters"], ""),
        "callbacks": ", ".join(pieces.CALLBACKS[name] for name in d["callbacks"]),
        "options": ", ".join(f"{name}={value!r}" for name, value in d["options"].items()),
        "monitor": monitor,
        "collate": "" if d["batch"] == "default" else ", collate_fn=collate",
        "outside": " + [OUTSIDE]" if d["net"] == "outside_parameters" else "",
    }
    source = join_source([pieces.fill(part, **values) for part in parts])
    if d["batch"] == "default":
        source = re.sub(r"get_xy\((batch|part)\)", r"\1", source)
    return source


def data_module(d):
    if d["given"] != "datamodule":
        return ""
    code = (
        "class Data(pl.LightningDataModule):\n"
        "    def train_dataloader(self):\n        return make_train()\n"
    )
    if d["val"] != "none":
        code += "    def val_dataloader(self):\n        return make_val()\n"
    return code


def style_code(d):
    """Return the code of the model and of build(), with the drawn hooks and without unused lines."""
    code = pieces.STYLES[d["style"]]
    for name in d["hooks"]:
        if name in pieces.HOOK_ATTRIBUTES:
            attributes = pieces.HOOK_ATTRIBUTES[name]
            code = code.replace("make_net()\n", f"make_net()\n        {attributes}\n")
        next_method = "    def configure_optimizers"
        code = code.replace(next_method, f"{pieces.HOOKS[name][1:]}{next_method}")
    if "adds_group" in d["hooks"]:
        code = code.replace("make_optimizer(self)", "make_optimizer(self.net)")
    if d["given"] == "datamodule":
        code = code.replace(
            "train=make_train(), val=$val,", "train=None, val=None, datamodule=Data(),"
        )
    if d["metric"] != "none":
        code = add_metric(d, code)
    if "own_loader" in d["hooks"]:
        code = code.replace("train=make_train(),", "train=None,")
    if d["val"] == "none":
        code = re.sub(r"( *)def validation_step.*\n(?:\1    .*\n)*", "", code)
    if d["hyperparameters"] == "none":
        code = code.replace(", **hparams", "").replace("        self.save_hyperparameters()\n", "")
    if d["log"] == "nothing":
        code = code.replace("        $log\n", "")
    return code if d["callbacks"] else code.replace(" callbacks=[$callbacks],\n               ", "")


def add_metric(d, code):
    """Add a torchmetrics object that the training step updates."""
    make, update = pieces.METRICS[d["metric"]]
    code = code.replace("make_net()\n", f"make_net()\n        self.metric = {make}\n", 1)
    step = "    def training_step(self, batch, batch_idx):\n"
    return code.replace(step, f"{step}        {update}\n", 1)


def loader_arguments(d, sampler):
    arguments = [sampler] if sampler and sampler != "shuffle=False" else []
    if not sampler.startswith("batch_sampler"):
        arguments.append("batch_size=batch_size")
        if d["drop_last"]:
            arguments.append("drop_last=True")
    if d["batch"] != "default":
        arguments.append("collate_fn=collate")
    if d["workers"]:
        arguments.append(f"num_workers={d['workers']}, persistent_workers={d['persistent']}")
    return ", ".join(arguments)


def make_optimizer(d):
    scheduler = pieces.SCHEDULERS[d["scheduler"]]
    result = "return optimizer"
    if scheduler is not None:
        config = f'"scheduler": {scheduler}'
        if d["interval"] != "epoch":
            config += f', "interval": "{d["interval"]}"'
        if d["frequency"] != 1:
            config += f', "frequency": {d["frequency"]}'
        if d["scheduler"] == "ReduceLROnPlateau":
            config += ', "monitor": "val_loss"'
        result = (
            f'config = {{{config}}}\n    return {{"optimizer": optimizer, "lr_scheduler": config}}'
        )
    optimizer = pieces.OPTIMIZERS[d["optimizer"]]
    return pieces.fill(pieces.MAKE_OPTIMIZER, optimizer=optimizer, result=result)


def join_source(parts):
    """Join pieces of code. Move the imports to the top, and drop unused imports."""
    lines = [line for part in parts for line in part.splitlines() if line.strip()]
    imports = dict.fromkeys(line for line in lines if re.match(r"(from|import) ", line))
    body = [line for line in lines if line not in imports]
    text = "\n".join(body)
    kept = [line for line in imports if any(is_used(name, text) for name in imported_names(line))]
    return "\n".join([*kept, *body]) + "\n"


def imported_names(line):
    names = line.split(" import ")[1] if line.startswith("from") else line.removeprefix("import ")
    return [name.split(" as ")[-1].strip() for name in names.split(",")]


def is_used(name, text):
    return re.search(rf"\b{name}\b", text) is not None


def script_of(description, source):
    """Return a script that contains a program and compares its runs."""
    event = description["event"]
    call = f"check(__file__, ranks={description['ranks']}, event={event!r})"
    return (
        f'"""Number {description["number"]}: {", ".join(shapes_of(description))}."""\n{source}'
        f'if __name__ == "__main__":\n    from random_runs import check\n    {call}\n'
    )


# ---- Functions that simplify a program as long as it still shows a difference

SIMPLEST = {
    "workers": 0, "persistent": False, "callbacks": [], "hooks": [], "hyperparameters": "none", "given": "loaders", "metric": "none",
    "log": "nothing", "returned": "loss", "frequency": 1, "interval": "epoch", "scheduler": "none", "optimizer": "SGD",
    "batch": "default", "drop_last": False, "loader": "dataloader", "data": "tensors", "sampler": "in_order",
    "val": "none", "net": "linear", "style": "functions", "ranks": 1,
}  # fmt: skip
# Every program sets these options, so they are never removed from a program.
FREE = ("max_epochs", "log_every_n_steps")


def shapes_of(description):
    """Return the parts of a description that differ from SIMPLEST, such as "net=dropout"."""
    shapes = []
    for dimension, shape in description.items():
        if dimension == "options":
            shapes += [f"{name}={value!r}" for name, value in shape.items() if name not in FREE]
        elif dimension in ("callbacks", "hooks"):
            shapes += [f"{dimension}={name}" for name in shape]
        elif dimension == "event":
            shapes += [f"{shape['kind']} at {shape['at']}"] if shape else []
        elif dimension != "number" and shape != SIMPLEST.get(dimension):
            shapes.append(f"{dimension}={shape}")
    return shapes


def reduce_program(description, is_same):
    """Simplify a description as long as is_same returns True for the simpler description."""
    changes = [(name, SIMPLEST[name]) for name in SIMPLEST if description[name] != SIMPLEST[name]]
    for dimension in ("callbacks", "hooks"):
        changes += [(dimension, name) for name in description[dimension][1:]]
    changes += [("options", name) for name in description["options"] if name not in FREE]
    return apply_changes(description, [c for c in changes if c[0] != "ranks"], is_same)


def apply_changes(description, changes, is_same):
    """Apply all changes to a description if possible, or else try each half of the changes."""
    if not changes:
        return description
    changed = dict(description)
    for dimension, shape in changes:
        if dimension == "options":
            options = changed["options"].items()
            shape = {name: value for name, value in options if name != shape}
        elif dimension in ("callbacks", "hooks") and shape:
            shape = [name for name in changed[dimension] if name != shape]
        changed[dimension] = shape
    if is_possible(changed) and is_same(changed):
        return changed
    if len(changes) == 1:
        return description
    half = len(changes) // 2
    description = apply_changes(description, changes[:half], is_same)
    return apply_changes(description, changes[half:], is_same)
