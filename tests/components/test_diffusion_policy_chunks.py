"""Diffusion Policy: sizes of the paper, chunks and their alignment, memory while acting, windows at episode ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tests.packaged import packaged

from rl_lab.components.actors.diffusion_policy import DiffusionPolicy, within_episode
from rl_lab.components.diffusion import make_denoiser
from rl_lab.components.diffusion.observation_features import ObservationFeatures
from rl_lab.components.encoders.resnet18 import KeypointResNet, SpatialSoftmax
from rl_lab.components.planners.diffusion import DiffusionPlanner
from rl_lab.datasets.statistics import FieldStatistics
from rl_lab.errors import ConfigError, DataError
from rl_lab.nn.normalizers import LimitsNormalizer
from rl_lab.nn.optimizers import warmup_cosine
from rl_lab.records import SequenceBatch
from rl_lab.specs import ActionSpec, ObservationSpec

CONTINUOUS = ActionSpec("continuous", (2,))
VECTOR = {"vector": ObservationSpec("vector", (3,), "float32")}
PACKAGED = packaged("controllers/diffusion_policies/unet")
TINY = {
    "unet": {"widths": [8, 16], "level_embedding": 8, "groups": 4},
    "transformer": {"width": 8, "layers": 1, "heads": 2},
    "mlp": {"units": 16, "layers": 1, "level_embedding": 8},
}


def policy(*, observation: Mapping[str, ObservationSpec] = VECTOR, action: ActionSpec = CONTINUOUS, **changes: Any):
    settings = {**PACKAGED, **TINY, "network": "mlp", "levels": 4, "observation": observation, "action": action}
    return DiffusionPolicy(**{**settings, **changes})


def batch_of(
    observation: torch.Tensor, action: torch.Tensor, *, first: list[int] = (), last: list[int] = ()
) -> SequenceBatch:
    """One sequence; `first` and `last` are the places of an episode's ends."""
    length = action.shape[1]
    flags = [torch.zeros(1, length, dtype=torch.bool) for _ in range(2)]
    flags[0][0, list(first)], flags[1][0, list(last)] = True, True
    return SequenceBatch({"vector": observation}, action, torch.zeros(1, length), *flags, flags[1])


@pytest.mark.parametrize(("network", "expected"), [("unet", 65_783_298), ("transformer", 8_965_122)])
def test_the_paper_s_sizes_on_push_t(network: str, expected: int) -> None:
    """20 numbers are seen, twice; the published count of the U-Net."""
    seen = {"vector": ObservationSpec("vector", (20,), "float32")}
    with torch.device("meta"):
        features = ObservationFeatures(observation=seen, crop=None, keypoints=32, features=64, base=64)
        built = make_denoiser(
            network, dim=2, horizon=16, condition=2 * features.output_size, condition_tokens=2, **PACKAGED[network]
        )
    assert sum(value.numel() for value in built.parameters()) == expected


