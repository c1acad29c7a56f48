"""From a run folder's checkpoints to how entropy, locality, norms ... of each read changed over training."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attention_residuals.analysis.load_model import encode, load_model
from attention_residuals.analysis.record import record_forward
from attention_residuals.analysis.summary import DepthSummary, summarise
from attention_residuals.analysis.tables import Table
from attention_residuals.analysis.token_measures import Floats
from attention_residuals.errors import UserError
from attention_residuals.training.checkpoints import complete_checkpoints, step_of
from attention_residuals.training.run_folder import RunFolder

MEASURES = (
    "entropy",
    "normalised_entropy",
    "effective_sources",
    "locality",
    "embedding_weight",
    "input_norm",
    "output_norm",
)


@dataclasses.dataclass(frozen=True)
class DepthHistory:
    """Means over the same tokens at every saved step of a run.

    Attributes:
        steps: [S] int64, optimizer steps, rising.
        read_names: R names.
        measures: from each of MEASURES, as `DepthSummary` defines them, to [S, R] float64; NaN where a read
            has no such number.
    """

    steps: npt.NDArray[np.int64]
    read_names: tuple[str, ...]
    measures: dict[str, Floats]

    def to_table(self) -> Table:
        """One row per step and read: `step`, `read`, `read_name` and a column for each measure."""
        num_steps, num_reads = len(self.steps), len(self.read_names)
        return {
            "step": np.repeat(self.steps, num_reads),
            "read": np.tile(np.arange(num_reads, dtype=np.int32), num_steps),
            "read_name": np.tile(np.array(self.read_names), num_steps),
            **{name: values.reshape(-1) for name, values in self.measures.items()},
        }


def depth_over_training(
    run: Path, text: str, *, max_tokens: int = 512, device: str = "auto", dtype: str = "auto"
) -> DepthHistory:
    """Run every complete checkpoint of a run, and the model it ended with, over one text.

    Args:
        run: folder of `attnres train`; it keeps as many checkpoints as `--keep-checkpoints` says. They may
            be sharded, and each is then loaded as a whole.
        text: read up to `max_tokens` tokens.
        device, dtype: as in `load_model`.

    Raises:
        UserError: the run has no complete checkpoint, or one can't be loaded or has no depth weights.
    """
    saved = _models_by_step(run)
    summaries: list[DepthSummary] = []
    for folder in saved.values():
        loaded = load_model(folder, device=device, dtype=dtype)
        summaries.append(summarise(record_forward(loaded.model, encode(loaded, text, max_tokens=max_tokens))))
    return DepthHistory(
        np.array(list(saved), dtype=np.int64),
        summaries[0].read_names,
        {name: np.stack([_per_read(summary, name) for summary in summaries]) for name in MEASURES},
    )


def _models_by_step(run: Path) -> dict[int, Path]:
    folder = RunFolder(run)
    saved = {step_of(path): path for path in complete_checkpoints(folder.checkpoints)}
    if not saved:
        raise UserError(
            f"{run} holds no complete checkpoint in checkpoints/, so there is no change over training to "
            "show; train with --save-every and --keep-checkpoints"
        )
    if folder.run_file.is_file() and (run / "config.json").is_file():
        last = folder.read_run().get("step")
        if isinstance(last, int):
            saved.setdefault(last, run)
    return dict(sorted(saved.items()))


def _per_read(summary: DepthSummary, name: str) -> Floats:
    """[R] of any measure; the final read has no sublayer, hence no output norm."""
    values: Floats = getattr(summary, name)
    return np.pad(values, (0, len(summary.read_names) - len(values)), constant_values=np.nan)
