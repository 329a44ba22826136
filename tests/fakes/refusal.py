"""How a fake refuses the RPCs that it does not serve: as gRPC does."""

from typing import Any, NoReturn

import grpc


async def refuse(context: Any) -> NoReturn:
    """Ends the call with UNIMPLEMENTED."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the fake does not serve this")
    raise AssertionError("abort does not return")
