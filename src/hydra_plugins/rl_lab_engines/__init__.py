"""Hydra's doors to engines whose own plugins do not fit the present versions: Optuna 5 and Ray."""
