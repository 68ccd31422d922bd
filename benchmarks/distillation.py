"""The planner of `distill_mpc_pendulum` beside the policy that it was distilled into: returns and decisions per second.

    rl-lab reproduce distill_mpc_pendulum --seeds 0-2
    python benchmarks/distillation.py

Takes the newest finished run of each seed. Both play the same fresh episodes, those of `rl-lab reproduce`.
Decisions are timed for one environment, on the observations of one episode. Writes
results/speed/distill_mpc_pendulum.json.
"""

from __future__ import annotations

import argparse
import platform
import time
from typing import Any

import numpy as np
from measuring import device_name, write_record

from rl_lab.components.acting import Acts
from rl_lab.environments import make_vector_env
from rl_lab.experiment.agent import load_run
from rl_lab.experiment.device import set_threads
from rl_lab.experiment.evaluate import AGENT, evaluate_run
from rl_lab.orchestration.run_directory import RunDirectory, list_runs
from rl_lab.records import Observation

EXPERIMENT = "distill_mpc_pendulum"
POLICY = "distill_target"
ROUNDS = 5  # planner and policy take turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-root", default="experiments")
    parser.add_argument("--episodes", type=int, default=100)
    options = parser.parse_args()
    finished = [run for run in list_runs(options.run_root) if run.info().get("status") == "completed"]
    named = [run for run in finished if run.path.parent.name == EXPERIMENT]
    runs = {load_run(run.path).settings.experiment.seed: run for run in named}  # the newest of each
    rows = [{"seed": seed, **compare(runs[seed], options.episodes)} for seed in sorted(runs)]
    for row in rows:
        print(row)
    record = {"device": device_name(), "machine": platform.machine(), "threads": 1, "episodes": options.episodes}
    write_record(EXPERIMENT, {**record, "rows": rows})


def compare(run: RunDirectory, episodes: int) -> dict[str, float]:
    """Returns of both, and how many times as many decisions per second the policy makes."""
    planner = evaluate_run(run.path, episodes=episodes, controller=AGENT).result
    policy = evaluate_run(run.path, episodes=episodes, controller=POLICY).result
    workflow = load_run(run.path).workflow
    set_threads(1, workflow.context.device)
    cloned: Any = workflow.context.controllers.acting(POLICY)
    seen = observations(run)
    rates = [(decisions_per_second(workflow, seen), decisions_per_second(cloned, seen)) for _ in range(ROUNDS)]
    slow, fast = (float(np.median(part)) for part in zip(*rates, strict=True))
    return {
        "planner_return": planner.return_mean, "policy_return": policy.return_mean,
        "planner_decisions_per_s": round(slow, 1), "policy_decisions_per_s": round(fast, 1),
        "times_as_fast": round(fast / slow, 1),
    }  # fmt: skip


def observations(run: RunDirectory) -> list[Observation]:
    """Those of 100 decisions of the policy in one environment."""
    loaded = load_run(run.path)
    policy: Any = loaded.workflow.context.controllers.acting(POLICY)
    envs = make_vector_env(loaded.settings.environment, seed=0, stream="final", num_envs=1)
    step, state, seen = envs.reset(), policy.initial_state(1), []
    for _ in range(100):
        seen.append({key: value.copy() for key, value in step.observation.items()})
        action, state = policy.act(step.observation, state)
        step = envs.step(action)
    envs.close()
    return seen


def decisions_per_second(actor: Acts, seen: list[Observation]) -> float:
    """By the processor time of this process, so that others on the machine do not count."""
    state = actor.initial_state(1)
    started = time.process_time()
    for observation in seen:
        _, state = actor.act(observation, state, mode="eval")
    return len(seen) / (time.process_time() - started)


if __name__ == "__main__":
    main()
