"""Sampling: what is asked for, and nothing that depends on the batch."""

import math

import pytest
import torch

from common.errors import ErrorReason, ServiceError
from common.rpc import sampling_messages
from common.sampling import SamplingSettings, SamplingState, sample, uniform

VOCAB = 50


def logits(seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def state(prompt: tuple[int, ...] = (3, 4), generated: tuple[int, ...] = (), **settings: object) -> SamplingState:
    made = SamplingState(SamplingSettings(**settings), prompt, (1,))  # type: ignore[arg-type]
    for token in generated:
        made.append(token)
    return made


def draw(count: int, row: torch.Tensor, **settings: object) -> list[int]:
    return [sample(row, [state(seed=s, **settings)])[0].token_id for s in range(count)]


def test_greedy_takes_the_first_of_equal_maxima():
    row = torch.zeros(1, VOCAB)
    row[0, [7, 9]] = 1
    assert sample(row, [state()])[0].token_id == 7


def test_frequencies_follow_the_distribution():
    row = torch.full((1, VOCAB), -1e9)
    row[0, 5], row[0, 6] = math.log(0.75), math.log(0.25)
    drawn = draw(2000, row, temperature=1.0)
    assert 0.70 < drawn.count(5) / 2000 < 0.80
    assert set(drawn) == {5, 6}


def test_top_k_top_p_and_min_p_cut_where_they_say():
    row = torch.full((1, VOCAB), -1e9)
    for token, share in ((10, 0.5), (11, 0.3), (12, 0.15), (13, 0.05)):
        row[0, token] = math.log(share)
    assert set(draw(300, row, temperature=1.0, top_k=2)) == {10, 11}
    assert set(draw(300, row, temperature=1.0, top_p=0.5)) == {10}
    assert set(draw(300, row, temperature=1.0, top_p=0.51)) == {10, 11}
    assert set(draw(300, row, temperature=1.0, min_p=0.25)) == {10, 11, 12}
    assert set(draw(300, row, temperature=0.01)) == {10}


def test_the_same_seed_and_position_give_the_same_token_in_any_batch():
    rows = logits(3, 6)
    states = [state(seed=100 + i, temperature=1.0, generated=(5,) * i) for i in range(6)]
    together = [token.token_id for token in sample(rows, states)]
    alone = [sample(rows[i : i + 1], [states[i]])[0].token_id for i in range(6)]
    backwards = [t.token_id for t in sample(rows.flip(0), states[::-1])][::-1]
    assert together == alone == backwards


def test_random_numbers_depend_on_seed_and_position_alone():
    assert uniform(1, 2) == uniform(1, 2)
    values = {uniform(seed, position) for seed in range(20) for position in range(20)}
    assert len(values) == 400
    assert all(0 <= value < 1 for value in values)
    assert uniform(2**64 - 1, 2**20) < 1


def test_penalties_and_bias_move_logits_as_defined():
    row = torch.zeros(VOCAB)
    row[4], row[5], row[6] = 2.0, -2.0, 1.0
    seen = state(
        prompt=(4, 5),
        generated=(6, 6),
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={9: 3.0},
    )
    found = seen.adjusted(row)
    assert found[4] == 1.0
    assert found[5] == -4.0
    assert found[6] == pytest.approx(1.0 / 2 - 0.5 - 2 * 0.25)
    assert found[9] == 3.0
    assert row[9] == 0


def test_min_tokens_bans_every_stop_until_it_is_reached():
    row = torch.zeros(1, VOCAB)
    row[0, 1], row[0, 2], row[0, 3] = 9, 8, 7
    assert sample(row, [state(min_tokens=2, max_tokens=9, stop_token_ids=(2,))])[0].token_id == 3
    assert sample(row, [state(min_tokens=2, max_tokens=9, generated=(5, 5))])[0].token_id == 1


def test_logprobs_are_those_of_the_unmodified_distribution():
    row = logits(5)
    token = sample(row, [state(temperature=0.5, logit_bias={7: 50.0}, logprobs=3, seed=1)])[0]
    expected = torch.log_softmax(row[0].double(), -1)
    assert token.token_id == 7
    assert token.logprob == pytest.approx(float(expected[7]))
    assert [i for i, _ in token.top] == expected.topk(3).indices.tolist()


def test_nan_logits_are_an_error_and_no_token():
    rows = logits(0, 2)
    rows[1, 3] = float("nan")
    with pytest.raises(ServiceError, match="NaN logits for row 1"):
        sample(rows, [state(), state()])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("top_p", 0.0), ("top_p", 1.5),
        ("min_p", -1), ("presence_penalty", 3), ("frequency_penalty", float("nan")), ("repetition_penalty", 0.0), ("top_k", -1),
        ("max_tokens", 0), ("max_tokens", -5), ("min_tokens", 17), ("logprobs", 21), ("stop_token_ids", (VOCAB,)),
        ("logit_bias", {VOCAB: 1.0}), ("logit_bias", {3: 101.0}), ("logit_bias", {3: float("nan")}), ("seed", -1),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_by_name(name: str, value: object):
    with pytest.raises(ServiceError) as raised:
        SamplingSettings(**{name: value}).check(VOCAB)  # type: ignore[arg-type]
    assert (raised.value.reason, raised.value.field) == (ErrorReason.INVALID_REQUEST, name)


def test_settings_survive_their_message():
    settings = SamplingSettings(
        temperature=0.5, top_p=0.75, top_k=5, min_p=0.25, presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5,
        seed=0, logit_bias={3: 2.0}, logprobs=0, prompt_logprobs=2, max_tokens=7, min_tokens=2, stop_token_ids=(4,), ignore_eos=True,
    )  # fmt: skip
    assert sampling_messages.from_message(sampling_messages.to_message(settings)) == settings


def test_without_a_seed_one_is_drawn_anew():
    message = sampling_messages.to_message(SamplingSettings())
    message.ClearField("seed")
    assert sampling_messages.from_message(message).seed != sampling_messages.from_message(message).seed
