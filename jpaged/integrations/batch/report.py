"""The page that `--report` writes: one HTML file with its charts inside, for any browser, without a
network.
"""

import html
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jpaged.integrations.batch.charts import histogram, line_chart, number
from jpaged.integrations.batch.progress import duration
from jpaged.integrations.batch.stats import BatchStats

LONGEST = 1500  # characters of a prompt with its answer that are shown
STYLE = """
:root { color-scheme: light dark; --text: #1f2430; --soft: #5b6475; --back: #f5f6f8; --card: #fff; --edge: #d9dde5;
  --one: #1d5fd1; --two: #c2590a; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8ec; --soft: #a3abba; --back: #15181d; --card: #1e2229;
  --edge: #363c47; --one: #7fb0ff; --two: #ffab5e; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 20px 16px 40px; background: var(--back); color: var(--text);
  font: 15px/1.45 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5em; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1em; margin: 28px 0 10px; }
p { margin: 4px 0; color: var(--soft); }
.tiles, .charts { display: grid; gap: 12px; margin-top: 14px; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
.tile, figure, .card { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 10px 12px; }
.tile b { display: block; font-size: 1.35em; font-weight: 600; }
.tile.bad b, .bad th { color: var(--bad); }
.tile span { color: var(--soft); font-size: .87em; }
figure { margin: 0; }
figcaption { font-weight: 600; }
figure ul { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 2px 0 4px; padding: 0;
  color: var(--soft); font-size: .87em; }
figure i { display: inline-block; width: 18px; margin-right: 6px; vertical-align: 4px; border-top: 3px solid; }
svg { display: block; width: 100%; height: auto; max-width: 640px; }
svg text { font-size: 12.5px; fill: var(--soft); }
.grid { stroke: var(--edge); stroke-width: 1; }
.axis { stroke: var(--soft); stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.s0 { stroke: var(--one); border-color: var(--one) !important; }
.s1 { stroke: var(--two); border-color: var(--two) !important; }
i.p99 { border-top-style: dashed; }
.bar { fill: var(--one); opacity: .75; }
.mark { stroke-width: 2; }
.median { stroke: var(--text); border-color: var(--text) !important; }
.p99 { stroke: var(--two); border-color: var(--two) !important; stroke-dasharray: 4 3; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--edge);
  overflow-wrap: anywhere; }
tr:last-child > * { border-bottom: 0; }
tbody th { font-weight: 500; white-space: nowrap; width: 1%; overflow-wrap: normal; }
thead th { color: var(--soft); font-weight: 500; font-size: .87em; white-space: nowrap; overflow-wrap: normal; }
td.count { text-align: right; white-space: nowrap; width: 1%; }
td.share { width: 30%; min-width: 60px; }
td.share i { display: block; height: .75em; margin-top: .35em; min-width: 2px; background: var(--one); }
.bad td.share i { background: var(--bad); }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, "DejaVu Sans Mono",
  monospace; }
@media (max-width: 640px) { .counts thead { display: none; }
  .counts tr { display: flex; flex-wrap: wrap; border-bottom: 1px solid var(--edge); padding: 4px 0; }
  .counts tr > * { border: 0; padding-block: 2px; width: auto; } .counts td.share { flex: 1; }
  .counts td.note { flex-basis: 100%; } .counts td:empty { display: none; } .counts td.share { display: block; } }
.sample { border-left: 3px solid var(--edge); padding-left: 10px; }
.sample + .sample { margin-top: 14px; }
"""


