"""What no report can be written of is refused in words."""

import pytest
import torch
from tiny_reads import choosing_model

from attention_residuals.analysis.report import report_on
from attention_residuals.errors import UserError


def test_reads_with_a_window_have_no_depth_map(tmp_path):
    model, ids = choosing_model(mode="full", window=2), torch.arange(1, 6)[None]
    with pytest.raises(UserError, match=r"window=2.*to_table"):
        report_on(model, ids, tmp_path / "report", tokens=list("abcde"), name="model")
    assert not (tmp_path / "report").exists()
