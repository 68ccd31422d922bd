"""The compiled tree search grows the trees of the plain one, node for node."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels.triton_anywhere import DEVICE, use_triton
from torch import nn

from rl_lab.components.muzero.dynamics import Dynamics
from rl_lab.components.muzero.model import MuZeroModel
from rl_lab.components.muzero.prediction import PolicyValueNetwork
from rl_lab.components.muzero.representation import VectorRepresentation
from rl_lab.components.planners.action_layout import ActionLayout
from rl_lab.components.planners.mcts import MCTS, Search
from rl_lab.components.planners.search_rules import PUCT
from rl_lab.kernels.registry import enable
from rl_lab.simulation.muzero import MuZeroSimulator
from rl_lab.simulation.simulator import Prediction, SimulatedStep, Simulator
from rl_lab.specs import ActionSpec, ObservationSpec

ROOTS, ACTIONS = 125, 5


class Hashed(Simulator):
    """A model whose states are numbers; everything follows from them by multiplication. With `levels` values and
    logits are rounded, so that many scores are equal; a share of steps ends the episode."""

    has_value = has_logits = True
    discount = 0.97

    def __init__(self, levels: int | None) -> None:
        self.levels = levels

    def observe(self, observation, *, previous=None, action=None, is_first=None):
        return observation["state"]

    def _number(self, state, salt: float):
        number = torch.frac(torch.sin(state * salt) * 43758.5453)
        return number if self.levels is None else (number * self.levels).round() / self.levels

    def step(self, state, action):
        following = torch.frac(state * 7.13 + 0.37 * (1.0 + action.argmax(-1)))
        continuation = (self._number(following, 5.1).abs() > 0.1).float()
        return SimulatedStep(following, self._number(following, 12.9), continuation)

    def predict(self, state):
        salts = torch.arange(1.0, ACTIONS + 1.0, device=state.device)
        logits = 2.0 * self._number(state[:, None], salts * 3.3)
        if self.levels == 1:  # one action is far likelier than the others: deep chains
            logits[:, 2] += 20.0
        return Prediction(logits, self._number(state, 78.2))


def searches(
    rule: str, levels: int | None, number: int, roots: int, use_kernels: Callable[[MCTS], None], device: str = "cpu"
) -> list[Search]:
    """The same random searches by the plain tree and with kernels."""
    torch.manual_seed(number)
    settings = {"players": 1 + number % 2, "normalization": ("tree", "node")[number // 2 % 2]}
    settings["value_bounds"] = (-2.0, 2.0) if number >= 4 else None
    planners = [MCTS(action=ActionLayout(0, (ACTIONS,)), simulations=24, rule=rule, **settings) for _ in "ab"]
    for planner in planners:
        planner.attach(Hashed(levels))
    use_kernels(planners[1])
    assert planners[1].kernel("_walker") is not None
    state, legal = torch.rand(roots, device=device), (torch.rand(roots, ACTIONS) < 0.7).to(device)
    legal[:, number % ACTIONS] = True
    gumbel = torch.distributions.Gumbel(0.0, 1.0)
    noise = gumbel.sample((roots, ACTIONS)).to(device) if rule == "gumbel" else None
    return [planner.search(state, legal=legal, noise=noise) for planner in planners]


def assert_equal(one: Search, other: Search) -> None:
    """The same nodes, visits and choices; sums of returns may differ in their last digit, as products and sums are
    fused by some builds of torch and not by others."""
    for name in ("child", "visits", "prior", "value", "reward", "discount", "parent"):
        assert torch.equal(getattr(one.tree, name), getattr(other.tree, name)), name
    for name in ("returns", "low", "high"):
        torch.testing.assert_close(getattr(one.tree, name), getattr(other.tree, name), rtol=2e-6, atol=2e-6)
    assert torch.equal(one.chosen, other.chosen)
    torch.testing.assert_close(one.policy, other.policy, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["puct", "gumbel"])
@pytest.mark.parametrize("levels", [None, 2, 1])
def test_1000_searches_of_each_kind_are_equal(rule: str, levels: int | None) -> None:
    """Random models, many ties, chains as deep as the search is long, ends, masks, noise, one and two players."""
    for number in range(8):
        assert_equal(*searches(rule, levels, number, ROOTS, on_the_cpu))


@pytest.mark.parametrize("rule", ["puct", "gumbel"])
@pytest.mark.parametrize("levels", [None, 2])
def test_the_kernels_of_a_gpu_grow_the_same_trees(rule: str, levels: int | None) -> None:
    """On a GPU, or in Triton's interpreter; there a program is slow, so there are fewer searches."""
    pytest.importorskip("triton")
    for number in (0, 3, 5):
        assert_equal(*searches(rule, levels, number, 3, use_triton, DEVICE))


def on_the_cpu(planner: MCTS) -> None:
    enable({"planner": planner}, device=torch.device("cpu"), mode="auto")


