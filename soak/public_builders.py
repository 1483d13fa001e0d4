"""Build small LightningModules from public packages, and their data, for public_modules.py.

Each builder returns a dict of cases. A case is a function without arguments that returns a fresh
module and the arguments of ``fit``. Some packages have estimators that create the module and call
``Trainer.fit`` themselves. ``capture_fit`` returns what these estimators pass to ``Trainer.fit``.
"""

import contextlib
import importlib
import inspect
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
QUIET |= {"enable_model_summary": False, "accelerator": "cpu", "devices": 1, "max_epochs": 3}


class FitCalledError(BaseException):
    """Raised when an estimator calls ``Trainer.fit``, to end the estimator's own fit method."""


def capture_fit(call):
    """Return the module and the arguments that ``call`` passes to ``Trainer.fit``."""
    captured = {}

    def fit(trainer, model, train=None, val=None, datamodule=None, **options):
        train = options.pop("train_dataloaders", train)
        val = options.pop("val_dataloaders", val)
        if train is not None and hasattr(train, "train_dataloader"):
            train, datamodule = None, train
        captured.update(model=model, train=train, val=val, datamodule=datamodule)
        raise FitCalledError

    trainers = []
    for name in ("lightning.pytorch", "pytorch_lightning"):
        with contextlib.suppress(ImportError):
            trainers.append(importlib.import_module(name).Trainer)
    originals = [trainer.fit for trainer in trainers]
    for trainer in trainers:
        trainer.fit = fit
    try:
        call()
    except FitCalledError:
        pass
    finally:
        for trainer, original in zip(trainers, originals, strict=True):
            trainer.fit = original
    arguments = {"train_dataloaders": captured["train"], "val_dataloaders": captured["val"]}
    if captured["datamodule"] is not None:
        arguments = {"datamodule": captured["datamodule"]}
    return captured["model"], arguments


def random_numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_classes(count, classes, seed=1):
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))


def train_loader_of(dataset, batch_size=4, **options):
    """Return fit's arguments with a shuffled training loader."""
    return {"train_dataloaders": DataLoader(dataset, batch_size, shuffle=True, **options)}


def loaders_of(dataset, batch_size=4, **options):
    """Return fit's arguments with a shuffled training loader, and a validation loader."""
    arguments = train_loader_of(dataset, batch_size, **options)
    return {**arguments, "val_dataloaders": DataLoader(dataset, batch_size, **options)}


