"""The rights of Tandem's user in Redis, as data; `python -m servicekit.redis.acl` prints them as an ACL file.

    TANDEM_REDIS_PASSWORD=... python -m servicekit.redis.acl > users.acl

The file holds the password's SHA-256 only. All other users may run PING (probes do), and nothing else. This module
needs the standard library alone: operators run it with the python3 of their own machine.
"""

import hashlib
import os
import sys

USER = "tandem"
PASSWORD_VARIABLE = "TANDEM_REDIS_PASSWORD"
# The registry's keys, and those of weight groups in one hash slot each.
KEY_PATTERNS = ("tandem:*", "{tandem:*}:*")
# Used directly or from our Lua scripts; the rules apply to both. No KEYS, SCAN, FLUSH*, CONFIG, MONITOR, no channels.
COMMANDS = (
    "ping",
    "evalsha",
    "script|load",
    "time",
    "get",
    "set",
    "mget",
    "del",
    "expire",
    "sadd",
    "srem",
    "smembers",
    "hget",
    "hset",
    "hsetnx",
    "hmget",
    "hgetall",
    "hdel",
    "hincrby",
    "zadd",
    "zrem",
    "zrangebyscore",
)


def rules() -> str:
    """Write the user's rules, without name and password.

    >>> rules().split()[:4]
    ['resetchannels', '~tandem:*', '~{tandem:*}:*', '-@all']
    """
    keys = " ".join(f"~{pattern}" for pattern in KEY_PATTERNS)
    # Redis 6.2 knows subcommands only on top of a command that is denied as a whole, as here.
    return f"resetchannels {keys} -@all {' '.join(f'+{command}' for command in COMMANDS)}"


def acl_file(password: str, user: str = USER) -> str:
    """Write the text of users.acl. Raises: ValueError: the password is empty."""
    if not password:
        raise ValueError(f"the password of Redis user {user!r} is empty; set {PASSWORD_VARIABLE}")
    digest = hashlib.sha256(password.encode()).hexdigest()
    return f"user default on nopass resetkeys resetchannels -@all +ping\nuser {user} on #{digest} {rules()}\n"


def main() -> int:
    """Print the file. Returns: 0, or 2 if there is no password."""
    try:
        sys.stdout.write(acl_file(os.environ.get(PASSWORD_VARIABLE, "")))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
