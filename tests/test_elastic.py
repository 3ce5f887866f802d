"""Members of an elastic fleet come and go; the run stays the same."""

import jax
import numpy as np
import optax
import pytest
from elastic_fleet import Fleet, Killed
from elastic_runs import (
    BATCH,
    DATA,
    SAMPLES,
    STEPS,
    check,
    count_down,
    killing,
    loss_fn,
    member,
    own,
    params,
    result,
    trainer,
    undisturbed,
)

import hetjax
from hetjax import checkpoint
from hetjax.reduce import slices
from hetjax.state import gathered


def test_undisturbed():
    with Fleet(member, 3) as fleet:
        results = fleet.end()
    for each in results.values():
        check(each)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_lost_member(victim):
    def hook(link, record, each):
        if link.number == victim and record.step == 5:
            raise Killed

    with Fleet(lambda link: member(link, hook), 3) as fleet:
        results = fleet.end()
    assert sorted(results) == [number for number in range(3) if number != victim]
    for each in results.values():
        check(each)


def test_a_member_leaves_and_one_joins():
    """The leaver finishes its step; the joiner trains from the step at which it came, and its samples are right."""

    def hook(link, record, each):
        if link.number == 0 and record.step == 2:
            fleet.join(link)
        if link.number == 1 and record.step == 7:
            each.leave()

    with Fleet(lambda link: member(link, hook), 3) as fleet:
        results = fleet.end()
    assert sorted(results) == [0, 2, 3]
    for number in (0, 2):
        check(results[number])
    joined = results[3][1].records[0].step
    assert 4 <= joined <= 5
    check(results[3], steps=STEPS + 1 - joined)
    assert [event["members"] for event in results[0][2]] == [[0, 1, 2], [0, 1, 2, 3], [0, 2, 3]]
    reasons = [record.reason for record in results[0][1].records if "Member" in record.reason]
    assert [reason.split(".")[0] for reason in reasons] == ["Member 3 joined", "Member 1 left"]
    told = [change for record in results[0][1].records for change in record.row().get("members", ())]
    assert told == results[0][2][1:] == results[0][1].more["members"][1:]
    assert [(change["left"], change["came"]) for change in told] == [([], [3]), ([1], [])]
    assert "2 changes of the members in " in str(results[0][1])


def test_below_min_members_all_end_after_the_same_step():
    def hook(link, record, each):
        if link.number == 1 and record.step == 5:
            raise Killed

    with Fleet(lambda link: member(link, hook), 3, min_members=3) as fleet:
        results = fleet.end()
    assert sorted(results) == [0, 2]
    (step,) = {int(state.step) for state, _, _ in results.values()}
    assert 5 <= step < STEPS
    for _, history, events in results.values():
        np.testing.assert_allclose(history.losses, undisturbed()[1][:step], rtol=1e-5)
        assert events[-1]["members"] == [0, 2]


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 2, 4, 6])
def test_deaths_at_any_message_of_a_step(first):
    """Before, during and after the exchange of sums, the update, and the exchange of parameters."""
    kills = {1: (2, first), 3: (5, first + 1), 0: (8, first + 2)}

    def work(link):
        killing(link, kills)
        return member(link)

    with Fleet(work, 5) as fleet:
        results = fleet.end()
    assert sorted(results) == [2, 4]
    for each in results.values():
        check(each)


@pytest.mark.slow
@pytest.mark.parametrize("saved", [True, False])
def test_without_second_holders_all_go_back_to_the_checkpoint(tmp_path, saved):
    """The steps after it are done again in the same processes, and give no second record."""

    def work(link):
        with trainer(own(link)) as each:
            saver = checkpoint.Saver(tmp_path, each, steps=3 if saved else 1000)

            def hook(record, state):
                if record.step == 8 and link.number == owner_of(each):
                    if saved:
                        saver._wait()  # checkpoints are written beside the training
                    raise Killed

            with saver:
                return result(each, *each.fit(each.init(params()), DATA, steps=STEPS, hooks=[saver, hook]))

    owner_of = lambda each: each.step._pipeline.reduce.exchange.owners[0]
    with Fleet(work, 3, holders=1) as fleet:
        results = fleet.end()
    assert len(results) == 2
    for each in results.values():
        check(each)


