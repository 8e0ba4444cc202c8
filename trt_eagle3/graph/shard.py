"""Cut a target's graph for one rank of a tensor-parallel engine.

The graph on disk is that of one rank that holds everything. Each rank rewrites it when it loads it,
so a bundle does not depend on the number of ranks. The rewrite finds the ops whose channels divide
and cuts the weights around them:

    by outputs: q, k, v; gate and up; the gated delta net's projections; the head
    by inputs:  o_proj; down_proj; out_proj, which give a part of a sum

A part of a sum is carried through products with whole values and through sums of parts. An
``AllReduce`` follows where anything else reads it. So a layer has two: after the mixer and after
the MLP, with or without a shared expert. ``AllGather`` puts the head's logits together. The
residual stream, the norms and the router are the same on every rank.

Weights are cut as expressions (``weight_slices.py``): a rank reads only its slices from disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, helper, numpy_helper

from trt_eagle3.graph.ops import DOMAIN
from trt_eagle3.graph.states import read_states, replace_states
from trt_eagle3.graph.weight_slices import block_of, take_columns, take_rows
from trt_eagle3.graph.weights import WeightExpr
from trt_eagle3.sharding import Range, Shard
from trt_eagle3.spec import StateSpec

__all__ = ["shard_graph"]

_LOGITS = "logits"


def shard_graph(
    model: onnx.ModelProto, weights: Mapping[str, WeightExpr], shard: Shard
) -> tuple[onnx.ModelProto, dict[str, WeightExpr]]:
    """Return the graph of one rank, and its weights by initializer name.

    The metadata of ``model`` still describe the whole weights.

    Args:
        model: a target graph of one rank. weights: its weights (``external_weights``).
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    sharding = _Sharding(made, dict(weights), shard)
    if shard.size > 1:
        sharding.run()
    return made, sharding.weights


