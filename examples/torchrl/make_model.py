"""Save a small model with random weights, and a tokenizer with a token for every byte.

python examples/torchrl/make_model.py runs/tiny_model
"""

import sys
from pathlib import Path

from skyrl_train.testing.tiny_models import save_tiny_model

print(save_tiny_model(Path(sys.argv[1]), "qwen3"))