class Samples(Dataset):
    """A dataset of dicts."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}


def build_mlcolvar():
    from mlcolvar import cvs
    from mlcolvar.core.loss import TDALoss
    from mlcolvar.data import DictDataset, DictModule

    def data(labels=None, lagged=False, weights=False, count=40):
        columns = {"data": random_numbers(count, 6)}
        if labels:
            columns["labels"] = (torch.arange(count) % labels).float()
        if lagged:
            columns |= {"data_lag": random_numbers(count, 6, seed=2)}
            columns |= {"weights": torch.ones(count), "weights_lag": torch.ones(count)}
        if weights:
            columns["weights"] = torch.ones(count)
        return DictDataset(columns)

    def module(dataset, batch_size=8):
        generator = torch.Generator().manual_seed(3)
        return {"datamodule": DictModule(dataset, batch_size=batch_size, generator=generator)}

    def regression():
        columns = {"data": random_numbers(40, 6), "target": random_numbers(40, 1, seed=4)}
        return cvs.RegressionCV([6, 8, 1]), module(DictDataset(columns))

    def lda():
        return cvs.DeepLDA([6, 8, 2], 2), module(data(labels=2), 16)

    def tda():
        model = cvs.DeepTDA(2, 1, [-7.0, 7.0], [0.2, 0.2], [6, 8, 1])
        return model, module(data(labels=2), 16)

    def tica():
        return cvs.DeepTICA([6, 8, 3], 2), module(data(lagged=True), 16)

    def autoencoder():
        return cvs.AutoEncoderCV([6, 5, 2]), module(data())

    def vae():
        return cvs.VariationalAutoEncoderCV(2, [6, 5]), module(data())

    def multitask():
        main = cvs.AutoEncoderCV([6, 5, 1])
        main.norm_in.is_initialized = True
        loss = TDALoss(n_states=2, target_centers=[-7.0, 7.0], target_sigmas=[0.2, 0.2])
        datasets = [data(), data(labels=2)]
        generator = torch.Generator().manual_seed(3)
        datamodule = DictModule(datasets, batch_size=8, generator=generator, random_split=False)
        return cvs.MultiTaskCV(main, [loss], [0.1]), {"datamodule": datamodule}

    def committor():
        columns = {"data": random_numbers(40, 6), "weights": torch.ones(40)}
        columns["labels"] = (torch.arange(40) % 3).float()
        masses = torch.ones(2)
        model = cvs.Committor([6, 8, 1], masses, alpha=1.0)
        return model, module(DictDataset(columns), 16)

    cases = (regression, lda, tda, tica, autoencoder, vae, multitask, committor)
    return {case.__name__: case for case in cases}


def build_chemprop():
    from chemprop import data
    from chemprop import nn as chemprop_nn
    from chemprop.models import MPNN, MulticomponentMPNN

    smiles = ["C" * n + tail for n in range(1, 7) for tail in ("", "O", "N", "Cl")]
    targets = random_numbers(24, 1).numpy()

    def dataset():
        points = [
            data.MoleculeDatapoint.from_smi(s, y) for s, y in zip(smiles, targets, strict=True)
        ]
        return data.MoleculeDataset(points)

    def loaders(dataset):
        train = data.build_dataloader(dataset, batch_size=6, num_workers=0)
        val = data.build_dataloader(dataset, batch_size=6, num_workers=0, shuffle=False)
        return {"train_dataloaders": train, "val_dataloaders": val}

    def passing():
        return chemprop_nn.BondMessagePassing(d_h=16, depth=2, dropout=0.1)

    def regression():
        model = MPNN(
            passing(),
            chemprop_nn.MeanAggregation(),
            chemprop_nn.RegressionFFN(input_dim=16, hidden_dim=8),
            batch_norm=True,
        )
        return model, loaders(dataset())

    def evidential():
        predictor = chemprop_nn.EvidentialFFN(input_dim=16, hidden_dim=8)
        model = MPNN(passing(), chemprop_nn.SumAggregation(), predictor, warmup_epochs=1)
        return model, loaders(dataset())

    def atoms():
        passing = chemprop_nn.AtomMessagePassing(d_h=16, depth=2)
        predictor = chemprop_nn.MveFFN(input_dim=16, hidden_dim=8)
        return MPNN(passing, chemprop_nn.NormAggregation(), predictor), loaders(dataset())

    def multicomponent():
        blocks = chemprop_nn.MulticomponentMessagePassing([passing(), passing()], 2)
        predictor = chemprop_nn.RegressionFFN(input_dim=32, hidden_dim=8)
        model = MulticomponentMPNN(blocks, chemprop_nn.MeanAggregation(), predictor)
        return model, loaders(data.MulticomponentDataset([dataset(), dataset()]))

    return {case.__name__: case for case in (regression, evidential, atoms, multicomponent)}


# The dataset and the cases of the package disent


class Observations(Dataset):
    """Images in dicts, as the frameworks expect them, with several observations per sample."""

    def __init__(self, count):
        self.images, self.count = random_numbers(24, 3, 8, 8).sigmoid(), count

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        images = tuple(self.images[(index + k) % 24] for k in range(self.count))
        return {"x_targ": images}


def build_disent():
    from disent.frameworks import ae, vae
    from disent.model import AutoEncoder
    from disent.model.ae import DecoderLinear, EncoderLinear

    observations = {"TripletVae": 3, "AdaNegTripletVae": 3, "TripletAe": 3, "AdaNegTripletAe": 3}
    observations |= {"AdaVae": 2, "AdaGVaeMinimal": 2, "AdaAe": 2}
    observations |= {"DataOverlapTripletVae": 3, "DataOverlapTripletAe": 3}

    def case(package, name):
        framework = getattr(package, name)
        z_size = 4
        encoder = EncoderLinear((3, 8, 8), z_size, z_multiplier=2 if package is vae else 1)
        model = AutoEncoder(encoder, DecoderLinear((3, 8, 8), z_size))
        dataset = Observations(observations.get(name, 1))
        return framework(model=model, cfg=framework.cfg()), train_loader_of(dataset)

    names = [(vae, n) for n in ("Vae", "BetaVae", "BetaTcVae", "DipVae", "InfoVae", "TripletVae")]
    names += [(vae, "AdaVae"), (vae, "AdaGVaeMinimal"), (vae, "AdaNegTripletVae")]
    names += [(ae, n) for n in ("Ae", "TripletAe", "AdaAe", "AdaNegTripletAe")]
    return {name: partial(case, package, name) for package, name in names}


def build_neuralforecast():
    import pandas as pd
    from neuralforecast import models
    from neuralforecast.tsdataset import TimeSeriesDataset

    def dataset():
        values = random_numbers(3, 60).numpy()
        dates = pd.date_range("2020-01-01", periods=60)
        parts = [pd.DataFrame({"unique_id": i, "ds": dates, "y": values[i]}) for i in range(3)]
        return TimeSeriesDataset.from_df(pd.concat(parts))[0]

    small = {"h": 4, "input_size": 12, "max_steps": 12, "val_check_steps": 4}
    small |= {"batch_size": 2, "windows_batch_size": 8, "random_seed": 1, **QUIET}
    small.pop("max_epochs")
    hidden = {"encoder_hidden_size": 8, "decoder_hidden_size": 8}
    transformer = {"hidden_size": 8, "n_head": 2}
    options = {
        "MLP": {"hidden_size": 8},
        "NBEATS": {"mlp_units": [[8, 8]] * 3},
        "NBEATSx": {"mlp_units": [[8, 8]] * 3},
        "NHITS": {"mlp_units": [[8, 8]] * 3},
        "LSTM": hidden,
        "GRU": hidden,
        "RNN": hidden,
        "TCN": hidden,
        "DilatedRNN": hidden,
        "DeepAR": {"lstm_hidden_size": 8, "decoder_hidden_size": 8},
        "DeepNPTS": {"hidden_size": 8},
        "BiTCN": {"hidden_size": 8},
        "TFT": transformer,
        "VanillaTransformer": {**transformer, "conv_hidden_size": 8},
        "Informer": {**transformer, "conv_hidden_size": 8},
        "Autoformer": {**transformer, "conv_hidden_size": 8},
        "FEDformer": {"hidden_size": 8, "n_head": 8, "conv_hidden_size": 8, "modes": 4},
        "PatchTST": {"hidden_size": 8, "n_heads": 2, "linear_hidden_size": 8, "patch_len": 4},
        "iTransformer": {"n_series": 3, "hidden_size": 8, "n_heads": 2, "d_ff": 8},
        "TimesNet": {"hidden_size": 8, "conv_hidden_size": 8},
        "TSMixer": {"n_series": 3, "ff_dim": 8},
        "TSMixerx": {"n_series": 3, "ff_dim": 8},
        "TiDE": {"hidden_size": 8, "decoder_output_dim": 4},
        "DLinear": {},
        "NLinear": {},
        "KAN": {"hidden_size": 8},
        "RMoK": {"n_series": 3},
        "SOFTS": {"n_series": 3, "hidden_size": 8, "d_core": 8, "d_ff": 8},
        "StemGNN": {"n_series": 3},
        "TimeMixer": {"n_series": 3, "d_model": 8, "d_ff": 8},
        "MLPMultivariate": {"n_series": 3, "hidden_size": 8},
        "TimeXer": {"n_series": 3, "hidden_size": 8, "n_heads": 2, "d_ff": 8, "patch_len": 4},
    }

    def case(name):
        model = getattr(models, name)(**{**small, **options[name]})
        return capture_fit(lambda: model.fit(dataset(), val_size=8))

    return {name: partial(case, name) for name in options}


def build_pytorch_forecasting():
    import pandas as pd
    import pytorch_forecasting as pf
    from pytorch_forecasting.data import GroupNormalizer

    def frame():
        values = random_numbers(3, 30).abs().numpy() + 1
        steps = np.arange(30)
        parts = [pd.DataFrame({"group": str(i), "time": steps, "y": values[i]}) for i in range(3)]
        return pd.concat(parts, ignore_index=True).astype({"y": "float32"})

    def dataset(**options):
        lengths = {"max_encoder_length": 8, "max_prediction_length": 4}
        lengths |= {"min_encoder_length": 8, "min_prediction_length": 4}
        normalizer = GroupNormalizer(groups=["group"])
        return pf.TimeSeriesDataSet(
            frame(), "time", "y", ["group"], time_varying_unknown_reals=["y"],
            target_normalizer=normalizer, **lengths, **options,
        )  # fmt: skip

    only_target = {"add_relative_time_idx": False}
    reals = {"time_varying_known_reals": ["time"], "static_categoricals": ["group"]}
    options = {
        "NBeats": (only_target, {"widths": [8, 8], "backcast_loss_ratio": 0.1}),
        "NHiTS": (only_target, {"hidden_size": 8}),
        "DeepAR": (reals, {"hidden_size": 8, "rnn_layers": 2, "dropout": 0.1}),
        "RecurrentNetwork": (reals, {"hidden_size": 8}),
        "TemporalFusionTransformer": (reals, {"hidden_size": 8, "attention_head_size": 2}),
        "DecoderMLP": (reals, {"hidden_size": 8}),
        "TiDEModel": (reals, {"hidden_size": 8}),
    }

    def case(name):
        of_data, of_model = options[name]
        data = dataset(**of_data)
        model = getattr(pf, name).from_dataset(data, learning_rate=0.01, **of_model)
        return model, {
            "train_dataloaders": data.to_dataloader(True, batch_size=12, num_workers=0),
            "val_dataloaders": data.to_dataloader(False, batch_size=12, num_workers=0),
        }

    return {name: partial(case, name) for name in options}


def build_darts():
    from darts import TimeSeries, models

    def series(seed):
        return TimeSeries.from_values(random_numbers(48, 1, seed=seed).numpy())

    chunks = {"input_chunk_length": 8, "output_chunk_length": 4}
    options = {
        "RNNModel": {"input_chunk_length": 8, "hidden_dim": 8, "training_length": 12},
        "BlockRNNModel": {**chunks, "hidden_dim": 8, "dropout": 0.1},
        "TCNModel": {**chunks, "num_filters": 4, "dropout": 0.1},
        "TransformerModel": {**chunks, "d_model": 8, "nhead": 2, "dim_feedforward": 8},
        "NBEATSModel": {**chunks, "num_stacks": 2, "layer_widths": 8},
        "NHiTSModel": {**chunks, "num_stacks": 2, "layer_widths": 8},
        "TFTModel": {**chunks, "hidden_size": 8, "add_relative_index": True},
        "DLinearModel": chunks,
        "NLinearModel": {**chunks, "use_reversible_instance_norm": True},
        "TiDEModel": {**chunks, "hidden_size": 8, "dropout": 0.1},
        "TSMixerModel": {**chunks, "hidden_size": 8, "ff_size": 8},
    }

    def case(name):
        trainer = {"accelerator": "cpu", "enable_progress_bar": False}
        model = getattr(models, name)(
            batch_size=8, n_epochs=3, random_state=1, pl_trainer_kwargs=trainer, **options[name]
        )
        return capture_fit(lambda: model.fit(series(0), val_series=series(1)))

    return {name: partial(case, name) for name in options}


def build_gluonts():
    import pandas as pd
    from gluonts.dataset.multivariate_grouper import MultivariateGrouper
    from gluonts.dataset.pandas import PandasDataset
    from gluonts.torch import model as models

    def data(seed):
        index = pd.period_range("2020-01-01", periods=80, freq="D")
        values = random_numbers(4, 80, seed=seed).abs().numpy() + 1
        return PandasDataset({str(i): pd.Series(values[i], index=index) for i in range(4)})

    common = {"prediction_length": 4, "batch_size": 4, "num_batches_per_epoch": 5}
    with_frequency = {"freq": "D", **common}
    small = {"context_length": 8}
    options = {
        "deepar:DeepAREstimator": {**with_frequency, **small, "hidden_size": 8, "num_layers": 1},
        "tft:TemporalFusionTransformerEstimator": {**with_frequency, **small, "hidden_dim": 8},
        "wavenet:WaveNetEstimator": {**with_frequency, "num_residual_channels": 4},
        "simple_feedforward:SimpleFeedForwardEstimator": {**common, "hidden_dimensions": [8]},
        "d_linear:DLinearEstimator": {**common, **small, "hidden_dimension": 8},
        "patch_tst:PatchTSTEstimator": {**common, "context_length": 16, "patch_len": 4},
        "lag_tst:LagTSTEstimator": {**common, "freq": "D", "context_length": 8},
        "tide:TiDEEstimator": {**with_frequency, **small},
        "i_transformer:ITransformerEstimator": {**common, **small},
    }
    options["patch_tst:PatchTSTEstimator"] |= {"d_model": 8, "nhead": 2, "dim_feedforward": 8}
    options["lag_tst:LagTSTEstimator"] |= {"d_model": 8, "nhead": 2, "dim_feedforward": 8}

    def case(path):
        package, name = path.split(":")
        module = importlib.import_module(f"{models.__name__}.{package}")
        trainer = {**QUIET, "enable_checkpointing": True}
        estimator = getattr(module, name)(trainer_kwargs=trainer, **options[path])
        sets = [data(0), data(1)]
        if name == "ITransformerEstimator":
            sets = [MultivariateGrouper()(part) for part in sets]
        return capture_fit(lambda: estimator.train(*sets))

    return {path.split(":")[1]: partial(case, path) for path in options}


def build_scvi():
    import anndata
    import scvi

    scvi.settings.seed = 1

    def cells(protein=False, count=66):
        generator = np.random.default_rng(0)
        table = anndata.AnnData(generator.poisson(2.0, (count, 20)).astype(np.float32))
        table.obs["batch"] = [str(i % 2) for i in range(count)]
        table.obs["label"] = [["a", "b", "unknown"][i % 3] for i in range(count)]
        if protein:
            table.obsm["protein"] = generator.poisson(3.0, (count, 4)).astype(np.float32)
        return table

    train = {"max_epochs": 3, "batch_size": 10, "accelerator": "cpu", "train_size": 0.75}
    train |= {"enable_progress_bar": False, "check_val_every_n_epoch": 1}

    def case(name):
        table = cells(protein=name == "TOTALVI")
        kind = getattr(scvi.model, name)
        columns = {"batch_key": "batch"}
        model_options = {"n_latent": 4, "n_hidden": 8}
        if name == "SCANVI":
            columns |= {"labels_key": "label", "unlabeled_category": "unknown"}
        if name == "TOTALVI":
            columns |= {"protein_expression_obsm_key": "protein"}
        if name == "CondSCVI":
            columns = {"labels_key": "label"}
        if name == "AmortizedLDA":
            columns = {}
        if name == "PEAKVI":
            table.X = (table.X > 1).astype(np.float32)
        kind.setup_anndata(table, **columns)
        if name == "AmortizedLDA":
            model_options = {"n_topics": 4, "n_hidden": 8}
        model = kind(table, **model_options)
        return capture_fit(lambda: model.train(**train))

    names = ("SCVI", "LinearSCVI", "AUTOZI", "SCANVI", "TOTALVI", "PEAKVI", "CondSCVI")
    return {name: partial(case, name) for name in (*names, "AmortizedLDA")}


def build_deeptab():
    import pandas as pd
    from deeptab import models

    def table():
        values = random_numbers(64, 3).numpy()
        frame = pd.DataFrame(values, columns=["a", "b", "c"])
        frame["d"] = [["x", "y", "z"][i % 3] for i in range(64)]
        return frame

    names = ("MLP", "ResNet", "FTTransformer", "TabM", "Mambular", "TabTransformer", "SAINT")
    names += ("NODE", "NDTF", "MambaTab", "AutoInt", "TabulaRNN", "ENODE")

    def case(name, task):
        estimator = getattr(models, name + task)(trainer_config=None)
        target = random_numbers(64, seed=5).numpy()
        if task == "Classifier":
            target = random_classes(64, 3).numpy()
        train = {"max_epochs": 3, "batch_size": 16, "accelerator": "cpu"}
        return capture_fit(lambda: estimator.fit(table(), target, **train))

    cases = {f"{name}Regressor": partial(case, name, "Regressor") for name in names}
    return cases | {f"{n}Classifier": partial(case, n, "Classifier") for n in ("MLP", "TabM")}


def build_lightly():
    from lightly.utils import benchmarking

    def images():
        return TensorDataset(random_numbers(24, 3, 8, 8), random_classes(24, 3))

    class Named(Dataset):
        """A dataset whose samples include a file name, like those of the package's own dataset."""

        def __init__(self):
            self.samples = images()

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, index):
            image, label = self.samples[index]
            return image, label, str(index)

    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8))

        def forward(self, images):
            return self.layers(images)

    def linear():
        model = benchmarking.LinearClassifier(Features(), 4, 0.1, 8, 3, topk=(1, 2))
        return model, loaders_of(images())

    def online():
        return OnlineProbe(), loaders_of(images())

    class OnlineProbe(importlib.import_module("lightning.pytorch").LightningModule):
        """A module with the package's online classifier, as in its documentation."""

        def __init__(self):
            super().__init__()
            self.backbone = Features()
            self.probe = benchmarking.OnlineLinearClassifier(8, 3, topk=(1, 2))

        def training_step(self, batch, batch_idx):
            features = self.backbone(batch[0])
            loss, log = self.probe.training_step((features.detach(), batch[1]), batch_idx)
            self.log_dict(log, sync_dist=True)
            return loss + features.pow(2).mean()

        def validation_step(self, batch, batch_idx):
            features = self.backbone(batch[0])
            loss, log = self.probe.validation_step((features, batch[1]), batch_idx)
            self.log_dict(log)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    class Contrastive(benchmarking.BenchmarkModule):
        """A subclass of the package's module with a feature bank, as in its documentation."""

        def __init__(self):
            super().__init__(DataLoader(Named(), 8), num_classes=3, knn_k=5)
            self.backbone = Features()
            self.head = nn.Linear(8, 4)

        def training_step(self, batch, batch_idx):
            images, _, _ = batch
            noise = torch.randn_like(images)
            first = self.head(self.backbone(images))
            second = self.head(self.backbone(images + 0.1 * noise))
            return -nn.functional.cosine_similarity(first, second.detach()).mean()

        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=0.06, momentum=0.9)]

    def benchmark():
        return Contrastive(), loaders_of(Named())

    return {case.__name__: case for case in (linear, online, benchmark)}


