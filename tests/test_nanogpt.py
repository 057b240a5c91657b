"""lib/nanogpt.py: a trunk that is fair to compare with."""

import torch
from helpers import ROOT

from lib.config import parse_config
from lib.nanogpt import PlainGPT
from model import GPT, ModelConfig


def test_it_has_as_many_parameters_as_prenorm():
    """Within 1 %, once the table of positions is left out."""
    config, _ = parse_config([str(ROOT / "configs/bench.toml")], "")
    keys = "vocab_size n_layer n_head d_model d_mlp context n_blocks".split()
    sizes = {name: getattr(config, name) for name in keys}
    models = PlainGPT(config), GPT(ModelConfig(**sizes, variant="prenorm"))
    plain, prenorm = (sum(p.numel() for name, p in m.named_parameters() if "pos_emb" not in name) for m in models)
    assert abs(plain / prenorm - 1) < 0.01


def test_it_is_causal_and_its_gradient_reaches_everything():
    words = "--n_layer=2 --d_model=16 --n_head=2 --d_mlp=24 --n_blocks=2 --context=16 --vocab_size=50"
    config, _ = parse_config(words.split(), "")
    plain, ids, targets = PlainGPT(config), torch.randint(50, (2, 16)), torch.full((2, 16), -100)
    targets[:, 3] = 7
    loss, changed = plain(ids, targets)[1], torch.cat([ids[:, :4], (ids[:, 4:] + 1) % 50], 1)
    assert torch.allclose(loss, plain(changed, targets)[1], atol=1e-6) and loss > 0
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in plain.parameters())
