"""Records searches of mctx for tests/components/test_search_against_mctx.py, in an environment of its own.

Run it: python -m venv /tmp/mctx && /tmp/mctx/bin/pip install mctx && /tmp/mctx/bin/python benchmarks/record_mctx.py
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import mctx
import numpy as np

FILE = Path(__file__).resolve().parents[1] / "tests" / "components" / "mctx_searches.json"
ROOTS, ACTIONS, LATENT = 4, 4, 6


def weights(seed: int) -> dict[str, np.ndarray]:
    """A small model: s' = tanh(transition[a] s), and everything else is read off linearly."""
    rng = np.random.default_rng(seed)
    return {
        "transition": rng.normal(0.0, 0.6, (ACTIONS, LATENT, LATENT)),
        "logits": rng.normal(0.0, 1.0, (LATENT, ACTIONS)),
        "value": rng.normal(0.0, 1.0, LATENT),
        "reward": rng.normal(0.0, 0.5, LATENT),
        "end": rng.normal(0.0, 1.0, LATENT),  # an episode ends where this is above 0.8
        "start": rng.normal(0.0, 1.0, (ROOTS, LATENT)),
        "invalid": (rng.random((ROOTS, ACTIONS)) < 0.3) * (np.arange(ACTIONS) > 0),
    }


def search(kind: str, seed: int, simulations: int, *, players: int, masked: bool) -> dict:
    model = {name: jnp.asarray(value, jnp.float32) for name, value in weights(seed).items()}
    sign = 1.0 if players == 1 else -1.0

    def step(_, __, action, state):
        following = jnp.tanh(jnp.einsum("bij,bj->bi", model["transition"][action], state))
        alive = (following @ model["end"] <= 0.8).astype(jnp.float32)
        output = mctx.RecurrentFnOutput(
            reward=following @ model["reward"], discount=sign * 0.9 * alive,
            prior_logits=following @ model["logits"], value=following @ model["value"],
        )  # fmt: skip
        return output, following

    start, key = model["start"], jax.random.PRNGKey(seed)
    root = mctx.RootFnOutput(prior_logits=start @ model["logits"], value=start @ model["value"], embedding=start)
    common = {"params": (), "rng_key": key, "root": root, "recurrent_fn": step, "num_simulations": simulations}
    common["invalid_actions"] = model["invalid"] if masked else None
    if kind == "gumbel":
        output = mctx.gumbel_muzero_policy(**common)
        noise = jax.random.gumbel(jax.random.split(key)[1], (ROOTS, ACTIONS), jnp.float32)
    else:
        share = 0.0 if masked else 0.25
        output = mctx.muzero_policy(**common, dirichlet_fraction=share)
        noise = jax.random.dirichlet(
            jax.random.split(key, 3)[1], jnp.full([ACTIONS], fill_value=0.3), shape=(ROOTS,)
        )  # fmt: skip
    tree, summary = output.search_tree, output.search_tree.summary()
    facts = {
        "visits": tree.children_visits, "child": tree.children_index, "q": summary.qvalues, "value": summary.value,
        "policy": output.action_weights, "noise": noise,
    }  # fmt: skip
    recorded = {name: np.asarray(value).tolist() for name, value in facts.items()}
    if kind == "gumbel":
        recorded["action"] = np.asarray(output.action).tolist()
    return recorded | {"kind": kind, "seed": seed, "simulations": simulations, "players": players, "masked": masked}


def main() -> None:
    cases = [
        search(kind, seed, simulations, players=players, masked=masked)
        for seed, (kind, simulations, players, masked) in enumerate(
            (kind, simulations, players, masked)
            for kind in ("puct", "gumbel")
            for simulations, players, masked in ((24, 1, False), (24, 1, True), (16, 2, False))
        )
    ]
    models = {str(case["seed"]): {k: v.tolist() for k, v in weights(case["seed"]).items()} for case in cases}
    FILE.write_text(json.dumps({"mctx": mctx.__version__, "models": models, "searches": cases}))


if __name__ == "__main__":
    main()
