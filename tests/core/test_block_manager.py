"""The block manager and its allocator: what is entered into the prefix cache, what is found there, and when there is
room."""
from itertools import count

import pytest

from tests.core.groups import BLOCK, appended, computed, group, set_running
from tests.helpers.pictures import SETTINGS, picture, pictured
from vllm.core.block_manager_v2 import BlockSpaceManagerV2
from vllm.core.block_manager_v2_stock import BlockSpaceManagerV2 as Stock
from vllm.core.interfaces import AllocStatus
from vllm.overlay.pictures.prompt_pictures import read_pictures

PROMPT = list(range(100, 100 + 5 * BLOCK))


def manager(blocks=32, caching=True, kind=BlockSpaceManagerV2):
    return kind(block_size=BLOCK, num_gpu_blocks=blocks, num_cpu_blocks=0, enable_caching=caching)


def admit(blocks, one, hit=None):
    """hit: leading blocks that it takes from the cache; all that are known, if not said."""
    if blocks.enable_caching and isinstance(blocks, BlockSpaceManagerV2):
        known = blocks.num_known_blocks(one.seqs[0]) if hit is None else hit
        if known:
            one.seqs[0].data.update_num_computed_tokens(known * BLOCK)
    blocks.allocate(one)
    set_running(one)
    return one


def step(blocks, one, tokens=None):
    """A whole step: scheduled, computed, succeeded. tokens: all that are left, if not said."""
    tokens = one.seqs[0].get_num_new_tokens() if tokens is None else tokens
    blocks.mark_blocks_as_computed(one, tokens)
    blocks.step_succeeded()
    computed(one, tokens)


def found(blocks, tokens):
    return blocks.num_known_blocks(group(tokens).seqs[0])


def test_only_what_a_finished_step_computed_is_found():
    blocks = manager()
    one = admit(blocks, group(PROMPT))
    assert found(blocks, PROMPT + [1]) == 0
    blocks.mark_blocks_as_computed(one, 2 * BLOCK + 1)
    assert found(blocks, PROMPT + [1]) == 0, "the step is still running"
    blocks.step_succeeded()
    computed(one, 2 * BLOCK + 1)
    assert found(blocks, PROMPT + [1]) == 2
    step(blocks, one, BLOCK)
    assert found(blocks, PROMPT + [1]) == 3
    step(blocks, one, 2 * BLOCK - 1)
    assert found(blocks, PROMPT + [1]) == 5
    assert found(blocks, PROMPT) == 4, "the last token of an equal prompt must be computed"


def test_stock_calls_everything_computed_after_the_first_piece(stock_core):
    blocks = manager(kind=Stock)
    one = admit(blocks, group(PROMPT))
    blocks.mark_blocks_as_computed(one, BLOCK)
    blocks.free(one.seqs[0])
    again = admit(blocks, group(PROMPT))
    assert len(blocks.get_common_computed_block_ids(again.seqs)) == 4


def test_a_failed_step_enters_nothing():
    blocks = manager()
    one = admit(blocks, group(PROMPT))
    blocks.mark_blocks_as_computed(one, len(PROMPT))
    blocks.step_failed()
    blocks.step_succeeded()
    blocks.free(one.seqs[0])
    assert found(blocks, PROMPT) == 0
    assert blocks.get_num_free_gpu_blocks() == 32


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_freed_in_the_middle_of_a_prompt(pieces):
    """Abort and preemption alike: computed blocks stay, the others go back to the free list and are never found."""
    blocks = manager()
    one = admit(blocks, group(PROMPT))
    for _ in range(pieces):
        step(blocks, one, BLOCK)
    blocks.free(one.seqs[0])
    assert found(blocks, PROMPT) == pieces
    assert blocks.get_num_free_gpu_blocks() == 32
    assert blocks.gpu.evictor.num_blocks == pieces
    again = admit(blocks, group(PROMPT))
    step(blocks, again)
    blocks.free(again.seqs[0])
    assert found(blocks, PROMPT + [1]) == 5


