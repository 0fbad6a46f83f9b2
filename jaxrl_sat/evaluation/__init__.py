"""How often a model is right: avg@k and pass@k with intervals, the work folder of an evaluation, and two compared."""
