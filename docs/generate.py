"""Writes the parts of the documentation that come from elsewhere: settings, an experiment, results, curves.

python docs/generate.py rewrites what stands between `<!-- begin NAME -->` and `<!-- end NAME -->`.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from beside import atari_table as atari_scores_table
from beside import control_table, draw_control, minatar_table
from curves import curves_table, draw_curves, published
from planning_tables import detour_table, diffusion_planner_table, point_maze_table
from scaling_tables import costs_table, scaling_table
from scores import RELIABILITY, findings, scores_by_family, scores_table
from ui_tables import ui_table
from world_models_tables import backends_table, car_racing_table, generation_table, temperature_table

from rl_lab.environments.settings import AtariSettings, EnvironmentSettings
from rl_lab.experiment.registry import OWN_CONFIGS
from rl_lab.experiment.settings import SECTIONS

ROOT = Path(__file__).resolve().parents[1]
BESIDE_SB3 = ("ppo_cartpole", "dqn_cartpole")
MATRIX_TASKS = ("CartPole-v1", "Pendulum-v1")


def main() -> None:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        path.write_text(filled(text), encoding="utf-8")
    for page in published():
        draw_curves(page)
    draw_control()


def filled(text: str) -> str:
    """The text with every marked part written anew."""
    for name, content in contents().items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if begin in text:
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}\n{content}\n{end}{rest.partition(end)[2]}"
    return text


@cache
def contents() -> dict[str, str]:
    """Every part that can be marked, by name."""
    sections: dict[str, type] = {**SECTIONS, "environment": EnvironmentSettings, "atari": AtariSettings}
    parts = {f"settings {name}": settings_table(cls) for name, cls in sections.items()}
    speed = ROOT / "results" / "speed"
    results = ROOT / "results"
    parts |= {"scores": scores_table(results), "scores by family": scores_by_family(results)}
    parts |= {"findings": findings(results)}
    parts |= {"speed": speed_table(speed), "beside control": control_table(), "beside atari": atari_scores_table()}
    parts |= {"minatar": minatar_table()}
    parts |= {f"curves {page}": curves_table(page) for page in published()}
    parts |= {"speed cpu": cpu_table(speed / "dreamer_v3_cpu.json")}
    parts |= {"ablation": ablation_table(speed / "ablation.json")}
    parts |= {"speed tdmpc2": planning_table(speed / "tdmpc2_5m.json")}
    parts |= {"speed atari": atari_table(speed / "dreamer_v3_atari.json")}
    parts |= {"speed planners": planners_table(speed / "planners.json")}
    parts |= {
        f"planner matrix {name}": matrix_table(ROOT / "results" / "matrix" / "planners.json", name)
        for name in MATRIX_TASKS
    }
    parts |= {"pendulum optimum": optimum_table(ROOT / "results" / "matrix" / "pendulum.json")}
    parts |= {f"speed {name}": side_by_side_table(speed / f"{name}.json") for name in BESIDE_SB3}
    parts |= {"point maze": point_maze_table(ROOT / "results"), "detour": detour_table(ROOT / "results")}
    parts |= {"diffusion planner": diffusion_planner_table(ROOT / "results" / "matrix" / "diffusion_planner.json")}
    parts |= {
        "world models temperatures": temperature_table(ROOT / "results"),
        "world models car racing": car_racing_table(ROOT / "results"),
        "speed evolution": generation_table(speed / "evolution.json"),
        "speed car racing": backends_table(speed / "car_racing.json"),
    }
    parts |= {"reliability": reliability_table(ROOT / "results" / RELIABILITY)}
    parts |= {"scaling": scaling_table(speed / "scaling.json"), "scaling costs": costs_table(speed / "scaling.json")}
    parts |= {"soak": soak_table(ROOT / "results" / "soak"), "speed ui": ui_table(speed / "ui.json")}
    return parts | {"cartpole": experiment_file("dreamer_v3_cartpole")}


# Settings -------------------------------------------------------------------------------------------------------------


def settings_table(cls: type) -> str:
    """Key, default and meaning of every field of a settings class."""
    docs = _field_docs(cls)
    rows = [[f"`{item.name}`", f"`{default_text(item)}`", docs.get(item.name, "")] for item in fields(cls)]
    return _table(["Key", "Default", "Meaning"], rows)


def default_text(item: Field[Any]) -> str:
    """The default as YAML writes it."""
    if item.default is MISSING and item.default_factory is MISSING:
        return "(required)"
    value = item.default if item.default is not MISSING else {}
    return json.dumps(value).strip('"')


def _field_docs(cls: type) -> dict[str, str]:
    """The string that stands under each field."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[field.target.id] = " ".join(str(following.value.value).split()).replace("|", "\\|")
    return docs


