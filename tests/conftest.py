import pytest
import torch
from transformers.utils import logging

logging.disable_progress_bar()
torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
