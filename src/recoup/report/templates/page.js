"use strict";
(() => {
  const root = document.documentElement;
  const find = (selector) => document.querySelector(selector);
  const data = JSON.parse(find("#data").textContent).memory;
  const tip = find("#tip");

  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const size = (bytes) => {
    let power = 0;
    while (bytes >= 999.5 && power < 4) { bytes /= 1024; power += 1; }
    return (power ? bytes.toPrecision(3) : bytes) + " " + units[power];
  };
  const time = (s) => s >= 1 ? s.toPrecision(3) + " s" : s >= 1e-3 ? (s * 1e3).toPrecision(3) + " ms" : (s * 1e6).toPrecision(3) + " µs";

  // Texts are set as text, never as markup: names come from the user's model.
  const show = (title, lines, x, y) => {
    const head = document.createElement("b");
    head.textContent = title;
    tip.replaceChildren(head, ...lines.map(([name, value]) => {
      const line = document.createElement("span"), left = document.createElement("i"), right = document.createElement("i");
      left.textContent = name; right.textContent = value;
      left.style.fontStyle = right.style.fontStyle = "normal";
      line.append(left, right);
      return line;
    }));
    tip.hidden = false;
    const box = tip.getBoundingClientRect(), wide = root.clientWidth, high = root.clientHeight;
    const left = x + 16 + box.width > wide - 8 ? x - 16 - box.width : x + 16;
    const top = y + 16 + box.height > high - 8 ? y - 16 - box.height : y + 16;
    tip.style.left = Math.max(8, Math.min(left, wide - box.width - 8)) + "px";
    tip.style.top = Math.max(8, top) + "px";
  };
  const hide = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };

  // Memory over the step.
  const plot = find("#memory-plot"), cursor = find("#cursor");
  const phases = { f: "forward", r: "replay", b: "backward" };
  const at = (points, s) => {
    let low = 0, high = points.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] <= s) low = middle; else high = middle;
    }
    return low;
  };
  const level = (points, s) => points.length && s <= points[points.length - 1][0] ? size(points[at(points, s)][1]) : "ended";
  let place = 0;
  const read = (s, y) => {
    const box = plot.getBoundingClientRect();
    place = at(data.predicted, s);
    const [, bytes, unit, phase] = data.predicted[place];
    const title = unit < 0 ? "the planned step has ended" : data.names[unit] + (phases[phase] ? ", " + phases[phase] : "");
    const lines = [["at", time(s)], ["predicted", unit < 0 ? "ended" : size(bytes)], ["plain", level(data.plain, s)]];
    if (data.measured.length) lines.push(["measured", level(data.measured, s)]);
    const x = s / data.end;
    cursor.setAttribute("x1", x * 1000); cursor.setAttribute("x2", x * 1000); cursor.setAttribute("visibility", "visible");
    show(title, lines, box.left + x * box.width, y === undefined ? box.top + 8 : y);
  };
  const point = (event) => {
    const box = plot.getBoundingClientRect();
    read(Math.max(0, Math.min(1, (event.clientX - box.left) / box.width)) * data.end, event.clientY);
  };
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step) return;
    event.preventDefault();
    place = Math.max(0, Math.min(data.predicted.length - 2, place + step));
    read((data.predicted[place][0] + data.predicted[place + 1][0]) / 2);
  });

  // Marks on the frontier.
  for (const mark of document.querySelectorAll("button.mark[data-tip]")) {
    const open = () => {
      const box = mark.getBoundingClientRect(), [title, ...lines] = mark.dataset.tip.split("|");
      show(title, lines.map((line) => line.split("=")), box.right, box.bottom);
    };
    mark.addEventListener("pointerenter", open);
    mark.addEventListener("focus", open);
    mark.addEventListener("click", open);
    mark.addEventListener("pointerleave", hide);
    mark.addEventListener("blur", hide);
  }

  // Light and dark.
  const button = find("#theme"), dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  const label = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  const remember = (theme) => { try { localStorage.setItem("recoup-theme", theme); } catch { /* a page may not store */ } };
  try { const theme = localStorage.getItem("recoup-theme"); if (theme) root.dataset.theme = theme; } catch { /* likewise */ }
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; remember(root.dataset.theme); label(); });
  dark.addEventListener("change", label);
  label();

  // The table of units.
  const body = find("#units tbody"), rows = [...body.rows], count = find("#count");
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.v === undefined ? cell.textContent.trim() : Number(cell.dataset.v);
  };
  for (const header of document.querySelectorAll("#units th")) {
    header.querySelector("button").addEventListener("click", () => {
      const falls = header.getAttribute("aria-sort") === "ascending" ||
        (header.classList.contains("num") && header.getAttribute("aria-sort") !== "descending");
      for (const other of header.parentNode.cells) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", falls ? "descending" : "ascending");
      const column = header.cellIndex, sign = falls ? -1 : 1;
      const order = (a, b) => typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true });
      body.append(...[...rows].sort((a, b) => sign * order(value(a, column), value(b, column))));
    });
  }
  const filter = find("#filter");
  const apply = () => {
    const wanted = filter.value.trim().toLowerCase();
    let shown = 0;
    for (const row of rows) {
      const fits = row.textContent.toLowerCase().includes(wanted);
      row.classList.toggle("hide", !fits);
      shown += fits;
    }
    count.textContent = shown === rows.length ? rows.length + " rows" : shown + " of " + rows.length + " rows";
  };
  filter.addEventListener("input", apply);
  apply();
})();
