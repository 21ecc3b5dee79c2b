"use strict";

const INK = "#1b1b1b", GRID = "#e3e3e3";
const NARROW = 700;  // pixels of the window, below which there is one column
const BANDS = 8;  // arms at most whose seeds are shown as bands: more hide each other
const NAMED = 8;  // seeds at most whose values are told
const PAPER = 680;  // pixels, the width of A4 without its margins
const CONFIG = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d"],
  toImageButtonOptions: { format: "svg", filename: "accordion_bench" } };

const floats = text => new Float32Array(Uint8Array.from(atob(text), letter => letter.charCodeAt(0)).buffer);
const plain = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");  // for plotly, which knows tags
const make = (tag, text = "") => Object.assign(document.createElement(tag), { textContent: text });
const digits = value => Math.abs(value) >= 999.5 ? Math.round(value).toLocaleString("en") : `${+value.toPrecision(3)}`;
const narrow = () => window.innerWidth <= NARROW;

function size(bytes) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (bytes < 1000) return `${digits(bytes)} ${unit}`;
    bytes /= 1000;
  }
  return `${digits(bytes)} TB`;
}

// the numbers of a logarithmic axis: powers of ten, or closer where the axis is short
function ticks(low, high) {
  const parts = high < 5 * low ? [1, 1.5, 2, 3, 4, 5, 7] : high < 200 * low ? [1, 2, 5] : [1], found = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) found.push(...parts.map(part => part * 10 ** power));
  return found.filter(value => value >= low && value <= high);
}

function lines(text, letters) {
  const found = [""];
  for (const word of text.split(" ")) {
    const longer = `${found[found.length - 1]} ${word}`.trim();
    if (longer.length > letters && found[found.length - 1]) found.push(word);
    else found[found.length - 1] = longer;
  }
  return plain(found.join("\n")).replace(/\n/g, "<br>");
}

// One setting: what is switched on, and the figures that show it.
class Setting {
  constructor(section, data) {
    Object.assign(this, { section, data, hidden: new Set(), axis: data.axes[0].key, stop: data.stop, drawn: false });
    this.figures = [];
    this.legend();
    this.controls();
    if (section.querySelector(".sortable")) this.table();
    const grid = section.querySelector(".figures");
    this.add(grid, "whole", data.metric.label, () => this.curves());
    this.add(grid, "", "After the last epoch, and what it has cost", () => this.ends());
    if (data.target) this.add(grid, "", data.target.title, () => this.target());
    if (data.steps) this.add(grid, "", "Where the time of a step goes", () => this.steps());
    data.levels.forEach(map => this.add(grid, "", `Levels: ${data.arms[map.arm].label}, seed ${map.seed}`,
      () => this.levels(map)));
  }

  add(grid, kind, title, draw) {
    const figure = make("figure"), key = make("p"), plot = make("div"), note = make("p");
    figure.className = kind;
    key.className = "key";
    note.className = "note";
    figure.append(make("figcaption", title), key, plot, note);
    grid.append(figure);
    this.figures.push({ figure, key, plot, note, draw });
  }

  // ---- what can be switched

  legend() {
    const buttons = [...this.section.querySelectorAll(".legend [data-arm]")];
    const show = hidden => {
      this.hidden = new Set(hidden);
      buttons.forEach((button, arm) => button.setAttribute("aria-pressed", !this.hidden.has(arm)));
      this.section.querySelectorAll("tr[data-arm]").forEach(row =>
        row.classList.toggle("off", this.hidden.has(+row.dataset.arm)));
      this.draw();
    };
    buttons.forEach((button, arm) => button.addEventListener("click", () =>
      show(this.hidden.has(arm) ? [...this.hidden].filter(other => other !== arm) : [...this.hidden, arm])));
    this.section.querySelector(".legend .all")?.addEventListener("click", () => show([]));
    this.section.querySelector(".legend .none")?.addEventListener("click", () => show(buttons.keys()));
  }

