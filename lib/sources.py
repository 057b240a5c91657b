"""Where text comes from: docstrings, local files, FineWeb-Edu.

A source has two members.
    about                 what manifest.json says of it (a dict)
    documents(position)   yields (text, position after it), in a fixed order

A position says where a source goes on (JSON), and None is the start. FineWebEdu alone yields positions. The other
sources yield None, and their text is read again.
"""

import ast
import codecs
import gc
import importlib.metadata
import json
import multiprocessing
import platform
import sys
import sysconfig
import warnings
from pathlib import Path

from lib.errors import UserError, warn


def open_source(names, threads):
    """The source that --source `names` (a list) asks for. Raises UserError where it is not there or not readable."""
    alone = {"docs": lambda: Docs(threads), "fineweb-edu": FineWebEdu}
    if len(names) > 1 and set(names) & set(alone):
        raise UserError(f"--source: {' '.join(names)}: docs and fineweb-edu stand alone (a file of that name: ./docs)")
    return alone[names[0]]() if names[0] in alone else Files(names)


# ---- docs: docstrings of what is installed anyway --------------------------------------------------------------------

PYTHON = "3.11"
DISTRIBUTIONS = {  # pinned by the requirements; those with much text
    "torch": "2.13.0",
    "sympy": "1.14.0",
    "pandas": "3.1.1",
    "networkx": "3.6.1",
    "numpy": "2.4.6",
    "matplotlib": "3.11.2",
    "huggingface_hub": "2.4.0",
    "datasets": "5.2.0",
    "fonttools": "4.68.0",
    "mpmath": "1.3.0",
    "pillow": "13.0.0",
    "fsspec": "2026.9.0",
    "pyarrow": "26.0.1",
}
LEFT_OUT = ("test", "tests", "testing", "idle_test")  # folders; those that begin with _ are left out too


class Docs:
    """Docstrings of the standard library and of DISTRIBUTIONS, each text once. `threads` processes parse the files."""

    def __init__(self, threads):
        self.threads = threads
        self.versions = {name: installed_version(name) for name in ("python", *DISTRIBUTIONS)}
        self.about = {"kind": "docs", "versions": self.versions}
        for name, recorded in {"python": PYTHON, **DISTRIBUTIONS}.items():
            version = self.versions[name]
            if version is None:
                warn(f"docs: {name} {recorded} is not installed; its docstrings are missing from this corpus")
            elif not f"{version}.".startswith(f"{recorded}."):
                warn(f"docs: recorded with {name} {recorded}, installed is {version}; the corpus may differ")

    def files(self):
        """Paths of the source files in a fixed order, without tests and private packages."""
        library = Path(sysconfig.get_path("stdlib"))
        modules = [(path.relative_to(library), path) for path in library.rglob("*.py")]
        groups = [[pair for pair in modules if pair[0].parts[0].removesuffix(".py") in sys.stdlib_module_names]]
        for name in DISTRIBUTIONS:
            if self.versions[name]:
                listed = importlib.metadata.files(name) or []
                groups.append([(path, Path(path.locate())) for path in listed if path.suffix == ".py"])
        return [
            str(path)
            for group in groups
            for name, path in sorted(group)
            if path.is_file() and not any(part in LEFT_OUT or part[0] == "_" for part in name.parts[:-1])
        ]

    def documents(self, position):
        seen = set()
        spawn = multiprocessing.get_context("spawn")
        with spawn.Pool(self.threads, initializer=gc.disable) as pool:  # syntax trees have no cycles
            for found in pool.imap(docstrings, self.files(), chunksize=16):
                for text in found:
                    if text not in seen:
                        seen.add(text)
                        yield text, None


def installed_version(name):
    """The version of a distribution or of "python", None where it is not installed."""
    try:
        version = platform.python_version() if name == "python" else importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return version.split("+")[0]  # torch's +cpu, +cu130


def docstrings(path):
    """The docstrings of a Python source file in their order; none if it does not parse."""
    warnings.simplefilter("ignore")  # invalid escapes in other people's sources
    found = []

    def visit(node):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append(ast.get_docstring(node) or "")
        for field in ("body", "handlers", "orelse", "finalbody"):
            for child in getattr(node, field, ()):
                visit(child)

    try:
        visit(ast.parse(Path(path).read_bytes()))
    except (SyntaxError, ValueError, RecursionError):
        return []
    return [text for text in found if text]


# ---- local files -----------------------------------------------------------------------------------------------------

TXT_MIN, TXT_MAX = 2_000, 1_000_000  # bytes of a document cut from a .txt


class Files:
    """Local .txt, .jsonl and .parquet files, one after another. Duplicates are kept."""

    def __init__(self, names):
        self.paths = [Path(name) for name in names]
        for path in self.paths:
            if not path.is_file():
                what = "a folder, give its files" if path.is_dir() else "not there"
                raise UserError(f"--source: {path} is {what}; it takes docs, fineweb-edu or files")
            if path.suffix not in READERS:
                raise UserError(f"--source: {path}: unknown extension {path.suffix!r}; use one of {', '.join(READERS)}")
            if path.stat().st_size == 0:
                raise UserError(f"--source: {path} is empty; leave it out")
            if path.suffix == ".parquet":
                open_parquet(path)  # complain now, not after hours
        about = [{"name": path.name, "bytes": path.stat().st_size} for path in self.paths]
        self.about = {"kind": "files", "files": about}

    def documents(self, position):
        for path in self.paths:
            for text in READERS[path.suffix](path):
                yield text, None


