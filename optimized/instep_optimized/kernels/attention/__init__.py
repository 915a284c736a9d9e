"""Attention over pages: prefill chunks, windows, trees and decode."""
