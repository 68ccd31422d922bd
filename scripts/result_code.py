"""What has changed since the rows in results/ were made: python scripts/result_code.py ppo_acrobot.

It reads the commit that a row names, so it needs the repository's history. Without names it looks at every file. With
`--renew` it writes the rows' digests anew, by the rule of `rl_lab.experiment.learning_code` as it is now: that is for a
change of the rule. Rows whose commit is not in the history lose theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from rl_lab.errors import ConfigError
from rl_lab.experiment.learning_code import SOURCE, definitions, digests, settings
from rl_lab.experiment.prepare import prepare
from rl_lab.experiment.results import write_results

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
PREPARE = """
import json, sys
from rl_lab.experiment.prepare import prepare
print(json.dumps(prepare(sys.argv[1:]).config))
"""
SHOWN = 12  # names at most


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="results files, without .json")
    parser.add_argument("--renew", action="store_true", help="write the digests anew")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(RESULTS.glob("*.json")):
            result = json.loads(path.read_text(encoding="utf-8"))
            if "rows" in result and (not asked.names or path.stem in asked.names):
                look_at(path, result, Path(folder), renew=asked.renew)


def look_at(path: Path, result: Mapping[str, Any], folder: Path, *, renew: bool) -> None:
    """Print what has changed since each commit of a results file; `renew`: write its digests anew."""
    overrides = (f"+experiment={result['experiment']}", *result["overrides"])
    rows = {row["seed"]: {**row, "code": None, "settings": None} for row in result["rows"]}
    try:
        config = prepare(overrides).config
    except ConfigError as error:
        print(f"{path.stem}: {error}")
        config = None
    for commit in sorted({row["commit"] for row in rows.values()}):
        source, before = at_commit(commit, overrides, folder)
        words = [f"{path.stem} at {commit[:9]}:"]
        if source is None or before is None:
            words.append("the commit is not in the history" if source is None else "it cannot be composed there")
        else:
            for row in rows.values():
                if row["commit"] == commit:
                    row |= digests(before, source=source)
            if config is not None:
                words.append(changes("definitions", definitions(before, source=source), definitions(config)) + ";")
                words.append(changes("settings", settings(before), settings(config)))
        print(*words, flush=True)
    if renew:
        known = {name: result[name] for name in ("experiment", "overrides", "protocol", "config")}
        write_results(path, rows=rows, **known)


def changes(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """How many differ of those that there are, and their names."""
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    shown = [name.removeprefix("rl_lab.") for name in names[:SHOWN]] + ["…"] * (len(names) > SHOWN)
    return f"{len(names)} of {len(after)} {what} changed" + (f" ({', '.join(shown)})" if shown else "")


@cache
def at_commit(commit: str, overrides: tuple[str, ...], folder: Path) -> tuple[Path | None, dict[str, Any] | None]:
    """The source of that commit and the configuration that these overrides had there; None where there is none."""
    place = folder / commit
    if not place.is_dir():
        done = subprocess.run(["git", "archive", commit, "src/rl_lab"], cwd=ROOT, capture_output=True, check=False)
        if done.returncode != 0:
            return None, None
        with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
            archive.extractall(place, filter="data")
    paths = os.pathsep.join([str(place / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-c", PREPARE, *overrides]
    composed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    config = json.loads(composed.stdout.splitlines()[-1]) if composed.returncode == 0 else None
    return place / "src" / SOURCE.name, config


if __name__ == "__main__":
    main(sys.argv[1:])
