"""What holds for every test."""

import gc
import signal

import pytest
import torch

torch.set_num_threads(1)  # the models are tiny: more threads only spin, and on busy cores that is many times slower


# ---- tiny runs of train.py (tiny_runs.py) ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Random shards and their manifest. No test may change them."""
    import tiny_runs

    return tiny_runs.make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def solo(data, tmp_path_factory):
    """An uninterrupted run: rd, two passes an update. No test may change its folder."""
    import tiny_runs

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    done = tiny_runs.run(data, tmp_path_factory.mktemp("runs") / "solo", variant="rd")
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return done


@pytest.fixture
def leave_no_trace():
    """After a run in this process: signal handlers go back to pytest's, and the run's lock goes with its frames."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    gc.freeze()  # what is there already needs no look: the collection takes milliseconds
    yield
    torch.use_deterministic_algorithms(False)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    gc.collect()
