"""The word that opens a run's services to their callers: one per run, handed to the processes in their environment.

Without it, whoever reaches a port could command a run; on one machine that is every user of it. It is told in clear
text in each call's metadata: between machines, use mutual TLS.
"""

import hmac
import os
from collections.abc import Iterable, Mapping

from servicekit.errors import Unauthenticated

VARIABLE = "TANDEM_RUN_TOKEN"
METADATA_KEY = "tandem-run-token"


def own_token(environ: Mapping[str, str] = os.environ) -> str:
    """What this process's calls carry, and its servers demand; "" without one."""
    return environ.get(VARIABLE, "")


def check_token(expected: str, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
    """Raises: Unauthenticated: the call does not carry the run's token."""
    for key, value in metadata or ():
        if key == METADATA_KEY and isinstance(value, str) and hmac.compare_digest(value.encode(), expected.encode()):
            return
    raise Unauthenticated(
        f"call of {method} without the run's token; `tandem status` and `top` take it from the run's folder, "
        f"others from {VARIABLE}"
    )
