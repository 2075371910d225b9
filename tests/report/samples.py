"""Reports that the renderers are tested on: one that fails, one that passes, a hostile one."""

from __future__ import annotations

from opdtool.findings import Bars, Diagnosis, Finding, Report, Strip, Table

FAILING = Report(
    command="verify-mask",
    geometry={"tp": 1, "cp": 2, "sequences": 8, "packed_tokens": 4096},
    findings=(
        Finding(
            code="OPD101",
            name="cu-seqlens-start",
            status="pass",
            message="cumulative lengths start at 0",
            tensor="cu_seqlens",
        ),
        Finding(
            code="OPD301",
            name="mask-values",
            status="fail",
            message="draft_token_mask differs from the rebuilt mask",
            tensor="draft_token_mask",
            mismatches=12,
            total=4096,
            first=(
                {
                    "sequence": 3,
                    "position": 17,
                    "slot": 812,
                    "cp_rank": 0,
                    "expected": 1.0,
                    "actual": 0.0,
                },
                {
                    "sequence": 3,
                    "position": 31,
                    "slot": 826,
                    "cp_rank": 1,
                    "expected": 0.0,
                    "actual": float("nan"),
                },
            ),
        ),
        Finding(
            code="OPD306",
            name="mask-row-empty",
            status="warn",
            message="row 5 has nothing to train | all of its tokens are prompt",
            tensor="model.layers.0.a_rather_long_name_that_must_never_be_cut_short.draft_token_mask",
        ),
        Finding(
            code="OPD305",
            name="mask-dropped-rows",
            status="skip",
            message="the batch has no sample_mask",
        ),
    ),
    diagnosis=(
        Diagnosis(
            fault="mask-not-shifted",
            match="exact",
            message="Slot t holds the weight of token t, not of token t+1.",
            fix="Roll the mask left by one inside each segment, as the targets are.",
        ),
        Diagnosis(
            fault="cp-contiguous",
            faults=("cp-contiguous", "sample-mask-ignored"),
            match="likely",
            score=0.9934,
            message="Rank r holds the r-th of CP equal pieces, and dropped rows are trained.",
            fix="Cut 2·CP chunks and pair them.\nMultiply by sample_mask.",
        ),
    ),
    stats={"trained_slots": 2048, "worst": float("inf"), "per_rank": (1024, 1024)},
    sections=(
        Strip(
            title="Sequence 3, positions 15 to 20",
            rows=(
                ("position", ("15", "16", "17", "18", "19", "20")),
                ("expected", ("0", "0", "1", "1", "1", "0")),
                ("actual", ("0", "0", "0", "1", "1", "1")),
            ),
            wrong=frozenset({2, 5}),
        ),
        Bars(
            title="Utilisation of each pack",
            labels=("pack-00000", "pack-00001", "tail"),
            values=(93.75, 50.0, 0.0),
            limit=100.0,
            unit="%",
        ),
        Table(
            title="Ranks",
            columns=("rank", "file", "slots"),
            rows=(("0", "mask.cp0of2.safetensors", "2,048"), ("1", "mask.cp1of2.x", "48")),
            numeric=frozenset({"slots"}),
        ),
    ),
    notes=("Show a check with: opdtool explain OPD301",),
    inputs=("mask.safetensors", "batch.safetensors"),
)

PASSING = Report(
    command="verify-mask",
    geometry={"tp": 1, "cp": 1},
    findings=(
        Finding(
            code="OPD301",
            name="mask-values",
            status="pass",
            message="all slots equal the rebuilt mask",
            tensor="draft_token_mask",
            mismatches=0,
            total=4096,
        ),
        Finding(code="OPD302", name="mask-shape", status="pass", message="[1, 4096]"),
    ),
    stats={"trained_slots": 2048},
)

EVIL = "a\x1b[31m<script>alert(1)</script>`|*_#&\"'\r\n::error::x,y%0A\x00\ufffe\udc80]]>"

HOSTILE = Report(
    command="compare",
    geometry={"name": EVIL},
    findings=(
        Finding(
            code="OPD951",
            name="tensor-values",
            status="fail",
            message=EVIL,
            tensor=EVIL,
            mismatches=1,
            total=1,
            first=({"index": EVIL, "expected": float("nan"), "actual": float("-inf")},),
            step=EVIL,
        ),
        Finding(code="OPD952", name="tensor-names", status="skip", message=EVIL, tensor=EVIL),
        Finding(code="OPD953", name="tensor-dtype", status="warn", message=EVIL, tensor=EVIL),
    ),
    diagnosis=(Diagnosis(fault="stale-map", match="exact", message=EVIL, fix=EVIL, step=EVIL),),
    stats={EVIL: EVIL},
    sections=(
        Table(title=EVIL, columns=(EVIL, "n"), rows=((EVIL, "1"),), numeric=frozenset({"n"})),
        Bars(title=EVIL, labels=(EVIL,), values=(float("nan"),), limit=0.0, unit="%"),
        Strip(title=EVIL, rows=((EVIL, (EVIL, "1")),), wrong=frozenset({0})),
    ),
    notes=(EVIL,),
    inputs=(EVIL,),
)
