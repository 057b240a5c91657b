"""train.py with attention queries that start at random, not at zero.

    python results/controls/random_start.py apart apart.toml --variant=average --seed=1 --device=cpu

`apart` is a draw for each route, `together` one for all routes of a layer. apart.toml is a copy of a config, whose name
names the run's folder. The draws are N(0, 0.05), the size that trained queries have at xs. They come from a
generator of their own: everything else starts and goes on as in train.py.
"""
# ruff: noqa: E402 - the repository's root comes onto the path first

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from lib.config import parse_config
from lib.errors import or_exit


class RandomStart(train.GPT):
    @torch.no_grad()
    def init_weights(self):
        super().init_weights()
        generator = torch.Generator().manual_seed(torch.initial_seed())
        for layer in self.layers:
            draw = None
            for name in layer.attn_read.names:
                if draw is None or HOW == "apart":
                    draw = 0.05 * torch.randn(self.config.d_model, generator=generator)
                getattr(layer.attn_read, name).copy_(draw)


if __name__ == "__main__":
    HOW = sys.argv[1] if len(sys.argv) > 1 else ""
    if HOW not in ("apart", "together"):
        sys.exit("error: the first argument is apart or together, then what train.py takes")
    config, name = or_exit(parse_config, sys.argv[2:], __doc__)
    train.GPT = RandomStart
    sys.exit(or_exit(train.main, config, name))
