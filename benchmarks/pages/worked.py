"""The worked example as a page: its cells of prose and of Python, one after the other."""

import re
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "worked.py"
_CELL = re.compile(r"^# %%(?P<kind> \[markdown\])?\n", re.MULTILINE)


def worked() -> str:
    """The script's cells as Markdown."""
    text, parts = SCRIPT.read_text(encoding="utf-8"), []
    heads = list(_CELL.finditer(text))
    assert heads, SCRIPT
    assert heads[0].start() == 0, f"{SCRIPT.name}: begins outside a cell"
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        body = text[head.end() : None if following is None else following.start()].strip("\n")
        prose = "\n".join(line.removeprefix("#").removeprefix(" ") for line in body.splitlines())
        parts.append(prose if head["kind"] else f"```python\n{body}\n```")
    return "\n\n".join(parts)
