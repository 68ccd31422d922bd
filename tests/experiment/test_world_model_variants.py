"""Whole runs of Dreamers with another world model in one line: they train, imagine, and go on exactly."""

from __future__ import annotations

import json
from pathlib import Path

from tests.overrides import QUIET, TINY_DREAMER
from tests.runs import run_in_parts

from rl_lab.experiment.imagination import imagine_run
from rl_lab.experiment.train import run_training

TRANSFORMER = "components/world_models@components.rssm=transformer"
CONTRASTIVE = "components/decoders@components.decoder=contrastive"
BASE = [*TINY_DREAMER[:-1], *QUIET, "logging.every=8", "evaluation.imagination=false", "evaluation.every=1000"]


def updates(run: Path) -> dict[int, dict[str, object]]:
    """The rows with losses by env steps, without the wall clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if k != "wall_s" and not k.startswith("time/")} for row in rows]
    return {row["env_steps"]: row for row in kept if "train/loss/total" in row}


def test_a_transformer_run_in_two_parts_equals_the_whole(tmp_path: Path) -> None:
    """The transformer's memory of the running episode is saved with the run. Then its model imagines."""
    whole = run_training([*BASE, TRANSFORMER, "training.total_timesteps=64", f"run_root={tmp_path}/a"]).folder
    part = run_in_parts([*BASE, TRANSFORMER, f"run_root={tmp_path}/b"], first=40, total=64)
    assert len(updates(whole)) > 2
    assert updates(part) == updates(whole)
    paths = imagine_run(whole, context=3, horizon=5)
    assert all(path.stat().st_size for path in paths)


def test_a_run_without_a_decoder_imagines_with_its_probe(tmp_path: Path) -> None:
    """The model's loss and the probe's are apart in the metrics, the plan says what decodes nothing, and `imagine`
    draws."""
    run = run_training([*BASE, CONTRASTIVE, "training.total_timesteps=64", f"run_root={tmp_path}"]).folder
    row = next(iter(updates(run).values()))
    assert {"train/loss/observation", "train/contrast/barlow_twins", "train/loss/probe", "train/probe/vector"} <= set(
        row
    )
    assert not any(name.startswith("train/reconstruction") for name in row)
    assert "decoder: vector → no decoder: Barlow twins" in (run / "plan.txt").read_text()
    assert all(path.stat().st_size for path in imagine_run(run, context=3, horizon=5))
