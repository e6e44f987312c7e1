# Verdicts for tests/unit/test_reward_math.c: python3 make_math.py > math.jsonl
# Needs math-verify (0.9). Pairs of a data set's answer and a completion are written here; whether they are the same
# is what math-verify says, boxes first, as its own tests and TRL's accuracy_reward set it.
import json

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

HOW = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

ANSWERS = {  # an answer: completions' answers, right and wrong ones
    r"\frac{3}{4}": [r"\dfrac34", "0.75", "3/4", r"\frac{6}{8}", r"\frac{4}{3}", r"-\frac{3}{4}", r"75\%", "0.7500001", "0.76"],
    "1234567": ["1,234,567", r"1{,}234{,}567", r"1\,234\,567", "1234568", "1234567.0"],
    "123456789012345678901": ["123456789012345678901", "123456789012345678902"],
    "-5": ["-5", "5", "x=-5", r"x = -\frac{10}{2}", "{-5}", r"\{-5\}"],
    r"\sqrt{8}": [r"2\sqrt{2}", r"2\sqrt2", r"8^{1/2}", r"\sqrt[4]{64}", r"\sqrt{7}", "2.828427"],
    r"\frac{\sqrt{3}}{3}": [r"\frac{1}{\sqrt{3}}", r"\frac13\sqrt3", r"\tan 30", r"3^{-\frac12}", r"\sqrt{3}"],
    r"2\pi": [r"\pi \cdot 2", r"\frac{4\pi}{2}", "6.283185", "6.28", r"2\pi r"],
    "x^2+2x+1": ["(x+1)^2", "(x + 1)(x + 1)", "x(x+2)+1", "x^2+2x+2", "(y+1)^2", "1+2x+x^2"],
    r"\frac{1}{x}-\frac{1}{x+1}": [r"\frac{1}{x(x+1)}", r"\frac{1}{x^2+x}", r"\frac{1}{x^2-x}"],
    r"\sin^2 x": [r"1-\cos^2 x", r"(\sin x)^2", r"\frac{1-\cos 2x}{2}", r"\cos^2 x", r"\sin^2(x)"],
    r"\ln 6": [r"\ln 2+\ln 3", r"\ln(2\cdot 3)", r"\ln 5"],
    r"\log_2 8": ["3", r"\frac{\ln 8}{\ln 2}", "2"],
    "e^{2}": ["e^2", r"e\cdot e", "e^{3}"],
    "2^{10}": ["1024", "4^5", "1000", "2^{9}"],
    "5!": ["120", r"5\cdot 4\cdot 3\cdot 2", "24"],
    r"\binom{5}{2}": ["10", r"\frac{5!}{2!3!}", "20"],
    "(1,2)": ["(1, 2)", r"\left(1,2\right)", "(2,1)", "(1,2,3)", r"(x,y)=(1,2)", "(1.0,2)"],
    "(1,2,3)": ["(1,2,3)", "(3,2,1)", "(1,2)", r"\left(1, \frac{4}{2}, 3\right)"],
    "[0,1)": ["[0,1)", "[0,1]", "(0,1)", r"[0, \frac{2}{2})", r"x \in [0,1)", r"\left[0,1\right)", "[0.0,1)"],
    r"(-\infty,3)": [r"(-\infty, 3)", r"x \in (-\infty,3)", r"(-\infty,3]", r"(-\infty, \frac{6}{2})"],
    r"(-\infty,-2)\cup(2,\infty)": [r"(-\infty,-2) \cup (2,\infty)", r"(2,\infty)\cup(-\infty,-2)", r"(-2,2)", r"x \in (-\infty,-2)\cup(2,+\infty)"],
    r"\{1,2,3\}": [r"\{3,2,1\}", "1,2,3", r"\{1,2\}", r"3, 1, 2", r"\{1,2,2,3\}", r"\{1,2,4\}"],
    "1,-2": ["-2,1", "1, -2", r"x=1, x=-2", r"1 \text{ and } -2", r"1 \text{ or } -2", "1,2", r"\{1,-2\}"],
    r"\pm 3": ["3,-3", r"\pm 3", r"\{-3,3\}", "3", r"x=\pm 3"],
    r"2\pm\sqrt{5}": [r"2+\sqrt5, 2-\sqrt5", r"\{2-\sqrt{5}, 2+\sqrt{5}\}", r"2\pm\sqrt{6}", r"2+\sqrt{5}"],
    "x > 3": [r"x>3", "3<x", r"x \geq 3", r"(3,\infty)", r"x \in (3,\infty)", "x<3", "2x>6"],
    r"-1 \le x < 4": [r"[-1,4)", r"-1\leq x<4", r"-1\le x\le 4", r"x\in[-1,4)", "(-1,4)"],
    r"x \neq 2": [r"x\ne 2", "x=2", r"x \neq 3"],
    "y=2x+1": ["y = 2x + 1", "2x-y+1=0", "y-2x=1", "y=2x-1", "2x+1", "y=1+2x"],
    "x=5": ["5", "x=5", "y=5", "x=2+3=5", r"x \approx 5", "5=x"],
    "5": ["x=5", "k = 5", "5.0", "5.0000001", "005", "5x", r"\text{5}", "five"],
    r"50\%": ["50", r"50\%", "0.5", r"\frac12", r"50\text{ percent}", r"5\%", "50 percent"],
    r"10\text{ cm}": ["10", r"10\text{ meters}", r"10\mathrm{~cm}", "10 cm", r"10\text{ cm}^2", "11"],
    r"90^\circ": ["90", r"90^{\circ}", r"\frac{\pi}{2}", r"90\text{ degrees}", "45^\\circ"],
    r"\$18": ["18", r"\$18", "18.00", r"18\text{ dollars}", "18.5"],
    r"\text{Monday}": [r"\text{Monday}", "Monday", r"\text{monday}", r"\text{Tuesday}", r"\mathrm{Monday}"],
    r"\text{(B)}": ["B", r"\text{B}", r"\text{(B)}", r"\text{(C)}", "(B)"],
    r"\text{Yes}": [r"\text{Yes}", r"\text{No}", "Yes"],
    r"3+4i": ["4i+3", "3-4i", r"3+4\cdot i", r"(2+i)^2"],
    r"\frac{1}{1+i}": [r"\frac{1-i}{2}", r"\frac{1+i}{2}"],
    r"|x|": [r"|x|", r"\sqrt{x^2}", "x"],
    r"\lfloor 3.7 \rfloor": ["3", "4", r"\lceil 2.1\rceil"],
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": [r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 & 3 & 4 \end{pmatrix}", r"\begin{pmatrix} \frac{2}{2} & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 2 & 1 \\ 4 & 3 \end{pmatrix}", r"\begin{pmatrix} 1 & 1 \\ 0 & 1 \end{pmatrix} + \begin{pmatrix} 0 & 1 \\ 3 & 3 \end{pmatrix}", r"\begin{pmatrix} 1 & 0 \\ 3 & -2 \end{pmatrix}\begin{pmatrix} 1 & 2 \\ 0 & 1 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 0 & 1 \end{pmatrix}\begin{pmatrix} 1 & 0 \\ 3 & -2 \end{pmatrix}"],
    r"\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}": [r"\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}", r"\begin{pmatrix} -7 \\ 16 \\ 6 \end{pmatrix}"],
    "3:2": ["3:2", r"\frac{3}{2}", "2:3", "6:4", "1.5"],
    r"1\frac{1}{2}": [r"\frac{3}{2}", "1.5", r"1\frac12", r"\frac12"],
    r"3.2\times 10^{5}": ["320000", r"3.2\cdot 10^5", r"3.2\times10^4"],
    r"f(x)=x^2": ["f(x)=x^2", "x^2", "f(x)=x^3", "y=x^2"],
    "a+b": ["b+a", "a-b", "ab", "a+c"],
    r"\frac{a}{b}": [r"a/b", r"ab^{-1}", r"\frac{b}{a}"],
    "204_5": ["204_5", "204_6", "204"],
    "0.333333": [r"\frac13", "0.33", "1/3"],
    r"\emptyset": [r"\emptyset", r"\{\}", r"\varnothing", "0"],
    r"\infty": [r"\infty", r"+\infty", r"-\infty"],
}
TEXTS = [  # a completion whole: where its answer stands
    ("5", "The answer is $5$."),
    ("5", "We get $3$ and then 5"),
    ("5", "The answer is 5. It is not 6."),
    ("12", "So the final answer is 12. I hope it is correct."),
    ("12", r"First $\boxed{11}$, but then $\boxed{12}$."),
    ("12", r"\boxed{12}"),
    ("12", "Answer: 12"),
    ("12", "**12**"),
    ("12", "#### 12"),
    ("12", "12 apples"),
    ("12", "she has 3*4 = 12 apples"),
    ("3/4", "The probability is 3/4."),
    ("0.5", "It is 0.5, or half."),
    ("7", "I count 6, no, 7 of them, in 2 rows"),
    ("$x+1$", "It is $x+1$."),
    ("$x+1$", r"It is \(x+1\), which is positive."),
    ("$x+1$", r"It is \[ 1+x \]"),
    ("1000", "She pays $1,000."),
    ("1000", r"She pays \$1,000."),
    ("2,5", r"The solutions are \boxed{2} and \boxed{5}."),
    ("4", "no number at all"),
    ("4", ""),
]


def verdict(wanted, text):
    gold = parse(wanted, HOW)
    return bool(gold) and verify(gold, parse(text, HOW))


for wanted, got in ANSWERS.items():
    for one in got:
        print(json.dumps([f"${wanted}$", rf"Thus it is $\boxed{{{one}}}$.", verdict(f"${wanted}$", rf"Thus it is $\boxed{{{one}}}$.")]))
for wanted, text in TEXTS:
    print(json.dumps([wanted, text, verdict(wanted, text)]))
