"""What the numbers of commands and recipes count, and how large each can be."""

from ground.quantity import Count, Real

IMAGES = Count(low=1, high=10**9)
BAD_IMAGES = Count(low=0, high=10**9)
SEED = Count(low=0, high=2**32 - 1)
WORKERS = Count(low=0, high=256)
THREADS = Count(low=1, high=1024)
STREAMS = Count(low=1, high=1024)
STEPS = Count(low=1, high=10**9)
ROUNDS = Count(low=6, high=500)
ALIGNMENT = Count(low=1, high=65_536)
OPSET = Count(low=20, high=23)
OPTIMIZATION_LEVEL = Count(low=0, high=5)
WORKSPACE_MIB = Count(low=1, high=2**24)
MODEL_VERSION = Count(low=1, high=2**63 - 1)
QUEUE_DELAY_US = Count(low=0, high=10**8)
INSTANCES = Count(low=1, high=1024)

MEAN = Real(low=-1000.0, high=1000.0)
DEVIATION = Real(low=0.0, high=1000.0, low_open=True)
SHARE = Real(low=0.0, high=1.0, noun="a share")
SHARE_REMOVED = Real(low=0.0, high=1.0, high_open=True, noun="a share")
SHARE_KEPT = Real(low=0.0, high=1.0, low_open=True, noun="a share")

RIDGE = Real(low=0.0, high=1e6, low_open=True)
ERROR = Real(low=0.0, high=1e6)
MAGNITUDE = Real(low=0.0, high=1e6)
LEVEL = Real(low=0.0, high=1e6)
FACTOR = Real(low=1.0, high=1e6)
GIGABYTES = Real(low=0.0, high=1e6, low_open=True)
SECONDS = Real(low=0.0, high=1e6, low_open=True)
MILLISECONDS = Real(low=0.0, high=1e6, low_open=True)
