from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.features.fast_path.tree_mask import cut_into_blocks


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
    blocks = cut_into_blocks(ends)
    assert [place for block in blocks for place in range(block.start, block.end)] == list(range(len(ends)))
    for block in blocks:
        assert block.chain == all(ends[place] == ends[block.start] for place in range(block.start, block.end))
        above = {place for number in block.path for place in range(blocks[number].start, blocks[number].end)}
        first = {place for place in range(block.start) if ends[place] >= block.end}
        assert above == first  # all of its tokens see all of them
        # and of what stands before it, none sees anything else
        for query in range(block.start, block.end):
            assert {place for place in range(block.start) if query < ends[place]} == above


def test_branches_of_branches_have_a_longer_path():
    blocks = cut_into_blocks(ends_of((500, [(400, [(300, []), (300, [])]), (200, [])])))
    assert [(block.end - block.start, block.path) for block in blocks] == [
        (500, ()),
        (400, (0,)),
        (300, (0, 1)),
        (300, (0, 1)),
        (200, (0,)),
    ]


def test_short_branches_stay_together():
    short = [(8, [])] * 8
    assert len(cut_into_blocks(ends_of((512, short)))) == 2  # behind the prompt
    assert len(cut_into_blocks(ends_of((16, short)))) == 1  # with it
    assert [block.end for block in cut_into_blocks(ends_of((512, [*short, (400, [])])))] == [512, 576, 976]
