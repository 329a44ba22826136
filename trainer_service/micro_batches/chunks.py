"""How many tokens go through the output layer together."""

# Float32 logits of a rank. Two such chunks live at a time: 1 GiB. A chunk reads and writes the weight's whole gradient,
# which its matrix products must outweigh: 883 tokens at 151,936 columns and one rank, 3,532 at four ranks. A small
# model's micro-batch is one chunk, which nothing has to compute twice.
CHUNK_BYTES = 512 * 2**20
_FLOAT = 4


def chunk_tokens(tokens: int, columns: int) -> int:
    """Return the tokens of a chunk, so that the fewest possible chunks are about equally large.

    Args:
        tokens: with a log-prob to compute.
        columns: of the vocabulary on a rank.
    >>> chunk_tokens(2048, 151936), chunk_tokens(100, 151936), chunk_tokens(0, 8)
    (683, 100, 1)
    """
    most = max(1, CHUNK_BYTES // (_FLOAT * columns))
    chunks = max(1, -(-tokens // most))
    return max(1, -(-tokens // chunks))
