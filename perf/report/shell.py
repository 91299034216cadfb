"""The shell of the report's page: one file, no script, nothing from outside; light and dark, phone to paper."""

from __future__ import annotations

from html import escape

from .svg import MARKS, PALETTE

LAYOUT = """
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif }
main { max-width: 1000px; margin: 0 auto; padding: 40px 24px 72px }
h1 { font-size: 28px; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 4px; text-wrap: balance }
.where { color: var(--muted); font-size: 14px; margin: 0 0 20px }
h2 { font-size: 17px; letter-spacing: -.005em; margin: 48px 0 10px; padding-top: 14px;
  border-top: 1px solid var(--line) }
h3 { font-size: 14px; font-weight: 600; margin: 0 0 4px }
figcaption h3 { margin: 0 }
p { margin: 0 0 12px }
.quiet { color: var(--muted); font-size: 13px; max-width: 84ch; margin: 0 0 4px }
.quiet.note { color: var(--note) }
.pass { color: var(--pass) } .fail { color: var(--fail) } .note { color: var(--note) }

.verdict { border: 1px solid var(--line); border-left: 6px solid currentColor; border-radius: 8px;
  padding: 18px 20px; margin-bottom: 20px }
.verdict p { margin: 0 }
.verdict .lead { color: var(--ink); font-size: 19px; line-height: 1.4; margin-top: 8px; text-wrap: pretty }
.verdict .why { color: var(--muted); font-size: 14px; margin-top: 6px; overflow-wrap: anywhere }
.why b { font-weight: 600; margin-right: 2px }
.chip { display: inline-block; border: 1px solid currentColor; border-radius: 99px; padding: 1px 9px; margin-right: 8px;
  font-size: 12px; font-weight: 650; letter-spacing: .03em; white-space: nowrap }
.chip.full { color: var(--page); border: 0; padding: 3px 12px; font-size: 13px }
.chip.full.pass { background: var(--pass) } .chip.full.fail { background: var(--fail) }
.chip.full.note { background: var(--note) }

.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 12px; margin: 0; padding: 0; list-style: none }
.tiles li { border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px }
.tiles b { display: block; font-size: 26px; line-height: 1.2; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums }
.tiles span { display: block; color: var(--muted); font-size: 13px; line-height: 1.35 }

.plots { display: grid; grid-template-columns: 1fr 1fr; gap: 28px 32px; margin-top: 16px }
.beside { display: grid; grid-template-columns: 1fr 1fr; gap: 0 32px; margin-top: 12px }
.beside > :only-child { grid-column: 1 / -1 }
.table { margin-top: 28px; min-width: 0 }
h2 + .table { margin-top: 0 }
.table .quiet { margin: 8px 0 0; max-width: 100ch }
figure { margin: 0; min-width: 0 }
figcaption { margin-bottom: 8px }
figcaption span { display: block; color: var(--muted); font-size: 13px }

.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums }
th { text-align: left; vertical-align: bottom; color: var(--muted); font-size: 12.5px; font-weight: 600 }
th, td { padding: 6px 12px 6px 0; border-bottom: 1px solid var(--line) }
th:last-child, td:last-child { padding-right: 0 }
td { vertical-align: top }
tr td:first-child { font-weight: 550 }
td.number, th.number { text-align: right; white-space: nowrap }
td { white-space: nowrap }
td.words { white-space: normal; min-width: 24ch }
td.number small { white-space: nowrap }
td:first-child small { min-width: 16ch }
td small { display: block; max-width: 36ch; white-space: normal;
  color: var(--muted); font-weight: 400; font-size: 11.5px; line-height: 1.35 }
.pairs td, .pairs td.words { white-space: normal; overflow-wrap: anywhere; min-width: 0 }
.pairs td:first-child { white-space: nowrap; width: 1%; color: var(--muted); font-weight: 400 }
pre { border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; margin: 0; white-space: pre-wrap;
  overflow-wrap: anywhere;
  font: 12.5px/1.6 ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace }
footer { margin-top: 48px; color: var(--muted); font-size: 13px }

@media (max-width: 720px) {
  main { padding: 22px 16px 48px }
  h1 { font-size: 23px }
  h2 { margin-top: 36px }
  .verdict .lead { font-size: 17px }
  .plots, .beside { grid-template-columns: 1fr }
  .tiles { grid-template-columns: 1fr 1fr }
  .tiles b { font-size: 22px }
  .pairs td:first-child { white-space: normal; width: 38% }
  td:first-child { white-space: normal }
  svg.plot { font-size: 13px }
}

@page { size: A4; margin: 14mm 12mm }
@media print {
  :root { --ink: #000; --muted: #444; --line: #ccc; --page: #fff; --dense: #7a8696; --reduced: #0b5cc0;
    --soft: #0b5cc022; --densesoft: #7a869633; --pass: #0d6b40; --fail: #b3141c; --note: #7d5000;
    --passsoft: #0d6b401f }
  body { font-size: 11px; -webkit-print-color-adjust: exact; print-color-adjust: exact }
  main { max-width: none; padding: 0 }
  h1 { font-size: 20px }
  h2 { font-size: 14px; margin-top: 20px; break-after: avoid }
  h3 { font-size: 12px; break-after: avoid }
  .chip { font-size: 8px; padding: 0 6px }
  .chip.full { font-size: 11px; padding: 2px 9px }
  .verdict { padding: 12px 14px; margin-bottom: 12px }
  .tiles li { padding: 8px 10px }
  .verdict .lead { font-size: 14px }
  .tiles { grid-template-columns: repeat(4, 1fr) }
  .tiles b { font-size: 18px }
  .plots, .beside { grid-template-columns: 1fr 1fr }
  .beside { gap: 0 20px }
  .table { margin-top: 14px }
  td small { font-size: 8.5px }
  table { font-size: 9.5px }
  th { font-size: 9px }
  th, td { padding: 3px 8px 3px 0 }
  .quiet, .where, .tiles span, figcaption span, .verdict .why { font-size: 10px }
  .scroll { overflow: visible }
  pre { font-size: 9px }
  figure, .verdict, .tiles li, tr { break-inside: avoid }
}
"""


def page(title: str, body: str) -> str:
    """A whole HTML document."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{PALETTE}{MARKS}{LAYOUT}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
