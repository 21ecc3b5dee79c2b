// The figures of each setting, drawn when scrolled near, and their controls.
"use strict";

const PAPER = 680;  // pixels, the width of A4 without its margins
// without a mouse the toolbar would always be visible
const CONFIG = { displaylogo: false, responsive: true, displayModeBar: matchMedia("(hover: hover)").matches && "hover", modeBarButtonsToRemove: ["lasso2d", "select2d"],
  toImageButtonOptions: { format: "svg", filename: "accordion_bench" } };

class Setting {
  constructor(section, data) {
    Object.assign(this, { section, data, figures: new Figures(data), drawn: false });
    this.shown = this.figures.all().map(figure => this.add(figure));
    this.legend();
    this.axes();
    this.slider();
  }

  add({ kind = "", title, draw }) {
    const figure = make("figure"), key = make("p"), plot = make("div"), note = make("p");
    figure.className = kind;
    key.className = "key";
    note.className = "note";
    figure.append(make("figcaption", title), key, plot, note);
    this.section.querySelector(".figures").append(figure);
    return { figure, key, plot, note, draw };
  }

  // ---- controls

  legend() {
    const { hidden } = this.figures, buttons = [...this.section.querySelectorAll(".legend [data-arm]")];
    const hide = arms => {
      hidden.clear();
      arms.forEach(arm => hidden.add(arm));
      buttons.forEach((button, arm) => button.setAttribute("aria-pressed", !hidden.has(arm)));
      this.section.querySelectorAll("tr[data-arm]").forEach(row =>
        row.classList.toggle("off", hidden.has(+row.dataset.arm)));
      this.draw();
    };
    buttons.forEach((button, arm) => button.addEventListener("click", () =>
      hide(hidden.has(arm) ? [...hidden].filter(other => other !== arm) : [...hidden, arm])));
    this.section.querySelector(".legend .all")?.addEventListener("click", () => hide([]));
    this.section.querySelector(".legend .none")?.addEventListener("click", () => hide([...buttons.keys()]));
  }

  axes() {
    for (const { key, short } of this.data.axes) {
      const label = make("label"), radio = make("input");
      Object.assign(radio, { type: "radio", name: this.section.id, value: key, checked: key === this.figures.axis });
      radio.addEventListener("change", () => {
        this.figures.axis = key;
        this.section.querySelector(".slider").hidden = key !== "modelled_seconds";
        this.draw();
      });
      label.append(radio, ` ${short}`);
      this.section.querySelector(".switch").append(label);
    }
  }

  slider() {
    const range = this.section.querySelector(".slider input"), output = this.section.querySelector(".slider output");
    const tell = () => {
      output.textContent = this.data.stops[this.figures.stop].name;
      range.setAttribute("aria-valuetext", output.textContent);
    };
    Object.assign(range, { max: this.data.stops.length - 1, value: this.figures.stop });
    tell();
    range.addEventListener("input", () => {
      this.figures.stop = +range.value;
      tell();
      this.draw();
    });
  }

  // ---- drawing

  draw(width) {
    if (!this.drawn) return;
    for (const { figure, key, plot, note, draw } of this.shown) {
      const found = draw();
      figure.hidden = !found;
      if (!found) continue;
      key.replaceChildren(...(found.key ?? []).map(entry));
      note.textContent = (found.note ?? []).filter(Boolean).join(" ");
      Plotly.react(plot, found.traces, layout(found, width), CONFIG);
    }
  }
}

// a name with its colour
function entry({ name, colour }) {
  const found = make("span", name), square = make("i");
  square.style.background = colour;
  found.prepend(square);
  return found;
}

function layout({ x, y, height, barmode }, width) {
  const axis = { gridcolor: GRID, linecolor: INK, zeroline: false, automargin: true, ticks: "outside", ticklen: 3 };
  return { height, width, autosize: width === undefined, showlegend: false, barmode, hovermode: "closest",
    dragmode: narrow() ? false : "zoom", margin: { l: 50, r: 16, t: 30, b: 44 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: "#767676", activecolor: INK },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "#ffffff",
    font: { family: "system-ui, sans-serif", size: 12, color: INK },
    hoverlabel: { align: "left", bgcolor: "#ffffff", font: { color: INK, size: 12 } },
    xaxis: { ...axis, ...x }, yaxis: { ...axis, ...y } };
}

const settings = JSON.parse(document.getElementById("data").textContent).flatMap((data, number) =>
  data ? [new Setting(document.getElementById(`setting-${number + 1}`), data)] : []);

function drawAll(width) {
  for (const setting of settings) {
    setting.drawn = true;
    setting.draw(width);
  }
}

// draw lazily, so that a page of many settings opens quickly
const watch = new IntersectionObserver(entries => {
  for (const { target } of entries.filter(({ isIntersecting }) => isIntersecting)) {
    const setting = settings.find(({ section }) => section === target);
    watch.unobserve(target);
    setting.drawn = true;
    setting.draw();
  }
}, { rootMargin: "600px" });
settings.forEach(({ section }) => watch.observe(section));
window.addEventListener("beforeprint", () => drawAll(PAPER));
window.addEventListener("afterprint", () => drawAll());
