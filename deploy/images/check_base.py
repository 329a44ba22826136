"""Says whether a base image for GPUs is the one that the lock is for; the Dockerfiles run it while they build.

    python3 check_base.py LOCK ...

LOCK are the files requirements/cuda-VERSION.txt; that of this Python counts. Trainer and rollout are built on one base,
so that both have one torch and one NCCL: ranks with two kinds cannot form a group.
"""

import sys
from importlib import metadata
from pathlib import Path

# What must be as locked; of all else the base may have what its makers tested.
CHECKED = ("sglang", "torch")
SHOWN = ("nvidia-nccl-cu13", "transformers", "triton")


def read_lock(paths: list[str]) -> dict[str, str]:
    """The pins for this Python, a name to a version. Raises: ValueError: there is no lock for it."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    for path in paths:
        if path.endswith(f"cuda-{python}.txt"):
            lines = Path(path).read_text(encoding="utf-8").splitlines()
            return {name: version for name, _, version in (line.partition("==") for line in lines) if version}
    raise ValueError(f"the base has Python {python}, and the locks are {', '.join(paths)}")


def version_of(name: str) -> str:
    """The installed version, without a local part (+cu130); "none" if there is none."""
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return "none"


def wrong(pins: dict[str, str]) -> list[str]:
    """A line for each package that the base must have as locked and has not."""
    return [
        f"the base has {name} {version_of(name)}, and the lock is for {pins[name]}: give SGLang's image of that version"
        for name in CHECKED
        if version_of(name) != pins[name]
    ]


def main(arguments: list[str]) -> int:
    """Returns: 1 if it is another base, with a line for each reason."""
    try:
        lines = wrong(read_lock(arguments))
    except ValueError as error:
        lines = [str(error)]
    if not lines:
        import torch

        if torch.version.cuda is None:
            lines = [f"the base has a build of torch without CUDA ({torch.__version__})"]
    print("base:", *(f"{name}=={version_of(name)}" for name in (*CHECKED, *SHOWN)))
    for line in lines:
        print(f"base: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
