import sys

from tests.acceptance.program import main

sys.exit(main())
