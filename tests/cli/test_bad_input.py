"""Bad input: one clear line on stderr that names the place, an exit code above 0, no traceback, nothing left behind."""

from __future__ import annotations

import errno
import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

Command = Callable[..., tuple[int, str, str]]
BASE = ("train", "environment.id=CartPole-v1", "logging.console=off", "training.total_timesteps=40")
RANDOM = (*BASE, "+experiment=random")
PHASE = "name: a, type: online, duration_steps: 40"


def phases(*entries: str) -> str:
    return f"training.phases=[{','.join('{' + entry + '}' for entry in entries)}]"


BAD_TRAINING = {
    "missing experiment": (
        ["+experiment=dreamer_v3_cartpol"],
        ["experiment=dreamer_v3_cartpol", "dreamer_v3_cartpole"],
    ),
    "two experiments": (["+experiment=dreamer_v3"], ["one experiment"]),
    "no override": (["dreamer_v3"], ["'dreamer_v3'", "+experiment=dreamer_v3"]),
    "broken override": (["environment.id=[a"], ["environment.id=[a", "key=value"]),
    "list without -m": (["experiment.seed=0,1"], ["experiment.seed=0,1", "-m"]),
    "unknown section": (["trainnig.compile=off"], ["'trainnig'", "'training'"]),
    "misspelt setting": (["training.total_timestep=5"], ["training.total_timestep", "'total_timesteps'"]),
    "misspelt environment setting": (["environment.num_env=2"], ["environment.num_env", "'num_envs'"]),
    "misspelt workflow setting": (["workflow.batch_siz=2"], ["workflow.batch_siz", "'batch_size'"]),
    "misspelt data source setting": (["data_sources.replay.capacty=9"], ["data_sources.replay.capacty", "'capacity'"]),
    "misspelt value": (["environment.backend=proces"], ["environment.backend", "'process'"]),
    "misspelt choice": (["training.on_nonfinite=skipp"], ["training.on_nonfinite", "'skip'"]),
    "misspelt group option": (["environment=atary"], ["environment=atary", "'atari'"]),
    "first letters of a section": (["env=CartPole-v1"], ["'env'", "'environment'"]),
    "environment for its group": (["environment=CartPole-v1"], ["environment.id=CartPole-v1"]),
    "word that is no experiment": (["resume"], ["'resume'", "training.resume_path=RUN"]),
    "misspelt experiment without its key": (["dreamer_v3_cartpol"], ["+experiment=dreamer_v3_cartpole"]),
    "misspelt device": (["experiment.device=cude"], ["experiment.device=cude", "'cuda'"]),
    "name that leads out": (["experiment.name=../../x"], ["experiment.name='../../x'", "run_root"]),
    "name that is a path": (["experiment.name=/tmp/x"], ["experiment.name='/tmp/x'", "run_root"]),
    "best by a metric that no evaluation reports": (
        ["checkpoint.best=eval/retrun_mean"],
        ["checkpoint.best", "eval/retrun_mean", "'eval/return_mean'"],
    ),
    "runs below a file": (["run_root=/dev/null"], ["run_root=/dev/null", "cannot be made"]),
    "number for a group": (["environment=7"], ["environment=7", "there is no such environment"]),
    "nothing for a group": (["workflow=null"], ["workflow=null", "there is no such workflow"]),
    "text for arguments": (['environment.kwargs="1"'], ["environment.kwargs", "mapping", "'1'"]),
    "name of itself": (["experiment.name=${experiment.name}"], ["experiment.name", "nterpolation"]),
    "target that is a function of the system": (["workflow._target_=os.system"], ["workflow._target_=os.system"]),
    "target that is a number": (["workflow._target_=math.pi"], ["workflow._target_=math.pi", "neither a class"]),
    "target that is no component": (["components={x: {_target_: collections.Counter}}"], ["components.x", "Counter"]),
    "empty phase name": ([phases("name: '', duration_steps: 9")], ["training.phases[0].name", "not empty"]),
    "metric that nothing writes": (
        [phases("name: a, until: {metric: nothing/here, at_least: 3}")],
        ["training.phases[0].until.metric", "nothing/here", "nothing writes"],
    ),
    "misspelt metric": (
        [phases("name: a, workflow_hooks: [collect, evaluate], until: {metric: eval/return_men, at_least: 3}")],
        ["until.metric", "'eval/return_mean'"],
    ),
    "infinite number": (["environment.worker_timeout=inf"], ["environment.worker_timeout", "above 0"]),
    "gpu": (["experiment.device=gpu"], ["experiment.device=gpu", "'cuda'"]),
    "setting without its section": (["total_timesteps=5"], ["total_timesteps", "training.total_timesteps"]),
    "zero budget": (["training.total_timesteps=0"], ["training.total_timesteps", "at least 1", "0"]),
    "negative seed": (["experiment.seed=-1"], ["experiment.seed", "at least 0", "-1"]),
    "negative hyper-parameter": (["workflow.batch_size=-4"], ["workflow.batch_size", "-4"]),
    "text for a number": (["evaluation.episodes=many"], ["evaluation.episodes", "whole number", "many"]),
    "best of nothing": (["evaluation.select=best"], ["evaluation.select", "checkpoint.best"]),
    "scalar for a section": (["training=3"], ["training", "mapping"]),
    "size without presets": (["size=1m"], ["size", "presets"]),
    "unknown target": (["workflow._target_=rl_lab.workflows.random.RandomWorkflo"], ["_target_", "'RandomWorkflow'"]),
    "unknown module": (["workflow._target_=rl_lab.workflow.Random"], ["workflow._target_", "cannot be imported"]),
    "broken interpolation": (["environment.num_envs=${nowhere.to}"], ["environment.num_envs", "nowhere.to"]),
    "wrong shape": (["_dims.action_size=7"], ["_dims.action_size", "7", "2", "CartPole-v1"]),
    "unknown observation key": (["_dims.observation.vecto.shape=[4]"], ["_dims.observation.vecto", "'vector'"]),
    "unknown environment": (["environment.id=CartPoole-v1"], ["CartPoole-v1", "CartPole"]),
    "unknown phase type": (
        [phases("name: a, type: onlin, duration_steps: 9")],
        ["training.phases[0].type", "'online'"],
    ),
    "unknown hook": (
        [phases(f"{PHASE}, workflow_hooks: [collect, evaluat]")],
        ["training.phases[0].workflow_hooks[1]", "'evaluate'"],
    ),
    "unknown phase key": ([phases(f"{PHASE}, workflow_hook: [collect]")], ["workflow_hook", "'workflow_hooks'"]),
    "zero duration": ([phases("name: a, duration_steps: 0")], ["training.phases[0].duration_steps", "above 0"]),
    "negative duration": ([phases("name: a, duration: -5")], ["training.phases[0].duration", "above 0"]),
    "ratio on collect": (
        [phases(f"{PHASE}, workflow_hooks: [{{collect: {{ratio: 0.5}}}}]")],
        ["workflow_hooks[0]", "ratio", "update hooks"],
    ),
    "source that no phase fills": (
        [phases("name: a, type: offline, duration_updates: 5, workflow_hooks: [update]")],
        ["training.phases[0]", "'replay'", "no phase fills"],
    ),
    "unknown data source": (
        [phases(f"{PHASE}, data_source: reply, workflow_hooks: [collect]")],
        ["data_source", "'replay'"],
    ),
}


