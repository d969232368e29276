"""Which op, on which rank, first computed something else than it should have."""

def locate(*args):
    return "x"
