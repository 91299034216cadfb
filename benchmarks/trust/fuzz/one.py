"""One reader under one driver, in a process of its own.

python -m benchmarks.trust.fuzz.one atheris "gate rules" --home build/fuzz --inputs 100000 --at build/fuzz/rules.json
"""

import argparse
import faulthandler
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from .changes import WORDS, revalued, spliced

OWN = ("ground", "calib", "export", "perf", "corp_deploy")
HUNG_S = 120
EVERY = list(HealthCheck)


def file_of(content: bytes, formats: Sequence[Any]) -> tuple[Any, bytes]:
    """What the first byte says it is, and the rest."""
    return formats[content[0] % len(formats)], content[1:]


def changed(each: Any) -> st.SearchStrategy[bytes]:
    """Files of a format that were whole before."""
    bytewise = spliced(each.whole)
    if each.values is None:
        return bytewise
    value_of, content_of = each.values
    documents = [value_of(each.seal(content)) for content in each.whole]
    return bytewise | st.sampled_from(documents).flatmap(revalued).map(lambda value: _written(content_of, value))


def _written(content_of: Any, value: Any) -> bytes:
    """TOML has no word for None, and no text may hold half a letter."""
    try:
        written: bytes = content_of(value)
    except (TypeError, UnicodeEncodeError, ValueError, AttributeError):
        return repr(value).encode("utf-8", "replace")
    return written


def by_hypothesis(formats: Sequence[Any], take: Any, inputs: int) -> None:
    """Values changed in documents, and bytes in any file."""

    @seed(0)
    @settings(
        max_examples=4 * inputs,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(formats) - 1))
        faulthandler.dump_traceback_later(HUNG_S, exit=True)
        take(formats[place], data.draw(changed(formats[place])))

    run()


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


def by_atheris(formats: Sequence[Any], take: Any, folder: Path) -> None:
    """Bytes, toward lines of the source that no file reached before."""
    atheris: Any = import_module("atheris")
    corpus, words = folder / "corpus", folder / "words"
    corpus.mkdir()
    for place, each in enumerate(formats):
        for number, content in enumerate(each.whole):
            (corpus / f"{place}-{number}").write_bytes(bytes([place]) + content)
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in WORDS))
    longest = 2 * max(len(content) for each in formats for content in each.whole)

    def one(content: bytes) -> None:
        if content:
            take(*file_of(content, formats))

    limits = ["-seed=1", f"-max_len={longest}", "-rss_limit_mb=0", "-malloc_limit_mb=0"]
    atheris.Setup(
        [sys.argv[0], str(corpus), *limits, f"-timeout={HUNG_S}", f"-dict={words}", f"-artifact_prefix={folder}/",
         "-print_final_stats=0", "-verbosity=0"],
        one,
    )  # fmt: skip
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("driver", choices=("atheris", "hypothesis"))
    parser.add_argument("reader")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--inputs", type=int, required=True)
    parser.add_argument("--at", type=Path, required=True)
    arguments = parser.parse_args()
    instrumented: Any = nullcontext()
    if arguments.driver == "atheris":
        atheris: Any = import_module("atheris")
        instrumented = atheris.instrument_imports(include=list(OWN))
    with instrumented:
        from . import readers
        from .watch import ROOT, Watch
    import torch

    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=arguments.home))
    formats = readers.readers(arguments.home)[arguments.reader]
    for each in formats:
        taken = [readers.is_read(each, content, folder) for content in each.whole]
        if not any(taken):
            raise SystemExit(f"{each.name}: no whole file of it is read, so nothing behind its first check is tried")
    allowed = (
        arguments.home.resolve(),
        ROOT,
        sys.prefix,
        sys.base_prefix,
        "/proc/",
        "/sys/",
        "/dev/null",
        "/dev/urandom",
    )
    watch = Watch(at=arguments.at, own=tuple(os.path.realpath(each) for each in allowed))
    watch.begin()

    def take(each: Any, content: bytes) -> None:
        watch.one(each.name, content, lambda: readers.is_read(each, content, folder))
        if watch.inputs >= arguments.inputs:
            watch.save()
            shutil.rmtree(folder)
            os._exit(0)  # libFuzzer counts its own runs, of which some hold nothing

    if arguments.driver == "atheris":
        by_atheris(formats, take, folder)
    else:
        by_hypothesis(formats, take, arguments.inputs)


if __name__ == "__main__":
    main()
