
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const figures = data.figures.map((one) => ({...one, labels: data.lists[one.labels], xs: data.lists[one.xs]}));
  const tip = document.getElementById("tip");
  const element = (tag, words) => {
    const made = document.createElement(tag);
    if (words !== undefined) made.textContent = words;
    return made;
  };
  const spell = (value) => (value === null || value === undefined ? "" : value.toLocaleString("en", {maximumSignificantDigits: 6}));

  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }

  function show(figure, svg, index) {
    const box = svg.getBoundingClientRect();
    const x = figure.xs[index];
    const cross = svg.querySelector(".cross");
    cross.setAttribute("x1", x);
    cross.setAttribute("x2", x);
    cross.style.visibility = "visible";
    const rows = figure.series.filter((one) => one.values[index] || (one.values[index] === 0 && figure.series.length < 8));
    tip.replaceChildren(element("b", figure.labels[index]), ...rows.map((one) => {
      const row = element("div");
      row.append(element("span", one.name), element("b", spell(one.values[index])));
      return row;
    }));
    tip.hidden = false;
    const left = box.left + x * box.width / svg.viewBox.baseVal.width;
    const wide = tip.offsetWidth;
    tip.style.left = Math.max(8, left + 14 + wide > innerWidth ? left - wide - 14 : left + 14) + "px";
    tip.style.top = Math.max(8, Math.min(box.top + 8, innerHeight - tip.offsetHeight - 8)) + "px";
  }

  function hide(svg) {
    tip.hidden = true;
    svg.querySelector(".cross").style.visibility = "hidden";
  }

  function hover(figure, svg) {
    let index = -1;
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      index = nearest(figure.xs, (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width);
      show(figure, svg, index);
    });
    svg.addEventListener("pointerleave", () => hide(svg));
    svg.addEventListener("blur", () => hide(svg));
    svg.addEventListener("keydown", (event) => {
      const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (step === undefined) return;
      event.preventDefault();
      index = Math.max(0, Math.min(figure.xs.length - 1, index + step));
      show(figure, svg, index);
    });
  }

  const rowsOf = (figure) => [
    [figure.head, ...figure.series.map((one) => one.name)],
    ...figure.labels.map((label, index) => [label, ...figure.series.map((one) => one.values[index])]),
  ];

  function numbers(figure, details) {
    const table = element("table");
    rowsOf(figure).forEach((cells, number) => {
      const row = element("tr");
      cells.forEach((cell) => row.append(element(number ? "td" : "th", typeof cell === "string" ? cell : spell(cell))));
      table.append(row);
    });
    const scroll = element("div");
    scroll.className = "scroll";
    scroll.append(table);
    const save = element("button", "Save as CSV");
    save.addEventListener("click", () => {
      const quoted = (cell) => (typeof cell === "string" ? '"' + cell.replaceAll('"', '""') + '"' : cell ?? "");
      const lines = rowsOf(figure).map((cells) => cells.map(quoted).join(","));
      const link = element("a");
      link.href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], {type: "text/csv"}));
      link.download = figure.id + ".csv";
      link.click();
      URL.revokeObjectURL(link.href);
    });
    details.append(save, scroll);
  }

  for (const figure of figures) {
    const card = document.getElementById("f-" + figure.id);
    const svg = card.querySelector(":scope > svg");
    const details = card.querySelector(".numbers");
    details.addEventListener("toggle", () => {
      if (details.open && !details.querySelector("table")) numbers(figure, details);
    });
    if (figure.xs.length) hover(figure, svg);
  }
  document.documentElement.dataset.figures = figures.length;
})();
