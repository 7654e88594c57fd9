"""One folder per layout: `spec.py` (data, no torch), `layout.py` (the module), and a file per device."""
