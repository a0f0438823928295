package wire

// Message is the body of a frame.
type Message interface {
	// fields calls a method of c for every field, in the order of version 0.
	fields(c *coder)
}

// Marshal encodes m in the form of a protocol version.
func Marshal(version int64, m Message) []byte {
	c := coder{version: version}
	m.fields(&c)
	return c.b
}

// Unmarshal decodes b into m, which must be zero, in the form of a protocol version. It returns
// ErrMalformed for bytes that no release can have written. Unknown fields are skipped; missing
// fields stay zero.
func Unmarshal(version int64, b []byte, m Message) error {
	c := coder{version: version, decoding: true, b: b}
	if version == 0 {
		m.fields(&c)
		if c.bad || len(c.b) != 0 {
			return ErrMalformed
		}
		return nil
	}
	for len(c.b) > 0 {
		if c.next(); !c.bad && c.tag != 0 {
			m.fields(&c)
		}
		if c.bad {
			return ErrMalformed
		}
	}
	return nil
}

// The wire types of fields, numbered as in protocol buffers.
const (
	typeNumber = 0
	typeFixed8 = 1
	typeBytes  = 2
	typeFixed4 = 5
)

// coder encodes or decodes one message. The message calls a method for each of its fields. In
// version 0, each call writes or reads the field. In later versions, an encoding call writes the
// field with its tag unless it is zero. A decoding call reads the current field if it has the same
// tag.
type coder struct {
	version  int64
	decoding bool
	b        []byte // encoded so far, or still to be decoded
	bad      bool

	tag  uint64 // decoding: tag of the current field; 0 = skip it
	kind uint64
	val  uint64
	data []byte
}

// next reads the next field from the input.
func (c *coder) next() {
	key := c.uvarint()
	c.tag, c.kind = key>>3, key&7
	if c.tag == 0 {
		c.bad = true
	}
	switch c.kind {
	case typeNumber:
		c.val = c.uvarint()
	case typeBytes:
		c.data = c.take(c.uvarint())
	case typeFixed8:
		c.take(8)
		c.tag = 0
	case typeFixed4:
		c.take(4)
		c.tag = 0
	default:
		c.bad = true
	}
}

// at reports whether the current field has this tag. A wrong type marks the message as malformed.
func (c *coder) at(tag int, kind uint64) bool {
	if c.tag != uint64(tag) {
		return false
	}
	if c.kind != kind {
		c.bad = true
		return false
	}
	return true
}

func (c *coder) key(tag int, kind uint64) { c.b = appendUvarint(c.b, uint64(tag)<<3|kind) }

// num is a signed number, in zigzag form.
func (c *coder) num(tag int, p *int64) {
	switch {
	case c.version == 0 && c.decoding:
		*p = signed(c.uvarint())
	case c.version == 0:
		c.b = appendUvarint(c.b, zigzag(*p))
	case c.decoding:
		if c.at(tag, typeNumber) {
			*p = signed(c.val)
		}
	case *p != 0:
		c.key(tag, typeNumber)
		c.b = appendUvarint(c.b, zigzag(*p))
	}
}

// bits is an unsigned number; version 0 has none.
func (c *coder) bits(tag int, p *uint64) {
	if c.decoding {
		if c.at(tag, typeNumber) {
			*p = c.val
		}
	} else if *p != 0 {
		c.key(tag, typeNumber)
		c.b = appendUvarint(c.b, *p)
	}
}

func (c *coder) flag(tag int, p *bool) {
	switch {
	case c.version == 0:
		var v int64
		if *p {
			v = 1
		}
		if c.num(tag, &v); v != 0 && v != 1 {
			c.bad = true
		}
		*p = v == 1
	case c.decoding:
		if c.at(tag, typeNumber) {
			*p = c.val != 0
		}
	case *p:
		c.key(tag, typeNumber)
		c.b = append(c.b, 1)
	}
}

func (c *coder) str(tag int, p *string) {
	switch {
	case c.version == 0 && c.decoding:
		*p = string(c.take(c.uvarint()))
	case c.version == 0:
		c.bytes(*p)
	case c.decoding:
		if c.at(tag, typeBytes) {
			*p = string(c.data)
		}
	case *p != "":
		c.key(tag, typeBytes)
		c.bytes(*p)
	}
}

func (c *coder) strs(tag int, p *[]string) {
	n := c.count(tag, len(*p))
	switch {
	case c.version == 0 && c.decoding:
		for range n {
			*p = append(*p, string(c.take(c.uvarint())))
		}
	case c.version == 0:
		for _, s := range *p {
			c.bytes(s)
		}
	case c.decoding:
		if n > 0 {
			*p = append(*p, string(c.data))
		}
	default:
		for _, s := range *p {
			c.key(tag, typeBytes)
			c.bytes(s)
		}
	}
}

// count returns the number of list elements that follow: all of them in version 0, else 1 or 0 for
// the current field.
func (c *coder) count(tag int, have int) int64 {
	n := int64(have)
	switch {
	case c.version == 0:
		c.num(tag, &n)
		// Each element takes at least one byte, so a larger count is invalid.
		if c.decoding && (n < 0 || n > int64(len(c.b))) {
			c.bad, c.b = true, nil
			return 0
		}
	case c.decoding:
		if n = 0; c.at(tag, typeBytes) {
			n = 1
		}
	}
	return n
}

// message is an embedded message. In version 0, its fields are inlined into the outer message.
func (c *coder) message(tag int, m Message) {
	switch {
	case c.version == 0:
		m.fields(c)
	case c.decoding:
		if c.at(tag, typeBytes) && Unmarshal(c.version, c.data, m) != nil {
			c.bad = true
		}
	default:
		c.key(tag, typeBytes)
		c.bytes(string(Marshal(c.version, m)))
	}
}

func (c *coder) bytes(s string) {
	c.b = appendUvarint(c.b, uint64(len(s)))
	c.b = append(c.b, s...)
}

// take removes and returns the next n bytes of the input.
func (c *coder) take(n uint64) []byte {
	if n > uint64(len(c.b)) {
		c.bad, c.b = true, nil
		return nil
	}
	b := c.b[:n]
	c.b = c.b[n:]
	return b
}

func (c *coder) uvarint() uint64 {
	var v uint64
	for i, x := range c.b {
		if i == 9 && x > 1 {
			break // more than 64 bits
		}
		v |= uint64(x&0x7f) << (7 * i)
		if x < 0x80 {
			c.b = c.b[i+1:]
			return v
		}
	}
	c.bad, c.b = true, nil
	return 0
}

func zigzag(v int64) uint64 { return uint64(v)<<1 ^ uint64(v>>63) }
func signed(v uint64) int64 { return int64(v>>1) ^ -int64(v&1) }

func appendUvarint(b []byte, v uint64) []byte {
	for v >= 0x80 {
		b = append(b, byte(v)|0x80)
		v >>= 7
	}
	return append(b, byte(v))
}

func appendU32(b []byte, v uint32) []byte {
	return append(b, byte(v), byte(v>>8), byte(v>>16), byte(v>>24))
}

func u32(b []byte) uint32 {
	return uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16 | uint32(b[3])<<24
}
