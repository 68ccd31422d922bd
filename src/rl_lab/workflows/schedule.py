"""Values that change at given env steps."""

from __future__ import annotations

from collections.abc import Sequence

from rl_lab.errors import ConfigError


class StepSchedule:
    """A number, or pairs [env step, value from then on] that begin at step 0."""

    def __init__(self, name: str, value: float | Sequence[Sequence[float]]) -> None:
        pairs = [(0, float(value))] if isinstance(value, int | float) else [tuple(pair) for pair in value]
        steps = [pair[0] for pair in pairs]
        if not pairs or any(len(pair) != 2 for pair in pairs) or steps[0] != 0 or steps != sorted(steps):
            raise ConfigError(
                f"{name}={value}: expected a number, or a list of pairs [env step, value] in ascending order that "
                "begins at step 0."
            )
        self._pairs = pairs

    @property
    def values(self) -> list[float]:
        return [float(pair[1]) for pair in self._pairs]

    def __call__(self, step: int) -> float:
        return float(next(value for start, value in reversed(self._pairs) if start <= step))
