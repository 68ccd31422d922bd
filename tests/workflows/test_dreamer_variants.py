"""Every Dreamer with another world model in one line: the transformer, and a contrastive loss for the decoder."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rl_lab.experiment.config import compose, resolve
from rl_lab.experiment.dims import dims_of
from rl_lab.experiment.model import build_model
from rl_lab.experiment.parts import build_optimizers
from rl_lab.records import SequenceBatch
from rl_lab.specs import ActionSpec, ObservationSpec
from rl_lab.workflows.context import PhaseView, WorkflowContext
from rl_lab.workflows.dreamer import Dreamer

OBSERVATION = {"vector": ObservationSpec("vector", (4,), "float32")}
ACTIONS = {"discrete": ActionSpec("discrete", (1,), (3,)), "continuous": ActionSpec("continuous", (2,))}
TRANSFORMER = "components/world_models@components.rssm=transformer"
CONTRASTIVE = "components/decoders@components.decoder=contrastive"
EXPERIMENTS = ["dreamer_v1", "dreamer_v2", "dreamer_v3"]
CASES = [*((name, "continuous") for name in EXPERIMENTS), ("dreamer_v2", "discrete"), ("dreamer_v3", "discrete")]


def make_workflow(
    experiment: str, *overrides: str, action: str = "discrete", device: str = "cpu", compile_: bool = False
) -> Dreamer:
    """As a run would build it, from the configuration."""
    small = ["size=tiny", "workflow.batch_size=3", "workflow.sequence_length=6", "workflow.horizon=4"]
    config = compose([f"+experiment={experiment}", *small, *overrides])
    config._dims = dims_of(OBSERVATION, ACTIONS[action])
    resolved = resolve(config)
    torch.manual_seed(0)
    model = build_model(resolved, torch.device(device))
    context = WorkflowContext(
        config={}, device=torch.device(device), seed=0, observation_spec=OBSERVATION, action_spec=ACTIONS[action],
        components=model.components, controllers=model.controllers,
        optimizers=build_optimizers(resolved, model.builder, model.modules), compile=compile_,
    )  # fmt: skip
    model.workflow.initialize(context)
    assert isinstance(model.workflow, Dreamer)
    return model.workflow


def make_batch(workflow: Dreamer) -> SequenceBatch:
    """Random records, the second sequence with an episode's end in the middle."""
    spec = workflow.batch_spec()
    lead = (spec.batch_size, spec.sequence_length + spec.context)
    generator = torch.Generator().manual_seed(1)
    if workflow.context.action_spec.kind == "discrete":
        action = torch.randint(0, 3, (*lead, 1), generator=generator, dtype=torch.int32)
    else:
        action = torch.rand(*lead, 2, generator=generator) * 2.0 - 1.0
    flags = {name: torch.zeros(lead, dtype=torch.bool) for name in ("is_first", "is_last", "is_terminal")}
    flags["is_last"][1, 3] = flags["is_terminal"][1, 3] = flags["is_first"][1, 4] = True
    extras = {
        name: torch.zeros(*lead, *field.shape, dtype=getattr(torch, field.dtype))
        for name, field in workflow.latent_specs.items()
    }
    vector, reward = torch.randn(*lead, 4, generator=generator), torch.randn(lead, generator=generator)
    device = workflow.context.device
    return SequenceBatch(
        observation={"vector": vector.to(device)}, action=action.to(device), reward=reward.to(device),
        **{name: value.to(device) for name, value in flags.items()},
        extras={name: value.to(device) for name, value in extras.items()},
    )  # fmt: skip


def parameters_of(workflow: Dreamer) -> dict[str, Tensor]:
    parts = {**workflow.context.components, **dict(workflow.context.controllers.items())}
    return {
        f"{name}.{key}": value.detach().clone()
        for name, part in parts.items()
        if isinstance(part, nn.Module)
        for key, value in part.named_parameters()
    }


def update(workflow: Dreamer, times: int = 2) -> dict[str, float]:
    torch.manual_seed(2)
    batch = make_batch(workflow)
    for _ in range(times):
        metrics = workflow.update(batch, phase=PhaseView("train", "online"))
    return {name: float(value) for name, value in dict(metrics).items()}


@pytest.mark.parametrize(
    ("experiment", "action"),
    [
        ("dreamer_v1", "continuous"),
        ("dreamer_v2", "discrete"),
        ("dreamer_v2", "continuous"),
        ("dreamer_v3", "discrete"),
    ],
)
def test_every_dreamer_learns_with_a_transformer(experiment, action):
    """One line in YAML. Policy and dreams included: gradients through the dreams pass the attention as well."""
    workflow = make_workflow(experiment, TRANSFORMER, action=action)
    before = parameters_of(workflow)
    metrics = update(workflow)
    assert all(value == value for value in metrics.values())
    moved = {name for name, value in parameters_of(workflow).items() if not torch.equal(value, before[name])}
    for part in ("rssm.blocks.0.", "rssm.distance_bias", "rssm.token.", "encoder.", "policy.", "critic."):
        assert any(name.startswith(part) for name in moved), part


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_probe_does_not_touch_what_it_watches(experiment):
    """Without a decoder no part of the agent learns from the probe: with a probe that learns and with one that does
    not, everything else is the same after some updates."""
    results = []
    for scale in (0.0, 0.01):
        workflow = make_workflow(experiment, CONTRASTIVE, f"+workflow.loss_scales.probe={scale}", action="continuous")
        metrics = update(workflow)
        assert metrics["loss/probe"] == pytest.approx(metrics["probe/vector"])
        results.append(parameters_of(workflow))
    still, learning = results
    differ = {name for name in still if not torch.equal(still[name], learning[name])}
    assert any(name.startswith("decoder.probe.") for name in differ)
    assert not any(not name.startswith("decoder.probe.") for name in differ), sorted(differ)[:5]


def test_states_learn_from_the_contrast():
    """In place of the decoder's, the contrastive loss reaches encoder and world model."""
    workflow = make_workflow("dreamer_v3", CONTRASTIVE)
    losses = workflow.batch_losses(make_batch(workflow))
    losses["observation"].backward()
    for part in (workflow.encoder, workflow.rssm):
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in part.parameters())
    assert all(p.grad is None for p in workflow.decoder.probe.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("variant", [TRANSFORMER, CONTRASTIVE])
def test_captured_updates_equal_plain_ones(variant):
    """Three updates in float32 from the same random stream, as one CUDA graph of compiled pieces and step by step."""
    histories = []
    for compile_ in (False, True):
        workflow = make_workflow("dreamer_v3", variant, device="cuda", compile_=compile_)
        batch = make_batch(workflow)
        torch.cuda.manual_seed(0)
        phase = PhaseView("train", "online")
        histories.append([workflow.update(batch, phase=phase).values_vector.clone() for _ in range(3)])
    for plain, captured in zip(*histories, strict=True):
        torch.testing.assert_close(captured, plain, rtol=1e-3, atol=1e-3)
