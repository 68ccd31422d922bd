"""PPO on CartPole-v1: env steps/s of RL Lab against Stable-Baselines3, same network, batch, epochs and environments.

Both take turns in one process, on one thread. SB3 must be installed beside RL Lab (a folder on PYTHONPATH will do);
else only RL Lab is timed. Run it: python benchmarks/ppo.py [--env-steps N] [--rounds N] [--json FILE]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from side_by_side import arguments, compare, rates, rl_lab_loop, write


@dataclass(frozen=True)
class Setting:
    """The same run in both libraries."""

    name: str
    length: int  # decisions of each environment in a rollout
    batch_size: int
    epochs: int
    num_envs: int = 8


SETTINGS = (
    Setting("few epochs: 8 × 32, batch 256, 4 epochs", 32, 256, 4),
    Setting("zoo: 8 × 32, batch 256, 20 epochs", 32, 256, 20),
    Setting("SB3's default: 8 × 2048, batch 64, 10 epochs", 2048, 64, 10),
)


def rl_lab_speed(setting: Setting, env_steps: int) -> tuple[float, float]:
    env_steps = whole_rollouts(setting, env_steps)
    overrides = [
        "+experiment=ppo_cartpole", f"training.total_timesteps={env_steps}", f"environment.num_envs={setting.num_envs}",
        f"data_sources.stream.length={setting.length}", f"data_sources.stream.epochs={setting.epochs}",
        f"workflow.batch_size={setting.batch_size}", "workflow.anneal_clip=false",
    ]  # fmt: skip
    with rl_lab_loop(overrides) as loop:
        return rates(loop, env_steps)


def sb3_speed(setting: Setting, env_steps: int) -> tuple[float, float]:
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    env_steps = whole_rollouts(setting, env_steps)
    model = PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", setting.num_envs, seed=0), n_steps=setting.length,
        batch_size=setting.batch_size, n_epochs=setting.epochs, learning_rate=1e-3, gamma=0.98, gae_lambda=0.8,
        device="cpu", seed=0,
    )  # fmt: skip
    return rates(lambda: model.learn(env_steps), env_steps)


def whole_rollouts(setting: Setting, env_steps: int) -> int:
    rollout = setting.num_envs * setting.length
    return -(-env_steps // rollout) * rollout


def main() -> None:
    asked = arguments(__doc__.splitlines()[0])
    rows = [
        compare(setting.name, partial(rl_lab_speed, setting), partial(sb3_speed, setting), asked)
        for setting in SETTINGS
    ]
    write(asked.json, "ppo_cartpole", rows)


if __name__ == "__main__":
    main()
