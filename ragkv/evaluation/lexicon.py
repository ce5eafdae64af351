"""Word tables that the question rules read: function words, verbs with their forms, names, synonyms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DETERMINERS = frozenset("the a an his her its their this that these those some any each every all both no".split())
PRONOUNS = frozenset("i you we he she it they me us him them who this that these those there one none myself".split())
PREPOSITIONS = frozenset(
    "in on at by of for from with to into under over near after before during since until between through against "
    "among within without about across along around behind beyond like towards toward upon via throughout despite "
    "as than per above below onto off out up down".split()
)
SUBORDINATORS = frozenset(
    "if when while although though because since that which who whom whose where whether unless until once as so "
    "how why what whatever whenever wherever whoever and or but nor however therefore thus hence for then also instead"
    " otherwise".split()
)
BE = frozenset("is was are were".split())
MODALS = frozenset("can could may might must shall should will would".split())
HAVE = frozenset("has have had".split())
AUXILIARIES = BE | MODALS | HAVE | {"did", "does", "do"}
VAGUE = frozenset(
    "following latter former above below first second third next last other others same one ones thing things case "
    "example examples result results fact way ways reason reasons point problem question answer idea most many few "
    "several some such author authors writer section chapter page book list paragraph here this that these those it "
    "he she they we you i there what which who rest remainder another only more less note user you're".split()
)
ADVERBS = frozenset(
    "also often sometimes usually always never still now then thus soon later early just even "
    "yet neither either already again once "
    "together perhaps maybe instead moreover furthermore nevertheless meanwhile today finally eventually".split()
)
LEADS = frozenset(
    "And But However Thus Therefore Then So Hence Moreover Furthermore Also Finally Eventually Later Afterwards Today "
    "Meanwhile Instead For After Before Since With Under Unlike Like From Although Originally Initially Historically "
    "Recently Traditionally Indeed Similarly Nevertheless Consequently Subsequently Additionally Currently Now".split()
)
"""First words of what stands before the subject."""
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
NUMBERS = (
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred dozen"
).split()
UNITS: Mapping[str, str] = {
    **dict.fromkeys(
        "years year months month weeks week days day hours hour minutes minute seconds".split(), "How long"
    ),
    **dict.fromkeys("centuries decades generations".split(), "How long"),
}
"""What to ask for a number of these."""

_REGULAR = (
    "create publish release launch develop introduce design establish invent discover produce complete open close "
    "organise organize appoint replace destroy defeat attack conquer capture invade rule adopt accept announce receive "
    "award compose record perform direct paint erect construct found name call describe define use support "
    "provide include contain require allow enable represent offer serve cover connect combine convert return "
    "start end finish die live move join marry visit travel reach enter arrive remain appear form change "
    "increase reduce remove add install implement maintain manage own acquire purchase sign present propose "
    "suggest recommend argue claim observe explain mention report publish translate edit print issue pass reject "
    "abolish declare demand elect crown arrest execute imprison sentence accuse condemn assassinate murder rescue "
    "name anoint anointed settle colonise occupy inhabit cultivate gather collect store preserve measure orbit "
    "influence inspire dominate unite divide separate surround border extend stretch control operate "
    "employ pay earn cost charge raise lower carry deliver transport import export trade supply consume "
    "kill attack fight believe worship celebrate mark follow precede succeed cause generate process display "
    "determine specify handle share send accompany consist belong refer relate depend resemble denote signify "
    "originate derive evolve emerge decline expand migrate escape flee surrender retire resign graduate study "
    "practise practice train invite protect defend help assist encourage oppose criticise criticize praise "
    "portray depict illustrate coin popularise popularize port rename merge fund sponsor host achieve "
    "attempt appear base complete contribute discover edit enter feature finance guide import initiate invade "
    "learn license list load locate look obtain oversee place play point prefer prevent promote "
    "protect prove reveal review save search show solve sponsor store stop test treat turn unify vary view wait walk "
    "want "
    "warn wash watch work wound advocate affect aid apply ask assign attach attend attract"
).split()
_DOUBLED = frozenset("stop ship plan transfer refer ban commit admit submit permit control rebel".split())
_IRREGULAR = (
    "write wrote written|begin began started|build built built|take took taken|give gave given|make made made|"
    "find found found|become became become|win won won|lose lost lost|lead led led|leave left left|hold held held|"
    "keep kept kept|bring brought brought|buy bought bought|sell sold sold|send sent sent|speak spoke spoken|"
    "teach taught taught|think thought thought|fight fought fought|draw drew drawn|grow grew grown|know knew known|"
    "choose chose chosen|break broke broken|drive drove driven|see saw seen|sing sang sung|steal stole stolen|"
    "tell told told|meet met met|run ran run|say said said|come came come|go went gone|get got got|fall fell fallen|"
    "rise rose risen|set set set|put put put|read read read|bear bore born|strike struck struck|"
    "overthrow overthrew overthrown|forbid forbade forbidden|show showed shown|mean meant meant|spend spent spent|"
    "catch caught caught|eat ate eaten|drink drank drunk|flee fled fled|seek sought sought|forget forgot forgotten|"
    "wear wore worn|swear swore sworn|lie lay lain|stand stood stood|feed fed fed|bind bound bound|"
    "oversee oversaw overseen|undertake undertook undertaken|withdraw withdrew withdrawn|spread spread spread|"
    "ride rode ridden|slay slew slain|smite struck smitten|beget begot begotten"
)


@dataclass(frozen=True)
class Verb:
    """One verb in all of its forms."""

    base: str
    past: str
    participle: str
    third: str


def _past(base: str) -> str:
    if base in _DOUBLED:
        return f"{base}{base[-1]}ed"
    if base.endswith("e"):
        return f"{base}d"
    return f"{base[:-1]}ied" if base.endswith("y") and base[-2] not in "aeo" else f"{base}ed"


def third(base: str) -> str:
    """The form after he, she or it."""
    if base.endswith(("s", "sh", "ch", "x", "o")):
        return f"{base}es"
    return f"{base[:-1]}ies" if base.endswith("y") and base[-2] not in "aeo" else f"{base}s"


def regular(base: str) -> Verb:
    """The forms of a regular verb."""
    return Verb(base, _past(base), _past(base), third(base))


VERBS: Mapping[str, Verb] = {
    **{base: Verb(base, _past(base), _past(base), third(base)) for base in _REGULAR if not base.endswith("ed")},
    **{base: Verb(base, past, done, third(base)) for base, past, done in map(str.split, _IRREGULAR.split("|"))},
}
PAST: Mapping[str, Verb] = {verb.past: verb for verb in reversed(list(VERBS.values()))}
PARTICIPLES: Mapping[str, Verb] = {verb.participle: verb for verb in reversed(list(VERBS.values()))}
THIRD: Mapping[str, Verb] = {verb.third: verb for verb in VERBS.values()}

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "found": ("establish", "start", "create"), "establish": ("found", "create", "set up"), "write": ("author",),
    "create": ("develop", "make"), "develop": ("create", "build"), "launch": ("start", "introduce"),
    "release": ("publish", "launch"), "publish": ("release", "issue"), "invent": ("create", "come up with"),
    "build": ("construct", "erect"), "construct": ("build",), "begin": ("start",), "start": ("begin",),
    "finish": ("complete",), "complete": ("finish",), "buy": ("purchase", "acquire"), "acquire": ("buy", "take over"),
    "defeat": ("beat",), "capture": ("take", "seize"), "conquer": ("take over",), "introduce": ("present", "bring in"),
    "discover": ("find",), "receive": ("get",), "design": ("create",), "replace": ("take the place of",),
    "contain": ("include", "hold"), "use": ("employ",), "provide": ("offer", "give"), "require": ("need",),
    "appoint": ("name",), "destroy": ("wipe out",), "erect": ("build",), "choose": ("pick", "select"),
    "say": ("state",), "argue": ("claim",), "obtain": ("get",), "kill": ("slay",), "show": ("display",),
    "produce": ("make",), "allow": ("let",), "translate": ("render",), "remove": ("take away",),
}  # fmt: skip
"""Other base forms for a verb with the same object."""
_MORE = "take beat seize construct erect select state claim slay let get need hold author render".split()
INFLECTED: Mapping[str, Verb] = {
    **{base: Verb(base, _past(base), _past(base), third(base)) for base in _MORE if base not in VERBS},
    "beat": Verb("beat", "beat", "beaten", "beats"),
    "let": Verb("let", "let", "let", "lets"),
    "get": Verb("get", "got", "got", "gets"),
    "slay": Verb("slay", "slew", "slain", "slays"),
    **VERBS,
    "hold": Verb("hold", "held", "held", "holds"),
}
OTHERS: Mapping[str, tuple[str, ...]] = {
    "found": ("dissolve", "sell", "leave"), "release": ("withdraw", "cancel"), "publish": ("ban", "burn"),
    "write": ("translate", "illustrate", "review"), "create": ("destroy", "abandon"), "build": ("demolish", "buy"),
    "develop": ("abandon", "sell"), "begin": ("end",), "start": ("end", "abandon"), "win": ("lose",), "buy": ("sell",),
    "acquire": ("sell",), "open": ("close", "demolish"), "join": ("leave",), "bear": ("bury", "marry"),
    "invent": ("patent", "ban"), "discover": ("lose", "hide"), "defeat": ("help", "marry"), "adopt": ("reject",),
    "accept": ("reject",), "introduce": ("abolish", "remove"), "appoint": ("dismiss",), "kill": ("rescue", "marry"),
    "establish": ("abolish", "dissolve"), "conquer": ("leave", "sell"), "design": ("demolish", "sell"),
    "use": ("ban", "reject"), "support": ("prevent", "remove"), "contain": ("lack",), "allow": ("prevent",),
    "increase": ("reduce",), "die": ("marry",), "move": ("return",), "send": ("hide",), "choose": ("dismiss",),
}  # fmt: skip
"""Base forms that say something else of the same things."""

FIRST_NAMES = frozenset(
    "adam alan albert alex alexander alfred alice andrew angela ann anna anne anthony antonio arthur barbara ben "
    "benjamin bernard bertrand bill bob brian bruce carl carlos carol caroline catherine charles charlotte chris "
    "christian christopher claude clara daniel david dennis diana donald dorothy douglas edgar edmund edward edwin "
    "elizabeth ellen emile emily emma eric ernest errico eugene felix ferdinand francis frank frederick friedrich "
    "fyodor galileo gary george gerald gilbert giovanni gottfried grace graham greg gustav guy hans harold harry "
    "heinrich helen henri henry herbert herman howard hugh ian igor ira isaac ivan jack jacob jacques jake james jamie "
    "jan jane jason jean jeff jeremy jessica jim joan joe johann john jon jonathan jose joseph juan judith judy julia "
    "julius karl kate katherine keith ken kevin kim larry laura lawrence leo leon leonard leonardo lewis linda linus "
    "lisa louis louise lucy ludwig luigi luis margaret maria marie mark martin mary matthew maurice max max michael "
    "michel mikhail murray nancy nathan nestor nicholas nicolas niels noam oliver oscar otto pablo pat patrick paul "
    "peter philip pierre rachel ralph ray rebecca richard rob robert rod roger ron ronald rosa rose roy rudolf russell "
    "ruth sam samuel sarah scott sebastian simon sophia stephen steve steven stuart susan theodore thomas tim tom tony "
    "victor vincent vladimir voltairine walter warren werner wilhelm william wolfgang rasmus bram dan dave don ed fred "
    "gerry ted guido yukihiro bjarne brendan marc steve ada alonzo edsger kristen niklaus ole emmanuel mohammed ahmed "
    "ali "
    "moses aaron abraham isaac jacob joshua solomon saul jonathan samson gideon elijah elisha isaiah jeremiah ezekiel "
    "daniel ezra nehemiah job esther ruth naomi boaz jesse joab absalom ahab jezebel herod pilate peter paul barnabas "
    "silas timothy jesus judas mary martha lazarus nicodemus stephen noah cain abel esau leah rachel benjamin reuben "
    "levi pharaoh balaam caleb eli hannah amnon tamar rehoboam jeroboam hezekiah josiah nebuchadnezzar darius cyrus "
    "proudhon bakunin kropotkin malatesta rothbard marx engels lenin trotsky stalin hitler mussolini franco durruti "
    "goldman berkman rocker stirner tucker chomsky bookchin orwell keynes hayek spurgeon luther calvin augustine homer "
    "ptolemy hipparchus aristotle plato socrates euclid archimedes copernicus kepler newton galileo einstein darwin "
    "napoleon caesar columbus shakespeare dickens milton dante mozart bach beethoven stallman torvalds knuth".split()
)
TITLES = frozenset(
    "mr mrs ms dr sir lord lady king queen prince princess president professor prof saint st emperor empress pope "
    "captain general colonel major bishop archbishop count duke judge senator governor prophet apostle rabbi".split()
)
PEOPLE = frozenset(
    "man woman men women people king queen person persons hacker hackers programmer programmers users scientists "
    "scientist engineers engineer priests priest workers soldiers soldier anarchists marxists capitalists students "
    "astronomers astronomer disciples jews greeks romans egyptians philistines israelites aztecs maya europeans "
    "americans french british germans spanish spaniards developers developer maintainer maintainers volunteers "
    "prophet prophets servants servant brothers sons daughters wife husband mother father children peasants "
    "shepherds wise government emperor president governor bolsheviks author psalmist apostle apostles".split()
)
ORGANISATIONS: Mapping[str, str] = {
    **dict.fromkeys("inc inc. corp corp. "
                    "corporation company ltd ltd. labs systems microsystems gmbh".split(), "company"),
    **dict.fromkeys("university college".split(), "university"),
    **dict.fromkeys("foundation institute association society committee union federation league project consortium "
                    "organization organisation party agency council commission ministry".split(), "organisation"),
    **dict.fromkeys("ibm microsoft apple google intel sun dec xerox motorola at&t hp netscape novell adobe sony nokia "
                    "atari commodore oracle borland cray toshiba siemens".split(), "company"),
}  # fmt: skip
"""What to call an organisation, by a word of its name."""
PLACES = frozenset(
    "london paris berlin rome athens moscow vienna madrid barcelona tokyo beijing chicago boston england france "
    "germany italy spain russia china japan india egypt greece israel judah jerusalem babylon assyria persia canada "
    "america australia europe africa asia mexico brazil argentina ireland scotland wales britain poland sweden norway "
    "denmark finland holland netherlands belgium austria hungary switzerland portugal turkey iran iraq syria lebanon "
    "california texas massachusetts washington cambridge oxford edinburgh stanford berkeley seattle galilee bethlehem "
    "nazareth samaria judea antioch ephesus corinth damascus sinai canaan moab edom gilead kronstadt ukraine "
    "catalonia aragon hawaii alaska peru chile cuba amsterdam brussels prague budapest geneva zurich dublin "
    "manchester "
    "york pennsylvania virginia ohio florida michigan illinois constantinople "
    "alexandria arabia macedonia bolivia".split()
)
COMMON_CAPITALS = frozenset("Bible God Lord Internet Web Earth Moon Sun Christ".split())
DEFINED = frozenset(
    "one type kind sort form part lot number set member name way variety bit few example case result matter method "
    "means thing good bad common simple little spelling abbreviation acronym synonym term word tool".split()
)
"""Heads that say too little for a definition."""
