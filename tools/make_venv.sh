#!/usr/bin/env bash
# Creates or updates .venv from the pins in requirements/. Called by `make venv`; see requirements/README.md.
#
#   PYTHON            interpreter to use; default: the first of python3.11, python3 that is Python 3.11
#   TORCH_INDEX_URL   further package index to take torch from, e.g. the PyTorch project's index of CPU builds
set -euo pipefail
cd "$(dirname "$0")/.."
LOG=.venv/pip.log

fail() {
    printf 'make venv: %s\n' "$*" >&2
    exit 1
}

is_python_311() {
    command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_python_311 "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11"
        printf '%s' "$PYTHON"
        return
    fi
    for name in python3.11 python3; do
        if is_python_311 "$name"; then
            printf '%s' "$name"
            return
        fi
    done
    fail "no Python 3.11 on PATH (looked for python3.11 and python3). On Debian 12: apt-get install python3 python3-venv"
}

torch_version() {
    .venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))'
}

pip_install() {
    .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off "$@" 2>&1 |
        .venv/bin/python -m tools.pip_progress "$LOG" || {
        grep -v 'is ignored: it is neither a file nor a directory' "$LOG" | tail -n 25 >&2
        fail "pip could not install; its last lines are above, all of them in $LOG"
    }
}

if ! is_python_311 .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module. On Debian 12: apt-get install python3-venv"
    echo "venv: creating .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
fi
# An installation that was cut off leaves packages that pip takes for whole.
.venv/bin/python -m tools.check_venv repair

echo "venv: torch first, from requirements/torch.txt (PyPI has the CUDA build only, 2 GB; TORCH_INDEX_URL: a smaller one)"
pip_install --only-binary :all: ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} \
    -c requirements/lock.txt -c requirements/torch-cuda.txt -r requirements/torch.txt
torch_before=$(torch_version)

echo "venv: $(grep -c '==' requirements/lock.txt) packages from requirements/lock.txt"
pip_install --no-deps --only-binary :all: -r requirements/lock.txt
pip_install --no-deps --no-build-isolation -e .

torch_after=$(torch_version)
[ "$torch_before" = "$torch_after" ] || fail "torch was replaced: $torch_before became $torch_after"
.venv/bin/python -m tools.check_venv
