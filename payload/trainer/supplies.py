"""Where a drafter's micro-batches come from: made on its own rank, or received from another.

A rank with both roles goes through a step in rounds: a round has one micro-batch for each drafter. In each it posts
what receives it has room for, then produces its share of the next few rounds, then consumes its micro-batch. Why no
two ranks can wait for each other, however many micro-batches a step has:

- Posting never waits. There is room for ``prefetch`` messages, at most one comes each round, and those of earlier
  rounds were taken: so in round r the receives of rounds r to r + prefetch - 1 of the step are posted.
- Producing waits, when the outbox is full, until an earlier message was received. Only rounds up to r + prefetch - 1
  are produced in round r, so its consumer posts that receive in its own round r or before, and posts before it
  produces.
- Consuming in round r waits for what is produced in round r or before; so does reducing gradients, or gathering
  weights, among the drafters, in that round.

Every wait is thus for something that comes earlier in the order (round; post, produce, consume). On GPUs the same waits
hold up streams instead of the host, and each is where the host put it: a send is waited for in the stream before what
is queued behind it, and a receive begins when the stream reaches the place where it was posted. The host's order is the
stream's, and the argument is the same.
"""

from __future__ import annotations

from payload.trainer.run import Run
from payload.trainer.target_side import TargetSide
from payload.trainer.transfer import Inbox, Supply


class Supplies:
    """A drafter's supplies in the order of its micro-batches, whether they are made here or elsewhere.

    Made ahead are at most the rounds of ``train.prefetch``: memory does not grow with the accumulation.
    """

    def __init__(self, run: Run, side: TargetSide | None) -> None:
        self._run = run
        self._side = side
        self._made_here: dict[int, Supply] = {}
        self.inbox = Inbox(
            run.ranks.rank, run.groups.links, run.shape, run.ranks.device, run.recipe.train.prefetch
        )
        self._expected_up_to = -1
        self._produced_up_to = -1

    def take(self, micro_batch: int, step: int) -> Supply:
        """The supply of this rank's next micro-batch, which belongs to ``step``."""
        self._expect_ahead(step)
        if self._side is not None:
            self._produce_ahead(self._side, micro_batch, step)
        made = self._made_here.pop(micro_batch, None)
        return made if made is not None else self.inbox.take()

    def _produce_ahead(self, side: TargetSide, micro_batch: int, step: int) -> None:
        """Produce this rank's share, for itself and others, of the round of ``micro_batch`` and the next few."""
        rank, roles = self._run.ranks.rank, self._run.roles
        last = roles.last_of_round(micro_batch, ahead=self._run.recipe.train.prefetch - 1)
        for number in roles.produced_by(rank, step):
            if not self._produced_up_to < number <= last:
                continue
            supply = side.produce(number)
            if roles.consumer(number) == rank:
                self._made_here[number] = supply
            else:
                side.outbox.send(supply, roles.consumer(number))
            self._produced_up_to = number

    def _expect_ahead(self, step: int) -> None:
        """Post receives for this step and the next, as far as there is room; further than that the run may end.

        None is posted over an evaluation, in which targets wait for this rank to finish all that its GPU was given.
        """
        rank, roles = self._run.ranks.rank, self._run.roles
        last = step if self._run.evaluates_after(step) else min(step + 1, self._run.pace.last_step)
        for ahead in range(step, last + 1):
            for number in roles.consumed_by(rank, ahead):
                if number <= self._expected_up_to or roles.producer(number) == rank:
                    continue
                if not self.inbox.has_room:
                    return
                self.inbox.expect(roles.producer(number))
                self._expected_up_to = number