def build_lightning_uq_box():
    from lightning.pytorch import LightningDataModule
    from lightning_uq_box import uq_methods
    from lightning_uq_box.models import MLP, ConditionalGuidedLinearModel
    from lightning_uq_box.uq_methods import NLL

    class Data(LightningDataModule):
        """A datamodule, because several modules read ``trainer.datamodule``."""

        def __init__(self, **columns):
            super().__init__()
            self.dataset = Samples(**columns)

        def train_dataloader(self):
            return DataLoader(self.dataset, 8, shuffle=True)

        def val_dataloader(self):
            return DataLoader(self.dataset, 8)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    def table(name):
        target = random_numbers(40, 1, seed=6)
        if "Classification" in name:
            target = random_classes(40, 3)
        return Data(input=random_numbers(40, 4), target=target)

    def images(name):
        target = random_numbers(40, 1, 8, 8, seed=6)
        if "Segmentation" in name or "UNet" in name:
            target = random_classes(40 * 64, 2).reshape(40, 8, 8)
        return Data(input=random_numbers(40, 3, 8, 8), target=target)

    def mlp(outputs, inputs=4):
        return MLP(dropout_p=0.2, n_inputs=inputs, n_hidden=[8, 8], n_outputs=outputs)

    def convolution(outputs):
        layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Dropout(0.2)
        return nn.Sequential(*layers, nn.Conv2d(8, outputs, 1))

    def card(kind):
        guidance = ConditionalGuidedLinearModel(n_steps=10, cat_x=True, x_dim=4, y_dim=1)
        mean = uq_methods.DeterministicRegression(mlp(1), mse)
        return kind(mean, guidance, n_steps=10, n_z_samples=2, guidance_optim=adam)

    adam = partial(torch.optim.Adam, lr=0.01)
    mse, entropy = nn.MSELoss(), nn.CrossEntropyLoss()
    sampled = {"n_mc_samples_train": 2, "optimizer": adam}
    makers = {
        "DeterministicRegression": lambda c: c(mlp(1), mse, optimizer=adam),
        "DeterministicClassification": lambda c: c(mlp(3), entropy, optimizer=adam),
        "MCDropoutRegression": lambda c: c(mlp(1), 5, mse, optimizer=adam),
        "MCDropoutClassification": lambda c: c(mlp(3), 5, entropy, optimizer=adam),
        "MVERegression": lambda c: c(mlp(2), 1, optimizer=adam),
        "QuantileRegression": lambda c: c(mlp(3), optimizer=adam),
        "MDNRegression": lambda c: c(mlp(1), 3, optimizer=adam),
        "DER": lambda c: c(mlp(4), optimizer=adam),
        "BNN_VI_ELBO_Regression": lambda c: c(mlp(1), mse, 1, optimizer=adam),
        "BNN_VI_ELBO_Classification": lambda c: c(mlp(3), entropy, optimizer=adam),
        "BNN_VI_Regression": lambda c: c(mlp(1), **sampled),
        "BNN_VI_BatchedRegression": lambda c: c(mlp(1), **sampled),
        "BNN_LV_VI_Regression": lambda c: c(mlp(1), mlp(2, 5), 40, **sampled),
        "DensityLayerModelRegression": lambda c: c(mlp(1), mse, optimizer=adam),
        "MasksemblesRegression": lambda c: c(mlp(1), mse, 4, 2.0, optimizer=adam),
        "DKLRegression": lambda c: c(mlp(4), 8, optimizer=adam),
        "DKLClassification": lambda c: c(mlp(4), 8, 3, optimizer=adam),
        "DUERegression": lambda c: c(mlp(4), 8, 4, optimizer=adam),
        "DUEClassification": lambda c: c(mlp(4), 8, 4, 3, optimizer=adam),
        "SNGPRegression": lambda c: c(mlp(8), mse, optimizer=adam, input_size=8),
        "SNGPClassification": lambda c: c(mlp(8), entropy, 3, optimizer=adam, input_size=8),
        "SGLDRegression": lambda c: c(mlp(2), NLL(), 0.01, 0.0, 0.1, 1, 2),
        "SWAGRegression": lambda c: c(mlp(1), 5, 1, 3, 0.01, mse),
        "ZigZagRegression": lambda c: c(mlp(1, 5), mse, optimizer=adam),
        "CARDRegression": card,
        "DeterministicSegmentation": lambda c: c(convolution(2), entropy, optimizer=adam),
        "DeterministicPixelRegression": lambda c: c(convolution(1), mse, optimizer=adam),
        "MCDropoutSegmentation": lambda c: c(convolution(2), 3, entropy, optimizer=adam),
        "ProbUNet": lambda c: c(convolution(2), num_filters=[4, 4], optimizer=adam),
        "HierarchicalProbUNet": lambda c: c((1, 1), (4, 4, 4), optimizer=adam),
    }

    def case(name):
        model = makers[name](getattr(uq_methods, name))
        is_image = name.endswith(("Segmentation", "PixelRegression", "UNet"))
        return model, {"datamodule": images(name) if is_image else table(name)}

    return {name: partial(case, name) for name in makers}


