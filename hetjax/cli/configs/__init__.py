"""Named experiments of `hetjax train --config NAME`, each with its command, run time and expected result."""
