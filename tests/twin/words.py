"""The material of the generator, and random strings. All of it was written for this program."""

# Lists of words and sentences read better in one piece.
# ruff: noqa: E501, SIM905
from __future__ import annotations

import random

NAMES = """Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Mia Noah Olga Paul Quinn Rosa Sam Tina Uma Victor
Wendy Xavier Yara Zoe Alice Bob Carol Dan Eve Frank Gina Hugo Ida Jonas Karin Lars Maria Nils Otto Petra Ralf Sara Tom""".split()
ZH_NAMES = "小明 小红 小李 小王 小张 小刚 小芳 小美 小龙 小雪 王伟 李娜 张丽 刘洋 陈静 杨帆 赵磊 黄敏 周杰 吴昊".split()
CITIES = """Paris London Berlin Madrid Rome Vienna Oslo Lisbon Dublin Prague Tokyo Osaka Kyoto Seoul Shanghai Shenzhen Guangzhou Delhi
Mumbai Cairo Nairobi Lagos Sydney Toronto Boston Chicago Denver Lima Quito Bogota Athens Warsaw Zurich Geneva Milan Turin""".split()
ZH_CITIES = (
    "上海 广州 深圳 杭州 南京 成都 武汉 西安 重庆 天津 苏州 青岛 大连 厦门 长沙 昆明 东京 巴黎 伦敦 柏林".split()
)
COLOURS = "red green blue yellow orange purple black white gray brown pink cyan".split()
ZH_COLOURS = dict(zip(COLOURS, "红色 绿色 蓝色 黄色 橙色 紫色 黑色 白色 灰色 棕色 粉色 青色".split(), strict=True))
THINGS = """apple lamp chair river stone cloud bridge garden window letter candle basket hammer pencil mirror blanket bottle ladder
kettle violin anchor button carpet feather guitar helmet island jacket key leaf magnet needle orange paper rocket saddle table
umbrella valley wagon yacht acorn barrel camera drum engine fence globe harbor iron jewel kite lemon map nest oven piano quilt
ribbon spoon tower wheel book clock door flower glass house ring shoe train tree wall box cup desk coin""".split()
ANIMALS = "fox bear rabbit owl cat dog horse mouse turtle frog deer wolf goose duck crow badger otter hedgehog squirrel lion".split()
ADJECTIVES = "small old bright quiet brave kind clever tired curious lonely happy gentle strange golden silver tiny proud shy".split()
PLACES = "forest village harbor mountain meadow castle city island valley garden desert river lake market station library".split()
VERBS = "open close move find make send read write check build clean paint carry count draw fix hold mark print sort".split()
ZH_WORDS = """苹果 桌子 河流 石头 白云 大桥 花园 窗户 信件 蜡烛 篮子 铅笔 镜子 瓶子 梯子 水壶 火车 飞机 汽车 学校 老师 学生 朋友 月亮 太阳 星星
大海 森林 城市 乡村 春天 夏天 秋天 冬天 早上 晚上 今天 明天 昨天 时间 世界 国家 天气 音乐 电影 图书 电脑 手机 工作 生活 学习 测试 数据 系统 程序
问题 答案 语言 文字 中文 英文 数字 颜色 红花 绿草 蓝天 黄土 高山 小鸟 大鱼 老虎 熊猫 猫咪 小狗 米饭 面条 牛奶 咖啡 茶水 面包 你好 谢谢 再见 欢迎
请坐 开始 结束 成功 失败 快乐 健康 平安 希望 梦想 自由 和平 友谊 勇气 智慧 力量""".split()
JA_WORDS = """こんばんは ありがとう さようなら おはよう すみません はじめまして さくら ひらがな カタカナ テスト ねこ いぬ とり さかな やま かわ うみ そら
ほし つき はな 東京 大阪 京都 日本 日本語 学生 先生 電車 時間 世界 コーヒー ラーメン すし てんぷら ありがとうございます お元気ですか また明日""".split()
EMOJI = [
    chr(code)
    for first, last in (
        (0x1F300, 0x1F320),
        (0x1F330, 0x1F393),
        (0x1F3A0, 0x1F3C4),
        (0x1F400, 0x1F43E),
        (0x1F600, 0x1F64F),
        (0x1F680, 0x1F6C0),
        (0x1F910, 0x1F93A),
        (0x1F950, 0x1F96B),
    )
    for code in range(first, last)
] + list("✨⭐⚡☀☁☔⛄✅❌❤☕⚽✈⏰♻⚠")
LABELS = """Text Note Code Title Line Message Label Name Emoji Test Sample Item Word Data Value Phrase Mixed Status Result""".split()
ZH_LABELS = "文字 标题 内容 消息 短语 句子 名称 备注 提示 测试 中文 词语".split()
SYLLABLES = [
    c + v for c in "b c d f g h j k l m n p r s t v w z br ch cl dr fl gr pl sh sp st th tr".split() for v in "aeiou"
]
ENDS = ["", "", "", "n", "r", "s", "t", "l", "m", "nd", "st", "ck", "x", "ng"]
LOWER = "abcdefghijklmnopqrstuvwxyz"
DIGITS = "0123456789"


