"""What the tests of a file with engines share."""

import pytest


@pytest.fixture(scope="module")
def programs_compiled_once():
    """Lets each test have an engine of its own, while the engines of a file share the programs
    that are the same: to compile them is what such tests pay for."""
    from rollout_worker.engine import decode_programs, slots

    compiled = {}

    class Shared(decode_programs.DecodePrograms):
        def compile_empty(self):
            return self._once("compile_empty")

        def compile_prefill(self, size, *, later):
            return self._once("compile_prefill", size, later=later)

        def compile_segment(self, width):
            return self._once("compile_segment", width)

        def compile_resize(self, old, new):
            return self._once("compile_resize", old, new)

        def _once(self, what, *sizes, **kind):
            # A test may replace how tokens are drawn, which is a part of the program.
            key = (self.spec, self.geometry, slots.draw_tokens, what, *sizes, *kind.items())
            if key not in compiled:
                compiled[key] = getattr(super(), what)(*sizes, **kind)
            return compiled[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollout_worker.engine.engine.DecodePrograms", Shared)
        yield
