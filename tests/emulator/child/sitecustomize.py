"""Python reads this when it starts in a process whose parent has the emulated GPU (PYTHONPATH): it has it as well."""

import emulator  # noqa: F401
