"""The configuration of a run: its schema, and how it is loaded. Imports pydantic, yaml and servicekit.errors only."""

from tandem_config.loading import Draft, draft_config, dump_resolved, load_config
from tandem_config.problems import ConfigErrors, ConfigProblem
from tandem_config.schema import RunConfig

__all__ = ["ConfigErrors", "ConfigProblem", "Draft", "RunConfig", "draft_config", "dump_resolved", "load_config"]