def build_torch_uncertainty():
    from torch_uncertainty import routines

    def optimizer(model):
        return torch.optim.Adam(model.parameters(), lr=0.01)

    def classify(*layers, **options):
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), *layers, nn.Linear(8, 3))
        options["optim_recipe"] = optimizer(model)
        routine = routines.ClassificationRoutine(model, 3, nn.CrossEntropyLoss(), **options)
        dataset = TensorDataset(random_numbers(24, 3, 8, 8), random_classes(24, 3))
        return routine, loaders_of(dataset)

    def classification():
        return classify(nn.Dropout(0.2))

    def mixup():
        return classify(mixup_params={"mixtype": "mixup", "mixup_alpha": 0.5})

    def regression():
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        routine = routines.RegressionRoutine(model, 1, nn.MSELoss(), optim_recipe=optimizer(model))
        dataset = TensorDataset(random_numbers(24, 4), random_numbers(24, seed=6))
        return routine, loaders_of(dataset)

    def segmentation():
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1))
        routine = routines.SegmentationRoutine(
            model, 3, nn.CrossEntropyLoss(), optim_recipe=optimizer(model),
            metric_subsampling_rate=0.5,
        )  # fmt: skip
        labels = random_classes(24 * 64, 3).reshape(24, 8, 8)
        return routine, loaders_of(TensorDataset(random_numbers(24, 3, 8, 8), labels))

    def pixel_regression():
        model = nn.Conv2d(3, 1, 3, padding=1)
        routine = routines.PixelRegressionRoutine(
            model, 1, nn.MSELoss(), optim_recipe=optimizer(model)
        )
        images, depths = random_numbers(24, 3, 8, 8), random_numbers(24, 8, 8, seed=6).abs()
        return routine, loaders_of(TensorDataset(images, depths))

    cases = (classification, mixup, regression, segmentation, pixel_regression)
    return {case.__name__: case for case in cases}


