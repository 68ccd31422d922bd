"""Demonstrations of an expert, recorded when a run needs them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rl_lab.datasets.episode import Attributes
from rl_lab.datasets.files import write_dataset
from rl_lab.datasets.recording import Label, RecordingSettings, record_episodes
from rl_lab.environments import inspect_environment, make_vector_env
from rl_lab.environments.settings import EnvironmentSettings
from rl_lab.environments.sync import SyncVectorEnv
from rl_lab.errors import ConfigError
from rl_lab.experts.base import find_expert

if TYPE_CHECKING:
    from rl_lab.data_sources.base import SourceContext

SIDE_BY_SIDE = 8


class Demonstrations:
    """`episodes` episodes that the expert `name` plays, from the environment's stream of seeds for recordings."""

    def __init__(
        self, *, name: str, episodes: int = 100, seed: int = 0, noise: float = 0.0, label: Label = "executed"
    ) -> None:
        self.name, self.expert = name, find_expert(name)
        if episodes < 1:
            raise ConfigError(f"expert.episodes={episodes}: expected at least 1.")
        self.seed = seed
        self.recording = RecordingSettings(episodes=episodes, noise=noise, label=label, seed=seed)

    def recorded_in(self, context: SourceContext) -> Path:
        """The file of the demonstrations in the run's own folder; recorded now where it is not there yet."""
        path = context.folder / "demonstrations.npz"
        if not path.exists():
            assert context.environment is not None
            self.record(context.environment, path)
        return path

    def record(self, environment: EnvironmentSettings, path: Path, format_name: str = "auto") -> Path:
        """Play the episodes in this environment and write them to a new file or folder."""
        if not re.search(self.expert.environments, environment.id):
            raise ConfigError(
                f"The expert '{self.name}' plays {self.expert.environment['id']}, and the environment is "
                f"{environment.id}."
            )
        settings = replace(environment, backend="sync", num_envs=min(SIDE_BY_SIDE, self.recording.episodes))
        converter = inspect_environment(settings).actions
        assert converter is not None
        envs = make_vector_env(settings, seed=self.seed, stream="record")
        assert isinstance(envs, SyncVectorEnv)
        try:
            expert = self.expert.for_environment(settings)
            expert.watch(envs.environments)
            episodes = record_episodes(expert, envs, converter, self.recording)
            attributes = Attributes(environment.id, "environment", f"expert:{self.name}")
            return write_dataset(path, episodes, attributes, format_name=format_name)
        finally:
            envs.close()
