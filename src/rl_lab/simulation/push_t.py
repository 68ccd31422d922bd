"""The physics of Push-T, batched: a disc pushes a T-shaped block over a floor on which nothing slides on."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from rl_lab.simulation.classic_control import ClassicControl
from rl_lab.specs import ActionSpec

SIZE = 512.0  # of the field, in pixels; actions are target positions in it
SUBSTEPS, TAU = 10, 0.01  # physics steps of one decision, and their length in seconds
STIFFNESS, DAMPING = 100.0, 20.0  # of the controller that moves the disc to its target
RADIUS = 15.0
MASS, INERTIA = 1.0, 3000.0
CENTRE = (0.0, 45.0)  # of gravity, in the block's frame: its origin is the middle of the bar's outer edge
BOXES = ((-60.0, 0.0, 60.0, 30.0), (-15.0, 30.0, 15.0, 120.0))  # bar and stem: least x and y, largest x and y
GOAL = (256.0, 256.0, math.pi / 4)  # the block's origin and angle
SLOP = 0.1  # penetration that the solver leaves alone
PUSH_OUT = (1.0 - 0.9**0.6) / TAU  # the share of it that one physics step takes back, as a speed
ITERATIONS = 10  # of the contact solver
NO_CONTACT = -1e9


def corners() -> Float[Tensor, "corner xy"]:
    """The corners of bar and stem in the block's frame, in the order of gym-pusht's keypoints."""
    return torch.tensor(
        [
            corner
            for left, top, right, bottom in BOXES
            for corner in ((left, top), (right, top), (right, bottom), (left, bottom))
        ]
    )


class PushT(ClassicControl):
    """State: centre of gravity and angle of the block, position and velocity of the disc, velocity and spin of the
    block. What the solver of pymunk computes, the walls of the field aside.

    The reward is dense, for planners: minus the mean distance of the block's corners from where they should be, and a
    little for the distance between disc and block. The environment's own is the share of the goal that is covered.
    """

    observation_size = 20
    action = ActionSpec("continuous", (2,))

    def __init__(self, *, approach: float = 0.02, reach: float | None = None) -> None:
        self.approach = approach  # weight of the distance between disc and block
        self.reach = reach  # None: actions are targets in the field; else: this many pixels from the disc
        self._goal = _placed(torch.tensor([GOAL[:2]]), torch.tensor([GOAL[2]]))[0]

    def decode(self, observation: Float[Tensor, "batch 20"]) -> Float[Tensor, "batch 10"]:
        first, second = observation[:, 0:2], observation[:, 2:4]
        along = second - first
        angle = torch.atan2(along[:, 1], along[:, 0])
        centre = (first + second) / 2 + _rotated(torch.tensor([CENTRE]).to(observation), angle[:, None])[:, 0]
        still = torch.zeros_like(observation[:, :3])
        return torch.cat([centre, angle[:, None], observation[:, 16:20], still], 1)

    def encode(self, state: Float[Tensor, "batch 10"]) -> Float[Tensor, "batch 20"]:
        return torch.cat([self.keypoints(state).flatten(1), state[:, 3:7]], 1)

    def keypoints(self, state: Float[Tensor, "batch 10"]) -> Float[Tensor, "batch corner xy"]:
        """Where the corners of the block are."""
        angle = state[:, 2]
        origin = state[:, :2] - _rotated(torch.tensor([CENTRE]).to(state), angle[:, None])[:, 0]
        return _placed(origin, angle)

    def reward(self, state: Tensor, action: Tensor, following: Tensor) -> Float[Tensor, " batch"]:
        off = (self.keypoints(following) - self._goal.to(following)).norm(dim=-1).mean(-1)
        away = (following[:, 3:5] - following[:, :2]).norm(dim=-1)
        return -(off + self.approach * away) / 100.0

    def target(self, state: Float[Tensor, "batch 10"], action: Float[Tensor, "batch 2"]) -> Float[Tensor, "batch xy"]:
        """Where an action sends the disc."""
        action = action.clamp(-1.0, 1.0)
        if self.reach is None:
            return (action + 1.0) * (SIZE / 2)
        return (state[:, 3:5] + self.reach * action).clamp(0.0, SIZE)

    def step(self, state: Float[Tensor, "batch 10"], action: Float[Tensor, "batch 2"]) -> Float[Tensor, "batch 10"]:
        target_x, target_y = self.target(state, action).unbind(-1)
        cx, cy, angle, x, y, vx, vy, bx, by, spin = state.unbind(-1)
        for _ in range(SUBSTEPS):
            vx = vx + TAU * (STIFFNESS * (target_x - x) - DAMPING * vx)
            vy = vy + TAU * (STIFFNESS * (target_y - y) - DAMPING * vy)
            x, y = x + TAU * vx, y + TAU * vy
            cx, cy, angle = cx + TAU * bx, cy + TAU * by, angle + TAU * spin
            bx, by, spin = _pushed(x - cx, y - cy, vx, vy, angle)
        return torch.stack([cx, cy, angle, x, y, vx, vy, bx, by, spin], -1)


def _pushed(dx: Tensor, dy: Tensor, vx: Tensor, vy: Tensor, angle: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The block's velocity and spin after the contacts with a disc at (dx, dy) from its centre of gravity.

    The floor has taken what velocity it had. Each contact has two impulses without friction: one by which the block
    gets out of the disc's way, one that takes back penetration; projected Gauss-Seidel finds them for both contacts.
    """
    cos, sin = angle.cos(), angle.sin()
    local_x, local_y = cos * dx + sin * dy, cos * dy - sin * dx  # in the block's frame, from the centre of gravity
    local_vx, local_vy = cos * vx + sin * vy, cos * vy - sin * vx
    contacts = [_contact(local_x, local_y, local_vx, local_vy, box) for box in BOXES]
    (n1x, n1y, l1, s1), (n2x, n2y, l2, s2) = contacts
    k1, k2 = 1.0 / MASS + l1.square() / INERTIA, 1.0 / MASS + l2.square() / INERTIA
    both = (n1x * n2x + n1y * n2y) / MASS + l1 * l2 / INERTIA
    j1, j2 = (s1 / k1).clamp(min=0.0), torch.zeros_like(s2)
    for _ in range(ITERATIONS):
        j2 = ((s2 - both * j1) / k2).clamp(min=0.0)
        j1 = ((s1 - both * j2) / k1).clamp(min=0.0)
    first, second = j1.sum(0), j2.sum(0)
    ux, uy = (first * n1x + second * n2x) / MASS, (first * n1y + second * n2y) / MASS
    return cos * ux - sin * uy, sin * ux + cos * uy, (first * l1 + second * l2) / INERTIA


