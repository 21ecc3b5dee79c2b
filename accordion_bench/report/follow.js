// Polls the server and reloads the served page when its runs have changed; keeps the scroll position and the controls.
// Prepended to this script are the page's `version` and `pause`, the milliseconds between two polls.
const line = document.body.insertBefore(document.createElement("p"), document.querySelector("main"));
line.id = "live";
line.textContent = `Live: follows the runs; as of ${new Date().toLocaleTimeString()}.`;

const controls = () => [...document.querySelectorAll("main details, main input, main button[aria-pressed]")];
const name = (control) => [
  control.closest("section")?.id,
  control.tagName,
  control.className,
  (control.querySelector("summary") ?? control.closest("label")?.firstChild ?? control).textContent,
  control.type === "radio" ? control.value : "",
].join("|");
const state = (control) => ({
  DETAILS: () => control.open,
  INPUT: () => (["radio", "checkbox"].includes(control.type) ? control.checked : control.value),
  BUTTON: () => control.getAttribute("aria-pressed"),
})[control.tagName]();

function restore(kept) {
  for (const control of controls()) {
    const was = kept.states[name(control)];
    if (was === undefined || was === state(control) || (control.type === "radio" && !was)) continue;
    if (control.tagName === "DETAILS") control.open = was;
    else if (control.tagName === "BUTTON") control.click();
    else {
      if (typeof was === "boolean") control.checked = was;
      else control.value = was;
      for (const event of ["input", "change"]) control.dispatchEvent(new Event(event, { bubbles: true }));
    }
  }
  scrollTo(0, kept.place);
}

function keep() {
  const states = Object.fromEntries(controls().map((control) => [name(control), state(control)]));
  sessionStorage.setItem("kept", JSON.stringify({ states, place: scrollY }));
}

async function look() {
  if (!document.hidden) {
    try {
      const answer = await fetch("/version");
      if (answer.ok && (await answer.text()) !== version) {
        keep();
        location.reload();
        return;
      }
    } catch {
      line.textContent = line.textContent.replace("Live: follows the runs;", "No longer live: the server has ended;");
      return;
    }
  }
  setTimeout(look, pause);
}

addEventListener("load", () => {
  const kept = sessionStorage.getItem("kept");
  sessionStorage.removeItem("kept");
  if (kept) restore(JSON.parse(kept));
  setTimeout(look, pause);
});
