"""How far the preparation of a data folder has come: whole, begun, not begun, or another one's.

A whole one has manifest.json, a begun one has progress.json. Both hold the `request`: what was asked for (a dict).
"""

from lib.errors import UserError
from lib.files import read_json
from lib.shard_writer import publish
from lib.shards import SPLITS, load_manifest, read_shard_header


def already(out, request):
    """Whether `out` holds this preparation, whole. Raises UserError where it holds another, or a damaged one."""
    manifest = load_manifest(out)
    if manifest is None:
        return False
    refuse_other(out, manifest, request)
    for name, entry in manifest["files"].items():
        path = out / name
        if not path.exists() or read_shard_header(path) != entry["tokens"]:
            raise UserError(
                f"--out: {path} is missing or not as {out}/manifest.json says; delete the folder to prepare it again"
            )
    print(f"{out} is already prepared with these arguments; nothing to do")
    return True


def refuse_other(out, found, request):
    """Raise UserError unless what `out` holds was prepared as `request` (both dicts) says."""
    differing = ", ".join(key for key in request if found.get(key) != request[key])
    if differing:
        raise UserError(f"--out: {out} holds data prepared with another {differing}; name another folder or delete it")


def load_progress(out, request):
    """progress.json (a dict) with its full shards published, or the progress of a preparation that begins.

    Raises UserError where `out` holds something else.
    """
    path = out / "progress.json"
    if path.exists():
        progress = read_json(path)
        if not sound(progress):
            raise UserError(f"{path}: prepare_data.py did not write it so; delete {out} and prepare again")
        refuse_other(out, progress["request"], request)
        publish(out, progress["files"])
        print(f"{out}: going on after {len(progress['files'])} full shards", flush=True)
        return progress
    if any(out.glob("*.bin")):
        raise UserError(f"--out: {out} holds shards from elsewhere; name another folder")
    return {
        "request": request,
        "documents": 0,
        "empty_documents": 0,
        "corpus_sha256": "",
        "position": None,  # of the source
        "files": {},  # the full shards: {name: {tokens, sha256}}
        "splits": {split: {"documents": 0, "bytes": 0, "tokens": 0, "growing": 0} for split in SPLITS},
    }


def sound(progress):
    """Whether `progress` (a dict) has all that `prepare` goes on from, in the right types."""

    def counts(entry, *names):
        return isinstance(entry, dict) and all(type(entry.get(name)) is int and entry[name] >= 0 for name in names)

    return (
        "position" in progress
        and counts(progress, "documents", "empty_documents")
        and isinstance(progress.get("corpus_sha256"), str)
        and all(isinstance(progress.get(name), dict) for name in ("request", "files", "splits"))
        and all(counts(progress["splits"].get(split), "documents", "bytes", "tokens", "growing") for split in SPLITS)
        and all(counts(entry, "tokens") for entry in progress["files"].values())
    )
