"""What a directory of results holds, gathered for the report: bench, parity, reduction, effects and lineage."""

from pathlib import Path
from typing import Any

from corp_deploy.store import checkpoint
from corp_deploy.store.manifest import MANIFEST_KIND
from ground.errors import BadInput
from ground.files import read_json, whole

EFFECTS_KIND = "corp-deploy/effects"
REPORTS = "corp-deploy report "


def _optional(path: Path, kind: str) -> dict[str, Any] | None:
    return read_json(path, kind=kind) if path.is_file() else None


def _site_line(site: dict[str, Any]) -> dict[str, Any]:
    """Errors as shares of the dense signal, so that sites of different size stand on one axis."""
    energy = site["energy"] or 1.0
    held_out, loop = site.get("held_out"), site.get("loop")
    return {
        "site": f"{site['site']}.{site['part']}" if site["part"] != "mlp" else site["site"],
        "width_dense": str(site["width_dense"]),
        "width_reduced": f"{site['width']} (asked {site['width_asked']:g})",
        "error_uncompensated": site["error_uncompensated"] / energy,
        "error": site["error"] / energy,
        "error_held_out": held_out and held_out["error"] / (held_out["energy"] or 1.0),
        "stream_error": loop and loop["error"] / (loop["energy"] or 1.0),
        "stream_error_held_out": loop and loop["error_held_out"] / (loop["energy"] or 1.0),
    }


def _models(bench: dict[str, Any] | None, parity: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The two subjects of the measurement with what the parity record knows about them."""
    if bench is None:
        return []
    accuracies = [row["accuracy"] for row in (parity or {}).get("accuracy", [])]
    links = (parity or {}).get("links", [])
    agreement = next((link["measures"].get("top1_agreement") for link in links if link["kind"] == "reduced"), None)
    known = (
        {"accuracy": accuracies[0] if accuracies else None},
        {"accuracy": accuracies[1] if len(accuracies) > 1 else None, "agreement": agreement},
    )
    return [
        {
            "name": subject["name"],
            "params": subject["params"],
            "macs": subject["macs"],
            "size_bytes": subject["size_bytes"],
            **facts,
        }
        for subject, facts in zip(bench["subjects"], known, strict=True)
    ]


def _lineage(manifest: dict[str, Any] | None, reduced: dict[str, Any] | None) -> dict[str, Any]:
    lineage = {
        key: value for key, value in (reduced or {}).get("lineage", {}).items() if key not in ("reduction", "command")
    }
    if manifest is not None:
        lineage |= {
            "versions": manifest["versions"],
            "files": {name: entry["sha256"] for name, entry in _told_of(manifest).items()},
        }
    return lineage


def _told_of(manifest: dict[str, Any] | None) -> dict[str, Any]:
    """The files that a report tells of: it can't hold its own digest."""
    files = {} if manifest is None else manifest["files"]
    return {name: entry for name, entry in files.items() if not entry["made_by"].startswith(REPORTS)}


def record_of_directory(directory: Path, title: str | None = None) -> dict[str, Any]:
    """Everything the report may show. Raises BadInput when the directory holds neither a bench nor a parity record."""
    if not directory.is_dir():
        raise BadInput(f"{directory}: no such directory, expected one with bench.json or parity.json")
    with whole(f"{directory}: a record of the report"):
        return _record(directory, title)


def _record(directory: Path, title: str | None) -> dict[str, Any]:
    bench = _optional(directory / "bench.json", "bench")
    parity = _optional(directory / "parity.json", "parity")
    if bench is None and parity is None:
        raise BadInput(
            f"{directory}: neither bench.json nor parity.json is here; run `bench` or `verify` with -o into it"
        )
    reduced = _optional(directory / "reduced" / checkpoint.CONFIG, checkpoint.KIND)
    effects = _optional(directory / "effects.json", EFFECTS_KIND)
    manifest = _optional(directory / "manifest.json", MANIFEST_KIND)
    reduction = (reduced or {}).get("lineage", {}).get("reduction", {})
    commands = [entry["made_by"] for entry in _told_of(manifest).values() if entry["made_by"]]
    return {
        "title": title or f"{directory.resolve().name}: dense against reduced",
        "bench": bench,
        "parity": parity,
        "gate": _optional(directory / "gate.json", "gate"),
        "sites": [_site_line(site) for site in reduction.get("sites", [])],
        "coverage": reduction.get("coverage", {}).get("verdict"),
        "models": _models(bench, parity),
        "ways": reduction.get("ways", []),
        "effects": (effects or {}).get("rows", []),
        "lineage": _lineage(manifest, reduced),
        "commands": list(dict.fromkeys(commands)),
    }
