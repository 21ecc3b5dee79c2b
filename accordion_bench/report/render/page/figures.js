// Data of one setting's figures: plotly's traces and axes, for the selected options.
"use strict";

const BANDS = 8;  // most arms whose seeds are drawn as bands; more would hide each other
const NAMED = 8;  // most seeds whose values are listed

class Figures {
  constructor(data) {
    Object.assign(this, { data, hidden: new Set(), axis: data.axes[0].key, stop: data.stop });
  }

  all() {
    const { data } = this, found = [
      { kind: "whole", title: "Over training", draw: () => this.curves() },
      { title: "After the last epoch, and what it has cost", draw: () => this.ends() },
    ];
    if (data.target) found.push({ title: data.target.title, draw: () => this.target() });
    if (data.steps) found.push({ title: "Where the time of a step goes", draw: () => this.steps() });
    const maps = (data.levels ?? []).map(map =>
      ({ title: `Levels: ${data.arms[map.arm].label}, seed ${map.seed}`, draw: () => this.levels(map) }));
    return [...found, ...maps];
  }

  // ---- numbers

  visible() {
    return this.data.arms.map((arm, number) => ({ ...arm, ...this.curve(number), number }))
      .filter(arm => !this.hidden.has(arm.number));
  }

  // finished arms; running ones are drawn as curves only
  ended() {
    return this.visible().filter(arm => !arm.running);
  }

  // the curve of an arm, decoded on first use
  curve(number) {
    const curve = this.data.curves[number];
    if (!curve.mean) {
      curve.score = curve.score.map(floats);
      curve.half = floats(curve.half);
      curve.mean = curve.half.map((_, i) => curve.score.reduce((sum, own) => sum + own[i], 0) / curve.score.length);
      for (const [key, packed] of Object.entries(curve.x)) {
        curve.x[key] = Array.isArray(packed) ? packed.map(floats) : floats(packed);
      }
    }
    return curve;
  }

  // an arm's values on an axis; undefined if it has none
  on(arm, key) {
    return key === "modelled_seconds" ? arm.x[key]?.[this.stop] : arm.x[key];
  }

  // ---- words

  show(value) {
    const { decimals, unit } = this.data.metric;
    return unit ? `${value.toFixed(decimals)} ${unit}` : `${+value.toPrecision(decimals)}`;
  }

  about(key) {
    return this.data.axes.find(axis => axis.key === key);
  }

  // the text shown at the mouse pointer
  told(arm, i, x, key) {
    const { unit } = this.about(key);
    const cost = key === "epoch" ? "" : `, ${unit === "bytes" ? size(x[i]) : `${digits(x[i])} s`}`;
    const known = arm.n > 1 && Number.isFinite(arm.half[i]);
    const half = known ? ` ± ${this.show(arm.half[i])} (95 %, n = ${arm.n})` : "";
    const seeds = arm.score.slice(0, NAMED).map((own, seed) => `seed ${plain(arm.seeds[seed])}: ${this.show(own[i])}`);
    const more = arm.n > NAMED ? [`and ${arm.n - NAMED} more seeds`] : [];
    return [`<b>${lines(arm.label, 48)}</b>`, `epoch ${arm.x.epoch[i]}${cost}`, `${this.show(arm.mean[i])}${half}`,
      ...seeds, ...more].join("<br>");
  }

  apart(arms, key) {
    const without = arms.filter(arm => !this.on(arm, key)).map(arm => arm.label);
    return without.length ? `Not on this axis: ${without.join("; ")}.` : "";
  }

  unranked(arms) {
    const ended = arms.filter(arm => !arm.running), alone = ended.filter(arm => arm.n === 1).map(arm => arm.label);
    if (!alone.length) return "";
    return alone.length === ended.length ? "One seed: nothing is ranked." : `One seed, not ranked: ${alone.join("; ")}.`;
  }

  // ---- axes

  // starts where the first curve enters the metric's limits
  cost(key, points) {
    const { name, unit } = this.about(key), log = unit === "bytes" || key === "modelled_seconds";
    const known = points.filter(value => value > 0);
    const low = known.reduce((a, b) => Math.min(a, b), Infinity), high = known.reduce((a, b) => Math.max(a, b), 0);
    const title = { text: `${name} [${unit}${log ? ", log scale" : ""}]` };
    if (key === "epoch") return { title, range: [0.5, high + 0.5], ...whole(high) };
    if (!known.length || !log) return { title, range: [0, 1.04 * high || 1] };
    const marks = ticks(low / 1.3, high * 1.3);
    return { type: "log", title, range: [Math.log10(low / 1.3), Math.log10(high * 1.3)], tickvals: marks,
      ticktext: marks.map(unit === "bytes" ? size : digits) };
  }

