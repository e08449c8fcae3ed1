"""Models divided over tensor, expert and pipeline ranks come back on the ranks they belong to, at other sizes too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from divided_model import Layout, cut, load_under_fsdp2, parts, place, save_and_resume_all, truth
from processes import run_processes

DENSE = [Layout(tp=2, dp=2), Layout(dp=4), Layout(tp=4), Layout(pp=2, dp=2), Layout(pp=2, tp=2), Layout(pp=4)]
MOE = [
    Layout(dp=4, ep=2),
    Layout(dp=4, ep=4),
    Layout(dp=4),
    Layout(tp=2, dp=2, ep=2, etp=2),
    Layout(tp=2, dp=2, ep=4),
    Layout(pp=2, dp=2, ep=2),
]
CASES: dict[str, tuple[str, list[Layout], dict[str, Any]]] = {
    "dense": ("dense", DENSE, {}),
    "dense, ZeRO-1": ("dense", DENSE, {"use_distributed_optimizer": True}),
    "dense, bf16": ("dense", DENSE[:4], {"use_distributed_optimizer": True, "bf16": True}),
    "dense, groups given": ("dense", DENSE, {"groups_given": True}),
    "experts": ("moe", MOE, {}),
    "experts, ZeRO-1": ("moe", MOE, {"use_distributed_optimizer": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_divided_model_is_resumed_on_its_own_and_on_other_layouts(case: str, tmp_path: Path) -> None:
    kind, layouts, options = CASES[case]
    pairs = {saved: [saved, *((layouts[i:] + layouts)[1:3])] for i, saved in enumerate(layouts)}
    per_rank = run_processes(4, save_and_resume_all, kind, pairs, str(tmp_path), options)
    expected = truth(kind)
    rounding = {"rtol": 2e-2, "atol": 2e-2} if options.get("bf16") else {"rtol": 1e-5, "atol": 1e-6}
    for saved, layout in per_rank[0]:
        seen = set()
        for rank, results in enumerate(per_rank):
            for name, part in parts(layout, place(layout, rank), kind).items():
                got, want = results[saved, layout][name].double(), cut(expected[name], part)
                torch.testing.assert_close(got, want, msg=f"{name}, saved on {saved}, loaded on {layout}", **rounding)
                seen.add(name)
        assert seen == expected.keys()


def test_the_loaded_state_of_a_model_under_fsdp2_fits_the_model(tmp_path: Path) -> None:
    for rank in run_processes(2, load_under_fsdp2, str(tmp_path / "x")):
        assert rank == "loaded", rank