def test_the_first_miss_ends_the_prefix():
    blocks = manager()
    one = admit(blocks, group(PROMPT))
    step(blocks, one, len(PROMPT))
    assert blocks.num_known_blocks(one.seqs[0]) == 4
    del blocks.gpu._cached_blocks[blocks.chain(one.seqs[0], 2)[1]]
    assert found(blocks, PROMPT) == 1


def test_no_more_is_hashed_than_is_known():
    """Of a waiting prompt of 250 K tokens that nobody knows."""
    blocks = manager()
    seq = group(range(250_000)).seqs[0]
    assert blocks.num_known_blocks(seq) == 0
    assert len(blocks._chains[seq.seq_id]) == 16
    one = admit(blocks, group(range(20 * BLOCK)))
    step(blocks, one)
    assert blocks.num_known_blocks(seq) == 20
    assert len(blocks._chains[seq.seq_id]) == 32


def test_known_blocks_are_counted_anew_once_some_are_gone():
    blocks = manager(6)
    one = admit(blocks, group(PROMPT))
    step(blocks, one)
    blocks.free(one.seqs[0])
    seq = group(PROMPT + [1]).seqs[0]
    assert blocks.num_known_blocks(seq) == 5
    other = admit(blocks, group([1] * 3 * BLOCK))
    assert blocks.num_known_blocks(seq) == 3
    blocks.free(other.seqs[0])
    assert found(blocks, PROMPT) == 3


def test_equal_content_is_shared_once_it_is_computed():
    blocks = manager()
    one = admit(blocks, group(PROMPT))
    two = admit(blocks, group(PROMPT))
    tables = [blocks.get_block_table(each.seqs[0]) for each in (one, two)]
    assert not set(tables[0]) & set(tables[1]), "nothing is computed yet, so nothing may be shared"
    step(blocks, one)
    step(blocks, two)
    three = admit(blocks, group(PROMPT + [1]))
    assert blocks.get_block_table(three.seqs[0])[:5] == tables[0]
    for each in (one, two, three):
        blocks.free(each.seqs[0])
    assert blocks.get_num_free_gpu_blocks() == 32
    assert blocks.gpu.evictor.num_blocks == 5, "the second copy is not kept"


def test_blocks_beyond_the_hit_are_private():
    """Their content is known, but it is computed again, and who reads the known blocks must not see that."""
    blocks = manager()
    one = admit(blocks, group(PROMPT))
    step(blocks, one)
    two = admit(blocks, group(PROMPT), hit=2)
    tables = [blocks.get_block_table(each.seqs[0]) for each in (one, two)]
    assert tables[0][:2] == tables[1][:2] and not set(tables[0][2:]) & set(tables[1])
    assert blocks.can_allocate(group(range(100, 100 + 24 * BLOCK))) == AllocStatus.OK
    assert blocks.can_allocate(group(range(100, 100 + 24 * BLOCK + 1))) == AllocStatus.LATER, "32 - 5 - 3 are free"
    step(blocks, two)
    assert found(blocks, PROMPT + [1]) == 5
    for each in (one, two):
        blocks.free(each.seqs[0])
    assert blocks.get_num_free_gpu_blocks() == 32


def test_what_was_just_computed_stands_in_for_an_unused_copy():
    """Otherwise the old copies, unused for long, are given up first, and what follows them cannot be found any more."""
    blocks = manager()
    one = admit(blocks, group(PROMPT))
    step(blocks, one)
    blocks.free(one.seqs[0])
    two = admit(blocks, group(PROMPT + list(range(3 * BLOCK))), hit=2)
    step(blocks, two)
    assert blocks.gpu.evictor.num_blocks == 0 and blocks.get_num_free_gpu_blocks() == 32 - 8
    third = admit(blocks, group(PROMPT + [1]))
    assert blocks.get_block_table(third.seqs[0])[:5] == blocks.get_block_table(two.seqs[0])[:5]


