"""The Penn Treebank files: where they are looked for, and proof that they are the right ones.

The text belongs to the Linguistic Data Consortium and is not part of this package. The three word files are those of
the usual preparation with 10,000 types; the character files are derived from them: of every line blanks at the ends
are dropped, the others become `_`, and a blank follows each character.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ncgru.lab.tasks.corpus import SPLITS, Corpus, build_corpus, decode, lines_of

FILES = {split: f"ptb.{split}.txt" for split in SPLITS}
WORD_SHA256 = {
    "train": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "valid": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "test": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
CHARACTER_SHA256 = {
    "train": "d6f593773ed299b5c0d1acbf2468c7b678b9556f119b26bd2a572f6a2f4843e0",
    "valid": "cdca03fd3666ab2d7f04ca7475b5f86d8a250cd1d7ab5e79007d5426819b1182",
    "test": "fb08d32459ae16765e0c5061c2cb25c858f0e242420b1d39390ef6d33abd4f1a",
}
_ADVICE = (
    "they are the word-level Penn Treebank files of the RNNLM toolkit's simple-examples archive (data licensed by the "
    "LDC, LDC99T42, so they cannot be shipped). Put the three files into one of these folders or set NCGRU_DATA to the "
    "folder that holds them. A text of your own needs none of this: ncgru train text-char/gru --set text=my.txt"
)


def data_folders() -> list[Path]:
    """Where data files are looked for, in order: NCGRU_DATA if it is set, else the user's cache folder."""
    named = os.environ.get("NCGRU_DATA")
    if named:
        base = Path(named).expanduser()
    else:
        cache = os.environ.get("XDG_CACHE_HOME")
        base = (Path(cache) if cache else Path.home() / ".cache") / "ncgru"
    return [base, base / "ptb"]


def find_penn() -> Path:
    """The first data folder with all three word files, else raise FileNotFoundError."""
    folders = data_folders()
    for folder in folders:
        if all((folder / file).is_file() for file in FILES.values()):
            return folder
    missing = [file for file in FILES.values() if not any((folder / file).is_file() for folder in folders)]
    raise FileNotFoundError(
        f"Penn Treebank: {', '.join(missing or FILES.values())} not found together; looked in "
        f"{' and '.join(map(str, folders))}; {_ADVICE}"
    )


def read_penn(folder: Path, unit: str) -> Corpus:
    """The checked corpus by word or by character (blanks as `_`), else raise ValueError."""
    texts = {split: _read_checked(folder / file, WORD_SHA256[split]) for split, file in FILES.items()}
    if unit == "character":
        texts = {split: _underscored(text) for split, text in texts.items()}
        for split, text in texts.items():
            _check(f"the character file derived from {folder / FILES[split]}", spaced(text), CHARACTER_SHA256[split])
    return build_corpus(texts, unit)


def spaced(text: str) -> bytes:
    """The bytes of the usual character file for a text whose blanks are underscores already."""
    return "".join(" ".join(line) + " \n" for line in lines_of(text)).encode()


def _underscored(text: str) -> str:
    return "".join(line.replace(" ", "_") + "\n" for line in lines_of(text))


def _read_checked(path: Path, sha256: str) -> str:
    raw = path.read_bytes()
    _check(str(path), raw, sha256)
    return decode(path, raw)


def _check(what: str, raw: bytes, sha256: str) -> None:
    found = hashlib.sha256(raw).hexdigest()
    if found != sha256:
        raise ValueError(
            f"{what} must have SHA-256 {sha256}, got {found} ({len(raw):,} bytes): it is damaged or another version; "
            f"replace it: {_ADVICE}"
        )
