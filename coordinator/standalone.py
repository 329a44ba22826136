"""`python -m coordinator.standalone --config FILE`: evaluates a model without a run, then exits; for `tandem evaluate`.

The replicas serve the model's own weights (rollout.serve_model), as policy version 0. Writes evaluation.json and the
samples to TANDEM_RUN_DIR.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from coordinator.build import build_evaluator, build_scorer
from coordinator.environments.conversations import environments_of, started_environment, tools_of
from coordinator.fleet.services import merge_versions
from coordinator.generate.dispatch import Rollouts
from coordinator.inputs import evaluation_prompts
from coordinator.learn.evaluation import EvaluationResult
from coordinator.record.evaluations import evaluation_row
from coordinator.record.samples.sink import SampleSink
from coordinator.record.sinks import FinishedIteration
from coordinator.rewards.registry import build_rewards, close_rewards, start_rewards
from coordinator.rewards.taken import ShownColumns
from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError
from servicekit.lifecycle.tasks import first_of
from servicekit.lifecycle.termination import run_main
from servicekit.logs import get_logger
from tandem_clients.fleet import FixedFleet
from tandem_clients.replica import Replica
from tandem_config.loading import load_config
from tandem_config.schema import RunConfig
from tandem_files.atomic import write_json_atomic
from tandem_files.run_folder import EVALUATION_FILE, claim_run_dir
from tandem_files.samples.folder import SampleFolder
from tandem_files.tokenizer import TextCodec

# The weights are those of the files, which no training has changed.
POLICY_VERSION = 0
log = get_logger(__name__)


async def evaluate_model(config: RunConfig, environment: ServiceEnvironment) -> None:
    """Evaluate the model on all sets of the configuration and write the results.

    Raises: ConfigError: a file cannot be used; TandemError: of the replica that failed.
    """
    start_s = time.monotonic()
    await asyncio.to_thread(claim_run_dir, environment.run_dir, environment.run_id)
    identity = environment.identity("coordinator")
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(started_environment(config, environment.run_id, identity))
        try:
            codec = TextCodec.from_folders(config.model.path, config.model.tokenizer_path)
            prompts = {
                chosen.name: evaluation_prompts(config, chosen, codec, environment.run_dir, tools_of(pool))
                for chosen in config.evaluation_sets()
            }
            rewards = build_rewards(config, identity)
            await start_rewards(rewards, [scan for found in prompts.values() for scan in found.scans])
        except (OSError, ValueError) as error:
            raise ConfigError(str(error)) from error
        stack.push_async_callback(close_rewards, rewards)
        formats = next(iter(prompts.values())).formats
        replicas = await _replicas(config, environment, stack)
        rollouts = Rollouts(
            fleet=FixedFleet(replicas),
            max_groups_per_call=config.rollout.max_groups_per_call,
            timeout_s=config.rollout.generate_timeout_s,
            environments=environments_of(config, pool, formats),
        )
        scorer = build_scorer(config, codec, rewards)
        evaluator = build_evaluator(config, codec, prompts, scorer, rollouts, beside_training=rollouts)
        evaluated = await evaluator.evaluate(evaluator.sets, POLICY_VERSION)
        versions = {replica.name: dict((await replica.status()).versions.packages) for replica in replicas}
    results = _results(config, evaluated) | {
        "seconds": time.monotonic() - start_s,
        "versions": merge_versions(versions),
    }
    await asyncio.to_thread(write_json_atomic, environment.run_dir / EVALUATION_FILE, results)
    if config.samples.enabled:
        sink = SampleSink(
            folder=SampleFolder(environment.run_dir),
            settings=config.samples,
            codec=codec,
            truncated=config.grpo.truncated,
            taken=ShownColumns.of([part.reward.takes for part in rewards], config),
        )
        # As those of a run before its first iteration, for `tandem samples`.
        await asyncio.to_thread(sink.take, FinishedIteration(record=None, row={"iteration": 0}, evaluated=evaluated))
    log.info("model evaluated", model=str(config.model.path), sets=[result.name for result in evaluated])


async def _replicas(config: RunConfig, environment: ServiceEnvironment, stack: AsyncExitStack) -> list[Replica]:
    """Wait for all replicas, and connect to them. Raises: DeadlineExceeded: names those that are missing."""
    registry = await environment.open_registry()
    stack.push_async_callback(asyncio.to_thread, registry.close)
    names = [f"rollout-{index}" for index in range(config.rollout.replicas)]
    records = await asyncio.to_thread(registry.wait_for, "rollout", names, config.run.startup_timeout_s)
    replicas = [Replica(record.name, record.address, environment.identity("coordinator")) for record in records]
    for replica in replicas:
        stack.push_async_callback(replica.close)
    return replicas


def _results(config: RunConfig, evaluated: Sequence[EvaluationResult]) -> dict[str, Any]:
    settings = {chosen.name: chosen.model_dump(mode="json") for chosen in config.evaluation_sets()}
    return {
        "model": str(config.model.path),
        "reward": [section.model_dump(mode="json") for section in config.reward],
        "right_from": config.evaluation.right_from,
        "max_new_tokens": config.grpo.max_new_tokens,
        "sets": [
            {
                "settings": settings[result.name],
                "num_prompts": len(result.generation.groups),
                "num_tokens": result.generation.num_tokens,
                "measures": {
                    name: {"value": estimate.value, "low": estimate.low, "high": estimate.high}
                    for name, estimate in result.estimates.items()
                },
            }
            for result in evaluated
        ],
        "columns": evaluation_row(evaluated),
    }


def main() -> int:
    """Parse the command line and evaluate. Returns: the exit code (servicekit.lifecycle.exit_codes)."""
    parser = argparse.ArgumentParser(prog="coordinator.standalone", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (YAML)")
    options = parser.parse_args()

    async def run(stop: asyncio.Event) -> None:
        environment = ServiceEnvironment.from_env()
        await first_of({"evaluation": evaluate_model(load_config(options.config), environment), "stop": stop})

    return run_main("coordinator", run)


if __name__ == "__main__":
    sys.exit(main())
