"""World Models (Ha & Schmidhuber, 2018): see, remember, act, each learned by itself.

V compresses single frames, M predicts the next latent from the present one and the action, C is a small controller on
both that evolution finds, in the game or inside M's dream. The phases of a run say in which order:

    collect → update_world_model (V) → encode → update_world_model (M) → evolve

(The package `components/world_models` holds state-space models, which are another family.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.components.actions import ActionCodec
from rl_lab.components.actors.flat import FlatController
from rl_lab.components.actors.held_actions import HeldActions
from rl_lab.components.dynamics.mdn_rnn import MDNRNN, MemoryState, Prediction
from rl_lab.components.evolution.base import EvolutionStrategy
from rl_lab.components.evolution.trials import Trials
from rl_lab.components.representations.base import Representation
from rl_lab.components.representations.conv_vae import ACTIVE_KL, gaussian_kl
from rl_lab.errors import ConfigError
from rl_lab.losses.forecasts import forecast_quality
from rl_lab.metrics.values import Metrics
from rl_lab.nn.flat_adam import FlatAdam
from rl_lab.records import BatchSpec, FieldSpec, Illustration, ImaginedRollout, Observation, SequenceBatch
from rl_lab.simulation.mdn_rnn import DreamState, MDNSimulator
from rl_lab.workflows.base import AgentState, Mode, Workflow
from rl_lab.workflows.context import HookResult, PhaseSteps, PhaseView, WorkflowContext
from rl_lab.workflows.world_models_codes import LOG_VARIANCE, MEAN, Codes
from rl_lab.workflows.world_models_phases import check_dreams, check_order
from rl_lab.workflows.world_models_pictures import code_pictures, dream_film, open_loop
from rl_lab.workflows.world_models_play import DreamedGame, Game

DREAM_EPISODES = 100  # that `evaluate_dream` plays


class WorldModels(Workflow):
    """Methods appear in the order of the paper: acting, V, the codes, M, C."""

    name = "world_models"
    update_hooks: ClassVar[tuple[str, ...]] = ("update_world_model",)
    other_hooks: ClassVar[tuple[str, ...]] = ("encode", "assess", "evolve", "evaluate_dream")

    def __init__(
        self,
        *,
        frames: int = 100,  # a batch of V
        sequences: int = 100,  # a batch of M …
        sequence_length: int = 1000,  # … of this many records, whose successors are predicted
        encode_records: int = 2_000,  # at once
        terminal_weight: float = 10.0,  # of an episode's end in M's loss, where M predicts it: ends are rare
        reward_weight: float = 1.0,  # of the squared error of the reward, where M predicts it
        sample_latents: bool = False,  # C sees a draw from V in place of its mean
        episodes: int = 16,  # of each member in a generation
        evolution_envs: int = 64,  # environments that play them side by side
        patience: int | None = None,  # cut an episode of evolution after so many decisions without a reward above 0
        dream: bool = False,  # evolve inside M; phase options may say otherwise
        temperature: float = 1.0,  # of the dream: above 1 it is less certain, and harder to cheat
        dream_horizon: int = 1_000,
    ) -> None:
        counts = {"frames": frames, "sequences": sequences, "encode_records": encode_records, "episodes": episodes}
        counts |= {"evolution_envs": evolution_envs, "dream_horizon": dream_horizon, "sequence_length": sequence_length}
        for name, count in counts.items():
            if count < (least := 2 if name == "sequence_length" else 1):
                raise ConfigError(f"{name}={count}: expected at least {least}.")
        if temperature < 0.0:
            raise ConfigError(f"temperature={temperature}: expected 0 (no chance at all) or more.")
        self.frames, self.sequences, self.sequence_length = frames, sequences, sequence_length
        self.encode_records, self.terminal_weight, self.reward_weight = encode_records, terminal_weight, reward_weight
        self.sample_latents, self.episodes, self.evolution_envs = sample_latents, episodes, evolution_envs
        self.patience, self.dream, self.temperature, self.dream_horizon = patience, dream, temperature, dream_horizon

    def check_phases(self, phases: Sequence[PhaseSteps]) -> None:
        check_order(phases, dream=self.dream)

    def _bind_context(self, context: WorkflowContext) -> None:
        self.representation = context.component("representation", Representation)
        self.dynamics = context.component("dynamics", MDNRNN)
        self.policy = context.controller("policy", FlatController)
        self.strategy = context.controller("evolution", EvolutionStrategy)
        self.explorer = context.controller("explorer", HeldActions) if "explorer" in context.controllers else None
        self.codec = ActionCodec(context.action_spec)
        self.strategy.start(size=self.policy.size, seed=context.seed)
        self.trials = Trials()
        self._evolving = ""  # the phase that evolved last
        self.simulator = MDNSimulator(
            representation=self.representation, dynamics=self.dynamics, temperature=self.temperature,
            samples=self.sample_latents,
        )  # fmt: skip
        context.simulator.attach(self.simulator)
        self.codes = Codes(self.representation, keys=list(context.observation_spec), device=context.device)
        self.game = Game(
            context.make_envs, num_envs=min(self.evolution_envs, self.strategy.population * self.episodes),
            dynamics=self.dynamics, control=self._control, codec=self.codec, seed=context.seed, patience=self.patience,
        )  # fmt: skip
        self.dreamed_game = DreamedGame(self.simulator, self.policy, self.codes, horizon=self.dream_horizon)
        check_dreams(context.config, dream=self.dream, dynamics=self.dynamics)
        if context.optimizers:
            trains = self.representation.trains
            self.vision_optimizer = context.optimizer("representation", FlatAdam) if trains else None
            self.memory_optimizer = context.optimizer("dynamics", FlatAdam)

    # Acting -----------------------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> AgentState:
        memory = self.dynamics.initial(num_envs)._asdict()
        held = {} if self.explorer is None else self.explorer.initial_memory(num_envs)
        return memory | {name: value.to(self.context.device) for name, value in held.items()}

    @torch.no_grad()
    def act(self, observation: Observation, state: AgentState, *, mode: Mode = "eval") -> tuple[np.ndarray, AgentState]:
        action, memory = self._control(observation, MemoryState(state["hidden"], state["cell"]))
        return self.codec.decode(action).cpu().numpy(), state | memory._asdict()

    def _control(
        self, observation: Observation, memory: MemoryState, vectors: Tensor | None = None
    ) -> tuple[Tensor, MemoryState]:
        """a_t = C([z_t, h_t]), then h_{t+1} = M(h_t, [z_t, a_t]): C sees the memory from before this frame."""
        seen = {key: torch.as_tensor(value, device=self.context.device) for key, value in observation.items()}
        latent = self.simulator.encode(seen)
        action = self.policy(self.dynamics.features(latent, memory), vectors)
        return action, self.dynamics.step(latent, action, memory)

    @torch.no_grad()
    def explore(self, observation: Observation, state: AgentState, phase: PhaseView) -> tuple[np.ndarray, AgentState]:
        """Actions that persist for several steps if the phase's controller is `explorer`; else the policy's."""
        if phase.controller_role != "explorer" or self.explorer is None:
            return self.act(observation, state, mode="train")
        action, held = self.explorer.act(state)
        return self.codec.decode(action).cpu().numpy(), state | held

    def record_specs(self) -> dict[str, FieldSpec]:
        return self.codes.specs

    # V: vision --------------------------------------------------------------------------------------------------------

    def batch_spec(self) -> BatchSpec:
        """Sequences for M. Their frames are not read: what `encode` wrote is enough."""
        codes, device = (MEAN, LOG_VARIANCE), str(self.context.device)
        return BatchSpec(self.sequences, self.sequence_length, fields=codes, device=device)

    def phase_batch_spec(self, phase: PhaseView) -> BatchSpec:
        if phase.options.get("model") != "V":
            return self.batch_spec()
        return BatchSpec(self.frames, 1, fields=tuple(self.codes.fields), device=str(self.context.device))

    def update_world_model(self, batch: SequenceBatch, *, phase: PhaseView) -> Metrics:
        """One gradient step of V or M, as the phase's `options.model` says."""
        if phase.options.get("model") == "V":
            name, optimizer, losses = "v", self.vision_optimizer, self.representation.losses(batch.observation)
        else:
            name, optimizer, losses = "m", self.memory_optimizer, self.memory_losses(batch)
        assert optimizer is not None
        total = losses.pop("total")
        optimizer.zero_grad()
        total.backward()
        optimizer.step(loss=total)
        metrics = {f"loss/{name}_{part}": value.detach() for part, value in losses.items()}
        return metrics | {f"loss/{name}": total.detach(), f"optimizer/{name}_grad_norm": optimizer.last_grad_norm}

    def batch_losses(self, batch: SequenceBatch) -> Mapping[str, Tensor]:
        return self.memory_losses(batch) if MEAN in batch.extras else self.representation.losses(batch.observation)

    # The codes --------------------------------------------------------------------------------------------------------

    def encode(self, *, phase: PhaseView) -> HookResult:
        """Write the code of every stored frame beside it, a part in each call."""
        assert phase.data_source is not None
        source = self.context.data_sources[phase.data_source]
        if not self.codes.write(source, count=self.encode_records):
            return HookResult(finished=False)
        starts = float(len(self.codes.starts.mean))
        return HookResult({"encoded_records": float(len(source)), "dream_starts": starts}, log=True)

    # M: memory --------------------------------------------------------------------------------------------------------

    def memory_losses(self, batch: SequenceBatch) -> dict[str, Tensor]:
        """-log p(z_{t+1} | z_t, a_t, h_t), the mean over dimensions and over the steps that have a successor; the
        cross-entropy of the episode's end and half the squared error of the reward, where M predicts them."""
        latent, valid = self.codes.of(batch).sample(), (~batch.is_last[:, :-1]).float()
        prediction = self._predict(latent, self.codec.encode(batch.action), batch)
        total = valid.sum().clamp(min=1.0)
        likelihood = prediction.latent.log_prob(latent[:, 1:]).mean(-1)
        losses = {"latent": -(valid * likelihood).sum() / total}
        if prediction.reward is not None:
            error = 0.5 * (prediction.reward - batch.reward[:, 1:]).square()
            losses["reward"] = self.reward_weight * (valid * error).sum() / total
        if prediction.terminal_logit is not None:
            ends = batch.is_terminal[:, 1:].float()
            weight = valid * (1.0 + (self.terminal_weight - 1.0) * ends)
            entropy = F.binary_cross_entropy_with_logits(prediction.terminal_logit, ends, reduction="none")
            losses["terminal"] = (weight * entropy).sum() / total
        return {"total": torch.stack([*losses.values()]).sum(), **losses}

    def _predict(self, latent: Tensor, action: Tensor, batch: SequenceBatch) -> Prediction:
        """Prediction of each record's successor, [batch, time - 1]; meaningless after the last record of an episode."""
        return self.dynamics.predict(self.dynamics(latent[:, :-1], action[:, :-1], batch.is_first[:, :-1]))

    @torch.no_grad()
    def assess(self, *, phase: PhaseView) -> HookResult:
        """Quality of M on one batch, in nats for each dimension that V uses: its likelihood, that of a forecast that
        the latent stays as it is, and its likelihood with the actions of other sequences."""
        assert phase.data_source is not None
        batch = self.context.data_sources[phase.data_source].sample(self.batch_spec())
        assert isinstance(batch, SequenceBatch)
        action = self.codec.encode(batch.action)
        latent, valid = self.codes.of(batch).sample(), (~batch.is_last[:, :-1]).float()
        prediction, shuffled = (self._predict(latent, other, batch) for other in (action, action.roll(1, 0)))
        active = gaussian_kl(self.codes.of(batch)).mean((0, 1)) > ACTIVE_KL
        metrics = forecast_quality(latent, prediction.latent, shuffled.latent, valid, active)
        return HookResult({name: float(value) for name, value in metrics.items()}, log=True)

    # C: control -------------------------------------------------------------------------------------------------------

    def evolve(self, *, phase: PhaseView) -> HookResult:
        """A wave of episodes of the present population; with the last one of a generation, the strategy learns.

        `options.restart` lets the search of a phase begin anew; otherwise it goes on from the one before.
        """
        if phase.name != self._evolving and phase.options.get("restart"):
            self.strategy.start(size=self.policy.size, seed=self.context.seed)
        self._evolving = phase.name
        vectors = torch.as_tensor(self.strategy.ask(), dtype=torch.float32, device=self.context.device)
        self.trials.begin(len(vectors), int(phase.options.get("episodes", self.episodes)))
        if phase.options.get("dream", self.dream):
            members, episodes = self.trials.next(self.trials.returns.size)
            played = self.dreamed_game.play(vectors, members, episodes, temperature=self._temperature(phase))
        else:
            members, episodes = self.trials.next(self.game.envs.num_envs)
            played = self.game.play(vectors, members, episodes, generation=self.strategy.generation)
        self.trials.record(members, episodes, played.returns, played.lengths)
        if not self.trials.complete:
            return HookResult(env_steps=played.env_steps, finished=False)
        return HookResult(self._finish_generation(), env_steps=played.env_steps, updates=1, log=True)

    def _temperature(self, phase: PhaseView) -> float:
        return float(phase.options.get("temperature", self.temperature))

    @torch.no_grad()
    def evaluate_dream(self, *, phase: PhaseView) -> HookResult:
        """The virtual score: returns of the present controller in the dream, at the phase's temperature."""
        episodes = np.arange(DREAM_EPISODES)
        played = self.dreamed_game.play(None, episodes, episodes, temperature=self._temperature(phase))
        metrics = {"dream_return_mean": float(played.returns.mean()), "dream_return_std": float(played.returns.std())}
        return HookResult(metrics, log=True)

    def _finish_generation(self) -> Metrics:
        lengths = float(self.trials.lengths.mean())
        fitness = self.trials.finish()
        self.strategy.tell(fitness)
        with torch.no_grad():
            self.policy.vector.copy_(torch.as_tensor(self.strategy.mean))
        return {
            "generation": float(self.strategy.generation),
            "fitness_mean": float(fitness.mean()),
            "fitness_best": float(fitness.max()),
            "fitness_std": float(fitness.std()),
            "fitness_length": lengths,
            "search_spread": self.strategy.spread,
        }

    def close(self) -> None:
        self.game.close()

    # Looking ----------------------------------------------------------------------------------------------------------

    def imagine(self, batch: SequenceBatch, *, context: int) -> ImaginedRollout:
        return open_loop(self.simulator, batch, self.codec.encode(batch.action), context=context)

    def illustrate(self, batch: SequenceBatch) -> list[Illustration]:
        """Reconstructions, samples and traversals of V, and the controller in its dream; of images only."""
        images = [key for key, spec in self.context.observation_spec.items() if spec.kind == "image"]
        if not images:
            return []
        pictures = code_pictures(self.representation, batch, images[0])
        if len(starts := self.codes.starts.mean):
            start = DreamState(starts[:1], *self.dynamics.initial(1))
            pictures.append(dream_film(self.simulator, self.policy, start, images[0]))
        return pictures

    # Saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        own = {"trials": self.trials.state_dict(), "evolving": self._evolving}
        return super().state_dict() | self.codes.state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.trials.load_state_dict(state["trials"])
        self.codes.load_state_dict(state)
        self._evolving = state["evolving"]
