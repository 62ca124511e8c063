"""Other libraries on top of megafsdp; docs/ecosystem.md has a row for each test."""
