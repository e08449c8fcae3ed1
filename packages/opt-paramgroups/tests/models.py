"""Small models with the shapes and attributes that groups depend on."""

from torch import nn


class Attention(nn.Module):
    """Query and key norms, a fused QKV matrix and a projection."""

    def __init__(self, width):
        super().__init__()
        self.linear_qkv = nn.Linear(width, 3 * width)
        self.q_layernorm = nn.LayerNorm(width)
        self.k_layernorm = nn.LayerNorm(width)
        self.linear_proj = nn.Linear(width, width, bias=False)


class Block(nn.Module):
    """Attention and a norm."""

    def __init__(self, width):
        super().__init__()
        self.attention = Attention(width)
        self.norm = nn.LayerNorm(width)


class Model(nn.Module):
    """An embedding, blocks and an untied output, marked as in Megatron-Core."""

    def __init__(self, width=4, num_layers=2):
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.output = nn.Linear(width, 7, bias=False)
        mark(self.embedding.weight, is_embedding_parameter=True, is_embedding_or_output_parameter=True)
        mark(self.output.weight, is_embedding_or_output_parameter=True)


class Experts(nn.Module):
    """A router, which all ranks share, and experts, which they do not share."""

    def __init__(self, width=4):
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        for param in self.experts.parameters():
            mark(param, allreduce=False)


def mark(param, **attributes):
    """Set attributes on a parameter, as Megatron-Core does."""
    for name, value in attributes.items():
        setattr(param, name, value)
    return param