def render(stats: BatchStats, *, title: str, settings: Mapping[str, Any]) -> str:
    """The page. settings: what the run was told, by name."""
    charts = [_throughput(stats)]
    if len(stats.answered):
        charts += [
            histogram(
                "Latency: from the engine's taking a line to its answer",
                stats.answered.latency,
                "latency, s",
            ),
            histogram("Length of the prompts", stats.answered.prompt_tokens, "tokens", whole=True),
            histogram(
                "Length of the answers", stats.answered.completion_tokens, "tokens", whole=True
            ),
        ]
    began = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(stats.began_at))
    errors = {code: (count, _where(stats, code)) for code, count in stats.errors.most_common()}
    reasons = {reason: (count, "") for reason, count in stats.reasons.most_common()}
    parts = [
        f"<h1>{_text(title)}</h1><p>begun {_text(began)}, took {duration(stats.seconds)}</p>",
        f'<div class="tiles">{"".join(_tiles(stats))}</div>',
        f'<h2>Over time, and by line</h2><div class="charts">{"".join(charts)}</div>',
        "<h2>Errors by kind</h2>",
        _counts("kind", "lines", "where, and what the first said", errors, "bad"),
        "<h2>What ended the answers</h2>",
        _counts("finish reason", "answers", "", reasons, ""),
        f'<h2>Summary</h2><div class="card"><pre>{_text(stats.table())}</pre></div>',
        "<h2>Settings</h2><div "
        f'class="card"><table><tbody>{"".join(_settings(settings))}</tbody></table></div>',
    ]
    if stats.samples:
        shown = "".join(
            f'<pre class="sample">{_text(_cut(sample.strip()))}</pre>' for sample in stats.samples
        )
        parts.append(f'<h2>The first answers</h2><div class="card">{shown}</div>')
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">\
<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'unsafe-inline\'">\
<title>{_text(title)}</title><style>{STYLE}</style>'
    )
    return (
        "<!doctype html>\n<html "
        f'lang="en"><head>{head}</head>\n<body>\n{"\n".join(parts)}\n</body></html>\n'
    )


def write_report(path: str | Path, page: str) -> None:
    """Write the page; one that was there before is replaced in one go. Raises OSError."""
    temporary = Path(f"{path}.part")
    temporary.write_text(page, encoding="utf-8", errors="replace")
    os.replace(temporary, path)


def _throughput(stats: BatchStats) -> str:
    edges, rates = stats.timeline.rates()
    if len(edges) < 2:
        return "<figure><figcaption>Throughput</figcaption><p>Too short a run to draw.</p></figure>"
    named = {"generated": rates["decode_tokens"], "prompt tokens computed": rates["prefill_tokens"]}
    return line_chart("Throughput", edges, named, "tokens/s")


def _tiles(stats: BatchStats) -> list[str]:
    total = (
        f"of {'' if stats.total_is_exact else '~'}{stats.total} " if stats.total is not None else ""
    )
    hits = 100 * stats.tokens_cached / max(stats.tokens_in, 1)
    tiles = [
        ("", str(stats.done), f"{total}lines done"),
        ("bad" if stats.all_failed else "", str(stats.all_failed), "failed"),
        ("", f"{number(stats.tokens_out / stats.seconds)} tok/s", "generated"),
        ("", f"{number(stats.tokens_in / stats.seconds)} tok/s", "prompts"),
        ("", f"{hits:.0f} %", "of prompt tokens from the cache"),
        ("", str(stats.preemptions), "preemptions"),
    ]
    return [
        f'<div class="tile {kind}"><b>{_text(value)}</b><span>{name}</span></div>'
        for kind, value, name in tiles
    ]


def _where(stats: BatchStats, code: str) -> str:
    first = stats.first_lines[code]
    lines = f"line {', '.join(map(str, first))}{', ...' if stats.errors[code] > len(first) else ''}"
    return f"{lines}: {_cut(stats.first_messages[code])}"


def _counts(name: str, unit: str, note: str, rows: Mapping[str, tuple[int, str]], kind: str) -> str:
    """A table of how often what came, each with a bar."""
    if not rows:
        return "<p>None.</p>"
    most = max(count for count, _ in rows.values())
    body = "".join(
        f'<tr class="{kind}"><th>{_text(key)}</th><td class="count">{count}</td>'
        f'<td class="share"><i style="width:{100 * count / most:.1f}%"></i></td>'
        f'<td class="note">{_text(more)}</td></tr>'
        for key, (count, more) in rows.items()
    )
    head = f"<tr><th>{name}</th><th>{unit}</th><th></th><th>{note}</th></tr>"
    return (
        '<div class="card"><table '
        f'class="counts"><thead>{head}</thead><tbody>{body}</tbody></table></div>'
    )


def _settings(settings: Mapping[str, Any]) -> list[str]:
    return [
        f"<tr><th>{_text(name)}</th><td>{_text(str(value))}</td></tr>"
        for name, value in settings.items()
    ]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


def _text(text: str) -> str:
    """Escaped, and without the control characters that no page may hold."""
    return html.escape("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text))
