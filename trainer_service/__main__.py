"""`python -m trainer_service --config FILE [--resume]`: one rank of the trainer (RANK, WORLD_SIZE, LOCAL_RANK)."""

import argparse
import gc
import os
import sys
from pathlib import Path

from servicekit.cuda import newest_generation
from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG
from servicekit.logs import configure_logging, get_logger
from servicekit.redis.failures import record_failure
from tandem_config.loading import load_config
from tandem_files.run_folder import claim_run_dir


def main(arguments: list[str] | None = None) -> int:
    """Run the rank. Returns: 2 for a bad configuration; otherwise app.run ends the process."""
    gc.disable()  # until the model is loaded (worker.py)
    from trainer_service import app
    from trainer_service.ranks.liveness import failure_name
    from trainer_service.ranks.world import Place, overlap_collectives
    from trainer_service.worker import WorkerSettings
    from weightsync.membership.nccl_settings import settle_nccl_settings
    from weightsync.transfer.devices import gpu_name

    parser = argparse.ArgumentParser(prog="python -m trainer_service", description="One rank of the Megatron trainer.")
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration file (YAML)")
    parser.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")
    options = parser.parse_args(arguments)
    configure_logging("trainer", rank=os.environ.get("RANK", "0"))
    try:
        place = Place.from_env(os.environ)
        environment = ServiceEnvironment.from_env()
        config = load_config(options.config)
        owner = claim_run_dir(environment.run_dir, environment.run_id)
        if config.trainer.tensor_parallel > 1:
            overlap_collectives(os.environ, newest_generation())
        # With every transport: ranks on GPUs compare these settings, and test an NCCL group, before they agree on one.
        settle_nccl_settings(gpu_name=gpu_name(), engine_hosts=config.rollout.nodes)
    except ConfigError as error:
        get_logger(__name__).error("bad configuration", error=str(error))
        rank = os.environ.get("RANK", "0")
        record_failure("trainer", failure_name(int(rank) if rank.isdigit() else 0), str(error))
        return EXIT_BAD_CONFIG
    settings = WorkerSettings(config=config, environment=environment, place=place, owner=owner, resume=options.resume)
    return app.run(settings)


if __name__ == "__main__":
    sys.exit(main())
