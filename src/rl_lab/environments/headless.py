"""Rendering without a screen: choose off-screen back ends before the libraries that read these variables are loaded."""

from __future__ import annotations

import ctypes.util
import importlib.util
import logging
import os
import sys
from functools import cache


def prepare_rendering() -> None:
    """Set what the user has not set. Must run before pygame, mujoco or dm_control is imported."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    if sys.platform != "linux":
        return
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    if "MUJOCO_GL" not in os.environ:
        backend = offscreen_backend()
        if backend is not None:
            os.environ["MUJOCO_GL"] = backend


def offscreen_backend() -> str | None:
    """The off-screen OpenGL that MuJoCo can use here: `egl`, else `osmesa`, else None."""
    if ctypes.util.find_library("EGL"):
        return "egl"
    return "osmesa" if ctypes.util.find_library("OSMesa") else None


@cache
def quiet_mujoco() -> None:
    """MuJoCo's warnings go to the log instead of a file in the user's folder."""
    if importlib.util.find_spec("mujoco") is not None:
        import mujoco

        mujoco.set_mju_user_warning(logging.getLogger("rl_lab.mujoco").info)