@pytest.mark.slow
@pytest.mark.parametrize("kill", [(1, 1), (4, 2), (8, 3)])
def test_deaths_in_evaluations_and_while_saving(tmp_path, kill):
    """Every evaluation and checkpoint is complete, and the same in all."""
    seen = {}

    def work(link):
        with trainer(own(link)) as each:
            saver = checkpoint.Saver(tmp_path, each, steps=4)

            def hook(record, state):
                if record.step % 4 == 0:
                    if link.number == 1 and record.step == 4:
                        count_down(link, kill[0])
                    if link.number == 0 and record.step == 8:
                        count_down(link, kill[1])
                    found = each.evaluate(gathered(state), DATA)
                    seen.setdefault(record.step, {})[link.number] = found["loss"]

            with saver:
                return result(each, *each.fit(each.init(params()), DATA, steps=STEPS, hooks=[hook, saver]))

    with Fleet(work, 4) as fleet:
        results = fleet.end()
    assert sorted(results) == [2, 3]
    for each in results.values():
        check(each)
    for losses in seen.values():
        np.testing.assert_allclose(list(losses.values()), losses[2], rtol=1e-6)


def stateful_loss(params, state, batch, keys, mask_b):
    """Dropout and an average of the inputs, as a model with BatchNorm has."""
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (8,)))(keys)
    hidden = jax.numpy.tanh((batch["x"] - state["mean"]) * kept @ params["w"] + params["b"])
    loss_b = (hidden @ params["v"] - batch["y"]) ** 2
    sums = {"mean": (batch["x"] * mask_b[:, None]).sum(axis=0)}
    return loss_b, (sums, mask_b.sum())


@pytest.mark.slow
def test_model_state_moving_average_clipping_and_dropout_survive():
    """With Adam's state in several pieces, and deaths at several messages."""
    options = {
        "batch_size": BATCH,
        "engine": hetjax.Chunked(rungs=[4, 8]),
        "ema_decay": 0.9,
        "clip_norm": 0.5,
        "seed": 3,
    }

    def fit(each):
        state = each.init(params(), {"mean": np.zeros(8, np.float32)})
        return each.fit(state, DATA, steps=STEPS)

    with hetjax.Trainer(stateful_loss, optax.sgd(0.05, momentum=0.9), devices=jax.devices()[:1], **options) as alone:
        state, history = fit(alone)
        there = jax.tree.map(np.asarray, state), history.losses

    def work(link):
        killing(link, {1: (3, 3), 3: (6, 7), 0: (9, 1)})
        with hetjax.Trainer(stateful_loss, optax.sgd(0.05, momentum=0.9), devices=own(link), **options) as each:
            return result(each, *fit(each))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "_SMALLEST", 32)
        with Fleet(work, 5) as fleet:
            results = fleet.end()
    assert sorted(results) == [2, 4]
    for each in results.values():
        check(each, there)


def test_one_joins_an_own_loop():
    """It gets the batches by their number; a plain iterator cannot be joined."""
    batch_of = lambda step: None if step == STEPS else {
        name: x[step * 8 % SAMPLES : step * 8 % SAMPLES + 8] for name, x in DATA.items()}  # fmt: skip
    seen = {}

    def work(link):
        step = hetjax.Step(loss_fn, optax.sgd(0.05), batch_size=8, engine=hetjax.Chunked(rungs=[4, 8]),
                           devices=own(link))  # fmt: skip
        with step:
            state, records = step.init(params()), []
            if link.number == 3:
                with pytest.raises(ValueError, match="batch_of"):
                    step(state, batch_of(0))
                raise Killed
            for batch in step.batches(batch_of):
                state, record = step(state, batch)
                records += [] if record is None else [record]
                if link.number == 0 and record is not None and record.step in (2, 5):
                    fleet.join(link)
            records.append(step.flush())
            seen[link.number] = {record.step: record.loss for record in records}
            return np.asarray(state.params["w"])

    with Fleet(work, 2) as fleet:
        results = fleet.end()
    assert set(seen) == {0, 1, 2}
    assert set(seen[0]) == set(range(1, STEPS + 1)) > set(seen[2])
    for number in (1, 2):
        for at, loss in seen[number].items():
            assert loss == pytest.approx(seen[0][at], rel=1e-6)
        np.testing.assert_array_equal(results[number], results[0])


def test_the_only_holder_hands_over_before_it_leaves():
    """Nobody goes back."""

    def hook(link, record, each):
        if link.number == each.step._pipeline.reduce.exchange.owners[0] and record.step == 4:
            each.leave()

    with Fleet(lambda link: member(link, hook), 3, holders=1) as fleet:
        results = fleet.end()
    assert len(results) == 2
    for each in results.values():
        check(each)
        assert [len(event["members"]) for event in each[2]] == [3, 2]
        assert each[2][1]["step"] >= 6
