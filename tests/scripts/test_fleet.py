"""scripts/fleet.py: the model of a replica beside real engines, traffic's means, and what becomes
of requests where replicas die.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import fleet
import pytest
from _fleet_device import StepTimes
from _fleet_traffic import KINDS, Asked, token_ids, traffic, unshared

TIMES = StepTimes.planned(billions=8, tflops=400, memory_gb_s=2500, kv_kib=128)
FLEET = fleet.Fleet(
    replicas=2,
    kind="code",
    router="prefix",
    rate=2.0,
    seconds=12.0,
    swing=0.0,
    times=TIMES,
    sizes=fleet.Sizes(pool=60_000, host=0, files=0),
)


def test_the_model_predicts_real_engines() -> None:
    """Their scheduler, block manager and prefix cache, over a device that takes the same times."""
    modelled, real = fleet.simulate(FLEET), fleet.run_engines(FLEET)
    assert modelled["requests"] == real["requests"] > 30
    assert modelled["hit_rate"] == pytest.approx(real["hit_rate"], abs=0.05)
    for name in ("first_p50_s", "first_p90_s", "whole_p50_s"):
        assert modelled[name] == pytest.approx(real[name], rel=0.2), name


# Prompts, answers and reuse in the papers; Azure's have no reuse.
PAPERS = {
    "conversation": (12035, 343, 0.40),
    "tools": (8596, 182, 0.59),
    "chat": (1600, 110, None),
    "code": (2500, 25, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_traffic_has_the_means_of_its_trace(kind: str) -> None:
    asks = list(traffic(KINDS[kind], rate=20, seconds=300))
    seen, reused = set[int](), 0
    for asked in asks:
        reused += asked.before if asked.answers else asked.system * (asked.which in seen)
        seen.add(asked.which)
    prompt, answer, share = PAPERS[kind]
    tokens = sum(asked.prompt for asked in asks)
    assert tokens / len(asks) == pytest.approx(prompt, rel=0.06)
    assert sum(asked.answer for asked in asks) / len(asks) == pytest.approx(answer, rel=0.06)
    assert share is None or reused / tokens == pytest.approx(share, abs=0.03)
    assert [asked.at for asked in asks] == sorted(asked.at for asked in asks)
    assert len([asked for asked in asks if asked.at >= 0]) == pytest.approx(20 * 300, rel=0.1)


def test_days_swing() -> None:
    asks = list(traffic(KINDS["code"], rate=50, seconds=240, swing=0.8))
    night, noon = (len([x for x in asks if 10 * h <= x.at < 10 * h + 30]) for h in (3, 15))
    assert noon > 4 * night > 0


def test_ids_are_equal_where_prefixes_are() -> None:
    first = Asked(0.0, 7, 3, 4, 4, 10, 2)
    later = Asked(1.0, 7, 3, 4, 12, 15, 2, ((10, 12),))
    other = Asked(0.0, 8, 3, 4, 4, 10, 2)
    ids, next_ids, others = map(token_ids, (first, later, other))
    assert next_ids[:10] == ids and next_ids[10:12] == [0, 0] and len(next_ids) == 15
    assert others[:4] == ids[:4] and others[4] != ids[4]


def test_routers() -> None:
    """Who sends sessions where their prefix is finds more, and nobody is left without an answer."""
    wide = dataclasses.replace(FLEET, replicas=30, kind="tools", rate=1.0, seconds=60.0)
    reports = {
        router: fleet.simulate(dataclasses.replace(wide, router=router)) for router in fleet.ROUTERS
    }
    rates = [reports[router]["hit_rate"] for router in ("two", "sticky", "prefix")]
    assert rates == sorted(rates) and rates[-1] > 1.2 * rates[0]
    assert reports["two"]["first_p99_s"] < reports["round_robin"]["first_p99_s"]
    assert len({report["requests"] for report in reports.values()}) == 1


def test_deaths_lose_no_request() -> None:
    files = dataclasses.replace(FLEET.sizes, pool=30_000, files=1_000_000)
    times = dataclasses.replace(TIMES, disk_rate=2e10)
    calm = dataclasses.replace(FLEET, replicas=8, rate=2.0, seconds=60.0, times=times)
    deadly = dataclasses.replace(calm, mtbf_s=80.0, cold_start_s=10.0)
    before, after = fleet.simulate(calm), fleet.simulate(deadly)
    assert after["deaths"] > 3 and after["restarted"] > 0
    assert after["requests"] == before["requests"]
    kept = fleet.simulate(dataclasses.replace(deadly, sizes=files))
    without = fleet.simulate(dataclasses.replace(deadly, sizes=dataclasses.replace(files, files=0)))
    assert kept["hit_rate"] > without["hit_rate"] and kept["hits"]["files"] > 0
    assert kept["requests"] == without["requests"] == before["requests"]


def test_what_is_dearer_to_fetch_is_computed() -> None:
    files = dataclasses.replace(FLEET.sizes, pool=20_000, files=1_000_000)
    for rate, is_fetched in ((1e6, False), (2e10, True)):
        times = dataclasses.replace(TIMES, disk_rate=rate)
        report = fleet.simulate(dataclasses.replace(FLEET, sizes=files, times=times, seconds=60.0))
        assert (report["hits"]["files"] > 0) == is_fetched


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    times = tmp_path / "times.json"
    times.write_text(json.dumps(dataclasses.asdict(TIMES)))
    flags = ["--replicas", "1000", "--sample", "4", "--kind", "chat", "--seconds", "10"]
    flags += ["--routers", "two", "prefix", "--step-times", str(times), "--out", str(tmp_path)]
    assert fleet.main(flags) == 0
    saved: dict[str, Any] = json.loads((tmp_path / "results.json").read_text())
    assert saved["simulated"] == 4 and set(saved["reports"]) == {"two", "prefix"}
    for name in ("first_token", "hits"):
        assert (tmp_path / f"{name}.svg").stat().st_size > 1000
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    find = ["--replicas", "8", "--find", "--kind", "chat", "--seconds", "10", "--rate", "2"]
    assert fleet.main([*find, "--routers", "two", "--slo-s", "1"]) == 0
    assert "replicas for 16 requests a second" in capsys.readouterr().out
    for bad in (["--rate", "0"], ["--swing", "1"], ["--replicas", "0"]):
        with pytest.raises(SystemExit):
            fleet.main(bad)


def test_prompts_and_answers_apart() -> None:
    """Two kinds of replicas answer everything; a slow link costs; what is fetched is counted."""
    kind = unshared(2000, 40)
    apart = dataclasses.replace(FLEET, replicas=4, kind=kind, router="two", rate=1.0, seconds=20.0)
    fast, slow = (fleet.simulate_apart(apart, 2, rate) for rate in (50e9, 0.5e9))
    together = fleet.simulate(apart)
    assert fast["requests"] == slow["requests"] == together["requests"] > 50
    assert fast["hits"]["link"] > 0.9 and together["hits"]["link"] == 0
    assert fast["first_p50_s"] < slow["first_p50_s"]
    assert fast["token_p90_s"] < together["token_p90_s"], "no prompt comes between tokens"


def test_where_apart_pays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--apart", "--replicas", "3", "--seconds", "10", "--prompt-tokens", "4000"]
    assert fleet.main([*flags, "--answer-tokens", "100", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "results.json").read_text())["apart"]
    assert found["together"] > 0 and found["apart"] > 0 and found["prefill"] in (1, 2)
    assert "of 3 compute prompts" in capsys.readouterr().out
    for bad in (["--link-gb-s", "0"], ["--replicas", "1"]):
        with pytest.raises(SystemExit):
            fleet.main([*flags, *bad])
