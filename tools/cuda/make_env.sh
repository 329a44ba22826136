#!/usr/bin/env bash
# Makes or updates the environment for NVIDIA GPUs from its lock, with a stub of the driver's library where there is no
# driver. Prints its folder; the environment's own Python is FOLDER/bin/python, the stub is in FOLDER/stub.
#
#   CUDA_PYTHON       interpreter: Python 3.11 or 3.12; default: python3.11
#   TANDEM_CUDA_ENV   folder of the environment; default: .cache/cuda-venv-3.11 (or 3.12), which `make clean` keeps
#
# Exit code 3: it cannot be had here, for want of disk, network or a compiler; the reason is in the last line.
set -euo pipefail
cd "$(dirname "$0")/../.."
# 10 GB of packages, which uv links from its cache where both are on one file system.
NEEDED_GB=14

fail() {
    printf 'cuda environment: %s\n' "$2" >&2
    exit "$1"
}

say() {
    printf 'cuda environment: %s\n' "$*" >&2
}

uv=$PWD/.venv/bin/uv
[ -x "$uv" ] || fail 1 "no $uv: run 'make venv' first"
python=${CUDA_PYTHON:-python3.11}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    fail 3 "no $python on this machine (CUDA_PYTHON)"
lock=requirements/cuda-$version.txt
[ -f "$lock" ] || fail 1 "$python is Python $version; there are locks for $(ls requirements/cuda-*.txt | tr '\n' ' ')"
folder=${TANDEM_CUDA_ENV:-$PWD/.cache/cuda-venv-$version}
digest=$(cat "$lock" tools/cuda/stub.c pyproject.toml | sha256sum | cut -d ' ' -f 1)

if [ "$(cat "$folder/tandem.stamp" 2>/dev/null)" != "$digest" ]; then
    command -v gcc >/dev/null || fail 3 "no gcc, which builds the stub of the driver's library"
    mkdir -p "$folder"
    rm -f "$folder/tandem.stamp"
    if [ ! -x "$folder/bin/python" ]; then
        free_gb=$(df --output=avail -BG "$folder" | tail -n 1 | tr -dc 0-9)
        [ "$free_gb" -ge "$NEEDED_GB" ] || fail 3 "$free_gb GB are free at $folder, and it takes $NEEDED_GB"
        "$uv" venv --quiet --allow-existing --python "$python" "$folder" >&2
    fi
    "$folder/bin/python" -m tools.check_venv repair >&2
    say "$(grep -c '==' "$lock") packages from $lock into $folder (10 GB)"
    "$uv" pip sync --only-binary :all: --python "$folder/bin/python" "$lock" >&2 ||
        fail 3 "the packages could not be installed: see above"
    "$uv" pip install --quiet --no-deps --no-build-isolation --python "$folder/bin/python" -e . >&2
    "$uv" pip check --quiet --python "$folder/bin/python" >&2
    mkdir -p "$folder/stub"
    gcc -shared -fPIC -O1 -Wall -Wl,-soname,libcuda.so.1 -o "$folder/stub/libcuda.so.1" tools/cuda/stub.c
    printf '%s' "$digest" >"$folder/tandem.stamp"
fi
printf '%s\n' "$folder"
