"""Tests as laws, in folders that mirror the packages."""
