"""From results and pictures to one HTML page that needs nothing beside it and no network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from attention_residuals.analysis.report_page import framed
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
:root { color-scheme: light dark; --ink: #1f2933; --soft: #52606d; --page: #ffffff; --card: #f5f7fa;
  --line: #cbd2d9; --mark: #0b57d0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --soft: #9aa5b1; --page: #14181d; --card: #1f252c; --line: #3e4c59;
    --mark: #ffb84d; }
}
* { box-sizing: border-box; }
body { max-width: 80rem; margin: 0 auto; padding: .5rem 1rem; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.3rem; margin-top: 2.5rem; }
h3 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
h1, h2, h3, p { overflow-wrap: anywhere; }
p, figcaption { max-width: 46rem; }
figure { margin: 1rem 0; }
figcaption { margin-top: .5rem; }
figcaption, caption, footer { color: var(--soft); }
.picture { overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: .4rem; }
.picture img { display: block; margin: 0 auto; max-width: 100%; height: auto; }
.scroll { overflow-x: auto; width: fit-content; max-width: 100%; border: 1px solid var(--line);
  border-radius: .4rem; margin: 1rem 0; }
.scroll:focus-visible, .picture:focus-visible { outline: 3px solid var(--mark); outline-offset: 1px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
caption { text-align: left; padding: .5rem .6rem; }
th, td { padding: .25rem .6rem; border-top: 1px solid var(--line); text-align: right; white-space: nowrap; }
thead th { background: var(--card); vertical-align: bottom; white-space: normal; }
tbody th { font-weight: 500; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--page); }
thead th:first-child { background: var(--card); }
th.text, td.text { text-align: left; }
td.text { white-space: normal; min-width: 10rem; }
@media (max-width: 40rem) {
  tbody th { white-space: normal; overflow-wrap: break-word; min-width: 6rem; max-width: 8rem; }
}
</style>
</head>
<body>
<header>
<h1>$title</h1>
$notes
</header>
<main>
$sections
<h2>Runs</h2>
$runs
</main>
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
    "its standard error",
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
        runs=_table("Every run", RUN_COLUMNS, [_run_row(record) for record in records]),
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
    return f"<p>{escape(LOSS_CAPTION)}</p>\n{_table('Final losses', LOSS_COLUMNS, rows)}"


def difference_table(results: Sequence[ArmResult]) -> str:
    """The differences from the first arm of one size, seed by seed."""
    compared = [
        (result.arm, result.difference.by_seed) for result in results if result.difference is not None
    ]
    seeds = list(dict.fromkeys(seed for _, by_seed in compared for seed in by_seed))
    rows = [(arm, *(number(by_seed.get(seed), "+.4f") for seed in seeds)) for arm, by_seed in compared]
    columns = ("arm", *(f"seed {seed}" for seed in seeds))
    return _table("Validation loss minus the first arm's, seed by seed", columns, rows)


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
    columns = ("arm", "learning rate", "validation loss", "standard error", "seeds")
    return _table("Validation loss at every learning rate", columns, rows)


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
    table = _table("Mean validation loss at each size, and the power law through it", columns, rows)
    return f"<p>{escape(SCALING_CAPTION)}</p>\n{table}"


def picture(path: Path, title: str, caption: str) -> str:
    """A PNG file inside the page."""
    return (
        f"<h3>{escape(title)}</h3>\n<figure>\n{framed(path, title, title)}\n"
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


def _table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col"{_kind(name)}>{escape(name)}</th>' for name in columns)
    body = "\n".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(
            f"<td{_kind(column)}>{escape(cell)}</td>" for column, cell in zip(columns[1:], rest, strict=True)
        )
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>\n'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _kind(column: str) -> str:
    """The class of a column's cells: a reason may take several lines."""
    return ' class="text"' if column == "state" else ""
