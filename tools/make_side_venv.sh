#!/usr/bin/env bash
# Creates .cache/NAME-venv: what requirements/NAME.txt pins, beside the torch and transformers of .venv: make_side_venv.sh NAME.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=.cache/$1-venv
REQUIREMENTS=requirements/$1.txt
if cmp -s "$REQUIREMENTS" "$VENV/installed.txt"; then
    exit 0
fi
mkdir -p .cache
rm -rf "$VENV"
.venv/bin/python -m venv "$VENV"
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$packages" >"$own/project.pth"
echo "$1: installing $(grep -v '^#' "$REQUIREMENTS" | tr '\n' ' ')into $VENV"
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$REQUIREMENTS"
cp "$REQUIREMENTS" "$VENV/installed.txt"
