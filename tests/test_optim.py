"""The float32 master copy of bfloat16 parameters: small updates add up, exactly as in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_sat.checkpoint import Checkpointer
from jaxrl_sat.optim import MasterCopy, apply_updates, make_optimizer, state_shardings
from jaxrl_sat.types import TrainState

UPDATES = 200
RATE = 1e-4  # near 1 bfloat16 has steps of 2^-7, so one update is a seventieth of what moves a parameter
ADAM = {"learning_rate": RATE, "b1": 0.9, "b2": 0.98, "eps": 1e-8, "max_grad_norm": 1e9}


def starting_params(dtype: Any) -> dict[str, jax.Array]:
    """Values that bfloat16 has, some of them so small that one update is many times their size."""
    rng = np.random.default_rng(0)
    values = {"large": rng.uniform(1, 2, (4, 8)), "small": rng.normal(0, 1e-6, (64,))}
    return {name: jnp.asarray(value, jnp.bfloat16).astype(dtype) for name, value in values.items()}


def gradients() -> dict[str, jax.Array]:
    """[UPDATES, ...]: mostly of one sign for `large`, of either for `small`."""
    rng = np.random.default_rng(1)
    return {
        "large": jnp.asarray(rng.normal(1, 0.1, (UPDATES, 4, 8)), jnp.float32),
        "small": jnp.asarray(rng.normal(0, 1, (UPDATES, 64)), jnp.float32),
    }


def trained(dtype: Any, master_copy: bool) -> tuple[dict[str, jax.Array], Any]:
    """The parameters after every update, [UPDATES, ...], and the optimizer's last state."""
    optimizer = make_optimizer(**ADAM, master_copy=master_copy)
    params = starting_params(dtype)

    @jax.jit
    def train(params: Any, state: Any) -> Any:
        def step(carry: Any, grads: Any) -> Any:
            params, state = carry
            updates, state = optimizer.update(grads, state, params)
            params = apply_updates(params, updates, state)
            return (params, state), params

        return jax.lax.scan(step, (params, state), gradients())

    (_, state), every = train(params, optimizer.init(params))
    return every, state


def test_updates_below_bfloat16s_resolution_add_up_exactly_as_in_float32() -> None:
    start = starting_params(jnp.bfloat16)
    exact, _ = trained(jnp.float32, master_copy=False)
    without, _ = trained(jnp.bfloat16, master_copy=False)
    with_copy, state = trained(jnp.bfloat16, master_copy=True)
    assert np.array_equal(without["large"][-1], start["large"])  # each update was lost
    moved = np.asarray(start["large"], np.float64) - np.asarray(with_copy["large"][-1], np.float64)
    assert np.all(np.abs(moved - UPDATES * RATE) < 2**-7)  # Adam steps by about its rate
    for name, values in exact.items():
        assert with_copy[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(with_copy[name], values.astype(jnp.bfloat16), err_msg=name)
        np.testing.assert_array_equal(state.master[name], values[-1], err_msg=name)


def sharded_state() -> tuple[TrainState, TrainState]:
    """A state on two devices, its master copy between two bfloat16 numbers, and its shape structs."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("fsdp",))
    cut = {"w": NamedSharding(mesh, PartitionSpec("fsdp"))}
    everywhere = NamedSharding(mesh, PartitionSpec())
    optimizer = make_optimizer(**ADAM, master_copy=True)
    params = jax.device_put({"w": jnp.ones((4, 8), jnp.bfloat16)}, cut)
    shardings = state_shardings(optimizer, params, cut)
    assert isinstance(shardings, MasterCopy) and shardings.master == cut
    opt_state = jax.jit(optimizer.init, out_shardings=shardings)(params)
    opt_state = opt_state._replace(master={"w": opt_state.master["w"] + jnp.float32(1e-5)})
    zero = jax.device_put(jnp.zeros((), jnp.int32), everywhere)
    state = TrainState(params=params, opt_state=opt_state, step=zero + 1, skipped=zero)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    return state, shapes


def test_master_copy_lies_beside_its_parameters_and_survives_a_checkpoint(tmp_path: Path) -> None:
    state, shapes = sharded_state()
    checkpoints = Checkpointer(tmp_path / "checkpoints", keep=1)
    checkpoints.save(state, {})
    checkpoints.wait()
    restored, _ = checkpoints.restore(shapes, lambda step: [])
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    master = restored.opt_state.master["w"]
    assert master.dtype == jnp.float32 and master.sharding.spec == PartitionSpec("fsdp")
    assert float(master[0, 0]) == np.float32(1) + np.float32(1e-5)
