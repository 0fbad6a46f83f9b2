#!/usr/bin/env bash
# One run on a TPU VM of one host that gcloud already knows (v5p-8: 4 chips, v6e-8: 8 chips): clone, install, start.
# The papers' run (64 + 64 chips) spans many hosts; the trainer is one process so far, so give meshes that fit the host,
# for example --config.mesh.trainer.fsdp=4 --config.mesh.sampler.data=2 --config.mesh.sampler.expert=2
# --config.mesh.sampler.tensor=1 --config.learner.microbatch_rows=4 on eight chips. Not yet run on TPU hardware: see
# the plan first with --dry-run, here or on any machine.
#
#   TPU=name ZONE=zone REPO=git-url MODEL=/path DATA=/path WORKDIR=/path launch/tpu_vm.sh [--config.KEY=VALUE ...]
#
# MODEL, DATA and WORKDIR are folders of the VM (a disk or a mounted bucket).
set -euo pipefail
: "${TPU:?}" "${ZONE:?}" "${REPO:?}" "${MODEL:?}" "${DATA:?}" "${WORKDIR:?}"

run="set -e
test -d jaxrl_sat || git clone '$REPO' jaxrl_sat
cd jaxrl_sat
make venv EXTRA=tpu
.venv/bin/python -m jaxrl_sat.main --config=configs/sat_grpo.py:tpu --workdir='$WORKDIR' \
  --config.model.path='$MODEL' --config.data.path='$DATA' ${*@Q}"

exec gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=0 --command="$run"
