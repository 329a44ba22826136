"""Writes deploy/monitoring/dashboards, or checks that the committed files are current.

python -m tools.dashboards write
python -m tools.dashboards check      lists the differences (exit 1)
"""

import argparse
import sys
from pathlib import Path

from tools.dashboards import fleet, training, weight_sync
from tools.dashboards.render import render
from tools.prometheus_rule import runbook_address
from tools.proto import differences

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "monitoring" / "dashboards"
BOARDS = (weight_sync.BOARD, training.BOARD, fleet.BOARD)


def fresh() -> dict[str, bytes]:
    """Render every board. Returns: content by file name."""
    runbook = runbook_address()
    return {f"{board.uid}.json": render(board, runbook).encode() for board in BOARDS}


def write(folder: Path = FOLDER) -> int:
    """Write the files, and remove those of boards that no longer exist."""
    wanted = fresh()
    for path in folder.glob("*.json"):
        if path.name not in wanted:
            path.unlink()
    for name, content in wanted.items():
        (folder / name).write_bytes(content)
    return 0


def check(folder: Path = FOLDER) -> int:
    """Print the differences. Returns: 1 if there are any, else 0."""
    lines = differences(fresh(), {path.name: path.read_bytes() for path in folder.glob("*.json")})
    for line in lines:
        print(f"dashboards: {line}", file=sys.stderr)
    if lines:
        print(f"{folder} is out of date: run `python -m tools.dashboards write`", file=sys.stderr)
    return 1 if lines else 0


def main() -> int:
    """Run the command line. Returns: the exit code."""
    parser = argparse.ArgumentParser(
        prog="tools.dashboards", description="Write the Grafana dashboards, or check them."
    )
    parser.add_argument("action", choices=["write", "check"])
    return {"write": write, "check": check}[parser.parse_args().action]()


if __name__ == "__main__":
    sys.exit(main())
