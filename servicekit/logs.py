"""JSON log lines on stderr, from structlog and from the standard library's logging alike."""

import logging
import os
import sys
from typing import Any

import structlog

# Libraries that log every call at INFO.
_CHATTY = ("asyncio", "grpc", "httpcore", "httpx", "matplotlib", "urllib3")


def configure_logging(service: str, *, level: str = "INFO", **fields: Any) -> None:
    """Send every log line of this process to stderr as one JSON object; a later call replaces the fields.

    Args:
        service: "trainer", "rollout", "coordinator", ...; a field of every line, as is the run's id (TANDEM_RUN_ID).
        level: lowest level that is written.
        fields: further fields of every line: run, name, rank. None values are left out.
    """
    run = {"run": os.environ["TANDEM_RUN_ID"]} if "TANDEM_RUN_ID" in os.environ else {}
    constant = {"service": service} | run | {key: value for key, value in fields.items() if value is not None}
    shared = _shared_processors(constant)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        # Not cached: a service configures once at its start and again when it knows its name and rank.
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(default=str),
            ],
        )
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a logger for `name` (`__name__`): `log.info("round committed", round_id=..., seconds=...)`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def _shared_processors(constant: dict[str, Any]) -> list[structlog.types.Processor]:
    def add_constant(_: Any, __: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
        for key, value in constant.items():
            event.setdefault(key, value)
        return event

    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.EventRenamer("message"),
        add_constant,
    ]
