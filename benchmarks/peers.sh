#!/usr/bin/env bash
# Makes the environment of a peer that benchmarks compare with:  benchmarks/peers.sh torch|tunix FOLDER
set -euo pipefail
name=${1:?torch or tunix} folder=${2:?folder of the environment}
python3.11 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet uv==0.13.9
install=("$folder/bin/python" -m uv pip install --quiet --python "$folder/bin/python")
case $name in
  torch) "$folder/bin/python" -m pip install --quiet torch==2.13.0 transformers==5.24.0 ;;
  tunix) "${install[@]}" google-tunix==0.1.7 jax==0.10.2 ;;
  *) echo "benchmarks/peers.sh: $name; allowed: torch, tunix" >&2; exit 2 ;;
esac
