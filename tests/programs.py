"""Random small programs, as Python source: token-wise work and work that mixes tokens.

A value's letter says its shape: R rows [B, s, 12], L rows with the batch of 1 [1, s, 12], H heads
[B, 3, s, 4], S tokens first [s, B, 12], F flattened [B * s, 12], N positions [s, 12], P pooled
[B, 1, 12], M a mask of tokens [B, s, 1], K a memory of a fixed length [B, 7, 12]. In programs of
experts, E is two entries a row [B * s * 2, 12], G such entries in some order, I the expert of each
entry [B * s * 2], O an order of them, V an inverse. A template makes a value of its letter out of
earlier values. Values stay small, and float64 keeps rounding from
deciding a comparison.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

WIDTH = 12
MEMORY = 7

# Tensors that programs read besides their inputs: weights, read as `self.NAME`.
SHAPES: dict[str, tuple[int, ...]] = {
    "w": (WIDTH, WIDTH),
    "wide": (24, WIDTH),
    "narrow": (WIDTH, 24),
    "small": (4, 4),
    "up": (WIDTH, 4),
    "bias": (WIDTH,),
    "table": (128, WIDTH),
    "kernel": (WIDTH, WIDTH, 3),
}

TEMPLATES: tuple[tuple[str, str], ...] = (
    # Token-wise work on rows.
    ("R", "F.linear({R}, self.w, self.bias)"),
    ("R", "F.layer_norm({R}, (12,), self.bias)"),
    ("R", "{R} * torch.rsqrt({R}.pow(2).mean(-1, keepdim=True) + 1.0)"),
    ("R", "F.linear(F.silu(F.linear({R}, self.wide)), self.narrow)"),
    ("R", "{R} + {R}"),
    ("R", "torch.tanh({R} * {R})"),
    ("R", "{R} + self.bias"),
    ("R", "torch.softmax({R}, -1) - {R}"),
    ("R", "torch.addcmul({R}, {R}, {R}, value=0.1).tanh()"),
    ("R", "torch.cat([{R}[..., :6], {R}[..., 6:]], -1)"),
    ("R", "torch.cat([{R}[..., 6:], -{R}[..., :6]], -1)"),
    ("R", "torch.cat([c.sigmoid() for c in {R}.chunk(3, -1)], -1)"),
    ("R", "torch.stack([{R}, {R}], 2).mean(2)"),
    ("R", "torch.stack([{R}, {R}], 1).sum(1).tanh()"),
    ("R", "torch.where({M}, {R}, {R})"),
    ("R", "{R}.masked_fill({M}, 0.5)"),
    ("R", "{R} * {M}.double()"),
    ("R", "{R}.flip(-1)"),
    ("R", "torch.roll({R}, 2, -1)"),
    ("R", "{R}.cumsum(-1).tanh()"),
    ("R", "torch.einsum('bsd,de->bse', {R}, self.w)"),
    ("R", "{R} @ self.w"),
    ("R", "{R}.clone()"),
    ("R", "{R}.contiguous()"),
    ("R", "{R}.transpose(1, 2).contiguous().transpose(1, 2)"),
    ("R", "torch.zeros_like({R}) + {R}"),
    ("R", "{R}.new_ones(B, s, 12) - {R}"),
    ("R", "{R}.unflatten(-1, (3, 4)).sum(2) @ self.up.t()"),
    ("R", "{R}.repeat_interleave(2, -1)[..., ::2]"),
    ("R", "{R}.expand(B, s, 12)"),
    ("R", "{R}.gather(-1, ({R} + self.bias).topk(12, -1).indices)"),
    ("R", "F.pad(({R} + self.bias).topk(5, -1).values, (0, 7))"),
    ("R", "({R} + self.bias).sort(-1).values"),
    ("R", "{R} * ({R} + self.bias).argmax(-1, keepdim=True).double().cos()"),
    ("R", "torch.scatter(torch.zeros_like({R}), -1, ({R} + self.bias).topk(3, -1).indices, 1.0)"),
    ("R", "{R} - {R}.mean(0, keepdim=True)"),
    ("R", "{R}.flip(0)"),
    ("R", "torch.cat([{R}, {R}], 0)[:B]"),
    ("R", "{R}.float().double()"),
    ("R", "{R}.clamp(-0.5, 0.5)"),
    ("R", "torch.lerp({R}, {R}, 0.3)"),
    ("R", "{R}[..., torch.arange(12).flip(0)]"),
    ("R", "F.glu(torch.cat([{R}, {R}], -1), -1)"),
    # Work that mixes tokens.
    ("R", "{R} - {R}.mean(1, keepdim=True)"),
    ("R", "({R}.cumsum(1) / 8).tanh()"),
    ("R", "torch.softmax({R}, 1) * 4"),
    ("R", "torch.roll({R}, 1, 1)"),
    ("R", "torch.roll({R}, 1)"),
    ("R", "{R}.flip(1)"),
    ("R", "{R}.flip((0, 1))"),
    ("R", "F.pad({R}[:, :-1], (0, 0, 1, 0))"),
    ("R", "torch.cat([{R}[:, 1:], {R}[:, :1]], 1)"),
    ("R", "torch.cat([{R}, {R}], 1)[:, :s]"),
    ("R", "torch.cat([{R}, {R}], 1)[:, s:]"),
    ("R", "torch.cat([{R}, {R}], 1)[:, -s:]"),
    ("R", "torch.cat([{R}, {R}], 1)[:, ::2]"),
    ("R", "torch.cat([{P}, {R}], 1)[:, 1:]"),
    ("R", "torch.cat([{P}, {R}], 1)[:, :-1]"),
    ("R", "{R}.flatten(1).tanh().view(B, s, 12)"),
    ("R", "{R}.flatten(1).cumsum(-1).cos().view(B, s, 12)"),
    ("R", "{R}.reshape(B, s * 3, 4).tanh().reshape(B, s, 12)"),
    ("R", "torch.softmax({R}.reshape(B, s * 3, 4), 1).reshape(B, s, 12)"),
    ("R", "{R}.reshape(B, 12, s).transpose(1, 2)"),
    ("R", "{R}.transpose(1, 2).reshape(B, s, 12)"),
    ("R", "{R} @ ({R}.transpose(1, 2) @ {R} / s).tanh()"),
    ("R", "torch.softmax({R} @ {R}.transpose(1, 2), -1) @ {R}"),
    ("R", "torch.softmax({R} @ {R}.transpose(1, 2), 1).tril() @ {R}"),
    ("R", "F.scaled_dot_product_attention({R}, {R}, {R}, is_causal=True)"),
    ("R", "F.conv1d({R}.transpose(1, 2), self.kernel, padding=1).transpose(1, 2).tanh()"),
    ("R", "({R} + self.bias).sort(1).values"),
    ("R", "{R}.gather(1, ({R} + self.bias).topk(2, 1).indices).sum(1, keepdim=True) + {R}"),
    ("R", "{R} - {R}[:, -1:]"),
    ("R", "{R} + {R}[:, 0].unsqueeze(1)"),
    ("R", "{R} * (1.0 / s)"),
    ("R", "{R} / {R}.shape[1]"),
    ("R", "({R} * math.sqrt(s)).sin()"),
    ("R", "{R} + {R}[:, : s // 2].mean(1, keepdim=True)"),
    ("R", "{R}[:, torch.arange(s)]"),
    ("R", "{R}[:, torch.arange(s).flip(0)]"),
    ("R", "{R}[:, s - 1 - torch.arange(s)]"),
    ("R", "{R}.index_select(1, torch.arange(s))"),
    ("R", "{R} / {M}.sum(1, keepdim=True).clamp(min=1)"),
    ("R", "({R} * {M}.cumsum(1)).sin()"),
    # Work on a memory that has no tokens.
    ("R", "torch.softmax({R} @ {K}.transpose(1, 2), -1) @ {K}"),
    ("R", "F.scaled_dot_product_attention({R}, {K}, {K})"),
    ("R", "{R} + {K}.mean(1, keepdim=True)"),
    ("K", "torch.tanh({K} @ self.w)"),
    ("K", "{K} + {P}"),
    ("K", "torch.softmax({K} @ {R}.transpose(1, 2), -1) @ {R}"),
    # Pooled rows, masks, positions, other layouts, and the way back.
    ("P", "{R}.mean(1, keepdim=True)"),
    ("P", "{R}.amax(1, keepdim=True)"),
    ("P", "{R}[:, -1:]"),
    ("P", "{R}[:, :1]"),
    ("P", "{P}.tanh()"),
    ("R", "{R} + {P}"),
    ("R", "{P}.expand(B, s, 12)"),
    ("R", "{P} * {R} + {P}"),
    ("M", "({R}.sum(-1, keepdim=True) > 0)"),
    ("M", "({R}[..., :1] > {P}[..., :1])"),
    ("M", "~{M}"),
    ("M", "{M} & {M}"),
    ("M", "{M}.flip(1)"),
    ("M", "(torch.arange(s) % 3 == 0)[None, :, None].expand(B, s, 1)"),
    ("M", "(torch.arange(s) < s // 2)[None, :, None].expand(B, s, 1)"),
    ("N", "torch.outer(torch.arange(s).double(), self.bias).sin()"),
    ("N", "torch.outer((torch.arange(s) - s).double(), self.bias).cos()"),
    ("N", "torch.linspace(0, 1, s, dtype=torch.float64)[:, None] * self.bias"),
    ("N", "self.table[torch.arange(s)]"),
    ("N", "self.table[:s]"),
    ("N", "F.embedding(torch.arange(s), self.table)"),
    ("N", "{N}.flip(-1)"),
    ("N", "{N}.cumsum(0).tanh()"),
    ("N", "{R}[0]"),
    ("N", "{R}.sum(0).tanh()"),
    ("R", "{R} + {N}"),
    ("R", "{R} * {N}.unsqueeze(0)"),
    ("R", "{N}.expand(B, s, 12)"),
    ("R", "{N}.repeat(B, 1, 1)"),
    ("R", "{L} + {R}"),
    ("L", "{L}.tanh()"),
    ("L", "{R}[:1]"),
    ("L", "{R}.sum(0, keepdim=True).tanh()"),
    ("F", "{R}.reshape(-1, 12)"),
    ("F", "{R}.reshape(B * s, 12)"),
    ("F", "{R}.flatten(0, 1)"),
    ("F", "F.linear({F}, self.w)"),
    ("F", "F.layer_norm({F}, (12,))"),
    ("F", "{F} + {F}"),
    ("F", "{F} - {F}.mean(0)"),
    ("F", "{F}.flip(0)"),
    ("F", "torch.cat([{F}[:, 3:], {F}[:, :3]], 1)"),
    ("F", "torch.cat([{F}, {F}], 0)[: B * s]"),
    ("F", "{F}.t().contiguous().t()"),
    ("F", "{F}[torch.arange(B * s)]"),
    ("F", "torch.where({F} > 0, {F}, {F})"),
    ("R", "{F}.view(B, s, 12)"),
    ("R", "{F}.unflatten(0, (B, s))"),
    ("R", "{F}.reshape(s, B, 12).transpose(0, 1)"),
    ("R", "{F}.unflatten(0, (-1, s)) + {R}"),
    ("S", "{R}.transpose(0, 1)"),
    ("S", "{R}.permute(1, 0, 2).contiguous()"),
    ("S", "F.linear({S}, self.w)"),
    ("S", "{S} + {S}"),
    ("S", "torch.roll({S}, 1, 0)"),
    ("S", "{S}.reshape(s * B, 12).sin().view(s, B, 12)"),
    ("S", "{S}.flip(1)"),
    ("R", "{S}.transpose(0, 1)"),
    ("H", "{R}.view(B, s, 3, 4).transpose(1, 2)"),
    ("H", "{R}.reshape(B, s, 3, 4).permute(0, 2, 1, 3)"),
    ("H", "{R}.unflatten(-1, (3, 4)).transpose(1, 2).contiguous()"),
    ("H", "{H} @ self.small"),
    ("H", "{H} + {H}"),
    ("H", "torch.cat([-{H}[..., 2:], {H}[..., :2]], -1)"),
    ("H", "F.layer_norm({H}, (4,))"),
    ("H", "{H} * {M}.unsqueeze(1)"),
    ("H", "{H} - {H}.mean(1, keepdim=True)"),
    ("H", "{H}[:, :1].expand(B, 3, s, 4)"),
    ("H", "{H}[:, :1].repeat_interleave(3, 1)"),
    ("H", "F.scaled_dot_product_attention({H}, {H}, {H}, is_causal=True)"),
    ("H", "F.scaled_dot_product_attention({H}, {H}[:, :1], {H}[:, :1], enable_gqa=True)"),
    ("H", "F.scaled_dot_product_attention({H}, {H}, {H}, attn_mask={M}.view(B, 1, 1, s))"),
    ("H", "torch.softmax(({H} @ {H}.mT).masked_fill(causal(s), -1e9), -1) @ {H}"),
    ("H", "{H}.softmax(2)"),
    ("R", "{H}.transpose(1, 2).reshape(B, s, 12)"),
    ("R", "{H}.transpose(1, 2).flatten(2)"),
    ("R", "{H}.permute(0, 2, 3, 1).reshape(B, s, 12)"),
    ("R", "torch.cat({H}.unbind(1), -1)"),
    ("R", "{H}.reshape(B, s, 12)"),
)

EXPERTS: tuple[tuple[str, str], ...] = (
    ("E", "{F}.repeat_interleave(2, 0)"),
    ("E", "{F}[:, None].expand(-1, 2, -1).reshape(-1, 12)"),
    ("E", "{E}.tanh() + {E}"),
    ("E", "torch.bmm({E}.unsqueeze(1), self.w.expand(4, 12, 12)[ids]).squeeze(1)"),
    ("G", "{E}[{O}]"),
    ("G", "{F}[{O} // 2]"),
    ("G", "{F}.index_select(0, {O} // 2)"),
    ("G", "{G}.tanh()"),
    ("G", "F.linear({G}, self.w)"),
    ("G", "{G} + {G}"),
    ("G", "{G} + self.table[ids[{O}]]"),
    ("V", "{O}.argsort()"),
    ("V", "torch.empty_like({O}).index_put_(({O},), torch.arange({O}.size(0)))"),
    ("E", "{G}[{V}]"),
    ("E", "torch.zeros_like({G}).index_put_(({O},), {G})"),
    ("F", "{E}.view(-1, 2, 12).sum(1)"),
    ("F", "{E}.view(-1, 2, 12)[:, 0].tanh()"),
    ("F", "torch.zeros_like({F}).index_add_(0, {O} // 2, {G}).tanh()"),
    ("R", "{F}.view(B, s, 12)"),
)
# Steps that make another order, or are wrong in one way.
WRONG_EXPERTS: tuple[tuple[str, str], ...] = (
    ("I", "({F} + self.bias)[:, :4].topk(2, -1).indices.reshape(-1)"),
    ("I", "{I}.clamp(0, 2)"),
    ("O", "{I}.argsort(stable=True)"),
    ("O", "{I}.argsort(stable=True)"),
    ("O", "{I}.sort(stable=True, descending=True).indices"),
    ("O", "{O}.flip(0)"),
    ("O", "{O}[{O}]"),
    ("G", "{F}[{O} // 3]"),
    ("G", "{G} + {E}"),
    ("G", "{G} * {I}.sort(stable=True).values.double()[:, None]"),
    ("G", "{G} - {G}.mean(0)"),
    ("G", "{G}.roll(1, 0)"),
    ("G", "{G}.view(-1, 2, 12).flip(1).reshape(-1, 12)"),
    ("V", "torch.zeros_like({O}).index_put_(({O},), torch.arange({O}.size(0)).flip(0))"),
    ("E", "{G}[{O}]"),
    ("E", "{G}"),
    ("E", "{E} + {O}[:, None].double().cos()"),
    ("E", "{E} + torch.histc({I}.sort().values.double(), 4, 0, 3).sum().cos()"),
    ("E", "{E} * (torch.arange(B * s * 2) % 2)[:, None]"),
    ("F", "{F} + {G}.view(-1, 2, 12).sum(1)"),
)

# Written in place, into values of the program or (rarely) the caller's tensors.
STATEMENTS: tuple[str, ...] = (
    "{R}.mul_(0.5)",
    "{R}.add_({R}).tanh_()",
    "{R}[..., :4].add_(1.0)",
    "{R}[..., 6:] = {R}[..., :6]",
    "{R}[:, 0] = 0.25",
    "{R}[:, -1].fill_(0.5)",
    "{R}[:, 1:] = {R}[:, :-1].clone()",
    "{R}.masked_fill_({M}, 0.1)",
    "{R}.view(B * s, 12)[:, 3:].tanh_()",
    "{R}.transpose(1, 2)[:, :3].cos_()",
    "{R}.copy_({R})",
    "{R}[:1].sub_({N})",
    "{R}.sub_({R}.mean(1, keepdim=True))",
    "{R}.unflatten(-1, (3, 4)).select(2, 1).sin_()",
    "{F}.sin_()",
    "{F}[:, :2] *= 0.5",
    "{H}.add_({H}).tanh_()",
    "{H}[:, 1].cos_()",
    "{S}[0].mul_(0.5)",
    "{S}.tanh_()",
    "{P}.add_(0.5)",
    "{K}[:, 2:].mul_(0.5)",
    "{N}.cos_()",
)

EXPERT_STATEMENTS: tuple[str, ...] = (
    "{O}.copy_({O}.flip(0))",
    "{O}.view(-1, 2).copy_({O}.view(-1, 2).flip(1))",
    "{V}.copy_({O})",
    "{I}.clamp_(max=1)",
    "{G}.tanh_()",
    "{G}[:, :4].add_(1.0)",
    "{G}.copy_({E})",
    "{E}.mul_(0.5)",
)

OUTPUTS: tuple[str, ...] = (
    "{R}",
    "{R}",
    "{R}.transpose(1, 2)",
    "{R}[..., :3]",
    "{R}[:, -1]",
    "{R}[:, :1]",
    "{R}.view(B, s, 3, 4)",
    "{R}[:, ::2]",
    "{R}.unbind(0)",
    "{H}",
    "{H}.transpose(1, 2)",
    "{F}",
    "{F}.view(B, s, 12)",
    "{S}",
    "{P}",
    "{P}.squeeze(1)",
    "{M}",
    "{N}",
    "{K}",
    "{L}",
    "{R}.sum()",
    "F.linear({R}, self.wide)",
    "F.linear({R}[:, -1:], self.wide)",
    "{R}.argmax(-1)",
    "{R}.shape[1]",
)

_SLOT = re.compile(r"\{(\w)\}")


@dataclass(frozen=True)
class Program:
    """Source of ``forward(self, x, y, k)``, the batch it is for, and the form of ``y``."""

    source: str
    batch: int
    y: str

    def __str__(self) -> str:
        return f"# batch {self.batch}, y is {self.y}\n{self.source}"

    def arguments(self, num_tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
        """Random arguments; the same for the same numbers."""
        batch = {"R": self.batch, "L": 1, "P": self.batch}[self.y]
        length = 1 if self.y == "P" else num_tokens
        shapes = [
            (self.batch, num_tokens, WIDTH),
            (batch, length, WIDTH),
            (self.batch, MEMORY, WIDTH),
        ]
        generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
        return tuple(
            torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
        )


def random_program(seed: int, num_steps: int = 9, experts: bool = False) -> Program:
    """A program that runs, with or without experts; the same for the same seed."""
    generator = random.Random(seed)
    while True:
        program = _draw(generator, num_steps, experts)
        try:
            module_of(program)(*program.arguments(5, 0))
        except (RuntimeError, IndexError):  # a view of a layout that has none, say
            continue
        return program


def module_of(program: Program) -> nn.Module:
    """A module whose ``forward`` is the program."""
    scope: dict[str, Any] = {"torch": torch, "F": nn.functional, "causal": _causal}
    scope["math"] = __import__("math")
    exec(program.source, scope)
    forward: Callable[..., Any] = scope["forward"]
    module = type("Random", (nn.Module,), {"forward": forward})()
    generator = torch.Generator().manual_seed(0)
    for name, shape in SHAPES.items():
        scale = 0.5 if len(shape) == 1 else shape[-1] ** -0.5
        weight = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        module.register_buffer(name, weight)
    return module


def _causal(num_tokens: int) -> torch.Tensor:
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)


def _draw(generator: random.Random, num_steps: int, experts: bool) -> Program:
    batch = generator.choice((1, 3))
    y = generator.choice("RLP")
    values: dict[str, list[str]] = {"R": ["x"], "K": ["k"], "L": [], "P": []}
    values[y].append("y")
    lines = ["def forward(self, x, y, k):", f"    B, s = {batch}, x.shape[1]"]
    templates, statements = TEMPLATES, STATEMENTS
    num_wrong = generator.choice((0, 0, 1, 2, 5)) if experts else 0
    if experts:
        wrong = generator.sample(WRONG_EXPERTS, num_wrong)
        templates, statements = EXPERTS + 2 * tuple(wrong), EXPERT_STATEMENTS
        lines.append("    flat = F.linear(x, self.w).reshape(-1, 12)")
        lines.append("    ids = flat[:, :4].topk(2, -1).indices.reshape(-1)")
        lines.append("    order = ids.argsort(stable=True)")
        values.update(F=["flat"], I=["ids"], O=["order"])

    def filled(template: str, own: bool = False) -> str | None:
        """The template with earlier values, the latest most likely; None if there are none."""

        def pick(match: re.Match[str]) -> str:
            known = values.get(match[1], [])
            if own and generator.random() < 0.9:
                known = [name for name in known if name[0] == "t"]
            if not known:
                raise LookupError(match[1])
            back = min(int(generator.expovariate(0.8)), len(known) - 1)
            return known[-1 - back]

        try:
            return _SLOT.sub(pick, template)
        except LookupError:
            return None

    step = 0
    while step < num_steps:
        if generator.random() < (0.15 if not experts else 0.02 * num_wrong):
            statement = filled(generator.choice(statements), own=True)
            if statement is not None:
                lines.append(f"    {statement}")
            continue
        kind, template = generator.choice(templates)
        expression = filled(template)
        if expression is not None:
            lines.append(f"    t{step} = {expression}")
            values.setdefault(kind, []).append(f"t{step}")
            step += 1
    possible = ("{F}", "{R}", "{F}.view(B, s, 12)") if experts else OUTPUTS
    outputs = [filled(generator.choice(possible)) for _ in range(generator.randint(1, 4))]
    shown = [output for output in outputs if output is not None] or [values["R"][-1]]
    lines.append(f"    return {', '.join(shown)}")
    return Program("\n".join(lines), batch, y)
