#!/usr/bin/env bash
# Creates .cache/bench-train-venv: TRL, on the torch and transformers of .venv, so that all ways compute with the same.
set -euo pipefail
cd "$(dirname "$0")/../.."
VENV=.cache/bench-train-venv
REQUIREMENTS=requirements/bench-train.txt
if cmp -s "$REQUIREMENTS" "$VENV/installed.txt"; then
    exit 0
fi
mkdir -p .cache
rm -rf "$VENV"
.venv/bin/python -m venv "$VENV"
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$packages" >"$own/project.pth"
echo "bench-train: installing $(grep -v '^#' "$REQUIREMENTS" | tr '\n' ' ')into $VENV"
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$REQUIREMENTS"
cp "$REQUIREMENTS" "$VENV/installed.txt"
