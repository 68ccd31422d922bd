"""The records that pass between collection, data sources and workflows.

Time-step layout, everywhere: record t holds the observation, the reward received on arriving at it, `is_first`,
`is_last`, `is_terminal`, and the action chosen after seeing it. Truncation is `is_last` without `is_terminal`. The
record that ends an episode carries a zero action. Field names are flat: `observation.<key>`, `action`, `reward`, the
three flags, and whatever a workflow adds (`latent.deter`, say).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Observation = dict[str, np.ndarray]
Fields = dict[str, np.ndarray]
OBSERVATION_PREFIX = "observation."


def split_observation(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(observations by key, everything else), from flat field names."""
    start = len(OBSERVATION_PREFIX)
    observation = {name[start:]: value for name, value in fields.items() if name.startswith(OBSERVATION_PREFIX)}
    return observation, {name: value for name, value in fields.items() if not name.startswith(OBSERVATION_PREFIX)}


@dataclass(frozen=True)
class FieldSpec:
    """Shape and dtype of one stored field, without environment and time axes."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True)
class EpisodeEnd:
    """The last records of the environments whose episode ended in this step."""

    indices: np.ndarray  # [ended] which environments
    observation: Observation  # [ended, ...] the true last observation
    reward: np.ndarray  # [ended] float32
    is_terminal: np.ndarray  # [ended] bool; False: truncated
    info: list[dict[str, Any]]  # one per ended episode, e.g. {"worker_restarted": True}


@dataclass(slots=True)
class VectorStep:
    """The result of a vector environment's step: for every environment, the record that the agent acts on next.

    Where an episode ended, the environment has been reset already: `observation` is the first one of the next episode,
    its reward is 0, `is_first` is True, and `ended` carries the last record of the episode that is over. The arrays are
    fresh in every step and belong to the receiver.
    """

    observation: Observation  # [env, ...]
    reward: np.ndarray  # [env] float32
    is_first: np.ndarray  # [env] bool
    ended: EpisodeEnd | None = None


@dataclass(slots=True)
class RecordBlock:
    """One record for each of some environments. `indices` is None where it is all of them, in order."""

    fields: Fields  # each [len(indices) or num_envs, ...]
    indices: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """One finished episode."""

    env_index: int
    episode_return: float
    length: int  # agent decisions
    is_terminal: bool


@dataclass(slots=True)
class CollectResult:
    """The result of `collect_step`: the blocks go to the phase's data source, in order."""

    blocks: list[RecordBlock]
    env_steps: int
    episodes: list[EpisodeSummary] = field(default_factory=list)
    following: VectorStep | None = None  # what the agent acts on next: the successor of the newest records


class BatchSpec(NamedTuple):
    """A batch of sequences: `context` records of history, then `sequence_length` records to train on."""

    batch_size: int
    sequence_length: int
    context: int = 0
    fields: tuple[str, ...] | None = None  # None: every stored field
    device: str = "cpu"

    @property
    def window(self) -> int:
        return self.context + self.sequence_length

    @classmethod
    def from_list(cls, values: list[Any]) -> BatchSpec:
        """From `list(spec)`, as it comes out of a checkpoint."""
        spec = cls(*values)
        return spec if spec.fields is None else spec._replace(fields=tuple(spec.fields))


@dataclass(frozen=True)
class SequenceBatch:
    """Sequences of records, batch first. `action[:, t]` was chosen after seeing `observation[:, t]`."""

    observation: dict[str, Tensor]  # each [batch, time, ...]
    action: Tensor  # [batch, time, *action]
    reward: Tensor  # [batch, time] float32
    is_first: Tensor  # [batch, time] bool
    is_last: Tensor
    is_terminal: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)  # stored latents and the like: [batch, time, ...]
    indices: Tensor | None = None  # [batch, time] int64 record ids, for DataSource.update
    weight: Tensor | None = None  # [batch] float32 importance weights, where the source draws by priority


@dataclass(frozen=True)
class RecordScan:
    """A stretch of the records that a data source holds, stream by stream, oldest first."""

    indices: np.ndarray  # [record] int64 ids, for DataSource.update
    fields: Fields  # each [record, ...], by their stored names


