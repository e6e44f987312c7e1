"use strict";
/* dom.js: elements. */

const byId = id => document.getElementById(id);

/* make("a", {href: "x"}, "text", child...): text stays text, whatever is in it. */
function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes))
        if (name in element) element[name] = value;
        else element.setAttribute(name, value);
    element.append(...children);
    return element;
}
