import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from trl_drgrpo.features.fast_path import pack_layout, tree_mask
from trl_drgrpo.features.fast_path.tree_mask import TreeMask, attends_apart, cut_into_blocks
from trl_drgrpo.upstream.batches import TokenBatch

# Two packs: a prompt of 3 with a fork and two branches; a chain, and padding behind it.
ENDS = [[12, 12, 12, 9, 9, 7, 7, 9, 9, 11, 11, 12], [8] * 8]


@pytest.fixture
def finest(monkeypatch):
    """Blocks cost nothing but their pairs."""
    monkeypatch.setattr(tree_mask, "KEY_COST", 0)
    monkeypatch.setattr(tree_mask, "BLOCK_COST", 0)


def plain():
    places = torch.arange(12)
    ends = torch.tensor([each + list(range(len(each) + 1, 13)) for each in ENDS])
    return ((places <= places[:, None]) & (places[:, None] < ends[:, None])).unsqueeze(1)


def inputs(dtype, heads=2, width=12):
    torch.manual_seed(0)
    return [torch.randn(2, heads, width, 4, dtype=dtype, requires_grad=True) for _ in range(3)]


def attended(tensors, mask, **named):
    out = scaled_dot_product_attention(*tensors, attn_mask=mask, **named)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out, torch.autograd.grad((out * weights).sum(), tensors)


@pytest.mark.usefixtures("finest")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
def test_values_and_gradients_are_those_of_the_plain_mask(dtype, tolerance, monkeypatch):
    tree = TreeMask.of(plain(), ENDS)
    assert [len(each) for each in tree.blocks] == [4, 1]
    theirs, their_gradients = attended(inputs(dtype), plain(), scale=0.7)
    # the plain mask is not looked at: without any of it, nothing changes
    with torch._C.DisableTorchFunctionSubclass():
        tree.fill_(False)
    ours, gradients = attended(inputs(dtype), tree, scale=0.7)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
    for a, b in zip(gradients, their_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
    assert type(ours) is torch.Tensor
    assert ours.transpose(1, 2).is_contiguous()  # so nothing is copied behind it


@pytest.mark.usefixtures("finest")
def test_torch_takes_a_tree_mask_for_the_plain_mask():
    tree = TreeMask.of(plain(), ENDS)
    for changed in (tree & True, tree[:, :, :, :12], tree.expand(2, 2, 12, 12), torch.where(tree, 0.0, -1.0)):
        assert type(changed) is torch.Tensor
    assert tree.dtype == torch.bool
    assert tree.to("cpu") is tree
    # keys that are not those of the packs
    query, *_ = inputs(torch.float64)
    _, key, value = inputs(torch.float64, heads=1)
    ours = scaled_dot_product_attention(query, key, value, attn_mask=tree, enable_gqa=True)
    theirs = scaled_dot_product_attention(query, key, value, attn_mask=plain(), enable_gqa=True)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_packs_have_a_tree_mask_on_devices_where_it_is_faster(monkeypatch):
    assert attends_apart("cpu")
    assert not attends_apart("cuda")
    ids, mask = torch.arange(40, 50).repeat(2, 1), torch.ones(2, 10, dtype=torch.long)
    ids[1, 6:] += 9
    assert isinstance(pack_layout.pack_rows(TokenBatch(ids, mask, 5), [(0, 1)]).attention_mask, TreeMask)
    monkeypatch.setattr(pack_layout, "attends_apart", lambda device: False)
    assert type(pack_layout.pack_rows(TokenBatch(ids, mask, 5), [(0, 1)]).attention_mask) is torch.Tensor


def ends_of(tree, start=0):
    """Ends of a tree that is written as the length of a chain and the trees that follow it."""
    length, branches = tree
    ends, place = [], start + length
    for branch in branches:
        ends += ends_of(branch, place)
        place = start + length + len(ends)
    return [place] * length + ends


trees = st.recursive(
    st.tuples(st.integers(1, 150), st.just([])),
    lambda branch: st.tuples(st.integers(1, 150), st.lists(branch, min_size=2, max_size=4)),
    max_leaves=12,
)


@given(trees)
def test_every_token_is_in_one_block_and_sees_what_it_should(tree):
    ends = ends_of(tree)
    stem, *branches = cut_into_blocks(ends)
    assert [place for block in (stem, *branches) for place in block] == list(range(len(ends)))
    for (
        branch
    ) in branches:  # all of its tokens see all of the stem, and of what stands between them none sees anything
        for query in branch:
            assert [place for place in range(branch.start) if query < ends[place]] == list(stem)


def test_short_branches_stay_together():
    short = [(8, [])] * 8
    assert len(cut_into_blocks(ends_of((512, short)))) == 2  # behind the prompt
    assert len(cut_into_blocks(ends_of((16, short)))) == 1  # with it
    assert [block.stop for block in cut_into_blocks(ends_of((512, [*short, (400, [])])))] == [512, 576, 976]
