// The table: sorted by any column, filtered by a part of an arm's name.
"use strict";

function sortable(section) {
  const table = section.querySelector(".sortable"), body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...sorted([...body.rows], column, down ? -1 : 1));
  }));
  section.querySelector(".filter").addEventListener("input", event => {
    const wanted = event.target.value.toLowerCase();
    for (const row of body.rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
  });
  section.querySelector(".more-columns")?.addEventListener("change", event =>
    table.classList.toggle("all-columns", event.target.checked));
}

// rows sorted by a column, numerically if all values are numbers; unknown values last
function sorted(rows, column, sign) {
  const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const number = text => +text.replace("inf", "Infinity");
  const numbers = rows.every(row => !Number.isNaN(number(value(row))));
  const compare = (a, b) => numbers ? number(a) - number(b) : a.localeCompare(b);
  return rows.sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    return a === "" || b === "" ? (a === "") - (b === "") : sign * compare(a, b);
  });
}

document.querySelectorAll(".setting:has(.sortable)").forEach(sortable);
