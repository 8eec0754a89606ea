import math
import re

from forge_mlx.train import expert_report
from forge_mlx.train.expert_report import expert_section
from forge_mlx.train.metrics import MetricsLog
from forge_mlx.train.report import load_run, write_report
import numpy as np
import pytest


def _moe(step, layers=2, experts=4):
    """One record's field: expert 1 of the last layer takes twice the mean, expert 3 of the first layer nothing."""
    load = np.full((layers, experts), 100)
    load[-1, 1] = 200
    load[0, 3] = 0
    return {
        "layers": list(range(1, layers + 1)),
        "load": load.tolist(),
        "max_over_mean": (load.max(axis=1) / load.mean(axis=1)).tolist(),
        "entropy": [1.0 + step / 1000] * layers,
        "dropped": 0,
        "bias_range": [[-0.01 * step, 0.02 * step]] * layers,
        "aux_loss": [1.01] * layers,
        "z_loss": [3.5] * layers,
    }


def _write(folder, records):
    """A run whose training records hold these, at steps 10, 20 ..."""
    folder.mkdir()
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.log("setup", 0, time=0.0, parameters=10, total_steps=1000)
        for index, moe in enumerate(records, 1):
            fields = {} if moe is None else {"moe": moe}
            log.log("train", 10 * index, time=float(index), loss=2.0, **fields)
    return load_run(folder)


@pytest.fixture
def write(tmp_path):
    return lambda records: _write(tmp_path / "run", records)


