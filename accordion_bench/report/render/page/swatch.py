"""How an arm is drawn, as a small picture beside its name."""

import numpy as np
from matplotlib.markers import MarkerStyle

from accordion_bench.report.render.looks import Look

WIDTH, HEIGHT, RADIUS = 34, 14, 5  # pixels


def swatch(look: Look) -> str:
    """A line with its marker, as SVG."""
    dash = "" if look.dash == "solid" else look.dash.replace("px", "")
    marker = MarkerStyle(look.marker)
    outline = marker.get_path().transformed(marker.get_transform())
    fill = "#ffffff" if look.symbol.endswith("-open") else look.colour
    shapes = []
    for polygon in map(np.asarray, outline.to_polygons()):
        scale = RADIUS / np.hypot(*polygon.T).max()
        points = " ".join(f"{WIDTH / 2 + scale * x:.1f},{HEIGHT / 2 - scale * y:.1f}" for x, y in polygon)
        shapes.append(f'<polygon points="{points}" fill="{fill}" stroke="{look.colour}"/>')
    line = f'<line x1="0" y1="{HEIGHT // 2}" x2="{WIDTH}" y2="{HEIGHT // 2}" stroke="{look.colour}" stroke-width="2"'
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    head = f'<svg class="swatch" width="{WIDTH}" height="{HEIGHT}" aria-hidden="true">'
    return f"{head}{line}{dashed}/>{''.join(shapes)}</svg>"
