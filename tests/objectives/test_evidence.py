"""What is wrong with an argument is said at trace time, by its name, without the annotations that tests switch on."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sat.objectives import RECIPES
from jaxrl_sat.objectives.evidence import KINDS, PER_CHOICE, PER_TOKEN, check_evidence, sanitise
from jaxrl_sat.objectives.policy_loss import policy_loss
from tests.objectives.helpers import random_evidence

FIELDS = [name for name in (*PER_TOKEN, *PER_CHOICE) if name not in ("logp", "topk_ids")]


@pytest.mark.parametrize("name", FIELDS)
def test_wrong_shape_is_named(name: str) -> None:
    evidence = random_evidence(0)
    bad = dataclasses.replace(evidence, **{name: getattr(evidence, name)[:, 1:]})
    with pytest.raises(ValueError, match=rf"evidence\.{name} has shape \(4, 11"):
        jax.eval_shape(lambda e: sanitise(e, ("logp",)), bad)


@pytest.mark.parametrize("name", [*FIELDS, "logp", "topk_ids"])
def test_wrong_dtype_is_named(name: str) -> None:
    evidence = random_evidence(0)
    other = jnp.int32 if name not in KINDS else jnp.float32
    bad = dataclasses.replace(evidence, **{name: getattr(evidence, name).astype(other)})
    with pytest.raises(ValueError, match=rf"evidence\.{name} has dtype"):
        check_evidence(bad)


WITHOUT_HOOK = """
import jax.numpy as jnp
from jaxrl_sat import objectives as obj
x = jnp.zeros((2, 3))
for what, call in {
    "evidence.logp_mu has shape (2, 2)": lambda: obj.policy_loss(
        obj.RECIPES["sat_gspo"](), obj.make_evidence(x, x[:, :2], jnp.ones(2), jnp.ones((2, 3), bool))),
    "evidence.mask has dtype float32": lambda: obj.policy_loss(
        obj.RECIPES["ppo"](), obj.make_evidence(x, x, jnp.ones(2), x)),
    "group_ids has shape (3,)": lambda: obj.group_normalised(jnp.ones(2), jnp.zeros(3, int), 1),
    "group_ids has dtype float32": lambda: obj.leave_one_out(jnp.ones(2), jnp.zeros(2), 1),
    "logp_ref has shape (2, 2)": lambda: obj.kl_estimate(x, x[:, :2]),
    "support has shape (2, 2)": lambda: obj.entropy(x, jnp.ones((2, 2), bool)),
}.items():
    try:
        call()
    except ValueError as error:
        print(what if what in str(error) else f"NOT {what}: {error}")
    else:
        print(f"NOTHING for {what}")
"""


def test_plain_checks_without_annotations() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_HOOK], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6 and not [line for line in lines if line.startswith("NO")], lines


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_broken_token_is_dropped_and_counted(name: str) -> None:
    """NaN in a field that the objective reads, on an active token: the rest is as if the token were masked out."""
    evidence = random_evidence(1)
    objective: Any = RECIPES[name]()
    where = tuple(np.argwhere(np.asarray(evidence.mask))[3])
    for field in sorted(objective.reads & {"logp", "logp_mu", "logp_old"}):
        broken = dataclasses.replace(evidence, **{field: getattr(evidence, field).at[where].set(jnp.nan)})
        without = dataclasses.replace(evidence, mask=evidence.mask.at[where].set(False))
        got, want = policy_loss(objective, broken), policy_loss(objective, without)
        assert int(got.n_nonfinite) == 1 and int(want.n_nonfinite) == 0
        np.testing.assert_array_equal(got.per_token, want.per_token)
        np.testing.assert_array_equal((got.loss_sum, got.count), (want.loss_sum, want.count))
