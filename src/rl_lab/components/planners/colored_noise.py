"""Noise whose neighbours in time resemble each other (Pinneri et al., 2020): slow moves are tried too."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.errors import ConfigError


def noise_filter(steps: int, beta: float) -> Float[Tensor, "steps steps"]:
    """The matrix that turns white noise [steps, ...] into noise of power 1 / frequency^beta and variance 1.

    A constant counts as the lowest frequency that fits. 0 is white, 1 pink, 2 a random walk's.
    """
    if beta < 0.0:
        raise ConfigError(f"noise_beta={beta}: expected 0 (white) or more.")
    frequencies = torch.fft.rfftfreq(steps, dtype=torch.float64).clamp(min=1.0 / steps)
    kernel = torch.fft.irfft(frequencies.pow(-beta / 2), n=steps)  # filtering is a convolution on a circle
    kernel = kernel / kernel.square().sum().sqrt()
    places = torch.arange(steps)
    return kernel[(places[:, None] - places[None]) % steps].float()
