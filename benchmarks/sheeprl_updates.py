"""The other side of `dreamer_v3_cpu.py`: sheeprl's own DreamerV3 updates, under sheeprl's own interpreter.

It imports nothing of RL Lab. Sizes come as JSON in the first argument; each line on standard input, a number of
updates, is answered by a line with the seconds of wall and CPU time that they took.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import hydra
import numpy as np
import torch
from gymnasium.spaces import Box, Dict
from omegaconf import OmegaConf
from sheeprl.utils.utils import dotdict
from torch import Tensor
from torch.distributions import Distribution


def layers(head: str, size: dict[str, Any]) -> int:
    return size["head_layers"] if head in ("world_model.reward_model", "world_model.discount_model") else size["layers"]


def overrides(algorithm: str, size: dict[str, Any]) -> list[str]:
    """sheeprl's names for our sizes. Its 2023 version has no blocks and one hidden layer in the prior."""
    heads = ["world_model.encoder", "world_model.observation_model", "world_model.reward_model"]
    heads += ["world_model.discount_model", "actor", "critic"]
    model = "algo.world_model"
    given = [
        f"exp={algorithm}", "env=gym", "env.id=CartPole-v1", "algo.cnn_keys.encoder=[]", "algo.cnn_keys.decoder=[]",
        "algo.mlp_keys.encoder=[vector]", "algo.mlp_keys.decoder=[vector]", "fabric.accelerator=cpu",
        f"algo.per_rank_batch_size={size['batch']}", f"algo.per_rank_sequence_length={size['length']}",
        f"algo.horizon={size['horizon']}", f"algo.dense_units={size['units']}",
        f"{model}.discrete_size={size['classes']}", f"{model}.stochastic_size={size['groups']}",
        f"{model}.recurrent_model.recurrent_state_size={size['deter']}",
        f"{model}.reward_model.bins={size['bins']}", f"algo.critic.bins={size['bins']}",
        *(f"algo.{head}.mlp_layers={layers(head, size)}" for head in heads),
    ]  # fmt: skip
    if algorithm == "dreamer_v3_5":
        return [
            *given,
            f"{model}.recurrent_model.hidden_size={size['hidden']}",
            f"{model}.recurrent_model.blocks={size['blocks']}",
        ]
    hidden = [f"{model}.{name}.hidden_size={size['hidden']}" for name in ("transition_model", "representation_model")]
    return [*given, *hidden, f"{model}.recurrent_model.dense_units={size['hidden']}"]


def configuration(algorithm: str, size: dict[str, Any]) -> Any:
    """The configuration as sheeprl's command line makes it."""
    with hydra.initialize_config_module("sheeprl.configs", version_base="1.3"):
        composed = hydra.compose("config", [*overrides(algorithm, size), "run_name=benchmark"])
    for node in ("hydra", "logger"):
        OmegaConf.set_struct(composed, False)
        composed.pop(node, None)
    known = importlib.import_module(f"sheeprl.algos.{algorithm}.utils").AGGREGATOR_KEYS
    metrics = composed.metric.aggregator.metrics
    for name in [name for name in metrics if name not in known]:
        metrics.pop(name)
    return dotdict(OmegaConf.to_container(composed, resolve=True))


def records(size: dict[str, Any], context: int) -> dict[str, Tensor]:
    """Random records, time first, in the form in which sheeprl's replay hands them out."""
    lead = (size["length"] + context, size["batch"])
    ends = (torch.rand(*lead, 1) < 0.02).float()
    data = {
        "vector": torch.randn(*lead, 4), "rewards": torch.randn(*lead, 1), "terminated": ends,
        "truncated": torch.zeros_like(ends), "is_first": (torch.rand(*lead, 1) < 0.02).float(),
        "actions": torch.nn.functional.one_hot(torch.randint(0, 2, lead), 2).float(),
    }  # fmt: skip
    if context:
        data["deter"] = torch.rand(*lead, size["deter"]).half()
        data["stoch"] = torch.randint(0, size["classes"], (*lead, size["groups"]), dtype=torch.uint8)
    return data


def make_update(algorithm: str, size: dict[str, Any]) -> tuple[Callable[[], None], int]:
    """One update as sheeprl's loop does it, replay aside; and the number of trained parameters."""
    cfg = configuration(algorithm, size)
    torch.set_float32_matmul_precision(cfg.float32_matmul_precision)
    Distribution.set_default_validate_args(cfg.distribution.validate_args)
    package = f"sheeprl.algos.{algorithm}"
    task, agent = importlib.import_module(f"{package}.{algorithm}"), importlib.import_module(f"{package}.agent")
    fabric = hydra.utils.instantiate(cfg.fabric, callbacks=None, _convert_="all")
    fabric.launch()
    fabric.seed_everything(0)
    space = Dict({"vector": Box(-np.inf, np.inf, (4,), np.float32)})
    world_model, actor, critic, target, _ = agent.build_agent(fabric, (2,), False, cfg, space)
    aggregator = hydra.utils.instantiate(cfg.metric.aggregator, _convert_="all")
    moment = cfg.algo.actor.moments
    moments = task.Moments(moment.decay, moment.max, moment.percentile.low, moment.percentile.high)

    def optimizer(node: Any, *modules: Any) -> Any:
        parameters = [parameter for module in modules for parameter in module.parameters()]
        return fabric.setup_optimizers(hydra.utils.instantiate(node, params=parameters, _convert_="all"))

    trained = sum(p.numel() for module in (world_model, actor, critic) for p in module.parameters())
    data = records(size, cfg.algo.get("replay_context") or 0)
    if algorithm == "dreamer_v3_5":
        main = optimizer(cfg.algo.optimizer, world_model, actor, critic)

        def update() -> None:
            task.train(fabric, cfg, world_model, actor, critic, target, main, moments, data, aggregator, (2,))
            task.update_target_critic(critic, target, cfg.algo.critic.tau)

    else:
        optimizers = [
            optimizer(cfg.algo.world_model.optimizer, world_model),
            optimizer(cfg.algo.actor.optimizer, actor),
            optimizer(cfg.algo.critic.optimizer, critic),
        ]

        def update() -> None:
            for own, slow in zip(critic.module.parameters(), target.parameters(), strict=True):
                slow.data.lerp_(own.data, cfg.algo.critic.tau)
            batch = {name: value.clone() for name, value in data.items()}  # it writes into its batch
            models = (world_model, actor, critic, target)
            task.train(fabric, *models, *optimizers, batch, aggregator, cfg, False, (2,), moments)

    return update, trained


def main() -> None:
    algorithm, size, threads = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    answers, sys.stdout = sys.stdout, sys.stderr  # what sheeprl prints is no answer
    torch.set_num_threads(threads)
    update, parameters = make_update(algorithm, size)
    facts = {"version": version("sheeprl"), "torch": torch.__version__, "parameters": parameters}
    print(json.dumps(facts), file=answers, flush=True)
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            update()
        elapsed = [time.perf_counter() - wall, time.process_time() - cpu]
        print(json.dumps(elapsed), file=answers, flush=True)


if __name__ == "__main__":
    main()
