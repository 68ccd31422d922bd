"""What V and M see, remember and dream, as pictures for people."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.actors.flat import FlatController
from rl_lab.components.representations.base import Representation
from rl_lab.components.representations.conv_vae import ACTIVE_KL, gaussian_kl
from rl_lab.records import Illustration, ImaginedRollout, SequenceBatch
from rl_lab.simulation.mdn_rnn import DreamState, MDNSimulator

COLUMNS = 10
TRAVERSED = 6  # latent dimensions
FILM_STEPS = 300


@torch.no_grad()
def open_loop(
    simulator: MDNSimulator, batch: SequenceBatch, action: Float[Tensor, "batch time action"], *, context: int
) -> ImaginedRollout:
    """V and M watch the first `context` records; then M goes on from the actions alone, always to the mean of its
    likeliest mixture, and V's decoder shows what it thinks. Without a reward head a step is worth 1, as in a dream;
    an M that predicts no end either has nothing to say of rewards."""
    representation, dynamics = simulator.representation, simulator.dynamics
    latents = representation.encode(batch.observation).mean
    memory, seen = dynamics.initial(len(latents)), latents[:, 0]
    shown, rewards, goes_on = [seen], [batch.reward[:, 0]], [torch.ones_like(batch.reward[:, 0])]
    for time in range(1, latents.shape[1]):
        memory = dynamics.step(seen, action[:, time - 1], memory)
        prediction = dynamics.predict(memory.hidden)
        seen = latents[:, time] if time < context else prediction.latent.sample(0.0)
        shown.append(seen)
        rewards.append(torch.ones_like(rewards[0]) if prediction.reward is None else prediction.reward)
        ends = prediction.terminal_logit
        goes_on.append(goes_on[-1] if ends is None else goes_on[-1] * torch.sigmoid(-ends))
    pays = dynamics.reward is not None or dynamics.terminal is not None
    decoded = representation.decode(torch.stack(shown, 1))
    return ImaginedRollout(
        context=context,
        real={key: value.cpu().numpy() for key, value in batch.observation.items()},
        imagined={key: value.cpu().numpy() for key, value in decoded.items()},
        real_reward=batch.reward.cpu().numpy(),
        imagined_reward=torch.stack(rewards, 1).cpu().numpy() if pays else None,
        imagined_continue=None if dynamics.terminal is None else torch.stack(goes_on, 1).cpu().numpy(),
    )


@torch.no_grad()
def code_pictures(representation: Representation, batch: SequenceBatch, key: str) -> list[Illustration]:
    """Reconstructions, samples and traversals of a representation of images."""
    frames = {name: value.flatten(0, 1) for name, value in batch.observation.items()}
    chosen = torch.linspace(0, len(frames[key]) - 1, COLUMNS).long()
    few = {name: value[chosen.to(value.device)] for name, value in frames.items()}
    code = representation.encode(few)
    redrawn = Illustration(
        "reconstructions", "What V keeps of a frame",
        "Frames of held-out episodes, and what V's decoder makes of their codes. What is missing below, no "
        "controller sees.",
        [("seen", _array(few[key])), ("redrawn", _shown(representation, code.mean, key))],
    )  # fmt: skip
    noise = torch.randn(2 * COLUMNS, representation.latent_size, device=code.mean.device)
    drawn = _shown(representation, noise, key)
    samples = Illustration(
        "samples", "Frames that nobody has seen",
        "Codes drawn from a standard normal distribution, decoded. The closer V's codes are to it, the more these look "
        "like the game.",
        [("drawn", drawn[:COLUMNS]), ("drawn", drawn[COLUMNS:])],
    )  # fmt: skip
    time = batch.observation[key].shape[1]
    return [redrawn, samples, _traversals(representation, frames, key, time=time)]


def _traversals(representation: Representation, frames: dict[str, Tensor], key: str, *, time: int) -> Illustration:
    """One dimension of one frame's code at a time moves from -3 to 3: of the frame in the middle of the first sequence,
    for many games begin with a picture like no other."""
    code = representation.encode(frames)
    used = gaussian_kl(code).mean(0)
    order = used.argsort(descending=True).tolist()
    active = [dimension for dimension in order if used[dimension] > ACTIVE_KL]
    middle, rows = code.mean[time // 2], []
    values = torch.linspace(-3.0, 3.0, COLUMNS)
    for dimension in (active or order)[:TRAVERSED]:
        moved = middle.repeat(COLUMNS, 1)
        moved[:, dimension] = values
        rows.append((f"z{dimension}", _shown(representation, moved, key)))
    text = (
        "One entry of a frame's code at a time, from -3 to 3, the others as they are: the entries that V uses most. "
        f"It uses {len(active)} of {len(order)} here."
    )
    labels = tuple(f"{value:.1f}" for value in values.tolist())
    return Illustration("traversals", "What the entries of a code mean", text, rows, columns=labels)


@torch.no_grad()
def dream_film(simulator: MDNSimulator, policy: FlatController, start: DreamState, key: str) -> Illustration:
    """The controller in its dream, from one first frame on, until M thinks that the episode ends."""
    state, latents = start, [start.latent]
    for _ in range(FILM_STEPS):
        step = simulator.step(state, policy(simulator.dynamics.features(state.latent, state.memory)))
        state = step.state
        latents.append(state.latent)
        if step.continuation.item() < 0.5:
            break
    film = _shown(simulator.representation, torch.cat(latents), key)
    few = np.linspace(0, len(film) - 1, COLUMNS).astype(int)
    text = (
        f"Nothing here comes from the game but the first frame: M dreams {len(film) - 1} steps at temperature "
        f"{simulator.temperature:g}, and the controller plays in them."
    )
    return Illustration(
        "dream", "The controller in its dream", text, [("dreamed", film[few])], film=film,
        columns=tuple(f"step {step}" for step in few),
    )  # fmt: skip


def _shown(representation: Representation, latent: Float[Tensor, "rows latent"], key: str) -> np.ndarray:
    return _array(representation.decode(latent)[key])


def _array(images: Tensor) -> np.ndarray:
    """uint8 [rows, height, width, channels]."""
    images = images if images.dtype == torch.uint8 else (255.0 * images).round().clamp(0, 255).to(torch.uint8)
    return images.cpu().numpy()
