"""Mixtures: shares, schedules, write-backs, resume, and what cannot be mixed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_offline import SPEC, context, dataset

from rl_lab.data_sources.base import DataSource, SourceContext
from rl_lab.data_sources.mixture import MixtureSource
from rl_lab.data_sources.offline import OfflineSource
from rl_lab.data_sources.replay import SequenceReplay
from rl_lab.errors import ConfigError, DataError
from rl_lab.records import BatchSpec, FieldSpec, RecordBlock


def mixed(path: Path, parts: dict[str, Any], **extra: FieldSpec) -> tuple[MixtureSource, dict[str, DataSource]]:
    """A mixture of a dataset and an empty replay, with the fields of `test_offline`."""
    if not (path / "data.npz").exists():
        dataset(path)
    sources: dict[str, DataSource] = {
        "demos": OfflineSource(path=str(path / "data.npz")),
        "replay": SequenceReplay(capacity=100),
        "mixture": MixtureSource(parts=parts),
    }
    own: SourceContext = replace(context(path / "run", **extra), sources=sources)
    for source in sources.values():
        source.prepare(own)
    mixture = sources["mixture"]
    assert isinstance(mixture, MixtureSource)
    return mixture, sources


def fill(source: DataSource, count: int = 20) -> None:
    """Records that a dataset never has: a negative first entry."""
    for number in range(count):
        fields = {
            "observation.vector": np.full((1, 2), -1.0, np.float32), "action": np.zeros((1, 1), np.float32),
            "reward": np.zeros(1, np.float32), "is_first": np.array([number == 0]), "is_last": np.zeros(1, bool),
            "is_terminal": np.zeros(1, bool),
        }  # fmt: skip
        source.add(RecordBlock(fields))


def share_of_replay(mixture: MixtureSource, spec: BatchSpec = SPEC) -> int:
    return int((mixture.sample(spec).observation["vector"][:, 0, 0] < 0).sum())


def test_shares_are_exact_over_time(tmp_path: Path) -> None:
    """One tenth of 16 is 1.6 sequences: whole numbers in every batch, and 1.6 on average."""
    mixture, _ = mixed(tmp_path, {"demos": 0.9, "replay": 0.1})
    assert not mixture.ready(SPEC)
    fill(mixture)
    assert mixture.ready(SPEC)
    drawn = [share_of_replay(mixture) for _ in range(10)]
    assert set(drawn) == {1, 2}
    assert sum(drawn) == 16


def test_a_schedule_fades_with_the_records(tmp_path: Path) -> None:
    mixture, _ = mixed(tmp_path, {"demos": {"from": 1.0, "to": 0.0, "over_records": 40}, "replay": 1.0})
    fill(mixture)  # half of the way: weights ½ and 1
    np.testing.assert_allclose(mixture.weights(), [1 / 3, 2 / 3])
    fill(mixture)
    assert share_of_replay(mixture) == 16


def test_a_schedule_fades_with_the_batches(tmp_path: Path) -> None:
    mixture, _ = mixed(tmp_path, {"demos": {"from": 1.0, "to": 0.0, "over_batches": 4}, "replay": 1.0})
    fill(mixture)
    shares = [share_of_replay(mixture) for _ in range(6)]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (8, 16)
    np.testing.assert_allclose(mixture.weights(), [0.0, 1.0])


def test_write_backs_find_their_part(tmp_path: Path) -> None:
    latent = {"latent": FieldSpec((), "float32")}
    mixture, sources = mixed(tmp_path, {"demos": 0.5, "replay": 0.5}, **latent)
    fill(mixture)
    batch = mixture.sample(SPEC)
    mixture.update(batch.indices, {"latent": batch.observation["vector"][..., 0] + 2.0})
    for name, expected in (("replay", {0.0, 1.0}), ("demos", {0.0, 2.0, 3.0, 4.0})):
        values = {float(v) for _ in range(20) for v in sources[name].sample(SPEC).extras["latent"].flatten()}
        assert values <= expected
        assert values - {0.0}


def test_a_mixture_goes_on_exactly(tmp_path: Path) -> None:
    parts = {"demos": {"from": 1.0, "to": 0.2, "over_batches": 10}, "replay": 0.37}
    whole, _ = mixed(tmp_path, parts)
    half, half_sources = mixed(tmp_path, parts)
    for mixture in (whole, half):
        fill(mixture)
        for _ in range(3):
            mixture.sample(SPEC)
    states = {}
    for name, source in half_sources.items():
        (tmp_path / name).mkdir()
        states[name] = source.state_dict(tmp_path / name)
    resumed, sources = mixed(tmp_path, parts)
    for name, source in sources.items():
        source.load_state_dict(states[name], tmp_path / name)
    for _ in range(4):
        np.testing.assert_array_equal(whole.sample(SPEC).indices, resumed.sample(SPEC).indices)


def test_what_cannot_be_mixed_is_refused(tmp_path: Path) -> None:
    for parts, said in (
        ({}, "parts is empty"),
        ({"demos": 0.0, "replay": 0}, "every weight is 0"),
        ({"demos": -1.0}, r"parts.demos is -1.0: a weight is a number from 0"),
        ({"demos": {"from": 1.0, "to": 0.0}}, "over_batches"),
        ({"demos": {"form": 1.0}}, "Did you mean 'from'"),
        ({"demo": 1.0}, "no such data source. Did you mean 'demos'"),
        ({"mixture": 1.0}, "part of itself"),
    ):
        with pytest.raises(ConfigError, match=said):
            mixed(tmp_path, parts)


def test_a_field_that_one_part_lacks_is_named(tmp_path: Path) -> None:
    dataset(tmp_path, reward=None)
    mixture, _ = mixed(tmp_path, {"demos": 0.5, "replay": 0.5})
    with pytest.raises(DataError, match=r"parts.demos: The dataset has no field 'reward'"):
        mixture.check(SPEC)
