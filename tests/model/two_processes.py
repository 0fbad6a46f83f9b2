"""One of two processes of four devices each, joined over loopback: python two_processes.py PORT NUMBER FOLDER

Loads a checkpoint by its own pieces, and compares loss and gradient on all eight devices with one device's.
"""

from __future__ import annotations

import json
import sys

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)


def main() -> None:
    port, number, folder = sys.argv[1:]
    jax.distributed.initialize(f"localhost:{port}", 2, int(number))
    import numpy as np

    from jaxrl_sat.layout import put
    from jaxrl_sat.model import Execution, load_hf, param_specs
    from tests.model import test_sharding as case

    tokens, ids, ((value, _), gradient) = case.one_device()
    report = {}
    for sizes in case.ACROSS:
        cut = case.layout(sizes)
        _, params = load_hf(folder, shardings=cut.place(param_specs(case.CONFIG, cut)))
        spread = put(np.asarray(tokens), cut.sharding(("rows", "sequence"), tokens.shape))
        execution = Execution(cut, router_sums=True)
        (found, _), found_gradient = case.value_and_gradient(params, spread, np.asarray(ids), execution)
        gaps = [abs(float(found) - float(value))]
        for whole, pieces in zip(jax.tree.leaves(gradient), jax.tree.leaves(found_gradient), strict=True):
            whole = np.asarray(whole)
            gaps += [float(np.max(np.abs(np.asarray(p.data) - whole[p.index]))) for p in pieces.addressable_shards]
        report["x".join(map(str, sizes))] = max(gaps)
    print(json.dumps({"devices": jax.device_count(), "gaps": report}))


if __name__ == "__main__":
    main()
