"""One page for an evaluation, with everything in it; or its tables as Markdown.

python -m serve.suite_report --markdown OUT/results.json      # tables, to paste
python -m serve.suite_report --html OUT/results.json          # report.html and pictures again, beside the file
"""

import base64
import dataclasses
import html
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro
from rich.table import Table as RichTable

from dspark_jax import ConfigError
from serve import report, suite_against, suite_plots, suite_tables
from serve.suite_plots import Picture
from serve.suite_tables import Table

Result = Mapping[str, Any]

QUESTIONS = {
    1: (
        "How many tokens does a round add?",
        "Accepted length: tokens a drafted round adds to the text, the target's own included, every draft verified."
        " Means weigh sets alike; intervals are 95 % bootstrap intervals over prompts.",
    ),
    2: (
        "How far do drafts stand, and what does the sequential head do for them?",
        "Share of drafts accepted by position: with all before it, and given that those before it were. Without the"
        " head: its bias at zero, on the same prompts.",
    ),
    3: (
        "What do longer blocks and deeper drafters bring and cost?",
        "A drafter that was made for G drafts is also made to draft fewer; more only where a drafter was given that"
        " does. A full round drafts and verifies the whole block; medians of rounds taken in turn.",
    ),
    4: (
        "What does a static confidence threshold verify?",
        "Drafts before the first confidence (calibrated as in serving) below the threshold. At temperature 0 each"
        " threshold is replayed exactly on blocks drafted at every position of the text. At a higher temperature the"
        " recorded rounds are cut short where they are: an estimate, since shorter rounds would begin elsewhere.",
    ),
    5: (
        "Do confidences mean what they say?",
        "Predicted survival of the first k drafts against what was accepted, before and after sequential temperature"
        " scaling: fitted on half of the prompts, chosen on a quarter, measured on the last quarter.",
    ),
    6: (
        "Who is served how fast, as load rises?",
        "Closed loops of users, greedy; every policy in turn at every load. Verified and accepted count drafts a"
        " request and round.",
    ),
    7: (
        "Is the text the target's own?",
        "Temperature 0: texts equal to plain decoding, and how near a tie the target's logits were where one was not."
        " Temperature 1: each sampled token's place in the target's law is uniform if the law is right (chi-square over"
        " ten bins); the same texts held against a wrong law, that of temperature 0.8, must fail.",
    ),
}
NOT_MEASURED = "Not measured in this run."

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; font-variant-numeric: tabular-nums }
caption { text-align: left; font-weight: 600; padding: .3em 0 }
th, td { border-bottom: 1px solid #ddd; padding: .25em .7em; text-align: left; vertical-align: top }
figure { margin: 1em 0 } img { max-width: 100% } figcaption { color: #555; font-size: 13px }
pre { background: #f4f4f4; padding: .7em; white-space: pre-wrap } .scroll { overflow-x: auto }
"""


def write(result: Result, folder: Path) -> Path:
    """Pictures and report.html in a folder."""
    pictures = suite_plots.draw(result, folder)
    path = folder / "report.html"
    part = folder / "report.html.part"
    part.write_text(page(result, pictures), encoding="utf-8")
    part.replace(path)
    return path


def page(result: Result, pictures: Sequence[Picture]) -> str:
    """The whole page; pictures are inside it."""
    names = ", ".join(d["name"] for d in result["drafters"])
    parts = [
        f"<h1>{_text(names)} for {_text(result['target'])}</h1>",
        f"<p>Suite {_text(result['suite'])}, made by</p><pre>{_text(result['command'])}</pre>",
    ]
    if comparison := suite_tables.against(result):
        pairs = ", ".join(f"{d['new']} against {d['old']}" for d in result["against"]["drafters"])
        parts.append(f"<h2>Against an earlier run</h2><p>{_text(pairs)}; the earlier run was made by</p>")
        parts.append(f"<pre>{_text(result['against']['command'])}</pre>")
        parts += map(_html_table, comparison)
    for number, (question, about) in QUESTIONS.items():
        parts.append(f"<h2>{number}. {_text(question)}</h2><p>{_text(about)}</p>")
        tables = suite_tables.TABLES[number](result)
        parts += [_figure(picture) for picture in pictures if picture.question == number]
        parts += map(_html_table, tables)
        if not tables:
            parts.append(f"<p><em>{NOT_MEASURED}</em></p>")
    parts.append("<h2>How it was made</h2>")
    parts += map(_html_table, suite_tables.setup(result))
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(names)}</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _figure(picture: Picture) -> str:
    data, title = base64.b64encode(picture.path.read_bytes()).decode(), _text(picture.title)
    return f'<figure><img alt="{title}" src="data:image/png;base64,{data}"><figcaption>{title}</figcaption></figure>'


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in table.columns)
    rows = "\n".join("<tr>" + "".join(f"<td>{_text(x)}</td>" for x in row) + "</tr>" for row in table.rows)
    caption = f"<caption>{_text(table.title)}</caption>"
    return f'<div class="scroll"><table>{caption}<tr>{head}</tr>\n{rows}</table></div>'


def markdown(result: Result) -> str:
    """Every table under its question."""
    lines = [f"    {result['command']}", ""]
    for number, (question, _) in QUESTIONS.items():
        lines += [f"## {number}. {question}", ""]
        tables = suite_tables.TABLES[number](result)
        lines += [line for table in tables for line in _markdown_table(table)] or [NOT_MEASURED, ""]
    for title, tables in (
        ("Against an earlier run", suite_tables.against(result)),
        ("How it was made", suite_tables.setup(result)),
    ):
        if tables:
            lines += [f"## {title}", "", *(line for table in tables for line in _markdown_table(table))]
    return "\n".join(lines)


def _markdown_table(table: Table) -> list[str]:
    def row(texts: Sequence[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"

    return [f"{table.title}:", "", row(table.columns), "|" + "---|" * len(table.columns), *map(row, table.rows), ""]


def show(result: Result) -> None:
    """Accepted lengths and losslessness on the terminal; the rest is in the report."""
    tables = [*suite_tables.against(result)[:1], *suite_tables.accepted(result), *suite_tables.lossless(result)]
    for table in tables:
        shown = RichTable(*table.columns, title=table.title)
        for row in table.rows:
            shown.add_row(*row)
        report.console().print(shown)


@dataclasses.dataclass(frozen=True)
class Args:
    """Print or draw the results of an evaluation again."""

    markdown: Path | None = None
    """results.json whose tables are printed."""
    html: Path | None = None
    """results.json beside which report.html and pictures are written."""


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = tyro.cli(Args, args=argv, description=__doc__)
        if not args.markdown and not args.html:
            raise ConfigError("give --markdown or --html with a results.json")
        if args.markdown:
            print(markdown(suite_against.read(args.markdown)))
        if args.html:
            print(f"wrote {write(suite_against.read(args.html), args.html.parent)}")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