def _text(run):
    page = re.sub(r"<(style|script)>.*?</\1>", "", write_report(run).read_text("utf-8"), flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


def _titles(section):
    return [chart["title"] for chart in section["charts"]]


def test_section_has_a_map_of_each_layer_and_every_number(write):
    run = write([_moe(step) for step in range(10, 60, 10)])
    section = expert_section(run, [])
    assert [each["title"] for each in section["maps"]] == ["layer 1", "layer 2"]
    assert [each["hover"] for each in section["maps"]] == [{"last": 50, "columns": 5, "rows": 4}] * 2
    assert _titles(section) == [
        "load of the busiest expert, mean = 1",
        "entropy of the router, nats",
        "selection bias, lowest and highest",
        "auxiliary loss before its weight",
        "router z-loss before its weight",
    ]
    busiest, entropy, bias, aux, _ = section["charts"]
    assert busiest["hover"]["lines"][1]["texts"] == ["1.6"] * 5
    assert busiest["rule"][0] == aux["rule"][0] == "balanced"
    assert entropy["rule"][0] == "uniform, ln 4 = 1.386"
    assert entropy["hover"]["lines"][0]["texts"][-1] == "1.050"
    assert {line["texts"][-1] for line in bias["hover"]["lines"]} == {"-0.5", "1"}
    assert section["unknown"] is False
    assert section["notes"] == []


def test_page_shows_the_section(write):
    records = [_moe(step) for step in range(10, 60, 10)]
    records[0]["load"] = [[1, 0, 0, 0], [1, 0, 0, 0]]
    text = _text(write(records))
    for part in (
        "experts 4 in each of 2 layers",
        "highest load / mean 1.60 expert 1 of layer 2, last record",
        "idle experts 1 of 8 without a token in the last record",
        "dropped tokens 0 over the whole run",
        "a column the sum over 10 steps",
        "layer 1 experts 0 to 3",
        "uniform, ln 4 = 1.386",
    ):
        assert part in text
    assert "not logged" not in text


def test_page_still_asks_for_no_other_file(write):
    page = write_report(write([_moe(10)])).read_text("utf-8")
    sources = re.findall(r'src="(.{10})', page)
    assert sources == ["data:image"] * 2
    assert not re.search(r"https?:|url\(|@import|fetch\(|import\(", page)
    # A name of the imported parts that is missing would leave braces behind.
    assert "{{" not in page
    assert "{%" not in page


def test_run_without_experts_has_no_such_section(write):
    run = write([None, None])
    assert expert_section(run, []) is None
    text = _text(run)
    assert "Experts" not in text
    assert "quantis" not in text


def test_no_bias_no_chart_of_it(write):
    assert "selection bias, lowest and highest" not in _titles(
        expert_section(write([_moe(10) | {"bias_range": None}] * 3), [])
    )


def test_dropped_tokens_are_summed(write):
    figures = expert_section(write([_moe(10) | {"dropped": 3}, _moe(20) | {"dropped": 4}]), [])["figures"]
    assert figures[-1] == ("dropped tokens", "7", "over the whole run")


@pytest.mark.parametrize(
    "state",
    [
        "one record",
        "no load",
        "no layers",
        "load only",
        "nothing",
        "NaN",
        "all None",
        "text",
        "gap",
        "first record bad",
        "layers disagree",
    ],
)
def test_any_state_has_a_section(write, state):
    records = [_moe(step) for step in range(10, 60, 10)]
    if state == "one record":
        records = records[:1]
    elif state == "no load":
        records = [{name: value for name, value in each.items() if name != "load"} for each in records]
    elif state == "no layers":
        records = [{name: value for name, value in each.items() if name != "layers"} for each in records]
    elif state == "load only":
        records = [{"load": each["load"]} for each in records]
    elif state == "nothing":
        records = [{"later": 1}] * 5
    elif state == "NaN":
        records[3] |= {"load": [[math.nan] * 4, [1, 2, 3, 4]], "entropy": [math.inf, math.nan], "dropped": math.nan}
    elif state == "all None":
        records = [dict.fromkeys(each) for each in records]
    elif state == "text":
        records[4] |= {"load": "many", "entropy": "high", "layers": "all", "bias_range": [1, 2]}
    elif state == "gap":
        records[2] = None
    elif state == "first record bad":
        records[0] |= {"load": [[1, 2, 3], [4, 5]], "z_loss": [1.0, 2.0, 3.0]}
    elif state == "layers disagree":
        records[4] |= {"layers": [1, 2, 3]}
    run = write(records)
    section, text = expert_section(run, [30]), _text(run)
    without_maps = state in ("no load", "nothing", "all None")
    assert len(section["maps"]) == (0 if without_maps else 2)
    assert ("not logged" in text) is (state in ("NaN", "gap", "text", "first record bad"))
    assert ("dropped tokens n/a" in text) is (state in ("load only", "nothing", "NaN", "all None"))
    assert ("experts n/a" in text) is without_maps
    left_out = {"text": ["load", "bias_range", "entropy"], "first record bad": ["load", "z_loss"]}.get(state, [])
    assert section["notes"] == [
        f"Left out: {name} of 1 record(s), not one value for each layer and expert." for name in left_out
    ]
    assert all(note in text for note in section["notes"])
    if state == "no layers":
        assert [each["title"] for each in section["maps"]] == ["layer 0", "layer 1"]
    if state == "gap":
        assert "dropped tokens 0 1 record(s) say nothing of it" in text


def test_a_gap_is_as_long_as_the_steps_without_a_record(write):
    records = [_moe(step) for step in range(10, 110, 10)]
    records[4:6] = None, None
    run = write(records)
    with MetricsLog(run.folder / "metrics.jsonl") as log:
        log.log("event", 125, time=1.0, message="stopped")
    section = expert_section(load_run(run.folder), [])
    # Columns of about 10 steps to step 125: two of them in the gap, and what lies behind the last record.
    assert section["maps"][0]["hover"]["columns"] == 12
    assert section["unknown"] is True


def test_records_of_one_step_count_once(write):
    run = write([_moe(10), _moe(20) | {"dropped": 2}])
    with MetricsLog(run.folder / "metrics.jsonl") as log:
        log.log("train", 20, time=3.0, loss=2.0, moe=_moe(20) | {"dropped": 5})
    section = expert_section(load_run(run.folder), [])
    assert section["figures"][-1][1] == "5"
    assert section["maps"][0]["hover"]["columns"] == 2


@pytest.mark.slow
def test_page_of_many_layers_and_experts_is_small_and_says_what_it_smooths(write):
    rng = np.random.default_rng(0)
    records = []
    for step in range(10, 610, 10):
        load = rng.poisson(100 * np.exp(rng.normal(0, 0.5, (24, 64))))
        noise = rng.normal(1, 0.1, (5, 24)).tolist()
        records.append(_moe(step, 24, 64) | {"load": load.tolist(), "max_over_mean": noise[0], "entropy": noise[1]})
    run = write(records)
    page = write_report(run)
    assert page.stat().st_size < 400_000
    text = _text(run)
    assert "With this many layers each layer's line is smoothed" in text
    assert "highest and lowest" in text
    assert page.read_text("utf-8").count('class="plot heat"') == 24
    assert 'class="charts small"' in page.read_text("utf-8")


def test_many_cells_share_a_page(write, monkeypatch):
    run = write([_moe(step) for step in range(10, 510, 10)])
    monkeypatch.setattr(expert_report, "COLUMNS", (6, 40))
    for cells, columns in ((1, 6), (8 * 20, 20), (8 * 100, 40)):
        monkeypatch.setattr(expert_report, "MAX_CELLS", cells)
        assert {each["hover"]["columns"] for each in expert_section(run, [])["maps"]} == {columns}