def test_a_rule_of_ones_own_is_followed() -> None:
    """The kernels know two rules; another one, or a planner that says so, takes the plain path."""

    class LastAction(PUCT):
        def root(self, edges, legal):
            return torch.full((len(legal),), ACTIONS - 1)

    planner = MCTS(action=ActionLayout(0, (ACTIONS,)), simulations=6)
    planner.attach(Hashed(None))
    enable({"planner": planner}, device=torch.device("cpu"), mode="auto")
    planner.puct = LastAction()
    assert planner.search(torch.rand(3)).visits[:, -1].tolist() == [6.0, 6.0, 6.0]
    assert "off" in str(enable({"planner": planner}, device=torch.device("cpu"), mode="off")[0])
    assert not planner.kernels


def make_model(action: ActionSpec, *, norm: bool) -> MuZeroModel:
    specs = {"vector": ObservationSpec("vector", (4,), "float32")}
    sizes = {"latent_shape": (24,), "units": 16, "layers": 2, "norm": norm, "bins": 21, "limit": 10.0}
    model = MuZeroModel(
        representation=VectorRepresentation(observation=specs, latent_size=24, units=16, norm=norm),
        dynamics=Dynamics(action_size=ACTIONS, **sizes),
        prediction=PolicyValueNetwork(action=action, **sizes),
    )
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.3 * torch.randn_like(value))
    return model


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("rule", ["puct", "gumbel"])
def test_a_compiled_search_in_muzeros_model_grows_the_trees_of_the_plain_one(rule: str, norm: bool) -> None:
    """Values differ in their last digits, so single trees may part where scores are almost equal; most must not."""
    torch.manual_seed(1)
    action = ActionSpec("discrete", (1,), (ACTIONS,))
    model = make_model(action, norm=norm)
    plain, fast = (MCTS(action=action, simulations=20, rule=rule, players=2) for _ in "ab")
    for planner in (plain, fast):
        planner.attach(MuZeroSimulator(model=model, discount=0.9))
    state = model.initial({"vector": torch.randn(64, 4)})
    state = state._replace(latent=state.latent.detach())
    noise = torch.distributions.Gumbel(0.0, 1.0).sample((64, ACTIONS)) if rule == "gumbel" else None
    legal = torch.rand(64, ACTIONS) < 0.7
    legal[:, 0] = True
    expected = plain.search(state, noise=noise, legal=legal)
    enable({"planner": fast}, device=torch.device("cpu"), mode="auto")
    found = fast.search(state, noise=noise, legal=legal)
    same = (found.tree.child == expected.tree.child).flatten(1).all(1)
    assert same.float().mean() > 0.9
    for name in ("value", "reward", "logits", "prior", "returns"):
        one, other = getattr(found.tree, name)[same], getattr(expected.tree, name)[same]
        torch.testing.assert_close(one, other, rtol=1e-2, atol=5e-3)  # float32 in the plain inverse transform
    torch.testing.assert_close(found.policy[same], expected.policy[same], rtol=1e-3, atol=1e-3)
    assert found.visits.sum(-1).eq(20).all()


def test_a_layer_that_was_replaced_is_searched_by_its_plain_forward() -> None:
    """The compiled search asks at each search whether the model is still the one that it knows."""
    model = make_model(ActionSpec("discrete", (1,), (ACTIONS,)), norm=True)
    planner = MCTS(action=ActionLayout(0, (ACTIONS,)), simulations=6)
    planner.attach(MuZeroSimulator(model=model, discount=0.9))
    enable({"planner": planner}, device=torch.device("cpu"), mode="auto")
    state, calls = model.initial({"vector": torch.randn(2, 4)}), []
    state = state._replace(latent=state.latent.detach())
    hook = model.dynamics.trunk[0].register_forward_hook(lambda *_: calls.append(1))
    planner.search(state)
    assert len(calls) == 6
    hook.remove()
    planner.search(state)
    assert len(calls) == 6


def _norm_after_relu(trunk: nn.Sequential) -> None:
    trunk[1], trunk[2] = trunk[2], trunk[1]


def _without_relu(trunk: nn.Sequential) -> None:
    trunk[2] = nn.Identity()


def _another_epsilon(trunk: nn.Sequential) -> None:
    trunk[1].eps = 0.5


def _without_bias(trunk: nn.Sequential) -> None:
    trunk[0].bias = None


@pytest.mark.parametrize("change", [_norm_after_relu, _without_relu, _another_epsilon, _without_bias])
def test_known_layers_in_another_order_or_with_other_settings_are_searched_as_they_are(change: Callable) -> None:
    """Their classes are those that the compiled search knows, but not what they compute together."""
    torch.manual_seed(2)
    model = make_model(ActionSpec("discrete", (1,), (ACTIONS,)), norm=True)
    change(model.dynamics.trunk)
    plain, fast = (MCTS(action=ActionLayout(0, (ACTIONS,)), simulations=6) for _ in "ab")
    for planner in (plain, fast):
        planner.attach(MuZeroSimulator(model=model, discount=0.9))
    on_the_cpu(fast)
    with torch.no_grad():
        state = model.initial({"vector": torch.randn(8, 4)})
    torch.testing.assert_close(fast.search(state).tree.value, plain.search(state).tree.value)
