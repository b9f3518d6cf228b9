"""Names that people write for settings, from other libraries and by habit. They are read only for
a mistake's message."""

from __future__ import annotations

# The setting of a user-level run that each name stands for.
MEANT = {
    "privacy.user.target_epsilon": ("epsilon", "eps", "target_epsilon"),
    "privacy.user.max_epsilon": ("max_epsilon", "budget", "epsilon_budget"),
    "privacy.user.noise_multiplier": ("noise", "noise_multiplier", "sigma", "noise_scale", "z"),
    "privacy.user.clip.norm": (
        "clip",
        "clip_norm",
        "clipping",
        "clipping_norm",
        "max_grad_norm",
        "l2_norm_clip",
    ),
    "privacy.delta": ("delta", "target_delta"),
    "privacy.accountant": ("accountant",),
    "data.name": ("dataset", "data_name"),
    "data.num_clients": (
        "clients",
        "num_clients",
        "n_clients",
        "nodes",
        "num_nodes",
        "num_supernodes",
    ),
    "data.partition": ("partition", "partitioner"),
    "data.alpha": ("alpha",),
    "model.name": ("architecture", "net", "network"),
    "sampling.probability": (
        "q",
        "probability",
        "fraction",
        "fraction_fit",
        "fraction_train",
        "sample_rate",
        "sampling_rate",
    ),
    "sampling.population_size": ("population", "population_size"),
    "training.batch_size": ("batch", "batch_size", "bs"),
    "training.epochs": ("epochs", "local_epochs", "num_epochs"),
    "training.learning_rate": ("lr", "learning_rate", "client_lr", "local_lr"),
    "training.optimizer": ("optimizer", "optim"),
    "training.weight_decay": ("weight_decay",),
    "server.learning_rate": ("server_lr", "server_learning_rate"),
    "server.momentum": ("momentum",),
    "rounds": ("num_rounds", "n_rounds", "num_server_rounds", "server_rounds"),
    "output_dir": ("output", "out", "outdir", "output_folder", "run_dir"),
}
ALIASES = {name: key for key, names in MEANT.items() for name in names}
MAIN = {"data": "name", "model": "name", "sampling": "kind", "task": "loss", "server": "optimizer"}
# the setting that is meant if a group is given a value
MAIN |= {
    "privacy.user.clip": "norm",
    "privacy.local": "kind",
}
