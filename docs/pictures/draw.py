"""Draws the pictures of the docs: `python docs/pictures/draw.py` writes them beside this file.

embedlog must be importable, since its packages are drawn, too.
They are SVG on a light card, so they can be read on any background.  A text that
does not fit its box is an error.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent

INK, SOFT, CARD, EDGE = "#22303c", "#5b6b78", "#fbfaf7", "#c9ccd1"
BLUE, GREEN, AMBER, RED, GREY = "#d6e6f5", "#d8eddc", "#fbe8c2", "#f7d6d2", "#e9ebee"
LINES = {BLUE: "#4a7fb0", GREEN: "#4d9160", AMBER: "#b98526", RED: "#b9544a", GREY: "#8f9aa5"}
SANS = "Helvetica, Arial, 'Liberation Sans', sans-serif"
MONO = "Menlo, Consolas, 'Liberation Mono', monospace"


class Picture:
    """An SVG that is drawn piece by piece."""

    def __init__(self, name: str, width: int, height: int, title: str, about: str) -> None:
        self.name, self.width, self.height = name, width, height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="{SANS}">',
            f"<title>{escape(title)}</title><desc>{escape(about)}</desc>",
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            f'markerHeight="7" orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" '
            f'fill="{SOFT}"/></marker></defs>',
            f'<rect x="1" y="1" width="{width - 2}" height="{height - 2}" rx="10" '
            f'fill="{CARD}" stroke="{EDGE}"/>',
        ]

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 13,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
        colour: str = INK,
        room: float | None = None,
    ) -> None:
        """Write a line; `room` is how wide it may become."""
        width = len(words) * size * (0.605 if mono else 0.55 if bold else 0.515)
        if room is not None and width > room:
            raise ValueError(f"{self.name}: {words!r} takes {width:.0f}, has {room:.0f}")
        left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
        if left < 6 or left + width > self.width - 6 or y > self.height - 6:
            raise ValueError(f"{self.name}: {words!r} leaves the picture")
        more = f' font-family="{MONO}"' if mono else ""
        more += ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" '
            f'fill="{colour}"{more}>{escape(words)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *lines: str,
        fill: str = GREY,
        size: float = 13,
        bold: bool = True,
        mono: bool = False,
        dashed: bool = False,
    ) -> None:
        """Draw a box with lines in its middle; the first is bold, the others are smaller."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" '
            f'fill="{fill}" stroke="{LINES[fill]}"{dash}/>'
        )
        step = size + 4
        top = y + height / 2 - step * (len(lines) - 1) / 2 + size * 0.36
        for number, words in enumerate(lines):
            first = number == 0
            self.text(
                x + width / 2,
                top + step * number,
                words,
                size=size if first else size - 1.5,
                anchor="middle",
                bold=bold and first,
                mono=mono,
                colour=INK if first else SOFT,
                room=width - 8,
            )

    def line(self, *points: tuple[float, float], tip: bool = True, dashed: bool = False) -> None:
        """Draw a line through points, with an arrow's tip at its end."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        more = ' marker-end="url(#tip)"' if tip else ""
        more += ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{SOFT}" stroke-width="1.4"{more}/>'
        )

    def svg(self) -> str:
        """Return the file."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def floors() -> Picture:
    """Draw the packages, floor by floor, as tests/test_house.py has them."""
    rows = [names for names in house() if names]
    picture = Picture(
        "floors",
        820,
        74 + 40 * len(rows),
        "The packages of embedlog",
        "Each package imports only packages on lower floors: " + "; ".join(map(", ".join, rows)),
    )
    picture.text(24, 32, "A package imports only packages below it", size=15, bold=True)
    for number, names in enumerate(reversed(rows)):
        y = 50 + 40 * number
        floor = len(rows) - 1 - number
        picture.text(44, y + 21, str(floor), anchor="end", colour=SOFT)
        width = (740 - 8 * (len(names) - 1)) / len(names)
        fill = GREEN if floor > len(rows) - 4 else BLUE if floor > 4 else AMBER
        for column, name in enumerate(names):
            picture.box(58 + column * (width + 8), y, width, 32, name, fill=fill, mono=True)
    return picture


