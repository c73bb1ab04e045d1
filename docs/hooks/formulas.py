"""Write formulas as MathML while the site is built.

The usual way, a script fetched from a server by every reader, needs that server; MathML is shown by browsers as it is,
offline too. A formula that cannot be written is a warning, and so ends a strict build.
"""

import html
import logging
import re
from typing import Any

from latex2mathml.converter import convert

log = logging.getLogger("mkdocs.hooks.formulas")

# What pymdownx.arithmatex leaves behind with `generic: true`.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def mathml(latex: str, display: str) -> str:
    """Return the MathML of a formula; raise ValueError if a command in it is not known."""
    try:
        written = convert(latex.strip(), display=display)
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    unknown = re.findall(r"\\[A-Za-z]+", written)
    if unknown:
        raise ValueError(f"unknown: {', '.join(unknown)}")
    return written


def on_page_content(content: str, /, *, page: Any, **_: Any) -> str:
    """Replace each formula of a page; called by MkDocs."""

    def replace(match: re.Match[str]) -> str:
        latex = html.unescape(match[2])
        try:
            return mathml(latex, "block" if match[1] == "div" else "inline")
        except ValueError as error:
            log.warning("%s: formula %r: %s", page.file.src_path, latex, error)
            return match[0]

    return FORMULA.sub(replace, content)
