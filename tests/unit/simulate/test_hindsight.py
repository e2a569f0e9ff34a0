"""What a forecast would have been worth, from rollouts whose pass rates are known."""

from __future__ import annotations

import json

import numpy as np
import pytest

from goldilocks.cli import main
from goldilocks.runs.records import read_records, write_records
from goldilocks.simulate.hindsight import look_back, read_outcomes

N = 8


def dump(path, *, seed=0, steps=12, groups=24, told=True, spread=None):
    """verl's dumps: sums whose pass rate follows from how many digits they have; ``told``: the text says it."""
    rng = np.random.default_rng(seed)
    number = 0
    for step in range(1, steps + 1):
        rows = []
        for group in range(groups):
            digits = int(rng.integers(1, 6))
            rate = (0.97, 0.8, 0.5, 0.2, 0.03)[digits - 1]
            if spread:
                rate = rng.beta(spread * rate, spread * (1 - rate))
            text = "7" * digits if told else "prompt"
            for rollout in range(N):
                score = float(rng.random() < rate)
                uid = f"s{step}g{group}_{rollout}_0"
                rows.append({"input": f"Add {text} and {number}x.", "output": "", "gts": "", "score": score,
                             "step": step, "uid": uid, "digits": digits})  # fmt: skip
            number += 1
        write_records(path / f"{step}.jsonl", rows)
    return path


def test_where_the_text_tells_the_difficulty_a_forecast_is_worth_rollouts(tmp_path):
    found = look_back(read_outcomes(dump(tmp_path)))
    assert (found.prompts, found.groups, found.rollouts) == (288, 288, 288 * N)
    assert found.scored == 264, "all but those of the first step"
    assert found.skill > 0.25
    assert found.worth > 4 * found.worth_of_mean
    assert found.informative_by_rank[0] > found.informative_by_rank[-1] + 0.3
    assert 1.2 < found.signal_of_best <= found.ceiling


def test_where_it_does_not_the_forecast_is_no_better_than_the_mean(tmp_path):
    found = look_back(read_outcomes(dump(tmp_path, told=False)))
    assert found.skill < 0.02
    assert found.worth < 1.5 * found.worth_of_mean


def test_worth_is_the_strength_of_what_prompts_of_one_kind_have_in_common(tmp_path):
    found = look_back(read_outcomes(dump(tmp_path, steps=40, spread=5.0)))
    assert 3 < found.worth < 8


def test_the_ceiling_is_a_quarter_over_the_mean_variance(tmp_path):
    found = look_back(read_outcomes(dump(tmp_path, steps=40)))
    rates = np.array([0.97, 0.8, 0.5, 0.2, 0.03])
    assert found.ceiling == pytest.approx(0.25 / (rates * (1 - rates)).mean(), rel=0.1)


def test_the_command_says_it_in_lines_and_as_json(tmp_path, capsys):
    dump(tmp_path / "run" / "rollouts")
    assert main(["forecast", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "264 first visits forecast" in printed
    assert [line.split()[0] for line in printed.splitlines()[5:8]] == ["mean", "strata", "forecast"]
    assert "would have known most" in printed
    assert main(["forecast", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["strata"]["scored"] == found["forecast"]["scored"] == 264


def test_strata_are_of_the_text_or_of_a_column_of_the_rollouts(tmp_path, capsys):
    assert look_back(read_outcomes(dump(tmp_path / "told")), "strata").skill > 0.25
    dump(tmp_path / "untold", told=False)
    assert main(["forecast", str(tmp_path / "untold")]) == 0
    assert "no prior would have known more than the mean" in capsys.readouterr().out
    outcomes = read_outcomes(tmp_path / "untold")
    assert look_back(outcomes, "strata", ["digits"]).skill > 0.25
    with pytest.raises(ValueError, match=r"columns='level' is not accepted: .* digits"):
        look_back(outcomes, "strata", ["level"])


def test_a_run_that_is_too_short_to_say_anything_is_refused(tmp_path, capsys):
    dump(tmp_path, steps=1)
    assert main(["forecast", str(tmp_path)]) == 2
    assert "0 first visits" in capsys.readouterr().err


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_quarters_have_a_share_where_a_step_has_fewer_first_visits_than_quarters(tmp_path, groups):
    found = look_back(read_outcomes(dump(tmp_path, steps=70, groups=groups)))
    assert np.isfinite([*found.informative_by_rank, found.signal_of_best, found.ceiling]).all()
    assert found.informative_by_rank[0] > found.informative_by_rank[-1]


def dump_with_states(path, *, steps=12, seed=3):
    """A file whose hidden states tell the difficulty and whose text does not; its last step comes first."""
    dump(path.parent / "steps", steps=steps, seed=seed, told=False)
    rows = [row for step in range(steps, 0, -1) for row in read_records(path.parent / "steps" / f"{step}.jsonl")]
    write_records(path, rows)
    digits = np.array([row["digits"] for row in rows[::N]], dtype=np.float32)
    noise = np.random.default_rng(seed).standard_normal((len(digits), 32), dtype=np.float32)
    states = np.hstack([digits[:, None] + 0.1 * noise[:, :16], noise[:, 16:]])
    np.save(path.with_suffix(".npy"), states)
    return states


def test_hidden_states_beside_the_file_are_a_row_of_their_own(tmp_path, capsys):
    file = tmp_path / "rates.jsonl"
    states = dump_with_states(file)
    assert main(["forecast", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["strata", "forecast", "hidden"]
    assert found["hidden"]["skill"] > 0.25 > 0.02 > found["forecast"]["skill"]
    assert main(["forecast", str(file)]) == 0
    assert "goldilocks.features.kind=hidden would have known most" in capsys.readouterr().out
    shuffled = tmp_path / "shuffled.npy"
    np.save(shuffled, np.random.default_rng(0).permutation(states))
    assert main(["forecast", str(file), "--hidden-states", str(shuffled), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hidden"]["skill"] < 0.02, "states of other prompts say nothing"


def test_strata_by_column_and_by_text_stand_side_by_side(tmp_path, capsys):
    dump(tmp_path, told=False)
    assert main(["forecast", str(tmp_path), "--column", "digits", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["strata", "strata_text", "forecast"]
    assert found["strata"]["skill"] > 0.25 > 0.02 > found["strata_text"]["skill"]


def test_hidden_states_that_are_not_those_of_the_prompts_are_refused_in_one_line(tmp_path, capsys):
    file = tmp_path / "rates.jsonl"
    states = dump_with_states(file)
    broken = states.copy()
    broken[7, 3] = np.nan
    for wrong, accepted in (
        (states[1:], "288 rows, one for each prompt of RUN, and not the shape (287, 32)"),
        (states[:, 0], "288 rows, one for each prompt of RUN, and not the shape (288,)"),
        (broken, "finite numbers"),
        (np.array([["a"]] * 288), "a .npy file of numbers"),
        (np.array([[None]] * 288), "a .npy file of numbers"),
    ):
        np.save(file.with_suffix(".npy"), wrong, allow_pickle=True)
        assert main(["forecast", str(file)]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert f"rates.npy' is not accepted: {accepted}" in line
    for content in (b"", b"no array"):
        file.with_suffix(".npy").write_bytes(content)
        assert main(["forecast", str(file)]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "rates.npy' is not accepted: a .npy file of numbers" in line
    assert main(["forecast", str(file), "--hidden-states", str(tmp_path / "none.npy")]) == 2
    assert "none.npy' is not accepted: a .npy file of numbers" in capsys.readouterr().err
