"""Which devices train, which sample, and how arrays are cut over them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxrl_sat import mesh, model
from jaxrl_sat.config import RunConfig, from_config_dict
from jaxrl_sat.types import InputError
from tests.run_configs import TINY, flagship


def run(**trainer: int) -> RunConfig:
    config = flagship()
    config.mesh.trainer.update(trainer)
    return from_config_dict(config)


def test_the_first_devices_train_and_the_next_sample() -> None:
    meshes = mesh.make_meshes(run(fsdp=2), jax.devices())
    assert not meshes.colocated
    assert [device.id for device in meshes.trainer.devices.flat] == [0, 1]
    assert [device.id for device in meshes.samplers[0].devices.flat] == [2]
    assert dict(meshes.trainer.shape) == {"data": 1, "fsdp": 2, "expert": 1, "context": 1, "tensor": 1}
    assert dict(meshes.samplers[0].shape) == {"data": 1, "expert": 1, "tensor": 1}


def test_one_device_does_both_in_turns() -> None:
    meshes = mesh.make_meshes(run(), jax.devices()[:1])
    assert meshes.colocated
    assert meshes.trainer.devices.flat[0] is meshes.samplers[0].devices.flat[0]


def several(engines: int) -> RunConfig:
    """One device trains; each engine samples on two."""
    config = flagship()
    config.sampler.engines = engines
    config.mesh.sampler.tensor = 2
    return from_config_dict(config)


def test_engines_sample_on_devices_of_their_own() -> None:
    config = several(3)
    assert (mesh.devices_wanted(config), mesh.sampling_devices(config, 2)) == (7, 4)
    each = mesh.make_meshes(config, jax.devices()).of_engines
    assert [[device.id for device in one.samplers[0].devices.flat] for one in each] == [[1, 2], [3, 4], [5, 6]]
    assert all(one.trainer is each[0].trainer and len(one.samplers) == 1 for one in each)
    [alone] = mesh.make_meshes(run(), jax.devices()).of_engines
    assert [device.id for device in alone.samplers[0].devices.flat] == [1]


def test_engines_that_do_not_fit_are_named() -> None:
    message = (
        r"^mesh: 1 devices to train and 8 to sample by 4 sampler\.engines, 8 found; allowed: 9 or more devices, or"
    )
    with pytest.raises(
        InputError, match=message + r" smaller sampler\.engines, mesh\.trainer and mesh\.sampler sizes$"
    ):
        mesh.make_meshes(several(4), jax.devices())


@pytest.mark.parametrize(("sizes", "found"), [({"fsdp": 4}, 4), ({"fsdp": 2}, 1), ({"data": 2, "tensor": 2}, 2)])
def test_too_few_devices(sizes: dict[str, int], found: int) -> None:
    with pytest.raises(InputError, match=f"{found} found; allowed: {sum([*_product(sizes), 1])} or more devices"):
        mesh.make_meshes(run(**sizes), jax.devices()[:found])


def _product(sizes: dict[str, int]) -> list[int]:
    total = 1
    for size in sizes.values():
        total *= size
    return [total]


@pytest.mark.parametrize("rules", [mesh.TRAINER_RULES, mesh.SAMPLER_RULES])
def test_the_tables_know_every_axis_of_the_model(rules: mesh.Rules) -> None:
    axes = jax.tree.leaves(model.param_axes(model.ModelConfig.from_hf(TINY)))
    assert {"embed", "vocab", "heads", "kv_heads", "experts"} <= set(axes) <= set(rules)


def test_parameters_lie_as_the_table_says() -> None:
    config = model.ModelConfig.from_hf(TINY)
    meshes = mesh.make_meshes(run(fsdp=2), jax.devices())
    params = model.init_params(config, jax.random.key(0))
    layout = meshes.trainer_layout
    placed = jax.device_put(params, layout.place(model.param_specs(config, layout)))
    embedding = placed["embedding"]
    assert embedding.sharding.spec == PartitionSpec(None, "fsdp")
    assert embedding.addressable_shards[0].data.shape == (32, 8)
    assert jnp.array_equal(embedding, params["embedding"])


def test_an_axis_that_does_not_divide_is_named() -> None:
    config = model.ModelConfig.from_hf(TINY)
    mesh.check_fits(run(tensor=2), config)
    with pytest.raises(InputError, match=r"^mesh\.trainer\.tensor: 3; allowed: a divisor of "):
        mesh.check_fits(run(tensor=3), config)
    with pytest.raises(
        InputError, match=r"^mesh\.trainer\.fsdp x mesh\.trainer\.context: 64; allowed: a divisor of 16, "
    ):
        mesh.check_fits(run(fsdp=16, context=4), config)


def test_router_losses_need_a_router() -> None:
    sparse = model.ModelConfig.from_hf(TINY)
    dense = dataclasses.replace(sparse, mlp_only_layers=(0, 1))
    for name in ("load_balance_coef", "router_z_coef"):
        config = flagship()
        config.loss[name] = 0.01
        mesh.check_fits(from_config_dict(config), sparse)
        with pytest.raises(InputError, match=rf"^loss\.{name}: 0\.01; allowed: 0, as the model has no experts$"):
            mesh.check_fits(from_config_dict(config), dense)


def test_key_value_heads_are_shared_where_they_are_fewer() -> None:
    config = model.ModelConfig.from_hf(TINY)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    mesh.check_fits(run(tensor=4), config)


def test_experts_are_spread_where_there_are_some() -> None:
    plain = {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}
    dense = {name: value for name, value in TINY.items() if name not in plain} | {"model_type": "qwen3"}
    config = flagship()
    config.mesh.sampler.expert = 2
    with pytest.raises(InputError, match=r"^mesh\.sampler\.expert: 2; allowed: 1, as the model has no experts"):
        mesh.check_fits(from_config_dict(config), model.ModelConfig.from_hf(dense))
