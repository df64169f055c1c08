"""Rollouts of programs that call a chat API: sessions that record their calls as tokens, and the server of sessions."""
