#!/usr/bin/env bash
# Makes the environment of a peer that benchmarks compare with:  benchmarks/peers.sh torch|tunix|verifiers FOLDER
set -euo pipefail
name=${1:?torch, tunix or verifiers} folder=${2:?folder of the environment}
python3.11 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet uv==0.13.9
install=("$folder/bin/python" -m uv pip install --quiet --python "$folder/bin/python")
case $name in
  torch) "$folder/bin/python" -m pip install --quiet torch==2.13.0 transformers==5.24.0 ;;
  tunix) "${install[@]}" google-tunix==0.1.7 jax==0.10.2 ;;
  verifiers)
    # verl's scores are read from its files: the rest of it, and torch, are left out.
    "${install[@]}" "math-verify[antlr4_11_0]==0.9.0" pylatexenc==2.11 sympy==1.14.0 numpy==2.4.6 tqdm==4.70.1
    "${install[@]}" --no-deps verl==0.9.1 mathruler==0.1.0 ;;
  *) echo "benchmarks/peers.sh: $name; allowed: torch, tunix, verifiers" >&2; exit 2 ;;
esac
