// The time range of the overview: a recent one, or from one moment to another in the time zone of the browser.
export default {
  template: `
    <div class="range" role="group" aria-label="Time range">
      <button v-for="[value, label] in choices" :key="value" type="button" :aria-pressed="chosen === value" @click="choose(value)">{{ label }}</button>
      <button type="button" :aria-pressed="chosen === 'custom'" @click="choose('custom')">custom</button>
      <span v-if="chosen === 'custom'" class="moments">
        <label>from <input type="datetime-local" v-model="from" :max="to" @change="send"></label>
        <label>to <input type="datetime-local" v-model="to" :min="from" @change="send"></label>
      </span>
    </div>`,
  props: { choices: { type: Array, required: true } }, // [seconds, label]
  emits: ["chosen"],
  data() {
    return { chosen: this.choices[0][0], from: this.local(Date.now() - 3600e3), to: this.local(Date.now()) };
  },
  methods: {
    local(milliseconds) {
      return new Date(milliseconds - 60e3 * new Date(milliseconds).getTimezoneOffset()).toISOString().slice(0, 16);
    },
    choose(value) {
      this.chosen = value;
      this.send();
    },
    send() {
      if (this.chosen !== "custom") return this.$emit("chosen", [this.chosen]);
      const [from, to] = [this.from, this.to].map((text) => new Date(text).getTime() / 1000);
      if (from < to) this.$emit("chosen", [from, to]);
    },
  },
};
