"""The settings on which the services of a run must agree: all but those that one of them acts on alone.

Each service reads the configuration for itself, from a file of its own machine or pod. One that was started later, with
another file, would train or sample by other settings than those of the run that the coordinator leads.
"""

from tandem_config.comparing.described import base_key, described
from tandem_config.comparing.resuming import OF_A_REPLICA, OF_THE_COORDINATOR, OF_THE_TRAINER
from tandem_config.schema import RunConfig


def agreed_settings(config: RunConfig) -> dict[str, str]:
    """Return the settings that must be the same in all services, as texts, by dotted key."""
    return _without(config, OF_THE_COORDINATOR | OF_THE_TRAINER | OF_A_REPLICA)


def settings_of_ranks(config: RunConfig) -> dict[str, str]:
    """Return the settings that must be the same in all ranks of the trainer, as texts, by dotted key."""
    return _without(config, OF_THE_COORDINATOR | OF_A_REPLICA)


def settings_of_an_engine(config: RunConfig) -> dict[str, str]:
    """Return the settings that must be the same on all hosts of one engine, as texts, by dotted key."""
    return {key: text for key, text in described(config).items() if base_key(key) in OF_A_REPLICA}


def _without(config: RunConfig, keys: frozenset[str]) -> dict[str, str]:
    return {key: text for key, text in described(config).items() if base_key(key) not in keys}
