"""nanoGPT's trunk, from its public description: what bench.py and results/speed call `plain`."""

from torch import nn
from torch.nn import functional as F

from model import ModelConfig, at_least_float32


class Block(nn.Module):
    """x <- x + attention(LayerNorm(x));  x <- x + MLP(LayerNorm(x))."""

    def __init__(self, D, n_head, hidden):
        super().__init__()
        self.n_head = n_head
        self.norm_1, self.norm_2 = nn.LayerNorm(D, bias=False), nn.LayerNorm(D, bias=False)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, hidden, bias=False), nn.Linear(hidden, D, bias=False)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (role.view(B, T, self.n_head, -1).transpose(1, 2) for role in self.qkv(self.norm_1(x)).split(D, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class PlainGPT(nn.Module):
    """A GPT of nanoGPT's public description: LayerNorm, learned positions, GELU, head tied; equal sizes and parameters.

    Its MLP has two matrices where SwiGLU has three: hidden 3/2 d_mlp, which is the usual 4D where d_mlp is 8/3 D.
    """

    def __init__(self, config):
        super().__init__()
        V, D = ModelConfig(vocab_size=config.vocab_size).padded_vocab, config.d_model
        self.tok_emb, self.pos_emb = nn.Embedding(V, D), nn.Embedding(config.context, D)
        self.blocks = nn.ModuleList(Block(D, config.n_head, 3 * config.d_mlp // 2) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(D, bias=False)
        for p in self.parameters():
            nn.init.normal_(p, 0.0, config.init_std) if p.ndim == 2 else nn.init.ones_(p)

    def forward(self, idx, targets):
        x = self.tok_emb(idx) + self.pos_emb.weight[: idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tok_emb.weight)
        return None, F.cross_entropy(at_least_float32(logits).flatten(0, 1), targets.flatten())