def test_a_copy_is_entered_when_the_other_is_gone():
    blocks = manager(9)
    one = admit(blocks, group(PROMPT[:2 * BLOCK]))
    step(blocks, one)
    two = admit(blocks, group(PROMPT), hit=0)
    step(blocks, two)
    blocks.free(one.seqs[0])
    other = admit(blocks, group([1] * 4 * BLOCK))
    assert found(blocks, PROMPT) == 0, "the first's blocks have gone to the other"
    blocks.free(two.seqs[0])
    assert found(blocks, PROMPT + [1]) == 5
    blocks.free(other.seqs[0])
    assert blocks.get_num_free_gpu_blocks() == 9


def test_reset_forgets_everything_and_disturbs_nobody():
    blocks = manager()
    gone = admit(blocks, group([7] * 3 * BLOCK))
    step(blocks, gone)
    blocks.free(gone.seqs[0])
    one = admit(blocks, group(PROMPT))
    step(blocks, one, 2 * BLOCK)
    blocks.forget_all()
    assert found(blocks, PROMPT) == found(blocks, [7] * 20) == 0
    step(blocks, one, 2 * BLOCK)
    assert found(blocks, PROMPT) == 0, "what follows a forgotten beginning"
    two = admit(blocks, group(PROMPT))
    assert not set(blocks.get_block_table(one.seqs[0])) & set(blocks.get_block_table(two.seqs[0]))
    step(blocks, two)
    for each in (one, two):
        blocks.free(each.seqs[0])
    assert blocks.get_num_free_gpu_blocks() == 32
    assert found(blocks, PROMPT + [1]) == 5


def test_decoding_fills_blocks_that_are_then_found():
    blocks = manager()
    one = admit(blocks, group(PROMPT[:3]))
    step(blocks, one, 3)
    history = list(PROMPT[:3])
    for token in range(50, 50 + 2 * BLOCK):
        appended(one, token)
        history.append(token)
        blocks.append_slots(one.seqs[0], 0)
        step(blocks, one, 1)
        assert found(blocks, history + [1]) == len(history) // BLOCK, history
    blocks.free(one.seqs[0])
    assert found(blocks, history + [1]) == len(history) // BLOCK


def test_lora_and_pictures_in_the_way_of_stock_are_neither_entered_nor_found():
    from vllm.lora.request import LoRARequest
    blocks = manager()
    for fields in ({"lora_request": LoRARequest("name", 1, "path")}, {"multi_modal_data": {"image": "a picture"}}):
        one = admit(blocks, group(PROMPT, **fields))
        step(blocks, one, len(PROMPT))
        assert found(blocks, PROMPT) == 0, fields
        blocks.free(one.seqs[0])
    assert blocks.get_num_free_gpu_blocks() == 32


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kind, longest", [(BlockSpaceManagerV2, 200 * BLOCK), (Stock, 198 * BLOCK)])
def test_whoever_fits_into_the_empty_cache_is_admitted(kind, longest, caching, request):
    """Stock keeps 1 % free even then: a preempted sequence of nearly max_model_len is ended unfinished."""
    if kind is Stock:
        request.getfixturevalue("stock_core")
    blocks = manager(200, caching, kind)
    assert blocks.can_allocate(group(range(longest))) == AllocStatus.OK
    assert blocks.can_allocate(group(range(longest + 1))) == AllocStatus.NEVER
    if kind is BlockSpaceManagerV2:
        admit(blocks, group([7]))
        assert blocks.can_allocate(group(range(longest))) == AllocStatus.LATER


def test_blocks_that_others_hold_need_no_room():
    blocks = manager(8)
    one = admit(blocks, group(PROMPT))
    step(blocks, one, len(PROMPT))
    two = group(PROMPT + [1])
    assert blocks.can_allocate(two) == AllocStatus.LATER, "nobody said that it has a hit"
    two.seqs[0].data.update_num_computed_tokens(5 * BLOCK)
    assert blocks.can_allocate(two) == AllocStatus.OK
    assert blocks.can_allocate(group(list(range(5 * BLOCK + 1)))) == AllocStatus.LATER
    admit(blocks, two, hit=0)
    assert blocks.get_num_free_gpu_blocks() == 2
    assert blocks.get_block_table(two.seqs[0])[:5] == blocks.get_block_table(one.seqs[0])


