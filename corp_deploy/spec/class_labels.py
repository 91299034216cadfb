"""Class labels of images as options and recipes name them."""

from pathlib import Path

FOLDERS = "folders"
KINDS = ".npy, .npz with the key labels, .txt, .csv or .json"
LABELS_HELP = (
    f"Class indices of the images: {KINDS}, one per image, in order or by file name; or the word {FOLDERS}, for the "
    "class folders below the images in sorted order."
)


def labels_file(path: Path) -> Path | None:
    """Return the file of labels, or None for the word `folders` if no file has that name."""
    return None if path.name == FOLDERS and not path.exists() else path
