"""metrics.jsonl survives kills and resumes; numbers that are not finite stay readable JSON."""

import json

from jaxrl_sat import metrics


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_resume_cuts_back_to_the_checkpoint_and_drops_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = metrics.JsonLines(path, None)
    for step in range(6):
        first.write(step, {"reward/mean": step / 10})
    first.close()
    path.write_text(path.read_text() + '{"step": 6, "rew')
    second = metrics.JsonLines(path, 3)
    second.write(4, {"reward/mean": 9.0})
    second.close()
    assert lines(path) == [{"step": s, "reward/mean": s / 10} for s in range(4)] + [{"step": 4, "reward/mean": 9.0}]


def test_a_run_that_starts_over_leaves_no_line_behind(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward/mean": 1.0}\n')
    metrics.JsonLines(path, None).close()
    assert path.read_text() == ""


def test_not_finite_is_null(tmp_path):
    sink = metrics.JsonLines(tmp_path / "metrics.jsonl", None)
    sink.write(1, {"train/loss": float("nan"), "train/grad_norm": float("inf"), "reward/mean": 0.5})
    sink.close()
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "train/loss": None, "train/grad_norm": None, "reward/mean": 0.5}
    ]


def test_log_reaches_every_sink_and_closes_them_on_error(tmp_path):
    class Recorder:
        def __init__(self):
            self.seen, self.closed = [], False

        def write(self, step: int, metrics: metrics.Metrics) -> None:
            self.seen.append((step, metrics))

        def flush(self) -> None:
            pass

        def close(self) -> None:
            self.closed = True

    sinks = [Recorder(), Recorder()]
    try:
        with metrics.Log(sinks) as log:
            log.write(2, {"a": 1.0})
            raise RuntimeError
    except RuntimeError:
        pass
    assert all(sink.seen == [(2, {"a": 1.0})] and sink.closed for sink in sinks)


def test_tensorboard_writes_event_files(tmp_path):
    sink = metrics.TensorBoard(tmp_path, None)
    sink.write(1, {"reward/mean": 0.5})
    sink.close()
    written = b"".join(p.read_bytes() for p in tmp_path.iterdir())
    assert b"reward/mean" in written
