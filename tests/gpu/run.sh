#!/usr/bin/env bash
# run.sh [FOLDER [--part NAME]...]: runs the tests that need a GPU, then the measurements, and writes measured.json and
# log.txt into FOLDER. With --part, only the named parts run: machine, checks, overlap, restart or training.
#
# The default of FOLDER is $OUT, or gpu-results. It takes at most 9 minutes. It needs Python 3.12 with torch, numpy, rich,
# packaging, jinja2 and pytest. The other packages come from .wheels, which `tests/gpu/fetch_wheels.sh` fills on a machine
# with a network. REPLICAS_GPU_SMALL=1 uses small models and no GPU, to try this script.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
out=${1:-${OUT:-gpu-results}}
mkdir -p "$out" || exit
exec > >(tee "$out/log.txt") 2>&1
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH="$PWD:$PWD/tests:$site" XDG_STATE_HOME="$site/state" XDG_CONFIG_HOME="$site/config" OMP_NUM_THREADS=1
imports="import diloco, diloco.demo, executors.cli"
if ! "$python" -c "$imports" 2> /dev/null; then
    for wheel in .wheels/*.whl; do
        [ -e "$wheel" ] || break
        "$python" -m zipfile -e "$wheel" "$site" || exit # a wheel is a zip file, and these need no further installation
    done
fi
if ! "$python" -c "$imports"; then
    echo "run.sh: this project cannot be imported. It needs Python 3.12 with torch, numpy, rich, packaging and jinja2."
    [ -d .wheels ] || echo "run.sh: .wheels is missing. Run tests/gpu/fetch_wheels.sh on a machine with a network, and" \
        "bring the folder .wheels to this machine."
    exit 2
fi
# Each replica imports these files, so they are compiled once, and not by each process.
"$python" -m compileall -q executors diloco tests/gpu "$site" > /dev/null
"$python" -m gpu.measure --out "$out/measured.json" "${@:2}"