def experiment_file(name: str) -> str:
    """An experiment as its file has it."""
    text = (OWN_CONFIGS / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
    return f"```yaml\n{text}```"


# Results --------------------------------------------------------------------------------------------------------------


def reliability_table(path: Path) -> str:
    """The counts of the last campaign of `make torture`."""
    if not path.is_file():
        return "No campaign is recorded yet: `make torture` writes it."
    result = json.loads(path.read_text(encoding="utf-8"))
    names = [[name.replace("_", " "), f"{count:,}"] for name, count in result["counts"].items()]
    return "\n\n".join(
        [
            f"{result['seconds'] / 60:.0f} minutes at commit `{result['commit'][:12]}`, seed {result['seed']}, with the"
            f" runs {'; '.join(result['cases'])}: {len(result['failures'])} failures.",
            _table(["Done", "Times"], names),
        ]
    )


def soak_table(folder: Path) -> str:
    """What long trainings held once they had settled, and at their end."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        names = ("rss_mib", "gpu_mib", "handles", "threads")
        held = [f"{result[name]['first']:,.0f} → {result[name]['last']:,.0f}" for name in names]
        rows.append([path.stem, f"{result['minutes']:g}", f"{result['env_steps']:,}", f"{result['updates']:,}",
                     str(result["evaluations"]), *held])  # fmt: skip
    heads = ["Device", "Minutes", "Env steps", "Updates", "Evaluations", "MiB", "MiB on the GPU", "Handles", "Threads"]
    return _table(heads, rows) if rows else "None is recorded yet: `make torture SOAK=60` makes one."


def side_by_side_table(path: Path) -> str:
    """The rows of benchmarks/ppo.py or benchmarks/dqn.py."""
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for row in result["rows"]:
        wall, cpu = row["wall"], row["cpu"]
        rates = [f"{wall['rl_lab']:,.0f}", f"{wall['sb3']:,.0f}", f"{wall['ratio']:.1f} ×"]
        rows.append([row["setting"], *rates, f"{cpu['ratio']:.1f} ×"])
    versions = f"Stable-Baselines3 {result['versions']['stable_baselines3']}, PyTorch {result['versions']['torch']}"
    note = f"{versions}, one thread, load {result['load_average']} on {result['cores']} cores."
    return _table(["Setting", "RL Lab, env steps/s", "SB3, env steps/s", "Wall", "CPU"], rows) + f"\n\n{note}"


def speed_table(folder: Path) -> str:
    """One row for each file that benchmarks/dreamer_v3_update.py wrote."""
    rows, notes = [], []
    for path in sorted(folder.glob("*.json"), key=_by_number):
        result = json.loads(path.read_text(encoding="utf-8"))
        if "ms_per_update" not in result:
            continue
        notes += [f"Size {result['size']}: {note}" for note in _notes(result)]
        batch, length = result["batch"]
        rows.append(
            [
                result["size"],
                result["observation"],
                f"{batch} × {length}",
                result["device"],
                f"{result['ms_per_update']:.1f} ms",
                f"{result['kernels_per_update']:,}" if "kernels_per_update" in result else "",
                f"{min(result['gpu_busy_share'], 1.0):.0%}" if "gpu_busy_share" in result else "",
                f"{result['warmup_s']:.0f} s",
                f"{result['act_ms_1']:.2f} / {result['act_ms_16']:.2f} ms" if "act_ms_16" in result else "",
                f"{result['peak_gpu_mb']:,.0f} MiB" if "peak_gpu_mb" in result else "",
            ]
        )
    if not rows:
        return "No speed is recorded yet."
    head = ["Size", "Observation", "Batch", "Device", "Update", "Kernels", "GPU busy", "Warm-up", "Act, 1 / 16 envs"]
    return "\n\n".join([_table([*head, "Peak GPU memory"], rows), *notes])


def planning_table(path: Path) -> str:
    """What benchmarks/tdmpc2_update.py wrote."""
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        ["Updates", f"{result['update_per_s']:,.0f} /s ({result['update_kernels']} kernels)"],
        ["Plans, 1 environment", f"{result['plan_per_s']:,.0f} /s ({result['plan_kernels']} kernels)"],
        ["One plan for 16 environments", f"{result['plan_16_envs_over_1']:.1f} × the time of one"],
        ["Decisions with an update each, 16 environments", f"{result['decisions_per_s_16_envs']:,.0f} /s"],
        ["Warm-up", f"{result['warmup_s']:.0f} s"],
    ]
    batch, length = result["batch"]
    title = f"Size {result['size']}, {batch} × {length} records, {result['precision']}, {result['device']}"
    return "\n\n".join([_table([title, ""], rows), *_notes(result)])


def cpu_table(path: Path) -> str:
    """What benchmarks/dreamer_v3_cpu.py wrote: milliseconds of wall time, and how many times as fast as sheeprl."""
    rows = []
    for row in _rows(path):
        sizes, peers = row["sizes"], ("dreamer_v3", "dreamer_v3_5")
        line = [f"{sizes['batch']} × {sizes['length']}", str(row["threads"]), f"{row['rl_lab']['ms']:.0f} ms"]
        for peer in peers:
            line.append(f"{row[peer]['ms']:.0f} ms (×{row[f'times_as_fast_as_{peer}']:.2f})")
        rows.append(line)
    head = ["Batch", "Threads", "RL Lab", "sheeprl `dreamer_v3`", "sheeprl `dreamer_v3_5`"]
    return _table(head, rows) if rows else "Not recorded yet."


def ablation_table(path: Path) -> str:
    """The figures of benchmarks/ablation.py: one turn of each experiment's loop, and the share that fast paths save."""
    rows = []
    for row in _rows(path):
        saved = [f"{name.removeprefix('without ')} {share:.0%}" for name, share in row["share"].items()]
        turn = f"{row['ms']['as it is']:.1f} ms"
        rows.append([f"`{row['overrides'][0]}`", row["device"], turn, "; ".join(saved) or "no kernel"])
    head = ["Experiment", "Device", "Turn of the loop", "Time saved by"]
    return _table(head, rows) if rows else "Not recorded yet."


def atari_table(path: Path) -> str:
    """What benchmarks/atari_throughput.py wrote."""
    if not path.exists():
        return "Not recorded yet."
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        [
            str(row["num_envs"]),
            "yes" if row["overlap"] else "no",
            row["backend"],
            f"{row['env_steps_per_s']:.0f}",
            f"{row['updates_per_s']:.1f}",
        ]
        for row in result["rows"]
    ]
    head = ["Environments", "Overlap", "Back end", "Env steps / s", "Updates / s"]
    return "\n\n".join([_table(head, rows), *_notes(result)])


