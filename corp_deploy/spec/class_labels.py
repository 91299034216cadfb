"""Class labels of images as options and recipes name them: a file, or the word `folders` for class folders."""

from pathlib import Path

FOLDERS = "folders"
KINDS = ".npy, .npz with the key labels, .txt, .csv or .json"
LABELS_HELP = (
    f"Class indices of the images: {KINDS}, one per image, in order or by file name; or the word {FOLDERS}, for the "
    "class folders below the images in sorted order."
)


def labels_file(path: Path) -> Path | None:
    """Return `path` itself, or None if it is the word `folders` and no such file exists."""
    return None if path.name == FOLDERS and not path.exists() else path