def build_anomalib():
    import timm
    from anomalib import models
    from anomalib.data import ImageBatch
    from anomalib.metrics import AUROC, Evaluator, F1Max

    size = 64
    images = random_numbers(8, 3, size, size).sigmoid()
    masks = torch.zeros(8, size, size)
    masks[::2, 8:24, 8:24] = 1
    create_model = timm.create_model

    def create_untrained(*args, pretrained=False, **options):
        return create_model(*args, pretrained=False, **options)

    def collate(samples):
        images, masks = (torch.stack(column) for column in zip(*samples, strict=True))
        return ImageBatch(image=images, gt_mask=masks, gt_label=masks.amax((1, 2)).int())

    def make_evaluator():
        fields = ["pred_score", "gt_label"]
        return Evaluator(val_metrics=[AUROC(fields), F1Max(fields, prefix="image_")])

    options = {
        "Padim": {"layers": ["layer1", "layer2"], "n_features": 8},
        "Patchcore": {"backbone": "resnet18", "num_neighbors": 2},
        "Dfm": {"backbone": "resnet18"},
        "Dfkde": {"n_pca_components": 2},
        "Fastflow": {"flow_steps": 2},
        "Cflow": {
            "backbone": "resnet18",
            "layers": ["layer2", "layer3"],
            "coupling_blocks": 2,
            "fiber_batch_size": 4,
        },
        "Stfpm": {},
        "ReverseDistillation": {"backbone": "resnet18"},
        "Fre": {"backbone": "resnet18", "input_dim": 256 * 2 * 2, "latent_dim": 8},
        "Ganomaly": {"batch_size": 2, "n_features": 8, "latent_vec_size": 4},
    }

    def case(name):
        timm.create_model = create_untrained
        kind = getattr(models, name)
        arguments = {**options[name], "evaluator": make_evaluator(), "visualizer": False}
        if "pre_trained" in inspect.signature(kind).parameters:
            arguments["pre_trained"] = False
        model = kind(pre_processor=kind.configure_pre_processor((size, size)), **arguments)
        dataset = TensorDataset(images, masks)
        return model, loaders_of(dataset, batch_size=2, collate_fn=collate)

    return {name: partial(case, name) for name in options}