@pytest.mark.parametrize("kind, expected", [(BlockSpaceManagerV2, [True] * BLOCK),
                                            (Stock, [True, False, False, False])])
def test_a_token_that_fits_into_the_last_block_needs_no_free_one(kind, expected, request):
    """3 blocks, 2 of them full: the third takes 4 tokens. Stock preempts the sequence after the first of them, again
    and again."""
    if kind is Stock:
        request.getfixturevalue("stock_core")
    blocks = manager(3, False, kind)
    one = admit(blocks, group(range(2 * BLOCK)))
    room = []
    for token in count():
        appended(one, token)
        room.append(blocks.can_append_slots(one, 0))
        if len(room) == BLOCK:
            break
        blocks.append_slots(one.seqs[0], 0)
    assert room == expected
    blocks.append_slots(one.seqs[0], 0)
    appended(one, 9)
    assert not blocks.can_append_slots(one, 0)


def test_a_large_cache_is_made_at_once():
    """A context of 262,144 tokens, four times; stock takes seconds for its objects. Then more are needed than exist."""
    import time
    start = time.process_time()
    blocks = manager(65_536)
    seconds = time.process_time() - start
    assert seconds < 1, f"{seconds:.2f} s"
    many = admit(blocks, group(range(6000 * BLOCK)))
    step(blocks, many, 6000 * BLOCK)
    assert len(set(blocks.get_block_table(many.seqs[0]))) == 6000 and found(blocks, range(6000 * BLOCK + 1)) == 6000
    blocks.free(many.seqs[0])
    assert blocks.get_num_free_gpu_blocks() == 65_536


def pictured_group(*parts):
    """A group whose pictures are in its inputs, as the engine puts them there, and its token ids."""
    prompt = pictured(*parts)
    one = group(prompt["prompt_token_ids"])
    one.seqs[0].inputs["pictures"] = read_pictures(prompt, SETTINGS)
    return one


def test_blocks_are_known_by_what_their_pictures_show():
    """Equal token ids throughout; one picture of 12 tokens that begins inside block 1 and ends inside block 4."""
    blocks = manager()
    shown, other = picture(4, 12), picture(4, 12, seed=1)
    one = admit(blocks, pictured_group(6, shown, 10))
    length = one.seqs[0].get_len()
    step(blocks, one, length)
    found_blocks = [blocks.num_known_blocks(pictured_group(6, this, 10).seqs[0]) for this in (shown, other)]
    assert found_blocks == [(length - 1) // BLOCK, 1], "only the block before the other picture is shared"
    assert found(blocks, one.seqs[0].get_token_ids()) == 1, "a text of placeholder ids is another content"
    second = admit(blocks, pictured_group(6, other, 10))
    third = admit(blocks, pictured_group(6, shown, 10))
    tables = [blocks.get_block_table(this.seqs[0]) for this in (one, second, third)]
    assert tables[0][:1] == tables[1][:1] and not set(tables[0][1:]) & set(tables[1])
    known = (length - 1) // BLOCK
    assert tables[0][:known] == tables[2][:known]
    step(blocks, second)
    assert blocks.num_known_blocks(pictured_group(6, other, 10).seqs[0]) == (length - 1) // BLOCK
    for this in (one, second, third):
        blocks.free(this.seqs[0])
    assert blocks.get_num_free_gpu_blocks() == 32


def test_an_answer_behind_pictures_is_found():
    """Generated tokens extend the chain that begins with the pictures."""
    blocks = manager()
    one = admit(blocks, pictured_group(3, picture(4, 4), 1))
    step(blocks, one, one.seqs[0].get_len())
    for token in range(7, 16):
        appended(one, token)
        blocks.append_slots(one.seqs[0], 0)
        step(blocks, one, 1)
    longer = pictured_group(3, picture(4, 4), 1)
    for token in range(7, 16):
        appended(longer, token)
    assert blocks.num_known_blocks(longer.seqs[0]) == (8 + 9 - 1) // BLOCK
