"""DQN on CartPole-v1: env steps/s of RL Lab against Stable-Baselines3, same network, batch, updates and environments.

Both take turns in one process, on one thread. SB3 must be installed beside RL Lab (a folder on PYTHONPATH will do);
else only RL Lab is timed. Run it: python benchmarks/dqn.py [--env-steps N] [--rounds N] [--json FILE]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from side_by_side import arguments, compare, rates, rl_lab_loop, write


@dataclass(frozen=True)
class Setting:
    """The same run in both libraries. `train_every` env steps are followed by `updates` updates."""

    name: str
    num_envs: int
    units: int
    batch_size: int
    learning_rate: float
    train_every: int
    updates: int
    learning_starts: int
    capacity: int


DEFAULT = {"units": 64, "batch_size": 32, "learning_rate": 1e-4, "learning_starts": 100, "capacity": 100_000}
ZOO = {"units": 256, "batch_size": 64, "learning_rate": 2.3e-3, "learning_starts": 1000, "capacity": 100_000}
SETTINGS = (
    Setting("SB3's default: 64-64, batch 32, 1 environment", 1, train_every=4, updates=1, **DEFAULT),
    Setting("zoo: 256-256, batch 64, 1 environment", 1, train_every=256, updates=128, **ZOO),
    Setting("SB3's default: 64-64, batch 32, 8 environments", 8, train_every=32, updates=8, **DEFAULT),
    Setting("zoo: 256-256, batch 64, 8 environments", 8, train_every=256, updates=128, **ZOO),
)


def rl_lab_speed(setting: Setting, env_steps: int) -> tuple[float, float]:
    hooks = f"[collect,{{update:{{times:{setting.updates},every:{setting.train_every}}}}}]"
    phase = f"{{name:train,duration_steps:{env_steps},data_source:replay,workflow_hooks:{hooks}}}"
    overrides = [
        "+experiment=dqn", "environment.id=CartPole-v1", "environment.backend=sync",
        f"environment.num_envs={setting.num_envs}", f"controllers.q.units={setting.units}",
        f"workflow.batch_size={setting.batch_size}", f"optimizers.main.lr={setting.learning_rate}",
        f"data_sources.replay.capacity={setting.capacity}", "workflow.epsilon_steps=1000",
        f"data_sources.replay.start_after={setting.learning_starts}", f"training.phases=[{phase}]",
        f"training.total_timesteps={env_steps}",
    ]  # fmt: skip
    with rl_lab_loop(overrides) as loop:
        return rates(loop, env_steps)


def sb3_speed(setting: Setting, env_steps: int) -> tuple[float, float]:
    from stable_baselines3 import DQN
    from stable_baselines3.common.env_util import make_vec_env

    model = DQN(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=setting.num_envs, seed=0),
        learning_rate=setting.learning_rate,
        batch_size=setting.batch_size,
        buffer_size=setting.capacity,
        learning_starts=setting.learning_starts,
        train_freq=setting.train_every // setting.num_envs,  # counted in steps of all environments together
        gradient_steps=setting.updates,
        exploration_fraction=min(1.0, 1000 / env_steps),
        policy_kwargs={"net_arch": [setting.units, setting.units]},
        device="cpu",
        seed=0,
    )
    return rates(lambda: model.learn(env_steps), env_steps)


def main() -> None:
    asked = arguments(__doc__.splitlines()[0])
    rows = [
        compare(setting.name, partial(rl_lab_speed, setting), partial(sb3_speed, setting), asked)
        for setting in SETTINGS
    ]
    write(asked.json, "dqn_cartpole", rows)


if __name__ == "__main__":
    main()