  // the metric after the last epoch with its intervals, except one that dwarfs all others; never so narrow that noise
  // appears large
  span(arms) {
    const [bottom, top] = this.data.limits, { least, most } = this.data.metric;
    const ends = arms.map(arm => arm.end).filter(([mean]) => mean !== null && mean >= bottom && mean <= top);
    if (!ends.length) return [bottom, top];
    const means = ends.map(([mean]) => mean), lowest = Math.min(...means), highest = Math.max(...means);
    const room = Math.max(least, highest - lowest);
    const low = Math.max(lowest - room, Math.min(...ends.map(([mean, half]) => mean - (half ?? 0))));
    const high = Math.min(highest + room, Math.max(...ends.map(([mean, half]) => mean + (half ?? 0))));
    const margin = Math.max(least - (high - low), 0) / 2 + 0.06 * (high - low);
    return [low - margin, Math.min(high + margin, most ?? Infinity)];
  }

  // labels of a figure's rows
  rows(arms) {
    const names = arms.map(arm => lines(arm.label, narrow() ? 18 : 30));
    const height = 98 + names.reduce((sum, name) => sum + 14 + 15 * name.split("<br>").length, 0);
    const range = [names.length - 0.4, -0.6];
    return { height, y: { tickvals: names.map((_, i) => i), ticktext: names, range, ticks: "", showgrid: false } };
  }

  // ---- figures: {traces, height, x, y, note}; null if there is nothing to show

  curves() {
    const key = this.axis, arms = this.visible(), shown = arms.filter(arm => this.on(arm, key));
    if (shown.length && shown.every(arm => arm.mean.length < 2)) return null;
    const [low, high] = this.data.limits, few = shown.length <= BANDS, several = arms.some(arm => arm.n > 1);
    const seen = shown.flatMap(arm => [...this.on(arm, key)].filter((_, i) =>
      i === arm.mean.length - 1 || (arm.mean[i] >= low && arm.mean[i] <= high)));
    const { note } = this.about(key);
    const notes = [
      several ? `Lines: mean over the seeds; bands: their range${few ? "" : ` (for up to ${BANDS} arms)`}.` : "",
      this.unranked(arms),
      "Early epochs may be cut off.",
      key === "modelled_seconds" ? `All links: ${this.data.stops[this.stop].name}. ${this.data.model}` : note,
      this.apart(arms, key),
    ];
    return { traces: shown.flatMap(arm => [...(few && arm.n > 1 ? [this.band(arm)] : []), ...this.line(arm)]),
      height: narrow() ? 320 : 440, x: this.cost(key, seen),
      y: { range: this.data.limits, title: { text: plain(this.data.metric.label) } }, note: notes };
  }

  band(arm) {
    const x = [...this.on(arm, this.axis)];
    const low = x.map((_, i) => Math.min(...arm.score.map(own => own[i])));
    const high = x.map((_, i) => Math.max(...arm.score.map(own => own[i])));
    return { x: [...x, ...x.toReversed()], y: [...high, ...low.toReversed()], mode: "lines", fill: "toself",
      fillcolor: `${arm.colour}20`, line: { width: 0 }, hoverinfo: "skip" };
  }

  line(arm) {
    const x = this.on(arm, this.axis), last = x.length - 1, { colour: color, symbol, dash } = arm;
    return [
      { x, y: arm.mean, mode: "lines+markers", line: { color, dash, width: 2 }, name: plain(arm.label), meta: "curve",
        marker: { color, symbol, size: 6, maxdisplayed: 7 }, hoverinfo: "text",
        text: [...x].map((_, i) => this.told(arm, i, x, this.axis)) },
      { x: [x[last]], y: [arm.mean[last]], mode: "markers", hoverinfo: "skip",
        marker: { color, symbol, size: 10, line: { color: "#ffffff", width: 1 } } },
    ];
  }

  ends() {
    const key = this.axis === "epoch" ? this.data.axes[1]?.key : this.axis, arms = this.ended();
    const shown = key ? arms.filter(arm => this.on(arm, key) && arm.end[0] !== null) : [];
    if (!key || (arms.length && !shown.length) || this.data.arms.every(arm => arm.running)) return null;
    const range = this.span(shown), bars = shown.some(arm => arm.end[1] !== null);
    const notes = [bars ? "Bars: Student's 95 % t-interval; a triangle at the edge: it goes on." : "",
      this.unranked(arms), this.apart(arms, key)];
    return { traces: shown.flatMap(arm => this.end(arm, key, range)), height: narrow() ? 300 : 340,
      x: this.cost(key, shown.map(arm => this.on(arm, key).at(-1))),
      y: { range, title: { text: plain(this.data.metric.label) } }, note: notes };
  }

