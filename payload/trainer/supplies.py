"""Where a drafter's micro-batches come from: made on its own rank, or received from another."""

from __future__ import annotations

from payload.trainer.run import Run
from payload.trainer.target_side import TargetSide
from payload.trainer.transfer import Inbox, Supply


class Supplies:
    """A drafter's supplies in the order of its micro-batches, whether they are made here or elsewhere."""

    def __init__(self, run: Run, side: TargetSide | None) -> None:
        self._run = run
        self._side = side
        self._made_here: dict[int, Supply] = {}
        self.inbox = Inbox(
            run.ranks.rank, run.groups.links, run.shape, run.ranks.device, run.recipe.train.prefetch
        )
        self._expected_up_to = -1

    def begin_step(self, step: int) -> None:
        """Produce this rank's share of a step, for itself and others, before anything of the step is consumed."""
        rank, roles = self._run.ranks.rank, self._run.roles
        if self._side is None:
            return
        for number in roles.produced_by(rank, step):
            supply = self._side.produce(number)
            if roles.consumer(number) == rank:
                self._made_here[number] = supply
            else:
                self._side.outbox.send(supply, roles.consumer(number))

    def take(self, micro_batch: int, step: int) -> Supply:
        """The supply of this rank's next micro-batch, which belongs to ``step``."""
        self._expect_ahead(step)
        made = self._made_here.pop(micro_batch, None)
        return made if made is not None else self.inbox.take()

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
