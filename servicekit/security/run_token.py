"""The secret of a run that its calls must carry; processes get it in their environment.

Without it, everyone who reaches a port could control a run; on one machine that is every user. It is sent in clear text
in each call's metadata: between machines, use mutual TLS.
"""

import hmac
import os
from collections.abc import Iterable, Mapping

from servicekit.errors import Unauthenticated

VARIABLE = "TANDEM_RUN_TOKEN"
METADATA_KEY = "tandem-run-token"


def own_token(environ: Mapping[str, str] = os.environ) -> str:
    """Return the token of this process's calls and servers; "" without one."""
    return environ.get(VARIABLE, "")


def page_key(token: str) -> str:
    """Derive the key that the run's page asks for before it shows samples; "" without a token.

    Not the token itself: a page's address is seen in a browser's history and on screens that are shared.
    """
    return hmac.digest(token.encode(), b"tandem page", "sha256").hex()[:32] if token else ""


def key_part(key: str) -> str:
    """Return the part of the page's address that hands it the key; browsers send it to no server."""
    return f"#key={key}" if key else ""


def check_token(expected: str, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
    """Check the token of a call. Raises: Unauthenticated: it does not carry the run's token."""
    for key, value in metadata or ():
        if key == METADATA_KEY and isinstance(value, str) and hmac.compare_digest(value.encode(), expected.encode()):
            return
    raise Unauthenticated(
        f"call of {method} without the run's token; `tandem status` and `top` take it from the run's folder, "
        f"others from {VARIABLE}"
    )
