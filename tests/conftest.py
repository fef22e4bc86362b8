import pytest
import torch
from transformers.utils import logging

logging.disable_progress_bar()
torch.set_num_threads(1)  # tiny models: a second thread only waits


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
