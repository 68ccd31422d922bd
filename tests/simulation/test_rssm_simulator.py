"""Planning in a latent world model."""

from __future__ import annotations

import pytest
import torch
from tests.components.planner_models import make_planner

from rl_lab.components.planners.cem import CEM
from rl_lab.components.predictors import ContinuePredictor, RewardPredictor
from rl_lab.components.world_models.base import LatentState
from rl_lab.components.world_models.dense_rssm import DenseCategoricalRSSM, GaussianRSSM
from rl_lab.components.world_models.rssm import BlockRSSM
from rl_lab.errors import ConfigError
from rl_lab.simulation.rssm import RSSMSimulator
from rl_lab.specs import ActionSpec

SIZES = {"embed_size": 3, "action_size": 2, "deter": 8, "hidden": 6}
MODELS = {
    "gaussian": lambda: GaussianRSSM(**SIZES, stoch=4),
    "dense": lambda: DenseCategoricalRSSM(**SIZES, groups=2, classes=2),
    "block": lambda: BlockRSSM(**SIZES, groups=2, classes=2, blocks=2),
}


@pytest.fixture(params=MODELS)
def simulator(request: pytest.FixtureRequest) -> RSSMSimulator:
    torch.manual_seed(0)
    size = {"feature_size": 12, "units": 5}
    return RSSMSimulator(
        rssm=MODELS[request.param](), reward=RewardPredictor(**size, distribution="unit_normal", outscale=1.0),
        action_size=2, encode=lambda observation: observation["vector"], continuation=ContinuePredictor(**size),
        value=lambda features: features.sum(-1), policy=lambda features: torch.tanh(features[:, :2]),
    )  # fmt: skip


def test_a_step_is_the_prior_and_what_it_arrives_at(simulator: RSSMSimulator) -> None:
    """Reward and continuation of the state that the action leads to, for every state-space model."""
    state = simulator.observe({"vector": torch.randn(5, 3)})
    action = torch.rand(5, 2)
    torch.manual_seed(1)
    following, reward, continuation = simulator.step(state, action)
    torch.manual_seed(1)
    noise = simulator.rssm.draw_noise((5,), "cpu")
    expected = simulator.rssm.predict_step(state, action, noise)
    torch.testing.assert_close(following.features, expected.features)
    torch.testing.assert_close(reward, simulator.reward(expected.features)[:, 0])
    logit = simulator.continuation(expected.features)
    torch.testing.assert_close(continuation, (torch.sigmoid(logit) / simulator.continuation.discount).clamp(max=1.0))
    torch.testing.assert_close(simulator.value(following), expected.features.sum(-1))
    assert simulator.policy(following).shape == (5, 2)
    assert simulator.rollout(state, None, 3).reward.shape == (5, 3)


def test_observing_goes_on_from_the_latent_before(simulator: RSSMSimulator) -> None:
    """And forgets it, with the action, where an episode begins."""
    before = simulator.observe({"vector": torch.randn(2, 3)})
    seen, action = {"vector": torch.randn(2, 3)}, torch.rand(2, 2)
    state = simulator.observe(seen, previous=before, action=action, is_first=torch.tensor([True, False]))
    expected, _ = simulator.rssm.advance(before, action)
    fresh, _ = simulator.rssm.advance(simulator.rssm.initial(2), torch.zeros(2, 2))
    torch.testing.assert_close(state.deter[0], fresh[0])
    torch.testing.assert_close(state.deter[1], expected[1])


def test_without_an_encoder_there_is_nothing_to_observe() -> None:
    """The message says so."""
    model = RSSMSimulator(rssm=MODELS["gaussian"](), reward=RewardPredictor(feature_size=12), action_size=2)
    with pytest.raises(ConfigError, match="no encoder"):
        model.observe({"vector": torch.randn(2, 3)})


def test_a_step_of_ones_own_is_planned_with(simulator: RSSMSimulator) -> None:
    """No evaluation of all steps at once stands in for it."""
    state, actions = simulator.observe({"vector": torch.randn(5, 3)}), torch.rand(5, 3, 2)
    plain, calls = simulator.step, []
    simulator.step = lambda *arguments: calls.append(1) or plain(*arguments)  # type: ignore[method-assign]
    simulator.evaluate(state, actions, 0.9)
    assert len(calls) == 3


