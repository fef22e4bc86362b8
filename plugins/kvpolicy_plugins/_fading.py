"""Sums over queries in which what is old counts for less."""

from torch import Tensor


def faded(state: Tensor, rows: Tensor, queries: Tensor, decay: float) -> Tensor:
    """`state` after `rows` ``[batch, kv_heads, rows, slots]``: each query multiplies what is there by `decay`.

    `queries` are the positions of the rows, -1 for padding, which lets nothing fade.
    """
    real = (queries >= 0).to(rows.dtype)
    since = real.flip(-2).cumsum(-2).flip(-2) - real  # queries after each
    return state * decay ** real.sum(-2) + (rows * decay**since).sum(-2)
