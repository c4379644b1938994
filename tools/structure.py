"""Measure how large the product is and how it is cut, for a reader and, as JSON on the last line, for a program.

    python -m tools.structure                    the table
    python -m tools.structure --check            the same; exit status 1 if a count is beyond its limit
    python -m tools.structure --list fragments   the places behind a count (see `LISTS`)

The product is the Python code of four packages, without generated stubs. A docstring fragment is a docstring of a
module, class or function that is shorter than 40 characters and has no verb. Whether it has one is decided by words
alone: an auxiliary ("is", "may", "must"), or the third person of a verb in `_VERBS` ("keeps"), anywhere; or the bare
verb as the first word ("Keep"). A form that is also a noun ("drafts", "report", see `_NOUNS`) counts only where its
neighbours make it a verb: "it drafts", "Drafts the", but not "The drafts of", "Report of" or "Step costs". Past tenses
do not count, since they look like participles ("tokens received"). The docstring below a field names its unit and is
not counted.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("outrider", "edge_agent", "cloud_verifier", "coordinator")
SHORT = 40
"""Characters; a longer docstring is taken to be a sentence."""
# A new feature may raise `lines` and `classes`, in the commit that needs it.
LIMITS = {
    "lines": 55_300,
    "classes": 540,
    "most_files_in_folder": 20,
    "duplicate_class_names": 5,
    "most_attributes": 20,
    "docstring_fragments": 20,
}
LISTS = ("files", "classes", "folders", "duplicates", "attributes", "fragments")

_AUXILIARIES = "is are was were be been has have had does do did can could may might must shall should will would"
_VERBS = """
abort accept act add admit adopt advance allocate allow announce answer append apply arrange ask assemble attach attend
authenticate authorise await bear become begin belong block borrow bound bring broadcast build call cancel cap capture
carry change charge check choose clean clear clip close collect come commit communicate compare compile complete compute
concatenate configure connect contain continue convert copy cordon cost count couple create cross cut decide decode
define delete deliver depend derive describe detach differ discard dispatch divide download draft drain draw drive drop
dump empty encode end escape estimate evaluate evict exchange expire export extend extract fail fall feed fetch fill
filter find finish fit flush fold follow forget fork format free gather generate get give go grow guard guess hand
handle happen hash hide hold identify implement import include increase inform insert insist install isolate iterate
join judge keep kill know last lay lead learn leave let limit link list listen live load lock log look lose lower make
manage map mark match mean measure meet mend merge move multiply name need normalise note notice obey observe occur
offer open order own pack pad parse pass patch pause perform permit persist pick ping place point poll predict prepare
print produce promise promote propose publish pull push put quantise queue quote raise rank rate reach read rebuild
receive recompute record recover reduce refresh refuse register reject release reload remember remind remove rename
render renew reopen reorder repair repeat replace replay reply report represent request require reserve reset resolve
respond rest restart restore restrict resume retire retry return reuse reverse revoke rewrite roll root route run sample
save say scale scan schedule score seal search see select send separate serialise serve set settle share shift show
shrink shut sign signal sleep sort speak speculate spend split stand start stay steer step stop store stream strip
subtract sum summarise support surround swap switch take tell test tidy tie time tokenise track train transfer translate
treat trim truncate trust try turn uncordon understand undo unload unlock unpack update upload use validate verify visit
wait wake walk want warm warn watch wire withdraw wrap write yield
"""
_NOUNS = """
abort answer block bound broadcast build call cap capture change charge check clip commit copy cost count couple cross
cut draft drain draw drive drop dump end escape estimate exchange export feed fetch fill filter fit flush fold fork
format guard guess hand handle hash hold import install judge kill lead limit link list load lock log look map mark
match mean measure merge move name need note notice offer order pack pad pass patch pause pick place point poll promise
pull push queue quote rank rate record release repair repeat replay reply report request reserve reset rest restart
return reuse reverse roll root route run sample scale scan schedule score seal search set share shift show sign signal
sleep sort split stand start stay step stop store stream sum support swap switch test tie time track train transfer trim
trust try turn update upload use visit wait walk watch wire yield
"""
"""Verbs of `_VERBS` whose forms are also nouns."""
_SUBJECTS = "always everything he it never nobody nothing only that this what which who"
"""Words after which a form that is also a noun is a verb."""
_OBJECTS = "a all an another any both each every it its no nothing that the them these this what whether"
"""Words before which it is a verb, unless an article or adjective comes before it."""
_ARTICLES = "a all an any both each every its more most no several some the their these this those"


def _third_person(verb: str) -> str:
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return f"{verb[:-1]}ies"
    return f"{verb}es" if verb.endswith(("s", "x", "z", "ch", "sh", "o")) else f"{verb}s"


_IMPERATIVES = frozenset(_VERBS.split())
_FINITE = {*_AUXILIARIES.split(), *map(_third_person, _IMPERATIVES)}
_NOUN_BASES = frozenset(_NOUNS.split())
_PLURALS = frozenset(map(_third_person, _NOUN_BASES))


@dataclass(frozen=True)
class Structure:
    """The offenders behind each count, as `path:line: what` where it has a line."""

    lines: int
    files: Sequence[str]
    classes: Sequence[str]
    folders: Mapping[str, int]
    """Python files directly in each folder."""
    duplicates: Mapping[str, Sequence[str]]
    """Public class name -> its places, for those that have several."""
    attributes: Sequence[tuple[int, str]]
    """(attributes of `self` set in `__init__`, place), the most first; settings models are left out."""
    fragments: Sequence[str]

    def counts(self) -> dict[str, int]:
        """Return the counts that `LIMITS` bounds, and the number of files."""
        return {
            "lines": self.lines,
            "files": len(self.files),
            "classes": len(self.classes),
            "most_files_in_folder": max(self.folders.values(), default=0),
            "duplicate_class_names": len(self.duplicates),
            "most_attributes": max((count for count, _ in self.attributes), default=0),
            "docstring_fragments": len(self.fragments),
        }

    def listed(self, name: str) -> Iterator[str]:
        """Yield a line for each thing behind a count."""
        match name:
            case "folders":
                yield from (f"{count:4} {folder}" for folder, count in Counter(self.folders).most_common())
            case "duplicates":
                yield from (f"{name}: {', '.join(places)}" for name, places in self.duplicates.items())
            case "attributes":
                yield from (f"{count:4} {place}" for count, place in self.attributes)
            case _:
                yield from getattr(self, name)


def is_fragment(docstring: str) -> bool:
    """Whether a docstring is short and has no verb."""
    words = [word.lower() for word in re.findall(r"[A-Za-z]+", docstring)]
    return len(docstring) < SHORT and not any(_is_verb(words, index) for index in range(len(words)))


def _is_verb(words: Sequence[str], index: int) -> bool:
    """Whether a word is a finite verb, judged by itself and, if it may be a noun, by the words beside it."""
    word, before = words[index], words[index - 1] if index else ""
    after = words[index + 1] if index + 1 < len(words) else ""
    if index == 0 and word in _IMPERATIVES:
        return word not in _NOUN_BASES or (after != "of" and after not in _PLURALS)
    if word not in _PLURALS:
        return word in _FINITE
    return before in _SUBJECTS.split() or (after in _OBJECTS.split() and before not in _ARTICLES.split())


def measure(root: Path = ROOT, packages: Sequence[str] = PACKAGES) -> Structure:
    """Read the packages below `root`."""
    paths = [path for package in packages for path in sorted((root / package).rglob("*.py")) if "_pb2" not in path.name]
    lines, classes, attributes, fragments = 0, [], [], []
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        text, file = path.read_text(encoding="utf-8"), str(path.relative_to(root))
        lines += text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            place = f"{file}:{getattr(node, 'lineno', 1)}"
            docstring = ast.get_docstring(node)
            if docstring is not None and is_fragment(docstring):
                fragments.append(f"{place}: {docstring}")
            if isinstance(node, ast.ClassDef):
                classes.append(f"{place}: {node.name}")
                attributes.append((_attributes(node), f"{place}: {node.name}"))
                if not node.name.startswith("_"):
                    places[node.name].append(place)
    return Structure(
        lines,
        [str(path.relative_to(root)) for path in paths],
        classes,
        Counter(str(path.parent.relative_to(root)) for path in paths),
        {name: where for name, where in sorted(places.items()) if len(where) > 1},
        sorted((entry for entry in attributes if entry[0]), reverse=True),
        fragments,
    )


def _attributes(cls: ast.ClassDef) -> int:
    """Count the attributes that `__init__` sets; 0 for a settings model, whose fields are settings."""
    if any("Settings" in ast.unparse(base) for base in cls.bases):
        return 0
    inits = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    stored = (node for init in inits for node in ast.walk(init) if isinstance(node, ast.Attribute))
    return len({node.attr for node in stored if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure how large the product is and how it is cut.")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a count is beyond its limit")
    parser.add_argument("--list", choices=LISTS, help="show what is behind a count first")
    options = parser.parse_args(arguments)
    structure = measure()
    if options.list:
        print(*structure.listed(options.list), sep="\n")
    counts = structure.counts()
    beyond = [name for name, limit in LIMITS.items() if counts[name] > limit]
    for name, count in counts.items():
        limit = f"limit {LIMITS[name]:,}" if name in LIMITS else ""
        print(f"{name:24}{count:>8,}   {limit}{'   BEYOND' if name in beyond else ''}".rstrip())
    sys.stdout.flush()
    if options.check and beyond:
        print(f"beyond the limit: {', '.join(beyond)}; --list shows the places", file=sys.stderr, flush=True)
    print(json.dumps(counts))
    return 1 if options.check and beyond else 0


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; the interpreter shall not flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    raise SystemExit(status)
