// Package corefile parses the configuration of the cluster DNS: a subset of the Corefile, CoreDNS's
// configuration language (coredns.io/manual). An unsupported part becomes a Warning with its line
// and has no effect. An invalid part makes the whole text invalid, as when CoreDNS reloads. Parsing
// is pure and opens no files.
package corefile

import (
	"fmt"
	"strings"
)

// Maximum sizes of a Corefile and of its parts.
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

func errorAt(line int, format string, args ...any) error {
	return &Error{line, fmt.Sprintf(format, args...)}
}

// token is one word of a Corefile. Each unquoted brace is a separate token.
type token struct {
	text   string
	line   int
	quoted bool
}

func (t token) isOpeningBrace() bool { return t.text == "{" && !t.quoted }
func (t token) isClosingBrace() bool { return t.text == "}" && !t.quoted }

// splitTokens splits a Corefile into tokens. Tokens are separated by white space and may be
// "quoted", with \" for a quote. # starts a comment.
func splitTokens(text string) ([]token, error) {
	if len(text) > MaxText {
		return nil, errorAt(1, "the text has %d bytes; %d are the most", len(text), MaxText)
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
			t, next, lines, err := readToken(text, i, line)
			if err != nil {
				return nil, err
			}
			if len(t.text) > maxToken || len(out) >= maxTokens {
				return nil, errorAt(line, "a word has at most %d bytes, and a Corefile %d words", maxToken, maxTokens)
			}
			out = append(out, t)
			i, line = next, line+lines
		}
	}
	return out, nil
}

// readToken reads the token at the offset i of text. next is the offset after the token, and lines
// is the number of line breaks in the token.
func readToken(text string, i, line int) (t token, next, lines int, err error) {
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
	return t, 0, 0, errorAt(line, "a quote is not closed")
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

// ParseBlocks parses the structure of a Corefile without interpreting the directives.
func ParseBlocks(text string) ([]Block, error) {
	tokens, err := splitTokens(text)
	if err != nil {
		return nil, err
	}
	p := &parser{tokens: tokens}
	var out []Block
	for p.hasMore() {
		if len(out) >= maxBlocks {
			return nil, errorAt(p.peekToken().line, "a Corefile has at most %d server blocks", maxBlocks)
		}
		b := Block{Line: p.peekToken().line}
		for p.hasMore() && !p.peekToken().isOpeningBrace() {
			t := p.nextToken()
			if t.isClosingBrace() {
				return nil, errorAt(t.line, "a } closes nothing")
			}
			if key := strings.TrimSuffix(t.text, ","); key != "" {
				b.Keys = append(b.Keys, key)
			}
		}
		if !p.hasMore() {
			return nil, errorAt(b.Line, "the server block has no { ... }")
		}
		if len(b.Keys) == 0 {
			return nil, errorAt(b.Line, "a server block needs a zone before its {")
		}
		if b.Directives, err = p.parseLines(1); err != nil {
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

func (p *parser) hasMore() bool    { return p.at < len(p.tokens) }
func (p *parser) peekToken() token { return p.tokens[p.at] }
func (p *parser) nextToken() token { p.at++; return p.tokens[p.at-1] }

// parseLines parses a block { ... } with one directive per line. depth is the nesting depth.
func (p *parser) parseLines(depth int) ([]Directive, error) {
	open := p.nextToken()
	if depth > maxDepth {
		return nil, errorAt(open.line, "braces are nested deeper than %d", maxDepth)
	}
	var out []Directive
	for p.hasMore() {
		t := p.nextToken()
		if t.isClosingBrace() {
			return out, nil
		}
		if t.isOpeningBrace() {
			return nil, errorAt(t.line, "a { stands where the name of a directive should")
		}
		d := Directive{Name: t.text, Line: t.line}
		for p.hasMore() && p.peekToken().line == t.line && !p.peekToken().isClosingBrace() {
			if !p.peekToken().isOpeningBrace() {
				d.Args = append(d.Args, p.nextToken().text)
				continue
			}
			var err error
			if d.Lines, err = p.parseLines(depth + 1); err != nil {
				return nil, err
			}
			break
		}
		out = append(out, d)
	}
	return nil, errorAt(open.line, "the { is not closed")
}