def planners_table(path: Path) -> str:
    """What benchmarks/planners.py wrote: CPU milliseconds for a decision of one environment, and their share."""
    if not path.exists():
        return "Not recorded yet."
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for row in result["rows"]:
        own, alone, other = row["rl_lab"], row["rl_lab_one"], row["mbrl"]
        times = [f"{part['cpu_ms']:.2f} ms ({part['cpu_share']:.0%})" for part in (alone, own)]
        returns = [f"{part['return_mean']:.1f}" for part in (own, other)]
        rows.append([row["planner"], *returns, *times, f"{other['cpu_ms']:.2f} ms"])
    together = f"{result['environments_in_one_call']} in one call"
    head = ["", "Return", "mbrl-lib's return", "One environment", together, "mbrl-lib, one environment"]
    versions = f"mbrl-lib {result['versions']['mbrl']}, PyTorch {result['versions']['torch']}"
    machine = f"one thread, load {result['load_average']} on {result['cores']} cores"
    return _table(head, rows) + f"\n\n{result['episodes']} episodes, {versions}, {machine}."


def matrix_table(path: Path, environment: str) -> str:
    """What benchmarks/planner_matrix.py wrote of one environment: planners down, models across."""
    if not path.exists():
        return "Not recorded yet."
    result = json.loads(path.read_text(encoding="utf-8"))
    models = [model for model in result["models"] if model["environment"] == environment]
    cells = {(cell["planner"], cell["model"]): cell for cell in result["cells"] if cell["environment"] == environment}
    planners = list(dict.fromkeys(planner for planner, _ in cells))
    rows = [
        [_planner_name(planner), *(_cell(cells[planner, model["model"]]) for model in models)] for planner in planners
    ]
    return _table(["Planner", *(f"{model['model']}: `{model['experiment']}`" for model in models)], rows)


def optimum_table(path: Path) -> str:
    """What benchmarks/pendulum_optimum.py wrote: the mean over seeds, and each of them."""
    cells = {(row["horizon"], row["starts"]): row["returns"] for row in _rows(path)}
    starts = sorted({count for _, count in cells})
    rows = [
        [f"exact plans of {horizon} steps" if horizon else "the optimum"]
        + [f"{fmean(cells[horizon, count]):.1f} ({', '.join(map(str, cells[horizon, count]))})" for count in starts]
        for horizon in dict.fromkeys(horizon for horizon, _ in cells)
    ]
    return _table(["", *(f"{count} starts a seed, mean (seeds 0, 1, 2)" for count in starts)], rows)


def _planner_name(planner: str) -> str:
    return f"`{planner}`" if planner.isidentifier() else planner


def _cell(cell: dict[str, Any]) -> str:
    """A score and its deviation over episodes, or why there is none."""
    if "reason" in cell:
        return cell["reason"].removeprefix("controllers.planner: ")
    return f"{cell['return_mean']:.1f} ± {cell['return_std']:.0f}"


def _notes(result: dict[str, Any]) -> list[str]:
    """What a reader must know of how it was measured."""
    return [result["note"]] if "note" in result else []


def _rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def _by_number(path: Path) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.stem)]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
