"""Draws the pictures of ``docs/how_it_works.md``.

Run it with ``python docs/draw_how_it_works.py``; the pictures only change if the solvers do.
"""

from __future__ import annotations

from draw_schedules import Shown, draw
from drawing import MIB, WIDTH, Picture, write

from recoup.planning import Problem, Unit, minimum_budget, plan
from recoup.planning.solvers.baselines import keep_all

NAMES = ("embed", "block0", "block1", "block2", "head", "loss")


def six_units() -> Problem:
    """The step of the page: an embedding, four unequal blocks, a head."""
    rows = [
        ("embed", 1, 4),
        ("block0", 3, 60),
        ("block1", 4, 70),
        ("block2", 3, 50),
        ("block3", 4, 70),
        ("head", 2, 40),
    ]
    units = [
        Unit.keep_or_recompute(
            name,
            forward_s=ms / 1e3,
            backward_s=2 * ms / 1e3,
            held_bytes=held * MIB,
            output_bytes=10 * MIB,
            parameter_gradient_bytes=5 * MIB,
        )
        for name, ms, held in rows
    ]
    return Problem(units, resident_bytes=60 * MIB)


def streaming() -> str:
    """A step as autograd sees it, and cut around its units."""
    picture = Picture(268, "A plain step is one graph; for measuring it is cut around every unit")
    left = 24
    step = (WIDTH - 2 * left + 30) / len(NAMES)
    titles = ("A plain step: one graph, and all that it saved stays", "Measured: cut around every unit")
    for row, title in enumerate(titles):
        y = 44 + row * 104
        picture.text(left, y - 16, title, kind="title")
        for index, name in enumerate(NAMES):
            x = left + index * step
            stays = row == 0 or index == 2
            picture.box(x, y, step - 30, 34, "area" if stays else "page", outline="blue", round_px=4)
            picture.text(x + (step - 30) / 2, y + 22, name, anchor="middle")
            if index + 1 < len(NAMES):
                middle = x + step - 15
                picture.text(middle, y + 22, "→", anchor="middle")
                if row:
                    picture.line((middle, y - 6, middle, y + 40), "red")
        if row:
            x = left + 2 * step
            picture.text(x, y + 56, "forward, backward; seconds and bytes; then it is freed", kind="soft")
    picture.text(
        left, 252, "filled: saved tensors are in memory; red: detached arguments and outputs", kind="soft"
    )
    return picture.svg()


def pictures() -> dict[str, str]:
    """All pictures by their names."""
    problem = six_units()
    budget, smallest = 270 * MIB, minimum_budget(problem)
    return {
        "how_schedule.svg": draw(
            problem,
            [
                Shown("Plain: everything kept", keep_all(problem)),
                Shown("Planned within 270 MiB", plan(problem, budget).schedule, budget),
            ],
        ),
        "how_nested.svg": draw(
            problem, [Shown("The smallest budget", plan(problem, smallest).schedule, smallest)]
        ),
        "how_streaming.svg": streaming(),
    }


if __name__ == "__main__":
    write(pictures())
