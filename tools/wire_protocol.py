"""Writes the tables of docs/wire-protocol.md from protos, phases and errors, or checks that they are current.

python -m tools.wire_protocol write | check
"""

import re
import sys
from pathlib import Path

from servicekit.errors import ERRORS
from weightsync.round.phases import GIVE_UP, ROUND

REPO = Path(__file__).parents[1]
PAGE = REPO / "docs" / "wire-protocol.md"
PROTOS = REPO / "protos" / "tandem_api"
_RPC = re.compile(r"^  rpc (?P<name>\w+)\((?P<takes>[\w ]+)\) returns \((?P<returns>[\w ]+)\);")
_SERVICE = re.compile(r"^service (\w+) \{")


def calls(proto: str) -> list[tuple[str, str, str, str]]:
    """Parse the calls in the text of a .proto file: (service, rpc, shape, comment) of each."""
    service, comment = "", list[str]()
    found = list[tuple[str, str, str, str]]()
    for line in proto.splitlines():
        if begun := _SERVICE.match(line):
            service = begun[1]
        if call := _RPC.match(line):
            found.append((service, call["name"], _shape(call["takes"], call["returns"]), " ".join(comment)))
        text = line.strip()
        comment = [*comment, text.removeprefix("// ")] if text.startswith("//") else []
    return found


def _shape(takes: str, returns: str) -> str:
    return " -> ".join("stream" if side.startswith("stream ") else "one" for side in (takes, returns))


def tables() -> dict[str, str]:
    """Generate the Markdown of each part, by the name in its markers."""
    rows = [row for path in sorted(PROTOS.glob("*/v1/*.proto")) for row in calls(path.read_text(encoding="utf-8"))]
    named = "\n".join(f"| `{service}` | `{name}` | {shape} | {comment} |" for service, name, shape, comment in rows)
    errors = "\n".join(f"| `{error.reason}` | `{error.code.name}` | {_summary(error)} |" for error in ERRORS)
    phases = "\n".join(
        f"| {rule.name.upper()} | {rule.trainer} | {rule.replica} | {rule.failure} |" for rule in (*ROUND, GIVE_UP)
    )
    return {
        "phases": f"| phase | trainer | rollouts | if it fails |\n|---|---|---|---|\n{phases}",
        "calls": f"| service | call | request -> reply | what it does |\n|---|---|---|---|\n{named}",
        "reasons": f"| reason | gRPC status | meaning |\n|---|---|---|\n{errors}",
    }


def _summary(error: type) -> str:
    return " ".join((error.__doc__ or "").strip().split("\n\n")[0].split())


def rendered(page: str) -> str:
    """Return the page with the parts between its markers generated. Raises: SystemExit: a part has no markers."""
    for name, table in tables().items():
        pattern = rf"(<!-- {name}: generated -->\n).*?\n?(<!-- end -->)"
        page, count = re.subn(pattern, lambda found: found[1] + table + "\n" + found[2], page, flags=re.DOTALL)  # noqa: B023
        if count != 1:
            raise SystemExit(f"{PAGE.name}: no markers of the part {name!r}")
    return page


def main(arguments: list[str]) -> int:
    """Write or check the page. Returns: 1 if `check` found it out of date, else 0. Raises: SystemExit: wrong usage."""
    if arguments not in (["write"], ["check"]):
        raise SystemExit(__doc__)
    now = PAGE.read_text(encoding="utf-8")
    if arguments == ["write"]:
        PAGE.write_text(rendered(now), encoding="utf-8")
        return 0
    if rendered(now) == now:
        return 0
    print(f"{PAGE.name} is out of date: python -m tools.wire_protocol write", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
