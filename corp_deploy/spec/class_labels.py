"""Class labels of images as options and recipes name them: a file, the word `folders`, or the name of a column."""

from pathlib import Path

FOLDERS = "folders"
KINDS = ".npy, .npz with the key labels, .txt, .csv or .json"
LABELS_HELP = (
    f"Class indices of the images: {KINDS}, one per image, in order or by file name; or the word {FOLDERS}, for the "
    "class folders below the images in sorted order; or the name of a column of whole numbers beside the images in "
    "parquet files and data sets, and cls for the members x.cls of tar shards."
)


def labels_file(path: Path) -> Path | None:
    """Return `path` itself, or None if it is the word `folders` or the name of a column, and no such file exists."""
    return path if path.suffix or path.exists() else None


def class_folder(name: str) -> str:
    """Return the class folder that an image's name begins with, "" for an image in none."""
    return name.partition("/")[0] if "/" in name else ""
