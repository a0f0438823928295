package registry

import (
	"bytes"
	"errors"
	"strings"
	"sync"
)

// Form 1 encodes a FieldsV1 set in about a tenth of its bytes. It is lossless, and does not depend
// on the object, its schema or its defaults. So every entry may be written in it. It is ASCII text
// in a JSON string, so an entry stays valid JSON for readers without support for the form. The text
// consists of:
//
//	element         a field without fields below it
//	(element ... )  a field with fields below it
//
// where an element is
//
//	one of fieldCodes           a frequent field: f:metadata
//	a digit and one of safe     a known field
//	'name'                      another field
//	.                           the dot: the object itself
//	{P value'                   a key of a list in the pattern P: k:{"name":"main"}
//	:anything'                  any other key, unchanged
//
// A backquote replaces each quotation mark of a key. A set with other content is not written in
// this form.
const (
	maxFieldDepth = 64
	maxFieldBytes = 256 << 10 // maximum size of a set before encoding and after decoding
)

// fieldCodes are the codes of frequentFields, in order. They and safe are bytes that JSON never
// escapes.
const (
	fieldCodes = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ!#$%*+,-/;=?@[]^_|}~"
	safe       = fieldCodes + "0123456789().':{"
)

// fieldPatterns are the frequent patterns of list keys, in JSON within JSON. The code of a pattern
// is 'A' plus its index. Do not change them; additional patterns need a new form.
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

// fieldTables maps names to codes of form 1 and back. They are built at the first use.
type fieldTables struct {
	codes map[string]string // by name
	names [256]string       // by one-byte code
	known [10][256]string   // by the two bytes of a code
}

var form1 = sync.OnceValue(func() *fieldTables {
	t := &fieldTables{codes: make(map[string]string)}
	for i, name := range strings.Fields(frequentFields) {
		t.codes[name], t.names[fieldCodes[i]] = fieldCodes[i:i+1], name
	}
	for i, name := range strings.Fields(knownFields) {
		lead, second := i/len(safe), safe[i%len(safe)]
		t.codes[name], t.known[lead][second] = string([]byte{'0' + byte(lead), second}), name
	}
	return t
})

var errFieldForm = errors.New("malformed field set")

// packFields appends form 1 of a FieldsV1 set to dst. It returns false if the set cannot be
// encoded.
func packFields(dst, set []byte) ([]byte, bool) {
	if len(set) > maxFieldBytes {
		return dst, false
	}
	p := packer{tables: form1(), in: set, out: append(dst, '"')}
	if !p.object(0) || len(p.in) > 0 {
		return dst, false
	}
	return append(p.out, '"'), true
}

type packer struct {
	tables *fieldTables
	in     []byte // remaining input
	out    []byte
}

func (p *packer) take(token string) bool {
	if len(p.in) < len(token) || string(p.in[:len(token)]) != token {
		return false
	}
	p.in = p.in[len(token):]
	return true
}

func (p *packer) object(depth int) bool {
	if depth > maxFieldDepth || !p.take("{") {
		return false
	}
	if p.take("}") {
		return depth == 0 // an empty set; below the root, the caller has consumed "{}"
	}
	for {
		key, ok := p.key()
		if !ok {
			return false
		}
		if p.take("{}") {
			ok = p.element(key)
		} else {
			p.out = append(p.out, '(')
			ok = p.element(key) && p.object(depth+1)
			p.out = append(p.out, ')')
		}
		switch {
		case !ok:
			return false
		case p.take("}"):
			return true
		case !p.take(","):
			return false
		}
	}
}

// key reads a JSON key and its colon, and returns the key without unescaping it.
func (p *packer) key() ([]byte, bool) {
	if !p.take(`"`) {
		return nil, false
	}
	for i := 0; i < len(p.in); i++ {
		switch p.in[i] {
		case '\\':
			i++
		case '"':
			key := p.in[:i]
			p.in = p.in[i+1:]
			return key, p.take(":")
		}
	}
	return nil, false
}

func (p *packer) element(key []byte) bool {
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
		return p.literal(name)
	}
	for i, pattern := range fieldPatterns {
		if inner := len(key) - len(pattern.before) - len(pattern.after); inner >= 0 &&
			string(key[:len(pattern.before)]) == pattern.before && string(key[len(pattern.before)+inner:]) == pattern.after {
			p.out = append(p.out, '{', 'A'+byte(i))
			return p.literal(key[len(pattern.before) : len(pattern.before)+inner])
		}
	}
	p.out = append(p.out, ':')
	return p.literal(key)
}

// literal writes text and its end mark. It returns false if the text has bytes that form 1 cannot
// represent.
func (p *packer) literal(text []byte) bool {
	for i := 0; i < len(text); i++ {
		c := text[i]
		switch {
		case c == '\\' && i+1 < len(text) && text[i+1] == '"':
			i++
			c = '`'
		case c == '\'' || c == '`' || !plain(c):
			return false
		}
		p.out = append(p.out, c)
	}
	p.out = append(p.out, '\'')
	return true
}

// plain reports whether a byte is allowed in a literal.
func plain(c byte) bool {
	return c >= ' ' && c < 0x7f && c != '"' && c != '\\' && c != '<' && c != '>' && c != '&'
}

// unpackFields appends the FieldsV1 set that is encoded in text. It returns an error for invalid
// text, for example from a damaged disk.
func unpackFields(dst, text []byte) ([]byte, error) {
	if len(text) < 2 || text[0] != '"' || text[len(text)-1] != '"' {
		return dst, errFieldForm
	}
	u := unpacker{tables: form1(), in: text[1 : len(text)-1], out: dst, limit: len(dst) + maxFieldBytes}
	if !u.set(0) || len(u.in) > 0 {
		return dst, errFieldForm
	}
	return u.out, nil
}

type unpacker struct {
	tables *fieldTables
	in     []byte // remaining input
	out    []byte
	limit  int
}

// set decodes elements up to the end of the input or to the closing parenthesis.
func (u *unpacker) set(depth int) bool {
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
		if !u.element() || len(u.out) > u.limit {
			return false
		}
		u.out = append(u.out, '"', ':')
		if !parent {
			u.out = append(u.out, '{', '}')
			continue
		}
		if !u.set(depth+1) || len(u.in) == 0 {
			return false
		}
		u.in = u.in[1:]
	}
	u.out = append(u.out, '}')
	return true
}

func (u *unpacker) element() bool {
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
		return u.literal()
	case c == ':':
		return u.literal()
	case c == '{':
		if len(u.in) == 0 || u.in[0] < 'A' || int(u.in[0]-'A') >= len(fieldPatterns) {
			return false
		}
		pattern := &fieldPatterns[u.in[0]-'A']
		u.in = u.in[1:]
		u.out = append(u.out, pattern.before...)
		if !u.literal() {
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

// literal decodes text up to its end mark.
func (u *unpacker) literal() bool {
	for i, c := range u.in {
		switch {
		case c == '\'':
			u.in = u.in[i+1:]
			return true
		case c == '`':
			u.out = append(u.out, '\\', '"')
		case plain(c):
			u.out = append(u.out, c)
		default:
			return false
		}
	}
	return false
}
