"""How far the sampler lags behind the trainer: the schedule of versions, and the hand-over of weights."""