def read_lines(path, limit=-1):
    """(line number, text) of a UTF-8 file; lines beyond `limit` bytes come in pieces."""
    decoder, number = codecs.getincrementaldecoder("utf-8-sig")(), 1
    with open(path, "rb") as file:
        while True:
            line = file.readline(limit)
            try:
                text = decoder.decode(line, final=not line)
            except UnicodeDecodeError as error:
                raise UserError(f"{path}:{number}: not UTF-8 ({error.reason}); convert it, e.g. with iconv") from None
            if not line:
                return
            yield number, text
            number += line.endswith(b"\n")


def read_txt(path):
    """Documents of TXT_MIN to TXT_MAX bytes, cut at blank lines.

    The last document may be shorter. A longer paragraph is cut inside.
    """
    parts, size = [], 0
    for _, line in read_lines(path, limit=1 << 16):
        blank = line.endswith("\n") and not line.strip()
        length = len(line.encode())
        if size + length > TXT_MAX or (blank and size >= TXT_MIN):
            yield "".join(parts).strip("\r\n")
            parts, size = [], 0
        if not blank or parts:
            parts.append(line)
            size += length
    if parts:
        yield "".join(parts).strip("\r\n")


def read_jsonl(path):
    """The "text" of the object in each line; blank lines are skipped."""
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)
            raise UserError(f"{path}:{number}: not JSON ({reason}); mend or remove the line") from None
        if not isinstance(record, dict) or "text" not in record:
            raise UserError(f'{path}:{number}: no "text"; every line must be an object like {{"text": "..."}}')
        yield checked(record["text"], f"{path}:{number}")


def read_parquet(path, file=None, skip=0):
    """The texts after the first `skip` rows of `path`, which may be open as `file`."""
    import pyarrow as pa

    row, file = 0, open_parquet(path, file)
    try:
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            if row + group.num_rows <= skip:
                row += group.num_rows
                continue
            rows = int(4e6 * group.num_rows / max(1, group.total_byte_size))  # about 4 MB of text at a time
            rows = max(1, min(rows, 1024))
            for batch in file.iter_batches(rows, row_groups=[index], columns=["text"], use_threads=False):
                for value in batch.column(0):
                    row += 1
                    if row > skip:
                        yield checked(value.as_py(), f"{path}: row {row}")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: row {row}: not UTF-8 ({error.reason}); write the file again") from None
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read after row {row} ({first_line(error)}); fetch it again") from None


def open_parquet(path, file=None):
    """The pyarrow file of `path`, which may be open as `file`. Raises UserError without a column `text`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:  # without pre_buffer: it would hold a whole row group in memory
        file = pq.ParquetFile(file or path, buffer_size=1 << 20, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file ({first_line(error)}); fetch it again") from None
    columns = file.schema_arrow.names
    if "text" not in columns:
        raise UserError(f"{path}: has no column `text`, only {', '.join(columns)}; rename the one to use")
    return file


READERS = {".txt": read_txt, ".jsonl": read_jsonl, ".parquet": read_parquet}


def checked(text, where):
    """`text` itself. Raises UserError naming `where` unless it is a string."""
    if not isinstance(text, str):
        raise UserError(f"{where}: text is of type {type(text).__name__}, not a string; mend or remove it")
    return text


def first_line(error):
    """The first line of an exception's text, its type's name where it has none."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


# ---- FineWeb-Edu from the hub ----------------------------------------------------------------------------------------

FINEWEB, FINEWEB_CONFIG = "HuggingFaceFW/fineweb-edu", "sample-10BT"


class FineWebEdu:
    """FineWeb-Edu's parquet files, streamed from the hub.

    `datasets` finds and opens them, and read_parquet reads them. The iterator of `datasets` itself holds a gigabyte,
    and it may hang when it is not read to the end (apache/arrow#45214).
    """

    about = {"kind": "fineweb-edu", "dataset": FINEWEB, "config": FINEWEB_CONFIG}

    def documents(self, position):
        try:
            import datasets
            import huggingface_hub
            from datasets.utils.file_utils import xopen

            if position is None:
                revision = huggingface_hub.HfApi().dataset_info(FINEWEB, timeout=20).sha
                position = {"revision": revision, "file": 0, "row": 0}
            revision, first = position["revision"], position["file"]
            builder = datasets.load_dataset_builder(FINEWEB, FINEWEB_CONFIG, revision=revision)
            for index, url in list(enumerate(builder.config.data_files["train"]))[first:]:
                skip = position["row"] if index == first else 0
                with xopen(url, "rb") as file:
                    for row, text in enumerate(read_parquet(url, file, skip), skip + 1):
                        yield text, {"revision": revision, "file": index, "row": row}
        except Exception as error:  # the hub's client lets whatever its network layers raised through
            raise UserError(
                f"fineweb-edu: cannot read {FINEWEB} from the hub ({type(error).__name__}: {first_line(error)}); try "
                "again, or fetch its sample/10BT/*.parquet elsewhere and give them: --source FILE.parquet ..."
            ) from error
