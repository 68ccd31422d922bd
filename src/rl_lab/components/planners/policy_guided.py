"""Planning with the help of a policy and a value (as in TD-MPC)."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from rl_lab.components.planners.base import Bootstrap
from rl_lab.components.planners.mppi import MPPI
from rl_lab.errors import ConfigError
from rl_lab.simulation.simulator import ModelState


class PolicyGuided(MPPI):
    """MPPI over elites, some of whose candidates follow the model's policy, and whose returns end with its value.

    The policy's sequences are drawn once and compete in every iteration. `samples` counts them too: with nothing but
    them, the planner chooses among the policy's own ideas.
    """

    follows_policy = True

    def __init__(
        self,
        *,
        samples: int,
        iterations: int,
        elites: int | None,
        policy_samples: int,
        temperature: float,
        std: float,
        min_std: float | None,
        bootstrap: Bootstrap,
        **arguments: Any,
    ) -> None:
        super().__init__(
            samples=samples, iterations=iterations, elites=elites, temperature=temperature, std=std, min_std=min_std,
            bootstrap=bootstrap, **arguments,
        )  # fmt: skip
        if not 1 <= policy_samples <= samples:
            raise ConfigError(
                f"policy_samples={policy_samples}, samples={samples}: expected from 1 to as many as samples. Without "
                "any, use controllers/planners=mppi."
            )
        self.policy_samples = policy_samples

    def draw_noise(self, num_envs: int) -> dict[str, Tensor]:
        return {"candidates": self._normal(self.iterations, num_envs, self.samples - self.policy_samples)}

    def _fixed_candidates(self, state: ModelState) -> Float[Tensor, "env candidate horizon action"]:
        """Sequences that follow the model's policy."""
        simulator, count = self.simulator, self.policy_samples
        start = simulator.spread(state, count)
        actions = simulator.rollout(start, None, self.horizon).action
        return actions.view(-1, count, *actions.shape[1:]).to(self.neutral.dtype)
