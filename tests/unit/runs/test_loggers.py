"""Our metrics are grouped in the backends of verl's ``Tracking``: TensorBoard's file is read back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from documented_metrics import METRICS, OURS

from goldilocks.runs.files import Lines
from goldilocks.runs.history import History
from goldilocks.runs.loggers import CHARTS, FAMILIES, InFolders, log_file, logged_before, show_grouped

LOGGED = {"train/informative_groups": 3.0, "filter/dropped/too_hard": 2.0, "reward/brevity": -0.5}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory, as ``goldilocks train`` makes it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("trainer: {}\n")
    return tmp_path / "run"


@pytest.fixture
def events(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What TensorBoard finds after a step was logged."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from verl.utils.tracking import Tracking

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "events"))
    tracking = Tracking("goldilocks", "test", "tensorboard")
    show_grouped(tracking.logger, str(run / "checkpoints"))
    tracking.log(LOGGED, step=1)
    tracking.finish()
    return EventAccumulator(str(tmp_path / "events")).Reload()


def test_tensorboard_has_a_layout_in_which_what_is_logged_has_a_chart(events: Any, run: Path) -> None:
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    (tensor,) = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(tensor.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == list(CHARTS)
    tags = [tag for category in layout.category for chart in category.chart for tag in chart.multiline.tag]
    assert all(any(re.fullmatch(tag, name) for tag in tags) for name in LOGGED)
    assert set(events.Tags()["scalars"]) == set(LOGGED)
    (text,) = events.Tensors("goldilocks/report/text_summary")
    assert text.tensor_proto.string_val[0].decode() == f"`goldilocks report {run}`"


def test_a_run_without_a_directory_of_ours_has_no_report_to_name(tmp_path: Path) -> None:
    said: list[str] = []
    no_text = {"add_text": lambda tag, text: pytest.fail(text), "flush": lambda: None}
    adapter = SimpleNamespace(writer=SimpleNamespace(add_custom_scalars=said.extend, **no_text))
    show_grouped({"tensorboard": adapter, "console": object()}, str(tmp_path / "checkpoints"))
    assert said == list(CHARTS)


def test_every_chart_and_every_family_shows_a_metric_that_there_is() -> None:
    shown = [re.compile(tag) for charts in CHARTS.values() for tags in charts.values() for tag in tags]
    names = [re.sub(r"<\w+>", "x", name) for name in METRICS]
    assert [tag.pattern for tag in shown if not any(tag.fullmatch(name) for name in names)] == []
    assert set(FAMILIES) <= OURS


def test_no_metric_is_below_another_in_the_folders_of_mlflow() -> None:
    class Adapter:
        data: dict[str, float] = {}  # noqa: RUF012  # replaced, not changed

        def log(self, data: dict[str, float], step: int) -> None:
            self.data = data

    adapter = Adapter()
    names = [re.sub(r"<\w+>", "x", name) for name in METRICS]
    InFolders(adapter).log(dict.fromkeys(names, 1.0), step=1)
    logged = set(adapter.data)
    assert len(logged) == len(names)
    assert [name for name in logged if any(other.startswith(f"{name}/") for other in logged)] == []
    assert [name for name in logged if not re.fullmatch(r"[/\w.\- :]+", name)] == []  # mlflow's own rule


def test_verls_file_logger_goes_on_with_what_an_earlier_start_has_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.utils.tracking import FileLogger

    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path))
    trainer = SimpleNamespace(project_name="mine", experiment_name="first", resume_mode="auto")
    assert logged_before(trainer) == b""
    for step in (1, 2):
        earlier = logged_before(trainer)
        logger = FileLogger("mine", "first")
        logger.fp.write(earlier)
        logger.log({"a": step}, step)
        logger.finish()
    with log_file(trainer).open("ab") as file:
        file.write(b'{"step": 3')  # killed while it wrote
    assert History.of(Lines(log_file(trainer))).series("a") == {1: 1.0, 2: 2.0}
    assert logged_before(trainer).endswith(b'{"step": 3\n')
    trainer.resume_mode = "disable"
    assert logged_before(trainer) == b""
