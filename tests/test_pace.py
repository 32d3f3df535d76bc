"""How many chunks of prompts go with a round."""

from serve.pace import Pace


def test_prompts_get_a_chunk_at_first_and_then_one_for_each_token_of_a_round():
    pace = Pace()
    assert pace.chunks == 1
    for tokens, chunks in ((1.0, 1), (1.1, 2), (3.0, 3)):
        pace.saw_round(0.0, tokens)
        assert pace.chunks == chunks


def test_chunks_take_no_longer_than_the_round_beside_them():
    pace = Pace()
    pace.saw_chunk(0.1)
    pace.saw_round(0.35, 1.0)
    assert pace.chunks == 3
    for _ in range(50):
        pace.saw_chunk(0.5)
    assert pace.chunks == 1
    for _ in range(50):
        pace.saw_round(1.2, 1.0)
    assert pace.chunks == 2


def test_one_slow_chunk_or_round_changes_little():
    pace = Pace()
    for _ in range(50):
        pace.saw_chunk(0.1)
        pace.saw_round(0.25, 1.0)
    pace.saw_round(0.8, 1.0)
    assert pace.chunks == 3
