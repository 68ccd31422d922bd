"""The other half of benchmarks/mcts.py: mctx on the same network, in an environment of its own.

Reads a rule a line (puct, gumbel), searches once by it, and writes the seconds that it took.
"""

from __future__ import annotations

import os
import sys
import time

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import jax.numpy as jnp
import mctx

ROOTS, SIMULATIONS, ACTIONS, HIDDEN, BINS = map(int, sys.argv[1:6])
HEAD, LIMIT, EPSILON = 32, 10.0, 1e-3


def layer(key: jax.Array, inputs: int, outputs: int) -> tuple[jax.Array, jax.Array]:
    return jax.random.normal(key, (inputs, outputs)) / inputs**0.5, jnp.zeros(outputs)


def hidden(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Linear, LayerNorm, ReLU."""
    x = x @ weights[0] + weights[1]
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return jax.nn.relu(x)


def linear(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
    return x @ weights[0] + weights[1]


def mean(logits: jax.Array) -> jax.Array:
    y = (jax.nn.softmax(logits) * jnp.linspace(-LIMIT, LIMIT, BINS)).sum(-1)
    root = (jnp.sqrt(1 + 4 * EPSILON * (jnp.abs(y) + 1 + EPSILON)) - 1) / (2 * EPSILON)
    return jnp.sign(y) * (root**2 - 1)


def main() -> None:
    keys = iter(jax.random.split(jax.random.PRNGKey(0), 12))
    sizes = {
        "trunk": (HIDDEN + ACTIONS, HIDDEN), "change": (HIDDEN, HIDDEN), "reward": (HIDDEN, HEAD),
        "reward_out": (HEAD, BINS), "shared": (HIDDEN, HIDDEN), "policy": (HIDDEN, HEAD), "policy_out": (HEAD, ACTIONS),
        "value": (HIDDEN, HEAD), "value_out": (HEAD, BINS),
    }  # fmt: skip
    params = {name: layer(next(keys), *size) for name, size in sizes.items()}

    def predict(params: dict, latent: jax.Array) -> tuple[jax.Array, jax.Array]:
        shared = hidden(latent, params["shared"])
        logits = linear(hidden(shared, params["policy"]), params["policy_out"])
        return logits, mean(linear(hidden(shared, params["value"]), params["value_out"]))

    def step(params: dict, _: jax.Array, action: jax.Array, latent: jax.Array) -> tuple:
        given = jnp.concatenate([latent, jax.nn.one_hot(action, ACTIONS)], -1)
        raw = latent + linear(hidden(given, params["trunk"]), params["change"])
        low, high = raw.min(-1, keepdims=True), raw.max(-1, keepdims=True)
        latent = (raw - low) / jnp.maximum(high - low, 1e-5)
        reward = mean(linear(hidden(latent, params["reward"]), params["reward_out"]))
        logits, value = predict(params, latent)
        discount = jnp.full_like(value, 0.997)
        return mctx.RecurrentFnOutput(reward=reward, discount=discount, prior_logits=logits, value=value), latent

    def search(policy, params: dict, key: jax.Array, latent: jax.Array):
        logits, value = predict(params, latent)
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=latent)
        return policy(params, key, root, step, SIMULATIONS).action_weights

    policies = {"puct": mctx.muzero_policy, "gumbel": mctx.gumbel_muzero_policy}
    compiled = {name: jax.jit(lambda *given, own=policy: search(own, *given)) for name, policy in policies.items()}
    latent = jax.random.uniform(next(keys), (ROOTS, HIDDEN))
    for number, line in enumerate(sys.stdin):
        start = time.process_time()
        compiled[line.strip()](params, jax.random.PRNGKey(number), latent).block_until_ready()
        sys.stdout.write(f"{time.process_time() - start}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
