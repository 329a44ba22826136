"""How a fake refuses the RPCs that it does not serve: as gRPC does."""

from typing import Any, NoReturn

import grpc

_WHY = "the fake does not serve this"


async def refuse(context: Any) -> NoReturn:
    """Ends the call with UNIMPLEMENTED."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, _WHY)
    raise AssertionError("abort does not return")


def refuse_in_thread(context: Any) -> NoReturn:
    """The same on a server of threads."""
    context.abort(grpc.StatusCode.UNIMPLEMENTED, _WHY)
    raise AssertionError("abort does not return")