  controls() {
    const field = this.section.querySelector(".switch"), slider = this.section.querySelector(".slider");
    const range = slider.querySelector("input"), output = slider.querySelector("output");
    for (const axis of this.data.axes) {
      const label = make("label"), radio = make("input");
      Object.assign(radio, { type: "radio", name: this.section.id, value: axis.key, checked: axis.key === this.axis });
      radio.addEventListener("change", () => {
        this.axis = axis.key;
        slider.hidden = axis.key !== "modelled_seconds";
        this.draw();
      });
      label.append(radio, ` ${axis.short}`);
      field.append(label);
    }
    Object.assign(range, { max: this.data.stops.length - 1, value: this.stop });
    const tell = () => {
      output.textContent = this.data.stops[this.stop].name;
      range.setAttribute("aria-valuetext", output.textContent);
    };
    tell();
    range.addEventListener("input", () => {
      this.stop = +range.value;
      tell();
      this.draw();
    });
  }

  table() {
    const table = this.section.querySelector(".sortable"), body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    const key = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending", sign = down ? -1 : 1;
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map(row => [key(row, column), row]);
      const numbers = rows.every(([value]) => value === "" || !Number.isNaN(+value.replace("inf", "Infinity")));
      rows.sort(([a], [b]) => {
        if (a === "" || b === "") return (a === "") - (b === "");  // what is not known is last
        return sign * (numbers ? +a.replace("inf", "Infinity") - +b.replace("inf", "Infinity") : a.localeCompare(b));
      });
      body.append(...rows.map(([, row]) => row));
    }));
    this.section.querySelector(".filter").addEventListener("input", event => {
      const wanted = event.target.value.toLowerCase();
      for (const row of body.rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
    });
    this.section.querySelector(".more-columns")?.addEventListener("change", event =>
      table.classList.toggle("all-columns", event.target.checked));
  }

  // ---- figures

  draw(width) {
    if (!this.drawn) return;
    for (const { figure, key, plot, note, draw } of this.figures) {
      const found = draw();
      figure.hidden = !found;
      if (!found) continue;
      note.textContent = found.note ?? "";
      key.replaceChildren(...(found.key ?? []).map(({ name, colour }) => {
        const entry = make("span", name), square = make("i");
        square.style.background = colour;
        entry.prepend(square);
        return entry;
      }));
      Plotly.react(plot, found.traces, this.layout(found, width), CONFIG);
    }
  }

  layout({ x, y, height, barmode }, width) {
    const axis = { gridcolor: GRID, linecolor: INK, zeroline: false, automargin: true, ticks: "outside", ticklen: 3 };
    return { height, width, autosize: width === undefined, showlegend: false,
      margin: { l: 50, r: 16, t: 12, b: 44 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "#ffffff",
      font: { family: "system-ui, sans-serif", size: 12, color: INK }, hovermode: "closest", dragmode: narrow() ? false : "zoom",
      hoverlabel: { align: "left", bgcolor: "#ffffff", font: { color: INK, size: 12 } },
      xaxis: { ...axis, ...x }, yaxis: { ...axis, ...y }, barmode };
  }

  visible() {
    return this.data.arms.map((arm, number) => ({ ...arm, ...this.curve(number), number })).filter(arm => !this.hidden.has(arm.number));
  }

  // those that have come to their end: what goes on is a curve and nothing else
  ended() {
    return this.visible().filter(arm => !arm.running);
  }

  // the numbers of an arm, decoded when they are first needed
  curve(number) {
    const curve = this.data.curves[number];
    if (!curve.mean) {
      curve.score = curve.score.map(floats);
      curve.half = floats(curve.half);
      curve.mean = curve.half.map((_, i) => curve.score.reduce((sum, own) => sum + own[i], 0) / curve.score.length);
      for (const [key, packed] of Object.entries(curve.x)) curve.x[key] = Array.isArray(packed) ? packed.map(floats) : floats(packed);
    }
    return curve;
  }

  // an arm's values on an axis; undefined where it has none
  on(arm, key) {
    return key === "modelled_seconds" ? arm.x[key]?.[this.stop] : arm.x[key];
  }

  show(value) {
    const { digits, unit } = this.data.metric;
    return `${unit ? value.toFixed(digits) : +value.toPrecision(digits)}${unit && ` ${unit}`}`;
  }

  // what stands beside the mouse
  told(arm, i, x, key) {
    const { unit } = this.data.axes.find(axis => axis.key === key);
    const cost = key === "epoch" ? "" : `, ${unit === "bytes" ? size(x[i]) : `${digits(x[i])} s`}`;
    const half = arm.n > 1 && Number.isFinite(arm.half[i]) ? ` ± ${this.show(arm.half[i])} (95 %, n = ${arm.n})` : "";
    const seeds = arm.score.slice(0, NAMED).map((own, seed) => `<br>seed ${plain(arm.seeds[seed])}: ${this.show(own[i])}`);
    const more = arm.n > NAMED ? `<br>and ${arm.n - NAMED} more seeds` : "";
    return `<b>${lines(arm.label, 48)}</b><br>epoch ${arm.x.epoch[i]}${cost}<br>${this.show(arm.mean[i])}${half}${seeds.join("")}${more}`;
  }

  cost(key, shown) {
    const { name, unit } = this.data.axes.find(axis => axis.key === key), log = unit === "bytes" || key === "modelled_seconds";
    const [low, high] = this.data.limits, seen = [];
    for (const arm of shown) {
      const x = this.on(arm, key);
      x.forEach((value, i) => {
        if (value > 0 && (i === x.length - 1 || (arm.mean[i] >= low && arm.mean[i] <= high))) seen.push(value);
      });
    }
    const ends = seen.length ? [seen.reduce((a, b) => Math.min(a, b)), seen.reduce((a, b) => Math.max(a, b))] : [1, 10];
    const title = { text: `${name} [${unit}${log ? ", log scale" : ""}]` };
    if (log) {
      const marks = ticks(ends[0] / 1.3, ends[1] * 1.3), show = unit === "bytes" ? size : digits;
      return { type: "log", title, range: [Math.log10(ends[0] / 1.3), Math.log10(ends[1] * 1.3)], tickvals: marks, ticktext: marks.map(show) };
    }
    return { title, range: [0, 1.04 * ends[1]] };
  }

  apart(shown, key) {
    const without = shown.filter(arm => !this.on(arm, key)).map(arm => arm.label);
    return without.length ? ` Not on this axis: ${without.join("; ")}.` : "";
  }

  about(key) {
    const { note } = this.data.axes.find(axis => axis.key === key);
    if (key !== "modelled_seconds") return note && ` ${note}`;
    return ` All links: ${this.data.stops[this.stop].name}. ${this.data.model}`;
  }

  curves() {
    const all = this.visible(), shown = all.filter(arm => this.on(arm, this.axis)), traces = [];
    if (shown.length && shown.every(arm => arm.mean.length < 2)) return null;
    for (const arm of shown) {
      const x = this.on(arm, this.axis), last = x.length - 1;
      if (arm.n > 1 && shown.length <= BANDS) {
        const low = arm.mean.map((_, i) => Math.min(...arm.score.map(own => own[i])));
        const high = arm.mean.map((_, i) => Math.max(...arm.score.map(own => own[i])));
        traces.push({ x: [...x, ...[...x].reverse()], y: [...high, ...[...low].reverse()], mode: "lines", fill: "toself",
          fillcolor: `${arm.colour}20`, line: { width: 0 }, hoverinfo: "skip" });
      }
      traces.push({ x, y: arm.mean, mode: "lines+markers", line: { color: arm.colour, dash: arm.dash, width: 2 },
        marker: { color: arm.colour, symbol: arm.symbol, size: 6, maxdisplayed: 7 },
        text: [...x].map((_, i) => this.told(arm, i, x, this.axis)), hoverinfo: "text", name: plain(arm.label), meta: "curve" });
      traces.push({ x: [x[last]], y: [arm.mean[last]], mode: "markers", hoverinfo: "skip",
        marker: { color: arm.colour, symbol: arm.symbol, size: 10, line: { color: "#ffffff", width: 1 } } });
    }
    const bands = all.some(arm => arm.n > 1) ? `Lines: mean over the seeds; bands: their range${shown.length > BANDS ? ` (for up to ${BANDS} arms)` : ""}. ` : "One seed: nothing is ranked. ";
    return { traces, height: narrow() ? 320 : 440, x: this.cost(this.axis, shown), y: { range: this.data.limits },
      note: `${bands}Early epochs may be cut off.${this.about(this.axis)}${this.apart(all, this.axis)}` };
  }

  ends() {
    const key = this.axis === "epoch" ? this.data.axes[1]?.key : this.axis;
    const all = this.ended(), shown = key ? all.filter(arm => this.on(arm, key)) : [];
    if (!key || (all.length && !shown.length) || this.data.arms.every(arm => arm.running)) return null;
    const [low, high] = this.span(shown), traces = [];
    for (const arm of shown) {
      const x = this.on(arm, key), last = x.length - 1, [mean, half] = arm.end;
      if (mean === null) continue;
      traces.push({ x: [x[last]], y: [Math.min(Math.max(mean, low), high)], mode: "markers", name: plain(arm.label), meta: "end", hoverinfo: "text",
        text: [this.told(arm, last, x, key)], error_y: { type: "data", array: [half ?? 0], visible: half !== null, color: arm.colour },
        marker: { color: arm.colour, symbol: arm.symbol, size: 11 } });
      for (const [edge, symbol, leaves] of [[low, "triangle-down", mean - (half ?? 0) < low], [high, "triangle-up", mean + (half ?? 0) > high]]) {
        if (leaves) traces.push({ x: [x[last]], y: [edge], mode: "markers", hoverinfo: "text", text: [`goes on to ${this.show(edge === low ? mean - (half ?? 0) : mean + (half ?? 0))}`],
          cliponaxis: false, marker: { color: arm.colour, symbol, size: 8 } });
      }
    }
    const bars = all.some(arm => arm.n > 1) ? "Bars: Student's 95 % t-interval; a triangle at the edge: it goes on. " : "";
    const alone = all.filter(arm => arm.n === 1).map(arm => arm.label);
    const ranked = !alone.length ? "" : alone.length === all.length ? "One seed: nothing is ranked." : `One seed, not ranked: ${alone.join("; ")}.`;
    const x = this.cost(key, shown.map(arm => ({ ...arm, x: this.last(arm.x), mean: arm.mean.slice(-1) })));
    return { traces, height: narrow() ? 300 : 340, x, y: { range: [low, high], title: { text: this.data.metric.label } },
      note: `${bars}${ranked}${this.apart(all, key)}`.trim() };
  }

  last(x) {
    return Object.fromEntries(Object.entries(x).map(([key, own]) => [key, Array.isArray(own) ? own.map(row => row.slice(-1)) : own.slice(-1)]));
  }

  // the metric's axis for the ends: their intervals, but none that dwarfs all others; never so narrow that noise looks large
  span(shown) {
    const [bottom, top] = this.data.limits, { least, most } = this.data.metric;
    const inside = shown.map(arm => arm.end).filter(([mean]) => mean !== null && mean >= bottom && mean <= top);
    if (!inside.length) return [bottom, top];
    const means = inside.map(([mean]) => mean), low = Math.min(...means), high = Math.max(...means), room = Math.max(least, high - low);
    const edges = [Math.max(low - room, Math.min(...inside.map(([mean, half]) => mean - (half ?? 0)))),
      Math.min(high + room, Math.max(...inside.map(([mean, half]) => mean + (half ?? 0))))];
    const missing = Math.max(least - (edges[1] - edges[0]), 0) / 2 + 0.06 * (edges[1] - edges[0]);
    return [edges[0] - missing, Math.min(edges[1] + missing, most ?? Infinity)];
  }

  target() {
    const shown = this.ended(), rows = shown.map(arm => ({ label: arm.label, colour: arm.colour, ...this.data.target.rows[arm.number] }));
    const longest = Math.max(...rows.map(row => (row.mean ?? 0) + (row.half ?? 0)), 1e-9);
    const value = row => [row.mean === null ? "" : `${digits(row.mean)}${row.half === null ? "" : ` ± ${digits(row.half)}`} s`, row.beside].filter(Boolean).join(", ");
    const places = rows.map((_, i) => i), hovertext = rows.map(row => `<b>${lines(row.label, 48)}</b><br>${value(row)}`);
    const bars = { type: "bar", orientation: "h", y: places, x: rows.map(row => row.mean ?? 0), meta: "target", hoverinfo: "text", hovertext,
      marker: { color: rows.map(row => row.colour) }, error_x: { type: "data", array: rows.map(row => row.half ?? 0), thickness: 1, color: INK } };
    const values = { type: "scatter", mode: "text", y: places, x: rows.map(row => (row.mean ?? 0) + (row.half ?? 0)), text: rows.map(row => ` ${value(row)}`),
      textposition: "middle right", cliponaxis: false, hoverinfo: "skip" };
    return { ...this.rows(rows), note: this.data.target.note, traces: [bars, values],
      x: { title: { text: this.data.target.name }, range: [0, 1.6 * longest] } };
  }

  steps() {
    const shown = this.ended(), steps = this.data.steps;
    const traces = steps.parts.map(part => ({ type: "bar", orientation: "h", name: part.name, meta: "steps", marker: { color: part.colour, line: { color: "#ffffff", width: 1 } },
      y: shown.map((_, i) => i), x: shown.map(arm => part.values[arm.number]), hoverinfo: "text", textposition: "none",
      text: shown.map(arm => [`<b>${lines(arm.label, 48)}</b>`, `${part.name}: ${digits(part.values[arm.number])} ms`, steps.beside[arm.number]].filter(Boolean).join("<br>")) }));
    const rows = this.rows(shown);
    return { ...rows, traces, barmode: "stack", key: steps.parts, note: steps.note, x: { title: { text: "time of a step [ms]" } } };
  }

  // the names of arms as the rows of a figure
  rows(shown) {
    const names = shown.map(arm => lines(arm.label, narrow() ? 18 : 30));
    return { height: 80 + names.reduce((sum, name) => sum + 14 + 15 * name.split("<br>").length, 0),
      y: { tickvals: names.map((_, i) => i), ticktext: names, range: [names.length - 0.4, -0.6], ticks: "", showgrid: false } };
  }

  levels(map) {
    if (this.hidden.has(map.arm)) return null;
    const count = map.names.length, epochs = floats(map.epochs), places = map.places.map(floats);
    const colorscale = map.colours.flatMap((colour, i) => [[i / count, colour], [(i + 1) / count, colour]]);
    return { height: 110 + 14 * Math.min(map.layers.length, 30), x: { title: { text: "training [epochs]" }, showgrid: false },
      y: { type: "category", autorange: "reversed", ticks: "", showgrid: false },
      traces: [{ type: "heatmap", x: epochs, y: map.layers.map(plain), z: places, colorscale, zmin: -0.5, zmax: count - 0.5, meta: "levels", hoverinfo: "text",
        text: places.map((row, layer) => [...row].map((place, i) => `${plain(map.layers[layer])}<br>epoch ${epochs[i]}: ${plain(map.names[place] ?? "no level")}`)),
        colorbar: { tickvals: map.names.map((_, i) => i), ticktext: map.names.map(plain), thickness: 12, outlinewidth: 0 } }] };
  }
}

const settings = JSON.parse(document.getElementById("data").textContent).map((data, number) =>
  new Setting(document.getElementById(`setting-${number + 1}`), data));

function drawAll(width) {
  for (const setting of settings) {
    setting.drawn = true;
    setting.draw(width);
  }
}

// a setting is drawn when it comes near: a page of many opens at once
const watch = new IntersectionObserver(entries => {
  for (const { isIntersecting, target } of entries.filter(entry => entry.isIntersecting)) {
    const setting = settings.find(other => other.section === target);
    watch.unobserve(target);
    if (!setting.drawn) {
      setting.drawn = true;
      setting.draw();
    }
  }
}, { rootMargin: "600px" });
settings.forEach(setting => watch.observe(setting.section));
window.addEventListener("beforeprint", () => drawAll(PAPER));
window.addEventListener("afterprint", () => drawAll());
