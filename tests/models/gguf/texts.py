"""Texts whose splitting differs between rules: scripts, numbers, blanks, signs, code."""

SPLIT = "He'LL pay  $12345.6 (x²) CamelCase_9\n\n\tnaïve 中文 한국어!! "
"""Nearly every rule splits it otherwise."""
PARTS = (
    SPLIT, "hello world", "Hello World's end", "I'm, you'RE, we'Ve he'LL 'tis o'clock DON'T",
    "snake_case camelCase HTTPServer", "x =  10", "x  =\t10;", "    return x\n", "\n\n\nif a:\n\tb()\r\n\r\n",
    "a\n b\n  c\n   d", "trailing   ", "   leading", "1", "12", "123", "1234", "1234567", "3.14159",
    "1,234,567.89", "0x1F4A9", "a1b22c333d4444", "v2.0.1-rc3", "  123 456", " 1234 a", "no 12345 yes", "€100",
    "$5", "50%", "x²+y³", "½ ¾", "①②③ Ⅳ", "١٢٣٤ ۱۲۳۴", "१२३४५", "１２３４", "!!!", "...", "?!?!", "(a)[b]{c}",
    "a+b-c*d/e", "<tag attr='v'>", "C:\\path\\to", "/usr/bin/env", "a && b || !c", "#include <x.h>",
    "// comment", "/* c */", "->", "=>", "::", "--flag=value", "user@example.com", "https://a.b/c?d=e#f",
    "naïve café", "Ångström", "élan vital", "e\u0301le\u0300ve", "straße GROẞ", "Привет мир", "ПРИВЕТ, Мир!",
    "Γειά σου", "ἀρχή", "你好，世界", "中文123混合abc", "今天天气很好。", "日本語のテキスト",
    "カタカナ ひらがな", "한국어 텍스트", "ㄱㄴㄷ", "ㄅㄆㄇ",
    "𠀀𠀁", "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "বাংলা লেখা", "ไทยภาษา", "தமிழ்", "ខ្មែរ", "မြန်မာ",
    "ລາວ", "ქართული", "😀 smile", "👨‍👩‍👧‍👦", "🇩🇪🇫🇷", "a😀b", "→ ← ↑", "≤ ≥ ≠", "∑∫√", "©®™", "“quoted” ‘text’",
    "—dash–dash", "…", "、。「」！？", "a\u00a0b", "a\u2003b", "a\u3000b", "\u200bzero", "a\u0085b", "\ufeffbom",
    "tab\there", "vt\x0bff\x0c", "\x01\x1f\x7f", "a\u2028b", "ǅ ǆ Ǆ", "ʰʱ ˠ", "ﬁ ﬂ", "İıſK", "'ſ 'K", "ªº",
    "𝒜𝓑𝔠", "Ⓐ ⓑ", "ΑΒΓαβγ", "ЀѐҊ", "Ⴀა", "Ꭰꭰ", "'", "''s", "'s's", "IMGIMGABZ <sentinel:12>", "a`b`",
    "~^|<>$+=", "#1 @2 &3", "_x_ __init__", '"q"', "a\\b", "[0]{1}", "1st 2nd", "10km", "  \n  \n", " \t \t",
    "\n ", " \n", "\r", "a\r\nb\rc", "\n1", " 1", "  1", "   12 345", "a  1", "a\n\n1", " ", "  ", "     ",
    "0 1 2  3   4    5\n10 11 12\n", "| a | b |\n|---|---|\n| 1 | 22 |", "def f(x):\n    return x  # no\n",
    '{"k": [1, 2.50]}', "SELECT * FROM t WHERE a='b';", "for(int i=0;i<10;i++){}", "λx.x", "f(x)=x^2",
    "A.B.C.", "e.g. i.e.", "Mr. O'Neil's", "co-op", "1 234 567", "12:34:56", "2024-01-02", "+49 30 1234567",
    "1e-10", "0b1010", "1_000_000", "3,5", "9,99 €", "№ 5", "§ 12a",
)  # fmt: skip
"""Each one is a text."""
TEXTS = (
    *PARTS,
    *(f"{one} {other}" for one, other in zip(PARTS[::7], PARTS[3::7], strict=False)),
    "\n".join(PARTS[:40]),
)
