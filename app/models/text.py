"""Classifiers of texts: from token ids (N, L), 0 for padding on the right, to logits (N, num_classes).

Padding never changes a prediction: what stands behind a text's last token is looked at by neither.
"""

import math

import torch
from torch import nn


class TextLstm(nn.Module):
    """Embedding, LSTM, a class layer on the state after the last token.

    bidirectional: on that beside the one that a second LSTM has after reading the text from its end.
    """

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        embedding_size: int,
        hidden_size: int,
        dropout: float = 0.0,
        bidirectional: bool = False,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding_size, padding_idx=0)
        self.lstm = nn.LSTM(embedding_size, hidden_size, batch_first=True)
        self.backward_lstm = nn.LSTM(embedding_size, hidden_size, batch_first=True) if bidirectional else None
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(hidden_size * (1 + bidirectional), num_classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        lengths = (tokens != 0).sum(dim=1)
        last = (lengths - 1).clamp(min=0)
        state = _at(self.lstm(self.dropout(self.embedding(tokens)))[0], last)
        if self.backward_lstm is not None:
            # Each text turned round in its own place, so that it begins with its last token, not with padding.
            places = torch.arange(tokens.shape[1], device=tokens.device)
            turned = tokens.gather(1, (last[:, None] - places).clamp(min=0))
            other = _at(self.backward_lstm(self.dropout(self.embedding(turned)))[0], last)
            state = torch.cat([state, other], dim=1)
        return self.fc(self.dropout(state))


def _at(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(N, F) out of (N, L, F): of each row the state at its place (N,)."""
    return states.gather(1, places[:, None, None].expand(-1, 1, states.shape[2])).squeeze(1)


class TextTransformer(nn.Module):
    """Embedding plus sinusoidal positions, transformer encoder layers, the mean over the tokens, a class layer.

    As in Vaswani et al. 2017, with the norm before each part (Xiong et al. 2020), which needs no long warm-up.
    """

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        embedding_size: int,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding_size, padding_idx=0)
        nn.init.normal_(self.embedding.weight, std=embedding_size**-0.5)
        layer = nn.TransformerEncoderLayer(
            embedding_size, num_heads, hidden_size, dropout, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, num_layers, nn.LayerNorm(embedding_size), enable_nested_tensor=False
        )
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(embedding_size, num_classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        is_padding = tokens == 0
        size = self.embedding.embedding_dim
        embedded = self.embedding(tokens) * math.sqrt(size) + _positions(tokens.shape[1], size, tokens.device)
        states = self.encoder(self.dropout(embedded), src_key_padding_mask=is_padding)
        is_token = (~is_padding).to(states.dtype)[:, :, None]
        return self.fc((states * is_token).sum(dim=1) / is_token.sum(dim=1).clamp(min=1))


def _positions(length: int, size: int, device: torch.device) -> torch.Tensor:
    """(length, size): sines in the first half of the features, cosines in the second."""
    half = (size + 1) // 2
    rates = torch.exp(torch.arange(half, device=device) * (-math.log(10_000) / half))
    angles = torch.arange(length, device=device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :size]
