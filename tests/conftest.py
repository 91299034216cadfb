"""One thread a process: tests run side by side, and threads that wait for each other would only cost time."""

import torch

torch.set_num_threads(1)
