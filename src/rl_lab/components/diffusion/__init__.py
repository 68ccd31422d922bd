"""Denoising diffusion over sequences: noise schedules, denoising networks, the loss, and samplers with hooks."""

from rl_lab.components.diffusion.averaging import AveragedModel
from rl_lab.components.diffusion.guidance import Guidance, Inpainting, ReverseStep
from rl_lab.components.diffusion.mlp import DenoisingMLP
from rl_lab.components.diffusion.model import DiffusionModel
from rl_lab.components.diffusion.networks import Denoiser, make_denoiser
from rl_lab.components.diffusion.schedule import NoiseSchedule
from rl_lab.components.diffusion.transformer import DiffusionTransformer
from rl_lab.components.diffusion.unet import TemporalUNet

__all__ = [
    "NoiseSchedule",
    "Denoiser",
    "TemporalUNet",
    "DiffusionTransformer",
    "DenoisingMLP",
    "make_denoiser",
    "DiffusionModel",
    "ReverseStep",
    "Guidance",
    "Inpainting",
    "AveragedModel",
]
