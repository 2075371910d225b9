"""Each clause of what functions 5 and 6 refuse, where the command can meet it: exit 2, and a
message that names what is wrong. The functions' own refusals are in tests/core/test_teacher.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from opdtool.io.checkpoints import NORMS
from opdtool.jobs.reconstruct import run as run_module
from tests.cli.conftest import Cli
from tests.cli.test_reconstruct import check, report_of, save

B, S, H, V = 3, 6, 4, 8


def values(*shape: int) -> Tensor:
    return torch.arange(float(torch.tensor(shape).prod())).reshape(shape) % 5 - 2


def world(where: Path) -> list[object]:
    """A payload of three rows by teachers 5, 2, 5, and the two heads."""
    save(
        where / "payload.safetensors",
        teacher_full_hidden_states=values(B, S, H),
        opd_full_teacher_index=torch.tensor([5, 2, 5]),
    )
    for index in (2, 5, 9):
        head(where, index, values(V, H) + index)
    return [
        where / "payload.safetensors",
        *("--head", f"2={where}/2.safetensors", "--head", f"5={where}/5.safetensors"),
    ]


def head(where: Path, index: int, weight: Tensor) -> None:
    save(where / f"{index}.safetensors", **{"lm_head.weight": weight})


def payload(where: Path, hidden: Tensor, tags: list[int] | None, **more: Tensor) -> None:
    if tags is not None:
        more["opd_full_teacher_index"] = torch.tensor(tags)
    save(where / "payload.safetensors", teacher_full_hidden_states=hidden, **more)


def refused(cli: Cli, *argv: object) -> str:
    done = cli("reconstruct", *argv)
    assert done.status == 2, done.err + done.out
    assert done.out == ""
    return " ".join(str(done.err).split())


def same_heads(where: Path) -> None:
    payload(where, HIDDEN, None)
    head(where, 5, values(V, H) + 2)


Change = Callable[[Path], object]
PACK = {"cu_seqlens_padded": torch.tensor([0, 2, 6])}
HIDDEN = values(B, S, H)
ONE = values(1, S, H)

CLAUSES: dict[str, tuple[Change, tuple[str, ...], str]] = {
    "the index has not one entry per row": (
        lambda d: payload(d, HIDDEN, [5, 2]), (), "has 2 entries for 3 rows"),
    "the index of a pack has not one entry per segment": (
        lambda d: payload(d, ONE, [5, 2, 5], **PACK), ("--packed",),
        "has 3 entries for 2 segments"),
    "a row names a head that is not loaded": (
        lambda d: payload(d, HIDDEN, [5, 2, 7]), (),
        "row 2 names teacher 7, whose head is not loaded (loaded: 2, 5)"),
    "a segment names a head that is not loaded": (
        lambda d: payload(d, ONE, [5, 7], **PACK), ("--packed",),
        "segment 1 names teacher 7, whose head is not loaded (loaded: 2, 5)"),
    "with one head the index is still obeyed": (
        lambda d: payload(d, HIDDEN, [0, 1, 0]), ("only",), "row 1 names teacher 1"),
    "a head's width differs from the payload's": (
        lambda d: head(d, 5, values(V, 3)), (), "teacher 5 has shape [8, 3], width 3"),
    "a head that no row uses differs in width": (
        lambda d: head(d, 9, values(V, 3)), ("unused",), "teacher 9 has shape [8, 3], width 3"),
    "the heads disagree on the vocabulary": (
        lambda d: head(d, 5, values(6, H)), (), "vocabulary shards of 8 and 6 rows"),
    "a head that no row uses disagrees on the vocabulary": (
        lambda d: head(d, 9, values(6, H)), ("unused",), "vocabulary shards of 8 and 6 rows"),
    "the heads disagree on the dtype": (
        lambda d: head(d, 5, values(V, H).bfloat16()), (), "float32 and torch.bfloat16"),
    "a head that no row uses disagrees on the dtype": (
        lambda d: head(d, 9, values(V, H).half()), ("unused",), "float32 and torch.float16"),
    "a payload of no known kind": (
        lambda d: None, ("--payload", "hidden"), "'hidden' is not one of"),
    "a payload longer than the student's sequence": (
        lambda d: None, ("--student-seq-len", "5"), "--student-seq-len is 5"),
    "no head is loaded": (
        lambda d: None, ("none",), "pass the teacher's output layer as --head"),
    "several heads without an index": (
        lambda d: payload(d, HIDDEN, None), (), "2 heads are given, but"),
    "several heads without an index, though all are the same": (
        same_heads, (),
        "holds no opd_full_teacher_index"),
    "several heads without an index for a pack": (
        lambda d: payload(d, ONE, None, **PACK), ("--packed",), "which segment is whose"),
    "an odd number of positions a rank": (
        lambda d: None, ("--cp", "2", "--student-seq-len", "6"), "no multiple of 4"),
    "a segment that cannot be cut for the ranks": (
        lambda d: payload(d, ONE, [5, 2], **PACK), ("--packed", "--cp", "2"),
        "cu_seqlens_padded"),
    "columns that the ranks cannot share": (
        lambda d: None, ("--tp", "3"), "8 columns is not divisible by TP 3"),
    "a student of another vocabulary than the heads project to": (
        lambda d: save(d / "student.safetensors", student_logits=values(B, S, V - 1)),
        ("student",), "--student has 7 columns, but 8 are rebuilt"),
    "a student of other rows": (
        lambda d: save(d / "student.safetensors", student_logits=values(B - 1, S, V)),
        ("student",), "has shape [2, 6, 8], but [3, 6, ...] is rebuilt"),
    "a pack of more than one row": (
        lambda d: payload(d, HIDDEN, [5, 2], **PACK), ("--packed",), "has 3 rows"),
    "a head that cannot be multiplied": (
        lambda d: head(d, 5, values(V, H).int()), (), "int32, which cannot be multiplied"),
    "a payload that cannot be multiplied": (
        lambda d: payload(d, HIDDEN.to(torch.float8_e4m3fn), [5, 2, 5]), (),
        "float8_e4m3fn, which cannot be multiplied"),
}  # fmt: skip


@pytest.mark.parametrize("clause", CLAUSES)
def test_the_command_refuses(cli: Cli, tmp_path: Path, clause: str) -> None:
    change, options, message = CLAUSES[clause]
    argv = world(tmp_path)
    assert cli("reconstruct", *argv, "-q").status == 0
    change(tmp_path)
    more: list[object] = []
    for option in options:
        if option in ("none", "only"):
            argv = argv[:1]
        if option == "only":
            more += ["--head", f"{tmp_path}/2.safetensors"]
        elif option == "unused":
            more += ["--head", f"9={tmp_path}/9.safetensors"]
        elif option == "student":
            more += ["--student", tmp_path / "student.safetensors"]
        elif option != "none":
            more.append(option)
    assert message in refused(cli, *argv, *more)


def test_a_norm_by_another_name_may_be_renamed(cli: Cli, tmp_path: Path) -> None:
    world(tmp_path)
    hidden, weight = values(B, S, H), torch.tensor([0.5, 1.0, 1.5, 2.0])
    payload(tmp_path, hidden, None)
    save(tmp_path / "norm.safetensors", theirs=weight, other=weight + 1)
    normed = hidden * (hidden.square().mean(-1, keepdim=True) + 0.25).rsqrt() * weight
    reference = normed @ (values(V, H) + 2).t()
    save(tmp_path / "ref.safetensors", teacher_full_logits=reference)
    argv = [
        tmp_path / "payload.safetensors", "--head", tmp_path / "2.safetensors",
        "--norm", tmp_path / "norm.safetensors", "--norm-eps", 0.25,
        "--reference", tmp_path / "ref.safetensors",
    ]  # fmt: skip
    assert "norm.safetensors" in refused(cli, *argv)
    report = report_of(cli, *argv, "--rename", f"{NORMS[0]}=theirs")
    assert check(report, "logits-match")["mismatches"] == 0
    report_of(cli, *argv, "--rename", f"{NORMS[0]}=other", status=1)
    assert NORMS[0] in refused(cli, *argv, "--rename", f"{NORMS[0]}=nothing")


def test_an_interrupt_while_shards_are_written_leaves_nothing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [*world(tmp_path / "in"), "--tp", 2, "-o", tmp_path / "out" / "made"]
    (tmp_path / "out").mkdir()
    there: list[list[str]] = []
    plain = run_module._write

    def interrupted(*args: object) -> None:
        there.append([path.name for path in (tmp_path / "out").rglob("*.safetensors*")])
        if len(there) > 2:
            raise KeyboardInterrupt
        plain(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(run_module, "_write", interrupted)
    done = cli("reconstruct", *argv)
    assert done.status == 130
    assert any(there)  # it was in the middle of a file
    assert list((tmp_path / "out").iterdir()) == []
    monkeypatch.undo()
    assert cli("reconstruct", *argv).status == 0
    assert len(list((tmp_path / "out" / "made").glob("*.safetensors"))) == 2
