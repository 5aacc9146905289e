"""StandIns: compiled steps that run in the place of steps that are not compiled yet."""

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

from jpaged.engine.shapes import DecodeShape, Shape, StepShapes
from jpaged.runtime.compiled_steps import CompiledSteps
from jpaged.runtime.processes import are_many

MUCH_LARGER = 4  # times the tokens of a step that another one may have to stand in for it
OFTEN = 128  # substitutions after which the step itself is worth a compile
OFTEN_IN_TWO = 512  # the same for a decode that runs as two steps, which costs but a dispatch


class StandIns:
    """Chooses among the steps that are compiled, and has others compiled in the background."""

    def __init__(self, steps: CompiledSteps):
        self._steps = steps
        self._missed: Counter[Shape] = Counter()  # how often another stood in for one
        self._background: ThreadPoolExecutor | None = None
        self.compiling: dict[Shape, Future[None]] = {}

    def fit(self, buckets: StepShapes) -> StepShapes:
        """Return the shapes to run in the place of these: themselves, if they are compiled.

        A larger step can stand in for a smaller one. With separate_draw None, a decode that draws
        itself becomes two steps that compile sooner. Both have the same bits; a step that was asked
        for often compiles in the background.
        """
        bucket, sample = buckets
        running = self._standing_in(bucket)
        config = self._steps.setting.config
        in_two = config.separate_draw is None and running not in self._steps
        if in_two and isinstance(bucket, DecodeShape) and bucket.sampler is not None:
            self._ask_for(bucket, OFTEN_IN_TWO)
            bucket, sample = bucket.apart(config)
            running = self._standing_in(bucket)
        return running, None if sample is None else self._standing_in(sample)

    def steps_at_once(self, bucket: DecodeShape) -> int:
        """Return how many of its steps `fit` would leave a decode that draws itself: one where it
        is not compiled, so that it would become two steps.
        """
        if self._steps.setting.config.separate_draw is not None:
            return bucket.steps
        return bucket.steps if bucket in self._steps or self._larger(bucket) else 1

    def _standing_in[S: Shape](self, bucket: S) -> S:
        """Return the shape if it is compiled, else the smallest compiled one that holds it and is
        not much larger. Without one, or if a row's bits could differ, return the shape.
        """
        if bucket in self._steps or not (larger := self._larger(bucket)):
            return bucket
        self._ask_for(bucket, OFTEN)
        return min(larger, key=lambda b: (b.tokens, b.rows, b.is_full))

    def _larger[S: Shape](self, bucket: S) -> list[S]:
        """Return the compiled shapes that may stand in for this one."""
        config = self._steps.setting.config
        rows_are_independent = config.deterministic and not config.pinned
        if not rows_are_independent:
            return []
        return self._steps.larger(bucket, MUCH_LARGER * bucket.tokens)

    def _ask_for(self, bucket: Shape, often: int) -> None:
        """Count a request for a step, and compile it in the background after so many.

        Several processes compile it in the foreground, so that all have it from the same dispatch
        on.
        """
        self._missed[bucket] += 1
        if are_many(self._steps.placement.mesh):
            if self._missed[bucket] == often:
                self._compile(bucket)
        elif bucket in self.compiling:
            if self.compiling[bucket].done():
                self.compiling[bucket].result()  # raises what the compile raised
        elif self._missed[bucket] >= often:
            self._background = self._background or ThreadPoolExecutor(1, "compile")
            self.compiling[bucket] = self._background.submit(self._compile, bucket)

    def _compile(self, bucket: Shape) -> None:
        _ = self._steps[bucket]
