"""How long messages are and who sends what to whom: plain arithmetic, without torch, for every
package.
"""
