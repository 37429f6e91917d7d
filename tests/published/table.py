"""Write the page `docs/accuracy/published.md`: every published number next to the derived one.

    PYTHONPATH=tests python tests/published/table.py

writes the page.
"""

from pathlib import Path

import derive_activations  # noqa: F401  # they register what answers each row
import derive_devices  # noqa: F401
import derive_experts  # noqa: F401
import derive_ops  # noqa: F401
import derive_sharding  # noqa: F401
import derive_training  # noqa: F401
import derive_transformers  # noqa: F401
import derive_vision  # noqa: F401
from published_rows import DERIVED, LATER, ROWS, rounded

PAGE = Path(__file__).parents[2] / "docs" / "accuracy" / "published.md"

HEAD = """\
# Published numbers

Papers, books and tools print numbers: parameters, FLOPs, KV cache sizes, memory of ZeRO stages. This page lists {all}
of them. You see the published value, and the value that costgraph derives from a declared graph at the printed digits.

- {derived} are derived. {disagrees} of these differ from the source, because it rounds on the way, errs or measured.
- {nothing} ask a question that costgraph does not answer.{others}

The declarations are in `tests/published/`, the numbers with their sources in `tests/published/forward.json`. A test
compares the page with `PYTHONPATH=tests python tests/published/table.py`. GB is 10^9 bytes, GiB is 2^30.
"""

NOTHING = "not a question of this library"


def amount(value):
    """A number as text: whole ones in full up to 10^15, others as they are."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if abs(value) >= 10**15:
        return f"{float(value):.4g}"
    text = f"{value:f}" if not isinstance(value, int | float) else str(value)
    whole, dot, rest = text.partition(".")
    return f"{int(whole):,}{dot}{rest}"


def cell(text):
    return text.replace("|", "\\|").replace("*", "\\*")


def printed(row):
    if "formula" in row:
        return f"`{row['formula']}`"
    return f"{amount(row['expected'])} {row['unit'].replace('1e9 ', '10^9 ')}"


def answer(row):
    if "formula" in row:
        derived, _ = DERIVED[row["id"]](row)
        text = f"`{str(derived).replace('**', '^')}`"
        return f"{text}; {row['disagrees']}" if "disagrees" in row else text
    text = amount(rounded(DERIVED[row["id"]](row), row))
    return f"{text}; {row.get('disagrees') or row.get('coarser') or ''}".rstrip("; ")


def lines():
    """Rows of the table by source, in the order of the files."""
    found = {}
    for row in ROWS.values():
        found.setdefault(row["source"], []).append((row, answer(row)))
    for who, row in LATER.values():
        found.setdefault(row["source"], []).append((row, f"{who}: {row['why']}"))
    for source, rows in sorted(found.items(), key=lambda item: item[0].casefold()):
        yield f"\n## {cell(source)}\n\n| id | quantity | published | derived |\n|---|---|---|---|"
        for row, text in rows:
            note = f" ({cell(row['note'])})" if "note" in row else ""
            text = text if text.startswith("`") else cell(text)
            yield f"| {cell(row['id'])} | {cell(row['quantity'])}{note} | {printed(row)} | {text} |"


def page():
    """Return the text of the page."""
    groups = {}
    for who, _ in LATER.values():
        groups[who] = groups.get(who, 0) + 1
    nothing = groups.pop(NOTHING, 0)
    others = "".join(f"\n- {n} {who}." for who, n in groups.items())
    head = HEAD.format(
        all=len(ROWS) + len(LATER),
        derived=len(ROWS),
        disagrees=sum("disagrees" in r for r in ROWS.values()),
        nothing=nothing,
        others=others,
    )
    return head + "\n".join(lines()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
