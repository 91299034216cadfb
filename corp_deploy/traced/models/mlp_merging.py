"""Token merging for MLPs alone: an MLP computes the merged tokens of each window, and every token gets its result.

The residual stream keeps all tokens, so blocks of any kind can follow: attention in shifted windows, convolutions or
pooling. As in ToMeSD (Bolya and Hoffman, arXiv 2303.17604) merges are undone behind the layers they are made for.

Legend: B inputs, N tokens of a map of H rows and W columns, P protected ones in front, C channels; V windows of T
tokens, of which M are kept each.
"""

import copy
import math
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, fx, nn

from corp_deploy.spec.merging import Merging
from corp_deploy.traced.finding.cuts import input_free_nodes
from corp_deploy.traced.finding.pointwise import is_pointwise
from corp_deploy.traced.programs.program import (
    IN_FRONT,
    SAME,
    SHAPED,
    Program,
    batch_axis_of,
    module_of,
    named_arguments,
    operation,
    sizes_at_one,
)
from corp_deploy.traced.programs.sizes import infer_sizes_
from ground.errors import BadInput

from .token_merging import TokenMerge, unmerge_tokens

FEWEST, LARGEST = 32, 256  # tokens of a window where its map can be cut so
_PASSED = SAME | SHAPED | {"mul", "mul_", "add", "add_", "layer_norm", "rms_norm"}
_SPLITS = frozenset({"chunk", "split", "split_with_sizes", "slice"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMlp:
    """An MLP over tokens: the nodes `inside` lead from `entering` [B,N,C] or [B,H,W,C] to its last layer `leaving`.

    `protected` tokens stand in front of the map `grid` of rows and columns, which windows of `window` divide.
    """

    entering: fx.Node
    inside: tuple[fx.Node, ...]
    leaving: fx.Node
    protected: int
    grid: tuple[int, int]
    window: tuple[int, int]

    @property
    def path(self) -> str:
        return module_of(self.leaving)[0].rpartition(".")[0]

    @property
    def tokens(self) -> int:
        return self.protected + math.prod(self.grid)

    @property
    def windows(self) -> int:
        return math.prod(self.grid) // math.prod(self.window)

    def count(self, share: float) -> int:
        """Return the number of tokens that merge with this share of every window, half of each at most."""
        size = math.prod(self.window)
        return self.windows * min(round(share * size), size // 2)


def find_token_mlps(program: Program) -> tuple[TokenMlp, ...]:
    """Return the MLPs over tokens that are added to a residual stream, in order."""
    free = input_free_nodes(program)
    found = (_mlp_before(program, node, free) for node in program.nodes if operation(node) == "linear")
    return tuple(each for each in found if each is not None) if program.any_batch else ()


def build_mlp_merged_program(program: Program, merging: Merging) -> Program:
    """Build the program that merges tokens for its MLPs. Raises BadInput if the merging doesn't fit its MLPs."""
    mlps = find_token_mlps(program)
    if len(merging.schedule) != len(mlps):
        raise BadInput(
            f"merging: a schedule of {len(merging.schedule)} entries for {len(mlps)} MLPs; give one entry for each MLP"
        )
    graph = fx.GraphModule(program.graph, copy.deepcopy(program.graph.graph))
    by_name = {node.name: node for node in graph.graph.nodes}
    for number, (mlp, count) in enumerate(zip(mlps, merging.schedule, strict=True)):
        _check_count(number, mlp, count)
        if count:
            _merge_inside_(graph, by_name, mlp, count)
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    graph.recompile()
    infer_sizes_(graph, inputs, any_batch=True)
    return Program(graph=graph.eval(), model=program.model, any_batch=True, folded=program.folded)


def _check_count(number: int, mlp: TokenMlp, count: int) -> None:
    if count % mlp.windows or count > mlp.count(0.5):
        raise BadInput(
            f"merging: MLP {number} has {mlp.windows} windows of {math.prod(mlp.window)} tokens, expected a multiple "
            f"of {mlp.windows} up to {mlp.count(0.5)}, got {count}; merge equally many in each window"
        )


def _merge_inside_(graph: fx.GraphModule, by_name: dict[str, fx.Node], mlp: TokenMlp, count: int) -> None:
    entering, leaving = by_name[mlp.entering.name], by_name[mlp.leaving.name]
    name, taken = f"{mlp.path}.token_merge".lstrip("."), dict(graph.named_modules())
    while name in taken:
        name += "_"
    merge = WindowMerge(count=count // mlp.windows, protected=mlp.protected, grid=mlp.grid, window=mlp.window)
    graph.add_submodule(name, merge)
    inside = [by_name[node.name] for node in mlp.inside]
    with graph.graph.inserting_after(entering):
        call = graph.graph.call_module(name, (entering,))
    with graph.graph.inserting_after(call):
        merged = graph.graph.call_function(_part_of, (call, 0))
        sources = graph.graph.call_function(_part_of, (call, 1))
    for node in inside:
        node.replace_input_with(entering, merged)
    with graph.graph.inserting_after(leaving):
        back = graph.graph.call_function(give_back, (leaving, sources, mlp.grid))
    leaving.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
    for node, like in ((call, mlp.leaving), (merged, mlp.leaving), (sources, mlp.leaving), (back, mlp.leaving)):
        node.meta["nn_module_stack"] = like.meta.get("nn_module_stack", {})


def _part_of(both: tuple[Tensor, Tensor], place: int) -> Tensor:
    return both[place]


def give_back(x: Tensor, sources_BN: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the results of all tokens [B,N,C] or [B,H,W,C] from those of merged ones [B,VM,C] or [B,1,VM,C]."""
    if x.ndim == 3:
        return unmerge_tokens(x, sources_BN)
    return unmerge_tokens(x.squeeze(1), sources_BN).unflatten(1, grid)


class WindowMerge(nn.Module):
    """A module without weights that merges `count` tokens in each window of a map, and tells where each token is.

    It takes a stream [B,N,C] or a map [B,H,W,C], and returns the merged tokens [B,P+VM,C] or [B,1,VM,C] with the index
    in these of the token that each token is in [B,N]. Tokens are compared and averaged as in TokenMerge, by `ward`.
    """

    def __init__(self, *, count: int, protected: int, grid: tuple[int, int], window: tuple[int, int]) -> None:
        super().__init__()
        self.protected, self.grid, self.window = protected, grid, window
        self.merge = TokenMerge(count=count, protected=0, how="merge", metric="ward", follows=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x_BNC = x if x.ndim == 3 else x.flatten(1, 2)
        free = self._windows(x_BNC[:, self.protected :])
        merged, _, places = self.merge(free, None, None, free)
        kept, windows = merged.shape[1], math.prod(self.grid) // math.prod(self.window)
        assert places is not None, self
        first_V1 = torch.arange(windows, device=x.device).unsqueeze(1) * kept
        places_BVT = places.unflatten(0, (-1, windows)) + first_V1 + self.protected
        sources_BN = self._map(places_BVT)
        merged_BMC = merged.unflatten(0, (-1, windows)).flatten(1, 2)
        if self.protected:
            first = torch.arange(self.protected, device=x.device).expand(x.shape[0], -1)
            merged_BMC = torch.cat([x_BNC[:, : self.protected], merged_BMC], dim=1)
            sources_BN = torch.cat([first, sources_BN], dim=1)
        return merged_BMC if x.ndim == 3 else merged_BMC.unsqueeze(1), sources_BN

    def _windows(self, x_BNC: Tensor) -> Tensor:
        """Cut a map [B,HW,C] into windows [BV,T,C]."""
        (rows, columns), (high, wide) = self.grid, self.window
        cut = x_BNC.reshape(-1, rows // high, high, columns // wide, wide, x_BNC.shape[-1])
        return cut.transpose(2, 3).flatten(3, 4).flatten(0, 2)

    def _map(self, places_BVT: Tensor) -> Tensor:
        """Return numbers of the tokens of windows [B,V,T] as those of a map [B,HW]."""
        (rows, columns), (high, wide) = self.grid, self.window
        cut = places_BVT.reshape(-1, rows // high, columns // wide, high, wide)
        return cut.transpose(2, 3).flatten(1, 4)


def _mlp_before(program: Program, leaving: fx.Node, free: set[fx.Node]) -> TokenMlp | None:
    """Return the MLP whose last layer is `leaving`; None if no MLP over tokens ends there."""
    sizes = sizes_at_one(leaving)
    if len(sizes) not in (3, 4) or sizes[0] != 1 or batch_axis_of(leaving) != IN_FRONT or not _is_added(leaving, free):
        return None
    inside, entering = {leaving: None}, dict[fx.Node, None]()
    front = [leaving]
    for node in front:
        sources = [each for each in node.all_input_nodes if each not in free]
        if node is not leaving and operation(node) == "linear":
            entering |= dict.fromkeys(sources)
            continue
        if not all(operation(each) == "linear" or _is_of_each_token(each, sizes, free) for each in sources):
            return None
        new = [each for each in sources if each not in inside]
        inside |= dict.fromkeys(new)
        front += new
    is_closed = all(user in inside for node in inside if node is not leaving for user in node.users)
    if len(entering) != 1 or not is_closed:
        return None
    (first,) = entering
    if first in inside or sizes_at_one(first)[:-1] != sizes[:-1]:
        return None
    leading = _count_apart(program, sizes) if len(sizes) == 3 else 0
    grid = sizes[1:3] if len(sizes) == 4 else _grid_before(first, sizes[1] - leading)
    if math.prod(grid) < 2:
        return None
    window = _window_of(grid, sizes[-1])
    return TokenMlp(entering=first, inside=tuple(inside), leaving=leaving, protected=leading, grid=grid, window=window)


def _is_added(node: fx.Node, free: set[fx.Node]) -> bool:
    """Check that a node is added to a stream, directly or behind a layer scale, norm or reshape."""
    for user in node.users:
        op, others = operation(user), [each for each in user.all_input_nodes if each is not node and each not in free]
        if op in ("add", "add_") and others:
            return True
        # Of a map all axes but the last are tokens, whereas a permuted stream may have channels in their place.
        passes = op in _PASSED or (op == "permute" and len(sizes_at_one(node)) == 4)
        passes = passes and not others
        if passes and _is_added(user, free):
            return True
    return False


def _is_of_each_token(node: fx.Node, sizes: tuple[int, ...], free: set[fx.Node]) -> bool:
    """Check that a node computes every token by itself."""
    op, arguments, last = operation(node), named_arguments(node), len(sizes) - 1
    if op == "getitem":
        return True
    if op in _SPLITS:
        return bool(arguments["dim"] % len(sizes) == last)
    if op in ("layer_norm", "rms_norm"):
        return len(arguments["normalized_shape"]) == 1
    constants = [sizes_at_one(each) or () for each in node.all_input_nodes if each in free]
    is_plain = op in SAME or is_pointwise(node.target)
    return is_plain and sizes_at_one(node)[:-1] == sizes[:-1] and all(math.prod(each[:-1]) == 1 for each in constants)


def _count_apart(program: Program, sizes: tuple[int, ...]) -> int:
    """Return the number of tokens, such as class tokens, that a stream of these sizes has in front of its map."""
    first = next(node for node in program.nodes if node.op != "get_attr" and sizes_at_one(node) == sizes)
    if operation(first) != "cat":
        return 0
    counts = [sizes_at_one(each)[1] for each in first.all_input_nodes]
    return sum(counts[: counts.index(max(counts))])


def _grid_before(node: fx.Node, tokens: int) -> tuple[int, int]:
    """Return the rows and columns of a stream's tokens, from a map that the stream was made of; else a square or row.

    Maps are searched behind norms, sums and reshapes, at most eight nodes away.
    """
    front = [node]
    for each in front:
        sizes = sizes_at_one(each)
        if isinstance(sizes, tuple) and len(sizes) == 4:
            for rows, columns in (sizes[1:3], sizes[2:4]):
                if rows * columns == tokens:
                    return rows, columns
        if len(front) < 8:
            front += [source for source in each.all_input_nodes if source not in front]
    side = math.isqrt(tokens)
    return (side, side) if side * side == tokens else (1, tokens)


def _window_of(grid: tuple[int, int], channels: int) -> tuple[int, int]:
    """Return a large and nearly square window that divides a map, and whose comparisons cost little beside an MLP.

    To compare and merge T tokens takes about T / 20 C of the multiply-adds of their MLP.
    """
    most = min(LARGEST, max(2 * FEWEST, 2 * channels))
    high, wide = ([part for part in range(1, side + 1) if side % part == 0] for side in grid)
    sizes = list(product(high, wide))
    fitting = [size for size in sizes if FEWEST <= math.prod(size) <= most]
    if fitting:
        return max(fitting, key=lambda size: math.prod(size) * math.sqrt(min(size) / max(size)))
    return min((size for size in sizes if math.prod(size) > most), key=math.prod, default=grid)
