"""`rl-lab doctor`: what is installed, what is missing, and how to get it."""

from __future__ import annotations

import ctypes.util
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

from rl_lab import __version__
from rl_lab.cli import arguments

_EXAMPLE = "  rl-lab doctor"
_PACKAGES = ("torch", "numpy", "gymnasium", "hydra-core", "omegaconf", "tensorboard", "rich", "imageio", "matplotlib")
_OPTIONAL = {"wandb": "wandb", "mlflow": "mlflow"}


def run(argv: list[str]) -> int:
    arguments.parser(
        "doctor", "Say what is installed, what each environment family lacks and how to get it.", _EXAMPLE
    ).parse_args(argv)
    for title, lines in (
        (f"RL Lab {__version__}", _versions()),
        ("Device", _device()),
        ("Environment families", _families()),
        ("Rendering and video", _rendering()),
        ("Plugins", _plugins()),
    ):
        sys.stdout.write("\n".join([title, *(f"  {line}" for line in lines), ""]) + "\n")
    return 0


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _versions() -> list[str]:
    lines = [f"Python {platform.python_version()} on {platform.platform()}"]
    lines += [f"{package} {_version(package) or 'MISSING: run make setup'}" for package in _PACKAGES]
    for package, extra in _OPTIONAL.items():
        lines.append(f"{package} {_version(package) or 'not installed (optional): ' + _install(extra)}")
    return lines


def _install(extra: str) -> str:
    return f"pip install 'rl-lab[{extra}]'"


def _device() -> list[str]:
    import torch

    lines = [f"CPU: {os.cpu_count()} cores"]
    if torch.cuda.is_available():
        lines += [f"GPU {index}: {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())]
    elif torch.version.cuda is None:
        lines.append("GPU: none usable; this PyTorch is a CPU build (install a CUDA build of PyTorch to use one)")
    else:
        lines.append("GPU: none found by PyTorch's CUDA build (is the driver installed?)")
    return lines


def _families() -> list[str]:
    from rl_lab.environments.families import FAMILIES

    lines = []
    for family in FAMILIES:
        missing = ", ".join(family.missing())
        state = "installed" if not missing else f"missing {missing}: {family.install_command}"
        lines.append(f"{family.name} ({family.example}): {state}")
    return lines


def _rendering() -> list[str]:
    egl = ctypes.util.find_library("EGL")
    lines = [
        f"EGL: {egl}" if egl else "EGL: missing, MuJoCo cannot draw pixels: apt-get install libegl1 libgl1-mesa-dri"
    ]
    try:
        import imageio_ffmpeg

        lines.append(f"ffmpeg: {imageio_ffmpeg.get_ffmpeg_exe()}")
    except (ImportError, RuntimeError):
        lines.append(f"ffmpeg: {shutil.which('ffmpeg') or 'missing, videos become GIFs: pip install imageio-ffmpeg'}")
    return lines


def _plugins() -> list[str]:
    from rl_lab.experiment.registry import plugin_folders

    return [f"{folder.owner}: {folder.path}" for folder in plugin_folders()] or ["none"]
