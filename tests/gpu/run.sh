#!/usr/bin/env bash
# run.sh [FOLDER]: runs the tests that need a GPU, then the measurements, and writes measured.json and log.txt into FOLDER.
#
# It takes at most 9 minutes. It needs Python 3.12 with torch, numpy, rich, packaging, jinja2 and pytest. The other
# packages come from .wheels, which `tests/gpu/fetch_wheels.sh` fills on a machine with a network.
# REPLICAS_GPU_SMALL=1 uses small models and no GPU, to try this script.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-gpu-results}
mkdir -p "$out"
exec > >(tee "$out/log.txt") 2>&1
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if ls .wheels/*.whl > /dev/null 2>&1; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .wheels/*.whl || exit
fi
export PYTHONPATH="$PWD:$PWD/tests:$site" XDG_STATE_HOME="$site/state" OMP_NUM_THREADS=1
status=0
if "$python" -c 'import pytest' 2> /dev/null; then
    "$python" -m pytest -q -p no:cacheprovider --noconftest -c /dev/null -m cuda tests/training/test_device_copies.py
    code=$?
    [ $code -eq 5 ] || [ $code -eq 0 ] || status=$code # 5: there is no GPU, so no test was selected
fi
"$python" -m gpu.measure --out "$out/measured.json" || status=$?
exit $status
