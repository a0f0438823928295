// Package fieldowners records in managedFields which field manager owns which field. It contains
// the field managers of each kind, a fast computation of the entries of new objects, and the
// compact encoding in which entries are stored.
package fieldowners

import (
	"bytes"
	"errors"
	"strings"
	"sync"
)

// The compact encoding K1 represents a FieldsV1 set in about a tenth of its bytes. It is lossless,
// and does not depend on the object, its schema or its defaults. It is ASCII text in a JSON string,
// so an entry stays valid JSON for readers that do not support the encoding. The text consists of:
//
//	element         a field without fields below it
//	(element ... )  a field with fields below it
//
// where an element is
//
//	one of fieldCodes           a frequent field: f:metadata
//	a digit and one of codeBytes  a known field
//	'name'                      another field
//	.                           the dot: the object itself
//	{P value'                   a key of a list in the pattern P: k:{"name":"main"}
//	:anything'                  any other key, unchanged
//
// A backquote replaces each quotation mark of a key. A set that cannot be represented in this way
// is stored as FieldsV1.
const (
	maxFieldDepth = 64
	maxFieldBytes = 256 << 10 // maximum size of a set before encoding and after decoding
)

// fieldCodes are the one-byte codes of frequentFields, in the same order. codeBytes are the bytes
// that can be the second byte of a two-byte code (see knownFields). JSON never escapes any of these
// bytes.
const (
	fieldCodes = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ!#$%*+,-/;=?@[]^_|}~"
	codeBytes  = fieldCodes + "0123456789().':{"
)

// fieldPatterns are the frequent patterns of list keys, such as k:{"name":"main"}, as JSON inside a
// JSON string: the text before and after the value. The code of a pattern is 'A' plus its index.
// The patterns are part of the format on disk and must not change; additional patterns need a new
// encoding.
var fieldPatterns = [...]struct{ before, after string }{
	{`k:{\"name\":\"`, `\"}`},
	{`k:{\"type\":\"`, `\"}`},
	{`k:{\"uid\":\"`, `\"}`},
	{`k:{\"mountPath\":\"`, `\"}`},
	{`k:{\"ip\":\"`, `\"}`},
	{`k:{\"containerPort\":`, `,\"protocol\":\"TCP\"}`},
	{`k:{\"containerPort\":`, `,\"protocol\":\"UDP\"}`},
	{`k:{\"port\":`, `,\"protocol\":\"TCP\"}`},
	{`k:{\"port\":`, `,\"protocol\":\"UDP\"}`},
	{`k:{\"key\":\"`, `\"}`},
	{`v:\"`, `\"`},
}

// fieldTables maps field names to their codes in the compact encoding of field sets, and codes to
// names. The tables are built at the first use.
type fieldTables struct {
	codes map[string]string // by name
	names [256]string       // by one-byte code
	known [10][256]string   // by the digit and the byte of a two-byte code
}

var shortForm = sync.OnceValue(func() *fieldTables {
	t := &fieldTables{codes: make(map[string]string)}
	for i, name := range strings.Fields(frequentFields) {
		t.codes[name], t.names[fieldCodes[i]] = fieldCodes[i:i+1], name
	}
	for i, name := range strings.Fields(knownFields) {
		lead, second := i/len(codeBytes), codeBytes[i%len(codeBytes)]
		t.codes[name], t.known[lead][second] = string([]byte{'0' + byte(lead), second}), name
	}
	return t
})

var errShortForm = errors.New("malformed field set")

// encodeSet appends the compact encoding of a FieldsV1 set to dst. It returns false if the set is
// malformed, too large, or contains a key that the encoding cannot represent.
func encodeSet(dst, fields []byte) ([]byte, bool) {
	if len(fields) > maxFieldBytes {
		return dst, false
	}
	p := setEncoder{tables: shortForm(), in: fields, out: append(dst, '"')}
	if !p.encodeObject(0) || len(p.in) > 0 {
		return dst, false
	}
	return append(p.out, '"'), true
}

type setEncoder struct {
	tables *fieldTables
	in     []byte // remaining input
	out    []byte
}

func (p *setEncoder) consumeToken(token string) bool {
	if len(p.in) < len(token) || string(p.in[:len(token)]) != token {
		return false
	}
	p.in = p.in[len(token):]
	return true
}

func (p *setEncoder) encodeObject(depth int) bool {
	if depth > maxFieldDepth || !p.consumeToken("{") {
		return false
	}
	if p.consumeToken("}") {
		return depth == 0 // an empty set; below the root, the caller has consumed "{}"
	}
	for {
		key, ok := p.readKey()
		if !ok {
			return false
		}
		if p.consumeToken("{}") {
			ok = p.encodeElement(key)
		} else {
			p.out = append(p.out, '(')
			ok = p.encodeElement(key) && p.encodeObject(depth+1)
			p.out = append(p.out, ')')
		}
		switch {
		case !ok:
			return false
		case p.consumeToken("}"):
			return true
		case !p.consumeToken(","):
			return false
		}
	}
}

// readKey reads a JSON key and its colon from the input. It returns the key without unescaping it,
// or false if the input is invalid.
func (p *setEncoder) readKey() ([]byte, bool) {
	if !p.consumeToken(`"`) {
		return nil, false
	}
	for i := 0; i < len(p.in); i++ {
		switch p.in[i] {
		case '\\':
			i++
		case '"':
			key := p.in[:i]
			p.in = p.in[i+1:]
			return key, p.consumeToken(":")
		}
	}
	return nil, false
}