@pytest.mark.parametrize(
    ("network", "prediction"), [("unet", "x0"), ("transformer", "x0"), ("mlp", "epsilon"), ("mlp", "v")]
)
def test_a_chunk_is_learned_by_heart(network: str, prediction: str) -> None:
    """One window again and again: what is drawn then is its actions, from the present on."""
    torch.manual_seed(0)
    learner = policy(network=network, prediction=prediction, prediction_horizon=4, action_horizon=2, max_decay=0.9)
    optimizer = torch.optim.Adam([p for p in learner.parameters() if p.requires_grad], lr=1e-2)
    action = torch.tensor([[[0.5, -0.5], [-0.25, 0.75], [0.0, 0.25], [0.75, -0.75]]])
    no = torch.zeros(32, 4, dtype=torch.bool)
    data = SequenceBatch({"vector": torch.zeros(32, 4, 3)}, action.expand(32, -1, -1), torch.zeros(32, 4), no, no, no)
    for _ in range(60 if prediction == "x0" else 150):
        loss, _ = learner.loss(data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.after_update()
    state, chosen = learner.initial_state(1), []
    for _ in range(2):
        taken, state = learner.act({"vector": np.zeros((1, 3), np.float32)}, state)
        chosen.append(taken[0])
    np.testing.assert_allclose(chosen, action[0, 1:3].numpy(), atol=0.25)


def test_a_chunk_is_carried_out_from_the_present_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indices To - 1 to To - 2 + Ta of it; then a new one, given the newest observations, oldest first. Environments
    go their own ways: one that starts anew fills its history with its first observation."""
    actor, asked = policy(prediction_horizon=8, action_horizon=3), []

    def draw(history: Mapping[str, torch.Tensor]) -> torch.Tensor:
        asked.append(history["vector"][..., 0].tolist())
        count = float(len(asked)) / 10
        return (count + torch.arange(8.0) / 100).view(1, 8, 1).expand(len(history["vector"]), 8, 2)

    monkeypatch.setattr(actor, "draw", draw)
    state, chosen = actor.initial_state(2), []
    for time in range(5):
        state = actor.reset_state(state, np.array([time == 0, time in (0, 2)]))
        seen = np.array([[time, 0, 0], [time + 10, 0, 0]], np.float32)
        action, state = actor.act({"vector": seen}, state)
        chosen.append((100 * action[:, 0]).round().tolist())
    assert asked == [[[0.0, 0.0], [10.0, 10.0]], [[12.0, 12.0]], [[2.0, 3.0]]]
    assert chosen == [[11, 11], [12, 12], [13, 21], [31, 22], [32, 23]]


def test_no_chunk_crosses_an_episode_s_end() -> None:
    """Beyond the last decision stands the last decision, before the first record the first one."""
    flags = torch.zeros(4, 6, dtype=torch.bool)
    first, last = flags.clone(), flags.clone()
    first[0, 1] = True  # the episode of the present begins at 1
    last[1, 3] = True  # its last record, without an action, is 3
    first[2, 4] = True  # another one begins at 4, and its end was left out of the data
    last[3, 1] = True  # the present has no action
    rows, taken = within_episode(first, last, now=1)
    assert rows.tolist()[:3] == [[1, 1, 2, 3, 4, 5], [0, 1, 2, 2, 2, 2], [0, 1, 2, 3, 3, 3]]
    assert taken.tolist() == [True, True, True, False]


def test_a_batch_teaches_only_its_present_episode() -> None:
    """Records of other episodes in the same window do not change the loss."""
    learner = policy(prediction_horizon=6, action_horizon=2)
    observation, action = torch.randn(1, 6, 3), torch.rand(1, 6, 2)
    chunks = learner.chunks(batch_of(observation, action, first=[0, 4], last=[3]))
    torch.testing.assert_close(chunks.action[0], action[0, [0, 1, 2, 2, 2, 2]])
    torch.testing.assert_close(chunks.observation["vector"][0], observation[0, :2])
    loss, _ = learner.loss(batch_of(observation, action, last=[1]))
    assert loss.item() == 0.0


def test_limits_are_those_of_the_data_and_belong_to_the_policy() -> None:
    """Observations and actions are brought to [-1, 1]; the averaged weights that act see the same limits."""
    learner = policy(prediction_horizon=8, action_horizon=4)
    low, high = np.array([0.0, -10.0, 4.0]), np.array([2.0, 10.0, 4.0])
    statistics = {
        "observation.vector": FieldStatistics(low, low, low, high, 5),
        "action": FieldStatistics(np.zeros(2), np.zeros(2), np.array([-0.5, 0.0]), np.array([0.5, 1.0]), 5),
    }
    learner.use_statistics(statistics)
    seen = {"vector": torch.tensor([[[2.0, 0.0, 4.0]]])}
    for model in (learner.model, learner.average.model):
        torch.testing.assert_close(model.features(seen), torch.tensor([[[1.0, 0.0, 0.0]]]))
    torch.testing.assert_close(learner.actions_of(torch.tensor([[1.0, -1.0]])), torch.tensor([[0.5, 0.0]]))
    other = policy(prediction_horizon=8, action_horizon=4)
    other.load_state_dict(learner.state_dict())
    torch.testing.assert_close(other.average.model.features(seen), torch.tensor([[[1.0, 0.0, 0.0]]]))


def test_limits_grow_where_there_is_no_dataset() -> None:
    """Beside a workflow with a replay; actions are the agent's, within [-1, 1]."""
    limits = LimitsNormalizer((1,))
    for value in (3.0, 5.0, 1.0):
        limits.update(torch.tensor([[value]]))
    assert (limits.low.item(), limits.high.item()) == (1.0, 5.0)
    torch.testing.assert_close(limits.inverse(limits(torch.tensor([2.5]))), torch.tensor([2.5]))


def test_discrete_actions_are_one_hots() -> None:
    actor = policy(action=ActionSpec("discrete", (2,), (3, 2)), prediction_horizon=8, action_horizon=2)
    action, _ = actor.act({"vector": np.zeros((4, 3), np.float32)}, actor.initial_state(4))
    assert action.shape == (4, 2)
    assert action.dtype == np.int32
    normal = actor.action_limits(torch.tensor([[1.0, 0, 0, 0, 1]]))
    torch.testing.assert_close(normal, torch.tensor([[1.0, -1, -1, -1, 1]]))


def test_pictures_and_vectors_are_seen_together() -> None:
    """Each picture goes through a network of its own; what is kept in memory stays uint8."""
    seen = {**VECTOR, "camera": ObservationSpec("image", (32, 32, 3), "uint8")}
    actor = policy(observation=seen, crop=28, image_width=8, keypoints=4, image_features=6)
    assert actor.model.features.output_size == 3 + 6
    state = actor.initial_state(2)
    assert state["history.camera"].dtype == torch.uint8
    observation = {"vector": np.zeros((2, 3), np.float32), "camera": np.zeros((2, 32, 32, 3), np.uint8)}
    action, _ = actor.act(observation, state)
    assert action.shape == (2, 2)


def test_the_image_network_is_a_resnet_18() -> None:
    """Its convolutions have 11,166,912 weights, as those of torchvision's; group norms; 32 keypoints."""
    with torch.device("meta"):
        network = KeypointResNet(height=96, width=96, channels=3, crop=84, keypoints=32, features=64, base=64)
    body = {name: part.weight.numel() for name, part in network.named_modules() if isinstance(part, torch.nn.Conv2d)}
    assert sum(body.values()) - body["pool.maps"] == 11_166_912
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in network.modules())


