"""Takes the picture of the page that the README shows: asks a running server a few questions in a browser.

    python -m tests.page.screenshot --base-url http://127.0.0.1:8000 --out docs/page.png [--ask TEXT ...] [--tools]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from PIL import Image

from tests.page.browser import browser

QUESTIONS = ["What is 2+2?", "Write a short story"]
# Of an answer on a slow machine.
_ANSWER_S = 300
# Flat areas and text: more only makes the file larger.
_SHADES = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--ask", action="append", default=[], metavar="TEXT", help=f"default: {QUESTIONS}")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="goes along with the first question")
    parser.add_argument("--tools", action="store_true", help="switch the page's tools on")
    parser.add_argument("--dark", action="store_true")
    args = parser.parse_args()
    with browser() as chrome, chrome.open(args.base_url.rstrip("/") + "/") as page:
        page.scheme("dark" if args.dark else "light")
        page.until("document.querySelector('#model').value")
        page.choose("#tools", args.tools)
        if args.picture:
            page.pick("#file", args.picture.resolve())
            page.until("document.querySelector('#chosen img')")
        for text in args.ask or QUESTIONS:
            page.write(text, into="#question")
            page.press("Enter")
            page.until("document.querySelector('#stop').disabled", _ANSWER_S)
        # The thought of the first answer is shown unfolded.
        page.js("document.querySelector('.thought:not([hidden])')?.setAttribute('open', '')")
        page.js("document.querySelector('#log').scrollTop = 0")
        failed = page.texts(".assistant .error")
        page.screenshot(args.out)
    with Image.open(args.out) as taken:
        small = taken.convert("RGB").quantize(_SHADES)
    small.save(args.out, optimize=True)
    print(f"{args.out}: {args.out.stat().st_size} bytes" + "".join(f"\nerror: {one}" for one in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