def house() -> list[list[str]]:
    """Return the packages that exist, by floor, the lowest first."""
    tree = ast.parse((REPOSITORY / "tests" / "test_house.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS":
            floors = ast.literal_eval(node.value)
            break
    else:
        raise ValueError("tests/test_house.py has no FLOORS")
    spec = importlib.util.find_spec("embedlog")
    assert spec is not None
    home = Path(next(iter(spec.submodule_search_locations or ())))
    existing = {path.stem for path in home.iterdir() if path.is_dir() or path.suffix == ".py"}
    return [sorted(floor & existing) for floor in floors]


def root() -> Picture:
    """Draw the root directory, and who writes what."""
    rows = [
        ("topics/…/*.arrows", "the records, in segments", "processes that append", "power cut, once flushed", BLUE),
        ("state/", "topics, manifest, recovery points", "rolls, flushes, topic changes", "power cut", GREEN),
        ("live/", "ends of partitions, groups, leases", "every append and commit", "kill -9", AMBER),
        ("locks/", "flocks; their bytes mean nothing", "none: they are only held", "nothing", GREY),
        ("wake", "a counter that readers sleep on", "every append and commit", "nothing", GREY),
        ("staging/", "batches not published yet", "tasks of Spark", "nothing: staged again", GREY),
        ("state.copy, closed", "a copy of state; checksums", "the last process to close", "power cut", GREEN),
        ("reserve", "4 MiB, given up on a full disk", "the maintenance owner", "nothing", GREY),
        ("embedlog.toml", "format version and root id", "the process that created it", "power cut", GREEN),
    ]  # fmt: skip
    picture = Picture(
        "root",
        860,
        78 + 40 * len(rows),
        "The root directory and who writes what",
        "; ".join(
            f"{name}: {what}; written by {who}; survives {till}"
            for name, what, who, till, _ in rows
        ),
    )
    for x, words in (
        (24, "in the root"),
        (212, "what it holds"),
        (462, "who writes it"),
        (672, "what it survives"),
    ):
        picture.text(x, 34, words, bold=True, colour=SOFT)
    for number, (name, what, who, till, fill) in enumerate(rows):
        y = 48 + 40 * number
        picture.box(20, y, 172, 32, name, fill=fill, mono=True, size=12.5)
        picture.text(212, y + 21, what, room=244)
        picture.text(462, y + 21, who, room=204)
        picture.text(672, y + 21, till, room=176)
    return picture


def append() -> Picture:
    """Draw an append with its crash points."""
    steps = [
        ("1  Take the locks", "thread lock, then the partition's flock", GREY, "The kernel releases the lock. Nothing has changed."),
        ("2  Read the end", "settings, last segment, tail row", GREY, "Nothing has changed."),
        ("3  Clean up and check", "cut what lies past the end; sequence; roll", GREY, "A roll that was begun is finished by the next append."),
        ("4  Write the batch", "offsets, epoch and checksum stamped", BLUE, "The bytes lie past the end, where no reader looks."),
        ("5  Commit in live", "tail, index entries, producer sequence", AMBER, "The record is in the log. It survives kill -9."),
        ("6  Release and wake", "unlock, advance the wake page", GREY, "With durability=\"os\" the append was complete."),
        ("7  Flush (fsync only)", "fdatasync; then the high watermark moves", GREEN, "The record also survives a power cut."),
    ]  # fmt: skip
    picture = Picture(
        "append",
        840,
        66 + 74 * len(steps),
        "An append and its crash points",
        "; ".join(f"{step}: {about}. Killed after it: {then}" for step, about, _, then in steps),
    )
    picture.text(30, 34, "Step", bold=True, colour=SOFT)
    picture.text(416, 34, "If the process is killed after this step", bold=True, colour=SOFT)
    for number, (step, about, fill, then) in enumerate(steps):
        y = 50 + 74 * number
        picture.box(30, y, 330, 50, step, about, fill=fill)
        if number + 1 < len(steps):
            picture.line((195, y + 50), (195, y + 73))
        picture.line((360, y + 25), (404, y + 25), tip=False, dashed=True)
        picture.text(416, y + 30, then, room=412)
    return picture


def ends() -> Picture:
    """Draw the ends of a partition on a line of offsets."""
    picture = Picture(
        "ends",
        900,
        320,
        "The ends of a partition",
        "From left to right: log start offset 40, recovery point 75, high watermark 95, log end "
        "offset 100. Up to the recovery point records are durable, up to the high watermark "
        "published, up to the log end offset written.",
    )
    at = {name: 60 + (offset - 30) * 10.3 for name, offset in
          (("start", 40), ("recovery", 75), ("watermark", 95), ("end", 100))}  # fmt: skip
    top, bottom = 108, 162
    picture.text(24, 28, "offsets grow to the right", size=12, colour=SOFT)
    for first, stop, words in ((30, 60, "sealed"), (60, 85, "sealed"), (85, 100, "active")):
        left, right = 60 + (first - 30) * 10.3, 60 + (stop - 30) * 10.3
        picture.box(
            left + 2,
            top,
            right - left - 4,
            54,
            f"{words} segment",
            f"from {first}",
            fill=GREY,
            bold=False,
        )
    marks = [
        ("start", "log start offset", "40", "middle", 196),
        ("recovery", "recovery point", "75", "middle", 196),
        ("watermark", "high watermark", "95", "end", 232),
        ("end", "log end offset", "100", "start", 268),
    ]
    for name, words, offset, anchor, down in marks:
        x = at[name]
        picture.line((x, 76), (x, top - 3), tip=False, dashed=True)
        picture.line((x, bottom + 3), (x, down), tip=False, dashed=True)
        shift = {"end": 6, "middle": 0, "start": -6}[anchor]
        picture.text(x + shift, 50, words, anchor=anchor, bold=True)
        picture.text(x + shift, 68, offset, anchor=anchor, colour=SOFT)
    spans = [
        ("start", "recovery", "durable: survives a power cut", GREEN, 196),
        ("start", "watermark", "published: readers see it, survives kill -9", AMBER, 232),
        ("start", "end", "written: with fsync the rest waits for its flush", BLUE, 268),
    ]
    for left, right, words, fill, y in spans:
        picture.box(at[left], y, at[right] - at[left], 28, words, fill=fill, bold=False)
    return picture


def rebalance() -> Picture:
    """Draw the life of a partition while its group is rebalanced."""
    picture = Picture(
        "rebalance",
        880,
        420,
        "A partition changes hands",
        "Member A owns the partition by epoch 7. When the target moves it to B, A commits, calls "
        "on_partitions_revoked and releases it; if A is killed, or silent for its session, the "
        "others remove it. The partition is then free; B takes it by epoch 8 and begins at the "
        "committed offset. A commit of A by epoch 7 is refused from then on.",
    )
    picture.box(30, 150, 190, 76, "A owns it", "ownership epoch 7", fill=BLUE)
    picture.box(360, 150, 170, 76, "free", "no owner", fill=GREY)
    picture.box(660, 150, 190, 76, "B owns it", "ownership epoch 8", fill=GREEN)

    picture.line((125, 150), (125, 70), (300, 70), tip=False)
    picture.line((300, 70), (445, 70), (445, 149))
    picture.text(140, 32, "The target gives it to B", bold=True)
    picture.text(140, 54, "A commits, calls on_partitions_revoked, releases", colour=SOFT)
    picture.line((220, 178), (359, 178))
    picture.text(290, 146, "A is killed", anchor="middle", bold=True)
    picture.text(290, 167, "lock is free", anchor="middle", colour=SOFT)
    picture.line((220, 206), (359, 206))
    picture.text(290, 226, "A is stopped", anchor="middle", bold=True)
    picture.text(290, 245, "its session ends", anchor="middle", colour=SOFT)

    picture.line((530, 188), (659, 188))
    picture.text(595, 156, "B takes it", anchor="middle", bold=True)
    picture.text(595, 177, "epoch + 1", anchor="middle", colour=SOFT)
    picture.text(755, 250, "begins at the", anchor="middle", colour=SOFT)
    picture.text(755, 267, "committed offset", anchor="middle", colour=SOFT)

    picture.line((125, 226), (125, 330), (359, 330), dashed=True)
    picture.box(360, 300, 490, 60, "A wakes up, and commits by epoch 7: refused",
                "CommitFailedError; A hears that it lost the partition", fill=RED)  # fmt: skip
    picture.text(30, 396, "Each arrow is one transaction on live, made by a member. Partitions that "
                 "do not move are read on meanwhile.", size=12.5, colour=SOFT)  # fmt: skip
    return picture


def publication() -> Picture:
    """Draw a publication: prepared, committed, visible."""
    picture = Picture(
        "publication",
        900,
        440,
        "A publication over many partitions",
        "Staged files hold batches. Prepared: the journal in state has a row for each partition, "
        "and the bytes are written past the ends. Committed: one transaction on state. Visible: "
        "one transaction on live moves all ends. Killed before the commit, the next writer cuts "
        "what was written; killed after it, the next writer makes all partitions visible.",
    )
    columns = [
        (30, "staged", "files in staging/", GREY),
        (245, "prepared", "journal rows in state", BLUE),
        (460, "committed", "one transaction on state", AMBER),
        (675, "visible", "one transaction on live", GREEN),
    ]
    for x, words, about, fill in columns:
        picture.box(x, 30, 195, 54, words, about, fill=fill)
    for x in (225, 440, 655):
        picture.line((x, 57), (x + 19, 57))
    for row, name in enumerate(("flights-0", "flights-1")):
        y = 122 + 66 * row
        picture.text(42, y + 19, name, mono=True, size=12)
        picture.box(128, y, 78, 28, "batches", fill=GREY, bold=False, size=12)
        for x, fill, dashed, end in (
            (245, BLUE, True, 345),
            (460, AMBER, True, 560),
            (675, GREEN, False, 869),
        ):
            picture.box(x + 8, y, 92, 28, "the log", fill=GREY, bold=False, size=12)
            picture.box(
                x + 102, y, 84, 28, "batches", fill=fill, bold=False, size=12, dashed=dashed
            )
            end_x = min(end + 1, x + 187)
            picture.line((end_x, y - 10), (end_x, y + 38), tip=False)
            picture.text(end_x, y + 52, "end", anchor="middle", size=11, colour=SOFT)
    picture.parts.append(
        f'<path d="M450 98V390" stroke="{LINES[RED]}" stroke-width="2" stroke-dasharray="7 5"/>'
    )
    picture.box(30, 290, 404, 76, "Killed on this side: as if it had never begun",
                "The next writer of a partition cuts what lies past", "its end, and removes its journal row.", fill=RED)  # fmt: skip
    picture.box(466, 290, 404, 76, "Killed on this side: it is published",
                "The next writer of any partition, or a repetition,", "moves the ends of all of them.", fill=GREEN)  # fmt: skip
    picture.text(450, 412, "The commit also writes the application's version, by which a repetition "
                 "is recognized.", anchor="middle", size=12.5, colour=SOFT)  # fmt: skip
    return picture


def compaction() -> Picture:
    """Draw segments before and after compaction."""
    picture = Picture(
        "compaction",
        900,
        400,
        "Segments before and after compaction",
        "Before: two sealed segments with offsets 0 to 9 and an active segment from 10 on. After: "
        "one sealed segment with the last record of each key at offsets 3, 6, 7 and 9; the active "
        "segment is as it was.",
    )
    records = [
        *(("A", "1"), ("B", "1"), ("A", "2"), ("C", "1"), ("B", "2")),
        *(("D", "1"), ("A", "3"), ("B", "3"), ("D", "2"), ("D", "-")),
        *(("A", "4"), ("E", "1")),
    ]
    last_of_key = {3, 6, 7, 9}
    width, left = 64, 60
    for y, after in ((84, False), (250, True)):
        picture.text(60, y - 44, "after" if after else "before", size=15, bold=True)
        spans = ((0, 10, "one sealed segment"),) if after else ((0, 5, "sealed"), (5, 10, "sealed"))
        for first, stop, words in (*spans, (10, 12, "active")):
            x = left + first * width
            picture.parts.append(
                f'<rect x="{x + 2}" y="{y - 10}" width="{(stop - first) * width - 4}" height="78" '
                f'rx="6" fill="none" stroke="{LINES[GREY]}"/>'
            )
            middle = x + (stop - first) * width / 2
            picture.text(middle, y - 18, words, anchor="middle", colour=SOFT)
        for offset, (key, value) in enumerate(records):
            x = left + offset * width
            if after and offset < 10 and offset not in last_of_key:
                continue
            fill = BLUE if offset > 9 else GREEN if offset in last_of_key else GREY
            picture.box(
                x + 8, y, width - 16, 36, f"{key}={value}", fill=fill, bold=False, mono=True
            )
            picture.text(
                x + width / 2, y + 56, str(offset), anchor="middle", size=12, colour=SOFT, mono=True
            )
    picture.text(60, 348, "Records keep their offsets: reading at 0 returns the record at 3. "
                 "Green records are the last of their key", size=12.5, colour=SOFT)  # fmt: skip
    picture.text(60, 368, "in the sealed segments. D=- is a tombstone: it stays for "
                 "delete.retention.ms, and is then removed as well.", size=12.5, colour=SOFT)  # fmt: skip
    return picture


def mirrors() -> Picture:
    """Draw the topologies of mirrors side by side."""
    picture = Picture(
        "mirrors",
        900,
        330,
        "Three topologies of mirrors",
        "A standby, whose copies are written to only after a failover; a hub, in which the topics "
        "of each site have its name in front; and two sites whose records are merged.",
    )
    picture.text(40, 40, "standby", size=15, bold=True)
    picture.box(40, 60, 100, 40, "producers", fill=GREY)
    picture.box(40, 140, 100, 50, "log A", "orders", fill=BLUE)
    picture.box(190, 140, 100, 50, "log B", "orders", fill=AMBER)
    picture.line((90, 100), (90, 139))
    picture.line((140, 165), (189, 165))
    picture.text(150, 158, "copy", size=11, colour=SOFT)
    picture.box(190, 60, 100, 40, "producers", fill=GREY, dashed=True)
    picture.line((240, 100), (240, 139), dashed=True)
    picture.text(40, 230, "B refuses other writers", size=12.5, colour=SOFT)
    picture.text(40, 250, "until embedlog failover.", size=12.5, colour=SOFT)

    picture.text(350, 40, "hub and spoke", size=15, bold=True)
    picture.box(350, 70, 90, 50, "log a", "orders", fill=BLUE)
    picture.box(350, 150, 90, 50, "log b", "orders", fill=BLUE)
    picture.box(510, 95, 100, 80, "hub", "a.orders", "b.orders", fill=AMBER)
    picture.line((440, 95), (509, 120))
    picture.line((440, 175), (509, 150))
    picture.text(460, 90, "--as a", size=11, colour=SOFT, mono=True)
    picture.text(460, 192, "--as b", size=11, colour=SOFT, mono=True)
    picture.text(350, 230, "Each site has its own topics", size=12.5, colour=SOFT)
    picture.text(350, 250, "in the hub; none goes back.", size=12.5, colour=SOFT)

    picture.text(670, 40, "active-active", size=15, bold=True)
    picture.box(670, 70, 190, 40, "log A: orders", fill=GREEN)
    picture.box(670, 160, 190, 40, "log B: orders", fill=GREEN)
    picture.line((720, 110), (720, 159))
    picture.line((810, 160), (810, 111))
    picture.text(735, 139, "--merge", size=11, colour=SOFT, mono=True)
    picture.text(670, 230, "Both are written to; a header", size=12.5, colour=SOFT)
    picture.text(670, 250, "says where a record was.", size=12.5, colour=SOFT)
    picture.text(
        40,
        298,
        "Blue: written to by programs. Amber: copies, at the offsets of their source. Green: both.",
        size=12.5,
        colour=SOFT,
    )
    return picture


def replication() -> Picture:
    """Draw an append to a log over three directories."""
    picture = Picture(
        "replication",
        900,
        400,
        "An append to a log over three directories",
        "A process writes the bytes of a batch to the follower's segment, then to the leader's, "
        "and then commits the new end in the databases of all directories; a consumer reads "
        "from the leader's segment and the controller's database.",
    )
    picture.box(300, 24, 300, 40, "a process that appends, acks=all", fill=GREY)
    for left, name in ((40, "disk 1"), (325, "disk 2"), (610, "disk 3")):
        picture.box(left, 140, 250, 150, fill=GREY, dashed=True)
        picture.text(left + 56, 280, name, bold=True)
        picture.box(left + 130, 160, 108, 100, "live, state", "equal rows", fill=AMBER)
    picture.box(52, 160, 72, 100, "segment", "leader", fill=GREEN)
    picture.box(337, 160, 72, 100, "segment", "follower", fill=BLUE)
    picture.text(150, 280, "controller", size=12, colour=SOFT)
    picture.text(656, 214, "no copy", size=12, anchor="middle", colour=SOFT)
    picture.line((400, 64), (376, 159))
    picture.text(398, 124, "1: bytes", size=12)
    picture.line((330, 64), (100, 159))
    picture.text(70, 112, "2: the same bytes", size=12)
    for x in (224, 509, 794):
        picture.line((560, 64), (560, 88), tip=False)
        picture.line((560, 88), (x, 88), (x, 159))
    picture.text(610, 80, "3: one transaction in each: the end", size=12)
    picture.box(52, 340, 196, 34, "a consumer reads", fill=GREY)
    picture.line((86, 260), (86, 339))
    picture.line((236, 260), (236, 339))
    picture.text(
        270, 362, "Only once 3 is done, so no consumer reads what a copy lacks.", colour=SOFT
    )
    return picture


DRAWINGS = (floors, root, append, ends, rebalance, publication, compaction, mirrors, replication)


def main() -> None:
    """Write all pictures."""
    for draw in DRAWINGS:
        picture = draw()
        (HERE / f"{picture.name}.svg").write_text(picture.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
