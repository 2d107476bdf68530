// The search of every page, and the bug hunt. INDEX stands in search.js: [rank, name, what is said of it, page].
const plain = (text) => text.toLowerCase().replace(/[^a-z0-9+]/g, "");

function find(words) {
  const wanted = plain(words);
  if (!wanted) return [];
  const scored = [];
  for (const [rank, name, about, page] of INDEX) {
    const own = plain(name);
    const place = own === wanted ? 0 : own.startsWith(wanted) ? 4 : own.includes(wanted) ? 8 : plain(about).includes(wanted) ? 12 : -1;
    if (place >= 0) scored.push([place + rank, name, about, page]);
  }
  scored.sort((a, b) => a[0] - b[0]);
  return scored.slice(0, 14).map(([, name, about, page]) => ({ name, about, page }));
}

const input = document.querySelector("nav input");
const list = document.getElementById("found");
input.addEventListener("input", () => {
  list.replaceChildren(...find(input.value).map(({ name, about, page }) => {
    const item = document.createElement("li"), link = document.createElement("a"), small = document.createElement("small");
    link.href = page;
    link.textContent = name;
    small.textContent = about;
    link.append(small);
    item.append(link);
    return item;
  }));
});
input.form.addEventListener("submit", (event) => {
  event.preventDefault();
  const first = list.querySelector("a");
  if (first) location.href = first.href;
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") list.replaceChildren();
});

const hunt = document.querySelector(".hunt");
if (hunt) {
  const bytes = Uint8Array.from(atob(hunt.dataset.answer), (letter) => letter.charCodeAt(0));
  const answer = JSON.parse(new TextDecoder().decode(bytes));
  const verdict = document.getElementById("verdict");
  let tries = 0;

  const say = (lines) => {
    verdict.replaceChildren(...lines.map(([tag, text]) => Object.assign(document.createElement(tag), { textContent: text })));
  };
  const tell = (number) => {
    for (const line of answer.lines) document.getElementById("L" + line)?.classList.add("found");
    const found = answer.lines.includes(number) ? `Line ${number} it is, with try ${tries}.` : "This is the line.";
    say([["p", found], ["p", "The bug: " + answer.name], ["p", "Right would be:"], ["pre", answer.right], ["p", "Why people make it: " + answer.why],
      ...(answer.curve ? [["p", answer.curve]] : []), ...(answer.public ? [["p", "In public: " + answer.public]] : []), ["p", "The test that catches it: " + answer.test]]);
  };
  hunt.addEventListener("click", (event) => {
    const row = event.target.closest(".l");
    if (!row) return;
    event.preventDefault();
    const number = Number(row.id.slice(1));
    tries += 1;
    if (answer.lines.includes(number)) return tell(number);
    row.classList.add("tried");
    say([["p", `Line ${number} is as it should be. Tries: ${tries}.`]]);
  });
  document.getElementById("give-up").addEventListener("click", () => {
    tell(0);
    document.getElementById("L" + answer.lines[0]).scrollIntoView({ block: "center" });
  });
}
