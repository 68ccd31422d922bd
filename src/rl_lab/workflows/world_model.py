"""Learning a latent world model: replayed sequences, updates, stored latents, pictures.

PlaNet and the Dreamers differ in their losses, which stand in their own files. Shapes are static and nothing waits for
the device, so that a whole update can be captured as a CUDA graph.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.components.decoders import ObservationModel
from rl_lab.components.predictors import ContinuePredictor, RewardPredictor
from rl_lab.components.world_models.base import LatentState, stack_states
from rl_lab.errors import ConfigError, nearest
from rl_lab.kernels.graphs import CapturedStep, Precompilation, compile_block, compile_steps
from rl_lab.kernels.registry import chosen_kernels
from rl_lab.metrics.values import TensorMetrics
from rl_lab.nn.optimizers import Stepper
from rl_lab.records import (
    OBSERVATION_PREFIX,
    BatchSpec,
    ImaginedRollout,
    SequenceBatch,
)
from rl_lab.workflows.context import PhaseView, WorkflowContext
from rl_lab.workflows.world_model_acting import WorldModelActing

# Of a probe's losses. They reach nothing else, and Adam's steps do not depend on it; so that a limit on the norm of all
# gradients together hardly sees them, it is small.
PROBE_SCALE = 0.01

Losses = dict[str, Tensor]
TrainStep = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class Replayed(NamedTuple):
    """Sequences to train on, with what came before them."""

    observation: dict[str, Tensor]  # [batch, time, ...]
    prev_action: Float[Tensor, "batch time action"]  # the encoded action that led to each observation
    reward: Float[Tensor, "batch time"]
    is_first: Tensor
    is_last: Tensor
    is_terminal: Tensor
    initial: LatentState  # the latent state before the first record


class Filtered(NamedTuple):
    """Replayed sequences as the world model sees them, [batch, time, ...]."""

    embed: Tensor  # the encoder's output
    states: LatentState  # samples of the posterior
    posterior: Tensor  # the raw parameters of q(z | h, e)


class WorldModelWorkflow(WorldModelActing):
    """A subclass adds its losses and how it chooses an action.

    With `stored_latents` a replayed sequence starts from the latent state that the agent had before it, and updates
    write fresh ones back; without, it starts from nothing, as at an episode's start.
    """

    compiled_pieces: ClassVar[Mapping[str, str]]  # methods to compile: and the kernel that makes it superfluous
    loss_names: ClassVar[tuple[str, ...]]  # of all loss terms; `loss_scales` has one number for each
    optimizers: Stepper

    def __init__(
        self,
        *,
        batch_size: int,
        sequence_length: int,
        train_ratio: float,
        stored_latents: bool,
        loss_scales: Mapping[str, float],
    ) -> None:
        super().__init__(stored_latents=stored_latents)
        self.batch_size, self.sequence_length, self.train_ratio = batch_size, sequence_length, train_ratio
        for name in loss_scales:
            if name not in (*self.loss_names, "probe"):
                raise ConfigError(f"loss_scales.{name}: there is no such loss.{nearest(name, self.loss_names)}")
        for name in self.loss_names:
            if name not in loss_scales:
                raise ConfigError(f"loss_scales.{name} is missing: give it a number, 0 to leave the loss out.")
        self.loss_scales = {"probe": PROBE_SCALE, **loss_scales}

    def _bind_context(self, context: WorkflowContext) -> None:
        super()._bind_context(context)
        self.decoder = context.component("decoder", ObservationModel)
        self.reward = context.component("reward", RewardPredictor)
        self.continuation: ContinuePredictor | None = None
        if "continue" in context.components:
            self.continuation = context.component("continue", ContinuePredictor)
        self.autocast = context.autocast
        self._precompilation: Precompilation | None = None
        self._captured_steps: dict[str, CapturedStep] = {}
        self._metric_names: dict[str, tuple[str, ...]] = {}

    # Replayed sequences -----------------------------------------------------------------------------------------------

    def batch_spec(self) -> BatchSpec:
        context = 1 if self.latent_specs else 0
        return BatchSpec(self.batch_size, self.sequence_length, context=context, device=str(self.context.device))

    @property
    def updates_per_env_step(self) -> float:
        """The train ratio is the number of replayed records per environment step."""
        return self.train_ratio / (self.batch_size * self.sequence_length)

    def _inputs(self, batch: SequenceBatch) -> dict[str, Tensor]:
        """The inputs of a training step as a flat dict, the form in which a captured step is fed."""
        inputs = {OBSERVATION_PREFIX + key: value for key, value in batch.observation.items()}
        inputs |= {"action": batch.action, "reward": batch.reward, "is_first": batch.is_first}
        inputs |= {"is_last": batch.is_last, "is_terminal": batch.is_terminal}
        return inputs | {name: batch.extras[name][:, 0] for name in self.latent_specs}

    def _replayed(self, inputs: Mapping[str, Tensor]) -> Replayed:
        """Pair each record with the action before it. Of a context record only its latent and its action are used."""
        action, is_first = self.codec.encode(inputs["action"][:, :-1]), inputs["is_first"]
        if self.latent_specs:
            skip, initial = 1, self.rssm.from_stored(inputs)
        else:
            skip, initial = 0, self.rssm.initial(action.shape[0])
            action = torch.cat([torch.zeros_like(action[:, :1]), action], 1)
            is_first = torch.cat([torch.ones_like(is_first[:, :1]), is_first[:, 1:]], 1)
        # In one piece: encoder and decoder take all records as rows.
        observation = {
            name.removeprefix(OBSERVATION_PREFIX): value[:, skip:].contiguous()
            for name, value in inputs.items() if name.startswith(OBSERVATION_PREFIX)
        }  # fmt: skip
        reward, is_last, is_terminal = (inputs[name][:, skip:] for name in ("reward", "is_last", "is_terminal"))
        return Replayed(observation, action, reward, is_first[:, skip:], is_last, is_terminal, initial)

    # Losses of the world model ----------------------------------------------------------------------------------------

    def filter(self, data: Replayed) -> Filtered:
        """Posterior states of replayed sequences: h_t, z_t ~ q(z | h_t, e_t) with e_t = encoder(o_t)."""
        embed = self.encode(data.observation)
        states, posterior = self.rssm.observe(embed, data.prev_action, data.is_first, data.initial)
        return Filtered(embed, states, posterior)

    def encode(self, observation: dict[str, Tensor]) -> Tensor:
        return self.encoder(observation)

    @abstractmethod
    def world_model_losses(self, filtered: Filtered, data: Replayed) -> tuple[Losses, dict[str, Tensor]]:
        """Every loss term of the model, unscaled, and values to watch."""

    def prediction_losses(self, filtered: Filtered, data: Replayed) -> tuple[Losses, dict[str, Tensor]]:
        """-ln p(o | s), -ln p(r | s) and -ln p(c | s), means over the batch. The observation's parts are also metrics.

        `probe` is there where a decoder is trained on the side only for people to look at.
        """
        states = filtered.states
        losses: Losses = {}
        metrics: dict[str, Tensor] = {}
        groups = {"observation": self.decoder.losses(states, filtered.embed, data.observation)}
        if self.decoder.has_probe:
            groups["probe"] = self.decoder.probe_losses(states, data.observation)
        for name, parts in groups.items():
            prefix = self.decoder.metric_group if name == "observation" else name
            means = {f"{prefix}/{key}": part.mean() for key, part in parts.items()}
            if means:
                losses[name] = torch.stack(list(means.values())).sum()
            metrics |= means
        features = states.features
        losses["reward"] = self.reward.loss(self.reward(features), data.reward).mean()
        if self.continuation is not None:
            losses["continue"] = self.continuation.loss(self.continuation(features), data.is_terminal).mean()
        return losses, metrics

    def posterior_and_prior(self, filtered: Filtered) -> tuple[Any, Any]:
        """The distributions q(z | h, e) and p(z | h) of every state."""
        return self.rssm.distribution(filtered.posterior), self.rssm.distribution(
            self.rssm.prior(filtered.states.deter)
        )

    def latent_metrics(self, posterior: Any, prior: Any, kl: Tensor) -> dict[str, Tensor]:
        entropies = {"prior": self.rssm.entropy(prior), "posterior": self.rssm.entropy(posterior)}
        return {"latent/kl": kl.mean()} | {f"latent/{name}_entropy": value.mean() for name, value in entropies.items()}

    # Updates ----------------------------------------------------------------------------------------------------------

    def _train_step(self, name: str) -> TrainStep:
        """The training step of a hook, `_<name>_step(inputs) -> outputs`: as it is, or captured as a CUDA graph."""
        if not (self.context.compile and self.optimizers.captured):
            return getattr(self, f"_{name}_step")
        if name not in self._captured_steps:
            self._captured_steps[name] = CapturedStep(
                getattr(self, f"_{name}_step"), self._changing_tensors, modules=self.context.modules,
                precompilation=self._precompilation,
            )  # fmt: skip
        return self._captured_steps[name]

    def _compile(self) -> None:
        """Compile pieces of an update and the steps of the model's loops, and compile kernels ahead of their use."""
        compile_steps(self.rssm)
        kernels = {name for module in self.context.modules for name in chosen_kernels(module)}
        for name, kernel in self.compiled_pieces.items():
            if kernel not in kernels:
                setattr(self, name, compile_block(getattr(self, name)))
        dtype = self.context.autocast_dtype or torch.float32
        self._precompilation = Precompilation(self.context.modules, batch=self.batch_size, dtype=dtype)

    def total(self, losses: Losses) -> Tensor:
        """The sum of all loss terms, each with its scale."""
        return torch.stack([self.loss_scales[name] * loss for name, loss in losses.items()]).sum()

    def _outputs(self, name: str, states: LatentState | None, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs of a training step: latents for the replay, and all metrics in one tensor."""
        self._metric_names[name] = tuple(metrics)
        packed = torch.stack([value.detach().float() for value in metrics.values()])
        latents = self.rssm.to_stored(states.detach()) if self.latent_specs and states is not None else {}
        return latents | {"metrics": packed}

    def _finish(
        self, name: str, batch: SequenceBatch, outputs: Mapping[str, Tensor], phase: PhaseView
    ) -> TensorMetrics:
        """The metrics of a training step; fresh latents go back into the replay."""
        self._write_latents(batch, outputs, phase)
        return TensorMetrics(self._metric_names[name], outputs["metrics"])

    def batch_losses(self, batch: SequenceBatch) -> Losses:
        with self.autocast():
            return self.losses(self._replayed(self._inputs(batch)))[0]

    @abstractmethod
    def losses(self, data: Replayed) -> tuple[Losses, LatentState, dict[str, Tensor]]:
        """Every loss term, unscaled; the posterior states; values to watch."""

    # Fresh latents go back to the replay ------------------------------------------------------------------------------

    def _write_latents(self, batch: SequenceBatch, outputs: Mapping[str, Tensor], phase: PhaseView) -> None:
        """Hand fresh latents to a replay that keeps them. It copies them from a GPU in the background, in order."""
        written = all(name in outputs for name in self.latent_specs)
        if self.latent_specs and written and phase.data_source is not None and batch.indices is not None:
            latents = {name: outputs[name] for name in self.latent_specs}
            self.context.data_sources[phase.data_source].update(batch.indices[:, 1:], latents)

    def _changing_tensors(self) -> list[Tensor]:
        """Every tensor that an update may change in place."""
        own = [tensor for module in self.context.modules for tensor in (*module.parameters(), *module.buffers())]
        return own + self.optimizers.state_tensors()

    # Looking ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def imagine(self, batch: SequenceBatch, *, context: int) -> ImaginedRollout:
        """Filter `context` records from an empty memory, then predict the others from their actions alone."""
        action = self.codec.encode(batch.action)
        prev_action = torch.cat([torch.zeros_like(action[:, :1]), action[:, :-1]], 1)
        state, states = self.rssm.initial(batch.action.shape[0]), []
        with self.context.autocast():
            embed = self._embed(batch.observation)
            for t in range(action.shape[1]):
                if t < context:
                    state, _ = self.rssm.observe_step(state, prev_action[:, t].to(embed.dtype), embed[:, t])
                else:
                    state = self.rssm.predict_step(state, prev_action[:, t].to(embed.dtype))
                states.append(state)
            path = stack_states(states, 1)
            imagined = self.decoder.reconstruct(path)
            reward = self.reward.mean(self.reward(path.features)).float().cpu().numpy()
            predictor, continuation = self.context.components.get("continue"), None
            if isinstance(predictor, ContinuePredictor):
                likely = predictor.mean(predictor(path.features)) / predictor.discount
                continuation = likely.float().cpu().numpy()
        return ImaginedRollout(
            context=context,
            real={key: value.cpu().numpy() for key, value in batch.observation.items()},
            imagined={key: value.cpu().numpy() for key, value in imagined.items()},
            real_reward=batch.reward.cpu().numpy(),
            imagined_reward=reward,
            imagined_continue=continuation,
        )
