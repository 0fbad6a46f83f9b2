"""Compiles a configuration's programs at full size for a TPU that is not there: what they need, and whether they fit.

    python -m jaxrl_sat.aot --config=configs/sat_grpo.py:tpu --topology=v5p:4x4x4

JAX and the TPU compiler are loaded by `__main__` alone, after it has set their environment.
"""
