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


def admit(blocks, one):
    blocks.allocate(one)
    set_running(one)
    return one


def step(blocks, one, tokens):
    """A whole step: scheduled, computed, succeeded."""
    blocks.mark_blocks_as_computed(one, tokens)
    blocks.step_succeeded()
    computed(one, tokens)


def found(blocks, tokens):
    return len(blocks.cached_prefix_blocks(group(tokens).seqs[0]))


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
    assert blocks._gpu.evictor.num_blocks == pieces
    again = admit(blocks, group(PROMPT))
    step(blocks, again, len(PROMPT))
    blocks.free(again.seqs[0])
    assert found(blocks, PROMPT + [1]) == 5


def test_the_first_miss_ends_the_prefix():
    blocks = manager()
    one = admit(blocks, group(PROMPT))
    step(blocks, one, len(PROMPT))
    second = blocks._hashes.get(one.seqs[0].seq_id, None)
    assert second is None, "the chain is made when somebody asks"
    chain = blocks.cached_prefix_blocks(one.seqs[0])
    assert len(chain) == 4
    allocator = blocks._gpu
    content = blocks._hashes[one.seqs[0].seq_id][1]
    del allocator._cached_blocks[content]
    assert found(blocks, PROMPT) == 1


def test_equal_content_is_shared_once_it_is_computed():
    blocks = manager()
    one = admit(blocks, group(PROMPT))
    two = admit(blocks, group(PROMPT))
    tables = [blocks.get_block_table(each.seqs[0]) for each in (one, two)]
    assert not set(tables[0]) & set(tables[1]), "nothing is computed yet, so nothing may be shared"
    step(blocks, one, len(PROMPT))
    step(blocks, two, len(PROMPT))
    three = admit(blocks, group(PROMPT))
    assert blocks.get_block_table(three.seqs[0]) == tables[0]
    for each in (one, two, three):
        blocks.free(each.seqs[0])
    assert blocks.get_num_free_gpu_blocks() == 32
    assert blocks._gpu.evictor.num_blocks == 5, "the second copy is not kept"


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
    assert blocks.can_allocate(group(PROMPT + [1])) == AllocStatus.OK
    assert blocks.can_allocate(group(list(range(5 * BLOCK + 1)))) == AllocStatus.LATER
    two = admit(blocks, group(PROMPT + [1]))
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
    start = time.perf_counter()
    blocks = manager(65_536)
    seconds = time.perf_counter() - start
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
    found_blocks = [len(blocks.cached_prefix_blocks(pictured_group(6, this, 10).seqs[0])) for this in (shown, other)]
    assert found_blocks == [(length - 1) // BLOCK, 1], "only the block before the other picture is shared"
    assert found(blocks, one.seqs[0].get_token_ids()) == 1, "a text of placeholder ids is another content"
    second = admit(blocks, pictured_group(6, other, 10))
    third = admit(blocks, pictured_group(6, shown, 10))
    tables = [blocks.get_block_table(this.seqs[0]) for this in (one, second, third)]
    assert tables[0][:1] == tables[1][:1] and not set(tables[0][1:]) & set(tables[1])
    assert tables[0] == tables[2]
    step(blocks, second, length)
    assert len(blocks.cached_prefix_blocks(pictured_group(6, other, 10).seqs[0])) == (length - 1) // BLOCK
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
    assert len(blocks.cached_prefix_blocks(longer.seqs[0])) == (8 + 9 - 1) // BLOCK
