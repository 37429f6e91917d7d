"""Input parsing and validation: patterns, formulas as text, and function arguments.

Start with these names:

- `pattern`: `Pattern`, `parse_pattern`
- `grammar`: `parse_formula`, `parse_relation`
- `validation`: `guarded`, `Rule`, `read_record`
- `lazy_imports`: `lazy_getattr`
- `progress`: `progressing`
"""
