"""What ``opdtool`` exports: the names that other people's code depends on."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import opdtool

FUNCTIONS = (
    # the reference's seven, without the leading underscore
    "rescale_loss_metrics",
    "map_teacher_logits_to_draft_vocab",
    "roll_packed_seq_dim",
    "pack_rolled_draft_token_mask",
    "project_hidden_states_per_teacher",
    "reconstruct_opd_full_teacher_logits",
    "pack_input_ids",
    # and what the contract's section 3 wants besides
    "pack",
    "unpack",
    "gather_cp",
    "pack_bins",
    "choose_draft_vocab",
    "d2t_from_ids",
    "ids_from_d2t",
    "t2d_from_ids",
    "t2d_from_d2t",
    "chunked_divergences",
    "dump",
)
CLASSES = ("MetricNormalizer", "PackedLayout")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_of_the_contract_is_exported_under_its_public_name(name: str) -> None:
    assert name in opdtool.__all__
    assert name in dir(opdtool)
    found = getattr(opdtool, name)
    assert inspect.isfunction(found)
    assert found.__name__ == name
    assert found.__doc__


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_of_the_contract_is_exported(name: str) -> None:
    assert name in opdtool.__all__
    assert inspect.isclass(getattr(opdtool, name))


def test_every_exported_name_is_there_and_no_module_takes_its_place() -> None:
    assert len(set(opdtool.__all__)) == len(opdtool.__all__) > len(FUNCTIONS) + len(CLASSES)
    assert not [name for name in opdtool.__all__ if inspect.ismodule(getattr(opdtool, name))]
    with pytest.raises(AttributeError, match="no attribute 'pack_nothing'"):
        opdtool.pack_nothing  # noqa: B018


PROBE = """
import sys
import opdtool
assert "pack" in dir(opdtool)
heavy = {"torch", "numpy", "safetensors", "typer", "rich"} & set(sys.modules)
assert not heavy, heavy
import opdtool.core.packing, opdtool.io.dump, opdtool.cli.pack, opdtool.cli.unpack
print(*[type(getattr(opdtool, name)).__name__ for name in ("pack", "unpack", "dump")])
"""


def test_importing_opdtool_imports_no_torch_and_its_modules_shadow_no_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["function"] * 3), done.stderr
