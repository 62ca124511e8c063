from dataclasses import dataclass
@dataclass
class Shape:
  a: str
  b: int
def measure(): ...
