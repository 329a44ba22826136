"""A process that holds a slot: `python -m tests.integration.redis.holder URL GROUP SLOT TTL_S`.

Says its worker id; then, for each epoch that it reads from stdin, whether it may act in it: "ok" or the error's name.
"""

import sys

from servicekit.errors import TandemError
from servicekit.logs import configure_logging
from weightsync.group.rendezvous import Rendezvous, SlotLease


def main(url: str, group: str, slot: str, ttl_s: str) -> None:
    configure_logging("holder")
    lease = SlotLease(Rendezvous(url, group), slot, float(ttl_s))
    lease.start()
    print(lease.worker_id, flush=True)
    for line in sys.stdin:
        try:
            lease.rendezvous.bind_endpoint(slot, lease.worker_id, int(line), "127.0.0.1:1")
            print("ok", flush=True)
        except TandemError as error:
            print(type(error).__name__, flush=True)
    lease.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
