"""From results and pictures to one HTML page that needs nothing beside it and no network."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from attention_residuals.comparison.results import ArmResult, Mean, RateResult, RunRecord
from attention_residuals.comparison.scaling import ScalingResult

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>$title</title>
<style>
:root { color-scheme: light dark; }
body { max-width: 76rem; margin: 0 auto; padding: .5rem 1rem; font: 1rem/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.3rem; margin-top: 2.5rem; } h3 { font-size: 1.05rem; }
p, figcaption { max-width: 46rem; } figure { margin: 1rem 0; }
.scroll { overflow-x: auto; }
img { max-width: 100%; height: auto; background: white; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #8884; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; }
</style>
</head>
<body>
<h1>$title</h1>
$notes
$sections
<h2>Runs</h2>
$runs
<footer><p>$footer</p></footer>
</body>
</html>
""")

LOSS_COLUMNS = (
    "arm",
    "learning rate",
    "validation loss",
    "standard error",
    "seeds",
    "minus first arm",
    "standard error",
    "pairs",
    "tokens/s",
    "seconds of steps",
    "parameters",
)
LOSS_CAPTION = (
    "Validation loss at the last step, in nats per token: mean over seeds and its standard error. The "
    "difference from the first arm is taken seed by seed, since the runs of a seed share initial weights, "
    "text and order, and then averaged; below zero is better than the first arm."
)
SCALING_CAPTION = (
    "L = A C^-b through the mean validation losses, with C in PFLOP/s-days (beside each size): 6 x "
    "parameters without reads x tokens. The multiplier is the first arm's compute for the loss that an arm's "
    "law has at the largest size, over that size's compute; above 1 the arm saves compute. The interval "
    "draws the seeds of each size anew, the same for both arms; with few seeds it is too narrow."
)
RUN_COLUMNS = (
    "run",
    "state",
    "steps",
    "tokens",
    "validation loss",
    "training loss",
    "tokens/s",
    "learning rate",
)


def render_page(
    title: str, notes: Iterable[str], sections: Iterable[str], records: Sequence[RunRecord], footer: str
) -> str:
    """The whole page; `sections` are HTML already, all else is plain text."""
    return PAGE.substitute(
        title=escape(title),
        notes="\n".join(f"<p>{escape(note)}</p>" for note in notes),
        sections="\n".join(sections),
        runs=_table(RUN_COLUMNS, [_run_row(record) for record in records]),
        footer=escape(footer),
    )


def heading(text: str) -> str:
    """The heading of a section."""
    return f"<h2>{escape(text)}</h2>"


def loss_table(results: Sequence[ArmResult]) -> str:
    """Final losses of one size, each arm at its best rate."""
    rows = []
    for result in results:
        best, difference = result.best, result.difference
        compared = ("–", "–", "–") if difference is None else _difference_cells(difference)
        rows.append(
            (
                result.arm,
                rate_label(best),
                number(best.loss.value),
                number(best.loss.error),
                str(len(best.loss.by_seed)),
                *compared,
                number(result.tokens_per_second, ",.0f"),
                number(result.seconds, ",.0f"),
                number(math.nan if result.parameters is None else result.parameters, ",.0f"),
            )
        )
    return f"<p>{escape(LOSS_CAPTION)}</p>\n{_table(LOSS_COLUMNS, rows)}"


def difference_table(results: Sequence[ArmResult]) -> str:
    """The differences from the first arm of one size, seed by seed."""
    compared = [
        (result.arm, result.difference.by_seed) for result in results if result.difference is not None
    ]
    seeds = list(dict.fromkeys(seed for _, by_seed in compared for seed in by_seed))
    rows = [(arm, *(number(by_seed.get(seed), "+.4f") for seed in seeds)) for arm, by_seed in compared]
    return _table(("minus first arm", *(f"seed {seed}" for seed in seeds)), rows)


def sweep_table(results: Sequence[ArmResult]) -> str:
    """The whole sweep of one size; the best rate of each arm is marked."""
    rows = [
        (
            result.arm,
            rate_label(rate) + (" (best)" if rate == result.best else ""),
            number(rate.loss.value),
            number(rate.loss.error),
            str(len(rate.loss.by_seed)),
        )
        for result in results
        for rate in result.rates
    ]
    return _table(("arm", "learning rate", "validation loss", "standard error", "seeds"), rows)


def scaling_table(results: Sequence[ScalingResult]) -> str:
    """The power laws and the compute multipliers over the sizes."""
    rows = []
    for result in results:
        low, high = result.interval or (None, None)
        interval = "–" if low is None else f"{number(low, '.2f')} to {number(high, '.2f')}"
        rows.append(
            (
                result.arm,
                *(number(point.loss) for point in result.points),
                number(result.law.coefficient),
                number(result.law.exponent),
                number(result.multiplier, ".2f"),
                interval,
            )
        )
    sizes = [f"{point.size} ({point.compute:.2g})" for point in results[0].points]
    columns = ("arm", *sizes, "A", "b", "compute multiplier", "95% interval")
    return f"<p>{escape(SCALING_CAPTION)}</p>\n{_table(columns, rows)}"


def picture(path: Path, title: str, caption: str) -> str:
    """A PNG file inside the page."""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return (
        f"<figure>\n<h3>{escape(title)}</h3>\n"
        f'<img src="data:image/png;base64,{data}" alt="{escape(title)}">\n'
        f"<figcaption>{escape(caption)}</figcaption>\n</figure>"
    )


def number(value: float | None, kind: str = ".4f") -> str:
    """The number in that format, or a dash where there is none."""
    return "–" if value is None or math.isnan(value) else format(value, kind)


def rate_label(rate: RateResult) -> str:
    """The learning rate, or a dash where it is not known yet."""
    return "–" if rate.peak is None else f"{rate.peak:g}"


def _difference_cells(difference: Mean) -> tuple[str, str, str]:
    pairs = len(difference.by_seed)
    return number(difference.value, "+.4f"), number(difference.error), str(pairs)


def _run_row(record: RunRecord) -> tuple[str, ...]:
    state = record.status if record.reason is None else f"{record.status}: {record.reason}"
    return (
        record.name,
        state,
        number(record.steps, ",d"),
        number(record.tokens, ",d"),
        number(record.loss),
        number(record.train_loss),
        number(record.tokens_per_second, ",.0f"),
        number(record.peak_learning_rate, "g"),
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "\n".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )
