"""The program of a decoder, layer by layer, from its description."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distir.ir.function import Function, FunctionMaker, Role, Value
from distir.ir.type import DType, Int64, Tensor
from distir.models.experts import routes
from distir.ops.attention import each_head
from distir.ops.rules import scalar, shape_of

if TYPE_CHECKING:
    from distir.models.decoder import Decoder

_ACTIVATIONS = {
    "gelu": ("Gelu", {"approximate": "none"}),
    "gelu_tanh": ("Gelu", {"approximate": "tanh"}),
    "silu": ("Silu", {}),
    "relu": ("Relu", {}),
}
"""The op, and its attributes, by a description's word."""


def build(config: Decoder, dtype: DType) -> Function:
    """The forward pass of a decoder; see `distir.models.decoder.decoder`."""
    return _Builder(config, dtype).build()


class _Builder:
    def __init__(self, config: Decoder, dtype: DType) -> None:
        self.config, self.dtype = config, dtype
        self.maker = FunctionMaker("decoder")
        self.emit = self.maker.emit
        self.rows = config.batch, config.seq

    def build(self) -> Function:
        c = self.config
        ids = self.maker.add_input_value("input_ids", Tensor(Int64, self.rows), Role("data", 0))
        table = Tensor(self.dtype, (1, 1, c.seq, c.turned))
        self.tables = {
            prefix: [self.maker.add_input_value(prefix + name, table, Role("constant")) for name in ("cos", "sin")]
            for prefix in c.tables()
        }
        embedding = self.parameter("embedding", c.vocab, c.hidden)
        x = self.scaled(self.emit("Gather", embedding, ids, axis=0), c.embedding_scale)
        if not c.rotary:
            x = self.emit("Add", x, self.positions())
        x = self.dropped(x)
        for i in range(c.layers):
            x = self.layer(x, i)
        x = self.norm(x, "norm")
        head = self.emit("Transpose", embedding, perm=(1, 0)) if c.tied else self.parameter("head", c.hidden, c.vocab)
        self.maker.set_outputs([self.logits(x, head)])
        return self.maker.finalize()

    def positions(self) -> Value:
        """The rows of the table of positions, (seq, hidden)."""
        c = self.config
        table = self.parameter("positions", c.positions, c.hidden)
        if c.positions == c.seq:
            return table
        first = c.first_position
        return self.emit("Slice", table, starts=(first,), ends=(first + c.seq,), axes=(0,), steps=(1,))

    def layer(self, x: Value, i: int) -> Value:
        """Attention and MLP, each added to what it is given; in parallel both to what the layer is given."""
        c = self.config
        mlp = self.experts if c.experts > 1 else self.mlp
        normed = self.norm(x, f"{i}.norm1")
        if c.parallel:
            return self.emit("Add", x, self.in_parallel(x, normed, i))
        x = self.emit("Add", x, self.after(self.attention(normed, f"{i}.attention", i), f"{i}.post_norm1"))
        return self.emit("Add", x, self.after(mlp(self.norm(x, f"{i}.norm2"), f"{i}.mlp"), f"{i}.post_norm2"))

    def in_parallel(self, x: Value, normed: Value, i: int) -> Value:
        """Attention and MLP of what the layer is given, added up. Biases come after, so that tensor parallelism, which
        makes partial sums of the products, reduces once; dropout would come between."""
        c = self.config
        late = not c.dropout
        found = self.dropped(self.attention(normed, f"{i}.attention", i, bias=not late))
        normed = normed if c.parallel == "one" else self.norm(x, f"{i}.norm2")
        found = self.emit("Add", found, self.dropped(self.mlp(normed, f"{i}.mlp", bias=not late)))
        for name, part in ((f"{i}.attention.out", "out"), (f"{i}.mlp.out", "mlp")):
            if late and part in c.biased:
                found = self.emit("Add", found, self.parameter(f"{name}.bias", c.hidden))
        return found

    def after(self, x: Value, norm: str) -> Value:
        """What attention or an MLP gives, as it is added."""
        return self.dropped(self.norm(x, norm) if self.config.post_norms else x)

    def logits(self, x: Value, head: Value) -> Value:
        c = self.config
        steps: list[tuple[str, list[Value]]] = [("MatMul", [head])]
        if "head" in c.biased:
            steps.append(("Add", [self.parameter("head.bias", c.vocab)]))
        if c.logit_cap:
            cap = scalar(self.maker, c.logit_cap, x)
            steps += [("Div", [cap]), ("Tanh", []), ("Mul", [cap])]
        for k, (kind, others) in enumerate(steps):
            x = self.maker.add_op(kind, "logits" if k == len(steps) - 1 else None, [x, *others])
        return x

    def scaled(self, x: Value, by: float) -> Value:
        return x if by == 1 else self.emit("Mul", x, scalar(self.maker, by, x))

    def parameter(self, name: str, *shape: int) -> Value:
        return self.maker.add_input_value(name, Tensor(self.dtype, shape), Role("parameter"))

    def norm(self, x: Value, name: str) -> Value:
        """Over the last dim."""
        c, axis = self.config, len(shape_of(x)) - 1
        gain = self.parameter(f"{name}.weight", shape_of(x)[axis])
        if c.offset_norms:
            gain = self.emit("Add", gain, scalar(self.maker, 1.0, gain))
        if c.rms:
            return self.emit("RMSNormalization", x, gain, axis=axis, epsilon=c.epsilon)
        bias = self.parameter(f"{name}.bias", shape_of(x)[axis])
        return self.emit("LayerNormalization", x, gain, bias, axis=axis, epsilon=c.epsilon)

    def linear(self, x: Value, name: str, out: int, part: str, bias: bool = True) -> Value:
        """A product with a weight, and the bias if such a part of a layer has one, and it is asked for."""
        y = self.emit("MatMul", x, self.parameter(f"{name}.weight", shape_of(x)[-1], out))
        return self.emit("Add", y, self.parameter(f"{name}.bias", out)) if bias and part in self.config.biased else y

    def by_heads(self, x: Value, heads: int) -> Value:
        y = self.emit("Reshape", x, shape=(*self.rows, heads, self.config.head_size))
        return self.emit("Transpose", y, perm=(0, 2, 1, 3))

    def attention(self, x: Value, name: str, layer: int, bias: bool = True) -> Value:
        c = self.config
        wide, narrow = c.heads * c.head_size, c.kv_heads * c.head_size
        if c.separate:
            sizes = {"q": wide, "k": narrow, "v": narrow}
            found = [self.linear(x, f"{name}.{part}", size, "qkv") for part, size in sizes.items()]
        elif c.kv_heads == c.heads:  # one product
            found = self.emit("Split", self.linear(x, f"{name}.qkv", 3 * wide, "qkv"), axis=2, parts=3)
        else:
            pair = self.linear(x, f"{name}.kv", 2 * narrow, "qkv")
            found = [self.linear(x, f"{name}.q", wide, "qkv"), *self.emit("Split", pair, axis=2, parts=2)]
        q, k, v = (self.by_heads(y, heads) for y, heads in zip(found, (c.heads, c.kv_heads, c.kv_heads), strict=True))
        if c.qk_norm:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        if c.rotary:
            q, k = self.turned(q, layer), self.turned(k, layer)
        k, v = (each_head(self.maker, x, c.heads) for x in (k, v))
        if c.attention == "fused":
            form = {"window": c.window} if c.windowed(layer) else {}
            form |= {"softcap": c.score_cap} if c.score_cap else {}
            y, _ = self.emit("Attention", q, k, v, scale=c.score_scale, causal=True, **form)
        else:
            y = self.emit("MatMul", self.probabilities(q, k), v)
        y = self.emit("Reshape", self.emit("Transpose", y, perm=(0, 2, 1, 3)), shape=(*self.rows, wide))
        return self.linear(y, f"{name}.out", c.hidden, "out", bias)

    def probabilities(self, q: Value, k: Value) -> Value:
        """Those of causal attention. The Dropout, also of ratio 0, keeps them from being fused."""
        c = self.config
        scores, scale = self.emit("MatMul", q, self.emit("Transpose", k, perm=(0, 1, 3, 2))), c.score_scale
        if c.score_cap:
            scores = self.emit("Tanh", self.scaled(scores, scale / c.score_cap))
            scale = c.score_cap
        found = self.emit("Softmax", self.emit("CausalMask", scores, scale=scale), axis=3)
        return self.emit("Dropout", found, ratio=c.dropout)

    def dropped(self, x: Value) -> Value:
        return self.emit("Dropout", x, ratio=self.config.dropout) if self.config.dropout else x

    def turned(self, x: Value, layer: int) -> Value:
        """Pairs of numbers turned by an angle that grows with the position; what is left of a head stays."""
        c = self.config
        cos, sin = self.tables["local_" if c.local_base and c.is_local(layer) else ""]
        rest: list[Value] = []
        if c.turned < c.head_size:
            x, *rest = self.emit("Split", x, axis=3, sizes=(c.turned, c.head_size - c.turned))
        a, b = self.emit("Split", x, axis=3, parts=2)
        across = self.emit("Concat", self.emit("Neg", b), a, axis=3)
        x = self.emit("Add", self.emit("Mul", x, cos), self.emit("Mul", across, sin))
        return self.emit("Concat", x, *rest, axis=3) if rest else x

    def mlp(self, x: Value, name: str, ffn: int = 0, bias: bool = True) -> Value:
        c = self.config
        if c.separate and c.gated:
            gate, up = (self.linear(x, f"{name}.{part}", ffn or c.ffn, "mlp") for part in ("gate", "up"))
            hidden = self.gated(gate, up)
        else:
            hidden = self.activated(self.linear(x, f"{name}.in", self.wide(ffn or c.ffn), "mlp"))
        return self.linear(hidden, f"{name}.out", c.hidden, "mlp", bias)

    def wide(self, ffn: int) -> int:
        """The width of an MLP's first product."""
        return ffn * (2 if self.config.gated else 1)

    def activated(self, x: Value) -> Value:
        if self.config.gated:
            return self.gated(*self.emit("Split", x, axis=2, parts=2))
        return self.activation(x)

    def gated(self, gate: Value, up: Value) -> Value:
        return self.emit("Mul", self.activation(gate), up)

    def activation(self, x: Value) -> Value:
        kind, attributes = _ACTIVATIONS[self.config.activation]
        return self.emit(kind, x, **attributes)

    def experts(self, x: Value, name: str) -> Value:
        """Each expert's MLP of the tokens that it takes; a token gets its experts' shares."""
        c = self.config
        given, x = x, self.regrouped(x, c.groups, c.group)
        router = self.parameter(f"{name}.router.weight", c.hidden, c.experts)
        probabilities = self.emit("Softmax", self.emit("MatMul", x, router), axis=2)
        dispatch, combine = routes(self.maker, probabilities, c.choices, c.slots, c.shares == "normalized")
        y = self.emit("MatMul", self.emit("Transpose", dispatch, perm=(0, 2, 1)), x)
        y = self.emit("Reshape", y, shape=(c.groups, c.experts, c.slots, c.hidden))
        y = self.emit("Transpose", y, perm=(1, 0, 2, 3))
        y = self.emit("Reshape", y, shape=(c.experts, c.groups * c.slots, c.hidden))
        y = self.activated(self.stacked(y, f"{name}.experts.in", self.wide(c.ffn)))
        y = self.stacked(y, f"{name}.experts.out", c.hidden)
        y = self.emit("Reshape", y, shape=(c.experts, c.groups, c.slots, c.hidden))
        y = self.emit("Transpose", y, perm=(1, 0, 2, 3))
        y = self.emit("Reshape", y, shape=(c.groups, c.experts * c.slots, c.hidden))
        y = self.regrouped(self.emit("MatMul", combine, y), *self.rows)
        return self.emit("Add", y, self.shared(given, name)) if c.shared_ffn else y

    def shared(self, x: Value, name: str) -> Value:
        """The MLP of all tokens, times a share that depends on the token."""
        share = self.emit(
            "Sigmoid", self.emit("MatMul", x, self.parameter(f"{name}.shared_gate.weight", self.config.hidden, 1))
        )
        return self.emit("Mul", self.mlp(x, f"{name}.shared", self.config.shared_ffn), share)

    def regrouped(self, x: Value, rows: int, columns: int) -> Value:
        """Tokens (batch, seq, hidden) in groups, or the other way: each step merges dims or parts one."""
        if shape_of(x)[:2] == (rows, columns):
            return x
        width = shape_of(x)[2]
        return self.emit(
            "Reshape", self.emit("Reshape", x, shape=(rows * columns, width)), shape=(rows, columns, width)
        )

    def stacked(self, x: Value, name: str, out: int) -> Value:
        """As `linear`, with weights of its own for each expert: (experts, rows, width) to (experts, rows, out)."""
        c = self.config
        y = self.emit("MatMul", x, self.parameter(f"{name}.weight", c.experts, shape_of(x)[-1], out))
        return self.emit("Add", y, self.parameter(f"{name}.bias", c.experts, 1, out)) if "mlp" in c.biased else y
