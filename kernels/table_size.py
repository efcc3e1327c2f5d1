"""How much memory tables of packed sequences' tiles take, which the host allocates. Plain arithmetic."""

ENTRY_WORDS = 8  # of 32 bits: a whole sector
HEADER = 1  # lines before the entries: how many these are, and how many heads are scheduled together


def table_lines(rows: int, tile: int, batch: int, used: bool):
    """Lines that a table of all tiles of ``tile`` rows needs. ``used``: sequences may use fewer rows than they have."""
    ranges = (2 if used else 1) * batch + 2
    return HEADER + rows // tile + min(ranges, rows)


def workspace_lines(total_q: int, tile: int, batch: int):
    """Lines of a workspace in which each sequence, and the rows behind the last one, begin a new line of ``tile``
    queries.
    """
    return total_q // tile + batch + 1
