"""Configurations and datasets at random (hypothesis): one of RL Lab's own errors, or none; no other, and no hang."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.torture.children import in_child
from tests.torture.kills import folder
from tests.torture.tally import Tally

from rl_lab.datasets.episode import Attributes, Episode
from rl_lab.datasets.files import open_dataset, write_dataset
from rl_lab.datasets.inspection import inspect_dataset
from rl_lab.errors import RLLabError
from rl_lab.experiment.train import configuration

BATCH = 25  # examples a child
SLOW_S = 20.0  # of processor time for one of them: that is a hang
EXPERIMENTS = ("random", "dreamer_v3", "dqn", "ppo", "tdmpc2", "mbmpc", "mpc_cartpole")
KEYS = (
    "experiment", "experiment.name", "experiment.seed", "experiment.device", "training", "training.total_timesteps",
    "training.phases", "training.phases.0.duration_steps", "training.compile", "training.precision", "training.threads",
    "training.on_nonfinite", "evaluation", "evaluation.every", "evaluation.episodes", "evaluation.select",
    "checkpoint.every", "checkpoint.best", "logging.every", "logging.console", "logging.wandb", "environment",
    "environment.id", "environment.num_envs", "environment.kwargs", "environment.module", "environment.atari",
    "environment.image_size", "environment.action_repeat", "environment.time_limit", "workflow", "workflow._target_",
    "workflow.batch_size", "workflow.horizon", "components", "components.encoder._target_", "controllers",
    "optimizers", "optimizers.main.lr", "data_sources", "data_sources.replay.capacity", "data_sources.replay.storage",
    "run_root", "size", "presets", "_dims", "_dims.action_size", "nowhere", "a.b.c", "hydra.run.dir",
)  # fmt: skip
PLAIN = st.one_of(
    st.none().map(lambda _: "null"),
    st.booleans().map(lambda value: str(value).lower()),
    st.integers(-(10**12), 10**12).map(str),
    st.floats().map(str),
    st.sampled_from(["auto", "cpu", "random", "CartPole-v1", "os.system", "builtins.dict", "collect", "''", "???"]),
    st.text("abcdefghij_./:${}[],=\\'\"ü \t0123456789", max_size=12),
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]"),
        st.dictionaries(st.sampled_from(["name", "type", "_target_", "x", "every", "until"]), inner, max_size=3).map(
            lambda items: "{" + ",".join(f"{key}: {value}" for key, value in items.items()) + "}"
        ),
        inner.map(lambda value: f"${{{value}}}"),
    ),
    max_leaves=5,
)
SIGNS, ODDITIES = st.sampled_from(["", "+", "++"]), st.sampled_from(["~workflow", "-m", "=", "+experiment"])
LINES = st.builds(lambda sign, key, value: f"{sign}{key}={value}", SIGNS, st.sampled_from(KEYS), VALUES)
OVERRIDES = st.lists(st.one_of(LINES, LINES, LINES, st.text(max_size=20), ODDITIES), min_size=1, max_size=3)


def _examples(strategy: st.SearchStrategy[Any], count: int, seed: int, check: Callable[[Any], object]) -> None:
    from hypothesis import seed as seeded

    quiet = settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    seeded(seed)(quiet(given(strategy)(check)))()


def configurations(seed: int, tally: Tally, count: int = BATCH) -> None:
    """Random overrides, composed and checked as `rl-lab train` would."""

    def work() -> tuple[int, list[str]]:
        tried, failures = [0], []
        chance = random.Random(seed)

        def check(lines: list[str]) -> None:
            tried[0] += 1
            experiment, start = chance.choice(EXPERIMENTS), time.process_time()
            try:
                configuration([f"+experiment={experiment}", "environment.id=CartPole-v1", *lines])
            except RLLabError as error:
                if not str(error).strip():
                    failures.append(f"{lines}: an error without words")
            except BaseException as error:
                failures.append(f"+experiment={experiment} {lines}: {type(error).__name__}: {error}")
            if time.process_time() - start > SLOW_S:
                failures.append(f"+experiment={experiment} {lines}: it took more than {SLOW_S:g} s")

        _examples(OVERRIDES, count, seed, check)
        return tried[0], failures

    ended = in_child(work, limit=30.0 + 10.0 * count)
    if ended.status != "done":
        tally.bad(f"configurations, seed {seed}: {ended.status}: {ended.text}")
        return
    tried, failures = ended.value
    tally.add("fuzzed_configurations", tried)
    for text in failures:
        tally.bad(text)


def _dataset(path: Path) -> Path:
    chance = np.random.default_rng(0)
    episodes = [
        Episode(
            {"vector": chance.normal(size=(6, 3)).astype(np.float32)},
            chance.normal(size=(5, 2)).astype(np.float32),
            chance.normal(size=5).astype(np.float32),
            terminated=True,
        )
        for _ in range(2)
    ]
    return write_dataset(path, episodes, Attributes())


def datasets(seed: int, tally: Tally, count: int = BATCH) -> None:
    """Files of every format that writes one file, with some bytes changed, read from end to end."""

    def work() -> tuple[int, list[str]]:
        failures: list[str] = []
        chance = random.Random(seed)
        sound = [_dataset(root / f"sound{suffix}") for suffix in (".npz", ".pt", ".csv", ".hdf5")]
        for number in range(count):
            source = chance.choice(sound)
            content = bytearray(source.read_bytes())
            for _ in range(chance.randint(1, 8)):
                content[chance.randrange(len(content))] = chance.randrange(256)
            if chance.random() < 0.3:
                content = content[: chance.randrange(len(content))]
            path = root / f"{number}{source.suffix}"
            path.write_bytes(bytes(content))
            try:
                inspect_dataset(open_dataset(path))
            except RLLabError:
                continue
            except BaseException as error:
                failures.append(f"{source.suffix}, seed {seed}, file {number}: {type(error).__name__}: {error}")
        return count, failures

    with folder() as root:
        ended = in_child(work, limit=30.0 + 5.0 * count)
    if ended.status != "done":
        tally.bad(f"datasets, seed {seed}: {ended.status}: {ended.text}")
        return
    tried, failures = ended.value
    tally.add("fuzzed_datasets", tried)
    for text in failures:
        tally.bad(text)