def check(result: tuple[int, str, str], *words: str) -> str:
    code, _, errors = result
    assert code == 2, errors
    assert errors.startswith("rl-lab: ")
    assert len(errors.strip().splitlines()) == 1, errors
    assert "Traceback" not in errors
    for word in words:
        assert word in errors
    return errors


@pytest.mark.parametrize("name", BAD_TRAINING)
def test_a_wrong_configuration_stops_before_the_first_step(rl_lab: Command, tmp_path: Path, name: str) -> None:
    """The message names the place and the nearest valid name, and no run directory is left behind."""
    overrides, words = BAD_TRAINING[name]
    base = BASE if name == "missing experiment" else RANDOM
    check(rl_lab(*base, *overrides), *words)
    assert not list(tmp_path.glob("experiments/*/*"))


def test_a_size_that_does_not_exist(rl_lab: Command) -> None:
    """The presets are the valid sizes."""
    check(rl_lab("train", "size=12mm"), "size=12mm", "'12m'")


def test_a_gpu_that_is_not_there(rl_lab: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """experiment.device=cuda says why it cannot be and what to use instead."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check(rl_lab(*RANDOM, "experiment.device=cuda"), "experiment.device=cuda", "experiment.device=cpu")


def test_sizes_that_do_not_fit_each_other(rl_lab: Command, tmp_path: Path) -> None:
    """A typed size that contradicts the environment is found before the first step."""
    arguments = ["train", "components.rssm.embed_size=5", "logging.console=off"]
    check(rl_lab(*arguments), "do not fit", "vector [4]")
    assert not list(tmp_path.glob("experiments/*/*"))


def test_an_extra_that_is_not_installed(rl_lab: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says which extra to install."""
    from rl_lab.environments.families import Family

    monkeypatch.setattr(Family, "missing", lambda self: self.modules)
    check(rl_lab(*RANDOM, "environment.id=ALE/Pong-v5"), "ALE/Pong-v5", "rl-lab[atari]")


def test_a_replay_that_cannot_fit(rl_lab: Command, tmp_path: Path) -> None:
    """More records than there is memory for are refused at once."""
    check(rl_lab(*RANDOM, "data_sources.replay.capacity=100_000_000_000"), "data_sources.replay", "RAM")
    assert not list(tmp_path.glob("experiments/*/*"))


@pytest.mark.parametrize("command", [["eval"], ["imagine"], ["compare"], ["train"]])
def test_a_run_that_does_not_exist(rl_lab: Command, command: list[str]) -> None:
    """Every command that takes a RUN names it."""
    argument = "training.resume_path=no-such-run" if command == ["train"] else "no-such-run"
    check(rl_lab(*command, argument), "no-such-run")


def copy(run: Path, tmp_path: Path) -> Path:
    target = tmp_path / "experiments" / run.parent.name / run.name
    shutil.copytree(run, target, symlinks=True)
    return target


def checkpoint_of(run: Path) -> Path:
    return (run / "checkpoints" / "latest").resolve()


@pytest.mark.parametrize("file", ["agent.pt", "training.pt"])
def test_a_truncated_checkpoint(rl_lab: Command, random_run: Path, tmp_path: Path, file: str) -> None:
    """Resuming names the damaged file; the run itself is left as it was."""
    run = copy(random_run, tmp_path)
    path = checkpoint_of(run) / file
    path.write_bytes(path.read_bytes()[:-20])
    before = (run / "metrics.jsonl").read_bytes()
    check(rl_lab("train", f"training.resume_path={run}"), file, "truncated")
    assert (run / "metrics.jsonl").read_bytes() == before


def _edit_manifest(run: Path, **values: object) -> None:
    path = checkpoint_of(run) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_checkpoint_of_another_workflow(rl_lab: Command, random_run: Path, tmp_path: Path) -> None:
    """The message names both workflows."""
    run = copy(random_run, tmp_path)
    _edit_manifest(run, workflow="dreamer_v3")
    check(rl_lab("train", f"training.resume_path={run}"), "dreamer_v3", "random")


def test_a_checkpoint_of_a_newer_version(rl_lab: Command, random_run: Path, tmp_path: Path) -> None:
    """The message says to update."""
    run = copy(random_run, tmp_path)
    _edit_manifest(run, version=999)
    check(rl_lab("eval", run), "version 999", "Update")


@pytest.mark.parametrize(
    ("key", "value"),
    [("version", None), ("version", "x"), ("workflow", None), ("files", None), ("files", [1]), ("step", None)],
)
def test_a_manifest_with_odd_values(rl_lab: Command, random_run: Path, tmp_path: Path, key: str, value: object) -> None:
    """Whatever is missing in it or of another kind, acting and going on are refused in one line."""
    run = copy(random_run, tmp_path)
    _edit_manifest(run, **{key: value})
    check(rl_lab("eval", run), "manifest.json is damaged", f"'{key}'")
    check(rl_lab("train", f"training.resume_path={run}"), "manifest.json is damaged", f"'{key}'")


@pytest.mark.parametrize("value", [torch.zeros(3), [1], {}, {"components": 3}, {"components": {}, "controllers": {}}])
def test_an_agent_of_another_kind(rl_lab: Command, random_run: Path, tmp_path: Path, value: object) -> None:
    """A file that torch can read and its manifest vouches for, but that holds no agent."""
    run = copy(random_run, tmp_path)
    path = checkpoint_of(run) / "agent.pt"
    torch.save(value, path)
    manifest = json.loads((path.parent / "manifest.json").read_text())
    manifest["files"]["agent.pt"] = {"bytes": path.stat().st_size, "crc32": f"{zlib.crc32(path.read_bytes()):08x}"}
    (path.parent / "manifest.json").write_text(json.dumps(manifest))
    check(rl_lab("eval", run), "agent.pt is not what a checkpoint holds")
    check(rl_lab("train", f"training.resume_path={run}"), "agent.pt is not what a checkpoint holds")


@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe", b"- a", b"a: [1]", b"{" * 3000], ids=range(5))
def test_a_configuration_that_is_none(rl_lab: Command, random_run: Path, tmp_path: Path, content: bytes) -> None:
    """Empty, binary, a list, something else: one line, with and without trust."""
    run = copy(random_run, tmp_path)
    (run / "config.yaml").write_bytes(content)
    check(rl_lab("eval", run, "--trust"), "config.yaml")
    (run / "manifest.json").unlink()
    check(rl_lab("eval", run), "config.yaml")


@pytest.mark.parametrize("content", ["[]", "7", '{"status": 4, "start": [1], "resumed": "x", "argv": 7}', "\x00"])
def test_odd_values_in_run_json(rl_lab: Command, random_run: Path, tmp_path: Path, content: str) -> None:
    """Nothing there decides anything: every command works, and going on writes it anew."""
    run = copy(random_run, tmp_path)
    (run / "run.json").write_text(content)
    assert rl_lab("eval", run)[0] == 0
    assert rl_lab("compare", run, "--out", tmp_path / "comparison")[0] == 0
    assert rl_lab("train", f"training.resume_path={run}", "training.total_timesteps=88", "logging.console=off")[0] == 0
    assert json.loads((run / "run.json").read_text())["status"] == "completed"


def test_an_infinite_learning_rate(rl_lab: Command) -> None:
    """Numbers are finite, wherever a part declares them."""
    check(rl_lab("train", "+experiment=dqn_cartpole", "optimizers.main.lr=inf"), "lr", "finite", "inf")


def test_a_checkpoint_that_does_not_exist(rl_lab: Command, random_run: Path) -> None:
    """A path into checkpoints/ is taken as a checkpoint."""
    check(rl_lab("train", f"training.resume_path={random_run}/checkpoints/step-9"), "step-9")


def test_a_full_disk_while_checkpointing(
    rl_lab: Command, random_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint stays whole and the message says how to go on."""
    from rl_lab.orchestration import checkpoint as module

    run = copy(random_run, tmp_path)
    kept = checkpoint_of(run)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_save", full)
    result = rl_lab("train", f"training.resume_path={run}", "training.total_timesteps=160", "checkpoint.every=40")
    check(result, "No space left on device", "training.resume_path")
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert checkpoint_of(run) == kept
    assert rl_lab("train", f"training.resume_path={run}", "training.total_timesteps=160", "logging.console=off")[0] == 0


@pytest.mark.parametrize("override", ["workflow.batch_size=4", "+experiment=dreamer_v3", "environment.num_envs=2"])
def test_an_override_that_is_not_safe_on_resume(rl_lab: Command, random_run: Path, override: str) -> None:
    """A run goes on with its own configuration; what cannot be changed is named."""
    key = override.lstrip("+").partition("=")[0]
    check(rl_lab("train", f"training.resume_path={random_run}", override), key, "total_timesteps")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["'trian'", "'train'"]),
        (["list", "experimnts"], ["experimnts", "'experiments'"]),
        (["reproduce", "dreamer_v4"], ["dreamer_v4", "dreamer_v3"]),
        (["reproduce", "random", "--seeds", "4-0"], ["--seeds 4-0", "0-4"]),
        (["train", "--config-dir", "nowhere"], ["nowhere"]),
        (["imagine", "RANDOM_RUN"], ["random", "no model to imagine"]),
    ],
)
def test_wrong_arguments(rl_lab: Command, random_run: Path, arguments: list[str], words: list[str]) -> None:
    """Commands, kinds, experiments and seeds get the same treatment as settings."""
    check(rl_lab(*(str(random_run) if word == "RANDOM_RUN" else word for word in arguments)), *words)


def test_a_run_that_is_not_named(rl_lab: Command) -> None:
    """The message names the missing argument, and not the optional ones."""
    _, _, errors = rl_lab("eval")
    assert "required: RUN" in errors
    assert "key=value" not in errors.splitlines()[-1]


def test_an_option_that_does_not_exist(rl_lab: Command) -> None:
    """argparse's own message is short enough."""
    code, _, errors = rl_lab("eval", "latest", "--episodes", "0")
    assert code == 2
    assert "--episodes" in errors
    assert "Traceback" not in errors


def test_a_defect_leaves_its_traceback_in_a_file(
    rl_lab: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected error is one line on the screen, with the file that holds the rest in the run directory."""
    from rl_lab.workflows.random import RandomWorkflow

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(RandomWorkflow, "collect_step", broken)
    code, _, errors = rl_lab(*RANDOM)
    assert code == 1
    assert len(errors.strip().splitlines()) == 1
    file = next(tmp_path.glob("experiments/random/*/error.txt"))
    assert str(file.relative_to(tmp_path)) in errors
    assert "ZeroDivisionError: on purpose" in file.read_text()


def test_an_error_does_not_steer_the_terminal(rl_lab: Command) -> None:
    """It may quote what anybody wrote into a file."""
    code, _, errors = rl_lab("eval", "\x1b]0;title\x07")
    assert code == 2
    assert "\x1b" not in errors
    assert "\\x1b]0;title\\x07" in errors
