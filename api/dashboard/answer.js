// One question and its answer, with the passages that it was answered from. A number opens its passage, in which the words
// of the answer are marked. Vue's interpolation shows all text as text.
let made = 0; // for ids

export default {
  template: `
    <div class="answer-view" :aria-busy="busy">
      <h2 class="asked">{{ question }}</h2>
      <p class="answer">{{ text }}<i v-if="busy && text" class="caret" aria-hidden="true"></i><template v-if="!busy"><button
        v-for="{ number } in held" :key="number" type="button" class="cite" :aria-label="'Passage ' + number" :aria-expanded="open === number"
        @click="toggle(number)">{{ number }}</button></template></p>
      <p v-if="fault" class="fault" role="alert">{{ fault }}</p>
      <p v-if="note" class="note">{{ note }}</p>
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
        <blockquote ref="text" tabindex="0" aria-label="Text of the passage"><component v-for="(part, n) in shown.parts"
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
    sources: { type: Array, default: () => [] }, // the cited passages; `holds` tells those that hold the answer's words
  },
  emits: ["document"],
  data: () => ({ open: 0, all: false, name: "passage-" + ++made }),
  computed: {
    held() {
      return this.sources.filter((source) => source.holds);
    },
    listed() {
      // Those that hold the answer; the others are one click away.
      return this.all || !this.held.length ? this.sources : this.held;
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
  },
};
