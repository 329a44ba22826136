"""Writes deploy/monitoring/dashboards, and checks that the committed files are what the code says.

python -m tools.dashboards write
python -m tools.dashboards check      lists what differs (exit 1)
"""

import argparse
import sys
from pathlib import Path

from tools.dashboards import fleet, training, weight_sync
from tools.dashboards.render import render
from tools.proto import differences

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "monitoring" / "dashboards"
BOARDS = {"weight-sync": weight_sync.BOARD, "training": training.BOARD, "fleet": fleet.BOARD}


def fresh() -> dict[str, bytes]:
    """File name to what it should hold."""
    return {f"{name}.json": render(board).encode() for name, board in BOARDS.items()}


def write(folder: Path = FOLDER) -> int:
    """Writes the files; removes those of boards that are gone."""
    wanted = fresh()
    for path in folder.glob("*.json"):
        if path.name not in wanted:
            path.unlink()
    for name, content in wanted.items():
        (folder / name).write_bytes(content)
    return 0


def check(folder: Path = FOLDER) -> int:
    """Returns 1 and says what differs, if anything does."""
    lines = differences(fresh(), {path.name: path.read_bytes() for path in folder.glob("*.json")})
    for line in lines:
        print(f"dashboards: {line}", file=sys.stderr)
    if lines:
        print(f"{folder} is not what tools/dashboards says: run `python -m tools.dashboards write`", file=sys.stderr)
    return 1 if lines else 0


def main() -> int:
    """Runs the command that the command line names."""
    parser = argparse.ArgumentParser(
        prog="tools.dashboards", description="Write the Grafana dashboards, or check them."
    )
    parser.add_argument("action", choices=["write", "check"])
    return {"write": write, "check": check}[parser.parse_args().action]()


if __name__ == "__main__":
    sys.exit(main())
