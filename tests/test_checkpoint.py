"""Checkpoints give back every bit, refuse what does not fit, and an unfinished write hides nothing."""

import gc
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_sat.checkpoint import Checkpointer
from jaxrl_sat.types import InputError, TrainState

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def make_state(step: int, value: float, shape=(2, 3)) -> TrainState:
    params = {"layer": {"kernel": jnp.full(shape, value, jnp.float32)}}
    return TrainState(
        params=params, opt_state=OPTIMIZER.init(params), step=jnp.int32(step), skipped=jnp.int32(step // 2)
    )


def abstract_state(state: TrainState) -> TrainState:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


@pytest.fixture
def checkpoints(tmp_path):
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=2)
    yield checkpointer
    checkpointer.close()


def test_state_and_versions_come_back_bitwise(checkpoints):
    assert checkpoints.latest() is None
    state = make_state(4, 1 / 3)
    older = {"layer": {"kernel": jnp.full((2, 3), 0.1)}}
    checkpoints.save(state, {3: older, 4: state.params})
    checkpoints.wait()
    restored, versions = checkpoints.restore(abstract_state(make_state(0, 0.0)), lambda step: [3, step])
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert sorted(versions) == [3, 4]
    jax.tree.map(np.testing.assert_array_equal, versions[3], older)
    jax.tree.map(np.testing.assert_array_equal, versions[4], state.params)


def test_newest_complete_checkpoint_is_used_and_old_ones_go(checkpoints, tmp_path):
    for step in (1, 2, 3):
        checkpoints.save(make_state(step, float(step)), {})
    checkpoints.wait()
    kept = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert kept == ["2", "3"]
    # What kill -9 in the middle of a write leaves behind.
    (tmp_path / "checkpoints" / "4.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    fresh = Checkpointer(tmp_path / "checkpoints", keep=2)
    assert fresh.latest() == 3
    restored, _ = fresh.restore(abstract_state(make_state(0, 0.0)), lambda _: [])
    assert int(restored.step) == 3 and float(restored.params["layer"]["kernel"][0, 0]) == 3.0
    fresh.close()


# A restore that fails leaves reads of Orbax's behind, which complain when they are collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("abstract", "needed"), [(make_state(0, 0.0, (3, 3)), []), (make_state(0, 0.0), [1])], ids=["shape", "version"]
)
def test_what_does_not_fit_is_refused_in_one_line(checkpoints, abstract, needed):
    checkpoints.save(make_state(2, 1.0), {})
    checkpoints.wait()
    with pytest.raises(InputError, match="checkpoint 2 in .* does not fit this config") as error:
        checkpoints.restore(abstract_state(abstract), lambda _: needed)
    assert "\n" not in str(error.value)
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["emptied", "truncated", "flipped", "stray"])
def test_damaged_newest_checkpoint_does_not_hide_the_one_before(tmp_path, damage):
    folder = tmp_path / "checkpoints"
    first = Checkpointer(folder, keep=3)
    for step in (1, 2):
        first.save(make_state(step, float(step)), {})
    first.close()
    if damage == "stray":
        (folder / "7").mkdir()
    elif damage == "emptied":
        shutil.rmtree(folder / "2" / "state")
    elif damage == "flipped":  # one byte of the arrays, which their own format does not notice
        largest = max((folder / "2" / "state").rglob("*"), key=lambda path: path.is_file() * path.stat().st_size)
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 0xFF
        largest.write_bytes(data)
    else:
        for path in (folder / "2" / "state").rglob("*"):
            if path.is_file():
                path.write_bytes(path.read_bytes()[:3])
    second = Checkpointer(folder, keep=3)
    state, _ = second.restore(abstract_state(make_state(0, 0.0)), lambda _: [])
    assert int(state.step) == (2 if damage == "stray" else 1)
    after = 2 if damage == "flipped" else 3  # one written anew under the number of a damaged one is good again
    second.save(make_state(after, 9.0), {})
    second.wait()
    assert second.latest() == after
    state, _ = second.restore(abstract_state(make_state(0, 0.0)), lambda _: [])
    assert int(state.step) == after and float(state.params["layer"]["kernel"][0, 0]) == 9.0
    assert len(list((tmp_path / "checkpoints_unreadable").iterdir())) == 1
    second.close()
    gc.collect()