func (p *setEncoder) encodeElement(key []byte) bool {
	if len(key) == 1 && key[0] == '.' {
		p.out = append(p.out, '.')
		return true
	}
	if name, isField := bytes.CutPrefix(key, []byte("f:")); isField {
		if code, ok := p.tables.codes[string(name)]; ok {
			p.out = append(p.out, code...)
			return true
		}
		p.out = append(p.out, '\'')
		return p.encodeLiteral(name)
	}
	for i, pattern := range fieldPatterns {
		if inner := len(key) - len(pattern.before) - len(pattern.after); inner >= 0 &&
			string(key[:len(pattern.before)]) == pattern.before &&
			string(key[len(pattern.before)+inner:]) == pattern.after {
			p.out = append(p.out, '{', 'A'+byte(i))
			return p.encodeLiteral(key[len(pattern.before) : len(pattern.before)+inner])
		}
	}
	p.out = append(p.out, ':')
	return p.encodeLiteral(key)
}

// encodeLiteral writes text and its end mark, a quotation mark. It returns false if text has bytes
// that the compact encoding cannot represent.
func (p *setEncoder) encodeLiteral(text []byte) bool {
	for i := 0; i < len(text); i++ {
		c := text[i]
		switch {
		case c == '\\' && i+1 < len(text) && text[i+1] == '"':
			i++
			c = '`'
		case c == '\'' || c == '`' || !isLiteralByte(c):
			return false
		}
		p.out = append(p.out, c)
	}
	p.out = append(p.out, '\'')
	return true
}

// isLiteralByte reports whether a byte may occur in the literal text of the compact encoding.
func isLiteralByte(c byte) bool {
	return c >= ' ' && c < 0x7f && c != '"' && c != '\\' && c != '<' && c != '>' && c != '&'
}

// decodeSet decodes a FieldsV1 set from its compact encoding and appends it to dst. It returns an
// error for invalid text, for example from a damaged disk.
func decodeSet(dst, text []byte) ([]byte, error) {
	if len(text) < 2 || text[0] != '"' || text[len(text)-1] != '"' {
		return dst, errShortForm
	}
	u := setDecoder{tables: shortForm(), in: text[1 : len(text)-1], out: dst, limit: len(dst) + maxFieldBytes}
	if !u.decodeMembers(0) || len(u.in) > 0 {
		return dst, errShortForm
	}
	return u.out, nil
}

type setDecoder struct {
	tables *fieldTables
	in     []byte // remaining input
	out    []byte
	limit  int
}

// decodeMembers decodes the fields of one level of a set, up to the end of the input or to the
// closing parenthesis. It returns false if the text is invalid.
func (u *setDecoder) decodeMembers(depth int) bool {
	if depth > maxFieldDepth {
		return false
	}
	u.out = append(u.out, '{')
	for first := true; len(u.in) > 0 && u.in[0] != ')'; first = false {
		if !first {
			u.out = append(u.out, ',')
		}
		parent := u.in[0] == '('
		if parent {
			u.in = u.in[1:]
		}
		u.out = append(u.out, '"')
		if !u.decodeElement() || len(u.out) > u.limit {
			return false
		}
		u.out = append(u.out, '"', ':')
		if !parent {
			u.out = append(u.out, '{', '}')
			continue
		}
		if !u.decodeMembers(depth+1) || len(u.in) == 0 {
			return false
		}
		u.in = u.in[1:]
	}
	u.out = append(u.out, '}')
	return true
}

func (u *setDecoder) decodeElement() bool {
	if len(u.in) == 0 {
		return false
	}
	c := u.in[0]
	u.in = u.in[1:]
	switch {
	case c == '.':
		u.out = append(u.out, '.')
		return true
	case c == '\'':
		u.out = append(u.out, 'f', ':')
		return u.decodeLiteral()
	case c == ':':
		return u.decodeLiteral()
	case c == '{':
		if len(u.in) == 0 || u.in[0] < 'A' || int(u.in[0]-'A') >= len(fieldPatterns) {
			return false
		}
		pattern := &fieldPatterns[u.in[0]-'A']
		u.in = u.in[1:]
		u.out = append(u.out, pattern.before...)
		if !u.decodeLiteral() {
			return false
		}
		u.out = append(u.out, pattern.after...)
		return true
	}
	name := u.tables.names[c]
	if c >= '0' && c <= '9' && len(u.in) > 0 {
		name = u.tables.known[c-'0'][u.in[0]]
		u.in = u.in[1:]
	}
	u.out = append(append(u.out, 'f', ':'), name...)
	return name != ""
}

// decodeLiteral decodes the literal text up to its end mark and appends it to the output. It
// returns false if the text is invalid or has no end mark.
func (u *setDecoder) decodeLiteral() bool {
	for i, c := range u.in {
		switch {
		case c == '\'':
			u.in = u.in[i+1:]
			return true
		case c == '`':
			u.out = append(u.out, '\\', '"')
		case isLiteralByte(c):
			u.out = append(u.out, c)
		default:
			return false
		}
	}
	return false
}
