#!/usr/bin/env bash
# The embedded run on this machine, from nothing: the same as `make train`, with a work folder and keys of your choice.
#
#   launch/local.sh WORKDIR [--config.KEY=VALUE ...]
set -euo pipefail
workdir=$(realpath -m "${1:?usage: launch/local.sh WORKDIR [--config.KEY=VALUE ...]}")
shift
cd "$(dirname "$0")/.."
make venv
exec .venv/bin/python -m jaxrl_sat.main --config=configs/sat_grpo.py --workdir="$workdir" "$@"
