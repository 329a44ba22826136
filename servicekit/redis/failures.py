"""Why a service ended, left in Redis for `tandem status` and for those who wait for it."""

import os
from collections.abc import Mapping

from servicekit.errors import TandemError
from servicekit.logs import get_logger
from servicekit.redis.client import with_tls_files
from servicekit.redis.registry import Registry

log = get_logger(__name__)


def tell_failure(role: str, name: str, reason: str, environ: Mapping[str, str] = os.environ) -> None:
    """Writes down why this process ends; without a Redis that answers, only its log tells. Raises nothing.

    It reads the environment by itself: the reason may be that something else in it is wrong.
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
