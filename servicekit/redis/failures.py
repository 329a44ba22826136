"""Records of why a service ended, in Redis, for `tandem status` and for processes that wait for the service."""

import os
from collections.abc import Mapping

from servicekit.errors import TandemError
from servicekit.logs import get_logger
from servicekit.redis.client import with_tls_files
from servicekit.redis.registry import Registry

log = get_logger(__name__)


def record_failure(role: str, name: str, reason: str, environ: Mapping[str, str] = os.environ) -> None:
    """Record why this process ends; if Redis does not answer, only its log says so. Raises nothing.

    It reads the environment by itself, because the reason may be that another variable is wrong.
    """
    url, run_id = environ.get("REDIS_URL", ""), environ.get("TANDEM_RUN_ID", "")
    if not url or not run_id:
        return
    try:
        registry = Registry(with_tls_files(url, environ), run_id)
        registry.report_failure(role, name, reason)
        registry.close()
    except TandemError as error:
        log.info("failure record not written", error=str(error))
