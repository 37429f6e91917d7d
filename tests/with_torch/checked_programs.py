"""Data-dependent programs, in a file whose assertions pytest does not rewrite."""


def checked_by_assert(x):
    assert (x > -100).all() and x.max() < 100, "outside"  # noqa: PT018  # two questions in one
    return x.exp()


def checked_by_raise(x):
    if not bool((x < 100).any()):
        raise ValueError(f"none of {x.shape} fits")
    if x.min() < -100:
        raise ValueError
    return x.exp()