def _contact(
    x: Tensor, y: Tensor, vx: Tensor, vy: Tensor, box: tuple[float, float, float, float]
) -> tuple[Tensor, Tensor, Tensor, Float[Tensor, "impulse batch"]]:
    """Normal from the disc to the box, its lever, and the two speeds that the contact asks for: very negative ones
    where the disc does not touch."""
    left, top, right, bottom = box[0] - CENTRE[0], box[1] - CENTRE[1], box[2] - CENTRE[0], box[3] - CENTRE[1]
    nearest_x, nearest_y = x.clamp(left, right), y.clamp(top, bottom)
    away_x, away_y = nearest_x - x, nearest_y - y
    distance = torch.hypot(away_x, away_y)
    outside = distance > 1e-6
    nx, ny = torch.where(outside, away_x / distance, 0.0), torch.where(outside, away_y / distance, 1.0)
    lever = nearest_x * ny - nearest_y * nx
    gap = distance - RADIUS
    speeds = torch.stack([nx * vx + ny * vy, -PUSH_OUT * (gap + SLOP).clamp(max=0.0)])
    return nx, ny, lever, torch.where(gap <= 0.0, speeds, NO_CONTACT)


def _rotated(points: Float[Tensor, "*batch xy"], angle: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch xy"]:
    cos, sin = angle.cos(), angle.sin()
    x, y = points.unbind(-1)
    return torch.stack([cos * x - sin * y, sin * x + cos * y], -1)


def _placed(origin: Float[Tensor, "batch xy"], angle: Float[Tensor, " batch"]) -> Float[Tensor, "batch corner xy"]:
    return origin[:, None] + _rotated(corners().to(origin)[None], angle[:, None])
