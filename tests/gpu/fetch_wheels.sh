#!/usr/bin/env bash
# fetch_wheels.sh: downloads the packages that a machine with a GPU lacks into .wheels, for Python 3.12 on x86-64.
set -euo pipefail
cd "$(dirname "$0")/../.."
platforms=()
for version in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${version}_x86_64")
done
rm -rf .wheels
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
    -d .wheels xxhash blake3 cloudpickle tenacity 'typer>=0.26,<0.29' click shellingham annotated-doc platformdirs \
    inotify_simple nvidia-ml-py psutil
ls .wheels