def test_a_spatial_softmax_finds_a_bright_spot() -> None:
    pool = SpatialSoftmax(1, 5, 5, keypoints=1)
    with torch.no_grad():
        pool.maps.weight.fill_(1.0)
    image = torch.zeros(1, 1, 5, 5)
    image[0, 0, 4, 0] = 100.0  # the lower left corner
    torch.testing.assert_close(pool(image)[0, 0], torch.tensor([-1.0, 1.0]), atol=1e-4, rtol=0)


def test_frames_of_a_sequence_are_cropped_alike() -> None:
    """At random while training; in the middle when the policy acts."""
    network = KeypointResNet(height=12, width=12, channels=1, crop=8, keypoints=2, features=2, base=8)
    image = torch.arange(144, dtype=torch.uint8).view(1, 1, 12, 12, 1).expand(16, 2, -1, -1, -1)
    network.train()
    crops = network._cropped(image)
    assert crops.shape == (16, 2, 8, 8, 1)
    assert torch.equal(crops[:, 0], crops[:, 1])
    corners = crops[:, 0, 0, 0, 0]
    assert len(corners.unique()) > 4
    assert torch.equal(crops[0, 0, :, :, 0], image[0, 0, :, :, 0].unfold(0, 8, 1).unfold(1, 8, 1).flatten(0, 1)[
        int(corners[0] // 12) * 5 + int(corners[0] % 12)
    ])  # fmt: skip
    network.eval()
    assert torch.equal(network._cropped(image)[0, 0, :, :, 0], image[0, 0, 2:10, 2:10, 0])


def test_the_learning_rate_rises_and_falls() -> None:
    shares = [warmup_cosine(update, warmup=4, total=12) for update in (0, 3, 4, 8, 12, 20)]
    np.testing.assert_allclose(shares, [0.25, 1.0, 1.0, 0.5, 0.0, 0.0], atol=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_horizon": 16}, "at most prediction_horizon - observation_horizon"),
        ({"observation_horizon": 0}, "at least 1 of each"),
        ({"network": "unett"}, "network='unett' does not exist. Did you mean 'unet'"),
        ({"network": "unet", "prediction_horizon": 9, "action_horizon": 2}, "needs a multiple of 2"),
        ({"prediction": "epsilo"}, "prediction='epsilo' does not exist"),
        ({"sampling_steps": 9}, "sampling_steps=9: expected from 1 to 4"),
        ({"sampler": "ddmp"}, "sampler='ddmp' does not exist. Did you mean 'ddpm'"),
        ({"schedule": "cosine"}, "schedule.kind='cosine' does not exist"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy(**changes)


def test_a_crop_larger_than_the_picture_is_refused() -> None:
    with pytest.raises(ConfigError, match="crop=40 does not fit into images of 32 × 32"):
        policy(observation={"camera": ObservationSpec("image", (32, 32, 3), "uint8")}, crop=40)


def test_windows_that_are_too_short_are_refused() -> None:
    with pytest.raises(DataError, match="learns from windows of 16 records"):
        policy().loss(batch_of(torch.zeros(1, 4, 3), torch.zeros(1, 4, 2)))


def test_a_policy_is_the_prior_of_a_planner() -> None:
    """β = 0 gives back what the policy does, in the environment's units; a plan begins at the present."""
    actor = policy(observation_horizon=1, prediction_horizon=4, action_horizon=2)
    actor.action_limits.fit(torch.tensor([0.0, -1.0]), torch.tensor([0.5, 1.0]))
    observation = {"vector": torch.zeros(2, 3)}
    prior = actor.given(observation, candidates=3, steps=4)
    x = torch.randn(6, *prior.shape)
    for index in range(prior.steps):
        x, _ = prior.kernel(x, prior.clean(x, index), index)
    actions = prior.actions(x.unflatten(0, (2, 3)))
    assert actions.shape == (2, 3, actor.horizon, 2)
    assert actions[..., 0].min() >= 0.0  # within the limits of the data
    assert actions[..., 0].max() <= 0.5
    planner = DiffusionPlanner(
        **{**packaged("controllers/planners/diffusion"), "prior": actor, "action": CONTINUOUS, "horizon": 4, "steps": 4}
    )
    assert planner.horizon == actor.horizon
    with pytest.raises(ConfigError, match="sees one observation"):
        policy().given(observation, candidates=3, steps=4)
