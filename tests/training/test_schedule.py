import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.training.errors import RequestError
from pipeline.training.schedule import Schedule, warmup_steps


def rates(shape: str, *, warmup: int, total: int, final: float) -> list[float]:
    schedule = Schedule(
        peak=1.0, final_share=final, warmup_steps=warmup, total_steps=total, shape=shape
    )
    return [schedule.rate(step) for step in range(1, total + 1)]


def test_linear_rates_by_hand():
    found = rates("linear", warmup=2, total=6, final=0.2)
    assert found == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_rates_by_hand():
    assert rates("cosine", warmup=0, total=4, final=0.0) == pytest.approx(
        [0.8535533906, 0.5, 0.1464466094, 0.0]
    )


def test_a_run_whose_only_step_has_no_learning_rate_is_refused():
    with pytest.raises(RequestError, match="one step in all"):
        rates("linear", warmup=0, total=1, final=0.0)
    assert rates("linear", warmup=0, total=1, final=0.5) == [0.5]


@given(total=st.integers(2, 500), share=st.floats(0, 0.99), final=st.floats(0, 1))
@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_the_last_step_is_exactly_the_end(shape: str, total: int, share: float, final: float):
    found = rates(shape, warmup=warmup_steps(share, total_steps=total), total=total, final=final)
    assert found[-1] == 1.0 * final
    assert max(found) <= 1.0


def test_a_warm_up_without_an_end_is_refused():
    with pytest.raises(RequestError, match="warm-up"):
        rates("linear", warmup=5, total=5, final=0.0)


@pytest.mark.parametrize("step", [0, 4])
def test_steps_outside_the_run_have_no_rate(step: int):
    schedule = Schedule(peak=1.0, final_share=0, warmup_steps=0, total_steps=3, shape="linear")
    with pytest.raises(ValueError, match="outside"):
        schedule.rate(step)