def number(rng: random.Random, most: int = 6) -> str:
    """1 to `most` digits, short ones as often as long ones."""
    count = rng.randint(1, most)
    return str(rng.randrange(10 ** (count - 1) if count > 1 else 0, 10**count))


def nonsense(rng: random.Random) -> str:
    """A word that no list holds."""
    if rng.random() < 0.2:
        return "".join(rng.choice(LOWER) for _ in range(rng.randint(2, 8)))
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 4))) + rng.choice(ENDS)


def word(rng: random.Random) -> str:
    """A known or a nonsense word, in any case."""
    text = (
        rng.choice(rng.choice((NAMES, CITIES, COLOURS, THINGS, ANIMALS, ADJECTIVES, PLACES, VERBS)))
        if rng.random() < 0.5
        else nonsense(rng)
    )
    form = rng.random()
    return text.lower() if form < 0.6 else text.capitalize() if form < 0.85 else text.upper()


def code(rng: random.Random) -> str:
    """What identifiers, codes and keys look like: BLUE_42, x7-KQ, _START, v1.2.3, camelCase, a/b.txt, #ff00aa."""
    kind = rng.randrange(10)
    upper = word(rng).upper()
    if kind < 2:
        return rng.choice((upper, word(rng), word(rng).capitalize())) + rng.choice("_-_-.:/") + number(rng, 4)
    if kind == 2:
        return rng.choice(("_", "__", "@", "#", "$", "")) + rng.choice("_-").join((upper, word(rng).upper()))
    if kind == 3:
        return rng.choice("_-").join(word(rng) for _ in range(rng.randint(2, 3)))
    if kind == 4:
        return "".join(rng.choice(LOWER.upper() + DIGITS) for _ in range(rng.randint(3, 8)))
    if kind == 5:
        return (
            "".join(rng.choice(LOWER.upper()) for _ in range(rng.randint(1, 4)))
            + rng.choice(("-", ""))
            + number(rng, 4)
        )
    if kind == 6:
        return word(rng).lower() + "".join(word(rng).capitalize() for _ in range(rng.randint(1, 2)))
    if kind == 7:
        return (
            "v" + ".".join(number(rng, 2) for _ in range(3))
            if rng.random() < 0.5
            else "#" + "".join(rng.choice("abcdef" + DIGITS) for _ in range(6))
        )
    if kind == 8:
        return (
            "/".join(word(rng).lower() for _ in range(rng.randint(1, 2)))
            + "."
            + rng.choice(("txt", "py", "json", "md", "csv"))
        )
    return "-".join("".join(rng.choice(LOWER + DIGITS) for _ in range(4)) for _ in range(rng.randint(2, 3)))


def hanzi(rng: random.Random) -> str:
    """A known Chinese word, or one of any common characters."""
    if rng.random() < 0.65:
        return rng.choice(rng.choice((ZH_WORDS, ZH_WORDS, ZH_NAMES, ZH_CITIES, list(ZH_COLOURS.values()))))
    return "".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(rng.randint(1, 3)))


def kana(rng: random.Random) -> str:
    """A known Japanese word, or one of any kana."""
    if rng.random() < 0.5:
        return rng.choice(JA_WORDS)
    first = 0x3042 if rng.random() < 0.7 else 0x30A2
    return "".join(chr(first + rng.randrange(0x50)) for _ in range(rng.randint(1, 5)))


def emoji(rng: random.Random) -> str:
    """One emoji or flag."""
    if rng.random() < 0.2:
        return "".join(chr(0x1F1E6 + rng.randrange(26)) for _ in range(2))
    return rng.choice(EMOJI)


def unit(rng: random.Random) -> str:
    """One word, number or code of a text to copy."""
    kind = rng.random()
    return (
        word(rng)
        if kind < 0.5
        else code(rng)
        if kind < 0.75
        else number(rng)
        if kind < 0.85
        else word(rng) + rng.choice(",.!?:;")
    )


def payload(rng: random.Random, script: str, most: int) -> str:
    """A text of 1 to `most` units in `script`: latin, code, chinese, japanese, emoji or mixed."""
    count = rng.randint(1, most)
    if script == "latin":
        text = " ".join(unit(rng) for _ in range(count))
    elif script == "code":
        text = " ".join(code(rng) for _ in range(max(1, count // 4)))
    elif script == "chinese":
        text = "".join(hanzi(rng) + (rng.choice("，。！？、：") if rng.random() < 0.2 else "") for _ in range(count))
    elif script == "japanese":
        text = "".join(
            kana(rng) + (rng.choice("、。！？") if rng.random() < 0.2 else "") for _ in range(max(1, count // 2))
        )
    elif script == "emoji":
        text = "".join(emoji(rng) + (" " if rng.random() < 0.1 else "") for _ in range(count))
    else:
        kinds = (unit, unit, hanzi, kana, emoji, code)
        text = "".join(rng.choice(kinds)(rng) + rng.choice(("", " ", " ")) for _ in range(count))
    if rng.random() < 0.25:
        label = rng.choice(ZH_LABELS) + "：" if script == "chinese" else rng.choice(LABELS) + ": "
        text = label + text
    return text.strip()


SCRIPTS = ("latin", "latin", "code", "chinese", "chinese", "japanese", "emoji", "mixed")