class _Sharding:
    """The rewrite of one graph, in place.

    Attributes:
        weights: cut as far as the rewrite has come.
        parts: values that are this rank's part of a sum.
    """

    def __init__(
        self, model: onnx.ModelProto, weights: dict[str, WeightExpr], shard: Shard
    ) -> None:
        self.weights = weights
        self.parts: set[str] = set()
        self._model, self._graph, self._shard = model, model.graph, shard
        self._made_by = {name: node for node in self._graph.node for name in node.output}
        self._constants = {p.name: p for p in self._graph.initializer if p.name not in weights}
        self._states = {state.name: state for state in read_states(model)}

    def run(self) -> None:
        """Cut every block that divides, then sum their parts."""
        cut = {
            "TreeAttention": self._attention,
            "GatedDelta": self._gated_delta,
            "SiluMul": self._mlp,
            "FusedMoe": self._experts,
        }
        for node in self._graph.node:
            if node.domain == DOMAIN and node.op_type in cut:
                cut[node.op_type](node)
        self._sum_parts()
        self._head()
        replace_states(self._model, list(self._states.values()))

    def _attention(self, node: NodeProto) -> None:
        rope = self._made_by[node.input[0]]
        counts = [_attribute(node, name) for name in ("num_heads", "num_kv_heads")]
        dim = _attribute(rope, "head_dim")
        taken = self._shard.heads(*counts)
        if taken is None:
            return
        (num_heads, num_kv_heads), (query, kv) = counts, taken
        projection, per_head = self._projection(rope.input[0], query, kv, dim)
        starts = (0, num_heads * per_head, num_heads * per_head + num_kv_heads * dim)
        widths = (per_head, dim, dim)
        ranges = [
            (start + heads[0] * width, start + heads[1] * width)
            for start, heads, width in zip(starts, (query, kv, kv), widths, strict=True)
        ]
        self._take_outputs(projection, ranges)
        for own in (node, rope):
            _set(own, "num_heads", _length(query))
            _set(own, "num_kv_heads", _length(kv))
        for name in node.input[3:5]:
            self._reshape_state(name, (_length(kv), dim))
        if len(node.input) > 9:
            scales = numpy_helper.to_array(self._constants[node.input[9]])
            node.input[9] = self._constant(scales[:, slice(*kv)], f"{node.input[9]}.rank")
        self._take_inputs(self._product_after(node.output[0]), (query[0] * dim, query[1] * dim))

    def _projection(self, name: str, query: Range, kv: Range, dim: int) -> tuple[NodeProto, int]:
        """Return the product that makes q, k and v, and its rows for each head of q.

        If each head of q has gate channels, the nodes that cut them off are changed too.
        """
        made_by = self._made_by
        if made_by[name].op_type == "Gemm":
            return made_by[name], dim
        q_raw = made_by[made_by[name].input[0]]  # Concat(q, kv) <- Reshape
        cut = made_by[q_raw.input[0]]
        heads = made_by[cut.input[0]]
        both = made_by[heads.input[0]]
        kinds = [node.op_type for node in (q_raw, cut, heads, both)]
        assert kinds == ["Reshape", "Split", "Reshape", "Split"], kinds
        own = _length(query)
        gate = self._readers(cut.output[1])[0]
        for flat in (q_raw, gate):
            flat.input[1] = self._sizes((-1, own * dim))
        heads.input[1] = self._sizes((-1, own, 2 * dim))
        both.input[1] = self._sizes((own * 2 * dim, 2 * _length(kv) * dim))
        return made_by[both.input[0]], 2 * dim

    def _gated_delta(self, node: NodeProto) -> None:
        num_k, num_v = (_attribute(node, name) for name in ("num_k_heads", "num_v_heads"))
        taken = self._shard.heads(num_v, num_k)
        if taken is None:
            return
        values, keys = taken
        window, matrices = (self._states[name] for name in node.input[6:8])
        key_dim, value_dim = matrices.shape[1:]
        k_width, v_width = num_k * key_dim, num_v * value_dim
        q_rows = (keys[0] * key_dim, keys[1] * key_dim)
        v_rows = (values[0] * value_dim, values[1] * value_dim)
        channels = [q_rows, _moved(q_rows, k_width), _moved(v_rows, 2 * k_width)]
        self._take_outputs(
            self._made_by[node.input[0]], [*channels, _moved(v_rows, 2 * k_width + v_width)]
        )
        self._take_outputs(self._made_by[node.input[1]], [values, _moved(values, num_v)])
        self._take_rows(node.input[2], channels)
        for name in node.input[3:5]:
            self._take_rows(name, [values])
        _set(node, "num_k_heads", _length(keys))
        _set(node, "num_v_heads", _length(values))
        num_channels = sum(map(_length, channels))
        self._reshape_state(window.name, (window.shape[0], num_channels))
        self._reshape_state(matrices.name, (_length(values), key_dim, value_dim))
        num_rows = _length(q_rows) + _length(v_rows) + 2 * _length(values)
        for name, width in zip(node.output[3:5], (num_channels, num_rows), strict=True):
            self._output_width(name, width)
        self._take_inputs(self._product_after(node.output[0]), v_rows)

    def _mlp(self, node: NodeProto) -> None:
        up, down = self._made_by[node.input[0]], self._product_after(node.output[0])
        width = self.weights[down.input[1]].shape[1]
        taken = self._shard.width(width, self._block(up.input[1], down.input[1]))
        if taken is not None:
            self._take_outputs(up, [taken, _moved(taken, width)])
            self._take_inputs(down, taken)

    def _experts(self, node: NodeProto) -> None:
        up, down = node.input[2:4]
        experts, _, width = self.weights[down].shape
        taken = self._shard.width(width, self._block(up, down))
        if taken is None:
            return
        halves = [_moved(taken, half * width) for half in range(2 * experts)]
        self._take_rows(up, halves)
        self.weights[down] = take_columns(self.weights[down], taken)
        self.parts.add(node.output[0])

    def _head(self) -> None:
        """Cut the head by rows of the vocabulary, and gather the logits."""
        node = self._made_by[_LOGITS]
        while node.op_type != "Gemm":
            node = self._made_by[node.input[0]]
        rows = self._shard.even(self.weights[node.input[1]].shape[0])
        if rows is not None:
            self._take_outputs(node, [rows])
            self._insert("AllGather", node.output[0])

    def _block(self, up: str, down: str) -> int:
        """Return the channels between two weights that share a scale in either of them."""
        return max(block_of(self.weights[up])[0], block_of(self.weights[down])[1])

    def _take_outputs(self, product: NodeProto, ranges: Sequence[Range]) -> None:
        for name in product.input[1:]:
            self._take_rows(name, ranges)

    def _take_rows(self, name: str, ranges: Sequence[Range]) -> None:
        self.weights[name] = take_rows(self.weights[name], ranges)

    def _take_inputs(self, product: NodeProto, columns: Range) -> None:
        """Keep the ``columns`` of a weight; the product becomes a part of a sum."""
        self.weights[product.input[1]] = take_columns(self.weights[product.input[1]], columns)
        if self._shard.rank:  # the bias is added once
            del product.input[2:]
        self.parts.add(product.output[0])

    def _product_after(self, name: str) -> NodeProto:
        """Return the product that reads ``name``, perhaps after it was gated."""
        (node,) = self._readers(name)
        return node if node.op_type == "Gemm" else self._product_after(node.output[0])

    def _readers(self, name: str) -> list[NodeProto]:
        return [node for node in self._graph.node if name in node.input]

    def _sum_parts(self) -> None:
        """Add an ``AllReduce`` after each part of a sum that is read as a whole value."""
        for node in list(self._graph.node):
            read = [name for name in node.input if name in self.parts]
            others = len(node.input) - len(read)
            joins = node.op_type == "Add" and not others
            scales = node.op_type == "Mul" and len(read) == 1
            if joins or scales:
                self.parts.add(node.output[0])
                continue
            for name in read:
                self._insert("AllReduce", name)
                self.parts.remove(name)
        assert not self.parts.intersection(o.name for o in self._graph.output), "an output in parts"

    def _insert(self, op: str, name: str) -> None:
        """Compute ``name`` by ``op``, of what its node has computed so far."""
        node = self._made_by[name]
        part = f"{name}.part"
        node.output[list(node.output).index(name)] = part
        made = helper.make_node(op, [part], [name], name=f"{name}/{op}", domain=DOMAIN)
        nodes = list(self._graph.node)
        place = next(i for i, other in enumerate(nodes) if part in other.output)
        self._graph.node.insert(place + 1, made)
        self._made_by[name] = self._graph.node[place + 1]
        self._made_by[part] = node

    def _reshape_state(self, name: str, shape: tuple[int, ...]) -> None:
        state = self._states[name]
        self._states[name] = StateSpec(state.name, state.kind, shape, state.dtype)
        for values in (self._graph.input, self._graph.output):
            for value in values:
                if value.name in {state.name, state.output_name}:
                    for dim, size in zip(value.type.tensor_type.shape.dim[1:], shape, strict=True):
                        dim.dim_value = size

    def _output_width(self, name: str, width: int) -> None:
        for value in self._graph.output:
            if value.name == name:
                value.type.tensor_type.shape.dim[-1].dim_value = width

    def _sizes(self, sizes: Sequence[int]) -> str:
        """Add a constant of sizes."""
        array = np.array(sizes, dtype=np.int64)
        return self._constant(array, f"rank_sizes_{'_'.join(map(str, sizes))}")

    def _constant(self, array: NDArray[Any], name: str) -> str:
        if name not in self._constants:
            proto = numpy_helper.from_array(np.ascontiguousarray(array), name)
            self._graph.initializer.append(proto)
            self._constants[name] = proto
        return name


def _attribute(node: NodeProto, name: str) -> int:
    return int(next(a.i for a in node.attribute if a.name == name))


def _set(node: NodeProto, name: str, value: int) -> None:
    next(a for a in node.attribute if a.name == name).i = value


def _length(taken: Range) -> int:
    return taken[1] - taken[0]


def _moved(taken: Range, by: int) -> Range:
    return taken[0] + by, taken[1] + by