@dataclass(frozen=True)
class Rollout:
    """Consecutive decisions of every environment, time-major, and what followed each of them.

    Here `reward[t]`, `is_last[t]` and `is_terminal[t]` belong to the successor of decision t: the record that a replay
    would keep after it. A rollout may span episodes: where `is_last[t]`, decision t + 1 begins another one, and the
    last observation of a truncated episode stands in `cut`.
    """

    number: int  # of the run's rollouts
    observation: dict[str, Tensor]  # each [time, env, ...]: what the agent saw
    action: Tensor  # [time, env, *action]: what it did then
    is_first: Tensor  # [time, env] bool
    reward: Tensor  # [time, env] float32: what it got for it
    is_last: Tensor
    is_terminal: Tensor
    following: dict[str, Tensor]  # [env, ...] the observation after the last decision
    following_first: Tensor  # [env] bool: it begins an episode
    cut: dict[str, Tensor]  # [cuts, ...] the true last observations of truncated episodes
    cut_indices: Tensor  # [cuts] int64: the decisions that led there, as time·envs + env
    extras: dict[str, Tensor] = field(default_factory=dict)  # [time, env, ...]


@dataclass(frozen=True)
class RolloutBatch:
    """A minibatch: some decisions of a rollout, each once in every epoch."""

    rollout: Rollout
    indices: Tensor  # [batch, sequence] int64: decisions in a row, as time·envs + env
    epoch: int
    is_final: bool  # the last minibatch of this rollout

    @property
    def observation(self) -> dict[str, Tensor]:
        return self.rollout.observation

    @property
    def action(self) -> Tensor:
        return self.rollout.action

    @property
    def reward(self) -> Tensor:
        return self.rollout.reward

    @property
    def extras(self) -> dict[str, Tensor]:
        return self.rollout.extras


Batch = SequenceBatch | RolloutBatch


@dataclass(frozen=True)
class ImaginedRollout:
    """Open-loop predictions of a model, beside what happened. All arrays [batch, time, ...]; NumPy."""

    context: int  # this many leading steps were observed; the rest is prediction
    real: dict[str, np.ndarray]  # observation keys
    imagined: dict[str, np.ndarray]
    real_reward: np.ndarray
    imagined_reward: np.ndarray | None  # None: the model predicts none
    imagined_continue: np.ndarray | None = None


@dataclass(frozen=True)
class Illustration:
    """Pictures that a workflow makes of its model: rows of images and, if it moves, a film. NumPy, uint8."""

    name: str  # of the files
    title: str
    text: str  # what to look for
    rows: list[tuple[str, np.ndarray]]  # label, images [columns, height, width, channels]
    film: np.ndarray | None = None  # [time, height, width, channels]
    cell: int = 84  # pixels of an image in the picture
    columns: tuple[str, ...] = ()  # what stands above each column


@dataclass(frozen=True)
class PlannedDecision:
    """A planner's candidates at one decision, as paths of one observation key, and the path that came. NumPy."""

    step: int
    paths: np.ndarray  # [candidate, horizon + 1, entries] some of the candidates, from the present on
    is_elite: np.ndarray  # [candidate] bool
    chosen: np.ndarray  # [horizon + 1, entries]
    real: np.ndarray  # [at most horizon + 1, entries]
    weight: np.ndarray | None = None  # [candidate] of particles: a share of all weights
    note: str = ""  # what else the planner says of this decision


@dataclass(frozen=True)
class SearchedDecision:
    """The tree of one decision, and what the search made of the network's policy. NumPy; node 0 is the root."""

    step: int
    parent: np.ndarray  # [node] int, -1 for the root
    action: np.ndarray  # [node] int: the edge that leads to it
    visits: np.ndarray  # [node] of that edge; of the root, all
    value: np.ndarray  # [node] mean return from there on
    line: np.ndarray  # nodes of the principal line, from the root on
    prior: np.ndarray  # [action] the network's policy
    policy: np.ndarray  # [action] the search's
    q: np.ndarray  # [action] NaN where an action was never tried
    names: list[str]  # of the root's actions: their class, or the value of a sampled number
    line_names: list[str]  # of the actions along the principal line; the first alone where nodes sample their own


@dataclass(frozen=True)
class PlannedEpisode:
    """An episode that was planned: what each plan promised, what was got, and some decisions in full. NumPy."""

    horizon: int
    beyond_horizon: bool  # whether the promise counts a value at the horizon
    expected: np.ndarray  # [decisions] the return that the model expected of the plan
    received: np.ndarray  # [decisions] what came instead (then the promise at the horizon); NaN: not known
    key: str | None = None
    decisions: list[PlannedDecision] = field(default_factory=list)
    searches: list[SearchedDecision] = field(default_factory=list)  # of a tree search: some trees …
    network_value: np.ndarray | None = None  # … and for each decision the value before the search, [decisions]
    discounted: np.ndarray | None = None  # … and the discounted return that came, [decisions]
