"""Weights & Biases, offline: the file that it would send has our metrics' axis and the report's command."""

from __future__ import annotations

from pathlib import Path

import pytest

from goldilocks.runs.loggers import FAMILIES, show_grouped

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_wandb_draws_our_metrics_over_what_was_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    from verl.utils.tracking import Tracking

    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config.yaml").write_text("trainer: {}\n")
    tracking = Tracking("goldilocks", "test", "wandb")
    show_grouped(tracking.logger, str(tmp_path / "checkpoints"))
    tracking.log({"accounts/generated_rollouts": 8.0, "reward/brevity": -0.5}, step=1)
    tracking.finish()
    wandb.teardown()  # its service writes the file, and has written all of it when it has ended
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    written = file.read_bytes()
    assert [family for family in FAMILIES if f"{family}/*".encode() not in written] == []
    assert f"goldilocks report {tmp_path}".encode() in written
