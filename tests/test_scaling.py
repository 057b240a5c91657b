"""results/speed/scaling.py: the grid, the plot, and a second rank."""

import pytest
from helpers import ROOT

import bench
from lib.errors import UserError

TINY = """--n_layer=2 --d_model=16 --n_head=2 --d_mlp=24 --n_blocks=2 --context=16 --micro_batch=2 --batch_tokens=64
    --vocab_size=50 --device=cpu --compile=false --data_dir=nowhere""".split()


@pytest.fixture
def scaling(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "results/speed")
    import scaling

    return scaling


@pytest.mark.parametrize(
    "L, N, expected",
    [
        (4, 4, {"n_layer": [2, 4, 8], "n_blocks": [1, 2, 4, 8], "d_model": [8, 16, 32]}),
        (2, 2, {"n_layer": [1, 2, 4], "n_blocks": [1, 2, 4], "d_model": [8, 16, 32]}),  # N / 4 is no block
        (3, 2, {"n_layer": [1, 3, 6], "n_blocks": [1, 2], "d_model": [8, 16, 32]}),  # 4 does not divide 2 L
    ],
)
def test_grid(scaling, L, N, expected):
    _, config, _ = bench.parse([*TINY, f"--n_layer={L}", f"--n_blocks={N}"])
    assert {key: [getattr(c, key) for c in configs] for key, configs in scaling.grid(config).items()} == expected


def test_a_folder_that_cannot_be_made_is_said_before_anything_is_measured(scaling, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(bench, "Entrant", lambda *args: pytest.fail("measured"))
    with pytest.raises(UserError, match="folder: cannot create the folder"):
        scaling.main([*TINY, f"--folder={tmp_path / 'file'}"])


def test_plot(scaling, tmp_path):
    pairs = ("rd/block", "block/prenorm")
    points = [(key, value, pair) for key in ("n_layer", "d_model") for value in (2, 4) for pair in pairs]
    rows = [dict(key=k, value=v, pair=p, ratio=0.9, low=0.8, high=1.0) for k, v, p in points]
    scaling.draw(rows, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_two_ranks(scaling):
    row = scaling.rank_children([*TINY, "--rounds=2"], 2)
    assert row["ranks"] == 2 and row["step_ms"] > 0 and row["collective_share"] < 1