class Net(importlib.import_module("lightning.pytorch").LightningModule):
    """A small module for packages that have losses, data sets or schedulers, but no modules."""

    def __init__(self, network, loss, make_optimizers=None):
        super().__init__()
        self.network, self.loss = network, loss
        self.make_optimizers = make_optimizers or self.make_adam

    @staticmethod
    def make_adam(module):
        return torch.optim.AdamW(module.parameters(), lr=0.01)

    def unpack(self, batch):
        """Return the inputs and the targets of a batch."""
        return batch

    def compute_loss(self, batch):
        inputs, targets = self.unpack(batch)
        return self.loss(self.network(inputs), targets)

    def training_step(self, batch, batch_idx):
        loss = self.compute_loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.compute_loss(batch))

    def configure_optimizers(self):
        return self.make_optimizers(self)


def make_convolutions(inputs, outputs, dimensions=2):
    kinds = {2: (nn.Conv2d, nn.BatchNorm2d), 3: (nn.Conv3d, nn.BatchNorm3d)}
    convolution, norm = kinds[dimensions]
    layers = convolution(inputs, 4, 3, padding=1), norm(4), nn.ReLU(), nn.Dropout(0.1)
    return nn.Sequential(*layers, convolution(4, outputs, 1))


def build_monai():
    from monai import data, losses, metrics, transforms

    size = 12
    images = random_numbers(12, 1, size, size).sigmoid().numpy()
    masks = (images > 0.5).astype(np.float32)
    files = [{"image": image, "label": mask} for image, mask in zip(images, masks, strict=True)]

    def make_transforms():
        both = ["image", "label"]
        return transforms.Compose([
            transforms.ScaleIntensityd("image"),
            transforms.RandFlipd(both, 0.5, spatial_axis=0),
            transforms.RandSpatialCropd(both, (8, 8), random_size=False),
            transforms.RandGaussianNoised("image", 0.5, std=0.1),
            transforms.OneOf([transforms.RandScaleIntensityd("image", 0.5, 1.0),
                              transforms.RandShiftIntensityd("image", 0.5, 1.0)]),
        ])  # fmt: skip

    class Segmentation(Net):
        """A module as in MONAI's tutorials, with one of its cumulative metrics."""

        def __init__(self):
            super().__init__(make_convolutions(1, 1), losses.DiceCELoss(sigmoid=True))
            self.dice = metrics.DiceMetric(include_background=True, reduction="mean")

        def unpack(self, batch):
            return batch["image"], batch["label"]

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            image, label = self.unpack(batch)
            self.dice(y_pred=self.network(image).sigmoid() > 0.5, y=label)

        def on_validation_epoch_end(self):
            self.log("val_dice", self.dice.aggregate().item())
            self.dice.reset()

    def case(kind, workers=0, loader=data.DataLoader, **options):
        random_transforms = make_transforms().set_random_state(0)
        dataset = getattr(data, kind)(files, random_transforms, **options)
        shuffle = None if kind == "ShuffleBuffer" else True
        train = loader(dataset, batch_size=3, shuffle=shuffle, num_workers=workers)
        val = data.Dataset(files, transforms.ScaleIntensityd("image"))
        return Segmentation(), {"train_dataloaders": train, "val_dataloaders": DataLoader(
            val, 3, collate_fn=data.list_data_collate)}  # fmt: skip

    cached = {"cache_num": 6, "progress": False}
    return {
        "dataset": partial(case, "Dataset"),
        "cache": partial(case, "CacheDataset", **cached),
        "smart_cache": partial(
            case, "SmartCacheDataset", replace_rate=0.5, shuffle=False, **cached
        ),
        "shuffled": partial(case, "ShuffleBuffer", seed=3),
        "workers": partial(case, "Dataset", workers=2),
        "thread": partial(case, "Dataset", loader=data.ThreadDataLoader),
    }