  // a marker with its interval; parts outside the axis are cut and marked with a triangle that gives the end
  end(arm, key, [low, high]) {
    const x = this.on(arm, key), last = x.length - 1, [mean, half] = arm.end, { colour: color, symbol } = arm;
    const reaches = [mean - (half ?? 0), mean + (half ?? 0)], top = this.data.metric.most ? Math.min(high, 100) : high;
    const cut = (edge, to, shape) => ({ x: [x[last]], y: [edge], mode: "markers", hoverinfo: "text", cliponaxis: false,
      text: [`goes on to ${this.show(to)}`], marker: { color, symbol: shape, size: 8 } });
    return [
      { x: [x[last]], y: [Math.min(Math.max(mean, low), high)], mode: "markers", name: plain(arm.label), meta: "end",
        hoverinfo: "text", text: [this.told(arm, last, x, key)], marker: { color, symbol, size: 11 },
        error_y: { type: "data", symmetric: false, array: [Math.max(0, Math.min(half ?? 0, top - mean))],
          arrayminus: [half ?? 0], visible: half !== null, color } },
      ...(reaches[0] < low ? [cut(low, reaches[0], "triangle-down")] : []),
      ...(reaches[1] > top ? [cut(top, reaches[1], "triangle-up")] : []),
    ];
  }

  target() {
    const { rows, name, note } = this.data.target, arms = this.ended(), places = arms.map((_, i) => i);
    const found = arms.map(arm => rows[arm.number]), reach = found.map(({ mean, half }) => (mean ?? 0) + (half ?? 0));
    const values = found.map(({ mean, half, beside }) => {
      const time = mean === null ? "" : `${digits(mean)}${half === null ? "" : ` ± ${digits(half)}`} s`;
      return [time, beside].filter(Boolean).join(", ");
    });
    const bars = { type: "bar", orientation: "h", meta: "target", y: places, x: found.map(({ mean }) => mean ?? 0),
      hoverinfo: "text", hovertext: arms.map((arm, i) => `<b>${lines(arm.label, 48)}</b><br>${values[i]}`),
      marker: { color: arms.map(arm => arm.colour) },
      error_x: { type: "data", array: found.map(({ half }) => half ?? 0), thickness: 1, color: INK } };
    const beside = { mode: "text", y: places, x: reach, text: values.map(value => ` ${value}`), hoverinfo: "skip",
      textposition: "middle right", cliponaxis: false };
    const range = [0, 1.6 * Math.max(...reach, 1e-9)];
    return { ...this.rows(arms), traces: [bars, beside], x: { title: { text: name }, range }, note: [note] };
  }

  steps() {
    const { parts, beside, note } = this.data.steps, arms = this.ended();
    const known = arm => parts[0].values[arm.number] !== null;
    const told = (arm, part) => [`<b>${lines(arm.label, 48)}</b>`,
      known(arm) ? `${part.name}: ${digits(part.values[arm.number])} ms` : "", beside[arm.number]]
      .filter(Boolean).join("<br>");
    const bars = parts.map(part => ({ type: "bar", orientation: "h", meta: "steps", y: arms.map((_, i) => i),
      x: arms.map(arm => part.values[arm.number]), hoverinfo: "text", hovertext: arms.map(arm => told(arm, part)),
      marker: { color: part.colour, line: { color: "#ffffff", width: 1 } } }));
    const unknown = { mode: "text", x: arms.map(() => 0), y: arms.map((_, i) => i), hoverinfo: "skip",
      text: arms.map(arm => known(arm) ? "" : ` ${beside[arm.number]}`), textposition: "middle right" };
    const traces = arms.every(known) ? bars : [...bars, unknown];
    const x = { title: { text: "time of a step [ms]" } };
    return { ...this.rows(arms), traces, barmode: "stack", key: parts, x, note: [note] };
  }

  levels(map) {
    if (this.hidden.has(map.arm)) return null;
    const count = map.names.length, epochs = floats(map.epochs), places = map.places.map(floats);
    const names = map.names.map(plain), layers = map.layers.map(plain);
    const colorscale = map.colours.flatMap((colour, i) => [[i / count, colour], [(i + 1) / count, colour]]);
    const text = places.map((row, layer) => [...row].map((place, i) =>
      `${layers[layer]}<br>epoch ${epochs[i]}: ${names[place] ?? "no level"}`));
    const x = { title: { text: "training [epochs]" }, ...whole(epochs[epochs.length - 1]), showgrid: false };
    return { height: 108 + 14 * Math.min(layers.length, 30), x,
      y: { type: "category", autorange: "reversed", ticks: "", showgrid: false },
      key: map.names.map((name, i) => ({ name, colour: map.colours[i] })),
      traces: [{ type: "heatmap", meta: "levels", x: epochs, y: layers, z: places, colorscale, zmin: -0.5,
        zmax: count - 0.5, hoverinfo: "text", text, showscale: false }] };
  }
}
