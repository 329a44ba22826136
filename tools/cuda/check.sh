#!/usr/bin/env bash
# Tandem in the environment for NVIDIA GPUs, on a machine without one: `make check-cuda` calls it.
#
# Runs tests/cuda and the unit tests there. ALLOW_SKIP=1: what cannot be had here (make_env.sh says why) is no failure.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
reports=.cache/reports

folder=$(tools/cuda/make_env.sh)
status=$?
if [ "$status" -eq 3 ] && [ "${ALLOW_SKIP:-0}" = 1 ]; then
    echo "SKIPPED: make check-cuda: the CUDA environment cannot be had here, see above"
    exit 0
fi
[ "$status" -eq 0 ] || exit "$status"

# What the driver's package installs is better than the stub.
ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1 ' || export LD_LIBRARY_PATH="$folder/stub${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# This checkout's code, whichever one the environment was made for.
export PYTHONPATH=$PWD OMP_NUM_THREADS=1 TANDEM_CUDA_CHECK=1
mkdir -p "$reports" && rm -f "$reports"/cuda-*.xml

"$folder/bin/python" -m pytest --junit-xml="$reports/cuda-own.xml" "${@:-tests/cuda}" || status=1
if [ $# -eq 0 ]; then
    "$folder/bin/python" -m pytest --junit-xml="$reports/cuda-unit.xml" -n 2 -m "not slow" tests/unit || status=1
fi
.venv/bin/python -m tools.test_summary "$reports"/cuda-*.xml || status=1
exit "$status"