def test_an_evaluation_is_a_walk_of_steps(simulator: RSSMSimulator) -> None:
    """Rewards are read off all states at once; they count what they would count one by one."""
    state, actions = simulator.observe({"vector": torch.randn(5, 3)}), torch.rand(5, 3, 2)
    torch.manual_seed(1)
    total, weight, last, *_ = simulator.evaluate(state, actions, 0.9)
    torch.manual_seed(1)
    noise = simulator.rssm.draw_noise((3, 5), "cpu")
    expected, alive = torch.zeros(5), torch.ones(5)
    for action, own in zip(actions.unbind(1), noise, strict=True):
        state = simulator.rssm.predict_step(state, action, own)
        continuation = torch.sigmoid(simulator.continuation(state.features)) / simulator.continuation.discount
        expected = expected + alive * simulator.reward(state.features)[:, 0]
        alive = alive * continuation.clamp(max=1.0) * 0.9
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(weight, alive)
    torch.testing.assert_close(last.features, state.features)


def test_short_weights_rank_plans_as_full_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16 PlaNet's returns err much less than candidates differ; and they follow the weights."""
    monkeypatch.setattr("rl_lab.simulation.rssm.compile_block", lambda function: function)
    torch.manual_seed(0)
    rssm = GaussianRSSM(embed_size=5, action_size=1, deter=50, hidden=50, stoch=15)
    reward = RewardPredictor(
        feature_size=65, units=30, layers=2, distribution="unit_normal", outscale=1.0, style="planet"
    )
    model = RSSMSimulator(rssm=rssm, reward=reward, action_size=1, encode=lambda observation: observation["vector"])
    seen, candidates, returns = {"vector": torch.randn(2, 5)}, torch.rand(2, 100, 12, 1) * 2.0 - 1.0, []
    planner = make_planner(CEM, action=ActionSpec("continuous", (1,)), horizon=12, samples=100)
    planner.attach(model)
    for dtype in (torch.float16, None):
        if dtype is not None:
            model.compile_blocks(dtype)
            with torch.no_grad():
                for value in (*rssm.parameters(), *reward.parameters()):
                    value += 0.05 * torch.randn(value.shape)
        else:
            model = RSSMSimulator(rssm=rssm, reward=reward, action_size=1, encode=model.encode)
            planner.attach(model)
        torch.manual_seed(1)
        with torch.no_grad():
            returns.append(planner.score(model.observe(seen), candidates))
    short, full = returns
    assert (short - full).abs().mean() < 0.02 * full.std(1).mean()
    ranks = torch.stack([values.argsort(1).argsort(1).float() for values in returns])
    for env in range(2):
        assert torch.corrcoef(ranks[:, env])[0, 1] > 0.999


class Integrator(GaussianRSSM):
    """h' = h + a, without noise: a model whose best actions are known."""

    def advance(self, state, action):
        return state.deter + action, None

    def sample(self, params, noise, dtype):
        return torch.zeros(*params.shape[:-1], self.stoch_size)


class Distance(RewardPredictor):
    """-|h - (0.5, -0.25)|²"""

    def forward(self, features):
        return -(features[:, :2] - torch.tensor([0.5, -0.25])).square().sum(-1, keepdim=True)


def test_planet_s_search_finds_the_best_first_action() -> None:
    """In a latent model that is solved by hand, for two environments at once."""
    torch.manual_seed(0)
    rssm = Integrator(embed_size=3, action_size=2, deter=2, hidden=4, stoch=1)
    model = RSSMSimulator(
        rssm=rssm, reward=Distance(feature_size=3, units=2, distribution="unit_normal"), action_size=2
    )
    planner = make_planner(
        CEM, action=ActionSpec("continuous", (2,)), horizon=3, samples=300, iterations=8, elites=30, init_std=1.0,
        momentum=0.0, warm_start=False,
    )  # fmt: skip
    planner.attach(model)
    state = LatentState(torch.tensor([[0.0, 0.0], [0.4, 0.4]]), torch.zeros(2, 1))
    plan = planner.plan(state, planner.initial_memory(2))
    torch.testing.assert_close(plan.action, torch.tensor([[0.5, -0.25], [0.1, -0.65]]), atol=0.05, rtol=0.0)
