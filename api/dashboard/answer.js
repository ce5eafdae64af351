// One question and its answer, with the passages that it was answered from, and what can be done with it. A number opens
// its passage, in which the words of the answer are marked. Vue's interpolation shows all text as text.
let made = 0; // for ids
const FEW = 3; // passages that are listed where none holds the answer

// The tree of a passage of Markdown (passage_form.py), whose elements are from a list there.
const Nodes = {
  name: "Nodes",
  props: { nodes: { type: Array, required: true } },
  template: `<template v-for="(node, n) in nodes" :key="n"><template v-if="typeof node === 'string'">{{ node }}</template><component
    v-else :is="node[0]" v-bind="node[1]"><Nodes v-if="node[2].length" :nodes="node[2]"></Nodes></component></template>`,
};

export default {
  components: { Nodes },
  template: `
    <div class="answer-view" :aria-busy="busy">
      <h2 class="asked">{{ question }}</h2>
      <p class="answer">{{ text }}<i v-if="busy && text" class="caret" aria-hidden="true"></i><template v-if="!busy"><button
        v-for="{ number } in held" :key="number" type="button" class="cite" :aria-label="'Passage ' + number" :aria-expanded="open === number"
        @click="toggle(number)">{{ number }}</button></template></p>
      <figure v-if="deciding" class="deciding"><figcaption>{{ deciding.said }}</figcaption><blockquote>{{ deciding.text }}</blockquote>
        <button type="button" class="link" @click="toggle(deciding.number)">{{ deciding.title }} · {{ deciding.place }}</button></figure>
      <p v-if="fault" class="fault" role="alert">{{ fault }}</p>
      <p v-if="note" class="note">{{ note }}</p>
      <div v-if="actions" class="deeds" role="toolbar" aria-label="Actions">
        <button type="button" @click="copy"><q-icon name="content_copy"></q-icon>{{ copied ? "Copied" : "Copy" }}</button>
        <button type="button" aria-label="Good answer" :aria-pressed="rating === 'up'" @click="rate('up')"><q-icon name="thumb_up"></q-icon></button>
        <button type="button" aria-label="Bad answer" :aria-pressed="rating === 'down'" @click="rate('down')"><q-icon name="thumb_down"></q-icon></button>
        <button v-if="again" type="button" @click="$emit('again')"><q-icon name="replay"></q-icon>Ask again with full</button>
      </div>
      <p v-if="searched" class="searched">{{ searched }}</p>
      <ol v-if="sources.length" class="sources" aria-label="Passages">
        <li v-for="source in listed" :key="source.number">
          <button type="button" :class="['source', { holds: source.holds, open: open === source.number }]"
            :aria-expanded="open === source.number" :aria-controls="name" @click="toggle(source.number)">
            <span class="number">{{ source.number }}</span><span class="what"><b>{{ source.title }}</b>
            <small>{{ source.place }}</small></span>
          </button>
        </li>
        <li v-if="listed.length < sources.length"><button type="button" class="source more" @click="all = true">All {{ sources.length }} passages</button></li>
      </ol>
      <section v-if="shown" ref="passage" :id="name" class="passage" :aria-label="'Passage ' + shown.number">
        <header><b><span class="number">{{ shown.number }}</span>{{ shown.title }}</b><small>{{ shown.place }}</small></header>
        <blockquote ref="text" tabindex="0" aria-label="Text of the passage" :class="shown.form"><Nodes v-if="shown.nodes"
          :nodes="shown.nodes"></Nodes><component v-else v-for="(part, n) in shown.parts"
          :key="n" :is="part[1] ? 'mark' : 'span'">{{ part[0] }}</component></blockquote>
        <footer>
          <button type="button" class="link" @click="$emit('document', shown.number)">Open the document</button>
          <button type="button" class="link" @click="open = 0">Close</button>
        </footer>
      </section>
    </div>`,
  props: {
    question: { type: String, required: true },
    text: { type: String, default: "" },
    note: { type: String, default: "" },
    fault: { type: String, default: "" },
    busy: { type: Boolean, default: false },
    sources: { type: Array, default: () => [] }, // the passages; `holds` tells those that hold the answer's words
    searched: { type: String, default: "" }, // what was searched, where no passage says it in these words
    deciding: { type: Object, default: null }, // the sentence that decides yes, no or unknown: said, text, title, place, number
    actions: { type: Boolean, default: false }, // whether the answer is kept, so that it can be rated
    again: { type: Boolean, default: false }, // whether it can be asked again with full
    rating: { type: String, default: "" }, // "up", "down" or ""
  },
  emits: ["document", "again", "rate"],
  data: () => ({ open: 0, all: false, copied: false, name: "passage-" + ++made }),
  computed: {
    held() {
      return this.sources.filter((source) => source.holds);
    },
    listed() {
      // Those that hold the answer; the others are one click away.
      if (this.all) return this.sources;
      return this.held.length ? this.held : this.sources.slice(0, this.searched ? FEW : undefined);
    },
    shown() {
      return this.sources.find((source) => source.number === this.open);
    },
  },
  methods: {
    toggle(number) {
      this.open = this.open === number ? 0 : number;
      this.$nextTick(() => {
        const { passage, text } = this.$refs, mark = text && text.querySelector("mark");
        if (mark) {
          const top = text.scrollTop + mark.getBoundingClientRect().top - text.getBoundingClientRect().top - text.clientHeight / 3;
          const line = parseFloat(getComputedStyle(text).lineHeight);
          text.scrollTop = line * Math.floor(top / line); // the first visible line is whole
        }
        if (passage) passage.scrollIntoView({ block: "nearest" });
      });
    },
    rate(rating) {
      this.$emit("rate", this.rating === rating ? "" : rating);
    },
    async copy() {
      const passages = (this.held.length ? this.held : []).map(({ number, title, place }) => `[${number}] ${title}, ${place}`);
      const text = [this.text, ...passages].join("\n");
      // Browsers give the clipboard to secure pages only; elsewhere a selection can be copied.
      if (navigator.clipboard) await navigator.clipboard.writeText(text);
      else {
        const field = document.body.appendChild(document.createElement("textarea"));
        field.value = text;
        field.select();
        document.execCommand("copy");
        field.remove();
      }
      this.copied = true;
      setTimeout(() => (this.copied = false), 2000);
    },
  },
};