def build_torchio():
    import torchio

    def subjects():
        images = random_numbers(6, 1, 8, 8, 8)
        return [
            torchio.Subject(
                image=torchio.ScalarImage(tensor=image), label=torchio.LabelMap(tensor=image > 0)
            )
            for image in images
        ]

    transform = torchio.Compose([
        torchio.RandomFlip(axes=(0, 1)), torchio.RandomNoise(std=0.1), torchio.RandomGamma(),
    ])  # fmt: skip

    class Volumes(Net):
        def __init__(self):
            loss = nn.BCEWithLogitsLoss()
            super().__init__(make_convolutions(1, 1, 3), loss)

        def unpack(self, batch):
            return batch["image"][torchio.DATA].float(), batch["label"][torchio.DATA].float()

    def loaders(dataset, **options):
        val = torchio.SubjectsLoader(torchio.SubjectsDataset(subjects()), batch_size=2)
        train = torchio.SubjectsLoader(dataset, batch_size=2, **options)
        return {"train_dataloaders": train, "val_dataloaders": val}

    def volumes():
        return Volumes(), loaders(torchio.SubjectsDataset(subjects(), transform), shuffle=True)

    def queue():
        dataset = torchio.SubjectsDataset(subjects(), transform)
        sampler = torchio.UniformSampler(4)
        patches = torchio.Queue(dataset, 6, 2, sampler, num_workers=0)
        return Volumes(), loaders(patches)

    def ordered_queue():
        dataset = torchio.SubjectsDataset(subjects(), transform)
        sampler = torchio.LabelSampler(4, "label")
        options = {"num_workers": 0, "shuffle_subjects": False, "shuffle_patches": False}
        return Volumes(), loaders(torchio.Queue(dataset, 4, 2, sampler, **options))

    return {case.__name__: case for case in (volumes, queue, ordered_queue)}


def build_pytorch_metric_learning():
    from pytorch_metric_learning import losses, miners, samplers

    features, labels = random_numbers(36, 6), torch.arange(36) % 4

    def network():
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    class Mined(nn.Module):
        def __init__(self):
            super().__init__()
            self.miner, self.loss = miners.MultiSimilarityMiner(), losses.TripletMarginLoss()

        def forward(self, embeddings, labels):
            return self.loss(embeddings, labels, self.miner(embeddings, labels))

    makers = {
        "memory": lambda: losses.CrossBatchMemory(losses.ContrastiveLoss(), 4, memory_size=20),
        "mined": Mined,
        "proxy_anchor": lambda: losses.ProxyAnchorLoss(4, 4),
        "arc_face": lambda: losses.ArcFaceLoss(4, 4),
        "soft_triple": lambda: losses.SoftTripleLoss(4, 4, centers_per_class=2),
        "supervised": lambda: losses.SupConLoss(),
        "npairs": lambda: losses.NPairsLoss(),
    }

    def case(name):
        sampler = samplers.MPerClassSampler(labels, 4, length_before_new_iter=36)
        dataset = TensorDataset(features, labels)
        train = DataLoader(dataset, 8, sampler=sampler, drop_last=True)
        return Net(network(), makers[name]()), {"train_dataloaders": train}

    return {name: partial(case, name) for name in makers}


def build_timm():
    import timm
    from timm import loss, optim, scheduler, utils
    from timm.data.mixup import Mixup

    class Images(Net):
        """An image classifier with mixup, weights averaged by EMA, and a scheduler of timm."""

        def __init__(self, model="resnet10t", optimizer="adamw", schedule="cosine", **options):
            network = timm.create_model(model, num_classes=3, drop_path_rate=0.1, **options)
            super().__init__(network, loss.LabelSmoothingCrossEntropy())
            self.optimizer, self.schedule = optimizer, schedule
            self.ema = utils.ModelEmaV2(network, decay=0.9)
            self.mixup = Mixup(0.8, 1.0, num_classes=3)
            self.soft_loss = loss.SoftTargetCrossEntropy()

        def training_step(self, batch, batch_idx):
            images, targets = self.mixup(*batch)
            value = self.soft_loss(self.network(images), targets)
            self.log("train_loss", value)
            return value

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.ema.update(self.network)

        def configure_optimizers(self):
            optimizer = optim.create_optimizer_v2(
                self.network, opt=self.optimizer, lr=0.01, weight_decay=0.05, layer_decay=0.8
            )
            if self.schedule is None:
                return optimizer
            if self.schedule == "cosine":
                schedule = scheduler.CosineLRScheduler(
                    optimizer, 3, noise_range_t=(0, 3), warmup_t=1, warmup_lr_init=0.001
                )
            else:
                schedule = scheduler.PlateauLRScheduler(optimizer, patience_t=0)
            return [optimizer], [{"scheduler": schedule, "interval": "epoch"}]

        def lr_scheduler_step(self, scheduler, metric):
            value = self.trainer.callback_metrics.get("val_loss")
            scheduler.step(self.current_epoch + 1, metric=value)

    dataset = TensorDataset(random_numbers(16, 3, 32, 32), random_classes(16, 3))

    def case(**options):
        return Images(**options), loaders_of(dataset)

    names = ("lookahead_adamw", "lamb", "adopt", "cadamw", "mars", "muon", "adafactorbv", "lion")
    cases = {name: partial(case, optimizer=name, schedule=None) for name in names}
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    transformer = {"model": "vit_tiny_patch16_224", **small}
    return {
        "cosine": case,
        "plateau": partial(case, schedule="plateau"),
        "transformer": partial(case, **transformer),
        **cases,
    }


