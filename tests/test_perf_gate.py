"""Gate rules and verdicts on records with planted times and errors."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from ground.errors import BadInput
from ground.ports import OutputPort, Role
from perf.gate.evidence import Evidence
from perf.gate.gate import EXIT_CODES, Gate, JudgedRule, judge
from perf.gate.gate import PARITY as PROOF
from perf.gate.rule import rule_from_text
from perf.gate.verdicts import junit_from_gate, load_gate, markdown_from_gate, save_gate
from perf.parity.link import Link, LinkKind
from perf.parity.parity import ImageSet, Parity
from perf.parity.tolerance import judge_measures as judge_link
from perf.parity.tolerance import user_tolerance
from perf.record.runs import OUT_OF_TIME, Bench, BenchTrial, Row, SubjectRecord, TimedBlock
from perf.record.states import CpuState
from perf.stats.compare import compare_records, markdown_from_comparison, ratio_of_independent
from perf.stats.stats import Interval
from perf.stats.summary import summarise
from tests.doubles import some
from tests.histories import block, row
from tests.links import link_between
from tests.refusals import rejects

Times = Mapping[str, "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"]


def noisy(ms: float, spread: float = 0.01, rounds: int = 20, calls: int = 20, seed: int = 0) -> Any:
    return ms * np.random.default_rng(seed).lognormal(sigma=spread, size=(rounds, calls))


def row_of(batch: int, times: Times, *, lost_rel: float = 0.0) -> Row:
    trials = {name: BenchTrial(status="ok", warm_up_flat=True, peak_memory_bytes=1000) for name in times}
    rounds = ((index, name, ms) for name, rounds_ms in times.items() for index, ms in enumerate(rounds_ms))
    return row(batch, (block(index, name, ms, lost_rel=lost_rel) for index, name, ms in rounds), trials=trials)


def bench_of(*rows: Row, gpu: str = "A Card", dense_sha: str | None = None, reduced_bytes: int = 600) -> Bench:
    describe = {"backend": "onnxruntime", "precision": "fp32", "model": "m.onnx"}
    dense = SubjectRecord(
        name="dense", describe=describe, macs=10, size_bytes=1000, sha256=dense_sha, fused_attention=12,
        plan_bytes=1000, device_memory={"1:1:4": 3_000_000, "2:8:16": 9_000_000},
    )  # fmt: skip
    reduced = SubjectRecord(
        name="reduced", describe=describe, macs=5, size_bytes=reduced_bytes, fused_attention=8, sparse_layers=6,
        plan_bytes=1200, device_memory={"1:1:4": 2_000_000, "2:8:16": 8_000_000},
    )  # fmt: skip
    return Bench(
        created="2026-01-01T00:00:00+00:00", command=(), environment={"gpu": gpu, "load_average": 0.1},
        settings={"streams": 1, "flush_l2": False}, subjects=(dense, reduced), rows=rows, warnings=(),
    )  # fmt: skip


def plain(
    dense_ms: float = 10.0, reduced_ms: float = 8.0, spread: float = 0.01, rounds: int = 20, **more: Any
) -> Bench:
    times = {"dense": noisy(dense_ms, spread, rounds, seed=1), "reduced": noisy(reduced_ms, spread, rounds, seed=2)}
    return bench_of(row_of(8, times), **more)


def test_time_fails_only_at_a_fifth_of_the_doubt() -> None:
    """The interval at 95 % breaks the rule, that at 99 % does not."""
    bench = plain(10.0, 9.97, 0.015, rounds=60)
    usual, surer = (summarise(bench, each).rows[0].speedup for each in (0.95, 0.99))
    assert usual is not None
    assert surer is not None
    limit = (usual.high + surer.high) / 2
    (row,) = judge([rule_from_text(f"speedup@b8 < {limit}")], Evidence(bench=bench)).rules
    assert row.verdict == "INCONCLUSIVE"
    assert "at 99 % confidence" in row.message
    (row,) = judge([rule_from_text(f"speedup@b8 < {1.001 * surer.high}")], Evidence(bench=bench)).rules
    assert (row.verdict, row.high) == ("FAIL", surer.high)


def parity_link(name: str, kind: LinkKind, **errors: Any) -> Link:
    """Make a link between equal rows and replace its measures by these errors."""
    same = link_between(np.eye(3), np.eye(3), kind=kind, name=name)
    return replace(same, measures=replace(same.measures, **errors))


PARITY = Parity(
    images=ImageSet(count=1000, digest="sha256:00"),
    links=(
        parity_link("half", "half", relative_error=1e-3, images=100),
        parity_link("shipped", "whole", relative_error=0.03, top1_agreement=0.992, images=1000, kl_mean=math.inf),
    ),
)


def one(text: str, now: Bench | None = None, baseline: Bench | None = None, parity: Any = PARITY) -> JudgedRule:
    evidence = Evidence(bench=plain() if now is None else now, parity=parity)
    before = None if baseline is None else Evidence(bench=baseline)
    return judge([rule_from_text(text)], evidence, before).rules[0]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("speedup@b8 < 1.2", "PASS"),
        ("speedup@b8 < 1.3", "FAIL"),
        ("p50@b8 > 9", "PASS"),
        ("p50@b8 > 7", "FAIL"),
        ("dense.p50@b8 > 9", "FAIL"),
        ("dense.end_to_end.p50@b8 > 11", "PASS"),
        ("p50@b8 > dense * 0.9", "PASS"),
        ("p50@b8 > dense - 3", "FAIL"),
        ("p90@b8 > 9", "PASS"),
        ("throughput@b8 < 100", "PASS"),  # 8 images in 8 ms are 1000 a second
        ("throughput@b8 < dense", "PASS"),
        ("peak_memory_bytes@b8 > 2000", "PASS"),
        ("size_bytes > 500", "FAIL"),
        ("size_bytes > dense*0.7", "PASS"),
        ("macs >= 5", "FAIL"),
        ("macs > 5", "PASS"),
        ("fused_attention < dense", "FAIL"),
        ("device_memory@b8 > 9 MB", "PASS"),
        ("device_memory@b8 > 7.5 MB", "FAIL"),
        ("device_memory@b8 > 7.7 MiB", "PASS"),  # 7.7 * 2**20 are 8.07 million
        ("device_memory@b8 > 7.6 MiB", "FAIL"),
        ("device_memory@b8 > dense", "PASS"),
        ("plan_bytes > dense", "FAIL"),
        ("size_bytes > 0.5 kB", "FAIL"),
        ("sparse_layers < 6", "PASS"),
        ("relative_error > 0.05", "PASS"),
        ("relative_error@half > 1e-4", "FAIL"),
        ("top1_agreement < 0.984", "PASS"),
        ("top1_agreement < 0.999", "FAIL"),
        ("top1_agreement < 0.99", "INCONCLUSIVE"),
        ("top1_agreement@half < 0.96", "PASS"),
        ("kl_mean > 1", "FAIL"),
    ],
)
def test_verdicts_on_known_figures(text: str, verdict: str) -> None:
    assert one(text).verdict == verdict, one(text)


def test_large_figures_are_written_without_an_exponent() -> None:
    large = JudgedRule(
        rule="size", verdict="FAIL", message="-", metric="size_bytes", value=1234567.5, low=1234000.0, high=1.2e9
    )
    text = markdown_from_gate(Gate(rules=(large,)))
    assert "1,234,568 (1,234,000 to 1,200,000,000)" in text
    assert "12,346" in one("p50@b8 > 1", plain(dense_ms=20000.0, reduced_ms=12345.6, spread=1e-6)).message


def test_bound_inside_the_interval_is_inconclusive_and_estimates_more_blocks() -> None:
    """An interval shrinks with the square root of the rounds, so the estimate follows from its present width."""
    judged = one("speedup@b8 < 1.255", plain(spread=0.1))
    assert judged.verdict == "INCONCLUSIVE"
    value, low, high = map(some, (judged.value, judged.low, judged.high))
    gap = value - 1.255
    width = value - low if gap > 0 else high - value
    blocks = 4 * int(np.ceil(20 * ((width / gap) ** 2 - 1)))
    assert f"about {blocks} more blocks would decide" in judged.message


def parity_with_agreement(share: float, images: int, **limits_of_link: Any) -> Parity:
    """Make a parity record of one link in which this share of the images agrees."""
    plain = parity_link("reduced", "reduced", top1_agreement=share, images=images)
    status, reason = judge_link(plain.measures, user_tolerance(**limits_of_link))
    return Parity(images=ImageSet(count=images, digest=""), links=(replace(plain, status=status, reason=reason),))


@pytest.mark.parametrize("confidence", [0.0, 0.8, 0.99])
@pytest.mark.parametrize(("hits", "images"), [(64, 64), (49, 50), (60, 64), (493, 500)])
@pytest.mark.parametrize("least", [0.9, 0.98, 1.0])
def test_link_and_rule_with_equal_limits_give_equal_verdicts_and_reasons(
    hits: int, images: int, least: float, confidence: float
) -> None:
    proof = parity_with_agreement(hits / images, images, min_agreement=least, confidence=confidence)
    evidence = Evidence(parity=proof, confidence=confidence)
    rule = judge([rule_from_text(f"top1_agreement < {least}")], evidence).rules[0]
    assert rule.verdict == proof.verdict == proof.links[0].status
    assert f"top-1 agreement {rule.message}" in proof.links[0].reason


def test_estimated_number_of_images_is_the_smallest_that_decides() -> None:
    """63 of 64 images agree, and the limit is 98 %."""
    message = one("top1_agreement < 0.98", parity=parity_with_agreement(63 / 64, 64)).message
    assert message == (
        "98.44 % (91.67 % to 99.72 % at 95 % confidence), limit 98 %: the interval straddles the limit; about 3,934 "
        "images would decide if the share stays; these are 64"
    )
    for images, verdict in ((3933, "INCONCLUSIVE"), (3934, "PASS")):
        assert one("top1_agreement < 0.98", parity=parity_with_agreement(63 / 64, images)).verdict == verdict
    assert (
        "about 189 images would decide" in one("top1_agreement < 0.98", parity=parity_with_agreement(1.0, 64)).message
    )


def test_share_equal_to_its_limit_is_never_decided() -> None:
    words = "the share lies on it, so that more images don't decide; at confidence 0 the point does"
    for share, images in ((49 / 50, 50), (1.0, 64)):
        text = f"top1_agreement < {share}"
        proof = parity_with_agreement(share, images, min_agreement=share)
        assert words in one(text, parity=proof).message
        assert words in proof.links[0].reason
        assert judge([rule_from_text(text)], Evidence(parity=proof, confidence=0.0)).verdict == "PASS"


def test_inconclusive_baseline_rule_estimates_images_for_both_records() -> None:
    older, newer = parity_with_agreement(0.992, 1000), parity_with_agreement(0.988, 1000)
    rule = rule_from_text("top1_agreement < baseline - 0.002")

    def judged(images: int) -> JudgedRule:
        pair = [Evidence(parity=parity_with_agreement(share, images)) for share in (0.988, 0.992)]
        return judge([rule], *pair).rules[0]

    undecided = judge([rule], Evidence(parity=newer), Evidence(parity=older)).rules[0]
    needed = re.search(r"about ([\d,]+) images would decide", undecided.message)
    assert needed, undecided.message
    count = int(needed[1].replace(",", ""))
    assert [judged(images).verdict for images in (count - 1, count)] == ["INCONCLUSIVE", "FAIL"]


@pytest.mark.parametrize(("confidence", "verdict"), [(0.0, "PASS"), (0.5, "PASS"), (0.95, "INCONCLUSIVE")])
def test_timing_rules_use_the_confidence(confidence: float, verdict: str) -> None:
    rule = rule_from_text("speedup@b8 < 1.22")
    gate = judge([rule], Evidence(bench=plain(spread=0.1), confidence=confidence))
    assert (gate.verdict, gate.confidence) == (verdict, confidence)
    words = "(the point alone decides)" if confidence == 0 else f"at {100 * confidence:g} % confidence)"
    assert words in gate.rules[0].message
    few = judge([rule], Evidence(bench=plain(rounds=7), confidence=0.99)).rules[0]
    assert (few.verdict, "too few for an interval" in few.message) == ("INCONCLUSIVE", True)
    assert judge([rule], Evidence(bench=plain(rounds=7))).verdict == "PASS"


def test_figure_equal_to_the_bound_promises_no_decision() -> None:
    judged = one("speedup@b8 < 1.0", bench_of(row_of(8, {name: noisy(5.0, seed=3) for name in ("dense", "reduced")})))
    assert judged.verdict == "PASS"  # equal times: the interval is the point 1, which is not below 1
    wide = plain(10.0, 10.0, spread=0.2)
    value = some(one("speedup@b8 < 1.0", wide).value)
    assert "many more would not decide" in one(f"speedup@b8 < {value:.15f}", wide).message


def test_too_few_samples_or_rounds_are_inconclusive() -> None:
    assert one("p99@b8 > 9", plain(rounds=40)).verdict == "PASS"
    few = one("p99@b8 > 1", plain(rounds=10))
    assert (few.verdict, few.value) == ("INCONCLUSIVE", None)
    assert "p99 needs 662 samples, there are 200" in few.message
    assert "only 4 rounds were kept" in one("speedup@b8 < 1.2", plain(rounds=4)).message


def test_busy_machine_is_inconclusive() -> None:
    times = {"dense": noisy(10.0, seed=1), "reduced": noisy(8.0, seed=2)}
    judged = one("speedup@b8 < 1.2", bench_of(row_of(8, times, lost_rel=0.4)))
    assert judged.verdict == "INCONCLUSIVE"
    assert "other programs had the CPU" in judged.message


@pytest.mark.parametrize(
    ("rule", "reason"),
    [("speedup@b8 < 1.2", "hw_slowdown"), ("p50@b8 > dense * 0.9", "hw_slowdown"), ("p50@b8 > 9", "cgroup_quota")],
)
def test_throttled_row_is_inconclusive_like_one_of_a_busy_machine(rule: str, reason: str) -> None:
    measured = plain().rows[0]
    cpu = CpuState(governor=None, clock_mhz=800, temperature_c=None, quota_cpus=None, paused_ms=0.0, throttle=(reason,))
    slow = tuple(replace(each, cpu=cpu) if each.round > 3 else each for each in measured.blocks)
    assert one(rule, plain()).verdict == "PASS"
    judged = one(rule, bench_of(replace(measured, blocks=slow)))
    assert judged.verdict == "INCONCLUSIVE"
    assert f"throttled during almost all rounds ({reason})" in judged.message


def with_trial(bench: Bench, name: str, trial: BenchTrial) -> Bench:
    row = bench.rows[0]
    blocks = tuple(block for block in row.blocks if block.subject != name)
    return replace(bench, rows=(replace(row, trials={**row.trials, name: trial}, blocks=blocks),))


def test_out_of_memory_fails_for_the_candidate_and_is_inconclusive_for_the_reference() -> None:
    oom = BenchTrial(status="oom", message="CUDA out of memory")
    failed = one("speedup@b8 < 1.2", with_trial(plain(), "reduced", oom))
    assert failed.verdict == "FAIL"
    assert "reduced ran out of memory at batch 8: CUDA out of memory" in failed.message
    assert one("speedup@b8 < 1.2", with_trial(plain(), "dense", oom)).verdict == "INCONCLUSIVE"
    assert one("p50@b8 > 9", with_trial(plain(), "dense", oom)).verdict == "PASS"


def test_batch_size_without_time_is_inconclusive_with_a_reason() -> None:
    why = "it takes about 14 s, the limit is 3 s; give --time-limit 14"
    unmeasured = replace(
        row_of(8, {}), trials=dict.fromkeys(("dense", "reduced"), BenchTrial(status=OUT_OF_TIME, message=why)),
        stop=OUT_OF_TIME,
    )  # fmt: skip
    late = bench_of(unmeasured, row_of(1, {"dense": noisy(10.0), "reduced": noisy(8.0, seed=1)}))
    for rule in ("speedup@b8 < 1.2", "p50@b8 > 9", "p99@b8 > dense", "throughput@b8 < 100", "peak_memory_bytes@b8 > 9"):
        judged = one(rule, late)
        assert (judged.verdict, judged.value) == ("INCONCLUSIVE", None), rule
        assert f"reduced was not measured at batch 8: {why}" in judged.message
    assert one("speedup@b1 < 1.2", late).verdict == "PASS"
    against = "p50@b8 > baseline * 1.03"
    assert one(against, late, plain()).verdict == one(against, plain(), late).verdict == "INCONCLUSIVE"
    assert judge([rule_from_text(against)], Evidence(bench=late), starting=True).verdict == "INCONCLUSIVE"
    rows = {(row.batch, row.subject): row for row in compare_records(plain(), late).rows}
    assert (rows[8, "reduced"].ratio, rows[8, "reduced"].change) == (None, "unknown")
    assert "| 8 | reduced | 8 | out of time | - | unknown |" in markdown_from_comparison(compare_records(plain(), late))


def test_rules_against_a_baseline() -> None:
    before = plain()
    assert one("p50@b8 > baseline * 1.03", plain(), before).verdict == "PASS"
    assert one("p50@b8 > baseline * 1.03", plain(reduced_ms=8.8), before).verdict == "FAIL"
    assert one("size_bytes > baseline", plain(reduced_bytes=601), before).verdict == "FAIL"
    assert one("size_bytes > baseline + 1", plain(reduced_bytes=601), before).verdict == "PASS"


def test_different_machines_are_comparable_in_size_but_not_in_time() -> None:
    before = plain(gpu="Another Card")
    judged = one("p50@b8 > baseline * 1.03", plain(), before)
    assert judged.verdict == "NOT-COMPARABLE"
    assert judged.keys == ("gpu: 'Another Card' then, 'A Card' now",)
    assert one("size_bytes > baseline", plain(), before).verdict == "PASS"


def test_slowdown_of_candidate_and_reference_is_attributed_to_the_machine() -> None:
    before = plain(dense_sha="sha256:1")
    slower_machine = plain(dense_ms=10.8, reduced_ms=8.64, dense_sha="sha256:1")
    judged = one("p50@b8 > baseline * 1.03", slower_machine, before)
    assert judged.verdict == "INCONCLUSIVE"
    assert "the machine itself moved" in judged.message
    assert "+8." in judged.message
    slower_model = plain(reduced_ms=8.64, dense_sha="sha256:1")
    assert one("p50@b8 > baseline * 1.03", slower_model, before).verdict == "FAIL"
    another_dense = plain(dense_ms=10.8, reduced_ms=8.64, dense_sha="sha256:2")
    assert one("p50@b8 > baseline * 1.03", another_dense, before).verdict == "FAIL"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p50@b1 > 3", "not measured at batch 1, only at 8"),
        ("teacher.p50@b8 > 3", "has no subject 'teacher', it has dense and reduced"),
        ("p50@b8 > teacher", "has no subject 'teacher'"),
        ("params > 3", "has no params of reduced"),
        ("speed@b8 > 3", "no parity link or output 'b8'"),
        ("speed > 3", "no figure is called 'speed'"),
        ("relative_error@fp8 > 1", "no parity link or output 'fp8'; it has half, shipped"),
        ("relative_error > dense", "parity is between two models"),
        ("p50@b8 > baseline", "no baseline to compare with"),
        ("device_memory@b99 > 1", "this record has no device_memory of reduced at batch 99"),
        ("p50@b8", "no comparison"),
        ("p50@b8 > fast enough", "'fast enough' is not a valid bound"),
        ("p50 > 3", "write p50@b8"),
        ("p50@b0 > 3", "'0': expected a whole number from 1 to 65536"),
        ("size_bytes@b8 > 3", "drop @b8"),
        ("end_to_end.size_bytes > 3", "end_to_end goes with"),
        ("dense.reduced.p50@b8 > 3", "one subject"),
        ("", "no comparison"),
        ("device_memory > 9 MB", "device_memory depends on the batch; write device_memory@b8"),
        ("device_memory@half > 9", "write device_memory@b8"),
        ("plan_bytes@b8 > 9", "drop @b8"),
        ("p50@b8 > 9 MB", "MB goes with size_bytes, plan_bytes, device_memory, peak_memory_bytes, not with p50"),
        ("plan_bytes > dense MB", r"MB goes with a number of its own, such as dense \+ 20 MB"),
        ("plan_bytes > 9 XB", "is not a valid bound"),
    ],
)
def test_malformed_rules_and_absent_figures_are_errors(text: str, message: str) -> None:
    rejects(message, one, text)


def test_rule_without_its_record_is_refused() -> None:
    rejects("has no parity record", one, "relative_error > 1", parity=None)
    rejects("needs a bench record", judge, [rule_from_text("p50@b8 > 1")], Evidence(parity=PARITY))
    rejects("at least one rule", judge, [], Evidence())


def test_spaces_in_rules_are_optional() -> None:
    tight, loose = rule_from_text("p50@b1>baseline*1.03"), rule_from_text("  p50@b1  >  baseline * 1.03 ")
    assert replace(tight, text="") == replace(loose, text="")
    assert (loose.metric, loose.batch, loose.name, loose.scale, loose.offset) == ("p50", 1, "baseline", 1.03, 0.0)
    assert rule_from_text("p50@b1 > baseline - .5").offset == -0.5
    assert rule_from_text("relative_error > 5e-2").offset == 0.05


def gate() -> Gate:
    rules = ["speedup@b8 < 1.2", "size_bytes > 500", "top1_agreement < 0.99"]
    return judge([rule_from_text(text) for text in rules], Evidence(bench=plain(), parity=PARITY))


def test_gate_takes_the_worst_verdict() -> None:
    assert (gate().verdict, gate().exit_code) == ("FAIL", 1)
    assert EXIT_CODES == {"PASS": 0, "UNJUDGED": 0, "FAIL": 1, "INCONCLUSIVE": 3, "NOT-COMPARABLE": 5}
    assert Gate(rules=gate().rules[2:]).exit_code == 3
    assert Gate(rules=gate().rules[:1]).exit_code == 0


def test_unjudged_proof_alone_does_not_pass() -> None:
    proof = JudgedRule(rule="parity", verdict="UNJUDGED", message="no limit", metric=PROOF)
    assert (Gate(rules=(proof,)).verdict, Gate(rules=(proof,)).exit_code) == ("UNJUDGED", 3)
    first = judge([rule_from_text("p50@b8 > baseline * 1.03")], Evidence(bench=plain()), starting=True)
    assert Gate(rules=(proof, *first.rules)).exit_code == 0


def test_first_record_is_judged_by_rules_without_a_baseline() -> None:
    rules = [rule_from_text(text) for text in ("p50@b8 > baseline * 1.03", "size_bytes > 500")]
    first = judge(rules, Evidence(bench=plain()), starting=True)
    assert [row.verdict for row in first.rules] == ["UNJUDGED", "FAIL"]
    assert "a record that passes becomes it" in first.rules[0].message
    only = judge(rules[:1], Evidence(bench=plain()), starting=True)
    assert (only.verdict, only.exit_code) == ("UNJUDGED", 0)
    skipped = ElementTree.fromstring(junit_from_gate(only))
    assert (skipped.get("skipped"), skipped.get("errors")) == ("1", "0")
    assert skipped[0].find("skipped") is not None


def test_record_without_the_figure_cannot_start_a_baseline() -> None:
    rules = [rule_from_text("p50@b8 > baseline * 1.03")]
    broken = with_trial(plain(), "reduced", BenchTrial(status="oom", message="no memory"))
    assert judge(rules, Evidence(bench=broken), starting=True).verdict == "FAIL"
    tails = [rule_from_text("p99@b8 > baseline * 1.03")]
    assert judge(tails, Evidence(bench=plain(rounds=10)), starting=True).verdict == "INCONCLUSIVE"
    few = judge(rules, Evidence(bench=plain(rounds=4)), starting=True)
    assert (few.verdict, few.exit_code) == ("INCONCLUSIVE", 3)
    assert "only 4 rounds were kept" in few.rules[0].message


def test_existing_baseline_is_compared_even_if_starting_one_is_allowed() -> None:
    rules, now = [rule_from_text("size_bytes > baseline")], Evidence(bench=plain(reduced_bytes=601))
    assert judge(rules, now, Evidence(bench=plain()), starting=True).verdict == "FAIL"


def test_junit_counts_and_escapes() -> None:
    suite = ElementTree.fromstring(junit_from_gate(gate()))
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "1", "1")
    cases = list(suite)
    assert [case.get("name") for case in cases] == ["speedup@b8 < 1.2", "size_bytes > 500", "top1_agreement < 0.99"]
    assert cases[1].find("failure") is not None
    assert some(cases[2].find("error")).get("type") == "INCONCLUSIVE"


def test_markdown_and_json(tmp_path: Path) -> None:
    text = markdown_from_gate(gate())
    assert text.startswith("**Gate: FAIL**\n")
    assert "| FAIL | `size_bytes > 500` | 600 | 600, limit 500 |" in text
    save_gate(gate(), tmp_path / "gate.json")
    assert load_gate(tmp_path / "gate.json") == gate()
    document = json.loads((tmp_path / "gate.json").read_text())
    assert (document["kind"], document["verdict"], document["exit_code"]) == ("gate", "FAIL", 1)
    assert document["rules"][1]["value"] == 600


def test_comparison_lists_differences_first_and_marks_insignificant_ones() -> None:
    before, after = plain(), plain(reduced_ms=8.8, gpu="Another Card")
    compared = compare_records(before, after)
    assert not compared.comparable
    assert [(row.subject, row.change) for row in compared.rows] == [("dense", "not significant"), ("reduced", "slower")]
    text = markdown_from_comparison(compared)
    assert text.index("gpu (decisive) | A Card | Another Card") < text.index("| batch | subject")
    same = compare_records(before, before)
    assert same.comparable
    assert same.differences == ()
    assert markdown_from_comparison(same).startswith("Environment: no difference.")


def test_batch_in_only_one_record_is_marked() -> None:
    before = plain()
    after = replace(before, rows=(replace(before.rows[0], batch=16),))
    text = markdown_from_comparison(compare_records(before, after))
    assert re.search(r"\| 8 \| dense \| [\d.]+ \| not measured \| - \| unknown \|", text)
    assert re.search(r"\| 16 \| dense \| not measured \| [\d.]+ \| - \| unknown \|", text)


def test_quotient_of_independent_figures_combines_their_uncertainty() -> None:
    """Two figures that are uncertain by 10 % have a quotient that is uncertain by 14 %."""
    ratio = ratio_of_independent(Interval(value=10, low=9, high=11), Interval(value=5, low=4.5, high=5.5))
    assert ratio.value == 2
    assert ratio.high == pytest.approx(2 * (1 + 0.1 * 2**0.5))
    assert ratio.low == pytest.approx(2 * (1 - 0.1 * 2**0.5))


def parity_of_roles(inputs: int, *roles: Role) -> Parity:
    """Make a parity record with a 1 % error in one output per role, which is named after its role."""
    rows = np.random.default_rng(0).standard_normal((inputs, 4))
    links = [
        link_between(rows, rows * 1.01, several=True, port=OutputPort(name=role.replace(" ", "_"), role=role))
        for role in roles
    ]
    return Parity(images=ImageSet(count=inputs, digest=""), links=tuple(links))


def test_rule_without_output_uses_the_only_output_with_that_figure() -> None:
    proof = parity_of_roles(8, "logits", "embedding")
    assert one("top1_agreement < 0.5", parity=proof).verdict == "PASS"
    assert one("neighbour_agreement < 0.3", parity=proof).verdict == "PASS"
    assert one("relative_error@reduced embedding > 0.005", parity=proof).verdict == "FAIL"
    assert one("relative_error@embedding > 0.005", parity=proof).verdict == "FAIL"
    rows = judge([rule_from_text("relative_error > 0.005")], Evidence(parity=proof)).rules
    assert [row.rule for row in rows] == ["relative_error > 0.005 [logits]", "relative_error > 0.005 [embedding]"]
    rejects("no figure is called 'token_agreement'", one, "token_agreement < 0.9", parity=proof)


def test_undefined_neighbour_agreement_is_not_judged() -> None:
    found = one("neighbour_agreement < 0.9", parity=parity_of_roles(2, "embedding"))
    assert found.verdict == "INCONCLUSIVE"
    assert "nearest neighbours need 3 inputs, got 2" in found.message


@pytest.mark.parametrize("ms", [0.0, -1.0, 1e-308, 1e12, math.nan])
def test_impossible_times_are_refused(ms: float) -> None:
    with pytest.raises(BadInput, match="a block needs calls and positive times"):
        TimedBlock(round=0, subject="dense", at_s=0.0, calls=1, wall_ms=1.0, compute_ms=(ms,))


def test_device_memory_is_judged_per_profile() -> None:
    with pytest.raises(BadInput, match="device memory of 'all', expected profiles such as 1:8:64"):
        SubjectRecord(name="a", describe={}, device_memory={"all": 1})
