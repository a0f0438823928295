// Package corefile parses the configuration of the cluster DNS: a subset of the Corefile, CoreDNS's
// configuration language (coredns.io/manual). An unsupported part becomes a Warning with its line
// and has no effect. An invalid part makes the whole text invalid, as when CoreDNS reloads. Parsing
// is pure and opens no files.
package corefile

import (
	"fmt"
	"strings"
)

// The limits of a Corefile.
const (
	MaxText   = 256 << 10 // bytes
	maxTokens = 20000
	maxToken  = 4096 // bytes
	maxBlocks = 128
	maxDepth  = 4
)

// Error describes why a Corefile is invalid.
type Error struct {
	Line int
	What string
}

func (e *Error) Error() string { return fmt.Sprintf("Corefile line %d: %s", e.Line, e.What) }

func wrong(line int, format string, args ...any) error {
	return &Error{line, fmt.Sprintf(format, args...)}
}

// token is one word. An unquoted brace is a separate token.
type token struct {
	text   string
	line   int
	quoted bool
}

func (t token) opens() bool  { return t.text == "{" && !t.quoted }
func (t token) closes() bool { return t.text == "}" && !t.quoted }

// lex splits a text into tokens. Tokens are separated by white space and may be "quoted", with \"
// for a quote. # starts a comment.
func lex(text string) ([]token, error) {
	if len(text) > MaxText {
		return nil, wrong(1, "the text has %d bytes; %d are the most", len(text), MaxText)
	}
	text = strings.TrimPrefix(text, "\ufeff")
	var out []token
	line := 1
	for i := 0; i < len(text); {
		switch c := text[i]; {
		case c == '\n':
			line++
			i++
		case c == ' ' || c == '\t' || c == '\r':
			i++
		case c == '#':
			for i < len(text) && text[i] != '\n' {
				i++
			}
		default:
			t, next, lines, err := word(text, i, line)
			if err != nil {
				return nil, err
			}
			if len(t.text) > maxToken || len(out) >= maxTokens {
				return nil, wrong(line, "a word has at most %d bytes, and a Corefile %d words", maxToken, maxTokens)
			}
			out = append(out, t)
			i, line = next, line+lines
		}
	}
	return out, nil
}

// word reads the token at i. lines is the number of line breaks in it.
func word(text string, i, line int) (t token, next, lines int, err error) {
	t.line = line
	if text[i] != '"' {
		end := i
		for end < len(text) && !strings.ContainsRune(" \t\r\n", rune(text[end])) {
			end++
		}
		t.text = text[i:end]
		return t, end, 0, nil
	}
	t.quoted = true
	var b strings.Builder
	for i++; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"':
			t.text = b.String()
			return t, i + 1, lines, nil
		case c == '\\' && i+1 < len(text) && text[i+1] == '"':
			b.WriteByte('"')
			i++
		default:
			if c == '\n' {
				lines++
			}
			b.WriteByte(c)
		}
	}
	return t, 0, 0, wrong(line, "a quote is not closed")
}

// Directive is one line of a block: a name, arguments, and nested lines in braces.
type Directive struct {
	Name  string
	Args  []string
	Lines []Directive
	Line  int
}

// Block is a server block: its zones and directives.
type Block struct {
	Keys       []string
	Directives []Directive
	Line       int
}

// Parse parses the structure of a Corefile without interpreting the directives.
func Parse(text string) ([]Block, error) {
	tokens, err := lex(text)
	if err != nil {
		return nil, err
	}
	p := &parser{tokens: tokens}
	var out []Block
	for p.more() {
		if len(out) >= maxBlocks {
			return nil, wrong(p.peek().line, "a Corefile has at most %d server blocks", maxBlocks)
		}
		b := Block{Line: p.peek().line}
		for p.more() && !p.peek().opens() {
			t := p.next()
			if t.closes() {
				return nil, wrong(t.line, "a } closes nothing")
			}
			if key := strings.TrimSuffix(t.text, ","); key != "" {
				b.Keys = append(b.Keys, key)
			}
		}
		if !p.more() {
			return nil, wrong(b.Line, "the server block has no { ... }")
		}
		if len(b.Keys) == 0 {
			return nil, wrong(b.Line, "a server block needs a zone before its {")
		}
		if b.Directives, err = p.lines(1); err != nil {
			return nil, err
		}
		out = append(out, b)
	}
	return out, nil
}

type parser struct {
	tokens []token
	at     int
}

func (p *parser) more() bool  { return p.at < len(p.tokens) }
func (p *parser) peek() token { return p.tokens[p.at] }
func (p *parser) next() token { p.at++; return p.tokens[p.at-1] }

// lines parses { ... } with one directive per line.
func (p *parser) lines(depth int) ([]Directive, error) {
	open := p.next()
	if depth > maxDepth {
		return nil, wrong(open.line, "braces are nested deeper than %d", maxDepth)
	}
	var out []Directive
	for p.more() {
		t := p.next()
		if t.closes() {
			return out, nil
		}
		if t.opens() {
			return nil, wrong(t.line, "a { stands where the name of a directive should")
		}
		d := Directive{Name: t.text, Line: t.line}
		for p.more() && p.peek().line == t.line && !p.peek().closes() {
			if !p.peek().opens() {
				d.Args = append(d.Args, p.next().text)
				continue
			}
			var err error
			if d.Lines, err = p.lines(depth + 1); err != nil {
				return nil, err
			}
			break
		}
		out = append(out, d)
	}
	return nil, wrong(open.line, "the { is not closed")
}