def build_prototorch():
    import prototorch as pt
    from prototorch import models

    features, labels = random_numbers(24, 3), torch.arange(24) % 3

    def case(name):
        hparams = {"num_prototypes": 6, "lr": 0.05, "input_dim": 3, "latent_dim": 2}
        hparams |= {"shape": (2, 3), "insert_freq": 1, "variance": 1.0, "lambda": 0.1}
        hparams["transfer_fn"] = "sigmoid_beta"
        if name not in ("NeuralGas", "GrowingNeuralGas", "KohonenSOM"):
            hparams["distribution"] = {"num_classes": 3, "per_class": 2}
            start = pt.initializers.SMCI([features, labels], noise=0.1)
        else:
            start = pt.initializers.ZCI(3) if name == "KohonenSOM" else None
            start = start or pt.initializers.RandomNormalCompInitializer(3)
        options = {"prototypes_initializer": start}
        if name == "scheduled":
            name, options["lr_scheduler"] = "GMLVQ", torch.optim.lr_scheduler.ExponentialLR
            options["lr_scheduler_kwargs"] = {"gamma": 0.9}
        model = getattr(models, name)(hparams, **options)
        return model, train_loader_of(TensorDataset(features, labels))

    names = ("GLVQ", "GMLVQ", "LGMLVQ", "GTLVQ", "CELVQ", "RSLVQ", "SLVQ", "LVQ21")
    names += ("MedianLVQ", "NeuralGas", "GrowingNeuralGas", "KohonenSOM", "scheduled")
    return {name: partial(case, name) for name in names}


def build_torchgeo():
    from torchgeo import trainers

    size = 32
    images = random_numbers(12, 3, size, size).sigmoid()
    masks = random_classes(12 * size * size, 3).reshape(12, size, size)
    pairs = random_numbers(12, 2, 3, size, size)
    corners = torch.tensor([[2.0, 2.0, 20.0, 24.0], [8.0, 4.0, 30.0, 30.0]])

    class Objects(Samples):
        """Images with two boxes each, and a mask per box."""

        def __getitem__(self, index):
            shift = torch.tensor([0, 0, index % 2, 1])
            boxes = torch.zeros(2, size, size, dtype=torch.uint8)
            boxes[0, 2:24, 2:20], boxes[1, 4:30, 8:30] = 1, 1
            sample = super().__getitem__(index)
            sample |= {"bbox_xyxy": corners + shift, "mask": boxes}
            return sample | {"label": torch.tensor([1, 1 + index % 2])}

    def collate(samples):
        batch = {key: [sample[key] for sample in samples] for key in samples[0]}
        return {**batch, "image": torch.stack(batch["image"])}

    def objects():
        return loaders_of(Objects(image=images[:6]), batch_size=2, collate_fn=collate)

    def views():
        return train_loader_of(Samples(image=images))

    small = {"model": "resnet18"}
    bank = {"memory_bank_size": 16, "size": size, "output_dim": 8, "hidden_dim": 16}
    labels, mask = {"image": images, "label": random_classes(12, 3)}, {"image": images}
    mask["mask"] = masks
    several = {"image": images, "label": random_classes(36, 2).reshape(12, 3)}
    scenes = {"image": pairs, "mask": masks[:, None] % 2}
    return {
        "classification": lambda: (
            trainers.ClassificationTask(**small, num_classes=3),
            loaders_of(Samples(**labels)),
        ),
        "frozen_classification": lambda: (
            trainers.ClassificationTask(**small, num_classes=3, loss="focal", freeze_backbone=True),
            loaders_of(Samples(**labels)),
        ),
        "multilabel": lambda: (
            trainers.ClassificationTask(
                **small, task="multilabel", num_labels=3, loss="bce", patience=0
            ),
            loaders_of(Samples(**several)),
        ),
        "regression": lambda: (
            trainers.RegressionTask(**small, patience=0),
            loaders_of(Samples(image=images, label=random_numbers(12))),
        ),
        "pixelwise": lambda: (
            trainers.PixelwiseRegressionTask("unet", "resnet18", loss="mae"),
            loaders_of(Samples(image=images, mask=random_numbers(12, size, size))),
        ),
        "segmentation": lambda: (
            trainers.SemanticSegmentationTask("unet", "resnet18", num_classes=3),
            loaders_of(Samples(**mask)),
        ),
        "deeplab": lambda: (
            trainers.SemanticSegmentationTask(
                "deeplabv3+", "resnet18", num_classes=3, loss="jaccard", ignore_index=0
            ),
            loaders_of(Samples(**mask)),
        ),
        "change": lambda: (
            trainers.ChangeDetectionTask("fcsiamdiff", "resnet18"),
            loaders_of(Samples(**scenes)),
        ),
        "faster_rcnn": lambda: (
            trainers.ObjectDetectionTask("faster-rcnn", "resnet18", num_classes=3),
            objects(),
        ),
        "retinanet": lambda: (
            trainers.ObjectDetectionTask("retinanet", "resnet18", num_classes=3),
            objects(),
        ),
        "mask_rcnn": lambda: (trainers.InstanceSegmentationTask(num_classes=3), objects()),
        "byol": lambda: (trainers.BYOLTask(**small), views()),
        "simclr": lambda: (trainers.SimCLRTask(**small, lr=0.1, **bank), views()),
        "moco2": lambda: (trainers.MoCoTask(**small, version=2, lr=0.1, **bank), views()),
        "moco3": lambda: (
            trainers.MoCoTask(**small, version=3, lr=0.1, **{**bank, "memory_bank_size": 0}),
            views(),
        ),
    }


BUILDERS = {
    "anomalib": build_anomalib,
    "chemprop": build_chemprop,
    "darts": build_darts,
    "deeptab": build_deeptab,
    "disent": build_disent,
    "gluonts": build_gluonts,
    "lightly": build_lightly,
    "lightning-uq-box": build_lightning_uq_box,
    "mlcolvar": build_mlcolvar,
    "monai": build_monai,
    "neuralforecast": build_neuralforecast,
    "prototorch-models": build_prototorch,
    "pytorch-forecasting": build_pytorch_forecasting,
    "pytorch-metric-learning": build_pytorch_metric_learning,
    "scvi-tools": build_scvi,
    "torchgeo": build_torchgeo,
    "torchio": build_torchio,
    "timm": build_timm,
    "torch-uncertainty": build_torch_uncertainty,
}
