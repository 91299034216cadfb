"""What commands cost in bare forward passes over the same images, at 512 images, rounded. Imports nothing.

benchmarks/results/passes.json is the record; a test holds these figures to it. With fewer images solving weighs more.
"""

CALIBRATE = 2
BUDGET = 2
CLOSED_LOOP = 6
EXAMPLE_IMAGES = 512


def cost(passes: int) -> str:
    """In words."""
    return f"about {passes} bare passes over {EXAMPLE_IMAGES} images"
